"""The bytes of an object: a remote segment with its indexes, and the key that it lies under.

Owns: the footer and the trailer of an object (`kdirect.format.layout` has the diagram), the custom
metadata that says where its tail is, and the form of keys.  Pure: who reads and writes objects
calls this with bytes.  What the sections hold are Kafka's files, which others parse.

Invariants: no byte, length or position of an object is trusted.  A footer is believed once its CRC
fits, its sections follow each other from the first byte of the object to the footer without gaps,
and every field is in its range; a section once its own CRC fits.  Everything else is a
CorruptObjectError that names the part, or an UnsupportedFormatError for a version of later.
"""

from __future__ import annotations

import enum
import re
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kdirect.errors import ConfigError, CorruptObjectError, FormatError, UnsupportedFormatError
from kdirect.format import layout
from kdirect.format.batch import crc32c
from kdirect.format.ids import ID_CHARACTERS, decode_id, encode_id
from kdirect.model import check_topic_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIX = ".kseg"
# version, sections, broker, epoch, partition, offsets, timestamps, ids, lengths of two texts, 0
_FOOTER = struct.Struct("<HHiiiqqqq16s16sHHI")
_SECTION = struct.Struct("<HHIQQ")  # kind, 0, CRC, position, length
_TRAILER = struct.Struct("<II8s")
_CUSTOM = struct.Struct("<4sHHiIQQ")
_FOOTER_LIMIT = 1 << 16  # for every version, so that a wrong length never asks for much
_LARGEST_OFFSET = (1 << 63) - 1
_LARGEST_LOG = (1 << 31) - 1  # Kafka's metadata has 31 bits for the size of a segment
_LARGEST_PARTITION = (1 << 31) - 1
_CLUSTER_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")
_FILE = re.compile(rf"([0-9]{{20}})-([A-Za-z0-9_-]{{{ID_CHARACTERS}}})\{SUFFIX}\Z")
_PARTITION = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z")
_NO_ID = uuid.UUID(int=0)
_DAMAGED = "the object is not what was written: restore it from a good copy, or delete it"
_NEWER = "it was written by a newer kdirect: read it with that version or a later one"


class Section(enum.IntEnum):
    """The parts of an object, in their order."""

    LOG = 0
    OFFSET_INDEX = 1
    TIME_INDEX = 2
    TRANSACTION_INDEX = 3
    PRODUCERS = 4
    LEADER_EPOCHS = 5
    TOPIC = 6

    @property
    def title(self) -> str:
        """As messages name it."""
        return _TITLES[self]


_TITLES = {
    Section.LOG: "the log",
    Section.OFFSET_INDEX: "the offset index",
    Section.TIME_INDEX: "the time index",
    Section.TRANSACTION_INDEX: "the transaction index",
    Section.PRODUCERS: "the producer snapshot",
    Section.LEADER_EPOCHS: "the leader epochs",
    Section.TOPIC: "the topic",
}


class SectionPlace(NamedTuple):
    """Where a section is in its object, and the CRC-32C of its bytes."""

    position: int
    length: int
    crc: int


class TailPlace(NamedTuple):
    """Where the tail of an object is; the object ends with it."""

    position: int
    length: int

    @property
    def object_bytes(self) -> int:
        return self.position + self.length


class CustomMetadata(NamedTuple):
    """What kdirect adds to the metadata record of a segment: the leader epoch of who wrote it, and
    where the tail of the object is, once it is stored."""

    leader_epoch: int
    tail: TailPlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentIdentity:
    """Which segment of which log it is, in whose cluster.  Every try to copy a segment has an id of
    its own."""

    cluster_id: str
    topic: str
    topic_id: uuid.UUID
    partition: int
    segment_id: uuid.UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """What who copies a segment knows of it.  `end_offset` is exclusive, a timestamp of -1 is
    unknown; broker and leader epoch are those of the copier."""

    identity: SegmentIdentity
    base_offset: int
    end_offset: int
    log_bytes: int
    max_timestamp_ms: int
    min_timestamp_ms: int
    broker_id: int
    leader_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentObject(SegmentFacts):
    """What a footer says.  `sections` is indexed by `Section`."""

    sections: tuple[SectionPlace, ...]
    object_bytes: int

    @property
    def tail(self) -> TailPlace:
        return TailPlace(self.log_bytes, self.object_bytes - self.log_bytes)


def _corrupt(what: str) -> CorruptObjectError:
    return CorruptObjectError(what, hint=_DAMAGED)


def _identity_fault(i: SegmentIdentity) -> str:
    """What is wrong with the names of a segment; empty when nothing is."""
    if not _CLUSTER_ID.match(i.cluster_id):
        return "has a cluster id other than 1 to 128 characters of a-z A-Z 0-9 . _ -"
    try:
        check_topic_name(i.topic)
    except ConfigError:
        return "has a topic that no topic can be called"
    if not 0 <= i.partition <= _LARGEST_PARTITION:
        return f"has the partition {i.partition}"
    if i.topic_id == _NO_ID or i.segment_id == _NO_ID:
        return "has a topic id or a segment id of zeros"
    return ""


def _facts_fault(f: SegmentFacts) -> str:
    if not 0 <= f.base_offset < f.end_offset <= _LARGEST_OFFSET:
        return f"has records from offset {f.base_offset} to {f.end_offset}"
    if not layout.BATCH_HEADER_BYTES <= f.log_bytes <= _LARGEST_LOG:
        return f"has a log of {f.log_bytes} bytes"
    if -1 not in (f.min_timestamp_ms, f.max_timestamp_ms) and (
        f.min_timestamp_ms > f.max_timestamp_ms
    ):
        return f"has times from {f.min_timestamp_ms} to {f.max_timestamp_ms}"
    return _identity_fault(f.identity)


# -- writing ---------------------------------------------------------------------------------------


def pack_tail(facts: SegmentFacts, log_crc: int, sections: Mapping[Section, Buffer]) -> bytes:
    """Everything that follows the log's bytes in the object; `log_crc` is their CRC-32C.  A section
    that is not given is empty.  FormatError when an object cannot say these facts."""
    identity = facts.identity
    fault = _facts_fault(facts)
    if fault or Section.LOG in sections:
        raise FormatError(
            f"segment {facts.base_offset} of {identity.topic}-{identity.partition} cannot be put"
            f" into an object: it {fault or 'is given with the log as a section'}"
        )
    places = [SectionPlace(0, facts.log_bytes, log_crc)]
    out = bytearray()
    for section in list(Section)[1:]:
        data = memoryview(sections.get(section, b"")).cast("B")
        places.append(SectionPlace(facts.log_bytes + len(out), len(data), crc32c(data)))
        out += data
    cluster_id, topic = identity.cluster_id.encode(), identity.topic.encode()
    try:
        footer = _FOOTER.pack(
            layout.OBJECT_VERSION,
            len(places),
            facts.broker_id,
            facts.leader_epoch,
            identity.partition,
            facts.base_offset,
            facts.end_offset,
            facts.max_timestamp_ms,
            facts.min_timestamp_ms,
            identity.topic_id.bytes,
            identity.segment_id.bytes,
            len(cluster_id),
            len(topic),
            0,
        )
    except struct.error as e:
        raise FormatError(
            f"segment {facts.base_offset} of {identity.topic}-{identity.partition} cannot be put"
            f" into an object: a number does not fit ({e})"
        ) from e
    footer += b"".join(
        _SECTION.pack(kind, 0, place.crc, place.position, place.length)
        for kind, place in enumerate(places)
    )
    footer += cluster_id + topic
    trailer = _TRAILER.pack(len(footer), crc32c(footer), layout.OBJECT_MAGIC)
    return bytes(out) + footer + trailer


def pack_custom_metadata(custom: CustomMetadata) -> bytes:
    """The custom metadata of a record."""
    place = custom.tail or TailPlace(0, 0)
    return _CUSTOM.pack(
        layout.CUSTOM_METADATA_MAGIC,
        layout.CUSTOM_METADATA_VERSION,
        0,
        custom.leader_epoch,
        0,
        place.position,
        place.length,
    )


# -- reading ---------------------------------------------------------------------------------------


def parse_custom_metadata(data: bytes | None) -> CustomMetadata | None:
    """None for custom metadata that is not kdirect's."""
    if data is None or data[:4] != layout.CUSTOM_METADATA_MAGIC:
        return None
    if len(data) >= 6 and int.from_bytes(data[4:6], "little") != layout.CUSTOM_METADATA_VERSION:
        raise UnsupportedFormatError(
            "the custom metadata of a remote segment has version"
            f" {int.from_bytes(data[4:6], 'little')}",
            hint=_NEWER,
        )
    if len(data) != layout.CUSTOM_METADATA_BYTES:
        raise _corrupt(f"the custom metadata of a remote segment has {len(data)} bytes")
    _, _, zero, leader_epoch, nothing, position, length = _CUSTOM.unpack(data)
    if leader_epoch < 0 or zero or nothing:
        raise _corrupt("the custom metadata of a remote segment has wrong fixed fields")
    if position == length == 0:
        return CustomMetadata(leader_epoch)
    if not 0 < position <= _LARGEST_LOG or not 0 < length <= _LARGEST_OFFSET - position:
        raise _corrupt(
            f"the custom metadata of a remote segment names a tail of {length} bytes at {position}"
        )
    return CustomMetadata(leader_epoch, TailPlace(position, length))


def footer_needs(tail: Buffer, object_bytes: int) -> int:
    """How many bytes from the end of the object its footer takes, or the trailer alone as long as
    not even that is in `tail`."""
    view = memoryview(tail).cast("B")
    if len(view) > object_bytes or object_bytes < layout.TRAILER_BYTES:
        raise _corrupt(f"an object of {object_bytes} bytes, of which {len(view)} are here, is none")
    if len(view) < layout.TRAILER_BYTES:
        return layout.TRAILER_BYTES
    length, _, magic = _TRAILER.unpack(view[-layout.TRAILER_BYTES :])
    if magic != layout.OBJECT_MAGIC:
        raise _corrupt(f"the trailer of an object does not end in {layout.OBJECT_MAGIC.decode()}")
    if not 4 <= length <= min(_FOOTER_LIMIT, object_bytes - layout.TRAILER_BYTES):
        raise _corrupt(
            f"the trailer of an object of {object_bytes} bytes names a footer of {length}"
        )
    return int(length) + layout.TRAILER_BYTES


def needs(tail: Buffer, object_bytes: int) -> int:
    """How many bytes from the end of the object the whole tail takes; less when `tail` is too short
    to tell: ask again with that many."""
    wanted = footer_needs(tail, object_bytes)
    if wanted > memoryview(tail).nbytes:
        return wanted
    return parse_footer(tail, object_bytes).tail.length


def parse_footer(tail: Buffer, object_bytes: int) -> SegmentObject:
    """What the footer at the end of `tail` says; the sections are not looked at."""
    wanted = footer_needs(tail, object_bytes)
    view = memoryview(tail).cast("B")
    if wanted > len(view):
        raise _corrupt(
            f"the footer of an object takes its last {wanted} bytes, of which {len(view)} are here"
        )
    footer = view[-wanted : -layout.TRAILER_BYTES]
    _, crc, _ = _TRAILER.unpack(view[-layout.TRAILER_BYTES :])
    if crc32c(footer) != crc:
        raise _corrupt("the CRC of the footer of an object is wrong")
    version = int.from_bytes(footer[:2], "little")
    if version != layout.OBJECT_VERSION:
        raise UnsupportedFormatError(f"an object has a footer of version {version}", hint=_NEWER)
    return _parse_version_1(footer, object_bytes, object_bytes - wanted)


def _parse_version_1(footer: memoryview, object_bytes: int, end: int) -> SegmentObject:
    """`end`: where the footer begins."""
    table = layout.FOOTER_HEAD_BYTES + layout.OBJECT_SECTIONS * layout.SECTION_BYTES
    if len(footer) < table:
        raise _corrupt(f"the footer of an object has {len(footer)} bytes")
    (
        _,
        count,
        broker_id,
        leader_epoch,
        partition,
        base_offset,
        end_offset,
        max_timestamp_ms,
        min_timestamp_ms,
        topic_id,
        segment_id,
        cluster_bytes,
        topic_bytes,
        zero,
    ) = _FOOTER.unpack(footer[: layout.FOOTER_HEAD_BYTES])
    if count != layout.OBJECT_SECTIONS:
        raise _corrupt(f"the footer of an object names {count} sections")
    if zero or len(footer) != table + cluster_bytes + topic_bytes:
        raise _corrupt(
            f"the footer of an object has {len(footer)} bytes, with a cluster id of"
            f" {cluster_bytes} and a topic of {topic_bytes}"
        )
    try:
        cluster_id = str(footer[table : table + cluster_bytes], "ascii")
        topic = str(footer[table + cluster_bytes :], "ascii")
    except UnicodeDecodeError as e:
        raise _corrupt("the footer of an object has a cluster id or a topic of no text") from e
    places = _places(footer[layout.FOOTER_HEAD_BYTES : table], end)
    found = SegmentObject(
        identity=SegmentIdentity(
            cluster_id=cluster_id,
            topic=topic,
            topic_id=uuid.UUID(bytes=topic_id),
            partition=partition,
            segment_id=uuid.UUID(bytes=segment_id),
        ),
        base_offset=base_offset,
        end_offset=end_offset,
        log_bytes=places[Section.LOG].length,
        max_timestamp_ms=max_timestamp_ms,
        min_timestamp_ms=min_timestamp_ms,
        broker_id=broker_id,
        leader_epoch=leader_epoch,
        sections=places,
        object_bytes=object_bytes,
    )
    fault = _facts_fault(found)
    if fault:
        raise _corrupt(f"the footer of an object {fault}")
    return found


def _places(table: memoryview, end: int) -> tuple[SectionPlace, ...]:
    """The sections of a footer, which fill the object from 0 to `end`."""
    places = []
    at = 0
    for section, (kind, zero, crc, position, length) in zip(
        Section, _SECTION.iter_unpack(table), strict=True
    ):
        if kind != section or zero:
            raise _corrupt(
                f"the footer of an object names section {kind} in place of {section.title}"
            )
        if position != at or length > end - at:
            raise _corrupt(
                f"the footer of an object places {section.title} at {position}, with {length}"
                f" bytes, where {at} to {end} are left"
            )
        places.append(SectionPlace(position, length, crc))
        at += length
    if at != end:
        raise _corrupt(f"the sections of an object end at {at}, and its footer begins at {end}")
    return tuple(places)


def parse_tail(tail: Buffer, object_bytes: int) -> tuple[SegmentObject, dict[Section, memoryview]]:
    """What the footer says, and the sections that are whole in `tail` (views of it), each with a
    CRC that fits.  `tail` is the end of the object, as much of it as the caller has."""
    found = parse_footer(tail, object_bytes)
    view = memoryview(tail).cast("B").toreadonly()
    start = object_bytes - len(view)
    sections = {}
    for section, place in zip(Section, found.sections, strict=True):
        if place.position >= start:
            data = view[place.position - start : place.position - start + place.length]
            if crc32c(data) != place.crc:
                raise _corrupt(
                    f"the CRC of {section.title} of segment {found.base_offset} of"
                    f" {found.identity.topic}-{found.identity.partition} is wrong"
                )
            sections[section] = data
    return found, sections


def require_identity(found: SegmentObject, identity: SegmentIdentity, base_offset: int) -> None:
    """CorruptObjectError when an object is another segment than the one that was asked for."""
    if found.identity == identity and found.base_offset == base_offset:
        return
    names = ("cluster_id", "topic", "topic_id", "partition", "segment_id")
    pairs = [(name, getattr(found.identity, name), getattr(identity, name)) for name in names]
    pairs.append(("base_offset", found.base_offset, base_offset))
    wrong = ", ".join(
        f"{name} {got} in place of {asked}" for name, got, asked in pairs if got != asked
    )
    raise CorruptObjectError(
        f"the object is that of another segment: it has {wrong}",
        hint="the object lies under a wrong key, or the object store answered with another one",
    )


# -- keys ------------------------------------------------------------------------------------------


def partition_prefix(
    prefix: str, cluster_id: str, topic: str, topic_id: uuid.UUID, partition: int
) -> str:
    """What the keys of all segments of a partition begin with; it ends with a slash."""
    parts = [cluster_id, f"{topic}-{encode_id(topic_id)}", str(partition), ""]
    return "/".join([prefix.strip("/"), *parts] if prefix.strip("/") else parts)


def object_key(prefix: str, identity: SegmentIdentity, base_offset: int) -> str:
    """Where the object of a segment lies; `prefix` may be empty.  FormatError for names that cannot
    be part of a key."""
    fault = _identity_fault(identity)
    if fault or not 0 <= base_offset <= _LARGEST_OFFSET:
        raise FormatError(f"a remote segment {fault or f'has the base offset {base_offset}'}")
    i = identity
    folder = partition_prefix(prefix, i.cluster_id, i.topic, i.topic_id, i.partition)
    return f"{folder}{base_offset:020d}-{encode_id(i.segment_id)}{SUFFIX}"


def parse_key(prefix: str, key: str) -> tuple[SegmentIdentity, int] | None:
    """(identity, base offset) of a key below `prefix`; None for a key that `object_key` does not
    make, which is somebody else's object."""
    folder = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    parts = key[len(folder) :].split("/")
    if not key.startswith(folder) or len(parts) != 4:
        return None
    cluster_id, topic_part, partition, name = parts
    topic, dash, topic_id = (
        topic_part[: -ID_CHARACTERS - 1],
        topic_part[-ID_CHARACTERS - 1 : -ID_CHARACTERS],
        topic_part[-ID_CHARACTERS:],
    )
    match = _FILE.match(name)
    if match is None or dash != "-" or not _PARTITION.match(partition):
        return None
    try:
        identity = SegmentIdentity(
            cluster_id=cluster_id,
            topic=topic,
            topic_id=decode_id(topic_id),
            partition=int(partition),
            segment_id=decode_id(match[2]),
        )
        base_offset = int(match[1])
        return (identity, base_offset) if object_key(prefix, identity, base_offset) == key else None
    except FormatError:
        return None
