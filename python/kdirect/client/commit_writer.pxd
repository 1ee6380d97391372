"""Commits into a member's commit slot: see commit_writer.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t

from kdirect.format.layout cimport OFFSETS_CELLS
from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair


cdef class CommitWriter:
    cdef QueuePair _qp
    cdef CompletionQueue _send_cq, _recv_cq
    cdef readonly MemoryRegion cells, ring
    cdef dict _indexes                 # partition -> its index in the slot
    cdef uint64_t _entries             # of the ring
    cdef uint64_t _address
    cdef uint32_t _rkey, _cell_bytes
    cdef int32_t _generation
    cdef uint64_t _token
    cdef readonly uint16_t file_id
    cdef object _monotonic
    cdef int64_t _spin_ns
    cdef readonly uint64_t posted      # commits
    cdef uint64_t _completed           # WRITEs of them
    cdef uint64_t _read                # entries of the ring
    cdef readonly int under_way        # commits that are not answered
    cdef int16_t _answers[OFFSETS_CELLS]
    cdef bint _answered[OFFSETS_CELLS]
    cdef readonly bint ended           # nothing more will be answered

    cdef void c_drain(self) noexcept nogil
    cdef bint c_await(self, uint64_t number) noexcept nogil
    cdef void _take_entry(self) noexcept nogil
