"""One sealed segment on its way from a leader's memory into a follower's head: which READs are
posted, and what of them is committed.

Law of the room: pure.  `step(state, event) -> (state, effects)`; who posts, commits and waits is
`kdirect.broker.segment_reader`.

=========  =====================================================  ==================================
phase      what goes on                                           leaves it by
=========  =====================================================  ==================================
READING    READs are posted in order, up to `allowed`, at most    all is committed: DONE; a READ or
           `MOST_READS` at a time; what has landed without a gap  a commit failed, or `Stop`:
           is committed                                           STOPPING
STOPPING   nothing more is posted or committed                    no READ is under way: DROPPED
DONE       every byte is in the log                               -
DROPPED    what was not committed is to be made zeros again       -
=========  =====================================================  ==================================

**The follower's memory belongs to the READs until they have completed**, so neither DONE nor
DROPPED is reached before: only then may the key to it end.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

READ_BYTES = 512 << 10  # of one READ
MOST_READS = 4  # under way for one segment


class Phase(enum.Enum):
    READING = "segments are read"
    STOPPING = "READs under way are waited for"
    DONE = "all is committed"
    DROPPED = "it was given up"


class Pull(NamedTuple):
    """Positions in the segment.  `end`: of its records; `allowed`: up to where the leader lets it
    be read now; `posted`: up to where READs were posted; `landed`: up to where they have completed
    without a gap; `committed`: up to where batches are in the log.  `under_way`: (start, length,
    has it landed) of READs that were posted and not yet counted in `landed`."""

    end: int
    allowed: int
    posted: int
    landed: int
    committed: int
    under_way: tuple[tuple[int, int, bool], ...] = ()
    phase: Phase = Phase.READING
    asked: int = -1  # the value of `allowed` at which more was asked for
    reason: str = ""  # why it is given up

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.DROPPED)


def begin(position: int, end: int, allowed: int) -> Pull:
    """Read [position, end), of which [position, allowed) may be read now."""
    return Pull(end, allowed, position, position, position)


# -- events ----------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """READs may be posted; of at most so many bytes each."""

    most: int = READ_BYTES


class Allowed(NamedTuple):
    """The leader lets more be read."""

    position: int


class Landed(NamedTuple):
    """The READ that began there has completed."""

    start: int


class Lost(NamedTuple):
    """The READ that began there was not posted, or has failed."""

    start: int
    reason: str


class Committed(NamedTuple):
    """Batches are in the log up to here."""

    position: int


class Stop(NamedTuple):
    """Give it up."""

    reason: str


Event: TypeAlias = Turn | Allowed | Landed | Lost | Committed | Stop


# -- effects ---------------------------------------------------------------------------------------


class Read(NamedTuple):
    """Post a READ."""

    start: int
    length: int


class Commit(NamedTuple):
    """Commit the whole batches of [start, stop); `Committed` or `Stop` is to follow."""

    start: int
    stop: int


class AskMore(NamedTuple):
    """Everything that may be read was asked for: the leader is to allow more."""


class End(NamedTuple):
    """No READ is under way, and none will be."""


Effect: TypeAlias = Read | Commit | AskMore | End


# -- the machine -----------------------------------------------------------------------------------


def step(pull: Pull, event: Event) -> tuple[Pull, tuple[Effect, ...]]:
    """What follows from an event; see the module."""
    if pull.is_over:
        return pull, ()
    match event:
        case Turn(most):
            return _post(pull, most)
        case Allowed(position):
            return pull._replace(allowed=min(max(position, pull.allowed), pull.end)), ()
        case Landed(start):
            return _land(pull, start)
        case Lost(start, reason):
            kept = tuple(x for x in pull.under_way if x[0] != start)
            return _stop(pull._replace(under_way=kept), reason)
        case Committed(position):
            return _commit(pull, position)
        case Stop(reason):
            return _stop(pull, reason)


def _post(pull: Pull, most: int) -> tuple[Pull, tuple[Effect, ...]]:
    if pull.phase is not Phase.READING or len(pull.under_way) >= MOST_READS:
        return pull, ()
    length = min(pull.allowed - pull.posted, most, READ_BYTES)
    if length <= 0:
        if pull.posted == pull.end or pull.asked == pull.allowed:
            return pull, ()
        return pull._replace(asked=pull.allowed), (AskMore(),)
    start = pull.posted
    under_way = (*pull.under_way, (start, length, False))
    return pull._replace(posted=start + length, under_way=under_way), (Read(start, length),)


def _land(pull: Pull, start: int) -> tuple[Pull, tuple[Effect, ...]]:
    under_way = tuple((s, n, landed or s == start) for s, n, landed in pull.under_way)
    if pull.phase is Phase.STOPPING:
        pull = pull._replace(under_way=tuple(x for x in under_way if not x[2]))
        return _dropped(pull)
    landed = pull.landed
    while under_way and under_way[0][2]:
        landed = under_way[0][0] + under_way[0][1]
        under_way = under_way[1:]
    grown = landed > pull.landed
    pull = pull._replace(under_way=under_way, landed=landed)
    return pull, (Commit(pull.committed, landed),) if grown else ()


def _commit(pull: Pull, position: int) -> tuple[Pull, tuple[Effect, ...]]:
    pull = pull._replace(committed=max(pull.committed, min(position, pull.landed)))
    if pull.phase is not Phase.READING:
        return pull, ()
    if pull.committed == pull.end:
        return pull._replace(phase=Phase.DONE), (End(),)
    if pull.landed == pull.end:
        return _stop(pull, f"there is no whole batch at position {pull.committed}")
    return pull, ()


def _stop(pull: Pull, reason: str) -> tuple[Pull, tuple[Effect, ...]]:
    """READs that have landed and are not counted need not be waited for."""
    kept = tuple(x for x in pull.under_way if not x[2])
    stopping = pull._replace(phase=Phase.STOPPING, under_way=kept, reason=pull.reason or reason)
    return _dropped(stopping)


def _dropped(pull: Pull) -> tuple[Pull, tuple[Effect, ...]]:
    if pull.under_way:
        return pull, ()
    return pull._replace(phase=Phase.DROPPED), (End(),)
