# cython: language_level=3, boundscheck=False, wraparound=False
"""The frame of record batch v2: parse, check, stamp; and the smallest encoder.

Law of the room: ``kdirect.format`` knows bytes and nothing else: no files, no sockets, no clocks.
This file owns the 61-byte batch header and its CRC; records inside a batch belong to ``codec``.

- The C functions never read outside the ``n`` bytes they are given, whatever those bytes say, and
  read each field once: the memory may belong to a peer that is still writing.
- The CRC-32C covers ``attributes`` to the end, so base offset and leader epoch are stamped in place
  without touching it.
- A batch that the broker accepts has offsets without gaps (``check_batch``); a batch that a reader
  accepts may have gaps, because compaction leaves them (``check_batch_crc``).
"""

from dataclasses import dataclass

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_DELETE_HORIZON, ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_TRANSACTIONAL, BATCH_ATTRIBUTES, BATCH_BASE_OFFSET, BATCH_BASE_SEQUENCE,
    BATCH_BASE_TIMESTAMP, BATCH_CRC, BATCH_HEADER_BYTES, BATCH_LAST_OFFSET_DELTA,
    BATCH_LEADER_EPOCH, BATCH_LENGTH, BATCH_LENGTH_PREFIX_BYTES, BATCH_MAGIC, BATCH_MAGIC_V2,
    BATCH_MAX_TIMESTAMP, BATCH_MIN_LENGTH, BATCH_PRODUCER_EPOCH, BATCH_PRODUCER_ID, BATCH_RECORDS,
    BATCH_RECORDS_COUNT, CODEC_ZSTD)

from kdirect.errors import CorruptBatchError, UnsupportedFormatError

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)
    ctypedef uint32_t (*kd_crc32c_function)(uint32_t, const void*, size_t)
    ctypedef struct kd_crc32c_implementation:
        const char* name
        kd_crc32c_function function
    kd_crc32c_implementation kd_crc32c_implementations[4]
    int KD_CRC32C_IMPLEMENTATIONS

from kdirect.format.wire cimport (
    kd_get16, kd_get32, kd_get64, kd_get8, kd_put16, kd_put32, kd_put64, kd_put_varint,
    kd_varint_size)

cdef enum:
    KNOWN_ATTRIBUTES = (ATTRIBUTE_CODEC_MASK | ATTRIBUTE_LOG_APPEND_TIME | ATTRIBUTE_TRANSACTIONAL
                        | ATTRIBUTE_CONTROL
                        | ATTRIBUTE_DELETE_HORIZON)
    MAX_BATCH_LENGTH = 0x7FFFFFFF - BATCH_LENGTH_PREFIX_BYTES


# -- C interface -----------------------------------------------------------------------------------

cdef int parse_batch_header(const uint8_t* p, size_t n, batch_info* out) noexcept nogil:
    cdef uint32_t length
    memset(out, 0, sizeof(batch_info))
    if n < BATCH_LENGTH_PREFIX_BYTES:
        return BATCH_TRUNCATED
    out.base_offset = <int64_t>kd_get64(p + BATCH_BASE_OFFSET)
    length = kd_get32(p + BATCH_LENGTH)
    if length < BATCH_MIN_LENGTH or length > <uint32_t>MAX_BATCH_LENGTH:
        # A batch of magic 0 or 1 may be shorter than our header: say what it is rather than that
        # its length is bad.
        if (n > BATCH_MAGIC and length <= <uint32_t>MAX_BATCH_LENGTH
                and length > BATCH_MAGIC - BATCH_LENGTH_PREFIX_BYTES
                and kd_get8(p + BATCH_MAGIC) < BATCH_MAGIC_V2):
            out.size = BATCH_LENGTH_PREFIX_BYTES + length
            return BATCH_BAD_MAGIC
        return BATCH_BAD_LENGTH
    out.size = BATCH_LENGTH_PREFIX_BYTES + length
    if n > BATCH_MAGIC and kd_get8(p + BATCH_MAGIC) != BATCH_MAGIC_V2:
        return BATCH_BAD_MAGIC
    if n < BATCH_HEADER_BYTES:
        return BATCH_TRUNCATED
    out.leader_epoch = <int32_t>kd_get32(p + BATCH_LEADER_EPOCH)
    out.attributes = <int16_t>kd_get16(p + BATCH_ATTRIBUTES)
    out.last_offset_delta = <int32_t>kd_get32(p + BATCH_LAST_OFFSET_DELTA)
    out.base_timestamp = <int64_t>kd_get64(p + BATCH_BASE_TIMESTAMP)
    out.max_timestamp = <int64_t>kd_get64(p + BATCH_MAX_TIMESTAMP)
    out.producer_id = <int64_t>kd_get64(p + BATCH_PRODUCER_ID)
    out.producer_epoch = <int16_t>kd_get16(p + BATCH_PRODUCER_EPOCH)
    out.base_sequence = <int32_t>kd_get32(p + BATCH_BASE_SEQUENCE)
    out.records_count = <int32_t>kd_get32(p + BATCH_RECORDS_COUNT)
    return BATCH_OK


cdef int check_batch_crc(const uint8_t* p, size_t n, batch_info* out) noexcept nogil:
    cdef int error = parse_batch_header(p, n, out)
    if error != BATCH_OK:
        return error
    if out.size > n:
        return BATCH_TRUNCATED
    if kd_crc32c(0, p + BATCH_ATTRIBUTES, out.size - BATCH_ATTRIBUTES) != kd_get32(p + BATCH_CRC):
        return BATCH_BAD_CRC
    return BATCH_OK


cdef int check_batch(const uint8_t* p, size_t n, batch_info* out) noexcept nogil:
    cdef int error = check_kept_batch(p, n, out)
    if error != BATCH_OK:
        return error
    if out.records_count < 1 or out.last_offset_delta != out.records_count - 1:
        return BATCH_BAD_COUNTS
    return BATCH_OK


cdef int check_kept_batch(const uint8_t* p, size_t n, batch_info* out) noexcept nogil:
    cdef int error = check_batch_crc(p, n, out)
    if error != BATCH_OK:
        return error
    if out.records_count < 0 or out.last_offset_delta < 0:
        return BATCH_BAD_COUNTS
    if out.records_count > <int64_t> out.last_offset_delta + 1:
        return BATCH_BAD_COUNTS
    if (out.attributes & ~KNOWN_ATTRIBUTES) != 0:
        return BATCH_BAD_COUNTS
    if (out.attributes & ATTRIBUTE_CODEC_MASK) > CODEC_ZSTD:
        return BATCH_BAD_COUNTS
    return BATCH_OK


cdef void stamp_batch(uint8_t* p, int64_t base_offset, int32_t leader_epoch) noexcept nogil:
    kd_put64(p + BATCH_BASE_OFFSET, <uint64_t>base_offset)
    kd_put32(p + BATCH_LEADER_EPOCH, <uint32_t>leader_epoch)


cdef void stamp_log_append_time(uint8_t* p, uint32_t size, int64_t timestamp) noexcept nogil:
    if size < BATCH_HEADER_BYTES:
        return
    kd_put16(p + BATCH_ATTRIBUTES, kd_get16(p + BATCH_ATTRIBUTES) | ATTRIBUTE_LOG_APPEND_TIME)
    kd_put64(p + BATCH_MAX_TIMESTAMP, <uint64_t>timestamp)
    kd_put32(p + BATCH_CRC, kd_crc32c(0, p + BATCH_ATTRIBUTES, size - BATCH_ATTRIBUTES))


# [k]: what the CRC register becomes over 2**k bytes of zeros, by each of its bits
cdef uint32_t[32][32] zeros_after


cdef inline uint32_t _apply_zeros(const uint32_t* operator, uint32_t register) noexcept nogil:
    cdef uint32_t out = 0
    cdef int i = 0
    while register:
        if register & 1:
            out ^= operator[i]
        register >>= 1
        i += 1
    return out


cdef void _fill_zeros() noexcept nogil:
    cdef uint8_t zero = 0
    cdef int i, k
    for i in range(32):
        zeros_after[0][i] = ~kd_crc32c(~(<uint32_t> 1 << i), &zero, 1)
    for k in range(1, 32):
        for i in range(32):
            zeros_after[k][i] = _apply_zeros(zeros_after[k - 1], zeros_after[k - 1][i])


_fill_zeros()


cdef void stamp_producer(uint8_t* p, uint32_t size, int64_t producer_id, int16_t producer_epoch,
                         int32_t base_sequence) noexcept nogil:
    cdef uint8_t changed[BATCH_RECORDS_COUNT - BATCH_PRODUCER_ID]
    cdef uint32_t after, register
    cdef int i, k = 0
    if size < BATCH_HEADER_BYTES:
        return
    memcpy(changed, p + BATCH_PRODUCER_ID, sizeof(changed))
    kd_put64(p + BATCH_PRODUCER_ID, <uint64_t> producer_id)
    kd_put16(p + BATCH_PRODUCER_EPOCH, <uint16_t> producer_epoch)
    kd_put32(p + BATCH_BASE_SEQUENCE, <uint32_t> base_sequence)
    for i in range(<int> sizeof(changed)):
        changed[i] ^= p[BATCH_PRODUCER_ID + i]
    # The CRC is linear: that of the difference, from an empty register, is the difference of the
    # CRCs.
    register = ~kd_crc32c(0xFFFFFFFF, changed, sizeof(changed))
    after = size - BATCH_RECORDS_COUNT
    while after:
        if after & 1:
            register = _apply_zeros(zeros_after[k], register)
        after >>= 1
        k += 1
    kd_put32(p + BATCH_CRC, kd_get32(p + BATCH_CRC) ^ register)


cdef inline int64_t _put_single(uint8_t* out, size_t capacity, const uint8_t* key,
                                int64_t key_length, int64_t value_length, int64_t timestamp,
                                int64_t producer_id, int16_t producer_epoch, int32_t base_sequence,
                                uint8_t** value_place) noexcept nogil:
    """All of the batch but the value and the CRC; its size, or -1."""
    cdef int64_t key_bytes = key_length if key_length > 0 else 0
    cdef int64_t value_bytes = value_length if value_length > 0 else 0
    cdef int64_t body, size
    cdef uint8_t* p
    if key_bytes > MAX_BATCH_LENGTH or value_bytes > MAX_BATCH_LENGTH:
        return -1
    # attributes, timestamp delta 0, offset delta 0, key, value, header count 0
    body = (3 + kd_varint_size(key_length) + key_bytes + kd_varint_size(value_length)
            + value_bytes + 1)
    size = BATCH_RECORDS + kd_varint_size(body) + body
    if size > <int64_t>MAX_BATCH_LENGTH or <uint64_t>size > capacity:
        return -1
    kd_put64(out + BATCH_BASE_OFFSET, 0)
    kd_put32(out + BATCH_LENGTH, <uint32_t>(size - BATCH_LENGTH_PREFIX_BYTES))
    kd_put32(out + BATCH_LEADER_EPOCH, 0xFFFFFFFF)
    out[BATCH_MAGIC] = BATCH_MAGIC_V2
    kd_put16(out + BATCH_ATTRIBUTES, 0)
    kd_put32(out + BATCH_LAST_OFFSET_DELTA, 0)
    kd_put64(out + BATCH_BASE_TIMESTAMP, <uint64_t>timestamp)
    kd_put64(out + BATCH_MAX_TIMESTAMP, <uint64_t>timestamp)
    kd_put64(out + BATCH_PRODUCER_ID, <uint64_t> producer_id)
    kd_put16(out + BATCH_PRODUCER_EPOCH, <uint16_t> producer_epoch)
    kd_put32(out + BATCH_BASE_SEQUENCE, <uint32_t> base_sequence)
    kd_put32(out + BATCH_RECORDS_COUNT, 1)
    p = kd_put_varint(out + BATCH_RECORDS, body)
    p[0] = 0
    p[1] = 0
    p[2] = 0
    p = kd_put_varint(p + 3, -1 if key_length < 0 else key_length)
    if key_bytes:
        memcpy(p, key, key_bytes)
        p += key_bytes
    p = kd_put_varint(p, -1 if value_length < 0 else value_length)
    value_place[0] = p
    p[value_bytes] = 0
    return size


cdef int64_t encode_single(uint8_t* out, size_t capacity, const uint8_t* key, int64_t key_length,
                           const uint8_t* value, int64_t value_length, int64_t timestamp,
                           int64_t producer_id, int16_t producer_epoch,
                           int32_t base_sequence) noexcept nogil:
    cdef uint8_t* place = NULL
    cdef int64_t size = _put_single(out, capacity, key, key_length, value_length, timestamp,
                                    producer_id, producer_epoch, base_sequence, &place)
    if size > 0:
        if value_length > 0:
            memcpy(place, value, value_length)
        kd_put32(out + BATCH_CRC, kd_crc32c(0, out + BATCH_ATTRIBUTES, size - BATCH_ATTRIBUTES))
    return size


cdef int64_t encode_single_around(uint8_t* out, size_t capacity, const uint8_t* key,
                                  int64_t key_length, const uint8_t* value, int64_t value_length,
                                  int64_t timestamp, int64_t producer_id, int16_t producer_epoch,
                                  int32_t base_sequence,
                                  uint32_t* value_position) noexcept nogil:
    cdef uint8_t* place = NULL
    cdef int64_t size = _put_single(out, capacity, key, key_length, value_length, timestamp,
                                    producer_id, producer_epoch, base_sequence, &place)
    cdef int64_t value_bytes = value_length if value_length > 0 else 0
    cdef uint32_t crc
    if size > 0:
        crc = kd_crc32c(0, out + BATCH_ATTRIBUTES, place - out - BATCH_ATTRIBUTES)
        crc = kd_crc32c(crc, value, value_bytes)
        place += value_bytes
        kd_put32(out + BATCH_CRC, kd_crc32c(crc, place, out + size - place))
        value_position[0] = <uint32_t> (place - value_bytes - out)
    return size


# -- Python interface ------------------------------------------------------------------------------

CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")

_FAULTS = {
    BATCH_TRUNCATED: "is cut off",
    BATCH_BAD_LENGTH: "has an impossible length",
    BATCH_BAD_MAGIC: "is not of record format v2",
    BATCH_BAD_CRC: "does not match its CRC",
    BATCH_BAD_COUNTS: "has a records count, a last offset delta or attributes that contradict"
                      " each other",
}

_OLD_FORMAT_HINT = (
    "magic 0 and 1 were written by Kafka clients before 0.11: let a Kafka broker with"
    " log.message.format.version >= 0.11 convert them, or produce them again with a client of"
    " version 0.11 or later")


def batch_error(int code, where, const uint8_t[::1] head=None):
    """The exception for a non-zero result of the C functions above; `where` names the thing (a
    topic partition and offset, a file and position), `head` is the start of the batch when there is
    one."""
    cdef int magic = head[BATCH_MAGIC] if head is not None and head.shape[0] > BATCH_MAGIC else -1
    if code == BATCH_BAD_MAGIC:
        if magic in (0, 1):
            return UnsupportedFormatError(f"record batch at {where} has the old magic {magic}",
                                          hint=_OLD_FORMAT_HINT)
        if magic < 128:
            return UnsupportedFormatError(f"record batch at {where} has the unknown magic {magic}",
                                          hint="this build reads magic 2; the bytes are from a"
                                          " newer client, or are not a record batch")
    return CorruptBatchError(f"record batch at {where} {_FAULTS.get(code, f'has fault {code}')}",
                             hint="read past it with another offset, or restore the segment from"
                             " a good copy")


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The header of one record batch, as Python sees it.

    `position` and `size` are bytes in the buffer that was given; `base_offset` and `next_offset`
    are record offsets; timestamps are in ms since 1970; `attributes` is the raw 16-bit field."""

    position: int
    size: int
    base_offset: int
    leader_epoch: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def next_offset(self):
        """The offset after the last one the batch takes up."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def compression(self):
        """Name of the codec; ``codec-5`` to ``codec-7`` where there is none."""
        codec = self.attributes & ATTRIBUTE_CODEC_MASK
        return CODEC_NAMES[codec] if codec < len(CODEC_NAMES) else f"codec-{codec}"

    @property
    def timestamp_type(self):
        """0 CreateTime, 1 LogAppendTime."""
        return 1 if self.attributes & ATTRIBUTE_LOG_APPEND_TIME else 0

    @property
    def is_transactional(self):
        return bool(self.attributes & ATTRIBUTE_TRANSACTIONAL)

    @property
    def is_control(self):
        return bool(self.attributes & ATTRIBUTE_CONTROL)


cdef object _batch_info(const batch_info* info, Py_ssize_t position):
    return BatchInfo(position, info.size, info.base_offset, info.leader_epoch, info.attributes,
                     info.last_offset_delta,
                     info.base_timestamp, info.max_timestamp, info.producer_id, info.producer_epoch,
                     info.base_sequence,
                     info.records_count)


def crc32c(data, uint32_t crc=0):
    """CRC-32C of a bytes-like object; `crc` is the result of the bytes before it."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len > 4096:
            with nogil:
                crc = kd_crc32c(crc, view.buf, view.len)
        else:
            crc = kd_crc32c(crc, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return crc


def crc32c_implementations():
    """Names of the implementations that this CPU has, the one in use last."""
    return tuple((<bytes>kd_crc32c_implementations[i].name).decode()
                 for i in range(KD_CRC32C_IMPLEMENTATIONS)
                 if kd_crc32c_implementations[i].function != NULL)


def crc32c_by(str name not None, data, uint32_t crc=0):
    """`crc32c` by one of `crc32c_implementations`, to test one against the other."""
    cdef Py_buffer view
    cdef kd_crc32c_function function = NULL
    for i in range(KD_CRC32C_IMPLEMENTATIONS):
        if (<bytes>kd_crc32c_implementations[i].name).decode() == name:
            function = kd_crc32c_implementations[i].function
    if function == NULL:
        raise UnsupportedFormatError(f"CRC-32C implementation {name!r} is not for this CPU",
                                     hint="use one of " + ", ".join(crc32c_implementations()))
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        crc = function(crc, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return crc


def check_batch_bytes(data):
    """Check the one batch at the start of `data` as the broker checks a produced one: frame, CRC,
    counts.

    Bytes after the batch are not looked at.  Returns its `BatchInfo`; raises CorruptBatchError, or
    UnsupportedFormatError for an old record format."""
    cdef Py_buffer view
    cdef batch_info info
    cdef int error
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        error = check_batch(<const uint8_t*>view.buf, view.len, &info)
        if error != BATCH_OK:
            raise batch_error(error, "position 0",
                              bytes((<const uint8_t*>view.buf)[:min(view.len, BATCH_HEADER_BYTES)]))
        return _batch_info(&info, 0)
    finally:
        PyBuffer_Release(&view)


def iterate_batches(data, *, bint check_crc=True):
    """Yield a `BatchInfo` for each whole batch in `data`; a partial batch at the end is left out.

    Raises CorruptBatchError or UnsupportedFormatError at the first batch that is broken; batches
    that compaction has thinned are accepted."""
    cdef Py_ssize_t position = 0
    cdef const uint8_t[::1] view = memoryview(data).cast("B")
    cdef Py_ssize_t n = view.shape[0]
    cdef batch_info info
    cdef const uint8_t* p
    cdef int error
    while position < n:
        p = &view[position]
        if check_crc:
            error = check_batch_crc(p, n - position, &info)
        else:
            error = parse_batch_header(p, n - position, &info)
        if error == BATCH_TRUNCATED or (error == BATCH_OK and info.size > <size_t>(n - position)):
            return
        if error != BATCH_OK:
            raise batch_error(error, f"position {position}", view[position:])
        yield _batch_info(&info, position)
        position += info.size


def any_transactional(data):
    """Is one of the whole batches in `data` of a transaction, or a marker of one?  Where a batch
    is broken, the answer is for those before it."""
    cdef Py_ssize_t position = 0
    cdef const uint8_t[::1] view = memoryview(data).cast("B")
    cdef Py_ssize_t n = view.shape[0]
    cdef batch_info info
    cdef bint found = False
    with nogil:
        while position < n and not found:
            if parse_batch_header(&view[position], n - position, &info) != BATCH_OK:
                break
            if info.size > <size_t>(n - position):
                break
            found = (info.attributes & ATTRIBUTE_TRANSACTIONAL) != 0
            position += info.size
    return found


def stamp(data, int64_t base_offset, int32_t leader_epoch, log_append_time=None):
    """Stamp the batch at the start of the writable buffer `data`, as a commit does; for tools and
    tests."""
    cdef uint8_t[::1] view = data
    cdef batch_info info
    cdef int error
    if view.shape[0] == 0:
        raise batch_error(BATCH_TRUNCATED, "position 0")
    error = check_batch_crc(&view[0], view.shape[0], &info)
    if error != BATCH_OK:
        raise batch_error(error, "position 0", view)
    stamp_batch(&view[0], base_offset, leader_epoch)
    if log_append_time is not None:
        stamp_log_append_time(&view[0], info.size, log_append_time)


def encode_single_bytes(value, key=None, int64_t timestamp_ms=0):
    """`encode_single` as bytes: one uncompressed batch with one record; None is a null key or
    value."""
    cdef const uint8_t[::1] v = value
    cdef const uint8_t[::1] k = key
    cdef int64_t value_length = -1 if value is None else v.shape[0]
    cdef int64_t key_length = -1 if key is None else k.shape[0]
    cdef const uint8_t* value_data = &v[0] if value_length > 0 else NULL
    cdef const uint8_t* key_data = &k[0] if key_length > 0 else NULL
    cdef Py_ssize_t capacity = BATCH_HEADER_BYTES + 32 + max(value_length, 0) + max(key_length, 0)
    cdef bytearray out = bytearray(capacity)
    cdef uint8_t* target = <uint8_t*><char*>out
    cdef int64_t size = encode_single(target, capacity, key_data, key_length, value_data,
                                      value_length, timestamp_ms, -1, -1, -1)
    if size < 0:
        raise UnsupportedFormatError(f"a record of {capacity} bytes does not fit a batch",
                                     hint="a batch holds less than 2 GiB")
    return bytes(out[:size])
