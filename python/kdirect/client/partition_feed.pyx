# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""From one partition's granted file to messages, in one call.

Owns: where one partition stands (`Feed`): its stream, its metadata slot, and the loop of slot READ,
data READ and check that ends with a message.  A record that was just committed is handed out by a
single call, which is what makes one poll a record as fast as the READs are. Requests to the broker
are `direct`'s: a feed says when one is due (`ENDED`).

One thread at a time.
"""

from libc.stdint cimport int64_t, uint64_t

from kdirect.client.direct_read cimport ENDED, MOVED, NOTHING, FileStream, SlotTable
from kdirect.client.message cimport Message, MessageQueue
from kdirect.format.chain cimport chain_t

from kdirect.errors import FormatError


cdef class Feed:
    """One partition of a consumer.  `slots` and `slot_index` (-1: none) are its metadata slot;
    `has_data` is False while there is a slot only."""

    cdef readonly object tp
    cdef readonly FileStream stream
    cdef public SlotTable slots
    cdef public int slot_index
    cdef public bint has_data
    cdef public int64_t segment_base_offset   # of the granted file
    cdef readonly bint idle        # the last `load` or `next` ended because nothing more is readable now
    cdef readonly int64_t after    # offset behind what the last `load` consumed
    cdef bint _committed_only
    cdef uint64_t _max_batch
    cdef str _topic
    cdef int _partition

    def __init__(self, tp, FileStream stream, *, bint committed_only, uint64_t max_batch_bytes):
        self.tp = tp
        self._topic, self._partition = tp
        self.stream = stream
        self.slot_index = -1
        self._committed_only = committed_only
        self._max_batch = max_batch_bytes

    cpdef int advance(self) except -1:
        """READ more bytes of the file, looking at the slot when the known ones are used up:
        `FileStream.advance`.  ENDED without a file or a slot."""
        if not self.has_data or self.slot_index < 0 or self.slots is None:
            return ENDED
        return self.stream.advance(self.slots, self.slot_index, self._committed_only)

    cpdef bint load(self, MessageQueue queue, int64_t position) except -1:
        """Fill the empty `queue` with wanted records, those from offset `position` on; False when
        none is readable (`idle`), or the file ends here.  `after` is the position then, in either
        case."""
        cdef FileStream stream = self.stream
        cdef int moved
        self.after = position
        self.idle = False
        if not self.has_data:
            return False
        while True:
            if stream._hi > stream._lo and self._take(queue):
                self.after = queue.after
                if queue._skip() != NULL:
                    return True
                continue
            if self.slot_index >= 0:
                moved = self.advance()
            else:
                moved = MOVED if stream.fill() > 0 else ENDED
            if moved != MOVED:
                self.idle = moved == NOTHING
                return False

    cdef bint _take(self, MessageQueue queue) except -1:
        """Move batches from the stream, which has bytes, to the empty `queue`; False when there is
        no whole one."""
        cdef FileStream stream = self.stream
        cdef chain_t* chain = stream.c_chain()
        cdef Py_ssize_t consumed
        cdef int64_t whole
        cdef chain_t before
        if chain != NULL:
            before = chain[0]
            try:
                consumed = queue.c_load(stream.c_start(), stream._hi - stream._lo, self._topic, self._partition, self.after, self._max_batch, chain)
            except BaseException:       # no memory: what the queue took is not consumed
                chain[0] = before
                queue.clear()
                raise
            if consumed:
                stream.c_followed(<uint64_t> consumed)
                return True
        whole = stream.c_whole()
        if whole == 0:
            return False
        try:
            consumed = queue.c_load(stream.c_start(), whole, self._topic, self._partition, self.after, self._max_batch, NULL)
        except FormatError as e:
            raise stream.located(e)
        stream.consume(<uint64_t> consumed)
        return consumed > 0

    cpdef Message next(self, MessageQueue queue, dict positions):
        """The next record, by way of the empty `queue`, with the position in `positions` moved;
        None as `load` says False."""
        cdef int64_t position = positions[self.tp]
        try:
            if self.load(queue, position):
                return queue.pop()
        finally:
            positions[self.tp] = self.after
        return None
