# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plain Fetch requests: few records, which are in memory and are sent at once.

A request is declined, with nothing changed, if it belongs to a session or asks for one, comes from
another broker, has tagged fields or topics to forget, or names a partition that this broker does
not lead; if what it asks for is not in the heads of its partitions (`kdirect.log.head_read`), is
more than `COPIED_BYTES`, or is less than it waits for; if it has to be told of transactions; and if
the answer about any partition is an error.

The records are copied into the answer: for so few of them that costs less than what keeps a mapping
alive until the socket has taken them.  More are sent from the mapping, by the general handlers.
"""

from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kdirect.broker.plain_table cimport (
    ANSWERED, DECLINED, PlainPartition, PlainTable, put_8, put_16, put_32, put_64, put_bytes,
    put_count, put_text, put_uvarint, request_t, take_8, take_16, take_32, take_64, take_count,
    take_id, take_no_tags, take_text)
from kdirect.log.head_read cimport copy_from_head, head_read, look_into_head

cdef enum:
    LEAST_VERSION = 4          # the first that carries record batches v2
    KNOWS_ZSTD = 10            # the first whose clients can read it
    BY_ID = 13                 # the first that names topics by their ids
    HIGHEST_VERSION = 18
    COPIED_BYTES = 64 << 10
    FIXED_BYTES = 64           # of an answer, and of each of its topics and partitions

cdef struct wanted_t:          # what the request says for all partitions
    int64_t room               # most bytes of records
    int64_t min_bytes
    bint waits
    bint committed_only
    int64_t total              # bytes of records found so far


cdef int answer_fetch(PlainTable table, request_t* r, int64_t room) except -1:
    cdef size_t begin = table.used
    cdef wanted_t w
    cdef int32_t topics
    if not LEAST_VERSION <= r.version <= HIGHEST_VERSION or not _take_head(r, room, &w):
        return DECLINED
    topics = <int32_t> take_count(r)
    if r.bad or topics <= 0 or topics > r.end - r.at:
        return DECLINED
    _begin_answer(table, r, topics)
    for _ in range(topics):
        if not _answer_topic(table, r, &w):
            table.used = begin
            return DECLINED
    if not _take_tail(r) or (w.waits and w.total < w.min_bytes):
        table.used = begin
        return DECLINED
    table.reserve(FIXED_BYTES)
    if r.flexible:
        put_8(table.out + table.used, 0)
        table.used += 1
    put_32(table.out + begin, <int32_t> (table.used - begin - 4))
    table.fetches += 1
    return ANSWERED


cdef bint _take_head(request_t* r, int64_t room, wanted_t* w) noexcept:
    cdef int32_t replica = take_32(r) if r.version < 15 else -1  # later it is in a tag
    cdef int32_t session = 0, session_epoch = -1
    cdef int16_t isolation
    w.waits = take_32(r) > 0
    w.min_bytes = take_32(r)
    w.room = min(<int64_t> take_32(r), room)
    w.total = 0
    isolation = take_8(r)
    w.committed_only = isolation == 1
    if r.version >= 7:
        session = take_32(r)
        session_epoch = take_32(r)
    return (not r.bad and replica == -1 and 0 <= isolation <= 1 and session == 0
            and session_epoch == -1)


cdef bint _take_tail(request_t* r) noexcept:
    cdef const uint8_t* rack
    if r.version >= 7 and take_count(r) != 0:
        return False
    if r.version >= 11 and take_text(r, &rack) < 0:
        return False
    take_no_tags(r)
    return not r.bad and r.at == r.end


cdef int _begin_answer(PlainTable table, const request_t* r, int32_t topics) except -1:
    cdef uint8_t* p
    table.reserve(FIXED_BYTES)
    p = put_32(table.out + table.used + 4, r.correlation_id)
    if r.flexible:
        p = put_8(p, 0)
    p = put_32(p, 0)      # throttle time
    if r.version >= 7:
        p = put_16(p, 0)  # no error
        p = put_32(p, 0)  # no session
    p = put_count(p, topics, r.flexible)
    table.used = p - table.out
    return 0


cdef bint _answer_topic(PlainTable table, request_t* r, wanted_t* w) except -1:
    cdef const uint8_t* name
    cdef int64_t length = 16
    cdef int32_t partitions
    cdef uint8_t* p
    if r.version >= BY_ID:
        name = take_id(r)
    else:
        length = take_text(r, &name)
    partitions = <int32_t> take_count(r)
    if r.bad or length < 0 or partitions < 0 or partitions > r.end - r.at:
        return False
    table.reserve(FIXED_BYTES + <size_t> length)
    p = table.out + table.used
    if r.version >= BY_ID:
        p = put_bytes(p, name, 16)
    else:
        p = put_text(p, name, <int16_t> length, r.flexible)
    p = put_count(p, partitions, r.flexible)
    table.used = p - table.out
    for _ in range(partitions):
        if not _answer_partition(table, r, w, name, length):
            return False
    take_no_tags(r)
    table.reserve(1)
    if r.flexible:
        put_8(table.out + table.used, 0)
        table.used += 1
    return not r.bad


cdef bint _answer_partition(PlainTable table, request_t* r, wanted_t* w, const uint8_t* name,
                            int64_t length) except -1:
    cdef int32_t number = take_32(r)
    cdef int32_t epoch = take_32(r) if r.version >= 9 else -1
    cdef int64_t offset = take_64(r)
    cdef int64_t limit
    cdef head_read found
    cdef PlainPartition place
    cdef bint first = w.total == 0
    cdef bint known
    if r.version >= 12:
        take_32(r)        # the epoch of what it has read: only followers lack records
    if r.version >= 5:
        take_64(r)        # a follower's log start
    limit = min(<int64_t> take_32(r), w.room - w.total)
    take_no_tags(r)
    if r.bad:
        return False
    place = table.find(name, length, number, r.version >= BY_ID)
    if place is None:
        return False
    if r.version < KNOWS_ZSTD and place.partition.config.compression_type == "zstd":
        return False
    with nogil:
        known = look_into_head(
            place.kernel, offset, <uint64_t> max(limit, 1), <uint64_t> (COPIED_BYTES - w.total),
            w.committed_only, place.dense_from, &found)
    if not known or (epoch >= 0 and epoch != found.leader_epoch):
        return False
    # A batch larger than the limit is sent only if the response is empty without it.
    if <int64_t> found.size > limit and not first:
        found.size = 0
    return _put_partition(table, r, w, place, number, &found)


cdef bint _put_partition(PlainTable table, const request_t* r, wanted_t* w, PlainPartition place,
                         int32_t number, const head_read* found) except -1:
    """As `kdirect.format.datapath.fetch_response`."""
    cdef uint8_t* p
    cdef bint copied = True
    cdef int32_t aborted = 0 if w.committed_only else -1
    table.reserve(FIXED_BYTES + found.size)
    p = put_32(table.out + table.used, number)
    p = put_16(p, 0)
    p = put_64(p, found.high_watermark)
    p = put_64(p, found.last_stable)
    if r.version >= 5:
        p = put_64(p, found.log_start)
    p = put_uvarint(p, <uint32_t> (aborted + 1)) if r.flexible else put_32(p, aborted)
    if r.version >= 11:
        p = put_32(p, -1)  # no preferred replica
    p = put_count(p, <int32_t> found.size, r.flexible)
    if found.size:
        with nogil:
            copied = copy_from_head(place.kernel, found, p)
        p += found.size
    if r.flexible:
        p = put_8(p, 0)
    table.used = p - table.out
    w.total += found.size
    return copied
