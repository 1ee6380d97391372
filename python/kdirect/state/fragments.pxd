"""C interface of fragments.pyx."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kdirect.state.arena cimport Log, PageMemory
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_log, kd_table

ctypedef struct kd_fragment:
    uint64_t rows         # of this epoch, those in tuples included
    uint64_t tuple_rows
    int as_tuples
    int decided
    kd_log* tuples

cdef class PageLog(Log):
    cdef readonly PageMemory pages
    cdef list c_take(self)

cdef class Fragment:
    cdef readonly uint32_t leader, sender
    cdef readonly Table table            # entries: one for each key and bucket of the epoch
    cdef readonly PageLog tuples
    cdef kd_fragment c
    cdef bint always_tuples
    cdef double least_ratio
    cdef uint64_t expected_rows
    cdef uint32_t _shape, _tuple_words
    cdef int c_decide(self) except -1
    cdef list _finished(self, list pages, int kind, kd_table* form, uint64_t rows)
