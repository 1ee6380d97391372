"""Three brokers race for controller over a store that loses connections, sessions and answers, from
a seed, while clients ask for everything that a controller does.

After every commit (`observer`): no two controllers wrote in one controller epoch, and none after a
newer one; every partition has one leader an epoch, and epochs only grow; in-sync and eligible
replicas are replicas.  In the end every request has been answered once, all live, one is
controller, every partition has a leader, and what the controller believes is what the store has.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from kdirect.cluster import controller, election, paths
from kdirect.cluster.codes import Code
from kdirect.cluster.controller import Phase, Ticked
from kdirect.cluster.draft import Draft
from kdirect.cluster.image import Settings, read_brokers, read_image
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.cluster.requests import (
    AlterConfig,
    AlterInSync,
    Answer,
    ConfigOf,
    CreateTopic,
    DeleteTopic,
    ElectionKind,
    ElectLeaders,
    GrowTopic,
    InSyncRow,
    ListReassignments,
    Reassign,
    ReassignRow,
    ShutDown,
)
from kdirect.model import TopicPartition
from kdirect.store.contract import Check, Delete
from kdirect.store.sim import SimServer
from tests.cluster.observer import Observer
from tests.cluster.store_driver import ROOTS, SimBroker

BROKERS = 4
CANDIDATES = 3
STEPS = 1500
SETTINGS = Settings(min_in_sync=2, rebalance_interval_ms=2000)


class Race:
    """A run from a seed.  `asked`: tags that wait for an answer, with the broker that was asked."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = SimServer(self.random)
        self.observer = Observer()
        self.asked: dict[int, SimBroker] = {}
        self.codes: set[Code] = set()
        self.tags = 0
        self._seen = 0
        self.dead: list[SimBroker] = []
        self.brokers = [self.start(number) for number in range(BROKERS)]

    def start(self, number: int, intact: bool = True) -> SimBroker:
        return SimBroker(
            self.server,
            number,
            SETTINGS,
            self.answered,
            runs_for_controller=number < CANDIDATES,
            intact=intact,
        )

    def answered(self, answer: Answer) -> None:
        assert answer.tag in self.asked, f"{answer} to a request that does not wait"
        del self.asked[answer.tag]
        self.codes.add(answer.outcome.code)
        self.codes.update(
            row.outcome.code if hasattr(row, "outcome") else row.code
            for row in answer.rows
            if hasattr(row, "outcome") or hasattr(row, "code")
        )

    def observe(self) -> None:
        """Show the observer what was committed since."""
        for change in self.server.history[self._seen :]:
            self.observer.see(change.operations, change.session)
        self._seen = len(self.server.history)

    # -- what happens ------------------------------------------------------------------------------

    def step(self) -> None:
        happens: Any = self.random.choices(
            [self.work, self.ask, self.cut, self.mend, self.expire, self.restart, self.wait,
             self.outage, self.depose],
            [60, 16, 1.5, 6, 0.3, 0.4, 4, 0.2, 0.4],
        )[0]  # fmt: skip
        happens()
        self.observe()

    def work(self) -> None:
        for _ in range(self.random.randint(1, 30)):
            self.server.step()

    def cut(self) -> None:
        self.server.cut(self.random.choice(self.brokers).store)

    def mend(self) -> None:
        self.server.mend(self.random.choice(self.brokers).store)
        self.replace_ended()

    def expire(self) -> None:
        self.server.expire(self.random.choice(self.brokers).store)

    def replace_ended(self) -> None:
        """Whose session has ended begins another: the same process, so nothing is lost."""
        for place, broker in enumerate(self.brokers):
            if broker.ended:
                self.brokers[place] = self.start(broker.number)

    def restart(self) -> None:
        """A process dies and comes back; its session stays until its time is over."""
        place = self.random.randrange(BROKERS)
        dead = self.brokers[place]
        self.server.cut(dead.store)
        self.asked = {tag: broker for tag, broker in self.asked.items() if broker is not dead}
        dead.controller = None
        dead._on_event = lambda event: None  # type: ignore[method-assign]
        dead._answered = lambda answer: None
        self.dead.append(dead)
        self.brokers[place] = self.start(dead.number, intact=self.random.random() < 0.7)

    def wait(self) -> None:
        self.server.pass_time(self.random.choice((10, 100, 400)) * 10**6)
        for broker in self.brokers:
            broker.feed(Ticked(self.server.now_ns // 10**6))

    def outage(self) -> None:
        self.server.go_away()
        for _ in range(self.random.randint(0, 20)):
            self.server.step()
        self.server.come_back()
        for dead in self.dead:
            self.server.cut(dead.store)

    def depose(self) -> None:
        """Somebody deletes `/controller` by hand, which operators do: for a while there are two."""
        if self.server.tree.get(paths.CONTROLLER) is not None:
            self.server.commit((Delete(paths.CONTROLLER),), 0)

    # -- what clients ask --------------------------------------------------------------------------

    def ask(self) -> None:
        leading = [b for b in self.brokers if b.leads]
        usual = leading and self.random.random() < 0.9
        broker = self.random.choice(leading if usual else self.brokers)
        self.tags += 1
        request = self.request()._replace(tag=self.tags)
        self.asked[self.tags] = broker
        broker.ask(request)

    def request(self) -> Any:
        chance = self.random
        topics = sorted({tp.topic for tp in self.observer.states()})
        name = chance.choice([*topics, "a", "b", "c", "d"])
        kind = chance.randrange(12)
        if kind <= 2:
            partitions, factor = chance.randint(1, 3), chance.randint(1, BROKERS)
            config = chance.choice([{}, {"unclean.leader.election.enable": "true"}])
            return CreateTopic(
                None, name, uuid.UUID(int=chance.getrandbits(128)), partitions, factor,
                config=config, start=chance.randrange(9),
            )  # fmt: skip
        if kind == 3:
            return chance.choice(
                [DeleteTopic(None, name), GrowTopic(None, name, chance.randint(1, 5))]
            )
        if kind == 4:
            value = chance.choice([None, "1", "2", "3"])
            return AlterConfig(None, ConfigOf.TOPIC, name, {"min.insync.replicas": value})
        if kind == 5:
            kinds = chance.choice(list(ElectionKind))
            return ElectLeaders(None, kinds, chance.choice([None, self.some(1)]))
        if kind == 6:
            rows = tuple(ReassignRow(tp, self.target()) for tp in self.some(2))
            return Reassign(None, rows)
        if kind == 7:
            number = chance.randrange(BROKERS)
            return ShutDown(None, number, self.live().get(number, 1))
        if kind == 8:
            return ListReassignments(None)
        return self.proposal()

    def some(self, most: int) -> tuple[TopicPartition, ...]:
        there = sorted(self.observer.states()) or [TopicPartition("a", 0)]
        return tuple(self.random.sample(there, min(most, len(there))))

    def target(self) -> tuple[int, ...] | None:
        if self.random.random() < 0.2:
            return None
        return tuple(self.random.sample(range(BROKERS), self.random.randint(1, BROKERS)))

    def live(self) -> dict[int, int]:
        nodes = dict(self.server.tree.walk())
        return {number: b.incarnation for number, b in read_brokers(nodes)[0].items()}

    def proposal(self) -> AlterInSync:
        """Of a partition's leader, for others in sync; sometimes for an older state."""
        (tp,) = self.some(1)
        stored = self.observer.states().get(tp)
        live = self.live()
        if stored is None or stored.state.leader not in live:
            return AlterInSync(None, 0, live.get(0, 1), ())
        state = stored.state
        record = self.server.tree.get(paths.topic(tp.topic))
        assert record is not None
        replicas = self.observer._topic(tp.topic).replicas[tp.partition]
        others = [b for b in replicas if b in live and b != state.leader]
        joining = self.random.sample(others, self.random.randint(0, len(others)))
        if self.random.random() < 0.5:
            joining = others
        in_sync = tuple((b, live[b]) for b in (state.leader, *joining))
        version = state.version - (self.random.random() < 0.1)
        row = InSyncRow(tp, state.leader_epoch, max(0, version), in_sync)
        return AlterInSync(None, state.leader, live[state.leader], (row,))

    # -- the end -----------------------------------------------------------------------------------

    def heal(self) -> None:
        """All faults end; what is under way ends."""
        for _ in range(8):
            for broker in self.brokers:
                self.server.mend(broker.store)
            self.server.drain()
            self.replace_ended()
            self.server.pass_time(400 * 10**6)
            for broker in self.brokers:
                broker.feed(Ticked(self.server.now_ns // 10**6))
            self.server.drain()
            self.observe()

    def check_end(self) -> None:
        assert not self.asked, "requests were never answered"
        (leading,) = [b for b in self.brokers if b.leads]
        believed = leading.controller
        assert believed is not None
        assert believed.phase is Phase.READY
        assert not believed.waiting
        assert not believed.queue
        nodes = dict(self.server.tree.walk())
        assert {*read_brokers(nodes)[0]} == set(range(BROKERS))
        assert believed.fleet.live == read_brokers(nodes)[0]
        read = {path: node for path, node in nodes.items() if path.startswith(ROOTS)}
        assert believed.image == read_image(read, believed.image.epoch)
        assert not believed.image.damaged
        assert not self.server.tree.children(paths.DELETIONS)
        assert not [r for b in self.brokers for r in b.reports]
        for tp, partition in believed.image.all_partitions():
            assert partition.state is not None, tp
            assert partition.state.leader != NO_LEADER, (tp, partition)


def run(seed: int) -> Race:
    race = Race(seed)
    for _ in range(STEPS):
        race.step()
    race.heal()
    race.check_end()
    return race


@pytest.mark.parametrize("seed", range(40))
def test_controllers_race(seed: int) -> None:
    run(seed)


def test_a_seed_repeats_itself() -> None:
    assert run(5).server.history == run(5).server.history


def test_the_schedules_reach_what_they_are_for() -> None:
    """Elections of controllers, and most of the answers."""
    codes: set[Code] = set()
    epochs = 0
    for seed in range(100, 110):
        race = run(seed)
        codes |= race.codes
        epochs += len(race.observer.controllers)
    assert epochs > 20
    assert codes >= {
        Code.NONE, Code.NOT_CONTROLLER, Code.TOPIC_ALREADY_EXISTS, Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.INVALID_REPLICATION_FACTOR, Code.ELECTION_NOT_NEEDED, Code.INVALID_UPDATE_VERSION,
        Code.NO_REASSIGNMENT_IN_PROGRESS, Code.INVALID_REPLICA_ASSIGNMENT,
    }  # fmt: skip


# -- the schedules find mistakes -------------------------------------------------------------------


def _without_fence(patch: pytest.MonkeyPatch) -> None:
    """Commits do not check `/controller_epoch`."""
    real = Draft.finish

    def finish(draft: Draft) -> Any:
        (_, *rest), after = real(draft)
        return (Check(paths.BROKER_IDS), *rest), after

    patch.setattr(Draft, "finish", finish)


def _unknown_is_done(patch: pytest.MonkeyPatch) -> None:
    """A commit with unknown outcome is taken for one that happened."""
    patch.setattr(controller, "_read", lambda state, more: controller._happened(state))


def _mark_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """What was read back is taken for the commit, whatever it is."""
    patch.setattr(controller, "_is_mark_of", lambda made, mark: True)


def _requests_are_lost(patch: pytest.MonkeyPatch) -> None:
    """A commit that did not happen is not made again."""
    real = controller._did_not_happen

    def did_not_happen(state: Any) -> Any:
        return real(state._replace(in_flight=state.in_flight._replace(taken=())))

    patch.setattr(controller, "_did_not_happen", did_not_happen)


def _epoch_stays(patch: pytest.MonkeyPatch) -> None:
    """A new leader takes over its predecessor's epoch."""
    real = election.change

    def change(partition: Any, *args: Any, **rest: Any) -> Any:
        after = real(partition, *args, **rest)
        epoch = partition.state.leader_epoch
        return after._replace(state=after.state._replace(leader_epoch=epoch))

    patch.setattr(election, "change", change)


MISTAKES = {
    "no fence": _without_fence,
    "unknown is done": _unknown_is_done,
    "the mark is not compared": _mark_is_not_compared,
    "requests are lost": _requests_are_lost,
    "the epoch stays": _epoch_stays,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - whatever the mistake breaks first
        for seed in range(40):
            run(seed)
