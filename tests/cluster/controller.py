"""What the controller may do with a partition in the model world.

Each of its moves is one conditional write, so it happens at once or not at all.  It decides by what
it has *noticed* of the brokers, which may be old.  A broker that comes back with a new incarnation
may have lost records: it leaves the replicas in sync and the eligible ones, unless nobody else
would stay (then it is elected again, as the last leader known: KIP-966).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdirect.cluster.following_replica import NO_EPOCH
from kdirect.cluster.following_replica import begin as begin_following
from kdirect.cluster.leading_replica import Refused
from kdirect.cluster.partition_state import NO_LEADER
from tests.cluster.effects import lead
from tests.cluster.model_log import ModelLog
from tests.cluster.world import (
    DOWN,
    Bounds,
    Proposal,
    Replica,
    World,
    can_be_agreed,
    forget_lost,
)

KEPT_STATES = 3  # older ones that a broker may still learn of


def moves(world: World, bounds: Bounds) -> Iterator[tuple[Any, ...]]:
    """What the controller may do next."""
    state, noticed = world.state, world.noticed
    if state.leader_epoch < bounds.epochs:
        electable = [b for b in state.in_sync if noticed[b] != DOWN]
        electable = electable or [b for b in state.eligible if noticed[b] != DOWN]
        for broker in electable:
            if broker != state.leader or bounds.again:
                yield ("elect", broker)
        if bounds.unclean and not electable:
            for broker in world.assigned:
                if noticed[broker] != DOWN:
                    yield ("elect uncleanly", broker)
        for broker, incarnation in enumerate(world.registered):
            if incarnation != noticed[broker]:
                yield ("notice", broker, incarnation)
                if noticed[broker] != DOWN and incarnation != DOWN:
                    yield ("notice", broker, DOWN)
        yield from _reassignments(world, bounds)
    for proposal in world.proposals:
        if not can_be_agreed(world, proposal):
            yield ("refuse", proposal)
        elif world.changes < bounds.changes:
            yield ("agree", proposal)


def _reassignments(world: World, bounds: Bounds) -> Iterator[tuple[Any, ...]]:
    """One replica is added, and another leaves when the added one is in sync."""
    if not bounds.spares:
        return
    if len(world.assigned) == bounds.replicas:
        for broker in range(len(world.replicas)):
            if broker not in world.assigned:
                yield ("add", broker)
    else:
        for broker in world.assigned:
            others = {*world.state.in_sync} - {broker}
            if len(others) >= bounds.replicas and broker != world.state.leader:
                yield ("remove", broker)


def after(world: World, bounds: Bounds, move: tuple[Any, ...]) -> World:
    """The world after one of the controller's moves."""
    match move:
        case ("elect", broker):
            return elect(world, bounds, broker)
        case ("elect uncleanly", broker):
            return elect(world, bounds, broker, clean=False)
        case ("notice", broker, incarnation):
            return _notice(world, bounds, broker, incarnation)
        case ("agree", proposal):
            return _agree(world, bounds, proposal)
        case ("refuse", proposal):
            return _refuse(world, proposal)
        case ("add", broker):
            return world._replace(assigned=tuple(sorted((*world.assigned, broker))))
        case ("remove", broker):
            return _remove(world, bounds, broker)
    raise AssertionError(move)


def may_crash(world: World, bounds: Bounds, broker: int, lost: bool) -> bool:
    """Power losses of fewer replicas than ``min.insync.replicas`` lose nothing; the controller
    cannot know which crash was one.  What is beyond that may lose what was acknowledged."""
    crashed = dict(world.crashed)
    crashed[broker] = crashed.get(broker, False) or lost
    return bounds.unclean or not any(crashed.values()) or len(crashed) < world.min_in_sync


def _write(world: World, bounds: Bounds, **changes: Any) -> World:
    """The next version of the state."""
    state = world.state
    older = (*world.older, state)[-KEPT_STATES:] if bounds.stale else ()
    changed = state._replace(version=state.version + 1, **changes)
    eligible: tuple[int, ...] = ()
    if len(changed.in_sync) < min(world.min_in_sync, len(world.assigned)):
        eligible = tuple(b for b in changed.eligible if b not in changed.in_sync)
    return world._replace(state=changed._replace(eligible=eligible), older=older)


def elect(world: World, bounds: Bounds, broker: int, *, clean: bool = True) -> World:
    """Make `broker` the leader, in a new epoch."""
    state = world.state
    if broker in state.in_sync:
        in_sync, eligible = state.in_sync, state.eligible
    else:  # an eligible replica, or any at all
        in_sync = (broker,)
        eligible = state.eligible if clean else ()
    world = _write(
        world,
        bounds,
        leader=broker,
        leader_epoch=state.leader_epoch + 1,
        in_sync=in_sync,
        eligible=eligible,
        incarnation=world.noticed[broker],
    )
    return world if clean else _lose(world, broker)


def _lose(world: World, broker: int) -> World:
    """`broker` was elected, and may lack records that were shown."""
    crashed = tuple((other, lost) for other, lost in world.crashed if other != broker)
    return forget_lost(world._replace(crashed=crashed), broker)


def _notice(world: World, bounds: Bounds, broker: int, incarnation: int) -> World:
    """The controller notices that a broker has gone (`DOWN`), or that it is back."""
    state = world.state
    noticed = (*world.noticed[:broker], incarnation, *world.noticed[broker + 1 :])
    world = world._replace(noticed=noticed)
    if incarnation == DOWN:
        if broker == state.leader:
            return _leave_leader(world, bounds)
        return world
    in_sync = tuple(b for b in state.in_sync if b != broker)
    eligible = tuple(b for b in state.eligible if b != broker)
    if in_sync == state.in_sync and eligible == state.eligible:
        return world
    if in_sync or eligible:
        world = _write(world, bounds, in_sync=in_sync, eligible=eligible)
        return _leave_leader(world, bounds) if broker == state.leader else world
    lost = dict(world.crashed).get(broker, False)
    world = elect(world, bounds, broker)
    if lost:
        return _lose(world, broker)
    crashed = tuple((other, was) for other, was in world.crashed if other != broker)
    return world._replace(crashed=crashed)


def _leave_leader(world: World, bounds: Bounds) -> World:
    """The leader has gone: another one in sync leads, or nobody does."""
    state = world.state
    for broker in (*state.in_sync, *(() if state.in_sync else state.eligible)):
        if world.noticed[broker] != DOWN and broker != state.leader:
            return elect(world, bounds, broker)
    return _write(world, bounds, leader=NO_LEADER, leader_epoch=state.leader_epoch + 1)


def _agree(world: World, bounds: Bounds, proposal: Proposal) -> World:
    state = world.state
    in_sync, incarnations = proposal.propose.in_sync, proposal.propose.incarnations
    left = {*state.in_sync, *state.eligible} - {*in_sync}
    back = {
        broker
        for broker, incarnation in zip(in_sync, incarnations, strict=True)
        if incarnation == world.registered[broker] and broker not in state.in_sync
    }
    world = world._replace(
        proposals=tuple(p for p in world.proposals if p != proposal),
        changes=world.changes + 1,
        crashed=tuple((broker, lost) for broker, lost in world.crashed if broker not in back),
    )
    return _write(world, bounds, in_sync=in_sync, eligible=tuple(sorted(left)))


def _refuse(world: World, proposal: Proposal) -> World:
    """The leader hears of the refusal at once; if it hears late, it only counts more replicas."""
    world = world._replace(proposals=tuple(p for p in world.proposals if p != proposal))
    replica = world.replicas[proposal.leader]
    leading = replica.leading
    if leading is None or leading.state.leader_epoch != proposal.epoch:
        return world
    return lead(world, proposal.leader, Refused(proposal.propose.version))


def _remove(world: World, bounds: Bounds, broker: int) -> World:
    """A replica leaves the partition and deletes its log.  That makes a new epoch, even for the
    same leader: see `leading_replica.Assigned`."""
    state = world.state
    world = world._replace(assigned=tuple(b for b in world.assigned if b != broker))
    world = _write(
        world,
        bounds,
        leader_epoch=state.leader_epoch + 1,
        in_sync=tuple(b for b in state.in_sync if b != broker),
        eligible=tuple(b for b in state.eligible if b != broker),
    )
    # The broker has learned of its removal, so it never goes back to what the store said before.
    following = begin_following(broker, end=0, last_epoch=NO_EPOCH)
    empty = Replica(following._replace(epoch=state.leader_epoch), log=ModelLog())
    replicas = (*world.replicas[:broker], empty, *world.replicas[broker + 1 :])
    crashed = tuple((other, lost) for other, lost in world.crashed if other != broker)
    return world._replace(replicas=replicas, crashed=crashed)
