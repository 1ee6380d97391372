# cython: boundscheck=False, wraparound=False
"""The compiled loop of the TCP fallback: where the whole batches of fetched bytes end.

Looks at frames only (length, magic, offsets); CRC and records are the decoder's.  No I/O, no state.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t

from kdirect.format.batch cimport BATCH_OK, BATCH_TRUNCATED, batch_info, parse_batch_header

cdef enum:
    BAD_OFFSETS = 100  # a batch that ends before the offset asked for: following it would never end

_TEXT = {2: "its length is impossible", 3: "its magic is not 2", BAD_OFFSETS: "its offsets run backwards"}


def whole_batches(const uint8_t[::1] data, int64_t next_offset):
    """(bytes of whole batches at the start of `data`, offset after them, bytes that the next batch needs or 0, what is wrong or None).

    `next_offset` is the offset that `data` was asked for; its first batch may begin before it.
    """
    cdef size_t n = data.shape[0], position = 0, needed = 0
    cdef int error = BATCH_OK
    cdef batch_info info
    with nogil:
        while position < n:
            error = parse_batch_header(&data[position], n - position, &info)
            if error == BATCH_TRUNCATED:
                needed = info.size if info.size else 1
                error = BATCH_OK
                break
            if error != BATCH_OK:
                break
            if info.size > n - position:
                needed = info.size
                break
            if info.base_offset < 0 or info.last_offset_delta < 0 or info.base_offset >= INT64_MAX - info.last_offset_delta:
                error = BAD_OFFSETS
                break
            if info.base_offset + info.last_offset_delta < next_offset:
                error = BAD_OFFSETS
                break
            next_offset = info.base_offset + info.last_offset_delta + 1
            position += info.size
    return position, next_offset, needed, (None if error == BATCH_OK else _TEXT.get(error, "its frame is broken"))
