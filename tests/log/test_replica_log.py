"""A log as one of several copies: it is led or follows, begins segments where its leader does,
starts over, and shows no more than was confirmed."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import LogError, NotLeaderError, OffsetOutOfRangeError
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.segment import Segment
from kdirect.model import TopicPartition
from tests.log.conftest import make_batch
from tests.log.test_truncation import contents, stamped

TP = TopicPartition("t", 0)


def bases(p: Partition) -> list[int]:
    return [segment.base_offset for segment in p.segments]


def copy(leader: Partition, follower: Partition) -> None:
    """What a fetch does, again and again."""
    while follower.log_end_offset < leader.log_end_offset:
        copied = leader.read_for_replica(follower.log_end_offset, 3000)
        follower.begin_segment(copied.segment)
        for buffer in copied.buffers:
            assert follower.append_as_stamped(bytes(buffer)).error == 0


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """The logs of a leader and of a follower, with small segments."""
    config = LogConfig(segment_bytes=4096, index_interval_bytes=300)
    with contextlib.ExitStack() as managers:
        logs = []
        for name in ("a", "b"):
            manager = LogManager([tmp_path / name], config, replicated=True)
            logs.append(managers.enter_context(manager).create_partition(TP))
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
    assert leader.kernel.producers()[0] == []
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
