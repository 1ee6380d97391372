"""Commits of offsets by WRITEs under a seeded network: generations that move, members that are
fenced or killed, slots that are given back, WRITEs that are late or torn, a log that is compacted,
a coordinator that stops or is killed and started again (see commit_world.py for what is checked).

`make commit-schedules COUNT=n SEED=s` runs more of them.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

from commit_world import run

SCHEDULES = int(os.environ.get("KDIRECT_SCHEDULES", "50"))
ONE = os.environ.get("KDIRECT_SIMULATE")
FAILED_SEEDS: list[int] = []


def test_commits(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    seeds = [*FAILED_SEEDS, *(chance.getrandbits(32) for _ in range(SCHEDULES))]
    counts: Counter[str] = Counter()
    for number, one in enumerate([int(ONE)] if ONE else seeds):
        print(f"schedule {one}: repeat it alone with KDIRECT_SIMULATE={one}")
        history = run(one, tmp_path / str(number))
        counts.update(
            direct=history.direct,
            over_tcp=history.acknowledged - history.direct,
            refused=history.refused,
            unknown=history.unknown,
            looks=history.looks,
            cleaned=history.cleaned,
        )
    print(dict(counts))
    if not ONE:
        assert min(counts.values()) > 0 and len(counts) == 6, "something never happened"
