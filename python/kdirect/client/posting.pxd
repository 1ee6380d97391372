"""Requests on their way to the send queue: see posting.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.client.ack_router cimport AckRouter
from kdirect.client.send_buffer cimport SendBuffer
from kdirect.rdma.contract cimport MemoryRegion, QueuePair

cdef enum:
    POSTED = 0
    QUEUE_FULL = 1
    POST_FAILED = 2


cdef struct target_t:
    uint64_t address           # where the request goes in the broker's memory
    uint32_t rkey
    uint16_t file_id
    uint16_t order


cdef struct large_value_t:
    uint32_t hole              # where in the request its bytes belong; 0: there is no large value
    uint32_t length
    const uint8_t* data


cdef class Poster:
    cdef AckRouter _router
    cdef QueuePair _qp
    cdef SendBuffer _buffer
    cdef MemoryRegion notices

    cdef int c_post(self, uint64_t start, uint32_t length, const target_t* target,
                    large_value_t* value, uint64_t sequence, bint must) noexcept nogil
    cdef int c_try(self, uint64_t start, uint32_t length, const target_t* target,
                   large_value_t* value, uint64_t notice, bint* written) noexcept nogil
