# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The body of the commit kernel: check a request, stamp it, index it, publish it.

Law of the room: functions over `kernel_state`, called by `kdirect.log.kernel` with its mutex held.
No lock, no I/O, no clock, no Python object; the only allocation grows a table.

Each header field of a request is read once, into `batch_info`; later steps use that copy, because
an RDMA producer may still be writing.  A request is checked whole before its first byte is changed.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport INT32_MAX, INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from kdirect.format.batch cimport BATCH_BAD_COUNTS, BATCH_OK, batch_info, check_batch, stamp_batch, stamp_log_append_time
from kdirect.format.layout cimport (
    ATTRIBUTE_CONTROL, ATTRIBUTE_TRANSACTIONAL, OFFSET_INDEX_ENTRY_BYTES, SLOT_BYTES, SLOT_FILE_ID, SLOT_FLAG_ASSIGNED, SLOT_FLAGS,
    SLOT_GUARD, SLOT_HIGH_WATERMARK, SLOT_LAST_READABLE_POSITION, SLOT_LAST_STABLE_OFFSET, SLOT_LAST_STABLE_POSITION,
    SLOT_LEADER_EPOCH, SLOT_LOG_START_OFFSET, SLOT_SEGMENT_BASE_OFFSET, SLOT_UPDATE_COUNT, TIME_INDEX_ENTRY_BYTES)
from kdirect.log.producers cimport check_sequences, repetition, store_producer
from kdirect.log.results cimport (
    COMMIT_CORRUPT_MESSAGE, COMMIT_INVALID_RECORD, COMMIT_INVALID_TIMESTAMP, COMMIT_MESSAGE_TOO_LARGE, COMMIT_NO_HEAD, COMMIT_NO_SPACE,
    COMMIT_OK, COMMIT_RECORD_LIST_TOO_LARGE, COMMIT_STORAGE_ERROR, COMMIT_WRONG_POSITION, commit_result)

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

from kdirect.format.wire cimport kd_put32, kd_put64

cdef extern from *:
    """
    /* Publish one 64-byte slot image as eight atomic words: a concurrent copy mixes whole words of the old
       and the new image, never halves of one, and such a mix does not match its guard. */
    static inline void kd_publish_slot(uint8_t *slot, const uint64_t *image) {
        uint64_t *to = (uint64_t *) slot;
        for (int i = 7; i >= 0; i--)
            __atomic_store_n(to + i, image[i], __ATOMIC_RELEASE);
    }
    """
    void kd_publish_slot(uint8_t* slot, const uint64_t* image) nogil


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


cdef int check_batches(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms, int64_t* records) noexcept nogil:
    """Frames, CRCs, counts, sizes, attributes, timestamps.  Fills `s.infos`; changes nothing else.
    """
    cdef uint32_t at = 0
    cdef batch_info* b
    cdef int error
    records[0] = 0
    s.infos_count = 0
    if length == 0:
        return COMMIT_CORRUPT_MESSAGE
    while at < length:
        if s.infos_count == s.infos_capacity and _grow_infos(s) != 0:
            return COMMIT_STORAGE_ERROR
        b = &s.infos[s.infos_count]
        error = check_batch(p + at, length - at, b)
        if error != BATCH_OK:
            return COMMIT_INVALID_RECORD if error == BATCH_BAD_COUNTS else COMMIT_CORRUPT_MESSAGE
        if b.size > s.max_batch_bytes:
            return COMMIT_MESSAGE_TOO_LARGE
        if (b.attributes & (ATTRIBUTE_CONTROL | ATTRIBUTE_TRANSACTIONAL)) and not s.accept_transactional:
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


cdef int check_request(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
    """check_batches, then sequences."""
    cdef int64_t records
    cdef repetition repeated
    cdef int error = check_batches(s, p, length, now_ms, &records)
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
    if s.log_end > INT64_MAX - records:
        return COMMIT_STORAGE_ERROR
    out.last_offset = s.log_end + records - 1
    return COMMIT_OK


# -- slots -----------------------------------------------------------------------------------------

cdef void fill_slot(kernel_state* s, slot_entry* entry, uint16_t flags) noexcept nogil:
    cdef uint64_t image[SLOT_BYTES / 8]
    cdef uint8_t* p = <uint8_t*> image
    (<uint16_t*> (p + SLOT_FLAGS))[0] = SLOT_FLAG_ASSIGNED | flags
    (<uint16_t*> (p + SLOT_FILE_ID))[0] = entry.file_id
    (<int64_t*> (p + SLOT_SEGMENT_BASE_OFFSET))[0] = s.base
    (<uint64_t*> (p + SLOT_LAST_READABLE_POSITION))[0] = s.readable
    (<int64_t*> (p + SLOT_HIGH_WATERMARK))[0] = s.high_watermark
    (<uint64_t*> (p + SLOT_LAST_STABLE_POSITION))[0] = s.stable
    (<int64_t*> (p + SLOT_LAST_STABLE_OFFSET))[0] = s.last_stable
    (<int32_t*> (p + SLOT_LEADER_EPOCH))[0] = s.leader_epoch
    (<uint32_t*> (p + SLOT_UPDATE_COUNT))[0] = s.updates
    (<int64_t*> (p + SLOT_LOG_START_OFFSET))[0] = s.log_start
    (<uint32_t*> (p + SLOT_GUARD))[0] = kd_crc32c(0, p + SLOT_FLAGS, SLOT_BYTES - SLOT_FLAGS)
    kd_publish_slot(entry.slot, image)


cdef void update_slots(kernel_state* s, uint16_t flags) noexcept nogil:
    cdef uint32_t i
    if s.slots_count == 0:
        return
    s.updates += 1
    s.slot_updates += 1
    for i in range(s.slots_count):
        fill_slot(s, &s.slots[i], flags)


cdef void publish(kernel_state* s) noexcept nogil:
    if s.dirty:
        s.dirty = 0
        update_slots(s, 0)


cdef void drop_slots(kernel_state* s, uint16_t flags) noexcept nogil:
    update_slots(s, flags)
    s.slots_count = 0


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


cdef void move_high_watermark(kernel_state* s, int64_t offset, uint64_t position) noexcept nogil:
    s.high_watermark = offset
    s.readable = position
    # Without transactions everything readable is stable; an open transaction will hold these two
    # back.
    s.last_stable = offset
    s.stable = position


cdef void _apply(kernel_state* s, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
    """Stamp the checked batches at the tail and move the log's end past them."""
    cdef uint8_t* p
    cdef uint8_t* entry
    cdef batch_info* b
    cdef uint32_t i
    cdef int64_t next_offset = s.log_end
    cdef int64_t timestamp
    out.base_offset = next_offset
    for i in range(s.infos_count):
        b = &s.infos[i]
        p = s.data + s.tail
        timestamp = b.max_timestamp
        stamp_batch(p, next_offset, s.leader_epoch)
        if s.append_time:
            stamp_log_append_time(p, b.size, now_ms)
            timestamp = now_ms
        if s.tail == 0:
            s.first_timestamp = timestamp
        next_offset += <int64_t> b.last_offset_delta + 1
        if timestamp > s.max_timestamp:
            s.max_timestamp = timestamp
            s.max_timestamp_offset = next_offset - 1
        if s.since_index > s.index_interval:
            if s.offset_index != NULL and s.offset_entries < s.offset_capacity:
                entry = s.offset_index + <size_t> s.offset_entries * OFFSET_INDEX_ENTRY_BYTES
                kd_put32(entry, <uint32_t> (next_offset - 1 - s.base))
                kd_put32(entry + 4, <uint32_t> s.tail)
                s.offset_entries += 1
            add_time_entry(s, False)
            s.since_index = 0
        s.since_index += b.size
        s.tail += b.size
    s.log_end = next_offset
    if s.scratch.id >= 0:
        s.scratch.last_time_ms = now_ms
        store_producer(&s.producers, &s.scratch)
    if not s.hold:
        move_high_watermark(s, next_offset, s.tail)
        s.dirty = 1
    s.requests += 1
    s.batches += s.infos_count
    s.bytes += length
    out.log_append_time = now_ms if s.append_time else -1


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


cdef int commit_request(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms, bint move, commit_result* out) noexcept nogil:
    cdef int error
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if position < s.tail or (position > s.tail and not move):
        return COMMIT_WRONG_POSITION
    if position > s.capacity or length > s.capacity - position:
        return COMMIT_NO_SPACE
    error = check_request(s, s.data + position, length, now_ms, out)
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
    _apply(s, length, now_ms, out)
    return COMMIT_OK


cdef int append_request(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
    cdef int error
    cdef uint32_t i
    cdef int64_t newest = -1
    # Checked before anything else: a request that is refused must not cost a roll or a preallocated
    # head.
    error = check_request(s, data, length, now_ms, out)
    if error != COMMIT_OK or out.duplicate:
        return error
    if length > s.segment_bytes:
        return COMMIT_RECORD_LIST_TOO_LARGE
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if out.last_offset - s.base > INT32_MAX:
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
    if length > s.capacity - s.tail:
        return COMMIT_NO_SPACE
    memcpy(s.data + s.tail, data, length)
    _apply(s, length, now_ms, out)
    return COMMIT_OK


cdef uint64_t clear_piece(kernel_state* s, uint64_t at, uint64_t end, uint64_t* zeros) noexcept nogil:
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
