"""Tiered storage of a broker in a cluster: `RemoteStorage` where partitions have replicas.

- **The leader** of a tiered partition copies, adopts and deletes.  A leadership begins with
  the metadata that was read so far, and decides once it has read the record of its own leader epoch
  (`kdirect.storage.remote_log`).
- **A follower** knows by the metadata how far its own log is copied, and lets local retention take
  that; when its leader keeps only what comes later, it begins there (`state_behind`).
- **The metadata** is written to the leaders of ``__remote_log_metadata`` (`metadata_writer`), and
  read from them (`metadata_reader`); what counts is what was read.
- **A topic that is deleted** is marked in the metadata (DELETE_PARTITION_MARKED), committed, before
  the controller is asked to delete it.  The mark means nothing as long as the cluster has the
  topic.  Once it has not, the leader of the partition of the metadata topic deletes the objects;
  if it dies, the next one goes on.  So a crash loses no deletion, and a topic that is missing
  without a mark loses nothing.
- **Orphans** are swept by the same leader: it knows all that the metadata says of them.

On the event loop, except where something else is said.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends
from kdirect.broker.files import FileThreads
from kdirect.broker.flusher import Flusher
from kdirect.broker.metadata_appends import MetadataAppends
from kdirect.broker.metadata_calls import MetadataCalls
from kdirect.broker.metadata_reader import MetadataReader
from kdirect.broker.metadata_rewriting import REWRITE_FACTOR, REWRITE_RECORDS
from kdirect.broker.metadata_writer import MetadataWriter
from kdirect.broker.remote_metadata import (
    SEGMENT_BYTES,
    RemoteMetadataTable,
    metadata_partition,
)
from kdirect.broker.remote_storage import RemoteStorage
from kdirect.broker.scheduler import soon
from kdirect.broker.state_topic import FOR_EVER
from kdirect.broker.topics import REMOTE_METADATA_TOPIC, Topic
from kdirect.cluster import paths
from kdirect.errors import ClosedError, KdirectError, OffsetNotAvailableError, TimedOutError
from kdirect.format.remote_metadata import (
    PartitionDeleteState,
    RemotePartitionDelete,
    RemoteSegment,
    RemoteSegmentUpdate,
    SegmentState,
)
from kdirect.log.clock import now_ms
from kdirect.log.partition import Partition
from kdirect.log.producer_state import unpack_snapshot
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition
from kdirect.storage.followed_tiers import ends_at, producers_after, tiered_end
from kdirect.storage.local_facts import local_log
from kdirect.storage.ownership import Keeper
from kdirect.storage.remote_logs import PartitionId
from kdirect.storage.segment_states import Record

log = logging.getLogger("kdirect.storage")

LEVEL_S = 3.0  # how long a follower waits for metadata before it is asked again
FOLLOW_S = 0.2  # until followers count what has come
KEEPER_S = 60.0  # longer than the metadata store is waited for


class MemberRemoteStorage(RemoteStorage):
    """See the module.  Life: construct, `bind`, `start`, `joined` once the broker is registered,
    `leave` before connections end, `close`."""

    _begins_alone = False

    def _open_metadata(self, appends: Appends, flusher: Flusher, files: FileThreads) -> Any:
        self._files = files
        self._leading: dict[PartitionId, Partition] = {}  # all that this broker leads
        self._doomed: set[PartitionId] = set()  # whose objects this broker deletes
        self._following: asyncio.TimerHandle | None = None
        self._rewriting: set[int] = set()
        self._rewritten_at: dict[int, int] = {}  # log ends, from which on it is looked at next
        self._background: set[asyncio.Task[Any]] = set()
        self._level_waits: list[tuple[int, asyncio.Future[None]]] = []
        self._left = False
        return None

    def bind(
        self, membership: Any, replicas: Any, calls: MetadataCalls, appends: MetadataAppends
    ) -> None:
        """What a member has; before it joins."""
        self._membership, self._replicas = membership, replicas
        self._calls, self._appends = calls, appends
        replicas.on_lead.append(self._lead)
        replicas.on_resign.append(self._resign)
        replicas.state_behind = self.state_behind

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.table = RemoteMetadataTable(self._remember_ms)
        self.metadata = self._writer = MetadataWriter(
            self._membership, self._calls.call, self._create_topic
        )
        self._ends.append(self._writer.close)
        self._read = MetadataReader(
            self._membership,
            self._calls.call,
            on_thread=self._files.read,
            told=self._heard,
            forget=self._forget,
            level=self._is_level,
        )
        self._start_threads()

    def _keeper(self) -> Keeper:
        return _ClusterKeeper(self._membership, self._loop, super()._keeper())

    def joined(self) -> None:
        """The broker is registered and knows the cluster."""
        self.ownership.serve()
        self._membership.subscribe(self._changed)
        self._logs.on_changed = lambda partition: soon(
            self._loop, self.partition_changed, partition
        )
        for partition in list(self._logs.partitions.values()):
            self.partition_changed(partition)
        self._changed(None, self._membership.metadata)
        self._sweep_later()
        self._tick()

    async def _create_topic(self) -> None:
        configs = {"segment.bytes": str(SEGMENT_BYTES), **FOR_EVER}
        factor = self._config["rlmm.config.remote.log.metadata.topic.replication.factor"]
        topics: Any = self._topics
        await topics.create_everywhere(REMOTE_METADATA_TOPIC, self._partitions, factor, configs)

    # -- what is to be read ------------------------------------------------------------------------

    def _changed(self, before: Metadata | None, after: Metadata) -> None:
        """A newer picture of the cluster."""
        count = self._writer.partition_count
        if count:
            self.table.topic_partitions = count
        if before is not None and before.image.topics is not after.image.topics:
            self._mark_those_seen(before, after)
        self._want()
        self._read.look()
        self._look_for_deletions()

    def _want(self) -> None:
        """Read what concerns the replicas here, and what is led here of the metadata topic."""
        count = self._writer.partition_count
        if not count:
            return
        for partition in list(self._logs.partitions.values()):
            tp = partition.topic_partition
            if tp.topic == REMOTE_METADATA_TOPIC:
                if not partition.is_copy:
                    self._read.want(tp.partition)
            elif _may_be_tiered(partition):
                self._read.want(self._index(_id(partition)))

    def _index(self, key: PartitionId) -> int:
        return metadata_partition(key, self.table.topic_partitions)

    def _owns(self, index: int) -> bool:
        """Does this broker lead a partition of the metadata topic, and know all of it?"""
        try:
            partition = self._replicas.leader(TopicPartition(REMOTE_METADATA_TOPIC, index))
        except KdirectError:
            return False
        position = self._read.position(index)
        return position.is_level and position.offset >= int(partition.high_watermark)

    # -- what was read -----------------------------------------------------------------------------

    def _heard(self, index: int, record: Record | None) -> None:
        """The next record of a partition of the topic."""
        if record is None:
            self.table.unreadable += 1
            return
        self.table.take(record)
        key = (record.topic_id, record.partition)
        if isinstance(record, RemotePartitionDelete):
            if key in self._doomed:
                self.logs.tell(record)
                if key in self.table.deleted:
                    self._doomed.discard(key)
            return
        if key not in self._led and key in self._leading:
            self._begin(self._leading[key])  # it has metadata: all of it goes, say
        else:
            self.logs.tell(record)
        if isinstance(record, RemoteSegmentUpdate):
            if record.state is SegmentState.COPY_SEGMENT_FINISHED:
                self._follow_soon()

    def _forget(self, index: int) -> None:
        """A partition of the topic is read again from its beginning."""
        self.table.forget_partition(index)
        for key in [k for k in self._doomed if self._index(k) == index]:
            self._doomed.discard(key)
            self.logs.end(key)
        for key in [k for k in self._led if self._index(k) == index]:
            self._begin(self._leading[key])

    def _is_level(self, index: int) -> None:
        waits, self._level_waits = self._level_waits, []
        for of, future in waits:
            if of == index:
                future.set_result(None)
            else:
                self._level_waits.append((of, future))
        self._look_for_deletions()
        self._rewrite_soon(index)

    # -- leaderships -------------------------------------------------------------------------------

    def _lead(self, tp: TopicPartition, partition: Partition, epoch: int) -> None:
        if tp.topic == REMOTE_METADATA_TOPIC:
            self._read.want(tp.partition)
            if tp.partition == 0:
                self.ownership.begin()
                self.logs.own_soon()
            return
        self._leading[_id(partition)] = partition
        self.partition_changed(partition)

    def _resign(self, tp: TopicPartition, partition: Partition) -> None:
        key = _id(partition)
        self._leading.pop(key, None)
        if key in self._led:
            self._led.discard(key)
            self.logs.end(key)
        self._follow_soon()

    def partition_changed(self, partition: Partition) -> None:
        """A partition is new, is led, or has another configuration."""
        key = _id(partition)
        if not _may_be_tiered(partition):
            return
        self._want()
        if key in self._led:
            self.logs.wake(*key)
        elif key in self._leading and (partition.is_tiered or key in self.table.partitions):
            self._begin(partition)

    def _log_start_moved(self, partition: Partition) -> None:
        soon(self._loop, self._replicas.start_moved, partition.topic_partition)

    def _begin(self, partition: Partition) -> None:
        key = _id(partition)
        self._led.add(key)
        partition.note_tiered(0)  # until this leadership has counted
        known = self.table.partitions.get(key)
        records = () if known is None else known.records()
        # A topic that is there is not deleted, whatever was asked for once.
        self.logs.begin(partition, [r for r in records if not isinstance(r, RemotePartitionDelete)])

    # -- followers ---------------------------------------------------------------------------------

    def _follow_soon(self) -> None:
        if self._following is None and not self._left:
            self._following = self._loop.call_later(FOLLOW_S, self._follow)

    def _follow(self) -> None:
        self._following = None
        wanted = []
        for partition in list(self._logs.partitions.values()):
            known = self.table.partitions.get(_id(partition))
            if partition.is_copy and partition.is_tiered and known is not None:
                wanted.append((partition, list(known.segments.values())))
        if wanted:
            self._spawn(self._files.upkeep(_note_tiered, wanted))

    async def state_behind(
        self, partition: Partition, leader: int, epoch: int, offset: int
    ) -> dict[str, Any]:
        """For a follower whose leader keeps nothing below `offset`: what `Partition.start_over` is
        to know.  KdirectError: it cannot be known yet."""
        if not partition.is_tiered or offset == 0:
            return {}
        tp, calls = partition.topic_partition, self._calls
        start = await calls.log_start(leader, tp, epoch)
        if start >= offset:
            return {"log_start": offset}
        epochs = await calls.leader_epochs(leader, tp, epoch, start, offset)
        key = _id(partition)
        self._want()
        await self._until_level(self._index(key))
        known = self.table.partitions.get(key)
        segments = [] if known is None else list(known.segments.values())
        segment = ends_at(segments, start, offset, epochs)
        state: dict[str, Any] = {"log_start": start, "epochs": epochs}
        if segment is not None:
            get = partial(producers_after, self.store, segment, self._logs.cluster_id)
            state["producers"] = unpack_snapshot(await self._files.read(get))
            log.info("%s begins after object %s", tp, segment.segment_id)
            return state
        if not self._read.position(self._index(key)).is_level:
            raise OffsetNotAvailableError(
                f"the metadata of what is tiered of {tp} up to offset {offset} is not read yet"
            )
        log.warning(
            "no remote segment of %s ends at offset %d: its producers are not known here, and what"
            " they send again may be appended twice if this broker leads soon",
            tp,
            offset,
        )
        return state

    async def _until_level(self, index: int) -> None:
        """Wait a while until all of a partition of the topic was read."""
        if not self._read.position(index).is_level:
            waits: asyncio.Future[None] = self._loop.create_future()
            self._level_waits.append((index, waits))
            await asyncio.wait((waits,), timeout=LEVEL_S)

    # -- topics that are deleted -------------------------------------------------------------------

    async def mark_deleted(self, topic: Topic) -> None:
        """Return when the metadata says that the topic is to be deleted.  TimedOutError."""
        if not any(name.startswith("remote.") for name in topic.configs):
            return
        outcomes = await asyncio.gather(
            *(self._mark((topic.topic_id, i), topic.name) for i in range(topic.partition_count))
        )
        if not all(outcomes):
            raise TimedOutError(
                f"the metadata of remote storage does not take that {topic.name} is deleted",
                hint=f"see whether {REMOTE_METADATA_TOPIC} has leaders and enough replicas in sync,"
                " and delete the topic again",
            )

    async def _mark(self, key: PartitionId, name: str) -> bool:
        written: asyncio.Future[bool] = self._loop.create_future()

        def done(outcome: bool) -> None:
            if not written.done():
                written.set_result(outcome)

        record = RemotePartitionDelete(
            topic=name,
            topic_id=key[0],
            partition=key[1],
            state=PartitionDeleteState.DELETE_PARTITION_MARKED,
            event_timestamp_ms=now_ms(),
            broker_id=self._config["node.id"],
        )
        self._writer.write(record, done)
        return await written

    def _mark_those_seen(self, before: Metadata, after: Metadata) -> None:
        """Topics that other tools have deleted by ZooKeeper, and not by this broker's kind."""
        for name, topic in before.image.topics.items():
            now = after.image.topics.get(name)
            topic_id = topic.record.topic_id
            if now is topic or topic_id is None:
                continue
            same = now is not None and now.record.topic_id == topic_id
            seen = (now.deleting if same and now is not None else topic.deleting) or (
                not same and before.readings == after.readings
            )
            for key in [k for k in self.table.partitions if seen and k[0] == topic_id]:
                if self.table.partitions[key].deletion is None and self._owns(self._index(key)):
                    self._spawn(self._mark(key, name))

    def _look_for_deletions(self) -> None:
        """Go on with those whose metadata is led here, and leave the others."""
        metadata: Metadata = self._membership.metadata
        for key in [k for k in self._doomed if not self._leads_metadata(self._index(k))]:
            self._doomed.discard(key)
            self.logs.end(key)
        if metadata.generation < 0:
            return
        for key, found in list(self.table.partitions.items()):
            if found.deletion is None or key in self._doomed or not self._owns(self._index(key)):
                continue
            if _is_gone(metadata, key[0], found.deletion.topic):
                self._doomed.add(key)
                self._led.discard(key)  # its replica here is not gone yet, perhaps
                self._leading.pop(key, None)
                self.logs.begin_deletion(key, found)

    def _leads_metadata(self, index: int) -> bool:
        tp = TopicPartition(REMOTE_METADATA_TOPIC, index)
        return bool(self._membership.metadata.leader_of(tp) == self._config["node.id"])

    # -- reading -----------------------------------------------------------------------------------

    def read(
        self, partition: Partition, offset: int, max_bytes: int
    ) -> Future[list[memoryview]] | None:
        if not self.logs.is_ready(*_id(partition)):
            found = self.logs.find(*_id(partition), offset)
            if found is None or found.base_offset > offset:
                return None  # as where too many reads wait: the client asks again
        return super().read(partition, offset, max_bytes)

    def find_time(self, partition: Partition, timestamp: int) -> Future[Any] | None:
        cold = partition.log_start_offset < partition.local_log_start_offset
        if partition.is_tiered and cold and not self.logs.is_ready(*_id(partition)):
            failed: Future[Any] = Future()
            failed.set_exception(
                OffsetNotAvailableError(
                    f"the new leader of {partition.topic_partition} does not know yet what is in"
                    " remote storage"
                )
            )
            return failed
        return super().find_time(partition, timestamp)

    # -- orphans, rewriting ------------------------------------------------------------------------

    def _sweep(self) -> None:
        self._sweep_later()
        table, count = self.table, self._writer.partition_count
        owned = {index for index in range(count) if self._owns(index)}
        if not owned:
            return
        given_up = table.given_up(lambda key: metadata_partition(key, count) in owned)
        if given_up:
            self.logs.sweep(given_up)

    def _rewrite_soon(self, index: int) -> None:
        """Rewrite a partition of the topic if most of it is dead."""
        tp = TopicPartition(REMOTE_METADATA_TOPIC, index)
        if index in self._rewriting or not self._owns(index):
            return
        partition = self._replicas.leader(tp)
        start, end = int(partition.log_start_offset), int(partition.log_end_offset)
        wanted = max(self._rewritten_at.get(index, 0), start + REWRITE_RECORDS)
        if end < wanted or self.table.unreadable:
            return
        live = sum(1 for _ in self.table.records(index))  # which is looked at seldom
        self._rewritten_at[index] = end + REWRITE_RECORDS // 10
        if end - start >= REWRITE_RECORDS + REWRITE_FACTOR * live:
            self._rewriting.add(index)
            self._spawn(self._rewrite(index, partition))

    async def _rewrite(self, index: int, partition: Partition) -> None:
        try:
            async with self._appends.hold(index):
                position = self._read.position(index)
                if not self._owns(index) or position.offset != partition.log_end_offset:
                    return  # something is on its way: the next time
                await self._appends.rewrite(partition, list(self.table.records(index)))
        except KdirectError as e:
            log.warning("%s could not be rewritten: %s", partition.topic_partition, e)
        finally:
            self._rewriting.discard(index)

    # -- time, end ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._left:
            self._follow_soon()
            self._look_for_deletions()
            for index in range(self._writer.partition_count):
                self._rewrite_soon(index)  # if something was on its way the last time
            self._loop.call_later(self.logs.settings.interval_s, self._tick)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("work of remote storage failed", exc_info=task.exception())

    def leave(self) -> None:
        """The broker stops: ask others no more."""
        self._left = True
        for timer in (self._following, self._timer):
            if timer is not None:
                timer.cancel()
        self._read.close()
        self._writer.close()
        for task in self._background:
            task.cancel()


class _ClusterKeeper:
    """In the metadata store.  What was read is remembered, so that it need not answer each time.
    Where it has nothing yet, what a broker that was alone kept in its log directories counts: it
    has brought its topics along."""

    def __init__(self, membership: Any, loop: asyncio.AbstractEventLoop, alone: Keeper) -> None:
        self._membership, self._loop, self._alone = membership, loop, alone
        self._known: list[str] = []

    def knows(self, incarnation: str) -> bool:
        if incarnation not in self._known:
            self._known = self._ask(self._membership.remote_owners)
        if not self._known:
            return self._alone.knows(incarnation)
        return incarnation in self._known

    def remember(self, incarnations: Sequence[str]) -> None:
        self._known = self._ask(partial(self._membership.add_remote_owners, incarnations))

    def _ask(self, ask: Callable[[], asyncio.Future[list[str]]]) -> list[str]:
        async def answer() -> list[str]:
            return await ask()

        future = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        try:
            return future.result(KEEPER_S)
        except FutureTimeoutError:
            raise TimedOutError("this broker's event loop did not answer") from None
        except CancelledError:
            raise ClosedError("the broker is stopping") from None


def _id(partition: Partition) -> PartitionId:
    return partition.topic_id, partition.topic_partition.partition


def _may_be_tiered(partition: Partition) -> bool:
    """Is it, or was it?"""
    names: Iterable[str] = partition.config.overrides or {}
    return partition.is_tiered or any(name.startswith("remote.") for name in names)


def _note_tiered(wanted: list[tuple[Partition, list[RemoteSegment]]]) -> None:
    """On a thread."""
    for partition, segments in wanted:
        try:
            end = tiered_end(segments, local_log(partition))
        except KdirectError:
            continue  # it is closed
        if partition.is_copy:
            partition.note_tiered(end)


def _is_gone(metadata: Metadata, topic_id: uuid.UUID, name: str) -> bool:
    """Has the cluster the topic no more?  One whose node is damaged, or says no id, may be it."""
    if metadata.topic_by_id(topic_id) is not None or paths.topic(name) in metadata.image.damaged:
        return False
    there = metadata.topic(name)
    return there is None or there.record.topic_id is not None


__all__ = ["MemberRemoteStorage"]
