"""The body of the commit kernel, for `kdirect.log.kernel`: see commit.pyx.

Law: every function is called with the kernel's mutex held.  What returns an `int` returns a code of
`kdirect.log.results` unless its comment says otherwise, and fills `out` only as far as it came:
`clear_result` goes first and `finish_request` last.
"""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kdirect.log.results cimport commit_result
from kdirect.log.state cimport kernel_state

cdef struct sealed_head:        # what a head was when it was sealed
    int64_t base
    uint64_t size               # bytes of records
    int64_t end_offset
    int64_t max_timestamp
    int64_t max_timestamp_offset
    uint32_t offset_entries     # of its two indexes
    uint32_t time_entries

# A request

cdef void clear_result(commit_result* out) noexcept nogil
# Nothing was committed yet.
cdef int check_batches(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms,
                       bint checked, int64_t* records) noexcept nogil
# Frames, CRCs, counts, sizes, attributes and timestamps of whole batches; not their sequence
# numbers.  Fills `s.infos` and `records`, how many there are; changes nothing else.  `checked`: the
# same bytes have passed before and nobody else can write them, so CRCs and counts are skipped.
cdef int commit_request(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil
# Commit bytes that lie in the head, at the tail or after it.  Those after it are moved to the tail
# once they are checked, and the place that they leave becomes zeros.
cdef int append_request(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                        bint checked, commit_result* out) noexcept nogil
# Copy `data`, which lies elsewhere, to the tail and commit it.  `checked` as above.
cdef bint marker_room(kernel_state* s, uint32_t count, int64_t now_ms) noexcept nogil
# Has the head room for so many markers, and may it take them?  If the head is over, that is noted
# for whoever makes room.
cdef int append_marker(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                       commit_result* out) noexcept nogil
# Append the control batch by which a coordinator ends the transaction of a producer; nobody else
# can write `data`.
cdef int commit_stamped(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil
# As `commit_request`, for batches that keep the offsets and leader epochs that they carry; they lie
# at the tail, and nowhere else.
cdef int append_stamped(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil
# As `append_request`, for batches that keep what they carry.
cdef int finish_request(kernel_state* s, int error, commit_result* out) noexcept nogil
# Put `error` and what follows from it into `out`, and count it; returns `error`.

# The head

cdef void add_time_entry(kernel_state* s, bint last) noexcept nogil
# An entry for the largest timestamp so far, if the time index has none yet.  `last`: the head is
# being sealed, so the entry that was kept free for this may be used.
cdef uint64_t clear_piece(kernel_state* s, uint64_t at, uint64_t end,
                          uint64_t* zeros) noexcept nogil
# Make the first bytes of [max(at, tail), end) zeros, so few that the mutex is not held for long.
# Returns where the next piece begins, or `end`.  `zeros` counts the bytes in a row, up to there,
# that were zeros already.
cdef int seal_head(kernel_state* s, sealed_head* out) noexcept nogil
# Take the head away, and say what it was: 0, ENOENT (there is no head) or ENOMEM (nothing changed).
