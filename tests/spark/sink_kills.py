"""Streams into the exactly-once sink, killed with signal 9 at named places that a seed draws.

A query copies a topic, a few records a micro-batch, in a process of its own (sink_kill_driver.py).
A seed draws three kills, one after another: the Python worker of a task or of the commit, the
driver (its Python and the JVM), or the broker; at a named place of the sink (before and after each
task's flush, before and after the commit), at one of the broker's commit (before it is decided,
after that, between markers, after them, when it is complete), or when a file of Spark's checkpoint
has come.  What died is started again, and so is a query that failed.  Ten seeds one after another
have every place at which a worker or the broker may die, and forty those of a driver.

All the time a stock client reads what is committed: it may never see a part of a micro-batch.  At
the end each record is there once, in the order of the micro-batches, and nothing is held back.

    python -m tests.spark.sink_kills --first 0 --count 100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.spark.committed import Committed
from tests.spark.conftest import Topics
from tests.spark.slash_kill_daemon import KILLS, kill_all
from tests.spark.slash_kills import PIDS, Driver
from tests.support import BrokerProcess

ROWS = 4  # of a micro-batch
BATCHES = 8
PARTITIONS = 3
KILLS_OF_A_SEED = 3
TASK_PLACES = (
    "sink, an attempt has joined",
    "sink, records are sent",
    "sink, records are flushed",
)
COMMIT_PLACES = ("sink, before the commit", "sink, after the commit")
BROKER_PLACES = (
    "attempts, to be ended",
    "attempts, prepared",
    "markers, one more",
    "attempts, marked",
    "attempts, complete",
)
MOMENTS = ("offsets", "commits")  # files of Spark's checkpoint
PLACES = {
    "worker": (*TASK_PLACES, *COMMIT_PLACES),
    "broker": (*TASK_PLACES, *COMMIT_PLACES, *BROKER_PLACES, *MOMENTS),
    "driver": (*TASK_PLACES, *COMMIT_PLACES, *BROKER_PLACES, *MOMENTS),
}
SEEDS_OF_A_ROUND = 10
DRIVERS_OF_A_ROUND = 3  # they take longest to come back
SITE = Path(__file__).parent / "sink_kill_site"
MOST_ENDS = 12  # of a query with three kills
VERBOSE = bool(os.environ.get("VERBOSE"))
RUN_S = 240  # for a run of a query, of a driver that has to start too


@dataclass(frozen=True, slots=True)
class Kill:
    """`victim` ("worker", "driver", "broker") dies when somebody comes to `at` for the `number`-th
    time from when the kill before has come about, or `after_s` after the next file `at` of the
    checkpoint has come."""

    victim: str
    at: str
    number: int = 1
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a seed draws.  `tasks` of the first run, and of those after it."""

    kills: tuple[Kill, ...]
    tasks: tuple[int, int]
    transport: str


def drawn(seed: int) -> Scenario:
    """The scenario of a seed."""
    number, at = divmod(seed, SEEDS_OF_A_ROUND)
    chance = random.Random(f"sink kills {number}")
    of_round = _victims_and_places(number, chance)[at::SEEDS_OF_A_ROUND]
    chance = random.Random(f"sink kills {number} {at}")
    kills = tuple(_kill(chance, victim, place) for victim, place in of_round)
    tasks = (chance.choice((1, 2, 3)), chance.choice((1, 2, 3)))
    return Scenario(kills=kills, tasks=tasks, transport=chance.choice(("auto", "auto", "tcp")))


def _victims_and_places(number: int, chance: random.Random) -> list[tuple[str, str]]:
    """Who dies where in the seeds of a round."""
    of = {victim: [(victim, place) for place in PLACES[victim]] for victim in PLACES}
    others, drivers = [*of["worker"], *of["broker"]], of["driver"]
    step = len(drivers) // DRIVERS_OF_A_ROUND
    found = others + [drivers[i] for i in range(len(drivers)) if (i - 2 - number) % step == 0]
    found += chance.sample(others, SEEDS_OF_A_ROUND * KILLS_OF_A_SEED - len(found))
    chance.shuffle(found)
    return found


def _kill(chance: random.Random, victim: str, at: str) -> Kill:
    if at in MOMENTS:
        return Kill(victim, at, after_s=chance.choice((0.0, 0.02, 0.2)))
    is_one_of_a_batch = at in (*COMMIT_PLACES, *BROKER_PLACES) and at != "markers, one more"
    return Kill(victim, at, chance.randint(1, 2 if is_one_of_a_batch else 4))


class Trials:
    """A broker and a driver that all scenarios share; `run` runs one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        kills = root / "kills"
        kills.mkdir()
        watched = {KILLS: str(kills), "PYTHONPATH": str(SITE)}
        self.broker = BrokerProcess(root / "broker-log", environment=watched).start()
        self.driver = Driver(kills, program="sink_kill_driver.py", site=SITE.name)
        self.ran = 0
        self.came: Counter[tuple[str, str]] = Counter()  # kills that came about

    def close(self) -> None:
        self.driver.end()
        if self.broker.process is not None:
            self.broker.stop()

    def run(self, scenario: Scenario) -> int:
        """Run a scenario to its end.  How many of its kills came about?  AssertionError if a record
        is missing, comes twice or too early, or if a part of a micro-batch was seen."""
        trial = _Trial(self, scenario, self.ran)
        self.ran += 1
        try:
            trial.run_to_its_end(self._root / f"checkpoint-{self.ran}")
        finally:
            trial.disarm()
        self.came.update((kill.victim, kill.at) for kill in trial.came)
        return len(trial.came)


def is_whole(values: list[bytes]) -> bool:
    """Are these the records of whole micro-batches, each once?"""
    numbers = [int(value) for value in values]
    batches = Counter(number // ROWS for number in numbers)
    return len(set(numbers)) == len(numbers) and set(batches.values()) <= {ROWS}


class _Trial:
    """One scenario under way."""

    def __init__(self, trials: Trials, scenario: Scenario, number: int) -> None:
        self._trials = trials
        self._scenario = scenario
        self._left = list(scenario.kills)
        self._armed: Kill | None = None
        self._due: float | None = None
        self._files: set[str] = set()  # of the checkpoint, when a kill at its next one was armed
        self._ends: list[str] = []  # why the query ended before its end
        self.came: list[Kill] = []
        self._begun = time.monotonic()
        self._story: list[str] = []  # what happened when, for a run that fails
        self._source, self._target = f"from-{number}", f"to-{number}"
        topics = Topics(trials.broker.bootstrap_servers)
        topics.create_named(self._source, 1)
        topics.create_named(self._target, PARTITIONS)
        values = [b"%d" % i for i in range(ROWS * BATCHES)]
        topics.fill(self._source, values, key=lambda i: b"%d" % i)

    def run_to_its_end(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.disarm()
        seen = Committed(self._trials.broker.bootstrap_servers, self._target, PARTITIONS)
        try:
            try:
                with seen.watched(is_whole):
                    while (error := self._run_once()) is not None:
                        self._ends.append(error)
                        self._tell(f"the query has ended: {error[:300]}")
                        assert len(self._ends) <= MOST_ENDS, "\n--- ".join(self._ends)
                    self._tell("the query has come to its end")
                    self._mend()
            except AssertionError:
                print(*self._story, f"in the end: {seen.read()}", sep="\n", file=sys.stderr)
                raise
            read = seen.read_when_back()
            assert sorted(int(value) for _, _, value in read) == list(range(ROWS * BATCHES))
            for partition in range(PARTITIONS):
                batches = [int(value) // ROWS for p, _, value in read if p == partition]
                assert batches == sorted(batches), f"out of order in {partition}: {batches}"
            assert seen.held_back() == 0
        finally:
            seen.close()

    def _tell(self, what: str) -> None:
        self._story.append(f"{time.monotonic() - self._begun:6.2f} s {what}")
        if VERBOSE:
            print(self._story[-1], flush=True)

    # -- who dies ----------------------------------------------------------------------------------

    def disarm(self) -> None:
        for path in self._trials.driver.kills.glob("*-*.json"):
            path.unlink()

    def _pids(self, kill: Kill) -> list[Any]:
        victim = kill.victim
        if victim == "worker" or (victim == "broker" and kill.at in BROKER_PLACES):
            return ["itself"]
        if victim == "broker":
            return [self._trials.broker.pid]
        return list(json.loads((self._trials.driver.kills / PIDS).read_text()))

    def _arm(self) -> None:
        """Arm the next kill, if the one before has come about."""
        kills = self._trials.driver.kills
        if self._armed is None and self._left and (kills / PIDS).exists():
            kill = self._armed = self._left.pop(0)
            if kill.at in MOMENTS:
                self._files = set(self._moments(kill))
            else:
                said = {"at": kill.at, "pids": self._pids(kill)}
                new = kills / "new"
                new.write_text(json.dumps(said))
                new.rename(kills / f"armed-{len(self.came)}-{kill.number}.json")

    def _moments(self, kill: Kill) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            yield from (name for name in os.listdir(self._checkpoint / kill.at) if name.isdigit())

    def _watch_moments(self) -> None:
        kill = self._armed
        if kill is None or kill.at not in MOMENTS:
            return
        if self._due is None and set(self._moments(kill)) - self._files:
            self._due = time.monotonic() + kill.after_s
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            kill_all({"pids": self._pids(kill), "lock": ""})
            self._happened()

    def _happened(self) -> None:
        assert self._armed is not None
        self.came.append(self._armed)
        self._tell(f"{self._armed} came about")
        self._armed = None

    def _mend(self) -> None:
        """Take note of a kill, and start a broker that died."""
        if self._armed is not None:
            if (self._trials.driver.kills / f"fired-{len(self.came)}.json").exists():
                self._happened()
        broker = self._trials.broker
        if broker.process is not None and broker.process.poll() is not None:
            broker.kill()
            broker.start()
            self._tell("the broker is back")
            # A kill of the broker that is armed is of the one that died.
            self._arm_again()

    def _arm_again(self) -> None:
        kill = self._armed
        if kill is not None and kill.victim == "broker" and kill.at not in MOMENTS:
            for path in self._trials.driver.kills.glob("armed-*.json"):
                path.unlink()
            self._left.insert(0, kill)
            self._armed = None

    # -- runs --------------------------------------------------------------------------------------

    def _run_once(self) -> str | None:
        """Run the query once; why it ended, or None at its end."""
        driver = self._trials.driver
        try:
            driver.send(
                servers=self._trials.broker.bootstrap_servers,
                source=self._source,
                target=self._target,
                checkpoint=str(self._checkpoint),
                rows=ROWS,
                tasks=self._scenario.tasks[bool(self._ends)],
                transport=self._scenario.transport,
            )
            deadline = time.monotonic() + RUN_S
            while time.monotonic() < deadline:
                self._arm()
                self._watch_moments()
                self._mend()
                if (answer := driver.answer(0.01)) is not None:
                    return answer["error"]
        except (EOFError, BrokenPipeError):
            driver.end()
            self._mend()
            if self._armed is not None and self._armed.victim == "driver":
                self._happened()
            return "the driver died"
        raise AssertionError(f"the query did not end within {RUN_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="scenarios of three kills each")
    parser.add_argument("--keep-going", action="store_true")
    given = parser.parse_args()
    failed, fired, begun = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sink-kills-") as root:
        trials = Trials(Path(root))
        try:
            for seed in range(given.first, given.first + given.count):
                at = time.monotonic()
                scenario = drawn(seed)
                try:
                    came = trials.run(scenario)
                    fired += came
                    print(f"seed {seed}: {came} of {len(scenario.kills)} kills,"
                          f" {time.monotonic() - at:.1f} s", flush=True)  # fmt: skip
                except Exception:
                    failed.append(seed)
                    print(f"seed {seed}: {scenario}", file=sys.stderr)
                    traceback.print_exc()
                    print(trials.driver.errors()[-6000:], file=sys.stderr)
                    if not given.keep_going:
                        break
                    trials.driver.end()
        finally:
            trials.close()
    for (victim, at), times in sorted(trials.came.items()):
        print(f"{times:5} {victim} at {at}")
    print(f"{fired} kills, {time.monotonic() - begun:.0f} s; failed seeds: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
