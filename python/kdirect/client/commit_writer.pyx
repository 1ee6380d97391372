# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Commits of offsets, each one WRITE_WITH_IMM into this member's slot at its coordinator.

Owns: the cells in local memory that are sent, the ring into which the coordinator WRITEs its
answers, and which commit has which answer.  What may not enter: when to commit one-sidedly, and
what an answer means for the group (`kdirect.client.direct_commits`).

Memory.  A cell belongs to the transport from the post of its WRITE to the completion, and holds a
commit until that is answered; it is filled again only after both.  An entry of the ring is read
after the completion that announces it; the coordinator has at most as many under way as there are
cells, and one notice, and the ring has room for more.  Both are registered in the channel's domain
and end with it.

One thread at a time, which owns the channel.
"""

from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.layout cimport (
    ACK_BYTES, ACK_ERROR, ACK_FLAG_REVOKED, ACK_FLAGS, ACK_ORDER, ACK_SEQUENCE, IMM_FILE_ID_SHIFT,
    OFFSETS_CELLS, OFFSETS_COUNT, OFFSETS_ENTRY_BYTES, OFFSETS_ENTRY_INDEX,
    OFFSETS_ENTRY_LEADER_EPOCH, OFFSETS_ENTRY_OFFSET, OFFSETS_GENERATION, OFFSETS_GUARD,
    OFFSETS_HEADER_BYTES, OFFSETS_SEQUENCE, OFFSETS_TOKEN)
from kdirect.format.wire cimport kd_get_le16, kd_get_le32, kd_put_le32, kd_put_le64
from kdirect.machine cimport kd_now_ns, kd_pause
from kdirect.rdma.contract cimport (
    WC_RECV_RDMA_WITH_IMM, WC_SUCCESS, CompletionQueue, MemoryRegion, QueuePair, work_completion)

from kdirect.errors import ProtocolError

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

# What `post` answers instead of a number.
NO_INDEX = -1      # the slot is not for one of the partitions
NO_CELL = -2       # as many commits are under way as there are cells, or the slot has ended

cdef enum:
    POLL = 16
    SLICE_MS = 100


cdef class CommitWriter:
    """See the module.  `grant`: the answer to the request for the slot, which named `partitions`
    (-> index) and `ring`, of so many `entries`.  ProtocolError for a grant that cannot be."""

    def __init__(self, channel, grant, dict partitions, int32_t generation, MemoryRegion ring,
                 uint64_t entries, *, int64_t spin_us, monotonic):
        cdef int64_t cell_bytes = OFFSETS_HEADER_BYTES + len(partitions) * OFFSETS_ENTRY_BYTES
        if (grant.cells != OFFSETS_CELLS or grant.cell_bytes != cell_bytes
                or not 0 <= grant.address <= <int64_t> INT64_MAX - OFFSETS_CELLS * cell_bytes
                or not 0 <= grant.rkey < 1 << 32 or not 0 < grant.file_id < 1 << 16):
            raise ProtocolError(
                f"the broker granted {grant.cells} cells of {grant.cell_bytes} bytes at address"
                f" {grant.address} under key {grant.rkey} as file {grant.file_id}",
                hint="broker and client are of different versions")
        self._qp = channel.qp
        self._send_cq = channel.send_cq
        self._recv_cq = channel.recv_cq
        self.cells = channel.local_memory(OFFSETS_CELLS * cell_bytes)
        self.ring = ring
        self._entries = entries
        self._indexes = partitions
        self._address = <uint64_t> <int64_t> grant.address
        self._rkey = <uint32_t> grant.rkey
        self._cell_bytes = <uint32_t> cell_bytes
        self._generation = generation
        self._token = <uint64_t> <int64_t> grant.token
        self.file_id = grant.file_id
        self._spin_ns = spin_us * 1000
        self._monotonic = monotonic

    def post(self, dict offsets not None):
        """Commit `{partition: offset}`, without waiting: the number of the commit, NO_INDEX or
        NO_CELL."""
        cdef uint64_t number = self.posted
        cdef uint32_t at = <uint32_t> (number & (OFFSETS_CELLS - 1)) * self._cell_bytes
        cdef uint8_t* cell = self.cells.data + at
        cdef uint8_t* e = cell + OFFSETS_HEADER_BYTES
        cdef uint32_t length, count = <uint32_t> len(offsets)
        cdef int rc
        if count == 0 or OFFSETS_HEADER_BYTES + count * OFFSETS_ENTRY_BYTES > self._cell_bytes:
            return NO_INDEX
        for tp in offsets:
            if tp not in self._indexes:
                return NO_INDEX
        self.c_drain()
        if (self.ended or number - self._completed >= OFFSETS_CELLS
                or (number >= OFFSETS_CELLS and not self._answered[number & (OFFSETS_CELLS - 1)])):
            return NO_CELL
        for tp, offset in offsets.items():
            kd_put_le64(e + OFFSETS_ENTRY_OFFSET, <uint64_t> <int64_t> offset)
            kd_put_le32(e + OFFSETS_ENTRY_INDEX, <uint32_t> self._indexes[tp])
            kd_put_le32(e + OFFSETS_ENTRY_LEADER_EPOCH, <uint32_t> -1)
            e += OFFSETS_ENTRY_BYTES
        length = <uint32_t> (e - cell)
        kd_put_le32(cell + OFFSETS_SEQUENCE, <uint32_t> number)
        kd_put_le32(cell + OFFSETS_GENERATION, <uint32_t> self._generation)
        kd_put_le32(cell + OFFSETS_COUNT, count)
        kd_put_le64(cell + OFFSETS_TOKEN, self._token)
        kd_put_le32(cell + OFFSETS_GUARD, kd_crc32c(0, cell + 4, length - 4))
        rc = self._qp.c_post_write_imm(
            number, self.cells.address + at, self.cells.lkey, length, self._address + at,
            self._rkey,
            (<uint32_t> self.file_id << IMM_FILE_ID_SHIFT) | <uint32_t> (number & 0xFFFF))
        if rc != 0:
            self.ended = True
            return NO_CELL
        self._answered[number & (OFFSETS_CELLS - 1)] = False
        self.posted += 1
        self.under_way += 1
        return number

    def end(self):
        """Post nothing more, and wait for nothing."""
        self.ended = True

    def is_answered(self, uint64_t number):
        """Is there an answer to this commit?  True too when there will never be one."""
        self.c_drain()
        return self._answered[number & (OFFSETS_CELLS - 1)] or self.ended

    def wait(self, uint64_t number, double timeout_ms):
        """The error code of this commit, 0: it counts.  None: nobody knows, because the slot has
        ended, or there was no answer in time.  One of the last commits, as many as there are
        cells."""
        cdef double until = -1
        cdef bint answered
        cdef int64_t slice_ms
        with nogil:
            answered = self.c_await(number)
        while not answered and not self.ended:
            if until < 0:
                until = self._monotonic() + timeout_ms / 1000
            slice_ms = <int64_t> ((until - self._monotonic()) * 1000)
            if slice_ms <= 0:
                break
            self._recv_cq.wait(min(slice_ms, SLICE_MS), 0)
            self.c_drain()
            answered = self._answered[number & (OFFSETS_CELLS - 1)]
        return self._answers[number & (OFFSETS_CELLS - 1)] if answered else None

    cdef bint c_await(self, uint64_t number) noexcept nogil:
        """Spin until the commit is answered, or for so long; whether it is."""
        cdef int64_t until = 0
        cdef int spins = 0
        while True:
            self.c_drain()
            if self._answered[number & (OFFSETS_CELLS - 1)] or self.ended:
                return self._answered[number & (OFFSETS_CELLS - 1)]
            spins += 1
            if spins & 15 == 0:
                if until == 0:
                    until = kd_now_ns() + self._spin_ns
                elif kd_now_ns() >= until:
                    return False
            kd_pause()

    cdef void c_drain(self) noexcept nogil:
        """Take the completions that there are."""
        cdef work_completion wcs[POLL]
        cdef int i, n
        cdef uint32_t k
        while self._completed < self.posted:
            n = self._send_cq.c_poll(wcs, POLL)
            if n <= 0:
                break
            for i in range(n):
                if wcs[i].status != WC_SUCCESS:
                    self.ended = True
            self._completed += <uint64_t> n
        while True:
            n = self._recv_cq.c_poll(wcs, POLL)
            if n < 0:
                self.ended = True
            if n <= 0:
                return
            for i in range(n):
                if wcs[i].status != WC_SUCCESS:
                    self.ended = True
                    continue
                self._qp.c_post_recv(0, 0, 0, 0)
                if (wcs[i].opcode == WC_RECV_RDMA_WITH_IMM
                        and wcs[i].imm_data >> IMM_FILE_ID_SHIFT == self.file_id):
                    for k in range(wcs[i].imm_data & 0xFFFF):
                        self._take_entry()
            if n < POLL:
                return

    cdef void _take_entry(self) noexcept nogil:
        """The next entry of the ring.  One that is not what should come next says that the two
        sides do not agree any more."""
        cdef const uint8_t* e = self.ring.data + (self._read & (self._entries - 1)) * ACK_BYTES
        cdef uint16_t order
        cdef uint64_t cell
        if self.ended or kd_get_le32(e + ACK_SEQUENCE) != <uint32_t> self._read:
            self.ended = True
            return
        self._read += 1
        if kd_get_le16(e + ACK_FLAGS) & ACK_FLAG_REVOKED:
            self.ended = True
            return
        order = kd_get_le16(e + ACK_ORDER)
        cell = order & (OFFSETS_CELLS - 1)
        if (self._answered[cell] or <uint16_t> (self.posted - 1 - order) >= OFFSETS_CELLS
                or self.posted == 0):
            self.ended = True
            return
        self._answers[cell] = <int16_t> kd_get_le16(e + ACK_ERROR)
        self._answered[cell] = True
        self.under_way -= 1
