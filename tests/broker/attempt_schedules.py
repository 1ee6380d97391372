"""Seeded schedules of batches that are written exactly once:
``python -m tests.broker.attempt_schedules``."""

from __future__ import annotations

import sys

from tests.broker.attempt_world import Broken, World, play
from tests.schedules import Found, command_line

STEPS = 4000


def failing(first: int, schedules: int, step: int = 1, kind: type[World] = World) -> Found:
    """The first seed that breaks an invariant."""
    for seed in range(first, first + schedules, step):
        try:
            play(seed, STEPS, kind)
        except Broken as e:
            return seed, e.world, str(e)  # type: ignore[attr-defined]
    return None


if __name__ == "__main__":
    sys.exit(command_line("tests.broker.attempt_schedules", failing, sys.argv[1:], __doc__))
