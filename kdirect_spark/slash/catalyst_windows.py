"""Windows and event times in an analyzed plan, where they are arithmetic.

`recognised` puts a node ``@Window`` in place of the struct that `window` or `session_window`
became: its operand is the event time, its values are `how` (tumbling, sliding, session), and the
microseconds `size`, `slide`, `origin` or `gap`.  Only exactly the shapes that Spark writes are
taken; windows are counted in UTC, whatever the session's time zone.  Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kdirect.state.windows import Session, Sliding, Tumbling, Window
from kdirect_spark.slash.catalyst import Node, describe, node, text_literal
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.spark_types import INTEGERS

_WORDS_US = {
    "microsecond": 1, "millisecond": 1_000, "second": 1_000_000, "minute": 60_000_000,
    "hour": 3_600_000_000, "day": 86_400_000_000, "week": 604_800_000_000,
}  # fmt: skip
_PART = re.compile(r"\s*(-?\d{1,15})\s*([a-z]+?)s?(?=\s|$)")
_CONVERSIONS = {"MillisToTimestamp": "ms", "MicrosToTimestamp": "us", "SecondsToTimestamp": "s"}
_FIXED_ZONES = ("UTC", "Etc/UTC", "GMT", "Z")


class EventTime(NamedTuple):
    """The column that holds an event time, and its unit if it is an integer, or ""."""

    side: int
    column: str
    unit: str


def event_time(found: Node) -> EventTime | None:
    """What an expression says of event time, or None if the engine knows no such time."""
    if found.kind == "@Column" and found.type == "timestamp":
        return EventTime(found.get("side"), found.get("name"), "")
    unit = _CONVERSIONS.get(found.kind)
    if found.kind == "Cast" and found.type == "timestamp" and len(found.children) == 1:
        unit = "s"
    if unit is None or len(found.children) != 1:
        return None
    inner = found.children[0]
    while inner.kind == "Cast" and inner.type in INTEGERS and len(inner.children) == 1:
        below = inner.children[0]
        if below.type not in INTEGERS or INTEGERS[below.type] > INTEGERS[inner.type]:
            return None
        inner = below
    if inner.kind == "@Column" and inner.type in INTEGERS:
        return EventTime(inner.get("side"), inner.get("name"), unit)
    return None


def window_of(found: Node) -> Window:
    """The engine's window of a node ``@Window``."""
    how = found.get("how")
    if how == "tumbling":
        return Tumbling(size_us=found.get("size"), origin_us=found.get("origin"))
    if how == "sliding":
        return Sliding(
            size_us=found.get("size"), slide_us=found.get("slide"), origin_us=found.get("origin")
        )
    return Session(gap_us=found.get("gap"))


def bounds(start: Node, end: Node) -> Node:
    """The struct that stands for a window in a result."""
    return node("CreateNamedStruct", text_literal("start"), start, text_literal("end"), end)


def recognised(found: Node, time_zone: str) -> Node:
    """`found`, or the window that it is."""
    if found.kind != "CreateNamedStruct" or len(found.children) != 4:
        return found
    names = [_text(child) for child in found.children[::2]]
    if names != ["start", "end"]:
        return found
    start, end = (_bare(child) for child in found.children[1::2])
    shifted = _shifted(start, end)
    if shifted is not None and shifted.shift == 0 and shifted.size == shifted.slide:
        return _window(shifted, "tumbling")
    return _session(start, end, time_zone) or found


def sliding(found: tuple[Node, ...]) -> Node | None:
    """The window whose structs are those of the projections of an Expand, or None."""
    shapes = []
    for struct in found:
        if struct.kind == "@Window":  # the slide is the size: one projection of a tumbling window
            return struct if len(found) == 1 else None
        if struct.kind != "CreateNamedStruct" or len(struct.children) != 4:
            return None
        shape = _shifted(*(_bare(child) for child in struct.children[1::2]))
        if shape is None:
            return None
        shapes.append(shape)
    first = shapes[0]
    if len(shapes) != -(-first.size // first.slide):
        return None
    for i, shape in enumerate(shapes):
        if shape != first._replace(shift=i * first.slide):
            return None
    return _window(first, "sliding")


def contains_its_time(found: Node, time: Node, window: Node) -> bool:
    """Is it ``start <= time`` or ``time < end``, which Spark adds to a sliding window?"""
    if found.kind not in ("GreaterThanOrEqual", "LessThan") or len(found.children) != 2:
        return False
    left, right = found.children
    bound = 0 if found.kind == "GreaterThanOrEqual" else 1
    return (
        left == time
        and right.kind == "GetStructField"
        and right.get("ordinal") == bound
        and right.children == (window,)
    )


# -- shapes ----------------------------------------------------------------------------------------


class _Shifted(NamedTuple):
    time: Node
    size: int
    slide: int
    origin: int
    shift: int


def _window(shape: _Shifted, how: str) -> Node:
    return node(
        "@Window", shape.time, how=how, size=shape.size, slide=shape.slide,
        origin=shape.origin % shape.slide,
    )  # fmt: skip


def _bare(found: Node) -> Node:
    while found.kind == "KnownNullable" and len(found.children) == 1:
        found = found.children[0]
    return found


def _text(found: Node) -> str | None:
    return found.get("value") if found.kind == "Literal" and found.type == "string" else None


def _long(found: Node) -> int | None:
    """The number of a literal of type long, or of a zero that is cast to long."""
    if found.kind == "Cast" and found.type == "long" and len(found.children) == 1:
        found = found.children[0]
    if found.kind != "Literal" or found.type not in ("long", "integer"):
        return None
    value = found.get("value")
    if value is None or len(value) > 20 or not value.lstrip("-").isdecimal():
        return None
    return int(value)


def _converted(found: Node, to: str) -> Node | None:
    """What a PreciseTimestampConversion to this type converts."""
    if found.kind != "PreciseTimestampConversion" or len(found.children) != 1:
        return None
    return found.children[0] if found.get("toType") == to else None


def _pair(found: Node | None, kind: str) -> tuple[Node, Node] | None:
    if found is None or found.kind != kind or len(found.children) != 2:
        return None
    return found.children[0], found.children[1]


def _shifted(start: Node, end: Node) -> _Shifted | None:
    """``start`` and ``end`` of a window, as Spark's analyzer writes them."""
    last = _pair(_converted(end, "timestamp"), "Add")
    first = _converted(start, "timestamp")
    if last is None or first is None or last[0] != first:
        return None
    size, outer = _long(last[1]), _pair(first, "Subtract")
    inner = _pair(outer[0] if outer else None, "Subtract")
    if size is None or outer is None or inner is None:
        return None
    shift, case = _long(outer[1]), inner[1]
    time = _converted(inner[0], "long")
    if shift is None or time is None or case.kind != "CaseWhen" or len(case.children) != 3:
        return None
    below, raised, rest = case.children
    parts = _pair(rest, "Remainder")
    since = _pair(parts[0] if parts else None, "Subtract")
    if parts is None or since is None or since[0] != inner[0]:
        return None
    slide, origin = _long(parts[1]), _long(since[1])
    less, plus = _pair(below, "LessThan"), _pair(raised, "Add")
    if slide is None or origin is None or less is None or plus is None:
        return None
    fits = less[0] == rest and _long(less[1]) == 0 and plus[0] == rest and _long(plus[1]) == slide
    if not fits or slide < 1 or size < slide:
        return None
    return _Shifted(time, size, slide, origin, shift)


def _session(start: Node, end: Node, time_zone: str) -> Node | None:
    inner = _converted(start, "timestamp")
    time = _converted(inner, "long") if inner is not None else None
    inner = _converted(end, "timestamp")
    last = _converted(inner, "long") if inner is not None else None
    if time is None or last is None:
        return None
    if last.kind == "Cast" and last.type == "timestamp" and len(last.children) == 1:
        last = last.children[0]
    added = _pair(last, "TimestampAddInterval")
    if added is None or added[0] != time:
        return None
    gap = _gap(added[1], last.get("zone", time_zone))
    return node("@Window", time, how="session", gap=gap)


def _gap(found: Node, time_zone: str) -> int:
    if found.kind == "Cast" and len(found.children) == 1:
        found = found.children[0]
    value = found.get("value")
    if found.kind != "Literal" or value is None:
        raise unsupported(
            f"session_window with the gap {describe(found)} is not supported: it differs from row"
            " to row",
            'give a constant gap such as "5 minutes"',
        )
    text = value.strip().lower().removeprefix("interval").strip()
    at, gap, days = 0, 0, False
    while at < len(text):
        match = _PART.match(text, at)
        if match is None or match[2] not in _WORDS_US:
            break
        gap += int(match[1]) * _WORDS_US[match[2]]
        days = days or match[2] in ("day", "week")
        at = match.end()
    if not text or at < len(text) or gap <= 0:
        raise unsupported(
            f"session_window with the gap {value!r} is not supported",
            'give it in hours, minutes and seconds, such as "5 minutes"',
        )
    if days and time_zone not in _FIXED_ZONES:
        raise unsupported(
            f"session_window with a gap of days ({value!r}) is not supported in the time zone"
            f" {time_zone}, whose days differ in length",
            "give the gap in hours",
        )
    return gap
