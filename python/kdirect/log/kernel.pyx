# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The commit kernel: the one place where bytes become records.

Law of the room: a kernel belongs to one partition.  It is compiled, holds no GIL, does no I/O, asks
no clock and allocates only to grow its tables.  TCP produce (`c_append`), RDMA produce
(`c_commit_next`) and copies of another log (`stamped`) pass the same checks, under one mutex.

Owns: the tail of the head segment, log end offset, high watermark, last stable offset, log start
offset and leader epoch of the partition; the producer table (idempotence); the list of metadata
slots (`kdirect.log.slots`); the index entries of the head.  Does not own: files and mappings
(`kdirect.log.segment` lends addresses by `kdirect.log.kernel_head`), and who may write.

Invariants, true whenever the mutex is free:

- ``log start <= last stable <= high watermark <= log end``.  High watermark and last stable offset
  are marks, (segment, position, offset): they lie in the head, at its start, or in a sealed segment
  that the kernel still knows.
- Bytes of the head below the tail are whole, checked batches with consecutive offsets.  A request
  that failed left zeros at the tail, so no reader and no recovery takes rubbish for a batch.
- Every attached slot holds the state above.  Its guard is the CRC-32C of the rest, so a READ that
  overlaps an update is seen by its reader and repeated (KafkaDirect §4.4.2).

A request is one or more whole batches of one producer, all or nothing.  Each header field is read
once, into `batch_info`; later steps use that copy, because an RDMA producer may still be writing.

Idempotence is Kafka's (`kdirect.log.producers`): a request that repeats remembered batches is a
duplicate, answered with the original offsets; one that repeats older ones is answered
DUPLICATE_SEQUENCE_NUMBER, for an RDMA producer has more than five requests under way.

Waiting requests are committed in runs (`c_begin` .. `c_end`): one lock and one update of the slots
serve them all.

With `hold_high_watermark`, commits do not move the marks; `kdirect.log.kernel_marks` does, when the
partition's `AckGate` says so, or `kdirect.log.replica_marks`, while replicas are counted.  The
producer table as a whole is read and replaced by `kdirect.log.kernel_producers`; what coordinators
and readers of transactions need is `kdirect.log.kernel_transactions`.

Threads: every method may be called from any thread.  Mapped memory handed to `install_head` must
stay mapped until `seal_head` has returned; slots until they are detached, got their last update or
were revoked.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport ENOENT
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, UINT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t,
    uint64_t, uintptr_t)
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from kdirect.format.layout cimport SLOT_FLAG_REVOKED
from kdirect.log.commit cimport (
    append_marker, append_request, append_stamped, check_batches, clear_piece, clear_result,
    commit_request, commit_stamped, finish_request)
from kdirect.log.producers cimport reserve_producers
from kdirect.log.results cimport CommitResult, to_python
from kdirect.log.slots cimport (
    attach, cut_log, detach, drop_slots, finish_sealed, move_to_end, publish, update_slots)
from kdirect.log.state cimport aborted_list, kernel_state, mark_t
from kdirect.log.transactions cimport (
    note_batch, reserve_transactions, settle_stable, start_transactions_at)
from kdirect.machine cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock)

from kdirect.errors import LogError
from kdirect.log.views import KernelView

NO_SPACE = COMMIT_NO_SPACE
WRONG_POSITION = COMMIT_WRONG_POSITION
NO_HEAD = COMMIT_NO_HEAD
NOT_CONTIGUOUS = COMMIT_NOT_CONTIGUOUS
UNKNOWN_EPOCH = COMMIT_UNKNOWN_EPOCH
UNVERIFIED_TRANSACTION = COMMIT_UNVERIFIED_TRANSACTION

cdef enum:
    INLINE_BATCHES = 32
    CLEAR_WINDOW = 1 << 20     # so many zeros end the search for what a producer left


cdef class CommitKernel:
    """See the module.  Life: construct with where the log ends, `install_head`, commits,
    `seal_head`, the next `install_head`, ... ; it owns no mapping, so there is nothing to close.

    `last_epoch` is the leader epoch of the log's last batch, `leader_epoch` that of the present
    leadership.  The policy: `segment_bytes` and `max_batch_bytes` bound a request and a batch;
    `index_interval_bytes` spaces index entries; `segment_ms` rolls by time (appends only);
    `before_max_ms`/`after_max_ms` bound the difference between a record's timestamp and the
    clock."""

    def __cinit__(self, *, int64_t log_start_offset=0, int64_t log_end_offset=0,
                  int64_t segment_base_offset=-1, uint64_t position=0, int32_t leader_epoch=0,
                  int32_t last_epoch=0, **policy):
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
        s.last_epoch = last_epoch
        s.max_timestamp = -1
        s.first_timestamp = -1
        self.configure(**policy)
        move_to_end(s)

    def __dealloc__(self):
        cdef kernel_state* s = <kernel_state*> self._state
        if s != NULL:
            pthread_mutex_destroy(&s.lock)
            free(s.infos)
            free(s.slots)
            free(s.sealed)
            free(s.producers.entries)
            free(s.transactions)
            free(s.aborted)
            free(s)

    # C face

    cdef int c_append(self, const uint8_t* data, uint32_t length, int64_t now_ms, bint stamped,
                      commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        self.c_begin()
        if stamped:
            error = append_stamped(s, data, length, now_ms, out)
        else:
            error = append_request(s, data, length, now_ms, False, out)
        error = finish_request(s, error, out)
        self.c_end()
        return error

    cdef void c_begin(self) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        pthread_mutex_lock(&s.lock)
        s.runs += 1

    cdef void c_end(self) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        publish(s)
        pthread_mutex_unlock(&s.lock)

    cdef int c_commit_next(self, int64_t segment_base_offset, uint64_t position, uint32_t length,
                           int32_t leader_epoch, bint stamped, int64_t now_ms,
                           commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        if s.data != NULL and s.base != segment_base_offset:
            error = COMMIT_WRONG_POSITION
        elif stamped:
            error = commit_stamped(s, position, length, now_ms, out)
        elif leader_epoch != s.leader_epoch:
            error = COMMIT_FENCED_LEADER_EPOCH
        else:
            error = commit_request(s, position, length, now_ms, out)
        return finish_request(s, error, out)

    cdef int c_append_next(self, int64_t segment_base_offset, const uint8_t* data, uint32_t length,
                           int64_t now_ms, bint checked, commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        if s.data != NULL and s.base != segment_base_offset:
            error = COMMIT_WRONG_POSITION
        else:
            error = append_request(s, data, length, now_ms, checked, out)
        return finish_request(s, error, out)

    cdef int c_append_marker_next(self, int64_t segment_base_offset, const uint8_t* data,
                                  uint32_t length, int64_t now_ms,
                                  commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        if s.data != NULL and s.base != segment_base_offset:
            error = COMMIT_WRONG_POSITION
        else:
            error = append_marker(s, data, length, now_ms, out)
        return finish_request(s, error, out)

    cdef int64_t c_high_watermark(self) noexcept nogil:
        return (<kernel_state*> self._state).readable.offset

    cdef int64_t c_log_end(self) noexcept nogil:
        return (<kernel_state*> self._state).log_end

    cdef bint c_holds(self) noexcept nogil:
        return (<kernel_state*> self._state).hold

    cdef bint c_gate_holds(self) noexcept nogil:
        return (<kernel_state*> self._state).gate_holds

    cdef int c_restore_batch(self, const batch_info* info, const uint8_t* data, int64_t base,
                             uint64_t position, int64_t now_ms) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        pthread_mutex_lock(&s.lock)
        error = reserve_producers(&s.producers, 1)
        if error == 0:
            error = reserve_transactions(s, 1)
        if error == 0:
            note_batch(s, info, data, base, position, now_ms)
        pthread_mutex_unlock(&s.lock)
        return error

    # requests

    def commit_next(self, int64_t segment_base_offset, uint64_t position, uint32_t length,
                    int32_t leader_epoch, int64_t now_ms, *, bint stamped=False):
        """Make bytes that lie in the head records, in a run of their own; see `c_commit_next`."""
        cdef commit_result r
        with nogil:
            self.c_begin()
            self.c_commit_next(segment_base_offset, position, length, leader_epoch, stamped, now_ms,
                               &r)
            self.c_end()
        return to_python(&r)

    def commit_as_stamped(self, int64_t segment_base_offset, uint64_t position, uint32_t length,
                          int64_t now_ms):
        """The same for a copy of another log, which keeps the offsets and leader epochs that it
        carries: a replica commits by this what was written into its head by RDMA."""
        return self.commit_next(segment_base_offset, position, length, 0, now_ms, stamped=True)

    def append(self, data, int64_t now_ms):
        """Copy whole batches, a contiguous buffer, to the tail and commit them."""
        return self._append(data, now_ms, False)

    def append_as_stamped(self, data, int64_t now_ms):
        """The same for a copy of another log, which keeps what it carries; see `c_append`."""
        return self._append(data, now_ms, True)

    cdef _append(self, data, int64_t now_ms, bint stamped):
        cdef Py_buffer view
        cdef commit_result r
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len > INT32_MAX:
                clear_result(&r)
                r.error = COMMIT_RECORD_LIST_TOO_LARGE
            else:
                with nogil:
                    self.c_append(<const uint8_t*> view.buf, <uint32_t> view.len, now_ms, stamped,
                                  &r)
        finally:
            PyBuffer_Release(&view)
        return to_python(&r)

    def check(self, data, int64_t now_ms):
        """0, or the error code that whole batches `data` would be refused with whatever their
        sequence numbers are; nothing changes."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef const uint8_t[::1] view = data
        cdef uint32_t length = <uint32_t> view.shape[0]
        cdef int64_t records
        cdef int error
        if view.shape[0] > INT32_MAX:
            return COMMIT_RECORD_LIST_TOO_LARGE
        with nogil:
            pthread_mutex_lock(&s.lock)
            error = check_batches(s, &view[0] if length else NULL, length, now_ms, False, &records)
            if error == COMMIT_OK and length > s.segment_bytes:
                error = COMMIT_RECORD_LIST_TOO_LARGE
            if error > 0:
                s.refused += 1
            pthread_mutex_unlock(&s.lock)
        return error

    def clear_tail(self, segment_base_offset=None, end=None):
        """Zero what a revoked producer left after the tail: up to position `end`, or, without it,
        up to the first MiB that is zeros already (a producer writes upwards, without gaps).  With
        `segment_base_offset`, only if that segment is still the head."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef uint64_t until = UINT64_MAX if end is None else end
        cdef int64_t base = self._base_or(segment_base_offset)
        cdef uint64_t at = 0, stop, zeros = 0
        cdef bint more = True
        # Piece by piece, so that nobody who commits waits long for the mutex.
        with nogil:
            while more:
                pthread_mutex_lock(&s.lock)
                more = s.data != NULL and s.base == base
                if more:
                    stop = min(until, s.capacity)
                    at = clear_piece(s, at, stop, &zeros)
                    more = at < stop and (until != UINT64_MAX or zeros < CLEAR_WINDOW)
                pthread_mutex_unlock(&s.lock)

    cdef int64_t _base_or(self, base) except? -1:
        return self.segment_base_offset if base is None else base

    # slots

    def attach_slot(self, uint64_t address, uint16_t file_id, segment_base_offset=None, *,
                    aborted=None):
        """Fill the slot at `address` now for the last segment, or the one named, and update it
        whenever what may be read of the segment changes.  That ends when the slot is detached, or
        with the last update, which has SLOT_FLAG_SEALED: the segment is sealed and may be read to
        its end.  The slot is SLOT_BYTES of memory, which the caller keeps mapped until then.
        `aborted`, (address, entries, offset), is memory for a list of aborted transactions beside
        the slot, for a reader from that offset on, which is kept current in the same way.
        False, and nothing done: it is sealed and may be read to its end already, or is none, or
        what the list would begin with is forgotten."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef aborted_list beside
        cdef const aborted_list* given = NULL
        cdef int64_t start = 0
        cdef int error
        cdef int64_t base = self._base_or(segment_base_offset)
        if address == 0 or address % 8 != 0:
            raise LogError(f"slot address 0x{address:x} is not a multiple of 8",
                           hint="slots are 64-byte cells of one region")
        if aborted is not None:
            beside.at = <uint8_t*> <uintptr_t> <uint64_t> aborted[0]
            beside.capacity = aborted[1]
            start = aborted[2]
            given = &beside
        with nogil:
            pthread_mutex_lock(&s.lock)
            error = attach(s, <uint8_t*> <uintptr_t> address, file_id, base, given, start)
            pthread_mutex_unlock(&s.lock)
        if error and error != ENOENT:
            raise MemoryError()
        return error == 0

    def detach_slot(self, uint64_t address):
        """Stop updating the slot; its bytes stay as they are.  Unknown addresses are fine."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            detach(s, <uint8_t*> <uintptr_t> address)
            pthread_mutex_unlock(&s.lock)

    def revoke_slots(self):
        """Give every slot SLOT_FLAG_REVOKED and drop it: the partition is gone or moved."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            drop_slots(s, SLOT_FLAG_REVOKED, -1)
            pthread_mutex_unlock(&s.lock)

    # offsets

    def truncate(self, int64_t offset, uint64_t position, int64_t segment_base_offset,
                 int32_t epoch, *, bint empty=False):
        """There is no head: the log now ends before `offset`, at `position` of that segment, the
        last or a sealed one; `epoch` is that of its last batch, and the kernel's.  Slots are
        revoked, producers and transactions forgotten, until `load_producers` has told of them, and
        `settle_transactions`: the last stable offset does not move before.  `empty`: no record is
        left; a log start below stays."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint refused
        cdef int64_t last
        cdef mark_t end
        end.base = segment_base_offset
        end.position = position
        end.offset = offset
        with nogil:
            pthread_mutex_lock(&s.lock)
            last = INT64_MAX if empty else s.log_end
            refused = s.data != NULL or not segment_base_offset <= offset <= last
            if not refused:
                cut_log(s, &end, epoch, empty)
            pthread_mutex_unlock(&s.lock)
        if refused:
            raise LogError(f"the log cannot be cut at offset {offset}", hint="seal the head first")

    def set_log_start_offset(self, int64_t offset):
        """Move the log start forward, and tell the slots."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.log_start < offset <= s.log_end:
                s.log_start = offset
                if s.transactions_count:
                    start_transactions_at(s)
                    settle_stable(s)
                    finish_sealed(s)
                update_slots(s)
            pthread_mutex_unlock(&s.lock)

    def set_leader_epoch(self, int32_t epoch):
        """Stamp later batches with `epoch`, and tell the slots."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            s.leader_epoch = epoch
            update_slots(s)
            pthread_mutex_unlock(&s.lock)

    def configure(self, *, uint32_t segment_bytes=INT32_MAX, uint32_t max_batch_bytes=INT32_MAX,
            uint32_t index_interval_bytes=4096, int64_t segment_ms=INT64_MAX,
            int64_t before_max_ms=INT64_MAX, int64_t after_max_ms=INT64_MAX,
            bint log_append_time=False, bint hold_high_watermark=False, bint wait_for_disk=False):
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
            s.gate_holds = hold_high_watermark
            s.disk_holds = wait_for_disk
            s.hold = s.gate_holds or s.counted != 0
            if not s.hold and s.readable.offset < s.log_end:
                move_to_end(s)
                update_slots(s)
            pthread_mutex_unlock(&s.lock)

    # state

    cdef void _look(self, void* copy) noexcept:
        """A copy of the state, of one moment."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            memcpy(copy, s, sizeof(kernel_state))
            pthread_mutex_unlock(&s.lock)

    def view(self):
        """A KernelView: offsets and positions of one moment."""
        cdef kernel_state c
        self._look(&c)
        return KernelView(
            c.base, c.tail, c.log_end, c.readable.offset, c.readable.position, c.stable.offset,
            c.stable.position, c.log_start, c.data != NULL, c.readable.base, c.stable.base)

    def index_entries(self):
        """Entries of the head's offset index and time index."""
        cdef kernel_state c
        self._look(&c)
        return c.offset_entries, c.time_entries

    def timestamps(self):
        """Of the head: (of its first batch, largest, offset of the largest); -1: none."""
        cdef kernel_state c
        self._look(&c)
        return c.first_timestamp if c.tail else -1, c.max_timestamp, c.max_timestamp_offset

    @property
    def log_end_offset(self):
        return (<kernel_state*> self._state).log_end

    @property
    def high_watermark(self):
        return (<kernel_state*> self._state).readable.offset

    @property
    def last_stable_offset(self):
        return (<kernel_state*> self._state).stable.offset

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
    def max_message_bytes(self):
        return (<kernel_state*> self._state).max_batch_bytes

    @property
    def capacity(self):
        """Bytes of the head that exist, 0 while there is none."""
        return (<kernel_state*> self._state).capacity

    @property
    def over(self):
        """A request was refused (NO_SPACE) that no larger capacity makes room for: the head is too
        old, or its index or its offsets are full.  It is to be rolled."""
        return bool((<kernel_state*> self._state).over)

    @property
    def segment_base_offset(self):
        return (<kernel_state*> self._state).base

    @property
    def hold_high_watermark(self):
        """Do commits leave the high watermark where it is?"""
        return bool((<kernel_state*> self._state).hold)

    def statistics(self):
        """Counters since construction; see the metrics of room `log`."""
        cdef kernel_state* s = <kernel_state*> self._state
        return {
            "log_requests": s.requests, "log_batches": s.batches, "log_bytes": s.bytes,
            "log_duplicates": s.duplicates, "log_refused": s.refused, "log_commit_runs": s.runs,
            "log_slot_updates": s.slot_updates, "log_producers": s.producers.count,
            "log_slots": s.slots_count,
            "log_open_transactions": s.transactions_count - s.transactions_ended,
        }
