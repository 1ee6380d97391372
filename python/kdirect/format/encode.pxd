"""C face of encode.pyx: the frame of a batch whose records are in place."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t

cdef void put_batch_header(uint8_t* p, size_t size, int attributes, int32_t count,
                           int64_t base_timestamp, int64_t max_timestamp,
                           int64_t producer_id, int16_t producer_epoch,
                           int32_t base_sequence) noexcept nogil
# The 61 bytes before the records of a batch of `size` bytes, and its CRC.
