# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The RDMA produce worker: completions in, commits and acknowledgements out (KafkaDirect §4.2.2).

Owns: the thread that polls the broker's completion queues, and the table that maps a file id to its
grant.  One completion is one produce request: its immediate data names the file and the request's
order, its length is the number of bytes the producer has written at the grant's tail.  The worker
commits requests in the order in which their completions arrive, which for a reliable connected
queue pair is the order of the writes, and answers into the producer's acknowledgement ring with
WRITE_WITH_IMM.

What may not enter: files, sockets, Kafka's protocol, policy.  Who gets a grant is decided in
`kdirect.broker.access`; how bytes become records in `kdirect.log.kernel`.

Threads.  `run` is the body of the one worker thread; it holds the GIL only while it sleeps, flushes
or reports.  Every other method may be called from any thread; `_lock` guards the tables and is held by
the worker while it works off one batch of completions, so a grant that `remove` has returned from is not
in use.  Nobody waits for it with the GIL held: its holder may need the GIL (a transport written in Python, or just
to go on behind ``with nogil``).

Memory.  A grant's acknowledgements are staged in memory of the broker (`staging`, registered in the
client's protection domain, as many entries as the client's ring).  Entry i belongs to the transport from
the post of the WRITE that carries it until that WRITE's completion on the send queue; it is reused
only afterwards.  The client's ring is the client's; the broker only writes it.

Idle cost: after `spin_us` without a completion the thread sleeps on the receive completion queue.
"""

from cpython.ref cimport PyObject
from libc.errno cimport ENOMEM
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec

from kdirect.format.layout cimport (
    ACK_BASE_OFFSET, ACK_BATCHES, ACK_BYTES, ACK_ERROR, ACK_FILE_ID, ACK_FLAG_DUPLICATE, ACK_FLAG_REVOKED, ACK_FLAGS,
    ACK_LOG_APPEND_TIME, ACK_ORDER, ACK_SEQUENCE, IMM_FILE_ID_SHIFT, IMM_ORDER_MASK,
)
from kdirect.log.kernel cimport CommitKernel, commit_result
from kdirect.rdma.contract cimport (
    WC_RECV, WC_RECV_RDMA_WITH_IMM, WC_SUCCESS, CompletionQueue, MemoryRegion, QueuePair, work_completion,
)

import logging

from kdirect.errors import AccessDeniedError

log = logging.getLogger("kdirect.broker.rdma")

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, void*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)

cdef extern from *:
    """
    #include <stdint.h>
    #if defined(__x86_64__) || defined(__i386__)
    #define kd_cpu_relax() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define kd_cpu_relax() __asm__ __volatile__("yield")
    #else
    #define kd_cpu_relax() ((void) 0)
    #endif
    static inline void kd_put16(uint8_t* p, uint16_t v) { __builtin_memcpy(p, &v, 2); }
    static inline void kd_put32(uint8_t* p, uint32_t v) { __builtin_memcpy(p, &v, 4); }
    static inline void kd_put64(uint8_t* p, uint64_t v) { __builtin_memcpy(p, &v, 8); }
    static inline int kd_flag_take(uint8_t* p) { return __atomic_exchange_n(p, 0, __ATOMIC_SEQ_CST); }
    static inline void kd_flag_set(uint8_t* p) { __atomic_store_n(p, 1, __ATOMIC_SEQ_CST); }
    static inline int kd_flag(uint8_t* p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    """
    void kd_cpu_relax() nogil
    void kd_put16(uint8_t* p, uint16_t v) nogil
    void kd_put32(uint8_t* p, uint32_t v) nogil
    void kd_put64(uint8_t* p, uint64_t v) nogil
    int kd_flag_take(uint8_t* p) nogil
    void kd_flag_set(uint8_t* p) nogil
    int kd_flag(uint8_t* p) nogil

cdef enum:
    BATCH = 64            # completions worked off under one lock
    ACK_AFTER_BYTES = 65536  # acknowledge within a batch after so much work, so that the producer refills while the rest is checked
    PEERS = 8192          # size of the open-addressed peer table: a power of two, at most half full
    FILES = 65536         # file ids are 16 bits
    GRANT_ACTIVE = 1
    GRANT_RETIRED = 2     # no more commits; its owner in Python still has to release it

cdef uint32_t HASH = 2654435761U   # Knuth's multiplicative hash

cdef enum:
    # why a peer is cut
    CUT_NONE = 0
    CUT_DISCONNECTED = 1
    CUT_FORGED_FILE = 2
    CUT_BAD_ORDER = 3
    CUT_NOT_A_PRODUCE = 4
    CUT_ACK_OVERRUN = 5

CUT_REASONS = {
    CUT_DISCONNECTED: "disconnected",
    CUT_FORGED_FILE: "it wrote under a file id that it was not granted",
    CUT_BAD_ORDER: "it sent a request out of order",
    CUT_NOT_A_PRODUCE: "it sent a message that is no produce request",
    CUT_ACK_OVERRUN: "it has more requests under way than its acknowledgement ring holds",
}

cdef struct peer_t:
    uint32_t qp_num       # 0: free; freed entries keep the probe chain alive by `used`
    uint8_t used
    uint8_t cut           # CUT_*
    PyObject* qp          # borrowed; ProduceWorker._peers keeps it alive

cdef struct grant_t:
    uint8_t state
    uint8_t dirty         # acknowledgements staged and not posted
    uint8_t sync_first    # the partition must be synced to disk before its acknowledgements go out
    uint8_t unsynced
    uint16_t file_id
    uint16_t order        # of the next request
    uint32_t qp_num
    uint64_t position     # where the next request's bytes lie
    int64_t segment_base_offset
    uint64_t ack_address
    uint32_t ack_rkey
    uint32_t staging_lkey
    uint64_t entries      # of the ring; a power of two
    uint64_t staged       # entries ever staged
    uint64_t posted       # entries ever posted
    uint64_t completed    # entries whose WRITE has completed
    uint64_t staging_address
    PyObject* kernel      # borrowed; ProduceWorker._grants keeps it alive
    PyObject* qp


cdef inline int64_t _now_ns(int clock) noexcept nogil:
    cdef timespec ts
    clock_gettime(<int> clock, &ts)
    return <int64_t> ts.tv_sec * 1000000000 + ts.tv_nsec


cdef class ProduceWorker:
    """See the module.  Life: construct, `run` in a thread of its own, `stop`, join the thread.

    `on_retired(file_id)` and `on_cut(qp_num, reason)` and `on_append(file_id)` are called on the worker's
    thread with the GIL and no lock held; they must not block.  `sync(file_id)` is called there too and
    returns when what was committed is on disk.
    """

    cdef pthread_mutex_t _lock
    cdef grant_t** _table
    cdef peer_t _peer_table[PEERS]
    cdef CompletionQueue _recv_cq
    cdef CompletionQueue _send_cq
    cdef dict _grants              # file id -> objects that the grant borrows
    cdef dict _peers               # qp number -> queue pair
    cdef uint8_t* _watched         # by file id: somebody waits for an append
    cdef int64_t _spin_ns
    cdef volatile bint _stopping
    cdef uint16_t _touched[BATCH]  # file ids with staged acknowledgements
    cdef int _touched_count
    cdef uint16_t _retired[BATCH]
    cdef int _retired_count
    cdef uint32_t _cut[BATCH]
    cdef int _cut_count
    cdef uint16_t _appended[BATCH]
    cdef int _appended_count
    cdef object on_retired
    cdef object on_cut
    cdef object on_append
    cdef object sync
    cdef uint64_t _completions, _commits, _commit_bytes, _errors, _sleeps, _acks, _ack_writes, _outstanding
    cdef bint _sync_first          # some grant's acknowledgements wait for the disk: they go out together, after one sync
    cdef bint _backlog             # some acknowledgements wait for room in a send queue

    def __cinit__(self):
        pthread_mutex_init(&self._lock, NULL)
        self._table = <grant_t**> calloc(FILES, sizeof(void*))
        self._watched = <uint8_t*> calloc(FILES, 1)
        if self._table == NULL or self._watched == NULL:
            raise MemoryError()

    def __init__(self, CompletionQueue recv_cq, CompletionQueue send_cq, *, spin_us=50, on_retired, on_cut, on_append, sync):
        self._recv_cq = recv_cq
        self._send_cq = send_cq
        self._grants = {}
        self._peers = {}
        self._spin_ns = int(spin_us) * 1000
        self.on_retired = on_retired
        self.on_cut = on_cut
        self.on_append = on_append
        self.sync = sync

    def __dealloc__(self):
        cdef int i
        if self._table != NULL:
            for i in range(FILES):
                if self._table[i] != NULL:
                    free(self._table[i])
            free(self._table)
        free(self._watched)
        pthread_mutex_destroy(&self._lock)

    # -- tables ------------------------------------------------------------------------------------------

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

    def add_peer(self, QueuePair qp, int receives):
        """Take completions of `qp` and keep `receives` receives posted on it."""
        cdef uint32_t i = (qp.qp_num * HASH) & (PEERS - 1)
        cdef int n
        if len(self._peers) >= PEERS // 2:
            raise AccessDeniedError(f"the broker serves {len(self._peers)} RDMA clients already", hint="close idle clients or use transport=tcp")
        for n in range(receives):
            qp.post_recv(0)
        with nogil:
            pthread_mutex_lock(&self._lock)
        if len(self._peers) == 0:
            memset(self._peer_table, 0, sizeof(self._peer_table))
        while self._peer_table[i].used and self._peer_table[i].qp != NULL:
            i = (i + 1) & (PEERS - 1)
        self._peer_table[i].used = 1
        self._peer_table[i].qp_num = qp.qp_num
        self._peer_table[i].cut = CUT_NONE
        self._peer_table[i].qp = <PyObject*> qp
        self._peers[qp.qp_num] = qp
        pthread_mutex_unlock(&self._lock)

    def remove_peer(self, uint32_t qp_num):
        """Forget a queue pair; its grants must have been removed.  Afterwards the worker does not touch it."""
        cdef peer_t* peer
        with nogil:
            pthread_mutex_lock(&self._lock)
        peer = self._find_peer(qp_num)
        if peer != NULL:
            peer.qp = NULL
        kept = self._peers.pop(qp_num, None)
        pthread_mutex_unlock(&self._lock)
        return kept

    def install(self, uint16_t file_id, CommitKernel kernel, QueuePair qp, int64_t segment_base_offset, uint64_t position, uint64_t ack_address,
                uint32_t ack_rkey, uint64_t entries, MemoryRegion staging, bint sync_first, bint watched):
        """Start taking produce requests for `file_id` from `qp`, whose next bytes lie at `position`.

        `staging` holds `entries` acknowledgement entries (a power of two).
        """
        cdef grant_t* g = <grant_t*> calloc(1, sizeof(grant_t))
        if g == NULL:
            raise MemoryError()
        g.state = GRANT_ACTIVE
        g.file_id = file_id
        g.qp_num = qp.qp_num
        g.position = position
        g.segment_base_offset = segment_base_offset
        g.ack_address = ack_address
        g.ack_rkey = ack_rkey
        g.entries = entries
        g.staging_lkey = staging.lkey
        g.staging_address = staging.address
        g.sync_first = sync_first
        g.kernel = <PyObject*> kernel
        g.qp = <PyObject*> qp
        with nogil:
            pthread_mutex_lock(&self._lock)
        if self._table[file_id] != NULL:
            pthread_mutex_unlock(&self._lock)
            free(g)
            raise AccessDeniedError(f"file id {file_id} is granted already", hint="release it first")
        self._grants[file_id] = (kernel, qp, staging)
        self._table[file_id] = g
        self._sync_first = self._sync_first or sync_first
        if watched:
            kd_flag_set(&self._watched[file_id])
        pthread_mutex_unlock(&self._lock)

    def retire(self, uint16_t file_id, bint notify):
        """End commits under `file_id` now; with `notify` the producer is told through its ring.
        Returns the position up to which requests were committed, or None when there is no such grant."""
        cdef grant_t* g
        position = None
        with nogil:
            pthread_mutex_lock(&self._lock)
        g = self._table[file_id]
        if g != NULL:
            if g.state == GRANT_ACTIVE:
                g.state = GRANT_RETIRED
                if notify and self._peer_alive(g.qp_num):
                    self._stage(g, g.order, 0, ACK_FLAG_REVOKED, 0, -1, -1)
                    if not g.unsynced:  # else the worker posts it, behind the acknowledgements that wait for the disk
                        self._post_acks(g)
            position = g.position
        pthread_mutex_unlock(&self._lock)
        return position

    def remove(self, uint16_t file_id):
        """Forget a retired (or active) grant; its memory may go once this returns."""
        cdef grant_t* g
        with nogil:
            pthread_mutex_lock(&self._lock)
        g = self._table[file_id]
        self._table[file_id] = NULL
        kd_flag_take(&self._watched[file_id])
        kept = self._grants.pop(file_id, None)
        pthread_mutex_unlock(&self._lock)
        if g != NULL:
            free(g)
        return kept

    def watch(self, uint16_t file_id):
        """Call `on_append(file_id)` once, at the next commit."""
        kd_flag_set(&self._watched[file_id])

    cdef bint _peer_alive(self, uint32_t qp_num) noexcept nogil:
        cdef peer_t* peer = self._find_peer(qp_num)
        return peer != NULL and peer.cut == CUT_NONE

    # -- one batch of completions ------------------------------------------------------------------------

    cdef void _cut_peer(self, peer_t* peer, int why) noexcept nogil:
        if peer.cut == CUT_NONE:
            peer.cut = why
            if self._cut_count < BATCH:
                self._cut[self._cut_count] = peer.qp_num
                self._cut_count += 1

    cdef void _stage(self, grant_t* g, uint16_t order, int16_t error, uint16_t flags, uint16_t batches,
                     int64_t base_offset, int64_t log_append_time) noexcept nogil:
        cdef uint8_t* e = <uint8_t*><uintptr_t> (g.staging_address + (g.staged & (g.entries - 1)) * ACK_BYTES)
        kd_put32(e + ACK_SEQUENCE, <uint32_t> g.staged)
        kd_put16(e + ACK_FILE_ID, g.file_id)
        kd_put16(e + ACK_ORDER, order)
        kd_put16(e + ACK_ERROR, <uint16_t> error)
        kd_put16(e + ACK_FLAGS, flags)
        kd_put32(e + ACK_BATCHES, batches)
        kd_put64(e + ACK_BASE_OFFSET, <uint64_t> base_offset)
        kd_put64(e + ACK_LOG_APPEND_TIME, <uint64_t> log_append_time)
        g.staged += 1
        self._acks += 1
        if not g.dirty:
            g.dirty = 1
            if self._touched_count < BATCH:
                self._touched[self._touched_count] = g.file_id
                self._touched_count += 1
            else:
                self._backlog = True

    cdef void _take(self, work_completion* wc, int64_t now_ms) noexcept nogil:
        cdef peer_t* peer = self._find_peer(wc.qp_num)
        cdef grant_t* g
        cdef commit_result result
        cdef uint16_t file_id, order, flags
        if peer == NULL or peer.cut != CUT_NONE:
            return
        if wc.status != WC_SUCCESS:
            self._cut_peer(peer, CUT_DISCONNECTED)
            return
        if wc.opcode != WC_RECV_RDMA_WITH_IMM:
            self._cut_peer(peer, CUT_NOT_A_PRODUCE)
            return
        (<QueuePair> peer.qp).c_post_recv(0, 0, 0, 0)
        file_id = <uint16_t> (wc.imm_data >> IMM_FILE_ID_SHIFT)
        order = <uint16_t> (wc.imm_data & IMM_ORDER_MASK)
        g = self._table[file_id]
        if g == NULL or g.qp_num != wc.qp_num:
            # A request that was under way when its grant was released is harmless; one under another client's file id is not.
            if g != NULL:
                self._cut_peer(peer, CUT_FORGED_FILE)
            return
        if g.state != GRANT_ACTIVE:
            return
        if order != g.order:
            self._cut_peer(peer, CUT_BAD_ORDER)
            return
        if g.staged - g.completed >= g.entries:
            self._drain_sends()
            if g.staged - g.completed >= g.entries:
                self._cut_peer(peer, CUT_ACK_OVERRUN)
                return
        memset(&result, 0, sizeof(result))
        (<CommitKernel> g.kernel).c_commit_to(g.segment_base_offset, g.position, wc.byte_len, now_ms, &result)
        flags = 0
        if result.error != 0 or result.duplicate:
            # The bytes at the tail were not kept, so what is already written behind them has no place: the
            # producer asks for access again and repeats it.
            flags = ACK_FLAG_REVOKED | (ACK_FLAG_DUPLICATE if result.duplicate else 0)
            g.state = GRANT_RETIRED
            if self._retired_count < BATCH:
                self._retired[self._retired_count] = file_id
                self._retired_count += 1
            if result.error != 0:
                self._errors += 1
        else:
            g.position += wc.byte_len
            self._commits += 1
            self._commit_bytes += wc.byte_len
            if g.sync_first:
                g.unsynced = 1
            if kd_flag(&self._watched[file_id]) and self._appended_count < BATCH and kd_flag_take(&self._watched[file_id]):
                self._appended[self._appended_count] = file_id
                self._appended_count += 1
        self._stage(g, order, result.error, flags, result.batches, result.base_offset, result.log_append_time)
        g.order = order + 1

    cdef void _post_acks(self, grant_t* g) noexcept nogil:
        cdef uint64_t at, n
        cdef int rc
        while g.posted < g.staged:
            at = g.posted & (g.entries - 1)
            n = g.staged - g.posted
            if n > g.entries - at:
                n = g.entries - at
            rc = (<QueuePair> g.qp).c_post_write_imm(
                (<uint64_t> g.file_id << 32) | n, g.staging_address + at * ACK_BYTES, g.staging_lkey, <uint32_t> (n * ACK_BYTES),
                g.ack_address + at * ACK_BYTES, g.ack_rkey, (<uint32_t> g.file_id << IMM_FILE_ID_SHIFT) | <uint32_t> n)
            if rc == ENOMEM:
                self._backlog = True
                return
            if rc != 0:
                # The queue pair is in error; its flushed receives will report the peer.
                break
            g.posted += n
            self._ack_writes += 1
            self._outstanding += 1
        g.dirty = 0

    cdef void _drain_sends(self) noexcept nogil:
        cdef work_completion wcs[BATCH]
        cdef int i, n
        cdef grant_t* g
        cdef peer_t* peer
        while self._outstanding > 0:
            n = self._send_cq.c_poll(wcs, BATCH)
            if n <= 0:
                return
            for i in range(n):
                self._outstanding -= 1
                g = self._table[<uint16_t> (wcs[i].wr_id >> 32)]
                if wcs[i].status != WC_SUCCESS:
                    peer = self._find_peer(wcs[i].qp_num)
                    if peer != NULL:
                        self._cut_peer(peer, CUT_DISCONNECTED)
                elif g != NULL and g.qp_num == wcs[i].qp_num:
                    g.completed += wcs[i].wr_id & <uint64_t> 0xFFFFFFFFU
            if n < BATCH:
                return

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

    cdef _sync_dirty(self):
        """Group commit: one sync a partition serves every request of this batch (and of all producers)."""
        cdef int i
        cdef grant_t* g
        cdef list ids = []
        for i in range(self._touched_count):
            g = self._table[self._touched[i]]
            if g != NULL and g.unsynced:
                ids.append(self._touched[i])
        for file_id in ids:
            try:
                self.sync(file_id)
                g = self._table[<uint16_t> file_id]
                if g != NULL:
                    g.unsynced = 0
            except Exception:
                log.exception("sync before acknowledgement failed; the producer's access ends unacknowledged")
                g = self._table[<uint16_t> file_id]
                if g != NULL:
                    # what was staged and not posted must not reach the producer
                    g.staged = g.posted
                    g.unsynced = 0
                    g.dirty = 0
                    peer = self._find_peer(g.qp_num)
                    if peer != NULL:
                        self._cut_peer(peer, CUT_DISCONNECTED)

    cdef _report(self):
        cdef int i
        cdef peer_t* peer
        cdef list cut = [], retired = [], appended = []
        with nogil:
            pthread_mutex_lock(&self._lock)
        for i in range(self._cut_count):
            peer = self._find_peer(self._cut[i])
            cut.append((self._cut[i], CUT_REASONS[peer.cut if peer != NULL else CUT_DISCONNECTED]))
        self._cut_count = 0
        for i in range(self._retired_count):
            retired.append(self._retired[i])
        self._retired_count = 0
        for i in range(self._appended_count):
            appended.append(self._appended[i])
        self._appended_count = 0
        pthread_mutex_unlock(&self._lock)
        for callback, items in ((self.on_append, appended), (self.on_retired, retired)):
            for item in items:
                try:
                    callback(item)
                except Exception:
                    log.exception("callback of the produce worker failed")
        for qp_num, reason in cut:
            try:
                self.on_cut(qp_num, reason)
            except Exception:
                log.exception("callback of the produce worker failed")

    cdef int c_step(self) noexcept nogil:
        """Work off one batch of completions, if there are any: commit, sync, acknowledge.  How many, or below 0 when the queue overran."""
        cdef work_completion wcs[BATCH]
        cdef int64_t now_ms
        cdef int i, n
        cdef uint64_t unanswered = 0
        cdef bint sync = False
        cdef grant_t* g
        n = self._recv_cq.c_poll(wcs, BATCH)
        if n <= 0:
            return n
        now_ms = _now_ns(CLOCK_REALTIME) // 1000000
        pthread_mutex_lock(&self._lock)
        self._completions += n
        for i in range(n):
            self._take(&wcs[i], now_ms)
            unanswered += wcs[i].byte_len
            if unanswered >= ACK_AFTER_BYTES and not self._sync_first:
                self._flush_acks()
                unanswered = 0
        for i in range(self._touched_count):
            g = self._table[self._touched[i]]
            if g != NULL and g.unsynced:
                sync = True
        if sync:
            pthread_mutex_unlock(&self._lock)
            with gil:
                self._sync_dirty()
            pthread_mutex_lock(&self._lock)
        self._flush_acks()
        self._drain_sends()
        if self._backlog:
            self._flush_backlog()
        pthread_mutex_unlock(&self._lock)
        return n

    cdef void c_tend_sends(self) noexcept nogil:
        """Take completions of acknowledgements, and post those that waited for room."""
        if self._outstanding or self._backlog:
            pthread_mutex_lock(&self._lock)
            self._drain_sends()
            self._flush_backlog()
            pthread_mutex_unlock(&self._lock)

    cdef bint _has_news(self) noexcept nogil:
        return self._cut_count > 0 or self._retired_count > 0 or self._appended_count > 0

    def step(self):
        """One batch without waiting, for a caller that has its own loop (a simulator).  The number of completions."""
        cdef int n
        with nogil:
            n = self.c_step()
            self.c_tend_sends()
        if self._has_news():
            self._report()
        return n

    def run(self):
        """The worker thread's body; returns after `stop`."""
        cdef int n = 0
        cdef int64_t now, spin_until
        while not self._stopping:
            spin_until = 0
            with nogil:
                while not self._stopping:
                    n = self.c_step()
                    if n > 0:
                        spin_until = 0
                    elif n < 0:
                        break
                    else:
                        now = _now_ns(CLOCK_MONOTONIC)
                        if spin_until == 0:
                            spin_until = now + self._spin_ns
                        elif now >= spin_until:
                            break
                        kd_cpu_relax()
                    if self._has_news():
                        break
            if self._has_news():
                self._report()
                continue
            if n < 0:
                log.error("the produce worker's completion queue overran; it goes on with the next completion")
            if self._stopping:
                break
            self._sleeps += 1
            # While acknowledgements are under way their completions must be taken too, so look in now and then.
            self._recv_cq.wait(10 if self._outstanding or self._backlog else -1, 0)
            with nogil:
                self.c_tend_sends()

    def stop(self):
        """Ask `run` to return."""
        self._stopping = True
        self._recv_cq.wake()

    def statistics(self):
        """Counters since the start: work the broker's CPU did for RDMA clients."""
        return {
            "rdma_completions": self._completions, "rdma_commits": self._commits, "rdma_commit_bytes": self._commit_bytes,
            "rdma_produce_errors": self._errors, "rdma_acks": self._acks, "rdma_ack_writes": self._ack_writes,
            "rdma_worker_sleeps": self._sleeps, "rdma_peers": len(self._peers), "rdma_produce_grants": len(self._grants),
        }
