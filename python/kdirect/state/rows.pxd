"""C interface of rows.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "rows_run.h" nogil:
    ctypedef struct kd_row_column:
        int kind
        uint32_t width
        uint32_t at
        uint32_t utf8

    ctypedef struct kd_row_shape:
        uint32_t columns
        uint32_t strings
        uint32_t null_bytes
        uint32_t fixed_bytes
        kd_row_column* column

    ctypedef struct kd_row_source:
        const uint8_t* valid
        const uint8_t* values
        const int32_t* offsets
        uint64_t shift

    enum:
        KD_ROW_BOOL
        KD_ROW_FIXED
        KD_ROW_STRING

    uint64_t kd_row_words(const kd_row_shape* s, const kd_row_source* f, const uint32_t* rows,
                          uint64_t n, uint64_t* words)
    void kd_row_encode(const kd_row_shape* s, const kd_row_source* f, const uint32_t* rows,
                       uint64_t n, const uint64_t* words, uint8_t** to, uint32_t* cursor)
    int64_t kd_row_fits(const kd_row_shape* s, const uint8_t* row, uint64_t most)
    void kd_row_take_fixed(const kd_row_shape* s, uint32_t c, const uint8_t** row, uint64_t n,
                           uint8_t* valid, uint8_t* values)
    uint64_t kd_row_find_strings(const kd_row_shape* s, uint32_t c, const uint8_t** row, uint64_t n,
                                 uint8_t* valid, const uint8_t** bytes, int32_t* offsets)
    void kd_row_copy_strings(const uint8_t** bytes, const int32_t* offsets, uint64_t n,
                             uint8_t* out)

cdef class RowShape:
    cdef kd_row_shape c
    cdef readonly tuple names
    cdef readonly tuple types

cdef class RowBlock:
    cdef readonly uint64_t rows
    cdef readonly uint64_t longest     # words of the longest chosen row
    cdef RowShape shape
    cdef kd_row_source* source
    cdef const uint32_t* chosen
    cdef uint64_t* words
    cdef uint8_t** to
    cdef uint32_t* cursor
    cdef object _owners
    cdef void c_encode(self) noexcept nogil
