"""Bench row of the state engine: back to work after every process was killed, and what snapshots
cost.

A job counts records of 16 bytes by key in windows that stay open, until it has ten million keys,
and stops with a snapshot.  It is started again and takes three more batches: the live rate.  Then
every process of it gets signal 9, and its mapped state is deleted, as if the host had restarted.
The next start loads the snapshot and runs the three batches again.

Executors write down when they begin to read snapshots, read records and end batches, live and in
the recovery alike; these times, of one clock for all processes, are what is measured.
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
from pathlib import Path
from typing import Any

from sides import Figure, figure

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
NEVER_MS = 1 << 40
INTERVAL_S = 30.0  # between two snapshots, by default


class Diary(Observer):
    """Appends the times of steps to a file: (step, batch, seconds)."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - for the life of the process
        self._last: tuple[str, int] | None = None

    def write(self, step: str, batch: int) -> None:
        print(json.dumps([step, batch, time.monotonic()]), file=self._file)

    def at(self, step: Step, batch: int) -> None:
        if step in (Step.READ, Step.OUTPUT) and (step.value, batch) != self._last:
            self._last = (step.value, batch)
            self.write(step.value, batch)


def executor(path: str) -> int:
    """Be an executor that keeps a diary."""
    diary = Diary(path)
    plain = Executor._restore

    def noted(self: Executor, order: Any) -> None:
        diary.write("load", order.batch)
        plain(self, order)
        diary.write("loaded", order.batch)

    Executor._restore = noted  # type: ignore[method-assign]
    return main(diary)


def spans(path: Path) -> dict[str, float]:
    """Seconds of loading and of running batches, from the first process that begins to the last
    one that ends; empties the diary."""
    found: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        step, _, when = json.loads(line)
        found.setdefault(step, []).append(when)
    path.write_text("")
    result = {"run": max(found["output"]) - min(found["read"])}
    if "load" in found:
        result["load"] = max(found["loaded"]) - min(found["load"])
    return result


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
        pids = [process.pid for process in job.server.processes.values()]
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


def plain_read(directory: Path) -> tuple[int, float, float]:
    """Bytes of the newest snapshot, and seconds to read them: into one buffer again and again,
    which the caches hold, and into memory that a process has not touched yet, as state needs it."""
    root = directory / "snapshots"
    newest = snapshots.snapshot_directory(root, snapshots.batches_of(root)[0])
    paths = [path for path in newest.iterdir() if path.name != snapshots.MANIFEST]
    buffer = memoryview(bytearray(4 << 20))
    warm, fresh = [], []
    for _ in range(4):
        began, size = time.monotonic(), 0
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while read := file.readinto(buffer):
                    size += read
        warm.append(time.monotonic() - began)
        began = time.monotonic()
        for path in paths:
            with (
                mmap.mmap(-1, path.stat().st_size) as memory,
                open(path, "rb", buffering=0) as file,
            ):
                file.readinto(memory)
        fresh.append(time.monotonic() - began)
    return size, statistics.median(warm[1:]), statistics.median(fresh[1:])


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


def slash_recovery(seconds: float, quick: bool) -> list[Figure]:
    """Loading the snapshot against reading its files; replaying against the live rate; a batch with
    a snapshot after it against one without."""
    records = 140_000 if quick else 14_000_000  # of twice as many keys and a half: half of them
    keys = records * 10 // 7
    rounds = 1 if quick else max(1, int(seconds / 15))
    load, plain, fresh, replay, live, with_snapshot, without = [], [], [], [], [], [], []
    size = 0
    for _ in range(rounds):
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
            size, warm_s, fresh_s = plain_read(directory)
            write.more(BATCHES * records)
            killed_job(address, plan, directory, diary, records)
            live_s = spans(diary)["run"]
            with start(address, plan, directory, diary, batch_records=records) as job:
                next(job)  # the last batch, which was not committed
                recovery = spans(diary)
            load.append(size / recovery["load"] / (1 << 30))
            plain.append(size / warm_s / (1 << 30))
            fresh.append(size / fresh_s / (1 << 30))
            replay.append(BATCHES * records / recovery["run"] / 1e6)
            live.append(BATCHES * records / live_s / 1e6)
            write.more(2 * PAIRS * records)
            took: dict[float, list[float]] = {NEVER_MS: [], 0: []}
            for interval in (NEVER_MS, 0) * PAIRS:
                with start(
                    address, plan, directory, diary, snapshot_interval=interval,
                    batch_records=records,
                ) as job:  # fmt: skip
                    next(job)
                    began = time.monotonic()
                    next(job)  # commits, takes the snapshot if one is due, and runs a batch
                    took[interval].append(time.monotonic() - began)
            plainly, taking = (statistics.median(took[interval]) for interval in (NEVER_MS, 0))
            rate = records / plainly / 1e6
            without.append(rate)
            with_snapshot.append(rate * INTERVAL_S / (INTERVAL_S + max(0.0, taking - plainly)))
    settings = {"keys": keys // 2, "executors": EXECUTORS, "snapshot_bytes": size, "rounds": rounds}
    median = statistics.median
    return [
        figure("slash-recovery", median(load), "GiB/s loaded", "plain read", median(plain),
               **settings),
        figure("slash-recovery.fresh", median(load), "GiB/s loaded", "plain read into fresh memory",
               median(fresh), **settings),
        figure("slash-recovery", median(replay), "M records/s replayed", "live", median(live),
               **settings),
        figure("slash-recovery", median(with_snapshot), "M records/s, a snapshot each 30 s",
               "no snapshots", median(without), **settings),
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "executor":
        sys.exit(executor(sys.argv[2]))
    run_and_wait(json.loads(sys.argv[2]))
