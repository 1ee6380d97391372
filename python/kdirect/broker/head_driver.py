"""One head for each partition: what happens to it, and what is done about it (KafkaDirect §4.2.2).

Owns: a `HeadLife` for each partition, the `HeadAccess` of each head that producers write, and the
effects: what the machine answers with is carried out here.  Decides nothing: who may write a head,
and what ends it, is in the tables of `kdirect.broker.head_life`.  What may not enter: requests as
clients send them (`kdirect.broker.produce_access`).

Files are opened, rolled and cleared on threads (`Appends.on_thread`).  Meanwhile nobody gets the
head: see the states MAKING_ROOM, CLOSING, SUCCEEDING and ABANDONED.

All methods run on the broker's event loop, except where said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends, PendingAppend
from kdirect.broker.grants import GrantTable, Peer
from kdirect.broker.head_access import BROKER_WINDOW, Appended, HeadAccess
from kdirect.broker.head_answers import REFUSALS, Occasion, refusal
from kdirect.broker.head_files import HeadFiles
from kdirect.broker.head_life import (
    LED_ELSEWHERE,
    Effect,
    EndReason,
    Event,
    HeadLife,
    NextFileEvent,
    State,
)
from kdirect.broker.order import AbortReason
from kdirect.broker.scheduler import Scheduler
from kdirect.broker.waiting_requests import WaitingRequests
from kdirect.errors import KdirectError, RdmaError, RevokedError, TransportError
from kdirect.format import protocol as p
from kdirect.log.head import PreparedHead
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.broker.rdma")

# A producer that is told of a recall stops by itself; if its next WRITE met a dead key instead, its
# queue pair would break with everything on it.
GRACE_S = 0.002
# A holder that commits nothing for so long is idle or stopped, and is not waited for.
RECALL_CHECK_S = 0.005
LOST_HOLE_MS = 50  # how long to wait for a hole left by a producer that has disconnected
FENCE_AGAIN_S = 0.1  # between two attempts to move a log out of the reach of a producer
# Between two looks whether a producer has the last answers of a sealed head: twice as long each
# time, for they may wait for a replica.
ANSWER_CHECK_S, LONGEST_ANSWER_CHECK_S = 0.001, 0.032

_COUNTERS = (
    "rdma_recalls",
    "rdma_exclusive_heads",
    "rdma_shared_heads",
    "rdma_heads_cut",
    "rdma_heads_ahead",
)


class HeadDriver:
    """See the module.  `appended(tp)` is called after commits to a shared head by the broker
    itself; `watched` are the partitions whose next commit somebody waits for."""

    def __init__(
        self,
        logs: LogManager,
        grants: GrantTable,
        config: Mapping[str, Any],
        *,
        appends: Appends,
        waiting: WaitingRequests,
        scheduler: Scheduler,
        environment: Environment,
        appended: Callable[[TopicPartition], None],
        watched: set[TopicPartition],
    ) -> None:
        self._grants = grants
        self._appends = appends
        self._waiting = waiting
        self.stopping = False  # nothing is left to the event loop any more
        self._hole_timeout_ms = int(config["rdma.produce.hole.timeout.ms"])
        self._scheduler = scheduler
        self._monotonic = environment.monotonic
        self._appended = appended
        self._watched = watched
        self.files = HeadFiles(logs)
        self._lives: dict[TopicPartition, HeadLife] = {}
        # The heads that producers have access to.  Read by any thread.
        self.heads: dict[TopicPartition, HeadAccess] = {}
        self._reserving: set[HeadAccess] = set()  # appends that waited are being reserved on them
        # Heads after which another one is filled, while their producers lack acknowledgements.
        self._unanswered: set[HeadAccess] = set()
        # Called when this broker has resigned from a partition; see `Effect.REPORT_RESIGNED`.
        self.resigned: Callable[[TopicPartition], None] = lambda tp: None
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._effects = self._effect_table()

    def _effect_table(self) -> dict[Effect, Callable[[HeadLife, Occasion], None]]:
        """What carries each effect out."""
        return {
            Effect.GRANT: self._grant,
            Effect.WAIT: self._wait,
            **{effect: partial(self._refuse, effect) for effect in REFUSALS},
            Effect.RESERVE: self._reserve,
            Effect.INSERT: self._insert,
            Effect.OPEN: self._open,
            Effect.MAKE_ROOM: self._make_room,
            Effect.RECALL: self._recall,
            Effect.CHECK_RECALL_LATER: self._check_recall_later,
            Effect.DRAIN: self._drain,
            Effect.EXPIRE_HOLE: self._expire_hole,
            Effect.STOP: self._stop,
            Effect.REVOKE: self._revoke,
            Effect.WITHDRAW: self._withdraw,
            Effect.FAIL_WAITING: self._fail_waiting,
            Effect.REPORT_CUT: self._report_cut,
            Effect.CLOSE_LATER: self._close_later,
            Effect.CLOSE: self._close,
            Effect.FORGET: self._forget,
            Effect.RESUME: self._resume,
            Effect.REPORT_RESIGNED: self._report_resigned,
            Effect.MAKE_NEXT: self._make_next,
            Effect.GRANT_NEXT: self._grant_next,
            Effect.DISCARD_NEXT: self._drop_next,
            Effect.FAIL_NEXT: self._fail_next,
            Effect.SERVE: self._serve_waiting,
            Effect.DROP_NEXT: self._drop_next,
            Effect.DROP_NEXT_SILENTLY: self._drop_next_silently,
            Effect.STOP_FOR_NEXT: self._stop_for_next,
            Effect.SUCCEED: self._succeed,
            Effect.END_NEXT: self._end_next,
        }

    # -- the machine -------------------------------------------------------------------------------

    def life(self, tp: TopicPartition) -> HeadLife:
        life = self._lives.get(tp)
        if life is None:
            life = self._lives[tp] = HeadLife()
        return life

    def happened(self, event: Event, occasion: Occasion) -> Occasion:
        """Tell the machine of an event, and do what follows."""
        life = self.life(occasion.partition.topic_partition)
        self.run(life, life.on(event, self._monotonic()), occasion)
        return occasion

    def run(self, life: HeadLife, effects: Iterable[Effect], occasion: Occasion) -> None:
        for effect in effects:
            self._effects[effect](life, occasion)

    def current(self, tp: TopicPartition) -> HeadAccess | None:
        """The head that producers have access to.  If a thread has begun to seal it, that is an
        event which the loop hears of here at the latest."""
        access = self.heads.get(tp)
        if access is not None and access.fencing and self.life(tp).is_granted:
            self.rolled_away(access)
            access = self.heads.get(tp)
        return access

    def access_to(self, tp: TopicPartition, head: Segment) -> HeadAccess | None:
        """The access that producers have to `head`, which is the partition's last segment.  Any
        thread.

        For a moment after `HeadFiles.succeed` that segment is the file which was granted ahead, and
        the event loop has not heard of it: then `heads` still names the head that was left.
        """
        access = self.heads.get(tp)
        if access is None or not access.fenced or access.segment is head:
            return access
        # `_succeeded` puts the successor into `heads` before it takes it from here.
        return access.successor or self.heads.get(tp)

    def is_current(self, access: HeadAccess) -> bool:
        return self.heads.get(access.partition.topic_partition) is access

    # -- granting the head -------------------------------------------------------------------------

    def _wait(self, life: HeadLife, occasion: Occasion) -> None:
        """The answer stays None: the caller lets the request wait."""

    def _grant(self, life: HeadLife, occasion: Occasion) -> None:
        """Let one more producer join the head."""
        partition, peer = occasion.partition, occasion.peer
        tp = partition.topic_partition
        access = self.heads.get(tp)
        if access is None or not life.is_granted:  # it was rolled away while it was opened
            return
        assert peer is not None
        try:
            occasion.answer = self._join(access, peer, occasion.request)
        except BaseException as e:
            # A thread has sealed it meanwhile, or the worker has ended it: there is another head in
            # a moment.
            sealed = access.fencing
            if not access.members:
                event = Event.ROLLED_AWAY if sealed else Event.LEFT
                room = occasion.min_bytes if sealed else 0
                self.happened(event, Occasion(partition, min_bytes=room))
            if not isinstance(e, RevokedError) and not (sealed and isinstance(e, KdirectError)):
                raise

    def _join(self, access: HeadAccess, peer: Peer, request: Any) -> p.GetProduceAccessResponse:
        watched = access.partition.topic_partition in self._watched
        now = self._monotonic()
        return access.join(self._grants, peer, request, watched=watched, now=now)

    def _refuse(self, effect: Effect, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads.get(occasion.partition.topic_partition)
        raise refusal(effect, life, occasion, access, self._monotonic())

    def _open(self, life: HeadLife, occasion: Occasion) -> None:
        """The first producer of a head: let the worker take requests for it."""
        partition, segment, peer = occasion.partition, occasion.segment, occasion.peer
        tp = partition.topic_partition
        assert segment is not None and peer is not None
        shared = life.state is State.SHARED
        self._appends.hold(tp)
        try:
            access = HeadAccess(
                partition,
                segment,
                peer.engine,
                shared=shared,
                entries=BROKER_WINDOW if shared else peer.max_in_flight,
                hole_timeout_ms=self._hole_timeout_ms,
            )
        except BaseException:
            self.happened(Event.OPEN_FAILED, Occasion(partition))
            self._appends.release(tp)  # last: it looks at who waits for access
            raise
        self.heads[tp] = access
        self._counters["rdma_shared_heads" if shared else "rdma_exclusive_heads"] += 1
        if self.files.rolling.get(tp) is segment:
            # A thread rolls it away and has not found this access.  (If it looks from now on, it
            # finds it: `before_roll`.)
            self.happened(Event.ROLLED_AWAY, Occasion(partition, min_bytes=occasion.min_bytes))

    def _make_room(self, life: HeadLife, occasion: Occasion) -> None:
        """Have a head made, on a thread; then look at those who wait again."""
        partition = occasion.partition
        self._appends.hold(partition.topic_partition)
        self._appends.on_thread(
            partition,
            partial(self.files.ensure_head, partition, occasion.min_bytes),
            partial(self._room_made, partition, occasion.request),
        )

    def _room_made(
        self,
        partition: Partition,
        request: Any,
        segment: Segment | None,
        error: BaseException | None,
    ) -> None:
        tp = partition.topic_partition
        if error is not None:
            self._waiting.refuse(tp, lambda waiting: waiting.request is request, error)
        self.happened(Event.ROOM_MADE, Occasion(partition))

    # -- the file of the next head -----------------------------------------------------------------

    def _make_next(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        self._appends.on_thread(
            access.partition, access.partition.prepare_next, partial(self._next_made, access)
        )

    def _next_made(
        self, access: HeadAccess, file: PreparedHead | None, error: BaseException | None
    ) -> None:
        """A thread has made the file after a head, or could not."""
        tp = access.partition.topic_partition
        occasion = Occasion(access.partition)
        if not self.is_current(access):  # the head has ended meanwhile
            self._discard(access, file, None)
            self._waiting.serve(tp)
            return
        access.next_file = file
        occasion.error = error
        life = self.life(tp)
        event = NextFileEvent.MADE if error is None else NextFileEvent.FAILED
        self.run(life, life.on_next_file(event), occasion)

    def _fail_next(self, life: HeadLife, occasion: Occasion) -> None:
        """Refuse those who wait for the file that could not be made."""
        tp = occasion.partition.topic_partition
        members = self.heads[tp].members
        assert occasion.error is not None
        self._waiting.refuse(
            tp, lambda waiting: waiting.request.ahead_of_file_id in members, occasion.error
        )

    def _grant_next(self, life: HeadLife, occasion: Occasion) -> None:
        tp, peer = occasion.partition.topic_partition, occasion.peer
        access = self.heads[tp]
        assert peer is not None and access.next_file is not None
        successor = HeadAccess(
            occasion.partition,
            access.next_file,
            peer.engine,
            shared=False,
            entries=peer.max_in_flight,
            hole_timeout_ms=self._hole_timeout_ms,
        )
        access.successor, access.next_file = successor, None
        life.on_next_file(NextFileEvent.GRANTED)
        self._counters["rdma_heads_ahead"] += 1
        try:
            occasion.answer = self._join(successor, peer, occasion.request)
        except BaseException:
            life.on_next_file(NextFileEvent.DROPPED)
            self._drop_next(life, occasion)
            raise

    def _drop_next(self, life: HeadLife, occasion: Occasion) -> None:
        """The head does not go on in the next file, which is discarded."""
        access = self.heads[occasion.partition.topic_partition]
        successor, access.successor = access.successor, None
        file, access.next_file = access.next_file, None
        if successor is not None:
            file = successor.prepared
            # Now, not on the thread: the half of the ring into which this is said may be the next
            # grant's.
            successor.engine.worker.close_head(successor.requests, True)
        self._discard(access, file, successor)

    def _drop_next_silently(self, life: HeadLife, occasion: Occasion) -> None:
        """The same, without a word to its producer: its ring may be gone by now."""
        successor = self.heads[occasion.partition.topic_partition].successor
        if successor is not None:
            for file_id in successor.members:
                successor.engine.worker.retire(file_id, False)
        self._drop_next(life, occasion)

    def _discard(
        self, access: HeadAccess, file: PreparedHead | None, successor: HeadAccess | None
    ) -> None:
        if file is None:
            return

        def discarded(result: None = None, error: BaseException | None = None) -> None:
            if successor is not None:
                successor.end(self._grants, self.on_broker_requests)

        work = partial(self.files.discard, file, successor)
        if self.stopping:
            work()
            discarded()
        else:
            self._appends.on_thread(access.partition, work, discarded)

    # -- the next file becomes the head ------------------------------------------------------------

    def _stop_for_next(self, life: HeadLife, occasion: Occasion) -> None:
        """The producer of a head has written the first request into the file after it.  (If the
        head has ended in another way, the worker's news of that is on its way, and the producer
        repeats what it wrote there.)"""
        access = self.heads[occasion.partition.topic_partition]
        if access.engine.worker.close_head(access.requests, False):
            self.happened(Event.STOPPED, occasion)

    def _succeed(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        successor = access.successor
        assert successor is not None
        if not self.stopping:
            self._appends.on_thread(
                access.partition,
                partial(self.files.succeed, access, successor),
                partial(self._succeeded, access, successor),
            )

    def _succeeded(
        self,
        access: HeadAccess,
        successor: HeadAccess,
        segment: Segment | None,
        error: BaseException | None,
    ) -> None:
        """The thread has put the next file in the head's place, or could not."""
        tp = access.partition.topic_partition
        occasion = Occasion(access.partition, why="others have asked for it, too")
        life = self.life(tp)
        if segment is None:
            log.error("%s cannot go on in the file that was granted ahead: %s", tp, error)
            life.on_next_file(NextFileEvent.DROPPED)
            self.happened(Event.SUCCESSION_FAILED, occasion)
            return
        self.heads[tp] = successor
        access.successor = None  # in this order: see `access_to`
        life.on_next_file(NextFileEvent.BECAME_HEAD)
        begun = successor.become_head(segment)
        self._end_answered(access)
        event = life.classify_succession(
            begun=begun and self.files.is_current(access),
            wanted=self._appends.waiting(tp) or self._waiting.any_for_head(tp),
        )
        self.happened(event, occasion)
        self._waiting.serve(tp)

    def _end_next(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        successor, access.successor = access.successor, None
        if successor is not None:
            successor.end(self._grants, self.on_broker_requests)

    def _end_answered(self, access: HeadAccess, wait_s: float = ANSWER_CHECK_S) -> None:
        """Forget a head after which another is filled, once its producer has all its answers."""
        if access.ended:
            self._unanswered.discard(access)
            return
        if self.life(access.partition.topic_partition).state in LED_ELSEWHERE:
            self._drop_gated(access)  # the high watermark moves by what another leader says
        if access.is_answered() or self.stopping:
            self._unanswered.discard(access)
            access.end(self._grants, self.on_broker_requests)
        else:
            self._unanswered.add(access)
            longer_s = min(2 * wait_s, LONGEST_ANSWER_CHECK_S)
            self._scheduler.later(wait_s, self._end_answered, access, longer_s)

    # -- the end of a head -------------------------------------------------------------------------

    def _drain(self, life: HeadLife, occasion: Occasion) -> None:
        """Nobody reserves any more; the head ends when everything reserved is committed.  If nobody
        knows which reservation was the first to fail, the word does, unless one has failed
        already."""
        access = self.heads[occasion.partition.topic_partition]
        assert access.word is not None
        closed = access.word.close()
        end_order = occasion.end_order
        if end_order is None and closed.position <= access.capacity:
            end_order = closed.order
        access.engine.worker.drain(access.requests, end_order)

    def _expire_hole(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        access.engine.worker.expire_hole(access.requests, LOST_HOLE_MS)

    def _recall(self, life: HeadLife, occasion: Occasion) -> None:
        """Ask the exclusive holder to finish and to come back."""
        tp = occasion.partition.topic_partition
        access = self.heads[tp]
        self._counters["rdma_recalls"] += 1
        (grant,) = access.members.values()
        log.info("RDMA access to %s recalled from %s: %s", tp, grant.peer.client, occasion.why)
        access.engine.worker.recall(grant.file_id)
        self._check_recall_later(life, occasion)

    def _check_recall_later(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        self._scheduler.later(RECALL_CHECK_S, self._check_recall, access, access.requests.position)

    def _check_recall(self, access: HeadAccess, position: int) -> None:
        """Has the holder committed something since the head was at `position`?"""
        if self.is_current(access) and not access.fencing and access.requests is not None:
            life = self.life(access.partition.topic_partition)
            event = life.classify_recall(progress=access.requests.position != position)
            self.happened(event, Occasion(access.partition))

    def on_head(self, requests: Any) -> None:
        """The worker says that a head was drained or aborted, or that the first request has arrived
        in the file that was granted ahead."""
        access: HeadAccess = requests.owner
        current = self.current(access.partition.topic_partition)
        if current is None:
            return
        if current.successor is access:
            event = Event.NEXT_WRITTEN
        elif current is not access:
            return
        elif requests.why is AbortReason.NONE:
            event = Event.DRAINED
        else:
            full = requests.why is AbortReason.NO_ROOM
            event = Event.ABORTED_FULL if full else Event.ABORTED
        self.happened(event, Occasion(access.partition))

    def _report_cut(self, life: HeadLife, occasion: Occasion) -> None:
        """The worker has aborted the head, and told its producers."""
        access = self.heads[occasion.partition.topic_partition]
        self._counters["rdma_heads_cut"] += 1
        log.warning(
            "%s: %s; the head is cut at position %d, and its %d RDMA producers repeat what was not"
            " acknowledged",
            access.partition.topic_partition,
            access.requests.why.text,
            access.tail,
            len(access.members),
        )
        if access.word is not None:
            access.word.close()

    def _stop(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        access.engine.worker.close_head(access.requests, False)

    def _revoke(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        access.engine.worker.close_head(access.requests, True)

    def _withdraw(self, life: HeadLife, occasion: Occasion) -> None:
        """Another broker is to lead.  What is committed here and not confirmed by replicas may be
        cut off: its producers repeat it there."""
        access = self.heads[occasion.partition.topic_partition]
        access.engine.worker.close_head(access.requests, True)
        for one in self.with_waiting(access.partition):
            self._drop_gated(one)
        if access.word is not None:
            access.word.close()

    def _drop_gated(self, access: HeadAccess, *, for_replicas: bool = False) -> None:
        if access.requests is not None:
            access.engine.worker.drop_gated(access.requests, for_replicas=for_replicas)

    def with_waiting(self, partition: Partition) -> list[HeadAccess]:
        """The present head, and those before it that lack acknowledgements."""
        heads = (self.heads.get(partition.topic_partition), *self._unanswered)
        return [x for x in heads if x is not None and x.partition is partition]

    def too_few(self, partition: Partition) -> None:
        """Fewer replicas are in sync than ``min.insync.replicas``.  Producers with acks=all, of the
        present head and of those before it that lack acknowledgements, are told that what waits was
        not committed; they repeat it, and are refused access until there are enough.  Those with
        acks=1 that share a head with one of them repeat what is under way on the next."""
        for access in list(self._unanswered):
            if access.partition is partition:
                self._drop_gated(access, for_replicas=True)
        current = self.current(partition.topic_partition)
        if current is None:
            return
        heads = [current] if current.successor is None else [current, current.successor]
        if any(g.waits_for_replicas for head in heads for g in head.members.values()):
            self.happened(Event.TOO_FEW, Occasion(partition))

    def _fail_waiting(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        log.info("%s: %s", access.partition.topic_partition, EndReason.TOO_FEW.value)
        access.engine.worker.close_head(access.requests, True)
        self._drop_gated(access, for_replicas=True)
        if access.word is not None:
            access.word.close()

    def _report_resigned(self, life: HeadLife, occasion: Occasion) -> None:
        self.resigned(occasion.partition.topic_partition)

    def _close_later(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        self._scheduler.later(GRACE_S, self._grace_over, access)

    def _grace_over(self, access: HeadAccess) -> None:
        if self.is_current(access):
            self.happened(Event.GRACE_OVER, Occasion(access.partition))

    def _close(self, life: HeadLife, occasion: Occasion) -> None:
        """End a head, repair its file or leave it, on a thread; then serve whoever has waited."""
        access = self.heads[occasion.partition.topic_partition]
        self._drop_gated(access)  # else nobody would tell who still waits
        if self.stopping:
            self.files.put_away(access, False, 0)
            self.happened(Event.CLOSED, Occasion(access.partition))
            return
        self._appends.on_thread(
            access.partition,
            self.files.putting_away(access, life.rolls, occasion.min_bytes),
            partial(self._closed, access),
        )

    def _closed(self, access: HeadAccess, safe: bool | None, error: BaseException | None) -> None:
        tp = access.partition.topic_partition
        if error is not None:
            log.error("the end of RDMA access to %s failed", tp, exc_info=error)
        if not safe and self.life(tp).state is State.RESIGNING and not self.stopping:
            # Another leader's records may not go into a file that a producer can still write.
            self._scheduler.later(FENCE_AGAIN_S, self._close_again, access)
            return
        if self.is_current(access):
            self.happened(Event.CLOSED, Occasion(access.partition))

    def _close_again(self, access: HeadAccess) -> None:
        if self.is_current(access):
            occasion = Occasion(access.partition)
            self._close(self.life(access.partition.topic_partition), occasion)

    def _forget(self, life: HeadLife, occasion: Occasion) -> None:
        """Forget a head that is put away; what was not committed of the broker's own requests waits
        again."""
        tp = occasion.partition.topic_partition
        access = self.heads[tp]
        unanswered = access.end(self._grants, self.on_broker_requests)
        del self.heads[tp]
        self._appends.put_back(tp, unanswered)

    def _resume(self, life: HeadLife, occasion: Occasion) -> None:
        """The partition is not held any more by a head, or by one that was being made."""
        if not self.stopping:
            tp = occasion.partition.topic_partition
            self._appends.release(tp)
            self._waiting.serve(tp)

    def _serve_waiting(self, life: HeadLife, occasion: Occasion) -> None:
        self._waiting.serve(occasion.partition.topic_partition)

    def rolled_away(self, access: HeadAccess) -> None:
        if self.is_current(access):
            self.happened(Event.ROLLED_AWAY, Occasion(access.partition))

    # -- the broker's own appends, to a head that producers write ----------------------------------

    def reserve_for(self, item: PendingAppend) -> bool:
        """Submit a Kafka client's batches, or a marker, to a head that producers write; False: not
        now."""
        tp, event, why = item.partition.topic_partition, Event.APPEND, "a Kafka client appends"
        access = self.current(tp)
        if item.is_marker:
            fits = access is not None and access.takes_between(len(item.data))
            event, why = self.life(tp).classify_marker(fits_between=fits), "a transaction ends"
        occasion = Occasion(item.partition, why=why)
        occasion.item = item
        return bool(self.happened(event, occasion).answer)

    def _reserve(self, life: HeadLife, occasion: Occasion) -> None:
        access, item = self.heads[occasion.partition.topic_partition], occasion.item
        assert item is not None and access.word is not None
        if len(access.broker_requests) >= BROKER_WINDOW:
            return
        try:
            reserved = access.word.reserve(len(item.data))
        except (RdmaError, TransportError) as e:
            # Nobody can tell what is reserved now.  The head takes no more, and is aborted when
            # what is missing is overdue; the append waits for the next one.
            log.error("%s: nothing can be reserved on the head: %s", item.partition, e)
            self.happened(Event.FULL, occasion)
            return
        if reserved.position + len(item.data) > access.capacity:
            if reserved.position <= access.capacity:
                occasion.end_order = reserved.order
            self.happened(Event.FULL, occasion)
            return
        self._submit(access, reserved.order, occasion)

    def _insert(self, life: HeadLife, occasion: Occasion) -> None:
        access = self.heads[occasion.partition.topic_partition]
        self._submit(access, access.requests.next_order, occasion)

    def _submit(self, access: HeadAccess, order: int, occasion: Occasion) -> None:
        assert occasion.item is not None
        answers = access.submit(order, occasion.item)
        if answers is not None:
            occasion.answer = True
            self.on_broker_requests(access.requests, answers)

    def on_broker_requests(self, requests: Any, answers: list[Any]) -> None:
        """The worker has committed, or refused, some of the broker's own requests."""
        access: HeadAccess = requests.owner
        tp = access.partition.topic_partition
        for answer in answers:
            item = access.broker_requests.pop(answer.order, None)
            if item is not None:
                item.settle(Appended(answer.error, answer.base_offset, answer.log_append_time))
        if answers:
            self._appended(tp)
        if access in self._reserving:
            return
        self._reserving.add(access)
        try:
            while self.is_current(access) and (item := self._appends.take(tp)) is not None:
                if not self.reserve_for(item):
                    self._appends.put_back(tp, [item])
                    return
        finally:
            self._reserving.discard(access)

    # -- the rest ----------------------------------------------------------------------------------

    def forget_history(self, tp: TopicPartition) -> None:
        """The partition is deleted; one of the same name may come."""
        life = self._lives.pop(tp, None)
        if life is not None and life.state not in (State.NOBODY, State.RESIGNED):
            # A thread is at work.
            life.forget_history()
            self._lives[tp] = life
        self.files.rolling.pop(tp, None)

    def counters(self) -> dict[str, int]:
        """By the names of `kdirect.metrics`."""
        return {**self._counters, "rdma_heads_fenced": self.files.fenced}
