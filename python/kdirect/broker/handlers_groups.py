"""Requests about consumer groups: membership, offsets, administration.

Turns requests into events of the group coordinator and carries out its effects; offsets go to the
offset store.  Joining and syncing may wait for other members: such a request is answered through a
future, which is the coordinator's token for it.  A group that another broker coordinates is
answered with NOT_COORDINATOR, upon which clients look for its coordinator again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.group_state import (
    COMPLETING,
    DEAD,
    EMPTY,
    FOREVER,
    PREPARING,
    STABLE,
    Group,
    JoinResult,
    Member,
    SyncResult,
)
from kdirect.broker.groups import Effect, GroupCoordinator, GroupSettings, Persist
from kdirect.broker.offsets import LoadedGroup
from kdirect.broker.services import Services
from kdirect.errors import FormatError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.group_records import (
    CommittedOffset,
    GroupRecord,
    MemberRecord,
    subscribed_topics,
)
from kdirect.format.protocol import ErrorCode
from kdirect.model import TopicPartition

GROUP_KEY = 0
TRANSACTION_KEY = 1


class GroupHandlers:
    """Handlers about groups; one for the broker."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._offsets = services.offsets
        self._cluster = services.cluster
        self._environment = services.environment
        config = services.config
        self.coordinator = GroupCoordinator(
            GroupSettings(
                min_session_timeout_ms=config["group.min.session.timeout.ms"],
                max_session_timeout_ms=config["group.max.session.timeout.ms"],
                initial_rebalance_delay_ms=config["group.initial.rebalance.delay.ms"],
                max_size=config["group.max.size"],
            )
        )
        self._metadata_max: int = config["offset.metadata.max.bytes"]
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = FOREVER

    def _clock_ms(self) -> float:
        """The coordinator's clock."""
        return self._environment.monotonic() * 1000

    # -- life --------------------------------------------------------------------------------------

    def restore(self, loaded: Iterable[LoadedGroup]) -> None:
        """Groups as they were when the broker stopped: members go on with their heartbeats, or
        their sessions end."""
        now = self._clock_ms()
        for item in loaded:
            r = item.record
            group = Group(
                item.group_id,
                generation=r.generation,
                protocol_type=r.protocol_type or None,
                protocol=r.protocol,
                leader=r.leader,
                since_ms=now,
            )
            for m in r.members:
                group.members[m.member_id] = Member(
                    m.member_id,
                    m.instance_id,
                    m.client_id,
                    m.client_host,
                    m.session_timeout_ms,
                    m.rebalance_timeout_ms,
                    [(r.protocol or "", m.subscription)],
                    m.assignment,
                    deadline=now + m.session_timeout_ms,
                )
                if m.instance_id is not None:
                    group.static[m.instance_id] = m.member_id
            group.state = STABLE if group.members else EMPTY
            self.coordinator.groups[group.group_id] = group
            self._arm(group.group_id)

    def close(self) -> None:
        """Answer every request that waits: the broker stops, so that the coordinator will be
        another broker, or this one again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for group in self.coordinator.groups.values():
            for m in group.members.values():
                for token, result in (
                    (m.join_token, JoinResult(ErrorCode.NOT_COORDINATOR, member_id=m.member_id)),
                    (m.sync_token, SyncResult(ErrorCode.NOT_COORDINATOR)),
                ):
                    if isinstance(token, asyncio.Future) and not token.done():
                        token.set_result(result)

    def _run(self, group_id: str, effects: list[Effect]) -> None:
        """Carry out effects, in order: what follows a `Persist` waits where that has to wait for
        room in the log."""
        for i, effect in enumerate(effects):
            if isinstance(effect, Persist):
                saved = self._persist(effect.group)
                if not saved.done():
                    saved.add_done_callback(partial(self._run_rest, group_id, effects[i + 1 :]))
                    break
            else:
                token: Any = effect.token
                if not token.done():
                    token.set_result(effect.result)
        self._arm(group_id)

    def _run_rest(self, group_id: str, effects: list[Effect], saved: asyncio.Future[Any]) -> None:
        self._run(group_id, effects)

    def _persist(self, group: Group) -> asyncio.Future[Any]:
        members = tuple(
            MemberRecord(
                m.member_id,
                m.instance_id,
                m.client_id,
                m.client_host,
                m.rebalance_timeout_ms,
                m.session_timeout_ms,
                m.metadata(group.protocol),
                m.assignment,
            )
            for m in group.members.values()
        )
        record = GroupRecord(
            group.protocol_type or "",
            group.generation,
            group.protocol,
            group.leader,
            self._environment.time_ms(),
            members,
        )
        try:
            saved = self._offsets.save_group(group.group_id, record)
        except Exception as e:
            saved = asyncio.get_running_loop().create_future()
            saved.set_exception(e)
        saved.add_done_callback(partial(self._saved, group.group_id))
        return saved

    def _saved(self, group_id: str, saved: asyncio.Future[Any]) -> None:
        # The group works on, and so do the others; after a restart its members have to join again.
        error = None if saved.cancelled() else saved.exception()
        if error is not None:
            explain(error, f"saving of group {group_id}")

    def _arm(self, group_id: str) -> None:
        """Have the timer fire at the group's next deadline, if that is earlier than what it is set
        to."""
        at = self.coordinator.deadline(group_id)
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, (at - self._clock_ms()) / 1000), self._expire
        )

    def _expire(self) -> None:
        self._timer = None
        self._timer_at = FOREVER
        try:
            self._run("", self.coordinator.expire(self._clock_ms()))
        finally:  # the timer is that of all groups
            for group_id in list(self.coordinator.groups):
                self._arm(group_id)

    def _expire_due(self) -> None:
        """Before a group is judged: requests are read before timers fire, and a session that has
        ended is over whether or not its timer has had its turn."""
        self._run("", self.coordinator.expire(self._clock_ms()))

    async def expire_offsets(self) -> None:
        """Forget the offsets of groups that have been empty for `offsets.retention.minutes`."""
        retention_ms = self._services.config["offsets.retention.minutes"] * 60_000
        now, wall = self._clock_ms(), self._environment.time_ms()
        store = self._offsets
        for group_id in store.groups():
            group = self.coordinator.groups.get(group_id)
            if group is not None and (
                group.state != EMPTY
                or (group.generation > 0 and now - group.since_ms < retention_ms)
            ):
                continue
            await store.expire(group_id, wall - retention_ms)
        for group in list(self.coordinator.groups.values()):
            if (
                group.state == EMPTY
                and not group.pending
                and now - group.since_ms >= retention_ms
                and not store.offsets(group.group_id)
            ):
                await store.forget_group(group.group_id)
                self.coordinator.remove_empty(group)

    # -- finding -----------------------------------------------------------------------------------

    def find_coordinator(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        own = self._services.listeners.address_for(connection.listener, connection.local[0])
        keys = request.coordinator_keys if header.api_version >= 4 else [request.key]
        rows = [self._coordinator_row(request.key_type, key, own) for key in keys]
        if header.api_version >= 4:
            return respond(header, p.FindCoordinatorResponse, coordinators=rows)
        row = rows[0]
        del row["key"]
        return respond(header, p.FindCoordinatorResponse, **row)

    def _coordinator_row(self, key_type: int, key: str, own: tuple[str, int]) -> dict[str, Any]:
        """`own`: where the client reaches this broker."""
        if key_type == GROUP_KEY:
            node = self._cluster.node(self._cluster.coordinator_of(key), own)
            return {
                "key": key,
                "node_id": node.node_id,
                "host": node.host,
                "port": node.port,
                "error_code": 0,
                "error_message": None,
            }
        code = (
            ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            if key_type == TRANSACTION_KEY
            else ErrorCode.INVALID_REQUEST
        )
        return {
            "key": key,
            "node_id": -1,
            "host": "",
            "port": -1,
            "error_code": code,
            "error_message": "this broker coordinates consumer groups;"
            " transactions are not available",
        }

    # -- membership --------------------------------------------------------------------------------

    def join(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        if not self._cluster.coordinates(request.group_id):
            elsewhere = JoinResult(ErrorCode.NOT_COORDINATOR, member_id=request.member_id)
            return self._joined(header, elsewhere)
        future: asyncio.Future[JoinResult] = asyncio.get_running_loop().create_future()
        rebalance = request.rebalance_timeout_ms if version >= 1 else request.session_timeout_ms
        effects = self.coordinator.join(
            future,
            request.group_id,
            request.member_id,
            request.group_instance_id if version >= 5 else None,
            header.client_id or "",
            "/" + connection.peer.rpartition(":")[0],
            request.session_timeout_ms,
            max(0, rebalance),
            request.protocol_type,
            [(x.name, x.metadata) for x in request.protocols],
            self._clock_ms(),
            require_member_id=version >= 4,
            understands_skip=version >= 9,
        )
        self._run(request.group_id, effects)
        if future.done():
            return self._joined(header, future.result())
        return later(self._join_later(header, future))

    async def _join_later(
        self, header: p.RequestHeader, future: asyncio.Future[JoinResult]
    ) -> Answer:
        return self._joined(header, await future)

    def _joined(self, header: p.RequestHeader, r: JoinResult) -> Answer:
        protocol = r.protocol if r.protocol is not None or header.api_version >= 7 else ""
        return respond(
            header,
            p.JoinGroupResponse,
            error_code=r.error,
            generation_id=r.generation,
            protocol_type=r.protocol_type,
            protocol_name=protocol,
            leader=r.leader,
            skip_assignment=r.skip_assignment,
            member_id=r.member_id,
            members=[
                {"member_id": m, "group_instance_id": i, "metadata": data}
                for m, i, data in r.members
            ],
        )

    def sync(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        if not self._cluster.coordinates(request.group_id):
            return self._synced(header, SyncResult(ErrorCode.NOT_COORDINATOR))
        future: asyncio.Future[SyncResult] = asyncio.get_running_loop().create_future()
        effects = self.coordinator.sync(
            future,
            request.group_id,
            request.generation_id,
            request.member_id,
            request.group_instance_id if version >= 3 else None,
            request.protocol_type if version >= 5 else None,
            request.protocol_name if version >= 5 else None,
            [(a.member_id, a.assignment) for a in request.assignments],
            self._clock_ms(),
        )
        self._run(request.group_id, effects)
        if future.done():
            return self._synced(header, future.result())
        return later(self._sync_later(header, future))

    async def _sync_later(
        self, header: p.RequestHeader, future: asyncio.Future[SyncResult]
    ) -> Answer:
        return self._synced(header, await future)

    def _synced(self, header: p.RequestHeader, r: SyncResult) -> Answer:
        return respond(
            header,
            p.SyncGroupResponse,
            error_code=r.error,
            protocol_type=r.protocol_type,
            protocol_name=r.protocol,
            assignment=r.assignment,
        )

    def heartbeat(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if not self._cluster.coordinates(request.group_id):
            return respond(header, p.HeartbeatResponse, error_code=ErrorCode.NOT_COORDINATOR)
        instance = request.group_instance_id if header.api_version >= 3 else None
        code = self.coordinator.heartbeat(
            request.group_id, request.generation_id, request.member_id, instance, self._clock_ms()
        )
        return respond(header, p.HeartbeatResponse, error_code=code)

    def leave(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if not self._cluster.coordinates(request.group_id):
            elsewhere = ErrorCode.NOT_COORDINATOR
            return respond(header, p.LeaveGroupResponse, error_code=elsewhere, members=[])
        now = self._clock_ms()
        if header.api_version < 3:
            code, effects = self.coordinator.leave(request.group_id, request.member_id, None, now)
            self._run(request.group_id, effects)
            return respond(header, p.LeaveGroupResponse, error_code=code)
        rows = []
        for m in request.members:
            code, effects = self.coordinator.leave(
                request.group_id, m.member_id, m.group_instance_id, now
            )
            self._run(request.group_id, effects)
            rows.append(
                {
                    "member_id": m.member_id,
                    "group_instance_id": m.group_instance_id,
                    "error_code": code,
                }
            )
        return respond(header, p.LeaveGroupResponse, error_code=0, members=rows)

    # -- offsets -----------------------------------------------------------------------------------

    def offset_commit(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        version = header.api_version
        error = self._check_commit(header, request)
        now = self._environment.time_ms()
        offsets: dict[TopicPartition, CommittedOffset] = {}
        rows = []
        for t in request.topics:
            parts = []
            for x in t.partitions:
                code = error or self._check_offset(t.name, x)
                if not code:
                    epoch = x.committed_leader_epoch if version >= 6 else -1
                    offsets[TopicPartition(t.name, x.partition_index)] = CommittedOffset(
                        x.committed_offset, epoch, x.committed_metadata or "", now
                    )
                parts.append({"partition_index": x.partition_index, "error_code": code})
            rows.append({"name": t.name, "partitions": parts})
        committed = self._offsets.commit(request.group_id, offsets)
        if committed.done() and committed.exception() is None:
            partition = committed.result()
            if partition is None or not partition.acknowledgements_wait():
                return respond(header, p.OffsetCommitResponse, topics=rows)
        return later(self._committed_later(header, committed, rows))

    def _check_commit(self, header: p.RequestHeader, request: Any) -> int:
        """May this member commit offsets of the group now?  An error code."""
        if not self._cluster.coordinates(request.group_id):
            return ErrorCode.NOT_COORDINATOR
        error = self.coordinator.check_commit(
            request.group_id,
            request.generation_id_or_member_epoch,
            request.member_id,
            request.group_instance_id if header.api_version >= 7 else None,
            self._clock_ms(),
        )
        self._arm(request.group_id)
        return error

    async def _committed_later(
        self, header: p.RequestHeader, committed: Awaitable[Any], rows: list[dict[str, Any]]
    ) -> Answer:
        try:
            partition = await committed
            if partition is not None and partition.acknowledgements_wait():
                await self._services.flusher.flushed(partition)
        except (KdirectError, OSError) as e:
            self._fail_rows(rows, e)
        return respond(header, p.OffsetCommitResponse, topics=rows)

    def _fail_rows(self, rows: list[dict[str, Any]], error: BaseException) -> None:
        explain(error, "a commit of offsets")
        for row in rows:
            for part in row["partitions"]:
                # Kafka's clients retry this one; they do not expect a storage error from a
                # coordinator.
                part["error_code"] = part["error_code"] or ErrorCode.COORDINATOR_NOT_AVAILABLE

    def _check_offset(self, topic: str, x: Any) -> int:
        if len((x.committed_metadata or "").encode()) > self._metadata_max:
            return ErrorCode.OFFSET_METADATA_TOO_LARGE
        known = self._services.topics.find(topic)
        if known is None or known.deleting or not 0 <= x.partition_index < known.partition_count:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return 0

    def offset_fetch(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if header.api_version >= 8:
            groups = [
                {"group_id": g.group_id, **self._fetched_or_error(g.group_id, g.topics)}
                for g in request.groups
            ]
            return respond(header, p.OffsetFetchResponse, groups=groups)
        fields = self._fetched_or_error(request.group_id, request.topics)
        return respond(header, p.OffsetFetchResponse, **fields)

    def _fetched_or_error(self, group: str, topics: Any) -> dict[str, Any]:
        if not self._cluster.coordinates(group):
            return {"topics": [], "error_code": ErrorCode.NOT_COORDINATOR}
        return {"topics": self._fetched(group, topics), "error_code": 0}

    def _fetched(self, group: str, topics: Any) -> list[dict[str, Any]]:
        known = self._offsets.offsets(group)
        wanted: dict[str, list[int]] = {}
        if topics is None:
            for tp in known:
                wanted.setdefault(tp.topic, []).append(tp.partition)
        else:
            for t in topics:
                wanted.setdefault(t.name, []).extend(t.partition_indexes)
        rows = []
        for name, indexes in wanted.items():
            parts = []
            for i in indexes:
                c = known.get(TopicPartition(name, i)) or CommittedOffset(-1, -1, "", 0)
                parts.append(
                    {
                        "partition_index": i,
                        "committed_offset": c.offset,
                        "committed_leader_epoch": c.leader_epoch,
                        "metadata": c.metadata,
                        "error_code": 0,
                    }
                )
            rows.append({"name": name, "partitions": parts})
        return rows

    def offset_delete(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._offset_delete(header, request))

    async def _offset_delete(self, header: p.RequestHeader, request: Any) -> Answer:
        if not self._cluster.coordinates(request.group_id):
            code = ErrorCode.NOT_COORDINATOR
            return respond(header, p.OffsetDeleteResponse, error_code=code, topics=[])
        self._expire_due()
        group = self.coordinator.groups.get(request.group_id)
        if group is None and request.group_id not in self._offsets.groups():
            code = ErrorCode.GROUP_ID_NOT_FOUND
            return respond(header, p.OffsetDeleteResponse, error_code=code, topics=[])
        used: frozenset[str] = frozenset()
        if group is not None and group.members:
            if group.protocol_type != "consumer":
                code = ErrorCode.NON_EMPTY_GROUP
                return respond(header, p.OffsetDeleteResponse, error_code=code, topics=[])
            used = self._subscribed(group)
        gone, rows = [], []
        for t in request.topics:
            code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if t.name in used else ErrorCode.NONE
            if not code:
                gone += [TopicPartition(t.name, x.partition_index) for x in t.partitions]
            rows.append(
                {
                    "name": t.name,
                    "partitions": [
                        {"partition_index": x.partition_index, "error_code": code}
                        for x in t.partitions
                    ],
                }
            )
        try:
            await self._offsets.forget(request.group_id, gone)
        except KdirectError as e:
            failure = explain(e, "deletion of offsets")[0]
            return respond(header, p.OffsetDeleteResponse, error_code=failure, topics=[])
        return respond(header, p.OffsetDeleteResponse, error_code=0, topics=rows)

    def _subscribed(self, group: Group) -> frozenset[str]:
        out: set[str] = set()
        for m in group.members.values():
            try:
                out |= subscribed_topics(
                    m.metadata(group.protocol or (m.protocols[0][0] if m.protocols else None))
                )
            except FormatError:  # a client's own format: we cannot tell
                pass
        return frozenset(out)

    # -- administration ----------------------------------------------------------------------------

    def list_groups(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        self._expire_due()
        states = {s.lower() for s in request.states_filter} if header.api_version >= 4 else set()
        types = {t.lower() for t in request.types_filter} if header.api_version >= 5 else set()
        rows = []
        for name in sorted({*self.coordinator.groups, *self._offsets.groups()}):
            if not self._cluster.coordinates(name):  # another broker lists it
                continue
            group = self.coordinator.groups.get(name)
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
        return respond(header, p.ListGroupsResponse, error_code=0, groups=rows)

    def describe_groups(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        self._expire_due()
        return respond(
            header,
            p.DescribeGroupsResponse,
            groups=[self._describe(g, header.api_version) for g in request.groups],
        )

    def _describe(self, name: str, version: int) -> dict[str, Any]:
        group = self.coordinator.groups.get(name)
        out: dict[str, Any] = {
            "error_code": 0,
            "error_message": None,
            "group_id": name,
            "group_state": DEAD,
            "protocol_type": "",
            "protocol_data": "",
            "members": [],
        }
        if not self._cluster.coordinates(name):
            out["error_code"] = ErrorCode.NOT_COORDINATOR
            return out
        if group is None:
            if name in self._offsets.groups():
                out["group_state"] = EMPTY
            elif version >= 6:
                out.update(
                    error_code=ErrorCode.GROUP_ID_NOT_FOUND,
                    error_message=f"there is no group {name}",
                )
            return out
        stable = group.state in (STABLE, COMPLETING)
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
        self._expire_due()
        rows = [{"group_id": g, "error_code": await self._delete(g)} for g in request.groups_names]
        return respond(header, p.DeleteGroupsResponse, results=rows)

    async def _delete(self, name: str) -> int:
        if not self._cluster.coordinates(name):
            return ErrorCode.NOT_COORDINATOR
        group = self.coordinator.groups.get(name)
        if group is None and name not in self._offsets.groups():
            return ErrorCode.GROUP_ID_NOT_FOUND
        if group is not None and (group.members or group.state in (PREPARING, COMPLETING, STABLE)):
            return ErrorCode.NON_EMPTY_GROUP
        try:
            await self._offsets.forget_group(name)
        except KdirectError as e:
            return explain(e, f"deletion of group {name}")[0]
        if group is not None:
            self.coordinator.remove_empty(group)
        return 0

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("FindCoordinator", self.find_coordinator, True),
            ("JoinGroup", self.join, True),
            ("SyncGroup", self.sync, True),
            ("Heartbeat", self.heartbeat, True),
            ("LeaveGroup", self.leave, True),
            ("OffsetCommit", self.offset_commit, True),
            ("OffsetFetch", self.offset_fetch, True),
            ("OffsetDelete", self.offset_delete, True),
            ("ListGroups", self.list_groups, True),
            ("DescribeGroups", self.describe_groups, True),
            ("DeleteGroups", self.delete_groups, True),
        )
