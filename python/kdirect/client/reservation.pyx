# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Reserving a stretch of a shared head file (KafkaDirect §4.2.2, figures 4 and 5).

Owns: the atomics on the head's word, and the eight bytes where they land.  What may not enter: the
WRITE that follows a reservation, and what happens when the file is full
(`kdirect.client.direct_write`).

The word has two bytes of order and six of position.  FETCH_AND_ADD reserves whatever the word is;
COMPARE_AND_SWAP only if the word is still the one that was seen last, so it never goes beyond the
file's end, but may have to be repeated.

Memory.  The eight bytes where a reservation lands belong to the transport from the post of the
atomic to its completion.  The writer that owns this object deregisters them after its queue pair
has nothing under way.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kdirect.wire.ack_router cimport ATOMIC, AckRouter
from kdirect.machine cimport kd_now_ns, kd_pause
from kdirect.format.layout cimport SHARED_ORDER_SHIFT, SHARED_WORD_BYTES
from kdirect.rdma.contract cimport MemoryRegion, QueuePair

cdef uint64_t ONE_ORDER = <uint64_t> 1 << SHARED_ORDER_SHIFT
cdef uint64_t POSITION_MASK = ONE_ORDER - 1


cdef class Reservation:
    """See the module.  `open` for each shared grant."""

    def __init__(self, AckRouter router, QueuePair qp, MemoryRegion landing):
        self._router = router
        self._qp = qp
        self.landing = landing

    cdef open(self, int file_id, uint64_t address, uint32_t rkey, int64_t position, int64_t length):
        """Reserve in this file from now on: `length` bytes, of which `position` are taken."""
        self.address = address
        self.rkey = rkey
        self._file_id = <uint64_t> file_id
        self._file_bytes = <uint64_t> length
        self._word = <uint64_t> position
        self.end_order = -1
        self.end_position = -1

    cdef int reserve(self, uint32_t length, uint64_t* position, uint16_t* order) except -1:
        """RESERVED with what was reserved, BEYOND_FILE or QUEUE_PAIR_BROKEN.  Waits for the atomic
        however long it takes: once posted it may have happened."""
        cdef int rc
        while True:
            if self.compare_and_swap and (self._word & POSITION_MASK) + length > self._file_bytes:
                return BEYOND_FILE
            with nogil:
                rc = self.c_post(length)
            while rc == RESERVED and not self.completed and self._router._status == 0:
                with nogil:
                    self.c_spin()
                if not self.completed and self._router._status == 0:
                    self._router._send_cq.wait(100, 0)
            if rc != RESERVED or self._router._status != 0:
                return QUEUE_PAIR_BROKEN
            rc = self.c_taken(length, position, order)
            if rc != SWAPPED_FIRST:
                return rc

    cdef int c_post(self, uint32_t length) noexcept nogil:
        """Post the atomic that reserves `length` bytes and an order."""
        cdef uint64_t id = (<uint64_t> ATOMIC << 32) | self._file_id
        cdef uint64_t add = ONE_ORDER + length
        cdef int rc
        self.completed = False
        while True:
            if self.compare_and_swap:
                rc = self._qp.c_post_compare_swap(
                    id, self.landing.address, self.landing.lkey, self.address, self.rkey,
                    self._word, self._word + add)
            else:
                rc = self._qp.c_post_fetch_add(
                    id, self.landing.address, self.landing.lkey, self.address, self.rkey, add)
            if rc != ENOMEM:
                break
            self._router.c_drain()
            if self._router._status != 0:
                return QUEUE_PAIR_BROKEN
            kd_pause()
        if rc != 0:
            self._router.c_fail(rc)
            return QUEUE_PAIR_BROKEN
        self._router.sends_under_way += 1
        return RESERVED

    cdef void c_spin(self) noexcept nogil:
        """Look for the completion for as long as the router spins."""
        cdef int64_t until = kd_now_ns() + self._router._spin_ns
        while True:
            self._router.c_drain()
            if self.completed or self._router._status != 0 or kd_now_ns() >= until:
                return
            kd_pause()

    cdef int c_taken(self, uint32_t length, uint64_t* position, uint16_t* order) noexcept nogil:
        """The atomic has completed: RESERVED and what was reserved, BEYOND_FILE or
        SWAPPED_FIRST."""
        cdef uint64_t old
        memcpy(&old, self.landing.data, SHARED_WORD_BYTES)
        position[0] = old & POSITION_MASK
        order[0] = <uint16_t> (old >> SHARED_ORDER_SHIFT)
        if position[0] + length > self._file_bytes:
            if position[0] <= self._file_bytes and not self.compare_and_swap:
                self.end_order = order[0]
                self.end_position = <int64_t> position[0]
            return BEYOND_FILE
        if self.compare_and_swap and old != self._word:
            self._word = old
            return SWAPPED_FIRST
        self._word = old + ONE_ORDER + length
        self.count += 1
        return RESERVED
