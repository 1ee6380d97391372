"""What the handlers of Fetch and ListOffsets say of remote storage, and what answers them.  Values
and interfaces: a broker without tiered storage loads nothing more of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from kdirect.broker.answers import Answer
from kdirect.format.datapath import Fetched
from kdirect.format.protocol import RequestHeader
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

if TYPE_CHECKING:
    from kdirect.storage.remote_reader import CommittedRead

# Times that are none, in ListOffsets: the largest of the log, the last tiered offset.
MAX_TIMESTAMP = -3
LATEST_TIERED = -5

# What a lookup by time has found in remote storage, or the error that ended it.
Times: TypeAlias = Mapping[tuple[TopicPartition, int], "tuple[int, int] | BaseException"]


class RemoteRead(NamedTuple):
    """In place of the buffers of a `Fetched`: they are to be read from remote storage, with
    `committed_only` together with what was aborted of them."""

    partition: Partition
    offset: int
    limit: int
    committed_only: bool = False


class RemoteRecords(Protocol):
    """What is in remote storage, for `RemoteReads`; `kdirect.broker.remote_storage`.  None in place
    of a future: too many reads wait.  Any thread."""

    def read(
        self, partition: Partition, offset: int, max_bytes: int, /
    ) -> Future[list[memoryview]] | None:
        """Whole batches from the one that holds `offset` on, at most `max_bytes`, but at least
        one."""

    def read_committed(
        self, partition: Partition, offset: int, max_bytes: int, /
    ) -> Future[CommittedRead] | None:
        """As `read`, with the aborted transactions that end below the local log start of now."""

    def find_time(self, partition: Partition, timestamp: int, /) -> Future[Any] | None:
        """(offset, timestamp) of the first remote record of that time or later, MAX_TIMESTAMP: of
        the largest.  None also where only the local log can have it."""

    def gap(self, partition: Partition, offset: int, /) -> tuple[int, int] | None:
        """The offsets around `offset` that are lost, between remote segments that are there."""

    def end_offset(self, partition: Partition, /) -> int:
        """The offset after the last one in remote storage, -1: there is none."""

    def locate(self, header: RequestHeader, wanted: Sequence[Any], /) -> Answer:
        """The response to a LocateRecords.  On the event loop."""


class RemoteAnswers(Protocol):
    """`kdirect.broker.remote_reads.RemoteReads`."""

    async def fill(
        self, topics: Sequence[tuple[str, list[Fetched]]], room: int, max_wait_s: float, /
    ) -> None:
        """Put what the store brings in time in place of each `RemoteRead`."""

    async def find_times(self, wanted: Sequence[tuple[Partition, int]], /) -> Times:
        """What remote storage has of these times (MAX_TIMESTAMP: the largest)."""

    def locate(
        self, header: RequestHeader, wanted: Sequence[tuple[Any, Partition | Exception]], /
    ) -> Answer:
        """The response to a LocateRecords."""

    def latest_tiered(self, partition: Partition, /) -> int:
        """The last offset in remote storage, -1: none."""


__all__ = ["LATEST_TIERED", "MAX_TIMESTAMP", "RemoteAnswers", "RemoteRead", "Times"]
