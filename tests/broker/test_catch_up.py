"""A replica that catches up segment by segment, between two logs over shm in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker import segment_leases
from kdirect.broker.catch_up import CatchUp, CatchUps
from kdirect.errors import BrokerUnavailableError
from kdirect.log.head import PreparedHead
from kdirect.log.segment import TEMPORARY_SUFFIX
from kdirect.member.throttle import Pace
from tests.broker.test_segment_reader import TP, Rig


class CaughtUp:
    """A catch-up of the rig's follower, its leader's answers, and what it has told the leader."""

    def __init__(self, rig: Rig, pace: Pace | None = None) -> None:
        self.rig = rig
        self.asked: list[tuple[int, int]] = []  # (lease, offset)
        self.most_leases = 0
        self.asking = 0
        self.told: list[int] = []
        self.asks_at: Callable[[int], Any] = lambda count: None
        self._pace = pace
        reader: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reader.set_result(rig.reader)
        link = SimpleNamespace(
            leader=1, reader=reader, domain=rig.domain, engine=SimpleNamespace(transport="shm")
        )
        copy = SimpleNamespace(tp=TP, partition=rig.follower, epoch=3)
        self.made_ahead = asyncio.Event()
        self.shared = shared = CatchUps(
            send=self._send,
            ask=self._ask,
            thread=asyncio.to_thread,
            on_thread=self._on_thread,
            background=lambda work: None,
            pace=lambda tp: None,
        )
        self.catch_up = CatchUp(
            shared, link, copy, stop_copying=self._stop_copying, progressed=self._progressed
        )

    async def _send(self, link: Any, kind: Any, *, released: list[int], topics: list[Any]) -> None:
        await asyncio.to_thread(self.rig.leases.give_back, released)

    async def _ask(self, link: Any, kind: Any, tp: Any, row: Any) -> Any:
        self.asked.append((row["lease"], row["offset"]))
        self.asking += 1
        assert self.asking == 1, "answers of one partition would be mixed up"
        await asyncio.sleep(0)
        self.asks_at(len(self.asked))
        x = SimpleNamespace(**row)
        answer = await self.rig.leases.answer(tp, self.rig.leader, x, self._pace, asyncio.to_thread)
        self.asking -= 1
        self.most_leases = max(self.most_leases, len(self.rig.leases))
        leased = [SimpleNamespace(**x) for x in answer["segments"]]
        return SimpleNamespace(segments=leased)

    async def _on_thread(self, copy: Any, work: Callable[[], Any]) -> Any:
        result = await asyncio.to_thread(work)
        if isinstance(result, PreparedHead):
            self.made_ahead.set()
        return result

    async def _stop_copying(self) -> None:
        pass

    def _progressed(self) -> None:
        self.told.append(int(self.rig.follower.log_end_offset))

    async def run(self) -> None:
        try:
            await asyncio.wait_for(self.catch_up.run(), 60)
        finally:
            await self.catch_up.close()
        await self.given_back()

    async def give_up_at(self, asks: int) -> None:
        """Begin, and end while the leader is asked that many times."""
        reached = asyncio.Event()
        self.asks_at = lambda count: reached.set() if count == asks else None
        task = asyncio.ensure_future(self.catch_up.run())
        await asyncio.wait_for(reached.wait(), 30)
        task.cancel()
        await self.catch_up.close()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def given_back(self) -> None:
        """The last leases are given back by a task of their own."""
        await asyncio.gather(*self.shared._tasks)
        assert len(self.rig.leases) == 0


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        yield Rig(stack, tmp_path)


def left_over(rig: Rig) -> list[Path]:
    return [x for x in rig.follower.directory.iterdir() if x.name.endswith(TEMPORARY_SUFFIX)]


@pytest.mark.parametrize("ahead", [1, 2, 3, 8])
def test_the_next_segment_is_leased_and_its_files_made_while_one_is_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The leader is asked once for so many segments, while the last one of them is read."""
    monkeypatch.setattr(segment_leases, "MOST_AHEAD", ahead)
    rig.fill(400)
    count = len(rig.leader.segments) - 1
    assert count > 4
    prepared: list[int] = []
    prepare = type(rig.follower).prepare_pull

    def counted(partition: Any, size: int, given_up: threading.Event) -> Any:
        prepared.append(size)
        return prepare(partition, size, given_up)

    monkeypatch.setattr(type(rig.follower), "prepare_pull", counted)

    async def run() -> CaughtUp:
        caught = CaughtUp(rig)
        await caught.run()
        return caught

    caught = asyncio.run(run())
    assert rig.files(rig.follower) == rig.files(rig.leader)
    assert prepared == [s.size for s in rig.leader.segments[1:-1]]
    bases = [s.base_offset for s in rig.leader.segments]
    assert caught.asked == [(-1, base) for base in (*bases[:-1:ahead], bases[-1])]
    assert caught.most_leases == min(ahead + 1, count)
    assert caught.told[:1] == bases[1:2] and len(caught.told) < count
    assert not left_over(rig)
    assert all(s.references == 0 for s in rig.leader.segments[:-1])


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("asks", [2, 3])
def test_what_is_given_up_leaves_no_files_and_no_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, asks: int, ahead: int
) -> None:
    """It ends while the segment after the present one is asked for, or while the last ask waits."""
    monkeypatch.setattr(segment_leases, "MOST_AHEAD", ahead)
    rig.fill(400)

    async def run() -> None:
        caught = CaughtUp(rig)
        await caught.give_up_at(asks)
        # What was asked for when it ended may be leased still: the next ask ends it as well.
        again = CaughtUp(rig)
        await again.run()

    asyncio.run(run())
    assert rig.files(rig.follower) == rig.files(rig.leader)
    assert not left_over(rig)
    assert all(s.references == 0 for s in rig.leader.segments[:-1])


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("asks", [1, 2, 3])
def test_a_lease_whose_answer_nobody_waits_for_is_given_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, asks: int, ahead: int
) -> None:
    """The leader need not be asked again: another broker may lead from now on."""
    monkeypatch.setattr(segment_leases, "MOST_AHEAD", ahead)
    rig.fill(400)

    async def run() -> None:
        caught = CaughtUp(rig)
        await caught.give_up_at(asks)
        await asyncio.gather(*caught.shared._tasks)
        await asyncio.get_running_loop().shutdown_default_executor()  # where leases are made
        assert len(rig.leases) == 0

    asyncio.run(run())
    assert all(s.references == 0 for s in rig.leader.segments[:-1])


@pytest.mark.parametrize("work", ["begin_pull", "prepare_pull"])
def test_a_mistake_does_not_keep_it_from_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """Else records of Fetch were thrown away for ever, and nothing read."""
    rig.fill(400)

    def fails(*arguments: Any) -> Any:
        raise ValueError("a mistake")

    monkeypatch.setattr(type(rig.follower), work, fails)

    async def run() -> None:
        caught = CaughtUp(rig)
        with pytest.raises(ValueError, match="a mistake"):
            await asyncio.wait_for(caught.catch_up.run(), 30)
        await caught.catch_up.close()
        await caught.given_back()

    asyncio.run(run())
    assert not left_over(rig)


def test_an_end_does_not_wait_until_all_pages_of_the_next_segment_are_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To zero 2 GiB may take seconds, and a fence waits for it."""
    rig.fill(400)
    begun = threading.Event()
    told: list[bool] = []

    def populate(prepared: PreparedHead, stop: threading.Event) -> None:
        if prepared.is_pulled:  # not the leader's next head
            begun.set()
            told.append(stop.wait(10))

    monkeypatch.setattr(PreparedHead, "populate", populate)

    async def run() -> None:
        caught = CaughtUp(rig)
        task = asyncio.ensure_future(caught.catch_up.run())
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await caught.catch_up.close()
        await caught.given_back()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert told == [True] and not left_over(rig)


def test_files_that_were_made_ahead_and_are_not_wanted_go(rig: Rig) -> None:
    rig.fill(400)

    async def run() -> None:
        caught = CaughtUp(rig, Pace(lambda: 0.0))
        assert caught._pace is not None
        caught._pace.set_limit(1000)  # the clock stands still: it waits within a segment
        task = asyncio.ensure_future(caught.catch_up.run())
        await asyncio.wait_for(caught.made_ahead.wait(), 30)
        assert left_over(rig)
        caught.catch_up.stop("the link is cut")
        with pytest.raises(BrokerUnavailableError, match="the link is cut"):
            await asyncio.wait_for(task, 30)
        await caught.catch_up.close()
        await caught.given_back()

    asyncio.run(run())
    assert not left_over(rig)
    assert rig.follower.log_end_offset < rig.leader.segments[1].base_offset


def test_a_throttled_leader_is_asked_about_one_thing_at_a_time(rig: Rig) -> None:
    rig.fill(400)
    now = [0.0]

    def clock() -> float:
        now[0] += 0.05
        return now[0]

    async def run() -> CaughtUp:
        pace = Pace(clock)
        pace.set_limit(400_000)
        caught = CaughtUp(rig, pace)
        await caught.run()
        return caught

    caught = asyncio.run(run())
    assert rig.files(rig.follower) == rig.files(rig.leader)
    assert any(lease >= 0 for lease, _ in caught.asked)  # more was asked for within segments
