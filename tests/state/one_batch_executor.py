"""An executor's process that lives for one batch, as a worker of Spark may: a program for the
tests."""

from __future__ import annotations

import sys

from kdirect.state import Executor, ExecutorSettings

if __name__ == "__main__":
    with Executor.open(ExecutorSettings.from_json(sys.stdin.readline())) as executor:
        executor.run_batch()
