"""Planning: worked examples, and laws that hold for any offsets."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import ConfigError, DataLossError, UnknownTopicError
from kdirect.model import TopicPartition
from kdirect_spark.offsets import (
    Assign,
    AtOffsets,
    AtTimes,
    Earliest,
    Latest,
    OffsetRange,
    Phase,
    Plan,
    QueryStart,
    Subscribe,
    SubscribePattern,
    from_json,
    new_records,
    plan_batch,
    plan_stream,
    rate_limit,
    resolve_limit,
    split,
    to_json,
)

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
names = st.sampled_from(["a", "b", "c-1", "T.x"])
partitions = st.builds(TopicPartition, names, st.integers(0, 20))
numbers = st.integers(0, 10**6)
offsets = st.dictionaries(partitions, numbers, max_size=12)
# For each partition: log start <= start <= end <= high watermark, a query in good health.
healthy = st.dictionaries(
    partitions, st.lists(numbers, min_size=4, max_size=4).map(sorted), max_size=12
)


@given(offsets)
def test_json_round_trip_and_equal_offsets_are_equal_text(given_offsets):
    text = json.dumps(to_json(given_offsets))
    assert from_json(text, "x") == given_offsets
    backwards = dict(sorted(given_offsets.items(), reverse=True))
    assert json.dumps(to_json(backwards)) == text
    assert json.dumps(to_json(from_json(text, "x"))) == text


def test_json_is_that_of_sparks_kafka_connector():
    assert (
        json.dumps(to_json({B0: 3, TopicPartition("a", 10): 1, TopicPartition("a", 2): 2}))
        == '{"a": {"2": 2, "10": 1}, "b": {"0": 3}}'
    )


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.text(max_size=40) | any_json.map(json.dumps))
def test_any_text_is_offsets_or_a_config_error(text):
    try:
        out = from_json(text, "startingOffsets", low=-2)
    except ConfigError as e:
        assert "startingOffsets" in str(e)
    else:
        assert all(isinstance(tp, TopicPartition) and n >= -2 for tp, n in out.items())


def test_subscriptions_resolve_among_existing_topics():
    topics = {"a": 2, "ab": 1, "b": 1}
    assert Subscribe(("a",)).resolve(topics) == (A0, A1)
    assert SubscribePattern("a.*").resolve(topics) == (A0, A1, TopicPartition("ab", 0))
    assert SubscribePattern("a").resolve(topics) == (A0, A1), "the whole name must match"
    assert SubscribePattern("z.*").resolve(topics) == ()
    assert Assign((A1, B0)).resolve(topics) == (A1, B0)


def test_missing_topics_are_named():
    with pytest.raises(
        UnknownTopicError, match=r"subscribe: the broker has no topic y, z; create it first"
    ):
        Subscribe(("a", "y", "z")).resolve({"a": 1})
    with pytest.raises(UnknownTopicError, match=r"assign: the broker has no partition a-1"):
        Assign((A0, A1)).resolve({"a": 1})
    assert Subscribe(("a", "y")).resolve({"a": 1}, must_exist=False) == (A0,)
    assert Assign((A0, A1)).resolve({"a": 1}, must_exist=False) == (A0,)


WATERMARKS = {A0: (10, 100), A1: (0, 5)}


def test_limits():
    assert resolve_limit(Earliest(), "x", [A0, A1], WATERMARKS) == {A0: 10, A1: 0}
    assert resolve_limit(Latest(), "x", [A0, A1], WATERMARKS) == {A0: 100, A1: 5}
    assert resolve_limit(AtOffsets(((A0, -2), (A1, 3))), "x", [A0, A1], WATERMARKS) == {
        A0: 10,
        A1: 3,
    }
    assert resolve_limit(AtOffsets(((A0, -1), (A1, -1))), "x", [A0, A1], WATERMARKS) == {
        A0: 100,
        A1: 5,
    }
    assert resolve_limit(AtTimes(everywhere=7), "x", [A0, A1], WATERMARKS, {A0: 50, A1: None}) == {
        A0: 50,
        A1: 5,
    }


def test_limits_must_cover_exactly_what_is_read():
    with pytest.raises(
        ConfigError,
        match=r"startingOffsets must name exactly .* it lacks a-1; use -1 for the latest",
    ):
        resolve_limit(AtOffsets(((A0, 1),)), "startingOffsets", [A0, A1], WATERMARKS)
    with pytest.raises(ConfigError, match=r"names the unknown b-0"):
        resolve_limit(
            AtOffsets(((A0, 1), (A1, 1), (B0, 1))), "startingOffsets", [A0, A1], WATERMARKS
        )
    with pytest.raises(
        ConfigError, match=r"a-1 has no record at 7 ms or later.*startingOffsetsByTimestampStrategy"
    ):
        resolve_limit(
            AtTimes(everywhere=7, strict=True),
            "startingTimestamp",
            [A0, A1],
            WATERMARKS,
            {A0: 50, A1: None},
        )


def test_a_stream_plan_reads_new_partitions_from_the_earliest():
    plan = plan_stream({A0: 20}, {A0: 30, A1: 5}, WATERMARKS)
    assert plan == Plan((OffsetRange(A0, 20, 30), OffsetRange(A1, 0, 5)))
    assert plan_stream({A0: 20}, {A0: 20}, WATERMARKS) == Plan(())


@pytest.mark.parametrize(
    ("start", "end", "ranges", "words"),
    [
        (
            {A0: 5},
            {A0: 30},
            [OffsetRange(A0, 10, 30)],
            "a-0 no longer has offsets 5 to 10: its first record is 10",
        ),
        ({A0: 2}, {A0: 7}, [], "a-0 no longer has offsets 2 to 7: its first record is 10"),
        (
            {A0: 20, B0: 3},
            {A0: 30},
            [OffsetRange(A0, 20, 30)],
            "b-0 is gone; it was read up to offset 3",
        ),
        (
            {A0: 20, B0: 3},
            {A0: 30, B0: 9},
            [OffsetRange(A0, 20, 30)],
            "b-0 is gone; offsets 3 to 9 were still to be read",
        ),
        (
            {A1: 50},
            {A1: 5},
            [OffsetRange(A1, 0, 5)],
            "a-1 went back from offset 50 to 5: it was deleted and created again",
        ),
        ({A1: 1}, {A1: 50}, [OffsetRange(A1, 1, 5)], "a-1 ends at offset 5, before offset 50"),
        (
            {A1: 0},
            {A1: 5, A0: 30},
            [OffsetRange(A0, 10, 30), OffsetRange(A1, 0, 5)],
            "new partition a-0 starts at offset 10 instead of 0",
        ),
    ],
)
def test_losses_are_found_named_and_left_out(start, end, ranges, words):
    plan = plan_stream(start, end, WATERMARKS)
    assert list(plan.ranges) == ranges
    assert len(plan.losses) == 1 and words in plan.losses[0]
    with pytest.raises(DataLossError) as e:
        plan.check(True, pytest.fail)
    assert words in str(e.value) and "failOnDataLoss" in str(e.value)
    said = []
    assert plan.check(False, said.append) is plan
    assert len(said) == 1 and words in said[0]


def test_a_topic_known_to_be_created_again_is_read_from_its_start():
    plan = plan_stream({A0: 50, A1: 2}, {A0: 60, A1: 5}, WATERMARKS, {"a"})
    assert plan.ranges == (OffsetRange(A0, 10, 60), OffsetRange(A1, 0, 5))
    assert (
        len(plan.losses) == 2
        and "a-0 was deleted and created again; it was read up to offset 50" in plan.losses[0]
    )


def test_a_log_that_was_cut_back_is_not_read_again():
    """It is known to be the same topic, so all below its end was read."""
    plan = plan_stream({A1: 50}, {A1: 5}, WATERMARKS, kept={"a"})
    assert plan.ranges == ()
    assert "a-1 went back from offset 50 to 5: its log was cut back" in plan.losses[0]
    plan = plan_stream({A1: 50}, {A1: 5}, WATERMARKS, kept={"a"}, is_start=True)
    assert plan.ranges == () and "the starting offset lies beyond its end" in plan.losses[0]


def test_nothing_left_to_read_is_no_loss():
    assert plan_stream({A0: 5}, {A0: 5}, WATERMARKS) == Plan(()), (
        "records before the log start that nobody waits for"
    )
    assert plan_stream({B0: 5}, {B0: 5}, WATERMARKS) == Plan(()), (
        "a partition that is gone, read to its end"
    )


def test_a_batch_plan():
    assert plan_batch({A0: 10, A1: 0}, {A0: 100, A1: 0}, WATERMARKS) == Plan(
        (OffsetRange(A0, 10, 100),)
    )
    assert plan_batch({A0: 90}, {A0: 90}, WATERMARKS) == Plan(()), "a start at its end is empty"
    with pytest.raises(ConfigError) as caught:
        plan_batch({A0: 90}, {A0: 20}, WATERMARKS, ("startingTimestamp", "endingOffsets"))
    for words in ("a-0", "offset 90 by startingTimestamp", "offset 20 by endingOffsets"):
        assert words in str(caught.value)
    assert "a-1 ends at offset 5" in plan_batch({A1: 0}, {A1: 9}, WATERMARKS).losses[0]


@given(healthy)
def test_a_healthy_stream_is_planned_exactly(state):
    start, end = {tp: n[1] for tp, n in state.items()}, {tp: n[2] for tp, n in state.items()}
    plan = plan_stream(start, end, {tp: (n[0], n[3]) for tp, n in state.items()})
    assert plan.losses == ()
    assert {r.topic_partition: (r.start, r.stop) for r in plan.ranges} == {
        tp: (n[1], n[2]) for tp, n in state.items() if n[1] < n[2]
    }


@given(
    offsets,
    offsets,
    st.dictionaries(
        partitions, st.tuples(numbers, numbers).map(lambda p: (min(p), max(p))), max_size=12
    ),
)
def test_a_plan_never_leaves_the_log_whatever_the_offsets(start, end, watermarks):
    plan = plan_stream(start, end, watermarks)
    seen = [r.topic_partition for r in plan.ranges]
    assert len(seen) == len(set(seen))
    for r in plan.ranges:
        earliest, latest = watermarks[r.topic_partition]
        assert earliest <= r.start < r.stop <= min(latest, end[r.topic_partition])
        if r.topic_partition in start and start[r.topic_partition] <= end[r.topic_partition]:
            assert r.start >= start[r.topic_partition], "no record is read twice"


@given(healthy, st.integers(1, 10**6))
def test_the_rate_limit_holds_starves_nobody_and_arrives(state, limit):
    start, end = {tp: n[1] for tp, n in state.items()}, {tp: n[2] for tp, n in state.items()}
    out = rate_limit(limit, start, end, {})
    waiting = new_records(start, end, {})
    taken = {tp: out[tp] - start[tp] for tp in out}
    assert out.keys() == end.keys()
    for tp in end:
        assert start[tp] <= out[tp] <= end[tp]
        assert (taken[tp] > 0) == (tp in waiting), "each partition with records gets on"
    assert sum(taken.values()) <= max(limit, 0) + len(waiting)
    if limit >= sum(waiting.values()):
        assert out == end


def test_the_rate_limit_is_pro_rata_and_counts_new_partitions_from_their_earliest():
    assert rate_limit(10, {A0: 0, A1: 0}, {A0: 75, A1: 25}, {}) == {A0: 7, A1: 2}
    assert rate_limit(10, {A0: 0}, {A0: 50, A1: 1050}, {A1: 1000}) == {A0: 5, A1: 1005}
    assert rate_limit(1, {A0: 0, A1: 0}, {A0: 999, A1: 1}, {}) == {A0: 1, A1: 1}


ranges = st.dictionaries(partitions, st.tuples(numbers, st.integers(0, 10**5)), max_size=10).map(
    lambda d: [OffsetRange(tp, a, a + n) for tp, (a, n) in d.items()]
)


@given(ranges, st.none() | st.integers(1, 50), st.none() | st.integers(5000, 10**5))
def test_a_split_covers_each_offset_once(given_ranges, min_partitions, max_records):
    out = split(given_ranges, min_partitions, max_records)
    whole = {r.topic_partition: (r.start, r.stop) for r in given_ranges if r.size}
    for tp, (start, stop) in whole.items():
        pieces = [r for r in out if r.topic_partition == tp]
        assert pieces[0].start == start and pieces[-1].stop == stop
        assert all(a.stop == b.start for a, b in pairwise(pieces))
    assert all(r.size > 0 and r.topic_partition in whole for r in out)
    if max_records:
        assert all(r.size <= max_records for r in out)
    if min_partitions is None and max_records is None:
        assert out == [r for r in given_ranges if r.size]


def test_splits_as_sparks_kafka_connector():
    big, small = OffsetRange(A0, 0, 10000), OffsetRange(A1, 0, 100)
    assert split([big, small], 3, None) == [
        OffsetRange(A0, 0, 5000),
        OffsetRange(A0, 5000, 10000),
        small,
    ]
    assert split([big, small], 2, None) == [big, small]
    assert split([OffsetRange(A0, 0, 10)], None, 4) == [
        OffsetRange(A0, 0, 3),
        OffsetRange(A0, 3, 6),
        OffsetRange(A0, 6, 10),
    ]
    assert split([OffsetRange(A0, 5, 7)], 10, None) == [
        OffsetRange(A0, 5, 6),
        OffsetRange(A0, 6, 7),
    ]


# -- where a stream starts -------------------------------------------------------------------------


def test_only_the_first_micro_batch_of_a_moving_start_is_empty() -> None:
    start = QueryStart(moving=True)
    start.resolve({A0: 5})
    assert start.phase is Phase.STARTING
    assert start.begin({A0: 5})
    assert start.phase is Phase.RUNNING
    assert not start.begin({A0: 5}) and not start.repeats_first({A0: 5})


def test_no_micro_batch_of_a_fixed_start_or_a_restarted_query_is_empty() -> None:
    fixed = QueryStart(moving=False)
    fixed.resolve({A0: 5})
    assert not fixed.begin({A0: 5})
    restarted = QueryStart(moving=True)
    assert not restarted.begin({A0: 7})
    restarted.resolve({A0: 9})  # asked late: the checkpoint has a start already
    assert restarted.phase is Phase.RUNNING and not restarted.repeats_first({A0: 9})


def test_a_first_micro_batch_that_runs_again_was_empty_if_its_end_is_not_above_the_start() -> None:
    start = QueryStart(moving=True)
    start.resolve({A0: 9, A1: 3})
    assert start.repeats_first({A0: 9, A1: 3}) and not start.repeats_first({A0: 8, A1: 3})
    assert start.was_empty({A0: 5, A1: 3}) and start.was_empty({A0: 5})
    assert not start.was_empty({A0: 10, A1: 3})
    fixed = QueryStart(moving=False)
    fixed.resolve({A0: 9})
    assert not fixed.was_empty({A0: 5})
