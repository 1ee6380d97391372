"""One session and two brokers behind one metadata answer: each partition is found at its leader,
over that broker's own transport, and a broker that is lost takes nothing from the other."""

from __future__ import annotations

import copy

import pyarrow as pa
import pytest

import kdirect
from kdirect.client.connections import SharedConnections
from kdirect.client.session import Session
from kdirect.errors import KdirectError
from kdirect.format import protocol
from kdirect.model import TopicPartition
from kdirect.options import CLIENT
from kdirect.wire.connection import Connection
from kdirect.wire.environment import Environment

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


class OneMetadataAnswer(Environment):
    """Connections whose answers to Metadata are those of all brokers together."""

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self.known: list = [None] * len(addresses)
        environment = self

        class Merging(Connection):
            def request(self, message, timeout_ms=None):
                if not isinstance(message, protocol.MetadataRequest):
                    return super().request(message, timeout_ms)
                for i, (host, port) in enumerate(addresses):
                    if (host, port) == (self.host, self.port):
                        answer = super().request(message, timeout_ms)
                    else:
                        try:
                            with Connection(host, port, timeout_ms=5_000) as other:
                                answer = other.request(copy.copy(message), timeout_ms)
                        except KdirectError:
                            continue  # it is gone: what it said last stays
                    environment.known[i] = environment.named(i, answer)
                merged = environment.known[0]
                for other in environment.known[1:]:
                    merged.brokers = [*merged.brokers, *other.brokers]
                    found = {t.name: t for t in merged.topics if not t.error_code}
                    found |= {t.name: t for t in other.topics if not t.error_code}
                    missing = {t.name: t for t in [*merged.topics, *other.topics]}
                    merged.topics = list((missing | found).values())
                return merged

        self._connection = Merging

    @staticmethod
    def named(i, answer):
        """A broker's answer, with a node id that no other has."""
        for broker in answer.brokers:
            broker.node_id = i
        for topic in answer.topics:
            for partition in topic.partitions:
                partition.leader_id = i
        return answer

    def connect(self, host, port, client_id, timeout_ms, **limits):
        return self._connection(host, port, client_id, timeout_ms, **limits)


def address(broker):
    host, _, port = broker.bootstrap_servers.rpartition(":")
    return host, int(port)


def put(broker, tp, values):
    with kdirect.Producer(broker.bootstrap_servers) as producer:
        for value in values:
            producer.produce(tp.topic, value, partition=0)


@pytest.fixture
def started(tmp_path):
    """start(transports of each): (brokers with a topic each, a session that knows both)."""
    opened: list = []

    def start(*transports, **settings):
        brokers = []
        for i, names in enumerate(transports):
            broker = kdirect.Broker(
                log_dirs=[str(tmp_path / f"log{i}")],
                listeners="127.0.0.1:0",
                rdma_transports=names,
                rdma_device="nosuch0",
            )
            broker.start()
            opened.append(broker)
            brokers.append(broker)
        for broker, tp in zip(brokers, (A, B), strict=True):
            kdirect.connect(broker.bootstrap_servers).admin.create_topic(tp.topic, 1)
        servers = [b.bootstrap_servers for b in brokers]
        resolved = CLIENT.resolve(
            {"bootstrap.servers": ",".join(servers), "rdma.device": "nosuch0", **settings}
        )
        environment = OneMetadataAnswer([address(b) for b in brokers])
        session = Session(SharedConnections(resolved, environment))
        opened.append(session)
        return brokers, session

    yield start
    for each in reversed(opened):
        (each.close if isinstance(each, Session) else each.stop)()


def values_of(reader):
    with reader:
        return [v for batch in reader for v in batch.column("value").to_pylist()]


def test_one_consumer_reads_one_broker_over_shm_and_the_other_over_tcp(started):
    (first, second), session = started("shm", "verbs")
    put(first, A, [b"a%d" % i for i in range(100)])
    put(second, B, [b"b%d" % i for i in range(100)])
    assert (session.transport_to(A), session.transport_to(B)) == ("shm", "tcp")
    with kdirect.Consumer(session.settings, session=session) as consumer:
        consumer.assign({A: 0, B: 0})
        got = {A: [], B: []}
        for _ in range(200):
            message = consumer.poll(10)
            got[TopicPartition(message.topic(), message.partition())].append(message.value())
        assert got == {A: [b"a%d" % i for i in range(100)], B: [b"b%d" % i for i in range(100)]}
        counted = consumer.statistics()
        assert counted["reads"] >= 1 and counted["fetches"] >= 1
    assert session.watermarks([A, B]) == {A: (0, 100), B: (0, 100)}
    assert values_of(session.reader(A, 90, 100)) == [b"a%d" % i for i in range(90, 100)]
    assert values_of(session.reader(B, 90, 100)) == [b"b%d" % i for i in range(90, 100)]


def test_each_broker_has_a_queue_pair_and_slots_of_its_own(started):
    (first, second), session = started("shm", "shm")
    put(first, A, [b"a"])
    put(second, B, [b"b"])
    assert session.watermarks([B, A]) == {A: (0, 1), B: (0, 1)}
    put(second, B, [b"b"])
    assert session.watermarks([A, B]) == {A: (0, 1), B: (0, 2)}
    with kdirect.Consumer(session.settings, session=session) as consumer:
        consumer.assign({A: 0, B: 0})
        assert sorted(consumer.poll(10).value() for _ in range(3)) == [b"a", b"b", b"b"]
        assert consumer.statistics()["access_requests"] == 2
        assert consumer.poll(0) is None
        put(first, A, [b"later"])
        assert consumer.poll(10).value() == b"later"
        put(second, B, [b"later still"])
        assert consumer.poll(10).value() == b"later still"


def test_a_broker_that_is_lost_leaves_the_other_as_it_was(started):
    (first, second), session = started("shm", "shm", **{"connect.timeout.ms": 200})
    put(first, A, [b"a0"])
    put(second, B, [b"b0"])
    with kdirect.Consumer(session.settings, session=session) as consumer:
        consumer.assign({A: 0, B: 0})
        assert sorted(consumer.poll(10).value() for _ in range(2)) == [b"a0", b"b0"]
        kept = consumer._reading.paths.direct.fetcher_of(A)
        second.stop()
        put(first, A, [b"a%d" % i for i in range(1, 50)])
        got = []
        while len(got) < 49:
            message = consumer.poll(20)
            assert message is not None
            got.append(message.value())
        assert got == [b"a%d" % i for i in range(1, 50)]
        assert consumer._reading.paths.direct.fetcher_of(A) is kept
        assert kept.access_requests == 1, "its files were entered once"
    with session.reader(A, 0, 50) as reader:
        assert pa.Table.from_batches(reader).num_rows == 50
