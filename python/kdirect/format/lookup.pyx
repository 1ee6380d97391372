# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One record of a batch, found without making objects of the others.

Owns: the search by time.  The records are parsed without the interpreter's lock, so that a batch of
millions keeps only its own thread busy.  Compressed ones are decompressed piece by piece, and no
further than to the record that is found, so a batch costs the memory of a piece, and of the records
at its edges, whatever it stands for.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint64_t

from kdirect.errors import CorruptBatchError, FormatError, UnsupportedFormatError

from kdirect.format.batch import CODEC_NAMES, batch_error
from kdirect.format.batch cimport BATCH_OK, batch_info, check_batch_crc, offsets_are_possible
from kdirect.format.compression import records_fault
from kdirect.format.compression cimport Decompressor
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_LOG_APPEND_TIME, BATCH_HEADER_BYTES,
    BATCH_RECORDS, CODEC_NONE, CODEC_ZSTD)
from kdirect.format.records cimport (
    RECORDS_BAD_LENGTH, RECORDS_BAD_NUMBER, RECORDS_OK, parse_record, record_view, records_error)

from kdirect.format.wire cimport kd_get_varint

LARGEST_BATCH_BYTES = 64 << 20  # decompressed; as much as readers take

cdef enum:
    # of a record at most: length, attributes, timestamp delta, offset delta
    HEAD_BYTES = 5 + 1 + 10 + 5
    SMALL_RECORD_BYTES = 1 << 20    # longer ones are not kept to be parsed whole


cdef struct search:
    int32_t at                  # records passed
    int64_t timestamp           # in: not before this
    int64_t from_offset         # in: not below this
    int64_t found_offset        # -1: none
    int64_t found_timestamp


cdef bint _wanted(search* s, const batch_info* info, int64_t timestamp_delta,
                  int64_t offset_delta) noexcept nogil:
    cdef int64_t offset = info.base_offset + offset_delta
    cdef int64_t timestamp = info.max_timestamp if info.attributes & ATTRIBUTE_LOG_APPEND_TIME \
        else <int64_t>(<uint64_t>info.base_timestamp + <uint64_t>timestamp_delta)
    if timestamp < s.timestamp or offset < s.from_offset:
        return False
    s.found_offset = offset
    s.found_timestamp = timestamp
    return True


cdef int _search(search* s, const batch_info* info, const uint8_t** start, const uint8_t* end,
                 bint more) noexcept nogil:
    """RECORDS_OK, or why the records of [start[0], end) cannot be read.  Where `more` bytes follow,
    a record that is cut off at their end is not a fault; `start` is moved after the whole ones."""
    cdef record_view r
    cdef int error = RECORDS_OK
    cdef const uint8_t* p = start[0]
    cdef int64_t length
    while s.at < info.records_count:
        if more:
            p = kd_get_varint(start[0], end, &length)
            if p == NULL and end - start[0] < HEAD_BYTES:
                return RECORDS_OK
            if p != NULL and length > end - p:
                return RECORDS_OK
        p = parse_record(start[0], end, &r, &error)
        if p == NULL:
            return error
        start[0] = p
        s.at += 1
        if _wanted(s, info, r.timestamp_delta, r.offset_delta):
            break
    return RECORDS_OK


cdef int64_t _pass_long(search* s, const batch_info* info, const uint8_t* p, size_t n,
                        int* error) noexcept nogil:
    """The length of the record at `p`, whose first `n` bytes are known, where it is long, and
    looked at by its head alone; 0 where it is not long or n does not tell yet; below 0 with *error
    set."""
    cdef const uint8_t* q
    cdef int64_t length, timestamp_delta, offset_delta
    cdef const uint8_t* body = kd_get_varint(p, p + n, &length)
    if body == NULL or length <= SMALL_RECORD_BYTES or n < HEAD_BYTES:
        return 0
    error[0] = RECORDS_BAD_NUMBER
    q = kd_get_varint(body + 1, p + n, &timestamp_delta)
    if q == NULL:
        return -1
    if kd_get_varint(q, p + n, &offset_delta) == NULL:
        return -1
    error[0] = RECORDS_BAD_LENGTH
    if length > INT32_MAX:
        return -1
    s.at += 1
    _wanted(s, info, timestamp_delta, offset_delta)
    return (body - p) + length


def find_record(data, where, int64_t timestamp, int64_t from_offset=0, *,
                int64_t max_decompressed_bytes=LARGEST_BATCH_BYTES):
    """(offset, timestamp) of the first record of the one batch `data` that is of `timestamp` (ms)
    or later and at `from_offset` or higher; None when there is none.  `where` names the batch in a
    CorruptBatchError or UnsupportedFormatError."""
    cdef Py_buffer view
    cdef batch_info info
    cdef search s
    cdef int codec, code
    cdef object plain
    cdef const uint8_t* p
    s.timestamp, s.from_offset, s.found_offset, s.found_timestamp = timestamp, from_offset, -1, -1
    s.at = 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            code = check_batch_crc(<const uint8_t*>view.buf, view.len, &info)
        if code != BATCH_OK:
            raise batch_error(code, where,
                              PyBytes_FromStringAndSize(<const char*>view.buf,
                                                        min(view.len,
                                                            <Py_ssize_t>BATCH_HEADER_BYTES)))
        if info.attributes & ATTRIBUTE_CONTROL or info.records_count <= 0:
            return None
        codec = info.attributes & ATTRIBUTE_CODEC_MASK
        if codec > CODEC_ZSTD:
            raise UnsupportedFormatError(f"record batch at {where} has the unknown codec {codec}",
                                         hint="known are " + ", ".join(CODEC_NAMES))
        if not offsets_are_possible(&info):
            raise CorruptBatchError(f"record batch at {where} has impossible offsets",
                                    hint="restore the segment from a good copy")
        if codec == CODEC_NONE:
            p = <const uint8_t*>view.buf + BATCH_RECORDS
            with nogil:
                code = _search(&s, &info, &p, <const uint8_t*>view.buf + info.size, False)
        else:
            try:
                packed = PyBytes_FromStringAndSize(<const char*>view.buf + BATCH_RECORDS,
                                                   info.size - BATCH_HEADER_BYTES)
                code = _search_pieces(&s, &info,
                                      Decompressor().pieces(codec, packed, max_decompressed_bytes))
            except FormatError as e:
                raise records_fault(f"record batch at {where}", e) from e
    finally:
        PyBuffer_Release(&view)
    if code != RECORDS_OK:
        raise CorruptBatchError(f"record batch at {where}: {records_error(code).decode()}",
                                hint="restore the segment from a good copy")
    return (s.found_offset, s.found_timestamp) if s.found_offset >= 0 else None


cdef int _search_pieces(search* s, const batch_info* info, pieces) except -100:
    """`_search` over records that come piece by piece.  A record that leaves its piece is put
    together; of a long one only its head is looked at."""
    cdef int code, error = RECORDS_OK
    cdef int64_t length, passing = 0    # of a long record: bytes that are still to come
    cdef bytes data, rest = b""
    cdef const uint8_t* p
    cdef const uint8_t* end
    for piece in pieces:
        if passing >= len(piece):
            passing -= len(piece)
            continue
        data = b"".join((rest, memoryview(piece)[passing:]))
        passing = 0
        p = <const uint8_t*>PyBytes_AS_STRING(data)
        end = p + len(data)
        with nogil:
            code = _search(s, info, &p, end, True)
        if code != RECORDS_OK or s.found_offset >= 0 or s.at >= info.records_count:
            return code
        length = _pass_long(s, info, p, end - p, &error)
        if length < 0:
            return error
        if s.found_offset >= 0:
            return RECORDS_OK
        if length:
            rest, passing = b"", length - (end - p)
        else:
            rest = PyBytes_FromStringAndSize(<const char*>p, end - p)
    if passing:
        return RECORDS_BAD_LENGTH
    p = <const uint8_t*>PyBytes_AS_STRING(rest)
    return _search(s, info, &p, p + len(rest), False)
