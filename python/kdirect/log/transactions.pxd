"""Transactions in a log: see transactions.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.batch cimport batch_info
from kdirect.log.state cimport kernel_state, mark_t

cdef enum:
    MARKER_BYTES = 78             # a control batch with one end-of-transaction marker
    MARKER_IS_ABORT = 0           # the types of a control record that end a transaction
    MARKER_IS_COMMIT = 1

cdef struct marker_t:             # what a control batch says
    int32_t coordinator_epoch
    bint is_abort

# All of them with the kernel's mutex held.
cdef int check_transaction(kernel_state* s) noexcept nogil
# May the request in `s.infos`, whose sequences have passed, be appended?  0 or a COMMIT_* code;
# `s.scratch` then has its transaction, and there is room in the tables.
cdef int check_marker(kernel_state* s, int64_t producer_id, int16_t producer_epoch,
                      int32_t coordinator_epoch) noexcept nogil
# May a coordinator end a transaction of this producer?  0 or a COMMIT_* code; `s.scratch` becomes
# the producer's state after the marker, and there is room in the tables.
cdef void begin_transaction(kernel_state* s, int64_t producer_id,
                            const mark_t* start) noexcept nogil
# A transaction's first batch lies there; room was made.
cdef void end_transaction(kernel_state* s, int64_t producer_id, int64_t marker_offset,
                          bint is_abort) noexcept nogil
# The transaction of this producer, if it has one, ends with the marker at that offset; room was
# made.  An abort that the index has, because only the log's end was cut, is not added twice.
cdef void note_batch(kernel_state* s, const batch_info* b, const uint8_t* p, int64_t base,
                     uint64_t position, int64_t now_ms) noexcept nogil
# Note a batch of the log, whose bytes are at `p`, and at `position` of the segment `base`, in the
# tables of producers and of transactions; it is not judged, and room was made.
cdef int reserve_transactions(kernel_state* s, uint32_t more) noexcept nogil
# Make sure that so many more transactions fit, begun or aborted: 0 or ENOMEM.
cdef void settle_stable(kernel_state* s) noexcept nogil
# The last stable offset, from the high watermark and the transactions.  The caller has the slots
# updated.
cdef void keep_ended(kernel_state* s, int64_t end_offset) noexcept nogil
# Forget the transactions that are open, or whose markers are at `end_offset` or above.
cdef void cut_transactions(kernel_state* s, int64_t end_offset, bint empty) noexcept nogil
# The log ends before `end_offset` now, and the transactions that are open there are not known until
# `known_transactions` is set.
cdef void start_transactions_at(kernel_state* s) noexcept nogil
# The log start has moved: a transaction that began before it holds the last stable offset there.
cdef bint read_marker(const uint8_t* p, const batch_info* b, marker_t* out) noexcept nogil
# What a control batch says; False: it ends no transaction.
cdef void write_marker(uint8_t* out, int64_t producer_id, int16_t producer_epoch,
                       int32_t coordinator_epoch, bint commit, int64_t now_ms) noexcept nogil
# MARKER_BYTES of a control batch, with base offset 0.
