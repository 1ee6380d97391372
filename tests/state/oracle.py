"""What a plan gives, asked of DuckDB over the same rows.

DuckDB computes everything itself: the clock, which rows are late, windows, sessions, groups and
joins.  Nothing of `kdirect.state` but the plan enters, and nothing of tests/state/reference.py
but the shape of its input.

Where DuckDB cannot say it: sessions of rows that come after the clock has passed them (what such a
row joins depends on the batch borders); the rows that an aggregate without a window emits batch
after batch (`final_rows` gives the last ones).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa

from kdirect.state import Aggregate, AggregatePlan, Call, Column, JoinPlan, Literal
from kdirect.state.schema import arrow_type, is_decimal
from tests.state.reference import MICROSECONDS, Batch, Row, decimal_average

OPERATORS = {"=": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
OPERATORS |= {"+": "+", "-": "-", "*": "*"}

# Kind -> SQL of a column.  `t` is the event time.
AGGREGATES = {
    "count": "count({c})",
    "sum": "sum({c})",
    "min": "min({c})",
    "max": "max({c})",
    "avg": "avg({c})",
    "stddev_samp": "stddev_samp({c})",
    "stddev_pop": "stddev_pop({c})",
    "var_samp": "var_samp({c})",
    "var_pop": "var_pop({c})",
    "first": "min({{'t': t, 'n': {c} is not null, 'v': {c}}}).v",
    "last": "min({{'t': -t, 'n': {c} is not null, 'v': {c}}}).v",
    "approx_count_distinct": "count(distinct {c})",
    "collect_list": "coalesce(list({c}) filter ({c} is not null), [])",
    "collect_set": "coalesce(list(distinct {c}) filter ({c} is not null), [])",
}


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):
        return "'" + "".join(f"\\x{b:02x}" for b in value) + "'::blob"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, float):
        return f"'{value!r}'::double"
    if isinstance(value, datetime.date):
        return f"date '{value.isoformat()}'"
    assert isinstance(value, int | Decimal)
    return str(value)


def sql(expression: Any) -> str:
    """A plan's expression in SQL."""
    if isinstance(expression, Column):
        return quoted(expression.name)
    if isinstance(expression, Literal):
        return literal(expression.value)
    assert isinstance(expression, Call)
    args = [sql(a) for a in expression.args]
    if expression.op in ("and", "or"):
        return "(" + f" {expression.op} ".join(args) + ")"
    if expression.op == "not":
        return f"(not {args[0]})"
    if expression.op == "is_null":
        return f"({args[0]} is null)"
    return f"({args[0]} {OPERATORS[expression.op]} {args[1]})"


class Oracle:
    """A plan and the batches that it runs over, as tables of DuckDB."""

    def __init__(
        self,
        plan: AggregatePlan | JoinPlan,
        partitions: Mapping[str, int],
        batches: list[tuple[Batch, int]],
    ) -> None:
        """`partitions`: how many each input has.  `batches`: rows and the wall clock of each."""
        self.plan = plan
        self.joins = isinstance(plan, JoinPlan)
        self.inputs = plan.inputs
        self.db = duckdb.connect(config={"threads": 1})
        self._load(partitions, batches)
        self._read()

    def _load(self, partitions: Mapping[str, int], batches: list[tuple[Batch, int]]) -> None:
        numbers = range(len(batches))
        self.db.register(
            "batches",
            pa.table({"b": pa.array(numbers, "int64"), "now_us": [now for _, now in batches]}),
        )
        places = [
            (i, p)
            for i, source in enumerate(self.inputs)
            if source.time is not None
            for p in range(partitions[source.name])
        ]
        self.db.register(
            "places",
            pa.table(
                {
                    "i": pa.array([i for i, _ in places], "int64"),
                    "p": pa.array([p for _, p in places], "int64"),
                }
            ),
        )
        for i, source in enumerate(self.inputs):
            rows = [
                (b, p, row)
                for b, (batch, _) in enumerate(batches)
                for p, records in batch.get(source.name, {}).items()
                for row in records
            ]
            columns = {
                "b": pa.array([b for b, _, _ in rows], "int64"),
                "p": pa.array([p for _, p, _ in rows], "int64"),
            }
            for f in source.schema:
                values = [row[f.name] for _, _, row in rows]
                columns["c_" + f.name] = pa.array(values, arrow_type(f.type))
            self.db.register(f"rows{i}", pa.table(columns))

    def _read(self) -> None:
        """Tables `valid0` (and `valid1`): rows with an event time that may be, and `closed`: what
        was closed before each batch, and after it."""
        entries = []
        for i, source in enumerate(self.inputs):
            columns = ", ".join(f"{quoted('c_' + f.name)} as {quoted(f.name)}"
                                for f in source.schema)  # fmt: skip
            where = f" where {sql(source.where)}" if source.where is not None else ""
            if source.time is None:
                time, fits, entry = "0::bigint", "true", "null::bigint"
            else:
                column = quoted("c_" + source.time)
                if source.types[source.time].startswith("timestamp"):
                    column = f"epoch_us({column})"
                if source.time_unit == "ns":
                    time = f"({column} // 1000)"
                else:
                    time = f"({column} * {MICROSECONDS[source.time_unit]}::bigint)"
                fits = f"{column} >= 0 and {time} <= now_us + {source.max_ahead_us}"
                entry = f"t - {source.delay_us}"
            self.db.execute(
                f"create table read{i} as select b, p, {time} as t, {columns} "
                f"from rows{i} join batches using (b) where {fits}"
            )
            self.db.execute(f"create table valid{i} as select * from read{i}{where}")
            entries.append(f"select {i} as i, p, b, {entry} as e from read{i}")
        self.db.execute(
            f"""create table closed as
            with seen as ({" union all ".join(entries)}),
            entry as (
                select g.b, q.i, q.p, max(s.e) as e from batches g cross join places q
                left join seen s on s.i = q.i and s.p = q.p and s.b <= g.b group by all),
            least as (
                select b, case when count(e) = count(*) then min(e) end as c
                from entry group by b),
            after as (select b, max(c) over (order by b) as after from least)
            select b, after, lag(after) over (order by b) as before from after"""
        )

    def closes(self) -> int | None:
        """The clock at the end of the last batch."""
        found = self.db.execute("select max(after) from closed").fetchone()
        return None if found is None else found[0]

    def batch_closes(self) -> list[int | None]:
        return [c for (c,) in self.db.execute("select after from closed order by b").fetchall()]

    def has_rows_below_the_clock(self) -> bool:
        """Whether a row came after the clock had passed its event time."""
        found = [
            self.db.execute(
                f"select count(*) from valid{i} join closed using (b) where t <= before"
            ).fetchone()
            for i in range(len(self.inputs))
        ]
        return any(f is not None and f[0] for f in found)

    # -- windows -----------------------------------------------------------------------------------

    def _windowed(self) -> None:
        """Tables `in0` (and `in1`): rows that are kept, with the bounds `s`, `e` of a window."""
        window = self.plan.window
        kind = type(window).__name__
        if kind == "Session":
            self._sessions(window.gap_us)
            return
        for i in range(len(self.inputs)):
            if kind == "NoWindow":
                self.db.execute(f"create table in{i} as select *, 0 as s, 0 as e from valid{i}")
                continue
            size = window.size_us
            slide = window.slide_us if kind == "Sliding" else size
            last = f"t - (((t - {window.origin_us}) % {slide}) + {slide}) % {slide}"
            self.db.execute(
                f"""create table in{i} as
                with w as (
                    select *, unnest(range(0, {-(-size // slide)})) as n from valid{i}),
                x as (select *, {last} - n * {slide} as s from w)
                select * exclude (n), s + {size} as e from x
                where s + {size} > t
                and s + {size} > coalesce((select before from closed where closed.b = x.b), -1)"""
            )

    def _keys(self, i: int) -> list[str]:
        return list(self.plan.keys_of(i) if self.joins else self.plan.keys)

    def _matchable(self, i: int) -> str:
        """Of a side that an outer join does not give back, only rows that can match are there."""
        if not self.joins or self.plan.how in (("left", "right")[i], "full"):
            return ""
        return "".join(f" and {quoted(k)} is not null" for k in self._keys(i))

    def _alone(self, i: int) -> str:
        """Of a row with a null in its key its side, whose rows alone may be in its session."""
        if not self.joins:
            return ""
        null = " or ".join(f"{quoted(k)} is null" for k in self._keys(i))
        return f"case when {null} then {i} else -1 end as _alone, "

    def _sessions(self, gap: int) -> None:
        for i in range(len(self.inputs)):
            self.db.execute(
                f"create table kept{i} as select v.* from valid{i} v join closed using (b) "
                f"where t + {gap} >= coalesce(before, -1)" + self._matchable(i)
            )
        count = len(self._keys(0))
        names = [f"_k{n}" for n in range(count)]
        if self.joins:
            names.append("_alone")
        alike = ", ".join(names)
        sides = " union all ".join(
            "select "
            + "".join(f"{quoted(k)} as _k{n}, " for n, k in enumerate(self._keys(i)))
            + self._alone(i)
            + f"t from kept{i}"
            for i in range(len(self.inputs))
        )
        partition = f"partition by {alike}" if names else ""
        group = "".join(f"{n}, " for n in names)
        self.db.execute(
            f"""create table session as
            with u as ({sides}),
            f as (select *, case when t - lag(t) over ({partition} order by t) <= {gap}
                  then 0 else 1 end as fresh from u),
            n as (select *, sum(fresh) over ({partition} order by t
                  rows unbounded preceding) as id from f)
            select {group} id, min(t) as s, max(t) + {gap} as e from n group by {group} id"""
        )
        for i in range(len(self.inputs)):
            same = "".join(
                f" and kept{i}.{quoted(k)} is not distinct from _k{n}"
                for n, k in enumerate(self._keys(i))
            )
            self.db.execute(
                f"create table in{i} as select kept{i}.*, s, e from kept{i} join session "
                f"on t >= s and t < e{same}" + (f" and _alone in (-1, {i})" if self.joins else "")
            )

    # -- results -----------------------------------------------------------------------------------

    def final_rows(self) -> list[Row]:
        """All rows that the batches emit, or, without a window, those of all input."""
        self._windowed()
        kind = type(self.plan.window).__name__
        closes = self.closes()
        if kind == "NoWindow":
            ended = "true"
        elif closes is None:
            return []
        else:
            ended = f"e {'<' if kind == 'Session' else '<='} {closes}"
        return self._join(ended) if self.joins else self._aggregate(ended, kind)

    def _aggregate(self, ended: str, kind: str) -> list[Row]:
        plan = self.plan
        wanted = [f"{quoted(k)} as {quoted(k)}" for k in plan.keys]
        if kind != "NoWindow":
            wanted += ["s as window_start", "e as window_end"]
        for a in plan.aggregates:
            of = (
                "count(*)"
                if a.column is None
                else AGGREGATES[a.kind].format(c=f"in0.{quoted(a.column)}")
            )
            if self._averages_decimals(a):
                of = "{'sum': sum(in0.C), 'count': count(in0.C)}".replace("C", quoted(a.column))
            wanted.append(f"{of} as {quoted(a.name)}")
        group = ", ".join([f"in0.{quoted(k)}" for k in plan.keys] + ["s", "e"])
        found = self._rows(f"select {', '.join(wanted)} from in0 where {ended} group by {group}")
        for a in plan.aggregates:
            if self._averages_decimals(a):
                self._divide(found, a)
        return found

    def _averages_decimals(self, a: Aggregate) -> bool:
        return a.kind == "avg" and is_decimal(self.plan.input.types[a.column])

    def _divide(self, rows: list[Row], a: Aggregate) -> None:
        """DuckDB's division of decimals gives a double, so it gives the sum and the count only."""
        result = a.result_type(self.plan.input.types)
        for row in rows:
            total, count = row[a.name]["sum"], row[a.name]["count"]
            row[a.name] = decimal_average(total, count, result) if count else None

    def _join(self, ended: str) -> list[Row]:
        plan = self.plan
        on = " and ".join(
            ["l.s = r.s", "l.e = r.e"]
            + [
                f"l.{quoted(a)} = r.{quoted(b)}"
                for a, b in zip(plan.left_keys, plan.right_keys, strict=True)
            ]
        )
        wanted = ["coalesce(l.s, r.s) as window_start", "coalesce(l.e, r.e) as window_end"]
        wanted += [
            f"{'lr'[side]}.{quoted(column)} as {quoted(name)}"
            for side, column, name in plan.columns
        ]
        return self._rows(
            f"select {', '.join(wanted)} from (select * from in0 where {ended}) l "
            f"{plan.how} join (select * from in1 where {ended}) r on {on}"
        )

    def _rows(self, query: str) -> list[Row]:
        cursor = self.db.execute(query)
        names = [d[0] for d in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
