"""An executor: a process that reads, updates and merges, as the coordinator tells it.

This file opens sockets, maps memory and writes files.  Owns: the life of an executor from its hello
to its stop, its mapped state and the output that it keeps.  What may not enter: what is decided
(the machines), and how one batch runs (`kdirect.state.batch_run`).

All state lies in the mapped file, none in the heap: a process that ends between two batches is
replaced by any other process of the host that opens the same file.  `Executor.open` is the whole
API for a process that somebody else starts (a worker of Spark, for example)::

    with Executor.open(settings) as executor:
        result = executor.run_batch()          # of the batch that the coordinator starts next

``python -m kdirect.state.executor`` takes its settings, as JSON, from the environment variable
KDIRECT_EXECUTOR or else from one line of standard input, and serves batches until the coordinator
stops it or goes away: whatever starts a process on another host can start an executor there
(`kdirect.state.launcher`).  Devices, queue pairs and threads are made by the process that uses
them, never before a fork.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdirect.client.session import Session, connect
from kdirect.errors import (
    ChannelError,
    CoordinatorUnavailableError,
    FormatError,
    KdirectError,
    StateDirectoryError,
    StateError,
    StateExchangeError,
    StateLimitError,
    StateProtocolError,
    TimedOutError,
)
from kdirect.rdma.layout import DEFAULT_SLOT_BYTES, DEFAULT_SLOTS, FOOTER_BYTES
from kdirect.state import control, leader, messages, part_transfer, snapshots
from kdirect.state.arena import StateMemory
from kdirect.state.batch_run import BatchResult, BatchRun, Observer, Step, Tools
from kdirect.state.batches import Part, Phase
from kdirect.state.exchange import Exchange, RdmaExchange, TcpExchange
from kdirect.state.executor_state import Place, State, open_state, owners_of, page_memory
from kdirect.state.heartbeat import LONGEST_INTERVAL_S, Heart
from kdirect.state.kept import KeptState
from kdirect.state.mapped import Owner
from kdirect.state.snapshot_writer import SnapshotWriter

log = logging.getLogger("kdirect.state")

SENT_BYTES = 8 << 20  # of rows, in one frame
IDLE_WAIT_MS = 500  # in the midst of a batch: then it is looked whether the coordinator is there
TEMPORARY = "kdirect-part-"
SETTINGS_VARIABLE = "KDIRECT_EXECUTOR"
LEAST_PAUSE_S, MOST_PAUSE_S = 0.01, 1.0  # before one that could not join tries again
MOST_PAUSES_S = 120.0  # in all: then it is no coordinator of this job that ends the connection
EXIT_FAILED = 1  # the coordinator was told why
EXIT_SETTINGS = 2  # they cannot be read
EXIT_LOST = 3  # the coordinator has gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """What a process must know to become executor `executor` of `executors` of a job.

    `memory` is the directory of its mapped state on this host, `token` a secret of this start of
    the job, which belongs into no command line.  `start` counts the processes that were started as
    this executor: the coordinator refuses all but the newest.  The rest are options of the engine
    (`kdirect.options.ENGINE`); `exchange` is rdma or tcp, decided."""

    host: str
    port: int
    token: str
    executor: int
    executors: int
    memory: str
    start: int = 0
    exchange: str = "rdma"
    provider: str = "shm"
    device_options: dict[str, Any] = field(default_factory=dict)
    slots: int = DEFAULT_SLOTS
    slot_bytes: int = DEFAULT_SLOT_BYTES
    state_limit: int = 8 << 30
    fragment_limit: int = 1 << 30

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExecutorSettings:
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as e:
            raise FormatError(
                f"the settings of an executor cannot be read: {e}",
                hint=f"give what its launcher got, as JSON, in {SETTINGS_VARIABLE} or as a line of"
                " standard input; both hosts must run the same version of kdirect",
            ) from e


class Executor:
    """See the module.  One thread; `open` it, use it as a context manager or `close` it."""

    def __init__(
        self,
        settings: ExecutorSettings,
        connection: control.ControlConnection,
        exchange: Exchange,
        kept: KeptState,
        observer: Observer,
    ) -> None:
        self.settings = settings
        self.connection = connection
        self._exchange = exchange
        self._kept = kept
        self._observer = observer
        self._writer = SnapshotWriter()
        self._tools: Tools | None = None
        self._memory: StateMemory | None = None
        self._welcome: messages.Welcome | None = None
        self._session: Session | None = None
        self._connected = self._restored = self._is_visiting = False
        self._early: deque[messages.FromCoordinator] = deque()
        self._heart = Heart(self._say_working, LONGEST_INTERVAL_S, time.monotonic)

    @classmethod
    def open(
        cls,
        settings: ExecutorSettings,
        observer: Observer | None = None,
        *,
        connection: control.ControlConnection | None = None,
    ) -> Executor:
        """Join the job: connect to the coordinator and, by what it says, to all other executors.
        Returns when batches can begin.  `connection`: one to the coordinator that is there already,
        and is closed with the executor."""
        kept = KeptState(
            Path(settings.memory), settings.executor, settings.executors, settings.state_limit
        )
        exchange: Exchange | None = None
        executor: Executor | None = None
        try:
            if connection is None:
                connection = control.connect(settings.host, settings.port, settings.token)
            exchange = _exchange(settings, connection.local_host)
            executor = cls(settings, connection, exchange, kept, observer or Observer())
            executor._tell(
                messages.Hello(
                    executor=settings.executor,
                    token=settings.token,
                    process_id=os.getpid(),
                    host=connection.local_host,
                    address=exchange.address(),
                    header=kept.header,
                    start=settings.start,
                )
            )
            while not (executor._connected and executor._restored):
                executor._treat(executor._next(None))
            executor._tell(messages.Ready(attempt=executor.attempt, executor=settings.executor))
            return executor
        except BaseException as e:
            if connection is not None:
                _report(connection, settings.executor, e)
            elif isinstance(e, CoordinatorUnavailableError):
                kept.end(forget=False)
            parts = (exchange, connection, kept) if executor is None else (executor,)
            for part in parts:
                if part is not None:
                    part.close()
            raise

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def attempt(self) -> int:
        """The number of this start of the job."""
        assert self._welcome is not None
        return self._welcome.attempt

    @property
    def transport(self) -> str:
        """What the input is read over: verbs, shm or tcp."""
        return "" if self._session is None else self._session.transport

    def run_batch(self, timeout_s: float | None = None) -> BatchResult | None:
        """Do what the coordinator asks for until a batch has run in all executors; what it put out
        here.  The process may end then: the next one goes on with the state that is mapped.  None
        when the job is stopped.  TimedOutError when nothing was asked for in time."""
        result: BatchResult | None = None
        while True:
            message = self._next(timeout_s)
            if isinstance(message, messages.Stop):
                self._kept.end(forget=message.forget)
                return None
            if isinstance(message, messages.BatchOver) and result is not None:
                return result
            result = self._treat(message) or result

    def visit(self) -> messages.Leave:
        """Of a planned job: do what the coordinator asks for until the batch is done and this
        process may leave.  Raises what ended the job."""
        self._is_visiting = True
        self._kept.end(forget=False)  # the last one to leave clears what is useless now
        while True:
            message = self._next(None)
            if isinstance(message, messages.Leave):
                self._writer.wait()
                return message
            if isinstance(message, messages.Stop):
                raise messages.error_of(message)
            self._treat(message)

    def kept_rows(self, batch: int) -> pa.RecordBatchReader:
        """The rows of `batch` that this executor keeps, mapped for as long as they are held."""
        return self._kept.rows(batch)

    def serve(self) -> None:
        """Run batches until the job is stopped."""
        while self.run_batch() is not None:
            pass

    def close(self) -> None:
        """Leave the job.  The state stays where it is mapped."""
        self._writer.close()
        self._heart.end()
        self._exchange.close()
        self.connection.close()
        self._tools = self._memory = None  # what is left of the state: before its memory goes
        self._kept.close()
        if self._session is not None:
            self._session.close()

    # -- what the coordinator says -----------------------------------------------------------------

    def _tell(self, message: messages.FromExecutor) -> None:
        self.connection.send(messages.encode(message))

    def _next(self, timeout_s: float | None) -> messages.FromCoordinator:
        if self._early:
            return self._early.popleft()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._writer.is_busy and (deadline is None or time.monotonic() < deadline):
            # The coordinator may wait for nothing but the part that is being written.
            with contextlib.suppress(TimedOutError):
                return messages.decode_from_coordinator(
                    self.connection.receive(self._heart.interval_s)
                )
            self._heart.step(self._writer.steps_taken())
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return messages.decode_from_coordinator(self.connection.receive(left))

    def _say_working(self, steps: int) -> None:
        """Tell the coordinator that this executor goes on.  Never waits."""
        connection = self.connection
        if not connection.sending.acquire(blocking=False):
            return  # the thread that writes a snapshot says more than this
        try:
            if connection.pump():  # or what was said before still waits
                said = messages.Working(
                    attempt=self.attempt, executor=self.settings.executor, steps=steps
                )
                connection.put(messages.encode(said))
        finally:
            connection.sending.release()

    def _stepped(self) -> None:
        """In the midst of a batch: a block or a page is done."""
        if self._heart.step():
            self._look()

    def _wait(self) -> None:
        """In the midst of a batch: nothing can be done."""
        self._heart.wait()
        self._look()

    def _look(self) -> None:
        """In the midst of a batch: is the coordinator still there?"""
        if (data := self.connection.poll()) is not None:
            message = messages.decode_from_coordinator(data)
            if isinstance(message, messages.Stop):
                if self._is_visiting and message.error:
                    raise messages.error_of(message)
                raise StateProtocolError("the job was stopped in the midst of a batch")
            self._early.append(message)

    def _treat(self, order: messages.FromCoordinator) -> BatchResult | None:
        """Carry out a message; the result of a batch, if it began one."""
        match order:
            case messages.Welcome():
                self._join(order)
            case messages.Restore():
                self._restore(order)
            case messages.Connect():
                self._exchange.connect(self._joined.addresses)
                self._connected = True
            case messages.StartBatch():
                return self._run(order)
            case messages.BatchOver():
                pass  # `run_batch` waits for it
            case messages.TakeOutput():
                self._send_output(order)
            case messages.TakeSnapshot():
                self._snapshot(order)
            case messages.Stop():
                self._kept.end(forget=order.forget)
                if order.error:
                    raise messages.error_of(order)
                raise CoordinatorUnavailableError(
                    f"executor {self.settings.executor} was told to stop before it began: the job"
                    " has ended, or another process has taken its place"
                )
        return None

    @property
    def _joined(self) -> messages.Welcome:
        if self._welcome is None:
            raise StateProtocolError("the coordinator gave orders before it said welcome")
        return self._welcome

    def _join(self, welcome: messages.Welcome) -> None:
        settings, options = self.settings, welcome.options
        self._welcome = welcome
        self._heart = Heart(
            self._say_working, options["heartbeat_interval_ms"] / 1000, time.monotonic
        )
        self._kept.belong(replace(Owner(**options["owner"]), far=not self._sees_directory))
        self._session = self._open_session(options["source"])
        first, last = welcome.vparts[settings.executor]
        # One that only reads leads nothing: what an earlier job left here, when it led, is old.
        fresh = welcome.cold or self._kept.header is None or first == last
        state = self._open_state(welcome, fresh=fresh)
        only_read = sum(first == last for first, last in welcome.vparts)
        self._tools = Tools(
            plan=welcome.plan,
            readers=only_read or settings.executors,
            state=state,
            exchange=self._exchange,
            session=self._session,
            observer=self._observer,
            look=self._wait,
            stepped=self._stepped,
            idle_wait_ms=min(IDLE_WAIT_MS, options["heartbeat_interval_ms"]),
            mark=self._mark,
            epoch_bytes=options["epoch_bytes"],
            block_rows=options["block_rows"],
            leading=leader.begin(settings.executor, welcome.attempt, welcome.vparts),
            page_bytes=settings.slot_bytes,
        )
        self._restored = not welcome.cold
        self._exchange.listen(welcome.addresses)
        self._tell(messages.Listening(attempt=welcome.attempt, executor=settings.executor))

    def _open_session(self, source: Mapping[str, Any]) -> Session:
        return connect(source)

    def _open_state(self, welcome: messages.Welcome, *, fresh: bool) -> State:
        settings, options = self.settings, welcome.options
        self._memory = self._kept.begin(fresh=fresh)
        place = Place(
            executor=settings.executor,
            executors=settings.executors,
            owners=owners_of(welcome.vparts),
            memory=self._memory,
            pages=page_memory(
                page_bytes=settings.slot_bytes,
                footer_bytes=FOOTER_BYTES,
                limit=settings.fragment_limit,
                on_chunk=self._exchange.add_source,
            ),
        )
        return open_state(
            welcome.plan,
            place,
            fresh=fresh,
            mode=options["mode"],
            adaptive_ratio=options["adaptive_ratio"],
            epoch_bytes=options["epoch_bytes"],
        )

    def _restore(self, order: messages.Restore) -> None:
        """Begin from a snapshot, or empty."""
        welcome, tools = self._joined, self._working
        executor = self.settings.executor
        own = welcome.vparts[executor]
        plan_hash = welcome.plan.hash
        wanted = [part for part in order.parts if part.first < own[1] and own[0] < part.last]
        try:
            with self._parts(order.batch, wanted) as directory:
                for given in wanted:
                    with snapshots.PartReader(
                        directory,
                        given,
                        plan_hash=plan_hash,
                        batch=order.batch,
                        stepped=self._heart.step,
                    ) as part:
                        for section in part:
                            self._observer.at(Step.RESTORE, order.batch)
                            tools.state.restore(section, part.executors, part.vparts)
                            self._heart.step()
        except (StateLimitError, StateProtocolError):
            raise
        except StateError as e:
            self._tell(
                messages.NotRestored(
                    attempt=order.attempt, executor=executor, batch=order.batch, message=str(e)
                )
            )
            return
        tools.state.mark(Phase.CLEAN, order.attempt, order.batch, None)
        self._restored = True

    @property
    def _working(self) -> Tools:
        self._joined  # noqa: B018 - raises before the welcome
        assert self._tools is not None
        return self._tools

    def _run(self, start: messages.StartBatch) -> BatchResult:
        return self._say_done(BatchRun(start, self._working).run())

    def _say_done(self, result: BatchResult) -> BatchResult:
        assert result.done is not None
        assert self._memory is not None
        result.counts["state_bytes"] = self._memory.allocated
        counts = {name: count for name, count in result.counts.items() if count}
        self._tell(
            messages.BatchDone(
                attempt=result.done.attempt,
                batch=result.done.batch,
                executor=result.done.executor,
                after=result.done.after,
                rows_out=sum(rows.num_rows for rows in result.output),
                counts=counts,
                bad_rows=tuple(result.bad_rows),
            )
        )
        return result

    def _mark(self, phase: Phase, result: BatchResult) -> None:
        """Write into the state's header where it is; before DONE, the output is kept."""
        welcome = self._joined
        if phase is Phase.DONE:
            assert result.after is not None
            self._kept.keep_output(welcome.plan, result.batch, result.after, result.output)
        self._working.state.mark(
            phase, welcome.attempt, result.batch, result.after if phase is Phase.DONE else None
        )

    def _send_output(self, order: messages.TakeOutput) -> None:
        executor = self.settings.executor
        with self._kept.output(order.batch) as data, self.connection.sending:
            self._tell(
                messages.Output(
                    attempt=order.attempt, batch=order.batch, executor=executor, size=len(data)
                )
            )
            for at in range(0, len(data), SENT_BYTES):
                self.connection.send(data[at : at + SENT_BYTES])

    def _snapshot(self, order: messages.TakeSnapshot) -> None:
        """Copy the state; where this host sees the directory of the job, the copy is written while
        the next batches run."""
        self._observer.at(Step.SNAPSHOT, order.batch)
        sections = self._working.state.snapshot()
        if self._sees_directory:
            directory = snapshots.snapshot_directory(self._snapshots, order.batch)
            self._writer.write(
                sections,
                lambda given, cancelled: self._write_part(directory, order, given, cancelled),
                lambda part: self._say_snapshot(order, part),
                lambda error: _report(self.connection, self.settings.executor, error),
            )
            return
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
            part = self._write_part(Path(name), order, sections, self._not_cancelled)
            assert part is not None
            self._send_part(Path(name, part.file), order.batch, part)
        self._say_snapshot(order, part)

    def _say_snapshot(self, order: messages.TakeSnapshot, part: Part) -> None:
        done = messages.SnapshotDone(
            attempt=order.attempt, batch=order.batch, executor=self.settings.executor, part=part
        )
        with contextlib.suppress(StateProtocolError):  # the job begins again, or has ended
            self._tell(done)

    def _not_cancelled(self) -> bool:
        """A part is written in the thread of the executor: this is a step."""
        self._heart.step()
        return False

    def _write_part(
        self,
        directory: Path,
        order: messages.TakeSnapshot,
        sections: Sequence[snapshots.Section],
        cancelled: Callable[[], bool],
    ) -> Part | None:
        welcome, executor = self._joined, self.settings.executor
        self._observer.at(Step.PART, order.batch)
        return snapshots.write_part(
            directory,
            order.file,
            sections,
            executors=self.settings.executors,
            vparts=welcome.vparts[executor],
            plan_hash=welcome.plan.hash,
            batch=order.batch,
            cancelled=cancelled,
        )

    # -- parts of snapshots, where this host does not see the directory of the job -----------------

    @property
    def _snapshots(self) -> Path:
        return Path(self._joined.options["snapshots"])

    @property
    def _sees_directory(self) -> bool:
        return part_transfer.sees(self._snapshots, self._joined.options["snapshots_mark"])

    @contextlib.contextmanager
    def _parts(self, batch: int, wanted: Sequence[Part]) -> Iterator[Path]:
        """A directory with these parts of the snapshot after `batch`."""
        if not wanted or self._sees_directory:
            yield snapshots.snapshot_directory(self._snapshots, batch)
            return
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
            for part in wanted:
                self._fetch_part(Path(name, part.file), batch, part)
            yield Path(name)

    def _fetch_part(self, path: Path, batch: int, part: Part) -> None:
        self._tell(
            messages.FetchPart(
                attempt=self.attempt,
                executor=self.settings.executor,
                batch=batch,
                file=part.file,
            )
        )
        while True:
            message = messages.decode_from_coordinator(self.connection.receive())
            if isinstance(message, messages.FetchedPart):
                break
            self._early.append(message)
        if message.size != part.size:
            raise StateDirectoryError(
                f"{part.file}: {message.size} bytes, where the manifest says {part.size}"
            )
        with contextlib.closing(part_transfer.Arriving(path, message.size)) as arriving:
            while arriving.left:
                arriving.take(self.connection.receive())
                self._heart.step()

    def _send_part(self, path: Path, batch: int, part: Part) -> None:
        """Nothing else may be said between the frames: each of them says that this one goes on."""
        follows = messages.PartFollows(
            attempt=self.attempt, batch=batch, file=part.file, size=part.size
        )
        with open(path, "rb") as file, self.connection.sending:
            self._tell(follows)
            for data in part_transfer.frames(file, part.size):
                self.connection.send(data)


def _exchange(settings: ExecutorSettings, local_host: str) -> Exchange:
    if settings.exchange == "tcp":
        return TcpExchange(
            settings.executor,
            settings.executors,
            host=local_host,
            token=settings.token,
            slot_bytes=settings.slot_bytes,
        )
    return RdmaExchange(
        settings.executor,
        settings.executors,
        provider=settings.provider,
        device_options=settings.device_options,
        slots=settings.slots,
        slot_bytes=settings.slot_bytes,
    )


def _is_loss(error: BaseException) -> bool:
    """Has another process of the job gone, or is the job beginning again?"""
    return isinstance(error, ChannelError | StateExchangeError | StateProtocolError)


def _may_pass(error: BaseException) -> bool:
    """May the next attempt succeed, because brokers are there again for example?"""
    return _is_loss(error) or (isinstance(error, KdirectError) and error.retriable)


def _report(connection: control.ControlConnection, executor: int, error: BaseException) -> None:
    """Tell the coordinator of an error that it does not notice by itself."""
    if _is_loss(error) or connection.closed:
        return
    failed = messages.Failed(
        executor=executor, error=StateError.__name__, message=f"{type(error).__name__}: {error}"
    )
    if isinstance(error, KdirectError):
        failed = replace(
            failed,
            error=type(error).__name__,
            message=error.message,
            hint=error.hint,
            retriable=error.retriable,
        )
        if error.topic_partition is not None:
            topic, partition = error.topic_partition
            offset = -1 if error.offset is None else error.offset
            failed = replace(failed, topic=topic, partition=partition, offset=offset)
    with contextlib.suppress(KdirectError):
        connection.send(messages.encode(failed))


def serve(settings: ExecutorSettings, observer: Observer | None = None) -> None:
    """Be an executor until the job is stopped.  When the job begins again because another executor
    was lost, or a broker did not answer, this one joins it again, with the state that it has.
    Raises what ends the job, and CoordinatorUnavailableError when that has gone."""
    pause_s, paused_s = LEAST_PAUSE_S, 0.0
    while True:
        try:
            executor = Executor.open(settings, observer)
        except KdirectError as e:
            if not _may_pass(e):
                raise
            if paused_s >= MOST_PAUSES_S:
                raise CoordinatorUnavailableError(
                    f"{settings.host}:{settings.port} lets executor {settings.executor} not join:"
                    f" {e.message}",
                    hint="another job may listen there; run this one again",
                ) from e
            log.warning("an executor joins again in %.2f s: %s", pause_s, e)
            time.sleep(pause_s)
            paused_s += pause_s
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
            continue
        pause_s, paused_s = LEAST_PAUSE_S, 0.0
        with executor:
            try:
                executor.serve()
                return
            except BaseException as e:
                _report(executor.connection, settings.executor, e)
                if not _may_pass(e):
                    raise
                log.warning("executor %d joins again: %s", settings.executor, e)


def given_settings() -> ExecutorSettings:
    """The settings of this process: from the environment variable KDIRECT_EXECUTOR, or, where that
    is not set, one line of standard input.  FormatError when they cannot be read."""
    return ExecutorSettings.from_json(os.environ.get(SETTINGS_VARIABLE) or sys.stdin.readline())


def main(observer: Observer | None = None) -> int:
    """The program; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the coordinator ends the job
    try:
        settings = given_settings()
    except FormatError as e:
        print(f"executor: {e}; {e.hint}", file=sys.stderr)
        return EXIT_SETTINGS
    try:
        serve(settings, observer)
    except KdirectError as e:
        print(f"executor {settings.executor}: {type(e).__name__}: {e}", file=sys.stderr)
        return EXIT_LOST if isinstance(e, CoordinatorUnavailableError) else EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
