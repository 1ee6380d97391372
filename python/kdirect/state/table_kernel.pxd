"""The C kernels of tables, as declared in table_run.h."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "table_run.h" nogil:
    ctypedef struct kd_log:
        uint8_t* base
        uint64_t tail
        uint64_t end

    ctypedef struct kd_table:
        kd_log* log
        uint64_t* index
        uint64_t mask
        uint64_t used
        uint64_t most
        uint32_t key_words
        uint32_t prefix
        uint32_t state_words
        uint32_t wanted
        const uint64_t* initial

    ctypedef struct kd_keys:
        const uint64_t* words
        uint64_t stride
        const uint32_t* offsets
        const uint64_t* hash
        const int64_t* bucket
        uint64_t bucket_stride

    uint64_t kd_mix(uint64_t w)
    uint64_t kd_bucket_hash(uint64_t hash, int64_t bucket)
    uint64_t kd_variable_words(uint64_t length)
    uint64_t kd_hash_words(const uint64_t* key, uint64_t words)
    uint32_t kd_find(kd_table* t, const kd_keys* k, const uint32_t* rows, uint32_t i, uint32_t n,
                     uint64_t* out)
    uint32_t kd_part_known(const kd_table* t, const kd_keys* k, const uint32_t* rows, uint32_t n,
                           uint64_t* at, uint32_t* known, uint32_t* unknown)
    void kd_index_entries(kd_table* t, uint64_t begin, uint64_t end)
    void kd_unindex_entries(kd_table* t, uint64_t begin, uint64_t end)
    uint64_t kd_scan(const kd_table* t, uint64_t begin, uint64_t end, uint64_t* out, uint64_t most)
    int64_t kd_count_entries(const kd_table* t, uint64_t begin, uint64_t end)
