"""A broker that is killed at each step of copying and deletion loses nothing and leaves nothing:
over a directory, and each fourth round over S3."""

from __future__ import annotations

import pytest

from tests.storage.remote_kills import STEPS, run

SEEDS = range(20)  # each step once, six of them twice
MOST_MISSED = 4  # five of two hundred were, when two hundred were run
_fired: dict[int, bool] = {}


def _name(seed: int) -> str:
    return f"{seed}-{'s3-' if _is_over_s3(seed) else ''}{STEPS[seed % len(STEPS)]}"


def _is_over_s3(seed: int) -> bool:
    return seed % 4 == 3


@pytest.mark.parametrize("seed", SEEDS, ids=_name)
def test_a_broker_that_is_killed_comes_back(seed: int, request: pytest.FixtureRequest) -> None:
    s3 = _is_over_s3(seed)
    place = request.getfixturevalue("object_stores")["s3"].fresh() if s3 else None
    _fired[seed] = run(seed, place).fired


def test_the_kills_were_reached() -> None:
    """All but a few: a round without its kill shows little.  Of those that ran before."""
    if not _fired:
        _fired[0] = run(0, None).fired
    missed = [_name(seed) for seed, fired in _fired.items() if not fired]
    assert len(missed) <= MOST_MISSED and len(missed) < len(_fired), missed
