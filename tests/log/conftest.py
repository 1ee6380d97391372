"""What the tests of the log share: batches made by kafka-python, heads in anonymous memory,
partitions on disk."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.record.default_records import DefaultRecordBatchBuilder

from kdirect.log.config import LogConfig
from kdirect.log.kernel import CommitKernel
from kdirect.log.kernel_head import install_head
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.log.tiered_logs import Logs

TP = TopicPartition("t", 0)


def make_batch(
    records: int = 1,
    *,
    value_bytes: int = 20,
    timestamp_ms: int | None = None,
    timestamps: list[int] | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    sequence: int = -1,
    transactional: bool = False,
    fill: bytes = b"x",
) -> bytes:
    """One record batch as a Kafka client makes it; base offset 0, not yet stamped."""
    builder = DefaultRecordBatchBuilder(
        2, 0, transactional, producer_id, producer_epoch, sequence, 1 << 30
    )
    now = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
    for i in range(records):
        timestamp = timestamps[i] if timestamps is not None else now
        value = (fill * value_bytes)[:value_bytes]
        assert builder.append(i, timestamp, b"k%d" % i, value, []) is not None
    return bytes(builder.build())


def stamped(data: bytes, offset: int, epoch: int = 0) -> bytes:
    """The batch as a log keeps it: with its base offset and leader epoch."""
    return struct.pack(">q", offset) + data[8:12] + struct.pack(">i", epoch) + data[16:]


def commit_at_tail(kernel: CommitKernel, length: int, now_ms: int, position: int = -1) -> Any:
    """What the produce worker does for bytes that lie at the tail of the head, or at `position`."""
    at = kernel.end_position if position < 0 else position
    return kernel.commit_next(kernel.segment_base_offset, at, length, kernel.leader_epoch, now_ms)


class Head:
    """A CommitKernel with a head, and indexes, in anonymous memory."""

    def __init__(
        self,
        capacity: int = 1 << 20,
        *,
        base_offset: int = 0,
        index_entries: int = 8192,
        install: bool = True,
        **settings: Any,
    ) -> None:
        self.map = mmap.mmap(-1, capacity)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.offset_index = mmap.mmap(-1, index_entries * 8)
        self.time_index = mmap.mmap(-1, index_entries * 12)
        self.index_entries = index_entries
        self.capacity = capacity
        self.kernel = CommitKernel(
            log_start_offset=base_offset, log_end_offset=base_offset, **settings
        )
        if install:
            self.install()

    def install(self) -> None:
        install_head(
            self.kernel,
            self.address,
            self.capacity,
            segment_base_offset=self.kernel.log_end_offset,
            offset_index_address=ctypes.addressof(ctypes.c_char.from_buffer(self.offset_index)),
            offset_index_capacity=self.index_entries,
            time_index_address=ctypes.addressof(ctypes.c_char.from_buffer(self.time_index)),
            time_index_capacity=self.index_entries,
        )

    @property
    def bytes(self) -> bytes:
        """Committed bytes."""
        return self.map[: self.kernel.end_position]

    def put(self, position: int, data: bytes) -> None:
        """What an RDMA producer does: write, then ask for the commit."""
        self.map[position : position + len(data)] = data


@pytest.fixture
def batch() -> Callable[..., bytes]:
    return make_batch


@pytest.fixture
def head() -> type[Head]:
    return Head


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory on tmpfs where there is one: for tests that sync often and judge no disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="kdirect-test-", dir=shared))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def open_partition(tmp_path: Path) -> Iterator[Callable[..., Partition]]:
    """open_partition(**LogConfig fields) -> the one partition of a log manager in `tmp_path`; call
    again to restart it."""
    managers: list[LogManager] = []

    def opened(*, restart: bool = True, clean: bool = True, **fields: Any) -> Partition:
        if restart and managers:
            managers.pop().close(clean=clean)
        manager = LogManager(
            [tmp_path / "log"], LogConfig(**{"segment_bytes": 1 << 20, **fields})
        ).open()
        managers.append(manager)
        return manager.partitions.get(TP) or manager.create_partition(TP)

    yield opened
    for manager in managers:
        manager.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=False
    ).returncode:
        pytest.skip("needs root to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def fill_disk() -> Callable[[Path], None]:
    """fill_disk(directory) leaves no page free, by a file `ballast`."""

    def fill(directory: Path) -> None:
        with contextlib.suppress(OSError), open(directory / "ballast", "ab", buffering=0) as f:
            while True:
                f.write(bytes(4096))

    return fill


@pytest.fixture
def logs(memory_path: Path) -> Iterator[Logs]:
    made = Logs(memory_path / "log")
    yield made
    if made.manager is not None:
        made.manager.close(clean=False)
