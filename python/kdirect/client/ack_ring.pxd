"""The acknowledgement ring of a writer: see ack_ring.pyx."""
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport MemoryRegion


cdef struct ack_t:
    uint16_t order
    uint16_t error
    uint16_t flags
    uint32_t batches
    int64_t base_offset


cdef class AckRing:
    cdef MemoryRegion region
    cdef readonly uint64_t half_entries  # a power of two
    cdef uint64_t _present               # the half of the present file: 0 or 1
    cdef uint64_t _read[2]               # entries read of each half since its grant began

    cdef void c_restart(self) noexcept nogil
    cdef void c_expect_next(self) noexcept nogil
    cdef void c_go_on(self) noexcept nogil
    cdef bint c_take(self, bint present, ack_t* ack) noexcept nogil
