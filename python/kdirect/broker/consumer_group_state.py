"""One group of KIP-848's protocol: its members, what each has and is to have, and its records.

Law of the room: values of `kdirect.broker.consumer_groups`, which alone changes them; what can be
said of one group without knowing why it is asked; and which records a change is.  No clock, no
sockets, no storage.

A member's state, and how it goes from one to the next (`reconcile`):

===================  ===============================================================================
Stable               it has what it is to have, as of its epoch
UnrevokedPartitions  it has to give something back first, and stays in its epoch until its
                     heartbeat no longer names that as owned
UnreleasedPartitions it is in the epoch of the target, but others have not yet given back all that
                     it is to have
===================  ===============================================================================

Invariant: a partition is held by at most one member, from when the member is told of it until the
member has said that it gave it back, has left, or is fenced.  `holders` says who.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kdirect.broker.group_state import FOREVER
from kdirect.format import consumer_group_records as records
from kdirect.format.consumer_group_records import (
    ClassicProtocols,
    CurrentValue,
    Key,
    MemberValue,
    Partition,
    RegexValue,
    TopicFacts,
)

EMPTY, ASSIGNING, RECONCILING, STABLE = "Empty", "Assigning", "Reconciling", "Stable"

# Of a member, as Kafka writes them into its record.
SETTLED, UNREVOKED, UNRELEASED = 0, 1, 2

LEAVE, LEAVE_FOR_A_WHILE = -1, -2  # epochs that a member sends, the second one a static member

Row = tuple[bytes, bytes | None]
NOTHING: frozenset[Partition] = frozenset()


@dataclass(slots=True)
class ConsumerMember:
    """One member.  `classic`: what a member of the classic protocol supports; None for one of the
    new.  The deadlines are when it is fenced: no heartbeat; partitions not given back; of a classic
    member, not joined or not synced."""

    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: frozenset[str] = frozenset()
    regex: str | None = None
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicProtocols | None = None
    epoch: int = 0
    previous_epoch: int = 0
    state: int = SETTLED
    assigned: frozenset[Partition] = NOTHING
    revoking: frozenset[Partition] = NOTHING
    session_deadline: float = FOREVER
    revoke_deadline: float = FOREVER
    join_deadline: float = FOREVER
    sync_deadline: float = FOREVER

    def deadline(self) -> float:
        return min(
            self.session_deadline, self.revoke_deadline, self.join_deadline, self.sync_deadline
        )

    def value(self) -> MemberValue:
        """What its record says of who it is."""
        return MemberValue(
            self.instance_id,
            self.rack_id,
            self.client_id,
            self.client_host,
            self.topics,
            self.regex,
            self.rebalance_timeout_ms,
            self.assignor,
            self.classic,
        )

    def take(self, v: MemberValue) -> None:
        """The reverse of `value`."""
        self.instance_id, self.rack_id = v.instance_id, v.rack_id
        self.client_id, self.client_host = v.client_id, v.client_host
        self.topics, self.regex = v.topics, v.regex
        self.rebalance_timeout_ms, self.assignor = v.rebalance_timeout_ms, v.assignor
        self.classic = v.classic

    def current(self) -> CurrentValue:
        """What its record says of what it has."""
        return CurrentValue(
            self.epoch, self.previous_epoch, self.state, self.assigned, self.revoking
        )

    def set_epoch(self, epoch: int) -> None:
        """The one before is remembered: an answer may have been lost, and the member asks again."""
        self.previous_epoch, self.epoch = self.epoch, epoch


@dataclass(slots=True)
class ConsumerGroup:
    """One group.  Times are those of the coordinator's `now_ms`.  `targets`: what each member is to
    have, as of `assignment_epoch`.  `topics`: the topics that members read, as they were when they
    were last looked at."""

    group_id: str
    epoch: int = 0
    assignment_epoch: int = 0
    assignor: str = ""
    members: dict[str, ConsumerMember] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)  # instance id -> member id
    targets: dict[str, frozenset[Partition]] = field(default_factory=dict)
    holders: dict[Partition, str] = field(default_factory=dict)
    topics: dict[str, TopicFacts] = field(default_factory=dict)
    regexes: dict[str, RegexValue] = field(default_factory=dict)
    look_at: float = 0.0  # when topics are looked at again
    since_ms: float = 0.0

    # -- what can be said --------------------------------------------------------------------------

    def state(self) -> str:
        """Kafka's name of it."""
        if not self.members:
            return EMPTY
        if self.epoch > self.assignment_epoch:
            return ASSIGNING
        if all(
            m.state == SETTLED and m.epoch == self.assignment_epoch for m in self.members.values()
        ):
            return STABLE
        return RECONCILING

    def deadline(self) -> float:
        return min((m.deadline() for m in self.members.values()), default=FOREVER)

    def target(self, member: ConsumerMember) -> frozenset[Partition]:
        return self.targets.get(member.member_id, NOTHING)

    def subscribed(self, member: ConsumerMember) -> frozenset[str]:
        """The topics that a member reads, those of its regular expression included."""
        found = self.regexes.get(member.regex) if member.regex else None
        return member.topics | found.topics if found is not None else member.topics

    def all_subscribed(self) -> frozenset[str]:
        return frozenset().union(*map(self.subscribed, self.members.values()))

    def waits_for_others(self, member: ConsumerMember) -> bool:
        """Is something that a member is to have still held by somebody else?"""
        return any(
            self.holders.get(tp, member.member_id) != member.member_id
            for tp in self.target(member) - member.assigned
        )

    def names(self) -> dict[object, str]:
        """By topic id, the name of a topic that it reads."""
        return {facts.topic_id: name for name, facts in self.topics.items()}

    # -- what only the coordinator calls -----------------------------------------------------------

    def put(self, member: ConsumerMember) -> None:
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static[member.instance_id] = member.member_id
        self.hold(member)

    def hold(self, member: ConsumerMember) -> None:
        """Its partitions are its own."""
        for tp in member.assigned:
            self.holders[tp] = member.member_id
        for tp in member.revoking:
            self.holders[tp] = member.member_id

    def release(self, member: ConsumerMember, partitions: Iterable[Partition]) -> None:
        for tp in partitions:
            if self.holders.get(tp) == member.member_id:
                del self.holders[tp]

    def drop(self, member: ConsumerMember) -> None:
        """Forget a member and what it had."""
        self.release(member, member.assigned | member.revoking)
        self.members.pop(member.member_id, None)
        self.targets.pop(member.member_id, None)
        instance_id = member.instance_id
        if instance_id is not None and self.static.get(instance_id) == member.member_id:
            del self.static[instance_id]

    def reconcile(self, member: ConsumerMember, owned: frozenset[Partition] | None) -> bool:
        """One step of a member towards its target (Kafka's CurrentAssignmentBuilder): whether
        anything changed.  `owned`: what it says that it has; None: it says nothing."""
        before = member.current()
        if member.state == SETTLED and member.epoch == self.assignment_epoch:
            return False
        epoch = member.epoch
        if member.state == UNREVOKED:
            if owned is None or owned & member.revoking:
                return False
            self.release(member, member.revoking)
            epoch += 1
        target = self.target(member)
        kept = member.assigned & target
        revoking = member.assigned - kept
        wanted = target - kept
        free = frozenset(tp for tp in wanted if tp not in self.holders)
        if revoking and (owned is None or owned & revoking):
            self._move(member, epoch, UNREVOKED, kept, revoking)
        else:
            self.release(member, revoking)
            state = SETTLED if free == wanted else UNRELEASED
            self._move(member, self.assignment_epoch, state, kept | free, NOTHING)
        return member.current() != before

    def _move(
        self,
        member: ConsumerMember,
        epoch: int,
        state: int,
        assigned: frozenset[Partition],
        revoking: frozenset[Partition],
    ) -> None:
        if epoch != member.epoch:
            member.set_epoch(epoch)
        member.state, member.assigned, member.revoking = state, assigned, revoking
        self.hold(member)

    # -- records -----------------------------------------------------------------------------------

    def group_row(self) -> Row:
        return records.key(records.GROUP, self.group_id), records.epoch_value(self.epoch)

    def topics_row(self) -> Row:
        return records.key(records.TOPICS, self.group_id), records.topics_value(self.topics)

    def target_epoch_row(self) -> Row:
        key = records.key(records.TARGET_EPOCH, self.group_id)
        return key, records.epoch_value(self.assignment_epoch)

    def member_row(self, m: ConsumerMember) -> Row:
        key = records.key(records.MEMBER, self.group_id, m.member_id)
        return key, records.member_value(m.value())

    def target_row(self, member_id: str) -> Row:
        key = records.key(records.TARGET, self.group_id, member_id)
        return key, records.target_value(self.targets.get(member_id, NOTHING))

    def current_row(self, m: ConsumerMember) -> Row:
        key = records.key(records.CURRENT, self.group_id, m.member_id)
        return key, records.current_value(m.current())

    def regex_row(self, regex: str) -> Row:
        found = self.regexes.get(regex)
        value = None if found is None else records.regex_value(found)
        return records.key(records.REGEX, self.group_id, regex), value

    def gone_rows(self, member_id: str) -> list[Row]:
        """The tombstones of a member, in Kafka's order."""
        kinds = (records.CURRENT, records.TARGET, records.MEMBER)
        return [(records.key(kind, self.group_id, member_id), None) for kind in kinds]

    def all_rows(self) -> list[Row]:
        """Every record of the group."""
        members = list(self.members.values())
        return [
            *(self.member_row(m) for m in members),
            *(self.regex_row(r) for r in self.regexes),
            self.group_row(),
            self.topics_row(),
            *(self.target_row(m.member_id) for m in members),
            self.target_epoch_row(),
            *(self.current_row(m) for m in members),
        ]

    def all_tombstones(self) -> list[Row]:
        """What deletes the group."""
        kinds = (records.TARGET_EPOCH, records.TOPICS, records.GROUP)
        return [
            *(row for m in self.members for row in self.gone_rows(m)),
            *((records.key(records.REGEX, self.group_id, r), None) for r in self.regexes),
            *((records.key(kind, self.group_id), None) for kind in kinds),
        ]


def load(group_id: str, rows: Mapping[Key, bytes]) -> ConsumerGroup | None:
    """A group out of its records, or None if they do not say that there is one.  FormatError."""
    if Key(records.GROUP, group_id) not in rows:
        return None
    group = ConsumerGroup(group_id)
    for key, value in _in_order(rows):
        if key.kind == records.GROUP:
            group.epoch = records.parse_epoch(value)
        elif key.kind == records.TOPICS:
            group.topics = records.parse_topics(value)
        elif key.kind == records.TARGET_EPOCH:
            group.assignment_epoch = records.parse_epoch(value)
        elif key.kind == records.MEMBER:
            member = ConsumerMember(key.name)
            member.take(records.parse_member(value))
            group.put(member)
        elif key.kind == records.REGEX:
            group.regexes[key.name] = records.parse_regex(value)
        elif key.kind == records.TARGET:
            group.targets[key.name] = records.parse_target(value)
        elif key.name in group.members:
            member, c = group.members[key.name], records.parse_current(value)
            member.epoch, member.previous_epoch, member.state = c.epoch, c.previous_epoch, c.state
            member.assigned, member.revoking = c.assigned, c.revoking
            group.hold(member)
    return group


def _in_order(rows: Mapping[Key, bytes]) -> Iterator[tuple[Key, bytes]]:
    """Who members are comes before what they have."""
    yield from sorted(rows.items(), key=lambda row: (row[0].kind, row[0].name))
