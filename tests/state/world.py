"""A whole job in one process: topics, a directory, a coordinator, its caller and its executors.

What is durable (topics, directory, state files, what the caller has noted) outlives processes;
everything else goes with them.  Every move is one small step of one process, and everything that
the caller gets is compared with the sequential model.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kdirect.state import coordinator, messages
from kdirect.state.aggregates import Aggregate
from kdirect.state.batches import BatchRecord, Commit, Manifest, Partition, Range
from kdirect.state.job import (
    Asked,
    AskEnds,
    Disconnect,
    Ends,
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
from kdirect.state.plan import AggregatePlan, Input
from kdirect.state.windows import NoWindow, Session, Sliding, Tumbling, Window
from tests.state.actors import Broken, Channel, Executor, Link
from tests.state.model import NEVER, Query, Row, Sequential

TOPIC = "events"


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


def plan_of(bounds: Bounds) -> AggregatePlan:
    return AggregatePlan(
        input=Input(
            topic=TOPIC,
            schema="at long, key long, value long",
            time="at",
            delay_us=bounds.delay,
            max_ahead_us=bounds.ahead,
            idle_timeout_ms=bounds.idle_timeout_ms,
        ),
        keys=("key",),
        window=bounds.window,
        aggregates=(
            Aggregate(kind="count"),
            Aggregate(kind="sum", column="value"),
            Aggregate(kind="max", column="value"),
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
    return Query(window.kind, size, slide, bounds.delay, bounds.ahead, origin)


class World:
    """One job and everything around it."""

    def __init__(self, bounds: Bounds, chance: random.Random) -> None:
        self.bounds, self.chance = bounds, chance
        self.window = bounds.window
        self.delays = {TOPIC: bounds.delay}
        self.plan = plan_of(bounds)
        self.rows = {Partition(TOPIC, i): list[Row]() for i in range(bounds.partitions)}
        self.now = 100_000
        # the directory
        self.attempt = 0
        self.records: dict[int, BatchRecord] = {}
        self.committed: Commit | None = None
        self.manifests: dict[int, Manifest] = {}
        self.parts: dict[tuple[int, str], Any] = {}
        # the model
        self.model = Sequential(query_of(bounds), self.rows)
        self.expected: dict[int, Counter] = {}
        self.closes: dict[int, int] = {}
        # the caller
        self.taken: dict[int, Counter] = {}
        self.is_waiting = False
        # processes
        self.channels: dict[tuple[int, int, int], Channel] = {}
        self.sent: list[tuple[int, int, Any, Any]] = []
        self.seen: Counter = Counter()  # what has happened, to know that it does
        self.stopped = False
        self.deploy(bounds.executors)

    # -- processes ---------------------------------------------------------------------------------

    def deploy(self, executors: int) -> None:
        """So many executors from now on; state files of the same number stay where they are."""
        files = [executor.file for executor in getattr(self, "all", [])]
        self.executors = executors
        self.settings = Settings(
            plan=self.plan,
            executors=executors,
            starts=dict.fromkeys(self.rows, 0),
            is_split=self.bounds.split and executors > 1,
            max_offsets=self.bounds.max_offsets,
            snapshot_interval_us=self.bounds.snapshot_interval,
            max_restarts=10**6,
        )
        self.all = [Executor(self, i) for i in range(executors)]
        for executor, file in zip(self.all, files):
            executor.file = file
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

    def kill_executor(self, executor: Executor, *, with_file: bool = False) -> None:
        if executor.link is not None:
            executor.link.executor_open = False
        executor.reset()
        executor.alive = False
        if with_file:
            executor.file = None

    def cut(self, executor: Executor) -> None:
        """The connection of an executor breaks; its process notices, and begins again."""
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
        return channel

    def incoming(self, executor: Executor) -> Iterator[tuple[int, Channel]]:
        attempt = executor.leading.attempt
        for sender in range(self.executors):
            channel = self.channels.get((attempt, sender, executor.index))
            if channel is not None:
                yield sender, channel

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
            elif not link.executor_open and link.coordinator_open:
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
            ends = {tp: Range(0, len(rows)) for tp, rows in self.rows.items()}
            self.event(Ends(ends, self.now))
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
            self.seen["snapshots"] += 1
        elif isinstance(effect, ForgetSnapshot):
            self.manifests.pop(effect.number)
            self.parts = {k: v for k, v in self.parts.items() if k[0] != effect.number}
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

    # -- checks at any time ------------------------------------------------------------------------

    def check_converges(self) -> None:
        """While all executors are in one batch: their states, and what is on its way to them, are
        what was there before and the rows that were applied.  No delta counts twice, none is
        lost."""
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
