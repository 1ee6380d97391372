"""What a task of an accelerated query does: it is an executor of the state engine for one batch.

Law: all state is mapped by the executor, none is kept in the worker's process, which may be another
one in the next batch.  What is kept from task to task are the connections to the brokers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from kdirect.errors import StateProtocolError
from kdirect_spark import worker
from kdirect_spark.slash.control_row import COLUMN, ControlRow

log = logging.getLogger("kdirect_spark")

METRICS = "slash_metrics"  # the column of figures; null in rows of the result


def run_task(source: dict[str, Any], rows: Callable[[pa.RecordBatch], pa.RecordBatch]) -> Any:
    """The function for `mapInArrow`: control rows in, result rows out.  `source`: the settings of
    the clients, whose connections are kept; `rows` makes Spark's columns of the engine's."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for text in batch.column(COLUMN).to_pylist():
                yield from _visit(ControlRow.from_text(text), source, rows)

    return run


def _visit(
    row: ControlRow, source: dict[str, Any], rows: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    from pyspark import BarrierTaskContext

    from kdirect.state.visitor import visit

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
                yield rows(batch)
    finally:
        worker.settle()
