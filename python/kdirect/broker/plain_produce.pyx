# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plain Produce requests: whole batches for one partition, which are appended and acknowledged at
once.

A request is declined, with nothing changed, if it has a transactional id, records of a transaction
or tagged fields, asks for no acknowledgement, names more than one partition or none that this
broker leads, if its partition is not free (`PlainTable.may_append`), and if the head has no room.
What the kernel refuses for what the batches say is not tried again: the general handlers make the
answer out of the kernel's.

The kernel appends without the GIL, with all its checks (`CommitKernel.c_append`).
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport INT32_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t

from kdirect.broker.plain_table cimport (
    ANSWERED, DECLINED, TOLD, PlainPartition, PlainTable, put_8, put_16, put_32, put_64, put_count,
    put_bytes, put_text, request_t, take_16, take_32, take_count, take_id, take_no_tags,
    take_records, take_text)
from kdirect.format.layout cimport ATTRIBUTE_TRANSACTIONAL, BATCH_ATTRIBUTES
from kdirect.log.head_read cimport log_start_of
from kdirect.log.kernel cimport commit_result
from kdirect.log.results cimport to_python

cdef enum:
    LEAST_VERSION = 3          # the first that carries record batches v2
    HIGHEST_VERSION = 13
    BY_ID = 13                 # from here on topics are named by their ids
    FIXED_BYTES = 96           # of an answer, without the topic's name


cdef int answer_produce(PlainTable table, connection, request_t* r, int64_t now_ms) except -1:
    cdef const uint8_t* text
    cdef const uint8_t* name
    cdef const uint8_t* records
    cdef int64_t length, size
    cdef int32_t number
    cdef int16_t acks
    cdef commit_result result
    cdef PlainPartition place
    if not LEAST_VERSION <= r.version <= HIGHEST_VERSION or take_text(r, &text) != -1:
        return DECLINED
    acks = take_16(r)
    take_32(r)  # how long to wait for other replicas
    if take_count(r) != 1:
        return DECLINED
    if r.version >= BY_ID:
        name = take_id(r)
        length = 16
    else:
        length = take_text(r, &name)
    if take_count(r) != 1:
        return DECLINED
    number = take_32(r)
    size = take_records(r, &records)
    take_no_tags(r)
    take_no_tags(r)
    take_no_tags(r)
    if r.bad or r.at != r.end or acks not in (1, -1) or length < 0 or size <= 0:
        return DECLINED
    if size > BATCH_ATTRIBUTES + 1 and records[BATCH_ATTRIBUTES + 1] & ATTRIBUTE_TRANSACTIONAL:
        return DECLINED
    place = table.find(name, length, number, r.version >= BY_ID)
    if place is None or not table.may_append(place):
        return DECLINED
    table.reserve(FIXED_BYTES + <size_t> length)
    with nogil:
        place.kernel.c_append(records, <uint32_t> size, now_ms, False, &result)
    if result.error < 0:
        return DECLINED
    table.produces += 1
    if result.error:
        table.told = table._handlers.refused_plainly(
            connection, r.version, r.correlation_id, acks, place.partition,
            PyBytes_FromStringAndSize(<const char*> name, length), to_python(&result), size)
        return TOLD
    table.appends += 1
    table.append_bytes += size
    table.notify(place, size)
    _acknowledge(table, r, name, <int16_t> length, number, &result, log_start_of(place.kernel))
    return ANSWERED


cdef void _acknowledge(PlainTable table, const request_t* r, const uint8_t* name, int16_t length,
                       int32_t number, const commit_result* result, int64_t start) noexcept:
    """As `kdirect.format.datapath.produce_response`, after the response's header."""
    cdef uint8_t* begin = table.out + table.used
    cdef bint flexible = r.flexible
    cdef uint8_t* p = put_32(begin + 4, r.correlation_id)
    if flexible:
        p = put_8(p, 0)
    p = put_count(p, 1, flexible)
    if r.version >= BY_ID:
        p = put_bytes(p, name, 16)
    else:
        p = put_text(p, name, length, flexible)
    p = put_count(p, 1, flexible)
    p = put_32(p, number)
    p = put_16(p, 0)
    p = put_64(p, result.base_offset)
    p = put_64(p, result.log_append_time)
    if r.version >= 5:
        p = put_64(p, start)
    if flexible:
        p = put_8(p, 1)   # no record errors
        p = put_8(p, 0)   # no message
        p = put_16(p, 0)  # no tags of the partition, none of the topic
    elif r.version >= 8:
        p = put_32(p, 0)
        p = put_16(p, -1)
    p = put_32(p, 0)      # throttle time
    if flexible:
        p = put_8(p, 0)
    put_32(begin, <int32_t> (p - begin - 4))
    table.used += p - begin
