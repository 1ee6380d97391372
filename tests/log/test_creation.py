"""Making many partitions at once: few syncs, all or none, and what a crash leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import LogError
from kdirect.log import checkpoint, manager
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from tests.log.conftest import make_batch

COUNT = 100
WANTED = [TopicPartition("t", n) for n in range(COUNT)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("t-"))


def test_many_partitions_cost_few_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Any] = []
    fsync, of_all = os.fsync, checkpoint.sync_file_system
    with LogManager([tmp_path / "a", tmp_path / "b"], LogConfig()) as logs:
        monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd))[1])
        monkeypatch.setattr(
            checkpoint, "sync_file_system", lambda fd: (synced.append(fd), of_all(fd))[1]
        )
        made = logs.create_partitions(WANTED, {"segment.bytes": "65536"})
        assert len(synced) == 4, "two for each log directory"
        assert [p.topic_partition for p in made] == WANTED
        assert len({p.topic_id for p in made}) == 1
        assert len(names(tmp_path / "a")) == len(names(tmp_path / "b")) == COUNT // 2
        assert made[0].append(make_batch()).error == 0
        topic_id = made[0].topic_id
    with LogManager([tmp_path / "a", tmp_path / "b"], LogConfig()) as logs:
        again = logs.partitions[WANTED[0]]
        assert (again.log_end_offset, again.topic_id) == (1, topic_id)
        assert again.config.segment_bytes == 65536 and len(logs.partitions) == COUNT


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with LogManager([tmp_path], LogConfig()) as logs:
        (tmp_path / "t-7").mkdir()
        with pytest.raises(LogError, match="cannot create"):
            logs.create_partitions(WANTED[:10])
        assert names(tmp_path) == ["t-7"] and not logs.partitions
        (tmp_path / "t-7").rmdir()
        logs.create_partition(WANTED[3])
        with pytest.raises(LogError, match="t-3 exists already"):
            logs.create_partitions(WANTED[:10])
        assert names(tmp_path) == ["t-3"]
        assert len(logs.create_partitions(WANTED[4:10])) == 6


def test_a_crash_leaves_whole_partitions_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before the names are given, or between two of them."""

    class Crash(BaseException):
        pass

    rename = os.rename

    def stop_at(third: Any, to: Any) -> None:
        if str(to).endswith("t-2"):
            raise Crash
        rename(third, to)

    logs = LogManager([tmp_path], LogConfig()).open()
    monkeypatch.setattr(manager.os, "rename", stop_at)
    monkeypatch.setattr(manager.shutil, "rmtree", lambda path, **options: None)
    with pytest.raises(Crash):
        logs.create_partitions(WANTED[:4])
    monkeypatch.undo()
    assert names(tmp_path) == ["t-0", "t-1", "t-2-new", "t-3-new"]
    logs.close(clean=False)
    with LogManager([tmp_path], LogConfig()) as logs:
        assert set(logs.partitions) == set(WANTED[:2])
        assert names(tmp_path) == ["t-0", "t-1"]
        logs.create_partitions(WANTED[2:4])
        assert all(p.append(make_batch()).error == 0 for p in logs.partitions.values())
