"""Seeded schedules of replicas with real logs, real produce workers and a simulated network.

The machines, the controller and what must hold are those of `tests.cluster.simulate`; what they
only assume is real here: a log is a `Partition` on files, records reach followers by the WRITEs of
`kdirect.broker.push` over simulated RNICs, followers' kernels commit and acknowledge them, and the
high watermark that is checked is the one that the leader's kernel shows.

Instead of the model's pushes, WRITEs and confirmations these steps happen:

- *network*: some requests of queue pairs are carried out, late, torn, or not at all;
- *flow*: both, for all, a few times: nothing is late for a moment;
- *work*: a produce worker takes what has come, commits, acknowledges, and pushes on;
- *hang*, *go on*: a leader stops inside of a copy, and goes on after its key has ended, perhaps;
- *ask*, *deliver*: the messages by which a follower is granted to its leader, each on its own way;
- *hear*: a leader's machine hears how far the followers are, which its kernel counts before;
- *trim*: a follower deletes what its leader has deleted;
- *crash*: bytes that were not synced are lost, or a part of them.

Two seeds of five (1, 4, 6, 9, ...) have producers in the place of *append*, which write the head of
whoever believes to lead over RDMA, alone, with acks=all or acks=1 (`tests.replication.producers`):

- *make*, *write*: a new record, and one that is to be sent, or sent again;
- *ask access*, *hear acks*, *give back*: of a producer; *stall*: it stops inside of a copy;
- *loop*: the broker's event loop, which grants the head and takes it away, does what is due.

In one seed of five (2, 7, 12, ...) a follower that lacks sealed segments of its leader READs them,
mostly (*pull*, `tests.replication.reading`); else it is pushed to from where its log ends.

In one seed of ten (5, 15, 25, ...) each broker compacts its copy by itself now and then (*clean*,
`tests.replication.cleaning`); a follower that lacks what its leader has compacted fetches it.

What is not here: producers that share a head, or are granted the next file ahead; Fetch over TCP of
what is not compacted; a follower that lacks what its leader has deleted starts over.  Whatever is
said of a queue pair that ends gets through a cut link.

From the root of the sources; a seed that fails prints itself, and ``--seed N`` shows its steps:

    python -m tests.replication.run --first 0 --schedules 100
"""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from kdirect.cluster.following_replica import Phase
from kdirect.errors import KdirectError
from kdirect.log.growth import HeadUse
from tests.cluster import effects, simulate
from tests.cluster.moves import Move
from tests.cluster.simulate import NEVER, Weather, weather_of
from tests.cluster.world import Bounds, Broken, World
from tests.replication.cleaning import CleaningReplicas
from tests.replication.kernel_log import KernelLog
from tests.replication.replicas import MODELLED
from tests.schedules import command_line

STEPS = 250
MANY_STEPS = 300
HEALING = 400

WEIGHTS = {
    **{kind: likely for kind, likely in simulate.WEIGHTS.items() if kind not in MODELLED},
    "append": 5.0,
    "network": 15.0,
    "work": 4.0,
    "flow": 0.5,
    "deliver": 6.0,
    "ask": 5.0,
    "hear": 4.0,
    "hang": 1.0,
    "go on": 0.3,
    "sync": 0.2,
    "trim": 2.0,
    "crash": 0.3,
    "learn": 5.0,
    "fence": 6.0,
    "notice": 3.0,
    "delete": 1.0,
    "restart": 4.0,
}

# Of producers over RDMA, and of the broker's event loop that grants them its head.
PRODUCERS_WEIGHTS = {
    "make": 5.0,
    "write": 8.0,
    "ask access": 5.0,
    "hear acks": 6.0,
    "give back": 0.5,
    "stall": 2.0,
    "loop": 6.0,
}

# Of followers that READ.
READERS_WEIGHTS = {"pull": 2.0}

# Of brokers that compact.
CLEANERS_WEIGHTS = {"clean": 3.0}

FAULTS = {
    *("make", "stall", "clean"),
    *("append", "elect", "elect uncleanly", "unlink", "lag", "crash", "expire", "delete", "add"),
    *("remove", "hang", "sync"),
}


def bounds_of(seed: int) -> Bounds:
    """The cluster of a seed: that of the model's schedules."""
    bounds = simulate.bounds_of(seed)
    chance = random.Random(f"kernel bounds {seed}")
    if is_of_elections(seed):
        return bounds._replace(separate=True, changes=NEVER, losses=NEVER)
    reads = is_of_readers(seed)
    return bounds._replace(
        records=60 if is_of_cleaners(seed) else 30 if reads else min(bounds.records, 25),
        separate=True,
        tells=False,
        crashes=max(bounds.crashes, chance.choice((0, 1, 3)), 4 if reads else 0),
        losses=NEVER,
        changes=NEVER,
    )


def is_of_elections(seed: int) -> bool:
    """Has this seed one election after the other, with answers that come late, and little else?"""
    return seed % 5 == 3


def acks_of(seed: int) -> tuple[int, ...]:
    """What each producer over RDMA waits for; none: records are appended to the leaders' logs."""
    if seed % 5 not in (1, 4):
        return ()
    return random.Random(f"acks {seed}").choice(((-1,), (-1,), (-1, -1), (-1, 1), (1,)))


def is_of_readers(seed: int) -> bool:
    """Do followers of this seed READ the sealed segments that they lack?"""
    return seed % 5 == 2 or seed % 20 == 15


def is_of_cleaners(seed: int) -> bool:
    """Do the brokers of this seed compact their copies?"""
    return seed % 10 == 5


class Run(CleaningReplicas):
    """One schedule, in a directory of its own."""

    def __init__(self, seed: int, directory: Path, bounds: Bounds | None = None) -> None:
        chance = random.Random(f"kernel schedule {seed}")
        given = seed, directory, bounds or bounds_of(seed), chance, acks_of(seed)
        super().__init__(*given, reads=is_of_readers(seed), cleans=is_of_cleaners(seed))
        self.weights = {
            kind: likely * chance.choice((0.1, 0.5, 1.0, 1.0, 2.0, 6.0))
            for kind, likely in WEIGHTS.items()
        }
        chance = random.Random(f"producers {seed}")
        self.weights |= {
            kind: likely * chance.choice((0.2, 1.0, 1.0, 3.0))
            for kind, likely in PRODUCERS_WEIGHTS.items()
        }
        self.weights |= READERS_WEIGHTS | CLEANERS_WEIGHTS
        if is_of_readers(seed):
            self.weights.update(append=12.0, ask=0.7, crash=0.1, delete=1.0)
        self.steps = STEPS
        if is_of_cleaners(seed):
            self.steps = MANY_STEPS
            self.weights.update(append=12.0, ask=6.0, deliver=10.0, hear=6.0, work=6.0, flow=3.0)
            self.weights.update(elect=0.3, crash=0.1, delete=0.3, hang=0.2, learn=8.0, fence=10.0)
        if is_of_elections(seed):
            self.steps = MANY_STEPS
            self.weights.update(elect=0.7, append=2.0, hang=0.0, unlink=0.0, lag=0.0, sync=0.0)
            self.weights.update(answer=20.0, ask=20.0, deliver=20.0, network=3.0, work=1.0)
            self.weights.update(flow=5.0, learn=8.0, fence=15.0)

    def run(self) -> World:
        """Raise `Broken` when something breaks, or does not heal."""
        # The high watermark that is shown is the kernel's, not what a machine has heard of it.
        with mock.patch.object(effects, "show", lambda world, broker, offset: world):
            weather, until = Weather(), 0
            for step in range(self.steps):
                if step == until:
                    weather = weather_of(self.chance, len(self.brokers))
                    self.network.part((str(a), str(b)) for a, b in weather.cut)
                    until = step + self.chance.randint(5, 40)
                possible = list(self.moves())
                weights = [self.weight(move, weather) for move in possible]
                if any(weights):
                    self.take(self.chance.choices(possible, weights)[0])
            self.heal()
        return self.world

    def weight(self, move: Move, weather: Weather) -> float:
        """How likely a move is in this weather."""
        kind = move[0]
        likely = self.weights[kind]
        if kind == "be answered":
            following = self.world.replicas[move[1].to].following
            if following.phase is not Phase.COMPARING or following.last_epoch != move[1].asked:
                likely *= 0.02
        if kind in ("crash", "delete") and self.is_reading(move[1]):
            likely *= 20.0
        if kind in ("crash", "elect") and self.has_compacted(self.world.state.leader):
            likely *= 6.0
        if kind in ("network", "flow", "go on", "crash") or kind in PRODUCERS_WEIGHTS:
            return likely
        if self.hung and kind in ("elect", "learn", "fence"):  # which is what a hung leader meets
            likely *= 20.0 if kind == "elect" else 3.0
        if kind == "deliver":
            _, _, sender, receiver, _ = move
            if (sender, receiver) in weather.cut or {sender, receiver} & weather.still:
                return 0.0
            return likely * (0.1 if {sender, receiver} & weather.slow else 1.0)
        if kind in ("unlink", *READERS_WEIGHTS, *CLEANERS_WEIGHTS):
            return likely
        return simulate.weight(likely, weather, move)

    def heal(self) -> None:
        """Every fault ends.  All replicas come into sync, and have the same records."""
        self.bounds, self.world = simulate.with_more_epochs(self.bounds, self.world)
        self.network.part(())
        self._go_on()
        for _ in range(HEALING):
            self.drain()
            possible = [m for m in self.moves() if m[0] not in FAULTS | {"network", "work", "flow"}]
            if not possible:
                possible = self.elections()
            if not possible:
                break
            self.take(self.chance.choice(possible))
        if not simulate.is_whole(self.world):
            raise Broken(f"it does not heal: {self.describe()}")
        if any(producer.waiting for producer in self.producers):
            raise Broken(f"a producer has no answer: {self.describe()}")
        for number, broker in enumerate(self.brokers):
            if KernelLog.of(broker.partition) != self.world.replicas[number].log:
                raise Broken("a log is not what it was read to be")

    def elections(self) -> list[Move]:
        """The controller elects when nobody leads."""
        return simulate.Run.elections(self)  # type: ignore[arg-type]


@contextmanager
def silence() -> Iterator[None]:
    """Nothing of what kdirect logs is printed meanwhile."""
    logger = logging.getLogger("kdirect")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def failing(
    first: int, schedules: int, step: int = 1, *, look: Callable[[Run], object] = id
) -> tuple[int, Run, str] | None:
    """The first seed of so many, every `step`-th, that fails, with its run and what broke; `look`
    is shown each run that holds."""
    with (
        silence(),
        # A head that fills quickly would have the next one made by a thread.
        mock.patch.object(HeadUse, "was_busy", lambda *_: False),
    ):
        for seed in range(first, first + schedules, step):
            directory = Path(tempfile.mkdtemp(prefix="kdirect-test-", dir=_memory()))
            run = Run(seed, directory)
            try:
                run.run()
                look(run)
            except (Broken, KdirectError) as broken:
                return seed, run, str(broken).replace(str(directory), "")
            finally:
                run.close()
                shutil.rmtree(directory)
    return None


def _memory() -> str | None:
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() else None


def main(arguments: list[str]) -> bool:
    """The command line."""
    return command_line("tests.replication.run", failing, arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
