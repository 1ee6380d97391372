"""Log directories made of what an object store knows: a broker that has lost everything, or one of
its directories (`go_on_behind`, at the start of a broker).

`rebuild` runs while no broker does.  The directories have to be empty; when it ends, they hold the
topics of the store, with their ids and properties, whose logs begin after what is tiered, the
metadata of every remote segment, and the identity of the cluster.  A broker that starts on them
serves every tiered record and appends behind the last.

What no object says is lost: records that were not copied, log starts within a segment
(DeleteRecords), consumer groups, and topics of which nothing was ever copied.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable

from kdirect.broker.cluster_view import ClusterView
from kdirect.broker.config import BrokerConfig
from kdirect.broker.remote_metadata import SEGMENT_BYTES, metadata_partition
from kdirect.broker.topics import REMOTE_METADATA_TOPIC, Registry
from kdirect.errors import ConfigError, LogError
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import error_kind
from kdirect.format.remote_metadata import RemoteSegment, pack_record, record_key
from kdirect.log.clock import now_ms
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.producer_state import unpack_snapshot
from kdirect.model import TopicPartition
from kdirect.objects.store import ObjectStore
from kdirect.storage.ownership import FileKeeper, take_by_force
from kdirect.storage.rebuild import RebuiltPartition, RebuiltTopic, read_objects, read_partition
from kdirect.storage.segment_states import PartitionMetadata
from kdirect.wire.environment import SYSTEM

log = logging.getLogger("kdirect.storage")

APPEND_BYTES = 256 << 10
REBUILDING = "kdirect remote rebuild"  # the owner's address meanwhile
# What a topic gets whose own properties this broker does not take: nothing of it may be deleted.
_FOR_EVER = {"remote.storage.enable": "true", "retention.ms": "-1", "retention.bytes": "-1"}

Report = Callable[[str], None]


def rebuild(
    config: BrokerConfig, cluster_id: str, store: ObjectStore, report: Report
) -> tuple[list[RebuiltTopic], int]:
    """Make the log directories; the topics, and how many records the cluster has again.  `report`
    is told what was left out or changed.  Whoever had the objects before has them no longer, be it
    running still.  ConfigError where the directories are not empty; errors of the store."""
    logs = LogManager(
        config["log.dirs"],
        LogConfig.from_broker(config),
        node_id=config["node.id"],
        cluster_id=cluster_id,
    )
    with logs:
        if logs.partitions:
            raise ConfigError(
                f"{', '.join(map(str, logs.log_dirs))} hold {len(logs.partitions)} partitions",
                hint="rebuild into empty ones; what is there may be newer than the store",
            )
        incarnations = take_by_force(store, cluster_id, REBUILDING)
        topics = read_objects(store, cluster_id, report)
        view = ClusterView(
            config["node.id"],
            cluster_id=lambda: logs.cluster_id,
            local_epoch=lambda tp: None,
            layout=None,
        )
        registry = Registry(logs, view, SYSTEM)
        registry.open()
        count = config["rlmm.config.remote.log.metadata.topic.num.partitions"]
        records = 0
        for topic in topics:
            _make_topic(registry, topic, report)
            for number, found in topic.partitions.items():
                start_behind(logs.partitions[TopicPartition(topic.name, number)], found)
                records += found.end_offset - found.log_start_offset
        _write_metadata(registry, topics, count)
        for partition in logs.partitions.values():
            partition.flush()
        FileKeeper(logs.log_dirs).remember(incarnations)
    return topics, records


def _make_topic(registry: Registry, topic: RebuiltTopic, report: Report) -> None:
    partitions = max(topic.section.partitions, 1 + max(topic.partitions))
    configs = {**topic.section.configs, "remote.storage.enable": "true"}
    try:
        configs = registry.check_new(topic.name, partitions, configs)
    except ConfigError as e:
        report(f"topic {topic.name} keeps everything, for its properties are not allowed: {e}")
        configs = registry.check_new(topic.name, partitions, _FOR_EVER)
    registry.restore(topic.name, topic.topic_id, partitions, configs)


def go_on_behind(
    partition: Partition, store: ObjectStore, cluster_id: str, segments: Collection[RemoteSegment]
) -> None:
    """A log that ends before its copies do has lost something here: its directory, or its end.  It
    goes on after the copies, or new records would get the offsets of those.  Before anything is
    appended; file work, and waits for the store.  `segments`: those that count.  KdirectError."""
    if max((s.end_offset for s in segments), default=0) <= partition.log_end_offset:
        return
    found = read_partition(store, cluster_id, segments)
    is_empty = partition.log_end_offset == partition.local_log_start_offset
    if not is_empty and found.log_start_offset > partition.local_log_start_offset:
        raise LogError(
            f"{partition.topic_partition} ends at offset {partition.log_end_offset}, and its copies"
            f" in remote storage, which begin at {found.log_start_offset}, at {found.end_offset}",
            hint=f"restore {partition.directory}, or move it away to go on after the copies",
        )
    log.warning(
        "%s ends at offset %d here, and its copies in remote storage at %d: it goes on there, and"
        " what was not copied is lost",
        partition.topic_partition,
        partition.log_end_offset,
        found.end_offset,
    )
    found.log_start_offset = max(found.log_start_offset, partition.log_start_offset)
    start_behind(partition, found)


def start_behind(partition: Partition, found: RebuiltPartition) -> None:
    """The log goes on after what is tiered."""
    partition.start_over(
        found.end_offset,
        log_start=found.log_start_offset,
        epochs=found.epochs,
        producers=unpack_snapshot(found.producers),
    )


def _write_metadata(registry: Registry, topics: Iterable[RebuiltTopic], count: int) -> None:
    configs = {
        "segment.bytes": str(SEGMENT_BYTES),
        "retention.ms": "-1",
        "retention.bytes": "-1",
    }
    registry.create(REMOTE_METADATA_TOPIC, count, configs)
    for topic in topics:
        for number, found in topic.partitions.items():
            metadata = PartitionMetadata()
            for segment in found.segments:
                metadata.apply(segment)
            _append(registry, metadata, (topic.topic_id, number), count)


def _append(
    registry: Registry, metadata: PartitionMetadata, where: tuple[uuid.UUID, int], count: int
) -> None:
    partition = registry.partition(REMOTE_METADATA_TOPIC, metadata_partition(where, count))
    waiting: list[bytes] = []
    size = 0
    for record in metadata.records():
        batch = encode_single_bytes(pack_record(record), record_key(record), now_ms())
        if size + len(batch) > APPEND_BYTES:
            _append_batches(partition, waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += len(batch)
    _append_batches(partition, waiting)


def _append_batches(partition: Partition, batches: list[bytes]) -> None:
    if not batches:
        return
    result = partition.append(b"".join(batches))
    if result.error:
        raise LogError(
            f"metadata cannot be written to {partition.topic_partition}:"
            f" {error_kind(result.error).name}"
        )


__all__ = ["go_on_behind", "rebuild"]
