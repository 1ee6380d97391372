# cython: language_level=3
"""What the commit kernel answers, for Python.

Law: values only.  The C form is `commit_result` (results.pxd); the codes are named there.
"""

cimport cython


@cython.freelist(64)
cdef class CommitResult:
    """Outcome of one request.  `error` 0: committed (or, with `duplicate`, committed before);
    otherwise Kafka's error code, or one of NO_SPACE, WRONG_POSITION, NO_HEAD, NOT_CONTIGUOUS,
    UNKNOWN_EPOCH, UNVERIFIED_TRANSACTION of `kdirect.log.kernel`.  Offsets are -1 after an
    error."""

    def __repr__(self):
        return (f"CommitResult(error={self.error}, base_offset={self.base_offset},"
                f" last_offset={self.last_offset}, batches={self.batches},"
                f" duplicate={self.duplicate}, end_position={self.end_position},"
                f" log_append_time={self.log_append_time})")


cdef CommitResult to_python(const commit_result* r):
    cdef CommitResult out = CommitResult.__new__(CommitResult)
    out.error = r.error
    out.batches = r.batches
    out.duplicate = r.duplicate
    out.base_offset = r.base_offset
    out.last_offset = r.last_offset
    out.end_position = r.end_position
    out.log_append_time = r.log_append_time
    return out


def refusal(int error):
    """What the kernel would answer to a request that it refuses with `error`."""
    cdef CommitResult out = CommitResult.__new__(CommitResult)
    out.error = error
    out.base_offset = out.last_offset = out.log_append_time = -1
    return out
