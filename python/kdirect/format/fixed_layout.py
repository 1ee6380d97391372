"""Fixed layouts: values that are C structs, described once.

Owns: `FixedLayout`, which says at which position of a value each field lies, the names of the types
that a field may have, and what each becomes in Arrow and in numpy.  It is data only: it can be
written as JSON, compared and hashed.  The loop that reads such values is in fixed.pyx.

    FixedLayout.of("user:int64", "price:float64", "name:string[32]", "time:int64")

Numbers are little endian.  Fields may have gaps between them and may overlap; a value has exactly
`size` bytes.  Types:

    int8 .. int64, uint8 .. uint64, float32, float64     as their names say
    bool             one byte; any byte but 0 is true
    date32           int32 days since 1970
    timestamp(u)     int64 since 1970 UTC in the unit u: s, ms, us or ns
    decimal128(p,s)  16 bytes, two's complement
    binary[n]        n bytes
    string[n]        n bytes of UTF-8, of which those from the first zero byte on do not count
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kdirect.errors import ConfigError

LARGEST_VALUE = 1 << 20
LARGEST_TEXT = 1 << 16

# name: (Arrow type, bytes, numpy's name)
_PLAIN: dict[str, tuple[pa.DataType, int, str]] = {
    "int8": (pa.int8(), 1, "<i1"),
    "int16": (pa.int16(), 2, "<i2"),
    "int32": (pa.int32(), 4, "<i4"),
    "int64": (pa.int64(), 8, "<i8"),
    "uint8": (pa.uint8(), 1, "<u1"),
    "uint16": (pa.uint16(), 2, "<u2"),
    "uint32": (pa.uint32(), 4, "<u4"),
    "uint64": (pa.uint64(), 8, "<u8"),
    "float32": (pa.float32(), 4, "<f4"),
    "float64": (pa.float64(), 8, "<f8"),
    "bool": (pa.bool_(), 1, "<u1"),
    "date32": (pa.date32(), 4, "<i4"),
    "timestamp(s)": (pa.timestamp("s"), 8, "<i8"),
    "timestamp(ms)": (pa.timestamp("ms"), 8, "<i8"),
    "timestamp(us)": (pa.timestamp("us"), 8, "<i8"),
    "timestamp(ns)": (pa.timestamp("ns"), 8, "<i8"),
}
_SIZED = re.compile(r"(binary|string)\[([0-9]{1,6})\]")
_DECIMAL = re.compile(r"decimal128\(([0-9]{1,2}), ?([0-9]{1,2})\)")
_KNOWN = ", ".join([*_PLAIN, "decimal128(p,s)", "binary[n]", "string[n]"])


@dataclass(frozen=True, slots=True)
class FixedType:
    """What a type's name means: `arrow` is the type of the column, `width` the bytes in a value,
    `numpy` the type of these bytes."""

    name: str
    arrow: pa.DataType
    width: int
    numpy: str


def fixed_type(name: str) -> FixedType:
    """The type of this name; ConfigError for one that the module does not list."""
    if name in _PLAIN:
        return FixedType(name, *_PLAIN[name])
    if sized := _SIZED.fullmatch(name):
        kind, width = sized[1], int(sized[2])
        if not 0 < width <= LARGEST_TEXT:
            raise ConfigError(
                f"the type {name} has {width} bytes", hint=f"give 1 to {LARGEST_TEXT} bytes"
            )
        return FixedType(
            name, pa.string() if kind == "string" else pa.binary(width), width, f"V{width}"
        )
    if decimal := _DECIMAL.fullmatch(name):
        precision, scale = int(decimal[1]), int(decimal[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise ConfigError(
                f"the type {name} is out of range",
                hint="give a precision of 1 to 38 and a scale of at most the precision",
            )
        return FixedType(
            f"decimal128({precision},{scale})", pa.decimal128(precision, scale), 16, "V16"
        )
    raise ConfigError(
        f"a fixed layout knows no type {name!r}", hint=f"use one of {_KNOWN}, with sizes in them"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedField:
    """One field: `type` is a name of the module's table, `position` that of its first byte."""

    name: str
    type: str
    position: int

    @property
    def kind(self) -> FixedType:
        return fixed_type(self.type)

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.position + self.kind.width


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLayout:
    """A struct of `size` bytes.  Raises ConfigError for fields that do not fit, or have one
    name."""

    size: int
    fields: tuple[FixedField, ...]

    def __post_init__(self) -> None:
        if not 0 < self.size <= LARGEST_VALUE:
            raise ConfigError(
                f"a fixed layout of {self.size} bytes", hint=f"give 1 to {LARGEST_VALUE} bytes"
            )
        seen: set[str] = set()
        for field in self.fields:
            if not field.name or field.name in seen:
                raise ConfigError(
                    f"two fields of a fixed layout have the name {field.name!r}"
                    if field.name
                    else "a field of a fixed layout has no name",
                    hint="give each field a name of its own",
                )
            seen.add(field.name)
            if field.position < 0 or field.end > self.size:
                raise ConfigError(
                    f"the field {field.name} is at [{field.position}, {field.end}) of a value of"
                    f" {self.size} bytes",
                    hint="correct its position, or the size of the layout",
                )

    @classmethod
    def of(cls, *fields: str, size: int | None = None) -> FixedLayout:
        """Fields of the form "name:type", each right after the one before, or "name:type@position"
        at this position.  `size`: where the last one ends, unless it is given."""
        out: list[FixedField] = []
        end = 0
        for text in fields:
            name, colon, rest = text.partition(":")
            kind, _, position = rest.partition("@")
            if not colon or (position and not position.strip().isdigit()):
                raise ConfigError(
                    f"{text!r} describes no field", hint='write "name:type" or "name:type@position"'
                )
            field = FixedField(
                name=name.strip(),
                type=fixed_type(kind.strip()).name,
                position=int(position) if position else end,
            )
            end = field.end
            out.append(field)
        whole = max((field.end for field in out), default=0)
        return cls(size=whole if size is None else size, fields=tuple(out))

    @classmethod
    def from_json(cls, value: Any) -> FixedLayout:
        """The layout that `to_json` wrote: {"size": 16, "fields": [["key", "int64", 0], ..]}."""
        try:
            fields = tuple(
                FixedField(name=str(name), type=fixed_type(str(kind)).name, position=int(position))
                for name, kind, position in value["fields"]
            )
            return cls(size=int(value["size"]), fields=fields)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(
                f"a fixed layout cannot be read: {e!r}",
                hint='give {"size": bytes, "fields": [[name, type, position], ..]}',
            ) from e

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "fields": [[f.name, f.type, f.position] for f in self.fields]}

    def field(self, name: str) -> FixedField:
        """The field of this name.  ConfigError if there is none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise ConfigError(
            f"the layout has no field {name!r}",
            hint="it has " + ", ".join(field.name for field in self.fields),
        )

    def schema(self, names: Iterable[str] | None = None) -> pa.Schema:
        """Arrow's types of the fields of these names; of all of them by default."""
        chosen = self.fields if names is None else [self.field(name) for name in names]
        return pa.schema([pa.field(f.name, f.kind.arrow, nullable=False) for f in chosen])

    def dtype(self) -> Any:
        """numpy's structured type of a value: what generators fill."""
        import numpy as np

        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [field.kind.numpy for field in self.fields],
                "offsets": [field.position for field in self.fields],
                "itemsize": self.size,
            }
        )

    def values(self, rows: Any) -> pa.Array:
        """The values of a contiguous array of `dtype`, as a binary column over the same memory."""
        import numpy as np

        if rows.dtype.itemsize != self.size or not rows.flags.c_contiguous:
            raise ConfigError(
                f"rows of {rows.dtype.itemsize} bytes are no values of a layout of {self.size}",
                hint="make them with the layout's dtype()",
            )
        if rows.nbytes >= 1 << 31:
            raise ConfigError(
                f"{rows.nbytes} bytes do not fit into one column", hint="take fewer rows at a time"
            )
        ends = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(self.size)
        return pa.Array.from_buffers(
            pa.binary(), len(rows), [None, pa.py_buffer(ends), pa.py_buffer(rows)]
        )


def layout_of(value: FixedLayout | Mapping[str, Any] | Iterable[str]) -> FixedLayout:
    """What a user may give for a layout: one, its JSON, or the texts of `FixedLayout.of`."""
    if isinstance(value, FixedLayout):
        return value
    if isinstance(value, Mapping):
        return FixedLayout.from_json(value)
    return FixedLayout.of(*value)
