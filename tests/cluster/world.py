"""Some replicas of one partition, the controller and the store, and every message on its way, as
one immutable value: what the exhaustive search and the simulation go through.

The replicas decide by the machines of `kdirect.cluster`.  All else is reduced to what matters to
them: a record is a pair (leader epoch, number), a log a tuple of records, a WRITE lands or does
not, a kernel commits what continues its log.  Messages take any time, and overtake each other where
the real ones can: WRITEs of one leader to one follower arrive in order, nothing else does.

`check` says what must hold in every world.  The steps are in `tests.cluster.moves`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from kdirect.cluster.following_replica import Following, Phase, StartOver, Truncate
from kdirect.cluster.following_replica import begin as begin_following
from kdirect.cluster.leading_replica import Leading, Propose
from kdirect.cluster.partition_state import PartitionState
from tests.cluster.model_log import ModelLog, Record

DOWN = -1


class Bounds(NamedTuple):
    """How much may happen, and how finely."""

    replicas: int = 3
    records: int = 2
    epochs: int = 2
    changes: int = 1  # of who is in sync, that the controller agrees to
    losses: int = 1  # of links
    crashes: int = 0
    deletes: int = 0  # of records at the start of a log
    min_in_sync: int = 1
    run: int = 1  # the most records in one WRITE
    stale: bool = False  # may a broker learn of a state that is no longer the newest?
    late: bool = False  # may an answer to where an epoch ends be on its way for any time?
    separate: bool = False  # may time pass where nothing that matters can come between?
    tells: bool = False  # does the leader tell followers of the high watermark?
    again: bool = False  # may the controller elect the leader again?
    expires: bool = False  # may a session end while its broker lives (counted as a crash)?
    lossy: bool = False  # may a crash lose records?
    unclean: bool = False  # may a replica be elected that is not in sync?
    spares: int = 0  # brokers in addition, to which the partition may be reassigned


class Write(NamedTuple):
    """A WRITE of `records` to `place` in the file that incarnation `incarnation` of follower `to`
    granted to the leader of `epoch`.  Its key is looked at when it lands."""

    epoch: int
    leader: int
    to: int
    incarnation: int
    place: int
    records: tuple[Record, ...]


class Confirmation(NamedTuple):
    """A follower's `Confirm` on its way to the leader of `epoch`."""

    broker: int
    incarnation: int
    epoch: int
    end: int


class Proposal(NamedTuple):
    """A leader's `Propose` on its way to the controller."""

    leader: int
    epoch: int
    propose: Propose


class Answer(NamedTuple):
    """A leader's answer on its way to a replica that asked where an epoch ends."""

    to: int
    incarnation: int
    leader_epoch: int
    question: int
    asked: int
    epoch: int
    end: int
    log_start: int
    log_end: int


class Ask(NamedTuple):
    """What a replica wants to know, until it has been told."""

    leader: int
    leader_epoch: int
    epoch: int
    question: int


class Replica(NamedTuple):
    """A broker's part.  `known` is the state under which it is to lead; `granted` the epoch whose
    leader holds the key of its head (-1: nobody); `landed` what was written there and is not
    committed; `fencing` and `cutting` is work that was begun; `pushed` is, for each follower that
    a leader pushes to, the end of what it has sent."""

    following: Following
    leading: Leading | None = None
    known: PartitionState | None = None
    log: ModelLog = ModelLog()
    granted: int = -1
    landed: tuple[tuple[int, tuple[Record, ...]], ...] = ()
    fencing: int = -1
    cutting: Truncate | StartOver | None = None
    asking: Ask | None = None
    pushed: tuple[tuple[int, int], ...] = ()


class World(NamedTuple):
    """Everything.

    `registered` is the incarnation in which each broker runs (or `DOWN`), `noticed` what the
    controller has noticed of that.  `crashed` are the brokers that have crashed since they last
    came into sync, each with whether records were lost.  `shown` is the longest run of records that
    any leader has shown, `highest` for each epoch the highest end that its leader has told anyone
    as the latest.  `written` counts the records that each epoch's leader has appended.  Leaders of
    epochs below `void` lost against an unclean election, and what they show is lost.
    """

    state: PartitionState
    replicas: tuple[Replica, ...]
    assigned: tuple[int, ...]
    registered: tuple[int, ...]
    noticed: tuple[int, ...]
    min_in_sync: int
    older: tuple[PartitionState, ...] = ()
    writes: tuple[Write, ...] = ()
    confirmations: tuple[Confirmation, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    answers: tuple[Answer, ...] = ()
    incarnations: int = 0  # the newest incarnation of any broker
    crashed: tuple[tuple[int, bool], ...] = ()
    shown: tuple[Record, ...] = ()
    highest: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    void: int = 0
    changes: int = 0
    losses: int = 0
    crashes: int = 0
    deletes: int = 0


class Broken(AssertionError):
    """A world that must not be."""


def begin(bounds: Bounds, logs: tuple[ModelLog, ...] = (), leader: int = 0) -> World:
    """`leader` was elected in epoch 1, all are in sync, and nobody has learned of it.  `logs`: what
    the replicas have of epoch 0; what all of them have was shown."""
    count = bounds.replicas + bounds.spares
    everybody = tuple(range(bounds.replicas))
    replicas = []
    for broker in range(count):
        log = logs[broker] if broker < len(logs) else ModelLog()
        following = begin_following(broker, end=log.end, last_epoch=log.last_epoch)
        replicas.append(Replica(following, log=log))
    shown = min((log.records for log in logs), key=len, default=())
    return World(
        PartitionState(leader, 1, everybody, 0, incarnation=0),
        tuple(replicas),
        everybody,
        registered=(0,) * count,
        noticed=(0,) * count,
        min_in_sync=bounds.min_in_sync,
        shown=shown,
        highest=(0,) * (bounds.epochs + 1),
        written=(0,) * (bounds.epochs + 1),
    )


# -- what must hold --------------------------------------------------------------------------------


def check(world: World) -> None:
    """Raise `Broken` unless all of this holds.

    - *StrongIsr*: every replica that is in sync, eligible, or would be by a proposal that can still
      be agreed to, has every record that was shown; unless it has crashed since.
    - *Leader completeness*: so does the leader that the store names, when it leads.
    - *Log matching*: where two logs have records of one epoch at one offset, they agree up to
      there.  No log has a record twice, or an older epoch after a newer one.
    - *One leader an epoch.*
    - What a follower shows was shown by a leader before.
    - A confirmation on its way to the leader of the present epoch is true.
    """
    state, replicas, shown = world.state, world.replicas, world.shown
    crashed = dict(world.crashed)
    must_have = {*state.in_sync, *state.eligible}
    for proposal in world.proposals:
        if can_be_agreed(world, proposal):
            must_have.update(proposal.propose.in_sync)
    for broker in must_have:
        if broker not in crashed and not has_all(replicas[broker].log, shown):
            raise Broken(f"broker {broker} is in sync and lacks records that were shown")
    epochs = []
    for broker, replica in enumerate(replicas):
        if replica.leading is not None:
            epoch = replica.leading.state.leader_epoch
            epochs.append(epoch)
            if epoch == state.leader_epoch and not has_all(replica.log, shown):
                raise Broken(f"broker {broker} leads and lacks records that were shown")
        _check_shown_by_follower(world, broker)
    if len(set(epochs)) < len(epochs):
        raise Broken("two brokers lead in one epoch")
    for number, replica in enumerate(replicas):
        for other in replicas[:number]:
            if replica.log != other.log:
                _check_matching(replica.log, other.log)
    for confirmation in world.confirmations:
        _check_confirmation(world, confirmation)


def has_all(log: ModelLog, shown: tuple[Record, ...]) -> bool:
    """Has the log every one of these records that it has not deleted?"""
    return log.end >= len(shown) and log.between(log.start, len(shown)) == shown[log.start :]


def can_be_agreed(world: World, proposal: Proposal) -> bool:
    """Would the controller, by what it has noticed, agree?"""
    leader, epoch, (in_sync, incarnations, version) = proposal
    state, noticed = world.state, world.noticed
    if (leader, epoch, version) != (state.leader, state.leader_epoch, state.version):
        return False
    return all(
        noticed[broker] == incarnation or (incarnation < 0 and broker in state.in_sync)
        for broker, incarnation in zip(in_sync, incarnations, strict=True)
    )


def _check_shown_by_follower(world: World, broker: int) -> None:
    replica = world.replicas[broker]
    following = replica.following
    if following.phase is not Phase.FOLLOWING or world.void:
        return  # what a follower has heard of a leader whose records were lost may still stand
    shown = following.high_watermark
    if shown > len(world.shown):
        raise Broken(f"broker {broker} follows and shows what no leader has shown")
    start = replica.log.start
    if replica.log.between(start, shown) != world.shown[start:shown]:
        raise Broken(f"broker {broker} follows and shows other records than a leader has")


def _check_matching(one: ModelLog, two: ModelLog) -> None:
    start, end = max(one.start, two.start), min(one.end, two.end)
    if start >= end:
        return
    ours, theirs = one.between(start, end), two.between(start, end)
    if ours == theirs:
        return
    parted = False
    for mine, its in zip(ours, theirs, strict=True):
        parted = parted or mine != its
        if parted and mine[0] == its[0]:
            raise Broken("two logs part, and have records of one epoch at one offset after that")


def _check_confirmation(world: World, confirmation: Confirmation) -> None:
    broker, incarnation, epoch, end = confirmation
    if epoch == world.state.leader_epoch and incarnation == world.registered[broker]:
        if world.replicas[broker].log.end < end:
            raise Broken(f"broker {broker} confirmed what it does not have")


def check_log(log: ModelLog) -> None:
    """A log's own order; to be called when it has changed."""
    records = log.records
    if len(set(records)) < len(records):
        raise Broken("a log has a record twice")
    if any(a[0] > b[0] for a, b in pairwise(records)):
        raise Broken("a log has an older epoch after a newer one")


def show(world: World, broker: int, offset: int) -> World:
    """Broker `broker`, which leads, shows the records below `offset`."""
    replica = world.replicas[broker]
    leading, log, shown = replica.leading, replica.log, world.shown
    assert leading is not None
    epoch = leading.state.leader_epoch
    if offset > log.end:
        raise Broken("a high watermark is above the log's end")
    if epoch < world.void:
        return world
    both = min(offset, len(shown))
    if log.between(log.start, both) != shown[log.start : both]:
        raise Broken("records that were shown are others now")
    if offset > len(shown):
        world = world._replace(shown=shown + log.between(len(shown), offset))
    if not leading.knows_high_watermark:
        return world
    if any(earlier > offset for earlier in world.highest[:epoch]):
        raise Broken("a leader shows a high watermark below one that was shown")
    for other in world.replicas:
        newer = other.leading
        if newer is not None and newer.state.leader_epoch > epoch and newer.knows_high_watermark:
            if newer.high_watermark < offset:
                raise Broken("an old leader shows a high watermark above the new leader's")
    if offset == world.highest[epoch]:
        return world
    highest = (*world.highest[:epoch], offset, *world.highest[epoch + 1 :])
    return world._replace(highest=highest)


def forget_lost(world: World, elected: int) -> World:
    """`elected` was elected uncleanly, for the epoch that the state names now: what it lacks is
    lost, and that is told."""
    log = world.replicas[elected].log
    shown, kept = world.shown, 0
    while kept < min(len(shown), log.end):
        if kept >= log.start and log.records[kept - log.start] != shown[kept]:
            break
        kept += 1
    return world._replace(
        shown=shown[:kept],
        highest=tuple(min(end, kept) for end in world.highest),
        void=world.state.leader_epoch,
    )
