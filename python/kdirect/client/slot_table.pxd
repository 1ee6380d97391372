"""Metadata slots by READ: see slot_table.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair

cdef struct slot_t:
    uint16_t flags
    uint16_t file_id
    int64_t segment_base_offset
    int64_t last_readable_position
    int64_t high_watermark
    int64_t last_stable_position
    int64_t last_stable_offset
    int32_t leader_epoch
    uint32_t update_count
    int64_t log_start_offset

cdef class SlotTable:
    cdef QueuePair _qp
    cdef CompletionQueue _cq
    cdef MemoryRegion _region
    cdef uint64_t _remote_address
    cdef uint32_t _rkey
    cdef readonly int slot_count
    cdef int _end                  # slots [0, _end) are READ
    cdef bytearray _active         # by index: 1 when a file of ours is there
    cdef uint8_t* _active_p
    cdef uint64_t _posted          # READs so far, whatever became of them
    cdef uint64_t _copy            # number of the READ that the local copy is of, 0: of none
    cdef bytearray _since          # by index: READs posted when the slot was granted, 8 bytes each
    cdef uint64_t* _since_p
    cdef bytearray _reported       # by index: the slot's bytes when `changed` looked last, or None
    cdef uint8_t* _reported_p
    cdef uint64_t _scanned         # number of the READ that `changed` looked at last
    cdef int64_t _torn_timeout_ns
    cdef bint _at_once             # a READ completes while it is posted
    cdef readonly uint64_t reads, read_bytes, torn
    cdef int c_check(self, int index) except -1
    cpdef refresh(self)
    cdef int c_look(self, uint32_t* status) noexcept nogil
    cdef int c_refresh(self, uint32_t* status) noexcept nogil
    cdef bint c_is_news(self, int index, uint64_t seen) noexcept nogil
    cdef void c_get(self, int index, slot_t* out) noexcept nogil
