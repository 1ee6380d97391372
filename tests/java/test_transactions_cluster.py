"""Kafka's own tests of transactions that need brokers to die, with Java's clients on three of
ours."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

import kdirect
from tests.java.test_transactions import FENCED, epoch_of, error_of, send, values_of
from tests.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PROPERTIES = {
    "zookeeper.session.timeout.ms": 3000,
    "replica.lag.time.max.ms": 3000,
    "transaction.state.log.num.partitions": 1,
    "offsets.topic.num.partitions": 1,
    "group.initial.rebalance.delay.ms": 0,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
}
STATE = "__transaction_state"
OFFSETS = "__consumer_offsets"


@pytest.fixture(scope="module")
def cluster():
    with kdirect.Cluster(brokers=3, properties=PROPERTIES) as started:
        yield started


@pytest.fixture
def session(cluster):
    with kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers}) as made:
        yield made


def leader_of(session: Any, topic: str) -> int:
    (row,) = session.admin.describe_topic(topic).leaders
    return int(row.leader)


def all_are_back(session: Any) -> None:
    wait_until(lambda: session.admin.health().is_well, "all replicas are in sync", 60, 0.1)


def test_a_producer_that_could_not_begin_keeps_nobody_out(java, cluster, session, request):
    """With two brokers dead the log of transactions takes nothing, so the second producer gives
    up.  Once they are back, the next one begins, and the first one is fenced."""
    servers = cluster.bootstrap_servers
    name = f"fence-{request.node.callspec.id.replace('.', '-')}"
    session.admin.create_topic(name, 2, 3)
    first = java.producer(servers, transactional_id=name)
    first.initTransactions()
    first.beginTransaction()
    send(java, first, name, "first 1", "first 2")
    first.commitTransaction()
    admin = java.admin(servers)
    before = epoch_of(java, admin, name)
    coordinator = leader_of(session, STATE)
    others = [n for n in cluster.node_ids if n != coordinator]
    for node_id in others:
        cluster.kill(node_id)
    second = java.producer(servers, transactional_id=name, max_block_ms=1500)
    assert error_of(second.initTransactions) == "TimeoutException"
    second.close(java.milliseconds(0))
    for node_id in others:
        cluster.start(node_id)
    all_are_back(session)
    third = java.producer(servers, transactional_id=name)
    third.initTransactions()
    third.beginTransaction()
    send(java, third, name, "third 1", "third 2")
    third.commitTransaction()
    assert epoch_of(java, admin, name) > before
    first.beginTransaction()
    assert error_of(lambda: java.get(send(java, first, name, "late")[0])) in FENCED
    assert values_of(java, servers, name) == ["first 1", "first 2", "third 1", "third 2"]
    first.close(java.milliseconds(0))
    for client in (third, admin):
        client.close(java.milliseconds(1000))


def test_records_are_copied_exactly_once_while_brokers_die(java, cluster, session, request):
    """The coordinators of the transaction and of the group, each killed within a transaction."""
    servers, count = cluster.bootstrap_servers, 60
    name = f"copy-{request.node.callspec.id.replace('.', '-')}"
    session.admin.create_topic(name, 2, 3)
    session.admin.create_topic(f"{name}-in", 1, 3)
    with session.producer() as plain:
        for i in range(count):
            plain.produce(f"{name}-in", b"%d" % i)
    consumer = java.consumer(
        servers, group_id=name, enable_auto_commit="false", max_poll_records=10
    )
    source = java.partition(f"{name}-in", 0)
    consumer.assign([source])
    producer = java.producer(servers, transactional_id=name)
    producer.initTransactions()
    done, turn, to_die = 0, 0, {2: STATE, 4: OFFSETS}
    at = java.kafka.clients.consumer.OffsetAndMetadata
    while done < count:
        records = list(java.poll(consumer))
        if not records:
            continue
        turn += 1
        died = None
        producer.beginTransaction()
        try:
            send(java, producer, name, *(record.value() for record in records))
            if turn in to_die:
                died = leader_of(session, to_die[turn])
                cluster.kill(died)
            where = {source: at(records[-1].offset() + 1)}
            producer.sendOffsetsToTransaction(where, consumer.groupMetadata())
            producer.commitTransaction()
            done = records[-1].offset() + 1
        except Py4JJavaError:  # it is to be aborted, and what it has read is read again
            producer.abortTransaction()
            consumer.seek(source, done)
        if died is not None:
            cluster.start(died)
            all_are_back(session)
    assert turn > max(to_die)
    assert consumer.committed({source})[source].offset() == count
    assert sorted(map(int, values_of(java, servers, name))) == list(range(count))
    consumer.close()
    producer.close(java.milliseconds(1000))
