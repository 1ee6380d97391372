"""Seeded schedules of a group of the new protocol: members, a coordinator that fails over, topics.

``python -m tests.broker.group_schedules --first SEED --schedules COUNT`` runs many of them.

The members are kdirect's own (`kdirect.client.consumer_member`).  They give partitions back late,
lose answers, work while one is on its way, leave, die, fall silent until they have to give up by
themselves, change what they read, and come back as static members.  Between any two steps the
coordinator may stop: what it did not save is gone, and the next one reads the records.  At every
step no partition has two readers.  In the end, when nothing happens any more, the group has come to
rest, everything that somebody reads is read, and evenly.
"""

from __future__ import annotations

import random
import re
import uuid
from collections import Counter

from kdirect.broker import consumer_group_state as state
from kdirect.broker.consumer_groups import (
    ConsumerGroupCoordinator,
    ConsumerGroupSettings,
    Heartbeat,
)
from kdirect.broker.groups import GroupCoordinator, GroupSettings, Reply, SaveRows
from kdirect.client.consumer_member import FENCED, ConsumerMember
from kdirect.format import consumer_group_records as records
from kdirect.format.error_codes import ErrorCode as E

SESSION_MS = 1000
REBALANCE_MS = 1000
GROUP = "g"


class FakeTopics:
    """Topics of the test: name -> (id, partitions)."""

    def __init__(self):
        self.known = {}

    def create(self, name, partitions):
        self.known[name] = records.TopicFacts(uuid.uuid5(uuid.NAMESPACE_DNS, name), partitions)

    def grow(self, name, by=1):
        facts = self.known[name]
        self.known[name] = records.TopicFacts(facts.topic_id, facts.partitions + by)

    def facts(self, name):
        return self.known.get(name)

    def names(self):
        return list(self.known)

    def problem(self, regex):
        return ""

    def matching(self, regex, names):
        return frozenset(n for n in names if re.fullmatch(regex, n))


class Client:
    """A consumer, by the rules of kdirect's own."""

    def __init__(self, world, name, instance=None):
        self.world = world
        self.name = name
        self.member_id = name
        self.instance = instance
        self.rules = ConsumerMember(SESSION_MS, REBALANCE_MS)
        self.subscribe()
        self.alive = True

    @property
    def owned(self):
        return self.rules.owned if self.alive else frozenset()

    @property
    def topics(self):
        return self.rules.topics

    @property
    def regex(self):
        return self.rules.regex

    def subscribe(self):
        rng = self.world.rng
        regex = rng.choice(("t[0-2]", "t.*")) if rng.random() < 0.25 else ""
        names = [f"t{i}" for i in range(4)]
        count = rng.choice((1, 2, 4))
        alone = regex and rng.random() < 0.5
        self.rules.subscribe(frozenset() if alone else frozenset(rng.sample(names, count)), regex)

    def step(self, *, lossy=True):
        """Work on what it was told, then perhaps a heartbeat."""
        if self.is_late():
            self.give_up()
        if not lossy or self.world.rng.random() < 0.7:
            self.work()
        self.beat(lossy)

    def work(self):
        rules = self.rules
        wanted = rules.wanted
        if wanted is None:
            return
        if rules.owned - wanted:
            rules.gave_back(wanted)
        else:
            rules.take(wanted, wanted)
            self.world.check_owners()

    def is_late(self):
        return self.rules.is_late(self.world.now)

    def give_up(self):
        self.rules.begin()

    def beat(self, lossy):
        world, rules = self.world, self.rules
        say = rules.heartbeat(world.now)
        request = Heartbeat(
            GROUP,
            self.member_id,
            say.epoch,
            instance_id=self.instance,
            rebalance_timeout_ms=say.rebalance_timeout_ms,
            topics=say.topics,
            regex=say.regex,
            owned=say.owned,
        )
        if lossy and world.rng.random() < 0.05:
            rules.failed(say)
            return
        answer = world.ask(request, lossy)
        if lossy and world.rng.random() < 0.3:  # the answer is on its way meanwhile
            world.seen["worked meanwhile"] += 1
            self.work()
        if lossy and world.rng.random() < 0.02:  # it gives up, and hears the answer to its old life
            self.give_up()
        if answer is None or (lossy and world.rng.random() < 0.1):
            rules.failed(say)
        elif answer.error:
            assert answer.error in FENCED | {E.UNRELEASED_INSTANCE_ID}, answer
            if rules.refused(say, answer.error):
                self.give_up()
        else:
            rules.answered(say, answer.epoch, answer.assignment)

    def leave(self, for_a_while=False):
        epoch = state.LEAVE_FOR_A_WHILE if for_a_while else state.LEAVE
        self.alive = False
        self.world.ask(Heartbeat(GROUP, self.member_id, epoch, instance_id=self.instance), True)


class World:
    """One schedule."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.log: dict[bytes, bytes] = {}
        self.topics = FakeTopics()
        self.path: list[str] = []
        self.seen: Counter[str] = Counter()
        self.assignor = self.rng.choice(("uniform", "uniform", "range"))
        for i in range(3):
            self.topics.create(f"t{i}", self.rng.randrange(1, 7))
        self.names = 0
        self.start()
        self.clients = [self.client() for _ in range(self.rng.randrange(1, 5))]

    def client(self):
        self.names += 1
        instance = f"i{self.names}" if self.rng.random() < 0.25 else None
        return Client(self, f"m{self.names}", instance)

    # -- the coordinator ---------------------------------------------------------------------------

    def start(self):
        order = (self.assignor, *({"uniform", "range"} - {self.assignor}))
        settings = ConsumerGroupSettings(
            session_timeout_ms=SESSION_MS, assignors=order, refresh_ms=100
        )
        classic = GroupCoordinator(GroupSettings())
        self.machine = ConsumerGroupCoordinator(settings, self.topics, classic)
        rows = {}
        for key, value in self.log.items():
            parsed = records.parse_key(key)
            assert parsed is not None and parsed.group == GROUP
            rows[parsed] = value
        group = state.load(GROUP, rows)
        if group is not None:
            self.machine.restore(group, self.now)

    def save(self, rows):
        for key, value in rows:
            if value is None:
                self.log.pop(key, None)
            else:
                self.log[key] = value

    def carry_out(self, effects, lossy):
        """The answer, or None where the coordinator stopped before it."""
        answer = None
        for effect in effects:
            if lossy and self.rng.random() < 0.01:
                self.path.append("failover")
                self.seen["failover"] += 1
                self.start()
                return None
            if isinstance(effect, SaveRows):
                self.save(effect.rows)
            else:
                assert isinstance(effect, Reply)
                answer = effect.result
        return answer

    def ask(self, request, lossy):
        answer = self.carry_out(self.machine.heartbeat("token", request, self.now), lossy)
        self.check_records()
        return answer

    # -- what holds --------------------------------------------------------------------------------

    def check_owners(self):
        owners: dict[records.Partition, str] = {}
        for client in self.clients:
            for tp in client.owned:
                other = owners.setdefault(tp, client.name)
                assert other == client.name, f"{tp} is read by {other} and {client.name}"

    def check_records(self):
        """What is in the log is the group that works."""
        group = self.machine.groups.get(GROUP)
        if group is not None:
            rows = dict(group.all_rows())
            if not group.topics:  # it need not be said
                rows.pop(group.topics_row()[0])
                self.log.pop(group.topics_row()[0], None)
            assert rows == self.log

    # -- steps -------------------------------------------------------------------------------------

    def step(self):
        rng = self.rng
        self.now += rng.randrange(1, 120)
        self.carry_out(self.machine.expire(self.now), True)
        kind = rng.choices(
            ("beat", "join", "leave", "die", "silence", "subscribe", "grow", "topic", "static"),
            (60, 3, 2, 1, 1, 2, 1, 1, 2),
        )[0]
        self.seen[kind] += 1
        alive = [c for c in self.clients if c.alive]
        if kind == "join" or not alive:
            if len(alive) < 6:
                self.clients.append(self.client())
        elif kind == "leave":
            rng.choice(alive).leave()
        elif kind == "die":
            victim = rng.choice(alive)
            victim.alive = False
        elif kind == "silence":
            self.now += rng.randrange(300, 1500)
        elif kind == "subscribe":
            rng.choice(alive).subscribe()
        elif kind == "grow":
            self.topics.grow(rng.choice(list(self.topics.known)))
        elif kind == "topic":
            if "t3" in self.topics.known:
                del self.topics.known["t3"]
            else:
                self.topics.create("t3", rng.randrange(1, 5))
        elif kind == "static":
            statics = [c for c in alive if c.instance]
            if statics:
                old = rng.choice(statics)
                old.leave(for_a_while=True)
                self.names += 1
                self.clients.append(Client(self, f"m{self.names}", old.instance))
        for client in alive:  # whatever else it waits for, it looks at its clock
            if client.is_late():
                client.give_up()
        for client in rng.sample(alive, rng.randrange(len(alive) + 1)):
            if client.alive:
                client.step()
        self.check_owners()

    def come_to_rest(self):
        """Nothing happens any more but heartbeats: the group finds its end."""
        for _ in range(60):
            self.now += 100
            self.carry_out(self.machine.expire(self.now), False)
            for client in self.clients:
                if client.alive:
                    client.step(lossy=False)
            self.check_owners()
        group = self.machine.groups.get(GROUP)
        alive = [c for c in self.clients if c.alive]
        if not alive:
            return
        assert group is not None and group.state() == state.STABLE, group and group.state()
        assert set(group.members) == {c.member_id for c in alive}
        self.check_spread(alive)

    def check_spread(self, alive):
        readers: dict[records.Partition, list[Client]] = {}
        for client in alive:
            names = client.topics | self.topics.matching(client.regex, self.topics.names())
            for name in names & set(self.topics.known):
                facts = self.topics.known[name]
                for i in range(facts.partitions):
                    readers.setdefault((facts.topic_id, i), []).append(client)
        owner = {tp: c for c in alive for tp in c.owned}
        assert set(owner) == set(readers)
        for tp, client in owner.items():
            assert client in readers[tp]
            if self.assignor == "uniform":
                assert all(len(client.owned) - len(r.owned) < 2 for r in readers[tp])


def run(seed: int, steps: int = 150) -> Counter[str]:
    """One schedule.  AssertionError: it does not hold."""
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.come_to_rest()
    return world.seen


if __name__ == "__main__":
    from tests.storage.schedules import run_many

    raise SystemExit(run_many(run, __doc__ or "", 2000))
