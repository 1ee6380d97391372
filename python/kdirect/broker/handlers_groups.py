"""Requests about membership in consumer groups, and the life of groups.

Turns requests into events of the group coordinator and carries out its effects; what groups commit
is the business of `kdirect.broker.handlers_offsets`, lists and descriptions of groups that of
`handlers_group_admin`, and who coordinates what that of `handlers_coordinators`.  Joining and
syncing may wait for other members: such a request is answered through a future, which is the
coordinator's token for it.  A group that another broker coordinates is answered with
NOT_COORDINATOR, upon which clients look for its coordinator again; which groups are this broker's,
`kdirect.broker.coordinator_partitions` knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.changed_properties import Kind, value_of_group
from kdirect.broker.classic_members import ClassicMembers
from kdirect.broker.connection import Connection
from kdirect.broker.consumer_group_state import ConsumerGroup, ConsumerMember
from kdirect.broker.consumer_group_state import load as load_group
from kdirect.broker.consumer_groups import (
    NEW_MEMBERS_COMMIT_FROM,
    ConsumerGroupCoordinator,
    ConsumerGroupSettings,
    HeartbeatResult,
)
from kdirect.broker.coordinator_partitions import CoordinatorPartitions
from kdirect.broker.failures import explain
from kdirect.broker.group_saves import GroupSaves
from kdirect.broker.group_state import (
    EMPTY,
    FOREVER,
    STABLE,
    Group,
    JoinResult,
    Member,
    SyncResult,
)
from kdirect.broker.group_topics import BrokerTopics
from kdirect.broker.groups import (
    Effect,
    GroupCoordinator,
    GroupSettings,
    Persist,
    Reply,
    SaveRows,
)
from kdirect.broker.handlers_offsets import OffsetHandlers
from kdirect.broker.offsets import LoadedGroup
from kdirect.broker.services import Services
from kdirect.broker.state_replication import StateReplication
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.consumer_group_records import ClassicProtocols
from kdirect.format.error_codes import ErrorCode
from kdirect.format.group_records import GroupRecord, MemberRecord

log = logging.getLogger("kdirect.broker.groups")


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
        protocols = config["group.coordinator.rebalance.protocols"]
        self.has_consumer_protocol = "consumer" in protocols
        policy = config["group.consumer.migration.policy"]
        self.consumer = ConsumerGroupCoordinator(
            ConsumerGroupSettings(
                session_timeout_ms=config["group.consumer.session.timeout.ms"],
                heartbeat_interval_ms=config["group.consumer.heartbeat.interval.ms"],
                max_size=config["group.consumer.max.size"],
                assignors=tuple(config["group.consumer.assignors"]),
                upgrades=policy in ("bidirectional", "upgrade"),
                downgrades=policy in ("bidirectional", "downgrade"),
            ),
            BrokerTopics(services.topics),
            self.coordinator,
            self._timing_of,
        )
        self._classic_members = ClassicMembers(self.consumer)
        self._saves = GroupSaves(self._offsets.save_rows)
        self.partitions = self._open_partitions(services)
        self._offset_requests = OffsetHandlers(services, self)
        # Told of whatever happens to a group, before anybody else is (`CommitSlots.look`).
        self.happened: Callable[[str], None] = lambda group_id: None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = FOREVER

    def now(self) -> float:
        """The coordinator's clock, in ms."""
        return self._environment.monotonic() * 1000

    def _timing_of(self, group_id: str) -> tuple[int, int]:
        """(session timeout, heartbeat interval) in ms of a group of the new protocol."""
        own = self._services.properties.of(Kind.GROUP, group_id)
        config = self._services.config
        return (
            value_of_group("consumer.session.timeout.ms", own, config),
            value_of_group("consumer.heartbeat.interval.ms", own, config),
        )

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Before the broker serves.  CorruptLogError names a record of groups that cannot be read.
        A broker of a cluster reads when it is elected."""
        if self._services.replicas is None:
            self.partitions.start_alone()
            await self._offsets.forget_missing_topics()

    def _open_partitions(self, services: Services) -> CoordinatorPartitions:
        """Which groups are this broker's.  In a cluster that changes with leaderships, and what
        groups commit is committed by replicas."""
        on_thread, replicas = services.files.for_partition, services.replicas
        if replicas is None:
            return CoordinatorPartitions(OFFSETS_TOPIC, services.offsets, self, on_thread)
        replication = StateReplication(replicas, services.flusher.begin)
        services.offsets.join_cluster(replication)
        topics: Any = services.topics  # of a member
        partitions = CoordinatorPartitions(
            OFFSETS_TOPIC,
            services.offsets,
            self,
            on_thread,
            replication=replication,
            create_topic=self._create_topic,
            set_right=partial(topics.set_right, OFFSETS_TOPIC, services.offsets.topic_configs),
        )
        replicas.on_lead.append(partitions.elected)
        replicas.on_resign.append(partitions.resigned)
        replicas.on_high_watermark.append(partitions.moved)
        if services.membership is not None:
            from kdirect.broker.deleted_topics import DeletedTopics

            deleted = DeletedTopics(services.offsets.forget_topic, lambda: partitions.active)
            services.membership.subscribe(deleted.follow)
        return partitions

    async def _create_topic(self) -> Any:
        config = self._services.config
        topics: Any = self._services.topics  # of a member
        return await topics.create_everywhere(
            OFFSETS_TOPIC,
            config["offsets.topic.num.partitions"],
            config["offsets.topic.replication.factor"],
            self._offsets.topic_configs,
        )

    def restore(self, loaded: Iterable[LoadedGroup]) -> None:
        """Groups as they were when their coordinator stopped: members go on with their heartbeats,
        or their sessions end."""
        now = self.now()
        for item in loaded:
            found = load_group(item.group_id, item.rows) if item.rows else None
            if found is not None:
                self.consumer.restore(found, now)
                self._arm(found.group_id)
                continue
            r = item.record
            if r is None:
                continue
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

    def give_up(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker coordinates these groups: their members are told, and look for it."""
        gone = [name for name in self.consumer.groups if is_gone(name)]
        self.consumer.give_up(gone)
        self._saves.forget(gone)
        names = [name for name in self.coordinator.groups if is_gone(name)]
        self.run("", self.coordinator.give_up(names))

    def close(self) -> None:
        """Answer every request that waits: the broker stops, so that the coordinator will be
        another broker, or this one again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.partitions.close()
        self._reply(self.coordinator.give_up(list(self.coordinator.groups)))

    def refusal(self, group: str) -> int:
        """Why nothing may be said of a group here; NONE: its coordinator is this broker."""
        if self._services.replicas is None and not self._cluster.coordinates(group):
            return ErrorCode.NOT_COORDINATOR
        return self.partitions.refusal(group)

    def still_commits(
        self, group: str, generation: int, member_id: str, instance_id: str | None
    ) -> bool:
        """What `may_commit` would say of a member, whose request was judged before, as its group is
        now; nothing happens to either."""
        found = self.consumer.groups.get(group)
        if found is not None:
            version = NEW_MEMBERS_COMMIT_FROM
            return not self.consumer.check_commit(found, member_id, generation, version)
        classic = self.coordinator.groups.get(group)
        return classic is not None and classic.takes_commits(generation, member_id, instance_id)

    def find(self, group: str) -> Group | None:
        """A group as it is at this moment."""
        self.expire_due()
        return self.coordinator.groups.get(group)

    def find_consumer(self, group: str) -> ConsumerGroup | None:
        """The same of a group of the new protocol."""
        self.expire_due()
        return self.consumer.groups.get(group)

    def may_commit(
        self,
        group: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        version: int = NEW_MEMBERS_COMMIT_FROM,
    ) -> int:
        """May this member commit offsets of the group now?  An error code.  `version`: that of an
        OffsetCommit; in a transaction members of both protocols commit alike."""
        if error := self.refusal(group):
            return error
        found = self.consumer.groups.get(group)
        if found is not None:
            return self.consumer.check_commit(found, member_id, generation, version)
        error = self.coordinator.check_commit(group, generation, member_id, instance_id, self.now())
        self._arm(group)
        return error

    def may_fetch(self, group: str, member_id: str | None, epoch: int) -> int:
        """May this member be told what the group has committed?  An error code."""
        found = self.consumer.groups.get(group)
        return 0 if found is None else self.consumer.check_fetch(found, member_id, epoch)

    def run(self, group_id: str, effects: list[Effect]) -> None:
        """Carry out effects, in order: what follows a `Persist` waits where that has to wait for
        room in the log, or for replicas."""
        self.happened(group_id)
        for i, effect in enumerate(effects):
            rest = effects[i + 1 :]
            if isinstance(effect, Persist):
                group = effect.group
                if self.coordinator.groups.get(group.group_id) is not group:
                    continue  # given up, or deleted, while the effect waited
                saved = self._persist(group)
                if not saved.done():
                    saved.add_done_callback(partial(self._run_rest, group_id, rest))
                    break
            elif isinstance(effect, SaveRows):
                saved = self._saves.save(effect)
                if not saved.done() or saved.exception() is not None:
                    then = partial(self._run_rest, group_id, rest, must_be_saved=True)
                    saved.add_done_callback(then)
                    break
            else:
                self._reply([effect])
        self._arm(group_id)

    def _reply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                token: Any = effect.token
                if not token.done():
                    token.set_result(effect.result)

    def _run_rest(
        self,
        group_id: str,
        effects: list[Effect],
        saved: asyncio.Future[Any],
        *,
        must_be_saved: bool = False,
    ) -> None:
        """Go on after a `Persist` or a `SaveRows`.  Where the broker is alone, a classic group
        works on even if it could not be saved.  In a cluster members must not begin a generation
        that the next coordinator may know nothing of: they look for the coordinator, and join
        again.  A group of the new protocol never tells what is not saved, or a restart could give
        the same partitions to another member."""
        error = None if saved.cancelled() else saved.exception()
        if error is not None and (must_be_saved or self._services.replicas is not None):
            if must_be_saved:
                explain(error, f"saving of group {group_id}")
            code = self.refusal(group_id) or ErrorCode.COORDINATOR_NOT_AVAILABLE
            effects = [_refused(effect, code) for effect in effects]
        self.run(group_id, effects)

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
        # The other groups work on, and this one as `_run_rest` says; after a restart its members
        # have to join again.
        error = None if saved.cancelled() else saved.exception()
        if error is not None:
            explain(error, f"saving of group {group_id}")

    def _arm(self, group_id: str) -> None:
        """Have the timer fire at the group's next deadline, if that is earlier than what it is set
        to."""
        at = min(self.coordinator.deadline(group_id), self.consumer.deadline(group_id))
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, (at - self.now()) / 1000), self._expire
        )

    def _expire(self) -> None:
        self._timer = None
        self._timer_at = FOREVER
        try:
            self._run_expired()
        finally:  # the timer is that of all groups
            for group_id in [*self.coordinator.groups, *self.consumer.groups]:
                self._arm(group_id)

    def _run_expired(self) -> None:
        now = self.now()
        for machine in (self.coordinator, self.consumer):
            self.run("", machine.expire(now))

    def expire_due(self) -> None:
        """Before a group is judged: requests are read before timers fire, and a session that has
        ended is over whether or not its timer has had its turn."""
        self._run_expired()

    async def expire_offsets(self) -> None:
        """Forget offsets that are too old; a coordinator does so for its own groups only."""
        try:
            await self._expire_offsets()
        except KdirectError as e:
            if self._services.replicas is None:
                raise
            log.info("offsets were not looked through to the end, the next time will be: %s", e)

    async def _expire_offsets(self) -> None:
        """Forget the offsets of groups that have been empty for `offsets.retention.minutes`."""
        retention_ms = self._services.config["offsets.retention.minutes"] * 60_000
        now, wall = self.now(), self._environment.time_ms()
        store = self._offsets
        for group_id in store.groups():
            new = self.consumer.groups.get(group_id)
            if new is not None and (new.members or now - new.since_ms < retention_ms):
                continue
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
                and not store.has_offsets(group.group_id)
            ):
                await store.forget_group(group.group_id)
                self.coordinator.remove_empty(group)
        for new in list(self.consumer.groups.values()):
            old = not new.members and now - new.since_ms >= retention_ms
            if old and not store.has_offsets(new.group_id):
                await self.delete_consumer(new.group_id)

    async def delete_consumer(self, group_id: str) -> None:
        """Delete a group of the new protocol with all its offsets, unless it has members.
        KdirectError: its records may be there, and so it is still there, too."""
        group = self.consumer.groups.get(group_id)
        if group is None or not self.consumer.forget_empty(group_id):
            return
        self._saves.forget((group_id,))
        try:
            await self._offsets.forget_group(group_id)
        except KdirectError:
            if not self.refusal(group_id) and group_id not in self.coordinator.groups:
                self.consumer.groups.setdefault(group_id, group)
            raise

    # -- membership --------------------------------------------------------------------------------

    def join(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        if error := self.refusal(request.group_id):
            return self._joined(header, JoinResult(error, member_id=request.member_id))
        future: asyncio.Future[JoinResult] = asyncio.get_running_loop().create_future()
        rebalance = request.rebalance_timeout_ms if version >= 1 else request.session_timeout_ms
        instance_id = request.group_instance_id if version >= 5 else None
        host = "/" + connection.peer.rpartition(":")[0]
        protocols = [(x.name, x.metadata) for x in request.protocols]
        group = self._group_to_join(request.group_id)
        if group is None:
            effects = self.coordinator.join(
                future,
                request.group_id,
                request.member_id,
                instance_id,
                header.client_id or "",
                host,
                request.session_timeout_ms,
                max(0, rebalance),
                request.protocol_type,
                protocols,
                self.now(),
                require_member_id=version >= 4,
                understands_skip=version >= 9,
            )
        else:
            kept = tuple((name, bytes(metadata)) for name, metadata in protocols)
            fresh = ConsumerMember(
                request.member_id,
                instance_id,
                client_id=header.client_id or "",
                client_host=host,
                rebalance_timeout_ms=max(0, rebalance),
                classic=ClassicProtocols(request.session_timeout_ms, kept),
            )
            effects = self._classic_members.join(
                future,
                group,
                fresh,
                request.protocol_type,
                self.now(),
                require_member_id=version >= 4,
            )
        self.run(request.group_id, effects)
        if future.done():
            return self._joined(header, future.result())
        return later(self._join_later(header, future))

    def _group_to_join(self, group_id: str) -> ConsumerGroup | None:
        """The group of the new protocol that a member of the classic one joins.  One without
        members changes to the classic protocol first."""
        group = self.consumer.groups.get(group_id)
        if group is None or group.members:
            return group
        rows = self.consumer.forget_empty(group_id)
        self.run(group_id, [SaveRows(group_id, tuple(rows))])
        return None

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
        if error := self.refusal(request.group_id):
            return self._synced(header, SyncResult(error))
        future: asyncio.Future[SyncResult] = asyncio.get_running_loop().create_future()
        group = self.consumer.groups.get(request.group_id)
        instance_id = request.group_instance_id if version >= 3 else None
        protocol_type = request.protocol_type if version >= 5 else None
        protocol = request.protocol_name if version >= 5 else None
        member = (request.generation_id, request.member_id, instance_id, protocol_type, protocol)
        if group is not None:
            effects = self._classic_members.sync(future, group, *member, self.now())
        else:
            given = [(a.member_id, a.assignment) for a in request.assignments]
            effects = self.coordinator.sync(future, request.group_id, *member, given, self.now())
        self.run(request.group_id, effects)
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
        if error := self.refusal(request.group_id):
            # As Kafka: a member has nothing to do but wait, and some clients (aiokafka) end with
            # this code.
            if error == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                error = ErrorCode.NONE
            return respond(header, p.HeartbeatResponse, error_code=error)
        instance = request.group_instance_id if header.api_version >= 3 else None
        group = self.consumer.groups.get(request.group_id)
        member = (request.generation_id, request.member_id, instance)
        if group is not None:
            code = self._classic_members.heartbeat(group, *member, self.now())
            self._arm(request.group_id)
        else:
            code = self.coordinator.heartbeat(request.group_id, *member, self.now())
        return respond(header, p.HeartbeatResponse, error_code=code)

    def leave(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if error := self.refusal(request.group_id):
            return respond(header, p.LeaveGroupResponse, error_code=error, members=[])
        now = self.now()
        if header.api_version < 3:
            code = self._leave(request.group_id, request.member_id, None, now)
            return respond(header, p.LeaveGroupResponse, error_code=code)
        rows = []
        for m in request.members:
            code = self._leave(request.group_id, m.member_id, m.group_instance_id, now)
            rows.append(
                {
                    "member_id": m.member_id,
                    "group_instance_id": m.group_instance_id,
                    "error_code": code,
                }
            )
        return respond(header, p.LeaveGroupResponse, error_code=0, members=rows)

    def _leave(self, group_id: str, member_id: str, instance_id: str | None, now: float) -> int:
        """One member leaves; an error code."""
        group = self.consumer.groups.get(group_id)
        if group is not None:
            code, effects = self._classic_members.leave(group, member_id, instance_id, now)
        else:
            code, effects = self.coordinator.leave(group_id, member_id, instance_id, now)
        self.run(group_id, effects)
        return code

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        return (
            ("JoinGroup", self.join, True),
            ("SyncGroup", self.sync, True),
            ("Heartbeat", self.heartbeat, True),
            ("LeaveGroup", self.leave, True),
            *self._offset_requests.table(),
        )


def _refused(effect: Effect, code: int) -> Effect:
    """The reply, with an error in place of what it would have said."""
    if not isinstance(effect, Reply):
        return effect
    if isinstance(effect.result, HeartbeatResult):
        return Reply(effect.token, HeartbeatResult(code))
    if isinstance(effect.result, SyncResult):
        return Reply(effect.token, SyncResult(code))
    return Reply(effect.token, JoinResult(code, member_id=effect.result.member_id))
