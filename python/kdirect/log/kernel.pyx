# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The commit kernel: the one place where bytes become records.

Law of the room: a kernel belongs to one partition.  It is compiled, holds no GIL, does no I/O, asks
no clock and allocates only to grow its tables.  TCP produce (`c_append`), RDMA produce (`c_commit`)
and replication pass through the same check and the same stamp, under one mutex.

Owns: the tail of the head segment, log end offset, high watermark, last stable offset, log start
offset and leader epoch of the partition; the producer table (idempotence); the list of metadata
slots; the index entries of the head.  Does not own: files and mappings (`kdirect.log.segment` gives
it addresses with `install_head` and takes them back with `seal`), and who may write
(`kdirect.broker.access`).

Invariants, true whenever the mutex is free:

- ``log start <= last stable <= high watermark <= log end``; high watermark and last stable offset
  lie in the head or at its start (a segment is sealed only when everything in it is readable).
- Bytes of the head below the tail are whole, checked batches with consecutive offsets.  A request
  that failed left zeros at the tail, so no reader and no recovery takes rubbish for a batch.
- Every attached slot holds the state above.  Its guard is the CRC-32C of the rest, so a READ that
  overlaps an update is seen by its reader and repeated (KafkaDirect §4.4.2).

A request is one or more whole batches of one producer, all or nothing.  Each header field is read
once, into `batch_info`; later steps use that copy, because an RDMA producer may still be writing.

Idempotence is Kafka's: the last five batches of each producer id are remembered.  A request that
repeats remembered batches is a duplicate: it answers with the original offsets and appends nothing.
One that repeats older ones is answered DUPLICATE_SEQUENCE_NUMBER (appended, at an offset that is
not known any more): an RDMA producer has more than five requests under way.  A request that mixes
repeated and new batches is refused as out of order.

Waiting requests are committed in runs (`c_begin` .. `c_end`): one lock and one update of the slots
serve them all.

Group commit: with `hold_high_watermark`, commits do not move the high watermark;
`advance_high_watermark` does, once the caller knows that the bytes are on disk (or, later, on the
followers).

Threads: every method may be called from any thread.  Mapped memory handed to `install_head` must
stay mapped until `seal` has returned; slots until they are detached, sealed or revoked.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport INT32_MAX, INT64_MAX, UINT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from kdirect.format.layout cimport SLOT_BYTES, SLOT_FLAG_REVOKED, SLOT_FLAG_SEALED
from kdirect.machine cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock)
from kdirect.log.commit cimport (
    add_time_entry, append_request, check_batches, clear_piece, clear_result, commit_request, drop_slots, fill_slot, finish_request,
    kernel_state, move_high_watermark, publish, slot_entry, update_slots)
from kdirect.log.producers cimport (
    entries_of, expire, load_entry, producer_state, reserve_producer, restore_batch, store_producer)

from typing import NamedTuple

from kdirect.errors import LogError

NO_SPACE = COMMIT_NO_SPACE
WRONG_POSITION = COMMIT_WRONG_POSITION
NO_HEAD = COMMIT_NO_HEAD

cdef enum:
    INLINE_BATCHES = 32
    CLEAR_WINDOW = 1 << 20     # so many zeros end the search for what a producer left


# -- Python face -----------------------------------------------------------------------------------

@cython.freelist(64)
cdef class CommitResult:
    """Outcome of one request.  `error` 0: committed (or, with `duplicate`, committed before);
    otherwise Kafka's error code, or one of NO_SPACE, WRONG_POSITION, NO_HEAD.  Offsets are -1 after
    an error."""

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
    """One consistent look at a kernel.  Positions are bytes of the segment `segment_base_offset`.
    """

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
    """See the module.  Life: construct with where the log ends, `install_head`, commits, `seal`,
    the next `install_head`, ... ; it owns no mapping, so there is nothing to close.

    `segment_bytes` and `max_batch_bytes` bound a request and a batch; `index_interval_bytes` spaces
    index entries; `segment_ms` rolls by time (appends only); `before_max_ms`/`after_max_ms` bound
    the difference between a record's timestamp and the clock."""

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
        move_high_watermark(s, s.log_end, s.tail)

    def __dealloc__(self):
        cdef kernel_state* s = <kernel_state*> self._state
        if s != NULL:
            pthread_mutex_destroy(&s.lock)
            free(s.infos)
            free(s.slots)
            free(s.producers.entries)
            free(s)

    # C face

    cdef int c_commit(self, uint64_t position, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        self.c_begin()
        error = finish_request(s, commit_request(s, position, length, now_ms, False, out), out)
        self.c_end()
        return error

    cdef int c_append(self, const uint8_t* data, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        self.c_begin()
        error = finish_request(s, append_request(s, data, length, now_ms, out), out)
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

    cdef int c_commit_next(self, int64_t segment_base_offset, uint64_t position, uint32_t length, int32_t leader_epoch, int64_t now_ms,
                           commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        if s.data != NULL and s.base != segment_base_offset:
            error = COMMIT_WRONG_POSITION
        elif leader_epoch != s.leader_epoch:
            error = COMMIT_FENCED_LEADER_EPOCH
        else:
            error = commit_request(s, position, length, now_ms, True, out)
        return finish_request(s, error, out)

    cdef int c_append_next(self, int64_t segment_base_offset, const uint8_t* data, uint32_t length, int64_t now_ms,
                           commit_result* out) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        clear_result(out)
        if s.data != NULL and s.base != segment_base_offset:
            error = COMMIT_WRONG_POSITION
        else:
            error = append_request(s, data, length, now_ms, out)
        return finish_request(s, error, out)

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
            fill_slot(s, &s.slots[i], 0)
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
        clear_result(out)
        self.c_begin()
        if s.data != NULL and s.base != segment_base_offset:
            error = COMMIT_WRONG_POSITION
        else:
            error = commit_request(s, position, length, now_ms, False, out)
        error = finish_request(s, error, out)
        self.c_end()
        return error

    cdef void c_clear_tail(self, int64_t segment_base_offset, uint64_t end) noexcept nogil:
        """In pieces: whoever looks at the offsets meanwhile waits for one of them, not for all."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef uint64_t at = 0, stop, zeros = 0
        cdef bint more = True
        # Piece by piece, so that nobody who commits waits long for the mutex.
        while more:
            pthread_mutex_lock(&s.lock)
            more = s.data != NULL and s.base == segment_base_offset
            if more:
                stop = min(end, s.capacity)
                at = clear_piece(s, at, stop, &zeros)
                more = at < stop and (end != UINT64_MAX or zeros < CLEAR_WINDOW)
            pthread_mutex_unlock(&s.lock)

    cdef int c_restore_batch(self, const batch_info* info, int64_t now_ms) noexcept nogil:
        cdef kernel_state* s = <kernel_state*> self._state
        cdef int error
        pthread_mutex_lock(&s.lock)
        error = restore_batch(&s.producers, info, now_ms)
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
        """Copy whole batches to the tail and commit them.  `data` is a contiguous buffer of bytes.
        """
        cdef Py_buffer view
        cdef commit_result r
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len > INT32_MAX:
                clear_result(&r)
                r.error = COMMIT_RECORD_LIST_TOO_LARGE
            else:
                with nogil:
                    self.c_append(<const uint8_t*> view.buf, <uint32_t> view.len, now_ms, &r)
        finally:
            PyBuffer_Release(&view)
        return _result(&r)

    def check(self, data, int64_t now_ms):
        """0, or the error code that whole batches `data` would be refused with whatever their
        sequence numbers are; nothing changes."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef Py_buffer view
        cdef int64_t records
        cdef int error
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len > INT32_MAX:
                return COMMIT_RECORD_LIST_TOO_LARGE
            with nogil:
                pthread_mutex_lock(&s.lock)
                error = check_batches(s, <const uint8_t*> view.buf, <uint32_t> view.len, now_ms, &records)
                if error == COMMIT_OK and view.len > s.segment_bytes:
                    error = COMMIT_RECORD_LIST_TOO_LARGE
                if error > 0:
                    s.refused += 1
                pthread_mutex_unlock(&s.lock)
        finally:
            PyBuffer_Release(&view)
        return error

    def clear_tail(self, segment_base_offset=None, end=None):
        """Zero what a revoked producer left behind the tail: up to position `end`, or, without it,
        up to the first MiB that is zeros already (a producer writes upwards, without gaps).  With
        `segment_base_offset`, only if that segment is still the head."""
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
            drop_slots(s, SLOT_FLAG_REVOKED)
            pthread_mutex_unlock(&s.lock)

    # head

    def install_head(self, uint64_t address, uint64_t capacity, *, uint64_t position=0, int64_t segment_base_offset,
                     uint64_t offset_index_address=0, uint32_t offset_index_capacity=0, uint32_t offset_index_entries=0,
                     uint64_t time_index_address=0, uint32_t time_index_capacity=0, uint32_t time_index_entries=0,
                     int64_t last_indexed_timestamp=-1, int64_t first_timestamp=-1, int64_t max_timestamp=-1,
                     int64_t max_timestamp_offset=-1, int64_t created_ms=0):
        """Give the kernel a mapped head of `capacity` bytes, `position` of which are records
        already.

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
                drop_slots(s, SLOT_FLAG_SEALED)
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
                s.over = False
            pthread_mutex_unlock(&s.lock)
        if refused:
            raise LogError(f"a head at offset {segment_base_offset}, position {position} does not continue the log",
                           hint="seal the previous head first")

    def seal(self):
        """Take the head away: a SealedHead, or None when there is no head, or when not everything
        in it is readable yet (group commit: flush first).  Slots get SLOT_FLAG_SEALED and are
        dropped; from now on the log ends at position 0 of a segment that begins at log end offset.
        """
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint done = False
        cdef int64_t base, size, end, max_timestamp, max_timestamp_offset, offset_entries, time_entries
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.data != NULL and s.high_watermark == s.log_end:
                done = True
                add_time_entry(s, True)
                base = s.base
                size = s.tail
                end = s.log_end
                max_timestamp = s.max_timestamp
                max_timestamp_offset = s.max_timestamp_offset
                offset_entries = s.offset_entries
                time_entries = s.time_entries
                drop_slots(s, SLOT_FLAG_SEALED)
                s.data = NULL
                s.over = False
                s.offset_index = NULL
                s.time_index = NULL
                s.capacity = 0
                s.base = s.log_end
                s.tail = 0
                s.first_timestamp = -1
                s.max_timestamp = -1
                s.max_timestamp_offset = -1
                move_high_watermark(s, s.log_end, 0)
            pthread_mutex_unlock(&s.lock)
        if not done:
            return None
        return SealedHead(base, size, end, max_timestamp, max_timestamp_offset, offset_entries, time_entries)

    def resize(self, uint64_t capacity, uint32_t offset_index_capacity, uint32_t time_index_capacity):
        """From now on the head has `capacity` bytes, and its indexes have room for so many entries:
        it grew, or what was not used was given back.  False, and nothing changed, when there is no
        head or it holds more than that.

        Bytes below `capacity`, and of the indexes, exist before the call; what goes is freed after
        it."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint done = False
        with nogil:
            pthread_mutex_lock(&s.lock)
            if (s.data != NULL and s.tail <= capacity <= <uint64_t> INT32_MAX
                    and (s.offset_index == NULL or s.offset_entries <= offset_index_capacity)
                    and (s.time_index == NULL or s.time_entries < time_index_capacity)):
                done = True
                s.capacity = capacity
                if s.offset_index != NULL:
                    s.offset_capacity = offset_index_capacity
                if s.time_index != NULL:
                    s.time_capacity = time_index_capacity
            pthread_mutex_unlock(&s.lock)
        return done

    def freeze(self):
        """Refuse further records in this head (NO_SPACE), so that it can be flushed and sealed; its
        capacity, which `thaw` wants back should the roll fail."""
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
        """There is no head, and the last segment takes no more records: the log now ends at
        position 0 of a segment that begins at log end offset.  Slots are sealed."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint refused = False
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.data != NULL:
                refused = True
            else:
                drop_slots(s, SLOT_FLAG_SEALED)
                s.base = s.log_end
                s.tail = 0
                move_high_watermark(s, s.log_end, 0)
            pthread_mutex_unlock(&s.lock)
        if refused:
            raise LogError("there is a head", hint="seal it")

    def advance_high_watermark(self, int64_t offset, uint64_t position, segment_base_offset=None):
        """Make records below `offset` readable; `position` is where `offset` lies in the head.
        Ignored when it would go back, or when the head is not `segment_base_offset` (it has rolled
        since)."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef bint named = segment_base_offset is not None
        cdef int64_t base = segment_base_offset if named else 0
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.high_watermark < offset <= s.log_end and position <= s.tail and (not named or base == s.base):
                move_high_watermark(s, offset, position)
                update_slots(s, 0)
            pthread_mutex_unlock(&s.lock)

    def set_log_start_offset(self, int64_t offset):
        """Move the log start forward, and tell the slots."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.log_start < offset <= s.log_end:
                s.log_start = offset
                update_slots(s, 0)
            pthread_mutex_unlock(&s.lock)

    def set_leader_epoch(self, int32_t epoch):
        """Stamp later batches with `epoch`, and tell the slots."""
        cdef kernel_state* s = <kernel_state*> self._state
        with nogil:
            pthread_mutex_lock(&s.lock)
            s.leader_epoch = epoch
            update_slots(s, 0)
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
                move_high_watermark(s, s.log_end, s.tail)
                update_slots(s, 0)
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
        """Of the head: (of its first batch, largest, offset of the largest), -1 where there is
        none."""
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
        """True: commits wait for `advance_high_watermark` before readers see them (group commit).
        """
        return bool((<kernel_state*> self._state).hold)

    @property
    def slots_count(self):
        return (<kernel_state*> self._state).slots_count

    def statistics(self):
        """Counters since construction; see the metrics of room `log`."""
        cdef kernel_state* s = <kernel_state*> self._state
        return {"log_requests": s.requests, "log_batches": s.batches, "log_bytes": s.bytes, "log_duplicates": s.duplicates,
                "log_refused": s.refused, "log_commit_runs": s.runs, "log_slot_updates": s.slot_updates, "log_producers": s.producers.count, "log_slots": s.slots_count}

    # producers

    def producers(self):
        """All remembered producers, as ProducerEntry, and the log end offset they stand for."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef producer_state* copy = NULL
        cdef uint32_t i, count, n = 0
        cdef int64_t end
        pthread_mutex_lock(&s.lock)
        count = s.producers.count
        end = s.log_end
        if count:
            copy = <producer_state*> malloc(count * sizeof(producer_state))
        if copy != NULL:
            for i in range(s.producers.capacity):
                if s.producers.entries[i].id != -1:
                    copy[n] = s.producers.entries[i]
                    n += 1
        pthread_mutex_unlock(&s.lock)
        if count and copy == NULL:
            raise MemoryError()
        try:
            return entries_of(copy, n), end
        finally:
            free(copy)

    def load_producers(self, entries):
        """Replace the producer table (recovery)."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef producer_state p
        cdef int error
        pthread_mutex_lock(&s.lock)
        free(s.producers.entries)
        memset(&s.producers, 0, sizeof(s.producers))
        pthread_mutex_unlock(&s.lock)
        for entry in entries:
            load_entry(&p, entry)
            pthread_mutex_lock(&s.lock)
            error = reserve_producer(&s.producers)
            if error == 0:
                store_producer(&s.producers, &p)
            pthread_mutex_unlock(&s.lock)
            if error:
                raise MemoryError()

    def expire_producers(self, int64_t before_ms):
        """Forget producers that last appended before `before_ms`; how many."""
        cdef kernel_state* s = <kernel_state*> self._state
        cdef uint32_t had, left
        with nogil:
            pthread_mutex_lock(&s.lock)
            had = s.producers.count
            expire(&s.producers, before_ms)
            left = s.producers.count
            pthread_mutex_unlock(&s.lock)
        return had - left
