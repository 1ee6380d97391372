"""Commits of offsets by WRITEs over verbs: what was acknowledged is seen by others and after a
kill, and a member whose slot has ended goes on without a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import confluent_kafka

import kdirect
from kdirect.client.session import Session
from kdirect.model import TopicPartition
from tests.support import BrokerProcess
from tests.verbs.conftest import WAIT_S, eventually


def member(session: Session, topic: str, group: str) -> kdirect.Consumer:
    settings = {**session.settings, "group.id": group, "enable.auto.commit": False}
    consumer = kdirect.Consumer(settings, session=session)
    consumer.subscribe([topic])
    return consumer


def have(each: int, *consumers: kdirect.Consumer) -> None:
    """Poll until each of them has so many partitions."""

    def formed() -> bool:
        for consumer in consumers:
            consumer.poll(0.05)
        return all(len(c.assignment()) == each for c in consumers)

    eventually(formed)


def direct(consumer: kdirect.Consumer) -> int:
    return int(consumer.statistics()["direct_commits"])


def seen(broker: BrokerProcess, group: str, *tps: TopicPartition) -> dict[TopicPartition, int]:
    """What a stock client is told that the group has committed."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": group}
    consumer = confluent_kafka.Consumer(settings)
    asked = [confluent_kafka.TopicPartition(tp.topic, tp.partition) for tp in tps]
    try:
        found = consumer.committed(asked, WAIT_S)
    finally:
        consumer.close()
    return {TopicPartition(x.topic, x.partition): x.offset for x in found}


def test_commits_are_seen_by_others_and_after_a_kill(
    own_broker: Callable[..., BrokerProcess], connect: Callable[..., Session]
) -> None:
    broker = own_broker()
    session = connect(broker)
    session.admin.create_topic("c", 2)
    one, two = TopicPartition("c", 0), TopicPartition("c", 1)
    with member(session, "c", "g") as consumer:
        have(2, consumer)
        for offset in range(1, 40):
            consumer.commit(offsets={one: offset, two: 2 * offset}, asynchronous=False)
        assert direct(consumer) == 38, "the first one goes over TCP"
        assert seen(broker, "g", one, two) == {one: 39, two: 78}
        broker.kill()
        broker.start()
        assert seen(broker, "g", one, two) == {one: 39, two: 78}


def test_a_slot_ends_with_its_generation(
    broker: BrokerProcess, connect: Callable[..., Session], topic: Callable[..., Any]
) -> None:
    tp = topic(2)
    other = TopicPartition(tp.topic, 1)
    first, second = connect(broker), connect(broker)
    with member(first, tp.topic, tp.topic) as a:
        have(2, a)
        for offset in range(1, 5):
            a.commit(offsets={tp: offset, other: offset}, asynchronous=False)
        before = direct(a)
        assert before == 3
        with member(second, tp.topic, tp.topic) as b:
            have(1, a, b)
            mine = next(iter(a.assignment()))
            theirs = next(iter(b.assignment()))
            for offset in range(10, 14):
                a.commit(offsets={mine: offset}, asynchronous=False)
                b.commit(offsets={theirs: 10 * offset}, asynchronous=False)
            assert direct(a) > before and direct(b) > 0, "each has a slot of the next generation"
            assert seen(broker, tp.topic, mine, theirs) == {mine: 13, theirs: 130}
