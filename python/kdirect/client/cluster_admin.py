"""What a cluster's administration asks and answers: brokers, elections, reassignments, health.

It owns the messages and what they mean; where a request goes, and when it is sent again, is
`admin.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kdirect.client.admin_values import (
    BrokerInfo,
    ClusterInfo,
    Health,
    Reassignment,
    ReplicaInfo,
)
from kdirect.client.leader_requests import by_topic
from kdirect.errors import ConfigError, KdirectError
from kdirect.format import protocol
from kdirect.format.error_codes import ErrorCode
from kdirect.format.replica_fetch import Feed
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.connection import Connection
from kdirect.wire.metadata import TopicMetadata

_PREFERRED, _UNCLEAN = 0, 1


def describe_cluster(connection: Connection) -> ClusterInfo:
    """What the broker at the other end knows."""
    response = connection.request(
        protocol.DescribeClusterRequest(
            include_cluster_authorized_operations=False,
            endpoint_type=1,
            include_fenced_brokers=False,
        )
    )
    if response.error_code:
        raise broker_error(
            response.error_code, f"the cluster of {connection.peer}", response.error_message
        )
    brokers = [BrokerInfo(b.broker_id, b.host, b.port, b.rack) for b in response.brokers]
    return ClusterInfo(
        response.cluster_id,
        response.controller_id,
        tuple(sorted(brokers, key=lambda b: b.node_id)),
    )


def describe_replicas(
    connection: Connection, topics: Sequence[str] | None
) -> dict[TopicPartition, ReplicaInfo]:
    """See `Admin.describe_replicas`."""
    names = None if topics is None else list(topics)
    response = connection.request(build(protocol.DescribeReplicasRequest, topics=names))
    if response.error_code:
        raise broker_error(response.error_code, f"the replicas of {connection.peer}")
    return {
        TopicPartition(t.topic, x.partition): ReplicaInfo(_feed(x.feed), x.transport, x.reason)
        for t in response.topics
        for x in t.partitions
    }


def _feed(value: int) -> str:
    return Feed(value).name.lower() if value in Feed._value2member_map_ else f"unknown ({value})"


def elect_leaders(
    connection: Connection,
    tps: Iterable[TopicPartition] | None,
    *,
    unclean: bool,
    timeout_ms: int,
) -> dict[TopicPartition, KdirectError | None]:
    """See `Admin.elect_leaders`."""
    r = protocol.ElectLeadersRequest
    wanted = (
        None
        if tps is None
        else [
            r.TopicPartitions(topic=topic, partitions=[tp.partition for tp in group])
            for topic, group in by_topic(tps).items()
        ]
    )
    response = connection.request(
        r(
            election_type=_UNCLEAN if unclean else _PREFERRED,
            topic_partitions=wanted,
            timeout_ms=timeout_ms,
        )
    )
    if response.error_code:
        raise broker_error(response.error_code, "electing leaders")
    found: dict[TopicPartition, KdirectError | None] = {}
    for t in response.replica_election_results:
        for p in t.partition_result:
            tp = TopicPartition(t.topic, p.partition_id)
            well = p.error_code in (ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED)
            subject = f"electing a leader of {tp}"
            found[tp] = None if well else broker_error(p.error_code, subject, p.error_message)
    return found


def reassign(
    connection: Connection,
    wanted: Mapping[TopicPartition, Sequence[int] | None],
    *,
    timeout_ms: int,
) -> None:
    """See `Admin.reassign_partitions`."""
    r = protocol.AlterPartitionReassignmentsRequest
    topics = [
        r.ReassignableTopic(
            name=topic,
            partitions=[
                r.ReassignableTopic.ReassignablePartition(
                    partition_index=tp.partition, replicas=_brokers(tp, wanted[tp])
                )
                for tp in group
            ],
        )
        for topic, group in by_topic(wanted).items()
    ]
    response = connection.request(
        r(timeout_ms=timeout_ms, allow_replication_factor_change=True, topics=topics)
    )
    if response.error_code:
        raise broker_error(response.error_code, "moving partitions", response.error_message)
    for t in response.responses:
        for p in t.partitions:
            if p.error_code:
                tp = TopicPartition(t.name, p.partition_index)
                raise broker_error(p.error_code, f"moving {tp}", p.error_message)


def _brokers(tp: TopicPartition, replicas: Sequence[int] | None) -> list[int] | None:
    if replicas is None:
        return None
    if not replicas or len(set(replicas)) != len(replicas):
        raise ConfigError(
            f"partition {tp} cannot have the replicas {list(replicas)}",
            hint="name one broker or more, each once; the first is the preferred leader",
        )
    return list(replicas)


def list_reassignments(
    connection: Connection, *, timeout_ms: int
) -> dict[TopicPartition, Reassignment]:
    """See `Admin.list_reassignments`."""
    response = connection.request(
        protocol.ListPartitionReassignmentsRequest(timeout_ms=timeout_ms, topics=None)
    )
    if response.error_code:
        raise broker_error(
            response.error_code, "partitions that are moving", response.error_message
        )
    return {
        TopicPartition(t.name, p.partition_index): Reassignment(
            tuple(p.replicas), tuple(p.adding_replicas), tuple(p.removing_replicas)
        )
        for t in response.topics
        for p in t.partitions
    }


def health(
    controller: int,
    topics: Iterable[TopicMetadata],
    min_in_sync: Mapping[str, int],
) -> Health:
    """What metadata says.  `min_in_sync`: min.insync.replicas of the topics that have a partition
    whose replicas are not all in sync."""
    offline, under_min, under = [], [], []
    for topic in topics:
        for p in topic.partitions:
            tp = TopicPartition(topic.name, p.partition)
            least = min(min_in_sync.get(topic.name, 1), len(p.replicas))
            if p.leader < 0:
                offline.append(tp)
            elif len(p.in_sync_replicas) < least:
                under_min.append(tp)
            elif len(p.in_sync_replicas) < len(p.replicas):
                under.append(tp)
    return Health(controller, tuple(offline), tuple(under_min), tuple(under))
