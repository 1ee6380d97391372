"""Bench rows of accelerated queries: a DataFrame as Spark runs it, and wrapped by slash.accelerate.

Both run the same DataFrame over the same topic and the same source, which decodes only the columns
that the query needs, with the JVM shim, two tasks, two shuffle partitions, a noop sink, and
checkpoints on tmpfs.  Spark's own plan runs with its state in memory and in RocksDB (with the
changelog that its documentation advises); the faster of the two counts.  The same plan as a job of
the state engine, without Spark, stands beside them.

Each run takes its topic in batches of one size.  The first one warms it up; the others are
measured: by the clock, and by the CPU time of the JVM and all Python processes.  Event time
advances so that windows close in each batch.  All systems run in turn, round after round, in one
session; figures are medians.  A run that takes longer than PATIENCE_S is cut off, its figure is the
most that it can have been, and that system does not run again in the rounds that follow.  What one
system left in the JVM is freed before the next one runs.

Few keys are measured with batches that are as large as memory admits, because the cost of a batch
whatever its size, some 0.1 s, is much of what an accelerated query takes there.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows_direct import _cpu_seconds
from rows_slash import BATCHES, EXECUTORS, PARTITIONS, free_bytes, timed_job
from sides import Figure, figure, spread_of

import kdirect
import kdirect.state
import kdirect.workloads
from kdirect_spark import session_builder, slash
from kdirect_spark.slash import workload_queries

PATIENCE_S = 120.0
ROUNDS = 3
CHECKPOINTS = "/dev/shm"
SPARK = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "8g",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": str(EXECUTORS),
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.minBatchesToRetain": "2",
    # A plan with state has no adaptive execution in Spark; to an accelerated one it adds 50 ms.
    "spark.sql.adaptive.streaming.stateless.enabled": "false",
}
STORE = "spark.sql.streaming.stateStore.providerClass"
STORES = {
    "Spark, memory": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "Spark, RocksDB": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
SLASH, ENGINE = "slash", "the engine alone"


@dataclass(frozen=True)
class Setting:
    """A query over a workload, and how many events a batch has."""

    query: str
    workload: Any
    events: int
    said: dict[str, Any]
    options: dict[str, str]


def descendants(pid: int) -> list[int]:
    """A process and all that it started, as far as they live."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        try:
            threads = list(Path(f"/proc/{one}/task").iterdir())
            children = [t.joinpath("children").read_text() for t in threads]
        except OSError:
            continue
        found.append(one)
        todo += [int(child) for text in children for child in text.split()]
    return found


class CpuClock:
    """CPU seconds of this process and all that it starts, those that ended meanwhile included as
    far as they were seen.  A thread looks often, since Spark ends workers whenever it likes.  Time
    is taken of whole processes, since a JVM ends threads that compile."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            self.now()

    def now(self) -> float:
        """CPU seconds up to now."""
        with self._lock:
            for pid in descendants(os.getpid()):
                try:
                    self._seen[pid] = _cpu_seconds(pid)
                except OSError:
                    continue
            return sum(self._seen.values())

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@dataclass(frozen=True)
class Run:
    """Seconds, and CPU seconds, of all batches but the first.  For a run that was cut off, fewer
    than it would have taken."""

    seconds: float
    cpu: float
    cut_off: bool = False


def timed_query(frame: Any, mode: str, batches: int, clock: CpuClock) -> Run:
    """All batches of a query but the first."""
    directory = tempfile.mkdtemp(prefix="kdirect-bench-checkpoint-", dir=CHECKPOINTS)
    began, cpu = time.monotonic(), clock.now()
    try:
        query = (
            frame.writeStream.format("noop")
            .outputMode(mode)
            .option("checkpointLocation", directory)
            .trigger(availableNow=True)
            .start()
        )
        try:
            deadline = began + PATIENCE_S
            while query.isActive and not _done(query) and time.monotonic() < deadline:
                time.sleep(0.005)
            if _done(query):
                began, cpu = time.monotonic(), clock.now()
            if query.isActive:
                query.awaitTermination(max(1.0, deadline - time.monotonic()))
            took, used = time.monotonic() - began, clock.now() - cpu
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
            ran = len({p["batchId"] for p in query.recentProgress if p["numInputRows"]})
            if ran < batches:
                # It may be about to end the batch that it is in, be it the first.
                share = (batches - 1) / max(1, ran)
                return Run(took * share, used * share, cut_off=True)
            return Run(took, used)
        finally:
            query.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _done(query: Any) -> bool:
    """Has the first batch ended?"""
    return bool(query.recentProgress)


def timed_engine(bootstrap: str, setting: Setting, topics: Any) -> Run:
    """As `timed_query`, of the plan as a job of the state engine."""
    name = {"nb11": "q11", "ro_window": "ro"}.get(setting.query, setting.query)
    streams = workload_queries.QUERIES[setting.query][1]
    records = sum(setting.workload.streams[s].among(setting.events) for s in streams)
    plan = setting.workload.plan(topics, name)
    return Run(*timed_job(bootstrap, plan, records, "slash", "colocated"))


def spark_session() -> Any:
    builder = session_builder("bench", f"local[{EXECUTORS}]")
    for name, value in SPARK.items():
        builder = builder.config(name, value)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return builder.getOrCreate()


@dataclass
class Rates:
    """Rows a second, and a CPU second, of each round of a system."""

    wall: list[float]
    cpu: list[float]
    cut_off: bool = False


def unload(spark: Any) -> None:
    """What the state stores of stopped queries keep in the JVM goes: whoever comes next would
    collect garbage around it."""
    package = spark._jvm.org.apache.spark.sql.execution.streaming.state
    getattr(getattr(package, "StateStore$"), "MODULE$").stop()
    spark._jvm.System.gc()


def measured(
    spark: Any, bootstrap: str, setting: Setting, rounds: int, clock: CpuClock
) -> dict[str, Rates]:
    """What each system did."""
    _, streams = workload_queries.QUERIES[setting.query]
    topics = {stream: f"{setting.query}-{stream}-{setting.events}" for stream in streams}
    rows = 0
    with kdirect.connect(bootstrap) as session:
        for stream, topic in topics.items():
            written = setting.workload.streams[stream]
            each = written.among(setting.events)
            rows += each
            kdirect.workloads.write(
                session, written, topic, records=BATCHES * each, partitions=PARTITIONS
            )
    layouts = {name: stream.layout for name, stream in setting.workload.streams.items()}
    found: dict[str, Rates] = {}
    try:
        for _ in range(rounds):
            for system in (SLASH, *STORES, ENGINE):
                if system in found and found[system].cut_off:
                    continue
                unload(spark)
                if system == ENGINE:
                    run = timed_engine(bootstrap, setting, topics)
                else:
                    most = max(setting.workload.streams[s].among(setting.events) for s in streams)
                    frame = workload_queries.data_frame(
                        lambda: spark.readStream,
                        setting.query,
                        layouts,
                        topics,
                        bootstrap,
                        {"maxOffsetsPerTrigger": str(most)},
                        **setting.options,
                    )
                    if system in STORES:
                        spark.conf.set(STORE, STORES[system])
                    else:
                        state = tempfile.mkdtemp(prefix="kdirect-bench-state-", dir=CHECKPOINTS)
                        frame = slash.accelerate(frame, stateDir=state, executors=EXECUTORS)
                    run = timed_query(frame, "append", BATCHES, clock)
                    if system == SLASH:
                        shutil.rmtree(state, ignore_errors=True)
                rates = found.setdefault(system, Rates([], []))
                rates.wall.append((BATCHES - 1) * rows / run.seconds)
                rates.cpu.append((BATCHES - 1) * rows / run.cpu)
                rates.cut_off = run.cut_off
    finally:
        with kdirect.connect(bootstrap) as session:
            for topic in topics.values():
                session.admin.delete_topic(topic)
    return found


def compared(row: str, setting: Setting, found: dict[str, Rates]) -> Iterator[Figure]:
    """Slash against the faster of Spark's two, and against the engine alone."""
    best = max(STORES, key=lambda name: statistics.median(found[name].wall))
    for which, unit in (("wall", "M rows/s"), ("cpu", "M rows/CPU s")):
        ours = [rate / 1e6 for rate in getattr(found[SLASH], which)]
        for other in (best, *(name for name in STORES if name != best), ENGINE):
            theirs = [rate / 1e6 for rate in getattr(found[other], which)]
            yield figure(
                row,
                statistics.median(ours),
                unit,
                other + (" (the faster)" if other == best else ""),
                statistics.median(theirs),
                **setting.said,
                batch_events=setting.events,
                tasks=EXECUTORS,
                shuffle_partitions=EXECUTORS,
                against_cut_off=found[other].cut_off,
                **spread_of(ours, theirs),
            )


def measured_settings(row: str, quick: bool, settings: list[Setting]) -> list[Figure]:
    """`row` for each of the settings."""
    rounds = 1 if quick else ROUNDS
    figures: list[Figure] = []
    clock = CpuClock()
    with kdirect.Broker() as broker:
        spark = spark_session()
        try:
            for setting in settings[:1] if quick else settings:
                found = measured(spark, broker.bootstrap_servers, setting, rounds, clock)
                figures += compared(row, setting, found)
        finally:
            spark.stop()
            clock.close()
    return figures


def events_of(wanted: int, record_bytes: int, quick: bool) -> int:
    """Events of a batch: as many as wanted, unless the topic would take a third of what is free."""
    if quick:
        return 50_000
    most = free_bytes() // 3 // (BATCHES * record_bytes)
    return min(wanted, most // 100_000 * 100_000)


WINDOW_S = 600
MOST_EVENTS = 30_000_000


def slash_ysb(seconds: float, quick: bool) -> list[Figure]:
    """YSB, windows of ten minutes, of which each batch closes one: at two numbers of keys, then
    small batches."""
    settings = []
    for keys, wanted in ((10_000_000, 10_000_000), (1_000, MOST_EVENTS), (1_000, 10_000_000),
                         (1_000, 1_000_000), (1_000, 100_000)):  # fmt: skip
        events = events_of(wanted, 96, quick)
        workload = kdirect.workloads.ysb(keys=keys, step_us=WINDOW_S * 1_000_000 // events)
        settings.append(Setting("ysb", workload, events, {"keys": keys}, {}))
    return measured_settings("slash-ysb", quick, settings)


def slash_nb7(seconds: float, quick: bool) -> list[Figure]:
    """NEXMark 7: the greatest price by auction and minute, Pareto keys."""
    events = events_of(MOST_EVENTS, 50, quick)
    workload = kdirect.workloads.nexmark(pareto=1.1, step_us=WINDOW_S * 1_000_000 // events)
    return measured_settings(
        "slash-nb7", quick, [Setting("nb7", workload, events, {"pareto": 1.1}, {})]
    )


def slash_nb8(seconds: float, quick: bool) -> list[Figure]:
    """NEXMark 8: persons and their auctions in windows of 12 hours, four auctions a person."""
    events = events_of(10_000_000, 200, quick)
    workload = kdirect.workloads.nexmark(paper=True, step_us=12 * 3_600_000_000 // events)
    return measured_settings("slash-nb8", quick, [Setting("nb8", workload, events, {}, {})])


def slash_nb11(seconds: float, quick: bool) -> list[Figure]:
    """NEXMark 11: bids of a bidder's session, a gap of ten seconds."""
    events = events_of(MOST_EVENTS, 50, quick)
    workload = kdirect.workloads.nexmark(step_us=WINDOW_S * 1_000_000 // events)
    return measured_settings("slash-nb11", quick, [Setting("nb11", workload, events, {}, {})])


def slash_cm(seconds: float, quick: bool) -> list[Figure]:
    """CM: the mean CPU of each job in two seconds."""
    events = events_of(MOST_EVENTS, 80, quick)
    return measured_settings(
        "slash-cm", quick, [Setting("cm", kdirect.workloads.cm(), events, {}, {})]
    )


def slash_ro(seconds: float, quick: bool) -> list[Figure]:
    """RO: how often each of 100 M keys occurs in ten minutes."""
    events = events_of(10_000_000, 32, quick)
    workload = kdirect.workloads.ro(window="10 minutes", step_us=WINDOW_S * 1_000_000 // events)
    return measured_settings("slash-ro", quick, [Setting("ro_window", workload, events, {}, {})])
