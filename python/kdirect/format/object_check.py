"""Whether an object is what its footer says, byte by byte, with little memory.

Owns: what can be found wrong with a whole object: the footer, the CRC of each section, the chain
of the log's batches, and indexes and leader epochs that contradict the batches.  Pure: bytes come
from the caller's `read`, whose own errors pass through.  Nothing is held but one piece, the header
of one batch and the leader epochs, so that a damaged length costs nothing.

The producer snapshot is checked by its CRC alone: what it says belongs to the log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kdirect.errors import CorruptObjectError, FormatError
from kdirect.format import layout
from kdirect.format.batch import crc32c
from kdirect.format.segment_files import parse_leader_epochs, parse_transaction_index
from kdirect.format.segment_object import Section, SegmentObject, footer_needs, parse_footer

if TYPE_CHECKING:
    from typing_extensions import Buffer

Read = Callable[[int, int], "Buffer"]

# base offset, length, leader epoch, magic, CRC, attributes, last offset delta, base timestamp,
# largest timestamp, producer id, epoch and sequence, records
_HEADER = struct.Struct(">qiibIhiqqqhii")
_OFFSET_ENTRY = struct.Struct(">II")
_TIME_ENTRY = struct.Struct(">qI")
_LARGEST_OFFSET = (1 << 63) - 1
_EPOCHS_LIMIT = 1 << 20
# How much of the end of an object is read first: the footer, as a rule.
_FIRST_BYTES = 1024
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong with an object.  `section` is None for the footer, `position` that in
    the object."""

    section: Section | None
    position: int
    message: str

    def __str__(self) -> str:
        where = self.section.title if self.section is not None else "the object"
        return f"{where}, at byte {self.position}: {self.message}"


def read_footer(read: Read, object_bytes: int) -> SegmentObject:
    """What the footer of an object says, by `read(position, length)`; CorruptObjectError or
    UnsupportedFormatError."""
    wanted = min(_FIRST_BYTES, object_bytes)
    while True:
        tail = _exactly(read, object_bytes - wanted, wanted)
        wanted = footer_needs(tail, object_bytes)
        if wanted <= len(tail):
            return parse_footer(tail, object_bytes)


def check_object(
    read: Read, object_bytes: int, *, dense_from: int = 0, piece_bytes: int = PIECE_BYTES
) -> Iterator[Finding]:
    """All that is wrong with the object of `object_bytes` bytes that `read(position, length)`
    reads.

    From `dense_from` on no offset may be missing; below, a Kafka broker wrote the log, whose
    cleaner leaves gaps.  But for the footer, `read` is asked for about `piece_bytes` at a time; the
    offset index is read again beside the log."""
    try:
        found = read_footer(read, object_bytes)
    except FormatError as e:
        yield Finding(section=None, position=object_bytes, message=e.message)
        return
    check = _Check(read, found, dense_from, max(piece_bytes, 1))
    try:
        for section in list(Section)[1:]:
            yield from check.section(section)
        yield from check.log()
    except CorruptObjectError as e:
        yield Finding(section=None, position=object_bytes, message=e.message)


def _exactly(read: Read, position: int, length: int) -> memoryview:
    data = memoryview(read(position, length)).cast("B")
    if len(data) != length:
        raise CorruptObjectError(
            f"reading {length} bytes at {position} of an object brought {len(data)}",
            hint="the object is shorter than its metadata says",
        )
    return data


class _Check:
    """The check of one object whose footer is sound."""

    def __init__(self, read: Read, found: SegmentObject, dense_from: int, piece_bytes: int) -> None:
        self._read = read
        self._found = found
        self._dense_from = dense_from
        self._piece_bytes = piece_bytes
        self._epochs: tuple[tuple[int, int], ...] = ()
        self._index_is_sound = False

    def _pieces(self, section: Section, step: int = 1) -> Iterator[tuple[int, memoryview]]:
        """(position, bytes) of a section, each a multiple of `step` but for the last."""
        place = self._found.sections[section]
        size = max(self._piece_bytes // step, 1) * step
        end = place.position + place.length
        for at in range(place.position, end, size):
            yield at, _exactly(self._read, at, min(size, end - at))

    def section(self, section: Section) -> Iterator[Finding]:
        """What is wrong with one section of the tail.  Of one with a wrong CRC nothing more is
        said."""
        place = self._found.sections[section]
        step, entries = _ENTRIES.get(section, (1, None))
        crc = 0
        faults: list[Finding] = []
        parts: list[bytes] = []
        seen = _Order()
        if place.length % step:
            fault = f"{place.length} bytes do not end with an entry of {step}"
            faults.append(Finding(section=section, position=place.position, message=fault))
        for at, piece in self._pieces(section, step):
            crc = crc32c(piece, crc)
            if entries is not None and not faults:
                fault = entries(self._found, piece, seen)
                if fault:
                    faults.append(Finding(section=section, position=at, message=fault))
            elif section is Section.LEADER_EPOCHS and place.length <= _EPOCHS_LIMIT:
                parts.append(bytes(piece))
        if crc != place.crc:
            yield Finding(section=section, position=place.position, message="its CRC is wrong")
            return
        if section is Section.LEADER_EPOCHS:
            fault = self._take_epochs(b"".join(parts))
            if fault:
                faults.append(Finding(section=section, position=place.position, message=fault))
        elif section is Section.OFFSET_INDEX:
            self._index_is_sound = not faults
        yield from faults

    def _take_epochs(self, data: bytes) -> str:
        place, base = self._found.sections[Section.LEADER_EPOCHS], self._found.base_offset
        if place.length > _EPOCHS_LIMIT:
            return f"{place.length} bytes are more than any has"
        try:
            epochs = parse_leader_epochs(data)
        except FormatError as e:
            return e.message
        if not epochs or epochs[0][1] != base:
            return f"they do not begin with the segment, at offset {base}"
        if epochs[-1][1] >= self._found.end_offset:
            return f"epoch {epochs[-1][0]} begins at {epochs[-1][1]}, after the segment"
        self._epochs = epochs
        return ""

    def _index_entries(self) -> Iterator[tuple[int, int]]:
        if self._index_is_sound:
            for _, piece in self._pieces(Section.OFFSET_INDEX, layout.OFFSET_INDEX_ENTRY_BYTES):
                yield from _OFFSET_ENTRY.iter_unpack(piece)

    def log(self) -> Iterator[Finding]:
        walk = _Walk(self._found, self._epochs, self._index_entries(), self._dense_from)
        place = self._found.sections[Section.LOG]
        crc = 0
        for _, piece in self._pieces(Section.LOG):
            crc = crc32c(piece, crc)
            yield from walk.feed(piece)
        yield from walk.end()
        if crc != place.crc:
            yield Finding(
                section=Section.LOG,
                position=place.position,
                message="the CRC of its bytes is wrong",
            )


class _Order:
    """What the entries of an index before this one said: they rise."""

    number = 0
    first = -1
    second = -1


def _offset_entries(found: SegmentObject, piece: memoryview, seen: _Order) -> str:
    for relative, position in _OFFSET_ENTRY.iter_unpack(piece):
        if (
            relative <= seen.first
            or position <= seen.second
            or position >= found.log_bytes
            or found.base_offset + relative >= found.end_offset
        ):
            return (
                f"entry {seen.number}, offset {found.base_offset + relative} at {position},"
                " is not in the segment or does not rise"
            )
        seen.first, seen.second, seen.number = relative, position, seen.number + 1
    return ""


def _time_entries(found: SegmentObject, piece: memoryview, seen: _Order) -> str:
    for timestamp, relative in _TIME_ENTRY.iter_unpack(piece):
        if (
            (seen.number and timestamp < seen.first)
            or relative < seen.second
            or found.base_offset + relative >= found.end_offset
            or (found.max_timestamp_ms != -1 and timestamp > found.max_timestamp_ms)
        ):
            return (
                f"entry {seen.number}, time {timestamp} at offset {found.base_offset + relative},"
                " is not in the segment or does not rise"
            )
        seen.first, seen.second, seen.number = timestamp, relative, seen.number + 1
    return ""


def _transaction_entries(found: SegmentObject, piece: memoryview, seen: _Order) -> str:
    try:
        for entry in parse_transaction_index(piece):
            if not found.base_offset <= entry.last_offset < found.end_offset:
                return (
                    f"entry {seen.number}, a transaction that ends at offset {entry.last_offset},"
                    " is not in the segment"
                )
            seen.number += 1
    except FormatError as e:
        return e.message
    return ""


_ENTRIES: dict[Section, tuple[int, Callable[[SegmentObject, memoryview, _Order], str] | None]] = {
    Section.OFFSET_INDEX: (layout.OFFSET_INDEX_ENTRY_BYTES, _offset_entries),
    Section.TIME_INDEX: (layout.TIME_INDEX_ENTRY_BYTES, _time_entries),
    Section.TRANSACTION_INDEX: (layout.TRANSACTION_INDEX_ENTRY_BYTES, _transaction_entries),
}


class _Walk:
    """Follows the batches of a log whose bytes come in pieces of any size.

    After a length or a magic that is wrong it says no more: what follows is not known to be a
    batch.  A batch whose CRC is wrong is followed all the same."""

    def __init__(
        self,
        found: SegmentObject,
        epochs: tuple[tuple[int, int], ...],
        index: Iterator[tuple[int, int]],
        dense_from: int,
    ) -> None:
        self._found = found
        self._known_epochs = {epoch for epoch, _ in epochs}
        self._index = index
        self._entry = next(index, None)
        self._dense_from = dense_from
        self._next = found.base_offset
        self._epoch = -1
        self._position = 0  # of the batch
        self._head = bytearray()
        self._left = 0  # bytes of the batch that have not come
        self._crc = self._expected = 0
        self._lost = False

    def _say(self, message: str) -> Finding:
        return Finding(
            section=Section.LOG,
            position=self._position,
            message=f"the batch after offset {self._next - 1} {message}",
        )

    def feed(self, piece: memoryview) -> Iterator[Finding]:
        at = 0
        while at < len(piece) and not self._lost:
            if not self._left:
                taken = piece[at : at + layout.BATCH_HEADER_BYTES - len(self._head)]
                self._head += taken
                if len(self._head) == layout.BATCH_HEADER_BYTES:
                    yield from self._begin()
            else:
                taken = piece[at : at + self._left]
                self._crc = crc32c(taken, self._crc)
                self._left -= len(taken)
            at += len(taken)
            if len(self._head) == layout.BATCH_HEADER_BYTES and not self._left and not self._lost:
                yield from self._finish()

    def _begin(self) -> Iterator[Finding]:
        """The header of a batch is here."""
        base, length, epoch, magic, crc, _, delta, _, timestamp, *_ = _HEADER.unpack(self._head)
        size = length + layout.BATCH_LENGTH_PREFIX_BYTES
        if magic != layout.BATCH_MAGIC_V2:
            yield self._say(f"is of magic {magic}, not {layout.BATCH_MAGIC_V2}")
            self._lost = True
        elif not layout.BATCH_HEADER_BYTES <= size <= self._found.log_bytes - self._position:
            yield self._say(
                f"has {size} bytes, where the log has {self._found.log_bytes - self._position}"
            )
            self._lost = True
        if self._lost:
            return
        yield from self._follow(base, delta)
        yield from self._compare(epoch, timestamp)
        self._left = size - layout.BATCH_HEADER_BYTES
        self._crc = crc32c(self._head[layout.BATCH_ATTRIBUTES :])
        self._expected = crc
        yield from self._indexed(base, base + delta)
        self._next = max(self._next, min(base + delta + 1, self._found.end_offset))

    def _follow(self, base: int, delta: int) -> Iterator[Finding]:
        """Whether the offsets of a batch continue the log."""
        after = base + delta + 1
        if delta < 0 or base < self._next or after > self._found.end_offset:
            yield self._say(
                f"has offsets from {base} to {after}, in a segment that ends at"
                f" {self._found.end_offset}"
            )
        elif base > self._next and (self._next >= self._dense_from or base > self._dense_from):
            yield self._say(f"begins at offset {base}: those between are missing")

    def _compare(self, epoch: int, timestamp: int) -> Iterator[Finding]:
        """What a batch says with what the footer and the leader epochs do."""
        if epoch != -1:  # which Kafka writes where it knows none
            if epoch < self._epoch or (self._known_epochs and epoch not in self._known_epochs):
                yield self._say(f"has the leader epoch {epoch}, which is not one of the segment's")
            self._epoch = max(self._epoch, epoch)
        if -1 != self._found.max_timestamp_ms < timestamp:
            yield self._say(f"has the time {timestamp}, later than any that the footer names")

    def _indexed(self, base: int, last: int) -> Iterator[Finding]:
        """The entries of the offset index up to this batch, which name its position or none."""
        while self._entry is not None and self._entry[1] <= self._position:
            offset = self._found.base_offset + self._entry[0]
            if self._entry[1] < self._position or not base <= offset <= last:
                yield Finding(
                    section=Section.OFFSET_INDEX,
                    position=self._found.sections[Section.OFFSET_INDEX].position,
                    message=f"its entry of offset {offset} names {self._entry[1]}, where no batch"
                    " with this offset begins",
                )
            self._entry = next(self._index, None)

    def _finish(self) -> Iterator[Finding]:
        """A batch is over."""
        if self._crc != self._expected:
            yield Finding(
                section=Section.LOG,
                position=self._position,
                message=f"the CRC of the batch up to offset {self._next - 1} is wrong",
            )
        (length,) = struct.unpack_from(">i", self._head, layout.BATCH_LENGTH)
        self._position += length + layout.BATCH_LENGTH_PREFIX_BYTES
        self._head.clear()

    def end(self) -> Iterator[Finding]:
        """The log's bytes are over."""
        if self._lost:
            return
        if self._head:
            yield self._say("is cut off")
        elif self._next != self._found.end_offset:
            yield self._say(f"is missing: the segment ends at {self._found.end_offset}")
        if self._entry is not None:
            self._position = self._found.log_bytes
            yield from self._indexed(0, -1)
