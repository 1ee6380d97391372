"""C interface of the engine of the shm provider: see shm_core.pyx.

Everything here is private memory of one process.  What two processes share is in shm_ring.h.
"""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from kdirect.machine cimport *
from kdirect.rdma.contract cimport work_completion


cdef extern from "shm_ring.h" nogil:
    enum:
        KD_SHM_VERSION
        KD_KEY_INDEX_BITS
        KD_KEYS
        KD_KEY_INDEX_MASK
        KD_KEY_TABLE_BYTES
        KD_MSG_MAGIC
        KD_MSG_ANNOUNCE
        KD_MSG_REVOKE
        KD_MSG_READY
        KD_MSG_FLAG_SWEEP
    uint64_t KD_MAX_MESSAGE_BYTES

    ctypedef struct kd_direction:
        uint64_t busy
        uint64_t posted
        uint64_t byte_head
        uint32_t sleeping
    ctypedef struct kd_entry:
        uint64_t sequence
        uint64_t byte_position
        uint32_t opcode
        uint32_t byte_len
        uint32_t imm_data
    ctypedef struct kd_direction_layout:
        uint64_t lengths
        uint64_t entries
        uint64_t payload
        uint64_t end
    ctypedef struct kd_message:
        uint32_t magic
        unsigned short type
        unsigned short flags
        uint32_t rkey
        uint32_t access
        uint64_t address
        uint64_t length
        uint64_t position

    uint32_t kd_load32(const uint32_t*)
    uint64_t kd_load64(const uint64_t*)
    void* kd_load_pointer(void**)
    void kd_store32(uint32_t*, uint32_t)
    void kd_store64(uint64_t*, uint64_t)
    void kd_store_pointer(void**, void*)
    uint32_t kd_exchange32(uint32_t*, uint32_t)
    uint64_t kd_exchange64(uint64_t*, uint64_t)
    uint32_t kd_add32(uint32_t*, uint32_t)
    uint64_t kd_fetch_add(uint64_t*, uint64_t)
    uint64_t kd_compare_swap(uint64_t*, uint64_t, uint64_t)
    int kd_cas32(uint32_t*, uint32_t, uint32_t)
    void kd_fence()
    void kd_copy_past_caches(uint8_t* to, const uint8_t* source, size_t n)
    void kd_compiler_fence()
    int kd_register_fences()
    void kd_heavy_fence(int asymmetric, int everywhere)
    void kd_backoff(unsigned int n)
    void kd_lock(uint32_t*)
    void kd_unlock(uint32_t*)
    uint64_t kd_round_up(uint64_t, uint64_t)
    uint64_t kd_power_of_two(uint64_t)
    void kd_pair_layout(uint64_t start, uint32_t cap, uint64_t ring, kd_direction_layout* out)
    uint64_t kd_payload_ring_bytes(uint32_t cap, uint32_t max_send_bytes)
    void kd_fill_completion(void* out, uint64_t wr_id, uint32_t status, uint32_t opcode,
                            uint32_t byte_len,
                            uint32_t imm_data, uint32_t qp_num, uint32_t has_imm)
    int kd_send_message(int sock, const kd_message*, int fd)
    int kd_receive_message(int sock, kd_message*, int* fd)
    int kd_peer_left(int sock)
    void kd_signal(int)
    void kd_drain_signal(int)
    int sched_yield()

cdef enum:
    # kinds of send-side work requests
    KIND_READ = 0
    KIND_WRITE = 1
    KIND_WRITE_IMM = 2
    KIND_SEND = 3
    KIND_FETCH_ADD = 4
    KIND_COMPARE_SWAP = 5
    # results of cq_wait in addition to 0 (timeout) and 1 (ready)
    WAIT_WOKEN = 2
    WAIT_INTERRUPTED = 3
    # flags of link_drain
    LINK_READY = 1
    LINK_LEFT = 2
    # why a peer was cut
    CUT_SEQUENCE = 1
    CUT_FLOOD = 2
    CUT_LENGTH = 3
    CUT_POSITION = 4
    CUT_CREDITS = 5
    CUT_OPCODE = 6

ctypedef struct kd_wr:
    # one send-side work request: on the poster's stack, or in the ring of deferred ones
    uint64_t wr_id
    uint64_t local
    uint64_t remote
    uint64_t arg0
    uint64_t arg1
    uint32_t lkey
    uint32_t rkey
    uint32_t length
    uint32_t kind

ctypedef struct kd_inline:
    # bytes of a WRITE_WITH_IMM that come from elsewhere; the poster's, and read during the post
    # alone
    const uint8_t* data
    uint32_t at             # from which byte of the request on
    uint32_t length

ctypedef struct kd_done:
    # a send-side completion that waits to be polled
    uint64_t wr_id
    uint64_t result         # byte_len | status << 32 | opcode << 48

ctypedef struct kd_recv:
    uint64_t wr_id
    uint64_t local
    uint32_t lkey
    uint32_t length

ctypedef struct kd_local:
    # a registered region, as its own process checks it; `key` 0: free or ended
    uint32_t key
    uint32_t access
    uint64_t address
    uint64_t length
    uint64_t reserved       # two a cache line

ctypedef struct kd_domain:
    uint32_t refs
    uint32_t forked
    uint32_t forks          # `forks` when it was made: what was mapped then is not in a child
    int keys_fd
    uint32_t* keys          # the shared key table, mapped writable here
    kd_local* locals        # KD_KEYS of them

ctypedef struct kd_mapping:
    # a mapped stretch of a file, shared by every remote region in it
    uint64_t device
    uint64_t inode
    uint64_t start
    uint64_t bytes
    uint8_t* base
    uint32_t refs
    uint32_t writable
    uint32_t forks          # as in kd_domain
    kd_mapping* next

ctypedef struct kd_remote:
    # a peer's region, as announced
    uint32_t rkey
    uint32_t access
    uint64_t address
    uint64_t length
    uint8_t* base           # where the byte at `address` is mapped here
    kd_mapping* mapping

ctypedef struct kd_cq:
    # what every poll touches
    uint32_t polling        # the poller is inside; with `changing`, guards the attachments
    uint32_t changing
    uint32_t light          # this process is registered for heavy fences
    uint32_t forked
    uint32_t armed          # a local completion must signal `event_fd`
    uint32_t errors         # queue pairs that went to ERROR, ever
    int count
    int next
    kd_attachment* attachments
    # the rest
    uint32_t guard          # of pollers that come from Python
    uint32_t lock           # of the thread that changes the attachments
    uint32_t wake
    uint32_t errors_seen
    uint32_t closed
    int event_fd
    int capacity

ctypedef struct kd_attachment:
    kd_qp* qp
    uint32_t is_recv

ctypedef struct kd_qp:
    # Cache lines in the order in which a READ and its poll touch them: after a large copy each of
    # them is a miss.  (An address ending in 64-byte lines: qp_new aligns.) line 0: constant while
    # in RTS
    uint32_t state
    uint32_t light          # both processes are registered for heavy fences
    uint32_t max_send_wr
    uint32_t qp_num
    uint64_t send_mask
    kd_done* done_ring
    kd_direction* out
    uint32_t* peer_keys     # mapped read-only
    void** remotes          # KD_KEYS of kd_remote*
    kd_local* locals        # of the domain
    # line 1: the posting thread's `posted`, the send poller's `polled`; the others are the
    # executor's: the posting thread while nothing is deferred, else the thread that has set
    # `progressing`
    uint64_t posted
    uint64_t polled
    uint64_t done           # work requests that ran
    uint64_t busy           # private copy of out.busy
    uint64_t reads
    uint64_t read_bytes
    uint64_t sent           # entries sent
    uint64_t credits        # value of out.posted last read
    # line 2: receiving; `recv_posted` is the receive poster's, `received` and `recv_failed` the
    # receive poller's
    kd_direction* into
    kd_entry* in_entries
    uint64_t in_mask
    uint64_t received
    uint64_t recv_posted
    uint32_t recv_lock
    uint32_t recv_failed
    uint32_t cut
    uint32_t closed         # close() was called: nothing arrives any more, the rest is flushed
    kd_cq* send_cq
    # line 3 and on: entries and payloads
    kd_entry* out_entries
    uint64_t out_mask
    uint64_t writes
    uint64_t write_bytes
    uint64_t wakeups
    uint64_t sends
    uint64_t atomics
    int64_t rnr_deadline
    kd_wr* send_ring        # deferred requests
    uint32_t progressing    # a thread runs deferred requests
    uint32_t* out_lengths
    uint8_t* out_payload
    uint64_t out_ring
    uint64_t byte_tail
    uint64_t byte_head      # value of out.byte_head last read
    uint64_t byte_floor     # nothing before it is unread: where the ring restarted last
    kd_recv* recv_ring
    uint64_t recv_mask
    uint32_t* in_lengths
    uint8_t* in_payload
    uint64_t in_ring
    uint64_t in_head
    uint64_t recv_busy      # odd while a payload is being copied
    uint64_t receives
    uint32_t in_max_bytes
    # fixed at creation
    uint32_t refs
    uint32_t max_recv_wr
    uint32_t max_send_bytes
    uint32_t forked
    int64_t rnr_timeout_ns
    kd_domain* domain
    kd_cq* recv_cq
    # the link
    uint32_t link_flags     # sticky LINK_*
    uint32_t need_sweep
    uint32_t map_failures
    uint32_t remotes_end    # indices from here on were never used
    uint32_t remotes_shut
    int sock                # borrowed from the Python object; guarded by link_mutex
    int peer_event_fd       # owned
    int service_fd          # borrowed: kicks the service thread
    uint8_t* pair
    uint64_t pair_bytes
    pthread_mutex_t link_mutex

# mappings and views
cdef void mapping_release(kd_mapping* m) noexcept nogil
cdef void mapping_hold(kd_mapping* m) noexcept nogil
cdef void mapping_keep_in_forks(kd_mapping* m) noexcept nogil
# life
cdef bint fences_register() noexcept nogil
cdef void fences_forbid(bint forbidden) noexcept
cdef kd_domain* domain_new() noexcept
cdef void domain_unref(kd_domain* d) noexcept nogil
cdef kd_qp* qp_new(kd_domain* d, kd_cq* send_cq, kd_cq* recv_cq, uint32_t qp_num,
                   uint32_t max_send_wr, uint32_t max_recv_wr, uint32_t max_send_bytes,
                   int64_t rnr_timeout_ns) noexcept
cdef void qp_unref(kd_qp* qp) noexcept nogil
cdef kd_cq* cq_new(int event_fd) noexcept
cdef void cq_free(kd_cq* cq) noexcept nogil
cdef int cq_attach(kd_cq* cq, kd_qp* qp, bint is_recv) noexcept nogil
cdef void cq_detach_all(kd_cq* cq) noexcept nogil
cdef void change_enter(kd_cq* cq) noexcept nogil
cdef void change_leave(kd_cq* cq) noexcept nogil
# connection
cdef uint64_t pair_bytes(uint32_t passive_recv_wr, uint32_t active_send_bytes,
                         uint32_t active_recv_wr, uint32_t passive_send_bytes) noexcept nogil
cdef int qp_map_pair(kd_qp* qp, int memfd, int keys_fd, bint active, bint peer_light,
                     uint32_t peer_recv_wr, uint32_t peer_send_bytes) noexcept nogil
cdef void qp_set_ready(kd_qp* qp) noexcept nogil
cdef void qp_set_error(kd_qp* qp) noexcept nogil
cdef void qp_quiesce(kd_qp* qp) noexcept nogil
cdef int link_drain(kd_qp* qp) noexcept nogil
cdef void link_forget_remotes(kd_qp* qp) noexcept nogil
cdef int link_send(kd_qp* qp, const kd_message* m, int fd, int64_t timeout_ns) noexcept nogil
cdef int wait_out_of_reach(kd_qp** qps, int n, int64_t timeout_ns) noexcept nogil
cdef void forked_child() noexcept nogil
