"""Real executors in the simulated job: `kdirect.state.executor`, with all that it drives.

What runs is the product: the executor, its batches task by task, the compiled state in mapped
files, parts of snapshots on disk, and channels over the fabric `sim`, in virtual time.  Only what
waits is replaced: the connection to the coordinator, the session that reads topics, and the thread
that writes snapshots.  A move is one message, one turn of one task of a batch, or one part; a
process may be killed between any two, and within a turn wherever `Observer.at` is called.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect.errors import CoordinatorUnavailableError, KdirectError, StateProtocolError
from kdirect.state import batch_run, executor, leader, messages
from kdirect.state.append import AppendState
from kdirect.state.batch_run import BatchRun
from kdirect.state.exchange import Exchange, RdmaExchange
from kdirect.state.executor_state import ChainState, State
from kdirect.state.kept import KeptState
from kdirect.state.messages import StartBatch
from kdirect.state.scheduler import Task
from kdirect.state.source import Block
from kdirect.state.tuples import parse_page
from tests.state.actors import Broken, Link
from tests.state.wires import WireExchange

SLOT_BYTES = 4096
STATE_LIMIT = 1 << 22
FRAGMENT_LIMIT = 1 << 22
TURNS_AT_ONCE = 4  # of tasks that had nothing to do; with many peers half of them


class Killed(BaseException):
    """The process ends here, in the midst of a step."""


class Connection:
    """The executor's end of a link.  See `kdirect.state.control.ControlConnection`."""

    local_host = "here"

    def __init__(self, world: Any, index: int, link: Link) -> None:
        self.sending = threading.Lock()
        self._world, self._index, self._link = world, index, link
        self._output: tuple[messages.Output, list[bytes]] | None = None

    @property
    def closed(self) -> bool:
        return not self._link.executor_open

    def send(self, data: Any) -> None:
        if self._output is not None:
            self._take_output(bytes(data))
            return
        message = messages.decode_from_executor(bytes(data))
        if isinstance(message, messages.Output):
            self._output = message, []
            return
        self._say(message)

    def _take_output(self, data: bytes) -> None:
        """The rows of a batch follow their message, in frames."""
        assert self._output is not None
        message, frames = self._output
        frames.append(data)
        if sum(map(len, frames)) < message.size:
            return
        self._output = None
        rows = pa.ipc.open_stream(b"".join(frames)).read_all()
        where = message.attempt, message.batch, self._index
        self._world.outputs[where] = self._world.as_rows(rows)
        self._say(message)

    def _say(self, message: Any) -> None:
        if self._link.executor_open:
            self._link.up.append(message)

    def poll(self) -> bytes | None:
        if self._link.down:
            return messages.encode(self._link.down.popleft())
        if not self._link.coordinator_open:
            raise CoordinatorUnavailableError("the coordinator has gone")
        return None

    def close(self) -> None:
        self._link.executor_open = False


class Writer:
    """Writes parts when the simulation says so.  See `kdirect.state.snapshot_writer`."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()

    def write(self, *job: Any) -> None:
        self.waiting.append(job)

    def step(self) -> None:
        """Write the first part."""
        sections, write, done, failed = self.waiting.popleft()
        try:
            done(write(sections, lambda: False))
        except KdirectError as e:
            failed(e)

    def close(self) -> None:
        self.waiting.clear()


class Watched:
    """The state of an executor, and what the simulation checks of it: what each fragment was given
    is what its leader merges (of states that keep rows), and nothing closes early."""

    def __init__(self, state: State, process: Process) -> None:
        self._state, self._process = state, process
        self._start: StartBatch | None = None
        self._of_rows: AppendState | None = None
        if isinstance(state, ChainState) and not state._state.intervals:
            self._of_rows = state._state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def begin_batch(self, start: StartBatch) -> None:
        self._start = start
        self._state.begin_batch(start)

    def update(self, block: Block, side: int) -> int:
        if self._of_rows is not None:
            self._note_given(block, side, self._of_rows)
        return self._state.update(block, side)

    def _note_given(self, block: Block, side: int, state: AppendState) -> None:
        """What becomes of each row, one after the other."""
        keys = block.columns["key"].to_pylist()
        assert self._start is not None and block.time_us is not None
        for key, time in zip(keys, block.time_us.tolist()):
            rows = self._process.world.kept_rows(key, time, side, self._start.closed_before)
            if rows:
                hash_ = self._process.world.hash_of(state, key, side)
                to = int(state.owners[hash_ >> 56])
                if to >= 0:
                    self._process.given.setdefault(to, Counter())[hash_, side] += rows

    def flush(self, leader: int) -> Any:
        found = self._state.flush(leader)
        self._process.sent.setdefault(leader, []).append(
            self._process.given.get(leader, Counter()).copy()
        )
        return found

    def merge(self, sender: int, buffer: Any) -> int:
        if self._of_rows is not None:
            page = parse_page(self._of_rows.shape, bytes(buffer.payload), sender)
            sides = (page.flags & np.uint8(1)).tolist()
            self._process.merged.setdefault(sender, Counter()).update(
                zip(page.hashes.tolist(), sides)
            )
        return self._state.merge(sender, buffer)

    def trigger(self, closes: int) -> Iterable[pa.RecordBatch]:
        start = self._start
        assert start is not None
        trigger = leader.Trigger(start.closed_before, closes, start.emit)
        self._process.world.check_closes(start.batch, trigger)
        return self._state.trigger(closes)


class Process(executor.Executor):
    """The real executor.  A batch that it begins is run by the simulation, turn by turn."""

    def __init__(self, world: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world
        self.writer = Writer()
        self._writer = self.writer  # type: ignore[assignment]
        self.running: BatchRun | None = None
        self.tasks: deque[Task] = deque()
        # Rows by hash of key and side: what each leader was given in this batch, that at the end
        # of each of its epochs, and what was merged of each sender.
        self.given: dict[int, Counter] = {}
        self.sent: dict[int, list[Counter]] = {}
        self.merged: dict[int, Counter] = {}

    @property
    def joined(self) -> bool:
        return self._connected and self._restored

    @property
    def leading(self) -> leader.Leading | None:
        return None if self._tools is None else self._tools.leading

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    def treat(self, message: Any) -> None:
        """Carry out a message; then the process is ready if that was missing."""
        was_joined = self.joined
        self._treat(message)
        if self.joined and not was_joined:
            ready = messages.Ready(attempt=self.attempt, executor=self.settings.executor)
            self._tell(ready)

    def look(self) -> None:
        """In the midst of a batch: the executor looks what the coordinator says."""
        self._look()

    def next_early(self) -> Any:
        return self._early.popleft() if self._early else None

    def turn(self) -> bool:
        """The next task has its turn; whether it did anything."""
        assert self.running is not None
        try:
            worked = next(self.tasks[0])
            self.tasks.rotate(-1)
        except StopIteration:
            self.tasks.popleft()
            worked = True
        if not self.tasks:
            result = self.running.result
            self.end_batch()
            self._say_done(result)
            dropped = {n: c for n, c in result.counts.items() if n.startswith("dropped_")}
            self.world.seen.update(dropped)
        return worked

    def end_batch(self) -> None:
        """None of its tasks goes on."""
        for task in self.tasks:
            task.close()
        self.tasks.clear()
        if self.running is not None:
            self.running.close()
            self.running = None

    def _open_session(self, source: Any) -> Any:
        return self.world.topics

    def _open_state(self, welcome: messages.Welcome, *, fresh: bool) -> Any:
        return Watched(super()._open_state(welcome, fresh=fresh), self)

    def _run(self, start: StartBatch) -> None:
        self.given, self.sent, self.merged = {}, {}, {}
        self.running = BatchRun(start, self._working)
        self.tasks = deque(self.running.begin())

    def die(self) -> None:
        """End as a process that is killed: nothing is said, and files stay what they are."""
        self.end_batch()
        self._heart.end()
        self._tools = self._memory = None
        self._kept.close()


class RealExecutor:
    """A process, or the place of one.  It offers what `tests.state.actors.Executor` does."""

    def __init__(self, world: Any, index: int) -> None:
        self.world = world
        self.index = index
        self.alive = True
        self.doomed: batch_run.Step | None = None  # it dies when it gets there
        self.reset()

    def reset(self) -> None:
        self.link: Link | None = None
        self.process: Process | None = None
        self.device: Any = None
        self.asleep_at: Any = None  # what the newest was that had happened on the channels
        self.in_vain = 0

    @property
    def leading(self) -> leader.Leading | None:
        return None if self.process is None else self.process.leading

    def moves(self) -> list[tuple[str, Any]]:
        if not self.alive:
            return []
        if self.link is None:
            return [("connect", None)] if self.world.is_listening() else []
        process = self.process
        assert process is not None
        found: list[tuple[str, Any]] = []
        if process.running is not None:
            if self.asleep_at != self.world.newest:
                found += [("turn", None)] * 3
            if self.link.down or not self.link.coordinator_open:
                found.append(("look", None))
        elif process._early or self.link.down:
            found.append(("hear", None))
        elif not self.link.coordinator_open:
            return [("reset", None)]
        if process.writer.waiting:
            found.append(("write", None))
        return found

    def move(self, kind: str, what: Any) -> None:
        try:
            self._move(kind)
        except Killed:
            self.world.seen["killed within a step"] += 1
            self.world.kill_executor(self)
        except KdirectError as e:
            self._fail(e)

    def _fail(self, error: KdirectError) -> None:
        """What `executor.serve` does: an executor that has lost another one joins again."""
        if isinstance(error, StateProtocolError) and " is next" in error.message:
            raise Broken(f"executor {self.index}: {error}") from error
        if not isinstance(error, CoordinatorUnavailableError):
            self.world.seen[f"left: {type(error).__name__}"] += 1
            if self.process is not None:
                executor._report(self.process.connection, self.index, error)
        self.leave()

    def _move(self, kind: str) -> None:
        if kind == "connect":
            self._connect()
            return
        process = self.process
        assert process is not None and self.link is not None
        if kind == "reset":
            self.leave()
        elif kind == "hear":
            message = process.next_early() or self.link.down.popleft()
            if isinstance(message, messages.Stop):
                self.leave()
                self.alive = False
            else:
                process.treat(message)
        elif kind == "look":
            process.look()
        elif kind == "write":
            process.writer.step()
        elif kind == "turn":
            self._turn(process)
        if self.process is not None:
            self.check()

    def _turn(self, process: Process) -> None:
        for _ in range(max(TURNS_AT_ONCE, len(process.tasks) // 2)):
            if process.turn() or process.running is None:
                self.in_vain, self.asleep_at = 0, None
                return
            self.in_vain += 1
            if self.in_vain >= len(process.tasks):
                self.in_vain = 0
                # As the thread sleeps: credits that are due go first.
                if not process.exchange.wait(0):
                    self.asleep_at = self.world.newest
                return

    def _connect(self) -> None:
        world = self.world
        settings = executor.ExecutorSettings(
            host="",
            port=0,
            token="secret",
            executor=self.index,
            executors=world.executors,
            memory=str(world.directory / "memory"),
            state_limit=STATE_LIMIT,
            fragment_limit=FRAGMENT_LIMIT,
            provider="sim",
            slots=world.bounds.slots,
            slot_bytes=SLOT_BYTES,
        )
        link = Link()
        kept = KeptState(Path(settings.memory), self.index, world.executors, STATE_LIMIT)
        connection = Connection(world, self.index, link)
        exchange = self._exchange(settings)
        self.link = link
        self.process = Process(world, settings, connection, exchange, kept, self)
        self.process._tell(
            messages.Hello(
                executor=self.index,
                token="secret",
                process_id=1,
                host="here",
                address=exchange.address(),
                header=kept.header,
            )
        )
        world.accept(self.index, link)

    def _exchange(self, settings: executor.ExecutorSettings) -> Exchange:
        world = self.world
        if world.bounds.repeats:
            return WireExchange(world, self.index, world.executors, settings.slot_bytes)
        found = RdmaExchange(
            self.index,
            world.executors,
            provider="sim",
            device_options={
                "network": world.network,
                "name": f"executor {self.index}",
                "shared": False,
            },
            slots=settings.slots,
            slot_bytes=settings.slot_bytes,
        )
        self.device = found._channels.device
        world.devices.add(self.device)
        return found

    def at(self, step: batch_run.Step, batch: int) -> None:
        """A process that is doomed does not finish this step.  See `batch_run.Observer`."""
        if step is self.doomed:
            self.doomed = None
            raise Killed

    def follow(self, old: RealExecutor) -> None:
        """The next executor of the same number finds its files where they are."""

    def leave(self) -> None:
        """Leave the attempt in good order; the process lives on."""
        if self.link is not None:
            self.link.executor_open = False
        process = self.process
        self.reset()
        if process is not None:
            try:
                process.end_batch()
                process.close()
            except KdirectError as e:
                raise Broken(f"executor {self.index} cannot leave: {e}") from e

    def kill(self, *, with_file: bool) -> None:
        if self.link is not None:
            self.link.executor_open = False
        process, device = self.process, self.device
        self.reset()
        self.alive, self.doomed = False, None
        if process is not None:
            if device is not None:
                self.world.network.kill(device)
            else:
                process.exchange.close()
            process.die()
            if device is not None:
                device.close()
        if with_file:
            for name in (f"state-{self.index}", f"output-{self.index}.arrow"):
                with contextlib.suppress(FileNotFoundError):
                    (self.world.directory / "memory" / name).unlink()

    # -- checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Credits are conserved, and at the end of each epoch its leader has what it was given."""
        process = self.process
        assert process is not None
        if isinstance(process.exchange, WireExchange) and not process.exchange.check():
            raise Broken("credits are not conserved")
        for sender, receiver in self._channels():
            if not (
                sender.freed <= sender.acknowledged <= receiver.returned <= receiver.released
                and receiver.released <= receiver.received <= sender.posted
                and sender.posted <= sender.acknowledged + sender.slots
            ):
                raise Broken("credits are not conserved")
        for other in self.world.all:
            self._check_epoch(process, other)

    def _check_epoch(self, process: Process, other: RealExecutor) -> None:
        leading = process.leading
        sender = other.process
        if leading is None or leading.batch is None or other is self or sender is None:
            return
        theirs = sender.leading
        if theirs is None or (theirs.attempt, theirs.batch) != (leading.attempt, leading.batch):
            return
        epoch, sequence = leading.expected[other.index]
        sent = sender.sent.get(self.index, [])
        if sequence == 0 and 0 < epoch <= len(sent):
            merged = process.merged.get(other.index, Counter())
            if merged != sent[epoch - 1]:
                raise Broken(
                    f"after epoch {epoch - 1} executor {self.index} has {merged} of executor"
                    f" {other.index}, which sent {sent[epoch - 1]}"
                )
            self.world.seen["epochs that converged"] += 1

    def _channels(self) -> Iterator[tuple[Any, Any]]:
        """The channels from this executor to those of the same attempt."""
        process = self.process
        if process is None or process.leading is None or self.device is None:
            return
        for other in self.world.all:
            peer = other.process
            if other is self or peer is None or peer.leading is None:
                continue
            if peer.leading.attempt == process.leading.attempt:
                yield process.exchange.senders[other.index], peer.exchange.receivers[self.index]
                yield peer.exchange.senders[self.index], process.exchange.receivers[other.index]
