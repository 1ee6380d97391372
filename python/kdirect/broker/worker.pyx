# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The RDMA produce worker: completions in, commits and acknowledgements out (KafkaDirect §4.2.2).

Owns: the thread that polls the broker's completion queues, and the tables that map a file id to its
grant and a grant to its head.  One completion is one produce request, either a WRITE_WITH_IMM,
whose immediate data names the grant and the request's order and whose length is the number of bytes
the producer has written where its order says, or a SEND of a notice that says all three after a
plain WRITE (`rdma.notify=send`).  What has arrived is put in order (`kdirect.broker.order`),
committed in runs, one lock of the kernel and one update of the slots for all that wait, and
answered into the producers' acknowledgement rings with WRITE_WITH_IMM.  The broker's own requests
(of plain Kafka producers, on a shared head) take their turn like any other: see
`submit_broker_request`.

What may not enter: files, sockets, Kafka's protocol, policy.  Who gets a grant, and what follows
when a head ends, is decided in `kdirect.broker.head_life`; how bytes become records in
`kdirect.log.kernel`.

A request that the kernel refuses for what it says (sequence, timestamp, size), or as a repetition,
is answered and passed over: those after it move up to the tail.  On a shared head a damaged
request ends the head, because then nobody knows whether it has the length of its reservation; on an
exclusive one it is answered like the others.

Threads.  `run` is the body of the one worker thread; it holds the GIL only while it sleeps, flushes
or reports.  Every other method may be called from any thread; `_lock` guards the tables and the
heads and is held by the worker while it works off one batch of completions, so a grant or head that
`remove` or `close_head` has returned from is not in use.  Nobody waits for it with the GIL held:
its holder may need the GIL (a transport written in Python, or just to go on behind ``with nogil``).

Acknowledgements wait until the high watermark has passed their records, where commits do not move
it.  Marks move it (`kdirect.log.replica_marks`), and the acknowledgements go out without Python; or
the partition's gate does (`kdirect.log.ack_gate`), and the owner of the head is asked, by `sync`,
to see to that.  It is also asked to flush (`ProduceHead.waits_for_disk`), where the disk holds them
up.  The thread does not wait: other heads go on.  A producer that asked for acks=1 (`leader_only`)
does not wait for replicas, but for the disk, where `log.flush.before.ack` says so.

Memory.  A grant's acknowledgements are staged in memory of the broker (`staging`, registered in the
client's protection domain, as many entries as the client's ring).  Entry i belongs to the transport
from the post of the WRITE that carries it until that WRITE's completion on the send queue; it is
reused only afterwards.  The client's ring is the client's; the broker only writes it.  The bytes of
the broker's own requests are kept by their head until their turn has come.  Entry i of a peer's
notices (registered in its protection domain) belongs to the transport while receive i is posted;
between its completion and its next post the worker has copied it.

Idle cost: after `spin_us` without a completion the thread sleeps on the receive completion queue,
or until the next hole times out.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from kdirect.broker.commit_cells cimport CommitSlot
from kdirect.broker.offset_tables cimport OffsetTables
from kdirect.broker.order cimport (
    ARRIVED, HEAD_ABORTED, HEAD_AHEAD, HEAD_OPEN, NEWS, NEWS_TO_TELL, NO_NEWS, WHY_DAMAGED,
    WHY_FENCED, WHY_NO_ROOM, arrived_t, head_t, order_abort, order_arrived, order_done, order_look,
    order_next, order_open, order_takes)
from kdirect.broker.produce_tables cimport (
    BATCH, CUT_ACK_OVERRUN, CUT_BAD_LENGTH, CUT_BAD_ORDER, CUT_DESYNCHRONISED, CUT_DISCONNECTED,
    CUT_FORGED_FILE, CUT_NONE, CUT_NOT_A_PRODUCE, CUT_NOT_AN_ANSWER, GRANT_ACTIVE, GRANT_RETIRED,
    ProduceHead, grant_t, peer_t, pthread_mutex_lock, pthread_mutex_unlock)
from kdirect.broker.push_tables cimport PushTables
from kdirect.format.layout cimport (
    ACK_FLAG_DUPLICATE, ACK_FLAG_REVOKED, IMM_FILE_ID_SHIFT, IMM_ORDER_MASK, NOTICE_BYTES,
    NOTICE_FILE_ID, NOTICE_LENGTH, NOTICE_ORDER)
from kdirect.log.kernel cimport (
    COMMIT_CORRUPT_MESSAGE, COMMIT_DUPLICATE_SEQUENCE, COMMIT_FENCED_LEADER_EPOCH, COMMIT_NO_HEAD,
    COMMIT_INVALID_TXN_STATE, COMMIT_NO_SPACE, COMMIT_UNVERIFIED_TRANSACTION,
    COMMIT_WRONG_POSITION, CommitKernel, commit_result)
from kdirect.log.replica_marks cimport disk_holds
from kdirect.machine cimport kd_now_ns, kd_wall_ns
from kdirect.rdma.contract cimport (
    WC_LOC_LEN_ERR, WC_RECV, WC_RECV_RDMA_WITH_IMM, WC_SUCCESS, CompletionQueue, QueuePair,
    work_completion)
from kdirect.spin cimport kd_spin

import logging
from kdirect.broker.reasons import Reason
from kdirect.errors import AccessDeniedError

log = logging.getLogger("kdirect.broker.rdma")

cdef extern from *:
    """
    #include <stdint.h>
    static inline int kd_flag_take(uint8_t* p) {
        return __atomic_exchange_n(p, 0, __ATOMIC_SEQ_CST);
    }
    static inline int kd_flag(uint8_t* p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    """
    int kd_flag_take(uint8_t* p) nogil
    int kd_flag(uint8_t* p) nogil

cdef enum:
    # Acknowledge within a batch after so much work: the producer refills while the rest is checked.
    ACK_AFTER_BYTES = 65536


class CutReason(Reason):
    """Why a peer was cut."""

    DISCONNECTED = CUT_DISCONNECTED, "disconnected"
    FORGED_FILE = CUT_FORGED_FILE, "it wrote under a file id that it was not granted"
    BAD_ORDER = CUT_BAD_ORDER, "it sent a request out of order"
    NOT_A_PRODUCE = CUT_NOT_A_PRODUCE, "it sent a message that is no produce request"
    ACK_OVERRUN = (
        CUT_ACK_OVERRUN, "it has more requests under way than its acknowledgement ring holds")
    BAD_LENGTH = (
        CUT_BAD_LENGTH, "it announced a request of no bytes, or of more than its file has")
    DESYNCHRONISED = CUT_DESYNCHRONISED, "it acknowledged records that it never got"
    NOT_AN_ANSWER = CUT_NOT_AN_ANSWER, "it sent a message that is no acknowledgement"


cdef class ProduceWorker(OffsetTables):
    """See the module.  Life: construct, `run` in a thread of its own, `stop`, join the thread.

    `on_head(head)` (it was drained or aborted, was granted ahead and is written to, or is a
    replica's and waits for a leader epoch to be noted), `on_push(ring)` (its state has changed, or
    it wants a file), `on_moved(Pushing or ProduceHead)` (its high watermark has moved, and somebody
    watches it), `on_broker_requests(head, answers)`, `on_offsets(slot, deferred commits)` (of a
    `CommitSlot`), `on_cut(qp_num, reason)` (a `CutReason`) and `on_append(head)` are called on the
    worker's thread with the GIL and no lock held; they must not block.  So is `sync(head)`:
    acknowledgements of its records wait for the gate; once that may have opened,
    `gate_moved(head)` is called, or `gate_failed(head)`.
    """

    cdef CompletionQueue _recv_cq
    cdef int64_t _spin_ns
    cdef volatile bint _stopping
    cdef object on_cut
    cdef object on_append
    cdef object on_head
    cdef object on_broker_requests
    cdef object sync
    cdef public object on_push, on_moved, on_offsets
    cdef bint _reap                # queue pairs were closed
    cdef int64_t _earliest_ns      # first deadline of a hole; 0: none
    cdef int64_t _fixed_ns         # a simulator's clock; -1: the machine's
    cdef uint64_t _completions, _commits, _commit_bytes, _errors, _sleeps, _polls, _aborts
    cdef uint64_t _broker_requests

    def __init__(self, CompletionQueue recv_cq, CompletionQueue send_cq, *, spin_us=50, on_cut,
                 on_append, on_head, on_broker_requests, sync, on_push=None, on_moved=None):
        self._recv_cq = recv_cq
        self._send_cq = send_cq
        self._spin_ns = int(spin_us) * 1000
        self._fixed_ns = -1
        self.on_cut = on_cut
        self.on_append = on_append
        self.on_head = on_head
        self.on_broker_requests = on_broker_requests
        self.sync = sync
        self.on_push = on_push
        self.on_moved = on_moved

    # -- heads -------------------------------------------------------------------------------------

    def drain(self, ProduceHead head, end_order=None):
        """Report by `on_head` when everything reserved is committed, or aborted.  `end_order`: the
        first reservation that is not valid; without it the head is drained when somebody else has
        told, and aborted at its tail when nobody does in time."""
        cdef bint known = end_order is not None
        cdef uint16_t end = end_order if known else 0
        cdef uint16_t ahead
        with nogil:
            pthread_mutex_lock(&self._lock)
            head.h.draining = 1
            ahead = <uint16_t> (end - head.h.next_order)
            if known and not head.h.has_end and ahead <= head.h.mask + 1:
                head.h.has_end = 1
                head.h.end_order = end
            self._settle(&head.h, self._now())
            pthread_mutex_unlock(&self._lock)
        self._wake()

    def expire_hole(self, ProduceHead head, int timeout_ms):
        """Somebody who may have left a hole is gone: give up the hole there is now, if there is
        one, in `timeout_ms` at the latest."""
        cdef int64_t at
        with nogil:
            pthread_mutex_lock(&self._lock)
            at = self._now()
            # The hole may be too old already: then the head ends here, and its owner is told.
            self._settle(&head.h, at)
            if head.h.deadline_ns > at + timeout_ms * <int64_t> 1000000:
                head.h.deadline_ns = at + timeout_ms * <int64_t> 1000000
                if self._earliest_ns == 0 or head.h.deadline_ns < self._earliest_ns:
                    self._earliest_ns = head.h.deadline_ns
            pthread_mutex_unlock(&self._lock)
        self._wake()

    def submit_broker_request(self, ProduceHead head, uint16_t order, data, bint checked=False,
                              bint marker=False):
        """The broker's own request, whole batches, whose order and room were reserved: committed
        when its turn comes.  `checked`: `CommitKernel.check` has passed them, and nobody writes
        them since, so their CRCs are not computed again.  `marker`: it is a marker of a
        transaction's coordinator, which no producer may write.  The answers to own requests that
        are known now, this one's or others'; later ones go to `on_broker_requests`.  Raises
        AccessDeniedError when the head has ended."""
        cdef const uint8_t[::1] view = data
        cdef uint32_t length = <uint32_t> view.shape[0]
        cdef int rc = -1
        with nogil:
            pthread_mutex_lock(&self._lock)
        if head.h.state == HEAD_OPEN and length:
            head._broker_requests[order] = data
            rc = order_arrived(&head.h, order, &view[0], length, 0)
        if rc != ARRIVED:
            head._broker_requests.pop(order, None)
            pthread_mutex_unlock(&self._lock)
            raise AccessDeniedError(f"order {order} cannot be taken: the head has ended",
                                    hint="reserve again on the next one")
        head.h.ring[order & head.h.mask].checked = checked
        head.h.ring[order & head.h.mask].marker = marker
        self._broker_requests += 1
        with nogil:
            self._commit_run(&head.h, self._wall_ms(), self._now())
            self._flush_acks()
        answers = self._answers_of(head)
        with nogil:
            self._unlock()
        self._wake()
        return answers

    def begin_head(self, ProduceHead head, int64_t segment_base_offset, int32_t leader_epoch):
        """The file that was granted ahead is the kernel's head from now on, at position 0: what has
        arrived is committed.  False when it has ended meanwhile."""
        cdef bint begun
        with nogil:
            pthread_mutex_lock(&self._lock)
            begun = head.h.state == HEAD_AHEAD
            if begun:
                order_open(&head.h, segment_base_offset, leader_epoch)
                head.h.touched = 1
                self._kick = True
            pthread_mutex_unlock(&self._lock)
        self._wake()
        return begun

    # -- one batch of completions ------------------------------------------------------------------

    cdef head_t* _take(self, work_completion* wc) noexcept nogil:
        """Put one completion where its order says; the head that it is for."""
        cdef peer_t* peer = self._find_peer(wc.qp_num)
        cdef grant_t* g
        cdef head_t* h
        cdef uint16_t file_id, order
        cdef uint32_t length
        cdef uint64_t at
        if peer == NULL or peer.cut != CUT_NONE:
            return NULL
        if wc.status != WC_SUCCESS:
            self._cut_peer(
                peer, CUT_NOT_A_PRODUCE if wc.status == WC_LOC_LEN_ERR else CUT_DISCONNECTED)
            return NULL
        if peer.link != NULL:
            self._take_from_link(peer, wc)
            return NULL
        at = peer.notices + wc.wr_id * NOTICE_BYTES
        if wc.opcode == WC_RECV_RDMA_WITH_IMM:
            file_id = <uint16_t> (wc.imm_data >> IMM_FILE_ID_SHIFT)
            order = <uint16_t> (wc.imm_data & IMM_ORDER_MASK)
            length = wc.byte_len
        elif wc.opcode == WC_RECV and wc.byte_len == NOTICE_BYTES and wc.wr_id < peer.receives:
            memcpy(&file_id, <void*><uintptr_t> (at + NOTICE_FILE_ID), sizeof(file_id))
            memcpy(&order, <void*><uintptr_t> (at + NOTICE_ORDER), sizeof(order))
            memcpy(&length, <void*><uintptr_t> (at + NOTICE_LENGTH), sizeof(length))
        else:
            self._cut_peer(peer, CUT_NOT_A_PRODUCE)
            return NULL
        (<QueuePair> peer.qp).c_post_recv(wc.wr_id, at, peer.notices_lkey, NOTICE_BYTES)
        g = self._table[file_id]
        if g == NULL or g.qp_num != wc.qp_num:
            # A request that was under way when its grant was released is harmless; one under
            # another client's file id is not.
            if g != NULL:
                self._cut_peer(peer, CUT_FORGED_FILE)
            return NULL
        if g.slot != NULL:
            self._take_commit(peer, g, <CommitSlot> g.slot, order, length)
            return NULL
        h = g.head
        if g.state != GRANT_ACTIVE or not order_takes(h):
            return NULL
        if length == 0 or length > h.capacity - h.position:
            self._cut_peer(peer, CUT_BAD_LENGTH)
            return NULL
        if g.staged + g.pending - g.completed >= g.entries:
            self._drain_sends()
            if g.staged + g.pending - g.completed >= g.entries:
                self._cut_peer(peer, CUT_ACK_OVERRUN)
                return NULL
        if ((not h.shared and order != <uint16_t> (h.next_order + h.waiting))
                or order_arrived(h, order, NULL, length, file_id) != ARRIVED):
            self._cut_peer(peer, CUT_BAD_ORDER)
            return NULL
        g.pending += 1
        return h

    cdef void _commit_run(self, head_t* h, int64_t now_ms, int64_t now_ns) noexcept nogil:
        """Commit what is in order, in runs: one lock of the kernel and one update of its slots for
        many requests."""
        cdef arrived_t* r
        cdef commit_result result
        cdef uint64_t unanswered = 0
        cdef int error
        cdef bint damaged
        if h.stamped:
            self._commit_stamped(h, now_ms)
            self._settle(h, now_ns)
            return
        r = order_next(h)
        h.touched = 0
        if r != NULL:
            (<CommitKernel> h.kernel).c_begin()
            while r != NULL:
                if r.data != NULL and r.marker:
                    error = (<CommitKernel> h.kernel).c_append_marker_next(
                        h.segment_base_offset, r.data, r.length, now_ms, &result)
                elif r.data != NULL:
                    error = (<CommitKernel> h.kernel).c_append_next(
                        h.segment_base_offset, r.data, r.length, now_ms, r.checked, &result)
                else:
                    error = (<CommitKernel> h.kernel).c_commit_next(
                        h.segment_base_offset, h.position, r.length, h.leader_epoch, False, now_ms,
                        &result)
                if (error == COMMIT_NO_SPACE or error == COMMIT_NO_HEAD
                        or error == COMMIT_WRONG_POSITION):
                    order_abort(h, WHY_NO_ROOM)
                    break
                if error == COMMIT_FENCED_LEADER_EPOCH:
                    order_abort(h, WHY_FENCED)
                    break
                damaged = h.shared and r.data == NULL and error == COMMIT_CORRUPT_MESSAGE
                self._answer(h, r, &result, damaged)
                if damaged:
                    order_abort(h, WHY_DAMAGED)
                    break
                unanswered += r.length
                order_done(h, r)
                if unanswered >= ACK_AFTER_BYTES:
                    (<CommitKernel> h.kernel).c_end()
                    if h.pushing != NULL:
                        self._push(h.pushing)
                    self._flush_acks()
                    unanswered = 0
                    (<CommitKernel> h.kernel).c_begin()
                r = order_next(h)
            (<CommitKernel> h.kernel).c_end()
            if h.pushing != NULL:
                self._push(h.pushing)
        if h.pushed_elsewhere != NULL:
            self._want_push(h)
        self._settle(h, now_ns)

    cdef void _settle(self, head_t* h, int64_t now_ns) noexcept nogil:
        """After something has happened to a head: is it at its end, or does it wait for somebody?
        """
        order_look(h, now_ns)
        if h.deadline_ns and (self._earliest_ns == 0 or h.deadline_ns < self._earliest_ns):
            self._earliest_ns = h.deadline_ns
        if h.news == NEWS:
            h.news = NEWS_TO_TELL
            self._note(h)
            if h.state == HEAD_ABORTED:
                self._aborts += 1
                self._revoke_members(h)

    cdef void _answer(self, head_t* h, arrived_t* r, commit_result* result,
                      bint damaged) noexcept nogil:
        cdef grant_t* g
        cdef uint16_t flags = 0
        cdef int64_t end_offset = 0
        cdef bint waits
        if result.error == 0 and not result.duplicate:
            self._commits += 1
            self._commit_bytes += r.length
            # Where commits do not move the high watermark, readers are told when that moves, but
            # followers that fetch now.
            if kd_flag(&h.append_watched) and kd_flag_take(&h.append_watched):
                h.append_news = 1
                self._note(h)
        elif result.error != 0 and result.error != COMMIT_DUPLICATE_SEQUENCE:
            self._errors += 1
        if r.data != NULL:
            self._keep_answer(h, result)
            return
        g = self._table[r.file_id] if r.file_id else NULL
        if g == NULL or g.head != h:
            return
        g.pending -= 1
        waits = (disk_holds(<CommitKernel> h.kernel) if g.leader_only
                 else (<CommitKernel> h.kernel).c_holds())
        if result.duplicate or result.error == COMMIT_DUPLICATE_SEQUENCE:
            flags = ACK_FLAG_DUPLICATE
        if damaged:
            flags |= ACK_FLAG_REVOKED
        elif result.error == COMMIT_DUPLICATE_SEQUENCE:
            # It is in the log, at an offset that is not known: all that there is has to be let out.
            if waits:
                end_offset = (<CommitKernel> h.kernel).c_log_end()
        elif result.error == 0:
            if waits:
                end_offset = result.last_offset + 1
        if result.error == COMMIT_UNVERIFIED_TRANSACTION:  # nobody asks the coordinator from here
            result.error = COMMIT_INVALID_TXN_STATE
        self._stage(g, h.next_order, result.error, flags, result.batches, result.base_offset,
                    result.log_append_time)
        if end_offset:
            self._wait_until(g, end_offset)
        if damaged:
            g.state = GRANT_RETIRED

    def gate_moved(self, ProduceHead head):
        """The gate of this head's partition may let out acknowledgements that wait: write them."""
        cdef grant_t* g
        with nogil:
            pthread_mutex_lock(&self._lock)
        self._end_gate_round(head)
        for file_id in self._grants:
            g = self._table[<uint16_t> file_id]
            if g != NULL and g.head == &head.h and g.dirty:
                self._post_acks(g)
        if head.h.held:     # they waited for marks, which may count no more
            self._release_held()
        pthread_mutex_unlock(&self._lock)
        self._wake()

    def gate_failed(self, ProduceHead head):
        """What waits for the gate will never be acknowledged: the producers' access ends, without
        the acknowledgements that were not written."""
        cdef grant_t* g
        cdef peer_t* peer
        with nogil:
            pthread_mutex_lock(&self._lock)
        self._end_gate_round(head)
        for file_id in self._grants:
            g = self._table[<uint16_t> file_id]
            if g != NULL and g.head == &head.h and g.end_offset:
                g.staged = g.posted
                g.dirty = 0
                g.end_offset = 0
                peer = self._find_peer(g.qp_num)
                if peer != NULL:
                    self._cut_peer(peer, CUT_DISCONNECTED)
        pthread_mutex_unlock(&self._lock)
        self._recv_cq.wake()

    cdef _end_gate_round(self, ProduceHead head):
        """The owner has answered `sync`; the lock is held."""
        head.h.gate_asked = head.h.disk_asked = head.h.gate_untold = 0
        if head.h.news == NEWS_TO_TELL:
            self._note(&head.h)

    cdef _report(self):
        cdef peer_t* peer
        cdef list cut = [], appended = [], heads = [], answered = [], gated = [], moved = []
        cdef ProduceHead head
        with nogil:
            pthread_mutex_lock(&self._lock)
        if self._cut_count:
            for qp_num in self._peers:
                peer = self._find_peer(qp_num)
                if peer != NULL and peer.untold:
                    peer.untold = 0
                    cut.append((qp_num, CutReason(peer.cut)))
                    if peer.link != NULL:
                        self._break_link(peer)
            self._cut_count = 0
        for head in self._take_noted():
            if head.h.append_news:
                head.h.append_news = 0
                appended.append((head,))
            answers = self._answers_of(head) if self._broker_answer_count else []
            if answers:
                answered.append((head, answers))
            if head.h.gate_untold:
                head.h.gate_untold = 0
                gated.append((head,))
            # A head ends for its producers once they have their acknowledgements.
            if head.h.news == NEWS_TO_TELL and not (
                    head.h.gate_asked or head.h.disk_asked or head.h.held):
                head.h.news = NO_NEWS
                heads.append((head,))
            if head.h.watched == 2:
                head.h.watched = 0
                moved.append((head,))
        slots = self._news_of_slots()
        rings = self._news_of_pushing(moved)
        pthread_mutex_unlock(&self._lock)
        if self._neighbour_news:
            self._neighbour_news = False
            for other in self._neighbours:
                (<PushTables> other)._wake_for_news()
        for callback, items in ((self.on_append, appended), (self.on_broker_requests, answered),
                                (self.sync, gated), (self.on_moved, moved), (self.on_push, rings),
                                (self.on_head, heads), (self.on_offsets, slots),
                                (self.on_cut, cut)):
            for item in items:
                try:
                    callback(*item)
                except Exception:
                    log.exception("callback of the produce worker failed")

    cdef int c_step(self) noexcept nogil:
        """Work off one batch of completions, if there are any: commit, acknowledge.  How many, or
        below 0 when the queue overran."""
        cdef work_completion wcs[BATCH]
        cdef head_t* heads[BATCH]
        cdef head_t* h
        cdef int64_t now_ms, now_ns
        cdef int i, n, count = 0
        n = self._recv_cq.c_poll(wcs, BATCH)
        if n <= 0 and not self._kick:
            return n
        now_ms = self._wall_ms()
        now_ns = self._now()
        pthread_mutex_lock(&self._lock)
        if n > 0:
            self._polls += 1
            self._completions += n
        for i in range(n):
            h = self._take(&wcs[i])
            if h != NULL and not h.touched:
                h.touched = 1
                heads[count] = h
                count += 1
        for i in range(count):
            self._commit_run(heads[i], now_ms, now_ns)
        if self._kick:
            self._kick = False
            for i in range(self._open_count):
                if self._open[i].touched:
                    self._commit_run(self._open[i], now_ms, now_ns)
        if self._link_count:
            self._after_answers()
        self._flush_acks()
        self._drain_sends()
        if self._backlog:
            self._flush_backlog()
        self._unlock()
        return n if n > 0 else 1

    cdef void c_tend_heads(self) noexcept nogil:
        """Give up holes that are too old."""
        cdef int64_t now_ns = self._now()
        cdef int i
        if self._earliest_ns == 0 or now_ns < self._earliest_ns:
            return
        pthread_mutex_lock(&self._lock)
        self._earliest_ns = 0
        for i in range(self._open_count):
            if self._open[i].deadline_ns:
                self._settle(self._open[i], now_ns)
        pthread_mutex_unlock(&self._lock)

    # -- time and news -----------------------------------------------------------------------------

    cdef int64_t _now(self) noexcept nogil:
        return self._fixed_ns if self._fixed_ns >= 0 else kd_now_ns()

    cdef int64_t _wall_ms(self) noexcept nogil:
        return kd_wall_ns() // 1000000

    cdef _wake(self):
        """The worker has something to look at besides completions."""
        if self._kick or self._earliest_ns or self._has_news():
            self._recv_cq.wake()

    def _wake_for_news(self):
        self._recv_cq.wake()

    cdef void c_tend_sends(self) noexcept nogil:
        """Take completions of acknowledgements, and post those that waited for room."""
        if self._outstanding or self._backlog or self._reap or self._link_count:
            pthread_mutex_lock(&self._lock)
            if self._reap:
                self._reap = False
                self._reap_sends()
            self._drain_sends()
            if self._link_count:
                self._after_answers()
            if self._backlog:
                self._flush_backlog()
            self._unlock()

    cdef bint _has_news(self) noexcept nogil:
        return (self._cut_count > 0 or self._noted != NULL or self._noted_pushings != NULL
                or self._noted_slots != NULL or self._neighbour_news)

    def set_time(self, int64_t now_ns):
        """From now on this time counts instead of the machine's clock (a simulator's)."""
        self._fixed_ns = now_ns

    def step(self):
        """One batch without waiting, for a caller that has its own loop (a simulator).  The number
        of completions."""
        cdef int n
        with nogil:
            n = self.c_step()
            self.c_tend_sends()
            self.c_tend_heads()
            if self._followed:
                self.c_tend_pushing()
            if n == 0:
                self._note_idle_slots()
        while self._has_news():     # a callback may make more
            self._report()
        return n

    @property
    def next_deadline_ns(self):
        """When `step` is wanted at the latest because of a hole; 0: not."""
        return self._earliest_ns

    def run(self):
        """The worker thread's body; returns after `stop`."""
        cdef int n = 0
        cdef int64_t now, spin_until
        cdef int sleep_ms
        while not self._stopping:
            spin_until = 0
            with nogil:
                while not self._stopping:
                    n = self.c_step()
                    if self._earliest_ns:
                        self.c_tend_heads()
                    if n > 0:
                        spin_until = 0
                    elif n < 0:
                        break
                    else:
                        now = kd_now_ns()
                        if spin_until == 0:
                            spin_until = now if self._crowded() else now + self._spin_ns
                        elif now >= spin_until:
                            break
                        kd_spin(now + self._spin_ns - spin_until)
                    if self._has_news():
                        break
            if self._has_news():
                self._report()
                continue
            if n < 0:
                log.error("the produce worker's completion queue overran; it goes on with the next"
                          " completion")
            if self._stopping:
                break
            with nogil:     # the lock is held by who then waits for the GIL
                n = self._note_idle_slots()
            if n:
                continue
            self._sleeps += 1
            # Completions of acknowledgements must be taken, too: look in now and then.
            sleep_ms = 10 if self._outstanding or self._backlog else -1
            if self._link_count or self._followed:
                with nogil:
                    n = self.c_tend_pushing()
                sleep_ms = n if sleep_ms < 0 or 0 < n < sleep_ms else sleep_ms
            if self._earliest_ns:
                now = max(1, (self._earliest_ns - kd_now_ns()) // 1000000 + 1)
                sleep_ms = <int> now if sleep_ms < 0 or now < sleep_ms else sleep_ms
            if self._kick or self._has_news():
                continue
            self._recv_cq.wait(sleep_ms, 0)
            with nogil:
                self.c_tend_sends()

    def reap(self):
        """Queue pairs were closed: poll the queues, for that is what lets go of them.  Nothing
        completes any more on the queue of sends of a broker whose clients only read, and each queue
        pair that it knows keeps descriptors and mappings."""
        self._reap = True
        self._recv_cq.wake()

    def stop(self):
        """Ask `run` to return."""
        self._stopping = True
        self._recv_cq.wake()

    def statistics(self):
        """Counters since the start: work the broker's CPU did for RDMA clients."""
        return {
            "rdma_completions": self._completions,
            "rdma_commits": self._commits,
            "rdma_commit_bytes": self._commit_bytes,
            "rdma_produce_errors": self._errors,
            "rdma_acks": self._acks,
            "rdma_ack_writes": self._ack_writes,
            "rdma_worker_sleeps": self._sleeps,
            "rdma_polls": self._polls,
            "rdma_head_aborts": self._aborts,
            "rdma_own_requests": self._broker_requests,
            "rdma_produce_heads": len(self._heads),
            "rdma_peers": len(self._peers),
            "rdma_produce_grants": len(self._grants) - self._slot_count,
            "rdma_commit_slots": self._slot_count,
            "rdma_offset_commits": self._offset_commits + self._offset_deferred,
            "rdma_offset_commits_deferred": self._offset_deferred,
            "rdma_offset_commit_errors": self._offset_errors,
        }
