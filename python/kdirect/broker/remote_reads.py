"""Requests about records that are in remote storage only: Fetch and lookups by time.

Law: the event loop starts reads and takes what they bring; the threads of `kdirect.storage` wait
for the store.  A Fetch waits ``remote.fetch.max.wait.ms`` at most, however many of its partitions
are read at once, and however slow the store is.  What comes later is kept in the chunk cache, where
the client's next Fetch finds it.

On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdirect.broker.answers import Answer
from kdirect.broker.failures import explain
from kdirect.broker.remote_locations import Wanted
from kdirect.broker.remote_requests import RemoteRead, RemoteRecords, Times
from kdirect.errors import (
    CorruptObjectError,
    OffsetOutOfRangeError,
    RemoteStorageError,
    TimedOutError,
)
from kdirect.format.datapath import Fetched
from kdirect.format.error_codes import ErrorCode
from kdirect.format.protocol import RequestHeader
from kdirect.log.kernel_transactions import aborted_transactions
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

if TYPE_CHECKING:
    from kdirect.storage.remote_reader import CommittedRead


class RemoteReads:
    """See the module."""

    def __init__(self, remote: RemoteRecords, config: Mapping[str, Any]) -> None:
        self._remote = remote
        self._config = config  # the broker's, which may change

    async def fill(
        self, topics: Sequence[tuple[str, list[Fetched]]], room: int, max_wait_s: float
    ) -> None:
        """Put what the store brings in time in place of each `RemoteRead`, at most `room` bytes in
        all but a batch for each; nothing where it brings nothing in time."""
        places = [
            (name, fetched, i, one.buffers)
            for name, fetched in topics
            for i, one in enumerate(fetched)
            if isinstance(one.buffers, RemoteRead)
        ]
        share = max(1, room // len(places))
        futures: list[asyncio.Future[Any] | None] = []
        for _, _, _, read in places:
            remote = self._remote
            ask: Any = remote.read_committed if read.committed_only else remote.read
            found = ask(read.partition, read.offset, min(share, read.limit))
            futures.append(None if found is None else asyncio.wrap_future(found))
        under_way = [future for future in futures if future is not None]
        wait_s = self._config["remote.fetch.max.wait.ms"] / 1000
        if not under_way:
            wait_s = min(max_wait_s, wait_s)
        if under_way:
            await asyncio.wait(under_way, timeout=wait_s)
        else:  # too many wait already: the client is not to come back at once
            await asyncio.sleep(wait_s)
        for (name, fetched, i, read), future in zip(places, futures, strict=True):
            fetched[i] = self._answer(name, fetched[i], read, future)

    def _answer(
        self, name: str, found: Fetched, read: RemoteRead, future: asyncio.Future[Any] | None
    ) -> Fetched:
        found = found._replace(buffers=(), size=0)
        if future is None:
            return found
        if not future.done():
            future.add_done_callback(_look_at)  # whoever asks again finds it in the cache
            return found
        error = future.exception()
        if error is None:
            buffers = future.result()
            if read.committed_only:
                found = found._replace(aborted=_aborted(read, buffers))
                buffers = buffers.buffers
            return found._replace(buffers=buffers, size=sum(len(b) for b in buffers))
        start = read.partition.log_start_offset
        if read.offset < start:  # it was deleted meanwhile
            return found._replace(error=ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=start)
        gap = self._remote.gap(read.partition, read.offset)
        if isinstance(error, OffsetOutOfRangeError) and gap is not None:
            error = CorruptObjectError(
                f"{name}-{found.partition} lacks offsets {gap[0]} to {gap[1] - 1}: the object that"
                " had them is damaged or gone",
                hint="`kdirect remote verify` names it; restore it and rebuild, or read on from"
                f" offset {gap[1]}",
            )
        elif isinstance(error, OffsetOutOfRangeError):  # it is there, or the log is damaged
            error = RemoteStorageError(
                f"no metadata names a remote segment with offset {read.offset} of"
                f" {name}-{found.partition}",
                hint="compare kdirect remote ls with the objects of the store",
            )
        code = explain(error, f"remote read of {name}-{found.partition}")[0]
        return found._replace(error=code)

    async def find_times(self, wanted: Sequence[tuple[Partition, int]]) -> Times:
        """For each partition and timestamp (MAX_TIMESTAMP: the largest) the first record of remote
        storage with that timestamp or a later one; nothing for those where only the local log can
        have it."""
        futures = {}
        for partition, timestamp in wanted:
            found = self._remote.find_time(partition, timestamp)
            if found is not None:
                futures[partition.topic_partition, timestamp] = asyncio.wrap_future(found)
        if not futures:
            return {}
        lookup_s = self._config["remote.list.offsets.request.timeout.ms"] / 1000
        await asyncio.wait(futures.values(), timeout=lookup_s)
        out: dict[tuple[TopicPartition, int], tuple[int, int] | BaseException] = {}
        for key, future in futures.items():
            if not future.done():
                future.add_done_callback(_look_at)
                out[key] = TimedOutError(
                    f"remote storage did not say in {lookup_s:g} s where {key[0]} has records"
                    f" of time {key[1]}",
                    hint="ask again, or raise remote.list.offsets.request.timeout.ms",
                )
            elif (error := future.exception()) is not None:
                out[key] = error
            elif future.result() is not None:
                out[key] = future.result()
        return out

    def locate(self, header: RequestHeader, wanted: Wanted) -> Answer:
        """See `RemoteLocations.answer`."""
        return self._remote.locate(header, wanted)

    def latest_tiered(self, partition: Partition) -> int:
        """The last offset that is in remote storage, -1 when nothing is (ListOffsets -5)."""
        return max(-1, self._remote.end_offset(partition) - 1)


def _aborted(read: RemoteRead, got: CommittedRead) -> list[tuple[int, int]]:
    """(producer id, first offset) of what was aborted of the records that came: what ended in
    remote storage, as that says, and what ended in segments that are here."""
    local = aborted_transactions(read.partition.kernel, read.offset, got.end_offset)
    by_marker = {entry.last_offset: entry for entry in [*got.aborted, *local]}
    return [(entry.producer_id, entry.first_offset) for _, entry in sorted(by_marker.items())]


def _look_at(future: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more: its error is looked at, or the loop would log it."""
    if not future.cancelled():
        future.exception()


__all__ = ["RemoteReads"]
