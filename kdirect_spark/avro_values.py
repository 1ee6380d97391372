"""Values in Avro become columns, by fastavro.

Owns: `AvroValues`.  A value is one datum, to its last byte.  With Confluent's frame each value
names the schema that it was written by, and is resolved to the reader's as Avro prescribes: by
names, aliases, promotions and defaults.

Law: no I/O but for schemas by their ids.  fastavro reads the values one by one, in C; Arrow makes
columns of what it gives.  Libraries that read whole blocks into Arrow are eight times as fast, but
those that there are never return from a value that is cut short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdirect.errors import ConfigError, UnknownSchemaError
from kdirect_spark.avro_schema import AvroSchema, fastavro
from kdirect_spark.registry import FRAME, NO_FRAME, Registry, schema_id
from kdirect_spark.value_decoders import Bad, Decoded, halving, joined

CHUNK = 2048  # values of which Python objects are held at a time: more slow its collector down

PAD = b"\0"  # after a value: what ends too soon reads it

SchemaOf = Callable[[int], AvroSchema]  # raises UnknownSchemaError


def schemas_of(client: Registry) -> SchemaOf:
    """The Avro schemas of a registry, by id."""

    def found(number: int) -> AvroSchema:
        written = client.by_id(number)
        what = f"schema {number} of {client.settings.url}"
        if written.kind != "AVRO":
            raise ConfigError(f"{what} is of type {written.kind}", hint="see valueFormat")
        return AvroSchema(written.text, what, [text for _, text in written.references])

    return found


class _Whole(BytesIO):
    """A value that raises at its end."""

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        if len(found) != size:
            raise EOFError(f"{size} bytes are expected, and {len(found)} are left")
        return found


def _padded(value: bytes) -> BytesIO:
    return BytesIO(value + PAD)


class _Writer(NamedTuple):
    """A schema by which values were written, for fastavro, and how a value is opened for it.

    Where fastavro skips what is not wanted, it does not see the end of a value.  Fields that are
    missing there have read PAD.  Of an array with items of a known size, a few bytes may promise
    2^62 items, each of which it would skip: there all reads are looked at, which takes twice as
    long for the value."""

    schema: Any
    opened: Callable[[bytes], BytesIO]


class AvroValues:
    """Reads `columns` of values by the schema `reader`.  `writer`: the schema that all values were
    written by; or `framed`, and `by_id` gives the schema of an id, if it is not `writer` for
    all."""

    def __init__(
        self,
        reader: AvroSchema,
        columns: Iterable[str],
        *,
        writer: AvroSchema | None = None,
        framed: bool = False,
        by_id: SchemaOf | None = None,
    ) -> None:
        self._columns = list(columns)
        self._reader = reader
        self._wanted = reader.wanted(self._columns)
        self._writer = self._opening(writer or reader)
        self._framed = framed
        self._by_id = by_id
        self._writers: dict[int, _Writer | str] = {}
        self._targets = [reader.target(name) for name in self._columns]

    def decode(self, values: pa.Array) -> Decoded:
        found = [
            self._chunk(values.slice(start, CHUNK), start) for start in range(0, len(values), CHUNK)
        ]
        if len(found) == 1:
            return found[0]
        return Decoded(
            joined([part.columns for part in found], self._targets),
            np.concatenate([part.records for part in found] or [np.empty(0, np.int64)]),
            [bad for part in found for bad in part.bad],
        )

    def _chunk(self, values: pa.Array, first: int) -> Decoded:
        """The values of which the first one has this number."""
        rows: list[Any] = []
        good: list[int] = []
        bad: list[Bad] = []
        read, wanted, start = fastavro().schemaless_reader, self._wanted, 0
        in_row = None if self._reader.is_record else self._reader.in_row
        schema, opened = self._writer
        for i, value in enumerate(values.to_pylist(), first):
            if self._framed:
                start = FRAME
                number = schema_id(value)
                if number is None:
                    bad.append(Bad(i, "", NO_FRAME))
                    continue
                if self._by_id is not None:
                    found = self._writer_of(number)
                    if isinstance(found, str):
                        bad.append(Bad(i, "", found))
                        continue
                    schema, opened = found
            stream = opened(value)
            stream.seek(start)
            try:
                row = read(
                    stream, schema, wanted, return_named_type=True, return_named_type_override=True
                )
            except Exception as e:  # what bad bytes make of a decoder is of many kinds
                bad.append(Bad(i, "", f"it is no value of its Avro schema ({_said(e)})"))
                continue
            left = len(value) - stream.tell()
            if left:
                why = "it ends within" if left < 0 else f"{left} bytes follow"
                bad.append(Bad(i, "", f"{why} the value of its Avro schema"))
                continue
            rows.append(row if in_row is None else in_row(row))
            good.append(i)
        return self._in_columns(rows, np.array(good, np.int64), bad)

    def _writer_of(self, number: int) -> _Writer | str:
        """The schema of an id; or why there is none, which its values cost their rows: an id is
        part of a value, and may be of a schema that is not Avro's, or that is not read."""
        found = self._writers.get(number)
        if found is None:
            assert self._by_id is not None
            try:
                found = self._opening(self._by_id(number))
            except UnknownSchemaError as e:
                return e.message  # it may be registered by the next batch
            except ConfigError as e:
                found = e.message
            self._writers[number] = found
        return found

    def _opening(self, writer: AvroSchema) -> _Writer:
        """With the wanted schema's object if it is the same: fastavro resolves and skips nothing
        then."""
        written = writer.written()
        if written == self._wanted:
            return _Writer(self._wanted, BytesIO)
        return _Writer(written, _Whole if writer.has_sized_items else _padded)

    def _in_columns(self, rows: list[Any], good: np.ndarray, bad: list[Bad]) -> Decoded:
        parts, kept, worse = halving(
            rows,
            len(rows),
            lambda start, stop: self._arrays(rows[start:stop]),
            lambda i, _: Bad(int(good[i]), *self._blame(rows[i])),
        )
        records = good[np.concatenate(kept)] if kept else good[:0]
        if worse:
            bad = sorted(bad + worse, key=lambda row: row.record)
        return Decoded(joined(parts, self._targets), records, bad)

    def _arrays(self, rows: list[Any]) -> list[pa.Array]:
        return [self._array(name, rows) for name in self._columns]

    def _array(self, name: str, rows: list[Any]) -> pa.Array:
        how, wanted = self._reader.reads[name], self._reader.target(name)
        mend = how.mend
        cells = [row[name] for row in rows]
        if mend is not None:
            cells = [mend(cell) for cell in _copies(cells)]
        column = pa.array(cells, how.arrow)
        return column if column.type == wanted else pc.cast(column, wanted)

    def _blame(self, row: Any) -> tuple[str, str]:
        for name in self._columns:
            try:
                self._array(name, [row])
            except (pa.ArrowException, ValueError, OverflowError, TypeError, KeyError) as e:
                return name, f"it does not fit its type ({_said(e)})"
        return "", "it does not fit its types"


def _copies(cells: list[Any]) -> list[Any]:
    """Cells that may be mended more than once, as records are mended where they are."""
    return [_copy(cell) for cell in cells]


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_copy(part) for part in value]
    return (value[0], _copy(value[1])) if isinstance(value, tuple) else value


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
