"""Accelerated queries killed with signal 9 at a point that a seed draws, beside Spark's batch SQL.

A seed draws a workload, settings, one or several kills, whether the topic grows while the query
runs, and whether a Parquet directory or a Delta table is written.  The query runs in a process of
its own, the driver (slash_kill_driver.py).  Victims are the Python worker of a task, the planner's
process, the driver (its Python and the JVM), and the broker; they die at a step of an executor
(slash_kill_daemon.py), or a drawn time after a file of the checkpoint, the sink or the state has
come, which is between steps: while Spark commits.  What died is started again, and the query too if
it ended, with or without the state in memory; a query whose worker died may not end.  At the end
the sink must have exactly the closed windows.

    python -m tests.spark.slash_kills --first 0 --count 300
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kdirect import workloads
from kdirect.workloads.workload import Workload
from tests.spark import slash_runs
from tests.spark.slash_kill_daemon import KILLS, kill_all
from tests.support import BrokerProcess, jars_module

HERE = Path(__file__).resolve().parent
ANSWER = "answer: "
PIDS = "pids.json"
LIMIT_S = 90
STRANGE_ENDS = 3  # ends of a query for which a kill may be the reason
EVENTS = 12_000
# Workload; events; settings of the query; records a micro-batch and input, for five or so.
WORKLOADS: Mapping[str, tuple[Workload, int, Mapping[str, str], int]] = {
    "ysb": (
        workloads.ysb(keys=100, step_us=300_000, disorder_us=5_000_000),
        EVENTS,
        {"delay": "30 seconds"},
        2400,
    ),
    "nb7": (workloads.nexmark(step_us=60_000), EVENTS, {}, 2400),
    "nb8": (workloads.nexmark(step_us=60_000, paper=True), EVENTS, {"window": "2 minutes"}, 0),
    "nb11": (workloads.nexmark(step_us=20_000), EVENTS, {"gap": "10 seconds"}, 2400),
    "cm": (workloads.cm(jobs=200, step_us=3_000), EVENTS, {}, 2400),
    "ro_window": (workloads.ro(keys=1_000, step_us=400_000), EVENTS, {}, 2400),
}
STEPS = (
    "arrive",
    "read",
    "delta",
    "merge",
    "trigger",
    "output",
    "snapshot",
    "part",
    "handed",
    "row",
)
MANY = ("read", "delta", "merge")  # of which a batch has several
# Files whose coming is a moment between steps; {} is a number of a batch.
MOMENTS = (
    "checkpoint/offsets/{}",
    "checkpoint/commits/{}",
    "rows/_spark_metadata/{}",
    "state/snapshots/{:020}",
)
OF_SNAPSHOTS = ("snapshot", "part", MOMENTS[-1])
PARQUET, DELTA = "parquet", "delta"
# What comes in a Delta table when a batch is committed to it, in place of Parquet's file.
IN_DELTA = {"rows/_spark_metadata/{}": "rows/_delta_log/{:020}.json"}
VICTIMS = ("worker",) * 4 + ("planner",) * 2 + ("driver",) * 2 + ("broker",) * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """`victim` dies when an executor comes to `at`, a step, or `after_s` after the file `at`."""

    victim: str
    at: str
    batch: int
    number: int = 1
    after_s: float = 0.0

    @property
    def is_moment(self) -> bool:
        return "/" in self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a seed draws."""

    query: str
    kills: tuple[Kill, ...]
    accelerate: Mapping[str, Any]
    then: Mapping[str, Any] = field(default_factory=dict)  # other arguments, once it was killed
    forgets: bool = False  # is the state in memory removed whenever the query has ended?
    grows: bool = False
    sink: str = PARQUET


def drawn(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(f"slash kills {seed}")
    first = chance.choice(VICTIMS)
    forgets = first in ("driver", "planner") and chance.random() < 0.4
    kills = [_kill(chance, first)]
    if chance.random() < 0.3:
        kills.append(_kill(chance, chance.choice(VICTIMS), kills[0].batch))
    if chance.random() < 0.3:
        # State is rebuilt after most of the kills; there too somebody dies.
        kills.append(Kill(victim=first, at="restore", batch=0))
    grows = chance.random() < 0.2 and all(kill.victim != "broker" for kill in kills)
    snapshots = any(kill.at in OF_SNAPSHOTS for kill in kills)
    accelerate: dict[str, Any] = {
        "mode": chance.choice(("slash", "slash", "uppar")),
        "executors": chance.choice((2, 2, 2, 1)),
        "snapshotInterval": "0s" if snapshots else chance.choice(("0s", "0s", "1s", "1h")),
        "epochBytes": 30_000,
        "options": {
            "block_rows": 200,
            "slot_bytes": 4096,
            "exchange": chance.choice(("rdma", "rdma", "tcp")),
        },
    }
    then = dict(accelerate)
    if chance.random() < 0.3:
        then["executors"] = 3 - accelerate["executors"]
    query = chance.choice(sorted(WORKLOADS))
    sink = DELTA if chance.random() < 1 / 3 else PARQUET
    if sink == DELTA:
        kills = [replace(kill, at=IN_DELTA.get(kill.at, kill.at)) for kill in kills]
    return Scenario(
        query=query,
        kills=tuple(kills),
        accelerate=accelerate,
        then=then,
        forgets=forgets,
        grows=grows,
        sink=sink,
    )


def _kill(chance: random.Random, victim: str, least: int = 0) -> Kill:
    batch = chance.randint(least, 4)
    if victim != "worker" and chance.random() < 0.4:
        return Kill(
            victim=victim,
            at=chance.choice(MOMENTS),
            batch=batch,
            after_s=chance.choice((0.0, chance.random() * 0.05, chance.random() * 0.5)),
        )
    at = chance.choice(STEPS)
    return Kill(victim=victim, at=at, batch=batch, number=chance.randint(1, 3) if at in MANY else 1)


def mapped_of(state: Path) -> list[Path]:
    """The directories in memory of the job whose directory this is."""
    found = []
    for path in Path("/dev/shm").glob(f"kdirect-state-{os.getuid()}-*"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads((path / "job.json").read_text())["directory"] == str(state.resolve()):
                found.append(path)
    return found


class Driver:
    """A program that answers lines of JSON, as slash_kill_driver.py; it starts again after it was
    killed.  With `jars` its session knows Delta.  Its Python processes find what is in `site`."""

    def __init__(
        self,
        kills: Path,
        jars: Sequence[Path] = (),
        program: str = "slash_kill_driver.py",
        site: str = "",
    ) -> None:
        self.kills = kills
        self._program = program
        self._site = HERE / site
        self.jars = [str(jar) for jar in jars]
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self.starts = 0

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self.starts += 1
            self._read = b""
            with open(self.kills / "driver.err", "ab") as errors:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        str(HERE / self._program),
                        str(self.kills),
                        *self.jars,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={
                        **os.environ,
                        KILLS: str(self.kills),
                        "PYTHONPATH": str(self._site),
                        "SPARK_LOCAL_IP": "127.0.0.1",
                        "PYSPARK_PYTHON": sys.executable,
                    },
                )
        return self._process

    def errors(self) -> str:
        """What it wrote to standard error."""
        return (self.kills / "driver.err").read_text(errors="replace")

    def send(self, **given: Any) -> None:
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """The next answer; None if it has not come.  EOFError when the driver has ended."""
        process = self._running()
        assert process.stdout is not None
        if select.select([process.stdout], [], [], within_s)[0]:
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                self.end()
                raise EOFError
            self._read += data
        while b"\n" in self._read:
            line, _, self._read = self._read.partition(b"\n")
            if line.startswith(ANSWER.encode()):
                return dict(json.loads(line[len(ANSWER) :]))
        return None

    def ask(self, **given: Any) -> dict[str, Any]:
        self.send(**given)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if (found := self.answer(1.0)) is not None:
                return found
        raise AssertionError(f"no answer to {given} within {LIMIT_S} s")

    def end(self) -> None:
        """Kill what is left of it."""
        process, self._process = self._process, None
        if process is None:
            return
        pids = self.kills / PIDS
        if pids.exists():
            kill_all({"pids": json.loads(pids.read_text())[1:], "lock": ""})
            pids.unlink()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with open(os.devnull, "wb"):
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


class Trials:
    """A broker, a driver, and the topics that all scenarios share; `run` runs one.  `jars`: those
    of Delta, where a scenario may write to it."""

    def __init__(self, root: Path, jars: Sequence[Path]) -> None:
        self._root = root
        self.broker = BrokerProcess(root / "broker-log").start()
        kills = root / "kills"
        kills.mkdir()
        self.driver = Driver(kills, jars)
        self._topics: dict[str, slash_runs.Topic] = {}
        self._expected: dict[str, Counter[Any]] = {}
        self._watermarks: dict[str, str] = {}  # of the shared topics
        self.ran = 0
        self.killed = 0

    def close(self) -> None:
        self.driver.end()
        if self.broker.process is not None:
            self.broker.stop()

    # -- topics ------------------------------------------------------------------------------------

    def _write(self, query: str, first: int, events: int, topics: Any = None) -> slash_runs.Topic:
        workload, _, settings, _ = WORKLOADS[query]
        return slash_runs.write(
            self.broker.bootstrap_servers, workload, query, events, first=first, topics=topics,
            **settings,
        )  # fmt: skip

    def _shared(self, query: str) -> slash_runs.Topic:
        if query not in self._topics:
            self._topics[query] = self._write(query, 0, WORKLOADS[query][1])
        return self._topics[query]

    def expected(self, query: str) -> Counter[Any]:
        """All windows of a workload, by Spark's batch SQL."""
        if query not in self._expected:
            topic = self._shared(query)
            self._expected[query] = self._rows("expect", **self._of(topic))
        return self._expected[query]

    def _rows(self, do: str, **given: Any) -> Counter[Any]:
        path = self._root / "rows.pickle"
        self.driver.ask(do=do, to=str(path), **given)
        found: Counter[Any] = pickle.loads(path.read_bytes())
        return found

    @staticmethod
    def _of(topic: slash_runs.Topic) -> dict[str, Any]:
        return {"query": topic.query, "topics": dict(topic.topics), "servers": topic.servers}

    # -- one scenario ------------------------------------------------------------------------------

    def run(self, scenario: Scenario) -> int:
        """Run a scenario to its end.  How many of its kills came about?  AssertionError if rows
        are missing, too many or wrong, or if the query ended for another reason than a kill."""
        expected = self.expected(scenario.query)
        trial = _Trial(self, scenario, self._root / f"trial-{self.ran}")
        self.ran += 1
        try:
            watermark = trial.run_to_its_end()
            if watermark is None:
                watermark = self._watermarks.get(scenario.query) or self._clean(scenario.query)
            elif not scenario.grows:
                known = self._watermarks.setdefault(scenario.query, watermark)
                assert known == watermark, f"the watermark is {watermark}, and was {known} before"
            found = self._rows("written", directory=str(trial.directory), sink=scenario.sink)
            wanted = slash_runs.closed(
                expected,
                datetime.fromisoformat(watermark).replace(tzinfo=None),
                strictly=scenario.query == "nb11",
            )
            assert len(wanted) > 50
            slash_runs.assert_same(found, wanted)
            self.killed += trial.fired
            return trial.fired
        finally:
            trial.disarm()

    def _clean(self, query: str) -> str:
        """The watermark after all records, of a run in which nobody dies."""
        directory = self._root / f"clean-{query}"
        scenario = Scenario(query=query, kills=(), accelerate={})
        watermark = _Trial(self, scenario, directory).run_to_its_end()
        assert watermark is not None
        self._watermarks[query] = watermark
        return watermark


class _Trial:
    """One scenario under way."""

    def __init__(self, trials: Trials, scenario: Scenario, directory: Path) -> None:
        self._trials = trials
        self._scenario = scenario
        self.directory = directory
        self._ends: list[str] = []  # why the query ended before its end
        self._moments = [(i, kill) for i, kill in enumerate(scenario.kills) if kill.is_moment]
        self._due: tuple[float, Kill] | None = None
        self._grown = directory / "grown"
        self.fired = 0
        self._watermark: str | None = None

    # -- who dies ----------------------------------------------------------------------------------

    def _victim(self, victim: str) -> dict[str, Any]:
        pids: list[Any] = []
        lock = ""
        if victim == "worker":
            pids = ["worker"]
        elif victim == "planner":
            lock = str(self.directory / "state" / "lock")
        elif victim == "broker":
            pids = [self._trials.broker.pid]
        return {"pids": pids, "lock": lock}

    def _arm(self) -> None:
        """Write the kills at steps that have not come about.  The driver's pids, and the broker's,
        are known once they run."""
        kills = self._trials.driver.kills
        for i, kill in enumerate(self._scenario.kills):
            if kill.is_moment or (kills / f"fired-{i}.json").exists():
                continue
            said = {"at": kill.at, "batch": kill.batch, "number": kill.number}
            said |= self._victim(kill.victim)
            if kill.victim == "driver":
                said["pids"] = json.loads((kills / PIDS).read_text())
            new = kills / f"{i}.new"
            new.write_text(json.dumps(said))
            new.rename(kills / f"armed-{i}.json")

    def disarm(self) -> None:
        for path in self._trials.driver.kills.glob("*-*.json"):
            path.unlink()

    def _watch_moments(self) -> None:
        if self._due is None and self._moments:
            kill = self._moments[0][1]
            files = [self.directory / kill.at.format(n) for n in range(kill.batch, kill.batch + 9)]
            if any(path.exists() for path in files):
                self._moments.pop(0)
                self._due = (time.monotonic() + kill.after_s, kill)
        if self._due is not None and time.monotonic() >= self._due[0]:
            kill = self._due[1]
            if kill.victim == "planner" and not (self.directory / "state/lock").exists():
                return  # the offsets of the first batch are there before the planner's lock is
            self._due = None
            if kill.victim == "driver":
                pids = self._trials.driver.kills / PIDS
                if pids.exists():
                    kill_all({"pids": json.loads(pids.read_text()), "lock": ""})
            else:
                kill_all(self._victim(kill.victim))
            self.fired += 1

    def _mend(self) -> None:
        """Start a broker that died; let a topic grow."""
        broker = self._trials.broker
        if broker.process is not None and broker.process.poll() is not None:
            broker.kill()
            broker.start()
        has_begun = (self.directory / "checkpoint/commits/1").exists()
        if self._scenario.grows and has_begun and not self._grown.exists():
            self._trials._write(self._topic.query, EVENTS // 2, EVENTS // 2, self._topic.topics)
            self._grown.touch()

    def _forget(self) -> None:
        """Remove the state in memory."""
        for path in mapped_of(self.directory / "state"):
            shutil.rmtree(path, ignore_errors=True)

    # -- runs --------------------------------------------------------------------------------------

    def run_to_its_end(self) -> str | None:
        """The watermark after the last batch, if a batch of the last run said so."""
        scenario, trials = self._scenario, self._trials
        self.disarm()
        self.directory.mkdir()
        if scenario.grows:
            self._topic = trials._write(scenario.query, 0, EVENTS // 2)
        else:
            self._topic = trials._shared(scenario.query)
        limit = WORKLOADS[scenario.query][3] or 150
        while True:
            answer = self._attempt(
                do="run",
                directory=str(self.directory),
                sink=scenario.sink,
                source={"maxOffsetsPerTrigger": str(limit)},
                accelerate=dict(scenario.then if self._ends else scenario.accelerate),
                grown=str(self._grown) if scenario.grows else "",
                **trials._of(self._topic),
            )
            if answer is not None and answer["error"] is None:
                break
            self._ends.append("the driver died" if answer is None else answer["error"])
            self._check_ends()
            if scenario.forgets:
                self._forget()
        kills = trials.driver.kills
        self.fired += len(list(kills.glob("fired-*.json")))
        assert answer["late"] == 0
        return answer["watermark"]

    def _check_ends(self) -> None:
        """May the query have ended?  A worker's death is none of a query's."""
        fatal = [kill for kill in self._scenario.kills if kill.victim != "worker"]
        most = len(fatal) + sum(STRANGE_ENDS for kill in fatal if kill.victim == "broker")
        if len(self._ends) > most:
            raise AssertionError(
                f"{len(fatal)} kills for which the query may end; it ended {len(self._ends)} times:"
                + "".join(f"\n--- {why[:3000]}" for why in self._ends)
            )

    def _attempt(self, **given: Any) -> dict[str, Any] | None:
        """Run the query once; None when the driver died."""
        driver = self._trials.driver
        driver.send(**given)
        deadline = time.monotonic() + LIMIT_S
        armed = False
        try:
            while time.monotonic() < deadline:
                if not armed and (driver.kills / PIDS).exists():
                    self._arm()
                    armed = True
                self._watch_moments()
                self._mend()
                if (answer := driver.answer(0.002)) is not None:
                    return answer
        except (EOFError, BrokenPipeError):
            self._mend()
            return None
        raise AssertionError(f"the query did not end within {LIMIT_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--keep-going", action="store_true")
    given = parser.parse_args()
    failed, fired, begun = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slash-kills-") as root:
        trials = Trials(Path(root), jars_module().jars("delta"))
        try:
            for seed in range(given.first, given.first + given.count):
                at = time.monotonic()
                scenario = drawn(seed)
                try:
                    came = trials.run(scenario)
                    fired += came
                    print(f"seed {seed}: {came} of {len(scenario.kills)} kills, {scenario.sink},"
                          f" {time.monotonic() - at:.1f} s", flush=True)  # fmt: skip
                    if came < len(scenario.kills):
                        print(f"    not all of {scenario.kills}", flush=True)
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
    print(
        f"{given.count} queries, {fired} kills, {time.monotonic() - begun:.0f} s;"
        f" failed seeds: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
