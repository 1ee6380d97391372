# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Loops over channels that measure them; for bench/ and tests/ only.

Law of the room: nothing in the product imports this.  Loops run without the GIL and spin; times are
in ns.  A loop that is not done after `timeout_ms` ends with the channel's error, or TimedOutError.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from kdirect.machine cimport kd_now_ns, kd_pause
from kdirect.rdma.channel_ends cimport (
    CHANNEL_DONE, CHANNEL_ENDED, Receiver, Sender, generation_of, header_t)
from kdirect.rdma.contract cimport Memory, MemoryRegion

from kdirect.errors import TimedOutError

cdef extern from "landing.h" nogil:
    void kd_land(uint8_t* to, const uint8_t* from_, uint64_t length)
    uint64_t kd_landed(const uint8_t* at)

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef enum:
    LOOKS = 4096               # between looks at the clock

BARE = "nothing has come through the bare memory"


def crc32c(data):
    """Of bytes, as footers have it."""
    cdef const uint8_t[::1] view = bytes(data) + b"\0"
    return kd_crc32c(0, &view[0], <size_t> (view.shape[0] - 1))


def generation(uint64_t sequence, uint32_t slots):
    """Of a buffer, as its footer has it."""
    return generation_of(sequence, slots)


def ring_memory(Receiver receiver):
    """The memory of the ring, for tests that write what no sender would."""
    return receiver._ring.memory


def ring_region(Receiver receiver):
    return receiver._ring


def word_region(Sender sender):
    """The credit word."""
    return sender._word


def watch_landings(Memory memory, uint32_t length, uint64_t until, int64_t timeout_ms):
    """Poll the last 8 of the first `length` bytes, which WRITEs fill with one growing number all
    over, until that is `until`: how many words were older than the last ones when these had been
    seen.  -1: it took too long."""
    cdef const uint8_t* last = memory.data + length - 8
    cdef uint64_t seen = 0, now, word, at, words = length // 8 - 1
    cdef int64_t older = 0, deadline
    cdef uint32_t looks = 0, i
    with nogil:
        deadline = kd_now_ns() + timeout_ms * 1000000
        while seen < until:
            now = kd_landed(last)
            if now == seen:
                kd_pause()
                looks += 1
                if looks % LOOKS == 0 and kd_now_ns() > deadline:
                    older = -1
                    break
                continue
            for i in range(words):
                # From both ends in turn: what is copied late may be at either.
                at = i // 2 if i % 2 else words - 1 - i // 2
                memcpy(&word, memory.data + at * 8, 8)
                if word < now:
                    older += 1
            seen = now
    return older


cdef int _send(Sender sender, MemoryRegion source, uint64_t position, header_t* header, bint wake,
               int64_t deadline) noexcept nogil:
    cdef int rc = sender.c_send(source.data + position, source.address + position, source.lkey,
                                header, wake)
    cdef uint32_t n = 0
    while rc != CHANNEL_DONE and rc != CHANNEL_ENDED:
        kd_pause()
        n += 1
        if n % LOOKS == 0 and kd_now_ns() > deadline:
            break
        if sender.c_may_send():
            rc = sender.c_send(source.data + position, source.address + position, source.lkey,
                               header, wake)
        elif sender.end.how:
            rc = CHANNEL_ENDED
    return rc


cdef int _receive(Receiver receiver, int64_t deadline) noexcept nogil:
    cdef int rc = receiver.c_poll()
    cdef uint32_t n = 0
    while rc != CHANNEL_DONE and rc != CHANNEL_ENDED:
        kd_pause()
        n += 1
        if n % LOOKS == 0 and kd_now_ns() > deadline:
            break
        rc = receiver.c_poll()
    return rc


cdef _raise(end, what):
    end.check()
    raise TimedOutError(f"{what}: nothing has come from {end.peer}")


def send_loop(Sender sender, MemoryRegion source, uint32_t length, uint64_t span, int64_t count,
              int64_t begin=0, int64_t warm=0, int64_t timeout_ms=10000):
    """Send `warm` + `count` buffers of `length` bytes from `source`, each with its footer from the
    next `slot_bytes` of `span` bytes, from number `begin` on, and wait until all are given back: ns
    for the last `count`."""
    cdef uint64_t step = sender.slot_bytes
    cdef uint64_t at = <uint64_t> begin % (span // step) * step
    cdef int64_t i, start, deadline
    cdef int rc = CHANNEL_DONE
    cdef header_t header
    memset(&header, 0, sizeof(header_t))
    header.length = length
    if span > source.length or length + 32 > step:
        raise ValueError("the buffers do not lie in their source")
    with nogil:
        start = kd_now_ns()
        deadline = start + timeout_ms * 1000000
        for i in range(warm + count):
            if i == warm:
                start = kd_now_ns()
            rc = _send(sender, source, at, &header, False, deadline)
            if rc != CHANNEL_DONE:
                break
            at += step
            if at + step > span:
                at = 0
        i = 0
        while rc == CHANNEL_DONE and sender.acknowledged != sender.posted:
            sender.c_refresh()
            i += 1
            if sender.end.how or (i % LOOKS == 0 and kd_now_ns() > deadline):
                rc = CHANNEL_ENDED
            kd_pause()
        start = kd_now_ns() - start
    if rc != CHANNEL_DONE:
        _raise(sender.end, "sending")
    return start


def receive_loop(Receiver receiver, int64_t count, int64_t timeout_ms=10000):
    """Receive `count` buffers and give each back at once: ns for all."""
    cdef int64_t i, start
    cdef int rc = CHANNEL_DONE
    with nogil:
        start = kd_now_ns()
        for i in range(count):
            rc = _receive(receiver, start + timeout_ms * 1000000)
            if rc != CHANNEL_DONE:
                break
            receiver.c_release()
        receiver.c_return_credits()
        start = kd_now_ns() - start
    if rc != CHANNEL_DONE:
        _raise(receiver.end, "receiving")
    return start


def bare_send_loop(Memory ring, Memory words, MemoryRegion source, uint32_t slot_bytes,
                   int64_t count, int64_t begin=0, int64_t warm=0, int64_t timeout_ms=10000):
    """As `send_loop`, through a ring of plain shared memory: memcpy, and two counts in `words`."""
    cdef uint64_t at = <uint64_t> begin % (source.length // slot_bytes) * slot_bytes
    cdef uint64_t slots = ring.length // slot_bytes, n = 0
    cdef int64_t i, start, deadline
    cdef uint32_t looks = 0
    cdef bint late = False
    cdef uint8_t* sent = words.data
    cdef const uint8_t* given_back = words.data + 128
    with nogil:
        start = kd_now_ns()
        deadline = start + timeout_ms * 1000000
        for i in range(warm + count):
            if i == warm:
                start = kd_now_ns()
            while n - kd_landed(given_back) >= slots:
                kd_pause()
                looks += 1
                if looks % LOOKS == 0 and kd_now_ns() > deadline:
                    late = True
                    break
            if late:
                break
            memcpy(ring.data + n % slots * slot_bytes, source.data + at, slot_bytes)
            n += 1
            kd_land(sent, <uint8_t*> &n, 8)
            at += slot_bytes
            if at + slot_bytes > source.length:
                at = 0
        while not late and kd_landed(given_back) != n:
            kd_pause()
            looks += 1
            if looks % LOOKS == 0 and kd_now_ns() > deadline:
                late = True
        start = kd_now_ns() - start
    memset(words.data, 0, 256)
    if late:
        raise TimedOutError(BARE)
    return start


def bare_receive_loop(Memory ring, Memory words, uint32_t slot_bytes, int64_t count, int64_t group,
                      int64_t timeout_ms=10000):
    """The other side of `bare_send_loop`: reads every byte, by sums, and gives `group` slots back
    at a time."""
    cdef uint64_t slots = ring.length // slot_bytes, n = 0, total = 0, k
    cdef int64_t deadline
    cdef uint32_t looks = 0
    cdef bint late = False
    cdef const uint64_t* at
    with nogil:
        deadline = kd_now_ns() + timeout_ms * 1000000
        while n < <uint64_t> count:
            while kd_landed(words.data) <= n:
                kd_pause()
                looks += 1
                if looks % LOOKS == 0 and kd_now_ns() > deadline:
                    late = True
                    break
            if late:
                break
            at = <const uint64_t*> (ring.data + n % slots * slot_bytes)
            for k in range(slot_bytes // 8):
                total += at[k]
            n += 1
            if n % group == 0:
                kd_land(words.data + 128, <uint8_t*> &n, 8)
    if late:
        raise TimedOutError(BARE)
    return total


def bounce(Sender sender, Receiver receiver, MemoryRegion source, uint32_t length, int64_t count,
           bint first, int64_t timeout_ms=10000):
    """`count` round trips of buffers of `length` bytes, both sides spinning: both call it, one with
    `first`.  The epoch counts them and is checked.  ns for all."""
    cdef int64_t i, start, deadline
    cdef uint64_t at = 0
    cdef int rc = CHANNEL_DONE
    cdef header_t header
    memset(&header, 0, sizeof(header_t))
    header.length = length
    with nogil:
        start = kd_now_ns()
        deadline = start + timeout_ms * 1000000
        for i in range(count):
            header.epoch = <uint32_t> i
            # A source of its own for each of the buffers that may be under way.
            at = (<uint64_t> i & 15) * 256
            # Each side gives a slot back after it has answered, while the other works.
            if first:
                rc = _send(sender, source, at, &header, False, deadline)
            receiver.c_release()
            if rc == CHANNEL_DONE:
                rc = _receive(receiver, deadline)
            if rc != CHANNEL_DONE or receiver.header.epoch != <uint32_t> i:
                break
            if not first:
                rc = _send(sender, source, at, &header, False, deadline)
            if rc != CHANNEL_DONE:
                break
        else:
            i = count
        receiver.c_release()
        start = kd_now_ns() - start
    if i != count:
        receiver.end.check()
        _raise(sender.end, f"round trip {i}")
    return start


def pass_alone(Sender sender, Receiver receiver, MemoryRegion source, uint32_t length,
               int64_t count, int64_t timeout_ms=10000):
    """Send, receive and give back `count` buffers of `length` bytes in one thread, whose both ends
    these are: what a message costs beside the transfer of cache lines.  ns for all."""
    cdef int64_t i, start, deadline
    cdef int rc = CHANNEL_DONE
    cdef header_t header
    memset(&header, 0, sizeof(header_t))
    header.length = length
    with nogil:
        start = kd_now_ns()
        deadline = start + timeout_ms * 1000000
        for i in range(count):
            rc = _send(sender, source, (<uint64_t> i & 15) * 256, &header, False, deadline)
            if rc == CHANNEL_DONE:
                rc = _receive(receiver, deadline)
            if rc != CHANNEL_DONE:
                break
            receiver.c_release()
        start = kd_now_ns() - start
    if rc != CHANNEL_DONE:
        receiver.end.check()
        _raise(sender.end, "passing buffers")
    return start


def bare_bounce(Memory mine, Memory theirs, uint32_t length, int64_t count, bint first,
                int64_t timeout_ms=10000):
    """`count` round trips of `length` bytes of bare shared memory, whose last 8 count, both sides
    spinning.  ns for all."""
    cdef int64_t i, start, deadline
    cdef uint64_t n
    cdef uint32_t looks = 0
    cdef bint late = False
    cdef uint8_t source[4096]
    cdef const uint8_t* word = mine.data + length - 8
    memset(source, 1, 4096)
    with nogil:
        start = kd_now_ns()
        deadline = start + timeout_ms * 1000000
        for i in range(count):
            n = <uint64_t> i + 1
            memcpy(source + length - 8, &n, 8)
            if first:
                kd_land(theirs.data, source, length)
            while kd_landed(word) != n:
                kd_pause()
                looks += 1
                if looks % LOOKS == 0 and kd_now_ns() > deadline:
                    late = True
                    break
            if late:
                break
            if not first:
                kd_land(theirs.data, source, length)
        start = kd_now_ns() - start
        n = 0
        memcpy(<void*> word, &n, 8)
    if late:
        raise TimedOutError(BARE)
    return start
