"""How the values of records become columns: what valueFormat and the options that need it mean.

Owns: `ValueSettings`, the schemas that they name (`AvroSource`, `ProtobufSource`), and which type
of Spark's a type of the state engine becomes, and back; `value_options` makes the settings.

Law: pure; no I/O.  Formats, layouts and names of types are the engine's where it has them, so that
Spark and the engine read a topic by the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as member
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
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
from kdirect_spark import row_types

if TYPE_CHECKING:
    from kdirect_spark.registry import RegistrySettings

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
_SUPPORTED = (
    "byte, short, int, long, float, double, boolean, string, binary, date, timestamp or decimal"
)

# Kafka's columns that may stand beside those of a value.
KAFKAS: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    ),
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


@dataclass(frozen=True, slots=True)
class AvroSource:
    """The reader's schema and its references, as text; `writer` is the one that all values were
    written by where that is another."""

    reader: str
    references: tuple[str, ...] = ()
    writer: str | None = None
    what: str = "option avroSchema"


@dataclass(frozen=True, slots=True)
class ProtobufSource:
    """A FileDescriptorSet, and the message of it."""

    descriptors: bytes
    message: str | None
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSettings:
    """How values are read, and which columns a row has.

    `mode` is PERMISSIVE, DROPMALFORMED or FAILFAST.  `fields` are the columns of a value whose
    types the engine has; `layout` is None unless the format is fixed.  `schema` are the columns of
    a value in Spark's types, for the formats and types that the engine does not have; None where
    `fields` say it all.  `framed`: values begin with Confluent's frame.  `metadata`: by the name in
    a row, which column of Kafka's it is.  `corrupt`: the column of values that do not decode, of
    the type `corrupt_type`.  `avro` or `protobuf`: by which schema; `registry`: who has those of
    the values."""

    format: str
    fields: tuple[Field, ...] = ()
    layout: FixedLayout | None = None
    mode: str = "DROPMALFORMED"
    schema: StructType | None = None
    framed: bool = False
    metadata: Mapping[str, str] = member(default_factory=dict)
    corrupt: str | None = None
    corrupt_type: DataType = member(default_factory=StringType)
    avro: AvroSource | None = None
    protobuf: ProtobufSource | None = None
    registry: RegistrySettings | None = None

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for name in self.names:
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
    def is_engines(self) -> bool:
        """Whether the state engine reads such rows too, so that its source does it for tasks."""
        return (
            self.format in ("fixed", "json", "arrow")
            and self.mode != "PERMISSIVE"
            and self.schema is None
            and not (self.framed or self.metadata or self.corrupt)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns of a row: the value's in the schema's order, then Kafka's, then that of
        values that do not decode if the schema does not have it."""
        return tuple(self._kinds())

    def _kinds(self) -> dict[str, DataType]:
        own = (
            {f.name: spark_type(f.type) for f in self.fields}
            if self.schema is None
            else {f.name: f.dataType for f in self.schema}
        )
        own |= {name: KAFKAS[column] for name, column in self.metadata.items()}
        if self.corrupt is not None:
            own[self.corrupt] = self.corrupt_type
        return own

    def _chosen(self, columns: Iterable[str] | None) -> dict[str, DataType]:
        kinds = self._kinds()
        wanted = set(kinds if columns is None else columns)
        return {name: kind for name, kind in kinds.items() if name in wanted}

    def chosen(self, columns: Iterable[str] | None) -> tuple[Field, ...]:
        """The engine's fields of these columns in the schema's order; all of them for None."""
        wanted = self._chosen(columns)
        return tuple(field for field in self.fields if field.name in wanted)

    def decoded(self, columns: Iterable[str] | None) -> tuple[str, ...]:
        """The columns of the value that are decoded for a row of these columns: all of them where
        it is asked for which values do not decode."""
        kinds = self._kinds()
        wanted = self._chosen(columns)
        everything = self.corrupt is not None and self.corrupt in wanted
        return tuple(
            name
            for name in kinds
            if name not in self.metadata and name != self.corrupt and (everything or name in wanted)
        )

    def row(self, columns: Iterable[str] | None = None) -> StructType:
        """Spark's type of a row that has these columns."""
        return StructType([StructField(n, kind) for n, kind in self._chosen(columns).items()])

    def arrow_row(self, columns: Iterable[str] | None = None) -> pa.Schema:
        """Arrow's schema of the batches that Spark takes of these columns."""
        return pa.schema(
            [
                pa.field(name, row_types.arrow_type(kind, name))
                for name, kind in self._chosen(columns).items()
            ]
        )

    def input(self, topic: str, **more: Any) -> Input:
        """The engine's input that reads `topic` so; `more` are other arguments of `Input`.  The
        engine's word for what drops values is PERMISSIVE."""
        return Input(
            topic=topic,
            # A layout has its fields already.
            schema=() if self.layout is not None else self.fields,
            value_format=self.format,
            layout=self.layout,
            mode=self.engine_mode,
            **more,
        )

    @property
    def engine_mode(self) -> str:
        """`Input.mode`."""
        return "FAILFAST" if self.mode == "FAILFAST" else "PERMISSIVE"
