"""``__remote_log_metadata`` of a broker that is alone: records in, committed and on disk.

Owns: the topic and what its records say, partition by partition.  What they mean for a log is
`kdirect.storage`'s: it is told of each record once the record is on disk, in the order of the
topic, so that nothing is deleted on a promise that a power failure could take back.

The topic is rewritten when most of it is dead (`metadata_rewriting`), so it grows with what
is in the store and not with the age of the broker.  A record that cannot be read (it comes from a
newer kdirect, say) is left out, and the topic is not rewritten while it is there: nothing of it is
lost.  Each start says once how many there are, and what is wrong with the first.

**A record that was appended and could not be brought to the disk** counts for nothing yet: who
wrote it hears that it failed.  It may be on the disk all the same, and will be found at the next
start; so it is told as soon as a later attempt succeeds, and what it began is cleaned up then.

On the event loop, except `write`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends
from kdirect.broker.flusher import Flusher
from kdirect.broker.metadata_rewriting import MetadataRewriting
from kdirect.broker.scheduler import soon
from kdirect.broker.state_topic import FOR_EVER, Row, StateTopic
from kdirect.broker.topics import REMOTE_METADATA_TOPIC, Registry
from kdirect.errors import FormatError, KdirectError
from kdirect.format.remote_metadata import (
    RemoteSegment,
    SegmentState,
    pack_record,
    parse_record,
    record_key,
)
from kdirect.log.clock import now_ms
from kdirect.log.partition import Partition
from kdirect.storage.remote_logs import PartitionId
from kdirect.storage.segment_states import PartitionMetadata, Record

log = logging.getLogger("kdirect.storage")

SEGMENT_BYTES = 16 << 20
MOST_AT_ONCE = 256  # records with one fsync
RETRY_S = 1.0  # between attempts to bring to the disk what was appended

Done = Callable[[bool], None]


def metadata_partition(record_of: PartitionId, count: int) -> int:
    """The partition of the topic that has the records of a tiered partition."""
    topic_id, partition = record_of
    return zlib.crc32(topic_id.bytes + partition.to_bytes(4, "big")) % count


class RemoteMetadataTable:
    """What the records say; `StateTopic`'s table.  That a partition was deleted, and that a try to
    copy was given up, is remembered for `remember_ms`: as long as an object may still turn up."""

    def __init__(self, remember_ms: int) -> None:
        self.partitions: dict[PartitionId, PartitionMetadata] = {}
        self.deleted: dict[PartitionId, PartitionMetadata] = {}
        self._remember_ms = remember_ms
        self.unreadable = 0
        self.first_fault: FormatError | None = None  # of those
        self.topic_partitions = 1

    def take(self, record: Record) -> None:
        """A record that was appended."""
        key = (record.topic_id, record.partition)
        if key in self.deleted:  # its end may be told twice, say
            self.partitions[key] = self.deleted.pop(key)
        found = self.partitions.setdefault(key, PartitionMetadata())
        found.apply(record)
        if found.is_gone and found.deletion is not None:
            del self.partitions[key]
            self._forget_old()
            self.deleted[key] = found
        elif record.state is SegmentState.DELETE_SEGMENT_FINISHED:
            found.forget_given_up(now_ms() - self._remember_ms)

    def _forget_old(self) -> None:
        oldest = now_ms() - self._remember_ms
        for found in (*self.partitions.values(), *self.deleted.values()):
            found.forget_given_up(oldest)
        for key in [k for k, x in self.deleted.items() if _deleted_ms(x) < oldest]:
            del self.deleted[key]

    def given_up(self, wanted: Callable[[PartitionId], bool]) -> list[RemoteSegment]:
        """The tries that came to nothing, of the partitions that are `wanted`."""
        self._forget_old()
        every = (*self.partitions.items(), *self.deleted.items())
        return [s for key, found in every if wanted(key) for s in found.given_up.values()]

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """See `kdirect.broker.state_topic.Table`; the key is told by the value."""
        if value is None:
            return
        try:
            self.take(parse_record(value))
        except FormatError as e:
            self.unreadable += 1
            self.first_fault = self.first_fault or e

    def records(self, index: int) -> Iterator[Record]:
        """The records of one partition of the topic that count."""
        self._forget_old()
        for some in (self.partitions, self.deleted):
            for key, found in some.items():
                if metadata_partition(key, self.topic_partitions) == index:
                    yield from found.records()

    def live_rows(self, index: int) -> list[Row]:
        """See `kdirect.broker.metadata_rewriting.Live`."""
        return [(record_key(record), pack_record(record)) for record in self.records(index)]

    def live_count(self) -> int:
        """See `kdirect.broker.metadata_rewriting.Live`."""
        if self.unreadable:
            return 1 << 62  # rewriting would lose what could not be read
        every = (*self.partitions.values(), *self.deleted.values())
        return sum(2 * len(x.segments) + 3 * len(x.given_up) + 2 for x in every)

    def forget_partition(self, index: int) -> None:
        count = self.topic_partitions
        for some in (self.partitions, self.deleted):
            for key in [k for k in some if metadata_partition(k, count) == index]:
                del some[key]


def _deleted_ms(found: PartitionMetadata) -> int:
    return 0 if found.deletion is None else found.deletion.event_timestamp_ms


class RemoteMetadata:
    """See the module.  `told(record)` is called for each record that is on disk, on the event
    loop."""

    def __init__(
        self,
        *,
        partitions: int,
        remember_ms: int,
        topics: Registry,
        appends: Appends,
        flusher: Flusher,
        admin: Callable[..., Coroutine[Any, Any, Any]],
    ) -> None:
        self.table = RemoteMetadataTable(remember_ms)
        self.table.topic_partitions = partitions
        self.told: Callable[[Record], None] = lambda record: None
        self._topics = topics
        self._flusher = flusher
        self._state = StateTopic(
            REMOTE_METADATA_TOPIC,
            self.table,
            what="the metadata of remote segments",
            partitions=partitions,
            configs={"segment.bytes": str(SEGMENT_BYTES), **FOR_EVER},
            topics=topics,
            appends=appends,
            admin=admin,
        )
        self._rewriting = MetadataRewriting(self.table, appends)
        self._waiting: deque[tuple[Record, Done]] = deque()
        # Records that were appended, and are not on the disk for all that is known.
        self._untold: dict[Partition, list[Record]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start(self) -> None:
        """Read what is there.  File work, before the broker serves; CorruptLogError."""
        self._loop = asyncio.get_running_loop()
        if not self._state.open():
            return
        count = self.table.topic_partitions = self._state.partition_count
        for index in range(count):
            self._state.load(index)
            self._rewriting.at_start(self._state.partition(index))
        if self.table.unreadable:
            log.error(
                "%d records of %s are left out, and the topic is not rewritten while they are"
                " there; the first: %s",
                self.table.unreadable,
                REMOTE_METADATA_TOPIC,
                self.table.first_fault,
            )

    def make_topic(self) -> None:
        """Create the topic unless it is there, so that a broker with tiered topics has it from the
        first one on, and one that has none has lost it.  File work, on the admin thread or before
        the broker serves; KdirectError."""
        self._state.create()

    def segment_ids(self) -> set[uuid.UUID]:
        """All segments that are there, come or go."""
        return {i for found in self.table.partitions.values() for i in found.segments}

    def copied(self, where: PartitionId) -> list[RemoteSegment]:
        """The segments of a partition whose copies count."""
        found = self.table.partitions.get(where, PartitionMetadata())
        finished = SegmentState.COPY_SEGMENT_FINISHED
        return [segment for segment in found.segments.values() if segment.state is finished]

    def records(self) -> list[Record]:
        """All that counts."""
        found = list(self.table.partitions.values())
        return [record for metadata in found for record in metadata.records()]

    def write(self, record: Record, done: Done, /) -> None:
        """See `kdirect.storage.remote_logs.MetadataLog`.  Any thread."""
        if self._loop is None or self._closed:
            done(False)
        else:
            soon(self._loop, self._enqueue, record, done)

    def _enqueue(self, record: Record, done: Done) -> None:
        self._waiting.append((record, done))
        if self._writer is None:
            self._run(self._write_all())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """One at a time, so that records are told in their order."""
        self._writer = asyncio.ensure_future(work)
        self._writer.add_done_callback(self._write_ended)

    def _write_ended(self, task: asyncio.Task[None]) -> None:
        self._writer = None
        if not task.cancelled() and task.exception() is not None:
            log.error("metadata of remote segments was not written", exc_info=task.exception())
        if self._waiting and not self._closed:
            self._run(self._write_all())

    async def _write_all(self) -> None:
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
            places = await self._append(some)
            flushed = {x: await self._flush(x) for x in dict.fromkeys(places) if x is not None}
            for (record, done), partition in zip(some, places, strict=True):
                on_disk = partition is not None and flushed[partition]
                if on_disk:
                    self.told(record)
                elif partition is not None:
                    self._untold.setdefault(partition, []).append(record)
                done(on_disk)
            for partition in flushed:
                self._rewriting.soon(partition)
            self._retry_soon()

    async def _append(self, some: list[tuple[Record, Done]]) -> list[Partition | None]:
        """Append the records in their order; where each of them is, None: it is nowhere."""
        futures = [self._change(record) for record, _ in some]
        places: list[Partition | None] = []
        for future in futures:
            try:
                places.append(await future)
            except Exception as e:  # whatever it is, who waits is told
                known = isinstance(e, KdirectError)
                log.error("metadata of a remote segment was not written: %s", e, exc_info=not known)
                places.append(None)
        return places

    async def _flush(self, partition: Partition) -> bool:
        """Bring to the disk what was appended, and tell of what was not there before."""
        try:
            await self._flusher.flushed(partition)
        except (KdirectError, OSError) as e:
            log.error("metadata of remote segments is not on disk: %s", e)
            return False
        for record in self._untold.pop(partition, ()):
            self.told(record)
        return True

    def _retry_soon(self) -> None:
        if self._untold and self._retry is None and self._loop is not None and not self._closed:
            self._retry = self._loop.call_later(RETRY_S, self._begin_retry)

    def _begin_retry(self) -> None:
        self._retry = None
        if self._writer is None:
            self._run(self._flush_again())
        else:
            self._retry_soon()  # which flushes as well

    async def _flush_again(self) -> None:
        for partition in list(self._untold):
            await self._flush(partition)
        self._retry_soon()

    def _change(self, record: Record) -> asyncio.Future[Partition | None]:
        """Append one record, then take it."""
        where = (record.topic_id, record.partition)
        row = (record_key(record), pack_record(record))
        return self._state.change(
            partial(metadata_partition, where), [row], partial(self.table.take, record)
        )

    def close(self) -> None:
        """Nothing is written any more.  Any thread."""
        self._closed = True
        if self._loop is not None:
            soon(self._loop, self._stop_writing)

    def _stop_writing(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._writer is not None:
            self._writer.cancel()


__all__ = ["RemoteMetadata", "metadata_partition"]
