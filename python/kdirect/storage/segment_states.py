"""What metadata records say together: the present state of each remote segment.  Pure.

Law: any reader of ``__remote_log_metadata`` that applies its records in their order comes to the
same result.  A record that does not follow from the ones before it changes nothing: it was written
by a broker that did not lead the partition any more (`kdirect.storage.remote_log`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from kdirect.format.remote_metadata import (
    PartitionDeleteState,
    RemotePartitionDelete,
    RemoteSegment,
    RemoteSegmentUpdate,
    SegmentState,
)
from kdirect.format.segment_object import parse_custom_metadata

NO_EPOCH = -1  # of records that are not kdirect's
NO_SEGMENT = uuid.UUID(int=0)  # of the record that a leader epoch has begun

Record: TypeAlias = RemoteSegment | RemoteSegmentUpdate | RemotePartitionDelete

_S = SegmentState
_FOLLOWS = {
    _S.COPY_SEGMENT_STARTED: (_S.COPY_SEGMENT_FINISHED, _S.DELETE_SEGMENT_STARTED),
    _S.COPY_SEGMENT_FINISHED: (_S.DELETE_SEGMENT_STARTED,),
    _S.DELETE_SEGMENT_STARTED: (_S.DELETE_SEGMENT_FINISHED,),
    _S.DELETE_SEGMENT_FINISHED: (),
}


def follows(state: SegmentState, before: SegmentState) -> bool:
    """May a segment come to `state` from the one before?"""
    return state in _FOLLOWS[before]


def updated(segment: RemoteSegment, update: RemoteSegmentUpdate) -> RemoteSegment:
    """The segment after an update that follows."""
    return replace(
        segment,
        state=update.state,
        custom=update.custom if update.custom is not None else segment.custom,
        broker_id=update.broker_id,
        event_timestamp_ms=update.event_timestamp_ms,
    )


def epoch_of(record: RemoteSegment | RemoteSegmentUpdate) -> int:
    """The leader epoch of who wrote it."""
    custom = parse_custom_metadata(record.custom)
    return NO_EPOCH if custom is None else custom.leader_epoch


class PartitionMetadata:
    """The metadata of one partition, for who keeps the topic: records in, and out again the fewest
    that say the same.

    `given_up`: tries to copy that came to nothing, with the time of their last record.  What such a
    try was uploading may still be stored, long after everything was cleaned up; that its id was
    given up is the only proof that the object is nobody's (`kdirect.storage.sweep`)."""

    def __init__(self) -> None:
        self.segments: dict[uuid.UUID, RemoteSegment] = {}
        self.given_up: dict[uuid.UUID, RemoteSegment] = {}
        self.deletion: RemotePartitionDelete | None = None
        self._fence: RemoteSegmentUpdate | None = None
        self._newest_epoch = NO_EPOCH

    def apply(self, record: Record) -> None:
        """Take a record, in the order of the topic."""
        if isinstance(record, RemotePartitionDelete):
            self.deletion = record
            if record.state is PartitionDeleteState.DELETE_PARTITION_FINISHED:
                for segment in self.segments.values():
                    self._give_up(replace(segment, state=_S.DELETE_SEGMENT_FINISHED))
                self.segments.clear()
            return
        epoch = epoch_of(record)
        if NO_EPOCH < epoch < self._newest_epoch:
            return
        self._newest_epoch = max(epoch, self._newest_epoch)
        if isinstance(record, RemoteSegment):
            if record.segment_id not in self.given_up:
                self.segments.setdefault(record.segment_id, record)
        elif record.segment_id == NO_SEGMENT:
            self._fence = record
        else:
            self._update(record)

    def _update(self, update: RemoteSegmentUpdate) -> None:
        segment = self.segments.get(update.segment_id)
        if segment is None or not follows(update.state, segment.state):
            return
        if update.state is _S.DELETE_SEGMENT_FINISHED:
            del self.segments[update.segment_id]
            self._give_up(updated(segment, update))
        else:
            self.segments[update.segment_id] = updated(segment, update)

    def _give_up(self, segment: RemoteSegment) -> None:
        """All of a segment is gone: remember it if its upload was never seen to end."""
        custom = parse_custom_metadata(segment.custom)
        if custom is None or custom.tail is None:
            self.given_up[segment.segment_id] = segment

    def forget_given_up(self, before_ms: int) -> None:
        """Nothing of them is stored any more."""
        old = [i for i, s in self.given_up.items() if s.event_timestamp_ms < before_ms]
        for segment_id in old:
            del self.given_up[segment_id]

    @property
    def newest_epoch(self) -> int:
        """The newest leader epoch of which there was a record; NO_EPOCH without one."""
        return self._newest_epoch

    @property
    def is_gone(self) -> bool:
        """Was all of it deleted?"""
        deletion = self.deletion
        return (
            deletion is not None
            and deletion.state is PartitionDeleteState.DELETE_PARTITION_FINISHED
        )

    def records(self) -> Iterator[Record]:
        """Of a segment the record of its beginning, then that of its present state.  Those of older
        leader epochs come first, or whoever applies them would leave them out."""
        for segment in sorted((*self.segments.values(), *self.given_up.values()), key=epoch_of):
            yield replace(segment, state=_S.COPY_SEGMENT_STARTED)
            if segment.state is _S.DELETE_SEGMENT_FINISHED:
                yield _update_to(segment, _S.DELETE_SEGMENT_STARTED)
            if segment.state is not _S.COPY_SEGMENT_STARTED:
                yield _update_to(segment, segment.state)
        if self._fence is not None and not self.is_gone:
            yield self._fence
        if self.deletion is not None:
            yield self.deletion


def _update_to(segment: RemoteSegment, state: SegmentState) -> RemoteSegmentUpdate:
    return RemoteSegmentUpdate(
        topic=segment.topic,
        topic_id=segment.topic_id,
        partition=segment.partition,
        segment_id=segment.segment_id,
        broker_id=segment.broker_id,
        event_timestamp_ms=segment.event_timestamp_ms,
        custom=segment.custom,
        state=state,
    )


__all__ = [
    "NO_EPOCH",
    "NO_SEGMENT",
    "PartitionMetadata",
    "Record",
    "epoch_of",
    "follows",
    "updated",
]
