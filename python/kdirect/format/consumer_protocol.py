"""What consumers of a classic group say to its leader, and what it gives them, as bytes.  No I/O.

Kafka's ConsumerProtocolSubscription.json and ConsumerProtocolAssignment.json, big endian, not
flexible.  The coordinator reads them too, where a group has members of both protocols (KIP-848)::

    subscription    int16 version
                    int32 count, string topic each
                    nullable bytes user data
        1 and later int32 count, then string topic, int32 count, int32 partition each: owned
        2 and later int32 generation, or -1
        3 and later nullable string rack
    assignment      int16 version
                    int32 count, then string topic, int32 count, int32 partition each
                    nullable bytes user data

Fields that a newer version adds at the end are ignored.  The bytes come from other processes: what
does not fit is a FormatError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from kdirect.errors import FormatError
from kdirect.format.record_fields import I16, I32, FieldReader
from kdirect.model import TopicPartition

PROTOCOL_TYPE = "consumer"
HIGHEST = 3  # of a subscription's versions


@dataclass(frozen=True, slots=True)
class Subscription:
    """`owned`: what the member still reads; `generation`: in which it was given that, or -1."""

    topics: frozenset[str]
    user_data: bytes | None = None
    owned: frozenset[TopicPartition] = frozenset()
    generation: int = -1
    rack: str | None = None
    version: int = HIGHEST


def _text(value: str | None) -> bytes:
    if value is None:
        return I16.pack(-1)
    raw = value.encode()
    return I16.pack(len(raw)) + raw


def _blob(value: bytes | None) -> bytes:
    return I32.pack(-1) if value is None else I32.pack(len(value)) + value


def _partitions(tps: Iterable[TopicPartition]) -> bytes:
    topics: dict[str, list[int]] = {}
    for tp in sorted(tps):
        topics.setdefault(tp.topic, []).append(tp.partition)
    out = bytearray(I32.pack(len(topics)))
    for name, numbers in topics.items():
        out += _text(name) + I32.pack(len(numbers)) + struct.pack(f">{len(numbers)}i", *numbers)
    return bytes(out)


def encode_subscription(s: Subscription) -> bytes:
    """The bytes of a subscription in its version."""
    names = sorted(s.topics)
    out = bytearray(I16.pack(s.version) + I32.pack(len(names)))
    for name in names:
        out += _text(name)
    out += _blob(s.user_data)
    if s.version >= 1:
        out += _partitions(s.owned)
    if s.version >= 2:
        out += I32.pack(s.generation)
    if s.version >= 3:
        out += _text(s.rack)
    return bytes(out)


def encode_assignment(
    tps: Iterable[TopicPartition], version: int = 0, user_data: bytes | None = None
) -> bytes:
    """The bytes of an assignment.  All versions have the same fields."""
    return I16.pack(version) + _partitions(tps) + _blob(user_data)


class _Cursor(FieldReader):
    def __init__(self, data: bytes, what: str) -> None:
        super().__init__(bytes(data))
        self.what = what

    def count(self) -> int:
        n = self.i32()
        if n > self.left():
            raise FormatError(f"{self.what} counts {n} entries in {self.left()} bytes")
        return max(n, 0)

    def text(self) -> str:
        value = self.null_short_text()
        if value is None:
            raise FormatError(f"{self.what} has no name where one is needed")
        return value

    def null_blob(self) -> bytes | None:
        n = self.i32()
        return None if n == -1 else self.take(n)

    def partitions(self) -> list[TopicPartition]:
        out = []
        for _ in range(self.count()):
            topic = self.text()
            n = self.count()
            out += [TopicPartition(topic, p) for p in struct.unpack(f">{n}i", self.take(4 * n))]
        return out


def decode_subscription(data: bytes) -> Subscription:
    """A member's subscription.  FormatError."""
    c = _Cursor(data, "a group member's subscription")
    version = c.i16()
    if version < 0:
        raise FormatError(f"a group member's subscription has version {version}")
    topics = frozenset(c.text() for _ in range(c.count()))
    # Clients of old (and the tests of some) end after the topics.
    user_data = c.null_blob() if c.left() else None
    owned = frozenset(c.partitions()) if version >= 1 and c.left() else frozenset()
    generation = c.i32() if version >= 2 and c.left() else -1
    rack = c.null_short_text() if version >= 3 and c.left() else None
    return Subscription(topics, user_data, owned, generation, rack, version)


def decode_assignment(data: bytes) -> list[TopicPartition]:
    """The partitions that a member was given; none for empty bytes.  FormatError."""
    if not data:
        return []
    c = _Cursor(data, "the group's assignment")
    c.i16()
    return c.partitions()
