"""Expressions above an aggregate or join, written back as SQL over the engine's output.

Only expressions of the list below are written; each is written so that Spark's parser and analyzer
make the same expression of it, with every constant in its own type.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from kdirect_spark.slash.catalyst import Node, describe
from kdirect_spark.slash.literals import Constant, constant
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.spark_types import INTEGERS, ddl, decimal_of, quoted

_BINARY = {
    "Add": "+", "Subtract": "-", "Multiply": "*", "Divide": "/", "Remainder": "%",
    "IntegralDivide": "DIV", "EqualTo": "=", "EqualNullSafe": "<=>", "LessThan": "<",
    "LessThanOrEqual": "<=", "GreaterThan": ">", "GreaterThanOrEqual": ">=", "And": "AND",
    "Or": "OR",
}  # fmt: skip
# Functions whose operands in SQL are the children of their expression: name, least, most.
_FUNCTIONS = {
    "Coalesce": ("coalesce", 1, 255), "Greatest": ("greatest", 2, 255),
    "Least": ("least", 2, 255), "Abs": ("abs", 1, 1), "Ceil": ("ceil", 1, 1),
    "Floor": ("floor", 1, 1), "Sqrt": ("sqrt", 1, 1), "IsNaN": ("isnan", 1, 1),
    "If": ("if", 3, 3), "NaNvl": ("nanvl", 2, 2),
    "Upper": ("upper", 1, 1), "Lower": ("lower", 1, 1), "Length": ("length", 1, 1),
    "Concat": ("concat", 1, 255), "CreateNamedStruct": ("named_struct", 2, 510),
    "UnixMillis": ("unix_millis", 1, 1), "UnixMicros": ("unix_micros", 1, 1),
    "UnixSeconds": ("unix_seconds", 1, 1), "SortArray": ("sort_array", 2, 2),
    "MillisToTimestamp": ("timestamp_millis", 1, 1),
    "MicrosToTimestamp": ("timestamp_micros", 1, 1),
    "SecondsToTimestamp": ("timestamp_seconds", 1, 1),
}  # fmt: skip
_SUFFIX = {"byte": "Y", "short": "S", "integer": "", "long": "L"}
_REMEDY = "apply it to the DataFrame that accelerate() gives"


class SqlText:
    """Writes expressions; `column` gives the name in the engine's output of a column of a join."""

    __slots__ = ("_column", "_time_zone")

    def __init__(self, time_zone: str, column: Callable[[Node], str] | None = None) -> None:
        self._time_zone = time_zone
        self._column = column

    def write(self, found: Node) -> str:
        """SQL of an expression.  Raises UnsupportedPlanError for one that is not in the list."""
        kind, parts = found.kind, found.children
        if kind == "@Result":
            return self._name(found, found.get("name"))
        if kind == "@Joined" and self._column is not None:
            return self._name(found, self._column(found))
        if kind == "Literal":
            return self._literal(found)
        if kind in _BINARY and len(parts) == 2:
            return f"({self.write(parts[0])} {_BINARY[kind]} {self.write(parts[1])})"
        if kind in _FUNCTIONS and _FUNCTIONS[kind][1] <= len(parts) <= _FUNCTIONS[kind][2]:
            return f"{_FUNCTIONS[kind][0]}({self._list(parts)})"
        write = _WRITERS.get(kind)
        if write is None:
            raise self._refused(found)
        return write(self, found)

    def _refused(self, found: Node) -> Exception:
        return unsupported(
            f"the expression {describe(found)} above the aggregate or join is not supported",
            _REMEDY,
        )

    def _name(self, found: Node, name: str) -> str:
        if "${" in name:  # the parser puts a setting or a variable there
            raise self._refused(found)
        return quoted(name)

    def _list(self, parts: tuple[Node, ...]) -> str:
        return ", ".join(self.write(part) for part in parts)

    def _one(self, found: Node) -> str:
        if len(found.children) != 1:
            raise self._refused(found)
        return self.write(found.children[0])

    def _cast(self, found: Node) -> str:
        zone = found.get("zone", self._time_zone)
        if zone != self._time_zone:
            raise unsupported(
                f"the expression {describe(found)} was made in the time zone {zone}, and the"
                f" session's is {self._time_zone} now",
                "set spark.sql.session.timeZone before the DataFrame is made",
            )
        return f"CAST({self._one(found)} AS {ddl(found.type)})"

    def _is_null(self, found: Node) -> str:
        return f"({self._one(found)} IS {'NOT ' if found.kind == 'IsNotNull' else ''}NULL)"

    def _not(self, found: Node) -> str:
        return f"(NOT {self._one(found)})"

    def _minus(self, found: Node) -> str:
        return f"(- {self._one(found)})"

    def _in(self, found: Node) -> str:
        if len(found.children) < 2:
            raise self._refused(found)
        return f"({self.write(found.children[0])} IN ({self._list(found.children[1:])}))"

    def _case(self, found: Node) -> str:
        parts = found.children
        if len(parts) < 2:
            raise self._refused(found)
        words = [
            f"WHEN {self.write(parts[i])} THEN {self.write(parts[i + 1])}"
            for i in range(0, len(parts) - 1, 2)
        ]
        last = [f"ELSE {self.write(parts[-1])}"] if len(parts) % 2 else []
        return " ".join(["(CASE", *words, *last, "END)"])

    def _field(self, found: Node) -> str:
        inner, ordinal = found.children[0] if found.children else None, found.get("ordinal")
        if inner is not None and inner.kind == "CreateNamedStruct" and isinstance(ordinal, int):
            if 0 <= 2 * ordinal + 1 < len(inner.children):
                return self.write(inner.children[2 * ordinal + 1])
        name = found.get("name")
        if not isinstance(name, str) and inner is not None:
            # `window_time` names no field of a window, which a join may have put into a case.
            name = _window_field(inner, ordinal)
        if inner is None or not isinstance(name, str):
            raise self._refused(found)
        return f"{self.write(inner)}.{self._name(found, name)}"

    def _conversion(self, found: Node) -> str:
        """Between a timestamp and its microseconds; both are exact."""
        to = {"long": "unix_micros", "timestamp": "timestamp_micros"}.get(found.get("toType"))
        if to is None:
            raise self._refused(found)
        return f"{to}({self._one(found)})"

    def _rounded(self, found: Node) -> str:
        if not 1 <= len(found.children) <= 2:
            raise self._refused(found)
        return f"round({self._list(found.children)})"

    def _between(self, found: Node) -> str:
        body = found.children[0] if len(found.children) == 1 else found
        if body.kind == "With" and len(body.children) == 2:
            condition, definition = body.children
            held = definition.children[0] if len(definition.children) == 1 else definition
            if any(part.kind == "With" for part in (*condition.walk(), *held.walk())):
                raise self._refused(found)
            return self.write(_with(condition, held))
        if body is found:
            raise self._refused(found)
        return self.write(body)

    def _literal(self, found: Node) -> str:
        value = constant(found, self._time_zone)
        if value is None or (isinstance(value.value, str) and not _is_unicode(value.value)):
            raise self._refused(found)
        return literal_sql(value)


def _window_field(found: Node, ordinal: object) -> str | None:
    """The name of a field of ``case when .. then window end``, or None if this is none."""
    if found.kind != "CaseWhen" or len(found.children) != 2 or not isinstance(ordinal, int):
        return None
    both = found.children[1]
    if both.kind != "CreateNamedStruct" or not 0 <= 2 * ordinal < len(both.children):
        return None
    name = both.children[2 * ordinal].get("value")
    return name if isinstance(name, str) else None


def _with(found: Node, held: Node) -> Node:
    if found.kind == "CommonExpressionRef":
        return held
    return found.with_children(tuple(_with(child, held) for child in found.children))


_WRITERS: dict[str, Callable[[SqlText, Node], str]] = {
    "Cast": SqlText._cast,
    "Not": SqlText._not,
    "IsNull": SqlText._is_null,
    "IsNotNull": SqlText._is_null,
    "UnaryMinus": SqlText._minus,
    "In": SqlText._in,
    "CaseWhen": SqlText._case,
    "GetStructField": SqlText._field,
    "PreciseTimestampConversion": SqlText._conversion,
    "Round": SqlText._rounded,
    "Between": SqlText._between,
    "Alias": SqlText._one,
    "KnownNullable": SqlText._one,
    "KnownNotNull": SqlText._one,
}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def literal_sql(value: Constant) -> str:
    """A constant in its own type, whatever the parser's settings."""
    held, kind = value
    if held is None:
        return "NULL" if kind == "void" else f"CAST(NULL AS {ddl(kind)})"
    if kind in INTEGERS:
        least = -(1 << (INTEGERS[kind] - 1))
        return f"CAST('{held}' AS {ddl(kind)})" if held == least else f"{held}{_SUFFIX[kind]}"
    if kind == "boolean":
        return "true" if held else "false"
    if kind == "string":
        # The parser puts settings and variables in the place of ${..}, in texts too.
        plain = all(c.isascii() and c.isprintable() and c not in "'\"\\$" for c in held)
        return f"'{held}'" if plain else f"CAST(X'{held.encode().hex()}' AS string)"
    if kind == "timestamp":
        return f"timestamp_micros({held}L)"
    if kind == "date":
        return f"date_from_unix_date({held})"
    if decimal_of(kind):
        return f"CAST('{held:f}' AS {kind})"
    return f"CAST('{_float_text(held)}' AS {ddl(kind)})"


def _float_text(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value)
