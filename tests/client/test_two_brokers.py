"""Two brokers of one cluster: different topics behind one metadata answer, reached over different
transports.

Broker 1 leads `near` and offers shm; broker 2 leads `far` and offers TCP only.  Both lead two
partitions.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.broker.cluster_view import ClusterLayout, Node
from kdirect.errors import BrokerError, KdirectError
from kdirect.model import TopicPartition

NEAR = [TopicPartition("near", i) for i in range(2)]
FAR = [TopicPartition("far", i) for i in range(2)]
PARTITIONS = [*NEAR, *FAR]
RECORDS = 50


class Pair:
    """Both brokers; `bootstrap(i)` names the one to ask first."""

    def __init__(self, directory: Path) -> None:
        with ExitStack() as held:
            ports = [
                held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for _ in range(2)
            ]
        nodes = [Node(i, "127.0.0.1", port) for i, port in enumerate(ports, 1)]
        layout = ClusterLayout({nodes[0]: {"near": 2}, nodes[1]: {"far": 2}})
        self.brokers = [
            kdirect.Broker(
                directory / f"log{node.node_id}",
                f"{node.host}:{node.port}",
                layout=layout,
                properties={"node.id": node.node_id, "rdma.transports": transports},
            )
            for node, transports in zip(nodes, ("shm", ""), strict=True)
        ]

    def bootstrap(self, first: int = 0) -> str:
        """Both addresses, that of broker `first` (0 or 1) before the other."""
        servers = [b.bootstrap_servers for b in self.brokers]
        return ",".join(servers if first == 0 else reversed(servers))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    brokers = Pair(tmp_path)
    with ExitStack() as stack:
        for broker in brokers.brokers:
            stack.enter_context(broker)
        yield brokers


def settings(pair: Pair, transport: str, first: int = 0) -> dict[str, Any]:
    return {
        "bootstrap.servers": pair.bootstrap(first),
        "transport": transport,
        "connect.timeout.ms": 2000,
    }


def values_of(tp: TopicPartition, count: int = RECORDS) -> list[bytes]:
    return [f"{tp} {i}".encode() for i in range(count)]


def produce_all(producer: kdirect.Producer, partitions: list[TopicPartition] = PARTITIONS) -> None:
    """The records of all partitions, in turns, so that both brokers have requests at once."""
    for record in zip(*(values_of(tp) for tp in partitions), strict=True):
        for tp, value in zip(partitions, record, strict=True):
            producer.produce(tp.topic, value, partition=tp.partition)
    producer.flush()


def consumed(
    consumer: kdirect.Consumer, count: int, timeout_s: float = 30
) -> dict[TopicPartition, list[bytes]]:
    """What the consumer gets, up to `count` records; by partition, in order."""
    got: dict[TopicPartition, list[bytes]] = {}
    deadline = time.monotonic() + timeout_s
    while sum(map(len, got.values())) < count and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None:
            tp = TopicPartition(message.topic(), message.partition())
            got.setdefault(tp, []).append(message.value())
    return got


def read(session: Any, tp: TopicPartition, stop: int = RECORDS) -> list[bytes]:
    with closing(session.reader(tp, 0, stop)) as reader:
        return [v for batch in reader.batches() for v in batch.column("value").to_pylist()]


# -- over TCP --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_one_metadata_answer_names_both(pair: Pair, first: int) -> None:
    """Whichever broker is asked."""
    with closing(kdirect.connect(settings(pair, "tcp", first))) as session:
        assert {name: t.partitions for name, t in session.admin.list_topics().items()} == {
            "near": 2,
            "far": 2,
        }
        assert session.earliest_offsets(PARTITIONS) == dict.fromkeys(PARTITIONS, 0)
        assert session.latest_offsets(PARTITIONS) == dict.fromkeys(PARTITIONS, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_one_session_writes_and_reads_both_over_tcp(pair: Pair, first: int) -> None:
    given = settings(pair, "tcp", first)
    with closing(kdirect.connect(given)) as session, kdirect.Producer(given) as producer:
        produce_all(producer)
        assert session.latest_offsets(PARTITIONS) == dict.fromkeys(PARTITIONS, RECORDS)
        assert session.watermarks(PARTITIONS) == dict.fromkeys(PARTITIONS, (0, RECORDS))
        for tp in PARTITIONS:
            assert read(session, tp) == values_of(tp)
        with kdirect.Consumer(given) as consumer:
            consumer.assign(dict.fromkeys(PARTITIONS, 0))
            got = consumed(consumer, 4 * RECORDS)
        assert got == {tp: values_of(tp) for tp in PARTITIONS}


def test_a_group_reads_both_and_commits_at_its_coordinator(pair: Pair) -> None:
    given = settings(pair, "tcp", 1)
    with kdirect.Producer(given) as producer:
        produce_all(producer)
    group = {**given, "group.id": "g", "auto.offset.reset": "earliest"}
    with kdirect.Consumer(group) as consumer:
        consumer.subscribe(["near", "far"])
        got = consumed(consumer, 4 * RECORDS)
        consumer.commit()
    assert got == {tp: values_of(tp) for tp in PARTITIONS}
    with closing(kdirect.connect(given)) as session:
        assert session.admin.committed_offsets("g") == dict.fromkeys(PARTITIONS, RECORDS)


def test_the_layout_names_every_topic(pair: Pair) -> None:
    with closing(kdirect.connect(settings(pair, "tcp", 1))) as session:
        with pytest.raises(BrokerError, match="layout of the cluster"):
            session.admin.create_topic("new", 1)
        with pytest.raises(BrokerError, match="layout of the cluster"):
            session.admin.delete_topic("near")


# -- over shm and TCP at once ----------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_a_producer_reaches_each_over_its_transport(pair: Pair, first: int) -> None:
    given = settings(pair, "auto", first)
    with closing(kdirect.connect(given)) as session, kdirect.Producer(given) as producer:
        produce_all(producer)
        statistics = producer.statistics()
        for tp in PARTITIONS:
            assert read(session, tp) == values_of(tp)
        assert statistics["rdma_records"] >= 2 * RECORDS, statistics
        assert statistics["tcp_records"] >= 2 * RECORDS, statistics


@pytest.mark.parametrize("first", [0, 1])
def test_a_reader_and_watermarks_reach_each_over_its_transport(pair: Pair, first: int) -> None:
    with kdirect.Producer(settings(pair, "tcp")) as producer:
        produce_all(producer)
    with closing(kdirect.connect(settings(pair, "auto", first))) as session:
        assert session.watermarks(PARTITIONS) == dict.fromkeys(PARTITIONS, (0, RECORDS))
        for tp, transport in [*((tp, "shm") for tp in NEAR), *((tp, "tcp") for tp in FAR)]:
            with closing(session.reader(tp, 0, RECORDS)) as reader:
                batches = list(reader.batches())
                assert reader.transport == transport
            assert [v for b in batches for v in b.column("value").to_pylist()] == values_of(tp)


@pytest.mark.parametrize("first", [0, 1])
def test_a_consumer_reads_both_at_once(pair: Pair, first: int) -> None:
    given = settings(pair, "auto", first)
    with kdirect.Consumer(given) as consumer, kdirect.Producer(given) as producer:
        consumer.assign(dict.fromkeys(PARTITIONS, 0))
        produce_all(producer)
        assert consumed(consumer, 4 * RECORDS) == {tp: values_of(tp) for tp in PARTITIONS}


@pytest.mark.parametrize("gone", [0, 1])
def test_the_partitions_of_the_other_go_on(pair: Pair, gone: int) -> None:
    """One broker stops; what the other leads is still written and read."""
    left = FAR if gone == 0 else NEAR
    given = settings(pair, "auto", 1 - gone)
    with kdirect.Consumer(given) as consumer, kdirect.Producer(given) as producer:
        consumer.assign(dict.fromkeys(PARTITIONS, 0))
        produce_all(producer)
        assert consumed(consumer, 4 * RECORDS) == {tp: values_of(tp) for tp in PARTITIONS}
        pair.brokers[gone].stop()
        produce_all(producer, left)
        got: dict[TopicPartition, list[bytes]] = {}
        deadline = time.monotonic() + 30
        while sum(map(len, got.values())) < 2 * RECORDS and time.monotonic() < deadline:
            try:
                message = consumer.poll(0.2)
            except KdirectError as e:  # that of the broker that is gone
                assert e.retriable, e
                continue
            if message is not None:
                tp = TopicPartition(message.topic(), message.partition())
                got.setdefault(tp, []).append(message.value())
        assert got == {tp: values_of(tp) for tp in left}
        with closing(kdirect.connect(given)) as session:
            for tp in left:
                assert read(session, tp, 2 * RECORDS) == 2 * values_of(tp)
