"""Schedules of a broker whose tiers are real, but for threads and store: one seed, one run.

``python -m tests.storage.driver_schedules --first SEED --schedules COUNT`` runs many of them.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.storage.driver_world import DriverWorld

STEPS = 60


def run(seed: int) -> tuple[Counter[str], list[tuple[str, str, str]]]:
    """One schedule, until everything has settled: what happened in it, and every request to the
    store.  AssertionError: a promise was broken."""
    directory = Path(tempfile.mkdtemp(prefix="tier-drivers-", dir="/dev/shm"))
    world = DriverWorld(seed, directory)
    try:
        for _ in range(STEPS):
            world.step()
        if seed % 5 == 0:
            world.delete_topic()
            if seed % 2:
                world.run(world.rng.random())
                world.die()
        world.heal()
        return Counter(world.counts), world.handler.log
    finally:
        world.close()
        shutil.rmtree(directory, ignore_errors=True)


def quiet() -> None:
    """Warnings of what was done to the store are of no use here."""
    logging.getLogger("kdirect").setLevel(logging.ERROR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=2000)
    arguments = parser.parse_args()
    quiet()
    total: Counter[str] = Counter()
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        try:
            total += run(seed)[0]
        except Exception as e:
            failed += 1
            print(f"seed {seed}: {type(e).__name__}: {e}", flush=True)
    print(f"{arguments.schedules} schedules, {failed} failed: {dict(total)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
