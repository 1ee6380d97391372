"""Accelerated queries whose processes are killed: twenty seeds (`make slash-kills` draws more)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.spark.slash_kills import Trials, drawn

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SEEDS = range(20)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    made = Trials(tmp_path_factory.mktemp("kills"))
    yield made
    made.close()
    # They came about, or nothing was tried.
    assert made.ran < len(SEEDS) or made.killed >= len(SEEDS) - 2, made.killed


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_query_has_each_closed_window_once(trials, seed):
    trials.run(drawn(seed))


def test_the_seeds_kill_everybody_everywhere():
    kills = [kill for seed in range(300) for kill in drawn(seed).kills]
    assert {kill.victim for kill in kills} == {"worker", "planner", "driver", "broker"}
    assert min(Counter(kill.at for kill in kills).values()) >= 5
    assert {kill.victim for seed in SEEDS for kill in drawn(seed).kills} == {
        "worker", "planner", "driver", "broker"
    }  # fmt: skip
