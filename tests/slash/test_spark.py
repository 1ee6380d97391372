"""The installed Spark against the reader of its plans: the same plans, and the same rows.

One session of its own for all, since its data source `kdirect` gives rows that the tests choose.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import math
from collections import Counter

import pyarrow as pa
import pytest

from kdirect.state.expressions import evaluate
from kdirect.state.schema import arrow_type
from kdirect_spark.slash import SlashPlan
from kdirect_spark.slash.catalyst_expressions import Conditions
from kdirect_spark.slash.literals import Constant
from kdirect_spark.slash.sql_text import literal_sql
from tests.slash import make_plans, queries
from tests.slash.make_plans import PLANS
from tests.slash.test_conditions import KINDS, columns_of_plan
from tests.state.reference import Reference

pytestmark = pytest.mark.spark

# -- values ----------------------------------------------------------------------------------------

_DAY = datetime.date(2020, 1, 1)


def _rows() -> dict[str, list]:
    """Values at and beside the constants of the conditions, each with null and the extremes."""
    utc = datetime.timezone.utc
    at = datetime.datetime(2020, 1, 1, tzinfo=utc)
    micro = datetime.timedelta(microseconds=1)
    values = {
        "id": [None, 0, 1, 2, 5, 6, 7, -(1 << 63), (1 << 63) - 1, (1 << 53) + 1],
        "n": [None, 0, 1, 2, 3, 4, 5, 6, -5, -6, (1 << 31) - 1, -(1 << 31), (1 << 24) + 1],
        "s": [None, "", "a", "a'b", "b", "ba", "é", "z", "\U0001f600"],
        "d": [None, 0.0, -0.0, 1.0, 1.5, 999.0, 1000.0, math.nan, math.inf, -math.inf, 0.75, 1e300],
        "f": [None, 0.0, -0.0, 1.5, 1.25, math.nan, math.inf, -math.inf, 1.100000023841858, 3e38],
        "dec": [None, *map(decimal.Decimal, ("0.00", "1.00", "1.50", "1.55", "1.56", "2.50",
                                            "-99999999.99", "3.00"))],
        "day": [None, _DAY, _DAY + datetime.timedelta(1), datetime.date(1960, 2, 29)],
        "ts": [None, at, at + micro, at - micro, at + datetime.timedelta(1),
               at + datetime.timedelta(1) + micro,
               datetime.datetime(2020, 1, 1, 3, 4, 5, 678000, tzinfo=utc),
               datetime.datetime(1960, 1, 1, tzinfo=utc)],
        "ms": [None, 1_577_836_800_000, 1_577_836_799_999, 1_577_836_800_001, 0, -1],
        "b": [None, True, False],
        "u": [None, 0, 2, 3, 5, 6, (1 << 64) - 1, 1 << 63],
        "sm": [None, 0, 4, 5, -5, 32767, -32768],
        "bin": [None, b"", b"\x00\xff"],
    }  # fmt: skip
    # Each column goes through its values at a pace of its own, so that they meet.
    return {
        name: [held[(i * (3 + j)) % len(held) if j % 2 else (i // 2) % len(held)]
               for i in range(240)]
        for j, (name, held) in enumerate(values.items())
    }  # fmt: skip


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


def _at(i: int) -> datetime.datetime | None:
    """Times that are all different: eight in each ten minutes, some at their start, some null; on
    days in a row, and the last ones half a year later."""
    if i % 11 == 10:
        return None
    start = datetime.datetime(2020, 7, 1, tzinfo=datetime.timezone.utc)
    start += datetime.timedelta(days=200 if i >= 150 else i // 50)
    return start + datetime.timedelta(seconds=i // 8 * 600 + i % 8 * 13, microseconds=i % 2 * i)


def _typed_rows() -> list[tuple]:
    rows = _rows()
    # Of these the variance would be no number.
    rows["d"] = [None if d is not None and not abs(d) < 1e9 else d for d in rows["d"]]
    rows["f"] = [None if f is not None and not abs(f) < 1e9 else f for f in rows["f"]]
    rows["u"] = [None if u is None else decimal.Decimal(u) for u in rows["u"]]
    rows["ts"] = [_at(i) for i in range(len(rows["ts"]))]
    return list(zip(*rows.values()))


def _few_rows() -> list[tuple]:
    return [
        (i % 2 + 5 if i % 7 else None, i // 2 % 5 if i % 6 != 5 else None, _at(i))
        for i in range(200)
    ]


def _fixed_rows() -> list[tuple]:
    base = 1_577_836_799_000
    return [(i * 7 % 50, i % 9, base + i * 701, "abcd"[: i % 3]) for i in range(150)]


ROWS = {
    queries.DDL: _typed_rows(), queries.FEW_DDL: _few_rows(), queries.FIXED_DDL: _fixed_rows(),
}  # fmt: skip


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    session = make_plans.start() if active is None else active.newSession()
    make_plans.register(session, ROWS)
    yield session
    if active is None:
        session.stop()
        end_of_jvm()


def end_of_jvm():
    """End the JVM of the session: the next one has jars and memory of its own, which are those of
    the JVM's start."""
    from pyspark import SparkContext

    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)


# -- plans -----------------------------------------------------------------------------------------


def test_the_plans_are_those_that_are_kept(spark):
    """Up to the ids of expressions, which differ from session to session."""
    folder = PLANS / ".".join(spark.version.split(".")[:2])
    if not folder.is_dir():
        pytest.skip(f"no plans of Spark {spark.version} are kept: make slash-plans")
    for name, (query, leaves) in queries.SUPPORTED.items():
        zone = queries.ZONES.get(name, "UTC")
        found = make_plans.read(make_plans.made(spark, query, zone), leaves, zone)
        assert found.to_json() == json.loads((folder / f"{name}.slash.json").read_text()), name


# -- conditions and constants ----------------------------------------------------------------------


def test_conditions_are_true_false_and_null_where_sparks_are(spark):
    import pyspark.sql.functions as F

    rows = _rows()
    given = {c.name: c.value for c in columns_of_plan(make_plans.conditions(spark))}
    values = {
        name: [decimal.Decimal(v) if name == "u" and v is not None else v for v in held]
        for name, held in rows.items()
    }
    data = spark.createDataFrame(list(zip(*values.values())), queries.DDL)
    names = [f"c{i}" for i in range(len(queries.CONDITIONS))]
    expected = data.select(
        *(F.expr(text).alias(name) for text, name in zip(queries.CONDITIONS, names))
    ).collect()
    columns = {name: pa.array(held, arrow_type(KINDS[name])) for name, held in rows.items()}
    for text, name in zip(queries.CONDITIONS, names):
        condition = Conditions(KINDS, "UTC").read(given[text])
        found = evaluate(condition, columns, len(expected)).to_pylist()
        wrong = [
            (i, is_, row[name])
            for i, (is_, row) in enumerate(zip(found, expected))
            if is_ != row[name]
        ]
        assert not wrong, (text, wrong[:5], {c: v[wrong[0][0]] for c, v in rows.items()})


def test_constants_are_written_as_sql_that_means_them(spark):
    day, moment = 18_262, 1_577_836_800_000_001
    given = {
        Constant(-(1 << 63), "long"): -(1 << 63), Constant(-128, "byte"): -128,
        Constant(7, "short"): 7, Constant(-7, "integer"): -7, Constant(True, "boolean"): True,
        Constant("it's \\n \"ü\U0001f600\" `x`\n", "string"): "it's \\n \"ü\U0001f600\" `x`\n",
        Constant("plain", "string"): "plain", Constant(0.1, "double"): 0.1,
        Constant(1e300, "double"): 1e300, Constant(math.inf, "double"): math.inf,
        Constant(-0.0, "double"): -0.0, Constant(1.100000023841858, "float"): 1.100000023841858,
        Constant(decimal.Decimal("-1.50"), "decimal(5,2)"): decimal.Decimal("-1.50"),
        Constant(day, "date"): _DAY, Constant(None, "decimal(5,2)"): None,
        Constant(None, "string"): None,
    }  # fmt: skip
    given_at = Constant(moment, "timestamp")
    texts = [literal_sql(c) for c in given]
    row = spark.sql("select " + ", ".join(f"{t} as c{i}" for i, t in enumerate(texts))).head()
    assert [repr(v) for v in row] == [repr(v) for v in given.values()]
    types = [c.type for c in given]
    assert [f.dataType.jsonValue() for f in spark.sql(
        "select " + ", ".join(f"{t} as c{i}" for i, t in enumerate(texts))
    ).schema] == types  # fmt: skip
    assert spark.sql(f"select unix_micros({literal_sql(given_at)})").head()[0] == moment


# -- rows ------------------------------------------------------------------------------------------


def _engine_value(value, kind):
    """A value of Spark as the sequential engine holds it."""
    if isinstance(value, datetime.datetime):
        return (value - _EPOCH) // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.date):
        return (value - _EPOCH.date()).days
    return int(value) if kind == "uint64" and value is not None else value


def _spark_value(value, kind):
    if value is None:
        return None
    if kind.startswith("list<"):
        return [_spark_value(v, kind[5:-1]) for v in value]
    if kind.startswith("timestamp"):
        return _EPOCH + datetime.timedelta(microseconds=value)
    if kind == "date32":
        return _EPOCH.date() + datetime.timedelta(days=value)
    return decimal.Decimal(value) if kind == "uint64" else value


def _engine_rows(found: SlashPlan, ddls: dict[str, str]) -> list[tuple]:
    """What the sequential engine gives for a plan when all windows have closed."""
    plan = found.plan
    engine = Reference(plan, {given.name: 1 for given in plan.inputs})
    batch = {}
    for given in plan.inputs:
        kinds = list(given.types.items())
        batch[given.name] = {
            0: [
                {name: _engine_value(v, kind) for (name, kind), v in zip(kinds, row)}
                for row in ROWS[ddls[given.name]]
            ]
        }
    rows = engine.batch(batch, 1 << 60)
    engine.clock = dict.fromkeys(engine.clock, 1 << 60)
    rows += engine.batch({}, 1 << 60)
    return [
        tuple(_spark_value(row[field.name], field.type) for field in plan.output) for row in rows
    ]


def _comparable(value):
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(f"{value:.9g}")
    if isinstance(value, list):
        return tuple(sorted(map(_comparable, value)))
    if isinstance(value, bytearray):
        return bytes(value)
    return tuple(map(_comparable, value)) if isinstance(value, tuple) else value


# What these add to the others is in the plans alone.
_PLANS_ALONE = {"tumbling-offset", "batch", "time-us", "time-s", "time-wider", "keys-alone"}


@pytest.mark.parametrize("name", [n for n in queries.SUPPORTED if n not in _PLANS_ALONE])
def test_the_rows_are_those_of_spark(spark, name, monkeypatch):
    """The sequential engine and what is left for Spark, against Spark alone, on a batch."""
    import pyspark.sql.functions as F

    topic = queries._topic
    monkeypatch.setattr(queries, "_topic", lambda spark, ddl, *_: topic(spark, ddl, False))
    query, leaves = queries.SUPPORTED[name]
    leaves = tuple(dataclasses.replace(leaf, is_streaming=False) for leaf in leaves)
    zone = queries.ZONES.get(name, "UTC")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        df = query(spark, F)
        found = make_plans.read(make_plans.analyzed(df), leaves, zone)
        ddls = {
            leaf.topic: {len(queries.FEW): queries.FEW_DDL, 4: queries.FIXED_DDL}.get(
                len(leaf.fields), queries.DDL
            )
            for leaf in leaves
        }
        given = spark.createDataFrame(_engine_rows(found, ddls), found.output_ddl)
        if found.having is not None:
            given = given.where(found.having)
        given = given.select(*(F.expr(c.sql).alias(c.name) for c in found.columns))
        for column, field, expected in zip(found.columns, given.schema, df.schema):
            assert field.dataType.simpleString() == expected.dataType.simpleString(), column
        exact = [i for i, c in enumerate(found.columns) if "approx_count" not in c.sql]
        rows, expected_rows = (
            Counter(_comparable(tuple(row[i] for i in exact)) for row in data.collect())
            for data in (given, df)
        )
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert rows, "a query that gives nothing proves nothing"
    assert not (rows - expected_rows), list(rows - expected_rows)[:3]
    assert not (expected_rows - rows), list(expected_rows - rows)[:3]
