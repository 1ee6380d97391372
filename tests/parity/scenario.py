"""The list of scenarios.

Law: a scenario says what Spark's Kafka connector does; so with format("kafka") the outcome has to
be the expected one, and a difference of kdirect's is a row of `differences.KNOWN` or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.parity.world import World


@dataclass(frozen=True)
class Scenario:
    """`expected` is the repr of what `run` returns with format("kafka")."""

    suite: str
    name: str
    expected: str
    run: Callable[[World], Any]


SCENARIOS: list[Scenario] = []


def scenario(suite: str, name: str, expected: str) -> Callable[[Callable[..., Any]], Any]:
    """Enter a function into the list.  Names are unique."""

    def enter(run: Callable[..., Any]) -> Callable[..., Any]:
        assert all(name != known.name for known in SCENARIOS), name
        SCENARIOS.append(Scenario(suite, name, expected, run))
        return run

    return enter
