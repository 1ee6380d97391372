"""Rows of the columns of values, for a task.

Owns: `ValueRows`, which reads by the state engine's source, so that both engines pay the same
decoding.  It casts where Spark has no such type, drops what Spark cannot hold, and cuts batches to
their size; what a task does with its rows is in `reading`.
"""

from __future__ import annotations

from collections.abc import Generator

import pyarrow as pa
import pyarrow.compute as pc

from kdirect.errors import BadValueError
from kdirect.format.bad_values import SAMPLES, BadRow, Dropped, DropReason, error_of
from kdirect.state.source import BLOCK_BYTES, Block, TopicSource
from kdirect_spark.rows import VALUE_REASONS, Rows, TaskRange, in_parts
from kdirect_spark.values import as_spark_takes, misfits

MOST_ROWS = 1 << 16  # of a batch


class ValueRows(Rows):
    """The columns of values, decoded by the state engine's source."""

    reasons = VALUE_REASONS

    def __init__(self, given: TaskRange) -> None:
        settings, values = given.settings, given.settings.values
        assert values is not None
        self._tp = given.tp
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
            given.session,
            values.input(given.tp.topic),
            given.tp,
            given.start,
            given.stop,
            columns=[field.name for field in self._fields],
            block_rows=block_rows,
            block_bytes=block_bytes,
            topic_id=given.topic_id,
            live_ms=given.live_ms,
        )
        super().__init__(self._source, self._source.dropped)

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        for found in self.live_batches():
            if found is not None:
                # A value in Arrow may have any number of rows.
                yield from in_parts(found[0], self._batch_bytes)

    def live_batches(self) -> Generator[tuple[pa.RecordBatch, pa.Array] | None, None, None]:
        try:
            for block in self._source.blocks():
                yield self._batch(block) if block.rows else None
        except BadValueError as e:
            e.hint = (
                "correct what the producer writes, or valueSchema; valueMode=DROPMALFORMED drops "
                "such records and counts them"
            )
            raise

    def _batch(self, block: Block) -> tuple[pa.RecordBatch, pa.Array]:
        """Rows, and the offsets of their records."""
        columns = [block.columns[field.name] for field in self._fields]
        offsets = pa.array(block.offsets)
        found = [misfits(field.type, column) for field, column in zip(self._fields, columns)]
        if any(mask is not None for mask in found):
            good = self._without(found, offsets)
            offsets = pc.filter(offsets, good)
            columns = [pc.filter(column, good) for column in columns]
        taken = [as_spark_takes(f.type, column) for f, column in zip(self._fields, columns)]
        return pa.RecordBatch.from_arrays(taken, schema=self._schema), offsets

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
        self.dropped.merge(dropped)
        return good
