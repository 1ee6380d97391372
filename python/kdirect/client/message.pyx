# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Records as objects, one at a time: what `Consumer.poll` returns and delivery reports carry.

Owns: `Message`, and `MessageQueue`, which turns whole record batches into messages.  No I/O, no
policy.

Invariants:

- A queue holds batches of one partition, and its own copy of them: the READ buffer that they came
  from is free as soon as `load` returns.  A queue of views holds the owner of these bytes in place
  of a copy, and so do the values of its messages.  Others may change the bytes then, so records are
  parsed once, by `load`: what `pop` uses of them are places that were checked.
- `load` checks frame, CRC and every record before it accepts a batch.  A message is made only when
  it is asked for, and that cannot fail.
- Whole batches before a broken one are accepted; the broken one raises an error once it is the
  first.

One thread at a time.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromObject
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc

from kdirect.errors import CorruptBatchError, FormatError

from kdirect.format.batch cimport (
    BATCH_OK, BATCH_TRUNCATED, batch_info, check_batch_crc, parse_batch_header)
from kdirect.format.chain cimport chain_t, continues_dense, move_dense
from kdirect.format.codec import decode_records
from kdirect.format.compression cimport Decompressor
from kdirect.format.layout cimport (
    ATTRIBUTE_CODEC_MASK, ATTRIBUTE_CONTROL, ATTRIBUTE_LOG_APPEND_TIME, BATCH_HEADER_BYTES,
    BATCH_RECORDS, CODEC_NONE, CODEC_ZSTD)
from kdirect.format.records cimport RECORD_MIN_BYTES, parse_header, parse_record, record_view

cdef enum:
    # Bytes copied and checked at a time, unless the first batch is larger: the bound of what one
    # poll costs.
    RUN_BYTES = 64 << 10
    # Bytes decompressed at a time, unless the first batch is larger: a few compressed bytes may
    # become very many.
    RUN_PLAIN_BYTES = 16 << 20
    # A value of so many bytes is copied by a queue of views, too: to share it would take longer.
    SHORT_VALUE_BYTES = 64
    NO_TIMESTAMP = -1


@cython.final
@cython.freelist(256)
cdef class Shown:
    """Bytes that an owner keeps, for memoryviews of them."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*> self.p, self.length, 1, flags)


cdef Shown shown(object owner, const uint8_t* p, Py_ssize_t length):
    cdef Shown out = Shown.__new__(Shown)
    out.owner = owner
    out.p = p
    out.length = length
    return out


@cython.final
@cython.freelist(256)
cdef class Message:
    """One record, or the report on one.  Accessors are methods, as confluent-kafka's.  `value()` is
    bytes; of a consumer of views, a memoryview.

    `timestamp()` is (type, ms since 1970): type 0 CreateTime, 1 LogAppendTime, -1 none.
    `headers()` is a list of (str, bytes or None), or None.  `error()` is None but in a delivery
    report of a record that was not delivered.  ``len(message)`` is that of its value.
    """

    def __init__(self, str topic=None, value=None, key=None, partition=-1, offset=-1,
                 timestamp=(NO_TIMESTAMP, -1), headers=None, error=None, leader_epoch=-1):
        self._topic = topic
        self._value = value
        self._key = key
        self._partition = partition
        self._offset = offset
        self._timestamp_type, self._timestamp = timestamp
        self._headers = list(headers) if headers else None
        self._error = error
        self._leader_epoch = leader_epoch

    def topic(self):
        return self._topic

    def partition(self):
        return self._partition

    def offset(self):
        """-1 where it is not known: the record was not delivered, acks=0, or it was sent again
        after more than five batches whose acknowledgements were lost."""
        return self._offset

    def key(self):
        return self._key

    def value(self):
        return self._value

    def headers(self):
        return self._headers

    def timestamp(self):
        return self._timestamp_type, self._timestamp

    def error(self):
        return self._error

    def leader_epoch(self):
        return None if self._leader_epoch < 0 else self._leader_epoch

    def __len__(self):
        return len(self._value) if self._value is not None else 0

    def __bool__(self):
        return True            # an empty value is still a message

    def __eq__(self, other):
        if not isinstance(other, Message):
            return NotImplemented
        return self._fields() == (<Message> other)._fields()

    def __hash__(self):
        return hash((self._topic, self._partition, self._offset))

    def __reduce__(self):
        value = bytes(self._value) if isinstance(self._value, memoryview) else self._value
        return Message, (self._topic, value, self._key, self._partition, self._offset,
                         (self._timestamp_type, self._timestamp), self._headers, self._error,
                         self._leader_epoch)

    def __repr__(self):
        text = f"<Message {self._topic}-{self._partition} offset {self._offset}"
        if self._error is not None:
            return f"{text} error {self._error}>"
        return f"{text} key {self._key!r} {len(self)} bytes>"

    cdef tuple _fields(self):
        return (self._topic, self._partition, self._offset, self._timestamp_type, self._timestamp,
                self._key, self._value, self._headers)


cdef inline object _bytes_or_none(const uint8_t* p, int64_t length):
    return None if length < 0 else PyBytes_FromStringAndSize(<const char*> p, length)


cdef inline bint _peek(const part_t* part, const record_view* records, record_view* r,
                       const uint8_t** after) noexcept nogil:
    """The next record of a part that has one, and where the one after it lies."""
    cdef int error = 0
    if part.record < 0:
        after[0] = parse_record(part.p, part.end, r, &error)
        return after[0] != NULL
    r[0] = records[part.record]
    after[0] = part.p
    return True


cdef inline void _move(part_t* part, const uint8_t* after) noexcept nogil:
    """Past the next record, which `_peek` has shown."""
    part.count -= 1
    part.p = after
    if part.record >= 0:
        part.record += 1


@cython.final
cdef class MessageQueue:
    """Messages of one partition, oldest first.  Memory: one copy of the batches that are not used
    up, at most 64 KiB or one batch; none with `views`."""

    def __cinit__(self, bint views=False):
        self.views = views
        self._parts = NULL
        self._records = NULL
        self._decompressor = Decompressor()
        self._plain = []
        self._data = b""

    def __dealloc__(self):
        free(self._parts)
        free(self._records)

    def __len__(self):
        """Records that may still come; those below the offset asked for are counted too."""
        cdef Py_ssize_t i, n = 0
        for i in range(self._at, self._count):
            n += self._parts[i].count
        return n

    @property
    def empty(self):
        """False as long as `pop` would give a message."""
        return self._skip() == NULL

    @property
    def next_offset(self):
        """Offset of the next message; with none left, the one after the batches loaded."""
        cdef part_t* part = self._skip()
        cdef record_view r
        cdef const uint8_t* after
        if part == NULL:
            return self.after
        _peek(part, self._records, &r, &after)
        return part.base_offset + r.offset_delta

    @property
    def data(self):
        """The batches that the messages come from, for a decoder of columns."""
        return self._data if isinstance(self._data, bytes) else memoryview(self._data)

    def clear(self):
        self._count = self._at = self._records_count = 0
        self._data = b""
        self._owner = None
        self._plain = []
        self._plain_bytes = 0

    def detach(self):
        """The messages left, as a queue of their own; this one is empty then."""
        cdef MessageQueue other = MessageQueue(self.views)
        self.swap(other)
        other.popped = 0
        return other

    def swap(self, MessageQueue other):
        """Exchange what two queues hold."""
        self.topic, other.topic = other.topic, self.topic
        self.partition, other.partition = other.partition, self.partition
        self._next, other._next = other._next, self._next
        self.after, other.after = other.after, self.after
        self.views, other.views = other.views, self.views
        self._owner, other._owner = other._owner, self._owner
        self._data, other._data = other._data, self._data
        self._records, other._records = other._records, self._records
        self._records_capacity, other._records_capacity = \
            other._records_capacity, self._records_capacity
        self._records_count, other._records_count = other._records_count, self._records_count
        self._plain, other._plain = other._plain, self._plain
        self._plain_bytes, other._plain_bytes = other._plain_bytes, self._plain_bytes
        self._parts, other._parts = other._parts, self._parts
        self._capacity, other._capacity = other._capacity, self._capacity
        self._count, other._count = other._count, self._count
        self._at, other._at = other._at, self._at

    # -- out ---------------------------------------------------------------------------------------

    cdef part_t* _skip(self) noexcept:
        """The part whose next record is wanted, past those that are not; NULL: none is left."""
        cdef part_t* part
        cdef record_view r
        cdef const uint8_t* after
        while self._at < self._count:
            part = &self._parts[self._at]
            while part.count:
                if not _peek(part, self._records, &r, &after) \
                        or part.base_offset + r.offset_delta >= self._next:
                    break
                _move(part, after)
            if part.count:
                return part
            self._at += 1
        return NULL

    cpdef Message pop(self):
        """The next message, or None."""
        cdef part_t* part
        cdef record_view r
        cdef const uint8_t* after
        cdef Message m
        cdef int64_t offset
        while self._at < self._count:
            part = &self._parts[self._at]
            while part.count:
                if not _peek(part, self._records, &r, &after):
                    # Cannot be: the copy is private.
                    raise AssertionError("a record that was checked is broken")
                _move(part, after)
                offset = part.base_offset + r.offset_delta
                if offset < self._next:
                    continue
                self._next = offset + 1
                self.popped += 1
                m = Message.__new__(Message)
                m._topic = self.topic
                m._partition = self.partition
                m._leader_epoch = part.leader_epoch
                m._offset = offset
                m._timestamp_type = part.kind
                if part.kind:
                    m._timestamp = part.max_timestamp
                else:
                    m._timestamp = <int64_t> (<uint64_t> part.base_timestamp
                                              + <uint64_t> r.timestamp_delta)
                m._key = _bytes_or_none(r.key, r.key_length)
                m._value = self._value(part, &r) if self.views \
                    else _bytes_or_none(r.value, r.value_length)
                m._headers = _headers(&r) if r.headers_count else None
                m._error = None
                return m
            self._at += 1
        return None

    cdef object _value(self, const part_t* part, const record_view* r):
        """A memoryview of the value of a record; None: it is null."""
        cdef object owner
        if r.value_length < 0:
            return None
        if r.value_length <= SHORT_VALUE_BYTES:
            return PyMemoryView_FromObject(_bytes_or_none(r.value, r.value_length))
        owner = self._owner if part.plain < 0 else self._plain[part.plain]
        return PyMemoryView_FromObject(shown(owner, r.value, r.value_length))

    def take(self, Py_ssize_t n):
        """Up to `n` messages as a list."""
        cdef list out = []
        cdef Message m
        while n > 0:
            m = self.pop()
            if m is None:
                break
            out.append(m)
            n -= 1
        return out

    # -- in ----------------------------------------------------------------------------------------

    def load(self, data, str topic not None, int32_t partition, int64_t next_offset,
             uint64_t max_decompressed_bytes):
        """`load_address` over a bytes-like object, whose bytes do not change as long as there is a
        reference to it, if the queue is one of views."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        if self.views:
            self.c_own(memoryview(data))
        try:
            return self.load_address(<uint64_t> <uintptr_t> view.buf, view.len, topic, partition,
                                     next_offset, max_decompressed_bytes)
        finally:
            PyBuffer_Release(&view)

    cpdef Py_ssize_t load_address(self, uint64_t address, size_t n, str topic, int32_t partition,
                                  int64_t next_offset,
                                  uint64_t max_decompressed_bytes) except -1:
        """Take whole batches from the start of `n` bytes at `address`, which must stay readable
        during the call; the bytes consumed.

        The queue must be empty.  Records below `next_offset` are left out; `after` is the offset
        after what was consumed.  0: no whole batch.  CorruptBatchError or UnsupportedFormatError
        when the first batch is not acceptable.
        """
        return self.c_load(<const uint8_t*> <uintptr_t> address, n, topic, partition, next_offset,
                           max_decompressed_bytes, NULL)

    cdef Py_ssize_t c_load(self, const uint8_t* p, size_t n, str topic, int32_t partition,
                           int64_t next_offset, uint64_t max_decompressed_bytes,
                           chain_t* chain) except -1:
        """`load_address`; a queue of views is told before whose the bytes are (`c_own`), each
        time.  Unless `chain` is NULL it is dense, stands at `p`, and moves with what
        is consumed.  Then batches are taken as far as they continue the log, and 0 may mean too
        that the first one is not acceptable: `follow_batches` and a call without a chain say why.
        """
        cdef size_t whole = 0, position = 0
        cdef batch_info info
        cdef int code
        cdef object owner
        owner = self._owner
        self.clear()
        self.topic = topic
        self.partition = partition
        self._next = next_offset
        self.after = next_offset
        while whole < n and whole < RUN_BYTES:
            code = parse_batch_header(p + whole, n - whole, &info)
            if code != BATCH_OK or info.size > n - whole \
                    or (whole and whole + info.size > RUN_BYTES):
                if not whole and chain == NULL and code != BATCH_TRUNCATED and code != BATCH_OK:
                    self._refuse(_bytes_or_none(p, min(n, <size_t> BATCH_HEADER_BYTES)),
                                 max_decompressed_bytes)
                break
            whole += info.size
        if not whole:
            return 0
        if self.views:
            if owner is None:
                raise AssertionError("a queue of views was not told whose its bytes are")
            self._owner = owner
            self._data = shown(owner, p, whole)
        else:
            self._data = PyBytes_FromStringAndSize(<const char*> p, whole)
            p = <const uint8_t*> PyBytes_AS_STRING(self._data)
        while position < whole:
            if check_batch_crc(p + position, whole - position, &info) != BATCH_OK \
                    or (chain != NULL and not continues_dense(chain, &info)) \
                    or not self._accept(p + position, &info, max_decompressed_bytes):
                if position == 0 and chain == NULL:
                    self._refuse(bytes(self._data), max_decompressed_bytes)
                break
            if info.base_offset + info.last_offset_delta + 1 > self.after:
                self.after = info.base_offset + info.last_offset_delta + 1
            if chain != NULL:
                move_dense(chain, &info)
            position += info.size
            if self._plain_bytes >= RUN_PLAIN_BYTES:
                break
        return position

    cdef void c_own(self, object owner):
        """Whose the bytes of the next `c_load` are.  It keeps them as they are while it is
        referenced."""
        self._owner = owner if self.views else None

    cdef c_pass(self, int64_t after):
        """Hold nothing, as after a `load` of batches before offset `after` without a record."""
        self.clear()
        self.after = after

    cdef bint _accept(self, const uint8_t* p, const batch_info* info, uint64_t limit) except -1:
        """Check the records of a batch whose frame and CRC are good, and queue them.  False:
        broken."""
        cdef int codec = info.attributes & ATTRIBUTE_CODEC_MASK
        cdef const uint8_t* q = p + BATCH_RECORDS
        cdef const uint8_t* end = p + info.size
        cdef part_t* part
        cdef record_view r
        cdef int error = 0
        cdef int32_t i
        cdef int64_t previous = -1
        cdef Py_ssize_t records = self._records_count
        cdef bint is_kept = self.views and codec == CODEC_NONE
        cdef bytes plain
        if info.base_offset < 0 or info.last_offset_delta < 0 \
                or info.base_offset > INT64_MAX - 1 - info.last_offset_delta \
                or info.records_count < 0 or codec > CODEC_ZSTD:
            return False
        if info.attributes & ATTRIBUTE_CONTROL or info.records_count == 0 \
                or info.base_offset + info.last_offset_delta < self._next:
            return True
        if codec != CODEC_NONE:
            try:
                plain = bytes(self._decompressor.run(codec, _bytes_or_none(q, end - q), limit))
            except FormatError:
                return False
            self._plain.append(plain)
            self._plain_bytes += <uint64_t> PyBytes_GET_SIZE(plain)
            q = <const uint8_t*> PyBytes_AS_STRING(plain)
            end = q + PyBytes_GET_SIZE(plain)
        if info.records_count > (end - q) // RECORD_MIN_BYTES:
            return False
        if self._count == self._capacity:
            self._grow()
        part = &self._parts[self._count]
        part.p = q
        part.end = end
        part.record = records if is_kept else -1
        part.plain = -1 if codec == CODEC_NONE else len(self._plain) - 1
        part.count = info.records_count
        part.leader_epoch = info.leader_epoch
        part.base_offset = info.base_offset
        part.base_timestamp = info.base_timestamp
        part.max_timestamp = info.max_timestamp
        part.kind = 1 if info.attributes & ATTRIBUTE_LOG_APPEND_TIME else 0
        for i in range(info.records_count):
            q = parse_record(q, end, &r, &error)
            if q == NULL or r.offset_delta <= previous or r.offset_delta > info.last_offset_delta:
                return False
            previous = r.offset_delta
            if is_kept:
                self._keep(&r)
        if q != end:
            return False
        self._count += 1
        return True

    cdef int _keep(self, const record_view* r) except -1:
        cdef Py_ssize_t capacity = self._records_capacity
        cdef record_view* records
        if self._records_count == capacity:
            capacity = 64 if capacity == 0 else 2 * capacity
            records = <record_view*> realloc(self._records, capacity * sizeof(record_view))
            if records == NULL:
                raise MemoryError()
            self._records = records
            self._records_capacity = capacity
        self._records[self._records_count] = r[0]
        self._records_count += 1
        return 0

    cdef int _grow(self) except -1:
        cdef Py_ssize_t capacity = 16 if self._capacity == 0 else 2 * self._capacity
        cdef part_t* parts = <part_t*> realloc(self._parts, capacity * sizeof(part_t))
        if parts == NULL:
            raise MemoryError()
        self._parts = parts
        self._capacity = capacity
        return 0

    cdef object _refuse(self, bytes data, uint64_t limit):
        """Raise what is wrong with the first batch of `data`, in the words of the codec."""
        cdef int64_t start = self._next
        self.clear()
        decode_records(data, self.topic, self.partition, start, max_decompressed_bytes=limit)
        raise CorruptBatchError(
            f"{self.topic}-{self.partition}: a record batch at offset {start} or later is broken",
            hint="read past it with another offset, or restore the segment from a good copy")


cdef list _headers(const record_view* r):
    cdef list out = []
    cdef const uint8_t* q = r.headers
    cdef const uint8_t* name
    cdef const uint8_t* value
    cdef int64_t a, b
    cdef int32_t i
    for i in range(r.headers_count):
        q = parse_header(q, r.end, &name, &a, &value, &b)
        if q == NULL:
            # `load` has seen them whole, so somebody has changed them since, where nobody copied
            # them.
            raise CorruptBatchError("the headers of a record were changed after its check",
                                    hint="look which process of this user writes in segments")
        out.append((PyBytes_FromStringAndSize(<const char*> name, a).decode("utf-8", "replace"),
                    None if b < 0 else PyBytes_FromStringAndSize(<const char*> value, b)))
    return out
