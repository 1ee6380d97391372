"""What a replica does when it learns of a leader: fence, compare, truncate, and only then follow.

Pure.  The order is the law (KIP-101, KIP-279, `Kip320.tla`; over RDMA fencing comes before all of
them, because an epoch does not stop a WRITE that is on its way):

1. **Fencing**: the old leader's access to this replica's files is taken away.  When that is done
   nothing that it wrote or will write can reach bytes that this replica commits.  A replica that is
   to lead itself does this, too; then it begins to lead.
2. **Comparing**: the leader *of the new epoch* says where the last epoch of this replica's log ends
   in its own.  An answer of a leader of any other epoch is thrown away: it may have been deposed
   and not know it, or the answer was on its way for long.  So is an answer to an older question.
3. **Truncating**: what the leader does not have is cut off, and the replica compares again.  A
   replica whose records all lie below what the leader still keeps begins with an empty log at the
   leader's log start offset.
4. **Following**: the leader is granted the head, and told where this replica's log ends.  From now
   on each record that this replica's kernel has committed is confirmed, in this epoch.

A newer epoch at any time begins again with fencing.  A truncation that is under way ends before
that, because it may not run at the same time as another.

=================  ===============================================================================
event              what it does
=================  ===============================================================================
`Follow`           the store names a leader (perhaps this broker, perhaps none) and an epoch;
                   anything but a newer epoch is thrown away
`Fenced`           in FENCING: begin to compare, to lead, or to wait for a leader
`EpochEnd`         in COMPARING: cut the log, or follow
`Truncated`        in TRUNCATING: compare again, or fence if a newer epoch came meanwhile
`Committed`        in FOLLOWING, if the leader of this epoch wrote it: confirm it
`Told`             in FOLLOWING, by the leader of this epoch: the high watermark may grow
`OutOfRange`       in FOLLOWING, by the leader of this epoch: fence, and compare again
=================  ===============================================================================

In every other phase an event does nothing.  The driver asks (`AskEpochEnd`) until an answer comes
or the phase changes, and sends `Confirm` again over each new connection to the same leader.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from kdirect.cluster.partition_state import NO_LEADER

NO_EPOCH = -1


class Phase(enum.Enum):
    """Where a replica is on the way from one leader to the next."""

    IDLE = "no leader is known"
    FENCING = "the old leader's access is being taken away"
    COMPARING = "the leader was asked where an epoch ends"
    TRUNCATING = "records that the leader does not have are being cut off"
    FOLLOWING = "the leader writes, and this replica confirms"
    LEADING = "this replica leads"


# -- events ----------------------------------------------------------------------------------------


class Follow(NamedTuple):
    """`leader` leads in `epoch`: another broker, this one, or `NO_LEADER`.  A broker whose present
    incarnation was not elected (`partition_state.leads`) is told of `NO_LEADER`."""

    leader: int
    epoch: int


class Fenced(NamedTuple):
    """No access that was granted before `Fence(epoch)` can be used any more.  `end`, `last_epoch`
    and `high_watermark` are what the log has come to; nothing is added to it now."""

    epoch: int
    end: int
    last_epoch: int
    high_watermark: int


class EpochEnd(NamedTuple):
    """A leader's answer: `epoch` and `end` are what `leading_replica.epoch_end` says of `asked`.
    `leader_epoch` is the epoch in which the leader answered, `question` that of the
    `AskEpochEnd`; the leader's log was [`log_start`, `log_end`) then."""

    leader_epoch: int
    question: int
    asked: int
    epoch: int
    end: int
    log_start: int
    log_end: int


class Truncated(NamedTuple):
    """The log was cut, and ends at `end`; its last record has epoch `last_epoch`, or `NO_EPOCH`
    if it has no record."""

    end: int
    last_epoch: int


class Committed(NamedTuple):
    """The log ends at `end`, and its last record has epoch `last_epoch`; the leader of epoch
    `writer` has written it here."""

    end: int
    last_epoch: int
    writer: int


class Told(NamedTuple):
    """The leader of `epoch` says that its high watermark has reached `high_watermark`."""

    epoch: int
    high_watermark: int


class OutOfRange(NamedTuple):
    """The leader of `epoch` has deleted records that this replica lacks: its log begins at `start`
    now (Kafka's OFFSET_OUT_OF_RANGE)."""

    epoch: int
    start: int


Event: TypeAlias = Follow | Fenced | EpochEnd | Truncated | Committed | Told | OutOfRange


# -- effects ---------------------------------------------------------------------------------------


class Fence(NamedTuple):
    """Take away every access that was granted before, because this replica goes on in `epoch`;
    `Fenced` answers."""

    epoch: int


class AskEpochEnd(NamedTuple):
    """Ask `leader`, which leads in `leader_epoch`, where `epoch` ends (`NO_EPOCH`: this replica has
    no record); `EpochEnd` answers.  `question` numbers what is asked within one epoch: a replica
    may ask twice, and what the leader has of its own epoch grows between."""

    leader: int
    leader_epoch: int
    epoch: int
    question: int


class Truncate(NamedTuple):
    """Cut the log: no record at `offset` or above it, and none of an epoch above `epoch`, stays.
    `Truncated` answers."""

    epoch: int
    offset: int


class StartOver(NamedTuple):
    """Drop every record: the log is empty, and begins at `offset`.  `Truncated` answers."""

    offset: int


class TellLoss(NamedTuple):
    """Records from `offset` up to `high_watermark` were committed, and the leader does not have
    them: an unclean election lost them.  Say so where an operator reads it."""

    offset: int
    high_watermark: int


class Grant(NamedTuple):
    """Give `leader` write access to the head, in `epoch`; what it writes goes after `end`."""

    leader: int
    epoch: int
    end: int


class Confirm(NamedTuple):
    """Tell the leader of `epoch` that every record below `end` is committed here."""

    epoch: int
    end: int


class ShowHighWatermark(NamedTuple):
    """Records below `offset` may be read from this replica (KIP-392)."""

    offset: int


class BeginToLead(NamedTuple):
    """This replica leads in `epoch`: begin a `leading_replica.Leading` with this log end and high
    watermark."""

    epoch: int
    end: int
    high_watermark: int


Effect: TypeAlias = (
    Fence
    | AskEpochEnd
    | Truncate
    | StartOver
    | TellLoss
    | Grant
    | Confirm
    | ShowHighWatermark
    | BeginToLead
)


# -- the machine -----------------------------------------------------------------------------------


class Following(NamedTuple):
    """A replica's view of one partition.  It lasts as long as the process.

    `end` and `last_epoch`: of its log, since it was fenced.  `told`: the leader's high watermark,
    which may be above `end`.  `question`: the number of the last one in this epoch.  `next`: a
    leader that was learned of while a truncation was under way.
    """

    broker: int
    phase: Phase
    leader: int
    epoch: int
    end: int
    last_epoch: int
    high_watermark: int
    told: int = 0
    question: int = 0
    next: Follow | None = None

    @property
    def newest_epoch(self) -> int:
        """The newest epoch that this replica has learned of."""
        return self.epoch if self.next is None else self.next.epoch


def begin(broker: int, *, end: int, last_epoch: int, high_watermark: int = 0) -> Following:
    """A replica whose log was loaded and that knows of no leader."""
    high_watermark = min(high_watermark, end)
    return Following(broker, Phase.IDLE, NO_LEADER, NO_EPOCH, end, last_epoch, high_watermark)


def step(following: Following, event: Event) -> tuple[Following, tuple[Effect, ...]]:
    """What the event makes of the state, and what is to be done."""
    match event:
        case Follow():
            return _follow(following, event)
        case Fenced():
            return _fenced(following, event)
        case EpochEnd():
            return _answered(following, event)
        case Truncated():
            return _truncated(following, event)
        case Committed():
            return _committed(following, event)
        case Told():
            return _told(following, event)
        case OutOfRange():
            return _out_of_range(following, event)


def _follow(following: Following, event: Follow) -> tuple[Following, tuple[Effect, ...]]:
    if event.epoch <= following.newest_epoch:
        return following, ()
    if following.phase is Phase.TRUNCATING:
        return following._replace(next=event), ()  # nobody has access: it was fenced before the cut
    return _fence(following, event)


def _fence(following: Following, event: Follow) -> tuple[Following, tuple[Effect, ...]]:
    following = following._replace(
        phase=Phase.FENCING,
        leader=event.leader,
        epoch=event.epoch,
        told=0,
        question=following.question if event.epoch == following.epoch else 0,
        next=None,
    )
    return following, (Fence(event.epoch),)


def _fenced(following: Following, event: Fenced) -> tuple[Following, tuple[Effect, ...]]:
    if following.phase is not Phase.FENCING or event.epoch < following.epoch:
        return following, ()
    following = following._replace(
        end=event.end,
        last_epoch=event.last_epoch,
        high_watermark=min(event.end, event.high_watermark),
    )
    if following.leader == NO_LEADER:
        return following._replace(phase=Phase.IDLE), ()
    if following.leader == following.broker:
        lead = BeginToLead(following.epoch, following.end, following.high_watermark)
        return following._replace(phase=Phase.LEADING), (lead,)
    return _compare(following)


def _compare(following: Following) -> tuple[Following, tuple[Effect, ...]]:
    # An empty log asks, too: it has to begin where the leader's log begins.
    question = following.question + 1
    ask = AskEpochEnd(following.leader, following.epoch, following.last_epoch, question)
    return following._replace(phase=Phase.COMPARING, question=question), (ask,)


def _answered(following: Following, event: EpochEnd) -> tuple[Following, tuple[Effect, ...]]:
    if (
        following.phase is not Phase.COMPARING
        or event.leader_epoch != following.epoch
        or event.question != following.question
        or event.asked != following.last_epoch
    ):
        return following, ()
    return _compared(following, event)


def _compared(following: Following, event: EpochEnd) -> tuple[Following, tuple[Effect, ...]]:
    """The leader of this epoch answered what was asked."""
    if following.last_epoch == NO_EPOCH and event.log_start <= following.end <= event.log_end:
        # No record to compare.  A log that was emptied by retention must not go back to the
        # leader's start: this replica may be in sync, and would lack committed records then.
        return _start(following)
    if event.end <= event.log_start or following.end < event.log_start:
        # Nothing that this replica has is known to be in what the leader keeps.
        return _cut(following, StartOver(event.log_start), event.log_start)
    if event.epoch == following.last_epoch and following.end <= event.end:
        return _start(following)
    # Either the leader's part of our last epoch is shorter than ours, or it does not know that
    # epoch: then only what belongs to older ones can be common, up to where they end there.
    return _cut(following, Truncate(event.epoch, event.end), event.end)


def _cut(
    following: Following, cut: Truncate | StartOver, offset: int
) -> tuple[Following, tuple[Effect, ...]]:
    lost: tuple[Effect, ...] = ()
    if offset < following.high_watermark:
        lost = (TellLoss(offset, following.high_watermark),)
    return following._replace(phase=Phase.TRUNCATING), (*lost, cut)


def _truncated(following: Following, event: Truncated) -> tuple[Following, tuple[Effect, ...]]:
    if following.phase is not Phase.TRUNCATING:
        return following, ()
    following = following._replace(
        end=event.end,
        last_epoch=event.last_epoch,
        high_watermark=min(following.high_watermark, event.end),
    )
    if following.next is not None:
        return _fence(following, following.next)
    return _compare(following)


def _start(following: Following) -> tuple[Following, tuple[Effect, ...]]:
    following = following._replace(phase=Phase.FOLLOWING)
    epoch, end = following.epoch, following.end
    return following, (Grant(following.leader, epoch, end), Confirm(epoch, end))


def _committed(following: Following, event: Committed) -> tuple[Following, tuple[Effect, ...]]:
    if following.phase is not Phase.FOLLOWING or event.writer != following.epoch:
        return following, ()  # `Fenced` tells what became of it
    following = following._replace(end=event.end, last_epoch=event.last_epoch)
    following, shown = _show(following)
    return following, (Confirm(following.epoch, following.end), *shown)


def _told(following: Following, event: Told) -> tuple[Following, tuple[Effect, ...]]:
    if following.phase is not Phase.FOLLOWING or event.epoch != following.epoch:
        return following, ()
    return _show(following._replace(told=max(following.told, event.high_watermark)))


def _out_of_range(following: Following, event: OutOfRange) -> tuple[Following, tuple[Effect, ...]]:
    if following.phase is not Phase.FOLLOWING or event.epoch != following.epoch:
        return following, ()
    if event.start <= following.end:
        return following, ()  # what was lacking has come since
    return _fence(following, Follow(following.leader, following.epoch))


def _show(following: Following) -> tuple[Following, tuple[Effect, ...]]:
    shown = min(following.told, following.end)
    if shown <= following.high_watermark:
        return following, ()
    return following._replace(high_watermark=shown), (ShowHighWatermark(shown),)
