"""Checked reading of JSON that anybody may have written.

Whoever has access to the metadata store can edit its nodes with a command line.  So nothing of a
value is trusted: each field is asked for by name and kind, and whatever is wrong becomes one
`CorruptMetadataError`, which names the node, the field and the remedy.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from kdirect.errors import CorruptMetadataError

MOST_INT32 = 2**31 - 1
MOST_INT64 = 2**63 - 1
_SHOWN = 80  # characters of a wrong value that an error shows
_T = TypeVar("_T")


class Fields:
    """The fields of one JSON object in the node at `path`.  `remedy`: what to do if it is wrong."""

    def __init__(self, path: str, remedy: str, values: dict[str, Any], inside: str = "") -> None:
        self._path = path
        self._remedy = remedy
        self._values = values
        self._inside = inside

    def wrong(self, what: str) -> NoReturn:
        """Raise the error of this node."""
        raise CorruptMetadataError(f"node {self._path} is damaged: {what}", hint=self._remedy)

    def _name(self, field: str) -> str:
        return f"{self._inside}{field}"

    def _take(self, field: str, kind: type[_T], called: str) -> _T:
        if field not in self._values:
            self.wrong(f"it has no field {self._name(field)}")
        return self._as(self._values[field], kind, called, self._name(field))

    def _as(self, value: Any, kind: type[_T], called: str, name: str) -> _T:
        # JSON's true is an int to Python.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.wrong(f"field {name} is {_shown(value)}, not {called}")
        if isinstance(value, str) and not _is_unicode(value):
            self.wrong(f"field {name} is {_shown(value)}, which is no Unicode text")
        return value

    def has(self, field: str) -> bool:
        return self._values.get(field) is not None

    def names(self) -> tuple[str, ...]:
        """Of all fields."""
        return tuple(self._values)

    def integer(self, field: str, least: int = 0, most: int = MOST_INT32) -> int:
        return self._within(self._take(field, int, "a number"), least, most, self._name(field))

    def _within(self, value: int, least: int, most: int, name: str) -> int:
        if not least <= value <= most:
            self.wrong(f"field {name} is {_shown(value)}, not a number of {least} to {most}")
        return value

    def digits(self, field: str, least: int = 0, most: int = MOST_INT64) -> int:
        """A number that Kafka writes as text."""
        text = self._take(field, str, "a number as text")
        return self._within(self._number(text, self._name(field)), least, most, self._name(field))

    def _number(self, text: str, name: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 20:
            self.wrong(f"{name} is {_shown(text)}, not a decimal number")
        return int(text)

    def text(self, field: str) -> str:
        return self._take(field, str, "a text")

    def texts(self, field: str) -> tuple[str, ...]:
        found = self._take(field, list, "a list")
        return tuple(self._as(x, str, "a text", self._name(field)) for x in found)

    def integers(self, field: str, most: int = MOST_INT32) -> tuple[int, ...]:
        """A list of different numbers from 0 on."""
        return self._integers(self._values.get(field), self._name(field), most)

    def _integers(self, found: Any, name: str, most: int = MOST_INT32) -> tuple[int, ...]:
        values = [
            self._within(self._as(x, int, "a number", name), 0, most, name)
            for x in self._as(found, list, "a list", name)
        ]
        if len(set(values)) != len(values):
            self.wrong(f"field {name} has a number twice: {_shown(values)}")
        return tuple(values)

    def inner(self, field: str) -> Fields:
        return Fields(
            self._path, self._remedy, self._take(field, dict, "an object"), self._name(field) + "."
        )

    def objects(self, field: str) -> tuple[Fields, ...]:
        """The objects of a list."""
        name = self._name(field)
        return tuple(
            Fields(self._path, self._remedy, self._as(x, dict, "an object", name), f"{name}[].")
            for x in self._take(field, list, "a list")
        )

    def text_map(self, field: str) -> dict[str, str]:
        inner = self.inner(field)
        return {key: inner.text(key) for key in inner._values}

    def number_map(self, field: str, most: int = MOST_INT64) -> dict[int, int]:
        """Numbers by numbers, both from 0 on; keys of JSON objects are texts."""
        inner = self.inner(field)
        return {inner._key(key): inner.integer(key, most=most) for key in inner._values}

    def lists_by_number(self, field: str) -> dict[int, tuple[int, ...]]:
        """Lists of different numbers, by numbers."""
        inner = self.inner(field)
        return {inner._key(key): inner.integers(key) for key in inner._values}

    def _key(self, key: str) -> int:
        name = f"key {self._inside}{key[:_SHOWN]}"
        number = self._within(self._number(key, name), 0, MOST_INT32, name)
        if str(number) != key:
            self.wrong(f"{name} is not a plain decimal number")
        return number

    def raw(self, field: str) -> Any:
        return self._values.get(field)


def read_object(path: str, value: bytes, remedy: str) -> Fields:
    """The fields of the JSON object that is the value of the node at `path`."""
    nothing = Fields(path, remedy, {})
    try:
        found = json.loads(value.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        kind = "no JSON" if value else "empty"
        detail = f" ({e})" if isinstance(e, ValueError) and value else ""
        nothing.wrong(f"its value is {kind}{detail[:_SHOWN]}")
    if not isinstance(found, dict):
        nothing.wrong(f"its value is {_shown(found)}, not an object")
    return Fields(path, remedy, found)


def read_number(path: str, value: bytes, remedy: str) -> int:
    """A node whose whole value is a decimal number from 0 on."""
    fields = Fields(path, remedy, {"value": value.decode("latin-1")})
    return fields.digits("value", most=MOST_INT32)


def write_object(fields: dict[str, Any]) -> bytes:
    """JSON as Kafka writes it: without spaces."""
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    if not all(map(_is_unicode, found)):
        raise ValueError("a key is no Unicode text")
    return found


def _is_unicode(text: str) -> bool:
    """False with half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of too many digits, a tree too deep
        text = type(value).__name__
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
