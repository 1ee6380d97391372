"""Which record is the first of a time or later: ListOffsets by timestamp.

Law: batches are opened here, as the only place of the room.  That takes long when they are large:
not for an event loop.

A batch whose header tells of a later timestamp than its records have ends the search with its last
offset and what its header says.  No record before that is late enough, so nobody who reads on from
there misses one, and a log full of such batches costs no more than one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kdirect.errors import ClosedError
from kdirect.format.batch import iterate_batches
from kdirect.format.lookup import find_record
from kdirect.log.mapped import Walk, copy_bytes
from kdirect.log.segment import Segment
from kdirect.log.segment_search import batch_for_timestamp
from kdirect.log.views import KernelView

if TYPE_CHECKING:
    from typing_extensions import Buffer


def first_in_batch(
    data: Buffer,
    batch: Walk,
    where: str,
    timestamp_ms: int,
    start: int,
    max_plain_batch_bytes: int,
) -> tuple[int, int] | None:
    """(offset, timestamp) of the first record of one batch whose timestamp is `timestamp_ms` or
    later, at `start` or higher; the last offset and the time of its header where no record has what
    the header promises."""
    found = find_record(
        data, where, timestamp_ms, start, max_decompressed_bytes=max_plain_batch_bytes
    )
    if found is None and batch.base_offset >= start:
        header = next(iterate_batches(data, check_crc=False))
        if header.records_count > 0 and not header.is_control:
            found = batch.next_offset - 1, header.max_timestamp
    return found


def first_at(
    timestamp_ms: int,
    view: KernelView,
    segments: Sequence[Segment],
    name: str,
    max_plain_batch_bytes: int,
) -> tuple[int, int] | None:
    """(offset, timestamp) of the first readable record whose timestamp is `timestamp_ms` or later,
    or None. BatchTooLargeError for a batch that stands for more than `max_plain_batch_bytes`."""
    start = view.log_start_offset
    for segment in segments:
        if segment.end_offset <= start or segment.max_timestamp < timestamp_ms:
            continue
        try:
            segment.acquire()
        except ClosedError:
            continue
        try:
            batch: Walk | None = None
            while (batch := batch_for_timestamp(segment, timestamp_ms, start, batch)).size:
                at, size, base_offset, _, _ = batch
                if base_offset >= view.high_watermark:
                    return None
                data = copy_bytes(segment.address + at, size)
                where = f"{name} offset {base_offset}"
                found = first_in_batch(
                    data, batch, where, timestamp_ms, start, max_plain_batch_bytes
                )
                if found is not None:
                    return found if found[0] < view.high_watermark else None
                # Only markers, or none since compaction, or its largest timestamp was that of a
                # record below the log start.
        finally:
            segment.release()
    return None
