"""Seeded schedules of planned jobs, with a caller that does what Spark's driver does.

The caller writes down what a batch reads, plans it, and starts a gang of visitors.  When one of
them fails it ends the others, of which some live on for a while, and starts another gang; when all
have their output it may ask another gang for it, or commit.  It is killed between any two of these,
comes back with what it wrote down, perhaps with another number of executors, and plans the same
batch or the next one.  The last batch closes all windows.  Whatever happens, every gang that comes
to the end of a batch must hand out what a sequential run gives for it.

    python -m tests.state.simulate_planned --first 0 --schedules 2000
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

from kdirect.errors import KdirectError
from kdirect.state import planned_job
from kdirect.state.batches import Range
from kdirect.state.job import Planned
from tests.schedules import command_line
from tests.state import simulate
from tests.state.actors import Broken
from tests.state.planned_world import PlannedWorld, Visitor
from tests.state.simulate import TICK, WINDOWS
from tests.state.topics import Row
from tests.state.world import Bounds

STEPS = 900
LAST_STEPS = 300  # in which all is read, and some schedules come to their last batch
HEALING = 20_000  # steps without another batch
SAYS = simulate.SAYS


def bounds_of(seed: int) -> Bounds:
    """The job of a seed."""
    chance = random.Random(f"planned bounds {seed}")
    return Bounds(
        executors=chance.choice((1, 2, 2, 2, 3, 3, 4)),
        partitions=chance.randint(1, 4),
        keys=chance.choice((1, 3, 8, 40)),
        window=chance.choice(WINDOWS),
        delay=chance.choice((0, 3 * TICK, 10 * TICK)),
        ahead=50 * TICK,
        epoch_bytes=chance.choice((20, 60, 200)),
        block_rows=chance.choice((1, 6, 30)),
        max_offsets=chance.choice((None, None, 8, 30)),
        snapshot_interval=chance.choice((0, 20 * TICK, 20 * TICK, 100 * TICK, 10**9)),
        idle_timeout_ms=chance.choice((None, 1)),
        round_trips=seed % 20 == 0,
    )


class Caller:
    """Spark's driver.  What it wrote down outlives it; the gang does not."""

    def __init__(self, world: PlannedWorld, chance: random.Random, hosts: int) -> None:
        self.world, self.chance, self.hosts = world, chance, hosts
        self.offsets: list[tuple[dict, bool]] = []  # the ranges of each batch; is it the last one?
        self.starts = 1
        self.again = 0.0  # how often the output of a batch is asked for once more
        self.ends_soon = False  # the next batch is the last one
        self.begin()

    def begin(self) -> None:
        """A new process."""
        self.gang: list[Visitor] = []
        self.is_planned = False

    @property
    def number(self) -> int:
        """The batch that is to run; len(offsets) if there is none."""
        return self.world.committed_by_caller + 1

    @property
    def is_over(self) -> bool:
        return bool(self.offsets) and self.offsets[-1][1] and self.number == len(self.offsets)

    def move(self) -> str:
        """One step; what it was, or nothing."""
        world = self.world
        if world.job is None or world.effects or self.is_over:
            return ""
        if self.number == len(self.offsets):
            return self.write_down()
        if not self.is_planned:
            ranges, is_last = self.offsets[self.number]
            world.plan_batch(self.plan_of(self.number, ranges, is_last))
            self.is_planned = True
            return "plan"
        if not self.gang:
            return self.launch()
        if any(not visitor.alive and visitor.output is None for visitor in self.gang):
            self.give_up()
            return "give up"
        if all(visitor.output is not None for visitor in self.gang):
            return self.take()
        return ""

    def plan_of(self, number: int, ranges: dict, is_last: bool) -> Planned:
        return Planned(number, ranges, self.world.ends().ends, self.world.now, is_last)

    def write_down(self) -> str:
        """What the next batch reads, if there is anything new."""
        world, most = self.world, self.world.bounds.max_offsets
        ends = world.ends().ends
        before = self.offsets[-1][0] if self.offsets else {tp: Range(0, 0) for tp in ends}
        ranges = {}
        for tp, end in ends.items():
            at = before[tp].end
            ranges[tp] = Range(at, end.end if most is None else min(end.end, at + most))
        is_new = any(r.start < r.end for r in ranges.values())
        is_last = self.ends_soon and all(ranges[tp].end == ends[tp].end for tp in ends)
        if not is_new and not is_last and self.chance.random() < 0.98:
            if not planned_job.would_close(world.job, ends, world.now):
                return ""
            world.seen["would close"] += 1
        self.offsets.append((ranges, is_last))
        self.is_planned = False
        return "write down"

    def launch(self) -> str:
        """A task for each executor; mostly where it was before."""
        world, executors = self.world, self.world.executors
        hosts = [task % self.hosts for task in range(executors)]
        if self.chance.random() < 0.3:
            self.chance.shuffle(hosts)
            hosts = [host if self.chance.random() < 0.7 else 0 for host in hosts]
        for task, host in enumerate(hosts):
            visitor = world.start_visitor(task, self.starts + task, self.number, host)
            self.gang.append(visitor)
        self.starts += executors
        return "launch"

    def give_up(self) -> None:
        """The gang has failed.  Not everybody is ended at once."""
        for visitor in self.gang:
            if visitor.alive and self.chance.random() < 0.6:
                visitor.kill()
            visitor.is_stopped = self.chance.random() < 0.3
        self.gang = []

    def take(self) -> str:
        outputs = [visitor.output for visitor in self.gang if visitor.output is not None]
        self.world.take(self.number, outputs)
        self.gang = []
        if self.chance.random() < self.again:
            return "again"
        self.world.committed_by_caller += 1
        self.is_planned = False
        return "commit"


class PlannedRun(simulate.Run):
    """One schedule.  `path` is what has happened."""

    world: PlannedWorld

    def __init__(self, seed: int, bounds: Bounds | None = None) -> None:
        self.chance = random.Random(f"planned schedule {seed}")
        self.bounds = bounds or bounds_of(seed)
        self.world = PlannedWorld(self.bounds, self.chance)
        self.path: list[tuple] = []
        self.slow: set[int] = set()
        pick = self.chance.choice
        self.caller = Caller(self.world, self.chance, pick((1, 1, 2, 3)))
        self.caller.again = pick((0.0, 0.2, 0.5))
        self.faults = {
            "kill visitor": pick((0, 0.003, 0.01)),
            "cut visitor": pick((0, 0, 0.004)),
            "kill caller": pick((0, 0.003, 0.01)),
            "lose state": pick((0, 0, 0.004)),
            "lose snapshot": pick((0, 0.01)),
            "end zombie": 0.01,
            "probe": 0.02,
        }
        self.lagging = pick((None, 0))
        self.idle = self.chance.random() < 0.4
        self.snapshots_lost = 0

    def run_steps(self) -> None:
        ends_at = self.chance.choice((STEPS, STEPS - LAST_STEPS))
        for number in range(STEPS):
            self.caller.ends_soon = number >= ends_at
            if self.chance.random() < 0.06 and not self.caller.ends_soon:
                self.produce()
            self.fault()
            self.step()
            if number % 20 == 0:
                self.world.check_converges()
        self.heal()

    def step(self) -> bool:
        """One step of one process; False if nobody can do anything."""
        world = self.world
        world.all = [visitor for visitor in world.all if visitor.alive]
        if world.job is None and self.chance.random() < 0.1:
            executors = self.chance.choice((world.executors, self.chance.randint(1, 4)))
            self.note("start caller", executors)
            world.seen["rescaled"] += executors != world.executors
            world.deploy(executors, is_split=False)
            self.caller.begin()
        if world.job is not None:
            world.crew.watch(world.job)
        actors: list[Any] = ["caller", "coordinator", *world.all]
        first = self.chance.randrange(len(actors))
        for actor in actors[first:] + actors[:first]:
            if actor == "caller":
                if did := self.caller.move():
                    self.note("caller", did)
                    world.seen[did] += 1
                    return True
                continue
            moves = world.coordinator_moves() if actor == "coordinator" else actor.moves()
            if not moves:
                continue
            kind, what = self.chance.choice(moves)
            if actor == "coordinator":
                self.note("coordinator", kind)
                world.coordinator_move(kind, what)
            else:
                self.note(f"task {actor.task} of {actor.batch}, start {actor.begun}", kind)
                actor.move(kind, what)
            return True
        world.now += TICK
        return False

    def fault(self) -> None:
        world, chance = self.world, self.chance
        for kind, likely in self.faults.items():
            if chance.random() >= likely:
                continue
            visitor = chance.choice(world.all) if world.all else None
            zombies = [v for v in world.all if v not in self.caller.gang]
            if kind == "kill visitor" and visitor is not None:
                visitor.kill()
            elif kind == "cut visitor" and visitor is not None:
                if visitor.link is not None:
                    visitor.link.executor_open = visitor.link.coordinator_open = False
                    visitor.link.down.clear()
            elif kind == "end zombie" and zombies:
                chance.choice(zombies).kill()
            elif kind == "kill caller" and world.job is not None:
                world.kill_coordinator()
            elif kind == "lose state" and world.files:
                host, index = chance.choice(sorted(world.files))
                for each in world.all:
                    if each.host == host:
                        each.kill()
                world.files.pop((host, index), None)
            elif kind == "lose snapshot":
                self.lose_snapshot()
                continue
            elif kind == "probe":
                self.probe()
                continue
            else:
                continue
            self.note(kind)
            world.seen[kind] += 1

    def probe(self) -> None:
        """A caller with another history is refused."""
        world, caller = self.world, self.caller
        if world.job is None or world.effects or not caller.is_planned:
            return
        last = world.job.last
        if last < 0 or world.job.phase.value == "ended":
            return
        (ranges, is_last), number = caller.offsets[caller.number], caller.number
        wrong = {tp: Range(r.start + 1, r.end + 1) for tp, r in ranges.items()}
        world.probe(caller.plan_of(number, wrong, is_last))
        world.probe(caller.plan_of(number + 2, ranges, is_last))
        if number > 0 and last == number:
            world.probe(caller.plan_of(number - 1, caller.offsets[number - 1][0], False))
        world.seen["probes"] += 1

    def heal(self) -> None:
        """Nothing breaks any more.  All windows close, in the last batch."""
        world, caller = self.world, self.caller
        self.faults = {"end zombie": 0.01}
        caller.again = 0.0
        world.now += 200 * TICK
        if not caller.ends_soon:
            for rows in world.rows.values():
                rows.append(Row(world.now, 0, 1))
        caller.ends_soon = True
        batches, steps = caller.number, 0
        while not caller.is_over:
            if caller.number > batches:
                batches, steps = caller.number, 0
            steps += 1
            if steps > HEALING:
                raise Broken(f"it does not heal: no batch after {batches - 1}")
            self.fault()
            self.step()
            if self.chance.random() < 0.01:
                world.check_converges()
        self.check_all()

    def check_all(self) -> None:
        super().check_all()
        given = sum((rows for rows in self.world.taken.values()), Counter())
        if self.world.query.kind in ("tumbling", "session"):
            counted = sum(row[3] * n for row, n in given.items())
            if counted != self.world.model.kept:
                raise Broken(f"windows of {counted} rows, of {self.world.model.kept}")


SEEN: Counter = Counter()


def failing(first: int, schedules: int, step: int = 1) -> tuple[int, Any, str] | None:
    """The first of so many seeds, every `step`-th, that fails, with its run and what broke."""
    for seed in range(first, first + schedules, step):
        run = PlannedRun(seed)
        try:
            run.run()
        except (Broken, KdirectError, AssertionError, KeyError) as broken:
            return seed, run, f"{type(broken).__name__}: {broken}"
        SEEN.update(run.world.seen)
    return None


def main(arguments: list[str]) -> bool:
    """The command line.  It says what has happened, too: what never does is not tested."""
    failed = command_line("tests.state.simulate_planned", failing, arguments, __doc__)
    print(SAYS + json.dumps(SEEN))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
