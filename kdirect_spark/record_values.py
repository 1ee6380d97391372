"""Rows of the columns of values for a task, where more of a record counts than the state engine
reads: nested columns, Kafka's columns beside the value's, values that do not decode as rows.

Owns: `RecordValues`, one of the ways in which `reading` reads a range.  Records come as rows of
Kafka's; a `Decoder` of the format makes columns of their values.

A value that does not decode is, by valueMode, a row without a value (PERMISSIVE), no row
(DROPMALFORMED) or the end of the query (FAILFAST).  A null value, a tombstone, is a row without a
value in PERMISSIVE and no row in the other modes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdirect.format.bad_values import SAMPLES, BadRow, Dropped, DropReason, error_of
from kdirect.format.typed_values import ArrowValues, JsonValues
from kdirect_spark.record_times import check_times
from kdirect_spark.registry import registry
from kdirect_spark.rows import VALUE_REASONS, Rows, TaskRange, in_parts
from kdirect_spark.value_decoders import Bad, Decoded, Decoder, EngineValues, FixedValues
from kdirect_spark.values import ValueSettings

HINT = (
    "correct what the producer writes, or the schema that it is read with; valueMode=DROPMALFORMED "
    "drops such records and counts them, valueMode=PERMISSIVE makes rows of nulls of them"
)


class RecordValues(Rows):
    """The columns of values, and of their records."""

    reasons = VALUE_REASONS

    def __init__(self, given: TaskRange) -> None:
        settings, values = given.settings, given.settings.values
        assert values is not None
        schema = values.arrow_row(settings.columns)
        read = {values.metadata.get(field.name) for field in schema}
        self._tp = given.tp
        self._values = values
        self._batch_bytes = settings.batch_bytes
        self._schema = schema
        self._of_value = values.decoded(settings.columns)
        self._decoder = decoder_of(values, self._of_value)
        self._session = given.session
        self._check_times = "timestamp" in read
        super().__init__(given.reader(include_headers="headers" in read), Dropped())

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        for batch in self._reader:
            if batch.num_rows:
                yield from in_parts(self._rows(batch)[0], 2 * self._batch_bytes)

    def live_batches(self) -> Generator[tuple[pa.RecordBatch, pa.Array] | None, None, None]:
        for batch in self._reader.live_batches():
            found = None if batch is None else self._rows(batch)
            yield found if found is not None and found[0].num_rows else None

    def _rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
        """The rows of these records, and the offsets of their records."""
        if self._check_times:
            check_times(self._session, self._tp, batch)
        values = batch.column("value")
        found = self._decoded(values)
        if found.bad:
            self._note(found.bad, batch.column("offset"))
        if values.null_count:
            self.dropped.add(DropReason.NULL_VALUE, values.null_count)
        if self._values.mode == "PERMISSIVE" and (found.bad or values.null_count):
            self._with_nulls(found, values)
        return self._assembled(found, batch), batch.column("offset").take(pa.array(found.records))

    def _decoded(self, values: pa.Array) -> Decoded:
        """`records` of it, and of what is bad, are rows of the batch."""
        if not values.null_count:
            return self._decoder.decode(values)
        there = pc.indices_nonzero(values.is_valid()).to_numpy().astype(np.int64)
        found = self._decoder.decode(values.drop_null())
        found.records = there[found.records]
        for row in found.bad:
            row.record = int(there[row.record])
        return found

    def _note(self, bad: list[Bad], offsets: pa.Array) -> None:
        samples = [
            BadRow(offsets[row.record].as_py(), DropReason.NOT_DECODED, row.field, row.why)
            for row in bad[:SAMPLES]
        ]
        if self._values.mode == "FAILFAST":
            error = error_of(self._tp, samples[0])
            error.hint = HINT
            raise error
        found = Dropped()
        found.add(DropReason.NOT_DECODED, len(bad), samples)
        self.dropped.merge(found)

    def _with_nulls(self, found: Decoded, values: pa.Array) -> None:
        """Give the values that are null or bad rows of their own."""
        none = pc.indices_nonzero(values.is_null()).to_numpy().astype(np.int64)
        missing = np.concatenate([none, np.array([row.record for row in found.bad], np.int64)])
        records = np.concatenate([found.records, missing])
        order = np.argsort(records, kind="stable")
        place = pa.array(order, mask=order >= len(found.records))
        found.columns = [column.take(place) for column in found.columns]
        found.records = records[order]

    def _assembled(self, found: Decoded, batch: pa.RecordBatch) -> pa.RecordBatch:
        decoded = dict(zip(self._of_value, found.columns))
        records = found.records
        is_whole = len(records) == batch.num_rows and bool(
            (records == np.arange(batch.num_rows)).all()
        )
        where = pa.array(records)
        columns = []
        for field in self._schema:
            kafkas = self._values.metadata.get(field.name)
            if kafkas is not None:
                column = batch.column(kafkas)
                column = column if is_whole else column.take(where)
            elif field.name == self._values.corrupt:
                column = self._raw(found.bad, batch.column("value"), records, field.type)
            else:
                column = decoded[field.name]
            columns.append(column if column.type == field.type else pc.cast(column, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _raw(
        self, bad: list[Bad], values: pa.Array, records: np.ndarray, kind: pa.DataType
    ) -> pa.Array:
        """The value where it is bad, null where it is not."""
        gone = {row.record for row in bad}
        raw = [values[i].as_py() if i in gone else None for i in records.tolist()] if gone else []
        if not raw:
            return pa.nulls(len(records), kind)
        if pa.types.is_string(kind):
            raw = [None if v is None else v.decode("utf-8", "replace") for v in raw]
        return pa.array(raw, kind)


def decoder_of(values: ValueSettings, columns: Sequence[str]) -> Decoder:
    """What decodes these columns of values."""
    if values.avro is not None:
        from kdirect_spark.avro_schema import AvroSchema
        from kdirect_spark.avro_values import AvroValues, schemas_of

        source = values.avro
        reader = AvroSchema(source.reader, source.what, source.references)
        return AvroValues(
            reader,
            columns,
            writer=None
            if source.writer is None
            else AvroSchema(source.writer, "option avroWriterSchema"),
            framed=values.framed,
            by_id=schemas_of(registry(values.registry)) if values.registry else None,
        )
    if values.protobuf is not None:
        from kdirect_spark.protobuf_values import ProtobufMessage, ProtobufValues

        of = values.protobuf
        message = ProtobufMessage(of.descriptors, of.message, of.what)
        return ProtobufValues(message, columns, framed=values.framed)
    kinds = {f.name: f for f in values.fields}
    if values.layout is not None:
        return FixedValues(values.layout, [kinds[name] for name in columns])
    flat = [kinds.get(name) for name in columns]
    targets = values.arrow_row(columns)
    schema = pa.schema(
        [field.arrow if field is not None else targets.field(name)
         for name, field in zip(columns, flat)]
    )  # fmt: skip
    found: JsonValues | ArrowValues
    if values.format == "json":
        found = JsonValues(schema)
    else:
        whole = [field.arrow for field in values.fields if field.name != values.corrupt]
        found = ArrowValues(schema, pa.schema(whole))
    return EngineValues(found, flat, framed=values.framed)
