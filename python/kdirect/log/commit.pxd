"""Check, stamp and publish: see commit.pyx."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.batch cimport batch_info
from kdirect.log.producers cimport producer_state, producer_table
from kdirect.log.results cimport commit_result
from kdirect.machine cimport pthread_mutex_t

cdef struct slot_entry:
    uint8_t* slot
    uint16_t file_id

cdef struct kernel_state:
    pthread_mutex_t lock
    # the head; data is NULL while there is none: then base and tail say where the log ends
    uint8_t* data
    uint64_t capacity         # up to where the head's bytes exist
    uint64_t tail
    int64_t base
    int64_t first_timestamp
    int64_t created_ms
    bint over                 # a request was refused that no growth of the head makes room for: it is to be rolled
    int64_t max_timestamp
    int64_t max_timestamp_offset
    uint64_t since_index
    # indexes of the head; may be NULL (none kept)
    uint8_t* offset_index
    uint32_t offset_entries
    uint32_t offset_capacity
    uint8_t* time_index
    uint32_t time_entries
    uint32_t time_capacity
    int64_t last_indexed_timestamp
    # offsets
    int64_t log_start
    int64_t log_end
    int64_t high_watermark
    uint64_t readable
    int64_t last_stable
    uint64_t stable
    int32_t leader_epoch
    bint hold
    bint accept_transactional
    # policy
    bint append_time
    uint32_t max_batch_bytes
    uint32_t segment_bytes
    uint32_t index_interval
    int64_t segment_ms
    int64_t before_max_ms
    int64_t after_max_ms
    # slots
    slot_entry* slots
    uint32_t slots_count
    uint32_t slots_capacity
    uint32_t updates
    bint dirty                # the slots do not show the last commits yet; never while the mutex is free
    # producers
    producer_table producers
    # the request under way
    batch_info* infos
    uint32_t infos_count
    uint32_t infos_capacity
    producer_state scratch
    # counters
    uint64_t runs             # times that the mutex was taken to commit
    uint64_t slot_updates     # times that the slots were brought up to date
    uint64_t requests
    uint64_t batches
    uint64_t bytes
    uint64_t duplicates
    uint64_t refused

# All of them with the kernel's mutex held.
cdef int check_batches(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms, int64_t* records) noexcept nogil
# Frames, CRCs, counts, sizes, attributes, timestamps of whole batches.  Fills `s.infos`; changes
# nothing.
cdef int check_request(kernel_state* s, const uint8_t* p, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil
# check_batches, and sequences.  Changes no record.
cdef int commit_request(kernel_state* s, uint64_t position, uint32_t length, int64_t now_ms, bint move, commit_result* out) noexcept nogil
# `move`: the bytes may lie behind the tail; once checked they are moved there, and what they leave
# becomes zeros.
cdef int append_request(kernel_state* s, const uint8_t* data, uint32_t length, int64_t now_ms, commit_result* out) noexcept nogil
cdef void clear_result(commit_result* out) noexcept nogil
cdef int finish_request(kernel_state* s, int error, commit_result* out) noexcept nogil
cdef void add_time_entry(kernel_state* s, bint last) noexcept nogil
cdef void move_high_watermark(kernel_state* s, int64_t offset, uint64_t position) noexcept nogil
cdef void fill_slot(kernel_state* s, slot_entry* entry, uint16_t flags) noexcept nogil
cdef void update_slots(kernel_state* s, uint16_t flags) noexcept nogil
cdef void publish(kernel_state* s) noexcept nogil
# Bring the slots up to date if commits have been made since: the last thing before the mutex is
# given back.
cdef void drop_slots(kernel_state* s, uint16_t flags) noexcept nogil
# Their last update, with `flags`, and they are forgotten.
cdef uint64_t clear_piece(kernel_state* s, uint64_t at, uint64_t end, uint64_t* zeros) noexcept nogil
# Zero a bounded piece of [max(at, tail), end) of the head; where the next begins, or `end`.
# `zeros` counts the bytes in a row that were zeros already.
