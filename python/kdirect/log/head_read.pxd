"""Reads of a head in C: see head_read.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint64_t

from kdirect.log.kernel cimport CommitKernel

cdef struct head_read:
    # of one moment
    int64_t high_watermark
    int64_t last_stable
    int64_t log_start
    int64_t log_end
    int64_t leader_epoch
    # what there is to copy: [position, position + size) of the head that begins at `base`
    int64_t base
    uint64_t position
    uint64_t size

cdef bint look_into_head(CommitKernel kernel, int64_t offset, uint64_t limit, uint64_t most,
                         bint committed_only, int64_t dense_from, head_read* out) noexcept nogil
# Find whole batches from the one that holds `offset` on, below the high watermark: `limit` bytes of
# them at most, or the first one.  `size` 0: `offset` is at the high watermark or above it, up to
# the log end.  False, and `out` means nothing: the offset is not in the head, more than `most`
# bytes are to be read, they are not in memory, or do not continue the log; with `committed_only`,
# also where transactions may have to be told of.
cdef bint copy_from_head(CommitKernel kernel, const head_read* what, uint8_t* out) noexcept nogil
# Copy what was found.  False: the head has been sealed meanwhile.
cdef int64_t log_start_of(CommitKernel kernel) noexcept nogil
# Takes no lock.
