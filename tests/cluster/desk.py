"""A controller at work on a store that answers at once: what tests of its rules begin with."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from typing import Any

from kdirect.cluster import controller as rules
from kdirect.cluster import paths, records
from kdirect.cluster.codes import Code
from kdirect.cluster.election import LiveBroker, Partition
from kdirect.cluster.image import Settings
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.records import BrokerRegistration, Endpoint
from kdirect.cluster.requests import (
    AlterInSync,
    Answer,
    CreateTopic,
    ElectionKind,
    ElectLeaders,
    InSyncRow,
)
from kdirect.model import TopicPartition
from kdirect.store.contract import Check, Committed, Create, Delete, Found, Node, Operation, Replace
from tests.cluster.observer import Observer

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)


def registration(broker: int, rack: str | None = None, intact_since: int | None = None) -> bytes:
    return records.encode_broker(
        BrokerRegistration(
            (Endpoint("PLAINTEXT", "localhost", 9092 + broker),),
            {"PLAINTEXT": "PLAINTEXT"},
            rack,
            1_600_000_000_000,
            intact_since,
        )
    )


class Desk:
    """Brokers 0 to `brokers` - 1 live; `racks` of those that have one.

    `hold`: commits wait in `held` until `answer` or `commit_held`.  `answers` by tag; a tag that is
    answered twice is an error.
    """

    def __init__(
        self,
        brokers: int = 3,
        settings: Settings = Settings(),
        racks: Mapping[int, str] | None = None,
        hold: bool = False,
    ) -> None:
        self.observer = Observer()
        self.settings = settings
        self.hold = hold
        self.held: list[rules.Commit] = []
        self.asked: list[tuple[str, ...]] = []
        self.answers: dict[Any, Answer] = {}
        self.reports: list[str] = []
        self.resigned: list[str] = []
        self.epoch = 0
        self.commits = 0
        self._tags = itertools.count()
        self._intact_since: dict[int, int] = {}
        for path, value in paths.PERSISTENT:
            self.write(Create(path, value))
        self.racks = dict(racks or {})
        for broker in range(brokers):
            self.register(broker)
        self.begin()

    # -- the store ---------------------------------------------------------------------------------

    @property
    def tree(self) -> Any:
        return self.observer.tree

    def write(self, *operations: Operation) -> None:
        """A commit of somebody else's."""
        assert isinstance(self.observer.commit(operations, 1), Committed)

    def register(self, broker: int, intact: bool = True) -> None:
        """`intact`: nothing is lost that it confirmed before, as far as it was intact then."""
        since = self._intact_since.get(broker) if intact else None
        value = registration(broker, self.racks.get(broker), since)
        self.write(Create(paths.broker(broker), value, ephemeral=True))
        if since is None:
            self._intact_since[broker] = self.tree.get(paths.broker(broker)).created

    def unregister(self, broker: int) -> None:
        self.write(Delete(paths.broker(broker)))

    def nodes(self) -> dict[str, Node]:
        return dict(self.tree.walk())

    # -- the controller ----------------------------------------------------------------------------

    def begin(self, now_ms: int = 0) -> None:
        """A new controller; the one before, if any, is gone."""
        self.epoch += 1
        self.write(Replace(paths.CONTROLLER_EPOCH, str(self.epoch).encode()))
        self.held.clear()
        self.controller, effects = rules.begin(
            self.nodes(), self.epoch, self.settings, now_ms=now_ms
        )
        self._do(effects)

    def feed(self, event: Any) -> None:
        self.controller, effects = rules.step(self.controller, event)
        self._do(effects)

    def _do(self, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            match effect:
                case rules.Commit():
                    assert isinstance(effect.operations[0], Check)
                    self.held.append(effect)
                case Answer(tag):
                    assert tag not in self.answers, "answered twice"
                    self.answers[tag] = effect
                case rules.Reread():
                    self.asked.append(effect.paths)
                case rules.Report():
                    self.reports.append(effect.error)
                case rules.Resign():
                    self.resigned.append(effect.why)
        while self.held and not self.hold:
            self.commit_held()
        while self.asked and not self.hold:
            self.read_asked()

    def commit_held(self, answer: Any = None) -> None:
        """Carry out the commit that waits, and answer with what came of it, or with `answer`."""
        commit = self.held.pop(0)
        real = self.carry_out(commit)
        self.feed(rules.CommitAnswered(commit.tag, real if answer is None else answer))

    def carry_out(self, commit: rules.Commit) -> Any:
        """What the store says to it now."""
        session = 100 + self.epoch
        answer = self.observer.commit(commit.operations, session)
        self.commits += isinstance(answer, Committed)
        return answer

    def lose(self, answer: Any) -> None:
        """Answer the commit that waits without carrying it out."""
        self.feed(rules.CommitAnswered(self.held.pop(0).tag, answer))

    def read_asked(self) -> None:
        wanted = self.asked.pop(0)
        self.feed(rules.ReadBack(Found(tuple(self.tree.get(path) for path in wanted))))

    def brokers(self) -> None:
        """Tell of the brokers that are registered."""
        live, _ = rules.read_brokers(self.nodes())
        self.feed(rules.BrokersChanged(live))

    def live(self, broker: int) -> LiveBroker:
        return self.controller.fleet.live[broker]

    def ask(self, request: Any) -> Any:
        """Give the request a tag; its answer, if it has come."""
        tag = next(self._tags)
        self.feed(request._replace(tag=tag))
        return self.answers.get(tag)

    # -- what tests look at ------------------------------------------------------------------------

    def create(self, name: str, replicas: list[tuple[int, ...]], **config: str) -> Answer:
        properties = {key.replace("_", "."): value for key, value in config.items()}
        return self.ask(
            CreateTopic(
                None, name, uuid.uuid4(), assignment=dict(enumerate(replicas)), config=properties
            )
        )

    def partition(self, tp: TopicPartition = T0) -> Partition:
        found = self.controller.image.find(tp)
        assert found is not None
        return found

    def state(self, tp: TopicPartition = T0) -> PartitionState:
        """Of the store; the same as the controller's."""
        path = paths.state(tp)
        node = self.tree.get(path)
        assert node is not None
        stored = records.decode_state(path, node.value, node.version).state
        if not self.held:
            assert stored == self.partition(tp).state
        return stored

    def in_sync(self, *brokers: int) -> tuple[tuple[int, int], ...]:
        return tuple((b, self.live(b).incarnation) for b in brokers)


def alter(
    desk: Desk, leader: int, *in_sync: int, tp: TopicPartition = T0, **changes: Any
) -> Answer:
    """A proposal against the state as it is, but for `changes`."""
    state = desk.state(tp)
    row = InSyncRow(tp, state.leader_epoch, state.version, desk.in_sync(*in_sync))
    request = AlterInSync(None, leader, desk.live(leader).incarnation, (row._replace(**changes),))
    return desk.ask(request)


def stop(desk: Desk, *brokers: int) -> None:
    for broker in brokers:
        desk.unregister(broker)
    desk.brokers()


def start(desk: Desk, *brokers: int, intact: bool = True) -> None:
    for broker in brokers:
        desk.register(broker, intact)
    desk.brokers()


def elect(desk: Desk, kind: ElectionKind, *partitions: TopicPartition) -> list[Code]:
    return [r.outcome.code for r in desk.ask(ElectLeaders(None, kind, partitions)).rows]
