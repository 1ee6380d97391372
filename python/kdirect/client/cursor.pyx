# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The reading cursor: where one partition is read, and the loop from its bytes to records.

Owns: the offset of the next record that a partition's bytes have not brought yet, and the one loop
of every reader and consumer: take the whole batches at hand, decode them, consume them, bring more
bytes.  A record that was just committed is handed out by a single call of this loop, without any
Python in between, which is what makes one poll a record as fast as the READs are.

A cursor has two implementations.  `DirectCursor` READs a granted file and looks at its metadata
slot; when the file ends it asks its fetcher for the next one.  `TcpCursor` has the bytes of Fetch
answers, which its source brings.  `Cursor` itself has no path to any bytes: it is a partition that
waits to be entered.

What may not enter: which path a partition takes, and what follows a failure.  An error leaves the
cursor where it was, so whoever enters the partition again goes on at `next_offset`.

One thread at a time.
"""

import weakref

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint64_t

from kdirect.client.aborted_reads cimport ASK, SKIP, AbortedReads
from kdirect.client.file_stream cimport ENDED, MOVED, NOTHING, FileStream
from kdirect.client.message cimport Message, MessageQueue
from kdirect.client.slot_table cimport SlotTable
from kdirect.format.batch cimport batch_info
from kdirect.format.chain cimport chain_t
from kdirect.format.decode cimport ArrowDecoder

from kdirect.client.tcp_kernel import whole_batches
from kdirect.errors import FormatError, NotLeaderError, ProtocolError

EMPTY = memoryview(b"")


cdef class Cursor:
    """One partition, read from `next_offset` on.

    `fill_queue` and `fill_decoder` hand out its records.  `advance` and `reopen` move it by hand,
    for whoever looks at something else than records.
    """

    cdef readonly object tp
    cdef public int64_t next_offset     # after the batches consumed
    cdef readonly bint idle             # the last call found that nothing more is readable now
    cdef uint64_t _max_batch
    cdef str _topic
    cdef int _partition

    def __init__(self, tp, int64_t next_offset, *, uint64_t max_batch_bytes=0):
        self.tp = tp
        self._topic, self._partition = tp
        self.next_offset = next_offset
        self._max_batch = max_batch_bytes

    def fill_queue(self, MessageQueue queue not None):
        """Fill the empty `queue` with wanted records, those from `next_offset` on.  False when none
        is readable now.  Raises FormatError for a broken batch, and what a request to the broker
        raises."""
        return self.c_read(queue, None, 0, False)

    def next_message(self, MessageQueue queue not None):
        """The next record, by way of the empty `queue`, where READs alone bring it; else None.
        `idle` says then whether there is none, or the broker has to be asked (`fill_queue`)."""
        if self.c_read(queue, None, 0, True):
            return queue.pop()
        return None

    def fill_decoder(self, ArrowDecoder decoder not None, double wait_ms=0):
        """Feed `decoder` until it is full or has what it wants; False when nothing more is readable
        before.  Only a `TcpCursor` waits, up to `wait_ms`.  Raises as `fill_queue` does; what was
        decoded before stays in the decoder."""
        return self.c_read(None, decoder, wait_ms, False)

    def fill_decoder_once(self, ArrowDecoder decoder not None, double wait_ms=0):
        """Feed `decoder` with what is at hand, or else with what one request brings; False when
        nothing more is readable.  `fill_decoder` asks again before it lets a decoder go that is not
        full, and waits."""
        cdef int moved = MOVED
        if self.c_take(None, decoder) <= 0:
            moved = self.c_advance(wait_ms)
            if moved == ENDED:
                return self.c_read(None, decoder, 0, False)
            if moved == NOTHING or self.c_take(None, decoder) <= 0:
                return moved != NOTHING
        if decoder.next_offset > self.next_offset:
            self.next_offset = decoder.next_offset
        return True

    def advance(self, double wait_ms=0):
        """Bring more bytes, also by a request to the broker; False when nothing more is readable
        now."""
        cdef int moved = self.c_advance(wait_ms)
        return moved == MOVED or (moved == ENDED and self._next_file())

    def reopen(self, int64_t offset):
        """Go on from `offset`."""
        self.next_offset = offset

    @property
    def last_epoch(self):
        """The leader epoch of the last batch that was consumed, which ends at `next_offset`; -1:
        that is not known."""
        return -1

    def follow(self, int epoch):
        """The batch before `next_offset`, which was read elsewhere, is of this leader epoch."""

    cdef bint c_read(self, MessageQueue queue, ArrowDecoder decoder, double wait_ms,
                     bint reads_only) except -1:
        """The loop, for one of `queue` and `decoder`; the other is None.  With `reads_only` it ends
        where the broker would have to be asked."""
        cdef int moved
        cdef bint asked = False         # for the next file, since the last batch
        self.idle = False
        while True:
            if decoder is not None and (decoder.c_full()
                                        or decoder.next_offset >= decoder.stop_offset):
                return True
            if self.c_take(queue, decoder) > 0:
                asked = False
                if queue is not None:
                    self.next_offset = queue.after
                    if queue._skip() != NULL:
                        return True
                elif decoder.next_offset > self.next_offset:
                    self.next_offset = decoder.next_offset
                continue
            if decoder is not None and decoder.c_full():
                return True     # there is a whole batch at hand, which did not fit
            moved = self.c_advance(wait_ms)
            if moved == NOTHING:
                self.idle = True
                return False
            if moved == ENDED:
                # One request without a batch in between: a broker that grants one empty file after
                # the other may not hold up the caller.
                if reads_only or asked or not self._next_file():
                    return False
                asked = True

    cdef inline Py_ssize_t c_give(self, const uint8_t* p, uint64_t n, chain_t* chain,
                                  MessageQueue queue, ArrowDecoder decoder) except -1:
        """Have `queue` or `decoder` take batches from p[0, n); the bytes that it consumed."""
        if queue is not None:
            return queue.c_load(p, n, self._topic, self._partition, self.next_offset,
                                self._max_batch, chain)
        return decoder.c_feed(p, n, chain)

    # What an implementation has.

    cdef Py_ssize_t c_take(self, MessageQueue queue, ArrowDecoder decoder) except -1:
        """Decode and consume whole batches of the bytes at hand; how many bytes, 0 when there is no
        whole batch."""
        return 0

    cdef int c_advance(self, double wait_ms) except -1:
        """MOVED: there are more bytes at hand.  NOTHING: no more are readable now.  ENDED: not
        before `_next_file`."""
        return NOTHING

    cdef bint _next_file(self) except -1:
        return False


cdef class DirectCursor(Cursor):
    """READs a partition through a `DirectFetcher`, which makes it and opens its files.

    `slots` and `slot_index` (-1: none) are its metadata slot; `has_data` is False while it has a
    slot only: nothing is readable at `next_offset` yet.  `aborted` tells a reader of committed
    records which batches of the granted file to leave out; None for the others.
    """

    cdef readonly FileStream stream
    cdef public SlotTable slots
    cdef public int slot_index
    cdef public bint has_data
    cdef public int64_t segment_base_offset   # of the granted file
    cdef readonly AbortedReads aborted
    cdef bint _list_ended                     # which does not tell of the next batch
    cdef object _fetcher                      # weakly: the fetcher holds its cursors
    cdef bint _committed_only

    def __init__(self, tp, int64_t next_offset, fetcher, FileStream stream, *, bint committed_only,
                 uint64_t max_batch_bytes):
        Cursor.__init__(self, tp, next_offset, max_batch_bytes=max_batch_bytes)
        self._fetcher = weakref.ref(fetcher)
        self.stream = stream
        self.slot_index = -1
        self._committed_only = committed_only

    def judge(self, AbortedReads aborted):
        """The list beside the file that was just entered, or None."""
        self.aborted = aborted
        self._list_ended = False

    def reopen(self, int64_t offset):
        """Go on from `offset`: enter the file that holds it."""
        self._fetcher().assign({self.tp: offset})

    def resume(self, int64_t offset):
        """Go on from `offset` after a pause; False when the queue pair is gone.

        What was READ before counts only while a slot says that the partition is still the one it
        was READ from: it may have been deleted meanwhile, and another made under its name.  Bytes
        that were READ and not consumed were compared with the log of that time, so they are dropped
        too.
        """
        fetcher = self._fetcher()
        if fetcher is None or fetcher.channel.closed:
            return False
        stream = self.stream
        stays = self.next_offset == offset and not stream.sealed and not stream.buffered
        if stays and self.slot_index >= 0:
            fetcher.refresh()
            return not stream.revoked
        self.reopen(offset)
        return True

    def slot_that_tells(self):
        """After a call that found nothing: the slot that changes before there can be anything; -1
        when none does."""
        cdef FileStream stream = self.stream
        if stream.outgrown or stream.sealed or stream.revoked or stream._hi > stream._lo:
            return -1                   # so it is where the list has ended, too
        if self.has_data:
            return self.slot_index if stream.unread == 0 else -1
        return self.slot_index if stream.high_watermark <= self.next_offset else -1

    @property
    def last_epoch(self):
        return self.stream.c_last_epoch()

    def follow(self, int epoch):
        self.stream.follow(epoch)

    def forgotten(self):
        """The fetcher reads the partition no more: whoever still holds the cursor gets nothing from
        it."""
        self.has_data = False
        self.slot_index = -1
        self.judge(None)
        self.stream.close()

    cdef Py_ssize_t c_take(self, MessageQueue queue, ArrowDecoder decoder) except -1:
        cdef FileStream stream = self.stream
        cdef uint64_t unread = stream._hi - stream._lo
        cdef chain_t* chain = NULL
        cdef chain_t before
        cdef Py_ssize_t consumed
        cdef int64_t whole
        cdef batch_info info
        cdef int found
        if unread == 0:
            return 0
        if self.aborted is not None:
            found = self.aborted.c_judge(stream.c_start(), unread, stream.position,
                                         stream.last_stable_offset, &unread, &info)
            if found == SKIP:
                return self._pass(&info, queue, decoder)
            self._list_ended = found == ASK
            if found == ASK:
                return 0
        if queue is not None or decoder.check_crc:
            chain = stream.c_chain()
        self._lend(queue, decoder)
        if chain != NULL:
            before = chain[0]
            try:
                consumed = self.c_give(stream.c_start(), unread, chain, queue, decoder)
            except FormatError as e:
                raise stream.located(e) from e.__cause__
            except BaseException:
                # No memory: what was taken is not consumed.  A decoder will know it again.
                chain[0] = before
                if queue is not None:
                    queue.clear()
                raise
            if consumed:
                stream.c_consume(<uint64_t> consumed)
                return consumed
        whole = stream.c_whole()
        if whole == 0:
            return 0
        self._lend(queue, decoder)
        try:
            consumed = self.c_give(stream.c_start(), min(<uint64_t> whole, unread), NULL, queue,
                                   decoder)
        except FormatError as e:
            raise stream.located(e) from e.__cause__
        stream.consume(<uint64_t> consumed)
        return consumed

    cdef inline int _lend(self, MessageQueue queue, ArrowDecoder decoder) except -1:
        """Say whose the bytes at hand are, to who views them.  Before each call of `c_give`."""
        if decoder is None:
            if queue.views:
                queue.c_own(self.stream.c_owner())
        elif decoder.views:
            self.stream.c_lend(decoder)
        return 0

    cdef Py_ssize_t _pass(self, const batch_info* info, MessageQueue queue,
                          ArrowDecoder decoder) except -1:
        """Consume the first batch, which is whole and was aborted."""
        cdef int64_t after = info.base_offset + info.last_offset_delta + 1
        if self.stream.c_whole() < info.size:
            return 0
        self.stream.consume(info.size)
        self.aborted.c_skipped()
        if queue is not None:
            queue.c_pass(max(after, self.next_offset))
        else:
            decoder.c_pass(after)
        return info.size

    cdef int c_advance(self, double wait_ms) except -1:
        cdef FileStream stream = self.stream
        if self._list_ended:
            return ENDED
        if self.has_data:
            if self.slot_index >= 0:
                return stream.advance(self.slots, self.slot_index, self._committed_only)
            if stream.fill() > 0:
                return MOVED
            # Bytes that are left while nothing was READ: there is no room, consume first.
            return NOTHING if stream.unread > 0 else ENDED
        if self.slot_index >= 0 and not stream.sealed and not stream.revoked:
            stream.look(self.slots, self.slot_index, self._committed_only)
        if stream.sealed or stream.revoked or stream.outgrown:
            return ENDED
        return NOTHING if stream.high_watermark <= self.next_offset else ENDED

    cdef bint _next_file(self) except -1:
        """Ask for the file that holds `next_offset`, when the present one was read to its end."""
        cdef FileStream stream = self.stream
        fetcher = self._fetcher()
        if fetcher is None or self.tp not in fetcher:
            return False
        if stream.revoked:
            raise NotLeaderError(f"{self.tp} was deleted or moved while it was read",
                                 hint="look the topic up again and open a new reader")
        if self.has_data and stream.buffered and not stream.outgrown and not self._list_ended:
            raise ProtocolError(
                f"{self.tp}: {stream.buffered} bytes after position {stream.position} of a sealed "
                "file are no whole batch",
                hint="the segment is damaged; run recovery by restarting the broker")
        fetcher.assign({self.tp: self.next_offset})
        return True


cdef class TcpCursor(Cursor):
    """Takes the records of a partition from the answers to Fetch requests.

    Its source calls `arrived` with whole batches and the leader epoch of the last one.  It has
    `bring(cursor, wait_ms)`, which returns whether more bytes are at hand then, or raises what is
    wrong with the partition, and `consumed(cursor, n)`, which learns of bytes that are done with.
    """

    cdef readonly object data           # whole batches that were fetched and not consumed
    cdef public str where               # what they come from, where errors are to name it
    cdef object _whole                  # what arrived last, of which `data` is the rest
    cdef int _epoch_before, _epoch      # of the batch before these, and of the last of them
    cdef object _source                 # weakly: a source holds its cursors

    def __init__(self, tp, int64_t next_offset, source, *, uint64_t max_batch_bytes):
        Cursor.__init__(self, tp, next_offset, max_batch_bytes=max_batch_bytes)
        self.where = ""
        self.follow(-1)
        self._source = weakref.ref(source)

    def arrived(self, data, int last_epoch=-1):
        """`data`, a memoryview of whole batches, is at hand in place of what was.  `last_epoch`:
        the leader epoch of the last one; -1: not known."""
        if len(data):
            self._epoch_before, self._epoch = self.last_epoch, last_epoch
            self._whole = data
        self.data = data

    @property
    def last_epoch(self):
        cdef Py_ssize_t left = len(self.data), consumed = len(self._whole) - left
        if consumed <= 0:
            return self._epoch_before
        return self._epoch if left == 0 else whole_batches(self._whole[:consumed], 0)[4]

    def follow(self, int epoch):
        self._epoch_before = self._epoch = epoch
        self.data = self._whole = EMPTY

    def reopen(self, int64_t offset):
        """Go on from `offset`; what is at hand is dropped."""
        self.follow(self.last_epoch if offset == self.next_offset else -1)
        self.next_offset = offset

    cdef Py_ssize_t c_take(self, MessageQueue queue, ArrowDecoder decoder) except -1:
        cdef Py_buffer view
        cdef Py_ssize_t consumed
        if not len(self.data):
            return 0
        PyObject_GetBuffer(self.data, &view, PyBUF_SIMPLE)
        try:
            # Nobody writes into an answer any more, and it lives as long as it is looked at.
            if decoder is None:
                queue.c_own(self.data)
            elif decoder.views:
                decoder.c_window(<const uint8_t*> view.buf, view.len, self.data)
            consumed = self.c_give(<const uint8_t*> view.buf, view.len, NULL, queue, decoder)
        except FormatError as e:
            if self.where:
                e.message = f"{e.message} (in {self.where})"
            raise
        finally:
            PyBuffer_Release(&view)
        if consumed:
            self.data = self.data[consumed:]
            self._source().consumed(self, consumed)
        return consumed

    cdef int c_advance(self, double wait_ms) except -1:
        if len(self.data):
            return NOTHING      # it is not taken: the decoder is full
        source = self._source()
        return MOVED if source is not None and source.bring(self, wait_ms) else NOTHING
