"""Bench row of accelerated queries: what a batch with next to no records takes, beside a bare
barrier batch of Spark.

The bare one has the same shape and does nothing: a Python source that gives a row a task,
`mapInArrow(barrier=True)`, an exchange, a noop sink.  Both are measured by what Spark says that
their micro-batches took, the first few of each run left out, and run in turn, round after round;
checkpoints are on tmpfs.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadMaxRows, SupportsTriggerAvailableNow
from rows_slash import EXECUTORS, PARTITIONS
from rows_slash_spark import CHECKPOINTS, ROUNDS, spark_session
from sides import Figure, figure, spread_of

import kdirect
import kdirect.workloads
from kdirect_spark import slash
from kdirect_spark.slash import workload_queries

BATCHES, QUICK_BATCHES, WARMING = 40, 8, 5
RECORDS = 4  # of a batch, one a partition


class BareSource(DataSource):
    """Gives a row to each task of each micro-batch."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> str:
        return "control string"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return BareReader(int(self.options["batches"]))


class BareReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, batches: int) -> None:
        self._batches = batches

    def initialOffset(self) -> dict:
        return {"n": 0}

    def getDefaultReadLimit(self) -> Any:
        return ReadMaxRows(1)

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def latestOffset(self, start: dict, limit: Any) -> dict:
        return {"n": min(start["n"] + 1, self._batches)}

    def reportLatestOffset(self) -> dict | None:
        return None

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        return [InputPartition(task) for task in range(EXECUTORS)]

    def commit(self, end: dict) -> None:
        pass

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"control": pa.array(["row"])})


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def batch_ms(frame: Any) -> float:
    """Milliseconds of a micro-batch, the median of a run."""
    directory = tempfile.mkdtemp(prefix="kdirect-bench-checkpoint-", dir=CHECKPOINTS)
    try:
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", directory)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        took = [p["durationMs"]["triggerExecution"] for p in query.recentProgress]
        return float(statistics.median(took[WARMING:]))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def slash_empty(seconds: float, quick: bool) -> list[Figure]:
    """Batches of four records, beside batches in which nothing is done."""
    batches = QUICK_BATCHES if quick else BATCHES
    workload = kdirect.workloads.ysb(keys=1_000, step_us=2000)
    (stream,) = workload.streams.values()
    ours, theirs = [], []
    with kdirect.Broker() as broker, tempfile.TemporaryDirectory(dir=CHECKPOINTS) as state:
        bootstrap = broker.bootstrap_servers
        with kdirect.connect(bootstrap) as session:
            kdirect.workloads.write(
                session, stream, "empty", records=RECORDS * batches, partitions=PARTITIONS
            )
        spark = spark_session()
        spark.dataSource.register(BareSource)
        try:
            for number in range(1 if quick else ROUNDS):
                bare = spark.readStream.format("bare").option("batches", str(batches)).load()
                bare = bare.mapInArrow(_unchanged, "control string", barrier=True)
                theirs.append(batch_ms(bare.repartition(EXECUTORS, "control")))
                frame = workload_queries.data_frame(
                    lambda: spark.readStream,
                    "ysb",
                    {"ysb": stream.layout},
                    {"ysb": "empty"},
                    bootstrap,
                    {"maxOffsetsPerTrigger": str(RECORDS)},
                )
                directory = Path(state, str(number))
                ours.append(batch_ms(slash.accelerate(frame, stateDir=directory)))
        finally:
            spark.stop()
    return [
        figure(
            "slash-empty",
            statistics.median(ours),
            "ms a batch",
            "a bare mapInArrow(barrier=True) batch",
            statistics.median(theirs),
            records=RECORDS,
            tasks=EXECUTORS,
            batches=batches,
            lower_is_better=True,
            **spread_of(ours, theirs),
        )
    ]
