"""Kafka's classic consumer groups: who is a member, who leads, which generation.  Decisions only.

Law of the room: a pure machine over the groups of this broker (`kdirect.broker.group_state`).  It
has no clock, no sockets and no storage: every call carries `now_ms`, in milliseconds of any clock
that does not go back, and returns effects, which the caller carries out in order (`Persist` before
the `Reply` that depends on it).  A *token* stands for a request that waits for its answer: the
caller hands it in and finds it in the `Reply`; the coordinator never looks at it.

A group's state, and what moves it there:

====================  ==============================================================================
Empty                 there is no member; a group begins so, and comes back when a rebalance finds
                      nobody
PreparingRebalance    a member joined, left, expired, or changed its protocols: all have to join
CompletingRebalance   all have joined, or their time is up: the leader computes the assignment
Stable                the leader has sent the assignment
Dead                  what is said of a group that does not exist
====================  ==============================================================================

Invariants: each token is answered exactly once.  A member is removed when it leaves, when its
session ends, or when it misses a rebalance; a static member (one with an instance id) survives a
rebalance that it misses.  Cooperative rebalancing needs nothing here: it is how clients read their
assignments.

Deadlines: `deadline(group)` is the next time at which `expire` has something to do.  Heartbeats
only move deadlines later, so a timer that was set for an earlier one finds nothing to do, and is
set again.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

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
from kdirect.format.error_codes import ErrorCode
from kdirect.format.record_fields import TEXT_BYTES

# As long as any suffix that a client id or an instance id gets to become a member id.
MEMBER_ID_SUFFIX = f"-{uuid.UUID(int=0)}"


def fits(name: str) -> bool:
    """Is the name short enough for the group's record?  Requests of newer versions may carry longer
    ones."""
    return len(name.encode()) <= TEXT_BYTES


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Limits of the broker, under the names of its options (``group.*``)."""

    min_session_timeout_ms: int = 6000
    max_session_timeout_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 0
    max_size: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request that the token stands for: with a JoinResult, a SyncResult, or, in a group
    of the new protocol, a HeartbeatResult (`kdirect.broker.consumer_groups`)."""

    token: Hashable
    result: Any


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the group's metadata to the log."""

    group: Group


@dataclass(frozen=True, slots=True)
class SaveRows:
    """Write records about a group to the log; without any, wait for those that are on their way."""

    group_id: str
    rows: tuple[tuple[bytes, bytes | None], ...]


Effect = Reply | Persist | SaveRows


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
        error = self.join_error(group_id, names, session_timeout_ms)
        if error:
            return _refuse(token, error, member_id)
        group = self.groups.get(group_id)
        if group is None:
            if member_id:
                return _refuse(token, ErrorCode.UNKNOWN_MEMBER_ID, member_id)
            group = self.groups[group_id] = Group(group_id, since_ms=now_ms)
        if not group.takes_protocols(protocol_type, protocols, member_id):
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

    def join_error(self, group_id: str, names: Iterable[str], session_timeout_ms: int) -> ErrorCode:
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
        """A member without an id: a new one, or a static one whose process was restarted."""
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
        """A member with an id: one that was just given it, or one that joins again."""
        token = fresh.join_token
        if fresh.member_id in group.pending:
            del group.pending[fresh.member_id]
            self._add(group, fresh, protocol_type, now_ms, out)
            return
        error = group.identity_error(fresh.member_id, fresh.instance_id)
        if error:
            out.append(Reply(token, JoinResult(error, member_id=fresh.member_id)))
            return
        member = group.members[fresh.member_id]
        same = member.protocols == fresh.protocols
        if group.state == PREPARING:
            self._update(group, member, fresh, now_ms, out)
            self._complete_if_ready(group, now_ms, out)
        elif group.state == COMPLETING:
            if same:  # it has not got the answer: give it once more
                out.append(Reply(token, group.join_result(member)))
            else:
                self._update(group, member, fresh, now_ms, out)
                self._prepare(group, now_ms, out)
        elif group.state == STABLE:
            # A leader that joins again wants another assignment; any other member that does so with
            # the same protocols only missed the answer.
            if member.member_id == group.leader or not same:
                self._update(group, member, fresh, now_ms, out)
                self._prepare(group, now_ms, out)
            else:
                out.append(Reply(token, group.join_result(member)))
        else:
            out.append(
                Reply(token, JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, member_id=fresh.member_id))
            )

    def _add(
        self, group: Group, member: Member, protocol_type: str, now_ms: float, out: list[Effect]
    ) -> None:
        """A new member: the others have to join again."""
        if not group.members:
            group.protocol_type = protocol_type
        group.members[member.member_id] = member
        if member.instance_id is not None:
            group.static[member.instance_id] = member.member_id
        if group.leader is None:
            group.leader = member.member_id
        group.newcomers = True
        member.deadline = FOREVER  # its request waits here, so it lives
        self._prepare(group, now_ms, out)

    def _update(
        self, group: Group, member: Member, fresh: Member, now_ms: float, out: list[Effect]
    ) -> None:
        """Take what a known member says of itself, with the token of its new request."""
        if member.join_token is not None:
            # It asks again over another connection, and no longer reads the first one.
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
        """A static member that was restarted takes its predecessor's place (KIP-345): without a
        rebalance if it supports the same protocols and the vote stays what it was."""
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
            and group.vote() == group.protocol
        ):
            out.append(Persist(group))
            if understands_skip and group.leader == fresh.member_id:
                out.append(Reply(token, group.join_result(fresh, skip_assignment=True)))
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
        """Start a rebalance, unless one runs; finish it when all members have joined."""
        if group.state != PREPARING:
            # Whoever waits for an assignment of this generation will not get one.
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
            group.set_state(PREPARING, now_ms)
            group.join_deadline = now_ms + timeout
            group.sync_deadline = FOREVER
            group.unsynced.clear()
        self._complete_if_ready(group, now_ms, out)

    def _complete_if_ready(self, group: Group, now_ms: float, out: list[Effect]) -> None:
        """Finish the rebalance if there is nobody to wait for."""
        if group.state != PREPARING or (group.delay_until and group.members):
            return
        # A pending id is waited for as long as there are members; alone it does not make a group.
        if not group.members or (
            not group.pending and all(m.join_token is not None for m in group.members.values())
        ):
            self._complete_join(group, now_ms, out)

    def _complete_join(self, group: Group, now_ms: float, out: list[Effect]) -> None:
        """The next generation begins, with those who have joined, and with the static members."""
        group.delay_until = 0.0
        for m in [
            m for m in group.members.values() if m.join_token is None and m.instance_id is None
        ]:
            group.drop(m)
        joined = [m for m in group.members.values() if m.join_token is not None]
        if group.members and not joined:
            # Only static members are left, and none has joined: wait until their sessions end.
            group.join_deadline = now_ms + group.rebalance_timeout_ms()
            return
        group.generation += 1
        group.join_deadline = FOREVER
        if not group.members:
            group.protocol = group.leader = None
            group.set_state(EMPTY, now_ms)
            out.append(Persist(group))
            return
        if group.leader not in group.members or group.members[group.leader].join_token is None:
            group.leader = joined[0].member_id
        group.protocol = group.vote()
        group.set_state(COMPLETING, now_ms)
        group.sync_deadline = now_ms + group.rebalance_timeout_ms()
        group.unsynced = {m.member_id for m in joined}
        for m in joined:
            token, m.join_token = m.join_token, None
            m.assignment = b""
            m.deadline = now_ms + m.session_timeout_ms
            out.append(Reply(token, group.join_result(m)))

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
        """A SyncGroup request: a member asks for its assignment; the leader's request carries the
        assignments, (member id, bytes), of all."""
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
            return [Reply(token, group.sync_result(member))]
        out: list[Effect] = []
        if member.sync_token is not None:
            out.append(Reply(member.sync_token, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS)))
        member.sync_token = token
        member.deadline = FOREVER
        if member_id == group.leader:
            given = dict(assignments)
            for m in group.members.values():
                m.assignment = given.get(m.member_id, b"")
            group.set_state(STABLE, now_ms)
            out.append(Persist(group))
            for m in group.members.values():
                if m.sync_token is not None:
                    out.append(Reply(m.sync_token, group.sync_result(m)))
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
        group.members[member_id].touch(now_ms)
        return ErrorCode.REBALANCE_IN_PROGRESS if group.state == PREPARING else ErrorCode.NONE

    def check_commit(
        self, group_id: str, generation: int, member_id: str, instance_id: str | None, now_ms: float
    ) -> int:
        """May these offsets be committed?  The error code; NONE: yes.  A commit counts as a
        heartbeat."""
        if not group_id or not fits(group_id):
            return ErrorCode.INVALID_GROUP_ID
        group = self.groups.get(group_id)
        if generation < 0 and (group is None or group.state in (EMPTY, DEAD)):
            if group is None:  # of a consumer that assigns its partitions itself
                self.groups[group_id] = Group(group_id, since_ms=now_ms)
            return ErrorCode.NONE
        if group is None:
            return ErrorCode.ILLEGAL_GENERATION
        _, error = self._member_of(group_id, member_id, instance_id, generation)
        if error:
            return error
        if group.state == COMPLETING:
            return ErrorCode.REBALANCE_IN_PROGRESS
        group.members[member_id].touch(now_ms)
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
        error = group.identity_error(member_id, instance_id)
        if error:
            return error, []
        out = []
        self._remove(group, group.members[member_id], now_ms, out)
        return ErrorCode.NONE, out

    def _remove(self, group: Group, member: Member, now_ms: float, out: list[Effect]) -> None:
        """A member has left, or its session has ended: answer what it waits for, and rebalance."""
        if member.join_token is not None:
            out.append(
                Reply(
                    member.join_token,
                    JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, member_id=member.member_id),
                )
            )
        if member.sync_token is not None:
            out.append(Reply(member.sync_token, SyncResult(ErrorCode.UNKNOWN_MEMBER_ID)))
        group.drop(member)
        if group.state in (STABLE, COMPLETING):
            self._prepare(group, now_ms, out)
        elif group.state == PREPARING:
            self._complete_if_ready(group, now_ms, out)

    # -- time --------------------------------------------------------------------------------------

    def deadline(self, group_id: str) -> float:
        """When `expire` has something to do for this group; infinity: never."""
        group = self.groups.get(group_id)
        return FOREVER if group is None else group.deadline()

    def expire(self, now_ms: float) -> list[Effect]:
        """Everything whose time has come."""
        out: list[Effect] = []
        for group in list(self.groups.values()):
            if group.deadline() <= now_ms:
                self._expire_group(group, now_ms, out)
        return out

    def _expire_group(self, group: Group, now_ms: float, out: list[Effect]) -> None:
        """First ids and sessions end, then the time to ask for assignments, then the time to join:
        each of them may begin, or finish, a rebalance."""
        gone = [member_id for member_id, deadline in group.pending.items() if deadline <= now_ms]
        for member_id in gone:
            del group.pending[member_id]
        for m in [m for m in group.members.values() if m.deadline <= now_ms]:
            if m.member_id in group.members:  # a rebalance that another's end finished drops some
                self._remove(group, m, now_ms, out)
        if group.sync_deadline <= now_ms:
            group.sync_deadline = FOREVER
            for member_id in list(group.unsynced):
                group.drop(group.members[member_id])
            group.unsynced.clear()
            if group.state in (STABLE, COMPLETING):
                self._prepare(group, now_ms, out)
        if group.state == PREPARING:
            if group.delay_until and group.delay_until <= now_ms:
                if group.newcomers and now_ms < group.delay_limit:
                    # Somebody came during the delay, so more may come: wait as long once more.
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

    # -- groups ------------------------------------------------------------------------------------

    def _member_of(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> tuple[Group | None, int]:
        """(the group, what is wrong with a request of this member in it)."""
        if not group_id:
            return None, ErrorCode.INVALID_GROUP_ID
        group = self.groups.get(group_id)
        if group is None or group.state == DEAD:
            return None, ErrorCode.UNKNOWN_MEMBER_ID
        error = group.identity_error(member_id, instance_id)
        if not error and generation != group.generation:
            error = ErrorCode.ILLEGAL_GENERATION
        return group, error

    def give_up(self, group_ids: Iterable[str]) -> list[Effect]:
        """Another broker coordinates these groups from now on, or nobody does: refuse what waits
        in them, and forget them."""
        out: list[Effect] = []
        for group_id in group_ids:
            group = self.groups.pop(group_id, None)
            for m in group.members.values() if group is not None else ():
                out += waits_end(m, ErrorCode.NOT_COORDINATOR)
        return out

    def adopt(self, group: Group, now_ms: float, *, rebalance: bool) -> list[Effect]:
        """A group of the new protocol whose members all speak this one goes on here."""
        self.groups[group.group_id] = group
        out: list[Effect] = [Persist(group)]
        if rebalance:
            self._prepare(group, now_ms, out)
        return out

    def remove_empty(self, group: Group) -> None:
        """Forget a group whose records are deleted, unless somebody has joined it meanwhile."""
        if not group.members and group.state == EMPTY and self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]

    def _forget_if_unused(self, group: Group) -> None:
        """A group that nobody has ever joined leaves no trace."""
        if group.is_unused():
            self.groups.pop(group.group_id, None)


def waits_end(m: Member, error: int) -> list[Effect]:
    """Answer what a member waits for with an error."""
    out: list[Effect] = []
    if m.join_token is not None:
        out += _refuse(m.join_token, error, m.member_id)
        m.join_token = None
    if m.sync_token is not None:
        out.append(Reply(m.sync_token, SyncResult(error)))
        m.sync_token = None
    return out


def _refuse(token: Hashable, error: int, member_id: str) -> list[Effect]:
    return [Reply(token, JoinResult(error, member_id=member_id))]
