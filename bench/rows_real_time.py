"""How long a record takes from its producer to a sink of Spark's in Real-Time Mode.

A producer in a process of its own writes 10,000 records a second, each with the time of its making.
Spark evaluates the time right before its sink takes a row (`java.time.Instant.now`, once a row),
and gives percentiles of the differences, over all rows of one real-time batch.  Rows of the first
seconds, in which code is compiled, are left out, and so are the gaps between two batches: a batch
may last for hours.

In addition to this: the same query and producer with micro-batches, one after the other; and the
same producer with a consumer of plain Python, which does nothing but take the time.  The tail of
the latter is that of the machine, on which producer, broker and reader share the processors.

A second figure has kdirect's sink, and a consumer that takes the time when a record is there again.
All clocks are this machine's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from rows_spark import _Broker

from kdirect_spark import session_builder

RATE = 10_000
WARM_S, LEAD_S, TAIL_S = 5.0, 5.0, 2.0
PERCENTILES = (0.5, 0.9, 0.99, 0.999)
WARM_KEY = b"warm"

PRODUCER = f"""
import sys, time
from kdirect.client.session import connect

address, topic, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
with connect(address).producer(linger_ms=0) as producer:
    sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
    begin, sent, measured = time.perf_counter(), 0, 0
    while (past := time.perf_counter() - begin) < seconds + {WARM_S}:
        while sent < min(past, seconds + {WARM_S}) * {RATE}:
            key = {WARM_KEY!r} if sent < {int(WARM_S * RATE)} else None
            producer.send(topic, b"%d" % time.time_ns(), key)
            sent += 1
            measured += key is None
        time.sleep(0.0002)
print(measured)
"""

# Takes the time of each record that is not of the warm-up, until there are none for a second.
CONSUMER = """
import json, sys, time
import kdirect

took, last = [], None
with kdirect.Consumer(sys.argv[1]) as consumer:
    consumer.assign({kdirect.TopicPartition(sys.argv[2], 0): 0})
    sys.stdout.write("ready\\n"); sys.stdout.flush()
    while last is None or time.monotonic() - last < 1:
        for message in consumer.consume(1000, 0.1):
            now, last = time.time_ns(), time.monotonic()
            if message.key() is None:
                took.append((now - int(message.value())) / 1e6)
print(json.dumps(took))
"""


def real_time(seconds: float, quick: bool) -> list[dict[str, Any]]:
    """Milliseconds from a record's making to the sink, in Real-Time Mode and in micro-batches."""
    each = 1.0 if quick else max(3.0, seconds / 3)
    with (
        tempfile.TemporaryDirectory(prefix="kdirect-bench-real-time-") as directory,
        _Broker(directory) as broker,
    ):
        builder = session_builder("bench", "local[2]")
        for name, value in {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "2g",
            "spark.log.level": "ERROR",
            "spark.kdirect.realTime": "true",
            # Spark has no sink in its list that takes rows and does nothing with them.
            "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
            "spark.sql.streaming.realTimeMode.minBatchDuration": "1000",
        }.items():
            builder = builder.config(name, value)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        spark = builder.getOrCreate()
        try:
            bench = _Bench(spark, broker.address, directory, each)
            micro, live = bench.to_noop("micro"), bench.to_noop("live")  # the first warms Spark
            through = bench.to_kdirect()
            floor = bench.to_a_consumer()
        finally:
            spark.stop()
    settings = {
        "rows_per_s": RATE,
        "seconds": each,
        "master": "local[2]",
    }
    return [
        {
            "row": "real-time",
            "value": live[name],
            "unit": f"ms ({name})",
            "against": against,
            "against_value": other[name],
            "ratio": other[name] / live[name],
            "settings": settings | live,
        }
        for name in ("p50", "p99")
        for against, other in (
            (f"{name} with micro-batches", micro),
            (f"{name} of a plain consumer", floor),
        )
    ] + [
        {
            "row": "real-time-sink",
            "value": through["p50"],
            "unit": "ms (p50)",
            "against": "p50 up to Spark's sink, of this run",
            "against_value": live["p50"],
            "ratio": live["p50"] / through["p50"],
            "settings": settings | through,
        }
    ]


class _Bench:
    def __init__(self, spark: Any, address: str, directory: str, seconds: float) -> None:
        from kdirect.client.session import connect

        self.spark, self.address = spark, address
        self.directory, self.seconds = directory, seconds
        self.session = connect(address)

    def source(self, topic: str) -> Any:
        self.session.admin.create_topic(topic, 1)
        return (
            self.spark.readStream.format("kdirect")
            .option("kafka.bootstrap.servers", self.address)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
        )

    def start(self, writer: Any, name: str, trigger: dict[str, str]) -> Any:
        """A query whose first batch runs."""
        checkpoint = os.path.join(self.directory, f"checkpoint-{name}")
        query = (
            writer.option("checkpointLocation", checkpoint)
            .outputMode("update")
            .trigger(**trigger)
            .start()
        )
        deadline = time.monotonic() + 60
        tracker = self.spark.sparkContext.statusTracker()
        while time.monotonic() < deadline:
            stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
            waits = query.status["message"].startswith("Waiting")  # with micro-batches
            if waits or any(stage is not None and stage.numActiveTasks for stage in stages):
                break
            time.sleep(0.1)
        time.sleep(LEAD_S)  # in which its worker starts
        return query

    @property
    def whole_batch(self) -> str:
        seconds = 2 * LEAD_S + WARM_S + self.seconds + TAIL_S
        return f"{int(seconds * 1000)} milliseconds"

    def produce(self, topic: str) -> int:
        """How many records there are to be measured: on a busy machine fewer than RATE."""
        command = [sys.executable, "-c", PRODUCER, self.address, topic, str(self.seconds)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the producer did not start")
            process.stdin.write("\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if process.wait(60 + self.seconds):
                raise RuntimeError("the producer failed")
            return int(answer)

    def to_noop(self, name: str) -> dict[str, float]:
        from pyspark.sql import functions as F

        made = "CAST(CAST(value AS STRING) AS BIGINT)"
        now = "unix_micros(CAST(reflect('java.time.Instant', 'now') AS TIMESTAMP))"
        rows = (
            self.source(f"bench-{name}")
            .where("key IS NULL")
            .selectExpr(f"({now} - {made} / 1000) / 1000 AS ms")
            .observe(
                "seen",
                F.count("*").alias("rows"),
                F.expr(f"percentile_approx(ms, array{PERCENTILES}, 10000)").alias("ms"),
            )
        )
        live = name == "live"
        trigger = {"realTime": self.whole_batch} if live else {"processingTime": "0 seconds"}
        query = self.start(rows.writeStream.format("noop"), name, trigger)
        try:
            wanted = self.produce(f"bench-{name}")
            deadline = time.monotonic() + 60 + 2 * self.seconds
            while (seen := self._seen(query)) is None or sum(n for n, _ in seen) < wanted:
                if not query.isActive or time.monotonic() > deadline:
                    raise RuntimeError(f"of {wanted} only {seen} were seen: {query.exception()}")
                time.sleep(0.1)
        finally:
            query.stop()
        rows_seen = sum(n for n, _ in seen)
        # Of several micro-batches the mean, by their rows: good enough for what is far away.
        values = [sum(n * ms[i] for n, ms in seen) / rows_seen for i in range(len(PERCENTILES))]
        return {"rows": rows_seen, "batches": len(seen), **_named(values)}

    def _seen(self, query: Any) -> list[tuple[int, list[float]]] | None:
        found = [p["observedMetrics"]["seen"] for p in query.recentProgress if p["numInputRows"]]
        return [(row["rows"], row["ms"]) for row in found if row["rows"]] or None

    def to_kdirect(self) -> dict[str, float]:
        import kdirect

        self.session.admin.create_topic("bench-out", 1)
        writer = (
            self.source("bench-in")
            .select("key", "value")
            .writeStream.format("kdirect")
            .option("kafka.bootstrap.servers", self.address)
            .option("topic", "bench-out")
            .option("exactlyOnce", "false")
        )
        query = self.start(writer, "sink", {"realTime": self.whole_batch})
        took: list[float] = []
        done = threading.Event()

        def consume() -> None:
            with kdirect.Consumer(self.address) as consumer:
                consumer.assign({kdirect.TopicPartition("bench-out", 0): 0})
                while not done.is_set():
                    for message in consumer.consume(1000, 0.1):
                        if message.key() is None:
                            took.append((time.time_ns() - int(message.value())) / 1e6)

        thread = threading.Thread(target=consume)
        thread.start()
        try:
            wanted = self.produce("bench-in")
            deadline = time.monotonic() + 30
            while len(took) < wanted and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            done.set()
            thread.join()
            query.stop()
        if len(took) < wanted:
            raise RuntimeError(
                f"only {len(took)} of {wanted} records came back: {query.exception()}"
            )
        return _percentiles(took)

    def to_a_consumer(self) -> dict[str, float]:
        """Without Spark."""
        self.session.admin.create_topic("bench-floor", 1)
        command = [sys.executable, "-c", CONSUMER, self.address, "bench-floor"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the consumer did not start")
            wanted = self.produce("bench-floor")
            took = json.loads(process.stdout.readline())
        if len(took) < wanted:
            raise RuntimeError(f"only {len(took)} of {wanted} records reached the consumer")
        return _percentiles(took)


def _percentiles(took: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(took, n=1000, method="inclusive")
    return _named([quantiles[int(p * 1000) - 1] for p in PERCENTILES])


def _named(values: list[float]) -> dict[str, float]:
    return {f"p{100 * p:g}": round(v, 3) for p, v in zip(PERCENTILES, values, strict=True)}
