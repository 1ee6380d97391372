# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Decodes the bytes of a segment into Arrow columns.

It owns the decoder of one topic partition, and the columns that the decoder is building.  Memory is
reserved batch by batch before the inner loop (`records`) runs, so that loop checks no capacities.
Columns are blocks; `arrays` makes Arrow of the finished ones.  `record_list` decodes a few records
into Python objects instead.

With `views`, keys, values and the values of headers are not copied: their columns are Arrow's views
of the bytes that were fed, whose memory the arrays keep (`view_buffers`).  All checks are the same.

Invariants
- A batch is taken whole or not at all: an error leaves the pending rows as they were before it.
- Rows have rising offsets in [start_offset, stop_offset).  No offset appears twice, even if the
  same bytes are fed twice.
- Input bytes may change while they are read (see `records`); compressed ones are copied first.
- A view lies within a batch that was taken, and that batch within a window that was declared.
- Columns with the same value in every row (topic, partition, usually timestampType, an absent key)
  cost nothing per batch.
"""

import pyarrow as pa

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport (
    INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t)
from libc.string cimport memcpy, memset

from kdirect.errors import ConfigError, CorruptBatchError, FormatError, UnsupportedFormatError
from kdirect.format.arrays import (
    SCHEMA, SCHEMA_VIEWS, SCHEMA_VIEWS_WITH_HEADERS, SCHEMA_WITH_HEADERS)
from kdirect.format.arrays cimport (
    check_views, constant_array, header_array, number_array, text_array, timestamp_type_array,
    view_array)
from kdirect.format.batch import CODEC_NAMES, batch_error
from kdirect.format.batch cimport (
    BATCH_BAD_CRC, BATCH_OK, BATCH_TRUNCATED, batch_info, offsets_are_possible, parse_batch_header)
from kdirect.blocks cimport Block, expand
from kdirect.format.chain cimport chain_t, continues_dense, move_dense
from kdirect.format.compression import records_fault
from kdirect.format.compression cimport Decompressor
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_LOG_APPEND_TIME, BATCH_ATTRIBUTES, BATCH_CRC,
    BATCH_HEADER_BYTES, BATCH_RECORDS, CODEC_ZSTD)
from kdirect.format.records cimport (
    COLUMN_NULL, COPY_SLACK, RECORD_MIN_BYTES, RECORDS_NEED_KEYS, RECORDS_OK,
    RECORDS_TRAILING, columns, decode_section, records_error, section, text_column)

from kdirect.format.view_buffers cimport ViewBuffer, ViewBuffers, kept
from kdirect.format.wire cimport kd_get32, kd_prefetch

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef extern from "views.h" nogil:
    enum:
        KD_VIEW_BYTES

DEFAULT_TARGET_ROWS = 1 << 17
DEFAULT_TARGET_BYTES = 8 << 20
DEFAULT_MAX_DECOMPRESSED_BYTES = 64 << 20
NO_STOP = INT64_MAX

# By `views` and `include_headers`.
cdef list _SCHEMAS = [[SCHEMA, SCHEMA_WITH_HEADERS], [SCHEMA_VIEWS, SCHEMA_VIEWS_WITH_HEADERS]]
# Not of pa.array([]): that looks for pandas, whose import takes longer than all others.
cdef list _EMPTY = [
    [pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
     for schema in schemas] for schemas in _SCHEMAS]

cdef object _MICROSECONDS = pa.timestamp("us", tz="UTC")
cdef object _BINARY = pa.binary()
cdef object _STRING = pa.string()
cdef object _INT32 = pa.int32()
cdef object _INT64 = pa.int64()

_HEADER_HINT = "read past it with another offset, or restore the segment from a good copy"


# -- the decoder -----------------------------------------------------------------------------------

cdef inline bint crc_is_right(const uint8_t* p, uint32_t size) noexcept nogil:
    return (kd_crc32c(0, p + BATCH_ATTRIBUTES, size - BATCH_ATTRIBUTES)
            == kd_get32(p + BATCH_CRC))


cdef inline int check_frame(const uint8_t* p, size_t n, batch_info* info,
                            chain_t* chain) noexcept nogil:
    """Whether a whole batch with an acceptable header lies at the start of [p, p + n): BATCH_OK,
    BATCH_TRUNCATED when more bytes are needed, or what is wrong.  The CRC is not
    checked here."""
    cdef int code = parse_batch_header(p, n, info)
    if code != BATCH_OK:
        return code
    if info.size > n:
        return BATCH_TRUNCATED
    if chain != NULL:
        if not continues_dense(chain, info):
            return RUN_BROKEN_CHAIN
        # Batches of one producer often have one size.  If so, the header of the eighth batch from
        # here is at this place.
        kd_prefetch(p + 8 * <size_t> info.size)
    elif not offsets_are_possible(info):
        return RUN_HEADER
    return RUN_HEADER if info.records_count < 0 else BATCH_OK


cdef class ArrowDecoder:
    """Decodes record batches of one topic partition into pending columns, and hands them out as
    Arrow.

    ``feed`` takes whole batches until `target_rows` or `target_bytes` (bytes of the columns) is
    reached, so a batch of rows may be larger than the target by one record batch.  ``take`` returns
    the pending rows and starts with none.  Control batches are skipped.  Only one thread at a time
    may use a decoder.  The columns are copies: no memory of another process is kept.

    With `views`, the columns of bytes are of the type binary_view and are not copied: values of
    more than 12 bytes stay in the memory that was fed, or in that of a decompressed batch.  Such
    memory must not change while the arrays live, which keep a reference to its owner.  Targets
    count the bytes of such values, too, so they bound the memory that a batch of rows keeps.

    `next_offset` is the offset after the last record batch consumed (at first `start_offset`): rows
    below it are never returned again.  `next_batch_bytes` is the size of the incomplete batch that
    the last ``feed`` ended at, or 0: a caller's buffer must be able to hold that many bytes.

    A timestamp that microseconds since 1970 cannot hold is clamped to the nearest that they can."""

    def __init__(self, str topic not None, int32_t partition, *, int64_t start_offset=0,
                 int64_t stop_offset=INT64_MAX, bint include_headers=False,
                 int64_t target_rows=DEFAULT_TARGET_ROWS, int64_t target_bytes=DEFAULT_TARGET_BYTES,
                 bint check_crc=True,
                 int64_t max_decompressed_bytes=DEFAULT_MAX_DECOMPRESSED_BYTES, bint views=False):
        cdef int64_t cell_bytes = KD_VIEW_BYTES if views else 4     # of a value: its view or offset
        if not topic:
            raise ConfigError("a decoder's topic is empty",
                              hint="name the topic that the bytes are from")
        if target_rows < 1 or target_rows > 1 << 22 or target_bytes < 1 or target_bytes > 1 << 30:
            raise ConfigError(f"targets of {target_rows} rows and {target_bytes} bytes are out of"
                              " range",
                              hint=f"give 1 to {1 << 22} rows and 1 to {1 << 30} bytes")
        if max_decompressed_bytes < 1 or max_decompressed_bytes > 1 << 30:
            raise ConfigError(f"max_decompressed_bytes {max_decompressed_bytes} is out of range",
                              hint=f"give 1 to {1 << 30}")
        self.topic = topic
        self.partition = partition
        self.start_offset = start_offset
        self.stop_offset = stop_offset
        self.next_offset = start_offset
        self.newest_ms = -1
        self.next_batch_bytes = 0
        self.include_headers = include_headers
        self.target_rows = target_rows
        self.target_bytes = target_bytes
        self.check_crc = check_crc
        self.max_decompressed_bytes = max_decompressed_bytes
        if views:
            check_views()
        self.views = views
        self.schema = _SCHEMAS[views][include_headers]
        self.row_bytes = 2 * cell_bytes + (4 + len(topic.encode())) + 4 + 8 + 8 + 4
        self.header_row_bytes = 4 + cell_bytes
        self.decompressor = Decompressor()
        self._reset()

    def _reset(self):
        memset(&self.c, 0, sizeof(columns))
        self.c.with_headers = self.include_headers
        self.c.as_views = self.views
        self.row_capacity = self.value_capacity = self.key_capacity = 0
        self.buffers = None
        if self.views:
            self.value_capacity = self.key_capacity = INT64_MAX     # their bytes are not copied
            self.buffers = ViewBuffers()
        self.taken_end = NULL
        self.header_capacity = self.header_rows_capacity = 0
        self.stopped = False
        self.types = []
        self.last_type = -1
        self.value_offsets = self.value_data = self.value_validity = None
        self.offset = self.timestamp = None
        self.key_offsets = self.key_data = self.key_validity = None
        self.list_offsets = self.list_validity = None
        self.header_key_offsets = self.header_key_data = self.header_key_validity = None
        self.header_value_offsets = self.header_value_data = self.header_value_validity = None

    @property
    def rows(self):
        """Pending rows."""
        return self.c.rows

    @property
    def pending_bytes(self):
        """Bytes of the pending columns as Arrow counts them."""
        return self.c_pending_bytes()

    @property
    def full(self):
        """Whether a target is reached; if so, call take() before feeding more."""
        return self.c_full()

    cdef int64_t c_pending_bytes(self) noexcept nogil:
        cdef int64_t n = self.c.rows * self.row_bytes + self.c.value.used + self.c.key.used
        if self.c.with_headers:
            n += self.c.header_key.used + self.c.header_value.used
            n += self.header_row_bytes * self.c.header_rows + 4 * self.c.rows
        return n

    cdef bint c_full(self) noexcept nogil:
        return (self.c.rows >= self.target_rows or self.stopped
                or self.c_pending_bytes() >= self.target_bytes)

    def feed(self, data):
        """Decode whole batches from the start of a bytes-like object; returns the bytes consumed.

        It returns 0 if the first batch is incomplete or the decoder is full.  Raises
        CorruptBatchError or UnsupportedFormatError if the first batch is not acceptable; a later
        one is left for the next call.  With `views`, `data` is kept by the columns."""
        cdef Py_buffer view
        owner = memoryview(data) if self.views else data
        PyObject_GetBuffer(owner, &view, PyBUF_SIMPLE)
        try:
            if self.views:
                self.c_window(<const uint8_t*>view.buf, view.len, owner)
            return self.c_feed(<const uint8_t*>view.buf, view.len, NULL)
        finally:
            PyBuffer_Release(&view)

    cpdef Py_ssize_t feed_address(self, uint64_t address, size_t n, object owner=None) except -1:
        """`feed` over n bytes of memory at `address`, which must stay readable during the call.

        With `views` it must stay as it is while `owner`, which the columns keep, is referenced.
        ConfigError if there is no owner, and no window that `c_window` declared."""
        if self.views and owner is not None:
            self.c_window(<const uint8_t*><uintptr_t>address, n, owner)
        return self.c_feed(<const uint8_t*><uintptr_t>address, n, NULL)

    cdef int c_window(self, const uint8_t* base, uint64_t length, object owner) except -1:
        """Declare that what the next `c_feed` is given lies in [base, base + length), and that this
        memory does not change while `owner` is referenced.

        The window ends with that `c_feed`, or with `take`; pending rows and arrays keep the owner
        if they need it.
        A window of the owner of an earlier one that begins within that one, or where it ends,
        continues its data buffer.  Nothing happens unless the decoder makes views.  ConfigError: no
        owner is given, or the window is no range of addresses."""
        if self.views:
            self.buffers.open(base, length, owner)
            self._use(self.buffers.current)
        return 0

    def window(self, uint64_t address, uint64_t n, object owner):
        """`c_window` for n bytes at `address`, of which the next `feed_address` is given a part."""
        self.c_window(<const uint8_t*><uintptr_t>address, n, owner)

    cdef _use(self, ViewBuffer buffer):
        """Views refer to `buffer` from here on; None: to one that the next batch begins."""
        self.taken_end = NULL
        self.view_limit = self.buffers.limit
        if buffer is not None:
            self.c.view_base = buffer.base
            self.c.view_buffer = buffer.number

    cdef Py_ssize_t c_feed(self, const uint8_t* data, size_t n, chain_t* chain) except -1:
        """`feed`.  Unless `chain` is NULL, it is dense, stands at `data`, and moves over what is
        consumed.  With a chain, batches are taken only as far as they continue the log, and 0 may
        also mean that the first batch is not acceptable: `follow_batches`, or a call without a
        chain, says why.  With `views`, call `c_window` before: ConfigError."""
        if not self.views:
            return self._feed(data, n, chain)
        try:
            self.buffers.check(data, n)
            return self._feed(data, n, chain)
        finally:
            self.buffers.close(self.taken_end)
            self._use(None)

    cdef Py_ssize_t _feed(self, const uint8_t* data, size_t n, chain_t* chain) except -1:
        cdef size_t position = 0, before = 0
        cdef int code
        self.next_batch_bytes = 0
        while True:
            with nogil:
                code = self._run(data, n, &position, chain)
            if code == RUN_DONE:
                return position
            before = position
            if code == RUN_RESERVE:
                self._reserve(self.info.size, n - position)
                continue
            if code == RUN_BUFFER:
                self._use(self.buffers.admit(data + position, self.taken_end))
                continue
            if code == RUN_COMPRESSED:
                try:
                    code = self._take_compressed(data + position)
                except FormatError:
                    if position:
                        return position
                    raise
                if code == RUN_DONE:
                    return position
                if code == RUN_RESERVE:     # the batch is taken
                    if chain != NULL:
                        move_dense(chain, &self.info)
                    position += self.info.size
                    continue
            if position or chain != NULL:
                # The batches before this one are good.  The next call starts with this one.
                return position
            raise self._fault(code, data + position, n - position)

    cdef void _passed(self) noexcept nogil:
        """Move `next_offset` after the batch in `info`, which is consumed."""
        cdef int64_t after = self.info.base_offset + self.info.last_offset_delta + 1
        if after > self.next_offset:
            self.next_offset = after
        if self.info.max_timestamp > self.newest_ms and self.info.base_offset < self.stop_offset:
            self.newest_ms = self.info.max_timestamp

    cdef void c_pass(self, int64_t after) noexcept nogil:
        """Go on at offset `after`: what is before holds no record for this reader."""
        if after > self.next_offset:
            self.next_offset = after

    cdef int _run(self, const uint8_t* data, size_t n, size_t* position,
                  chain_t* chain) noexcept nogil:
        """Take uncompressed batches from data[position, n), advancing `position` and `chain`, until
        something else is needed."""
        cdef const uint8_t* p
        cdef int code
        cdef bint wanted
        cdef int64_t room
        cdef batch_info* info = &self.info
        while not self.c_full():
            if position[0] == n:
                return RUN_DONE
            p = data + position[0]
            code = check_frame(p, n - position[0], info, chain)
            if code == BATCH_TRUNCATED:
                self.next_batch_bytes = info.size
                return RUN_DONE
            if code != BATCH_OK:
                return code
            if info.base_offset >= self.stop_offset:
                if chain != NULL:   # a chain never moves over a batch with an unchecked CRC
                    return RUN_DONE
                self._passed()      # no record of it is wanted, so its CRC does not matter
                position[0] += info.size
                continue
            if info.base_offset + info.last_offset_delta < self.next_offset:
                # No record of it is wanted, but only its CRC shows that its last offset is right.
                if self.check_crc and not crc_is_right(p, info.size):
                    return BATCH_BAD_CRC
                if chain != NULL:
                    move_dense(chain, info)
                position[0] += info.size
                continue
            if info.attributes & ATTRIBUTE_CODEC_MASK:
                if (info.attributes & ATTRIBUTE_CODEC_MASK) > CODEC_ZSTD:
                    return RUN_CODEC
                return RUN_COMPRESSED
            wanted = info.records_count > 0 and not info.attributes & ATTRIBUTE_CONTROL
            if wanted:
                room = info.size - BATCH_HEADER_BYTES
                if info.records_count > room // RECORD_MIN_BYTES:
                    return RUN_HEADER
                if self.c.value.used + info.size > LARGEST_COLUMN and self.c.rows:
                    self.stopped = True
                    return RUN_DONE
                if not self._has_room(info.records_count, info.size):
                    return RUN_RESERVE
                if self.views and p + info.size > self.view_limit:
                    return RUN_BUFFER
            if self.check_crc and not crc_is_right(p, info.size):
                return BATCH_BAD_CRC
            code = self._take_rows(p, wanted)
            if code != RUN_DONE:
                return code
            self._passed()
            if chain != NULL:
                move_dense(chain, info)
            position[0] += info.size
        return RUN_DONE

    cdef int _take_rows(self, const uint8_t* p, bint wanted) noexcept nogil:
        """Append the records of the uncompressed batch at p, whose header is in `info`, if they are
        `wanted`.  RUN_DONE, or the code that says why they cannot be taken."""
        cdef int code
        if wanted:
            code = self._decode(p + BATCH_RECORDS, p + self.info.size)
            if code == RECORDS_NEED_KEYS:
                self.keys_wanted = True
                return RUN_RESERVE
            if code != RECORDS_OK:
                return RUN_RECORDS + code
            self.taken_end = p + self.info.size
            return RUN_DONE
        if not self.info.attributes & ATTRIBUTE_CONTROL and self.info.size != BATCH_HEADER_BYTES:
            return RUN_RECORDS + RECORDS_TRAILING
        return RUN_DONE

    cdef bint _has_room(self, int64_t rows, int64_t section_bytes) noexcept nogil:
        """Whether each column has memory for `rows` more rows out of `section_bytes` bytes."""
        if self.c.rows + rows > self.row_capacity:
            return False
        if self.c.value.used + section_bytes + COPY_SLACK > self.value_capacity:
            return False
        if self.keys_wanted and self.c.key.used + section_bytes + COPY_SLACK > self.key_capacity:
            return False
        return not self.c.with_headers or (
            self._header_bytes() + section_bytes <= self.header_capacity
            and self.c.header_rows + section_bytes // 2 <= self.header_rows_capacity)

    cdef int64_t _header_bytes(self) noexcept nogil:
        """Bytes that were copied into the longer column of headers."""
        if self.views:
            return self.c.header_key.used
        return max(self.c.header_key.used, self.c.header_value.used)

    cdef int _decode(self, const uint8_t* p, const uint8_t* end) noexcept nogil:
        """Append all records of the batch in `info`, which are [p, end), or none of them.  The
        columns have room.  Returns a code of records.pxd."""
        cdef columns before = self.c
        cdef section s
        cdef int code, kind
        s.base_offset = self.info.base_offset
        s.count = self.info.records_count
        s.last_offset_delta = self.info.last_offset_delta
        s.base_timestamp = self.info.base_timestamp
        s.max_timestamp = self.info.max_timestamp
        s.log_append_time = (self.info.attributes & ATTRIBUTE_LOG_APPEND_TIME) != 0
        s.start_offset = self.next_offset
        s.stop_offset = self.stop_offset
        code = decode_section(&self.c, &s, p, end)
        if code != RECORDS_OK:
            self.c = before
            return code
        kind = 1 if s.log_append_time else 0
        if kind != self.last_type and self.c.rows > before.rows:
            with gil:
                self.types.append((before.rows, kind))
            self.last_type = kind
        return RECORDS_OK

    cdef int _take_compressed(self, const uint8_t* p) except -100:
        """Append the records of the compressed batch at p, whose header is in `info`.  RUN_RESERVE:
        it is taken.  RUN_DONE: it does not fit into the pending columns.  Else the code of a
        fault."""
        cdef batch_info* info = &self.info
        cdef uint32_t size = info.size - BATCH_HEADER_BYTES
        cdef bytes private = PyBytes_FromStringAndSize(NULL, size)
        cdef uint8_t* body = <uint8_t*>PyBytes_AS_STRING(private)
        cdef uint32_t crc = 0
        cdef int code
        with nogil:
            memcpy(body, p + BATCH_RECORDS, size)
            if self.check_crc:
                crc = kd_crc32c(kd_crc32c(0, p + BATCH_ATTRIBUTES,
                                          BATCH_RECORDS - BATCH_ATTRIBUTES), body, size)
        if self.check_crc and crc != kd_get32(p + BATCH_CRC):
            return BATCH_BAD_CRC
        if info.records_count == 0 or info.attributes & ATTRIBUTE_CONTROL:
            self._passed()
            return RUN_RESERVE
        try:
            plain = self.decompressor.run(info.attributes & ATTRIBUTE_CODEC_MASK, private,
                                          self.max_decompressed_bytes)
        except FormatError as e:
            raise records_fault(self._where(), e, _HEADER_HINT) from e
        code = self._take_plain(kept(plain) if self.views else plain)
        if code == RUN_RESERVE:
            self._passed()
        return code

    cdef int _take_plain(self, object plain) except -100:
        """`_take_compressed` for the records `plain`.  With `views` the columns keep them."""
        cdef Py_buffer view
        cdef int code = RECORDS_OK, buffer_before = self.c.view_buffer
        cdef const uint8_t* base_before = self.c.view_base
        PyObject_GetBuffer(plain, &view, PyBUF_SIMPLE)
        try:
            if self.info.records_count > view.len // RECORD_MIN_BYTES:
                return RUN_HEADER
            if self.c.value.used + view.len > LARGEST_COLUMN and self.c.rows:
                self.stopped = True
                return RUN_DONE
            while True:
                self._reserve(view.len, 0)
                if self.views and self.c.view_buffer == buffer_before:
                    # Before any view names it by its number.
                    self.c.view_buffer = <int32_t>len(self.buffers.buffers)
                    self.buffers.add(<const uint8_t*>view.buf, view.len, plain)
                    self.c.view_base = <const uint8_t*>view.buf
                with nogil:
                    code = self._decode(<const uint8_t*>view.buf,
                                        <const uint8_t*>view.buf + view.len)
                if code != RECORDS_NEED_KEYS:
                    break
                self.keys_wanted = True
            if self.views and code != RECORDS_OK:
                self.buffers.buffers.pop()
        finally:
            self.c.view_base, self.c.view_buffer = base_before, buffer_before
            PyBuffer_Release(&view)
        return RUN_RESERVE if code == RECORDS_OK else RUN_RECORDS + code

    cdef int _reserve(self, size_t section_bytes, size_t n) except -1:
        """Make room for the batch in `info`, whose records are section_bytes long, and for what is
        likely to follow it in the n bytes that are still to be decoded."""
        cdef int64_t rows = self.c.rows + self.info.records_count, likely_rows
        cdef int64_t ahead = min(<int64_t>n, self.target_bytes - self.c_pending_bytes())
        cdef size_t bytes_ = section_bytes
        if ahead > <int64_t>section_bytes:
            bytes_ += ahead
            likely_rows = self.c.rows + <int64_t>(self.info.records_count
                                                  * (1.125 * bytes_ / section_bytes))
            rows = max(rows, min(likely_rows, self.target_rows + self.info.records_count))
        if rows > self.row_capacity:
            rows = max(rows, min(2 * self.row_capacity, self.target_rows + self.info.records_count))
            self._grow_rows(rows)
        if self.keys_wanted:
            self._reserve_keys(section_bytes, bytes_)
        if self.c.value.used + <int64_t>section_bytes + COPY_SLACK > self.value_capacity:
            self.value_data = expand(self.value_data, self.c.value.used,
                                     self.c.value.used + bytes_ + COPY_SLACK)
            self.value_capacity = self.value_data.capacity
        if self.include_headers:
            self._reserve_headers(section_bytes)
        if not self.views:
            self.c.value.offsets = <int32_t*>self.value_offsets.data
        self.c.value.validity = self.value_validity.data
        self.c.value.data = self.value_data.data
        self.c.offset = <int64_t*>self.offset.data
        self.c.timestamp = <int64_t*>self.timestamp.data
        return 0

    cdef _grow_rows(self, int64_t rows):
        """Make room for so many rows in the columns that all batches have."""
        cdef bint first = self.row_capacity == 0
        cdef int64_t capacity       # for the decoder once all columns have it: memory may run out
        if self.views:
            self.value_data = expand(self.value_data, self.c.rows * KD_VIEW_BYTES,
                                     rows * KD_VIEW_BYTES)
            capacity = <int64_t>self.value_data.capacity // KD_VIEW_BYTES
        else:
            self.value_offsets = expand(self.value_offsets, 0 if first else (self.c.rows + 1) * 4,
                                        (rows + 1) * 4)
            capacity = <int64_t>(self.value_offsets.capacity // 4) - 1
        self.value_validity = expand(self.value_validity, (self.c.rows + 7) // 8, (rows + 7) // 8)
        self.offset = expand(self.offset, self.c.rows * 8, rows * 8)
        self.timestamp = expand(self.timestamp, self.c.rows * 8, rows * 8)
        if self.include_headers:
            self.list_offsets = expand(self.list_offsets, 0 if first else (self.c.rows + 1) * 4,
                                       (rows + 1) * 4)
            self.list_validity = expand(self.list_validity, (self.c.rows + 7) // 8, (rows + 7) // 8)
            capacity = min(capacity, <int64_t>(self.list_offsets.capacity // 4) - 1)
        capacity = min(capacity, <int64_t>(self.offset.capacity // 8))
        self.row_capacity = min(capacity, <int64_t>self.value_validity.capacity * 8)

    cdef _reserve_keys(self, size_t section_bytes, size_t likely_bytes):
        """Make room for the keys of `row_capacity` rows, and of a batch of `section_bytes` bytes,
        where `likely_bytes` may come."""
        cdef bint first = self.key_data is None
        self.key_validity = expand(self.key_validity, 0 if first else (self.c.rows + 7) // 8,
                                   (self.row_capacity + 7) // 8)
        if self.views:
            self.key_data = expand(self.key_data, 0 if first else self.c.rows * KD_VIEW_BYTES,
                                   self.row_capacity * KD_VIEW_BYTES)
        else:
            self.key_offsets = expand(self.key_offsets, 0 if first else (self.c.rows + 1) * 4,
                                      (self.row_capacity + 1) * 4)
            if self.c.key.used + <int64_t>section_bytes + COPY_SLACK > self.key_capacity:
                self.key_data = expand(self.key_data, self.c.key.used,
                                       self.c.key.used + likely_bytes + COPY_SLACK)
                self.key_capacity = self.key_data.capacity
            self.c.key.offsets = <int32_t*>self.key_offsets.data
        self.c.key.validity = self.key_validity.data
        self.c.key.data = self.key_data.data

    cdef _reserve_headers(self, size_t section_bytes):
        cdef int64_t used = self._header_bytes(), rows = self.c.header_rows
        cdef int64_t rows_needed = rows + section_bytes // 2
        cdef bint first = self.header_rows_capacity == 0
        if used + <int64_t>section_bytes > self.header_capacity:
            self.header_key_data = expand(self.header_key_data, self.c.header_key.used,
                                          used + section_bytes)
            self.header_capacity = self.header_key_data.capacity
            if not self.views:
                self.header_value_data = expand(self.header_value_data, self.c.header_value.used,
                                                used + section_bytes)
                self.header_capacity = min(self.header_capacity,
                                           <int64_t>self.header_value_data.capacity)
        if rows_needed > self.header_rows_capacity:
            self.header_key_offsets = expand(self.header_key_offsets,
                                             0 if first else (rows + 1) * 4, (rows_needed + 1) * 4)
            self.header_key_validity = expand(self.header_key_validity, (rows + 7) // 8,
                                              (rows_needed + 7) // 8)
            self.header_value_validity = expand(self.header_value_validity, (rows + 7) // 8,
                                                (rows_needed + 7) // 8)
            self.header_rows_capacity = min(self.header_key_offsets.capacity // 4 - 1,
                                            self.header_key_validity.capacity * 8)
            if self.views:
                self.header_value_data = expand(self.header_value_data, rows * KD_VIEW_BYTES,
                                                rows_needed * KD_VIEW_BYTES)
                self.header_rows_capacity = min(
                    self.header_rows_capacity,
                    <int64_t>self.header_value_data.capacity // KD_VIEW_BYTES)
            else:
                self.header_value_offsets = expand(self.header_value_offsets,
                                                   0 if first else (rows + 1) * 4,
                                                   (rows_needed + 1) * 4)
        self.c.header_list.offsets = <int32_t*>self.list_offsets.data
        self.c.header_list.validity = self.list_validity.data
        self.c.header_list.data = NULL
        self.c.header_key.offsets = <int32_t*>self.header_key_offsets.data
        self.c.header_key.validity = self.header_key_validity.data
        self.c.header_key.data = self.header_key_data.data
        if not self.views:
            self.c.header_value.offsets = <int32_t*>self.header_value_offsets.data
        self.c.header_value.validity = self.header_value_validity.data
        self.c.header_value.data = self.header_value_data.data

    def _where(self):
        return f"{self.topic}-{self.partition}: record batch at offset {self.info.base_offset}"

    cdef object _fault(self, int code, const uint8_t* p, size_t n):
        if code == RUN_CODEC:
            return UnsupportedFormatError(
                f"{self._where()} has the unknown codec"
                f" {self.info.attributes & ATTRIBUTE_CODEC_MASK}",
                hint="this build reads " + ", ".join(CODEC_NAMES)
                + "; use another compression.type in the producer")
        if code == RUN_HEADER:
            return CorruptBatchError(
                f"{self._where()}: its header contradicts itself ({self.info.records_count} records"
                f" in {self.info.size} bytes, last offset delta {self.info.last_offset_delta})",
                hint=_HEADER_HINT)
        if code >= RUN_RECORDS:
            fault = records_error(code - RUN_RECORDS).decode()
            return CorruptBatchError(f"{self._where()}: {fault}", hint=_HEADER_HINT)
        offset = self.info.base_offset if n >= 8 else self.next_offset
        return batch_error(code,
                           f"{self.topic}-{self.partition} offset {offset}",
                           PyBytes_FromStringAndSize(<const char*>p,
                                                     min(n, <size_t>BATCH_HEADER_BYTES)))

    # -- Arrow out ---------------------------------------------------------------------------------

    def take(self):
        """The pending rows (0 or more) as a pyarrow.RecordBatch of `schema`.  Afterwards no rows
        are pending."""
        cdef int64_t rows = self.c.rows
        if rows == 0:
            self._reset()
            return _EMPTY[self.views][self.include_headers]
        data = self.buffers.take() if self.views else None
        arrays = [
            self._bytes(rows, &self.c.key, self.key_offsets, self.key_data, self.key_validity,
                        data),
            self._bytes(rows, &self.c.value, self.value_offsets, self.value_data,
                        self.value_validity, data),
            constant_array(_STRING, rows, self.topic),
            constant_array(_INT32, rows, self.partition),
            number_array(_INT64, rows, self.offset),
            number_array(_MICROSECONDS, rows, self.timestamp),
            timestamp_type_array(rows, self.types),
        ]
        if self.include_headers:
            arrays.append(self._headers(rows, data))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        self._reset()
        return batch

    cdef object _bytes(self, int64_t rows, const text_column* column, Block offsets, Block data,
                       Block validity, list buffers):
        if self.views:
            return view_array(rows, column, data, validity, buffers)
        return text_array(_BINARY, rows, column, offsets, data, validity)

    cdef object _headers(self, int64_t rows, list buffers):
        cdef int64_t n = self.c.header_rows
        kind = self.schema.field("headers").type
        if self.c.header_list.state == COLUMN_NULL:
            return pa.nulls(rows, kind)
        keys = text_array(_STRING, n, &self.c.header_key, self.header_key_offsets,
                          self.header_key_data, self.header_key_validity)
        values = self._bytes(n, &self.c.header_value, self.header_value_offsets,
                             self.header_value_data, self.header_value_validity, buffers)
        return header_array(kind, rows, &self.c.header_list, self.list_offsets, self.list_validity,
                            keys, values)
