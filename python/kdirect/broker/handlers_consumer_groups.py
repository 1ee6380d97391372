"""Requests about groups of KIP-848: ConsumerGroupHeartbeat and ConsumerGroupDescribe.

Owns: the answers.  The rules are `kdirect.broker.consumer_groups`; their effects are carried out
with those of the classic groups (`kdirect.broker.handlers_groups`), so that both go into one log in
one order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.consumer_group_state import ConsumerGroup, ConsumerMember
from kdirect.broker.consumer_groups import Heartbeat, HeartbeatResult
from kdirect.broker.handlers_groups import GroupHandlers
from kdirect.broker.operations import ON_GROUP, as_number
from kdirect.format import protocol as p
from kdirect.format.consumer_group_records import Partition
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build

_NOT_ASKED = -(1 << 31)  # Kafka's value of authorized operations that nobody has asked for


class ConsumerGroupHandlers:
    """See the module.  One for the broker, used on its event loop."""

    def __init__(self, groups: GroupHandlers) -> None:
        self._groups = groups
        self._rules = groups.consumer

    def heartbeat(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if error := self._groups.refusal(request.group_id):
            return self._answer(header, HeartbeatResult(error))
        future: asyncio.Future[HeartbeatResult] = asyncio.get_running_loop().create_future()
        names = request.subscribed_topic_names
        beat = Heartbeat(
            request.group_id,
            request.member_id,
            request.member_epoch,
            request.instance_id,
            request.rack_id,
            request.rebalance_timeout_ms,
            None if names is None else frozenset(names),
            request.subscribed_topic_regex if header.api_version >= 1 else None,
            request.server_assignor,
            _owned(request.topic_partitions),
            header.client_id or "",
            "/" + connection.peer.rpartition(":")[0],
            header.api_version >= 1,
        )
        self._groups.run(request.group_id, self._rules.heartbeat(future, beat, self._groups.now()))
        if future.done():
            return self._answer(header, future.result())
        return later(self._later(header, future))

    async def _later(self, header: p.RequestHeader, future: asyncio.Future[Any]) -> Answer:
        return self._answer(header, await future)

    def _answer(self, header: p.RequestHeader, r: HeartbeatResult) -> Answer:
        response = build(
            p.ConsumerGroupHeartbeatResponse,
            error_code=r.error,
            error_message=r.message,
            member_id=r.member_id,
            member_epoch=r.epoch,
            heartbeat_interval_ms=r.heartbeat_interval_ms,
            assignment=None
            if r.assignment is None
            else {"topic_partitions": _by_topic(r.assignment)},
        )
        return Answer([response.encode(version=header.api_version)])

    def describe(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        self._groups.expire_due()
        rows = []
        for name in request.group_ids:
            row = self._describe(name)
            asked = request.include_authorized_operations and not row["error_code"]
            row["authorized_operations"] = as_number(ON_GROUP) if asked else _NOT_ASKED
            rows.append(row)
        return respond(header, p.ConsumerGroupDescribeResponse, groups=rows)

    def _describe(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "error_code": self._groups.refusal(name),
            "error_message": None,
            "group_id": name,
            "group_state": "",
            "group_epoch": 0,
            "assignment_epoch": 0,
            "assignor_name": "",
            "members": [],
        }
        if row["error_code"]:
            return row
        group = self._rules.groups.get(name)
        if group is None:
            is_classic = name in self._groups.coordinator.groups
            row["error_code"] = ErrorCode.GROUP_ID_NOT_FOUND
            row["error_message"] = (
                f"Group {name} is not a consumer group."
                if is_classic
                else f"Group {name} not found."
            )
            return row
        row.update(
            group_state=group.state(),
            group_epoch=group.epoch,
            assignment_epoch=group.assignment_epoch,
            assignor_name=group.assignor or self._rules.settings.assignors[0],
            members=[self._member(group, m) for m in group.members.values()],
        )
        return row

    def _member(self, group: ConsumerGroup, m: ConsumerMember) -> dict[str, Any]:
        names = group.names()
        return {
            "member_id": m.member_id,
            "instance_id": m.instance_id,
            "rack_id": m.rack_id,
            "member_epoch": m.epoch,
            "client_id": m.client_id,
            "client_host": m.client_host,
            "subscribed_topic_names": sorted(m.topics),
            "subscribed_topic_regex": m.regex or "",
            "assignment": {"topic_partitions": _named(m.assigned, names)},
            "target_assignment": {"topic_partitions": _named(group.target(m), names)},
            "member_type": 1 if m.classic is None else 0,
        }

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        if not self._groups.has_consumer_protocol:
            return ()
        return (
            ("ConsumerGroupHeartbeat", self.heartbeat, True),
            ("ConsumerGroupDescribe", self.describe, True),
        )


def _owned(topics: Any) -> frozenset[Partition] | None:
    if topics is None:
        return None
    return frozenset((t.topic_id, index) for t in topics for index in t.partitions)


def _by_topic(partitions: Iterable[Partition]) -> list[dict[str, Any]]:
    topics: dict[Any, list[int]] = {}
    for topic_id, index in sorted(partitions):
        topics.setdefault(topic_id, []).append(index)
    return [{"topic_id": t, "partitions": indexes} for t, indexes in topics.items()]


def _named(partitions: Iterable[Partition], names: dict[object, str]) -> list[dict[str, Any]]:
    """The same with names; topics that are gone are left out."""
    rows = [{**row, "topic_name": names.get(row["topic_id"])} for row in _by_topic(partitions)]
    return [row for row in rows if row["topic_name"] is not None]
