"""What followers count of remote segments, and what any reader makes of metadata that was written
again."""

from __future__ import annotations

import uuid
from typing import Any

from kdirect.format.remote_metadata import RemoteSegment, RemoteSegmentUpdate, SegmentState
from kdirect.format.segment_object import CustomMetadata, pack_custom_metadata
from kdirect.storage.copy_rules import LocalLog, first_anywhere
from kdirect.storage.followed_tiers import ends_at, tiered_end
from kdirect.storage.remote_segments import RemoteSegments
from kdirect.storage.segment_states import NO_SEGMENT, PartitionMetadata

TOPIC_ID = uuid.UUID(int=7)
FINISHED = SegmentState.COPY_SEGMENT_FINISHED
STARTED = SegmentState.COPY_SEGMENT_STARTED


def segment(
    base: int, end: int, epochs: tuple[tuple[int, int], ...] = (), **more: Any
) -> RemoteSegment:
    fields: dict[str, Any] = {
        "topic": "t",
        "topic_id": TOPIC_ID,
        "partition": 0,
        "segment_id": uuid.uuid4(),
        "base_offset": base,
        "end_offset": end,
        "broker_id": 1,
        "max_timestamp_ms": 0,
        "event_timestamp_ms": 0,
        "leader_epochs": epochs or ((0, base),),
        "size": end - base,
        "custom": pack_custom_metadata(CustomMetadata(0)),
        "state": FINISHED,
    }
    return RemoteSegment(**{**fields, **more})


def local(start: int, local_start: int, end: int, *epochs: tuple[int, int]) -> LocalLog:
    return LocalLog(start, local_start, end, end, (), 0, epochs or ((0, 0),))


def test_a_follower_counts_finished_segments_of_its_own_history() -> None:
    log = local(0, 10, 40, (0, 0), (2, 20))
    first, second = segment(0, 20), segment(20, 30, ((2, 20),))
    assert tiered_end([], log) == -1
    assert tiered_end([segment(0, 10)], log) == -1, "nothing of what is here"
    assert tiered_end([first], log) == 20
    assert tiered_end([first, second], log) == 30
    assert tiered_end([second], log) == -1, "there is a gap"
    assert tiered_end([first, segment(20, 30, ((2, 20),), state=STARTED)], log) == 20
    assert tiered_end([first, segment(20, 30, ((1, 20),))], log) == 20, "of another history"
    assert tiered_end([first, segment(20, 50, ((2, 20),))], log) == 20, "more than there is here"


def test_a_follower_begins_after_a_segment_of_its_leaders_history() -> None:
    epochs = ((0, 0), (2, 20))
    good, foreign = segment(10, 30, ((0, 10), (2, 20))), segment(10, 30, ((0, 10), (1, 20)))
    assert ends_at([foreign, good], 0, 30, epochs) is good
    assert ends_at([foreign], 0, 30, epochs) is None
    assert ends_at([segment(10, 31, ((0, 10), (2, 20)))], 0, 30, epochs) is None
    assert ends_at([segment(10, 30, ((0, 10), (2, 20)), state=STARTED)], 0, 30, epochs) is None


def test_a_new_leader_begins_its_log_where_something_is() -> None:
    """The leader before has deleted [0, 20) and this broker has not heard of it."""
    remote = RemoteSegments()
    assert first_anywhere(local(0, 40, 50), remote, []) == 40
    foreign = segment(0, 20, ((7, 0),))
    assert first_anywhere(local(0, 40, 50), remote, [foreign]) == 0, "it is not gone, but unknown"
    assert first_anywhere(local(20, 40, 50), remote, [foreign]) == 40
    remote.add(segment(20, 40))
    assert first_anywhere(local(0, 40, 50), remote, []) == 20
    assert first_anywhere(local(25, 40, 50), remote, []) == 25, "it is within a segment"
    assert first_anywhere(local(45, 40, 50), remote, []) == 45
    remote.add(segment(45, 50))
    remote.remove(next(iter(remote)).segment_id)
    assert first_anywhere(local(0, 40, 50), remote, []) == 40


def test_metadata_that_is_written_again_says_the_same() -> None:
    """Segments of an old leader epoch that a leader of a newer one has never touched, and one that
    it has, in whatever order they came."""

    def update(of: RemoteSegment | None, epoch: int, state: SegmentState) -> RemoteSegmentUpdate:
        return RemoteSegmentUpdate(
            topic="t",
            topic_id=TOPIC_ID,
            partition=0,
            segment_id=NO_SEGMENT if of is None else of.segment_id,
            broker_id=epoch,
            event_timestamp_ms=0,
            custom=pack_custom_metadata(CustomMetadata(epoch)),
            state=state,
        )

    metadata = PartitionMetadata()
    first, second, third = (segment(i, i + 10, state=STARTED) for i in (0, 10, 20))
    fence = SegmentState.DELETE_SEGMENT_FINISHED
    for record in (
        first,
        second,
        update(first, 0, FINISHED),
        update(second, 0, FINISHED),
        third,
        update(None, 3, fence),
        update(first, 3, SegmentState.DELETE_SEGMENT_STARTED),
        update(second, 1, SegmentState.DELETE_SEGMENT_STARTED),  # of a leader that was deposed
    ):
        metadata.apply(record)
    again = PartitionMetadata()
    written = list(metadata.records())
    for record in written:
        again.apply(record)
    assert again.segments == metadata.segments and len(again.segments) == 3
    assert (again.newest_epoch, metadata.newest_epoch) == (3, 3)
    for record in written:  # who has read what came before is not confused by it
        metadata.apply(record)
    assert again.segments == metadata.segments
    assert list(again.records()) == written
