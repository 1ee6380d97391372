"""kdirect's consumer as a member of groups of KIP-848 (group.protocol=consumer), with brokers and
librdkafka's members."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

import confluent_kafka
import pytest

import kdirect
from kdirect.client import connect, group_member
from kdirect.client.consumer_member import ConsumerMember
from kdirect.errors import BrokerError, ConfigError, KdirectError, ProtocolError, UnknownTopicError
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from tests.support import poll_until, wait_until

PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])
BROKER = {
    "group_consumer_session_timeout_ms": 6000,
    "group_consumer_heartbeat_interval_ms": 100,
}
TPS = [TopicPartition("t", i) for i in range(4)]


def settings(broker, **changed):
    return {
        "bootstrap.servers": broker.bootstrap_servers,
        "group.id": "g",
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        **{name.replace("_", "."): value for name, value in changed.items()},
    }


@pytest.fixture
def made():
    """(broker in this process, factory of members)."""
    members = []
    with kdirect.Broker(**BROKER) as broker:
        fill(broker, "t", 4)

        def make(**changed):
            members.append(kdirect.Consumer(settings(broker, **changed)))
            return members[-1]

        yield broker, make
        for member in members:
            member.close()


def fill(broker, name, partitions=4, first=0, count=0):
    with connect(broker.bootstrap_servers) as session:
        session.admin.create_topic(name, partitions, if_not_exists=True)
        with session.producer() as producer:
            for i in range(first, first + count):
                producer.produce(name, b"%d" % i, partition=i % partitions)


def callbacks(events, name=""):
    return {
        kind: lambda c, tps, kind=kind: events.append((name + kind, tps))
        for kind in ("on_assign", "on_revoke", "on_lost")
    }


def group(broker):
    return broker.server.groups.consumer.groups["g"]


def stock(broker, **changed):
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "g",
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            **changed,
        }
    )


def owned(stock_consumer):
    return {TopicPartition(tp.topic, tp.partition) for tp in stock_consumer.assignment()}


@PATHS
def test_beside_a_member_of_librdkafka_what_stays_is_read_on(made, transport):
    broker, make = made
    fill(broker, "t", count=400)
    events: list = []
    a = make(transport=transport)
    a.subscribe(["t"], **callbacks(events))
    read: Counter = Counter()

    def take_all():
        for consumer in members:
            read.update(m.value() for m in consumer.consume(100, 0.02) if m.error() is None)

    members = [a]
    wait_until(lambda: take_all() or len(read) == 400)
    assert events == [("on_assign", TPS)]
    a.commit(asynchronous=False)
    b = stock(broker)
    b.subscribe(["t"])
    members.append(b)
    wait_until(lambda: take_all() or (len(owned(b)) == 2 and group(broker).state() == "Stable"))
    kept = set(a.assignment())
    assert len(kept) == 2 and kept | owned(b) == set(TPS)
    assert events[1:] == [("on_revoke", sorted(set(TPS) - kept))]  # and nothing of what stays
    fill(broker, "t", first=400, count=400)
    wait_until(lambda: take_all() or len(read) == 800)
    assert set(read.values()) == {1}
    b.close()
    members.pop()
    wait_until(lambda: take_all() or len(a.assignment()) == 4)
    assert events[2:] == [("on_assign", sorted(set(TPS) - kept))]
    fill(broker, "t", first=800, count=100)
    wait_until(lambda: take_all() or len(read) == 900)
    assert set(read.values()) == {1}  # what b had read was committed when it left


def test_expressions_are_matched_by_the_broker(made):
    broker, make = made
    fill(broker, "t2", 2)
    c = make()
    c.subscribe(["^t[0-9]+", "t", r"^no\d?"])  # of RE2, for the whole name
    poll_until(lambda: len(c.assignment()) == 6, c)
    assert group(broker).members[c.memberid()].regex == r"(^t[0-9]+)|(^no\d?)"
    fill(broker, "t33", 1, count=1)
    fill(broker, "t33x", 1)
    poll_until(lambda: TopicPartition("t33", 0) in c.assignment(), c)
    assert len(c.assignment()) == 7
    with connect(broker.bootstrap_servers) as session:  # another topic of the same name
        session.admin.delete_topic("t2")
        with pytest.raises(UnknownTopicError, match="deleted while it was read"):
            poll_until(lambda: False, c)
        session.admin.create_topic("t2", 3)
    while len(c.assignment()) != 8:
        with contextlib.suppress(UnknownTopicError):  # told once for each partition
            c.poll(0.01)
    c.subscribe(["^("])
    with pytest.raises(BrokerError, match="INVALID_REGULAR_EXPRESSION"):
        poll_until(lambda: False, c)


def test_commits_over_rdma_follow_the_epoch(made):
    broker, make = made
    a = make(transport="shm", enable_auto_commit=False)
    a.subscribe(["t"])
    poll_until(lambda: len(a.assignment()) == 4, a)
    for offset in range(1, 10):
        a.commit(offsets={TPS[0]: offset}, asynchronous=False)
    assert a.statistics()["direct_commits"] == 8
    epoch = a.consumer_group_metadata().generation
    b = make(transport="tcp", enable_auto_commit=False)
    b.subscribe(["t"])
    poll_until(lambda: len(b.assignment()) == 2 and group(broker).state() == "Stable", a, b)
    assert a.consumer_group_metadata().generation > epoch
    mine = a.assignment()[0]
    for offset in range(20, 30):
        a.commit(offsets={mine: offset}, asynchronous=False)
    assert a.statistics()["direct_commits"] == 17
    assert b.committed([mine]) == {mine: 29}


def test_a_commit_with_the_epoch_of_before_is_made_once_more(made):
    broker, _ = made
    told: list = []
    c = kdirect.Consumer(
        settings(broker, transport="tcp", enable_auto_commit=False),
        on_commit=lambda error, offsets: told.append((error, offsets)),
    )
    with c:
        c.subscribe(["t"])
        poll_until(lambda: len(c.assignment()) == 4, c)
        membership = c._membership
        epoch, membership.generation = membership.generation, 0
        c.commit(offsets={TPS[0]: 3}, asynchronous=True)
        membership.generation = 0
        c.commit(offsets={TPS[0]: 5, TPS[1]: 7}, asynchronous=True)
        # The next heartbeat brings the epoch; commit and lookup wait for it.
        poll_until(lambda: len(told) == 2, c)
        assert [error for error, _ in told] == [None, None]
        membership.generation = 0
        assert c.committed(TPS[:2]) == {TPS[0]: 5, TPS[1]: 7}
        assert membership.generation == epoch


def test_a_member_that_does_not_poll_loses_what_it_has(made):
    broker, make = made
    events: list = []
    c = make(max_poll_interval_ms=400)
    c.subscribe(["t"], **callbacks(events))
    poll_until(lambda: len(c.assignment()) == 4, c)
    wait_until(lambda: not group(broker).members)
    with pytest.raises(BrokerError, match="ILLEGAL_GENERATION"):
        c.commit(offsets={TPS[0]: 1}, asynchronous=False)
    events.clear()
    poll_until(lambda: len(events) == 2, c)
    assert events == [("on_lost", TPS), ("on_assign", TPS)]
    with connect(broker.bootstrap_servers):  # a member that is fenced joins again, too
        group(broker).members[c.memberid()].epoch = 77
        events.clear()
        poll_until(lambda: len(events) == 2, c)
        assert [kind for kind, _ in events] == ["on_lost", "on_assign"]


def test_static_members_come_back_to_what_they_had(made):
    broker, make = made
    a, b = make(group_instance_id="a"), make(group_instance_id="b")
    a.subscribe(["t"])
    b.subscribe(["t"])
    poll_until(lambda: len(a.assignment()) == len(b.assignment()) == 2, a, b)
    other = make(group_instance_id="a")
    other.subscribe(["t"])
    with pytest.raises(BrokerError, match="UNRELEASED_INSTANCE_ID"):
        poll_until(lambda: False, other)
    had, epoch = set(a.assignment()), group(broker).epoch
    other.close()
    a.close()
    a = make(group_instance_id="a")
    a.subscribe(["t"])
    poll_until(lambda: len(a.assignment()) == 2, a, b)
    assert set(a.assignment()) == had and group(broker).epoch == epoch


def test_it_goes_on_after_the_broker_was_killed(broker_process):
    process = broker_process(**BROKER)
    fill(process, "t", count=40)
    events: list = []
    with kdirect.Consumer(settings(process, enable_auto_commit=False)) as c:
        c.subscribe(["t"], **callbacks(events))
        read = {m.value() for m in take(c, 40)}
        c.commit(asynchronous=False)
        process.kill()
        time.sleep(0.3)
        process.start()
        fill(process, "t", first=40, count=40)
        read |= {m.value() for m in take(c, 40)}
        assert read == {b"%d" % i for i in range(80)}
        c.commit(asynchronous=False)
        assert sum(c.committed(TPS).values()) == 80
        assert [kind for kind, _ in events] == ["on_assign"]  # its epoch was kept


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_leaves_a_dead_coordinator_without_long_patience(protocol, monkeypatch):
    monkeypatch.setattr(group_member, "LEAVE_MS", 200.0)
    with kdirect.Broker(**BROKER) as broker:
        fill(broker, "t")
        c = kdirect.Consumer(settings(broker, group_protocol=protocol, enable_auto_commit=False))
        c.subscribe(["t"])
        poll_until(lambda: len(c.assignment()) == 4, c)
    begun = time.monotonic()
    c.close()
    assert time.monotonic() - begun < 10, "request.timeout.ms is 30 s"


def take(consumer, count, seconds=30):
    out: list = []
    end = time.monotonic() + seconds
    while len(out) < count:
        assert time.monotonic() < end, len(out)
        try:
            message = consumer.poll(0.1)
        except KdirectError as e:
            assert e.retriable, e
            continue
        if message is not None:
            out.append(message)
    return out


def test_mistakes_are_named(made):
    broker, make = made
    for name, value in (
        ("partition_assignment_strategy", "range"),
        ("heartbeat_interval_ms", 100),
    ):
        with pytest.raises(ConfigError, match=r"for group\.protocol=classic"):
            make(**{name: value})
    with pytest.raises(ConfigError, match=r"for group\.protocol=consumer"):
        make(group_protocol="classic", group_remote_assignor="range")
    c = make(group_remote_assignor="nice")
    c.subscribe(["t"])
    with pytest.raises(BrokerError, match="UNSUPPORTED_ASSIGNOR"):
        poll_until(lambda: False, c)

    def assign(consumer, tps):
        with pytest.raises(ConfigError, match="incremental_assign"):
            consumer.assign(tps)
        consumer.incremental_assign(dict.fromkeys(tps, 0))

    c = make(group_remote_assignor="range")
    c.subscribe(["t"], on_assign=assign)
    poll_until(lambda: len(c.assignment()) == 4, c)
    assert group(broker).assignor == "range"


def test_a_broker_without_the_protocol_is_told():
    with kdirect.Broker(group_coordinator_rebalance_protocols="classic") as broker:
        fill(broker, "t", 1)
        with kdirect.Consumer(settings(broker)) as c:
            c.subscribe(["t"])
            with pytest.raises(ProtocolError, match="ConsumerGroupHeartbeat"):
                poll_until(lambda: False, c)


# -- the rules -------------------------------------------------------------------------------------

A, B = (("id", 0), ("id", 1))
BOTH, ONE = frozenset((A, B)), frozenset((A,))


def joined(given=BOTH):
    rules = ConsumerMember(1000, 5000)
    rules.subscribe(frozenset("t"))
    assert rules.answered(rules.heartbeat(0), 1, given) and rules.take(given, given)
    assert rules.answered(rules.heartbeat(0), 1, None) and not rules.has_to_say
    return rules


def test_what_a_lost_answer_has_brought_is_not_taken():
    rules = joined(ONE)
    assert rules.answered(rules.heartbeat(10), 2, BOTH)
    assert rules.failed(rules.heartbeat(20))
    assert not rules.take(BOTH, BOTH) and rules.owned == rules.wanted == ONE
    say = rules.heartbeat(30)
    assert say.full and say.owned == ONE
    assert not rules.take(ONE, ONE)  # while what is owned is under way
    assert rules.answered(say, 2, BOTH) and rules.take(BOTH, BOTH) and rules.owned == BOTH


def test_an_earlier_life_is_not_heard():
    rules = joined()
    say = rules.heartbeat(10)
    rules.begin()
    assert not rules.answered(say, 2, BOTH) and rules.wanted is None and rules.epoch == 0
    assert not rules.refused(say, ErrorCode.FENCED_MEMBER_EPOCH)
    assert rules.heartbeat(20).full


def test_a_member_that_is_not_answered_gives_up_in_time():
    rules = joined()
    assert not rules.is_late(800) and rules.is_late(801)
    assert rules.answered(rules.heartbeat(700), 1, ONE)
    assert not rules.is_late(1500)
    for now in range(800, 4000, 100):
        assert rules.answered(rules.heartbeat(now), 1, None)
    assert not rules.is_late(4000) and rules.is_late(4001)  # of its rebalance timeout
    rules.gave_back(ONE)
    assert rules.heartbeat(4001).owned == ONE
