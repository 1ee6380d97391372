"""Rows whose keys or values are longer than an entry of the state: bad rows, like any others; and
rows exactly as long as they may be, which go through every kind of state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import kdirect
from kdirect.client.session import Session
from kdirect.errors import ConfigError, KdirectError
from kdirect.state import AggregatePlan, Input, JoinPlan, NoWindow, Tumbling, column, run
from kdirect.state import Session as SessionWindow
from kdirect.state.accumulators import cell_of
from kdirect.state.aggregates import KINDS, Aggregate
from kdirect.state.plan import Plan

SECOND = 1_000_000
SCHEMA = "k string, n int64, at int64, v string, w string"


@pytest.fixture
def session(broker: Any) -> Iterator[Session]:
    with kdirect.connect(broker.bootstrap_servers) as session:
        yield session


WINDOWS = {
    "tumbling": Tumbling(size_us=100 * SECOND),
    "session": SessionWindow(gap_us=SECOND),
    "none": NoWindow(),
}


def input_of(topic: str = "t", **settings: Any) -> Input:
    return Input(topic=topic, schema=SCHEMA, value_format="json", time="at", delay_us=0, **settings)


def counted(window: str, *aggregates: Any, **settings: Any) -> AggregatePlan:
    return AggregatePlan(
        input=input_of(**settings), keys=("k", "n"), window=WINDOWS[window],
        aggregates=("count", *aggregates),
    )  # fmt: skip


def joined(window: str) -> JoinPlan:
    sides = [input_of(topic) for topic in ("t", "right")]
    return JoinPlan(
        left=sides[0], right=sides[1], left_keys=("k",), right_keys=("k",), how="left",
        window=WINDOWS[window], columns=[(0, "v", "v"), (0, "w", "w")],
    )  # fmt: skip


PLANS: dict[str, Plan] = {
    **{f"count {w}": counted(w) for w in ("tumbling", "session")},
    **{f"last {w}": counted(w, ("last", "v"), ("max", "w")) for w in ("none", "session")},
    "set tumbling": counted("tumbling", ("collect_set", "v")),
    **{f"list {w}": counted(w, ("collect_list", "v")) for w in ("tumbling", "session")},
    "join session": joined("session"),
}


def write(session: Session, topic: str, rows: list[dict]) -> None:
    session.admin.create_topic(topic, 2)
    with session.producer() as producer:
        values = [json.dumps(row).encode() for row in rows]
        for partition in (0, 1):
            to = pa.array([partition] * len(values), pa.int32())
            producer.send_arrow(
                pa.record_batch({"value": pa.array(values, pa.binary()), "partition": to}), topic
            )
        producer.flush()


def rows_of(plan: Plan) -> tuple[list[dict], list[str]]:
    """Short rows, one as long as each limit allows, and one a byte longer, with its columns."""
    good = [
        {"k": f"k{i}", "n": i, "at": SECOND * (i + 1), "v": f"v{i}", "w": None} for i in range(8)
    ]
    bad, columns = [], []
    for limit in plan.row_limits(0):
        for longer in (0, 1):
            row = {"k": "k", "n": 100 + len(good), "at": 5 * SECOND, "v": "v", "w": "w"}
            each, rest = divmod(limit.most + longer, len(limit.columns))
            for name in limit.columns:
                row[name] = chr(ord("a") + len(bad)) * (each + rest)
                rest = 0
            if longer:
                bad.append(row)
                columns.append(limit.what)
            else:
                good.append(row)
    end = {"k": "end", "n": 0, "at": 1000 * SECOND, "v": "", "w": ""}
    return [*good, *bad, end], columns


@pytest.mark.parametrize("name", PLANS)
def test_rows_that_are_too_long_are_bad_rows(broker: Any, session: Session, name: str) -> None:
    plan = PLANS[name]
    rows, columns = rows_of(plan)
    write(session, "t", rows)
    if isinstance(plan, JoinPlan):
        write(session, "right", [rows[-1]])
    with run(plan, broker.bootstrap_servers, executors=2, until="latest") as job:
        found = [row for _, table in job for row in table.to_pylist()]
        counts, bad_rows = job.counts, job.bad_rows
    good = rows[: -1 - len(columns)]
    assert counts["too_long"] == 2 * len(columns)
    assert counts["late"] == 0
    first = len(good)
    assert sorted(bad_rows) == sorted(
        f"t-{partition} offset {first + i}: field {what}: more than the {limit.most} bytes that a"
        " row may have there"
        for partition in (0, 1)
        for i, (what, limit) in enumerate(zip(columns, plan.row_limits(0)))
    )
    if isinstance(plan, JoinPlan):
        assert sorted(row["v"] for row in found if row["v"]) == sorted(r["v"] for r in good * 2)
        return
    kept = [row for row in found if row["k"] != "end"]
    keys = {(row["k"], row["n"]) for row in good}
    assert {(row["k"], row["n"]) for row in kept} == keys
    assert sum(row["count"] for row in kept) == 2 * len(good)
    for number, aggregate in enumerate(
        plan.aggregates[1:], len(kept[0]) - len(plan.aggregates) + 1
    ):
        values = [list(row.values())[number] for row in kept]
        flat = {v for value in values for v in (value if isinstance(value, list) else [value])}
        longest = max(len(row[aggregate.column] or "") for row in good)
        assert max(len(v) for v in flat if v is not None) == longest


def test_failfast_names_the_row(broker: Any, session: Session) -> None:
    plan = counted("tumbling", mode="FAILFAST")
    rows, _ = rows_of(plan)
    write(session, "t", rows)
    says = r"t-[01] offset 9: field k: more than the 31\d\d\d bytes"
    with (
        pytest.raises(KdirectError, match=says),
        run(plan, broker.bootstrap_servers, executors=2, until="latest") as job,
    ):
        list(job)


def test_a_condition_comes_first(broker: Any, session: Session) -> None:
    """A row that nobody wants is not bad."""
    plan = counted("tumbling", mode="FAILFAST", where=column("v").differs("v"))
    rows, _ = rows_of(plan)
    write(session, "t", rows)
    with run(plan, broker.bootstrap_servers, executors=2, until="latest") as job:
        assert sum(row["count"] for _, table in job for row in table.to_pylist()) == 16
        assert job.counts["too_long"] == 0


def test_columns_that_are_too_wide_by_themselves_are_refused_at_once() -> None:
    wide = Input(topic="t", schema="a binary[20000], b binary[20000], s string, at int64",
                 time="at", value_format="arrow", delay_us=0)  # fmt: skip
    with pytest.raises(ConfigError, match="the key: columns of a fixed width have 40048 bytes"):
        AggregatePlan(input=wide, keys=("a", "b", "s"), window=NoWindow(), aggregates=("count",))
    for keys in (("a", "b"), ("a", "s")):
        AggregatePlan(input=wide, keys=keys, window=NoWindow(), aggregates=("count",))
    with pytest.raises(ConfigError, match="the columns that are kept: columns of a fixed width"):
        AggregatePlan(
            input=wide, keys=("at",), window=Tumbling(size_us=1),
            aggregates=(("collect_list", "a"), ("collect_list", "b")),
        )  # fmt: skip


BESIDES = tuple(
    Aggregate(kind=kind, column=column, name=f"{kind} {column} {i}")
    for i in range(10)
    for kind in ("first", "last", "stddev_samp", "avg")
    for column in ("n", "at")
)
REGISTERS = Aggregate(kind="approx_count_distinct", column="v", precision_bits=12)
SMALL_PAGES = {
    **{
        f"registers {w}": (counted(w, REGISTERS, ("last", "v")), 65536)
        for w in ("tumbling", "session")
    },
    "many cells": (counted("session", ("last", "v"), *BESIDES), 65536),
    **{f"count {w}": (counted(w), 8192) for w in ("tumbling", "session")},
    "last": (counted("none", ("last", "v"), ("max", "w")), 8192),
    "list": (counted("tumbling", ("collect_list", "v")), 8192),
    "join": (joined("session"), 8192),
}


@pytest.mark.parametrize("name", SMALL_PAGES)
def test_rows_are_no_longer_than_a_page_and_the_other_states_leave_room_for(
    broker: Any, session: Session, name: str
) -> None:
    """Such a job ended with an error where the key was another executor's."""
    plan, page_bytes = SMALL_PAGES[name]
    good, bad = [], []
    for letter in "abcdefgh":
        row = {"k": "k", "n": 1, "at": 5 * SECOND, "v": "v", "w": "w"}
        for limit in plan.row_limits(0, page_bytes):
            each, rest = divmod(limit.most, len(limit.columns))
            for column_name in limit.columns:
                row[column_name] = letter * (each + rest)
                rest = 0
        good.append(row)
        bad.append({**row, "k": row["k"] + letter})
    end = {"k": "end", "n": 0, "at": 1000 * SECOND, "v": "", "w": ""}
    write(session, "t", [*good, *bad, end])
    if isinstance(plan, JoinPlan):
        write(session, "right", [end])
    settings = {"executors": 2, "until": "latest", "slot_bytes": page_bytes}
    with run(plan, broker.bootstrap_servers, **settings) as job:
        found = [row for _, table in job for row in table.to_pylist()]
        assert job.counts["too_long"] == 2 * len(bad)
    if not isinstance(plan, JoinPlan):
        assert {row["k"] for row in found} - {"end"} == {row["k"] for row in good}
    else:
        assert sorted(row["v"] for row in found if row["v"]) == sorted(r["v"] for r in good * 2)


def test_no_state_of_an_aggregate_is_larger_than_the_limits_reckon_with() -> None:
    """With every kind of cell over every type that it takes."""
    seen = set()
    for kind in KINDS:
        for type_ in ("int64", "uint64", "float64", "decimal128(38,10)", "bool", "date32"):
            kinds = {"c": type_}
            aggregate = Aggregate(kind=kind, column="c")
            try:
                aggregate.result_type(kinds)
            except ConfigError:
                continue
            if aggregate.kept_as(kinds) == "cell":
                cell = cell_of(aggregate, type_)
                assert len(cell.initial) <= aggregate.most_state_bytes
                seen.add(cell.kernel)
    assert len(seen) > 10


def test_a_page_of_64_kib_takes_the_longest_key_and_value() -> None:
    for plan in PLANS.values():
        assert plan.row_limits(0, 65536) == plan.row_limits(0)
