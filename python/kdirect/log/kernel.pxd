"""C face of the commit kernel, for modules that call it without the GIL: see kernel.pyx.

Methods that begin with ``c_`` may be called from any thread, and take the kernel's mutex, but for
`c_commit_next` and `c_append_next`, which are called between `c_begin` and `c_end`.  Those that
take a `commit_result` fill it and return its `error`.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kdirect.format.batch cimport batch_info

# Re-exported: modules cimport them from here.
from kdirect.log.results cimport (
    COMMIT_CORRUPT_MESSAGE, COMMIT_DUPLICATE_SEQUENCE, COMMIT_FENCED_LEADER_EPOCH,
    COMMIT_INVALID_PRODUCER_EPOCH, COMMIT_INVALID_RECORD, COMMIT_INVALID_TIMESTAMP,
    COMMIT_INVALID_TXN_STATE,
    COMMIT_MESSAGE_TOO_LARGE, COMMIT_NO_HEAD, COMMIT_NO_SPACE, COMMIT_NOT_CONTIGUOUS, COMMIT_OK,
    COMMIT_OUT_OF_ORDER_SEQUENCE, COMMIT_RECORD_LIST_TOO_LARGE, COMMIT_STORAGE_ERROR,
    COMMIT_UNKNOWN_EPOCH, COMMIT_UNVERIFIED_TRANSACTION, COMMIT_WRONG_POSITION, commit_result)

cdef class CommitKernel:
    cdef void* _state          # a kernel_state (state.pxd); void, so that users need not cimport it

    # Error codes.  Kafka's: 2 CORRUPT_MESSAGE, 10 MESSAGE_TOO_LARGE, 18 RECORD_LIST_TOO_LARGE, 32
    # INVALID_TIMESTAMP, 45 OUT_OF_ORDER_SEQUENCE_NUMBER, 46 DUPLICATE_SEQUENCE_NUMBER, 47
    # INVALID_PRODUCER_EPOCH, 48 INVALID_TXN_STATE, 52 TRANSACTION_COORDINATOR_FENCED, 56
    # KAFKA_STORAGE_ERROR (out of memory), 74 FENCED_LEADER_EPOCH, 87 INVALID_RECORD.  Inside
    # kdirect: -2 NO_SPACE (the head has no room: roll, then repeat), -3
    # WRONG_POSITION (not the tail), -4 NO_HEAD, -5 NOT_CONTIGUOUS, -6 UNKNOWN_EPOCH,
    # -7 UNVERIFIED_TRANSACTION (nothing has changed: begin a verification, and repeat).

    # A request alone

    cdef int c_append(self, const uint8_t* data, uint32_t length, int64_t now_ms, bint stamped,
                      commit_result* out) noexcept nogil
    # Copy `data` to the tail, then commit it (TCP produce).  Nobody else writes that memory.
    # `stamped`: the batches are a copy of another log, and keep the offsets and leader epochs that
    # they carry.  They must go on where this log ends (else NOT_CONTIGUOUS), their epochs must not
    # go back (else FENCED_LEADER_EPOCH), and none may be above the kernel's (else UNKNOWN_EPOCH:
    # call `set_leader_epoch`, then repeat).

    # A run of requests, with one lock and one update of the slots for all: `c_begin`, any number of
    # `c_commit_next` and `c_append_next`, `c_end`.

    cdef void c_begin(self) noexcept nogil
    cdef void c_end(self) noexcept nogil
    cdef int c_commit_next(self, int64_t segment_base_offset, uint64_t position, uint32_t length,
                           int32_t leader_epoch, bint stamped, int64_t now_ms,
                           commit_result* out) noexcept nogil
    # Commit the bytes that an RDMA producer has put at [position, position + length) of the head:
    # at its tail, or after it, where requests between were refused; then they are moved to the
    # tail.  After an error, and after a duplicate, those bytes are zeros.  Nothing is touched after
    # WRONG_POSITION (the head is not the segment of that base offset, or `position` is below the
    # tail) and FENCED_LEADER_EPOCH (`leader_epoch` is not the kernel's).  `stamped` as above, but
    # `position` must be the tail, `leader_epoch` does not count, and after UNKNOWN_EPOCH the bytes
    # stay.
    cdef int c_append_next(self, int64_t segment_base_offset, const uint8_t* data, uint32_t length,
                           int64_t now_ms, bint checked, commit_result* out) noexcept nogil
    # `c_append` in a run, or WRONG_POSITION as above.  `checked`: `check` has passed these bytes,
    # and nobody has written that memory since, so their CRCs are not computed again.
    cdef int c_append_marker_next(self, int64_t segment_base_offset, const uint8_t* data,
                                  uint32_t length, int64_t now_ms,
                                  commit_result* out) noexcept nogil
    # The same of a transaction's marker; see `kernel_transactions.append_marker`.

    # The rest

    cdef int64_t c_high_watermark(self) noexcept nogil
    # Takes no lock: it may be older than a commit that is being made.
    cdef int64_t c_log_end(self) noexcept nogil
    # The same of the log end offset.
    cdef bint c_holds(self) noexcept nogil
    # Do commits leave the high watermark where it is?  Takes no lock.
    cdef bint c_gate_holds(self) noexcept nogil
    # Because the partition's gate moves it, and not the marks of replicas alone?  Takes no lock.
    cdef int c_restore_batch(self, const batch_info* info, const uint8_t* data, int64_t base,
                             uint64_t position, int64_t now_ms) noexcept nogil
    # Recovery: note a batch that is in the log, at `position` of the segment `base`, in the tables
    # of producers and transactions, unchecked.  0 or ENOMEM.

    # Of the Python face

    cdef _append(self, data, int64_t now_ms, bint stamped)
    cdef void _look(self, void* copy) noexcept
    cdef int64_t _base_or(self, base) except? -1
