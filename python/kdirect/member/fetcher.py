"""How a follower copies its partitions over TCP.

Owns: for each leader one request that is under way, for all partitions that are followed there,
and the fetch session in which it is made (`fetch_sessions` has the leader's part).  The leader
holds the request until there is something to tell, so an idle follower does nothing.

What a response brings is appended as the leader has stamped it: on the event loop where the head
has room and it is little, else on a thread of the partition's log directory.  The next request goes
out when all of it is in the log, and tells so: it is the follower's confirmation.

After an error of the connection or of the leader it is asked again, after a pause that grows up to
a second; what is to be done otherwise is said by the metadata, and comes by `drop` and `follow`.  A
partition that the leader refuses, or that cannot be written here (the disk is full), is asked for
again after a pause of its own: the others do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kdirect.errors import BrokerUnavailableError, KdirectError, TieredOffsetError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.format.schema import build
from kdirect.member.pause import Pause
from kdirect.member.throttle import Pace
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

MAX_WAIT_MS = 5_000
ANSWER_S = 20.0  # a leader that is silent for so long is asked over another connection
RESPONSE_BYTES = 8 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Copy(Protocol):
    """A local replica that follows; see `kdirect.member.following.Replica`."""

    @property
    def tp(self) -> TopicPartition: ...

    @property
    def epoch(self) -> int:
        """The leader epoch in which it follows."""

    @property
    def end(self) -> int:
        """It has every record below this offset."""

    @property
    def log_start(self) -> int: ...

    @property
    def is_pushed(self) -> bool:
        """Does it take no records this way, because its leader writes them?"""

    @property
    def is_full(self) -> bool:
        """Was there no room for what follows its end?"""

    def take(self, row: Any) -> asyncio.Future[bool] | bool:
        """What the leader has answered about it, without an error; is it in the log now?  A future
        of that where a thread is at work with it."""

    def out_of_range(self, epoch: int, start: int) -> None:
        """The leader's log starts above this one's end."""


class Fetcher:
    """See the module.  `incarnation()`: of this broker, now; `held_back(tp)`: the rate at which a
    partition may be copied, None where nothing holds it back.  All on the event loop."""

    def __init__(
        self,
        peers: Any,
        broker: int,
        incarnation: Callable[[], int],
        held_back: Callable[[TopicPartition], Pace | None] = lambda tp: None,
    ) -> None:
        self.held_back = held_back
        self._peers = peers
        self._broker = broker
        self._incarnation = incarnation
        self._fetches: dict[int, _Fetch] = {}
        self.fetched_bytes = 0
        self.failures = 0

    def follow(self, leader: int, copy: Copy) -> None:
        """Copy from this leader from now on, beginning at the copy's end."""
        fetch = self._fetches.get(leader)
        if fetch is None:
            fetch = self._fetches[leader] = _Fetch(self, leader)
        fetch.add(copy)

    def confirm(self, leader: int, copy: Copy) -> None:
        """The copy's end has moved: the next request says so."""
        fetch = self._fetches.get(leader)
        if fetch is not None:
            fetch.confirm(copy)

    def drop(self, tp: TopicPartition) -> None:
        """Copy this partition no more; what is on its way is thrown away."""
        for leader, fetch in list(self._fetches.items()):
            fetch.remove(tp)
            if not fetch.copies:
                fetch.stop()
                del self._fetches[leader]

    def retry(self) -> None:
        """The cluster has changed: whoever pauses asks now."""
        for fetch in self._fetches.values():
            fetch.hurry()

    def stop(self) -> None:
        """Ask no more."""
        for fetch in self._fetches.values():
            fetch.stop()
        self._fetches.clear()

    async def call(self, leader: int, request: Any) -> Any:
        """One request."""
        return await self._peers.call(leader, request, timeout_s=ANSWER_S)

    def request(self, session: int, answers: int, topics: list[Any], forgotten: list[Any]) -> Any:
        return build(
            p.FetchAsReplicaRequest,
            broker_id=self._broker,
            incarnation=self._incarnation(),
            session_id=session,
            answers=answers,
            max_wait_ms=MAX_WAIT_MS,
            max_bytes=RESPONSE_BYTES,
            topics=topics,
            forgotten=forgotten,
        )


class _Fetch:
    """What is copied from one leader.

    Mostly one request is under way.  A partition that comes while it waits at the leader goes out
    with a second one, at which the leader answers the first."""

    def __init__(self, fetcher: Fetcher, leader: int) -> None:
        self.copies: dict[TopicPartition, Copy] = {}
        self._fetcher = fetcher
        self._leader = leader
        self._session = 0
        self._answers = 0  # taken in this session
        self._untold: dict[TopicPartition, None] = {}
        self._forgotten: dict[TopicPartition, None] = {}
        self._under_way: deque[asyncio.Task[Any]] = deque()
        self._news = asyncio.Event()
        self._pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        # Partitions that are asked for again later: the pause, and its end.
        self._pausing: dict[TopicPartition, tuple[Pause, asyncio.TimerHandle]] = {}
        # Partitions that a throttle holds back: when they are asked for.
        self._held_back: dict[TopicPartition, asyncio.TimerHandle] = {}
        self._told_error = ""
        self._stopped = False
        self._task = asyncio.get_running_loop().create_task(self._work())

    def add(self, copy: Copy) -> None:
        """Copy one more partition."""
        self.copies[copy.tp] = copy
        self._forgotten.pop(copy.tp, None)
        self._untold[copy.tp] = None
        self._news.set()

    def confirm(self, copy: Copy) -> None:
        """Tell the leader where the copy starts and ends now."""
        if self.copies.get(copy.tp) is not copy:
            return
        pace = None if copy.is_pushed else self._fetcher.held_back(copy.tp)
        wait_s = 0.0 if pace is None else pace.wait_s()
        if wait_s > 0:
            if copy.tp not in self._held_back:
                loop = asyncio.get_running_loop()
                self._held_back[copy.tp] = loop.call_later(wait_s, self._confirm_again, copy)
            return
        self._untold[copy.tp] = None
        self._news.set()

    def _confirm_again(self, copy: Copy) -> None:
        self._held_back.pop(copy.tp, None)
        self.confirm(copy)

    def remove(self, tp: TopicPartition) -> None:
        """Copy one partition less."""
        if self.copies.pop(tp, None) is not None:
            self._let_go(tp)
            self._untold.pop(tp, None)
            self._forgotten[tp] = None
            self._pause_no_more(tp)

    def hurry(self) -> None:
        """Pause no longer."""
        self._pause.reset()
        for tp in list(self._pausing):
            self._pause_no_more(tp)
            self._untold[tp] = None
        for tp in list(self._held_back):  # a throttle may be gone
            self._let_go(tp)
            self.confirm(self.copies[tp])
        self._news.set()

    def _let_go(self, tp: TopicPartition) -> None:
        timer = self._held_back.pop(tp, None)
        if timer is not None:
            timer.cancel()

    def _pause_no_more(self, tp: TopicPartition) -> None:
        pausing = self._pausing.pop(tp, None)
        if pausing is not None:
            pausing[1].cancel()

    def stop(self) -> None:
        """The last partition is gone."""
        self._stopped = True
        self._task.cancel()
        for tp in list(self._pausing):
            self._pause_no_more(tp)
        for tp in list(self._held_back):
            self._let_go(tp)
        self._give_up()

    def _give_up(self) -> None:
        for task in self._under_way:
            task.cancel()
        self._under_way.clear()
        self._session = 0

    async def _work(self) -> None:
        while not self._stopped:  # `wait_for` may swallow a cancellation
            try:
                await self._turn()
            except Exception as e:
                if not isinstance(e, KdirectError | OSError):
                    log.exception("copying from broker %d failed", self._leader)
                self._failed(str(e))
                self._give_up()
                await self._sleep()

    async def _sleep(self) -> None:
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), self._pause.coming_s)
        except asyncio.TimeoutError:
            self._pause.next_s()  # news are no reason to wait longer for the leader

    async def _turn(self) -> None:
        """Ask if there is something to tell, or nothing is under way; then wait for an answer, or
        for more to tell.  KdirectError ends the session."""
        waiting = self._under_way
        if not waiting or (self._session and len(waiting) < 2 and self._has_news):
            waiting.append(asyncio.get_running_loop().create_task(self._ask()))
        self._news.clear()
        news = asyncio.get_running_loop().create_task(self._news.wait())
        try:
            await asyncio.wait({waiting[0], news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if not waiting[0].done():
            return
        response = await waiting.popleft()
        if response.error_code != 0:
            raise BrokerUnavailableError(error_kind(response.error_code).name)
        self._told_error = ""
        if self._session != response.session_id:
            self._session, self._answers = response.session_id, 0
        self._answers += 1
        self._pause.reset()
        await self._take(response)

    @property
    def _has_news(self) -> bool:
        return bool(self._untold or self._forgotten)

    def _ask(self) -> Any:
        """A request with all that is to be told, under way."""
        if self._session == 0:
            self._untold = dict.fromkeys(self.copies)
            self._forgotten.clear()
        return self._fetcher.call(self._leader, self._request())

    def _failed(self, why: str) -> None:
        self._fetcher.failures += 1
        if why != self._told_error:
            self._told_error = why
            log.info("copying from broker %d is interrupted: %s", self._leader, why)

    def _request(self) -> Any:
        topics: dict[str, list[dict[str, int]]] = {}
        for tp in self._untold:
            copy = self.copies[tp]
            row = {
                "partition": tp.partition,
                "leader_epoch": copy.epoch,
                "fetch_offset": copy.end,
                "log_start_offset": copy.log_start,
                "pushed": copy.is_pushed,
                "full": copy.is_full,
            }
            topics.setdefault(tp.topic, []).append(row)
        forgotten: dict[str, list[int]] = {}
        for tp in self._forgotten:
            forgotten.setdefault(tp.topic, []).append(tp.partition)
        self._untold, self._forgotten = {}, {}
        return self._fetcher.request(
            self._session,
            self._answers,
            [{"topic": name, "partitions": rows} for name, rows in topics.items()],
            [{"topic": name, "partitions": rows} for name, rows in forgotten.items()],
        )

    async def _take(self, response: Any) -> None:
        """Append what was answered."""
        under_way: dict[asyncio.Future[bool], Copy] = {}
        for topic in response.topics:
            for row in topic.partitions:
                tp = TopicPartition(topic.topic, row.partition)
                copy = self.copies.get(tp)
                if copy is None:
                    continue
                if row.error_code != 0:
                    self._refused(copy, row)
                    continue
                if row.leader_epoch != copy.epoch:
                    continue  # of an older leadership of the same broker
                self._fetcher.fetched_bytes += len(row.records or b"")
                if row.records and (pace := self._fetcher.held_back(tp)) is not None:
                    pace.take(len(row.records))
                taken = copy.take(row)
                if isinstance(taken, bool):
                    self._taken(copy, taken)
                else:
                    under_way[taken] = copy
        if under_way:
            await asyncio.wait(under_way)
        for future, copy in under_way.items():
            self._taken(copy, future.result())

    def _taken(self, copy: Copy, is_there: bool) -> None:
        if is_there:
            self._pause_no_more(copy.tp)
        else:
            self._ask_later(copy)

    def _ask_later(self, copy: Copy) -> None:
        """Ask for one partition again, after a pause that grows."""
        if self.copies.get(copy.tp) is not copy:
            return
        pause, timer = self._pausing.get(copy.tp, (Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S), None))
        if timer is not None:
            timer.cancel()
        timer = asyncio.get_running_loop().call_later(pause.next_s(), self.confirm, copy)
        self._pausing[copy.tp] = pause, timer

    def _refused(self, copy: Copy, row: Any) -> None:
        """One partition cannot be fetched now."""
        # In remote storage only: what the leader has begins later, as where it was deleted.
        is_below = row.error_code in (ErrorCode.OFFSET_OUT_OF_RANGE, TieredOffsetError.code)
        if is_below and row.leader_epoch == copy.epoch:
            copy.out_of_range(copy.epoch, row.log_start_offset)
        # The leader was deposed, or has not heard yet that it leads: the metadata will say which.
        self._ask_later(copy)


__all__ = ["Copy", "Fetcher"]
