# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A ring of WRITEs to one peer, as many at a time as the peer gives credits for.

Owns: what is common to those who push bytes into a peer's memory and are told when the peer is done
with them: the numbers of the WRITEs, the credits, posting, completions, how far the source's bytes
are free again, and failure.  What may not enter: where the bytes come from and go to, which each
WRITE says (`source_t`, `target_t`), and how the peer says that it gives a credit back.  Two
protocols are built on it: the sender of a channel (`kdirect.rdma.channel`), whose credits are a
count in a word of its memory, and the produce requests of `kdirect.wire.produce_ring`, whose
credits are acknowledgements.

WRITEs are numbered from 0.  `posted`, `completed`, `acknowledged` and `freed` count them:

    freed <= completed, acknowledged <= posted <= freed + window
    posted <= acknowledged + credits

A WRITE takes one of the ring's `window` slots, and one of the peer's `credits`, when it is posted
(`c_post`).  Its completion says that the transport is done with the source; its acknowledgement
gives the credit back.  They come in either order, and each kind in the order of the WRITEs, so the
slot is free after both (`c_release`).  The credits of all rings of a queue pair together are at
most its `WriteQueue.limit`.

Failure.  A post that the transport refuses and a completion with an error end the queue pair, and
with it all rings on it (`WriteQueue.broken`).  A peer that gives back more credits than it took is
`desynchronised`: nothing that it says later can be trusted.

Memory.  The source of a WRITE belongs to the transport from its post to its completion.

There is no lock.  One thread at a time calls a ring and its queue.
"""

from libc.errno cimport ENOMEM
from libc.stdint cimport uint32_t, uint64_t

from kdirect.machine cimport kd_pause
from kdirect.rdma.contract cimport CompletionQueue, MemoryRegion, QueuePair

from kdirect.rdma.contract import STATUS_NAMES

import os
import time


cdef class WriteQueue:
    """The send side of a queue pair, which its rings share: what is under way, and how it ended.

    `limit`: WRITEs that may be unacknowledged over all rings; `monotonic`: the clock (seconds) of
    waits.  Who the completions are for is a subclass's knowledge (`c_drain`)."""

    def __init__(self, QueuePair qp, CompletionQueue send_cq, uint64_t limit,
                 monotonic=time.monotonic):
        self._qp = qp
        self._send_cq = send_cq
        self.limit = limit
        self._monotonic = monotonic

    @property
    def broken(self):
        """Why the queue pair is unusable, or an empty string."""
        if self._status == 0:
            return ""
        if self._status >= ERRNO_STATUS:
            return os.strerror(self._status - ERRNO_STATUS).lower()
        return STATUS_NAMES.get(self._status, str(self._status))

    cdef int c_drain(self) noexcept nogil:
        """Take every completion there is, and tell their rings (`CreditRing.c_send_done`).  -1 when
        the queue pair broke."""
        return -1 if self._status != 0 else 0

    cdef void c_fail(self, int error) noexcept nogil:
        """A post was refused with this errno: the queue pair cannot be used any more."""
        if self._status == 0:
            self._status = <uint32_t> (ERRNO_STATUS + error)


cdef class CreditRing:
    """See the module.  `queue`: polls the completions of `qp`; `window`: WRITEs whose slots are not
    free, rounded up to a power of two.  `credits` is as large until its owner lowers it."""

    def __init__(self, WriteQueue queue, QueuePair qp, int window):
        self.window = 1
        while self.window < <uint64_t> window:
            self.window *= 2
        self.credits = self.window
        self._queue = queue
        self._qp = qp

    # -- posting -----------------------------------------------------------------------------------

    cdef bint c_may_post(self) noexcept nogil:
        """Is there a free slot, and a credit of the ring and of its queue pair?"""
        return (self.posted - self.freed < self.window
                and self.posted - self.acknowledged < self.credits
                and self._queue.requests_under_way < self._queue.limit)

    cdef int c_post(self, const source_t* source, const target_t* target, bint must) noexcept nogil:
        """Post the next WRITE, which `c_may_post`: the bytes of `source`.

        POSTED, QUEUE_FULL (not when the WRITE `must` be posted, nor when a part of it is posted
        already) or POST_FAILED."""
        cdef bint full = False
        cdef int rc
        self._begun = False
        while True:
            rc = self.c_try(source, target)
            if rc != ENOMEM:
                break
            if full and not (must or self._begun):
                return QUEUE_FULL
            full = True
            self._queue.c_drain()
            if self._queue._status != 0:
                return POST_FAILED
            kd_pause()
        if rc != 0:
            self._queue.c_fail(rc)
            return POST_FAILED
        self._queue.sends_under_way += 1
        self._queue.requests_under_way += 1
        self.posted += 1
        return POSTED

    cdef int c_try(self, const source_t* source, const target_t* target) noexcept nogil:
        """Post what is not posted yet; the errno that the transport gave.  A ring whose WRITEs are
        more than one work request overrides this."""
        if target.notify:
            return self._qp.c_post_write_imm(
                self._id, source.address, source.lkey, source.length, target.address, target.rkey,
                target.imm)
        return self._qp.c_post_write(
            self._id, source.address, source.lkey, source.length, target.address, target.rkey)

    # -- what comes back ---------------------------------------------------------------------------

    cdef void c_send_done(self) noexcept nogil:
        """A WRITE has completed."""
        self.completed += 1
        self.c_release()

    cdef void c_return_credit(self) noexcept nogil:
        """The oldest WRITE that is not acknowledged is now."""
        self.acknowledged += 1
        self._queue.requests_under_way -= 1

    cdef bint c_return_credits(self, uint64_t count) noexcept nogil:
        """The peer gives `count` credits back.  False: it never had so many."""
        if count > self.posted - self.acknowledged:
            self.desynchronised = True
            return False
        self.acknowledged += count
        self._queue.requests_under_way -= count
        self.c_release()
        return True

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
        self._queue.requests_under_way -= self.posted - self.acknowledged
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
        while self.completed < count and self._queue._status == 0:
            with nogil:
                self._queue.c_drain()
            if self.completed < count and self._queue._status == 0:
                if until < 0:
                    until = self._queue._monotonic() + timeout_ms / 1000.0
                elif timeout_ms >= 0 and self._queue._monotonic() >= until:
                    break
                self._queue._send_cq.wait(10, 20)
        return self.completed >= count


cdef int source_of(source_t* out, MemoryRegion region, uint64_t start, uint64_t length) except -1:
    if length > region.length or start > region.length - length or length >> 31:
        raise ValueError("the bytes of a WRITE lie outside of its source")
    out.data = region.data + start
    out.address = region.address + start
    out.lkey = region.lkey
    out.length = <uint32_t> length
    return 0
