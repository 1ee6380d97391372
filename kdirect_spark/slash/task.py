"""What a task of an accelerated query does: it is an executor of the state engine for one batch.

Law: all state is mapped by the executor, none is kept in the worker's process, which may be another
one in the next batch.  What is kept from task to task are the connections to the brokers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa

from kdirect import metrics
from kdirect.errors import StateProtocolError
from kdirect.format.bad_values import DropReason
from kdirect.state.visitor import Visit, visit
from kdirect_spark import worker
from kdirect_spark.slash.batch_service import ask
from kdirect_spark.slash.control_row import COLUMN, BatchRow, ControlRow, row_of
from kdirect_spark.values import as_spark_takes

log = logging.getLogger("kdirect_spark")

FIGURES = "figures"  # the column of figures of a batch; null in rows of the result
# Names in the figures, and where they come from: counts of the engine (docs/metrics.md, state).
COUNTS = {
    "rows": "rows",
    "rows_out": "rows_out",
    "late": "late",
    "keys": "keys",
    "bytes_written": "sent_bytes",
    "credit_waits": "credit_waits",
    "merged": "merged",
    "epochs": "epochs",
    "input_bytes": "input_bytes",
    "state_bytes": "state_bytes",
}
assert {"batch", "dropped", "watermark", *COUNTS} == metrics.names("slash")
FIGURES_DDL = (
    f"{FIGURES} struct<batch:bigint,{','.join(f'{name}:bigint' for name in COUNTS)},"
    "dropped:bigint,watermark:string>"
)


def figures_of(batch: int, counts: Mapping[str, int], closes: int | None) -> dict[str, Any]:
    """The figures of a batch, by their names."""
    found: dict[str, Any] = {"batch": batch}
    found |= {name: counts.get(count, 0) for name, count in COUNTS.items()}
    found["dropped"] = sum(counts.get(reason.value, 0) for reason in DropReason)
    found["watermark"] = None if closes is None else _iso(closes)
    return found


class Rows:
    """Makes Spark's columns of the engine's rows.  `schema` is Arrow's of all columns, as Spark
    takes them, the figures last; `kinds` are the engine's types of the others, and `nullable` says
    of each whether it may be null."""

    def __init__(self, schema: pa.Schema, kinds: Sequence[str], nullable: Sequence[bool]) -> None:
        self._schema = schema
        self._kinds = tuple(kinds)
        self._nullable = tuple(nullable)

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the result."""
        schema = self._schema
        columns = [
            column.cast(field.type) if kind.startswith("list<") else as_spark_takes(kind, column)
            for kind, column, field in zip(self._kinds, batch.columns, schema)
        ]
        figures = schema.field(FIGURES).type
        return pa.record_batch([*columns, pa.nulls(batch.num_rows, figures)], schema=schema)

    def figures(self, visit: Visit) -> pa.RecordBatch:
        """The row of figures, which executor 0 gives."""
        found = figures_of(visit.batch, visit.counts, visit.closes)
        schema = self._schema
        columns = [
            _nothing(field.type, nullable) for field, nullable in zip(schema, self._nullable)
        ]
        figures = pa.array([found], schema.field(FIGURES).type)
        return pa.record_batch([*columns, figures], schema=schema)


def _iso(time_us: int) -> str:
    """A time as Spark writes its watermarks, but with microseconds."""
    since = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=time_us)
    return since.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nothing(kind: pa.DataType, nullable: bool) -> pa.Array:
    """A value for the row of figures, which nobody reads; not null where the column may not be."""
    if nullable:
        return pa.nulls(1, kind)
    if pa.types.is_list(kind):
        return pa.array([[]], kind)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.array([""]).cast(kind)
    if pa.types.is_boolean(kind):
        return pa.array([False])
    return pa.array([0]).cast(kind)


def run_task(source: dict[str, Any], rows: Rows) -> Any:
    """The function for `mapInArrow`: control rows in, result rows out.  `source`: the settings of
    the clients, whose connections are kept."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for text in batch.column(COLUMN).to_pylist():
                yield from _visit(row_of(text), source, rows)

    return run


def _visit(
    row: ControlRow | BatchRow, source: dict[str, Any], rows: Rows
) -> Iterator[pa.RecordBatch]:
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    tasks = len(context.getTaskInfos())
    executors = row.executors if isinstance(row, BatchRow) else row.settings.executors
    if tasks != executors:
        raise StateProtocolError(
            f"the stage of an accelerated query has {tasks} tasks, and not {executors}",
            hint="nothing may stand between slash.accelerate and its source",
        )
    worker.keep_session(source)
    settings = ask(row) if isinstance(row, BatchRow) else row.settings
    batch = 0 if isinstance(row, BatchRow) else row.batch
    start = int(context.taskAttemptId()) + 1
    found = visit(settings, batch=batch, task=row.task, start=start)
    try:
        for batch in found.rows:
            if batch.num_rows:
                yield rows.of(batch)
        if found.executor == 0:
            yield rows.figures(found)
    finally:
        worker.settle()
