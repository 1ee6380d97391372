"""Who is held to hang: the one that says nothing, or all of them when none gets further."""

from __future__ import annotations

import pytest

from kdirect.state import heartbeat
from kdirect.state.heartbeat import Heart, Watch

WORK = "batch 1"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def turns(clock: Clock, watch: Watch, until: float, owing: set[int], **says: int) -> dict[int, str]:
    """Look every tenth of a second; executors that are named say so many steps then, or nothing
    new with 0."""
    steps = dict.fromkeys(says, 0)
    while clock.now < until:
        clock.now += 0.1
        for name, more in says.items():
            steps[name] += more
            watch.heard(int(name[1:]), steps[name])
        if found := watch.stalled(WORK, owing):
            return found
    return {}


def test_a_long_batch_is_no_hang(clock: Clock) -> None:
    watch = Watch(1.0, clock)
    assert turns(clock, watch, 50, {0, 1}, e0=1, e1=1) == {}


def test_the_one_that_says_nothing_hangs_and_not_its_peer_that_waits(clock: Clock) -> None:
    watch = Watch(1.0, clock)
    assert turns(clock, watch, 50, {0, 1}, e0=0) == {1: "said nothing for 1 s"}
    assert clock.now < 1.5
    # Its successor has the whole time.
    began = clock.now
    assert turns(clock, watch, 50, {0, 1}, e0=0).keys() == {1}
    assert clock.now - began > 1


def test_executors_that_wait_for_each_other_hang(clock: Clock) -> None:
    watch = Watch(1.0, clock)
    found = turns(clock, watch, 50, {0, 1}, e0=0, e1=0)
    assert found.keys() == {0, 1}
    assert "made no step" in found[0]


def test_one_that_gets_further_is_enough(clock: Clock) -> None:
    watch = Watch(1.0, clock)
    assert turns(clock, watch, 50, {0, 1}, e0=0, e1=1) == {}


def test_who_owes_nothing_does_not_hang(clock: Clock) -> None:
    watch = Watch(1.0, clock)
    assert turns(clock, watch, 50, set()) == {}
    assert turns(clock, watch, clock.now + 0.5, {0}) == {}


def test_a_coordinator_that_was_away_hears_first(clock: Clock) -> None:
    watch = Watch(1.0, clock)
    assert turns(clock, watch, 0.5, {0}) == {}
    clock.now += 100
    assert watch.stalled(WORK, {0}) == {}
    assert turns(clock, watch, clock.now + 2, {0}).keys() == {0}


def test_new_work_is_a_new_beginning(clock: Clock) -> None:
    watch = Watch(1.0, clock)
    for i in range(20):
        clock.now += 0.4
        assert watch.stalled(i // 2, {0}) == {}


def test_without_a_limit_nobody_hangs(clock: Clock) -> None:
    watch = Watch(0, clock)
    assert turns(clock, watch, 1000, {0}) == {}


def test_an_executor_speaks_once_in_an_interval(clock: Clock) -> None:
    said: list[int] = []
    heart = Heart(said.append, 1.0, clock)
    for _ in range(100):
        clock.now += 0.05
        heart.step()
    assert len(said) in (4, 5)
    assert said == sorted(said)
    for _ in range(100):
        clock.now += 0.05
        heart.wait()
    assert len(said) in (9, 10)
    assert said[-1] == 100


@pytest.mark.parametrize("timeout_s", [0.1, 1, 2, 60, 3600])
def test_the_interval_suits_the_limit(timeout_s: float) -> None:
    assert heartbeat.interval_s(timeout_s) <= min(1, timeout_s / 2)
    assert heartbeat.interval_s(0) == 1
