"""One session and two brokers of one cluster: each partition has its own leader's queue pair and
slots, and a broker that is lost takes nothing from the other."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pyarrow as pa
import pytest

import kdirect
from kdirect.broker.cluster_view import ClusterLayout, Node
from kdirect.errors import BrokerUnavailableError
from kdirect.model import TopicPartition

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


def put(broker, tp, values):
    """Ask that broker first, over TCP."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
    with kdirect.Producer(settings) as producer:
        for value in values:
            producer.produce(tp.topic, value, partition=0)


@pytest.fixture
def started(tmp_path):
    """start(transports of each): (brokers that lead `a` and `b`, a session that knows both)."""
    with ExitStack() as stack:

        def start(*transports, **settings):
            with ExitStack() as held:
                ports = [
                    held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                    for _ in transports
                ]
            nodes = [Node(i, "127.0.0.1", port) for i, port in enumerate(ports, 1)]
            layout = ClusterLayout({nodes[0]: {"a": 1}, nodes[1]: {"b": 1}})
            brokers = [
                stack.enter_context(
                    kdirect.Broker(
                        tmp_path / f"log{node.node_id}",
                        f"{node.host}:{node.port}",
                        layout=layout,
                        properties={
                            "node.id": node.node_id,
                            "rdma.transports": names,
                            "rdma.device": "nosuch0",
                        },
                    )
                )
                for node, names in zip(nodes, transports, strict=True)
            ]
            servers = ",".join(b.bootstrap_servers for b in brokers)
            given = {"bootstrap.servers": servers, "rdma.device": "nosuch0", **settings}
            return brokers, stack.enter_context(kdirect.connect(given))

        yield start


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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_where_offsets_cannot_be_asked_for_the_error_names_partition_and_broker(started, transport):
    names = {"shm": "shm", "tcp": ""}[transport]
    (first, second), session = started(
        names, names, **{"connect.timeout.ms": 200, "request.timeout.ms": 400}
    )
    put(first, A, [b"a"])
    put(second, B, [b"b"])
    assert session.watermarks([A, B]) == {A: (0, 1), B: (0, 1)}
    address = second.bootstrap_servers
    second.stop()
    for ask in (session.watermarks, session.earliest_offsets, session.latest_offsets):
        for tps in ([A, B], [B, A]):
            with pytest.raises(BrokerUnavailableError, match=rf"^b-0: .*{address}") as raised:
                ask(tps)
            assert raised.value.topic_partition == B
    assert session.watermarks([A]) == {A: (0, 1)}
    assert session.earliest_offsets([A]) == {A: 0}
    assert session.offsets_for_times({A: 0}) == {A: 0}


def test_a_leader_that_is_lost_keeps_no_other_from_being_asked(started):
    """Over TCP: broker `b` is asked although the leader of `a`, which is first, is gone."""
    (first, second), session = started("", "", **{"request.timeout.ms": 10_000})
    put(second, B, [b"b"])
    assert session.watermarks([A, B]) == {A: (0, 0), B: (0, 1)}
    first.stop()
    asked = []
    original = session.cluster.connection_to

    def connection_to(node):
        asked.append(node.port)
        return original(node)

    cluster = session.cluster
    cluster.connection_to = connection_to
    cluster.timeout_ms = 300
    with pytest.raises(BrokerUnavailableError, match=r"^a-0: "):
        session.earliest_offsets([A, B])
    assert len(set(asked[:2])) == 2
