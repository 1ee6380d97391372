"""Peers, heads, grants and their acknowledgement rings: see produce_tables.pyx."""
from cpython.ref cimport PyObject
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.broker.order cimport head_t
from kdirect.log.kernel cimport CommitKernel, commit_result
from kdirect.machine cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock)
from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair

cdef enum:
    BATCH = 64            # completions worked off under one lock
    PEERS = 8192          # size of the open-addressed peer table: a power of two, at most half full
    FILES = 65536         # file ids are 16 bits
    GRANT_ACTIVE = 1
    GRANT_RETIRED = 2     # takes no more requests; its owner in Python still has to release it

    # why a peer is cut
    CUT_NONE = 0
    CUT_DISCONNECTED = 1
    CUT_FORGED_FILE = 2
    CUT_BAD_ORDER = 3
    CUT_NOT_A_PRODUCE = 4
    CUT_ACK_OVERRUN = 5
    CUT_BAD_LENGTH = 6
    CUT_DESYNCHRONISED = 7
    CUT_NOT_AN_ANSWER = 8

cdef struct peer_t:
    uint32_t qp_num       # 0: free; freed entries keep the probe chain alive by `used`
    uint8_t used
    uint8_t cut           # CUT_*
    uint8_t untold        # its cut was not reported yet
    uint32_t receives     # kept posted; receive i takes a notice into entry i of `notices`
    uint32_t notices_lkey
    uint64_t notices      # address of their memory
    PyObject* qp          # borrowed, as is that memory; ProduceWorker._peers keeps them alive
    PyObject* link        # borrowed: it is a follower, which is pushed to (push_tables); NULL: not

cdef struct grant_t:
    uint8_t state
    uint8_t dirty         # acknowledgements staged and not posted
    uint8_t leader_only   # acks=1: acknowledged by this broker alone, whatever replicas have
    uint16_t file_id
    uint32_t qp_num
    uint32_t pending      # arrived and not answered
    uint64_t ack_address
    uint32_t ack_rkey
    uint32_t staging_lkey
    uint64_t entries      # of the ring; a power of two
    uint64_t staged       # entries ever staged
    uint64_t posted       # entries ever posted
    uint64_t completed    # entries whose WRITE has completed
    uint64_t staging_address
    # Acknowledgements wait until the high watermark has passed their records, where commits do not
    # move it: entry i of the staging until it is `ends[i]`, all of them until it is `end_offset`
    # (0: none waits).  The grant's own memory, NULL before the first that waits.
    int64_t* ends
    int64_t end_offset
    uint8_t listed        # in ProduceTables._held
    # Borrowed, as is the queue pair; ProduceWorker._grants keeps them alive.
    head_t* head          # NULL: it is a member's, and `slot` its CommitSlot (offset_tables)
    PyObject* slot
    PyObject* qp

cdef struct broker_answer_t:  # an answer to one of the broker's own requests
    # Borrowed; a head stays in ProduceTables._heads until its last answer is taken.
    PyObject* head
    uint16_t order
    commit_result result


cdef class ProduceHead:
    cdef head_t h
    cdef readonly CommitKernel kernel
    cdef dict _broker_requests     # order -> bytes of the broker's own requests, until their turn
    cdef public object owner

cdef class ProduceTables:
    cdef pthread_mutex_t _lock
    cdef grant_t** _table
    cdef peer_t _peer_table[PEERS]
    cdef CompletionQueue _send_cq
    cdef dict _grants              # file id -> objects that the grant borrows
    cdef dict _peers               # qp number -> queue pair and the region of its notices
    cdef set _heads
    cdef head_t** _open            # the same, to be walked without the GIL
    cdef int _open_count, _open_capacity
    cdef uint16_t _touched[BATCH]  # file ids with staged acknowledgements
    cdef int _touched_count
    cdef int _cut_count            # peers whose cut was not reported yet
    cdef broker_answer_t* _broker_answers
    cdef int _broker_answer_count, _broker_answer_capacity
    cdef uint64_t _acks, _ack_writes, _outstanding
    cdef head_t* _noted            # the first of the heads of which there is something to report
    cdef readonly uint64_t heads_reported  # how often a head was taken from that list
    cdef uint16_t* _held           # file ids of grants whose acknowledgements wait
    cdef int _held_count, _held_capacity
    cdef int _followed             # heads of replicas with a slot of their leader's
    cdef dict _pushings            # kernel -> Pushing of a partition that has followers
    cdef dict _pushed_elsewhere    # the same, of those that another worker pushes
    cdef bint _kick                # a head has requests to commit that came from another thread
    cdef bint _backlog             # some acknowledgements wait for room in a send queue

    cdef peer_t* _find_peer(self, uint32_t qp_num) noexcept nogil
    cdef bint _peer_alive(self, uint32_t qp_num) noexcept nogil
    cdef void _cut_peer(self, peer_t* peer, int why) noexcept nogil
    cdef void _note(self, head_t* h) noexcept nogil
    cdef list _take_noted(self)
    cdef list _answers_of(self, ProduceHead head)
    cdef void _keep_answer(self, head_t* h, const commit_result* result) noexcept nogil
    cdef void _notice(self, grant_t* g, uint16_t flags) noexcept nogil
    cdef void _revoke_members(self, head_t* h) noexcept nogil
    cdef void _stage(self, grant_t* g, uint16_t order, int16_t error, uint16_t flags,
                     uint16_t batches, int64_t base_offset, int64_t log_append_time) noexcept nogil
    cdef void _wait_until(self, grant_t* g, int64_t end_offset) noexcept nogil
    cdef void _release_held(self) noexcept nogil
    cdef uint64_t _may_post(self, grant_t* g) noexcept nogil
    cdef void _hold(self, grant_t* g) noexcept nogil
    cdef void _hold_no_more(self, grant_t* g) noexcept nogil
    cdef _enter_peer(self, QueuePair qp, int receives, MemoryRegion notices, link)
    cdef void _post_acks(self, grant_t* g) noexcept nogil
    cdef void _drain_sends(self) noexcept nogil
    cdef void _reap_sends(self) noexcept nogil
    cdef int _take_sends(self) noexcept nogil
    cdef void _flush_acks(self) noexcept nogil
    cdef void _flush_backlog(self) noexcept nogil
