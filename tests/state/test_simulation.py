"""Seeded schedules of whole jobs, and the proof that they find mistakes.

`make slash-schedules COUNT=100000` runs more of them.  A seed that fails prints itself; once mended
it stays in `FAILED`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.schedules import on_all_cores
from tests.state import mistakes, simulate
from tests.state.actors import CREDITS, Broken, Channel
from tests.state.model import Query, Row, Sequential, sessions, windows_of

SCHEDULES = 2000
# Seeds that have failed: 0 (a job that was told to stop while an executor was lost waited for it),
# 10 (a message for an executor's old process reached the new one).
FAILED = (0, 10)


@pytest.mark.slow
def test_schedules() -> None:
    failed, told = on_all_cores("tests.state.simulate", 0, SCHEDULES)
    assert not failed, told


@pytest.mark.parametrize("seed", FAILED)
def test_seeds_that_have_failed(seed: int) -> None:
    simulate.Run(seed).run()


@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda m: m.__name__)
def test_each_mistake_is_found(mistake: Callable[[], Any]) -> None:
    with mistakes.planted(mistake):
        assert simulate.failing(0, 200) is not None, mistake.__doc__


def test_what_may_go_wrong_does() -> None:
    """A schedule in which nothing happens proves nothing."""
    seen: Counter = Counter()
    for seed in range(300):
        run = simulate.Run(seed)
        seen.update(run.run().seen)
        seen.update({move[0] for move in run.path if isinstance(move[0], str)})
    wanted = {
        "kill executor": 50,
        "kill with file": 50,
        "kill coordinator": 50,
        "kill all": 30,
        "cut": 50,
        "stop": 30,
        "rescaled": 30,
        "snapshots": 300,
        "written while a batch ran": 100,
        "restored from a snapshot": 100,
        "not restored": 3,
        "repeated for some": 100,
        "repeated without output": 200,
        "handed out again": 3,
        "dropped: repeated": 200,
        "dropped: old_attempt": 200,
        "held": 50,
        "late rows": 300,
        "idle partitions": 10,
    }
    assert not {what: seen[what] for what, least in wanted.items() if seen[what] < least}


def test_a_seed_is_the_same_schedule_every_time() -> None:
    first, second = simulate.Run(7), simulate.Run(7)
    first.run()
    second.run()
    assert first.path == second.path
    assert first.world.taken == second.world.taken


def test_a_failing_seed_prints_itself(capsys: pytest.CaptureFixture) -> None:
    with mistakes.planted(mistakes.greatest_entry_closes):
        assert simulate.main(["--first", "0", "--schedules", "5"])
    printed = capsys.readouterr().out
    assert "BROKEN" in printed
    assert "python -m tests.state.simulate --seed 0" in printed


def test_credits_that_are_lost_are_noticed() -> None:
    channel = Channel()
    channel.check()
    channel.returning += 1
    with pytest.raises(Broken, match="credits"):
        channel.check()
    assert channel.credits == CREDITS


def test_the_model_itself() -> None:
    assert windows_of(Query("sliding", 12, 8), 13) == [(8, 20)]
    assert windows_of(Query("sliding", 12, 8), 17) == [(8, 20), (16, 28)]
    assert windows_of(Query("tumbling", 7, 7, origin=3), 2) == [(-4, 3)]
    assert sessions([(20, 1), (1, 1), (7, 1)], 6) == [[(1, 1), (7, 1)], [(20, 1)]]
    model = Sequential(Query("tumbling", 10, 10, delay=2, ahead=100), {})
    for time in (5, 11, None, -1, 500):
        model.apply("a", Row(time, 1, time or 0), now=0)  # type: ignore[arg-type]
    assert (model.kept, model.bad) == (2, 3)
    assert model.emit(10, set()) == {(1, 0, 10, 1, 5, 5): 1}
