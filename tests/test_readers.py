"""The stand-ins of `tests/readers.py` against what they stand in for."""

from __future__ import annotations

import inspect

from kdirect.client.reader import Reader
from kdirect.client.session import Session
from tests.readers import ReadsOnly, StandInReader


def arguments(function: object) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in parameters]


def test_a_reader_is_asked_for_as_of_a_session() -> None:
    assert arguments(ReadsOnly.reader) == arguments(Session.reader)


def test_a_reader_has_what_real_ones_have() -> None:
    own = {name for name in vars(StandInReader) if not name.startswith("_")}
    assert own | {"__iter__"} <= set(dir(Reader))
    for name in ("fillings", "check_topic", "statistics", "close"):
        assert arguments(getattr(StandInReader, name)) == arguments(getattr(Reader, name))
