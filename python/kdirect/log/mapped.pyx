# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Mapped files: mappings, views with a life of their own, and search in mapped segments and indexes.

Law of the room: the functions here take an address and bounds, and never read outside them, whatever the
bytes say.  They change nothing: changing a head is the commit kernel's, changing a file's length is
`kdirect.log.segment`'s.  No function knows a path.

Whoever passes an address guarantees that it stays mapped for the call: segments by `acquire`.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EINTR, ENOMEM, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from posix.mman cimport MAP_FAILED, PROT_READ, PROT_WRITE, mprotect, munmap

from kdirect.format.batch cimport (
    BATCH_BAD_CRC, BATCH_BAD_LENGTH, BATCH_BAD_MAGIC, BATCH_OK, BATCH_TRUNCATED, batch_info, check_batch_crc, parse_batch_header)
from kdirect.format.layout cimport (
    BATCH_LENGTH, BATCH_LENGTH_PREFIX_BYTES, OFFSET_INDEX_ENTRY_BYTES, TIME_INDEX_ENTRY_BYTES)
from kdirect.log.kernel cimport CommitKernel

import os
from typing import NamedTuple

from kdirect.errors import LogError

cdef extern from "<fcntl.h>" nogil:
    int FALLOC_FL_KEEP_SIZE
    int FALLOC_FL_PUNCH_HOLE
    int fallocate(int fd, int mode, int64_t offset, int64_t length)

cdef extern from "<sys/mman.h>" nogil:
    """
    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #define MADV_POPULATE_WRITE 23
    #endif
    """
    int MADV_POPULATE_READ
    int MADV_POPULATE_WRITE
    int madvise(void* address, size_t length, int advice)

cdef extern from "huge_map.h" nogil:
    void* kd_map_shared(int fd, size_t length, int protection, int64_t position)
    int kd_allocate_huge(int fd, size_t length)

cdef extern from "wire.h" nogil:
    uint32_t kd_get32(const uint8_t* p)
    uint64_t kd_get64(const uint8_t* p)
    void kd_put32(uint8_t* p, uint32_t v)
    void kd_put64(uint8_t* p, uint64_t v)


# -- mappings ---------------------------------------------------------------------------------------------

cdef class Mapping:
    """`length` bytes of a descriptor from its start, mapped shared.  `unmap()` ends it (as does the last
    reference); the descriptor may be closed before.  `address` is 0 once unmapped, or for length 0."""

    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly bint writable

    def __cinit__(self, int fd, uint64_t length, *, bint writable=False):
        cdef void* p
        cdef int protection = (PROT_READ | PROT_WRITE) if writable else PROT_READ
        self.length = length
        self.writable = writable
        if length == 0:
            return
        with nogil:
            p = kd_map_shared(fd, length, protection, 0)
        if p == MAP_FAILED:
            raise LogError(f"cannot map {length} bytes of a segment ({os.strerror(errno)})",
                           hint="raise the address-space limit (ulimit -v) or vm.max_map_count, or use fewer partitions")
        self.address = <uint64_t> <uintptr_t> p

    def make_writable(self):
        """Allow writes through this mapping; its address stays."""
        if self.writable or not self.address:
            return
        if mprotect(<void*> <uintptr_t> self.address, self.length, PROT_READ | PROT_WRITE) != 0:
            raise LogError(f"cannot make a mapped segment writable ({os.strerror(errno)})", hint="check the file's permissions")
        self.writable = True

    def populate(self, uint64_t position, uint64_t length, *, bint dirty):
        """Fault in the pages of [position, position + length), which must begin at a page; with `dirty`, for writing
        (the next fsync of the file writes them all).  Best effort: kernels before 5.14 cannot."""
        cdef uint8_t* p = <uint8_t*> <uintptr_t> self.address
        cdef int advice = MADV_POPULATE_WRITE if dirty and self.writable else MADV_POPULATE_READ
        if p != NULL and position < self.length:
            length = min(length, self.length - position)
            with nogil:
                madvise(p + position, length, advice)

    def unmap(self):
        cdef void* p = <void*> <uintptr_t> self.address
        if p != NULL:
            self.address = 0
            with nogil:
                munmap(p, self.length)

    def __dealloc__(self):
        if self.address:
            munmap(<void*> <uintptr_t> self.address, self.length)


@cython.no_gc
cdef class MappedBytes:
    """Read-only buffer over mapped bytes.  `owner` was acquired for it and is released with it, so the
    bytes stay mapped while anyone holds the buffer or a memoryview of it."""

    cdef object _owner
    cdef uint64_t _address
    cdef Py_ssize_t _length

    def __cinit__(self, owner, uint64_t address, Py_ssize_t length):
        self._owner = owner
        self._address = address
        self._length = length

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, <void*> <uintptr_t> self._address, self._length, 1, flags)

    def __len__(self):
        return self._length

    def __dealloc__(self):
        if self._owner is not None:
            self._owner.release()


def copy_bytes(uint64_t address, Py_ssize_t length):
    """The bytes at an address, as `bytes`."""
    return PyBytes_FromStringAndSize(<const char*> <uintptr_t> address, length)


def allocate_huge(int fd, int64_t length):
    """Make a file on a tmpfs at least `length` bytes long, and give so much of it huge pages (2 MiB) as far as they are to
    be had, also where the file system is not mounted for them (Linux 6.1 and later).  0, or an errno: then there are small pages or
    holes.  Never more than an attempt: `os.posix_fallocate` sees to the rest."""
    cdef int rc
    with nogil:
        rc = kd_allocate_huge(fd, <size_t> length)
    return rc


def punch_hole(int fd, int64_t position, int64_t length):
    """Free [position, position + length) of a file, keeping its length: it reads as zeros.  False when the
    file system cannot (then nothing changed)."""
    cdef int rc
    if length <= 0:
        return True
    while True:
        with nogil:
            rc = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, position, length)
        if rc == 0:
            return True
        if errno != EINTR:
            return False


# -- search in a segment ------------------------------------------------------------------------------------

cdef inline bint _is_batch(const uint8_t* data, uint64_t at, uint64_t end, batch_info* info) noexcept nogil:
    """A whole batch frame lies at `at`, before `end`."""
    return at < end and parse_batch_header(data + at, end - at, info) == BATCH_OK and info.size <= end - at


def find_batch(uint64_t address, uint64_t start, uint64_t end, int64_t offset):
    """The first batch of [start, end) whose last offset is `offset` or higher:
    (position, size, base offset, next offset), or None.  `start` must be the start of a batch."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef batch_info info
    cdef uint64_t at = start
    cdef bint found = False
    with nogil:
        while _is_batch(data, at, end, &info):
            if info.base_offset + info.last_offset_delta >= offset:
                found = True
                break
            at += info.size
    if not found:
        return None
    return at, info.size, info.base_offset, info.base_offset + info.last_offset_delta + 1


def find_timestamp(uint64_t address, uint64_t start, uint64_t end, int64_t timestamp, int64_t from_offset):
    """The first batch of [start, end) that holds a record of `timestamp` or later at `from_offset` or
    higher: (position, size, base offset, next offset), or None."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef batch_info info
    cdef uint64_t at = start
    cdef bint found = False
    with nogil:
        while _is_batch(data, at, end, &info):
            if info.max_timestamp >= timestamp and info.base_offset + info.last_offset_delta >= from_offset:
                found = True
                break
            at += info.size
    if not found:
        return None
    return at, info.size, info.base_offset, info.base_offset + info.last_offset_delta + 1


def whole_batches(uint64_t address, uint64_t start, uint64_t limit, uint64_t end):
    """Position after the last whole batch of [start, end) that ends at `limit` or before; `start` when
    there is none."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef batch_info info
    cdef uint64_t at = start
    if limit > end:
        limit = end
    with nogil:
        while _is_batch(data, at, limit, &info):
            at += info.size
    return at


def last_batch(uint64_t address, uint64_t start, uint64_t end):
    """Walk frames from `start`: (position after the last whole batch, its next offset), or (start, -1)."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef batch_info info
    cdef uint64_t at = start
    cdef int64_t next_offset = -1
    with nogil:
        while _is_batch(data, at, end, &info):
            if info.base_offset < next_offset:
                break  # never written by this log; one that is higher stands behind what compaction has removed
            next_offset = info.base_offset + info.last_offset_delta + 1
            at += info.size
    return at, next_offset


def first_timestamp(uint64_t address, uint64_t end):
    """Largest timestamp of the first batch, -1 when there is none."""
    cdef batch_info info
    if not _is_batch(<const uint8_t*> <uintptr_t> address, 0, end, &info):
        return -1
    return info.max_timestamp


def restore_producers(CommitKernel kernel, uint64_t address, uint64_t start, uint64_t end, int64_t from_offset, int64_t now_ms):
    """Note the batches of [start, end) at `from_offset` or higher in the kernel's producer table."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef batch_info info
    cdef uint64_t at = start
    cdef int error = 0
    with nogil:
        while error == 0 and _is_batch(data, at, end, &info):
            if info.base_offset >= from_offset:
                error = kernel.c_restore_batch(&info, now_ms)
            at += info.size
    if error:
        raise MemoryError()


# -- search in indexes -----------------------------------------------------------------------------------------

def search_offset_index(uint64_t address, uint32_t entries, int64_t relative_offset):
    """Of the last entry at `relative_offset` or below: its position; 0 when there is none."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef uint32_t low = 0, high = entries, middle
    while low < high:
        middle = low + (high - low) // 2
        if <int64_t> kd_get32(data + <size_t> middle * OFFSET_INDEX_ENTRY_BYTES) <= relative_offset:
            low = middle + 1
        else:
            high = middle
    return kd_get32(data + <size_t> (low - 1) * OFFSET_INDEX_ENTRY_BYTES + 4) if low else 0


def search_offset_index_position(uint64_t address, uint32_t entries, uint64_t position):
    """The largest position of an entry that is `position` or smaller; 0 when there is none."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef uint32_t low = 0, high = entries, middle
    while low < high:
        middle = low + (high - low) // 2
        if kd_get32(data + <size_t> middle * OFFSET_INDEX_ENTRY_BYTES + 4) <= position:
            low = middle + 1
        else:
            high = middle
    return kd_get32(data + <size_t> (low - 1) * OFFSET_INDEX_ENTRY_BYTES + 4) if low else 0


def search_time_index(uint64_t address, uint32_t entries, int64_t timestamp):
    """Of the last entry whose timestamp is smaller than `timestamp`: its relative offset; 0 when there is
    none.  Every record up to that offset is older than `timestamp`."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef uint32_t low = 0, high = entries, middle
    while low < high:
        middle = low + (high - low) // 2
        if <int64_t> kd_get64(data + <size_t> middle * TIME_INDEX_ENTRY_BYTES) < timestamp:
            low = middle + 1
        else:
            high = middle
    return kd_get32(data + <size_t> (low - 1) * TIME_INDEX_ENTRY_BYTES + 8) if low else 0


def time_index_entry(uint64_t address, uint32_t i):
    """(timestamp, relative offset) of entry `i`."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address + <size_t> i * TIME_INDEX_ENTRY_BYTES
    return <int64_t> kd_get64(data), kd_get32(data + 8)


def offset_index_entry(uint64_t address, uint32_t i):
    """(relative offset, position) of entry `i`."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address + <size_t> i * OFFSET_INDEX_ENTRY_BYTES
    return kd_get32(data), kd_get32(data + 4)


def indexes_are_sane(uint64_t offset_address, uint32_t offset_entries, uint64_t time_address, uint32_t time_entries, uint64_t size,
                     int64_t end_relative_offset):
    """Entries rise strictly and stay within a segment of `size` bytes and `end_relative_offset` offsets."""
    cdef const uint8_t* data
    cdef int64_t offset, position, timestamp, last_offset = -1, last_position = -1, last_timestamp = -2
    cdef uint32_t i
    data = <const uint8_t*> <uintptr_t> offset_address
    for i in range(offset_entries):
        offset = kd_get32(data + <size_t> i * OFFSET_INDEX_ENTRY_BYTES)
        position = kd_get32(data + <size_t> i * OFFSET_INDEX_ENTRY_BYTES + 4)
        if offset <= last_offset or position <= last_position or offset >= end_relative_offset or position >= <int64_t> size:
            return False
        last_offset = offset
        last_position = position
    last_offset = -1
    data = <const uint8_t*> <uintptr_t> time_address
    for i in range(time_entries):
        timestamp = <int64_t> kd_get64(data + <size_t> i * TIME_INDEX_ENTRY_BYTES)
        offset = kd_get32(data + <size_t> i * TIME_INDEX_ENTRY_BYTES + 8)
        if timestamp <= last_timestamp or offset < last_offset or offset >= end_relative_offset:
            return False
        last_timestamp = timestamp
        last_offset = offset
    return True


# -- recovery ------------------------------------------------------------------------------------------------------

class ScannedSegment(NamedTuple):
    """What `scan_segment` found: the first `size` bytes are good and end before offset `end_offset`.  `reason`
    is empty when nothing but zeros or the end of the file follows, else why the scan stopped there."""

    size: int
    end_offset: int
    first_timestamp: int
    max_timestamp: int
    max_timestamp_offset: int
    offset_index: bytes
    time_index: bytes
    reason: str


cdef struct growing:
    uint8_t* data
    size_t length
    size_t capacity


cdef uint8_t* _grow(growing* g, size_t n) noexcept nogil:
    cdef uint8_t* grown
    cdef size_t capacity
    if g.length + n > g.capacity:
        capacity = g.capacity * 2 if g.capacity else 4096
        grown = <uint8_t*> realloc(g.data, capacity)
        if grown == NULL:
            return NULL
        g.data = grown
        g.capacity = capacity
    g.length += n
    return g.data + g.length - n


def scan_segment(uint64_t address, uint64_t length, int64_t base_offset, int64_t check_crc_from, uint32_t index_interval_bytes):
    """Walk the batches of a segment file of `length` bytes that should begin at `base_offset`.

    Stops at the first batch whose length, magic or base offset is wrong, that was never committed (no
    leader epoch), or, for offsets of `check_crc_from` and above, whose CRC fails.  Rebuilds both indexes as
    the commit kernel would have written them."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef batch_info info
    cdef growing offsets, times
    cdef uint8_t* entry
    cdef uint64_t at = 0, since_index = 0
    cdef int64_t next_offset = base_offset, first_time = -1, max_time = -1, max_time_offset = base_offset, indexed_time = -1, last
    cdef int error = BATCH_OK
    cdef bint ended = False, gap = False, uncommitted = False, no_memory = False
    offsets.data = times.data = NULL
    offsets.length = times.length = offsets.capacity = times.capacity = 0
    try:
        with nogil:
            while at < length:
                if length - at >= BATCH_LENGTH_PREFIX_BYTES and kd_get32(data + at + BATCH_LENGTH) == 0:
                    ended = True
                    break
                error = parse_batch_header(data + at, length - at, &info)
                if error == BATCH_OK and info.size > length - at:
                    error = BATCH_TRUNCATED
                if error != BATCH_OK:
                    break
                last = info.base_offset + info.last_offset_delta
                if info.base_offset != next_offset or info.last_offset_delta < 0 or last - base_offset > 0x7FFFFFFF:
                    gap = True
                    break
                if info.leader_epoch < 0:
                    uncommitted = True
                    break
                if last >= check_crc_from:
                    error = check_batch_crc(data + at, length - at, &info)
                    if error != BATCH_OK:
                        break
                if at == 0:
                    first_time = info.max_timestamp
                if info.max_timestamp > max_time:
                    max_time = info.max_timestamp
                    max_time_offset = last
                if since_index > index_interval_bytes:
                    entry = _grow(&offsets, OFFSET_INDEX_ENTRY_BYTES)
                    if entry == NULL:
                        no_memory = True
                        break
                    kd_put32(entry, <uint32_t> (last - base_offset))
                    kd_put32(entry + 4, <uint32_t> at)
                    if max_time > indexed_time:
                        entry = _grow(&times, TIME_INDEX_ENTRY_BYTES)
                        if entry == NULL:
                            no_memory = True
                            break
                        kd_put64(entry, <uint64_t> max_time)
                        kd_put32(entry + 8, <uint32_t> (max_time_offset - base_offset))
                        indexed_time = max_time
                    since_index = 0
                since_index += info.size
                at += info.size
                next_offset = last + 1
            if max_time > indexed_time and not no_memory:
                entry = _grow(&times, TIME_INDEX_ENTRY_BYTES)
                if entry == NULL:
                    no_memory = True
                else:
                    kd_put64(entry, <uint64_t> max_time)
                    kd_put32(entry + 8, <uint32_t> (max_time_offset - base_offset))
        if no_memory:
            raise MemoryError()
        reason = ""
        if gap:
            reason = f"a batch of base offset {info.base_offset} where {next_offset} was expected"
        elif uncommitted:
            reason = "a batch that was never committed"
        elif error == BATCH_TRUNCATED:
            reason = "a batch that is longer than the file"
        elif error == BATCH_BAD_CRC:
            reason = "a batch whose CRC is wrong"
        elif error == BATCH_BAD_MAGIC:
            reason = "a batch of unknown magic"
        elif error != BATCH_OK:
            reason = "a batch of impossible length"
        return ScannedSegment(at, next_offset, first_time, max_time, max_time_offset,
                              PyBytes_FromStringAndSize(<char*> offsets.data, offsets.length),
                              PyBytes_FromStringAndSize(<char*> times.data, times.length), reason)
    finally:
        free(offsets.data)
        free(times.data)
