# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Records on their way into a batch: one `RecordBuilder` for each partition that gathers.

Owns: the bytes of one open batch, written record by record as they come.  The producer decides when
a batch is sent, over which path, and which callbacks hear of it.

Invariants: a record is in the batch whole or not at all; `take` gives a batch that no one else
holds and leaves the builder empty.  One thread at a time: the producer's lock.
"""

from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from kdirect.machine cimport kd_wall_ns
from kdirect.errors import ConfigError, FormatError

from kdirect.format.compression cimport Compressor
from kdirect.format.encode cimport put_batch_header
from kdirect.format.layout cimport BATCH_HEADER_BYTES, CODEC_NONE

from kdirect.format.wire cimport kd_put_varint, kd_varint_size

cdef enum:
    FIRST_BYTES = 4096
    FRAME_BYTES = 48           # lengths and deltas of a record, at most


def as_bytes(thing, str what):
    """`thing` as bytes, or None: bytes, str (UTF-8), or anything with a buffer of bytes;
    ConfigError for the rest, numbers too."""
    if thing is None or PyBytes_CheckExact(thing):
        return thing
    if isinstance(thing, str):
        return (<str> thing).encode()
    try:
        return bytes(memoryview(thing))
    except TypeError:
        raise ConfigError(
            f"a record's {what} is a {type(thing).__name__}",
            hint="give bytes, str or None; serialise other types first") from None


cdef list header_pairs(headers, int64_t* size):
    """`headers` as [(name, value or None)] of bytes; the size of all of them goes to `size`."""
    cdef int64_t n
    cdef list pairs = []
    for name, content in (headers.items() if isinstance(headers, dict) else headers):
        name = as_bytes(name, "header key")
        if name is None:
            raise FormatError("a record's header has no key", hint="give every header a key")
        content = as_bytes(content, "header value")
        pairs.append((name, content))
        n = len(name)
        size[0] += kd_varint_size(n) + n
        n = -1 if content is None else len(content)
        size[0] += kd_varint_size(n) + (n if n > 0 else 0)
    return pairs


cdef inline uint8_t* put_bytes(uint8_t* p, thing, int64_t n):
    """Write a length, and so many bytes of `thing`; -1: there are none."""
    p = kd_put_varint(p, n)
    if n > 0:
        memcpy(p, PyBytes_AS_STRING(thing), n)
        p += n
    return p


cdef uint8_t* put_headers(uint8_t* p, list pairs) except NULL:
    """Write headers, for which there is room."""
    p = kd_put_varint(p, len(pairs))
    for name, content in pairs:
        p = put_bytes(p, name, PyBytes_GET_SIZE(name))
        p = put_bytes(p, content, -1 if content is None else PyBytes_GET_SIZE(content))
    return p


cdef class RecordBuilder:
    """See the module.  `records` in the open batch; `size` of it in bytes with its frame (0:
    empty)."""

    cdef uint8_t* _data
    cdef size_t _capacity
    cdef size_t _used
    cdef readonly int32_t records
    cdef int64_t _base_timestamp, _max_timestamp
    cdef Compressor _compressor

    def __cinit__(self):
        self._data = NULL

    def __init__(self, str compression="none", level=None):
        self._compressor = Compressor(compression, level)

    def __dealloc__(self):
        free(self._data)

    @property
    def size(self):
        return self._used

    def add(self, key, value, headers, timestamp):
        """Append a record of bytes or None; `headers` are (str, bytes or None) pairs, or None;
        `timestamp` in ms since 1970, or None for now.  The size of the batch then."""
        cdef int64_t timestamp_ms = kd_wall_ns() // 1000000 if timestamp is None else timestamp
        cdef int64_t kn = -1 if key is None else PyBytes_GET_SIZE(key)
        cdef int64_t vn = -1 if value is None else PyBytes_GET_SIZE(value)
        cdef int64_t hn = 0, delta, body
        cdef size_t need
        cdef uint8_t* p
        cdef list pairs = header_pairs(headers, &hn) if headers else None
        if self.records == 0:
            self._used = BATCH_HEADER_BYTES
            self._base_timestamp = self._max_timestamp = timestamp_ms
        delta = <int64_t> (<uint64_t> timestamp_ms - <uint64_t> self._base_timestamp)
        body = (1 + kd_varint_size(delta) + kd_varint_size(self.records)
                + kd_varint_size(kn) + (kn if kn > 0 else 0)
                + kd_varint_size(vn) + (vn if vn > 0 else 0)
                + kd_varint_size(len(pairs) if pairs is not None else 0) + hn)
        need = self._used + <size_t> body + FRAME_BYTES
        if need > <size_t> (INT32_MAX - BATCH_HEADER_BYTES):
            if self.records == 0:
                self._used = 0
            raise FormatError(
                f"a record of {body} bytes does not fit a batch", hint="send less in one record")
        if need > self._capacity:
            self._grow(need)
        p = kd_put_varint(self._data + self._used, body)
        p[0] = 0
        p = kd_put_varint(p + 1, delta)
        p = kd_put_varint(p, self.records)
        p = put_bytes(p, key, kn)
        p = put_bytes(p, value, vn)
        if pairs is None:
            p[0] = 0
            p += 1
        else:
            p = put_headers(p, pairs)
        self._used = p - self._data
        self.records += 1
        if timestamp_ms > self._max_timestamp:
            self._max_timestamp = timestamp_ms
        return self._used

    cdef int _grow(self, size_t need) except -1:
        cdef size_t capacity = self._capacity if self._capacity else FIRST_BYTES
        cdef uint8_t* data
        while capacity < need:
            capacity *= 2
        data = <uint8_t*> realloc(self._data, capacity)
        if data == NULL:
            raise MemoryError()
        self._data = data
        self._capacity = capacity
        return 0

    def take(self):
        """The batch as bytes, complete but for what the broker stamps; at least one record must be
        in it."""
        cdef size_t size = self._used
        cdef int attributes = CODEC_NONE
        cdef bytes out
        cdef const uint8_t* packed
        if self.records == 0:
            raise ConfigError("a record batch needs at least one record", hint="add one first")
        if self._compressor.codec != CODEC_NONE:
            plain = PyBytes_FromStringAndSize(
                <const char*> self._data + BATCH_HEADER_BYTES, size - BATCH_HEADER_BYTES)
            compressed = bytes(self._compressor.run(memoryview(plain)))
            if <size_t> len(compressed) < size - BATCH_HEADER_BYTES:
                attributes = self._compressor.codec
                size = BATCH_HEADER_BYTES + len(compressed)
                packed = <const uint8_t*> PyBytes_AS_STRING(compressed)
                memcpy(self._data + BATCH_HEADER_BYTES, packed, size - BATCH_HEADER_BYTES)
        with nogil:
            put_batch_header(self._data, size, attributes, self.records, self._base_timestamp,
                             self._max_timestamp, -1, -1, -1)
        out = PyBytes_FromStringAndSize(<const char*> self._data, size)
        self.clear()
        return out

    cpdef clear(self):
        """Forget the open batch; the memory of a large one goes back."""
        self.records = 0
        self._used = 0
        if self._capacity > 16 * FIRST_BYTES:
            free(self._data)
            self._data = NULL
            self._capacity = 0
