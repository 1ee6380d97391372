"""Real-Time Mode (`trigger(realTime=...)`): how a batch is planned that has no end, and how a task
reads and writes while it lasts.

Law: Spark reaches this through the shim only (`RealTime.scala`), and only where the session has
turned it on.  Planning is `source`'s, what is read is `reading`'s, what is written `sink`'s; here
is what makes them continuous.

A task reads its partitions from where the batch before stopped, and hands out records as they come.
The shim ends a batch at a time, and reports the offset after the last row that Spark took: so rows
carry the offset after them, in two columns that the query does not see.  What was handed out and
not taken is read again in the next batch.  Each batch starts where the one before ended, so between
two batches no record is lost or doubled.

The worker ends by itself shortly before the batch does.  It is then used again, and what it holds
open serves the next batch.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from kdirect.errors import ConfigError, ShimError
from kdirect.model import TopicPartition
from kdirect_spark import placement, worker
from kdirect_spark.clear_errors import sentence_first
from kdirect_spark.counts import present
from kdirect_spark.offsets import OffsetRange, Offsets
from kdirect_spark.reading import RangeReading
from kdirect_spark.settings import SourceSettings
from kdirect_spark.versions import SameVersion

log = logging.getLogger("kdirect_spark")

NO_END = "/real-time"  # the member of an end offset that asks for a plan without one

# A pickle holds a string as its UTF-8 bytes; the shim finds the plan between these, and writes the
# end of the batch over the digits: only when a task begins is it known.
BEGIN, END = "kdirect.real-time[", "]kdirect"
DIGITS = 16

RANGE, NEXT = "__kdirect_range", "__kdirect_next"
COLUMNS = (StructField(RANGE, IntegerType()), StructField(NEXT, LongType()))

NO_STOP = 1 << 62
MARGIN_S = 0.03  # before the end of the batch: a worker that ends in time is used again
HEARTBEAT_S = 0.05  # by which Spark's task notices that it is to be stopped
PACE_S = 300e-6  # between two looks that find records: what comes meanwhile is one batch
FIRST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 500e-6
# How long a broker may wait for a record when it is asked over TCP.  A task of several partitions
# asks for each of them in turn.
LIVE_MS, LIVE_MS_OF_SEVERAL = 40, 2

EXCLUDED = {
    "maxOffsetsPerTrigger": "max_offsets",
    "minOffsetsPerTrigger": "min_offsets",
    "minPartitions": "min_partitions",
    "maxRecordsPerPartition": "max_records",
}


# -- planning ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LivePartition(InputPartition):
    """What one task of a real-time batch reads.  `plan` is for the shim too: when the batch ends
    (ms since 1970; 0 until the shim knows it), and topic, partition, first offset and id of topic
    of each range.  `hosts`: as of `RangePartition`."""

    plan: str
    hosts: str = ""


def has_no_end(end: Mapping[str, Any]) -> bool:
    """Whether the shim asks for a plan of a real-time batch."""
    return NO_END in end


def check(settings: SourceSettings) -> None:
    """ConfigError for an option that has no meaning in Real-Time Mode."""
    for name, attribute in EXCLUDED.items():
        if getattr(settings, attribute) is not None:
            raise ConfigError(
                f"option {name} divides what is there already, but a real-time batch reads what "
                "comes",
                hint="remove it, or use another trigger than realTime",
            )
    if settings.values is not None and settings.values.format == "arrow":
        raise ConfigError(
            "valueFormat=arrow has several rows in a record, and a real-time batch may end between "
            "any two rows",
            hint="use another trigger than realTime, or another valueFormat",
        )


def live_partitions(
    settings: SourceSettings,
    starts: Offsets,
    ids: Mapping[str, str],
    hosts: Mapping[TopicPartition, Sequence[str]],
    *,
    is_empty: bool,
) -> list[InputPartition]:
    """A task for each partition of `starts`, or as many as coalescePartitions says; one that only
    waits if there is none.  With `is_empty` the batch ends before it reads anything."""
    tps = sorted(starts)
    groups = [[i] for i in range(len(tps))] or [[]]
    if settings.coalesce_partitions is not None and tps:
        homes = [tuple(hosts.get(tp, ())) for tp in tps]
        groups = placement.grouped([1] * len(tps), homes, settings.coalesce_partitions)
    return [
        _partition([(tps[i], starts[tps[i]]) for i in group], ids, hosts, is_empty)
        for group in groups
    ]


def _partition(
    starts: Sequence[tuple[TopicPartition, int]],
    ids: Mapping[str, str],
    hosts: Mapping[TopicPartition, Sequence[str]],
    is_empty: bool,
) -> LivePartition:
    plan = {
        "until": f"{int(is_empty):0{DIGITS}d}",
        "ranges": [[*tp, offset, ids.get(tp.topic, "")] for tp, offset in starts],
    }
    near = {tuple(hosts.get(tp, ())) for tp, _ in starts}
    return LivePartition(
        BEGIN + json.dumps(plan) + END,
        placement.marked(near.pop()) if len(near) == 1 else "",
    )


# -- reading -----------------------------------------------------------------------------------


def without_columns(schema: StructType) -> StructType:
    """The row of a query, of which the shim asks for more columns."""
    return StructType(schema.fields[: -len(COLUMNS)])


@sentence_first
class LiveReader(SameVersion, DataSourceStreamReader):
    """What the tasks of a real-time batch read with.  It plans nothing."""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        check(settings)
        self._settings = settings
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LivePartition)
        from pyspark.sql.pandas.types import to_arrow_schema

        rows = LiveRows(to_arrow_schema(self._schema, timezone="UTC"))
        task = LiveTask(self._settings, partition, rows)
        return flushed(task.batches(), worker_stream())


@dataclass(slots=True)
class LiveRows:
    """Batches with the shim's columns.  `schema` has them at its end."""

    schema: pa.Schema
    _nulls: list[pa.Array] = field(init=False)

    def __post_init__(self) -> None:
        self._nulls = [pa.nulls(1, f.type) for f in list(self.schema)[: -len(COLUMNS)]]

    def of(
        self, number: int, batch: pa.RecordBatch, offsets: pa.Array, next_offset: int
    ) -> pa.RecordBatch:
        """`batch` of range `number`; `offsets` are those of its rows' records, and `next_offset` is
        the one to go on from after all of them."""
        import numpy as np

        after = np.empty(len(offsets), np.int64)
        np.add(offsets.to_numpy(zero_copy_only=False), 1, out=after)
        after[-1] = next_offset
        ranges = np.full(len(offsets), number, np.int32)
        columns = [*batch.columns, pa.array(ranges), pa.array(after)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def mark(self, number: int, next_offset: int) -> pa.RecordBatch:
        """A batch that only says how far range `number` was read."""
        marks = [pa.array([-1 - number], pa.int32()), pa.array([next_offset], pa.int64())]
        return pa.RecordBatch.from_arrays([*self._nulls, *marks], schema=self.schema)


class LiveTask:
    """Reads the ranges of a task until its batch ends, each in turn.  For one thread.

    Nothing is read ahead: a record that waits in a queue is late.  A broker that is away is waited
    for as in any batch (`RangeReading`), even beyond the end of this one."""

    def __init__(self, settings: SourceSettings, partition: LivePartition, rows: LiveRows) -> None:
        plan = json.loads(partition.plan.removeprefix(BEGIN).removesuffix(END))
        # By a clock that nobody sets: the other one may be set back meanwhile, or forth.
        left_s = int(plan["until"]) / 1000 - MARGIN_S - time.time()
        self._until = time.monotonic() + left_s
        wait_ms = LIVE_MS if len(plan["ranges"]) == 1 else LIVE_MS_OF_SEVERAL
        self._readings = [
            RangeReading(
                settings,
                OffsetRange(TopicPartition(topic, number), start, NO_STOP),
                topic_id=topic_id or None,
                live_ms=wait_ms,
            )
            for topic, number, start, topic_id in plan["ranges"]
        ]
        self._told = [reading.next_offset for reading in self._readings]
        self._rows = rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Rows as they come, and marks."""
        sources = {i: reading.live_batches() for i, reading in enumerate(self._readings)}
        try:
            yield from self._until_the_end(sources)
            yield from self._marks()
        finally:
            for source in sources.values():
                source.close()
            present().tell()
            worker.settle()

    def _until_the_end(self, sources: dict[int, Any]) -> Iterator[pa.RecordBatch]:
        pause, last = FIRST_PAUSE_S, time.monotonic()
        while time.monotonic() < self._until:
            found = False
            for i, source in list(sources.items()):
                try:
                    rows = next(source)
                except StopIteration:  # it is gone, and failOnDataLoss is false
                    del sources[i]
                    continue
                if rows is None:
                    continue
                found = True
                batch, offsets = rows
                if batch.num_rows:  # not all values may have been good
                    self._told[i] = self._readings[i].next_offset
                    yield self._rows.of(i, batch, offsets, self._told[i])
            if found:
                pause, last = FIRST_PAUSE_S, time.monotonic()
                time.sleep(PACE_S)
                continue
            if time.monotonic() - last >= HEARTBEAT_S:
                last = time.monotonic()
                yield from self._marks(at_least_one=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _marks(self, at_least_one: bool = False) -> Iterator[pa.RecordBatch]:
        """How far ranges were read that were read further than their last rows."""
        for i, reading in enumerate(self._readings):
            if reading.next_offset != self._told[i]:
                self._told[i] = reading.next_offset
                at_least_one = False
                yield self._rows.mark(i, self._told[i])
        if at_least_one:
            yield self._rows.mark(0, self._told[0] if self._told else 0)


# -- the way to Spark --------------------------------------------------------------------------


def worker_stream() -> Any:
    """The stream on which pyspark's worker writes to the JVM.  pyspark flushes it when its buffer
    of 64 KiB is full, and hands it to nobody: it is a variable of the function that called us."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and "outfile" in frame.f_locals:
            return frame.f_locals["outfile"]
        frame = frame.f_back  # type: ignore[assignment]
    raise ShimError(
        "Real-Time Mode does not know the Python worker of this pyspark",
        hint="use another trigger than realTime, or a pyspark that docs/spark.md names",
    )


def flushed(batches: Iterator[pa.RecordBatch], stream: Any) -> Iterator[pa.RecordBatch]:
    """`batches`, each of which reaches the JVM before the next one is made."""
    try:
        for batch in batches:
            yield batch
            stream.flush()
    finally:
        batches.close()  # type: ignore[attr-defined]
