"""One located object: what is fetched of it, and that it is the right one.

Owns: the plan of ranged GETs of one object and the checks of what they bring.  What may not enter:
how many GETs are under way, retries, other objects.

Nothing is handed on of an object before its footer was read and said that this is the segment that
was located: an object that was swapped has sound batches, too.  The tail, which the footer ends,
has the offset index: from it come the place to begin in the middle of a segment, the place to end,
and pieces that end with a batch, so that batches need not be copied together.  An object that fits
in one piece and is wanted whole takes one GET for all of it.

Batches are compared with what is known of the log (`kdirect.format.chain`): they continue each
other without a gap, and stay within the segment and its leader epochs.  Their CRCs are the
decoder's, which looks at every byte anyway.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise

from kdirect.client.cold_places import ColdPlace
from kdirect.client.tcp_kernel import located_batches
from kdirect.errors import CorruptObjectError, FormatError, UnsupportedFormatError
from kdirect.format import layout
from kdirect.format.segment_object import Section, parse_tail, require_identity

Get = Callable[[int, int], memoryview]
Piece = tuple[int, int]  # position and length
_OFFSETS_AT_START = struct.Struct(">q15xi")  # base offset, last offset delta
_DAMAGED = "restore the object from a good copy, or read past it with another offset"
# A piece is enlarged up to so many times to end with a batch.
_STRETCH = 4


class ColdObject:
    """The records of `place` from its start offset to `stop`.  Life: `open`, on any thread; then
    the pieces of `pieces` are fetched, on any threads, and given to `take` in their order, or what
    `at_hand` holds.  `name` is for errors."""

    def __init__(
        self,
        place: ColdPlace,
        stop: int,
        name: str,
        *,
        piece_bytes: int,
        max_batch_bytes: int,
    ) -> None:
        self.place = place
        self.name = name
        self.at_hand: memoryview | None = None  # the log's bytes, where `open` brought them
        self.pieces: Iterator[Piece] = iter(())
        self._stop = min(stop, place.end_offset)
        self._piece_bytes = piece_bytes
        self._max_batch_bytes = max_batch_bytes
        self._next = place.base_offset
        self._indexed = -1  # the last offset of the first batch, where the index tells
        self._end = place.log_bytes
        self._position = 0
        self._left = b""
        self._fault: CorruptObjectError | None = None
        starts = [start for _, start in place.epochs]
        at = max(bisect_right(starts, place.start_offset) - 1, 0)
        self._least_epoch, self._greatest_epoch = place.epochs[at][0], place.epochs[-1][0]

    # -- the plan ----------------------------------------------------------------------------------

    @property
    def opening_bytes(self) -> int:
        """How many bytes `open` fetches."""
        tail = self.place.tail
        return tail.object_bytes if self.is_taken_whole else tail.length

    @property
    def is_taken_whole(self) -> bool:
        """Does `open` fetch all of it?"""
        place = self.place
        return (
            place.tail.object_bytes <= self._piece_bytes
            and place.start_offset == place.base_offset
            and self._stop == place.end_offset
        )

    def open(self, get: Get) -> None:
        """Fetch the tail, with all of a small object, and plan the rest.  CorruptObjectError when
        it is not what was located."""
        place = self.place
        if self.is_taken_whole:
            whole = get(0, place.tail.object_bytes)
            self.at_hand = whole[: place.log_bytes]
            self._read_tail(whole[place.log_bytes :])
        else:
            last, positions = self._read_tail(get(*place.tail))
            self._plan(last, positions)

    def _read_tail(self, tail: memoryview) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The entries of its offset index: last offsets, less the base offset, and positions."""
        place = self.place
        try:
            facts, sections = parse_tail(tail, place.tail.object_bytes)
            require_identity(facts, place.identity, place.base_offset)
        except FormatError as e:
            error = CorruptObjectError if isinstance(e, CorruptObjectError) else type(e)
            raise error(f"{self.name}: {e.message}", hint=e.hint) from e
        if (facts.log_bytes, facts.end_offset) != (place.log_bytes, place.end_offset):
            raise self._corrupt(
                f"has {facts.log_bytes} bytes of log up to offset {facts.end_offset}, and the"
                f" metadata says {place.log_bytes} up to {place.end_offset}"
            )
        index = sections[Section.OFFSET_INDEX]
        entries = len(index) // layout.OFFSET_INDEX_ENTRY_BYTES
        if entries * layout.OFFSET_INDEX_ENTRY_BYTES != len(index):
            raise self._corrupt(f"has an offset index of {len(index)} bytes")
        numbers = struct.unpack(f">{2 * entries}I", index)
        last, positions = numbers[::2], numbers[1::2]
        rise = all(a < b for x in (last, positions) for a, b in pairwise(x))
        inside = not entries or (
            last[-1] < place.end_offset - place.base_offset and positions[-1] < place.log_bytes
        )
        if not (rise and inside):
            raise self._corrupt("has an offset index that does not rise within the segment")
        return last, positions

    def _plan(self, last: tuple[int, ...], positions: tuple[int, ...]) -> None:
        place = self.place
        i = bisect_right(last, place.start_offset - place.base_offset) - 1
        if i >= 0 and positions[i] > 0:
            self._position, self._indexed = positions[i], place.base_offset + last[i]
        if self._stop < place.end_offset:
            # The batch of the last record wanted is that of this entry, or comes before it.
            i = bisect_left(last, self._stop - 1 - place.base_offset) + 1
            if i < len(positions):
                self._end = positions[i]
        self.pieces = self._cut(self._position, self._end, positions)

    def _cut(self, start: int, end: int, borders: tuple[int, ...]) -> Iterator[Piece]:
        while start < end:
            cut = start + self._piece_bytes
            if cut < end:
                i = bisect_right(borders, cut) - 1
                if i >= 0 and borders[i] > start:
                    cut = borders[i]
                elif i + 1 < len(borders) and borders[i + 1] <= start + _STRETCH * (cut - start):
                    cut = borders[i + 1]
            cut = min(cut, end)
            yield start, cut - start
            start = cut

    # -- what the pieces bring ---------------------------------------------------------------------

    def take(self, data: memoryview) -> tuple[memoryview, int]:
        """The whole batches of the next piece, and the leader epoch of the last one.
        CorruptObjectError for a batch that does not continue the log; what is sound before it is
        handed on first."""
        if self._fault is not None:
            raise self._fault
        if self._left:
            data = memoryview(b"".join((self._left, data)))
        if self._indexed >= 0:
            self._begin_at_index(data)
        place = self.place
        whole, self._next, needed, wrong, epoch = located_batches(
            data,
            self._next,
            place.dense_from,
            place.end_offset,
            self._least_epoch,
            self._greatest_epoch,
        )
        self._position += whole
        self._left = bytes(data[whole:]) if wrong is None else b""
        if wrong is not None:
            self._fault = self._corrupt(
                f"is damaged at position {self._position}: the record batch at offset"
                f" {self._next} {wrong}"
            )
        elif needed > self._max_batch_bytes:
            raise UnsupportedFormatError(
                f"a batch at offset {self._next} in {self.name} has {needed} bytes,"
                f" {self._max_batch_bytes} are allowed",
                hint="raise max.batch.bytes",
            )
        elif self._position + len(self._left) >= self._end:
            self._fault = self._missing()
        if self._fault is not None and not whole:
            raise self._fault
        return data[:whole], epoch

    def end(self) -> None:
        """All pieces were taken.  CorruptObjectError when batches are missing."""
        if self._fault is not None:
            raise self._fault

    def _begin_at_index(self, data: memoryview) -> None:
        """The first batch is the one that the index names, or one of the two is damaged."""
        indexed, self._indexed = self._indexed, -1
        if len(data) < layout.BATCH_HEADER_BYTES:
            raise self._corrupt(f"ends within a batch at position {self._position}")
        base, delta = _OFFSETS_AT_START.unpack_from(data)
        if base + delta != indexed:
            raise self._corrupt(
                f"is damaged at position {self._position}: its index names the batch there that"
                f" ends with offset {indexed}, and it ends with {base + delta}"
            )
        self._next = base

    def _missing(self) -> CorruptObjectError | None:
        """What is wrong where the last piece ends."""
        place = self.place
        if self._left:
            return self._corrupt(f"ends within the batch at position {self._position}")
        if self._end == place.log_bytes and self._next < place.end_offset > place.dense_from:
            return self._corrupt(f"lacks the records from offset {self._next} on")
        return None

    def _corrupt(self, what: str) -> CorruptObjectError:
        return CorruptObjectError(f"{self.name} {what}", hint=_DAMAGED)


__all__ = ["ColdObject", "Get", "Piece"]
