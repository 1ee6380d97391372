"""C interface of chain.pyx: does a batch continue the log?"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kdirect.format.batch cimport batch_info

cdef enum:
    # what is wrong with a batch, in addition to the codes of batch.pxd (positive, below 10)
    CHAIN_OK = 0
    # a negative base offset or last offset delta, or offsets that overflow
    CHAIN_BAD_OFFSETS = 20
    CHAIN_OVERLAP = 21         # it begins before the end of the batch before it
    CHAIN_GAP = 22             # it begins after it, where no offset can be missing
    CHAIN_BEYOND = 23          # it ends after the last offset that there is
    CHAIN_NOT_ASKED = 24       # the first batch ends before the offset asked for
    # its leader epoch is below that of the batch before it, or above the present one
    CHAIN_BAD_EPOCH = 25
    CHAIN_CUT = 26             # it ends after the last byte that there is

cdef struct chain_t:
    # where the next batch begins; -1: not known, it only has to end at `asked` or after
    int64_t next_offset
    int64_t asked
    # from this offset on, none is missing: the log was written by kdirect
    int64_t dense_from
    int64_t end_offset         # no batch ends after it
    int32_t least_epoch        # leader epochs from `dense_from` on: not below it,
    int32_t greatest_epoch     # and not above it
    int32_t copied_epoch       # of the batches below `dense_from`: not below it

cdef inline bint is_dense(const chain_t* c) noexcept nogil:
    # From here on no offset is missing: whether a batch continues the log is seen by its own
    # header.
    return c.next_offset >= 0 and c.next_offset >= c.dense_from


cdef inline bint continues_dense(const chain_t* c, const batch_info* info) noexcept nogil:
    # `follow_batch` would take the batch, while `is_dense` holds.  Inline, for decoders that have
    # just parsed the header.
    return (info.base_offset == c.next_offset and info.last_offset_delta >= 0
            and info.last_offset_delta < c.end_offset - c.next_offset
            and info.leader_epoch >= c.least_epoch and info.leader_epoch <= c.greatest_epoch)


cdef inline void move_dense(chain_t* c, const batch_info* info) noexcept nogil:
    # The batch, which `continues_dense` and whose CRC is right, is done with.
    c.next_offset = info.base_offset + info.last_offset_delta + 1
    c.least_epoch = info.leader_epoch


cdef void start_chain(chain_t* c) noexcept nogil
# Nothing is known: only that offsets rise.
cdef int follow_batch(chain_t* c, const batch_info* info) noexcept nogil
# CHAIN_OK, and `c` is after the batch; or what is wrong, and `c` is as before.
cdef int follow_batches(chain_t* c, const uint8_t* p, uint64_t n, uint64_t readable,
                        uint64_t* whole, batch_info* last) noexcept nogil
# Follow the whole batches at the start of p[0, n).  `readable` >= n bytes from p on are committed
# and end with a batch; those after n are not there yet.  Moves `whole` to the end of the last good
# batch.  CHAIN_OK: what is left is no whole batch yet; else what is wrong with the batch at
# `whole`, whose header is in `last`.  When one does not follow, the one before it has its CRC
# checked too.
cdef object chain_text(int code, const chain_t* c, const batch_info* info)
# What is wrong, as the end of a sentence that begins with the batch.
cdef object chain_error(int code, const chain_t* c, const batch_info* info, where, head)
# The exception of a client that reads; `head` are the first bytes of the batch.
