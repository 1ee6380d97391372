"""How ranges that lie in objects are split among tasks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kdirect.model import TopicPartition
from kdirect_spark.cold_plan import (
    LEAST_BYTES,
    MOST_BYTES,
    TASKS,
    LocatedRange,
    split_at_objects,
    split_further,
)
from kdirect_spark.offsets import OffsetRange

TP = TopicPartition("t", 0)


class Object(NamedTuple):
    base_offset: int
    end_offset: int
    log_bytes: int = LEAST_BYTES


def objects(*ends: int, size: int = LEAST_BYTES) -> list[Object]:
    return [Object(a, b, size) for a, b in pairwise((0, *ends))]


def shown(located: list[LocatedRange]) -> list[tuple[int, int, int]]:
    """(start, stop, number of objects) of each."""
    return [(x.range.start, x.range.stop, len(x.places)) for x in located]


def test_each_object_is_a_task_and_the_rest_is_one():
    located = split_at_objects([OffsetRange(TP, 0, 100)], {TP: objects(10, 30, 60)})
    assert shown(located) == [(0, 10, 1), (10, 30, 1), (30, 60, 1), (60, 100, 0)]


def test_a_range_begins_and_ends_within_objects():
    located = split_at_objects([OffsetRange(TP, 15, 35)], {TP: objects(10, 30, 60)})
    assert shown(located) == [(15, 30, 1), (30, 35, 1)]


def test_small_objects_share_a_task():
    small = objects(10, 20, 30, 40, 50, size=LEAST_BYTES // 2)
    located = split_at_objects([OffsetRange(TP, 0, 60)], {TP: small})
    assert shown(located) == [(0, 20, 2), (20, 40, 2), (40, 50, 1), (50, 60, 0)]


def test_as_many_tasks_as_are_wanted_of_small_objects():
    """No object is divided as long as there are enough."""
    small = objects(*range(10, 301, 10), size=1000)
    for wanted, each in ((30, 1), (10, 3), (3, 10)):
        located = split_at_objects([OffsetRange(TP, 0, 300)], {TP: small}, min_partitions=wanted)
        ends = range(10 * each, 301, 10 * each)
        assert shown(located) == [(end - 10 * each, end, each) for end in ends]
    located = split_at_objects([OffsetRange(TP, 0, 300)], {TP: small}, min_partitions=200)
    assert len(split_further(located, 200, None)) >= 200


def test_a_large_query_has_larger_tasks_and_enough_of_them():
    """Full segments are a little smaller than their limit, and each pair of them is a task."""
    half = objects(*range(10, 10 * 4 * TASKS + 1, 10), size=MOST_BYTES // 2 - 100)
    located = split_at_objects([OffsetRange(TP, 0, 10 * 4 * TASKS)], {TP: half})
    assert shown(located) == [(i * 20, i * 20 + 20, 2) for i in range(2 * TASKS)]
    # An eighth of it is a task, whether it is of one topic partition or of several.
    every = [TopicPartition("t", n) for n in range(4)]
    ranges = [OffsetRange(tp, 0, 10 * TASKS) for tp in every]
    few = objects(*range(10, 10 * TASKS + 1, 10), size=LEAST_BYTES * 2)
    located = split_at_objects(ranges, dict.fromkeys(every, few))
    assert len(located) == TASKS and {len(x.places) for x in located} == {4}
    # What is not read does not count.
    located = split_at_objects([OffsetRange(TP, 5, 25)], {TP: few})
    assert shown(located) == [(5, 10, 1), (10, 20, 1), (20, 25, 1)]
    large = objects(10, 20, 30, size=8 * MOST_BYTES)
    assert len(split_at_objects([OffsetRange(TP, 0, 30)], {TP: large})) == 3


def test_what_nobody_has_located_stays_whole():
    other = TopicPartition("other", 1)
    ranges = [OffsetRange(TP, 0, 100), OffsetRange(other, 5, 9)]
    located = split_at_objects(ranges, {other: []})
    assert [x.range for x in located] == ranges and not any(x.places for x in located)
    located = split_at_objects([OffsetRange(TP, 0, 100)], {TP: [Object(50, 60)]})
    assert shown(located) == [(0, 100, 0)], "the first object does not hold the start"


@given(
    spans=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 2 * MOST_BYTES), min_size=12, max_size=12),
    tail=st.integers(0, 100),
    start=st.integers(0, 100),
    least=st.none() | st.integers(1, 40),
    most=st.none() | st.integers(1, 60),
)
def test_pieces_are_the_range_and_know_their_objects(spans, sizes, tail, start, least, most):
    ends = [sum(spans[: i + 1]) for i in range(len(spans))]
    found = [Object(e - n, e, size) for e, n, size in zip(ends, spans, sizes, strict=False)]
    stop = ends[-1] + tail
    start = min(start, stop - 1)
    held = [x for x in found if x.end_offset > start]
    located = split_further(
        split_at_objects([OffsetRange(TP, start, stop)], {TP: held}, min_partitions=least),
        least,
        most,
    )
    assert located[0].range.start == start and located[-1].range.stop == stop
    for a, b in pairwise(located):
        assert a.range.stop == b.range.start
    for piece in located:
        assert piece.range.size > 0 and (most is None or piece.range.size <= most)
        if piece.places:
            assert piece.places[0].base_offset <= piece.range.start
            assert piece.places[-1].end_offset >= piece.range.stop
            for a, b in pairwise(piece.places):
                assert a.end_offset == b.base_offset
        else:
            assert piece.range.start >= ends[-1]
    if least is not None:
        assert len(located) >= min(least, stop - start) * 0.4
