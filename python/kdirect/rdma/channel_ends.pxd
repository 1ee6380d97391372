"""The two ends of a channel: see channel_ends.pyx."""
cimport cython
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, work_completion
from kdirect.rdma.credit_ring cimport CreditRing, WriteQueue
from kdirect.rdma.layout cimport GENERATIONS

cdef extern from *:
    """
    #define kd_low_bit(n) ((uint32_t)__builtin_ctz(n))
    """
    uint32_t kd_low_bit(uint32_t n) noexcept nogil

cdef enum:
    # what `Sender.c_send` and `Receiver.c_poll` return
    CHANNEL_ENDED = -1         # `check` raises why
    CHANNEL_NOT_NOW = 0        # no credit, or no buffer
    CHANNEL_DONE = 1           # it was sent, or there is one

    # how a channel ended
    END_NONE = 0
    END_LOST = 1
    END_REVOKED = 2
    END_TORN = 3
    END_LENGTH = 4
    END_SEQUENCE = 5
    END_GENERATION = 6
    END_CREDIT = 7
    END_CLOSED = 8

    CREDIT_SOURCES = 16        # WRITEs of the credit word that may be under way


cdef struct header_t:          # of a buffer: what its footer says
    uint64_t sequence          # the channel's; a sender leaves it alone
    uint32_t batch
    uint32_t epoch
    uint32_t attempt
    uint32_t length            # the channel's, of the payload
    uint16_t flags             # of the owner: FLAG_END_OF_EPOCH, FLAG_END_OF_BATCH
    uint8_t kind


cdef class Wakeups:
    cdef readonly CompletionQueue completions   # the receive queue of all channels

    cdef void c_drain(self) noexcept nogil


cdef class ChannelEnd(WriteQueue):
    cdef readonly Wakeups channels
    cdef readonly str peer
    cdef readonly uint32_t number        # in its set; of its receives and its work requests
    cdef readonly bint connected
    cdef int how                         # END_NONE: it is open
    cdef bint told                       # `wait` has returned because of its end
    cdef void* _ring                     # the Sender of this end, or NULL
    cdef void* _receiver                 # the Receiver of this end, or NULL
    cdef readonly uint64_t receives_taken, writes_done

    cdef void c_end(self, int how) noexcept nogil
    cdef void c_note(self, uint32_t status) noexcept nogil
    cdef void c_take(self, const work_completion* wc) noexcept nogil
    cdef bint c_ready(self) noexcept nogil
    cdef bint c_owes(self) noexcept nogil


@cython.final
cdef class Sender(CreditRing):
    cdef readonly ChannelEnd end
    cdef readonly uint32_t slots, slot_bytes
    cdef readonly uint32_t payload_bytes     # the most of one buffer
    cdef MemoryRegion _word                  # the credit word
    cdef MemoryRegion _staging               # None before the first `buffer`
    cdef uint64_t _ring_address              # at the peer
    cdef uint32_t _ring_rkey
    cdef bint _wakes_due                     # a buffer took the last credit: a receive may be used
    cdef readonly bint blocked               # the last send found no credit
    cdef uint64_t _refused
    cdef readonly uint64_t bytes_sent, notified

    cdef int c_send(self, uint8_t* data, uint64_t address, uint32_t lkey,
                    const header_t* header, bint wake) noexcept nogil
    # Send `header.length` bytes of registered memory (`data` here, `address` as in its region);
    # the FOOTER_BYTES after them are the channel's until `completed` passes this buffer.
    cdef bint c_may_send(self) noexcept nogil
    # Is there a credit?  Takes credits and completions that have come.
    cdef void c_refresh(self) noexcept nogil


@cython.final
cdef class Receiver:
    cdef readonly ChannelEnd end
    cdef readonly uint32_t slots, slot_bytes
    cdef MemoryRegion _ring
    cdef MemoryRegion _sources               # of the WRITEs of the credit word
    cdef uint64_t _word_address              # at the peer
    cdef uint32_t _word_rkey
    cdef const uint8_t* data                 # of the present buffer; NULL: there is none
    cdef header_t header                     # of the present buffer
    cdef readonly uint64_t received          # buffers polled
    cdef readonly uint64_t released          # buffers given back
    cdef readonly uint64_t returned          # buffers whose credit was returned
    cdef uint64_t _notified                  # `returned` at the last WRITE_WITH_IMM
    cdef bint _wake_sender                   # the next return goes by WRITE_WITH_IMM
    cdef readonly uint32_t group             # credits that are returned at a time
    cdef readonly uint64_t credit_writes
    cdef readonly uint64_t bytes_received
    cdef uint64_t _empty                     # polls that found nothing since the last buffer

    cdef int c_poll(self) noexcept nogil
    # The next buffer: CHANNEL_DONE (`data`, `header` are its), CHANNEL_NOT_NOW or CHANNEL_ENDED.
    # While there is a present buffer, that one.
    cdef void c_release(self) noexcept nogil
    # Give the present buffer back: its bytes may be overwritten from now on.
    cdef bint c_arrived(self, uint64_t sequence) noexcept nogil
    cdef bint c_changed(self) noexcept nogil
    cdef uint32_t _generation_before(self) noexcept nogil
    cdef int c_check(self, const uint8_t* footer, uint64_t last) noexcept nogil
    cdef _present(self)
    cdef void c_return_credits(self) noexcept nogil
    cdef bint c_write_credit(self, bint notify) noexcept nogil


cdef inline uint32_t generation_of(uint64_t sequence, uint32_t slots) noexcept nogil:
    """Of a buffer: the turn of the ring that it is in, as its footer says it.  Never 0.  `slots` is
    a power of two."""
    return <uint32_t> ((sequence >> kd_low_bit(slots)) % GENERATIONS) + 1
