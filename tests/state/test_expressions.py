"""Conditions: SQL's three-valued logic, by comparison with plain Python."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, FormatError
from kdirect.state.expressions import (
    COMPARISONS,
    DEEPEST,
    Call,
    Column,
    Literal,
    column,
    columns_of,
    evaluate,
    expression_from_json,
    literal,
    matches,
    type_of,
)
from kdirect.state.strict import canonical, parse

KINDS = {"i": "int64", "j": "int32", "f": "float64", "s": "string", "b": "bool"}
ARROW = {"i": pa.int64(), "j": pa.int32(), "f": pa.float64(), "s": pa.string(), "b": pa.bool_()}


def order(value: Any) -> Any:
    """Spark's order of floats: NaN is equal to itself and greatest."""
    if isinstance(value, float) and math.isnan(value):
        return (1, 0.0)
    return (0, value) if isinstance(value, int | float) else value


def plain(expression: Any, row: dict[str, Any]) -> Any:
    """The value of an expression for one row, by SQL's rules."""
    if isinstance(expression, Column):
        return row[expression.name]
    if isinstance(expression, Literal):
        return expression.value
    args = [plain(arg, row) for arg in expression.args]
    op = expression.op
    if op == "is_null":
        return args[0] is None
    if op == "and":
        return False if False in args else None if None in args else True
    if op == "or":
        return True if True in args else None if None in args else False
    if None in args:
        return None
    if op == "not":
        return not args[0]
    if op in COMPARISONS:
        a, b = map(order, args)
        return {"=": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[op]
    return {"+": sum(args), "-": args[0] - args[1], "*": args[0] * args[1]}[op]


small = st.integers(-9, 9)
floats = st.sampled_from([0.0, -1.5, 2.0, math.nan, math.inf])
texts = st.sampled_from(["", "a", "b"])
row_of = st.fixed_dictionaries(
    {
        "i": st.none() | small,
        "j": st.none() | small,
        "f": st.none() | floats,
        "s": st.none() | texts,
        "b": st.none() | st.booleans(),
    }
)
numbers = st.recursive(
    st.sampled_from([column("i"), column("j"), literal(3), literal(None, "int64")]),
    lambda inner: st.builds(
        lambda op, a, b: Call(op=op, args=(a, b)), st.sampled_from("+-*"), inner, inner
    ),
    max_leaves=4,
)


def comparison(operands: Any) -> Any:
    return st.builds(
        lambda op, a, b: Call(op=op, args=(a, b)), st.sampled_from(COMPARISONS), operands, operands
    )


conditions = st.recursive(
    comparison(numbers)
    | comparison(numbers | st.just(column("f")) | floats.map(literal))
    | comparison(st.just(column("s")) | texts.map(literal))
    | st.sampled_from([column("b"), column("s").is_null(), literal(True), literal(None, "bool")]),
    lambda inner: (
        st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a, b: a | b, inner, inner)
        | st.builds(lambda a: ~a, inner)
        | st.builds(lambda a: a.is_null(), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(conditions, st.lists(row_of, max_size=6))
def test_conditions_follow_sql(condition: Any, rows: list[dict]) -> None:
    columns = {n: pa.array([row[n] for row in rows], ARROW[n], from_pandas=False) for n in ARROW}
    wanted = [plain(condition, row) for row in rows]
    assert type_of(condition, KINDS) == "bool"
    assert evaluate(condition, columns, len(rows)).to_pylist() == wanted
    assert matches(condition, columns, len(rows)).to_pylist() == [w is True for w in wanted]
    assert expression_from_json(parse(canonical(condition.to_json()), "condition")) == condition \
        or "nan" in canonical(condition.to_json())  # fmt: skip
    assert columns_of(condition) <= KINDS.keys()


@pytest.mark.parametrize(
    "given_literal",
    [
        literal(5),
        literal("text"),
        literal(b"\x00\xff"),
        literal(0.1),
        literal(decimal.Decimal("-12.50")),
        literal(decimal.Decimal("1E+3")),
        literal(datetime.date(1969, 12, 31)),
        literal(datetime.datetime(1970, 1, 1, 0, 0, 1)),
        literal(None, "string"),
        literal(7, "int8"),
    ],
)
def test_literals_survive_json(given_literal: Literal) -> None:
    assert expression_from_json(parse(canonical(given_literal.to_json()), "it")) == given_literal


def test_times_and_decimals_compare() -> None:
    columns = {
        "at": pa.array([999_999, 1_000_000], pa.timestamp("us")),
        "cost": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
        "id": pa.array([b"ab", b"cd"], pa.binary(2)),
    }
    late = column("at") >= datetime.datetime(1970, 1, 1, 0, 0, 1)
    assert evaluate(late, columns, 2).to_pylist() == [False, True]
    assert evaluate(column("cost") > 1, columns, 2).to_pylist() == [True, None]
    assert evaluate(column("id").equals(b"cd"), columns, 2).to_pylist() == [False, True]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array([2**64 - 1, 2**63, 5, None], pa.uint64()), pa.array([-1, 5, 5, 1], pa.int64())),
        (pa.array([2**64 - 1, 0], pa.uint64()), 3),
        (pa.array([2**53 + 1, -(2**63)], pa.int64()), 0.5),
        (pa.array([2**64 - 1], pa.uint64()), 0.5),
        (pa.array(["1.5", "1"], pa.string()).cast(pa.decimal128(38, 30)), 1),
        (
            pa.array(["9" * 38], pa.string()).cast(pa.decimal128(38, 0)),
            pa.array(["0.5"], pa.string()).cast(pa.decimal128(38, 38)),
        ),
    ],
    ids=str,
)
def test_numbers_of_any_size_compare(left: pa.Array, right: Any) -> None:
    given_columns = {"a": left, "b": right}
    other = column("b") if isinstance(right, pa.Array) else right
    values = right.to_pylist() if isinstance(right, pa.Array) else [right] * len(left)
    for op, condition in ((">", column("a") > other), ("=", column("a").equals(other))):
        wanted = [
            None if a is None else a > b if op == ">" else a == b
            for a, b in zip(left.to_pylist(), values, strict=True)
        ]
        assert evaluate(condition, given_columns, len(left)).to_pylist() == wanted


def test_times_of_any_unit_compare() -> None:
    columns = {
        "s": pa.array([10**11, 0], pa.timestamp("s")),
        "n": pa.array([1, 1], pa.timestamp("ns")),
    }
    assert evaluate(column("s") > column("n"), columns, 2).to_pylist() == [True, False]
    later = column("n") > datetime.datetime(2500, 1, 1)
    assert evaluate(later, columns, 2).to_pylist() == [False, False]


def test_large_integers_and_floats_add() -> None:
    found = evaluate(column("i") + 0.5, {"i": pa.array([2**53 + 1])}, 1)
    assert found.to_pylist() == [float(2**53)]


def test_integers_that_overflow_are_an_error() -> None:
    columns = {"i": pa.array([1 << 62], pa.int64())}
    with pytest.raises(FormatError, match="overflows"):
        evaluate((column("i") * 2) > 0, columns, 1)


def test_a_column_may_be_chunked() -> None:
    columns = {"i": pa.chunked_array([[1], [2, None]])}
    assert matches(column("i") > 1, columns, 3).to_pylist() == [False, True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Call(op="/", args=(column("i"), column("j"))), "operator '/' is not supported"),
        (lambda: Call(op="not", args=()), "it takes 1"),
        (lambda: literal(object()), "object is not supported"),
        (lambda: Literal(value=300, type="int8"), "this is no int8"),
        (lambda: Literal(value="x", type="int64"), "this is no int64"),
        (lambda: type_of(column("b") + 1, KINDS), r"\+ does not go with bool and int64"),
        (lambda: type_of(column("i") & column("b"), KINDS), "it takes conditions"),
        (lambda: type_of(column("x") > 1, KINDS), "no column x"),
        # What Python would make True or False of, and rows would be kept that nobody asked for.
        (lambda: (column("i") > 1) and column("j") > 2, "neither true nor false"),
        (lambda: 1 < column("i") < 5, "neither true nor false"),
        (lambda: not column("b"), r"join conditions by & \| ~"),
        (lambda: (column("i") > 1) & (column("j") == 2), r"False is no condition; .*a\.equals"),
        (lambda: (column("i") > 1) | (column("j") != 2), "True is no condition"),
        (lambda: type_of(column("i") == 2, KINDS), "False is no condition"),
        (lambda: type_of("i = 2", KINDS), "'i = 2' is no condition"),
        (lambda: column("i").equals(None), r"write a\.is_null"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, {"column": ""}, {"column": 1}, {"column": "a", "more": 1}, {"literal": 1},
        {"literal": "?", "type": "binary"}, {"literal": 1, "type": "decimal128(5,1)"},
        {"literal": "x", "type": "float64"}, {"literal": 1, "type": "table"},
        {"call": "=", "args": []}, {"call": "eval", "args": []}, {"call": "not", "args": 3},
    ],
)  # fmt: skip
def test_json_that_is_no_expression(value: Any) -> None:
    with pytest.raises((FormatError, ConfigError)):
        expression_from_json(value)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    tree: Any = {"column": "b"}
    for _ in range(DEEPEST + 1):
        tree = {"call": "not", "args": [tree]}
    with pytest.raises(FormatError, match="deeper"):
        expression_from_json(tree)
