"""C face of the commit kernel: see kernel.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef struct commit_result:
    int16_t error              # Kafka error code; 0: committed
    uint16_t batches           # record batches in the request
    uint8_t duplicate          # 1: an idempotent producer's repetition; base_offset is that of the original, nothing was appended
    int64_t base_offset        # of the first record
    int64_t last_offset        # of the last record
    int64_t end_position       # log end position afterwards
    int64_t log_append_time    # ms, or -1 with CreateTime

cdef class CommitKernel:
    # Kafka error codes it returns: 2 CORRUPT_MESSAGE, 10 MESSAGE_TOO_LARGE, 45 OUT_OF_ORDER_SEQUENCE_NUMBER, 47 INVALID_PRODUCER_EPOCH,
    # 87 INVALID_RECORD; and, inside kdirect: -2 NO_SPACE (the head has no room: roll, then repeat), -3 WRONG_POSITION (not the tail), -4 NO_HEAD
    cdef int c_commit(self, uint64_t position, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil
    # Bytes already lie at [position, position + length) of the head segment (an RDMA producer put them there); position must be the tail.
    cdef int c_append(self, const uint8_t* data, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil
    # Copy `data` to the tail, then commit (TCP produce, replication).  On error the bytes past the tail are zeroed again.
    cdef int c_attach_slot(self, uint8_t* slot, uint16_t file_id) noexcept nogil
    # The slot (SLOT_BYTES of memory that outlives the attachment) is filled now and updated at every change of the head until it is detached or the
    # head is sealed (then it gets its last update with SLOT_FLAG_SEALED and is dropped from the list).  0 or ENOMEM.
    cdef void c_detach_slot(self, uint8_t* slot) noexcept nogil
