"""Commit slots at a produce worker: see offset_tables.pyx."""
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from kdirect.broker.commit_cells cimport CommitSlot
from kdirect.broker.produce_tables cimport grant_t, peer_t
from kdirect.broker.push_tables cimport PushTables

cdef class OffsetTables(PushTables):
    cdef void* _noted_slots            # CommitSlot: the first of those of which there is news
    cdef void* _idle_slots             # CommitSlot: of which there is when the worker has nothing
    cdef uint64_t _slot_count, _offset_commits, _offset_deferred, _offset_errors

    cdef void _take_commit(self, peer_t* peer, grant_t* g, CommitSlot slot, uint16_t order,
                           uint32_t length) noexcept nogil
    cdef void _note_slot(self, CommitSlot slot) noexcept nogil
    cdef bint _note_idle_slots(self) noexcept nogil
    cdef list _news_of_slots(self)
