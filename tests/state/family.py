"""Plans and inputs that Hypothesis makes, and how two results are compared.

The values are chosen so that the tests can tell an error from rounding.  Half of the floats are
multiples of a quarter, whose sums are exact in any order; the others are sevenths, whose sums are
not, and of a size at which rounding stays far below what `differences` allows.  Keys are few and
times narrow, so that groups, sessions and joins meet; nulls are everywhere a column may have one.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kdirect.state import (
    Aggregate,
    AggregatePlan,
    Field,
    Input,
    JoinPlan,
    NoWindow,
    Session,
    Sliding,
    Tumbling,
    column,
)
from kdirect.state import schema as types
from kdirect.state.aggregates import KINDS
from tests.state.reference import Batch, Row

SECOND = 1_000_000
NOW_US = 1_000 * SECOND

KEY_TYPES = ("int64", "int32", "uint16", "string", "binary", "bool", "date32", "timestamp(us)",
             "decimal128(12,2)", "binary[3]")  # fmt: skip
VALUE_TYPES = ("int64", "int32", "float64", "float32", "decimal128(12,2)", "uint8", "int16")
ANY_TYPES = (*VALUE_TYPES, "string", "binary", "binary[3]", "bool", "date32")

QUARTERS = st.integers(-400, 400).map(lambda n: n / 4)
SEVENTHS = st.integers(-4000, 4000).map(lambda n: n / 7)

# A value of each type; small ranges, so that keys repeat.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int64": st.sampled_from([-(1 << 40), -2, -1, 0, 1, 2, 3, 1 << 40]),
    "int32": st.integers(-3, 3),
    "int16": st.integers(-3, 3),
    "uint16": st.integers(0, 4),
    "uint8": st.sampled_from([0, 1, 2, 255]),
    "string": st.sampled_from(["", "a", "b", "é" * 3, "eight by", "longer than eight bytes"]),
    "binary": st.sampled_from([b"", b"\0", b"\0\0", b"a", b"12345678", b"123456789"]),
    "binary[3]": st.sampled_from([b"\0\0\0", b"abc", b"abd"]),
    "bool": st.booleans(),
    "date32": st.integers(-2, 2).map(lambda d: datetime.date(1970, 1, 1) + datetime.timedelta(d)),
    "timestamp(us)": st.integers(0, 4),
    "float64": st.one_of(QUARTERS, SEVENTHS),
    "float32": st.one_of(QUARTERS, SEVENTHS.map(lambda x: float(np.float32(x)))),
    "decimal128(12,2)": st.integers(-300, 300).map(lambda n: Decimal(n).scaleb(-2)),
}

WINDOWS = st.one_of(
    st.just(NoWindow()),
    st.builds(
        lambda size, origin: Tumbling(size_us=size * SECOND, origin_us=origin * SECOND),
        st.integers(1, 20),
        st.integers(0, 5),
    ),
    st.builds(
        lambda size, slide, origin: Sliding(
            size_us=max(size, slide) * SECOND,
            slide_us=min(size, slide) * SECOND,
            origin_us=origin * SECOND,
        ),
        st.integers(1, 20),
        st.integers(1, 20),
        st.integers(0, 5),
    ),
    st.builds(lambda gap: Session(gap_us=gap * SECOND), st.integers(1, 12)),
)
JOIN_WINDOWS = WINDOWS.filter(lambda w: isinstance(w, Tumbling | Session))


def nullable(kind: str) -> st.SearchStrategy[Any]:
    value = VALUES[kind]
    return st.one_of(value, value, value, st.none())


@dataclass(frozen=True)
class Case:
    """A plan, the number of partitions of each input, and batches with their wall clocks."""

    plan: Any
    partitions: dict[str, int]
    batches: list[tuple[Batch, int]]


@st.composite
def inputs(draw: Any, name: str, keys: list[tuple[str, str]], prefix: str) -> Input:
    """An input whose schema has these keys, an event time and up to three value columns."""
    kinds = draw(st.lists(st.sampled_from(ANY_TYPES), min_size=1, max_size=3))
    timed = draw(st.sampled_from(["int64", "timestamp(us)"]))
    schema = [*keys, (f"{prefix}time", timed)]
    schema += [(f"{prefix}v{i}", kind) for i, kind in enumerate(kinds)]
    schema.append((f"{prefix}flag", "int32"))
    where = draw(
        st.sampled_from(
            [
                None,
                column(f"{prefix}flag") > 0,
                ~column(f"{prefix}flag").equals(1),
                column(f"{prefix}flag").is_null() | (column(f"{prefix}flag") + 1 <= 2),
            ]
        )
    )
    unit = draw(st.sampled_from(["us", "ms", "s"])) if timed == "int64" else "us"
    return Input(
        topic=f"topic-{name}",
        name=name,
        schema=tuple(Field(name=n, type=t) for n, t in schema),
        time=f"{prefix}time",
        time_unit=unit,
        where=where,
        delay_us=draw(st.integers(0, 10)) * SECOND,
    )


def fits(kind: str, column_type: str) -> bool:
    """Whether an aggregate of this kind takes a column of this type."""
    return KINDS[kind].takes != "numbers" or types.is_number(column_type)


AGGREGATE_KINDS = ("count", "sum", "min", "max", "avg", "stddev_samp", "stddev_pop", "var_samp",
                   "var_pop", "first", "last", "approx_count_distinct", "collect_list",
                   "collect_set")  # fmt: skip


@st.composite
def aggregate_plans(draw: Any, windows: st.SearchStrategy[Any] = WINDOWS) -> AggregatePlan:
    keys = [
        (f"k{i}", kind)
        for i, kind in enumerate(draw(st.lists(st.sampled_from(KEY_TYPES), max_size=3)))
    ]
    source = draw(inputs("events", keys, ""))
    window = draw(windows)
    choices = [("count", None)] + [
        (kind, f.name)
        for kind in AGGREGATE_KINDS
        for f in source.schema
        if f.name.startswith("v") and fits(kind, f.type)
        and not (isinstance(window, NoWindow) and kind == "collect_list")
    ]  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(choices), min_size=1, max_size=4, unique=True))
    return AggregatePlan(
        input=source,
        keys=tuple(name for name, _ in keys),
        window=window,
        aggregates=tuple(
            Aggregate(kind=kind, column=of, name=f"a{i}") for i, (kind, of) in enumerate(chosen)
        ),
    )


@st.composite
def join_plans(draw: Any, windows: st.SearchStrategy[Any] = JOIN_WINDOWS) -> JoinPlan:
    kinds = draw(st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=2))
    left = draw(inputs("left", [(f"lk{i}", k) for i, k in enumerate(kinds)], "l"))
    right = draw(inputs("right", [(f"rk{i}", k) for i, k in enumerate(kinds)], "r"))
    every = [(0, f.name, f.name) for f in left.schema] + [(1, f.name, f.name) for f in right.schema]
    return JoinPlan(
        left=left,
        right=right,
        left_keys=tuple(f"lk{i}" for i in range(len(kinds))),
        right_keys=tuple(f"rk{i}" for i in range(len(kinds))),
        window=draw(windows),
        how=draw(st.sampled_from(["inner", "left", "right", "full"])),
        columns=tuple(draw(st.lists(st.sampled_from(every), min_size=1, unique=True))),
    )


@st.composite
def rows_of(draw: Any, source: Input, base: int, most: int) -> list[Row]:
    """Rows of one partition in one batch: about the time `base` (seconds), out of order, some of
    them late, some of them with an event time that may not be."""
    found = []
    unit = types_unit(source)
    bad = st.sampled_from([None, -1, (NOW_US + source.max_ahead_us) // unit + 1])
    times = st.one_of(
        *[st.integers(max(0, base - 4), base + 12)] * 8, st.integers(0, base + 12)
    ).map(lambda s: s * SECOND // unit)
    for _ in range(draw(st.integers(0, most))):
        row: Row = {}
        for f in source.schema:
            if f.name == source.time:
                row[f.name] = draw(bad) if draw(st.integers(0, 20)) == 20 else draw(times)
            else:
                row[f.name] = draw(nullable(f.type))
        found.append(row)
    return found


def types_unit(source: Input) -> int:
    """Microseconds in one unit of the event time."""
    return {"s": SECOND, "ms": 1000, "us": 1}[source.time_unit]


@st.composite
def cases(draw: Any, plans: st.SearchStrategy[Any], most: int = 12) -> Case:
    """A plan and what it runs over: one to four batches of one or two partitions an input."""
    plan = draw(plans)
    partitions = {source.name: draw(st.integers(1, 2)) for source in plan.inputs}
    batches = []
    for number in range(draw(st.integers(1, 4))):
        batch: Batch = {
            source.name: {
                p: draw(rows_of(source, 10 * number, most)) for p in range(partitions[source.name])
            }
            for source in plan.inputs
        }
        batches.append((batch, NOW_US))
    return Case(plan, partitions, batches)


# -- comparing -------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value of a result in one form: times and dates as integers, lists sorted."""
    if isinstance(value, datetime.datetime):
        whole = value.replace(tzinfo=datetime.timezone.utc)
        since = whole - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
        return since // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.date):
        return (value - datetime.date(1970, 1, 1)).days
    if isinstance(value, list):
        return sorted((plain(v) for v in value), key=_rank)
    return value


def _rank(value: Any) -> tuple:
    """An order over values of mixed types and nulls."""
    if value is None:
        return (0,)
    if isinstance(value, list | tuple):
        return (3, [_rank(v) for v in value])
    if isinstance(value, float) and math.isnan(value):
        return (2, "", 0)
    if isinstance(value, int | float | Decimal):
        return (1, "", value)
    return (1, type(value).__name__, value)


def _near(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_near, a, b))
    if isinstance(a, float) or isinstance(b, float):
        if a is None or b is None:
            return a is b
        a, b = float(a), float(b)
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    return a == b and (a is None) == (b is None)


def approximate_names(plan: Any) -> set[str]:
    """Names of the columns of a result that are estimates."""
    if isinstance(plan, JoinPlan):
        return set()
    return {a.name for a in plan.aggregates if a.kind == "approx_count_distinct"}


def differences(
    plan: Any, found: list[Row], expected: list[Row], *, exact: bool = False
) -> list[str]:
    """What differs between two results, as multisets of rows; nothing if they are equal.

    Floats are equal within 1e-9 of their size.  An approximate count may be off by a quarter and
    two, unless `exact`."""
    estimates = set() if exact else approximate_names(plan)
    loose = {
        a.name
        for a in getattr(plan, "aggregates", ())
        if a.kind in ("avg", "stddev_samp", "stddev_pop", "var_samp", "var_pop", "sum")
    } | estimates
    names = [f.name for f in plan.output]
    for rows in (found, expected):
        for row in rows:
            if list(row) != names:
                return [f"columns {list(row)} instead of {names}"]

    def order(row: Row) -> tuple:
        # Columns that may differ a little come last, so that they cannot change the order.
        return tuple(_rank(row[n]) for n in sorted(names, key=lambda n: (n in loose, n)))

    a, b = (
        sorted(({n: plain(v) for n, v in r.items()} for r in rows), key=order)
        for rows in (found, expected)
    )
    if len(a) != len(b):
        keyed = [Counter(repr(sorted(r.items())) for r in rows) for rows in (a, b)]
        return [f"{len(a)} rows instead of {len(b)}", f"only found: {keyed[0] - keyed[1]}",
                f"only expected: {keyed[1] - keyed[0]}"]  # fmt: skip
    return [
        f"{n}: {x[n]!r} instead of {y[n]!r} in {y}"
        for x, y in zip(a, b, strict=True)
        for n in names
        if not (abs(x[n] - y[n]) <= 2 + y[n] / 4 if n in estimates else _near(x[n], y[n]))
    ]


def final(plan: Any, batches: list[list[Row]]) -> list[Row]:
    """What is left after all batches: all rows, or, without a window, the last of each key."""
    if not isinstance(plan, AggregatePlan) or not isinstance(plan.window, NoWindow):
        return [row for rows in batches for row in rows]
    last = {tuple(row[k] for k in plan.keys): row for rows in batches for row in rows}
    return list(last.values())
