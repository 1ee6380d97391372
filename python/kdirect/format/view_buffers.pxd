"""C interface of view_buffers.pyx."""
from libc.stdint cimport uint8_t, uint64_t

cdef class ViewBuffer:
    cdef int number
    cdef const uint8_t* base
    cdef const uint8_t* end
    cdef const uint8_t* reach
    cdef object owner

cdef class ViewBuffers:
    cdef list buffers
    cdef dict latest                # id(owner) -> the last data buffer in its memory
    cdef ViewBuffer current         # that of the window; None: no batch was taken from it yet
    cdef object owner               # of the window; None: there is no window
    cdef const uint8_t* base        # the window
    cdef const uint8_t* end
    cdef const uint8_t* limit       # a batch that ends after this is not within `current`

    cdef _clear(self)
    cdef _use(self, ViewBuffer buffer)
    cdef int open(self, const uint8_t* base, uint64_t length, object owner) except -1
    # Begin a window; a data buffer of the same owner goes on where the window continues it.
    cdef int check(self, const uint8_t* data, size_t n) except -1
    # ConfigError unless [data, data + n) lies in the window.
    cdef ViewBuffer admit(self, const uint8_t* p, const uint8_t* taken_end)
    # A data buffer of the window that begins with the batch at p.  Of the present one, bytes were
    # taken up to `taken_end` (NULL: none since `open`).
    cdef ViewBuffer add(self, const uint8_t* base, uint64_t length, object owner)
    # A data buffer of its own, all of which is taken.
    cdef void _taken(self, const uint8_t* end)
    cdef void close(self, const uint8_t* taken_end)
    # End the window.  See `admit` for `taken_end`.
    cdef list take(self)
    # The data buffers for Arrow, in the order of their numbers.

cdef object kept(object plain)
# `plain`, which a Decompressor returned; a copy of it if it would keep a much larger block.
