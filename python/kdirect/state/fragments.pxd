"""C interface of fragments.pyx."""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kdirect.state.arena cimport Log, PageMemory
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_log, kd_table

cdef enum:
    KD_AS_ENTRIES     # every row is aggregated
    KD_AS_BOTH        # rows of keys that have an entry are, the others become tuples
    KD_AS_TUPLES

ctypedef struct kd_fragment:
    uint64_t rows         # of this epoch, those in tuples included
    uint64_t tuple_rows
    uint64_t look_at      # the number of rows at which the way is looked at again
    int way               # of the rows that come
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
    cdef uint64_t _looked_rows, _looked_entries  # when it was decided last
    cdef double _hits, _known  # the share of rows that met a known key then, and the known keys
    cdef uint32_t _shape, _tuple_words
    cdef int c_look(self, double expected_rows) except -1
    cdef list _finished(self, list pages, int kind, kd_table* form, uint64_t rows)
