"""Conditions below an aggregate: which are taken, which refused, and that the engine keeps the rows
that Spark keeps.  Without Spark the first two are tested on the plan that is kept."""

from __future__ import annotations

import decimal
import functools
import json

import pytest

from kdirect.errors import UnsupportedPlanError
from kdirect.state.expressions import type_of
from kdirect_spark.slash import read_tree
from kdirect_spark.slash.below import BelowReader, projected
from kdirect_spark.slash.catalyst import node
from kdirect_spark.slash.catalyst_expressions import Conditions
from kdirect_spark.slash.literals import Constant, constant
from tests.slash import queries
from tests.slash.make_plans import PLANS

KINDS = {field.name: field.type for field in queries.COLUMNS}


def columns_of_plan(kept: dict):
    """Name and expression of the conditions of a plan, over the columns of its relation."""
    tree = read_tree(kept["plan"], kept["text"])
    below = BelowReader([queries.leaf(streaming=False)], "UTC").relation(tree.only())
    return projected(below.columns, tree.expressions("projectList"), "UTC")


@functools.cache
def _kept() -> dict:
    version = max(path.name for path in PLANS.iterdir() if path.is_dir())
    return {c.name: c.value for c in columns_of_plan(json.loads(_path(version).read_text()))}


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
        ("2020-07-01 00:00:00+18:01", "string", "timestamp"),  # Java's offsets end at 18 hours
    ],
)  # fmt: skip
def test_refuses_constants_whose_value_is_in_doubt(value, kind, to):
    with pytest.raises(UnsupportedPlanError):
        constant(_cast(value, kind, to), queries.LONDON)
