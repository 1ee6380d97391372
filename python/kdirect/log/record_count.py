"""How many records a consumer gets from a range of offsets, without reading them: CountRecords.

Law: what is told is what reading the range would give, or nothing is.  Headers of batches are
looked at, and no record.  A header says how many records its batch has; where that is fewer than
it has offsets, compaction has removed some, and the CRC of the batch is checked, because nothing
else confirms the number.  The following is not told, because only reading tells it:

- a range of which a part is not kept here, or is not readable;
- an end of the range within a batch of which records were removed;
- for consumers of committed records, a range with a batch of a transaction, which may have been
  aborted.  Markers are no records for anybody.

Takes long where batches are small: not for an event loop.  An `Allowance` bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kdirect.errors import ClosedError
from kdirect.log.mapped import count_batches
from kdirect.log.segment import Segment
from kdirect.log.segment_search import chain, corrupt, locate
from kdirect.log.views import KernelView

# Of log that one answer looks at: a page of each batch is brought into memory for its header.
MOST_BYTES = 1 << 30


@dataclass(slots=True)
class Allowance:
    """Of how many bytes of log an answer may still look at the batches, in all its ranges: others
    wait for it.  One batch of each range is always looked at, so each count comes further."""

    left: int


class CountedRange(NamedTuple):
    """`records` lie at the offsets from the start of the range up to `next_offset`."""

    records: int
    next_offset: int


def count(
    view: KernelView,
    segments: Sequence[Segment],
    start: int,
    stop: int,
    *,
    committed_only: bool = False,
    allowance: Allowance | None = None,
) -> CountedRange | None:
    """The records at the offsets [start, stop), or at the first of them where that is all that the
    `allowance` has left, which becomes less (MOST_BYTES if there is none); None: not told.
    `segments` are those of the moment of `view`.  CorruptLogError for a batch that does not
    continue the log."""
    if allowance is None:
        allowance = Allowance(MOST_BYTES)
    marked, position, end = view.mark(committed_only=committed_only)
    first_kept = max(view.log_start_offset, segments[0].base_offset if segments else stop)
    if not first_kept <= start <= stop <= end:
        return None
    records, at, looked_at, most_bytes = 0, start, 0, max(1, allowance.left)
    for segment in segments:
        if at >= stop or segment.base_offset > marked or looked_at >= most_bytes:
            break
        if segment.base_offset != marked and segment.end_offset <= at:
            continue
        try:
            segment.acquire()
        except ClosedError:
            return None  # retention or compaction has replaced it: what is read now differs
        try:
            size, end_offset = segment.extent()
            if segment.base_offset == marked:
                size, end_offset = position, end
            if not size or at >= end_offset:
                continue
            where, base_offset = locate(segment, max(at, segment.base_offset))
            known = chain(segment, base_offset, end_offset)
            limit = where + most_bytes - looked_at
            found, walk = count_batches(
                segment.address, where, size, at, stop, limit, known, committed_only=committed_only
            )
            looked_at += walk.position - where
            allowance.left -= walk.position - where
            if walk.fault:
                raise corrupt(segment, walk)
            if found < 0:
                return None
            records += found
            is_whole = walk.position >= size
            at = end_offset if is_whole else max(at, walk.next_offset)
            if not is_whole and at < stop:
                break
        finally:
            segment.release()
    return CountedRange(records, min(at, stop))


__all__ = ["MOST_BYTES", "Allowance", "CountedRange", "count"]
