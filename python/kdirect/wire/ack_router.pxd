"""Which ring a completion is for: see ack_router.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint64_t

from kdirect.rdma.contract cimport CompletionQueue
from kdirect.rdma.credit_ring cimport CreditRing, WriteQueue

cdef enum:
    FILES = 65536              # file ids are 16 bits
    # In the upper half of a work request's id:
    ATOMIC = 1                 # an atomic
    DATA = 2                   # the WRITE before a notice


cdef class AckReceiver(CreditRing):
    cdef int c_take_acks(self, uint16_t file_id, uint16_t count) noexcept nogil
    cdef void c_atomic_done(self) noexcept nogil


cdef class AckRouter(WriteQueue):
    cdef CompletionQueue _recv_cq
    cdef dict _receivers
    cdef void* _by_file[FILES]
    cdef uint8_t _stray[FILES]     # 1: news came of a file id that no receiver has
    cdef readonly uint64_t strays  # how often it did
    cdef int64_t _spin_ns
