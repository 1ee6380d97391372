"""Seeded schedules of replicas with real kernels hold and heal, and find each mistake.

A seed that fails is in the message; ``python -m tests.replication.run --seed N`` shows its steps.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.replication import run as simulation
from tests.replication.mistakes import MISTAKES, OF_CLEANERS, OF_PRODUCERS, OF_READERS
from tests.schedules import found_at, on_all_cores

SCHEDULES = 1_000
ALL = 2_000  # `make cluster-schedules` runs any others
# Where mistakes were found that show in few schedules.
FOUND_AT = {"epoch_start_left_out": 941, "reading_kept": 3197, "grant_kept": 274}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, SCHEDULES))
def test_schedules_hold_and_heal(first: int) -> None:
    failed, told = on_all_cores("tests.replication.run", first, SCHEDULES)
    assert not failed, told


@pytest.mark.parametrize("seed", [2722])
def test_a_seed_that_failed_once_holds(seed: int) -> None:
    """2722: a producer whose records were all deleted was forgotten when its log was opened."""
    assert simulation.failing(seed, 1) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    first, step = (0, 1)
    # Seeds that have some of these.
    for those, of_them in ((OF_PRODUCERS, (4, 5)), (OF_READERS, (2, 5)), (OF_CLEANERS, (5, 10))):
        if mistake in those:
            first, step = of_them
    with MISTAKES[mistake]():
        found = found_at(simulation.failing, FOUND_AT.get(mistake), first, 5 * SCHEDULES, step)
    assert found is not None
    seed, run, broken = found
    with MISTAKES[mistake]():
        again = simulation.failing(seed, 1)
    assert again is not None and (again[1].path, again[2]) == (run.path, broken)


def test_everything_happens() -> None:
    """A kind of step that no schedule takes would be tested by none."""
    taken: Counter[str] = Counter()

    def look(run: simulation.Run) -> None:
        taken.update(move[0] for move in run.path)
        taken["lost by an election"] += run.world.void > 0
        taken["a log of several segments"] += any(
            len(broker.partition.segments) > 1 for broker in run.brokers
        )
        taken["a writer hung beyond the end of its key"] += run.hung_beyond
        taken.update({f"{what} while segments are read": n for what, n in run.met.items()})
        taken.update(run.compacted)
        for producer in run.producers:
            of = "all" if producer.acks == -1 else "one"
            taken[f"acknowledged by {of}"] += len(producer.heard)
            taken[f"sent again, and there already, for {of}"] += producer.again
        for broker in run.brokers + run.dead:
            counts = broker.led_head.access.statistics()
            taken["a producer hung beyond the end of its key"] += counts["rdma_heads_fenced"]

    assert simulation.failing(0, 300, look=look) is None
    wanted = {
        *simulation.WEIGHTS,
        *simulation.PRODUCERS_WEIGHTS,
        *simulation.READERS_WEIGHTS,
        *simulation.CLEANERS_WEIGHTS,
        "copies that were compacted",
        "led logs that were compacted",
        "fetches of what was compacted",
        "fetches over a gap",
        "cut of a compacted log",
        "crash of a compacted log",
        "lost by an election",
        "a log of several segments",
        "acknowledged by all",
        "acknowledged by one",
        "sent again, and there already, for all",
        "a producer hung beyond the end of its key",
    }
    assert not {kind for kind in wanted if not taken[kind]}


def test_a_seed_that_fails_prints_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with MISTAKES["completion_counted"]():
        assert simulation.main(["--schedules", "100"]) == 1
        printed = capsys.readouterr().out.splitlines()
        command = printed[1].split()
        assert command[:3] == ["python", "-m", "tests.replication.run"]
        assert simulation.main(command[3:]) == 1
    steps = capsys.readouterr().out.splitlines()
    assert steps[-3] == printed[0] and len(steps) > 10
