# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The records of a batch: the inner loop of everything that reads.

Owns: the layout of a record and of a header (zigzag varints), and how records become columns.
Holds no memory and raises nothing: callers give memory that is large enough, and get a number back.

Invariants, for any bytes at all, also when they change while they are read: nothing outside [p,
end) is read; every length is read once and compared with what is left before it is used; no column
grows by more rows than the batch header counts or more bytes than the batch has; a view refers to
bytes of [p, end) only.

    record:  length, attributes (1 byte), timestamp delta, offset delta,
             key length, key, value length, value, headers count, headers
    header:  key length, key, value length, value

A length of -1 means null.
"""

from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

from kdirect.format.wire cimport kd_get_varint

cdef extern from "records_run.h" nogil:
    ctypedef struct kd_run:
        const uint8_t* p
        const uint8_t* end
        int64_t count
        int64_t offset_delta
        int64_t base_offset
        int64_t base_us
        uint8_t* value_data
        int64_t value_used
        int32_t* value_offsets
        int64_t* offsets
        int64_t* timestamps
        uint8_t* key_data
        int64_t key_used
        int32_t* key_offsets
        const uint8_t* base
        int32_t buffer
        uint32_t value_refers
        uint32_t key_refers
    int64_t kd_run_records(kd_run* run)
    int64_t kd_run_views(kd_run* run)

cdef extern from "views.h" nogil:
    enum:
        KD_VIEW_BYTES
        KD_VIEW_INLINE
    void kd_put_view(uint8_t* to, const uint8_t* start, uint32_t n, int32_t buffer, int32_t offset)

# Timestamps in this range plus any short delta fit into 64 bits as microseconds.
cdef int64_t PLAIN_MS = INT64_MAX // 1000 - (1 << 28)


cdef int64_t microseconds(int64_t ms) noexcept nogil:
    if ms > INT64_MAX // 1000:
        return INT64_MAX
    if ms < -(INT64_MAX // 1000):
        return INT64_MIN
    return ms * 1000


cdef const char* records_error(int error) noexcept nogil:
    if error == RECORDS_BAD_NUMBER:
        return "a number in a record is cut off or too long"
    if error == RECORDS_BAD_LENGTH:
        return "a record's length is negative or leaves the batch"
    if error == RECORDS_BAD_FIELD:
        return "a key, value or header leaves its record"
    if error == RECORDS_BAD_END:
        return "a record does not end where its length says"
    if error == RECORDS_BAD_OFFSET:
        return "offsets do not rise, or leave the range of the batch"
    if error == RECORDS_TRAILING:
        return "bytes are left after the last record"
    return "its records are broken"


cdef const uint8_t* parse_header(const uint8_t* p, const uint8_t* end, const uint8_t** key,
                                 int64_t* key_length, const uint8_t** value,
                                 int64_t* value_length) noexcept nogil:
    cdef int64_t n
    p = kd_get_varint(p, end, &n)
    if p == NULL or n < 0 or n > end - p:
        return NULL
    key[0] = p
    key_length[0] = n
    p += n
    p = kd_get_varint(p, end, &n)
    if p == NULL or n > end - p or n < -1:
        return NULL
    value[0] = p
    value_length[0] = n
    return p + n if n > 0 else p


cdef inline const uint8_t* _get_length(const uint8_t* p, const uint8_t* end, int64_t* length,
                                       int* error) noexcept nogil:
    """Read the length of a key or value, -1 for null.  Returns where its bytes begin, which lie
    within [p, end); NULL when they do not."""
    cdef int64_t n
    error[0] = RECORDS_BAD_NUMBER
    p = kd_get_varint(p, end, &n)
    if p == NULL:
        return NULL
    error[0] = RECORDS_BAD_FIELD
    if n < -1 or n > end - p:
        return NULL
    length[0] = n
    return p


cdef const uint8_t* parse_record(const uint8_t* p, const uint8_t* end, record_view* out,
                                 int* error) noexcept nogil:
    cdef int64_t n, a, b
    cdef int32_t i
    cdef const uint8_t* ignored
    p = kd_get_varint(p, end, &n)
    error[0] = RECORDS_BAD_NUMBER
    if p == NULL:
        return NULL
    error[0] = RECORDS_BAD_LENGTH
    if n < 1 or n > end - p:
        return NULL
    end = p + n
    error[0] = RECORDS_BAD_NUMBER
    p = kd_get_varint(p + 1, end, &out.timestamp_delta)
    if p == NULL:
        return NULL
    p = kd_get_varint(p, end, &out.offset_delta)
    if p == NULL:
        return NULL
    out.key = _get_length(p, end, &out.key_length, error)
    if out.key == NULL:
        return NULL
    p = out.key + max(out.key_length, 0)
    out.value = _get_length(p, end, &out.value_length, error)
    if out.value == NULL:
        return NULL
    p = out.value + max(out.value_length, 0)
    error[0] = RECORDS_BAD_NUMBER
    p = kd_get_varint(p, end, &n)
    if p == NULL:
        return NULL
    error[0] = RECORDS_BAD_FIELD
    if n < 0 or n > (end - p) // 2:
        return NULL
    out.headers = p
    out.headers_count = <int32_t>n
    for i in range(out.headers_count):
        p = parse_header(p, end, &ignored, &a, &ignored, &b)
        if p == NULL:
            return NULL
    error[0] = RECORDS_BAD_END
    if p != end:
        return NULL
    out.end = end
    error[0] = RECORDS_OK
    return p


cdef void put_text(text_column* c, int64_t row, const uint8_t* data,
                   int64_t length) noexcept nogil:
    """Row `row` of a column; length -1 is null.  Changes the column's state when it must."""
    if length < 0:
        if c.state == COLUMN_NULL:
            return
        if c.state == COLUMN_VALID:
            memset(c.validity, 0xFF, (row + 7) // 8)
            c.state = COLUMN_MIXED
        c.validity[row >> 3] &= <uint8_t>~(1 << (row & 7))
        c.offsets[row + 1] = <int32_t>c.used
        return
    if c.state != COLUMN_VALID:
        if c.state == COLUMN_NULL:
            c.offsets[0] = 0
            if row == 0:
                c.state = COLUMN_VALID
            else:
                memset(c.offsets, 0, (row + 1) * sizeof(int32_t))
                memset(c.validity, 0, (row + 7) // 8)
                c.state = COLUMN_MIXED
        if c.state == COLUMN_MIXED:
            c.validity[row >> 3] = c.validity[row >> 3] | <uint8_t>(1 << (row & 7))
    if c.data != NULL:
        memcpy(c.data + c.used, data, length)
    c.used += length
    c.offsets[row + 1] = <int32_t>c.used


cdef void _put_view(columns* c, text_column* column, int64_t row, const uint8_t* data,
                    int64_t length) noexcept nogil:
    """`put_text` for a column of views: `data` lies in the data buffer of the batch."""
    if length < 0:
        if column.state == COLUMN_NULL:
            return
        if column.state == COLUMN_VALID:
            memset(column.validity, 0xFF, (row + 7) // 8)
            column.state = COLUMN_MIXED
        column.validity[row >> 3] &= <uint8_t>~(1 << (row & 7))
        memset(column.data + row * KD_VIEW_BYTES, 0, KD_VIEW_BYTES)
        return
    if column.state == COLUMN_NULL:
        if row == 0:
            column.state = COLUMN_VALID
        else:
            memset(column.data, 0, row * KD_VIEW_BYTES)
            memset(column.validity, 0, (row + 7) // 8)
            column.state = COLUMN_MIXED
    if column.state == COLUMN_MIXED:
        column.validity[row >> 3] = column.validity[row >> 3] | <uint8_t>(1 << (row & 7))
    if length > KD_VIEW_INLINE:
        column.refers = True
    kd_put_view(column.data + row * KD_VIEW_BYTES, data, <uint32_t>length, c.view_buffer,
                <int32_t>(data - c.view_base))
    column.used += length


cdef inline void _put(columns* c, text_column* column, int64_t row, const uint8_t* data,
                      int64_t length) noexcept nogil:
    """Row `row` of a column that is of views when the decoder makes views."""
    if c.as_views:
        _put_view(c, column, row, data, length)
    else:
        put_text(column, row, data, length)


cdef int _put_headers(columns* c, const record_view* r) noexcept nogil:
    """The header row of row c.rows: null when there are none, as Spark's connector has it."""
    cdef const uint8_t* p = r.headers
    cdef const uint8_t* key
    cdef const uint8_t* value
    cdef int64_t key_length, value_length
    cdef int32_t i
    for i in range(r.headers_count):
        # The bytes may have changed since parse_record saw them: every length is checked again
        # here.
        p = parse_header(p, r.end, &key, &key_length, &value, &value_length)
        if p == NULL:
            return RECORDS_BAD_FIELD
        put_text(&c.header_key, c.header_rows, key, key_length)
        _put(c, &c.header_value, c.header_rows, value, value_length)
        c.header_rows += 1
    put_text(&c.header_list, c.rows, NULL, r.headers_count if r.headers_count else -1)
    return RECORDS_OK


cdef const uint8_t* _short_run(columns* c, const section* s, const uint8_t* p, const uint8_t* end,
                               int32_t* index, int64_t* previous) noexcept nogil:
    """Appends records as long as `records_run.h` takes them; stops before the first other one."""
    cdef kd_run run
    cdef int64_t taken
    run.p = p
    run.end = end
    run.count = min(<int64_t>(s.count - index[0]), s.last_offset_delta - previous[0])
    run.offset_delta = previous[0] + 1
    run.base_offset = s.base_offset
    run.base_us = microseconds(s.base_timestamp)
    run.value_data = c.value.data
    run.value_used = c.value.used
    run.offsets = c.offset + c.rows
    run.timestamps = c.timestamp + c.rows
    run.key_data = c.key.data if c.key.state == COLUMN_VALID else NULL
    run.key_used = c.key.used
    if c.as_views:
        run.value_data += c.rows * KD_VIEW_BYTES
        if run.key_data != NULL:
            run.key_data += c.rows * KD_VIEW_BYTES
        run.base = c.view_base
        run.buffer = c.view_buffer
        run.value_refers = c.value.refers
        run.key_refers = c.key.refers
        taken = kd_run_views(&run)
        c.value.refers = run.value_refers
        c.key.refers = run.key_refers
    else:
        run.value_offsets = c.value.offsets + c.rows + 1
        run.key_offsets = c.key.offsets + c.rows + 1 if run.key_data != NULL else NULL
        taken = kd_run_records(&run)
    c.rows += taken
    c.value.used = run.value_used
    c.key.used = run.key_used
    index[0] += <int32_t>taken
    previous[0] += taken
    return run.p


cdef int decode_section(columns* c, const section* s, const uint8_t* p,
                        const uint8_t* end) noexcept nogil:
    cdef int64_t previous = -1, offset, row, first_row = c.rows, max_us
    cdef int32_t i = 0
    cdef int error
    cdef record_view r
    cdef bint whole = (s.start_offset <= s.base_offset
                       and s.stop_offset > s.base_offset + s.last_offset_delta)
    cdef bint short_way = whole and not c.with_headers and -PLAIN_MS < s.base_timestamp < PLAIN_MS
    if c.rows == 0 and c.value.state == COLUMN_NULL:
        c.value.state = COLUMN_VALID
        if not c.as_views:
            c.value.offsets[0] = 0
    while i < s.count:
        if short_way and c.value.state == COLUMN_VALID:
            if end - p > COPY_SLACK and c.key.state != COLUMN_MIXED:
                p = _short_run(c, s, p, end, &i, &previous)
                if i == s.count:
                    break
        p = parse_record(p, end, &r, &error)
        if p == NULL:
            return error
        if r.offset_delta <= previous or r.offset_delta > s.last_offset_delta:
            return RECORDS_BAD_OFFSET
        previous = r.offset_delta
        i += 1
        offset = s.base_offset + r.offset_delta
        if not whole and (offset < s.start_offset or offset >= s.stop_offset):
            continue
        row = c.rows
        if r.key_length >= 0 and c.key.data == NULL:
            return RECORDS_NEED_KEYS
        if c.with_headers:
            error = _put_headers(c, &r)
            if error:
                return error
        _put(c, &c.key, row, r.key, r.key_length)
        _put(c, &c.value, row, r.value, r.value_length)
        c.offset[row] = offset
        c.timestamp[row] = microseconds(_add_clamped(s.base_timestamp, r.timestamp_delta))
        c.rows = row + 1
    if p != end:
        return RECORDS_TRAILING
    if s.log_append_time:
        max_us = microseconds(s.max_timestamp)
        for row in range(first_row, c.rows):
            c.timestamp[row] = max_us
    return RECORDS_OK


cdef inline int64_t _add_clamped(int64_t a, int64_t b) noexcept nogil:
    if b > 0 and a > INT64_MAX - b:
        return INT64_MAX
    if b < 0 and a < INT64_MIN - b:
        return INT64_MIN
    return a + b
