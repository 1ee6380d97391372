"""A world in which jobs write batches exactly once: drivers, attempts of tasks, coordinators,
leaders of partitions and a network, one step at a time, by a seed.

The coordinator's decisions are `kdirect.broker.attempts` itself, over `kdirect.broker.transactions`
itself; the order of markers is that of `kdirect.broker.marker_groups`.  The coordinator's log, the
leaders' logs and the network are models.  A message may be delayed, lost, or come twice.  The
coordinator may end between any two record batches of its log, an append may fail with its records
in the log or not, and attempts and drivers that are given up go on writing.

What a batch consists of is told by its query and number, whoever writes it: `World.content`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from kdirect.broker.attempts import (
    AttemptDecision,
    AttemptReply,
    Attempts,
    Job,
    Named,
    WriteMany,
)
from kdirect.broker.marker_groups import place_in_group
from kdirect.broker.transactions import Markers, NeedsId, Reply, Transactions, Write
from kdirect.format.attempt_records import attempt_id
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.transaction_records import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    State,
    TransactionRecord,
    parse_transaction_value,
    transaction_value,
)
from kdirect.model import TopicPartition
from tests.broker.transaction_world import Processes

PARTITIONS = [TopicPartition("t", i) for i in range(2)]
STATE_PARTITIONS = 3
IDENTITY = "job"
BATCHES = 3  # of each query
TASKS = 2
TIMEOUT_MS = 3000
RETRIED = (E.CONCURRENT_TRANSACTIONS, E.NOT_COORDINATOR, E.COORDINATOR_NOT_AVAILABLE)
Answer = Callable[[Any], None]


class Row(NamedTuple):
    """A record: the row of a batch that it is, and the number of the attempt that wrote it."""

    query: str
    batch: int
    task: int
    partition: int
    number: int
    attempt: int


class Broken(AssertionError):
    """An invariant does not hold."""


class Leader:
    """The log of one partition, as far as transactions go."""

    def __init__(self, world: World, tp: TopicPartition) -> None:
        self.world = world
        self.tp = tp
        self.end = 0
        self.epochs: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.coordinators: dict[int, int] = {}
        self.open: dict[int, list[tuple[int, Row]]] = {}
        self.admitted: dict[int, int] = {}
        self.guards: dict[int, int] = {}  # markers so far, by producer id
        self.committed: list[tuple[int, Row]] = []
        self.seen: list[Row] = []  # by readers of committed records
        self.ended: set[int] = set()  # attempts

    def append(self, pid: int, epoch: int, sequence: int, row: Row) -> int | None:
        """A code; None: the coordinator is to be asked first."""
        if epoch < self.epochs.get(pid, -1):
            return E.INVALID_PRODUCER_EPOCH
        next_one = self.sequences.get(pid, 0) if self.epochs.get(pid) == epoch else 0
        if sequence < next_one:
            return E.NONE  # a duplicate
        if self.admitted.get(pid) != epoch and not (
            self.open.get(pid) and self.epochs.get(pid) == epoch
        ):
            return None
        if sequence > next_one:
            return E.OUT_OF_ORDER_SEQUENCE_NUMBER
        if row.attempt in self.ended:
            raise Broken(f"{row} came after the end of its attempt")
        self.epochs[pid], self.sequences[pid] = epoch, sequence + 1
        self.open.setdefault(pid, []).append((self.end, row))
        self.end += 1
        return E.NONE

    def markers(self, group: Sequence[Markers], coordinator: int) -> dict[Markers, int]:
        """Those of a group, in its order; what comes after one that is refused is not tried."""
        first = {pid: rows[0][0] for pid, rows in self.open.items() if rows}
        codes: dict[Markers, int] = dict.fromkeys(group, int(E.NOT_LEADER_OR_FOLLOWER))
        for markers in sorted(group, key=lambda m: self.world.place(m, first)):
            codes[markers] = self._marker(markers, coordinator)
            if codes[markers] != E.NONE:
                break
        return codes

    def _marker(self, m: Markers, coordinator: int) -> int:
        if coordinator < self.coordinators.get(m.producer_id, -1):
            return E.TRANSACTION_COORDINATOR_FENCED
        if m.epoch < self.epochs.get(m.producer_id, -1):
            return E.INVALID_PRODUCER_EPOCH
        self.coordinators[m.producer_id] = coordinator
        if m.epoch > self.epochs.get(m.producer_id, -1):
            self.epochs[m.producer_id], self.sequences[m.producer_id] = m.epoch, 0
        rows = self.open.pop(m.producer_id, [])
        self.ended.update(row.attempt for _, row in rows)
        if m.commit:
            self.committed += rows
        self.admitted.pop(m.producer_id, None)
        self.guards[m.producer_id] = self.guards.get(m.producer_id, 0) + 1
        self.end += 1
        self.look()
        return E.NONE

    def look(self) -> None:
        """A reader of committed records comes by."""
        stable = min([rows[0][0] for rows in self.open.values() if rows], default=self.end)
        before, self.seen = self.seen, [row for offset, row in self.committed if offset < stable]
        if not set(before) <= set(self.seen):
            raise Broken(f"{self.tp}: readers have seen rows that are not there any more")
        keys = [row[:-1] for row in self.seen]
        if len(set(keys)) < len(keys):
            raise Broken(f"{self.tp}: a row is there twice")
        for query, batch in {(row.query, row.batch) for row in self.seen}:
            found = {row[:-1] for row in self.seen if (row.query, row.batch) == (query, batch)}
            if found != self.world.content(query, batch, self.tp.partition):
                raise Broken(f"{self.tp}: batch {batch} of {query} is seen in part")


class Change:
    """Records that are about to be appended as one batch; `settled(ok)` once that is known.
    `decided`: it is appended again after a failure."""

    def __init__(
        self, rows: Sequence[tuple[str, bytes | None]], settled: Callable[[bool], None],
        decided: bool = False,
    ) -> None:  # fmt: skip
        self.rows = rows
        self.settled = settled
        self.decided = decided
        self.left = len(rows)  # to be appended


class Group:
    """Markers of one identity that are being written.  `pause`: how many turns they wait for the
    next try, as after tries that have failed, while groups that come later do not."""

    def __init__(self, world: World, markers: Sequence[Markers], told: Callable[[], None]) -> None:
        self.markers = list(markers)
        self.left = {(m, tp) for m in markers for tp in m.partitions}
        self.told = told
        self.pause = world.random.randint(0, world.longest_pause)


class Coordinator:
    """One tenure of a coordinator.  `queue`: changes that are under way, in order."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        transactions = Transactions()
        self.machine: Attempts = world.machine(
            transactions, lambda name, slot: attempt_id(name, slot, STATE_PARTITIONS)
        )
        self.queue: list[Change] = []
        self.groups: list[Group] = []
        prepared = []
        for name, value in dict(world.log).items():
            if value is not None:
                found = self.machine.install(name, parse_transaction_value(value))
                prepared += [found] if found is not None else []
        for group in world.restored(prepared):
            self.groups.append(Group(world, group, lambda: None))

    def ask(
        self, decide: Callable[[int | None], AttemptDecision], answer: Callable[[Any], None]
    ) -> None:
        made = decide(None)
        if isinstance(made, NeedsId):
            made = decide(self.world.new_id())
        if isinstance(made, AttemptReply):
            answer(made)
            return
        assert isinstance(made, WriteMany)
        many = made

        def settled(ok: bool) -> None:
            if not ok:
                self.machine.failed(many)
                answer(AttemptReply(E.COORDINATOR_NOT_AVAILABLE))
                return
            group = self.machine.written(many)
            waits = many.waits and group and not self.world.answers_early
            if group:
                told = lambda: answer(many.reply) if waits else None  # noqa: E731
                self.groups.append(Group(self.world, group, told))
            if not waits:
                answer(many.reply)

        rows = [(w.transactional_id, _value(w.record)) for w in many.writes]
        if many.record is not None:
            record = TransactionRecord(
                NO_PRODUCER_ID, NO_EPOCH, 0, State.EMPTY, identity=many.record
            )
            rows.append((many.identity, transaction_value(record)))
        self.queue.append(Change(rows, settled, decided=many.is_decision))

    def add(self, named: Named, tp: TopicPartition, answer: Callable[[Any], None]) -> None:
        made = self.machine.transactions.add(*named, [tp], 2, self.world.now)
        if isinstance(made, Reply):
            answer(made)
        else:
            self._change(made, answer)

    def _change(self, write: Write, answer: Callable[[Any], None]) -> None:
        """Of one transaction alone."""

        def settled(ok: bool) -> None:
            if not ok:
                self.machine.transactions.failed(write)
                answer(Reply(E.NOT_COORDINATOR))
                return
            markers = self.machine.transactions.written(write)
            if markers is not None:
                self.groups.append(Group(self.world, [markers], lambda: None))
            answer(write.reply)

        self.queue.append(Change([(write.transactional_id, _value(write.record))], settled))

    def append(self) -> None:
        """The next batch gets into the log."""
        for change in self.queue:
            if change.left:
                count = 1 if self.world.splits else change.left
                begin = len(change.rows) - change.left
                self.world.log += change.rows[begin : begin + count]
                change.left -= count
                return

    def tell(self, failed: bool = False) -> None:
        """The first change counts, or its time is over, in the log or not."""
        if not self.queue or (not failed and self.queue[0].left):
            return
        change = self.queue.pop(0)
        if failed and change.decided and not self.world.gives_up:
            change.left = len(change.rows)
            self.queue.append(change)
        else:
            change.settled(not failed)

    def send_markers(self) -> None:
        group = self.world.random.choice(self.groups) if self.groups else None
        if group is None:
            return
        if group.pause:
            group.pause -= 1
            return
        if not group.left:
            self._complete(group)
            return
        tp = self.world.random.choice(sorted({tp for _, tp in group.left}))
        wanted = [m for m in group.markers if (m, tp) in group.left]
        leader = self.world.leaders[tp]

        def told(codes: dict[Markers, int]) -> None:
            for markers, code in codes.items():
                if code == E.NONE:
                    group.left.discard((markers, tp))
                elif (
                    code != E.NOT_LEADER_OR_FOLLOWER
                    and self.world.coordinator is self
                    and (markers, tp) in group.left  # else it came twice
                ):
                    raise Broken(f"{markers} of the coordinator is refused with {E(code).name}")

        def arrive() -> None:
            codes = leader.markers(wanted, self.epoch)
            self.world.send("marked", lambda: told(codes))

        self.world.send("markers", arrive)

    def _complete(self, group: Group) -> None:
        self.groups.remove(group)
        writes = self.machine.complete(group.markers, self.world.now)

        def settled(ok: bool) -> None:
            for write in writes:
                if ok:
                    self.machine.transactions.written(write)
                else:
                    self.machine.transactions.failed(write)
            if ok:
                group.told()
            else:
                self.groups.append(group)

        if writes:
            self.queue.append(
                Change([(w.transactional_id, _value(w.record)) for w in writes], settled)
            )
        else:
            group.told()


def _value(record: TransactionRecord | None) -> bytes | None:
    return None if record is None else transaction_value(record)


class World(Processes):
    """See the module."""

    # What a mistaken coordinator would do otherwise (`tests.broker.attempt_mistakes`).
    machine: type[Attempts] = Attempts
    place = staticmethod(place_in_group)
    splits = False  # a change is several record batches
    gives_up = False  # a change that has failed is not tried again
    answers_early = False  # before the markers are there

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.longest_pause = self.random.choice([0, 0, 60])  # see Group
        self.path: list[tuple[Any, ...]] = []
        self.now = 1000
        self.ids = 100
        self.log: list[tuple[str, bytes | None]] = []
        self.leaders = {tp: Leader(self, tp) for tp in PARTITIONS}
        self.soup: list[tuple[str, Callable[[], None]]] = []
        self.coordinator = Coordinator(self, 0)
        self.processes: dict[int, tuple[Generator[Any, Any, None], int]] = {}
        self.born = 0
        self.attempts = 0
        self.checkpoints = {"q1": 0, "q2": 0}  # the next batch
        self.present: str | None = None  # the newest run that was told that it may write
        self.former: set[str] = set()
        self.faults = self.random.choice([0.0, 0.005, 0.02, 0.08])

    def restored(self, prepared: Sequence[Markers]) -> list[list[Markers]]:
        """The groups in which a new coordinator ends what is prepared."""
        return [list(prepared)] if prepared else []

    def content(self, query: str, batch: int, partition: int) -> set[tuple[Any, ...]]:
        """The rows of a batch in a partition."""
        rng = random.Random(f"{query} {batch} {partition}")
        return {
            (query, batch, task, partition, number)
            for task in range(TASKS)
            for number in range(rng.randint(0, 2))
        }

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def send(self, what: str, arrive: Callable[[], None]) -> None:
        self.soup.append((what, arrive))

    # -- processes ---------------------------------------------------------------------------------

    def start(self, steps: Generator[Any, Any, None], *what: Any) -> int:
        number = self.born
        self.born += 1
        self.path.append((*what, number))
        self._run(number, steps, 0, None)
        return number

    def start_driver(self) -> None:
        query = self.random.choice(["q1", "q1", "q2"])
        driver = Driver(self, query, f"run-{self.born}")
        self.start(driver.run(), "driver", query)

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
        elif roll < 0.98:
            self.pass_time(self.random.choice([1, 10]))
        elif roll < 0.99:
            if len(self.processes) < 12 and self.born < 60:
                self.start_driver()
        else:
            self.leaders[self.random.choice(PARTITIONS)].look()

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
        elif roll < 0.68 and number is not None:
            self.path.append(("killed", number))
            del self.processes[number]
        elif roll < 0.78:
            self.fail_over()
        elif roll < 0.88:
            self.path.append(("fails",))
            self.coordinator.tell(failed=True)
        elif roll < 0.92:
            self.path.append(("fails, late, fails over",))
            self.coordinator.tell(failed=True)
            self.pass_time(TIMEOUT_MS)
            for _ in range(self.random.randint(0, 3)):
                self.coordinator.append()
            self.fail_over()
        elif roll < 0.95:
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
        for write in self.coordinator.machine.transactions.timed_out(self.now):
            self.coordinator._change(write, lambda reply: None)

    def settle(self) -> None:
        """No more faults: each query is written to its end by a last run, one after the other."""
        self.faults = 0.0
        self.processes.clear()
        for query in ("q1", "q2"):
            driver = Driver(self, query, f"last-{query}", alone=True)
            number = self.start(driver.run(), "last driver", query)
            for _ in range(20_000):
                if number not in self.processes:
                    break
                self._turn()
            else:
                raise Broken(f"the last run of {query} does not come to an end")
        for _ in range(2000):
            self._turn()
            self.pass_time(TIMEOUT_MS // 20)
        if any(leader.open for leader in self.leaders.values()):
            raise Broken("a transaction stays open")

    def _turn(self) -> None:
        self.deliver()
        self.coordinator.append()
        self.coordinator.tell()
        self.coordinator.send_markers()

    # -- what has to be so -------------------------------------------------------------------------

    def told_to_write(self, job: Job) -> None:
        """A run was told that it may write."""
        if job.run in self.former:
            raise Broken(f"{job.run} may write again, after {self.present}")
        if self.present is not None and self.present != job.run:
            self.former.add(self.present)
        self.present = job.run
        for name, record in self.coordinator.machine.attempts(job.identity):
            assert record.attempt is not None
            # One that has joined without hearing of it writes nothing.
            if record.state is State.ONGOING and record.attempt.run in self.former:
                raise Broken(f"{name} of {record.attempt.run} is open beside {job.run}")

    def told_committed(self, job: Job, batch: int) -> None:
        """A run was told that a batch is committed, now or before."""
        for leader in self.leaders.values():
            leader.look()
            missing = self.content(job.query, batch, leader.tp.partition) - {
                row[:-1] for row in leader.seen
            }
            if missing:
                raise Broken(f"batch {batch} of {job.query} was told committed without {missing}")

    def check(self) -> None:
        for leader in self.leaders.values():
            leader.look()
            seen = {row[:-1] for row in leader.seen}
            for query in self.checkpoints:
                for batch in range(BATCHES):
                    missing = self.content(query, batch, leader.tp.partition) - seen
                    if missing:
                        raise Broken(f"{leader.tp}: batch {batch} of {query} has lost {missing}")


def _ask(ask: Callable[[Answer], None], tries: int = 60) -> Generator[Any, Any, Any]:
    """Ask until there is an answer that says something; None: there was none."""
    for _ in range(tries):
        reply = yield ask
        if reply is not None and reply.code not in RETRIED:
            return reply
    return None


class Driver:
    """A driver of a query: plans a batch, has tasks write it, commits it.  `alone`: nobody disturbs
    it, so it comes to the end."""

    def __init__(self, world: World, query: str, run: str, alone: bool = False) -> None:
        self.world = world
        self.job = Job(IDENTITY, query, run)
        self.alone = alone
        self.reports: dict[tuple[int, int], Named | None] = {}  # by batch and task
        self.fenced = False

    def run(self) -> Generator[Any, Any, None]:
        world, query = self.world, self.job.query
        batch = world.checkpoints[query]
        while batch < BATCHES and not self.fenced:
            if not (yield from self._write(batch)):
                return
            named = [self.reports[batch, task] for task in range(TASKS)]
            for task in range(TASKS):
                del self.reports[batch, task]
            if world.random.random() < 0.1:
                if (yield from _ask(self._aborting())) is None and not self.alone:
                    return
                continue
            reply = yield from _ask(self._committing(batch, [n for n in named if n is not None]))
            if reply is None and not self.alone:
                return
            if reply is not None and reply.code == E.NONE:
                batch += 1
                world.checkpoints[query] = max(batch, world.checkpoints[query])
            elif reply is not None and reply.code != E.INVALID_TXN_STATE:
                return

    def _write(self, batch: int) -> Generator[Any, Any, bool]:
        """Until each task has an attempt that is done; some have more of them."""
        world = self.world
        while not self.fenced:
            missing = [t for t in range(TASKS) if (batch, t) not in self.reports]
            if not missing:
                return True
            for task in missing:
                for _ in range(world.random.choice([1, 1, 2])):
                    attempt = Attempt(self, batch, task)
                    world.start(attempt.run(), "attempt", self.job.query, batch, task)
            for _ in range(world.random.randint(5, 60)):
                yield lambda answer: answer(None)
                if self.fenced or all((batch, t) in self.reports for t in range(TASKS)):
                    break
        return False

    def _committing(self, batch: int, named: list[Named]) -> Callable[[Answer], None]:
        world, job = self.world, self.job

        def ask(answer: Answer) -> None:
            def told(reply: AttemptReply) -> None:
                if reply.code == E.NONE:
                    world.told_to_write(job)
                    world.told_committed(job, batch)
                answer(reply)

            c = world.coordinator
            c.ask(lambda _: c.machine.commit(job, batch, named, world.now), told)

        return ask

    def _aborting(self) -> Callable[[Answer], None]:
        world, job = self.world, self.job

        def ask(answer: Answer) -> None:
            c = world.coordinator
            c.ask(lambda _: c.machine.abort(job, world.now), answer)

        return ask


class Attempt:
    """An attempt of a task."""

    def __init__(self, driver: Driver, batch: int, task: int) -> None:
        self.driver = driver
        self.batch, self.task = batch, task
        self.number = driver.world.new_id()

    def run(self) -> Generator[Any, Any, None]:
        world, driver = self.driver.world, self.driver
        reply = yield from _ask(self._joining())
        if reply is None or reply.code != E.NONE:
            driver.fenced |= reply is not None and reply.code == E.PRODUCER_FENCED
            return
        if reply.attempt is not None:
            for tp in world.random.sample(PARTITIONS, len(PARTITIONS)):
                rows = sorted(world.content(driver.job.query, self.batch, tp.partition))
                mine = [Row(*row, self.number) for row in rows if row[2] == self.task]
                for sequence, row in enumerate(mine):
                    told = yield from _ask(self._producing(reply.attempt, tp, sequence, row), 6)
                    if told is None or told.code != E.NONE:
                        return
        driver.reports.setdefault((self.batch, self.task), reply.attempt)

    def _joining(self) -> Callable[[Answer], None]:
        world, job = self.driver.world, self.driver.job

        def ask(answer: Answer) -> None:
            def told(reply: AttemptReply) -> None:
                if reply.code == E.NONE:
                    world.told_to_write(job)
                    if reply.committed:
                        world.told_committed(job, self.batch)
                answer(reply)

            c = world.coordinator
            c.ask(
                lambda new: c.machine.join(job, self.batch, TIMEOUT_MS, "me", world.now, new),
                told,
            )

        return ask

    def _producing(
        self, named: Named, tp: TopicPartition, sequence: int, row: Row
    ) -> Callable[[Answer], None]:
        world, leader = self.driver.world, self.driver.world.leaders[tp]
        _, pid, epoch = named

        def ask(answer: Answer) -> None:
            code = leader.append(pid, epoch, sequence, row)
            if code is not None:
                answer(Reply(code))
                return
            guard = leader.guards.get(pid, 0)

            def verified(reply: Reply) -> None:
                if reply.code != E.NONE or leader.guards.get(pid, 0) != guard:
                    answer(Reply(reply.code or E.CONCURRENT_TRANSACTIONS))
                    return
                leader.admitted[pid] = epoch
                found = leader.append(pid, epoch, sequence, row)
                answer(Reply(E.INVALID_TXN_STATE if found is None else found))

            def verify() -> None:
                told = lambda reply: world.send("verified", lambda: verified(reply))  # noqa: E731
                world.coordinator.add(named, tp, told)

            world.send("verify", verify)

        return ask


def play(seed: int, steps: int, kind: type[World] = World) -> World:
    """One schedule.  Broken, with the world in `world`."""
    world = kind(seed)
    try:
        for _ in range(steps):
            world.step()
        world.settle()
        world.check()
    except Broken as e:
        e.world = world  # type: ignore[attr-defined]
        raise
    return world
