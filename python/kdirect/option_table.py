"""What a table of options is: its rows, how a value is parsed, and how a name is found.

Law: no option stands here; the tables themselves are in `options.py`.  An unknown name is an error
that names the nearest known one.  A refused value is an error that names the option and the remedy.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from kdirect.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """One row of a table.

    `kind` is one of str, int, long, float, bool, list, ms, bytes, enum.  A `default` of None means
    that there is no value unless one is given, which `required` demands.  `choices` are the values
    of an enum.  `low` and `high` bound numbers, both inclusive; integers have at most 64 bits.

    `only` is the one accepted value of a property for which Kafka knows more, and `why` is the
    reason, which the error for another value states.  `alone` is the one value that a broker
    accepts which belongs to no cluster (`Options.check_alone`).  `synonym` of a topic's property is
    the broker's property of the same meaning, whose value is the default.

    A `name` that ends with ``.*`` stands for every name below that prefix.  A `secret` value is
    shown nowhere."""

    name: str
    kind: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    required: bool = False
    aliases: tuple[str, ...] = ()
    check: Callable[[Any], Any] | None = None
    only: Any = None
    why: str = ""
    alone: Any = None
    synonym: str = ""
    secret: bool = False

    @property
    def is_prefix(self) -> bool:
        """Does it stand for every name that begins so?"""
        return self.name.endswith(".*")

    def parse(self, value: Any) -> Any:
        """The typed value of `value`, which is often a string.  Raises ConfigError, which names
        the option and the remedy."""
        try:
            out = _PARSERS[self.kind](value)
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"option {self.name}: {value!r} is not {_A_KIND[self.kind]}", hint=self._remedy()
            ) from e
        if self.kind == "enum":
            for choice in self.choices:
                if choice.lower() == out.lower():
                    out = choice
                    break
            else:
                raise self._refused(value)
        if self.only is not None and out != self.only:
            raise self._refused(value)
        if isinstance(out, int | float) and not isinstance(out, bool):
            if isinstance(out, int) and not -1 << 63 <= out < 1 << 63:
                raise ConfigError(
                    f"option {self.name}: {value!r} is out of range",
                    hint="give a number of at most 64 bits",
                )
            if (self.low is not None and out < self.low) or (
                self.high is not None and out > self.high
            ):
                raise ConfigError(
                    f"option {self.name}: {value!r} is out of range", hint=self._remedy()
                )
        return self.check(out) if self.check else out

    def _refused(self, value: Any) -> ConfigError:
        why = f": {self.why}" if self.why else ""
        return ConfigError(
            f"option {self.name}: {value!r} is not allowed{why}", hint=self._remedy()
        )

    def _remedy(self) -> str:
        if self.only is not None:
            return f"the only value is {config_text(self.only) or 'an empty list'}"
        if self.choices:
            return "use one of " + ", ".join(self.choices)
        bounds = [
            f"at least {self.low:g}" if self.low is not None else "",
            f"at most {self.high:g}" if self.high is not None else "",
        ]
        text = " and ".join(b for b in bounds if b)
        default = "" if self.default is None else f" (default {self.default})"
        return f"give {_A_KIND[self.kind]}{' ' + text if text else ''}{default}"


_A_KIND = {
    "str": "a string",
    "int": "an integer",
    "long": "an integer",
    "float": "a number",
    "bool": "true or false",
    "list": "a comma-separated list",
    "ms": "a number of milliseconds",
    "bytes": "a number of bytes (suffixes k, m, g allowed)",
    "enum": "one of the choices",
}


def config_text(value: Any) -> str:
    """A value in the text form of Kafka's properties."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _java_double(value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _java_double(value: float) -> str:
    """A number as Java's Double.toString writes it: with an exponent from 1.0E7 on, and below
    0.001."""
    if value == 0 or 1e-3 <= abs(value) < 1e7 or not math.isfinite(value):
        return str(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    rest = "".join(map(str, digits[1:])) or "0"
    return f"{'-' * sign}{digits[0]}.{rest}E{int(exponent) + len(digits) - 1}"


def _parse_bool(v: Any) -> bool:
    if isinstance(v, bool):
        return v
    text = str(v).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ValueError(v)


def _parse_bytes(v: Any) -> int:
    if isinstance(v, int) and not isinstance(v, bool):
        return v
    m = re.fullmatch(r"\s*(-?\d+)\s*([kmg]?)(?:i?b)?\s*", str(v).lower())
    if not m:
        raise ValueError(v)
    return int(m[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[m[2]]


def _parse_int(v: Any) -> int:
    if isinstance(v, bool) or (isinstance(v, float) and v != int(v)):
        raise ValueError(v)
    return int(v)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "str": lambda v: str(v),
    "enum": lambda v: str(v).strip(),
    "int": _parse_int,
    "long": _parse_int,
    "ms": _parse_int,
    "float": float,
    "bool": _parse_bool,
    "bytes": _parse_bytes,
    "list": lambda v: (
        list(v)
        if isinstance(v, list | tuple)
        else [p.strip() for p in str(v).split(",") if p.strip()]
    ),
}


class Options:
    """A table of rows, found by name; `ignore_case` accepts names in any case."""

    def __init__(self, title: str, rows: Iterable[Option], *, ignore_case: bool = False) -> None:
        self.title = title
        self.rows = tuple(rows)
        self.ignore_case = ignore_case
        self._by_name: dict[str, Option] = {}
        for row in self.rows:
            for name in (row.name, *row.aliases):
                if self._fold(name) in self._by_name:
                    raise ValueError(f"option {name} is in the table twice")
                self._by_name[self._fold(name)] = row

    def _fold(self, name: str) -> str:
        return name.lower() if self.ignore_case else name

    def find(self, name: str) -> Option:
        """The row of `name`.  Raises ConfigError, with the nearest known name, if there is none."""
        row = self._by_name.get(self._fold(name)) or self._below_a_prefix(name)
        if row is None:
            near = difflib.get_close_matches(self._fold(name), self._by_name, n=1, cutoff=0.5)
            hint = (
                f"did you mean {self._by_name[near[0]].name}?"
                if near
                else f"see docs/options.md, {self.title}"
            )
            raise ConfigError(f"unknown option {name!r}", hint=hint)
        return row

    def knows(self, name: str) -> bool:
        """Is there a row of `name`?"""
        return self._fold(name) in self._by_name or self._below_a_prefix(name) is not None

    def _below_a_prefix(self, name: str) -> Option | None:
        for row in self.rows:
            prefix = row.name.removesuffix("*")
            if row.is_prefix and name.startswith(prefix) and name not in (prefix, row.name):
                return replace(row, name=name)
        return None

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options by row name: parsed values of `given`, and defaults for the rest.  Of those
        that stand for a prefix, only what is given."""
        out = {row.name: row.default for row in self.rows if not row.is_prefix}
        for name, value in given.items():
            row = self.find(name)
            # Settings that were resolved before hold None for options that were not given.
            out[row.name] = None if value is None and row.default is None else row.parse(value)
        for row in self.rows:  # none of them stands for a prefix
            if row.required and out[row.name] is None:
                raise ConfigError(f"option {row.name} is missing", hint=f"{row.help}")
        return out

    def check_alone(self, values: Mapping[str, Any]) -> None:
        """Refuse what only a broker of a cluster can do.  `values` are resolved ones by row name;
        the ConfigError names the option and the remedy."""
        for row in self.rows:
            value = values.get(row.name)
            if row.alone is not None and value is not None and value != row.alone:
                only = config_text(row.alone) or "an empty list"
                raise ConfigError(
                    f"option {row.name}: {config_text(value)!r} is not allowed: there is one broker"
                    ", so nothing is replicated and there is no election",
                    hint=f"the only value is {only}, or join a cluster: zookeeper.connect",
                )


_DURATION = re.compile(r"\s*(\d+)\s*(us|ms|s|m|min|h|d|)\s*\Z")
_DURATION_MS = {
    "us": 0.001,
    "ms": 1,
    "": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


def duration_ms(text: str) -> int:
    """Milliseconds of a time span as Spark writes it: ``500ms``, ``30s``, ``15m``, ``2h``,
    ``1d``.  A bare number counts milliseconds."""
    m = _DURATION.match(str(text).lower())
    if m is None:
        raise ConfigError(
            f"{text!r} is not a time span", hint="write for example 500ms, 30s, 15m, 2h or 1d"
        )
    return int(int(m[1]) * _DURATION_MS[m[2]])
