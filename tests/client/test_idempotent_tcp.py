"""An idempotent writer and a broker that remembers five batches of each producer, as Apache Kafka
does: kdirect's own, whose answers to older repetitions are turned into Kafka's."""

from __future__ import annotations

import time

import pytest

from kdirect.client import connect
from kdirect.client.gather import RecordBuilder
from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.tcp_append import TcpAppender
from kdirect.errors import BrokerUnavailableError, DeliveryError
from kdirect.format.protocol import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.connection import Connection

PRODUCE = 0
TP = TopicPartition("t", 0)


@pytest.fixture
def kafka(monkeypatch):
    monkeypatch.setattr(Connection, "is_kdirect", property(lambda self: False))


@pytest.fixture
def appender(broker, proxy):
    """Makes appenders of one producer id; `forgets(answer)` says whether Kafka would not know this
    duplicate any more."""
    session = connect({"bootstrap.servers": proxy.bootstrap_servers, "transport": "tcp"})
    session.admin.create_topic("t")
    made = []

    def make(forgets):
        identity = ProducerIdentity(*session.new_producer_id(), session.new_producer_id)
        made.append(TcpAppender(session.cluster, TP, "all", 20_000, identity=identity))
        plain = made[-1]._answer

        def answer(pending):
            partition = plain(pending)
            if forgets(partition):
                partition.error_code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            return partition

        made[-1]._answer = answer
        return made[-1]

    yield make
    session.close()


def batch(i):
    builder = RecordBuilder()
    builder.add(None, b"%d" % i, None, 1)
    return builder.take()


def in_log(broker):
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"})
    reader = session.reader(TP, 0, session.latest_offsets([TP])[TP])
    return [value for rows in reader.batches() for value in rows.column("value").to_pylist()]


def committed(broker, count):
    until = time.monotonic() + 20
    while len(in_log(broker)) < count and time.monotonic() < until:
        time.sleep(0.01)
    return len(in_log(broker)) >= count


@pytest.mark.parametrize("kind", ["kafka", "kdirect"])
def test_no_more_is_under_way_than_the_broker_remembers(request, broker, proxy, appender, kind):
    if kind == "kafka":
        request.getfixturevalue("kafka")
    writer = appender(lambda partition: False)
    proxy.once(PRODUCE, "silent", times=1000)
    for i in range(20):
        writer.submit(batch(i))
    until = time.monotonic() + (20 if kind == "kdirect" else 0.5)
    while proxy.requests.count(PRODUCE) < 20 and time.monotonic() < until:
        writer.poll()
        time.sleep(0.01)
    assert proxy.requests.count(PRODUCE) == (5 if kind == "kafka" else 20)
    writer.abandon()


def test_what_was_committed_before_the_connection_broke_is_there_once(
    broker, proxy, appender, kafka
):
    """Kafka answers a repetition that is older than its last five batches as it answers a gap."""
    writer = appender(lambda partition: partition.base_offset < 0)
    proxy.once(PRODUCE, None)
    for i in range(20):
        writer.submit(batch(i))
    assert committed(broker, 5)
    time.sleep(0.2)
    writer._connection.abort(
        BrokerUnavailableError("the connection broke before the answers were read", hint="")
    )
    writer.flush(20_000)
    assert in_log(broker) == [b"%d" % i for i in range(20)]


def test_what_may_be_committed_gets_no_new_number(broker, proxy, appender, kafka):
    """Kafka has forgotten the producer, as after retention."""
    lost = []
    writer = appender(lambda partition: bool(lost) and partition.base_offset < 3)
    appends = [writer.submit(batch(i)) for i in range(3)]
    assert committed(broker, 3)
    time.sleep(0.2)
    lost.append(True)
    writer._connection.abort(
        BrokerUnavailableError("the connection broke before the answers were read", hint="")
    )
    with pytest.raises(DeliveryError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
        writer.flush(20_000)
    assert all(a.done and a.error.maybe_committed for a in appends)
    assert writer.append(batch(3)) == 3
    assert in_log(broker) == [b"%d" % i for i in range(4)]
