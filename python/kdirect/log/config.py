"""What a log needs to know of the configuration: broker properties and a topic's overrides,
resolved.

Law of the room: pure values.  Names, defaults and checks are rows of `kdirect.options` (tables
BROKER and TOPIC); here they only become one frozen object per topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from kdirect.model import CREATE_TIME, LOG_APPEND_TIME
from kdirect.option_table import config_text
from kdirect.options import BROKER, TOPIC

PAGE_BYTES = 4096
NEVER = (1 << 63) - 1
AS_RETENTION = -2  # of local retention: as that of the whole log
OFFSET_ENTRY_BYTES = 8
TIME_ENTRY_BYTES = 12

_MINUTE_MS = 60_000
_HOUR_MS = 3_600_000


class Codec(NamedTuple):
    """What batches are compressed with: a name as in `kdirect.format.compression.Compressor`, and
    a level, None for the library's own."""

    name: str
    level: int | None = None


def whole_pages(length: int) -> int:
    """`length` rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Settings of one partition's log.  Sizes in bytes, times in ms; `NEVER` stands for no limit in
    time, -1 for no retention limit.  `in_cluster`: may a topic ask for what several brokers can do?
    `overrides` are the topic's own properties, as given.  `compacts` and `deletes`: what its
    cleanup policy names.

    `remote_system`: has the broker tiered storage?  `remote_storage`: is the topic tiered, too?
    What holds between these and the others says `kdirect.log.remote_rules`."""

    segment_bytes: int = 64 << 20
    segment_ms: int = 168 * _HOUR_MS
    segment_jitter_ms: int = 0
    index_interval_bytes: int = 4096
    index_max_bytes: int = 10 << 20
    retention_ms: int = 168 * _HOUR_MS
    retention_bytes: int = -1
    flush_messages: int = NEVER
    flush_ms: int = NEVER
    flush_before_ack: bool = False
    max_message_bytes: int = 1_048_588
    max_plain_batch_bytes: int = 64 << 20
    timestamp_type: int = CREATE_TIME
    timestamp_before_max_ms: int = NEVER
    timestamp_after_max_ms: int = 3_600_000
    producer_expiration_ms: int = 86_400_000
    compacts: bool = False
    deletes: bool = True
    delete_retention_ms: int = 86_400_000
    file_delete_delay_ms: int = 60_000
    min_cleanable_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = NEVER
    compression_type: str = "producer"
    gzip_level: int = -1
    lz4_level: int = 9
    zstd_level: int = 3
    min_insync_replicas: int = 1
    unclean_leader_election: bool = False
    in_cluster: bool = False
    remote_system: bool = False
    remote_storage: bool = False
    local_retention_ms: int = AS_RETENTION
    local_retention_bytes: int = AS_RETENTION
    remote_copy_disable: bool = False
    remote_copy_lag_ms: int = 0
    remote_copy_lag_bytes: int = 0
    remote_delete_on_disable: bool = False
    remote_client_access: str = "broker"
    overrides: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "segment_bytes", whole_pages(self.segment_bytes))

    def index_bytes(self, entry_bytes: int, capacity: int) -> int:
        """Size of an index that is not full before a head of `capacity` bytes is, and no more than
        `index_max_bytes`."""
        entries = capacity // max(1, self.index_interval_bytes) + 2
        limit = self.index_max_bytes // entry_bytes * entry_bytes
        return min(whole_pages(entries * entry_bytes) // entry_bytes * entry_bytes, limit)

    @property
    def looks_into_records(self) -> bool:
        """Is there more to do with records than to append their batches?  Then no producer has the
        head over RDMA."""
        return self.compacts or self.compression_type != "producer"

    @property
    def codec(self) -> Codec | None:
        """What batches are compressed with that came in another codec; None: they stay as they
        are."""
        match self.compression_type:
            case "producer":
                return None
            case "uncompressed":
                return Codec("none")
            case "gzip":
                return Codec("gzip", self.gzip_level if self.gzip_level > 0 else None)
            case "lz4":
                return Codec("lz4", self.lz4_level)
            case "zstd":
                return Codec("zstd", self.zstd_level)
        return Codec(self.compression_type)

    @property
    def effective_segment_ms(self) -> int:
        """After how long a segment ends; a log that is compacted has sealed by
        ``max.compaction.lag.ms`` what is to be compacted then."""
        return (
            min(self.segment_ms, self.max_compaction_lag_ms) if self.compacts else self.segment_ms
        )

    @property
    def effective_local_retention_ms(self) -> int:
        """How long copied segments of a tiered log stay here; -1: no limit."""
        local = self.local_retention_ms
        return self.retention_ms if local == AS_RETENTION else local

    @property
    def effective_local_bytes(self) -> int:
        """How many bytes of a tiered log stay here, once they are copied; -1: no limit."""
        local = self.local_retention_bytes
        return self.retention_bytes if local == AS_RETENTION else local

    @property
    def effective_copy_lag_ms(self) -> int:
        """How old the newest record of a segment has to be before it is copied; -1: no age is
        enough (KIP-1241)."""
        lag = self.remote_copy_lag_ms
        return self.effective_local_retention_ms if lag < 0 else lag

    @property
    def effective_copy_lag_bytes(self) -> int:
        """How many bytes of the log have to come after a segment before it is copied; -1: no
        number is enough."""
        lag = self.remote_copy_lag_bytes
        return self.effective_local_bytes if lag < 0 else lag

    @property
    def wants_remote(self) -> bool:
        """Does the topic ask to be tiered, whether or not the broker has tiered storage?"""
        return (self.overrides or {}).get("remote.storage.enable") == "true"

    @classmethod
    def from_broker(cls, properties: Mapping[str, Any]) -> LogConfig:
        """From broker properties, typed or as strings; names that are not the log's are left alone,
        missing ones take their defaults."""
        p = BROKER.resolve({})
        for name, value in properties.items():
            if name in p:
                p[name] = BROKER.find(name).parse(value) if isinstance(value, str) else value
        retention = -1
        for name, factor in (
            ("log.retention.ms", 1),
            ("log.retention.minutes", _MINUTE_MS),
            ("log.retention.hours", _HOUR_MS),
        ):
            if p[name] is not None:
                retention = p[name] * factor if p[name] >= 0 else -1
                break
        return cls(
            segment_bytes=p["log.segment.bytes"],
            segment_ms=p["log.roll.ms"]
            if p["log.roll.ms"] is not None
            else p["log.roll.hours"] * _HOUR_MS,
            segment_jitter_ms=p["log.roll.jitter.ms"]
            if p["log.roll.jitter.ms"] is not None
            else p["log.roll.jitter.hours"] * _HOUR_MS,
            index_interval_bytes=p["log.index.interval.bytes"],
            index_max_bytes=p["log.index.size.max.bytes"],
            retention_ms=retention,
            retention_bytes=p["log.retention.bytes"],
            flush_messages=p["log.flush.interval.messages"],
            flush_ms=NEVER if p["log.flush.interval.ms"] is None else p["log.flush.interval.ms"],
            flush_before_ack=p["log.flush.before.ack"],
            max_message_bytes=p["message.max.bytes"],
            max_plain_batch_bytes=p["max.batch.bytes"],
            timestamp_type=_timestamp_type(p["log.message.timestamp.type"]),
            timestamp_before_max_ms=p["log.message.timestamp.before.max.ms"],
            timestamp_after_max_ms=p["log.message.timestamp.after.max.ms"],
            producer_expiration_ms=p["producer.id.expiration.ms"],
            compacts="compact" in p["log.cleanup.policy"],
            deletes="delete" in p["log.cleanup.policy"],
            delete_retention_ms=p["log.cleaner.delete.retention.ms"],
            file_delete_delay_ms=p["log.segment.delete.delay.ms"],
            min_cleanable_ratio=p["log.cleaner.min.cleanable.ratio"],
            min_compaction_lag_ms=p["log.cleaner.min.compaction.lag.ms"],
            max_compaction_lag_ms=p["log.cleaner.max.compaction.lag.ms"],
            compression_type=p["compression.type"],
            gzip_level=p["compression.gzip.level"],
            lz4_level=p["compression.lz4.level"],
            zstd_level=p["compression.zstd.level"],
            min_insync_replicas=p["min.insync.replicas"],
            unclean_leader_election=p["unclean.leader.election.enable"],
            in_cluster=bool(p["zookeeper.connect"]),
            remote_system=p["remote.log.storage.system.enable"],
            local_retention_ms=p["log.local.retention.ms"],
            local_retention_bytes=p["log.local.retention.bytes"],
            remote_client_access=p["remote.log.client.access"],
        )

    def with_overrides(self, overrides: Mapping[str, Any] | None) -> LogConfig:
        """This configuration for a topic with properties of its own; ConfigError names an unknown
        or bad one."""
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        p = TOPIC.resolve(given)
        if not self.in_cluster:
            TOPIC.check_alone(p)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, field in _FIELD_OF.items():
            if p[name] is not None:
                values[field] = p[name]
        if p["cleanup.policy"] is not None:
            values["compacts"] = "compact" in p["cleanup.policy"]
            values["deletes"] = "delete" in p["cleanup.policy"]
        if p["message.timestamp.type"] is not None:
            values["timestamp_type"] = _timestamp_type(p["message.timestamp.type"])
        values["remote_storage"] = self.remote_system and p["remote.storage.enable"]
        if p["remote.log.client.access"] != "inherit":
            values["remote_client_access"] = p["remote.log.client.access"]
        values["overrides"] = {
            TOPIC.find(name).name: config_text(value) for name, value in given.items()
        }
        return LogConfig(**values)

    def topic_properties(self) -> dict[str, str]:
        """Every property of the topic, by Kafka's name, as it is in force."""
        out = {
            name: config_text(value) for name, value in TOPIC.resolve(self.overrides or {}).items()
        }
        out.update({name: config_text(getattr(self, field)) for name, field in _FIELD_OF.items()})
        if "cleanup.policy" not in (self.overrides or {}):
            policies = {"compact": self.compacts, "delete": self.deletes}
            out["cleanup.policy"] = ",".join(name for name, has in policies.items() if has)
        out["message.timestamp.type"] = (
            "LogAppendTime" if self.timestamp_type == LOG_APPEND_TIME else "CreateTime"
        )
        return dict(sorted(out.items()))


_FIELD_OF = {
    "compression.gzip.level": "gzip_level",
    "compression.lz4.level": "lz4_level",
    "compression.type": "compression_type",
    "compression.zstd.level": "zstd_level",
    "delete.retention.ms": "delete_retention_ms",
    "file.delete.delay.ms": "file_delete_delay_ms",
    "flush.messages": "flush_messages",
    "flush.ms": "flush_ms",
    "index.interval.bytes": "index_interval_bytes",
    "local.retention.bytes": "local_retention_bytes",
    "local.retention.ms": "local_retention_ms",
    "max.compaction.lag.ms": "max_compaction_lag_ms",
    "max.message.bytes": "max_message_bytes",
    "message.timestamp.before.max.ms": "timestamp_before_max_ms",
    "min.cleanable.dirty.ratio": "min_cleanable_ratio",
    "min.compaction.lag.ms": "min_compaction_lag_ms",
    "min.insync.replicas": "min_insync_replicas",
    "message.timestamp.after.max.ms": "timestamp_after_max_ms",
    "remote.copy.lag.bytes": "remote_copy_lag_bytes",
    "remote.copy.lag.ms": "remote_copy_lag_ms",
    "remote.log.copy.disable": "remote_copy_disable",
    "remote.log.delete.on.disable": "remote_delete_on_disable",
    "retention.bytes": "retention_bytes",
    "retention.ms": "retention_ms",
    "segment.bytes": "segment_bytes",
    "segment.index.bytes": "index_max_bytes",
    "segment.jitter.ms": "segment_jitter_ms",
    "segment.ms": "segment_ms",
    "unclean.leader.election.enable": "unclean_leader_election",
}


def kernel_settings(config: LogConfig) -> dict[str, Any]:
    """The part of a LogConfig that the commit kernel applies."""
    return {
        "segment_bytes": config.segment_bytes, "max_batch_bytes": config.max_message_bytes,
        "index_interval_bytes": config.index_interval_bytes,
        "segment_ms": config.effective_segment_ms,
        "before_max_ms": config.timestamp_before_max_ms,
        "after_max_ms": config.timestamp_after_max_ms,
        "log_append_time": config.timestamp_type == LOG_APPEND_TIME,
        "hold_high_watermark": config.flush_before_ack, "wait_for_disk": config.flush_before_ack,
    }  # fmt: skip


def _timestamp_type(name: str) -> int:
    return LOG_APPEND_TIME if name == "LogAppendTime" else CREATE_TIME
