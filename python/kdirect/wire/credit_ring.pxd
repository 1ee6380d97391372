"""A ring of WRITEs with credits: see credit_ring.pyx."""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport MemoryRegion, QueuePair
from kdirect.wire.ack_router cimport AckReceiver, AckRouter

cdef enum:
    POSTED = 0
    QUEUE_FULL = 1
    POST_FAILED = 2


cdef struct source_t:          # bytes of this side's registered memory
    uint8_t* data
    uint64_t address
    uint32_t lkey
    uint32_t length


cdef struct target_t:          # where they go in the peer's memory, and what tells the peer of them
    uint64_t address
    uint32_t rkey
    uint16_t file_id
    uint16_t order


cdef struct large_value_t:
    uint32_t hole              # where in the source its bytes belong; 0: there is no large value
    uint32_t length
    const uint8_t* data


cdef class CreditRing(AckReceiver):
    cdef AckRouter _router
    cdef QueuePair _qp
    cdef MemoryRegion _notices           # None: WRITEs have immediate data
    cdef readonly uint64_t window        # a power of two
    cdef public uint64_t credits         # WRITEs that the peer lets be under way
    cdef readonly uint64_t posted        # numbers of WRITEs of the ring's whole life
    cdef readonly uint64_t acknowledged
    cdef readonly uint64_t completed
    cdef readonly uint64_t freed
    cdef readonly bint desynchronised    # the two sides do not agree any more

    cdef bint c_may_post(self) noexcept nogil
    cdef int c_post(self, source_t* source, const target_t* target, large_value_t* value,
                    bint must) noexcept nogil
    cdef int c_try(self, source_t* source, const target_t* target, large_value_t* value,
                   uint64_t notice, bint* written) noexcept nogil
    cdef void c_return_credit(self) noexcept nogil
    cdef void c_release(self) noexcept nogil
    cdef bint c_free_before(self, uint64_t bound) noexcept nogil
    cdef void c_give_up(self) noexcept nogil
    cdef bint _wait_sends(self, uint64_t count, int timeout_ms) except -1
