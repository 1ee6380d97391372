"""The last offset of each key: see key_offsets.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef struct key_cell:
    uint64_t hash_low
    uint64_t hash_high
    int64_t after             # the offset after the last record of this key; 0: a free cell

cdef class KeyOffsets:
    cdef key_cell* cells
    cdef uint64_t[2] secret
    cdef readonly int64_t slots
    cdef readonly int64_t limit
    cdef readonly int64_t used
    cdef readonly int64_t latest_offset

    cdef key_cell* _cell(self, const uint8_t* key, int64_t length, uint64_t* h) noexcept nogil
    cdef bint note(self, const uint8_t* key, int64_t length, int64_t offset) noexcept nogil
    cdef int64_t find(self, const uint8_t* key, int64_t length) noexcept nogil
    cdef void reach(self, int64_t offset) noexcept nogil
