"""Accelerated queries whose processes are killed: ten seeds (`make slash-kills` draws more)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.spark.slash_kills import DELTA, PARQUET, Trials, drawn
from tests.support import jars_module

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SEEDS = range(10)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    jars = jars_module()
    try:
        found = jars.jars("delta")
    except jars.MissingJarsError:
        found = []  # the seeds that write Delta are skipped
    made = Trials(tmp_path_factory.mktemp("kills"), found)
    yield made
    made.close()
    # They came about, or nothing was tried.
    assert made.ran < len(SEEDS) or made.killed >= len(SEEDS) - 2, made.killed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_query_has_each_closed_window_once(trials, seed, request):
    scenario = drawn(seed)
    if scenario.sink == DELTA:
        request.getfixturevalue("delta_jars")
    trials.run(scenario)


def test_the_seeds_kill_everybody_everywhere():
    scenarios = [drawn(seed) for seed in range(300)]
    kills = [kill for scenario in scenarios for kill in scenario.kills]
    assert {kill.victim for kill in kills} == {"worker", "planner", "driver", "broker"}
    assert min(Counter(kill.at for kill in kills).values()) >= 5
    assert {kill.victim for seed in SEEDS for kill in drawn(seed).kills} == {
        "worker", "planner", "driver", "broker"
    }  # fmt: skip
    assert 80 < sum(scenario.sink == DELTA for scenario in scenarios) < 120
    assert {drawn(seed).sink for seed in SEEDS} == {PARQUET, DELTA}
