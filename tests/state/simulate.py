"""Seeded schedules of a whole job: executors, coordinator, caller, and what goes wrong.

Each seed gives a job (2 to 16 executors, a window, partitions of which one may lag or stand still)
and weather: which executors are slow, what is killed, cut, lost or repeated.  Processes are killed
between any two steps: while they read, send, merge, trigger or write a snapshot.  Sometimes the job
is stopped and goes on with another number of executors.  In the end everything heals, the topics
get rows that close every window, and the caller must have got what a sequential run gives.

From the root of the sources; a seed that fails prints itself, and ``--seed N`` shows its steps:

    python -m tests.state.simulate --first 0 --schedules 5000
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kdirect.errors import KdirectError
from kdirect.rdma.sim import Faults
from kdirect.state.batch_run import Step
from kdirect.state.job import Phase
from kdirect.state.windows import NoWindow, Session, Sliding, Tumbling
from tests.schedules import command_line
from tests.state.actors import Broken
from tests.state.topics import Row
from tests.state.world import Bounds, World

STEPS = 600
HEALING = 60_000  # steps without another batch handed out: what heals still makes progress
TICK = 100  # microseconds; an idle partition is found after ten of them
WINDOWS = (
    Tumbling(size_us=10 * TICK),
    Tumbling(size_us=7 * TICK, origin_us=3 * TICK),
    Sliding(size_us=12 * TICK, slide_us=8 * TICK),
    Sliding(size_us=10 * TICK, slide_us=5 * TICK),
    Session(gap_us=6 * TICK),
    NoWindow(),
)


# Which seeds have real executors, of any 32: as many for each core of two.
REAL = (6, 31)


def is_real(seed: int) -> bool:
    """Does the seed have real executors?"""
    return seed % 32 in REAL


def bounds_of(seed: int) -> Bounds:
    """The job of a seed."""
    if is_real(seed):
        return real_bounds(seed)
    chance = random.Random(f"bounds {seed}")
    executors = chance.choice((2, 2, 2, 3, 3, 4, 5)) if seed % 25 else chance.randint(6, 16)
    return Bounds(
        executors=executors,
        partitions=chance.randint(1, 5),
        keys=chance.choice((1, 3, 8, 40)),
        window=chance.choice(WINDOWS),
        delay=chance.choice((0, 3 * TICK, 10 * TICK)),
        ahead=50 * TICK,
        epoch_bytes=chance.choice((20, 60, 200)),
        block_rows=chance.choice((1, 6, 30)),
        max_offsets=chance.choice((None, None, None, 8, 30)),
        snapshot_interval=chance.choice((0, 20 * TICK, 100 * TICK, 10**9)),
        idle_timeout_ms=chance.choice((None, 1)),
        split=chance.random() < 0.2,
        round_trips=seed % 20 == 0,
    )


def real_bounds(seed: int) -> Bounds:
    """The job of a seed with real executors: joins, sessions, lists and cells."""
    chance = random.Random(f"real bounds {seed}")
    executors = chance.choice((2, 2, 2, 3, 3, 4)) if seed % 25 else chance.randint(5, 16)
    how = chance.choice(("", "", "inner", "inner", "left", "right", "full", "full"))
    windows: tuple[Any, ...] = WINDOWS
    if how:
        windows = tuple(w for w in WINDOWS if isinstance(w, Tumbling | Session))
    window = chance.choice(windows)
    max_offsets = chance.choice((None, None, None, 8, 30))
    lists = not how and not isinstance(window, NoWindow) and chance.random() < 0.4
    return Bounds(
        executors=executors,
        partitions=chance.randint(1, 3),
        keys=chance.choice((1, 3, 8, 40)),
        window=window,
        delay=chance.choice((0, 3 * TICK, 10 * TICK)),
        right_delay=chance.choice((0, 3 * TICK, 10 * TICK)),
        ahead=50 * TICK,
        epoch_bytes=chance.choice((300, 1000, 3000)),
        block_rows=chance.choice((1, 6, 30)),
        # Many batches of many executors take long to replay.
        max_offsets=max_offsets if executors < 6 else None,
        snapshot_interval=chance.choice((0, 20 * TICK, 100 * TICK, 10**9)),
        idle_timeout_ms=chance.choice((None, 1)),
        split=chance.random() < 0.2,
        round_trips=True,
        is_real=True,
        slots=chance.choice((2, 4, 8)),
        repeats=chance.random() < 0.25,
        faults=Faults(
            tear=chance.choice((0.0, 0.2)),
            disconnect=chance.choice((0.0, 0.0, 0.002)),
            disorder=chance.choice((0.0, 0.0, 0.2)),
        ),
        value_format=chance.choice(("fixed", "fixed", "fixed", "json")),
        lists=lists,
        how=how,
    )


class Run:
    """One schedule.  `path` is what has happened."""

    def __init__(self, seed: int, bounds: Bounds | None = None) -> None:
        self.chance = random.Random(f"schedule {seed}")
        self.bounds = bounds or bounds_of(seed)
        self.world = World(self.bounds, self.chance)
        self.path: list[tuple] = []
        self.slow: set[int] = set()
        # How often something goes wrong; every seed has its own mixture.
        pick = self.chance.choice
        self.faults = {
            "kill executor": pick((0, 0.004, 0.015)),
            "kill with file": pick((0, 0, 0.004)),
            "cut": pick((0, 0, 0.004)),
            "kill coordinator": pick((0, 0.004, 0.015)),
            "kill all": pick((0, 0, 0.003)),
            "repeat": pick((0, 0.02, 0.1)),
            "stop": pick((0, 0, 0.004)),
            "lose snapshot": pick((0, 0.01)),
        }
        self.lagging = pick((None, 0))
        self.idle = self.chance.random() < 0.4
        self.snapshots_lost = 0

    def run(self) -> World:
        """Raise `Broken` when something breaks, or does not heal."""
        try:
            self.run_steps()
        finally:
            self.world.close()
        return self.world

    def run_steps(self) -> None:
        for number in range(STEPS):
            if number % 60 == 0:
                self.slow = {i for i in range(self.world.executors) if self.chance.random() < 0.3}
            if self.chance.random() < 0.06:
                self.produce()
            self.fault()
            self.step()
            if number % 20 == 0:
                self.world.check_converges()
        self.heal()

    # -- moves -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step of one process; False if nobody can do anything."""
        world = self.world
        if world.job is None and self.chance.random() < 0.1:
            self.note("start coordinator")
            if world.stopped:
                self.redeploy()
            else:
                world.start_coordinator()
        actors: list[Any] = [None, None, *world.all]
        if self.bounds.is_real:
            # Nobody knows when what is under way arrives.
            if self.chance.random() < 0.5 and self.step_network():
                return True
        first = self.chance.randrange(len(actors))
        for actor in actors[first:] + actors[:first]:
            if actor is None:
                moves = world.coordinator_moves()
            elif not actor.alive:
                if self.chance.random() < 0.2 and not world.stopped:
                    self.note("start executor", actor.index)
                    actor.alive = True
                continue
            elif actor.index in self.slow and self.chance.random() < 0.9:
                continue
            else:
                moves = actor.moves()
            if moves:
                kind, what = self.chance.choice(moves)
                self.note("coordinator" if actor is None else actor.index, kind)
                if actor is None:
                    world.coordinator_move(kind, what)
                else:
                    actor.move(kind, what)
                return True
        if self.bounds.is_real and self.step_network():
            return True
        world.now += TICK
        return False

    def step_network(self) -> bool:
        """Some of what is under way between real executors happens; False if nothing is."""
        happened = False
        for _ in range(self.chance.randint(1, 8)):
            happened |= self.world.network.step()
        return happened

    def note(self, *move: Any) -> None:
        self.path.append(move)

    def produce(self) -> None:
        """New rows: most are in time, some are late, early, without a time or before 1970."""
        world, chance = self.world, self.chance
        world.now += TICK * chance.choice((0, 1, 1, 5))
        for tp, rows in world.rows.items():
            asleep = self.idle and tp.partition == 1 and world.now // (40 * TICK) % 2
            if asleep or chance.random() < 0.4:
                continue
            for _ in range(chance.randint(1, 8)):
                at = world.now - TICK * chance.choice((0, 1, 2, 3, 5))
                if tp.partition == self.lagging:
                    at -= 25 * TICK
                odd = chance.random()
                if odd < 0.05:
                    at -= 60 * TICK
                elif odd < 0.07:
                    at += 1_000 * TICK
                event = None if odd > 0.98 else -5 if odd > 0.97 else at
                key: int | None = chance.randrange(self.bounds.keys)
                if self.bounds.value_format == "json" and self.bounds.is_real:
                    key = None if chance.random() < 0.1 else key
                rows.append(Row(event, key, chance.randint(-5, 9)))

    def fault(self) -> None:
        world, chance = self.world, self.chance
        for kind, likely in self.faults.items():
            if chance.random() >= likely:
                continue
            executor = chance.choice(world.all)
            if kind == "repeat":
                self.repeat()
                continue
            self.note(kind, executor.index)
            if kind == "kill executor" and self.bounds.is_real and chance.random() < 0.5:
                executor.doomed = chance.choice(list(Step))
            elif kind == "kill executor":
                world.kill_executor(executor)
            elif kind == "kill with file":
                world.kill_executor(executor, with_file=True)
            elif kind == "cut":
                world.cut(executor)
            elif kind == "kill coordinator":
                world.kill_coordinator()
            elif kind == "kill all":
                world.kill_coordinator()
                for each in world.all:
                    world.kill_executor(each, with_file=chance.random() < 0.5)
            elif kind == "stop" and world.job is not None and not world.stopped:
                world.coordinator_move("stop", None)
            elif kind == "lose snapshot":
                self.lose_snapshot()

    def repeat(self) -> None:
        """A page that was sent once comes again: of this batch, an older one, or an older
        attempt."""
        world, chance = self.world, self.chance
        if not world.sent:  # channels over RDMA repeat nothing
            return
        sender, peer, *what = chance.choice(world.sent[-60:])
        if peer >= world.executors or sender >= world.executors:
            return
        leading = world.all[peer].leading
        if leading is None or leading.batch is None:
            return
        if self.bounds.is_real:
            (buffer,) = what
            wire = world.all[peer].process.exchange.receivers[sender].wire
            if wire is not None and buffer not in wire.flying:
                self.note("repeat", sender, peer, buffer)
                wire.repeat(buffer)
                world.news += 1
            return
        page, entries = what
        channel = world.channels.get((leading.attempt, sender, peer))
        waiting = [] if channel is None else [p for p, _, _ in channel.flying]
        if channel is not None and page not in waiting:
            self.note("repeat", sender, peer, page)
            channel.repeat(page, entries)

    def lose_snapshot(self) -> None:
        """A part of the newest snapshot is gone, while there is an older one."""
        world = self.world
        if len(world.manifests) > 1 and not self.snapshots_lost:
            self.snapshots_lost += 1
            newest = max(world.manifests)
            part = self.chance.choice(world.manifests[newest].parts)
            world.lose_part(newest, part.file)

    def redeploy(self) -> None:
        """The job was stopped: it goes on with as many executors, or another number.  If it was
        split, it may go on in the other mode: as many executors lead other keys."""
        executors = self.chance.choice((self.world.executors, self.chance.randint(1, 5)))
        if self.bounds.split:
            executors = max(executors, 2)
        is_split = self.bounds.split and self.chance.random() < 0.5
        self.note("deploy", executors, is_split)
        self.world.seen["rescaled"] += executors != self.world.executors
        self.world.seen["in another mode"] += (
            executors == self.world.executors and is_split != self.world.settings.is_split
        )
        self.world.deploy(executors, is_split=is_split)

    # -- the end -----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Nothing breaks any more.  All windows close, and the caller has everything."""
        world = self.world
        self.faults, self.slow = {}, set()
        if self.bounds.is_real:
            world.network.faults = replace(world.network.faults, disconnect=0.0, disorder=0.0)
        for executor in world.all:
            executor.doomed = None
        for round_ in range(2):
            world.now += 200 * TICK * (round_ + 1)
            for rows in world.rows.values():
                rows.append(Row(world.now, 0, 1))
            batches, steps = len(world.taken), 0
            most = batches + sum(len(rows) for rows in world.rows.values()) + 100
            while not self.is_idle() and batches < most:
                if len(world.taken) > batches:
                    batches, steps = len(world.taken), 0
                steps += 1
                if steps > HEALING:
                    raise Broken(f"it does not heal: no batch after {batches}")
                self.step()
                if self.chance.random() < 0.01:
                    world.check_converges()
            if batches >= most:
                raise Broken(f"it does not heal: {batches} batches, and not at rest")
        self.check_all()

    def is_idle(self) -> bool:
        world = self.world
        job = world.job
        return (
            job is not None
            and job.phase is Phase.WAITING
            and job.is_asked
            and job.last in job.records
            and all(
                job.records[job.last].ranges[tp].end == len(rows) for tp, rows in world.rows.items()
            )
        )

    def check_all(self) -> None:
        world = self.world
        if sorted(world.taken) != list(range(len(world.expected))):
            raise Broken(f"handed out {sorted(world.taken)} of {len(world.expected)} batches")
        model = world.model
        total = sum(len(rows) for rows in world.rows.values())
        if model.late + model.bad + model.kept != total:
            raise Broken("the model itself has lost rows")
        for channel in world.channels.values():
            channel.check()


SEEN: Counter = Counter()  # what has happened in the schedules of this process
SAYS = "seen: "


def failing_of(
    seeds: Iterable[int], bounds: Callable[[int], Bounds] = bounds_of
) -> tuple[int, Run, str] | None:
    """The first of these seeds that fails, with its run and what broke."""
    for seed in seeds:
        run = Run(seed, bounds(seed))
        try:
            run.run()
        except (Broken, KdirectError, AssertionError, KeyError) as broken:
            return seed, run, f"{type(broken).__name__}: {broken}"
        seen = run.world.seen
        seen.update({move[0] for move in run.path if isinstance(move[0], str)})
        SEEN.update({("real " if run.bounds.is_real else "") + what: n for what, n in seen.items()})
    return None


def failing(first: int, schedules: int, step: int = 1) -> tuple[int, Run, str] | None:
    """The first of so many seeds, every `step`-th, that fails, with its run and what broke."""
    return failing_of(range(first, first + schedules, step))


def main(arguments: list[str]) -> bool:
    """The command line.  It says what has happened, too: what never does is not tested."""
    failed = command_line("tests.state.simulate", failing, arguments, __doc__)
    print(SAYS + json.dumps(SEEN))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
