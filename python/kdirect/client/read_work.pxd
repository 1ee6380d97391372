"""READs and their completions: see read_work.pyx."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport CompletionQueue, QueuePair

cdef enum:
    # what a READ ended with, besides 0
    READ_FAILED = -1
    READ_TIMED_OUT = -2
    READS_AHEAD = 16           # data READs outstanding together while a stream lags: the time that
                               # the next one travels passes during this one

cdef int64_t now_ns() noexcept nogil
cdef int c_read(QueuePair qp, CompletionQueue cq, uint64_t local_address, uint32_t lkey,
                uint32_t length, uint64_t remote_address, uint32_t rkey,
                uint32_t* status) noexcept nogil
cdef int c_read_pieces(QueuePair qp, CompletionQueue cq, uint64_t local_address, uint32_t lkey,
                       uint64_t total, uint32_t piece, uint64_t remote_address, uint32_t rkey,
                       uint32_t* status) noexcept nogil
cdef raise_read(int rc, uint32_t status, what)
cdef int check_location(str what, int64_t address, int64_t rkey, int64_t length) except -1
