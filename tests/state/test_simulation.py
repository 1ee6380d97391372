"""Seeded schedules of whole jobs, and the proof that they find mistakes.

`make slash-schedules COUNT=100000` runs more of them.  A seed that fails prints itself; once mended
it stays in `FAILED`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kdirect.state.batches import Partition, Phase
from kdirect.state.messages import Welcome
from tests.schedules import found_at, on_all_cores
from tests.state import mistakes, real_mistakes, simulate
from tests.state.actors import CREDITS, Broken, Channel
from tests.state.model import LEFT, RIGHT, Query, Sequential, sessions, windows_of
from tests.state.topics import Row
from tests.state.wires import Buffer, Wire
from tests.state.world import Bounds, World

SCHEDULES = 1000
# Seeds that have failed: 0 (a job that was told to stop while an executor was lost waited for it),
# 10 (a message for an executor's old process reached the new one), 3100002725 (16 executors, and 51
# batches of little to heal: the simulation counted their steps together, and gave up), 3200014659
# (a job was told to stop after a cut, which the simulated coordinator did not notice).
FAILED = (0, 10, 3_100_002_725, 3_200_014_659)
# Where mistakes were found that show in few schedules.
FOUND_AT = {
    "closing_falls": 434,
    "logged_after_it_runs": 93,
    "log_cut_at_newest_snapshot": 62,
    "mode_ignored": 498,
    "snapshot_of_what_runs": 62,
}
REAL_FOUND_AT = {"match_emitted_twice": 22, "rows_of_older_attempts_kept": 26}


# What must have happened in these schedules, and how often: those in which nothing happens prove
# nothing.  "real": with real executors.
WANTED = {
    "kill executor": 125,
    "kill with file": 75,
    "kill coordinator": 125,
    "kill all": 75,
    "cut": 75,
    "stop": 75,
    "rescaled": 75,
    "in another mode": 10,
    "snapshots": 750,
    "written while a batch ran": 250,
    "restored from a snapshot": 250,
    "not restored": 7,
    "repeated for some": 250,
    "repeated without output": 500,
    "handed out again": 4,
    "dropped: repeated": 500,
    "dropped: old_attempt": 500,
    "held": 125,
    "late rows": 750,
    "idle partitions": 25,
    "real kill executor": 5,
    "real killed within a step": 1,
    "real kill all": 1,
    "real kill coordinator": 5,
    "real cut": 1,
    "real rescaled": 2,
    "real snapshots": 20,
    "real left: ChannelLostError": 15,
    "real left: StateExchangeError": 10,
    "real dropped_repeated": 4,
    "real dropped_old_attempt": 2,
    "real late rows": 100,
    "real idle partitions": 2,
    "real epochs that converged": 1250,
}


@pytest.mark.slow
@pytest.mark.timeout(900)  # some 55 s of one core, on a machine that may be busy
def test_schedules() -> None:
    """The same seeds in every run, so that enough of everything happens; `make slash-schedules`
    takes any others."""
    failed, told = on_all_cores("tests.state.simulate", 0, SCHEDULES)
    assert not failed, told
    lines = told.splitlines()
    seen: Counter = Counter()
    for line in lines:
        if line.startswith(simulate.SAYS):
            seen.update(json.loads(line.removeprefix(simulate.SAYS)))
    assert not {what: seen[what] for what, least in WANTED.items() if seen[what] < least}


@pytest.mark.parametrize("seed", FAILED)
def test_seeds_that_have_failed(seed: int) -> None:
    simulate.Run(seed).run()


@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda m: m.__name__)
def test_each_mistake_is_found(mistake: Callable[[], Any]) -> None:
    with mistakes.planted(mistake):
        found = found_at(simulate.failing, FOUND_AT.get(mistake.__name__), 0, 1000)
    assert found is not None, mistake.__doc__


@pytest.mark.parametrize("mistake", real_mistakes.OF_REAL, ids=lambda m: m.__name__)
def test_each_mistake_of_real_executors_is_found(mistake: Callable[[], Any]) -> None:
    with mistake():
        first = REAL_FOUND_AT.get(mistake.__name__, 0)
        found = simulate.failing_of([first, *range(400)], simulate.real_bounds)
    assert found is not None, mistake.__doc__


def test_an_executor_that_only_reads_drops_the_state_that_it_led() -> None:
    """The job was split anew.  What the executor had left in the midst of a batch ended the job."""
    bounds = Bounds(is_real=True, repeats=True, how="full", value_format="json")
    world = World(bounds, random.Random(1))
    executor = world.all[0]

    def join(attempt: int, vparts: Any, *, cold: bool) -> Any:
        executor._connect()
        address = executor.process.exchange.address()
        executor.process.treat(
            Welcome(attempt=attempt, plan=world.plan, options=world.options, vparts=vparts,
                    addresses=(address, address), cold=cold)
        )  # fmt: skip
        return executor.process._working.state

    try:
        join(1, ((0, 128), (128, 256)), cold=True).mark(Phase.DIRTY, 1, 0, None)
        executor.kill(with_file=False)
        assert join(2, ((0, 0), (0, 256)), cold=False).snapshot() == []
    finally:
        world.close()


def test_real_executors_run_joins_and_all_kinds_of_windows() -> None:
    bounds = [simulate.real_bounds(seed) for seed in range(200)]
    kinds = {(b.how, b.window.kind) for b in bounds}
    joins = {(how, kind) for how in ("inner", "left", "right", "full")
             for kind in ("tumbling", "session")}  # fmt: skip
    assert joins | {("", "sliding"), ("", "session"), ("", "none")} <= kinds
    assert {b.repeats for b in bounds} == {b.lists for b in bounds} == {False, True}


@pytest.mark.parametrize("seed", [7, 6, 31])
def test_a_seed_is_the_same_schedule_every_time(seed: int) -> None:
    first, second = simulate.Run(seed), simulate.Run(seed)
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


def test_wires_know_what_came_twice() -> None:
    wire = Wire(2)
    wire.repeat(Buffer(b"", 0, 1, 0, 0))
    assert wire.flying[0].is_repeated and wire.posted == 0


@pytest.mark.parametrize("how, alone", [("inner", 0), ("left", 2), ("right", 1), ("full", 3)])
def test_the_model_of_joins(how: str, alone: int) -> None:
    """One pair; a row of the left in a window of its own, and one of each side without a key."""
    model = Sequential(Query("tumbling", 10, 10, ahead=100, how=how), {})
    for topic, time, key in ((LEFT, 5, 1), (RIGHT, 6, 1), (LEFT, 15, 1), (LEFT, 5, None),
                             (RIGHT, 5, None)):  # fmt: skip
        model.apply(Partition(topic, 0), Row(time, key, time), now=0)
    rows = model.emit(20, set())
    assert rows[0, 10, 1, 5, 1, 6] == 1 and rows.total() == 1 + alone


def test_the_model_itself() -> None:
    assert windows_of(Query("sliding", 12, 8), 13) == [(8, 20)]
    assert windows_of(Query("sliding", 12, 8), 17) == [(8, 20), (16, 28)]
    assert windows_of(Query("tumbling", 7, 7, origin=3), 2) == [(-4, 3)]
    assert sessions([(20, 1), (1, 1), (7, 1)], 6) == [[(1, 1), (7, 1)], [(20, 1)]]
    model = Sequential(Query("tumbling", 10, 10, delay=2, ahead=100), {})
    for time in (5, 11, None, -1, 500):
        model.apply(Partition("a", 0), Row(time, 1, time or 0), now=0)
    assert (model.kept, model.bad) == (2, 3)
    assert model.emit(10, set()) == {(1, 0, 10, 1, 5, 5): 1}
