"""Goes through every world that can be reached within bounds, and checks each.

Breadth first, so what it prints when something breaks is a shortest path.  From the root of the
sources, with everything that may happen as an option (`--help`):

    python -m tests.cluster.search --records 3 --epochs 3 --changes 2

**What it leaves out, and why nothing is lost by that.**

- Worlds that differ in the brokers' ids alone are one world (`fingerprint`): no rule prefers an id.
- Messages that can have no effect whenever they arrive are dropped (`tidy`).
- Unless ``--separate``, some steps are taken at once (`moves._at_once`).  A WRITE lands and is
  committed in one step, because a record that has landed and is not committed can do nothing that
  a WRITE which has not landed cannot.  A leader pushes what it has at once, because a WRITE that is
  on its way for ever does what one that was never posted does.  A replica that learns of an epoch
  is fenced at once: what could land before that could as well have landed before the replica
  learned, and the confirmation that it would have sent then may never arrive.  A cut is done at
  once, because nobody may write while it goes on.
- A WRITE's key is looked at when it lands.  An earlier look would have found the same key, because
  no key is given out twice.

**What only an option brings in**, because each makes many more worlds: answers that are on their
way for any time (``--late``), states that are learned when they are no longer the newest
(``--stale``), what followers are told (``--tells``), crashes, ends of sessions, retention, unclean
elections, links that break (``--losses``, 1 unless given).

**Memory.**  A world that was seen is a fingerprint of 64 bits in a flat table; two worlds with one
fingerprint are taken for one, which at ten million worlds happens with a chance of 3 in a million.
For the path there are eight bytes for each world.  Only the worlds of two depths are kept whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from kdirect.cluster.following_replica import Following, Phase
from kdirect.cluster.leading_replica import Leading
from kdirect.cluster.partition_state import NO_LEADER, PartitionState
from tests.cluster.moves import Move, after, moves
from tests.cluster.world import (
    Bounds,
    Broken,
    Confirmation,
    Proposal,
    Replica,
    World,
    Write,
    begin,
    can_be_agreed,
    check,
)


class Found(NamedTuple):
    """What a search has come to.  `broken`: what did not hold, with the moves that lead to it."""

    worlds: int
    complete: bool
    broken: str | None = None
    path: tuple[Move, ...] = ()


# -- equal worlds ----------------------------------------------------------------------------------


def tidy(world: World) -> World:
    """The same world without the messages that can have no effect whenever they arrive."""
    confirmations = world.confirmations
    if confirmations:
        confirmations = tuple(c for c in confirmations if _will_matter(world, c))
    proposals = world.proposals
    if proposals:
        # The leader of a refused one keeps counting it, which is what it does until it learns more.
        proposals = tuple(
            p
            for p in proposals
            if can_be_agreed(world, p)
            or (p.leader, p.epoch, p.propose.version)
            == (world.state.leader, world.state.leader_epoch, world.state.version)
        )
    writes = world.writes
    if writes:
        writes = tuple(w for w in writes if _may_land_or_be_counted(world, w))
    if (confirmations, proposals, writes) == (world.confirmations, world.proposals, world.writes):
        return world
    return world._replace(confirmations=confirmations, proposals=proposals, writes=writes)


def _may_land_or_be_counted(world: World, write: Write) -> bool:
    """A WRITE whose key is gone never lands.  Its completion means nothing, but the leader must not
    be helped to know that: it stays as long as its leader leads."""
    if world.replicas[write.to].granted == write.epoch:
        return world.registered[write.to] == write.incarnation
    leading = world.replicas[write.leader].leading
    return leading is not None and leading.state.leader_epoch == write.epoch


def _will_matter(world: World, confirmation: Confirmation) -> bool:
    """Can the leader of its epoch still learn something from it?"""
    broker, incarnation, epoch, end = confirmation
    for replica in world.replicas:
        leading = replica.leading
        if leading is not None and leading.state.leader_epoch == epoch:
            for known in leading.followers:
                if known.broker == broker:
                    if incarnation == known.incarnation:
                        return end > known.end or not known.linked
                    return incarnation > known.incarnation
            return False
    # Its leader may not have begun; once it has been, it does not begin again.
    return any(replica.following.newest_epoch <= epoch for replica in world.replicas)


def fingerprint(world: World) -> int:
    """64 bits that are equal for worlds which differ only in which broker is which."""
    replicas = world.replicas
    marks = [_mark(world, broker, replica) for broker, replica in enumerate(replicas)]
    order = sorted(range(len(replicas)), key=marks.__getitem__)
    if all(marks[a] != marks[b] for a, b in pairwise(order)):
        return hash(_renamed(world, order))
    # Brokers that look alike: whichever order gives the least is taken.
    looks = [marks[broker] for broker in order]
    return min(
        hash(_renamed(world, other))
        for other in permutations(range(len(replicas)))
        if [marks[broker] for broker in other] == looks
    )


def _mark(world: World, broker: int, replica: Replica) -> int:
    """Something of a broker that does not depend on ids."""
    following, leading, state = replica.following, replica.leading, world.state
    return hash(
        (
            _PHASES[following.phase],
            following.epoch,
            replica.log,
            replica.granted,
            state.leader == broker,
            broker in state.in_sync,
            -1 if leading is None else (leading.high_watermark, leading.state.version),
            len(replica.pushed),
            world.registered[broker],
        )
    )


_PHASES = {phase: number for number, phase in enumerate(Phase)}


class _Renaming:
    """Makes plain values of a world's parts, with the broker `order[i]` called i."""

    def __init__(self, order: Sequence[int]) -> None:
        self.name = [0] * len(order) + [NO_LEADER]  # -1, no broker, is the last: it stays -1
        for new, old in enumerate(order):
            self.name[old] = new

    def brokers(self, brokers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted([self.name[broker] for broker in brokers]))

    def pairs(self, pairs: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
        """Tuples that begin with a broker."""
        return tuple(sorted([(self.name[pair[0]], *pair[1:]) for pair in pairs]))

    def state(self, state: PartitionState | None) -> Any:
        if state is None:
            return None
        return (
            self.name[state.leader],
            state.leader_epoch,
            self.brokers(state.in_sync),
            state.version,
            self.brokers(state.eligible),
            state.incarnation,
        )

    def leading(self, leading: Leading | None) -> Any:
        if leading is None:
            return None
        return (
            self.state(leading.state),
            self.brokers(leading.replicas),
            leading.epoch_start,
            leading.end,
            leading.high_watermark,
            self.pairs(leading.followers),
            leading.clock,
            self.pairs(leading.registered),
            leading.proposed and self.brokers(leading.proposed),
            leading.refused,
        )

    def following(self, following: Following) -> Any:
        later = following.next
        return (
            _PHASES[following.phase],
            self.name[following.leader],
            following.epoch,
            following.end,
            following.last_epoch,
            following.high_watermark,
            following.told,
            following.question,
            later and (self.name[later.leader], later.epoch),
        )

    def replica(self, replica: Replica) -> Any:
        asking, cutting = replica.asking, replica.cutting
        return (
            self.following(replica.following),
            self.leading(replica.leading),
            self.state(replica.known),
            replica.log,
            replica.granted,
            replica.landed,
            replica.fencing,
            cutting and (len(cutting), cutting),
            asking and (self.name[asking.leader], *asking[1:]),
            self.pairs(replica.pushed),
        )

    def writes(self, writes: tuple[Write, ...]) -> Any:
        """Only the order within one queue pair matters."""
        queues: dict[tuple[int, int, int], list[Any]] = {}
        for write in writes:
            pair = (self.name[write.leader], self.name[write.to], write.incarnation)
            queues.setdefault(pair, []).append((write.epoch, write.place, write.records))
        return tuple(sorted((pair, tuple(queue)) for pair, queue in queues.items()))

    def proposal(self, proposal: Proposal) -> Any:
        in_sync, incarnations, version = proposal.propose
        members = self.pairs(zip(in_sync, incarnations, strict=True))
        return self.name[proposal.leader], proposal.epoch, members, version


def _renamed(world: World, order: Sequence[int]) -> tuple[Any, ...]:
    """The whole world as plain values, with the broker `order[i]` called i."""
    to = _Renaming(order)
    return (
        to.state(world.state),
        tuple([to.replica(world.replicas[broker]) for broker in order]),
        to.brokers(world.assigned),
        tuple([(world.registered[broker], world.noticed[broker]) for broker in order]),
        tuple(map(to.state, world.older)),
        to.writes(world.writes),
        to.pairs(world.confirmations),
        tuple(sorted(map(to.proposal, world.proposals))),
        to.pairs(world.answers),
        to.pairs(world.crashed),
        world.shown,
        world.highest,
        world.written,
        world.void,
        (world.changes, world.losses, world.crashes, world.deletes, world.incarnations),
    )


# -- what was seen ---------------------------------------------------------------------------------


class Fingerprints:
    """A set of 64-bit numbers in a flat table, eight bytes for each place."""

    def __init__(self, places: int = 1 << 16) -> None:
        self._table = array("Q", bytes(8 * places))
        self._mask = places - 1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, fingerprint: int) -> bool:
        """Add one; false if it was there."""
        mark = (fingerprint & 0xFFFFFFFFFFFFFFFF) or 1  # 0 is an empty place
        if not self._put(mark):
            return False
        self._count += 1
        if 5 * self._count > 3 * len(self._table):
            self._grow()
        return True

    def _put(self, mark: int) -> bool:
        table, mask = self._table, self._mask
        place = (mark ^ (mark >> 29)) & mask
        while (there := table[place]) != 0:
            if there == mark:
                return False
            place = (place + 1) & mask
        table[place] = mark
        return True

    def _grow(self) -> None:
        old = self._table
        self._table = array("Q", bytes(16 * len(old)))
        self._mask = len(self._table) - 1
        for mark in old:
            if mark:
                self._put(mark)


# -- the search ------------------------------------------------------------------------------------


_MOST_LATELY = 1 << 19


def search(bounds: Bounds, start: World | None = None, *, most: int = 10**9) -> Found:
    """Every world within `bounds` that can be reached from `start`, at most `most` of them."""
    start = start or begin(bounds)
    seen = Fingerprints()
    seen.add(fingerprint(start))
    lately: set[int] = set()  # plain hashes, which cost less than fingerprints
    parents, ordinals = array("I", [0]), array("I", [0])  # of each world, in the order of finding
    depth: list[tuple[int, World]] = [(0, start)]
    while depth:
        deeper: list[tuple[int, World]] = []
        depth.reverse()
        while depth:  # each world is let go when it has been gone through
            number, world = depth.pop()
            for ordinal, move in enumerate(moves(world, bounds)):
                try:
                    found = tidy(after(world, bounds, move))
                    plain = hash(found)
                    if plain in lately:
                        continue
                    if len(lately) > _MOST_LATELY:
                        lately.clear()
                    lately.add(plain)
                    if not seen.add(fingerprint(found)):
                        continue
                    check(found)
                except Broken as broken:
                    parents.append(number)
                    ordinals.append(ordinal)
                    path = _path(bounds, start, parents, ordinals)
                    return Found(len(seen), False, str(broken), path)
                parents.append(number)
                ordinals.append(ordinal)
                if len(seen) >= most:
                    return Found(len(seen), False)
                deeper.append((len(parents) - 1, found))
        depth = deeper
    return Found(len(seen), True)


def _path(
    bounds: Bounds, start: World, parents: array[int], ordinals: array[int]
) -> tuple[Move, ...]:
    """The moves that led to the world that was found last."""
    number, steps = len(parents) - 1, []
    while number:
        steps.append(ordinals[number])
        number = parents[number]
    world, path = start, []
    for ordinal in reversed(steps):
        move = list(moves(world, bounds))[ordinal]
        path.append(move)
        if len(path) < len(steps):
            world = tidy(after(world, bounds, move))
    return tuple(path)


def told(found: Found) -> Iterator[str]:
    """A report, line by line."""
    for number, move in enumerate(found.path, 1):
        yield f"{number:3} {move[0]} {' '.join(map(str, move[1:]))}"
    if found.broken is not None:
        yield f"BROKEN: {found.broken}"
    every = "all worlds within the bounds" if found.complete else "not all worlds within the bounds"
    yield f"{found.worlds:,} worlds: {every}"


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.search", description=__doc__)
    for field, default in Bounds()._asdict().items():
        option = "--" + field.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true", default=default)
        else:
            parser.add_argument(option, type=int, default=default, metavar="N")
    parser.add_argument("--most", type=int, default=10**9, help="stop after so many worlds")
    options = vars(parser.parse_args(arguments))
    most = options.pop("most")
    begun = time.monotonic()
    found = search(Bounds(**options), most=most)
    for line in told(found):
        print(line)
    print(f"{time.monotonic() - begun:.1f} s")
    return found.broken is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
