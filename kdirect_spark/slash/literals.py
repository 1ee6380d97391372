"""Constants of a plan: their values, and the casts of constants that Spark's optimizer would fold.

Only texts and casts are taken whose meaning is beyond doubt; anything else is refused.  A date is a
number of days, a timestamp of microseconds since 1970 UTC.  Pure.
"""

from __future__ import annotations

import datetime
import decimal
import re
import struct
import zoneinfo
from typing import Any, NamedTuple

from kdirect.errors import UnsupportedPlanError
from kdirect_spark.slash.catalyst import Node, describe
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.spark_types import FLOATS, INTEGERS, decimal_of

_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_TIMESTAMP = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})(?:[ T](\d{2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?)?"
    r"\s?(Z|UTC|[+-]\d{2}:\d{2})?"
)
_OFFSET = re.compile(r"([+-])(\d{2}):(\d{2})")
_INTEGER = re.compile(r"[+-]?\d{1,38}")
_FLOAT = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?|NaN|-?Infinity")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_CONVERSIONS = {"MillisToTimestamp": 1_000, "MicrosToTimestamp": 1, "SecondsToTimestamp": 1_000_000}
_MICROSECOND = datetime.timedelta(microseconds=1)


class Constant(NamedTuple):
    """A value of a type, which is named as in Spark's JSON."""

    value: Any
    type: str


def constant(found: Node, time_zone: str) -> Constant | None:
    """The value of an expression of constants, or None if it is none."""
    if found.kind == "Literal":
        return _literal(found, time_zone)
    if len(found.children) != 1:
        return None
    if found.kind not in ("Cast", "UnaryMinus", *_CONVERSIONS):
        return None
    inner = constant(found.children[0], time_zone)
    if inner is None:
        return None
    if found.kind == "Cast":
        return _cast(inner, found, found.get("zone", time_zone))
    if inner.value is None or (
        inner.type not in (*INTEGERS, *FLOATS) and not decimal_of(inner.type)
    ):
        raise _doubtful(found)
    if found.kind == "UnaryMinus":
        return Constant(_fitting(-inner.value, inner.type, found), inner.type)
    if inner.type not in INTEGERS:
        raise _doubtful(found)
    return Constant(inner.value * _CONVERSIONS[found.kind], "timestamp")


def _doubtful(found: Node) -> Exception:
    return unsupported(
        f"the constant {describe(found)} is not supported", "write the value as a plain literal"
    )


def _literal(found: Node, time_zone: str) -> Constant:
    kind, text = found.type, found.get("value")
    if text is None or kind == "void":
        return Constant(None, kind)
    try:
        value = _parsed(kind, text, time_zone, found)
    except UnsupportedPlanError:
        raise
    except (ValueError, OverflowError, decimal.InvalidOperation):
        raise _doubtful(found) from None
    return Constant(value, kind)


def _parsed(kind: str, text: str, time_zone: str, found: Node) -> Any:
    if kind in INTEGERS and _INTEGER.fullmatch(text):
        return _fitting(int(text), kind, found)
    if kind in FLOATS and _FLOAT.fullmatch(text):
        return single(float(text)) if kind == "float" else float(text)
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    if kind == "string":
        return text
    if decimal_of(kind):
        return _fitting(decimal.Decimal(text), kind, found)
    if kind == "date":
        return _days(text, found)
    if kind == "timestamp":
        return _microseconds(text, time_zone, found, written_by_spark=True)
    why = ", since the plan does not tell its bytes" if kind == "binary" else ""
    raise unsupported(f"a constant of the type {kind} is not supported{why}")


def single(value: float) -> float:
    """The float of 32 bits nearest to a value, as a float of 64."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _fitting(value: Any, kind: str, found: Node) -> Any:
    """A number, if its type holds it exactly."""
    if kind in INTEGERS:
        half = 1 << (INTEGERS[kind] - 1)
        if -half <= value < half:
            return value
    elif kind in FLOATS:
        return value
    elif digits := decimal_of(kind):
        precision, scale = digits
        with decimal.localcontext() as context:
            context.prec = 80
            fixed = decimal.Decimal(value).quantize(decimal.Decimal(1).scaleb(-scale))
            if fixed == value and abs(fixed) < decimal.Decimal(10) ** (precision - scale):
                return fixed
    raise _doubtful(found)


def _cast(inner: Constant, found: Node, time_zone: str) -> Constant:
    value, kind, to = inner.value, inner.type, found.type
    if value is None or kind == to:
        return Constant(value, to)
    number = kind in INTEGERS or kind in FLOATS or decimal_of(kind) is not None
    try:
        if kind == "string":
            return Constant(_of_text(value, to, time_zone, found), to)
        if number and to == "double":
            return Constant(float(value), to)
        if to == "float" and (kind in INTEGERS or kind == "double"):
            return Constant(single(value), to)
        if number and kind not in FLOATS and (to in INTEGERS or decimal_of(to)):
            whole = int(value) if to in INTEGERS else value
            if whole != value:
                raise _doubtful(found)
            return Constant(_fitting(whole, to, found), to)
        if kind == "date" and to == "timestamp":
            day = datetime.date(1970, 1, 1) + datetime.timedelta(days=value)
            return Constant(_microseconds(day.isoformat(), time_zone, found), to)
    except UnsupportedPlanError:
        raise
    except (ValueError, OverflowError, decimal.InvalidOperation):
        raise _doubtful(found) from None
    raise _doubtful(found)


def _of_text(text: str, to: str, time_zone: str, found: Node) -> Any:
    text = text.strip(" ")
    if to in INTEGERS and _INTEGER.fullmatch(text):
        return _fitting(int(text), to, found)
    if to in FLOATS and _FLOAT.fullmatch(text):
        return single(float(text)) if to == "float" else float(text)
    if to == "date":
        return _days(text, found)
    if to == "timestamp":
        return _microseconds(text, time_zone, found)
    if decimal_of(to) and _FLOAT.fullmatch(text) and "N" not in text and "I" not in text:
        return _fitting(decimal.Decimal(text), to, found)
    if to == "boolean" and text in ("true", "false"):
        return text == "true"
    raise _doubtful(found)


def _days(text: str, found: Node) -> int:
    match = _DATE.fullmatch(text)
    if match is None:
        raise _doubtful(found)
    return (datetime.date(*map(int, match.groups())) - datetime.date(1970, 1, 1)).days


def _microseconds(text: str, time_zone: str, found: Node, written_by_spark: bool = False) -> int:
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise _doubtful(found)
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    micros = int((match[7] or "0").ljust(6, "0"))
    local = datetime.datetime(year, month, day, hour, minute, second, micros)
    zone = _zone(match[8] or time_zone, found)
    first = (local.replace(tzinfo=zone) - _EPOCH) // _MICROSECOND
    # Of a time that occurs twice Java takes the first, but a literal may have meant the second.
    if written_by_spark and (local.replace(tzinfo=zone, fold=1) - _EPOCH) // _MICROSECOND != first:
        raise _doubtful(found)
    return first


def _zone(name: str, found: Node) -> datetime.tzinfo:
    if name in ("Z", "UTC", "GMT", "Etc/UTC"):
        return datetime.timezone.utc
    if match := _OFFSET.fullmatch(name):
        offset = datetime.timedelta(hours=int(match[2]), minutes=int(match[3]))
        if int(match[3]) > 59 or offset > datetime.timedelta(hours=18):  # no offset of Java's
            raise _doubtful(found)
        return datetime.timezone(-offset if match[1] == "-" else offset)
    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise unsupported(
            f"the constant {describe(found)} is in the time zone {name}, which Python does not"
            " know",
            "set spark.sql.session.timeZone to a region such as Europe/Berlin or to UTC",
        ) from None
