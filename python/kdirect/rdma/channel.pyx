# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One-way channels between processes, by one-sided WRITEs alone (Slash section 6).

Owns: opening and closing channels, and how a process that has many of them sleeps; their ends are
in `kdirect.rdma.channel_ends`.  What may not enter: what the buffers say; who talks to
whom; sockets (`offer` and `connect` take bytes that the owner carries).  The bytes of footer and
credit word are those of `kdirect.rdma.layout`.

A channel has c slots of m bytes in the receiver's registered memory.  A buffer is a payload and its
footer, and travels by exactly one WRITE, straight from wherever its sender has it: its own log
(`Sender.send_from`) or a staging slot of the channel (`Sender.buffer`, `Sender.send`).  The
receiver polls the last byte of the footer (`Receiver.poll`), reads the payload where it lies, and
gives the slot back (`Receiver.release`).  Credits return by one 8-byte WRITE of a cumulative count
into the sender's credit word, in groups, and always before `ChannelSet.wait` sleeps.

Rules of the protocol.  `tests/rdma/channel_model.py` has the same as pure step functions, and a
simulation holds both together.

- First in, first out.  Buffer n goes to slot n % c.  It is sent only while n < given back + c, so
  that nothing unread is overwritten.
- A buffer goes by WRITE_WITH_IMM when its sender asks for that, when it ends an epoch or a batch,
  and when it takes the last credit; any other by a plain WRITE, which wakes nobody.
- A sender without credits may sleep.  Its last buffer says so (LAST_CREDIT), and is seen by a
  receiver, which therefore returns the next credits by WRITE_WITH_IMM.
- Whatever the peer wrote is checked before it is believed: the generation, length, CRC and sequence
  of a footer, and the count in a credit word.  What cannot be ends the channel.

How a channel ends.  `ChannelLostError`: the peer died or disconnected, or the path broke; what had
arrived before is still received.  `ChannelRevokedError`: the peer has ended access to its memory.
`TornBufferError`: the CRC does not fit.  `ForgedChannelError`: the peer wrote what no peer that
keeps the rules can write.  Every later call raises the same error, which names the peer.

Memory, and what ends its use:

- a payload that is sent, and the FOOTER_BYTES after it, belong to the channel from `send` until
  `Sender.completed` has passed the buffer.  The footer is written there, but for its CRC where the
  transport makes the sum while it copies (`QueuePair.c_post_write_summed`);
- a staging slot belongs to the owner from `buffer` to `send`, then to the channel until the buffer
  is both completed and given back (`Sender.freed`);
- a slot of the ring belongs to the peer until its footer has landed, then to the receiver from
  `poll` to `release`.  A hostile peer can write there at any time: values that steer loops or
  addresses must be read once and checked, whatever the CRC said.

Order.  A buffer is published by its last 8 bytes: over shm a release store after its other bytes,
seen by an acquire load of the receiver's poll (`landing.h`); both are plain moves on x86, and no
fence is needed between a payload and its footer.  The credit word is one 8-byte WRITE, loaded in
the same way.  Each is written by one side alone.  What one buffer moves between two cores is its
own lines; the line of the credit word moves once for each group of credits (half the slots), which
the receiver writes once and the sender reads after a post, while nobody waits for it.

A set has one receive completion queue for all its channels, on which it sleeps, and each channel
its own send completion queue.  There is no lock.  One thread at a time calls a set and all its
channels; only `ChannelSet.wake` may be called from any thread.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kdirect.machine cimport kd_now_ns, kd_pause
from kdirect.rdma.channel_ends cimport CREDIT_SOURCES, ChannelEnd, Wakeups
from kdirect.rdma.contract cimport LOCAL_WRITE, REMOTE_WRITE, work_completion
from kdirect.rdma.credit_ring cimport ERRNO_STATUS
from kdirect.rdma.layout cimport (
    CREDIT_BYTES, LEAST_SLOT_BYTES, MOST_SLOT_BYTES, MOST_SLOTS, SLOT_ALIGNMENT)

from kdirect.errors import ConfigError
from kdirect.rdma.channel_ends import Receiver, Sender
from kdirect.rdma.contract import Memory
from kdirect.rdma.layout import DEFAULT_SLOT_BYTES, DEFAULT_SLOTS

cdef enum:
    POLL = 32


cdef class ChannelSet(Wakeups):
    """All channels of one process that are served by one thread.

    `device`: of any provider; `domain`: where memory that is sent from is registered, by default
    one of its own, which `close` closes.  `most`: channels at a time, senders and receivers
    together.  `slots` (a power of two) and `slot_bytes`: of every channel, the same at both ends.
    """

    def __init__(self, device, domain=None, *, uint32_t most=64, uint32_t slots=DEFAULT_SLOTS,
                 uint32_t slot_bytes=DEFAULT_SLOT_BYTES):
        if slots < 2 or slots > MOST_SLOTS or slots & (slots - 1):
            raise ConfigError(f"a channel cannot have {slots} slots",
                              hint=f"give a power of two from 2 to {MOST_SLOTS}")
        if (slot_bytes < LEAST_SLOT_BYTES or slot_bytes > MOST_SLOT_BYTES
                or slot_bytes % SLOT_ALIGNMENT):
            raise ConfigError(
                f"a channel cannot have slots of {slot_bytes} bytes",
                hint=f"give a multiple of {SLOT_ALIGNMENT} from {LEAST_SLOT_BYTES} to"
                     f" {MOST_SLOT_BYTES}")
        self.device = device
        self._own_domain = domain is None
        self.domain = device.alloc_pd() if domain is None else domain
        self.most = most
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.ring_bytes = <uint64_t> slots * slot_bytes
        self._by_number = <void**> calloc(most, sizeof(void*))
        if self._by_number == NULL:
            raise MemoryError()
        self._ends = [None] * most
        self._senders = []
        self._receivers = []
        # As deep as the receives of all its channels together.
        try:
            self.completions = device.create_cq(most * _receives(slots))
        except BaseException:
            if self._own_domain:
                self.domain.close()
            raise

    def __dealloc__(self):
        free(self._by_number)

    # -- making channels ---------------------------------------------------------------------------

    def sender(self, peer):
        """The sending end of a channel to `peer`, whose name errors have."""
        end = self._new_end(peer, self.slots, self.slots)
        word = self.domain.register(Memory.anonymous(CREDIT_BYTES, "kdirect-credits"),
                                    LOCAL_WRITE | REMOTE_WRITE, 0, CREDIT_BYTES)
        sender = Sender(end, word, self.slots, self.slot_bytes)
        self._senders.append(sender)
        return sender

    def receiver(self, peer):
        """The receiving end of a channel from `peer`."""
        end = self._new_end(peer, CREDIT_SOURCES, CREDIT_SOURCES)
        ring = self.domain.register(
            Memory.anonymous(self.ring_bytes, "kdirect-channel"), LOCAL_WRITE | REMOTE_WRITE, 0,
            self.ring_bytes)
        sources = self.register(Memory.anonymous(CREDIT_SOURCES * CREDIT_BYTES, "kdirect-credits"))
        end.listen()                          # so that its offer may be taken at any time
        receiver = Receiver(end, ring, sources, self.slots, self.slot_bytes)
        self._receivers.append(receiver)
        return receiver

    def register(self, memory, position=0, length=None):
        """Register memory that senders of this set send from."""
        return self.domain.register(memory, LOCAL_WRITE, position, length)

    def _new_end(self, peer, max_send_wr, limit):
        try:
            number = self._ends.index(None)
        except ValueError:
            raise ConfigError(f"there are {self.most} channels already",
                              hint="make the set for more") from None
        send_cq = self.device.create_cq(max_send_wr)
        receives = _receives(self.slots)
        try:
            qp = self.domain.create_qp(send_cq, self.completions, max_send_wr=max_send_wr,
                                       max_recv_wr=receives)
        except BaseException:
            send_cq.close()
            raise
        end = ChannelEnd(self, peer, number, qp, send_cq, limit, receives)
        self._ends[number] = end
        self._by_number[number] = <void*> end
        return end

    def close_end(self, ChannelEnd end, channel, regions):
        """For the ends themselves, whose `close` is the owner's to call.  The queue pair first, so
        that nothing is under way when the memory goes."""
        end._qp.close()
        with nogil:
            self.c_drain()                    # its receives come back flushed
            end.c_drain()
        for region in regions:
            if region is not None:
                region.deregister()
        self._by_number[end.number] = NULL
        self._ends[end.number] = None
        end._send_cq.close()
        (self._senders if isinstance(channel, Sender) else self._receivers).remove(channel)

    # -- what has come -----------------------------------------------------------------------------

    cdef void c_drain(self) noexcept nogil:
        cdef work_completion wcs[POLL]
        cdef int i, n = POLL
        cdef uint32_t number
        while n == POLL:
            n = self.completions.c_poll(wcs, POLL)
            if n < 0:
                # Nobody would hear of a wake-up or an end any more.
                for number in range(self.most):
                    if self._by_number[number] != NULL:
                        (<ChannelEnd> self._by_number[number]).c_note(
                            <uint32_t> (ERRNO_STATUS - n))
            for i in range(n):
                if wcs[i].wr_id < self.most and self._by_number[wcs[i].wr_id] != NULL:
                    (<ChannelEnd> self._by_number[wcs[i].wr_id]).c_take(&wcs[i])

    cdef bint c_ready(self) noexcept nogil:
        """Return the credits that are due; is there anything to do?"""
        cdef bint ready = False
        cdef uint32_t i
        for i in range(self.most):
            if self._by_number[i] != NULL and (<ChannelEnd> self._by_number[i]).c_ready():
                ready = True
        return ready

    cdef bint c_owing(self) noexcept nogil:
        """Does an end wait for what wakes nobody here?"""
        cdef uint32_t i
        for i in range(self.most):
            if self._by_number[i] != NULL and (<ChannelEnd> self._by_number[i]).c_owes():
                return True
        return False

    def drain(self):
        """Take what has come without waiting."""
        with nogil:
            self.c_drain()

    def wait(self, int64_t timeout_ms=-1, int64_t spin_us=0):
        """Sleep until a buffer has come that wakes, a sender that found no credit has one, or a
        channel has ended; whether one of these is so.  -1: for ever.  Looks for `spin_us` before it
        sleeps.  All credits that are due are returned first.  A buffer that has come already, of
        whatever kind, ends the wait; `wake` ends it too."""
        cdef int64_t begin = kd_now_ns()
        cdef int64_t until = begin + timeout_ms * 1000000
        cdef int64_t spin_until = begin + spin_us * 1000
        cdef int64_t now, left
        cdef bint ready, owing, woken = False
        if timeout_ms >= 0 and spin_until > until:
            spin_until = until
        while True:
            with nogil:
                self.c_drain()
                ready = self.c_ready()
                while not ready and kd_now_ns() < spin_until:
                    kd_pause()
                    ready = self.c_ready()
                owing = self.c_owing()
            now = kd_now_ns()
            if ready or woken or (timeout_ms >= 0 and now >= until):
                return ready
            left = -1 if timeout_ms < 0 else (until - now + 999999) // 1000000
            if owing and (left < 0 or left > 1):
                left = 1
            woken = not self.completions.wait(left) and (self._woken or not owing)
            if woken:
                self._woken = False

    def wake(self):
        """Make `wait` return; from any thread."""
        self._woken = True
        self.completions.wake()

    def fileno(self):
        """A descriptor that turns readable after `arm` when `wait` is to be called."""
        return self.completions.fileno()

    def arm(self):
        """Return the credits that are due and ask for one event on `fileno`; True when there is
        something to do already, so that no event need come."""
        cdef bint ready
        if self.completions.arm():
            return True
        with nogil:
            ready = self.c_ready() or self.c_owing()
        return ready

    # -- the end -----------------------------------------------------------------------------------

    def check(self):
        """Raise why the first of the channels that have ended has ended."""
        for end in self._ends:
            if end is not None:
                (<ChannelEnd> end).check()

    def close(self):
        """Close all channels, then what they share."""
        if self._closed:
            return
        self._closed = True
        for channel in [*self._senders, *self._receivers]:
            channel.close()
        for end in self._ends:
            if end is not None:               # its channel could not be made
                (<ChannelEnd> end)._qp.close()
                (<ChannelEnd> end)._send_cq.close()
        self.completions.close()
        if self._own_domain:
            self.domain.close()


def _receives(slots):
    """Receives of one end.  A sender has at most `slots` buffers that were not given back, and the
    completions of as many that were may not have been taken yet."""
    return 2 * slots
