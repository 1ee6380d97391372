"""Spark's `Aggregate` over one relation, as the engine's plan and columns of its output.

A result that the engine's types or rules would change is refused, or cast back above it.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kdirect.state import schema as types
from kdirect.state.aggregates import Aggregate
from kdirect.state.plan import AggregatePlan
from kdirect.state.windows import NoWindow, Window
from kdirect_spark.slash.above import END, START, Above, Session, input_of
from kdirect_spark.slash.below import Below, Column, substituted, values_of
from kdirect_spark.slash.catalyst import Node, Tree, describe, node
from kdirect_spark.slash.catalyst_windows import bounds, window_of
from kdirect_spark.slash.literals import constant
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.slash_plan import Leaf, Output
from kdirect_spark.slash.spark_types import INTEGERS, decimal_of, engine_ddl
from kdirect_spark.slash.sql_text import SqlText

_SIMPLE = {
    "Sum": "sum", "Min": "min", "Max": "max", "Average": "avg", "StddevSamp": "stddev_samp",
    "StddevPop": "stddev_pop", "VarianceSamp": "var_samp", "VariancePop": "var_pop",
    "HyperLogLogPlusPlus": "approx_count_distinct", "CollectList": "collect_list",
    "CollectSet": "collect_set",
}  # fmt: skip
_MOMENTS = ("StddevSamp", "StddevPop", "VarianceSamp", "VariancePop")
_BY_TIME = {"MinBy": "first", "MaxBy": "last"}
_NEVER_NULL = ("count", "approx_count_distinct", "collect_list", "collect_set")


def aggregated(below: Below, tree: Tree, leaves: Sequence[Leaf], session: Session) -> Above:
    """The node Aggregate over one relation."""
    return _Aggregation(below, leaves[below.leaf], session).read(tree)


class _Aggregation:
    def __init__(self, below: Below, leaf: Leaf, session: Session) -> None:
        self._below = below
        self._leaf = leaf
        self._session = session
        self._kinds = {field.name: field.type for field in leaf.fields}
        self._keys: dict[str, Node] = {}
        self._window: Node | None = None
        self._found: dict[str, Aggregate] = {}

    def read(self, tree: Tree) -> Above:
        values = values_of(self._below.columns)
        for expression in tree.expressions("groupingExpressions"):
            self._group(substituted(_unnamed(expression), values))
        if not self._keys and self._window is None:
            raise unsupported(
                "an aggregate without groupBy gives a row even for no input, which the engine does"
                " not",
                "group by a window or a column",
            )
        self._check_keys()
        where, having = self._divided()
        columns = []
        for expression in tree.expressions("aggregateExpressions"):
            inner = substituted(_unnamed(expression), values)
            columns.append(
                Column(
                    id=expression.get("id", -1), name=expression.get("name", ""),
                    value=self._result(inner),
                )
            )  # fmt: skip
        if not self._found:
            self._add(Aggregate(kind="count", name="count"))
        given = input_of(self._below, self._leaf, self._session, self._window, where)
        plan = AggregatePlan(
            input=given,
            keys=tuple(self._keys),
            window=self._engine_window(),
            aggregates=tuple(self._found.values()),
            overflow="error" if self._session.ansi else "wrap",
        )
        having = tuple(self._result(part) for part in having)
        outputs = self._outputs(plan)
        text = SqlText(self._session.time_zone)
        return Above(
            columns=tuple(columns), leaves=(self._below.leaf,), having=having,
            finish=lambda used: (plan, text, outputs),
        )  # fmt: skip

    def _engine_window(self) -> Window:
        return NoWindow() if self._window is None else window_of(self._window)

    def _outputs(self, plan: AggregatePlan) -> tuple[Output, ...]:
        never = {a.name for a in plan.aggregates if a.kind in _NEVER_NULL}
        never |= {key for key, column in self._keys.items() if not column.get("nullable")}
        if self._window is not None:
            never |= {"window_start", "window_end"}
        return tuple(
            Output(name=field.name, type=engine_ddl(field.type), nullable=field.name not in never)
            for field in plan.output
        )

    # -- grouping

    def _group(self, found: Node) -> None:
        if found.kind == "@Window":
            if self._window is not None and self._window != found:
                raise unsupported("two windows in one groupBy are not supported", "use one")
            self._window = found
        elif found.kind == "@Column":
            self._check_key(found)
            self._keys[found.get("name")] = found
        elif found.kind == "GetStructField" and found.children[0].kind == "@Window":
            raise unsupported(
                f"groupBy of {describe(found)} is not supported", "group by the whole window"
            )
        else:
            raise unsupported(
                f"groupBy of {describe(found)} is not supported: the engine's keys are columns of"
                " the topic",
                "write that value as a field of the records",
            )

    def _check_key(self, found: Node) -> None:
        name = found.get("name")
        kind = self._kinds[name]
        if kind == "timestamp(ns)":
            raise unsupported(
                f"groupBy of {name} is not supported: it has nanoseconds, and Spark groups by"
                " microseconds",
                "declare it as timestamp(us)",
            )
        if kind in types.FLOATS:
            raise unsupported(
                f"groupBy of {name} is not supported: it is of type {found.type}",
                "group by integers, strings, binary, dates, timestamps, decimals or booleans",
            )

    def _check_keys(self) -> None:
        marked = self._below.watermark
        if self._window is None and marked is not None:
            for key in self._keys.values():
                if key == marked[0]:
                    raise unsupported(
                        f"groupBy of the event time {describe(key)} without a window is not"
                        " supported",
                        "group by a window of it",
                    )

    def _divided(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The conditions of rows; and those of the window, which all rows of a group share, so
        that they may as well be asked of the result."""
        where, having = [], []
        for part in self._below.where:
            windows = [found for found in part.walk() if found.kind == "@Window"]
            if not windows:
                where.append(part)
                continue
            keys = set(self._keys.values())
            shared = all(found.kind != "@Column" or found in keys for found in _outside(part))
            if self._window is None or any(w != self._window for w in windows) or not shared:
                raise unsupported(
                    f"the condition {describe(part)} on a window is not supported",
                    "use it after the aggregate",
                )
            if self._window.get("how") == "session":
                raise unsupported(
                    f"the condition {describe(part)} on a session before it is complete is not"
                    " supported",
                    "use it after the aggregate",
                )
            having.append(part)
        return tuple(where), tuple(having)

    # -- results

    def _result(self, found: Node) -> Node:
        """An expression of the aggregate's list, over the engine's output."""
        if found.kind == "@Window" and found == self._window:
            return bounds(START, END)
        if found.kind == "@Column":
            if found.get("name") not in self._keys:
                raise unsupported(f"the column {describe(found)} is neither grouped nor aggregated")
            return node("@Result", name=found.get("name"))
        if found.kind == "AggregateExpression":
            return self._aggregate(found)
        if found.kind == "AttributeReference":
            raise unsupported(
                f"the column {describe(found)} is not a field of the values of topic"
                f" {self._leaf.topic}",
                "use columns of the value only",
            )
        return found.with_children(tuple(self._result(child) for child in found.children))

    def _add(self, aggregate: Aggregate) -> Node:
        """Where the result of an aggregate is; an equal one is computed once."""
        for held in self._found.values():
            if replace(held, name=aggregate.name) == aggregate:
                return node("@Result", name=held.name)
        taken = {*self._found, *self._keys, "window_start", "window_end"}
        name, i = aggregate.name, 2
        while name in taken:
            name, i = f"{aggregate.name}_{i}", i + 1
        self._found[name] = replace(aggregate, name=name)
        return node("@Result", name=name)

    def _aggregate(self, found: Node) -> Node:
        function = found.children[0] if found.children else found
        if found.get("isDistinct") is not False:
            raise unsupported(
                f"{describe(function)} with DISTINCT is not supported",
                "use approx_count_distinct, or size(collect_set(..))",
            )
        if len(found.children) != 1:
            raise unsupported(
                f"{describe(function)} with FILTER is not supported",
                "filter before the aggregate",
            )
        kind = function.kind
        if kind == "Count":
            return self._count(function)
        if kind in _BY_TIME and len(function.children) == 2:
            return self._by_time(function)
        if kind in ("First", "Last", "AnyValue"):
            raise unsupported(
                f"{describe(function)} is not supported: it depends on the order in which rows"
                " arrive",
                "use min_by or max_by with the event time",
            )
        if kind not in _SIMPLE or len(function.children) != 1:
            raise unsupported(
                f"the aggregate {describe(function)} is not supported",
                "use count, sum, min, max, avg, stddev, variance, approx_count_distinct,"
                " collect_list, collect_set, min_by or max_by",
            )
        return self._simple(function)

    def _count(self, function: Node) -> Node:
        if len(function.children) == 1:
            inner = function.children[0]
            value = constant(inner, self._session.time_zone)
            if value is not None and value.value is not None:
                return self._add(Aggregate(kind="count", name="count"))
            if value is None:
                column = self._column(inner, function, loose=True)
                return self._add(_named("count", column.get("name")))
        raise unsupported(f"{describe(function)} is not supported", "count one column")

    def _by_time(self, function: Node) -> Node:
        """min_by and max_by of the event time.  Of rows with one time Spark takes any; the engine
        takes the null or the least, and the value of the row also where it is null, as Spark."""
        value, order = function.children
        column = self._column(value, function)
        if self._window is None or order != self._window.children[0]:
            raise unsupported(
                f"{describe(function)} is not supported",
                "order by the event time of the window that is grouped by",
            )
        return self._add(_named(_BY_TIME[function.kind], column.get("name")))

    def _simple(self, function: Node) -> Node:
        kind, inner = _SIMPLE[function.kind], function.children[0]
        loose = function.kind in (*_MOMENTS, "Average", "HyperLogLogPlusPlus")
        column = self._column(inner, function, loose=loose, widened=kind in ("sum", "min", "max"))
        name, spark = column.get("name"), column.type
        engine = self._kinds[name]
        if kind in ("sum", "avg"):
            if engine == "uint64":
                raise unsupported(
                    f"{describe(function)} is not supported: {name} is uint64, which Spark sums as"
                    " a decimal",
                    "declare it as int64 or decimal128(20,0)",
                )
            if not types.is_number(engine) or (kind == "avg" and _is_rounded(inner, spark)):
                raise self._refused(function)
        if kind in ("collect_list", "collect_set") and function.get("ignoreNulls", True) is False:
            raise unsupported(f"{describe(function)} with RESPECT NULLS is not supported")
        if engine == "timestamp(ns)" and kind in ("collect_set", "approx_count_distinct"):
            raise unsupported(
                f"{describe(function)} is not supported: {name} has nanoseconds",
                "declare it as timestamp(us)",
            )
        aggregate = _named(kind, name)
        if kind == "approx_count_distinct":
            aggregate = replace(aggregate, precision_bits=_precision(function))
        if function.get("nullOnDivideByZero", True) is False:
            raise unsupported(
                f"{describe(function)} with spark.sql.legacy.statisticalAggregate is not supported"
            )
        result = self._add(aggregate)
        if kind in ("min", "max") and inner.type != column.type:
            return node("Cast", result, type=inner.type)
        return result

    def _refused(self, function: Node) -> Exception:
        return unsupported(
            f"the aggregate {describe(function)} is not supported",
            "aggregate a column of the topic, and compute before the rows are written or after the"
            " aggregate",
        )

    def _column(
        self, found: Node, function: Node, *, loose: bool = False, widened: bool = False
    ) -> Node:
        """The column that an aggregate takes.  `widened`: it may be cast to a wider integer.
        `loose`: or to a float, where the engine computes with floats anyway, or only asks whether
        there is a value."""
        inner = found
        while inner.kind == "Cast" and len(inner.children) == 1 and (loose or widened):
            child = inner.children[0]
            wider = child.type in INTEGERS and INTEGERS[child.type] <= INTEGERS.get(inner.type, 0)
            number = child.type in (*INTEGERS, "float") or decimal_of(child.type) is not None
            if not wider and not (loose and number and inner.type == "double"):
                break
            inner = child
        if inner.kind != "@Column":
            raise self._refused(function)
        return inner


def _is_rounded(found: Node, spark: str) -> bool:
    """avg of a decimal that is cast to double is no average of decimals."""
    return found.kind == "Cast" and decimal_of(spark) is not None


def _unnamed(found: Node) -> Node:
    return found.children[0] if found.kind == "Alias" and len(found.children) == 1 else found


def _outside(found: Node) -> list[Node]:
    """The nodes of an expression without those within its windows."""
    if found.kind == "@Window":
        return []
    return [found, *(inner for child in found.children for inner in _outside(child))]


def _named(kind: str, column: str) -> Aggregate:
    return Aggregate(kind=kind, column=column, name=f"{kind}({column})")


def _precision(function: Node) -> int:
    """The registers that Spark takes for a relative standard deviation."""
    given = function.get("relativeSD")
    try:
        bits = math.ceil(2.0 * math.log2(1.106 / float(given)))
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        bits = 0
    if not 4 <= bits <= 16:
        raise unsupported(
            f"approx_count_distinct with a relative deviation of {given} is not supported",
            "give 0.005 to 0.39",
        )
    return bits
