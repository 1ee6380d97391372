# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Transactions of a kernel, for coordinators, readers and recovery.

Owns what is done with a kernel's transactions from outside of a commit, under the kernel's mutex:
markers, verifications (KIP-890), looks at what is open and what was aborted, and what recovery
tells.  The rules are `kdirect.log.transactions`; the files are `kdirect.log.aborted_index`.

No Python object is made or read while the mutex is held, and nobody waits for it with the GIL: what
is looked at is copied in C.  Else the collector could run code that takes the same mutex, and a
thread that holds the GIL could wait for one that wants it.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport (
    INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t)
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove

from kdirect.log.aborted_list cimport end_aborted, first_aborted, remove_entries, start_list
from kdirect.log.commit cimport append_marker as append_to
from kdirect.log.commit cimport clear_result, finish_request, marker_room
from kdirect.log.kernel cimport CommitKernel
from kdirect.log.producers cimport (
    find_producer, producer_state, reserve_producers, start_producer, store_producer)
from kdirect.log.results cimport (
    COMMIT_INVALID_PRODUCER_EPOCH, COMMIT_INVALID_RECORD, COMMIT_OK, COMMIT_STORAGE_ERROR,
    commit_result, to_python)
from kdirect.log.slots cimport finish_sealed, remember_sealed, update_slots
from kdirect.log.state cimport (
    aborted_list, aborted_t, kernel_state, mark_t, sealed_t, transaction_t)
from kdirect.log.transactions cimport (
    MARKER_BYTES, begin_transaction, keep_ended, reserve_transactions, settle_stable,
    start_transactions_at, write_marker)
from kdirect.machine cimport pthread_mutex_lock, pthread_mutex_unlock

from typing import NamedTuple

from kdirect.format.segment_files import AbortedTransaction


class OpenTransaction(NamedTuple):
    """A transaction that holds the last stable offset back.  `marker_offset` -1: it is open; else
    its marker is in the log, and not below the high watermark."""

    producer_id: int
    first_offset: int
    marker_offset: int


# -- for coordinators, and for who appends ---------------------------------------------------------

def marker_batch(int64_t producer_id, int16_t producer_epoch, int32_t coordinator_epoch,
                 bint commit, int64_t now_ms):
    """The control batch of one end-of-transaction marker, for `append_marker`: bytes."""
    cdef uint8_t marker[MARKER_BYTES]
    write_marker(marker, producer_id, producer_epoch, coordinator_epoch, commit, now_ms)
    return PyBytes_FromStringAndSize(<const char*> marker, MARKER_BYTES)


def append_marker(CommitKernel kernel, const uint8_t[::1] batch, int64_t now_ms):
    """End the transaction of a producer by a marker (`marker_batch`), which is appended although
    nothing is open: a CommitResult.  INVALID_PRODUCER_EPOCH, TRANSACTION_COORDINATOR_FENCED;
    NO_SPACE and NO_HEAD as of an append."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef commit_result r
    cdef int error
    clear_result(&r)
    with nogil:
        kernel.c_begin()
        if batch.shape[0] == 0 or batch.shape[0] > MARKER_BYTES:
            error = COMMIT_INVALID_RECORD
        else:
            error = append_to(s, &batch[0], <uint32_t> batch.shape[0], now_ms, &r)
        finish_request(s, error, &r)
        kernel.c_end()
    return to_python(&r)


MARKER_SIZE = MARKER_BYTES


def has_marker_room(CommitKernel kernel, uint32_t count, int64_t now_ms):
    """Whether so many markers can be appended now without any file work: bool."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef bint fits
    with nogil:
        pthread_mutex_lock(&s.lock)
        fits = marker_room(s, count, now_ms)
        pthread_mutex_unlock(&s.lock)
    return fits


def begin_verification(CommitKernel kernel, int64_t producer_id, int16_t producer_epoch,
                       int32_t sequence, int64_t now_ms):
    """Before a coordinator is asked whether this partition belongs to a producer's transaction:
    (error, ticket).  `sequence` is the first one of the batch that asks.  Ticket 0: nothing is to
    be asked, because the transaction is open here, or admitted.  INVALID_PRODUCER_EPOCH: a higher
    epoch has records here, or is admitted; one that only asks, and may be nobody's, keeps no other
    out.  Whoever asks at the same time gets the same ticket; a marker, or another epoch that asks,
    makes it worthless."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef producer_state* known
    cdef producer_state entry
    cdef int error = COMMIT_OK
    cdef uint64_t ticket = 0
    with nogil:
        pthread_mutex_lock(&s.lock)
        known = find_producer(&s.producers, producer_id)
        if known == NULL:
            if producer_id < 0 or reserve_producers(&s.producers, 1) != 0:
                error = COMMIT_STORAGE_ERROR
            else:
                start_producer(&entry, producer_id)
                entry.last_time_ms = now_ms
                store_producer(&s.producers, &entry)
                known = find_producer(&s.producers, producer_id)
        if known != NULL:
            if producer_epoch < known.epoch or (
                    known.admitted and producer_epoch < known.ticket_epoch):
                error = COMMIT_INVALID_PRODUCER_EPOCH
            elif known.transaction_start == -1 or known.epoch != producer_epoch:
                if known.ticket == 0 or known.ticket_epoch != producer_epoch:
                    s.tickets += 1
                    known.ticket = s.tickets
                    known.ticket_epoch = producer_epoch
                    known.admitted = False
                    known.least_sequence = sequence
                elif sequence < known.least_sequence:
                    known.least_sequence = sequence
                if not known.admitted:
                    ticket = known.ticket
        pthread_mutex_unlock(&s.lock)
    return error, ticket


def admit_transaction(CommitKernel kernel, int64_t producer_id, int16_t producer_epoch,
                      uint64_t ticket):
    """The coordinator has said that this partition belongs to the producer's transaction, after
    `begin_verification` gave that ticket: its next batches open it.  False, and nothing has
    changed: a marker has come since, or the producer goes on in another epoch."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef producer_state* known
    cdef bint admitted
    with nogil:
        pthread_mutex_lock(&s.lock)
        known = find_producer(&s.producers, producer_id)
        admitted = (known != NULL and ticket != 0 and known.ticket == ticket
                    and known.ticket_epoch == producer_epoch)
        if admitted:
            known.admitted = True
        pthread_mutex_unlock(&s.lock)
    return admitted


# -- looks -----------------------------------------------------------------------------------------

cdef void* _copy_of(const void* items, size_t size) noexcept nogil:
    """A copy of so many bytes, for `free`; NULL: there is no memory."""
    cdef void* copy = malloc(max(size, 1))
    if copy != NULL and size:
        memcpy(copy, items, size)
    return copy


def unstable_transactions(CommitKernel kernel):
    """The transactions that hold the last stable offset back, as OpenTransaction, by their first
    offsets."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef transaction_t* copy
    cdef uint32_t i, n
    with nogil:
        pthread_mutex_lock(&s.lock)
        n = s.transactions_count
        copy = <transaction_t*> _copy_of(s.transactions, n * sizeof(transaction_t))
        pthread_mutex_unlock(&s.lock)
    if copy == NULL:
        raise MemoryError()
    try:
        return [OpenTransaction(copy[i].producer_id, copy[i].first_offset, copy[i].marker)
                for i in range(n)]
    finally:
        free(copy)


def has_late_transaction(CommitKernel kernel, int64_t before_ms):
    """Is a transaction open whose producer has appended nothing here since `before_ms`?"""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef const producer_state* known
    cdef bint late = False
    cdef uint32_t i
    with nogil:
        pthread_mutex_lock(&s.lock)
        for i in range(s.transactions_count):
            if s.transactions[i].marker == -1:
                known = find_producer(&s.producers, s.transactions[i].producer_id)
                if known != NULL and known.last_time_ms < before_ms:
                    late = True
                    break
        pthread_mutex_unlock(&s.lock)
    return late


cdef _entry(const aborted_t* a):
    return AbortedTransaction(a.producer_id, a.first_offset, a.last_offset, a.stable_offset)


cdef list _entries(aborted_t* copy, uint32_t n, int64_t end):
    """Of `n` entries those that begin below `end`; the memory is freed."""
    cdef uint32_t i
    if copy == NULL:
        raise MemoryError()
    try:
        return [_entry(&copy[i]) for i in range(n) if copy[i].first_offset < end]
    finally:
        free(copy)


def aborted_transactions(CommitKernel kernel, int64_t start, int64_t end):
    """The aborted transactions of which a reader of [start, end) has to know, as
    AbortedTransaction, by their markers."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef aborted_t* copy
    cdef uint32_t first, after
    with nogil:
        pthread_mutex_lock(&s.lock)
        first = after = first_aborted(s, start)
        while after < s.aborted_count:
            after += 1
            if s.aborted[after - 1].stable_offset >= end:
                break                   # no later one began below
        copy = <aborted_t*> _copy_of(s.aborted + first, (after - first) * sizeof(aborted_t))
        pthread_mutex_unlock(&s.lock)
    return _entries(copy, after - first, end)


def aborted_index(CommitKernel kernel, int64_t start, int64_t end):
    """The entries of the aborted index whose markers are at offsets in [start, end)."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef aborted_t* copy
    cdef uint32_t first, after
    with nogil:
        pthread_mutex_lock(&s.lock)
        first = first_aborted(s, start)
        after = max(first, first_aborted(s, end))
        copy = <aborted_t*> _copy_of(s.aborted + first, (after - first) * sizeof(aborted_t))
        pthread_mutex_unlock(&s.lock)
    return _entries(copy, after - first, INT64_MAX)


def aborted_in(CommitKernel kernel, int64_t start, int64_t end):
    """How many entries of the aborted index a reader of [start, end) has to look at; -1: some that
    it would need are forgotten."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef uint32_t first
    cdef int64_t found = -1
    with nogil:
        pthread_mutex_lock(&s.lock)
        if start >= s.aborted_from:
            first = first_aborted(s, start)
            found = end_aborted(s, first, end) - first
        pthread_mutex_unlock(&s.lock)
    return found


def write_aborted_list(CommitKernel kernel, uint64_t address, uint32_t entries, uint16_t file_id,
                       int64_t start, int64_t end):
    """Write the list (`kdirect.format.layout`) for a reader of [start, end), all of which is below
    the last stable offset, into memory at `address` with room for so many entries.  False, and
    nothing done: part of that is forgotten."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef aborted_list written
    cdef bint done
    with nogil:
        pthread_mutex_lock(&s.lock)
        done = start_list(s, &written, <uint8_t*> <uintptr_t> address, entries, file_id, start, end)
        pthread_mutex_unlock(&s.lock)
    return done


def remove_aborted(CommitKernel kernel, markers):
    """Cleaning has met no record of the aborted transactions whose markers are at these offsets:
    they leave the aborted index.  How many there were.  See `kdirect.log.transactions` for when
    that may be."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef int64_t* offsets
    cdef uint32_t i, n, removed
    told = sorted(markers)
    n = len(told)
    offsets = <int64_t*> malloc(max(n, 1) * sizeof(int64_t))
    if offsets == NULL:
        raise MemoryError()
    try:
        for i in range(n):
            offsets[i] = told[i]
        with nogil:
            pthread_mutex_lock(&s.lock)
            removed = remove_entries(s, offsets, n)
            pthread_mutex_unlock(&s.lock)
    finally:
        free(offsets)
    return removed


# -- recovery --------------------------------------------------------------------------------------

def load_aborted_index(CommitKernel kernel, entries):
    """Recovery: what the files say, by markers."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef aborted_t told
    cdef int error
    for entry in entries:
        told.producer_id, told.first_offset, told.last_offset, told.stable_offset = entry
        with nogil:
            pthread_mutex_lock(&s.lock)
            error = reserve_transactions(s, 1)
            if error == 0:
                s.aborted[s.aborted_count] = told
                s.aborted_count += 1
            pthread_mutex_unlock(&s.lock)
        if error:
            raise MemoryError()


def forget_aborted(CommitKernel kernel, int64_t offset):
    """The segments below `offset` are gone, and so is their part of the aborted index."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef uint32_t gone
    with nogil:
        pthread_mutex_lock(&s.lock)
        gone = first_aborted(s, offset)
        s.aborted_from = max(s.aborted_from, offset)
        if gone:
            s.aborted_gone += gone
            s.aborted_count -= gone
            memmove(s.aborted, &s.aborted[gone], s.aborted_count * sizeof(aborted_t))
        pthread_mutex_unlock(&s.lock)


def restore_transactions(CommitKernel kernel, int64_t offset, points):
    """Recovery: at `offset`, to which the producers of `set_producers` belong, these transactions
    were open, (producer id, first offset, segment, position).  The batches from there on tell the
    rest, and then `settle_transactions`.

    What files say of later markers is forgotten, because they may be of an older log.  What is
    known of a log that was cut stays: there may be readers up to its last stable offset."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef mark_t start
    cdef int64_t producer
    cdef int error
    with nogil:
        pthread_mutex_lock(&s.lock)
        keep_ended(s, offset)
        if not s.transactions_unknown:
            s.transactions_unknown = True
            s.aborted_count = first_aborted(s, offset)
        pthread_mutex_unlock(&s.lock)
    for producer_id, first_offset, base, position in points:
        producer = producer_id
        start.base, start.position, start.offset = base, position, first_offset
        with nogil:
            pthread_mutex_lock(&s.lock)
            error = reserve_transactions(s, 1)
            if error == 0:
                begin_transaction(s, producer, &start)
            pthread_mutex_unlock(&s.lock)
        if error:
            raise MemoryError()


def first_unstable_segment(CommitKernel kernel):
    """Base offset of the segment in which the first transaction begins that is not stable; -1:
    there is none."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef int64_t base
    with nogil:
        pthread_mutex_lock(&s.lock)
        base = s.transactions[0].start.base if s.transactions_count else -1
        pthread_mutex_unlock(&s.lock)
    return base


def settle_transactions(CommitKernel kernel, sealed):
    """All transactions are known: from now on the last stable offset follows from them.  `sealed`
    (SealedSegment) are the sealed segments from `first_unstable_segment` on."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef sealed_t* told = NULL
    cdef size_t i, n
    cdef int error = 0
    segments = list(sealed)
    n = len(segments)
    told = <sealed_t*> malloc(max(n, 1) * sizeof(sealed_t))
    if told == NULL:
        raise MemoryError()
    try:
        for i in range(n):
            told[i].base = segments[i].base_offset
            told[i].size = segments[i].size
            told[i].end_offset = segments[i].end_offset
        with nogil:
            pthread_mutex_lock(&s.lock)
            for i in range(n):
                error = remember_sealed(s, told[i].base, told[i].size, told[i].end_offset)
                if error != 0:
                    break
            if error == 0:
                s.transactions_unknown = False
                start_transactions_at(s)
                settle_stable(s)
                finish_sealed(s)
                update_slots(s)
            pthread_mutex_unlock(&s.lock)
    finally:
        free(told)
    if error != 0:
        raise MemoryError()
