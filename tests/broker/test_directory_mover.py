"""The thread that moves partitions between log directories, by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.broker.directory_moves import RATE, DirectoryMover
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from tests.log.conftest import make_batch
from tests.support import wait_until

TP = TopicPartition("t", 0)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[LogManager]:
    """Of two directories, with one partition."""
    with LogManager([tmp_path / "a", tmp_path / "b"], LogConfig(file_delete_delay_ms=0)) as m:
        m.create_partition(TP)
        yield m


@contextlib.contextmanager
def moving(mover: DirectoryMover, logs: LogManager) -> Iterator[None]:
    """While the partition is moved to the other directory."""
    here = logs.partitions[TP].directory.parent
    assert logs.moves.ask(TP, next(d for d in logs.log_dirs if d != here))
    mover.wake()
    try:
        yield
    finally:
        mover.stop()


def test_a_rate_counts_at_once(logs) -> None:
    """Also while it is waited because the one before was low: for hours, then."""
    p = logs.partitions[TP]
    while p.size < 1 << 18:
        assert p.append(make_batch(value_bytes=60_000)).error == 0
    config: dict[str, Any] = {RATE: 1}
    mover = DirectoryMover(config, logs)
    with moving(mover, logs):
        wait_until(lambda: mover.statistics()["moves_copied_bytes"], "it has begun to copy")
        assert not mover.statistics()["moves_finished"]
        config[RATE] = 1 << 40
        wait_until(lambda: mover.statistics()["moves_finished"], "the partition was moved")
