"""How far the replicas of a partition are: see replica_marks.pyx."""
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kdirect.log.kernel cimport CommitKernel
from kdirect.log.state cimport kernel_state, mark_t

cdef enum:
    MOST_REPLICAS = 64

cdef struct replica_t:
    int32_t broker            # -1: this entry is free
    bint counted              # the high watermark waits for it
    mark_t mark               # below it the replica has everything; offset -1: not heard of yet


cdef class ReplicaMarks:
    cdef readonly CommitKernel kernel
    cdef replica_t _replicas[MOST_REPLICAS]
    cdef int _count           # entries in use or before one that is
    cdef readonly bint stands_still
    cdef readonly uint64_t moves

    cdef kernel_state* _state_of(self) noexcept nogil
    cdef int c_find(self, int32_t broker) noexcept nogil
    # The entry of a broker, or -1.
    cdef bint c_confirm(self, int entry, const mark_t* mark) noexcept nogil
    # The replica has everything below `mark`, a point of this log; whether the high watermark has
    # moved.  Takes the kernel's mutex.
    cdef bint _move(self, kernel_state* s) noexcept nogil
    cdef int _enter(self, int32_t broker) noexcept nogil


cdef inline bint disk_holds(CommitKernel kernel) noexcept nogil:
    # Do acknowledgements wait for the disk (`log.flush.before.ack`)?
    return (<kernel_state*> kernel._state).disk_holds
cdef inline bint marks_count(CommitKernel kernel) noexcept nogil:
    # Is it marks that move the high watermark?
    return (<kernel_state*> kernel._state).counted != 0
cdef inline int64_t acknowledged_by_disk(CommitKernel kernel) noexcept nogil:
    # Records below this offset need not wait for the disk any more.
    cdef kernel_state* s = <kernel_state*> kernel._state
    return s.disk.offset if s.disk_holds else INT64_MAX
cdef void log_end_mark(CommitKernel kernel, mark_t* out) noexcept nogil
# The point where the log ends now.
cdef void high_watermark_slot(CommitKernel kernel, uint32_t count, uint8_t* out) noexcept nogil
# Write the image of a slot (64 bytes) that says what may be read, for a follower.  `count` tells
# one image from the next.
cdef bint follow_slot(CommitKernel kernel, const uint8_t* slot, uint32_t* seen,
                      int64_t* told) noexcept nogil
# A follower: move the high watermark to where the leader's slot says that it is, as far as this log
# goes; whether it moved.  `seen`: the count of the last image that was read whole.  `told`: the
# leader's high watermark.
