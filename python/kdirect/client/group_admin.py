"""The messages of administration about groups, and what their answers mean.

Owns: what is asked of a group's coordinator by somebody who is no member, and of every broker about
the groups that it coordinates.  `kdirect.client.admin` is the API; members have a
`kdirect.client.coordinator_link`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from kdirect.client.admin_values import GroupInfo
from kdirect.client.coordinator_link import ONE_GROUP
from kdirect.client.leader_requests import by_topic
from kdirect.errors import BrokerUnavailableError, ConfigError
from kdirect.format import protocol
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection

T = TypeVar("T")


def commit_offsets(
    cluster: Cluster, group: str, offsets: Mapping[TopicPartition, int], metadata: str = ""
) -> None:
    """See `Admin.commit_offsets`."""
    if not offsets:
        return
    r = protocol.OffsetCommitRequest

    def commit(connection: Connection) -> None:
        response = connection.request(
            r(
                group_id=group,
                generation_id_or_member_epoch=-1,
                member_id="",
                group_instance_id=None,
                retention_time_ms=-1,
                topics=[
                    r.OffsetCommitRequestTopic(
                        name=topic,
                        partitions=[
                            r.OffsetCommitRequestTopic.OffsetCommitRequestPartition(
                                partition_index=tp.partition,
                                committed_offset=offsets[tp],
                                committed_leader_epoch=-1,
                                committed_metadata=metadata,
                            )
                            for tp in tps
                        ],
                    )
                    for topic, tps in by_topic(offsets).items()
                ],
            )
        )
        for t in response.topics:
            for p in t.partitions:
                _check_group(
                    cluster,
                    p.error_code,
                    group,
                    f"committing offset of {t.name}-{p.partition_index} for group {group!r}",
                )

    _on_coordinator(cluster, group, commit)


def committed_offsets(
    cluster: Cluster, group: str, tps: Iterable[TopicPartition] | None = None
) -> dict[TopicPartition, int | None]:
    """See `Admin.committed_offsets`."""
    r = protocol.OffsetFetchRequest
    wanted = None if tps is None else list(tps)
    if wanted == []:
        return {}

    def fetch(connection: Connection) -> dict[TopicPartition, int | None]:
        topics = (
            None
            if wanted is None
            else [
                r.OffsetFetchRequestTopic(
                    name=topic, partition_indexes=[tp.partition for tp in group_tps]
                )
                for topic, group_tps in by_topic(wanted).items()
            ]
        )
        message = r(group_id=group, topics=topics, require_stable=False)
        response = connection.submit(message, most=ONE_GROUP).result()
        _check_group(cluster, response.error_code, group, f"offsets of group {group!r}")
        out: dict[TopicPartition, int | None] = dict.fromkeys(wanted or ())
        for t in response.topics:
            for p in t.partitions:
                _check_group(
                    cluster,
                    p.error_code,
                    group,
                    f"offset of {t.name}-{p.partition_index} of group {group!r}",
                )
                if wanted is not None or p.committed_offset >= 0:
                    out[TopicPartition(t.name, p.partition_index)] = (
                        p.committed_offset if p.committed_offset >= 0 else None
                    )
        return out

    return _on_coordinator(cluster, group, fetch)


def list_groups(cluster: Cluster) -> list[GroupInfo]:
    """See `Admin.list_groups`."""

    def ask(connection: Connection) -> Any:
        response = connection.request(protocol.ListGroupsRequest(states_filter=[], types_filter=[]))
        if response.error_code:
            raise broker_error(response.error_code, f"groups of {connection.peer}")
        return response.groups

    found = {}
    for node in cluster.nodes:
        connect = partial(cluster.connection_to, node)
        for g in cluster.call(connect, ask):
            found[g.group_id] = GroupInfo(g.group_id, g.protocol_type, g.group_state or "")
    return [found[name] for name in sorted(found)]


def _on_coordinator(cluster: Cluster, group: str, use: Callable[[Connection], T]) -> T:
    if not group:
        raise ConfigError("a group id is empty", hint="give the group a name")

    def attempt(connection: Connection) -> T:
        try:
            return use(connection)
        except BrokerUnavailableError:
            cluster.forget_coordinator(group)
            raise

    return cluster.call(lambda: cluster.coordinator_connection(group), attempt)


def _check_group(cluster: Cluster, code: int, group: str, subject: str) -> None:
    if code == ErrorCode.NONE:
        return
    if code in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
        cluster.forget_coordinator(group)
    live = code in (
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.REBALANCE_IN_PROGRESS,
    )
    raise broker_error(
        code,
        subject,
        hint="the group has live members: stop them, or use another group" if live else "",
    )
