"""C interface of table.pyx."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kdirect.state.arena cimport Log, StateMemory
from kdirect.state.table_kernel cimport kd_keys, kd_table

cdef class Table:
    cdef kd_table c
    cdef readonly Log log
    cdef readonly StateMemory memory
    cdef public int64_t bucket
    cdef int first_log            # the first index has 2**first_log bytes
    cdef int c_needed(self)
    cdef uint64_t _index_position
    cdef int _index_log
    cdef bytes _initial
    cdef int c_grow(self) except -1
    cdef int c_find(self, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                    uint64_t* positions) except -1 nogil
    cdef int c_index(self, int log) except -1
