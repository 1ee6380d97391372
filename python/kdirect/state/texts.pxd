"""C interface of texts.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kdirect.state.arena cimport Log
from kdirect.state.chains cimport kd_stretch
from kdirect.state.table_kernel cimport kd_log

cdef extern from "texts_run.h" nogil:
    enum:
        KD_TEXT_MIN
        KD_TEXT_MAX
        KD_TEXT_FIRST
        KD_TEXT_LAST
        KD_TEXT_SET
        KD_LONGEST_TEXT

    ctypedef struct kd_text:
        uint32_t kind, input, offset, words
        uint64_t width
        uint32_t utf8

    ctypedef struct kd_text_input:
        const uint8_t* bytes
        const int32_t* offsets
        uint64_t width
        const uint8_t* valid

    ctypedef struct kd_text_cursor:
        uint32_t cell
        uint64_t slot

    uint32_t kd_text_update(const kd_text* a, uint8_t* base, kd_log* log, const uint64_t* at,
                            const uint32_t* rows, uint32_t i, uint32_t n, const kd_text_input* inp,
                            const int64_t* times, uint64_t* wants)
    uint64_t kd_text_merge(const kd_text* a, uint64_t* s, kd_log* log, const uint64_t* f,
                           const uint8_t* from_base)
    uint64_t kd_text_tail(const kd_text* cells, uint32_t count, const uint64_t* state,
                          const uint8_t* base, uint64_t most, kd_text_cursor* begin,
                          uint64_t* words, uint8_t* out)
    uint64_t kd_text_take_tail(const kd_text* cells, uint32_t count, uint64_t* state, kd_log* log,
                               const uint64_t* words, const uint8_t* tail)
    int kd_text_fits(const kd_text* cells, uint32_t count, const uint64_t* words,
                     const uint8_t* tail, uint64_t bytes)
    void kd_text_values(const kd_text* a, const uint8_t* base, const uint64_t* at, uint64_t n,
                        const uint8_t* text_base, const uint8_t** bytes, int64_t* lengths)
    void kd_set_values(const kd_text* a, const uint8_t* base, const uint64_t* at, uint64_t n,
                       const uint8_t* text_base, const uint8_t** bytes, int64_t* lengths)
    void kd_text_copy(const uint8_t** bytes, const int64_t* lengths, uint64_t n, uint8_t* out)
    int kd_text_check(const kd_text* cells, uint32_t count, const uint64_t* state,
                      const uint8_t* base, const kd_stretch* stretches, uint64_t n)

cdef class TextStore:
    cdef kd_log* c
    cdef kd_log own
    cdef uint64_t room
    cdef Log log
    cdef int c_room(self, uint64_t need) except -1

cdef class TextCells:
    cdef kd_text* cells
    cdef readonly uint32_t count
    cdef readonly tuple texts
    cdef readonly uint64_t words
    cdef readonly bytes initial
    cdef readonly uint32_t check
    cdef kd_text_input inputs[64]
    cdef object _owners
    cdef int c_update(self, uint8_t* base, const uint64_t* at, const uint32_t* rows, uint32_t n,
                      const int64_t* times, TextStore store) except -1 nogil
    cdef int c_merge(self, uint8_t* base, const uint64_t* at, uint32_t n, const uint64_t* sources,
                     const uint8_t* from_base, TextStore store) except -1 nogil
    cdef int c_take_tail(self, uint64_t* state, const uint64_t* words, const uint8_t* tail,
                         TextStore store) except -1 nogil
