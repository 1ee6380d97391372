"""One consumer group: its members, its state, and what they are told of both.

Law of the room: values of `kdirect.broker.groups`, which alone changes them, and what can be said
of one group without knowing why it is asked.  No clock, no sockets, no storage, no effects.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kdirect.format.error_codes import ErrorCode
from kdirect.format.group_records import group_key

EMPTY = "Empty"
PREPARING = "PreparingRebalance"
COMPLETING = "CompletingRebalance"
STABLE = "Stable"
DEAD = "Dead"

FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The answer to a JoinGroup.  `skip_assignment`: a leader that was restarted need not compute
    the assignment, because the one there is stays."""

    error: int
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    member_id: str = ""
    # (member id, instance id, metadata) of each, for the leader
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The answer to a SyncGroup."""

    error: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


@dataclass(slots=True)
class Member:
    """One member.  `protocols` are (name, metadata), the preferred one first.  `deadline` is when
    its session ends: never, while a request of it waits.  A token is that of a JoinGroup or
    SyncGroup that waits for its answer."""

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
        """What it says to the leader with this protocol."""
        return next((m for name, m in self.protocols if name == protocol), b"")

    def touch(self, now_ms: float) -> None:
        """It gave a sign of life: its session begins once more."""
        if self.deadline != FOREVER:
            self.deadline = now_ms + self.session_timeout_ms


@dataclass(slots=True)
class Group:
    """One group.  Times are those of the coordinator's `now_ms`."""

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
        """How long members may take to join: as long as the slowest of them asks for."""
        return max((m.rebalance_timeout_ms for m in self.members.values()), default=0)

    def common_protocols(self) -> set[str]:
        """Names of the protocols that every member supports."""
        members = iter(self.members.values())
        first = next(members, None)
        common = {name for name, _ in first.protocols} if first else set()
        for m in members:
            common &= {name for name, _ in m.protocols}
        return common

    def takes_protocols(
        self, protocol_type: str, protocols: list[tuple[str, bytes]], member_id: str
    ) -> bool:
        """Would a member with these protocols have one in common with all others?"""
        if not protocols or not protocol_type:
            return False
        if not self.members:
            return True
        if self.protocol_type != protocol_type:
            return False
        names = {name for name, _ in protocols}
        for m in self.members.values():
            if m.member_id != member_id:
                names &= {name for name, _ in m.protocols}
        return bool(names)

    def vote(self) -> str | None:
        """The protocol that most members prefer among those that all support."""
        common = self.common_protocols()
        votes: dict[str, int] = {}
        for m in self.members.values():
            choice = next((name for name, _ in m.protocols if name in common), None)
            if choice is not None:
                votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=votes.__getitem__) if votes else None

    def identity_error(self, member_id: str, instance_id: str | None) -> int:
        """What is wrong with a request in this member's name; NONE: nothing."""
        if instance_id is not None:
            owner = self.static.get(instance_id)
            if owner is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if owner != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        if member_id not in self.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE

    def takes_commits(self, generation: int, member_id: str, instance_id: str | None) -> bool:
        """Does this member commit in the present generation?  That is what
        `GroupCoordinator.check_commit` says, to which a commit is a sign of life besides."""
        error = self.identity_error(member_id, instance_id)
        return not error and generation == self.generation and self.state != COMPLETING

    def drop(self, member: Member) -> None:
        """Forget a member; another one leads if it did."""
        self.members.pop(member.member_id, None)
        self.unsynced.discard(member.member_id)
        instance_id = member.instance_id
        if instance_id is not None and self.static.get(instance_id) == member.member_id:
            del self.static[instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    def set_state(self, state: str, now_ms: float) -> None:
        if self.state != state:
            self.state = state
            self.since_ms = now_ms

    def deadline(self) -> float:
        """When something ends: a session, an id that was given out, a step of a rebalance."""
        first = min((m.deadline for m in self.members.values()), default=FOREVER)
        first = min(first, min(self.pending.values(), default=FOREVER), self.sync_deadline)
        if self.state == PREPARING:
            first = min(first, self.delay_until or self.join_deadline)
        return first

    def is_unused(self) -> bool:
        """Has nobody ever joined it, and does nobody intend to?"""
        return (
            self.generation == 0
            and self.state == EMPTY
            and not self.members
            and not self.pending
            and self.protocol_type is None
        )

    def tombstone(self) -> tuple[bytes, None]:
        """The record that deletes it."""
        return group_key(self.group_id), None

    def join_result(self, member: Member, *, skip_assignment: bool = False) -> JoinResult:
        """What a member is told of the present generation; the leader is told of all members."""
        members: tuple[tuple[str, str | None, bytes], ...] = ()
        if member.member_id == self.leader:
            members = tuple(
                (m.member_id, m.instance_id, m.metadata(self.protocol))
                for m in self.members.values()
            )
        return JoinResult(
            ErrorCode.NONE,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader or "",
            member.member_id,
            members,
            skip_assignment,
        )

    def sync_result(self, member: Member) -> SyncResult:
        """The member's assignment in the present generation."""
        return SyncResult(ErrorCode.NONE, self.protocol_type, self.protocol, member.assignment)
