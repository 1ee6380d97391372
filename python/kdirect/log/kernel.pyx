# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The commit kernel: the one place where bytes become records.

Law of the room: a kernel belongs to one partition.  It is compiled, holds no GIL, does no I/O, asks no
clock and allocates only to grow its tables.  TCP produce (`c_append`), RDMA produce (`c_commit`) and
replication pass through the same check and the same stamp, under one mutex.

Owns: the tail of the head segment, log end offset, high watermark, last stable offset, log start offset
and leader epoch of the partition; the producer table (idempotence); the list of metadata slots; the index
entries of the head.  Does not own: files and mappings (`kdirect.log.segment` gives it addresses with
`install_head` and takes them back with `seal`), and who may write (`kdirect.broker.access`).

Invariants, true whenever the mutex is free:

- ``log start <= last stable <= high watermark <= log end``; high watermark and last stable offset lie in
  the head or at its start (a segment is sealed only when everything in it is readable).
- Bytes of the head below the tail are whole, checked batches with consecutive offsets.  A request that
  failed left zeros at the tail, so no reader and no recovery takes rubbish for a batch.
- Every attached slot holds the state above.  Its guard is the CRC-32C of the rest, so a READ that
  overlaps an update is seen by its reader and repeated (KafkaDirect §4.4.2).

A request is one or more whole batches of one producer, all or nothing.  Each header field is read once,
into `batch_info`; later steps use that copy, because an RDMA producer may still be writing.

Idempotence is Kafka's: the last five batches of each producer id are remembered.  A request that repeats
remembered batches is a duplicate: it answers with the original offsets and appends nothing.  A request
that mixes repeated and new batches is refused as out of order.

Group commit: with `hold_high_watermark`, commits do not move the high watermark; `advance_high_watermark`
does, once the caller knows that the bytes are on disk (or, later, on the followers).

Threads: every method may be called from any thread.  Mapped memory handed to `install_head` must stay
mapped until `seal` has returned; slots until they are detached, sealed or revoked.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport INT32_MAX, INT64_MAX, UINT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from kdirect.format.batch cimport (
    BATCH_BAD_COUNTS, BATCH_OK, batch_info, check_batch, stamp_batch, stamp_log_append_time)
from kdirect.format.layout cimport (
    ATTRIBUTE_CONTROL, ATTRIBUTE_TRANSACTIONAL, OFFSET_INDEX_ENTRY_BYTES, SLOT_BYTES, SLOT_FILE_ID, SLOT_FLAG_ASSIGNED,
    SLOT_FLAG_REVOKED, SLOT_FLAG_SEALED, SLOT_FLAGS, SLOT_GUARD, SLOT_HIGH_WATERMARK, SLOT_LAST_READABLE_POSITION,
    SLOT_LAST_STABLE_OFFSET, SLOT_LAST_STABLE_POSITION, SLOT_LEADER_EPOCH, SLOT_LOG_START_OFFSET, SLOT_SEGMENT_BASE_OFFSET,
    SLOT_UPDATE_COUNT, TIME_INDEX_ENTRY_BYTES)

from typing import NamedTuple

from kdirect.errors import LogError

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef extern from "wire.h" nogil:
    void kd_put32(uint8_t* p, uint32_t v)
    void kd_put64(uint8_t* p, uint64_t v)

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

NO_SPACE = COMMIT_NO_SPACE
WRONG_POSITION = COMMIT_WRONG_POSITION
NO_HEAD = COMMIT_NO_HEAD

cdef enum:
    REMEMBERED = 5            # batches of a producer id that a repetition is recognised by (Kafka's number)
    INLINE_BATCHES = 32
    CLEAR_WINDOW = 1 << 20

cdef struct batch_seen:
    int32_t first_sequence
    int32_t last_sequence
    int64_t base_offset
    int64_t last_offset

cdef struct producer_state:
    int64_t id                # -1: a free entry of the table
    int64_t last_time_ms      # when it last appended
    int64_t transaction_start # first offset of the open transaction, -1: none (the place for transactions)
    int32_t coordinator_epoch
    int16_t epoch             # -1: nothing known of it
    uint16_t count
    batch_seen seen[REMEMBERED]   # oldest first

cdef struct slot_entry:
    uint8_t* slot
    uint16_t file_id

cdef struct kernel_state:
    pthread_mutex_t lock
    # the head; data is NULL while there is none: then base and tail say where the log ends
    uint8_t* data
    uint64_t capacity
    uint64_t tail
    int64_t base
    int64_t first_timestamp
    int64_t created_ms
    int64_t max_timestamp
    int64_t max_timestamp_offset
    uint64_t since_index
    # indexes of the head; may be NULL (none kept)
    uint8_t* offset_index
    uint32_t offset_entries
    uint32_t offset_capacity
    uint8_t* time_index
    uint32_t time_entries
    uint32_t time_capacity
    int64_t last_indexed_timestamp
    # offsets
    int64_t log_start
    int64_t log_end
    int64_t high_watermark
    uint64_t readable
    int64_t last_stable
    uint64_t stable
    int32_t leader_epoch
    bint hold
    bint accept_transactional
    # policy
    bint append_time
    uint32_t max_batch_bytes
    uint32_t segment_bytes
    uint32_t index_interval
    int64_t segment_ms
    int64_t before_max_ms
    int64_t after_max_ms
    # slots
    slot_entry* slots
    uint32_t slots_count
    uint32_t slots_capacity
    uint32_t updates
    # producers
    producer_state* producers
    uint32_t producers_count
    uint32_t producers_capacity   # a power of two, at least twice the count
    # the request under way
    batch_info* infos
    uint32_t infos_count
    uint32_t infos_capacity
    producer_state scratch
    # counters
    uint64_t requests
    uint64_t batches
    uint64_t bytes
    uint64_t duplicates
    uint64_t refused


# -- producers --------------------------------------------------------------------------------------------

cdef inline uint32_t _bucket(int64_t id, uint32_t capacity) noexcept nogil:
    cdef uint64_t h = <uint64_t> id * <uint64_t> 0x9E3779B97F4A7C15
    return <uint32_t> (h >> 32) & (capacity - 1)


cdef producer_state* _find_producer(kernel_state* s, int64_t id) noexcept nogil:
    cdef uint32_t i
    if s.producers == NULL:
        return NULL
    i = _bucket(id, s.producers_capacity)
    while s.producers[i].id != -1:
        if s.producers[i].id == id:
            return &s.producers[i]
        i = (i + 1) & (s.producers_capacity - 1)
    return NULL


cdef producer_state* _place(producer_state* table, uint32_t capacity, int64_t id) noexcept nogil:
    cdef uint32_t i = _bucket(id, capacity)
    while table[i].id != -1 and table[i].id != id:
        i = (i + 1) & (capacity - 1)
    return &table[i]


cdef int _rebuild_producers(kernel_state* s, uint32_t capacity, int64_t drop_before_ms) noexcept nogil:
    """Move the table to `capacity` entries, without producers that last appended before `drop_before_ms`."""
    cdef producer_state* table = <producer_state*> malloc(capacity * sizeof(producer_state))
    cdef uint32_t i, kept = 0
    if table == NULL:
        return ENOMEM
    for i in range(capacity):
        table[i].id = -1
    for i in range(s.producers_capacity):
        if s.producers[i].id != -1 and s.producers[i].last_time_ms >= drop_before_ms:
            _place(table, capacity, s.producers[i].id)[0] = s.producers[i]
            kept += 1
    free(s.producers)
    s.producers = table
    s.producers_capacity = capacity
    s.producers_count = kept
    return 0


cdef int _reserve_producer(kernel_state* s) noexcept nogil:
    """Make sure that one more producer fits."""
    if s.producers == NULL:
        return _rebuild_producers(s, 16, -1)
    if (s.producers_count + 1) * 2 > s.producers_capacity:
        return _rebuild_producers(s, s.producers_capacity * 2, -INT64_MAX)
    return 0


cdef void _store_producer(kernel_state* s, const producer_state* entry) noexcept nogil:
    cdef producer_state* at = _place(s.producers, s.producers_capacity, entry.id)
    if at.id == -1:
        s.producers_count += 1
    at[0] = entry[0]


cdef inline int32_t _add_sequence(int32_t sequence, int32_t delta) noexcept nogil:
    """Sequence numbers run from 0 to INT32_MAX and start again."""
    if sequence > INT32_MAX - delta:
        return delta - (INT32_MAX - sequence) - 1
    return sequence + delta


cdef void _remember(producer_state* p, int32_t first, int32_t last, int64_t base_offset, int64_t last_offset) noexcept nogil:
    if p.count == REMEMBERED:
        memmove(&p.seen[0], &p.seen[1], (REMEMBERED - 1) * sizeof(batch_seen))
        p.count = REMEMBERED - 1
    p.seen[p.count].first_sequence = first
    p.seen[p.count].last_sequence = last
    p.seen[p.count].base_offset = base_offset
    p.seen[p.count].last_offset = last_offset
    p.count += 1


cdef void _start_producer(producer_state* p, int64_t id) noexcept nogil:
    memset(p, 0, sizeof(producer_state))
    p.id = id
    p.epoch = -1
    p.coordinator_epoch = -1
    p.transaction_start = -1


cdef int _check_sequences(kernel_state* s, commit_result* out) noexcept nogil:
    """Kafka's rules for the batches in `s.infos`; on success `s.scratch` is the producer's next state."""
    cdef producer_state* known
    cdef producer_state* p = &s.scratch
    cdef batch_info* b
    cdef uint32_t i
    cdef int k
    cdef int32_t last
    cdef int64_t offset = s.log_end
    cdef int64_t id = s.infos[0].producer_id
    cdef bint repeated
    cdef uint32_t repetitions = 0

    p.id = -1
    for i in range(s.infos_count):
        b = &s.infos[i]
        if b.producer_id != id or b.producer_epoch != s.infos[0].producer_epoch:
            return COMMIT_INVALID_RECORD
        if id >= 0 and (b.producer_epoch < 0 or b.base_sequence < 0):
            return COMMIT_INVALID_RECORD
    if id < 0:
        return COMMIT_OK
    known = _find_producer(s, id)
    if known != NULL:
        p[0] = known[0]
    else:
        _start_producer(p, id)
    for i in range(s.infos_count):
        b = &s.infos[i]
        last = _add_sequence(b.base_sequence, b.last_offset_delta)
        if b.producer_epoch < p.epoch:
            return COMMIT_INVALID_PRODUCER_EPOCH
        if b.producer_epoch == p.epoch:
            repeated = False
            for k in range(p.count):
                if p.seen[k].first_sequence == b.base_sequence and p.seen[k].last_sequence == last:
                    if repetitions == 0:
                        out.base_offset = p.seen[k].base_offset
                    out.last_offset = p.seen[k].last_offset
                    repeated = True
                    break
            if repeated:
                repetitions += 1
                if repetitions != i + 1:
                    return COMMIT_OUT_OF_ORDER_SEQUENCE
                continue
            if repetitions or b.base_sequence != (_add_sequence(p.seen[p.count - 1].last_sequence, 1) if p.count else 0):
                return COMMIT_OUT_OF_ORDER_SEQUENCE
        else:
            if p.epoch != -1 and b.base_sequence != 0:
                return COMMIT_OUT_OF_ORDER_SEQUENCE
            p.epoch = b.producer_epoch
            p.count = 0
        _remember(p, b.base_sequence, last, offset, offset + b.last_offset_delta)
        offset += <int64_t> b.last_offset_delta + 1
    if repetitions:
        out.duplicate = 1
        return COMMIT_OK
    return COMMIT_OK if known != NULL or _reserve_producer(s) == 0 else COMMIT_STORAGE_ERROR


# -- checking a request -------------------------------------------------------------------------------------

cdef int _grow_infos(kernel_state* s) noexcept nogil:
    cdef uint32_t capacity = s.infos_capacity * 2
    cdef batch_info* grown = <batch_info*> realloc(s.infos, capacity * sizeof(batch_info))
    if grown == NULL:
        return ENOMEM
    s.infos = grown
    s.infos_capacity = capacity
    return 0


cdef int _check_request(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
    """Frames, CRCs, counts, sizes, attributes, timestamps, sequences.  Fills `s.infos`; changes no record."""
    cdef uint32_t at = 0
    cdef int64_t records = 0
    cdef batch_info* b
    cdef int error
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
        records += b.records_count
        at += b.size
        s.infos_count += 1
        if s.infos_count == 0xFFFF and at < length:
            return COMMIT_RECORD_LIST_TOO_LARGE
    if records > INT32_MAX:
        return COMMIT_RECORD_LIST_TOO_LARGE
    error = _check_sequences(s, out)
    if error != COMMIT_OK or out.duplicate:
        return error
    if s.log_end > INT64_MAX - records:
        return COMMIT_STORAGE_ERROR
    out.last_offset = s.log_end + records - 1
    return COMMIT_OK


# -- slots ----------------------------------------------------------------------------------------------------

cdef inline void _fill_slot(kernel_state* s, slot_entry* entry, uint16_t flags) noexcept nogil:
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


cdef inline void _update_slots(kernel_state* s, uint16_t flags) noexcept nogil:
    cdef uint32_t i
    if s.slots_count == 0:
        return
    s.updates += 1
    for i in range(s.slots_count):
        _fill_slot(s, &s.slots[i], flags)


cdef inline void _drop_slots(kernel_state* s, uint16_t flags) noexcept nogil:
    _update_slots(s, flags)
    s.slots_count = 0


# -- committing -------------------------------------------------------------------------------------------------

cdef inline void _add_time_entry(kernel_state* s, bint last) noexcept nogil:
    """One entry stays free for the seal, which must always be able to say the segment's largest timestamp."""
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


cdef inline void _move_high_watermark(kernel_state* s, int64_t offset, uint64_t position) noexcept nogil:
    s.high_watermark = offset
    s.readable = position
    # Without transactions everything readable is stable; an open transaction will hold these two back.
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
            _add_time_entry(s, False)
            s.since_index = 0
        s.since_index += b.size
        s.tail += b.size
    s.log_end = next_offset
    if s.scratch.id >= 0:
        s.scratch.last_time_ms = now_ms
        _store_producer(s, &s.scratch)
    if not s.hold:
        _move_high_watermark(s, next_offset, s.tail)
        _update_slots(s, 0)
    s.requests += 1
    s.batches += s.infos_count
    s.bytes += length
    out.log_append_time = now_ms if s.append_time else -1


cdef inline void _clear_result(commit_result* out) noexcept nogil:
    memset(out, 0, sizeof(commit_result))
    out.base_offset = -1
    out.last_offset = -1
    out.log_append_time = -1


cdef inline int _finish(kernel_state* s, int error, commit_result* out) noexcept nogil:
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


cdef int _commit(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
    cdef int error
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if position != s.tail:
        return COMMIT_WRONG_POSITION
    if length > s.capacity - s.tail:
        return COMMIT_NO_SPACE
    error = _check_request(s, s.data + s.tail, length, now_ms, out)
    if error == COMMIT_OK and not out.duplicate and out.last_offset - s.base > INT32_MAX:
        error = COMMIT_NO_SPACE
    if error != COMMIT_OK or out.duplicate:
        memset(s.data + s.tail, 0, length)
        return error
    _apply(s, length, now_ms, out)
    return COMMIT_OK


cdef int _append(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
    cdef int error
    cdef uint32_t i
    cdef int64_t newest = -1
    # Checked before anything else: a request that is refused must not cost a roll or a preallocated head.
    error = _check_request(s, data, length, now_ms, out)
    if error != COMMIT_OK or out.duplicate:
        return error
    if length > s.segment_bytes:
        return COMMIT_RECORD_LIST_TOO_LARGE
    if s.data == NULL:
        return COMMIT_NO_HEAD
    if length > s.capacity - s.tail or out.last_offset - s.base > INT32_MAX:
        return COMMIT_NO_SPACE
    if s.tail > 0:
        if s.offset_entries >= s.offset_capacity or s.time_entries + 1 >= s.time_capacity:
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
                return COMMIT_NO_SPACE
        elif now_ms - s.created_ms > s.segment_ms:
            return COMMIT_NO_SPACE
    memcpy(s.data + s.tail, data, length)
    _apply(s, length, now_ms, out)
    return COMMIT_OK


cdef uint64_t _end_of_remains(kernel_state* s) noexcept nogil:
    """Position behind which CLEAR_WINDOW bytes of zeros (or the end of the head) follow, at the tail or after."""
    cdef uint64_t at = s.tail
    cdef uint64_t end = s.tail
    while at < s.capacity and at - end < CLEAR_WINDOW:
        if s.data[at] != 0:
            end = at + 1
        at += 1
    return end


# -- Python face --------------------------------------------------------------------------------------------------

@cython.freelist(64)
cdef class CommitResult:
    """Outcome of one request.  `error` 0: committed (or, with `duplicate`, committed before); otherwise
    Kafka's error code, or one of NO_SPACE, WRONG_POSITION, NO_HEAD.  Offsets are -1 after an error."""

    cdef readonly int error
    cdef readonly int batches
    cdef readonly bint duplicate
    cdef readonly int64_t base_offset
    cdef readonly int64_t last_offset
    cdef readonly int64_t end_position
    cdef readonly int64_t log_append_time

    def __repr__(self):
        return (f"CommitResult(error={self.error}, base_offset={self.base_offset}, last_offset={self.last_offset}, "
                f"batches={self.batches}, duplicate={self.duplicate}, end_position={self.end_position}, "
                f"log_append_time={self.log_append_time})")


class KernelView(NamedTuple):
    """One consistent look at a kernel.  Positions are bytes of the segment `segment_base_offset`."""

    segment_base_offset: int
    end_position: int
    log_end_offset: int
    high_watermark: int
    readable_position: int
    last_stable_offset: int
    stable_position: int
    log_start_offset: int
    has_head: bool


class SealedHead(NamedTuple):
    """What a head was when it was sealed."""

    segment_base_offset: int
    size: int
    end_offset: int
    max_timestamp: int
    max_timestamp_offset: int
    offset_entries: int
    time_entries: int


class ProducerEntry(NamedTuple):
    """A producer id as the snapshot files keep it.  `batches`: (first sequence, last sequence, base offset,
    last offset), oldest first, at most five."""

    producer_id: int
    producer_epoch: int
    timestamp_ms: int
    coordinator_epoch: int
    transaction_start: int
    batches: tuple


cdef CommitResult _result(const commit_result* r):
    cdef CommitResult out = CommitResult.__new__(CommitResult)
    out.error = r.error
    out.batches = r.batches
    out.duplicate = r.duplicate
    out.base_offset = r.base_offset
    out.last_offset = r.last_offset
    out.end_position = r.end_position
    out.log_append_time = r.log_append_time
    return out


cdef class CommitKernel:
    """See the module.  Life: construct with where the log ends, `install_head`, commits, `seal`, the next
    `install_head`, ... ; it owns no mapping, so there is nothing to close.

    `segment_bytes` and `max_batch_bytes` bound a request and a batch; `index_interval_bytes` spaces index
    entries; `segment_ms` rolls by time (appends only); `before_max_ms`/`after_max_ms` bound the
    difference between a record's timestamp and the clock."""

    def __cinit__(self, *, int64_t log_start_offset=0, int64_t log_end_offset=0, int64_t segment_base_offset=-1, uint64_t position=0,
                  int32_t leader_epoch=0, uint32_t segment_bytes=INT32_MAX, uint32_t max_batch_bytes=INT32_MAX,
                  uint32_t index_interval_bytes=4096, int64_t segment_ms=INT64_MAX, int64_t before_max_ms=INT64_MAX,
                  int64_t after_max_ms=INT64_MAX, bint log_append_time=False, bint hold_high_watermark=False):
        cdef kernel_state* s = <kernel_state*> calloc(1, sizeof(kernel_state))
        if s == NULL:
            raise MemoryError()
        self._state = s
        pthread_mutex_init(&s.lock, NULL)
        s.infos_capacity = INLINE_BATCHES
        s.infos = <batch_info*> malloc(INLINE_BATCHES * sizeof(batch_info))
        if s.infos == NULL:
            raise MemoryError()
        s.log_start = log_start_offset
        s.log_end = log_end_offset
        s.base = log_end_offset if segment_base_offset < 0 else segment_base_offset
        s.tail = position
        s.leader_epoch = leader_epoch
        s.max_timestamp = -1
        s.first_timestamp = -1
        s.segment_bytes = segment_bytes
        s.max_batch_bytes = max_batch_bytes
        s.index_interval = index_interval_bytes
        s.segment_ms = segment_ms
        s.before_max_ms = before_max_ms
        s.after_max_ms = after_max_ms
        s.append_time = log_append_time
        s.hold = hold_high_watermark
        _move_high_watermark(s, s.log_end, s.tail)

    def __dealloc__(self):
        cdef kernel_state* s = <kernel_state*> self._state
        if s != NULL:
            pthread_mutex_destroy(&s.lock)
            free(s.infos)
            free(s.slots)
            free(s.producers)
            free(s)

    # C face

    cdef int c_commit(self, uint64_t position, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        _clear_result(out)
        pthread_mutex_lock(&s.lock)
        error = _finish(s, _commit(s, position, length, now_ms, out), out)
        pthread_mutex_unlock(&s.lock)
        return error

    cdef int c_append(self, const uint8_t* data, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        _clear_result(out)
        pthread_mutex_lock(&s.lock)
        error = _finish(s, _append(s, data, length, now_ms, out), out)
        pthread_mutex_unlock(&s.lock)
        return error

    cdef int c_attach_slot(self, uint8_t* slot, uint16_t file_id) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef slot_entry* grown
        cdef uint32_t capacity, i
        cdef int error = 0
        if slot == NULL or <uintptr_t> slot % 8 != 0:
            return EINVAL
        pthread_mutex_lock(&s.lock)
        for i in range(s.slots_count):
            if s.slots[i].slot == slot:
                break
        else:
            i = s.slots_count
        if i == s.slots_capacity:
            capacity = s.slots_capacity * 2 if s.slots_capacity else 4
            grown = <slot_entry*> realloc(s.slots, capacity * sizeof(slot_entry))
            if grown == NULL:
                error = ENOMEM
            else:
                s.slots = grown
                s.slots_capacity = capacity
        if error == 0:
            if i == s.slots_count:
                s.slots_count += 1
            s.slots[i].slot = slot
            s.slots[i].file_id = file_id
            s.updates += 1
            _fill_slot(s, &s.slots[i], 0)
        pthread_mutex_unlock(&s.lock)
        return error

    cdef void c_detach_slot(self, uint8_t* slot) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef uint32_t i
        pthread_mutex_lock(&s.lock)
        for i in range(s.slots_count):
            if s.slots[i].slot == slot:
                s.slots_count -= 1
                s.slots[i] = s.slots[s.slots_count]
                break
        pthread_mutex_unlock(&s.lock)

    cdef int c_commit_to(self, int64_t segment_base_offset, uint64_t position, uint32_t length, int64_t now_ms,
                         commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        _clear_result(out)
        pthread_mutex_lock(&s.lock)
        if s.data != NULL and s.base != segment_base_offset:
            error = COMMIT_WRONG_POSITION
        else:
            error = _commit(s, position, length, now_ms, out)
        error = _finish(s, error, out)
        pthread_mutex_unlock(&s.lock)
        return error

    cdef void c_clear_tail(self, int64_t segment_base_offset, uint64_t end) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        pthread_mutex_lock(&s.lock)
        if s.data != NULL and s.base == segment_base_offset:
            if end == UINT64_MAX:
                end = _end_of_remains(s)
            elif end > s.capacity:
                end = s.capacity
            if end > s.tail:
                memset(s.data + s.tail, 0, end - s.tail)
        pthread_mutex_unlock(&s.lock)

    cdef int c_restore_batch(self, const batch_info* info, int64_t now_ms) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef producer_state* known
        cdef producer_state entry
        cdef int error = 0
        if info.producer_id < 0 or info.attributes & ATTRIBUTE_CONTROL:
            return 0
        pthread_mutex_lock(&s.lock)
        known = _find_producer(s, info.producer_id)
        if known != NULL:
            entry = known[0]
        else:
            _start_producer(&entry, info.producer_id)
            error = _reserve_producer(s)
        if error == 0 and info.producer_epoch >= entry.epoch:
            if info.producer_epoch != entry.epoch:
                entry.count = 0
            entry.epoch = info.producer_epoch
            entry.last_time_ms = now_ms
            _remember(&entry, info.base_sequence, _add_sequence(info.base_sequence, info.last_offset_delta), info.base_offset,
                      info.base_offset + info.last_offset_delta)
            _store_producer(s, &entry)
        pthread_mutex_unlock(&s.lock)
        return error

    # requests

    def commit(self, uint64_t position, uint32_t length, int64_t now_ms):
        """Make the bytes at [position, position + length) of the head records; see `c_commit`."""
        cdef commit_result r
        with nogil:
            self.c_commit(position, length, now_ms, &r)
        return _result(&r)

    def commit_to(self, int64_t segment_base_offset, uint64_t position, uint32_t length, int64_t now_ms):
        """`commit`, refused with WRONG_POSITION when the head is another segment by now."""
        cdef commit_result r
        with nogil:
            self.c_commit_to(segment_base_offset, position, length, now_ms, &r)
        return _result(&r)

    def append(self, data, int64_t now_ms):
        """Copy whole batches to the tail and commit them.  `data` is a contiguous buffer of bytes."""
        cdef Py_buffer view
        cdef commit_result r
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len > INT32_MAX:
                _clear_result(&r)
                r.error = COMMIT_RECORD_LIST_TOO_LARGE
            else:
                with nogil:
                    self.c_append(<const uint8_t*> view.buf, <uint32_t> view.len, now_ms, &r)
        finally:
            PyBuffer_Release(&view)
        return _result(&r)

    def clear_tail(self, segment_base_offset=None, end=None):
        """Zero what a revoked producer left behind the tail: up to position `end`, or, without it, up to the
        first MiB that is zeros already (a producer writes upwards, without gaps).  With `segment_base_offset`,
        only if that segment is still the head."""
        cdef int64_t base = (<kernel_state*> self._state).base if segment_base_offset is None else segment_base_offset
        cdef uint64_t until = UINT64_MAX if end is None else end
        with nogil:
            self.c_clear_tail(base, until)

    # slots

    def attach_slot(self, uint64_t address, uint16_t file_id):
        """Fill the slot at `address` and keep it current; see `c_attach_slot`."""
        cdef int error
        with nogil:
            error = self.c_attach_slot(<uint8_t*> <uintptr_t> address, file_id)
        if error == EINVAL:
            raise LogError(f"slot address 0x{address:x} is not a multiple of 8", hint="slots are 64-byte cells of one region")
        if error:
            raise MemoryError()

    def detach_slot(self, uint64_t address):
        """Stop updating the slot; its bytes stay as they are.  Unknown addresses are fine."""
        with nogil:
            self.c_detach_slot(<uint8_t*> <uintptr_t> address)

    def revoke_slots(self):
        """Give every slot SLOT_FLAG_REVOKED and drop it: the partition is gone or moved."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            _drop_slots(s, SLOT_FLAG_REVOKED)
            pthread_mutex_unlock(&s.lock)

    # head

    def install_head(self, uint64_t address, uint64_t capacity, *, uint64_t position=0, int64_t segment_base_offset,
                     uint64_t offset_index_address=0, uint32_t offset_index_capacity=0, uint32_t offset_index_entries=0,
                     uint64_t time_index_address=0, uint32_t time_index_capacity=0, uint32_t time_index_entries=0,
                     int64_t last_indexed_timestamp=-1, int64_t first_timestamp=-1, int64_t max_timestamp=-1,
                     int64_t max_timestamp_offset=-1, int64_t created_ms=0):
        """Give the kernel a mapped head of `capacity` bytes, `position` of which are records already.

        Slots attached while there was no head get their last update with SLOT_FLAG_SEALED.  Index
        capacities and entries count entries; address 0 keeps no index."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint refused = False
        if address == 0 or position > capacity or capacity > INT32_MAX:
            raise LogError(f"head of {capacity} bytes at position {position} cannot be installed", hint="segments end below 2 GiB")
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.data != NULL or s.base != segment_base_offset or s.tail != position:
                refused = True
            else:
                _drop_slots(s, SLOT_FLAG_SEALED)
                s.data = <uint8_t*> <uintptr_t> address
                s.capacity = capacity
                s.offset_index = <uint8_t*> <uintptr_t> offset_index_address
                s.offset_capacity = offset_index_capacity if offset_index_address else <uint32_t> -1
                s.offset_entries = offset_index_entries
                s.time_index = <uint8_t*> <uintptr_t> time_index_address
                s.time_capacity = time_index_capacity if time_index_address else <uint32_t> -1
                s.time_entries = time_index_entries
                s.last_indexed_timestamp = last_indexed_timestamp
                s.first_timestamp = first_timestamp
                s.max_timestamp = max_timestamp
                s.max_timestamp_offset = max_timestamp_offset
                s.created_ms = created_ms
                s.since_index = 0
            pthread_mutex_unlock(&s.lock)
        if refused:
            raise LogError(f"a head at offset {segment_base_offset}, position {position} does not continue the log",
                           hint="seal the previous head first")

    def seal(self):
        """Take the head away: a SealedHead, or None when there is no head, or when not everything in it is
        readable yet (group commit: flush first).  Slots get SLOT_FLAG_SEALED and are dropped; from now on
        the log ends at position 0 of a segment that begins at log end offset."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint done = False
        cdef int64_t base, size, end, max_timestamp, max_timestamp_offset, offset_entries, time_entries
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.data != NULL and s.high_watermark == s.log_end:
                done = True
                _add_time_entry(s, True)
                base = s.base
                size = s.tail
                end = s.log_end
                max_timestamp = s.max_timestamp
                max_timestamp_offset = s.max_timestamp_offset
                offset_entries = s.offset_entries
                time_entries = s.time_entries
                _drop_slots(s, SLOT_FLAG_SEALED)
                s.data = NULL
                s.offset_index = NULL
                s.time_index = NULL
                s.capacity = 0
                s.base = s.log_end
                s.tail = 0
                s.first_timestamp = -1
                s.max_timestamp = -1
                s.max_timestamp_offset = -1
                _move_high_watermark(s, s.log_end, 0)
            pthread_mutex_unlock(&s.lock)
        if not done:
            return None
        return SealedHead(base, size, end, max_timestamp, max_timestamp_offset, offset_entries, time_entries)

    def freeze(self):
        """Refuse further records in this head (NO_SPACE), so that it can be flushed and sealed; its capacity, which
        `thaw` wants back should the roll fail."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef uint64_t capacity
        with nogil:
            pthread_mutex_lock(&s.lock)
            capacity = s.capacity
            s.capacity = s.tail
            pthread_mutex_unlock(&s.lock)
        return capacity

    def thaw(self, uint64_t capacity):
        """Undo `freeze`."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.data != NULL:
                s.capacity = capacity
            pthread_mutex_unlock(&s.lock)

    def roll_without_head(self):
        """There is no head, and the last segment takes no more records: the log now ends at position 0 of a
        segment that begins at log end offset.  Slots are sealed."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint refused = False
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.data != NULL:
                refused = True
            else:
                _drop_slots(s, SLOT_FLAG_SEALED)
                s.base = s.log_end
                s.tail = 0
                _move_high_watermark(s, s.log_end, 0)
            pthread_mutex_unlock(&s.lock)
        if refused:
            raise LogError("there is a head", hint="seal it")

    def advance_high_watermark(self, int64_t offset, uint64_t position, segment_base_offset=None):
        """Make records below `offset` readable; `position` is where `offset` lies in the head.  Ignored when
        it would go back, or when the head is not `segment_base_offset` (it has rolled since)."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint named = segment_base_offset is not None
        cdef int64_t base = segment_base_offset if named else 0
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.high_watermark < offset <= s.log_end and position <= s.tail and (not named or base == s.base):
                _move_high_watermark(s, offset, position)
                _update_slots(s, 0)
            pthread_mutex_unlock(&s.lock)

    def set_log_start_offset(self, int64_t offset):
        """Move the log start forward, and tell the slots."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.log_start < offset <= s.log_end:
                s.log_start = offset
                _update_slots(s, 0)
            pthread_mutex_unlock(&s.lock)

    def set_leader_epoch(self, int32_t epoch):
        """Stamp later batches with `epoch`, and tell the slots."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            s.leader_epoch = epoch
            _update_slots(s, 0)
            pthread_mutex_unlock(&s.lock)

    def configure(self, *, uint32_t segment_bytes, uint32_t max_batch_bytes, uint32_t index_interval_bytes, int64_t segment_ms,
                  int64_t before_max_ms, int64_t after_max_ms, bint log_append_time, bint hold_high_watermark):
        """Change the policy given at construction."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            s.segment_bytes = segment_bytes
            s.max_batch_bytes = max_batch_bytes
            s.index_interval = index_interval_bytes
            s.segment_ms = segment_ms
            s.before_max_ms = before_max_ms
            s.after_max_ms = after_max_ms
            s.append_time = log_append_time
            s.hold = hold_high_watermark
            if not s.hold and s.high_watermark < s.log_end:
                _move_high_watermark(s, s.log_end, s.tail)
                _update_slots(s, 0)
            pthread_mutex_unlock(&s.lock)

    # state

    def view(self):
        """A KernelView: offsets and positions of one moment."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef kernel_state c
        with nogil:
            pthread_mutex_lock(&s.lock)
            memcpy(&c, s, sizeof(kernel_state))
            pthread_mutex_unlock(&s.lock)
        return KernelView(c.base, c.tail, c.log_end, c.high_watermark, c.readable, c.last_stable, c.stable, c.log_start,
                          c.data != NULL)

    def index_entries(self):
        """Entries of the head's offset index and time index."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef uint32_t offsets, times
        with nogil:
            pthread_mutex_lock(&s.lock)
            offsets = s.offset_entries
            times = s.time_entries
            pthread_mutex_unlock(&s.lock)
        return offsets, times

    def timestamps(self):
        """Of the head: (of its first batch, largest, offset of the largest), -1 where there is none."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int64_t first, largest, offset
        with nogil:
            pthread_mutex_lock(&s.lock)
            first = s.first_timestamp if s.tail else -1
            largest = s.max_timestamp
            offset = s.max_timestamp_offset
            pthread_mutex_unlock(&s.lock)
        return first, largest, offset

    @property
    def log_end_offset(self):
        return (<kernel_state*> self._state).log_end

    @property
    def high_watermark(self):
        return (<kernel_state*> self._state).high_watermark

    @property
    def last_stable_offset(self):
        return (<kernel_state*> self._state).last_stable

    @property
    def log_start_offset(self):
        return (<kernel_state*> self._state).log_start

    @property
    def leader_epoch(self):
        return (<kernel_state*> self._state).leader_epoch

    @property
    def end_position(self):
        """The tail: byte position in the head where the next batch goes."""
        return (<kernel_state*> self._state).tail

    @property
    def position(self):
        """The same as `end_position`."""
        return (<kernel_state*> self._state).tail

    @property
    def max_message_bytes(self):
        """Largest batch that is accepted (max.message.bytes)."""
        return (<kernel_state*> self._state).max_batch_bytes

    @property
    def capacity(self):
        """Bytes of the head, 0 while there is none."""
        return (<kernel_state*> self._state).capacity

    @property
    def segment_base_offset(self):
        return (<kernel_state*> self._state).base

    @property
    def hold_high_watermark(self):
        """True: commits wait for `advance_high_watermark` before readers see them (group commit)."""
        return bool((<kernel_state*> self._state).hold)

    @property
    def slots_count(self):
        return (<kernel_state*> self._state).slots_count

    def statistics(self):
        """Counters since construction; see the metrics of room `log`."""
        cdef kernel_state* s = <kernel_state*> self._state
        return {"log.requests": s.requests, "log.batches": s.batches, "log.bytes": s.bytes, "log.duplicates": s.duplicates,
                "log.refused": s.refused, "log.producers": s.producers_count, "log.slots": s.slots_count}

    # producers

    def producers(self):
        """All remembered producers, as ProducerEntry, and the log end offset they stand for."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef producer_state* copy = NULL
        cdef producer_state* p
        cdef uint32_t i, capacity, n = 0
        cdef int k
        cdef int64_t end
        pthread_mutex_lock(&s.lock)
        capacity = s.producers_count
        end = s.log_end
        if capacity:
            copy = <producer_state*> malloc(capacity * sizeof(producer_state))
        if copy != NULL:
            for i in range(s.producers_capacity):
                if s.producers[i].id != -1:
                    copy[n] = s.producers[i]
                    n += 1
        pthread_mutex_unlock(&s.lock)
        if capacity and copy == NULL:
            raise MemoryError()
        try:
            out = []
            for i in range(n):
                p = &copy[i]
                out.append(ProducerEntry(
                    p.id, p.epoch, p.last_time_ms, p.coordinator_epoch, p.transaction_start,
                    tuple((p.seen[k].first_sequence, p.seen[k].last_sequence, p.seen[k].base_offset, p.seen[k].last_offset)
                          for k in range(p.count))))
        finally:
            free(copy)
        out.sort()
        return out, end

    def load_producers(self, entries):
        """Replace the producer table (recovery)."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef producer_state p
        pthread_mutex_lock(&s.lock)
        free(s.producers)
        s.producers = NULL
        s.producers_count = 0
        s.producers_capacity = 0
        pthread_mutex_unlock(&s.lock)
        for e in entries:
            _start_producer(&p, e.producer_id)
            p.epoch = e.producer_epoch
            p.last_time_ms = e.timestamp_ms
            p.coordinator_epoch = e.coordinator_epoch
            p.transaction_start = e.transaction_start
            for first, last, base_offset, last_offset in e.batches[-REMEMBERED:]:
                _remember(&p, first, last, base_offset, last_offset)
            pthread_mutex_lock(&s.lock)
            if _reserve_producer(s) == 0:
                _store_producer(s, &p)
            pthread_mutex_unlock(&s.lock)

    def expire_producers(self, int64_t before_ms):
        """Forget producers that last appended before `before_ms`; how many."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef uint32_t had, left
        with nogil:
            pthread_mutex_lock(&s.lock)
            had = s.producers_count
            if had:
                _rebuild_producers(s, s.producers_capacity, before_ms)
            left = s.producers_count
            pthread_mutex_unlock(&s.lock)
        return had - left
