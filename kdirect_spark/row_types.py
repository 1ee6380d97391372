"""Types of rows whose columns may be nested: Spark's, and Arrow's of what Spark takes for them.

Owns: the table of both.  Formats of values that have lists, maps and records in them (JSON, Avro,
Protobuf) say their rows by it; `values` has the flat types of the state engine.

Law: pure.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kdirect.errors import ConfigError

_PLAIN: tuple[tuple[DataType, pa.DataType], ...] = (
    (ByteType(), pa.int8()),
    (ShortType(), pa.int16()),
    (IntegerType(), pa.int32()),
    (LongType(), pa.int64()),
    (FloatType(), pa.float32()),
    (DoubleType(), pa.float64()),
    (BooleanType(), pa.bool_()),
    (StringType(), pa.string()),
    (BinaryType(), pa.binary()),
    (DateType(), pa.date32()),
    (TimestampType(), pa.timestamp("us", "UTC")),
    (TimestampNTZType(), pa.timestamp("us")),
    (DayTimeIntervalType(), pa.duration("us")),
    (NullType(), pa.null()),
)
_ARROW = dict(_PLAIN)


def arrow_type(kind: DataType, what: str) -> pa.DataType:
    """Arrow's type of a column of this type of Spark's.  `what` is named in the error for one that
    no value has."""
    if isinstance(kind, StructType):
        return pa.struct([(f.name, arrow_type(f.dataType, f"{what}.{f.name}")) for f in kind])
    if isinstance(kind, ArrayType):
        return pa.list_(arrow_type(kind.elementType, f"{what}[]"))
    if isinstance(kind, MapType):
        key = arrow_type(kind.keyType, f"{what}'s keys")
        return pa.map_(key, arrow_type(kind.valueType, f"{what}'s values"))
    if isinstance(kind, DecimalType) and 0 <= kind.scale <= kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    found = _ARROW.get(kind)
    # A string with a collation equals the plain one, but is another type.
    if found is None or kind.simpleString() != type(kind)().simpleString():
        raise ConfigError(
            f"{what}: values have no type {kind.simpleString()}",
            hint="use byte, short, int, long, float, double, boolean, string, binary, date, "
            "timestamp, timestamp_ntz, decimal, array, map or struct",
        )
    return found


def spark_type(kind: pa.DataType) -> DataType:
    """Spark's type of an Arrow type.  Numbers without a sign become the next wider ones, as Spark
    has none; times of day become integers of their unit."""
    if pa.types.is_struct(kind):
        return StructType([StructField(f.name, spark_type(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return MapType(spark_type(kind.key_type), spark_type(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return ArrayType(spark_type(kind.value_type))
    if pa.types.is_timestamp(kind):
        return TimestampNTZType() if kind.tz is None else TimestampType()
    if pa.types.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    if pa.types.is_duration(kind):
        return DayTimeIntervalType()
    wider: dict[pa.DataType, DataType] = {
        pa.uint8(): ShortType(),
        pa.uint16(): IntegerType(),
        pa.uint32(): LongType(),
        pa.uint64(): DecimalType(20, 0),
        pa.large_string(): StringType(),
        pa.large_binary(): BinaryType(),
        pa.time32("s"): IntegerType(),
        pa.time32("ms"): IntegerType(),
        pa.time64("us"): LongType(),
        pa.time64("ns"): LongType(),
    }
    if kind in wider:
        return wider[kind]
    return next(spark for spark, arrow in _PLAIN if arrow == kind)


def is_nested(kind: DataType) -> bool:
    """Whether columns of this type hold others."""
    return isinstance(kind, StructType | ArrayType | MapType)


def nullable(kind: DataType) -> DataType:
    """The same type, with nulls allowed everywhere: no format of values forbids them to Spark."""
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, nullable(f.dataType)) for f in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(nullable(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(nullable(kind.keyType), nullable(kind.valueType))
    return kind
