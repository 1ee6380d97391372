"""Which member of a consumer group reads which partition: Kafka's assignors, and the bytes in which
subscriptions and assignments are sent.  Pure decisions, no I/O.

The group's leader computes the assignment of all members.  A group may therefore mix clients, as
long as they share an assignor by name.  `range` and `roundrobin` give each member exactly the
partitions that Kafka's Java client and librdkafka give it.  Both are eager: a member gives back all
its partitions before it joins again.

    subscription    int16 version
                    int32 count, string topic each
                    bytes user data
                    (version 1 and later: partitions owned, ...)
    assignment      int16 version
                    int32 count, then string topic, int32 count, int32 partition each
                    bytes user data
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from kdirect.errors import ConfigError, ProtocolError
from kdirect.model import TopicPartition

PROTOCOL_TYPE = "consumer"
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")

# (member id, group instance id or None, topics) of every member
Members = Sequence[tuple[str, str | None, frozenset[str]]]
Assignment = dict[str, list[TopicPartition]]


def _sorted(members: Members) -> list[tuple[str, str | None, frozenset[str]]]:
    # Static members by their instance id, so that a restart with a new member id changes nothing.
    return sorted(members, key=lambda m: (m[1] is None, m[1] or m[0], m[0]))


def range_assignor(members: Members, partitions: Mapping[str, int]) -> Assignment:
    """Topic by topic, give each member that reads it neighbouring partitions.  If they do not
    divide evenly, the first members get one more.  `partitions`: topic -> number of partitions."""
    out: Assignment = {member_id: [] for member_id, _, _ in members}
    for topic in sorted(partitions):
        readers = [m[0] for m in _sorted(members) if topic in m[2]]
        if not readers:
            continue
        each, more = divmod(partitions[topic], len(readers))
        start = 0
        for i, member_id in enumerate(readers):
            n = each + (i < more)
            out[member_id] += [TopicPartition(topic, p) for p in range(start, start + n)]
            start += n
    return out


def roundrobin_assignor(members: Members, partitions: Mapping[str, int]) -> Assignment:
    """Give all partitions of all topics in turn, each to the next member that reads its topic.
    `partitions`: topic -> number of partitions."""
    order = _sorted(members)
    out: Assignment = {member_id: [] for member_id, _, _ in members}
    if not order:
        return out
    at = 0
    for topic in sorted(partitions):
        if not any(topic in m[2] for m in order):
            continue
        for p in range(partitions[topic]):
            while topic not in order[at % len(order)][2]:
                at += 1
            out[order[at % len(order)][0]].append(TopicPartition(topic, p))
            at += 1
    return out


ASSIGNORS: dict[str, Callable[[Members, Mapping[str, int]], Assignment]] = {
    "range": range_assignor,
    "roundrobin": roundrobin_assignor,
}


def check_strategies(names: Iterable[str]) -> list[str]:
    """The names of assignors as a list.  Raises ConfigError if one is unknown or there is none."""
    out = list(names)
    for name in out:
        if name not in ASSIGNORS:
            raise ConfigError(
                f"option partition.assignment.strategy: {name!r} is not known",
                hint=f"use one or more of {', '.join(ASSIGNORS)}",
            )
    if not out:
        raise ConfigError(
            "option partition.assignment.strategy is empty",
            hint=f"use one or more of {', '.join(ASSIGNORS)}",
        )
    return out


# -- bytes -----------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    raw = value.encode()
    return _I16.pack(len(raw)) + raw


def encode_subscription(topics: Iterable[str]) -> bytes:
    """A member's subscription, in version 0 and without user data."""
    names = sorted(topics)
    return _I16.pack(0) + _I32.pack(len(names)) + b"".join(map(_text, names)) + _I32.pack(-1)


def encode_assignment(tps: Iterable[TopicPartition]) -> bytes:
    """A member's assignment, in version 0 and without user data."""
    topics: dict[str, list[int]] = {}
    for tp in sorted(tps):
        topics.setdefault(tp.topic, []).append(tp.partition)
    out = bytearray(_I16.pack(0) + _I32.pack(len(topics)))
    for name, numbers in topics.items():
        out += _text(name) + _I32.pack(len(numbers)) + struct.pack(f">{len(numbers)}i", *numbers)
    return bytes(out + _I32.pack(-1))


class _Cursor:
    """Reads fields in order.  The bytes come from another member of the group, so none of them is
    trusted: a field that does not fit raises ProtocolError."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data = bytes(data)
        self.pos = 0
        self.what = what

    def take(self, n: int) -> bytes:
        if n < 0 or self.pos + n > len(self.data):
            raise ProtocolError(
                f"{self.what} is cut short",
                hint="another member of the group sent it; see which clients are in the group",
            )
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def i16(self) -> int:
        return _I16.unpack(self.take(2))[0]

    def count(self) -> int:
        n = _I32.unpack(self.take(4))[0]
        if n > len(self.data):
            raise ProtocolError(
                f"{self.what} counts {n} entries in {len(self.data)} bytes",
                hint="see which clients are in the group",
            )
        return max(n, 0)

    def text(self) -> str:
        try:
            return self.take(self.i16()).decode()
        except UnicodeDecodeError as e:
            raise ProtocolError(
                f"{self.what} holds text that is not UTF-8",
                hint="see which clients are in the group",
            ) from e


def decode_subscription(data: bytes) -> frozenset[str]:
    """The topics that a member reads.  Fields of later versions are ignored.  Raises
    ProtocolError."""
    c = _Cursor(data, "a group member's subscription")
    c.i16()
    return frozenset(c.text() for _ in range(c.count()))


def decode_assignment(data: bytes) -> list[TopicPartition]:
    """The partitions that a member was given; none for empty bytes.  Raises ProtocolError."""
    if not data:
        return []
    c = _Cursor(data, "the group's assignment")
    c.i16()
    out = []
    for _ in range(c.count()):
        topic = c.text()
        n = c.count()
        out += [TopicPartition(topic, p) for p in struct.unpack(f">{n}i", c.take(4 * n))]
    return out
