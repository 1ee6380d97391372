"""Logs with many remote segments: a year of one in five minutes has a hundred thousand."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable
from typing import Any

import pytest

from kdirect.format.remote_metadata import RemoteSegment, SegmentState
from kdirect.format.segment_object import CustomMetadata, TailPlace, pack_custom_metadata
from kdirect.storage import remote_events as e
from kdirect.storage.copy_rules import LocalLog, TierConfig
from kdirect.storage.remote_log import RemoteLog
from kdirect.storage.remote_segments import RemoteSegments
from kdirect.storage.segment_states import PartitionMetadata

MANY = 100_000
CUSTOM = pack_custom_metadata(CustomMetadata(0, TailPlace(100, 10)))
TOPIC_ID = uuid.UUID(int=1)


def segment(number: int, base: int, end: int) -> RemoteSegment:
    return RemoteSegment(
        topic="t", topic_id=TOPIC_ID, partition=0, segment_id=uuid.UUID(int=number + 1),
        base_offset=base, end_offset=end, broker_id=1, max_timestamp_ms=1, event_timestamp_ms=1,
        leader_epochs=((0, base),), size=100, custom=CUSTOM,
        state=SegmentState.COPY_SEGMENT_FINISHED,
    )  # fmt: skip


def machine(segments: Iterable[RemoteSegment]) -> RemoteLog:
    """A leadership that begins with these."""
    metadata = PartitionMetadata()
    for each in segments:
        metadata.segments[each.segment_id] = each
    found = RemoteLog("t", TOPIC_ID, 0, broker_id=1)
    for record in metadata.records():
        found.on(e.Recorded(record))
    found.on(e.Loaded())
    return found


def look(found: RemoteLog, end: int) -> None:
    found.on(e.Looked(10, LocalLog(0, end, end, end, (), 0, ((0, 0),)), TierConfig()))


def test_a_year_is_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one it took minutes: each copied all that were there."""
    views: list[int] = []
    put = RemoteSegments._put

    def counted(segments: RemoteSegments, bases: Any, *rest: Any) -> None:
        views.append(len(bases))
        put(segments, bases, *rest)

    monkeypatch.setattr(RemoteSegments, "_put", counted)
    found = machine(segment(i, 10 * i, 10 * i + 10) for i in range(MANY))
    look(found, 10 * MANY)
    assert sum(views) <= 2 * MANY
    assert len(found.segments) == MANY
    assert found.segments.covered_from(0) == 10 * MANY
    assert found.segments.bytes_from(5) == 100 * MANY - 50


def test_all_at_once_is_as_one_by_one() -> None:
    chance = random.Random(7)
    for _ in range(300):
        some = []
        for i in range(chance.randrange(12)):
            base = chance.randrange(30)
            some.append(segment(i, base, base + chance.randrange(1, 12)))
        at_once = machine(some)
        look(at_once, 50)
        one_by_one = machine([])
        look(one_by_one, 50)
        for each in some:
            for record in _records(each):
                one_by_one.on(e.Recorded(record))
        assert list(at_once.segments) == list(one_by_one.segments)
        again = RemoteSegments()
        again.load(at_once.segments)
        assert list(again) == list(at_once.segments)
        for offset in range(45):
            assert again.at(offset) == one_by_one.segments.at(offset)


def test_gaps() -> None:
    some = [segment(0, 5, 10), segment(1, 8, 12), segment(2, 20, 30), segment(3, 30, 31)]
    segments = RemoteSegments()
    assert list(segments.gaps()) == [] and segments.gap(3) is None
    segments.load(some)
    assert list(segments.gaps()) == [(12, 20)]
    around = {offset: segments.gap(offset) for offset in (0, 4, 5, 11, 12, 19, 20, 30, 31, 99)}
    assert around == {**dict.fromkeys(around), 12: (12, 20), 19: (12, 20)}
    assert [s.base_offset for s in segments.reaching(11, 20)] == [8]
    assert [s.base_offset for s in segments.reaching(0, 21)] == [5, 8, 20]
    assert segments.bytes_from(0) == 100 + 50 + 100 + 100


def _records(of: RemoteSegment) -> Iterable[object]:
    metadata = PartitionMetadata()
    metadata.segments[of.segment_id] = of
    return metadata.records()
