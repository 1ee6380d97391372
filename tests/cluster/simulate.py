"""Seeded random schedules of the model world, at bounds that no search can exhaust.

Each seed gives a cluster (3 or 5 replicas, perhaps a spare one to reassign to), what may happen to
it, and weather that changes: links that are cut in one direction, brokers that stand still, are
slow, or hear nothing from the store.  The same steps and the same checks as in the exhaustive
search.  In the end everything heals, and all replicas must come back into sync with equal logs.

Every fifth seed (4, 9, ...) allows unclean elections and any loss: what was shown may be lost by
such an election, and by nothing else.  Every fifth (3, 8, ...) has nothing but one election after
the other, with answers that come late: that needs many epochs, and finds what needs many epochs.

From the root of the sources; a seed that fails prints itself, and ``--seed N`` shows its steps:

    python -m tests.cluster.simulate --first 0 --schedules 5000
"""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

from kdirect.cluster.following_replica import Phase
from kdirect.cluster.partition_state import NO_LEADER
from tests.cluster.moves import Move, after, moves
from tests.cluster.world import Bounds, Broken, Replica, World, begin, check
from tests.schedules import command_line

STEPS = 200
HEALING = 2_000
NEVER = 10**9

# How likely each kind of move is, relative to the others that are possible.
WEIGHTS = {
    "append": 3.0,
    "push": 6.0,
    "land": 6.0,
    "commit": 6.0,
    "confirm": 6.0,
    "answer": 5.0,
    "be answered": 5.0,
    "fence": 4.0,
    "cut": 4.0,
    "learn": 3.0,
    "reconnect": 4.0,
    "tell": 2.0,
    "hear of brokers": 2.0,
    "hear of replicas": 2.0,
    "out of range": 4.0,
    "tick": 2.0,
    "agree": 5.0,
    "refuse": 3.0,
    "notice": 2.0,
    "restart": 2.0,
    "elect": 0.25,
    "elect uncleanly": 3.0,
    "unlink": 0.2,
    "lag": 0.3,
    "crash": 0.1,
    "expire": 0.1,
    "delete": 0.3,
    "tear": 0.2,
    "add": 0.2,
    "remove": 0.3,
}

# What still happens when everything heals.  Nothing new is appended, and nothing breaks.
HEALING_MOVES = {*WEIGHTS} - {
    "append",
    "elect",
    "elect uncleanly",
    "unlink",
    "lag",
    "crash",
    "expire",
    "delete",
    "tear",
    "add",
    "remove",
}


class Weather(NamedTuple):
    """Who cannot reach whom, and who is slow, for a while."""

    cut: frozenset[tuple[int, int]] = frozenset()  # from, to
    still: frozenset[int] = frozenset()
    blind: frozenset[int] = frozenset()  # hears nothing from the store, and it nothing from them
    slow: frozenset[int] = frozenset()


def bounds_of(seed: int) -> Bounds:
    """The cluster of a seed."""
    chance = random.Random(f"bounds {seed}")
    replicas = chance.choice((3, 3, 5))
    if seed % 5 == 3:
        records = chance.randint(5, 8)
        return Bounds(replicas=3, records=records, epochs=12, changes=0, losses=0, late=True)
    unclean = seed % 5 == 4
    return Bounds(
        replicas=replicas,
        records=chance.randint(6, 40),
        epochs=chance.randint(3, 12),
        changes=NEVER,
        losses=chance.choice((0, 2, NEVER)),
        crashes=chance.choice((0, 1, 3, 6)) + (4 if unclean else 0),
        deletes=chance.choice((0, 0, 3)),
        min_in_sync=chance.randint(1, replicas // 2 + 1),
        run=chance.choice((1, 3)),
        stale=chance.random() < 0.5,
        late=chance.random() < 0.7,
        separate=chance.random() < 0.6,
        expires=chance.random() < 0.5,
        tells=chance.random() < 0.7,
        again=chance.random() < 0.3,
        lossy=chance.random() < 0.7,
        unclean=unclean,
        spares=chance.choice((0, 0, 1)),
    )


def weather_of(chance: random.Random, brokers: int) -> Weather:
    """New weather; half of the time it is fine."""
    if chance.random() < 0.5:
        return Weather()

    def some(share: float) -> frozenset[int]:
        return frozenset(b for b in range(brokers) if chance.random() < share)

    cut = frozenset(
        (a, b) for a in range(brokers) for b in range(brokers) if a != b and chance.random() < 0.2
    )
    return Weather(cut, some(0.15), some(0.25), some(0.25))


def weight(likely: float, weather: Weather, move: Move) -> float:
    """How likely this move is in this weather, if it is `likely` when it is fine."""
    kind, subject = move[0], move[1]
    if weather == CALM:
        return likely
    sender, receiver = None, None
    if kind in ("land", "tear"):
        sender, receiver = subject.leader, subject.to
    elif kind == "confirm":
        sender, receiver = move[2].broker, subject
    elif kind in ("agree", "refuse"):
        receiver = subject.leader
        if receiver in weather.blind:
            return 0.0
    elif kind == "be answered":
        receiver = subject.to
    elif kind in (
        "elect",
        "elect uncleanly",
        "notice",
        "add",
        "remove",
        "crash",
        "expire",
        "restart",
    ):
        return likely  # the controller's, or nobody's
    else:
        sender = receiver = subject
        if kind in ("tell", "answer", "out of range"):
            receiver = move[2]
        elif kind in ("learn", "hear of brokers", "hear of replicas") and subject in weather.blind:
            return 0.0
    if (sender, receiver) in weather.cut or receiver in weather.still or sender in weather.still:
        return 0.0
    if receiver in weather.slow or sender in weather.slow:
        likely *= 0.1
    return likely


CALM = Weather()


class Run:
    """One schedule.  `path` is what has happened."""

    def __init__(self, seed: int, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or bounds_of(seed)
        self.chance = random.Random(f"schedule {seed}")
        self.world = begin(self.bounds)
        self.path: list[Move] = []
        # Each schedule likes other moves, so that some keep messages on their way for long.
        self.weights = {
            kind: likely * self.chance.choice((0.1, 0.5, 1.0, 1.0, 2.0, 6.0))
            for kind, likely in WEIGHTS.items()
        }

    def run(self) -> World:
        """Raise `Broken` when something breaks, or does not heal."""
        weather, until = CALM, 0
        for step in range(STEPS):
            if step == until:
                weather = weather_of(self.chance, len(self.world.replicas))
                until = step + self.chance.randint(5, 40)
            possible = list(moves(self.world, self.bounds))
            weights = [weight(self.likely(move), weather, move) for move in possible]
            if any(weights):
                self.take(self.chance.choices(possible, weights)[0])
        self.heal()
        return self.world

    def likely(self, move: Move) -> float:
        """How likely a move is in fine weather.  The worst that a late message can do is to come
        where a newer one is waited for, so it is kept until then as a rule."""
        likely = self.weights[move[0]]
        if move[0] == "be answered":
            following = self.world.replicas[move[1].to].following
            if following.phase is not Phase.COMPARING or following.last_epoch != move[1].asked:
                likely *= 0.02
        elif move[0] == "confirm":
            if move[2].incarnation != self.world.registered[move[2].broker]:
                likely *= 0.1
        return likely

    def take(self, move: Move) -> None:
        self.path.append(move)
        self.world = after(self.world, self.bounds, move)
        check(self.world)

    def heal(self) -> None:
        """Every fault ends.  All replicas come into sync, and have the same records."""
        self.bounds, self.world = with_more_epochs(self.bounds, self.world)
        for broker, replica in enumerate(self.world.replicas):
            for follower, _ in replica.pushed:  # whatever was lost over a link is noticed
                self.bounds = self.bounds._replace(losses=NEVER)
                self.take(("unlink", broker, follower))
        for _ in range(HEALING):
            possible = [m for m in moves(self.world, self.bounds) if m[0] in HEALING_MOVES]
            if not possible:
                possible = self.elections()
            if not possible:
                break
            self.take(self.chance.choice(possible))
        if not is_whole(self.world):
            raise Broken("it does not heal")

    def elections(self) -> list[Move]:
        """The controller elects when nobody leads."""
        state = self.world.state
        leader = state.leader
        if leader != NO_LEADER and state.incarnation == self.world.registered[leader]:
            return []
        return [m for m in moves(self.world, self.bounds) if m[0] in ("elect", "elect uncleanly")]


_SPARE_EPOCHS = 20


def with_more_epochs(bounds: Bounds, world: World) -> tuple[Bounds, World]:
    """Room for the elections that heal, of which everybody learns at once."""
    bounds = bounds._replace(epochs=bounds.epochs + _SPARE_EPOCHS, stale=False)
    more = (0,) * _SPARE_EPOCHS
    world = world._replace(older=(), highest=world.highest + more, written=world.written + more)
    return bounds, world


def is_whole(world: World) -> bool:
    """Does the leader lead, and is every replica in sync, with all that the leader has?"""
    state = world.state
    if state.leader == NO_LEADER or {*state.in_sync} != {*world.assigned}:
        return False
    leader = world.replicas[state.leader]
    leading = leader.leading
    if leading is None or leading.high_watermark != leader.log.end:
        return False
    return all(_is_level(world, world.replicas[b], leader) for b in state.in_sync)


def _is_level(world: World, replica: Replica, leader: Replica) -> bool:
    start, end = max(replica.log.start, leader.log.start), leader.log.end
    return (
        replica.following.phase in (Phase.FOLLOWING, Phase.LEADING)
        and replica.log.end == end
        and replica.log.between(start, end) == leader.log.between(start, end)
    )


def failing(first: int, schedules: int, step: int = 1) -> tuple[int, Run, str] | None:
    """The first of so many seeds, every `step`-th, that fails, with its run and what broke."""
    for seed in range(first, first + schedules, step):
        run = Run(seed)
        try:
            run.run()
        except Broken as broken:
            return seed, run, str(broken)
    return None


def main(arguments: list[str]) -> bool:
    """The command line."""
    return command_line("tests.cluster.simulate", failing, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
