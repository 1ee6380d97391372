"""cooperative-sticky (KIP-429): the assignor by itself, and members beside librdkafka's."""

from __future__ import annotations

import random
from collections import Counter

import confluent_kafka
import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.assignors import check_strategies, cooperative_sticky_assignor
from kdirect.errors import BrokerError, ConfigError, FormatError
from kdirect.format.consumer_protocol import (
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from kdirect.model import TopicPartition
from tests.support import poll_until, wait_until

TPS = [TopicPartition("t", i) for i in range(6)]
PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])


# -- the assignor ----------------------------------------------------------------------------------


class Group:
    """Members that do as the assignor says.  `has`: what each reads, and of which generation."""

    def __init__(self, rng):
        self.rng = rng
        self.counts = {"a": rng.randrange(1, 7), "b": rng.randrange(1, 7)}
        self.topics: dict[str, frozenset[str]] = {}
        self.has: dict[str, tuple[frozenset[TopicPartition], int]] = {}
        self.generation = 0
        self.names = 0

    def change(self):
        kind = self.rng.randrange(4)
        if kind < 2 or len(self.has) < 2:
            self.names += 1
            name = f"m{self.rng.randrange(100)}-{self.names}"
            self.topics[name] = frozenset(self.rng.choice(("a", "b", "ab", "ab", "ab")))
            self.has[name] = frozenset(), -1
        elif kind == 2:
            del self.has[self.rng.choice(sorted(self.has))]
        else:
            self.counts[self.rng.choice("ab")] += 1

    def rebalance(self):
        """One generation; whether it takes another one."""
        said = {
            m: decode_subscription(
                encode_subscription(Subscription(self.topics[m], owned=owned, generation=of))
            )
            for m, (owned, of) in self.has.items()
        }
        given = cooperative_sticky_assignor(said, self.counts)
        assert given.keys() == self.has.keys()
        owners = {tp: m for m, (owned, _) in self.has.items() for tp in owned}
        self.generation += 1
        revoked = False
        taken: set[TopicPartition] = set()
        for m, tps in given.items():
            assert all(owners.get(tp, m) == m for tp in tps), "taken from who still reads it"
            assert not taken.intersection(tps)
            taken.update(tps)
            revoked |= bool(self.has[m][0] - set(tps))
            self.has[m] = frozenset(tps), self.generation
        return revoked

    def check(self):
        readers = {
            TopicPartition(t, i): [m for m in self.has if t in self.topics[m]]
            for t, count in self.counts.items()
            for i in range(count)
        }
        owner = {tp: m for m, (owned, _) in self.has.items() for tp in owned}
        assert set(owner) == {tp for tp, those in readers.items() if those}
        for tp, m in owner.items():
            assert m in readers[tp]
            size = len(self.has[m][0])
            assert all(size - len(self.has[r][0]) < 2 for r in readers[tp])


def test_a_partition_moves_when_its_owner_has_given_it_back(seed):
    for turn in range(200):
        group = Group(random.Random(f"{seed}-{turn}"))
        for _ in range(12):
            group.change()
            alike = len({group.topics[m] for m in group.has}) == 1
            rebalances = 1
            while group.rebalance():
                rebalances += 1
                assert rebalances <= (2 if alike else 8)
            group.check()
            before = dict(group.has)
            assert not group.rebalance()
            assert {m: o for m, (o, _) in group.has.items()} == {
                m: o for m, (o, _) in before.items()
            }


def test_what_two_members_claim():
    def said(owned, generation):
        return Subscription(frozenset("t"), owned=frozenset(owned), generation=generation)

    a, b = TPS[0], TPS[1]
    counts = {"t": 2}
    late = cooperative_sticky_assignor({"m": said([a, b], 7), "n": said([a], 6)}, counts)
    assert late == {"m": [a], "n": []}  # b moves to n, which may not have it yet
    same = cooperative_sticky_assignor({"m": said([a], 7), "n": said([a], 7)}, counts)
    assert sorted(len(tps) for tps in same.values()) == [1, 1]


def test_bytes_and_names_that_are_refused():
    whole = encode_assignment(TPS)
    assert decode_assignment(whole) == TPS and decode_assignment(b"") == []
    for cut in range(1, len(whole) - 4):
        with pytest.raises(FormatError):
            decode_assignment(whole[:cut])
    with pytest.raises(ConfigError, match="cannot be together"):
        check_strategies(["cooperative-sticky", "range"])
    assert check_strategies(["cooperative-sticky"]) == ["cooperative-sticky"]


# -- members ---------------------------------------------------------------------------------------


def settings(broker, **changed):
    return {
        "bootstrap.servers": broker.bootstrap_servers,
        "group.id": "g",
        "auto.offset.reset": "earliest",
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 50,
        "partition.assignment.strategy": "cooperative-sticky",
        **changed,
    }


def fill(broker, first, count):
    with connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("t", len(TPS), if_not_exists=True)
        with session.producer() as producer:
            for i in range(first, first + count):
                producer.produce("t", b"%d" % i, partition=i % len(TPS))


def callbacks(events):
    return {
        kind: lambda c, tps, kind=kind: events.append((kind, tps))
        for kind in ("on_assign", "on_revoke", "on_lost")
    }


def assigned(consumer):
    return {TopicPartition(tp.topic, tp.partition) for tp in consumer.assignment()}


@PATHS
@pytest.mark.parametrize("leader", ["kdirect", "librdkafka"])
def test_beside_librdkafka_what_stays_is_read_on(broker, transport, leader):
    fill(broker, 0, 300)
    ours = kdirect.Consumer(settings(broker, transport=transport))
    theirs = confluent_kafka.Consumer(settings(broker))
    events: list = []
    read: Counter = Counter()
    members = [ours, theirs] if leader == "kdirect" else [theirs, ours]

    def take_all(those):
        for c in those:
            read.update(m.value() for m in c.consume(100, 0.02) if m.error() is None)

    with ours:
        for i, c in enumerate(members, 1):
            c.subscribe(["t"], **(callbacks(events) if c is ours else {}))
            share = len(TPS) // i
            wait_until(
                lambda i=i, share=share: (
                    take_all(members[:i])
                    or ([len(assigned(c)) for c in members[:i]] == [share] * i and len(read) == 300)
                )
            )
            for c in members[:i]:
                c.commit(offsets=None, asynchronous=True) if c is ours else None
        kept = assigned(ours)
        assert kept | assigned(theirs) == set(TPS)
        if leader == "kdirect":
            assert [(kind, set(tps)) for kind, tps in events] == [
                ("on_assign", set(TPS)),
                ("on_revoke", set(TPS) - kept),
            ]
        else:  # it may be given nothing at first, until librdkafka has given something back
            assert {kind for kind, _ in events} == {"on_assign"}
            assert {tp for _, tps in events for tp in tps} == kept
        before = ours.statistics()["rebalances"]
        fill(broker, 300, 300)
        wait_until(lambda: take_all(members) or len(read) == 600)
        theirs.close()
        events.clear()
        wait_until(lambda: take_all([ours]) or len(assigned(ours)) == 6)
        assert events == [("on_assign", sorted(set(TPS) - kept))]
        assert ours.statistics()["rebalances"] == before + 1  # nothing moved: one is enough
        fill(broker, 600, 60)
        wait_until(lambda: take_all([ours]) or len(read) == 660)
        assert set(read.values()) == {1}


def test_it_reads_and_commits_during_a_rebalance_and_loses_all_when_it_is_fenced(broker):
    fill(broker, 0, 60)
    events: list = []
    with (
        kdirect.Consumer(settings(broker, **{"enable.auto.commit": False})) as a,
        kdirect.Consumer(settings(broker)) as b,
    ):
        a.subscribe(["t"], **callbacks(events))
        got = poll_until(lambda: len(a.assignment()) == 6, a)
        b.subscribe(["t"])
        poll_until(lambda: a._membership.rebalancing, b)  # the coordinator waits for a
        fill(broker, 60, 6)
        wait_until(lambda: got.extend(a.consume(100, 0)) or len(got) == 66)
        assert a.assignment()
        poll_until(lambda: len(a.assignment()) == len(b.assignment()) == 3, a, b)
        a.commit(asynchronous=False)
        poll_until(lambda: a._membership.settled, a, b)
        events.clear()
        mine = a.assignment()
        group = broker.server.groups.coordinator.groups["g"]
        group.generation += 1
        with pytest.raises(BrokerError, match="ILLEGAL_GENERATION"):
            a.commit(offsets={mine[0]: 1}, asynchronous=False)
        poll_until(lambda: len(events) >= 2 and len(a.assignment()) == 3, a, b)
        assert events[0] == ("on_lost", mine)
        with pytest.raises(ConfigError, match="incremental_assign"):
            a._call_back(lambda c, tps: c.assign(tps), mine)
