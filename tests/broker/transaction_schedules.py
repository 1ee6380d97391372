"""Seeded schedules of transactions: ``python -m tests.broker.transaction_schedules``."""

from __future__ import annotations

import sys

from tests.broker.transaction_world import Broken, play
from tests.schedules import Found, command_line

STEPS = 3000


def failing(first: int, schedules: int, step: int = 1) -> Found:
    """The first seed that breaks an invariant."""
    for seed in range(first, first + schedules, step):
        try:
            play(seed, STEPS)
        except Broken as e:
            return seed, e.world, str(e)  # type: ignore[attr-defined]
    return None


if __name__ == "__main__":
    sys.exit(command_line("tests.broker.transaction_schedules", failing, sys.argv[1:], __doc__))
