"""What of a log is compacted next: how dirty it is, from which offset to which, and which segments
become one.

Law of the room: pure decisions over what segments say of themselves; Kafka's LogCleanerManager and
Cleaner.groupSegmentsBySize decide the same.

A log has a *clean* part, in which each key has one record, up to the offset where the last cleaning
ended; a *dirty* part after it; and an uncleanable rest: the active segment, what is above the last
stable offset, and what is younger than ``min.compaction.lag.ms``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

INT32_MAX = (1 << 31) - 1


class SegmentFacts(NamedTuple):
    """What is asked of a segment.  `first_timestamp()` is that of its first batch, -1 for none; it
    may have to be read."""

    base_offset: int
    end_offset: int
    size: int
    offset_index_bytes: int
    time_index_bytes: int
    max_timestamp: int
    first_timestamp: Callable[[], int]


class CompactionRules(NamedTuple):
    """The properties of a topic that say when its logs are compacted."""

    min_dirty_ratio: float
    min_lag_ms: int
    max_lag_ms: int


class Dirt(NamedTuple):
    """What of a log may be compacted: [first_dirty, first_uncleanable), where a segment ends.
    `is_reset`: what was noted of earlier cleanings does not fit the log, and is wrong.  `delay_ms`:
    for so long a record has waited beyond ``max.compaction.lag.ms``."""

    first_dirty: int
    first_uncleanable: int
    clean_bytes: int
    dirty_bytes: int
    delay_ms: int
    is_reset: bool

    @property
    def ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0

    def is_due(self, min_ratio: float) -> bool:
        """Is there enough dirt, or dirt that is too old?"""
        return self.dirty_bytes > 0 and (self.delay_ms > 0 or self.ratio > min_ratio)


def look_at(
    segments: Sequence[SegmentFacts],
    rules: CompactionRules,
    *,
    log_start: int,
    last_stable: int,
    gaps_below: int,
    cleaned_to: int | None,
    now_ms: int,
) -> Dirt:
    """What of a log may be compacted; `segments` with the active one, `cleaned_to` is where the
    last cleaning ended, None: there was none.  None has come to `gaps_below`: what says so was
    noted of another log, of a topic that was deleted and created again."""
    end = segments[-1].end_offset
    first_dirty = log_start if cleaned_to is None else cleaned_to
    is_reset = not log_start <= first_dirty <= min(end, max(log_start, gaps_below))
    if is_reset:
        first_dirty = log_start
    sealed = segments[:-1]
    dirty = [s for s in sealed if s.end_offset > first_dirty]
    limit = min(last_stable, segments[-1].base_offset)
    if rules.min_lag_ms > 0:
        young = (s for s in dirty if s.max_timestamp > now_ms - rules.min_lag_ms)
        limit = min(limit, next((s.base_offset for s in young), limit))
    limit = max(limit, first_dirty)
    # Whole segments only.
    first_uncleanable = next(
        (s.base_offset for s in sealed if s.end_offset > limit), segments[-1].base_offset
    )
    # Kafka counts the whole segment in which the first dirty offset lies.
    starts = [s.base_offset for s in segments if s.base_offset <= first_dirty]
    dirty_base = min(starts[-1] if starts else first_dirty, first_uncleanable)
    return Dirt(
        first_dirty,
        first_uncleanable,
        sum(s.size for s in segments if s.base_offset < dirty_base),
        sum(s.size for s in sealed if dirty_base <= s.base_offset < first_uncleanable),
        _delay_ms(dirty, rules.max_lag_ms, now_ms),
        is_reset,
    )


def _delay_ms(dirty: Sequence[SegmentFacts], max_lag_ms: int, now_ms: int) -> int:
    clean_until = now_ms - max_lag_ms
    if clean_until <= 0:
        return 0
    stamps = [t for t in (s.first_timestamp() for s in dirty) if t > 0]
    return max(0, clean_until - min(stamps)) if stamps else 0


def grouped(
    segments: Sequence[SegmentFacts], max_bytes: int, max_index_bytes: int
) -> list[list[int]]:
    """Which neighbours become one segment, by their numbers, in order: together they have at most
    so many bytes, and their offsets fit the index."""
    groups: list[list[int]] = []
    size = offsets = times = base = 0
    for i, s in enumerate(segments):
        fits = (
            bool(groups)
            and size + s.size <= max_bytes
            and offsets + s.offset_index_bytes <= max_index_bytes
            and times + s.time_index_bytes <= max_index_bytes
            and (s.size == 0 or s.end_offset - 1 - base <= INT32_MAX)
        )
        if not fits:
            groups.append([])
            size = offsets = times = 0
            base = s.base_offset
        groups[-1].append(i)
        size += s.size
        offsets += s.offset_index_bytes
        times += s.time_index_bytes
    return groups
