"""Conditions over the columns of an input: a small tree, evaluated by pyarrow on whole columns.

Null follows Spark and SQL: an operator with a null operand gives null; ``false and null``
is false and ``true or null`` is true; ``is_null`` is never null; a condition keeps only the rows
for which it is true.  Comparison of floats follows Spark too: NaN equals NaN and is greater than
any other number.  Integer arithmetic that overflows is an error, as under Spark's ANSI default.

Pure: no state, no I/O.  A tree has a form in JSON, which is checked when it is read.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from kdirect.errors import ConfigError, FormatError
from kdirect.state import schema as types
from kdirect.state.strict import Members, shown

DEEPEST = 100
COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")
ARITHMETIC = ("+", "-", "*")
LOGIC = ("and", "or", "not")
_ARITY = {**dict.fromkeys((*COMPARISONS, *ARITHMETIC, "and", "or"), 2), "not": 1, "is_null": 1}
OPERATORS = tuple(_ARITY)
_WRITE = "join conditions by & | ~, and write a.equals(b) for equality and (a > 1) & (a < 5)"


class _Operators:
    """What lets an expression be written as Python: ``(column("a") > 3) & column("b").is_null()``.

    ``==`` compares trees, as of any dataclass; the conditions are `equals` and `differs`.
    """

    __slots__ = ()

    def equals(self, other: Any) -> Call:
        return Call(op="=", args=(_given(self), _given(other)))

    def differs(self, other: Any) -> Call:
        return Call(op="!=", args=(_given(self), _given(other)))

    def is_null(self) -> Call:
        return Call(op="is_null", args=(_given(self),))

    def __lt__(self, other: Any) -> Call:
        return Call(op="<", args=(_given(self), _given(other)))

    def __le__(self, other: Any) -> Call:
        return Call(op="<=", args=(_given(self), _given(other)))

    def __gt__(self, other: Any) -> Call:
        return Call(op=">", args=(_given(self), _given(other)))

    def __ge__(self, other: Any) -> Call:
        return Call(op=">=", args=(_given(self), _given(other)))

    def __and__(self, other: Any) -> Call:
        return Call(op="and", args=(_given(self), _condition(other)))

    def __or__(self, other: Any) -> Call:
        return Call(op="or", args=(_given(self), _condition(other)))

    def __invert__(self) -> Call:
        return Call(op="not", args=(_given(self),))

    def __add__(self, other: Any) -> Call:
        return Call(op="+", args=(_given(self), _given(other)))

    def __sub__(self, other: Any) -> Call:
        return Call(op="-", args=(_given(self), _given(other)))

    def __mul__(self, other: Any) -> Call:
        return Call(op="*", args=(_given(self), _given(other)))

    def __bool__(self) -> bool:
        # `a > 1 and b > 2` would be `b > 2`, in silence.
        raise ConfigError("expression: a condition is neither true nor false", hint=_WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(_Operators):
    """The value of a column."""

    name: str

    def to_json(self) -> dict[str, Any]:
        return {"column": self.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal(_Operators):
    """A constant.  `value` is None, or a Python value of `type`; timestamps and dates are
    integers (of the unit of the type, days), decimals are ``decimal.Decimal``."""

    value: Any
    type: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", types.type_name(self.type, "literal"))
        if self.value is not None:
            _check_literal(self.value, self.type)

    def to_json(self) -> dict[str, Any]:
        value = self.value
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        elif isinstance(value, decimal.Decimal):
            value = str(value)
        elif isinstance(value, float):
            value = value.hex()
        return {"literal": value, "type": self.type}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(_Operators):
    """An operator of `OPERATORS` applied to its operands."""

    op: str
    args: tuple[Expression, ...]

    def __post_init__(self) -> None:
        arity = _ARITY.get(self.op)
        if arity is None:
            raise ConfigError(
                f"expression: the operator {shown(self.op)} is not supported",
                hint="use " + " ".join(OPERATORS),
            )
        if len(self.args) != arity:
            raise ConfigError(
                f"expression: {self.op} has {len(self.args)} operands", hint=f"it takes {arity}"
            )

    def to_json(self) -> dict[str, Any]:
        return {"call": self.op, "args": [arg.to_json() for arg in self.args]}


Expression: TypeAlias = Column | Literal | Call


def column(name: str) -> Column:
    """The column of that name."""
    return Column(name=name)


def literal(value: Any, kind: str | None = None) -> Literal:
    """A constant of the type `kind`, or of the type that the Python value suggests."""
    if isinstance(value, datetime.datetime):
        whole = value if value.tzinfo else value.replace(tzinfo=datetime.timezone.utc)
        since = whole - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
        value, kind = since // datetime.timedelta(microseconds=1), kind or "timestamp(us)"
    elif isinstance(value, datetime.date):
        value, kind = (value - datetime.date(1970, 1, 1)).days, kind or "date32"
    return Literal(value=value, type=kind or _suggested(value))


def _suggested(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "bool"
    if isinstance(value, decimal.Decimal):
        _, digits, exponent = value.as_tuple()
        scale = max(0, -exponent) if isinstance(exponent, int) else 0
        shift = max(0, exponent) if isinstance(exponent, int) else 0
        return f"decimal128({max(len(digits) + shift, scale, 1)},{scale})"
    found = {int: "int64", float: "float64", str: "string", bytes: "binary"}.get(type(value))
    if found is None:
        raise ConfigError(
            f"literal {shown(value)}: a {type(value).__name__} is not supported",
            hint="use a number, text, bytes, a date, a datetime, True, False or None",
        )
    return found


def _given(value: Any) -> Expression:
    if value is None:
        raise ConfigError("expression: nothing is equal to None", hint="write a.is_null()")
    return value if isinstance(value, Column | Literal | Call) else literal(value)


def _condition(value: Any) -> Expression:
    """An operand of & and |.  True and False come of `==` and `in`, which compare no rows."""
    if isinstance(value, bool):
        raise ConfigError(f"expression: {value} is no condition", hint=_WRITE)
    return _given(value)


def _check_literal(value: Any, kind: str) -> None:
    whole = kind in types.INTEGERS or kind.startswith(("timestamp", "date32"))
    fits = (
        (kind == "bool" and isinstance(value, bool))
        or (whole and isinstance(value, int) and not isinstance(value, bool))
        or (kind in types.FLOATS and isinstance(value, float))
        or (kind == "string" and isinstance(value, str))
        or (kind.startswith("binary") and isinstance(value, bytes))
        or (types.is_decimal(kind) and isinstance(value, decimal.Decimal))
    )
    if fits:
        try:
            _scalar(value, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError):
            fits = False
    if not fits:
        raise ConfigError(
            f"literal {shown(value)}: this is no {kind}", hint="change the value or its type"
        )


def _scalar(value: Any, kind: str) -> pa.Scalar:
    return pa.scalar(value, types.arrow_type(kind))


# -- JSON ------------------------------------------------------------------------------------------


def expression_from_json(value: Any, depth: int = 0) -> Expression:
    """The tree that `to_json` of its root wrote.  Raises FormatError for anything else."""
    if depth > DEEPEST:
        raise FormatError(f"expression: it is deeper than {DEEPEST} operators")
    if not isinstance(value, dict):
        raise FormatError(f"expression: {shown(value)} is not an object")
    members = Members(value, "expression")
    found: Expression
    try:
        if "column" in value:
            found = Column(name=members.text("column", empty=False))
        elif "literal" in value:
            found = _literal_from_json(members.take("literal"), members.text("type"))
        else:
            op = members.choice("call", OPERATORS)
            args = members.each("args", lambda arg: expression_from_json(arg, depth + 1))
            found = Call(op=op, args=args)
    except ConfigError as e:
        raise FormatError(str(e)) from e
    members.close()
    return found


def _literal_from_json(value: Any, kind: str) -> Literal:
    kind = types.type_name(kind, "literal")
    if value is None:
        return Literal(value=None, type=kind)
    try:
        if kind.startswith("binary"):
            value = base64.b64decode(value, validate=True)
        elif types.is_decimal(kind):
            if not isinstance(value, str):
                raise ValueError(value)
            value = decimal.Decimal(value)
        elif kind in types.FLOATS:
            value = float.fromhex(value)
    except (ValueError, TypeError, binascii.Error, decimal.InvalidOperation) as e:
        raise FormatError(f"expression: literal {shown(value)} is no {kind}") from e
    return Literal(value=value, type=kind)


# -- types -----------------------------------------------------------------------------------------


def columns_of(expression: Expression | None) -> frozenset[str]:
    """Names of the columns that an expression reads."""
    return frozenset(node.name for node in _nodes(expression) if isinstance(node, Column))


def _nodes(expression: Expression | None) -> Iterator[Expression]:
    if expression is not None:
        yield expression
        if isinstance(expression, Call):
            for arg in expression.args:
                yield from _nodes(arg)


def type_of(expression: Expression, kinds: Mapping[str, str]) -> str:
    """The type of an expression over columns of these types.  Raises ConfigError for a column that
    is not there and for operands that do not go together."""
    if isinstance(expression, Column):
        if expression.name not in kinds:
            raise ConfigError(
                f"expression: there is no column {expression.name}",
                hint="the schema has " + ", ".join(kinds),
            )
        return kinds[expression.name]
    if isinstance(expression, Literal):
        return expression.type
    if not isinstance(expression, Call):
        raise ConfigError(f"expression: {shown(expression)} is no condition", hint=_WRITE)
    found = tuple(type_of(arg, kinds) for arg in expression.args)
    op = expression.op
    if op == "is_null":
        return "bool"
    if op in LOGIC:
        _need(all(kind == "bool" for kind in found), op, found, "conditions")
        return "bool"
    if op in COMPARISONS:
        _need(_comparable(*found), op, found, "two values of one kind")
        return "bool"
    _need(all(kind in types.INTEGERS or kind in types.FLOATS for kind in found), op, found,
          "integers or floats")  # fmt: skip
    return "float64" if any(kind in types.FLOATS for kind in found) else "int64"


def _need(holds: bool, op: str, found: tuple[str, ...], wanted: str) -> None:
    if not holds:
        raise ConfigError(
            f"expression: {op} does not go with {' and '.join(found)}", hint=f"it takes {wanted}"
        )


def _comparable(left: str, right: str) -> bool:
    if types.is_number(left) or types.is_number(right):
        return types.is_number(left) and types.is_number(right)
    for family in ("binary", "timestamp"):
        if left.startswith(family):
            return right.startswith(family)
    return left == right


# -- evaluation ------------------------------------------------------------------------------------


def evaluate(expression: Expression, columns: Mapping[str, Any], rows: int) -> pa.Array:
    """The value of an expression for each of `rows` rows.  `columns` are Arrow arrays, or what
    ``pa.array`` takes.  Raises FormatError if integers overflow."""
    value = _value(expression, columns)
    if isinstance(value, pa.Scalar):
        return pa.repeat(value, rows)
    return value.combine_chunks() if isinstance(value, pa.ChunkedArray) else value


def matches(expression: Expression, columns: Mapping[str, Any], rows: int) -> pa.Array:
    """True for each row that a condition keeps, and false, never null, for the others."""
    return pc.fill_null(evaluate(expression, columns, rows), False)


def _value(expression: Expression, columns: Mapping[str, Any]) -> Any:
    if isinstance(expression, Column):
        found = columns[expression.name]
        return found if isinstance(found, pa.Array | pa.ChunkedArray) else pa.array(found)
    if isinstance(expression, Literal):
        return _scalar(expression.value, expression.type)
    args = [_value(arg, columns) for arg in expression.args]
    op = expression.op
    if op in COMPARISONS:
        return _compare(op, *args)
    if op in ARITHMETIC:
        try:
            return _ARITHMETIC[op](*(_widened(arg, args) for arg in args))
        except pa.ArrowInvalid as e:
            raise FormatError(
                f"expression: {op} overflows 64 bits", hint="filter such rows, or use floats"
            ) from e
    return _LOGIC[op](*args)


_LOGIC: dict[str, Callable[..., Any]] = {
    "and": pc.and_kleene,
    "or": pc.or_kleene,
    "not": pc.invert,
    "is_null": pc.is_null,
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": pc.add_checked,
    "-": pc.subtract_checked,
    "*": pc.multiply_checked,
}
_NANOSECONDS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_COMPARE: dict[str, Callable[..., Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def _widened(value: Any, args: list[Any]) -> Any:
    """An operand of arithmetic as int64, or as float64 if any of them is a float."""
    if any(pa.types.is_floating(arg.type) for arg in args):
        return value.cast(pa.float64(), safe=False)
    return value.cast(pa.int64())


def _compare(op: str, left: Any, right: Any) -> Any:
    if pa.types.is_fixed_size_binary(left.type) or pa.types.is_fixed_size_binary(right.type):
        left, right = left.cast(pa.binary()), right.cast(pa.binary())
    if pa.types.is_floating(left.type) or pa.types.is_floating(right.type):
        left, right = (side.cast(pa.float64(), safe=False) for side in (left, right))
        return _compare_floats(op, left, right)
    try:
        return _COMPARE[op](left, right)
    except pa.ArrowInvalid:
        # The type that Arrow takes for both cannot hold all of these values.
        return _COMPARE[op](*_widest(left, right))


def _widest(*sides: Any) -> list[Any]:
    """Whole numbers, decimals or timestamps as decimals of 76 digits, which hold all of them."""
    found = []
    for side in sides:
        if pa.types.is_timestamp(side.type):
            unit = pa.scalar(decimal.Decimal(_NANOSECONDS[side.type.unit]), pa.decimal128(10, 0))
            side = pc.multiply(side.cast(pa.int64()).cast(pa.decimal128(19, 0)), unit)
        elif pa.types.is_integer(side.type):
            side = side.cast(pa.decimal128(20, 0))
        found.append(side)
    scale = max(side.type.scale for side in found)
    return [side.cast(pa.decimal256(76, scale)) for side in found]


def _compare_floats(op: str, left: Any, right: Any) -> Any:
    """Spark's order of floats: NaN equals NaN and is greater than any other number."""
    nan_left, nan_right = pc.is_nan(left), pc.is_nan(right)
    equal = pc.or_(pc.equal(left, right), pc.and_(nan_left, nan_right))
    less = pc.or_(pc.less(left, right), pc.and_(pc.invert(nan_left), nan_right))
    if op == "=":
        return equal
    if op == "!=":
        return pc.invert(equal)
    if op == "<":
        return less
    if op == "<=":
        return pc.or_(less, equal)
    return pc.invert(pc.or_(less, equal) if op == ">" else less)
