# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Mapped files: mappings, views with a life of their own, and search in mapped segments and
indexes.

Law of the room: the functions here take an address and bounds, and never read outside them,
whatever the bytes say.  They change nothing: changing a head is the commit kernel's, changing a
file's length is `kdirect.log.segment`'s.  No function knows a path.

Whoever passes an address guarantees that it stays mapped for the call: segments by `acquire`.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from posix.mman cimport MAP_FAILED, PROT_READ, PROT_WRITE, mprotect, munmap

from kdirect.format.batch cimport (
    BATCH_BAD_CRC, BATCH_OK, BATCH_TRUNCATED, batch_info, check_batch_crc, parse_batch_header)
from kdirect.format.chain cimport (
    CHAIN_CUT, CHAIN_OK, chain_t, chain_text, follow_batch, follow_batches, start_chain)
from kdirect.format.layout cimport (
    ATTRIBUTE_CONTROL, ATTRIBUTE_TRANSACTIONAL, OFFSET_INDEX_ENTRY_BYTES, TIME_INDEX_ENTRY_BYTES)
from kdirect.log.kernel cimport CommitKernel

import os
from typing import NamedTuple

from kdirect.errors import LogError

cdef extern from "<fcntl.h>" nogil:
    int FALLOC_FL_KEEP_SIZE
    int FALLOC_FL_PUNCH_HOLE
    int fallocate(int fd, int mode, int64_t offset, int64_t length)

cdef extern from "<unistd.h>" nogil:
    int syncfs(int fd)

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
    int mincore(void* address, size_t length, unsigned char* vec)

cdef enum:
    PAGE_BYTES = 4096
    RESIDENT_PAGES = 1024  # asked for at once

cdef extern from "huge_map.h" nogil:
    void* kd_map_shared(int fd, size_t length, int protection, int64_t position)

from kdirect.format.wire cimport kd_get32, kd_get64


# -- mappings --------------------------------------------------------------------------------------

cdef class Mapping:
    """`length` bytes of a descriptor from its start, mapped shared.  `unmap()` ends it (as does the
    last reference); the descriptor may be closed before.  `address` is 0 once unmapped, or for
    length 0."""

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
                           hint="raise the address-space limit (ulimit -v) or vm.max_map_count,"
                           " or use fewer partitions")
        self.address = <uint64_t> <uintptr_t> p

    def make_writable(self):
        """Allow writes through this mapping; its address stays."""
        if self.writable or not self.address:
            return
        if mprotect(<void*> <uintptr_t> self.address, self.length, PROT_READ | PROT_WRITE) != 0:
            raise LogError(f"cannot make a mapped segment writable ({os.strerror(errno)})",
                           hint="check the file's permissions")
        self.writable = True

    def populate(self, uint64_t position, uint64_t length, *, bint dirty):
        """Fault in the pages of [position, position + length), which must begin at a page; with
        `dirty`, for writing (the next fsync of the file writes them all).  Best effort: kernels
        before 5.14 cannot."""
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
    """Read-only buffer over mapped bytes.  `owner` was acquired for it and is released with it, so
    the bytes stay mapped while anyone holds the buffer or a memoryview of it.  `release(owner)`, on
    the thread that drops the last of them, stands in for `owner.release()`, which may do file work.
    """

    cdef object _owner
    cdef object _release
    cdef uint64_t _address
    cdef Py_ssize_t _length

    def __cinit__(self, owner, uint64_t address, Py_ssize_t length, release=None):
        self._owner = owner
        self._release = release
        self._address = address
        self._length = length

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, <void*> <uintptr_t> self._address, self._length, 1, flags)

    def __len__(self):
        return self._length

    def is_resident(self):
        """See the function."""
        return is_resident(self._address, self._length)

    def fault_in(self):
        """See the function."""
        fault_in(self._address, self._length)

    def __dealloc__(self):
        if self._release is not None:
            self._release(self._owner)
        elif self._owner is not None:
            self._owner.release()


def copy_bytes(uint64_t address, Py_ssize_t length):
    """The bytes at an address, as `bytes`."""
    return PyBytes_FromStringAndSize(<const char*> <uintptr_t> address, length)


def is_resident(uint64_t address, uint64_t length):
    """Are the pages of mapped bytes in memory, so that reading them does not wait for a disk?  True
    where the kernel does not tell: it does for files that we may write."""
    cdef unsigned char found[RESIDENT_PAGES]
    cdef uint64_t at = address & ~<uint64_t> (PAGE_BYTES - 1)
    cdef uint64_t end = address + length
    cdef uint64_t piece, i
    cdef bint resident = True
    with nogil:
        while resident and at < end:
            piece = min(end - at, <uint64_t> RESIDENT_PAGES * PAGE_BYTES)
            if mincore(<void*> <uintptr_t> at, piece, found) != 0:
                break
            for i in range((piece + PAGE_BYTES - 1) // PAGE_BYTES):
                if not found[i] & 1:
                    resident = False
                    break
            at += piece
    return resident


def fault_in(uint64_t address, uint64_t length):
    """Bring the pages of mapped bytes into memory, and wait for them."""
    cdef uint64_t at = address & ~<uint64_t> (PAGE_BYTES - 1)
    cdef uint64_t end = address + length
    cdef uint8_t seen = 0
    with nogil:
        if length and madvise(<void*> <uintptr_t> at, end - at, MADV_POPULATE_READ) != 0:
            # Kernels before 5.14.
            while at < end:
                seen |= (<volatile uint8_t*> <uintptr_t> at)[0]
                at += PAGE_BYTES


def punch_hole(int fd, int64_t position, int64_t length):
    """Free [position, position + length) of a file, keeping its length: it reads as zeros.  False
    when the file system cannot (then nothing changed)."""
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


def sync_file_system(int fd):
    """Put on disk whatever the file system of `fd` has in memory; OSError when some of it could not
    be written."""
    cdef int rc
    with nogil:
        rc = syncfs(fd)
    if rc != 0:
        raise OSError(errno, os.strerror(errno))


# -- search in a segment ---------------------------------------------------------------------------

class Chain(NamedTuple):
    """What is known of the batches from a position on; see `kdirect.format.chain`.  `next_offset`
    is the base offset of the first, -1 when it is not known: then it ends with offset `indexed`, as
    the index says, or, below `dense_from`, does not begin after it."""

    next_offset: int
    dense_from: int
    end_offset: int = (1 << 63) - 1
    indexed: int = -1
    least_epoch: int = 0
    greatest_epoch: int = (1 << 31) - 1


class Walk(NamedTuple):
    """Where a walk from batch to batch ended.  `size` 0: what was looked for is not there.  Unless
    `fault` is empty it says what is wrong with the batch at `position`, which does not continue the
    log where offset `next_offset` should be."""

    position: int
    size: int
    base_offset: int
    next_offset: int
    fault: str


cdef enum:
    # in addition to the codes of `kdirect.format.chain`
    INDEX_IS_WRONG = 50        # the first batch is not the one that the index names
    RECORDS_ARE_MISSING = 51   # the file ends before the offset looked for


cdef inline bint _is_batch(const uint8_t* data, uint64_t at, uint64_t end,
                           batch_info* info) noexcept nogil:
    """A whole batch frame lies at `at`, before `end`."""
    return (at < end and parse_batch_header(data + at, end - at, info) == BATCH_OK
            and info.size <= end - at)


cdef struct walk_t:
    chain_t chain
    int64_t indexed            # -1: the first batch has been looked at, or is known
    const uint8_t* data
    uint64_t at
    uint64_t end
    int64_t before             # position of the batch before `at`, -1 when none was followed
    int64_t before_offset      # where that one begins
    batch_info info


cdef int _start(walk_t* w, uint64_t address, uint64_t start, uint64_t end, known) except -1:
    start_chain(&w.chain)
    (w.chain.next_offset, w.chain.dense_from, w.chain.end_offset, w.indexed, w.chain.least_epoch,
     w.chain.greatest_epoch) = known
    w.data = <const uint8_t*> <uintptr_t> address
    w.at = start
    w.end = end
    w.before = -1
    return 0


cdef int _follow(walk_t* w, bint check_crc) noexcept nogil:
    """CHAIN_OK: the batch at `at` is in `info`, and the chain is after it.  `at` stays."""
    cdef int code
    cdef const uint8_t* p = w.data + w.at
    if check_crc:
        code = check_batch_crc(p, w.end - w.at, &w.info)
    else:
        code = parse_batch_header(p, w.end - w.at, &w.info)
    if code == BATCH_TRUNCATED or (code == BATCH_OK and w.info.size > w.end - w.at):
        return CHAIN_CUT
    if code != BATCH_OK:
        return code
    if w.indexed >= 0:
        if w.info.base_offset > w.indexed or (
                w.info.base_offset >= w.chain.dense_from
                and w.info.base_offset + w.info.last_offset_delta != w.indexed):
            return INDEX_IS_WRONG
        w.indexed = -1
    return follow_batch(&w.chain, &w.info)


cdef void _step(walk_t* w) noexcept nogil:
    """The batch in `info` is done with."""
    w.before = <int64_t> w.at
    w.before_offset = w.info.base_offset
    w.at += w.info.size


cdef object _walked(walk_t* w, int code, bint found):
    """What was found; `code` is why the walk ended.  When that is a fault it may be that of the
    batch before: of its length, or of its offsets, which only its CRC tells."""
    cdef batch_info before
    if code != CHAIN_OK and code != INDEX_IS_WRONG and w.before >= 0:
        if check_batch_crc(w.data + w.before, w.end - <uint64_t> w.before, &before) != BATCH_OK:
            return Walk(w.before, 0, before.base_offset, w.before_offset,
                        chain_text(BATCH_BAD_CRC, &w.chain, &before))
    if code == INDEX_IS_WRONG:
        fault = "is not the one that the index says"
    elif code == RECORDS_ARE_MISSING:
        fault = "is missing"
    else:
        fault = chain_text(code, &w.chain, &w.info) if code != CHAIN_OK else ""
    return Walk(w.at, w.info.size if found else 0, w.info.base_offset, w.chain.next_offset, fault)


def find_batch(uint64_t address, uint64_t start, uint64_t end, int64_t offset, known):
    """Walk to the first batch of [start, end) whose last offset is `offset` or higher.  `start`
    must be the start of a batch."""
    cdef walk_t w
    cdef int code = CHAIN_OK
    cdef bint found = False
    _start(&w, address, start, end, known)
    with nogil:
        while w.at < end:
            code = _follow(&w, False)
            if code != CHAIN_OK:
                break
            if w.chain.next_offset > offset:
                found = True
                break
            _step(&w)
        if code == CHAIN_OK and not found and w.chain.dense_from <= offset < w.chain.end_offset:
            code = RECORDS_ARE_MISSING
    return _walked(&w, code, found)


def find_timestamp(uint64_t address, uint64_t start, uint64_t end, int64_t timestamp,
                   int64_t from_offset, known):
    """Walk to the first batch of [start, end) that holds a record of `timestamp` or later at
    `from_offset` or higher.  CRCs are checked, for what a batch says of its timestamps decides
    whether it is looked into."""
    cdef walk_t w
    cdef int code = CHAIN_OK
    cdef bint found = False
    _start(&w, address, start, end, known)
    with nogil:
        while w.at < end:
            code = _follow(&w, True)
            if code != CHAIN_OK:
                break
            if w.info.max_timestamp >= timestamp and w.chain.next_offset > from_offset:
                found = True
                break
            _step(&w)
    return _walked(&w, code, found)


def count_batches(uint64_t address, uint64_t start, uint64_t end, int64_t from_offset,
                  int64_t stop_offset, uint64_t limit, known, *, bint committed_only=False):
    """(records at the offsets [from_offset, stop_offset) of the batches of [start, end), where the
    walk over them ended: at `limit`, after at least one batch, if that is less).  -1 records: only
    reading tells, because one of the two lies within a batch of which records were removed, or,
    with `committed_only`, because a batch is of a transaction.  `size` is 0 always."""
    cdef walk_t w
    cdef int code = CHAIN_OK
    cdef int64_t records = 0
    cdef int64_t first
    cdef int64_t after
    _start(&w, address, start, end, known)
    with nogil:
        while w.at < end and (w.at < limit or w.at == start):
            code = _follow(&w, False)
            if code != CHAIN_OK:
                break
            if w.info.base_offset >= stop_offset:
                break
            first = w.info.base_offset
            after = first + w.info.last_offset_delta + 1
            if not w.info.attributes & ATTRIBUTE_CONTROL and after > from_offset:
                if committed_only and w.info.attributes & ATTRIBUTE_TRANSACTIONAL:
                    records = -1
                    break
                if w.info.records_count == after - first:
                    records += min(after, stop_offset) - max(first, from_offset)
                else:
                    # Nothing confirms the number but the CRC, and what it leaves open are offsets.
                    code = check_batch_crc(w.data + w.at, end - w.at, &w.info)
                    if code != BATCH_OK:
                        break
                    if w.info.records_count < 0 or w.info.records_count > after - first or (
                            w.info.records_count > 0
                            and (first < from_offset or after > stop_offset)):
                        records = -1
                        break
                    records += w.info.records_count
            _step(&w)
    return records, _walked(&w, code, False)


def whole_batches(uint64_t address, uint64_t start, uint64_t limit, uint64_t end, known, *,
                  bint at_least_one=False):
    """Walk to the end of the last whole batch of [start, end) that ends at `limit` or before; with
    `at_least_one`, of the first one at least.  `size` is 0 always.  `end` is the position of the
    end offset that is `known`."""
    cdef walk_t w
    cdef chain_t chain
    cdef int code
    cdef uint64_t whole = 0
    cdef const uint8_t* p
    _start(&w, address, start, end, known)
    p = w.data + start
    limit = min(limit, end)
    chain = w.chain
    with nogil:
        code = follow_batches(
            &w.chain, p, limit - start if limit > start else 0, end - start, &whole, &w.info)
        if at_least_one and code == CHAIN_OK and whole == 0 and start < end:
            if not _is_batch(w.data, start, end, &w.info):
                code = CHAIN_CUT
            else:
                code = follow_batches(&w.chain, p, w.info.size, end - start, &whole, &w.info)
        if code == CHAIN_OK and start + whole < end and w.chain.next_offset >= chain.end_offset:
            # The last batch reaches to the end offset, but others come after it: the next one tells
            # which of the two is damaged.
            w.chain = chain
            whole = 0
            code = follow_batches(&w.chain, p, end - start, end - start, &whole, &w.info)
    w.at = start + whole
    return _walked(&w, code, False)


def last_batch(uint64_t address, uint64_t start, uint64_t end, known):
    """Walk to the end of the last whole batch of [start, end) that continues the log.  `size` is 0
    always.  The CRC of that batch is checked, for where the log ends is its last offset delta's to
    say."""
    cdef walk_t w
    cdef batch_info last
    cdef int code = CHAIN_OK
    _start(&w, address, start, end, known)
    with nogil:
        while w.at < end:
            code = _follow(&w, False)
            if code != CHAIN_OK:
                break
            _step(&w)
        if code == CHAIN_OK and w.before >= 0:
            if check_batch_crc(w.data + w.before, end - <uint64_t> w.before, &last) != BATCH_OK:
                code = BATCH_BAD_CRC
    return _walked(&w, code, False)


def first_timestamp(uint64_t address, uint64_t end):
    """Largest timestamp of the first batch, -1 when there is none."""
    cdef batch_info info
    if not _is_batch(<const uint8_t*> <uintptr_t> address, 0, end, &info):
        return -1
    return info.max_timestamp


def restore_producers(CommitKernel kernel, uint64_t address, uint64_t start, uint64_t end,
                      int64_t base, int64_t from_offset, int64_t now_ms, known):
    """Walk over [start, end) and note its batches at `from_offset` or higher in the kernel's
    tables of producers and transactions; `base` is the segment's base offset.  CRCs are checked."""
    cdef walk_t w
    cdef int code = CHAIN_OK, error = 0
    _start(&w, address, start, end, known)
    with nogil:
        while error == 0 and w.at < end:
            code = _follow(&w, True)
            if code != CHAIN_OK:
                break
            if w.info.base_offset >= from_offset:
                error = kernel.c_restore_batch(&w.info, w.data + w.at, base, w.at, now_ms)
            w.at += w.info.size
    if error:
        raise MemoryError()
    return _walked(&w, code, False)


# -- search in indexes -----------------------------------------------------------------------------

def search_offset_index(uint64_t address, uint32_t entries, int64_t relative_offset):
    """(position, relative offset) of the last entry at `relative_offset` or below; (0, -1) when
    there is none."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef uint32_t low = 0, high = entries, middle
    while low < high:
        middle = low + (high - low) // 2
        if <int64_t> kd_get32(data + <size_t> middle * OFFSET_INDEX_ENTRY_BYTES) <= relative_offset:
            low = middle + 1
        else:
            high = middle
    return _offset_entry(data, low)


def search_offset_index_position(uint64_t address, uint32_t entries, uint64_t position):
    """(position, relative offset) of the last entry whose position is `position` or smaller; (0,
    -1) when there is none."""
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    cdef uint32_t low = 0, high = entries, middle
    while low < high:
        middle = low + (high - low) // 2
        if kd_get32(data + <size_t> middle * OFFSET_INDEX_ENTRY_BYTES + 4) <= position:
            low = middle + 1
        else:
            high = middle
    return _offset_entry(data, low)


cdef object _offset_entry(const uint8_t* data, uint32_t after):
    if after == 0:
        return 0, -1
    data += <size_t> (after - 1) * OFFSET_INDEX_ENTRY_BYTES
    return kd_get32(data + 4), kd_get32(data)


def search_time_index(uint64_t address, uint32_t entries, int64_t timestamp):
    """Of the last entry whose timestamp is smaller than `timestamp`: its relative offset; 0 when
    there is none.  Every record up to that offset is older than `timestamp`."""
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
    cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
    data += <size_t> i * TIME_INDEX_ENTRY_BYTES
    return <int64_t> kd_get64(data), kd_get32(data + 8)


def indexes_are_sane(uint64_t offset_address, uint32_t offset_entries, uint64_t time_address,
                     uint32_t time_entries, uint64_t size, int64_t end_relative_offset):
    """Entries rise strictly and stay within a segment of `size` bytes and `end_relative_offset`
    offsets."""
    cdef const uint8_t* data
    cdef int64_t offset, position, timestamp
    cdef int64_t last_offset = -1, last_position = -1, last_timestamp = -2
    cdef uint32_t i
    data = <const uint8_t*> <uintptr_t> offset_address
    for i in range(offset_entries):
        offset = kd_get32(data + <size_t> i * OFFSET_INDEX_ENTRY_BYTES)
        position = kd_get32(data + <size_t> i * OFFSET_INDEX_ENTRY_BYTES + 4)
        if offset <= last_offset or position <= last_position:
            return False
        if offset >= end_relative_offset or position >= <int64_t> size:
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
