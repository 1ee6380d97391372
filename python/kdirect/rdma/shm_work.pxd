"""C interface of the data side of the shm engine: see shm_work.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from kdirect.rdma.contract cimport work_completion
from kdirect.rdma.shm_core cimport kd_cq, kd_inline, kd_mapping, kd_qp, kd_wr

# work requests
cdef int qp_post(kd_qp* qp, kd_wr* wr, const kd_inline* piece) noexcept nogil
cdef int qp_read(kd_qp* qp, uint64_t wr_id, uint64_t local, uint32_t lkey, uint32_t length,
                 uint64_t remote, uint32_t rkey) noexcept nogil
cdef int qp_in_place(kd_qp* qp, uint64_t remote, uint64_t length, uint32_t rkey, kd_mapping** hold,
                     uint8_t** base) noexcept nogil
cdef int qp_post_recv(kd_qp* qp, uint64_t wr_id, uint64_t local, uint32_t lkey,
                      uint32_t length) noexcept nogil
# completion queues
cdef int cq_poll(kd_cq* cq, work_completion* out, int n) noexcept nogil
cdef int cq_poll_guarded(kd_cq* cq, work_completion* out, int n) noexcept nogil
cdef bint cq_arm(kd_cq* cq) noexcept nogil
cdef int cq_wait(kd_cq* cq, int64_t deadline, int64_t spin_until) noexcept nogil
