"""Bytes of one granted file by READ: see file_stream.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kdirect.client.slot_table cimport SlotTable
from kdirect.format.chain cimport chain_t
from kdirect.format.decode cimport ArrowDecoder
from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair, RemoteView

cdef enum:
    # what FileStream.advance returns
    NOTHING = 0
    MOVED = 1
    ENDED = 2

cdef class SpareBuffers:
    cdef list _regions
    cdef bint _closed
    cdef MemoryRegion take(self, uint64_t length)
    cdef give(self, MemoryRegion region)
    cdef close(self)

cdef class BufferLease:
    cdef MemoryRegion region
    cdef SpareBuffers spares
    cdef uint64_t forks                    # of this process, when it was made
    cdef bint ended                        # the buffer is the stream's again, or has gone back

cdef class FileStream:
    cdef object _endpoint                  # of the location that is open
    cdef QueuePair _qp                     # its queue pair
    cdef CompletionQueue _cq
    cdef MemoryRegion _buffer              # of the endpoint's memory
    cdef uint64_t _capacity
    cdef RemoteView _view                  # of the granted file; None: READs go into the buffer
    cdef bint _view_is_lent                # columns may hold it
    cdef BufferLease _lease                # columns may look at the buffer; None: nobody does
    cdef SpareBuffers _spares
    cdef bint _in_place
    cdef uint64_t _lo, _hi                 # unread bytes of the buffer: [position, position+hi-lo)
    cdef uint64_t _checked                 # of these, bytes of whole batches that continue the log
    cdef chain_t _chain                    # where the log stands after them
    cdef int64_t _segment                  # base offset of the granted file
    cdef readonly str name
    cdef uint64_t _address
    cdef uint32_t _rkey
    cdef readonly int64_t length           # bytes of the file that may be READ at all
    cdef readonly int64_t position         # of the byte at _lo
    cdef int64_t _start                    # the position that the file was opened at
    cdef int32_t _epoch_before             # of the last batch that was consumed before `_start`
    cdef int32_t _epoch_here               # the same before `position`, while `_checked` > 0
    cdef readonly int64_t limit            # last readable position
    cdef readonly bint sealed
    # Where the last batch ends that may be read; past `limit` when the file has outgrown its grant.
    cdef int64_t _committed
    # The file is readable past `length` by now: read up to there, then ask for access again.
    cdef readonly bint outgrown
    cdef readonly int file_id
    cdef uint64_t _min_read, _max_read, _max_buffer, _max_batch
    cdef readonly uint64_t read_size       # of the next READ
    cdef readonly uint64_t reads, read_bytes
    cdef readonly int64_t wait_ns          # for their completions
    cdef readonly int64_t high_watermark, last_stable_offset, log_start_offset
    cdef readonly int leader_epoch
    cdef readonly bint revoked             # the slot says that access ended
    cdef uint64_t _seen                    # number of the READ that the slot was last taken from
    cdef const uint8_t* c_start(self) noexcept nogil
    cdef int64_t c_whole(self) except -1
    cdef chain_t* c_chain(self) noexcept nogil
    cdef void c_consume(self, uint64_t n) noexcept nogil
    cdef int32_t c_last_epoch(self) noexcept nogil
    cdef int32_t _followed_epoch(self) noexcept nogil
    cdef object _here(self)
    cpdef bint take_slot(self, SlotTable slots, int index, bint committed_only) except -1
    cpdef bint look(self, SlotTable slots, int index, bint committed_only) except -1
    cpdef int advance(self, SlotTable slots, int index, bint committed_only) except -1
    cpdef int64_t fill(self) except -1
    cdef int64_t _fill_once(self) except -1
    cdef uint64_t _make_room(self, uint64_t kept, uint64_t want, uint64_t need) except? 0
    cdef void _arrived(self, uint64_t want, uint64_t reads, int64_t unread) noexcept nogil
    cpdef consume(self, uint64_t n)
    cdef _grow(self, uint64_t capacity)
    cdef _close_view(self)
    cdef object c_owner(self)
    cdef int c_lend(self, ArrowDecoder decoder) except -1
    cdef _drop_buffer(self)
    cdef _free_buffer(self)
