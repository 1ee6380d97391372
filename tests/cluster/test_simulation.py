"""Seeded schedules of the model world hold and heal, and find each mistake.

A seed that fails is in the message; ``python -m tests.cluster.simulate --seed N`` shows its steps.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster import simulate
from tests.cluster.mistakes import AFTER_CRASHES, MISTAKES
from tests.schedules import found_at, on_all_cores

SCHEDULES = 1_000
ALL = {**MISTAKES, **AFTER_CRASHES}
# Where mistakes were found that show in few schedules.
FOUND_AT = {"epoch_start_left_out": 130, "answer_of_another_epoch_used": 95}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5 * SCHEDULES, SCHEDULES))
def test_schedules_hold_and_heal(first: int) -> None:
    failed, told = on_all_cores("tests.cluster.simulate", first, SCHEDULES)
    assert not failed, told


@pytest.mark.parametrize("mistake", ALL)
def test_a_mistake_is_found(mistake: str) -> None:
    with ALL[mistake]():
        found = found_at(simulate.failing, FOUND_AT.get(mistake), 0, 5 * SCHEDULES)
    assert found is not None
    seed, run, broken = found
    with ALL[mistake]():
        again = simulate.failing(seed, 1)
    assert again is not None and (again[1].path, again[2]) == (run.path, broken)


def test_everything_happens() -> None:
    """A kind of move that no schedule takes would be tested by none."""
    taken: Counter[str] = Counter()
    lost = 0
    for seed in range(150):
        run = simulate.Run(seed)
        world = run.run()
        taken.update(move[0] for move in run.path)
        lost += world.void > 0
    assert {*simulate.WEIGHTS} <= {*taken}
    assert lost, "no unclean election lost anything"


def test_a_seed_that_fails_prints_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with MISTAKES["completion_counted"]():
        assert simulate.main(["--schedules", "100"]) == 1
        printed = capsys.readouterr().out.splitlines()
        command = printed[1].split()
        assert command[:3] == ["python", "-m", "tests.cluster.simulate"]
        assert simulate.main(command[3:]) == 1
    steps = capsys.readouterr().out.splitlines()
    assert steps[-3] == printed[0] and len(steps) > 10
