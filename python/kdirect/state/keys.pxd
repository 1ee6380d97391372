"""C interface of keys.pyx."""
from libc.stdint cimport uint32_t, uint64_t

from kdirect.state.table_kernel cimport kd_keys

cdef class KeyBlock:
    cdef kd_keys c
    cdef readonly uint32_t rows
    cdef readonly uint32_t key_words   # 0: variable
    cdef object _owners                # arrays that `c` points into

cdef class KeyShape:
    cdef readonly tuple names
    cdef readonly tuple types
    cdef readonly bint nullable
    cdef readonly uint32_t words       # of a key; 0: variable
    cdef readonly uint32_t fixed_words # of a key's columns that are not strings
    cdef readonly uint32_t strings
    cdef readonly uint32_t texts       # bit c: string c is UTF-8
    cdef uint64_t _longest             # bytes of a key
    cdef list _columns
    cdef KeyBlock c_encode(self, list arrays, uint32_t n, bint hashed)
