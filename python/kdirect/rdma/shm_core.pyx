# cython: language_level=3, boundscheck=False, wraparound=False
"""Engine of the shm provider: work requests, completions, keys and links, without the GIL.

Law of the room: plain structs and nogil functions; no Python object is touched and the GIL is never
taken (a caller may hold it).  Nothing read from shared memory is used twice or unchecked; a peer that
writes what cannot be is cut: its queue pair goes to ERROR, the others do not notice.

Who runs a work request (the *executor*): the posting thread, when nothing is deferred, else the poller
of the send CQ.  The ring of work requests says which: [polled, done) have run and wait to be polled,
[done, posted) are deferred (the receiver was not ready) and belong to the poller.  The posting thread
runs a request only when done == posted, and publishes `done` before `posted`; so the role passes with
those two stores and needs no lock.

Fence between copies and revocation: the executor makes `busy` odd (an exchange, so a full fence), then
checks state and keys, copies, and makes it even.  Whoever takes something away (deregister, close, an
unmapping) first makes it invisible, then fences, then waits until it saw `busy` even or changed.

Locks, in the order in which they may be nested: CQ lock > link mutex > mapping cache.  The executor is
never busy while it waits for the link mutex.
"""

from libc.errno cimport EAGAIN, EBADF, ECHILD, EINTR, EINVAL, ENOMEM, ENOTCONN, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from kdirect.rdma.contract cimport (
    LOCAL_WRITE, QPS_ERROR, QPS_INIT, QPS_RTS, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, WC_COMP_SWAP,
    WC_FETCH_ADD, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_RDMA_READ, WC_RDMA_WRITE, WC_RECV,
    WC_RECV_RDMA_WITH_IMM, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_RETRY_EXC_ERR,
    WC_RNR_RETRY_EXC_ERR, WC_SEND, WC_SUCCESS, WC_WR_FLUSH_ERR, work_completion)

cdef extern from "shm_ring.h" nogil:
    enum:
        PROT_READ
        PROT_WRITE
        MAP_SHARED
        MAP_PRIVATE
        MAP_ANONYMOUS
        MAP_NORESERVE
        MADV_DONTFORK
        POLLIN
        POLLOUT
        MFD_CLOEXEC
        MFD_ALLOW_SEALING
        F_ADD_SEALS
        F_GET_SEALS
        F_SEAL_SHRINK
        F_SEAL_GROW
    void* MAP_FAILED
    void* mmap(void*, size_t, int, int, int, long)
    int munmap(void*, size_t)
    int madvise(void*, size_t, int)
    int memfd_create(const char*, unsigned int)
    int ftruncate(int, long)
    int fcntl(int, int, ...)
    int close(int)
    struct stat_t "stat":
        uint64_t st_dev
        uint64_t st_ino
        long st_size
        unsigned int st_mode
    int fstat(int, stat_t*)
    bint S_ISREG(unsigned int)
    struct pollfd:
        int fd
        short events
        short revents
    struct timespec:
        long tv_sec
        long tv_nsec
    int poll(pollfd*, unsigned long, int)
    int ppoll(pollfd*, unsigned long, const timespec*, const void*)
    int nanosleep(const timespec*, timespec*)

cdef enum:
    RUN_RNR = -1            # no receive posted
    RUN_FULL = -2           # no room for the payload until the peer polls
    RUN_GONE = -3           # not in RTS
    RUN_UNKNOWN_KEY = -4
    QUOTA = 16              # completions one attachment may give before the next one's turn
    MAPPING_BUCKETS = 1024

cdef int64_t RNR_TICK_NS = 1000000

cdef uint32_t[6] WC_OPCODES     # by kind
WC_OPCODES[:] = [WC_RDMA_READ, WC_RDMA_WRITE, WC_RDMA_WRITE, WC_SEND, WC_FETCH_ADD, WC_COMP_SWAP]

# Mappings of peers' files, one cache a process; an entry lives while a kd_remote refers to it.
cdef kd_mapping* mappings[MAPPING_BUCKETS]
cdef pthread_mutex_t mappings_mutex
pthread_mutex_init(&mappings_mutex, NULL)


cdef void forked_child() noexcept nogil:
    """In a forked child: the parent's mappings are not here (MADV_DONTFORK), its mutex may be taken."""
    memset(mappings, 0, sizeof(mappings))
    pthread_mutex_init(&mappings_mutex, NULL)


cdef void* anonymous(size_t n) noexcept nogil:
    """Zeroed private pages that cost nothing until they are touched."""
    cdef void* p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    return NULL if p == MAP_FAILED else p


# -- protection domains ------------------------------------------------------------------------------------
cdef kd_domain* domain_new() noexcept:
    cdef kd_domain* d = <kd_domain*> calloc(1, sizeof(kd_domain))
    cdef void* p
    if d == NULL:
        return NULL
    d.refs = 1
    d.locals = <kd_local*> anonymous(KD_KEYS * sizeof(kd_local))
    d.keys_fd = memfd_create("kdirect-keys", MFD_CLOEXEC | MFD_ALLOW_SEALING)
    if d.locals != NULL and d.keys_fd >= 0 and ftruncate(d.keys_fd, KD_KEY_TABLE_BYTES) == 0 \
            and fcntl(d.keys_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0:
        p = mmap(NULL, KD_KEY_TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, d.keys_fd, 0)
        if p != MAP_FAILED:
            madvise(p, KD_KEY_TABLE_BYTES, MADV_DONTFORK)
            d.keys = <uint32_t*> p
            return d
    domain_unref(d)
    return NULL


cdef void domain_unref(kd_domain* d) noexcept nogil:
    if kd_add32(&d.refs, <uint32_t> -1) != 1:
        return
    if d.keys != NULL and not d.forked:
        munmap(d.keys, KD_KEY_TABLE_BYTES)
    if d.locals != NULL:
        munmap(d.locals, KD_KEYS * sizeof(kd_local))
    if d.keys_fd >= 0:
        close(d.keys_fd)
    free(d)


# -- mappings of peers' files --------------------------------------------------------------------------------
cdef uint8_t* mapping_acquire(int fd, uint64_t position, uint64_t length, uint32_t writable, kd_mapping** out) noexcept nogil:
    """Where byte `position` of the file behind `fd` is mapped, together with `length` bytes; NULL when it
    cannot be.  Every successful call is paired with one mapping_release()."""
    cdef stat_t st
    cdef uint64_t start, end
    cdef kd_mapping* m
    cdef void* p
    cdef int bucket
    if fstat(fd, &st) != 0 or not S_ISREG(st.st_mode) or length > <uint64_t> st.st_size or position > <uint64_t> st.st_size - length:
        return NULL             # touching pages beyond the end of a file would be SIGBUS
    start = position & ~<uint64_t> 4095
    end = (position + length + 4095) & ~<uint64_t> 4095
    bucket = <int> ((st.st_ino ^ st.st_dev) % MAPPING_BUCKETS)
    pthread_mutex_lock(&mappings_mutex)
    m = mappings[bucket]
    while m != NULL:
        if m.inode == st.st_ino and m.device == st.st_dev and m.writable == writable and m.start <= start \
                and m.start + m.bytes >= end:
            break
        m = m.next
    if m == NULL:
        m = <kd_mapping*> calloc(1, sizeof(kd_mapping))
        p = MAP_FAILED
        if m != NULL:
            p = mmap(NULL, end - start, (PROT_READ | PROT_WRITE) if writable else PROT_READ, MAP_SHARED, fd, <long> start)
        if p == MAP_FAILED:
            free(m)
            pthread_mutex_unlock(&mappings_mutex)
            return NULL
        madvise(p, end - start, MADV_DONTFORK)
        m.device = st.st_dev
        m.inode = st.st_ino
        m.writable = writable
        m.start = start
        m.bytes = end - start
        m.base = <uint8_t*> p
        m.next = mappings[bucket]
        mappings[bucket] = m
    m.refs += 1
    out[0] = m
    pthread_mutex_unlock(&mappings_mutex)
    return m.base + (position - m.start)


cdef void mapping_release(kd_mapping* m) noexcept nogil:
    cdef kd_mapping** link
    pthread_mutex_lock(&mappings_mutex)
    m.refs -= 1
    if m.refs == 0:
        link = &mappings[(m.inode ^ m.device) % MAPPING_BUCKETS]
        while link[0] != m:
            link = &link[0].next
        link[0] = m.next
        munmap(m.base, m.bytes)
        free(m)
    pthread_mutex_unlock(&mappings_mutex)


# -- queue pairs: life ---------------------------------------------------------------------------------------
cdef kd_qp* qp_new(kd_domain* d, kd_cq* send_cq, kd_cq* recv_cq, uint32_t qp_num, uint32_t max_send_wr,
                   uint32_t max_recv_wr, uint32_t max_send_bytes, int64_t rnr_timeout_ns) noexcept:
    cdef kd_qp* qp = <kd_qp*> calloc(1, sizeof(kd_qp))
    if qp == NULL:
        return NULL
    qp.refs = 1
    qp.qp_num = qp_num
    qp.max_send_wr = max_send_wr
    qp.max_recv_wr = max_recv_wr
    qp.max_send_bytes = max_send_bytes
    qp.rnr_timeout_ns = rnr_timeout_ns
    qp.send_mask = kd_power_of_two(max_send_wr) - 1
    qp.recv_mask = kd_power_of_two(max_recv_wr) - 1
    qp.domain = d
    kd_add32(&d.refs, 1)
    qp.send_cq = send_cq
    qp.recv_cq = recv_cq
    qp.state = QPS_INIT
    qp.sock = qp.peer_event_fd = qp.service_fd = -1
    pthread_mutex_init(&qp.link_mutex, NULL)
    qp.send_ring = <kd_wr*> calloc(qp.send_mask + 1, sizeof(kd_wr))
    qp.recv_ring = <kd_recv*> calloc(qp.recv_mask + 1, sizeof(kd_recv))
    qp.remotes = <void**> anonymous(KD_KEYS * sizeof(void*))
    if qp.send_ring == NULL or qp.recv_ring == NULL or qp.remotes == NULL:
        qp_unref(qp)
        return NULL
    return qp


cdef void qp_unref(kd_qp* qp) noexcept nogil:
    """The last reference (the Python object's, or a CQ's that still had completions) frees the queue
    pair and unmaps the pair memory."""
    if kd_add32(&qp.refs, <uint32_t> -1) != 1:
        return
    if not qp.forked:
        link_forget_remotes(qp)
        if qp.pair != NULL:
            munmap(qp.pair, qp.pair_bytes)
        if qp.peer_keys != NULL:
            munmap(qp.peer_keys, KD_KEY_TABLE_BYTES)
    if qp.sock >= 0:
        close(qp.sock)
    if qp.peer_event_fd >= 0:
        close(qp.peer_event_fd)
    if qp.remotes != NULL:
        munmap(qp.remotes, KD_KEYS * sizeof(void*))
    pthread_mutex_destroy(&qp.link_mutex)
    domain_unref(qp.domain)
    free(qp.send_ring)
    free(qp.recv_ring)
    free(qp)


cdef uint64_t pair_bytes(uint32_t passive_recv_wr, uint32_t active_send_bytes, uint32_t active_recv_wr,
                         uint32_t passive_send_bytes) noexcept nogil:
    """Size of the pair memory of two queue pairs with these limits."""
    cdef kd_direction_layout a, b
    cdef uint32_t cap
    cap = <uint32_t> kd_power_of_two(passive_recv_wr)
    kd_pair_layout(kd_round_up(2 * sizeof(kd_direction), 4096), cap, kd_payload_ring_bytes(cap, active_send_bytes), &a)
    cap = <uint32_t> kd_power_of_two(active_recv_wr)
    kd_pair_layout(a.end, cap, kd_payload_ring_bytes(cap, passive_send_bytes), &b)
    return b.end


cdef int qp_map_pair(kd_qp* qp, int memfd, int keys_fd, bint active, uint32_t peer_recv_wr,
                     uint32_t peer_send_bytes) noexcept nogil:
    """Map the pair memory and the peer's key table (the descriptors stay the caller's), and publish the
    receives posted so far.  0 or an errno; EINVAL: they are not what this build makes."""
    cdef kd_direction_layout forward, back
    cdef kd_direction_layout* mine
    cdef kd_direction_layout* theirs
    cdef uint32_t my_cap = <uint32_t> (qp.recv_mask + 1), peer_cap = <uint32_t> kd_power_of_two(peer_recv_wr)
    cdef uint64_t my_ring = kd_payload_ring_bytes(my_cap, peer_send_bytes)
    cdef uint64_t peer_ring = kd_payload_ring_bytes(peer_cap, qp.max_send_bytes)
    cdef uint64_t start = kd_round_up(2 * sizeof(kd_direction), 4096), n
    cdef int need = F_SEAL_SHRINK | F_SEAL_GROW
    cdef stat_t st
    cdef void* p
    if active:      # direction 0 is active -> passive
        kd_pair_layout(start, peer_cap, peer_ring, &forward)
        kd_pair_layout(forward.end, my_cap, my_ring, &back)
        theirs = &forward
        mine = &back
    else:
        kd_pair_layout(start, my_cap, my_ring, &forward)
        kd_pair_layout(forward.end, peer_cap, peer_ring, &back)
        mine = &forward
        theirs = &back
    n = back.end
    if fstat(memfd, &st) != 0 or <uint64_t> st.st_size < n or (fcntl(memfd, F_GET_SEALS) & need) != need:
        return EINVAL
    if fstat(keys_fd, &st) != 0 or <uint64_t> st.st_size < KD_KEY_TABLE_BYTES or (fcntl(keys_fd, F_GET_SEALS) & need) != need:
        return EINVAL
    p = mmap(NULL, KD_KEY_TABLE_BYTES, PROT_READ, MAP_SHARED, keys_fd, 0)
    if p == MAP_FAILED:
        return errno
    madvise(p, KD_KEY_TABLE_BYTES, MADV_DONTFORK)
    qp.peer_keys = <uint32_t*> p
    p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0)
    if p == MAP_FAILED:
        return errno
    madvise(p, n, MADV_DONTFORK)
    qp.pair_bytes = n
    qp.out_mask = peer_cap - 1
    qp.out_ring = peer_ring
    qp.in_mask = my_cap - 1
    qp.in_ring = my_ring
    qp.in_max_bytes = peer_send_bytes
    qp.pair = <uint8_t*> p
    qp.out = <kd_direction*> (qp.pair + (0 if active else sizeof(kd_direction)))
    qp.out_lengths = <uint32_t*> (qp.pair + theirs.lengths)
    qp.out_entries = <kd_entry*> (qp.pair + theirs.entries)
    qp.out_payload = qp.pair + theirs.payload
    qp.in_lengths = <uint32_t*> (qp.pair + mine.lengths)
    qp.in_entries = <kd_entry*> (qp.pair + mine.entries)
    qp.in_payload = qp.pair + mine.payload
    kd_lock(&qp.recv_lock)
    qp.into = <kd_direction*> (qp.pair + (sizeof(kd_direction) if active else 0))
    n = 0
    while n < qp.recv_posted:
        qp.in_lengths[n & qp.in_mask] = qp.recv_ring[n & qp.recv_mask].length
        n += 1
    kd_store64(&qp.into.posted, qp.recv_posted)
    kd_unlock(&qp.recv_lock)
    return 0


cdef void qp_set_ready(kd_qp* qp) noexcept nogil:
    """INIT -> RTS; sleepers look again, because entries may be there already."""
    if kd_cas32(&qp.state, QPS_INIT, QPS_RTS):
        kd_signal(qp.recv_cq.event_fd)


cdef void error_event(kd_cq* cq) noexcept nogil:
    kd_add32(&cq.errors, 1)
    kd_signal(cq.event_fd)


cdef void qp_set_error(kd_qp* qp) noexcept nogil:
    """To ERROR: nothing new starts; what is outstanding is flushed by the pollers, sleepers wake, and the
    service thread tells the peer once the executor has left."""
    if kd_exchange32(&qp.state, QPS_ERROR) == QPS_ERROR:
        return
    error_event(qp.send_cq)
    if qp.recv_cq != qp.send_cq:
        error_event(qp.recv_cq)
    kd_signal(qp.service_fd)


cdef void cut(kd_qp* qp, uint32_t why) noexcept nogil:
    kd_cas32(&qp.cut, 0, why)
    qp_set_error(qp)


cdef inline void pause_or_yield(int n) noexcept nogil:
    if n & 63:
        kd_pause()
    else:
        sched_yield()


cdef void wait_passed(uint64_t* busy) noexcept nogil:
    """Wait until what was running under `busy` (of this process) has ended."""
    cdef uint64_t seen
    cdef int n = 0
    kd_fence()
    seen = kd_load64(busy)
    if seen & 1:
        while kd_load64(busy) == seen:
            n += 1
            pause_or_yield(n)


cdef void qp_quiesce(kd_qp* qp) noexcept nogil:
    """After qp_set_error: wait until neither executor nor receive poller touches anybody's memory."""
    wait_passed(&qp.busy)
    wait_passed(&qp.recv_busy)


# -- links: announcements of the peer's regions ---------------------------------------------------------------
cdef void remote_retire(kd_qp* qp, uint32_t index) noexcept nogil:
    """Unpublish and unmap the region at `index`; under the link mutex."""
    cdef kd_remote* r = <kd_remote*> qp.remotes[index]
    if r == NULL:
        return
    kd_store_pointer(&qp.remotes[index], NULL)
    wait_passed(&qp.busy)
    mapping_release(r.mapping)
    free(r)


cdef void remote_add(kd_qp* qp, const kd_message* m, int fd) noexcept nogil:
    cdef kd_remote* r
    cdef uint32_t index = m.rkey & KD_KEY_INDEX_MASK
    if m.rkey == 0 or m.length == 0 or m.address > <uint64_t> -1 - m.length or m.position > <uint64_t> (1ull << 62) \
            or m.length > <uint64_t> (1ull << 62):
        return
    r = <kd_remote*> calloc(1, sizeof(kd_remote))
    if r == NULL:
        return
    r.rkey = m.rkey
    r.access = m.access
    r.address = m.address
    r.length = m.length
    r.base = mapping_acquire(fd, m.position, m.length, (m.access & (REMOTE_WRITE | REMOTE_ATOMIC)) != 0, &r.mapping)
    if r.base == NULL:
        qp.map_failures += 1
        free(r)
        kd_signal(qp.service_fd)
        return
    remote_retire(qp, index)
    if index >= qp.remotes_end:
        qp.remotes_end = index + 1
    kd_store_pointer(&qp.remotes[index], r)


cdef void remote_sweep(kd_qp* qp) noexcept nogil:
    cdef uint32_t i
    cdef kd_remote* r
    for i in range(qp.remotes_end):
        r = <kd_remote*> qp.remotes[i]
        if r != NULL and kd_load32(&qp.peer_keys[i]) != r.rkey:
            remote_retire(qp, i)


cdef int link_drain(kd_qp* qp) noexcept nogil:
    """Take in what the peer announced.  Returns the sticky LINK_* flags."""
    cdef kd_message m
    cdef kd_remote* r
    cdef int fd = -1, rc
    pthread_mutex_lock(&qp.link_mutex)
    while qp.sock >= 0 and not qp.link_flags & LINK_LEFT:
        rc = kd_receive_message(qp.sock, &m, &fd)
        if rc == 0:
            break
        if rc < 0:
            qp.link_flags |= LINK_LEFT
            kd_signal(qp.service_fd)
            break
        if m.type == KD_MSG_ANNOUNCE and fd >= 0 and not qp.remotes_shut:
            remote_add(qp, &m, fd)
        elif m.type == KD_MSG_REVOKE:
            r = <kd_remote*> qp.remotes[m.rkey & KD_KEY_INDEX_MASK]
            if r != NULL and r.rkey == m.rkey:
                remote_retire(qp, m.rkey & KD_KEY_INDEX_MASK)
        elif m.type == KD_MSG_READY:
            qp.link_flags |= LINK_READY
        if m.flags & KD_MSG_FLAG_SWEEP and qp.peer_keys != NULL:
            remote_sweep(qp)
        if fd >= 0:
            close(fd)
    rc = qp.link_flags
    pthread_mutex_unlock(&qp.link_mutex)
    return rc


cdef void link_forget_remotes(kd_qp* qp) noexcept nogil:
    """Unmap every region of the peer, and take in no more: the queue pair is in ERROR."""
    cdef uint32_t i
    pthread_mutex_lock(&qp.link_mutex)
    qp.remotes_shut = 1
    for i in range(qp.remotes_end):
        if qp.remotes[i] != NULL:
            remote_retire(qp, i)
    pthread_mutex_unlock(&qp.link_mutex)


cdef int link_send(kd_qp* qp, const kd_message* m, int fd, int64_t timeout_ns) noexcept nogil:
    """Send one control message; when the peer's side is full, wait at most `timeout_ns`.  0 or an errno."""
    cdef int64_t deadline = 0
    cdef pollfd p
    cdef int rc
    while True:
        rc = kd_send_message(qp.sock, m, fd)
        if rc != EAGAIN or timeout_ns <= 0:
            return rc
        if deadline == 0:
            deadline = kd_now_ns() + timeout_ns
        elif kd_now_ns() > deadline:
            return EAGAIN
        p.fd = qp.sock
        p.events = POLLOUT
        p.revents = 0
        poll(&p, 1, 10)


cdef bint left(kd_qp* qp) noexcept nogil:
    cdef bint gone
    if kd_load32(&qp.link_flags) & LINK_LEFT:
        return True
    pthread_mutex_lock(&qp.link_mutex)
    gone = qp.sock < 0 or kd_peer_left(qp.sock) != 0
    pthread_mutex_unlock(&qp.link_mutex)
    return gone


cdef int wait_out_of_reach(kd_qp** qps, int n, int64_t timeout_ns) noexcept nogil:
    """After keys were taken away: wait until no request of these queue pairs, or of their peers, that
    started before is still running.  1, or 0 on timeout.  A peer that left runs nothing."""
    cdef int i, spins = 0
    cdef int64_t deadline = kd_now_ns() + timeout_ns
    cdef uint64_t seen
    cdef kd_qp* qp
    cdef timespec nap
    nap.tv_sec = 0
    nap.tv_nsec = 50000
    kd_fence()
    for i in range(n):
        qp = qps[i]
        wait_passed(&qp.busy)
        wait_passed(&qp.recv_busy)
        if qp.into == NULL:
            continue
        seen = kd_load64(&qp.into.busy)
        if not seen & 1 or kd_load32(&qp.link_flags) & LINK_LEFT:
            continue
        while kd_load64(&qp.into.busy) == seen:
            spins += 1
            if spins < 2000:
                kd_pause()
                continue
            if left(qp):
                break
            if kd_now_ns() >= deadline:
                return 0
            nanosleep(&nap, NULL)
    return 1


# -- execution of work requests -----------------------------------------------------------------------------
cdef inline void enter(kd_qp* qp) noexcept nogil:
    kd_store64(&qp.busy, qp.busy + 1)
    kd_exchange64(&qp.out.busy, qp.busy)


cdef inline void leave(kd_qp* qp) noexcept nogil:
    kd_store64(&qp.busy, qp.busy + 1)
    kd_store64(&qp.out.busy, qp.busy)


cdef inline bint local_ok(kd_domain* d, uint32_t lkey, uint64_t address, uint64_t length, uint32_t need) noexcept nogil:
    cdef kd_local* l = &d.locals[lkey & KD_KEY_INDEX_MASK]
    if lkey == 0 or kd_load32(&l.key) != lkey or (l.access & need) != need:
        return False
    return address >= l.address and length <= l.length and address - l.address <= l.length - length


cdef inline uint8_t* remote_at(kd_qp* qp, uint32_t rkey, uint64_t address, uint64_t length, uint32_t need,
                               int* status) noexcept nogil:
    cdef uint32_t index = rkey & KD_KEY_INDEX_MASK
    cdef kd_remote* r = <kd_remote*> kd_load_pointer(&qp.remotes[index])
    if r == NULL or r.rkey != rkey:
        status[0] = RUN_UNKNOWN_KEY
        return NULL
    if kd_load32(&qp.peer_keys[index]) != rkey or not r.access & need or address < r.address or length > r.length \
            or address - r.address > r.length - length:
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


cdef inline void publish(kd_qp* qp, uint32_t opcode, uint32_t byte_len, uint32_t imm, uint64_t position) noexcept nogil:
    """Make the next entry visible, and wake the target if it sleeps (flag and entry: see shm_ring.h)."""
    cdef kd_entry* e = &qp.out_entries[qp.sent & qp.out_mask]
    e.byte_position = position
    e.opcode = opcode
    e.byte_len = byte_len
    e.imm_data = imm
    qp.sent += 1
    kd_exchange64(&e.sequence, qp.sent)
    if kd_load32(&qp.out.sleeping) and kd_exchange32(&qp.out.sleeping, 0):
        qp.stats.wakeups += 1
        kd_signal(qp.peer_event_fd)


cdef int execute_send(kd_qp* qp, kd_wr* wr) noexcept nogil:
    cdef uint64_t head, start, ring = qp.out_ring
    cdef int status = credit(qp)
    if status != 0:
        return status
    if wr.length and not local_ok(qp.domain, wr.lkey, wr.local, wr.length, 0):
        return WC_LOC_PROT_ERR
    if wr.length > kd_load32(&qp.out_lengths[qp.sent & qp.out_mask]):
        publish(qp, WC_RECV, wr.length, 0, qp.byte_tail)        # the target's completion says it too
        return WC_REM_INV_REQ_ERR
    start = qp.byte_tail
    if wr.length:
        head = kd_load64(&qp.out.byte_head)
        if qp.byte_tail - head > ring:
            cut(qp, CUT_CREDITS)
            return WC_RETRY_EXC_ERR
        if head == qp.byte_tail or (start & (ring - 1)) + wr.length > ring:
            start = kd_round_up(start, ring)    # an empty ring restarts where its pages are warm
        if head != qp.byte_tail and start + wr.length - head > ring:
            return RUN_FULL
        memcpy(qp.out_payload + (start & (ring - 1)), <void*><uintptr_t> wr.local, wr.length)
        qp.byte_tail = start + wr.length
    publish(qp, WC_RECV, wr.length, 0, start)
    qp.stats.sends += 1
    return WC_SUCCESS


cdef int execute(kd_qp* qp, kd_wr* wr) noexcept nogil:
    """Run one request while busy.  A WC_* status, or RUN_* when it did nothing yet."""
    cdef uint8_t* at
    cdef uint64_t old
    cdef int status = WC_SUCCESS
    if wr.kind == KIND_READ:
        if wr.length:
            if not local_ok(qp.domain, wr.lkey, wr.local, wr.length, LOCAL_WRITE):
                return WC_LOC_PROT_ERR
            at = remote_at(qp, wr.rkey, wr.remote, wr.length, REMOTE_READ, &status)
            if at == NULL:
                return status
            memcpy(<void*><uintptr_t> wr.local, at, wr.length)
        qp.stats.reads += 1
        qp.stats.read_bytes += wr.length
        return WC_SUCCESS
    if wr.kind <= KIND_WRITE_IMM:
        if wr.kind == KIND_WRITE_IMM:
            status = credit(qp)
            if status != 0:
                return status
        if wr.length:
            if not local_ok(qp.domain, wr.lkey, wr.local, wr.length, 0):
                return WC_LOC_PROT_ERR
            at = remote_at(qp, wr.rkey, wr.remote, wr.length, REMOTE_WRITE, &status)
            if at == NULL:
                return status
            memcpy(at, <void*><uintptr_t> wr.local, wr.length)
        if wr.kind == KIND_WRITE_IMM:
            publish(qp, WC_RECV_RDMA_WITH_IMM, wr.length, <uint32_t> wr.arg0, 0)
        qp.stats.writes += 1
        qp.stats.write_bytes += wr.length
        return WC_SUCCESS
    if wr.kind == KIND_SEND:
        return execute_send(qp, wr)
    if not local_ok(qp.domain, wr.lkey, wr.local, 8, LOCAL_WRITE):
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
    qp.stats.atomics += 1
    return WC_SUCCESS


cdef int run(kd_qp* qp, kd_wr* wr) noexcept nogil:
    cdef int status
    enter(qp)
    if kd_load32(&qp.state) != QPS_RTS:
        leave(qp)
        return RUN_GONE
    status = execute(qp, wr)
    leave(qp)
    if status != RUN_UNKNOWN_KEY:
        return status
    # The announcement may wait in the control socket: it was sent before anybody was told the key.
    link_drain(qp)
    enter(qp)
    status = execute(qp, wr) if kd_load32(&qp.state) == QPS_RTS else RUN_GONE
    leave(qp)
    return WC_REM_ACCESS_ERR if status == RUN_UNKNOWN_KEY else status


cdef inline void signal_local(kd_cq* cq) noexcept nogil:
    """After a full fence behind the completion's store: wake a sleeper of another thread."""
    if kd_load32(&cq.armed) and kd_exchange32(&cq.armed, 0):
        kd_signal(cq.event_fd)


cdef inline int not_ready(kd_qp* qp) noexcept nogil:
    return ECHILD if qp.forked else ENOTCONN


cdef kd_wr* qp_reserve(kd_qp* qp, int* rc) noexcept nogil:
    """The slot of the next send-side work request, to be filled in and submitted; NULL with an errno."""
    if kd_load32(&qp.state) != QPS_RTS:
        rc[0] = not_ready(qp)
        return NULL
    if qp.posted - kd_load64(&qp.polled) >= qp.max_send_wr:
        rc[0] = ENOMEM
        return NULL
    return &qp.send_ring[qp.posted & qp.send_mask]


cdef int qp_submit(kd_qp* qp, kd_wr* wr) noexcept nogil:
    cdef uint64_t posted = qp.posted
    cdef int status
    if wr.length > KD_MAX_MESSAGE_BYTES or (wr.kind == KIND_SEND and wr.length > qp.max_send_bytes):
        return EINVAL
    if wr.kind >= KIND_FETCH_ADD and wr.remote & 7:
        return EINVAL
    if kd_load64(&qp.done) == posted:
        status = run(qp, wr)
        if status == RUN_GONE:
            return not_ready(qp)
        if status >= 0:
            wr.status = status
            kd_exchange64(&qp.done, posted + 1)
            kd_store64(&qp.posted, posted + 1)
            if status != WC_SUCCESS:
                qp_set_error(qp)
            signal_local(qp.send_cq)
            return 0
        qp.rnr_deadline = 0
    # deferred: the poller of the send CQ runs it, in order
    kd_exchange64(&qp.posted, posted + 1)
    signal_local(qp.send_cq)
    return 0


cdef bint progress(kd_qp* qp) noexcept nogil:
    """Run what is deferred, as far as it goes; by the poller.  True while something stays deferred."""
    cdef uint64_t done
    cdef kd_wr* wr
    cdef int status
    cdef int64_t now
    while True:
        done = qp.done
        if <int64_t> (kd_load64(&qp.posted) - done) <= 0:
            return False
        wr = &qp.send_ring[done & qp.send_mask]
        status = WC_WR_FLUSH_ERR if kd_load32(&qp.state) != QPS_RTS else run(qp, wr)
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
        wr.status = status
        kd_store64(&qp.done, done + 1)
        if status != WC_SUCCESS and status != WC_WR_FLUSH_ERR:
            qp_set_error(qp)


# -- receiving ------------------------------------------------------------------------------------------------
cdef int qp_post_recv(kd_qp* qp, uint64_t wr_id, uint64_t local, uint32_t lkey, uint32_t length) noexcept nogil:
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
    if kd_load32(&qp.state) == QPS_ERROR:
        kd_signal(qp.recv_cq.event_fd)      # it will be flushed: let a sleeper see
    return 0


cdef inline int arrived(kd_qp* qp) noexcept nogil:
    """1: an entry is there; 0: none; -1: what is there cannot be, and the peer was cut."""
    cdef uint64_t n = qp.received
    cdef uint64_t sequence = kd_load64(&qp.in_entries[n & qp.in_mask].sequence)
    if sequence == n + 1:
        if n >= kd_load64(&qp.recv_posted):
            cut(qp, CUT_FLOOD)
            return -1
        return 1
    if sequence == (0 if n <= qp.in_mask else n - qp.in_mask):
        return 0                # what the slot held a turn ago
    cut(qp, CUT_SEQUENCE)
    return -1


cdef inline bint deliverable(kd_qp* qp) noexcept nogil:
    """An entry is there and counts: also in ERROR, since what arrived before the peer left has completed
    there; not after a failed receive, a cut or a close."""
    return qp.into != NULL and not qp.recv_failed and not qp.cut and not qp.closed and arrived(qp) == 1


cdef int take_payload(kd_qp* qp, kd_recv* r, uint32_t byte_len, uint64_t position) noexcept nogil:
    """Copy a SEND's payload into the posted receive.  A status; a forged position or length cuts."""
    cdef uint64_t ring = qp.in_ring
    cdef int status = WC_SUCCESS
    if byte_len > r.length:
        return WC_LOC_LEN_ERR
    if byte_len == 0:
        return WC_SUCCESS
    if byte_len > qp.in_max_bytes:
        cut(qp, CUT_LENGTH)
        return WC_WR_FLUSH_ERR
    if (position != qp.in_head and position != kd_round_up(qp.in_head, ring)) or (position & (ring - 1)) + byte_len > ring:
        cut(qp, CUT_POSITION)
        return WC_WR_FLUSH_ERR
    kd_exchange64(&qp.recv_busy, qp.recv_busy + 1)
    if not local_ok(qp.domain, r.lkey, r.local, byte_len, LOCAL_WRITE):
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


# -- completion queues ------------------------------------------------------------------------------------------
cdef kd_cq* cq_new(int event_fd) noexcept:
    cdef kd_cq* cq = <kd_cq*> calloc(1, sizeof(kd_cq))
    if cq != NULL:
        cq.event_fd = event_fd
    return cq


cdef void cq_free(kd_cq* cq) noexcept nogil:
    cq_detach_all(cq)
    free(cq.attachments)
    free(cq)


cdef void cq_detach_all(kd_cq* cq) noexcept nogil:
    """Drop what closed queue pairs left unpolled."""
    cdef int i
    kd_lock(&cq.lock)
    for i in range(cq.count):
        qp_unref(cq.attachments[i].qp)
    cq.count = 0
    kd_unlock(&cq.lock)


cdef int cq_attach(kd_cq* cq, kd_qp* qp, bint is_recv) noexcept nogil:
    """Let `cq` poll one side of `qp`; it holds a reference until a closed queue pair has no more."""
    cdef kd_attachment* grown
    cdef int rc = 0
    kd_lock(&cq.lock)
    if cq.count == cq.capacity:
        grown = <kd_attachment*> realloc(cq.attachments, (2 * cq.capacity + 4) * sizeof(kd_attachment))
        if grown == NULL:
            rc = ENOMEM
        else:
            cq.attachments = grown
            cq.capacity = 2 * cq.capacity + 4
    if rc == 0:
        kd_add32(&qp.refs, 1)
        cq.attachments[cq.count].qp = qp
        cq.attachments[cq.count].is_recv = is_recv
        cq.count += 1
    kd_unlock(&cq.lock)
    return rc


cdef int send_poll(kd_qp* qp, work_completion* out, int n) noexcept nogil:
    cdef int k = 0
    cdef uint64_t polled = qp.polled, done
    cdef kd_wr* wr
    cdef work_completion* wc
    if <int64_t> (kd_load64(&qp.posted) - kd_load64(&qp.done)) > 0:
        progress(qp)
    done = kd_load64(&qp.done)
    while k < n and polled != done:
        wr = &qp.send_ring[polled & qp.send_mask]
        wc = &out[k]
        wc.wr_id = wr.wr_id
        wc.status = wr.status
        wc.opcode = WC_OPCODES[wr.kind]
        wc.byte_len = wr.length if wr.status == WC_SUCCESS else 0
        wc.imm_data = 0
        wc.qp_num = qp.qp_num
        wc.has_imm = 0
        k += 1
        polled += 1
    if k:
        kd_store64(&qp.polled, polled)
    return k


cdef inline bint spent(kd_attachment* a) noexcept nogil:
    """A closed queue pair with nothing left for this CQ."""
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
    kd_lock(&cq.lock)
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
        want = n - k if n - k < QUOTA else QUOTA
        got = recv_poll(a.qp, out + k, want) if a.is_recv else send_poll(a.qp, out + k, want)
        k += got
        visits += 1
        more |= got == want
        if spent(a):
            gone = a.qp
            cq.count -= 1
            cq.attachments[i] = cq.attachments[cq.count]
            qp_unref(gone)
        else:
            i += 1
    cq.next = i
    kd_unlock(&cq.lock)
    return k


cdef int scan(kd_cq* cq, bint set_sleeping) noexcept nogil:
    """1: a completion or an error is there; 2: something is deferred (may be combined)."""
    cdef int i, r = 0
    cdef uint32_t errors
    cdef kd_qp* qp
    kd_lock(&cq.lock)
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
        else:
            if <int64_t> (kd_load64(&qp.posted) - kd_load64(&qp.done)) > 0 and progress(qp):
                r |= 2
            if qp.polled != kd_load64(&qp.done):
                r |= 1
                break
    errors = kd_load32(&cq.errors)
    if errors != cq.errors_seen:
        cq.errors_seen = errors
        r |= 1
    kd_unlock(&cq.lock)
    return r


cdef bint cq_arm(kd_cq* cq) noexcept nogil:
    kd_drain_signal(cq.event_fd)
    kd_exchange32(&cq.armed, 1)
    return scan(cq, True) != 0      # what is deferred needs polls, so it counts as there


cdef int cq_wait(kd_cq* cq, int64_t deadline, int64_t spin_until) noexcept nogil:
    """1 ready, 0 timeout, WAIT_WOKEN, WAIT_INTERRUPTED (call again), -ECHILD, -EBADF (closed).
    `deadline` in ns of the monotonic clock, or negative for none."""
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
        kd_exchange32(&cq.armed, 1)
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
