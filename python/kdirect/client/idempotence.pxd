"""Sequence numbers of one producer on one partition: see idempotence.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef int32_t add_one(int32_t sequence) noexcept nogil

cdef void mark_transactional(uint8_t* p, uint32_t size) noexcept nogil
# Say in the one batch p[0, size) that it belongs to a transaction, and sum it again.

cdef class ProducerIdentity:
    cdef readonly int64_t producer_id
    cdef readonly int16_t epoch
    cdef readonly int32_t next_sequence
    cdef readonly bint transactional
    cdef object _renew

    cdef int32_t c_stamp(self, uint8_t* p, uint64_t length) noexcept nogil
    # Give the batches in p[0, length) that have no producer id this one's, and sequences from
    # `next_sequence` on; the sequence after them. `next_sequence` moves with c_sent, once they are
    # on their way.
    cdef void c_sent(self, int32_t sequence) noexcept nogil
