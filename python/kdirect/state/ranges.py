"""Which offsets the next batch reads, and which partitions hold no window open.  Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kdirect.errors import DataLossError
from kdirect.state.batches import BatchRecord, Partition, Range, Ranges
from kdirect.state.clock import VectorClock

UNBOUNDED = 1 << 62


def positions_after(
    last: BatchRecord | None, starts: Mapping[Partition, int], ends: Mapping[Partition, Range]
) -> dict[Partition, int]:
    """Where each partition is read next: after the last batch, or from `starts`, or, for one that
    was made since, from its first offset.  DataLossError if one is gone."""
    known = {**starts, **({tp: r.end for tp, r in last.ranges.items()} if last else {})}
    for tp in sorted(known.keys() - ends.keys()):
        raise DataLossError(
            f"{tp.topic}-{tp.partition} is gone, and was read up to {known[tp]}",
            hint="the topic was made again: start a new job in an empty directory",
        )
    return {tp: known.get(tp, range_.start) for tp, range_ in ends.items()}


def check_kept(positions: Mapping[Partition, int], ends: Mapping[Partition, Range]) -> None:
    """DataLossError if records that were to be read next are not there any more."""
    for tp, position in sorted(positions.items()):
        first, end = ends[tp]
        if position < first:
            raise DataLossError(
                f"offsets {position} to {first} of {tp.topic}-{tp.partition} were removed before "
                "they were read",
                hint="raise the topic's retention, or start a new job in an empty directory",
            )
        if position > end:
            raise DataLossError(
                f"{tp.topic}-{tp.partition} ends at offset {end}, and was read up to {position}",
                hint="the topic was made again: start a new job in an empty directory",
            )


def next_ranges(
    positions: Mapping[Partition, int],
    ends: Mapping[Partition, Range],
    *,
    until: Mapping[Partition, int] | None = None,
    max_offsets: int | None = None,
) -> Ranges:
    """What a batch reads: everything up to the ends, at most up to `until`.

    With `max_offsets` in all, each partition that has anything gets one offset, those that have
    most first, and of what is left its share; so none starves."""
    limits = {
        tp: max(at, min(ends[tp].end, UNBOUNDED if until is None else until.get(tp, at)))
        for tp, at in sorted(positions.items())
    }
    lags = {tp: limits[tp] - positions[tp] for tp in limits}
    if max_offsets is not None and sum(lags.values()) > max_offsets:
        lags = _shares(lags, max_offsets)
    return {tp: Range(at, at + lags[tp]) for tp, at in sorted(positions.items())}


def _shares(lags: Mapping[Partition, int], most: int) -> dict[Partition, int]:
    """How much of each, `most` in all; there is more than that."""
    waiting = sorted((tp for tp in lags if lags[tp]), key=lambda tp: (-lags[tp], tp))
    found = dict.fromkeys(lags, 0)
    for tp in waiting[:most]:
        found[tp] = 1
    left = most - sum(found.values())
    rest = sum(lags.values()) - sum(found.values())
    for tp in waiting:
        found[tp] += (lags[tp] - found[tp]) * left // rest
    for tp in waiting:  # what was lost by rounding down
        more = min(lags[tp] - found[tp], most - sum(found.values()))
        found[tp] += more
    return found


def idle_partitions(
    ranges: Mapping[Partition, Range],
    ends: Mapping[Partition, Range],
    advanced_us: Mapping[Partition, int],
    timeouts_us: Mapping[str, int | None],
    now_us: int,
) -> frozenset[Partition]:
    """Partitions that are read to their end and have had nothing new for their input's timeout."""
    return frozenset(
        tp
        for tp, range_ in ranges.items()
        if (timeout := timeouts_us.get(tp.topic)) is not None
        and range_.start == range_.end == ends[tp].end
        and now_us - advanced_us.get(tp, now_us) >= timeout
    )


def closes_more(clock: VectorClock, idle: frozenset[Partition], closed_before: int) -> bool:
    """Would a batch that reads nothing close windows, because partitions have become idle?"""
    return clock.closes(idle, closed_before) > closed_before
