"""A partition that this broker leads: what `cluster.leading_replica` decides is carried out.

Owns: one leader epoch of one partition: the machine's value, the acknowledgements that wait for
other brokers (acks=all), and those that wait for their log starts.  It begins when the replica's
log is ready to be led (`Partition.begin_epoch`) and ends with `resign`.

A partition without other replicas costs nothing here: its kernel moves the high watermark, and the
machine hears of its log only when that is asked for.

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
from kdirect.member.in_sync_changes import InSyncChanges
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

SHOWN = -1  # whose confirmations the log's gate waits for: the machine's


class Surroundings(NamedTuple):
    """What a leader or follower works with.  `shown(tp)`: the high watermark has moved.
    `on_thread` as `FileThreads.for_partition`.  `now_ms()` never goes back; `time_ms()` is that of
    records."""

    broker: int
    changes: InSyncChanges
    on_thread: Callable[..., None]
    shown: Callable[[TopicPartition], None]
    now_ms: Callable[[], int]
    time_ms: Callable[[], int]


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
        self._showing = False  # a thread shows the high watermark
        self._unshown = -1
        self._resigned = False
        # The log's gate waits for `_show`; else the kernel moves the high watermark.
        self._is_bound = bound
        self._early: list[machine.Confirmed] = []
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
        if not self._is_bound and not self.is_alone:
            self._bind()

    def feed(self, event: Event) -> None:
        """Something happened."""
        if self._resigned:
            return
        before = self.leading.state
        self.leading, effects = machine.step(self.leading, event)
        state = self.leading.state
        if state.version != before.version:
            self._around.changes.withdraw(self.tp)
            self._count(len(before.in_sync), len(state.in_sync))
            if not self.has_enough:
                self._fail(NotEnoughReplicasAfterAppendError, self._few("were appended, but"))
        self._carry_out(effects)

    def appended(self) -> None:
        """The log has grown, perhaps."""
        if self._is_bound:
            end = self.partition.log_end_offset
            if end > self.leading.end:
                self.feed(machine.Appended(end))

    def confirmed(self, broker: int, incarnation: int, epoch: int, end: int, level: bool) -> None:
        """A follower has every record below `end`."""
        event = machine.Confirmed(broker, incarnation, epoch, end, level)
        if not self._is_bound:
            self._early.append(event)
            return
        self.appended()
        self.feed(event)

    def assigned(self, replicas: tuple[int, ...]) -> None:
        """The partition has these replicas now."""
        was_alone = self.is_alone
        self.feed(machine.Assigned(replicas))
        if was_alone and not self.is_alone and not self._is_bound:
            self._bind()

    def _bind(self) -> None:
        """From now on the machine moves the high watermark.  Until that is so the kernel does, so
        no follower may be compared with what the machine believes."""
        bind = partial(self.partition.set_replicas, {SHOWN: self.partition.high_watermark})
        self._around.on_thread(self.partition, bind, self._bound)

    def _bound(self, result: Any, error: BaseException | None) -> None:
        if error is not None:
            log.error("%s cannot have replicas: %s", self.tp, error)
            return
        self._is_bound = True
        self.feed(machine.Appended(self.partition.high_watermark))
        self.appended()
        early, self._early = self._early, []
        for event in early:
            self.feed(event)

    def ticked(self) -> None:
        """Some time has passed."""
        if not self.is_alone:
            self.appended()
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
                    self._around.changes.propose(self.tp, self.epoch, effect, self.feed)

    def _show(self, offset: int) -> None:
        if not self._is_bound:
            return  # the kernel does
        if not self._showing and self.partition.replicated_nowait(SHOWN, offset):
            self.shown()
            return
        self._unshown = max(self._unshown, offset)
        self._show_later()

    def _show_later(self) -> None:
        """On a thread: a file has to be opened, or a flush is under way."""
        if self._showing or self._unshown < 0:
            return
        offset, self._unshown = self._unshown, -1
        self._showing = True
        work = partial(self.partition.replicated, SHOWN, offset)
        self._around.on_thread(self.partition, work, self._showed)

    def _showed(self, result: Any, error: BaseException | None) -> None:
        self._showing = False
        if error is not None:
            log.error("the high watermark of %s was not shown: %s", self.tp, error)
        if not self._resigned:
            self.shown()
            self._show_later()

    def shown(self) -> None:
        """The log's high watermark has moved."""
        self._settle()
        self._around.shown(self.tp)

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

    def describe(self) -> list[dict[str, Any]]:
        """See `Replicas.describe`.  Any thread: the value is looked at, and not stepped."""
        leading = self.leading  # first: what followers have is not above an end that is read later
        end = self.partition.log_end_offset
        rows = [{"broker": self._around.broker, "end": end, "lag": 0, "in_sync": True}]
        for follower in leading.followers:
            known = max(follower.end, 0)
            in_sync = follower.broker in leading.state.in_sync
            row = {"broker": follower.broker, "end": known, "lag": end - known, "in_sync": in_sync}
            rows.append(row)
        return rows


__all__ = ["SHOWN", "Leader", "Surroundings"]
