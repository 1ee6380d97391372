"""Kafka's new consumer groups (KIP-848): who is a member, what it is to read.  Decisions only.

Law of the room: a pure machine over the groups of this broker that speak the new protocol
(`kdirect.broker.consumer_group_state`).  It has no clock, no sockets and no storage: every call
carries `now_ms` and returns effects, which the caller carries out in order.  `SaveRows` comes
before the `Reply` that depends on it, and nothing is told to a member before it is in the log.

How a group works: a member says in a heartbeat what it reads and what it has.  If that, or the
topics, changed, the *group epoch* grows.  Then the target assignment is computed, at once, and its
epoch is the group's.  Each member goes to it at its own heartbeats (`ConsumerGroup.reconcile`): it
first gives back what it is not to have, and is then given what others have given back.  So the
group does not stop while it rebalances, and no partition has two readers.

Members of the classic protocol in such a group are the business of
`kdirect.broker.classic_members`; groups that change their protocol, that of
`kdirect.broker.group_migration`.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kdirect.broker import group_migration
from kdirect.broker.consumer_group_state import (
    LEAVE,
    LEAVE_FOR_A_WHILE,
    NOTHING,
    SETTLED,
    UNREVOKED,
    ConsumerGroup,
    ConsumerMember,
    Row,
)
from kdirect.broker.group_assignors import ASSIGNORS
from kdirect.broker.group_state import FOREVER, Group
from kdirect.broker.groups import (
    Effect,
    GroupCoordinator,
    Reply,
    SaveRows,
    fits,
    waits_end,
)
from kdirect.errors import FormatError, RefusedRequestError
from kdirect.format.consumer_group_records import MemberValue, Partition, RegexValue, TopicFacts
from kdirect.format.error_codes import ErrorCode

# The version of OffsetCommit from which on it carries the epochs of members of this protocol.
NEW_MEMBERS_COMMIT_FROM = 9


class Topics(Protocol):
    """What is known of topics, and of expressions over their names."""

    def facts(self, name: str) -> TopicFacts | None:
        """A topic that exists."""

    def names(self) -> Iterable[str]:
        """The topics that an expression may stand for."""

    def problem(self, regex: str) -> str:
        """Why this is no regular expression; empty: it is one."""

    def matching(self, regex: str, names: Iterable[str]) -> frozenset[str]:
        """Those of the names that it stands for."""


@dataclass(frozen=True, slots=True)
class ConsumerGroupSettings:
    """Limits of the broker, under the names of its options (``group.consumer.*``).  `refresh_ms`:
    how long a group works with what it knows of its topics."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5000
    max_size: int = 2**31 - 1
    assignors: tuple[str, ...] = ("uniform", "range")
    upgrades: bool = True
    downgrades: bool = True
    refresh_ms: float = 1000


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A ConsumerGroupHeartbeat request.  What is None has not changed since the last one; so has a
    `rebalance_timeout_ms` of -1.  `chosen_id`: the member has to have made its id itself."""

    group_id: str
    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topics: frozenset[str] | None = None
    regex: str | None = None
    assignor: str | None = None
    owned: frozenset[Partition] | None = None
    client_id: str = ""
    client_host: str = ""
    chosen_id: bool = True

    def is_full(self) -> bool:
        """Does the member say everything, and so ask to be told everything?"""
        return self.epoch == 0 or (
            self.rebalance_timeout_ms != -1
            and (self.topics is not None or self.regex is not None)
            and self.owned is not None
        )


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """The answer.  `assignment`: None where it is what it was."""

    error: int
    message: str | None = None
    member_id: str | None = None
    epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: frozenset[Partition] | None = None


# A group's id -> (session timeout, interval of heartbeats) in ms, as they are to be from now on.
TimingOf = Callable[[str], tuple[int, int]]


class ConsumerGroupCoordinator:
    """All groups of this broker that speak the new protocol.  Called on the event loop only.
    `classic` has the others; a group's id is in one of the two.  `timing_of`: where groups have
    properties of their own; None: the settings hold for all."""

    def __init__(
        self,
        settings: ConsumerGroupSettings,
        topics: Topics,
        classic: GroupCoordinator,
        timing_of: TimingOf | None = None,
    ) -> None:
        self.settings = settings
        self.topics = topics
        self.classic = classic
        self.groups: dict[str, ConsumerGroup] = {}
        self._timing_of = timing_of or (
            lambda group_id: (settings.session_timeout_ms, settings.heartbeat_interval_ms)
        )

    def session_timeout_ms(self, group_id: str) -> int:
        """How long a member of this group may be silent."""
        return self._timing_of(group_id)[0]

    def heartbeat_interval_ms(self, group_id: str) -> int:
        """How often a member of this group is to send heartbeats; it is told in each answer."""
        return self._timing_of(group_id)[1]

    # -- heartbeats --------------------------------------------------------------------------------

    def heartbeat(self, token: Hashable, r: Heartbeat, now_ms: float) -> list[Effect]:
        """A ConsumerGroupHeartbeat: joining, staying, leaving."""
        out: list[Effect] = []
        try:
            self._check(r)
            if r.epoch in (LEAVE, LEAVE_FOR_A_WHILE):
                result = self._leave(r, now_ms, out)
            else:
                result = self._beat(r, now_ms, out)
        except RefusedRequestError as e:
            result = HeartbeatResult(e.code, e.message)
        out.append(Reply(token, result))
        return out

    def _check(self, r: Heartbeat) -> None:
        """Is the request one that a group could take?"""
        if not r.group_id or not fits(r.group_id):
            raise RefusedRequestError(
                ErrorCode.INVALID_REQUEST, "GroupId can't be empty, nor that long."
            )
        for name, value in (("InstanceId", r.instance_id), ("RackId", r.rack_id)):
            if value is not None and not value.strip():
                raise RefusedRequestError(ErrorCode.INVALID_REQUEST, f"{name} can't be empty.")
        if (r.chosen_id or r.epoch != 0) and not r.member_id.strip():
            raise RefusedRequestError(ErrorCode.INVALID_REQUEST, "MemberId can't be empty.")
        if not all(map(fits, (r.member_id, r.instance_id or "", r.regex or ""))):
            raise RefusedRequestError(
                ErrorCode.INVALID_REQUEST, "A name is longer than 32767 bytes."
            )
        if r.epoch < LEAVE_FOR_A_WHILE:
            raise RefusedRequestError(ErrorCode.INVALID_REQUEST, "MemberEpoch is invalid.")
        if r.epoch == LEAVE_FOR_A_WHILE and r.instance_id is None:
            raise RefusedRequestError(ErrorCode.INVALID_REQUEST, "InstanceId can't be null.")
        if r.epoch == 0:
            self._check_join(r)
        if r.assignor is not None and r.assignor not in self.settings.assignors:
            raise RefusedRequestError(
                ErrorCode.UNSUPPORTED_ASSIGNOR,
                f"ServerAssignor {r.assignor} is not supported. Supported assignors:"
                f" {', '.join(self.settings.assignors)}.",
            )
        if r.regex and (problem := self.topics.problem(r.regex)):
            raise RefusedRequestError(
                ErrorCode.INVALID_REGULAR_EXPRESSION,
                f"SubscribedTopicRegex `{r.regex}` is not a valid regular expression: {problem}.",
            )

    def _check_join(self, r: Heartbeat) -> None:
        if r.rebalance_timeout_ms == -1:
            why = "RebalanceTimeoutMs must be provided in first request."
        elif r.owned is None or r.owned:
            why = "TopicPartitions must be empty when (re-)joining."
        elif r.topics is None and r.regex is None:
            why = (
                "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when"
                " (re-)joining."
            )
        else:
            return
        raise RefusedRequestError(ErrorCode.INVALID_REQUEST, why)

    def _beat(self, r: Heartbeat, now_ms: float, out: list[Effect]) -> HeartbeatResult:
        rows: list[Row] = []
        group = self._group_for(r, now_ms, rows, out)
        try:
            member = self._member_for(group, r, rows)
        except RefusedRequestError:
            if not group.members and group.epoch == 0:  # made for this member
                self.groups.pop(group.group_id, None)
            raise
        before = member.assigned if r.epoch else None
        bump = self._update(group, member, r, rows)
        # One that joins with names and an expression is given its names first, as by Kafka: clients
        # count on that order.  The rest is for its next heartbeat, which acknowledges the names.
        names_first = r.epoch == 0 and member.topics and member.regex not in group.regexes
        later = member.regex if names_first else None
        self.advance(group, member, bump, r.owned, now_ms, rows, later)
        member.session_deadline = now_ms + self.session_timeout_ms(group.group_id)
        out.append(SaveRows(group.group_id, tuple(rows)))
        told = r.is_full() or member.assigned != before
        return HeartbeatResult(
            ErrorCode.NONE,
            None,
            member.member_id,
            member.epoch,
            self.heartbeat_interval_ms(group.group_id),
            member.assigned if told else None,
        )

    def _group_for(
        self, r: Heartbeat, now_ms: float, rows: list[Row], out: list[Effect]
    ) -> ConsumerGroup:
        """The group of a heartbeat; a member that joins makes it, where there is none."""
        group = self.groups.get(r.group_id)
        joins = r.epoch == 0
        if group is None and not joins:
            raise RefusedRequestError(
                ErrorCode.GROUP_ID_NOT_FOUND, f"Consumer group {r.group_id} not found."
            )
        if group is not None:
            full = len(group.members) >= self.settings.max_size
            known = r.member_id in group.members or (r.instance_id or "") in group.static
            if full and not known:
                raise _full(self.settings.max_size)
            return group
        from_classic = self._from_classic(r.group_id, now_ms, rows, out)
        group = from_classic or ConsumerGroup(r.group_id, since_ms=now_ms)
        self.groups[r.group_id] = group
        return group

    def _from_classic(
        self, group_id: str, now_ms: float, rows: list[Row], out: list[Effect]
    ) -> ConsumerGroup | None:
        """A group of the classic protocol changes to the new one."""
        old = self.classic.groups.get(group_id)
        if old is None:
            return None
        new = None
        if old.members:
            new = self._upgraded(old, now_ms)
            for m in old.members.values():  # those that wait are to join the new group
                out += waits_end(m, ErrorCode.REBALANCE_IN_PROGRESS)
        del self.classic.groups[group_id]
        rows.append(old.tombstone())
        if new is not None:
            rows += new.all_rows()
        return new

    def _upgraded(self, old: Group, now_ms: float) -> ConsumerGroup:
        """A classic group with members as one of the new protocol."""
        group_id = old.group_id
        full = len(old.members) >= self.settings.max_size
        if full or not self.settings.upgrades or not group_migration.can_be_new(old):
            raise RefusedRequestError(
                ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} is not a consumer group."
            )
        try:
            names = group_migration.subscribed(old)
            known = {name: self.topics.facts(name) for name in names}
            topics = {name: facts for name, facts in known.items() if facts is not None}
            new = group_migration.to_new(old, topics, now_ms)
        except FormatError as e:
            raise RefusedRequestError(
                ErrorCode.GROUP_ID_NOT_FOUND,
                f"Cannot upgrade the classic group {group_id}: {e.message}",
            ) from e
        new.topics = topics
        return new

    def go_back_if_all_classic(
        self, group: ConsumerGroup, now_ms: float, out: list[Effect], *, rebalance: bool
    ) -> None:
        """The last member of the new protocol is gone: the group goes back to the classic one, in
        which the others join again if there is something to share out."""
        if not self.settings.downgrades or not group.members:
            return
        if any(m.classic is None for m in group.members.values()):
            return
        old = group_migration.to_classic(group, now_ms)
        del self.groups[group.group_id]
        # The classic record first: with both, the group is taken for one of the new protocol, and
        # goes back once more.
        out += self.classic.adopt(old, now_ms, rebalance=rebalance)
        out.append(SaveRows(group.group_id, tuple(group.all_tombstones())))

    def _member_for(self, group: ConsumerGroup, r: Heartbeat, rows: list[Row]) -> ConsumerMember:
        """The member that a heartbeat is of, as it was; a new one joins by it."""
        member_id = r.member_id or str(uuid.uuid4())
        if r.instance_id is not None:
            return self._static_member(group, member_id, r, rows)
        member = group.members.get(member_id)
        if member is None:
            if r.epoch:
                raise _unknown(member_id, group)
            member = ConsumerMember(member_id)
            group.put(member)
        elif r.epoch == 0:
            self._begin_anew(group, member)
        else:
            _check_epoch(member, r)
        return member

    def _static_member(
        self, group: ConsumerGroup, member_id: str, r: Heartbeat, rows: list[Row]
    ) -> ConsumerMember:
        assert r.instance_id is not None
        owner = group.members.get(group.static.get(r.instance_id, ""))
        if r.epoch:
            if owner is None:
                raise RefusedRequestError(
                    ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {r.instance_id} is unknown."
                )
            self.check_instance(owner, member_id, r.instance_id)
            _check_epoch(owner, r)
            return owner
        known = group.members.get(member_id)
        if known is not None and known is not owner:
            return self._becomes_static(group, known, owner, r.instance_id)
        if owner is None:
            member = ConsumerMember(member_id, r.instance_id)
            group.put(member)
            return member
        if owner.member_id == member_id and owner.epoch != LEAVE_FOR_A_WHILE:
            self._begin_anew(group, owner)
            return owner
        if owner.classic is None and owner.epoch != LEAVE_FOR_A_WHILE:
            raise RefusedRequestError(
                ErrorCode.UNRELEASED_INSTANCE_ID,
                f"Static member {member_id} with instance id {r.instance_id} cannot join the group"
                f" because the instance id is owned by {owner.member_id} member.",
            )
        return self.replace_static(group, owner, member_id, rows)

    def _becomes_static(
        self,
        group: ConsumerGroup,
        known: ConsumerMember,
        owner: ConsumerMember | None,
        instance_id: str,
    ) -> ConsumerMember:
        """A member joins under an instance id that it did not have.  What it holds must not be
        forgotten, or nobody is ever given it."""
        if owner is not None or known.instance_id is not None:
            raise RefusedRequestError(
                ErrorCode.INVALID_REQUEST,
                f"MemberId {known.member_id} is that of another member than InstanceId"
                f" {instance_id}.",
            )
        self._begin_anew(group, known)
        group.static[instance_id] = known.member_id
        return known

    def check_instance(self, owner: ConsumerMember, member_id: str, instance_id: str) -> None:
        if owner.member_id != member_id:
            raise RefusedRequestError(
                ErrorCode.FENCED_INSTANCE_ID,
                f"Static member {member_id} with instance id {instance_id} was fenced by member"
                f" {owner.member_id}.",
            )

    def replace_static(
        self, group: ConsumerGroup, old: ConsumerMember, member_id: str, rows: list[Row]
    ) -> ConsumerMember:
        """A static member's next process takes over its partitions and its target."""
        target = group.target(old)
        group.drop(old)
        rows += group.gone_rows(old.member_id)
        new = dataclasses.replace(
            old,
            member_id=member_id,
            epoch=0,
            previous_epoch=0,
            state=SETTLED,
            revoking=NOTHING,
            revoke_deadline=FOREVER,
            join_deadline=FOREVER,
            sync_deadline=FOREVER,
        )
        group.put(new)
        group.targets[member_id] = target
        rows += [group.member_row(new), group.target_row(member_id), group.current_row(new)]
        return new

    def _begin_anew(self, group: ConsumerGroup, member: ConsumerMember) -> None:
        """A member that is known joins: it has missed the answer, or was fenced.  It has given
        everything back."""
        group.release(member, member.assigned | member.revoking)
        member.epoch = member.previous_epoch = 0
        member.state, member.assigned, member.revoking = SETTLED, NOTHING, NOTHING
        member.revoke_deadline = FOREVER

    def _update(
        self, group: ConsumerGroup, member: ConsumerMember, r: Heartbeat, rows: list[Row]
    ) -> bool:
        """Take what a member says of itself; whether it reads other topics than before."""
        before = member.value()
        member.instance_id = r.instance_id or member.instance_id
        member.rack_id = r.rack_id or member.rack_id
        if r.rebalance_timeout_ms != -1:
            member.rebalance_timeout_ms = max(0, r.rebalance_timeout_ms)
        member.assignor = r.assignor or member.assignor
        if r.topics is not None:
            member.topics = r.topics
        if r.regex is not None:
            member.regex = r.regex or None
        member.client_id, member.client_host = r.client_id, r.client_host
        member.classic = None
        member.join_deadline = member.sync_deadline = FOREVER
        return self.updated(group, member, before, rows)

    def updated(
        self, group: ConsumerGroup, member: ConsumerMember, before: MemberValue, rows: list[Row]
    ) -> bool:
        """Whether a member reads other topics than it did when its value was `before`."""
        now = member.value()
        is_new = member.epoch == 0 and member.member_id not in group.targets
        if now == before and not is_new:
            return False
        rows.append(group.member_row(member))
        return is_new or now.topics != before.topics or now.regex != before.regex

    # -- assignments -------------------------------------------------------------------------------

    def advance(
        self,
        group: ConsumerGroup,
        member: ConsumerMember,
        bump: bool,
        owned: frozenset[Partition] | None,
        now_ms: float,
        rows: list[Row],
        later: str | None = None,
    ) -> None:
        """What follows from what a member has said: another group epoch, another target, one step
        of this member towards it.  `later`: an expression for the next heartbeat to evaluate."""
        if bump or now_ms >= group.look_at:
            bump = self._look_at_topics(group, now_ms, rows, later) or bump
        if bump:
            group.epoch += 1
            rows.append(group.group_row())
        if group.epoch > group.assignment_epoch:
            self._assign(group, rows)
        if group.reconcile(member, owned):
            rows.append(group.current_row(member))
            waits = member.state == UNREVOKED and member.classic is None
            member.revoke_deadline = now_ms + member.rebalance_timeout_ms if waits else FOREVER

    def _look_at_topics(
        self, group: ConsumerGroup, now_ms: float, rows: list[Row], later: str | None = None
    ) -> bool:
        """Are there other topics than the group knew of, do they have more partitions, or does an
        expression stand for others?"""
        group.look_at = now_ms + self.settings.refresh_ms if later is None else now_ms
        changed = self._look_at_regexes(group, now_ms, rows, later)
        facts = ((name, self.topics.facts(name)) for name in group.all_subscribed())
        topics = {name: found for name, found in facts if found is not None}
        if topics == group.topics:
            return changed
        group.topics = topics
        rows.append(group.topics_row())
        return True

    def _look_at_regexes(
        self, group: ConsumerGroup, now_ms: float, rows: list[Row], later: str | None
    ) -> bool:
        """Whether one that members use stands for other topics than before."""
        used = {m.regex for m in group.members.values() if m.regex and m.regex != later}
        names = list(self.topics.names()) if used else []
        changed = False
        for regex in [r for r in group.regexes if r not in used]:
            del group.regexes[regex]
            rows.append(group.regex_row(regex))
        for regex in sorted(used):
            found = self.topics.matching(regex, names)
            known = group.regexes.get(regex)
            if known is None or known.topics != found:
                changed, version = True, 0 if known is None else known.version + 1
                group.regexes[regex] = RegexValue(found, version, int(now_ms))
                rows.append(group.regex_row(regex))
        return changed

    def _assign(self, group: ConsumerGroup, rows: list[Row]) -> None:
        """Compute the target of all members."""
        counts = {facts.topic_id: facts.partitions for facts in group.topics.values()}
        ids = {name: facts.topic_id for name, facts in group.topics.items()}
        subscriptions = {
            m.member_id: frozenset(ids[name] for name in group.subscribed(m) if name in ids)
            for m in group.members.values()
        }
        instances = {member_id: instance for instance, member_id in group.static.items()}
        group.assignor = self._preferred_assignor(group)
        assignor = ASSIGNORS[group.assignor]
        targets = assignor(subscriptions, instances, counts, group.targets)
        for member_id in sorted(targets):
            if group.targets.get(member_id) != targets[member_id]:
                group.targets[member_id] = targets[member_id]
                rows.append(group.target_row(member_id))
        group.assignment_epoch = group.epoch
        rows.append(group.target_epoch_row())

    def _preferred_assignor(self, group: ConsumerGroup) -> str:
        """What most of those members want that want anything."""
        votes = Counter(
            m.assignor for m in group.members.values() if m.assignor in self.settings.assignors
        )
        if not votes:
            return self.settings.assignors[0]
        return max(sorted(votes, key=str), key=votes.__getitem__) or self.settings.assignors[0]

    # -- leaving -----------------------------------------------------------------------------------

    def _leave(self, r: Heartbeat, now_ms: float, out: list[Effect]) -> HeartbeatResult:
        group = self.groups.get(r.group_id)
        if group is None:
            raise RefusedRequestError(
                ErrorCode.GROUP_ID_NOT_FOUND, f"Consumer group {r.group_id} not found."
            )
        if r.instance_id is None:
            member = group.members.get(r.member_id)
            if member is None:
                raise _unknown(r.member_id, group)
        else:
            member = group.members.get(group.static.get(r.instance_id, ""))
            if member is None:
                raise RefusedRequestError(
                    ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {r.instance_id} is unknown."
                )
            self.check_instance(member, r.member_id, r.instance_id)
        if r.epoch == LEAVE_FOR_A_WHILE:
            # Its partitions stay its own: it comes back within its session, or is fenced.
            group.release(member, member.revoking)
            member.epoch, member.revoking = LEAVE_FOR_A_WHILE, NOTHING
            member.revoke_deadline = FOREVER
            out.append(SaveRows(group.group_id, (group.current_row(member),)))
        else:
            self.remove(group, [member], now_ms, out)
        return HeartbeatResult(ErrorCode.NONE, None, r.member_id, r.epoch)

    def remove(
        self,
        group: ConsumerGroup,
        members: Iterable[ConsumerMember],
        now_ms: float,
        out: list[Effect],
    ) -> None:
        """Members have left or are fenced: what they had is free, and at the next heartbeat of
        another member there is another target."""
        rows: list[Row] = []
        for member in members:
            group.drop(member)
            rows += group.gone_rows(member.member_id)
        self._look_at_topics(group, now_ms, rows)
        group.epoch += 1
        rows.append(group.group_row())
        if not group.members:
            group.since_ms = now_ms
        out.append(SaveRows(group.group_id, tuple(rows)))
        self.go_back_if_all_classic(group, now_ms, out, rebalance=True)

    # -- time --------------------------------------------------------------------------------------

    def deadline(self, group_id: str) -> float:
        """When `expire` has something to do for this group; infinity: never."""
        group = self.groups.get(group_id)
        return FOREVER if group is None else group.deadline()

    def expire(self, now_ms: float) -> list[Effect]:
        """Everything whose time has come."""
        out: list[Effect] = []
        for group in list(self.groups.values()):
            gone = [m for m in group.members.values() if m.deadline() <= now_ms]
            if gone:
                self.remove(group, gone, now_ms, out)
        return out

    # -- offsets -----------------------------------------------------------------------------------

    def check_commit(self, group: ConsumerGroup, member_id: str, epoch: int, version: int) -> int:
        """May this member commit offsets?  An error code.  `version`: of the OffsetCommit."""
        if epoch < 0 and not group.members:
            return ErrorCode.NONE
        member = group.members.get(member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if member.classic is None and version < NEW_MEMBERS_COMMIT_FROM:
            return ErrorCode.UNSUPPORTED_VERSION
        return _epoch_error(member, epoch)

    def check_fetch(self, group: ConsumerGroup, member_id: str | None, epoch: int) -> int:
        """May this member be told what is committed?  An error code."""
        if member_id is None and epoch < 0:
            return ErrorCode.NONE
        member = group.members.get(member_id or "")
        return ErrorCode.UNKNOWN_MEMBER_ID if member is None else _epoch_error(member, epoch)

    # -- groups ------------------------------------------------------------------------------------

    def restore(self, group: ConsumerGroup, now_ms: float) -> None:
        """A group as it was when its coordinator stopped: its members go on with their heartbeats,
        or their sessions end."""
        session_ms = self.session_timeout_ms(group.group_id)
        for m in group.members.values():
            own = session_ms if m.classic is None else m.classic.session_timeout_ms
            m.session_deadline = now_ms + own
            if m.state == UNREVOKED and m.classic is None:
                m.revoke_deadline = now_ms + m.rebalance_timeout_ms
        group.since_ms = now_ms
        self.groups[group.group_id] = group

    def give_up(self, group_ids: Iterable[str]) -> None:
        """Another broker coordinates these groups from now on, or nobody does."""
        for group_id in group_ids:
            self.groups.pop(group_id, None)

    def forget_empty(self, group_id: str) -> list[Row]:
        """Forget a group without members; the records that say so, none if it has some."""
        group = self.groups.get(group_id)
        if group is None or group.members:
            return []
        del self.groups[group_id]
        return group.all_tombstones()


def _check_epoch(member: ConsumerMember, r: Heartbeat) -> None:
    """A member that is one epoch behind has missed an answer, if it has no more than it is to
    have."""
    if r.epoch == member.epoch:
        return
    if r.epoch < member.epoch:
        knows = r.owned is not None and r.owned <= member.assigned
        if r.epoch == member.previous_epoch and knows:
            return
    word = "greater" if r.epoch > member.epoch else "smaller"
    raise RefusedRequestError(
        ErrorCode.FENCED_MEMBER_EPOCH,
        f"The consumer group member has a {word} member epoch ({r.epoch}) than the one known by the"
        f" group coordinator ({member.epoch}). The member must abandon all its partitions and"
        " rejoin.",
    )


def _epoch_error(member: ConsumerMember, epoch: int) -> int:
    if epoch == member.epoch:
        return ErrorCode.NONE
    old = ErrorCode.ILLEGAL_GENERATION
    return ErrorCode.STALE_MEMBER_EPOCH if member.classic is None else old


def _unknown(member_id: str, group: ConsumerGroup) -> RefusedRequestError:
    return RefusedRequestError(
        ErrorCode.UNKNOWN_MEMBER_ID,
        f"Member {member_id} is not a member of group {group.group_id}.",
    )


def _full(size: int) -> RefusedRequestError:
    return RefusedRequestError(
        ErrorCode.GROUP_MAX_SIZE_REACHED,
        f"The consumer group has reached its maximum capacity of {size} members.",
    )
