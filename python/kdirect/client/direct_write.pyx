# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One-sided producing, exclusive and shared (KafkaDirect §4.2.2).

Owns: the grants of one partition, and what the requests to them mean (`FileWriter`): positions,
orders, refusals, outcomes.  A `FileWriter` is a ring of WRITEs with credits
(`kdirect.wire.produce_ring`), which counts the requests and posts them.  Their bytes lie in
`kdirect.client.send_buffer`, their acknowledgements come into `kdirect.client.ack_ring`, and
`kdirect.client.reservation` reserves stretches of a shared head.  What may not enter: requests for
access, the choice of partitions, retries.

A request is one WRITE_WITH_IMM of one or more record batches; its immediate data is ``file id << 16
| order``.  With notices (`rdma.notify=send`) it is a plain WRITE and a SEND that says the same.

An exclusive writer counts position and order itself.  A shared one reserves both on the head's
word, by FETCH_AND_ADD or COMPARE_AND_SWAP.  It does so when the bytes are encoded and there is room
for the WRITE, so that the WRITE follows its reservation at once.  One reservation covers a whole
request, however many batches that has.  A reservation beyond the file's end has no WRITE: the file
is full.

An acknowledgement is an entry that the broker WRITEs into this grant's ring of acknowledgements.
The immediate data of that WRITE, ``file id << 16 | entries``, says whose ring has how many new
ones.

An exclusive writer may be granted the *next* file while it fills the present one (`open_next`).
Then a full file costs it nothing: it goes on at the start of the next.  Each of the two has its own
file id, its own orders and its own half of the ring of acknowledgements.  There are never more than
two files: the next is opened only when every request to the file before the present one is
answered, because that file's half is used again.

Memory.  The bytes of a request lie in the send buffer, a ring, until two things have happened:

- its WRITE has completed.  Until then the bytes belong to the transport, even if the writer is
  closed, because an RNIC may send them again; an acknowledgement may overtake the completion;
- its acknowledgement has come.  Until then the bytes are kept, so that a revoked request can be
  repeated elsewhere.  The bytes of a refused request, and all after it, stay until `take_refused`.

A large value is not copied into the send buffer if the transport reads it during the post from
where the caller has it, and never later.  Then the caller's `bytes`, which cannot change, are kept
that long in place of a copy.

There is no lock.  A router and its writers belong to one producer, and every call is made with that
producer's lock held.
"""

from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE

from kdirect.client.ack_ring cimport AckRing, ack_t
from kdirect.client.idempotence cimport ProducerIdentity, add_one, mark_transactional
from kdirect.client.reservation cimport BEYOND_FILE, RESERVED, Reservation
from kdirect.client.send_buffer cimport SendBuffer, request_t
from kdirect.machine cimport kd_now_ns, kd_wall_ns
from kdirect.format.batch cimport encode_single, encode_single_around
from kdirect.format.layout cimport ACK_FLAG_RECALLED, ACK_FLAG_REVOKED
from kdirect.rdma.contract cimport WC_RETRY_EXC_ERR, MemoryRegion, QueuePair
from kdirect.spin cimport kd_spin
from kdirect.wire.ack_router cimport AckRouter
from kdirect.rdma.credit_ring cimport POSTED, QUEUE_FULL, source_t, target_t
from kdirect.wire.produce_ring cimport ProduceRing, large_value_t, request_imm

from kdirect.client.grants import HINT, check_grant, check_shared_word
from kdirect.errors import ProtocolError, QueuePairError, TimedOutError

# What `try_record` and `try_batches` return.
SENT, SENT_AND_ASK = C_SENT, C_SENT_AND_ASK
NO_ROOM_FILE, NO_ROOM_BUFFER = C_NO_ROOM_FILE, C_NO_ROOM_BUFFER
NOT_GRANTED, BROKEN = C_NOT_GRANTED, C_BROKEN


cdef class FileWriter(ProduceRing):
    """Writes to one granted head file.  Life: construct per partition, `open` for each grant,
    `close`.

    Sequence numbers count the requests of the writer's whole life from 0.  `posted` requests were
    sent, and `acknowledged` of them were answered, with success or a refusal.  After a refusal
    nothing is sent until `take_refused`.  After a revocation nothing is sent any more, and
    `unacknowledged` returns the requests to repeat.
    One request at a time is under way until the broker has acknowledged one of the identity's
    producer id: it compares a first batch with nothing, so that another one might pass a first one
    that is refused alone.
    `collect` appends to the list `outcomes`: (tag, base offset, None) for each request that was
    acknowledged with success and has a tag, in the order of the requests; see `send_buffer`.
    """

    cdef SendBuffer _buffer
    cdef AckRing _acks
    cdef Reservation _reservation                      # of a shared grant; None before the first
    cdef uint64_t _grant_first                         # sequence number of the file's first request
    cdef uint64_t _order_0                             # that of order 0: others may have had orders
    cdef int _other_file                               # the one before or the next; -1: none
    cdef bint _has_next                                # it is the next, and nothing was sent on it
    cdef uint64_t _next_address
    cdef uint32_t _next_rkey
    cdef int64_t _next_length
    cdef bint _asks
    cdef int64_t _ask_at                               # position to ask for the next file at
    cdef readonly int file_id
    cdef readonly uint64_t address
    cdef readonly uint32_t rkey
    cdef readonly int64_t length, position
    cdef readonly bint granted, revoked, shared
    cdef readonly bint full                            # nothing more goes into this file
    cdef readonly bint recalled                        # the broker wants the grant back
    cdef public bint compare_and_swap                  # reserve by COMPARE_AND_SWAP
    cdef public ProducerIdentity identity              # stamps what is sent; None: no idempotence
    cdef uint64_t _granted_credits
    cdef int64_t _met_id                               # the producer id that was sent last
    cdef uint64_t _first_of_id                         # of another: its first request, or the next
    cdef readonly bint meets                           # no request of that one was acknowledged yet
    cdef readonly uint64_t failures                    # refused requests that were not taken yet
    cdef uint64_t _first_failure
    cdef readonly int64_t last_offset_base             # of the last acknowledged request
    cdef readonly uint64_t records_acknowledged, bytes_acknowledged   # with success
    cdef readonly uint64_t requests_acknowledged
    cdef uint64_t _records_sent, _records_done         # done: acknowledged, or refused and taken
    cdef readonly uint64_t files_ahead                 # files granted ahead in which it went on
    cdef bint _writes_left                             # of requests that were given up, maybe
    cdef readonly str name

    def __init__(self, name, AckRouter router, QueuePair qp, MemoryRegion ring, int window,
                 list outcomes=None):
        ProduceRing.__init__(self, router, qp, window)
        self.name = name
        self._acks = AckRing(ring, 2 * self.window)
        self._buffer = SendBuffer(self.window, [] if outcomes is None else outcomes)
        self.file_id = self._other_file = -1
        self.last_offset_base = -1
        self._ask_at = INT64_MAX
        self._granted_credits = self.window
        self._met_id = -1

    @property
    def ring_entries(self):
        """Entries of the half of the acknowledgement ring that a grant uses."""
        return self._acks.half_entries

    @property
    def other_half(self):
        """Where the half of the ring begins, in bytes, that the next file's grant uses; the first
        grant uses the first."""
        return self._acks.other_half

    @property
    def records_in_flight(self):
        """Records not acknowledged; those of a refused request until it is taken."""
        return self._records_sent - self._records_done

    @property
    def has_landing(self):
        return self._reservation is not None

    def set_landing(self, MemoryRegion landing):
        """8 bytes where reservations land, which a shared grant needs."""
        self._reservation = Reservation(self._router, self._qp, landing)
        self._reservation.compare_and_swap = self.compare_and_swap

    @property
    def word_address(self):
        """Of a shared grant's word; 0: the grant is exclusive."""
        return self._reservation.address if self.shared else 0

    @property
    def word_rkey(self):
        return self._reservation.rkey if self.shared else 0

    @property
    def end(self):
        """(order, position) of the first reservation that passed the end of a shared file; (-1, -1)
        when it is not ours."""
        if not self.shared:
            return -1, -1
        return self._reservation.end_order, self._reservation.end_position

    def set_buffer(self, MemoryRegion buffer):
        """Give the writer its send buffer; no request may be under way.  QueuePairError when a
        WRITE does not complete: its completion would free bytes of the new buffer."""
        if self.posted != self.acknowledged:
            raise ValueError("requests are under way")
        self._require_completed()
        self.collect()
        cdef MemoryRegion old = self._buffer.region
        self._buffer.set_region(buffer)
        if old is not None:
            old.deregister()

    @property
    def buffer_bytes(self):
        """Size of the send buffer: no request may be larger."""
        return self._buffer.capacity

    def open(self, int file_id, int64_t address, int64_t rkey, int64_t length, int64_t position,
             int64_t word_address=0, int64_t word_rkey=0, int window=0):
        """Start on a new grant; there must be no unacknowledged request.  With a `word_address` it
        is shared.  `window`: requests that may be under way (0: as many as the writer was made
        for).  The grant's acknowledgements come into the first half of the ring."""
        if self.posted != self.acknowledged:
            raise ValueError("requests are under way")
        check_grant(self.name, file_id, address, rkey, length, position)
        if word_address != 0:
            if self._reservation is None:
                raise ValueError("a shared grant needs a landing")
            check_shared_word(self.name, word_address, word_rkey)
        self._require_completed()  # only its file id says whose a completion is
        self._detach()
        self.file_id = file_id
        self.address = <uint64_t> address
        self.rkey = <uint32_t> rkey
        self.length = length
        self.position = position
        self._acks.c_restart()
        self._grant_first = self._order_0 = self.posted
        self.revoked = self.recalled = self.full = False
        self.shared = word_address != 0
        if self.shared:
            self._reservation.open(
                file_id, <uint64_t> word_address, <uint32_t> word_rkey, position, length)
        self._granted_credits = (
            min(self.window, <uint64_t> window) if window > 0 else self.window)
        self.credits = 1 if self.meets else self._granted_credits
        self.desynchronised = False
        self._ask_at = INT64_MAX
        self._asks = False
        self.granted = True
        self._router.attach(file_id, self)

    def ask_when_half_full(self):
        """Let `try_record` and `try_batches` say once a file, by SENT_AND_ASK, that half of what
        was granted is full: of the present one, and of those on which the writer goes on."""
        self._asks = True
        self._ask_at = self.position + (self.length - self.position) // 2

    @property
    def first_of_file(self):
        """Sequence number of the first request to the present file."""
        return self._grant_first

    def open_next(self, int file_id, int64_t address, int64_t rkey, int64_t length):
        """Go on at the start of this file when the present one, which is held exclusively, has no
        room.  Every request to the file before the present one must be answered.  Its
        acknowledgements come into the half of the ring at `other_half`."""
        if (self.shared or not self.granted or self._has_next
                or self.acknowledged < self._grant_first):
            raise ValueError("the next file cannot be opened now")
        check_grant(self.name, file_id, address, rkey, length, 0)
        if file_id == self.file_id:  # the id of the file before, which has ended, may be in use
            raise ProtocolError(
                f"{self.name}: the broker granted file {file_id} twice", hint=HINT)
        # The completions of the WRITEs to the file before come under its id, and before those of
        # the present one.
        self._wait_sends(self._grant_first, -1)
        if self._other_file >= 0:
            self._router.detach(self._other_file)
        self._other_file = file_id
        self._acks.c_expect_next()
        self._next_address = <uint64_t> address
        self._next_rkey = <uint32_t> rkey
        self._next_length = length
        self._has_next = True
        self._router.attach(file_id, self)

    cdef void c_go_on(self) noexcept nogil:
        """The present file is full: go on at the start of the next.  Requests to the present one
        may be under way."""
        cdef int before = self.file_id
        self.file_id = self._other_file
        self._other_file = before
        self._acks.c_go_on()
        self.address = self._next_address
        self.rkey = self._next_rkey
        self.length = self._next_length
        self.position = 0
        self._grant_first = self._order_0 = self.posted
        self._has_next = False
        self.files_ahead += 1
        self._ask_at = self.length // 2 if self._asks else INT64_MAX

    cdef _detach(self):
        self._router.detach(self.file_id)
        if self._other_file >= 0:
            self._router.detach(self._other_file)
        self._other_file = -1
        self._has_next = False

    def resume(self, int64_t position, int order):
        """The broker has appended to the file, which is held exclusively: go on at this position,
        with a request of this order."""
        if self.posted != self.acknowledged or self.shared:
            raise ValueError("requests are under way, or the file is shared")
        if not self.position <= position <= self.length or not 0 <= order <= 0xFFFF:
            raise ProtocolError(f"{self.name}: the file does not go on at {position}", hint=HINT)
        self.position = position
        self._order_0 = self.posted - <uint64_t> order

    def finish_file(self):
        """Nothing more goes into this file, whatever room it has: the broker is told that it is
        finished."""
        self.full = True

    def end_grant(self):
        """The grant was released or lost."""
        self._detach()
        self.granted = False

    cdef int c_take_acks(self, uint16_t file_id, uint16_t count) noexcept nogil:
        """Read `count` entries that were WRITEn for the grant of `file_id`."""
        cdef bint present = file_id == <uint16_t> self.file_id
        cdef ack_t ack
        cdef request_t* r
        cdef uint16_t i
        cdef int n = 0
        for i in range(count):
            if not self._acks.c_take(present, &ack):
                self.desynchronised = True
                return n
            if ack.flags & ACK_FLAG_REVOKED:
                self.revoked = True
            if ack.flags & ACK_FLAG_RECALLED:
                self.recalled = True
            if ack.batches == 0 and ack.error == 0:
                continue                      # a notice, not an answer
            r = self._buffer.c_request(self.acknowledged)
            # The broker commits the file before to its end before it begins with the present one.
            if (self.acknowledged >= self.posted or ack.order != r.order
                    or present != (self.acknowledged >= self._grant_first)):
                self.desynchronised = True
                return n
            if ack.error != 0 and ack.error != DUPLICATE_SEQUENCE_NUMBER:
                r.error = <int16_t> ack.error
                if self.failures == 0:
                    self._first_failure = self.acknowledged
                self.failures += 1
            else:
                r.base_offset = self.last_offset_base = ack.base_offset
                self._records_done += r.records
                self.records_acknowledged += r.records
                self.bytes_acknowledged += r.length
                self.requests_acknowledged += 1
                if self.meets and self.acknowledged >= self._first_of_id:
                    self.meets = False
                    self.credits = self._granted_credits
            self.c_return_credit()
            n += 1
        self.c_release()
        return n

    cdef void c_atomic_done(self) noexcept nogil:
        self._reservation.completed = True

    cdef void c_release(self) noexcept nogil:
        """Free the bytes of requests that are both completed and acknowledged, up to the first that
        was refused."""
        if self.c_free_before(self._first_failure if self.failures else self.posted):
            self._buffer.c_free(self.freed, self.posted)

    cdef int c_reserve(self, uint64_t n, uint64_t* start) noexcept nogil:
        """Room for `n` contiguous bytes of the send buffer and one request; SENT or why not."""
        if not self.granted or self.revoked or self.failures != 0 or self.desynchronised:
            return C_NOT_GRANTED
        if self._router._status != 0:
            return C_BROKEN
        if self.full or self.recalled:
            return C_NO_ROOM_FILE
        if not self.shared and self.position + <int64_t> n > self.length:
            if not self._has_next or <int64_t> n > self._next_length:
                return C_NO_ROOM_FILE
            self.c_go_on()
        if not self.c_may_post() or (
                self._buffer.tagged and self.posted - self._buffer.collected >= self.window):
            return C_NO_ROOM_BUFFER
        return C_SENT if self._buffer.c_reserve(n, start) else C_NO_ROOM_BUFFER

    cdef void _meet(self, int64_t producer_id) noexcept nogil:
        """What is sent next is the first of this producer id."""
        self._met_id = producer_id
        self._first_of_id = self.posted
        self.meets = True
        self.credits = 1

    cdef int _reserve_shared(self, uint32_t length, uint64_t* position,
                             uint16_t* order) except -1:
        """Reserve on the head's word; SENT or why not."""
        cdef int rc = self._reservation.reserve(length, position, order)
        if rc == BEYOND_FILE:
            self.full = True
            return C_NO_ROOM_FILE
        if rc != RESERVED:
            return C_BROKEN
        return C_NOT_GRANTED if self.revoked else C_SENT     # access may have ended meanwhile

    cdef int c_send(self, uint64_t start, uint32_t length, uint32_t records, uint64_t position,
                    uint16_t order, large_value_t* value) noexcept nogil:
        """Post the request whose bytes are at `start` of the send buffer, as `c_post_request` does.
        SENT, NO_ROOM_BUFFER (the send queue is full; not after a reservation) or BROKEN."""
        cdef uint64_t sequence = self.posted
        cdef source_t source
        cdef target_t target
        cdef int rc
        cdef request_t* r
        source.data = self._buffer.region.data + start
        source.address = self._buffer.region.address + start
        source.lkey = self._buffer.region.lkey
        source.length = length
        target.address = self.address + position
        target.rkey = self.rkey
        target.imm = request_imm(<uint16_t> self.file_id, order)
        rc = self.c_post_request(&source, &target, value, self.shared)
        if rc != POSTED:
            return C_NO_ROOM_BUFFER if rc == QUEUE_FULL else C_BROKEN
        r = self._buffer.c_request(sequence)
        r.start = start
        r.length = length
        r.records = records
        r.hole = value.hole
        r.order = order
        r.error = 0
        self._records_sent += records
        self.position = <int64_t> position + length
        self._buffer.c_take(start, length)
        return C_SENT

    cdef int _sent(self, tag, bint hole, value) except -1:
        """Keep what belongs to the request that was just sent; what to return for it."""
        cdef uint64_t sequence = self.posted - 1
        if tag is not None:
            self._buffer.set_tag(sequence, tag)
        if hole:                        # the value, if its hole was left and is not free already
            self._buffer.drop(self.freed)
            if self.freed <= sequence and self._buffer.c_request(sequence).hole:
                self._buffer.keep(sequence, value)
        if self.position < self._ask_at:
            return C_SENT
        self._ask_at = INT64_MAX
        return C_SENT_AND_ASK

    cpdef int try_record(self, value, key=None, int64_t timestamp_ms=-1, tag=None) except -1:
        """Send one record as a batch of its own.  Returns SENT, SENT_AND_ASK or, when it was not
        taken, one of the others.  `value` and `key`: bytes or None; `timestamp_ms` -1 is now."""
        cdef record_t r
        cdef uint64_t position = 0
        cdef uint16_t order = 0
        cdef ProducerIdentity identity = self.identity
        cdef int rc
        self._buffer.drop(self.freed)
        r.producer_id, r.epoch, r.sequence = -1, -1, -1
        r.transactional = False
        if identity is not None:
            r.transactional = identity.transactional
            r.producer_id, r.epoch = identity.producer_id, identity.epoch
            r.sequence = identity.next_sequence
            if r.producer_id != self._met_id:
                self._meet(r.producer_id)
        r.large.data = r.key = NULL
        r.value_length = r.key_length = -1
        if value is not None:
            if not PyBytes_CheckExact(value):
                value = bytes(value)
            r.large.data = <const uint8_t*> PyBytes_AS_STRING(value)
            r.value_length = PyBytes_GET_SIZE(value)
        if key is not None:
            if not PyBytes_CheckExact(key):
                key = bytes(key)
            r.key = <const uint8_t*> PyBytes_AS_STRING(key)
            r.key_length = PyBytes_GET_SIZE(key)
        r.large.hole, r.timestamp_ms = 0, timestamp_ms
        r.large.length = <uint32_t> r.value_length
        with nogil:
            rc = self.c_record(&r)
        if rc == C_SENT and self.shared:
            rc = self._reserve_shared(r.length, &position, &order)
            if rc == C_SENT:
                with nogil:
                    rc = self.c_send(r.start, r.length, 1, position, order, &r.large)
        if rc == C_NO_ROOM_BUFFER and self._buffer.collect(self.acknowledged):
            return self.try_record(value, key, r.timestamp_ms, tag)
        if rc != C_SENT:
            return rc
        if identity is not None:
            identity.c_sent(add_one(r.sequence))
        return self._sent(tag, r.large.hole != 0, value)

    cdef int c_record(self, record_t* r) noexcept nogil:
        """Encode a record, and send it where no reservation comes between.  SENT or why not."""
        cdef uint64_t most = SINGLE_OVERHEAD + max(r.value_length, 0) + max(r.key_length, 0)
        cdef uint8_t* at
        cdef int rc
        if r.timestamp_ms < 0:
            r.timestamp_ms = kd_wall_ns() // 1000000
        # News of a revocation: a WRITE under a key that has ended breaks the queue pair.  In a
        # stream they come with the acknowledgements.
        if self.shared or self.posted == self.acknowledged:
            self._router.c_drain()
        rc = self.c_reserve(most, &r.start)
        if rc == C_NO_ROOM_BUFFER:
            self._router.c_drain()
            rc = self.c_reserve(most, &r.start)
        if rc != C_SENT:
            return rc
        at = self._buffer.region.data + r.start
        if r.value_length >= INLINE_FROM and self._notices is None and not r.transactional:
            r.length = <uint32_t> encode_single_around(
                at, most, r.key, r.key_length, r.large.data, r.value_length, r.timestamp_ms,
                r.producer_id, r.epoch, r.sequence, &r.large.hole)
        else:
            r.length = <uint32_t> encode_single(
                at, most, r.key, r.key_length, r.large.data, r.value_length, r.timestamp_ms,
                r.producer_id, r.epoch, r.sequence)
        if r.transactional:
            mark_transactional(at, r.length)
        if self.shared:
            return C_SENT
        rc = self.c_send(r.start, r.length, 1, <uint64_t> self.position,
                         <uint16_t> (self.posted - self._order_0), &r.large)
        if (self.posted & 15) == 0:
            self._router.c_drain()
        return rc

    cpdef int try_batches(self, data, uint32_t records, tag=None) except -1:
        """Send encoded record batches (a contiguous buffer of whole batches) as one request.
        Returns as `try_record`."""
        cdef const uint8_t[::1] view = data
        cdef uint64_t n = <uint64_t> view.shape[0]
        cdef int rc
        if n == 0:
            return C_SENT
        if n > self._buffer.capacity or n > <uint64_t> 0x7FFFFFFF:
            raise ValueError(
                f"a request of {n} bytes is larger than the send buffer of"
                f" {self._buffer.capacity}")
        self._buffer.drop(self.freed)
        rc = self._try_batches(&view[0], n, records, tag)
        if rc == C_NO_ROOM_BUFFER and self._buffer.collect(self.acknowledged):
            rc = self._try_batches(&view[0], n, records, tag)
        return rc

    cdef int _try_batches(self, const uint8_t* data, uint64_t n, uint32_t records,
                          tag) except -1:
        cdef uint64_t start = 0, position = 0
        cdef uint16_t order = 0
        cdef int32_t sequence = 0
        cdef ProducerIdentity identity = self.identity
        cdef bint stamped = identity is not None
        cdef large_value_t none
        cdef int rc
        none.hole = 0
        if stamped and identity.producer_id != self._met_id:
            self._meet(identity.producer_id)
        with nogil:
            self._router.c_drain()
            rc = self.c_reserve(n, &start)
            if rc == C_SENT:
                memcpy(self._buffer.region.data + start, data, n)
                if stamped:
                    sequence = identity.c_stamp(self._buffer.region.data + start, n)
                if not self.shared:
                    order = <uint16_t> (self.posted - self._order_0)
                    rc = self.c_send(
                        start, <uint32_t> n, records, <uint64_t> self.position, order, &none)
        if rc == C_SENT and self.shared:
            rc = self._reserve_shared(<uint32_t> n, &position, &order)
            if rc == C_SENT:
                with nogil:
                    rc = self.c_send(start, <uint32_t> n, records, position, order, &none)
        if rc != C_SENT:
            return rc
        if stamped:
            identity.c_sent(sequence)
        return self._sent(tag, False, None)

    def tag_last(self, tag):
        """Tell the outcome of the request that was sent last, which has no tag, under this one.
        Its acknowledgement was not taken yet."""
        self._buffer.set_tag(self.posted - 1, tag)

    cpdef bint collect(self) except -1:
        """Append the outcomes of what is acknowledged to `outcomes`.  True when something is wrong:
        a request was refused, or some are under way on a grant that has ended."""
        self._buffer.collect(self.acknowledged)
        return self.failures != 0 or (self.revoked and self.posted > self.acknowledged)

    cdef bint c_stuck(self) noexcept nogil:
        return (self.revoked or self.failures != 0 or self.desynchronised
                or self._router._status != 0)

    def wait_answers(self, int timeout_ms):
        """Wait, for a while, until every request is answered, whether with success or not; True
        when they are.  False when some will not be: access was revoked, or the queue pair broke."""
        cdef double until = self._router._monotonic() + timeout_ms / 1000.0
        while self.acknowledged < self.posted:
            with nogil:
                self._router.c_drain()
            if self.revoked or self.desynchronised or self._router._status != 0:
                break
            if self.acknowledged < self.posted:
                if self._router._monotonic() >= until:
                    break
                self._router._recv_cq.wait(10, 0)
        return self.acknowledged == self.posted

    def wait_acknowledged(self, uint64_t sequence, int64_t timeout_ms):
        """Wait until `acknowledged` > `sequence`.  True; False when the writer cannot go on
        (revoked, a request refused, broken). TimedOutError after `timeout_ms`.  Spins for the
        router's spin time, then sleeps."""
        cdef int64_t spin_ns = self._router._spin_ns
        cdef double now, until = -1
        while True:
            with nogil:
                self.c_spin(sequence, spin_ns)
            self._buffer.drop(self.freed)
            if self.acknowledged > sequence and not self.failures:
                return True
            if self.c_stuck():
                return False
            now = self._router._monotonic()
            if until < 0:
                until = now + timeout_ms / 1000.0
            if now >= until:
                raise TimedOutError(
                    f"{self.name}: no acknowledgement within {timeout_ms} ms",
                    hint="the broker may be stopped or overloaded; the records may still be"
                    " committed")
            self._router._recv_cq.wait(max(1, min(1000, int((until - now) * 1000))), 0)
            spin_ns = 0

    cdef void c_spin(self, uint64_t sequence, int64_t spin_ns) noexcept nogil:
        """Poll until this request is acknowledged, or nothing has come for so long."""
        cdef int64_t until = 0, now
        cdef int n
        if self.acknowledged > sequence and not self.failures:
            return
        while True:
            n = self._router.c_drain()
            if spin_ns == 0 or self.acknowledged > sequence or self.c_stuck():
                return
            now = kd_now_ns()
            if n > 0 or until == 0:
                until = now + spin_ns
            if now >= until:
                return
            kd_spin(spin_ns - (until - now))

    def unacknowledged(self):
        """[(bytes, records, tag)] of the requests not answered, in order."""
        return self._buffer.requests_between(self.acknowledged, self.posted)

    def take_refused(self):
        """[(bytes, records, tag, error code)] of the refused requests, in order; the writer may go
        on then."""
        self._buffer.collect(self.acknowledged)
        out = []
        if self.failures:
            out = self._buffer.take_refused(self._first_failure, self.acknowledged)
            for _, records, _, _ in out:
                self._records_done += records
        self.failures = 0
        self.c_release()
        self._buffer.drop(self.freed)
        return out

    def forget(self):
        """Give up the unacknowledged requests (the caller took them by `unacknowledged`); the
        writer can only be closed then."""
        self._buffer.collect(self.acknowledged)
        if not self.wait_completed():
            self._writes_left = True
        self.c_give_up()
        self.failures = 0
        self._records_done = self._records_sent
        self._buffer.clear()

    cdef _require_completed(self):
        """What is acknowledged has arrived; a queue pair over which its completion does not come is
        replaced like a broken one."""
        if self.wait_completed():
            return
        if self._router._status == 0:
            self._router._status = WC_RETRY_EXC_ERR
        raise QueuePairError(
            f"{self.name}: WRITEs that the broker has acknowledged do not complete",
            hint="the path to the broker loses packets; a new queue pair is opened")

    def close(self):
        """End the grant here and free the registered memory.  What a request under way may still be
        sent from, or land in, is left to the protection domain, which ends it after the queue pair;
        so is all of it where the queue pair broke."""
        if not self.wait_completed():
            self._writes_left = True
        self.end_grant()
        self._acks.region.deregister()
        if self._writes_left or self._router._status != 0:
            return
        landing = self._reservation.landing if self._reservation is not None else None
        for region in (self._buffer.region, landing, self._notices):
            if region is not None:
                region.deregister()
