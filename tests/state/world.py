"""A whole job in one process: topics, a directory, a coordinator, its caller and its executors.

What is durable (topics, directory, state files, what the caller has noted) outlives processes;
everything else goes with them.  Every move is one small step of one process, and everything that
the caller gets is compared with the sequential model.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdirect.rdma.sim import Faults, SimNetwork
from kdirect.state import coordinator, messages, part_transfer, snapshots
from kdirect.state.aggregates import Aggregate
from kdirect.state.batches import BatchRecord, Commit, Manifest, Partition
from kdirect.state.job import (
    Asked,
    AskEnds,
    Disconnect,
    Finish,
    ForgetSnapshot,
    Handed,
    HandOut,
    Job,
    LogBatch,
    LogCommit,
    Lost,
    Settings,
    StopAsked,
    Tell,
    WriteAttempt,
    WriteManifest,
)
from kdirect.state.leader import Trigger
from kdirect.state.mapped import Owner
from kdirect.state.plan import AggregatePlan, Input, JoinPlan, Plan
from kdirect.state.windows import NoWindow, Session, Sliding, Tumbling, Window
from tests.state.actors import Broken, Channel, Executor, Link
from tests.state.model import GIVES_BACK, LEFT, NEVER, RIGHT, Query, Sequential, windows_of
from tests.state.processes import RealExecutor
from tests.state.topics import LAYOUT, SCHEMA, Row, Topics, ends_of
from tests.state.wires import Wire

TOPIC = "events"
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Bounds:
    """What a seed chooses."""

    executors: int = 2
    partitions: int = 2
    keys: int = 4
    window: Window = field(default_factory=lambda: Tumbling(size_us=10))
    delay: int = 3
    ahead: int = 50
    epoch_bytes: int = 60
    block_rows: int = 6
    max_offsets: int | None = None
    snapshot_interval: int = 40
    idle_timeout_ms: int | None = None
    split: bool = False
    round_trips: bool = False  # every control message goes through its bytes
    # The executors are the real ones, with channels of so many slots over a fabric with `faults`.
    is_real: bool = False
    slots: int = 4
    repeats: bool = False  # they have wires instead, on which buffers may come twice
    faults: Faults = field(default_factory=Faults)
    value_format: str = "fixed"
    lists: bool = False  # every group has a list of its values too
    how: str = ""  # a join, of the topics left and right
    right_delay: int = 0

    @property
    def topics(self) -> tuple[str, ...]:
        return (LEFT, RIGHT) if self.how else (TOPIC,)

    @property
    def delays(self) -> dict[str, int]:
        delays = (self.delay, self.right_delay) if self.how else (self.delay,)
        return dict(zip(self.topics, delays))


def plan_of(bounds: Bounds) -> Plan:
    inputs = [
        Input(
            topic=topic,
            schema=() if bounds.value_format == "fixed" else SCHEMA,
            value_format=bounds.value_format,
            layout=LAYOUT if bounds.value_format == "fixed" else None,
            time="at",
            delay_us=delay,
            max_ahead_us=bounds.ahead,
            idle_timeout_ms=bounds.idle_timeout_ms,
        )
        for topic, delay in bounds.delays.items()
    ]
    if bounds.how:
        return JoinPlan(
            left=inputs[0],
            right=inputs[1],
            left_keys=("key",),
            right_keys=("key",),
            window=bounds.window,
            how=bounds.how,
            columns=((0, "key", "a"), (0, "value", "b"), (1, "key", "c"), (1, "value", "d")),
        )
    lists = (Aggregate(kind="collect_list", column="value"),) if bounds.lists else ()
    return AggregatePlan(
        input=inputs[0],
        keys=("key",),
        window=bounds.window,
        aggregates=(
            Aggregate(kind="count"),
            Aggregate(kind="sum", column="value"),
            Aggregate(kind="max", column="value"),
            *lists,
        ),
    )


def query_of(bounds: Bounds) -> Query:
    window = bounds.window
    size = slide = origin = 0
    if isinstance(window, Session):
        size = window.gap_us
    elif not isinstance(window, NoWindow):
        assert isinstance(window, Tumbling | Sliding)
        size, slide, origin = window.size_us, window.slide_us, window.origin_us
    return Query(
        window.kind,
        size,
        slide,
        bounds.delay,
        bounds.ahead,
        origin,
        bounds.lists,
        bounds.how,
        bounds.delays,
    )


class World:
    """One job and everything around it."""

    def __init__(self, bounds: Bounds, chance: random.Random) -> None:
        self.bounds, self.chance = bounds, chance
        self.window = bounds.window
        self.delays = bounds.delays
        self.plan = plan_of(bounds)
        self.rows = {
            Partition(topic, i): list[Row]()
            for topic in bounds.topics
            for i in range(bounds.partitions)
        }
        self.now = 100_000
        # the directory
        self.attempt = 0
        self.records: dict[int, BatchRecord] = {}
        self.committed: Commit | None = None
        self.manifests: dict[int, Manifest] = {}
        self.parts: dict[tuple[int, str], Any] = {}
        # the model
        self.query = query_of(bounds)
        self.model = Sequential(self.query, self.rows)
        self.expected: dict[int, Counter] = {}
        self.closes: dict[int, int] = {}
        # the caller
        self.taken: dict[int, Counter] = {}
        self.is_waiting = False
        # processes
        self.channels: dict[tuple[int, int, int], Channel] = {}
        # By attempt and receiver: the channels to it, by sender.
        self.incoming_of: dict[tuple[int, int], dict[int, Channel]] = {}
        self.sent: list[tuple[Any, ...]] = []  # sender, peer and what was sent
        self.seen: Counter = Counter()  # what has happened, to know that it does
        self.stopped = False
        # what real executors work with
        self.options: dict[str, Any] = {}
        self.wires: dict[tuple[int, int], Wire] = {}
        self.exchanges = self.news = 0
        self.devices: set[Any] = set()
        self.hashes: dict[tuple[int | None, int], int] = {}
        if bounds.is_real:
            self.make_real()
        self.all: list[Any] = []
        self.deploy(bounds.executors, is_split=bounds.split)

    def make_real(self) -> None:
        """A directory of snapshots and mapped state, a fabric, and topics that can be read."""
        bounds = self.bounds
        self.directory = Path(tempfile.mkdtemp(prefix="kdirect-schedule-", dir=MEMORY))
        (self.directory / "snapshots").mkdir()
        with contextlib.redirect_stdout(io.StringIO()):  # it has the seed of the schedule
            self.network = SimNetwork(self.chance.getrandbits(32), bounds.faults)
        self.topics = Topics(self.rows, bounds.value_format, self.chance)
        self.options = {
            "owner": asdict(
                Owner(directory=str(self.directory), identity="schedule", temporary=False)
            ),
            "source": {},
            "snapshots": str(self.directory / "snapshots"),
            "snapshots_mark": part_transfer.leave_mark(self.directory / "snapshots"),
            "heartbeat_interval_ms": 1 << 40,
            "mode": "slash",
            "adaptive_ratio": 0.5,
            "epoch_bytes": bounds.epoch_bytes,
            "block_rows": bounds.block_rows,
        }

    @property
    def newest(self) -> tuple[int, int]:
        """Changes when anything has happened between real executors."""
        return self.network.now_ns, self.news

    def wire(self, sender: int, receiver: int) -> Wire:
        """From one exchange to another, by their names."""
        if (sender, receiver) not in self.wires:
            self.wires[sender, receiver] = Wire(self.bounds.slots)
        return self.wires[sender, receiver]

    def close(self) -> None:
        """The schedule is over: nothing of it is left."""
        for executor in self.all:
            executor.kill(with_file=False)
        for device in self.devices:
            device.close()
        if self.bounds.is_real:
            shutil.rmtree(self.directory)

    # -- processes ---------------------------------------------------------------------------------

    def deploy(self, executors: int, *, is_split: bool) -> None:
        """So many executors from now on; state files of the same number stay where they are."""
        before, self.executors = self.all, executors
        for executor in before:
            executor.kill(with_file=False)
        self.settings = Settings(
            plan=self.plan,
            executors=executors,
            options=self.options,
            starts=dict.fromkeys(self.rows, 0),
            is_split=is_split and executors > 1,
            max_offsets=self.bounds.max_offsets,
            snapshot_interval_us=self.bounds.snapshot_interval,
            max_restarts=10**6,
        )
        make = RealExecutor if self.bounds.is_real else Executor
        self.all = [make(self, i) for i in range(executors)]
        for executor, old in zip(self.all, before):
            executor.follow(old)
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.job: Job | None = None
        self.links: dict[int, Link] = {}
        self.arrived: list[tuple[int, Link]] = []
        self.outputs: dict[tuple[int, int, int], Counter] = {}
        self.collecting: tuple[int, int] | None = None
        self.pause = None
        self.is_waiting = self.stopped = False
        self.job, effects = coordinator.open_job(
            self.settings,
            attempt=self.attempt,
            records=self.records,
            committed=self.committed,
            manifests=tuple(self.manifests.values()),
        )
        self.effects: list[Any] = list(effects)

    def kill_coordinator(self) -> None:
        """Its process ends: every connection breaks, and effects that waited never happen."""
        for link in (*self.links.values(), *(link for _, link in self.arrived)):
            link.coordinator_open = False
        self.job, self.effects, self.is_waiting = None, [], False

    def kill_executor(self, executor: Any, *, with_file: bool = False) -> None:
        executor.kill(with_file=with_file)

    def cut(self, executor: Any) -> None:
        """The connection of an executor breaks; both ends notice, and its process begins again."""
        if executor.link is not None:
            executor.link.executor_open = executor.link.coordinator_open = False
            executor.link.down.clear()

    def is_listening(self) -> bool:
        return self.job is not None

    def accept(self, index: int, link: Link) -> None:
        """A connection whose hello the coordinator has not read yet."""
        self.arrived.append((index, link))

    def meet(self) -> None:
        """The newest connection of an executor counts; an older one is closed."""
        index, link = self.arrived.pop(0)
        if not link.up:
            return  # it broke before the hello came
        old = self.links.get(index)
        if old is not None:
            old.coordinator_open = False
        self.links[index] = link
        self.event(link.up.popleft())

    def channel(self, executor: Executor, peer: int) -> Channel:
        where = (executor.leading.attempt, executor.index, peer)
        channel = self.channels.get(where)
        if channel is None:
            channel = self.channels[where] = Channel()
            ways = self.incoming_of.setdefault((where[0], peer), {})
            ways[executor.index] = channel
            self.incoming_of[where[0], peer] = dict(sorted(ways.items()))
        return channel

    def incoming(self, executor: Executor) -> Iterator[tuple[int, Channel]]:
        yield from self.incoming_of.get((executor.leading.attempt, executor.index), {}).items()

    def as_sent(self, message: Any) -> Any:
        if not self.bounds.round_trips:
            return message
        found = messages.decode(messages.encode(message))
        if found != message:
            raise Broken(f"{message} became {found}")
        return found

    # -- the coordinator ---------------------------------------------------------------------------

    def coordinator_moves(self) -> list[tuple[str, Any]]:
        if self.job is None:
            return []
        if self.effects:
            return [("do", None)]
        found: list[tuple[str, Any]] = []
        if self.arrived:
            found.append(("meet", None))
        for index, link in self.links.items():
            if link.up:
                found.append(("hear", index))
            elif not link.executor_open:
                found.append(("lose", index))
        if self.pause is not None:
            found.append(("ends", None))
        if self.collecting is not None and self.is_collected():
            found.append(("hand", None))
        if not self.is_waiting and not self.stopped:
            found.append(("ask", None))
        return found

    def coordinator_move(self, kind: str, index: Any) -> None:
        if kind == "do":
            self.carry_out(self.effects.pop(0))
        elif kind == "hear":
            message = self.links[index].up.popleft()
            if not isinstance(message, messages.Output):
                self.event(message)
        elif kind == "meet":
            self.meet()
        elif kind == "lose":
            self.links.pop(index).coordinator_open = False
            self.event(Lost(index))
        elif kind == "ends":
            self.pause = None
            self.event(ends_of({tp: len(rows) for tp, rows in self.rows.items()}, self.now))
        elif kind == "hand":
            self.hand_out()
        elif kind == "ask":
            self.is_waiting = True
            self.event(Asked(self.now))
        elif kind == "stop":
            self.stopped = True
            self.event(StopAsked(self.now))

    def event(self, event: Any) -> None:
        self.job, effects = coordinator.step(self.job, event)
        self.effects += effects

    def carry_out(self, effect: Any) -> None:
        if isinstance(effect, WriteAttempt):
            self.attempt = effect.attempt
            self.collecting = None
        elif isinstance(effect, LogBatch):
            self.log_batch(effect.record)
        elif isinstance(effect, LogCommit):
            if effect.commit.number not in self.taken:
                raise Broken(f"batch {effect.commit.number} is committed, and was never taken")
            self.committed = effect.commit
        elif isinstance(effect, Tell):
            link = self.links.get(effect.executor)
            if link is not None and link.coordinator_open:
                link.down.append(self.as_sent(effect.message))
        elif isinstance(effect, Disconnect):
            link = self.links.pop(effect.executor, None)
            if link is not None:
                link.coordinator_open = False
        elif isinstance(effect, AskEnds):
            self.pause = effect.pause
        elif isinstance(effect, HandOut):
            self.collecting = (self.attempt, effect.batch)
            for i in self.settings.leaders:
                if (link := self.links.get(i)) is not None:
                    message = messages.TakeOutput(attempt=self.attempt, batch=effect.batch)
                    link.down.append(message)
        elif isinstance(effect, WriteManifest):
            self.manifests[effect.manifest.number] = effect.manifest
            if self.bounds.is_real:
                snapshots.write_manifest(self.directory / "snapshots", effect.manifest)
            self.seen["snapshots"] += 1
        elif isinstance(effect, ForgetSnapshot):
            self.manifests.pop(effect.number)
            self.parts = {k: v for k, v in self.parts.items() if k[0] != effect.number}
            if self.bounds.is_real:
                snapshots.forget(self.directory / "snapshots", effect.number)
            self.records = {n: r for n, r in self.records.items() if n > effect.batches}
        elif isinstance(effect, Finish):
            self.finish(effect)

    def finish(self, effect: Finish) -> None:
        if effect.error is not None:
            raise Broken(f"the job failed: {effect.error}")
        if not self.stopped:
            raise Broken("the job ended by itself")
        self.kill_coordinator()
        for executor in self.all:
            self.kill_executor(executor)

    def log_batch(self, record: BatchRecord) -> None:
        """The model runs a batch when it is logged; the job must have logged what it knows."""
        number = record.number
        if number in self.records or (self.records and number != max(self.records) + 1):
            raise Broken(f"batch {number} is logged out of turn")
        if record.closed_before != self.model.closed:
            raise Broken(
                f"batch {number}: closed before {record.closed_before}, not {self.model.closed}"
            )
        previous = self.records.get(number - 1)
        for tp, range_ in record.ranges.items():
            if range_.start != (0 if previous is None else previous.ranges[tp].end):
                raise Broken(f"batch {number} does not begin where the one before ended")
        self.records[number] = record
        self.seen["idle partitions"] += bool(record.idle)
        self.seen["batches of nothing"] += all(r.start == r.end for r in record.ranges.values())
        late = self.model.late
        self.expected[number] = self.model.run(record)
        self.seen["late rows"] += self.model.late - late
        self.closes[number] = self.model.closed

    def check_closes(self, number: int, trigger: Trigger) -> None:
        """P1: no window closes before every partition that is not idle has passed its end."""
        if trigger.closes > self.closes[number]:
            raise Broken(f"batch {number} closes {trigger.closes}, not {self.closes[number]}")
        before = self.closes.get(number - 1, NEVER)
        if trigger.before != before:
            raise Broken(f"batch {number} begins at {trigger.before}, not {before}")

    # -- the caller --------------------------------------------------------------------------------

    def is_collected(self) -> bool:
        assert self.collecting is not None
        return all((*self.collecting, i) in self.outputs for i in self.settings.leaders)

    def hand_out(self) -> None:
        """P2: what the caller gets is what a sequential run gives, each batch once."""
        assert self.collecting is not None
        attempt, number = self.collecting
        self.collecting = None
        rows: Counter = Counter()
        for i in self.settings.leaders:
            rows += self.outputs[attempt, number, i]
        if rows != self.expected[number]:
            raise Broken(
                f"batch {number}: too many {dict(rows - self.expected[number])}, "
                f"missing {dict(self.expected[number] - rows)}"
            )
        done = -1 if self.committed is None else self.committed.number
        if number <= done or (number not in self.taken and number != len(self.taken)):
            raise Broken(f"batch {number} is handed out after {done} was committed")
        self.seen["handed out again"] += number in self.taken
        self.taken[number] = rows
        self.is_waiting = False
        self.event(Handed(number))

    def as_rows(self, table: pa.Table) -> Counter:
        """The rows of a real executor as the model has them."""
        for i, given in enumerate(table.schema):
            if pa.types.is_timestamp(given.type):
                table = table.set_column(i, given.name, table.column(i).cast(pa.int64()))
            elif pa.types.is_list(given.type):
                lists = pa.array([tuple(sorted(x)) for x in table.column(i).to_pylist()])
                table = table.set_column(i, given.name, lists)
        columns = [column.to_pylist() for column in table.columns]
        if not self.bounds.how and isinstance(self.window, NoWindow):
            columns[1:1] = [[0] * table.num_rows] * 2
        if self.bounds.lists:
            columns[-1] = [tuple(values) for values in columns[-1]]
        return Counter(zip(*columns))

    def lose_part(self, number: int, file: str) -> None:
        """A part of a snapshot is gone."""
        self.parts.pop((number, file), None)
        if self.bounds.is_real:
            path = snapshots.snapshot_directory(self.directory / "snapshots", number) / file
            path.unlink(missing_ok=True)

    # -- what becomes of rows ----------------------------------------------------------------------

    def kept_rows(self, key: int | None, time: int, side: int, closed: int) -> int:
        """How often a row whose time may be used is kept: once for each open window."""
        if key is None and self.bounds.how and side not in GIVES_BACK[self.bounds.how]:
            return 0
        if self.query.kind == "session":
            return int(time + self.query.size >= closed)
        return sum(end > closed for _, end in windows_of(self.query, time))

    def hash_of(self, state: Any, key: int | None, side: int) -> int:
        """The hash of a key in the state of an executor."""
        found = self.hashes.get((key, side))
        if found is None:
            columns = [pa.array([key], pa.int64())]
            if state.split_nulls:  # null keys of the two sides differ
                columns.append(pa.array([1 << side if key is None else 0], pa.int8()))
            found = self.hashes[key, side] = int(state.keys.encode(columns, 1).hashes()[0])
        return found

    # -- checks at any time ------------------------------------------------------------------------

    def check_converges(self) -> None:
        """While all executors are in one batch: their states, and what is on its way to them, are
        what was there before and the rows that were applied.  No delta counts twice, none is
        lost.  (Real executors are looked at when epochs end.)"""
        if self.bounds.is_real:
            return
        running = {
            (e.leading.attempt, e.leading.running.batch)
            for e in self.all
            if e.leading is not None and e.leading.running is not None
        }
        if len(running) != 1 or any(
            e.leading is None or e.leading.running is None for e in self.all
        ):
            return
        total: Counter = Counter()
        wanted: Counter = Counter()
        for e in self.all:
            if e.file is not None:
                total.update(e.file.tally())
            total.update(e.on_the_way())
            wanted.update(e.base)
            wanted.update(e.applied)
        total.subtract(wanted)
        if any(total.values()):
            raise Broken(f"{running}: the executors have {total} too much, of {wanted}")
