# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Compaction of batches: which keys a section of a log has, and which records of a log are kept.

Law of the room: it reads mapped bytes of sealed segments and fills memory of its own; no file, no
lock, no clock.  Nothing outside the bytes given is read, whatever they say, and CorruptLogError
ends a run at a batch whose frame, CRC or records are wrong: what is damaged must get no new CRC.

Kafka's Cleaner decides the same (LogCleaner.scala, MemoryRecords.filterTo):

- A record is kept if it lies above the section whose keys were noted, or if it is the last one of
  its key there; one without a key goes.
- A tombstone (a null value) that is the last of its key gets its batch a *delete horizon*
  (KIP-534): the time from which on it goes, too, in place of the base timestamp of the batch.
- A batch of which nothing is left stays as an empty one if it is the last of a producer, for the
  sake of its sequence number, or the last of the section, for the sake of its offset.
- Offsets stay what they are: a batch keeps its first and its last offset.

Plain batches outside transactions are worked on without the GIL.  At any other a run stops and asks
(`ASKS`): the caller decompresses the records, says whether the batch is one of an aborted
transaction, and lets it be noted or kept alone.
"""

from libc.stdint cimport (
    INT32_MAX, INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t)
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_FromStringAndSize

from kdirect.format.batch cimport (
    BATCH_OK, batch_info, check_batch_crc, offsets_are_possible, parse_batch_header)
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_DELETE_HORIZON, ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_TRANSACTIONAL, BATCH_ATTRIBUTES, BATCH_BASE_OFFSET, BATCH_BASE_SEQUENCE,
    BATCH_BASE_TIMESTAMP, BATCH_CRC, BATCH_HEADER_BYTES, BATCH_LAST_OFFSET_DELTA,
    BATCH_LEADER_EPOCH, BATCH_LENGTH, BATCH_LENGTH_PREFIX_BYTES, BATCH_MAGIC, BATCH_MAGIC_V2,
    BATCH_MAX_TIMESTAMP, BATCH_PRODUCER_EPOCH, BATCH_PRODUCER_ID, BATCH_RECORDS_COUNT)
from kdirect.format.records cimport parse_record, record_view
from kdirect.format.wire cimport (
    kd_get_varint, kd_put16, kd_put32, kd_put64, kd_put_varint, kd_varint_size)
from kdirect.log.key_offsets cimport KeyOffsets

from typing import NamedTuple

from kdirect.errors import CorruptLogError

cdef extern from "crc32c.h" nogil:
    uint32_t kd_crc32c(uint32_t crc, const uint8_t* data, size_t n)

cdef enum:
    SECTION_END = 0
    SECTION_ASKS = 1
    SECTION_FULL = 2
    SECTION_DAMAGED = 3
    SECTION_NO_MEMORY = 4
    RECORD_GROWTH = 16         # a record whose timestamp is written again grows by less

AT_END = SECTION_END
ASKS = SECTION_ASKS
IS_FULL = SECTION_FULL


class BatchHead(NamedTuple):
    """What a batch says of itself.  `delete_horizon_ms` is -1 where it has none."""

    size: int
    base_offset: int
    last_offset: int
    attributes: int
    producer_id: int
    producer_epoch: int
    delete_horizon_ms: int
    records_count: int

    @property
    def codec(self):
        return self.attributes & ATTRIBUTE_CODEC_MASK

    @property
    def is_control(self):
        return bool(self.attributes & ATTRIBUTE_CONTROL)

    @property
    def is_transactional(self):
        return bool(self.attributes & ATTRIBUTE_TRANSACTIONAL)


cdef struct last_of_producer:
    int64_t producer_id
    int64_t last_offset        # of its records; -1: none is known, and its last marker counts
    int16_t epoch


cdef struct verdict:           # of the records of one batch
    int32_t read
    int32_t kept
    int32_t keyless
    bint tombstones
    int64_t first_timestamp    # of what is kept
    int64_t max_timestamp


cdef inline int64_t _horizon(const batch_info* b) noexcept nogil:
    return b.base_timestamp if b.attributes & ATTRIBUTE_DELETE_HORIZON else -1


cdef inline int64_t _last_offset(const batch_info* b) noexcept nogil:
    return b.base_offset + b.last_offset_delta


cdef void _put_header(uint8_t* p, size_t size, const batch_info* b, int attributes, int32_t count,
                      int64_t base_timestamp, int64_t max_timestamp) noexcept nogil:
    """The 61 bytes before the records of a batch that stands for batch `b`."""
    kd_put64(p + BATCH_BASE_OFFSET, <uint64_t> b.base_offset)
    kd_put32(p + BATCH_LENGTH, <uint32_t> (size - BATCH_LENGTH_PREFIX_BYTES))
    kd_put32(p + BATCH_LEADER_EPOCH, <uint32_t> b.leader_epoch)
    p[BATCH_MAGIC] = BATCH_MAGIC_V2
    kd_put16(p + BATCH_ATTRIBUTES, attributes)
    kd_put32(p + BATCH_LAST_OFFSET_DELTA, <uint32_t> b.last_offset_delta)
    kd_put64(p + BATCH_BASE_TIMESTAMP, <uint64_t> base_timestamp)
    kd_put64(p + BATCH_MAX_TIMESTAMP, <uint64_t> max_timestamp)
    kd_put64(p + BATCH_PRODUCER_ID, <uint64_t> b.producer_id)
    kd_put16(p + BATCH_PRODUCER_EPOCH, b.producer_epoch)
    kd_put32(p + BATCH_BASE_SEQUENCE, <uint32_t> b.base_sequence)
    kd_put32(p + BATCH_RECORDS_COUNT, <uint32_t> count)
    kd_put32(p + BATCH_CRC, kd_crc32c(0, p + BATCH_ATTRIBUTES, size - BATCH_ATTRIBUTES))


cdef class CleanRun:
    """One cleaning of one log: first `note_keys` over the section, then `keep` over all segments up
    to its end, whose output the caller takes (`take`) and writes.

    `producers`: (id, offset of the last record or -1, epoch) of those that are still known.
    `upper_bound` is the offset after the last one that may be cleaned.  `piece_bytes`: `keep` stops
    when its output has so many bytes.  One thread at a time."""

    cdef KeyOffsets keys
    cdef int64_t now_ms
    cdef int64_t delete_retention_ms
    cdef int64_t upper_bound
    cdef last_of_producer* producers
    cdef size_t producers_count
    cdef uint8_t* out
    cdef size_t used
    cdef size_t capacity
    cdef size_t piece_bytes
    cdef uint8_t* kept
    cdef size_t kept_capacity
    cdef batch_info pending            # of a batch whose records the caller compresses
    cdef int pending_attributes
    cdef int32_t pending_count
    cdef int64_t pending_base_timestamp
    cdef int64_t pending_max_timestamp
    cdef readonly int64_t records_read
    cdef readonly int64_t records_kept
    cdef readonly int64_t bytes_read
    cdef readonly int64_t keyless

    def __cinit__(self, KeyOffsets keys not None, *, int64_t now_ms, int64_t delete_retention_ms,
                  int64_t upper_bound, producers, size_t piece_bytes):
        cdef size_t i
        self.keys = keys
        self.now_ms = now_ms
        self.delete_retention_ms = delete_retention_ms
        self.upper_bound = upper_bound
        self.piece_bytes = piece_bytes
        known = sorted(producers)
        self.producers = <last_of_producer*> malloc((len(known) + 1) * sizeof(last_of_producer))
        if self.producers == NULL:
            raise MemoryError()
        for producer_id, last_offset, epoch in known:
            i = self.producers_count
            self.producers[i].producer_id = producer_id
            self.producers[i].last_offset = last_offset
            self.producers[i].epoch = epoch
            self.producers_count += 1

    def __dealloc__(self):
        free(self.producers)
        free(self.out)
        free(self.kept)

    # what a batch says

    cdef int _parse(self, const uint8_t* p, uint64_t n, batch_info* b) noexcept nogil:
        """The batch at `p`, whole and sound, in `b`: SECTION_END or SECTION_DAMAGED."""
        if check_batch_crc(p, n, b) != BATCH_OK or not offsets_are_possible(b):
            return SECTION_DAMAGED
        if b.records_count < 0 or b.records_count > <int64_t> b.last_offset_delta + 1:
            return SECTION_DAMAGED
        return SECTION_END

    cdef _damaged(self, uint64_t position):
        return CorruptLogError(
            f"the record batch at position {position} of a segment that is being compacted is"
            " damaged", hint="restore the segment from a good copy; it is not compacted until then")

    def head(self, uint64_t address, uint64_t position, uint64_t size):
        """What the batch at `position` of a segment of `size` bytes says.  CorruptLogError."""
        cdef batch_info b
        cdef int code
        with nogil:
            code = self._parse(<const uint8_t*> <uintptr_t> address + position, size - position, &b)
        if code != SECTION_END:
            raise self._damaged(position)
        return BatchHead(b.size, b.base_offset, _last_offset(&b), b.attributes, b.producer_id,
                         b.producer_epoch, _horizon(&b), b.records_count)

    def first_key(self, uint64_t address, uint64_t position, uint64_t size):
        """The key of the first record of the plain batch at `position`; None where it has no
        record, or no key.  CorruptLogError."""
        cdef const uint8_t* p = <const uint8_t*> <uintptr_t> address + position
        cdef batch_info b
        cdef record_view r
        cdef int error
        if self._parse(p, size - position, &b) != SECTION_END:
            raise self._damaged(position)
        if b.records_count == 0:
            return None
        if parse_record(p + BATCH_HEADER_BYTES, p + b.size, &r, &error) == NULL:
            raise self._damaged(position)
        return PyBytes_FromStringAndSize(<char*> r.key, r.key_length) if r.key_length >= 0 else None

    # the keys of a section

    cdef int _note(self, const batch_info* b, const uint8_t* p, const uint8_t* end,
                   int64_t start_offset) noexcept nogil:
        """Note the keys of a batch's records, which lie in [p, end)."""
        cdef record_view r
        cdef int32_t i
        cdef int error
        cdef int64_t offset
        for i in range(b.records_count):
            p = parse_record(p, end, &r, &error)
            if p == NULL or r.offset_delta < 0 or r.offset_delta > b.last_offset_delta:
                return SECTION_DAMAGED
            offset = b.base_offset + r.offset_delta
            if r.key_length >= 0 and offset >= start_offset:
                if not self.keys.note(r.key, r.key_length, offset):
                    return SECTION_FULL
        if p != end:
            return SECTION_DAMAGED
        if _last_offset(b) >= start_offset:
            self.keys.reach(_last_offset(b))
        return SECTION_END

    def note_keys(self, uint64_t address, uint64_t position, uint64_t size, int64_t start_offset):
        """Note keys of records from `start_offset` on, in the batches of [position, size), of
        `piece_bytes` at once: (the position after the last one, why it ends there).  IS_FULL: the
        table is; the batch there is noted in part.  CorruptLogError."""
        cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
        cdef batch_info b
        cdef int code = SECTION_END
        cdef uint64_t start = position
        with nogil:
            while position < size and position - start < self.piece_bytes:
                code = self._parse(data + position, size - position, &b)
                if code != SECTION_END:
                    break
                if b.attributes & (ATTRIBUTE_CODEC_MASK | ATTRIBUTE_CONTROL
                                   | ATTRIBUTE_TRANSACTIONAL):
                    code = SECTION_ASKS
                    break
                code = self._note(&b, data + position + BATCH_HEADER_BYTES,
                                  data + position + b.size, start_offset)
                if code != SECTION_END:
                    break
                position += b.size
        if code == SECTION_DAMAGED:
            raise self._damaged(position)
        return position, code

    def note_batch(self, uint64_t address, uint64_t position, uint64_t size, int64_t start_offset,
                   bytes plain):
        """The same of the one batch at `position`, whose records are `plain` if it is compressed;
        False: the table is full.  CorruptLogError."""
        cdef const uint8_t* p = <const uint8_t*> <uintptr_t> address + position
        cdef const uint8_t* records = p + BATCH_HEADER_BYTES
        cdef const uint8_t* end
        cdef batch_info b
        cdef int code = self._parse(p, size - position, &b)
        if code == SECTION_END:
            end = p + b.size
            if plain is not None:
                records = <const uint8_t*> plain
                end = records + len(plain)
            code = self._note(&b, records, end, start_offset)
        if code == SECTION_DAMAGED:
            raise self._damaged(position)
        return code != SECTION_FULL

    # what is kept

    cdef int _room(self, size_t more) noexcept nogil:
        cdef size_t wanted = self.used + more
        cdef uint8_t* grown
        if wanted <= self.capacity:
            return SECTION_END
        wanted = max(wanted, self.capacity * 2)
        grown = <uint8_t*> realloc(self.out, wanted)
        if grown == NULL:
            return SECTION_NO_MEMORY
        self.out = grown
        self.capacity = wanted
        return SECTION_END

    cdef int _flags(self, int32_t count) noexcept nogil:
        cdef uint8_t* grown
        if <size_t> count > self.kept_capacity:
            grown = <uint8_t*> realloc(self.kept, <size_t> count)
            if grown == NULL:
                return SECTION_NO_MEMORY
            self.kept = grown
            self.kept_capacity = <size_t> count
        return SECTION_END

    cdef bint _is_last_of_producer(self, const batch_info* b) noexcept nogil:
        cdef size_t low = 0, high = self.producers_count, middle
        if b.producer_id < 0:
            return False
        while low < high:
            middle = (low + high) // 2
            if self.producers[middle].producer_id < b.producer_id:
                low = middle + 1
            else:
                high = middle
        if low == self.producers_count or self.producers[low].producer_id != b.producer_id:
            return False
        if self.producers[low].last_offset >= 0:
            return _last_offset(b) == self.producers[low].last_offset
        return ((b.attributes & ATTRIBUTE_CONTROL) != 0
                and b.producer_epoch == self.producers[low].epoch)

    cdef bint _is_kept(self, const batch_info* b, const record_view* r, int64_t offset,
                       verdict* v) noexcept nogil:
        if offset > self.keys.latest_offset:
            return True
        if r.key_length < 0:
            v.keyless += 1
            return False
        if offset < self.keys.find(r.key, r.key_length):
            return False
        return r.value_length >= 0 or _horizon(b) < 0 or self.now_ms < _horizon(b)

    cdef inline int64_t _timestamp(self, const batch_info* b, const record_view* r) noexcept nogil:
        if b.attributes & ATTRIBUTE_LOG_APPEND_TIME:
            return b.max_timestamp
        return <int64_t> (<uint64_t> b.base_timestamp + <uint64_t> r.timestamp_delta)

    cdef int _judge(self, const batch_info* b, const uint8_t* p, const uint8_t* end, bint all_kept,
                    verdict* v) noexcept nogil:
        """Which records stay, in `kept`."""
        cdef record_view r
        cdef int32_t i
        cdef int error
        cdef int64_t timestamp
        v.read = v.kept = v.keyless = 0
        v.tombstones = False
        v.first_timestamp = v.max_timestamp = -1
        if b.records_count > end - p:
            return SECTION_DAMAGED
        if self._flags(b.records_count) != SECTION_END:
            return SECTION_NO_MEMORY
        for i in range(b.records_count):
            p = parse_record(p, end, &r, &error)
            if p == NULL or r.offset_delta < 0 or r.offset_delta > b.last_offset_delta:
                return SECTION_DAMAGED
            self.kept[i] = all_kept or self._is_kept(b, &r, b.base_offset + r.offset_delta, v)
            if self.kept[i]:
                timestamp = self._timestamp(b, &r)
                if v.kept == 0:
                    v.first_timestamp = timestamp
                if timestamp > v.max_timestamp:
                    v.max_timestamp = timestamp
                if r.value_length < 0:
                    v.tombstones = True
                v.kept += 1
        v.read = b.records_count
        return SECTION_END if p == end else SECTION_DAMAGED

    cdef int _put_records(self, const batch_info* b, const uint8_t* p, const uint8_t* end,
                          int64_t base_timestamp) noexcept nogil:
        """Write the records that stay after what is written, with timestamps that count from
        `base_timestamp`."""
        cdef record_view r
        cdef const uint8_t* start
        cdef const uint8_t* rest
        cdef uint8_t* out
        cdef uint8_t attributes
        cdef int32_t i
        cdef int error
        cdef int64_t ignored, delta
        cdef size_t length
        if self._room(<size_t> (end - p) + <size_t> b.records_count * RECORD_GROWTH) != SECTION_END:
            return SECTION_NO_MEMORY
        out = self.out + self.used
        for i in range(b.records_count):
            start = p
            p = parse_record(p, end, &r, &error)
            if p == NULL:
                return SECTION_DAMAGED
            if not self.kept[i]:
                continue
            rest = kd_get_varint(start, end, &ignored)
            attributes = rest[0]
            rest = kd_get_varint(rest + 1, end, &ignored)
            delta = <int64_t> (<uint64_t> self._timestamp(b, &r) - <uint64_t> base_timestamp)
            length = 1 + <size_t> kd_varint_size(delta) + <size_t> (r.end - rest)
            out = kd_put_varint(out, <int64_t> length)
            out[0] = attributes
            out = kd_put_varint(out + 1, delta)
            memcpy(out, rest, <size_t> (r.end - rest))
            out += r.end - rest
        self.used = <size_t> (out - self.out)
        return SECTION_END

    cdef int _put_empty(self, const batch_info* b) noexcept nogil:
        """A batch without records; Kafka's DefaultRecordBatch.writeEmptyHeader."""
        cdef int attributes = b.attributes & (ATTRIBUTE_LOG_APPEND_TIME | ATTRIBUTE_TRANSACTIONAL
                                              | ATTRIBUTE_CONTROL)
        if self._room(BATCH_HEADER_BYTES) != SECTION_END:
            return SECTION_NO_MEMORY
        _put_header(self.out + self.used, BATCH_HEADER_BYTES, b, attributes, 0, -1, b.max_timestamp)
        self.used += BATCH_HEADER_BYTES
        return SECTION_END

    cdef int _keep_one(self, const uint8_t* p, const batch_info* b, const uint8_t* records,
                       const uint8_t* end, bint discard, bint marker_of_none,
                       bint* compress) noexcept nogil:
        """Write what is left of a batch, whose records lie in [records, end).  `compress`: they are
        written plain, from `used` on, and their header waits in `pending`."""
        cdef verdict v
        cdef int code
        cdef bint control = (b.attributes & ATTRIBUTE_CONTROL) != 0
        cdef bint stays = self._is_last_of_producer(b) or _last_offset(b) + 1 == self.upper_bound
        cdef bint stamps
        cdef int64_t horizon = _horizon(b)
        compress[0] = False
        if discard:
            self.records_read += b.records_count
            return self._put_empty(b) if stays else SECTION_END
        code = self._judge(b, records, end, control, &v)
        if code != SECTION_END:
            return code
        self.records_read += v.read
        self.records_kept += v.kept
        self.keyless += v.keyless
        if v.kept == 0:
            return self._put_empty(b) if stays else SECTION_END
        stamps = (v.tombstones or marker_of_none) and horizon < 0
        if v.kept == b.records_count and not stamps:
            if self._room(b.size) != SECTION_END:
                return SECTION_NO_MEMORY
            memcpy(self.out + self.used, p, b.size)
            self.used += b.size
            return SECTION_END
        self.pending = b[0]
        self.pending_attributes = b.attributes & ~ATTRIBUTE_DELETE_HORIZON
        self.pending_base_timestamp = v.first_timestamp
        if stamps:
            horizon = self.now_ms + min(self.delete_retention_ms, INT64_MAX - self.now_ms)
        if horizon >= 0:
            self.pending_attributes |= ATTRIBUTE_DELETE_HORIZON
            self.pending_base_timestamp = horizon
        self.pending_count = v.kept
        self.pending_max_timestamp = v.max_timestamp
        if b.attributes & ATTRIBUTE_LOG_APPEND_TIME:
            self.pending_max_timestamp = b.max_timestamp
        if b.attributes & ATTRIBUTE_CODEC_MASK:
            compress[0] = True
            return self._put_records(b, records, end, self.pending_base_timestamp)
        return self._put_rebuilt(b, records, end)

    cdef int _put_rebuilt(self, const batch_info* b, const uint8_t* records,
                          const uint8_t* end) noexcept nogil:
        cdef size_t start = self.used
        cdef int code
        if self._room(BATCH_HEADER_BYTES) != SECTION_END:
            return SECTION_NO_MEMORY
        self.used += BATCH_HEADER_BYTES
        code = self._put_records(b, records, end, self.pending_base_timestamp)
        if code != SECTION_END or self.used - start > INT32_MAX:
            self.used = start
            return code if code != SECTION_END else SECTION_DAMAGED
        self._finish(start)
        return SECTION_END

    cdef void _finish(self, size_t start) noexcept nogil:
        _put_header(self.out + start, self.used - start, &self.pending, self.pending_attributes,
                    self.pending_count, self.pending_base_timestamp, self.pending_max_timestamp)

    def keep(self, uint64_t address, uint64_t position, uint64_t size):
        """Write what is left of the batches of [position, size), of `piece_bytes` at once: (the
        position after the last one, why it ends there).  IS_FULL: there are `piece_bytes` to be
        taken.  CorruptLogError."""
        cdef const uint8_t* data = <const uint8_t*> <uintptr_t> address
        cdef batch_info b
        cdef bint compress
        cdef int code = SECTION_END
        cdef uint64_t start = position
        with nogil:
            while position < size and position - start < self.piece_bytes:
                if self.used >= self.piece_bytes:
                    code = SECTION_FULL
                    break
                code = self._parse(data + position, size - position, &b)
                if code != SECTION_END:
                    break
                if b.attributes & (ATTRIBUTE_CODEC_MASK | ATTRIBUTE_CONTROL
                                   | ATTRIBUTE_TRANSACTIONAL):
                    code = SECTION_ASKS
                    break
                code = self._keep_one(data + position, &b, data + position + BATCH_HEADER_BYTES,
                                      data + position + b.size, False, False, &compress)
                if code != SECTION_END:
                    break
                position += b.size
        self.bytes_read += position - start
        self._check(code, position)
        return position, code

    cdef _check(self, int code, uint64_t position):
        if code == SECTION_DAMAGED:
            raise self._damaged(position)
        if code == SECTION_NO_MEMORY:
            raise MemoryError()

    def keep_batch(self, uint64_t address, uint64_t position, uint64_t size, bytes plain, *,
                   bint discard, bint marker_of_none):
        """The same of the one batch at `position`, whose records are `plain` if it is compressed.
        `discard`: none of its records stays.  `marker_of_none`: it is the marker of a transaction
        of which no record is left.  None; or the records that stay, which the caller compresses
        and hands to `put_compressed`.  CorruptLogError."""
        cdef const uint8_t* p = <const uint8_t*> <uintptr_t> address + position
        cdef const uint8_t* records = p + BATCH_HEADER_BYTES
        cdef const uint8_t* end
        cdef batch_info b
        cdef bint compress = False
        cdef size_t before = self.used
        cdef int code = self._parse(p, size - position, &b)
        if code == SECTION_END:
            end = p + b.size
            if plain is not None:
                records = <const uint8_t*> plain
                end = records + len(plain)
            code = self._keep_one(p, &b, records, end, discard, marker_of_none, &compress)
            self.bytes_read += b.size
        self._check(code, position)
        if not compress:
            return None
        out = PyBytes_FromStringAndSize(<char*> self.out + before, self.used - before)
        self.used = before
        return out

    def put_compressed(self, bytes records not None):
        """Write the batch that `keep_batch` has asked to be compressed."""
        cdef size_t start = self.used
        if len(records) > INT32_MAX - BATCH_HEADER_BYTES:
            raise CorruptLogError("a batch grew beyond what a batch may have",
                                  hint="compress it with another codec")
        if self._room(BATCH_HEADER_BYTES + len(records)) != SECTION_END:
            raise MemoryError()
        memcpy(self.out + start + BATCH_HEADER_BYTES, <const uint8_t*> records, len(records))
        self.used += BATCH_HEADER_BYTES + len(records)
        self._finish(start)

    def take(self):
        """What was written since the last call."""
        out = PyBytes_FromStringAndSize(<char*> self.out, self.used)
        self.used = 0
        return out


# -- produced records ------------------------------------------------------------------------------

cdef enum:
    KEYS_ARE_THERE = 0
    KEYS_ARE_MISSING = 1       # or the records are damaged
    KEYS_ARE_COMPRESSED = 2

ALL_KEYED = KEYS_ARE_THERE
NOT_KEYED = KEYS_ARE_MISSING
COMPRESSED = KEYS_ARE_COMPRESSED


cdef int _look_for_keys(int32_t count, const uint8_t* p, const uint8_t* end) noexcept nogil:
    cdef record_view r
    cdef int32_t i
    cdef int error
    for i in range(count):
        p = parse_record(p, end, &r, &error)
        # Produced batches have no gaps.
        if p == NULL or r.key_length < 0 or not 0 <= r.offset_delta < count:
            return KEYS_ARE_MISSING
    return KEYS_ARE_THERE if p == end else KEYS_ARE_MISSING


def look_for_keys(const uint8_t[::1] data):
    """Has each record of whole batches a key, as a compacted topic asks?  ALL_KEYED, NOT_KEYED,
    also where a record is damaged; COMPRESSED where that cannot be seen (`records_are_keyed`).
    What is no whole batch is left to whoever appends it."""
    cdef batch_info b
    cdef size_t at = 0, n = data.shape[0]
    cdef int code = KEYS_ARE_THERE
    with nogil:
        while at < n and code == KEYS_ARE_THERE:
            if parse_batch_header(&data[at], n - at, &b) != BATCH_OK or b.size > n - at:
                break
            if b.attributes & ATTRIBUTE_CODEC_MASK:
                code = KEYS_ARE_COMPRESSED
            elif not b.attributes & ATTRIBUTE_CONTROL:
                code = _look_for_keys(b.records_count, &data[at] + BATCH_HEADER_BYTES,
                                      &data[at] + b.size)
            at += b.size
    return code


def records_are_whole(const uint8_t[::1] plain, int32_t count):
    """Are these the decompressed records of a batch as producers make them: `count` of them, whole,
    with offsets that follow each other?"""
    cdef const uint8_t* p = &plain[0] if plain.shape[0] else NULL
    cdef const uint8_t* end
    cdef record_view r
    cdef int32_t i
    cdef int error
    if p == NULL or count < 1:
        return False
    end = p + plain.shape[0]
    with nogil:
        for i in range(count):
            p = parse_record(p, end, &r, &error)
            if p == NULL or r.offset_delta != i:
                break
    return p == end and r.offset_delta == count - 1


def records_are_keyed(const uint8_t[::1] plain, int32_t count):
    """The same of the records of one batch, decompressed."""
    cdef const uint8_t* p = &plain[0] if plain.shape[0] else NULL
    return p != NULL and _look_for_keys(count, p, p + plain.shape[0]) == KEYS_ARE_THERE


def keyless_records(const uint8_t[::1] plain, int32_t count, int32_t most):
    """Which records of one batch, which are not compressed, have no key: their numbers in it, at
    most so many; none from a damaged record on."""
    cdef const uint8_t* p = &plain[0] if plain.shape[0] else NULL
    cdef const uint8_t* end = p + plain.shape[0]
    cdef record_view r
    cdef int32_t i
    cdef int error
    out = []
    for i in range(count):
        if p == NULL or len(out) == most:
            break
        p = parse_record(p, end, &r, &error)
        if p != NULL and r.key_length < 0:
            out.append(i)
    return out
