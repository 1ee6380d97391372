# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One record of a batch, found without making objects of the others.

Owns: the search by time.  The records are parsed without the interpreter's lock, so that a batch of millions keeps only its own
thread busy.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint64_t

from kdirect.errors import CorruptBatchError, FormatError, UnsupportedFormatError

from kdirect.format.batch import CODEC_NAMES, batch_error
from kdirect.format.batch cimport BATCH_OK, batch_info, check_batch_crc
from kdirect.format.compression cimport Decompressor
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_LOG_APPEND_TIME, BATCH_HEADER_BYTES, BATCH_RECORDS, CODEC_NONE, CODEC_ZSTD)
from kdirect.format.records cimport RECORDS_OK, parse_record, record_view, records_error

LARGEST_BATCH_BYTES = 64 << 20  # decompressed; as much as readers take


cdef struct search:
    int64_t timestamp           # in: not before this
    int64_t from_offset         # in: not below this
    int64_t found_offset        # -1: none
    int64_t found_timestamp


cdef int _search(search* s, const batch_info* info, const uint8_t* p, const uint8_t* end) noexcept nogil:
    """RECORDS_OK, or why the records of [p, end) cannot be read."""
    cdef record_view r
    cdef int error = RECORDS_OK
    cdef int32_t i
    cdef bint append_time = info.attributes & ATTRIBUTE_LOG_APPEND_TIME != 0
    cdef int64_t offset, timestamp
    for i in range(info.records_count):
        p = parse_record(p, end, &r, &error)
        if p == NULL:
            return error
        offset = info.base_offset + r.offset_delta
        timestamp = info.max_timestamp if append_time else <int64_t>(<uint64_t>info.base_timestamp + <uint64_t>r.timestamp_delta)
        if timestamp >= s.timestamp and offset >= s.from_offset:
            s.found_offset = offset
            s.found_timestamp = timestamp
            break
    return RECORDS_OK


def find_record(data, where, int64_t timestamp, int64_t from_offset=0, *, int64_t max_decompressed_bytes=LARGEST_BATCH_BYTES):
    """(offset, timestamp) of the first record of the one batch `data` that is of `timestamp` (ms) or later and at `from_offset` or
    higher; None when there is none.  `where` names the batch in a CorruptBatchError or UnsupportedFormatError."""
    cdef Py_buffer view
    cdef batch_info info
    cdef search s
    cdef int codec, code
    cdef object plain
    s.timestamp, s.from_offset, s.found_offset, s.found_timestamp = timestamp, from_offset, -1, -1
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            code = check_batch_crc(<const uint8_t*>view.buf, view.len, &info)
        if code != BATCH_OK:
            raise batch_error(code, where, PyBytes_FromStringAndSize(<const char*>view.buf, min(view.len, <Py_ssize_t>BATCH_HEADER_BYTES)))
        if info.attributes & ATTRIBUTE_CONTROL or info.records_count <= 0:
            return None
        codec = info.attributes & ATTRIBUTE_CODEC_MASK
        if codec > CODEC_ZSTD:
            raise UnsupportedFormatError(f"record batch at {where} has the unknown codec {codec}", hint="known are " + ", ".join(CODEC_NAMES))
        if info.base_offset < 0 or info.last_offset_delta < 0 or info.base_offset > INT64_MAX - 1 - info.last_offset_delta:
            raise CorruptBatchError(f"record batch at {where} has offsets that cannot be", hint="restore the segment from a good copy")
        if codec == CODEC_NONE:
            with nogil:
                code = _search(&s, &info, <const uint8_t*>view.buf + BATCH_RECORDS, <const uint8_t*>view.buf + info.size)
        else:
            try:
                packed = PyBytes_FromStringAndSize(<const char*>view.buf + BATCH_RECORDS, info.size - BATCH_HEADER_BYTES)
                plain = Decompressor().run(codec, packed, max_decompressed_bytes)
            except FormatError as e:
                raise CorruptBatchError(f"record batch at {where}: {e.message}", hint=e.hint) from e
            code = _search_plain(&s, &info, plain)
    finally:
        PyBuffer_Release(&view)
    if code != RECORDS_OK:
        raise CorruptBatchError(f"record batch at {where}: {records_error(code).decode()}", hint="restore the segment from a good copy")
    return (s.found_offset, s.found_timestamp) if s.found_offset >= 0 else None


cdef int _search_plain(search* s, const batch_info* info, plain) except -100:
    cdef Py_buffer view
    cdef int code
    PyObject_GetBuffer(plain, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            code = _search(s, info, <const uint8_t*>view.buf, <const uint8_t*>view.buf + view.len)
    finally:
        PyBuffer_Release(&view)
    return code
