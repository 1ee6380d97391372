"""A ring of produce requests: see produce_ring.pyx."""
from libc.stdint cimport uint8_t, uint16_t, uint32_t

from kdirect.format.layout cimport IMM_FILE_ID_SHIFT
from kdirect.rdma.contract cimport MemoryRegion
from kdirect.rdma.credit_ring cimport source_t, target_t
from kdirect.wire.ack_router cimport AckReceiver, AckRouter


cdef struct large_value_t:
    uint32_t hole              # where in the source its bytes belong; 0: there is no large value
    uint32_t length
    const uint8_t* data


cdef class ProduceRing(AckReceiver):
    cdef AckRouter _router
    cdef MemoryRegion _notices           # None: WRITEs have immediate data
    cdef large_value_t* _value           # of the WRITE that is being posted

    cdef int c_post_request(self, const source_t* source, const target_t* target,
                            large_value_t* value, bint must) noexcept nogil
    cdef int _try_with_notice(self, const source_t* source,
                              const target_t* target) noexcept nogil


cdef inline uint32_t request_imm(uint16_t file_id, uint16_t order) noexcept nogil:
    """The immediate data of a request, which its `target_t` has."""
    return (<uint32_t> file_id << IMM_FILE_ID_SHIFT) | order
