"""Sealed segments that are leased to followers end with the leadership."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker.leased_reads import LeasedReads
from kdirect.errors import NotLeaderError, RefusedError
from kdirect.model import TopicPartition
from tests.broker.test_segment_reader import TP, Rig

FOLLOWER = 2
OTHER = TopicPartition("t", 1)


class Leading:
    """A broker that leads the rig's log, as two partitions, and its link to one follower."""

    def __init__(self, rig: Rig) -> None:
        self.link: Any = SimpleNamespace(broker=FOLLOWER, number=7, leases=rig.leases)
        self.meanwhile: Callable[[], None] = lambda: None  # before or after a thread leases
        self.is_early = False
        files: Any = SimpleNamespace(read=self._read, background=lambda work: work())
        throttles: Any = SimpleNamespace(led=lambda tp, in_sync: None)
        self.reads = LeasedReads({FOLLOWER: self.link}, files, throttles)
        state = SimpleNamespace(in_sync=(1,))
        self.leaders = {
            tp: SimpleNamespace(
                tp=tp,
                partition=rig.leader,
                has_resigned=False,
                leading=SimpleNamespace(state=state),
            )
            for tp in (TP, OTHER)
        }

    async def _read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self.is_early:
            self.meanwhile()
        result = await asyncio.to_thread(work, *arguments)
        if not self.is_early:
            self.meanwhile()
        return result

    async def lease(self, tp: TopicPartition) -> list[Any]:
        x = SimpleNamespace(lease=-1, offset=0, position=0)
        answer = await self.reads.lease(self.link, self.leaders[tp], x)
        return [SimpleNamespace(**segment) for segment in answer["segments"]]

    def resign(self, tp: TopicPartition) -> None:
        leader = self.leaders[tp]
        leader.has_resigned = True
        self.reads.resigned(tp, leader.partition)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        rig = Rig(stack, tmp_path)
        rig.fill(300)
        yield rig


def test_leases_end_with_the_leadership_and_others_stay(rig: Rig) -> None:
    async def run() -> None:
        leading = Leading(rig)
        ended, stays = await leading.lease(TP), await leading.lease(OTHER)
        assert len(ended) == len(stays) == len(rig.leader.segments) - 1 > 2
        leading.resign(TP)
        assert len(rig.leases) == len(stays)
        assert "READ failed" in await rig.pull(ended[0])
        leading.resign(OTHER)
        assert len(rig.leases) == 0

    asyncio.run(run())
    assert rig.follower.log_end_offset == 0
    assert all(s.references == 0 for s in rig.leader.segments[:-1])


@pytest.mark.parametrize("early", [True, False])
def test_what_is_leased_while_the_leader_resigns_is_refused(rig: Rig, early: bool) -> None:
    async def run() -> None:
        leading = Leading(rig)
        leading.meanwhile, leading.is_early = lambda: leading.resign(TP), early
        with pytest.raises(NotLeaderError if early else RefusedError):
            await leading.lease(TP)

    asyncio.run(run())
    assert len(rig.leases) == 0
    assert all(s.references == 0 for s in rig.leader.segments[:-1])


@pytest.mark.parametrize("gone", [False, True])
def test_nothing_stays_of_what_is_leased_while_a_part_of_it_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """The leader resigns between two segments of one answer, for which nobody may wait any more."""
    leading = Leading(rig)
    hold = rig.leases._hold

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def held(tp: TopicPartition, sealed: Any) -> int:
            number = hold(tp, sealed)
            if not leading.leaders[TP].has_resigned:
                if gone:
                    loop.call_soon_threadsafe(asked.cancel)
                leading.resign(TP)
                assert len(rig.leases) == 0
            return number

        monkeypatch.setattr(rig.leases, "_hold", held)
        asked = asyncio.ensure_future(leading.lease(TP))
        with pytest.raises(asyncio.CancelledError if gone else NotLeaderError):
            await asked

    asyncio.run(run())  # returns when its threads have
    assert len(rig.leases) == 0
    assert all(s.references == 0 for s in rig.leader.segments[:-1])


def test_no_queue_stays_where_no_queue_pair_can_be_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower tries again and again."""
    rig.leases._end_queue_pair()
    queues: list[Any] = []

    def create_cq(depth: int) -> Any:
        queue = SimpleNamespace(is_open=True)
        queue.close = lambda: setattr(queue, "is_open", False)
        queues.append(queue)
        return queue

    def create_qp(*_: Any, **__: Any) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(rig.leases, "_device", SimpleNamespace(create_cq=create_cq))
    monkeypatch.setattr(rig.leases, "_domain", SimpleNamespace(create_qp=create_qp))
    for _ in range(3):
        with pytest.raises(OSError, match="no room"):
            rig.leases.open(b"")
    assert sum(queue.is_open for queue in queues) <= 1
    rig.leases.close()
    assert not any(queue.is_open for queue in queues)
