# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What plain requests are answered from: partitions by name, and the bytes of requests and answers.

A *plain* request is one that the broker answers at once, from a kernel's memory, without a message
object: `kdirect.broker.plain_requests` says which.  Whatever is not plain is declined before
anything has changed, and goes to the general handlers whole.

Owns: the table of partitions that plain requests have asked for, the buffer of answers, and the
counts of one run.  Decides nothing about a partition itself: who is led and what an append waits
for is said by the general handlers (`DataHandlers.plain_place`, `takes_plain_appends`), the table
of logs, and the tables of `Appends`, all of which are looked into for each request.

Memory.  Requests are read in the receive buffer of their connection, which nobody moves meanwhile.
Answers lie in `out`, which is the table's own and is copied once, into the `bytes` that the socket
gets.

All methods run on the event loop.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Contains, PyDict_Size
from libc.stdint cimport (
    INT16_MAX, INT32_MAX, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t,
    uint64_t)
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from kdirect.format.wire cimport (
    kd_get8, kd_get16, kd_get32, kd_get64, kd_put16, kd_put32, kd_put64)

from kdirect.model import TopicPartition

cdef enum:
    KEPT_BYTES = 512 << 10     # of `out`, between two runs
    SPARE_ENTRIES = 256        # of partitions that are gone, before the table is made again


cdef class PlainPartition:
    """A partition as plain requests need it.  It may be gone: `PlainTable.find` looks."""


cdef class PlainTable:
    """See the module.  `handlers` are the broker's `DataHandlers`; `services` what they work
    with."""

    def __cinit__(self, handlers, services):
        self._handlers = handlers
        self._counters = services.counters
        self._partitions = services.logs.partitions
        self._by_topic = {}
        self._by_id = {}
        self._busy = services.appender.busy
        self._waiting = services.waiters.by_partition
        self._notify = services.waiters.notify

    def __dealloc__(self):
        free(self.out)

    # -- partitions --------------------------------------------------------------------------------

    cdef PlainPartition find(self, const uint8_t* topic, Py_ssize_t length, int32_t number,
                             bint by_id):
        cdef bytes key = PyBytes_FromStringAndSize(<const char*> topic, length)
        cdef PlainPartition place
        cdef dict by_key = self._by_id if by_id else self._by_topic
        known = by_key.get(key)
        if known is not None:
            place = (<dict> known).get(number)
            if place is not None:
                if (self._partitions.get(place.tp) is place.partition
                        and not place.topic.deleting):
                    return place
                del (<dict> known)[number]
                self._count -= 1
                if not known:
                    del by_key[key]
        return self._look_up(key, number, by_id)

    cdef PlainPartition _look_up(self, bytes key, int32_t number, bint by_id):
        """Ask the general handlers.  What they do not know is not remembered, for clients may ask
        for anything."""
        cdef PlainPartition place
        if by_id:
            name = self._handlers.plain_name(key)
        else:
            name = key.decode(errors="replace")
        found = None if name is None else self._handlers.plain_place(name, number)
        if found is None:
            return None
        if self._count > 2 * len(self._partitions) + SPARE_ENTRIES:
            self._by_topic.clear()
            self._by_id.clear()
            self._count = 0
        place = PlainPartition.__new__(PlainPartition)
        place.partition, place.topic = found
        place.dense_from = place.partition.dense_from
        place.tp = TopicPartition(name, number)
        place.kernel = place.partition.kernel
        (self._by_id if by_id else self._by_topic).setdefault(key, {})[number] = place
        self._count += 1
        return place

    cdef bint may_append(self, PlainPartition place) except -1:
        for table in self._busy:
            if PyDict_Size(table) and PyDict_Contains(table, place.tp):
                return False
        config = place.partition.config
        if config is not place.config or not place.appends:
            place.config = config
            place.appends = self._handlers.takes_plain_appends(place.partition)
        return place.appends and not place.kernel.c_holds()

    cdef int notify(self, PlainPartition place, int64_t size) except -1:
        if PyDict_Size(self._waiting) and PyDict_Contains(self._waiting, place.tp):
            self._notify(place.tp, size)
        return 0

    # -- answers -----------------------------------------------------------------------------------

    cdef int reserve(self, size_t size) except -1:
        cdef size_t wanted = self.used + size
        cdef void* more
        if wanted > self._capacity:
            wanted = max(wanted, 2 * self._capacity, <size_t> 4096)
            more = realloc(self.out, wanted)
            if more == NULL:
                raise MemoryError()
            self.out = <uint8_t*> more
            self._capacity = wanted
        return 0

    cdef bytes take(self):
        cdef bytes answers = PyBytes_FromStringAndSize(<const char*> self.out, self.used)
        self.used = 0
        if self._capacity > KEPT_BYTES:
            free(self.out)
            self.out = NULL
            self._capacity = 0
        return answers

    cdef int settle(self) except -1:
        if self.produces:
            self._counters.requests["Produce"] += self.produces
            self._counters.appends += self.appends
            self._counters.append_bytes += self.append_bytes
            self.produces = self.appends = self.append_bytes = 0
        if self.fetches:
            self._counters.requests["Fetch"] += self.fetches
            self.fetches = 0
        return 0


# -- fields of a request ---------------------------------------------------------------------------

cdef inline bint _has(request_t* r, int64_t n) noexcept nogil:
    if r.bad or n < 0 or n > r.end - r.at:
        r.bad = True
        return False
    return True


cdef inline const uint8_t* _take(request_t* r, int64_t n) noexcept nogil:
    """The next n bytes; NULL: there are not so many."""
    if not _has(r, n):
        return NULL
    r.at += n
    return r.at - n


cdef int16_t take_8(request_t* r) noexcept nogil:
    cdef const uint8_t* p = _take(r, 1)
    return 0 if p == NULL else <int8_t> kd_get8(p)


cdef int16_t take_16(request_t* r) noexcept nogil:
    cdef const uint8_t* p = _take(r, 2)
    return 0 if p == NULL else <int16_t> kd_get16(p)


cdef int32_t take_32(request_t* r) noexcept nogil:
    cdef const uint8_t* p = _take(r, 4)
    return 0 if p == NULL else <int32_t> kd_get32(p)


cdef int64_t take_64(request_t* r) noexcept nogil:
    cdef const uint8_t* p = _take(r, 8)
    return 0 if p == NULL else <int64_t> kd_get64(p)


cdef const uint8_t* take_id(request_t* r) noexcept nogil:
    return _take(r, 16)


cdef int64_t take_uvarint(request_t* r) noexcept nogil:
    cdef uint64_t value = 0
    cdef uint8_t byte
    cdef int shift = 0
    while shift < 35 and _has(r, 1):
        byte = kd_get8(r.at)
        r.at += 1
        value |= <uint64_t> (byte & 0x7F) << shift
        if byte < 0x80:
            if value > INT32_MAX:
                break
            return <int64_t> value
        shift += 7
    r.bad = True
    return 0


cdef int64_t take_count(request_t* r) noexcept nogil:
    cdef int64_t n = take_uvarint(r) - 1 if r.flexible else take_32(r)
    if n < -1:
        r.bad = True
    return 0 if r.bad else n


cdef int64_t _take_run(request_t* r, int64_t n, const uint8_t** data) noexcept nogil:
    if n < 0:
        if n < -1:
            r.bad = True
        return -1
    data[0] = _take(r, n)
    return 0 if data[0] == NULL else n


cdef int64_t take_text(request_t* r, const uint8_t** text) noexcept nogil:
    cdef int64_t n = take_uvarint(r) - 1 if r.flexible else take_16(r)
    text[0] = r.at
    if n > INT16_MAX:
        r.bad = True
        return 0
    return _take_run(r, n, text)


cdef int64_t take_records(request_t* r, const uint8_t** records) noexcept nogil:
    cdef int64_t n = take_uvarint(r) - 1 if r.flexible else take_32(r)
    records[0] = r.at
    return _take_run(r, n, records)


cdef void take_no_tags(request_t* r) noexcept nogil:
    if not r.flexible or not _has(r, 1):
        return
    if kd_get8(r.at) != 0:
        r.bad = True
    r.at += 1


# -- fields of an answer ---------------------------------------------------------------------------

cdef uint8_t* put_8(uint8_t* p, uint8_t value) noexcept nogil:
    p[0] = value
    return p + 1


cdef uint8_t* put_16(uint8_t* p, int16_t value) noexcept nogil:
    kd_put16(p, <uint16_t> value)
    return p + 2


cdef uint8_t* put_32(uint8_t* p, int32_t value) noexcept nogil:
    kd_put32(p, <uint32_t> value)
    return p + 4


cdef uint8_t* put_64(uint8_t* p, int64_t value) noexcept nogil:
    kd_put64(p, <uint64_t> value)
    return p + 8


cdef uint8_t* put_uvarint(uint8_t* p, uint32_t value) noexcept nogil:
    while value >= 0x80:
        p[0] = <uint8_t> (value & 0x7F | 0x80)
        value >>= 7
        p += 1
    p[0] = <uint8_t> value
    return p + 1


cdef uint8_t* put_bytes(uint8_t* p, const uint8_t* data, size_t length) noexcept nogil:
    memcpy(p, data, length)
    return p + length


cdef uint8_t* put_count(uint8_t* p, int32_t count, bint flexible) noexcept nogil:
    return put_uvarint(p, <uint32_t> count + 1) if flexible else put_32(p, count)


cdef uint8_t* put_text(uint8_t* p, const uint8_t* text, int16_t length,
                       bint flexible) noexcept nogil:
    if flexible:
        p = put_uvarint(p, <uint32_t> length + 1)
    else:
        p = put_16(p, length)
    return put_bytes(p, text, <size_t> length)
