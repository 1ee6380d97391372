"""What decodes values: binary columns of them to columns of a row.

Owns: `Decoder`, which every format has one of, and `Decoded`; the decoders of JSON, Arrow and fixed
values, which are the engine's in this form.  `avro_values` and `protobuf_values` have the others.

Law: pure.  A decoder never raises for what a value holds: it says which values are bad, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdirect.format.fixed_layout import FixedLayout
from kdirect.format.typed_values import ArrowValues, JsonValues
from kdirect.state.schema import Field
from kdirect_spark.registry import FRAME, NO_FRAME, schema_id
from kdirect_spark.values import as_spark_takes, misfits

OUT_OF_RANGE = "it is no timestamp in microseconds of 64 bits, as Spark's are"


@dataclass(slots=True)
class Bad:
    """Value number `record` does not decode; `field` is empty where it is bad as a whole."""

    record: int
    field: str
    why: str


@dataclass(slots=True)
class Decoded:
    """`columns` as Spark takes them, and for each of their rows the number of its value, which
    never falls.  `bad` is in the order of the values too."""

    columns: list[pa.Array]
    records: np.ndarray
    bad: list[Bad] = field(default_factory=list)


class Decoder(Protocol):
    """Decodes the columns that it was made for."""

    def decode(self, values: pa.Array) -> Decoded:
        """`values` are binary, and none is null."""


class EngineValues:
    """Values in JSON or Arrow.  `framed`: each begins with Confluent's frame, whose id is not
    looked up, because the schema is the query's."""

    def __init__(
        self,
        values: JsonValues | ArrowValues,
        kinds: Sequence[Field | None],
        *,
        framed: bool,
    ) -> None:
        self._values = values
        self._kinds = kinds
        self._framed = framed

    def decode(self, values: pa.Array) -> Decoded:
        if not self._framed:
            return self._decode(values)
        given = values.to_pylist()
        is_framed = [schema_id(value) is not None for value in given]
        bad = [Bad(i, "", NO_FRAME) for i, framed in enumerate(is_framed) if not framed]
        good = np.flatnonzero(is_framed)
        found = self._decode(pa.array([given[i][FRAME:] for i in good], pa.binary()))
        found.records = good[found.records]
        for row in found.bad:
            row.record = int(good[row.record])
        found.bad = sorted(found.bad + bad, key=lambda row: row.record)
        return found

    def _decode(self, values: pa.Array) -> Decoded:
        engine = self._values
        engine.dropped.clear()
        bad: list[Bad] = []
        engine.told = lambda i, field, why: bad.append(Bad(i, field, why))
        # The numbers of the values stand for offsets.
        found = engine.decode(values, pa.array(np.arange(len(values), dtype=np.int64)))
        records = found.records.to_numpy(zero_copy_only=False)
        return in_range(Decoded(list(found.columns), records, bad), self._kinds)


def in_range(found: Decoded, kinds: Sequence[Field | None]) -> Decoded:
    """Columns of the engine's types as Spark takes them, without rows whose times it cannot
    hold.  A column without such a type is as Spark takes it."""
    masks = [
        None if f is None else misfits(f.type, column) for f, column in zip(kinds, found.columns)
    ]
    if any(mask is not None for mask in masks):
        good = np.ones(len(found.records), bool)
        for of_type, mask in zip(kinds, masks):
            if mask is None or of_type is None:
                continue
            wrong = mask.to_numpy(zero_copy_only=False) & good
            for record in dict.fromkeys(found.records[wrong].tolist()):
                found.bad.append(Bad(record, of_type.name, f"{OUT_OF_RANGE} ({of_type.type})"))
            good &= ~wrong
        # A value is good or bad as a whole.
        good = ~np.isin(found.records, found.records[~good])
        found.columns = [pc.filter(column, pa.array(good)) for column in found.columns]
        found.records = found.records[good]
        found.bad.sort(key=lambda row: row.record)
    found.columns = [
        c if f is None else as_spark_takes(f.type, c) for f, c in zip(kinds, found.columns)
    ]
    return found


def halving(
    values: Any, count: int, decode: Callable[[int, int], list[pa.Array]], why: Callable[..., Bad]
) -> tuple[list[list[pa.Array]], list[np.ndarray], list[Bad]]:
    """Decode what decodes.  `decode` gives the columns of the values [start, stop), or raises
    what pyarrow and the formats' libraries do; `why` makes of one bad value, and that error, a
    Bad."""
    parts: list[list[pa.Array]] = []
    kept: list[np.ndarray] = []
    bad: list[Bad] = []
    stack = [(0, count)]
    while stack:
        start, stop = stack.pop()
        try:
            parts.append(decode(start, stop))
        except (pa.ArrowException, ValueError, OverflowError, TypeError, KeyError) as e:
            if stop - start == 1:
                bad.append(why(start, e))
            else:
                middle = (start + stop) // 2
                stack += [(middle, stop), (start, middle)]
        else:
            kept.append(np.arange(start, stop, dtype=np.int64))
    return parts, kept, bad


def joined(parts: list[list[pa.Array]], kinds: Sequence[pa.DataType]) -> list[pa.Array]:
    """Columns of parts as one; none of them may be missing."""
    if not parts:
        return [pa.nulls(0, kind) for kind in kinds]
    return list(parts[0]) if len(parts) == 1 else [pa.concat_arrays(c) for c in zip(*parts)]


class FixedValues:
    """Values with a fixed layout, without the compiled walk over record batches: for the queries
    that want more of a record than its value."""

    def __init__(self, layout: FixedLayout, kinds: Sequence[Field]) -> None:
        self._layout = layout
        self._kinds = kinds

    def decode(self, values: pa.Array) -> Decoded:
        size = self._layout.size
        right = pc.equal(pc.binary_length(values), size)
        bad = [
            Bad(i, "", f"it has not {size} bytes")
            for i in pc.indices_nonzero(pc.invert(right)).to_pylist()
        ]
        records = pc.indices_nonzero(right).to_numpy().astype(np.int64)
        data = b"".join(pc.filter(values, right).to_pylist())
        rows = np.frombuffer(data, self._layout.dtype())
        columns = []
        for of_type in self._kinds:
            column, wrong = self._column(of_type.name, rows)
            columns.append(column)
            bad += [Bad(int(records[i]), of_type.name, "it is no UTF-8") for i in wrong]
        found = Decoded(columns, records, sorted(bad, key=lambda row: row.record))
        gone = {row.record for row in bad}
        good = np.array([record not in gone for record in records.tolist()], bool)
        if not good.all():
            found.columns = [pc.filter(column, pa.array(good)) for column in columns]
            found.records = records[good]
        return in_range(found, self._kinds)

    def _column(self, name: str, rows: np.ndarray) -> tuple[pa.Array, list[int]]:
        """A column in the engine's type, and the rows that it has no value for."""
        kind = self._layout.field(name).kind.name
        column = np.ascontiguousarray(rows[name])
        count = len(rows)
        if kind.startswith("string["):
            return _texts(column.tobytes(), count)
        if kind == "bool":
            return pa.array(column.view(np.uint8) != 0), []
        arrow = next(f.arrow.type for f in self._kinds if f.name == name)
        if kind.startswith("binary["):
            arrow = pa.binary(int(kind[7:-1]))
        return pa.Array.from_buffers(arrow, count, [None, pa.py_buffer(column.tobytes())]), []


def _texts(data: bytes, count: int) -> tuple[pa.Array, list[int]]:
    width = len(data) // count if count else 0
    texts: list[str | None] = []
    wrong = []
    for i in range(count):
        part = data[i * width : (i + 1) * width].partition(b"\0")[0]
        try:
            texts.append(part.decode())
        except UnicodeDecodeError:
            texts.append(None)
            wrong.append(i)
    return pa.array(texts, pa.string()), wrong
