"""The sequential engine of the tests gives what DuckDB gives.

Both are written from the plan alone, so a mistake of one shows here before it excuses a mistake of
the engine."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from kdirect.state import AggregatePlan, Input, Session, Tumbling
from tests.state.family import (
    NOW_US,  # fmt: skip
    SECOND,
    Case,
    aggregate_plans,
    cases,
    differences,
    final,
    join_plans,
)
from tests.state.oracle import Oracle
from tests.state.reference import Reference, aggregate, sessions_of

MANY = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def agree(case: Case) -> None:
    reference = Reference(case.plan, case.partitions)
    emitted, clocks = [], []
    for rows, now_us in case.batches:
        emitted.append(reference.batch(rows, now_us))
        clocks.append(reference.closed_before)
    oracle = Oracle(case.plan, case.partitions, case.batches)
    assert [c for c in oracle.batch_closes() if c is not None] == [
        c for c in clocks if c > -(1 << 62)
    ]
    if isinstance(case.plan.window, Session) and oracle.has_rows_below_the_clock():
        return
    assert not differences(case.plan, final(case.plan, emitted), oracle.final_rows(), exact=True)


@MANY
@given(cases(aggregate_plans()))
def test_aggregates_agree_with_duckdb(case: Case) -> None:
    agree(case)


@MANY
@given(cases(join_plans()))
def test_joins_agree_with_duckdb(case: Case) -> None:
    agree(case)


def plan(window: Any, delay: int = 0) -> AggregatePlan:
    return AggregatePlan(
        input=Input(topic="t", schema="k int64, at int64, x float64", time="at", time_unit="s",
                    delay_us=delay * SECOND),
        keys=("k",),
        window=window,
        aggregates=("count", ("sum", "x")),
    )  # fmt: skip


def run(p: AggregatePlan, *batches: list[tuple]) -> list[list[tuple]]:
    reference = Reference(p, {"t": 1})
    found = []
    for rows in batches:
        given_rows = [{"k": k, "at": at, "x": 1.0} for k, at in rows]
        out = reference.batch({"t": {0: given_rows}}, NOW_US)
        found.append([(r["k"], r["window_start"] // SECOND, r["count"]) for r in out])
    return found


def test_windows_end_with_the_clock_and_late_rows_are_dropped() -> None:
    got = run(plan(Tumbling(size_us=10 * SECOND)), [(1, 1), (1, 9)], [(1, 10), (None, 3)], [(1, 4)])
    assert got == [[], [(1, 0, 2), (None, 0, 1)], []]


def test_a_session_includes_a_row_at_its_very_end_as_in_spark() -> None:
    assert sessions_of([25, 0, 10], 10) == [(0, 20), (25, 35)]
    got = run(plan(Session(gap_us=10 * SECOND)), [(1, 0), (2, 10)], [(1, 10)], [(2, 21), (1, 20)],
              [(2, 40)])  # fmt: skip
    assert got == [[], [], [(2, 10, 1)], [(1, 0, 3), (2, 21, 1)]]


def test_a_late_row_of_a_session_is_judged_by_its_own_window() -> None:
    # The session of key 1 is open until 25 when rows at 4 and 5 come; the clock is at 15.
    got = run(plan(Session(gap_us=10 * SECOND)), [(1, 6), (1, 15)], [(1, 4), (1, 5)], [(1, 40)])
    assert got == [[], [], [(1, 5, 3)]]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("max", [1.0, float("nan"), 2.0], "nan"),
        ("min", [1.0, float("nan"), None], "1.0"),
        ("stddev_samp", [3], "None"),
        ("stddev_pop", [3], "0.0"),
        ("sum", [None], "None"),
        ("count", [None, 4], "1"),
        ("avg", [Decimal("0.01"), Decimal("0.02"), Decimal("0.02")], "0.016667"),
    ],
)
def test_nulls_and_nan_as_in_spark(kind: str, values: list, expected: str) -> None:
    from kdirect.state import Aggregate

    column_type = "decimal128(12,2)" if isinstance(values[0], Decimal) else "float64"
    a = Aggregate(kind=kind, column="x")
    assert repr(aggregate(a, {"x": column_type}, [(0, {"x": v}) for v in values])).removeprefix(
        "Decimal('").removesuffix("')") == expected  # fmt: skip
