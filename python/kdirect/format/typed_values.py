"""Values in JSON and in Arrow's IPC format become typed columns.

Owns: `JsonValues` and `ArrowValues`, which take a binary column of values with the offsets of their
records and return columns of a schema.  (Values with a fixed layout do not go this way: fixed.pyx
reads them straight from the record batches.)  Rows come in the order of their records.  A null
value gives no row, and one that does not decode gives none either: both are counted in `dropped`,
with their offsets and the field that is wrong.

JSON: all values of a block are parsed in one go.  Each is wrapped as {"v": [value]}, so that a
value is exactly one row or an error: what is not one whole JSON value breaks the wrapping, or makes
more lists than there are values, or a list of another length.  (Only ``a], "name": [b``, with two
whole values, passes for its first one.)  When that happens the block is halved until the bad ones
are found.

Arrow: each value is a stream (schema, dictionaries, record batches) or one record batch without its
schema, to its last byte, and gives as many rows as are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from kdirect.errors import ConfigError
from kdirect.format.bad_values import SAMPLES, BadRow, Dropped, DropReason

NO_OBJECT = "the value is no JSON object"
_OBJECT = r"(?s)^\s*(\{.*\}|null)\s*$"  # what can be a value of a row at all


class TypedRows(NamedTuple):
    """`columns` in the order of the schema.  `records`: for each row, the index of its record among
    those that were given; `offsets`: the offset of this record."""

    columns: list[pa.Array]
    records: pa.Array
    offsets: pa.Array

    @property
    def rows(self) -> int:
        return len(self.offsets)


class _Values:
    """What both formats have in common.  `schema` has the columns that are wanted, and only
    these."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.dropped = Dropped()
        #: Is called for each value that gives no row, with its offset, the field and the reason;
        #: `dropped` has only the first of them.
        self.told: Callable[[int, str, str], object] | None = None

    def decode(self, values: pa.Array, offsets: pa.Array) -> TypedRows:
        """The rows of these values; `offsets` are int64 and as many."""
        records = pc.indices_nonzero(values.is_valid()).cast(pa.int64())
        self.dropped.add(DropReason.NULL_VALUE, values.null_count)
        if values.null_count:
            values, offsets = values.drop_null(), offsets.take(records)
        columns, kept = self._columns(values, offsets)
        return TypedRows(columns, records.take(kept), offsets.take(kept))

    def _columns(self, values: pa.Array, offsets: pa.Array) -> tuple[list[pa.Array], pa.Array]:
        """The columns, and for each row the index of its value."""
        raise NotImplementedError

    def _drop(self, offset: int, field: str, why: str) -> None:
        row = BadRow(offset, DropReason.NOT_DECODED, field, why)
        self.dropped.add(DropReason.NOT_DECODED, 1, [row])
        if self.told is not None:
            self.told(offset, field, why)

    def _joined(self, parts: Sequence[Sequence[pa.Array]]) -> list[pa.Array]:
        if not parts:
            return [pa.nulls(0, field.type) for field in self.schema]
        if len(parts) == 1:
            return list(parts[0])
        return [pa.concat_arrays(columns) for columns in zip(*parts)]


class JsonValues(_Values):
    """JSON objects, one a value.

    A field that is missing or null is null in its column; others than those of the schema are
    ignored.  Numbers must fit their types.  Dates, timestamps (ISO 8601) and binary are strings,
    decimals are strings or numbers.  Lists are arrays and structs are objects, whose fields are
    found by their names too."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        for field in schema:
            if _has_map(field.type):
                raise ConfigError(
                    f"the column {field.name} of JSON values has the type {field.type}",
                    hint="name the fields of objects with a struct, not a map",
                )

    def _columns(self, values: pa.Array, offsets: pa.Array) -> tuple[list[pa.Array], pa.Array]:
        count = len(values)
        whole = self._parse(values, self.schema)
        if whole is not None:
            return whole, _indices(count)
        # What cannot be an object is found without parsing; the others by halving.
        likely = pc.match_substring_regex(values, _OBJECT)
        bad: dict[int, pa.Array | None] = dict.fromkeys(
            pc.indices_nonzero(pc.invert(likely)).to_pylist()
        )
        where = pc.indices_nonzero(likely).cast(pa.int64())
        candidates = values.take(where)
        parts: list[list[pa.Array]] = []
        kept: list[pa.Array] = []
        stack = [(0, len(candidates))]
        while stack:
            start, stop = stack.pop()
            if start == stop:
                continue
            piece = candidates.slice(start, stop - start)
            columns = self._parse(piece, self.schema)
            if columns is not None:
                parts.append(columns)
                kept.append(where.slice(start, stop - start))
            elif stop - start == 1:
                bad[where[start].as_py()] = piece
            else:
                middle = (start + stop) // 2
                stack += [(middle, stop), (start, middle)]
        for index in sorted(bad):
            found = bad[index]
            blame = ("", NO_OBJECT) if found is None else self._blame(found)
            self._drop(offsets[index].as_py(), *blame)
        return self._joined(parts), pa.concat_arrays(kept) if kept else _indices(0)

    def _blame(self, value: pa.Array) -> tuple[str, str]:
        """Which field of a single bad value is wrong, and why: of those that are kept as
        samples."""
        if len(self.dropped.samples) >= SAMPLES:
            return "", ""
        for field in self.schema:
            if self._parse(value, pa.schema([])) is None:
                break
            if self._parse(value, pa.schema([field])) is None:
                return field.name, f"it is no {field.type}"
        return "", NO_OBJECT

    def _parse(self, values: pa.Array, schema: pa.Schema) -> list[pa.Array] | None:
        """The columns of these values, if each of them is one good row; else None."""
        count = len(values)
        if count == 0:
            return [pa.nulls(0, field.type) for field in schema]
        whole = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values)
        text = pc.binary_join(whole, b']}\n{"v":[')[0].as_buffer()
        data = b"".join((b'{"v":[', text, b"]}"))
        row = pa.struct([pa.field(f.name, _as_in_json(f.type)) for f in schema])
        try:
            table = pj.read_json(
                pa.BufferReader(data),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=pj.ParseOptions(
                    explicit_schema=pa.schema([pa.field("v", pa.list_(row))]),
                    unexpected_field_behavior="ignore",
                ),
            )
            if table.num_rows != count:
                return None
            lists = table.column("v").combine_chunks()
            if lists.null_count or not pc.all(pc.equal(pc.list_value_length(lists), 1)).as_py():
                return None
            rows = lists.flatten()
            columns = [pc.struct_field(rows, i) for i in range(len(schema))]
            columns = [pc.cast(column, f.type) for column, f in zip(columns, schema)]
            for column in columns:
                if pa.types.is_string(column.type) or pa.types.is_nested(column.type):
                    column.validate(full=True)  # is it UTF-8?
            return columns
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError):
            return None


def _indices(count: int) -> pa.Array:
    return pa.array(np.arange(count, dtype=np.int64))


def _as_in_json(kind: pa.DataType) -> pa.DataType:
    """The type that pyarrow's JSON reader reads what becomes a `kind`."""
    if pa.types.is_list(kind):
        return pa.list_(_as_in_json(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _as_in_json(f.type)) for f in kind])
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit)
    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return pa.binary()
    return kind


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(_has_map(kind.field(i).type) for i in range(kind.num_fields))


class ArrowValues(_Values):
    """Arrow IPC, one stream or one record batch message a value.

    The columns of the schema are taken by name and cast where they have another type; a value that
    lacks one, or has what does not fit its type, is bad as a whole.  A message without its schema
    is read as the `written` one, by default that of the columns that are wanted."""

    def __init__(self, schema: pa.Schema, written: pa.Schema | None = None) -> None:
        super().__init__(schema)
        self._written = written if written is not None else schema

    def _columns(self, values: pa.Array, offsets: pa.Array) -> tuple[list[pa.Array], pa.Array]:
        parts: list[list[pa.Array]] = []
        counts: list[int] = []
        data, ends = _flat(values)
        for index in range(len(values)):
            message = data.slice(ends[index], ends[index + 1] - ends[index])
            field, why = "", "the value is not one Arrow stream, nor one record batch message"
            column: pa.Array | None = None
            try:
                batches = self._batches(message)
                taken = []
                for batch in batches:
                    batch.validate(full=True)
                    for wanted in self.schema:
                        field, why = wanted.name, "the value has no such column"
                        column = batch.column(wanted.name)
                        why = f"it is no {wanted.type}"
                        taken.append(_cast(column, wanted.type))
            except (pa.ArrowException, OSError, EOFError, KeyError, TypeError):
                if column is not None and (row := _first_other(column, wanted.type)) is not None:
                    why += f" in row {row} of the value"
                self._drop(offsets[index].as_py(), field, why)
                counts.append(0)
                continue
            width = len(self.schema)
            parts += [taken[i : i + width] for i in range(0, len(taken), width)] if width else []
            counts.append(sum(batch.num_rows for batch in batches))
        rows = pa.array(_repeated(counts), pa.int64())
        return self._joined(parts), rows

    def _batches(self, message: pa.Buffer) -> list[pa.RecordBatch]:
        reader = pa.BufferReader(message)
        first = pa.ipc.read_message(reader)
        if first.type == "record batch":
            batches = [pa.ipc.read_record_batch(first, self._written)]
        else:
            reader.seek(0)
            with pa.ipc.open_stream(reader) as stream:
                batches = list(stream)
        if reader.tell() < message.size:
            raise pa.ArrowInvalid("something follows, perhaps another stream with more rows")
        return batches


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column as another type.  Raises what pyarrow does if a value does not fit."""
    if pa.types.is_decimal(kind) and pa.types.is_integer(column.type):
        # Arrow wants room for all integers of the type, and not just for those that are there.
        column = pc.cast(column, pa.decimal256(76, kind.scale))
    return pc.cast(column, kind)


def _fits(column: pa.Array, kind: pa.DataType) -> bool:
    try:
        _cast(column, kind)
    except pa.ArrowException:
        return False
    return True


def _first_other(column: pa.Array, kind: pa.DataType) -> int | None:
    """The first row that does not fit a type; None where all do, or none of this column could."""
    if _fits(column, kind) or not _fits(column.slice(0, 0), kind):
        return None
    least, most = 0, len(column) - 1  # the row is among these
    while least < most:
        middle = (least + most) // 2
        if _fits(column.slice(least, middle + 1 - least), kind):
            least = middle + 1
        else:
            most = middle
    return least


def _flat(values: pa.Array) -> tuple[pa.Buffer, list[int]]:
    """The bytes of a binary column without nulls, and where each value begins and the last ends."""
    if len(values) == 0:
        return pa.py_buffer(b""), [0]
    _, ends, data = values.buffers()
    kind = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    all_ends = np.frombuffer(ends, kind)
    return data, all_ends[values.offset : values.offset + len(values) + 1].tolist()


def _repeated(counts: list[int]) -> Any:
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)
