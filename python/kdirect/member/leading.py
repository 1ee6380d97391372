"""A partition that this broker leads: what `cluster.leading_replica` decides is carried out.

Owns: one leader epoch of one partition: the machine's value, the acknowledgements that wait for
other brokers (acks=all), and those that wait for their log starts.  It begins when the replica's
log is ready to be led (`Partition.begin_epoch`) and ends with `resign`.

A partition without other replicas costs nothing here: its kernel moves the high watermark, and the
machine hears of its log only when that is asked for.

Once a follower is pushed to (`begin_push`), *marks* move the high watermark in the kernel, without
Python, until this leadership ends, and this decides who counts.  The machine hears of ends when
they are measured, so it may believe in an older high watermark than readers see.  That is harmless
but where it admits a follower: so a follower that is about to join counts first, and the proposal
goes out only if it has everything up to the high watermark of that moment.

Acknowledgements wait in a heap by the offset that they wait for, one future for each request.  They
end when the high watermark has passed them; when fewer replicas than ``min.insync.replicas`` are in
sync by the newest state, because the high watermark stands still then; at their time limit; and
when this broker leads no longer.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kdirect.cluster import leading_replica as machine
from kdirect.cluster.leading_replica import Event, Leading, Propose, ShowHighWatermark
from kdirect.errors import (
    KdirectError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    TimedOutError,
)
from kdirect.log.partition import Partition
from kdirect.log.urgent import Urgent
from kdirect.member.in_sync_changes import InSyncChanges
from kdirect.member.push import PushedLog
from kdirect.member.showing import RETRY_S, SHOWN, Showing
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

MEASURE_S = 0.1  # between two looks at followers that are pushed to and not in sync


class Surroundings(NamedTuple):
    """What a leader or follower works with.  `shown(tp)`: the high watermark has moved.
    `on_thread` as `FileThreads.for_partition`.  `now_ms()` never goes back; `time_ms()` is that of
    records.  `push_ended(tp, broker)`: tell this follower to fetch; `wants_file(tp, broker, ahead)`
    to let this leader write more, of the file after the present one or of that;
    `push_begun(tp, broker)`: what it was to be told of an earlier push holds no more;
    `is_fetched(tp)`: does a follower get its records by Fetch?  `released(tp)`: the high watermark
    may have moved without a word, because the gate holds it no more.  `too_few(tp)`: fewer replicas
    are in sync than ``min.insync.replicas`` from now on.  `hurry` as that of `FileThreads`."""

    broker: int
    changes: InSyncChanges
    on_thread: Callable[..., None]
    shown: Callable[[TopicPartition], None]
    now_ms: Callable[[], int]
    time_ms: Callable[[], int]
    push_ended: Callable[[TopicPartition, int], None] = lambda tp, broker: None
    wants_file: Callable[[TopicPartition, int, bool], None] = lambda tp, broker, ahead: None
    push_begun: Callable[[TopicPartition, int], None] = lambda tp, broker: None
    is_fetched: Callable[[TopicPartition], bool] = lambda tp: False
    released: Callable[[TopicPartition], None] = lambda tp: None
    too_few: Callable[[TopicPartition], None] = lambda tp: None
    hurry: Callable[[Any], None] = lambda partition: None


class Leader:
    """See the module.  All on the event loop."""

    def __init__(
        self,
        around: Surroundings,
        tp: TopicPartition,
        partition: Partition,
        leading: Leading,
        *,
        bound: bool,
    ) -> None:
        self.tp = tp
        self.partition = partition
        self.leading = leading
        self.starts: dict[int, int] = {}  # where the logs of followers start
        self._around = around
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waits = 0  # so far: breaks ties in the heap
        self._low: list[tuple[int, asyncio.Future[int]]] = []
        self.showing = Showing(partition, around.on_thread, self.shown)
        self._resigned = False
        # The log's gate waits for `showing`; else the kernel moves the high watermark.
        self._is_bound = bound
        self._gating: asyncio.Future[None] | None = None  # a thread is at work with the gate
        self._early: list[machine.Confirmed] = []
        self.pushed: PushedLog | None = None  # its marks move the high watermark
        self._rings: set[int] = set()  # the followers that are pushed to
        self._counted: tuple[tuple[int, ...], bool] | None = None
        self._measured_end = -1  # of the log, when ends were measured
        self._measures = False  # it is to be measured soon
        self.shrinks = 0
        self.expansions = 0

    @property
    def epoch(self) -> int:
        return self.leading.state.leader_epoch

    @property
    def has_resigned(self) -> bool:
        """Does its log belong to another epoch?"""
        return self._resigned

    @property
    def is_alone(self) -> bool:
        """Are there no other replicas?"""
        return not self.leading.followers

    @property
    def has_more(self) -> bool:
        """Does a follower lack records?"""
        end = self.partition.log_end_offset
        return any(follower.end < end for follower in self.leading.followers)

    @property
    def knows_high_watermark(self) -> bool:
        if self.pushed is not None:
            return self.partition.high_watermark >= self.leading.epoch_start
        return not self._is_bound or self.leading.knows_high_watermark

    @property
    def has_enough(self) -> bool:
        """Are so many replicas in sync as ``min.insync.replicas`` asks for?"""
        leading = self.leading
        return len(leading.state.in_sync) >= min(leading.min_in_sync, len(leading.replicas))

    # -- events ------------------------------------------------------------------------------------

    def begin(self, effects: tuple[machine.Effect, ...]) -> None:
        """What the machine wanted when it began."""
        self._carry_out(effects)
        self._look_at_gate()

    def feed(self, event: Event) -> None:
        """Something happened."""
        if self._resigned:
            return
        before, had_enough = self.leading.state, self.has_enough
        self.leading, effects = machine.step(self.leading, event)
        state = self.leading.state
        if state.version != before.version:
            self._around.changes.withdraw(self.tp)
            self._count(len(before.in_sync), len(state.in_sync))
        self._count_replicas()
        if had_enough and not self.has_enough:
            self._fail(NotEnoughReplicasAfterAppendError, self._few("were appended, but"))
            self._around.too_few(self.tp)
        self._carry_out(effects)
        self._look_at_gate()  # a follower that has left the replicas goes when it counts no more

    def appended(self) -> None:
        """The log has grown, perhaps."""
        if self.pushed is not None:
            self.pushed.push()
        self._look_at_end()

    def _look_at_end(self) -> None:
        if self._is_bound:
            end = self.partition.log_end_offset
            if end > self.leading.end:
                self.feed(machine.Appended(end))

    def confirmed(self, event: machine.Confirmed) -> None:
        """A follower says what it has."""
        if not self._is_bound:
            if not self.is_alone:
                self._early.append(event)
            return
        self._look_at_end()
        broker = event.broker
        if self.pushed is not None and broker not in self._rings and event.epoch == self.epoch:
            self.pushed.confirm(broker, event.incarnation, event.end)
        self.feed(event)

    def assigned(self, replicas: tuple[int, ...]) -> None:
        """The partition has these replicas now."""
        self.feed(machine.Assigned(replicas))

    def _look_at_gate(self) -> None:
        """Is it to hold?  While there are other replicas, the machine moves the high watermark, or
        marks do.  Once the last one is gone the kernel moves it: nobody feeds the machine what RDMA
        producers write, and their acknowledgements would wait for ever.  One work at a time: they
        could overtake each other."""
        alone = self.is_alone
        if self._resigned or self._gating is not None or self.pushed is not None:
            return
        if alone != self._is_bound:
            return
        self._gating = asyncio.get_running_loop().create_future()
        brokers = {} if alone else {SHOWN: self.partition.high_watermark}
        if alone:
            self._is_bound = False
            self.showing.stop()
        work = Urgent(partial(self.partition.set_replicas, brokers))
        self._around.on_thread(self.partition, work, partial(self._gated, alone))

    def _gated(self, alone: bool, result: Any, error: BaseException | None) -> None:
        """The gate holds, or (where this leader was `alone`) does not.  Until it did the kernel
        moved the high watermark, so no follower could be compared with what the machine believes.
        """
        gating, self._gating = self._gating, None
        assert gating is not None
        _settle(gating, None)
        if self._resigned:
            return
        if error is not None:
            without = "without" if alone else "with"
            log.error("%s cannot be led %s other replicas yet: %s", self.tp, without, error)
            self._is_bound = alone
            asyncio.get_running_loop().call_later(RETRY_S, self._look_at_gate)
            return
        if alone:
            self._let_go()
        else:
            self._bound()
        self._look_at_gate()  # meanwhile others may have come, or gone

    def _bound(self) -> None:
        self._is_bound = True
        self.feed(machine.Appended(self.partition.high_watermark))
        self.appended()
        early, self._early = self._early, []
        for event in early:
            self.feed(event)

    def _let_go(self) -> None:
        """The log's gate holds nothing any more.  That may have moved the high watermark, of which
        nobody else tells those who wait."""
        if not self._resigned:
            self.shown()
            self._around.released(self.tp)

    def ticked(self) -> None:
        """Some time has passed."""
        if not self.is_alone:
            self.appended()
            self.measure()
            self.feed(machine.Ticked(self._around.now_ms()))

    def _count(self, before: int, after: int) -> None:
        self.shrinks += after < before
        self.expansions += after > before

    # -- effects -----------------------------------------------------------------------------------

    def _carry_out(self, effects: tuple[machine.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case ShowHighWatermark(offset):
                    self._show(offset)
                case Propose():
                    self._propose(effect)

    def _show(self, offset: int) -> None:
        if not self._is_bound or self.pushed is not None:
            return  # the kernel does, or the marks do
        self.showing.show(offset)

    def shown(self) -> None:
        """The log's high watermark has moved."""
        self._settle()
        self._around.shown(self.tp)

    def _propose(self, effect: Propose) -> None:
        if self.pushed is not None and not self._may_all_join(effect.in_sync):
            self.feed(machine.Refused(effect.version))
            self._measure_later()
            return
        self._around.changes.propose(self.tp, self.epoch, effect, self.feed)

    # -- push --------------------------------------------------------------------------------------

    def begin_push(self, pushed: PushedLog) -> asyncio.Future[None] | None:
        """See `push.PushableLeader`.  The future: nothing else moves the high watermark."""
        if self._resigned or not self._is_bound or self.pushed is not None:
            return None
        self.pushed = pushed
        self.showing.stop()  # the marks do from now on
        self._count_replicas()
        for follower in self.leading.followers:
            if follower.end >= 0:
                pushed.confirm(follower.broker, follower.incarnation, follower.end)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = Urgent(partial(self.partition.set_replicas, {}))
        self._around.on_thread(self.partition, work, partial(self._begun, done))
        self.watch()
        self.shown()  # what was confirmed may have moved it before
        return done

    def _begun(self, done: asyncio.Future[None], result: Any, error: BaseException | None) -> None:
        """The gate holds nothing any more.  Where nobody counts by then it was the last to hold."""
        if error is None:
            self._let_go()
        _settle(done, error)

    def _count_replicas(self) -> None:
        """Tell the marks who counts: whoever may be in sync by then, and whoever is to join."""
        if self.pushed is None:
            return
        leading = self.leading
        counted = machine.counted_with_joining(leading)
        others = tuple(b for b in counted if b != self._around.broker)
        wanted = others, not machine.moves_high_watermark(leading)
        if wanted != self._counted:
            self._counted = wanted
            self.pushed.set_counted(others, stands_still=wanted[1])

    def _may_all_join(self, in_sync: tuple[int, ...]) -> bool:
        """They count already.  Has each that is new everything up to the high watermark?  From here
        on that cannot pass them."""
        assert self.pushed is not None
        new = set(in_sync) - {*self.leading.state.in_sync, self._around.broker}
        marks = self.pushed.marks()
        return all(marks.get(b, -1) >= self.partition.high_watermark for b in new)

    def pushes(self, broker: int) -> None:
        """See `push.PushableLeader`."""
        self._rings.add(broker)
        self._around.push_begun(self.tp, broker)
        self._measure_later()

    def wants_file(self, broker: int, *, ahead: bool) -> None:
        """See `push.PushableLeader`."""
        if not self._resigned:
            self._around.wants_file(self.tp, broker, ahead)

    def pushes_no_more(self, broker: int, *, tell: bool) -> None:
        """See `push.PushableLeader`."""
        if broker in self._rings:
            self.measure()
            self._rings.discard(broker)
            if not self._resigned:
                self.watch()  # it has to be told of the high watermark
                if tell:
                    self._around.push_ended(self.tp, broker)

    def measure(self) -> None:
        """Tell the machine what the followers that are pushed to have: first those in sync, so that
        it compares the others with a high watermark that is as new as their ends."""
        if self.pushed is None or self._resigned:
            return
        found = self.pushed.confirmations()
        self._look_at_end()  # after the ends were read: none of them is above it
        # What a ring has confirmed is no sign of life: a link that was lost comes back by Fetch.
        lost = {f.broker for f in self.leading.followers if machine.is_lost(f)}
        found = [x for x in found if x.broker not in lost]
        in_sync, before = self.leading.state.in_sync, self._measured_end
        full_at = {f.broker: f.end for f in self.leading.followers if f.is_full}
        self._measured_end = self.leading.end
        for x in sorted(found, key=lambda x: x.broker not in in_sync):
            level = 0 <= before <= x.end
            full = x.end <= full_at.get(x.broker, -1)  # else there was room since it said so
            self.feed(machine.Confirmed(x.broker, x.incarnation, self.epoch, x.end, level, full))

    def _measure_later(self) -> None:
        """Look at followers that are to join more often than ticks come."""
        lacks = self.leading.refused or self._rings - set(self.leading.state.in_sync)
        if lacks and not self._measures and not self._resigned:
            self._measures = True
            asyncio.get_running_loop().call_later(MEASURE_S, self._measure_soon)

    def _measure_soon(self) -> None:
        self._measures = False
        if self.leading.refused:
            self.feed(machine.Ticked(self._around.now_ms()))
        self.measure()
        self._measure_later()

    def moved(self) -> None:
        """See `push.PushableLeader`."""
        if not self._resigned:
            # Before it is looked at: what moves meanwhile is told, too.
            if self._waiting or self._around.is_fetched(self.tp):
                self.watch()
            self.shown()

    def watch(self) -> None:
        """Somebody waits for the high watermark."""
        if self.pushed is not None:
            self.pushed.watch()

    # -- acknowledgements that wait ----------------------------------------------------------------

    def may_append(self) -> None:
        """NotEnoughReplicasError below ``min.insync.replicas``."""
        if not self.has_enough:
            raise NotEnoughReplicasError(
                self._few("were not appended:"),
                hint="start brokers that have a replica, or lower min.insync.replicas",
            )

    def _few(self, what: str) -> str:
        leading = self.leading
        return (
            f"records for {self.tp} {what} {len(leading.state.in_sync)} replicas are in sync, and"
            f" min.insync.replicas is {leading.min_in_sync}"
        )

    def committed(self, end_offset: int, timeout_s: float) -> asyncio.Future[None]:
        """See `Replicas.committed`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self.partition.high_watermark < end_offset:
            self.appended()  # records may have come by another way than the caller's
        if self.partition.high_watermark >= end_offset:
            future.set_result(None)
        elif not self.has_enough:
            future.set_exception(NotEnoughReplicasAfterAppendError(self._few("were appended, but")))
        else:
            self._waits += 1
            heapq.heappush(self._waiting, (end_offset, self._waits, future))
            timer = loop.call_later(timeout_s, self._time_out, future, timeout_s)
            future.add_done_callback(lambda _: timer.cancel())
            if self.pushed is not None:
                self.pushed.watch()
                self._settle()  # it may have moved meanwhile
        return future

    def _time_out(self, future: asyncio.Future[None], timeout_s: float) -> None:
        if not future.done():
            future.set_exception(
                TimedOutError(
                    f"not all replicas of {self.tp} that are in sync had the records within"
                    f" {timeout_s:g} s",
                    hint="they were appended here, and may be committed later",
                )
            )

    def _settle(self) -> None:
        waiting, reached = self._waiting, self.partition.high_watermark
        while waiting and (waiting[0][0] <= reached or waiting[0][2].done()):
            future = heapq.heappop(waiting)[2]
            if not future.done():
                future.set_result(None)

    def _fail(self, error: type[KdirectError], message: str) -> None:
        self._settle()
        waiting, self._waiting = self._waiting, []
        for _, _, future in waiting:
            if not future.done():
                future.set_exception(error(message))

    # -- log starts --------------------------------------------------------------------------------

    def starts_at(self, broker: int, offset: int) -> None:
        """A follower's log starts there."""
        if self.starts.get(broker) != offset:
            self.starts[broker] = offset
            self._settle_low()

    def low_watermark(self) -> asyncio.Future[int]:
        """See `Replicas.low_watermark`."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._low.append((self.partition.log_start_offset, future))
        self._settle_low()
        return future

    def _settle_low(self) -> None:
        if not self._low:
            return
        live = {broker for broker, _ in self.leading.registered}
        others = [b for b in self.leading.replicas if b != self._around.broker and b in live]
        low = min([self.partition.log_start_offset, *(self.starts.get(b, -1) for b in others)])
        kept = []
        for wanted, future in self._low:
            if future.done():
                continue
            if low >= wanted:
                future.set_result(low)
            else:
                kept.append((wanted, future))
        self._low = kept

    # -- the end -----------------------------------------------------------------------------------

    def resign(self) -> None:
        """This broker leads no longer: what waits fails, for it may not be committed."""
        self._resigned = True
        self._around.changes.withdraw(self.tp)
        message = f"this broker does not lead {self.tp} any more"
        self._fail(NotLeaderError, message)
        for _, future in self._low:
            if not future.done():
                future.set_exception(NotLeaderError(message))
        self._low = []

    def stop_work(self) -> list[asyncio.Future[None]]:
        """Nothing of this leadership is shown or held from now on.  Done when no thread is at it
        any more: it could overtake what the log is made ready for next."""
        under_way = [self.showing.stop()]
        if self._gating is not None:
            under_way.append(self._gating)
        return under_way

    def describe(self) -> list[dict[str, Any]]:
        """See `Replicas.describe`.  Any thread: the value is looked at, and not stepped."""
        leading, pushed = self.leading, self.pushed
        marks = {} if pushed is None else pushed.marks()
        end = self.partition.log_end_offset  # last: no follower has more than this
        rows = [{"broker": self._around.broker, "end": end, "lag": 0, "in_sync": True}]
        for follower in leading.followers:
            known = min(max(follower.end, marks.get(follower.broker, 0), 0), end)
            in_sync = follower.broker in leading.state.in_sync
            row = {"broker": follower.broker, "end": known, "lag": end - known, "in_sync": in_sync}
            rows.append(row)
        return rows


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(None)


__all__ = ["Leader", "Surroundings"]
