"""Members of a group that commit by WRITEs, their coordinator and what it keeps, over simulated
RNICs: the client's `DirectCommits`, the broker's `CommitSlots`, produce worker, table and log as
they are.  Who is a member, and in which generation, is a model's: two numbers.

What is checked, at every look at the table and at the end, is one history for each partition:

- A commit that was answered with success is there until a later one is: no look shows what had
  ended before it began.
- What was refused never counts.  What nobody knows the answer to may count, but not from a
  moment on at which its generation is over, its member is fenced or its coordinator has died: a
  look right then shows whether it did.
- The table says what the log says, whose last record of a key counts.  So a restart loses nothing.
"""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors import Actor
from connections import Control
from harness import Simulation

from kdirect.broker.commit_slots import CommitSlots
from kdirect.broker.offsets import GroupTable, OffsetStore
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.client.direct_commits import DirectCommit, DirectCommits
from kdirect.errors import BrokerUnavailableError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.codec import decode_records
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.group_records import CommittedOffset
from kdirect.model import TopicPartition
from kdirect.rdma.sim import Faults
from kdirect.wire.channel import Channel
from tests.log.compacted_logs import compact

GROUP = "g"
LOG = TopicPartition(OFFSETS_TOPIC, 0)
PARTITIONS = [TopicPartition("t", i) for i in range(4)]
NEVER = 1 << 62


@dataclass(eq=False)
class Attempt:
    """One commit of one partition.  `end`: from when on it cannot begin to count any more.  Times
    are those of `History.now`."""

    offset: int
    member: str
    generation: int
    begin: int
    end: int = NEVER
    acknowledged: bool = False
    refused: bool = False


class History:
    """What may be read of each partition."""

    def __init__(self) -> None:
        self.attempts: dict[TopicPartition, dict[int, Attempt]] = {tp: {} for tp in PARTITIONS}
        self._last: dict[TopicPartition, tuple[int, int]] = {}  # the last look: offset, when
        self.looks = self.acknowledged = self.direct = self.unknown = self.refused = 0
        self.cleaned = 0  # records that compaction has removed
        self._now = 0

    def now(self) -> int:
        """The order in which things are seen to happen: no two at one time."""
        self._now += 1
        return self._now

    def answered(self, attempts: dict[TopicPartition, Attempt], code: int) -> None:
        """A commit of some partitions has its answer."""
        now = self.now()
        for attempt in attempts.values():
            attempt.end = min(attempt.end, now)
            attempt.acknowledged, attempt.refused = code == E.NONE, code != E.NONE
        self.acknowledged += code == E.NONE
        self.refused += code != E.NONE

    def under_way(self, is_meant: Callable[[Attempt], bool]) -> list[Attempt]:
        """What has no answer yet of these."""
        return [
            attempt
            for attempts in self.attempts.values()
            for attempt in attempts.values()
            if attempt.end == NEVER and is_meant(attempt)
        ]

    def look(self, found: dict[TopicPartition, int]) -> None:
        """This is what the group has committed."""
        self.looks += 1
        now = self.now()
        for tp, attempts in self.attempts.items():
            offset = found.get(tp)
            done = [a for a in attempts.values() if a.acknowledged and a.end < now]
            if offset is None:
                assert not done, f"{tp}: {done[-1]} was lost"
                assert tp not in self._last, f"{tp}: {self._last[tp]} was seen, and is gone"
                continue
            shown = attempts.get(offset)
            assert shown is not None and shown.begin < now, f"{tp}: nobody wrote {offset}"
            assert not shown.refused, f"{tp}: {shown} was refused, and counts"
            for other in done:
                late = shown.end < other.begin
                assert not late, f"{tp}: {other} was acknowledged, and {shown} is there"
            seen, when = self._last.get(tp, (offset, 0))
            assert seen == offset or shown.end > when, (
                f"{tp}: {seen} was seen, and {shown}, over by then, has come after it"
            )
            self._last[tp] = offset, now


class Membership:
    """Who is a member: what a coordinator says (`kdirect.broker.commit_slots.Groups`)."""

    def __init__(self) -> None:
        self.generation = 1
        self.members: set[str] = set()

    def refusal(self, group: str) -> int:
        return E.NONE

    def may_commit(
        self, group: str, generation: int, member_id: str, instance_id: str | None
    ) -> int:
        if member_id not in self.members:
            return E.UNKNOWN_MEMBER_ID
        return E.NONE if generation == self.generation else E.ILLEGAL_GENERATION

    def still_commits(self, *member: Any) -> bool:
        return self.may_commit(*member) == E.NONE


class Topics:
    """The topics of one life of the broker, as far as offsets and slots ask."""

    def __init__(self, logs: Any) -> None:
        self._logs = logs

    def get(self, name: str) -> Any:
        return types.SimpleNamespace(name=name, partition_count=1, configs={}, deleting=False)

    def find(self, name: str) -> Any:
        found = self.get(name)
        found.partition_count = len(PARTITIONS)
        return found

    def configure(self, topic: Any, configs: Any) -> None:
        """Its properties change nothing here."""

    def partition(self, name: str, index: int) -> Any:
        return self._logs.partitions[TopicPartition(name, index)]


class CommitSimulation(Simulation):
    """A broker that coordinates one group; its event loop is asyncio's, which turns at each thing
    that happens on it."""

    def __init__(self, seed: int, directory: Path, faults: Faults) -> None:
        self.loop = asyncio.new_event_loop()
        self.group = Membership()
        self.history = History()
        self._over: list[Attempt] = []
        super().__init__(seed, directory, faults, segment_bytes=1 << 12)

    def _open(self) -> None:
        super()._open()
        if LOG not in self.logs.partitions:
            self.logs.create_partition(LOG)
        topics: Any = Topics(self.logs)
        config = {"offsets.topic.num.partitions": 1, "offsets.topic.segment.bytes": 1 << 14}
        admin: Any = None  # there is the topic
        self.store = OffsetStore(topics, config, self.access.appends, admin)
        assert self.store.open() == 1
        self.store.load_partition(0)
        services: Any = types.SimpleNamespace(
            offsets=self.store,
            config={"rdma.commit": True},
            topics=topics,
            replicas=None,
            environment=self.environment,
        )
        self.slots = CommitSlots(services, self.group, self.access)
        self._over = self.history.under_way(lambda attempt: True)
        self.look()

    def execute(self, call: Callable[[], Any]) -> Any:
        async def turn() -> Any:
            result = call()
            for _ in range(4):
                await asyncio.sleep(0)
            return result

        return super().execute(lambda: self.loop.run_until_complete(turn()))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.loop.close()

    # -- looks -------------------------------------------------------------------------------------

    def look(self) -> None:
        """On the event loop: what the table says is allowed, and what the log says."""
        found = {tp: c.offset for tp, c in self.store.offsets(GROUP).items()}
        # Else the loop has judged commits whose append a thread makes, or that it remembers later.
        if self.access.appends.is_free(LOG):
            for attempt in self._over:
                attempt.end = min(attempt.end, self.history.now())
            self._over.clear()
            partition = self.logs.partitions[LOG]
            table = GroupTable()
            offset = partition.log_start_offset
            while offset < partition.log_end_offset:
                data = b"".join(bytes(x) for x in partition.read(offset, 1 << 20))
                rows, _, offset = decode_records(data, LOG.topic, 0, offset)
                for row in rows:
                    table.apply(row.key, row.value)
            logged = {tp: c.offset for tp, c in table.offsets.get(GROUP, {}).items()}
            late = {tp: c.offset for tp, c in self.store.offsets(GROUP).items()}
            assert found == logged == late, "the table is not what the log says"
        self.history.look(found)

    def change_group(self, change: Callable[[], None], is_over: Callable[[Attempt], bool]) -> None:
        """Something happens to the group, and its slots are looked after before anybody knows."""

        def happen() -> None:
            change()
            self.slots.look(GROUP)
            self._over += self.history.under_way(is_over)
            self.look()

        self.execute(happen)

    def rebalance(self) -> None:
        def change() -> None:
            self.group.generation += 1

        self.change_group(change, lambda attempt: True)

    def clean(self) -> None:
        """The log of offsets is compacted, as by the threads for that."""

        def happen() -> None:
            partition = self.logs.partitions[LOG]
            partition.roll()
            done = compact(partition)
            self.history.cleaned += done.records_read - done.records_kept

        self.execute(happen)

    def fence(self, member: str) -> None:
        self.change_group(
            lambda: self.group.members.discard(member), lambda attempt: attempt.member == member
        )


class SlotControl(Control):
    """A member's connection to the coordinator."""

    def supports(self, api_key: int) -> bool:
        return True

    def request(self, message: Any, timeout_ms: float | None = None) -> Any:
        if not isinstance(message, p.GetCommitSlotRequest):
            return super().request(message, timeout_ms)
        simulation: Any = self._simulation
        header = p.RequestHeader(message.API_KEY, 0, 1, None, 0, None)
        answer = self.call(lambda: simulation.slots.get_commit_slot(self, header, message))
        return p.GetCommitSlotResponse.decode(bytes(answer.buffers[0]), version=0)

    def call(self, on_loop: Callable[[], Any]) -> Any:
        """A request and its answer.  BrokerUnavailableError: nobody knows what became of it."""
        simulation = self._simulation
        simulation.give_way()
        if self.closed or self._access is not simulation.access:
            self.closed = True
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        result = simulation.execute(on_loop)
        simulation.give_way()
        if self._access is not simulation.access:
            self.closed = True
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        return result


class Member:
    """A consumer, as far as it commits: joins, commits by WRITEs or over TCP, several at a time,
    and is told of rebalances a while after they happen."""

    is_member = True
    group_id = GROUP
    instance_id = None

    def __init__(self, simulation: CommitSimulation, actor: Actor, number: int) -> None:
        self._simulation = simulation
        self._actor = actor
        self._number = number
        self._random = random.Random(simulation.random.getrandbits(32))
        self.partitions: list[TopicPartition] = []
        self.rebalances = 0
        self.generation = -1
        self.member_id = ""
        self.control: SlotControl | None = None
        self._names = 0
        self._offset = 0
        session: Any = simulation.session()
        session.channel_over = self._channel_over
        self.direct = DirectCommits(session, self, self)  # type: ignore[arg-type]
        self._under_way: list[tuple[DirectCommit, dict[TopicPartition, Attempt]]] = []

    def _channel_over(self, connection: Any, **sizes: int) -> Channel:
        environment = self._simulation.environment
        return Channel(connection, "sim", environment=environment, **sizes)

    def coordinator(self) -> SlotControl:
        if self.control is None or self.control.closed:
            self.control = SlotControl(self._simulation)
            self._actor.controls.append(self.control)
        return self.control

    def join(self) -> None:
        """Become a member, in the generation that there is now."""
        group = self._simulation.group
        if self.member_id not in group.members:
            self._names += 1
            self.member_id = f"{self._number}-{self._names}"
            group.members.add(self.member_id)
        self.generation = group.generation
        self.rebalances += 1
        count = self._random.randint(1, len(PARTITIONS))
        self.partitions = self._random.sample(PARTITIONS, count)

    def run(self, rounds: int) -> None:
        simulation = self._simulation
        for _ in range(rounds):
            group = simulation.group
            behind = self.generation != group.generation or self.member_id not in group.members
            if behind and self._random.random() < 0.5:
                self.join()
            if self.generation >= 0:
                self._commit()
            if self._random.random() < 0.02:
                self.direct.close()  # its channel ends, and the slot with it
            simulation.sleep(self._random.choice((1e-6, 2e-5, 3e-4)))
        self._settle(0)

    def _commit(self) -> None:
        tps = self._random.sample(self.partitions, self._random.randint(1, len(self.partitions)))
        offsets = {}
        for tp in tps:
            self._offset += 1
            offsets[tp] = self._offset * 16 + self._number  # of this member alone
        try:
            commit = self.direct.begin(offsets)
        except KdirectError:
            commit = None
        if commit is not None:  # it was posted just now
            self._under_way.append((commit, self._attempts(offsets)))
            self._settle(self._random.choice((0, 0, 2, 4)))
            return
        self._settle(0)  # what comes after must not overtake it
        self._commit_over_tcp(offsets)

    def _attempts(self, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, Attempt]:
        history = self._simulation.history
        now = history.now()
        made = {tp: Attempt(o, self.member_id, self.generation, now) for tp, o in offsets.items()}
        for tp, attempt in made.items():
            history.attempts[tp][attempt.offset] = attempt
        return made

    def _settle(self, most: int) -> None:
        """Take answers until so many are under way at most."""
        history = self._simulation.history
        while len(self._under_way) > most:
            commit, attempts = self._under_way.pop(0)
            code = commit._writer.wait(commit._number, 5.0)
            if code is None:
                history.unknown += 1
                commit._writer.end()
            else:
                history.answered(attempts, code)
                history.direct += code == E.NONE

    def _commit_over_tcp(self, offsets: dict[TopicPartition, int]) -> None:
        simulation, history = self._simulation, self._simulation.history
        attempts: dict[TopicPartition, Attempt] = {}
        told: list[int] = []

        def commit() -> None:
            attempts.update(self._attempts(offsets))
            code = simulation.group.may_commit(GROUP, self.generation, self.member_id, None)
            if code:
                told.append(code)
                return
            rows = {tp: CommittedOffset(offset, -1, "", 1) for tp, offset in offsets.items()}
            done = simulation.store.commit(GROUP, rows)
            done.add_done_callback(lambda f: told.append(E.NONE if not f.exception() else -1))

        try:
            self.coordinator().call(commit)
            access = simulation.access
            simulation.wait(lambda: bool(told) or simulation.access is not access, 50.0)
        except BrokerUnavailableError:
            told.clear()
        if told and told[0] >= 0:
            history.answered(attempts, told[0])
        else:
            history.unknown += 1


def run(seed: int, directory: Path, members: int = 3, rounds: int = 25) -> History:
    """One schedule; AssertionError names what was lost or came back."""
    chance = random.Random(seed)
    faults = Faults(
        delay_ns=(500, chance.choice((2_000, 20_000, 200_000))),
        disconnect=chance.choice((0.0, 0.0, 0.01)),
        rnr=chance.choice((0.0, 0.05)),
        tear=chance.choice((0.0, 0.3)),
    )
    with CommitSimulation(seed, directory, faults) as simulation:
        running = [
            simulation.spawn(f"member-{i}", _member(simulation, i, rounds)) for i in range(members)
        ]
        simulation.spawn("events", lambda actor: _events(simulation, running, chance))
        simulation.run_until(lambda: all(actor.done for actor in simulation.actors))
        for actor in simulation.actors:
            if actor.error is not None:
                raise actor.error
        simulation.execute(simulation.look)
        simulation.restart_broker()
        return simulation.history


def _member(simulation: CommitSimulation, number: int, rounds: int) -> Callable[[Actor], None]:
    return lambda actor: Member(simulation, actor, number).run(rounds)


def _events(simulation: CommitSimulation, members: list[Actor], chance: random.Random) -> None:
    """Whatever happens to the group and its coordinator, while a member is left."""
    group = simulation.group
    while not all(actor.done for actor in members):
        simulation.sleep(chance.choice((1e-5, 1e-4, 1e-3)))
        what = chance.random()
        if what < 0.5:
            simulation.execute(simulation.look)
        elif what < 0.65:
            simulation.rebalance()
        elif what < 0.75 and group.members:
            simulation.fence(chance.choice(sorted(group.members)))
        elif what < 0.82:
            simulation.stop_broker(chance.randint(1_000, 2_000_000))
        elif what < 0.86:
            simulation.restart_broker()
        elif what < 0.92:
            simulation.clean()
        elif what < 0.94:
            alive = [actor for actor in members if not actor.done and not actor.killed]
            if len(alive) > 1:
                simulation.kill(chance.choice(alive))
