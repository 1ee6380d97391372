"""Schedules of a tiered partition: one seed, one run.

``python -m tests.storage.schedules --first SEED --schedules COUNT`` runs many of them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable

from kdirect.storage.remote_events import TopicDeleted
from kdirect.storage.remote_log import RemoteLog
from tests.storage.world import World

STEPS = 150


def run(seed: int, kind: type[RemoteLog] = RemoteLog) -> Counter[str]:
    """One schedule, until everything has settled; what happened in it.  AssertionError: a promise
    was broken."""
    world = World(seed, kind)
    for _ in range(STEPS):
        world.step()
    if seed % 7 == 0:
        world.deleted = True
        world.tell(world.leader, TopicDeleted())
        if seed % 2:
            world.die()
    world.heal()
    return Counter(world.counts)


def run_many(run: Callable[[int], Counter[str]], doc: str, schedules: int) -> int:
    """Run the seeds that the command line names, `schedules` by default; the exit status."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=schedules)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        try:
            total += run(seed)
        except Exception as e:
            failed += 1
            print(f"seed {seed}: {type(e).__name__}: {e}", flush=True)
    print(f"{arguments.schedules} schedules, {failed} failed: {dict(total)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_many(run, __doc__, 20_000))
