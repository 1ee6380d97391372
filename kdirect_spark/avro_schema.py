"""Avro schemas: what row of Spark's they are, and the form in which fastavro reads values by them.

Owns: `AvroSchema`.  Types become those that Spark's from_avro makes of them.

Law: pure.  fastavro is imported here and in `avro_values` only.

fastavro makes Python objects of logical types: slow ones, which hold fewer times than Spark's.  So
the schema that it gets has no logical types but decimals; Arrow reads the numbers as times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kdirect.errors import ConfigError, MissingPackageError
from kdirect_spark.row_types import arrow_type

VALUE = "value"  # the column of a schema that is no record
_PLAIN: dict[str, DataType] = {
    "null": NullType(),
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "string": StringType(),
    "fixed": BinaryType(),
    "enum": StringType(),
}
_NAMED = ("record", "error", "enum", "fixed")
# Logical types: the type that they annotate, Spark's, and Arrow's of the numbers.
_TIMES: dict[tuple[str, str], tuple[DataType, pa.DataType]] = {
    ("int", "date"): (DateType(), pa.date32()),
    ("long", "timestamp-millis"): (TimestampType(), pa.timestamp("ms", "UTC")),
    ("long", "timestamp-micros"): (TimestampType(), pa.timestamp("us", "UTC")),
    ("long", "local-timestamp-millis"): (TimestampNTZType(), pa.timestamp("ms")),
    ("long", "local-timestamp-micros"): (TimestampNTZType(), pa.timestamp("us")),
}
# What Python makes of the types of a union that have no name.
_PYTHON: dict[str, type] = {
    "boolean": bool, "int": int, "long": int, "float": float, "double": float,
    "bytes": bytes, "string": str, "array": list, "map": dict,
}  # fmt: skip

Mend = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Read:
    """How values of a type are read: Spark's type; Arrow's of what fastavro gives; what is done
    with that before Arrow gets it, None for nothing."""

    spark: DataType
    arrow: pa.DataType
    mend: Mend | None = None


def fastavro() -> Any:
    """The library.  Raises MissingPackageError."""
    try:
        import fastavro
        import fastavro.schema
    except ImportError as e:
        raise MissingPackageError(
            f"valueFormat=avro needs the package fastavro ({e})",
            hint="pip install 'kdirect[avro]' where the driver and the executors run",
        ) from e
    return fastavro


class AvroSchema:
    """A schema as text, checked.  `what` says in errors where it is from.  Raises ConfigError."""

    def __init__(self, text: str, what: str, references: Iterable[str] = ()) -> None:
        self.text = text
        self._what = what
        self._names: dict[str, Any] = {}
        #: Whether an array has items whose bytes nothing in a value tells, as of doubles.
        self.has_sized_items = False
        parse = fastavro().parse_schema
        try:
            for other in references:
                parse(_loaded(other), self._names)
            self._parsed = parse(_loaded(text), self._names)
        except Exception as e:  # fastavro's errors for what is no schema are of many kinds
            raise ConfigError(
                f"{what} is no Avro schema: {type(e).__name__}: {e}",
                hint='give JSON such as {"type": "record", "name": "Order", "fields": [...]}',
            ) from None
        root = self._definition(self._parsed)
        self._is_record = isinstance(root, dict) and root["type"] in ("record", "error")
        fields = root["fields"] if self._is_record else [{"name": VALUE, "type": self._parsed}]
        if not fields:
            raise ConfigError(f"{what} is a record without fields", hint="give one with fields")
        self._refuse_twice(fields, root["name"] if self._is_record else VALUE)
        self._root, self._fields = root, fields
        self.reads: dict[str, _Read] = {
            field["name"]: self._read(field["type"], field["name"], ()) for field in fields
        }

    @property
    def row(self) -> StructType:
        """Spark's type of a value."""
        return StructType([StructField(name, read.spark) for name, read in self.reads.items()])

    def target(self, name: str) -> pa.DataType:
        """Arrow's type of what Spark takes for a column."""
        return arrow_type(self.reads[name].spark, name)

    def written(self) -> Any:
        """For fastavro: the schema that values were written by."""
        return self._emitted(self._parsed)

    def wanted(self, columns: Iterable[str]) -> Any:
        """For fastavro: the schema of these columns alone, by which others are skipped."""
        if not self._is_record:
            return self.written()
        names = set(columns)
        fields = [field for field in self._fields if field["name"] in names]
        return self._emitted({**self._root, "fields": fields}, is_root=True)

    def in_row(self, value: Any) -> Any:
        """A value as fastavro gives it, with its columns by name."""
        return value if self._is_record else {VALUE: value}

    @property
    def is_record(self) -> bool:
        return self._is_record

    # -- types

    def _definition(self, kind: Any) -> Any:
        if isinstance(kind, str) and kind not in _PLAIN:
            return self._names[kind]
        if isinstance(kind, dict) and isinstance(kind["type"], dict | list):
            return self._definition(kind["type"])
        return kind

    def _read(self, given: Any, where: str, above: tuple[str, ...]) -> _Read:
        kind = self._definition(given)
        if isinstance(kind, list):
            return self._union(kind, where, above)
        if isinstance(kind, str):
            kind = {"type": kind}
        base, logical = kind["type"], kind.get("logicalType")
        if base in ("record", "error"):
            return self._record(kind, where, above)
        if base == "array":
            self._refuse_empty(kind["items"], where)
            items = self._read(kind["items"], f"{where}[]", above)
            self.has_sized_items |= self._is_sized(kind["items"])
            return _Read(ArrayType(items.spark), pa.list_(items.arrow), _each(items.mend))
        if base == "map":
            values = self._read(kind["values"], f"{where}{{}}", above)
            mend = _each_value(values.mend)
            return _Read(
                MapType(StringType(), values.spark), pa.map_(pa.string(), values.arrow), mend
            )
        if logical == "decimal" and base in ("bytes", "fixed"):
            precision, scale = kind.get("precision", 0), kind.get("scale", 0)
            if not 1 <= precision <= 38 or not 0 <= scale <= precision:
                raise ConfigError(
                    f"{self._what}: {where} is a decimal({precision},{scale})",
                    hint="Spark's decimals have 1 to 38 digits",
                )
            return _Read(DecimalType(precision, scale), pa.decimal128(precision, scale))
        if (base, logical) in _TIMES:
            return _Read(*_TIMES[base, logical])
        return _Read(_PLAIN[base], arrow_type(_PLAIN[base], where))

    def _record(self, kind: Any, where: str, above: tuple[str, ...]) -> _Read:
        name = kind["name"]
        if name in above:
            raise ConfigError(
                f"{self._what}: {where} is a {name} within a {name}",
                hint="Spark has no types that contain themselves",
            )
        self._refuse_twice(kind["fields"], where)
        found = {
            f["name"]: self._read(f["type"], f"{where}.{f['name']}", (*above, name))
            for f in kind["fields"]
        }
        mends = {name: read.mend for name, read in found.items() if read.mend is not None}

        def mend(value: Any) -> Any:
            for name, of_field in mends.items():
                value[name] = of_field(value[name])
            return value

        return _Read(
            StructType([StructField(name, read.spark) for name, read in found.items()]),
            pa.struct([pa.field(name, read.arrow) for name, read in found.items()]),
            mend if mends else None,
        )

    def _union(self, kinds: list[Any], where: str, above: tuple[str, ...]) -> _Read:
        """One type and null is that type.  int and long are long, float and double are double.
        Others are a struct with a member for each type, of which one is not null."""
        others = [kind for kind in kinds if kind != "null"]
        if not others:
            return _Read(NullType(), pa.null())
        if len(others) == 1:
            found = self._read(others[0], where, above)
            of_one = found.mend
            if of_one is None or len(others) == len(kinds):
                return found
            return _Read(found.spark, found.arrow, lambda v: None if v is None else of_one(v))
        names = {kind if isinstance(kind, str) else None for kind in others}
        if names == {"int", "long"}:
            return _Read(LongType(), pa.int64())
        if names == {"float", "double"}:
            return _Read(DoubleType(), pa.float64())
        return self._members(others, where, above)

    def _members(self, kinds: list[Any], where: str, above: tuple[str, ...]) -> _Read:
        members = [self._read(k, f"{where}.member{i}", above) for i, k in enumerate(kinds)]
        by_name: dict[str, int] = {}
        by_type: dict[type, int] = {}
        for i, kind in enumerate(kinds):
            definition = self._definition(kind)
            base = definition if isinstance(definition, str) else definition["type"]
            if base in _NAMED:
                by_name[definition["name"]] = i
            elif isinstance(definition, dict) and definition.get("logicalType") == "decimal":
                raise ConfigError(
                    f"{self._what}: {where} is a union of several types with a decimal in it",
                    hint="give it a field of its own",
                )
            elif by_type.setdefault(_PYTHON[base], i) != i:
                raise ConfigError(
                    f"{self._what}: the types of the union {where} cannot be distinguished",
                    hint="leave int out beside long, and float beside double",
                )

        self._refuse_alike(kinds, by_name, by_type, where)

        def mend(value: Any) -> Any:
            if value is None:
                return None
            if isinstance(value, tuple):  # fastavro's form of a type that has a name
                member, value = by_name[value[0]], value[1]
            elif len(by_name) == 1 and type(value) not in by_type:
                (member,) = by_name.values()
            else:
                member = by_type[type(value)]
            of_member = members[member].mend
            return {f"member{member}": value if of_member is None else of_member(value)}

        return _Read(
            StructType([StructField(f"member{i}", m.spark) for i, m in enumerate(members)]),
            pa.struct([pa.field(f"member{i}", m.arrow) for i, m in enumerate(members)]),
            mend,
        )

    def _refuse_alike(
        self, kinds: list[Any], by_name: dict[str, int], by_type: dict[type, int], where: str
    ) -> None:
        """fastavro does not name the type of a union that is its only one with a name."""
        if len(by_name) != 1:
            return
        (i,) = by_name.values()
        base = self._definition(kinds[i])["type"]
        if {"enum": str, "fixed": bytes}.get(base, dict) in by_type:
            raise ConfigError(
                f"{self._what}: the types of the union {where} cannot be distinguished",
                hint="leave a record out beside a map, an enum beside a string, fixed beside bytes",
            )

    def _refuse_twice(self, fields: list[Any], where: str) -> None:
        """fastavro takes the last of several fields of one name, and says nothing of the others."""
        seen: set[str] = set()
        for name in (field["name"] for field in fields):
            if name in seen:
                raise ConfigError(
                    f"{self._what}: {where} has several fields of the name {name}",
                    hint="rename one of them",
                )
            seen.add(name)

    def _refuse_empty(self, items: Any, where: str) -> None:
        """A few bytes could promise any number of items that take none."""
        if self._is_empty(items, ()):
            raise ConfigError(
                f"{self._what}: {where} is an array whose items have no bytes",
                hint="leave the field out, or give its items a field",
            )

    def _is_empty(self, given: Any, above: tuple[str, ...]) -> bool:
        kind = self._definition(given)
        if kind == "null":
            return True
        if not isinstance(kind, dict):
            return False
        if kind["type"] == "fixed":
            return int(kind["size"]) == 0
        if kind["type"] not in ("record", "error") or kind["name"] in above:
            return bool(kind["type"] == "null")
        return all(self._is_empty(f["type"], (*above, kind["name"])) for f in kind["fields"])

    def _is_sized(self, given: Any) -> bool:
        """Does the schema alone say how many bytes it has?  Items that are empty are refused, and
        so are records within themselves."""
        kind = self._definition(given)
        base = kind["type"] if isinstance(kind, dict) else kind
        if base in ("record", "error"):
            return all(self._is_sized(f["type"]) for f in kind["fields"])
        return base in ("null", "boolean", "float", "double", "fixed")

    # -- for fastavro

    def _emitted(self, kind: Any, *, is_root: bool = False) -> Any:
        """The schema without logical types but decimals, each name defined where it is used
        first."""
        seen: set[str] = set()

        def emit(kind: Any) -> Any:
            if isinstance(kind, str):
                if kind in _PLAIN or kind in seen:
                    return kind
                return emit(self._names[kind])
            if isinstance(kind, list):
                return [emit(k) for k in kind]
            base = kind["type"]
            if not isinstance(base, str) or base not in (*_PLAIN, *_NAMED, "array", "map"):
                return emit(base)
            out: dict[str, Any] = {"type": base}
            if kind.get("logicalType") == "decimal" and base in ("bytes", "fixed"):
                out |= {k: kind[k] for k in ("logicalType", "precision", "scale") if k in kind}
            if base in _NAMED:
                if kind["name"] in seen:
                    return kind["name"]
                seen.add(kind["name"])
                out |= {k: kind[k] for k in ("name", "aliases", "symbols", "size", "default")
                        if k in kind}  # fmt: skip
            if base in ("record", "error"):
                out["fields"] = [
                    {k: v for k, v in f.items() if k in ("name", "default", "aliases")}
                    | {"type": emit(f["type"])}
                    for f in kind["fields"]
                ]
            elif base == "array":
                out["items"] = emit(kind["items"])
            elif base == "map":
                out["values"] = emit(kind["values"])
            return out if len(out) > 1 else base

        return fastavro().parse_schema(emit(kind))


def _loaded(text: str) -> Any:
    """A schema's JSON.  The name of a plain type may stand without quotes, as Avro's own tools
    take it."""
    stripped = text.strip()
    return stripped if stripped in _PLAIN else json.loads(stripped)


def _each(mend: Mend | None) -> Mend | None:
    return None if mend is None else lambda items: [mend(item) for item in items]


def _each_value(mend: Mend | None) -> Mend | None:
    return None if mend is None else lambda items: {k: mend(v) for k, v in items.items()}
