"""Who writes a partition: exclusively, shared, or over Kafka's protocol (KafkaDirect §4.2.2).

Owns: the decision in which way producers write the head of each partition, and what follows when a
head is full, when a producer is gone, stops in the middle or writes rubbish.  The head itself is
`kdirect.broker.head_access`, the order of its requests `kdirect.broker.order`; records are touched
by neither.

    nobody ---- auto, alone -----> exclusive ---- a second producer, or a Kafka client ----> shared
       |                                                                                       |
       `------- not alone lately, or asked for -----------------------------------------------'
    exclusive -- the next one was granted ahead, and is written to --> it is sealed, and the next
    one is exclusive shared ---- full ------------> drained: everything reserved is committed ---->
    the head is rolled shared ---- hole, damage ----> aborted: cut at the last commit; the rest
    fails, to be repeated by its producers

Invariants:

- A head has one exclusive holder, or any number of shared ones, all over one transport (atomics of
  different devices are not atomic together).  A Kafka client always gets its turn: on a shared head
  it reserves on the same word, an exclusive one is recalled.
- While a producer fills a head that it holds exclusively it may be granted the file of the next
  one, which is nobody's segment yet. Its first request there says that it is done with the head:
  that is sealed, the file becomes the head, and what has arrived in it is committed.  Until then
  nothing in it is.  If the head ends in any other way the file is discarded, and its producer
  repeats what it has written there.
- Otherwise the next head is granted only when the last one has ended: its keys are out of reach and
  the bytes behind its tail are zeros, or it is sealed and the head is a fresh file.  Who asks
  meanwhile waits for the answer.
- Requests of one Kafka connection to one partition keep their order, whatever becomes of the head:
  from before a head is opened until its file is repaired the partition is held (`Appends.hold`),
  and what Kafka clients send waits, or is reserved on the word.
- A partition whose shared heads are aborted again and again is served over TCP for a while, and so
  is one that a producer wants for itself while Kafka clients write it.

Files are opened, rolled and cleared on threads (`on_thread`).  Meanwhile nobody gets the head: one
that is being made has the partition held and no `HeadAccess` yet, one that ends has a `HeadAccess`
that is `ending` until its file is repaired.

All methods run on the broker's event loop, except where said.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends, PendingAppend, resolve
from kdirect.broker.grants import (
    INVALID_REQUEST,
    MESSAGE_TOO_LARGE,
    RECORD_LIST_TOO_LARGE,
    STORAGE_ERROR,
    UNKNOWN_SERVER_ERROR,
    UNKNOWN_TOPIC_OR_PARTITION,
    Grant,
    GrantTable,
    Peer,
)
from kdirect.broker.head_access import OWN_WINDOW, Appended, HeadAccess
from kdirect.broker.order import AbortReason
from kdirect.errors import (
    AccessDeniedError,
    KdirectError,
    RdmaError,
    RefusedError,
    RevokedError,
    StorageFullError,
    UnknownTopicError,
)
from kdirect.format import layout
from kdirect.log.head import PreparedHead
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition, now_ms
from kdirect.log.segment import Segment
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.rdma")

SHARED_S = 10.0  # after a partition had several producers, the next head is shared at once
CONTENTION_S = 1.0
CONTENTION_MAX_S = 30.0
ABORTS_WITHIN_S = 10.0
ABORTS = 5
# A producer that is told of a recall stops by itself; if its next WRITE met a dead key instead, its
# queue pair would break with everything on it.
GRACE_S = 0.002
RECALL_CHECK_S = (
    0.005  # a holder that commits nothing for so long is idle or stopped, and is not waited for
)
RECALL_CHECKS = 100
HURRY_MS = 50  # a hole that a producer may have left which is gone
WAIT_S = 30.0
WIND_UP_S = 0.001  # between two looks whether a producer that has gone on has all its answers
MAX_ACK_ENTRIES = 1 << 16
IDLE_BYTES = 1 << 20  # so much of a quiet head is not left to producers that do not write


class _NotYet(Exception):
    """The head is about to end: the request is looked at again then."""


class Waiting:
    """A request for access that is answered later: `answer(fields)` or `answer(RefusedError)` is
    called once."""

    __slots__ = ("__weakref__", "answer", "partition", "peer", "request")

    def __init__(self, peer: Peer, partition: Partition, request: Any) -> None:
        self.peer = peer
        self.partition = partition
        self.request = request
        self.answer: Callable[[Any], None] | None = None

    def settle(self, outcome: Any) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer(outcome)


def _refusal(error: BaseException) -> RefusedError:
    """What to answer to a request for access that failed."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, StorageFullError):
        return RefusedError(STORAGE_ERROR, str(error))
    if isinstance(error, RdmaError):
        return RefusedError(layout.ERROR_ACCESS_DISABLED, str(error))
    return RefusedError(UNKNOWN_SERVER_ERROR, str(error))


class ProduceAccess:
    """See the module.  `later(callback, *args)` calls back on the event loop, from any thread;
    `call_later(seconds, callback, *args)` after a while."""

    def __init__(
        self, logs: LogManager, grants: GrantTable, config: Mapping[str, Any], *, appends: Appends,
        later: Callable[..., None], call_later: Callable[..., None],
        new_future: Callable[[], asyncio.Future[Any]], appended: Callable[[TopicPartition], None], watched: set[TopicPartition],
    ) -> None:  # fmt: skip
        self._logs = logs
        self._grants = grants
        self._appends = appends
        appends.on_idle = self._serve
        self.stopping = False  # nothing is left to the event loop any more
        self._enabled = bool(config["rdma.produce"])
        self._sync_first = bool(config["log.flush.before.ack"])
        self._hole_timeout_ms = int(config["rdma.produce.hole.timeout.ms"])
        self._later = later
        self._call_later = call_later
        self._new_future = new_future
        self._appended = appended
        self._watched = watched
        self._heads: dict[TopicPartition, HeadAccess] = {}
        self._waiting: dict[TopicPartition, deque[Waiting]] = {}
        self._deleting: set[TopicPartition] = set()
        # The segment that a partition is about to roll away from, written by the thread that rolls:
        # see `_open`.
        self._rolling: dict[TopicPartition, Segment] = {}
        self._shared_until: dict[TopicPartition, float] = {}
        # Until when, and for how long that was: partitions not given out alone, and not given out
        # at all.
        self._contended: dict[TopicPartition, tuple[float, float]] = {}
        self._banned: dict[TopicPartition, tuple[float, float]] = {}
        self._aborts: dict[TopicPartition, deque[float]] = {}
        self._counters = dict.fromkeys(
            (
                "rdma_recalls",
                "rdma_exclusive_heads",
                "rdma_shared_heads",
                "rdma_heads_cut",
                "rdma_heads_fenced",
                "rdma_heads_ahead",
            ),
            0,
        )

    # -- requests for access -----------------------------------------------------------------------

    def request(self, peer: Peer, partition: Partition, request: Any) -> dict[str, Any] | Waiting:
        """Fields of the answer, or who waits for them.  Raises RefusedError."""
        tp = partition.topic_partition
        if not self._enabled:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                "RDMA produce is switched off on this broker (rdma.produce=false); use TCP",
            )
        if request.mode not in (
            layout.PRODUCE_EXCLUSIVE,
            layout.PRODUCE_SHARED,
            layout.PRODUCE_AUTO,
        ):
            raise RefusedError(
                INVALID_REQUEST,
                f"produce mode {request.mode} is not offered; use 0 (exclusive), 1 (shared) or 2 (either)",
            )
        entries = request.ack_entries
        if not 2 <= entries <= MAX_ACK_ENTRIES or entries & (entries - 1):
            raise RefusedError(
                INVALID_REQUEST,
                f"AckEntries {entries} is not a power of two from 2 to {MAX_ACK_ENTRIES}",
            )
        if not 0 < request.min_bytes <= partition.config.max_message_bytes:
            raise RefusedError(
                MESSAGE_TOO_LARGE,
                f"a batch of {request.min_bytes} bytes is over max.message.bytes of {tp} ({partition.config.max_message_bytes})",
            )
        if request.min_bytes > partition.config.segment_bytes:  # said before a head is ended for it
            raise RefusedError(
                RECORD_LIST_TOO_LARGE,
                f"a batch of {request.min_bytes} bytes is over segment.bytes of {tp} ({partition.config.segment_bytes})",
            )
        self.listen(partition)
        try:
            return self._grant(peer, partition, request)
        except _NotYet:
            waiting = Waiting(peer, partition, request)
            self._waiting.setdefault(tp, deque()).append(waiting)
            # By a weak reference: the timer outlives the answer, and must not keep a client that is
            # gone, with its memory and keys.
            self._call_later(WAIT_S, self._give_up, weakref.ref(waiting))
            return waiting

    def _give_up(self, reference: weakref.ref[Waiting]) -> None:
        waiting = reference()
        if waiting is not None and waiting.answer is not None:
            tp = waiting.partition.topic_partition
            self._waiting.get(tp, deque()).remove(waiting)
            waiting.settle(
                RefusedError(
                    layout.ERROR_ACCESS_CONTENDED,
                    f"{tp} has no head to grant; retry later or use TCP",
                )
            )

    def _grant(self, peer: Peer, partition: Partition, request: Any) -> dict[str, Any]:
        tp = partition.topic_partition
        access = self._heads.get(tp)
        if request.ahead_of_file_id >= 0:
            return self._grant_ahead(peer, partition, request)
        finished = peer.grants.get(request.finished_file_id)
        if finished is not None and finished.is_produce and finished.partition is partition:
            if access is None or finished.head is not access:
                self.release(finished)
            elif access.shared:
                self._drain(
                    access,
                    request.end_order if 0 <= request.end_position <= access.capacity else None,
                )
                raise _NotYet
            else:
                finished.released = True
                self._finish(access, min_bytes=request.min_bytes)
                access.engine.worker.remove(finished.file_id)
        elif access is not None:
            for mine in [
                g for g in access.members.values() if g.peer is peer
            ]:  # it has forgotten its grant, and what was under way
                self.release(mine, clean=False)
            access = self._heads.get(tp)
        if access is not None and (access.ending or access.draining):
            raise _NotYet
        if access is None:
            return self._open(peer, partition, request)
        alone = request.mode == layout.PRODUCE_EXCLUSIVE
        if alone or access.explicit:
            who = next((g.peer.client for g in access.members.values()), "?")
            raise RefusedError(
                layout.ERROR_ACCESS_HELD,
                f"{tp} is written by another RDMA producer ({who}), and one of the two wants it alone; retry later or use TCP",
            )
        if access.engine is not peer.engine:
            raise RefusedError(
                layout.ERROR_ACCESS_CONTENDED,
                f"{tp} is written over {access.engine.transport}, not {peer.engine.transport}; use TCP",
            )
        if not access.shared:
            self._recall(access, f"{peer.client} asks for it, too")
            raise _NotYet
        if access.tail >= access.capacity:  # there is nothing left of it to grant
            self._drain(access, None)
            raise _NotYet
        try:
            return access.join(
                self._grants,
                peer,
                request,
                sync_first=self._sync_first,
                watched=tp in self._watched,
            )
        except RevokedError:
            raise _NotYet from None
        except KdirectError:
            if access.ending:  # a thread has sealed it meanwhile
                raise _NotYet from None
            raise

    def _open(self, peer: Peer, partition: Partition, request: Any) -> dict[str, Any]:
        """The first producer of a head."""
        tp = partition.topic_partition
        alone = request.mode == layout.PRODUCE_EXCLUSIVE
        for table, why in (
            (self._banned, "shared writes to it failed again and again"),
            (self._contended, "Kafka clients write it"),
        ):
            left = table.get(tp, (0.0, 0.0))[0] - time.monotonic()
            if left > 0 and (alone or table is self._banned):
                raise RefusedError(
                    layout.ERROR_ACCESS_CONTENDED,
                    f"{tp} is not granted now: {why}; retry in {left:.1f} s or use TCP",
                )
        shared = request.mode == layout.PRODUCE_SHARED or (
            request.mode == layout.PRODUCE_AUTO
            and time.monotonic() < self._shared_until.get(tp, 0.0)
        )
        if tp in self._deleting or not self._appends.is_free(tp):
            raise _NotYet  # a thread makes room in it, or takes it away
        segment = partition.head_nowait(request.min_bytes)
        if segment is None or self._rolling.get(tp) is segment:
            self._prepare(partition, request)
            raise _NotYet
        self._appends.hold(tp)
        try:
            access = HeadAccess(
                partition, segment, peer.engine, shared=shared, explicit=alone,
                entries=OWN_WINDOW if shared else peer.max_in_flight, hole_timeout_ms=self._hole_timeout_ms,
            )  # fmt: skip
        except BaseException:
            self._appends.release(tp)
            raise
        self._heads[tp] = access
        self._counters["rdma_shared_heads" if shared else "rdma_exclusive_heads"] += 1
        if self._rolling.get(tp) is segment:
            # A thread rolls it away and has not found this access.  (If it looks from now on, it
            # finds it: `before_roll`.)
            self._finish(access, min_bytes=request.min_bytes)
            raise _NotYet
        try:
            return access.join(
                self._grants,
                peer,
                request,
                sync_first=self._sync_first,
                watched=tp in self._watched,
            )
        except BaseException as e:
            rolled = (
                access.ending
            )  # by a thread, which has found this access: there is another head in a moment
            self._finish(access, min_bytes=request.min_bytes if rolled else 0)
            if rolled and isinstance(e, KdirectError):
                raise _NotYet from None
            raise

    def _prepare(self, partition: Partition, request: Any) -> None:
        """Have a head made, on a thread; then look at those who wait again."""
        tp = partition.topic_partition
        self._appends.hold(tp)
        self._appends.on_thread(
            partition,
            partial(self._ensure_head, partition, request.min_bytes),
            partial(self._prepared, partition, request),
        )

    def _ensure_head(self, partition: Partition, min_bytes: int) -> Segment:
        """On a thread.  A roll that is under way is over when `ensure_head` returns, so what was
        noted of it before is of no use."""
        self._rolling.pop(partition.topic_partition, None)
        return partition.ensure_head(min_bytes)

    def _prepared(
        self,
        partition: Partition,
        request: Any,
        segment: Segment | None,
        error: BaseException | None,
    ) -> None:
        tp = partition.topic_partition
        if error is not None:
            waiting = self._waiting.get(tp, deque())
            for one in [x for x in waiting if x.request is request]:
                waiting.remove(one)
                one.settle(_refusal(error))
        self._resume(tp)

    # -- the head after the present one ------------------------------------------------------------

    def _grant_ahead(self, peer: Peer, partition: Partition, request: Any) -> dict[str, Any]:
        """The file after the one that this producer fills."""
        tp = partition.topic_partition
        access = self._heads.get(tp)
        filled = peer.grants.get(request.ahead_of_file_id)
        if (
            access is None
            or filled is None
            or filled.head is None
            or filled.head not in (access, access.after)
        ):
            raise RefusedError(
                INVALID_REQUEST,
                f"file {request.ahead_of_file_id} is not the head of {tp} which this producer writes",
            )
        if (
            access.shared
            or access.recalled
            or self._appends.waiting(tp)
            or (access.ending and access.after is None)
        ):
            raise RefusedError(
                layout.ERROR_ACCESS_CONTENDED,
                f"others write {tp}, too: ask again when this head is full",
            )
        if access.capacity < access.full_length:
            raise RefusedError(
                layout.ERROR_ACCESS_CONTENDED,
                f"the head of {tp} grows: ask again when this one is full",
            )
        if filled.head is access.after:
            raise _NotYet  # it becomes the head in a moment
        if access.after is not None:
            raise RefusedError(
                INVALID_REQUEST, f"the file after the head of {tp} is granted already"
            )
        if access.next_file is None:
            if not access.preparing:
                access.preparing = True
                self._appends.on_thread(
                    partition, partition.prepare_next, partial(self._next_prepared, access)
                )
            raise _NotYet
        after = HeadAccess(
            partition, access.next_file, peer.engine, shared=False, explicit=access.explicit, entries=peer.max_in_flight,
            hole_timeout_ms=self._hole_timeout_ms, before=access,
        )  # fmt: skip
        access.after, access.next_file = after, None
        access.preparing = False
        self._counters["rdma_heads_ahead"] += 1
        try:
            return after.join(
                self._grants,
                peer,
                request,
                sync_first=self._sync_first,
                watched=tp in self._watched,
            )
        except BaseException:
            self._drop_after(access)
            raise

    def _next_prepared(
        self, access: HeadAccess, file: PreparedHead | None, error: BaseException | None
    ) -> None:
        """A thread has made the file after a head, or could not."""
        tp = access.partition.topic_partition
        access.next_file = file
        if access.finishing:
            self._drop_after(access)
        elif error is not None:
            access.preparing = False
            waiting = self._waiting.get(tp, deque())
            for one in [x for x in waiting if x.request.ahead_of_file_id in access.members]:
                waiting.remove(one)
                one.settle(_refusal(error))
        self._serve(tp)

    def _drop_after(self, access: HeadAccess) -> None:
        """A head ends otherwise than by its producer going on in the next file: that is of no use
        any more."""
        after, access.after = access.after, None
        file, access.next_file = access.next_file, None
        if after is not None:
            after.finishing = after.ending = True
            file = after.prepared
            # Now, not on the thread: the half of the ring into which this is said may be the next
            # grant's.
            after.engine.worker.close_head(after.head, True)
        if file is None:
            return

        def discard() -> None:
            if after is not None:
                after.fence(notify=False)
            file.discard()

        def dropped(result: None = None, error: BaseException | None = None) -> None:
            if after is not None:
                after.end(self._grants, self.on_own)

        if self.stopping:
            discard()
            dropped()
        else:
            self._appends.on_thread(access.partition, discard, dropped)

    def _go_on(self, access: HeadAccess) -> None:
        """The producer of a head has written the first request into the file after it: that is the
        head now."""
        after = access.after
        if (
            access.ending
            or after is None
            or after.ending
            or not access.engine.worker.close_head(access.head, False)
        ):
            return  # the head ends in another way, and its producer repeats what it wrote there
        access.finishing = access.ending = True
        if self.stopping:
            return
        self._appends.on_thread(
            access.partition,
            partial(self._roll_into, access, after),
            partial(self._gone_on, access, after),
        )

    def _roll_into(self, access: HeadAccess, after: HeadAccess) -> Segment:
        """On a thread: seal the head, which its producer has left, and put the file after it in its
        place."""
        access.fence(notify=False)
        assert access.segment is not None and after.prepared is not None
        if not access.left:
            access.segment.keep_length = True
        try:
            return access.partition.roll_into(after.prepared)
        except BaseException:
            after.fence(notify=True)
            after.prepared.discard()
            self._put_away(access, False, 0)  # it stays the head
            raise

    def _gone_on(
        self,
        access: HeadAccess,
        after: HeadAccess,
        segment: Segment | None,
        error: BaseException | None,
    ) -> None:
        tp = access.partition.topic_partition
        access.after = None
        if segment is None:
            log.error("%s cannot go on in the file that was granted ahead: %s", tp, error)
            after.end(self._grants, self.on_own)
            if self._put_back(access):
                self._resume(tp)
            return
        self._heads[tp] = after
        begun = after.go_on(segment)
        self._wind_up(access)
        if (
            not begun
            or after.ending
            or tp in self._deleting
            or self._logs.partitions.get(tp) is not access.partition
        ):
            after.engine.worker.close_head(
                after.head, True
            )  # what its producer wrote there is not committed, and it waits for that
            self._finish(after)
        elif (
            access.recalled
            or self._appends.waiting(tp)
            or any(x.request.ahead_of_file_id < 0 for x in self._waiting.get(tp, ()))
        ):
            self._recall(after, "others have asked for it, too")
        self._serve(tp)

    def _wind_up(self, access: HeadAccess) -> None:
        """Forget a head after which another is filled, once its producer has all its answers."""
        if access.ended:
            return
        if access.is_answered() or self.stopping:
            access.end(self._grants, self.on_own)
        else:
            self._call_later(WIND_UP_S, self._wind_up, access)

    # -- the end of a head -------------------------------------------------------------------------

    def _drain(self, access: HeadAccess, end_order: int | None) -> None:
        """The head is full: it ends when everything reserved is committed.  `end_order`: of the
        reservation that was the first to fail; if nobody knows it, the word does, unless a
        reservation has failed already."""
        if access.ending or access.word is None:
            return
        access.draining = True
        closed = access.word.close()
        if end_order is None and closed.position <= access.capacity:
            end_order = closed.order
        access.engine.worker.drain(access.head, end_order)

    def _recall(self, access: HeadAccess, why: str, *, share: bool = True) -> None:
        """Ask the exclusive holder to finish and to come back; it will then share (`share`)."""
        if access.recalled:
            return
        access.recalled = True
        tp = access.partition.topic_partition
        if share:
            self._shared_until[tp] = time.monotonic() + SHARED_S
        self._counters["rdma_recalls"] += 1
        (grant,) = access.members.values()
        log.info("RDMA access to %s recalled from %s: %s", tp, grant.peer.client, why)
        access.engine.worker.recall(grant.file_id)
        self._call_later(
            RECALL_CHECK_S, self._look_after_recall, access, access.head.position, RECALL_CHECKS
        )

    def _look_after_recall(self, access: HeadAccess, position: int, checks: int) -> None:
        if access.ending:
            return
        if access.head.position != position and checks > 0:
            self._call_later(
                RECALL_CHECK_S, self._look_after_recall, access, access.head.position, checks - 1
            )
            return
        access.ending = True
        access.engine.worker.close_head(access.head, True)
        self._call_later(GRACE_S, self._finish, access)

    def on_head(self, head: Any) -> None:
        """The worker says that a head was drained or aborted."""
        access: HeadAccess = head.owner
        if access.before is not None:
            self._go_on(access.before)
            return
        if access.ending:
            return
        access.ending = True
        if head.why is AbortReason.NONE:
            self._finish(access, roll=not access.idle)
            return
        tp = access.partition.topic_partition
        now = time.monotonic()
        aborts = self._aborts.setdefault(tp, deque(maxlen=ABORTS))
        aborts.append(now)
        if len(aborts) == ABORTS and now - aborts[0] < ABORTS_WITHIN_S:
            _hold_off(self._banned, tp)
            aborts.clear()
        self._counters["rdma_heads_cut"] += 1
        log.warning(
            "%s: %s; the head is cut at position %d, and its %d RDMA producers repeat what was not acknowledged",
            tp, head.why.text, access.tail, len(access.members),
        )  # fmt: skip
        if access.word is not None:
            access.word.close()
        self._call_later(
            GRACE_S, self._finish, access, access.draining or head.why is AbortReason.NO_ROOM
        )

    def _finish(self, access: HeadAccess, roll: bool = False, min_bytes: int = 0) -> None:
        """End a head, repair its file or leave it, on a thread; then serve who has waited.
        `min_bytes`: room that will be asked for."""
        if access.finishing:
            return
        access.finishing = access.ending = True
        access.engine.worker.close_head(access.head, False)
        self._drop_after(access)
        if self.stopping:
            self._put_away(access, False, 0)
            self._put_back(access)
            return
        self._appends.on_thread(
            access.partition,
            partial(self._put_away, access, roll, min_bytes),
            partial(self._finished, access),
        )

    def _put_away(self, access: HeadAccess, roll: bool, min_bytes: int) -> None:
        """On a thread: nobody writes the head any more when this returns, and its tail is zeros or
        its file is not the head."""
        partition = access.partition
        tp = partition.topic_partition
        access.fence(notify=False)
        end = access.written_end()
        assert (
            access.segment is not None
        )  # only a head is put away; a file granted ahead is dropped
        if (
            self._logs.partitions.get(tp) is not partition
            or partition.head is not access.segment
            or access.segment.sealed
        ):
            if not access.left:
                access.segment.keep_length = True
            return
        try:
            if not access.left:
                self._counters["rdma_heads_fenced"] += 1
                log.warning(
                    "%s: a producer did not leave its head in time: the log goes on in a fresh file",
                    tp,
                )
                partition.fence_head()
            else:
                partition.kernel.clear_tail(access.segment.base_offset, end)
                if roll:
                    partition.make_room()
            if min_bytes:
                self._ensure_head(partition, min_bytes)
        except (KdirectError, OSError) as e:  # who asks for access is told again
            log.error("%s cannot be rolled: %s", tp, e)

    def _finished(self, access: HeadAccess, result: None, error: BaseException | None) -> None:
        tp = access.partition.topic_partition
        if error is not None:
            log.error("the end of RDMA access to %s failed", tp, exc_info=error)
        if self._put_back(access):
            self._resume(tp)

    def _put_back(self, access: HeadAccess) -> bool:
        """Forget a head that is put away; what was not committed of the broker's own requests waits
        again.  False when it was forgotten before."""
        if access.ended:
            return False
        tp = access.partition.topic_partition
        unanswered = access.end(self._grants, self.on_own)
        if self._heads.get(tp) is access:
            del self._heads[tp]
        self._appends.put_back(tp, unanswered)
        return True

    def _resume(self, tp: TopicPartition) -> None:
        """The partition is not held any more by a head, or by one that was being made."""
        self._appends.release(tp)
        self._serve(tp)

    def _serve(self, tp: TopicPartition) -> None:
        """Look again at the requests for access that wait."""
        waiting = self._waiting.pop(tp, None)
        while waiting:
            one = waiting.popleft()
            if one.answer is None:
                continue
            if one.peer.closed:  # its queue pair was cut; its connection may still be there
                one.settle(
                    RefusedError(
                        layout.ERROR_UNKNOWN_CONNECTION,
                        "the queue pair that asked for access is closed; connect again",
                    )
                )
                continue
            try:
                one.settle(self._grant(one.peer, one.partition, one.request))
            except _NotYet:
                waiting.appendleft(one)
                waiting.extend(self._waiting.pop(tp, ()))
                self._waiting[tp] = waiting
                return
            except KdirectError as e:
                one.settle(_refusal(e))
            except (
                Exception
            ) as e:  # no descriptor is left, say; the others are to be looked at all the same
                log.exception("access of %s to %s failed", one.peer.client, tp)
                one.settle(_refusal(e))

    def release(self, grant: Grant, *, clean: bool = True) -> None:
        """A producer gives access back, or (not `clean`) is gone.  The second call does nothing."""
        if grant.released:
            return
        access = grant.head
        assert access is not None
        grant.released = True
        if grant.file_id not in access.members:  # its head has ended
            if grant.word is not None:
                self._grants.end_key(grant.word)
            self._grants.drop(grant)
            return
        if access.before is not None and not access.finishing:
            access.engine.worker.remove(grant.file_id)
            if access.before.finishing:
                access.ending = True  # its file is becoming the head, which then ends
            else:  # it has left the head, too, but wrote nothing after it
                self._finish(access.before)
            return
        if (
            access.finishing
        ):  # it goes with its head, in a moment; the worker writes into its ring no more
            access.engine.worker.remove(grant.file_id)
            return
        if not access.shared:
            if (
                access.after is not None
            ):  # nothing is said of the file ahead, for the ring may be gone by now
                for file_id in access.after.members:
                    access.engine.worker.retire(file_id, False)
            self._finish(access)
            access.engine.worker.remove(grant.file_id)  # its ring may go when it has the answer
            return
        access.leave(self._grants, grant, clean=clean)
        if not access.members:
            self._finish(access)
        elif not clean:
            access.engine.worker.hurry(access.head, HURRY_MS)

    def before_roll(self, partition: Partition) -> None:
        """The head is about to be sealed for another reason than its producers' wish (retention,
        roll by time).

        Any thread, and it may hold the partition's locks: so only what must be over before the seal
        is done here, the rest on the loop.
        """
        tp = partition.topic_partition
        self._rolling[tp] = partition.segments[
            -1
        ]  # before looking: `_open` looks here after it has put its access there
        access = self._heads.get(tp)
        if access is not None and not access.fenced:
            access.fence(notify=True)
            self._later(self._finish, access)

    def listen(self, partition: Partition) -> None:
        """Be asked before the partition's head is sealed, or shortened."""
        if self.before_roll not in partition.before_roll:
            partition.before_roll.append(self.before_roll)
            partition.before_give_back.append(self.may_give_back)

    def may_give_back(self, partition: Partition) -> bool:
        """May the unused part of a quiet head be freed?  Not while a producer may write it; one
        that holds much of it, or the file after it, without writing is asked to come back when it
        has something to write.  Nor while an RNIC has its pages pinned, for a consumer: they would
        not be the file's any more.  Any thread; holds the partition's roll lock."""
        access = self._heads.get(partition.topic_partition)
        head = access.head if access is not None else None
        if access is not None and head is not None:
            ahead = (
                access.after is not None or access.next_file is not None
            )  # a file as large as a whole head
            if ahead or access.capacity - head.position > IDLE_BYTES:
                self._later(self._end_idle, access)
            return False
        if any(
            file.partition is partition for file in list(self._grants.opening)
        ):  # first: then they are among the grants
            return False
        return not any(
            g.region is not None and g.peer.pins for g in self._grants.of(partition.topic_partition)
        )

    def _end_idle(self, access: HeadAccess) -> None:
        """End a head that nobody has written for a while, so that what is allocated of it can be
        given back."""
        if access.ending or access.draining or access.recalled:
            return
        if access.shared:
            access.idle = True
            self._drain(access, None)
        else:
            self._recall(access, "nothing was written for a while", share=False)

    def begin_deletion(self, partitions: Iterable[TopicPartition]) -> list[HeadAccess]:
        """These partitions are about to be deleted: nobody gets access, and appends wait, until
        `end_deletion`.  Their heads, to be fenced on a thread before the files go."""
        heads = []
        for tp in partitions:
            self._deleting.add(tp)
            self._appends.hold(tp)
            access = self._heads.get(tp)
            if access is not None and not access.finishing:  # else a thread puts it away already
                access.finishing = access.ending = True
                heads.append(access)
                self._drop_after(access)
        return heads

    def end_deletion(
        self, partitions: Iterable[TopicPartition], heads: Iterable[HeadAccess]
    ) -> None:
        """They are deleted, or (still in the log) could not be: producers and those who wait are
        told."""
        for access in heads:
            if self._put_back(access):
                self._appends.release(access.partition.topic_partition)
        for tp in partitions:
            self._deleting.discard(tp)
            if tp not in self._logs.partitions:
                gone = f"partition {tp} was deleted"
                self._appends.fail_waiting(tp, UnknownTopicError(gone))
                for waiting in self._waiting.pop(tp, ()):
                    waiting.settle(RefusedError(UNKNOWN_TOPIC_OR_PARTITION, gone))
                for memory in (
                    self._shared_until,
                    self._contended,
                    self._banned,
                    self._aborts,
                    self._rolling,
                ):
                    memory.pop(tp, None)
            self._resume(tp)

    # -- Kafka clients -----------------------------------------------------------------------------

    def append(self, partition: Partition, records: Any, when_ms: int | None = None) -> Any:
        """Append whole batches of a Kafka client: the result (see CommitResult), or a future of it
        while others are to come first. Raises as `Partition.append`."""
        tp = partition.topic_partition
        access = self._heads.get(tp)
        if access is None:
            return self._appends.append(partition, records, when_ms)
        when_ms = now_ms() if when_ms is None else when_ms
        error = partition.kernel.check(records, when_ms)
        if error:
            return Appended(error, -1, -1)
        future = self._new_future()
        item = PendingAppend(partition, bytes(records), when_ms, partial(resolve, future))
        self._shared_until[tp] = time.monotonic() + SHARED_S
        if self._appends.waiting(tp) or not self._reserve(access, item):
            self._appends.append_later(item)
        return future.result() if future.done() else future

    def _reserve(self, access: HeadAccess, item: PendingAppend) -> bool:
        """Bring a Kafka client's batches on their way on a head that producers write; False: not
        now."""
        if not access.shared:
            if access.explicit:
                _hold_off(self._contended, access.partition.topic_partition)
            if not access.ending:
                self._recall(access, "a Kafka client appends")
            return False
        if access.ending or access.draining or len(access.own) >= OWN_WINDOW:
            return False
        assert access.word is not None
        reserved = access.word.reserve(len(item.data))
        if reserved.position + len(item.data) > access.capacity:
            self._drain(access, reserved.order if reserved.position <= access.capacity else None)
            return False
        access.own[reserved.order] = item
        try:
            answers = access.engine.worker.offer(access.head, reserved.order, item.data)
        except AccessDeniedError:
            del access.own[reserved.order]
            return False
        self.on_own(access.head, answers)
        return True

    def on_own(self, head: Any, answers: list[Any]) -> None:
        """The worker has committed, or refused, some of the broker's own requests."""
        access: HeadAccess = head.owner
        tp = access.partition.topic_partition
        for answer in answers:
            item = access.own.pop(answer.order, None)
            if item is not None:
                item.settle(Appended(answer.error, answer.base_offset, answer.log_append_time))
        if answers:
            self._appended(tp)
        if access.pumping:
            return
        access.pumping = True
        try:
            while self._heads.get(tp) is access and (item := self._appends.take(tp)) is not None:
                if not self._reserve(access, item):
                    self._appends.put_back(tp, [item])
                    return
        finally:
            access.pumping = False

    # -- the rest ----------------------------------------------------------------------------------

    def watch(self, tp: TopicPartition) -> None:
        """Somebody waits for the next commit to `tp`."""
        access = self._heads.get(tp)
        for head in (access, access.after if access is not None else None):
            if head is not None:
                for file_id in head.members:
                    head.engine.worker.watch(file_id)

    def statistics(self) -> dict[str, int]:
        return dict(self._counters)


def _hold_off(table: dict[TopicPartition, tuple[float, float]], tp: TopicPartition) -> None:
    """For a second at first, twice as long each time it happens again soon."""
    now = time.monotonic()
    until, seconds = table.get(tp, (0.0, 0.0))
    seconds = min(2 * seconds, CONTENTION_MAX_S) if now < until + 2 * seconds else CONTENTION_S
    table[tp] = (now + seconds, seconds)
