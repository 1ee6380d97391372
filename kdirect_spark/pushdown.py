"""Filters of a batch query as ranges of offsets: what need not be read.

Law: pure.  The reader asks the broker for offsets by time and passes them in.

A condition gives, for each topic partition, the offsets at which a row may be that meets it.
Conditions on `topic`, `partition` and `offset` are exact: every row at these offsets meets them,
and no other does.  Conditions on `timestamp` are not, because records are in the order of their
offsets and not of their times.  `timestamp >= t` starts at the first record of time t or later:
before it no record is late enough, after it some may be too early.  `timestamp < t` excludes
nothing, because after any record an earlier one may follow.  Spark evaluates every condition that
is not exact once more.

Two sources say conditions: the shim, as JSON (`parse`), and PySpark's `pushFilters`
(`from_filters`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from kdirect.errors import ConfigError
from kdirect.model import TopicPartition
from kdirect_spark.offsets import OFFSET_MAX, OffsetRange

# Half-open ranges of offsets, in order, with a gap between each two.
Intervals = tuple[tuple[int, int], ...]
NOTHING: Intervals = ()
EVERYTHING: Intervals = ((0, OFFSET_MAX),)

EXACT_COLUMNS = ("topic", "partition", "offset")
COLUMNS = (*EXACT_COLUMNS, "timestamp")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# So many times a query looks up at most, each with a request for offsets by time; conditions with
# further times exclude nothing.
MOST_TIMES = 16
# So many pieces a partition is read in at most; beyond, those with the least between them are
# joined, and Spark evaluates the condition once more.  A condition of n values has at most n + 1.
MOST_PIECES = 64

FirstAt = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Compare:
    """`column` `op` one of `values`; op is =, <, <=, > or >=, and those with an order have one
    value.  A value of timestamp is in microseconds since 1970."""

    column: str
    op: str
    values: tuple[Any, ...]

    @property
    def is_exact(self) -> bool:
        return self.column in EXACT_COLUMNS

    @property
    def size(self) -> int:
        """How many values this compares with."""
        return len(self.values)

    def times(self) -> set[int]:
        """The times, in ms since 1970, of which the first record has to be known."""
        ms = self._least_ms()
        return set() if ms is None or ms <= 0 else {ms}

    def offsets(self, tp: TopicPartition, first_at: FirstAt) -> Intervals:
        """Where a row of `tp` may be that meets this.  `first_at(ms)`: the offset of the first
        record of that time or later."""
        if self.column == "timestamp":
            ms = self._least_ms()
            return EVERYTHING if ms is None or ms <= 0 else _from(first_at(ms))
        if self.column == "offset":
            return union(_compared(self.op, value) for value in self.values)
        mine = tp.topic if self.column == "topic" else tp.partition
        return EVERYTHING if any(_holds(mine, self.op, v) for v in self.values) else NOTHING

    def _least_ms(self) -> int | None:
        """The earliest time, in whole ms, of a record that meets a condition on the time."""
        if self.column != "timestamp" or self.op in ("<", "<=") or not self.values:
            return None
        us = min(self.values)
        return us // 1000 + 1 if self.op == ">" else -(-us // 1000)


@dataclass(frozen=True, slots=True)
class _Several:
    of: tuple[Condition, ...]

    @property
    def size(self) -> int:
        return sum(x.size for x in self.of)

    @property
    def is_exact(self) -> bool:
        return all(x.is_exact for x in self.of)

    def times(self) -> set[int]:
        return {ms for x in self.of for ms in x.times()}


@dataclass(frozen=True, slots=True)
class AllOf(_Several):
    def offsets(self, tp: TopicPartition, first_at: FirstAt) -> Intervals:
        found = EVERYTHING
        for x in self.of:
            found = intersection(found, x.offsets(tp, first_at))
        return found


@dataclass(frozen=True, slots=True)
class AnyOf(_Several):
    def offsets(self, tp: TopicPartition, first_at: FirstAt) -> Intervals:
        return union(x.offsets(tp, first_at) for x in self.of)


@dataclass(frozen=True, slots=True)
class Not:
    """Excludes something only where `of` is exact."""

    of: Condition

    @property
    def size(self) -> int:
        return self.of.size

    @property
    def is_exact(self) -> bool:
        return self.of.is_exact

    def times(self) -> set[int]:
        return set()

    def offsets(self, tp: TopicPartition, first_at: FirstAt) -> Intervals:
        return complement(self.of.offsets(tp, first_at)) if self.of.is_exact else EVERYTHING


Condition = Compare | AllOf | AnyOf | Not
ALL = AllOf(())


def _holds(mine: Any, op: str, value: Any) -> bool:
    if op == "=":
        return bool(mine == value)
    if op == "<":
        return bool(mine < value)
    if op == "<=":
        return bool(mine <= value)
    return bool(mine > value if op == ">" else mine >= value)


def _compared(op: str, value: int) -> Intervals:
    if op == "=":
        return _between(value, value + 1)
    if op in ("<", "<="):
        return _between(0, value + (op == "<="))
    return _from(value + (op == ">"))


def _from(start: int) -> Intervals:
    return _between(start, OFFSET_MAX)


def _between(start: int, stop: int) -> Intervals:
    start, stop = max(start, 0), min(stop, OFFSET_MAX)
    return ((start, stop),) if start < stop else NOTHING


def union(several: Iterable[Intervals]) -> Intervals:
    out: list[tuple[int, int]] = []
    for start, stop in sorted(x for intervals in several for x in intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def intersection(one: Intervals, other: Intervals) -> Intervals:
    return tuple((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) < min(b, d))


def complement(of: Intervals) -> Intervals:
    bounds = [0, *(bound for x in of for bound in x), OFFSET_MAX]
    return tuple((a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b)


def joined(intervals: Intervals, most: int) -> Intervals:
    """At most `most` intervals that hold these, joined where the least lies between them."""
    if not intervals:
        return intervals
    gaps = sorted((b[0] - a[1], i) for i, (a, b) in enumerate(pairwise(intervals), 1))
    kept = sorted(i for _, i in gaps[max(len(gaps) - most + 1, 0) :])
    firsts, ends = [0, *kept], [*kept, len(intervals)]
    return tuple((intervals[a][0], intervals[b - 1][1]) for a, b in zip(firsts, ends, strict=True))


# -- ranges ----------------------------------------------------------------------------------------


def times_of(condition: Condition) -> list[int]:
    """The times, in ms, to look up for `narrowed`."""
    return sorted(condition.times())[:MOST_TIMES]


def may_be_in(condition: Condition, tp: TopicPartition) -> bool:
    """Whether `tp` may have a row that meets `condition`, before any time is looked up."""
    return bool(condition.offsets(tp, lambda _: 0))


def narrowed(
    ranges: Iterable[OffsetRange],
    condition: Condition,
    by_time: Mapping[int, Mapping[TopicPartition, int | None]],
) -> tuple[OffsetRange, ...]:
    """The parts of `ranges`, in order, in which rows may be that meet `condition`.  `by_time`: the
    offset of the first record of a time (ms) or later, None if there is none; what was not looked
    up excludes nothing."""
    out = []
    for r in ranges:
        tp = r.topic_partition

        def first_at(ms: int, tp: TopicPartition = tp) -> int:
            found = by_time.get(ms, {})
            if tp not in found:
                return 0
            offset = found[tp]
            return OFFSET_MAX if offset is None else offset

        inside = intersection(condition.offsets(tp, first_at), ((r.start, r.stop),))
        if inside:
            out += [OffsetRange(tp, a, b) for a, b in joined(inside, MOST_PIECES)]
    return tuple(out)


# -- where conditions come from --------------------------------------------------------------------


def parse(text: str) -> Condition:
    """The condition that the shim says as JSON: {"op": "and" | "or", "of": [...]}, {"op": "not",
    "of": [x]}, or {"op": "<=", "column": "offset", "values": [5]}.  Raises ConfigError."""
    try:
        return _parsed(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ConfigError(
            f"the filter that the shim passed on is not known: {text[:200]} ({e!r})",
            hint="let the shim's jar and the Python package be of one version",
        ) from None


def _parsed(x: Any) -> Condition:
    op = x["op"]
    if op in ("and", "or", "not"):
        of = tuple(_parsed(y) for y in x["of"])
        if op == "not":
            (one,) = of
            return Not(one)
        return AllOf(of) if op == "and" else AnyOf(of)
    column, values = x["column"], tuple(x["values"])
    kind = str if column == "topic" else int
    if (
        column not in COLUMNS
        or op not in ("=", "<", "<=", ">", ">=")
        or not all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
        or (op != "=" and len(values) != 1)
    ):
        raise ValueError("an unknown comparison")
    return Compare(column, op, values)


_OPS = {
    "EqualTo": "=", "EqualNullSafe": "=", "In": "=",
    "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">", "GreaterThanOrEqual": ">=",
}  # fmt: skip


def from_filters(filters: Sequence[Any]) -> tuple[Condition, list[Any]]:
    """PySpark's filters as one condition, and those that Spark has to evaluate after it."""
    known = [(x, _from_filter(x)) for x in filters]
    whole = AllOf(tuple(condition for _, condition in known if condition is not None))
    if whole.size >= MOST_PIECES:  # pieces may be joined
        return whole, list(filters)
    return whole, [x for x, condition in known if condition is None or not condition.is_exact]


def _from_filter(x: Any) -> Condition | None:
    name = type(x).__name__
    if name == "Not":
        inner = _from_filter(x.child)
        return Not(inner) if inner is not None and inner.is_exact else None
    if len(x.attribute) != 1 or x.attribute[0] not in COLUMNS:
        return None
    column = x.attribute[0]
    if name == "IsNotNull":
        return ALL  # none of these columns is ever null
    if name not in _OPS:
        return None
    values = [_value(column, v) for v in (x.value if name == "In" else [x.value])]
    return None if None in values else Compare(column, _OPS[name], tuple(values))


def _value(column: str, value: Any) -> int | str | None:
    """A value of PySpark as one of `Compare`; None if it cannot be one."""
    if column == "topic":
        return value if isinstance(value, str) else None
    if column == "timestamp":
        if not isinstance(value, datetime) or value.tzinfo is None:
            return None
        return (value - EPOCH) // timedelta(microseconds=1)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
