"""C interface of the shm provider's queues: see shm_queues.pyx."""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from kdirect.rdma.contract cimport (
    REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, CompletionQueue, QueuePair)
from kdirect.rdma.shm_core cimport kd_cq, kd_domain, kd_message, kd_qp

cdef enum:
    REMOTE_ACCESS = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC


cdef class KeyTable:
    cdef kd_domain* core

cdef class ShmCompletionQueue(CompletionQueue):
    cdef kd_cq* core
    cdef object device
    cdef int event_fd
    cdef int users              # open queue pairs
    cdef int sleepers           # threads in wait()
    cdef bint closed
    cdef _close_event(self)
    cdef _check(self)

cdef class ShmQueuePair(QueuePair):
    cdef kd_qp* core
    cdef object domain, device, lock, token, sock, expected
    cdef bint closed, told, connecting, welcomed, retired
    cdef int memfd              # of the pair memory, until the peer has it
    cdef object __weakref__
    cdef int post(self, uint32_t kind, uint64_t wr_id, uint64_t local, uint32_t lkey,
                  uint32_t length, uint64_t remote, uint32_t rkey, uint64_t arg0,
                  uint64_t arg1) noexcept nogil
    cdef _adopt(self, peer, int memfd, int event_fd, int keys_fd, bint active)
    cdef _self(self)
    cdef _retire(self)
    cdef _check(self)

cdef int tell(ShmQueuePair qp, kd_message* m, int fd, int64_t timeout_ns) except -1
