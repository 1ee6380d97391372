"""C interface of record batches in format v2: checks of the frame, stamps, and the encoder of a
single record.  Broker and client share it; see batch.pyx.
"""
from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t

cdef enum:
    # results of parse_batch_header, check_batch and check_batch_crc
    BATCH_OK = 0
    BATCH_TRUNCATED = 1        # n is smaller than the header, or than the size the batch states
    BATCH_BAD_LENGTH = 2       # batch length out of [BATCH_MIN_LENGTH, INT32_MAX - 12]
    BATCH_BAD_MAGIC = 3
    BATCH_BAD_CRC = 4
    # records count < 1, last offset delta != count - 1, reserved bits set, or unknown codec
    BATCH_BAD_COUNTS = 5

cdef struct batch_info:
    int64_t base_offset
    # whole batch in bytes, 12 + batch length (set whenever >= 12 bytes were given)
    uint32_t size
    int32_t leader_epoch
    int16_t attributes
    int32_t last_offset_delta
    int64_t base_timestamp
    int64_t max_timestamp
    int64_t producer_id
    int16_t producer_epoch
    int32_t base_sequence
    int32_t records_count

# Checks length and magic only.  Reads at most min(n, 61) bytes.
cdef int parse_batch_header(const uint8_t* p, size_t n, batch_info* out) noexcept nogil
# Checks in addition that the whole batch lies within n, and that its CRC and its counts are right.
# Each length is read once.
cdef int check_batch(const uint8_t* p, size_t n, batch_info* out) noexcept nogil
# The same for a batch of a log that was compacted: records may be missing in it, or all of them.
cdef int check_kept_batch(const uint8_t* p, size_t n, batch_info* out) noexcept nogil
# check_batch without the counts.  Readers use it, because compaction leaves gaps and empty batches.
cdef int check_batch_crc(const uint8_t* p, size_t n, batch_info* out) noexcept nogil
# Sets base offset and leader epoch in place; the CRC does not cover them.
cdef void stamp_batch(uint8_t* p, int64_t base_offset, int32_t leader_epoch) noexcept nogil
# Sets the timestamp type bit and the max timestamp, and recomputes the CRC.
cdef void stamp_log_append_time(uint8_t* p, uint32_t size, int64_t timestamp) noexcept nogil
# Sets producer id, epoch and sequence in place.  The CRC is updated by the difference of these
# bytes and not computed again, so a batch that was damaged before is still found to be damaged.
cdef void stamp_producer(uint8_t* p, uint32_t size, int64_t producer_id, int16_t producer_epoch,
                         int32_t base_sequence) noexcept nogil
# Writes one uncompressed batch of one record without headers, with base offset 0.  Producer id,
# epoch and sequence are -1 for none; a length of -1 means null.  Returns the number of bytes
# written, or -1 if `capacity` is too small.
cdef int64_t encode_single(uint8_t* out, size_t capacity, const uint8_t* key, int64_t key_length,
                           const uint8_t* value, int64_t value_length, int64_t timestamp,
                           int64_t producer_id, int16_t producer_epoch,
                           int32_t base_sequence) noexcept nogil
# The same, but the value is only read for the CRC and not copied: value_length bytes of `out`, from
# the position that `value_position` returns, are left as they were.
cdef int64_t encode_single_around(uint8_t* out, size_t capacity, const uint8_t* key,
                                  int64_t key_length, const uint8_t* value, int64_t value_length,
                                  int64_t timestamp, int64_t producer_id, int16_t producer_epoch,
                                  int32_t base_sequence,
                                  uint32_t* value_position) noexcept nogil


cdef inline bint offsets_are_possible(const batch_info* info) noexcept nogil:
    """Whether the base offset and the offset after the last record are at least 0 and fit into 63
    bits."""
    if info.base_offset < 0 or info.last_offset_delta < 0:
        return False
    return info.base_offset <= INT64_MAX - 1 - info.last_offset_delta
