# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The body of the commit kernel: check a request, stamp it, index it.

Law of the room: functions over `kernel_state`, called by `kdirect.log.kernel` with its mutex held.
No lock, no I/O, no clock, no Python object; the only allocation grows a table.

Each header field of a request is read once, into `batch_info`; later steps use that copy, because
an RDMA producer may still be writing.  A request is checked whole before its first byte is changed.
"""

from libc.errno cimport ENOENT, ENOMEM
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t)
from libc.stdlib cimport realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from kdirect.format.batch cimport (
    BATCH_BAD_COUNTS, BATCH_OK, BATCH_TRUNCATED, batch_info, check_batch, check_kept_batch,
    parse_batch_header, stamp_batch, stamp_log_append_time)
from kdirect.format.layout cimport (
    ATTRIBUTE_CONTROL, OFFSET_INDEX_ENTRY_BYTES, TIME_INDEX_ENTRY_BYTES)
from kdirect.log.producers cimport (
    check_sequences, repetition, reserve_producers, store_producer)
from kdirect.log.results cimport (
    COMMIT_CORRUPT_MESSAGE, COMMIT_FENCED_LEADER_EPOCH, COMMIT_INVALID_RECORD,
    COMMIT_INVALID_TIMESTAMP, COMMIT_MESSAGE_TOO_LARGE, COMMIT_NO_HEAD, COMMIT_NO_SPACE,
    COMMIT_NOT_CONTIGUOUS, COMMIT_OK, COMMIT_RECORD_LIST_TOO_LARGE, COMMIT_STORAGE_ERROR,
    COMMIT_UNKNOWN_EPOCH, COMMIT_WRONG_POSITION, commit_result)
from kdirect.log.slots cimport end_segment, finish_sealed
from kdirect.log.state cimport kernel_state, mark_t
from kdirect.log.transactions cimport (
    MARKER_BYTES, begin_transaction, check_marker, check_transaction, end_transaction, marker_t,
    note_batch, read_marker, reserve_transactions, settle_stable)

from kdirect.format.wire cimport kd_put32, kd_put64


cdef enum:
    CLEAR_PIECE = 64 << 10     # what is cleared with the kernel's mutex held: some microseconds


# -- checking a request ----------------------------------------------------------------------------

cdef int _grow_infos(kernel_state* s) noexcept nogil:
    cdef uint32_t capacity = s.infos_capacity * 2
    cdef batch_info* grown = <batch_info*> realloc(s.infos, capacity * sizeof(batch_info))
    if grown == NULL:
        return ENOMEM
    s.infos = grown
    s.infos_capacity = capacity
    return 0


cdef batch_info* _next_info(kernel_state* s) noexcept nogil:
    """Where the next batch of the request is noted; NULL: no memory."""
    if s.infos_count == s.infos_capacity and _grow_infos(s) != 0:
        return NULL
    return &s.infos[s.infos_count]


cdef int check_batches(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms,
                       bint checked, int64_t* records) noexcept nogil:
    cdef uint32_t at = 0
    cdef batch_info* b
    cdef int error
    records[0] = 0
    s.infos_count = 0
    if length == 0:
        return COMMIT_CORRUPT_MESSAGE
    while at < length:
        b = _next_info(s)
        if b == NULL:
            return COMMIT_STORAGE_ERROR
        if checked:
            error = parse_batch_header(p + at, length - at, b)
            if error == BATCH_OK and b.size > length - at:
                error = BATCH_TRUNCATED
        else:
            error = check_batch(p + at, length - at, b)
        if error != BATCH_OK:
            return COMMIT_INVALID_RECORD if error == BATCH_BAD_COUNTS else COMMIT_CORRUPT_MESSAGE
        if b.size > s.max_batch_bytes:
            return COMMIT_MESSAGE_TOO_LARGE
        if b.attributes & ATTRIBUTE_CONTROL:
            return COMMIT_INVALID_RECORD
        if now_ms > 0 and not s.append_time:
            if b.max_timestamp > now_ms and b.max_timestamp - now_ms > s.after_max_ms:
                return COMMIT_INVALID_TIMESTAMP
            if 0 <= b.base_timestamp < now_ms and now_ms - b.base_timestamp > s.before_max_ms:
                return COMMIT_INVALID_TIMESTAMP
        records[0] += b.records_count
        at += b.size
        s.infos_count += 1
        if s.infos_count == 0xFFFF and at < length:
            return COMMIT_RECORD_LIST_TOO_LARGE
    return COMMIT_RECORD_LIST_TOO_LARGE if records[0] > INT32_MAX else COMMIT_OK


cdef int _check_request(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms,
                        bint checked, commit_result* out) noexcept nogil:
    """check_batches, then sequences, then transactions.  Changes no record."""
    cdef int64_t records
    cdef repetition repeated
    cdef int error = check_batches(s, p, length, now_ms, checked, &records)
    if error != COMMIT_OK:
        return error
    error = check_sequences(&s.producers, s.infos, s.infos_count, s.log_end, &s.scratch, &repeated)
    if error != COMMIT_OK:
        return error
    if repeated.batches:
        out.duplicate = 1
        out.base_offset = repeated.base_offset
        out.last_offset = repeated.last_offset
        return COMMIT_OK
    error = check_transaction(s)
    if error != COMMIT_OK:
        return error
    if s.log_end > INT64_MAX - records:
        return COMMIT_STORAGE_ERROR
    out.last_offset = s.log_end + records - 1
    return COMMIT_OK


cdef int _check_stamped(kernel_state* s, const uint8_t* p, uint32_t length,
                        commit_result* out) noexcept nogil:
    """Batches that were checked, ordered and stamped by another log: frames, CRCs and counts, that
    they go on where this log ends, and that leader epochs never go back.  Their producers are known
    to that log, so sequences are noted and not judged; neither are sizes and timestamps.

    Below `dense_from` records may be missing: of a batch, or whole batches."""
    cdef uint32_t at = 0
    cdef batch_info* b
    cdef int64_t last_offset
    cdef int error
    cdef int32_t epoch = s.last_epoch
    cdef int64_t next_offset = s.log_end
    s.infos_count = 0
    if length == 0:
        return COMMIT_CORRUPT_MESSAGE
    while at < length:
        b = _next_info(s)
        if b == NULL:
            return COMMIT_STORAGE_ERROR
        error = check_kept_batch(p + at, length - at, b)
        if error != BATCH_OK:
            return COMMIT_INVALID_RECORD if error == BATCH_BAD_COUNTS else COMMIT_CORRUPT_MESSAGE
        if b.base_offset != next_offset and not next_offset < b.base_offset <= s.dense_from:
            return COMMIT_NOT_CONTIGUOUS
        if b.base_offset > INT64_MAX - 1 - b.last_offset_delta:
            return COMMIT_STORAGE_ERROR
        last_offset = b.base_offset + b.last_offset_delta
        if b.records_count != <int64_t> b.last_offset_delta + 1 and last_offset >= s.dense_from:
            return COMMIT_INVALID_RECORD
        if b.leader_epoch < epoch:
            return COMMIT_FENCED_LEADER_EPOCH
        epoch = b.leader_epoch
        next_offset = last_offset + 1
        at += b.size
        s.infos_count += 1
        if s.infos_count == 0xFFFF and at < length:
            return COMMIT_RECORD_LIST_TOO_LARGE
    if epoch > s.leader_epoch:
        return COMMIT_UNKNOWN_EPOCH
    if (reserve_producers(&s.producers, s.infos_count) != 0
            or reserve_transactions(s, s.infos_count) != 0):
        return COMMIT_STORAGE_ERROR
    out.last_offset = next_offset - 1
    return COMMIT_OK


# -- committing ------------------------------------------------------------------------------------

cdef void add_time_entry(kernel_state* s, bint last) noexcept nogil:
    """One entry stays free for the seal, which must always be able to say the segment's largest
    timestamp."""
    cdef uint8_t* p
    if s.time_index == NULL or s.max_timestamp <= s.last_indexed_timestamp:
        return
    if s.time_entries + (0 if last else 1) >= s.time_capacity:
        return
    p = s.time_index + <size_t> s.time_entries * TIME_INDEX_ENTRY_BYTES
    kd_put64(p, <uint64_t> s.max_timestamp)
    kd_put32(p + 8, <uint32_t> (s.max_timestamp_offset - s.base))
    s.last_indexed_timestamp = s.max_timestamp
    s.time_entries += 1


cdef void _index(kernel_state* s, const batch_info* b, int64_t last_offset) noexcept nogil:
    """Entries for the batch at the tail, where one is due."""
    cdef uint8_t* entry
    if s.since_index > s.index_interval:
        if s.offset_index != NULL and s.offset_entries < s.offset_capacity:
            entry = s.offset_index + <size_t> s.offset_entries * OFFSET_INDEX_ENTRY_BYTES
            kd_put32(entry, <uint32_t> (last_offset - s.base))
            kd_put32(entry + 4, <uint32_t> s.tail)
            s.offset_entries += 1
        add_time_entry(s, False)
        s.since_index = 0
    s.since_index += b.size


cdef void _apply(kernel_state* s, uint32_t length, int64_t now_ms, bint stamped,
                 commit_result* out) noexcept nogil:
    """Take the checked batches at the tail into the log; unless they are `stamped`, with the next
    offsets and the present leader epoch."""
    cdef uint8_t* p
    cdef batch_info* b
    cdef uint32_t i
    cdef int64_t next_offset = s.log_end
    cdef int64_t timestamp
    cdef mark_t start
    start.base = s.base
    start.position = s.tail
    start.offset = next_offset
    out.base_offset = s.infos[0].base_offset if stamped else next_offset
    for i in range(s.infos_count):
        b = &s.infos[i]
        p = s.data + s.tail
        timestamp = b.max_timestamp
        if stamped:
            note_batch(s, b, p, s.base, s.tail, now_ms)      # room was made, so it cannot fail
            s.last_epoch = b.leader_epoch
        else:
            stamp_batch(p, next_offset, s.leader_epoch)
            if s.append_time:
                stamp_log_append_time(p, b.size, now_ms)
                timestamp = now_ms
        if s.tail == 0:
            s.first_timestamp = timestamp
        if stamped:
            next_offset = b.base_offset     # offsets may be missing before it
        next_offset += <int64_t> b.last_offset_delta + 1
        if timestamp > s.max_timestamp:
            s.max_timestamp = timestamp
            s.max_timestamp_offset = next_offset - 1
        _index(s, b, next_offset - 1)
        s.tail += b.size
    s.log_end = next_offset
    if not stamped:
        s.last_epoch = s.leader_epoch
        if s.scratch.id >= 0:
            s.scratch.last_time_ms = now_ms
            store_producer(&s.producers, &s.scratch)
            if s.scratch.transaction_start == start.offset:
                begin_transaction(s, s.scratch.id, &start)
    if not s.hold:
        s.readable.base = s.base
        s.readable.position = s.tail
        s.readable.offset = next_offset
        settle_stable(s)
        if s.sealed_count:
            finish_sealed(s)
        s.dirty = 1
    s.requests += 1
    s.batches += s.infos_count
    s.bytes += length
    out.log_append_time = now_ms if s.append_time and not stamped else -1


cdef void clear_result(commit_result* out) noexcept nogil:
    memset(out, 0, sizeof(commit_result))
    out.base_offset = -1
    out.last_offset = -1
    out.log_append_time = -1


cdef int finish_request(kernel_state* s, int error, commit_result* out) noexcept nogil:
    if error == COMMIT_OK:
        out.batches = <uint16_t> s.infos_count
        if out.duplicate:
            s.duplicates += 1
    else:
        out.duplicate = 0
        out.base_offset = -1
        out.last_offset = -1
        if error > 0:
            s.refused += 1
    out.error = <int16_t> error
    out.end_position = <int64_t> s.tail
    return error


cdef int commit_request(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil:
    cdef int error
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if position < s.tail:
        return COMMIT_WRONG_POSITION
    if position > s.capacity or length > s.capacity - position:
        return COMMIT_NO_SPACE
    error = _check_request(s, s.data + position, length, now_ms, False, out)
    if error == COMMIT_OK and not out.duplicate and out.last_offset - s.base > INT32_MAX:
        s.over = True
        error = COMMIT_NO_SPACE
    if error != COMMIT_OK or out.duplicate:
        memset(s.data + position, 0, length)
        return error
    if position > s.tail:
        # Requests before this one were refused: close up.  Everything below its end has arrived, so
        # nobody writes there any more.
        memmove(s.data + s.tail, s.data + position, length)
        memset(s.data + s.tail + length, 0, position - s.tail)
    _apply(s, length, now_ms, False, out)
    return COMMIT_OK


cdef bint marker_room(kernel_state* s, uint32_t count, int64_t now_ms) noexcept nogil:
    if s.infos_capacity < 1:
        return False
    s.infos_count = 1
    s.infos[0].max_timestamp = now_ms  # a marker has the time of its append
    return _look_for_room(s, count * MARKER_BYTES, now_ms, s.log_end + count) == COMMIT_OK


cdef int _look_for_room(kernel_state* s, uint32_t length, int64_t now_ms,
                        int64_t last_offset) noexcept nogil:
    """Has the head room for the checked batches, and may it take them?"""
    cdef uint32_t i
    cdef int64_t newest = -1
    if length > s.segment_bytes:
        return COMMIT_RECORD_LIST_TOO_LARGE
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if last_offset - s.base > INT32_MAX:
        s.over = True
        return COMMIT_NO_SPACE
    if s.tail > 0:
        if s.offset_entries >= s.offset_capacity or s.time_entries + 1 >= s.time_capacity:
            s.over = True
            return COMMIT_NO_SPACE
        # Rolled by time as Kafka does: by the timestamps when there are any, else by the clock.
        if s.first_timestamp >= 0:
            if s.append_time:
                newest = now_ms
            else:
                for i in range(s.infos_count):
                    if s.infos[i].max_timestamp > newest:
                        newest = s.infos[i].max_timestamp
            if newest - s.first_timestamp > s.segment_ms:
                s.over = True
                return COMMIT_NO_SPACE
        elif now_ms - s.created_ms > s.segment_ms:
            s.over = True
            return COMMIT_NO_SPACE
    return COMMIT_NO_SPACE if length > s.capacity - s.tail else COMMIT_OK


cdef int append_request(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                        bint checked, commit_result* out) noexcept nogil:
    # Checked before anything else: a request that is refused must not cost a roll or a preallocated
    # head.
    cdef int error = _check_request(s, data, length, now_ms, checked, out)
    if error != COMMIT_OK or out.duplicate:
        return error
    error = _look_for_room(s, length, now_ms, out.last_offset)
    if error == COMMIT_OK:
        memcpy(s.data + s.tail, data, length)
        _apply(s, length, now_ms, False, out)
    return error


cdef int append_marker(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                       commit_result* out) noexcept nogil:
    cdef batch_info* b = &s.infos[0]
    cdef marker_t marker
    cdef int error
    s.infos_count = 1
    if check_batch(data, length, b) != BATCH_OK or b.size != length or b.records_count != 1:
        return COMMIT_CORRUPT_MESSAGE
    if not b.attributes & ATTRIBUTE_CONTROL or not read_marker(data, b, &marker):
        return COMMIT_INVALID_RECORD
    error = check_marker(s, b.producer_id, b.producer_epoch, marker.coordinator_epoch)
    if error != COMMIT_OK:
        return error
    if s.log_end == INT64_MAX:
        return COMMIT_STORAGE_ERROR
    out.last_offset = s.log_end
    error = _look_for_room(s, length, now_ms, s.log_end)
    if error != COMMIT_OK:
        return error
    memcpy(s.data + s.tail, data, length)
    end_transaction(s, b.producer_id, s.log_end, marker.is_abort)
    _apply(s, length, now_ms, False, out)
    return COMMIT_OK


cdef int commit_stamped(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil:
    cdef int error
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if position != s.tail:
        return COMMIT_WRONG_POSITION
    if length > s.capacity - position:
        return COMMIT_NO_SPACE
    error = _check_stamped(s, s.data + position, length, out)
    if error == COMMIT_OK and out.last_offset - s.base > INT32_MAX:
        s.over = True
        error = COMMIT_NO_SPACE
    if error == COMMIT_UNKNOWN_EPOCH:       # the caller tells the epoch and repeats: bytes stay
        return error
    if error != COMMIT_OK:
        memset(s.data + position, 0, length)
        return error
    _apply(s, length, now_ms, True, out)
    return COMMIT_OK


cdef int append_stamped(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil:
    cdef int error = _check_stamped(s, data, length, out)
    if error != COMMIT_OK:
        return error
    if length > s.segment_bytes:
        return COMMIT_RECORD_LIST_TOO_LARGE
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if out.last_offset - s.base > INT32_MAX:
        s.over = True
        return COMMIT_NO_SPACE
    # Neither time nor a full index rolls a copy: the log that it follows has decided that.
    if length > s.capacity - s.tail:
        return COMMIT_NO_SPACE
    memcpy(s.data + s.tail, data, length)
    _apply(s, length, now_ms, True, out)
    return COMMIT_OK


cdef uint64_t clear_piece(kernel_state* s, uint64_t at, uint64_t end,
                          uint64_t* zeros) noexcept nogil:
    cdef uint64_t n
    if at < s.tail:
        at = s.tail
    if end > s.capacity:
        end = s.capacity
    if at >= end:
        return end
    n = min(<uint64_t> CLEAR_PIECE, end - at)
    if s.data[at] == 0 and (n == 1 or memcmp(s.data + at, s.data + at + 1, n - 1) == 0):
        zeros[0] += n
    else:
        zeros[0] = 0
        memset(s.data + at, 0, n)
    return at + n


# -- the end of a head -----------------------------------------------------------------------------

cdef int seal_head(kernel_state* s, sealed_head* out) noexcept nogil:
    cdef int error
    if s.data == NULL:
        return ENOENT
    add_time_entry(s, True)
    out.base = s.base
    out.size = s.tail
    out.end_offset = s.log_end
    error = end_segment(s)
    if error != 0:
        return error
    out.max_timestamp = s.max_timestamp
    out.max_timestamp_offset = s.max_timestamp_offset
    out.offset_entries = s.offset_entries
    out.time_entries = s.time_entries
    s.data = NULL
    s.over = False
    s.offset_index = NULL
    s.time_index = NULL
    s.capacity = 0
    s.first_timestamp = -1
    s.max_timestamp = -1
    s.max_timestamp_offset = -1
    return 0
