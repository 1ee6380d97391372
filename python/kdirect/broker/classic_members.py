"""Members of the classic protocol in groups of the new one (KIP-848's online upgrade).

Law of the room: as that of `kdirect.broker.consumer_groups`, whose groups these are.  A JoinGroup
is a heartbeat that says everything: the answer names the member's epoch as generation, no leader,
and the SyncGroup that follows brings the assignment of the broker.  A Heartbeat tells a member to
join again as long as there is something to give back or to take.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable

from kdirect.broker.consumer_group_state import (
    UNRELEASED,
    UNREVOKED,
    ConsumerGroup,
    ConsumerMember,
    Row,
)
from kdirect.broker.consumer_groups import ConsumerGroupCoordinator
from kdirect.broker.group_migration import assignment_of
from kdirect.broker.group_state import FOREVER, JoinResult, SyncResult
from kdirect.broker.groups import Effect, Reply, SaveRows
from kdirect.errors import FormatError, RefusedRequestError
from kdirect.format.consumer_group_records import Partition
from kdirect.format.consumer_protocol import PROTOCOL_TYPE, Subscription, decode_subscription
from kdirect.format.error_codes import ErrorCode


class ClassicMembers:
    """See the module.  `rules`: the groups."""

    def __init__(self, rules: ConsumerGroupCoordinator) -> None:
        self._rules = rules

    # -- joining -----------------------------------------------------------------------------------

    def join(
        self,
        token: Hashable,
        group: ConsumerGroup,
        fresh: ConsumerMember,
        protocol_type: str,
        now_ms: float,
        *,
        require_member_id: bool,
    ) -> list[Effect]:
        """A JoinGroup.  `fresh` is what the member says of itself; its id may be empty."""
        out: list[Effect] = []
        try:
            result = self._join(group, fresh, protocol_type, now_ms, require_member_id, out)
        except RefusedRequestError as e:
            result = JoinResult(e.code, member_id=fresh.member_id)
        out.append(Reply(token, result))
        return out

    def _join(
        self,
        group: ConsumerGroup,
        fresh: ConsumerMember,
        protocol_type: str,
        now_ms: float,
        require_member_id: bool,
        out: list[Effect],
    ) -> JoinResult:
        subscription = self._check(group, fresh, protocol_type)
        is_unknown = not fresh.member_id
        member_id = fresh.member_id or f"{fresh.instance_id or fresh.client_id}-{uuid.uuid4()}"
        if is_unknown and fresh.instance_id is None and require_member_id:
            return JoinResult(ErrorCode.MEMBER_ID_REQUIRED, member_id=member_id)
        rows: list[Row] = []
        member = self._member_for(group, member_id, fresh.instance_id, is_unknown, rows)
        before = member.value()
        member.instance_id, member.rack_id = fresh.instance_id, subscription.rack
        member.client_id, member.client_host = fresh.client_id, fresh.client_host
        member.topics, member.regex, member.assignor = subscription.topics, None, None
        member.rebalance_timeout_ms, member.classic = fresh.rebalance_timeout_ms, fresh.classic
        bump = self._rules.updated(group, member, before, rows)
        owned = self._owned(subscription)
        self._rules.advance(group, member, bump, owned, now_ms, rows)
        assert member.classic is not None
        member.join_deadline = FOREVER
        member.session_deadline = now_ms + member.classic.session_timeout_ms
        member.sync_deadline = now_ms + member.rebalance_timeout_ms
        out.append(SaveRows(group.group_id, tuple(rows)))
        self._rules.go_back_if_all_classic(group, now_ms, out, rebalance=False)
        protocol = member.classic.protocols[0][0]
        return JoinResult(
            ErrorCode.NONE, member.epoch, PROTOCOL_TYPE, protocol, "", member.member_id
        )

    def _check(
        self, group: ConsumerGroup, fresh: ConsumerMember, protocol_type: str
    ) -> Subscription:
        assert fresh.classic is not None
        wanted = (*dict(fresh.classic.protocols), fresh.instance_id or "", fresh.client_id)
        session_ms = fresh.classic.session_timeout_ms
        if error := self._rules.classic.join_error(group.group_id, wanted, session_ms):
            raise RefusedRequestError(error, "no group takes it")
        known = fresh.member_id in group.members or (fresh.instance_id or "") in group.static
        if not known and len(group.members) >= self._rules.settings.max_size:
            raise RefusedRequestError(ErrorCode.GROUP_MAX_SIZE_REACHED, "the group is full")
        names = {name for name, _ in fresh.classic.protocols}
        for m in group.members.values():
            if m.classic is not None and m.member_id != fresh.member_id:
                names &= {name for name, _ in m.classic.protocols}
        if protocol_type != PROTOCOL_TYPE or not names:
            raise RefusedRequestError(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "no protocol is common to all"
            )
        try:
            return decode_subscription(fresh.classic.protocols[0][1])
        except FormatError as e:
            raise RefusedRequestError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, e.message) from e

    def _member_for(
        self,
        group: ConsumerGroup,
        member_id: str,
        instance_id: str | None,
        is_unknown: bool,
        rows: list[Row],
    ) -> ConsumerMember:
        if instance_id is None:
            member = group.members.get(member_id)
        else:
            member = group.members.get(group.static.get(instance_id, ""))
            if member is not None and is_unknown:
                return self._rules.replace_static(group, member, member_id, rows)
            if member is None and not is_unknown:
                raise RefusedRequestError(ErrorCode.UNKNOWN_MEMBER_ID, "not a static member")
            if member is not None:
                self._rules.check_instance(member, member_id, instance_id)
        if member is None:
            member = ConsumerMember(member_id, instance_id)
            group.put(member)
        return member

    def _owned(self, subscription: Subscription) -> frozenset[Partition]:
        """What it still reads; nothing, of a member that gives everything back before it joins."""
        found = set()
        for tp in subscription.owned:
            facts = self._rules.topics.facts(tp.topic)
            if facts is not None:
                found.add((facts.topic_id, tp.partition))
        return frozenset(found)

    # -- the rest ----------------------------------------------------------------------------------

    def sync(
        self,
        token: Hashable,
        group: ConsumerGroup,
        generation: int,
        member_id: str,
        instance_id: str | None,
        protocol_type: str | None,
        protocol: str | None,
        now_ms: float,
    ) -> list[Effect]:
        """A SyncGroup: the member is told what it has."""
        member, error = self._classic_member(group, member_id, instance_id, generation)
        if member is None or member.classic is None:
            return [Reply(token, SyncResult(error))]
        own = member.classic.protocols[0][0]
        if protocol_type not in (None, PROTOCOL_TYPE) or protocol not in (None, own):
            return [Reply(token, SyncResult(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))]
        if group.epoch > member.epoch and member.state != UNREVOKED:
            self._must_join(member, now_ms)
            return [Reply(token, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))]
        member.sync_deadline = FOREVER
        member.session_deadline = now_ms + member.classic.session_timeout_ms
        given = assignment_of(member, member.assigned, group.names())
        result = SyncResult(ErrorCode.NONE, protocol_type, protocol, given)
        return [SaveRows(group.group_id, ()), Reply(token, result)]

    def heartbeat(
        self,
        group: ConsumerGroup,
        generation: int,
        member_id: str,
        instance_id: str | None,
        now_ms: float,
    ) -> int:
        """The error code of a Heartbeat."""
        member, error = self._classic_member(group, member_id, instance_id, generation)
        if member is None or member.classic is None:
            return error
        member.session_deadline = now_ms + member.classic.session_timeout_ms
        if (
            member.epoch < group.epoch
            or member.state == UNREVOKED
            or (member.state == UNRELEASED and not group.waits_for_others(member))
        ):
            self._must_join(member, now_ms)
            return ErrorCode.REBALANCE_IN_PROGRESS
        return ErrorCode.NONE

    def leave(
        self, group: ConsumerGroup, member_id: str, instance_id: str | None, now_ms: float
    ) -> tuple[int, list[Effect]]:
        """A LeaveGroup: (error code, effects).  A static member may be named by its instance id
        alone.  An administrator removes members of the new protocol by this request, too; those
        hear of it with their next heartbeat."""
        if instance_id is not None and not member_id:
            member_id = group.static.get(instance_id, "")
        member, error = self._named(group, member_id, instance_id)
        if member is None:
            return error, []
        out: list[Effect] = []
        self._rules.remove(group, [member], now_ms, out)
        return ErrorCode.NONE, out

    def _must_join(self, member: ConsumerMember, now_ms: float) -> None:
        """It has as long as it asked for, from the first time that it is told."""
        if member.join_deadline == FOREVER:
            member.join_deadline = now_ms + member.rebalance_timeout_ms

    def _named(
        self, group: ConsumerGroup, member_id: str, instance_id: str | None
    ) -> tuple[ConsumerMember | None, int]:
        """(the member of either protocol, what is wrong with a request in its name)."""
        if instance_id is not None:
            owner = group.static.get(instance_id)
            if owner is not None and owner != member_id:
                return None, ErrorCode.FENCED_INSTANCE_ID
            member_id = owner or ""
        member = group.members.get(member_id)
        return member, ErrorCode.NONE if member is not None else ErrorCode.UNKNOWN_MEMBER_ID

    def _classic_member(
        self, group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int
    ) -> tuple[ConsumerMember | None, int]:
        member, error = self._named(group, member_id, instance_id)
        if member is not None and member.classic is None:
            return None, ErrorCode.UNKNOWN_MEMBER_ID
        if member is not None and member.epoch != generation:
            return None, ErrorCode.ILLEGAL_GENERATION
        return member, error
