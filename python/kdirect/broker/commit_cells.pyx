# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Commit slots: where members of groups WRITE the offsets that they commit, and how these become
records of ``__consumer_offsets`` (the offset commits that KafkaDirect §5.4 leaves to future work).

Owns: the copy, the checks and the append of one commit, without the GIL.  What may not enter: who
is a member and when a slot ends (`kdirect.broker.commit_slots`), completions and acknowledgements
(`kdirect.broker.offset_tables`).

A commit counts, and is acknowledged, once its records are in the log, as a commit over TCP is.
There are two ways into the log:

- *Direct*: the produce worker appends the records in C, and keeps the newest offset of each
  partition here until the loop has *folded* it into its table.  Whoever asks the table has it
  folded first, so nobody reads what is older than an acknowledgement.
- *Deferred*: the loop takes the commit and does with it what it does with one over TCP.  That is
  the way while the loop itself changes the partition, where the head has no room, where records
  have to be on disk or on replicas first, and as long as an earlier commit of the slot is deferred.

Order: what is in the table has to be what the log says, where the last record of a key counts.  So
the loop *pauses* a log before it appends to it, and resumes it when what it has appended is in the
table; a pause has everything folded that came before.  What several slots have committed is folded
in the order of their records.

Memory.  The cells are registered in the member's protection domain and written by the member alone.
Between the completion of a WRITE and its acknowledgement the worker copies the cell, once; it looks
at the copy only, so whatever the member writes meanwhile changes nothing.

Threads: `c_take` is called by the worker, with its lock held; the Python methods by the event loop.
`OffsetLog._lock` is taken after the worker's, and before the kernel's mutex; it is held for one
append.
"""

from libc.stdint cimport (
    INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t)
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from kdirect.format.batch cimport encode_single
from kdirect.format.layout cimport (
    BATCH_HEADER_BYTES, OFFSETS_CELLS, OFFSETS_COUNT, OFFSETS_ENTRY_BYTES, OFFSETS_ENTRY_INDEX,
    OFFSETS_ENTRY_LEADER_EPOCH, OFFSETS_ENTRY_OFFSET, OFFSETS_GENERATION, OFFSETS_GUARD,
    OFFSETS_HEADER_BYTES, OFFSETS_SEQUENCE, OFFSETS_TOKEN)
from kdirect.format.encode cimport RECORD_FRAME_BYTES
from kdirect.format.wire cimport (
    kd_get_le32, kd_get_le64, kd_put16, kd_put32, kd_put64)
from kdirect.log.kernel cimport CommitKernel, commit_result
from kdirect.log.replica_marks cimport disk_holds
from kdirect.machine cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock)
from kdirect.rdma.contract cimport Memory

from kdirect.format.error_codes import ErrorCode

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef enum:
    # The value of an offset's record without metadata, version 3: see format/group_records.py.
    VALUE_BYTES = 24
    VALUE_VERSION = 3
    # Kafka's error codes.
    CORRUPT_MESSAGE = 2
    ILLEGAL_GENERATION = 22
    UNKNOWN_MEMBER_ID = 25
    INVALID_REQUEST = 42

if (CORRUPT_MESSAGE, ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, INVALID_REQUEST) != (
        ErrorCode.CORRUPT_MESSAGE, ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.INVALID_REQUEST):
    raise AssertionError("commit_cells: an error code is not Kafka's")


cdef class OffsetLog:
    """One partition of ``__consumer_offsets``, as commits are folded into it.  `direct`: the worker
    may append."""

    def __cinit__(self, CommitKernel kernel not None, *, bint direct):
        pthread_mutex_init(&self._lock, NULL)
        self.kernel = kernel
        self._direct = direct
        self.slots = []

    def __dealloc__(self):
        pthread_mutex_destroy(&self._lock)

    def pause(self):
        """The loop is about to change the partition: commits are deferred until `resume`, which is
        called as often.  What was appended before is to be folded now."""
        with nogil:
            pthread_mutex_lock(&self._lock)
            self._paused += 1
            pthread_mutex_unlock(&self._lock)

    def resume(self):
        with nogil:
            pthread_mutex_lock(&self._lock)
            self._paused -= 1
            pthread_mutex_unlock(&self._lock)

    def add(self, CommitSlot slot not None):
        with nogil:
            pthread_mutex_lock(&self._lock)
        self.slots.append(slot)
        pthread_mutex_unlock(&self._lock)

    def remove(self, CommitSlot slot not None):
        """The worker does not know the slot any more, and what it has appended is folded."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        self.slots.remove(slot)
        pthread_mutex_unlock(&self._lock)

    def fold(self):
        """What is in the log and was not folded yet, as [(offset in the log, slot, index, offset,
        leader epoch, time in ms)] in the order of the log; of each partition of a slot the newest.
        """
        cdef CommitSlot slot
        cdef folded_t* f
        cdef uint32_t i
        cdef list found = []
        if self.unfolded == 0:
            return found
        with nogil:
            pthread_mutex_lock(&self._lock)
        for slot in self.slots:
            if not slot._dirty:
                continue
            slot._dirty = False
            for i in range(slot.partitions):
                f = &slot._latest[i]
                if f.at >= 0:
                    found.append((f.at, slot, i, f.offset, f.leader_epoch, f.time_ms))
                    f.at = -1
        self.unfolded = 0
        pthread_mutex_unlock(&self._lock)
        found.sort(key=_place)
        return found


def _place(folded):
    return folded[0]


cdef class CommitSlot:
    """One member's slot.  `memory` holds its cells, `keys` the key of each partition's record;
    `generation` and `token` are what a commit has to carry; `owner` is the caller's.

    Life: constructed, `OffsetLog.add`, installed at a worker, removed there, `OffsetLog.remove`.
    """

    def __cinit__(self, OffsetLog log not None, Memory memory not None, list keys not None,
                  int32_t generation, uint64_t token):
        cdef uint32_t i
        cdef size_t longest = 0
        self.log = log
        self.memory = memory
        self.partitions = <uint32_t> len(keys)
        self.cell_bytes = OFFSETS_HEADER_BYTES + self.partitions * OFFSETS_ENTRY_BYTES
        if self.partitions == 0 or memory.length < <uint64_t> OFFSETS_CELLS * self.cell_bytes:
            raise ValueError("a commit slot holds its cells, and at least one partition")
        self.generation = generation
        self.token = token
        self._keys = b"".join(keys)
        self._key_data = <const uint8_t*> self._keys
        self._key_ends = <uint32_t*> malloc((self.partitions + 1) * sizeof(uint32_t))
        self._latest = <folded_t*> malloc(self.partitions * sizeof(folded_t))
        self._copies = <uint8_t*> malloc(<size_t> OFFSETS_CELLS * self.cell_bytes)
        if self._key_ends == NULL or self._latest == NULL or self._copies == NULL:
            raise MemoryError()
        self._key_ends[0] = 0
        for i in range(self.partitions):
            self._key_ends[i + 1] = self._key_ends[i] + <uint32_t> len(keys[i])
            self._latest[i].at = -1
            longest = max(longest, <size_t> len(keys[i]))
        self._batches_bytes = self.partitions * (
            BATCH_HEADER_BYTES + RECORD_FRAME_BYTES + longest + VALUE_BYTES)
        self._batches = <uint8_t*> malloc(self._batches_bytes)
        if self._batches == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self._key_ends)
        free(self._latest)
        free(self._copies)
        free(self._batches)

    cdef bint c_fits(self, uint32_t length) noexcept nogil:
        """May a commit have this length?"""
        return (OFFSETS_HEADER_BYTES < length <= self.cell_bytes
                and (length - OFFSETS_HEADER_BYTES) % OFFSETS_ENTRY_BYTES == 0)

    cdef int c_take(self, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil:
        """The next commit has arrived, `length` bytes that `c_fits`: 0 and in the log, DEFERRED, or
        the error code it is refused with."""
        cdef uint32_t sequence = self.next_sequence
        cdef size_t at = <size_t> (sequence & (OFFSETS_CELLS - 1)) * self.cell_bytes
        cdef uint8_t* cell = self._copies + at
        cdef int error
        memcpy(cell, self.memory.data + at, length)
        self.next_sequence += 1
        # The cell says how long it is, and is believed only if the WRITE was as long.
        if kd_get_le32(cell + OFFSETS_COUNT) != (
                (length - OFFSETS_HEADER_BYTES) // OFFSETS_ENTRY_BYTES):
            error = CORRUPT_MESSAGE
        else:
            error = self._check(cell, sequence)
        self._refused[sequence & (OFFSETS_CELLS - 1)] = error
        if self.deferred:                # its turn is after theirs
            error = DEFERRED
        elif error == 0:
            pthread_mutex_lock(&self.log._lock)
            if (self.log._paused or not self.log._direct or self.log.kernel.c_holds()
                    or disk_holds(self.log.kernel)):
                error = DEFERRED
            else:
                error = self._append(cell, now_ms, out)
            pthread_mutex_unlock(&self.log._lock)
        if error == DEFERRED:
            self.deferred += 1
        return error

    cdef int _check(self, const uint8_t* cell, uint32_t sequence) noexcept nogil:
        """What is wrong with a commit, whose count says how long it is; 0: nothing."""
        cdef uint32_t count = kd_get_le32(cell + OFFSETS_COUNT)
        cdef size_t length = OFFSETS_HEADER_BYTES + <size_t> count * OFFSETS_ENTRY_BYTES
        cdef const uint8_t* e = cell + OFFSETS_HEADER_BYTES
        cdef uint32_t i
        if (kd_get_le32(cell + OFFSETS_GUARD) != kd_crc32c(0, cell + 4, length - 4)
                or kd_get_le32(cell + OFFSETS_SEQUENCE) != sequence):
            return CORRUPT_MESSAGE
        if kd_get_le64(cell + OFFSETS_TOKEN) != self.token:
            return UNKNOWN_MEMBER_ID
        if <int32_t> kd_get_le32(cell + OFFSETS_GENERATION) != self.generation:
            return ILLEGAL_GENERATION
        for i in range(count):
            if (kd_get_le32(e + OFFSETS_ENTRY_INDEX) >= self.partitions
                    or kd_get_le64(e + OFFSETS_ENTRY_OFFSET) > <uint64_t> INT64_MAX
                    or <int32_t> kd_get_le32(e + OFFSETS_ENTRY_LEADER_EPOCH) < -1):
                return INVALID_REQUEST
            e += OFFSETS_ENTRY_BYTES
        return 0

    cdef int _append(self, const uint8_t* cell, int64_t now_ms, commit_result* out) noexcept nogil:
        """Append the records of a commit that was checked: 0, or DEFERRED and nothing has changed.
        The log's lock is held."""
        cdef uint32_t count = kd_get_le32(cell + OFFSETS_COUNT)
        cdef const uint8_t* e = cell + OFFSETS_HEADER_BYTES
        cdef uint8_t value[VALUE_BYTES]
        cdef size_t used = 0
        cdef int64_t size
        cdef uint32_t i, index
        cdef folded_t* f
        kd_put16(value, VALUE_VERSION)
        kd_put16(value + 14, 0)          # no metadata
        kd_put64(value + 16, <uint64_t> now_ms)
        for i in range(count):
            index = kd_get_le32(e + OFFSETS_ENTRY_INDEX)
            kd_put64(value + 2, kd_get_le64(e + OFFSETS_ENTRY_OFFSET))
            kd_put32(value + 10, kd_get_le32(e + OFFSETS_ENTRY_LEADER_EPOCH))
            size = encode_single(
                self._batches + used, self._batches_bytes - used,
                self._key_data + self._key_ends[index],
                self._key_ends[index + 1] - self._key_ends[index], value, VALUE_BYTES, now_ms, -1,
                -1, -1)
            if size < 0:
                return DEFERRED
            used += <size_t> size
            e += OFFSETS_ENTRY_BYTES
        # Whatever is in the way, room or a limit, the loop knows what to do or to say.
        if self.log.kernel.c_append(self._batches, <uint32_t> used, now_ms, False, out) != 0:
            return DEFERRED
        e = cell + OFFSETS_HEADER_BYTES
        for i in range(count):
            f = &self._latest[kd_get_le32(e + OFFSETS_ENTRY_INDEX)]
            f.at = out.base_offset + i
            f.offset = <int64_t> kd_get_le64(e + OFFSETS_ENTRY_OFFSET)
            f.leader_epoch = <int32_t> kd_get_le32(e + OFFSETS_ENTRY_LEADER_EPOCH)
            f.time_ms = now_ms
            e += OFFSETS_ENTRY_BYTES
        self._dirty = True
        self.log.unfolded += 1
        return 0


cdef list deferred_commits(CommitSlot slot):
    """The commits that are to be handed to the loop, as [(order, error code, [(index, offset,
    leader epoch)])], in their order.  The worker's lock is held."""
    cdef uint32_t sequence = slot.next_sequence - slot.deferred
    cdef uint32_t count, i
    cdef const uint8_t* cell
    cdef const uint8_t* e
    cdef int error
    cdef list out = [], entries
    if <int32_t> (slot.told - sequence) > 0:
        sequence = slot.told
    while sequence != slot.next_sequence:
        cell = slot._copies + <size_t> (sequence & (OFFSETS_CELLS - 1)) * slot.cell_bytes
        error = slot._refused[sequence & (OFFSETS_CELLS - 1)]
        entries = []
        if error == 0:
            count = kd_get_le32(cell + OFFSETS_COUNT)
            e = cell + OFFSETS_HEADER_BYTES
            for i in range(count):
                entries.append((kd_get_le32(e + OFFSETS_ENTRY_INDEX),
                                <int64_t> kd_get_le64(e + OFFSETS_ENTRY_OFFSET),
                                <int32_t> kd_get_le32(e + OFFSETS_ENTRY_LEADER_EPOCH)))
                e += OFFSETS_ENTRY_BYTES
        out.append((<uint16_t> sequence, error, entries))
        sequence += 1
    slot.told = sequence
    return out
