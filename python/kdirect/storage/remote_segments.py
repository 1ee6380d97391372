"""The remote segments of one partition that count, by offset.  Pure.

Segments may overlap: two leaders have copied logs whose segments begin at different offsets, or one
copied what the other had copied already.  So an offset is looked for among all that may hold it,
and the one that reaches furthest is taken.

One thread changes it, any may look: each change puts a new view in place of the old one.  Looking
costs no more than the overlaps, except for `bytes_from`, whose walk is remembered until something
changes.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kdirect.format.remote_metadata import RemoteSegment


class Piece(NamedTuple):
    """A remote segment as far as it is needed: offsets from `start` up to, and without, its end.
    `size`: how many of its bytes count here, each byte of the log counted once."""

    segment: RemoteSegment
    start: int
    size: int


class _View(NamedTuple):
    """All segments by base offset.  `longest`: the most offsets that one of them ever spanned."""

    bases: tuple[int, ...] = ()
    segments: tuple[RemoteSegment, ...] = ()
    longest: int = 0

    def at(self, offset: int) -> RemoteSegment | None:
        best: RemoteSegment | None = None
        for i in range(bisect_right(self.bases, offset) - 1, -1, -1):
            if self.bases[i] + self.longest <= offset:
                break
            found = self.segments[i]
            if found.end_offset > offset and (best is None or found.end_offset > best.end_offset):
                best = found
        return best

    def index_of(self, segment: RemoteSegment) -> int:
        """Where a segment is that is there."""
        i = bisect_left(self.bases, segment.base_offset)
        while self.segments[i].segment_id != segment.segment_id:
            i += 1
        return i


class RemoteSegments:
    """See the module.  Iteration gives the segments by base offset."""

    def __init__(self) -> None:
        self._view = _View()
        self._by_id: dict[uuid.UUID, RemoteSegment] = {}
        self._bytes: dict[int, int] = {}  # answers of `bytes_from`

    def __len__(self) -> int:
        return len(self._view.segments)

    def __iter__(self) -> Iterator[RemoteSegment]:
        return iter(self._view.segments)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._by_id

    # -- changing ----------------------------------------------------------------------------------

    def add(self, segment: RemoteSegment) -> None:
        """Count a segment from now on; nothing happens if it counts already."""
        if segment.segment_id in self._by_id:
            return
        self._by_id[segment.segment_id] = segment
        bases, segments, longest = self._view
        i = bisect_right(bases, segment.base_offset)
        longest = max(longest, segment.end_offset - segment.base_offset)
        self._put(
            (*bases[:i], segment.base_offset, *bases[i:]),
            (*segments[:i], segment, *segments[i:]),
            longest,
        )

    def load(self, segments: Iterable[RemoteSegment]) -> None:
        """Count these, and no others, from now on, but for those that one other of them covers
        whole, of equal ones all but the first.  It sorts once, where `add` copies the view for each
        of them."""
        counted: list[RemoteSegment] = []
        end = -1
        for segment in sorted(segments, key=lambda s: (s.base_offset, -s.end_offset)):
            if segment.end_offset > end:
                counted.append(segment)
                end = segment.end_offset
        self._by_id = {segment.segment_id: segment for segment in counted}
        longest = max((s.end_offset - s.base_offset for s in counted), default=0)
        self._put(tuple(s.base_offset for s in counted), tuple(counted), longest)

    def remove(self, segment_id: uuid.UUID) -> None:
        """Count it no longer, if it did."""
        segment = self._by_id.pop(segment_id, None)
        if segment is not None:
            bases, segments, longest = self._view
            i = self._view.index_of(segment)
            self._put((*bases[:i], *bases[i + 1 :]), (*segments[:i], *segments[i + 1 :]), longest)

    def clear(self) -> None:
        self._by_id.clear()
        self._put((), (), 0)

    def _put(
        self, bases: tuple[int, ...], segments: tuple[RemoteSegment, ...], longest: int
    ) -> None:
        self._view = _View(bases, segments, longest)
        self._bytes = {}

    # -- looking -----------------------------------------------------------------------------------

    def at(self, offset: int) -> RemoteSegment | None:
        """Of the segments that hold `offset`, the one that reaches furthest."""
        return self._view.at(offset)

    def at_or_after(self, offset: int) -> RemoteSegment | None:
        """The same; where no segment holds `offset`, the next one after it."""
        view = self._view
        found = view.at(offset)
        if found is None:
            i = bisect_right(view.bases, offset)
            found = view.segments[i] if i < len(view.segments) else None
        return found

    def pieces(self, start: int) -> Iterator[Piece]:
        """What is to be read from `start` on, in order and without a gap; it ends where the next
        offset is in no segment."""
        view = self._view
        offset = start
        while (segment := view.at(offset)) is not None:
            span = segment.end_offset - segment.base_offset
            size = segment.size * (segment.end_offset - offset) // span
            yield Piece(segment, offset, size)
            offset = segment.end_offset

    def covered_from(self, start: int) -> int:
        """The offset up to which every offset from `start` on is in a segment."""
        view = self._view
        offset = start
        while (segment := view.at(offset)) is not None:
            offset = segment.end_offset
        return offset

    def bytes_from(self, start: int) -> int:
        """How many bytes of log there are from `start` on, each counted once; of a gap, none."""
        known = self._bytes.get(start)
        if known is None:
            known, offset = 0, start
            while (segment := self.at_or_after(offset)) is not None:
                begin = max(offset, segment.base_offset)
                span = segment.end_offset - segment.base_offset
                known += segment.size * (segment.end_offset - begin) // span
                offset = segment.end_offset
            self._bytes = {start: known}
        return known

    def held(self, start: int, end: int) -> int:
        """How many of the offsets in [`start`, `end`) are in a segment."""
        total, offset = 0, start
        while (segment := self.at_or_after(offset)) is not None and segment.base_offset < end:
            if offset >= end:
                break
            total += min(segment.end_offset, end) - max(offset, segment.base_offset)
            offset = segment.end_offset
        return total

    def gap(self, offset: int) -> tuple[int, int] | None:
        """The offsets around `offset` that no segment holds, where one before and one after it
        is."""
        view = self._view
        after = self.at_or_after(offset)
        i = bisect_right(view.bases, offset)
        if after is None or after.base_offset <= offset or i == 0:
            return None
        return max(segment.end_offset for segment in view.segments[:i]), after.base_offset

    def gaps(self) -> Iterator[tuple[int, int]]:
        """All of them."""
        end = -1
        for segment in self._view.segments:
            if 0 <= end < segment.base_offset:
                yield end, segment.base_offset
            end = max(end, segment.end_offset)

    def reaching(self, start: int, end: int) -> list[RemoteSegment]:
        """Those that have offsets in [`start`, `end`)."""
        view = self._view
        first = bisect_left(view.bases, start - view.longest)
        found = view.segments[first : bisect_left(view.bases, end)]
        return [segment for segment in found if segment.end_offset > start]

    def below(self, offset: int) -> list[RemoteSegment]:
        """Those that end at `offset` or before."""
        view = self._view
        found = view.segments[: bisect_left(view.bases, offset)]
        return [segment for segment in found if segment.end_offset <= offset]

    def within(self, start: int, end: int) -> list[RemoteSegment]:
        """Those whose offsets all lie in [`start`, `end`)."""
        view = self._view
        found = view.segments[bisect_left(view.bases, start) : bisect_left(view.bases, end)]
        return [segment for segment in found if segment.end_offset <= end]

    @property
    def end_offset(self) -> int:
        """The offset after the last one of any segment, -1 without segments."""
        return max((segment.end_offset for segment in self._view.segments), default=-1)


__all__ = ["Piece", "RemoteSegments"]
