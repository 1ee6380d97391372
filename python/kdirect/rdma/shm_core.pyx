# cython: language_level=3, boundscheck=False, wraparound=False
"""Engine of the shm provider, control side: life of the structs, mappings, links, revocation.

Law of the room: plain structs and nogil functions; no Python object is touched and the GIL is never
taken (a caller may hold it).  What a peer announces is checked before it is mapped.

Fence between copies and revocation: the executor (shm_work) makes `busy` odd, fences (light), then
checks state and keys, copies, and makes `busy` even.  A thread that takes something away
(deregister, close, unmap) first makes it invisible, then fences (heavy), then waits until it has
seen `busy` even or changed.

Locks, in the order in which they may be nested: inside a CQ > link mutex > mapping cache.  The
executor is never busy while it waits for the link mutex.
"""

from libc.errno cimport EAGAIN, EINVAL, ENOMEM, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from kdirect.rdma.contract cimport QPS_ERROR, QPS_INIT, QPS_RTS, REMOTE_ATOMIC, REMOTE_WRITE

cdef extern from "huge_map.h" nogil:
    void* kd_map_shared(int fd, size_t length, int protection, int64_t position)

cdef extern from "shm_ring.h" nogil:
    enum:
        PROT_READ
        PROT_WRITE
        MAP_SHARED
        MAP_PRIVATE
        MAP_ANONYMOUS
        MAP_NORESERVE
        MADV_DONTFORK
        MADV_DOFORK
        POLLOUT
        MFD_CLOEXEC
        MFD_ALLOW_SEALING
        F_ADD_SEALS
        F_GET_SEALS
        F_SEAL_SHRINK
        F_SEAL_GROW
        ETOOMANYREFS
    void* MAP_FAILED
    void* aligned_alloc(size_t, size_t)
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
    int nanosleep(const timespec*, timespec*)

cdef enum:
    MAPPING_BUCKETS = 1024

# Mappings of peers' files, one cache a process; an entry lives while a kd_remote refers to it.
cdef kd_mapping* mappings[MAPPING_BUCKETS]
cdef pthread_mutex_t mappings_mutex
pthread_mutex_init(&mappings_mutex, NULL)


# This process is registered for heavy fences; set when a device opens.  `asymmetric`: and new
# queues may be light.
cdef bint registered = False
cdef bint asymmetric = False
cdef bint fences_forbidden = False
# How many forks lie between this process and the first one.
cdef uint32_t forks = 0


cdef bint fences_register() noexcept nogil:
    """May this process use light fences?  (Called in every process that opens a device.)  The first
    time it waits for all processors, for tens of milliseconds."""
    global asymmetric, registered
    registered = registered or kd_register_fences() != 0
    asymmetric = registered and not fences_forbidden
    return asymmetric


cdef void fences_forbid(bint forbidden) noexcept:
    global fences_forbidden
    fences_forbidden = forbidden


cdef void forked_child() noexcept nogil:
    """In a forked child: the parent's mappings are not here (MADV_DONTFORK), its mutex may be
    taken."""
    global registered, forks
    registered = False
    forks += 1
    memset(mappings, 0, sizeof(mappings))
    pthread_mutex_init(&mappings_mutex, NULL)


cdef void* anonymous(size_t n) noexcept nogil:
    """Zeroed private pages that cost nothing until they are touched."""
    cdef void* p = mmap(NULL, n, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    return NULL if p == MAP_FAILED else p


cdef void* lines(size_t n) noexcept nogil:
    """Zeroed memory that starts at a cache line; for free()."""
    cdef void* p = aligned_alloc(64, kd_round_up(n, 64))
    if p != NULL:
        memset(p, 0, n)
    return p


# -- protection domains ----------------------------------------------------------------------------
cdef kd_domain* domain_new() noexcept:
    cdef kd_domain* d = <kd_domain*> calloc(1, sizeof(kd_domain))
    cdef void* p
    if d == NULL:
        return NULL
    d.refs = 1
    d.forks = forks
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
    if d.keys != NULL and d.forks == forks:
        munmap(d.keys, KD_KEY_TABLE_BYTES)
    if d.locals != NULL:
        munmap(d.locals, KD_KEYS * sizeof(kd_local))
    if d.keys_fd >= 0:
        close(d.keys_fd)
    free(d)


# -- mappings of peers' files ----------------------------------------------------------------------
cdef uint8_t* mapping_acquire(int fd, uint64_t position, uint64_t length, uint32_t writable,
                              kd_mapping** out) noexcept nogil:
    """Where byte `position` of the file of `fd` is mapped, together with `length` bytes; NULL
    when it cannot be.  Every successful call is paired with one mapping_release()."""
    cdef stat_t st
    cdef uint64_t start, end
    cdef kd_mapping* m
    cdef void* p
    cdef int bucket
    if fstat(fd, &st) != 0 or not S_ISREG(st.st_mode):
        return NULL
    # Touching pages beyond the end of a file would be SIGBUS.
    if length > <uint64_t> st.st_size or position > <uint64_t> st.st_size - length:
        return NULL
    start = position & ~<uint64_t> 4095
    end = (position + length + 4095) & ~<uint64_t> 4095
    bucket = <int> ((st.st_ino ^ st.st_dev) % MAPPING_BUCKETS)
    pthread_mutex_lock(&mappings_mutex)
    m = mappings[bucket]
    while m != NULL:
        if (m.inode == st.st_ino and m.device == st.st_dev and m.writable == writable
                and m.start <= start and m.start + m.bytes >= end):
            break
        m = m.next
    if m == NULL:
        m = <kd_mapping*> calloc(1, sizeof(kd_mapping))
        p = MAP_FAILED
        if m != NULL:
            p = kd_map_shared(fd, end - start, (PROT_READ | PROT_WRITE) if writable else PROT_READ,
                              <long> start)
            # huge pages: a part of the file may start anywhere but there
            if p == MAP_FAILED and errno == EINVAL:
                start = 0
                end = st.st_size
                p = kd_map_shared(fd, end, (PROT_READ | PROT_WRITE) if writable else PROT_READ, 0)
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
        m.forks = forks
        m.next = mappings[bucket]
        mappings[bucket] = m
    m.refs += 1
    out[0] = m
    pthread_mutex_unlock(&mappings_mutex)
    return m.base + (position - m.start)


cdef void mapping_hold(kd_mapping* m) noexcept nogil:
    """One more reference to a mapping that somebody holds now."""
    pthread_mutex_lock(&mappings_mutex)
    m.refs += 1
    pthread_mutex_unlock(&mappings_mutex)


cdef void mapping_release(kd_mapping* m) noexcept nogil:
    cdef kd_mapping** link
    if m.forks != forks:
        return                  # the parent's, which is neither mapped nor listed here
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


cdef void mapping_keep_in_forks(kd_mapping* m) noexcept nogil:
    """Processes that are forked from now on have it, too.  There it belongs to nobody."""
    madvise(m.base, m.bytes, MADV_DOFORK)


# -- queue pairs: life -----------------------------------------------------------------------------
cdef kd_qp* qp_new(kd_domain* d, kd_cq* send_cq, kd_cq* recv_cq, uint32_t qp_num,
                   uint32_t max_send_wr, uint32_t max_recv_wr, uint32_t max_send_bytes,
                   int64_t rnr_timeout_ns) noexcept:
    cdef kd_qp* qp = <kd_qp*> lines(sizeof(kd_qp))
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
    qp.locals = d.locals
    kd_add32(&d.refs, 1)
    qp.send_cq = send_cq
    qp.recv_cq = recv_cq
    qp.state = QPS_INIT
    qp.sock = qp.peer_event_fd = qp.service_fd = -1
    pthread_mutex_init(&qp.link_mutex, NULL)
    qp.send_ring = <kd_wr*> calloc(qp.send_mask + 1, sizeof(kd_wr))
    qp.done_ring = <kd_done*> lines((qp.send_mask + 1) * sizeof(kd_done))
    qp.recv_ring = <kd_recv*> calloc(qp.recv_mask + 1, sizeof(kd_recv))
    qp.remotes = <void**> anonymous(KD_KEYS * sizeof(void*))
    if qp.send_ring == NULL or qp.done_ring == NULL or qp.recv_ring == NULL or qp.remotes == NULL:
        qp_unref(qp)
        return NULL
    return qp


cdef void qp_unref(kd_qp* qp) noexcept nogil:
    """The last reference (the Python object's, or a CQ's that still had completions) frees the
    queue pair and unmaps the pair memory."""
    if kd_add32(&qp.refs, <uint32_t> -1) != 1:
        return
    if qp.domain.forks == forks:
        link_forget_remotes(qp)
        if qp.pair != NULL:
            munmap(qp.pair, qp.pair_bytes)
        if qp.peer_keys != NULL:
            munmap(qp.peer_keys, KD_KEY_TABLE_BYTES)
    if qp.peer_event_fd >= 0:
        close(qp.peer_event_fd)
    if qp.remotes != NULL:
        munmap(qp.remotes, KD_KEYS * sizeof(void*))
    pthread_mutex_destroy(&qp.link_mutex)
    domain_unref(qp.domain)
    free(qp.send_ring)
    free(qp.done_ring)
    free(qp.recv_ring)
    free(qp)


cdef uint64_t pair_bytes(uint32_t passive_recv_wr, uint32_t active_send_bytes,
                         uint32_t active_recv_wr, uint32_t passive_send_bytes) noexcept nogil:
    """Size of the pair memory of two queue pairs with these limits."""
    cdef kd_direction_layout a, b
    cdef uint32_t cap
    cap = <uint32_t> kd_power_of_two(passive_recv_wr)
    kd_pair_layout(kd_round_up(2 * sizeof(kd_direction), 4096), cap,
                   kd_payload_ring_bytes(cap, active_send_bytes), &a)
    cap = <uint32_t> kd_power_of_two(active_recv_wr)
    kd_pair_layout(a.end, cap, kd_payload_ring_bytes(cap, passive_send_bytes), &b)
    return b.end


cdef bint holds_for_ever(int fd, uint64_t length) noexcept nogil:
    """Whether the file has `length` bytes and is sealed against resizing: otherwise its peer could
    make our loads fail with SIGBUS."""
    cdef int need = F_SEAL_SHRINK | F_SEAL_GROW
    cdef stat_t st
    if fstat(fd, &st) != 0 or <uint64_t> st.st_size < length:
        return False
    return (fcntl(fd, F_GET_SEALS) & need) == need


cdef int qp_map_pair(kd_qp* qp, int memfd, int keys_fd, bint active, bint peer_light,
                     uint32_t peer_recv_wr, uint32_t peer_send_bytes) noexcept nogil:
    """Map the pair memory and the peer's key table (the descriptors stay the caller's), and publish
    the receives posted so far.  0 or an errno; EINVAL: they are not what this build makes."""
    cdef kd_direction_layout forward, back
    cdef kd_direction_layout* mine
    cdef kd_direction_layout* theirs
    cdef uint32_t my_cap = <uint32_t> (qp.recv_mask + 1)
    cdef uint32_t peer_cap = <uint32_t> kd_power_of_two(peer_recv_wr)
    cdef uint64_t my_ring = kd_payload_ring_bytes(my_cap, peer_send_bytes)
    cdef uint64_t peer_ring = kd_payload_ring_bytes(peer_cap, qp.max_send_bytes)
    cdef uint64_t start = kd_round_up(2 * sizeof(kd_direction), 4096), n
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
    if not holds_for_ever(memfd, n) or not holds_for_ever(keys_fd, KD_KEY_TABLE_BYTES):
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
    qp.light = asymmetric and peer_light
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
    """To ERROR: nothing new starts; what is outstanding is flushed by the pollers, sleepers wake,
    and the service thread tells the peer once the executor has left."""
    if kd_exchange32(&qp.state, QPS_ERROR) == QPS_ERROR:
        return
    # a receive posted before is seen by whoever the events wake
    kd_heavy_fence(registered, False)
    error_event(qp.send_cq)
    if qp.recv_cq != qp.send_cq:
        error_event(qp.recv_cq)
    kd_signal(qp.service_fd)


cdef void wait_passed(uint64_t* busy) noexcept nogil:
    """After a heavy fence: wait until what was running under `busy` (of this process) has ended."""
    cdef uint64_t seen
    cdef int n = 0
    seen = kd_load64(busy)
    if seen & 1:
        while kd_load64(busy) == seen:
            n += 1
            kd_backoff(n)


cdef void qp_quiesce(kd_qp* qp) noexcept nogil:
    """After qp_set_error: wait until neither executor nor receive poller touches anybody's memory,
    and until nobody who waits for receives completes a request any more: `send_cq` may be closed
    then."""
    cdef int n = 0
    kd_heavy_fence(registered, False)
    wait_passed(&qp.busy)
    wait_passed(&qp.recv_busy)
    while kd_load32(&qp.progressing):
        n += 1
        kd_backoff(n)


# -- links: announcements of the peer's regions ----------------------------------------------------
cdef void remote_retire(kd_qp* qp, uint32_t index) noexcept nogil:
    """Unpublish and unmap the region at `index`; under the link mutex."""
    cdef kd_remote* r = <kd_remote*> qp.remotes[index]
    if r == NULL:
        return
    kd_store_pointer(&qp.remotes[index], NULL)
    kd_heavy_fence(registered, False)
    wait_passed(&qp.busy)
    mapping_release(r.mapping)
    free(r)


cdef bint remote_add(kd_qp* qp, const kd_message* m, int fd) noexcept nogil:
    """Map and publish what the peer announced; under the link mutex.  False: it cannot be, its key
    stays unknown."""
    cdef kd_remote* r
    cdef uint32_t index = m.rkey & KD_KEY_INDEX_MASK
    if m.rkey == 0 or m.length == 0 or m.address > <uint64_t> -1 - m.length:
        return False
    if m.position > <uint64_t> (1ull << 62) or m.length > <uint64_t> (1ull << 62):
        return False
    r = <kd_remote*> lines(sizeof(kd_remote))
    if r == NULL:
        return False
    r.rkey = m.rkey
    r.access = m.access
    r.address = m.address
    r.length = m.length
    r.base = mapping_acquire(fd, m.position, m.length,
                             (m.access & (REMOTE_WRITE | REMOTE_ATOMIC)) != 0, &r.mapping)
    if r.base == NULL:
        free(r)
        return False
    remote_retire(qp, index)
    if index >= qp.remotes_end:
        qp.remotes_end = index + 1
    kd_store_pointer(&qp.remotes[index], r)
    return True


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
        if m.type == KD_MSG_ANNOUNCE:
            if not qp.remotes_shut and (fd < 0 or not remote_add(qp, &m, fd)):
                qp.map_failures += 1
                kd_signal(qp.service_fd)
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
    """Send one control message; when the peer's side is full, wait at most `timeout_ns`.  0 or an
    errno."""
    cdef int64_t deadline = 0
    cdef pollfd p
    cdef int rc
    while True:
        rc = kd_send_message(qp.sock, m, fd)
        if (rc != EAGAIN and rc != ETOOMANYREFS) or timeout_ns <= 0:
            return rc
        if deadline == 0:
            deadline = kd_now_ns() + timeout_ns
        elif kd_now_ns() > deadline:
            return rc
        p.fd = qp.sock
        p.events = POLLOUT
        p.revents = 0
        if rc == EAGAIN:
            poll(&p, 1, 10)
        # too many descriptors on their way for this user: they arrive as the peers take them in
        else:
            poll(&p, 0, 1)


cdef bint left(kd_qp* qp) noexcept nogil:
    cdef bint gone
    if kd_load32(&qp.link_flags) & LINK_LEFT:
        return True
    pthread_mutex_lock(&qp.link_mutex)
    gone = qp.sock < 0 or kd_peer_left(qp.sock) != 0
    pthread_mutex_unlock(&qp.link_mutex)
    return gone


cdef int wait_out_of_reach(kd_qp** qps, int n, int64_t timeout_ns) noexcept nogil:
    """After keys were taken away: wait until no request of these queue pairs, or of their peers,
    that started before is still running.  1, or 0 on timeout.  A peer that left runs nothing."""
    cdef int i, spins = 0
    cdef int64_t deadline = kd_now_ns() + timeout_ns
    cdef uint64_t seen
    cdef kd_qp* qp
    cdef timespec nap
    nap.tv_sec = 0
    nap.tv_nsec = 50000
    kd_heavy_fence(registered, True)
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


# -- completion queues: life -----------------------------------------------------------------------
cdef kd_cq* cq_new(int event_fd) noexcept:
    cdef kd_cq* cq = <kd_cq*> lines(sizeof(kd_cq))
    if cq != NULL:
        cq.event_fd = event_fd
        cq.light = fences_register()
    return cq


cdef void cq_free(kd_cq* cq) noexcept nogil:
    cq_detach_all(cq)
    free(cq.attachments)
    free(cq)


cdef void change_enter(kd_cq* cq) noexcept nogil:
    cdef int n = 0
    kd_lock(&cq.lock)
    kd_store32(&cq.changing, 1)
    kd_heavy_fence(cq.light, False)
    while kd_load32(&cq.polling):
        n += 1
        kd_backoff(n)


cdef void change_leave(kd_cq* cq) noexcept nogil:
    kd_store32(&cq.changing, 0)
    kd_unlock(&cq.lock)


cdef void cq_detach_all(kd_cq* cq) noexcept nogil:
    """Drop what closed queue pairs left unpolled.  (In a forked child nobody is inside, whatever
    the flags say.)"""
    cdef int i
    if not cq.forked:
        change_enter(cq)
    for i in range(cq.count):
        qp_unref(cq.attachments[i].qp)
    cq.count = 0
    if not cq.forked:
        change_leave(cq)


cdef int cq_attach(kd_cq* cq, kd_qp* qp, bint is_recv) noexcept nogil:
    """Let `cq` poll one side of `qp`; it holds a reference until a closed queue pair has no more.
    """
    cdef kd_attachment* grown
    cdef int rc = 0
    change_enter(cq)
    if cq.count == cq.capacity:
        grown = <kd_attachment*> realloc(cq.attachments,
                                         (2 * cq.capacity + 4) * sizeof(kd_attachment))
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
    change_leave(cq)
    return rc
