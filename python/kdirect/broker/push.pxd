"""Pushing records to followers: see push.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.log.kernel cimport CommitKernel
from kdirect.log.replica_marks cimport MOST_REPLICAS, ReplicaMarks
from kdirect.log.state cimport mark_t
from kdirect.rdma.contract cimport MemoryRegion, work_completion
from kdirect.wire.ack_router cimport AckRouter
from kdirect.wire.produce_ring cimport ProduceRing

cdef enum:
    MOST_SOURCES = 8          # segments that a follower may lack the end of
    HIGH_WATERMARK = 3        # in the upper half of a work request's id: the WRITE of a slot
    # state of a ring
    RING_PUSHING = 0
    RING_REFUSED = 1          # the follower has refused a WRITE
    RING_DESYNCHRONISED = 2   # it acknowledged what it never got
    RING_BROKEN = 3           # the queue pair is in error
    RING_ENDED = 4            # in good order: by its owner, or because its follower asked

cdef struct segment_source:   # a segment of the leader
    int64_t base
    int64_t size              # -1: it is the head
    int64_t end_offset
    uint64_t address          # of its first byte
    uint64_t length           # bytes that are registered; a head grows
    uint32_t lkey

cdef struct segment_target:   # the same segment at the follower
    uint64_t address
    uint64_t length
    uint32_t rkey
    uint32_t acks             # entries read of its half of the ring
    uint16_t file_id
    uint16_t order            # of the next WRITE


cdef class PushLink(AckRouter):
    cdef readonly int broker
    cdef readonly uint64_t sends_done  # WRITEs whose completion was taken
    cdef void* starved                 # the first of the rings that wait for others' credits

    cdef void* c_take(self, const work_completion* wc) noexcept nogil
    cdef void* c_send_completion(self, const work_completion* wc) noexcept nogil


cdef class PushRing(ProduceRing):
    cdef readonly PushLink link
    cdef readonly ReplicaMarks marks
    cdef readonly int broker
    cdef readonly int state
    cdef readonly int error            # Kafka's code of the WRITE that was refused; 0: none was
    cdef readonly bint wants_file      # the next segment begins, and its file is not granted yet
    cdef int _wish                     # for more of the present file: 1: untold, 2: told
    cdef readonly bint wants_source    # the head has grown past what is registered
    cdef bint starved                  # it is in the list of its link
    cdef void* next_starved
    cdef bint blocked                  # it lacked a credit, a slot or room in the send queue
    cdef readonly uint64_t bytes_pushed, batches_walked, slots_written
    cdef readonly int64_t confirmed    # offset below which the follower has everything
    cdef int _entry                    # in `marks`
    cdef mark_t* _window               # by number of the WRITE: where it ended
    cdef mark_t _pushed                # up to here
    cdef segment_source _sources[MOST_SOURCES]
    cdef int _source_count
    cdef list _regions                 # keeps what the sources point into
    cdef list _outgrown                # regions of a head before it grew
    cdef segment_target _targets[2]
    cdef int _present                  # of the two; the other is the next, or the one before
    cdef bint _has_next
    cdef uint32_t _most                # bytes of a WRITE
    cdef uint64_t _half                # entries of half the ring
    cdef MemoryRegion _acks
    cdef MemoryRegion _image           # of the slot
    cdef bint _image_busy              # it is the transport's
    cdef uint64_t _slot_address
    cdef uint32_t _slot_rkey
    cdef uint32_t _slot_count
    cdef uint64_t _slot_every
    cdef uint64_t _slot_at             # `posted` when it was written
    cdef int64_t _told                 # the high watermark that the follower was told of
    cdef bint untold_news              # `state` or `wants_file` changed: the owner is to be told
    cdef void* pushing                 # the Pushing that it belongs to, which keeps it alive
    cdef public object owner

    cdef void c_push(self, const mark_t* end) noexcept nogil
    cdef bint _next_segment(self) noexcept nogil
    cdef void _want_file(self) noexcept nogil
    cdef void _tell_owner(self) noexcept nogil
    cdef segment_source* _source(self, const mark_t* end, mark_t* limit) noexcept nogil
    cdef uint32_t _piece(self, const segment_source* source, const mark_t* limit,
                         mark_t* mark) noexcept nogil
    cdef int _take_ack(self, segment_target* target) noexcept nogil
    cdef int _confirm(self, int64_t offset, bint present) noexcept nogil
    cdef void _end(self, int state, int error) noexcept nogil
    cdef _set_target(self, int which, uint16_t file_id, uint64_t address, uint32_t rkey,
                     uint64_t length)
    cdef bint _before_is_done(self) noexcept nogil
    cdef void c_tell(self, int64_t high_watermark) noexcept nogil


cdef class Pushing:
    cdef readonly CommitKernel kernel
    cdef readonly ReplicaMarks marks
    cdef list _rings                   # keeps them alive
    cdef void* _by_number[MOST_REPLICAS]
    cdef int _ring_count
    cdef bint touched                  # acknowledgements or completions have come
    cdef void* next_touched            # of the worker's list of them
    cdef bint moved                    # and have moved the high watermark
    cdef bint watched                  # somebody waits for that
    cdef bint moved_news               # and is to be told
    cdef bint news                     # some ring's state has changed
    cdef bint led                      # from `PushTables.lead` to `resign`
    cdef bint noted                    # it is in the worker's list of those with news
    cdef void* next_noted              # of that list
    cdef void* home                    # the produce worker that pushes it; it outlives this
    cdef uint32_t visitors             # other workers that are about to push it; atomic
    cdef public object owner

    cdef _add(self, PushRing ring)
    cdef _remove(self, PushRing ring)
    cdef void c_push(self) noexcept nogil
    cdef void c_tell(self) noexcept nogil

cdef void pushing_note(void** first, void* pushing) noexcept nogil
# There is something to report of this partition or of one of its rings, which their fields say: it
# is in the list that begins with `first`, of those that are led.
cdef void pushing_forget(void** first, void* pushing) noexcept nogil
# It is led no more, and in no list.
