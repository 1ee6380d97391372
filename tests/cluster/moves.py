"""Every step that a world can take next, and what it makes of the world.

A move is a tuple: its kind, then whom or what it concerns.  `moves` lists those that are possible;
`after` takes one.  The list costs little, so a simulation may draw one and take no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from kdirect.cluster import following_replica as following_rules
from kdirect.cluster import leading_replica as leading_rules
from kdirect.cluster.following_replica import Phase
from kdirect.cluster.leading_replica import Leading
from kdirect.cluster.partition_state import NO_LEADER, PartitionState, leads
from tests.cluster import controller
from tests.cluster.effects import (
    confirmation_of,
    follow,
    lead,
    put,
    registered,
    with_confirmation,
)
from tests.cluster.world import (
    DOWN,
    Answer,
    Ask,
    Bounds,
    Confirmation,
    Replica,
    World,
    Write,
    check_log,
)

Move: TypeAlias = tuple[Any, ...]


def moves(world: World, bounds: Bounds) -> Iterator[Move]:
    """Every step that can come next."""
    yield from controller.moves(world, bounds)
    for broker, replica in enumerate(world.replicas):
        if world.registered[broker] == DOWN:
            yield ("restart", broker)
            continue
        yield from _learn_moves(world, bounds, broker, replica)
        if replica.leading is not None:
            yield from _leader_moves(world, bounds, broker, replica, replica.leading)
        yield from _replica_moves(world, bounds, broker, replica)
    yield from _network_moves(world, bounds)


def _learn_moves(world: World, bounds: Bounds, broker: int, replica: Replica) -> Iterator[Move]:
    if broker not in world.assigned:
        return
    for state in (world.state, *world.older):
        if learns_from(replica, state):
            yield ("learn", broker, state)


def learns_from(replica: Replica, state: PartitionState) -> bool:
    """Does the state say anything new to the replica?"""
    leading, following = replica.leading, replica.following
    if leading is not None and leading.state.leader_epoch == state.leader_epoch:
        return state.version > leading.state.version
    return state.leader_epoch > following.newest_epoch


def _leader_moves(
    world: World, bounds: Bounds, broker: int, replica: Replica, leading: Leading
) -> Iterator[Move]:
    log, epoch = replica.log, leading.state.leader_epoch
    if sum(world.written) < bounds.records:
        yield ("append", broker)
    if leading.refused:
        yield ("tick", broker)
    if leading.registered != registered(world):
        yield ("hear of brokers", broker)
    if leading.replicas != world.assigned and {*leading.replicas} <= {*world.assigned}:
        yield ("hear of replicas", broker)
    for follower, sent in replica.pushed:
        if sent < log.start:
            yield ("out of range", broker, follower)
        elif bounds.separate:
            for count in range(1, min(bounds.run, log.end - sent) + 1):
                yield ("push", broker, follower, count)
    for known in leading.followers:
        if known.linked and world.losses < bounds.losses:
            yield ("unlink", broker, known.broker)
        if leading.proposed is None and known.broker in leading.state.in_sync:
            if known.end < leading.end:
                yield ("lag", broker, known.broker)
        other = world.replicas[known.broker]
        if bounds.tells and other.following.epoch == epoch:
            if other.following.told < leading.high_watermark and known.linked:
                yield ("tell", broker, known.broker)
    for asker, other in enumerate(world.replicas):
        if other.asking is not None and other.asking.leader == broker:
            given = answer(world, broker, asker, other.asking)
            if not bounds.late:
                yield ("be answered", given)
            elif given not in world.answers:
                yield ("answer", broker, asker)
    if world.deletes < bounds.deletes and log.start < min(log.end, leading.high_watermark):
        yield ("delete", broker)


def _replica_moves(world: World, bounds: Bounds, broker: int, replica: Replica) -> Iterator[Move]:
    following = replica.following
    if replica.landed:
        yield ("commit", broker)
    if replica.fencing >= 0:
        yield ("fence", broker)
    if replica.cutting is not None:
        yield ("cut", broker)
    if following.phase is Phase.FOLLOWING and not _is_linked(world, broker, following):
        if confirmation_of(world, broker) not in world.confirmations:
            yield ("reconnect", broker)
    if world.crashes < bounds.crashes:
        if bounds.expires and controller.may_crash(world, bounds, broker, False):
            yield ("expire", broker)
        for kept in range(replica.log.start, replica.log.end + 1):
            lost = kept < replica.log.end
            if (bounds.lossy or not lost) and controller.may_crash(world, bounds, broker, lost):
                yield ("crash", broker, kept)


def _is_linked(world: World, broker: int, following: following_rules.Following) -> bool:
    leading = world.replicas[following.leader].leading
    if leading is None or leading.state.leader_epoch != following.epoch:
        return True  # it has nobody to connect to, so it does not matter
    return any(
        known.broker == broker
        and known.linked
        and known.incarnation == world.registered[broker]
        and any(follower == broker for follower, _ in world.replicas[following.leader].pushed)
        for known in leading.followers
    )


def _network_moves(world: World, bounds: Bounds) -> Iterator[Move]:
    for reply in world.answers:
        yield ("be answered", reply)
    for confirmation in world.confirmations:
        for broker, replica in enumerate(world.replicas):
            leading = replica.leading
            if leading is not None and leading.state.leader_epoch == confirmation.epoch:
                yield ("confirm", broker, confirmation)
    first: set[tuple[int, int, int]] = set()
    for write in world.writes:
        pair = (write.leader, write.to, write.incarnation)
        if pair not in first:  # one queue pair: in order
            first.add(pair)
            yield ("land", write)
            if bounds.separate:
                for parts in range(len(write.records)):
                    yield ("tear", write, parts)


# -- what a move makes -----------------------------------------------------------------------------


def after(world: World, bounds: Bounds, move: Move) -> World:
    """The world after a move."""
    take = _TAKEN.get(move[0])
    if take is None:
        world = controller.after(world, bounds, move)
    else:
        world = take(world, bounds, *move[1:])
    return world if bounds.separate else _at_once(world, bounds)


def _at_once(world: World, bounds: Bounds) -> World:
    """Take the steps that need not wait: see `tests.cluster.search` for why that is enough."""
    for broker in range(len(world.replicas)):
        if world.replicas[broker].fencing >= 0:
            world = _fence(world, bounds, broker)
        if world.replicas[broker].cutting is not None:
            world = _cut(world, bounds, broker)
        replica = world.replicas[broker]
        for follower, sent in replica.pushed:
            for _ in range(max(sent, replica.log.start), replica.log.end):
                if sent >= replica.log.start:
                    world = _push(world, bounds, broker, follower, 1)
    return world


def answer(world: World, broker: int, asker: int, ask: Ask) -> Answer:
    """What the leader `broker` answers now, in whatever epoch it leads."""
    replica = world.replicas[broker]
    assert replica.leading is not None
    epoch, end = replica.log.epoch_end(ask.epoch)
    return Answer(
        asker,
        world.registered[asker],
        replica.leading.state.leader_epoch,
        ask.question,
        ask.epoch,
        epoch,
        end,
        replica.log.start,
        replica.log.end,
    )


def _restart(world: World, bounds: Bounds, broker: int) -> World:
    incarnation = world.incarnations + 1
    incarnations = (*world.registered[:broker], incarnation, *world.registered[broker + 1 :])
    return world._replace(registered=incarnations, incarnations=incarnation)


def _crash(world: World, bounds: Bounds, broker: int, kept: int) -> World:
    """The process ends; records at `kept` and above it were not on the disk yet."""
    replica = world.replicas[broker]
    log = replica.log.truncate(replica.log.last_epoch, kept)
    crashed = dict(world.crashed)
    crashed[broker] = crashed.get(broker, False) or kept < replica.log.end
    begun = following_rules.begin(
        broker,
        end=log.end,
        last_epoch=log.last_epoch,
        high_watermark=replica.following.high_watermark,
    )
    world = put(world, broker, Replica(begun, log=log))
    return world._replace(
        registered=(*world.registered[:broker], DOWN, *world.registered[broker + 1 :]),
        crashed=tuple(sorted(crashed.items())),
        crashes=world.crashes + 1,
    )


def _expire(world: World, bounds: Bounds, broker: int) -> World:
    """The session of a broker that lives ends, and it registers again, as a new incarnation.  The
    controller cannot know that nothing was lost."""
    world = _restart(world, bounds, broker)
    crashed = {broker: False, **dict(world.crashed)}
    return world._replace(crashed=tuple(sorted(crashed.items())), crashes=world.crashes + 1)


def _learn(world: World, bounds: Bounds, broker: int, state: PartitionState) -> World:
    replica = world.replicas[broker]
    leading = replica.leading
    if leading is not None and leading.state.leader_epoch == state.leader_epoch:
        return lead(world, broker, leading_rules.Learned(state))
    own = leads(state, broker, world.registered[broker])
    leader = NO_LEADER if state.leader == broker and not own else state.leader
    following = replica.following
    if leading is not None:
        following = following._replace(high_watermark=leading.high_watermark)
    world = put(
        world,
        broker,
        replica._replace(
            following=following,
            leading=None,
            pushed=(),
            asking=None,
            known=state if own else None,
        ),
    )
    return follow(world, broker, following_rules.Follow(leader, state.leader_epoch))


def _append(world: World, bounds: Bounds, broker: int) -> World:
    replica = world.replicas[broker]
    assert replica.leading is not None
    epoch = replica.leading.state.leader_epoch
    log = replica.log.append(((epoch, world.written[epoch]),))
    check_log(log)
    written = (*world.written[:epoch], world.written[epoch] + 1, *world.written[epoch + 1 :])
    world = put(world._replace(written=written), broker, replica._replace(log=log))
    return lead(world, broker, leading_rules.Appended(log.end))


def _hear_of_brokers(world: World, bounds: Bounds, broker: int) -> World:
    return lead(world, broker, leading_rules.Registered(registered(world)))


def _hear_of_replicas(world: World, bounds: Bounds, broker: int) -> World:
    return lead(world, broker, leading_rules.Assigned(world.assigned))


def _out_of_range(world: World, bounds: Bounds, broker: int, follower: int) -> World:
    leading = world.replicas[broker].leading
    assert leading is not None
    start = world.replicas[broker].log.start
    world = _unlink(world, bounds, broker, follower)
    event = following_rules.OutOfRange(leading.state.leader_epoch, start)
    return follow(world, follower, event) if world.registered[follower] != DOWN else world


def _push(world: World, bounds: Bounds, broker: int, follower: int, count: int) -> World:
    replica = world.replicas[broker]
    leading = replica.leading
    assert leading is not None
    sent = dict(replica.pushed)[follower]
    known = next(known for known in leading.followers if known.broker == follower)
    records = replica.log.between(sent, sent + count)
    write = Write(leading.state.leader_epoch, broker, follower, known.incarnation, sent, records)
    pushed = tuple(
        (other, end + count if other == follower else end) for other, end in replica.pushed
    )
    world = put(world, broker, replica._replace(pushed=pushed))
    return world._replace(writes=(*world.writes, write))


def _unlink(world: World, bounds: Bounds, broker: int, follower: int) -> World:
    """The link breaks.  WRITEs that were posted over it may still land."""
    replica = world.replicas[broker]
    pushed = tuple((other, end) for other, end in replica.pushed if other != follower)
    world = put(world, broker, replica._replace(pushed=pushed))
    world = world._replace(losses=world.losses + 1)
    return lead(world, broker, leading_rules.LinkLost(follower))


def _lag(world: World, bounds: Bounds, broker: int, follower: int) -> World:
    """So much time passes that this follower has not been level for too long.  How long the others
    have not been level does not matter to what can come, so no time is kept."""
    replica = world.replicas[broker]
    leading = replica.leading
    assert leading is not None
    long_ago = -2 * leading.lag_ms
    late = tuple(
        known._replace(level_ms=long_ago) if known.broker == follower else known
        for known in leading.followers
    )
    end = leading.clock.end
    late_leading = leading._replace(followers=late, clock=leading.clock._replace(end=leading.end))
    world = put(world, broker, replica._replace(leading=late_leading))
    world = lead(world, broker, leading_rules.Ticked(0))
    replica = world.replicas[broker]
    assert replica.leading is not None
    level = tuple(known._replace(level_ms=0) for known in replica.leading.followers)
    leading = replica.leading._replace(
        followers=level, clock=replica.leading.clock._replace(end=end)
    )
    return put(world, broker, replica._replace(leading=leading))


def _tick(world: World, bounds: Bounds, broker: int) -> World:
    return lead(world, broker, leading_rules.Ticked(0))


def _tell(world: World, bounds: Bounds, broker: int, follower: int) -> World:
    leading = world.replicas[broker].leading
    assert leading is not None
    event = following_rules.Told(leading.state.leader_epoch, leading.high_watermark)
    return follow(world, follower, event)


def _answer(world: World, bounds: Bounds, broker: int, asker: int) -> World:
    ask = world.replicas[asker].asking
    assert ask is not None
    given = answer(world, broker, asker, ask)
    return world._replace(answers=tuple(sorted((*world.answers, given))))


def _delete(world: World, bounds: Bounds, broker: int) -> World:
    """Retention: the leader drops its first record."""
    replica = world.replicas[broker]
    log = replica.log.delete_below(replica.log.start + 1)
    world = put(world, broker, replica._replace(log=log))
    return world._replace(deletes=world.deletes + 1)


def _commit(world: World, bounds: Bounds, broker: int) -> World:
    """The kernel looks at what has landed first, and commits it if it continues the log."""
    replica = world.replicas[broker]
    (place, records), *rest = replica.landed
    replica = replica._replace(landed=tuple(rest))
    if place != replica.log.end:
        world = put(world, broker, replica)
        sure = bounds.separate and place + len(records) > replica.log.end
        # What it has had before does no harm; what it cannot put anywhere breaks the link.
        return _refuse(world, bounds, broker) if sure else world
    log = replica.log.append(records)
    check_log(log)
    committed = following_rules.Committed(log.end, log.last_epoch, replica.granted)
    return follow(put(world, broker, replica._replace(log=log)), broker, committed)


def _refuse(world: World, bounds: Bounds, broker: int) -> World:
    following = world.replicas[broker].following
    leading = world.replicas[following.leader].leading
    if leading is None or leading.state.leader_epoch != following.epoch:
        return world
    return _unlink(world, bounds, following.leader, broker)


def _fence(world: World, bounds: Bounds, broker: int) -> World:
    """Copies that are in progress end in a file that nobody reads any more."""
    replica = world.replicas[broker]
    log = replica.log
    fenced = following_rules.Fenced(
        replica.fencing, log.end, log.last_epoch, replica.following.high_watermark
    )
    replica = replica._replace(fencing=-1, granted=-1, landed=())
    return follow(put(world, broker, replica), broker, fenced)


def _cut(world: World, bounds: Bounds, broker: int) -> World:
    replica = world.replicas[broker]
    match replica.cutting:
        case following_rules.Truncate(epoch, offset):
            log = replica.log.truncate(epoch, offset)
        case following_rules.StartOver(offset):
            log = replica.log.start_over(offset)
        case _:
            raise AssertionError(replica.cutting)
    world = put(world, broker, replica._replace(log=log, cutting=None))
    return follow(world, broker, following_rules.Truncated(log.end, log.last_epoch))


def _reconnect(world: World, bounds: Bounds, broker: int) -> World:
    return with_confirmation(world, confirmation_of(world, broker))


def _be_answered(world: World, bounds: Bounds, reply: Answer) -> World:
    world = world._replace(answers=tuple(a for a in world.answers if a != reply))
    if world.registered[reply.to] != reply.incarnation:
        return world
    event = following_rules.EpochEnd(*reply[2:])
    return follow(world, reply.to, event)


def _confirm(world: World, bounds: Bounds, broker: int, confirmation: Confirmation) -> World:
    """The leader `broker` hears a confirmation.  The first over a link says from where to push."""
    kept = tuple(c for c in world.confirmations if c != confirmation)
    world = world._replace(confirmations=kept)
    replica = world.replicas[broker]
    leading = replica.leading
    assert leading is not None
    follower, incarnation, epoch, end = confirmation
    pushed = dict(replica.pushed)
    for known in leading.followers:
        if known.broker == follower and incarnation >= known.incarnation:
            if follower not in pushed or incarnation > known.incarnation:
                pushed[follower] = max(end, known.end) if known.incarnation == incarnation else end
    world = put(world, broker, replica._replace(pushed=tuple(sorted(pushed.items()))))
    return lead(world, broker, leading_rules.Confirmed(follower, incarnation, epoch, end))


def _land(world: World, bounds: Bounds, write: Write, parts: int | None = None) -> World:
    """A WRITE lands if its key still holds.  `parts`: only so many of its records do, because the
    writer has died or the link has broken in the midst."""
    number = world.writes.index(write)
    world = world._replace(writes=world.writes[:number] + world.writes[number + 1 :])
    target = world.replicas[write.to]
    same = world.registered[write.to] == write.incarnation
    records = write.records[:parts]
    if same and target.granted == write.epoch and records:
        landed = (*target.landed, (write.place, records))
        world = put(world, write.to, target._replace(landed=landed))
        if not bounds.separate:
            world = _commit(world, bounds, write.to)
    return world if parts is not None else completed(world, write)


def _tear(world: World, bounds: Bounds, write: Write, parts: int) -> World:
    """The writer dies, or the link breaks, in the midst of a WRITE: `parts` of its records land,
    and nothing that comes after them in the queue pair."""
    world = _land(world, bounds, write, parts)
    pair = (write.leader, write.to, write.incarnation)
    later = tuple(w for w in world.writes if (w.leader, w.to, w.incarnation) != pair)
    return world._replace(writes=later)


def completed(world: World, write: Write) -> World:
    """The leader sees that a WRITE is complete.  It means nothing: only the follower confirms.

    Over shared memory a writer that was stopped inside its copy sees success even after its key
    was taken away; so this happens whether the WRITE landed or not.
    """
    return world


_TAKEN: dict[str, Callable[..., World]] = {
    "restart": _restart,
    "crash": _crash,
    "expire": _expire,
    "learn": _learn,
    "append": _append,
    "hear of brokers": _hear_of_brokers,
    "hear of replicas": _hear_of_replicas,
    "out of range": _out_of_range,
    "push": _push,
    "unlink": _unlink,
    "lag": _lag,
    "tell": _tell,
    "answer": _answer,
    "delete": _delete,
    "commit": _commit,
    "fence": _fence,
    "cut": _cut,
    "reconnect": _reconnect,
    "be answered": _be_answered,
    "confirm": _confirm,
    "land": _land,
    "tear": _tear,
    "tick": _tick,
}
