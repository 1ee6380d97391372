"""Leaders and followers at a produce worker: see push_tables.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.broker.order cimport head_t
from kdirect.broker.produce_tables cimport BATCH, ProduceTables, peer_t
from kdirect.rdma.contract cimport CompletionQueue, work_completion

cdef enum:
    MOST_LINKS = 256
    MOST_NEIGHBOURS = 16
    MOST_WANTED = 64

cdef class PushTables(ProduceTables):
    cdef CompletionQueue _link_cq        # sends of the links; None before the first
    cdef void* _links[MOST_LINKS]        # PushLink; kept alive by ProduceTables._peers
    cdef int _link_count
    cdef void* _touched_pushings         # Pushing: the first of a list
    cdef int _follow_ms                  # until the slots that leaders write are looked at next
    cdef int _cores                      # that this process may run on
    cdef void* _noted_pushings           # Pushing: the first of those with news to report
    cdef uint64_t _stamped_commits, _follow_moves
    # Workers of other transports: what these commit here is pushed there, or the other way round.
    cdef list _neighbours                # which keeps them alive
    cdef void* _neighbour_of[MOST_NEIGHBOURS]
    cdef int _neighbour_count
    cdef void* _wanted[MOST_WANTED]      # Pushing: to be pushed by another worker
    cdef int _wanted_count
    cdef bint _marks_moved               # and another worker's producers may wait for them
    cdef bint _neighbour_news            # some of them has something to report, and may sleep
    cdef int _elsewhere_count            # partitions that another worker pushes

    cdef _meet(self, PushTables other)
    cdef void _want_push(self, head_t* h) noexcept nogil
    cdef void _unlock(self) noexcept nogil
    cdef void c_push_for(self, void* pushing) noexcept nogil
    cdef void c_release(self) noexcept nogil
    cdef bint _has_news(self) noexcept nogil
    cdef bint _crowded(self) noexcept nogil
    cdef void _take_from_link(self, peer_t* peer, work_completion* wc) noexcept nogil
    cdef void _touch(self, void* ring) noexcept nogil
    cdef void _drain_links(self) noexcept nogil
    cdef uint64_t _link_sends(self) noexcept nogil
    cdef void _push(self, void* pushing) noexcept nogil
    cdef void _after_answers(self) noexcept nogil
    cdef _break_link(self, peer_t* peer)
    cdef void _commit_stamped(self, head_t* h, int64_t now_ms) noexcept nogil
    cdef void _answer_run(self, head_t* h, uint16_t file_id, uint32_t count, int16_t error,
                          uint16_t flags) noexcept nogil
    cdef void _follow(self, head_t* h) noexcept nogil
    cdef bint _follow_all(self) noexcept nogil
    cdef int c_tend_pushing(self) noexcept nogil
    cdef void _note_pushing(self, void* pushing) noexcept nogil
    cdef list _news_of_pushing(self, list moved)
    cdef void _commit_run(self, head_t* h, int64_t now_ms, int64_t now_ns) noexcept nogil
    cdef int64_t _wall_ms(self) noexcept nogil
    cdef int64_t _now(self) noexcept nogil
