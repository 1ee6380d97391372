# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One-sided reading: metadata slots and segment bytes by READ (KafkaDirect §4.4.2).

Owns: the consumer's view of its slot region (`SlotTable`) and of one granted file (`FileStream`).
What may not enter: requests to the broker, policy, threads.  Everything that arrives from the
broker's memory is checked before it is used: a slot by its guard and its bounds, a batch by its
frame, its place in the log (`kdirect.format.chain`) and, in the decoders, its CRC.

Memory.  Where the transport lets the peer's memory be read in place (shm), a `FileStream` has no
buffer while bytes lie there: its window is the granted file itself, whose bytes below the last
readable position do not change, held mapped by the stream's view until the next `open` or `close`.
Decoders read each length once and check it, since the peer's processes can write there. Elsewhere a
`FileStream`'s buffer is registered for local writes; the transport owns [hi, hi + n) from the post
of a READ to its completion, which `fill` waits for, so between calls the whole buffer belongs to
the caller.  Decoders read [lo, hi) and copy what they keep.

There is no lock.  All slot tables and streams of a queue pair belong to one consumer, reader or
session, and are used by its thread, or with its lock held (`kdirect.wire.channel` says which).
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport ENOMEM
from libc.stdint cimport INT64_MAX, UINT32_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy, memmove, memset
from posix.unistd cimport usleep

from kdirect.format.batch cimport batch_info, parse_batch_header
from kdirect.format.chain cimport CHAIN_OK, chain_error, chain_t, follow_batches, is_dense, start_chain
from kdirect.format.decode cimport ArrowDecoder
from kdirect.format.layout cimport (
    BATCH_HEADER_BYTES, BATCH_LENGTH_PREFIX_BYTES, SLOT_BYTES, SLOT_FILE_ID, SLOT_FLAG_ASSIGNED, SLOT_FLAG_REVOKED, SLOT_FLAG_SEALED, SLOT_FLAGS, SLOT_GUARD,
    SLOT_HIGH_WATERMARK, SLOT_LAST_READABLE_POSITION, SLOT_LAST_STABLE_OFFSET, SLOT_LAST_STABLE_POSITION, SLOT_LEADER_EPOCH,
    SLOT_LOG_START_OFFSET, SLOT_SEGMENT_BASE_OFFSET, SLOT_UPDATE_COUNT,
)
from kdirect.format.wire cimport kd_get_le16, kd_get_le32, kd_get_le64
from kdirect.machine cimport kd_now_ns
from kdirect.rdma.contract cimport WC_SUCCESS, CompletionQueue, MemoryRegion, QueuePair, work_completion

from kdirect.errors import CorruptBatchError, FormatError, ProtocolError, QueuePairError, RdmaError, TimedOutError
from kdirect.rdma.contract import STATUS_NAMES, Access

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef enum:
    TORN_SPINS = 1000          # an update takes about 20 ns, but its thread may lose the processor halfway: then sleep between READs
    TORN_SLEEP_US = 50
    READ_FAILED = -1
    READ_TIMED_OUT = -2
    SLOT_TORN = -3
    FIRST_BUFFER_BYTES = 65536
    READS_AHEAD = 16           # data READs outstanding together while a stream lags: the next one's way is paid during this one's

cdef int64_t READ_TIMEOUT_NS = 30 * 1000000000


cdef int c_read(QueuePair qp, CompletionQueue cq, uint64_t local_address, uint32_t lkey, uint32_t length,
                uint64_t remote_address, uint32_t rkey, uint32_t* status) noexcept nogil:
    """READ and wait for the completion.  0, READ_FAILED (with `status`, or an errno + 1000) or
    READ_TIMED_OUT."""
    return c_read_pieces(qp, cq, local_address, lkey, length, length, remote_address, rkey, status)


cdef int c_read_pieces(QueuePair qp, CompletionQueue cq, uint64_t local_address, uint32_t lkey, uint64_t total, uint32_t piece,
                       uint64_t remote_address, uint32_t rkey, uint32_t* status) noexcept nogil:
    """`total` bytes by READs of `piece` bytes (the last may be shorter) that are outstanding
    together, at most READS_AHEAD; returns when all have completed, as `c_read` does.  The failure
    told is the first; the others are flushed behind it."""
    cdef work_completion wc[READS_AHEAD]
    cdef uint64_t posted = 0
    cdef uint32_t length
    cdef int rc, n, i, outstanding = 0, spins = 0, refused = 0
    cdef bint failed = False
    cdef int64_t deadline = 0
    while True:
        while posted < total and not failed and not refused and outstanding < READS_AHEAD:
            length = <uint32_t> (total - posted) if total - posted < piece else piece
            rc = qp.c_post_read(0, local_address + posted, lkey, length, remote_address + posted, rkey)
            if rc == ENOMEM and outstanding:
                break
            if rc != 0:
                refused = rc            # told only if no READ before it says why
                break
            posted += length
            outstanding += 1
        if outstanding == 0:
            if refused and not failed:
                status[0] = 1000 + refused
            return READ_FAILED if failed or refused else 0
        n = cq.c_poll(wc, READS_AHEAD)
        if n < 0:
            status[0] = 1000 - n
            return READ_FAILED
        for i in range(n):
            outstanding -= 1
            if wc[i].status != WC_SUCCESS and not failed:
                status[0] = wc[i].status
                failed = True
        if n:
            spins = 0
            deadline = 0
            continue
        spins += 1
        if spins & 1023 == 0:
            if deadline == 0:
                deadline = kd_now_ns() + READ_TIMEOUT_NS
            elif kd_now_ns() > deadline:
                return READ_TIMED_OUT


cdef _raise_read(int rc, uint32_t status, what):
    if rc == READ_TIMED_OUT:
        raise TimedOutError(f"{what}: no completion in 30 s", hint="the broker's host does not answer; check the network path")
    if status >= 1000:
        raise QueuePairError(f"{what}: the queue pair is not usable (errno {status - 1000})", hint="the broker left; a new connection is needed")
    raise QueuePairError(f"{what}: {STATUS_NAMES.get(status, status)}", hint="access ended (revoked, or the broker left); ask for it again")


cdef int _check_key(str what, int64_t address, int64_t rkey, int64_t length) except -1:
    """A grant's numbers travel as signed 64-bit ones; `length` is not negative."""
    if address < 0 or address > INT64_MAX - length or not 0 <= rkey <= <int64_t> UINT32_MAX:
        raise ProtocolError(f"{what}: the broker granted {length} bytes at address {address} under key {rkey}",
                            hint="broker and client are of different versions")
    return 0


cdef class SlotTable:
    """The consumer's copy of its slot region; `refresh` brings all active slots with one READ.

    `remote_address`, `rkey` and `slot_count` come from the broker's grant; `region` is local memory
    of at least `slot_count` slots.

    The life of a slot: the broker fills it, then answers with the grant that names it; it clears it
    when the grant ends, and may give the same index to the next grant of this client, of any
    partition.  The local copy of all slots is of one moment, so it may be older than a grant: then
    the bytes at the granted index are those of a former file, or zeros, or were never checked.

    Invariant: a slot's news count only when they come from a READ that was posted after the grant
    was answered, and in which every active slot's guard matched.  `activate` notes how many READs
    had been posted when the slot was granted (`c_is_news` compares), a READ that fails or is torn
    leaves no copy to take from (`_copy` is 0), and no READ is under way while the broker is asked,
    because `refresh` waits for its own.  What the slot holds then is of this grant, for the broker
    filled it before it answered, and gives its index to nobody else before this client has released
    it.
    """

    def __init__(self, QueuePair qp, CompletionQueue cq, MemoryRegion region, int64_t remote_address, int64_t rkey, int slot_count, *,
                 int torn_timeout_ms=10000):
        if slot_count < 1 or region.length < <uint64_t> slot_count * SLOT_BYTES:
            raise ProtocolError(f"the broker announced {slot_count} metadata slots", hint="broker and client are of different versions")
        _check_key("metadata slots", remote_address, rkey, <int64_t> slot_count * SLOT_BYTES)
        self._qp = qp
        self._cq = cq
        self._region = region
        self._remote_address = <uint64_t> remote_address
        self._rkey = <uint32_t> rkey
        self.slot_count = slot_count
        self._torn_timeout_ns = torn_timeout_ms * <int64_t> 1000000
        self._active = bytearray(slot_count)
        self._active_p = <uint8_t*> self._active
        self._since = bytearray(8 * slot_count)
        self._since_p = <uint64_t*> <uint8_t*> self._since
        # Where the initiator does the READ itself, letting other threads run meanwhile would take
        # longer than the READ.
        view = qp.view(remote_address, <uint64_t> slot_count * SLOT_BYTES, rkey)
        self._at_once = view is not None
        if view is not None:
            view.close()

    def activate(self, int index):
        """Slot `index` was granted, just now: include it in refreshes, and forget what an earlier
        one brought of it."""
        self.c_check(index)
        self._active[index] = 1
        self._since_p[index] = self._posted
        if self._told is not None:  # no slot is like that, so `changed` will tell of it
            memset(self._told_p + index * SLOT_BYTES, 0xFF, SLOT_BYTES)
        self._end = max(self._end, index + 1)

    def deactivate(self, int index):
        """Slot `index` was released."""
        self.c_check(index)
        self._active[index] = 0
        while self._end > 0 and not self._active[self._end - 1]:
            self._end -= 1

    cdef int c_check(self, int index) except -1:
        """ProtocolError for an index that is not of this table: nothing behind this checks it
        again."""
        if not 0 <= index < self.slot_count:
            raise ProtocolError(f"the broker granted slot {index} of {self.slot_count}", hint="broker and client are of different versions")
        return 0

    cdef int c_look(self, uint32_t* status) noexcept nogil:
        """One READ of the active slots: 0, SLOT_TORN, or as `c_read`."""
        cdef int i, rc
        cdef const uint8_t* p
        self._copy = 0
        self._posted += 1
        rc = c_read(self._qp, self._cq, self._region.address, self._region.lkey, <uint32_t> (self._end * SLOT_BYTES),
                    self._remote_address, self._rkey, status)
        if rc != 0:
            return rc
        self.reads += 1
        self.read_bytes += self._end * SLOT_BYTES
        for i in range(self._end):
            if self._active_p[i]:
                p = self._region.data + i * SLOT_BYTES
                if kd_get_le32(p + SLOT_GUARD) != kd_crc32c(0, p + 4, SLOT_BYTES - 4):
                    self.torn += 1
                    return SLOT_TORN
        self._copy = self._posted
        return 0

    cdef bint c_is_news(self, int index, uint64_t seen) noexcept nogil:
        """Is the copy whole, posted after slot `index` was granted, and younger than READ number
        `seen`?"""
        return self._copy > seen and self._copy > self._since_p[index]

    cdef int c_refresh(self, uint32_t* status) noexcept nogil:
        cdef int rc
        cdef int tries = 0
        cdef int64_t deadline = 0
        if self._end == 0:
            return 0
        while True:
            rc = self.c_look(status)
            if rc != SLOT_TORN:
                return rc
            tries += 1
            if tries > TORN_SPINS:
                if deadline == 0:
                    deadline = kd_now_ns() + self._torn_timeout_ns
                elif kd_now_ns() > deadline:
                    return SLOT_TORN
                usleep(TORN_SLEEP_US)

    cpdef refresh(self):
        """READ every active slot; torn ones are read again.  Raises QueuePairError when access has
        ended."""
        cdef uint32_t status = 0
        cdef int rc = SLOT_TORN
        if self._at_once:
            rc = self.c_look(&status) if self._end else 0
        if rc == SLOT_TORN:
            with nogil:
                rc = self.c_refresh(&status)
        if rc == SLOT_TORN:
            raise ProtocolError(f"a metadata slot's guard did not match for {self._torn_timeout_ns // 1000000} ms",
                                hint="the broker was stopped in the middle of an update, or is of another version")
        if rc != 0:
            _raise_read(rc, status, "READ of metadata slots")

    def changed(self, *, bint fresh):
        """Indexes of the active slots whose bytes are not those that the last call saw; a slot is
        among them once after `activate`.  READs the slots first with `fresh`, or if the last call
        has seen the copy that there is."""
        cdef int i
        cdef list out = []
        if self._end == 0:
            return out
        if self._told is None:
            self._told = bytearray(b"\xff" * (self.slot_count * SLOT_BYTES))
            self._told_p = <uint8_t*> self._told
        if fresh or self._copy <= self._scanned:
            self.refresh()
        self._scanned = self._copy
        for i in range(self._end):
            if self._active_p[i] and self.c_is_news(i, 0) \
                    and memcmp(self._told_p + i * SLOT_BYTES, self._region.data + i * SLOT_BYTES, SLOT_BYTES):
                memcpy(self._told_p + i * SLOT_BYTES, self._region.data + i * SLOT_BYTES, SLOT_BYTES)
                out.append(i)
        return out

    def poll(self, int64_t times=1):
        """`refresh` that many times without returning to Python between; for measuring an empty
        poll."""
        cdef uint32_t status = 0
        cdef int rc = 0
        cdef int64_t i
        with nogil:
            for i in range(times):
                rc = self.c_refresh(&status)
                if rc != 0:
                    break
        if rc != 0:
            _raise_read(rc, status, "READ of metadata slots")

    cdef void c_get(self, int index, slot_t* out) noexcept nogil:
        cdef const uint8_t* p = self._region.data + index * SLOT_BYTES
        out.flags = kd_get_le16(p + SLOT_FLAGS)
        out.file_id = kd_get_le16(p + SLOT_FILE_ID)
        out.segment_base_offset = <int64_t> kd_get_le64(p + SLOT_SEGMENT_BASE_OFFSET)
        out.last_readable_position = <int64_t> kd_get_le64(p + SLOT_LAST_READABLE_POSITION)
        out.high_watermark = <int64_t> kd_get_le64(p + SLOT_HIGH_WATERMARK)
        out.last_stable_position = <int64_t> kd_get_le64(p + SLOT_LAST_STABLE_POSITION)
        out.last_stable_offset = <int64_t> kd_get_le64(p + SLOT_LAST_STABLE_OFFSET)
        out.leader_epoch = <int32_t> kd_get_le32(p + SLOT_LEADER_EPOCH)
        out.update_count = kd_get_le32(p + SLOT_UPDATE_COUNT)
        out.log_start_offset = <int64_t> kd_get_le64(p + SLOT_LOG_START_OFFSET)

    def get(self, int index):
        """Slot `index` as a dict, as of the last refresh."""
        cdef slot_t s
        if not 0 <= index < self.slot_count:
            raise IndexError(index)
        self.c_get(index, &s)
        return {
            "assigned": bool(s.flags & SLOT_FLAG_ASSIGNED), "sealed": bool(s.flags & SLOT_FLAG_SEALED), "revoked": bool(s.flags & SLOT_FLAG_REVOKED),
            "file_id": s.file_id, "segment_base_offset": s.segment_base_offset, "last_readable_position": s.last_readable_position,
            "high_watermark": s.high_watermark, "last_stable_position": s.last_stable_position, "last_stable_offset": s.last_stable_offset,
            "leader_epoch": s.leader_epoch, "update_count": s.update_count, "log_start_offset": s.log_start_offset,
        }


cdef class FileStream:
    """Bytes of one granted file, read in order, whole batches handed on and the rest kept.

    Life: `open` for each grant; `take_slot` moves the last readable position; `fill` READs;
    `decode`, or `window` and `consume`, hand bytes to a decoder.  The size of a READ starts at
    `min_read_bytes` (2 KiB, KafkaDirect §4.4.2), doubles while the stream lags, and halves when it
    has caught up; a batch whose header has arrived is fetched to its end at once.

    `new_buffer(bytes)` returns a region of registered local memory; the stream asks for a larger
    one while it lags, up to `buffer_bytes`, and beyond only for a single batch larger than that, up
    to `max_batch_bytes`.
    """

    def __init__(self, name, QueuePair qp, CompletionQueue cq, new_buffer, *, min_read_bytes=2048, max_read_bytes=1 << 20,
                 buffer_bytes=4 << 20, max_batch_bytes=64 << 20, in_place=True):
        self.name = name
        self._qp = qp
        self._cq = cq
        self._new_buffer = new_buffer
        self._min_read = min_read_bytes
        self._max_read = max(min_read_bytes, max_read_bytes)
        self._max_buffer = max(buffer_bytes, 2 * self._max_read)
        self._max_batch = max_batch_bytes
        self.read_size = self._min_read
        self.file_id = -1
        self._in_place = in_place

    def open(self, int file_id, int64_t address, int64_t rkey, int64_t length, int64_t position, int64_t limit, bint sealed):
        """Start on a granted file at `position`; bytes kept of the previous file are dropped."""
        if length < 0 or not 0 <= position <= limit <= length:
            raise ProtocolError(f"{self.name}: the broker granted positions {position} to {limit} of a file of {length} bytes",
                                hint="broker and client are of different versions")
        _check_key(self.name, address, rkey, length)
        self.file_id = file_id
        self._address = <uint64_t> address
        self._rkey = <uint32_t> rkey
        self.length = length
        self.position = position
        self.limit = self._committed = limit
        self.sealed = sealed
        self.outgrown = False
        self.revoked = False
        self._lo = self._hi = self._checked = 0
        self._segment = -1
        start_chain(&self._chain)
        self._let_go()
        if self._in_place and length > 0:
            self._view = self._qp.view(self._address, length, self._rkey)

    cdef _let_go(self):
        cdef RemoteView view = self._view
        self._view = None
        if view is not None:
            view.close()

    cdef const uint8_t* c_start(self) noexcept nogil:
        """Where the byte at `position` lies."""
        return self._view.data + self.position if self._view is not None else self._buffer.data + self._lo

    def set_offsets(self, int64_t high_watermark, int64_t last_stable_offset, int64_t log_start_offset, int leader_epoch):
        """What the grant said of the partition."""
        self.high_watermark = high_watermark
        self.last_stable_offset = last_stable_offset
        self.log_start_offset = log_start_offset
        self.leader_epoch = leader_epoch

    def expect(self, int64_t segment_base_offset, int64_t next_offset, int64_t dense_from, int64_t end_offset, int32_t least_epoch,
               int32_t greatest_epoch):
        """What the grant said of the batches from `position` on: the segment they are in, the base
        offset of the first one, from which offset on none is missing, the offset after the last
        one, and the bounds of their leader epochs."""
        if next_offset < 0 or segment_base_offset < 0 or end_offset < 0:
            raise ProtocolError(f"{self.name}: the broker granted a segment of base offset {segment_base_offset} from offset {next_offset}"
                                f" to {end_offset}", hint="broker and client are of different versions")
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
            p = self.c_start()
            code = follow_batches(&self._chain, p, n, <uint64_t> (self._committed - self.position), &whole, &info)
            self._checked = whole
            if code != CHAIN_OK and whole == 0:
                head = PyBytes_FromStringAndSize(<const char*> p, min(n, <uint64_t> BATCH_HEADER_BYTES))
                raise chain_error(code, &self._chain, &info, self._here(), head)
        return <int64_t> self._checked

    cdef chain_t* c_chain(self) noexcept nogil:
        """For a decoder that follows the log itself, batch by batch, from `position` on, so that
        each header is parsed once; NULL: use `c_whole`, which knows the rules of logs with gaps
        too, and the words for what is wrong."""
        return &self._chain if self._checked == 0 and is_dense(&self._chain) else NULL

    cdef void c_followed(self, uint64_t n) noexcept nogil:
        """A decoder with `c_chain` has consumed the first `n` unread bytes."""
        self._lo += n
        self.position += <int64_t> n
        if self._lo == self._hi:
            self._lo = self._hi = 0

    cpdef Py_ssize_t decode(self, ArrowDecoder decoder) except -1:
        """Feed `decoder` with the whole batches that were READ and continue the log; the bytes
        consumed, 0 when they or the room in the decoder are used up.  CorruptBatchError or
        UnsupportedFormatError: the first batch does not continue the log, or is broken."""
        cdef chain_t* chain = self.c_chain()
        cdef chain_t before = self._chain
        cdef uint64_t n = self._hi - self._lo
        cdef Py_ssize_t consumed
        if n == 0 or decoder.c_full():
            return 0
        try:
            if chain != NULL and decoder.check_crc:
                consumed = decoder.c_feed(self.c_start(), n, chain)
                if consumed:
                    self.c_followed(<uint64_t> consumed)
                    return consumed
        except FormatError as e:
            raise self.located(e) from e.__cause__
        except BaseException:           # no memory: what it took, which it will know again, is not consumed
            self._chain = before
            raise
        n = <uint64_t> self.c_whole()
        if n == 0:
            return 0
        try:
            consumed = decoder.c_feed(self.c_start(), n, NULL)
        except FormatError as e:
            raise self.located(e) from e.__cause__
        self.consume(<uint64_t> consumed)
        return consumed

    cdef object _here(self):
        where = f"position {self.position} of the segment that begins at offset {self._segment}"
        return f"{self.name} offset {self._chain.next_offset}, {where}" if self._checked == 0 else f"{self.name}, {where}"

    def located(self, error):
        """`error`, which a decoder raised for the batch at `position`, with the place of that batch
        in its message."""
        error.message = f"{error.message} (position {self.position} of the segment that begins at offset {self._segment})"
        return error

    def close(self):
        """Drop the buffer or the view; the stream may be opened again."""
        cdef batch_info info
        if self._checked:
            # What follows `position` is checked again when it is READ again.
            parse_batch_header(self.c_start(), self._checked, &info)
            self._chain.next_offset = info.base_offset
            self._chain.least_epoch = min(self._chain.least_epoch, info.leader_epoch)
            self._checked = 0
        self._let_go()
        if self._buffer is not None:
            self._buffer.deregister()
            self._buffer = None
        self._capacity = self._lo = self._hi = 0

    cpdef bint take_slot(self, SlotTable slots, int index, bint committed_only) except -1:
        """Take the news of slot `index` as of its last refresh; True if anything moved.  A slot
        that is not this file's any more sets `revoked`.  A refresh from before the grant is no
        news: see `SlotTable`."""
        cdef slot_t s
        cdef int64_t limit
        cdef bint moved
        slots.c_check(index)
        if not slots.c_is_news(index, 0):
            return False
        self._seen = slots._copy
        slots.c_get(index, &s)
        if not s.flags & SLOT_FLAG_ASSIGNED or s.file_id != self.file_id:
            self.revoked = True
            return True
        self.revoked = (s.flags & SLOT_FLAG_REVOKED) != 0
        moved = self.high_watermark != s.high_watermark or (s.flags & SLOT_FLAG_SEALED) != 0 or self.revoked
        self.high_watermark = s.high_watermark
        self.last_stable_offset = s.last_stable_offset
        self.log_start_offset = s.log_start_offset
        self.leader_epoch = s.leader_epoch
        self._chain.end_offset = s.last_stable_offset if committed_only else s.high_watermark
        self._chain.greatest_epoch = s.leader_epoch
        self.sealed = (s.flags & SLOT_FLAG_SEALED) != 0
        if self.length > 0:
            limit = s.last_stable_position if committed_only else s.last_readable_position
            self._committed = limit
            if limit > self.length:  # a head grows in place; what was granted of it ends where it ended then
                self.outgrown = True
                limit = self.length
            if limit < self.limit:
                raise ProtocolError(f"{self.name}: the last readable position moved from {self.limit} to {limit} in a file of {self.length} bytes",
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
        cdef MemoryRegion old = self._buffer
        cdef MemoryRegion new = self._new_buffer(capacity)
        if self._hi > self._lo:
            memcpy(new.data, old.data + self._lo, self._hi - self._lo)
        self._hi -= self._lo
        self._lo = 0
        self._buffer = new
        self._capacity = capacity
        if old is not None:
            old.deregister()

    cpdef int64_t fill(self) except -1:
        """READ as much as the read size, the buffer and the last readable position allow, and a
        second time when that brought the header of a batch and not its end.  Returns the bytes read
        (0: nothing to read or no room).  Raises QueuePairError when access has ended,
        CorruptBatchError for a batch larger than `max_batch_bytes`."""
        cdef int64_t n = self._fill_once()
        cdef batch_info info
        if n > 0 and self.limit > self.position + <int64_t> (self._hi - self._lo) and self._hi - self._lo >= BATCH_LENGTH_PREFIX_BYTES:
            parse_batch_header(self.c_start(), self._hi - self._lo, &info)
            if info.size > self._hi - self._lo:
                n += self._fill_once()
        return n

    cdef int64_t _fill_once(self) except -1:
        cdef int64_t unread = self.limit - (self.position + <int64_t> (self._hi - self._lo))
        cdef uint64_t want, room, kept, piece, need = 0
        cdef uint32_t status = 0
        cdef int rc
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
                raise CorruptBatchError(f"{self.name}: a record batch of {need} bytes at position {self.position}",
                                        hint=f"raise max.batch.bytes (now {self._max_batch}) if it is genuine")
        want = self.read_size
        if need > kept and need - kept > want:
            want = need - kept
        if want > <uint64_t> unread:
            want = <uint64_t> unread
        if self._view is not None:
            with nogil:
                rc = self._qp.c_read_in_place(self._view, self._address + <uint64_t> self.position + kept, <uint32_t> want)
            if rc != <int> WC_SUCCESS:
                _raise_read(READ_FAILED, <uint32_t> rc, f"READ of {self.name}")
            self._came(want, 1, unread)
            return <int64_t> want
        piece = want
        if want == self._max_read:      # lagging: several READs on their way at once, as far as the buffer may grow
            want = min(min(READS_AHEAD * piece, <uint64_t> unread), self._max_buffer - kept if self._max_buffer > kept + piece else piece)
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
        room = self._capacity - self._hi
        if want > room:
            want = room
        if want == 0:
            return 0
        with nogil:
            rc = c_read_pieces(self._qp, self._cq, self._buffer.address + self._hi, self._buffer.lkey, want, <uint32_t> piece,
                               self._address + <uint64_t> self.position + kept, self._rkey, &status)
        if rc != 0:
            _raise_read(rc, status, f"READ of {self.name}")
        self._came(want, (want + piece - 1) // piece, unread)
        return <int64_t> want

    cdef void _came(self, uint64_t want, uint64_t reads, int64_t unread) noexcept nogil:
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
        self._checked -= min(n, self._checked)
        self._lo += n
        self.position += <int64_t> n
        if self._lo == self._hi:
            self._lo = self._hi = 0

    def statistics(self):
        return {"reads": self.reads, "read_bytes": self.read_bytes, "read_size": self.read_size, "buffer_bytes": self._capacity}
