"""What a task of an accelerated query does: it is an executor of the state engine for one batch.

Law: all state is mapped by the executor, none is kept in the worker's process, which may be another
one in the next batch.  What is kept from task to task are the connections to the brokers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from kdirect.errors import StateProtocolError
from kdirect.format.bad_values import DropReason
from kdirect.state.visitor import Visit, visit
from kdirect_spark import worker
from kdirect_spark.slash.control_row import COLUMN, ControlRow
from kdirect_spark.slash.spark_types import quoted

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
FIGURES_DDL = (
    f"{FIGURES} struct<batch:bigint,{','.join(f'{name}:bigint' for name in COUNTS)},"
    "dropped:bigint,watermark:timestamp>"
)


class Rows:
    """Makes Spark's columns of the engine's rows.  `outputs`: (name, DDL, nullable) of each."""

    def __init__(self, outputs: Sequence[tuple[str, str, bool]]) -> None:
        self._outputs = list(outputs)
        self._schema: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """Of all columns, the figures last."""
        if self._schema is None:
            from pyspark.sql.pandas.types import to_arrow_schema
            from pyspark.sql.types import StructType

            declared = ", ".join(f"{quoted(name)} {ddl}" for name, ddl, _ in self._outputs)
            spark = StructType.fromDDL(f"{declared}, {FIGURES_DDL}")
            self._schema = to_arrow_schema(spark, timezone="UTC")
        return self._schema

    def __getstate__(self) -> dict[str, Any]:
        return {"_outputs": self._outputs, "_schema": None}

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the result."""
        schema = self.schema
        columns = [
            column if column.type == field.type else _cast(column, field.type)
            for column, field in zip(batch.columns, schema)
        ]
        figures = schema.field(FIGURES).type
        return pa.record_batch([*columns, pa.nulls(batch.num_rows, figures)], schema=schema)

    def figures(self, visit: Visit) -> pa.RecordBatch:
        """The row of figures, which executor 0 gives."""
        counts = visit.counts
        found: dict[str, Any] = {name: counts.get(count, 0) for name, count in COUNTS.items()}
        found["batch"] = visit.batch
        found["dropped"] = sum(counts.get(reason.value, 0) for reason in DropReason)
        found["watermark"] = None if visit.closes is None else visit.closes
        schema = self.schema
        columns = [_nothing(field.type, nullable) for field, (_, _, nullable) in
                   zip(schema, self._outputs)]  # fmt: skip
        figures = pa.array([found], schema.field(FIGURES).type)
        return pa.record_batch([*columns, figures], schema=schema)


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(column.type) and pa.types.is_timestamp(wanted):
        # Nanoseconds are cut down, as the engine's windows do.
        return column.cast(pa.timestamp("us"), safe=False).cast(wanted)
    return column.cast(wanted)


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
                yield from _visit(ControlRow.from_text(text), source, rows)

    return run


def _visit(row: ControlRow, source: dict[str, Any], rows: Rows) -> Iterator[pa.RecordBatch]:
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    if len(context.getTaskInfos()) != row.settings.executors:
        raise StateProtocolError(
            f"the stage of an accelerated query has {len(context.getTaskInfos())} tasks, and not"
            f" {row.settings.executors}",
            hint="nothing may stand between slash.accelerate and its source",
        )
    worker.keep_session(source)
    found = visit(
        row.settings, batch=row.batch, task=row.task, start=int(context.taskAttemptId()) + 1
    )
    try:
        for batch in found.batches():
            if batch.num_rows:
                yield rows.of(batch)
        if found.executor == 0:
            yield rows.figures(found)
    finally:
        worker.settle()
