"""Columns of an input: their names and types.

Types are named as in `format.fixed_layout`: ``int8`` to ``int64``, ``uint8`` to ``uint64``,
``float32``, ``float64``, ``bool``, ``string``, ``binary``, ``binary[n]`` (n bytes), ``date32``,
``timestamp(u)`` (UTC, in the unit s, ms, us or ns) and ``decimal128(p,s)``.  Pure; the only thing
of pyarrow used is its types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kdirect.errors import ConfigError, FormatError
from kdirect.state.strict import shown

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64")
_WIDTHS = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "date32": 4, "int64": 8, "uint64": 8, "float64": 8,
    "timestamp(s)": 8, "timestamp(ms)": 8, "timestamp(us)": 8, "timestamp(ns)": 8,
}  # fmt: skip
_SYNONYMS = {
    "byte": "int8", "tinyint": "int8", "short": "int16", "smallint": "int16", "int": "int32",
    "integer": "int32", "long": "int64", "bigint": "int64", "float": "float32",
    "halffloat": "float16", "real": "float32", "double": "float64",
    "boolean": "bool", "str": "string", "utf8": "string", "large_string": "string",
    "large_utf8": "string", "bytes": "binary", "large_binary": "binary", "date": "date32",
    "date32[day]": "date32", "timestamp": "timestamp(us)",
}  # fmt: skip
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=[^\]]+)?\]")
_FIXED_BINARY = re.compile(r"(?:fixed_size_)?binary\[(\d{1,5})\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d{1,2}),\s*(\d{1,2})\)")
WIDEST_BINARY = 32_768
_TYPES = "int8..int64, uint8..uint64, float32, float64, bool, string, binary, binary[n], date32, "
_TYPES += "timestamp(s|ms|us|ns) or decimal128(p,s)"


def type_name(kind: Any, what: str) -> str:
    """The one name of a type, given as text or as an Arrow type.  `what` is named in the error."""
    text = str(kind).strip()
    name = text.lower()
    name = _SYNONYMS.get(name, name)
    if name in _WIDTHS or name in ("string", "binary"):
        return name
    if match := _TIMESTAMP.fullmatch(name):
        return f"timestamp({match[1]})"
    if (match := _FIXED_BINARY.fullmatch(name)) and 1 <= int(match[1]) <= WIDEST_BINARY:
        return f"binary[{int(match[1])}]"
    if match := _DECIMAL.fullmatch(name):
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= 38 and scale <= precision:
            return f"decimal128({precision},{scale})"
    raise ConfigError(f"{what}: the type {text!r} is not supported", hint=f"use {_TYPES}")


def width_of(kind: str) -> int | None:
    """Bytes of a value of this type, or None for `string` and `binary`."""
    if kind in _WIDTHS:
        return _WIDTHS[kind]
    if match := _FIXED_BINARY.fullmatch(kind):
        return int(match[1])
    return 16 if is_decimal(kind) else None


def is_decimal(kind: str) -> bool:
    return kind.startswith("decimal128(")


def decimal_of(kind: str) -> tuple[int, int]:
    """(precision, scale) of a decimal type."""
    match = _DECIMAL.fullmatch(kind)
    if match is None:
        raise ValueError(f"{kind} is no decimal")
    return int(match[1]), int(match[2])


def is_number(kind: str) -> bool:
    return kind in INTEGERS or kind in FLOATS or is_decimal(kind)


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type of a type's name.  ``list<t>`` is the type of a collected list."""
    if kind.startswith("list<"):
        return pa.list_(arrow_type(kind[5:-1]))
    if kind.startswith("timestamp("):
        return pa.timestamp(kind[10:-1])
    if kind == "date32":
        return pa.date32()
    if match := _FIXED_BINARY.fullmatch(kind):
        return pa.binary(int(match[1]))
    if is_decimal(kind):
        return pa.decimal128(*decimal_of(kind))
    plain = {"bool": pa.bool_(), "string": pa.string(), "binary": pa.binary()}
    return plain.get(kind) or getattr(pa, kind)()


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One column: its name and the name of its type."""

    name: str
    type: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or len(self.name) > 255:
            raise ConfigError(
                f"column {shown(self.name)}: this is no name", hint="give 1 to 255 characters"
            )
        object.__setattr__(self, "type", type_name(self.type, f"column {self.name}"))

    @property
    def width(self) -> int | None:
        return width_of(self.type)

    @property
    def arrow(self) -> pa.Field:
        return pa.field(self.name, arrow_type(self.type))

    def to_json(self) -> list[str]:
        return [self.name, self.type]

    @classmethod
    def from_json(cls, value: Any) -> Field:
        if not isinstance(value, list) or len(value) != 2:
            raise FormatError(f"plan: column {shown(value)} is not [name, type]")
        if not all(isinstance(part, str) for part in value):
            raise FormatError(f"plan: column {shown(value)} is not [name, type]")
        return cls(name=value[0], type=value[1])


def _no_schema(schema: Any, what: str) -> ConfigError:
    return ConfigError(
        f"{what}: {shown(schema)} is no schema", hint='write for example "id int64, at long"'
    )


def fields(schema: Any, what: str = "schema") -> tuple[Field, ...]:
    """Fields of a ``pa.Schema``, of a mapping or pairs of name and type, or of ``"a int64, b
    string"``.  Names are unique."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(schema, pa.Schema):
        pairs = [(f.name, f.type) for f in schema]
    elif isinstance(schema, str):
        words = [part.split(None, 1) for part in re.split(r",(?![^(]*\))", schema) if part.strip()]
        if any(len(word) != 2 for word in words):
            raise _no_schema(schema, what)
        pairs = [(name, kind.strip()) for name, kind in words]
    elif isinstance(schema, Mapping):
        pairs = list(schema.items())
    elif isinstance(schema, tuple | list):
        pairs = [(f.name, f.type) if isinstance(f, Field) else f for f in schema]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise _no_schema(schema, what)
    else:
        raise _no_schema(schema, what)
    found = tuple(
        Field(name=name, type=type_name(kind, f"{what}: column {name}")) for name, kind in pairs
    )
    if not found:
        raise ConfigError(f"{what}: there is no column", hint="name at least one column")
    names = [f.name for f in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{what}: column {name} occurs twice", hint="rename one of them")
    return found
