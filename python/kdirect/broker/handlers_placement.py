"""Requests about where the replicas of a cluster are, and which of them lead: ElectLeaders,
AlterPartitionReassignments, ListPartitionReassignments.

Any broker takes them and asks the controller.  A broker that is alone has `handlers_cluster` and
`handlers_refused` for these requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.handlers_topics import ask, row_of, wait_s
from kdirect.broker.picture import Picture
from kdirect.cluster import requests
from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.cluster.requests import ElectionKind, ReassignRow
from kdirect.format import protocol as p
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition


class PlacementHandlers:
    """See the module.  A member has one, used on its event loop."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    # -- elections ---------------------------------------------------------------------------------

    def elect_leaders(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._elect_leaders(header, request))

    async def _elect_leaders(self, header: p.RequestHeader, request: Any) -> Answer:
        kind = request.election_type if header.api_version >= 1 else ElectionKind.PREFERRED
        if kind not in ElectionKind._value2member_map_:
            code = Code.INVALID_REQUEST
            return respond(
                header, p.ElectLeadersResponse, error_code=code, replica_election_results=[]
            )
        wanted = None
        if request.topic_partitions is not None:
            wanted = tuple(
                TopicPartition(t.topic, i) for t in request.topic_partitions for i in t.partitions
            )
        timeout = wait_s(request.timeout_ms)
        question = requests.ElectLeaders(None, ElectionKind(kind), wanted)
        outcome, rows = await ask(self._picture, question, timeout)
        found = {row.partition: row.outcome for row in rows}
        if outcome.code != Code.NONE:
            found = dict.fromkeys(wanted or (), outcome)
        done = [tp for tp, one in found.items() if one.code == Code.NONE]
        await self._picture.until(lambda m: all(_has_leader(m, tp, kind) for tp in done), timeout)
        results = [
            {"topic": topic, "partition_result": partitions}
            for topic, partitions in _by_topic(found, "partition_id").items()
        ]
        code = outcome.code if wanted is None else Code.NONE
        return respond(
            header, p.ElectLeadersResponse, error_code=code, replica_election_results=results
        )

    # -- reassignments -----------------------------------------------------------------------------

    def alter_reassignments(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._alter_reassignments(header, request))

    async def _alter_reassignments(self, header: p.RequestHeader, request: Any) -> Answer:
        refused: dict[TopicPartition, Outcome] = {}
        rows = []
        keep = header.api_version >= 1 and not request.allow_replication_factor_change
        if keep:
            named = [
                TopicPartition(t.name, x.partition_index)
                for t in request.topics
                for x in t.partitions
            ]
            await self._picture.catch_up(lambda m: all(m.partition(tp) for tp in named))
        for t in request.topics:
            for x in t.partitions:
                tp = TopicPartition(t.name, x.partition_index)
                target = None if x.replicas is None else tuple(x.replicas)
                if keep and (changed := self._changes_factor(tp, target)):
                    refused[tp] = Outcome(Code.INVALID_REPLICATION_FACTOR, changed)
                else:
                    rows.append(ReassignRow(tp, target))
        timeout = wait_s(request.timeout_ms)
        found = dict(refused)
        outcome = Outcome()
        if rows:
            question = requests.Reassign(None, tuple(rows))
            outcome, answers = await ask(self._picture, question, timeout)
            found.update({row.partition: row.outcome for row in answers})
        begun = {r.partition: r.target for r in rows if _is_done(found.get(r.partition))}
        await self._picture.until(lambda m: _shows_targets(m, begun), timeout)
        topics = [
            {"name": topic, "partitions": partitions}
            for topic, partitions in _by_topic(found, "partition_index").items()
        ]
        whole = row_of(outcome)
        return respond(header, p.AlterPartitionReassignmentsResponse, responses=topics, **whole)

    def _changes_factor(self, tp: TopicPartition, target: tuple[int, ...] | None) -> str:
        """Why a target is not the number of replicas that there are; empty where it is."""
        partition = self._picture.metadata.partition(tp)
        if partition is None or target is None or len(target) == len(partition.target):
            return ""
        return f"partition {tp} has {len(partition.target)} replicas, and {len(target)} are given"

    def list_reassignments(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._list_reassignments(header, request))

    async def _list_reassignments(self, header: p.RequestHeader, request: Any) -> Answer:
        wanted = None
        if request.topics is not None:
            wanted = tuple(
                TopicPartition(t.name, i) for t in request.topics for i in t.partition_indexes
            )
        question = requests.ListReassignments(None, wanted)
        outcome, rows = await ask(self._picture, question, wait_s(request.timeout_ms))
        topics: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            topics.setdefault(row.partition.topic, []).append(
                {
                    "partition_index": row.partition.partition,
                    "replicas": list(row.replicas),
                    "adding_replicas": list(row.adding),
                    "removing_replicas": list(row.removing),
                }
            )
        found = [{"name": name, "partitions": parts} for name, parts in topics.items()]
        whole = row_of(outcome)
        return respond(header, p.ListPartitionReassignmentsResponse, topics=found, **whole)

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("ElectLeaders", self.elect_leaders, True),
            ("AlterPartitionReassignments", self.alter_reassignments, True),
            ("ListPartitionReassignments", self.list_reassignments, True),
        )


def _is_done(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.code == Code.NONE


def _by_topic(found: Mapping[TopicPartition, Outcome], key: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of outcomes by topic; `key` names the field of the partition's number."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for tp, outcome in found.items():
        row = row_of(outcome, **{key: tp.partition})
        topics.setdefault(tp.topic, []).append(row)
    return topics


def _has_leader(metadata: Metadata, tp: TopicPartition, kind: int) -> bool:
    partition = metadata.partition(tp)
    if partition is None or partition.state is None:
        return True  # it is gone meanwhile
    if kind == ElectionKind.PREFERRED:
        return partition.state.leader == partition.replicas[0]
    return partition.state.leader != NO_LEADER


def _shows_targets(
    metadata: Metadata, targets: Mapping[TopicPartition, tuple[int, ...] | None]
) -> bool:
    """Does the picture show every reassignment as begun, or ended, and every cancelled one as
    gone?"""
    for tp, target in targets.items():
        partition = metadata.partition(tp)
        if partition is None:
            continue
        moving = bool(partition.adding or partition.removing)
        if moving if target is None else set(partition.target) != set(target):
            return False
    return True
