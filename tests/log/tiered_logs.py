"""Logs of a broker with tiered storage, whose copies are only spoken of."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdirect.format.batch import iterate_batches
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
NOW = int(time.time() * 1000)
HOUR = 3_600_000
TIERED = {"remote.storage.enable": "true"}


class Logs:
    """The log manager of a broker that has tiered storage, with one partition; `crash` leaves the
    directory as a process leaves it that dies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manager: LogManager | None = None
        self.config = LogConfig(segment_bytes=4096, remote_system=True, retention_ms=-1)

    def open(self, **own: Any) -> Partition:
        """The partition; `own` are properties of its topic, with underscores for dots."""
        if self.manager is None:
            self.manager = LogManager([self.directory], self.config).open()
        found = self.manager.partitions.get(TP)
        properties = TIERED | {k.replace("_", "."): str(v).lower() for k, v in own.items()}
        if found is None:
            return self.manager.create_partition(TP, properties)
        if own:
            self.manager.alter_topic(TP.topic, properties)
        return found

    def restart(self, *, clean: bool = True) -> Partition:
        assert self.manager is not None
        self.manager.close(clean=clean)
        self.manager = None
        return self.open()

    def starts(self) -> dict:
        return checkpoint.read_offsets(self.directory / checkpoint.LOG_STARTS)


def fill(p: Partition, batch: Callable[..., bytes], segments: int, each: int = 10) -> None:
    """`segments` sealed segments of `each` records, then an active one of one record."""
    for _ in range(segments):
        for _ in range(each):
            p.append(batch(timestamp_ms=NOW - HOUR))
        p.roll()
    p.append(batch(timestamp_ms=NOW))


def bases(p: Partition) -> list[int]:
    return [s.base_offset for s in p.segments]


def records(buffers) -> list[int]:
    return [i.base_offset for b in buffers for i in iterate_batches(bytes(b))]


# -- local retention -------------------------------------------------------------------------------


def cold(p: Partition, batch: Callable[..., bytes], segments: int, tiered: int) -> None:
    """Of `segments` segments of ten records, `tiered` are in remote storage only."""
    fill(p, batch, segments)
    p.note_tiered(10 * tiered)
    assert p.apply_retention(NOW) == tiered
