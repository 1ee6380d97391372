"""One partition of a topic that holds a coordinator's state, as a broker coordinates what is in it.
Decisions only.

Law of the room: a pure machine, `step(partition, event) -> (partition, effects)`.  No clock, no
log, no replicas: `kdirect.broker.coordinator_partitions` carries out the effects.

What a partition holds (groups, in ``__consumer_offsets``) is coordinated by the leader of the
partition.  A *tenure* is the time from
one election of this broker to the next one, or to its resignation; tenures are numbered, and what
was begun in one counts for nothing in another.

========  ==========================================================================================
ABSENT    another broker leads the partition, or this one has no replica of it
WAITING   elected; records that leaders before have left may not be committed yet.  What is not
          committed can be lost with this broker: an offset that a consumer was told would go back
LOADING   all that was there at the election is committed; a thread reads it
ACTIVE    what the partition holds is in memory, and is coordinated here
FAILED    the records cannot be read; the log says why
========  ==========================================================================================

A thread that reads is never interrupted.  It reads into a table of its own, so that one of an
earlier tenure disturbs nobody; what it has read is dropped.

A broker that is alone is elected for every partition when it starts, and never resigns.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from kdirect.format.error_codes import ErrorCode


class State(enum.Enum):
    """See the module."""

    ABSENT = "absent"
    WAITING = "waiting"
    LOADING = "loading"
    ACTIVE = "active"
    FAILED = "failed"


class CoordinatorPartition(NamedTuple):
    """`tenure`: the number of the present one, or of the last.  `epoch`: the leader epoch of it."""

    state: State = State.ABSENT
    tenure: int = 0
    epoch: int = -1


# -- events ----------------------------------------------------------------------------------------


class Elected(NamedTuple):
    """This broker leads the partition from this leader epoch on."""

    epoch: int


class Resigned(NamedTuple):
    """It leads the partition no longer."""


class Committed(NamedTuple):
    """What the log held when this tenure began is committed."""

    tenure: int


class Loaded(NamedTuple):
    """It has been read."""

    tenure: int


class Unreadable(NamedTuple):
    """It cannot be read."""

    tenure: int


Event: TypeAlias = Elected | Resigned | Committed | Loaded | Unreadable


class Effect(enum.Enum):
    """What is to be done, in order; for the tenure of the value that `step` returns."""

    WAIT = "answer with `Committed` when everything in the log is committed"
    LOAD = "read the partition on a thread; answer with `Loaded` or `Unreadable`"
    INSTALL = "put what was read into memory: it goes on"
    UNLOAD = "refuse what waits in it, and forget it"


_S, _E = State, Effect

# What is not here changes nothing.
TABLE: Mapping[tuple[State, type[Event]], tuple[State, tuple[Effect, ...]]] = {
    (_S.ABSENT, Elected): (_S.WAITING, (_E.WAIT,)),
    (_S.WAITING, Elected): (_S.WAITING, (_E.WAIT,)),
    (_S.WAITING, Committed): (_S.LOADING, (_E.LOAD,)),
    (_S.WAITING, Resigned): (_S.ABSENT, ()),
    (_S.LOADING, Elected): (_S.WAITING, (_E.WAIT,)),
    (_S.LOADING, Loaded): (_S.ACTIVE, (_E.INSTALL,)),
    (_S.LOADING, Unreadable): (_S.FAILED, ()),
    (_S.LOADING, Resigned): (_S.ABSENT, ()),
    # Others may have led between the two epochs.
    (_S.ACTIVE, Elected): (_S.WAITING, (_E.UNLOAD, _E.WAIT)),
    (_S.ACTIVE, Resigned): (_S.ABSENT, (_E.UNLOAD,)),
    (_S.FAILED, Elected): (_S.WAITING, (_E.WAIT,)),
    (_S.FAILED, Resigned): (_S.ABSENT, ()),
}

# What clients are told: to look for the coordinator again, to wait, or to go on.
REFUSALS: Mapping[State, ErrorCode] = {
    State.ABSENT: ErrorCode.NOT_COORDINATOR,
    State.WAITING: ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    State.LOADING: ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    State.ACTIVE: ErrorCode.NONE,
    State.FAILED: ErrorCode.COORDINATOR_NOT_AVAILABLE,
}


def step(
    partition: CoordinatorPartition, event: Event
) -> tuple[CoordinatorPartition, tuple[Effect, ...]]:
    """The partition after an event, and what is to be done."""
    state, tenure, epoch = partition
    found = TABLE.get((state, type(event)))
    if found is None:
        return partition, ()
    if isinstance(event, Elected):
        # The same election may be told again; after a resignation even one epoch may come twice.
        if state is not State.ABSENT and event.epoch <= epoch:
            return partition, ()
        tenure, epoch = tenure + 1, event.epoch
    elif not isinstance(event, Resigned) and event.tenure != tenure:
        return partition, ()
    return CoordinatorPartition(found[0], tenure, epoch), found[1]
