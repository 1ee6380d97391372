# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Marks of a kernel that its partition moves: recovery, the acknowledgement gate, compaction.

Owns the two ways in which the high watermark is set from outside of a commit where no replicas are
counted; `kdirect.log.replica_marks` moves it where they are.  What a mark is, and which slots tell
of it, is `kdirect.log.slots`.  Marks are moved with the kernel's mutex held.
"""

from libc.stdint cimport int64_t, uint64_t

from kdirect.log.kernel cimport CommitKernel
from kdirect.log.slots cimport (
    finish_sealed, is_point, move_marks, remember_sealed, update_slots)
from kdirect.log.state cimport kernel_state, mark_t
from kdirect.machine cimport pthread_mutex_lock, pthread_mutex_unlock

from kdirect.errors import LogError


def advance_high_watermark(CommitKernel kernel, int64_t offset, uint64_t position,
                           int64_t segment_base_offset):
    """Make records below `offset` readable, which lies at `position` of that segment; whether
    anything changed.  Ignored when it would go back, when there is no such point (the segment
    has been passed, or replaced), and while replicas are counted (`replica_marks`)."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef mark_t mark
    cdef bint moved = False
    mark.base = segment_base_offset
    mark.position = position
    mark.offset = offset
    with nogil:
        pthread_mutex_lock(&s.lock)
        if not s.counted and s.readable.offset < offset and is_point(s, &mark):
            moved = True
            move_marks(s, &mark)
            update_slots(s)
        pthread_mutex_unlock(&s.lock)
    return moved


def allow_gaps_below(CommitKernel kernel, int64_t offset):
    """From now on copies of another log may lack records below `offset`: those that compaction has
    removed there.  It does not go back."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    with nogil:
        pthread_mutex_lock(&s.lock)
        if s.dense_from < offset:
            s.dense_from = offset
        pthread_mutex_unlock(&s.lock)


def load_high_watermark(CommitKernel kernel, int64_t offset, uint64_t position,
                        int64_t segment_base_offset, sealed):
    """Recovery: only records below `offset` may be read.  `sealed` (SealedSegment, by offset)
    are the segments from that one on, without the last."""
    cdef kernel_state* s = <kernel_state*> kernel._state
    cdef mark_t mark
    cdef bint known
    mark.base = segment_base_offset
    mark.position = position
    mark.offset = offset
    for segment in sealed:
        if remember_sealed(s, segment.base_offset, segment.size, segment.end_offset) != 0:
            raise MemoryError()
    known = is_point(s, &mark)
    if known:
        move_marks(s, &mark)
    finish_sealed(s)
    if not known:
        raise LogError(f"offset {offset} does not lie at position {position} of the segment"
                       f" {segment_base_offset}", hint="look it up in the partition")
