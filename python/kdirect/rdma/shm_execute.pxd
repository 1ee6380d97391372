"""Steps of a work request: checks, credit, and the entry that the target sees.  See shm_work.pyx.

Law: inline functions only, so that the engine's loops are one piece of machine code.  They keep
shm_work's law: no Python object, and nothing that a peer wrote is used twice or unchecked.
"""
from libc.errno cimport EAGAIN
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kdirect.rdma.contract cimport (
    QPS_RTS, REMOTE_WRITE, WC_RDMA_WRITE, WC_RECV_RDMA_WITH_IMM, WC_REM_ACCESS_ERR,
    WC_RETRY_EXC_ERR, WC_SUCCESS)
from kdirect.rdma.shm_core cimport *

cdef extern from "landing.h" nogil:
    bint kd_lands_last(const uint8_t* to, uint64_t length)
    void kd_land_last(uint8_t* to, const uint8_t* last)
    void kd_land(uint8_t* to, const uint8_t* from_, uint64_t length)

cdef extern from "summed.h" nogil:
    void kd_land_summed(uint8_t* to, const uint8_t* from_, uint64_t length)

cdef enum:
    RUN_RNR = -1            # no receive posted
    RUN_FULL = -2           # no room for the payload until the peer polls
    RUN_GONE = -3           # not in RTS
    RUN_UNKNOWN_KEY = -4


cdef inline void light_fence(bint light) noexcept nogil:
    if light:
        kd_compiler_fence()
    else:
        kd_fence()


cdef inline void cut(kd_qp* qp, uint32_t why) noexcept nogil:
    """The peer broke a rule: this queue pair ends, and nothing more of it is looked at."""
    kd_cas32(&qp.cut, 0, why)
    qp_set_error(qp)


cdef inline void enter(kd_qp* qp) noexcept nogil:
    kd_store64(&qp.busy, qp.busy + 1)
    kd_store64(&qp.out.busy, qp.busy)
    light_fence(qp.light)


cdef inline void leave(kd_qp* qp) noexcept nogil:
    kd_store64(&qp.busy, qp.busy + 1)
    kd_store64(&qp.out.busy, qp.busy)


cdef inline bint local_ok(kd_qp* qp, uint32_t lkey, uint64_t address, uint64_t length,
                          uint32_t need) noexcept nogil:
    cdef kd_local* l = &qp.locals[lkey & KD_KEY_INDEX_MASK]
    if lkey == 0 or kd_load32(&l.key) != lkey or (l.access & need) != need:
        return False
    return address >= l.address and length <= l.length and address - l.address <= l.length - length


cdef inline uint8_t* remote_at(kd_qp* qp, uint32_t rkey, uint64_t address, uint64_t length,
                               uint32_t need, int* status) noexcept nogil:
    cdef uint32_t index = rkey & KD_KEY_INDEX_MASK
    cdef kd_remote* r = <kd_remote*> kd_load_pointer(&qp.remotes[index])
    if r == NULL or r.rkey != rkey:
        status[0] = RUN_UNKNOWN_KEY
        return NULL
    if (kd_load32(&qp.peer_keys[index]) != rkey or not r.access & need or address < r.address
            or length > r.length or address - r.address > r.length - length):
        status[0] = WC_REM_ACCESS_ERR
        return NULL
    return r.base + (address - r.address)


cdef inline int credit(kd_qp* qp) noexcept nogil:
    """Is a receive posted for the next entry?  0 yes, else RUN_RNR or an error status."""
    cdef uint64_t posted
    if qp.sent < qp.credits:
        return 0
    posted = kd_load64(&qp.out.posted)
    if posted - qp.sent > qp.out_mask + 1:      # also when it went backwards
        cut(qp, CUT_CREDITS)
        return WC_RETRY_EXC_ERR
    qp.credits = posted
    return 0 if posted != qp.sent else RUN_RNR


cdef inline void publish(kd_qp* qp, uint32_t opcode, uint32_t byte_len, uint32_t imm,
                         uint64_t position) noexcept nogil:
    """Make the next entry visible, and wake the target if it sleeps (flag and entry: see
    shm_ring.h)."""
    cdef kd_entry* e = &qp.out_entries[qp.sent & qp.out_mask]
    e.byte_position = position
    e.opcode = opcode
    e.byte_len = byte_len
    e.imm_data = imm
    qp.sent += 1
    kd_exchange64(&e.sequence, qp.sent)
    if kd_load32(&qp.out.sleeping) and kd_exchange32(&qp.out.sleeping, 0):
        qp.wakeups += 1
        kd_signal(qp.peer_event_fd)


cdef inline void land_around(uint8_t* to, const uint8_t* local, uint32_t length,
                             const kd_inline* piece) noexcept nogil:
    """The copy of a WRITE with a piece from elsewhere.  Where its last 8 bytes are aligned they
    land last, wherever they come from."""
    cdef uint32_t end = length, after = piece.at + piece.length, i
    cdef uint8_t last[8]
    if kd_lands_last(to, length):
        end -= 8
        for i in range(8):
            last[i] = (piece.data[end + i - piece.at] if piece.at <= end + i < after
                       else local[end + i])
    memcpy(to, local, min(piece.at, end))
    if piece.at < end:
        kd_copy_past_caches(to + piece.at, piece.data, min(after, end) - piece.at)
    if after < end:
        memcpy(to + after, local + after, end - after)
    if end < length:
        kd_land_last(to + end, last)


cdef inline void complete(kd_qp* qp, uint64_t at, uint64_t wr_id, uint32_t length, uint64_t status,
                          uint64_t opcode) noexcept nogil:
    cdef kd_done* d = &qp.done_ring[at & qp.send_mask]
    d.wr_id = wr_id
    d.result = (length if status == WC_SUCCESS else 0) | status << 32 | opcode << 48
    kd_store64(&qp.done, at + 1)


cdef inline void signal_local(kd_cq* cq) noexcept nogil:
    """Wake a thread that sleeps on the queue; called after a completion was stored."""
    light_fence(cq.light)
    if kd_load32(&cq.armed) and kd_exchange32(&cq.armed, 0):
        kd_signal(cq.event_fd)


cdef inline int write_summed(kd_qp* qp, uint64_t wr_id, uint64_t local, uint32_t lkey,
                             uint32_t length, uint64_t remote, uint32_t rkey, bint notify,
                             uint32_t imm) noexcept nogil:
    """Run a WRITE that sums its bytes (`QueuePair.c_post_write_summed`), where that needs nothing
    but the copy.  EAGAIN: something is in its way, nothing was done, and `qp_post` will say what.
    """
    cdef uint64_t posted = qp.posted
    cdef uint8_t* at
    cdef int status = 0
    cdef bint ran = False
    if (kd_load32(&qp.state) != QPS_RTS or kd_load64(&qp.done) != posted
            or not 8 <= length <= KD_MAX_MESSAGE_BYTES
            or posted - kd_load64(&qp.polled) >= qp.max_send_wr):
        return EAGAIN
    enter(qp)
    if (kd_load32(&qp.state) == QPS_RTS and local_ok(qp, lkey, local, length, 0)
            and not (notify and credit(qp))):
        at = remote_at(qp, rkey, remote, length, REMOTE_WRITE, &status)
        if at != NULL and kd_lands_last(at, length):
            kd_land_summed(at, <uint8_t*><uintptr_t> local, length)
            if notify:
                publish(qp, WC_RECV_RDMA_WITH_IMM, length, imm, 0)
            qp.writes += 1
            qp.write_bytes += length
            ran = True
    leave(qp)
    if not ran:
        return EAGAIN
    complete(qp, posted, wr_id, length, WC_SUCCESS, WC_RDMA_WRITE)
    kd_store64(&qp.posted, posted + 1)
    signal_local(qp.send_cq)
    return 0
