"""C interface of engine.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.state.arena cimport PageMemory, StateMemory
from kdirect.state.fragments cimport Fragment, kd_fragment
from kdirect.state.keys cimport KeyShape
from kdirect.state.table cimport Table
from kdirect.state.table_kernel cimport kd_keys, kd_table

cdef extern from "accumulate_run.h" nogil:
    enum:
        KD_NO_BIT, KD_COUNT
    ctypedef struct kd_accumulator:
        uint32_t kind, input, offset, delta, words, lanes, bit, option, precision
    ctypedef struct kd_input:
        const uint8_t* values
        uint64_t stride
        const uint8_t* valid
        uint64_t step
    int kd_update(const kd_accumulator* a, uint32_t offset, uint8_t* base, const uint64_t* at,
                  const uint32_t* rows, uint32_t n, const kd_input* inp, const int64_t* times,
                  uint64_t time_step, int track, uint64_t stamp)
    int kd_goes_with_count(uint32_t kind)
    int kd_update_counted(const kd_accumulator* a, uint32_t offset, uint32_t count, uint8_t* base,
                          const uint64_t* at, const uint32_t* rows, uint32_t n,
                          const kd_input* inp)
    int kd_merge(const kd_accumulator* a, uint32_t offset, uint8_t* base, const uint64_t* at,
                 const uint32_t* rows, uint32_t n, const uint64_t* begin, uint32_t from_offset,
                 uint64_t stamp)
    void kd_merge_seen(uint8_t* base, const uint64_t* at, const uint32_t* rows, uint32_t n,
                       const uint64_t* begin)

cdef extern from "route_run.h" nogil:
    enum:
        KD_DROP, KD_FEW_EXECUTORS
    ctypedef struct kd_route:
        uint16_t owners[256]
        uint16_t self, executors
        int all_own, leads
        int64_t origin, size, least_bucket, most_time, bucket, low
        uint16_t slot
        int64_t cached[4096]
        uint16_t cached_slot[4096]
        uint64_t late, null_time, early, ahead, filtered, other
        int64_t first_bad, newest
    ctypedef struct kd_rows:
        const int64_t* times
        const uint8_t* time_valid
        const uint8_t* mask
        uint64_t time_shift, mask_shift
    void kd_route_begin(kd_route* r)
    void kd_route_bucket(kd_route* r, int64_t bucket)
    void kd_route_forget(kd_route* r)
    void kd_route_learn(kd_route* r, int64_t bucket, uint16_t slot)
    int kd_route_same(kd_route* r, const kd_rows* rows, uint64_t begin, uint32_t n)
    uint32_t kd_route_rows(kd_route* r, const kd_rows* rows, uint64_t begin, uint32_t i, uint32_t n,
                           const uint64_t* hash, uint16_t* targets, int64_t* buckets)
    uint32_t kd_split_rows(kd_route* r, uint32_t n, const uint64_t* hash, uint16_t* targets,
                           int64_t* buckets, uint16_t* present, uint32_t* numbers, uint32_t* order)
    uint32_t kd_sort_rows(const uint16_t* targets, uint32_t n, uint32_t* counts, uint16_t* present,
                          uint32_t* numbers, uint32_t* order)

cdef extern from "page_run.h" nogil:
    enum:
        KD_PAGE_ENTRIES, KD_PAGE_TUPLES, KD_MOST_INPUTS
    ctypedef struct kd_tuple:
        uint32_t inputs, words
        uint32_t width[64]
        uint32_t at[64]
        int32_t time
    ctypedef struct kd_page:
        const uint16_t* owners
        uint32_t self, sender, shape, key_words, fixed_words, strings, texts
        uint32_t state_words, tuple_words
        int64_t least_bucket, most_bucket
        uint32_t inputs
        int has_seen
        uint32_t kind, count, head
        uint64_t rows
        int unseen

cdef class Engine:
    cdef readonly StateMemory memory
    cdef readonly PageMemory pages
    cdef readonly KeyShape keys
    cdef readonly object layout
    cdef readonly dict slots             # bucket -> slot of its window table
    cdef readonly list fragments         # one for each executor, None for this one
    cdef public uint64_t batch           # what changed keys are stamped with
    cdef public double expected_rows     # of the epoch that is going on, of all leaders
    cdef public bint track               # a null was met: seen bits are written
    cdef list _tables                    # of each slot, None where it is free
    cdef list _free_slots
    cdef bytes _initial, _initial_seen
    cdef kd_route* route
    cdef kd_table** targets
    cdef kd_fragment** deltas
    cdef double* shares                  # of the virtual partitions, by leader
    cdef kd_accumulator* cells
    cdef uint32_t cell_count, counted_cell
    cdef int count_cell                  # is updated together with counted_cell; -1: none
    cdef list _first_logs                # index sizes of windows that were dropped
    cdef uint64_t lanes                  # executors
    cdef uint32_t lane                   # of this executor
    cdef int32_t stamp
    cdef int32_t time_input
    cdef kd_tuple tuple_form
    cdef kd_page page_form
    cdef uint64_t* changed
    cdef uint64_t changed_count, changed_room
    # scratch for `room` rows
    cdef uint32_t room
    cdef uint64_t* hash
    cdef uint64_t* positions
    cdef uint64_t* addresses
    cdef int64_t* buckets
    cdef uint32_t* order
    cdef uint32_t* offsets
    cdef uint16_t* row_targets
    cdef uint32_t* counts
    cdef uint16_t* present
    cdef uint32_t* numbers
    cdef uint32_t* known
    cdef uint32_t* unknown
    cdef uint8_t* heads
    cdef uint64_t heads_room
    cdef int c_scratch(self, uint32_t room) except -1
    cdef uint16_t c_slot(self, int64_t bucket) except? 0xFFFF
    cdef int c_find(self, uint16_t target, const kd_keys* keys, const uint32_t* rows,
                    uint32_t n) except -1 nogil
    cdef int c_own(self, uint16_t target, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                   const kd_input* inputs, const int64_t* times, uint64_t step,
                   uint32_t lane) except -1 nogil
    cdef int c_apply(self, uint8_t* base, const uint32_t* rows, uint32_t n, const kd_input* inputs,
                     const int64_t* times, uint64_t step, uint32_t lane,
                     bint delta) except -1 nogil
    cdef int c_other(self, uint16_t leader, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                     const kd_input* inputs, const int64_t* times) except -1 nogil
    cdef int c_tuples(self, uint16_t leader, const kd_keys* keys, const uint32_t* rows, uint32_t n,
                      const kd_input* inputs, const int64_t* times) except -1 nogil
    cdef int c_block(self, const kd_keys* keys, const kd_rows* rows, uint64_t begin, uint32_t n,
                     const kd_input* inputs) except -1 nogil
    cdef int c_changed(self, uint32_t n) except -1 nogil
    cdef int c_heads(self, uint64_t room) except -1
    cdef int c_overflow(self, uint32_t cell) except -1 nogil
    cdef _point(self, kd_input* given, list inputs, uint64_t n)
    cdef _grow(self, uint16_t target)
    cdef int c_room_for_changed(self, uint32_t n) except -1 nogil
