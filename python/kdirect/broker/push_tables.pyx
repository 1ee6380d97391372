# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Replication at a produce worker: the followers it pushes to, and the leaders that push to it.

Owns: the part of the worker's tables that two brokers share (KafkaDirect §4.3.2).

- Leader: the links to followers (`kdirect.broker.push`), whose completions come into the worker's
  own queue, so the thread that commits also pushes and hears of acknowledgements, and polls nothing
  more; the partitions that it pushes; the producers' acknowledgements that wait for replicas.
- Follower: heads whose one producer is the leader (`stamped`).  Their requests are committed as
  they are, and a run of them is acknowledged by one entry: where the log ends now.

What may not enter: who leads and who follows, what follows from an acknowledgement
(`kdirect.log.replica_marks`), grants, files.

A follower's head meets four ends.  A request whose batches begin a leader epoch that the kernel
does not know WAITS: its owner notes the epoch on disk, then calls `go_on`; nothing that has arrived
is lost.  A request in the file that was granted ahead waits for the roll, as a producer's does.
What is damaged, or does not go on where the log ends, is refused by its code: the head is ABORTED,
the entry that says so is the last, and the leader begins again from where the log ends.  A leader
that is deposed loses its keys first (`kdirect.broker.head_access`), then its head is closed.

Threads and memory: see the worker.  C methods are called with `_lock` held.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kdirect.broker.order cimport (
    HEAD_OPEN, HEAD_WAITING, WHY_NO_ROOM, WHY_REFUSED, arrived_t, head_t, order_abort,
    order_done, order_go_on, order_next, order_wait)
from kdirect.broker.produce_tables cimport (
    BATCH, CUT_DESYNCHRONISED, CUT_DISCONNECTED, CUT_NOT_AN_ANSWER, GRANT_RETIRED, ProduceHead,
    ProduceTables, grant_t, peer_t, pthread_mutex_lock, pthread_mutex_unlock)
from kdirect.broker.push cimport (
    RING_BROKEN, RING_DESYNCHRONISED, RING_PUSHING, Pushing, PushLink, PushRing, pushing_forget,
    pushing_note)
from kdirect.format.layout cimport ACK_FLAG_REVOKED, SLOT_UPDATE_COUNT
from kdirect.log.kernel cimport (
    COMMIT_NO_HEAD, COMMIT_NO_SPACE, COMMIT_UNKNOWN_EPOCH, COMMIT_WRONG_POSITION, CommitKernel,
    commit_result)
from kdirect.log.replica_marks cimport follow_slot
from kdirect.rdma.contract cimport (
    WC_RECV_RDMA_WITH_IMM, WC_SUCCESS, CompletionQueue, MemoryRegion, work_completion)

import os

from kdirect.errors import AccessDeniedError

cdef extern from *:
    """
    #include <sched.h>
    #include <stdint.h>
    static inline void kd_visit(uint32_t* p, int n) {
        __atomic_add_fetch(p, n, __ATOMIC_SEQ_CST);
    }
    static inline void kd_wait_for_visitors(uint32_t* p) {
        while (__atomic_load_n(p, __ATOMIC_SEQ_CST)) sched_yield();
    }
    """
    void kd_visit(uint32_t* p, int n) nogil
    void kd_wait_for_visitors(uint32_t* p) nogil

cdef enum:
    # Acknowledge within a run after so much work, so that the leader sends on meanwhile, and its
    # producers hear of it.
    ANSWER_AFTER_BYTES = 65536
    LOOK_MS = 10
    MOST_FOLLOW_MS = 128


cdef class PushTables(ProduceTables):
    """See the module."""

    def __cinit__(self):
        self._follow_ms = 1
        self._cores = len(os.sched_getaffinity(0))
        self._neighbours = []

    cdef bint _crowded(self) noexcept nogil:
        """Would this thread, those of the other replicas and a producer, if they all spun, be more
        than the cores?  Then each waits for another that spins, and replication takes many times
        as long; so it sleeps at once.  A follower does not know how many there are: four."""
        if self._link_count == 0 and self._followed == 0 and self._elsewhere_count == 0:
            return False
        return self._cores < max(4, self._link_count + 2)

    # -- the leader's side: links and partitions ---------------------------------------------------

    def add_link(self, PushLink link):
        """Take completions of a queue pair to a follower: its receives come into the worker's
        queue, its sends into a queue that all links share and that nobody sleeps on."""
        if self._link_count == MOST_LINKS:
            raise AccessDeniedError(f"the broker pushes to {MOST_LINKS} others already",
                                    hint="spread the replicas over fewer brokers")
        self._check_room()
        if self._link_cq is None:
            self._link_cq = link.qp.send_cq
        elif self._link_cq is not link.qp.send_cq:
            raise ValueError("links share one completion queue for their sends")
        self._enter_peer(link.qp, 0, None, link)
        with nogil:
            pthread_mutex_lock(&self._lock)
        self._links[self._link_count] = <void*> link
        self._link_count += 1
        pthread_mutex_unlock(&self._lock)

    def remove_link(self, PushLink link):
        """Forget it; its rings must have ended."""
        cdef int i
        with nogil:
            pthread_mutex_lock(&self._lock)
        for i in range(self._link_count):
            if self._links[i] == <void*> link:
                self._link_count -= 1
                self._links[i] = self._links[self._link_count]
                break
        pthread_mutex_unlock(&self._lock)
        return self.remove_peer(link.qp_num)

    def sends(self, PushLink link):
        """(WRITEs so far over all rings of a link, those of them that have arrived or failed)."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        done = link.sends_done
        posted = done + link.sends_under_way
        pthread_mutex_unlock(&self._lock)
        return posted, done

    def lead(self, Pushing pushing):
        """This broker leads a partition with followers: after each commit of its heads, what they
        lack is pushed."""
        cdef int i
        with nogil:
            pthread_mutex_lock(&self._lock)
        pushing.home = <void*> self
        pushing.led = True
        self._pushings[pushing.kernel] = pushing
        for i in range(self._open_count):
            if self._open[i].kernel == <PyObject*> pushing.kernel:
                self._open[i].pushing = <PyObject*> pushing
        pthread_mutex_unlock(&self._lock)

    def resign(self, Pushing pushing):
        """Push nothing more of this partition, which the other workers were told of
        (`push_no_more_elsewhere`).  What waits for its followers is the owner's to end
        (`gate_failed`, `close_head`)."""
        cdef int i
        cdef PushRing ring
        with nogil:
            pthread_mutex_lock(&self._lock)
        if self._pushings.get(pushing.kernel) is pushing:  # else the next leadership has begun
            del self._pushings[pushing.kernel]
        for i in range(self._open_count):
            if self._open[i].pushing == <PyObject*> pushing:
                self._open[i].pushing = NULL
        for ring in pushing.rings:
            ring.end()
            pushing._remove(ring)
        with nogil:
            self._after_answers()       # it is in no list of what was touched afterwards
        pushing_forget(&self._noted_pushings, <void*> pushing)
        with nogil:
            self._unlock()

    def start_push(self, Pushing pushing, PushRing ring):
        """Begin to push to one follower, from where its log ends."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            pushing._add(ring)
            ring.start()
            self._push(<void*> pushing)
        finally:
            pthread_mutex_unlock(&self._lock)
        self._tell_news()

    def end_push(self, Pushing pushing, PushRing ring):
        """Push nothing more to this follower under its present grant."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        with nogil:
            self._after_answers()
        ring.end()
        pushing._remove(ring)
        with nogil:
            self._unlock()

    def add_source(self, Pushing pushing, PushRing ring, int64_t base, MemoryRegion region,
                   uint64_t start=0, *, int64_t size_before=-1, int64_t end_before=-1):
        """See `PushRing.add_source`."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            ring.add_source(
                base, region, start, size_before=size_before, end_before=end_before)
            self._push(<void*> pushing)
        finally:
            pthread_mutex_unlock(&self._lock)
        self._tell_news()

    def lack_source(self, Pushing pushing, PushRing ring):
        """The next segment cannot be named to this ring (`add_source` has failed): it ends, and its
        owner is told, on the worker's thread."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        ring.lack()
        if pushing.news:
            self._note_pushing(<void*> pushing)
        pthread_mutex_unlock(&self._lock)
        self._tell_news()

    def renew_source(self, Pushing pushing, PushRing ring, int64_t base, MemoryRegion region):
        """See `PushRing.renew_source`."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            ring.renew_source(base, region)
            self._push(<void*> pushing)
        finally:
            pthread_mutex_unlock(&self._lock)
        self._tell_news()

    def drop_sources(self, PushRing ring):
        """See `PushRing.drop_sources`."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        dropped = ring.drop_sources()
        pthread_mutex_unlock(&self._lock)
        return dropped

    def grant_ahead(self, Pushing pushing, PushRing ring, uint16_t file_id, uint64_t address,
                    uint32_t rkey, uint64_t length):
        """See `PushRing.grant_ahead`."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            granted = ring.grant_ahead(file_id, address, rkey, length)
            self._push(<void*> pushing)
        finally:
            pthread_mutex_unlock(&self._lock)
        self._tell_news()
        return granted

    def renew_target(self, Pushing pushing, PushRing ring, uint16_t file_id, uint64_t address,
                     uint32_t rkey, uint64_t length):
        """See `PushRing.renew_target`."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            renewed = ring.renew_target(file_id, address, rkey, length)
            self._push(<void*> pushing)
        finally:
            pthread_mutex_unlock(&self._lock)
        self._tell_news()
        return renewed

    def push(self, Pushing pushing):
        """Records were committed by somebody else than this worker (plain Kafka produce): push
        them, from the calling thread."""
        with nogil:
            pthread_mutex_lock(&self._lock)
            self._drain_links()
            self._push(<void*> pushing)
            self._unlock()
        self._tell_news()

    def _tell_news(self):
        """Have the worker report what another thread's work has brought up: a ring may want its
        next file as soon as it has got one, and nobody else wakes the worker while producers wait
        for just that."""
        if self._noted_pushings != NULL or self._neighbour_news:
            self._wake_for_news()

    def count_replicas(self, Pushing pushing, brokers, *, bint stands_still=False):
        """The high watermark waits for these brokers from now on; see `ReplicaMarks.set_counted`.
        What may be acknowledged now is."""
        cdef bint moved
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            moved = pushing.marks.set_counted(brokers, stands_still=stands_still)
            if moved:
                self._moved_now(pushing)
        finally:
            with nogil:
                self._unlock()
        self._tell_news()

    def confirm(self, Pushing pushing, int32_t broker, int64_t offset, uint64_t position,
                int64_t segment_base_offset):
        """A replica that is not pushed to (it fetches over TCP) has every record below `offset`;
        see `ReplicaMarks.confirm`."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            if pushing.marks.confirm(broker, offset, position, segment_base_offset):
                self._moved_now(pushing)
        finally:
            with nogil:
                self._unlock()
        self._tell_news()

    def flushed(self, Pushing pushing):
        """More of the partition is on disk, or need not be: see `ReplicaMarks.look`."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        try:
            if pushing.marks.look():
                self._moved_now(pushing)
        finally:
            with nogil:
                self._unlock()
        self._tell_news()

    def _moved_now(self, Pushing pushing):
        """The high watermark has moved outside of the worker's own batch; the lock is held."""
        if pushing.watched:
            pushing.moved_news = True
            self._note_pushing(<void*> pushing)
        self._marks_moved = True
        with nogil:
            self._release_held()
            pushing.c_tell()

    def watch_pushing(self, Pushing pushing):
        """Call `on_moved(pushing)` once, when its high watermark moves next."""
        pushing.watched = True

    def watch_followed(self, ProduceHead head):
        """Call `on_moved(head)` once, when the high watermark of a replica moves next."""
        head.h.watched = 1

    # -- several workers ---------------------------------------------------------------------------

    def push_elsewhere(self, Pushing pushing):
        """Producers of this worker write a partition that another one pushes: after a commit here
        it is pushed there, by this thread, and when its marks move there, this worker's producers
        are answered, by that thread.  Nobody wakes, and neither lock is taken under the other."""
        cdef PushTables home = <PushTables> pushing.home
        self._meet(home)
        home._meet(self)
        with nogil:
            pthread_mutex_lock(&self._lock)
        if pushing.kernel not in self._pushed_elsewhere:
            self._elsewhere_count += 1
        self._pushed_elsewhere[pushing.kernel] = pushing
        self._name_elsewhere(pushing, True)
        pthread_mutex_unlock(&self._lock)

    def push_no_more_elsewhere(self, Pushing pushing):
        """That worker is to resign: this one does not touch the partition there any more."""
        with nogil:
            pthread_mutex_lock(&self._lock)
        if self._pushed_elsewhere.get(pushing.kernel) is pushing:
            del self._pushed_elsewhere[pushing.kernel]
            self._elsewhere_count -= 1
            self._name_elsewhere(pushing, False)
        pthread_mutex_unlock(&self._lock)
        with nogil:
            kd_wait_for_visitors(&pushing.visitors)

    def _name_elsewhere(self, Pushing pushing, bint there):
        cdef int i
        for i in range(self._open_count):
            if self._open[i].kernel == <PyObject*> pushing.kernel:
                self._open[i].pushed_elsewhere = <PyObject*> pushing if there else NULL

    cdef _meet(self, PushTables other):
        with nogil:
            pthread_mutex_lock(&self._lock)
        if other not in self._neighbours and self._neighbour_count < MOST_NEIGHBOURS:
            self._neighbours.append(other)
            self._neighbour_of[self._neighbour_count] = <void*> other
            self._neighbour_count += 1
        pthread_mutex_unlock(&self._lock)

    cdef void _want_push(self, head_t* h) noexcept nogil:
        """Records of a partition that another worker pushes were committed; `_unlock` follows."""
        cdef int i
        for i in range(self._wanted_count):
            if self._wanted[i] == <void*> h.pushed_elsewhere:
                return
        if self._wanted_count == MOST_WANTED:
            h.touched = 1               # with the next batch
            self._kick = True
            return
        self._wanted[self._wanted_count] = <void*> h.pushed_elsewhere
        self._wanted_count += 1
        kd_visit(&(<Pushing> h.pushed_elsewhere).visitors, 1)

    cdef void _unlock(self) noexcept nogil:
        """Let go of the lock, then have other workers do what follows there.  A visitor keeps the
        partition, and with it the worker that pushes it, where they are."""
        cdef void* wanted[MOST_WANTED]
        cdef void* neighbours[MOST_NEIGHBOURS]
        cdef void* other
        cdef int i, n = self._wanted_count, m = self._neighbour_count if self._marks_moved else 0
        for i in range(n):
            wanted[i] = self._wanted[i]
        for i in range(m):
            neighbours[i] = self._neighbour_of[i]
        self._wanted_count = 0
        self._marks_moved = False
        pthread_mutex_unlock(&self._lock)
        for i in range(n):
            other = (<Pushing> wanted[i]).home
            (<PushTables> other).c_push_for(wanted[i])
            kd_visit(&(<Pushing> wanted[i]).visitors, -1)
            if (<PushTables> other)._has_news():
                self._neighbour_news = True
        for i in range(m):
            (<PushTables> neighbours[i]).c_release()
            if (<PushTables> neighbours[i])._has_news():
                self._neighbour_news = True

    cdef void c_push_for(self, void* pushing) noexcept nogil:
        pthread_mutex_lock(&self._lock)
        self._drain_links()
        self._push(pushing)
        self._unlock()

    cdef void c_release(self) noexcept nogil:
        pthread_mutex_lock(&self._lock)
        if self._held_count:
            self._release_held()
        self._unlock()

    # -- the leader's side: completions ------------------------------------------------------------

    cdef void _take_from_link(self, peer_t* peer, work_completion* wc) noexcept nogil:
        """Acknowledgements of a follower."""
        cdef void* ring = (<PushLink> peer.link).c_take(wc)
        if wc.opcode != WC_RECV_RDMA_WITH_IMM:
            self._cut_peer(peer, CUT_NOT_AN_ANSWER)
        if ring == NULL:
            return
        if (<PushRing> ring).state == RING_DESYNCHRONISED:
            self._cut_peer(peer, CUT_DESYNCHRONISED)
        self._touch(ring)
        # What it gave back may be another's.
        while (<PushLink> peer.link).starved != NULL:
            ring = (<PushLink> peer.link).starved
            (<PushLink> peer.link).starved = (<PushRing> ring).next_starved
            (<PushRing> ring).starved = False
            self._touch(ring)

    cdef void _touch(self, void* ring) noexcept nogil:
        """Something has come for this ring: its partition goes on in `_after_answers`."""
        cdef void* pushing = (<PushRing> ring).pushing
        if pushing != NULL and not (<Pushing> pushing).touched:
            (<Pushing> pushing).touched = True
            (<Pushing> pushing).next_touched = self._touched_pushings
            self._touched_pushings = pushing

    cdef uint64_t _link_sends(self) noexcept nogil:
        """WRITEs to followers whose completion was not taken."""
        cdef uint64_t n = 0
        cdef int i
        for i in range(self._link_count):
            n += (<PushLink> self._links[i]).sends_under_way
        return n

    cdef void _drain_links(self) noexcept nogil:
        cdef work_completion wcs[BATCH]
        cdef peer_t* peer
        cdef void* ring
        cdef int i, n = BATCH
        while n == BATCH and self._link_sends():
            n = self._link_cq.c_poll(wcs, BATCH)
            for i in range(n):
                peer = self._find_peer(wcs[i].qp_num)
                if peer == NULL or peer.link == NULL:
                    continue
                if wcs[i].status != WC_SUCCESS:
                    self._cut_peer(peer, CUT_DISCONNECTED)
                ring = (<PushLink> peer.link).c_send_completion(&wcs[i])
                if ring != NULL:
                    self._touch(ring)

    cdef void _push(self, void* pushing) noexcept nogil:
        (<Pushing> pushing).c_push()
        if (<Pushing> pushing).news:
            self._note_pushing(pushing)

    cdef void _note_pushing(self, void* pushing) noexcept nogil:
        pushing_note(&self._noted_pushings, pushing)

    cdef void _after_answers(self) noexcept nogil:
        """Credits have come back, and marks have moved: push on, then let out what waited."""
        cdef bint moved = False
        cdef void* pushing
        self._drain_links()
        pushing = self._touched_pushings
        while pushing != NULL:
            self._push(pushing)
            if (<Pushing> pushing).moved:
                (<Pushing> pushing).moved = False
                moved = True
                if (<Pushing> pushing).watched:
                    (<Pushing> pushing).moved_news = True
                    self._note_pushing(pushing)
            pushing = (<Pushing> pushing).next_touched
        if moved:
            self._marks_moved = True
            self._release_held()
        while self._touched_pushings != NULL:
            pushing = self._touched_pushings
            self._touched_pushings = (<Pushing> pushing).next_touched
            (<Pushing> pushing).touched = False
            (<Pushing> pushing).c_tell()

    cdef _break_link(self, peer_t* peer):
        """A link was cut: its rings push no more.  The lock is held."""
        cdef PushRing ring
        for ring in set((<PushLink> peer.link)._receivers.values()):
            if ring.state == RING_PUSHING:
                ring._end(RING_BROKEN, 0)
                if ring.pushing != NULL:
                    self._note_pushing(ring.pushing)

    # -- the follower's side -----------------------------------------------------------------------

    def go_on(self, ProduceHead head):
        """The owner of a replica's head has noted the leader epoch that it waited for: what has
        arrived is committed, now.  False when it did not wait."""
        cdef bint waited
        with nogil:
            pthread_mutex_lock(&self._lock)
            waited = order_go_on(&head.h)
            if waited:
                self._commit_run(&head.h, self._wall_ms(), self._now())
                self._flush_acks()
            pthread_mutex_unlock(&self._lock)
        self._wake_for_news()
        return waited

    def grow_head(self, ProduceHead head):
        """A replica's head has grown: take what its leader writes into all of it."""
        cdef uint64_t capacity = (<CommitKernel> head.h.kernel).capacity
        with nogil:
            pthread_mutex_lock(&self._lock)
        head.h.capacity = capacity
        pthread_mutex_unlock(&self._lock)

    def waiting_request(self, ProduceHead head):
        """(position, length) of the request that a replica's head waits at; None."""
        cdef arrived_t* r
        with nogil:
            pthread_mutex_lock(&self._lock)
        r = &head.h.ring[head.h.next_order & head.h.mask]
        at = (head.h.position, r.length) if head.h.state == HEAD_WAITING and r.length else None
        pthread_mutex_unlock(&self._lock)
        return at

    cdef void _commit_stamped(self, head_t* h, int64_t now_ms) noexcept nogil:
        """Commit what the leader has written, as it is stamped; one lock of the kernel, one update
        of its slots and one acknowledgement for all that has arrived."""
        cdef arrived_t* r = order_next(h)
        cdef commit_result result
        cdef uint64_t unanswered = 0
        cdef uint32_t count = 0
        cdef uint16_t file_id = 0
        cdef int error = 0
        h.touched = 0
        if r == NULL:
            return
        (<CommitKernel> h.kernel).c_begin()
        while r != NULL:
            error = (<CommitKernel> h.kernel).c_commit_next(
                h.segment_base_offset, h.position, r.length, 0, True, now_ms, &result)
            if error != 0:
                break
            self._stamped_commits += 1
            file_id = r.file_id
            count += 1
            unanswered += r.length
            order_done(h, r)
            if unanswered >= ANSWER_AFTER_BYTES:
                (<CommitKernel> h.kernel).c_end()
                self._answer_run(h, file_id, count, 0, 0)
                self._flush_acks()
                unanswered = count = 0
                (<CommitKernel> h.kernel).c_begin()
            r = order_next(h)
        (<CommitKernel> h.kernel).c_end()
        if error == COMMIT_UNKNOWN_EPOCH:
            order_wait(h)
        elif error != 0:
            file_id = r.file_id
            h.error = <int16_t> error
            order_abort(h, WHY_NO_ROOM if error == COMMIT_NO_SPACE or error == COMMIT_NO_HEAD
                        else WHY_REFUSED)
            self._answer_run(h, file_id, count, <int16_t> error, ACK_FLAG_REVOKED)
            return
        if count:
            self._answer_run(h, file_id, count, 0, 0)
        if h.told != NULL:
            self._follow(h)
            self._follow_ms = 1

    cdef void _answer_run(self, head_t* h, uint16_t file_id, uint32_t count, int16_t error,
                          uint16_t flags) noexcept nogil:
        """Stage the entry that acknowledges `count` more WRITEs, and everything before them, by the
        offset at which the log ends."""
        cdef grant_t* g = self._table[file_id] if file_id else NULL
        if g == NULL or g.head != h:
            return
        g.pending -= min(g.pending, count)
        self._stage(g, <uint16_t> (h.next_order - 1), error, flags, <uint16_t> count,
                    (<CommitKernel> h.kernel).c_log_end(), -1)
        if flags & ACK_FLAG_REVOKED:
            g.state = GRANT_RETIRED

    cdef void _follow(self, head_t* h) noexcept nogil:
        """Look at what the leader has told of its high watermark."""
        cdef uint32_t count = (<const uint32_t*> (h.told + SLOT_UPDATE_COUNT))[0]
        if count == h.told_count and (
                h.told_offset <= (<CommitKernel> h.kernel).c_high_watermark()):
            return
        if follow_slot(<CommitKernel> h.kernel, h.told, &h.told_count, &h.told_offset):
            self._follow_moves += 1
            if h.watched:
                h.watched = 2
                self._note(h)

    cdef bint _follow_all(self) noexcept nogil:
        """The same for all replicas; whether some of them lacks news: it has records that are not
        readable yet."""
        cdef int i
        cdef head_t* h
        cdef bint lacks = False
        for i in range(self._open_count):
            h = self._open[i]
            if h.told == NULL or h.state != HEAD_OPEN:
                continue
            self._follow(h)
            if ((<CommitKernel> h.kernel).c_high_watermark()
                    < (<CommitKernel> h.kernel).c_log_end()):
                lacks = True
        return lacks

    cdef int c_tend_pushing(self) noexcept nogil:
        """Before a sleep: take what is there.  After how many ms something is to be looked at
        again although nobody wakes the worker: completions of WRITEs, and the high watermark that a
        leader tells without a word, twice as late each time; -1: never."""
        cdef int ms = -1
        pthread_mutex_lock(&self._lock)
        if self._link_count:
            self._after_answers()
            if self._link_sends():
                ms = LOOK_MS
        if self._followed:
            if self._follow_all():
                ms = min(ms, self._follow_ms) if ms > 0 else self._follow_ms
                self._follow_ms = min(MOST_FOLLOW_MS, 2 * self._follow_ms)
            else:
                self._follow_ms = 1
        self._unlock()
        return ms

    # -- news --------------------------------------------------------------------------------------

    cdef list _news_of_pushing(self, list moved):
        """[(ring,)] whose state has changed; `moved` gets (Pushing,) of each whose high watermark
        has.  The lock is held."""
        cdef Pushing pushing
        cdef PushRing ring
        cdef list rings = []
        while self._noted_pushings != NULL:
            pushing = <Pushing> self._noted_pushings
            self._noted_pushings = pushing.next_noted
            pushing.noted = False
            if pushing.moved_news:
                pushing.moved_news = pushing.watched = False
                moved.append((pushing,))
            if pushing.news:
                pushing.news = False
                for ring in pushing.rings:
                    if ring.untold_news:
                        ring.untold_news = False
                        rings.append((ring,))
        return rings

    # What the worker overrides.

    def _wake_for_news(self):
        """The worker's thread has something to report."""

    cdef void _commit_run(self, head_t* h, int64_t now_ms, int64_t now_ns) noexcept nogil:
        pass

    cdef int64_t _wall_ms(self) noexcept nogil:
        return 0

    cdef int64_t _now(self) noexcept nogil:
        return 0

    cdef bint _has_news(self) noexcept nogil:
        return False
