"""Where the batches of a segment lie: by offset and by time, from its indexes and its bytes.

Law of the file: it reads mapped bytes and changes nothing but, once, the log, where an index turns
out to be wrong; then the segment itself is searched.  Bytes that do not continue the log are a
CorruptLogError, whoever comes upon them (`corrupt`).  Mappings and their life are the segment's own
(`kdirect.log.segment`).
"""

from __future__ import annotations

import logging

from kdirect.errors import CorruptLogError, OffsetOutOfRangeError
from kdirect.log.mapped import Chain, Walk, find_batch, find_timestamp, is_resident
from kdirect.log.segment import Segment

log = logging.getLogger("kdirect.log")

NO_END = (1 << 63) - 1
# Read at most to find a batch from its index entry on, unless batches are larger.
SEARCH_BYTES = 64 << 10


def search_is_resident(segment: Segment, offset: int, length: int, stop: int) -> bool:
    """Are the pages in memory that are touched when `length` bytes are read from `offset` on,
    with what is looked at to find it?  `stop` is where the records end.  The caller has
    acquired the segment."""
    index, entries = segment.offset_index, segment.index_entries()[0]
    if not is_resident(index.address, entries * index.entry_bytes):
        return False
    start = min(index.lookup(max(0, offset - segment.base_offset), entries)[0], stop)
    return bool(is_resident(segment.address + start, min(length + SEARCH_BYTES, stop - start)))


def position_for(segment: Segment, offset: int) -> int:
    """The position of `locate`."""
    return locate(segment, offset)[0]


def locate(segment: Segment, offset: int) -> tuple[int, int]:
    """(position, base offset) of the batch that holds `offset`, or of the next one where
    compaction has removed it; the end of the records for `end_offset` itself, and where nothing
    is left before it.  CorruptLogError when a batch on the way does not continue the log."""
    if offset < segment.base_offset:
        raise OffsetOutOfRangeError(
            f"offset {offset} lies before segment {segment.path}",
            hint="ask the partition for the segment",
        )
    segment.acquire()
    try:
        size, end_offset = segment.extent()
        if offset >= end_offset:
            if offset > end_offset:
                raise OffsetOutOfRangeError(
                    f"offset {offset} lies after segment {segment.path}, which ends before"
                    f" {end_offset}",
                    hint="ask the partition for the segment",
                )
            return size, end_offset
        start, known = _looked_up(segment, offset, size, end_offset)
        may_be_gone = segment.dense_from > offset
        found = find_batch(segment.address, start, size, offset, known)
        if start and (
            found.fault
            or (found.position == start and found.base_offset > offset)
            or not (found.size or may_be_gone)
        ):
            _say_index_is_wrong(segment, start, offset)
            found = find_batch(
                segment.address, 0, size, offset, chain(segment, segment.base_offset, end_offset)
            )
        if found.size:
            return found.position, found.base_offset
        if not found.fault and may_be_gone:
            return size, end_offset  # compaction has removed the tail
        raise corrupt(segment, found, f"; offset {offset} was not found")
    finally:
        segment.release()


def chain(segment: Segment, next_offset: int, end_offset: int | None = None) -> Chain:
    """What is known of the batches from the one on that begins with `next_offset`."""
    end = segment.end_offset if end_offset is None else end_offset
    return Chain(next_offset, segment.dense_from, end)


def _looked_up(segment: Segment, offset: int, size: int, end_offset: int) -> tuple[int, Chain]:
    """Position of a batch at or before the one that holds `offset`, by the index, and what is
    known of it."""
    entries = segment.index_entries()[0] if offset > segment.base_offset else 0  # none is needed
    start, last = segment.offset_index.lookup(offset - segment.base_offset, entries)
    return _indexed(segment, start, last, size, end_offset)


def _indexed(
    segment: Segment, start: int, last: int, size: int, end_offset: int
) -> tuple[int, Chain]:
    if not 0 < start < size:
        return 0, chain(segment, segment.base_offset, end_offset)
    return start, Chain(-1, segment.dense_from, end_offset, segment.base_offset + last)


def last_indexed(segment: Segment, size: int) -> tuple[int, Chain]:
    """Position of the last indexed batch below `size`, and what is known of it.  The end offset
    is not used: it is looked for."""
    segment.offset_index.open()
    start, last = segment.offset_index.lookup_position(
        max(0, size - 1), segment.offset_index.entries
    )
    return _indexed(segment, start, last, size, NO_END)


def _say_index_is_wrong(segment: Segment, start: int, offset: int) -> None:
    if not segment.index_told:
        segment.index_told = True
        log.warning(
            "%s points to position %d for offset %d, which is wrong, or the batch there is"
            " damaged; reading the segment instead",
            segment.offset_index.path,
            start,
            offset,
        )


def corrupt(segment: Segment, walk: Walk, what: str = "") -> CorruptLogError:
    """The error for a walk that ended at a batch that does not continue the log."""
    fault = walk.fault or "is missing"
    if walk.next_offset >= 0:
        fault += f" (offset {walk.next_offset} comes next)"
    return CorruptLogError(
        f"{segment.path}: the record batch at position {walk.position} of the segment that begins"
        f" at offset {segment.base_offset} {fault}{what}",
        hint="restore the segment from a good copy, or read past it, from offset"
        f" {segment.end_offset} on",
    )


def batch_for_timestamp(
    segment: Segment, timestamp_ms: int, from_offset: int, after: Walk | None = None
) -> Walk:
    """Walk to the first batch with a record of `timestamp_ms` or later at `from_offset` or
    higher; with `after`, to the next one after that batch.  The caller has acquired the
    segment.  CorruptLogError when a batch on the way is damaged."""
    size, end_offset = segment.extent()
    if after is not None:
        start, known = after.position + after.size, chain(segment, after.next_offset, end_offset)
    else:
        relative = segment.time_index.lookup(timestamp_ms, segment.index_entries()[1])
        start, known = _looked_up(
            segment, max(segment.base_offset + relative, from_offset), size, end_offset
        )
    found = find_timestamp(segment.address, start, size, timestamp_ms, from_offset, known)
    if found.fault and start and after is None:
        _say_index_is_wrong(segment, start, from_offset)
        found = find_timestamp(
            segment.address,
            0,
            size,
            timestamp_ms,
            from_offset,
            chain(segment, segment.base_offset, end_offset),
        )
    if found.fault:
        raise corrupt(segment, found)
    return found  # type: ignore[no-any-return]
