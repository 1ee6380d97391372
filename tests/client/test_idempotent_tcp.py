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
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.connection import Connection
from tests.client.conftest import produce_answer

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
    writer.append(batch(0))  # by which the broker knows the producer
    proxy.once(PRODUCE, "silent", times=1000)
    for i in range(1, 21):
        writer.submit(batch(i))
    until = time.monotonic() + (20 if kind == "kdirect" else 0.5)
    while proxy.requests.count(PRODUCE) < 21 and time.monotonic() < until:
        writer.poll()
        time.sleep(0.01)
    assert proxy.requests.count(PRODUCE) == 1 + (5 if kind == "kafka" else 20)
    writer.abandon()


def test_nothing_passes_the_first_batch_of_a_producer_id(broker, proxy, appender):
    """The broker, which has no sequence of the producer yet, would take the second as the first:
    a leader that resigns and leads again a moment later refuses the first alone."""
    writer = appender(lambda partition: False)
    proxy.once(PRODUCE, produce_answer(TP, ErrorCode.NOT_LEADER_OR_FOLLOWER))
    for i in range(4):
        writer.submit(batch(i))
    writer.flush(20_000)
    assert proxy.requests.count(PRODUCE) == 5
    assert in_log(broker) == [b"%d" % i for i in range(4)]


def test_nothing_passes_the_first_batch_of_a_later_producer_id(broker, proxy, appender):
    writer = appender(lambda partition: False)
    writer.append(batch(0))
    last = ProducerIdentity(writer._identity.producer_id, 32767, lambda: (1 << 40, 0))
    last.renew()  # its epochs are used up, so it has another producer id from here on
    writer._identity = last
    proxy.once(PRODUCE, produce_answer(TP, ErrorCode.NOT_LEADER_OR_FOLLOWER))
    for i in range(1, 4):
        writer.submit(batch(i))
    writer.flush(20_000)
    assert in_log(broker) == [b"%d" % i for i in range(4)]


def test_what_was_committed_before_the_connection_broke_is_there_once(
    broker, proxy, appender, kafka
):
    """Kafka answers a repetition that is older than its last five batches as it answers a gap."""
    writer = appender(lambda partition: partition.base_offset < 0)
    writer.append(batch(0))
    for i in range(1, 21):
        writer.submit(batch(i))
    assert committed(broker, 6)
    time.sleep(0.2)
    writer._connection.abort(
        BrokerUnavailableError("the connection broke before the answers were read", hint="")
    )
    writer.flush(20_000)
    assert in_log(broker) == [b"%d" % i for i in range(21)]


def test_what_may_be_committed_gets_no_new_number(broker, proxy, appender, kafka):
    """Kafka has forgotten the producer, as after retention."""
    lost = []
    writer = appender(lambda partition: bool(lost) and partition.base_offset < 4)
    writer.append(batch(0))
    appends = [writer.submit(batch(i)) for i in range(1, 4)]
    assert committed(broker, 4)
    time.sleep(0.2)
    lost.append(True)
    writer._connection.abort(
        BrokerUnavailableError("the connection broke before the answers were read", hint="")
    )
    with pytest.raises(DeliveryError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
        writer.flush(20_000)
    assert all(a.done and a.error.maybe_committed for a in appends)
    assert writer.append(batch(4)) == 4
    assert in_log(broker) == [b"%d" % i for i in range(5)]
