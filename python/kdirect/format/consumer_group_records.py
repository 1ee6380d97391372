"""Keys and values of the records of ``__consumer_offsets`` about groups of KIP-848.  No I/O.

Kafka's own schemas (ConsumerGroup*.json of its group coordinator).  Keys are not flexible, values
are, in version 0.  A key's version says which record it is::

    3   group                                   epoch
    4   group                                   topics: id, name, partitions (Kafka until 4.0)
    5   group, member                           who a member is, and what it subscribes to
    6   group                                   epoch of the target assignment
    7   group, member                           what the member is to have
    8   group, member                           what it has, its epoch, and what it must give back
    16  group, regular expression               the topics that it stands for

A null value is a tombstone.  Kafka's newer group value has a hash of the topics' metadata in a
tagged field; here the record of version 4 says the same, which Kafka reads as well.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kdirect.errors import FormatError
from kdirect.format.datapath import uvarint
from kdirect.format.record_fields import I16, I32, I64, FieldReader, raw_text

GROUP, TOPICS, MEMBER, TARGET_EPOCH, TARGET, CURRENT, REGEX = 3, 4, 5, 6, 7, 8, 16
_OF_MEMBERS = frozenset((MEMBER, TARGET, CURRENT, REGEX))
KINDS = _OF_MEMBERS | {GROUP, TOPICS, TARGET_EPOCH}

Partition = tuple[uuid.UUID, int]


class Key(NamedTuple):
    """`name`: the member's id, or the regular expression; empty for records of the whole group."""

    kind: int
    group: str
    name: str = ""


class TopicFacts(NamedTuple):
    """What a group remembers of a topic that it reads."""

    topic_id: uuid.UUID
    partitions: int


class ClassicProtocols(NamedTuple):
    """What only a member of the classic protocol has; see `broker.group_state.Member`."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


class MemberValue(NamedTuple):
    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topics: frozenset[str]
    regex: str | None
    rebalance_timeout_ms: int
    assignor: str | None
    classic: ClassicProtocols | None


class CurrentValue(NamedTuple):
    epoch: int
    previous_epoch: int
    state: int
    assigned: frozenset[Partition]
    revoking: frozenset[Partition]


class RegexValue(NamedTuple):
    """`version`: of the topics that it was compared with; `timestamp_ms`: when that was."""

    topics: frozenset[str]
    version: int
    timestamp_ms: int


# -- writing ---------------------------------------------------------------------------------------


def _key_text(value: str) -> bytes:
    raw = raw_text(value, FieldReader.what)
    return I16.pack(len(raw)) + raw


def _text(value: str | None) -> bytes:
    if value is None:
        return b"\0"
    raw = value.encode()
    return uvarint(len(raw) + 1) + raw


def _texts(values: Iterable[str]) -> bytes:
    names = sorted(values)
    return uvarint(len(names) + 1) + b"".join(map(_text, names))


def _assignment(partitions: Iterable[Partition]) -> bytes:
    topics: dict[uuid.UUID, list[int]] = {}
    for topic, index in sorted(partitions):
        topics.setdefault(topic, []).append(index)
    out = bytearray(uvarint(len(topics) + 1))
    for topic, indexes in topics.items():
        out += topic.bytes + uvarint(len(indexes) + 1)
        out += struct.pack(f">{len(indexes)}i", *indexes) + b"\0"
    return bytes(out)


def key(kind: int, group: str, name: str = "") -> bytes:
    """The key of a record; FormatError if a name is too long for it."""
    out = I16.pack(kind) + _key_text(group)
    return out + _key_text(name) if kind in _OF_MEMBERS else out


def epoch_value(epoch: int) -> bytes:
    """The value of GROUP and of TARGET_EPOCH."""
    return I16.pack(0) + I32.pack(epoch) + b"\0"


def topics_value(topics: Mapping[str, TopicFacts]) -> bytes:
    out = bytearray(I16.pack(0) + uvarint(len(topics) + 1))
    for name in sorted(topics):
        facts = topics[name]
        out += facts.topic_id.bytes + _text(name) + I32.pack(facts.partitions)
        out += b"\x01\0"  # no racks of partitions; no tagged fields
    return bytes(out + b"\0")


def member_value(m: MemberValue) -> bytes:
    out = bytearray(I16.pack(0))
    out += _text(m.instance_id) + _text(m.rack_id) + _text(m.client_id) + _text(m.client_host)
    out += _texts(m.topics) + _text(m.regex) + I32.pack(m.rebalance_timeout_ms)
    out += _text(m.assignor)
    if m.classic is None:
        return bytes(out + b"\0")
    # A nullable struct in a tagged field begins with a byte that says that it is there.
    tagged = bytearray(b"\x01" + I32.pack(m.classic.session_timeout_ms))
    tagged += uvarint(len(m.classic.protocols) + 1)
    for name, metadata in m.classic.protocols:
        tagged += _text(name) + uvarint(len(metadata) + 1) + metadata + b"\0"
    tagged += b"\0"
    return bytes(out + b"\x01\0" + uvarint(len(tagged)) + tagged)


def target_value(partitions: Iterable[Partition]) -> bytes:
    return I16.pack(0) + _assignment(partitions) + b"\0"


def current_value(c: CurrentValue) -> bytes:
    head = I16.pack(0) + I32.pack(c.epoch) + I32.pack(c.previous_epoch) + bytes((c.state,))
    return head + _assignment(c.assigned) + _assignment(c.revoking) + b"\0"


def regex_value(r: RegexValue) -> bytes:
    times = I64.pack(r.version) + I64.pack(r.timestamp_ms)
    return I16.pack(0) + _texts(r.topics) + times + b"\0"


# -- reading ---------------------------------------------------------------------------------------


class _Cursor(FieldReader):
    def key_text(self) -> str:
        return self.decoded(self.i16())

    def null_text(self) -> str | None:
        n = self.uvarint()
        return None if n == 0 else self.decoded(n - 1)

    def text(self) -> str:
        return self.null_text() or ""

    def count(self) -> int:
        n = self.uvarint() - 1
        if n > len(self.data) - self.pos:
            raise FormatError(f"a record of __consumer_offsets counts {n} entries")
        return max(n, 0)

    def texts(self) -> frozenset[str]:
        return frozenset(self.text() for _ in range(self.count()))

    def topic_id(self) -> uuid.UUID:
        return uuid.UUID(bytes=self.take(16))

    def assignment(self) -> frozenset[Partition]:
        out: set[Partition] = set()
        for _ in range(self.count()):
            topic = self.topic_id()
            n = self.count()
            out.update((topic, i) for i in struct.unpack(f">{n}i", self.take(4 * n)))
            self.tags()
        return frozenset(out)

    def version_0(self) -> None:
        version = self.i16()
        if version != 0:
            raise FormatError(f"a record about a consumer group has version {version}")


def parse_key(data: bytes) -> Key | None:
    """Which record it is; None for one of another kind.  FormatError."""
    c = _Cursor(data)
    kind = c.i16()
    if kind not in KINDS:
        return None
    return Key(kind, c.key_text(), c.key_text() if kind in _OF_MEMBERS else "")


def parse_epoch(data: bytes) -> int:
    c = _Cursor(data)
    c.version_0()
    return c.i32()


def parse_topics(data: bytes) -> dict[str, TopicFacts]:
    c = _Cursor(data)
    c.version_0()
    out = {}
    for _ in range(c.count()):
        topic_id, name, partitions = c.topic_id(), c.text(), c.i32()
        for _ in range(c.count()):  # racks, of Kafka before 4.0
            c.i32()
            c.texts()
            c.tags()
        c.tags()
        out[name] = TopicFacts(topic_id, partitions)
    return out


def parse_member(data: bytes) -> MemberValue:
    c = _Cursor(data)
    c.version_0()
    instance, rack, client, host = c.null_text(), c.null_text(), c.text(), c.text()
    topics, regex, rebalance, assignor = c.texts(), c.null_text(), c.i32(), c.null_text()
    tagged = c.tags().get(0)
    classic = None
    if tagged is not None and tagged[:1] == b"\x01":
        t = _Cursor(tagged)
        t.take(1)
        session = t.i32()
        protocols = []
        for _ in range(t.count()):
            name = t.text()
            protocols.append((name, t.take(max(0, t.uvarint() - 1))))
            t.tags()
        classic = ClassicProtocols(session, tuple(protocols))
    return MemberValue(instance, rack, client, host, topics, regex, rebalance, assignor, classic)


def parse_target(data: bytes) -> frozenset[Partition]:
    c = _Cursor(data)
    c.version_0()
    return c.assignment()


def parse_current(data: bytes) -> CurrentValue:
    c = _Cursor(data)
    c.version_0()
    epoch, previous, state = c.i32(), c.i32(), c.take(1)[0]
    return CurrentValue(epoch, previous, state, c.assignment(), c.assignment())


def parse_regex(data: bytes) -> RegexValue:
    c = _Cursor(data)
    c.version_0()
    return RegexValue(c.texts(), c.i64(), c.i64())
