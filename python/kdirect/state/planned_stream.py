"""The coordinator's side of a planned job: somebody else plans batches and starts processes.

This file opens sockets, writes files and starts a thread.  Owns: the life of such a job in the
process that plans, and how what that process says reaches the coordinator.  What may not enter:
where the offsets of a batch come from, and who starts the executors.

    job = PlannedJob(plan, source, executors=2, directory="state")
    job.plan(0, ranges, ends)   # then two processes call visitor.visit(job.settings, batch=0, ..)
    job.plan(1, ranges, ends)   # batch 0 is committed

The coordinator lives in a thread of its own, because the planning process has another caller to
listen to while a batch runs.  That thread alone uses the server; others put what they want in a
queue and wake it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from kdirect.errors import KdirectError, StateError
from kdirect.state import exchange, job
from kdirect.state.batches import Partition, Range
from kdirect.state.control import ControlListener, close_in_children, new_token
from kdirect.state.coordinator_server import CoordinatorServer
from kdirect.state.crew import VisitingCrew
from kdirect.state.directory import JobDirectory
from kdirect.state.executor import ExecutorSettings
from kdirect.state.job_setup import executor_settings, job_file, welcome_options
from kdirect.state.plan import Plan

log = logging.getLogger("kdirect.state")

JOIN_TIMEOUT_S = 10.0
T = TypeVar("T")


class PlannedJob:
    """See the module.  Any thread of the process that made it; `close` it.

    `source`: the settings of the executors' clients.  `options`: resolved by
    `kdirect.options.ENGINE`.  `caller` is the caller's own name of the job: a directory that was
    made under another one is refused.  Raises StateDirectoryError for a directory that is in use,
    damaged, or of another plan."""

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, Any],
        *,
        executors: int,
        directory: str | Path | None,
        options: Mapping[str, Any],
        mode: str = "slash",
        caller: str = "",
    ) -> None:
        self._plan = plan
        self._source = dict(source)
        self._options = options
        self._executors = executors
        self._mode = mode
        self._closed = False
        self._process = os.getpid()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.exchange, self.exchange_reason = exchange.choose(
            options["exchange"], options["provider"]
        )
        with contextlib.ExitStack() as opened:
            description = job_file(plan, caller=caller)
            self._directory = JobDirectory.open(directory, description, plan_hash=plan.hash)
            opened.callback(self._directory.close)
            self._mapped = self._directory.map_state(options["state_memory"])
            opened.callback(self._leave_memory)
            self._token = new_token()
            listener = ControlListener(options["listen_address"], self._token)
            opened.callback(listener.close)
            self._address = listener.address
            self._server = CoordinatorServer(
                self._settings(),
                self._directory,
                listener,
                crew=VisitingCrew(executors, options["start_timeout"] / 1000),
                ends=dict,
                stall_timeout_s=options["stall_timeout"] / 1000,
            )
            opened.callback(self._server.close)
            self._wake, self._wakes = socket.socketpair()
            for end in (self._wake, self._wakes):
                close_in_children(end)
                end.setblocking(False)
                opened.callback(end.close)
            self._opened = opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="kdirect-slash", daemon=True)
        self._thread.start()

    def _settings(self) -> job.Settings:
        return job.Settings(
            plan=self._plan,
            executors=self._executors,
            options=welcome_options(self._directory, self._options, self._source, self._mode),
            snapshot_interval_us=int(self._options["snapshot_interval"]) * 1000,
            is_planned=True,
        )

    # -- for the planning process ------------------------------------------------------------------

    @property
    def settings(self) -> ExecutorSettings:
        """What a process must know to come: it holds the token of the job."""
        return executor_settings(
            self._options,
            address=self._address,
            token=self._token,
            executor=0,
            executors=self._executors,
            memory=self._mapped.path,
            exchange=self.exchange,
        )

    @property
    def directory(self) -> Path:
        return self._directory.path

    @property
    def memory(self) -> Path:
        """Where executors map their state."""
        return self._mapped.path

    def plan(
        self,
        number: int,
        ranges: Mapping[Partition, Range],
        ends: Mapping[Partition, Range],
        *,
        closes_all: bool = False,
    ) -> None:
        """Batch `number` reads `ranges` (every partition is there, also those with nothing new),
        and all batches before it are committed.  `ends`: the first and the next offset of each
        partition.  It runs when its executors have come, and once more for those that come again.
        `closes_all`: it is the last one, and all windows are emitted.

        Raises StateDirectoryError where the batch does not follow what the directory has, and
        DataLossError where records that it reads are gone."""

        self._call_or_fail(lambda: self._server.plan(number, ranges, ends, closes_all=closes_all))

    def check_topics(self, found: Mapping[str, str]) -> None:
        """Before a batch is planned: DataLossError if a topic was made again since the job met it.
        `found`: the ids of the topics, "" where brokers assign none."""
        self._call_or_fail(lambda: self._directory.check_topics(found))

    def _call_or_fail(self, work: Callable[[], None]) -> None:
        """An error of `work` ends the job."""

        def call() -> None:
            try:
                work()
            except Exception as e:
                self._fail(e)
                raise

        self._call(call)

    def would_close(self, ends: Mapping[Partition, Range]) -> bool:
        """Would a batch that reads nothing emit windows, because partitions have become idle?"""
        return self._call(lambda: self._server.would_close(ends))

    def figures(self) -> tuple[int, Counter[str], int | None]:
        """The newest batch that was done, its counts, and the event time below which all windows
        were emitted; None where there is no such time."""
        return self._call(
            lambda: (self._server.done, self._server.batch_counts, self._server.closes)
        )

    def is_alone(self) -> bool:
        """Has no process come that is here now?"""
        return self._call(self._server.is_alone)

    def statistics(self) -> dict[str, int]:
        """The metrics of the room `state`, of this start of the job."""
        return self._call(self._server.statistics)

    def close(self) -> None:
        """End the coordinator, as if it had been killed: what is mapped and what is on disk stays.
        A job without a directory of its own goes whole."""
        if self._closed or self._thread is threading.current_thread():
            return
        if os.getpid() != self._process:  # a child made by fork: nothing of this is its own
            return
        self._closed = True
        self._wake_up()
        self._thread.join(JOIN_TIMEOUT_S)
        self._opened.close()

    def __enter__(self) -> PlannedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread --------------------------------------------------------------------------------

    def _call(self, function: Callable[[], T]) -> T:
        """Let the coordinator's thread call `function`, and wait for what it returns or raises."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(function())
            except BaseException as e:
                answer.set_exception(e)

        if self._closed or not self._thread.is_alive():
            raise StateError("the job has been closed", hint="start the query again")
        self._calls.put(call)
        self._wake_up()
        while True:
            with contextlib.suppress(TimeoutError):
                return answer.result(timeout=1.0)
            if not self._thread.is_alive() and not answer.done():
                raise StateError("the coordinator of the job has ended; its log says why")

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            if not self._closed:  # nobody may wait for a thread that has ended
                self._server.close()

    def _serve(self) -> None:
        while not self._closed:
            with contextlib.suppress(BlockingIOError):
                while self._wakes.recv(4096):
                    pass
            with contextlib.suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()()
            if self._closed:
                return
            try:
                self._server.turn(self._wakes.fileno())
            except Exception as e:
                if self._server.finished is not None:
                    log.exception("the coordinator of a job that has ended fails again")
                    return
                self._fail(e)

    def _fail(self, error: Exception) -> None:
        """What was decided could not be carried out: the job ends, and whoever comes or plans hears
        why.  The thread goes on, to say so."""
        if self._server.finished is not None:
            return
        log.error("a job has ended: %s", error, exc_info=not isinstance(error, KdirectError))
        if not isinstance(error, KdirectError):
            error = StateError(
                f"the coordinator failed: {type(error).__name__}: {error}",
                hint="start the query again; its log has more",
            )
        self._server.fail(error)

    # -- files -------------------------------------------------------------------------------------

    def _leave_memory(self) -> None:
        if self._directory.temporary:
            self._mapped.remove()
        else:
            self._mapped.close()
