# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What was aborted in a granted file, by READs of its list (`kdirect.format.layout`).

Owns: which batches of a file a reader of committed records leaves out.  The list is READ when a
transactional batch comes that it may not tell of yet, so a topic without transactions costs no READ
at all, and one with them a READ of 16 bytes for each news of its slot.

Invariants:

- The last stable offset that bounds a READ of data was known before the list is READ; the broker
  has put every abort below it into the list before it told of that offset.  So after the READ every
  batch at hand can be judged, by its producer id and base offset alone.  Markers are not looked at.
- What arrives is checked before it is used: each guard, the file id, the order of markers, and that
  the count neither falls nor exceeds the room that was granted.  What is torn is READ again.
- A list that is full tells of what lies below the last stable offset of its last entry.  Beyond
  that the file is to be entered again (ASK), with a list from there.

Memory: one buffer of BUFFER_BYTES for all files of a channel, registered for local writes.  The
transport owns it during a READ, which the call waits for.  Entries are kept until they are passed.

There is no lock: see `kdirect.wire.channel`.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from posix.unistd cimport usleep

from kdirect.client.read_work cimport c_read, check_location, now_ns, raise_read
from kdirect.format.batch cimport (
    BATCH_OK, BATCH_TRUNCATED, batch_info, check_batch_crc, parse_batch_header)
from kdirect.format.layout cimport (
    ABORTED_COUNT, ABORTED_ENTRY_BYTES, ABORTED_ENTRY_FIRST_OFFSET, ABORTED_ENTRY_LAST_OFFSET,
    ABORTED_ENTRY_NUMBER, ABORTED_ENTRY_PRODUCER_ID, ABORTED_ENTRY_STABLE_OFFSET, ABORTED_FILE_ID,
    ABORTED_FLAG_FULL, ABORTED_FLAGS, ABORTED_HEAD_BYTES, ATTRIBUTE_CONTROL,
    ATTRIBUTE_TRANSACTIONAL)

from collections import deque

from kdirect.errors import ProtocolError

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const void* data, size_t n)

cdef enum:
    BUFFER_BYTES = 16384
    TORN_SLEEP_US = 20
    MOST_AT_ONCE = BUFFER_BYTES / ABORTED_ENTRY_BYTES

HINT = "broker and client are of different versions"


cdef inline uint32_t _u32(const uint8_t* p) noexcept nogil:
    return (<const uint32_t*> p)[0]


cdef inline int64_t _i64(const uint8_t* p) noexcept nogil:
    return (<const int64_t*> p)[0]


cdef class ListReads:
    """READs of lists over one channel, whose owner's thread uses it."""

    def __init__(self, channel, *, int torn_timeout_ms=10000):
        self._channel = channel
        self._qp = channel.qp
        self._cq = channel.send_cq
        self._torn_timeout_ns = torn_timeout_ms * <int64_t> 1000000

    cdef const uint8_t* c_bring(self, uint64_t address, uint32_t rkey, uint32_t length,
                                str what) except NULL:
        """READ `length` bytes, at most BUFFER_BYTES, which are valid until the next call."""
        cdef uint32_t status = 0
        cdef int rc
        if self._buffer is None:
            self._buffer = self._channel.local_memory(BUFFER_BYTES)
        with nogil:
            rc = c_read(self._qp, self._cq, self._buffer.address, self._buffer.lkey, length,
                        address, rkey, &status)
        if rc != 0:
            raise_read(rc, status, f"READ of what was aborted in {what}")
        self.reads += 1
        return self._buffer.data


cdef class AbortedReads:
    """What was aborted in one granted file; made for each grant.

    `name` is the partition's; `location` is (address, rkey, length) of the list; length 0: nothing
    was aborted.  `file_id`: what the list is to be of, which is 0 where the file changes no more.
    Reading begins at `position`.  ProtocolError for a list that cannot be."""

    def __init__(self, str name, ListReads reads, location, int file_id, int64_t position):
        cdef int64_t address, rkey, length
        address, rkey, length = location
        self.name = name
        self._reads = reads
        self._file_id = file_id
        self._kept_to = position
        self._ranges = {}
        self._last = -1
        self._known_to = INT64_MAX if length == 0 else -1
        if length == 0 and file_id == 0:
            return
        if length < ABORTED_HEAD_BYTES or length > (<int64_t> 1 << 31) or address & 7:
            raise ProtocolError(f"{name}: the broker granted a list of aborted transactions of "
                                f"{length} bytes at address {address}", hint=HINT)
        check_location(name, address, rkey, length)
        self._address = <uint64_t> address
        self._rkey = <uint32_t> rkey
        self._room = <uint32_t> ((length - ABORTED_HEAD_BYTES) // ABORTED_ENTRY_BYTES)

    cdef int c_judge(self, const uint8_t* p, uint64_t n, int64_t position, int64_t stable,
                     uint64_t* kept, batch_info* first) except -1:
        """Of the bytes p[0, n), at `position` of the file, which are below the last stable offset
        `stable`: KEEP, and how many from the start on are `kept`, whole batches but for what is
        broken or not whole (a decoder says so); SKIP, and the header of the `first` batch; or ASK.
        """
        cdef uint64_t at = 0
        cdef batch_info info
        cdef int code
        if self._known_to == INT64_MAX and not self._ranges:
            kept[0] = n
            return KEEP
        if self._kept_to > position:
            at = min(<uint64_t> (self._kept_to - position), n)
        while at < n:
            code = parse_batch_header(p + at, n - at, &info)
            if code != BATCH_OK or info.size > n - at:
                if at == 0 or code == BATCH_OK or code == BATCH_TRUNCATED:
                    kept[0] = n
                    return KEEP
                break
            if info.attributes & ATTRIBUTE_TRANSACTIONAL \
                    and not info.attributes & ATTRIBUTE_CONTROL:
                if info.base_offset >= self._known_to:
                    if at:
                        break           # what comes before it is handed out first
                    self._refresh(stable)
                    if info.base_offset >= self._known_to and info.base_offset < stable:
                        return ASK
                if self._was_aborted(&info) \
                        and check_batch_crc(p + at, n - at, &info) == BATCH_OK:
                    if at:
                        break
                    first[0] = info
                    return SKIP
            at += info.size
            self._kept_to = position + <int64_t> at
        kept[0] = at
        return KEEP

    cdef void c_skipped(self) noexcept:
        """The batch of which `c_judge` said SKIP was left out."""
        self._reads.skipped += 1

    cdef bint _was_aborted(self, const batch_info* info) except -1:
        ranges = self._ranges.get(info.producer_id)
        if ranges is None:
            return False
        offset = info.base_offset
        while ranges and ranges[0][1] < offset:     # this one is read to its end
            ranges.popleft()
        if not ranges:
            del self._ranges[info.producer_id]
            return False
        return ranges[0][0] <= offset

    cdef int _refresh(self, int64_t stable) except -1:
        """READ what is new in the list, at a time when `stable` was known."""
        cdef const uint8_t* p
        cdef uint32_t count, flags, number, n, i
        cdef int64_t deadline = 0
        while True:
            p = self._reads.c_bring(self._address, self._rkey, ABORTED_HEAD_BYTES, self.name)
            if _u32(p) == kd_crc32c(0, p + ABORTED_COUNT, ABORTED_HEAD_BYTES - ABORTED_COUNT):
                break
            deadline = self._torn(deadline)
        count = _u32(p + ABORTED_COUNT)
        flags = (<const uint16_t*> (p + ABORTED_FLAGS))[0]
        if (<const uint16_t*> (p + ABORTED_FILE_ID))[0] != self._file_id \
                or count < self._count or count > self._room:
            raise ProtocolError(
                f"{self.name}: the list of aborted transactions says that it has {count} entries, "
                f"after {self._count} of at most {self._room}", hint=HINT)
        number = self._count
        while number < count:
            n = min(count - number, <uint32_t> MOST_AT_ONCE)
            p = self._reads.c_bring(
                self._address + ABORTED_HEAD_BYTES + <uint64_t> number * ABORTED_ENTRY_BYTES,
                self._rkey, n * ABORTED_ENTRY_BYTES, self.name)
            for i in range(n):
                if not self._take(p + i * ABORTED_ENTRY_BYTES, number):
                    break
                number += 1
                self._count = number
                deadline = 0
            else:
                continue
            deadline = self._torn(deadline)
        self._known_to = min(stable, self._stable) if flags & ABORTED_FLAG_FULL else stable
        return 0

    def _torn(self, int64_t deadline):
        """What was READ does not match its guard: when to stop trying."""
        self._reads.torn += 1
        with nogil:
            usleep(TORN_SLEEP_US)
        if deadline == 0:
            return now_ns() + self._reads._torn_timeout_ns
        if now_ns() > deadline:
            raise ProtocolError(
                f"{self.name}: the list of aborted transactions did not match its guard for"
                f" {self._reads._torn_timeout_ns // 1000000} ms",
                hint="the broker was stopped in the middle of an update, or is of another version")
        return deadline

    cdef int _take(self, const uint8_t* p, uint32_t number) except -1:
        """Take entry `number`; 0: it is torn."""
        cdef int64_t producer_id, first, last
        if _u32(p) != kd_crc32c(0, p + ABORTED_ENTRY_NUMBER,
                                ABORTED_ENTRY_BYTES - ABORTED_ENTRY_NUMBER) \
                or _u32(p + ABORTED_ENTRY_NUMBER) != number:
            return 0
        producer_id = _i64(p + ABORTED_ENTRY_PRODUCER_ID)
        first = _i64(p + ABORTED_ENTRY_FIRST_OFFSET)
        last = _i64(p + ABORTED_ENTRY_LAST_OFFSET)
        if first < 0 or last <= first or last <= self._last:
            raise ProtocolError(
                f"{self.name}: entry {number} of the list of aborted transactions says offsets "
                f"{first} to {last}, after a marker at {self._last}", hint=HINT)
        self._last = last
        self._stable = _i64(p + ABORTED_ENTRY_STABLE_OFFSET)
        ranges = self._ranges.get(producer_id)
        if ranges is None:
            ranges = self._ranges[producer_id] = deque()
        ranges.append((first, last))
        return 1
