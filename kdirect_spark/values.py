"""How the values of records become columns: what valueFormat and the options that need it mean.

Owns: `ValueSettings`, and which type of Spark's a type of the state engine becomes, and back.

Law: pure; no I/O.  Formats, layouts and names of types are the engine's, so that Spark and the
engine read a topic by the same words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kdirect.errors import ConfigError
from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.plan import Input
from kdirect.state.schema import Field, decimal_of, fields, is_decimal

# Types of the engine: Spark's, and Arrow's of a column that Spark takes.  Spark has no types
# without a sign, so that these become the next wider ones.
_TYPES: dict[str, tuple[DataType, pa.DataType]] = {
    "int8": (ByteType(), pa.int8()),
    "int16": (ShortType(), pa.int16()),
    "int32": (IntegerType(), pa.int32()),
    "int64": (LongType(), pa.int64()),
    "uint8": (ShortType(), pa.int16()),
    "uint16": (IntegerType(), pa.int32()),
    "uint32": (LongType(), pa.int64()),
    "uint64": (DecimalType(20, 0), pa.decimal128(20, 0)),
    "float32": (FloatType(), pa.float32()),
    "float64": (DoubleType(), pa.float64()),
    "bool": (BooleanType(), pa.bool_()),
    "string": (StringType(), pa.string()),
    "binary": (BinaryType(), pa.binary()),
    "date32": (DateType(), pa.date32()),
}
_TIMESTAMP = (TimestampType(), pa.timestamp("us", "UTC"))
_ENGINE = {
    kind: name
    for name, (kind, _) in _TYPES.items()
    if not name.startswith("uint")  # first names: those that lose nothing on the way back
} | {TimestampType(): "timestamp(us)"}
_MICROSECONDS = {"timestamp(s)": 1_000_000, "timestamp(ms)": 1_000}
_OPTION = "option valueSchema"
_SUPPORTED = (
    "byte, short, int, long, float, double, boolean, string, binary, date, timestamp or decimal"
)
_GIVE_SCHEMA = {
    "fixed": 'write for example "user:int64, kind:int32, time:timestamp(ms)"',
    "json": 'write for example "user long, at timestamp(ms)", or give .schema(...)',
    "arrow": 'write for example "user long, at timestamp(ms)", or give .schema(...)',
}


def _types_of(kind: str) -> tuple[DataType, pa.DataType]:
    if kind.startswith("timestamp("):
        return _TIMESTAMP
    if kind.startswith("binary["):
        return _TYPES["binary"]
    if is_decimal(kind):
        precision, scale = decimal_of(kind)
        return DecimalType(precision, scale), pa.decimal128(precision, scale)
    return _TYPES[kind]


def spark_type(kind: str) -> DataType:
    """Spark's type of a column whose type has this name in the engine."""
    return _types_of(kind)[0]


def engine_type(kind: DataType, what: str) -> str:
    """The engine's name of Spark's type.  `what` is named in the error for one that no value
    has."""
    if isinstance(kind, DecimalType) and 0 <= kind.scale <= kind.precision:
        return f"decimal128({kind.precision},{kind.scale})"
    found = _ENGINE.get(kind)
    # A string with a collation equals the plain one, but is another type.
    if found is None or kind.simpleString() != spark_type(found).simpleString():
        raise ConfigError(
            f"{what}: values have no type {kind.simpleString()}", hint=f"use {_SUPPORTED}"
        )
    return found


def engine_fields(schema: StructType, what: str) -> tuple[Field, ...]:
    """Spark's schema as the engine's fields."""
    for field in schema.fields:
        if not field.nullable:
            raise ConfigError(
                f"{what}: column {field.name} is NOT NULL, which values do not promise",
                hint="leave NOT NULL out",
            )
    kinds = [(f.name, engine_type(f.dataType, f"{what}: column {f.name}")) for f in schema]
    return fields(kinds, what)


def as_spark_takes(kind: str, column: pa.Array) -> pa.Array:
    """A column of the engine's type `kind` as Spark takes it: the same memory unless the types
    differ.  Nanoseconds are rounded down.  Every value must fit; see `misfits`."""
    wanted = _types_of(kind)[1]
    if column.type == wanted:
        return column
    if kind == "timestamp(us)":
        return column.view(wanted)
    if kind == "timestamp(ns)":
        numbers = column.view(pa.int64())
        down = pc.divide(numbers, 1000)  # it rounds towards zero
        over = pc.greater(pc.multiply(down, 1000), numbers)
        return pc.if_else(over, pc.subtract(down, 1), down).view(wanted)
    return pc.cast(column, wanted)


def misfits(kind: str, column: pa.Array) -> pa.Array | None:
    """The mask of the rows whose times 64 bits cannot hold in microseconds; None if there are
    none."""
    scale = _MICROSECONDS.get(kind)
    if scale is None or not len(column):
        return None
    numbers = column.view(pa.int64())
    most = ((1 << 63) - 1) // scale
    bounds = pc.min_max(numbers).as_py()
    if bounds["min"] is None or (bounds["min"] >= -most and bounds["max"] <= most):
        return None
    mask = pc.or_(pc.less(numbers, -most), pc.greater(numbers, most))
    return pc.fill_null(mask, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSettings:
    """How values are read.  `layout` is None unless the format is fixed; `mode` is `Input.mode`."""

    format: str
    fields: tuple[Field, ...]
    layout: FixedLayout | None = None
    mode: str = "PERMISSIVE"

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for field in self.fields:
            name = field.name
            if "," in name or name != name.strip():
                raise ConfigError(
                    f"column {name!r}: its name has a comma, or blanks at an end",
                    hint="choose another name, which the option columns can say",
                )
            other = seen.setdefault(name.lower(), name)
            if other != name:
                raise ConfigError(
                    f"columns {other} and {name} differ only in case",
                    hint="rename one of them: Spark does not tell them apart",
                )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns of a value, in the schema's order."""
        return tuple(field.name for field in self.fields)

    def chosen(self, columns: Iterable[str] | None) -> tuple[Field, ...]:
        """The fields of these columns in the schema's order; all of them for None."""
        wanted = set(self.names if columns is None else columns)
        return tuple(field for field in self.fields if field.name in wanted)

    def row(self, columns: Iterable[str] | None = None) -> StructType:
        """Spark's type of a row that has these columns."""
        return StructType([StructField(f.name, spark_type(f.type)) for f in self.chosen(columns)])

    def arrow_row(self, columns: Iterable[str] | None = None) -> pa.Schema:
        """Arrow's schema of the batches that Spark takes of these columns."""
        return pa.schema([pa.field(f.name, _types_of(f.type)[1]) for f in self.chosen(columns)])

    def input(self, topic: str, **more: Any) -> Input:
        """The engine's input that reads `topic` so; `more` are other arguments of `Input`."""
        return Input(
            topic=topic,
            # A layout has its fields already.
            schema=() if self.layout is not None else self.fields,
            value_format=self.format,
            layout=self.layout,
            mode=self.mode,
            **more,
        )


def value_settings(
    format: str,
    *,
    schema_text: str | None,
    size: int | None,
    mode: str,
    spark_schema: StructType | None,
) -> ValueSettings:
    """The options valueFormat, valueSchema, valueSize and valueMode.  `spark_schema` is the schema
    of the query where it is known, which is the values' where valueSchema is not given.  Raises
    ConfigError."""
    if size is not None and format != "fixed":
        raise ConfigError(
            f"option valueSize is for valueFormat=fixed, not {format}", hint="remove it"
        )
    if schema_text is not None and not schema_text.strip():
        raise ConfigError("option valueSchema is empty", hint=_GIVE_SCHEMA[format])
    if format == "fixed":
        if schema_text is None:
            raise ConfigError("valueFormat=fixed needs valueSchema", hint=_GIVE_SCHEMA[format])
        layout = _layout(schema_text, size)
        found = fields(layout.schema(), _OPTION)
        return ValueSettings(format=format, fields=found, layout=layout, mode=mode)
    if schema_text is None and spark_schema is None:
        raise ConfigError(f"valueFormat={format} needs valueSchema", hint=_GIVE_SCHEMA[format])
    if schema_text is None:
        assert spark_schema is not None
        found = engine_fields(spark_schema, ".schema(...)")
    elif schema_text.lstrip().startswith("{"):
        found = engine_fields(_from_json(schema_text), _OPTION)
    else:
        found = fields(schema_text, _OPTION)
    return ValueSettings(format=format, fields=found, mode=mode)


def _layout(text: str, size: int | None) -> FixedLayout:
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]
    try:
        return FixedLayout.of(*parts, size=size)
    except ConfigError as e:
        raise ConfigError(f"{_OPTION}: {e.message}", hint=e.hint) from None


def _from_json(text: str) -> StructType:
    """A schema in Spark's own JSON (`df.schema.json()`): what the shim passes on."""
    try:
        return StructType.fromJson(json.loads(text))
    except Exception as e:  # Spark's errors for what is no schema are of many kinds
        raise ConfigError(
            f"{_OPTION}: this JSON is no schema of Spark ({e!r})",
            hint="write names and types, or what df.schema.json() returns",
        ) from None
