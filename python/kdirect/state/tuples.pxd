"""C interface of tuples.pyx."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from kdirect.state.arena cimport PageMemory
from kdirect.state.rows cimport kd_row_shape
from kdirect.state.table_kernel cimport kd_keys

cdef extern from "chains_run.h" nogil:
    uint64_t kd_tuples_put(uint32_t timed, uint32_t key_words, const kd_keys* keys,
                           const uint32_t* rows, const int64_t* bucket, const int64_t* time,
                           const uint8_t* flags, const uint64_t* words, uint64_t n, uint8_t* page,
                           uint64_t* tail, uint64_t end, uint8_t** to)
    int64_t kd_tuples_parse(const uint8_t* page, uint64_t at, uint64_t used, uint64_t most,
                            uint32_t key_words, uint32_t timed, uint32_t sides,
                            const kd_row_shape** shape, int64_t* bucket, uint32_t* key_at,
                            uint64_t* hash, uint64_t* words, int64_t* time, uint8_t* flags,
                            const uint8_t** row)

cdef class ChainShape:
    cdef readonly uint32_t key_words
    cdef readonly tuple rows           # RowShape of each side
    cdef readonly bint timed
    cdef readonly object gap           # of a session, or None
    cdef readonly bint interval        # rows are intervals with states (sessions.pyx)
    cdef readonly uint32_t check       # a CRC of what decides how tuples are read
    cdef const kd_row_shape* c_rows[2]

cdef class ParsedPage:
    cdef readonly uint32_t count
    cdef readonly object buckets, words, times, flags, sources, hashes
    cdef kd_keys keys
    cdef object _owners

cdef class TuplePages:
    cdef readonly ChainShape shape
    cdef readonly PageMemory memory
    cdef readonly uint32_t sender
    cdef readonly uint64_t rows        # since the last `take`
    cdef uint64_t _page                # address of the page that is filled, 0: none
    cdef uint64_t _used
    cdef uint32_t _count
    cdef list _full                    # (address, bytes)
    cdef int c_add(self, const kd_keys* keys, const uint32_t* rows, const int64_t* bucket,
                   const int64_t* time, const uint8_t* flags, const uint64_t* words, uint64_t n,
                   uint8_t** to) except -1
    cdef int c_close(self) except -1
