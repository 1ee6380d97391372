"""Streams into the exactly-once sink whose processes are killed: ten seeds of three kills, which
have every place of the sink and of the broker's commit (`make sink-kills` draws more)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.spark.sink_kills import (
    DRIVERS_OF_A_ROUND,
    PLACES,
    ROWS,
    SEEDS_OF_A_ROUND,
    Trials,
    drawn,
    is_whole,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SEEDS = range(SEEDS_OF_A_ROUND)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    made = Trials(tmp_path_factory.mktemp("kills"))
    yield made
    made.close()
    # They came about, or nothing was tried.
    assert made.ran < len(SEEDS) or made.came.total() >= 2.5 * len(SEEDS), made.came


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_stream_writes_each_micro_batch_once(trials, seed):
    trials.run(drawn(seed))


def test_the_seeds_kill_everybody_everywhere():
    kills = Counter((k.victim, k.at) for seed in SEEDS for k in drawn(seed).kills)
    assert kills.total() == 30
    assert {kill for kill in kills if kill[0] != "driver"} == {
        (victim, at) for victim in ("worker", "broker") for at in PLACES[victim]
    }
    assert sum(times for kill, times in kills.items() if kill[0] == "driver") == DRIVERS_OF_A_ROUND
    many = {(kill.victim, kill.at) for seed in range(40) for kill in drawn(seed).kills}
    assert many == {(victim, at) for victim in PLACES for at in PLACES[victim]}


def test_a_part_or_a_second_time_is_noticed():
    batch = [b"%d" % i for i in range(ROWS)]
    assert is_whole([]) and is_whole(batch)
    assert not is_whole(batch[1:]) and not is_whole(batch + batch)
    assert not is_whole([*batch, b"%d" % ROWS])
