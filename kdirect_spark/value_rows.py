"""Rows of the columns of values, for a task.

Owns: `ValueRows`, which reads by the state engine's source, so that both engines pay the same
decoding.  It casts where Spark has no such type, drops what Spark cannot hold, and cuts batches to
their size; what a task does with its rows is in `reading`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kdirect.errors import BadValueError
from kdirect.format.bad_values import SAMPLES, BadRow, Dropped, DropReason, error_of
from kdirect.model import TopicPartition
from kdirect.state.source import BLOCK_BYTES, Block, TopicSource
from kdirect_spark.settings import SourceSettings
from kdirect_spark.values import as_spark_takes, misfits

MOST_ROWS = 1 << 16  # of a batch
# Why a value gives no row here, where no event time is read and nothing is kept.
REASONS = (DropReason.NULL_VALUE, DropReason.WRONG_SIZE, DropReason.NOT_DECODED)


class ValueRows:
    """The columns of values, decoded by the state engine's source."""

    def __init__(
        self, settings: SourceSettings, session: Any, tp: TopicPartition, start: int, stop: int
    ) -> None:
        values = settings.values
        assert values is not None
        self._tp = tp
        self._values = values
        self._fields = values.chosen(settings.columns)
        self._schema = values.arrow_row(settings.columns)
        self._batch_bytes = settings.batch_bytes
        if values.layout is None:
            # A value takes about as many bytes as its columns.
            block_rows, block_bytes = MOST_ROWS, settings.batch_bytes
        else:
            width = sum(values.layout.field(field.name).kind.width for field in self._fields)
            block_rows = min(max(settings.batch_bytes // width, 1), MOST_ROWS)
            block_bytes = BLOCK_BYTES
        self._source = TopicSource(
            session,
            values.input(tp.topic),
            tp,
            start,
            stop,
            columns=[field.name for field in self._fields],
            block_rows=block_rows,
            block_bytes=block_bytes,
        )

    @property
    def dropped(self) -> Dropped:
        return self._source.dropped

    @property
    def next_offset(self) -> int:
        return self._source.next_offset

    @property
    def transport(self) -> str:
        return self._source.transport

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        try:
            for block in self._source.blocks():
                if block.rows:
                    yield from self._cut(self._batch(block))
        except BadValueError as e:
            e.hint = (
                "correct what the producer writes, or valueSchema; valueMode=PERMISSIVE drops such "
                "records and counts them"
            )
            raise

    def _batch(self, block: Block) -> pa.RecordBatch:
        columns = [block.columns[field.name] for field in self._fields]
        found = [misfits(field.type, column) for field, column in zip(self._fields, columns)]
        if any(mask is not None for mask in found):
            good = self._without(found, pa.array(block.offsets))
            columns = [pc.filter(column, good) for column in columns]
        taken = [as_spark_takes(f.type, column) for f, column in zip(self._fields, columns)]
        return pa.RecordBatch.from_arrays(taken, schema=self._schema)

    def _without(self, found: list[pa.Array | None], offsets: pa.Array) -> pa.Array:
        """Drop the rows that Spark cannot hold, of which `found` has a mask for each field.  The
        mask of the others."""
        bad: list[BadRow] = []
        good = pa.repeat(True, len(offsets))
        for field, mask in zip(self._fields, found):
            if mask is None:
                continue
            why = f"it is no timestamp in microseconds of 64 bits, as Spark's are ({field.type})"
            for offset in pc.filter(offsets, pc.and_(mask, good))[:SAMPLES].to_pylist():
                bad.append(BadRow(offset, DropReason.NOT_DECODED, field.name, why))
            good = pc.and_not(good, mask)
        bad.sort(key=lambda row: row.offset)
        if self._values.mode == "FAILFAST":
            raise error_of(self._tp, bad[0])
        dropped = Dropped()
        dropped.add(DropReason.NOT_DECODED, good.false_count, bad)
        self._source.dropped.merge(dropped)
        return good

    def _cut(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """`batch` in parts of about arrowBatchBytes: a value in Arrow may have any number of
        rows."""
        rows = batch.num_rows
        parts = max(1, min(rows, batch.nbytes // self._batch_bytes))
        each = -(-rows // parts)
        for start in range(0, rows, each):
            yield batch.slice(start, each)

    def statistics(self) -> dict[str, int]:
        counts = self._source.dropped.counts
        return self._source.statistics() | {r.value: counts.get(r, 0) for r in REASONS}

    def close(self) -> None:
        self._source.close()
