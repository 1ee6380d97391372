"""Schedules of a broker whose tiers are real, but for threads and store: one seed, one run.

``python -m tests.storage.driver_schedules --first SEED --schedules COUNT`` runs many of them.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.storage.driver_world import DriverWorld
from tests.storage.schedules import run_many

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


if __name__ == "__main__":
    quiet()
    sys.exit(run_many(lambda seed: run(seed)[0], __doc__, 2000))
