"""Spark in small pieces: micro-batches of one row, and the delay of events from a sensor to Spark
(KafkaDirect, figure 21).

The second is the workload of van Dongen and Van den Poel's benchmark as the paper uses it:
observations of traffic sensors as JSON in two topics, 400 a second, or with an enlarged batch every
ten seconds on top.  Delay counts from the moment at which an observation was due to the one at
which the query has its micro-batch in hand, parsed.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from versus.measure import latency_figure, rate_figure, turns
from versus.rows_consume import fill_one_by_one
from versus.rows_spark import scratch, session, source
from versus.systems import Pair, System, pair
from versus.worker import Worker

Figures = list[dict[str, Any]]
CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
ASYNC = {
    "asyncProgressTrackingEnabled": "true",
    "asyncProgressTrackingCheckpointIntervalMs": "1000",
}
PAIRED: dict[str, dict[str, str]] = {"kdirect": ASYNC, "kafka": {}}
STAGES = (
    "latestOffset",
    "getBatch",
    "queryPlanning",
    "walCommit",
    "addBatch",
    "commitOffsets",
    "triggerExecution",
)


def micro_batch(seconds: float, quick: bool) -> Figures:
    """Micro-batches of one row a second: in the session both share, with asynchronous progress
    tracking on both sides, and each as it comes (kdirect as docs/spark.md sets a stream up, Spark's
    Kafka connector with Spark's defaults)."""
    out = []
    rounds = 1 if quick else 3
    turn_s = 0.5 if quick else max(2.0, seconds / (rounds * 4) - 1)
    with pair() as both:
        session()
        with both.topic("micro") as topic:
            fill_one_by_one(both, topic, 100, 4000)
            for row, name, options, bar in (
                (
                    "micro-batch.same-session",
                    "the same settings, those of kdirect_spark.session_builder",
                    None,
                    None,
                ),
                (
                    "micro-batch.async-progress",
                    "the same settings, and asynchronous progress tracking",
                    ASYNC,
                    None,
                ),
                (
                    "micro-batch",
                    "as each comes: kdirect with asynchronous progress tracking,"
                    " Kafka with Spark's defaults",
                    PAIRED,
                    3.0,
                ),
            ):
                if quick and options is not None:
                    continue
                stages: dict[str, dict[str, list[float]]] = {
                    s.key: {stage: [] for stage in STAGES} for s in both.both
                }

                def run(system: System, options: Any = options, stages: Any = stages) -> float:
                    with (
                        _sparks_defaults()
                        if options is PAIRED and system.key == "kafka"
                        else nullcontext()
                    ):
                        chosen = options[system.key] if options is PAIRED else options or {}
                        return _one_row_batches(system, topic, chosen, stages[system.key], turn_s)

                if not quick:
                    run(both.kdirect), run(both.kafka)
                rates = turns(rounds, {s.key: lambda s=s: run(s) for s in both.both})
                found = rate_figure(
                    row,
                    "1/s",
                    "consumeRate",
                    rates,
                    both,
                    bar=bar,
                    how=name,
                    master="local[1]",
                )
                for key, times in stages.items():
                    found["settings"]["results"][key]["durations_ms"] = {
                        stage: round(statistics.median(t), 1) for stage, t in times.items() if t
                    }
                out.append(found)
    return out


@contextmanager
def _sparks_defaults() -> Iterator[None]:
    """Without what kdirect_spark.session_builder changes for streams."""
    conf, found = session().conf, session().conf.get(CHECKPOINT_FILES, None)
    conf.unset(CHECKPOINT_FILES)
    try:
        yield
    finally:
        if found is not None:
            conf.set(CHECKPOINT_FILES, found)


def _one_row_batches(
    system: System,
    topic: str,
    options: dict[str, str],
    stages: dict[str, list[float]],
    seconds: float,
) -> float:
    frame = (
        source(session().readStream, system, topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 1)
        .load()
    )
    writer = (
        frame.writeStream.format("noop")
        .trigger(processingTime="0 seconds")
        .option("checkpointLocation", scratch())
    )
    for name, value in options.items():
        writer = writer.option(name, value)
    query = writer.start()
    try:
        _until(query, lambda: (query.lastProgress or {"batchId": -1})["batchId"] >= 2)
        first, began = query.lastProgress["batchId"], time.perf_counter()
        time.sleep(seconds)
        last = query.lastProgress
        spent = time.perf_counter() - began
        if last["numInputRows"] != 1:
            raise RuntimeError(f"a micro-batch of {last['numInputRows']} rows, not one")
        for progress in query.recentProgress:
            if progress["batchId"] > first:
                for stage in stages:
                    stages[stage].append(progress["durationMs"].get(stage, 0))
        return float((last["batchId"] - first) / spent)
    finally:
        query.stop()


def event_delay(seconds: float, quick: bool) -> Figures:
    """400 events a second into two topics; the same with 2000 more at once, every ten seconds."""
    out = []
    rounds = 1 if quick else 2
    with pair() as both:
        session()
        for row, burst, turn_s in (
            ("event-delay", 0, 1.0 if quick else 8.0),
            ("event-delay.bursts", 2000, 10.5),
        ):
            if quick and burst:
                continue
            latest: dict[str, list[float]] = {s.key: [] for s in both.both}

            def run(
                system: System, burst: int = burst, turn_s: float = turn_s, latest: Any = latest
            ) -> list[int]:
                samples, late = _delays(both, system, turn_s, burst)
                latest[system.key].append(round(late))
                return samples

            if not burst and not quick:
                for s in both.both:
                    _delays(both, s, 3.0, 0)
            samples = turns(rounds, {s.key: lambda s=s: run(s) for s in both.both})
            found = latency_figure(
                row,
                "endToEnd",
                samples,
                both,
                topics=2,
                rate_per_s=400,
                burst=burst,
                burst_every_s=10,
                master="local[1]",
                how="from the moment an event was due to its micro-batch in hand, parsed from JSON",
            )
            for key, values in latest.items():
                found["settings"]["results"][key]["sensor_behind_us"] = values
            out.append(found)
    return out


def _delays(both: Pair, system: System, seconds: float, burst: int) -> tuple[list[int], float]:
    """Delays in nanoseconds of one run, and how far the sensor was behind its schedule, in
    microseconds."""
    number = time.monotonic_ns()
    topics = [f"flow-{number}", f"speed-{number}"]
    for topic in topics:
        system.create(topic)
    delays: list[int] = []
    arrived = threading.Event()
    expected = int(seconds * 400) + burst

    def take(frame: Any, _: int) -> None:
        due = frame.selectExpr(
            "from_json(CAST(value AS STRING),"
            " 'due_us bigint, flow int, speed double').due_us AS due"
        ).toArrow()
        now = time.time_ns()
        delays.extend(now - us * 1000 for us in due.column(0).to_pylist() if us > 0)
        if len(delays) >= expected:
            arrived.set()

    frame = (
        source(session().readStream, system, ",".join(topics))
        .option("startingOffsets", "earliest")
        .load()
    )
    worker = Worker(
        role="paced",
        system=system.key,
        address=system.address,
        topics=topics,
        rate=400.0,
        seconds=seconds,
        burst=burst,
        burst_s=10.0,
    )
    query = (
        frame.writeStream.foreachBatch(take)
        .trigger(processingTime="0 seconds")
        .option("checkpointLocation", scratch())
        .start()
    )
    try:
        _until(query, lambda: query.lastProgress is not None)
        worker.go()
        late = worker.result()["latest_us"]
        if not arrived.wait(30):
            raise RuntimeError(
                f"{expected - len(delays)} of {expected} events did not arrive: {query.exception()}"
            )
    finally:
        query.stop()
        for topic in topics:
            with suppress(Exception):
                system.delete(topic)
    return delays, late


def _until(query: Any, done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        if not query.isActive or time.monotonic() > deadline:
            raise RuntimeError(f"the query did not get going: {query.exception()}")
        time.sleep(0.02)
