"""Bench rows of the state engine: whole jobs over topics, beside the same executors that read and
decode the topic and drop what they read, and beside the baseline that partitions rows.

Each job takes its topic in three batches.  The first one warms it up; the other two are measured,
from the request for them until their output is here, and so is the executors' CPU time.  Rates are
of records in the topic.  All modes run in turn, round after round; figures are medians.

A batch has 12 M records, if memory allows, since what a batch costs whatever its size is a fifth of
one of 4 M.  At 1,000 keys, where that matters most, both sizes are measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sides import Figure, figure, spread_of

import kdirect
import kdirect.state
import kdirect.workloads
from kdirect.client.session import Session
from kdirect.model import TopicPartition
from kdirect.state.plan import AggregatePlan, plan_from_json
from kdirect.state.source import TopicSource

EXECUTORS = 2
PARTITIONS = 4
MODES = (("slash", "colocated"), ("uppar", "colocated"), ("uppar", "split"))
KEYS = (1_000, 100_000, 10_000_000)
ZIPF = (0.2, 0.6, 1.0, 1.4, 2.0)
DROP = "read and dropped"
BATCHES = 3
RECORDS, FEWER_RECORDS, QUICK_RECORDS = 12_000_000, 4_000_000, 50_000
RECORD_BYTES = 96  # at most, of YSB in the log
STATE_BYTES = 2 << 30  # at most, of both executors: 10 M keys, and fragments
ROUND_S = 12  # that a round of one setting takes, roughly


def cpu_seconds(pids: list[int]) -> float:
    """What the threads of processes have used, in nanoseconds where the kernel says so: the ticks
    of /proc/PID/stat are too coarse for a batch."""
    used = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used += int((thread / "schedstat").read_text().split()[0])
    return used / 1e9


def timed_job(
    bootstrap: str, plan: AggregatePlan, records: int, mode: str, layout: str
) -> tuple[float, float]:
    """Seconds, and CPU seconds of the executors, for the second and third of three batches."""
    with kdirect.state.run(
        plan,
        bootstrap,
        executors=EXECUTORS,
        mode=mode,
        layout=layout,
        until="latest",
        batch_records=records,
        snapshot_interval=3_600_000,
    ) as job:
        next(job)
        pids = [process.pid for process in job.processes.values()]
        before, began = cpu_seconds(pids), time.monotonic()
        next(job)
        next(job)
        return time.monotonic() - began, cpu_seconds(pids) - before


class Dropper:
    """A process that reads and decodes the partitions of one executor, and drops the rows."""

    def __init__(self, bootstrap: str, plan: AggregatePlan, executor: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, bootstrap, json.dumps(plan.to_json()), str(executor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, first: int, end: int) -> None:
        assert self.process.stdin is not None
        print(first, end, file=self.process.stdin, flush=True)

    def finish(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError("the process that reads and drops ended")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def drop(bootstrap: str, plan: AggregatePlan, executor: int) -> None:
    """Serve a Dropper: ranges of offsets from standard input, of all partitions of this one."""
    (given,) = plan.inputs
    with kdirect.connect(bootstrap) as session:
        for line in sys.stdin:
            first, end = map(int, line.split())
            for partition in range(executor, PARTITIONS, EXECUTORS):
                tp = TopicPartition(given.topic, partition)
                with TopicSource.of_plan(
                    session, plan, 0, tp, first, end, now_us=time.time_ns() // 1000
                ) as source:
                    for _ in source.blocks():
                        pass
            print("done", flush=True)


def timed_drop(bootstrap: str, plan: AggregatePlan, records: int) -> tuple[float, float]:
    """As `timed_job`, of processes that only read and decode."""
    droppers = [Dropper(bootstrap, plan, i) for i in range(EXECUTORS)]
    try:
        each = records // PARTITIONS
        for dropper in droppers:
            dropper.start(0, each)
        for dropper in droppers:
            dropper.finish()
        pids = [dropper.process.pid for dropper in droppers]
        before, began = cpu_seconds(pids), time.monotonic()
        for batch in (1, 2):
            for dropper in droppers:
                dropper.start(batch * each, (batch + 1) * each)
            for dropper in droppers:
                dropper.finish()
        return time.monotonic() - began, cpu_seconds(pids) - before
    finally:
        for dropper in droppers:
            dropper.close()


def write(session: Session, topic: str, records: int, **keys: Any) -> AggregatePlan:
    """`BATCHES` batches of `records` of YSB in a topic; the plan over it."""
    workload = kdirect.workloads.ysb(**keys)
    (stream,) = workload.streams.values()
    kdirect.workloads.write(
        session, stream, topic, records=BATCHES * records, partitions=PARTITIONS
    )
    return workload.plan(topic)


def measured(
    bootstrap: str, plan: AggregatePlan, records: int, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """By mode: records a second, and a CPU second, of each round."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(rounds):
        timed = {DROP: timed_drop(bootstrap, plan, records)}
        for mode, layout in MODES:
            name = mode if mode == "slash" else f"{mode} {layout}"
            timed[name] = timed_job(bootstrap, plan, records, mode, layout)
        for name, (seconds, cpu) in timed.items():
            rates, per_cpu = found.setdefault(name, ([], []))
            rates.append(2 * records / seconds)
            per_cpu.append(2 * records / cpu)
    return found


def compared(
    row: str, found: dict[str, tuple[list[float], list[float]]], **settings: Any
) -> list[Figure]:
    """Slash against each of the others, by time and by CPU time."""
    figures = []
    for which, unit in enumerate(("M records/s", "M records/CPU s")):
        slash = [rate / 1e6 for rate in found["slash"][which]]
        for name in found:
            if name == "slash":
                continue
            others = [rate / 1e6 for rate in found[name][which]]
            figures.append(
                figure(
                    row,
                    statistics.median(slash),
                    unit,
                    name,
                    statistics.median(others),
                    **settings,
                    executors=EXECUTORS,
                    **spread_of(slash, others),
                )
            )
    return figures


def free_bytes() -> int:
    """What a topic on tmpfs and mapped state may take: memory that is free or can be, and what
    tmpfs admits of it."""
    known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    tmpfs = os.statvfs("/dev/shm")
    return min(int(known["MemAvailable"].split()[0]) << 10, tmpfs.f_bavail * tmpfs.f_frsize)


def batch_size(free: int) -> int:
    """Records of a batch: the most for which topic and state take half of what is free, as others
    work here too."""
    fits = (free // 2 - STATE_BYTES) // (BATCHES * RECORD_BYTES)
    return RECORDS if fits >= RECORDS else FEWER_RECORDS


def measured_settings(
    row: str, seconds: float, quick: bool, settings: list[tuple[int, dict[str, Any]]]
) -> list[Figure]:
    """`row` for each of the settings: the records of a batch, and the keys of its workload."""
    rounds = 1 if quick else max(3, int(seconds / len(settings) / ROUND_S))
    figures = []
    with kdirect.Broker() as broker, kdirect.connect(broker.bootstrap_servers) as session:
        for number, (records, keys) in enumerate(settings[:1] if quick else settings):
            topic = f"ysb-{number}"
            records = QUICK_RECORDS if quick else records
            plan = write(session, topic, records, **keys)
            found = measured(broker.bootstrap_servers, plan, records, rounds)
            said = {"z": keys["zipf"]} if "zipf" in keys else keys
            figures += compared(row, found, batch_records=records, **said)
            session.admin.delete_topic(topic)
    return figures


def slash_engine(seconds: float, quick: bool) -> list[Figure]:
    """YSB by number of keys."""
    records = batch_size(free_bytes())
    settings = [(records, {"keys": keys}) for keys in KEYS]
    if records != FEWER_RECORDS:
        settings.append((FEWER_RECORDS, {"keys": KEYS[0]}))
    return measured_settings("slash-engine", seconds, quick, settings)


def slash_skew(seconds: float, quick: bool) -> list[Figure]:
    """YSB by the exponent of a Zipf distribution of its keys, as figure 10d of the paper."""
    records = batch_size(free_bytes())
    settings = [(records, {"keys": 10_000_000, "zipf": z}) for z in ZIPF]
    return measured_settings("slash-skew", seconds, quick, settings)


if __name__ == "__main__":
    server, text, number = sys.argv[1:]
    drop(server, plan_from_json(json.loads(text)), int(number))  # type: ignore[arg-type]
