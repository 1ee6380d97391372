"""Carries out what the coordinator of a job decides: connections, files, processes, time.

This file opens sockets and writes files.  Owns: the connections of executors, the rows and parts of
snapshots that come over them, which executors are held to hang, and the order of effects: each is
carried out, durably where it must be, before the next one.  What may not enter: decisions
(`kdirect.state.coordinator`), and whose processes the executors are (`kdirect.state.crew`).

Everything happens in the thread that calls `next_output` or `stop`; there is no other.  While the
caller is elsewhere nothing new begins, and executors wait.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import BinaryIO

import pyarrow as pa

from kdirect import metrics
from kdirect.errors import (
    FormatError,
    KdirectError,
    StateProtocolError,
    TimedOutError,
)
from kdirect.format.bad_values import SAMPLES
from kdirect.state import coordinator, job, messages, part_transfer, planned_job, snapshots
from kdirect.state.batches import NO_BATCH, BatchRecord, Commit, Partition, Range
from kdirect.state.control import ControlConnection, ControlListener
from kdirect.state.crew import Crew
from kdirect.state.directory import JobDirectory
from kdirect.state.heartbeat import Watch
from kdirect.state.part_transfer import Arriving
from kdirect.state.windows import TIME_MAX, TIME_MIN

log = logging.getLogger("kdirect.state")

PAUSE_S = 0.05  # between two looks at topics that had nothing new
BROKER_PAUSE_S = 0.5  # between two questions to brokers that do not answer
LEVELS = ("state_bytes", "keys")  # counts of a batch that are no sums over batches
ATTEMPTS_AHEAD = 1 << 10  # attempts have 32 bits on the channels: not so many for each start
TURN_S = 0.2  # the longest sleep: then it is looked whether processes have ended
HELLO_TIMEOUT_S = 20.0  # after the token
ANSWERING = (  # phases in which executors owe an answer
    job.Phase.LISTENING,
    job.Phase.CONNECTING,
    job.Phase.RUNNING,
    job.Phase.SNAPSHOT,
)
Clock = Callable[[], float]


class _Rows:
    """The output of one executor, as it comes: `take` frames until it says that this was the
    last."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.data = bytearray()

    def take(self, data: bytes) -> bool:
        if len(data) > self.left:
            raise StateProtocolError("there are more rows than were announced")
        self.data += data
        self.left -= len(data)
        return not self.left

    def close(self) -> None:
        """Nothing is held."""


class CoordinatorServer:
    """See the module.  Life: make it, `next_output` until it returns None, `stop`, `close`."""

    def __init__(
        self,
        settings: job.Settings,
        directory: JobDirectory,
        listener: ControlListener,
        *,
        crew: Crew,
        ends: Callable[[], Mapping[Partition, Range]],
        stall_timeout_s: float = 0.0,
        broker_timeout_s: float = 0.0,
        trigger_interval_s: float = 0.0,
        clock: Clock = time.time,
    ) -> None:
        self._counted: Counter[str] = Counter()  # of all batches before the newest
        self._counting = -1  # the newest batch that any executor has done
        self._counts: dict[int, dict[str, int]] = {}  # of that one, by executor
        self.bad_rows: list[str] = []  # the first that were dropped: where they are, and why
        self._ordered: Counter[str] = Counter()  # what was done besides batches
        self._settings = settings
        self._directory = directory
        self._listener = listener
        self._crew = crew
        self._ends = ends
        self._watched = Watch(stall_timeout_s, time.monotonic)
        self._broker_timeout_s = broker_timeout_s
        self._no_broker_since: float | None = None
        self._trigger_interval_s = trigger_interval_s
        self._clock = clock
        # Those that have shown the token and not said hello, and until when they may.
        self._strangers: dict[ControlConnection, float] = {}
        self._connections: dict[int, ControlConnection] = {}
        self._events: deque[job.Event] = deque()
        self._ask_at: float | None = None  # when to look at the ends, by time.monotonic
        self._batch_began = 0.0
        self._arriving: dict[int, _Rows | Arriving] = {}  # what comes in frames, by executor
        self._handing: int | None = None
        self._tables: dict[int, pa.Table] = {}
        self._output: tuple[int, pa.Table] | None = None
        self.finished: job.Finish | None = None  # how the job ended
        self.done = NO_BATCH  # of a planned job: the batch that executors were let leave with
        # The number in the file runs ahead of a planned job's.
        self._attempts_before = directory.attempt if settings.is_planned else 0
        self._job, effects = self._opened_job()
        self._carry_out(effects)

    def _opened_job(self) -> tuple[job.Job, job.Effects]:
        """The job as its directory says."""
        directory = self._directory
        records = [BatchRecord.from_json(entry) for entry in directory.batches.entries]
        last = directory.commits.last
        return coordinator.open_job(
            self._settings,
            attempt=directory.attempt,
            records={record.number: record for record in records},
            committed=None if last is None else Commit.from_json(last),
            manifests=snapshots.manifests(directory.snapshots),
        )

    @property
    def attempt(self) -> int:
        """How many times the job was started or went on after a loss."""
        return self._job.attempt

    @property
    def needs_mapped_state(self) -> bool:
        """Would the next start have to rebuild anything without the executors' mapped state?  False
        once the job has ended in good order, with a snapshot of all."""
        finished = self.finished
        if finished is None or finished.error is not None:
            return True
        return not self._job.is_all_in_snapshot

    @property
    def counts(self) -> Counter[str]:
        """What executors counted, over all batches that this start ran.  A batch that ran twice
        counts once."""
        found = Counter(self._counted)
        found.update(self.batch_counts)
        for name in LEVELS:
            found.pop(name, None)
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
        attempts = self.attempt - self._attempts_before
        found |= {"attempts": attempts} | {name: self.batch_counts[name] for name in LEVELS}
        return found

    def _count(self, done: messages.BatchDone) -> None:
        if done.batch > self._counting:
            self._counted = self.counts
            self._counts = {}
            self._counting = done.batch
        for row in done.bad_rows:
            if len(self.bad_rows) < SAMPLES and row not in self.bad_rows:
                self.bad_rows.append(row)
                log.warning("dropped: %s", row)
        if done.batch == self._counting:
            counts = {**done.counts, "rows_out": done.rows_out}
            self._counts[done.executor] = {name: n for name, n in counts.items() if n}

    def next_output(self) -> tuple[int, pa.Table] | None:
        """Commit what was handed out before, and wait for the output of the next batch.  None when
        the job has come to its end.  Raises what ended it."""
        self._event(job.Asked(self._now_us()))
        while self._output is None:
            if self.finished is not None:
                if self.finished.error is not None:
                    raise self.finished.error
                return None
            self.turn()
        output, self._output = self._output, None
        self._event(job.Handed(output[0]))
        return output

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the job in good order: with a snapshot, unless an output waits for its commit."""
        self._event(job.StopAsked(self._now_us()))
        deadline = time.monotonic() + timeout_s
        while self.finished is None:
            if time.monotonic() > deadline:
                raise TimedOutError(
                    f"the job did not stop within {timeout_s:.0f} s",
                    hint="its state is kept up to the last snapshot; run it again",
                )
            self.turn()

    @property
    def closes(self) -> int | None:
        """The event time below which all windows were emitted; None before the first of them, and
        after the last."""
        after = self._job.after
        return after.closes if after and TIME_MIN < after.closes < TIME_MAX else None

    def plan(
        self,
        number: int,
        ranges: Mapping[Partition, Range],
        ends: Mapping[Partition, Range],
        *,
        closes_all: bool = False,
    ) -> None:
        """Of a planned job: this batch is to run when its executors have come, and all batches
        before it are committed.  Raises what ended the job, or ends it now."""
        self._event(job.Planned(number, ranges, ends, self._now_us(), closes_all))
        self._crew.planned(number)
        if self.finished is not None and self.finished.error is not None:
            raise self.finished.error

    def would_close(self, ends: Mapping[Partition, Range]) -> bool:
        """Of a planned job: would a batch that reads nothing emit windows?"""
        return planned_job.would_close(self._job, ends, self._now_us())

    def is_alone(self) -> bool:
        """Is no process connected that is an executor, or may become one?"""
        return not (self._connections or self._strangers or self._crew.waits())

    def fail(self, error: KdirectError) -> None:
        """End the job, because what it decided cannot be carried out: no further event changes
        anything, and whoever comes or waits hears why."""
        self._events.clear()
        self._job, effects = coordinator.end(self._job, error)
        self._carry_out(effects)

    def close(self) -> None:
        """End all processes and connections.  What is durable stays."""
        for arriving in self._arriving.values():
            arriving.close()
        for connection in (*self._connections.values(), *self._strangers):
            connection.close()
        self._listener.close()
        self._crew.close()

    # -- one turn ----------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)

    def _event(self, event: job.Event) -> None:
        """Take an event to the machine, and all that follow from what it decides."""
        self._events.append(event)
        while self._events:
            self._job, effects = coordinator.step(self._job, self._events.popleft())
            self._carry_out(effects)

    def turn(self, wakes: int | None = None) -> None:
        """Wait until something comes, on this descriptor too, and treat it."""
        if self.finished is None:
            self._crew.watch(self._job)
        timeout = TURN_S
        if self._ask_at is not None:
            timeout = min(timeout, max(0.0, self._ask_at - time.monotonic()))
        with selectors.DefaultSelector() as selector:
            for fd in [*self._listener.filenos(), *([] if wakes is None else [wakes])]:
                selector.register(fd, selectors.EVENT_READ)
            for connection in (*self._connections.values(), *self._strangers):
                if not connection.closed:
                    events = selectors.EVENT_READ
                    if connection.waits_to_write:
                        events |= selectors.EVENT_WRITE
                    selector.register(connection, events)
            selector.select(timeout)
        if self._ask_at is not None and time.monotonic() >= self._ask_at:
            self._ask_at = None
            self._find_ends()
        deadline = time.monotonic() + HELLO_TIMEOUT_S
        self._strangers |= dict.fromkeys(self._listener.poll(), deadline)
        for stranger in list(self._strangers):
            self._meet(stranger)
        for executor, connection in list(self._connections.items()):
            self._pump(executor, connection)
            self._hear(executor, connection)
        self._end_stalled()

    def _pump(self, executor: int, connection: ControlConnection) -> None:
        """Give an executor what it has not taken yet."""
        try:
            connection.pump()
            if not connection.late:
                return
            why = "it does not read what it is told"
        except StateProtocolError as e:
            why = str(e)
        if self._connections.get(executor) is connection:
            log.info("executor %d is lost: %s", executor, why)
            self._lose(executor)

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

    def _owing(self) -> set[int]:
        """The executors that owe an answer."""
        if self._handing is not None:
            return set(self._settings.leaders) - self._tables.keys()
        state = self._job
        if state.phase is job.Phase.SNAPSHOT:
            return set(self._settings.leaders) - state.heard
        if state.phase in ANSWERING:
            return set(range(self._settings.executors)) - state.heard
        return set()

    def _end_stalled(self) -> None:
        """Part with the processes that hang: they may be stopped, or wait for ever, without an end
        of their connections.  A successor is started at once, also where the launcher cannot reach
        the host: what the old process says later is refused."""
        state = self._job
        work = (state.attempt, state.phase, len(state.steps), state.last, self._handing)
        for executor, why in self._watched.stalled(work, self._owing()).items():
            self._crew.hangs(executor, f"{why} ({state.phase.name})")
            self._lose(executor)

    def _meet(self, stranger: ControlConnection) -> None:
        """Has a new connection said which executor it is?"""
        try:
            data = stranger.poll()
            if data is None:
                if time.monotonic() > self._strangers[stranger]:
                    raise StateProtocolError(f"it said no hello within {HELLO_TIMEOUT_S:.0f} s")
                return
            hello = messages.decode_from_executor(data)
            if self.finished is not None:
                stranger.put(messages.encode(self._farewell()))
                raise StateProtocolError("the job has ended")
            if isinstance(hello, messages.Arrived):
                self._deal(stranger, hello)
                return
            if not isinstance(hello, messages.Hello | messages.Failed):
                raise StateProtocolError(f"it began with {hello.type}")
            self._check_place(stranger, hello)
        except (StateProtocolError, FormatError) as e:
            log.warning("%s is refused: %s", stranger.peer, e)
            del self._strangers[stranger]
            stranger.close()
            self._lose_gang_of(stranger)
            return
        del self._strangers[stranger]
        if self._crew.comes_together and isinstance(hello, messages.Failed):
            log.warning("executor %d failed before it began: %s", hello.executor, hello.message)
            stranger.close()
            self._lose_gang_of(stranger)
            return
        if isinstance(hello, messages.Hello):
            old = self._connections.get(hello.executor)
            if old is not None:
                old.close()
                self._give_up_output()
            self._connections[hello.executor] = stranger
            self._crew.came(hello.executor)
            self._watched.heard(hello.executor)
        self._event(hello)

    def _deal(self, stranger: ControlConnection, said: messages.Arrived) -> None:
        """A process has come for a batch of a planned job.  The last one of the batch lets all say
        hello."""
        planned = self._job.planned
        batch = NO_BATCH if planned is None else planned.number
        deadline = time.monotonic() + HELLO_TIMEOUT_S
        dealt = self._crew.arrived(batch, said, stranger)
        del self._strangers[stranger]
        if dealt:  # whoever is here is of a gang before
            self._lose_all()
        for executor, connection in dealt:
            self._strangers[connection] = deadline
            with contextlib.suppress(StateProtocolError):  # it has gone, which `_meet` notices
                connection.put(messages.encode(messages.Placed(executor=executor)))

    def _lose_gang_of(self, stranger: ControlConnection) -> None:
        """A process ended before its hello: the others of its gang wait for what never comes."""
        if self._crew.lost(stranger):
            self._lose_all()

    def _lose_all(self) -> None:
        """The gang that is here is over."""
        self._give_up_output()
        while self._connections:
            executor, connection = self._connections.popitem()
            connection.close()
            self._event(job.Lost(executor))

    def _farewell(self) -> messages.Stop:
        """What whoever comes after the end is told."""
        stop = messages.Stop(attempt=self._job.attempt)
        error = None if self.finished is None else self.finished.error
        if error is None:
            return stop
        name = type(error).__name__
        return replace(stop, error=name, message=error.message, hint=error.hint)

    def _check_place(
        self, peer: ControlConnection, hello: messages.Hello | messages.Failed
    ) -> None:
        """Is this the process that was started last as this executor?  One that was held to hang
        and goes on, or has the settings of another job, must not end this one."""
        executors = self._settings.executors
        if hello.executor >= executors:
            raise StateProtocolError(
                f"it wants to be executor {hello.executor} of a job of {executors}: start"
                " it with the settings that the launcher gets"
            )
        if isinstance(hello, messages.Hello):
            self._crew.check(peer, hello)

    def _hear(self, executor: int, connection: ControlConnection) -> None:
        """Treat all that has come from an executor."""
        try:
            while self._connections.get(executor) is connection:
                data = connection.poll()
                if data is None:
                    return
                if executor in self._arriving:
                    self._watched.heard(executor)
                    self._take_frame(executor, data)
                    continue
                self._understand(executor, messages.decode_from_executor(data))
        except (StateProtocolError, FormatError) as e:
            log.info("executor %d is lost: %s", executor, e)
            self._lose(executor)

    def _understand(self, executor: int, message: messages.FromExecutor) -> None:
        named = getattr(message, "executor", executor)
        if named != executor:
            raise StateProtocolError(f"executor {executor} speaks for executor {named}")
        if isinstance(message, messages.Working):
            self._watched.heard(executor, message.steps)
            return
        self._watched.heard(executor)
        if isinstance(message, messages.Output):
            if message.batch != self._handing or message.attempt != self._job.attempt:
                raise StateProtocolError(f"executor {executor} sent rows that nobody asked for")
            self._arriving[executor] = _Rows(message.size)
            return
        if isinstance(message, messages.PartFollows):
            self._expect_part(executor, message)
            return
        if isinstance(message, messages.FetchPart):
            self._send_part(executor, message)
            return
        if isinstance(message, messages.BatchDone) and message.attempt == self._job.attempt:
            self._crew.did_batch()
            self._count(message)
        if isinstance(message, messages.SnapshotDone):
            self._ordered["snapshot_bytes"] += message.part.size
        if isinstance(message, messages.NotRestored):
            log.warning("executor %d cannot restore a snapshot: %s", executor, message.message)
        if isinstance(message, messages.Failed):
            log.warning("executor %d failed: %s", executor, message.message)
        self._event(message)

    def _lose(self, executor: int) -> None:
        connection = self._connections.pop(executor, None)
        if connection is not None:
            connection.close()
        self._give_up_output()
        is_of_gang = executor in self._job.hellos and self.finished is None
        self._event(job.Lost(executor))
        if is_of_gang and self._crew.comes_together:
            # The others would wait for it: no process comes alone.
            self._crew.give_up()
            self._lose_all()

    # -- parts of snapshots, for hosts that do not see the directory -------------------------------

    def _expect_part(self, executor: int, part: messages.PartFollows) -> None:
        state = self._job
        taking = state.taking
        due = None
        if taking is not None and executor not in taking.parts:
            due = (state.attempt, taking.batch, coordinator.part_file(state, executor))
        if (part.attempt, part.batch, part.file) != due:
            raise StateProtocolError(
                f"executor {executor} sent a part of a snapshot that nobody asked for"
            )
        directory = snapshots.snapshot_directory(self._directory.snapshots, part.batch)
        arriving = Arriving(directory / part.file, part.size)
        if arriving.left:
            self._arriving[executor] = arriving

    def _send_part(self, executor: int, asked: messages.FetchPart) -> None:
        """Send a part of a snapshot; zero bytes where there is none."""
        directory = snapshots.snapshot_directory(self._directory.snapshots, asked.batch)
        known = [m for m in self._job.manifests if m.number == asked.batch]
        if not any(asked.file == part.file for manifest in known for part in manifest.parts):
            raise StateProtocolError(
                f"executor {executor} asks for {asked.file} of batch {asked.batch}, which is none"
            )
        try:
            file: BinaryIO = open(directory / asked.file, "rb")  # noqa: SIM115 - `frames` closes it
            size = os.fstat(file.fileno()).st_size
        except OSError as e:
            log.warning("%s: a part cannot be read: %s", directory / asked.file, e)
            file, size = io.BytesIO(), 0
        announced = messages.FetchedPart(
            attempt=asked.attempt, batch=asked.batch, file=asked.file, size=size
        )
        frames = itertools.chain((messages.encode(announced),), part_transfer.frames(file, size))
        self._put(executor, frames)

    # -- output ------------------------------------------------------------------------------------

    def _give_up_output(self) -> None:
        """What was being collected is asked for again after the recovery."""
        self._handing = None
        for arriving in self._arriving.values():
            arriving.close()
        self._arriving.clear()
        self._tables.clear()

    def _hand_out(self, batch: int) -> None:
        self._give_up_output()
        self._handing = batch
        for executor in self._settings.leaders:
            self._tell(executor, messages.TakeOutput(attempt=self._job.attempt, batch=batch))

    def _take_frame(self, executor: int, data: bytes) -> None:
        arriving = self._arriving[executor]
        if not arriving.take(data):
            return
        del self._arriving[executor]
        if not isinstance(arriving, _Rows):
            return
        try:
            with pa.ipc.open_stream(pa.py_buffer(arriving.data)) as reader:
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
                    self._write_attempt(attempt)
                    self._crew.begins_attempt()
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
                case job.HandOut(batch) if self._settings.is_planned:
                    self._let_leave(batch)
                case job.HandOut(batch):
                    self._hand_out(batch)
                case job.WriteManifest(manifest):
                    snapshots.write_manifest(self._directory.snapshots, manifest)
                    self._ordered["snapshots"] += 1
                case job.ForgetSnapshot(number, batches):
                    self._forget(number, batches)
                case job.Finish():
                    self.finished = effect
                    self._crew.job_ended(self._farewell())

    def _write_attempt(self, attempt: int) -> None:
        """Of a planned job each batch is an attempt: a file is written for many of them at once."""
        if attempt > self._directory.attempt:
            ahead = ATTEMPTS_AHEAD if self._settings.is_planned else 0
            self._directory.write_attempt(attempt + ahead)

    def _let_leave(self, batch: int) -> None:
        """All executors hand out what they keep of a batch, and leave."""
        counts = dict(self.batch_counts)
        closes = TIME_MIN if self._job.after is None else self._job.after.closes
        for executor in list(self._connections):
            leave = messages.Leave(
                attempt=self._job.attempt, batch=batch, closes=closes, counts=counts
            )
            self._tell(executor, leave)
        self.done = batch

    def _tell(self, executor: int, message: messages.FromCoordinator) -> None:
        self._put(executor, (messages.encode(message),))

    def _put(self, executor: int, frames: Iterable[bytes]) -> None:
        """Send frames as the executor takes them; this thread never waits for it."""
        connection = self._connections.get(executor)
        if connection is None:
            return  # lost, which is on its way to the machine
        try:
            connection.put_all(frames)
        except StateProtocolError as e:
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
        snapshots.forget(directory.snapshots, number)
        directory.batches.keep([e for e in directory.batches.entries if e["number"] > batches])
        directory.commits.keep([e for e in directory.commits.entries if e["number"] > batches])
