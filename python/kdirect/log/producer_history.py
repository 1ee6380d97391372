"""The tables of producers and transactions of a partition, from its snapshots and its batches.

Law of the room: reads files, changes only the kernel's tables, and removes snapshots that must not
be found again.  Called while nothing is appended: when a partition is opened, and after its log was
cut.  `snapshot_at` alone changes nothing and may be called at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kdirect.errors import CorruptLogError, FormatError
from kdirect.log import producer_state
from kdirect.log.clock import now_ms
from kdirect.log.kernel import CommitKernel
from kdirect.log.kernel_producers import known_producers, set_producers
from kdirect.log.kernel_transactions import (
    first_unstable_segment,
    restore_transactions,
    settle_transactions,
)
from kdirect.log.mapped import restore_producers
from kdirect.log.producers import ProducerEntry
from kdirect.log.segment import Segment
from kdirect.log.segment_search import chain, corrupt, last_indexed, locate, position_for
from kdirect.log.views import SealedSegment

log = logging.getLogger("kdirect.log")

# How far before a snapshot the log is looked at for the last batches of the producers in it.
PRODUCER_HISTORY_BYTES = 1 << 20


def load_producers(
    kernel: CommitKernel,
    directory: Path,
    files: list[str],
    segments: list[Segment],
    start_offset: int,
    end_offset: int,
) -> None:
    """Fill the kernel's tables from the newest sound snapshot at or below `end_offset`, the batches
    after it, and, for the four batches of a producer that Kafka's format leaves out, the batches
    just before it.  Snapshots above `end_offset` and damaged ones are removed.  `files` are the
    names in the directory."""
    offset, entries = producer_state.load_latest(directory, start_offset, end_offset, files)
    now = now_ms()
    # Those too whose records were all deleted: what they repeat was in the log (KAFKA-7190).  They
    # expire however often the log is opened; a time to come would keep them for ever.
    entries = [e._replace(timestamp_ms=min(e.timestamp_ms, now)) for e in entries]
    if entries:
        entries = _with_history(entries, segments, offset)
    restore_state(kernel, entries, offset, segments, now)


def restore_state(
    kernel: CommitKernel,
    entries: Sequence[ProducerEntry],
    offset: int,
    segments: Sequence[Segment],
    now: int,
) -> None:
    """Fill the kernel's tables from what was known at `offset` and the batches after it, and let
    the last stable offset follow from them."""
    entries = [_sound(e, offset) for e in entries]
    set_producers(kernel, entries)
    restore_transactions(kernel, offset, _points(entries, segments))
    _add_batches(kernel, segments, offset, now)
    unstable = first_unstable_segment(kernel)
    settle_transactions(
        kernel,
        [
            SealedSegment(s.base_offset, s.size, s.end_offset)
            for s in segments[:-1]
            if 0 <= unstable <= s.base_offset
        ],
    )


def _sound(entry: ProducerEntry, offset: int) -> ProducerEntry:
    """Without an open transaction that would begin at or above the snapshot's own offset."""
    if -1 <= entry.transaction_start < offset:
        return entry
    return entry._replace(transaction_start=-1)


def _points(
    entries: Sequence[ProducerEntry], segments: Sequence[Segment]
) -> list[tuple[int, int, int, int]]:
    """(producer id, first offset, segment, position) of the transactions that a snapshot has open.
    One that begins before the first segment, or where a segment is damaged, lies at the segment's
    start."""
    points = []
    for entry in entries:
        first = entry.transaction_start
        if first < 0:
            continue
        holding = [s for s in segments if s.base_offset <= first]
        segment = holding[-1] if holding else segments[0]
        position = 0
        if holding and segment.size:
            try:
                position, _ = locate(segment, first)
            except CorruptLogError as e:
                log.warning("a transaction holds readers back by more than itself: %s", e)
        points.append((entry.producer_id, first, segment.base_offset, position))
    return points


def snapshot_at(directory: Path, segments: Sequence[Segment], offset: int) -> bytes:
    """The bytes of a snapshot at `offset`, where the last of `segments` ends: those of the file, if
    it is sound; else made of the newest sound one below and the batches after it.  Changes no file:
    the log is in use.  ClosedError when one of the segments was deleted meanwhile."""
    older: list[ProducerEntry] = []
    start = 0
    for at, path in reversed(producer_state.list_snapshots(directory)):
        if at > offset:
            continue
        try:
            data = path.read_bytes()
            older, start = producer_state.unpack_snapshot(data), at
        except (FormatError, OSError) as e:
            log.warning("producer snapshot %s is left out: %s", path, e)
            continue
        if at == offset:
            return data
        break
    kernel = CommitKernel()
    set_producers(kernel, older)
    _add_batches(kernel, segments, start, now_ms())
    return producer_state.pack_snapshot(known_producers(kernel)[0])


def _add_batches(kernel: CommitKernel, segments: Sequence[Segment], offset: int, now: int) -> None:
    """Tell the kernel's table of the batches from `offset` on."""
    for segment in segments:
        size, segment_end = segment.extent()
        if segment_end <= offset or size == 0:
            continue
        segment.acquire()
        try:
            start, expected = locate(segment, max(offset, segment.base_offset))
            walk = restore_producers(
                kernel,
                segment.address,
                start,
                size,
                segment.base_offset,
                offset,
                now,
                chain(segment, expected, segment_end),
            )
            if walk.fault:
                raise corrupt(segment, walk)
        except CorruptLogError as e:  # what can be read stays readable
            log.error(
                "the producers of batches from there on are not known, and what they repeat is not"
                " noticed: %s",
                e,
            )
        finally:
            segment.release()
            segment.unmap_if_idle()


def _with_history(
    entries: list[ProducerEntry], segments: list[Segment], offset: int
) -> list[ProducerEntry]:
    """Add to each producer of a snapshot its batches among the last bytes before `offset`."""
    inside = [s for s in segments if s.base_offset < offset <= s.end_offset and s.size]
    if not inside:
        return entries
    segment = inside[-1]
    seen = CommitKernel()
    segment.acquire()
    try:
        stop = position_for(segment, offset)
        start, known = last_indexed(segment, max(0, stop - PRODUCER_HISTORY_BYTES))
        walk = restore_producers(
            seen, segment.address, start, stop, segment.base_offset, 0, 0, known
        )
        if walk.fault:
            raise corrupt(segment, walk)
    except CorruptLogError as e:
        log.error("only the last batch of each producer is known: %s", e)
        return entries
    finally:
        segment.release()
        segment.unmap_if_idle()
    history = {e.producer_id: e for e in known_producers(seen)[0]}
    out = []
    for entry in entries:
        found = history.get(entry.producer_id)
        same = (
            found is not None
            and found.producer_epoch == entry.producer_epoch
            and found.batches[-1:] == entry.batches[-1:]
        )
        out.append(entry._replace(batches=found.batches) if found is not None and same else entry)
    return out
