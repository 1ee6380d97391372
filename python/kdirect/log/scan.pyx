# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Reading a segment file from its start: up to where it is good, and the indexes that belong to it.

Law of the room: a scan takes an address and a length, never reads outside them, whatever the bytes
say, and changes nothing.  Whoever passes the address keeps it mapped for the call.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t)
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from kdirect.format.batch cimport (
    BATCH_BAD_CRC, BATCH_BAD_LENGTH, BATCH_BAD_MAGIC, BATCH_OK, BATCH_TRUNCATED, batch_info,
    check_batch_crc, parse_batch_header)
from kdirect.format.layout cimport (
    BATCH_HEADER_BYTES, BATCH_LENGTH, BATCH_LENGTH_PREFIX_BYTES, BATCH_MAGIC,
    OFFSET_INDEX_ENTRY_BYTES, TIME_INDEX_ENTRY_BYTES)
from kdirect.format.wire cimport kd_get32, kd_get8, kd_put32, kd_put64

from typing import NamedTuple

cdef enum:
    # why a scan ends, in addition to the codes of a batch's frame and CRC
    END_OF_RECORDS = 100       # nothing but zeros, or nothing, follows
    GAP = 101                  # not the next offset, where none can be missing
    UNCOMMITTED = 102          # no leader epoch
    BAD_EPOCH = 103
    NO_MEMORY = 104


class ScannedSegment(NamedTuple):
    """What `scan_segment` found: the first `size` bytes are good and end before offset
    `end_offset`.  `reason` is empty when nothing but zeros or the end of the file follows, else why
    the scan stopped there."""

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


cdef struct scan_t:
    const uint8_t* data
    uint64_t length
    uint64_t at               # everything below is good
    int64_t base_offset
    int64_t next_offset
    # what is checked
    int64_t check_crc_from
    int64_t dense_from
    int32_t least_epoch
    int32_t greatest_epoch
    int64_t newest_from
    # what is found
    int64_t first_timestamp
    int64_t max_timestamp
    int64_t max_timestamp_offset
    batch_info info           # of the batch at `at`
    # the indexes that the commit kernel would have written
    uint32_t interval
    uint64_t since_index
    int64_t indexed_timestamp
    growing offsets
    growing times


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


cdef int _check(scan_t* s) noexcept nogil:
    """BATCH_OK: a batch that continues the log lies at `at`, and is in `info`; else why not."""
    cdef const uint8_t* p = s.data + s.at
    cdef uint64_t left = s.length - s.at
    cdef batch_info* b = &s.info
    cdef int64_t last
    cdef int error
    if left >= BATCH_LENGTH_PREFIX_BYTES and kd_get32(p + BATCH_LENGTH) == 0:
        # Zeros are bytes that were never written; a header with a length of 0 is a damaged batch.
        if left < BATCH_HEADER_BYTES or kd_get8(p + BATCH_MAGIC) == 0:
            return END_OF_RECORDS
        return BATCH_BAD_LENGTH
    error = parse_batch_header(p, left, b)
    if error == BATCH_OK and b.size > left:
        error = BATCH_TRUNCATED
    if error != BATCH_OK:
        return error
    last = b.base_offset + b.last_offset_delta
    if b.base_offset < s.next_offset or b.last_offset_delta < 0 \
            or last - s.base_offset > 0x7FFFFFFF:
        return GAP
    if b.base_offset > s.next_offset and (s.next_offset >= s.dense_from
                                          or b.base_offset > s.dense_from):
        return GAP                     # compaction leaves none there
    if b.leader_epoch < 0:
        return UNCOMMITTED
    if last < s.check_crc_from:
        return BATCH_OK
    if b.base_offset >= s.dense_from:
        if b.base_offset >= s.newest_from:
            s.least_epoch = s.greatest_epoch
        if not s.least_epoch <= b.leader_epoch <= s.greatest_epoch:
            return BAD_EPOCH
        s.least_epoch = b.leader_epoch
    return check_batch_crc(p, left, b)


cdef int _index_time(scan_t* s) noexcept nogil:
    """An entry for the largest timestamp so far, if that is new: 0 or NO_MEMORY."""
    cdef uint8_t* entry
    if s.max_timestamp > s.indexed_timestamp:
        entry = _grow(&s.times, TIME_INDEX_ENTRY_BYTES)
        if entry == NULL:
            return NO_MEMORY
        kd_put64(entry, <uint64_t> s.max_timestamp)
        kd_put32(entry + 8, <uint32_t> (s.max_timestamp_offset - s.base_offset))
        s.indexed_timestamp = s.max_timestamp
    return 0


cdef int _take(scan_t* s) noexcept nogil:
    """Note the batch in `info`, and go past it: 0 or NO_MEMORY."""
    cdef uint8_t* entry
    cdef int64_t last = s.info.base_offset + s.info.last_offset_delta
    if s.at == 0:
        s.first_timestamp = s.info.max_timestamp
    if s.info.max_timestamp > s.max_timestamp:
        s.max_timestamp = s.info.max_timestamp
        s.max_timestamp_offset = last
    if s.since_index > s.interval:
        entry = _grow(&s.offsets, OFFSET_INDEX_ENTRY_BYTES)
        if entry == NULL:
            return NO_MEMORY
        kd_put32(entry, <uint32_t> (last - s.base_offset))
        kd_put32(entry + 4, <uint32_t> s.at)
        if _index_time(s) != 0:
            return NO_MEMORY
        s.since_index = 0
    s.since_index += s.info.size
    s.at += s.info.size
    s.next_offset = last + 1
    return 0


cdef int _scan(scan_t* s) noexcept nogil:
    """To the end of what is good: why it ends there."""
    cdef int why = END_OF_RECORDS
    while s.at < s.length:
        why = _check(s)
        if why == BATCH_OK:
            why = _take(s)
            if why == 0:
                why = END_OF_RECORDS
                continue
        break
    if why != NO_MEMORY and _index_time(s) != 0:
        why = NO_MEMORY
    return why


cdef str _reason(int why, const scan_t* s):
    if why == END_OF_RECORDS:
        return ""
    if why == GAP:
        return f"a batch of base offset {s.info.base_offset} where {s.next_offset} was expected"
    if why == UNCOMMITTED:
        return "a batch that was never committed"
    if why == BAD_EPOCH:
        return (f"a batch of leader epoch {s.info.leader_epoch} where {s.least_epoch} to"
                f" {s.greatest_epoch} can be")
    if why == BATCH_TRUNCATED:
        return "a batch that is longer than the file"
    if why == BATCH_BAD_CRC:
        return "a batch whose CRC is wrong"
    if why == BATCH_BAD_MAGIC:
        return "a batch of unknown magic"
    return "a batch of impossible length"


def scan_segment(uint64_t address, uint64_t length, int64_t base_offset, int64_t check_crc_from,
                 uint32_t index_interval_bytes, *, int64_t dense_from=INT64_MAX,
                 int32_t least_epoch=0, int32_t greatest_epoch=INT32_MAX,
                 int64_t newest_from=INT64_MAX):
    """Walk the batches of a segment file of `length` bytes that should begin at `base_offset`.

    Stops at the first batch whose length, magic or base offset is wrong (below `dense_from` offsets
    may be missing, which compaction has removed), that was never committed
    (no leader epoch), or, for offsets of `check_crc_from` and above, whose CRC fails or, where
    kdirect wrote the log (from offset `dense_from` on), whose leader epoch cannot be: it goes back,
    is below `least_epoch` or above `greatest_epoch`, or is not that one from `newest_from` on.  (A
    producer's bytes land before they are committed, and may have any epoch.)  Rebuilds both indexes
    as the commit kernel would have written them."""
    cdef scan_t s
    cdef int why
    memset(&s, 0, sizeof(s))
    s.data = <const uint8_t*> <uintptr_t> address
    s.length = length
    s.base_offset = s.next_offset = s.max_timestamp_offset = base_offset
    s.check_crc_from = check_crc_from
    s.dense_from = dense_from
    s.least_epoch = least_epoch
    s.greatest_epoch = greatest_epoch
    s.newest_from = newest_from
    s.interval = index_interval_bytes
    s.first_timestamp = s.max_timestamp = s.indexed_timestamp = -1
    try:
        with nogil:
            why = _scan(&s)
        if why == NO_MEMORY:
            raise MemoryError()
        return ScannedSegment(
            s.at, s.next_offset, s.first_timestamp, s.max_timestamp, s.max_timestamp_offset,
            PyBytes_FromStringAndSize(<char*> s.offsets.data, s.offsets.length),
            PyBytes_FromStringAndSize(<char*> s.times.data, s.times.length), _reason(why, &s))
    finally:
        free(s.offsets.data)
        free(s.times.data)
