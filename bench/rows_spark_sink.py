"""Bench rows of the exactly-once sink, over a broker in a process of its own.

How many rows a second a batch writes, beside at-least-once; how long a task waits for its attempt
where many are open; how long the commit of a batch takes once all is written; and how many
micro-batches of one row go through source and sink a second, beside those of a source and a sink
that do nothing (Spark's own `rate-micro-batch` and noop).
Spark has one session with the settings of `kdirect_spark.session_builder`, and checkpoints are in
memory where there is room for them (/dev/shm).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import pyarrow as pa
from rows_direct import _percentile
from rows_spark import _Broker, fill, spark_and_broker
from sides import Figure, figure, spread_of

VALUE_BYTES = 1024
ROWS = 400_000  # about a second of one task
QUICK_ROWS = 2_000
ONCE_BAR = 0.9  # of the rows at-least-once
PARTITIONS = 8
COMMIT_BAR_MS = 5.0
OPEN = 3_000  # attempts of a batch at one time
JOINS = 500  # that are measured
MICRO_BAR = 15.0  # micro-batches a second
WARM_BATCHES = 20  # of each query, before its batches count: Spark's code is compiled meanwhile
STAGES = ("latestOffset", "queryPlanning", "walCommit", "addBatch", "commitOffsets",
          "triggerExecution")  # fmt: skip


def spark_sink_once(seconds: float, quick: bool) -> list[Figure]:
    """Rows a second of a batch write, exactly-once and at-least-once in turns."""
    rows = QUICK_ROWS if quick else ROWS
    with spark_and_broker(in_memory=True) as (spark, address, _):
        frame = spark.range(0, rows, 1, 1).selectExpr(
            f"CAST(repeat('v', {VALUE_BYTES}) AS BINARY) AS value"
        )
        numbers = iter(range(1_000_000))

        def run(exactly_once: str) -> float:
            began = time.perf_counter()
            (
                frame.write.format("kdirect").mode("append")
                .option("kafka.bootstrap.servers", address)
                .option("topic", f"sink-{next(numbers)}").option("exactlyOnce", exactly_once).save()
            )  # fmt: skip
            return rows / (time.perf_counter() - began)

        rates: dict[str, list[float]] = {"true": [], "false": []}
        began = time.monotonic()
        while len(rates["true"]) < (1 if quick else 4) or (
            not quick and time.monotonic() - began < seconds
        ):
            for key, of in rates.items():
                of.append(run(key))
        if not quick:
            for of in rates.values():
                del of[0]
    once, least = (statistics.median(rates[key]) for key in ("true", "false"))
    return [
        figure(
            "spark-sink-once", once, "rows/s", f"at-least-once; bar: {ONCE_BAR}", least,
            value_bytes=VALUE_BYTES, rows=rows, master="local[1]",
            **spread_of(rates["true"], rates["false"]),
        )
    ]  # fmt: skip


def attempts_join(seconds: float, quick: bool) -> list[Figure]:
    """Milliseconds of `Session.join_attempt` where so many attempts of the batch are open, beside
    those of the first ones."""
    from kdirect.client import connect

    wanted, joins = (200, 50) if quick else (OPEN, JOINS)
    samples = []
    with (
        tempfile.TemporaryDirectory() as directory,
        _Broker(directory) as broker,
        connect(broker.address) as session,
    ):
        for _ in range(joins):  # of a batch of its own
            session.join_attempt("warm", "q", "r", 0)
        while len(samples) < wanted:
            began = time.perf_counter()
            session.join_attempt("x", "q", "r", 0)
            samples.append((time.perf_counter() - began) * 1e3)
    first, last = sorted(samples[:joins]), sorted(samples[-joins:])
    return [
        figure(
            "attempts-join", statistics.median(last), "ms", "the first ones",
            statistics.median(first), lower_is_better=True, open=wanted, joins=joins,
            p99_ms=_percentile(last, 0.99), against_p99_ms=_percentile(first, 0.99),
        )
    ]  # fmt: skip


def attempts_commit(seconds: float, quick: bool) -> list[Figure]:
    """Milliseconds of `Session.commit_attempts`, once all attempts of a batch are flushed: one that
    has written to 8 partitions, and 8 each of which has written to all."""
    from kdirect.client import connect

    rows = pa.table({
        "value": pa.array([b"v" * 100] * PARTITIONS),
        "partition": pa.array(range(PARTITIONS), pa.int32()),
    })  # fmt: skip
    found = []
    with (
        tempfile.TemporaryDirectory() as directory,
        _Broker(directory) as broker,
        connect(broker.address) as session,
    ):
        session.admin.create_topic("t", PARTITIONS)
        for attempts in (1, PARTITIONS):
            name, batch, samples = f"of {attempts}", 0, []
            end = time.monotonic() + seconds / 3
            while len(samples) < 20 or (not quick and time.monotonic() < end):
                written = []
                for _ in range(attempts):
                    attempt = session.join_attempt(name, "q", "r", batch)
                    assert attempt is not None
                    with session.attempt_producer(attempt) as producer:
                        producer.send_arrow(rows, "t")
                        producer.flush()
                    written.append(attempt)
                began = time.perf_counter()
                session.commit_attempts(name, "q", "r", batch, written)
                samples.append((time.perf_counter() - began) * 1e3)
                batch += 1
            samples = sorted(samples[10:])
            found.append(
                figure(
                    "attempts-commit", statistics.median(samples), "ms",
                    f"bar: {COMMIT_BAR_MS:.0f} ms", COMMIT_BAR_MS, lower_is_better=True,
                    attempts=attempts, partitions=PARTITIONS, samples=len(samples),
                    p99_ms=_percentile(samples, 0.99),
                )
            )  # fmt: skip
    return found


def spark_sink_micro(seconds: float, quick: bool) -> list[Figure]:
    """Micro-batches of one row a second, through source and sink: exactly-once, at-least-once, and
    into Spark's noop sink; and out of Spark's own source into noop, which is what Spark takes for
    itself."""
    figures = []
    with spark_and_broker(in_memory=True) as (spark, address, directory):
        fill(address, "one-by-one", 200 if quick else 20_000, 100)
        rates: dict[str, list[float]] = {
            "exactly-once": [], "at-least-once": [], "noop": [], "floor": [],
        }  # fmt: skip
        stages: dict[str, dict[str, list[float]]] = {key: {s: [] for s in STAGES} for key in rates}
        rounds = 1 if quick else 3
        turn_s = 0.5 if quick else max(2.0, seconds / (rounds * len(rates)) - 2)
        for turn in range(rounds):
            for key, of in rates.items():
                of.append(
                    _one_row_batches(spark, address, f"{directory}/{key}-{turn}", key, turn_s,
                                     stages[key])
                )  # fmt: skip
        medians = {key: statistics.median(of) for key, of in rates.items()}
        for key, row in (("exactly-once", "spark-sink-micro"),
                         ("at-least-once", "spark-sink-micro.at-least-once")):  # fmt: skip
            figures.append(
                figure(
                    row, medians[key], "1/s", f"bar: {MICRO_BAR:.0f}/s", MICRO_BAR,
                    noop_per_s=medians["noop"], spark_alone_per_s=medians["floor"],
                    low=min(rates[key]), high=max(rates[key]),
                    durations_ms={s: round(statistics.median(t), 1)
                                  for s, t in stages[key].items() if t},
                    master="local[1]",
                )
            )  # fmt: skip
    return figures


def _one_row_batches(
    spark: Any, address: str, checkpoint: str, sink: str, seconds: float,
    stages: dict[str, list[float]],
) -> float:  # fmt: skip
    if sink == "floor":
        source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1)
    else:
        source = (
            spark.readStream.format("kdirect").option("kafka.bootstrap.servers", address)
            .option("subscribe", "one-by-one").option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 1)
        )  # fmt: skip
    writer = (
        source.load().select("value")
        .writeStream.trigger(processingTime="0 seconds").option("checkpointLocation", checkpoint)
    )  # fmt: skip
    if sink in ("noop", "floor"):
        writer = writer.format("noop")
    else:
        writer = (
            writer.format("kdirect").option("kafka.bootstrap.servers", address)
            .option("topic", "copy").option("exactlyOnce", str(sink == "exactly-once").lower())
        )  # fmt: skip
    query = writer.start()
    try:
        deadline = time.monotonic() + 60
        while (query.lastProgress or {"batchId": -1})["batchId"] < WARM_BATCHES:
            if not query.isActive or time.monotonic() > deadline:
                raise RuntimeError(f"the query did not get going: {query.exception()}")
            time.sleep(0.02)
        first, began = query.lastProgress["batchId"], time.perf_counter()
        time.sleep(seconds)
        last, spent = query.lastProgress, time.perf_counter() - began
        if last["numInputRows"] != 1:
            raise RuntimeError(f"a micro-batch of {last['numInputRows']} rows, not one")
        for progress in query.recentProgress:
            if progress["batchId"] > first:
                for stage, times in stages.items():
                    times.append(progress["durationMs"].get(stage, 0))
        return float((last["batchId"] - first) / spent)
    finally:
        query.stop()
