"""Check, stamp and index requests: see commit.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kdirect.log.results cimport commit_result
from kdirect.log.state cimport kernel_state

cdef struct sealed_head:
    int64_t base
    uint64_t size
    int64_t end_offset
    int64_t max_timestamp
    int64_t max_timestamp_offset
    uint32_t offset_entries
    uint32_t time_entries

# All of them with the kernel's mutex held.
cdef int check_batches(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms,
                       bint checked, int64_t* records) noexcept nogil
# Frames, CRCs, counts, sizes, attributes, timestamps of whole batches.  Fills `s.infos`; changes
# nothing.  `checked`: these very bytes, which nobody else can write, have passed before, so their
# CRCs and counts are not looked at again.
cdef int commit_request(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil
# The bytes lie in the head, at the tail or after it: those after it are moved to the tail once they
# are checked, and what they leave becomes zeros.
cdef int append_request(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                        bint checked, commit_result* out) noexcept nogil
cdef int commit_stamped(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil
# The batches lie at the tail and keep the offsets and leader epochs that they carry.
cdef int append_stamped(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms,
                        commit_result* out) noexcept nogil
cdef void clear_result(commit_result* out) noexcept nogil
cdef int finish_request(kernel_state* s, int error, commit_result* out) noexcept nogil
cdef void add_time_entry(kernel_state* s, bint last) noexcept nogil
cdef uint64_t clear_piece(kernel_state* s, uint64_t at, uint64_t end,
                          uint64_t* zeros) noexcept nogil
# Zero a bounded piece of [max(at, tail), end) of the head; where the next begins, or `end`.
# `zeros` counts the bytes in a row that were zeros already.
cdef int seal_head(kernel_state* s, sealed_head* out) noexcept nogil
# Take the head away, and say what it was: 0, ENOENT (there is none) or ENOMEM.
