"""Reading a partition: whole batches out of its sources, as far as its marks allow.

Law of the room: functions over one `KernelView` and the list of sources of the same moment; they
take no lock of the partition and change nothing.  What may be read of a segment is said by the view
(`KernelView.mark`): all of a segment below the mark, a part of the one in which the mark lies,
sealed or not, and nothing of a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kdirect.errors import ClosedError, CorruptLogError
from kdirect.log.mapped import Chain, MappedBytes
from kdirect.log.segment_source import Release, SegmentSource
from kdirect.log.views import KernelView

# (source, offset) -> (leader epoch of the batch at that offset, the largest in the source)
EpochsOf = Callable[[SegmentSource, int], tuple[int, int]]


class Reading(NamedTuple):
    """What to read: batches from the one that holds `offset` on, `max_bytes` at most in all, below
    `mark` (see `KernelView.mark`).  `release` as in `SegmentSource.read`."""

    view: KernelView
    dense_from: int
    epochs_of: EpochsOf
    offset: int
    max_bytes: int
    release: Release | None
    mark: tuple[int, int, int]


def mapped(buffer: memoryview) -> MappedBytes:
    """What stands for a buffer that a source has returned."""
    return buffer.obj  # type: ignore[return-value]


def read(what: Reading, sources: Sequence[SegmentSource]) -> list[memoryview]:
    """The buffers, one for each source; empty when there is nothing.  `sources` begin with the one
    that holds the offset.  ClosedError when one of them was deleted in between."""
    out: list[memoryview] = []
    remaining = what.max_bytes
    for source in sources:
        buffer, to_the_end = _read_one(what, source, remaining, first=not out)
        if buffer is not None:
            out.append(buffer)
            remaining -= len(buffer)
        if not to_the_end or (out and remaining <= 0):
            break
    return out


def _read_one(
    what: Reading, source: SegmentSource, length: int, *, first: bool
) -> tuple[memoryview | None, bool]:
    """(at most `length` bytes of one source, whether that is all that may ever be read of it)."""
    base = source.base_offset
    marked, position, end_offset = what.mark
    if base == marked:
        limit = position
    elif base < marked:
        limit, end_offset = source.size, source.end_offset
    else:
        return None, False
    start, expected = source.locate(max(what.offset, base)) if first else (0, base)
    if start >= limit:
        return None, base < marked  # compaction has removed its tail
    epochs = what.epochs_of(source, expected)
    known = Chain(expected, what.dense_from, end_offset, -1, *epochs)
    buffer = source.read(start, length, limit, known, at_least_one=first, release=what.release)
    read_all = buffer is not None and start + len(buffer) == limit
    return buffer, read_all and base < marked


def read_nowait(what: Reading, source: SegmentSource) -> list[memoryview] | None:
    """The same of one source, if all that is touched is in memory; else None."""
    base = source.base_offset
    marked, position, _ = what.mark
    limit = position if base == marked else source.size
    if not source.hold_nowait(what.offset, what.max_bytes, limit, release=what.release):
        return None
    try:
        buffer, to_the_end = _read_one(what, source, what.max_bytes, first=True)
        if to_the_end:
            return None  # what follows in the next segment belongs to the answer
        if buffer is None:
            return []
        if len(buffer) > what.max_bytes and not mapped(buffer).is_resident():
            return None  # one large batch
        return [buffer]
    except (ClosedError, CorruptLogError):
        return None  # the segment was deleted, or replaced: `read` finds out
    finally:
        source.end_hold(what.release)


__all__ = ["Reading", "mapped", "read", "read_nowait"]
