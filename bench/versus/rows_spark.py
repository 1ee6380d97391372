"""Spark in bulk: batch read, AvailableNow stream and sink by value size, kdirect's connector beside
Spark's Kafka connector.

What a query takes before its first record and after its last one is told by two rows: one in a
session that is warm, and one in which each query is the first of its session.

Owns: the session that has both connectors (the settings of `kdirect_spark.session_builder`, one
task slot), and the limits beside them: a Python source that yields ready batches, a Python sink
that counts.  All in one session, in turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from rows_spark import ReadySource, to_noop
from versus import jars, systems
from versus.measure import figure, rate_figure, turns
from versus.rows_consume import fill_in_bulk
from versus.systems import Pair, System, pair

Figures = list[dict[str, Any]]
# Bytes of a value, bytes of all of them, and the bar.  A stream has more to read, since starting
# one takes a second or two of its time.
READ_SIZES = ((100, 160 << 20, 3.5), (1024, 512 << 20, 3.0), (10240, 512 << 20, 2.0))
STREAM_SIZES = ((100, 512 << 20, 3.0), (1024, 3 << 30, 2.7), (10240, 3 << 30, 1.8))
SINK_SIZES = ((100, 256 << 20, 1.5), (1024, 512 << 20, 3.0), (10240, 512 << 20, 3.0))
ONCE_BAR = 0.9  # of the rows at-least-once
TUNED_SINK = {"kafka.linger.ms": "20", "kafka.batch.size": str(1 << 20),
              "kafka.buffer.memory": str(128 << 20),
              "kafka.max.request.size": str(4 << 20)}  # fmt: skip
MASTER = "local[1]"
FEW = 100  # records of a query that shows what starting and ending one takes
FIRST_QUERY = Path(__file__).with_name("first_query.py")
READY = "a Python source that yields the same batches ready"
_session: Any = None


def session(master: str = MASTER) -> Any:
    """The session of this process, with so many task slots; it ends with the brokers."""
    global _session
    if _session is not None and _session.sparkContext.master != master:
        _stop()
    if _session is None:
        from kdirect_spark import configure

        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder.appName("bench").master(master)
        for name, value in {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.memory": "2g",
            "spark.log.level": "ERROR",
            "spark.jars": ",".join(str(jar) for jar in jars.jars("connector")),
            "spark.sql.warehouse.dir": scratch(),
        }.items():
            builder = builder.config(name, value)
        _session = configure(builder).getOrCreate()  # last: it adds the shim to the jars
        systems.at_end(_stop)
        _session.dataSource.register(ReadySource)
        _session.dataSource.register(CountingSink)
    return _session


def _stop() -> None:
    global _session
    if _session is not None:
        _session.stop()
        _session = None


def scratch() -> str:
    """A new directory on tmpfs, for a checkpoint, inside the brokers' own, which goes in the
    end."""
    return tempfile.mkdtemp(prefix="spark-", dir=systems.directory())


def source(reader: Any, system: System, topic: str) -> Any:
    name = "kdirect" if system.key == "kdirect" else "kafka"
    return (
        reader.format(name)
        .option("kafka.bootstrap.servers", system.address)
        .option("subscribe", topic)
    )


def spark_read(seconds: float, quick: bool) -> Figures:
    """`spark.read.format(...)` of a topic to Spark's noop sink."""

    def frames(both: Pair, topic: str, records: int) -> dict[str, Callable[[], float]]:
        read = {s.key: source(session().read, s, topic).load() for s in both.both}
        ready = (
            session()
            .read.format("ready-batches")
            .option("address", both.kdirect.address)
            .option("topic", topic)
        )
        read["ready"] = ready.option("rows", records).load()
        return {key: lambda frame=frame: records / to_noop(frame) for key, frame in read.items()}

    return _reads("spark-read", frames, READ_SIZES, quick)


def spark_available_now(seconds: float, quick: bool) -> Figures:
    """A streaming query over all that waits, its checkpoint on tmpfs, from start() to its end; and
    one over a hundred records, which shows what starting and ending a query take."""
    out = []
    if not quick:
        with pair() as both, both.topic("few") as topic:
            session()
            fill_in_bulk(both, topic, 100, FEW)
            runs = {s.key: lambda s=s: _seconds_of(s, topic) for s in both.both}
            for run in runs.values():
                run(), run()
            row = "spark-available-now.few-records"
            out.append(_seconds_figure(row, turns(7, runs), both, bar=1.0))

    def streams(both: Pair, topic: str, records: int) -> dict[str, Callable[[], float]]:
        return {s.key: lambda s=s: records / _run_to_end(s, topic, records) for s in both.both}

    return out + _reads("spark-available-now", streams, STREAM_SIZES, quick)


def spark_first_query(seconds: float, quick: bool) -> Figures:
    """The first query of a session, an AvailableNow stream over a hundred records, from load() to
    its end; each in a process and a JVM of its own."""
    with pair() as both, both.topic("first") as topic:
        fill_in_bulk(both, topic, 100, FEW)

        def run(system: System) -> float:
            name = "kdirect" if system.key == "kdirect" else "kafka"
            command = [sys.executable, str(FIRST_QUERY), name, system.address, topic, str(FEW)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                raise RuntimeError(f"a session failed: {done.stderr[-2000:]}")
            return float(done.stdout.split()[-1])

        runs = {s.key: lambda s=s: run(s) for s in both.both}
        times = turns(1 if quick else 5, runs)
        return [_seconds_figure("spark-first-query", times, both, bar=round(1 / 1.2, 3))]


def _seconds_figure(
    row: str, times: dict[str, list[float]], both: Pair, *, bar: float
) -> dict[str, Any]:
    value, against = (statistics.median(times[s.key]) for s in both.both)
    results = {key: {"consumeSeconds": [round(t, 3) for t in ts]} for key, ts in times.items()}
    return figure(
        row, "s", value, against, both, results,
        lower_is_better=True, bar=bar, master=MASTER, rows=FEW,
    )  # fmt: skip


def _seconds_of(system: System, topic: str) -> float:
    """Seconds of an AvailableNow query over a few records, from load() to its end."""
    begin = time.perf_counter()
    frame = source(session().readStream, system, topic).option("startingOffsets", "earliest").load()
    run_to_end(frame, FEW)
    return time.perf_counter() - begin


def _run_to_end(system: System, topic: str, records: int) -> float:
    """Seconds of an AvailableNow query that reads `records`, from start() to its end."""
    frame = source(session().readStream, system, topic).option("startingOffsets", "earliest").load()
    return run_to_end(frame, records)


def run_to_end(frame: Any, records: int) -> float:
    """Seconds of an AvailableNow query over a stream, which reads `records`."""
    writer = (
        frame.writeStream.format("noop")
        .trigger(availableNow=True)
        .option("checkpointLocation", scratch())
    )
    begin = time.perf_counter()
    query = writer.start()
    query.awaitTermination()
    spent = time.perf_counter() - begin
    done = sum(p["numInputRows"] for p in query.recentProgress)
    if done != records:
        raise RuntimeError(f"the query read {done} of {records} records")
    return spent


def _reads(
    row: str,
    make: Callable[[Pair, str, int], dict[str, Callable[[], float]]],
    every: tuple[tuple[int, int, float], ...],
    quick: bool,
) -> Figures:
    out = []
    rounds = 1 if quick else 3
    with pair() as both:
        session()
        for size, total, bar in every[1:2] if quick else every:
            records = ((4 << 20) if quick else total) // size
            with both.topic("spark") as topic:
                fill_in_bulk(both, topic, size, records)
                runs = make(both, topic, records)
                if (
                    size == every[0][0] or "ready" in runs
                ):  # streams are long: one warms the JVM up for the other sizes
                    for run in runs.values():
                        run()
                rates = turns(rounds, runs)
            extra: dict[str, Any] = {}
            if "ready" in rates:
                ready = statistics.median(rates["ready"])
                extra = {
                    "limits": {f"{READY}, rows/s": ready},
                    "ratio_to_ready": statistics.median(rates["kdirect"]) / ready,
                }
            out.append(
                rate_figure(
                    row,
                    "rows/s",
                    "consumeRate",
                    rates,
                    both,
                    bar=bar,
                    value_bytes=size,
                    rows=records,
                    master="local[1]",
                    mb_per_s=round(statistics.median(rates["kdirect"]) * size / 1e6),
                    kafka_mb_per_s=round(statistics.median(rates["kafka"]) * size / 1e6),
                    **extra,
                )
            )
    return out


def spark_sink(seconds: float, quick: bool) -> Figures:
    """`df.write.format(...)` of rows that cost nothing to make: kdirect as it is, which is
    exactly-once, and at-least-once; Kafka's sink tuned (linger 20 ms, batches of 1 MB)."""
    out = []
    rounds = 1 if quick else 3
    with pair() as both:
        spark = session()
        for size, total, bar in SINK_SIZES[1:2] if quick else SINK_SIZES:
            rows = ((2 << 20) if quick else total) // size
            frame = spark.range(0, rows, 1, 1).selectExpr(
                f"CAST(repeat('v', {size}) AS BINARY) AS value"
            )
            with both.topic("sink") as topic:
                writers = {
                    "kdirect": frame.write.format("kdirect")
                    .option("kafka.bootstrap.servers", both.kdirect.address)
                    .option("topic", topic),
                    "kafka": frame.write.format("kafka")
                    .option("kafka.bootstrap.servers", both.kafka.address)
                    .option("topic", topic),
                    "at-least-once": frame.write.format("kdirect")
                    .option("kafka.bootstrap.servers", both.kdirect.address)
                    .option("topic", topic)
                    .option("exactlyOnce", "false"),
                    "counting": frame.write.format("counting-sink"),
                }
                for name, value in TUNED_SINK.items():
                    writers["kafka"] = writers["kafka"].option(name, value)

                def run(
                    key: str,
                    writers: dict[str, Any] = writers,
                    rows: int = rows,
                    topic: str = topic,
                ) -> float:
                    begin = time.perf_counter()
                    writers[key].mode("append").save()
                    spent = time.perf_counter() - begin
                    for system in both.both:
                        if {"at-least-once": "kdirect"}.get(key, key) == system.key:
                            system.truncate(topic)
                    return rows / spent

                for key in writers:
                    run(key)
                rates = turns(
                    rounds,
                    {key: lambda key=key: run(key) for key in writers},
                    memory=0 if quick else 2 * total,
                )
            counting = statistics.median(rates["counting"])
            ours = statistics.median(rates["kdirect"])
            weaker = statistics.median(rates["at-least-once"])
            out.append(
                rate_figure(
                    "spark-sink",
                    "rows/s",
                    "publishRate",
                    rates,
                    both,
                    bar=bar,
                    value_bytes=size,
                    rows=rows,
                    master="local[1]",
                    mb_per_s=round(ours * size / 1e6),
                    kafka_mb_per_s=round(statistics.median(rates["kafka"]) * size / 1e6),
                    limits={"a Python sink that counts, rows/s": counting},
                    limit=("at least", ONCE_BAR * weaker),
                    ratio_to_counting=ours / counting,
                    ratio_to_at_least_once=ours / weaker,
                    kafka_options=", ".join(f"{k}={v}" for k, v in TUNED_SINK.items()),
                )
            )
    return out


@dataclass(frozen=True)
class Counted(WriterCommitMessage):
    rows: int


class CountingSink(DataSource):
    """Takes Arrow batches and counts their rows: what Spark hands to any Python sink."""

    @classmethod
    def name(cls) -> str:
        return "counting-sink"

    def schema(self) -> str:
        return "value binary"

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return _CountingWriter()


class _CountingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Counted(sum(batch.num_rows for batch in iterator))
