"""Kafka's spread of replicas over brokers, and what is wrong with an assignment."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.cluster import codes
from kdirect.cluster.assignment import alternate_racks, assign, assign_more, refuse_more
from kdirect.cluster.codes import Code, Outcome
from kdirect.format.error_codes import error_kind

# The examples in the comments of Kafka's AdminUtils.
FIVE = dict.fromkeys(range(5))
RACKS = {0: "rack1", 1: "rack3", 2: "rack3", 3: "rack2", 4: "rack2", 5: "rack1"}


def test_kafkas_example_without_racks() -> None:
    assert assign(FIVE, 10, 3, start=0, shift=0) == (
        (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 0), (4, 0, 1),
        (0, 2, 3), (1, 3, 4), (2, 4, 0), (3, 0, 1), (4, 1, 2),
    )  # fmt: skip


def test_kafkas_example_with_racks() -> None:
    assert alternate_racks(RACKS) == (0, 3, 1, 5, 4, 2)
    assert assign(RACKS, 7, 3, start=0, shift=0) == (
        (0, 3, 1), (3, 1, 5), (1, 5, 4), (5, 4, 2), (4, 2, 0), (2, 0, 3), (0, 4, 2),
    )  # fmt: skip


def test_racks_do_not_count_when_a_broker_has_none() -> None:
    some = {**RACKS, 5: None}
    plain = dict.fromkeys(RACKS)
    assert assign(some, 7, 3, start=0, shift=0) == assign(plain, 7, 3, start=0, shift=0)


brokers = st.dictionaries(st.integers(0, 50), st.sampled_from("abcd"), min_size=1, max_size=9)


@given(brokers, st.booleans(), st.data())
def test_every_spread_is_even(racks, aware, data) -> None:
    racks = racks if aware else dict.fromkeys(racks)
    factor = data.draw(st.integers(1, len(racks)))
    rounds = data.draw(st.integers(1, 3))
    start, shift = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    found = assign(racks, rounds * len(racks), factor, start=start, shift=shift)
    assert not isinstance(found, Outcome)
    assert found == assign(racks, rounds * len(racks), factor, start=start, shift=shift)
    assert all(len(set(replicas)) == factor for replicas in found)
    assert set(Counter(replicas[0] for replicas in found).values()) == {rounds}
    if not aware:
        assert set(Counter(b for replicas in found for b in replicas).values()) == {rounds * factor}
    else:
        for replicas in found:
            there = {racks[b] for b in replicas}
            assert len(there) == min(factor, len(set(racks.values())))


@given(brokers, st.booleans(), st.integers(1, 30), st.integers(1, 30), st.data())
def test_partitions_that_are_added_go_on_where_a_topic_ended(
    racks, aware, count, more, data
) -> None:
    racks = racks if aware else dict.fromkeys(racks)
    factor = data.draw(st.integers(1, len(racks)))
    whole = assign(racks, count + more, factor, start=0, shift=0)
    part = assign(racks, count, factor, start=0, shift=0)
    assert not isinstance(part, Outcome)
    assert not isinstance(whole, Outcome)
    added = assign_more(racks, part, count + more)
    assert not isinstance(added, Outcome)
    assert all(len(set(replicas)) == len(replicas) == factor for replicas in added)
    if not aware:  # with racks Kafka begins at the place of that broker in the order of numbers
        assert [r[0] for r in added] == [r[0] for r in whole[count:]]


@pytest.mark.parametrize(
    ("given_", "total", "code"),
    [
        (((0, 1),), 3, Code.INVALID_REPLICA_ASSIGNMENT),
        (((0, 1), (1, 2)), 3, None),
        (((0, 1), (1,)), 3, Code.INVALID_REPLICA_ASSIGNMENT),
        (((0, 1), (1, 1)), 3, Code.INVALID_REPLICA_ASSIGNMENT),
        (((0, 1), (1, 9)), 3, Code.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_given_replicas_of_more_partitions(given_, total, code) -> None:
    refusal = refuse_more(given_, [(0, 1)], total, FIVE)
    assert (refusal.code if refusal is not None else None) is code


@pytest.mark.parametrize(
    ("racks", "partitions", "factor", "code"),
    [
        (FIVE, 1, 6, Code.INVALID_REPLICATION_FACTOR),
        (FIVE, 1, 0, Code.INVALID_REPLICATION_FACTOR),
        (FIVE, 1, -1, Code.INVALID_REPLICATION_FACTOR),
        ({}, 1, 1, Code.INVALID_REPLICATION_FACTOR),
        (FIVE, 0, 1, Code.INVALID_PARTITIONS),
    ],
)
def test_what_cannot_be_spread(racks, partitions, factor, code) -> None:
    found = assign(racks, partitions, factor, start=0, shift=0)
    assert isinstance(found, Outcome)
    assert found.code is code
    assert found.message


def test_codes_are_kafkas() -> None:
    for code in codes.Code:
        assert error_kind(code).name == code.name
