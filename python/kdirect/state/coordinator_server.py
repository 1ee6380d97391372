"""Carries out what the coordinator of a job decides: connections, files, processes, time.

This file opens sockets and writes files.  Owns: the connections of executors, the rows that come
over them, and the order of effects: each is carried out, durably where it must be, before the next
one.  What may not enter: decisions (`kdirect.state.coordinator`), and how executors are started
(`kdirect.state.launcher`).

Everything happens in the thread that calls `next_output` or `stop`; there is no other.  While the
caller is elsewhere nothing new begins, and executors wait.
"""

from __future__ import annotations

import logging
import selectors
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from kdirect import metrics
from kdirect.errors import (
    FormatError,
    KdirectError,
    StateError,
    StateProtocolError,
    TimedOutError,
)
from kdirect.state import coordinator, job, messages, snapshots
from kdirect.state.batches import BatchRecord, Commit, Partition, Range
from kdirect.state.control import ControlConnection, ControlListener
from kdirect.state.directory import JobDirectory
from kdirect.state.executor import ExecutorSettings
from kdirect.state.launcher import ExecutorProcess, Launcher

log = logging.getLogger("kdirect.state")

PAUSE_S = 0.05  # between two looks at topics that had nothing new
BROKER_PAUSE_S = 0.5  # between two questions to brokers that do not answer
TURN_S = 0.2  # the longest sleep: then it is looked whether processes have ended
STOP_TIMEOUT_S = 10.0
ANSWERING = (  # phases in which executors owe an answer
    job.Phase.LISTENING,
    job.Phase.CONNECTING,
    job.Phase.RUNNING,
    job.Phase.SNAPSHOT,
)
Clock = Callable[[], float]


@dataclass(slots=True)
class _Rows:
    """The output of one executor, as it comes."""

    left: int
    data: bytearray = field(default_factory=bytearray)


class CoordinatorServer:
    """See the module.  Life: make it, `next_output` until it returns None, `stop`, `close`."""

    def __init__(
        self,
        settings: job.Settings,
        directory: JobDirectory,
        listener: ControlListener,
        *,
        launcher: Launcher,
        executor_settings: Callable[[int], ExecutorSettings],
        ends: Callable[[], Mapping[Partition, Range]],
        start_timeout_s: float,
        stall_timeout_s: float = 0.0,
        broker_timeout_s: float = 0.0,
        trigger_interval_s: float = 0.0,
        clock: Clock = time.time,
    ) -> None:
        self._counted: Counter[str] = Counter()  # of all batches before the newest
        self._counting = -1  # the newest batch that any executor has done
        self._counts: dict[int, dict[str, int]] = {}  # of that one, by executor
        self._ordered: Counter[str] = Counter()  # what was done besides batches
        self._settings = settings
        self._directory = directory
        self._listener = listener
        self._launcher = launcher
        self._executor_settings = executor_settings
        self._ends = ends
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._broker_timeout_s = broker_timeout_s
        self._no_broker_since: float | None = None
        self._progress: object = None
        self._progress_at = time.monotonic()
        self._trigger_interval_s = trigger_interval_s
        self._clock = clock
        self._processes: dict[int, ExecutorProcess] = {}
        self._strangers: list[ControlConnection] = []  # have shown the token, and not said hello
        self._connections: dict[int, ControlConnection] = {}
        self._events: deque[job.Event] = deque()
        self._ask_at: float | None = None  # when to look at the ends, by time.monotonic
        self._batch_began = 0.0
        self._gathering_since = time.monotonic()
        self._deaths = 0  # of processes since the last batch
        self._why = ""  # the last process ended
        self._rows: dict[int, _Rows] = {}
        self._handing: int | None = None
        self._tables: dict[int, pa.Table] = {}
        self._output: tuple[int, pa.Table] | None = None
        self._finished: job.Finish | None = None
        records = [BatchRecord.from_json(entry) for entry in directory.batches.entries]
        last = directory.commits.last
        self._job, effects = coordinator.open_job(
            settings,
            attempt=directory.attempt,
            records={record.number: record for record in records},
            committed=None if last is None else Commit.from_json(last),
            manifests=snapshots.manifests(directory.snapshots),
        )
        self._carry_out(effects)

    @property
    def attempt(self) -> int:
        """How many times the job was started or went on after a loss."""
        return self._job.attempt

    @property
    def needs_mapped_state(self) -> bool:
        """Would the next start have to rebuild anything without the executors' mapped state?  False
        once the job has ended in good order, with a snapshot of all."""
        finished = self._finished
        if finished is None or finished.error is not None:
            return True
        return not self._job.is_all_in_snapshot

    @property
    def processes(self) -> Mapping[int, ExecutorProcess]:
        """The executors' processes that were started last."""
        return self._processes

    @property
    def counts(self) -> Counter[str]:
        """What executors counted, over all batches that this start ran.  A batch that ran twice
        counts once."""
        found = Counter(self._counted)
        found.update(self.batch_counts)
        found.pop("state_bytes", None)
        return found

    @property
    def batch_counts(self) -> Counter[str]:
        """The same, of the newest batch that any executor has done, with the state after it."""
        found: Counter[str] = Counter()
        for counts in self._counts.values():
            found.update(counts)
        return found

    def statistics(self) -> dict[str, int]:
        """All metrics of the room `state`."""
        found = dict.fromkeys(metrics.names("state"), 0) | self.counts | self._ordered
        found |= {"attempts": self.attempt, "state_bytes": self.batch_counts["state_bytes"]}
        return found

    def _count(self, done: messages.BatchDone) -> None:
        if done.batch > self._counting:
            self._counted = self.counts
            self._counts = {}
            self._counting = done.batch
        if done.batch == self._counting:
            counts = {**done.counts, "rows_out": done.rows_out}
            self._counts[done.executor] = {name: n for name, n in counts.items() if n}

    def next_output(self) -> tuple[int, pa.Table] | None:
        """Commit what was handed out before, and wait for the output of the next batch.  None when
        the job has come to its end.  Raises what ended it."""
        self._event(job.Asked(self._now_us()))
        while self._output is None:
            if self._finished is not None:
                if self._finished.error is not None:
                    raise self._finished.error
                return None
            self._turn()
        output, self._output = self._output, None
        self._event(job.Handed(output[0]))
        return output

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the job in good order: with a snapshot, unless an output waits for its commit."""
        self._event(job.StopAsked(self._now_us()))
        deadline = time.monotonic() + timeout_s
        while self._finished is None:
            if time.monotonic() > deadline:
                raise TimedOutError(
                    f"the job did not stop within {timeout_s:.0f} s",
                    hint="its state is kept up to the last snapshot; run it again",
                )
            self._turn()

    def close(self) -> None:
        """End all processes and connections.  What is durable stays."""
        for connection in (*self._connections.values(), *self._strangers):
            connection.close()
        self._listener.close()
        patience = STOP_TIMEOUT_S
        for process in self._processes.values():
            process.end(patience)
        self._processes.clear()

    # -- one turn ----------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)

    def _event(self, event: job.Event) -> None:
        """Take an event to the machine, and all that follow from what it decides."""
        self._events.append(event)
        while self._events:
            self._job, effects = coordinator.step(self._job, self._events.popleft())
            self._carry_out(effects)

    def _turn(self) -> None:
        """Wait until something comes, and treat it."""
        self._watch()
        timeout = TURN_S
        if self._ask_at is not None:
            timeout = min(timeout, max(0.0, self._ask_at - time.monotonic()))
        with selectors.DefaultSelector() as selector:
            for fd in self._listener.filenos():
                selector.register(fd, selectors.EVENT_READ)
            for connection in (*self._connections.values(), *self._strangers):
                if not connection.closed:
                    selector.register(connection, selectors.EVENT_READ)
            selector.select(timeout)
        if self._ask_at is not None and time.monotonic() >= self._ask_at:
            self._ask_at = None
            self._find_ends()
        self._strangers += self._listener.poll()
        for stranger in list(self._strangers):
            self._meet(stranger)
        for executor, connection in list(self._connections.items()):
            self._hear(executor, connection)

    def _find_ends(self) -> None:
        """Ask the brokers, and again while none answers: one may be starting again."""
        try:
            ends = self._ends()
        except KdirectError as e:
            now = time.monotonic()
            if self._no_broker_since is None:
                self._no_broker_since = now
                log.warning("the ends of the topics cannot be found: %s", e)
            if not e.retriable or now - self._no_broker_since >= self._broker_timeout_s:
                raise
            self._ask_at = now + BROKER_PAUSE_S
            return
        self._no_broker_since = None
        self._event(job.Ends(ends, self._now_us()))

    def _watch(self) -> None:
        """See to it that every executor has a process."""
        if self._finished is not None:
            return
        for executor in range(self._settings.executors):
            process = self._processes.get(executor)
            if process is not None:
                why = process.ended()
                if why is None:
                    continue
                process.end(0)
                self._deaths += 1
                self._why = why
                log.warning("%s", why)
                if self._deaths > self._settings.max_restarts:
                    raise StateError(
                        f"executors ended {self._deaths} times without a batch in between; the"
                        f" last one: {why}",
                        hint="its message says why; max_restarts is the limit",
                    )
            self._processes[executor] = self._launcher.start(self._executor_settings(executor))
        self._end_stalled()
        if self._job.phase is not job.Phase.GATHERING:
            self._gathering_since = time.monotonic()
        elif time.monotonic() - self._gathering_since > self._start_timeout_s:
            missing = sorted(set(range(self._settings.executors)) - self._job.hellos.keys())
            if not missing:
                return  # what is missing are the ends of the topics
            raise TimedOutError(
                f"executors {missing} did not come within {self._start_timeout_s:.0f} s"
                + (f"; before: {self._why}" if self._why else ""),
                hint="look at their processes; start_timeout is the limit",
            )

    def _end_stalled(self) -> None:
        """End the processes that have not answered for too long: a process may hang, or be stopped,
        without an end of its connection."""
        now, state = time.monotonic(), self._job
        progress = (state.attempt, state.phase, state.heard, len(state.steps), state.last)
        if progress != self._progress or state.phase not in ANSWERING:
            self._progress, self._progress_at = progress, now
        elif 0 < self._stall_timeout_s < now - self._progress_at:
            self._progress_at = now
            for executor, process in self._processes.items():
                if executor not in state.heard:
                    log.warning(
                        "%s did not answer within %.1f s (%s): it is ended; stall_timeout is the"
                        " limit",
                        process.name,
                        self._stall_timeout_s,
                        state.phase.name,
                    )
                    process.end(0)

    def _meet(self, stranger: ControlConnection) -> None:
        """Has a new connection said which executor it is?"""
        try:
            data = stranger.poll()
            if data is None:
                return
            hello = messages.decode_from_executor(data)
        except (StateProtocolError, FormatError) as e:
            log.warning("a connection was dropped: %s", e)
            self._strangers.remove(stranger)
            stranger.close()
            return
        self._strangers.remove(stranger)
        if isinstance(hello, messages.Failed):
            self._event(hello)
        elif isinstance(hello, messages.Hello):
            old = self._connections.get(hello.executor)
            if old is not None:
                old.close()
            self._connections[hello.executor] = stranger
            self._event(hello)
        else:
            log.warning("%s began with %s: dropped", stranger.peer, hello.type)
            stranger.close()

    def _hear(self, executor: int, connection: ControlConnection) -> None:
        """Treat all that has come from an executor."""
        try:
            while self._connections.get(executor) is connection:
                data = connection.poll()
                if data is None:
                    return
                if executor in self._rows:
                    self._take_rows(executor, data)
                    continue
                self._understand(executor, messages.decode_from_executor(data))
        except (StateProtocolError, FormatError) as e:
            log.info("executor %d is lost: %s", executor, e)
            self._lose(executor)

    def _understand(self, executor: int, message: messages.FromExecutor) -> None:
        named = getattr(message, "executor", executor)
        if named != executor:
            raise StateProtocolError(f"executor {executor} speaks for executor {named}")
        if isinstance(message, messages.Output):
            if message.batch == self._handing and message.attempt == self._job.attempt:
                self._rows[executor] = _Rows(message.size)
            else:
                raise StateProtocolError(f"executor {executor} sent rows that nobody asked for")
            return
        if isinstance(message, messages.BatchDone) and message.attempt == self._job.attempt:
            self._deaths = 0
            self._count(message)
        if isinstance(message, messages.SnapshotDone):
            self._ordered["snapshot_bytes"] += message.part.size
        if isinstance(message, messages.NotRestored):
            log.warning("executor %d cannot restore a snapshot: %s", executor, message.message)
        self._event(message)

    def _lose(self, executor: int) -> None:
        connection = self._connections.pop(executor, None)
        if connection is not None:
            connection.close()
        self._give_up_output()
        self._event(job.Lost(executor))

    # -- output ------------------------------------------------------------------------------------

    def _give_up_output(self) -> None:
        """What was being collected is asked for again after the recovery."""
        self._handing = None
        self._rows.clear()
        self._tables.clear()

    def _hand_out(self, batch: int) -> None:
        self._give_up_output()
        self._handing = batch
        for executor in self._settings.leaders:
            self._tell(executor, messages.TakeOutput(attempt=self._job.attempt, batch=batch))

    def _take_rows(self, executor: int, data: bytes) -> None:
        rows = self._rows[executor]
        if len(data) > rows.left:
            raise StateProtocolError(f"executor {executor} sent more rows than it announced")
        rows.data += data
        rows.left -= len(data)
        if rows.left:
            return
        del self._rows[executor]
        try:
            with pa.ipc.open_stream(pa.py_buffer(rows.data)) as reader:
                self._tables[executor] = reader.read_all().replace_schema_metadata(None)
        except pa.ArrowInvalid as e:
            raise StateProtocolError(f"executor {executor} sent rows that are none: {e}") from e
        if len(self._tables) == len(self._settings.leaders) and self._handing is not None:
            tables = [self._tables[i] for i in sorted(self._tables)]
            self._output = (self._handing, pa.concat_tables(tables))
            self._give_up_output()

    # -- effects -----------------------------------------------------------------------------------

    def _carry_out(self, effects: job.Effects) -> None:
        for effect in effects:
            match effect:
                case job.WriteAttempt(attempt):
                    self._directory.write_attempt(attempt)
                    self._gathering_since = time.monotonic()
                case job.LogBatch(record):
                    self._directory.batches.append(record.to_json())
                    self._batch_began = time.monotonic()
                case job.LogCommit(commit):
                    self._directory.commits.append(commit.to_json())
                    self._ordered["batches"] += 1
                case job.Tell(executor, message):
                    self._ordered["restores"] += isinstance(message, messages.Restore)
                    self._tell(executor, message)
                case job.Disconnect(executor):
                    connection = self._connections.pop(executor, None)
                    if connection is not None:
                        connection.close()
                    self._give_up_output()
                case job.AskEnds(pause):
                    self._ask_ends(pause)
                case job.HandOut(batch):
                    self._hand_out(batch)
                case job.WriteManifest(manifest):
                    snapshots.write_manifest(self._directory.snapshots, manifest)
                    self._ordered["snapshots"] += 1
                case job.ForgetSnapshot(number, batches):
                    self._forget(number, batches)
                case job.Finish():
                    self._finished = effect

    def _tell(self, executor: int, message: messages.FromCoordinator) -> None:
        connection = self._connections.get(executor)
        if connection is None:
            return  # lost, which is on its way to the machine
        try:
            connection.send(messages.encode(message))
        except (StateProtocolError, TimedOutError) as e:
            log.info("executor %d is lost: %s", executor, e)
            del self._connections[executor]
            connection.close()
            self._give_up_output()
            self._events.append(job.Lost(executor))

    def _ask_ends(self, pause: bool) -> None:
        now = time.monotonic()
        at = now + PAUSE_S if pause else now
        if self._job.phase is not job.Phase.GATHERING:
            at = max(at, self._batch_began + self._trigger_interval_s)
        self._ask_at = at

    def _forget(self, number: int, batches: int) -> None:
        directory = self._directory
        shutil.rmtree(snapshots.snapshot_directory(directory.snapshots, number), ignore_errors=True)
        directory.batches.keep([e for e in directory.batches.entries if e["number"] > batches])
        directory.commits.keep([e for e in directory.commits.entries if e["number"] > batches])
