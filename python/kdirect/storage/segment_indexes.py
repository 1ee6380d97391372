"""The indexes of one remote segment, as they lie in files or in memory, and what they answer.

Owns: whether indexes can be those of a segment, and the questions to them.  The formats are those
of `kdirect.log.index`; the searches are compiled, and shared with it.  Bytes stay where they are as
long as this is referenced, also when their files have been removed.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from kdirect.errors import FormatError
from kdirect.format import layout
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_files import AbortedTransaction, parse_transaction_index
from kdirect.log.mapped import (
    indexes_are_sane,
    search_offset_index,
    search_time_index,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OFFSET_ENTRY = struct.Struct(">II")


class Part(NamedTuple):
    """The bytes of one index.  `owner` keeps them."""

    address: int
    length: int
    owner: object
    data: Buffer  # the same bytes


class SegmentIndexes:
    """The three indexes of `segment`; only if `are_sane` says so the others may be called."""

    def __init__(self, segment: RemoteSegment, offsets: Part, times: Part, aborted: Part) -> None:
        self._base = segment.base_offset
        self._end = segment.end_offset
        self._log_bytes = segment.size
        self._offsets = offsets
        self._times = times
        self._aborted = aborted
        self._offset_entries = offsets.length // layout.OFFSET_INDEX_ENTRY_BYTES
        self._time_entries = times.length // layout.TIME_INDEX_ENTRY_BYTES

    def are_sane(self) -> bool:
        """Whole entries that rise, and stay within the segment."""
        return self._are_positions_sane() and self._are_aborted_sane()

    def _are_positions_sane(self) -> bool:
        whole = not (
            self._offsets.length % layout.OFFSET_INDEX_ENTRY_BYTES
            or self._times.length % layout.TIME_INDEX_ENTRY_BYTES
        )
        return whole and bool(
            indexes_are_sane(
                self._offsets.address,
                self._offset_entries,
                self._times.address,
                self._time_entries,
                self._log_bytes,
                self._end - self._base,
            )
        )

    def _are_aborted_sane(self) -> bool:
        last = self._base - 1
        try:
            for entry in parse_transaction_index(self._aborted.data):
                if not last < entry.last_offset < self._end:
                    return False
                last = entry.last_offset
        except FormatError:
            return False
        return True

    def locate(self, offset: int) -> tuple[int, int]:
        """(position, last offset) of an indexed batch at or before the one that holds `offset`;
        (0, -1) where none is: the segment begins there."""
        position, last = search_offset_index(
            self._offsets.address, self._offset_entries, max(0, offset - self._base)
        )
        return (position, self._base + last) if position > 0 else (0, -1)

    def border_after(self, position: int) -> int:
        """The first position after this one where a batch is known to begin, or the log ends."""
        view = memoryview(self._offsets.data)

        def of(entry: int) -> int:
            return int(_OFFSET_ENTRY.unpack_from(view, entry * _OFFSET_ENTRY.size)[1])

        after = bisect_right(range(self._offset_entries), position, key=of)
        return of(after) if after < self._offset_entries else self._log_bytes

    def offset_before(self, timestamp_ms: int) -> int:
        """An offset up to which every record is older."""
        return self._base + int(
            search_time_index(self._times.address, self._time_entries, timestamp_ms)
        )

    def aborted(self, start: int, end: int) -> tuple[list[AbortedTransaction], bool]:
        """Aborted transactions that end in this segment, with records in [start, end); then whether
        no later segment has one."""
        found = []
        for entry in parse_transaction_index(self._aborted.data):
            if entry.first_offset < end and entry.last_offset >= start:
                found.append(entry)
            if entry.last_stable_offset >= end:
                return found, True  # whatever ends later has begun at `end` or above
        return found, False


__all__ = ["Part", "SegmentIndexes"]
