"""What the leader of a partition decides: the high watermark, and whom it counts as in sync.

Pure.  One `Leading` value for each leader epoch; it begins when this broker learns that it leads,
and is dropped when it learns of a newer epoch.

**High watermark** (rule of `AsyncIsr.tla`, KIP-497).  It is the least log end over the *counted*
replicas: those in sync by the last state that the leader knows, and those of a change that it has
proposed, until the controller has answered.  Counting both is right whichever of the two the
controller will elect from.  A counted follower that has confirmed nothing in this epoch holds the
high watermark where it is: what it had in an older epoch may have been truncated.  While fewer than
``min.insync.replicas`` are in sync it stands still (KIP-966).

**Joining** (KIP-101, KIP-903).  A follower may join when it has confirmed, in this epoch, over a link
that holds and with the incarnation that is registered now, an end that is not below the high watermark *and* not below
the epoch's start.  Without the second, a leader whose high watermark lags would admit a follower
that lacks committed records.

**Leaving.**  A follower leaves when it has not been level with the leader for
``replica.lag.time.max.ms``, and at once when its incarnation is no longer registered or its link is
lost.

======================  ==========================================================================
event                   what it does
======================  ==========================================================================
`Appended`              the leader's own log has grown
`Confirmed`             a follower's kernel has committed up to an offset
`Registered`            which brokers live, with their incarnations
`LinkLost`              the connection to a follower broke; it says nothing of its process
`Ticked`                time has passed
`Learned`               the store has a newer version of the state, with the same leader epoch
`Refused`               the controller refused the proposal: nothing of it happened or will
`Configured`            ``min.insync.replicas`` or the lag has changed
======================  ==========================================================================

A proposal whose outcome is unknown is neither: it stays until a newer version is learned, and the
driver sends it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from kdirect.cluster.partition_state import PartitionState

UNHEARD = -1


# -- events ----------------------------------------------------------------------------------------


class Appended(NamedTuple):
    """The leader's log ends before offset `end` now."""

    end: int


class Confirmed(NamedTuple):
    """Follower `broker` has committed every record below `end`, in leader epoch `epoch`."""

    broker: int
    incarnation: int
    epoch: int
    end: int


class Registered(NamedTuple):
    """The brokers that live: (id, incarnation) of each, by id."""

    brokers: tuple[tuple[int, int], ...]


class LinkLost(NamedTuple):
    broker: int


class Ticked(NamedTuple):
    now_ms: int


class Learned(NamedTuple):
    state: PartitionState


class Refused(NamedTuple):
    """The proposal against state `version` did not happen and will not."""

    version: int


class Configured(NamedTuple):
    min_in_sync: int
    lag_ms: int


Event: TypeAlias = (
    Appended | Confirmed | Registered | LinkLost | Ticked | Learned | Refused | Configured
)


# -- effects ---------------------------------------------------------------------------------------


class ShowHighWatermark(NamedTuple):
    """Records below `offset` are committed: show them, acknowledge them, tell the followers."""

    offset: int


class Propose(NamedTuple):
    """Ask the controller to make `in_sync` the replicas in sync, if the state is still at
    `version`."""

    in_sync: tuple[int, ...]
    version: int


Effect: TypeAlias = ShowHighWatermark | Propose


# -- the machine -----------------------------------------------------------------------------------


class Follower(NamedTuple):
    """What the leader knows of one.  `end`: what it confirmed in this epoch; `level_ms`: when it
    last had everything that the leader had."""

    broker: int
    end: int = UNHEARD
    incarnation: int = UNHEARD
    level_ms: int = 0
    linked: bool = False


class Leading(NamedTuple):
    """The leader's view of one partition in one epoch."""

    broker: int
    state: PartitionState
    epoch_start: int  # the log's end when this broker became the leader
    end: int
    high_watermark: int
    followers: tuple[Follower, ...]  # by broker
    registered: tuple[tuple[int, int], ...] = ()
    proposed: tuple[int, ...] | None = None
    min_in_sync: int = 1
    lag_ms: int = 30_000
    # The log's end at the last tick: a follower that has it was level then.
    ticked: tuple[int, int] = (0, 0)

    @property
    def counted(self) -> tuple[int, ...]:
        """Replicas whose ends bound the high watermark."""
        proposed = self.proposed or ()
        return tuple(sorted({*self.state.in_sync, *proposed}))

    @property
    def knows_high_watermark(self) -> bool:
        """Is the high watermark known to be no lower than any that was shown before?  Until then
        readers are told OFFSET_NOT_AVAILABLE (KIP-207)."""
        return self.high_watermark >= self.epoch_start


def begin(
    broker: int,
    state: PartitionState,
    replicas: tuple[int, ...],
    *,
    end: int,
    high_watermark: int,
    now_ms: int,
    min_in_sync: int = 1,
    lag_ms: int = 30_000,
    registered: tuple[tuple[int, int], ...] = (),
) -> tuple[Leading, tuple[Effect, ...]]:
    """Begin to lead.  `high_watermark`: what this broker knew of it as a follower."""
    followers = tuple(
        Follower(replica, level_ms=now_ms) for replica in sorted(replicas) if replica != broker
    )
    leading = Leading(
        broker, state, end, end, high_watermark, followers, registered,
        min_in_sync=min_in_sync, lag_ms=lag_ms, ticked=(now_ms, end),
    )  # fmt: skip
    return _advance(leading)


def step(leading: Leading, event: Event) -> tuple[Leading, tuple[Effect, ...]]:
    """What the event makes of the state, and what is to be done."""
    match event:
        case Appended(end):
            return _advance(leading._replace(end=max(leading.end, end)))
        case Confirmed():
            return _confirmed(leading, event)
        case Registered(brokers):
            return _shrink(leading._replace(registered=brokers))
        case LinkLost(broker):
            return _shrink(_with(leading, broker, linked=False))
        case Ticked(now_ms):
            return _ticked(leading, now_ms)
        case Learned(state):
            return _learned(leading, state)
        case Refused(version):
            if leading.proposed is None or version != leading.state.version:
                return leading, ()
            return _advance(leading._replace(proposed=None))
        case Configured(min_in_sync, lag_ms):
            return _advance(leading._replace(min_in_sync=min_in_sync, lag_ms=lag_ms))


def high_watermark(leading: Leading) -> int:
    """Where the high watermark may be: see the module."""
    if len(leading.state.in_sync) < leading.min_in_sync:
        return leading.high_watermark
    ends = [leading.end]
    for follower in leading.followers:
        if follower.broker in leading.counted:
            ends.append(follower.end)
    return max(leading.high_watermark, min(ends))


def may_join(leading: Leading, follower: Follower) -> bool:
    """May this follower be counted as in sync?  See the module."""
    return (
        follower.linked
        and follower.end >= max(leading.high_watermark, leading.epoch_start)
        and (follower.broker, follower.incarnation) in leading.registered
    )


def _advance(leading: Leading) -> tuple[Leading, tuple[Effect, ...]]:
    reached = high_watermark(leading)
    if reached == leading.high_watermark:
        return leading, ()
    return leading._replace(high_watermark=reached), (ShowHighWatermark(reached),)


def _with(leading: Leading, broker: int, **changes: Any) -> Leading:
    followers = tuple(
        follower._replace(**changes) if follower.broker == broker else follower
        for follower in leading.followers
    )
    return leading._replace(followers=followers)


def _confirmed(leading: Leading, event: Confirmed) -> tuple[Leading, tuple[Effect, ...]]:
    known = {follower.broker: follower for follower in leading.followers}.get(event.broker)
    if known is None or event.epoch != leading.state.leader_epoch or event.end > leading.end:
        return leading, ()  # of no replica, of another epoch, or of what it cannot have
    if event.incarnation < known.incarnation:
        return leading, ()  # of a process that has died since
    renewed = event.incarnation > known.incarnation
    end = event.end if renewed else max(known.end, event.end)
    level_ms = leading.ticked[0] if end >= leading.ticked[1] else known.level_ms
    leading = _with(
        leading, event.broker, end=end, incarnation=event.incarnation, linked=True,
        level_ms=max(known.level_ms, level_ms),
    )  # fmt: skip
    leading, shown = _advance(leading)
    leading, proposed = _expand(leading)
    return leading, shown + proposed


def _expand(leading: Leading) -> tuple[Leading, tuple[Effect, ...]]:
    if leading.proposed is not None:
        return leading, ()
    joining = [
        follower.broker
        for follower in leading.followers
        if follower.broker not in leading.state.in_sync and may_join(leading, follower)
    ]
    return _propose(leading, (*leading.state.in_sync, *joining)) if joining else (leading, ())


def _shrink(leading: Leading) -> tuple[Leading, tuple[Effect, ...]]:
    if leading.proposed is not None:
        return leading, ()
    staying = [leading.broker]
    for follower in leading.followers:
        if follower.broker in leading.state.in_sync and _stays(leading, follower):
            staying.append(follower.broker)
    if len(staying) == len(leading.state.in_sync):
        return leading, ()
    return _propose(leading, tuple(staying))


def _stays(leading: Leading, follower: Follower) -> bool:
    heard = follower.incarnation != UNHEARD
    lives = any(
        broker == follower.broker and (not heard or incarnation == follower.incarnation)
        for broker, incarnation in leading.registered
    )
    lost = heard and not follower.linked
    return lives and not lost and leading.ticked[0] - follower.level_ms <= leading.lag_ms


def _propose(leading: Leading, in_sync: tuple[int, ...]) -> tuple[Leading, tuple[Effect, ...]]:
    proposed = tuple(sorted(in_sync))
    # Whoever is proposed is counted from now on, before the controller hears of it.
    leading = leading._replace(proposed=proposed)
    return leading, (Propose(proposed, leading.state.version),)


def _ticked(leading: Leading, now_ms: int) -> tuple[Leading, tuple[Effect, ...]]:
    before_ms, before_end = leading.ticked
    followers = []
    for follower in leading.followers:
        if follower.end >= leading.end:
            follower = follower._replace(level_ms=now_ms)
        elif follower.end >= before_end:
            follower = follower._replace(level_ms=max(follower.level_ms, before_ms))
        followers.append(follower)
    leading = leading._replace(followers=tuple(followers), ticked=(now_ms, leading.end))
    leading, shrunk = _shrink(leading)
    leading, expanded = _expand(leading)
    return leading, shrunk + expanded


def _learned(leading: Leading, state: PartitionState) -> tuple[Leading, tuple[Effect, ...]]:
    if state.leader_epoch != leading.state.leader_epoch or state.version <= leading.state.version:
        return leading, ()
    # A newer version settles the proposal, whatever became of it: it named the older one.
    leading, shown = _advance(leading._replace(state=state, proposed=None))
    leading, expanded = _expand(leading)
    leading, shrunk = _shrink(leading)
    return leading, shown + expanded + shrunk
