"""What the commit kernel tells of itself: values of one moment, without behaviour that changes
anything."""

from __future__ import annotations

from typing import NamedTuple


class KernelView(NamedTuple):
    """One consistent look at a kernel.

    The log ends at `end_position` of the segment `segment_base_offset`.  A *mark* is a point in the
    log, (segment, position, offset): everything below it may be read.  The high watermark is the
    mark (`readable_segment`, `readable_position`, `high_watermark`); the last stable offset is
    (`stable_segment`, `stable_position`, `last_stable_offset`) and never above it.  A mark at the
    end of a sealed segment is written as position 0 of the next one."""

    segment_base_offset: int
    end_position: int
    log_end_offset: int
    high_watermark: int
    readable_position: int
    last_stable_offset: int
    stable_position: int
    log_start_offset: int
    has_head: bool
    readable_segment: int
    stable_segment: int

    def mark(self, *, committed_only: bool = False) -> tuple[int, int, int]:
        """(segment, position, offset) below which records may be read."""
        if committed_only:
            return self.stable_segment, self.stable_position, self.last_stable_offset
        return self.readable_segment, self.readable_position, self.high_watermark

    @property
    def end_mark(self) -> tuple[int, int, int]:
        """The same for another replica, which copies what is not committed yet, too."""
        return self.segment_base_offset, self.end_position, self.log_end_offset

    def is_finished(self, segment_base_offset: int) -> bool:
        """May every record of this segment be read, and does it take no more of them?"""
        return segment_base_offset < min(self.stable_segment, self.segment_base_offset)


class SealedHead(NamedTuple):
    """What a head was when it was sealed."""

    segment_base_offset: int
    size: int
    end_offset: int
    max_timestamp: int
    max_timestamp_offset: int
    offset_entries: int
    time_entries: int


class SealedSegment(NamedTuple):
    """A sealed segment that a mark may lie in."""

    base_offset: int
    size: int
    end_offset: int
