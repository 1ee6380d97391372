"""An executor that kills itself or another process at a step, once: a program for the tests.

    python failing_executor.py STEP NUMBER MARK VICTIM

VICTIM (self, parent or a process id) gets signal 9 when the executor comes to STEP for the
NUMBER-th time; only the process that makes the file MARK does it.  VICTIM/SIGALRM, for example,
sends another signal.
"""

from __future__ import annotations

import os
import signal
import sys

from kdirect.state.batch_run import Observer, Step
from kdirect.state.executor import main


class KillAt(Observer):
    """Kills a process where it is told to."""

    def __init__(self, step: Step, number: int, mark: str, victim: int, how: int) -> None:
        self._victim, self._how = victim, how
        self._step = step
        self._left = number
        self._mark = mark

    def at(self, step: Step, batch: int) -> None:
        if step is not self._step:
            return
        self._left -= 1
        if self._left == 0:
            try:
                os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(self._victim, self._how)


if __name__ == "__main__":
    name, count, mark_file, whom = sys.argv[1:]
    pids = {"self": os.getpid(), "parent": os.getppid()}
    whom, _, how = whom.partition("/")
    pid = pids[whom] if whom in pids else int(whom)
    number = signal.Signals[how or "SIGKILL"]
    sys.exit(main(KillAt(Step(name), int(count), mark_file, pid, number)))
