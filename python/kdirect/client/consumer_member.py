"""One member of a group of KIP-848, as the consumer sees it: what it says in heartbeats, what it
may read, and when it has to stop.  Decisions only.

Law: a pure machine.  It has no clock, no sockets and no locks: every call that needs the time
carries it, in ms.  `kdirect.client.consumer_group` sends what it says and tells it what came of it.
The schedules of ``tests/broker/group_schedules.py`` drive it against the coordinator's rules.

A member reads `owned`.  An answer may bring an assignment: `wanted`.  Then the member

1. gives back what it owns and is not to have (`gave_back`), and says so in its next heartbeat;
2. takes the rest (`take`), and says so.

Invariant: what is owned here, no other member owns.  The coordinator gives a partition to another
member only after a heartbeat in which this one says that it does not own it, or when it takes this
member for dead.  Therefore:

- Nothing is taken while a heartbeat that names what is owned is under way: the coordinator may have
  heard by it that the partition is free.
- If the answer to a heartbeat is lost, what was to be taken is not taken.  The next heartbeat says
  everything, and is answered with the whole assignment.
- A member that had no answer for most of its session, or that gives nothing back for most of the
  time that it has for it, gives everything up by itself (`is_late`).
- Answers to what an earlier life of the member has said are not heard.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TypeAlias

from kdirect.format.error_codes import ErrorCode

Partition: TypeAlias = tuple[uuid.UUID, int]  # topic id, index
NOTHING: frozenset[Partition] = frozenset()

JOINS, LEAVES, LEAVES_FOR_A_WHILE = 0, -1, -2  # epochs that a member sends
MARGIN = 0.8  # of a session: what comes later may meet the coordinator's decision

# The coordinator does not know the member, or knows another epoch: it joins once more.
FENCED = frozenset(
    (
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.GROUP_ID_NOT_FOUND,
    )
)


@dataclass(frozen=True, slots=True)
class Say:
    """A heartbeat.  What is None has not changed since the last one that was answered; so has a
    `rebalance_timeout_ms` of -1.  `life`: of the member that says it."""

    life: int
    sent_ms: float
    epoch: int
    rebalance_timeout_ms: int = -1
    topics: frozenset[str] | None = None
    regex: str | None = None
    owned: frozenset[Partition] | None = None

    @property
    def full(self) -> bool:
        """Does it say everything?"""
        return self.topics is not None


class ConsumerMember:
    """See the module.  `session_ms`: after how long without a heartbeat the coordinator takes a
    member for dead; `rebalance_ms`: how long a member may take to give partitions back."""

    def __init__(self, session_ms: float, rebalance_ms: int) -> None:
        self.epoch = 0
        self.topics: frozenset[str] = frozenset()
        self.regex = ""
        self.owned = NOTHING
        self.wanted: frozenset[Partition] | None = None
        self._session_ms = session_ms
        self._rebalance_ms = rebalance_ms
        self._life = 0
        self._reported: frozenset[Partition] | None = None  # what the coordinator knows of `owned`
        self._full = True
        self._under_way: Say | None = None
        self._heard_ms = self._told_ms = 0.0

    # -- what the consumer does --------------------------------------------------------------------

    def subscribe(self, topics: frozenset[str], regex: str = "") -> None:
        """What the member reads from now on: names, and an expression over names, or none."""
        self.topics, self.regex = topics, regex
        self._full = True

    def begin(self) -> None:
        """A new life: it has nothing, and joins with its next heartbeat."""
        self._life += 1
        self.epoch = JOINS
        self.owned, self.wanted = NOTHING, None
        self._reported, self._full, self._under_way = None, True, None

    def gave_back(self, kept: frozenset[Partition]) -> None:
        """It does not read anything but these any more."""
        self.owned &= kept

    def take(self, given: frozenset[Partition], known: frozenset[Partition]) -> bool:
        """May it begin to read `known` now, which is all of `given`, or as much as has a name?
        They are its own then.  `given`: the assignment that the caller works on."""
        if self.wanted is None:
            return known <= self.owned
        if given != self.wanted or self.owned - given or not self.may_take:
            return False
        self.owned |= known
        if known == given:
            self.wanted = None
        self._reported = None  # an assignment is acknowledged, even if nothing changed
        return True

    @property
    def may_take(self) -> bool:
        """Is no heartbeat under way that names what is owned?"""
        return self._under_way is None or self._under_way.owned is None

    @property
    def has_to_say(self) -> bool:
        """Is there something that should not wait for the time of the next heartbeat?"""
        return self.epoch == JOINS or self._full or self.owned != self._reported

    def is_late(self, now_ms: float) -> bool:
        """May the coordinator soon take it for dead, or for one that gives nothing back?  Its clock
        may have begun with an answer that was lost, but not before the last one that was not."""
        if self.epoch <= JOINS:
            return False
        if now_ms - self._heard_ms > MARGIN * self._session_ms:
            return True
        return self.wanted is not None and now_ms - self._told_ms > MARGIN * self._rebalance_ms

    def left_ms(self, now_ms: float) -> float:
        """For how long it may wait for an answer: after that it has to give up."""
        if self.epoch <= JOINS:
            return self._session_ms
        return max(1.0, self._heard_ms + MARGIN * self._session_ms - now_ms)

    # -- heartbeats --------------------------------------------------------------------------------

    def heartbeat(self, now_ms: float) -> Say:
        """The next heartbeat.  `answered`, `refused` or `failed` end it."""
        full = self._full or self.epoch == JOINS
        says_owned = full or self.owned != self._reported
        self._under_way = Say(
            self._life,
            now_ms,
            self.epoch,
            self._rebalance_ms if full else -1,
            self.topics if full else None,
            self.regex if full else None,
            self.owned if says_owned else None,
        )
        return self._under_way

    def _ends(self, say: Say) -> bool:
        """The heartbeat is over; whether it was of this life."""
        if say.life != self._life:
            return False
        self._under_way = None
        return True

    def answered(self, say: Say, epoch: int, assignment: frozenset[Partition] | None) -> bool:
        """The coordinator has heard it.  False: of an earlier life, nothing follows from it."""
        if not self._ends(say):
            return False
        if assignment is not None:
            self.wanted = assignment
            self._told_ms = self._heard_ms if say.epoch != JOINS else say.sent_ms
        self._heard_ms = say.sent_ms
        if say.full:  # what was subscribed meanwhile is still to be said
            self._full = (say.topics, say.regex) != (self.topics, self.regex)
        if say.owned is not None:
            self._reported = say.owned
        self.epoch = epoch
        return True

    def failed(self, say: Say) -> bool:
        """The request was lost, or the answer was: the coordinator may have heard it.  False: of an
        earlier life, nothing follows from it."""
        if not self._ends(say):
            return False
        self._full = True
        if self.wanted is not None:
            self.wanted &= self.owned
        return True

    def refused(self, say: Say, code: int) -> bool:
        """The coordinator has refused it; whether the member's life is over by that."""
        if not self._ends(say):
            return False
        self._full = True
        return code in FENCED
