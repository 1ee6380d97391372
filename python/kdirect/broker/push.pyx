# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Pushing records to followers by one-sided WRITEs (KafkaDirect §4.3.2).

Owns: for each partition that this broker leads (`Pushing`) a ring of WRITEs to each follower
(`PushRing`, a `ProduceRing`), and for each follower broker the queue pair that its rings share
(`PushLink`).  As soon as a run of requests is committed, what lies between the position up to which
was pushed and the log's end goes to each follower from the leader's own mapping, at the same
position of the same segment: no copy is made, and nothing is encoded.  What may not enter: who
follows and who is in sync (`kdirect.cluster`), grants, files.

One WRITE_WITH_IMM carries what is contiguous, in whole batches, up to `most_bytes` (one batch that
is longer goes alone): pieces are cut by the lengths in the batches' headers.  Its immediate data is
that of a produce request, ``file id << 16 | order``; to its produce worker a follower's head is one
with an exclusive producer, whose requests are committed as they are stamped
(`kdirect.broker.push_tables`).

Each WRITE has its mark, where it ends: (segment, position, offset).  The follower acknowledges
cumulatively, by entries of the layout of acknowledgements (one for a run of commits): its base
offset is the offset at which the follower's log ends.  That must be the mark of a WRITE under way;
everything up to it is confirmed, and gives its credit back.  A follower that says otherwise is
desynchronised, and its link is to be cut: nothing that it says can be trusted.  An entry with an
error says that a WRITE was refused, for instance because its bytes were damaged on the way; then
the ring has ended, and the follower asks for records again from where its log ends, in a new ring.
A ring that its follower ends in good order, or its owner, is ENDED: nothing went wrong with it.

A roll waits for nobody: `add_source` names the next segment, `grant_ahead` the follower's file for
it.  When everything of a segment is posted the ring goes on at position 0 of the next one.  Without
a file for it the ring waits (`wants_file`), and only this follower falls back.  There are two files
at a time, as of a producer: the present one, and the next or the one before, each with its half of
the acknowledgement ring.

The high watermark goes to the follower by a plain WRITE of a slot (`kdirect.log.replica_marks`),
when nothing else is under way, or with every n-th WRITE of records.

Memory.  A source belongs to the transport while a WRITE from it is under way, and must stay mapped
and registered until `sources_done` has passed it, or the queue pair is closed.  The ring of
acknowledgements is written by the follower; an entry is read after the completion that announces
it.  It cannot be overwritten before: an entry acknowledges at least one WRITE, and half a ring
holds twice the window.  The slot's image belongs to the transport until its completion.

Threads: as of its worker's tables; every C method is called with the worker's lock held.
"""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kdirect.format.layout cimport (
    ACK_BASE_OFFSET, ACK_BYTES, ACK_ERROR, ACK_FLAG_REVOKED, ACK_FLAGS, ACK_SEQUENCE,
    IMM_FILE_ID_SHIFT, SLOT_BYTES)
from kdirect.format.wire cimport kd_get32, kd_get64
from kdirect.log.kernel cimport CommitKernel
from kdirect.log.replica_marks cimport (
    MOST_REPLICAS, ReplicaMarks, high_watermark_slot, log_end_mark)
from kdirect.log.state cimport mark_t
from kdirect.rdma.contract cimport (
    WC_RECV_RDMA_WITH_IMM, WC_SUCCESS, MemoryRegion, QueuePair, work_completion)
from kdirect.wire.ack_router cimport DATA, AckReceiver, AckRouter
from kdirect.rdma.credit_ring cimport POST_FAILED, POSTED, source_t, target_t
from kdirect.wire.produce_ring cimport ProduceRing, large_value_t, request_imm

from kdirect.broker.reasons import Reason
from kdirect.errors import LogError

cdef enum:
    BATCH_PREFIX = 12         # base offset and length, which the length does not count
    RING_LACKS = 5            # one more state of a ring: a segment could not be named to it


class PushState(Reason):
    """Why a ring pushes no more."""

    PUSHING = RING_PUSHING, "it pushes"
    REFUSED = RING_REFUSED, "the follower refused records"
    DESYNCHRONISED = RING_DESYNCHRONISED, "the follower acknowledged what it never got"
    BROKEN = RING_BROKEN, "its queue pair is broken"
    ENDED = RING_ENDED, "it was ended"
    LACKS = RING_LACKS, "it lacks segments that are not pushed"


cdef class PushLink(AckRouter):
    """The queue pair to one follower broker, which all rings to it share.  Its completions are
    polled by the produce worker, with those of all others.  `limit`: WRITEs under way of all rings
    together, the receives that the follower keeps posted."""

    def __init__(self, int broker, QueuePair qp, int receives, int limit):
        AckRouter.__init__(self, qp, qp.send_cq, qp.recv_cq, receives, limit)
        self.broker = broker

    @property
    def qp_num(self):
        return self._qp.qp_num

    @property
    def qp(self):
        return self._qp

    cdef int c_drain(self) noexcept nogil:
        """Completions are the worker's: a ring whose send queue is full goes on after these."""
        return 0

    cdef void* c_take(self, const work_completion* wc) noexcept nogil:
        """A completion of the receive queue: the ring that it has acknowledgements for, or NULL."""
        cdef void* ring
        self._qp.c_post_recv(0, 0, 0, 0)
        if wc.opcode != WC_RECV_RDMA_WITH_IMM:
            return NULL
        ring = self._by_file[<uint16_t> (wc.imm_data >> IMM_FILE_ID_SHIFT)]
        if ring != NULL:
            (<AckReceiver> ring).c_take_acks(
                <uint16_t> (wc.imm_data >> IMM_FILE_ID_SHIFT), <uint16_t> wc.imm_data)
        return ring

    cdef void* c_send_completion(self, const work_completion* wc) noexcept nogil:
        """A completion of the send queue: the ring that was blocked until it came, or NULL."""
        cdef void* ring = self._by_file[<uint16_t> wc.wr_id]
        self.sends_under_way -= 1
        self.sends_done += 1
        if wc.status != WC_SUCCESS and self._status == 0:
            self._status = wc.status
        if ring == NULL:
            return NULL
        if wc.wr_id >> 32 == HIGH_WATERMARK:
            (<PushRing> ring)._image_busy = False
            (<PushRing> ring).c_tell((<PushRing> ring).marks.kernel.c_high_watermark())
        elif wc.wr_id >> 32 != DATA:
            (<AckReceiver> ring).c_send_done()
        return ring if (<PushRing> ring).blocked else NULL


cdef class PushRing(ProduceRing):
    """See the module.  Life: construct, `add_source`, `ProduceWorker.start_push`, ...,
    `ProduceWorker.end_push`; one ring for each grant of a follower.

    `marks`: of the partition; `acks`: memory that the follower WRITEs its acknowledgements into,
    twice `half_entries`, a power of two that is at least twice the window; `image`: 64 bytes for
    the slot.  `file_id`,
    `address` (of position 0), `rkey`, `length`: the follower's head; `segment_base_offset`,
    `position`, `offset`: where its log ends."""

    def __init__(self, PushLink link, ReplicaMarks marks, int window, MemoryRegion acks,
                 uint64_t half_entries, MemoryRegion image, *, uint16_t file_id,
                 uint64_t address, uint32_t rkey,
                 uint64_t length, int64_t segment_base_offset, uint64_t position, int64_t offset,
                 uint32_t most_bytes, uint64_t slot_address=0, uint32_t slot_rkey=0,
                 uint64_t slot_every=8):
        ProduceRing.__init__(self, link, link._qp, window)
        self.link = link
        self.marks = marks
        self.broker = link.broker
        self._window = <mark_t*> malloc(self.window * sizeof(mark_t))
        if self._window == NULL:
            raise MemoryError()
        self._acks = acks
        self._image = image
        self._half = half_entries
        if (half_entries < 2 * self.window or half_entries & (half_entries - 1)
                or acks.length < 2 * half_entries * ACK_BYTES or image.length < SLOT_BYTES):
            raise ValueError("the acknowledgement ring must hold twice the window in each half")
        self._regions = []
        self._outgrown = []
        self._most = most_bytes
        self._pushed.base = segment_base_offset
        self._pushed.position = position
        self._pushed.offset = self.confirmed = offset
        self._slot_address = slot_address
        self._slot_rkey = slot_rkey
        self._slot_every = max(1, slot_every)
        self._told = -1
        self._set_target(0, file_id, address, rkey, length)

    def __dealloc__(self):
        free(self._window)

    cdef _set_target(self, int which, uint16_t file_id, uint64_t address, uint32_t rkey,
                     uint64_t length):
        cdef segment_target* t = &self._targets[which]
        t.file_id = file_id
        t.address = address
        t.rkey = rkey
        t.length = length
        t.order = 0
        t.acks = 0

    # -- what the owner tells; with the worker's lock held once it is started ----------------------

    def add_source(self, int64_t base, MemoryRegion region, uint64_t start=0, *,
                   int64_t size_before=-1, int64_t end_before=-1):
        """The segment that begins at offset `base` lies in `region`, its position 0 at `start` of
        that.  It is the head; the one named before, if there is one, is sealed with `size_before`
        bytes and ends at offset `end_before`.  Segments before the one where the follower's log
        ends are not named.  LogError when the follower lacks the end of too many."""
        cdef segment_source* s
        if self._source_count == MOST_SOURCES:
            raise LogError(f"broker {self.broker} lacks {MOST_SOURCES} segments",
                           hint="let it catch up by READ, then push again")
        if self._source_count:
            s = &self._sources[self._source_count - 1]
            s.size = size_before
            s.end_offset = end_before
        s = &self._sources[self._source_count]
        s.base = base
        s.size = s.end_offset = -1
        s.address = region.address + start
        s.length = region.length - start
        s.lkey = region.lkey
        self._source_count += 1
        self._regions.append(region)

    def renew_source(self, int64_t base, MemoryRegion region):
        """The segment that begins at offset `base` has grown and lies in `region`, from position 0
        on; the memory of before stays this ring's until it is dropped."""
        cdef int i
        for i in range(self._source_count):
            if self._sources[i].base == base:
                self._sources[i].address = region.address
                self._sources[i].length = region.length
                self._sources[i].lkey = region.lkey
                self._outgrown.append(self._regions[i])
                self._regions[i] = region
        self.wants_source = False

    @property
    def regions(self):
        """All that WRITEs of this ring may be under way from; once it has ended they are no more.
        """
        return self._regions + self._outgrown

    def grant_ahead(self, uint16_t file_id, uint64_t address, uint32_t rkey, uint64_t length):
        """The follower's file for the segment after the present one.  False: there is one, or the
        follower has not confirmed everything in the one before the present one yet."""
        if self._has_next or not self._before_is_done():
            return False
        self.link.detach(self._targets[self._present ^ 1].file_id)
        self._set_target(self._present ^ 1, file_id, address, rkey, length)
        self._has_next = True
        self.wants_file = False
        self.link.attach(file_id, self)
        return True

    def renew_target(self, uint16_t file_id, uint64_t address, uint32_t rkey, uint64_t length):
        """The follower's present file has grown: it may be written up to `length` by this key.
        False: another file is present, or it is no longer than it was."""
        cdef segment_target* t = &self._targets[self._present]
        if t.file_id != file_id or length <= t.length:
            return False
        t.address = address
        t.rkey = rkey
        t.length = length
        self.wants_file = False
        self._wish = 0
        return True

    def take_wish(self):
        """True once when more than half of what the follower has granted of its present file is
        written: what it grants now, producers need not wait for later.  The owner's thread."""
        if self._wish != 1:
            return False
        self._wish = 2
        return True

    @property
    def has_wished(self):
        """Was `take_wish` true of the present file as it is?"""
        return self._wish == 2

    cdef bint _before_is_done(self) noexcept nogil:
        """Are all acknowledgements of the file before the present one here?"""
        return (self.acknowledged == self.posted or self._window[
            self.acknowledged & (self.window - 1)].base == self._pushed.base)

    def start(self):
        """Attach it; the worker calls it."""
        self._entry = self.marks.enter(self.broker)
        self.link.attach(self._targets[self._present].file_id, self)

    def end(self):
        """Detach it; what it has under way is dropped when it comes."""
        cdef void** at = &self.link.starved
        for which in range(2):
            self.link.detach(self._targets[which].file_id)
        while at[0] != NULL and at[0] != <void*> self:
            at = &(<PushRing> at[0]).next_starved
        if at[0] != NULL:
            at[0] = self.next_starved
            self.starved = False
        if self.state == RING_PUSHING:
            self.state = RING_ENDED
        self.c_give_up()

    def lack(self):
        """The owner could not name a segment: nothing more is pushed, and the owner is told."""
        if self.state == RING_PUSHING:
            self._end(RING_LACKS, 0)

    @property
    def sources_done(self):
        """Nothing of segments that begin below this offset is under way or needed any more."""
        cdef int64_t base = self._pushed.base
        if self.completed < self.posted:
            base = min(base, self._window[self.completed & (self.window - 1)].base)
        return base

    def drop_sources(self):
        """Forget the sources that are done: their regions, and those of heads before they grew."""
        cdef int i, n = 0
        cdef int64_t base = self.sources_done
        while n < self._source_count and self._sources[n].base < base:
            n += 1
        dropped, self._regions = self._regions[:n], self._regions[n:]
        outgrown, self._outgrown = (self._outgrown, []) if n else ([], self._outgrown)
        for i in range(n, self._source_count):
            self._sources[i - n] = self._sources[i]
        self._source_count -= n
        return dropped, outgrown

    @property
    def pushed(self):
        """(segment, position, offset) up to which was posted."""
        return self._pushed.base, self._pushed.position, self._pushed.offset

    @property
    def acks_read(self):
        """Entries read of the present file's half of the ring."""
        return self._targets[self._present].acks

    @property
    def file_id(self):
        return self._targets[self._present].file_id

    # -- pushing -----------------------------------------------------------------------------------

    cdef void c_push(self, const mark_t* end) noexcept nogil:
        """Post what there is up to `end`, where the log ends, as credits allow."""
        cdef segment_source* s
        cdef segment_target* t
        cdef source_t source
        cdef target_t target
        cdef large_value_t none
        cdef mark_t mark
        cdef mark_t limit
        cdef int rc
        none.hole = 0
        self.blocked = False
        while self.state == RING_PUSHING:
            if self._pushed.offset >= end.offset and self._pushed.base == end.base:
                return
            s = self._source(end, &limit)
            if s == NULL:
                return
            if self._pushed.position >= limit.position:
                if s.size < 0 or not self._next_segment():
                    return
                continue
            if not self.c_may_post():
                self.blocked = True
                if self.link.requests_under_way >= self.link.limit and not self.starved:
                    self.starved = True
                    self.next_starved = self.link.starved
                    self.link.starved = <void*> self
                return
            t = &self._targets[self._present]
            source.data = <uint8_t*><uintptr_t> (s.address + self._pushed.position)
            source.address = s.address + self._pushed.position
            source.lkey = s.lkey
            source.length = self._piece(s, &limit, &mark)
            if mark.position > s.length:
                if not self.wants_source:
                    self.wants_source = True
                    self._tell_owner()
                return
            if mark.position > t.length:    # the follower's file is smaller yet
                self._want_file()
                return
            target.address = t.address + self._pushed.position
            target.rkey = t.rkey
            target.imm = request_imm(t.file_id, t.order)
            rc = self.c_post_request(&source, &target, &none, False)
            if rc == POST_FAILED:
                self._end(RING_BROKEN, 0)
            if rc != POSTED:
                self.blocked = True
                return
            t.order += 1
            self._window[(self.posted - 1) & (self.window - 1)] = mark
            self._pushed = mark
            self.bytes_pushed += source.length
            if self._wish == 0 and mark.position > t.length // 2:
                self._wish = 1
                self._tell_owner()

    cdef segment_source* _source(self, const mark_t* end, mark_t* limit) noexcept nogil:
        """The segment that is pushed now, and where its records end; NULL: its owner has not named
        it yet, or not said how large it is since a roll."""
        cdef segment_source* s = NULL
        cdef int i
        for i in range(self._source_count):
            if self._sources[i].base == self._pushed.base:
                s = &self._sources[i]
        if s == NULL:
            return NULL
        if s.size >= 0:
            limit.position = <uint64_t> s.size
            limit.offset = s.end_offset
        elif s.base == end.base:
            limit[0] = end[0]
        else:
            return NULL
        return s

    cdef bint _next_segment(self) noexcept nogil:
        """Everything of a segment is posted: go on in the next, if its file is granted."""
        cdef int i
        for i in range(self._source_count - 1):
            if self._sources[i].base == self._pushed.base:
                break
        else:
            return False
        if not self._has_next:
            self._want_file()
            return False
        self._present ^= 1
        self._has_next = False
        self._wish = 0
        self._pushed.base = self._sources[i + 1].base
        self._pushed.position = 0
        self._tell_owner()                  # which may ask for the next file
        return True

    cdef void _want_file(self) noexcept nogil:
        if not self.wants_file:
            self.wants_file = True
            self._tell_owner()

    cdef void _tell_owner(self) noexcept nogil:
        self.untold_news = True
        if self.pushing != NULL:
            (<Pushing> self.pushing).news = True

    cdef uint32_t _piece(self, const segment_source* source, const mark_t* limit,
                         mark_t* mark) noexcept nogil:
        """The length of the next WRITE, which ends with a batch, and its mark."""
        cdef uint64_t at = self._pushed.position
        cdef uint64_t n
        mark.base = source.base
        if limit.position - at <= self._most:
            mark.position = limit.position
            mark.offset = limit.offset
            return <uint32_t> (limit.position - at)
        # Whole batches, which the kernel has checked, so their lengths can be relied on.
        while True:
            n = BATCH_PREFIX + <uint64_t> kd_get32(
                <const uint8_t*><uintptr_t> (source.address + at + 8))
            if at > self._pushed.position and at + n - self._pushed.position > self._most:
                break
            at += n
            self.batches_walked += 1
            if at >= limit.position:
                break
        mark.position = at
        mark.offset = (limit.offset if at >= limit.position else
                       <int64_t> kd_get64(<const uint8_t*><uintptr_t> (source.address + at)))
        return <uint32_t> (at - self._pushed.position)

    # -- what comes back ---------------------------------------------------------------------------

    cdef int c_take_acks(self, uint16_t file_id, uint16_t count) noexcept nogil:
        cdef segment_target* t = &self._targets[self._present]
        cdef uint16_t i
        if t.file_id != file_id:
            t = &self._targets[self._present ^ 1]
        for i in range(count):
            if self.state != RING_PUSHING or not self._take_ack(t):
                break
        self.c_release()
        return count

    cdef int _take_ack(self, segment_target* t) noexcept nogil:
        """The next entry of a file's half of the ring; whether it makes sense."""
        cdef int which = self._present if t == &self._targets[self._present] else self._present ^ 1
        cdef const uint8_t* e = self._acks.data + (
            which * self._half + (t.acks & (self._half - 1))) * ACK_BYTES
        cdef uint32_t sequence
        cdef int16_t error
        cdef uint16_t flags
        cdef int64_t offset
        memcpy(&sequence, e + ACK_SEQUENCE, 4)
        memcpy(&error, e + ACK_ERROR, 2)
        memcpy(&flags, e + ACK_FLAGS, 2)
        memcpy(&offset, e + ACK_BASE_OFFSET, 8)
        if sequence != t.acks:
            self._end(RING_DESYNCHRONISED, 0)
            return False
        t.acks += 1
        if offset >= 0 and not self._confirm(offset, which == self._present):
            self._end(RING_DESYNCHRONISED, 0)
            return False
        if error != 0 or flags & ACK_FLAG_REVOKED:
            self._end(RING_REFUSED if error != 0 else RING_ENDED, error)
        return True

    cdef int _confirm(self, int64_t offset, bint present) noexcept nogil:
        """The follower's log ends at `offset`.  False: it cannot."""
        cdef uint64_t n = self.acknowledged
        cdef int64_t base = self._window[n & (self.window - 1)].base
        cdef mark_t* mark = NULL
        if offset <= self.confirmed:
            # Again, or of the file before, which what came of the present one has overtaken.
            return offset == self.confirmed or not present
        while n < self.posted:
            mark = &self._window[n & (self.window - 1)]
            n += 1
            if mark.offset >= offset:
                break
        if mark == NULL or mark.offset != offset:
            return False
        while self.acknowledged < n:
            self.c_return_credit()
        self.confirmed = offset
        if base != self._pushed.base and self._before_is_done():
            self._tell_owner()              # the file before is done: the next may be granted
        if self.marks.c_confirm(self._entry, mark):
            if self.pushing != NULL:
                (<Pushing> self.pushing).moved = True
        return True

    cdef void _end(self, int state, int error) noexcept nogil:
        self.state = state
        self.error = error
        self._tell_owner()
        if state == RING_DESYNCHRONISED:
            self.desynchronised = True

    # -- the high watermark ------------------------------------------------------------------------

    cdef void c_tell(self, int64_t high_watermark) noexcept nogil:
        """WRITE the high watermark into the follower's slot, if it is time to."""
        cdef uint64_t id = self._targets[self._present].file_id
        if (high_watermark == self._told or self._slot_address == 0 or self._image_busy
                or self.state != RING_PUSHING):
            return
        if self.posted != self.acknowledged and self.posted - self._slot_at < self._slot_every:
            return
        self._slot_count += 1
        high_watermark_slot(self.marks.kernel, self._slot_count, self._image.data)
        if self._qp.c_post_write(
                (<uint64_t> HIGH_WATERMARK << 32) | id, self._image.address, self._image.lkey,
                SLOT_BYTES, self._slot_address, self._slot_rkey) != 0:
            return
        self._image_busy = True
        self.link.sends_under_way += 1
        self._slot_at = self.posted
        self._told = high_watermark
        self.slots_written += 1


cdef class Pushing:
    """One partition that this broker leads, and the rings to its followers.  `owner` is the
    caller's."""

    def __init__(self, ReplicaMarks marks):
        self.marks = marks
        self.kernel = marks.kernel
        self._rings = []

    @property
    def rings(self):
        return list(self._rings)

    cdef _add(self, PushRing ring):
        if self._ring_count == MOST_REPLICAS:
            raise LogError(f"a partition has more than {MOST_REPLICAS} followers",
                           hint="give it fewer")
        ring.pushing = <void*> self
        self._rings.append(ring)
        self._by_number[self._ring_count] = <void*> ring
        self._ring_count += 1

    cdef _remove(self, PushRing ring):
        cdef int i
        if ring not in self._rings:
            return
        ring.pushing = NULL
        self._rings.remove(ring)
        for i, other in enumerate(self._rings):
            self._by_number[i] = <void*> other
        self._ring_count = len(self._rings)

    cdef void c_push(self) noexcept nogil:
        """Post what the followers lack."""
        cdef mark_t end
        cdef int i
        log_end_mark(self.kernel, &end)
        for i in range(self._ring_count):
            (<PushRing> self._by_number[i]).c_push(&end)

    cdef void c_tell(self) noexcept nogil:
        cdef int64_t high_watermark = self.kernel.c_high_watermark()
        cdef int i
        for i in range(self._ring_count):
            (<PushRing> self._by_number[i]).c_tell(high_watermark)


cdef void pushing_note(void** first, void* pushing) noexcept nogil:
    if (<Pushing> pushing).led and not (<Pushing> pushing).noted:
        (<Pushing> pushing).noted = True
        (<Pushing> pushing).next_noted = first[0]
        first[0] = pushing


cdef void pushing_forget(void** first, void* pushing) noexcept nogil:
    cdef void** at = first
    (<Pushing> pushing).led = False
    while at[0] != NULL and at[0] != pushing:
        at = &(<Pushing> at[0]).next_noted
    if at[0] != NULL:
        at[0] = (<Pushing> pushing).next_noted
        (<Pushing> pushing).noted = False
