"""One-sided reading: see direct_read.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.chain cimport chain_t
from kdirect.format.decode cimport ArrowDecoder
from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair, RemoteView

cdef enum:
    # what FileStream.advance returns
    NOTHING = 0
    MOVED = 1
    ENDED = 2

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
    cdef int _end                  # slots [0, _end) are read
    cdef bytearray _active         # by index: 1 when a file of ours is there
    cdef uint8_t* _active_p
    cdef uint64_t _posted          # READs so far, whatever became of them
    cdef uint64_t _copy            # number of the READ that the local copy is of, 0: of none
    cdef bytearray _since          # by index: READs posted when the slot was granted, 8 bytes each
    cdef uint64_t* _since_p
    cdef bytearray _told           # by index: the slot's bytes when `changed` looked last; None before
    cdef uint8_t* _told_p
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

cdef class FileStream:
    cdef QueuePair _qp
    cdef CompletionQueue _cq
    cdef object _new_buffer
    cdef MemoryRegion _buffer
    cdef uint64_t _capacity
    cdef RemoteView _view                  # of the granted file; None: READs go into the buffer
    cdef bint _in_place
    cdef uint64_t _lo, _hi                 # unread bytes of the buffer: the file's [position, position + hi - lo)
    cdef uint64_t _checked                 # of these, bytes of whole batches that continue the log
    cdef chain_t _chain                    # where the log stands after them
    cdef int64_t _segment                  # base offset of the granted file
    cdef readonly str name
    cdef uint64_t _address
    cdef uint32_t _rkey
    cdef readonly int64_t length           # bytes of the file that may be read at all
    cdef readonly int64_t position         # of the byte at _lo
    cdef readonly int64_t limit            # last readable position
    cdef readonly bint sealed
    cdef int64_t _committed                # where the last batch ends that may be read; behind `limit` of a file that was outgrown
    cdef readonly bint outgrown            # the file is readable behind `length` by now: read that, then ask for access again
    cdef readonly int file_id
    cdef uint64_t _min_read, _max_read, _max_buffer, _max_batch
    cdef readonly uint64_t read_size       # of the next READ
    cdef readonly uint64_t reads, read_bytes
    cdef readonly int64_t high_watermark, last_stable_offset, log_start_offset
    cdef readonly int leader_epoch
    cdef readonly bint revoked             # the slot says that access ended
    cdef uint64_t _seen                    # number of the READ that the slot was last taken from
    cdef const uint8_t* c_start(self) noexcept nogil
    cdef int64_t c_whole(self) except -1
    cdef chain_t* c_chain(self) noexcept nogil
    cdef void c_followed(self, uint64_t n) noexcept nogil
    cpdef Py_ssize_t decode(self, ArrowDecoder decoder) except -1
    cdef object _here(self)
    cpdef bint take_slot(self, SlotTable slots, int index, bint committed_only) except -1
    cpdef bint look(self, SlotTable slots, int index, bint committed_only) except -1
    cpdef int advance(self, SlotTable slots, int index, bint committed_only) except -1
    cpdef int64_t fill(self) except -1
    cdef int64_t _fill_once(self) except -1
    cdef void _came(self, uint64_t want, uint64_t reads, int64_t unread) noexcept nogil
    cpdef consume(self, uint64_t n)
    cdef _grow(self, uint64_t capacity)
    cdef _let_go(self)
