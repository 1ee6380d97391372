# cython: language_level=3, boundscheck=False, wraparound=False
"""The data side of the shm provider's engine: work requests and completions, without the GIL.

Law of the room: plain structs and nogil functions.  No Python object is touched and the GIL is
never taken (a caller may hold it).  A value from shared memory is read once, and checked before it
is used.  A peer that writes impossible values is cut: its queue pair goes to ERROR, and the other
queue pairs are not affected.

The *executor* of a work request is the thread that runs it.  When nothing is deferred, it is the
posting thread; otherwise it is any thread that polls the send CQ or waits on either CQ.  (A thread
that waits for an answer need not look at the send CQ.)  The ring of work requests says which:
[polled, done) have run and wait to be polled; [done, posted) are deferred, because the receiver was
not ready, and belong to the thread that has set `progressing`.  The posting thread runs a request
only when done == posted, and publishes `done` before `posted`.  So the role passes with those two
stores, and the posting thread needs no lock.

A poller enters a CQ by setting a flag; a thread that changes the CQ's attachments (shm_core) waits
until the poller has left.  A light fence on one side pairs with a heavy fence on the other in three
places: executor and revocation (shm_core), poller and changer, and a completion and the thread that
goes to sleep for it.  A poller inside a CQ never waits for a thread that waits for it.

Local memory of a request belongs to the transport until its completion is polled.  (In fact READ,
WRITE, atomics and SEND no longer use it when the post returns, unless they were deferred.  Receives
use it until their completion.)
"""

from libc.errno cimport EAGAIN, EBADF, ECHILD, EINTR, EINVAL, ENOMEM, ENOTCONN, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from kdirect.rdma.contract cimport (
    LOCAL_WRITE, QPS_ERROR, QPS_INIT, QPS_RTS, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE,
    WC_COMP_SWAP, WC_FETCH_ADD, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_RDMA_READ, WC_RDMA_WRITE,
    WC_RECV, WC_RECV_RDMA_WITH_IMM, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_RETRY_EXC_ERR,
    WC_RNR_RETRY_EXC_ERR, WC_SEND, WC_SUCCESS, WC_WR_FLUSH_ERR, work_completion)
from kdirect.rdma.shm_core cimport *
from kdirect.rdma.shm_execute cimport *

cdef extern from "shm_ring.h" nogil:
    enum:
        POLLIN
    struct pollfd:
        int fd
        short events
        short revents
    struct timespec:
        long tv_sec
        long tv_nsec
    int ppoll(pollfd*, unsigned long, const timespec*, const void*)

cdef enum:
    QUOTA = 16              # completions one attachment may give before the next one's turn

cdef int64_t RNR_TICK_NS = 1000000

cdef uint32_t[6] WC_OPCODES     # by kind
WC_OPCODES[:] = [WC_RDMA_READ, WC_RDMA_WRITE, WC_RDMA_WRITE, WC_SEND, WC_FETCH_ADD, WC_COMP_SWAP]


# -- execution of work requests --------------------------------------------------------------------
cdef int execute_send(kd_qp* qp, kd_wr* wr) noexcept nogil:
    cdef uint64_t head, start, ring = qp.out_ring
    cdef int status = credit(qp)
    if status != 0:
        return status
    if wr.length and not local_ok(qp, wr.lkey, wr.local, wr.length, 0):
        return WC_LOC_PROT_ERR
    if wr.length > kd_load32(&qp.out_lengths[qp.sent & qp.out_mask]):
        # The target's completion reports the same error.
        publish(qp, WC_RECV, wr.length, 0, qp.byte_tail)
        return WC_REM_INV_REQ_ERR
    start = qp.byte_tail
    if wr.length:
        head = kd_load64(&qp.out.byte_head)
        # The peer moved its head backwards, or past what was sent.
        if head - qp.byte_head > qp.byte_tail - qp.byte_head:
            cut(qp, CUT_CREDITS)
            return WC_RETRY_EXC_ERR
        qp.byte_head = head
        if head < qp.byte_floor:
            head = qp.byte_floor                # bytes that were skipped hold nothing
        if head == qp.byte_tail:
            # An empty ring starts again at its first byte, where its pages are warm.
            head = start = kd_round_up(start, ring)
        elif (start & (ring - 1)) + wr.length > ring:
            start = kd_round_up(start, ring)
        if start + wr.length - head > ring:
            return RUN_FULL
        if head == start:
            qp.byte_floor = start
        memcpy(qp.out_payload + (start & (ring - 1)), <void*><uintptr_t> wr.local, wr.length)
        qp.byte_tail = start + wr.length
    publish(qp, WC_RECV, wr.length, 0, start)
    qp.sends += 1
    return WC_SUCCESS


cdef inline int execute(kd_qp* qp, kd_wr* wr, const kd_inline* piece) noexcept nogil:
    """Run one request, between `enter` and `leave`.  `piece`: the part of a WRITE whose bytes come
    from another place than the local buffer, or NULL.  Returns a WC_* status, or a RUN_* code if it
    has done nothing yet."""
    cdef uint8_t* at
    cdef uint64_t old
    cdef int status = WC_SUCCESS
    if wr.kind == KIND_READ:
        if wr.length:
            if not local_ok(qp, wr.lkey, wr.local, wr.length, LOCAL_WRITE):
                return WC_LOC_PROT_ERR
            at = remote_at(qp, wr.rkey, wr.remote, wr.length, REMOTE_READ, &status)
            if at == NULL:
                return status
            memcpy(<void*><uintptr_t> wr.local, at, wr.length)
        qp.reads += 1
        qp.read_bytes += wr.length
        return WC_SUCCESS
    if wr.kind <= KIND_WRITE_IMM:
        if wr.kind == KIND_WRITE_IMM:
            status = credit(qp)
            if status != 0:
                return status
        if wr.length:
            if not local_ok(qp, wr.lkey, wr.local, wr.length, 0):
                return WC_LOC_PROT_ERR
            at = remote_at(qp, wr.rkey, wr.remote, wr.length, REMOTE_WRITE, &status)
            if at == NULL:
                return status
            if piece == NULL:
                kd_land(at, <uint8_t*><uintptr_t> wr.local, wr.length)
            else:
                land_around(at, <uint8_t*><uintptr_t> wr.local, wr.length, piece)
        if wr.kind == KIND_WRITE_IMM:
            publish(qp, WC_RECV_RDMA_WITH_IMM, wr.length, <uint32_t> wr.arg0, 0)
        qp.writes += 1
        qp.write_bytes += wr.length
        return WC_SUCCESS
    if wr.kind == KIND_SEND:
        return execute_send(qp, wr)
    if not local_ok(qp, wr.lkey, wr.local, 8, LOCAL_WRITE):
        return WC_LOC_PROT_ERR
    at = remote_at(qp, wr.rkey, wr.remote, 8, REMOTE_ATOMIC, &status)
    if at == NULL:
        return status
    if <uintptr_t> at & 7:
        return WC_REM_ACCESS_ERR
    if wr.kind == KIND_FETCH_ADD:
        old = kd_fetch_add(<uint64_t*> at, wr.arg0)
    else:
        old = kd_compare_swap(<uint64_t*> at, wr.arg0, wr.arg1)
    memcpy(<void*><uintptr_t> wr.local, &old, 8)
    qp.atomics += 1
    return WC_SUCCESS


cdef int run_again(kd_qp* qp, kd_wr* wr, const kd_inline* piece) noexcept nogil:
    """Run a request again whose key was unknown.  The key's announcement may wait in the control
    socket, where it was put before anybody was told the key, so the socket is read first."""
    cdef int status
    link_drain(qp)
    enter(qp)
    status = execute(qp, wr, piece) if kd_load32(&qp.state) == QPS_RTS else RUN_GONE
    leave(qp)
    return WC_REM_ACCESS_ERR if status == RUN_UNKNOWN_KEY else status


cdef inline int run(kd_qp* qp, kd_wr* wr, const kd_inline* piece) noexcept nogil:
    cdef int status
    enter(qp)
    status = execute(qp, wr, piece) if kd_load32(&qp.state) == QPS_RTS else RUN_GONE
    leave(qp)
    return run_again(qp, wr, piece) if status == RUN_UNKNOWN_KEY else status


cdef inline int not_ready(kd_qp* qp) noexcept nogil:
    return ECHILD if qp.forked else ENOTCONN


cdef int qp_post(kd_qp* qp, kd_wr* wr, const kd_inline* piece) noexcept nogil:
    """Post one send-side request.  `wr` and `piece` (see `execute`) remain the caller's memory.  A
    request with a piece can therefore not be deferred: EAGAIN instead.  Returns 0 or an errno of
    the contract."""
    cdef uint64_t posted = qp.posted
    cdef int status
    if kd_load32(&qp.state) != QPS_RTS:
        return not_ready(qp)
    if posted - kd_load64(&qp.polled) >= qp.max_send_wr:
        return ENOMEM
    if wr.length > KD_MAX_MESSAGE_BYTES or (wr.kind == KIND_SEND and wr.length > qp.max_send_bytes):
        return EINVAL
    if wr.kind >= KIND_FETCH_ADD and wr.remote & 7:
        return EINVAL
    if piece != NULL and (piece.at > wr.length or piece.length > wr.length - piece.at):
        return EINVAL
    if kd_load64(&qp.done) == posted:
        status = run(qp, wr, piece)
        if status == RUN_GONE:
            return not_ready(qp)
        if status >= 0:
            complete(qp, posted, wr.wr_id, wr.length, status, WC_OPCODES[wr.kind])
            kd_store64(&qp.posted, posted + 1)
            if status != WC_SUCCESS:
                qp_set_error(qp)
            signal_local(qp.send_cq)
            return 0
        qp.rnr_deadline = 0
    if piece != NULL:
        return EAGAIN
    # Deferred: any thread that waits on either CQ runs it, in order.  A thread that sleeps there
    # must look repeatedly from now on, so it is woken.
    qp.send_ring[posted & qp.send_mask] = wr[0]
    kd_store64(&qp.posted, posted + 1)
    signal_local(qp.send_cq)
    if qp.recv_cq != qp.send_cq:
        signal_local(qp.recv_cq)
    return 0


cdef int qp_read(kd_qp* qp, uint64_t wr_id, uint64_t local, uint32_t lkey, uint32_t length,
                 uint64_t remote, uint32_t rkey) noexcept nogil:
    """Post a READ.  The common case takes few instructions and stores; all other cases go through
    qp_post."""
    cdef uint64_t posted = qp.posted
    cdef uint8_t* at
    cdef int status = 0
    cdef kd_wr wr
    if (kd_load32(&qp.state) == QPS_RTS and kd_load64(&qp.done) == posted
            and 0 < length <= KD_MAX_MESSAGE_BYTES
            and posted - kd_load64(&qp.polled) < qp.max_send_wr):
        enter(qp)
        if kd_load32(&qp.state) == QPS_RTS and local_ok(qp, lkey, local, length, LOCAL_WRITE):
            at = remote_at(qp, rkey, remote, length, REMOTE_READ, &status)
            if at != NULL:
                memcpy(<void*><uintptr_t> local, at, length)
                qp.reads += 1
                qp.read_bytes += length
                leave(qp)
                complete(qp, posted, wr_id, length, WC_SUCCESS, WC_RDMA_READ)
                kd_store64(&qp.posted, posted + 1)
                signal_local(qp.send_cq)
                return 0
        leave(qp)
    wr.wr_id = wr_id
    wr.local = local
    wr.remote = remote
    wr.arg0 = wr.arg1 = 0
    wr.lkey = lkey
    wr.rkey = rkey
    wr.length = length
    wr.kind = KIND_READ
    return qp_post(qp, &wr, NULL)


cdef int qp_in_place(kd_qp* qp, uint64_t remote, uint64_t length, uint32_t rkey, kd_mapping** hold,
                     uint8_t** base) noexcept nogil:
    """The checks of a READ without its copy.  With `hold`, take a reference to the mapping and say
    where `remote` lies in it; without it, count the READ.  Returns a WC_* status."""
    cdef uint8_t* at = NULL
    cdef kd_remote* r
    cdef int status = WC_SUCCESS
    cdef int tries
    for tries in range(2):
        status = WC_WR_FLUSH_ERR
        enter(qp)
        if kd_load32(&qp.state) == QPS_RTS:
            at = remote_at(qp, rkey, remote, length, REMOTE_READ, &status)
            if at != NULL:
                status = WC_SUCCESS
                # No region is retired between enter and leave, so the mapping still exists.
                if hold != NULL:
                    r = <kd_remote*> kd_load_pointer(&qp.remotes[rkey & KD_KEY_INDEX_MASK])
                    mapping_hold(r.mapping)
                    hold[0] = r.mapping
                    base[0] = at
                else:
                    qp.reads += 1
                    qp.read_bytes += length
        leave(qp)
        if status != RUN_UNKNOWN_KEY:
            return status
        link_drain(qp)
    return WC_REM_ACCESS_ERR


cdef inline bint deferred(kd_qp* qp) noexcept nogil:
    return <int64_t> (kd_load64(&qp.posted) - kd_load64(&qp.done)) > 0


cdef bint progress(kd_qp* qp, bint of_send_cq) noexcept nogil:
    """Run deferred requests as far as possible, unless another thread is doing so.  True while
    requests remain deferred.  With `of_send_cq` the caller polls the send CQ.  Without it the
    caller waits on the receive CQ: it wakes a thread that sleeps on the send CQ, and does nothing
    for a queue pair in ERROR, whose send CQ may be closed."""
    cdef bint left = False
    if kd_exchange32(&qp.progressing, 1):
        return True
    if of_send_cq:
        left = run_deferred(qp)
    elif kd_load32(&qp.state) == QPS_RTS:
        left = run_deferred(qp)
        signal_local(qp.send_cq)
    kd_store32(&qp.progressing, 0)
    return left


cdef bint run_deferred(kd_qp* qp) noexcept nogil:
    """The loop of `progress`, called while `progressing` is set."""
    cdef uint64_t posted, done
    cdef kd_wr* wr
    cdef int status
    cdef int64_t now
    while True:
        posted = kd_load64(&qp.posted)
        # `posted` is loaded before `done`: a request that the posting thread runs in between is not
        # ours, and `done` has passed it.
        done = kd_load64(&qp.done)
        if <int64_t> (posted - done) <= 0:
            return False
        wr = &qp.send_ring[done & qp.send_mask]
        status = WC_WR_FLUSH_ERR if kd_load32(&qp.state) != QPS_RTS else run(qp, wr, NULL)
        if status == RUN_GONE:
            status = WC_WR_FLUSH_ERR
        elif status == RUN_FULL:
            return True
        elif status == RUN_RNR:
            now = kd_now_ns()
            if qp.rnr_deadline == 0:
                qp.rnr_deadline = now + qp.rnr_timeout_ns
            if now < qp.rnr_deadline:
                return True
            status = WC_RNR_RETRY_EXC_ERR
        qp.rnr_deadline = 0
        complete(qp, done, wr.wr_id, wr.length, status, WC_OPCODES[wr.kind])
        if status != WC_SUCCESS and status != WC_WR_FLUSH_ERR:
            qp_set_error(qp)


# -- receiving -------------------------------------------------------------------------------------
cdef int qp_post_recv(kd_qp* qp, uint64_t wr_id, uint64_t local, uint32_t lkey,
                      uint32_t length) noexcept nogil:
    cdef uint64_t posted
    cdef kd_recv* r
    if kd_load32(&qp.state) == QPS_ERROR:
        return not_ready(qp)
    kd_lock(&qp.recv_lock)
    posted = qp.recv_posted
    if posted - kd_load64(&qp.received) >= qp.max_recv_wr:
        kd_unlock(&qp.recv_lock)
        return ENOMEM
    r = &qp.recv_ring[posted & qp.recv_mask]
    r.wr_id = wr_id
    r.local = local
    r.lkey = lkey
    r.length = length
    kd_store64(&qp.recv_posted, posted + 1)
    if qp.into != NULL:
        kd_store32(&qp.in_lengths[posted & qp.in_mask], length)
        kd_store64(&qp.into.posted, posted + 1)
    kd_unlock(&qp.recv_lock)
    light_fence(qp.recv_cq.light)
    if kd_load32(&qp.state) == QPS_ERROR:
        kd_signal(qp.recv_cq.event_fd)      # it will be flushed: wake a sleeper
    return 0


cdef inline int arrived(kd_qp* qp) noexcept nogil:
    """1: there is an entry.  0: there is none.  -1: it is impossible, and the peer was cut."""
    cdef uint64_t n
    cdef uint64_t sequence
    while True:
        n = kd_load64(&qp.received)
        sequence = kd_load64(&qp.in_entries[n & qp.in_mask].sequence)
        if kd_load64(&qp.received) == n:
            # Otherwise another thread has polled in between, and the slot may already hold an entry
            # of a later turn.
            break
    if sequence == n + 1:
        if n >= kd_load64(&qp.recv_posted):
            cut(qp, CUT_FLOOD)
            return -1
        return 1
    if sequence == (0 if n <= qp.in_mask else n - qp.in_mask):
        return 0                # the entry of the turn before
    cut(qp, CUT_SEQUENCE)
    return -1


cdef inline bint deliverable(kd_qp* qp) noexcept nogil:
    """Whether there is an entry that may be delivered.  In ERROR it may be, since what arrived
    before the peer left has completed at the peer.  After a failed receive, a cut or a close it may
    not."""
    return (qp.into != NULL and not qp.recv_failed and not qp.cut and not qp.closed
            and arrived(qp) == 1)


cdef int take_payload(kd_qp* qp, kd_recv* r, uint32_t byte_len, uint64_t position) noexcept nogil:
    """Copy a SEND's payload into the posted receive.  Returns a WC_* status.  A forged position or
    length cuts the peer."""
    cdef uint64_t ring = qp.in_ring
    cdef int status = WC_SUCCESS
    if byte_len > r.length:
        return WC_LOC_LEN_ERR
    if byte_len == 0:
        return WC_SUCCESS
    if byte_len > qp.in_max_bytes:
        cut(qp, CUT_LENGTH)
        return WC_WR_FLUSH_ERR
    if (position != qp.in_head
        and position != kd_round_up(qp.in_head, ring)) or (position & (ring - 1)) + byte_len > ring:
        cut(qp, CUT_POSITION)
        return WC_WR_FLUSH_ERR
    kd_store64(&qp.recv_busy, qp.recv_busy + 1)
    light_fence(qp.light)
    if not local_ok(qp, r.lkey, r.local, byte_len, LOCAL_WRITE):
        status = WC_LOC_PROT_ERR
    elif qp.closed:
        status = WC_WR_FLUSH_ERR
    else:
        memcpy(<void*><uintptr_t> r.local, qp.in_payload + (position & (ring - 1)), byte_len)
    kd_store64(&qp.recv_busy, qp.recv_busy + 1)
    qp.in_head = position + byte_len
    kd_store64(&qp.into.byte_head, qp.in_head)
    return status


cdef int recv_poll(kd_qp* qp, work_completion* out, int n) noexcept nogil:
    cdef int k = 0
    cdef uint32_t state = kd_load32(&qp.state), opcode
    cdef uint64_t posted
    cdef kd_entry* e
    cdef kd_recv* r
    cdef work_completion* wc
    if state != QPS_INIT:
        while k < n and deliverable(qp):
            e = &qp.in_entries[qp.received & qp.in_mask]
            r = &qp.recv_ring[qp.received & qp.recv_mask]
            wc = &out[k]
            opcode = kd_load32(&e.opcode)
            wc.wr_id = r.wr_id
            wc.qp_num = qp.qp_num
            wc.opcode = opcode
            wc.byte_len = kd_load32(&e.byte_len)
            wc.imm_data = kd_load32(&e.imm_data)
            if opcode == WC_RECV_RDMA_WITH_IMM:
                wc.has_imm = 1
                wc.status = WC_SUCCESS
            elif opcode == WC_RECV:
                wc.has_imm = 0
                wc.imm_data = 0
                wc.status = take_payload(qp, r, wc.byte_len, kd_load64(&e.byte_position))
            else:
                cut(qp, CUT_OPCODE)
                break
            if wc.status != WC_SUCCESS:
                wc.byte_len = 0
                qp.recv_failed = 1
                qp_set_error(qp)
            else:
                qp.receives += 1
            k += 1
            kd_store64(&qp.received, qp.received + 1)
            if wc.status != WC_SUCCESS:
                break
    if k < n and kd_load32(&qp.state) == QPS_ERROR and not deliverable(qp):
        posted = kd_load64(&qp.recv_posted)
        if qp.received < posted:
            # From here on `received` counts flushed receives, not entries.
            qp.recv_failed = 1
        while k < n and qp.received < posted:
            r = &qp.recv_ring[qp.received & qp.recv_mask]
            wc = &out[k]
            memset(wc, 0, sizeof(work_completion))
            wc.wr_id = r.wr_id
            wc.qp_num = qp.qp_num
            wc.opcode = WC_RECV
            wc.status = WC_WR_FLUSH_ERR
            k += 1
            kd_store64(&qp.received, qp.received + 1)
    return k


cdef inline bint recv_ready(kd_qp* qp) noexcept nogil:
    if kd_load32(&qp.state) != QPS_INIT and deliverable(qp):
        return True
    return kd_load32(&qp.state) == QPS_ERROR and qp.received < kd_load64(&qp.recv_posted)


# -- completion queues -----------------------------------------------------------------------------
cdef inline void poll_enter(kd_cq* cq) noexcept nogil:
    """Enter the queue as its poller, after waiting for a thread that changes the attachments."""
    while True:
        kd_store32(&cq.polling, 1)
        light_fence(cq.light)
        if not kd_load32(&cq.changing):
            return
        kd_store32(&cq.polling, 0)
        while kd_load32(&cq.changing):
            sched_yield()


cdef int send_poll(kd_qp* qp, work_completion* out, int n) noexcept nogil:
    cdef int k = 0
    cdef uint64_t polled = qp.polled, done
    cdef kd_done* d
    if deferred(qp):
        progress(qp, True)
    done = kd_load64(&qp.done)
    while k < n and polled != done:
        d = &qp.done_ring[polled & qp.send_mask]
        kd_fill_completion(&out[k], d.wr_id, <uint32_t> (d.result >> 32 & 0xffff),
                           <uint32_t> (d.result >> 48),
                           <uint32_t> d.result, 0, qp.qp_num, 0)
        k += 1
        polled += 1
    if k:
        kd_store64(&qp.polled, polled)
    return k


cdef inline bint spent(kd_attachment* a) noexcept nogil:
    """Whether the queue pair is closed and has nothing left for this CQ."""
    if not kd_load32(&a.qp.closed):
        return False
    if a.is_recv:
        return a.qp.received == kd_load64(&a.qp.recv_posted)
    return a.qp.polled == kd_load64(&a.qp.posted)


cdef int cq_poll(kd_cq* cq, work_completion* out, int n) noexcept nogil:
    """At most `n` completions, round robin over the attachments; -ECHILD in a forked child."""
    cdef int k = 0, got, want, visits = 0, i
    cdef bint more = False
    cdef kd_attachment* a
    cdef kd_qp* gone
    if cq.forked:
        return -ECHILD
    poll_enter(cq)
    i = cq.next
    while k < n and cq.count:
        if visits >= cq.count:
            if not more:
                break
            visits = 0
            more = False
        if i >= cq.count:
            i = 0
        a = &cq.attachments[i]
        visits += 1
        if recv_ready(a.qp) if a.is_recv else kd_load64(&a.qp.posted) != a.qp.polled:
            want = n - k if n - k < QUOTA else QUOTA
            got = recv_poll(a.qp, out + k, want) if a.is_recv else send_poll(a.qp, out + k, want)
            k += got
            more |= got == want
        if spent(a):
            gone = a.qp
            cq.count -= 1
            cq.attachments[i] = cq.attachments[cq.count]
            visits -= 1         # and there is one attachment fewer to visit
            qp_unref(gone)
        else:
            i += 1
    cq.next = i
    kd_store32(&cq.polling, 0)
    return k


cdef int cq_poll_guarded(kd_cq* cq, work_completion* out, int n) noexcept nogil:
    """cq_poll for callers from Python, which may be several threads at once.  (cq_wait and cq_arm
    are guarded in themselves.)"""
    cdef int k
    kd_lock(&cq.guard)
    k = cq_poll(cq, out, n)
    kd_unlock(&cq.guard)
    return k


cdef int scan(kd_cq* cq, bint set_sleeping) noexcept nogil:
    """Bits: 1 if there is a completion or an error, 2 if a request is deferred."""
    cdef int i, r = 0
    cdef uint32_t errors
    cdef kd_qp* qp
    kd_lock(&cq.guard)
    poll_enter(cq)
    if set_sleeping:
        for i in range(cq.count):
            qp = cq.attachments[i].qp
            if cq.attachments[i].is_recv and qp.into != NULL and not kd_load32(&qp.into.sleeping):
                kd_store32(&qp.into.sleeping, 1)
        kd_fence()
    for i in range(cq.count):
        qp = cq.attachments[i].qp
        if cq.attachments[i].is_recv:
            if recv_ready(qp):
                r |= 1
                break
            if deferred(qp) and progress(qp, False):
                r |= 2
        else:
            if deferred(qp) and progress(qp, True):
                r |= 2
            if qp.polled != kd_load64(&qp.done):
                r |= 1
                break
    errors = kd_load32(&cq.errors)
    if errors != cq.errors_seen:
        cq.errors_seen = errors
        r |= 1
    kd_store32(&cq.polling, 0)
    kd_unlock(&cq.guard)
    return r


cdef bint cq_arm(kd_cq* cq) noexcept nogil:
    kd_drain_signal(cq.event_fd)
    kd_store32(&cq.armed, 1)
    kd_heavy_fence(cq.light, False)
    return scan(cq, True) != 0      # a deferred request needs polls, so it counts as ready


cdef int cq_wait(kd_cq* cq, int64_t deadline, int64_t spin_until) noexcept nogil:
    """Wait until the queue is ready: 1 if it is, 0 at the deadline, WAIT_WOKEN, WAIT_INTERRUPTED
    (call again), -ECHILD or -EBADF (the queue is closed).  `deadline` is in ns of the monotonic
    clock; a negative one means none."""
    cdef int r, i
    cdef int64_t now, limit
    cdef pollfd p
    cdef timespec t
    while True:
        if cq.forked:
            return -ECHILD
        if kd_load32(&cq.closed):
            return -EBADF
        if kd_load32(&cq.wake) and kd_exchange32(&cq.wake, 0):
            return WAIT_WOKEN
        r = scan(cq, False)
        if r & 1:
            return 1
        now = kd_now_ns()
        if now < spin_until and (deadline < 0 or now < deadline):
            for i in range(8):
                kd_pause()
            continue
        if 0 <= deadline <= now:
            return 0
        kd_store32(&cq.armed, 1)
        kd_heavy_fence(cq.light, False)
        r = scan(cq, True)
        if r & 1:
            return 1
        if kd_load32(&cq.wake) or kd_load32(&cq.closed):
            continue
        limit = -1 if deadline < 0 else deadline - now
        if r & 2 and (limit < 0 or limit > RNR_TICK_NS):
            limit = RNR_TICK_NS
        p.fd = cq.event_fd
        p.events = POLLIN
        p.revents = 0
        t.tv_sec = limit // 1000000000
        t.tv_nsec = limit % 1000000000
        r = ppoll(&p, 1, NULL if limit < 0 else &t, NULL)
        if r < 0 and errno == EINTR:
            return WAIT_INTERRUPTED
        if r > 0:
            kd_drain_signal(cq.event_fd)
