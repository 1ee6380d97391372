"""The state of a commit kernel, and the points in the log that it keeps.

Law: only the modules of the kernel (`kernel`, `commit`, `slots`, `transactions`, `aborted_list`)
touch it, with its mutex held.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.format.batch cimport batch_info
from kdirect.log.producers cimport producer_state, producer_table
from kdirect.machine cimport pthread_mutex_t

cdef struct mark_t:           # a point in the log up to which records may be read
    int64_t base              # of the segment in which it lies: the last one, or one in `sealed`
    uint64_t position         # in that segment; never its end, unless it is the last segment
    int64_t offset            # of the first record that may not be read

cdef struct sealed_t:         # a sealed segment with records above the stable mark
    int64_t base
    uint64_t size
    int64_t end_offset

cdef struct transaction_t:    # one that is open, or whose marker may not be read yet
    int64_t producer_id
    int64_t first_offset
    int64_t marker            # offset of its marker; -1: it is open
    mark_t start              # where its first batch begins, or the log, if that begins after it

cdef struct aborted_t:        # an entry of the aborted index
    int64_t producer_id
    int64_t first_offset
    int64_t last_offset       # of the marker
    int64_t stable_offset

cdef struct aborted_list:     # what a reader READs of the aborted index; at NULL: there is none
    uint8_t* at
    uint32_t capacity         # entries
    uint32_t count
    uint64_t next             # number of the first entry of the index that is not looked at yet
    uint16_t file_id
    bint full

cdef struct slot_entry:
    uint8_t* slot
    uint16_t file_id
    int64_t base              # of the segment that the slot tells of
    int64_t size              # of that segment once it is sealed; -1: it is the last one
    aborted_list aborted

cdef struct kernel_state:
    pthread_mutex_t lock
    # the head; data is NULL while there is none: then base and tail say where the log ends
    uint8_t* data
    uint64_t capacity         # up to where the head's bytes exist
    uint64_t tail
    int64_t base
    int64_t first_timestamp
    int64_t created_ms
    bint over                 # a request was refused that no growth makes room for: roll the head
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
    int64_t dense_from        # copies of another log may lack records below
    mark_t readable           # the high watermark
    mark_t stable             # the last stable offset
    sealed_t* sealed          # by offset
    uint32_t sealed_count
    uint32_t sealed_capacity
    int32_t leader_epoch      # of the present leadership
    int32_t last_epoch        # of the last batch
    bint hold                 # commits do not move the marks, because of one of these two:
    bint gate_holds           # the partition's gate moves them
    uint32_t counted          # replicas whose marks count (replica_marks), and one if they stand
    bint disk_holds           # acknowledgements wait for the disk, too; and so do marks that count
    mark_t disk               # every record below is on disk; base -1: nobody knows where that lies
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
    bint dirty                # slots do not show the last commits; never while the mutex is free
    # producers
    producer_table producers
    # transactions
    transaction_t* transactions     # by first offset
    uint32_t transactions_count
    uint32_t transactions_capacity
    uint32_t transactions_ended     # of these
    bint transactions_unknown       # the log was cut, and they are not known yet: stable stands
    aborted_t* aborted              # by the offset of the marker
    uint32_t aborted_count
    uint32_t aborted_capacity
    uint64_t aborted_gone           # entries that were forgotten before the first of these
    int64_t aborted_from            # markers below are forgotten
    uint64_t tickets                # of verifications so far
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
