# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Idempotent producers: what the commit kernel remembers of each producer id, and the rules it
applies.

Law of the room: a table and pure rules; no lock (the kernel's mutex guards the table), no I/O, no
clock.

The rules are Kafka's.  Sequence numbers of a producer id and epoch follow each other without gaps,
from 0 (after INT32_MAX comes 0).  The last five batches are remembered: a request that repeats
remembered batches is a repetition, and answers with the original offsets; one of older batches,
back to the first, is told from a gap, too.  A request that mixes repeated and new batches is
refused as out of order; so is a gap.  A smaller epoch than the last is fenced off; a larger one
starts at sequence 0.  A producer that is not known (its batches were deleted, or it expired) may
start anywhere.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t)
from libc.stdlib cimport free, malloc
from libc.string cimport memmove, memset

from kdirect.format.batch cimport batch_info
from kdirect.format.layout cimport ATTRIBUTE_CONTROL
from kdirect.log.results cimport (
    COMMIT_DUPLICATE_SEQUENCE, COMMIT_INVALID_PRODUCER_EPOCH, COMMIT_INVALID_RECORD, COMMIT_OK,
    COMMIT_OUT_OF_ORDER_SEQUENCE, COMMIT_STORAGE_ERROR)

from typing import NamedTuple


cdef inline uint32_t bucket_of(int64_t id, uint32_t capacity) noexcept nogil:
    cdef uint64_t h = <uint64_t> id * <uint64_t> 0x9E3779B97F4A7C15
    return <uint32_t> (h >> 32) & (capacity - 1)


cdef producer_state* find_producer(const producer_table* t, int64_t id) noexcept nogil:
    cdef uint32_t i
    if t.entries == NULL:
        return NULL
    i = bucket_of(id, t.capacity)
    while t.entries[i].id != -1:
        if t.entries[i].id == id:
            return &t.entries[i]
        i = (i + 1) & (t.capacity - 1)
    return NULL


cdef producer_state* place_of(producer_state* table, uint32_t capacity, int64_t id) noexcept nogil:
    cdef uint32_t i = bucket_of(id, capacity)
    while table[i].id != -1 and table[i].id != id:
        i = (i + 1) & (capacity - 1)
    return &table[i]


cdef int rebuild(producer_table* t, uint32_t capacity, int64_t drop_before_ms) noexcept nogil:
    """Move the table to `capacity` entries, without producers that last appended before
    `drop_before_ms`, unless they have a transaction open."""
    cdef producer_state* table = <producer_state*> malloc(capacity * sizeof(producer_state))
    cdef uint32_t i, kept = 0
    if table == NULL:
        return ENOMEM
    for i in range(capacity):
        table[i].id = -1
    for i in range(t.capacity):
        if t.entries[i].id != -1 and (t.entries[i].last_time_ms >= drop_before_ms
                                         or t.entries[i].transaction_start != -1):
            place_of(table, capacity, t.entries[i].id)[0] = t.entries[i]
            kept += 1
    free(t.entries)
    t.entries = table
    t.capacity = capacity
    t.count = kept
    return 0


cdef int reserve_producers(producer_table* t, uint32_t more) noexcept nogil:
    cdef uint32_t capacity = t.capacity if t.entries != NULL else 16
    while (t.count + more) * 2 > capacity:
        capacity *= 2
    if t.entries == NULL or capacity != t.capacity:
        return rebuild(t, capacity, -INT64_MAX)
    return 0


cdef void store_producer(producer_table* t, const producer_state* entry) noexcept nogil:
    cdef producer_state* at = place_of(t.entries, t.capacity, entry.id)
    if at.id == -1:
        t.count += 1
    at[0] = entry[0]


cdef inline int32_t add_sequence(int32_t sequence, int32_t delta) noexcept nogil:
    """Sequence numbers run from 0 to INT32_MAX and start again."""
    if sequence > INT32_MAX - delta:
        return delta - (INT32_MAX - sequence) - 1
    return sequence + delta


cdef inline bint appended_before(int32_t sequence, int32_t newest) noexcept nogil:
    """Is `sequence` at or before `newest`?  Half of all sequence numbers are."""
    return ((<uint32_t> newest - <uint32_t> sequence) & 0x7FFFFFFF) < 0x40000000


cdef void remember_batch(producer_state* p, int32_t first, int32_t last, int64_t base_offset,
                         int64_t last_offset) noexcept nogil:
    if p.count == REMEMBERED:
        memmove(&p.seen[0], &p.seen[1], (REMEMBERED - 1) * sizeof(batch_seen))
        p.count = REMEMBERED - 1
    p.seen[p.count].first_sequence = first
    p.seen[p.count].last_sequence = last
    p.seen[p.count].base_offset = base_offset
    p.seen[p.count].last_offset = last_offset
    p.count += 1


cdef void start_producer(producer_state* p, int64_t id) noexcept nogil:
    memset(p, 0, sizeof(producer_state))
    p.id = id
    p.epoch = -1
    p.start_sequence = -1
    p.coordinator_epoch = -1
    p.transaction_start = -1


cdef bint _is_one_producer(const batch_info* batches, uint32_t n) noexcept nogil:
    """Do all batches carry the same producer id and epoch, and sequences if there is an id?"""
    cdef const batch_info* b
    cdef uint32_t i
    for i in range(n):
        b = &batches[i]
        if (b.producer_id != batches[0].producer_id
                or b.producer_epoch != batches[0].producer_epoch):
            return False
        if b.producer_id >= 0 and (b.producer_epoch < 0 or b.base_sequence < 0):
            return False
    return True


cdef const batch_seen* _remembered(const producer_state* p, int32_t first,
                                   int32_t last) noexcept nogil:
    """The remembered batch of these sequences, or NULL."""
    cdef int k
    for k in range(p.count):
        if p.seen[k].first_sequence == first and p.seen[k].last_sequence == last:
            return &p.seen[k]
    return NULL


cdef bint _was_appended(const producer_state* known, const batch_info* batches,
                        uint32_t n) noexcept nogil:
    """Was the whole request appended before the batches that are remembered?  Sequences have no
    gaps, so what lies between the first that was taken and the remembered ones was appended; but
    all of the request, or none."""
    cdef const batch_info* first = &batches[0]
    cdef const batch_info* end = &batches[n - 1]
    cdef int32_t last = add_sequence(first.base_sequence, first.last_offset_delta)
    cdef int32_t oldest
    if known == NULL or known.epoch != first.producer_epoch or known.count == 0:
        return False
    oldest = known.seen[0].first_sequence
    if last == oldest or not appended_before(last, oldest):
        return False
    if known.start_sequence != -1 \
            and not appended_before(known.start_sequence, first.base_sequence):
        return False
    return appended_before(add_sequence(end.base_sequence, end.last_offset_delta),
                           known.seen[known.count - 1].last_sequence)


cdef int check_sequences(producer_table* t, const batch_info* batches, uint32_t n, int64_t log_end,
                         producer_state* next_state, repetition* repeated) noexcept nogil:
    cdef producer_state* known
    cdef producer_state* p = next_state
    cdef const batch_info* b
    cdef const batch_seen* original
    cdef uint32_t i
    cdef int32_t last, expected
    cdef int64_t offset = log_end
    cdef int64_t id = batches[0].producer_id

    repeated.batches = 0
    p.id = -1
    if not _is_one_producer(batches, n):
        return COMMIT_INVALID_RECORD
    if id < 0:
        return COMMIT_OK
    known = find_producer(t, id)
    if known != NULL:
        p[0] = known[0]
    else:
        start_producer(p, id)
    for i in range(n):
        b = &batches[i]
        last = add_sequence(b.base_sequence, b.last_offset_delta)
        if b.producer_epoch < p.epoch:
            return COMMIT_INVALID_PRODUCER_EPOCH
        if b.producer_epoch == p.epoch:
            original = _remembered(p, b.base_sequence, last)
            if original != NULL:
                if repeated.batches == 0:
                    repeated.base_offset = original.base_offset
                repeated.last_offset = original.last_offset
                repeated.batches += 1
                if repeated.batches != i + 1:
                    return COMMIT_OUT_OF_ORDER_SEQUENCE
                continue
            expected = add_sequence(p.seen[p.count - 1].last_sequence, 1) if p.count else 0
            if repeated.batches or b.base_sequence != expected:
                if i == 0 and _was_appended(known, batches, n):
                    return COMMIT_DUPLICATE_SEQUENCE
                return COMMIT_OUT_OF_ORDER_SEQUENCE
        else:
            if p.epoch != -1 and b.base_sequence != 0:
                return COMMIT_OUT_OF_ORDER_SEQUENCE
            p.epoch = b.producer_epoch
            p.count = 0
            p.start_sequence = b.base_sequence
        remember_batch(p, b.base_sequence, last, offset, offset + b.last_offset_delta)
        offset += <int64_t> b.last_offset_delta + 1
    if repeated.batches == 0 and known == NULL and reserve_producers(t, 1) != 0:
        return COMMIT_STORAGE_ERROR
    return COMMIT_OK


cdef int expire(producer_table* t, int64_t before_ms) noexcept nogil:
    return rebuild(t, t.capacity, before_ms) if t.count else 0


cdef void forget_producers(producer_table* t) noexcept nogil:
    free(t.entries)
    memset(t, 0, sizeof(producer_table))


cdef int copy_producers(const producer_table* t, producer_state** copy) noexcept nogil:
    cdef uint32_t i, n = 0
    copy[0] = NULL
    if t.count == 0:
        return 0
    copy[0] = <producer_state*> malloc(t.count * sizeof(producer_state))
    if copy[0] == NULL:
        return -1
    for i in range(t.capacity):
        if t.entries[i].id != -1:
            copy[0][n] = t.entries[i]
            n += 1
    return <int> n


cdef int restore_batch(producer_table* t, const batch_info* batch, int64_t now_ms) noexcept nogil:
    cdef producer_state* known
    cdef producer_state entry
    if batch.producer_id < 0 or batch.attributes & ATTRIBUTE_CONTROL:
        return 0
    known = find_producer(t, batch.producer_id)
    if known != NULL:
        entry = known[0]
    else:
        start_producer(&entry, batch.producer_id)
        if reserve_producers(t, 1) != 0:
            return ENOMEM
    if batch.producer_epoch < entry.epoch:
        return 0
    if batch.producer_epoch != entry.epoch:
        entry.count = 0
        entry.start_sequence = batch.base_sequence
    entry.epoch = batch.producer_epoch
    entry.last_time_ms = now_ms
    remember_batch(
        &entry, batch.base_sequence, add_sequence(batch.base_sequence, batch.last_offset_delta),
        batch.base_offset, batch.base_offset + batch.last_offset_delta)
    store_producer(t, &entry)
    return 0


# -- for snapshots ---------------------------------------------------------------------------------

class ProducerEntry(NamedTuple):
    """A producer id as the snapshot files keep it.  `batches`: (first sequence, last sequence, base
    offset, last offset), oldest first, at most five."""

    producer_id: int
    producer_epoch: int
    timestamp_ms: int
    coordinator_epoch: int
    transaction_start: int
    batches: tuple


cdef list entries_of(const producer_state* states, uint32_t n):
    cdef const producer_state* p
    cdef uint32_t i
    cdef int k
    out = []
    for i in range(n):
        p = &states[i]
        if p.epoch == -1:
            continue                     # it has nothing but a ticket
        out.append(ProducerEntry(
            p.id, p.epoch, p.last_time_ms, p.coordinator_epoch, p.transaction_start,
            tuple([(p.seen[k].first_sequence, p.seen[k].last_sequence, p.seen[k].base_offset,
                    p.seen[k].last_offset) for k in range(p.count)])))
    out.sort()
    return out


cdef void load_entry(producer_state* p, entry) except *:
    start_producer(p, entry.producer_id)
    p.epoch = entry.producer_epoch
    p.last_time_ms = entry.timestamp_ms
    p.coordinator_epoch = entry.coordinator_epoch
    p.transaction_start = entry.transaction_start
    for first, last, base_offset, last_offset in entry.batches[-REMEMBERED:]:
        remember_batch(p, first, last, base_offset, last_offset)
