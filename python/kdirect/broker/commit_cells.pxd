"""Commit slots of group members, and the logs that they are folded into: see commit_cells.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.layout cimport OFFSETS_CELLS
from kdirect.log.kernel cimport CommitKernel, commit_result
from kdirect.machine cimport pthread_mutex_t
from kdirect.rdma.contract cimport Memory

cdef enum:
    DEFERRED = -1                  # the loop appends it, and answers

cdef struct folded_t:              # the newest offset of a partition that is in the log
    int64_t at                     # offset of its record there; -1: the table knows it
    int64_t offset
    int64_t time_ms
    int32_t leader_epoch


cdef class OffsetLog:
    cdef pthread_mutex_t _lock
    cdef readonly CommitKernel kernel
    cdef int _paused               # the loop is changing the partition, so often
    cdef bint _direct              # may be appended to at all
    cdef readonly uint64_t unfolded
    cdef readonly list slots


cdef class CommitSlot:
    cdef readonly OffsetLog log
    cdef readonly Memory memory
    cdef readonly uint32_t partitions
    cdef readonly uint32_t cell_bytes
    cdef readonly int32_t generation
    cdef readonly uint64_t token
    cdef public object owner
    cdef bytes _keys
    cdef const uint8_t* _key_data
    cdef uint32_t* _key_ends       # of partition i: [_key_ends[i], _key_ends[i + 1])
    cdef uint8_t* _copies          # of the cells, of which nobody else knows
    cdef int _refused[OFFSETS_CELLS]  # the error code of what lies in each copy
    cdef uint8_t* _batches         # what is appended next
    cdef size_t _batches_bytes
    cdef folded_t* _latest
    cdef bint _dirty               # some of `_latest` are not in the table
    cdef uint32_t next_sequence
    cdef uint32_t deferred         # commits that the loop has not answered; the last ones
    cdef uint32_t told             # the sequence up to which deferred ones were handed to the loop
    cdef bint noted                # in OffsetTables._noted_slots
    cdef bint idle_noted           # in OffsetTables._idle_slots
    cdef void* next_noted
    cdef void* next_idle

    cdef bint c_fits(self, uint32_t length) noexcept nogil
    cdef int c_take(self, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil
    cdef int _check(self, const uint8_t* cell, uint32_t sequence) noexcept nogil
    cdef int _append(self, const uint8_t* cell, int64_t now_ms, commit_result* out) noexcept nogil


cdef list deferred_commits(CommitSlot slot)
