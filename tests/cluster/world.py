"""Three replicas of one partition, the store's word on it, and all that is on its way between them,
as one immutable value: what an exhaustive search goes through.

The replicas decide by `kdirect.cluster`.  Everything else is reduced to what matters to them: a
record is a pair (epoch, number), a log a tuple of records, a WRITE lands or does not, a kernel
commits what continues its log.  `moves(world)` names every next step of a world and what it leads
to.

What is checked in every world (`check`): see there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdirect.cluster import following_replica as following_rules
from kdirect.cluster import leading_replica as leading_rules
from kdirect.cluster.following_replica import Following
from kdirect.cluster.leading_replica import Leading
from kdirect.cluster.partition_state import PartitionState

REPLICAS = (0, 1, 2)
MOST_RECORDS = 3
MOST_EPOCHS = 3
MOST_CHANGES = 2  # of who is in sync

Record = tuple[int, int]
Log = tuple[Record, ...]


class Write(NamedTuple):
    """A WRITE of `record` to position `place` of the file that follower `to` granted to the leader
    of `epoch`.  `checked`: its key was looked at, and the copy goes on."""

    epoch: int
    leader: int
    to: int
    place: int
    record: Record
    checked: bool = False


class Replica(NamedTuple):
    """A broker's part.  `role` is what it believes; `granted` the epoch whose leader holds the key
    of its head (-1: nobody); `landed` what was written there and is not committed; `fencing` and
    `cutting` work that was begun."""

    role: Leading | Following
    log: Log = ()
    high_watermark: int = 0
    granted: int = -1
    landed: tuple[tuple[int, Record], ...] = ()
    fencing: int = -1
    cutting: tuple[int, int] | None = None
    asking: tuple[int, int, int] | None = None  # leader, its epoch, the epoch asked for
    pushed: tuple[tuple[int, int], ...] = ()  # of a leader: follower -> the end of what was sent


class World(NamedTuple):
    """Everything."""

    state: PartitionState
    replicas: tuple[Replica, ...]
    writes: tuple[Write, ...] = ()
    confirms: frozenset[tuple[int, int, int]] = frozenset()  # follower, epoch, end
    proposals: frozenset[tuple[int, int, tuple[int, ...], int]] = frozenset()
    answers: frozenset[tuple[int, int, int, int, int]] = frozenset()
    shown: Log = ()  # the longest prefix that any leader has shown
    written: int = 0
    changes: int = 0  # of who is in sync, that the controller has agreed to


def begin() -> World:
    """Broker 0 leads, all are in sync, and nobody has learned of it."""
    replicas = tuple(
        Replica(following_rules.begin(end=0, last_epoch=following_rules.NO_EPOCH)) for _ in REPLICAS
    )
    return World(PartitionState(0, 1, REPLICAS, 0), replicas)


class Broken(AssertionError):
    """A world that must not be."""


def check(world: World) -> None:
    """StrongIsr, log matching, leader completeness, nothing seen and then gone."""
    for broker in {*world.state.in_sync, world.state.leader}:
        log = world.replicas[broker].log
        if log[: len(world.shown)] != world.shown:
            raise Broken(f"broker {broker} is in sync and lacks records that were shown")
    for a in world.replicas:
        for b in world.replicas:
            for place, (one, two) in enumerate(zip(a.log, b.log, strict=False)):
                if one == two and a.log[:place] != b.log[:place]:
                    raise Broken("two logs have the same record after different ones")
    for broker, replica in enumerate(world.replicas):
        role = replica.role
        if isinstance(role, Leading) and role.state.leader_epoch == world.state.leader_epoch:
            known = role.high_watermark if role.knows_high_watermark else len(world.shown)
            if known < len(world.shown) and broker == world.state.leader:
                raise Broken("the leader shows a high watermark below one that was shown")


def tidy(world: World) -> World:
    """The same world without what nobody will ever look at, so that equal worlds are equal."""
    state = world.state
    proposals = frozenset(
        p
        for p in world.proposals
        if (p[0], p[1], p[3]) == (state.leader, state.leader_epoch, state.version)
    )
    hears = {state.leader_epoch: ()} if state.leader_epoch else {}
    for replica in world.replicas:
        if isinstance(replica.role, Leading):
            hears[replica.role.state.leader_epoch] = replica.role.followers
    confirms = frozenset(
        (follower, epoch, end)
        for follower, epoch, end in world.confirms
        if epoch in hears
        and not any(f.broker == follower and f.linked and f.end >= end for f in hears[epoch])
    )
    return world._replace(proposals=proposals, confirms=confirms)


def moves(world: World) -> Iterator[tuple[str, World]]:
    """Every step that can come next."""
    yield from _store_moves(world)
    for broker in REPLICAS:
        role = world.replicas[broker].role
        yield from _learn(world, broker)
        if isinstance(role, Leading):
            yield from _leader_moves(world, broker, role)
        yield from _replica_moves(world, broker)
    yield from _network_moves(world)


# -- the controller and the store ------------------------------------------------------------------


def _store_moves(world: World) -> Iterator[tuple[str, World]]:
    state = world.state
    if state.leader_epoch < MOST_EPOCHS:
        for broker in state.in_sync:
            if broker != state.leader:
                elected = state._replace(
                    leader=broker, leader_epoch=state.leader_epoch + 1, version=state.version + 1
                )
                yield f"elect {broker}", world._replace(state=elected)
    for proposal in world.proposals:
        leader, epoch, in_sync, version = proposal
        left = world._replace(proposals=world.proposals - {proposal})
        if world.changes < MOST_CHANGES:
            agreed = state._replace(in_sync=in_sync, version=version + 1)
            yield (
                f"agree to {in_sync}",
                left._replace(state=agreed, changes=world.changes + 1),
            )


def _learn(world: World, broker: int) -> Iterator[tuple[str, World]]:
    replica, state = world.replicas[broker], world.state
    role = replica.role
    if isinstance(role, Leading) and role.state.leader_epoch == state.leader_epoch:
        if state.version > role.state.version:
            yield f"{broker} learns", _lead(world, broker, leading_rules.Learned(state))
        return
    if isinstance(role, Following):
        newest = role.next.epoch if role.next is not None else role.epoch
        if newest >= state.leader_epoch:
            return
    if state.leader == broker:
        if replica.cutting is not None:
            return  # the driver waits for the cut
        leading, effects = leading_rules.begin(
            broker, state, REPLICAS, end=len(replica.log), high_watermark=replica.high_watermark,
            now_ms=0, registered=tuple((b, 0) for b in REPLICAS),
        )  # fmt: skip
        led = replica._replace(
            role=leading, granted=-1, landed=(), fencing=-1, asking=None, pushed=()
        )
        yield f"{broker} learns that it leads", _effects(_put(world, broker, led), broker, effects)
        return
    if isinstance(role, Leading):
        last = replica.log[-1][0] if replica.log else following_rules.NO_EPOCH
        was = following_rules.begin(end=len(replica.log), last_epoch=last)
        replica = replica._replace(role=was, pushed=())
        world = _put(world, broker, replica)
    follow = following_rules.Follow(state.leader, state.leader_epoch)
    yield f"{broker} learns that {state.leader} leads", _follow(world, broker, follow)


# -- the leader ------------------------------------------------------------------------------------


def _leader_moves(world: World, broker: int, role: Leading) -> Iterator[tuple[str, World]]:
    replica = world.replicas[broker]
    epoch = role.state.leader_epoch
    if world.written < MOST_RECORDS:
        log = (*replica.log, (epoch, world.written))
        grown = _put(world._replace(written=world.written + 1), broker, replica._replace(log=log))
        yield f"{broker} appends", _lead(grown, broker, leading_rules.Appended(len(log)))
    for follower, sent in replica.pushed:
        if sent < len(replica.log):
            write = Write(epoch, broker, follower, sent, replica.log[sent])
            pushed = tuple((f, s + (f == follower)) for f, s in replica.pushed)
            yield (
                f"{broker} pushes {sent} to {follower}",
                _put(world, broker, replica._replace(pushed=pushed))._replace(
                    writes=(*world.writes, write)
                ),
            )
    for follower in REPLICAS:
        if follower in role.state.in_sync and follower != broker and role.proposed is None:
            heard = any(f.broker == follower and f.linked for f in role.followers)
            if heard:
                yield (
                    f"{broker} loses its link to {follower}",
                    _lead(world, broker, leading_rules.LinkLost(follower)),
                )
    for confirm in world.confirms:
        follower, of_epoch, end = confirm
        if of_epoch == epoch:
            heard = leading_rules.Confirmed(follower, 0, epoch, end)
            left = world._replace(confirms=world.confirms - {confirm})
            yield f"{broker} hears {confirm}", _lead(_sent(left, broker, follower, end), broker, heard)
    for follower in REPLICAS:
        other = world.replicas[follower]
        if (
            isinstance(other.role, Following)
            and other.role.phase is following_rules.Phase.FOLLOWING
            and other.role.epoch == epoch
        ):
            told = min(role.high_watermark, len(other.log))
            if told > other.high_watermark:
                yield (
                    f"{broker} tells {follower} of {told}",
                    _put(world, follower, other._replace(high_watermark=told)),
                )
    for asker in REPLICAS:
        asking = world.replicas[asker].asking
        if asking is not None and asking[0] == broker:
            found, end = epoch_end(replica.log, asking[2])
            answer = (asker, epoch, asking[2], found, end)
            if answer not in world.answers:
                yield f"{broker} answers {answer}", world._replace(answers=world.answers | {answer})


def epoch_end(log: Log, asked: int) -> tuple[int, int]:
    """The largest epoch of a log that is not above `asked`, and where it ends (KIP-279)."""
    below = [epoch for epoch, _ in log if epoch <= asked]
    if not below:
        return following_rules.NO_EPOCH, 0
    return below[-1], len(below)


# -- every replica ---------------------------------------------------------------------------------


def _replica_moves(world: World, broker: int) -> Iterator[tuple[str, World]]:
    replica = world.replicas[broker]
    if replica.landed and isinstance(replica.role, Following):
        (place, record), *rest = replica.landed
        left = replica._replace(landed=tuple(rest))
        if place == len(replica.log):
            log = (*replica.log, record)
            committed = following_rules.Committed(len(log), record[0], replica.granted)
            yield (
                f"{broker} commits {record}",
                _follow(_put(world, broker, left._replace(log=log)), broker, committed),
            )
        else:
            yield f"{broker} refuses {record}", _put(world, broker, left)
    if replica.fencing >= 0:
        # Copies that were in progress end in a file that nobody reads any more.
        fenced = replica._replace(fencing=-1, granted=-1, landed=())
        yield (
            f"{broker} has fenced",
            _follow(_put(world, broker, fenced), broker, following_rules.Fenced(replica.fencing)),
        )
    if replica.cutting is not None:
        epoch, offset = replica.cutting
        log = tuple(record for record in replica.log[:offset] if record[0] <= epoch)
        last = log[-1][0] if log else following_rules.NO_EPOCH
        cut = replica._replace(
            log=log, cutting=None, high_watermark=min(replica.high_watermark, len(log))
        )
        done = following_rules.Truncated(len(log), last)
        yield f"{broker} has cut", _follow(_put(world, broker, cut), broker, done)


def _network_moves(world: World) -> Iterator[tuple[str, World]]:
    for answer in world.answers:
        asker, leader_epoch, asked, found, end = answer
        left = world._replace(answers=world.answers - {answer})
        if isinstance(world.replicas[asker].role, Following):
            event = following_rules.EpochEnd(leader_epoch, asked, found, end)
            left = _follow(left, asker, event)
        yield f"{asker} is answered {answer}", left
    first: set[tuple[int, int]] = set()
    for number, write in enumerate(world.writes):
        pair = (write.leader, write.to)
        if pair in first:
            continue  # one queue pair: in order
        first.add(pair)
        others = world.writes[:number] + world.writes[number + 1 :]
        target = world.replicas[write.to]
        if not write.checked:
            if target.granted != write.epoch:
                # The key is gone: the queue pair breaks, and what comes after it is lost as well.
                kept = tuple(w for w in world.writes if (w.leader, w.to) != pair)
                yield f"{write} is refused", world._replace(writes=kept)
            else:
                begun = world.writes[:number] + (write._replace(checked=True),)
                yield (
                    f"{write} begins",
                    world._replace(writes=begun + world.writes[number + 1 :]),
                )
            continue
        landed = world._replace(writes=others)
        if target.granted == write.epoch:
            added = (*target.landed, (write.place, write.record))
            landed = _put(landed, write.to, target._replace(landed=added))
        yield f"{write} completes", completed(landed, write)


def completed(world: World, write: Write) -> World:
    """The leader sees that a WRITE is complete.  It means nothing: only the follower confirms."""
    return world


# -- carrying out effects --------------------------------------------------------------------------


def _put(world: World, broker: int, replica: Replica) -> World:
    replicas = world.replicas[:broker] + (replica,) + world.replicas[broker + 1 :]
    return world._replace(replicas=replicas)


def _sent(world: World, broker: int, follower: int, end: int) -> World:
    """The first confirmation of a follower says from where it is to be pushed."""
    replica = world.replicas[broker]
    if any(f == follower for f, _ in replica.pushed):
        return world
    pushed = tuple(sorted((*replica.pushed, (follower, end))))
    return _put(world, broker, replica._replace(pushed=pushed))


def _lead(world: World, broker: int, event: Any) -> World:
    role = world.replicas[broker].role
    assert isinstance(role, Leading)
    role, effects = leading_rules.step(role, event)
    return _effects(_put(world, broker, world.replicas[broker]._replace(role=role)), broker, effects)


def _follow(world: World, broker: int, event: Any) -> World:
    replica = world.replicas[broker]
    assert isinstance(replica.role, Following)
    role, effects = following_rules.step(replica.role, event)
    return _effects(_put(world, broker, replica._replace(role=role)), broker, effects)


def _effects(world: World, broker: int, effects: tuple[Any, ...]) -> World:
    for effect in effects:
        replica = world.replicas[broker]
        role: Any = replica.role
        match effect:
            case leading_rules.ShowHighWatermark(offset):
                world = _put(world, broker, replica._replace(high_watermark=offset))
                prefix = replica.log[:offset]
                if len(prefix) < offset:
                    raise Broken("a high watermark above the log's end")
                short = min(len(prefix), len(world.shown))
                if prefix[:short] != world.shown[:short]:
                    raise Broken("records that were shown are others now")
                if len(prefix) > len(world.shown):
                    world = world._replace(shown=prefix)
            case leading_rules.Propose(in_sync, version):
                proposal = (broker, role.state.leader_epoch, in_sync, version)
                world = world._replace(proposals=world.proposals | {proposal})
            case following_rules.Fence(epoch):
                world = _put(world, broker, replica._replace(fencing=epoch))
            case following_rules.AskEpochEnd(leader, leader_epoch, epoch):
                world = _put(world, broker, replica._replace(asking=(leader, leader_epoch, epoch)))
            case following_rules.Truncate(epoch, offset):
                world = _put(world, broker, replica._replace(cutting=(epoch, offset), asking=None))
            case following_rules.Grant(_, epoch, _):
                world = _put(world, broker, replica._replace(granted=epoch, asking=None))
            case following_rules.Confirm(epoch, end):
                world = world._replace(confirms=world.confirms | {(broker, epoch, end)})
            case _:
                raise AssertionError(effect)
    return world
