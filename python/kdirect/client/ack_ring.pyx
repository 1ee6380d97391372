# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The ring of acknowledgements that the broker WRITEs for one writer (KafkaDirect §4.2.2).

Owns: the registered memory of the ring, and how much of it was read.  What may not enter: what an
acknowledgement means for a request, which `kdirect.client.direct_write` decides.

The ring has two halves of equal size, since a writer may hold two files: the present one and the
next one, or the present one and the one before it.  The acknowledgements of each file come into a
half of their own.

Memory.  The broker WRITEs the entries; this side reads an entry only after the completion that
announces it.  The entry cannot be overwritten before that: the broker has at most as many entries
under way as there are requests, and half a ring has room for twice the window of requests.  The
ring is deregistered by the writer that owns it, after the broker has given the grant up.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kdirect.format.layout cimport (
    ACK_BASE_OFFSET,
    ACK_BATCHES,
    ACK_BYTES,
    ACK_ERROR,
    ACK_FLAGS,
    ACK_ORDER,
    ACK_SEQUENCE,
)
from kdirect.rdma.contract cimport MemoryRegion


cdef class AckRing:
    """See the module.  `half_entries`: entries of each half, a power of two."""

    def __init__(self, MemoryRegion region, uint64_t half_entries):
        if region.length < 2 * half_entries * ACK_BYTES:
            raise ValueError("each half of the acknowledgement ring must hold twice the window")
        self.region = region
        self.half_entries = half_entries

    @property
    def other_half(self):
        """Where the half that the present file does not use begins, in bytes."""
        return (self._present ^ 1) * self.half_entries * ACK_BYTES

    cdef void c_restart(self) noexcept nogil:
        """A new grant begins: its acknowledgements come into the first half, from its start on."""
        self._present = 0
        self._read[0] = self._read[1] = 0

    cdef void c_expect_next(self) noexcept nogil:
        """The next file was granted: its acknowledgements come into the other half."""
        self._read[self._present ^ 1] = 0

    cdef void c_go_on(self) noexcept nogil:
        """The next file becomes the present one, and the present one the file before."""
        self._present ^= 1

    cdef bint c_take(self, bint present, ack_t* ack) noexcept nogil:
        """Copy the next entry of the present file's half, or of the other one.  False: the entry
        is not the one that should come next, so the two sides do not agree any more."""
        cdef uint64_t half = self._present if present else self._present ^ 1
        cdef uint64_t entry = self._read[half] & (self.half_entries - 1)
        cdef const uint8_t* e = self.region.data + (half * self.half_entries + entry) * ACK_BYTES
        cdef uint32_t sequence
        memcpy(&sequence, e + ACK_SEQUENCE, 4)
        if sequence != <uint32_t> self._read[half]:
            return False
        memcpy(&ack.order, e + ACK_ORDER, 2)
        memcpy(&ack.error, e + ACK_ERROR, 2)
        memcpy(&ack.flags, e + ACK_FLAGS, 2)
        memcpy(&ack.batches, e + ACK_BATCHES, 4)
        memcpy(&ack.base_offset, e + ACK_BASE_OFFSET, 8)
        self._read[half] += 1
        return True
