"""Numbers of `FileWriter`, and a record on its way through it: see direct_write.pyx."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kdirect.wire.produce_ring cimport large_value_t

cdef enum:
    SINGLE_OVERHEAD = 128      # a batch of one record without headers: 61 + at most 7 varints

    # Values from so many bytes on are left to the transport to copy: below it a second copy is as
    # cheap as a reference to keep.
    INLINE_FROM = 8192

    C_SENT = 0
    C_NO_ROOM_FILE = 1         # the head file has no room, or access is recalled
    C_NO_ROOM_BUFFER = 2       # the send buffer or the window is full
    C_NOT_GRANTED = 3          # access has ended, or a request was refused
    C_BROKEN = 4
    C_SENT_AND_ASK = 5         # as SENT, and now is the time to ask for the next file

    DUPLICATE_SEQUENCE_NUMBER = 46   # committed before


cdef struct record_t:              # one record that is sent as a batch of its own
    const uint8_t* key
    int64_t key_length             # -1: there is no key
    large_value_t large            # the value
    int64_t value_length           # -1: there is no value
    int64_t timestamp_ms
    int64_t producer_id
    int16_t epoch
    int32_t sequence
    bint transactional             # it belongs to the producer's transaction
    uint64_t start                 # of the batch in the send buffer
    uint32_t length                # of the batch
