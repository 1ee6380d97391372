"""The Spark rows: how close a batch read comes to the ceiling of Spark's Python data sources.

The ceiling is a source that yields ready Arrow batches of the same shape and schema, decoded
beforehand: what is left is the way through Spark, from the worker's socket to rows in the JVM.  A
second source yields the same ready batches while a thread of its task reads and decodes the same
range and drops it: it shows what reading and decoding cost the JVM beside it in shared cores,
caches and memory, which no connector can give back.  All are read to Spark's noop sink in one
session with one task slot, in turns A B C after a warm-up of each; figures are medians.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from kdirect_spark import session_builder
from kdirect_spark.datasource import KAFKA_ROW

# Bytes of a value, and of all values of a topic: each run takes about a second on the machines the
# target was set on.
SIZES = ((100, 200 << 20), (1024, 1 << 30), (10240, 1 << 30))
QUICK_BYTES = 32 << 20
ROUNDS = (3, 9)


def spark_read_ceiling(seconds: float, quick: bool) -> list[dict[str, Any]]:
    """Rows a second of `spark.read.format("kdirect")` to noop on local[1], against the ceiling."""
    figures = []
    with spark_and_broker() as (spark, address, _):
        spark.dataSource.register(ReadySource)
        for value_bytes, total in SIZES:
            rows = (QUICK_BYTES if quick else total) // value_bytes
            topic = f"bench-{value_bytes}"
            transport = fill(address, topic, rows, value_bytes)
            each_s = seconds / len(SIZES)
            figures.append(
                compare(spark, address, topic, rows, value_bytes, transport, each_s, quick)
            )
    return figures


@contextmanager
def spark_and_broker(
    *,
    slots: int = 1,
    jars: Sequence[Path] = (),
    settings: Mapping[str, str] | None = None,
    in_memory: bool = False,
) -> Iterator[tuple[Any, str, str]]:
    """A session with so many task slots, which has these jars and settings too; the address of a
    broker; and the directory of the broker's log, which checkpoints may use as well.  `in_memory`:
    the directory is in /dev/shm, where there is room for it."""
    shm = "/dev/shm" if in_memory and os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="kdirect-bench-spark-", dir=shm) as directory,
        _Broker(directory) as broker,
    ):
        builder = session_builder("bench", f"local[{slots}]")
        for name, value in {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "2g",
            "spark.log.level": "ERROR",
            **(settings or {}),
        }.items():
            builder = builder.config(name, value)
        if jars:
            shim = builder._options.get("spark.jars", "")
            builder = builder.config("spark.jars", ",".join(filter(None, [shim, *map(str, jars)])))
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        spark = builder.getOrCreate()
        try:
            yield spark, broker.address, directory
        finally:
            spark.stop()


def compare(
    spark: Any,
    address: str,
    topic: str,
    rows: int,
    value_bytes: int,
    transport: str,
    seconds: float,
    quick: bool,
) -> dict[str, Any]:
    ours = (
        spark.read.format("kdirect")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", topic)
        .load()
    )
    ready = (
        spark.read.format("ready-batches")
        .option("address", address)
        .option("topic", topic)
        .option("rows", rows)
    )
    frames = {"ours": ours, "ready": ready.load(), "beside": ready.option("beside", "true").load()}
    runs: dict[str, list[float]] = {name: [] for name in frames}
    for frame in frames.values():
        to_noop(frame)  # opens connections, compiles code
    began = time.monotonic()
    while len(runs["ready"]) < ROUNDS[0] or (
        time.monotonic() - began < seconds and len(runs["ready"]) < ROUNDS[1]
    ):
        for name, frame in frames.items():
            runs[name].append(to_noop(frame))
        if quick:
            break
    value, against, beside = (
        rows / statistics.median(runs[name]) for name in ("ours", "ready", "beside")
    )
    return {
        "row": "spark-read-ceiling",
        "value": value,
        "unit": "rows/s",
        "against": "a Python source that yields the same batches ready",
        "against_value": against,
        "ratio": value / against,
        "settings": {
            "value_bytes": value_bytes,
            "rows": rows,
            "mb_per_s": round(value * value_bytes / 1e6),
            "ratio_to_ready_beside_decoding": round(value / beside, 3),
            "master": "local[1]",
            "transport": transport,
            "runs": len(runs["ready"]),
            "spread": f"{min(runs['ours']):.2f}-{max(runs['ours']):.2f} s,"
            f" ready {min(runs['ready']):.2f}-{max(runs['ready']):.2f} s",
        },
    }


def to_noop(frame: Any) -> float:
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def fill(address: str, topic: str, rows: int, value_bytes: int) -> str:
    """One partition with `rows` records; the transport that reads will take."""
    from kdirect.client.session import connect

    session = connect(address)
    session.admin.create_topic(topic, 1)
    step = min(rows, max(1, (16 << 20) // value_bytes))
    noise = os.urandom(1 << 20) * (step * value_bytes // (1 << 20) + 2)
    values = pa.array(
        [noise[i * value_bytes : (i + 1) * value_bytes] for i in range(step)], pa.binary()
    )
    with session.producer() as producer:
        for start in range(0, rows, step):
            producer.send_arrow(
                pa.record_batch({"value": values.slice(0, min(step, rows - start))}), topic
            )
    return session.transport


class ReadySource(DataSource):
    """Yields decoded batches of the topic over and over until as many rows as the topic has have
    gone out."""

    @classmethod
    def name(cls) -> str:
        return "ready-batches"

    def schema(self) -> Any:
        return KAFKA_ROW

    def reader(self, schema: Any) -> DataSourceReader:
        return _ReadyReader(dict(self.options))


class _ReadyReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left = int(self.options["rows"])
        batches = _ready(self.options["address"], self.options["topic"])
        if self.options.get("beside") == "true":
            threading.Thread(target=self.decode, args=(left,), daemon=True).start()
        while left:
            for batch in batches:
                yield batch if batch.num_rows <= left else batch.slice(0, left)
                left -= min(left, batch.num_rows)
                if not left:
                    break

    def decode(self, rows: int) -> None:
        """Read and decode the range as a task of ours does, and drop it."""
        reader, _ = _reader(self.options["address"], self.options["topic"], rows)
        for _ in reader.batches():
            pass
        reader.close()


_cache: dict[tuple[str, str], list[pa.RecordBatch]] = {}


def _ready(address: str, topic: str) -> list[pa.RecordBatch]:
    """The first batches of the topic as our own reader makes them, decoded once a worker."""
    key = (address, topic)
    if key not in _cache:
        from kdirect_spark import worker

        reader, _ = _reader(address, topic, None)
        _cache[key] = [batch for batch, _ in zip(reader.batches(), range(4), strict=False)]
        worker.settle()
    return _cache[key]


def _reader(address: str, topic: str, rows: int | None) -> tuple[Any, Any]:
    """A reader of the topic with the settings of a task, and its session."""
    from kdirect.client.session import connect
    from kdirect.model import TopicPartition
    from kdirect_spark.settings import source_settings

    settings = source_settings(
        {"kafka.bootstrap.servers": address, "subscribe": topic}, streaming=False
    )
    tp = TopicPartition(topic, 0)
    session = connect(settings.task_client)
    stop = session.watermarks([tp])[tp][1] if rows is None else rows
    return session.reader(tp, 0, stop, target_bytes=settings.batch_bytes), session


class _Broker:
    """`kdirect broker` in a process of its own."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __enter__(self) -> _Broker:
        command = [
            sys.executable,
            "-m",
            "kdirect.cli",
            "broker",
            "--listeners",
            "127.0.0.1:0",
            "--log-dirs",
            os.path.join(self.directory, "log"),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"ready on (\S+)", line)
        if match is None:
            raise RuntimeError(f"the broker did not start: {line!r}")
        self.address = match[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
