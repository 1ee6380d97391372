"""Spark's Python daemon, whose workers kill a process where a file says so: for the tests.

Spark starts it in place of `pyspark.daemon` (conf ``spark.python.daemon.module``).  Its workers are
those of Spark; but a task of an accelerated query passes an observer to the state engine.  The
product knows nothing of this.  KDIRECT_KILLS names the directory of the kills: each file
``armed-N.json`` says where who dies:

    at       a step of an executor (`kdirect.state.batch_run.Step`); "arrive" before a task is an
             executor, "handed" after, "row" after it has handed rows to Spark
    batch    in this batch of the job, or a later one
    number   when an executor comes to it for the number-th time in a batch
    pids     who gets signal 9, in this order; "worker" is the process of the task
    lock     a file whose first word is one more process id: the lock of the state directory, which
             the planner's process holds

Only the process that can rename the file to ``fired-N.json`` kills, so the task that is run again
goes on.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

KILLS = "KDIRECT_KILLS"


class Kills:
    """Is told of the steps of one visit, as an `Observer`."""

    def __init__(self, directory: Path, batch: int) -> None:
        self._directory = directory
        self._batch = batch
        self._times: Counter[str] = Counter()

    def at(self, step: Any, batch: int) -> None:
        self.comes_to(step.value)

    def comes_to(self, place: str) -> None:
        self._times[place] += 1
        for armed in sorted(self._directory.glob("armed-*.json")):
            fired = armed.with_name(armed.name.replace("armed", "fired"))
            try:
                kill = json.loads(armed.read_text())
                if not self._means(kill, place):
                    continue
                os.rename(armed, fired)
            except FileNotFoundError:  # another process was faster
                continue
            kill_all(kill)
            return

    def _means(self, kill: dict[str, Any], place: str) -> bool:
        is_late_enough = self._batch >= kill["batch"] and self._times[place] >= kill["number"]
        return bool(kill["at"] == place and is_late_enough)


def kill_all(kill: dict[str, Any]) -> None:
    """Send signal 9 to the processes of a kill; one that has ended is none of them."""
    pids = [os.getpid() if pid == "worker" else pid for pid in kill["pids"]]
    if kill["lock"]:
        pids.append(int(Path(kill["lock"]).read_text().split()[0]))
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def watch(directory: Path) -> None:
    """From now on the tasks of this process tell of their steps."""
    from kdirect.state.visitor import Visit, visit
    from kdirect_spark.slash import task as tasks

    def handing(rows: Any) -> Any:
        """Tells when rows have been handed out."""
        for batch in rows:
            yield batch
            kills[0].comes_to("row")

    kills: list[Kills] = []

    def observed(settings: Any, *, batch: int, task: int, start: int) -> Visit:
        kills[:] = [Kills(directory, batch)]
        kills[0].comes_to("arrive")
        found = visit(settings, batch=batch, task=task, start=start, observer=kills[0])
        kills[0].comes_to("handed")
        return replace(found, rows=handing(found.rows))

    tasks.visit = observed


def main() -> None:
    """As `pyspark.daemon`; what is wrapped is loaded after the fork, as Spark does it."""
    from pyspark import daemon

    worker = daemon.worker

    def watched(sock: Any, authenticated: bool) -> int:
        watch(Path(os.environ[KILLS]))
        return worker(sock, authenticated)

    daemon.worker = watched
    daemon.manager()


if __name__ == "__main__":
    main()
