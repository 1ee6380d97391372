"""The scheduler: every task gets turns, and the thread sleeps only when none can go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kdirect.state import scheduler


def test_tasks_take_turns_until_all_have_ended() -> None:
    told: list[str] = []

    def task(name: str, turns: int) -> Iterator[bool]:
        for turn in range(turns):
            told.append(f"{name}{turn}")
            yield True

    def sleep() -> None:
        raise AssertionError("nothing was parked")

    scheduler.run([task("a", 3), task("b", 1), task("c", 2)], sleep)  # type: ignore[list-item]
    assert told == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_the_thread_sleeps_when_all_are_parked() -> None:
    arrived: list[int] = []
    sleeps = 0

    def receiver() -> Iterator[bool]:
        while len(arrived) < 3:
            yield False

    def sender() -> Iterator[bool]:
        yield False

    def sleep() -> None:
        nonlocal sleeps
        sleeps += 1
        arrived.append(sleeps)

    scheduler.run([receiver(), sender()], sleep)  # type: ignore[list-item]
    assert sleeps == 3


def test_an_error_of_one_task_ends_the_others() -> None:
    closed = []

    def patient() -> Iterator[bool]:
        try:
            while True:
                yield True
        finally:
            closed.append(True)

    def failing() -> Iterator[bool]:
        yield True
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        scheduler.run([patient(), failing()], lambda: None)  # type: ignore[list-item]
    assert closed == [True]
