# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One-sided producing, exclusive and shared (KafkaDirect §4.2.2).

Owns: the send buffer, the requests under way and the acknowledgement ring of one partition's grants
(`FileWriter`); `kdirect.client.ack_router` tells it that the ring has news.  What may not enter:
requests to the broker, choice of partitions, retries.

A request is one WRITE_WITH_IMM of one or more record batches; its immediate data is ``file id << 16
| order``.  With notices (`rdma.notify=send`) it is a plain WRITE and a SEND of file id, order and
length; the SEND's completion counts as the request's.  An exclusive writer counts position and
order itself.  A shared one reserves both on the head's word, by FETCH_AND_ADD or COMPARE_AND_SWAP,
when the bytes are encoded and room for the WRITE is sure, so that a reservation is followed by its
WRITE at once; one covers a whole request, however many batches it has.  A reservation beyond the
file's end has no WRITE: the file is full.  The acknowledgement is an entry that the broker WRITEs
into this grant's ring; the immediate data ``file id << 16 | entries`` of that WRITE says whose ring
has how many new ones.

An exclusive writer may be granted the *next* file while it fills the present one (`open_next`):
then a file that is full costs it nothing, and it goes on at the start of the next.  Each of the two
has a file id, orders and half of the acknowledgement ring of its own.  There are never more than
two: the next is only opened when every request to the one before the present is answered, because
their ring is used again.

Memory.  A request's bytes lie in the send buffer (`send_buffer`), a ring, until both its WRITE has
completed (until then the transport owns them, also when the writer is closed: an acknowledgement
may overtake the completion, and the RNIC may still send them again) and its acknowledgement has
come (until then they are kept so that a revoked request can be repeated elsewhere; those of a
refused one and all behind it until `take_failures`).  A large value is not copied there where the
transport reads it during the post, from where the caller has it, and never after
(`c_post_write_imm_inline`): of it the caller's `bytes`, which cannot change, are kept so long in
place of a copy.  The acknowledgement ring is registered for remote writes; entry i is valid from
the completion that announces it until `drain` has read it, and cannot be overwritten before: the
broker has at most as many entries under way as requests, and requests are bounded by the ring.  The
8 bytes where a reservation lands belong to the transport from its post to its completion, as does
each notice: request i of the window has entry i.

There is no lock.  A router and its writers belong to one producer, and every call is made with that
producer's lock held.
"""

from libc.errno cimport EAGAIN, ENOMEM
from libc.stdint cimport INT64_MAX, UINT32_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec

from kdirect.client.ack_router cimport CLAIM, DATA, FILES, AckReceiver, AckRouter
from kdirect.client.idempotence cimport ProducerIdentity, add_one
from kdirect.client.send_buffer cimport SendBuffer, request_t
from kdirect.format.batch cimport encode_single, encode_single_around
from kdirect.format.layout cimport (
    ACK_BASE_OFFSET, ACK_BYTES, ACK_ERROR, ACK_FILE_ID, ACK_FLAG_RECALLED, ACK_FLAG_REVOKED, ACK_FLAGS, ACK_BATCHES, ACK_ORDER, ACK_SEQUENCE,
    IMM_FILE_ID_SHIFT, NOTICE_BYTES, NOTICE_FILE_ID, NOTICE_LENGTH, NOTICE_ORDER, SHARED_ORDER_SHIFT, SHARED_WORD_BYTES,
)
from kdirect.rdma.contract cimport WC_RETRY_EXC_ERR, MemoryRegion, QueuePair

from kdirect.errors import ClosedError, ProtocolError, QueuePairError, RevokedError, TimedOutError

cdef extern from *:
    """
    #if defined(__x86_64__) || defined(__i386__)
    #define kd_pause() __builtin_ia32_pause()
    #else
    #define kd_pause() ((void) 0)
    #endif
    """
    void kd_pause() nogil

cdef enum:
    SINGLE_OVERHEAD = 128      # a batch of one record without headers: 61 + at most 7 varints

    # Values from so many bytes on are left to the transport to copy: below it a second copy is as
    # cheap as a reference to keep.
    INLINE_FROM = 8192

    OK = 0
    NO_ROOM_FILE = 1           # the head file has no room, or access is recalled: flush, then ask for a new one
    NO_ROOM_BUFFER = 2         # the send buffer or the window is full: wait for acknowledgements
    NOT_GRANTED = 3            # access has ended, or a request was refused
    BROKEN = 4
    SENT_AND_ASK = 5           # as OK, and now is the time to ask for the next file

    DUPLICATE_SEQUENCE_NUMBER = 46   # committed before

cdef uint64_t ONE_ORDER = <uint64_t> 1 << SHARED_ORDER_SHIFT
cdef uint64_t POSITION_MASK = ONE_ORDER - 1


cdef inline int64_t _now_ns(int clock) noexcept nogil:
    cdef timespec ts
    clock_gettime(<int> clock, &ts)
    return <int64_t> ts.tv_sec * 1000000000 + ts.tv_nsec


cdef class FileWriter(AckReceiver):
    """Writes to one granted head file.  Life: construct per partition, `open` for each grant,
    `close`.

    Sequence numbers count the requests of the writer's whole life from 0; `acknowledged` is the
    number of requests answered, with success or a refusal.  After a refusal no more is sent until
    `take_failures()`; after a revocation none at all: `unacknowledged()` returns the requests to
    repeat.
    """

    cdef AckRouter _router
    cdef QueuePair _qp
    cdef SendBuffer _buffer
    cdef MemoryRegion _ring
    cdef int64_t* _offsets
    cdef uint64_t _window                              # a power of two
    cdef readonly uint64_t appended, acknowledged
    cdef uint64_t _sends_done, _freed                  # WRITEs completed; requests whose bytes are free again: the lesser of both counts
    cdef uint64_t _grant_first                         # sequence number of this grant's order 0
    cdef uint64_t _ring_entries, _ring_read            # entries of each half of the ring; how many were read of this file's half
    cdef uint64_t _ring_half                           # the first entry of this file's half: 0 or `_ring_entries`
    cdef uint64_t _other_read                          # entries read of the other half
    cdef int _other_file                               # whose acknowledgements come into the other half: of the file before or of the next; -1: nobody's
    cdef bint _has_next                                # it is the next file, on which nothing was sent yet
    cdef uint64_t _next_address
    cdef uint32_t _next_rkey
    cdef int64_t _next_length
    cdef bint _asks
    cdef int64_t _ask_at                               # the position at which to ask for the next file; INT64_MAX: not
    cdef readonly int file_id
    cdef readonly uint64_t address
    cdef readonly uint32_t rkey
    cdef readonly int64_t length, position
    cdef readonly bint granted
    cdef readonly bint revoked
    cdef readonly bint shared
    cdef readonly bint full                            # shared: a reservation has passed the file's end
    cdef readonly bint recalled                        # the broker wants the grant back
    cdef readonly int end_order                        # of the first reservation that passed the end, and its position; -1: not ours
    cdef readonly int64_t end_position
    cdef public bint compare_and_swap                  # reserve by COMPARE_AND_SWAP
    cdef public ProducerIdentity identity              # stamps what is sent; None: no idempotence
    cdef MemoryRegion _landing                         # where a reservation lands
    cdef MemoryRegion _notices                         # an entry a request of the window; None: requests have immediate data
    cdef readonly uint64_t word_address
    cdef readonly uint32_t word_rkey
    cdef uint64_t _word                                # its last value seen
    cdef uint64_t _limit                               # requests under way that the grant allows
    cdef readonly uint64_t failures                    # refused requests not taken yet
    cdef uint64_t _first_failure
    cdef readonly uint64_t reservations
    cdef bint _desynchronised
    cdef readonly int64_t last_offset_base             # base offset of the last acknowledged request
    cdef readonly uint64_t records_acknowledged, bytes_acknowledged   # with success
    cdef readonly uint64_t requests_acknowledged, records_answered
    cdef readonly uint64_t files_ahead                 # files that it went on in, which it had been granted ahead
    cdef bint _writes_left                             # requests were given up whose WRITEs may be under way
    cdef readonly str name

    def __cinit__(self):
        self._offsets = NULL

    def __init__(self, name, AckRouter router, QueuePair qp, MemoryRegion ring, int window):
        cdef uint64_t n = 1
        while n < <uint64_t> window:
            n *= 2
        if ring.length < 4 * n * ACK_BYTES:
            raise ValueError("each half of the acknowledgement ring must hold twice the window")
        self.name = name
        self._router = router
        self._qp = qp
        self._ring = ring
        self._window = n
        self._limit = n
        self._ring_entries = 2 * n
        self._buffer = SendBuffer(n)
        self._offsets = <int64_t*> calloc(n, sizeof(int64_t))
        if self._offsets == NULL:
            raise MemoryError()
        self.file_id = self._other_file = -1
        self.last_offset_base = -1
        self._ask_at = INT64_MAX

    def __dealloc__(self):
        free(self._offsets)

    @property
    def ring_entries(self):
        """Entries of the half of the acknowledgement ring that a grant uses."""
        return self._ring_entries

    @property
    def other_half(self):
        """Where the half of the ring begins, in bytes, that the next file's grant uses; the first
        grant uses the first."""
        return (self._ring_half ^ self._ring_entries) * ACK_BYTES

    @property
    def in_flight(self):
        """Requests not acknowledged."""
        return self.appended - self.acknowledged

    @property
    def has_landing(self):
        return self._landing is not None

    def set_landing(self, MemoryRegion landing):
        """8 bytes where reservations land, which a shared grant needs."""
        self._landing = landing

    def set_notices(self, MemoryRegion notices):
        """Announce requests by a SEND from this memory of one notice a request of the window.
        Before the first request."""
        if notices.length < self._window * NOTICE_BYTES:
            raise ValueError("the memory for notices is smaller than the window")
        self._notices = notices

    def set_buffer(self, MemoryRegion buffer):
        """Give the writer its send buffer; no request may be under way.  QueuePairError when a
        WRITE does not complete: its completion would free bytes of the new buffer."""
        if self.appended != self.acknowledged:
            raise ValueError("requests are under way")
        self._require_settled()
        cdef MemoryRegion old = self._buffer.region
        self._buffer.set_region(buffer)
        if old is not None:
            old.deregister()

    @property
    def buffer_bytes(self):
        """Size of the send buffer: no request may be larger."""
        return self._buffer.capacity

    def open(self, int file_id, int64_t address, int64_t rkey, int64_t length, int64_t position, int64_t word_address=0, int64_t word_rkey=0,
             int window=0):
        """Start on a new grant; there must be no unacknowledged request.  With a `word_address` it
        is shared.  `window`: requests that may be under way (0: as many as the writer was made
        for).  The grant's acknowledgements come into the first half of the ring."""
        if self.appended != self.acknowledged:
            raise ValueError("requests are under way")
        self._check_grant(file_id, address, rkey, length, position)
        if word_address != 0 and (self._landing is None or word_address < 0 or word_address & 7 or not 0 <= word_rkey <= <int64_t> UINT32_MAX):
            raise ProtocolError(f"{self.name}: the broker granted a shared word at address {word_address:#x}",
                                hint="broker and client are of different versions")
        self._require_settled()  # completions are told apart by file id
        self._detach()
        self.file_id = file_id
        self.address = <uint64_t> address
        self.rkey = <uint32_t> rkey
        self.length = length
        self.position = position
        self._ring_read = self._ring_half = 0
        self._grant_first = self.appended
        self.revoked = self.recalled = self.full = False
        self.shared = word_address != 0
        self.word_address = <uint64_t> word_address
        self.word_rkey = <uint32_t> word_rkey
        self._word = <uint64_t> position
        self._limit = min(self._window, <uint64_t> window) if window > 0 else self._window
        self.end_order = -1
        self.end_position = -1
        self._desynchronised = False
        self._ask_at = INT64_MAX
        self._asks = False
        self.granted = True
        self._router.attach(file_id, self)

    cdef _check_grant(self, int file_id, int64_t address, int64_t rkey, int64_t length, int64_t position):
        if not 0 <= file_id < FILES:     # the router's table of writers has no bounds of its own
            raise ProtocolError(f"{self.name}: the broker granted file {file_id}", hint="broker and client are of different versions")
        if not 0 <= position <= length:
            raise ProtocolError(f"{self.name}: the broker granted position {position} of a file of {length} bytes",
                                hint="broker and client are of different versions")
        if address < 0 or address > INT64_MAX - length or not 0 <= rkey <= <int64_t> UINT32_MAX:
            raise ProtocolError(f"{self.name}: the broker granted {length} bytes at address {address} under key {rkey}",
                                hint="broker and client are of different versions")

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
        if self.shared or not self.granted or self._has_next or self.acknowledged < self._grant_first:
            raise ValueError("the next file cannot be opened now")
        self._check_grant(file_id, address, rkey, length, 0)
        if file_id == self.file_id:  # that of the file before, which has ended, may be in use again
            raise ProtocolError(f"{self.name}: the broker granted file {file_id} twice", hint="broker and client are of different versions")
        # The completions of the WRITEs to the file before come under its id, and before those of
        # the present one.
        while self._sends_done < self._grant_first and self._router._status == 0:
            with nogil:
                self._router.c_drain()
            if self._sends_done < self._grant_first and self._router._status == 0:
                self._router._send_cq.wait(10, 20)
        if self._other_file >= 0:
            self._router.detach(self._other_file)
        self._other_file = file_id
        self._other_read = 0
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
        self._ring_read, self._other_read = self._other_read, self._ring_read
        self._ring_half ^= self._ring_entries
        self.address = self._next_address
        self.rkey = self._next_rkey
        self.length = self._next_length
        self.position = 0
        self._grant_first = self.appended
        self._has_next = False
        self.files_ahead += 1
        self._ask_at = self.length // 2 if self._asks else INT64_MAX

    cdef _detach(self):
        self._router.detach(self.file_id)
        if self._other_file >= 0:
            self._router.detach(self._other_file)
        self._other_file = -1
        self._has_next = False

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
        cdef uint64_t first = self._ring_half if present else self._ring_half ^ self._ring_entries
        cdef uint64_t* read = &self._ring_read if present else &self._other_read
        cdef const uint8_t* e
        cdef uint32_t sequence, batches
        cdef uint16_t order, error, flags, i
        cdef int64_t base
        cdef request_t* r
        cdef int n = 0
        for i in range(count):
            e = self._ring.data + (first + (read[0] & (self._ring_entries - 1))) * ACK_BYTES
            memcpy(&sequence, e + ACK_SEQUENCE, 4)
            memcpy(&order, e + ACK_ORDER, 2)
            memcpy(&error, e + ACK_ERROR, 2)
            memcpy(&flags, e + ACK_FLAGS, 2)
            memcpy(&batches, e + ACK_BATCHES, 4)
            memcpy(&base, e + ACK_BASE_OFFSET, 8)
            if sequence != <uint32_t> read[0]:
                self._desynchronised = True
                return n
            read[0] += 1
            if flags & ACK_FLAG_REVOKED:
                self.revoked = True
            if flags & ACK_FLAG_RECALLED:
                self.recalled = True
            if batches == 0 and error == 0:
                continue                      # a notice, not an answer
            r = self._buffer.c_request(self.acknowledged)
            # The broker commits the file before to its end before it begins with the present one.
            if self.acknowledged >= self.appended or order != r.order or present != (self.acknowledged >= self._grant_first):
                self._desynchronised = True
                return n
            self._offsets[self.acknowledged & (self._window - 1)] = base
            self.records_answered += r.records
            if error != 0 and error != DUPLICATE_SEQUENCE_NUMBER:
                r.error = <int16_t> error
                if self.failures == 0:
                    self._first_failure = self.acknowledged
                self.failures += 1
            else:
                self.last_offset_base = base
                self.records_acknowledged += r.records
                self.bytes_acknowledged += r.length
                self.requests_acknowledged += 1
            self.acknowledged += 1
            self._router.requests_under_way -= 1
            n += 1
        self.c_release()
        return n

    cdef void c_send_done(self) noexcept nogil:
        self._sends_done += 1
        self.c_release()

    cdef void c_release(self) noexcept nogil:
        """Free the bytes of requests that are both completed and acknowledged, up to the first that
        was refused."""
        cdef uint64_t upto = self.acknowledged if self.acknowledged < self._sends_done else self._sends_done
        if self.failures and self._first_failure < upto:
            upto = self._first_failure
        if upto > self._freed:
            self._freed = upto
            self._buffer.c_free(upto, self.appended)

    cdef int c_reserve(self, uint64_t n, uint64_t* start) noexcept nogil:
        """Room for `n` contiguous bytes of the send buffer and one request; OK or why not."""
        if not self.granted or self.revoked or self.failures != 0 or self._desynchronised:
            return NOT_GRANTED
        if self._router._status != 0:
            return BROKEN
        if self.full or self.recalled:
            return NO_ROOM_FILE
        if not self.shared and self.position + <int64_t> n > self.length:
            if not self._has_next or <int64_t> n > self._next_length:
                return NO_ROOM_FILE
            self.c_go_on()
        if self.appended - self._freed >= self._window or self.appended - self.acknowledged >= self._limit or self._router.requests_under_way >= self._router.limit:
            return NO_ROOM_BUFFER
        return OK if self._buffer.c_reserve(n, start) else NO_ROOM_BUFFER

    cdef int c_claim_post(self, uint32_t length) noexcept nogil:
        """Post the atomic that reserves `length` bytes and an order."""
        cdef uint64_t id = (<uint64_t> CLAIM << 32) | <uint64_t> self.file_id
        cdef uint64_t add = ONE_ORDER + length
        cdef int rc
        self.claimed = False
        while True:
            if self.compare_and_swap:
                rc = self._qp.c_post_compare_swap(id, self._landing.address, self._landing.lkey, self.word_address, self.word_rkey,
                                                  self._word, self._word + add)
            else:
                rc = self._qp.c_post_fetch_add(id, self._landing.address, self._landing.lkey, self.word_address, self.word_rkey, add)
            if rc != ENOMEM:
                break
            self._router.c_drain()
            if self._router._status != 0:
                return BROKEN
            kd_pause()
        if rc != 0:
            if self._router._status == 0:
                self._router._status = <uint32_t> (1000 + rc)
            return BROKEN
        self._router.sends_under_way += 1
        return OK

    cdef int c_claim_taken(self, uint32_t length, uint64_t* position, uint16_t* order) noexcept nogil:
        """The atomic has completed: OK and what was reserved, NO_ROOM_FILE, NOT_GRANTED (access
        ended meanwhile) or NO_ROOM_BUFFER (another was faster to swap: once more)."""
        cdef uint64_t old
        memcpy(&old, self._landing.data, SHARED_WORD_BYTES)
        position[0] = old & POSITION_MASK
        order[0] = <uint16_t> (old >> SHARED_ORDER_SHIFT)
        if position[0] + length > <uint64_t> self.length:
            self.full = True
            if position[0] <= <uint64_t> self.length and not self.compare_and_swap:
                self.end_order = order[0]
                self.end_position = <int64_t> position[0]
            return NO_ROOM_FILE
        if self.compare_and_swap and old != self._word:
            self._word = old
            return NO_ROOM_BUFFER
        self._word = old + ONE_ORDER + length
        self.reservations += 1
        return NOT_GRANTED if self.revoked else OK

    cdef int _claim(self, uint32_t length, uint64_t* position, uint16_t* order) except -1:
        """Reserve; returns as `c_claim_taken`.  Waits for the atomic however long it takes: once
        posted it may have happened."""
        cdef int rc
        cdef int64_t spin_until
        while True:
            if self.compare_and_swap and (self._word & POSITION_MASK) + length > <uint64_t> self.length:
                self.full = True
                return NO_ROOM_FILE
            with nogil:
                rc = self.c_claim_post(length)
            while rc == OK and not self.claimed and self._router._status == 0:
                with nogil:
                    spin_until = _now_ns(CLOCK_MONOTONIC) + self._router._spin_ns
                    while True:
                        self._router.c_drain()
                        if self.claimed or self._router._status != 0 or _now_ns(CLOCK_MONOTONIC) >= spin_until:
                            break
                        kd_pause()
                if not self.claimed and self._router._status == 0:
                    self._router._send_cq.wait(100, 0)
            if rc != OK or self._router._status != 0:
                return BROKEN
            rc = self.c_claim_taken(length, position, order)
            if rc != NO_ROOM_BUFFER:
                return rc

    cdef int c_send(self, uint64_t start, uint32_t length, uint32_t records, uint64_t position, uint16_t order,
                    uint32_t hole=0, const uint8_t* value=NULL, uint32_t value_length=0) noexcept nogil:
        """Post the request whose bytes are at `start` of the send buffer, but for a `value` that
        belongs into its `hole`, if it has one. OK, NO_ROOM_BUFFER (the send queue is full; not
        after a reservation, which must be followed by its WRITE, nor a WRITE that its notice must
        follow) or BROKEN.  A hole that the transport did not fill from `value` is filled here; else
        the request has one."""
        cdef uint32_t imm = (<uint32_t> self.file_id << IMM_FILE_ID_SHIFT) | order
        cdef bint full = False, written = False
        cdef int rc
        cdef request_t* r
        cdef uint64_t notice = 0
        cdef uint16_t file_id = <uint16_t> self.file_id
        if self._notices is not None:
            notice = (self.appended & (self._window - 1)) * NOTICE_BYTES
            memcpy(self._notices.data + notice + NOTICE_FILE_ID, &file_id, 2)
            memcpy(self._notices.data + notice + NOTICE_ORDER, &order, 2)
            memcpy(self._notices.data + notice + NOTICE_LENGTH, &length, 4)
        while True:
            if hole:
                rc = self._qp.c_post_write_imm_inline(<uint64_t> self.file_id, self._buffer.region.address + start, self._buffer.region.lkey, length,
                                                      hole, value, value_length, self.address + position, self.rkey, imm)
                if rc == EAGAIN:
                    memcpy(self._buffer.region.data + start + hole, value, value_length)
                    hole = 0
                    continue
            elif self._notices is None:
                rc = self._qp.c_post_write_imm(<uint64_t> self.file_id, self._buffer.region.address + start, self._buffer.region.lkey, length,
                                               self.address + position, self.rkey, imm)
            elif written:
                rc = self._qp.c_post_send(<uint64_t> self.file_id, self._notices.address + notice, self._notices.lkey, NOTICE_BYTES)
            else:
                rc = self._qp.c_post_write((<uint64_t> DATA << 32) | <uint64_t> self.file_id, self._buffer.region.address + start, self._buffer.region.lkey,
                                           length, self.address + position, self.rkey)
                if rc == 0:
                    self._router.sends_under_way += 1
                    written = True
                    continue
            if rc != ENOMEM:
                break
            if full and not (self.shared or written):
                return NO_ROOM_BUFFER
            full = True
            self._router.c_drain()
            if self._router._status != 0:
                return BROKEN
            kd_pause()
        if rc != 0:
            if self._router._status == 0:
                self._router._status = <uint32_t> (1000 + rc)
            return BROKEN
        self._router.sends_under_way += 1
        self._router.requests_under_way += 1
        r = self._buffer.c_request(self.appended)
        r.start = start
        r.length = length
        r.records = records
        r.hole = hole
        r.order = order
        r.error = 0
        self.appended += 1
        self.position = <int64_t> position + length
        self._buffer.c_take(start, length)
        return OK

    cdef _keep(self, bytes value):
        """Hold on to the value of the request that was just sent, if its hole was left and it is
        not done with already."""
        cdef uint64_t sequence = self.appended - 1
        self._buffer.drop(self._freed)
        if self._freed <= sequence and self._buffer.c_request(sequence).hole:
            self._buffer.keep(sequence, value)

    cdef int c_sent(self) noexcept nogil:
        """What to return for a request that was sent."""
        if self.position < self._ask_at:
            return OK
        self._ask_at = INT64_MAX
        return SENT_AND_ASK

    cpdef int try_record(self, value, key=None, int64_t timestamp_ms=-1) except -1:
        """Send one record as a batch of its own.  Returns OK (0), NO_ROOM_FILE (1), NO_ROOM_BUFFER
        (2), NOT_GRANTED (3), BROKEN (4) or SENT_AND_ASK (5; see `ask_when_half_full`); only 0 and 5
        took the record.  `value` and `key` are bytes or None; `timestamp_ms` -1 is now."""
        cdef const uint8_t* v = NULL
        cdef const uint8_t* k = NULL
        cdef int64_t vn = -1, kn = -1, size, producer_id = -1
        cdef int16_t epoch = -1
        cdef int32_t sequence = -1
        cdef uint64_t start = 0, position = 0
        cdef uint32_t hole = 0
        cdef uint16_t order = 0
        cdef ProducerIdentity identity = self.identity
        cdef int rc
        self._buffer.drop(self._freed)
        if identity is not None:
            producer_id, epoch, sequence = identity.producer_id, identity.epoch, identity.next_sequence
        if value is not None:
            if not PyBytes_CheckExact(value):
                value = bytes(value)
            v = <const uint8_t*> PyBytes_AS_STRING(value)
            vn = PyBytes_GET_SIZE(value)
        if key is not None:
            if not PyBytes_CheckExact(key):
                key = bytes(key)
            k = <const uint8_t*> PyBytes_AS_STRING(key)
            kn = PyBytes_GET_SIZE(key)
        size = (vn if vn > 0 else 0) + (kn if kn > 0 else 0) + SINGLE_OVERHEAD
        with nogil:
            if timestamp_ms < 0:
                timestamp_ms = _now_ns(CLOCK_REALTIME) // 1000000
            # News of a revocation: a WRITE under a key that has ended breaks the queue pair.  In a
            # stream they come with the acknowledgements.
            if self.shared or self.appended == self.acknowledged:
                self._router.c_drain()
            rc = self.c_reserve(<uint64_t> size, &start)
            if rc == NO_ROOM_BUFFER:
                self._router.c_drain()
                rc = self.c_reserve(<uint64_t> size, &start)
            if rc == OK:
                if vn >= INLINE_FROM and self._notices is None:
                    size = encode_single_around(self._buffer.region.data + start, <size_t> size, k, kn, v, vn, timestamp_ms, producer_id, epoch,
                                                sequence, &hole)
                else:
                    size = encode_single(self._buffer.region.data + start, <size_t> size, k, kn, v, vn, timestamp_ms, producer_id, epoch, sequence)
                if not self.shared:
                    rc = self.c_send(start, <uint32_t> size, 1, <uint64_t> self.position, <uint16_t> (self.appended - self._grant_first),
                                     hole, v, <uint32_t> vn)
                    if (self.appended & 15) == 0:
                        self._router.c_drain()
        if rc == OK and self.shared:
            rc = self._claim(<uint32_t> size, &position, &order)
            if rc == OK:
                with nogil:
                    rc = self.c_send(start, <uint32_t> size, 1, position, order, hole, v, <uint32_t> vn)
        if rc == OK and hole:
            self._keep(value)
        if rc == OK and identity is not None:
            identity.c_sent(add_one(sequence))
        return self.c_sent() if rc == OK else rc

    cpdef int try_batches(self, data, uint32_t records) except -1:
        """Send encoded record batches (a contiguous buffer of whole batches) as one request.
        Returns as `try_record`."""
        cdef const uint8_t[::1] view = data
        cdef uint64_t n = <uint64_t> view.shape[0]
        cdef uint64_t start = 0, position = 0
        cdef uint16_t order = 0
        cdef int32_t sequence = 0
        cdef ProducerIdentity identity = self.identity
        cdef bint stamped = identity is not None
        cdef int rc
        if n == 0:
            return OK
        self._buffer.drop(self._freed)
        if n > self._buffer.capacity or n > <uint64_t> 0x7FFFFFFF:
            raise ValueError(f"a request of {n} bytes is larger than the send buffer of {self._buffer.capacity}")
        with nogil:
            self._router.c_drain()
            rc = self.c_reserve(n, &start)
            if rc == OK:
                memcpy(self._buffer.region.data + start, &view[0], n)
                if stamped:
                    sequence = identity.c_stamp(self._buffer.region.data + start, n)
                if not self.shared:
                    rc = self.c_send(start, <uint32_t> n, records, <uint64_t> self.position, <uint16_t> (self.appended - self._grant_first))
        if rc == OK and self.shared:
            rc = self._claim(<uint32_t> n, &position, &order)
            if rc == OK:
                with nogil:
                    rc = self.c_send(start, <uint32_t> n, records, position, order)
        if rc == OK and stamped:
            identity.c_sent(sequence)
        return self.c_sent() if rc == OK else rc

    cdef bint c_stuck(self) noexcept nogil:
        return self.revoked or self.failures != 0 or self._desynchronised or self._router._status != 0

    def wait_answers(self, int64_t timeout_ms):
        """Wait, for a while, until every request is answered, whether with success or not; True
        when they are.  False when some will not be: access was revoked, or the queue pair broke."""
        cdef int64_t deadline = _now_ns(CLOCK_MONOTONIC) + timeout_ms * 1000000
        while self.acknowledged < self.appended and not (self.revoked or self._desynchronised or self._router._status != 0):
            with nogil:
                self._router.c_drain()
            if self.acknowledged < self.appended and _now_ns(CLOCK_MONOTONIC) >= deadline:
                return False
            if self.acknowledged < self.appended:
                self._router._recv_cq.wait(10, 0)
        return self.acknowledged == self.appended

    def wait_acknowledged(self, uint64_t sequence, int64_t timeout_ms):
        """Wait until `acknowledged` > `sequence`.  True; False when the writer cannot go on
        (revoked, a request refused, broken). TimedOutError after `timeout_ms`.  Spins for the
        router's spin time, then sleeps."""
        cdef int64_t now, deadline, spin_until
        cdef int n
        self._buffer.drop(self._freed)
        if self.acknowledged > sequence and not self.failures:
            return True
        now = _now_ns(CLOCK_MONOTONIC)
        deadline = now + timeout_ms * 1000000
        spin_until = now + self._router._spin_ns
        while True:
            with nogil:
                while True:
                    n = self._router.c_drain()
                    if self.acknowledged > sequence or self.c_stuck():
                        break
                    now = _now_ns(CLOCK_MONOTONIC)
                    if n > 0:
                        spin_until = now + self._router._spin_ns
                    if now >= spin_until:
                        break
                    kd_pause()
            self._buffer.drop(self._freed)
            if self.acknowledged > sequence and not self.failures:
                return True
            if self.c_stuck():
                return False
            if now >= deadline:
                raise TimedOutError(f"{self.name}: no acknowledgement within {timeout_ms} ms", hint="the broker may be stopped or overloaded; the records may still be committed")
            self._router._recv_cq.wait(max(1, min(1000, (deadline - now) // 1000000)), 0)
            spin_until = 0

    def offset_of(self, uint64_t sequence):
        """Base offset of an acknowledged request; only the last window of them is remembered."""
        if not (sequence < self.acknowledged <= sequence + self._window):
            raise ValueError(sequence)
        return self._offsets[sequence & (self._window - 1)]

    def unacknowledged(self):
        """[(bytes, records)] of the requests not answered, in order."""
        cdef uint64_t s
        return [(self._buffer.copy(s), self._buffer.c_request(s).records) for s in range(self.acknowledged, self.appended)]

    def refused(self, uint64_t sequence):
        """Was this request, which is answered and not taken yet, refused?"""
        return self._buffer.c_request(sequence).error != 0

    def take_failures(self):
        """[(sequence number, bytes, records, error code)] of the refused requests, in order; the
        writer may go on then."""
        cdef uint64_t s
        cdef request_t* r
        out = []
        if self.failures:
            for s in range(self._first_failure, self.acknowledged):
                r = self._buffer.c_request(s)
                if r.error:
                    out.append((s, self._buffer.copy(s), r.records, r.error))
                    r.error = 0
        self.failures = 0
        self.c_release()
        self._buffer.drop(self._freed)
        return out

    def forget(self):
        """Give up the unacknowledged requests (the caller took them by `unacknowledged`); the
        writer can only be closed then."""
        if not self.settle():
            self._writes_left = True
        self._router.requests_under_way -= self.appended - self.acknowledged
        self.failures = 0
        self.appended = self._sends_done = self._freed = self.acknowledged
        self._buffer.clear()

    def settle(self, int timeout_ms=1000):
        """Wait until no WRITE of this writer is under way, so that its memory is its own again;
        True when it is.  False: an RNIC may still send them again, for seconds, or the queue pair
        broke, with which they end."""
        cdef int64_t deadline = _now_ns(CLOCK_MONOTONIC) + timeout_ms * <int64_t> 1000000
        while self._sends_done < self.appended and self._router._status == 0 and _now_ns(CLOCK_MONOTONIC) < deadline:
            with nogil:
                self._router.c_drain()
            if self._sends_done < self.appended and self._router._status == 0:
                self._router._send_cq.wait(10, 20)
        return self._sends_done >= self.appended

    cdef _require_settled(self):
        """What is acknowledged has arrived; a queue pair over which its completion does not come is
        replaced like a broken one."""
        if self.settle():
            return
        if self._router._status == 0:
            self._router._status = WC_RETRY_EXC_ERR
        raise QueuePairError(f"{self.name}: WRITEs that the broker has acknowledged do not complete",
                             hint="the path to the broker loses packets; a new queue pair is opened")

    def close(self):
        """End the grant here and free the registered memory.  What a request under way may still be
        sent from, or land in, is left to the protection domain, which ends it after the queue pair;
        so is all of it where the queue pair broke."""
        if not self.settle():
            self._writes_left = True
        self.end_grant()
        self._ring.deregister()
        if self._writes_left or self._router._status != 0:
            return
        for region in (self._buffer.region, self._landing, self._notices):
            if region is not None:
                region.deregister()
