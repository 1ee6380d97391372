"""Spark's analyzed plan, as the JSON of `analyzed().toJSON()` and the text of `treeString` have it.

Owns the shapes of that JSON: a plan is a list of nodes in pre-order, and so is each expression in
it.  What does not have these shapes raises `FormatError`.  Nothing here knows what a node means,
but for two things: the delay of a watermark and the word ``try_`` stand in the text alone, so both
are taken from there.  No pyspark, no py4j.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kdirect.errors import FormatError
from kdirect.state.strict import canonical, parse, shown
from kdirect_spark.slash.refusal import unsupported

MOST_NODES = 200_000
LARGEST = 50_000  # nodes of one expression, after the columns below were put into it
_SPARK = "org.apache.spark.sql."
_ZONED = ("Cast", "TimestampAddInterval")  # of these it matters
# Members that say which child is which; the order of the children is enough.
_PLACES = frozenset(
    (
        "class", "num-children", "child", "children", "left", "right", "branches", "elseValue",
        "value", "list", "aggregateFunction", "filter", "valueExpr", "orderingExpr", "interval",
        "start", "input", "lower", "upper", "proj", "replacement", "defs", "predicate", "trueValue",
        "falseValue", "timeZoneId", "evalMode", "evalContext", "resultId", "metadata", "qualifier",
        "explicitMetadata", "nonInheritableMetadataKeys", "exprId",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """An expression: its class without the package, its operands, and what else it says, in the
    order of the names.  A literal has `value` and `type`, an attribute `id`, `name`, `type` and
    `nullable`, an alias `id` and `name`; whatever has a type has it as `type`.  `zone` is the time
    zone that the session had when it was analyzed, of what depends on it."""

    kind: str
    children: tuple[Node, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    size: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        size = 1 + sum(child.size for child in self.children)
        if size > LARGEST:
            raise unsupported(
                f"an expression has more than {LARGEST} parts once the columns below it are put in",
                "compute such columns before they are written to the topic",
            )
        object.__setattr__(self, "size", size)

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.values).get(name, default)

    @property
    def type(self) -> str:
        """The type that the node says it has, or "" where it says none."""
        return self.get("type", "")

    def with_children(self, children: tuple[Node, ...]) -> Node:
        same = all(a is b for a, b in zip(children, self.children))
        return self if same else Node(self.kind, children, self.values)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


def node(kind: str, *children: Node, **values: Any) -> Node:
    """A node made by the reader itself."""
    return Node(kind, children, tuple(sorted(values.items())))


def text_literal(value: str) -> Node:
    return node("Literal", type="string", value=value)


@dataclass(frozen=True, slots=True)
class Tree:
    """A node of the plan.  `members` are its own: expressions, lists of them, lists of such lists,
    or JSON that is kept as text."""

    kind: str
    children: tuple[Tree, ...]
    members: tuple[tuple[str, Any], ...]
    delay_us: int | None = None

    def _member(self, name: str) -> Any:
        found = dict(self.members)
        if name not in found:
            raise FormatError(f"plan: {self.kind} has no member {name}")
        return found[name]

    def expression(self, name: str) -> Node:
        value = self._member(name)
        if not isinstance(value, Node):
            raise FormatError(f"plan: {self.kind}: {name} is no expression")
        return value

    def expressions(self, name: str) -> tuple[Node, ...]:
        value = self._member(name)
        if not isinstance(value, tuple) or not all(isinstance(v, Node) for v in value):
            raise FormatError(f"plan: {self.kind}: {name} are no expressions")
        return value

    def lists(self, name: str) -> tuple[tuple[Node, ...], ...]:
        value = self._member(name)
        if not isinstance(value, tuple) or not all(
            isinstance(v, tuple) and all(isinstance(e, Node) for e in v) for v in value
        ):
            raise FormatError(f"plan: {self.kind}: {name} are no lists of expressions")
        return value

    def has(self, name: str) -> bool:
        return any(n == name and v != "null" for n, v in self.members)

    def text(self, name: str) -> str:
        value = self._member(name)
        if not isinstance(value, str):
            raise FormatError(f"plan: {self.kind}: {name} is an expression")
        return value

    def number(self, name: str) -> int:
        value = self.text(name)
        if not value.isdecimal() or len(value) > 18:
            raise FormatError(f"plan: {self.kind}: {name}: {shown(value)} is no number")
        return int(value)

    def only(self) -> Tree:
        return self.child(0, 1)

    def child(self, i: int, of: int) -> Tree:
        if len(self.children) != of:
            raise FormatError(f"plan: {self.kind} has {len(self.children)} children, not {of}")
        return self.children[i]


# -- reading ---------------------------------------------------------------------------------------


def read_tree(json_text: str | bytes, text: str) -> Tree:
    """The plan that `json_text` (``plan.toJSON()``) and `text` describe, of the same plan.

    `text` is ``plan.treeString(True, True, 2**31 - 1, False, False)``: with all fields, since a
    list that is cut short could hide a ``try_``.  Raises FormatError for what is no plan, and
    UnsupportedPlanError where the text says that an operator is not the one of the JSON."""
    _refuse_try(text)
    delays = _delays(text)
    value = parse(json_text, "plan")
    if not isinstance(value, list) or len(value) > MOST_NODES:
        raise FormatError("plan: this is no list of nodes")
    try:
        found, end = _tree(value, 0, delays)
    except RecursionError:
        raise unsupported(
            "the plan is too deep", "use one select for what many withColumn calls did"
        ) from None
    if end != len(value):
        raise FormatError(f"plan: {len(value) - end} nodes are nobody's children")
    return found


def _children(value: dict[str, Any]) -> int:
    count = value.get("num-children")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_NODES:
        raise FormatError(f"plan: num-children: {shown(count)} is no number of children")
    return count


def _kind(value: Any) -> str:
    if not isinstance(value, dict):
        raise FormatError(f"plan: {shown(value)} is no node")
    name = value.get("class")
    if not isinstance(name, str) or not name:
        raise FormatError(f"plan: {shown(name)} is no class of a node")
    return name.rpartition(".")[2] or name if name.startswith(_SPARK) else name


def _tree(nodes: list[Any], at: int, delays: dict[str, int]) -> tuple[Tree, int]:
    if at >= len(nodes):
        raise FormatError("plan: a node has fewer children than it says")
    value = nodes[at]
    kind = _kind(value)
    members = tuple(
        (name, _member(member))
        for name, member in value.items()
        if name not in ("class", "num-children", "child", "left", "right")
    )
    at += 1
    children = []
    for _ in range(_children(value)):
        child, at = _tree(nodes, at, delays)
        children.append(child)
    delay = None
    if kind == "EventTimeWatermark":
        delay = delays.get(str(value.get("nodeId")))
        if delay is None:
            raise FormatError("plan: the text does not tell the delay of an EventTimeWatermark")
    return Tree(kind, tuple(children), members, delay), at


def _is_expression(value: Any) -> bool:
    return bool(value) and isinstance(value, list) and isinstance(value[0], dict)


def _member(value: Any) -> Any:
    if isinstance(value, list):
        if _is_expression(value) and "class" in value[0]:
            return expression(value)
        if all(isinstance(v, list) for v in value):
            return tuple(_member(v) for v in value)
    return value if isinstance(value, str) else canonical(value)


def expression(nodes: list[Any]) -> Node:
    """The expression of a list of nodes in pre-order."""
    found, end = _expression(nodes, 0)
    if end != len(nodes):
        raise FormatError(f"expression: {len(nodes) - end} nodes are nobody's children")
    return found


def _expression(nodes: list[Any], at: int) -> tuple[Node, int]:
    if at >= len(nodes):
        raise FormatError("expression: a node has fewer children than it says")
    value = nodes[at]
    kind = _kind(value)
    at += 1
    children = []
    for _ in range(_children(value)):
        child, at = _expression(nodes, at)
        children.append(child)
    return Node(kind, tuple(children), _values(kind, value)), at


def _values(kind: str, value: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    if kind == "Literal":
        held = value.get("value")
        if held is not None and not isinstance(held, str):
            raise FormatError(f"expression: the literal {shown(held)} is no text")
        return (("type", _type(value)), ("value", held))
    found = {
        name: member if isinstance(member, str | bool | int | float) else canonical(member)
        for name, member in value.items()
        if name not in _PLACES and name not in ("dataType", "name") and member is not None
    }
    if kind in ("AttributeReference", "Alias"):
        found["id"] = _id(value.get("exprId"))
    if "name" in value:
        if not isinstance(value["name"], str):
            raise FormatError(f"expression: {kind}: {shown(value['name'])} is no name")
        found["name"] = value["name"]
    if "dataType" in value:
        found["type"] = _type(value)
    if kind in _ZONED and isinstance(value.get("timeZoneId"), str):
        found["zone"] = value["timeZoneId"]
    return tuple(sorted(found.items()))


def _id(value: Any) -> int:
    found = value.get("id") if isinstance(value, dict) else None
    if not isinstance(found, int) or isinstance(found, bool):
        raise FormatError(f"expression: {shown(value)} is no exprId")
    return found


def _type(value: dict[str, Any]) -> str:
    """A simple type by its name, another one as JSON."""
    found = value.get("dataType")
    if not isinstance(found, str | dict):
        raise FormatError(f"expression: {shown(found)} is no type")
    return found if isinstance(found, str) else canonical(found)


# -- what stands in the text alone -----------------------------------------------------------------

_TRY = re.compile(r"\b(try_\w+)\(")
_CUT = re.compile(r"\.\.\. \d+ more fields")
_WATERMARK = re.compile(r"EventTimeWatermark ([0-9a-f-]{36}), [^\n]*?#\d+L?\S*: \w+, ([^\n]+)")
_INTERVAL = re.compile(r"(-?\d{1,9}(?:\.\d{1,6})?) (year|month|day|hour|minute|second)s?(?: |$)")
_UNITS_US = {
    # Spark's delay counts months of 31 days.
    "year": 12 * 31 * 86_400_000_000, "month": 31 * 86_400_000_000, "day": 86_400_000_000,
    "hour": 3_600_000_000, "minute": 60_000_000, "second": 1_000_000,
}  # fmt: skip


def _refuse_try(text: str) -> None:
    """`try_sum` and `sum` have the same JSON, as have `try_cast` and `cast`."""
    if not isinstance(text, str) or not text:
        raise FormatError("plan: its text is missing")
    if _CUT.search(text):
        raise FormatError("plan: its text is cut short", hint="ask for it with all fields")
    for line in text.splitlines():
        found = _TRY.search(line)
        if found:
            raise unsupported(
                f"{found[1]} is not supported", f"use {found[1][4:]}, or filter what it guards from"
            )


def interval_us(text: str) -> int | None:
    """Microseconds of an interval as Spark writes it, ``1 minutes 0.5 seconds``, or None."""
    at, total = 0, 0
    while at < len(text):
        match = _INTERVAL.match(text, at)
        if match is None:
            return None
        whole, _, part = match[1].partition(".")
        sign = -1 if whole.startswith("-") else 1
        unit = _UNITS_US[match[2]]
        total += int(whole) * unit + sign * int(part.ljust(6, "0") or 0) * unit // 1_000_000
        at = match.end()
    return total if text else None


def _delays(text: str) -> dict[str, int]:
    found = {}
    for match in _WATERMARK.finditer(text):
        delay = interval_us(match[2].strip())
        if delay is None or delay < 0:
            raise FormatError(f"plan: the delay {shown(match[2])} of a watermark is not understood")
        # Spark counts a delay in milliseconds.
        found[match[1]] = delay // 1000 * 1000
    return found


# -- for errors ------------------------------------------------------------------------------------

_SIGNS = {
    "EqualTo": "=", "EqualNullSafe": "<=>", "LessThan": "<", "LessThanOrEqual": "<=",
    "GreaterThan": ">", "GreaterThanOrEqual": ">=", "Add": "+", "Subtract": "-", "Multiply": "*",
    "Divide": "/", "Remainder": "%", "And": "and", "Or": "or",
}  # fmt: skip


def describe(found: Node, depth: int = 0) -> str:
    """An expression as an error shows it, in at most about 120 characters."""
    text = _described(found, depth)
    return text if len(text) <= 120 or depth else text[:117] + "..."


def _described(found: Node, depth: int) -> str:
    if depth > 6:
        return ".."
    if found.kind == "Literal":
        value = found.get("value")
        if found.type == "binary":
            return "X'..'"
        return "null" if value is None else repr(value) if found.type == "string" else value
    if found.kind == "@Window":
        return f"{found.get('how')} window of {_described(found.children[0], depth + 1)}"
    if found.kind in ("AttributeReference", "@Column", "@Result", "@Joined"):
        return str(found.get("name"))
    inner = [_described(child, depth + 1) for child in found.children[:8]]
    if found.kind in _SIGNS and len(inner) == 2:
        return f"({inner[0]} {_SIGNS[found.kind]} {inner[1]})"
    if found.kind in ("Alias", "KnownNullable", "AggregateExpression") and inner:
        return inner[0]
    if found.kind == "Cast":
        return f"cast({', '.join(inner)} as {found.type})"
    if found.kind == "GetStructField" and inner:
        return f"{inner[0]}.{found.get('name', found.get('ordinal'))}"
    return f"{found.kind}({', '.join(inner)})"
