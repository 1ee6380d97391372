"""A broker that is killed at each step of copying and deletion loses nothing and leaves nothing."""

from __future__ import annotations

import pytest

from tests.storage.remote_kills import STEPS, run

SEEDS = range(20)  # each step once, six of them twice


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{seed}-{STEPS[seed % len(STEPS)]}")
def test_a_broker_that_is_killed_comes_back(seed: int) -> None:
    run(seed)
