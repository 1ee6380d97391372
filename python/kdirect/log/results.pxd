"""Outcome of a request to the commit kernel: see results.pyx."""
from libc.stdint cimport int16_t, int64_t, uint8_t, uint16_t

cdef enum:
    # results of a request: 0, one of Kafka's error codes, or one of kdirect's own
    COMMIT_OK = 0
    COMMIT_NO_SPACE = -2            # the head has no room: roll, then repeat
    COMMIT_WRONG_POSITION = -3      # not the tail
    COMMIT_NO_HEAD = -4             # no preallocated head: ensure_head, then repeat
    COMMIT_NOT_CONTIGUOUS = -5      # a stamped batch does not begin at the log end offset
    COMMIT_UNKNOWN_EPOCH = -6       # a stamped batch of a leadership not told to the kernel
    COMMIT_UNVERIFIED_TRANSACTION = -7  # its coordinator has not confirmed it: verify, then repeat
    COMMIT_CORRUPT_MESSAGE = 2
    COMMIT_MESSAGE_TOO_LARGE = 10
    COMMIT_RECORD_LIST_TOO_LARGE = 18
    COMMIT_INVALID_TIMESTAMP = 32
    COMMIT_OUT_OF_ORDER_SEQUENCE = 45
    COMMIT_DUPLICATE_SEQUENCE = 46  # appended before, too long ago to know its offset
    COMMIT_INVALID_PRODUCER_EPOCH = 47
    COMMIT_INVALID_TXN_STATE = 48
    COMMIT_COORDINATOR_FENCED = 52  # TRANSACTION_COORDINATOR_FENCED
    COMMIT_STORAGE_ERROR = 56
    COMMIT_FENCED_LEADER_EPOCH = 74 # granted, or stamped, under an earlier leadership
    COMMIT_INVALID_RECORD = 87

cdef struct commit_result:
    int16_t error              # Kafka error code; 0: committed
    uint16_t batches           # record batches in the request
    uint8_t duplicate          # 1: an idempotent producer's repetition; base_offset is that of the
                               # original, nothing was appended
    int64_t base_offset        # of the first record
    int64_t last_offset        # of the last record
    int64_t end_position       # log end position afterwards
    int64_t log_append_time    # ms, or -1 with CreateTime


cdef class CommitResult:
    cdef readonly int error
    cdef readonly int batches
    cdef readonly bint duplicate
    cdef readonly int64_t base_offset
    cdef readonly int64_t last_offset
    cdef readonly int64_t end_position
    cdef readonly int64_t log_append_time

cdef CommitResult to_python(const commit_result* r)
