"""C face of record batch v2: frame checks and single-record encoding, shared by broker and client.
"""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t

cdef enum:
    # results of parse_batch_header / check_batch
    BATCH_OK = 0
    BATCH_TRUNCATED = 1        # n is smaller than the header, or than the batch says it is
    BATCH_BAD_LENGTH = 2       # batch length out of [BATCH_MIN_LENGTH, INT32_MAX - 12]
    BATCH_BAD_MAGIC = 3
    BATCH_BAD_CRC = 4
    BATCH_BAD_COUNTS = 5       # records count < 1, or last offset delta != count - 1, or reserved bits / codec unknown

cdef struct batch_info:
    int64_t base_offset
    uint32_t size              # whole batch in bytes, 12 + batch length (set whenever >= 12 bytes were given)
    int32_t leader_epoch
    int16_t attributes
    int32_t last_offset_delta
    int64_t base_timestamp
    int64_t max_timestamp
    int64_t producer_id
    int16_t producer_epoch
    int32_t base_sequence
    int32_t records_count

cdef int parse_batch_header(const uint8_t* p, size_t n, batch_info* out) noexcept nogil
# Frame only: length and magic.  Reads at most min(n, 61) bytes.
cdef int check_batch(const uint8_t* p, size_t n, batch_info* out) noexcept nogil
# parse_batch_header, whole batch within n, CRC, counts.  Each length is read once.
cdef int check_batch_crc(const uint8_t* p, size_t n, batch_info* out) noexcept nogil
# The same without the counts: for readers, because compaction leaves gaps and empty batches.
cdef void stamp_batch(uint8_t* p, int64_t base_offset, int32_t leader_epoch) noexcept nogil
# Base offset and leader epoch in place; the CRC does not cover them.
cdef void stamp_log_append_time(uint8_t* p, uint32_t size, int64_t timestamp) noexcept nogil
# Sets the timestamp type bit and max timestamp and recomputes the CRC.
cdef void stamp_producer(uint8_t* p, uint32_t size, int64_t producer_id, int16_t producer_epoch, int32_t base_sequence) noexcept nogil
# Producer id, epoch and sequence in place.  The CRC is changed by their difference, not computed
# anew: a batch that was damaged before stays so.
cdef int64_t encode_single(uint8_t* out, size_t capacity, const uint8_t* key, int64_t key_length, const uint8_t* value, int64_t value_length, int64_t timestamp,
                           int64_t producer_id, int16_t producer_epoch, int32_t base_sequence) noexcept nogil
# One uncompressed batch of one record without headers, base offset 0; producer id, epoch and
# sequence -1: none.  Length -1 = null. Returns the bytes written, or -1 when capacity is too small.
cdef int64_t encode_single_around(uint8_t* out, size_t capacity, const uint8_t* key, int64_t key_length, const uint8_t* value, int64_t value_length,
                                  int64_t timestamp, int64_t producer_id, int16_t producer_epoch, int32_t base_sequence, uint32_t* hole) noexcept nogil
# The same without the value, which is read for the CRC and not copied: its place, value_length
# bytes from `hole` on, is left as it was.
