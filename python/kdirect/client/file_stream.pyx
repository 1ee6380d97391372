# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One-sided reading: the bytes of one granted file by READ (KafkaDirect §4.4.2).

Owns: where one file is read and how much of it at a time.  What may not enter: requests to the
broker, policy, threads.  Everything that arrives from the broker's memory is checked before it is
used: a slot by its guard and its bounds, a batch by its frame, its place in the log
(`kdirect.format.chain`) and, in the decoders, its CRC.

Memory.  Where the transport lets the peer's memory be read in place (shm), a `FileStream` has no
buffer while bytes lie there: its window is the granted file itself, whose bytes below the last
readable position do not change, held mapped by the stream's view until the next `open` or `close`.
Decoders read each length once and check it, since the peer's processes can write there. Elsewhere a
`FileStream`'s buffer is registered for local writes.  The transport owns [hi, hi + n) from the post
of a READ to its completion, which `fill` waits for, so between calls the whole buffer belongs to
the caller.  Decoders read [lo, hi) and copy what they keep.

A decoder of views (`c_lend`) keeps the bytes instead.  Its columns hold the `RemoteView`, so that
the file stays mapped as long as they live, whatever the stream does.  Or they hold a `BufferLease`:
until the last of them is gone, READs go into what is free after it, and then into another buffer.

There is no lock.  All streams of a queue pair belong to one consumer, reader or session, and are
used by its thread, or with its lock held (`kdirect.wire.channel` says which).
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.ref cimport Py_REFCNT
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memmove

from kdirect.client.read_work cimport (
    READ_FAILED, READS_AHEAD, c_read_pieces, check_location, now_ns, raise_read)
from kdirect.client.slot_table cimport SlotTable, slot_t
from kdirect.format.batch cimport BATCH_OK, batch_info, parse_batch_header
from kdirect.format.chain cimport (
    CHAIN_OK, chain_error, chain_t, follow_batches, is_dense, start_chain)
from kdirect.format.decode cimport ArrowDecoder
from kdirect.format.layout cimport (
    BATCH_HEADER_BYTES, BATCH_LENGTH_PREFIX_BYTES, SLOT_FLAG_ASSIGNED, SLOT_FLAG_REVOKED,
    SLOT_FLAG_READABLE, SLOT_FLAG_SEALED)
from kdirect.rdma.contract cimport WC_SUCCESS, MemoryRegion, RemoteView

import logging
import os

from kdirect.errors import CorruptBatchError, ProtocolError

log = logging.getLogger("kdirect.client")

# How often this process was forked, or begins to be.
cdef uint64_t forks = 0


def _forked():
    global forks
    forks += 1


os.register_at_fork(before=_forked)

cdef enum:
    FIRST_BUFFER_BYTES = 65536
    MOST_SPARE = 2


cdef int32_t last_epoch_of(const uint8_t* p, uint64_t n, int32_t before) noexcept nogil:
    """The leader epoch of the last of the whole batches p[0, n) that has one; else `before`."""
    cdef uint64_t at = 0
    cdef batch_info info
    while at < n:
        if parse_batch_header(p + at, n - at, &info) != BATCH_OK or info.size > n - at:
            break
        if info.leader_epoch >= 0:
            before = info.leader_epoch
        at += info.size
    return before


cdef class SpareBuffers:
    """READ buffers of one stream that nobody looks at any more, for its next ones.  A lease gives
    them back on any thread; all of it runs under the GIL."""

    def __init__(self):
        self._regions = []
        self._closed = False

    cdef MemoryRegion take(self, uint64_t length):
        """One of exactly so many bytes, or None."""
        cdef MemoryRegion region
        for i in range(len(self._regions)):
            region = self._regions[i]
            if region.length == length:
                del self._regions[i]
                return region
        return None

    cdef give(self, MemoryRegion region):
        if self._closed:
            region.deregister()
            return
        self._regions.append(region)
        if len(self._regions) > MOST_SPARE:     # the oldest, as buffers grow
            self._regions.pop(0).deregister()

    cdef close(self):
        self._closed = True
        while self._regions:
            self._regions.pop().deregister()


cdef class BufferLease:
    """Keeps the bytes of a READ buffer as they are.

    The stream has a reference while it READs into the buffer, and each Arrow buffer over it has
    one.  With the last one the memory goes back to the stream, or ends when the stream has.  It
    never goes back if this process was forked meanwhile: the memory is shared, and nobody knows
    what the other one still looks at."""

    def __init__(self, MemoryRegion region, SpareBuffers spares):
        self.region = region
        self.spares = spares
        self.forks = forks
        self.ended = False

    def __del__(self):
        if not self.ended and self.region is not None:
            self.ended = True
            try:
                if self.forks == forks:
                    self.spares.give(self.region)
                else:
                    self.region.deregister()
            except Exception as e:      # it is the parent's, or the interpreter has ended
                if log is not None:
                    log.debug("a READ buffer is left as it is: %s", e)


cdef class FileStream:
    """Bytes of one granted file, read in order, whole batches handed on and the rest kept.

    Life: `open` for each grant; `take_slot` moves the last readable position; `fill` READs; a
    cursor, or `window` and `consume`, hand bytes to a decoder.  The size of a READ starts at
    `min_read_bytes` (2 KiB, KafkaDirect §4.4.2), doubles while the stream lags, and halves when it
    has caught up; a batch whose header has arrived is fetched to its end at once.

    The stream takes registered memory from the endpoint of its location.  It asks for a larger
    buffer while it lags, up to `buffer_bytes`, and beyond only for a single batch larger than that,
    up to `max_batch_bytes`.
    """

    def __init__(self, name, *, min_read_bytes=2048, max_read_bytes=1 << 20, buffer_bytes=4 << 20,
                 max_batch_bytes=64 << 20, in_place=True):
        self.name = name
        self._min_read = min_read_bytes
        self._max_read = max(min_read_bytes, max_read_bytes)
        self._max_buffer = max(buffer_bytes, 2 * self._max_read)
        self._max_batch = max_batch_bytes
        self.read_size = self._min_read
        self.file_id = -1
        self._epoch_before = -1
        self._in_place = in_place

    def open(self, location, int file_id, int64_t position, int64_t limit, bint sealed):
        """Start on the granted file at `location` (`kdirect.wire.location`) at `position`; bytes
        kept of the previous file are dropped.  The queue pair is that of the location's endpoint.
        """
        endpoint, raw_address, raw_rkey, raw_length = location
        cdef int64_t address = raw_address, rkey = raw_rkey, length = raw_length
        if length < 0 or not 0 <= position <= limit <= length:
            raise ProtocolError(f"{self.name}: the broker granted positions {position} to {limit} "
                                f"of a file of {length} bytes",
                                hint="broker and client are of different versions")
        check_location(self.name, address, rkey, length)
        self._epoch_before = self.last_epoch
        self._close_view()
        if endpoint is not self._endpoint:
            self._free_buffer()             # it is registered where the other queue pair belongs
            self._qp = endpoint.qp
            self._cq = endpoint.send_cq
            self._endpoint = endpoint
        self.file_id = file_id
        self._address = <uint64_t> address
        self._rkey = <uint32_t> rkey
        self.length = length
        self.position = self._start = position
        self.limit = self._committed = limit
        self.sealed = sealed
        self.outgrown = False
        self.revoked = False
        # Columns may look at what was READ of the file before.
        self._lo = self._hi = 0 if self._lease is None else self._hi
        self._checked = 0
        self._segment = -1
        start_chain(&self._chain)
        if self._in_place and length > 0:
            self._view = self._qp.view(self._address, length, self._rkey)

    @property
    def last_epoch(self):
        """The leader epoch of the last batch that was consumed, also of files before; -1: none was,
        or it is not known."""
        return self.c_last_epoch()

    cdef int32_t c_last_epoch(self) noexcept nogil:
        if self.position == self._start:
            return self._epoch_before
        return self._epoch_here if self._checked else self._followed_epoch()

    cdef int32_t _followed_epoch(self) noexcept nogil:
        """Of the last batch that `_chain` has followed, be it consumed or not."""
        if self._chain.next_offset <= self._chain.dense_from:
            return self._chain.copied_epoch
        return self._chain.least_epoch

    def follow(self, int32_t epoch):
        """What is read from here on follows a batch of leader epoch `epoch`, which was not read
        here; -1: that is not known."""
        self._start = self.position
        self._epoch_before = self._epoch_here = epoch

    cdef _close_view(self):
        cdef RemoteView view = self._view
        self._view = None
        if view is not None and not self._view_is_lent:
            view.close()
        self._view_is_lent = False

    cdef object c_owner(self):
        """What keeps the bytes at hand as they are, as long as it is referenced."""
        if self._view is not None:
            if not self._view_is_lent:
                self._view_is_lent = True
                self._view.keep_in_forks()
            return self._view
        if self._lease is None:
            if self._spares is None:
                self._spares = SpareBuffers()
            self._lease = BufferLease(self._buffer, self._spares)
        return self._lease

    cdef int c_lend(self, ArrowDecoder decoder) except -1:
        """Say to `decoder`, which makes views, where the bytes at hand lie and who keeps them."""
        owner = self.c_owner()
        if self._view is not None:
            return decoder.c_window(self.c_start(), <uint64_t> (self.limit - self.position), owner)
        return decoder.c_window(self.c_start(), self._capacity - self._lo, owner)

    cdef const uint8_t* c_start(self) noexcept nogil:
        """Where the byte at `position` lies."""
        if self._view is not None:
            return self._view.data + self.position
        return self._buffer.data + self._lo

    def set_offsets(self, int64_t high_watermark, int64_t last_stable_offset,
                    int64_t log_start_offset, int leader_epoch):
        """What the grant said of the partition."""
        self.high_watermark = high_watermark
        self.last_stable_offset = last_stable_offset
        self.log_start_offset = log_start_offset
        self.leader_epoch = leader_epoch

    def expect(self, int64_t segment_base_offset, int64_t next_offset, int64_t dense_from,
               int64_t end_offset, int32_t least_epoch, int32_t greatest_epoch):
        """What the grant said of the batches from `position` on: the segment they are in, the base
        offset of the first one, from which offset on none is missing, the offset after the last
        one, and the bounds of their leader epochs."""
        if next_offset < 0 or segment_base_offset < 0 or end_offset < 0:
            raise ProtocolError(f"{self.name}: the broker granted a segment of base offset "
                                f"{segment_base_offset} from offset {next_offset} to {end_offset}",
                                hint="broker and client are of different versions")
        self._segment = segment_base_offset
        self._chain.next_offset = next_offset
        self._chain.dense_from = dense_from
        self._chain.end_offset = end_offset
        self._chain.least_epoch = least_epoch
        self._chain.greatest_epoch = greatest_epoch

    cdef int64_t c_whole(self) except -1:
        """How many bytes from `position` on are whole batches that continue the log.
        CorruptBatchError or UnsupportedFormatError when the first one does not."""
        cdef uint64_t n = self._hi - self._lo, whole = self._checked
        cdef batch_info info
        cdef const uint8_t* p
        cdef int code
        if whole < n:
            if whole == 0:
                self._epoch_here = self.c_last_epoch()
            p = self.c_start()
            code = follow_batches(&self._chain, p, n,
                                  <uint64_t> (self._committed - self.position), &whole, &info)
            self._checked = whole
            if code != CHAIN_OK and whole == 0:
                head = PyBytes_FromStringAndSize(<const char*> p,
                                                 min(n, <uint64_t> BATCH_HEADER_BYTES))
                raise chain_error(code, &self._chain, &info, self._here(), head)
        return <int64_t> self._checked

    cdef chain_t* c_chain(self) noexcept nogil:
        """For a decoder that follows the log itself, batch by batch, from `position` on, so that
        each header is parsed once; NULL: use `c_whole`, which knows the rules of logs with gaps
        too, and the words for what is wrong."""
        return &self._chain if self._checked == 0 and is_dense(&self._chain) else NULL

    cdef void c_consume(self, uint64_t n) noexcept nogil:
        """The first `n` unread bytes, which follow the log as far as `_chain` says, are done with.
        `n` is within what is unread."""
        if n < self._checked and self._epoch_here != self._followed_epoch():
            # Rarely: a leader epoch ends in what was checked.
            self._epoch_here = last_epoch_of(self.c_start(), n, self._epoch_here)
        self._checked -= min(n, self._checked)
        self._lo += n
        self.position += <int64_t> n
        if self._lo == self._hi and self._lease is None:
            self._lo = self._hi = 0

    cdef object _here(self):
        where = f"position {self.position} of the segment that begins at offset {self._segment}"
        if self._checked == 0:
            return f"{self.name} offset {self._chain.next_offset}, {where}"
        return f"{self.name}, {where}"

    def located(self, error):
        """`error`, which a decoder raised for the batch at `position`, with the place of that batch
        in its message."""
        error.message = (f"{error.message} (position {self.position} of the segment that begins "
                         f"at offset {self._segment})")
        return error

    def close(self):
        """Drop the buffer or the view; the stream may be opened again."""
        cdef batch_info info
        if self._checked:
            # What follows `position` is checked again when it is READ again.
            parse_batch_header(self.c_start(), self._checked, &info)
            self._chain.next_offset = info.base_offset
            self._chain.least_epoch = min(self._chain.least_epoch, info.leader_epoch)
            if self.position == self._start:
                self._chain.copied_epoch = -1
            elif info.base_offset <= self._chain.dense_from:
                self._chain.copied_epoch = self._epoch_here
            else:
                self._chain.least_epoch = self._epoch_here
            self._checked = 0
        self._close_view()
        self._free_buffer()

    cdef _free_buffer(self):
        if self._spares is not None:
            self._spares.close()
            self._spares = None
        if self._buffer is not None:
            self._drop_buffer()
        self._capacity = self._lo = self._hi = 0

    cdef _drop_buffer(self):
        cdef MemoryRegion buffer = self._buffer
        self._buffer = None
        if self._lease is None:
            buffer.deregister()
        self._lease = None          # it ends the buffer, now or with the last view

    cpdef bint take_slot(self, SlotTable slots, int index, bint committed_only) except -1:
        """Take the news of slot `index` as of its last refresh; True if anything moved.  A slot
        that is not this file's any more sets `revoked`.  A refresh from before the grant is no
        news: see `SlotTable`."""
        cdef slot_t s
        cdef int64_t limit
        cdef bint moved
        cdef int ended
        slots.c_check(index)
        if not slots.c_is_news(index, 0):
            return False
        self._seen = slots._copy
        slots.c_get(index, &s)
        if not s.flags & SLOT_FLAG_ASSIGNED or s.file_id != self.file_id:
            self.revoked = True
            return True
        self.revoked = (s.flags & SLOT_FLAG_REVOKED) != 0
        ended = SLOT_FLAG_SEALED if committed_only else SLOT_FLAG_SEALED | SLOT_FLAG_READABLE
        moved = (self.high_watermark != s.high_watermark or (s.flags & ended) != 0
                 or self.revoked or self.last_stable_offset != s.last_stable_offset)
        self.high_watermark = s.high_watermark
        self.last_stable_offset = s.last_stable_offset
        self.log_start_offset = s.log_start_offset
        self.leader_epoch = s.leader_epoch
        self._chain.end_offset = s.last_stable_offset if committed_only else s.high_watermark
        self._chain.greatest_epoch = s.leader_epoch
        self.sealed = (s.flags & ended) != 0
        if self.length > 0:
            limit = s.last_stable_position if committed_only else s.last_readable_position
            self._committed = limit
            if limit > self.length:
                # A head grows in place; what was granted of it ends where the head ended then.
                self.outgrown = True
                limit = self.length
            if limit < self.limit:
                raise ProtocolError(f"{self.name}: the last readable position moved from "
                                    f"{self.limit} to {limit} in a file of {self.length} bytes",
                                    hint="the broker's log was cut; open the reader again")
            moved = moved or limit != self.limit
            self.limit = limit
        return moved

    cpdef bint look(self, SlotTable slots, int index, bint committed_only) except -1:
        """Take the news of slot `index`, after a refresh if this stream has none to take; True if
        anything moved.

        Streams that share a table share its refreshes: the table is READ again only by a stream
        that has taken the last one's news, or whose slot was granted after it.
        """
        slots.c_check(index)
        if not slots.c_is_news(index, self._seen):
            slots.refresh()
        return self.take_slot(slots, index, committed_only)

    cpdef int advance(self, SlotTable slots, int index, bint committed_only) except -1:
        """READ more bytes, looking at the slot when the known ones are used up.  MOVED: bytes came;
        NOTHING: nothing new (or no room: consume first); ENDED: the file ends here (sealed and
        read, access ended, or read to the end of what was granted of it).  Refreshes are shared:
        see `look`.
        """
        if self.limit > self.position + <int64_t> (self._hi - self._lo):
            return MOVED if self.fill() > 0 else NOTHING
        if not self.sealed and not self.revoked and not self.outgrown:
            self.look(slots, index, committed_only)
            if self.limit > self.position + <int64_t> (self._hi - self._lo):
                return MOVED if self.fill() > 0 else NOTHING
        return ENDED if self.sealed or self.revoked or self.outgrown else NOTHING

    @property
    def unread(self):
        """Bytes between what has been READ and the last readable position."""
        return self.limit - (self.position + <int64_t> (self._hi - self._lo))

    @property
    def buffered(self):
        """Bytes READ and not consumed."""
        return self._hi - self._lo

    @property
    def buffer_bytes(self):
        """Memory of the buffer."""
        return self._capacity

    cdef _grow(self, uint64_t capacity):
        """Go on in another buffer of so many bytes."""
        cdef MemoryRegion new = None
        if self._spares is not None:
            new = self._spares.take(capacity)
        if new is None:
            new = self._endpoint.local_memory(capacity)
        if self._hi > self._lo:
            memcpy(new.data, self._buffer.data + self._lo, self._hi - self._lo)
        self._hi -= self._lo
        self._lo = 0
        if self._buffer is not None:
            self._drop_buffer()
        self._buffer = new
        self._capacity = capacity

    cpdef int64_t fill(self) except -1:
        """READ as much as the read size, the buffer and the last readable position allow, and a
        second time when that brought the header of a batch and not its end.  Returns the bytes read
        (0: nothing to read or no room).  Raises QueuePairError when access has ended,
        CorruptBatchError for a batch larger than `max_batch_bytes`."""
        cdef int64_t n = self._fill_once()
        cdef batch_info info
        if n > 0 and self.limit > self.position + <int64_t> (self._hi - self._lo) \
                and self._hi - self._lo >= BATCH_LENGTH_PREFIX_BYTES:
            parse_batch_header(self.c_start(), self._hi - self._lo, &info)
            if info.size > self._hi - self._lo:
                n += self._fill_once()
        return n

    cdef int64_t _fill_once(self) except -1:
        cdef int64_t unread = self.limit - (self.position + <int64_t> (self._hi - self._lo))
        cdef uint64_t want, kept, piece, room, need = 0
        cdef uint32_t status = 0
        cdef int rc
        cdef int64_t began
        cdef batch_info info
        if unread <= 0:
            return 0
        kept = self._hi - self._lo
        if kept >= BATCH_LENGTH_PREFIX_BYTES:
            parse_batch_header(self.c_start(), kept, &info)
            need = info.size
            if need > self._max_batch:
                if self._segment >= 0:
                    self.c_whole()      # raises when the length cannot be
                raise CorruptBatchError(
                    f"{self.name}: a record batch of {need} bytes at position {self.position}",
                    hint=f"raise max.batch.bytes (now {self._max_batch}) if it is genuine")
        want = self.read_size
        if need > kept and need - kept > want:
            want = need - kept
        # A short rest comes with it: another READ, and another turn of whoever reads, costs more.
        if want + want // 2 > <uint64_t> unread and <uint64_t> unread <= self._max_read:
            want = <uint64_t> unread
        want = min(want, <uint64_t> unread)
        if self._view is not None:
            with nogil:
                rc = self._qp.c_read_in_place(
                    self._view, self._address + <uint64_t> self.position + kept, <uint32_t> want)
            if rc != <int> WC_SUCCESS:
                raise_read(READ_FAILED, <uint32_t> rc, f"READ of {self.name}")
            self._arrived(want, 1, unread)
            return <int64_t> want
        piece = want
        if want == self._max_read:
            # The stream lags: several READs are under way at once, as far as the buffer may grow.
            room = self._max_buffer - kept if self._max_buffer > kept + piece else piece
            want = min(min(READS_AHEAD * piece, <uint64_t> unread), room)
        want = self._make_room(kept, want, need)
        if want == 0:
            return 0
        began = now_ns()
        with nogil:
            rc = c_read_pieces(
                self._qp, self._cq, self._buffer.address + self._hi, self._buffer.lkey, want,
                <uint32_t> piece, self._address + <uint64_t> self.position + kept, self._rkey,
                &status)
        self.wait_ns += now_ns() - began
        if rc != 0:
            raise_read(rc, status, f"READ of {self.name}")
        self._arrived(want, (want + piece - 1) // piece, unread)
        return <int64_t> want

    cdef uint64_t _make_room(self, uint64_t kept, uint64_t want, uint64_t need) except? 0:
        """Room for `want` bytes after the `kept` ones, in a larger buffer if that is allowed, for
        `need` bytes of one batch in any case; how many of `want` there is room for."""
        cdef uint64_t room
        if self._lease is not None and Py_REFCNT(self._lease) == 1 \
                and self._lease.forks == forks:
            self._lease.ended = True    # nobody looks at the buffer any more
            self._lease = None
            if kept == 0:
                self._lo = self._hi = 0
        if self._lease is not None and self._capacity - self._hi < want:
            room = self._capacity
            while room < kept + want and room < self._max_buffer:
                room *= 2
            self._grow(max(min(room, max(self._max_buffer, self._capacity)), need))
        if self._capacity < kept + want:
            if self._capacity < self._max_buffer or need > self._capacity:
                room = max(FIRST_BUFFER_BYTES, self._capacity)
                while room < kept + want:
                    room *= 2
                if room > self._max_buffer:
                    room = max(self._max_buffer, need)
                self._grow(room)
        if self._capacity - self._hi < want and self._lo > 0:
            memmove(self._buffer.data, self._buffer.data + self._lo, kept)
            self._lo = 0
            self._hi = kept
        return min(want, self._capacity - self._hi)

    cdef void _arrived(self, uint64_t want, uint64_t reads, int64_t unread) noexcept nogil:
        self.reads += reads
        self.read_bytes += want
        self._hi += want
        if <int64_t> want < unread:
            self.read_size = min(self.read_size * 2, self._max_read)
        elif self.read_size > self._min_read and want <= self.read_size // 2:
            self.read_size //= 2

    def window(self):
        """(address, length) of the whole batches that were READ and not consumed; valid until the
        next `fill`, `open` or `close`.  They continue the log; their CRCs are the decoder's to
        check.  CorruptBatchError or UnsupportedFormatError: the first one does not."""
        cdef int64_t n = self.c_whole()
        if n == 0:
            return 0, 0
        return <uintptr_t> self.c_start(), n

    def bytes(self):
        """A copy of the unread bytes."""
        if self._hi == self._lo:
            return b""
        return (<const char*> self.c_start())[:self._hi - self._lo]

    cpdef consume(self, uint64_t n):
        """The first `n` unread bytes are done with."""
        if n > self._hi - self._lo:
            raise ValueError(n)
        if n > self._checked:        # of bytes that nobody has looked at
            start_chain(&self._chain)
        self.c_consume(n)

    def statistics(self):
        return {
            "reads": self.reads,
            "read_bytes": self.read_bytes,
            "read_wait_us": self.wait_ns // 1000,
            "read_size": self.read_size,
            "buffer_bytes": self._capacity,
        }
