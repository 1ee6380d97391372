"""What the handlers of Fetch and ListOffsets say of remote storage, and what answers them.  Values
and one interface: a broker without tiered storage loads nothing more of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from kdirect.format.datapath import Fetched
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

# Times that are none, in ListOffsets: the largest of the log, the last tiered offset.
MAX_TIMESTAMP = -3
LATEST_TIERED = -5

# What a lookup by time has found in remote storage, or the error that ended it.
Times: TypeAlias = Mapping[tuple[TopicPartition, int], "tuple[int, int] | BaseException"]


class RemoteRead(NamedTuple):
    """In place of the buffers of a `Fetched`: they are to be read from remote storage."""

    partition: Partition
    offset: int
    limit: int


class RemoteAnswers(Protocol):
    """`kdirect.broker.remote_reads.RemoteReads`."""

    async def fill(
        self, topics: Sequence[tuple[str, list[Fetched]]], room: int, max_wait_s: float, /
    ) -> None:
        """Put what the store brings in time in place of each `RemoteRead`."""

    async def find_times(self, wanted: Sequence[tuple[Partition, int]], /) -> Times:
        """What remote storage has of these times (MAX_TIMESTAMP: the largest)."""

    def latest_tiered(self, partition: Partition, /) -> int:
        """The last offset in remote storage, -1: none."""


__all__ = ["LATEST_TIERED", "MAX_TIMESTAMP", "RemoteAnswers", "RemoteRead", "Times"]
