"""The channels of a process: see channel.pyx."""
from libc.stdint cimport uint32_t, uint64_t

from kdirect.rdma.channel_ends cimport Wakeups


cdef class ChannelSet(Wakeups):
    cdef readonly object device, domain
    cdef bint _own_domain
    cdef list _ends                             # by number; None: closed
    cdef list _senders, _receivers
    cdef void** _by_number
    cdef readonly uint32_t most
    cdef readonly uint32_t slots, slot_bytes
    cdef readonly uint64_t ring_bytes           # of all slots of a channel
    cdef bint _woken                            # `wake` was called since it last ended a wait
    cdef bint _closed

    cdef bint c_ready(self) noexcept nogil
    cdef bint c_owing(self) noexcept nogil
