"""Kafka's classic consumer groups: who is a member, who leads, which generation.  Decisions only.

Owns: the state of groups.  No clock, no sockets, no storage enter: every call carries `now_ms` and
returns effects, which the caller carries out in order (`Persist` before the `Reply` that depends on
it).  A *token* is whatever the caller wants back in the reply to a request; the coordinator never
looks at it.

States (Kafka's names): Empty, PreparingRebalance (members join), CompletingRebalance (the leader
computes the assignment), Stable, Dead.  Invariants: a token handed in is answered exactly once; a
member is removed by leaving, by its session, or by a rebalance it misses; static members (with an
instance id) survive a missed rebalance; cooperative rebalancing needs nothing here, it is the
clients' reading of assignments.

Deadlines: `deadline(group)` is the next time at which `expire` has something to do.  Heartbeats
only move deadlines later, so a timer set for an old one fires early and is set again.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from kdirect.format.group_records import TEXT_BYTES
from kdirect.format.protocol import ErrorCode

EMPTY = "Empty"
PREPARING = "PreparingRebalance"
COMPLETING = "CompletingRebalance"
STABLE = "Stable"
DEAD = "Dead"

FOREVER = float("inf")
# As long as any suffix that a client id or an instance id gets to become a member id.
MEMBER_ID_SUFFIX = f"-{uuid.UUID(int=0)}"


def fits(name: str) -> bool:
    """May the name be in the group's record?  Newer versions of the protocol carry longer ones."""
    return len(name.encode()) <= TEXT_BYTES


@dataclass(frozen=True, slots=True)
class GroupSettings:
    min_session_timeout_ms: int = 6000
    max_session_timeout_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 0
    max_size: int = 2**31 - 1


@dataclass(slots=True)
class Member:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: list[tuple[str, bytes]]
    assignment: bytes = b""
    deadline: float = 0.0
    join_token: Hashable = None
    sync_token: Hashable = None

    def metadata(self, protocol: str | None) -> bytes:
        return next((m for name, m in self.protocols if name == protocol), b"")


@dataclass(slots=True)
class Group:
    group_id: str
    state: str = EMPTY
    generation: int = 0
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)  # instance id -> member id
    # Member ids that were given out and have not joined yet -> deadline.
    pending: dict[str, float] = field(default_factory=dict)
    # Members of this generation that have not asked for their assignment.
    unsynced: set[str] = field(default_factory=set)
    since_ms: float = 0.0  # of the state, on the clock of `now_ms`
    join_deadline: float = FOREVER
    sync_deadline: float = FOREVER
    delay_until: float = 0.0  # an empty group's first rebalance waits for company; 0: it does not
    delay_limit: float = 0.0
    newcomers: bool = False

    def rebalance_timeout_ms(self) -> int:
        return max((m.rebalance_timeout_ms for m in self.members.values()), default=0)

    def common_protocols(self) -> set[str]:
        members = iter(self.members.values())
        first = next(members, None)
        common = {name for name, _ in first.protocols} if first else set()
        for m in members:
            common &= {name for name, _ in m.protocols}
        return common


@dataclass(frozen=True, slots=True)
class JoinResult:
    error: int
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    member_id: str = ""
    members: tuple[
        tuple[str, str | None, bytes], ...
    ] = ()  # (member id, instance id, metadata), for the leader
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class SyncResult:
    error: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    token: Hashable
    result: JoinResult | SyncResult


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the group's metadata to the log."""

    group: Group


Effect = Reply | Persist


class GroupCoordinator:
    """All groups of this broker.  Called on the event loop only."""

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.groups: dict[str, Group] = {}

    # -- joining -----------------------------------------------------------------------------------

    def join(
        self,
        token: Hashable,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        client_id: str,
        client_host: str,
        session_timeout_ms: int,
        rebalance_timeout_ms: int,
        protocol_type: str,
        protocols: list[tuple[str, bytes]],
        now_ms: float,
        *,
        require_member_id: bool = True,
        understands_skip: bool = False,
    ) -> list[Effect]:
        """A JoinGroup request.  `require_member_id`: a new dynamic member is first given an id
        (version 4 and later)."""
        names = (
            client_id + MEMBER_ID_SUFFIX,
            (instance_id or "") + MEMBER_ID_SUFFIX,
            protocol_type,
            *dict(protocols),
        )
        error = self._join_error(group_id, names, session_timeout_ms)
        if error:
            return _refuse(token, error, member_id)
        group = self.groups.get(group_id)
        if group is None:
            if member_id:
                return _refuse(token, ErrorCode.UNKNOWN_MEMBER_ID, member_id)
            group = self.groups[group_id] = Group(group_id, since_ms=now_ms)
        if not self._protocols_fit(group, protocol_type, protocols, member_id):
            self._forget_if_unused(group)
            return _refuse(token, ErrorCode.INCONSISTENT_GROUP_PROTOCOL, member_id)
        if not self._has_room(group, member_id, instance_id):
            return _refuse(token, ErrorCode.GROUP_MAX_SIZE_REACHED, member_id)
        fresh = Member(
            member_id,
            instance_id,
            client_id,
            client_host,
            session_timeout_ms,
            rebalance_timeout_ms,
            protocols,
            join_token=token,
        )
        out: list[Effect] = []
        if not member_id:
            self._join_unknown(
                group, fresh, protocol_type, now_ms, require_member_id, understands_skip, out
            )
        else:
            self._join_known(group, fresh, protocol_type, now_ms, out)
        return out

    def _join_error(
        self, group_id: str, names: Iterable[str], session_timeout_ms: int
    ) -> ErrorCode:
        """What is wrong with a JoinGroup request, whatever the group's state; NONE: nothing."""
        s = self.settings
        if not group_id or not fits(group_id):
            return ErrorCode.INVALID_GROUP_ID
        if not all(map(fits, names)):
            return ErrorCode.INVALID_REQUEST
        if not s.min_session_timeout_ms <= session_timeout_ms <= s.max_session_timeout_ms:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        return ErrorCode.NONE

    def _has_room(self, group: Group, member_id: str, instance_id: str | None) -> bool:
        """Is there room for this member, or is it counted already?"""
        known = member_id in group.members or member_id in group.pending
        static = instance_id is not None and instance_id in group.static
        size = len(group.members) + len(group.pending)
        return known or static or size < self.settings.max_size

    def _protocols_fit(
        self, group: Group, protocol_type: str, protocols: list[tuple[str, bytes]], member_id: str
    ) -> bool:
        if not protocols or not protocol_type:
            return False
        if not group.members:
            return True
        if group.protocol_type != protocol_type:
            return False
        others = [m for m in group.members.values() if m.member_id != member_id]
        names = {name for name, _ in protocols}
        for m in others:
            names &= {name for name, _ in m.protocols}
        return bool(names)

    def _join_unknown(
        self,
        group: Group,
        fresh: Member,
        protocol_type: str,
        now_ms: float,
        require_member_id: bool,
        understands_skip: bool,
        out: list[Effect],
    ) -> None:
        """A member without an id: a new one, or a static one that was restarted."""
        instance_id = fresh.instance_id
        token = fresh.join_token
        fresh.member_id = (
            instance_id if instance_id is not None else fresh.client_id
        ) + f"-{uuid.uuid4()}"
        if instance_id is not None and instance_id in group.static:
            self._replace_static(group, fresh, now_ms, understands_skip, out)
        elif instance_id is None and require_member_id:
            group.pending[fresh.member_id] = now_ms + fresh.session_timeout_ms
            out.append(
                Reply(token, JoinResult(ErrorCode.MEMBER_ID_REQUIRED, member_id=fresh.member_id))
            )
        else:
            self._add(group, fresh, protocol_type, now_ms, out)

    def _join_known(
        self, group: Group, fresh: Member, protocol_type: str, now_ms: float, out: list[Effect]
    ) -> None:
        token = fresh.join_token
        if fresh.member_id in group.pending:
            del group.pending[fresh.member_id]
            self._add(group, fresh, protocol_type, now_ms, out)
            return
        error = self._identity(group, fresh.member_id, fresh.instance_id)
        if error:
            out.append(Reply(token, JoinResult(error, member_id=fresh.member_id)))
            return
        member = group.members[fresh.member_id]
        same = member.protocols == fresh.protocols
        if group.state == PREPARING:
            self._update(group, member, fresh, now_ms, out)
            self._complete_if_ready(group, now_ms, out)
        elif group.state == COMPLETING:
            if same:  # it lost the answer: give it again
                out.append(Reply(token, self._current(group, member)))
            else:
                self._update(group, member, fresh, now_ms, out)
                self._prepare(group, now_ms, out)
        elif group.state == STABLE:
            if member.member_id == group.leader or not same:
                self._update(group, member, fresh, now_ms, out)
                self._prepare(group, now_ms, out)
            else:
                out.append(Reply(token, self._current(group, member)))
        else:
            out.append(
                Reply(token, JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, member_id=fresh.member_id))
            )

    def _add(
        self, group: Group, member: Member, protocol_type: str, now_ms: float, out: list[Effect]
    ) -> None:
        if not group.members:
            group.protocol_type = protocol_type
        group.members[member.member_id] = member
        if member.instance_id is not None:
            group.static[member.instance_id] = member.member_id
        if group.leader is None:
            group.leader = member.member_id
        group.newcomers = True
        member.deadline = FOREVER
        self._prepare(group, now_ms, out)

    def _update(
        self, group: Group, member: Member, fresh: Member, now_ms: float, out: list[Effect]
    ) -> None:
        if (
            member.join_token is not None
        ):  # asked again over another connection: the first one is not going to be read
            out.append(
                Reply(
                    member.join_token,
                    JoinResult(ErrorCode.REBALANCE_IN_PROGRESS, member_id=member.member_id),
                )
            )
        member.join_token = fresh.join_token
        member.protocols = fresh.protocols
        member.session_timeout_ms = fresh.session_timeout_ms
        member.rebalance_timeout_ms = fresh.rebalance_timeout_ms
        member.client_id, member.client_host = fresh.client_id, fresh.client_host
        member.deadline = FOREVER

    def _replace_static(
        self, group: Group, fresh: Member, now_ms: float, understands_skip: bool, out: list[Effect]
    ) -> None:
        """KIP-345: a restarted static member takes its predecessor's place, without a rebalance
        where nothing changed."""
        assert fresh.instance_id is not None
        old = group.members.pop(group.static[fresh.instance_id])
        if old.join_token is not None:
            out.append(
                Reply(
                    old.join_token,
                    JoinResult(ErrorCode.FENCED_INSTANCE_ID, member_id=old.member_id),
                )
            )
        if old.sync_token is not None:
            out.append(Reply(old.sync_token, SyncResult(ErrorCode.FENCED_INSTANCE_ID)))
        token, fresh.join_token = fresh.join_token, None
        fresh.assignment = old.assignment
        fresh.deadline = now_ms + fresh.session_timeout_ms
        group.members[fresh.member_id] = fresh
        group.static[fresh.instance_id] = fresh.member_id
        group.unsynced.discard(old.member_id)
        leader_before = group.leader
        if group.leader == old.member_id:
            group.leader = fresh.member_id
        if (
            group.state == STABLE
            and fresh.metadata(group.protocol) == old.metadata(group.protocol)
            and self._vote(group) == group.protocol
        ):
            out.append(Persist(group))
            if understands_skip and group.leader == fresh.member_id:
                out.append(Reply(token, self._current(group, fresh, skip_assignment=True)))
            else:
                # To an old client that leads, the predecessor is named as leader, so that it does
                # not compute another assignment.
                out.append(
                    Reply(
                        token,
                        JoinResult(
                            ErrorCode.NONE,
                            group.generation,
                            group.protocol_type,
                            group.protocol,
                            leader_before or "",
                            fresh.member_id,
                        ),
                    )
                )
            return
        fresh.join_token = token
        fresh.deadline = FOREVER
        self._prepare(group, now_ms, out)

    # -- rebalancing -------------------------------------------------------------------------------

    def _prepare(self, group: Group, now_ms: float, out: list[Effect]) -> None:
        """Start a rebalance, unless one runs; finish it when everybody is here."""
        if group.state != PREPARING:
            for m in group.members.values():
                if m.sync_token is not None:
                    out.append(Reply(m.sync_token, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS)))
                    m.sync_token = None
                    m.deadline = now_ms + m.session_timeout_ms
            delay = self.settings.initial_rebalance_delay_ms
            timeout = group.rebalance_timeout_ms()
            if group.state == EMPTY and delay > 0:
                group.delay_until = now_ms + min(delay, timeout)
                group.delay_limit = now_ms + timeout
                group.newcomers = False
            self._set_state(group, PREPARING, now_ms)
            group.join_deadline = now_ms + timeout
            group.sync_deadline = FOREVER
            group.unsynced.clear()
        self._complete_if_ready(group, now_ms, out)

    def _complete_if_ready(self, group: Group, now_ms: float, out: list[Effect]) -> None:
        if group.state != PREPARING or (group.delay_until and group.members):
            return
        # With nobody left there is nobody to wait for: an id that was given out makes no member.
        if not group.members or (
            not group.pending and all(m.join_token is not None for m in group.members.values())
        ):
            self._complete_join(group, now_ms, out)

    def _complete_join(self, group: Group, now_ms: float, out: list[Effect]) -> None:
        group.delay_until = 0.0
        for m in [
            m for m in group.members.values() if m.join_token is None and m.instance_id is None
        ]:
            self._drop(group, m)
        joined = [m for m in group.members.values() if m.join_token is not None]
        if group.members and not joined:
            # Only static members are left and none came: wait on, until their sessions end.
            group.join_deadline = now_ms + group.rebalance_timeout_ms()
            return
        group.generation += 1
        group.join_deadline = FOREVER
        if not group.members:
            group.protocol = group.leader = None
            self._set_state(group, EMPTY, now_ms)
            out.append(Persist(group))
            return
        if group.leader not in group.members or group.members[group.leader].join_token is None:
            group.leader = joined[0].member_id
        group.protocol = self._vote(group)
        self._set_state(group, COMPLETING, now_ms)
        group.sync_deadline = now_ms + group.rebalance_timeout_ms()
        group.unsynced = {m.member_id for m in joined}
        for m in joined:
            token, m.join_token = m.join_token, None
            m.assignment = b""
            m.deadline = now_ms + m.session_timeout_ms
            out.append(Reply(token, self._current(group, m)))

    def _vote(self, group: Group) -> str | None:
        common = group.common_protocols()
        votes: dict[str, int] = {}
        for m in group.members.values():
            choice = next((name for name, _ in m.protocols if name in common), None)
            if choice is not None:
                votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=votes.__getitem__) if votes else None

    def _current(
        self, group: Group, member: Member, *, skip_assignment: bool = False
    ) -> JoinResult:
        members: tuple[tuple[str, str | None, bytes], ...] = ()
        if member.member_id == group.leader:
            members = tuple(
                (m.member_id, m.instance_id, m.metadata(group.protocol))
                for m in group.members.values()
            )
        return JoinResult(
            ErrorCode.NONE,
            group.generation,
            group.protocol_type,
            group.protocol,
            group.leader or "",
            member.member_id,
            members,
            skip_assignment,
        )

    def sync(
        self,
        token: Hashable,
        group_id: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        protocol_type: str | None,
        protocol: str | None,
        assignments: Iterable[tuple[str, bytes]],
        now_ms: float,
    ) -> list[Effect]:
        """A SyncGroup request; the leader's carries the assignments."""
        group, error = self._member_of(group_id, member_id, instance_id, generation)
        if error or group is None:
            return [Reply(token, SyncResult(error))]
        if (protocol_type is not None and protocol_type != group.protocol_type) or (
            protocol is not None and protocol != group.protocol
        ):
            return [Reply(token, SyncResult(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))]
        member = group.members[member_id]
        if group.state == PREPARING:
            return [Reply(token, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))]
        group.unsynced.discard(member_id)
        if not group.unsynced:
            group.sync_deadline = FOREVER
        if group.state == STABLE:
            member.deadline = now_ms + member.session_timeout_ms
            return [Reply(token, _assigned(group, member))]
        out: list[Effect] = []
        if member.sync_token is not None:
            out.append(Reply(member.sync_token, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS)))
        member.sync_token = token
        member.deadline = FOREVER
        if member_id == group.leader:
            given = dict(assignments)
            for m in group.members.values():
                m.assignment = given.get(m.member_id, b"")
            self._set_state(group, STABLE, now_ms)
            out.append(Persist(group))
            for m in group.members.values():
                if m.sync_token is not None:
                    out.append(Reply(m.sync_token, _assigned(group, m)))
                    m.sync_token = None
                    m.deadline = now_ms + m.session_timeout_ms
        return out

    # -- staying and leaving -----------------------------------------------------------------------

    def heartbeat(
        self, group_id: str, generation: int, member_id: str, instance_id: str | None, now_ms: float
    ) -> int:
        """The error code of a Heartbeat."""
        group, error = self._member_of(group_id, member_id, instance_id, generation)
        if error or group is None:
            return error
        self._touch(group.members[member_id], now_ms)
        return ErrorCode.REBALANCE_IN_PROGRESS if group.state == PREPARING else ErrorCode.NONE

    def check_commit(
        self, group_id: str, generation: int, member_id: str, instance_id: str | None, now_ms: float
    ) -> int:
        """May these offsets be committed?  A commit is a heartbeat too."""
        if not group_id or not fits(group_id):
            return ErrorCode.INVALID_GROUP_ID
        group = self.groups.get(group_id)
        if generation < 0 and (group is None or group.state in (EMPTY, DEAD)):
            if group is None:  # offsets kept by a consumer that assigns its partitions itself
                self.groups[group_id] = Group(group_id, since_ms=now_ms)
            return ErrorCode.NONE
        if group is None:
            return ErrorCode.ILLEGAL_GENERATION
        _, error = self._member_of(group_id, member_id, instance_id, generation)
        if error:
            return error
        if group.state == COMPLETING:
            return ErrorCode.REBALANCE_IN_PROGRESS
        self._touch(group.members[member_id], now_ms)
        return ErrorCode.NONE

    def leave(
        self, group_id: str, member_id: str, instance_id: str | None, now_ms: float
    ) -> tuple[int, list[Effect]]:
        """One member leaves: (error code, effects).  A static member may be named by its instance
        id alone."""
        group = self.groups.get(group_id)
        if group is None or group.state == DEAD:
            return ErrorCode.UNKNOWN_MEMBER_ID, []
        if instance_id is not None and not member_id:
            member_id = group.static.get(instance_id, "")
        elif member_id in group.pending:
            del group.pending[member_id]
            out: list[Effect] = []
            self._complete_if_ready(group, now_ms, out)
            self._forget_if_unused(group)
            return ErrorCode.NONE, out
        error = self._identity(group, member_id, instance_id)
        if error:
            return error, []
        out = []
        self._remove(group, group.members[member_id], now_ms, out)
        return ErrorCode.NONE, out

    def _remove(self, group: Group, member: Member, now_ms: float, out: list[Effect]) -> None:
        if member.join_token is not None:
            out.append(
                Reply(
                    member.join_token,
                    JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, member_id=member.member_id),
                )
            )
        if member.sync_token is not None:
            out.append(Reply(member.sync_token, SyncResult(ErrorCode.UNKNOWN_MEMBER_ID)))
        self._drop(group, member)
        if group.state in (STABLE, COMPLETING):
            self._prepare(group, now_ms, out)
        elif group.state == PREPARING:
            self._complete_if_ready(group, now_ms, out)

    def _drop(self, group: Group, member: Member) -> None:
        group.members.pop(member.member_id, None)
        group.unsynced.discard(member.member_id)
        if (
            member.instance_id is not None
            and group.static.get(member.instance_id) == member.member_id
        ):
            del group.static[member.instance_id]
        if group.leader == member.member_id:
            group.leader = next(iter(group.members), None)

    # -- time --------------------------------------------------------------------------------------

    def deadline(self, group_id: str) -> float:
        """When `expire` has something to do for this group; infinity: never."""
        group = self.groups.get(group_id)
        if group is None:
            return FOREVER
        first = min((m.deadline for m in group.members.values()), default=FOREVER)
        first = min(first, min(group.pending.values(), default=FOREVER), group.sync_deadline)
        if group.state == PREPARING:
            first = min(first, group.delay_until or group.join_deadline)
        return first

    def expire(self, now_ms: float) -> list[Effect]:
        """Everything whose time has come."""
        out: list[Effect] = []
        for group in list(self.groups.values()):
            if self.deadline(group.group_id) <= now_ms:
                self._expire_group(group, now_ms, out)
        return out

    def _expire_group(self, group: Group, now_ms: float, out: list[Effect]) -> None:
        gone = [member_id for member_id, deadline in group.pending.items() if deadline <= now_ms]
        for member_id in gone:
            del group.pending[member_id]
        for m in [m for m in group.members.values() if m.deadline <= now_ms]:
            if m.member_id in group.members:
                self._remove(group, m, now_ms, out)
        if group.sync_deadline <= now_ms:
            group.sync_deadline = FOREVER
            for member_id in list(group.unsynced):
                self._drop(group, group.members[member_id])
            group.unsynced.clear()
            if group.state in (STABLE, COMPLETING):
                self._prepare(group, now_ms, out)
        if group.state == PREPARING:
            if group.delay_until and group.delay_until <= now_ms:
                if group.newcomers and now_ms < group.delay_limit:
                    group.newcomers = False
                    group.delay_until = min(
                        now_ms + self.settings.initial_rebalance_delay_ms, group.delay_limit
                    )
                else:
                    self._complete_join(group, now_ms, out)
            elif not group.delay_until and group.join_deadline <= now_ms:
                self._complete_join(group, now_ms, out)
            else:
                self._complete_if_ready(group, now_ms, out)
        self._forget_if_unused(group)

    # -- looking -----------------------------------------------------------------------------------

    def _identity(self, group: Group, member_id: str, instance_id: str | None) -> int:
        if instance_id is not None:
            owner = group.static.get(instance_id)
            if owner is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if owner != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        if member_id not in group.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE

    def _member_of(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> tuple[Group | None, int]:
        if not group_id:
            return None, ErrorCode.INVALID_GROUP_ID
        group = self.groups.get(group_id)
        if group is None or group.state == DEAD:
            return None, ErrorCode.UNKNOWN_MEMBER_ID
        error = self._identity(group, member_id, instance_id)
        if not error and generation != group.generation:
            error = ErrorCode.ILLEGAL_GENERATION
        return group, error

    def _touch(self, member: Member, now_ms: float) -> None:
        if member.deadline != FOREVER:
            member.deadline = now_ms + member.session_timeout_ms

    def _set_state(self, group: Group, state: str, now_ms: float) -> None:
        if group.state != state:
            group.state = state
            group.since_ms = now_ms

    def remove_empty(self, group: Group) -> None:
        """Forget a group whose records are deleted, unless somebody has joined it meanwhile."""
        if not group.members and group.state == EMPTY and self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]

    def _forget_if_unused(self, group: Group) -> None:
        """A group that never came to anything leaves no trace."""
        if (
            group.generation == 0
            and group.state == EMPTY
            and not group.members
            and not group.pending
            and group.protocol_type is None
        ):
            self.groups.pop(group.group_id, None)


def _assigned(group: Group, member: Member) -> SyncResult:
    """The member's assignment in the present generation."""
    return SyncResult(ErrorCode.NONE, group.protocol_type, group.protocol, member.assignment)


def _refuse(token: Hashable, error: int, member_id: str) -> list[Effect]:
    return [Reply(token, JoinResult(error, member_id=member_id))]
