"""A partition's committed records survive what the controller decides, in seeded walks.

The controller is the real one, over a store that answers at once.  The brokers are a model: a log
is a tuple of records (epoch, number); a leader appends, its followers copy after they have cut off
what the leader of the epoch does not have; the high watermark is what all in sync have, and stands
still while too few are in sync or anybody is eligible.  Brokers die and come back, some with a part
of their log lost; partitions move, brokers shut down, properties change.

What must hold: nobody is elected who lacks a committed record, unless everybody who had them all
has lost a part of its log since.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kdirect.cluster import election, partition_rules, reassignment
from kdirect.cluster.codes import Code
from kdirect.cluster.election import Standing
from kdirect.cluster.partition_state import PartitionState, leads
from kdirect.cluster.requests import (
    AlterConfig,
    ConfigOf,
    ElectionKind,
    ElectLeaders,
    Reassign,
    ReassignRow,
    ShutDown,
)
from tests.cluster.desk import T0, Desk, alter

BROKERS = 4
STEPS = 250
Log = tuple[tuple[int, int], ...]


class Walk:
    """`logs`: on the disks; `copied`: the epoch whose leader a broker has followed since it
    started; `lost`: brokers that lost a part of their log since they were last in sync; `lost_now`:
    those that did so when they last died."""

    eligible_stop_it = True  # the high watermark stands still while anybody is eligible

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.desk = Desk(BROKERS)
        self.min_in_sync = self.random.choice((1, 2, 2, 3))
        replicas = tuple(self.random.sample(range(BROKERS), self.random.choice((2, 3, 3))))
        self.desk.create("t", [replicas], min_insync_replicas=str(self.min_in_sync))
        self.logs: dict[int, Log] = dict.fromkeys(range(BROKERS), ())
        self.copied = dict.fromkeys(range(BROKERS), -1)
        self.live = set(range(BROKERS))
        self.lost: set[int] = set()
        self.lost_now: set[int] = set()
        self.committed: Log = ()
        self.most_committed = 0
        self.written = 0
        self.state = self.desk.state()
        self.epoch_start = 0

    def step(self) -> None:
        before = self.state
        moves = [
            self.append, self.copy, self.propose, self.kill, self.start, self.move,
            self.shut_down, self.configure, self.elect, self.fail_over, self.bounce,
        ]  # fmt: skip
        self.random.choices(moves, [30, 40, 20, 5, 9, 2, 1, 1, 2, 1, 1])[0]()
        self.learn(before)
        self.advance()

    @property
    def leader(self) -> int | None:
        """Whoever leads now and knows it."""
        leader = self.state.leader
        if leader in self.live and leads(self.state, leader, self.desk.live(leader).incarnation):
            return leader
        return None

    def learn(self, before: PartitionState) -> None:
        """What the controller has decided."""
        self.state = state = self.desk.state()
        leader = self.leader
        if state.leader_epoch == before.leader_epoch or leader is None:
            return  # the process that was elected may have died since, unnoticed
        if leader in self.lost:
            members = {*before.in_sync, *before.eligible}
            assert members <= self.lost, f"{leader} has lost records, others of {members} have not"
            self.committed = self.committed[: _common(self.committed, self.logs[leader])]
        assert self.logs[leader][: len(self.committed)] == self.committed, "records are lost"
        self.copied[leader] = state.leader_epoch
        self.epoch_start = len(self.logs[leader])
        self.lost.discard(leader)

    def advance(self) -> None:
        """The high watermark (see `leading_replica`)."""
        leader, state = self.leader, self.state
        enough = min(self.min_in_sync, len(self.desk.partition().replicas))
        if leader is None or len(state.in_sync) < enough:
            return
        if state.eligible and self.eligible_stop_it:
            return
        if any(self.copied[b] != state.leader_epoch for b in state.in_sync):
            return
        end = min(len(self.logs[b]) for b in state.in_sync)
        if end > len(self.committed):
            assert self.logs[leader][: len(self.committed)] == self.committed
            self.committed = self.logs[leader][:end]
            self.most_committed = max(self.most_committed, end)

    # -- what brokers do ---------------------------------------------------------------------------

    def append(self) -> None:
        if self.leader is not None:
            self.written += 1
            self.logs[self.leader] += ((self.state.leader_epoch, self.written),)

    def copy(self) -> None:
        leader = self.leader
        followers = [b for b in self.desk.partition().replicas if b in self.live and b != leader]
        if leader is None or not followers:
            return
        follower = self.random.choice(followers)
        log, source = self.logs[follower], self.logs[leader]
        if self.copied[follower] != self.state.leader_epoch:
            log = log[: _common(log, source)]
            self.copied[follower] = self.state.leader_epoch
        end = self.random.randint(len(log), len(source))
        self.logs[follower] = source[:end]

    def propose(self) -> None:
        """The leader shrinks or expands what is in sync, by its rules."""
        leader = self.leader
        if leader is None:
            return
        least = max(len(self.committed), self.epoch_start)
        may = [
            b
            for b in self.desk.partition().replicas
            if b in self.live
            and b != leader
            and self.copied[b] == self.state.leader_epoch
            and len(self.logs[b]) >= least
        ]
        stay = [b for b in self.state.in_sync if b in self.desk.controller.fleet.live]
        choice = sorted(b for b in {*may, *stay} - {leader} if self.random.random() < 0.75)
        before = self.desk.state().in_sync
        (answer,) = alter(self.desk, leader, leader, *choice).rows
        if answer.code is Code.NONE:
            self.lost -= set(choice) - set(before)

    def kill(self) -> None:
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            if self.live:
                self._kill(self.random.choice(sorted(self.live)))
        if self.random.random() < 0.7:  # else it is noticed when it is back, as another process
            self.desk.brokers()

    def start(self) -> None:
        dead = sorted(set(range(BROKERS)) - self.live)
        if dead:
            self._start(self.random.choice(dead))
        self.desk.brokers()

    def bounce(self) -> None:
        """A broker dies and comes back twice before anybody notices."""
        if self.live:
            broker = self.random.choice(sorted(self.live))
            for _ in range(2):
                self._kill(broker)
                self._start(broker)
        self.desk.brokers()

    def _kill(self, broker: int) -> None:
        self.live.discard(broker)
        self.desk.unregister(broker)
        self.copied[broker] = -1
        self.lost_now.discard(broker)
        if self.random.random() < 0.4:
            kept = self.random.randint(0, len(self.logs[broker]))
            self.logs[broker] = self.logs[broker][:kept]
            self.lost.add(broker)
            self.lost_now.add(broker)

    def _start(self, broker: int) -> None:
        self.live.add(broker)
        intact = broker not in self.lost_now and self.random.random() < 0.8
        if not intact:
            self.lost.add(broker)  # nobody can know that it did not
        self.desk.register(broker, intact)

    # -- what operators do -------------------------------------------------------------------------

    def move(self) -> None:
        target: tuple[int, ...] | None = None
        if self.random.random() < 0.8:
            target = tuple(self.random.sample(range(BROKERS), self.random.randint(1, 3)))
        self.desk.ask(Reassign(None, (ReassignRow(T0, target),)))

    def shut_down(self) -> None:
        broker = self.random.randrange(BROKERS)
        if broker in self.live and broker in self.desk.controller.fleet.live:
            self.desk.ask(ShutDown(None, broker, self.desk.live(broker).incarnation))

    def configure(self) -> None:
        self.min_in_sync = self.random.choice((1, 2, 3))
        properties = {"min.insync.replicas": str(self.min_in_sync)}
        self.desk.ask(AlterConfig(None, ConfigOf.TOPIC, "t", properties))

    def elect(self) -> None:
        self.desk.ask(ElectLeaders(None, ElectionKind.PREFERRED, (T0,)))

    def fail_over(self) -> None:
        """Another controller begins, from what the store has."""
        self.desk.begin()


def _common(one: Log, two: Log) -> int:
    """How many records at their beginning are the same."""
    for place, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return place
    return min(len(one), len(two))


def run(seed: int) -> Walk:
    walk = Walk(seed)
    for _ in range(STEPS):
        walk.step()
    return walk


@pytest.mark.parametrize("seed", range(200))
def test_committed_records_survive(seed: int) -> None:
    run(seed)


def test_the_walks_commit_records() -> None:
    assert sum(run(seed).most_committed for seed in range(20)) > 200


# -- the walks find mistakes -----------------------------------------------------------------------


def _losses_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Whoever comes back counts as having all that it had."""
    real = election.standing

    def standing(*args: Any) -> Standing:
        found = real(*args)
        return Standing.RETURNED if found is Standing.LOSSY else found

    patch.setattr(election, "standing", standing)


def _only_this_start_counts(patch: pytest.MonkeyPatch) -> None:
    """A clean start says nothing of the starts before it, and is trusted for them, too."""
    real = Desk.register

    def register(desk: Desk, broker: int, intact: bool = True) -> None:
        real(desk, broker, intact)
        desk._intact_since[broker] = 0

    patch.setattr(Desk, "register", register)


def _eligible_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Whoever left is eligible, however many are in sync, and the leader does not know it."""
    real = election.change

    def change(partition: Any, fleet: Any, rules: Any, **rest: Any) -> Any:
        return real(partition, fleet, rules._replace(min_in_sync=9), **rest)

    patch.setattr(election, "change", change)
    patch.setattr(partition_rules, "change", change)
    patch.setattr(partition_rules, "_end_eligible", lambda partition, rules: partition)
    patch.setattr(Walk, "eligible_stop_it", False)


def _cancelling_takes_anybody(patch: pytest.MonkeyPatch) -> None:
    """Going back makes those in sync who were replicas before, whatever they have."""
    real = reassignment._replace

    def replace(before: Any, after: Any, fleet: Any, rules: Any) -> Any:
        if before.state is not None:
            state = before.state._replace(in_sync=after.replicas)
            before = before._replace(state=state)
            after = after._replace(state=state)
        return real(before, after, fleet, rules)

    patch.setattr(reassignment, "_replace", replace)


MISTAKES = [
    _losses_are_ignored,
    _only_this_start_counts,
    _eligible_for_ever,
    _cancelling_takes_anybody,
]


@pytest.mark.parametrize("plant", MISTAKES)
def test_a_planted_mistake_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(seed)
