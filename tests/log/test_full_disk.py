"""A full disk: one clear error, nothing half written, and what has room goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdirect.errors import (
    LogError,
    StorageFullError,
)
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from tests.log.conftest import commit_at_tail

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_a_full_disk_is_one_clear_error_and_the_log_goes_on(small_disk, fill_disk, batch) -> None:
    m = LogManager([small_disk], LogConfig(segment_bytes=400 << 10)).open()
    p = m.create_partition(TP)
    q = m.create_partition(TopicPartition("q", 0))
    q.append(batch())
    big = batch(value_bytes=100 << 10)
    appended = 0
    with pytest.raises(StorageFullError) as e:
        for _ in range(100):
            appended += p.append(big).error == 0
    assert (
        str(p.directory) in str(e.value)
        and "bytes of a segment" in str(e.value)
        and "free space" in e.value.hint
    )
    assert appended >= 8, "nearly all of the disk was used"
    p._spare.give_back()
    fill_disk(small_disk)
    with pytest.raises(StorageFullError):
        p.append(big)
    assert not list(p.directory.glob("*.tmp"))
    segments = len(p.segments)
    for partition in (p, q):
        assert partition.append(batch(value_bytes=50)).error == 0, "what has room goes on"
    end = appended + 1
    assert p.log_end_offset == end and len(b"".join(map(bytes, p.read(0, 1 << 30)))) == p.size
    with pytest.raises(StorageFullError):
        p.roll()
    with pytest.raises(StorageFullError):
        p.ensure_head(300 << 10)
    assert len(p.segments) == segments and p.log_end_offset == end
    (small_disk / "ballast").unlink()
    p.delete_records(p.head.base_offset)
    assert p.append(big).base_offset == end, "space is back"
    m.close(clean=False)
    m = LogManager([small_disk], LogConfig(segment_bytes=400 << 10)).open()
    p = m.partitions[TP]
    assert p.log_end_offset == end + 1 and p.append(big).error == 0
    m.close()


def test_a_partition_that_a_full_disk_refused_can_be_made_later(small_disk, batch) -> None:
    with LogManager([small_disk], LogConfig(segment_bytes=64 << 10)) as m:
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as f:
            while True:
                f.write(bytes(4096))
        for _ in range(2):
            with pytest.raises(LogError, match=r"cannot create partition t-0 .*No space left"):
                m.create_partition(TP, {"retention.ms": "1000"})
            assert not (small_disk / "t-0").exists() and TP not in m.partitions
        ballast.unlink()
        assert m.create_partition(TP, {"retention.ms": "1000"}).append(batch()).error == 0


def test_retention_makes_room_on_a_full_disk(small_disk, batch) -> None:
    """Though the head is to be rolled first, and a new one has no room before the old segments are
    gone."""
    with LogManager(
        [small_disk], LogConfig(segment_bytes=128 << 10, segment_ms=5000, retention_ms=1000)
    ) as m:
        p = m.create_partition(TP)
        for _ in range(5):
            p.append(batch(value_bytes=60_000, timestamp_ms=NOW - 100_000), NOW - 100_000)
            p.roll()
        for age in (6000, 0):  # as an RDMA producer does: without a look at the clock
            data = batch(timestamp_ms=NOW - age)
            ctypes.memmove(p.head.address + p.kernel.end_position, data, len(data))
            assert commit_at_tail(p.kernel, len(data), NOW).error == 0
        p._spare.give_back()
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as f:
            while True:
                f.write(bytes(4096))
        assert len(p.segments) == 6
        assert m.apply_retention(NOW) == 5
        assert [(s.base_offset, s.size > 0, s.is_head) for s in p.segments] == [
            (5, True, False),
            (7, False, True),
        ]
        assert p.log_start_offset == 5 and len(p.read(5, 1 << 20)) == 1
        ballast.unlink()


def test_a_full_disk_at_the_first_append_after_a_start(small_disk, fill_disk, batch) -> None:
    m = LogManager([small_disk], LogConfig(segment_bytes=64 << 10)).open()
    p = m.create_partition(TP)
    p.append(batch())
    m.close()
    m = LogManager([small_disk], LogConfig(segment_bytes=900 << 10)).open()
    p = m.partitions[TP]
    ballast = small_disk / "ballast"
    fill_disk(small_disk)
    before = {f: os.stat(p.directory / f).st_size for f in files(p.directory)}
    with pytest.raises(StorageFullError):
        p.append(batch())
    assert {f: os.stat(p.directory / f).st_size for f in files(p.directory)} == before
    assert len(p.read(0, 100)) == 1
    ballast.unlink()
    assert p.append(batch()).base_offset == 1
    m.close()


def test_size_limits_of_the_process_count_as_a_full_disk(tmp_path, batch) -> None:
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from kdirect.errors import StorageFullError
from kdirect.log.manager import LogManager
from kdirect.log.mapped import copy_bytes
from kdirect.log.config import LogConfig
from kdirect.model import TopicPartition
m = LogManager([{str(tmp_path / "log")!r}], LogConfig(segment_bytes=1 << 20)).open()
p = m.create_partition(TopicPartition("t", 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
data = bytes.fromhex({batch().hex()!r})
try:
    p.append(data)
except StorageFullError as e:
    print("refused:", e)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(p.append(data).error)
m.close()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("refused: no space in") and run.stdout.endswith("\n0\n")
