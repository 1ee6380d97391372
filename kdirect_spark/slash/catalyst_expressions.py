"""Conditions below an aggregate or join, as conditions of the engine.

The law: the result keeps exactly the rows that Spark's condition keeps.  The engine compares whole
numbers and decimals by value, and everything with a float as float64; so a cast that loses nothing
may go, and one that does not is refused, as is arithmetic that could overflow in Spark.  Pure.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kdirect.state import schema as types
from kdirect.state.expressions import Call, Column, Expression, Literal
from kdirect_spark.slash.catalyst import Node, describe
from kdirect_spark.slash.catalyst_windows import event_time
from kdirect_spark.slash.literals import Constant, constant
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.spark_types import DIGITS, FLOATS, INTEGERS, decimal_of

_COMPARISONS = {
    "EqualTo": "=", "LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}  # fmt: skip
_MIRRORED = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_ARITHMETIC = {"Add": "+", "Subtract": "-", "Multiply": "*"}
_UNIT_US = {"s": 1_000_000, "ms": 1_000, "us": 1}
_REMEDY = (
    "compare columns and constants by = != < <= > >= <=> in between is null and or not, compute"
    " the rest before the rows are written to the topic"
)
_MOST_ALTERNATIVES = 10_000


def conjuncts(found: Node) -> tuple[Node, ...]:
    """The conditions that ``and`` joins."""
    if found.kind == "And" and len(found.children) == 2:
        return conjuncts(found.children[0]) + conjuncts(found.children[1])
    return (found,)


def all_of(parts: tuple[Expression, ...]) -> Expression | None:
    """A condition that is true where all are."""
    return _balanced("and", parts) if parts else None


def _balanced(op: str, parts: tuple[Expression, ...]) -> Expression:
    """A tree of little depth."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return Call(op=op, args=(_balanced(op, parts[:half]), _balanced(op, parts[half:])))


@dataclass(frozen=True, slots=True)
class _Operand:
    """A value: how the engine computes it, its type there and in Spark; of whole numbers the least
    and the greatest one that it can be.  A constant has its value in Spark."""

    expression: Expression
    kind: str
    spark: str
    low: int = 0
    high: int = 0
    fixed: Constant | None = None


class Conditions:
    """Reads the conditions of one input, whose columns have these types in the engine."""

    __slots__ = ("_kinds", "_time_zone")

    def __init__(self, kinds: Mapping[str, str], time_zone: str) -> None:
        self._kinds = kinds
        self._time_zone = time_zone

    def read(self, found: Node) -> Expression:
        """The engine's form of a condition.  Raises UnsupportedPlanError."""
        read = _READERS.get(found.kind)
        if found.kind in _COMPARISONS and len(found.children) == 2:
            return self._comparison(_COMPARISONS[found.kind], *found.children, found)
        if read is not None:
            return read(self, found)
        value = constant(found, self._time_zone)
        if value is not None and value.type in ("boolean", "void"):
            return Literal(value=value.value, type="bool")
        if found.kind == "@Column" and found.type == "boolean":
            return self._operand(found).expression
        raise self._refused(found)

    def _refused(self, found: Node, why: str = "") -> Exception:
        where = f" ({why})" if why else ""
        return unsupported(f"the condition {describe(found)} is not supported{where}", _REMEDY)

    # -- logic

    def _parts(self, found: Node, count: int) -> tuple[Node, ...]:
        if len(found.children) != count:
            raise self._refused(found)
        return found.children

    def _logic(self, found: Node) -> Expression:
        op = found.kind.lower()
        return Call(op=op, args=tuple(self.read(part) for part in self._parts(found, 2)))

    def _not(self, found: Node) -> Expression:
        return Call(op="not", args=(self.read(self._parts(found, 1)[0]),))

    def _is_null(self, found: Node) -> Expression:
        inner = self._parts(found, 1)[0]
        time = event_time(inner)
        if time is not None and self._kinds.get(time.column) is not None:
            # A conversion of an integer to a timestamp makes no null of a value.
            tested: Expression = Column(name=time.column)
        else:
            tested = self._tested(inner)
        missing = Call(op="is_null", args=(tested,))
        return missing if found.kind == "IsNull" else Call(op="not", args=(missing,))

    def _tested(self, found: Node) -> Expression:
        """What is tested for null: a value or a condition."""
        if found.kind in _READERS or found.kind in _COMPARISONS:
            return self.read(found)
        return self._operand(found).expression

    def _between(self, found: Node) -> Expression:
        """``Between``, whose one child is what it means: With(condition, definition)."""
        body = self._parts(found, 1)[0]
        if body.kind != "With" or len(body.children) != 2:
            return self.read(body)
        condition, definition = body.children
        held = self._parts(definition, 1)[0]
        if any(part.kind == "With" for part in (*condition.walk(), *held.walk())):
            raise self._refused(found, "a between within another")
        return self.read(_replaced(condition, held))

    def _in(self, found: Node) -> Expression:
        if not 2 <= len(found.children) <= _MOST_ALTERNATIVES:
            raise self._refused(found)
        value, *choices = found.children
        return _balanced(
            "or", tuple(self._comparison("=", value, choice, found) for choice in choices)
        )

    def _null_safe(self, found: Node) -> Expression:
        left, right = self._parts(found, 2)
        if self._is_null_constant(left) or self._is_null_constant(right):
            tested = right if self._is_null_constant(left) else left
            return Call(op="is_null", args=(self._tested(tested),))
        equal = self._comparison("=", left, right, found)
        one, other = (Call(op="is_null", args=(self._tested(side),)) for side in (left, right))
        both_there = Call(op="not", args=(Call(op="or", args=(one, other)),))
        return Call(
            op="or",
            args=(
                Call(op="and", args=(one, other)),
                Call(op="and", args=(both_there, equal)),
            ),
        )

    def _is_null_constant(self, found: Node) -> bool:
        value = constant(found, self._time_zone)
        return value is not None and value.value is None

    def _is_nan(self, found: Node) -> Expression:
        held = self._operand(self._parts(found, 1)[0])
        if held.kind not in types.FLOATS:
            raise self._refused(found)
        nan = Literal(value=float("nan"), type=held.kind)
        there = Call(op="not", args=(Call(op="is_null", args=(held.expression,)),))
        return Call(op="and", args=(there, Call(op="=", args=(held.expression, nan))))

    # -- comparisons

    def _comparison(self, op: str, left: Node, right: Node, whole: Node) -> Expression:
        for one, other, sign in ((left, right, op), (right, left, _MIRRORED[op])):
            time = event_time(one)
            if time is not None and time.unit:
                return self._time_comparison(sign, time.column, time.unit, other, whole)
        a, b = self._operand(left), self._operand(right)
        if a.fixed is not None and a.fixed.value is None:
            a = self._null_like(b, whole)
        elif b.fixed is not None and b.fixed.value is None:
            b = self._null_like(a, whole)
        self._check(a, b, op, whole)
        return Call(op=op, args=(a.expression, b.expression))

    def _check(self, a: _Operand, b: _Operand, op: str, whole: Node) -> None:
        if a.spark != b.spark:
            raise self._refused(whole, f"{a.spark} and {b.spark}")
        if a.spark in FLOATS:
            if a.kind not in types.FLOATS and b.kind not in types.FLOATS:
                raise self._refused(whole, "two numbers that Spark compares as floats")
        elif a.spark in INTEGERS or decimal_of(a.spark):
            if a.kind in types.FLOATS or b.kind in types.FLOATS:
                raise self._refused(whole)
        elif a.spark == "boolean" and op != "=":
            raise self._refused(whole, "an order of booleans")
        elif a.spark not in ("string", "binary", "date", "timestamp", "boolean"):
            raise self._refused(whole, f"values of the type {a.spark}")

    def _null_like(self, other: _Operand, whole: Node) -> _Operand:
        if other.fixed is not None and other.fixed.value is None:
            raise self._refused(whole, "null compared with null")
        kind = "int64" if other.kind in types.INTEGERS else other.kind
        nothing = Literal(value=None, type=kind)
        return _Operand(nothing, kind, other.spark, fixed=Constant(None, other.spark))

    def _time_comparison(
        self, op: str, column: str, unit: str, other: Node, whole: Node
    ) -> Expression:
        """An integer of `unit` since 1970, which Spark compares as a timestamp."""
        value = constant(other, self._time_zone)
        if value is None or value.type != "timestamp":
            raise self._refused(whole, "a converted time is compared with constants only")
        if value.value is None:
            return Literal(value=None, type="bool")
        whole_units, rest = divmod(value.value, _UNIT_US[unit])
        bound = whole_units if op in ("=", "<=", ">") or not rest else whole_units + 1
        given = Column(name=column)
        test = Call(op=op, args=(given, Literal(value=bound, type="int64")))
        if op == "=" and rest:
            # False for a value and null for null: no whole number is this time.
            return Call(op="and", args=(test, Call(op="<", args=(given, given))))
        return test

    # -- values

    def _operand(self, found: Node) -> _Operand:
        value = constant(found, self._time_zone)
        if value is not None:
            return self._constant(value, found)
        if found.kind == "@Column":
            return self._column(found)
        if found.kind == "Cast" and len(found.children) == 1:
            return self._cast(found)
        if found.kind in _ARITHMETIC and len(found.children) == 2:
            return self._arithmetic(found)
        raise self._refused(found)

    def _constant(self, value: Constant, found: Node) -> _Operand:
        held, kind = value.value, _constant_kind(value)
        if kind is None:
            raise self._refused(found, f"a constant of the type {value.type}")
        if isinstance(held, decimal.Decimal) and kind == "int64":
            held = int(held)
        low = held if isinstance(held, int) and not isinstance(held, bool) else 0
        return _Operand(Literal(value=held, type=kind), kind, value.type, low, low, value)

    def _column(self, found: Node) -> _Operand:
        name = found.get("name")
        kind = self._kinds[name]
        if kind == "timestamp(ns)":
            raise self._refused(
                found, f"column {name} has nanoseconds, of which Spark sees microseconds only"
            )
        low, high = _range(found.type)
        return _Operand(Column(name=name), kind, found.type, low, high)

    def _cast(self, found: Node) -> _Operand:
        inner, to = self._operand(found.children[0]), found.type
        if inner.spark == to:
            return inner
        if inner.fixed is None and _keeps_value(inner.spark, to):
            return _Operand(inner.expression, inner.kind, to, inner.low, inner.high)
        raise self._refused(found, f"the cast of {inner.spark} to {to}")

    def _arithmetic(self, found: Node) -> _Operand:
        op = _ARITHMETIC[found.kind]
        a, b = (self._operand(child) for child in found.children)
        call = Call(op=op, args=(a.expression, b.expression))
        if a.spark != b.spark:
            raise self._refused(found)
        if a.spark == "double" and "float64" in (a.kind, b.kind):
            return _Operand(call, "float64", "double")
        if a.spark not in INTEGERS or (a.fixed and b.fixed):
            raise self._refused(found)
        ends = [_apply(op, x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = _range(a.spark)
        if min(ends) < low or max(ends) > high:
            raise unsupported(
                f"the arithmetic {describe(found)} is not supported, since it may overflow the type"
                f" {a.spark}",
                "compare the column itself, or cast it to a wider type first",
            )
        return _Operand(call, "int64", a.spark, min(ends), max(ends))


_READERS: dict[str, Callable[[Conditions, Node], Expression]] = {
    "And": Conditions._logic,
    "Or": Conditions._logic,
    "Not": Conditions._not,
    "IsNull": Conditions._is_null,
    "IsNotNull": Conditions._is_null,
    "Between": Conditions._between,
    "In": Conditions._in,
    "EqualNullSafe": Conditions._null_safe,
    "IsNaN": Conditions._is_nan,
}


def _replaced(found: Node, held: Node) -> Node:
    if found.kind == "CommonExpressionRef":
        return held
    return found.with_children(tuple(_replaced(child, held) for child in found.children))


def _range(name: str) -> tuple[int, int]:
    """The least and the greatest number of a type of integers; (0, 0) for other types."""
    if name not in INTEGERS:
        return 0, 0
    half = 1 << (INTEGERS[name] - 1)
    return -half, half - 1


def _apply(op: str, x: int, y: int) -> int:
    return x + y if op == "+" else x - y if op == "-" else x * y


def _constant_kind(value: Constant) -> str | None:
    """The engine's type for a constant."""
    if value.type in INTEGERS:
        return "int64"
    if digits := decimal_of(value.type):
        held = value.value
        whole = held is not None and held == int(held) and abs(held) < 1 << 63
        return "int64" if whole else "decimal128({},{})".format(*digits)
    return {
        "double": "float64", "float": "float32", "boolean": "bool", "void": "bool",
        "string": "string", "date": "date32", "timestamp": "timestamp(us)", "binary": "binary",
    }.get(value.type)  # fmt: skip


def _keeps_value(of: str, to: str) -> bool:
    """Does a cast keep every value, and its comparison with others of `to` in the engine?"""
    if of in INTEGERS and to in INTEGERS:
        return INTEGERS[of] <= INTEGERS[to]
    if of in INTEGERS and to in FLOATS:
        # To double the engine casts as Spark does.  A float holds no more than 24 bits.
        return to == "double" or INTEGERS[of] <= 16
    if of == "float" and to == "double":
        return True
    wide = decimal_of(to)
    if wide is None:
        return False
    if of in INTEGERS:
        return wide[0] - wide[1] >= DIGITS[of]
    narrow = decimal_of(of)
    return (
        narrow is not None and wide[1] >= narrow[1] and wide[0] - wide[1] >= narrow[0] - narrow[1]
    )
