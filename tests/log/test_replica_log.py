"""A log as one of several copies: it is led or follows, begins segments where its leader does,
starts over, and shows no more than was confirmed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import LogError, NotLeaderError, OffsetOutOfRangeError
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.kernel_producers import known_producers
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.log.segment_search import locate
from kdirect.model import TopicPartition
from tests.log.conftest import make_batch, stamped
from tests.log.test_truncation import contents

TP = TopicPartition("t", 0)


def bases(p: Partition) -> list[int]:
    return [segment.base_offset for segment in p.segments]


def copy(leader: Partition, follower: Partition) -> None:
    """What a fetch does, again and again."""
    while follower.log_end_offset < leader.log_end_offset:
        copied = leader.read_for_replica(follower.log_end_offset, 3000)
        follower.copy_segments_of(copied.segment_bytes)
        follower.begin_segment(copied.segment)
        for buffer in copied.buffers:
            assert follower.append_as_stamped(bytes(buffer)).error == 0


SMALL = LogConfig(segment_bytes=4096, index_interval_bytes=300)


@contextlib.contextmanager
def logs_of(directory: Path, *configs: LogConfig) -> Iterator[list[Partition]]:
    with contextlib.ExitStack() as managers:
        logs = []
        for number, config in enumerate(configs):
            manager = LogManager([directory / str(number)], config, replicated=True)
            logs.append(managers.enter_context(manager).create_partition(TP))
        yield logs


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """The logs of a leader and of a follower, with small segments."""
    with logs_of(tmp_path, SMALL, SMALL) as logs:
        yield logs


def fill(p: Partition, count: int) -> None:
    for _ in range(count):
        assert p.append(make_batch(1, value_bytes=200)).error == 0


def test_a_copy_takes_no_records_of_clients(pair: list[Partition]) -> None:
    leader, follower = pair
    leader.begin_epoch(3, replicated=True)
    follower.follow_leader()
    fill(leader, 2)
    for append in (follower.append, lambda data: follower.append_nowait(data, 0)):
        with pytest.raises(NotLeaderError, match="does not lead"):
            append(make_batch(1))
    copy(leader, follower)
    assert (follower.log_end_offset, follower.high_watermark, follower.last_epoch) == (2, 0, 3)
    follower.replicated(-1, 1)
    assert follower.high_watermark == 1
    follower.begin_epoch(4, replicated=True)
    fill(follower, 1)
    assert bases(follower) == [0, 2] and follower.epochs_with_records() == [(3, 0), (4, 2)]
    with pytest.raises(LogError, match="to be led in epoch 2"):
        leader.begin_epoch(2, replicated=True)


def test_a_segment_that_begins_elsewhere_is_told_of_once(pair: list[Partition], caplog) -> None:
    """And not with each append."""
    leader, follower = pair
    leader.begin_epoch(1, replicated=True)
    follower.follow_leader()
    fill(leader, 2)
    copy(leader, follower)
    follower._end_segment()  # it rolled by rules of its own
    fill(leader, 4)
    while (offset := follower.log_end_offset) < leader.log_end_offset:
        copied = leader.read_for_replica(offset, 1)
        if offset > 2:
            follower.begin_segment(copied.segment)
        assert follower.append_as_stamped(bytes(copied.buffers[0])).error == 0
    assert (bases(leader), bases(follower)) == ([0], [0, 2])
    assert caplog.text.count("in its leader's log") == 1


def test_segments_begin_where_the_leaders_do(pair: list[Partition]) -> None:
    """Also where the copy's own rules would have begun one, or none."""
    leader, follower = pair
    leader.begin_epoch(1, replicated=True)
    follower.follow_leader()
    fill(leader, 30)
    copy(leader, follower)
    leader.begin_epoch(2, replicated=True)
    fill(leader, 1)
    leader.roll()
    fill(leader, 30)
    copy(leader, follower)
    assert bases(leader) == bases(follower) and len(bases(leader)) > 4
    assert {30, 31} <= set(bases(follower))
    for ours, theirs in zip(leader.segments, follower.segments, strict=True):
        assert ours.path.read_bytes()[: ours.size] == theirs.path.read_bytes()[: theirs.size]


@pytest.mark.parametrize(("here", "there"), [(4096, 16384), (16384, 4096)])
def test_a_copys_segments_are_as_large_as_its_leaders(
    tmp_path: Path, here: int, there: int
) -> None:
    """Whatever ``segment.bytes`` and ``segment.ms`` are here, until it leads; also a batch that has
    no room in one of its own."""
    ours = replace(SMALL, segment_bytes=here, segment_ms=1)
    theirs = replace(SMALL, segment_bytes=there)
    with logs_of(tmp_path, theirs, ours) as (leader, follower):
        leader.begin_epoch(1, replicated=True)
        follower.follow_leader()
        fill(leader, 150)
        if there > here:
            assert leader.append(make_batch(1, value_bytes=here + 1000)).error == 0
            fill(leader, 150)
        copy(leader, follower)
        assert bases(follower) == bases(leader) and len(bases(leader)) > 3
        assert [s.size for s in follower.segments] == [s.size for s in leader.segments]
        prepared = follower.prepare_next()
        assert prepared.length == there
        prepared.discard()
        follower.begin_epoch(2, replicated=True)
        end = follower.log_end_offset
        fill(follower, 150)
        sizes = [s.size for s in follower.segments if s.base_offset >= end and s.sealed]
        assert max(sizes) <= here
        leader.follow_leader()
        copy(follower, leader)
        assert bases(follower) == bases(leader)


def test_a_head_that_is_shorter_than_its_leaders_is_moved(tmp_path: Path) -> None:
    """``segment.bytes`` was raised at the leader while its head was that of an RDMA producer, say:
    the segment begins where it began, in a longer file."""
    large = replace(SMALL, segment_bytes=16384)
    with logs_of(tmp_path, large, SMALL) as (leader, follower):
        leader.begin_epoch(1, replicated=True)
        follower.follow_leader()
        fill(leader, 40)
        follower.copy_segments_of(4096)
        follower.begin_segment(0)
        for buffer in leader.read_for_replica(0, 3000).buffers:
            assert follower.append_as_stamped(bytes(buffer)).error == 0
        before = follower.segments[-1]
        copy(leader, follower)
        assert bases(follower) == bases(leader) == [0] and follower.segments[-1] is not before
        assert follower.segments[0].path.read_bytes()[: leader.size] == b"".join(
            bytes(x) for x in leader.read_for_replica(0, 1 << 20).buffers
        )
        follower.replicated(-1, 40)
        assert len(contents(follower)) == 40


def test_a_copy_whose_index_is_full_goes_on_in_its_segment(tmp_path: Path) -> None:
    """``segment.index.bytes`` is smaller here: what has no entry is found all the same, also after
    a restart, and when the log leads its head is rolled."""
    theirs = replace(SMALL, segment_bytes=65536)
    ours = replace(SMALL, index_max_bytes=48)  # for 6 offsets, 4 timestamps
    with logs_of(tmp_path, theirs, ours) as (leader, follower):
        leader.begin_epoch(1, replicated=True)
        follower.follow_leader()
        fill(leader, 200)
        copy(leader, follower)
        assert bases(follower) == bases(leader) == [0]
        assert follower.kernel.index_entries()[0] == 6 < leader.kernel.index_entries()[0]
        assert [locate(follower.segments[0], n)[1] for n in range(200)] == list(range(200))
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(LogManager([tmp_path / "1"], ours, replicated=True))
        follower = manager.partitions[TP]
        assert bases(follower) == [0] and follower.log_end_offset == 200
        assert follower.segments[0].size > ours.segment_bytes
        follower.begin_epoch(2, replicated=False)
        fill(follower, 30)
        assert follower.log_end_offset == 230 and len(bases(follower)) > 2
        assert len(contents(follower)) == 230


@pytest.mark.parametrize("count", [0, 10])
def test_a_head_is_lengthened_before_its_leader_writes_it(pair: list[Partition], count) -> None:
    leader, follower = pair
    leader.begin_epoch(1, replicated=True)
    follower.follow_leader()
    fill(leader, count)
    copy(leader, follower)
    head = follower.ensure_head(1)
    follower.lengthen_head()
    assert follower.segments[-1] is head and head.reserved_length == 4096
    follower.copy_segments_of(16384)
    follower.lengthen_head()
    longer = follower.segments[-1]
    assert longer.is_head and longer.reserved_length == 16384
    assert bases(follower) == [0] and follower.log_end_offset == count
    follower.replicated(-1, count)
    assert len(contents(follower)) == count


def test_an_empty_segment_that_the_leader_lacks_is_joined(pair: list[Partition]) -> None:
    leader, follower = pair
    leader.begin_epoch(1, replicated=True)
    fill(leader, 5)
    follower.follow_leader()
    copy(leader, follower)
    follower.begin_epoch(2, replicated=True)
    assert bases(follower) == [0, 5]
    fill(leader, 2)
    follower.follow_leader()
    copy(leader, follower)
    assert bases(follower) == bases(leader) == [0]
    assert follower.log_end_offset == 7 and follower.last_epoch == 1


def test_an_epoch_that_got_no_record_is_forgotten(pair: list[Partition]) -> None:
    """A broker that led and appended nothing follows another, whose records are older: no epoch of
    its own may be said to begin among them."""
    leader, follower = pair
    leader.begin_epoch(1, replicated=True)
    fill(leader, 2)
    follower.begin_epoch(2, replicated=True)
    follower.follow_leader()
    copy(leader, follower)
    assert follower.epochs_with_records() == leader.epochs_with_records() == [(1, 0)]
    assert contents(follower) == contents(leader)
    follower.begin_epoch(3, replicated=True)
    fill(follower, 1)
    follower.follow_leader()
    assert follower.epochs_with_records() == [(1, 0), (3, 2)]


def test_a_copy_deletes_what_the_leader_has_deleted(pair: list[Partition]) -> None:
    leader, follower = pair
    leader.begin_epoch(1, replicated=True)
    follower.follow_leader()
    fill(leader, 60)
    copy(leader, follower)
    leader.replicated(-1, 60)
    leader.delete_records(40)
    follower.replicated(-1, 20)
    follower.follow_log_start(40)
    assert follower.log_start_offset == 20, "it does not know that more was committed"
    follower.replicated(-1, 60)
    assert follower.apply_retention(1 << 60) == 0
    follower.follow_log_start(40)
    assert follower.log_start_offset == 40 and bases(follower) == bases(leader)
    first = leader.first_kept_offset
    assert first < 40 and leader.read_for_replica(first, 100).segment == first
    with pytest.raises(OffsetOutOfRangeError):
        leader.read_for_replica(first - 1, 100)
    with pytest.raises(OffsetOutOfRangeError):
        leader.read(first, 100)


@pytest.mark.parametrize("offset", [0, 7, 40, 41, 1000])
def test_a_log_starts_over_anywhere(pair: list[Partition], offset: int) -> None:
    leader, _follower = pair
    leader.begin_epoch(1, replicated=True)
    fill(leader, 41)
    leader.follow_leader()
    leader.replicated(-1, 30)
    leader.start_over(offset)
    assert (leader.log_start_offset, leader.high_watermark, leader.log_end_offset) == (offset,) * 3
    assert bases(leader) == [offset] and leader.last_epoch == -1
    assert known_producers(leader.kernel)[0] == []
    data = stamped(make_batch(1), offset, 9)
    assert leader.append_as_stamped(data).error == 0
    assert leader.last_epoch == 9
    leader.replicated(-1, offset + 1)
    assert contents(leader) == [data]
    leader.flush()
    assert leader.recovery_point == offset + 1


@pytest.mark.parametrize("offset", [0, 17, 1000])
def test_a_crash_while_it_starts_over_recovers(
    tmp_path: Path, monkeypatch: Any, offset: int
) -> None:
    """What is found is the beginning of the old log, or the new one; it can start over again."""
    config = LogConfig(segment_bytes=4096, index_interval_bytes=300)
    manager = LogManager([tmp_path / "log"], config).open()
    p = manager.create_partition(TP)
    datas = []
    for i in range(40):
        data = make_batch(1, value_bytes=200)
        assert p.append(data).error == 0
        datas.append(stamped(data, i, 0))
    p.flush()
    manager.checkpoint()
    copies: list[Path] = []

    def take() -> None:
        to = tmp_path / f"copy{len(copies)}"
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(tmp_path / "log", to)
            copies.append(to)

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            take()
            try:
                return original(*args, **kwargs)
            finally:
                take()

        monkeypatch.setattr(owner, name, call)

    watched(checkpoint.os, "rename")
    watched(checkpoint.os, "fsync")
    watched(Segment, "delete")
    p.start_over(offset)
    monkeypatch.undo()
    manager.close(clean=False)
    ends = set()
    for path in copies:
        with LogManager([path], config).open() as m:
            q = m.partitions[TP]
            ends.add(q.log_end_offset)
            if q.log_end_offset != q.log_start_offset:
                assert contents(q) == datas[: q.log_end_offset]
            q.start_over(offset)
            assert q.append(make_batch(1)).base_offset == offset
    assert {40, offset} <= ends


def test_a_restart_shows_what_the_checkpoint_says(tmp_path: Path) -> None:
    with LogManager([tmp_path], LogConfig(), replicated=True) as manager:
        p = manager.create_partition(TP)
        p.begin_epoch(1, replicated=True)
        fill(p, 9)
        p.replicated(-1, 4)
    with LogManager([tmp_path], LogConfig(), replicated=True) as manager:
        p = manager.partitions[TP]
        assert (p.high_watermark, p.log_end_offset) == (4, 9)
        p.begin_epoch(2, replicated=False)
        assert p.high_watermark == 9 and bases(p) == [0]
    with LogManager([tmp_path], LogConfig()) as manager:
        assert manager.partitions[TP].high_watermark == 9
