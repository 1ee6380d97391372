"""Aggregates that are kept as chains: sessions and collected lists equal the sequential reference,
in any order of pages and on any number of executors."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, StateError
from kdirect.state import AggregatePlan, Input, Session
from kdirect.state.append import needs_append
from tests.state.append_run import Cluster, run_case, update
from tests.state.family import (
    NOW_US,
    SECOND,
    WINDOWS,
    Case,
    aggregate_plans,
    cases,
    differences,
)
from tests.state.reference import Reference

FEW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large,
                           HealthCheck.filter_too_much],
)  # fmt: skip
SESSIONS = WINDOWS.filter(lambda w: isinstance(w, Session))


def check(case: Case, executors: int, seed: int, move: list[int]) -> None:
    reference = Reference(case.plan, case.partitions)
    rows, clocks = [], []
    for batch, now_us in case.batches:
        rows += reference.batch(batch, now_us)
        clocks.append(reference.closed_before)
    try:
        cluster = Cluster(case.plan, executors, seed)
    except ConfigError:
        return  # an aggregate that is refused for a type has tests of its own
    found = run_case(case, cluster, clocks, move)
    assert not differences(case.plan, found, rows)
    assert cluster.late == reference.counts["late"]


@FEW
@given(
    cases(aggregate_plans(SESSIONS)),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
    st.lists(st.sampled_from([0, 0, 1, 3]), max_size=4),
)
def test_sessions_equal_the_reference(
    case: Case, executors: int, seed: int, move: list[int]
) -> None:
    check(case, executors, seed, move)


@FEW
@given(
    cases(aggregate_plans().filter(needs_append)),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
    st.lists(st.sampled_from([0, 0, 1, 3]), max_size=4),
)
def test_lists_sets_and_strings_equal_the_reference(
    case: Case, executors: int, seed: int, move: list[int]
) -> None:
    check(case, executors, seed, move)


def counting(gap: int = 10) -> AggregatePlan:
    return AggregatePlan(
        input=Input(topic="t", schema="k int64, at int64, x float64", time="at"),
        keys=("k",),
        window=Session(gap_us=gap),
        aggregates=("count", ("sum", "x")),
    )


def records(*times: int, key: int = 1, x: float = 1.0) -> list[dict]:
    return [{"k": key, "at": t, "x": x} for t in times]


def test_nothing_is_scanned_while_no_session_can_end() -> None:
    p = counting()
    cluster = Cluster(p, 1)
    only = cluster.executors[0]
    rows = [row for k in range(20_000) for row in records(1000 + k, key=k)]
    update(only, 0, p.input, rows, NOW_US)
    table = only.tables[0]
    assert list(only.trigger(1000)) == [] and table.visited == 0
    first = [row for b in only.trigger(1021) for row in b.to_pylist()]
    assert sorted(row["k"] for row in first) == list(range(11))
    assert 0 < table.visited < 4_000
    rest = sum(b.num_rows for b in only.trigger(1 << 40))
    assert rest == 19_989
    assert only.memory.allocated == 0


def test_one_row_unites_sessions_of_several_lanes() -> None:
    p = counting()
    cluster = Cluster(p, 3)
    for at, times in enumerate([(0, 100), (20, 80), (40, 60)]):
        update(cluster.executors[at], 0, p.input, records(*times), NOW_US)
    for at, times in enumerate([(10, 90), (30, 70), (50,)]):
        update(cluster.executors[at], 0, p.input, records(*times), NOW_US)
    pages = [page for at in range(3) for page in cluster.flush(at)]
    for sender, leader, page in pages:
        cluster.executors[leader].merge(sender, page)
    found = [r for e in cluster.executors for b in e.trigger(10**6) for r in b.to_pylist()]
    assert [(r["count"], r["sum(x)"]) for r in found] == [(11, 11.0)]


def test_a_float_sum_does_not_depend_on_the_order_of_deltas() -> None:
    p = counting()
    sums = set()
    for seed in range(12):
        cluster = Cluster(p, 4)
        for at in range(4):
            rows = [r for i in range(7) for r in records(i * 9 + at, x=0.1 * 3**i / (at + 1))]
            update(cluster.executors[at], 0, p.input, rows, NOW_US)
        pages = [page for at in range(4) for page in cluster.flush(at)]
        cluster.random.seed(seed)
        cluster.random.shuffle(pages)
        for sender, leader, page in pages:
            cluster.executors[leader].merge(sender, page)
        found = [r for e in cluster.executors for b in e.trigger(10**6) for r in b.to_pylist()]
        sums.add(found[0]["sum(x)"].hex())
    assert len(sums) == 1


def test_memory_of_ended_sessions_is_used_again() -> None:
    p = counting()
    cluster = Cluster(p, 1, limit=1 << 21)
    total = 0
    for round_ in range(40):
        rows = [{"k": round_ * 2000 + k, "at": round_ * 100, "x": 1.0} for k in range(2000)]
        rows += records(round_ * 100, key=-1)
        total += len(cluster.batch({"t": {0: rows}}, NOW_US, round_ * 100 + 50))
    assert total == 40 * 2001


def test_a_sum_that_overflows_ends_with_its_name() -> None:
    p = AggregatePlan(
        input=Input(topic="t", schema="k int64, at int64, x int64", time="at"),
        keys=("k",),
        window=Session(gap_us=10),
        aggregates=(("sum", "x", "total"),),
    )
    cluster = Cluster(p, 1)
    rows = [{"k": 1, "at": 1, "x": (1 << 63) - 1}] * 2
    with pytest.raises(StateError, match="total"):
        update(cluster.executors[0], 0, p.input, rows, NOW_US)
    assert SECOND
