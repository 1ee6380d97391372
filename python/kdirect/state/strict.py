"""Reading JSON that came from outside: every value is checked before it is used.

Law: a missing name, an unknown name, another type or a number out of range is a `FormatError` that
names the thing and the member.  Nothing is guessed and nothing is converted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kdirect.errors import FormatError

T = TypeVar("T")

INT64 = (-(1 << 63), (1 << 63) - 1)
LONGEST_TEXT = 1 << 20
MOST_ITEMS = 1 << 20


def canonical(value: Any) -> str:
    """JSON of `value` with sorted names and no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def parse(data: bytes | str, what: str) -> Any:
    """The JSON value in `data`.  NaN, infinities and names that occur twice are refused."""
    try:
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{what}: these bytes are not JSON: {e}") from e


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


class Members:
    """The members of one JSON object, each taken once.

    `close` raises if a member is left: a newer peer's field must not be ignored in silence.
    """

    __slots__ = ("_left", "what")

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise FormatError(f"{what}: {shown(value)} is not an object")
        self.what = what
        self._left = dict(value)

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise FormatError(f"{self.what}: {name} is missing")
        return self._left.pop(name)

    def refuse(self, name: str, value: Any, wanted: str) -> FormatError:
        return FormatError(f"{self.what}: {name}: {shown(value)} is not {wanted}")

    def text(self, name: str, *, empty: bool = True) -> str:
        value = self.take(name)
        if not isinstance(value, str) or len(value) > LONGEST_TEXT or not (value or empty):
            raise self.refuse(name, value, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string that is not empty, or None for null."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
            raise self.refuse(name, value, "a string or null")
        return value

    def choice(self, name: str, choices: Iterable[str]) -> str:
        value = self.text(name)
        if value not in (allowed := tuple(choices)):
            raise self.refuse(name, value, "one of " + ", ".join(allowed))
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.refuse(name, value, "true or false")
        return value

    def optional_number(self, name: str, low: int = INT64[0], high: int = INT64[1]) -> int | None:
        """An integer, or None for null."""
        value = self.take(name)
        if value is None:
            return None
        return checked_number(value, low, high, f"{self.what}: {name}")

    def number(self, name: str, low: int = INT64[0], high: int = INT64[1]) -> int:
        return checked_number(self.take(name), low, high, f"{self.what}: {name}")

    def numbers(self, name: str, low: int = INT64[0], high: int = INT64[1]) -> tuple[int, ...]:
        where = f"{self.what}: {name}"
        return tuple(checked_number(v, low, high, where) for v in self.items(name))

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.items(name)
        for value in values:
            if not isinstance(value, str) or len(value) > LONGEST_TEXT:
                raise self.refuse(name, value, "a string")
        return tuple(values)

    def items(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise self.refuse(name, value, "a list")
        return value

    def each(self, name: str, read: Callable[[Any], T]) -> tuple[T, ...]:
        """`read` of every item of a list."""
        return tuple(read(value) for value in self.items(name))

    def object(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if not isinstance(value, dict) or len(value) > MOST_ITEMS:
            raise self.refuse(name, value, "an object")
        return value

    def optional(self, name: str, read: Callable[[Any], T]) -> T | None:
        """None for null, else `read` of the value."""
        value = self.take(name)
        return None if value is None else read(value)

    def close(self) -> None:
        if self._left:
            raise FormatError(
                f"{self.what}: unknown members {', '.join(sorted(self._left))}",
                hint="both sides must run the same version of kdirect",
            )


def checked_number(value: Any, low: int, high: int, where: str) -> int:
    """An integer of at least `low` and at most `high`; True is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{where}: {shown(value)} is not an integer")
    if not low <= value <= high:
        raise FormatError(f"{where}: {shown(value)} is not in {low} to {high}")
    return value


def shown(value: Any) -> str:
    """A value as an error shows it: in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
