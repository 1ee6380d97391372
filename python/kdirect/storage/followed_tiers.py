"""What a follower of a tiered partition does with remote segments: how far its own log is copied,
and how it begins after what is tiered.

A follower copies and deletes nothing in the store.  It counts the segments as their leader does
(`kdirect.storage.lineage`), by metadata that it has read itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdirect.errors import RemoteStorageError
from kdirect.format.remote_metadata import RemoteSegment, SegmentState
from kdirect.format.segment_object import (
    Section,
    parse_custom_metadata,
    parse_tail,
    require_identity,
)
from kdirect.objects.store import ObjectStore
from kdirect.storage.copy_rules import LocalLog
from kdirect.storage.lineage import Epochs, belongs
from kdirect.storage.remote_segments import RemoteSegments
from kdirect.storage.upload import identity_of, key_of


def tiered_end(segments: Iterable[RemoteSegment], local: LocalLog) -> int:
    """Up to where every offset that is here is in a remote segment that counts; -1: none is."""
    counted, start = RemoteSegments(), local.local_start_offset
    counted.load(
        segment
        for segment in segments
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED
        and segment.end_offset > start
        and belongs(segment, local)
    )
    end = counted.covered_from(start)
    return end if end > start else -1


def ends_at(
    segments: Iterable[RemoteSegment], start: int, offset: int, epochs: Epochs
) -> RemoteSegment | None:
    """The remote segment that ends at `offset`, of a log that starts at `start` and has these
    leader epochs."""
    log = LocalLog(start, start, offset, offset, (), 0, epochs)
    found = [
        segment
        for segment in segments
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED
        and segment.end_offset == offset
        and belongs(segment, log)
    ]
    return max(found, key=lambda segment: segment.event_timestamp_ms, default=None)


def producers_after(store: ObjectStore, segment: RemoteSegment, cluster_id: str) -> bytes:
    """The producer snapshot at the end of a remote segment: one ranged GET of its tail.
    RemoteStorageError, CorruptObjectError."""
    key = key_of(segment, cluster_id)
    custom = parse_custom_metadata(segment.custom)
    if custom is None or custom.tail is None:
        raise RemoteStorageError(
            f"the metadata of object {key} does not say where its tail is",
            hint="it was written by another program than kdirect",
        )
    position, length = custom.tail
    tail = store.get(key, position, length)
    footer, sections = parse_tail(tail, position + length)
    require_identity(footer, identity_of(segment, cluster_id), segment.base_offset)
    return bytes(sections[Section.PRODUCERS])


__all__ = ["ends_at", "producers_after", "tiered_end"]
