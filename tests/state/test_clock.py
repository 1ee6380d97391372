"""Vector clocks: a join-semilattice, whose least entry never falls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import FormatError
from kdirect.state.batches import Partition
from kdirect.state.clock import VectorClock, pack, unpack
from kdirect.state.windows import TIME_MAX, TIME_MIN

PARTITIONS = [Partition("a", 0), Partition("a", 1), Partition("b", 0)]
times = st.just(TIME_MIN) | st.integers(-100, 100) | st.integers(TIME_MIN, TIME_MAX)
clocks = st.fixed_dictionaries(dict.fromkeys(PARTITIONS, times)).map(VectorClock)


@given(clocks, clocks, clocks)
def test_merging_is_a_join(a: VectorClock, b: VectorClock, c: VectorClock) -> None:
    assert a.merged(a.entries) == a
    assert a.merged(b.entries) == b.merged(a.entries)
    assert a.merged(b.entries).merged(c.entries) == a.merged(b.merged(c.entries).entries)
    assert all(a.merged(b.entries).entries[tp] >= a.entries[tp] for tp in PARTITIONS)


@given(clocks, st.sampled_from(PARTITIONS), st.none() | st.integers(-200, 200), st.integers(0, 50))
def test_an_entry_never_falls(
    clock: VectorClock, tp: Partition, time: int | None, delay: int
) -> None:
    after = clock.seen(tp, time, delay)
    wanted = clock.entries[tp] if time is None else max(clock.entries[tp], time - delay)
    assert after.entries == {**clock.entries, tp: wanted}


@given(clocks, st.sets(st.sampled_from(PARTITIONS)), times)
def test_the_slowest_that_is_not_idle_closes(clock: VectorClock, idle: set, before: int) -> None:
    closes = clock.closes(frozenset(idle), before)
    assert closes >= before
    for tp in set(PARTITIONS) - idle:
        assert closes == before or closes <= clock.entries[tp]
    if len(idle) == len(PARTITIONS):
        assert closes == max(before, *clock.entries.values())


@given(clocks, clocks, st.sets(st.sampled_from(PARTITIONS)))
def test_closing_is_monotone(a: VectorClock, b: VectorClock, idle: set) -> None:
    first = a.closes(frozenset(), TIME_MIN)
    later = a.merged(b.entries).closes(frozenset(idle), first)
    assert later >= first
    if not idle:
        assert later == max(first, min(a.merged(b.entries).entries.values()))


@given(clocks)
def test_clocks_travel(clock: VectorClock) -> None:
    data = pack(clock)
    assert unpack(data, reversed(PARTITIONS), "executor 1") == clock
    for wrong in (data[:-1], data + b"\0" * 8, b""):
        with pytest.raises(FormatError, match="executor 1: a clock of"):
            unpack(wrong, PARTITIONS, "executor 1")


def test_a_reader_tells_of_its_own_partitions() -> None:
    clock = VectorClock(dict.fromkeys(PARTITIONS, 5))
    assert clock.only(PARTITIONS[:1]).entries == {PARTITIONS[0]: 5}
