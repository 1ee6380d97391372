# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The order of produce requests of one head file: pure decisions (KafkaDirect §4.2.2, figures 4
and 5).

Law of the room: a state and events in, a state out.  No lock (the produce worker's guards it), no
clock (callers say what time it is), no I/O; the only allocation is the ring.

Producers reserve (order, position) on the shared word and write in any order; requests are
committed strictly by their order. What has arrived ahead of its turn waits in a ring.  The
positions follow from the orders: the bytes of a request begin where those of the request before it
end, so the broker knows where a request lies although its completion does not say.  A head that one
producer holds exclusively is the same with orders that the producer counts itself.

    AHEAD ---- its owner makes it the head ------------------------------> OPEN
    OPEN ----- drained: draining, and next order == end order ------------> DRAINED
      |------- a hole older than its timeout, a damaged request, no room --> ABORTED
      |------- its owner ends it ------------------------------------------> CLOSED
      `------- a replica's: a new leader epoch begins, until it is noted --> WAITING --> OPEN

A head that is granted AHEAD is the one after the head that its producer fills: its first request
says that the producer is done with the other, and is news for its owner.

A *hole* is an order that was reserved and has not arrived while later ones have, or while somebody
waits for the head to be drained.  A reservation that passed the file's end has no request; the
first of them is the end order.  Orders count modulo 2**16; the ring is smaller than half of that,
and no larger than all producers may have under way together, so an order is never ambiguous.
"""

from libc.errno cimport ENOMEM
from libc.stdlib cimport calloc, free

from kdirect.broker.reasons import Reason

MAX_ENTRIES = 1 << 15


class AbortReason(Reason):
    """Why a head was aborted."""

    NONE = 0, "it was not aborted"
    HOLE = WHY_HOLE, "a reserved request did not arrive in time"
    DAMAGED = WHY_DAMAGED, "a request was damaged, or not as long as its reservation"
    NO_ROOM = WHY_NO_ROOM, "the head takes no more records"
    FENCED = WHY_FENCED, "the leadership changed"
    REFUSED = WHY_REFUSED, "the leader's records do not go on where this log ends, or are damaged"


cdef int order_resize(head_t* h, uint32_t entries) noexcept nogil:
    cdef uint32_t size = 16
    cdef uint32_t i
    cdef uint16_t order
    cdef arrived_t* ring
    while size < entries:
        size *= 2
    if h.ring != NULL and size <= h.mask + 1:
        return 0
    ring = <arrived_t*> calloc(size, sizeof(arrived_t))
    if ring == NULL:
        return ENOMEM
    if h.ring != NULL:
        for i in range(h.mask + 1):
            order = <uint16_t> (h.next_order + i)
            ring[order & (size - 1)] = h.ring[order & h.mask]
        free(h.ring)
    h.ring = ring
    h.mask = size - 1
    return 0


cdef int order_arrived(head_t* h, uint16_t order, const uint8_t* data, uint32_t length,
                       uint16_t file_id) noexcept nogil:
    cdef uint16_t ahead = <uint16_t> (order - h.next_order)
    cdef arrived_t* at
    if ahead > h.mask:
        return ARRIVED_TWICE if ahead >= 0x8000 else ARRIVED_FAR
    if h.has_end and ahead >= <uint16_t> (h.end_order - h.next_order):
        return ARRIVED_FAR
    at = &h.ring[order & h.mask]
    if at.length:
        return ARRIVED_TWICE
    at.data = data
    at.length = length
    at.file_id = file_id
    at.checked = at.marker = 0
    h.waiting += 1
    return ARRIVED


cdef arrived_t* order_next(head_t* h) noexcept nogil:
    cdef arrived_t* at = &h.ring[h.next_order & h.mask]
    if h.state != HEAD_OPEN or at.length == 0:
        return NULL
    return at


cdef void order_done(head_t* h, arrived_t* request) noexcept nogil:
    h.position += request.length
    request.length = 0
    request.data = NULL
    h.waiting -= 1
    h.next_order += 1


cdef void order_forget(head_t* h, uint16_t file_id) noexcept nogil:
    cdef uint32_t i
    if h.waiting:
        for i in range(h.mask + 1):
            if h.ring[i].file_id == file_id:
                h.ring[i].file_id = 0


cdef void order_open(head_t* h, int64_t segment_base_offset, int32_t leader_epoch) noexcept nogil:
    h.state = HEAD_OPEN
    h.segment_base_offset = segment_base_offset
    h.leader_epoch = leader_epoch
    h.news = NO_NEWS


cdef void order_wait(head_t* h) noexcept nogil:
    if h.state == HEAD_OPEN:
        h.state = HEAD_WAITING
        h.news = NEWS


cdef bint order_go_on(head_t* h) noexcept nogil:
    if h.state != HEAD_WAITING:
        return False
    h.state = HEAD_OPEN
    h.news = NO_NEWS
    return True


cdef void order_abort(head_t* h, uint8_t why) noexcept nogil:
    if h.state == HEAD_OPEN:
        h.state = HEAD_ABORTED
        h.why = why
        h.news = NEWS
        h.deadline_ns = 0


cdef void order_look(head_t* h, int64_t now_ns) noexcept nogil:
    if h.state == HEAD_AHEAD and h.waiting and not h.begun:
        h.begun = 1
        h.news = NEWS
    if h.state != HEAD_OPEN:
        return
    if h.draining and h.has_end and h.next_order == h.end_order:
        h.state = HEAD_DRAINED
        h.news = NEWS
        h.deadline_ns = 0
        return
    if not h.draining and (h.waiting == 0 or h.ring[h.next_order & h.mask].length):
        h.deadline_ns = 0
        return
    if h.deadline_ns == 0 or h.blocked_order != h.next_order:
        h.deadline_ns = now_ns + h.hole_timeout_ns
        h.blocked_order = h.next_order
    elif now_ns >= h.deadline_ns:
        order_abort(h, WHY_HOLE)
