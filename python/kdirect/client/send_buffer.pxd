"""The bytes of a writer's requests: see send_buffer.pyx."""
from libc.stdint cimport int16_t, uint16_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport MemoryRegion


cdef struct request_t:
    uint64_t start             # of its bytes in the send buffer
    uint32_t length
    uint32_t records
    uint32_t hole              # which of them are its value's, which lies elsewhere: from here on; 0: all are in the send buffer
    uint16_t order
    int16_t error


cdef class SendBuffer:
    cdef MemoryRegion region
    cdef uint64_t window                               # a power of two
    cdef request_t* requests
    cdef uint64_t capacity
    cdef uint64_t _write_at, _free_from, _taken        # bytes [_free_from, _write_at) of the ring are taken
    cdef list _values                                  # by slot of the window: what fills a request's hole, or None
    cdef uint64_t _dropped, _kept                      # requests before `_dropped` and from `_kept` on have none in it

    cdef set_region(self, MemoryRegion region)
    cdef clear(self)
    cdef bytes copy(self, uint64_t sequence)
    cdef void keep(self, uint64_t sequence, bytes value) noexcept
    cdef void drop(self, uint64_t freed) noexcept
    cdef request_t* c_request(self, uint64_t sequence) noexcept nogil
    cdef bint c_reserve(self, uint64_t n, uint64_t* start) noexcept nogil
    cdef void c_take(self, uint64_t start, uint64_t length) noexcept nogil
    cdef void c_free(self, uint64_t upto, uint64_t appended) noexcept nogil
