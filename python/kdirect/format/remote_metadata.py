"""The records of ``__remote_log_metadata``, as Kafka 4.1 writes them.  No I/O.

A value is what Kafka's RemoteLogMetadataSerde makes: three unsigned varints, which are the version
of this frame (1), the api key and its version (0), then the message, of a flexible version (big
endian; lengths are unsigned varints of one more than the length, 0 is null; each struct ends with
its tagged fields)::

    partition           string topic   uuid topic id   int32 partition   tags
    segment             partition   uuid segment id   tags
    0 RemoteSegment     segment   int64 first offset   int64 last offset   int32 broker id
                        int64 largest timestamp   int64 event timestamp
                        array of (int32 leader epoch   int64 start offset   tags)
                        int32 size   nullable bytes custom metadata   int8 state
                        tags: 0 bool, that no transaction was aborted
    1 ...Update         segment   int32 broker id   int64 event timestamp
                        nullable bytes custom metadata   int8 state   tags
    2 ...Delete         partition   int32 broker id   int64 event timestamp   int8 state   tags

Kafka's records have no key.  Ours have one, the segment or the partition that they are of, so that
the topic can be rewritten with the last state of each.  Kafka's api key 3, a segment in a snapshot
file, is not of this topic.

Invariant: bytes from anybody are a record or a FormatError that names what is wrong.  Unknown
tagged fields are left out, as Kafka does.
"""

from __future__ import annotations

import enum
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kdirect.errors import ConfigError, FormatError, UnsupportedFormatError
from kdirect.format.datapath import uvarint
from kdirect.model import check_topic_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_I8 = struct.Struct(">b")
_PARTITION_KEY = struct.Struct(">16si")
_LARGEST_OFFSET = (1 << 63) - 1
_EPOCH_LEAST_BYTES = 13  # of an entry: two numbers, no tags
FRAME_VERSION = 1
VERSION = 0
_State = TypeVar("_State", bound=enum.IntEnum)


class SegmentState(enum.IntEnum):
    COPY_SEGMENT_STARTED = 0
    COPY_SEGMENT_FINISHED = 1
    DELETE_SEGMENT_STARTED = 2
    DELETE_SEGMENT_FINISHED = 3


class PartitionDeleteState(enum.IntEnum):
    DELETE_PARTITION_MARKED = 0
    DELETE_PARTITION_STARTED = 1
    DELETE_PARTITION_FINISHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSegment:
    """A remote segment and its state.  `end_offset` is exclusive, while the record has the last
    offset itself; `leader_epochs` are (epoch, start offset), rising; `custom` is what the storage
    plugin adds."""

    topic_id: uuid.UUID
    topic: str
    partition: int
    segment_id: uuid.UUID
    base_offset: int
    end_offset: int
    broker_id: int
    max_timestamp_ms: int
    event_timestamp_ms: int
    leader_epochs: tuple[tuple[int, int], ...]
    size: int
    custom: bytes | None
    state: SegmentState
    txn_index_empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSegmentUpdate:
    """A segment has another state."""

    topic_id: uuid.UUID
    topic: str
    partition: int
    segment_id: uuid.UUID
    broker_id: int
    event_timestamp_ms: int
    custom: bytes | None
    state: SegmentState


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePartitionDelete:
    """The remote segments of a partition are to go, or have gone."""

    topic_id: uuid.UUID
    topic: str
    partition: int
    broker_id: int
    event_timestamp_ms: int
    state: PartitionDeleteState


RemoteRecord = RemoteSegment | RemoteSegmentUpdate | RemotePartitionDelete

SEGMENT, UPDATE, PARTITION_DELETE = 0, 1, 2
_NAMES = {
    SEGMENT: "RemoteLogSegmentMetadataRecord",
    UPDATE: "RemoteLogSegmentMetadataUpdateRecord",
    PARTITION_DELETE: "RemotePartitionDeleteMetadataRecord",
}


def _fault(record: RemoteRecord) -> str:
    """What Kafka would refuse in a record, or could not be a log; empty when nothing is."""
    try:
        check_topic_name(record.topic)
    except ConfigError:
        return "has a topic that no topic can be called"
    if record.partition < 0:
        return f"has the partition {record.partition}"
    if not isinstance(record, RemoteSegment):
        return ""
    if not 0 <= record.base_offset < record.end_offset <= _LARGEST_OFFSET:
        return f"has records from offset {record.base_offset} to {record.end_offset}"
    if record.size < 0:
        return f"has {record.size} bytes"
    if not record.leader_epochs:
        return "has no leader epoch"
    if record.leader_epochs[0][0] < 0 or record.leader_epochs[0][1] < 0:
        return "has a leader epoch or its start below 0"
    for (epoch, start), (after, after_start) in zip(
        record.leader_epochs, record.leader_epochs[1:], strict=False
    ):
        if after <= epoch or after_start < start:
            return f"has epoch {after} from offset {after_start} after {epoch} from {start}"
    return ""


# -- writing ---------------------------------------------------------------------------------------


def _partition(record: RemoteRecord) -> bytes:
    topic = record.topic.encode()
    return (
        uvarint(len(topic) + 1)
        + topic
        + record.topic_id.bytes
        + _I32.pack(record.partition)
        + b"\0"
    )


def _segment(record: RemoteSegment | RemoteSegmentUpdate) -> bytes:
    return _partition(record) + record.segment_id.bytes + b"\0"


def _blob(value: bytes | None) -> bytes:
    return b"\0" if value is None else uvarint(len(value) + 1) + value


def pack_record(record: RemoteRecord) -> bytes:
    """The value of a record.  FormatError for what Kafka would refuse."""
    fault = _fault(record)
    if not fault:
        try:
            return _pack(record)
        except struct.error as e:
            fault = f"has a number that does not fit ({e})"
    raise FormatError(
        f"a record of __remote_log_metadata for {record.topic}-{record.partition} cannot be"
        f" written: it {fault}"
    )


def _pack(record: RemoteRecord) -> bytes:
    stamp = _I32.pack(record.broker_id) + _I64.pack(record.event_timestamp_ms)
    if isinstance(record, RemotePartitionDelete):
        head = bytes((FRAME_VERSION, PARTITION_DELETE, VERSION))
        return head + _partition(record) + stamp + _I8.pack(record.state) + b"\0"
    end = _blob(record.custom) + _I8.pack(record.state)
    if isinstance(record, RemoteSegmentUpdate):
        head = bytes((FRAME_VERSION, UPDATE, VERSION))
        return head + _segment(record) + stamp + end + b"\0"
    out = bytearray((FRAME_VERSION, SEGMENT, VERSION))
    out += _segment(record)
    out += _I64.pack(record.base_offset) + _I64.pack(record.end_offset - 1)
    out += _I32.pack(record.broker_id) + _I64.pack(record.max_timestamp_ms)
    out += _I64.pack(record.event_timestamp_ms)
    out += uvarint(len(record.leader_epochs) + 1)
    for epoch, start in record.leader_epochs:
        out += _I32.pack(epoch) + _I64.pack(start) + b"\0"
    # A tagged field that has its default value is not written.
    tags = b"\1\0\1\1" if record.txn_index_empty else b"\0"
    return bytes(out) + _I32.pack(record.size) + end + tags


# -- keys ------------------------------------------------------------------------------------------


def record_key(record: RemoteRecord) -> bytes:
    """The segment id, or the topic id and the partition."""
    if isinstance(record, RemotePartitionDelete):
        return _PARTITION_KEY.pack(record.topic_id.bytes, record.partition)
    return record.segment_id.bytes


def parse_key(key: Buffer | None) -> uuid.UUID | tuple[uuid.UUID, int] | None:
    """A segment id, or (topic id, partition); None for a record of Kafka's, or a key of a kind that
    we do not know."""
    data = b"" if key is None else bytes(key)
    if len(data) == 16:
        return uuid.UUID(bytes=data)
    if len(data) == _PARTITION_KEY.size:
        topic_id, partition = _PARTITION_KEY.unpack(data)
        return uuid.UUID(bytes=topic_id), partition
    return None


# -- reading ---------------------------------------------------------------------------------------


class _Cursor:
    """Reads fields in order; FormatError at the end of the bytes."""

    def __init__(self, data: Buffer) -> None:
        self.data = bytes(data)
        self.pos = 0
        self.name = "record"

    def error(self, what: str) -> FormatError:
        return FormatError(f"a {self.name} of __remote_log_metadata {what}")

    def take(self, n: int, what: str) -> bytes:
        if n > len(self.data) - self.pos:
            raise self.error(f"of {len(self.data)} bytes ends inside its {what}")
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def i8(self, what: str) -> int:
        return _I8.unpack(self.take(1, what))[0]

    def i32(self, what: str) -> int:
        return _I32.unpack(self.take(4, what))[0]

    def i64(self, what: str) -> int:
        return _I64.unpack(self.take(8, what))[0]

    def id(self, what: str) -> uuid.UUID:
        return uuid.UUID(bytes=self.take(16, what))

    def uvarint(self, what: str) -> int:
        value = 0
        for shift in (0, 7, 14, 21, 28):
            (byte,) = self.take(1, what)
            value |= (byte & 0x7F) << shift
            if byte < 0x80 and value <= 0xFFFFFFFF:
                return value
        raise self.error(f"has more than 32 bits in its {what}")

    def blob(self, what: str) -> bytes | None:
        n = self.uvarint(f"length of {what}")
        return None if n == 0 else self.take(n - 1, what)

    def text(self, what: str) -> str:
        raw = self.blob(what)
        if raw is None:
            raise self.error(f"has no {what}")
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            raise self.error(f"has a {what} that is not UTF-8") from e

    def tags(self) -> dict[int, bytes]:
        """The tagged fields of a struct, by tag."""
        found = {}
        for _ in range(self.uvarint("number of tagged fields")):
            tag = self.uvarint("tag")
            found[tag] = self.take(self.uvarint("size of a tagged field"), "tagged field")
        return found

    def partition(self) -> dict[str, Any]:
        found = {
            "topic": self.text("topic"),
            "topic_id": self.id("topic id"),
            "partition": self.i32("partition"),
        }
        self.tags()
        return found

    def segment(self) -> dict[str, Any]:
        found = self.partition()
        found["segment_id"] = self.id("segment id")
        self.tags()
        return found

    def epochs(self) -> tuple[tuple[int, int], ...]:
        count = self.uvarint("number of leader epochs") - 1
        if count < 0 or count * _EPOCH_LEAST_BYTES > len(self.data) - self.pos:
            raise self.error(f"has {count} leader epochs in {len(self.data) - self.pos} bytes")
        found = []
        for _ in range(count):
            found.append((self.i32("leader epoch"), self.i64("start of a leader epoch")))
            self.tags()
        return tuple(found)

    def state(self, states: type[_State]) -> _State:
        value = self.i8("state")
        try:
            return states(value)
        except ValueError as e:
            raise self.error(f"has the unknown state {value}") from e


def parse_record(data: Buffer) -> RemoteRecord:
    """The record that a value is; FormatError for anything else, and UnsupportedFormatError for an
    api key or a version that this build does not know."""
    c = _Cursor(data)
    frame, key, version = c.uvarint("frame version"), c.uvarint("api key"), c.uvarint("version")
    name = _NAMES.get(key)
    if frame != FRAME_VERSION or name is None or version != VERSION:
        raise UnsupportedFormatError(
            f"a record of __remote_log_metadata has frame version {frame}, api key {key} and"
            f" version {version}",
            hint=f"this build reads frame version {FRAME_VERSION} and api keys 0 to 2 of version"
            f" {VERSION}; use a newer one",
        )
    c.name = name
    record = _READERS[key](c)
    if c.pos != len(c.data):
        raise c.error(f"has {len(c.data) - c.pos} bytes after its end")
    fault = _fault(record)
    if fault:
        raise c.error(fault)
    return record


def _read_segment(c: _Cursor) -> RemoteSegment:
    found: dict[str, Any] = {
        **c.segment(),
        "base_offset": c.i64("first offset"),
        "end_offset": c.i64("last offset") + 1,
        "broker_id": c.i32("broker id"),
        "max_timestamp_ms": c.i64("largest timestamp"),
        "event_timestamp_ms": c.i64("event timestamp"),
        "leader_epochs": c.epochs(),
        "size": c.i32("size"),
        "custom": c.blob("custom metadata"),
        "state": c.state(SegmentState),
    }
    flag = c.tags().get(0, b"\0")
    if len(flag) != 1:
        raise c.error(f"has {len(flag)} bytes in its flag of an empty transaction index")
    return RemoteSegment(**found, txn_index_empty=flag != b"\0")


def _read_update(c: _Cursor) -> RemoteSegmentUpdate:
    found: dict[str, Any] = {
        **c.segment(),
        "broker_id": c.i32("broker id"),
        "event_timestamp_ms": c.i64("event timestamp"),
        "custom": c.blob("custom metadata"),
        "state": c.state(SegmentState),
    }
    c.tags()
    return RemoteSegmentUpdate(**found)


def _read_partition_delete(c: _Cursor) -> RemotePartitionDelete:
    found: dict[str, Any] = {
        **c.partition(),
        "broker_id": c.i32("broker id"),
        "event_timestamp_ms": c.i64("event timestamp"),
        "state": c.state(PartitionDeleteState),
    }
    c.tags()
    return RemotePartitionDelete(**found)


_READERS: dict[int, Callable[[_Cursor], RemoteRecord]] = {
    SEGMENT: _read_segment,
    UPDATE: _read_update,
    PARTITION_DELETE: _read_partition_delete,
}
