"""Reserving a stretch of a shared head: see reservation.pyx."""
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from kdirect.wire.ack_router cimport AckRouter
from kdirect.rdma.contract cimport MemoryRegion, QueuePair

cdef enum:
    RESERVED = 0
    BEYOND_FILE = 1            # the file is full
    SWAPPED_FIRST = 2          # another producer was faster: once more
    QUEUE_PAIR_BROKEN = 3


cdef class Reservation:
    cdef AckRouter _router
    cdef QueuePair _qp
    cdef MemoryRegion landing
    cdef readonly uint64_t address
    cdef readonly uint32_t rkey
    cdef public bint compare_and_swap
    cdef readonly int end_order          # of the first reservation beyond the file's end;
    cdef readonly int64_t end_position   # and its position.  Both are -1 when it is not ours
    cdef readonly uint64_t count
    cdef volatile bint completed         # the atomic that was posted last has completed
    cdef uint64_t _word                  # the value of the word that was seen last
    cdef uint64_t _file_id
    cdef uint64_t _file_bytes

    cdef open(self, int file_id, uint64_t address, uint32_t rkey, int64_t position, int64_t length)
    cdef int reserve(self, uint32_t length, uint64_t* position, uint16_t* order) except -1
    cdef int c_post(self, uint32_t length) noexcept nogil
    cdef void c_spin(self) noexcept nogil
    cdef int c_taken(self, uint32_t length, uint64_t* position, uint16_t* order) noexcept nogil
