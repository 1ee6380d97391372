"""A planned job in one process: what outlives processes, its coordinator, and those that visit it.

The caller (Spark's driver, in `simulate_planned`) plans batches and starts gangs of visitors.  They
come to hosts, of which each has state files of its own, and a lock for each: a visitor that was not
ended yet keeps its successor out.  Who becomes which executor is decided by the real crew.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from kdirect.errors import StateProtocolError
from kdirect.state import coordinator, messages
from kdirect.state.batches import NO_BATCH, BatchRecord, Phase
from kdirect.state.crew import VisitingCrew
from kdirect.state.job import (
    Ends,
    Finish,
    HandOut,
    LogCommit,
    Lost,
    Planned,
    Settings,
    WriteAttempt,
)
from kdirect.state.messages import Arrived, Failed, Hello, Leave, Placed, Stop
from tests.state.actors import Broken, Executor, Link
from tests.state.topics import ends_of
from tests.state.world import Bounds, World

AHEAD = 100  # attempts that are written at once
PATIENCE = 3000  # microseconds that a visitor waits for its gang
TRIES = 40  # of a visitor to get a lock


class Door(Link):
    """A visitor's connection, as the crew has it: a `kdirect.state.control.ControlConnection`."""

    peer = "a visitor"

    def close(self) -> None:
        self.coordinator_open = False

    def has_gone(self) -> bool:
        return not self.executor_open

    def put(self, data: bytes) -> None:
        if self.has_gone():
            raise StateProtocolError("it has gone")
        self.down.append(messages.decode_from_coordinator(data))


class Visitor(Executor):
    """A process that comes for one batch.  It ends as `done`, with its part of the output, or
    without."""

    def __init__(self, world: Any, task: int, start: int, batch: int, host: int) -> None:
        self.task, self.begun, self.batch, self.host = task, start, batch, host
        self.output: Counter | None = None
        self.tries = 0
        self.has_lock = False
        self.is_placed = False
        self.is_stopped = False  # by a signal: it does nothing, and holds what it has
        self.executors, self.life = world.executors, world.life
        super().__init__(world, -1)

    @property
    def file(self) -> Any:
        return self.world.files.get((self.host, self.index))

    @file.setter
    def file(self, file: Any) -> None:
        if self.index < 0:
            return
        if file is None:
            self.world.files.pop((self.host, self.index), None)
        else:
            assert self.has_lock
            self.world.files[self.host, self.index] = file

    def unlock(self) -> None:
        if self.has_lock:
            del self.world.locks[self.host, self.index]
            self.has_lock = False

    def kill(self, *, with_file: bool = False) -> None:
        super().kill(with_file=with_file)
        self.unlock()

    def moves(self) -> list[tuple[str, Any]]:
        if not self.alive or self.is_stopped:
            return []
        if self.link is None:
            return [("arrive", None)]
        if self.is_placed and not self.has_lock:
            return [("lock", None)]
        found = super().moves()
        if len(found) > 1 and self.world.chance.random() < 0.95:
            found = [move for move in found if move[0] != "write"]  # which takes long
        return found

    def move(self, kind: str, what: Any) -> None:
        if kind == "arrive":
            if not self.world.is_listening() or self.world.life != self.life:
                self.kill()
                return
            self.link = Door()
            states = [i for h, i in sorted(self.world.files) if h == self.host]
            self.say(
                Arrived(batch=self.batch, task=self.task, start=self.begun, host=str(self.host),
                        process_id=1, states=tuple(i for i in states if i < self.executors))
            )  # fmt: skip
            self.world.strangers.append(self.link)
        elif kind == "lock":
            self.lock()
        elif kind == "reset":
            self.kill()
        else:
            super().move(kind, what)

    def lock(self) -> None:
        where = self.host, self.index
        if where in self.world.locks:
            self.tries += 1
            if self.tries > TRIES:
                self.world.seen["kept out by a lock"] += 1
                self.say(Failed(executor=self.index, error="StateDirectoryError", message="locked"))
                self.kill()
            return
        self.world.locks[where] = self
        self.has_lock = True
        header = None if self.file is None else self.file.header
        self.say(
            Hello(executor=self.index, token="secret", process_id=1, host=str(self.host),
                  address={}, header=header, start=self.begun)
        )  # fmt: skip

    def hear(self, message: Any) -> None:
        if isinstance(message, Placed):
            self.index, self.is_placed = message.executor, True
        elif isinstance(message, Leave):
            self.leave(message)
        elif isinstance(message, Stop):
            self.world.seen["refused"] += 1
            self.kill()
        else:
            super().hear(message)

    def leave(self, message: Leave) -> None:
        if self.copies:
            raise Broken("a visitor is let leave while it writes its part of a snapshot")
        header = self.file.header
        if message.batch != self.batch:
            self.world.seen["left another batch"] += 1
            self.kill()
            return
        if (header.batch, header.phase) != (self.batch, Phase.DONE):
            raise Broken(f"a visitor of batch {self.batch} leaves with {header}")
        self.output = self.file.kept.copy()
        self.kill()


class PlannedWorld(World):
    """See the module.  `executors` may change whenever the coordinator starts."""

    def __init__(self, bounds: Bounds, chance: random.Random) -> None:
        self.files: dict[tuple[int, int], Any] = {}  # by host and executor
        self.locks: dict[tuple[int, int], Visitor] = {}
        self.life = 0  # of the coordinator
        self.committed_by_caller = NO_BATCH
        self.outputs_of: dict[int, Counter] = {}  # what a gang was first to hand out, by batch
        self.finished: Finish | None = None
        super().__init__(bounds, chance)

    # -- processes ---------------------------------------------------------------------------------

    def deploy(self, executors: int, *, is_split: bool) -> None:
        self.executors = executors
        self.all = [visitor for visitor in self.all if visitor.alive]
        self.settings = Settings(
            plan=self.plan,
            executors=executors,
            options=self.options,
            snapshot_interval_us=self.bounds.snapshot_interval,
            is_planned=True,
        )
        self.records = {
            number: BatchRecord.from_json(json.loads(json.dumps(record.to_json())))
            for number, record in self.records.items()
        }
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.life += 1
        self.crew = VisitingCrew(self.executors, PATIENCE, clock=lambda: self.now)
        self.strangers: list[Door] = []
        self.lives_attempt = self.attempt
        super().start_coordinator()
        self.is_waiting = True

    def kill_coordinator(self) -> None:
        for link in (*self.strangers, *(link for _, link in self.crew._waiting.values())):
            link.close()
        super().kill_coordinator()

    def start_visitor(self, task: int, start: int, batch: int, host: int) -> Visitor:
        found = Visitor(self, task, start, batch, host)
        self.all.append(found)
        return found

    # -- the coordinator: as `coordinator_server` does it ------------------------------------------

    def coordinator_moves(self) -> list[tuple[str, Any]]:
        if self.job is None:
            return []
        if self.effects:
            return [("do", None)]
        found: list[tuple[str, Any]] = []
        for link in self.strangers:
            if link.up or not link.executor_open or not link.coordinator_open:
                found.append(("stranger", link))
        for index, link in self.links.items():
            if link.up:
                found.append(("hear", index))
            elif not link.executor_open:
                found.append(("lose", index))
        return found

    def coordinator_move(self, kind: str, index: Any) -> None:
        if kind == "stranger":
            self.meet_stranger(index)
        elif kind == "lose":
            self.lose(index)
        else:
            super().coordinator_move(kind, index)

    def meet_stranger(self, link: Door) -> None:
        self.strangers.remove(link)
        if not link.coordinator_open or not link.up:
            link.close()
            self.lose_gang_of(link)
            return
        message = link.up.popleft()
        if isinstance(message, Arrived):
            assert self.job is not None
            batch = NO_BATCH if self.job.planned is None else self.job.planned.number
            dealt = self.crew.arrived(batch, message, link)  # type: ignore[arg-type]
            if dealt:
                self.lose_all()
                if any(not other.coordinator_open for _, other in dealt):
                    raise Broken("a gang is sent away before it begins")
            for executor, other in dealt:
                self.strangers.append(other)  # type: ignore[arg-type]
                other.down.append(Placed(executor=executor))  # type: ignore[attr-defined]
            return
        if isinstance(message, Failed):
            link.close()
            self.lose_gang_of(link)
            return
        try:
            self.crew.check(link, message)  # type: ignore[arg-type]
        except StateProtocolError:
            link.close()
            self.lose_gang_of(link)
            return
        old = self.links.get(message.executor)
        if old is not None:
            old.coordinator_open = False
        self.links[message.executor] = link
        self.now_event(message)

    def lose_gang_of(self, link: Door) -> None:
        if self.crew.lost(link):  # type: ignore[arg-type]
            self.seen["lost before hello"] += 1
            self.lose_all()

    def lose_all(self) -> None:
        while self.links:
            executor, link = self.links.popitem()
            link.coordinator_open = False
            self.now_event(Lost(executor))

    def lose(self, executor: int) -> None:
        link = self.links.pop(executor, None)
        if link is not None:
            link.coordinator_open = False
        assert self.job is not None
        is_of_gang = executor in self.job.hellos
        self.now_event(Lost(executor))
        if is_of_gang:
            self.crew.give_up()
            self.lose_all()

    def now_event(self, event: Any) -> None:
        """An event whose effects follow at once, as others may."""
        self.event(event)
        if self.job is not None and isinstance(event, Lost):
            while self.effects:
                self.carry_out(self.effects.pop(0))

    def plan_batch(self, plan: Planned) -> None:
        self.event(plan)
        self.crew.planned(plan.number)

    def ends(self) -> Ends:
        return ends_of({tp: len(rows) for tp, rows in self.rows.items()}, self.now)

    def carry_out(self, effect: Any) -> None:
        if isinstance(effect, WriteAttempt):
            if effect.attempt > self.attempt:
                self.attempt = effect.attempt + AHEAD
        elif isinstance(effect, HandOut):
            assert self.job is not None
            for link in self.links.values():
                closes = self.job.after.closes if self.job.after is not None else 0
                link.down.append(Leave(attempt=self.job.attempt, batch=effect.batch, closes=closes))
        elif isinstance(effect, LogCommit):
            number = effect.commit.number
            if number > self.committed_by_caller:
                raise Broken(f"batch {number} is committed, which the caller has not")
            if effect.commit.after.closes != self.closes[number]:
                raise Broken(f"batch {number} is committed with other clocks")
            self.committed = effect.commit
            self.seen["commits"] += 1
        else:
            super().carry_out(effect)

    # -- the caller --------------------------------------------------------------------------------

    def take(self, number: int, outputs: list[Counter]) -> None:
        """P2: every gang that comes to the end of a batch hands out what a sequential run gives."""
        rows = sum(outputs, Counter())
        if rows != self.expected[number]:
            raise Broken(
                f"batch {number}: too many {dict(rows - self.expected[number])}, "
                f"missing {dict(self.expected[number] - rows)}"
            )
        self.seen["handed out again"] += number in self.taken
        self.taken[number] = rows

    def probe(self, plan: Planned) -> None:
        """What does not belong to this directory is refused; `step` is pure, so nothing changes."""
        assert self.job is not None
        _, effects = coordinator.step(self.job, plan)
        if not effects or not isinstance(effects[-1], Finish) or effects[-1].error is None:
            raise Broken(f"{plan} was taken")

    def check_converges(self) -> None:
        if self.job is None:
            return
        everybody = self.all
        try:
            self.all = [
                v for v in everybody
                if v.alive and v.leading is not None and v.leading.attempt == self.job.attempt
            ]  # fmt: skip
            if len(self.all) == self.executors:
                super().check_converges()
        finally:
            self.all = everybody
