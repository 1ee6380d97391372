"""The bytes of a writer's requests: see send_buffer.pyx."""
from libc.stdint cimport int16_t, int64_t, uint16_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport MemoryRegion


cdef struct request_t:
    uint64_t start             # of its bytes in the send buffer
    uint32_t length
    uint32_t records
    uint32_t hole              # where the bytes of its value begin, which lies elsewhere; 0: all
                               # bytes are in the send buffer
    uint16_t order
    int16_t error              # of a request that was refused; 0: none
    int64_t base_offset        # of its first record, once it is acknowledged


cdef class SendBuffer:
    cdef MemoryRegion region
    cdef uint64_t window                               # a power of two
    cdef request_t* requests
    cdef uint64_t capacity
    cdef uint64_t _write_at, _free_from, _taken        # bytes [_free_from, _write_at) are taken
    # The parts of a request's entry that are Python objects, by slot of the window: what fills the
    # hole, and the tag.  None: there is none.
    cdef list _values
    cdef list _tags
    cdef uint64_t _dropped, _kept                      # requests before `_dropped` and from `_kept`
                                                       # on have no value

    cdef list _outcomes
    cdef uint64_t tagged                               # requests with a tag that is not handed on
    cdef uint64_t collected                            # every tag before this one was handed on

    cdef set_region(self, MemoryRegion region)
    cdef clear(self)
    cdef bytes copy(self, uint64_t sequence)
    cdef void keep(self, uint64_t sequence, bytes value) noexcept
    cdef void drop(self, uint64_t freed) noexcept
    cdef set_tag(self, uint64_t sequence, tag)
    cdef bint collect(self, uint64_t acknowledged) except -1
    cdef list requests_between(self, uint64_t first, uint64_t end)
    cdef list take_refused(self, uint64_t first, uint64_t end)
    cdef request_t* c_request(self, uint64_t sequence) noexcept nogil
    cdef bint c_reserve(self, uint64_t n, uint64_t* start) noexcept nogil
    cdef void c_take(self, uint64_t start, uint64_t length) noexcept nogil
    cdef void c_free(self, uint64_t upto, uint64_t appended) noexcept nogil
