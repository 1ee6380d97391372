"""A sequential engine over plain Python values: what a plan means, one row after the other.

Law: nothing of `kdirect.state` enters but the plan's own words (no kernel, no Arrow, no hash, no
executor).  Every group keeps its rows, and each result is computed from them when its window ends.
So there is no accumulator here that could be wrong in the same way as the engine's.

The rules, and where they come from:

- `where` keeps a row when it is true; false and null drop it (SQL).
- An event time may not be null, before 1970, or later than the batch's wall clock plus
  `max_ahead_us`: such a row is dropped, and counted by the reason, before `where` is asked.  Any
  other row moves the clock, also if `where` drops it.
- The clock has an entry for each partition of each input: its greatest event time less the delay.
  A batch's windows close at the least entry of the partitions that are not idle; without an entry
  nothing closes.  Clocks never go back.
- A window is emitted at the end of the batch in which the clock reaches its end.  A row is late for
  a window whose end is at or before the clock of the batches before its own.
- Two rows belong to one session when they are at most `gap` apart, the gap itself included (as in
  Spark).  So a session is emitted when the clock has passed its end, the end itself excluded: a row
  at exactly the end would still belong to it.  A row of a session at time t is late when t + gap
  lies before that clock: Spark compares the end of the row's own window too, not that of the
  session that it would join.
- Null is a key of its own in an aggregate, and equals nothing in a join: a row with a null in its
  key is there only for an outer join that gives it back, and belongs to no session of the other
  side's rows.  NaN is greater than every
  number and equal to itself.
- `first` and `last` take the value of the earliest and latest row, also if it is null (Spark's
  `min_by` and `max_by`).  Of rows with the same time both take null, or else the least value.
  Lists and sets skip nulls; their order means nothing.  Strings have the order of their bytes in
  UTF-8.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import product
from typing import Any

from kdirect.state import (
    Aggregate,
    AggregatePlan,
    Call,
    Column,
    Input,
    JoinPlan,
    Literal,
    NoWindow,
    Session,
    Sliding,
)
from kdirect.state import schema as types

Row = dict[str, Any]
# One batch: the rows of each partition of each input, in the order of the log.
Batch = Mapping[str, Mapping[int, list[Row]]]

MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}  # of ns there are a thousand in one
START = -(1 << 62)  # before every window


def event_time(value: int, unit: str) -> int:
    """Microseconds of an event time given in a unit."""
    return value // 1000 if unit == "ns" else value * MICROSECONDS[unit]


# -- expressions -----------------------------------------------------------------------------------


def _and(values: Iterable[bool | None]) -> bool | None:
    found = list(values)
    return False if False in found else None if None in found else True


def _or(values: Iterable[bool | None]) -> bool | None:
    found = list(values)
    return True if True in found else None if None in found else False


def _compare(op: str, a: Any, b: Any) -> bool:
    a, b = _ordered(a), _ordered(b)
    return {"=": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[op]


def evaluate(expression: Any, row: Row) -> Any:
    """The value of a plan's expression for one row, with SQL's three-valued logic."""
    if isinstance(expression, Column):
        return row[expression.name]
    if isinstance(expression, Literal):
        return expression.value
    assert isinstance(expression, Call)
    values = [evaluate(a, row) for a in expression.args]
    op = expression.op
    if op == "and":
        return _and(values)
    if op == "or":
        return _or(values)
    if op == "is_null":
        return values[0] is None
    if None in values:
        return None
    if op == "not":
        return not values[0]
    if op in ("+", "-", "*"):
        a, b = values
        return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b}[op]()
    return _compare(op, *values)


# -- aggregates ------------------------------------------------------------------------------------


def _ordered(value: Any) -> Any:
    """A sort key that puts NaN above every number."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return (0, value)
    return value


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], float):
        try:
            return math.fsum(values)
        except (ValueError, OverflowError):  # infinities of both signs, or beyond the range
            return sum(values)
    return sum(values[1:], values[0])


def _moments(values: list[Any], *, sample: bool, root: bool) -> float | None:
    count = len(values)
    if count == 0 or (sample and count == 1):
        return None
    numbers = [float(v) for v in values]
    mean = math.fsum(numbers) / count
    variance = math.fsum((v - mean) ** 2 for v in numbers) / (count - 1 if sample else count)
    return math.sqrt(variance) if root else variance


def _edge(rows: list[tuple[int, Row]], column: str, last: bool) -> Any:
    """The value of the earliest or latest row; of several the null, or the least."""
    time = (max if last else min)(t for t, _ in rows)
    values = [row[column] for t, row in rows if t == time]
    return None if None in values else min(values, key=_ordered)


def decimal_average(total: Decimal, count: int, result: str) -> Decimal:
    """An average of the type of the result, rounded half up as Spark does."""
    precise = Context(prec=76, rounding=ROUND_HALF_UP)
    _, scale = types.decimal_of(result)
    return precise.quantize(precise.divide(total, Decimal(count)), Decimal(1).scaleb(-scale))


def _average(values: list[Any]) -> float:
    return _sum(values) / len(values)


# Kind -> function of the values that are not null (never an empty list).
REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": _sum,
    "min": lambda values: min(values, key=_ordered),
    "max": lambda values: max(values, key=_ordered),
    "avg": _average,
    "stddev_samp": lambda values: _moments(values, sample=True, root=True),
    "stddev_pop": lambda values: _moments(values, sample=False, root=True),
    "var_samp": lambda values: _moments(values, sample=True, root=False),
    "var_pop": lambda values: _moments(values, sample=False, root=False),
}


def aggregate(given: Aggregate, kinds: dict[str, str], rows: list[tuple[int, Row]]) -> Any:
    """One aggregate of the rows of one group, given as (event time, row)."""
    kind, column = given.kind, given.column
    if column is None:
        return len(rows)
    if kind in ("first", "last"):
        return _edge(rows, column, kind == "last")
    values = [row[column] for _, row in rows if row[column] is not None]
    if kind == "count":
        return len(values)
    if kind == "approx_count_distinct":
        return len(set(values))
    if kind == "collect_list":
        return sorted(values, key=_ordered)
    if kind == "collect_set":
        return sorted(set(values), key=_ordered)
    if not values:
        return None
    if kind == "avg" and isinstance(values[0], Decimal):
        return decimal_average(_sum(values), len(values), given.result_type(kinds))
    return REDUCTIONS[kind](values)


# -- windows ---------------------------------------------------------------------------------------


def windows_of(window: Any, time: int) -> list[tuple[int, int]]:
    """The windows of fixed length, as (start, end), that contain an event time."""
    if isinstance(window, NoWindow):
        return [(START, -START)]
    slide = window.slide_us if isinstance(window, Sliding) else window.size_us
    last = time - (time - window.origin_us) % slide
    found = []
    while last + window.size_us > time:
        found.append((last, last + window.size_us))
        last -= slide
    return found


def sessions_of(times: Iterable[int], gap: int) -> list[tuple[int, int]]:
    """The sessions, as (first event, last event + gap), of the event times of one key."""
    found: list[tuple[int, int]] = []
    for time in sorted(times):
        if found and time <= found[-1][1]:
            found[-1] = (found[-1][0], time + gap)
        else:
            found.append((time, time + gap))
    return found


# -- the engine ------------------------------------------------------------------------------------


@dataclass
class Group:
    """The rows of one key in one window, as (event time, row), by the index of their input."""

    rows: list[list[tuple[int, Row]]] = field(default_factory=lambda: [[], []])
    changed: bool = False


class Reference:
    """Runs a plan over batches.  `batch` returns the rows that the batch emits."""

    def __init__(self, plan: AggregatePlan | JoinPlan, partitions: Mapping[str, int]) -> None:
        """`partitions`: how many each input has, by its name."""
        self.plan = plan
        self.joins = isinstance(plan, JoinPlan)
        self.inputs: tuple[Input, ...] = plan.inputs
        self.closed_before = START
        # (input, partition) -> its greatest event time less the delay.
        self.clock: dict[tuple[str, int], int | None] = {
            (source.name, p): None
            for source in self.inputs
            if source.time is not None
            for p in range(partitions[source.name])
        }
        self.counts: Counter[str] = Counter()
        # (key, window) -> rows; a session plan has one pseudo window a key.
        self.groups: dict[tuple[tuple, tuple[int, int]], Group] = defaultdict(Group)

    def batch(self, rows: Batch, now_us: int, idle: frozenset = frozenset()) -> list[Row]:
        for side, source in enumerate(self.inputs):
            for partition, records in rows.get(source.name, {}).items():
                for row in records:
                    self._read(side, source, partition, row, now_us)
        closes = self._closes(idle)
        emitted = self._trigger(closes)
        self.closed_before = closes
        return emitted

    def _closes(self, idle: frozenset) -> int:
        entries = [e for place, e in self.clock.items() if place not in idle]
        if not entries or None in entries:
            return self.closed_before
        return max(self.closed_before, min(e for e in entries if e is not None))

    def _read(self, side: int, source: Input, partition: int, row: Row, now_us: int) -> None:
        if source.time is None:
            time = 0
        else:
            value = row[source.time]
            reason = self._fault(source, value, now_us)
            if reason is not None:
                self.counts[reason] += 1
                return
            time = event_time(value, source.time_unit)
            before = self.clock[source.name, partition]
            entry = time - source.delay_us
            self.clock[source.name, partition] = entry if before is None else max(before, entry)
        if source.where is not None and evaluate(source.where, row) is not True:
            return
        self._keep(side, time, row)

    def _fault(self, source: Input, value: int | None, now_us: int) -> str | None:
        if value is None:
            return "null_time"
        time = event_time(value, source.time_unit)
        if time < 0:
            return "before_1970"
        if time > now_us + source.max_ahead_us:
            return "ahead"
        return None

    def _keep(self, side: int, time: int, row: Row) -> None:
        window = self.plan.window
        key = tuple(row[k] for k in self._keys(side))
        if isinstance(window, Session):
            if time + window.gap_us < self.closed_before:
                self.counts["late"] += 1
                return
            open_windows = [(START, START)]
        else:
            open_windows = [w for w in windows_of(window, time) if w[1] > self.closed_before]
            if not open_windows:
                self.counts["late"] += 1
        if self.joins and None in key:
            if self.plan.how not in (("left", "right")[side], "full"):
                return
            key = (*key, side)  # it is in no group with rows of the other side
        for bounds in open_windows:
            group = self.groups[key, bounds]
            group.rows[side].append((time, row))
            group.changed = True

    def _keys(self, side: int) -> Iterable[str]:
        return self.plan.keys_of(side) if self.joins else self.plan.keys

    # -- what a batch emits ------------------------------------------------------------------------

    def _trigger(self, closes: int) -> list[Row]:
        emitted: list[Row] = []
        window = self.plan.window
        for (key, bounds), group in list(self.groups.items()):
            if isinstance(window, Session):
                emitted += self._end_sessions(key, bounds, group, window.gap_us, closes)
            elif isinstance(window, NoWindow):
                if group.changed:
                    group.changed = False
                    emitted += self._result(key, None, group.rows)
            elif bounds[1] <= closes:
                emitted += self._result(key, bounds, group.rows)
                del self.groups[key, bounds]
        return emitted

    def _end_sessions(
        self, key: tuple, bounds: tuple, group: Group, gap: int, closes: int
    ) -> list[Row]:
        emitted: list[Row] = []
        times = [t for side in group.rows for t, _ in side]
        for start, end in sessions_of(times, gap):
            if end >= closes:
                continue
            mine = [[(t, r) for t, r in side if start <= t < end] for side in group.rows]
            group.rows = [[(t, r) for t, r in side if not start <= t < end] for side in group.rows]
            emitted += self._result(key, (start, end), mine)
        if not any(group.rows):
            del self.groups[key, bounds]
        return emitted

    def _result(self, key: tuple, bounds: tuple[int, int] | None, rows: list[list]) -> list[Row]:
        if self.joins:
            return self._pairs(key, bounds, rows)
        plan = self.plan
        result: Row = dict(zip(plan.keys, key, strict=True))
        if bounds is not None:
            result["window_start"], result["window_end"] = bounds
        for a in plan.aggregates:
            result[a.name] = aggregate(a, plan.input.types, rows[0])
        return [result]

    def _pairs(self, key: tuple, bounds: tuple[int, int] | None, rows: list[list]) -> list[Row]:
        left, right = ([row for _, row in side] for side in rows)
        how = self.plan.how
        if None not in key and left and right:
            return [self._joined(a, b, bounds) for a, b in product(left, right)]
        found = []
        if how in ("left", "full"):
            found += [self._joined(a, None, bounds) for a in left]
        if how in ("right", "full"):
            found += [self._joined(None, b, bounds) for b in right]
        return found

    def _joined(self, left: Row | None, right: Row | None, bounds: tuple | None) -> Row:
        assert bounds is not None
        result: Row = {"window_start": bounds[0], "window_end": bounds[1]}
        for side, column, name in self.plan.columns:
            row = (left, right)[side]
            result[name] = None if row is None else row[column]
        return result
