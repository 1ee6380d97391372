"""Requests about groups as a whole: ListGroups, DescribeGroups, DeleteGroups.

Owns: the answers.  It reads the groups of this broker's coordinator and what they have committed,
and deletes groups that nobody is a member of.  Sessions that are over end first, so that nobody is
told of a member that has gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.group_state import COMPLETING, DEAD, EMPTY, PREPARING, STABLE
from kdirect.broker.handlers_groups import GroupHandlers
from kdirect.broker.offsets import OffsetStore
from kdirect.broker.operations import ON_GROUP, allowed
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode


class GroupAdminHandlers:
    """See the module.  One for the broker, used on its event loop."""

    def __init__(self, groups: GroupHandlers, offsets: OffsetStore) -> None:
        self._groups = groups
        self._offsets = offsets

    def list_groups(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        self._groups.expire_due()
        states = {s.lower() for s in request.states_filter} if header.api_version >= 4 else set()
        types = {t.lower() for t in request.types_filter} if header.api_version >= 5 else set()
        rows = []
        new = self._groups.consumer.groups
        for name in sorted({*self._groups.coordinator.groups, *new, *self._offsets.groups()}):
            if self._groups.refusal(name):  # another broker lists it
                continue
            if name in new:
                state = new[name].state()
                if (not states or state.lower() in states) and (not types or "consumer" in types):
                    rows.append(
                        {
                            "group_id": name,
                            "protocol_type": "consumer",
                            "group_state": state,
                            "group_type": "consumer",
                        }
                    )
                continue
            group = self._groups.coordinator.groups.get(name)
            state = group.state if group is not None else EMPTY
            kind = (group.protocol_type if group is not None else None) or ""
            if (not states or state.lower() in states) and (not types or "classic" in types):
                rows.append(
                    {
                        "group_id": name,
                        "protocol_type": kind,
                        "group_state": state,
                        "group_type": "classic",
                    }
                )
        code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if self._groups.partitions.loading else 0
        return respond(header, p.ListGroupsResponse, error_code=code, groups=rows)

    def describe_groups(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        self._groups.expire_due()
        rows = [self._describe(g, header.api_version) for g in request.groups]
        for row in rows:
            asked = header.api_version >= 3 and request.include_authorized_operations
            row["authorized_operations"] = allowed(ON_GROUP, asked and not row["error_code"])
        return respond(header, p.DescribeGroupsResponse, groups=rows)

    def _describe(self, name: str, version: int) -> dict[str, Any]:
        group = self._groups.coordinator.groups.get(name)
        out: dict[str, Any] = {
            "error_code": 0,
            "error_message": None,
            "group_id": name,
            "group_state": DEAD,
            "protocol_type": "",
            "protocol_data": "",
            "members": [],
        }
        if error := self._groups.refusal(name):
            out["error_code"] = error
            return out
        new = name in self._groups.consumer.groups
        if new and version >= 6:
            out.update(
                error_code=ErrorCode.GROUP_ID_NOT_FOUND,
                error_message=f"Group {name} is not a classic group.",
            )
        elif new:
            pass  # as Kafka: clients that know no other groups take it for dead
        elif group is None:
            if name in self._offsets.groups():
                out["group_state"] = EMPTY
            elif version >= 6:
                out.update(
                    error_code=ErrorCode.GROUP_ID_NOT_FOUND,
                    error_message=f"there is no group {name}",
                )
        if group is None:
            return out
        stable = group.state == STABLE
        out.update(
            group_state=group.state,
            protocol_type=group.protocol_type or "",
            protocol_data=(group.protocol or "") if stable else "",
        )
        out["members"] = [
            {
                "member_id": m.member_id,
                "group_instance_id": m.instance_id,
                "client_id": m.client_id,
                "client_host": m.client_host,
                "member_metadata": m.metadata(group.protocol) if stable else b"",
                "member_assignment": m.assignment if group.state == STABLE else b"",
            }
            for m in group.members.values()
        ]
        return out

    def delete_groups(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._delete_groups(header, request))

    async def _delete_groups(self, header: p.RequestHeader, request: Any) -> Answer:
        self._groups.expire_due()
        names = dict.fromkeys(request.groups_names)
        rows = [{"group_id": g, "error_code": await self._delete(g)} for g in names]
        return respond(header, p.DeleteGroupsResponse, results=rows)

    async def _delete(self, name: str) -> int:
        if error := self._groups.refusal(name):
            return error
        group = self._groups.coordinator.groups.get(name)
        new = self._groups.consumer.groups.get(name)
        if new is not None and new.members:
            return ErrorCode.NON_EMPTY_GROUP
        if group is None and new is None and not self._offsets.has_offsets(name):
            return ErrorCode.GROUP_ID_NOT_FOUND
        if group is not None and (group.members or group.state in (PREPARING, COMPLETING, STABLE)):
            return ErrorCode.NON_EMPTY_GROUP
        try:
            if new is not None:
                await self._groups.delete_consumer(name)
            else:
                await self._offsets.forget_group(name)
        except KdirectError as e:
            return self._groups.refusal(name) or explain(e, f"deletion of group {name}")[0]
        if group is not None:
            self._groups.coordinator.remove_empty(group)
        return 0

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return (
            ("ListGroups", self.list_groups, True),
            ("DescribeGroups", self.describe_groups, True),
            ("DeleteGroups", self.delete_groups, True),
        )
