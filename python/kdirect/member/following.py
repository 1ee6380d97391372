"""A local replica on its way from one leader to the next: `cluster.following_replica`, carried out.

Owns: one partition's machine for as long as the log is here, what is slow and under way for it, and
its `Leader` while this broker leads.  What takes a thread is done one thing after the other, in the
order in which the machine wanted it; what can be done at once is done at once, above all to stop
being a leader.

Fencing, over TCP: nothing is fetched for this replica any more, no append is under way, and what
clients were granted here has ended (`on_resign`).  Then the log does not change until the replica
follows or leads again.  Where the leader writes into this replica's files (`kdirect.member.push`),
its keys are taken away first, before anything else is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from kdirect.cluster import following_replica as machine
from kdirect.cluster import leading_replica
from kdirect.cluster.following_replica import (
    AskEpochEnd,
    BeginToLead,
    Confirm,
    Effect,
    Event,
    Fence,
    Grant,
    Phase,
    ShowHighWatermark,
    StartOver,
    TellLoss,
    Truncate,
)
from kdirect.errors import KdirectError
from kdirect.format.replica_fetch import Feed, Feeding
from kdirect.log.partition import Partition
from kdirect.log.trouble import is_full
from kdirect.log.urgent import Urgent
from kdirect.member.directory_work import awaited
from kdirect.member.epoch_questions import EpochQuestions
from kdirect.member.fetcher import Fetcher
from kdirect.member.leading import Leader, Surroundings
from kdirect.member.push import PushedCopy, PushSide
from kdirect.member.showing import Showing
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

SMALL_BYTES = 64 << 10  # appended on the event loop, where there is room
RETRY_S = 1.0  # after file work has failed: no space, no descriptors


class Ways(NamedTuple):
    """How a replica reaches others.  `lead(replica, effect)` makes the leader's machine; `led` and
    `resigned` tell those whom it concerns; `push`: None where there is no push;
    `state_behind` as in `Replicas`."""

    fetcher: Fetcher
    questions: EpochQuestions
    lead: Callable[[Replica, BeginToLead, bool], Leader]
    is_replicated: Callable[[TopicPartition], bool]
    led: Callable[[Replica], None]
    resigned: Callable[[Replica], list[Awaitable[None]]]
    push: Callable[[], PushSide | None]
    state_behind: Callable[[Partition, int, int, int], Awaitable[Mapping[str, Any]]]


class Replica:
    """See the module.  All on the event loop."""

    def __init__(
        self, around: Surroundings, ways: Ways, tp: TopicPartition, partition: Partition
    ) -> None:
        self.tp = tp
        self.partition = partition
        self.leader: Leader | None = None
        self.following = machine.begin(
            around.broker,
            end=partition.log_end_offset,
            last_epoch=partition.last_epoch,
            high_watermark=partition.high_watermark,
        )
        self._around = around
        self._ways = ways
        self._slow: deque[Effect] = deque()
        self._task: asyncio.Task[None] | None = None
        self._appending: asyncio.Future[bool] | None = None
        self._told_failure = ""  # why it does not go on, once it is in the log
        self._leader_start = 0  # where the leader's log starts, by its newest word
        self._told_start = 0
        self._showing = Showing(partition, around.on_thread, self.moved)
        self._ended = False
        self._resigned: list[Awaitable[None]] = []  # what others were granted is being ended
        self._push: PushedCopy | None = None
        self._ending_push: PushedCopy | None = None  # the one before, whose keys may be slow to end
        self.is_pushed = False  # records of Fetch are thrown away
        self._full_end = -1  # where the log ended when there was no room
        partition.refuse_appends()

    # -- what others ask ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The leader epoch in which it is."""
        return self.following.epoch

    @property
    def end(self) -> int:
        return self.partition.log_end_offset if self.is_pushed else self.following.end

    @property
    def is_full(self) -> bool:
        """See `fetcher.Copy`."""
        return self._full_end == self.end

    @property
    def log_start(self) -> int:
        return self.partition.log_start_offset

    @property
    def is_following(self) -> bool:
        return self.following.phase is Phase.FOLLOWING

    def feeding(self) -> Feeding:
        """How it gets its records."""
        if self.leader is not None:
            return Feeding(Feed.LEADS)
        if not self.is_following:
            return Feeding(Feed.STOPPED, reason=self._told_failure or self.following.phase.value)
        if self._push is not None:
            return self._push.feeding()
        return Feeding(Feed.FETCHED, reason="push is switched off at this broker")

    # -- the machine -------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Something happened."""
        if self._ended:
            return
        self.following, effects = machine.step(self.following, event)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        ways = self._ways
        match effect:
            case Fence():
                self._stop_access()
                self._later(effect)
            case Truncate() | StartOver() | BeginToLead():
                self._later(effect)
            case AskEpochEnd():
                ways.questions.ask(self.tp, effect, self.feed)
            case TellLoss(offset, high_watermark):
                log.error(
                    "records [%d, %d) of %s were committed, and their leader does not have them: an"
                    " unclean election lost them",
                    offset,
                    high_watermark,
                    self.tp,
                )
            case Grant(leader):
                ways.fetcher.follow(leader, self)
                side = ways.push()
                if side is not None:
                    self._push = side.follow(leader, self)
            case Confirm():
                ways.fetcher.confirm(self.following.leader, self)
            case ShowHighWatermark(offset):
                self._showing.show(offset)

    def _later(self, effect: Effect) -> None:
        self._slow.append(effect)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._slow:
                effect = self._slow.popleft()
                try:
                    event = await self._do(effect)
                except Exception as e:  # whatever it is, a fence that is lost is never made up for
                    await self._could_not(effect, e)
                else:
                    self._done(event)
        finally:
            self._task = None

    def _done(self, event: Event | None) -> None:
        """What was slow is done, and is not done again, whatever follows from it."""
        try:
            if event is not None:
                self.feed(event)
        except Exception:
            log.exception("replica %s could not go on after %s", self.tp, event)

    async def _could_not(self, effect: Effect, error: BaseException) -> None:
        """Nothing is lost: this broker has no working replica until it is done."""
        failure = f"{type(effect).__name__}: {error}"
        if failure != self._told_failure:  # it is tried again and again
            self._told_failure = failure
            expected = isinstance(error, KdirectError | OSError)
            log.error("replica %s: %s", self.tp, failure, exc_info=None if expected else error)
        if self._ended:
            return
        await asyncio.sleep(RETRY_S)
        if not self._slow:
            self._slow.append(effect)

    async def _do(self, effect: Effect) -> Event | None:
        partition = self.partition
        match effect:
            case Fence(epoch):
                return await self._fence(epoch)
            case Truncate(epoch, offset):
                await self._on_thread(partial(partition.cut_after_epoch, epoch, offset))
                return machine.Truncated(partition.log_end_offset, partition.last_epoch)
            case StartOver(offset):
                state = await self._state_behind(offset)
                if state is not None:
                    await self._on_thread(partial(partition.start_over, offset, **state))
                return machine.Truncated(partition.log_end_offset, partition.last_epoch)
            case BeginToLead(epoch):
                if epoch == self.following.newest_epoch:
                    await self._lead(effect)
        return None

    async def _state_behind(self, offset: int) -> Mapping[str, Any] | None:
        """What is known of the log below `offset`, where it begins.  None: there is a newer leader,
        and nothing is to be dropped for the present one.  KdirectError: it is asked for again."""
        following = self.following
        try:
            return await self._ways.state_behind(
                self.partition, following.leader, following.epoch, offset
            )
        except KdirectError:
            if self.following.next is not None:
                return None
            raise

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        """What `work`, which a failover waits for, returns or raises on a thread of the log's
        directory."""
        return await awaited(self._around.on_thread, self.partition, Urgent(work))

    # -- fencing and leading -----------------------------------------------------------------------

    def _stop_access(self) -> None:
        """At once: lead no longer, take no append, fetch nothing, and begin to take keys away."""
        self.partition.refuse_appends()
        self._around.hurry(self.partition)  # which is waited for before the log is fenced
        self._full_end = -1  # the next leader may have nothing that has to be copied
        if self._push is not None:
            push, self._push = self._push, None
            self._ending_push = push
            self._resigned.append(push.close(gives_up=self._ended))
        self._ways.fetcher.drop(self.tp)
        self._ways.questions.withdraw(self.tp)
        self._resigned.append(self._showing.stop())
        if self.leader is not None:
            self.leader.resign()
            self._resigned += self.leader.stop_work()
            self._resigned += self._ways.resigned(self)
            self.leader = None

    async def _fence(self, epoch: int) -> Event:
        """Return when nobody can add to the log any more."""
        resigned, self._resigned = self._resigned, []
        for ended in await asyncio.gather(*resigned, return_exceptions=True):
            if isinstance(ended, BaseException):
                log.error("ending the access to %s failed", self.tp, exc_info=ended)
        while self._appending is not None:
            await asyncio.wait([self._appending])
        partition = self.partition
        await self._on_thread(partition.follow_leader)
        return machine.Fenced(
            epoch, partition.log_end_offset, partition.last_epoch, partition.high_watermark
        )

    async def _lead(self, effect: BeginToLead) -> None:
        if self.leader is None:  # else not all have been told of it
            partition, replicated = self.partition, self._ways.is_replicated(self.tp)
            begin = partial(partition.begin_epoch, effect.epoch, replicated=replicated)
            await self._on_thread(begin)
            if self._ended or self.following.newest_epoch != effect.epoch:
                partition.refuse_appends()  # the fence for the newer epoch comes next
                return
            self.leader = self._ways.lead(self, effect, replicated)
        self._ways.led(self)

    # -- copying -----------------------------------------------------------------------------------

    def take(self, row: Any) -> asyncio.Future[bool] | bool:
        """See `fetcher.Copy`."""
        partition, records = self.partition, row.records
        if self._push is not None:
            self._push.told(row.push, row.segment_bytes)
        if self.is_pushed:
            if not records:
                self._told(row)
            return True
        if not records and not self._ends_segment(row) and self._knows_size(row):
            self._note_room(full=False)  # the leader has nothing that needs it
            self._told(row)
            return True
        if records and len(records) <= SMALL_BYTES and self._is_next(row):
            result = partition.append_as_stamped_nowait(records, self._around.time_ms())
            if result is not None:
                return self._appended(row, result)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._appending = future
        done = partial(self._appended_later, future, row)
        self._around.on_thread(partition, partial(self._append, row), done)
        return future

    def _is_next(self, row: Any) -> bool:
        """Do the records go into the segment that is open here?"""
        same = self.partition.kernel.segment_base_offset == row.segment_base_offset
        return same and self._knows_size(row) and not self._tells_gaps(row)

    def _tells_gaps(self, row: Any) -> bool:
        """May offsets be missing in the records that are not known to be missing here yet?  The
        leader's word is taken no further than what was committed: nothing else is compacted."""
        end = self.partition.log_end_offset
        return bool(max(end, self.partition.dense_from) < _dense_from(row))

    def _knows_size(self, row: Any) -> bool:
        """Do segments become as large here as they do at the leader?"""
        return self.partition.copies_segments_of(row.segment_bytes)

    def _ends_segment(self, row: Any) -> bool:
        """Has the leader begun a segment where this log ends, although it has no record yet?"""
        here = self.partition.kernel.segment_base_offset
        return row.segment_base_offset == self.following.end and here != row.segment_base_offset

    def _append(self, row: Any) -> Any:
        """On a thread."""
        partition = self.partition
        if not self._knows_size(row):
            partition.copy_segments_of(row.segment_bytes)
        if not row.records and not self._ends_segment(row):
            return None  # it tells the size alone, and may be of a time when records were pushed
        if self._tells_gaps(row):
            partition.note_gaps_below(_dense_from(row))
        if partition.kernel.segment_base_offset != row.segment_base_offset:
            partition.begin_segment(row.segment_base_offset)
        return partition.append_as_stamped(row.records) if row.records else None

    def _appended_later(
        self, future: asyncio.Future[bool], row: Any, result: Any, error: BaseException | None
    ) -> None:
        self._appending = None
        taken = False
        try:
            taken = self._appended(row, result, error)
        finally:
            future.set_result(taken)

    def _appended(self, row: Any, result: Any, error: BaseException | None = None) -> bool:
        """Copying was tried; did it succeed?  Where it did not, a part may be in the log."""
        partition = self.partition
        if error is None and result is not None and result.error != 0:
            error = KdirectError(f"what the leader sent was refused with code {result.error}")
        if self.is_following and partition.log_end_offset != self.following.end:
            end, last_epoch = partition.log_end_offset, partition.last_epoch
            self.feed(machine.Committed(end, last_epoch, row.leader_epoch))
        self._note_room(full=is_full(error))
        failure = "" if error is None else str(error)
        if failure and failure != self._told_failure:  # it is tried again and again
            log.error("copying %s failed: %s", self.tp, failure)
        self._told_failure = failure
        if error is None:
            self._told(row)
        return error is None

    def _note_room(self, *, full: bool) -> None:
        """Was there no room for what the leader sent?  The next request says so."""
        if self.is_following:
            was_full, self._full_end = self.is_full, self.end if full else -1
            if was_full and not full:  # even where no record has come
                self._ways.fetcher.confirm(self.following.leader, self)

    def _told(self, row: Any) -> None:
        """The leader's marks, once its records are here."""
        self.feed(machine.Told(row.leader_epoch, row.high_watermark))
        self._leader_start = row.log_start_offset
        self._follow_start()

    def _follow_start(self) -> None:
        """Let the log start where the leader's does, as far as records are known to be committed
        here.  What is pushed says that by itself, so it may come later than the leader's start."""
        partition = self.partition
        if self.is_pushed and self._leader_start > partition.high_watermark:
            self.watch()  # first: it may move before it is read again
        start = min(self._leader_start, partition.high_watermark)
        if self.is_following and start > max(partition.log_start_offset, self._told_start):
            self._told_start = start
            work = partial(partition.follow_log_start, start)
            self._around.on_thread(partition, work, self._log_started)

    def _log_started(self, result: Any, error: BaseException | None) -> None:
        if error is not None:
            log.error("records of %s were not deleted: %s", self.tp, error)
        elif self.is_following:
            self._ways.fetcher.confirm(self.following.leader, self)

    def out_of_range(self, epoch: int, start: int) -> None:
        """See `fetcher.Copy`."""
        self.feed(machine.OutOfRange(epoch, start))

    # -- push --------------------------------------------------------------------------------------

    async def stop_copying(self) -> None:
        """See `push.PushableCopy`."""
        self.is_pushed = True
        self._ways.fetcher.confirm(self.following.leader, self)
        while self._appending is not None:
            await asyncio.wait([self._appending])

    def copy_again(self) -> None:
        """See `push.PushableCopy`."""
        if not self.is_pushed:
            return
        self.is_pushed = False
        partition = self.partition
        end, last_epoch = partition.log_end_offset, partition.last_epoch
        self.feed(machine.Committed(end, last_epoch, self.epoch))

    def progressed(self) -> None:
        """See `push.PushableCopy`."""
        self._ways.fetcher.confirm(self.following.leader, self)

    def moved(self) -> None:
        """See `push.PushableCopy`."""
        if not self._ended:
            self._around.shown(self.tp)
            self._follow_start()

    def watch(self) -> None:
        """Somebody waits for records that become readable."""
        if self._push is not None:
            self._push.watch()

    # -- the end -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """The log is about to go, or the broker stops: touch it no more."""
        self._ended = True
        self._stop_access()
        self._slow.clear()
        resigned, self._resigned = self._resigned, []
        if self._ending_push is not None:  # a fence may wait for it
            resigned.append(self._ending_push.close(gives_up=True))
        await asyncio.gather(*resigned, return_exceptions=True)
        while self._task is not None or self._appending is not None:
            under_way = [w for w in (self._task, self._appending) if w is not None]
            await asyncio.wait(under_way)


def _dense_from(row: Any) -> int:
    """Below this offset a leader says that records may be missing."""
    return int(min(row.dense_from, row.high_watermark))


def begin_leading(
    around: Surroundings,
    replica: Replica,
    effect: BeginToLead,
    *,
    state: Any,
    replicas: tuple[int, ...],
    registered: tuple[tuple[int, int], ...],
    min_in_sync: int,
    lag_ms: int,
    bound: bool,
) -> Leader:
    """The leader of a replica whose log is ready to be led; `bound`: as one that has replicas."""
    partition = replica.partition
    leading, effects = leading_replica.begin(
        around.broker,
        state,
        replicas,
        end=partition.log_end_offset,
        high_watermark=partition.high_watermark,
        now_ms=around.now_ms(),
        min_in_sync=min_in_sync,
        lag_ms=lag_ms,
        registered=registered,
    )
    leader = Leader(around, replica.tp, partition, leading, bound=bound)
    leader.begin(effects)
    return leader


__all__ = ["Replica", "Ways", "begin_leading"]
