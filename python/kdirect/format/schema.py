"""Decoding of Kafka's schema-described messages from bytes that nobody vouches for.

Owns: turning (message class, version, bytes) into a message object.  The schema comes from the
field objects that a message class carries; nothing is imported from the library that made them.  No
I/O.

Invariants: every length and count is compared with what is left before it is used; null is accepted
only where the schema says nullable; text is valid UTF-8; variable-length integers have at most five
bytes.  Anything else is a ProtocolError, and nothing but a ProtocolError.  Values of type `records`
are views of the input, everything else is a copy: a message without records outlives its frame.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import Any

from kdirect.errors import ProtocolError

Reader = Callable[[memoryview, int, int], tuple[Any, int]]

_FIXED = {
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "bool": "?",
}
_ZERO_UUID = uuid.UUID(int=0)
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_decoders: dict[tuple[type, int], Callable[[memoryview, int, int], tuple[Any, int]]] = {}


def _truncated(what: str, pos: int, end: int) -> ProtocolError:
    return ProtocolError(f"message ends inside {what}, at byte {pos} of {end}")


def read_uvarint(data: memoryview, pos: int, end: int) -> tuple[int, int]:
    """An unsigned variable-length integer of at most 32 bits: (value, next position)."""
    value = 0
    for shift in (0, 7, 14, 21, 28):
        if pos >= end:
            raise _truncated("a variable-length integer", pos, end)
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > 0xFFFFFFFF:
                break
            return value, pos
    raise ProtocolError(f"variable-length integer before byte {pos} has more than 32 bits")


def skip_tags(data: memoryview, pos: int, end: int) -> int:
    """The position after a tagged section whose tags are all ignored."""
    if pos < end and data[pos] == 0:
        return pos + 1
    count, pos = read_uvarint(data, pos, end)
    for _ in range(count):
        _, pos = read_uvarint(data, pos, end)
        size, pos = read_uvarint(data, pos, end)
        if size > end - pos:
            raise _truncated("a tagged field", pos, end)
        pos += size
    return pos


def decoder(cls: Any, version: int) -> Callable[[memoryview, int, int], tuple[Any, int]]:
    """The decode function of `version` of a message class: (data, pos, end) -> (message, next
    position)."""
    key = (cls, version)
    found = _decoders.get(key)
    if found is None:
        flexible = cls.flexible_version_q(version)
        found = _decoders[key] = _struct_reader(cls._struct, cls, version, flexible)
    return found


def decode(cls: Any, version: int, data: memoryview, pos: int = 0) -> Any:
    """The message of class `cls` that `data` holds from `pos` on.  Bytes after it are ignored, as
    Kafka does."""
    return decoder(cls, version)(data, pos, len(data))[0]


def _within(versions: tuple[int, int] | None, version: int) -> bool:
    return versions is not None and versions[0] <= version <= versions[1]


def _struct_reader(schema: Any, cls: Any, version: int, flexible: bool) -> Reader:
    """Reads the fields of a struct that `version` has; runs of fixed-size ones with one unpack."""
    present = [f for f in schema._fields if _within(f._versions, version)]
    tagged = {
        f._tag: f for f in present if f._tag is not None and _within(f._tagged_versions, version)
    }
    plain = [f for f in present if f._tag not in tagged]
    steps: list[tuple[str, Any, Any]] = []
    run: list[Any] = []

    def flush() -> None:
        if run:
            steps.append(
                (
                    "run",
                    tuple(f.name for f in run),
                    struct.Struct(">" + "".join(_FIXED[f._type_str] for f in run)),
                )
            )
            run.clear()

    for f in plain:
        if f._type_str in _FIXED:
            run.append(f)
        else:
            flush()
            steps.append(("one", f.name, _field_reader(f, version, flexible)))
    flush()
    tag_readers = {tag: (f.name, _field_reader(f, version, True)) for tag, f in tagged.items()}
    name = schema._name

    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        out = object.__new__(cls)
        out._version = version
        out.tags = None
        out.unknown_tags = None
        for kind, names, how in steps:
            if kind == "run":
                if end - pos < how.size:
                    raise _truncated(f"{name}.{names[0]}", pos, end)
                for field_name, value in zip(names, how.unpack_from(data, pos), strict=True):
                    setattr(out, field_name, value)
                pos += how.size
            else:
                value, pos = how(data, pos, end)
                setattr(out, names, value)
        if flexible:
            if not tag_readers or (pos < end and data[pos] == 0):
                pos = skip_tags(data, pos, end)
            else:
                pos = _read_tags(tag_readers, out, data, pos, end)
        return out, pos

    return read


def _read_tags(
    readers: dict[int, tuple[str, Reader]], out: Any, data: memoryview, pos: int, end: int
) -> int:
    count, pos = read_uvarint(data, pos, end)
    for _ in range(count):
        tag, pos = read_uvarint(data, pos, end)
        size, pos = read_uvarint(data, pos, end)
        if size > end - pos:
            raise _truncated("a tagged field", pos, end)
        known = readers.get(tag)
        if known is not None:
            value, stop = known[1](data, pos, pos + size)
            if stop != pos + size:
                raise ProtocolError(
                    f"tagged field {known[0]} occupies {stop - pos} of its {size} bytes"
                )
            setattr(out, known[0], value)
        pos += size
    return pos


def _field_reader(f: Any, version: int, flexible: bool) -> Reader:
    nullable = _within(f._nullable_versions, version)
    label = f._name
    if f.is_array():
        return _array_reader(f, label, version, flexible, nullable)
    if f.is_struct():
        return _nested_reader(f, label, version, flexible, nullable)
    kind = f._type_str
    if kind in _FIXED:
        return _fixed_reader(label, struct.Struct(">" + _FIXED[kind]))
    if kind == "bitfield":
        return _bitfield_reader(label)
    if kind == "uuid":
        return _uuid_reader(label)
    if kind == "string":
        return _string_reader(label, flexible, nullable)
    if kind in ("bytes", "records"):
        return _bytes_reader(label, flexible, nullable, copy=kind == "bytes")
    raise AssertionError(f"schema type {kind} of {label} is unknown")


def _fixed_reader(label: str, fmt: struct.Struct) -> Reader:
    size = fmt.size

    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        if end - pos < size:
            raise _truncated(label, pos, end)
        return fmt.unpack_from(data, pos)[0], pos + size

    return read


def _bitfield_reader(label: str) -> Reader:
    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        if end - pos < 4:
            raise _truncated(label, pos, end)
        word = int.from_bytes(data[pos : pos + 4], "big")
        bits = {bit for bit in range(32) if word >> bit & 1}
        return (None if bits == {31} else bits), pos + 4

    return read


def _uuid_reader(label: str) -> Reader:
    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        if end - pos < 16:
            raise _truncated(label, pos, end)
        value = uuid.UUID(bytes=bytes(data[pos : pos + 16]))
        return (None if value == _ZERO_UUID else value), pos + 16

    return read


def _length(label: str, flexible: bool, short: bool) -> Reader:
    """Reads a length; -1 stands for null.  `short` is the two-byte form of strings."""
    fixed = _I16 if short else _I32

    def read(data: memoryview, pos: int, end: int) -> tuple[int, int]:
        if flexible:
            n, pos = read_uvarint(data, pos, end)
            n -= 1
        else:
            if end - pos < fixed.size:
                raise _truncated(label, pos, end)
            n = fixed.unpack_from(data, pos)[0]
            pos += fixed.size
            if n < -1:
                raise ProtocolError(f"{label} has length {n}")
        if n > end - pos:
            raise ProtocolError(f"{label} has length {n}, but {end - pos} bytes are left")
        return n, pos

    return read


def _string_reader(label: str, flexible: bool, nullable: bool) -> Reader:
    length = _length(label, flexible, True)

    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        n, pos = length(data, pos, end)
        if n < 0:
            if not nullable:
                raise ProtocolError(f"{label} is null")
            return None, pos
        try:
            return str(data[pos : pos + n], "utf-8"), pos + n
        except UnicodeDecodeError as e:
            raise ProtocolError(f"{label} is not UTF-8") from e

    return read


def _bytes_reader(label: str, flexible: bool, nullable: bool, *, copy: bool) -> Reader:
    length = _length(label, flexible, False)

    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        n, pos = length(data, pos, end)
        if n < 0:
            if not nullable:
                raise ProtocolError(f"{label} is null")
            return None, pos
        view = data[pos : pos + n]
        return (bytes(view) if copy else view), pos + n

    return read


def _array_reader(f: Any, label: str, version: int, flexible: bool, nullable: bool) -> Reader:
    length = _length(label, flexible, False)
    inner = f.array_of
    if not f.is_struct_array() and inner._type_str in _FIXED:
        code = _FIXED[inner._type_str]
        width = struct.calcsize(">" + code)

        def read_fixed(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
            n, pos = length(data, pos, end)
            if n < 0:
                if not nullable:
                    raise ProtocolError(f"{label} is null")
                return None, pos
            if n * width > end - pos:
                raise ProtocolError(f"{label} has {n} elements, but {end - pos} bytes are left")
            return list(struct.unpack_from(f">{n}{code}", data, pos)), pos + n * width

        return read_fixed
    if f.is_struct_array():
        element = _struct_reader(inner, inner.data_class, version, flexible)
    else:
        element = _element_reader(inner, label, version, flexible)

    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        n, pos = length(
            data, pos, end
        )  # an element has at least one byte: a count above the bytes left is refused here
        if n < 0:
            if not nullable:
                raise ProtocolError(f"{label} is null")
            return None, pos
        out = []
        for _ in range(n):
            value, pos = element(data, pos, end)
            out.append(value)
        return out, pos

    return read


def _element_reader(inner: Any, label: str, version: int, flexible: bool) -> Reader:
    # `nullableVersions` on the schema of a plain array is the array's own, never its elements'.
    kind = inner._type_str
    if kind == "string":
        return _string_reader(label, flexible, False)
    if kind in ("bytes", "records"):
        return _bytes_reader(label, flexible, False, copy=kind == "bytes")
    return _field_reader(inner, version, flexible)


def _nested_reader(f: Any, label: str, version: int, flexible: bool, nullable: bool) -> Reader:
    inner = _struct_reader(f, f.data_class, version, flexible)
    if not nullable:
        return inner

    def read(data: memoryview, pos: int, end: int) -> tuple[Any, int]:
        if pos >= end:
            raise _truncated(label, pos, end)
        if data[pos] == 0xFF:
            return None, pos + 1
        return inner(data, pos + 1, end)

    return read


def build(cls: Any, **fields: Any) -> Any:
    """A message from plain values: structs are given as dicts, arrays of structs as iterables of
    dicts.

    Fields left out take the schema's default when the message is encoded; a name that the schema
    does not have is an AttributeError.  Nothing is tied to a version, so that a field which some
    versions lack may be given.
    """
    message = cls()
    _fill(message, cls._struct, fields)
    return message


# No value of these is a struct, or an array of structs.
PLAIN = frozenset({int, str, bytes, bool, float, type(None)})


def _fill(target: Any, schema: Any, values: dict[str, Any]) -> None:
    known = schema.fields
    for name, value in values.items():
        f = known.get(name)
        if f is None:
            raise AttributeError(f"{schema._name} has no field {name}")
        if value.__class__ in PLAIN:  # most are, and a broker builds thousands for one answer
            pass
        elif f.is_struct_array():
            value = [_nested(f.array_of, item) for item in value]
        elif f.is_struct():
            value = _nested(f, value)
        setattr(target, name, value)


def _nested(schema: Any, values: dict[str, Any]) -> Any:
    out = object.__new__(schema.data_class)
    _fill(out, schema, values)
    return out
