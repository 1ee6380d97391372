# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""How far the replicas of a partition are, and the high watermark that follows from it.

Owns: for one leadership, the mark of each replica, the point (segment, position, offset) below
which it has everything, and which of them count.  The high watermark is the least mark of those
that count: the maximal in-sync set, the old one and the proposed (KIP-497; Kip320.tla, "MaximalIsr"
in AsyncIsr.tla).  Who counts, and whether the high watermark stands still, decides
`kdirect.cluster.leading_replica`; this is its arithmetic, which needs no Python for each record.

The disk is one more replica where acknowledgements wait for it (`log.flush.before.ack`): the
partition's flushes say up to where it has everything (`note_on_disk`), and marks wait for it like
for a broker that counts.

Law of the room: marks are read and moved with the kernel's mutex held, so an acknowledgement, a
commit and a roll never see half of each other.  While a replica counts, or the high watermark
stands still, commits leave it where it is (`kernel_state.hold`), and the partition's `AckGate` does
not move it either.

The other side of it is here, too: what a leader WRITEs into a follower's slot, and how a follower
takes it (`follow_slot`).  The image is that of a metadata slot (KafkaDirect §4.4.2) whose file id
is 0, with its guard, so what was torn on the way is not used.  A follower moves its high watermark
only to points of its own log: the batch that begins at that position has that offset.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kdirect.format.layout cimport (
    SLOT_BYTES, SLOT_FLAG_ASSIGNED, SLOT_FLAGS, SLOT_GUARD, SLOT_HIGH_WATERMARK,
    SLOT_LAST_READABLE_POSITION, SLOT_LAST_STABLE_OFFSET, SLOT_LAST_STABLE_POSITION,
    SLOT_LEADER_EPOCH, SLOT_LOG_START_OFFSET, SLOT_SEGMENT_BASE_OFFSET, SLOT_UPDATE_COUNT)
from kdirect.format.wire cimport kd_get64
from kdirect.log.kernel cimport CommitKernel
from kdirect.log.slots cimport is_point, move_marks, move_to_end, update_slots
from kdirect.log.state cimport kernel_state, mark_t
from kdirect.machine cimport pthread_mutex_lock, pthread_mutex_unlock

from kdirect.errors import LogError

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)


cdef class ReplicaMarks:
    """See the module.  Life: one for each leadership; `count`, marks, `close`."""

    def __init__(self, CommitKernel kernel):
        cdef int i
        self.kernel = kernel
        for i in range(MOST_REPLICAS):
            self._replicas[i].broker = -1

    cdef kernel_state* _state_of(self) noexcept nogil:
        return <kernel_state*> self.kernel._state

    # -- who counts --------------------------------------------------------------------------------

    def set_counted(self, brokers, *, bint stands_still=False):
        """The high watermark is the least mark of these brokers, which must not name this one, and
        of the log end; with `stands_still` it does not move at all (below ``min.insync.replicas``,
        or before this leadership's start is confirmed).  A broker that was not heard of yet
        holds it until it is.  Nobody: commits move it.  LogError for more than 64 replicas."""
        cdef kernel_state* s = self._state_of()
        cdef bint counts[MOST_REPLICAS]
        cdef int i
        cdef uint32_t n = 0
        cdef bint moved
        for i in range(MOST_REPLICAS):
            counts[i] = False
        for broker in brokers:
            counts[<int> self.enter(broker)] = True
        with nogil:
            pthread_mutex_lock(&s.lock)
            for i in range(self._count):
                self._replicas[i].counted = counts[i]
                n += counts[i]
            self.stands_still = stands_still
            s.counted = n + stands_still
            s.hold = s.gate_holds or s.counted != 0
            moved = self._move(s)
            pthread_mutex_unlock(&s.lock)
        return moved

    def enter(self, int32_t broker):
        """Keep a mark for this broker, which does not count yet; its entry.  LogError for more than
        64."""
        cdef kernel_state* s = self._state_of()
        cdef int entry
        with nogil:
            pthread_mutex_lock(&s.lock)
            entry = self._enter(broker)
            pthread_mutex_unlock(&s.lock)
        if entry < 0:
            raise LogError(f"a partition has more than {MOST_REPLICAS} replicas",
                           hint="give it fewer")
        return entry

    cdef int _enter(self, int32_t broker) noexcept nogil:
        cdef int i, entry = -1
        for i in range(self._count):
            if self._replicas[i].broker == broker:
                return i
            if self._replicas[i].broker < 0 and entry < 0:
                entry = i
        if entry < 0:
            if self._count == MOST_REPLICAS:
                return -1
            entry = self._count
            self._count += 1
        memset(&self._replicas[entry], 0, sizeof(replica_t))
        self._replicas[entry].broker = broker
        self._replicas[entry].mark.offset = -1
        return entry

    def forget(self, int32_t broker):
        """The broker is no replica any more; it must not count."""
        cdef kernel_state* s = self._state_of()
        cdef int entry
        with nogil:
            pthread_mutex_lock(&s.lock)
            entry = self.c_find(broker)
            if entry >= 0 and not self._replicas[entry].counted:
                self._replicas[entry].broker = -1
            pthread_mutex_unlock(&s.lock)

    def close(self):
        """The leadership is over: marks count no more.  The high watermark stays; whoever leads
        or follows next says by `configure` what moves it."""
        cdef kernel_state* s = self._state_of()
        with nogil:
            pthread_mutex_lock(&s.lock)
            s.counted = 0
            s.hold = s.gate_holds
            self._count = 0
            pthread_mutex_unlock(&s.lock)

    # -- marks -------------------------------------------------------------------------------------

    cdef int c_find(self, int32_t broker) noexcept nogil:
        cdef int i
        for i in range(self._count):
            if self._replicas[i].broker == broker:
                return i
        return -1

    cdef bint c_confirm(self, int entry, const mark_t* mark) noexcept nogil:
        cdef kernel_state* s = self._state_of()
        cdef bint moved = False
        pthread_mutex_lock(&s.lock)
        if 0 <= entry < self._count and mark.offset > self._replicas[entry].mark.offset:
            self._replicas[entry].mark = mark[0]
            if self._replicas[entry].counted:
                moved = self._move(s)
        pthread_mutex_unlock(&s.lock)
        return moved

    def confirm(self, int32_t broker, int64_t offset, uint64_t position,
                int64_t segment_base_offset):
        """A replica has every record below `offset`, which lies at `position` of that segment; one
        that fetches over TCP says so by its Fetch.  Whether the high watermark moved."""
        cdef mark_t mark
        cdef int entry = self.enter(broker)
        cdef bint moved
        mark.base = segment_base_offset
        mark.position = position
        mark.offset = offset
        with nogil:
            moved = self.c_confirm(entry, &mark)
        return moved

    cdef bint _move(self, kernel_state* s) noexcept nogil:
        """The high watermark as the marks say; the mutex is held."""
        cdef const mark_t* least = NULL
        cdef int i
        if self.stands_still:
            return False
        if s.disk_holds:
            least = &s.disk
        for i in range(self._count):
            if self._replicas[i].counted and (
                    least == NULL or self._replicas[i].mark.offset < least.offset):
                least = &self._replicas[i].mark
        if least == NULL:
            if s.gate_holds or s.readable.offset == s.log_end:
                return False
            move_to_end(s)
        elif s.readable.offset < least.offset and is_point(s, least):
            move_marks(s, least)
        else:
            return False
        update_slots(s)
        self.moves += 1
        return True

    def look(self):
        """More is on disk, or the disk counts no longer; whether the high watermark moved."""
        cdef kernel_state* s = self._state_of()
        cdef bint moved = False
        with nogil:
            pthread_mutex_lock(&s.lock)
            if s.counted:
                moved = self._move(s)
            pthread_mutex_unlock(&s.lock)
        return moved

    def ends(self):
        """{broker: offset below which it has everything, -1: not known}."""
        cdef kernel_state* s = self._state_of()
        cdef replica_t copy[MOST_REPLICAS]
        cdef int i, n
        with nogil:
            pthread_mutex_lock(&s.lock)
            n = self._count
            memcpy(copy, self._replicas, sizeof(copy))
            pthread_mutex_unlock(&s.lock)
        return {copy[i].broker: copy[i].mark.offset for i in range(n) if copy[i].broker >= 0}

    @property
    def counted(self):
        """The brokers that count."""
        cdef int i
        return frozenset(self._replicas[i].broker for i in range(self._count)
                         if self._replicas[i].broker >= 0 and self._replicas[i].counted)


def note_on_disk(CommitKernel kernel, int64_t offset, uint64_t position,
                 int64_t segment_base_offset):
    """Every record below `offset`, which lies at `position` of that segment (-1: nobody knows where
    it lies), is on disk.  Going back is for `CommitKernel.truncate`."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    with nogil:
        pthread_mutex_lock(&s.lock)
        if offset >= s.disk.offset:
            s.disk.base = segment_base_offset
            s.disk.position = position
            s.disk.offset = offset
        pthread_mutex_unlock(&s.lock)


cdef void log_end_mark(CommitKernel kernel, mark_t* out) noexcept nogil:
    cdef kernel_state* s = <kernel_state*> kernel._state
    pthread_mutex_lock(&s.lock)
    out.base = s.base
    out.position = s.tail
    out.offset = s.log_end
    pthread_mutex_unlock(&s.lock)


# -- the high watermark on its way to followers ----------------------------------------------------

cdef void high_watermark_slot(CommitKernel kernel, uint32_t count, uint8_t* out) noexcept nogil:
    cdef kernel_state* s = <kernel_state*> kernel._state
    memset(out, 0, SLOT_BYTES)
    (<uint16_t*> (out + SLOT_FLAGS))[0] = SLOT_FLAG_ASSIGNED
    pthread_mutex_lock(&s.lock)
    (<int64_t*> (out + SLOT_SEGMENT_BASE_OFFSET))[0] = s.readable.base
    (<uint64_t*> (out + SLOT_LAST_READABLE_POSITION))[0] = s.readable.position
    (<int64_t*> (out + SLOT_HIGH_WATERMARK))[0] = s.readable.offset
    (<uint64_t*> (out + SLOT_LAST_STABLE_POSITION))[0] = s.stable.position
    (<int64_t*> (out + SLOT_LAST_STABLE_OFFSET))[0] = s.stable.offset
    (<int32_t*> (out + SLOT_LEADER_EPOCH))[0] = s.leader_epoch
    (<int64_t*> (out + SLOT_LOG_START_OFFSET))[0] = s.log_start
    pthread_mutex_unlock(&s.lock)
    (<uint32_t*> (out + SLOT_UPDATE_COUNT))[0] = count
    (<uint32_t*> (out + SLOT_GUARD))[0] = kd_crc32c(0, out + SLOT_FLAGS, SLOT_BYTES - SLOT_FLAGS)


cdef bint _begins_batch(const kernel_state* s, const mark_t* mark) noexcept nogil:
    """Does the mark lie where the log ends, or where a batch with its offset begins?  In a sealed
    segment, whose bytes are not at hand: only at its start or its end."""
    cdef uint32_t i
    if not is_point(s, mark):
        return False
    if mark.position == 0:
        return mark.offset == mark.base
    if mark.base == s.base:
        if mark.position == s.tail:
            return mark.offset == s.log_end
        return (s.data != NULL and mark.position + 8 <= s.tail
                and <int64_t> kd_get64(s.data + mark.position) == mark.offset)
    for i in range(s.sealed_count):
        if s.sealed[i].base == mark.base:
            return mark.position == s.sealed[i].size and mark.offset == s.sealed[i].end_offset
    return False


cdef bint follow_slot(CommitKernel kernel, const uint8_t* slot, uint32_t* seen,
                      int64_t* told) noexcept nogil:
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef uint8_t image[SLOT_BYTES]
    cdef mark_t mark
    cdef bint moved = False
    memcpy(image, slot, SLOT_BYTES)
    if (<uint32_t*> (image + SLOT_GUARD))[0] != kd_crc32c(
            0, image + SLOT_FLAGS, SLOT_BYTES - SLOT_FLAGS):
        return False
    seen[0] = (<uint32_t*> (image + SLOT_UPDATE_COUNT))[0]
    mark.base = (<int64_t*> (image + SLOT_SEGMENT_BASE_OFFSET))[0]
    mark.position = (<uint64_t*> (image + SLOT_LAST_READABLE_POSITION))[0]
    mark.offset = (<int64_t*> (image + SLOT_HIGH_WATERMARK))[0]
    told[0] = mark.offset
    if s.readable.offset >= mark.offset:
        return False
    pthread_mutex_lock(&s.lock)
    if s.hold and s.readable.offset < mark.offset:
        if mark.offset >= s.log_end:
            # The leader's readers see more than is here: all of this.
            moved = s.readable.offset < s.log_end
            if moved:
                move_to_end(s)
        elif _begins_batch(s, &mark):
            move_marks(s, &mark)
            moved = True
        if moved:
            update_slots(s)
    pthread_mutex_unlock(&s.lock)
    return moved
