"""C interface of fixed.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kdirect.blocks cimport Block
from kdirect.format.decode cimport ArrowDecoder
from kdirect.format.records cimport section

cdef extern from "fixed_run.h" nogil:
    enum:
        KD_FIXED_CHUNK
    ctypedef struct kd_chunk:
        int64_t rows
        const uint8_t** values
        int64_t* offsets
        int64_t* stamps
        const uint8_t** keys
        int64_t* key_lengths
    ctypedef struct kd_fixed:
        const uint8_t* p
        const uint8_t* end
        int64_t count
        int64_t offset_delta
        int64_t base_offset
        uint32_t size
    ctypedef struct kd_test:
        uint32_t position
        int32_t width
        int32_t negate
        uint64_t low
        uint64_t span
    ctypedef struct kd_time:
        uint32_t position
        int32_t width
        int64_t scale
        int64_t base
        int64_t least
        int64_t greatest
    int64_t kd_fixed_scan(kd_fixed* run, kd_chunk* chunk)
    void kd_fixed_keep(kd_chunk* chunk, const kd_test* test, int64_t* times)
    void kd_fixed_between(kd_chunk* chunk, const int64_t* numbers, int64_t least, int64_t most)
    void kd_fixed_gather(const kd_chunk* chunk, uint32_t position, uint32_t width, uint8_t* out)
    void kd_fixed_times(const kd_chunk* chunk, const kd_time* time, int64_t* out)
    void kd_fixed_bounds(kd_time* time, const int64_t* times, int64_t rows)
    void kd_fixed_texts(uint8_t* data, uint32_t width, int64_t rows, int32_t* ends)

cdef enum:
    FIELDS_MAX = 256
    TESTS_MAX = 16
    SAMPLES_MAX = 10

cdef struct field_t:            # a column
    uint32_t position
    uint32_t width              # of a row, in the value and in memory
    uint8_t* out                # the memory of the column

cdef enum:
    # Why a record gave no row; below 0, above the sizes that a value may have.
    BEFORE_1970 = -2
    TOO_FAR_AHEAD = -3

cdef struct bad_t:
    int64_t offset
    int64_t why                 # the wrong size of its value, or a reason

cdef struct dropped_t:          # what gave no row, and is not in `FixedDecoder.dropped` yet
    int64_t nulls
    int64_t wrong               # their values have a wrong size
    int64_t early
    int64_t ahead
    int64_t known               # the first of them but nulls, in `bad`

cdef class FixedDecoder(ArrowDecoder):
    cdef readonly object layout
    cdef readonly tuple columns
    cdef readonly object dropped            # what gave no row, up to the last take_rows
    cdef readonly bint with_keys, with_timestamps
    cdef readonly int64_t input_bytes       # of the records of the pending rows, framing included
    cdef field_t fields[FIELDS_MAX]
    cdef int fields_count
    cdef kd_test tests[TESTS_MAX]
    cdef int tests_count
    cdef kd_time time
    cdef kd_time stamps                     # of the records, as a column
    cdef uint32_t layout_size
    cdef bint timed
    cdef str time_name
    cdef kd_chunk* chunk
    cdef list blocks                        # of the fields
    cdef Block times
    cdef int64_t latest_us
    cdef int64_t clock_us                   # the greatest time so far of rows before the tests
    cdef dropped_t counts
    cdef bad_t bad[SAMPLES_MAX]

    cdef int64_t _most(self, int64_t records, int64_t section_bytes) noexcept nogil
    cdef int _note(self, int64_t offset, int64_t why) noexcept nogil
    cdef int _judge(self, int64_t* times) noexcept nogil
    cdef int _flush(self, const section* s, bint whole) noexcept nogil
    cdef int _read(self, const section* s, const uint8_t* p, const uint8_t* end) noexcept nogil
    cdef object _numbers(self, Block block, int64_t rows)
    cdef object _column(self, int i, object kind, int64_t rows)
