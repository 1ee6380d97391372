# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The metadata slots of a consumer's files, by READ (KafkaDirect §4.4.2).

Owns: the consumer's copy of its slot region, and which slot's news count.  What may not enter:
requests to the broker, policy, threads.  A slot is used only after its guard and its bounds were
checked.

There is no lock.  A slot table belongs to one consumer, reader or session, and is used by its
thread, or with its lock held (`kdirect.wire.channel` says which).
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset
from posix.unistd cimport usleep

from kdirect.client.read_work cimport c_read, check_location, now_ns, raise_read
from kdirect.format.layout cimport (
    SLOT_BYTES, SLOT_FILE_ID, SLOT_FLAG_ASSIGNED, SLOT_FLAG_READABLE, SLOT_FLAG_REVOKED,
    SLOT_FLAG_SEALED, SLOT_FLAGS,
    SLOT_GUARD, SLOT_HIGH_WATERMARK, SLOT_LAST_READABLE_POSITION, SLOT_LAST_STABLE_OFFSET,
    SLOT_LAST_STABLE_POSITION, SLOT_LEADER_EPOCH, SLOT_LOG_START_OFFSET, SLOT_SEGMENT_BASE_OFFSET,
    SLOT_UPDATE_COUNT,
)
from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair

from kdirect.errors import ProtocolError

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef enum:
    # An update takes about 20 ns, but its thread may lose the processor halfway.  After so many
    # READs of a torn slot the reader sleeps between two of them.
    TORN_SPINS = 1000
    TORN_SLEEP_US = 50
    SLOT_TORN = -3


cdef inline uint64_t _u64(const uint8_t* p) noexcept nogil:
    cdef uint64_t v
    memcpy(&v, p, 8)
    return v


cdef inline uint32_t _u32(const uint8_t* p) noexcept nogil:
    cdef uint32_t v
    memcpy(&v, p, 4)
    return v


cdef inline uint16_t _u16(const uint8_t* p) noexcept nogil:
    cdef uint16_t v
    memcpy(&v, p, 2)
    return v


cdef class SlotTable:
    """The consumer's copy of its slot region; `refresh` brings all active slots with one READ.

    `remote_address`, `rkey` and `slot_count` come from the broker's grant.  `region` is local
    memory of at least `slot_count` slots.

    The life of a slot: the broker fills it, then answers with the grant that names it.  It clears
    the slot when the grant ends, and may give the same index to the next grant of this client, of
    any partition.  The local copy of all slots is of one moment, so it may be older than a grant:
    then the bytes at the granted index are those of a former file, or zeros, or were never checked.

    Invariant: a slot's news count only when they come from a READ that was posted after the grant
    was answered, and in which every active slot's guard matched.  `activate` notes how many READs
    had been posted when the slot was granted (`c_is_news` compares).  A READ that fails or is torn
    leaves no copy to take from (`_copy` is 0).  No READ is under way while the broker is asked,
    because `refresh` waits for its own.  What the slot holds then is of this grant, for the broker
    filled it before it answered, and gives its index to nobody else before this client has released
    it.
    """

    def __init__(self, QueuePair qp, CompletionQueue cq, MemoryRegion region,
                 int64_t remote_address, int64_t rkey, int slot_count, *,
                 int torn_timeout_ms=10000):
        if slot_count < 1 or region.length < <uint64_t> slot_count * SLOT_BYTES:
            raise ProtocolError(f"the broker announced {slot_count} metadata slots",
                                hint="broker and client are of different versions")
        check_location("metadata slots", remote_address, rkey, <int64_t> slot_count * SLOT_BYTES)
        self._qp = qp
        self._cq = cq
        self._region = region
        self._remote_address = <uint64_t> remote_address
        self._rkey = <uint32_t> rkey
        self.slot_count = slot_count
        self._torn_timeout_ns = torn_timeout_ms * <int64_t> 1000000
        self._active = bytearray(slot_count)
        self._active_p = <uint8_t*> self._active
        self._since = bytearray(8 * slot_count)
        self._since_p = <uint64_t*> <uint8_t*> self._since
        # Where the initiator does the READ itself, letting other threads run meanwhile would take
        # longer than the READ.
        view = qp.view(remote_address, <uint64_t> slot_count * SLOT_BYTES, rkey)
        self._at_once = view is not None
        if view is not None:
            view.close()

    def activate(self, int index):
        """Slot `index` was granted, just now: include it in refreshes, and forget what an earlier
        one brought of it."""
        self.c_check(index)
        self._active[index] = 1
        self._since_p[index] = self._posted
        if self._reported is not None:  # no slot has these bytes, so `changed` will report it
            memset(self._reported_p + index * SLOT_BYTES, 0xFF, SLOT_BYTES)
        self._end = max(self._end, index + 1)

    def deactivate(self, int index):
        """Slot `index` was released."""
        self.c_check(index)
        self._active[index] = 0
        while self._end > 0 and not self._active[self._end - 1]:
            self._end -= 1

    cdef int c_check(self, int index) except -1:
        """ProtocolError for an index that is not of this table: nothing after this checks it
        again."""
        if not 0 <= index < self.slot_count:
            raise ProtocolError(f"the broker granted slot {index} of {self.slot_count}",
                                hint="broker and client are of different versions")
        return 0

    cdef int c_look(self, uint32_t* status) noexcept nogil:
        """One READ of the active slots: 0, SLOT_TORN, or what `c_read` returns."""
        cdef int i, rc
        cdef const uint8_t* p
        self._copy = 0
        self._posted += 1
        rc = c_read(self._qp, self._cq, self._region.address, self._region.lkey,
                    <uint32_t> (self._end * SLOT_BYTES), self._remote_address, self._rkey, status)
        if rc != 0:
            return rc
        self.reads += 1
        self.read_bytes += self._end * SLOT_BYTES
        for i in range(self._end):
            if self._active_p[i]:
                p = self._region.data + i * SLOT_BYTES
                if _u32(p + SLOT_GUARD) != kd_crc32c(0, p + 4, SLOT_BYTES - 4):
                    self.torn += 1
                    return SLOT_TORN
        self._copy = self._posted
        return 0

    cdef bint c_is_news(self, int index, uint64_t seen) noexcept nogil:
        """Is the copy whole, posted after slot `index` was granted, and younger than READ number
        `seen`?"""
        return self._copy > seen and self._copy > self._since_p[index]

    cdef int c_refresh(self, uint32_t* status) noexcept nogil:
        cdef int rc
        cdef int tries = 0
        cdef int64_t deadline = 0
        if self._end == 0:
            return 0
        while True:
            rc = self.c_look(status)
            if rc != SLOT_TORN:
                return rc
            tries += 1
            if tries > TORN_SPINS:
                if deadline == 0:
                    deadline = now_ns() + self._torn_timeout_ns
                elif now_ns() > deadline:
                    return SLOT_TORN
                usleep(TORN_SLEEP_US)

    cpdef refresh(self):
        """READ every active slot; torn ones are READ again.  Raises QueuePairError when access has
        ended."""
        cdef uint32_t status = 0
        cdef int rc = SLOT_TORN
        if self._at_once:
            rc = self.c_look(&status) if self._end else 0
        if rc == SLOT_TORN:
            with nogil:
                rc = self.c_refresh(&status)
        if rc == SLOT_TORN:
            raise ProtocolError(
                f"a metadata slot's guard did not match for {self._torn_timeout_ns // 1000000} ms",
                hint="the broker was stopped in the middle of an update, or is of another version")
        if rc != 0:
            raise_read(rc, status, "READ of metadata slots")

    def changed(self, *, bint fresh):
        """Indexes of the active slots whose bytes are not those that the last call saw; a slot is
        among them once after `activate`.  READs the slots first with `fresh`, or if the last call
        has seen the copy that there is."""
        cdef int i
        cdef list out = []
        if self._end == 0:
            return out
        if self._reported is None:
            self._reported = bytearray(b"\xff" * (self.slot_count * SLOT_BYTES))
            self._reported_p = <uint8_t*> self._reported
        if fresh or self._copy <= self._scanned:
            self.refresh()
        self._scanned = self._copy
        for i in range(self._end):
            if self._active_p[i] and self.c_is_news(i, 0) \
                    and memcmp(self._reported_p + i * SLOT_BYTES,
                               self._region.data + i * SLOT_BYTES, SLOT_BYTES):
                memcpy(self._reported_p + i * SLOT_BYTES, self._region.data + i * SLOT_BYTES,
                       SLOT_BYTES)
                out.append(i)
        return out

    def poll(self, int64_t times=1):
        """`refresh` that many times without returning to Python in between, to measure how long an
        empty poll takes."""
        cdef uint32_t status = 0
        cdef int rc = 0
        cdef int64_t i
        with nogil:
            for i in range(times):
                rc = self.c_refresh(&status)
                if rc != 0:
                    break
        if rc != 0:
            raise_read(rc, status, "READ of metadata slots")

    cdef void c_get(self, int index, slot_t* out) noexcept nogil:
        cdef const uint8_t* p = self._region.data + index * SLOT_BYTES
        out.flags = _u16(p + SLOT_FLAGS)
        out.file_id = _u16(p + SLOT_FILE_ID)
        out.segment_base_offset = <int64_t> _u64(p + SLOT_SEGMENT_BASE_OFFSET)
        out.last_readable_position = <int64_t> _u64(p + SLOT_LAST_READABLE_POSITION)
        out.high_watermark = <int64_t> _u64(p + SLOT_HIGH_WATERMARK)
        out.last_stable_position = <int64_t> _u64(p + SLOT_LAST_STABLE_POSITION)
        out.last_stable_offset = <int64_t> _u64(p + SLOT_LAST_STABLE_OFFSET)
        out.leader_epoch = <int32_t> _u32(p + SLOT_LEADER_EPOCH)
        out.update_count = _u32(p + SLOT_UPDATE_COUNT)
        out.log_start_offset = <int64_t> _u64(p + SLOT_LOG_START_OFFSET)

    def get(self, int index):
        """Slot `index` as a dict, as of the last refresh."""
        cdef slot_t s
        if not 0 <= index < self.slot_count:
            raise IndexError(index)
        self.c_get(index, &s)
        return {
            "assigned": bool(s.flags & SLOT_FLAG_ASSIGNED),
            "sealed": bool(s.flags & SLOT_FLAG_SEALED),
            "readable": bool(s.flags & SLOT_FLAG_READABLE),
            "revoked": bool(s.flags & SLOT_FLAG_REVOKED),
            "file_id": s.file_id,
            "segment_base_offset": s.segment_base_offset,
            "last_readable_position": s.last_readable_position,
            "high_watermark": s.high_watermark,
            "last_stable_position": s.last_stable_position,
            "last_stable_offset": s.last_stable_offset,
            "leader_epoch": s.leader_epoch,
            "update_count": s.update_count,
            "log_start_offset": s.log_start_offset,
        }
