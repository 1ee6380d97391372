"""What administration tells, as values: topics, properties, groups, brokers, replicas.

What may not enter: requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdirect.model import TopicPartition
from kdirect.wire.metadata import PartitionMetadata


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic.  `partitions` is their number; `leaders` describes each partition, in order.
    `topic_id` is None if the broker does not assign ids."""

    name: str
    topic_id: str | None
    internal: bool
    partitions: int
    leaders: tuple[PartitionMetadata, ...]

    @property
    def replication_factor(self) -> int:
        """The largest number of replicas of a partition."""
        return max((len(p.replicas) for p in self.leaders), default=0)


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A property as the broker reports it.  `value` is None for a secret one.  `source` says where
    it was set: "topic", "broker", "broker (dynamic)", "default" and others."""

    value: str | None
    source: str
    read_only: bool

    @property
    def is_default(self) -> bool:
        """Whether it was set neither on the topic nor dynamically on this broker."""
        return self.source != "topic" and not self.source.startswith("broker (dynamic")


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A consumer group.  `state` is empty if the broker does not report it."""

    group: str
    protocol_type: str
    state: str


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A broker and where clients reach it; `rack` is None where it names none."""

    node_id: int
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """How a replica gets its records.  `feed`: "leads", "pushed" (its leader writes into its file),
    "read" (it READs sealed segments of its leader), "fetched" (over TCP) or "stopped".  `transport`
    is that of "pushed" and "read"; `reason` says why a replica is fetched or stopped, where the
    broker knows."""

    feed: str
    transport: str
    reason: str

    def __str__(self) -> str:
        if self.feed in ("pushed", "read"):
            return f"{self.feed} over {self.transport}"
        text = "fetched over TCP" if self.feed == "fetched" else self.feed
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """What one broker knows of its cluster.  `controller` is a node id, -1 for none; `brokers` are
    those that run, in order of their ids."""

    cluster_id: str
    controller: int
    brokers: tuple[BrokerInfo, ...]


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A partition whose replicas move: all that there are now, and those that come and go."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """Partitions that are not as they should be, each in the first list that fits: without a
    leader, with fewer replicas in sync than min.insync.replicas, with fewer than all."""

    controller: int
    offline: tuple[TopicPartition, ...]
    under_min_in_sync: tuple[TopicPartition, ...]
    under_replicated: tuple[TopicPartition, ...]

    @property
    def is_well(self) -> bool:
        """Is there a controller, and is every replica in sync?"""
        return self.controller >= 0 and not (
            self.offline or self.under_min_in_sync or self.under_replicated
        )
