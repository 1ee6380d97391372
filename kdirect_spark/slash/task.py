"""What a task of an accelerated query does: it is an executor of the state engine for one batch.

Law: all state is mapped by the executor, none is kept in the worker's process, which may be another
one in the next batch.  What is kept from task to task are the connections to the brokers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect import metrics
from kdirect.errors import FormatError, StateProtocolError
from kdirect.format.bad_values import DropReason
from kdirect.state.visitor import Visit, visit
from kdirect_spark import worker
from kdirect_spark.clear_errors import guarded
from kdirect_spark.slash.batch_service import ask
from kdirect_spark.slash.control_row import COLUMN, BatchRow, ControlRow, row_of
from kdirect_spark.values import as_spark_takes, misfits

log = logging.getLogger("kdirect_spark")

CHUNK_ROWS = 1 << 14
# Of a chunk, which is one row in the JVM: no row may have 2 GiB there, and a few have to fit.
CHUNK_BYTES = 16 << 20
CHUNK = "chunk"  # the column of their numbers, by which they are dealt in the exchange
FIGURES = "figures"  # the column of figures of a batch; null in chunks of the result
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


class Chunks:
    """Makes rows of Spark of the engine's rows: each holds up to CHUNK_ROWS of them, or about
    CHUNK_BYTES, as an array of each column.

    Between the tasks and the exchange, Spark works row by row.  It takes a third less for the whole
    way of a row when it moves arrays and takes them apart behind the exchange
    (`kdirect_spark.slash.frames`).  `schema` is Arrow's: the number of the chunk, the columns, the
    figures; `kinds` are the engine's types of the columns.  A column whose type is no list there
    has one value for all rows of a chunk: those of tumbling and sliding windows, which the engine
    gives one after the other."""

    def __init__(self, schema: pa.Schema, kinds: Sequence[str]) -> None:
        self._schema = schema
        self._kinds = tuple(kinds)
        fields = list(schema)[1:-1]
        self._constant = [i for i, field in enumerate(fields) if not pa.types.is_list(field.type)]

    def of(self, batch: pa.RecordBatch, numbers: Iterator[int]) -> pa.RecordBatch:
        """Chunks of rows of the result, each with the next of `numbers`.  Columns are copied only
        where Spark's type of them is another one."""
        number, *fields, figures = self._schema
        taken = [
            _list_as_spark_takes(kind, column, field.type.value_type)
            if kind.startswith("list<")
            else _as_spark_takes(kind, column)
            for kind, column, field in zip(self._kinds, batch.columns, fields)
        ]
        offsets = pa.array(_ends(batch, [batch.column(i) for i in self._constant]), pa.int32())
        rows = len(offsets) - 1
        columns = [pa.array([next(numbers) for _ in range(rows)], number.type)]
        for i, (values, field) in enumerate(zip(taken, fields)):
            columns.append(
                values.take(offsets[:-1])
                if i in self._constant
                else pa.ListArray.from_arrays(offsets, values, type=field.type)
            )
        columns.append(pa.nulls(rows, figures.type))
        return pa.record_batch(columns, schema=self._schema)

    def figures(self, visit: Visit) -> pa.RecordBatch:
        """The row of figures, which executor 0 gives."""
        found = figures_of(visit.batch, visit.counts, visit.closes)
        number, *fields, figures = self._schema
        columns = [pa.array([0], number.type)]
        for field in fields:
            columns.append(pa.array([[] if pa.types.is_list(field.type) else 0], field.type))
        return pa.record_batch([*columns, pa.array([found], figures.type)], schema=self._schema)


def _ends(batch: pa.RecordBatch, constant: Sequence[pa.Array]) -> list[int]:
    """Where the chunks of a batch begin and end: the columns of `constant`, which are times, do not
    change within one, and a chunk whose rows are wide has fewer of them."""
    is_wide = batch.nbytes > CHUNK_BYTES
    ends = [0]
    for end in _changes(batch.num_rows, constant):
        while ends[-1] < end:
            rows = min(CHUNK_ROWS, end - ends[-1])
            while is_wide and rows > 1 and batch.slice(ends[-1], rows).nbytes > CHUNK_BYTES:
                rows //= 2
            ends.append(ends[-1] + rows)
    return ends


def _changes(rows: int, constant: Sequence[pa.Array]) -> list[int]:
    """The ends of the runs of equal rows."""
    changes = np.zeros(max(0, rows - 1), np.bool_)
    for column in constant:
        values = column.view(pa.int64()).to_numpy()
        changes |= values[1:] != values[:-1]
    return [*(np.flatnonzero(changes) + 1).tolist(), rows]


def _as_spark_takes(kind: str, column: pa.Array) -> pa.Array:
    """A column as Spark takes it.  FormatError where it has a time that Spark cannot hold: Spark's
    own plan never sees such rows, which its source drops, but the engine has merged them."""
    if misfits(kind, column) is not None:
        raise FormatError(
            f"a result of the type {kind} is no timestamp in microseconds of 64 bits, as Spark's"
            " are",
            hint="leave records with such times out, by a condition below the aggregate or join",
        )
    return as_spark_takes(kind, column)


def _list_as_spark_takes(kind: str, column: pa.ListArray, wanted: pa.DataType) -> pa.ListArray:
    """A column of lists as Spark takes it.  No list is null: a group without values has an empty
    one.  Arrow's own cast of lists refuses nanoseconds that are no whole microseconds."""
    values = _as_spark_takes(kind.removeprefix("list<").removesuffix(">"), column.values)
    return pa.ListArray.from_arrays(column.offsets, values, type=wanted)


def _iso(time_us: int) -> str:
    """A time as Spark writes its watermarks, but with microseconds."""
    since = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=time_us)
    return since.isoformat(timespec="microseconds").replace("+00:00", "Z")


def run_task(source: dict[str, Any], chunks: Chunks) -> Any:
    """The function for `mapInArrow`: control rows in, chunks of the result out.  `source`: the
    settings of the clients, whose connections are kept."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for text in batch.column(COLUMN).to_pylist():
                yield from _visit(row_of(text), source, chunks)

    return guarded(run)


def _visit(
    row: ControlRow | BatchRow, source: dict[str, Any], chunks: Chunks
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
    numbers = count(found.executor, executors)
    try:
        for batch in found.rows:
            if batch.num_rows:
                yield chunks.of(batch, numbers)
        if found.executor == 0:
            yield chunks.figures(found)
    finally:
        worker.settle()
