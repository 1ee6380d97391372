"""C interface of decode.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kdirect.format.batch cimport batch_info
from kdirect.blocks cimport Block
from kdirect.format.chain cimport chain_t
from kdirect.format.compression cimport Decompressor
from kdirect.format.records cimport columns, section, text_column
from kdirect.format.view_buffers cimport ViewBuffer, ViewBuffers

cdef enum:
    # Why ArrowDecoder._run returned, in addition to the codes of batch.pxd (positive, below 100).
    RUN_DONE = 0                # nothing more to take: full, or the rest is not a whole batch
    RUN_RESERVE = -1            # the batch at *position needs more room
    RUN_COMPRESSED = -2         # the batch at *position is compressed
    RUN_HEADER = -3             # its header contradicts itself
    RUN_CODEC = -4              # its codec is unknown
    RUN_BROKEN_CHAIN = -5       # it does not continue the log
    RUN_BUFFER = -6             # the views of the batch at *position need another data buffer
    RUN_RECORDS = 100           # RUN_RECORDS + a code of records.pxd
    LARGEST_COLUMN = 0x7FFFFFFF - 64    # INT32_MAX - COPY_SLACK

cdef class ArrowDecoder:
    cdef readonly str topic
    cdef readonly int32_t partition
    cdef readonly int64_t start_offset
    cdef readonly int64_t stop_offset
    cdef readonly int64_t next_offset       # after the last batch consumed
    cdef readonly int64_t newest_ms         # newest time of the batches consumed; -1: none was
    # size of the batch that the last feed could not take whole; 0: not known
    cdef readonly size_t next_batch_bytes
    cdef readonly int64_t target_rows
    cdef readonly int64_t target_bytes
    cdef readonly uint64_t max_decompressed_bytes
    cdef readonly object schema
    cdef readonly bint include_headers
    cdef readonly bint views
    cdef bint check_crc
    cdef bint stopped                       # full, because a column may not grow further
    cdef int64_t row_bytes, header_row_bytes
    cdef columns c
    cdef batch_info info                    # of the batch that is being decoded
    cdef int64_t row_capacity, value_capacity, key_capacity, header_capacity, header_rows_capacity
    cdef bint keys_wanted
    # (first row, timestamp type), a new entry where the type changes
    cdef list types
    cdef int last_type
    cdef Block value_offsets, value_data, value_validity
    cdef Block key_offsets, key_data, key_validity
    cdef Block offset, timestamp
    cdef Block list_offsets, list_validity, header_key_offsets, header_key_data, header_key_validity
    cdef Block header_value_offsets, header_value_data, header_value_validity
    cdef Decompressor decompressor
    cdef ViewBuffers buffers                # None unless `views`
    cdef const uint8_t* view_limit          # a batch that ends after it needs another data buffer
    cdef const uint8_t* taken_end           # of the last batch taken from the window; NULL: none

    cpdef Py_ssize_t feed_address(self, uint64_t address, size_t n, object owner=*) except -1
    cdef int c_window(self, const uint8_t* base, uint64_t length, object owner) except -1
    cdef _use(self, ViewBuffer buffer)
    cdef int64_t c_pending_bytes(self) noexcept nogil
    cdef bint c_full(self) noexcept nogil
    cdef Py_ssize_t c_feed(self, const uint8_t* data, size_t n, chain_t* chain) except -1
    cdef Py_ssize_t _feed(self, const uint8_t* data, size_t n, chain_t* chain) except -1
    cdef int _run(self, const uint8_t* data, size_t n, size_t* position,
                  chain_t* chain) noexcept nogil
    cdef int _take_rows(self, const uint8_t* p, bint wanted) noexcept nogil
    cdef bint _has_room(self, int64_t rows, int64_t section_bytes) noexcept nogil
    cdef int64_t _header_bytes(self) noexcept nogil
    cdef int _decode(self, const uint8_t* p, const uint8_t* end) noexcept nogil
    cdef void _passed(self) noexcept nogil
    cdef void c_pass(self, int64_t after) noexcept nogil
    cdef int _take_compressed(self, const uint8_t* p) except -100
    cdef int _take_plain(self, object plain) except -100
    cdef int _reserve(self, size_t section_bytes, size_t n) except -1
    cdef _grow_rows(self, int64_t rows)
    cdef _reserve_keys(self, size_t section_bytes, size_t likely_bytes)
    cdef _reserve_headers(self, size_t section_bytes)
    cdef object _fault(self, int code, const uint8_t* p, size_t n)
    cdef object _bytes(self, int64_t rows, const text_column* column, Block offsets, Block data,
                       Block validity, list buffers)
    cdef object _headers(self, int64_t rows, list buffers)
