"""Whose processes the executors of a job are: started by its coordinator, or come by themselves.

Owns: which processes run as which executor, how many may die, and how long one is waited for.  What
may not enter: connections and what is said on them (`kdirect.state.coordinator_server`).

`LaunchedCrew` starts a process for each executor and another one when it has ended or hangs.
`VisitingCrew` is that of a planned job: processes come for one batch, each is told which executor
it is when all of that batch have come, and what becomes of one that hangs is the affair of whoever
started it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from kdirect.errors import StateError, StateProtocolError, TimedOutError
from kdirect.state import job
from kdirect.state.control import ControlConnection
from kdirect.state.executor import ExecutorSettings
from kdirect.state.launcher import ExecutorProcess, Launcher
from kdirect.state.messages import Arrived, Hello, Stop, encode
from kdirect.state.planned_job import deal_executors

log = logging.getLogger("kdirect.state")

STOP_TIMEOUT_S = 10.0  # for all executors to leave by themselves


class Crew:
    """The processes of a job.  One thread.  What a kind of crew has no part in does nothing."""

    # Do processes come all together, so that none of them stays when one is lost?
    comes_together = False

    def watch(self, state: job.Job) -> None:
        """See to it that every executor has a process.  Called at each turn; raises what ends the
        job."""

    def planned(self, batch: int) -> None:
        """This batch is to run: whoever waits for another one waits in vain."""

    def arrived(
        self, batch: int, said: Arrived, connection: ControlConnection
    ) -> list[tuple[int, ControlConnection]]:
        """A process has come for a batch, and `batch` is the one that is planned.  When it is the
        last of all, the executor that each of them becomes."""
        raise StateProtocolError("this job starts its executors itself")

    def check(self, connection: ControlConnection, hello: Hello) -> None:
        """StateProtocolError if this is not the process that is waited for as this executor."""

    def came(self, executor: int) -> None:
        """A process has said hello as this executor."""

    def hangs(self, executor: int, why: str) -> None:
        """Part with the process of an executor: it is stopped, or waits for what never comes."""

    def lost(self, connection: ControlConnection) -> bool:
        """A connection ended before a hello.  Do those that said theirs wait for it in vain?"""
        return False

    def give_up(self) -> None:
        """One of those who came together is lost."""

    def did_batch(self) -> None:
        """An executor has done a batch."""

    def begins_attempt(self) -> None:
        """All executors are to come, or to come back."""

    def waits(self) -> bool:
        """Has a process come that is not an executor yet?"""
        return False

    def job_ended(self, stop: Stop) -> None:
        """Whoever waits is to hear why."""

    def close(self) -> None:
        """End all processes."""


class LaunchedCrew(Crew):
    """See the module.  `executor_settings` gives what a process of an executor must know."""

    def __init__(
        self,
        launcher: Launcher,
        executor_settings: Callable[[int], ExecutorSettings],
        *,
        executors: int,
        max_restarts: int,
        start_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._launcher = launcher
        self._executor_settings = executor_settings
        self._executors = executors
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._processes: dict[int, ExecutorProcess] = {}
        self._starts: Counter[int] = Counter()  # of each executor's process
        self._started_at: dict[int, float] = {}  # the newest one of each executor
        self._came: set[int] = set()  # executors whose newest process has said hello
        self._gathering_since = time.monotonic()
        self._deaths = 0  # of processes since the last batch
        self._why = ""  # the last process ended

    @property
    def processes(self) -> Mapping[int, ExecutorProcess]:
        """The executors' processes that were started last."""
        return self._processes

    def check(self, connection: ControlConnection, hello: Hello) -> None:
        if hello.start < self._starts[hello.executor]:
            with contextlib.suppress(StateProtocolError):
                connection.put(encode(Stop(attempt=0)))
            raise StateProtocolError(
                f"executor {hello.executor} on {hello.host} (process {hello.process_id}) was"
                " replaced by another process: it is told to stop"
            )

    def came(self, executor: int) -> None:
        self._came.add(executor)

    def did_batch(self) -> None:
        self._deaths = 0

    def begins_attempt(self) -> None:
        self._gathering_since = time.monotonic()

    def watch(self, state: job.Job) -> None:
        for executor in range(self._executors):
            process = self._processes.get(executor)
            if process is not None:
                why = process.ended()
                if why is None:
                    continue
                self._bury(executor, why)
            self._starts[executor] += 1
            self._started_at[executor] = time.monotonic()
            self._came.discard(executor)
            self._processes[executor] = self._launcher.start(
                replace(self._executor_settings(executor), start=self._starts[executor])
            )
        if state.phase is not job.Phase.GATHERING:
            self._gathering_since = time.monotonic()
            return
        for executor in sorted(set(range(self._executors)) - state.hellos.keys()):
            self._miss(executor)

    def _miss(self, executor: int) -> None:
        """An executor has not come, or not come back.  After too long, one that was here before
        hangs, and its process is parted with.  TimedOutError for one that never came."""
        was_here = executor in self._came
        limit = self._start_timeout_s
        if was_here:
            limit = min(limit, self._stall_timeout_s or limit)
        since = max(self._gathering_since, self._started_at[executor])
        if time.monotonic() - since <= limit:
            return
        name = self._processes[executor].name
        if was_here:
            self._bury(executor, f"{name} hangs: it did not come back within {limit:g} s")
            return
        raise TimedOutError(
            f"{name} did not come within {limit:g} s"
            + (f"; before: {self._why}" if self._why else ""),
            hint="look at this process and its host; start_timeout is the limit",
        )

    def hangs(self, executor: int, why: str) -> None:
        process = self._processes.get(executor)
        if process is not None:
            self._bury(executor, f"{process.name} hangs: it {why}; stall_timeout is the limit")

    def _bury(self, executor: int, why: str) -> None:
        """See that a process is gone.  StateError if too many went without a batch in between."""
        self._processes.pop(executor).end(0)
        self._deaths += 1
        self._why = why
        log.warning("%s", why)
        if self._deaths > self._max_restarts:
            raise StateError(
                f"executors ended {self._deaths} times without a batch in between; the last one:"
                f" {why}",
                hint="its message says why; max_restarts is the limit",
            )

    def close(self) -> None:
        # They leave when their connections end, all at once.
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            process.end(max(0.0, deadline - time.monotonic()))
        self._processes.clear()


class VisitingCrew(Crew):
    """See the module.  A *gang* is the processes that come together for a batch, one for each
    executor; a later gang takes the place of one before, of which no process is waited for then.

    The processes of a later gang have greater numbers (`start`).  One of an old gang, which nobody
    has ended yet, may still be taken for one of a new gang, and the one in whose place it came
    waits: for no longer than `start_timeout_s`.  Then whoever started it starts another gang.

    A connection belongs to the crew from `arrived` until it is dealt."""

    comes_together = True

    def __init__(
        self, executors: int, start_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executors = executors
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._waiting: dict[int, tuple[Arrived, ControlConnection]] = {}  # by task
        self._since: dict[int, float] = {}  # by task: when it came
        self._oldest = 0  # the smallest start of the last gang
        # Those of the last gang that have been dealt, and have not said hello.
        self._dealt: dict[ControlConnection, int] = {}

    def arrived(
        self, batch: int, said: Arrived, connection: ControlConnection
    ) -> list[tuple[int, ControlConnection]]:
        self.planned(batch)
        old = self._waiting.get(said.task)
        if said.batch != batch:
            _refuse(connection, f"batch {said.batch} is not the one that is planned")
            return []
        if said.start < self._oldest or (old is not None and old[0].start >= said.start):
            _refuse(connection, f"other processes have come for batch {batch}")
            return []
        self._waiting[said.task] = (said, connection)
        self._since[said.task] = self._clock()
        if old is not None:
            old[1].close()
        self._forget_gone()
        if len(self._waiting) < self._executors:
            return []
        gang, self._waiting = self._waiting, {}
        self._oldest = min(said.start for said, _ in gang.values())
        dealt = deal_executors([said for said, _ in gang.values()])
        self.give_up()
        self._dealt = {gang[task][1]: executor for task, executor in dealt.items()}
        return [(executor, gang[task][1]) for task, executor in sorted(dealt.items())]

    def planned(self, batch: int) -> None:
        for task, (said, connection) in list(self._waiting.items()):
            if said.batch != batch:
                _refuse(connection, f"batch {said.batch} is not the one that is planned")
                del self._waiting[task]

    def _forget_gone(self) -> None:
        """Whoever was started together with one that has died is ended too."""
        for task, (said, connection) in list(self._waiting.items()):
            if connection.has_gone():
                log.info("task %d (process %d) left before it began", task, said.process_id)
                connection.close()
                del self._waiting[task]

    def check(self, connection: ControlConnection, hello: Hello) -> None:
        """One that was not dealt this executor, or is of a gang before the last, is refused."""
        if self._dealt.get(connection) != hello.executor:
            raise StateProtocolError(f"it says hello as executor {hello.executor}, which it is not")
        del self._dealt[connection]

    def lost(self, connection: ControlConnection) -> bool:
        if connection not in self._dealt:
            return False
        self.give_up()
        return True

    def give_up(self) -> None:
        for connection in self._dealt:
            connection.close()
        self._dealt.clear()

    def watch(self, state: job.Job) -> None:
        self._forget_gone()
        for task, (said, connection) in list(self._waiting.items()):
            if self._clock() - self._since[task] <= self._start_timeout_s:
                continue
            del self._waiting[task]
            stop = Stop(
                attempt=0,
                error=TimedOutError.__name__,
                message=f"of the {self._executors} processes for batch {said.batch} some did not"
                f" come within {self._start_timeout_s:g} s",
                hint="start one for each executor, all at once; start_timeout is the limit",
            )
            _tell_last(connection, stop)

    def waits(self) -> bool:
        return bool(self._waiting or self._dealt)

    def hangs(self, executor: int, why: str) -> None:
        log.warning("executor %d hangs: it %s", executor, why)

    def close(self) -> None:
        for _, connection in self._waiting.values():
            connection.close()
        self._waiting.clear()
        self.give_up()

    def job_ended(self, stop: Stop) -> None:
        for _, connection in self._waiting.values():
            _tell_last(connection, stop)
        self._waiting.clear()


def _refuse(connection: ControlConnection, why: str) -> None:
    """Tell a process that it has come in vain."""
    log.info("%s is refused: %s", connection.peer, why)
    stop = Stop(attempt=0, error=StateProtocolError.__name__, message=f"this came too late: {why}")
    _tell_last(connection, stop)


def _tell_last(connection: ControlConnection, stop: Stop) -> None:
    with contextlib.suppress(StateProtocolError):
        connection.put(encode(stop))
    connection.close()
