"""C interface of the verbs contract: see contract.pyx."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t, int64_t

cdef enum:
    # opcodes of completions
    WC_SEND = 0
    WC_RDMA_WRITE = 1
    WC_RDMA_READ = 2
    WC_COMP_SWAP = 3
    WC_FETCH_ADD = 4
    WC_RECV = 128
    WC_RECV_RDMA_WITH_IMM = 129
    # statuses of completions (numbers of ibv_wc_status)
    WC_SUCCESS = 0
    WC_LOC_LEN_ERR = 1
    WC_LOC_PROT_ERR = 4
    WC_WR_FLUSH_ERR = 5
    WC_REM_INV_REQ_ERR = 9
    WC_REM_ACCESS_ERR = 10
    WC_RETRY_EXC_ERR = 12
    WC_RNR_RETRY_EXC_ERR = 13
    # access flags (numbers of ibv_access_flags)
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    # queue pair states
    QPS_RESET = 0
    QPS_INIT = 1
    QPS_RTS = 3
    QPS_ERROR = 6

cdef struct work_completion:
    uint64_t wr_id
    uint32_t status
    uint32_t opcode
    uint32_t byte_len
    uint32_t imm_data
    uint32_t qp_num
    uint32_t has_imm

cdef class Memory:
    cdef uint8_t* data
    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly int fd
    cdef readonly bint writable
    cdef object owner
    cdef bint mapped_here
    cdef readonly bint closed
    cdef object __weakref__

cdef class MemoryRegion:
    cdef readonly Memory memory
    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly uint32_t lkey
    cdef readonly uint32_t rkey
    cdef readonly int access
    cdef uint8_t* data

cdef class CompletionQueue:
    cdef readonly int depth
    cdef int c_poll(self, work_completion* out, int n) noexcept nogil

cdef class RemoteView:
    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly uint32_t rkey
    cdef const uint8_t* data

cdef class QueuePair:
    cdef readonly uint32_t qp_num
    cdef readonly CompletionQueue send_cq
    cdef readonly CompletionQueue recv_cq
    cdef int c_state(self) noexcept nogil
    cdef int c_post_read(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length, uint64_t remote_address, uint32_t rkey) noexcept nogil
    cdef int c_read_in_place(self, RemoteView view, uint64_t remote_address,
                             uint32_t length) noexcept nogil
    cdef int c_post_write(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                          uint32_t length, uint64_t remote_address, uint32_t rkey) noexcept nogil
    cdef int c_post_write_imm(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                              uint32_t length, uint64_t remote_address, uint32_t rkey,
                              uint32_t imm) noexcept nogil
    cdef int c_post_write_imm_inline(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                     uint32_t length, uint32_t inline_at,
                                     const uint8_t* inline_data, uint32_t inline_length,
                                     uint64_t remote_address, uint32_t rkey,
                                     uint32_t imm) noexcept nogil
    cdef int c_post_write_summed(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                 uint32_t length, uint64_t remote_address, uint32_t rkey,
                                 bint notify, uint32_t imm) noexcept nogil
    cdef int c_post_send(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length) noexcept nogil
    cdef int c_post_recv(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                         uint32_t length) noexcept nogil
    cdef int c_post_fetch_add(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                              uint64_t remote_address, uint32_t rkey, uint64_t add) noexcept nogil
    cdef int c_post_compare_swap(self, uint64_t wr_id, uint64_t local_address, uint32_t lkey,
                                 uint64_t remote_address, uint32_t rkey, uint64_t compare,
                                 uint64_t swap) noexcept nogil
