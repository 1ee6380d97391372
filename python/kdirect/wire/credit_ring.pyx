# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A ring of WRITEs to one peer, as many at a time as the peer gives credits for.

Owns: what is common to those who push bytes into a peer's memory and are told when the peer is done
with them: the numbers of the WRITEs, the credits, the work requests with the memory of their
notices, completions, and how far the source's bytes are free again.  What may not enter: where the
bytes come from and go to, which each WRITE says (`source_t`, `target_t`), and what an
acknowledgement says beyond "one credit more".  A producer's `FileWriter`
(`kdirect.client.direct_write`) is such a ring: its sources are a send buffer, its targets positions
in a granted head file, and its acknowledgements are entries of their own.

WRITEs are numbered from 0.  `posted`, `completed`, `acknowledged` and `freed` count them:

    freed <= completed, acknowledged <= posted <= freed + window
    posted <= acknowledged + credits

A WRITE takes one of the ring's `window` slots, and one of the peer's `credits`, when it is posted
(`c_post`).  Its completion says that the transport is done with the source; its acknowledgement
gives the credit back.  They come in either order, and each kind in the order of the WRITEs, so the
slot is free after both (`c_release`).  The credits of all rings of a queue pair together are the
receives that the peer keeps posted (`AckRouter.limit`).

What tells the peer of a WRITE is its immediate data, ``file id << 16 | order``; with `set_notices`
it is a plain WRITE followed by a SEND of file id, order and length, and the SEND's completion
counts as the WRITE's.  The peer gives credits back by a WRITE_WITH_IMM of its own, ``file id << 16
| count``, which the `AckRouter` hands to the ring that is attached under this file id.

Failure.  A post that the transport refuses and a completion with an error end the queue pair, and
with it all rings on it (`AckRouter.broken`).  A peer that gives back more credits than it took is
`desynchronised`: nothing that it says later can be trusted.

Memory.  The source of a WRITE belongs to the transport from its post to its completion.  So does
its notice; WRITE number i has entry i of the window, which is deregistered by the ring's owner
after the queue pair has nothing under way.

There is no lock.  One thread at a time calls a ring and its router; see `AckRouter`.
"""

from libc.errno cimport EAGAIN, ENOMEM
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kdirect.machine cimport kd_pause
from kdirect.format.layout cimport (
    IMM_FILE_ID_SHIFT,
    NOTICE_BYTES,
    NOTICE_FILE_ID,
    NOTICE_LENGTH,
    NOTICE_ORDER,
)
from kdirect.rdma.contract cimport MemoryRegion, QueuePair
from kdirect.wire.ack_router cimport DATA, AckReceiver, AckRouter

from kdirect.errors import QueuePairError


cdef class CreditRing(AckReceiver):
    """See the module.  `router`: polls the completions of `qp`; `window`: WRITEs whose slots are
    not free, rounded up to a power of two.  `credits` is as large until its owner lowers it."""

    def __init__(self, AckRouter router, QueuePair qp, int window):
        self.window = 1
        while self.window < <uint64_t> window:
            self.window *= 2
        self.credits = self.window
        self._router = router
        self._qp = qp

    def set_notices(self, MemoryRegion notices):
        """Tell the peer of WRITEs by a SEND from this memory, one notice for each slot of the
        window.  Before the first WRITE."""
        if notices.length < self.window * NOTICE_BYTES:
            raise ValueError("the memory for notices is smaller than the window")
        self._notices = notices

    # -- posting -----------------------------------------------------------------------------------

    cdef bint c_may_post(self) noexcept nogil:
        """Is there a free slot, and a credit of the ring and of its queue pair?"""
        return (self.posted - self.freed < self.window
                and self.posted - self.acknowledged < self.credits
                and self._router.requests_under_way < self._router.limit)

    cdef int c_post(self, source_t* source, const target_t* target, large_value_t* value,
                    bint must) noexcept nogil:
        """Post the next WRITE, which `c_may_post`: the bytes of `source`, but for those of a large
        value, which the transport may take from where they are.  Where it does not, they are copied
        into the hole, and there is no large value then.

        POSTED, QUEUE_FULL (not when the WRITE `must` be posted, nor when it is posted and its
        notice must follow) or POST_FAILED."""
        cdef uint64_t notice = 0
        cdef bint full = False, written = False
        cdef int rc
        if self._notices is not None:
            notice = (self.posted & (self.window - 1)) * NOTICE_BYTES
            memcpy(self._notices.data + notice + NOTICE_FILE_ID, &target.file_id, 2)
            memcpy(self._notices.data + notice + NOTICE_ORDER, &target.order, 2)
            memcpy(self._notices.data + notice + NOTICE_LENGTH, &source.length, 4)
        while True:
            rc = self.c_try(source, target, value, notice, &written)
            if rc != ENOMEM:
                break
            if full and not (must or written):
                return QUEUE_FULL
            full = True
            self._router.c_drain()
            if self._router._status != 0:
                return POST_FAILED
            kd_pause()
        if rc != 0:
            self._router.c_fail(rc)
            return POST_FAILED
        self._router.sends_under_way += 1
        self._router.requests_under_way += 1
        self.posted += 1
        return POSTED

    cdef int c_try(self, source_t* source, const target_t* target, large_value_t* value,
                   uint64_t notice, bint* written) noexcept nogil:
        """Post what is not posted yet; the errno that the transport gave."""
        cdef uint32_t imm = (<uint32_t> target.file_id << IMM_FILE_ID_SHIFT) | target.order
        cdef uint64_t id = target.file_id
        cdef int rc
        if value.hole:
            rc = self._qp.c_post_write_imm_inline(
                id, source.address, source.lkey, source.length, value.hole, value.data,
                value.length, target.address, target.rkey, imm)
            if rc != EAGAIN:
                return rc
            memcpy(source.data + value.hole, value.data, value.length)
            value.hole = 0
        if self._notices is None:
            return self._qp.c_post_write_imm(
                id, source.address, source.lkey, source.length, target.address, target.rkey, imm)
        if not written[0]:
            rc = self._qp.c_post_write(
                (<uint64_t> DATA << 32) | id, source.address, source.lkey, source.length,
                target.address, target.rkey)
            if rc != 0:
                return rc
            self._router.sends_under_way += 1
            written[0] = True
        return self._qp.c_post_send(
            id, self._notices.address + notice, self._notices.lkey, NOTICE_BYTES)

    def post(self, MemoryRegion source, uint64_t start, uint32_t length, uint64_t address,
             uint32_t rkey, uint16_t file_id, uint16_t order=0):
        """Post the next WRITE: `length` bytes from `start` of registered memory to `address` of the
        peer's.  Returns whether it was posted: it is not while there is no credit, or no room in
        the send queue.  QueuePairError when the queue pair is broken.  A large WRITE or a rare one
        may be posted from Python; a compiled owner calls `c_post`."""
        cdef source_t bytes_of
        cdef target_t target
        cdef large_value_t none
        cdef int rc = QUEUE_FULL
        if length > source.length or start > source.length - length:
            raise ValueError("the bytes of a WRITE lie outside of its source")
        bytes_of.data = source.data + start
        bytes_of.address = source.address + start
        bytes_of.lkey = source.lkey
        bytes_of.length = length
        target.address = address
        target.rkey = rkey
        target.file_id = file_id
        target.order = order
        none.hole = 0
        with nogil:
            if self._router._status != 0:
                rc = POST_FAILED
            elif self.c_may_post():
                rc = self.c_post(&bytes_of, &target, &none, False)
        if rc == POST_FAILED:
            raise QueuePairError(
                f"the queue pair is broken ({self._router.broken})",
                hint="open a new one; what was not acknowledged may have arrived")
        return rc == POSTED

    # -- what comes back ---------------------------------------------------------------------------

    cdef void c_send_done(self) noexcept nogil:
        self.completed += 1
        self.c_release()

    cdef int c_take_acks(self, uint16_t file_id, uint16_t count) noexcept nogil:
        """The peer gives `count` credits back.  A ring whose acknowledgements say more overrides
        this."""
        cdef uint16_t i
        if count > self.posted - self.acknowledged:
            self.desynchronised = True
            return 0
        for i in range(count):
            self.c_return_credit()
        self.c_release()
        return count

    cdef void c_return_credit(self) noexcept nogil:
        """The oldest WRITE that is not acknowledged is now."""
        self.acknowledged += 1
        self._router.requests_under_way -= 1

    cdef void c_release(self) noexcept nogil:
        """Free what can be freed.  A ring whose sources are its own, or which keeps some of them
        longer, overrides this."""
        self.c_free_before(self.posted)

    cdef bint c_free_before(self, uint64_t bound) noexcept nogil:
        """Free the slots of the WRITEs before `bound` that are completed and acknowledged; whether
        there were any."""
        if self.acknowledged < bound:
            bound = self.acknowledged
        if self.completed < bound:
            bound = self.completed
        if bound <= self.freed:
            return False
        self.freed = bound
        return True

    @property
    def in_flight(self):
        """WRITEs not acknowledged."""
        return self.posted - self.acknowledged

    # -- the end -----------------------------------------------------------------------------------

    cdef void c_give_up(self) noexcept nogil:
        """Nobody waits any more for the acknowledgements that are due; their credits are the queue
        pair's again.  The ring may still have WRITEs under way: see `wait_completed`."""
        self._router.requests_under_way -= self.posted - self.acknowledged
        self.posted = self.completed = self.freed = self.acknowledged

    def wait_completed(self, int timeout_ms=1000):
        """Wait until no WRITE of this ring is under way, so that its memory is its own again; True
        when it is.  False: an RNIC may still send them again, for seconds, or the queue pair broke,
        with which they end."""
        return self._wait_sends(self.posted, timeout_ms)

    cdef bint _wait_sends(self, uint64_t count, int timeout_ms) except -1:
        """Wait until so many WRITEs have completed, for ever with a negative timeout; whether they
        have."""
        cdef double until = -1
        while self.completed < count and self._router._status == 0:
            with nogil:
                self._router.c_drain()
            if self.completed < count and self._router._status == 0:
                if until < 0:
                    until = self._router._monotonic() + timeout_ms / 1000.0
                elif timeout_ms >= 0 and self._router._monotonic() >= until:
                    break
                self._router._send_cq.wait(10, 20)
        return self.completed >= count
