# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Who produces over RDMA: peers, heads, grants and their acknowledgement rings.

Owns: the tables of the produce worker (`kdirect.broker.worker`): a file id leads to a grant, a
grant to its queue pair and its head.  Acknowledgements are staged in a grant's ring and posted from
there.  What may not enter: commits, order, policy.  The worker is their only subclass: it works on
the tables' fields under the tables' lock for each completion, with no call in between.

Threads and memory: see the worker.  C methods are called with `_lock` held.
"""

from cpython.ref cimport PyObject
from libc.errno cimport ENOMEM
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from kdirect.broker.order cimport (
    HEAD_AHEAD, HEAD_CLOSED, NEWS_TO_TELL, head_t, order_forget, order_resize, order_takes)
from kdirect.format.layout cimport (
    ACK_BASE_OFFSET, ACK_BATCHES, ACK_BYTES, ACK_ERROR, ACK_FILE_ID, ACK_FLAG_RECALLED,
    ACK_FLAG_REVOKED, ACK_FLAGS, ACK_LOG_APPEND_TIME, ACK_ORDER, ACK_SEQUENCE, IMM_FILE_ID_SHIFT,
    NOTICE_BYTES)
from kdirect.format.wire cimport kd_put_le16, kd_put_le32, kd_put_le64
from kdirect.log.kernel cimport CommitKernel, commit_result
from kdirect.log.replica_marks cimport acknowledged_by_disk, marks_count
from kdirect.rdma.contract cimport (
    WC_SUCCESS, CompletionQueue, MemoryRegion, QueuePair, work_completion)

from typing import NamedTuple

from kdirect.broker.order import MAX_ENTRIES, AbortReason
from kdirect.errors import AccessDeniedError

cdef extern from *:
    """
    #include <stdint.h>
    static inline void kd_flag_set(uint8_t* p) { __atomic_store_n(p, 1, __ATOMIC_SEQ_CST); }
    """
    void kd_flag_set(uint8_t* p) nogil

cdef uint32_t HASH = 2654435761U   # Knuth's multiplicative hash


class BrokerAnswer(NamedTuple):
    """What became of one of the broker's own requests; fields as of CommitResult."""

    order: int
    error: int
    duplicate: bool
    base_offset: int
    log_append_time: int


cdef class ProduceHead:
    """One head file that producers write, exclusively or shared.  Made by
    `ProduceWorker.open_head`, ended by `close_head`; `owner` is the caller's."""

    def __dealloc__(self):
        free(self.h.ring)

    @property
    def state(self):
        return self.h.state

    @property
    def why(self):
        """Why it was aborted, as an `AbortReason`; NONE, which is false, when it was not."""
        return AbortReason(self.h.why)

    @property
    def next_order(self):
        """Order of the request to commit next."""
        return self.h.next_order

    @property
    def end_order(self):
        """Order of the first reservation that is not valid any more; None: not known."""
        return self.h.end_order if self.h.has_end else None

    @property
    def position(self):
        """Where the bytes of that request begin."""
        return self.h.position

    @property
    def waits_for_disk(self):
        """Was its owner asked to put on disk what there is?"""
        return bool(self.h.disk_asked)

    @property
    def waiting(self):
        """Requests that have arrived and wait for one before them."""
        return self.h.waiting


cdef class ProduceTables:
    """See the module."""

    def __cinit__(self):
        pthread_mutex_init(&self._lock, NULL)
        self._table = <grant_t**> calloc(FILES, sizeof(void*))
        if self._table == NULL:
            raise MemoryError()
        self._grants = {}
        self._peers = {}
        self._heads = set()
        self._pushings = {}
        self._pushed_elsewhere = {}

    def __dealloc__(self):
        cdef int i
        if self._table != NULL:
            for i in range(FILES):
                if self._table[i] != NULL:
                    free(self._table[i].ends)
                    free(self._table[i])
            free(self._table)
        free(self._open)
        free(self._broker_answers)
        free(self._held)
        pthread_mutex_destroy(&self._lock)

    # -- tables ------------------------------------------------------------------------------------

    cdef peer_t* _find_peer(self, uint32_t qp_num) noexcept nogil:
        cdef uint32_t i = (qp_num * HASH) & (PEERS - 1)
        cdef int n
        for n in range(PEERS):
            if not self._peer_table[i].used:
                return NULL
            if self._peer_table[i].qp_num == qp_num and self._peer_table[i].qp != NULL:
                return &self._peer_table[i]
            i = (i + 1) & (PEERS - 1)
        return NULL

    def add_peer(self, QueuePair qp, int receives, MemoryRegion notices):
        """Take completions of `qp` and keep `receives` receives posted on it, each with an entry of
        `notices` for producers that SEND one."""
        cdef int n
        if notices.length < <uint64_t> receives * NOTICE_BYTES:
            raise ValueError("the memory for notices is smaller than its receives")
        self._check_room()
        for n in range(receives):
            qp.post_recv(n, notices, n * NOTICE_BYTES, NOTICE_BYTES)
        self._enter_peer(qp, receives, notices, None)

    def _check_room(self):
        if len(self._peers) >= PEERS // 2:
            raise AccessDeniedError(
                f"the broker serves {len(self._peers)} RDMA clients already",
                hint="close idle clients or use transport=tcp")

    cdef _enter_peer(self, QueuePair qp, int receives, MemoryRegion notices, link):
        cdef uint32_t i = (qp.qp_num * HASH) & (PEERS - 1)
        with nogil:
            pthread_mutex_lock(&self._lock)
        if len(self._peers) == 0:
            memset(self._peer_table, 0, sizeof(self._peer_table))
        while self._peer_table[i].used and self._peer_table[i].qp != NULL:
            i = (i + 1) & (PEERS - 1)
        self._peer_table[i].used = 1
        self._peer_table[i].qp_num = qp.qp_num
        self._peer_table[i].cut = CUT_NONE
        self._peer_table[i].untold = 0
        self._peer_table[i].receives = <uint32_t> receives
        self._peer_table[i].notices = notices.address if notices is not None else 0
        self._peer_table[i].notices_lkey = notices.lkey if notices is not None else 0
        self._peer_table[i].link = <PyObject*> link if link is not None else NULL
        self._peer_table[i].qp = <PyObject*> qp
        self._peers[qp.qp_num] = (qp, notices if link is None else link)
        pthread_mutex_unlock(&self._lock)

    def remove_peer(self, uint32_t qp_num):
        """Forget a queue pair; its grants must have been removed.  Afterwards the worker does not
        touch it."""
        cdef peer_t* peer
        with nogil:
            pthread_mutex_lock(&self._lock)
        peer = self._find_peer(qp_num)
        if peer != NULL:
            peer.qp = NULL
            if peer.untold:  # its owner knows already
                peer.untold = 0
                self._cut_count -= 1
        kept = self._peers.pop(qp_num, None)
        pthread_mutex_unlock(&self._lock)
        return kept

    def open_head(self, CommitKernel kernel, int64_t segment_base_offset, uint64_t position,
                  int32_t leader_epoch, *, bint shared, int entries, int64_t hole_timeout_ms,
                  int64_t ahead_bytes=0, bint stamped=False, MemoryRegion told=None):
        """Start to take requests for the head file of `segment_base_offset`, the first of order 0
        at `position`.  At most `entries` will be under way at a time.  With `ahead_bytes`, its
        capacity, it is to be the next head: what arrives waits for `begin_head`.  `stamped`: the
        partition is a replica, and its leader is the producer; `told`: the slot, which the caller
        keeps until the head is forgotten, that it WRITEs its high watermark into."""
        cdef ProduceHead head = ProduceHead.__new__(ProduceHead)
        cdef head_t** grown
        cdef int capacity
        head.kernel = kernel
        head._broker_requests = {}
        head.h.kernel = <PyObject*> kernel
        head.h.self = <PyObject*> head
        head.h.segment_base_offset = segment_base_offset
        head.h.position = position
        head.h.capacity = <uint64_t> ahead_bytes if ahead_bytes else kernel.capacity
        if ahead_bytes:
            head.h.state = HEAD_AHEAD
        head.h.leader_epoch = leader_epoch
        head.h.shared = shared
        head.h.stamped = stamped
        head.h.told = told.data if told is not None else NULL
        pushing = self._pushings.get(kernel)
        head.h.pushing = <PyObject*> pushing if pushing is not None else NULL
        pushing = self._pushed_elsewhere.get(kernel)
        head.h.pushed_elsewhere = <PyObject*> pushing if pushing is not None else NULL
        head.h.hole_timeout_ns = hole_timeout_ms * 1000000
        if order_resize(&head.h, <uint32_t> entries):
            raise MemoryError()
        with nogil:
            pthread_mutex_lock(&self._lock)
        if self._open_count == self._open_capacity:
            capacity = max(16, 2 * self._open_capacity)
            grown = <head_t**> realloc(self._open, capacity * sizeof(void*))
            if grown == NULL:
                pthread_mutex_unlock(&self._lock)
                raise MemoryError()
            self._open = grown
            self._open_capacity = capacity
        self._open[self._open_count] = &head.h
        self._open_count += 1
        self._followed += head.h.told != NULL
        self._heads.add(head)
        head.h.known = 1
        pthread_mutex_unlock(&self._lock)
        return head

    def is_answered(self, uint16_t file_id):
        """Has every acknowledgement of this grant been written, so that the memory of none is the
        transport's any more?"""
        cdef grant_t* g
        cdef bint answered
        with nogil:
            pthread_mutex_lock(&self._lock)
            self._drain_sends()     # another thread may have written the last of them
            g = self._table[file_id]
            answered = (g == NULL or (g.pending == 0 and g.completed == g.staged)
                        or not self._peer_alive(g.qp_num))
            pthread_mutex_unlock(&self._lock)
        return answered

    def widen(self, ProduceHead head, int entries):
        """Let `entries` requests be under way; AccessDeniedError when the orders would become
        ambiguous."""
        cdef int error
        if entries > MAX_ENTRIES:
            raise AccessDeniedError(
                f"{entries} requests under way on one head are too many", hint="at most 32768")
        with nogil:
            pthread_mutex_lock(&self._lock)
            error = order_resize(&head.h, <uint32_t> entries)
            pthread_mutex_unlock(&self._lock)
        if error:
            raise MemoryError()

    def close_head(self, ProduceHead head not None, bint notify):
        """Commit no more requests of this head; with `notify` its producers are told through their
        rings.  False when it had ended before, in whatever way."""
        cdef bint closed
        with nogil:
            pthread_mutex_lock(&self._lock)
            closed = order_takes(&head.h)
            if closed:
                head.h.state = HEAD_CLOSED
                if notify:
                    self._revoke_members(&head.h)
            head.h.deadline_ns = 0
            pthread_mutex_unlock(&self._lock)
        return closed

    def drop_gated(self, ProduceHead head not None, *, bint for_replicas=False):
        """What waits for the gate of a head that has ended will not be acknowledged here: the
        producers that wait, or those alone that wait `for_replicas`, are told through their rings
        that their access is revoked, and repeat it."""
        cdef grant_t* g
        with nogil:
            pthread_mutex_lock(&self._lock)
        for file_id in self._grants:
            g = self._table[<uint16_t> file_id]
            if (g != NULL and g.head == &head.h and g.end_offset
                    and not (for_replicas and g.leader_only)):
                self._hold_no_more(g)
                g.staged = g.posted
                g.dirty = 0
                g.end_offset = 0
                g.state = GRANT_RETIRED
                self._notice(g, ACK_FLAG_REVOKED)
        pthread_mutex_unlock(&self._lock)

    def forget_head(self, ProduceHead head):
        """Forget a head that has ended and whose grants are removed; the answers to its own
        requests that nobody has taken."""
        cdef int i
        cdef head_t** at
        with nogil:
            pthread_mutex_lock(&self._lock)
        for i in range(self._open_count):
            if self._open[i] == &head.h:
                self._open_count -= 1
                self._open[i] = self._open[self._open_count]
                self._followed -= head.h.told != NULL
                break
        head.h.known = 0                # an answer that its owner owes comes too late
        if head.h.noted:
            at = &self._noted
            while at[0] != &head.h:
                at = &at[0].next_noted
            at[0] = head.h.next_noted
            head.h.noted = 0
        self._heads.discard(head)
        answers = self._answers_of(head)
        pthread_mutex_unlock(&self._lock)
        return answers

    cdef void _note(self, head_t* h) noexcept nogil:
        """There is something to report of this head, which its fields say; the lock is held.  One
        that was forgotten is kept by nobody."""
        if h.known and not h.noted:
            h.noted = 1
            h.next_noted = self._noted
            self._noted = h

    cdef list _take_noted(self):
        """The heads of which there is something to report, in the order in which it happened."""
        cdef list heads = []
        cdef head_t* h = self._noted
        while h != NULL:
            heads.append(<object> h.self)
            h.noted = 0
            h = h.next_noted
        self._noted = NULL
        self.heads_reported += len(heads)
        heads.reverse()
        return heads

    cdef list _answers_of(self, ProduceHead head):
        cdef int i, kept = 0
        cdef commit_result* r
        cdef list out = []
        for i in range(self._broker_answer_count):
            if self._broker_answers[i].head == <PyObject*> head:
                r = &self._broker_answers[i].result
                out.append(BrokerAnswer(self._broker_answers[i].order, r.error, bool(r.duplicate),
                                        r.base_offset, r.log_append_time))
                head._broker_requests.pop(self._broker_answers[i].order, None)
            else:
                self._broker_answers[kept] = self._broker_answers[i]
                kept += 1
        self._broker_answer_count = kept
        return out

    def unanswered(self, ProduceHead head):
        """The broker's own requests that were not answered, in order, as [(order, bytes)]."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        requests = head._broker_requests
        orders = sorted(requests, key=lambda order: (order - head.h.next_order) & 0xFFFF)
        out = [(order, requests[order]) for order in orders]
        pthread_mutex_unlock(&self._lock)
        return out

    def install(self, uint16_t file_id, ProduceHead head, QueuePair qp, uint64_t ack_address,
                uint32_t ack_rkey, uint64_t entries, MemoryRegion staging, bint watched,
                bint leader_only=False):
        """Start taking produce requests for `file_id` from `qp`, which is one of the producers of
        `head`.  False when the head has ended.

        `staging` holds `entries` acknowledgement entries (a power of two).  `leader_only`: they do
        not wait for replicas.
        """
        cdef grant_t* g = <grant_t*> calloc(1, sizeof(grant_t))
        if g == NULL:
            raise MemoryError()
        g.state = GRANT_ACTIVE
        g.file_id = file_id
        g.qp_num = qp.qp_num
        g.ack_address = ack_address
        g.ack_rkey = ack_rkey
        g.entries = entries
        g.staging_lkey = staging.lkey
        g.staging_address = staging.address
        g.head = &head.h
        g.leader_only = leader_only
        g.qp = <PyObject*> qp
        with nogil:
            pthread_mutex_lock(&self._lock)
        if self._table[file_id] != NULL:
            pthread_mutex_unlock(&self._lock)
            free(g)
            raise AccessDeniedError(
                f"file id {file_id} is granted already", hint="release it first")
        if not order_takes(&head.h):
            pthread_mutex_unlock(&self._lock)
            free(g)
            return False
        self._grants[file_id] = (head, qp, staging)
        self._table[file_id] = g
        if watched:
            kd_flag_set(&head.h.append_watched)
        pthread_mutex_unlock(&self._lock)
        return True

    def retire(self, uint16_t file_id, bint notify):
        """Take no more requests under `file_id`; with `notify` the producer is told through its
        ring."""
        cdef grant_t* g
        with nogil:
            pthread_mutex_lock(&self._lock)
            g = self._table[file_id]
            if g != NULL and g.state == GRANT_ACTIVE:
                g.state = GRANT_RETIRED
                if notify:
                    self._notice(g, ACK_FLAG_REVOKED)
            pthread_mutex_unlock(&self._lock)

    def recall(self, uint16_t file_id):
        """Ask the producer to finish what it has under way and to come back."""
        cdef grant_t* g
        with nogil:
            pthread_mutex_lock(&self._lock)
            g = self._table[file_id]
            if g != NULL and g.state == GRANT_ACTIVE:
                self._notice(g, ACK_FLAG_RECALLED)
            pthread_mutex_unlock(&self._lock)

    cdef void _notice(self, grant_t* g, uint16_t flags) noexcept nogil:
        if self._peer_alive(g.qp_num):
            self._stage(g, 0, 0, flags, 0, -1, -1)
            self._post_acks(g)

    cdef void _revoke_members(self, head_t* h) noexcept nogil:
        """Tell all producers of this head that nothing more of theirs will be committed."""
        cdef int i
        cdef grant_t* g
        for i in range(FILES):
            g = self._table[i]
            if g != NULL and g.head == h and g.state == GRANT_ACTIVE:
                g.state = GRANT_RETIRED
                self._notice(g, ACK_FLAG_REVOKED)

    def remove(self, uint16_t file_id):
        """Forget a retired (or active) grant; its memory may go once this returns.  What it has
        written in its turn is still committed."""
        cdef grant_t* g
        with nogil:
            pthread_mutex_lock(&self._lock)
        g = self._table[file_id]
        self._table[file_id] = NULL
        kept = self._grants.pop(file_id, None)
        if g != NULL and g.head != NULL:
            order_forget(g.head, file_id)
            self._hold_no_more(g)
        pthread_mutex_unlock(&self._lock)
        if g != NULL:
            free(g.ends)
            free(g)
        return kept

    def watch(self, ProduceHead head not None):
        """Call `on_append(head)` once, at its next commit."""
        kd_flag_set(&head.h.append_watched)

    cdef bint _peer_alive(self, uint32_t qp_num) noexcept nogil:
        cdef peer_t* peer = self._find_peer(qp_num)
        return peer != NULL and peer.cut == CUT_NONE

    # -- acknowledgements --------------------------------------------------------------------------

    cdef void _cut_peer(self, peer_t* peer, int why) noexcept nogil:
        if peer.cut == CUT_NONE:
            peer.cut = why
            peer.untold = 1
            self._cut_count += 1

    cdef void _stage(self, grant_t* g, uint16_t order, int16_t error, uint16_t flags,
                     uint16_t batches, int64_t base_offset, int64_t log_append_time) noexcept nogil:
        cdef uint64_t entry = g.staged & (g.entries - 1)
        cdef uint8_t* e = <uint8_t*><uintptr_t> (g.staging_address + entry * ACK_BYTES)
        kd_put_le32(e + ACK_SEQUENCE, <uint32_t> g.staged)
        kd_put_le16(e + ACK_FILE_ID, g.file_id)
        kd_put_le16(e + ACK_ORDER, order)
        kd_put_le16(e + ACK_ERROR, <uint16_t> error)
        kd_put_le16(e + ACK_FLAGS, flags)
        kd_put_le32(e + ACK_BATCHES, batches)
        kd_put_le64(e + ACK_BASE_OFFSET, <uint64_t> base_offset)
        kd_put_le64(e + ACK_LOG_APPEND_TIME, <uint64_t> log_append_time)
        if g.ends != NULL:
            g.ends[entry] = 0
        g.staged += 1
        self._acks += 1
        if not g.dirty:
            g.dirty = 1
            if self._touched_count < BATCH:
                self._touched[self._touched_count] = g.file_id
                self._touched_count += 1
            else:
                self._backlog = True

    cdef void _keep_answer(self, head_t* h, const commit_result* result) noexcept nogil:
        """The answer to the broker's own request of the next order."""
        cdef broker_answer_t* grown
        if self._broker_answer_count == self._broker_answer_capacity:
            grown = <broker_answer_t*> realloc(
                self._broker_answers,
                (2 * self._broker_answer_capacity + 64) * sizeof(broker_answer_t))
            if grown == NULL:  # its answer is lost; the client's own time limit ends its wait
                return
            self._broker_answers = grown
            self._broker_answer_capacity = 2 * self._broker_answer_capacity + 64
        self._broker_answers[self._broker_answer_count].head = h.self
        self._broker_answers[self._broker_answer_count].order = h.next_order
        self._broker_answers[self._broker_answer_count].result = result[0]
        self._broker_answer_count += 1
        self._note(h)

    cdef void _wait_until(self, grant_t* g, int64_t end_offset) noexcept nogil:
        """The entry that was staged last waits until the high watermark is `end_offset`."""
        if g.ends == NULL:
            g.ends = <int64_t*> calloc(g.entries, sizeof(int64_t))
            if g.ends == NULL:      # then it waits for all that there is
                g.end_offset = max(g.end_offset, (<CommitKernel> g.head.kernel).c_log_end())
                return
        g.ends[(g.staged - 1) & (g.entries - 1)] = end_offset
        g.end_offset = max(g.end_offset, end_offset)

    cdef uint64_t _may_post(self, grant_t* g) noexcept nogil:
        """Up to which staged entry acknowledgements may go out: the high watermark has passed their
        records, or, for a producer that does not wait for replicas, these are on disk.  The owner
        is asked to flush, or, where the partition's gate moves the high watermark, to see to that;
        where marks do, `_release_held` follows when they have."""
        cdef head_t* h = g.head
        cdef int64_t on_disk, mark
        cdef uint64_t limit = g.posted
        if g.end_offset == 0:
            return g.staged
        on_disk = acknowledged_by_disk(<CommitKernel> h.kernel)
        mark = on_disk if g.leader_only else (<CommitKernel> h.kernel).c_high_watermark()
        if g.end_offset <= mark:
            g.end_offset = 0
            return g.staged
        if g.ends != NULL:
            while limit < g.staged and g.ends[limit & (g.entries - 1)] <= mark:
                limit += 1
        if on_disk < g.end_offset and not h.disk_asked:
            h.disk_asked = h.gate_untold = 1
            self._note(h)
        if g.leader_only:
            return limit
        if (marks_count(<CommitKernel> h.kernel)
                or not (<CommitKernel> h.kernel).c_gate_holds()):
            self._hold(g)
        elif not h.gate_asked and not h.disk_asked:
            h.gate_asked = h.gate_untold = 1
            self._note(h)
        return limit

    cdef void _hold(self, grant_t* g) noexcept nogil:
        """Look at the grant when a mark has moved."""
        cdef uint16_t* grown
        if g.listed:
            return
        if self._held_count == self._held_capacity:
            grown = <uint16_t*> realloc(
                self._held, (2 * self._held_capacity + 16) * sizeof(uint16_t))
            if grown == NULL:
                self._backlog = True    # it is looked at again and again
                return
            self._held = grown
            self._held_capacity = 2 * self._held_capacity + 16
        self._held[self._held_count] = g.file_id
        self._held_count += 1
        g.listed = 1
        g.head.held += 1

    cdef void _hold_no_more(self, grant_t* g) noexcept nogil:
        """A head may have ended, and its owner not be told before its producers are answered."""
        if g.listed:
            g.listed = 0
            g.head.held -= 1
            if g.head.held == 0 and g.head.news == NEWS_TO_TELL:
                self._note(g.head)

    cdef void _release_held(self) noexcept nogil:
        """Some high watermark has moved: write the acknowledgements that waited for it."""
        cdef int i, n = self._held_count, kept = 0
        cdef grant_t* g
        for i in range(n):
            g = self._table[self._held[i]]
            if g == NULL or not g.listed:
                continue
            if g.dirty:
                self._post_acks(g)
            if g.end_offset == 0 or not g.dirty:
                self._hold_no_more(g)
            else:
                self._held[kept] = g.file_id
                kept += 1
        self._held_count = kept

    cdef void _post_acks(self, grant_t* g) noexcept nogil:
        cdef uint64_t at, n
        cdef uint64_t limit = self._may_post(g)
        cdef int rc
        while g.posted < limit:
            at = g.posted & (g.entries - 1)
            n = limit - g.posted
            if n > g.entries - at:
                n = g.entries - at
            rc = (<QueuePair> g.qp).c_post_write_imm(
                (<uint64_t> g.file_id << 32) | n, g.staging_address + at * ACK_BYTES,
                g.staging_lkey, <uint32_t> (n * ACK_BYTES), g.ack_address + at * ACK_BYTES,
                g.ack_rkey, (<uint32_t> g.file_id << IMM_FILE_ID_SHIFT) | <uint32_t> n)
            if rc == ENOMEM:
                self._backlog = True
                return
            if rc != 0:
                # The queue pair is in error; its flushed receives will report the peer.
                g.end_offset = 0
                g.dirty = 0
                return
            g.posted += n
            self._ack_writes += 1
            self._outstanding += 1
        g.dirty = g.posted < g.staged

    cdef void _drain_sends(self) noexcept nogil:
        while self._outstanding > 0:
            if self._take_sends() < BATCH:
                return

    cdef void _reap_sends(self) noexcept nogil:
        """As `_drain_sends`, also where nothing is under way."""
        while self._take_sends() == BATCH:
            pass

    cdef int _take_sends(self) noexcept nogil:
        """One batch of completions of acknowledgements; how many."""
        cdef work_completion wcs[BATCH]
        cdef int i, n
        cdef grant_t* g
        cdef peer_t* peer
        n = self._send_cq.c_poll(wcs, BATCH)
        if n <= 0:
            return 0
        for i in range(n):
            self._outstanding -= 1
            g = self._table[<uint16_t> (wcs[i].wr_id >> 32)]
            if wcs[i].status != WC_SUCCESS:
                peer = self._find_peer(wcs[i].qp_num)
                if peer != NULL:
                    self._cut_peer(peer, CUT_DISCONNECTED)
            elif g != NULL and g.qp_num == wcs[i].qp_num:
                g.completed += wcs[i].wr_id & <uint64_t> 0xFFFFFFFFU
        return n

    cdef void _flush_acks(self) noexcept nogil:
        cdef int i
        cdef grant_t* g
        cdef int n = self._touched_count
        self._touched_count = 0
        for i in range(n):
            g = self._table[self._touched[i]]
            if g != NULL and g.dirty:
                self._post_acks(g)

    cdef void _flush_backlog(self) noexcept nogil:
        cdef int i
        self._backlog = False
        for i in range(FILES):
            if self._table[i] != NULL and self._table[i].dirty:
                self._post_acks(self._table[i])
