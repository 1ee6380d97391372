"""The order of produce requests of one head file: see order.pyx."""
from cpython.ref cimport PyObject
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport work_completion

cdef enum:
    # life of a head
    HEAD_OPEN = 0
    HEAD_DRAINED = 1          # everything below its end is committed, and nothing more will be
    HEAD_ABORTED = 2          # what has not been committed will not be
    HEAD_CLOSED = 3           # ended by its owner
    # Granted while the head before it is being filled: requests arrive, and wait until it is the
    # head.
    HEAD_AHEAD = 4
    # A replica's: a request brings a new leader epoch, which its owner has to note first.  Requests
    # arrive, and wait.
    HEAD_WAITING = 5

    NO_NEWS = 0
    NEWS = 1                  # of a state that the worker has not noticed yet
    NEWS_TO_TELL = 2          # that its owner has not been told of yet

    # results of order_arrived
    ARRIVED = 0
    ARRIVED_TWICE = 1         # a request of that order is there already, or is committed
    ARRIVED_FAR = 2           # further ahead than all producers together may be

    # why a head was aborted
    WHY_HOLE = 1
    WHY_DAMAGED = 2
    WHY_NO_ROOM = 3
    WHY_FENCED = 4
    WHY_REFUSED = 5

cdef struct arrived_t:
    # The broker's own request: its bytes, copied into the head at its turn.  NULL: they lie there
    # already.
    const uint8_t* data
    uint32_t length           # 0: not arrived
    uint16_t file_id          # whose acknowledgement; 0: nobody's
    uint8_t checked           # the kernel's `check` has passed the broker's own request
    uint8_t marker            # that request is a marker of a transaction's coordinator

cdef struct head_t:
    uint8_t state
    uint8_t why
    uint8_t shared
    uint8_t draining          # somebody waits until everything reserved is committed
    uint8_t has_end           # end_order is known
    uint8_t news
    uint8_t touched
    uint8_t gate_asked        # the owner was, or is to be, asked to open the gate
    uint8_t disk_asked        # ... to put on disk what there is
    uint8_t gate_untold       # it is to be
    uint32_t held             # grants with acknowledgements that wait for marks
    uint8_t begun             # AHEAD: its owner was told that the first request has arrived
    uint8_t stamped           # a replica's: requests keep the offsets and epochs that they carry
    uint8_t watched           # somebody waits until more of a replica may be read
    uint8_t append_watched    # somebody waits for its next commit; set by any thread
    uint8_t append_news       # which was made, and nobody was told of it yet
    uint8_t known             # to the worker: from `open_head` to `forget_head`
    uint8_t noted             # it is in the worker's list of heads with news
    head_t* next_noted        # of that list
    int16_t error             # code of the request that was refused, if it was aborted for that
    uint32_t told_count       # of the last image of `told` that was read
    int64_t told_offset       # the leader's high watermark
    const uint8_t* told       # a replica's: where the leader WRITEs its high watermark, or NULL
    PyObject* pushing         # borrowed: the Pushing of its partition, or NULL: no followers
    PyObject* pushed_elsewhere  # the same, where another worker pushes it
    uint16_t next_order       # of the request to commit next
    uint16_t end_order        # of the first reservation that is not valid any more
    uint16_t blocked_order
    int32_t leader_epoch
    uint32_t waiting          # arrived and not committed
    uint32_t mask
    uint64_t position         # where the bytes of next_order lie
    uint64_t capacity         # of the head
    int64_t segment_base_offset
    int64_t deadline_ns       # when the hole at next_order is given up; 0: there is none
    int64_t hole_timeout_ns
    arrived_t* ring           # by order & mask
    PyObject* kernel          # borrowed; the ProduceHead keeps it alive
    PyObject* self            # the ProduceHead that this is a part of

cdef int order_resize(head_t* h, uint32_t entries) noexcept nogil
# Room for so many requests between the next one and the furthest; a power of two.  0 or ENOMEM.
cdef inline bint order_takes(const head_t* h) noexcept nogil:
    # Requests for this head are taken, though not always committed yet.
    return h.state == HEAD_OPEN or h.state == HEAD_AHEAD or h.state == HEAD_WAITING
cdef int order_arrived(head_t* h, uint16_t order, const uint8_t* data, uint32_t length,
                       uint16_t file_id) noexcept nogil
cdef arrived_t* order_next(head_t* h) noexcept nogil
# The request whose turn it is, or NULL: it has not arrived, or the head takes no more.
cdef void order_done(head_t* h, arrived_t* request) noexcept nogil
cdef void order_forget(head_t* h, uint16_t file_id) noexcept nogil
# Nobody waits for these acknowledgements any more.
cdef void order_look(head_t* h, int64_t now_ns) noexcept nogil
# After every event: is the head drained, is there a hole, since when, and has it been there for too
# long?
cdef void order_abort(head_t* h, uint8_t why) noexcept nogil
cdef void order_open(head_t* h, int64_t segment_base_offset, int32_t leader_epoch) noexcept nogil
# A head that was granted ahead is the partition's head now.
cdef void order_wait(head_t* h) noexcept nogil
# The next request waits for the owner of a replica's head: `order_go_on`.
cdef bint order_go_on(head_t* h) noexcept nogil
