"""C face of the commit kernel: see kernel.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.batch cimport batch_info

# Re-exported: modules cimport them from here.
from kdirect.log.results cimport (
    COMMIT_CORRUPT_MESSAGE, COMMIT_DUPLICATE_SEQUENCE, COMMIT_FENCED_LEADER_EPOCH, COMMIT_INVALID_PRODUCER_EPOCH, COMMIT_INVALID_RECORD,
    COMMIT_INVALID_TIMESTAMP, COMMIT_MESSAGE_TOO_LARGE, COMMIT_NO_HEAD, COMMIT_NO_SPACE, COMMIT_OK, COMMIT_OUT_OF_ORDER_SEQUENCE,
    COMMIT_RECORD_LIST_TOO_LARGE, COMMIT_STORAGE_ERROR, COMMIT_WRONG_POSITION, commit_result)

cdef class CommitKernel:
    cdef void* _state          # kernel_state of commit.pxd: modules that cimport this class do not depend on its layout

    # Kafka error codes it returns: 2 CORRUPT_MESSAGE, 10 MESSAGE_TOO_LARGE, 18
    # RECORD_LIST_TOO_LARGE, 32 INVALID_TIMESTAMP, 45 OUT_OF_ORDER_SEQUENCE_NUMBER, 46
    # DUPLICATE_SEQUENCE_NUMBER, 47 INVALID_PRODUCER_EPOCH, 56 KAFKA_STORAGE_ERROR (out of memory),
    # 74 FENCED_LEADER_EPOCH, 87 INVALID_RECORD; and, inside kdirect: -2 NO_SPACE (the head has no
    # room: roll, then repeat), -3 WRONG_POSITION (not the tail), -4 NO_HEAD
    cdef int c_commit(self, uint64_t position, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil
    # Bytes already lie at [position, position + length) of the head segment (an RDMA producer put
    # them there); position must be the tail. After an error, and after a duplicate, the bytes at
    # the tail are zeros again.
    cdef int c_append(self, const uint8_t* data, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil
    # Copy `data` to the tail, then commit (TCP produce, replication).  `data` must be memory that
    # nobody else writes.
    cdef int c_attach_slot(self, uint8_t* slot, uint16_t file_id) noexcept nogil
    # The slot (SLOT_BYTES of memory that outlives the attachment, 8-byte aligned) is filled now and
    # updated at every change of the head until it is detached or the head is sealed (then it gets
    # its last update with SLOT_FLAG_SEALED and is dropped from the list).  0, EINVAL or ENOMEM.
    cdef void c_detach_slot(self, uint8_t* slot) noexcept nogil
    cdef int c_commit_to(self, int64_t segment_base_offset, uint64_t position, uint32_t length, int64_t now_ms,
                         commit_result* out) noexcept nogil
    # c_commit that also demands that the head is still the segment of this base offset (else
    # WRONG_POSITION, nothing touched).
    cdef void c_clear_tail(self, int64_t segment_base_offset, uint64_t end) noexcept nogil
    # Zero [tail, end) of that head: what a revoked producer wrote beyond its last commit. A run of
    # requests under one lock and with one update of the slots: c_begin, any number of the next two,
    # c_end.
    cdef void c_begin(self) noexcept nogil
    cdef void c_end(self) noexcept nogil
    cdef int c_commit_next(self, int64_t segment_base_offset, uint64_t position, uint32_t length, int32_t leader_epoch, int64_t now_ms,
                           commit_result* out) noexcept nogil
    # As c_commit_to, but `position` may lie behind the tail (requests before it were refused): the
    # bytes are moved to the tail.  After an error, and after a duplicate, they are zeros.
    # FENCED_LEADER_EPOCH when `leader_epoch` is not the kernel's.
    cdef int c_append_next(self, int64_t segment_base_offset, const uint8_t* data, uint32_t length, int64_t now_ms,
                           commit_result* out) noexcept nogil
    # c_append that also demands that the head is still the segment of this base offset.
    cdef int c_restore_batch(self, const batch_info* info, int64_t now_ms) noexcept nogil
    # Recovery: note a batch found in the log in the producer table, unchecked.  0 or ENOMEM.
