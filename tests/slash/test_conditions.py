"""Conditions below an aggregate: which are taken, which refused, and that the engine keeps the rows
that Spark keeps.  Without Spark the first two are tested on the plan that is kept."""

from __future__ import annotations

import datetime
import decimal
import functools
import json
import math

import pyarrow as pa
import pytest

from kdirect.errors import UnsupportedPlanError
from kdirect.state.expressions import evaluate, type_of
from kdirect.state.schema import arrow_type
from kdirect_spark.slash import read_tree
from kdirect_spark.slash.below import BelowReader, projected
from kdirect_spark.slash.catalyst import node
from kdirect_spark.slash.catalyst_expressions import Conditions
from kdirect_spark.slash.literals import Constant, constant
from kdirect_spark.slash.sql_text import literal_sql
from tests.slash import make_plans, queries
from tests.slash.make_plans import PLANS

KINDS = {field.name: field.type for field in queries.COLUMNS}


def _columns(kept: dict):
    """Name and expression of the conditions of a plan, over the columns of its relation."""
    tree = read_tree(kept["plan"], kept["text"])
    below = BelowReader([queries.leaf(streaming=False)], "UTC").relation(tree.only())
    return projected(below.columns, tree.expressions("projectList"), "UTC")


@functools.cache
def _kept() -> dict:
    version = max(path.name for path in PLANS.iterdir() if path.is_dir())
    return {c.name: c.value for c in _columns(json.loads(_path(version).read_text()))}


def _path(version: str):
    return PLANS / version / "conditions.json"


@pytest.mark.parametrize("text", queries.CONDITIONS)
def test_takes(text):
    assert type_of(Conditions(KINDS, "UTC").read(_kept()[text]), KINDS) == "bool"


@pytest.mark.parametrize("text", queries.REFUSED_CONDITIONS)
def test_refuses_and_shows(text):
    with pytest.raises(UnsupportedPlanError) as e:
        Conditions(KINDS, "UTC").read(_kept()[text])
    assert queries.REFUSED_CONDITIONS[text] in str(e.value)


# -- constants -------------------------------------------------------------------------------------


def _cast(value, kind, to):
    return node("Cast", node("Literal", value=value, type=kind), type=to)


@pytest.mark.parametrize(
    ("value", "kind", "to", "expected"),
    [
        ("5", "integer", "double", 5.0),
        ("1.1", "string", "float", 1.100000023841858),
        ("2.5", "decimal(2,1)", "decimal(4,2)", decimal.Decimal("2.50")),
        (" 7 ", "string", "long", 7),
        ("2020-07-01", "date", "timestamp", 1_593_558_000_000_000),  # London is an hour ahead
        ("2020-07-01", "string", "timestamp", 1_593_558_000_000_000),
        ("2020-07-01T00:00:00+01:00", "string", "timestamp", 1_593_558_000_000_000),
        ("2020-10-25 01:30:00", "string", "timestamp", 1_603_585_800_000_000),  # the first of two
        ("1969-12-31", "string", "date", -1),
        (None, "void", "integer", None),
    ],
)
def test_folds_casts_of_constants(value, kind, to, expected):
    assert constant(_cast(value, kind, to), queries.LONDON) == Constant(expected, to)


@pytest.mark.parametrize(
    ("value", "kind", "to"),
    [
        ("300", "integer", "byte"), ("1.5", "decimal(2,1)", "integer"), ("x", "string", "integer"),
        ("1.555", "decimal(4,3)", "decimal(4,2)"), ("999", "integer", "decimal(2,0)"),
        ("now", "string", "timestamp"), ("2020-02-30", "string", "date"),
        ("2020-10-25 01:30:00", "timestamp", "timestamp"), ("1", "integer", "string"),
        ("2020-1-1", "string", "date"), ("true", "boolean", "integer"), ("{", "{}", "integer"),
        ("1", "integer", "timestamp"),
    ],
)  # fmt: skip
def test_refuses_constants_whose_value_is_in_doubt(value, kind, to):
    with pytest.raises(UnsupportedPlanError):
        constant(_cast(value, kind, to), queries.LONDON)


# -- the same rows as Spark ------------------------------------------------------------------------

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


@pytest.mark.spark
def test_the_installed_spark_reads_alike_and_keeps_the_same_rows(request):
    """One session for all: each query of `queries.py` gives the plan that is kept, up to the ids
    of its expressions; conditions are true, false and null where Spark's are; constants are
    written as SQL that means them."""
    import pyspark.sql

    active = pyspark.sql.SparkSession.getActiveSession()
    spark = make_plans.start() if active is None else active.newSession()
    if active is None:
        request.addfinalizer(spark.stop)
    make_plans.register(spark)
    version = ".".join(pyspark.__version__.split(".")[:2])
    folder = PLANS / version
    for name, (query, leaves) in queries.SUPPORTED.items():
        zone = queries.ZONES.get(name, "UTC")
        found = make_plans.read(make_plans.made(spark, query, zone), leaves, zone)
        if folder.is_dir():
            assert found.to_json() == json.loads((folder / f"{name}.slash.json").read_text()), name
    _compare_conditions(spark)
    _compare_constants(spark)


def _compare_conditions(spark):
    import pyspark.sql.functions as F

    rows = _rows()
    given = {c.name: c.value for c in _columns(make_plans.conditions(spark))}
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


def _compare_constants(spark):
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
