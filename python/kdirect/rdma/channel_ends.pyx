# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The two ends of a channel: what the protocol says.  `kdirect.rdma.channel` has the rules.

Owns: sending into slots by credits, polling and checking footers, returning credits, and why a
channel ended.  What may not enter: the receive completion queue that the channels of a process
share, and making and closing channels (`kdirect.rdma.channel`).
"""

cimport cython
from libc.errno cimport EAGAIN, ECHILD, ENOMEM, ENOTCONN
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kdirect.machine cimport kd_now_ns
from kdirect.rdma.contract cimport (
    WC_REM_ACCESS_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, CompletionQueue, MemoryRegion, QueuePair,
    work_completion)
from kdirect.rdma.credit_ring cimport (
    ERRNO_STATUS, POST_FAILED, POSTED, CreditRing, WriteQueue, source_of, source_t, target_t)
from kdirect.rdma.layout cimport (
    CREDIT_BYTES, FLAG_LAST_CREDIT, FLAG_NOTIFIED, FLAGS_OF_OWNER, FOOTER_ATTEMPT, FOOTER_BATCH,
    FOOTER_BYTES, FOOTER_CRC, FOOTER_EPOCH, FOOTER_FLAGS, FOOTER_LENGTH, FOOTER_SEQUENCE,
    OFFER_BYTES, ROLE_RECEIVER, ROLE_SENDER, SLOT_ALIGNMENT)

from kdirect.errors import (
    ChannelError, ChannelLostError, ChannelRevokedError, ClosedError, ForgedChannelError,
    TornBufferError)
from kdirect.rdma.contract import Memory
from kdirect.rdma.layout import OFFER_MAGIC

import struct

cdef extern from "landing.h" nogil:
    uint64_t kd_landed(const uint8_t* at)
    void kd_fetch_early(const uint8_t* at)

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef enum:
    POLL = 32
    LINE_BYTES = 64
    LOOK_EVERY = 1024          # polls in vain between looks at the completions: is the peer alive?

OFFER = struct.Struct("<4sHHIIQII")


cdef class Wakeups:
    """The receive completion queue that the channels of a process share."""

    cdef void c_drain(self) noexcept nogil:
        """Take the completions of wake-ups, post their receives again, and note ends."""


cdef class ChannelEnd(WriteQueue):
    """What the two kinds of ends have in common: queue pair, completions, and how it ended."""

    def __init__(self, Wakeups channels, str peer, uint32_t number, QueuePair qp,
                 CompletionQueue send_cq, uint64_t limit, int receives):
        WriteQueue.__init__(self, qp, send_cq, limit)
        self.channels = channels
        self.peer = peer
        self.number = number
        for _ in range(receives):
            qp.post_recv(number)

    def listen(self):
        self._qp.listen()

    @property
    def ended(self):
        return self.how != END_NONE

    @property
    def error(self):
        """Why the channel has ended, as an exception; None while it is open."""
        name = f"the channel with {self.peer}"
        if self.how == END_NONE:
            return None
        if self.how == END_CLOSED:
            return ClosedError(f"{name} is closed", hint="open another")
        if self._status == ERRNO_STATUS + ECHILD:
            error = ChannelError(
                f"{name} was opened by the process that forked this one",
                hint="open a channel in this process")
        elif self.how == END_LOST:
            gone = self._status == WC_WR_FLUSH_ERR
            error = ChannelLostError(
                f"{name} is lost ({'it has disconnected' if gone else self.broken})",
                hint="its process has ended, or the path to it broke; open a new channel")
        elif self.how == END_REVOKED:
            error = ChannelRevokedError(
                f"{name} is revoked: {self.peer} has ended access to its memory",
                hint="it closed or gave up the channel; open a new one")
        elif self.how == END_TORN:
            error = TornBufferError(
                f"{name} delivered a torn buffer: its CRC-32C does not fit",
                hint="the fabric does not keep the order of a WRITE's bytes, or damages them")
        else:
            what = {END_LENGTH: "a length that no slot holds", END_SEQUENCE: "a wrong sequence",
                    END_GENERATION: "a wrong generation",
                    END_CREDIT: "credits that it never had"}[self.how]
            error = ForgedChannelError(
                f"{name} has ended: {self.peer} wrote {what}",
                hint="both ends must run the same version; nothing that it says is believed")
        error.peer = self.peer
        return error

    def check(self):
        """Raise `error` if the channel has ended.  The peer learns of it: what is left of the
        connection is closed."""
        if self.how == END_NONE:
            return
        error = self.error
        if self.how >= END_TORN and self.how != END_CLOSED:
            self._qp.close()
        raise error

    cdef void c_end(self, int how) noexcept nogil:
        """From now on nothing is sent.  A cause that says more replaces one that says less."""
        if how > self.how:
            self.how = how

    cdef void c_note(self, uint32_t status) noexcept nogil:
        """A completion with an error, or ERRNO_STATUS + errno.  What caused it says more than that
        the rest was flushed."""
        if self._status == 0 or self._status == WC_WR_FLUSH_ERR:
            self._status = status
        self.c_end(END_REVOKED if status == WC_REM_ACCESS_ERR else END_LOST)

    cdef void c_fail(self, int error) noexcept nogil:
        # The completion that says why may be there already.
        self.c_drain()
        self.c_note(<uint32_t> (ERRNO_STATUS + error))

    cdef int c_drain(self) noexcept nogil:
        cdef work_completion wcs[POLL]
        cdef int i, n
        while self.sends_under_way > 0:
            n = self._send_cq.c_poll(wcs, POLL)
            if n < 0:
                self.c_note(<uint32_t> (ERRNO_STATUS - n))
            if n <= 0:
                break
            for i in range(n):
                if wcs[i].status != WC_SUCCESS:
                    self.c_note(wcs[i].status)
                self.writes_done += 1
                if self._ring != NULL:
                    (<CreditRing> self._ring).c_send_done()
            self.sends_under_way -= <uint64_t> n
        return -1 if self._status != 0 else 0

    cdef void c_take(self, const work_completion* wc) noexcept nogil:
        """A receive has completed: a wake-up came, or the end."""
        cdef int rc
        if wc.qp_num != self._qp.qp_num:
            return                            # of a channel that was closed
        if wc.status != WC_SUCCESS:
            self.c_drain()                    # the WRITE that broke it says why
            self.c_note(wc.status)
        else:
            self.receives_taken += 1
            rc = self._qp.c_post_recv(wc.wr_id, 0, 0, 0)
            if rc != 0:
                # It has ended, and if this was the last receive no completion will say so.
                self.c_drain()
                self.c_note(WC_WR_FLUSH_ERR if rc == ENOTCONN else <uint32_t> (ERRNO_STATUS + rc))

    cdef bint c_ready(self) noexcept nogil:
        """Return the credits that are due; is there anything to do here?"""
        cdef bint ready = False
        if self.connected and self.how < END_TORN:
            if self._receiver != NULL:
                (<Receiver> self._receiver).c_return_credits()
                ready = (<Receiver> self._receiver).c_changed()
            elif (<Sender> self._ring).blocked:
                ready = (<Sender> self._ring).c_may_send()
        if self.how != END_NONE and not self.told:
            self.told = ready = True
        return ready

    cdef bint c_owes(self) noexcept nogil:
        """Does this end wait for the completion of a WRITE, which wakes nobody?  A receiver does
        that could not return credits, because too many returns are under way; a sender whose credit
        has come before the completion of the WRITE that it is for."""
        if self.how != END_NONE:
            return False
        if self._receiver == NULL:
            return (self._ring != NULL and (<Sender> self._ring).blocked
                    and (<Sender> self._ring).posted - (<Sender> self._ring).acknowledged
                    < (<Sender> self._ring).credits)
        return ((<Receiver> self._receiver).released != (<Receiver> self._receiver).returned
                or (<Receiver> self._receiver)._wake_sender)


@cython.final
cdef class Sender(CreditRing):
    """The sending end.  Life: `ChannelSet.sender`, `offer`, `connect`, sends, `close`.

    Buffers are numbered from 0.  `posted` were sent, the sources of those before `completed` are
    the owner's again, `acknowledged` were given back by the receiver.  `refresh` brings the numbers
    up to date, as every send that lacks a credit does."""

    def __init__(self, ChannelEnd end, MemoryRegion word, uint32_t slots, uint32_t slot_bytes):
        CreditRing.__init__(self, end, end._qp, slots)
        self.end = end
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.payload_bytes = slot_bytes - FOOTER_BYTES
        self._id = end.number
        # The peer WRITEs here at any time until the region is deregistered.
        self._word = word
        end._ring = <void*> self

    # -- setting up --------------------------------------------------------------------------------

    @property
    def offer(self):
        """What the receiver's `connect` needs, as bytes."""
        return _offer(ROLE_SENDER, self.end._qp, self.slots, self.slot_bytes, self._word.address,
                      self._word.rkey)

    def connect(self, offer):
        """Connect to the receiver that made this `offer`, after it has connected to ours."""
        self._ring_address, self._ring_rkey, queue_pair = _read_offer(
            ROLE_RECEIVER, self.end.peer, offer, self.slots, self.slot_bytes)
        self.end._qp.connect(queue_pair, True)
        self.end.connected = True

    # -- sending -----------------------------------------------------------------------------------

    cdef bint c_may_send(self) noexcept nogil:
        if self.c_may_post():
            return self.end.how == END_NONE
        self.c_refresh()
        return self.end.how == END_NONE and self.c_may_post()

    cdef void c_refresh(self) noexcept nogil:
        cdef uint64_t given_back = kd_landed(self._word.data)
        self.end.c_drain()
        if given_back == self.acknowledged:
            return
        if given_back < self.acknowledged or not self.c_return_credits(
                given_back - self.acknowledged):
            self.end.c_end(END_CREDIT)
        elif self._wakes_due:
            self._wakes_due = False
            self.end.channels.c_drain()       # a receive may be used up by the wake-up

    cdef int c_send(self, uint8_t* data, uint64_t address, uint32_t lkey,
                    const header_t* header, bint wake) noexcept nogil:
        cdef source_t source
        cdef target_t target
        cdef uint64_t sequence = self.posted
        cdef uint8_t* footer = data + header.length
        cdef uint32_t flags = header.flags & FLAGS_OF_OWNER
        cdef uint64_t word
        cdef int rc
        if self.posted + 1 - self.acknowledged >= self.credits:
            self.c_refresh()
        if not self.c_may_send():
            self.blocked = True
            self._refused += 1
            if self._refused & (LOOK_EVERY - 1) == 0:
                self.end.channels.c_drain()
            return CHANNEL_NOT_NOW if self.end.how == END_NONE else CHANNEL_ENDED
        if self.posted + 1 - self.acknowledged >= self.credits:
            flags |= FLAG_LAST_CREDIT
            self._wakes_due = True
        target.notify = wake or flags != 0
        if target.notify:
            flags |= FLAG_NOTIFIED
        flags |= <uint32_t> header.kind << 16 | generation_of(sequence, self.slots) << 24
        # By words, as they are read for the CRC.
        memcpy(footer + FOOTER_SEQUENCE, &sequence, 8)
        word = header.batch | <uint64_t> header.epoch << 32
        memcpy(footer + FOOTER_BATCH, &word, 8)
        word = header.attempt | <uint64_t> header.length << 32
        memcpy(footer + FOOTER_ATTEMPT, &word, 8)
        memcpy(footer + FOOTER_FLAGS, &flags, 4)
        source.data = data
        source.address = address
        source.lkey = lkey
        source.length = header.length + FOOTER_BYTES
        target.address = self._ring_address + (
            (sequence & (self.slots - 1)) + 1) * self.slot_bytes - source.length
        target.rkey = self._ring_rkey
        target.imm = <uint32_t> sequence
        rc = self.c_post(&source, &target, False)
        self.blocked = rc != POSTED
        if rc == POSTED:
            self.bytes_sent += header.length
            self.notified += target.notify
            # The buffer is on its way, so that nobody waits for this look at the credits.
            if (2 * (self.posted - self.acknowledged) >= self.credits
                    and kd_landed(self._word.data) != self.acknowledged):
                self.c_refresh()
            return CHANNEL_DONE
        return CHANNEL_ENDED if rc == POST_FAILED else CHANNEL_NOT_NOW

    cdef int c_try(self, const source_t* source, const target_t* target) noexcept nogil:
        """Post the buffer with its CRC: the transport's sum, or one of its own."""
        cdef uint8_t* footer = source.data + source.length - FOOTER_BYTES
        cdef uint32_t crc
        cdef int rc = self._qp.c_post_write_summed(
            self._id, source.address, source.lkey, source.length, target.address, target.rkey,
            target.notify, target.imm)
        if rc != EAGAIN:
            return rc
        crc = kd_crc32c(0, source.data, source.length - FOOTER_BYTES + FOOTER_CRC)
        crc = kd_crc32c(crc, footer + FOOTER_FLAGS, 4)
        memcpy(footer + FOOTER_CRC, &crc, 4)
        return CreditRing.c_try(self, source, target)

    @property
    def may_send(self):
        """Is there a credit?  Raises why the channel has ended."""
        cdef bint may
        with nogil:
            may = self.c_may_send()
        if not may:
            self.blocked = True
            self._refused += 1
            if self._refused & (LOOK_EVERY - 1) == 0:
                self.end.channels.drain()
            self.end.check()
        return may

    def send_from(self, MemoryRegion region, uint64_t position, uint32_t length, *,
                  uint32_t batch=0, uint32_t epoch=0, uint32_t attempt=0, uint16_t flags=0,
                  uint8_t kind=0, bint wake=False):
        """Send `length` bytes from `position` of registered memory.  The FOOTER_BYTES after them
        must lie in the region too and are the channel's, as the bytes are, until `completed` has
        passed this buffer.  Whether it was sent: it is not while there is no credit.  `flags`:
        END_OF_EPOCH and END_OF_BATCH, which wake the receiver, as `wake` does."""
        cdef source_t source
        cdef header_t header
        cdef int rc
        if length > self.payload_bytes:
            raise ValueError(f"a buffer of {length} bytes does not fit in {self.payload_bytes}")
        if flags & ~FLAGS_OF_OWNER:
            raise ValueError(f"flags {flags:#x} are not the owner's to set")
        source_of(&source, region, position, <uint64_t> length + FOOTER_BYTES)
        header.batch, header.epoch, header.attempt = batch, epoch, attempt
        header.length, header.flags, header.kind = length, flags, kind
        with nogil:
            rc = self.c_send(source.data, source.address, source.lkey, &header, wake)
        if rc == CHANNEL_ENDED:
            self.end.check()
        return rc == CHANNEL_DONE

    def buffer(self):
        """Writable memory of the next staging slot, `payload_bytes` long; None while there is no
        credit.  The same one until it is sent."""
        cdef uint64_t at
        if not self.may_send:
            return None
        if self._staging is None:
            # The channel's own, registered for the transport alone; see the module for who may use
            # a slot of it when.
            self._staging = self.end.channels.register(
                Memory.anonymous(<uint64_t> self.slots * self.slot_bytes, "kdirect-staging"))
        at = (self.posted & (self.slots - 1)) * self.slot_bytes
        return memoryview(self._staging.memory)[at : at + self.payload_bytes]

    def send(self, uint32_t length, *, uint32_t batch=0, uint32_t epoch=0, uint32_t attempt=0,
             uint16_t flags=0, uint8_t kind=0, bint wake=False):
        """Send the first `length` bytes of the staging slot that `buffer` returned; see
        `send_from`."""
        if self._staging is None:
            raise ValueError("there is no staging slot: call buffer first")
        return self.send_from(
            self._staging, (self.posted & (self.slots - 1)) * self.slot_bytes, length,
            batch=batch, epoch=epoch, attempt=attempt, flags=flags, kind=kind, wake=wake)

    def refresh(self):
        """Take credits and completions that have come; raises why the channel has ended."""
        with nogil:
            self.c_refresh()
        self.end.check()

    def wait_credit(self, int timeout_ms=-1):
        """Sleep until there is a credit; whether there is.  For a process that has nothing else to
        do: one that also receives calls `ChannelSet.wait`."""
        cdef int64_t until = kd_now_ns() + <int64_t> timeout_ms * 1000000
        cdef int64_t left = -1
        while not self.may_send:
            if timeout_ms >= 0:
                left = until - kd_now_ns()
                if left <= 0:
                    return False
                left = left // 1000000 + 1
            if self.end.c_owes():
                left = 1
            self.end.channels.completions.wait(left)
            left = -1
            with nogil:
                self.end.channels.c_drain()
        return True

    @property
    def sent(self):
        """Buffers sent."""
        return self.posted

    def close(self, timeout_ms=1000):
        """End the channel, after its WRITEs have completed if they do so in time."""
        if self.end.how == END_CLOSED:
            return
        if self.end.connected and self.end.how == END_NONE:
            self.wait_completed(timeout_ms)
        self.end.how = END_CLOSED
        self.end._ring = NULL
        self.end.channels.close_end(self.end, self, (self._word, self._staging))


@cython.final
cdef class Receiver:
    """The receiving end.  Life: `ChannelSet.receiver`, `offer`, `connect`, then `poll` and
    `release` in turn, `close`."""

    def __init__(self, ChannelEnd end, MemoryRegion ring, MemoryRegion sources, uint32_t slots,
                 uint32_t slot_bytes):
        self.end = end
        self.slots = slots
        self.slot_bytes = slot_bytes
        # The peer WRITEs here at any time until the region is deregistered.
        self._ring = ring
        # Each entry belongs to the transport from the post of a credit to its completion.
        self._sources = sources
        self.group = max(1, slots // 2)
        end._receiver = <void*> self

    @property
    def offer(self):
        """What the sender's `connect` needs, as bytes."""
        return _offer(ROLE_RECEIVER, self.end._qp, self.slots, self.slot_bytes, self._ring.address,
                      self._ring.rkey)

    def connect(self, offer):
        """Expect the sender that made this `offer`; it connects after this has returned."""
        self._word_address, self._word_rkey, queue_pair = _read_offer(
            ROLE_SENDER, self.end.peer, offer, self.slots, self.slot_bytes)
        self.end._qp.connect(queue_pair, False)
        self.end.connected = True

    # -- receiving ---------------------------------------------------------------------------------

    cdef bint c_arrived(self, uint64_t sequence) noexcept nogil:
        """Has this buffer, of the present turn of its slot, landed?"""
        cdef const uint8_t* slot = self._ring.data + (sequence & (self.slots - 1)) * self.slot_bytes
        return (kd_landed(slot + self.slot_bytes - FOOTER_BYTES + FOOTER_CRC) >> 56
                == generation_of(sequence, self.slots))

    cdef bint c_changed(self) noexcept nogil:
        """Is there a present buffer, or anything new in the next slot, believable or not?"""
        cdef const uint8_t* slot = self._ring.data + (
            self.received & (self.slots - 1)) * self.slot_bytes
        return (self.data != NULL
                or kd_landed(slot + self.slot_bytes - FOOTER_BYTES + FOOTER_CRC) >> 56
                != self._generation_before())

    cdef uint32_t _generation_before(self) noexcept nogil:
        """What the next slot holds until the next buffer lands."""
        if self.received < self.slots:
            return 0
        return generation_of(self.received - self.slots, self.slots)

    cdef int c_poll(self) noexcept nogil:
        cdef const uint8_t* footer
        cdef uint64_t last
        cdef uint32_t generation
        if self.data != NULL:
            return CHANNEL_DONE
        if self.end.how >= END_TORN:
            return CHANNEL_ENDED
        footer = self._ring.data + (
            (self.received & (self.slots - 1)) + 1) * self.slot_bytes - FOOTER_BYTES
        last = kd_landed(footer + FOOTER_CRC)
        generation = <uint32_t> (last >> 56)
        if generation != generation_of(self.received, self.slots):
            if generation != self._generation_before():
                self.end.c_end(END_GENERATION)
                return CHANNEL_ENDED
            if self.end.how != END_NONE:
                return CHANNEL_ENDED
            # Of a small buffer the line before the footer's has its payload: fetch both at once.
            kd_fetch_early(footer - LINE_BYTES)
            self._empty += 1
            if self._empty & (LOOK_EVERY - 1) == 0:
                self.end.channels.c_drain()
            return CHANNEL_NOT_NOW
        return self.c_check(footer, last)

    cdef int c_check(self, const uint8_t* footer, uint64_t last) noexcept nogil:
        """A footer has landed, whose last 8 bytes are `last`: believe it or end the channel.  The
        peer might change it meanwhile, so what is checked and used is a copy."""
        cdef uint8_t copy[FOOTER_BYTES]
        cdef header_t* header = &self.header
        cdef uint32_t tail = <uint32_t> (last >> 32)
        cdef uint32_t crc
        cdef uint64_t known
        memcpy(copy, footer, FOOTER_CRC)
        memcpy(copy + FOOTER_CRC, &tail, 4)
        memcpy(&header.length, copy + FOOTER_LENGTH, 4)
        if header.length > self.slot_bytes - FOOTER_BYTES:
            self.end.c_end(END_LENGTH)
            return CHANNEL_ENDED
        crc = kd_crc32c(0, footer - header.length, header.length)
        if kd_crc32c(crc, copy, FOOTER_CRC + 4) != <uint32_t> last:
            self.end.c_end(END_TORN)
            return CHANNEL_ENDED
        memcpy(&header.sequence, copy + FOOTER_SEQUENCE, 8)
        if header.sequence != self.received:
            self.end.c_end(END_SEQUENCE)
            return CHANNEL_ENDED
        memcpy(&header.batch, copy + FOOTER_BATCH, 4)
        memcpy(&header.epoch, copy + FOOTER_EPOCH, 4)
        memcpy(&header.attempt, copy + FOOTER_ATTEMPT, 4)
        header.flags = <uint16_t> tail
        header.kind = <uint8_t> (tail >> 16)
        self.data = footer - header.length
        self.received += 1
        self.bytes_received += header.length
        self._empty = 0
        if header.flags & FLAG_LAST_CREDIT and self.received >= self.slots:
            # The credit that the sender knew of when it sent this.  It may sleep, and nobody has
            # woken it for what it was given since.
            known = self.received - self.slots
            if self._notified <= known < self.returned:
                self.c_write_credit(True)
        return CHANNEL_DONE

    cdef void c_release(self) noexcept nogil:
        if self.data == NULL:
            return
        self.data = NULL
        self.released += 1
        if self.header.flags & FLAG_NOTIFIED:
            self.end.channels.c_drain()       # its receive is used up: post it again
        if self.released - self.returned >= self.group:
            self.c_return_credits()

    cdef void c_return_credits(self) noexcept nogil:
        """Tell the sender of all slots that were given back, and wake it if it has used up its
        credits."""
        if self.end.how != END_NONE:
            return
        if self.released != self.returned or self._wake_sender:
            self.c_write_credit(self._wake_sender
                                or self.c_arrived(self.returned + self.slots - 1))

    cdef bint c_write_credit(self, bint notify) noexcept nogil:
        """WRITE the credit word; False when too many of these are under way, and it is due yet."""
        cdef uint64_t at = (self.credit_writes & (CREDIT_SOURCES - 1)) * CREDIT_BYTES
        cdef int rc = ENOMEM
        if self.credit_writes - self.end.writes_done >= CREDIT_SOURCES:
            self.end.c_drain()
        if self.credit_writes - self.end.writes_done < CREDIT_SOURCES:
            memcpy(self._sources.data + at, &self.released, CREDIT_BYTES)
            if notify:
                rc = self.end._qp.c_post_write_imm(
                    self.end.number, self._sources.address + at, self._sources.lkey, CREDIT_BYTES,
                    self._word_address, self._word_rkey, <uint32_t> self.released)
            else:
                rc = self.end._qp.c_post_write(
                    self.end.number, self._sources.address + at, self._sources.lkey, CREDIT_BYTES,
                    self._word_address, self._word_rkey)
        if rc == ENOMEM:
            self._wake_sender |= notify
            return False
        if rc != 0:
            self.end.c_fail(rc)
            return True
        self.end.sends_under_way += 1
        self.credit_writes += 1
        self.returned = self.released
        if notify:
            self._notified = self.released
            self._wake_sender = False
        return True

    def poll(self):
        """Is there a buffer?  It is the present one until `release`.  Raises why the channel has
        ended, after all that had arrived."""
        cdef int rc
        with nogil:
            rc = self.c_poll()
        if rc == CHANNEL_ENDED:
            self.end.check()
        return rc == CHANNEL_DONE

    def release(self):
        """Give the present buffer back: views of its payload are the peer's from now on."""
        if self.data == NULL:
            raise ValueError("there is no present buffer: call poll first")
        with nogil:
            self.c_release()

    cdef _present(self):
        if self.data == NULL:
            raise ValueError("there is no present buffer: call poll first")

    @property
    def payload(self):
        """The present buffer's payload where it lies, read-only, until `release`."""
        cdef uint64_t at
        self._present()
        at = <uint64_t> (self.data - self._ring.data)
        return memoryview(self._ring.memory)[at : at + self.header.length].toreadonly()

    @property
    def address(self):
        """Of the payload in this process; for compiled callers that are called from Python."""
        self._present()
        return <uint64_t> <size_t> self.data

    @property
    def length(self):
        self._present()
        return self.header.length

    @property
    def sequence(self):
        self._present()
        return self.header.sequence

    @property
    def batch(self):
        self._present()
        return self.header.batch

    @property
    def epoch(self):
        self._present()
        return self.header.epoch

    @property
    def attempt(self):
        self._present()
        return self.header.attempt

    @property
    def flags(self):
        """END_OF_EPOCH and END_OF_BATCH, as the sender gave them."""
        self._present()
        return self.header.flags & FLAGS_OF_OWNER

    @property
    def kind(self):
        self._present()
        return self.header.kind

    def close(self):
        """End the channel."""
        if self.end.how == END_CLOSED:
            return
        self.data = NULL
        self.end.how = END_CLOSED
        self.end._receiver = NULL
        self.end.channels.close_end(self.end, self, (self._ring, self._sources))


def _offer(role, QueuePair qp, slots, slot_bytes, address, rkey):
    queue_pair = qp.address
    return OFFER.pack(OFFER_MAGIC, role, 0, slots, slot_bytes, address, rkey,
                      len(queue_pair)) + queue_pair


def _read_offer(role, peer, offer, slots, slot_bytes):
    """(address, rkey, address of the queue pair) of the peer's offer."""
    offer = bytes(offer)
    if len(offer) >= OFFER_BYTES:
        magic, its_role, _, its_slots, its_bytes, address, rkey, n = OFFER.unpack_from(offer)
        if (magic == OFFER_MAGIC and its_role == role and len(offer) == OFFER_BYTES + n
                and address and address % SLOT_ALIGNMENT == 0):
            if (its_slots, its_bytes) != (slots, slot_bytes):
                raise ChannelError(
                    f"{peer} has {its_slots} slots of {its_bytes} bytes, not {slots} of"
                    f" {slot_bytes}", hint="give both ends of a channel the same settings")
            return address, rkey, offer[OFFER_BYTES:]
    raise ChannelError(f"what {peer} offers is no end of a channel",
                       hint="both ends must run the same version, one sending, one receiving")
