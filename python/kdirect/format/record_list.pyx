# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A few records as Python objects, to bytes and from bytes: for single ones, tools and tests.

Law: the same bytes are accepted and refused as by `decode.ArrowDecoder`, with the same errors.
Many rows belong there, and in `encode.ArrowEncoder`.  Input bytes may change while they are read
(see `records`); compressed ones are copied first.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE)
from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from kdirect.errors import ConfigError, FormatError
from kdirect.model import Record

from kdirect.format.batch cimport (
    BATCH_OK, BATCH_TRUNCATED, batch_info, check_batch_crc, offsets_are_possible,
    parse_batch_header)
from kdirect.blocks cimport Block, take_block
from kdirect.format.compression import records_fault
from kdirect.format.compression cimport Compressor, Decompressor
from kdirect.format.decode import DEFAULT_MAX_DECOMPRESSED_BYTES
from kdirect.format.decode cimport RUN_CODEC, RUN_HEADER, RUN_RECORDS, ArrowDecoder
from kdirect.format.encode cimport RECORD_FRAME_BYTES, put_batch_header
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_LOG_APPEND_TIME, BATCH_HEADER_BYTES,
    BATCH_RECORDS, CODEC_NONE, CODEC_ZSTD)
from kdirect.format.records cimport (
    RECORDS_BAD_FIELD, RECORDS_BAD_OFFSET, RECORDS_OK, RECORDS_TRAILING, parse_header, parse_record,
    record_view)
from kdirect.format.wire cimport kd_put_varint, kd_varint_size

cdef enum:
    MAX_BATCH_BYTES = 0x7FFFFFFF - 61


# -- from bytes ------------------------------------------------------------------------------------
cdef inline object _bytes(const uint8_t* p, int64_t length):
    return None if length < 0 else PyBytes_FromStringAndSize(<const char*>p, length)


def decode_records(data, str topic not None, int32_t partition, int64_t start_offset=0,
                   int64_t stop_offset=INT64_MAX, *, bint check_crc=True,
                   int64_t max_decompressed_bytes=DEFAULT_MAX_DECOMPRESSED_BYTES):
    """The records of the whole batches at the start of `data` with offsets in [start_offset,
    stop_offset).

    Returns (list of `Record`, bytes consumed, next offset).  Raises as `ArrowDecoder.feed` does;
    batches before the broken one are returned first."""
    cdef Py_buffer view
    cdef list out = []
    cdef size_t position = 0
    cdef int64_t next_offset = start_offset
    cdef ArrowDecoder faults = None
    cdef batch_info info
    cdef const uint8_t* p
    cdef int code
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        while position < <size_t>view.len:
            p = <const uint8_t*>view.buf + position
            if check_crc:
                code = check_batch_crc(p, view.len - position, &info)
            else:
                code = parse_batch_header(p, view.len - position, &info)
                if code == BATCH_OK and info.size > view.len - position:
                    code = BATCH_TRUNCATED
            if code == BATCH_TRUNCATED:
                break
            if code == BATCH_OK:
                code = _decode_batch(out, p, &info, topic, partition, next_offset, stop_offset,
                                     max_decompressed_bytes)
            if code != BATCH_OK:
                if position:
                    break
                faults = ArrowDecoder(topic, partition, start_offset=start_offset)
                faults.info = info
                raise faults._fault(code, p, view.len)
            next_offset = max(next_offset, info.base_offset + info.last_offset_delta + 1)
            position += info.size
    finally:
        PyBuffer_Release(&view)
    return out, position, next_offset


cdef int _decode_batch(list out, const uint8_t* p, const batch_info* info, str topic,
                       int32_t partition, int64_t start_offset, int64_t stop_offset,
                       uint64_t limit) except -100:
    """Appends the records of one batch whose frame is good; a code as `ArrowDecoder._fault` takes
    it."""
    cdef Py_buffer view
    cdef int code
    cdef int codec = info.attributes & ATTRIBUTE_CODEC_MASK
    cdef Py_ssize_t before = len(out)
    if not offsets_are_possible(info) or info.records_count < 0:
        return RUN_HEADER
    if codec > CODEC_ZSTD:
        return RUN_CODEC
    if info.attributes & ATTRIBUTE_CONTROL or info.base_offset >= stop_offset:
        return BATCH_OK
    if info.base_offset + info.last_offset_delta < start_offset:
        return BATCH_OK
    if codec == CODEC_NONE:
        code = _decode_plain(out, p + BATCH_RECORDS, p + info.size, info, topic, partition,
                             start_offset, stop_offset)
    elif info.records_count == 0:
        return BATCH_OK
    else:
        try:
            private = PyBytes_FromStringAndSize(<const char*>p + BATCH_RECORDS,
                                                info.size - BATCH_HEADER_BYTES)
            plain = Decompressor().run(codec, private, limit)
        except FormatError as e:
            raise records_fault(f"{topic}-{partition}: record batch at offset {info.base_offset}",
                                e) from e
        PyObject_GetBuffer(plain, &view, PyBUF_SIMPLE)
        try:
            code = _decode_plain(out, <const uint8_t*>view.buf, <const uint8_t*>view.buf + view.len,
                                 info, topic, partition, start_offset,
                                 stop_offset)
        finally:
            PyBuffer_Release(&view)
    if code != RECORDS_OK:
        del out[before:]
        return RUN_RECORDS + code
    return BATCH_OK


cdef int _decode_plain(list out, const uint8_t* p, const uint8_t* end, const batch_info* info,
                       str topic, int32_t partition, int64_t start_offset,
                       int64_t stop_offset) except -100:
    cdef record_view r
    cdef int error = 0
    cdef int32_t i, j
    cdef int64_t previous = -1, offset, timestamp, a, b
    cdef int kind = 1 if info.attributes & ATTRIBUTE_LOG_APPEND_TIME else 0
    cdef const uint8_t* q
    cdef const uint8_t* name
    cdef const uint8_t* value
    for i in range(info.records_count):
        p = parse_record(p, end, &r, &error)
        if p == NULL:
            return error
        if r.offset_delta <= previous or r.offset_delta > info.last_offset_delta:
            return RECORDS_BAD_OFFSET
        previous = r.offset_delta
        offset = info.base_offset + r.offset_delta
        if offset < start_offset or offset >= stop_offset:
            continue
        timestamp = info.max_timestamp
        if not kind:
            timestamp = <int64_t>(<uint64_t>info.base_timestamp + <uint64_t>r.timestamp_delta)
        headers = ()
        if r.headers_count:
            found = []
            q = r.headers
            for j in range(r.headers_count):
                q = parse_header(q, r.end, &name, &a, &value, &b)
                if q == NULL:
                    return RECORDS_BAD_FIELD
                key = PyBytes_FromStringAndSize(<const char*>name, a).decode("utf-8", "replace")
                found.append((key, _bytes(value, b)))
            headers = tuple(found)
        out.append(Record(topic, partition, offset, timestamp, kind, _bytes(r.key, r.key_length),
                          _bytes(r.value, r.value_length), headers))
    return RECORDS_OK if p == end else RECORDS_TRAILING


# -- to bytes --------------------------------------------------------------------------------------
cdef inline object _as_bytes(thing, str what):
    if thing is None or PyBytes_CheckExact(thing):
        return thing
    if isinstance(thing, str):
        return (<str>thing).encode()
    try:
        return bytes(memoryview(thing))
    except TypeError:
        raise ConfigError(f"a record's {what} is a {type(thing).__name__}",
                          hint="give bytes, str or None") from None


cdef inline int64_t _length(thing):
    return -1 if thing is None else PyBytes_GET_SIZE(thing)


cdef inline uint8_t* _put_bytes(uint8_t* p, thing):
    cdef int64_t n = _length(thing)
    p = kd_put_varint(p, n)
    if n > 0:
        memcpy(p, PyBytes_AS_STRING(thing), n)
        p += n
    return p


cdef list _as_rows(records, int64_t* bound):
    """`records` with all text as bytes and headers as lists; adds to `bound` an upper bound of the
    bytes that they take."""
    cdef list rows = []
    cdef int64_t body, timestamp
    for record in records:
        key, value, headers, stamp = record
        key = _as_bytes(key, "key")
        value = _as_bytes(value, "value")
        timestamp = stamp
        body = RECORD_FRAME_BYTES + max(_length(key), 0) + max(_length(value), 0)
        if headers:
            pairs = []
            for name, content in headers:
                name = _as_bytes(name, "header key")
                if name is None:
                    raise FormatError("a record's header has no key",
                                      hint="give every header a key")
                content = _as_bytes(content, "header value")
                pairs.append((name, content))
                body += 10 + _length(name) + max(_length(content), 0)
            headers = pairs
        bound[0] += body
        if bound[0] > MAX_BATCH_BYTES:
            raise FormatError(f"records of more than {MAX_BATCH_BYTES} bytes do not fit into a"
                              " batch", hint="split them over several batches")
        rows.append((key, value, headers, timestamp))
    return rows


cdef int64_t _body_bytes(int64_t delta, int32_t count, key, value, headers):
    """The bytes of a record after its length."""
    cdef int64_t n = _length(key)
    cdef int64_t body = 1 + kd_varint_size(delta) + kd_varint_size(count)
    body += kd_varint_size(n) + max(n, 0)
    n = _length(value)
    body += kd_varint_size(n) + max(n, 0)
    if not headers:
        return body + 1
    body += kd_varint_size(len(headers))
    for name, content in headers:
        n = _length(name)
        body += kd_varint_size(n) + n
        n = _length(content)
        body += kd_varint_size(n) + max(n, 0)
    return body


cdef uint8_t* _put_record(uint8_t* p, int64_t delta, int32_t count, key, value, headers):
    p = kd_put_varint(p, _body_bytes(delta, count, key, value, headers))
    p[0] = 0                            # attributes
    p = kd_put_varint(p + 1, delta)
    p = kd_put_varint(p, count)
    p = _put_bytes(p, key)
    p = _put_bytes(p, value)
    if not headers:
        p[0] = 0
        return p + 1
    p = kd_put_varint(p, len(headers))
    for name, content in headers:
        p = _put_bytes(p, name)
        p = _put_bytes(p, content)
    return p


def encode_records(records, str compression="none", *, level=None, int64_t producer_id=-1,
                   int16_t producer_epoch=-1, int32_t base_sequence=-1, int attributes=0):
    """One record batch, as bytes, from an iterable of (key, value, headers, timestamp_ms).

    Keys and values are bytes, str or None; headers are (key, value) pairs or None.  `attributes`
    are bits to set in addition to the codec's (for tests and transactions).  For single produces
    and tests; columns go through `ArrowEncoder`.  Raises ConfigError for an empty list, FormatError
    for records that do not fit into a batch."""
    cdef int64_t bound = BATCH_HEADER_BYTES, timestamp, base_timestamp = 0, max_timestamp = 0
    cdef int32_t count = 0
    cdef list rows = _as_rows(records, &bound)
    cdef Block block
    cdef uint8_t* p
    cdef size_t size
    cdef Compressor compressor
    if not rows:
        raise ConfigError("a record batch needs at least one record",
                          hint="do not encode an empty list")
    block = take_block(bound)
    p = block.data + BATCH_HEADER_BYTES
    for key, value, headers, timestamp in rows:
        if count == 0:
            base_timestamp = max_timestamp = timestamp
        elif timestamp > max_timestamp:
            max_timestamp = timestamp
        p = _put_record(p, <int64_t>(<uint64_t>timestamp - <uint64_t>base_timestamp), count, key,
                        value, headers)
        count += 1
    size = p - block.data
    attributes &= ~ATTRIBUTE_CODEC_MASK
    if compression != "none":
        compressor = Compressor(compression, level)
        compressed = memoryview(compressor.run(memoryview(block)[BATCH_HEADER_BYTES:size]))
        if <size_t>compressed.nbytes < size - BATCH_HEADER_BYTES:
            size = BATCH_HEADER_BYTES + compressed.nbytes
            memoryview(block)[BATCH_HEADER_BYTES:size] = compressed.cast("B")
            attributes |= compressor.codec
    put_batch_header(block.data, size, attributes, count, base_timestamp, max_timestamp,
                     producer_id, producer_epoch, base_sequence)
    return PyBytes_FromStringAndSize(<const char*>block.data, size)
