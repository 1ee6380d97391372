"""What is copied from one leader: a partition that it refuses, or that cannot be written here, is
asked for again later, and holds up no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.format.error_codes import ErrorCode
from kdirect.member.fetcher import Fetcher
from kdirect.member.throttle import NO_LIMIT, Pace
from kdirect.model import TopicPartition

ANSWERS = 20


class Copy:
    """A replica that takes what comes, or never does."""

    epoch = 3
    log_start = 0
    is_pushed = False
    is_full = False

    def __init__(self, number: int, *, takes: bool = True) -> None:
        self.tp = TopicPartition("t", number)
        self.end = 0
        self.fetcher: Any = None
        self._takes = takes

    def take(self, row: Any) -> bool:
        if self._takes:
            self.end += 1
            self.fetcher.confirm(1, self)
        return self._takes

    def out_of_range(self, epoch: int, start: int) -> None:
        raise AssertionError


class Leader:
    """Answers each partition that a request names, with records or with an error; a request that
    names none waits for the next one."""

    def __init__(self, errors: dict[int, int], records: bytes = b"") -> None:
        self.asked: Counter[int] = Counter()
        self.enough = asyncio.Event()
        self._next = asyncio.Event()
        self._errors = errors
        self._records = records

    async def call(self, leader: int, request: Any, *, timeout_s: float) -> Any:
        self._next.set()
        self._next = following = asyncio.Event()
        await asyncio.sleep(0)
        rows = [x for topic in request.topics for x in topic.partitions]
        self.asked.update(x.partition for x in rows)
        if not rows:
            await following.wait()
        if self.asked[0] >= ANSWERS:
            self.enough.set()
        answers = [
            SimpleNamespace(
                partition=x.partition,
                error_code=self._errors.get(x.partition, 0),
                leader_epoch=3,
                records=self._records,
            )
            for x in rows
        ]
        topics = [SimpleNamespace(topic="t", partitions=answers)]
        return SimpleNamespace(error_code=0, session_id=1, topics=topics)


@pytest.mark.parametrize(
    ("errors", "takes"),
    [({1: int(ErrorCode.KAFKA_STORAGE_ERROR)}, True), ({}, False)],
    ids=["the leader refuses it", "it cannot be written here"],
)
def test_one_partition_does_not_hold_up_the_others(errors: dict[int, int], takes: bool) -> None:
    async def run() -> Counter[int]:
        leader = Leader(errors)
        fetcher = Fetcher(leader, 2, lambda: 7)
        for copy in (Copy(0), Copy(1, takes=takes)):
            copy.fetcher = fetcher
            fetcher.follow(1, copy)
        try:
            await asyncio.wait_for(leader.enough.wait(), 10)
        finally:
            fetcher.stop()
        return leader.asked

    asked = asyncio.run(run())
    # It pauses for 20 ms, 40 ms and so on, and the other one for nothing.
    assert 1 <= asked[1] < ANSWERS / 2


def test_one_that_is_refused_is_asked_for_again() -> None:
    async def run() -> None:
        leader = Leader({0: int(ErrorCode.NOT_LEADER_OR_FOLLOWER)})
        fetcher = Fetcher(leader, 2, lambda: 7)
        fetcher.follow(1, Copy(0))
        try:
            while leader.asked[0] < 4:
                await asyncio.sleep(0)
                fetcher.retry()  # the metadata has changed: nothing pauses any longer
        finally:
            fetcher.stop()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_one_that_is_held_back_is_asked_for_when_its_rate_allows() -> None:
    async def run() -> None:
        leader = Leader({}, bytes(100))
        now = 0.0
        pace = Pace(lambda: now, 100)
        fetcher = Fetcher(leader, 2, lambda: 7, lambda tp: pace if tp.partition == 1 else None)
        for copy in (Copy(0), Copy(1)):
            copy.fetcher = fetcher
            fetcher.follow(1, copy)
        try:
            await leader.enough.wait()
            assert leader.asked[1] == 1 and pace.taken == 100
            pace.set_limit(NO_LIMIT)
            while leader.asked[1] < 4:
                await asyncio.sleep(0)
                fetcher.retry()  # the metadata has changed
        finally:
            fetcher.stop()

    asyncio.run(asyncio.wait_for(run(), 10))
