"""Tiered storage of a broker that is alone: what joins the rooms `storage` and `log` to it.

Owns: the object store of the broker, its `RemoteLogs` and the metadata topic; the order in which
they start and end; and the deletion of topics, which a crash may interrupt anywhere.

**A topic that is deleted** is marked in ``topics.json`` first, its local files go, then the
metadata says of each of its partitions that everything goes (DELETE_PARTITION_MARKED, on disk), and
only then the broker forgets the topic.  So whatever a crash interrupts, either ``topics.json`` or
the metadata knows of it, and the next start goes on.  That a topic is not there says nothing: a log
directory may be missing.

On the event loop, except where something else is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kdirect.broker.answers import Answer
from kdirect.broker.appends import Appends
from kdirect.broker.config import BrokerConfig
from kdirect.broker.files import FileThreads
from kdirect.broker.flusher import Flusher
from kdirect.broker.rebuilding import go_on_behind
from kdirect.broker.remote_locations import RemoteLocations, Wanted
from kdirect.broker.remote_metadata import RemoteMetadata
from kdirect.broker.remote_reads import RemoteReads
from kdirect.broker.remote_requests import MAX_TIMESTAMP
from kdirect.broker.scheduler import soon
from kdirect.broker.topics import REMOTE_METADATA_TOPIC, Registry, Topic
from kdirect.errors import LogError
from kdirect.format.protocol import RequestHeader
from kdirect.format.remote_metadata import RemotePartitionDelete, RemoteSegment
from kdirect.format.segment_object import parse_key
from kdirect.log.directories import INDEX_CACHE
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.objects.store import ObjectStore
from kdirect.remote_options import BROKER_CREDENTIALS, store_properties
from kdirect.storage.ownership import TAKE_OVER, FileKeeper, Keeper, Ownership
from kdirect.storage.remote_logs import PartitionId, RemoteLogs, RemoteSettings
from kdirect.storage.remote_reader import CommittedRead, RemoteReader
from kdirect.storage.segment_states import Record
from kdirect.storage.sweep import REMEMBER_LEAST_MS

log = logging.getLogger("kdirect.storage")

LEAST_SWEEP_S = 1.0


class RemoteStorage:
    """See the module.  Life: construct, `start` once the logs and topics are open, `serving`,
    `close`."""

    _begins_alone = True  # an incarnation that owns what is in the store

    def __init__(
        self,
        config: BrokerConfig,
        logs: LogManager,
        topics: Registry,
        appends: Appends,
        flusher: Flusher,
        files: FileThreads,
        *,
        address: Callable[[], str],
        scope: str = "",
    ) -> None:
        self._config = config
        self._address = address
        self._scope = scope
        self._logs = logs
        self._topics = topics
        self.store = ObjectStore(
            config["remote.log.storage.uri"], store_properties(config, BROKER_CREDENTIALS)
        )
        self._partitions: int = config["rlmm.config.remote.log.metadata.topic.num.partitions"]
        self._remember_ms = max(2 * config["remote.orphan.age.ms"], REMEMBER_LEAST_MS)
        self.metadata: Any = self._open_metadata(appends, flusher, files)
        self.ownership: Ownership
        self.logs: RemoteLogs
        self.reader: RemoteReader
        self.locations: RemoteLocations
        self._led: set[PartitionId] = set()
        self._marked: set[PartitionId] = set()  # deleted, as is on disk
        self._told_deletion = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop  # of a timer
        self._timer: asyncio.TimerHandle | None = None
        self._ends: list[Callable[[], None]] = []  # of what was started

    def _open_metadata(self, appends: Appends, flusher: Flusher, files: FileThreads) -> Any:
        return RemoteMetadata(
            partitions=self._partitions,
            remember_ms=self._remember_ms,
            topics=self._topics,
            appends=appends,
            flusher=flusher,
            admin=files.admin,
        )

    async def start(self) -> None:
        """Read the metadata, look after the tiered partitions, go on with deletions.  File work,
        before the broker serves.  KdirectError."""
        self._require_metadata()
        self.metadata.start()
        self._ends.append(self.metadata.close)
        topics = self._topics
        if any(topics.log_config(topic).wants_remote for topic in topics):
            self.metadata.make_topic()
        topics.before_tiered = self.metadata.make_topic
        self._start_threads()
        for record in self.metadata.records():
            self.logs.apply(record)
            if isinstance(record, RemotePartitionDelete):
                self._marked.add((record.topic_id, record.partition))
        self.reader.retain(self.metadata.segment_ids())
        for partition in list(self._logs.partitions.values()):
            if partition.is_tiered:
                where = (partition.topic_id, partition.topic_partition.partition)
                copied = self.metadata.copied(where)
                go_on_behind(partition, self.store, self._logs.cluster_id, copied)
        self.metadata.told = self._told
        self._logs.on_changed = self.partition_changed
        for partition in list(self._logs.partitions.values()):
            self.partition_changed(partition)
        self.logs.resume_deletions()
        for topic in list(self._topics.unforgotten):
            await self.topic_deleted(topic)
            self._topics.forget_deleted(topic)
        self._topics.outlives_its_log = self._has_metadata
        self._sweep_later()

    def serving(self) -> None:
        """Clients can reach the broker: what it has in the store is its own, unless somebody else
        says so."""
        self.ownership.serve()
        if self._topics.get(REMOTE_METADATA_TOPIC) is not None:
            self.logs.own_soon()

    def _keeper(self) -> Keeper:
        return FileKeeper(self._logs.log_dirs)

    def _start_threads(self) -> None:
        config = self._config
        settings = RemoteSettings(
            cluster_id=self._logs.cluster_id,
            broker_id=config["node.id"],
            copiers=config["remote.log.manager.copier.thread.pool.size"],
            expirers=config["remote.log.manager.expiration.thread.pool.size"],
            interval_s=config["remote.log.manager.task.interval.ms"] / 1000,
            copy_timeout_s=config["remote.log.copy.timeout.ms"] / 1000,
            copy_rate=config["remote.log.manager.copy.max.bytes.per.second"],
        )
        self.ownership = Ownership(
            self.store,
            self._logs.cluster_id,
            self._keeper(),
            address=self._address,
            scope=self._scope,
            replaces=config[TAKE_OVER] or "",
            begins=self._begins_alone,
        )
        self.logs = RemoteLogs(
            self.store,
            self.metadata,
            settings,
            ownership=self.ownership,
            partition_count=self._partition_count,
            deleted=lambda segment: self.reader.forget(segment),
            moved=self._log_start_moved,
        )
        self._ends.append(self.logs.close)
        self.reader = RemoteReader(
            self.store,
            cluster_id=self._logs.cluster_id,
            index_directory=self._logs.log_dirs[0] / INDEX_CACHE,
            index_bytes=config["remote.log.index.file.cache.total.size.bytes"],
            chunk_bytes=config["remote.log.chunk.cache.bytes"],
            threads=config["remote.log.reader.threads"],
            max_pending=config["remote.log.reader.max.pending.tasks"],
            bytes_per_second=config["remote.log.manager.fetch.max.bytes.per.second"],
        )
        self.locations = RemoteLocations(
            self.logs,
            self.store,
            cluster_id=self._logs.cluster_id,
            expiry_s=config["remote.log.presign.expiry.ms"] // 1000,
        )
        self._ends.append(self.reader.close)
        self._ends.append(self.locations.close)
        config.on_change.append(self._reconfigure)

    def _reconfigure(self) -> None:
        """Properties were changed while the broker runs."""
        config = self._config
        self.logs.reconfigure(
            copiers=config["remote.log.manager.copier.thread.pool.size"],
            expirers=config["remote.log.manager.expiration.thread.pool.size"],
            copy_rate=config["remote.log.manager.copy.max.bytes.per.second"],
        )
        self.reader.reconfigure(
            threads=config["remote.log.reader.threads"],
            bytes_per_second=config["remote.log.manager.fetch.max.bytes.per.second"],
            index_bytes=config["remote.log.index.file.cache.total.size.bytes"],
        )

    def _require_metadata(self) -> None:
        """Refuse to start where the metadata was lost: everything in the store would look like
        something that nobody owns, and be deleted.  KdirectError."""
        topics = self._topics
        has_some = topics.get(REMOTE_METADATA_TOPIC) is not None
        if has_some and REMOTE_METADATA_TOPIC not in topics.remade:
            return
        if not any(topics.log_config(topic).wants_remote for topic in topics):
            return
        # The store has to answer here.  What is lost is told by nothing else.
        listed = self.store.list(f"{self._logs.cluster_id}/")
        if any(parse_key("", info.key) for info in listed):
            raise LogError(
                f"{self.store.uri} has objects of this cluster, and {REMOTE_METADATA_TOPIC}, which"
                " tells of them, is not in the log directories, or only a part of it",
                hint="restore the log directory that had it; if it is lost, move all of them away"
                " and make them again with `kdirect remote rebuild`",
            )

    def _log_start_moved(self, partition: Partition) -> None:
        """Any thread."""

    def partition_changed(self, partition: Partition) -> None:
        """A partition is new, or has another configuration.  Any thread."""
        tp = partition.topic_partition
        where = (partition.topic_id, tp.partition)
        if where in self._led:
            self.logs.wake(*where)
        elif partition.is_tiered or self.logs.has_metadata(*where):
            self._led.add(where)
            self.logs.lead(partition)

    def _partition_count(self, name: str) -> int:
        topic = self._topics.get(name)
        return 1 if topic is None else topic.partition_count

    def _has_metadata(self, topic: Topic) -> bool:
        partitions = range(topic.partition_count)
        return any(self.logs.has_metadata(topic.topic_id, i) for i in partitions)

    # -- topics that are deleted -------------------------------------------------------------------

    async def topic_deleted(self, topic: Topic) -> None:
        """Its local files are gone: return when the metadata says that everything goes.  It waits
        as long as that takes; a crash meanwhile is gone on with at the next start."""
        doomed = set()
        for index in range(topic.partition_count):
            self._led.discard((topic.topic_id, index))
            if self.logs.delete(topic.name, topic.topic_id, index):
                doomed.add((topic.topic_id, index))
        while not doomed <= self._marked:
            self._told_deletion.clear()
            await self._told_deletion.wait()
        self._marked -= doomed

    def _told(self, record: Record) -> None:
        """A record of the metadata is on disk."""
        self.logs.apply(record)
        if isinstance(record, RemotePartitionDelete):
            self._marked.add((record.topic_id, record.partition))
            self._told_deletion.set()

    # -- reading -----------------------------------------------------------------------------------

    def reads(self) -> RemoteReads:
        """What answers the handlers of Fetch and ListOffsets."""
        return RemoteReads(self, self._config)

    def read(
        self, partition: Partition, offset: int, max_bytes: int
    ) -> Future[list[memoryview]] | None:
        """Whole batches from the one that holds `offset` on, at most `max_bytes`, but at least one.
        None: too many reads wait."""
        return self.reader.read(
            self._finder(partition), offset, max_bytes, dense_from=partition.dense_from
        )

    def read_committed(
        self, partition: Partition, offset: int, max_bytes: int
    ) -> Future[CommittedRead] | None:
        """As `read`, with the aborted transactions that end below the local log start of now."""
        return self.reader.read_committed(
            self._finder(partition),
            offset,
            max_bytes,
            stable=partition.last_stable_offset,
            local_start=partition.local_log_start_offset,
            dense_from=partition.dense_from,
        )

    def find_time(self, partition: Partition, timestamp: int) -> Future[Any] | None:
        """(offset, timestamp) of the first remote record of that time or later, MAX_TIMESTAMP: of
        the largest.  None: only the local log can have it, or too many reads wait."""
        start, local_start = partition.log_start_offset, partition.local_log_start_offset
        if not partition.is_tiered or start >= local_start:
            return None
        where = (partition.topic_id, partition.topic_partition.partition)
        newest = self.logs.newest_timestamp(*where, start, local_start)
        if timestamp == MAX_TIMESTAMP:
            if newest <= max(s.max_timestamp for s in partition.segments):
                return None
            timestamp = newest
        if newest < timestamp:
            return None
        return self.reader.find_time(
            self._finder(partition), timestamp, start, dense_from=partition.dense_from
        )

    def gap(self, partition: Partition, offset: int) -> tuple[int, int] | None:
        """See `RemoteLogs.gap`."""
        return self.logs.gap(partition.topic_id, partition.topic_partition.partition, offset)

    def locate(self, header: RequestHeader, wanted: Wanted) -> Answer:
        """See `RemoteLocations.answer`."""
        return self.locations.answer(header, wanted)

    def _finder(self, partition: Partition) -> Callable[[int], RemoteSegment | None]:
        where = (partition.topic_id, partition.topic_partition.partition)

        def find(offset: int) -> RemoteSegment | None:
            """The next segment that holds `offset` or later ones."""
            return self.logs.find(*where, offset)

        return find

    # -- orphans -----------------------------------------------------------------------------------

    def _sweep_later(self) -> None:
        age_s = self._config["remote.orphan.age.ms"] / 1000
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(max(age_s / 2, LEAST_SWEEP_S), self._sweep)

    def _sweep(self) -> None:
        """Have a thread delete what nobody owns."""
        given_up = self.metadata.table.given_up(lambda where: True)
        if given_up:
            self.logs.sweep(given_up)
        self._sweep_later()

    # -- looking -----------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """By the names of `kdirect.metrics`.  Any thread."""
        counters, figures = self.logs.counters, list(self.logs.figures().values())
        return {
            "remote_copy_requests": counters.copy_requests,
            "remote_copy_bytes": counters.copy_bytes,
            "remote_copy_errors": counters.copy_errors,
            "remote_copies_given_up": counters.copies_given_up,
            "remote_delete_requests": counters.delete_requests,
            "remote_delete_errors": counters.delete_errors,
            "remote_adopted": counters.adopted,
            "remote_orphans": counters.orphans,
            "remote_not_owner": int(self.ownership.is_lost),
            "remote_copy_lag_bytes": sum(f.copy_lag_bytes for f in figures),
            "remote_copy_lag_segments": sum(f.copy_lag_segments for f in figures),
            "remote_delete_lag_bytes": sum(f.delete_lag_bytes for f in figures),
            "remote_delete_lag_segments": sum(f.delete_lag_segments for f in figures),
            "remote_metadata_count": sum(f.metadata_count for f in figures),
            "remote_bytes": sum(f.remote_bytes for f in figures),
            **self.reader.statistics(),
        }

    def end_offset(self, partition: Partition) -> int:
        """The offset after the last tiered one; -1 when nothing is tiered.  Any thread."""
        return self.logs.end_offset(partition.topic_id, partition.topic_partition.partition)

    def close(self) -> None:
        """End its threads, as many as were started; any thread."""
        if self._timer is not None:
            soon(self._loop, self._timer.cancel)
        for end in self._ends:
            end()


__all__ = ["RemoteStorage"]
