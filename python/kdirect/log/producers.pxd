"""Idempotent producers: see producers.pyx."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t

from kdirect.format.batch cimport batch_info

cdef enum:
    REMEMBERED = 5            # batches of a producer id that are recognised (Kafka's number)

cdef struct batch_seen:
    int32_t first_sequence
    int32_t last_sequence
    int64_t base_offset
    int64_t last_offset

cdef struct producer_state:
    int64_t id                # -1: a free entry of the table
    int64_t last_time_ms      # when it last appended
    int64_t transaction_start # first offset of the open transaction, -1: none
    int32_t coordinator_epoch
    int32_t start_sequence    # of the first batch of this epoch that was taken; -1: not known, then
                              # all before the remembered ones were taken
    int16_t epoch             # -1: nothing known of it
    uint16_t count
    # whether it may open a transaction here (KIP-890)
    uint64_t ticket           # of the verification that was begun, 0: none
    int32_t least_sequence    # that a batch had since then
    int16_t ticket_epoch
    bint admitted             # its coordinator has confirmed the transaction
    batch_seen seen[REMEMBERED]   # oldest first

cdef struct producer_table:
    producer_state* entries
    uint32_t count
    uint32_t capacity         # a power of two, at least twice the count

cdef struct repetition:
    int64_t base_offset       # of the original's first record
    int64_t last_offset       # of its last
    uint32_t batches          # 0: the request is new

cdef producer_state* find_producer(const producer_table* t, int64_t id) noexcept nogil
cdef int reserve_producers(producer_table* t, uint32_t more) noexcept nogil
# Make sure that so many more producers fit: 0 or ENOMEM.
cdef void store_producer(producer_table* t, const producer_state* entry) noexcept nogil
cdef void start_producer(producer_state* p, int64_t id) noexcept nogil
cdef void remember_batch(producer_state* p, int32_t first, int32_t last, int64_t base_offset,
                         int64_t last_offset) noexcept nogil
cdef int expire(producer_table* t, int64_t before_ms) noexcept nogil
# Forget producers that last appended before: 0 or ENOMEM.
cdef int check_sequences(producer_table* t, const batch_info* batches, uint32_t n, int64_t log_end,
                         producer_state* next_state, repetition* repeated) noexcept nogil
# Kafka's rules for a request that would be appended at `log_end`: 0 or a COMMIT_* code.
# `next_state` becomes the producer's state after it (id -1: no producer id), for which there is
# room in the table; `repeated` says whether it was appended before.
cdef int restore_batch(producer_table* t, const batch_info* batch, int64_t now_ms) noexcept nogil
# Note a batch found in the log, unchecked: 0 or ENOMEM.
cdef void forget_producers(producer_table* t) noexcept nogil
cdef int copy_producers(const producer_table* t, producer_state** copy) noexcept nogil
# How many there are, in memory that the caller frees; -1: no memory.
cdef list entries_of(const producer_state* states, uint32_t n)
cdef void load_entry(producer_state* p, entry) except *
