"""C interface of records.pyx: from the uncompressed records of one batch to columns that grow.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t

cdef enum:
    RECORDS_OK = 0
    # a first key, and the key column has no memory: give it some, then repeat the batch
    RECORDS_NEED_KEYS = 1
    RECORDS_BAD_NUMBER = 2      # a varint is cut off or too long
    RECORDS_BAD_LENGTH = 3      # a record's length is negative or leaves the batch
    RECORDS_BAD_FIELD = 4       # a key, value or header leaves its record, or a count is negative
    RECORDS_BAD_END = 5         # a record does not end where its length says
    RECORDS_BAD_OFFSET = 6      # offset deltas do not rise, or leave the batch's range
    RECORDS_TRAILING = 7        # bytes are left after the last record
    RECORD_MIN_BYTES = 7
    COPY_SLACK = 64             # copies may pass the end of the bytes by 31, on both sides

    COLUMN_NULL = 0             # every row so far is null; nothing is written
    COLUMN_VALID = 1            # no row so far is null; no validity bits are written
    COLUMN_MIXED = 2            # offsets and validity bits are written

cdef struct record_view:
    int64_t timestamp_delta
    int64_t offset_delta
    const uint8_t* key
    int64_t key_length          # -1: null
    const uint8_t* value
    int64_t value_length        # -1: null
    const uint8_t* headers      # the first header, after the count
    int32_t headers_count
    const uint8_t* end

# variable-width: also the list column (used counts elements then, data is not used)
cdef struct text_column:
    int32_t* offsets            # rows + 1; of views: NULL
    uint8_t* data               # bytes of the values; of views: 16 bytes a row
    uint8_t* validity
    int64_t used                # bytes of the values
    int state
    int refers                  # of views: one of them is longer than what a view holds itself

cdef struct columns:
    int64_t rows
    text_column key
    text_column value
    int64_t* offset
    int64_t* timestamp          # microseconds
    bint with_headers
    bint as_views               # keys, values and values of headers are views
    text_column header_list
    int64_t header_rows
    text_column header_key
    text_column header_value
    const uint8_t* view_base    # where the data buffer that holds the batch begins
    int32_t view_buffer         # the number of that buffer

cdef struct section:            # what the batch header says of its records
    int64_t base_offset
    int32_t count
    int32_t last_offset_delta
    int64_t base_timestamp      # ms
    int64_t start_offset        # keep records of [start_offset, stop_offset) only
    int64_t stop_offset
    bint log_append_time        # every record has the timestamp max_timestamp
    int64_t max_timestamp

cdef const uint8_t* parse_record(const uint8_t* p, const uint8_t* end, record_view* out,
                                 int* error) noexcept nogil
# Parses and checks one record, headers too, within [p, end).  Returns the position after it; NULL
# with *error set.
cdef const uint8_t* parse_header(const uint8_t* p, const uint8_t* end, const uint8_t** key,
                                 int64_t* key_length, const uint8_t** value,
                                 int64_t* value_length) noexcept nogil
# One header; NULL when it leaves [p, end) or its key is null.
cdef int decode_section(columns* c, const section* s, const uint8_t* p,
                        const uint8_t* end) noexcept nogil
# Appends the records in [p, end) to `c`, whose columns have room: s.count more rows, end - p +
# COPY_SLACK more bytes of values, and of keys and headers where they have memory at all.  With
# c.as_views, [p, end) lies in the data buffer that begins at c.view_base, and `end` at most
# INT32_MAX bytes after that.  On an error the caller puts c back as it was, by assignment.
cdef void put_text(text_column* c, int64_t row, const uint8_t* data, int64_t length) noexcept nogil
# Row `row` of a column that has room; a length of -1 is null.
cdef int64_t microseconds(int64_t ms) noexcept nogil
# ms times 1000; clamped where it does not fit.
cdef const char* records_error(int error) noexcept nogil
