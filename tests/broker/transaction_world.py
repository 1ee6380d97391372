"""A world in which transactions are coordinated: producers, coordinators, leaders of partitions and
a network, one step at a time, by a seed.

The coordinator is `kdirect.broker.transactions` itself.  Its log, the leaders' logs and the network
are models: a message may be delayed, lost, or come twice; the coordinator may end between any two
records of its log, and what it has sent is still under way when the next one begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

from kdirect.broker.transactions import Decision, Markers, NeedsId, Reply, Transactions, Write
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.transaction_records import (
    State,
    TransactionRecord,
    parse_transaction_value,
    transaction_value,
)
from kdirect.model import TopicPartition

PARTITIONS = [TopicPartition("t", i) for i in range(3)]
RETRIED = (E.CONCURRENT_TRANSACTIONS, E.NOT_COORDINATOR)
TIMEOUT_MS = 3000
Label = tuple[int, int]  # a producer's process, and the number of its transaction
Answer = Callable[[Any], None]


class Broken(AssertionError):
    """An invariant does not hold."""


class Leader:
    """The log of one partition, as far as transactions go.  `outcome`: what became of the records
    of a transaction."""

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.coordinators: dict[int, int] = {}
        self.open: dict[int, set[Label]] = {}
        self.admitted: dict[int, int] = {}
        self.guards: dict[int, int] = {}  # markers so far, by producer id
        self.outcome: dict[Label, str] = {}

    def takes(self, pid: int, epoch: int) -> bool:
        return self.admitted.get(pid) == epoch or (
            bool(self.open.get(pid)) and self.epochs.get(pid) == epoch
        )

    def append(self, pid: int, epoch: int, sequence: int, label: Label) -> int | None:
        """A code; None: the coordinator is to be asked first."""
        if epoch < self.epochs.get(pid, -1):
            return E.INVALID_PRODUCER_EPOCH
        next_one = self.sequences.get(pid, 0) if self.epochs.get(pid) == epoch else 0
        if sequence < next_one:
            return E.NONE  # a duplicate
        if not self.takes(pid, epoch):
            return None
        if sequence > next_one:
            return E.OUT_OF_ORDER_SEQUENCE_NUMBER
        self.epochs[pid], self.sequences[pid] = epoch, sequence + 1
        self.open.setdefault(pid, set()).add(label)
        if self.outcome.setdefault(label, "open") != "open":
            raise Broken(f"records of {label} came after its end")
        return E.NONE

    def marker(self, pid: int, epoch: int, coordinator: int, commit: bool) -> int:
        if coordinator < self.coordinators.get(pid, -1):
            return E.TRANSACTION_COORDINATOR_FENCED
        if epoch < self.epochs.get(pid, -1):
            return E.INVALID_PRODUCER_EPOCH
        self.coordinators[pid] = coordinator
        if epoch > self.epochs.get(pid, -1):
            self.epochs[pid], self.sequences[pid] = epoch, 0
        for label in self.open.pop(pid, set()):
            self.outcome[label] = "commit" if commit else "abort"
        self.admitted.pop(pid, None)
        self.guards[pid] = self.guards.get(pid, 0) + 1
        return E.NONE


class Task:
    """Markers that are being written."""

    def __init__(self, markers: Markers) -> None:
        self.markers = markers
        self.left = set(markers.partitions)


class Coordinator:
    """One tenure of a coordinator.  `queue`: writes that are under way, and how far they are."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.machine = Transactions()
        self.queue: list[tuple[Write, Answer]] = []
        self.in_log = 0  # of the queue, from its front
        self.tasks: list[Task] = []
        last: dict[str, bytes | None] = dict(world.log)
        for name, value in last.items():
            if value is not None:
                self._mark(self.machine.install(name, parse_transaction_value(value)))

    def decide(self, decision: Callable[[int | None], Decision], answer: Answer) -> None:
        made = decision(None)
        if isinstance(made, NeedsId):
            made = decision(self.world.new_id())
        if isinstance(made, Reply):
            answer(made)
        else:
            assert isinstance(made, Write)
            self.queue.append((made, answer))

    def _mark(self, markers: Markers | None) -> None:
        if markers is not None:
            self.tasks.append(Task(markers))

    def append(self) -> None:
        if self.in_log < len(self.queue):
            write, _ = self.queue[self.in_log]
            value = None if write.record is None else transaction_value(write.record)
            self.world.log.append((write.transactional_id, value))
            self.in_log += 1

    def tell(self, failed: bool = False) -> None:
        """The first write is committed, or its time is over, in the log or not."""
        if not self.queue or (not failed and not self.in_log):
            return
        write, answer = self.queue.pop(0)
        self.in_log = max(self.in_log - 1, 0)
        if failed:
            self.machine.failed(write)
            answer(Reply(E.NOT_COORDINATOR))
        else:
            self._mark(self.machine.written(write))
            answer(write.reply)

    def send_markers(self) -> None:
        task = self.world.random.choice(self.tasks) if self.tasks else None
        if task is None:
            return
        if not task.left:
            self._complete(task)
            return
        tp = self.world.random.choice(sorted(task.left))
        m, leader = task.markers, self.world.leaders[tp]

        def told(code: int) -> None:
            if code == E.NONE:
                task.left.discard(tp)
            elif self.world.coordinator is self:
                raise Broken(f"{m} of the coordinator is refused with {E(code).name}")

        def arrive() -> None:
            code = leader.marker(m.producer_id, m.epoch, self.epoch, m.commit)
            self.world.send("marked", lambda: told(code))

        self.world.send("marker", arrive)

    def _complete(self, task: Task) -> None:
        done = self.machine.complete(task.markers, self.world.now)
        entry = self.machine.entries.get(task.markers.transactional_id)
        if done is not None:
            self.queue.append((done, lambda reply: None))
        if done is not None or entry is None or entry.pending is None:
            # A completion that fails is begun once more.
            self.tasks.remove(task)

    def restart_tasks(self) -> None:
        """Where a completion has failed, markers are written once more."""
        busy = {task.markers.transactional_id for task in self.tasks}
        for name, entry in self.machine.entries.items():
            if name not in busy and entry.pending is None and entry.record is not None:
                self._mark(self.machine.install(name, entry.record))


class Processes:
    """Processes of a world: generators that yield what they ask, and go on with the answer.
    Requests and answers travel by `send`, and some requests arrive twice."""

    random: random.Random
    processes: dict[int, tuple[Any, int]]

    def send(self, what: str, arrive: Callable[[], None]) -> None:
        raise NotImplementedError

    def _run(self, number: int, steps: Any, request: int, result: Any) -> None:
        """Let a process go on with an answer; it asks something else, or ends."""
        try:
            ask = steps.send(result)
        except StopIteration:
            self.processes.pop(number, None)
            return
        request += 1
        self.processes[number] = (steps, request)

        def answered(value: Any) -> None:
            self.send("answer", lambda: self._arrived(number, request, value))

        self.send("request", lambda: ask(answered))
        if self.random.random() < 0.1:
            self.send("repeated", lambda: ask(lambda value: None))

    def _arrived(self, number: int, request: int, value: Any) -> None:
        steps, current = self.processes.get(number, (None, 0))
        if steps is not None and current == request:
            self._run(number, steps, request, value)


class World(Processes):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.path: list[tuple[Any, ...]] = []
        self.now = 1000
        self.ids = 100
        self.log: list[tuple[str, bytes | None]] = []
        self.leaders = {tp: Leader() for tp in PARTITIONS}
        self.soup: list[tuple[str, Callable[[], None]]] = []
        self.coordinator = Coordinator(self, 0)
        self.told: dict[Label, str] = {}
        self.begun: dict[Label, set[TopicPartition]] = {}
        self.given: dict[tuple[str, int, int], int] = {}  # who has which id and epoch
        self.processes: dict[int, tuple[Generator[Any, Any, None], int]] = {}
        self.born = 0
        self.faults = self.random.choice([0.0, 0.005, 0.02, 0.08])

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def send(self, what: str, arrive: Callable[[], None]) -> None:
        self.soup.append((what, arrive))

    # -- producers ---------------------------------------------------------------------------------

    def start_producer(self) -> None:
        number = self.born
        self.born += 1
        name = self.random.choice(["a", "b"])
        self.path.append(("producer", number, name))
        producer = Producer(self, number, name, version=self.random.choice([0, 2]))
        self._run(number, producer.run(), 0, None)

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        """The next one that the seed chooses."""
        roll = self.random.random()
        if roll < self.faults:
            self._fault()
        elif roll < 0.60:
            self.deliver()
        elif roll < 0.74:
            self.coordinator.append()
        elif roll < 0.86:
            self.coordinator.tell()
        elif roll < 0.95:
            self.coordinator.send_markers()
        elif roll < 0.97:
            self.pass_time(self.random.choice([1, 10]))
        elif roll < 0.98 and len(self.processes) < 3 and self.born < 10:
            self.start_producer()
        else:
            self.coordinator.restart_tasks()

    def _fault(self) -> None:
        roll = self.random.random()
        number = self.random.choice(sorted(self.processes)) if self.processes else None
        if roll < 0.3 and self.soup:
            what, _ = self.soup.pop(self.random.randrange(len(self.soup)))
            self.path.append(("lost", what))
        elif roll < 0.6 and number is not None:
            steps, request = self.processes[number]
            self.path.append(("times out", number))
            self._run(number, steps, request, None)
        elif roll < 0.65 and number is not None:
            self.path.append(("killed", number))
            del self.processes[number]
        elif roll < 0.75:
            self.fail_over()
        elif roll < 0.85:
            self.path.append(("fails",))
            self.coordinator.tell(failed=True)
        elif roll < 0.9:
            self.pass_time(TIMEOUT_MS // 2)

    def deliver(self) -> None:
        if self.soup:
            what, arrive = self.soup.pop(self.random.randrange(len(self.soup)))
            self.path.append((what,))
            arrive()

    def fail_over(self) -> None:
        self.path.append(("fail over",))
        self.coordinator = Coordinator(self, self.coordinator.epoch + 1)

    def pass_time(self, ms: int) -> None:
        self.now += ms
        machine = self.coordinator.machine
        writes = machine.timed_out(self.now)
        if self.random.random() < 0.05:
            writes += machine.expired(self.now, 20 * TIMEOUT_MS)
        self.coordinator.queue += [(write, lambda reply: None) for write in writes]

    def settle(self) -> None:
        """No more faults, no more producers: everything that was begun ends."""
        self.processes.clear()
        for _ in range(20_000):
            self.deliver()
            self.coordinator.append()
            self.coordinator.tell()
            self.coordinator.send_markers()
            self.coordinator.restart_tasks()
            self.pass_time(TIMEOUT_MS)
            entries = self.coordinator.machine.entries.values()
            at_rest = all(
                e.pending is None and e.record is not None and e.record.state in AT_REST
                for e in entries
            )
            if at_rest and not (self.soup or self.coordinator.queue or self.coordinator.tasks):
                return
        raise Broken("transactions do not come to an end")

    def check(self) -> None:
        for label, partitions in self.begun.items():
            found = {self.leaders[tp].outcome.get(label) for tp in partitions} - {None}
            if len(found) > 1 or "open" in found:
                raise Broken(f"transaction {label} ended as {found}")
            told = self.told.get(label)
            if told is not None and found - {told}:
                raise Broken(f"transaction {label} was told {told}, and ended as {found}")
            if told == "commit":
                missing = [tp for tp in partitions if label not in self.leaders[tp].outcome]
                if missing:
                    raise Broken(f"transaction {label} has lost its records in {missing}")


AT_REST = (State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT)


class Producer:
    """A producer as its clients are: adds, writes, ends; stops when it is fenced."""

    def __init__(self, world: World, number: int, name: str, version: int) -> None:
        self.world = world
        self.number = number
        self.name = name
        self.version = version
        self.pid, self.epoch = -1, -1
        self.sequences: dict[TopicPartition, int] = {}

    def run(self) -> Generator[Any, Any, None]:
        if not (yield from self._init(None)):
            return
        for turn in range(4):
            label = (self.number, turn)
            self.world.begun[label] = set()
            good = yield from self._write(label)
            if good is None:
                return  # fenced
            commit = good and self.world.random.random() < 0.7
            ended = yield from self._end(commit)
            if ended != E.NONE:
                return
            self.world.told[label] = "commit" if commit else "abort"
            # What was not answered may still come: an epoch of its own keeps it out.
            if not good and self.version == 0:
                if not (yield from self._init((self.pid, self.epoch))):
                    return

    def _ask(self, ask: Callable[[Answer], None], tries: int = 30) -> Generator[Any, Any, Any]:
        """Ask until there is an answer that says something; None: there was none."""
        for _ in range(tries):
            reply = yield ask
            if reply is not None and reply.code not in RETRIED:
                return reply
        return None

    def _init(self, expected: tuple[int, int] | None) -> Generator[Any, Any, bool]:
        world = self.world

        def ask(answer: Answer) -> None:
            c = world.coordinator
            c.decide(
                lambda new: c.machine.init(self.name, TIMEOUT_MS, expected, world.now, new), answer
            )

        reply = yield from self._ask(ask)
        if reply is None or reply.code != E.NONE:
            return False
        self._take(reply.producer_id, reply.epoch)
        return True

    def _take(self, pid: int, epoch: int) -> None:
        if (pid, epoch) != (self.pid, self.epoch):
            self.sequences = {}
        self.pid, self.epoch = pid, epoch
        owner = self.world.given.setdefault((self.name, pid, epoch), self.number)
        if owner != self.number:
            raise Broken(f"producers {owner} and {self.number} have id {pid}, epoch {epoch}")

    def _write(self, label: Label) -> Generator[Any, Any, bool | None]:
        """True: all was written; False: to be aborted; None: fenced."""
        world = self.world
        for tp in world.random.sample(PARTITIONS, world.random.randint(1, 3)):
            world.begun[label].add(tp)
            if self.version == 0:
                reply = yield from self._ask(self._adding(tp))
                if reply is None or reply.code != E.NONE:
                    return None if reply is not None else False
            for _ in range(world.random.randint(1, 2)):
                sequence = self.sequences.get(tp, 0)
                reply = yield from self._ask(self._producing(tp, sequence, label), tries=4)
                if reply is None:
                    return False
                if reply.code in (E.INVALID_PRODUCER_EPOCH, E.PRODUCER_FENCED):
                    return None
                if reply.code != E.NONE:
                    return False
                self.sequences[tp] = sequence + 1
        return True

    def _adding(self, tp: TopicPartition) -> Callable[[Answer], None]:
        world, pid, epoch = self.world, self.pid, self.epoch

        def ask(answer: Answer) -> None:
            c = world.coordinator
            c.decide(
                lambda _: c.machine.add(self.name, pid, epoch, [tp], self.version, world.now),
                answer,
            )

        return ask

    def _producing(
        self, tp: TopicPartition, sequence: int, label: Label
    ) -> Callable[[Answer], None]:
        world, pid, epoch = self.world, self.pid, self.epoch
        leader = world.leaders[tp]

        def ask(answer: Answer) -> None:
            code = leader.append(pid, epoch, sequence, label)
            if code is not None:
                answer(Reply(code))
                return
            guard = leader.guards.get(pid, 0)

            def verified(reply: Reply) -> None:
                if reply.code != E.NONE or leader.guards.get(pid, 0) != guard:
                    answer(Reply(reply.code or E.CONCURRENT_TRANSACTIONS))
                    return
                leader.admitted[pid] = epoch
                found = leader.append(pid, epoch, sequence, label)
                answer(Reply(E.INVALID_TXN_STATE if found is None else found))

            def verify() -> None:
                c = world.coordinator
                if self.version == 0:
                    (found,) = c.machine.verify(self.name, pid, epoch, [tp]).values()
                    world.send("verified", lambda: verified(Reply(found)))
                else:
                    c.decide(
                        lambda _: c.machine.add(self.name, pid, epoch, [tp], 2, world.now),
                        lambda reply: world.send("verified", lambda: verified(reply)),
                    )

            world.send("verify", verify)

        return ask

    def _end(self, commit: bool) -> Generator[Any, Any, int | None]:
        world, pid, epoch = self.world, self.pid, self.epoch

        def ask(answer: Answer) -> None:
            c = world.coordinator
            c.decide(
                lambda new: c.machine.end(
                    self.name, pid, epoch, commit, self.version, world.now, new
                ),
                answer,
            )

        reply = yield from self._ask(ask)
        if reply is None:
            return None
        if reply.code == E.NONE and self.version:
            self._take(reply.producer_id, reply.epoch)
        return int(reply.code)


def play(seed: int, steps: int) -> World:
    """One schedule.  Broken, with the world in `world`."""
    world = World(seed)
    try:
        for _ in range(steps):
            world.step()
        world.settle()
        world.check()
    except Broken as e:
        e.world = world  # type: ignore[attr-defined]
        raise
    return world


def records(world: World) -> list[tuple[str, TransactionRecord | None]]:
    """What the coordinators have written."""
    return [
        (name, None if value is None else parse_transaction_value(value))
        for name, value in world.log
    ]
