"""Topics, their properties, offsets and groups: requests that change or describe the cluster.

It owns the messages about topics, properties and offsets, and groups many partitions into one
request for each broker; those about brokers and replicas are `cluster_admin`'s, those about groups
`group_admin`'s.  No records pass here.

Invariants: after a transient error (a leader or coordinator that moved, a broker that restarts) a
request is repeated for up to `request.timeout.ms`.  Any other error is raised at once and names the
topic, partition or group that it concerns.  If a change is sent twice because its first answer was
lost, it succeeds if the first request did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kdirect.client import cluster_admin, group_admin
from kdirect.client.admin_values import (
    BrokerInfo,
    ClusterInfo,
    ConfigEntry,
    GroupInfo,
    Health,
    Reassignment,
    ReplicaInfo,
    TopicInfo,
)
from kdirect.client.leader_requests import at_leaders, by_topic
from kdirect.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    KdirectError,
    ProtocolError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format import protocol
from kdirect.format.error_codes import ErrorCode
from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition, check_topic_name
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection
from kdirect.wire.metadata import TopicMetadata

T = TypeVar("T")

_TOPIC_RESOURCE = 2
_BROKER_RESOURCE = 4
_SET, _DELETE = 0, 1
_SOURCES = {
    0: "unknown",
    1: "topic",
    2: "broker (dynamic)",
    3: "brokers (dynamic)",
    4: "broker",
    5: "default",
    6: "broker logger",
}

__all__ = [
    "EARLIEST_OFFSET",
    "LATEST_OFFSET",
    "Admin",
    "BrokerInfo",
    "ClusterInfo",
    "ConfigEntry",
    "GroupInfo",
    "Health",
    "Reassignment",
    "ReplicaInfo",
    "TopicInfo",
]


class Admin:
    """Administrative requests.  Thread-safe, and usable in forked children, as its cluster is.

    `owner` is an object that keeps the cluster's connections open.  It lives as long as this one.
    Each method raises BrokerError with the broker's code if the broker refuses, and
    BrokerUnavailableError if none can be reached within `request.timeout.ms`.
    """

    def __init__(self, cluster: Cluster, owner: object = None) -> None:
        self._cluster = cluster
        self._owner = owner

    # -- topics ------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 1,
        configs: Mapping[str, Any] | None = None,
        if_not_exists: bool = False,
    ) -> bool:
        """Create a topic and wait until it has leaders.

        -1 as `partitions` or `replication_factor` takes the broker's default.  `configs` are topic
        properties.  True if the topic is new; False if it exists and `if_not_exists` is set.
        Raises ConfigError for impossible arguments, and BrokerError (TOPIC_ALREADY_EXISTS,
        INVALID_PARTITIONS, INVALID_CONFIG and others).
        """
        check_topic_name(name)
        _check_int("partitions", partitions, 1, 0x7FFFFFFF)
        _check_int("replication_factor", replication_factor, 1, 0x7FFF)
        r = protocol.CreateTopicsRequest
        topic = r.CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=replication_factor,
            assignments=[],
            configs=[
                r.CreatableTopic.CreatableTopicConfig(name=k, value=_text(v))
                for k, v in (configs or {}).items()
            ],
        )
        attempts = 0

        def create(connection: Connection) -> bool:
            nonlocal attempts
            attempts += 1
            response = connection.request(
                r(topics=[topic], timeout_ms=self._cluster.timeout_ms, validate_only=False)
            )
            result = _only(response.topics, "name", name, response)
            if result.error_code == ErrorCode.TOPIC_ALREADY_EXISTS:
                if attempts > 1:
                    return True
                if if_not_exists:
                    return False
            if result.error_code:
                raise broker_error(
                    result.error_code, f"creating topic {name!r}", result.error_message
                )
            return True

        created = self._on_controller(create)
        self._wait_for(
            lambda: self._has_leaders(name), f"topic {name!r} was created, but has no leaders"
        )
        return created

    def delete_topic(self, name: str, if_exists: bool = False) -> bool:
        """Delete a topic with its records, and wait until it is gone.  True if it was deleted.  If
        it does not exist: False with `if_exists`, else UnknownTopicError."""
        check_topic_name(name)
        r = protocol.DeleteTopicsRequest
        attempts = 0

        def delete(connection: Connection) -> bool:
            nonlocal attempts
            attempts += 1
            response = connection.request(
                r(
                    topics=[r.DeleteTopicState(name=name, topic_id=None)],
                    topic_names=[name],
                    timeout_ms=self._cluster.timeout_ms,
                )
            )
            result = _only(response.responses, "name", name, response)
            if result.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and (
                attempts > 1 or if_exists
            ):
                return attempts > 1
            if result.error_code:
                raise broker_error(
                    result.error_code, f"deleting topic {name!r}", result.error_message
                )
            return True

        deleted = self._on_controller(delete)
        self._wait_for(
            lambda: name not in self._cluster.refresh([name]),
            f"topic {name!r} was deleted, but is still there",
        )
        return deleted

    def create_partitions(self, name: str, partitions: int) -> None:
        """Raise the number of a topic's partitions to `partitions`, and wait until all have
        leaders.  From then on a key may map to another partition.  Raises UnknownTopicError, and
        BrokerError INVALID_PARTITIONS if the topic has as many or more."""
        check_topic_name(name)
        _check_int("partitions", partitions, 1, 0x7FFFFFFF)
        r = protocol.CreatePartitionsRequest
        attempts = 0

        def create(connection: Connection) -> None:
            nonlocal attempts
            attempts += 1
            response = connection.request(
                r(
                    topics=[r.CreatePartitionsTopic(name=name, count=partitions, assignments=None)],
                    timeout_ms=self._cluster.timeout_ms,
                    validate_only=False,
                )
            )
            result = _only(response.results, "name", name, response)
            if (
                result.error_code == ErrorCode.INVALID_PARTITIONS
                and attempts > 1
                and self._count(name) == partitions
            ):
                return
            if result.error_code:
                raise broker_error(
                    result.error_code, f"adding partitions to topic {name!r}", result.error_message
                )

        self._on_controller(create)
        self._wait_for(
            lambda: self._count(name) >= partitions and self._has_leaders(name),
            f"the new partitions of {name!r} have no leaders",
        )

    def list_topics(self, internal: bool = False) -> dict[str, TopicInfo]:
        """All topics by name.  The brokers' own topics are included only with `internal`."""
        found = self._cluster.refresh(None)
        return {name: _info(t) for name, t in sorted(found.items()) if internal or not t.internal}

    def describe_topic(self, name: str) -> TopicInfo:
        """One topic.  Raises UnknownTopicError if it does not exist."""
        return _info(self._cluster.topic(name, refresh=True))

    # -- properties --------------------------------------------------------------------------------

    def describe_configs(
        self, topic: str | None = None, *, broker: int | None = None
    ) -> dict[str, ConfigEntry]:
        """All properties by name, of a topic or of the broker with the node id `broker`.  Raises
        ConfigError unless exactly one of both is given."""
        kind, name, subject = _resource(topic, broker)
        r = protocol.DescribeConfigsRequest

        def describe(connection: Connection) -> Any:
            resource = r.DescribeConfigsResource(
                resource_type=kind, resource_name=name, configuration_keys=None
            )
            response = connection.request(
                r(resources=[resource], include_synonyms=False, include_documentation=False)
            )
            result = _only(response.results, "resource_name", name, response)
            if result.error_code:
                raise broker_error(result.error_code, subject, result.error_message)
            return result

        result = self._cluster.call(lambda: self._connection_of(broker), describe)
        return {
            c.name: ConfigEntry(
                None if c.is_sensitive else c.value,
                _SOURCES.get(c.config_source, "unknown"),
                bool(c.read_only),
            )
            for c in sorted(result.configs, key=lambda c: c.name)
        }

    def alter_configs(
        self, topic: str | None, configs: Mapping[str, Any], *, broker: int | None = None
    ) -> None:
        """Set properties of a topic, or of the broker with the node id `broker`.  The value None
        returns a property to its default.  Properties that `configs` does not name keep their
        values."""
        kind, name, subject = _resource(topic, broker)
        if not configs:
            return

        def alter(connection: Connection) -> None:
            if connection.supports(protocol.IncrementalAlterConfigsRequest.API_KEY):
                i = protocol.IncrementalAlterConfigsRequest
                changes = [
                    i.AlterConfigsResource.AlterableConfig(
                        name=k,
                        config_operation=_DELETE if v is None else _SET,
                        value=None if v is None else _text(v),
                    )
                    for k, v in configs.items()
                ]
                message = i(
                    validate_only=False,
                    resources=[
                        i.AlterConfigsResource(
                            resource_type=kind, resource_name=name, configs=changes
                        )
                    ],
                )
            else:  # before Kafka 2.3 a request replaces all properties: repeat those that are set
                a = protocol.AlterConfigsRequest
                now = {
                    k: e.value
                    for k, e in self.describe_configs(topic, broker=broker).items()
                    if not e.is_default
                }
                now.update(configs)
                all_of_them = [
                    a.AlterConfigsResource.AlterableConfig(name=k, value=_text(v))
                    for k, v in now.items()
                    if v is not None
                ]
                message = a(
                    validate_only=False,
                    resources=[
                        a.AlterConfigsResource(
                            resource_type=kind, resource_name=name, configs=all_of_them
                        )
                    ],
                )
            response = connection.request(message)
            result = _only(response.responses, "resource_name", name, response)
            if result.error_code:
                raise broker_error(result.error_code, f"altering {subject}", result.error_message)

        if broker is not None:
            self._cluster.call(lambda: self._connection_of(broker), alter)
        else:
            self._on_controller(alter)

    # -- brokers, leaders and replicas -------------------------------------------------------------

    def describe_cluster(self, broker: int | None = None) -> ClusterInfo:
        """The brokers and the controller, as the broker with the node id `broker` knows them; by
        default as any does."""
        return self._cluster.call(
            lambda: self._connection_of(broker), cluster_admin.describe_cluster
        )

    def describe_replicas(
        self, broker: int, topics: Sequence[str] | None = None
    ) -> dict[TopicPartition, ReplicaInfo]:
        """How the replicas on one broker get their records; of all topics, or of those named."""
        return self._cluster.call(
            lambda: self._connection_of(broker),
            partial(cluster_admin.describe_replicas, topics=topics),
        )

    def health(self) -> Health:
        """The partitions whose replicas are not all in sync, by what they lack."""
        found = self._cluster.refresh(None).values()
        lacking = [
            t.name
            for t in found
            if any(
                p.leader >= 0 and len(p.in_sync_replicas) < len(p.replicas) for p in t.partitions
            )
        ]
        least = {
            name: int(entry.value)
            for name in lacking
            for entry in [self.describe_configs(name)["min.insync.replicas"]]
            if entry.value is not None
        }
        return cluster_admin.health(self.describe_cluster().controller, found, least)

    def elect_leaders(
        self, tps: Iterable[TopicPartition] | None = None, *, unclean: bool = False
    ) -> dict[TopicPartition, KdirectError | None]:
        """Give the leadership of partitions (None: of all) to their preferred replicas; with
        `unclean`, to any live replica where none in sync is left, which loses acknowledged records.
        Returns why a partition got no such leader; None where it has one now."""
        wanted = None if tps is None else list(tps)
        return self._on_controller(
            lambda connection: cluster_admin.elect_leaders(
                connection, wanted, unclean=unclean, timeout_ms=self._cluster.timeout_ms
            )
        )

    def reassign_partitions(self, wanted: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        """Move partitions to other brokers: node ids, the preferred leader first.  None takes a
        move back that is not finished.  Returns once the moves have begun; `list_reassignments`
        shows those that go on.  BrokerError names the first partition that cannot be moved."""
        if wanted:
            self._on_controller(
                lambda connection: cluster_admin.reassign(
                    connection, wanted, timeout_ms=self._cluster.timeout_ms
                )
            )

    def list_reassignments(self) -> dict[TopicPartition, Reassignment]:
        """The partitions whose replicas are moving."""
        return self._on_controller(
            lambda connection: cluster_admin.list_reassignments(
                connection, timeout_ms=self._cluster.timeout_ms
            )
        )

    # -- offsets of partitions ---------------------------------------------------------------------

    def list_offsets(
        self, wanted: Mapping[TopicPartition, int], *, isolation_level: str | None = None
    ) -> dict[TopicPartition, tuple[int, int]]:
        """``(offset, timestamp in ms)`` of each partition, with one request for each broker.

        `wanted` maps a partition to EARLIEST_OFFSET, LATEST_OFFSET or a timestamp in ms since 1970.
        A timestamp finds the first record of that time or later, or (-1, -1) if there is none.  For
        the earliest and the latest offset the returned timestamp is -1.  With the isolation level
        read_committed the latest offset is the last stable one.  All or nothing: the error names a
        partition (also as `topic_partition`) and the broker that could not be asked for it.
        """
        level = int(
            (isolation_level or self._cluster.settings["isolation.level"]) == "read_committed"
        )
        r = protocol.ListOffsetsRequest

        def build(tps: list[TopicPartition]) -> Any:
            return r(
                replica_id=-1,
                isolation_level=level,
                timeout_ms=self._cluster.timeout_ms,
                topics=[
                    r.ListOffsetsTopic(
                        name=topic,
                        partitions=[
                            r.ListOffsetsTopic.ListOffsetsPartition(
                                partition_index=tp.partition,
                                current_leader_epoch=self._cluster.leader_epoch(tp),
                                timestamp=wanted[tp],
                            )
                            for tp in group
                        ],
                    )
                    for topic, group in by_topic(tps).items()
                ],
            )

        return at_leaders(
            self._cluster, wanted, build, lambda p: (p.offset, p.timestamp), "offsets of"
        )

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records of each partition whose offsets are lower than the given one (-1:
        all).  Returns the new log start offsets."""
        r = protocol.DeleteRecordsRequest

        def build(tps: list[TopicPartition]) -> Any:
            return r(
                timeout_ms=self._cluster.timeout_ms,
                topics=[
                    r.DeleteRecordsTopic(
                        name=topic,
                        partitions=[
                            r.DeleteRecordsTopic.DeleteRecordsPartition(
                                partition_index=tp.partition, offset=before[tp]
                            )
                            for tp in group
                        ],
                    )
                    for topic, group in by_topic(tps).items()
                ],
            )

        return at_leaders(
            self._cluster, before, build, lambda p: p.low_watermark, "deleting records of"
        )

    # -- groups ------------------------------------------------------------------------------------

    def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int], metadata: str = ""
    ) -> None:
        """Commit offsets for a group.  An offset is that of the next record to read.  `metadata` is
        a text that is stored with each.  Raises BrokerError if the group has live members."""
        group_admin.commit_offsets(self._cluster, group, offsets, metadata)

    def committed_offsets(
        self, group: str, tps: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, int | None]:
        """The offsets that a group has committed; None for a partition without one.  If `tps` is
        None, all partitions for which the group has an offset."""
        return group_admin.committed_offsets(self._cluster, group, tps)

    def list_groups(self) -> list[GroupInfo]:
        """The groups of all brokers, in order of their names."""
        return group_admin.list_groups(self._cluster)

    # -- where a request goes ----------------------------------------------------------------------

    def _on_controller(self, use: Callable[[Connection], T]) -> T:
        def attempt(connection: Connection) -> T:
            try:
                return use(connection)
            except BrokerError as e:
                if e.code == ErrorCode.NOT_CONTROLLER:
                    self._cluster.refresh([])
                raise

        def connect() -> Connection:
            self._cluster.control_connection()  # where nobody answers, nothing is waited for
            # A controller that is gone is no longer named once the others have noticed.
            backoff = self._cluster.backoff(self._cluster.timeout_ms)
            while True:
                try:
                    return self._cluster.controller_connection()
                except BrokerUnavailableError:
                    if not backoff.wait():
                        raise
                    self._cluster.refresh([])

        try:
            return self._cluster.call(connect, attempt)
        except TimedOutError:
            # One that hangs is named only until the others have noticed: do not ask it again.
            with contextlib.suppress(KdirectError):
                self._cluster.refresh([])
            raise

    def _connection_of(self, broker: int | None) -> Connection:
        if broker is None:
            return self._cluster.control_connection()
        for node in self._cluster.nodes:
            if node.node_id == broker:
                return self._cluster.connection_to(node)
        raise ConfigError(
            f"the cluster has no broker {broker}",
            hint=f"its brokers are {[n.node_id for n in self._cluster.nodes]}",
        )

    def _count(self, name: str) -> int:
        return len(self._cluster.topic(name, refresh=True).partitions)

    def _has_leaders(self, name: str) -> bool:
        try:
            found = self._cluster.topic(name, refresh=True)
        except UnknownTopicError:
            return False
        return bool(found.partitions) and all(p.leader >= 0 for p in found.partitions)

    def _wait_for(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait until `condition` holds, or raise BrokerUnavailableError with the text `otherwise`.
        A change takes time to reach all brokers of a cluster, and the next call must see it."""
        backoff = self._cluster.backoff(self._cluster.timeout_ms)
        while not condition():
            if not backoff.wait():
                raise BrokerUnavailableError(
                    f"{otherwise} after {self._cluster.timeout_ms} ms",
                    hint="look at the brokers' logs",
                )


def _info(topic: TopicMetadata) -> TopicInfo:
    return TopicInfo(
        topic.name, topic.topic_id, topic.internal, len(topic.partitions), topic.partitions
    )


def _only(results: Iterable[Any], field: str, name: str, response: Any) -> Any:
    for result in results:
        if getattr(result, field) == name:
            return result
    raise ProtocolError(
        f"the broker's {type(response).__name__} does not mention {name!r}",
        hint="see the broker's log",
    )


def _resource(topic: str | None, broker: int | None) -> tuple[int, str, str]:
    if (topic is None) == (broker is None):
        raise ConfigError("properties of what?", hint="give a topic or broker=node id, not both")
    if topic is not None:
        return _TOPIC_RESOURCE, check_topic_name(topic), f"properties of topic {topic!r}"
    return _BROKER_RESOURCE, str(broker), f"properties of broker {broker}"


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else ",".join(map(str, value))
        if isinstance(value, list | tuple)
        else str(value)
    )


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not (value == -1 or low <= value <= high)
    ):
        raise ConfigError(
            f"{name} {value!r} is not allowed",
            hint=f"give an integer from {low} to {high}, or -1 for the broker's default",
        )
