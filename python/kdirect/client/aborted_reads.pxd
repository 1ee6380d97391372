"""Lists of aborted transactions by READ: see aborted_reads.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kdirect.format.batch cimport batch_info
from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair

cdef class ListReads:
    cdef object _channel
    cdef QueuePair _qp
    cdef CompletionQueue _cq
    cdef MemoryRegion _buffer
    cdef int64_t _torn_timeout_ns
    cdef readonly uint64_t reads, torn
    cdef readonly uint64_t skipped         # batches, of all files
    cdef const uint8_t* c_bring(self, uint64_t address, uint32_t rkey, uint32_t length,
                                str what) except NULL

cdef enum:
    # what AbortedReads.c_judge says of the batches at hand
    KEEP = 0                   # so many bytes of them are for the reader
    SKIP = 1                   # the first one was aborted
    ASK = 2                    # the list is full, and does not tell of the first one

cdef class AbortedReads:
    cdef readonly str name
    cdef ListReads _reads
    cdef uint64_t _address
    cdef uint32_t _rkey
    cdef uint32_t _room                    # entries
    cdef int _file_id
    cdef uint32_t _count                   # entries that were READ
    cdef int64_t _last                     # marker of the last of them
    cdef int64_t _stable                   # of the last of them: see the layout
    cdef int64_t _known_to                 # every abort below this offset is known
    cdef dict _ranges                      # by producer id: (first offset, marker) of each
    cdef int64_t _kept_to                  # position up to which batches were judged and kept
    cdef int c_judge(self, const uint8_t* p, uint64_t n, int64_t position, int64_t stable,
                     uint64_t* kept, batch_info* first) except -1
    cdef void c_skipped(self) noexcept
    cdef bint _was_aborted(self, const batch_info* info) except -1
    cdef int _refresh(self, int64_t stable) except -1
    cdef int _take(self, const uint8_t* p, uint32_t number) except -1
