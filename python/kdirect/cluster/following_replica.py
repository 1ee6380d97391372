"""What a follower does when it learns of a leader: fence, compare, truncate, and only then follow.

Pure.  The order is the law (KIP-101, KIP-279, `Kip320.tla`; over RDMA the first step comes first,
because an epoch does not stop a WRITE that is on its way):

1. **Fencing**: the old leader's access to this replica's files is taken away.  When that is done
   nothing that it wrote or will write can reach bytes that this replica commits.
2. **Comparing**: the leader *of the new epoch* says where each epoch of this replica's log ends in
   its own.  An answer of a leader of any other epoch is thrown away: it may be one that was deposed
   and does not know it.
3. **Truncating**: what the leader does not have is cut off.  If the leader does not know the epoch
   asked for, the next older epoch of this replica is compared.
4. **Following**: the leader is granted the head, and told where this replica's log ends.  From now
   on each record that this replica's kernel has committed is confirmed, in this epoch.

A newer epoch at any time begins again with the first.  A truncation that is under way ends before
that, for it may not run beside another.

=================  ===============================================================================
event              what it does
=================  ===============================================================================
`Follow`           the store names a leader and an epoch; older epochs are thrown away
`Fenced`           nobody can write any more with the access of epochs below `epoch`
`EpochEnd`         the leader's answer
`Truncated`        the log was cut
`Committed`        the kernel has committed up to an offset
=================  ===============================================================================
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

NO_EPOCH = -1


class Phase(enum.Enum):
    """Where a follower is on the way from one leader to the next."""

    IDLE = "no leader is known"
    FENCING = "the old leader's access is being taken away"
    COMPARING = "the leader was asked where an epoch ends"
    TRUNCATING = "records that the leader does not have are being cut off"
    FOLLOWING = "the leader writes, and this replica confirms"


# -- events ----------------------------------------------------------------------------------------


class Follow(NamedTuple):
    """`leader` leads in `epoch`."""

    leader: int
    epoch: int


class Fenced(NamedTuple):
    """No access that was granted in an epoch below `epoch` can be used any more."""

    epoch: int


class EpochEnd(NamedTuple):
    """A leader's answer (KIP-279): the largest epoch that its log has and that is not above
    `asked`, and the offset at which it ends there; `NO_EPOCH` if there is none.  `leader_epoch`:
    the epoch in which the leader answered."""

    leader_epoch: int
    asked: int
    epoch: int
    end: int


class Truncated(NamedTuple):
    """The log ends at `end`; its last record has epoch `last_epoch`."""

    end: int
    last_epoch: int


class Committed(NamedTuple):
    """The log ends at `end`, and its last record has epoch `last_epoch`; the leader of epoch
    `writer` has written it here."""

    end: int
    last_epoch: int
    writer: int


Event: TypeAlias = Follow | Fenced | EpochEnd | Truncated | Committed


# -- effects ---------------------------------------------------------------------------------------


class Fence(NamedTuple):
    """Take away every access granted in an epoch below `epoch`; `Fenced` answers."""

    epoch: int


class AskEpochEnd(NamedTuple):
    """Ask `leader`, which leads in `leader_epoch`, where `epoch` ends; `EpochEnd` answers."""

    leader: int
    leader_epoch: int
    epoch: int


class Truncate(NamedTuple):
    """Cut the log: no record at `offset` or after it, and none of an epoch above `epoch`, stays.
    `Truncated` answers."""

    epoch: int
    offset: int


class Grant(NamedTuple):
    """Give `leader` write access to the head, in `epoch`; what it writes goes after `end`."""

    leader: int
    epoch: int
    end: int


class Confirm(NamedTuple):
    """Tell the leader of `epoch` that every record below `end` is committed here."""

    epoch: int
    end: int


Effect: TypeAlias = Fence | AskEpochEnd | Truncate | Grant | Confirm


# -- the machine -----------------------------------------------------------------------------------


class Following(NamedTuple):
    """A follower's view of one partition.  `end` and `last_epoch`: of its log, as the kernel last
    said.  `next`: a leader that was learned of while a truncation was under way."""

    phase: Phase
    leader: int
    epoch: int
    end: int
    last_epoch: int
    next: Follow | None = None


def begin(*, end: int, last_epoch: int) -> Following:
    """A replica whose log was loaded and that knows of no leader."""
    return Following(Phase.IDLE, -1, NO_EPOCH, end, last_epoch)


def step(following: Following, event: Event) -> tuple[Following, tuple[Effect, ...]]:
    """What the event makes of the state, and what is to be done."""
    match event:
        case Follow():
            return _follow(following, event)
        case Fenced(epoch):
            if following.phase is not Phase.FENCING or epoch < following.epoch:
                return following, ()
            return _compare(following)
        case EpochEnd():
            return _answered(following, event)
        case Truncated(end, last_epoch):
            return _truncated(following, end, last_epoch)
        case Committed():
            return _committed(following, event)


def _follow(following: Following, event: Follow) -> tuple[Following, tuple[Effect, ...]]:
    newest = following.next.epoch if following.next is not None else following.epoch
    if event.epoch <= newest:
        return following, ()
    if following.phase is Phase.TRUNCATING:
        # The fence can begin; the rest waits until the cut is done.
        return following._replace(next=event), (Fence(event.epoch),)
    following = following._replace(
        phase=Phase.FENCING, leader=event.leader, epoch=event.epoch, next=None
    )
    return following, (Fence(event.epoch),)


def _compare(following: Following) -> tuple[Following, tuple[Effect, ...]]:
    if following.last_epoch == NO_EPOCH:  # an empty log has nothing to compare
        return _start(following)
    following = following._replace(phase=Phase.COMPARING)
    ask = AskEpochEnd(following.leader, following.epoch, following.last_epoch)
    return following, (ask,)


def _answered(following: Following, event: EpochEnd) -> tuple[Following, tuple[Effect, ...]]:
    if (
        following.phase is not Phase.COMPARING
        or event.leader_epoch != following.epoch
        or event.asked != following.last_epoch
    ):
        return following, ()
    if event.epoch == following.last_epoch and event.end >= following.end:
        return _start(following)
    # Either the leader's part of our last epoch is shorter than ours, or it does not know that
    # epoch: then only what belongs to older ones can be common, up to where they end there.
    following = following._replace(phase=Phase.TRUNCATING)
    return following, (Truncate(event.epoch, event.end),)


def _truncated(
    following: Following, end: int, last_epoch: int
) -> tuple[Following, tuple[Effect, ...]]:
    following = following._replace(end=end, last_epoch=last_epoch)
    if following.phase is not Phase.TRUNCATING:
        return following, ()
    if following.next is not None:
        leader, epoch = following.next
        following = following._replace(phase=Phase.FENCING, leader=leader, epoch=epoch, next=None)
        # Asked for again: an answer that came during the cut was thrown away.
        return following, (Fence(epoch),)
    return _compare(following)


def _start(following: Following) -> tuple[Following, tuple[Effect, ...]]:
    following = following._replace(phase=Phase.FOLLOWING)
    epoch, end = following.epoch, following.end
    return following, (Grant(following.leader, epoch, end), Confirm(epoch, end))


def _committed(following: Following, event: Committed) -> tuple[Following, tuple[Effect, ...]]:
    following = following._replace(end=event.end, last_epoch=event.last_epoch)
    if following.phase is not Phase.FOLLOWING or event.writer != following.epoch:
        return following, ()  # the leader of another epoch wrote it; this one is not told
    return following, (Confirm(following.epoch, following.end),)
