# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Arrow to record batches.

It owns the encoder.  Rows are written straight from the Arrow buffers into blocks.  A record batch
is closed when the next record would make it larger than `batch_bytes`.  With a codec, the records
are written into a scratch block first and compressed as a whole.

Invariants: no batch has gaps; every batch has at least one record; the base offset is 0 and the
leader epoch -1, and the broker stamps both.  Arrow arrays are trusted to be valid, because they are
this process's own; lengths of records are not trusted to fit.
"""

import pyarrow as pa

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE)
from libc.stdint cimport (
    INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t)
from libc.string cimport memcpy

from kdirect.errors import ConfigError, FormatError

from kdirect.blocks cimport Block, take_block
from kdirect.format.compression cimport Compressor
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, BATCH_ATTRIBUTES, BATCH_BASE_OFFSET, BATCH_BASE_SEQUENCE,
    BATCH_BASE_TIMESTAMP, BATCH_CRC, BATCH_HEADER_BYTES, BATCH_LAST_OFFSET_DELTA,
    BATCH_LEADER_EPOCH, BATCH_LENGTH, BATCH_LENGTH_PREFIX_BYTES, BATCH_MAGIC, BATCH_MAGIC_V2,
    BATCH_MAX_TIMESTAMP, BATCH_PRODUCER_EPOCH, BATCH_PRODUCER_ID, BATCH_RECORDS,
    BATCH_RECORDS_COUNT, CODEC_NONE)

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

from kdirect.format.wire cimport kd_put16, kd_put32, kd_put64, kd_put_varint, kd_varint_size

cdef extern from "encode_run.h" nogil:
    int KD_ENCODE_MAX
    ctypedef struct kd_encode:
        uint8_t* p
        const uint8_t* limit
        int64_t rows
        int64_t count
        int64_t max_body
        int64_t delta
        const uint8_t* value_data
        const int32_t* value_offsets
        int64_t value_safe
        const uint8_t* key_data
        const int32_t* key_offsets
        int64_t key_safe
    int64_t kd_encode_records(kd_encode* run)

DEFAULT_BATCH_BYTES = 1 << 20
DEFAULT_MAX_RECORD_BYTES = 64 << 20

cdef enum:
    ENCODED_ALL = 0
    BATCH_IS_FULL = 1
    NEEDS_ROOM = 2
    RECORD_TOO_LARGE = 3
    HEADER_KEY_NULL = 4

    SLACK = 64                  # copies may pass the end by 31 bytes
    BLOCK_BYTES = 8 << 20       # batches are laid one after the other in blocks of about this size

cdef struct text_source:        # a binary or string array
    const uint8_t* validity     # NULL: no nulls
    const int32_t* offsets32
    const int64_t* offsets64
    const uint8_t* data
    const uint8_t* data_end     # of the buffer: copies may read up to here
    int64_t first               # index of row 0 in validity and offsets

cdef struct rows_source:
    int64_t rows
    text_source value
    bint has_keys
    text_source key
    const int64_t* timestamps   # NULL: default_timestamp
    const uint8_t* timestamps_validity
    int64_t timestamps_first
    int64_t default_timestamp
    bint has_headers
    const int32_t* list_offsets
    const uint8_t* list_validity
    int64_t list_first
    text_source header_key
    text_source header_value

cdef struct open_batch:
    uint8_t* out                # the block
    size_t capacity
    size_t start                # where the batch begins in it
    size_t used                 # the position after its last record
    int32_t count
    int64_t base_timestamp
    int64_t max_timestamp
    size_t need                 # of the record that did not fit


cdef class EncodedBatch:
    """One record batch of `records_count` records, at least 1.  `data` is a read-only view of it,
    and the object itself is a buffer."""
    cdef Block block
    cdef uint8_t* address
    cdef readonly Py_ssize_t size
    cdef readonly int32_t records_count

    def __init__(self):
        raise TypeError("record batches come from ArrowEncoder")

    @property
    def data(self):
        return memoryview(self)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.address, self.size, 1, flags)

    def __len__(self):
        return self.size

    def __repr__(self):
        return f"EncodedBatch({self.size} bytes, {self.records_count} records)"


# -- the inner loop --------------------------------------------------------------------------------

cdef inline bint _is_null(const uint8_t* validity, int64_t i) noexcept nogil:
    return validity != NULL and not (validity[i >> 3] >> (i & 7)) & 1


cdef inline int64_t _text(const text_source* s, int64_t row, const uint8_t** data) noexcept nogil:
    """Length of row `row`, -1 for null, and where it lies."""
    cdef int64_t i = s.first + row, begin
    if _is_null(s.validity, i):
        data[0] = NULL
        return -1
    if s.offsets32 != NULL:
        begin = s.offsets32[i]
        data[0] = s.data + begin
        return s.offsets32[i + 1] - begin
    begin = s.offsets64[i]
    data[0] = s.data + begin
    return s.offsets64[i + 1] - begin


cdef inline uint8_t* _put_text(uint8_t* p, const uint8_t* data, int64_t n) noexcept nogil:
    """Length and bytes."""
    p = kd_put_varint(p, n)
    if n > 0:
        memcpy(p, data, n)
        p += n
    return p


cdef int64_t _headers_bytes(const rows_source* s, int64_t begin, int64_t end) noexcept nogil:
    """Bytes of the headers at elements [begin, end); -1: a key is null."""
    cdef int64_t i, n, total = 0
    cdef const uint8_t* ignored
    for i in range(begin, end):
        n = _text(&s.header_key, i, &ignored)
        if n < 0:
            return -1
        total += kd_varint_size(n) + n
        n = _text(&s.header_value, i, &ignored)
        total += kd_varint_size(n) + (n if n > 0 else 0)
    return total


cdef int64_t _encode_plain(open_batch* b, const rows_source* s, int64_t row, size_t batch_bytes,
                           int64_t max_record_bytes) noexcept nogil:
    """Rows from `row` on that `encode_run.h` takes, into an open batch that has a record already;
    how many they were."""
    cdef kd_encode run
    cdef uint64_t delta = <uint64_t>s.default_timestamp - <uint64_t>b.base_timestamp
    cdef size_t limit = min(b.start + batch_bytes, b.capacity - SLACK)
    cdef int64_t taken
    if delta > 63 or limit <= b.used:
        return 0
    run.p = b.out + b.used
    run.limit = b.out + limit
    run.rows = s.rows - row
    run.count = b.count
    run.max_body = min(<int64_t>KD_ENCODE_MAX, max_record_bytes)
    run.delta = <int64_t>(delta << 1)
    run.value_data = s.value.data
    run.value_offsets = s.value.offsets32 + s.value.first + row
    run.value_safe = s.value.data_end - s.value.data - 32
    run.key_data = NULL
    run.key_offsets = NULL
    run.key_safe = 0
    if s.has_keys:
        if s.key.data == NULL:
            return 0
        run.key_data = s.key.data
        run.key_offsets = s.key.offsets32 + s.key.first + row
        run.key_safe = s.key.data_end - s.key.data - 32
    taken = kd_encode_records(&run)
    b.used = run.p - b.out
    b.count = <int32_t>run.count
    return taken


cdef int _encode_rows(open_batch* b, const rows_source* s, int64_t* row, size_t batch_bytes,
                      int64_t max_record_bytes) noexcept nogil:
    """Append rows from row[0] on to the open batch until something stops it; row[0] is the first
    one not written."""
    cdef bint plain = (
        s.value.validity == NULL and s.value.offsets32 != NULL and s.value.data != NULL
        and not s.has_headers and s.timestamps == NULL
        and (not s.has_keys or (s.key.validity == NULL and s.key.offsets32 != NULL)))
    cdef int code
    while row[0] < s.rows:
        if plain and b.count:
            row[0] += _encode_plain(b, s, row[0], batch_bytes, max_record_bytes)
            if row[0] == s.rows:
                break
        code = _encode_row(b, s, row[0], batch_bytes, max_record_bytes)
        if code != ENCODED_ALL:
            return code
        row[0] += 1
    return ENCODED_ALL


cdef inline int _encode_row(open_batch* b, const rows_source* s, int64_t i, size_t batch_bytes,
                            int64_t max_record_bytes) noexcept nogil:
    """Append one row, of any kind."""
    cdef int64_t key_length = -1, value_length, timestamp, delta, body, j, n
    cdef int64_t headers_begin = 0, headers_end = 0, headers_bytes
    cdef const uint8_t* key = NULL
    cdef const uint8_t* value
    cdef const uint8_t* text
    cdef uint8_t* p
    cdef size_t size
    value_length = _text(&s.value, i, &value)
    if s.has_keys:
        key_length = _text(&s.key, i, &key)
    timestamp = s.default_timestamp
    if s.timestamps != NULL and not _is_null(s.timestamps_validity, s.timestamps_first + i):
        timestamp = s.timestamps[s.timestamps_first + i]
    if b.count == 0:
        b.base_timestamp = timestamp
        b.max_timestamp = timestamp
    delta = <int64_t>(<uint64_t>timestamp - <uint64_t>b.base_timestamp)
    body = (1 + kd_varint_size(delta) + kd_varint_size(b.count)
            + kd_varint_size(key_length) + (key_length if key_length > 0 else 0)
            + kd_varint_size(value_length) + (value_length if value_length > 0 else 0))
    if s.has_headers and not _is_null(s.list_validity, s.list_first + i):
        headers_begin = s.list_offsets[s.list_first + i]
        headers_end = s.list_offsets[s.list_first + i + 1]
        headers_bytes = _headers_bytes(s, headers_begin, headers_end)
        if headers_bytes < 0:
            return HEADER_KEY_NULL
        body += headers_bytes
    body += kd_varint_size(headers_end - headers_begin)
    size = body + kd_varint_size(body)
    b.need = size
    if body > max_record_bytes:
        return RECORD_TOO_LARGE
    if b.count and b.used - b.start + size > batch_bytes:
        return BATCH_IS_FULL
    if b.used + size + SLACK > b.capacity:
        return NEEDS_ROOM
    p = kd_put_varint(b.out + b.used, body)
    p[0] = 0
    p = kd_put_varint(p + 1, delta)
    p = kd_put_varint(p, b.count)
    p = _put_text(p, key, key_length)
    p = _put_text(p, value, value_length)
    p = kd_put_varint(p, headers_end - headers_begin)
    for j in range(headers_begin, headers_end):
        n = _text(&s.header_key, j, &text)
        p = _put_text(p, text, n)
        n = _text(&s.header_value, j, &text)
        p = _put_text(p, text, n)
    b.used = p - b.out
    b.count += 1
    if timestamp > b.max_timestamp:
        b.max_timestamp = timestamp
    return ENCODED_ALL


cdef void put_batch_header(uint8_t* p, size_t size, int attributes, int32_t count,
                           int64_t base_timestamp, int64_t max_timestamp, int64_t producer_id,
                           int16_t producer_epoch, int32_t base_sequence) noexcept nogil:
    """The 61 bytes before the records of a batch of `size` bytes, and its CRC."""
    kd_put64(p + BATCH_BASE_OFFSET, 0)
    kd_put32(p + BATCH_LENGTH, <uint32_t>(size - BATCH_LENGTH_PREFIX_BYTES))
    kd_put32(p + BATCH_LEADER_EPOCH, 0xFFFFFFFF)
    p[BATCH_MAGIC] = BATCH_MAGIC_V2
    kd_put16(p + BATCH_ATTRIBUTES, attributes)
    kd_put32(p + BATCH_LAST_OFFSET_DELTA, count - 1)
    kd_put64(p + BATCH_BASE_TIMESTAMP, base_timestamp)
    kd_put64(p + BATCH_MAX_TIMESTAMP, max_timestamp)
    kd_put64(p + BATCH_PRODUCER_ID, producer_id)
    kd_put16(p + BATCH_PRODUCER_EPOCH, producer_epoch)
    kd_put32(p + BATCH_BASE_SEQUENCE, base_sequence)
    kd_put32(p + BATCH_RECORDS_COUNT, count)
    kd_put32(p + BATCH_CRC, kd_crc32c(0, p + BATCH_ATTRIBUTES, size - BATCH_ATTRIBUTES))


# -- Arrow in --------------------------------------------------------------------------------------

cdef object _LIST_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()),
                                             pa.field("value", pa.binary())]))


cdef object _as_text(str what, column, allow_null_column):
    """The column as binary, string or their large kin; ConfigError names the column."""
    if column is None:
        return None
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        try:
            column = pa.array(column, pa.binary())
        except (pa.ArrowException, TypeError, ValueError) as e:
            raise ConfigError(f"column {what}: {e}",
                              hint="give a pyarrow array of binary or string") from e
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if (pa.types.is_binary(kind) or pa.types.is_string(kind)
            or pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)):
        return column
    if pa.types.is_null(kind) and allow_null_column:
        return None
    if pa.types.is_null(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    if str(kind) in ("binary_view", "string_view"):
        return column.cast(pa.large_binary())
    raise ConfigError(f"column {what} has type {kind}", hint="cast it to binary or string")


cdef object _as_timestamps(column):
    if column is None:
        return None
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.array(column)
    try:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
        if pa.types.is_timestamp(column.type) or pa.types.is_integer(column.type):
            return column.cast(pa.int64())
    except pa.ArrowException as e:
        raise ConfigError(f"column timestamp: {e}",
                          hint="give milliseconds since 1970, or a timestamp") from e
    raise ConfigError(f"column timestamp has type {column.type}",
                      hint="give milliseconds since 1970 as int64, or a timestamp")


cdef object _as_headers(column):
    if column is None:
        return None
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.array(column, _LIST_TYPE)
    if pa.types.is_null(column.type):
        return None
    try:
        return column if column.type == _LIST_TYPE else column.cast(_LIST_TYPE)
    except pa.ArrowException as e:
        raise ConfigError(f"column headers has type {column.type}",
                          hint="give array<struct<key:string,value:binary>>") from e


cdef const uint8_t* _pointer(buffer):
    cdef uintptr_t address = 0 if buffer is None else buffer.address
    return <const uint8_t*>address


cdef void _source_of(array, text_source* s):
    """Where the rows of a binary-like pyarrow.Array lie; the array must outlive the source."""
    validity, offsets, data = array.buffers()
    s.validity = _pointer(validity) if array.null_count else NULL
    s.offsets32 = s.offsets64 = NULL
    if pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type):
        s.offsets64 = <const int64_t*>_pointer(offsets)
    else:
        s.offsets32 = <const int32_t*>_pointer(offsets)
    s.data = _pointer(data)
    s.data_end = s.data + (0 if data is None else <int64_t>data.size)
    s.first = array.offset


cdef class ArrowEncoder:
    """Encodes columns into record batches of about `batch_bytes` before compression.

    A record larger than `batch_bytes` gets a batch of its own; one larger than `max_record_bytes`
    is a FormatError that names its row.  `level` is the codec's (see `compression.Compressor`).
    One thread at a time; the batches own their memory and may be kept, sent and dropped in any
    order."""

    cdef readonly int64_t batch_bytes
    cdef readonly int64_t max_record_bytes
    cdef Compressor compressor
    cdef int64_t expected_bytes
    cdef Block block                # the block that batches are laid into now
    cdef open_batch b
    cdef Block scratch              # with a codec: the open batch

    def __init__(self, *, str compression="none", int64_t batch_bytes=DEFAULT_BATCH_BYTES,
                 int64_t max_record_bytes=DEFAULT_MAX_RECORD_BYTES, level=None):
        if not 1 <= batch_bytes <= 1 << 30:
            raise ConfigError(f"batch_bytes {batch_bytes} is out of range",
                              hint=f"give 1 to {1 << 30}")
        if not 1 <= max_record_bytes <= 1 << 30:
            raise ConfigError(f"max_record_bytes {max_record_bytes} is out of range",
                              hint=f"give 1 to {1 << 30}")
        self.compressor = Compressor(compression, level)
        self.batch_bytes = batch_bytes
        self.max_record_bytes = max_record_bytes

    def encode(self, values, keys=None, headers=None, timestamps_ms=None, *,
               int64_t default_timestamp_ms, int64_t producer_id=-1, int16_t producer_epoch=-1,
               int32_t base_sequence=-1):
        """Record batches of the rows, in order, as a list of `EncodedBatch`.

        `values` and `keys` are pyarrow arrays or chunked arrays of binary, string or their large
        kin (null is a null value or key); `headers` of list<struct<key: string, value: binary>>;
        `timestamps_ms` of int64 ms or timestamps, null for `default_timestamp_ms`.  With a producer
        id, base sequences count on from `base_sequence`.  ConfigError: a type or length that does
        not fit.  FormatError: a record too large, or a header without a key."""
        cdef rows_source s
        cdef int64_t row, done = 0
        cdef int code
        cdef list out = []
        cdef dict columns = {"value": _as_text("value", values, False)}
        if columns["value"] is None:
            raise ConfigError("column value is missing",
                              hint="give a column of binary or string named value")
        for name, column in (("key", _as_text("key", keys, True)),
                             ("headers", _as_headers(headers)),
                             ("timestamp", _as_timestamps(timestamps_ms))):
            if column is not None:
                if len(column) != len(columns["value"]):
                    raise ConfigError(f"column {name} has {len(column)} rows, value has"
                                      f" {len(columns['value'])}",
                                      hint="give columns of one length")
                columns[name] = column
        table = pa.table(columns)
        # What the rows take up at most: few rows shall not hold a large block.
        self.expected_bytes = table.nbytes + table.num_rows * RECORD_FRAME_BYTES
        self._open()
        for chunk in table.to_batches():
            s.rows = chunk.num_rows
            s.default_timestamp = default_timestamp_ms
            held = self._sources(chunk, columns, &s)
            row = 0
            while row < s.rows:
                with nogil:
                    code = _encode_rows(&self.b, &s, &row, self.batch_bytes, self.max_record_bytes)
                if code == BATCH_IS_FULL:
                    base_sequence = self._close(out, producer_id, producer_epoch, base_sequence)
                elif code == NEEDS_ROOM:
                    self._more_room()
                elif code == RECORD_TOO_LARGE:
                    raise FormatError(f"record of {self.b.need} bytes in row {done + row} is larger"
                                      f" than {self.max_record_bytes}",
                                      hint="write less into one record; a topic's max.message.bytes"
                                      " bounds it too")
                elif code == HEADER_KEY_NULL:
                    raise FormatError(f"a header in row {done + row} has no key",
                                      hint="give every header a key")
            done += s.rows
            del held
        if self.b.count:
            self._close(out, producer_id, producer_epoch, base_sequence)
        self.block = None
        return out

    cdef object _sources(self, chunk, dict columns, rows_source* s):
        """Fills `s` from a record batch; returns what must be kept alive."""
        cdef list held = [chunk]
        value = chunk.column("value")
        held.append(value)
        _source_of(value, &s.value)
        s.has_keys = "key" in columns
        if s.has_keys:
            key = chunk.column("key")
            held.append(key)
            _source_of(key, &s.key)
        s.timestamps = NULL
        if "timestamp" in columns:
            stamps = chunk.column("timestamp")
            held.append(stamps)
            validity, data = stamps.buffers()
            s.timestamps = <const int64_t*>_pointer(data)
            s.timestamps_validity = _pointer(validity) if stamps.null_count else NULL
            s.timestamps_first = stamps.offset
        s.has_headers = "headers" in columns
        if s.has_headers:
            lists = chunk.column("headers")
            elements = lists.values
            if elements.null_count:
                raise FormatError("a header is null",
                                  hint="leave it out, or give it a key and a null value")
            names, contents = elements.field(0), elements.field(1)
            held += [lists, elements, names, contents]
            validity, offsets = lists.buffers()[:2]
            s.list_offsets = <const int32_t*>_pointer(offsets)
            s.list_validity = _pointer(validity) if lists.null_count else NULL
            s.list_first = lists.offset
            _source_of(names, &s.header_key)
            _source_of(contents, &s.header_value)
        return held

    cdef int _open(self) except -1:
        """A new batch, after the last one in the block if there is room for its header at least.
        """
        cdef size_t room = BATCH_HEADER_BYTES + SLACK
        self.b.count = 0
        if self.compressor.codec != CODEC_NONE:
            if self.scratch is None:
                self.scratch = take_block(self.batch_bytes + BATCH_HEADER_BYTES + SLACK)
            self.b.out = self.scratch.data
            self.b.capacity = self.scratch.capacity
            self.b.start = 0
        else:
            if self.block is None or self.b.used + room > self.b.capacity:
                self.block = take_block(min(self.expected_bytes, <int64_t>BLOCK_BYTES) + room)
                self.b.out = self.block.data
                self.b.capacity = self.block.capacity
                self.b.used = 0
            self.b.start = self.b.used
        self.b.used = self.b.start + BATCH_HEADER_BYTES
        return 0

    cdef int _more_room(self) except -1:
        """Move the open batch to the start of a block that holds the record that did not fit, and
        more."""
        cdef size_t have = self.b.used - self.b.start
        cdef size_t need = have + self.b.need + SLACK
        cdef Block larger = take_block(max(need,
                                           min(max(2 * have, <size_t>BLOCK_BYTES),
                                               <size_t>self.batch_bytes + need)))
        memcpy(larger.data, self.b.out + self.b.start, have)
        if self.compressor.codec != CODEC_NONE:
            self.scratch = larger
        else:
            self.block = larger
        self.b.out = larger.data
        self.b.capacity = larger.capacity
        self.b.start = 0
        self.b.used = have
        return 0

    cdef int32_t _close(self, list out, int64_t producer_id, int16_t producer_epoch,
                        int32_t base_sequence) except? -2:
        """Finish the open batch, append it to `out`, open the next; the base sequence of the next.
        """
        cdef uint8_t* p = self.b.out + self.b.start
        cdef size_t size = self.b.used - self.b.start
        cdef int attributes = CODEC_NONE
        cdef int32_t count = self.b.count
        cdef Block block = self.block
        cdef EncodedBatch batch
        if self.compressor.codec != CODEC_NONE:
            records = memoryview(self.scratch)[BATCH_HEADER_BYTES:size]
            compressed = memoryview(self.compressor.run(records))
            if <size_t>compressed.nbytes < size - BATCH_HEADER_BYTES:
                attributes = self.compressor.codec
                size = BATCH_HEADER_BYTES + compressed.nbytes
                block = take_block(size)
                memoryview(block)[BATCH_HEADER_BYTES:size] = compressed.cast("B")
            else:       # not worth it: send the records as they are
                block = take_block(size)
                memcpy(block.data + BATCH_HEADER_BYTES, p + BATCH_HEADER_BYTES,
                       size - BATCH_HEADER_BYTES)
            p = block.data
        with nogil:
            put_batch_header(p, size, attributes, count, self.b.base_timestamp,
                             self.b.max_timestamp, producer_id, producer_epoch, base_sequence)
        batch = EncodedBatch.__new__(EncodedBatch)
        batch.block = block
        batch.address = p
        batch.size = size
        batch.records_count = count
        out.append(batch)
        self._open()
        return base_sequence if base_sequence < 0 else <int32_t>((<int64_t>base_sequence
                                                                  + count) & 0x7FFFFFFF)
