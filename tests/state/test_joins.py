"""Windowed joins equal the sequential reference, in any order of pages and on any number of
executors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdirect.state import Input, JoinPlan, Session, Tumbling
from tests.state.append_run import Cluster, run_case
from tests.state.family import NOW_US, SECOND, Case, cases, differences, join_plans
from tests.state.family import plain as family_plain
from tests.state.reference import Reference

MANY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def expected(case: Case) -> tuple[list, list[int], int]:
    reference = Reference(case.plan, case.partitions)
    rows, clocks = [], []
    for batch, now_us in case.batches:
        rows += reference.batch(batch, now_us)
        clocks.append(reference.closed_before)
    return rows, clocks, reference.counts["late"]


@MANY
@given(
    cases(join_plans()),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
    st.lists(st.sampled_from([0, 0, 1, 3]), max_size=4),
)
def test_joins_equal_the_reference(case: Case, executors: int, seed: int, move: list[int]) -> None:
    rows, clocks, late = expected(case)
    cluster = Cluster(case.plan, executors, seed)
    found = run_case(case, cluster, clocks, move)
    assert not differences(case.plan, found, rows)
    assert cluster.late == late


def plan(window: Any, how: str = "inner") -> JoinPlan:
    return JoinPlan(
        left=Input(topic="l", schema="k int64, t int64, a string", time="t"),
        right=Input(topic="r", schema="k2 int64, t2 int64, b string", time="t2"),
        left_keys=("k",),
        right_keys=("k2",),
        window=window,
        how=how,
        columns=((0, "k", "k"), (0, "a", "a"), (1, "b", "b")),
    )


def test_a_hot_key_comes_out_in_bounded_blocks() -> None:
    p = plan(Tumbling(size_us=SECOND))
    cluster = Cluster(p, 1)
    only = cluster.executors[0]
    for side, source in enumerate(p.inputs):
        names = [f.name for f in source.schema]
        records = [dict(zip(names, (7, i, f"{side}.{i}"))) for i in range(700)]
        from tests.state.append_run import update

        update(only, side, source, records, NOW_US)
    blocks = list(only.trigger(SECOND))
    assert sum(b.num_rows for b in blocks) == 490_000
    assert max(b.num_rows for b in blocks) <= 1 << 16
    pairs = {(r["a"], r["b"]) for b in blocks for r in b.to_pylist()}
    assert len(pairs) == 490_000
    assert only.memory.allocated == 0


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_a_null_in_a_key_equals_nothing(how: str) -> None:
    p = plan(Session(gap_us=SECOND), how)
    cluster = Cluster(p, 2)
    left = [{"k": None, "t": 5, "a": "x"}, {"k": 1, "t": 5, "a": "y"}]
    right = [{"k2": None, "t2": 5, "b": "z"}, {"k2": 1, "t2": 6, "b": None}]
    found = cluster.batch({"l": {0: left}, "r": {0: right}}, NOW_US, 3 * SECOND)
    rows = {(r["k"], r["a"], r["b"]) for r in found}
    left_alone, right_alone = (None, "x", None), (None, None, "z")
    alone = {"inner": set(), "left": {left_alone}, "right": {right_alone},
             "full": {left_alone, right_alone}}[how]  # fmt: skip
    assert rows == {(1, "y", None)} | alone


@pytest.mark.parametrize("given", ["outer", "full_outer", "fullouter"])
def test_a_full_join_has_the_names_of_spark(given: str) -> None:
    assert plan(Tumbling(size_us=SECOND), given).hash == plan(Tumbling(size_us=SECOND), "full").hash


def test_sessions_of_rows_that_match_nothing_do_not_reach_over_both_sides() -> None:
    """Rows with a null key of both sides lie within one gap, and are sessions of their own."""
    p = plan(Session(gap_us=10), "full")
    cluster = Cluster(p, 2)
    left = [{"k": None, "t": t, "a": "l"} for t in (0, 20)]
    right = [{"k2": None, "t2": t, "b": "r"} for t in (10, 30)]
    found = cluster.batch({"l": {0: left}, "r": {0: right}}, NOW_US, 1000)
    starts = sorted(family_plain(r["window_start"]) for r in found)
    assert starts == [0, 10, 20, 30]
