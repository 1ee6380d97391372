"""Keys and values of the records of ``__consumer_offsets``, as Kafka writes them.  No I/O.

Kafka's own schemas (OffsetCommitKey/Value.json, GroupMetadataKey/Value.json), big endian::

    offset key, version 1      int16 1   string group   string topic   int32 partition
    offset value, version 3    int16 3   int64 offset   int32 leader epoch   string metadata
                               int64 commit time
    group key, version 2       int16 2   string group
    group value, version 3     int16 3   string protocol type   int32 generation
                               nullable string protocol   nullable string leader
                               int64 state time   int32 count, then for each member:
                                   string id   nullable string instance id
                                   string client id   string client host
                                   int32 rebalance timeout   int32 session timeout
                                   bytes subscription   bytes assignment

A null value is a tombstone: it deletes the offset or the group.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from kdirect.errors import FormatError
from kdirect.format.record_fields import I16, I32, I64, FieldReader, raw_text

_OFFSET_V3 = struct.Struct(">hqi")

OFFSET_KEY_VERSIONS = (0, 1)
GROUP_KEY_VERSION = 2


class CommittedOffset(NamedTuple):
    """`timestamp_ms`: when it was committed."""

    offset: int
    leader_epoch: int
    metadata: str
    timestamp_ms: int


class MemberRecord(NamedTuple):
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupRecord(NamedTuple):
    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    state_timestamp_ms: int
    members: tuple[MemberRecord, ...]


def _text(value: str | None) -> bytes:
    if value is None:
        return I16.pack(-1)
    raw = raw_text(value, FieldReader.what)
    return I16.pack(len(raw)) + raw


def _blob(value: bytes) -> bytes:
    return I32.pack(len(value)) + value


def offset_key(group: str, topic: str, partition: int) -> bytes:
    return I16.pack(1) + _text(group) + _text(topic) + I32.pack(partition)


def offset_value(committed: CommittedOffset) -> bytes:
    return (
        _OFFSET_V3.pack(3, committed.offset, committed.leader_epoch)
        + _text(committed.metadata)
        + I64.pack(committed.timestamp_ms)
    )


def group_key(group: str) -> bytes:
    return I16.pack(GROUP_KEY_VERSION) + _text(group)


def group_value(g: GroupRecord) -> bytes:
    out = bytearray(
        I16.pack(3)
        + _text(g.protocol_type)
        + I32.pack(g.generation)
        + _text(g.protocol)
        + _text(g.leader)
    )
    out += I64.pack(g.state_timestamp_ms) + I32.pack(len(g.members))
    for m in g.members:
        out += _text(m.member_id) + _text(m.instance_id) + _text(m.client_id) + _text(m.client_host)
        out += (
            I32.pack(m.rebalance_timeout_ms)
            + I32.pack(m.session_timeout_ms)
            + _blob(m.subscription)
            + _blob(m.assignment)
        )
    return bytes(out)


class _Cursor(FieldReader):
    def text(self) -> str:
        return self.null_short_text() or ""

    def blob(self) -> bytes:
        return self.take(self.i32())


def parse_key(data: bytes) -> tuple[str, str, int] | str | None:
    """(group, topic, partition) of an offset, the name of a group, or None for a key of a kind that
    we do not know."""
    c = _Cursor(data)
    version = c.i16()
    if version in OFFSET_KEY_VERSIONS:
        return c.text(), c.text(), c.i32()
    return c.text() if version == GROUP_KEY_VERSION else None


def parse_offset_value(data: bytes) -> CommittedOffset:
    c = _Cursor(data)
    version = c.i16()
    if not 0 <= version <= 4:
        raise FormatError(f"offset value of version {version}")
    offset = c.i64()
    epoch = c.i32() if version >= 3 else -1
    return CommittedOffset(offset, epoch, c.text(), c.i64())


def parse_group_value(data: bytes) -> GroupRecord:
    c = _Cursor(data)
    version = c.i16()
    if not 0 <= version <= 3:
        raise FormatError(f"group value of version {version}")
    protocol_type, generation = c.text(), c.i32()
    protocol, leader = c.null_short_text(), c.null_short_text()
    since = c.i64() if version >= 2 else -1
    members = []
    for _ in range(c.i32()):
        member_id = c.text()
        instance_id = c.null_short_text() if version >= 3 else None
        client_id, host = c.text(), c.text()
        rebalance = c.i32() if version >= 1 else -1
        session = c.i32()
        if rebalance < 0:
            rebalance = session
        members.append(
            MemberRecord(
                member_id, instance_id, client_id, host, rebalance, session, c.blob(), c.blob()
            )
        )
    return GroupRecord(protocol_type, generation, protocol, leader, since, tuple(members))


def subscribed_topics(subscription: bytes) -> frozenset[str]:
    """The topics of a consumer's subscription (ConsumerProtocolSubscription, any version);
    FormatError."""
    c = _Cursor(subscription)
    c.i16()
    n = c.i32()
    if n < 0:
        return frozenset()
    return frozenset(c.text() for _ in range(n))


@lru_cache(maxsize=4096)  # a transaction asks several times
def partition_of(group: str, partitions: int) -> int:
    """Kafka's choice of the __consumer_offsets partition of a group: the absolute value of Java's
    String.hashCode."""
    h = 0
    raw = group.encode("utf-16-be")
    for i in range(0, len(raw), 2):
        h = (31 * h + (raw[i] << 8 | raw[i + 1])) & 0xFFFFFFFF
    if h >= 0x80000000:
        h = 0 if h == 0x80000000 else 0x100000000 - h
    return h % partitions
