"""A ring of WRITEs with credits: see credit_ring.pyx."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair

cdef enum:
    POSTED = 0
    QUEUE_FULL = 1
    POST_FAILED = 2

    ERRNO_STATUS = 1000        # a status from here on is this plus an errno


cdef struct source_t:          # bytes of this side's registered memory
    uint8_t* data
    uint64_t address
    uint32_t lkey
    uint32_t length


cdef struct target_t:          # where they go in the peer's memory, and what tells the peer of them
    uint64_t address
    uint32_t rkey
    uint32_t imm
    bint notify                # by WRITE_WITH_IMM


cdef class WriteQueue:
    cdef QueuePair _qp
    cdef CompletionQueue _send_cq
    cdef readonly uint64_t sends_under_way
    cdef readonly uint64_t requests_under_way, limit   # over all rings
    cdef uint32_t _status          # first bad completion status, or 1000 + errno; 0: none
    cdef object _monotonic         # the environment's clock, for waits that are longer than a spin

    cdef int c_drain(self) noexcept nogil
    cdef void c_fail(self, int error) noexcept nogil


cdef class CreditRing:
    cdef WriteQueue _queue
    cdef QueuePair _qp
    cdef uint64_t _id                    # of its work requests
    cdef bint _begun                     # a part of the next WRITE is posted, so the rest must be
    cdef readonly uint64_t window        # a power of two
    cdef public uint64_t credits         # WRITEs that the peer lets be under way
    cdef readonly uint64_t posted        # numbers of WRITEs of the ring's whole life
    cdef readonly uint64_t acknowledged
    cdef readonly uint64_t completed
    cdef readonly uint64_t freed
    cdef readonly bint desynchronised    # the two sides do not agree any more

    cdef bint c_may_post(self) noexcept nogil
    cdef int c_post(self, const source_t* source, const target_t* target, bint must) noexcept nogil
    cdef int c_try(self, const source_t* source, const target_t* target) noexcept nogil
    cdef void c_send_done(self) noexcept nogil
    cdef void c_return_credit(self) noexcept nogil
    cdef bint c_return_credits(self, uint64_t count) noexcept nogil
    cdef void c_release(self) noexcept nogil
    cdef bint c_free_before(self, uint64_t bound) noexcept nogil
    cdef void c_give_up(self) noexcept nogil
    cdef bint _wait_sends(self, uint64_t count, int timeout_ms) except -1


cdef int source_of(source_t* out, MemoryRegion region, uint64_t start, uint64_t length) except -1
# Bytes of a registered region; ValueError when they lie outside of it.
