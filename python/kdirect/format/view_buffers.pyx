# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The memory that views point into.

It owns the window from which a decoder takes batches now, and the data buffers that its pending
views refer to by number, each with the object that keeps its memory.  What a view is, is in
views.h; which values become views is decided in `records`.

Invariants
- A data buffer begins with a batch that was taken and ends with one, and all between is in windows
  of one owner.  So Arrow is shown no byte that no owner has promised to keep.
- Views address a data buffer by 31 bits: it is never longer than that.
- An owner is referenced by the window, which ends with the call that takes from it, and by data
  buffers.  Arrays keep the data buffers that they were made with, and nothing else does.
"""

import pyarrow as pa

from libc.stdint cimport INT32_MAX, uint8_t, uint64_t, uintptr_t

from kdirect.blocks cimport Block
from kdirect.errors import ConfigError
from kdirect.format.arrays cimport fitting

_HINT = (
    "declare a window before each call (c_window, window), or give feed_address the owner that"
    " keeps the memory; feed does it by itself")


cdef class ViewBuffer:
    """A data buffer: [base, end) has the batches that were taken, and [base, reach) is memory of
    `owner`."""


cdef class ViewBuffers:
    """The window and the data buffers of one decoder.  Used by one thread at a time."""

    def __cinit__(self):
        self.limit = NULL
        self._clear()

    cdef _clear(self):
        self.buffers = []
        self.latest = {}
        self.current = None

    cdef int open(self, const uint8_t* base, uint64_t length, object owner) except -1:
        cdef ViewBuffer found
        if owner is None:
            raise ConfigError("a decoder of views was given memory without an owner",
                              hint="give the object that keeps the memory while it is referenced")
        if length > <uint64_t>-1 - <uintptr_t>base:
            raise ConfigError(f"a window of {length} bytes at {<uintptr_t>base:#x} wraps around",
                              hint="give the address and the length of memory that exists")
        self.close(NULL)
        self.owner = owner
        self.base = base
        self.end = base + length
        found = self.latest.get(id(owner))
        if found is not None and found.base <= base <= found.reach:
            found.reach = max(found.reach, self.end)
            self._use(found)
        return 0

    cdef _use(self, ViewBuffer buffer):
        self.current = buffer
        self.limit = buffer.base + INT32_MAX

    cdef int check(self, const uint8_t* data, size_t n) except -1:
        if self.owner is None:
            raise ConfigError("a decoder of views was fed bytes that no window declares",
                              hint=_HINT)
        if data < self.base or data > self.end or n > <size_t>(self.end - data):
            raise ConfigError(
                f"{n} bytes at {<uintptr_t>data:#x} leave the window of {self.end - self.base}"
                f" bytes at {<uintptr_t>self.base:#x}", hint=_HINT)
        return 0

    cdef ViewBuffer admit(self, const uint8_t* p, const uint8_t* taken_end):
        cdef ViewBuffer buffer
        self._taken(taken_end)
        buffer = self.add(p, 0, self.owner)
        buffer.reach = self.end
        self.latest[id(self.owner)] = buffer
        self._use(buffer)
        return buffer

    cdef ViewBuffer add(self, const uint8_t* base, uint64_t length, object owner):
        cdef ViewBuffer buffer = ViewBuffer.__new__(ViewBuffer)
        buffer.number = <int>len(self.buffers)
        buffer.base = base
        buffer.end = buffer.reach = base + length
        buffer.owner = owner
        self.buffers.append(buffer)
        return buffer

    cdef void _taken(self, const uint8_t* end):
        if self.current is not None and end > self.current.end:
            self.current.end = end

    cdef void close(self, const uint8_t* taken_end):
        self._taken(taken_end)
        self.current = None
        self.owner = None
        self.base = self.end = self.limit = NULL

    cdef list take(self):
        cdef ViewBuffer buffer
        cdef list out = []
        for buffer in self.buffers:
            out.append(pa.foreign_buffer(<uintptr_t>buffer.base, buffer.end - buffer.base,
                                         buffer.owner))
        return out


cdef object kept(object plain):
    cdef Block block, smaller
    if isinstance(plain, memoryview) and isinstance(plain.obj, Block):
        block = plain.obj
        smaller = fitting(block, len(plain))
        if smaller is not block:
            return memoryview(smaller)[:len(plain)]
    return plain
