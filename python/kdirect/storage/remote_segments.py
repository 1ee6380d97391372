"""The remote segments of one partition that count, by offset.  Pure.

Segments may overlap: two leaders have copied logs whose segments begin at different offsets, or one
copied what the other had copied already.  So an offset is looked for among all that may hold it,
and the one that reaches furthest is taken.  Everything here costs no more than the overlaps, except
`bytes_from`, whose walk is remembered until something changes.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple

from kdirect.format.remote_metadata import RemoteSegment

_ANY_ID = uuid.UUID(int=(1 << 128) - 1)


class Piece(NamedTuple):
    """A remote segment as far as it is needed: offsets from `start` up to, and without, its end.
    `size`: how many of its bytes count here, each byte of the log counted once."""

    segment: RemoteSegment
    start: int
    size: int


class RemoteSegments:
    """See the module.  Iteration gives them by base offset."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, uuid.UUID]] = []
        self._by_id: dict[uuid.UUID, RemoteSegment] = {}
        self._longest = 0  # span of offsets of the longest segment ever held
        self._bytes: dict[int, int] = {}  # answers of `bytes_from`

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[RemoteSegment]:
        return (self._by_id[segment_id] for _, segment_id in self._keys)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._by_id

    def add(self, segment: RemoteSegment) -> None:
        """Count a segment from now on; nothing happens if it counts already."""
        if segment.segment_id in self._by_id:
            return
        self._by_id[segment.segment_id] = segment
        insort(self._keys, (segment.base_offset, segment.segment_id))
        self._longest = max(self._longest, segment.end_offset - segment.base_offset)
        self._bytes.clear()

    def remove(self, segment_id: uuid.UUID) -> None:
        """Count it no longer, if it did."""
        segment = self._by_id.pop(segment_id, None)
        if segment is not None:
            key = (segment.base_offset, segment_id)
            del self._keys[bisect_left(self._keys, key)]
            self._bytes.clear()

    def at(self, offset: int) -> RemoteSegment | None:
        """Of the segments that hold `offset`, the one that reaches furthest."""
        best: RemoteSegment | None = None
        for i in range(bisect_right(self._keys, (offset, _ANY_ID)) - 1, -1, -1):
            base, segment_id = self._keys[i]
            if base + self._longest <= offset:
                break
            found = self._by_id[segment_id]
            if found.end_offset > offset and (best is None or found.end_offset > best.end_offset):
                best = found
        return best

    def at_or_after(self, offset: int) -> RemoteSegment | None:
        """The same, or where no segment holds `offset`, the next one after it."""
        found = self.at(offset)
        if found is None:
            i = bisect_right(self._keys, (offset, _ANY_ID))
            found = self._by_id[self._keys[i][1]] if i < len(self._keys) else None
        return found

    def pieces(self, start: int) -> Iterator[Piece]:
        """What is to be read from `start` on, in order and without a gap; it ends where the next
        offset is in no segment."""
        offset = start
        while (segment := self.at(offset)) is not None:
            span = segment.end_offset - segment.base_offset
            size = segment.size * (segment.end_offset - offset) // span
            yield Piece(segment, offset, size)
            offset = segment.end_offset

    def covered_from(self, start: int) -> int:
        """The offset up to which every offset from `start` on is in a segment."""
        offset = start
        while (segment := self.at(offset)) is not None:
            offset = segment.end_offset
        return offset

    def bytes_from(self, start: int) -> int:
        """How many bytes of log there are from `start` on, each counted once."""
        known = self._bytes.get(start)
        if known is None:
            known = sum(piece.size for piece in self.pieces(start))
            self._bytes = {start: known}
        return known

    def below(self, offset: int) -> list[RemoteSegment]:
        """Those that end at `offset` or before."""
        end = bisect_left(self._keys, (offset, uuid.UUID(int=0)))
        found = (self._by_id[segment_id] for _, segment_id in self._keys[:end])
        return [segment for segment in found if segment.end_offset <= offset]

    def within(self, start: int, end: int) -> list[RemoteSegment]:
        """Those whose offsets all lie in [`start`, `end`)."""
        first = bisect_left(self._keys, (start, uuid.UUID(int=0)))
        last = bisect_left(self._keys, (end, uuid.UUID(int=0)))
        found = (self._by_id[segment_id] for _, segment_id in self._keys[first:last])
        return [segment for segment in found if segment.end_offset <= end]

    def clear(self) -> None:
        self._keys.clear()
        self._by_id.clear()
        self._bytes.clear()
        self._longest = 0

    @property
    def end_offset(self) -> int:
        """The offset after the last one of any segment, -1 without segments."""
        return max((s.end_offset for s in self), default=-1)


__all__ = ["Piece", "RemoteSegments"]
