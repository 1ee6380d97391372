"""Messages of Kafka's protocol with random values, and frames that are no messages any more."""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable
from typing import Any

from kdirect.format import protocol as p
from kdirect.format import schema

# Names that a request has to say to get anywhere, and some that it should not.
NAMES = (
    "t",
    "u",
    "g",
    "x",
    "",
    ".",
    "__consumer_offsets",
    "__transaction_state",
    "range",
    "uniform",
)
NO_ID = uuid.UUID(int=0)
HUGE = (0x7FFFFFFF, 0x7FFFFFF0, 0x40000000, 0xFFFFFFFE, 0x80000000)
HUGE_VARINTS = (b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\x0f", b"\xff" * 10, b"\x80" * 9 + b"\1")


def sample(
    fields: Any, version: int, rng: random.Random, scalar: Callable[[str, random.Random], Any]
) -> dict[str, Any]:
    """Plain values for the fields of a schema, random but valid.  `scalar(type, rng)` makes one."""
    out: dict[str, Any] = {}
    for f in fields:
        if not f.for_version_q(version):
            continue
        if f.nullable_for_version_q(version) and rng.random() < 0.3:
            out[f.name] = None
        elif f.is_struct_array():
            out[f.name] = [
                sample(f.array_of._fields, version, rng, scalar) for _ in range(rng.randrange(3))
            ]
        elif f.is_array():
            out[f.name] = [scalar(f.array_of._type_str, rng) for _ in range(rng.randrange(4))]
        elif f.is_struct():
            if f._tag is None:
                out[f.name] = sample(f._fields, version, rng, scalar)
        else:
            out[f.name] = scalar(f._type_str, rng)
    return out


def anything(kind: str, rng: random.Random) -> Any:
    """Any value of a type."""
    bits = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}.get(kind)
    if bits:
        return rng.randrange(-(1 << bits - 1), 1 << bits - 1)
    return {
        "uint16": lambda: rng.randrange(1 << 16),
        "bool": lambda: rng.random() < 0.5,
        "float64": lambda: rng.random(),
        "string": lambda: "".join(rng.choice("aé漢😀-") for _ in range(rng.randrange(200))),
        "bytes": lambda: rng.randbytes(rng.randrange(300)),
        "records": lambda: rng.randbytes(rng.randrange(300)),
        "uuid": lambda: uuid.UUID(bytes=rng.randbytes(16)),
        "bitfield": lambda: {rng.randrange(31)},
    }[kind]()


def likely(kind: str, rng: random.Random) -> Any:
    """A value that gets a request past the first checks more often than not."""
    if kind == "string" and rng.random() < 0.8:
        return rng.choice(NAMES)
    if kind == "uuid" and rng.random() < 0.4:
        return NO_ID
    if kind.startswith("int") and rng.random() < 0.8:
        return rng.choice((0, 0, 0, 1, 1, 2, 3, 5, -1, -1, -2, 100))
    return anything(kind, rng)


def message_bytes(
    cls: Any,
    version: int,
    rng: random.Random,
    scalar: Callable[[str, random.Random], Any] = anything,
) -> bytes:
    """An encoded body."""
    values = sample(cls._struct._fields, version, rng, scalar)
    return bytes(schema.build(cls, **values).encode(version=version))


def frame(api: p.Api, version: int, rng: random.Random) -> bytes:
    """A request of this API and version with its size: one that may be right, or one that is cut,
    damaged, promises more than it brings, or is no message at all."""
    header = struct.pack(">hhi", api.key, version, rng.randrange(1 << 31))
    header += struct.pack(">h", -1) if rng.random() < 0.5 else b"\0\1x"
    if api.low <= version <= api.high and api.request.flexible_version_q(version):
        header += b"\0"
    known = min(max(version, api.low), api.high)
    body = bytearray(message_bytes(api.request, known, rng, likely))
    kind = rng.randrange(8)
    at = rng.randrange(len(body) + 1)
    if kind == 0:
        del body[at:]
    elif kind == 1:
        for _ in range(rng.randrange(1, 4)):
            if body:
                body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        body[at : at + 4] = struct.pack(">I", rng.choice(HUGE))
    elif kind == 3:
        body[at : at + 1] = rng.choice(HUGE_VARINTS)
    elif kind == 4:
        body[:] = rng.randbytes(rng.randrange(400))
    elif kind == 5:
        body += rng.randbytes(rng.randrange(1, 50))
    data = header + bytes(body)
    return struct.pack(">i", len(data)) + data
