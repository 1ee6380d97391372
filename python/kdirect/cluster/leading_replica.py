"""What the leader of a partition decides: the high watermark, and whom it counts as in sync.

Pure.  One `Leading` value for each leader epoch: it begins when this broker leads
(`following_replica.BeginToLead`, so no older leader can write here any more) and is dropped when
the broker learns of a newer epoch.  A broker that restarted does not begin to lead in an epoch in
which it led before (`partition_state.leads`).

**High watermark** (`AsyncIsr.tla`, KIP-497).  It is the least log end over the *counted* replicas:
those in sync by the last state that the leader knows, and those of a change that it has proposed,
until the controller has answered.  So it is right whichever of the two the controller elects from.
A counted follower that has confirmed nothing in this epoch holds the high watermark where it is,
because what it had in an older epoch may have been truncated.  While fewer than
``min.insync.replicas`` are in sync by the last known state, or the state names eligible replicas,
it stands still (KIP-966): the controller counts on it that an eligible replica has every committed
record, whatever this broker's configuration says by then.

**Joining** (KIP-101, KIP-903).  A follower may join when it has confirmed an end that is not below
the high watermark *and* not below the epoch's start, in this epoch, over a link that holds, with
the incarnation that is registered now, and when it would not leave at once.  Without the epoch's
start a leader whose high watermark is late would admit a follower that lacks committed records.  A
proposal names the incarnation of each follower, so that the controller can refuse one that has
restarted since.  A follower that is not in sync and is as good as *level* (it has all that the
leader had when it asked last) holds the high watermark, for some ticks at most: under load it would
never reach it otherwise.

**Leaving.**  A follower leaves when it has not been level with the leader for
``replica.lag.time.max.ms``, and at once when its incarnation is no longer registered, its link is
lost, it is no replica any more, or it says that it has no room: it does not come back before it has
got further.  It counts until the controller has agreed.

**Time** is what ticks say, at least two of them in each ``replica.lag.time.max.ms``.  A tick counts
for at most half of that, and never for less than nothing: when the clock jumps, or when this broker
itself stood still and could hear nobody, no follower leaves for that.

======================  ==========================================================================
event                   what it does
======================  ==========================================================================
`Appended`              the leader's own log has grown
`Confirmed`             a follower's kernel has committed up to an offset
`Registered`            which brokers live, with their incarnations
`LinkLost`              the connection to a follower broke; it says nothing of its process
`Ticked`                time has passed
`Learned`               the store has a newer version of the state, with the same leader epoch
`Assigned`              the partition has other replicas, in the same leader epoch
`Refused`               the controller refused the proposal: nothing of it happened or will
`Configured`            ``min.insync.replicas`` or the lag has changed
======================  ==========================================================================

At most one proposal is open.  One whose outcome is unknown stays open until a newer version is
learned, and the driver sends it again.  After a refusal nothing is proposed until a tick, or until
something is learned: otherwise each confirmation would ask the controller again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from kdirect.cluster.partition_state import NO_INCARNATION, PartitionState

UNHEARD = -1


# -- events ----------------------------------------------------------------------------------------


class Appended(NamedTuple):
    """The leader's log ends before offset `end` now.  To be told before a `Confirmed` of it."""

    end: int


class Confirmed(NamedTuple):
    """Follower `broker` has committed every record below `end`, in leader epoch `epoch`.

    Within one incarnation and epoch a follower's end never falls: a replica that lost its log
    while its process lives must not confirm again in that epoch.  `level`: it has all that the
    leader had when it asked before this.  `is_full`: it had no room for what follows `end`.
    """

    broker: int
    incarnation: int
    epoch: int
    end: int
    level: bool = False
    is_full: bool = False


class Registered(NamedTuple):
    """The brokers that live: (id, incarnation) of each, by id."""

    brokers: tuple[tuple[int, int], ...]


class LinkLost(NamedTuple):
    """The connection to follower `broker` broke.  Its next `Confirmed` comes over a new one."""

    broker: int


class Ticked(NamedTuple):
    """The clock shows `now_ms`."""

    now_ms: int


class Learned(NamedTuple):
    """The store has this state."""

    state: PartitionState


class Assigned(NamedTuple):
    """The partition's replicas.  The controller makes a new leader epoch when it removes one: a
    replica that is removed, loses its log and is added again with one incarnation would otherwise
    be taken for what it was."""

    replicas: tuple[int, ...]


class Refused(NamedTuple):
    """The proposal against state `version` did not happen and will not.  The driver may say so only
    if no copy of the proposal that it has sent is still unanswered."""

    version: int


class Configured(NamedTuple):
    """The topic's configuration."""

    min_in_sync: int
    lag_ms: int


Event: TypeAlias = (
    Appended
    | Confirmed
    | Registered
    | LinkLost
    | Ticked
    | Learned
    | Assigned
    | Refused
    | Configured
)


# -- effects ---------------------------------------------------------------------------------------


class ShowHighWatermark(NamedTuple):
    """Records below `offset` are committed: show them, acknowledge them, tell the followers.  What
    is told as the *latest* offset waits for `Leading.knows_high_watermark`."""

    offset: int


class Propose(NamedTuple):
    """Ask the controller to make `in_sync` the replicas in sync, if the state is still at
    `version`.  `incarnations`: of each of them, as far as it was heard; the controller refuses
    when it knows of another one (KIP-903)."""

    in_sync: tuple[int, ...]
    incarnations: tuple[int, ...]
    version: int


Effect: TypeAlias = ShowHighWatermark | Propose


# -- the machine -----------------------------------------------------------------------------------


class Follower(NamedTuple):
    """What the leader knows of one.  `end`: what it confirmed in this epoch; `level_ms`: when it
    last had everything that the leader had; `level` and `is_full`: see `Confirmed`."""

    broker: int
    end: int = UNHEARD
    incarnation: int = NO_INCARNATION
    level_ms: int = 0
    linked: bool = False
    level: bool = False
    is_full: bool = False


class Clock(NamedTuple):
    """Time as the last tick left it.  `ms` only grows; `shown_ms` is what the driver's clock showed
    then, and `end` where the leader's log ended."""

    ms: int
    shown_ms: int
    end: int


class Leading(NamedTuple):
    """The leader's view of one partition in one epoch."""

    broker: int
    state: PartitionState
    replicas: tuple[int, ...]
    epoch_start: int  # the log's end when this broker became the leader
    end: int
    high_watermark: int
    followers: tuple[Follower, ...]  # by broker; those that left the replicas stay while in sync
    clock: Clock
    registered: tuple[tuple[int, int], ...] = ()
    proposed: tuple[int, ...] | None = None
    refused: bool = False
    min_in_sync: int = 1
    lag_ms: int = 30_000

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
    replicas: Sequence[int],
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
        Follower(replica, level_ms=now_ms)
        for replica in sorted({*replicas, *state.in_sync})
        if replica != broker
    )
    leading = Leading(
        broker,
        state,
        tuple(sorted(replicas)),
        end,
        end,
        min(high_watermark, end),
        followers,
        Clock(now_ms, now_ms, end),
        registered,
        min_in_sync=min_in_sync,
        lag_ms=lag_ms,
    )
    reached = high_watermark_of(leading)
    return leading._replace(high_watermark=reached), (ShowHighWatermark(reached),)


def step(leading: Leading, event: Event) -> tuple[Leading, tuple[Effect, ...]]:
    """What the event makes of the state, and what is to be done."""
    match event:
        case Appended(end):
            return _advance(leading._replace(end=max(leading.end, end)))
        case Confirmed():
            return _confirmed(leading, event)
        case Registered(brokers):
            return _advance_and_propose(leading._replace(registered=brokers, refused=False))
        case LinkLost(broker):
            return _advance_and_propose(_with(leading, broker, linked=False))
        case Ticked(now_ms):
            return _advance_and_propose(_ticked(leading, now_ms))
        case Learned(state):
            return _learned(leading, state)
        case Assigned(replicas):
            return _advance_and_propose(_assigned(leading, replicas))
        case Refused(version):
            if leading.proposed is None or version != leading.state.version:
                return leading, ()
            # One that has left meanwhile counted because it was proposed.
            leading = _assigned(leading._replace(proposed=None), leading.replicas)
            return _advance(leading._replace(refused=True))
        case Configured(min_in_sync, lag_ms):
            return _advance(leading._replace(min_in_sync=min_in_sync, lag_ms=lag_ms))


def moves_high_watermark(leading: Leading) -> bool:
    """May the high watermark move at all?"""
    enough = min(leading.min_in_sync, len(leading.replicas))
    return not leading.state.eligible and len(leading.state.in_sync) >= enough


def counted_with_joining(leading: Leading) -> tuple[int, ...]:
    """The replicas that the high watermark waits for: those that count, and those that are about to
    be in sync."""
    joining = (f.broker for f in leading.followers if _is_joining(leading, f))
    return tuple(sorted({*leading.counted, *joining}))


def high_watermark_of(leading: Leading) -> int:
    """Where the high watermark may be: see the module."""
    if not moves_high_watermark(leading):
        return leading.high_watermark
    counted = counted_with_joining(leading)
    ends = [follower.end for follower in leading.followers if follower.broker in counted]
    return max(leading.high_watermark, min([leading.end, *ends]))


def may_join(leading: Leading, follower: Follower) -> bool:
    """May this follower be counted as in sync?  See the module."""
    return (
        follower.linked
        and follower.end >= max(leading.high_watermark, leading.epoch_start)
        and (follower.broker, follower.incarnation) in leading.registered
    )


def is_lost(follower: Follower) -> bool:
    """Was it heard, over a link that broke since?"""
    return follower.incarnation != NO_INCARNATION and not follower.linked


def _is_joining(leading: Leading, follower: Follower) -> bool:
    """Is this follower about to be in sync, if the high watermark waits for it?"""
    return (
        follower.level
        and follower.linked
        and not follower.is_full
        and follower.broker in leading.replicas
        and (follower.broker, follower.incarnation) in leading.registered
    )


def epoch_end(
    epochs: Iterable[tuple[int, int]], start: int, end: int, asked: int
) -> tuple[int, int]:
    """What a leader answers a replica whose last record has epoch `asked` (KIP-279): the largest
    epoch of its log that is not above `asked`, and the offset at which that epoch ends.

    `epochs`: (epoch, first offset) of each epoch of which the log [`start`, `end`) still has a
    record, ascending.  When all of them are above `asked`, or `asked` is -1, nothing that the
    asker has is known to be in the log: the answer is `asked` itself, ending at `start`.
    """
    found: int | None = None
    for epoch, first in epochs:
        if epoch > asked:
            return (asked, start) if found is None else (found, first)
        found = epoch
    return (asked, start) if found is None else (found, end)


def _advance(leading: Leading) -> tuple[Leading, tuple[Effect, ...]]:
    reached = high_watermark_of(leading)
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
    known = next((f for f in leading.followers if f.broker == event.broker), None)
    if known is None or event.epoch != leading.state.leader_epoch or event.end > leading.end:
        return leading, ()  # of no replica, of another epoch, or of what it cannot have
    if event.incarnation < known.incarnation:
        return leading, ()  # of a process that has died since
    renewed = event.incarnation > known.incarnation
    end = event.end if renewed else max(known.end, event.end)
    level_ms = leading.clock.ms if end >= leading.clock.end else known.level_ms
    leading = _with(
        leading,
        event.broker,
        end=end,
        incarnation=event.incarnation,
        linked=True,
        level=event.level,
        is_full=event.is_full,
        level_ms=max(known.level_ms, level_ms),
    )
    return _advance_and_propose(leading)


def _advance_and_propose(leading: Leading) -> tuple[Leading, tuple[Effect, ...]]:
    """Both: the high watermark waits for a follower that is about to join, and whoever is not about
    to any more may have been the only one that held it."""
    leading, shown = _advance(leading)
    leading, proposed = _propose(leading)
    return leading, shown + proposed


def _propose(leading: Leading) -> tuple[Leading, tuple[Effect, ...]]:
    """Propose whoever should be in sync, if that is not what the state says."""
    if leading.proposed is not None or leading.refused:
        return leading, ()
    in_sync, incarnations = [leading.broker], {leading.broker: leading.state.incarnation}
    for follower in leading.followers:
        if follower.broker in leading.state.in_sync:
            belongs = _stays(leading, follower)
        else:
            # One that lags would leave at once: it does not fall below a mark that stands still.
            belongs = may_join(leading, follower) and _stays(leading, follower)
        if belongs:
            in_sync.append(follower.broker)
            incarnations[follower.broker] = follower.incarnation
    proposed = tuple(sorted(in_sync))
    if proposed == tuple(sorted(leading.state.in_sync)):
        return leading, ()
    # Whoever is proposed is counted from now on, before the controller hears of it.
    effect = Propose(proposed, tuple(incarnations[b] for b in proposed), leading.state.version)
    return leading._replace(proposed=proposed), (effect,)


def _stays(leading: Leading, follower: Follower) -> bool:
    if follower.broker not in leading.replicas or follower.is_full:
        return False
    heard = follower.incarnation != NO_INCARNATION
    lives = any(
        broker == follower.broker and (not heard or incarnation == follower.incarnation)
        for broker, incarnation in leading.registered
    )
    recent = leading.clock.ms - follower.level_ms <= leading.lag_ms
    return lives and not is_lost(follower) and recent


def _ticked(leading: Leading, now_ms: int) -> Leading:
    before = leading.clock
    elapsed = min(max(now_ms - before.shown_ms, 0), leading.lag_ms // 2)
    clock = Clock(before.ms + elapsed, now_ms, leading.end)
    followers = []
    for follower in leading.followers:
        if follower.end >= leading.end:
            follower = follower._replace(level_ms=clock.ms)
        elif follower.end >= before.end:
            # It had all that there was at the last tick, and what came since came after that.
            follower = follower._replace(level_ms=max(follower.level_ms, before.ms))
        else:
            follower = follower._replace(level=False)
        followers.append(follower)
    return leading._replace(followers=tuple(followers), clock=clock, refused=False)


def _learned(leading: Leading, state: PartitionState) -> tuple[Leading, tuple[Effect, ...]]:
    if state.leader_epoch != leading.state.leader_epoch or state.version <= leading.state.version:
        return leading, ()
    # A newer version settles the proposal, whatever became of it: it named the older one.
    leading = leading._replace(state=state, proposed=None, refused=False)
    return _advance_and_propose(_assigned(leading, leading.replicas))


def _assigned(leading: Leading, replicas: Sequence[int]) -> Leading:
    """A replica that left stays among the followers while it counts: the state may elect it."""
    known = {follower.broker: follower for follower in leading.followers}
    kept = {*replicas, *leading.counted} - {leading.broker}
    followers = tuple(
        known.get(broker, Follower(broker, level_ms=leading.clock.ms)) for broker in sorted(kept)
    )
    return leading._replace(replicas=tuple(sorted(replicas)), followers=followers, refused=False)
