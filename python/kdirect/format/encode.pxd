"""C interface of encode.pyx: the frame of a batch whose records are in place."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t

cdef enum:
    # Of a record, at most: length 5, attributes 1, timestamp 10, offset 5, key length 5, value
    # length 5, headers count 5, and some more.
    RECORD_FRAME_BYTES = 48

# Writes the 61 bytes before the records of a batch of `size` bytes, and its CRC.
cdef void put_batch_header(uint8_t* p, size_t size, int attributes, int32_t count,
                           int64_t base_timestamp, int64_t max_timestamp, int64_t producer_id,
                           int16_t producer_epoch, int32_t base_sequence) noexcept nogil
