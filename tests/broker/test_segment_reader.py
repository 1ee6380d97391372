"""Sealed segments that are leased by one log and READ into another, over shm in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker.catch_up import checked
from kdirect.broker.segment_leases import MOST_LEASES, SegmentLeases
from kdirect.broker.segment_pull import READ_BYTES
from kdirect.broker.segment_reader import SegmentReader, Transfer
from kdirect.errors import LogError, OffsetOutOfRangeError, ProtocolError, RefusedError
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment_search import locate
from kdirect.member.throttle import Pace
from kdirect.model import TopicPartition
from kdirect.rdma import open_device
from tests.log.conftest import make_batch

TP = TopicPartition("t", 0)


class Rig:
    """A leader's log and leases, a follower's log and reader."""

    def __init__(self, stack: contextlib.ExitStack, tmp_path: Path) -> None:
        small = LogConfig(segment_bytes=64 << 10, index_interval_bytes=300)
        logs: list[Partition] = []
        for name in ("leader", "follower"):
            manager = LogManager([tmp_path / name], small, replicated=True)
            logs.append(stack.enter_context(manager).create_partition(TP))
        self.leader, self.follower = logs
        self.leader.begin_epoch(3, replicated=True)
        self.follower.follow_leader()
        self.devices = [stack.enter_context(contextlib.closing(open_device("shm"))) for _ in "ab"]
        ours, theirs = (device.alloc_pd() for device in self.devices)
        stack.callback(ours.close)
        stack.callback(theirs.close)
        self.leases = SegmentLeases(self.devices[0], ours)
        stack.callback(self.leases.close)
        self.reader = SegmentReader(self.devices[1], theirs)
        stack.callback(self.reader.close)
        self.reader.connect(self.leases.open(self.reader.address))
        self.domain = theirs

    def fill(self, count: int, value_bytes: int = 1000) -> None:
        for i in range(count):
            data = make_batch(1, value_bytes=value_bytes, fill=bytes([65 + i % 26]))
            assert self.leader.append(data).error == 0

    async def lease(
        self,
        *,
        lease: int = -1,
        position: int = 0,
        pace: Pace | None = None,
        tp: TopicPartition = TP,
    ) -> Any:
        x = SimpleNamespace(lease=lease, position=position, offset=self.follower.log_end_offset)

        async def read(work: Callable[[], Any]) -> Any:
            return await asyncio.to_thread(work)

        answer = await self.leases.answer(tp, self.leader, x, pace, read)
        self.leased = [SimpleNamespace(**row) for row in answer["segments"]]
        return self.leased[0] if self.leased else SimpleNamespace(lease=-1)

    def transfer(self, row: Any, *, epoch: int = 3) -> Transfer:
        source = checked(TP, row, self.follower.log_end_offset)
        loop = asyncio.get_running_loop()
        return Transfer(self.follower, source, self.domain, loop, epoch=epoch)

    async def pull(self, row: Any, **options: Any) -> str:
        """Why it ended; empty: all is in the log."""
        transfer = self.transfer(row, **options)
        self.reader.add(transfer)
        news = await asyncio.wait_for(transfer.news.get(), 30)
        assert news is not None and transfer.ended.is_set()
        return news

    async def pull_all(self) -> int:
        """Every sealed segment that the follower lacks; how many."""
        count = 0
        while (row := await self.lease()).lease >= 0:
            assert await self.pull(row) == ""
            self.leases.give_back([row.lease])
            count += 1
        return count

    def files(self, p: Partition) -> list[tuple[int, bytes]]:
        return [
            (s.base_offset, s.path.read_bytes()[: s.size])
            for s in p.segments
            if s.base_offset < self.leader.segments[-1].base_offset
        ]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        yield Rig(stack, tmp_path)


def test_sealed_segments_are_the_same_afterwards(rig: Rig) -> None:
    rig.fill(300)
    rig.leader.begin_epoch(5, replicated=True)
    rig.fill(100)
    count = len(rig.leader.segments) - 1
    assert count > 4
    assert asyncio.run(_pull_all(rig, epoch=5)) == count
    assert rig.files(rig.follower) == rig.files(rig.leader)
    end = rig.leader.segments[-1].base_offset
    assert rig.follower.log_end_offset == end
    assert rig.follower.epochs_with_records() == [(3, 0), (5, 300)]
    for offset in (0, 17, 299, 300, end - 1):
        here, there = (p.source_for(offset).locate(offset) for p in (rig.follower, rig.leader))
        assert here == there
    assert len(rig.leases) == 0
    assert all(s.references == 0 for s in rig.leader.segments[:-1])


async def _pull_all(rig: Rig, *, epoch: int) -> int:
    count = 0
    while (row := await rig.lease()).lease >= 0:
        assert await rig.pull(row, epoch=epoch) == ""
        rig.leases.give_back([row.lease])
        count += 1
    return count


def test_a_log_that_ends_within_a_segment_gets_the_rest_of_it(rig: Rig) -> None:
    rig.fill(200)
    copied = rig.leader.read_for_replica(0, 20_000)
    for buffer in copied.buffers:
        assert rig.follower.append_as_stamped(bytes(buffer)).error == 0
    assert 0 < rig.follower.log_end_offset < rig.leader.segments[1].base_offset
    asyncio.run(rig.pull_all())
    assert rig.files(rig.follower) == rig.files(rig.leader)


def test_segments_longer_than_the_followers_segment_bytes(rig: Rig) -> None:
    rig.fill(200)
    rig.follower.reconfigure(LogConfig(segment_bytes=8192))
    asyncio.run(rig.pull_all())
    assert rig.files(rig.follower) == rig.files(rig.leader)


def test_batches_longer_than_a_read(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        rig = Rig(stack, tmp_path)
        large = LogConfig(segment_bytes=8 << 20, max_message_bytes=3 << 20)
        for p in (rig.leader, rig.follower):
            p.reconfigure(large)
        rig.fill(1)
        rig.leader.roll()
        rig.fill(5, 2 * READ_BYTES + 77)
        rig.leader.roll()
        asyncio.run(rig.pull_all())
        assert rig.follower.log_end_offset == 6
        assert rig.files(rig.follower) == rig.files(rig.leader)


@pytest.mark.parametrize("at", ["first", "later"])
def test_a_damaged_batch_is_not_taken(rig: Rig, at: str) -> None:
    rig.fill(100)
    segment = rig.leader.segments[0]
    position = 100 if at == "first" else locate(segment, 30)[0] + 100
    good = segment.path.read_bytes()

    def spoil(value: int) -> None:
        with open(segment.path, "r+b") as file:
            file.seek(position)
            file.write(bytes([value]))

    async def pull() -> None:
        row = await rig.lease()
        spoil(good[position] ^ 1)
        why = await rig.pull(row)
        assert "refused" in why or "batch" in why, why
        rig.leases.give_back([row.lease])

    asyncio.run(pull())
    kernel = rig.follower.kernel
    assert kernel.end_position == 0 and rig.follower.log_end_offset == 0
    assert not any(rig.follower.segments[-1].path.read_bytes())
    spoil(good[position])
    asyncio.run(rig.pull_all())
    assert rig.files(rig.follower) == rig.files(rig.leader)


def test_records_of_a_later_epoch_than_the_leaders_are_not_taken(rig: Rig) -> None:
    rig.fill(100)

    async def pull() -> None:
        assert "epoch 3" in await rig.pull(await rig.lease(), epoch=2)

    asyncio.run(pull())
    assert rig.follower.log_end_offset == 0 and rig.follower.epochs_with_records() == []


def test_a_lease_that_ended_breaks_the_reading_and_another_one_heals(rig: Rig) -> None:
    rig.fill(100)

    async def pull() -> None:
        row = await rig.lease()
        rig.leases.give_back([row.lease])
        assert "READ failed" in await rig.pull(row)
        assert rig.reader.is_broken
        with pytest.raises(RefusedError, match="no lease"):
            await rig.lease(lease=row.lease, position=row.position)
        broken, rig.reader = rig.reader, SegmentReader(rig.devices[1], rig.domain)
        broken.close()
        rig.reader.connect(rig.leases.open(rig.reader.address))
        await rig.pull_all()

    asyncio.run(pull())
    assert rig.files(rig.follower) == rig.files(rig.leader)


def test_what_retention_deletes_stays_readable_while_it_is_leased(rig: Rig) -> None:
    rig.fill(200)
    first = rig.leader.segments[0]
    before = first.path.read_bytes()[: first.size]

    async def pull() -> None:
        row = await rig.lease()
        rig.leader.replicated(-1, rig.leader.log_end_offset)
        rig.leader.delete_records(rig.leader.segments[2].base_offset)
        assert not first.path.exists()
        assert await rig.pull(row) == ""
        rig.leases.give_back([row.lease])
        with pytest.raises(OffsetOutOfRangeError):
            await rig.lease()

    asyncio.run(pull())
    here = rig.follower.segments[0]
    assert here.path.read_bytes()[: here.size] == before


def test_leases_are_bounded_and_end_with_the_link(rig: Rig) -> None:
    rig.fill(100)

    async def take() -> None:
        for n in range(MOST_LEASES):  # the rest of the log holds some, too
            if len(rig.leases) == MOST_LEASES:
                break
            assert (await rig.lease(tp=TopicPartition("t", n))).lease >= 0
        assert n > MOST_LEASES // 2  # each had one, at least
        with pytest.raises(RefusedError, match="leased on this link already"):
            await rig.lease(tp=TopicPartition("t", MOST_LEASES))

    asyncio.run(take())
    assert sum(s.references for s in rig.leader.segments[:-1]) == MOST_LEASES
    rig.leases.close()
    assert rig.leader.segments[0].references == 0 and len(rig.leases) == 0
    with pytest.raises(RefusedError, match="closed"):
        asyncio.run(rig.lease())


def test_a_read_that_cannot_be_posted_is_not_waited_for(rig: Rig) -> None:
    """Whatever the error is: a fence waits for the end of the transfer."""
    rig.fill(100)

    def post_read(*arguments: Any) -> None:
        raise ValueError("a mistake")

    async def pull() -> None:
        qp, rig.reader.qp = rig.reader.qp, SimpleNamespace(post_read=post_read)
        assert "a mistake" in await asyncio.wait_for(rig.pull(await rig.lease()), 5)
        assert rig.reader.is_broken
        rig.reader.qp = qp

    asyncio.run(pull())


def test_a_lease_that_nobody_heard_of_ends_with_the_next_one(rig: Rig) -> None:
    """A replica is fenced while its answer is on the way: it cannot give back what it was given."""
    rig.fill(100)

    async def take() -> None:
        for _ in range(MOST_LEASES + 1):
            assert (await rig.lease()).lease >= 0
        assert len(rig.leases) == len(rig.leased) and rig.leader.segments[0].references == 1
        await rig.pull_all()

    asyncio.run(take())
    assert rig.files(rig.follower) == rig.files(rig.leader)


def test_a_throttle_lets_so_much_be_read(rig: Rig) -> None:
    rig.fill(200)
    now = 0.0
    pace = Pace(lambda: now, 160_000)  # 20,000 bytes at once

    async def ask() -> None:
        nonlocal now
        row = await rig.lease(pace=pace)
        number, size = row.lease, row.size
        assert (row.allowed, row.wait_ms) == (20_000, 125)
        asked = 0
        while row.allowed < size:
            now += row.wait_ms / 1000
            before = row.allowed
            row = await rig.lease(lease=number, position=before, pace=pace)
            assert row.lease == number and before < row.allowed <= before + 20_000
            asked += 1
        assert asked == size // 20_000 and now == pytest.approx(size / 160_000, abs=0.2)
        assert (await rig.lease(lease=number, position=1000)).allowed == size  # nothing holds it
        with pytest.raises(RefusedError, match="not in the leased segment"):
            await rig.lease(lease=number, position=size + 1)

    asyncio.run(ask())


def test_a_reading_that_is_given_up_leaves_nothing(rig: Rig) -> None:
    rig.fill(100)
    pace = Pace(lambda: 0.0, 0)

    async def pull() -> None:
        row = await rig.lease()
        source = checked(TP, row, rig.follower.log_end_offset)
        loop = asyncio.get_running_loop()
        transfer = Transfer(rig.follower, source, rig.domain, loop, epoch=3, pace=lambda: pace)
        rig.reader.add(transfer)
        assert not transfer.ended.is_set()
        rig.reader.stop(transfer, "fenced")
        await asyncio.wait_for(transfer.ended.wait(), 30)
        assert transfer.news.get_nowait() == "fenced"

    asyncio.run(pull())
    assert rig.follower.log_end_offset == 0
    rig.follower.begin_epoch(4, replicated=True)
    assert rig.follower.append(make_batch(1)).error == 0


GOOD = {
    "base_offset": 0,
    "position": 0,
    "size": 1000,
    "end_offset": 10,
    "address": 1 << 40,
    "rkey": 7,
    "allowed": 1000,
    "wait_ms": 0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_offset", 1),
        ("base_offset", -1),
        ("position", 100),
        ("position", -1),
        ("position", 1000),
        ("size", 0),
        ("size", 1 << 31),
        ("size", -5),
        ("end_offset", 0),
        ("address", 0),
        ("address", -4096),
        ("address", (1 << 63) - 4096),
        ("rkey", 1 << 32),
        ("allowed", 1001),
        ("allowed", -1),
        ("wait_ms", -1),
    ],
)
def test_a_forged_answer_is_refused(rig: Rig, name: str, value: int) -> None:
    assert checked(TP, SimpleNamespace(**GOOD), rig.follower.log_end_offset).size == 1000
    with pytest.raises(ProtocolError, match="which cannot be"):
        checked(TP, SimpleNamespace(**{**GOOD, name: value}), rig.follower.log_end_offset)


def test_a_segment_that_begins_elsewhere_here_is_not_read(rig: Rig) -> None:
    rig.fill(200)
    rig.follower.append_as_stamped(bytes(rig.leader.read_for_replica(0, 2000).buffers[0]))
    rig.follower.roll()
    end = rig.follower.log_end_offset

    async def pull() -> None:
        with pytest.raises(LogError, match="begins at"):
            await rig.pull(await rig.lease())

    asyncio.run(pull())
    assert rig.follower.log_end_offset == end
    with pytest.raises(OffsetOutOfRangeError, match="no batch"):
        rig.leader.append(make_batch(3))
        rig.leader.roll()
        rig.leader.sealed_extent(rig.leader.log_end_offset - 1)
