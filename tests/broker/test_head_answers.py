"""A head after which another is filled lasts until its producer has all its answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kdirect.broker.head_driver import LONGEST_ANSWER_CHECK_S, HeadDriver
from kdirect.broker.head_life import State


class Hashed(SimpleNamespace):
    """One that may be in a set."""

    __hash__ = object.__hash__


def test_a_head_that_waits_for_replicas_is_looked_at_less_and_less() -> None:
    waits: list[float] = []
    looks: list[tuple[Any, ...]] = []

    def later(seconds: float, callback: Any, *args: Any) -> None:
        waits.append(seconds)
        looks.append(args)

    access: Any = Hashed(
        ended=False,
        partition=SimpleNamespace(topic_partition=("t", 0)),
        is_answered=lambda: len(waits) == 10,
        end=lambda *args: setattr(access, "ended", True),
    )
    driver: Any = SimpleNamespace(
        life=lambda tp: SimpleNamespace(state=State.NOBODY),
        stopping=False,
        on_broker_requests=None,
        _unanswered=set(),
        _grants=None,
        _scheduler=SimpleNamespace(later=later),
        _end_answered=None,
    )
    HeadDriver._end_answered(driver, access)  # type: ignore[arg-type]
    while looks:
        HeadDriver._end_answered(driver, *looks.pop())
    assert access.ended and not driver._unanswered
    assert len(waits) == 10 and waits[0] == 0.001
    assert waits == sorted(waits) and waits[-1] == LONGEST_ANSWER_CHECK_S
