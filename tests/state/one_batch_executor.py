"""An executor's process that lives for one batch, as a worker of Spark may: a program for tests.

Executor 1 is slow to end its batch, so the other one has ended its own long before.
"""

from __future__ import annotations

import sys
import time

from kdirect.state import Executor, ExecutorSettings
from kdirect.state.batch_run import Observer, Step


class Slow(Observer):
    """Half a second passes before the output of a batch is kept."""

    def at(self, step: Step, batch: int) -> None:
        if step is Step.OUTPUT:
            time.sleep(0.5)


if __name__ == "__main__":
    settings = ExecutorSettings.from_json(sys.stdin.readline())
    with Executor.open(settings, Slow() if settings.executor == 1 else None) as executor:
        executor.run_batch()
