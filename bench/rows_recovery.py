"""Bench row of the state engine: back to work after every process was killed, and what snapshots
cost.

A job counts records of 16 bytes by key in windows that stay open, until it has ten million keys,
and stops with a snapshot.  It is started again and takes three more batches: the live rate.  Then
every process of it gets signal 9, and its mapped state is deleted, as if the host had restarted.
The next start loads the snapshot and runs the three batches again.

Executors write down when they begin to read snapshots, read records and end batches, live and in
the recovery alike; these times, of one clock for all processes, are what is measured.  They write
down the CPU time that they have used by then, too: each figure comes by the clock on the wall, and
by the CPU seconds of all executors.  All of it is done at least three times, each with a broker and
a job of its own; figures are medians, with the quartiles and extremes of the rounds.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows_slash import cpu_seconds
from sides import Figure, figure, spread_of

import kdirect
import kdirect.state
import kdirect.workloads
from kdirect.state import snapshots
from kdirect.state.batch_run import Observer, Step
from kdirect.state.executor import Executor, main
from kdirect.state.launcher import LocalLauncher
from kdirect.state.plan import plan_from_json

EXECUTORS = 2
PARTITIONS = 4
PAIRS = 3  # of batches without and with a snapshot, in turns
BATCHES = 3  # live, and again in the recovery
ROUNDS = 3  # at least
ROUND_S = 30  # that one takes, roughly
NEVER_MS = 1 << 40
INTERVAL_S = 30.0  # between two snapshots, by default


@dataclass(frozen=True)
class Took:
    """Seconds by the clock on the wall, and CPU seconds of all executors."""

    wall_s: float
    cpu_s: float


class Diary(Observer):
    """Appends the times of steps to a file: (step, process, seconds, CPU seconds)."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - for the life of the process
        self._last: tuple[str, int] | None = None

    def write(self, step: str) -> None:
        now = [step, os.getpid(), time.monotonic(), time.process_time()]
        print(json.dumps(now), file=self._file)

    def at(self, step: Step, batch: int) -> None:
        if step in (Step.READ, Step.OUTPUT) and (step.value, batch) != self._last:
            self._last = (step.value, batch)
            self.write(step.value)


def executor(path: str) -> int:
    """Be an executor that keeps a diary."""
    diary = Diary(path)
    plain = Executor._restore

    def noted(self: Executor, order: Any) -> None:
        diary.write("load")
        plain(self, order)
        diary.write("loaded")

    Executor._restore = noted  # type: ignore[method-assign]
    return main(diary)


def spans(path: Path) -> dict[str, Took]:
    """What loading and running batches took, from the first process that begins to the last one
    that ends; empties the diary."""
    found: dict[str, list[tuple[float, int, float]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        step, process, when, cpu = json.loads(line)
        found[step].append((when, process, cpu))
    path.write_text("")
    result = {"run": _took(found["read"], found["output"])}
    if "load" in found:
        result["load"] = _took(found["load"], found["loaded"])
    return result


def _took(begins: list[tuple[float, int, float]], ends: list[tuple[float, int, float]]) -> Took:
    first = {process: cpu for _, process, cpu in sorted(begins, reverse=True)}
    last = {process: cpu for _, process, cpu in sorted(ends)}
    return Took(max(ends)[0] - min(begins)[0], sum(last[p] - first[p] for p in first))


def start(bootstrap: str, plan: Any, directory: Path, diary: Path, **options: Any) -> Any:
    command = (sys.executable, __file__, "executor", str(diary))
    return kdirect.state.run(
        plan,
        bootstrap,
        executors=EXECUTORS,
        directory=directory,
        launcher=LocalLauncher(command),
        **{"snapshot_interval": NEVER_MS, **options},
    )


def run_and_wait(given: dict[str, Any]) -> None:
    """Take the live batches, tell who works for this job, and wait to be killed."""
    plan = plan_from_json(given["plan"])
    with start(
        given["bootstrap"], plan, Path(given["directory"]), Path(given["diary"]),
        batch_records=given["records"],
    ) as job:  # fmt: skip
        for _ in range(BATCHES):
            next(job)
        pids = [process.pid for process in job.processes.values()]
        print(json.dumps({"pids": pids, "memory": str(job.memory)}), flush=True)
        signal.pause()


def killed_job(bootstrap: str, plan: Any, directory: Path, diary: Path, records: int) -> None:
    """Run the live batches in a process of its own, kill all, and delete the mapped state."""
    given = {
        "bootstrap": bootstrap, "plan": plan.to_json(), "directory": str(directory),
        "diary": str(diary), "records": records,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, __file__, "job", json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    for pid in (process.pid, *told["pids"]):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    shutil.rmtree(told["memory"])


def plain_read(directory: Path) -> tuple[int, Took, Took]:
    """Bytes of the newest snapshot, and what it takes to read them: into one buffer again and
    again, which the caches hold, and into memory that a process has not touched yet, as state needs
    it."""
    root = directory / "snapshots"
    newest = snapshots.snapshot_directory(root, snapshots.batches_of(root)[0])
    paths = [path for path in newest.iterdir() if path.name != snapshots.MANIFEST]
    buffer = memoryview(bytearray(4 << 20))

    def warm() -> None:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def fresh() -> None:
        for path in paths:
            with (
                mmap.mmap(-1, path.stat().st_size) as memory,
                open(path, "rb", buffering=0) as file,
            ):
                file.readinto(memory)

    found: dict[Any, list[Took]] = {warm: [], fresh: []}
    for _ in range(4):
        for read, took in found.items():
            began, cpu = time.monotonic(), time.process_time()
            read()
            took.append(Took(time.monotonic() - began, time.process_time() - cpu))
    median = statistics.median
    middle = [
        Took(median(t.wall_s for t in took[1:]), median(t.cpu_s for t in took[1:]))
        for took in found.values()
    ]
    return sum(path.stat().st_size for path in paths), middle[0], middle[1]


class Writer:
    """Writes the next records of a stream."""

    def __init__(self, session: Any, stream: Any) -> None:
        self._session, self._stream, self._next = session, stream, 0

    def more(self, count: int) -> None:
        kdirect.workloads.write(
            self._session,
            self._stream,
            "recovery",
            records=count,
            first=self._next,
            partitions=PARTITIONS,
        )
        self._next += count


class Rates:
    """By what was measured: (by the clock, by CPU time) of each round."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, name: str, amount: float, took: Took) -> None:
        self._found[name].append((amount / took.wall_s, amount / took.cpu_s))

    def figures(self, row: str, ours: str, unit: str, theirs: str, against: str,
                settings: dict[str, Any]) -> list[Figure]:  # fmt: skip
        """The medians of both, by the clock and by CPU time."""
        out = []
        for which, per in enumerate(("s", "CPU s")):
            mine, others = ([rate[which] for rate in self._found[n]] for n in (ours, theirs))
            median = statistics.median
            out.append(figure(row, median(mine), unit.format(per=per), against, median(others),
                              **settings, **spread_of(mine, others)))  # fmt: skip
        return out


def one_round(records: int, keys: int, rates: Rates) -> int:
    """Fill, kill, recover, and take batches with and without snapshots; bytes of the snapshot."""
    with (
        kdirect.Broker() as broker,
        kdirect.connect(broker.bootstrap_servers) as session,
        tempfile.TemporaryDirectory(prefix="kdirect-recovery") as name,
    ):
        address = broker.bootstrap_servers
        directory, diary = Path(name) / "job", Path(name) / "diary"
        workload = kdirect.workloads.ro(keys=keys, window="10 days", step_us=1)
        (stream,) = workload.streams.values()
        plan = workload.plan("recovery")

        write = Writer(session, stream)
        write.more(records)
        with start(address, plan, directory, diary, until="latest") as job:
            list(job)
        spans(diary)
        size, warm, fresh = plain_read(directory)
        write.more(BATCHES * records)
        killed_job(address, plan, directory, diary, records)
        live = spans(diary)["run"]
        with start(address, plan, directory, diary, batch_records=records) as job:
            next(job)  # the last batch, which was not committed
            recovery = spans(diary)
        for what, took in (("load", recovery["load"]), ("warm", warm), ("fresh", fresh)):
            rates.add(what, size / (1 << 30), took)
        rates.add("replay", BATCHES * records / 1e6, recovery["run"])
        rates.add("live", BATCHES * records / 1e6, live)

        write.more(2 * PAIRS * records)
        took: dict[float, list[Took]] = {NEVER_MS: [], 0: []}
        for interval in (NEVER_MS, 0) * PAIRS:
            with start(
                address, plan, directory, diary, snapshot_interval=interval,
                batch_records=records,
            ) as job:  # fmt: skip
                next(job)
                pids = [process.pid for process in job.processes.values()]
                began, cpu = time.monotonic(), cpu_seconds(pids)
                next(job)  # commits, takes the snapshot if one is due, and runs a batch
                took[interval].append(Took(time.monotonic() - began, cpu_seconds(pids) - cpu))
        plain, taking = (
            Took(statistics.median(t.wall_s for t in ts), statistics.median(t.cpu_s for t in ts))
            for ts in (took[NEVER_MS], took[0])
        )
        rates.add("without", records / 1e6, plain)
        # So many batches as take the interval, and then what a snapshot takes more than a batch.
        batches = INTERVAL_S / plain.wall_s
        rates.add("with", batches * records / 1e6, Took(
            INTERVAL_S + max(0.0, taking.wall_s - plain.wall_s),
            batches * plain.cpu_s + max(0.0, taking.cpu_s - plain.cpu_s),
        ))  # fmt: skip
        return size


def slash_recovery(seconds: float, quick: bool) -> list[Figure]:
    """Loading the snapshot against reading its files; replaying against the live rate; batches with
    a snapshot each 30 s against batches without."""
    records = 140_000 if quick else 14_000_000  # of twice as many keys and a half: half of them
    keys = records * 10 // 7
    rates = Rates()
    rounds = 1 if quick else max(ROUNDS, int(seconds / ROUND_S))
    size = [one_round(records, keys, rates) for _ in range(rounds)][-1]
    settings = {"keys": keys // 2, "executors": EXECUTORS, "snapshot_bytes": size}
    row = "slash-recovery"
    return [
        *rates.figures(row, "load", "GiB/{per} loaded", "warm", "plain read", settings),
        *rates.figures(f"{row}.fresh", "load", "GiB/{per} loaded", "fresh",
                       "plain read into fresh memory", settings),
        *rates.figures(row, "replay", "M records/{per} replayed", "live", "live", settings),
        *rates.figures(row, "with", "M records/{per}, a snapshot each 30 s", "without",
                       "no snapshots", settings),
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "executor":
        sys.exit(executor(sys.argv[2]))
    run_and_wait(json.loads(sys.argv[2]))
