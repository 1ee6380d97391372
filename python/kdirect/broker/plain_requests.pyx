# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plain requests: those that are answered at once, in C, straight from a connection's buffer.

Law: a plain request has the same answer, byte for byte, and the same effects, counters included, as
the general handlers give it (`kdirect.broker.handlers_data`), only sooner; tests hold the two
against each other (tests/broker/test_plain_requests.py).  What is plain is said by
`kdirect.broker.plain_produce` and `kdirect.broker.plain_fetch`.  A request that is not is left in
the buffer, and nothing has changed; the connection then takes it the general way.  So requests keep
their order.

Only a broker that is alone has plain requests: in a cluster, Produce and Fetch have more to ask.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.string cimport memcmp

from kdirect.broker.plain_fetch cimport answer_fetch
from kdirect.broker.plain_produce cimport answer_produce
from kdirect.broker.plain_table cimport (
    DECLINED, TOLD, PlainTable, request_t, take_16, take_32, take_no_tags)
from kdirect.format.wire cimport kd_get32

cdef enum:
    PRODUCE = 0
    FETCH = 1
    # the first versions with tagged fields
    FLEXIBLE_PRODUCE = 9
    FLEXIBLE_FETCH = 12
    ENOUGH_BYTES = 128 << 10   # of answers: then the socket has its turn


cdef class PlainRequests:
    """See the module.  A broker has one, used on its event loop.  `clock` is that of the turns of
    connections, `time_ms` that of records."""

    cdef PlainTable _table
    cdef object _clock
    cdef object _time_ms
    cdef int64_t _fetch_bytes
    cdef object _client_id         # as text, and as bytes: of the connection served last
    cdef bytes _client_bytes

    cdef readonly bytes answers    # of the last run
    cdef readonly object told      # an Answer that comes after them, or None
    cdef readonly double now       # when the last request was answered
    cdef readonly int64_t served   # requests, so far

    def __init__(self, handlers, services):
        self._table = PlainTable(handlers, services)
        self._clock = services.environment.monotonic
        self._time_ms = services.environment.time_ms
        self._fetch_bytes = services.config["fetch.max.bytes"]
        self._client_id = None
        self._client_bytes = None
        self.answers = b""

    def serve(self, connection, bytearray buffer, Py_ssize_t start, Py_ssize_t end,
              Py_ssize_t most, double until):
        """Answer the plain requests at the front of `buffer[start:end]`, until the clock says
        `until`; where the first one begins that is left.  `most`: bytes of the largest frame that
        may be.  Then `answers`, `told` and `now` say the rest, unless none was answered."""
        cdef const uint8_t* data = <const uint8_t*> PyByteArray_AS_STRING(buffer)
        cdef PlainTable table = self._table
        cdef Py_ssize_t at = start
        cdef int64_t now_ms = 0, size
        cdef int outcome
        if end - start < 12 or data[start + 4] != 0 or data[start + 5] > FETCH:
            return start
        if self._client_id is not connection.client_id or self._client_bytes is None:
            self._client_id = connection.client_id
            self._client_bytes = b"" if self._client_id is None else self._client_id.encode()
        now_ms = self._time_ms()
        try:
            while end - at >= 4 and table.used < ENOUGH_BYTES:
                size = <int32_t> kd_get32(data + at)
                if size < 0 or size > most or size > end - at - 4:
                    break
                outcome = self._answer(connection, data + at + 4, size, now_ms)
                if outcome == DECLINED:
                    break
                at += 4 + size
                self.served += 1
                self.now = self._clock()
                if outcome == TOLD or self.now >= until:
                    break
        finally:
            if at > start:
                self.answers = table.take()
                self.told, table.told = table.told, None
                table.settle()
            table.used = 0  # where a request has failed halfway, too
        return at

    cdef int _answer(self, connection, const uint8_t* frame, int64_t size,
                     int64_t now_ms) except -1:
        cdef request_t r
        cdef int16_t key
        r.at = frame
        r.end = frame + size
        r.bad = False
        r.flexible = False
        key = take_16(&r)
        r.version = take_16(&r)
        r.correlation_id = take_32(&r)
        if not self._is_known_client(&r):
            return DECLINED
        r.flexible = r.version >= (FLEXIBLE_PRODUCE if key == PRODUCE else FLEXIBLE_FETCH)
        take_no_tags(&r)
        if key == PRODUCE:
            return answer_produce(self._table, connection, &r, now_ms)
        if key == FETCH:
            return answer_fetch(self._table, &r, self._fetch_bytes)
        return DECLINED

    cdef bint _is_known_client(self, request_t* r) noexcept:
        """Is the client id that of the connection's last request?  Else the general handlers note
        it."""
        cdef int16_t length = take_16(r)
        if self._client_id is None:
            return not r.bad and length == -1
        if r.bad or length != len(self._client_bytes) or length > r.end - r.at:
            return False
        if memcmp(r.at, <const uint8_t*> self._client_bytes, length) != 0:
            return False
        r.at += length
        return True
