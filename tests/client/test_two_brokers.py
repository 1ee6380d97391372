"""Two brokers of one cluster: different topics behind one metadata answer, reached over different
transports.

Broker 1 leads `near` and offers shm; broker 2 leads `far` and offers TCP only.  Both lead two
partitions.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.broker.cluster_view import ClusterLayout, Node
from kdirect.client.tcp_multi_fetch import TcpRound
from kdirect.errors import BrokerError, KdirectError
from kdirect.model import TopicPartition
from kdirect.options import CLIENT

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
        self._directory = directory
        self._nodes = [Node(i, "127.0.0.1", port) for i, port in enumerate(ports, 1)]
        self.brokers = [self._broker(i) for i in range(2)]

    def _broker(self, i: int) -> kdirect.Broker:
        node = self._nodes[i]
        return kdirect.Broker(
            self._directory / f"log{node.node_id}",
            f"{node.host}:{node.port}",
            layout=ClusterLayout({self._nodes[0]: {"near": 2}, self._nodes[1]: {"far": 2}}),
            properties={"node.id": node.node_id, "rdma.transports": ("shm", "")[i]},
        )

    def restart(self, i: int) -> None:
        """Broker `i`, which was stopped, comes back with its log."""
        self.brokers[i] = self._broker(i)
        self.brokers[i].start()

    def stop(self) -> None:
        for broker in self.brokers:
            broker.stop()

    def bootstrap(self, first: int = 0) -> str:
        """Both addresses, that of broker `first` (0 or 1) before the other."""
        servers = [b.bootstrap_servers for b in self.brokers]
        return ",".join(servers if first == 0 else reversed(servers))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    brokers = Pair(tmp_path)
    try:
        for broker in brokers.brokers:
            broker.start()
        yield brokers
    finally:
        brokers.stop()


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


# -- a broker that is gone -------------------------------------------------------------------------


def polled(
    consumer: kdirect.Consumer, until: Callable[[dict[TopicPartition, list[bytes]]], bool]
) -> tuple[dict[TopicPartition, list[bytes]], list[KdirectError], float]:
    """Polls of 0.2 s until `until` says so of the values of each partition, for 30 s at most; these
    values, what was raised, and the seconds that the longest poll took."""
    got: dict[TopicPartition, list[bytes]] = {}
    errors: list[KdirectError] = []
    longest = 0.0
    deadline = time.monotonic() + 30
    while not until(got) and time.monotonic() < deadline:
        began = time.monotonic()
        try:
            message = consumer.poll(0.2)
        except KdirectError as e:
            errors.append(e)
        else:
            if message is not None:
                tp = TopicPartition(message.topic(), message.partition())
                got.setdefault(tp, []).append(message.value())
        longest = max(longest, time.monotonic() - began)
    return got, errors, longest


def for_seconds(seconds: float) -> Callable[[Any], bool]:
    end = time.monotonic() + seconds
    return lambda got: time.monotonic() >= end


def count(n: int) -> Callable[[dict[TopicPartition, list[bytes]]], bool]:
    return lambda got: sum(map(len, got.values())) >= n


def start_reading(consumer: kdirect.Consumer, how: str) -> None:
    if how == "assigned":
        consumer.assign(dict.fromkeys(PARTITIONS, 0))
    else:
        consumer.subscribe(["near", "far"])


# The first broker coordinates the groups.
GONE = [("assigned", 0), ("assigned", 1), ("group", 1)]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("how", "gone"), GONE)
def test_a_consumer_reads_on_and_takes_up_what_comes_back(
    pair: Pair, caplog: pytest.LogCaptureFixture, transport: str, how: str, gone: int
) -> None:
    """Also after more than `connect.timeout.ms`, when an attempt to reach the broker has failed."""
    left, lost = (FAR, NEAR) if gone == 0 else (NEAR, FAR)
    given = settings(pair, transport, 1 - gone)
    group = {"group.id": "g" if how == "group" else None, "auto.offset.reset": "earliest"}
    with kdirect.Producer(given) as producer, kdirect.Consumer({**given, **group}) as consumer:
        start_reading(consumer, how)
        produce_all(producer)
        polled(consumer, count(4 * RECORDS))
        pair.brokers[gone].stop()
        produce_all(producer, left)
        with caplog.at_level(logging.WARNING, "kdirect.client"):
            got, errors, _ = polled(consumer, count(2 * RECORDS))
            assert (got, errors) == ({tp: values_of(tp) for tp in left}, [])
            got, errors, longest = polled(consumer, for_seconds(3))
            assert (got, errors) == ({}, [])
            assert longest < 1.5, "a poll of 0.2 s"
        told = [r for r in caplog.records if "until" in r.message and "back" in r.message]
        assert len(told) == 1
        assert [consumer.position(tp) for tp in lost] == [RECORDS, RECORDS]
        pair.restart(gone)
        produce_all(producer)
        got, errors, _ = polled(consumer, count(4 * RECORDS))
        assert (got, errors) == ({tp: values_of(tp) for tp in PARTITIONS}, [])


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("how", "gone"), GONE)
def test_a_consumer_begins_while_one_broker_is_gone(
    pair: Pair, transport: str, how: str, gone: int
) -> None:
    """A group's member does not know where the log of the lost partitions begins, either."""
    left = FAR if gone == 0 else NEAR
    given = settings(pair, transport, 1 - gone)
    group = {"group.id": "g" if how == "group" else None, "auto.offset.reset": "earliest"}
    with kdirect.Producer(given) as producer, kdirect.Consumer({**given, **group}) as consumer:
        produce_all(producer)
        pair.brokers[gone].stop()
        start_reading(consumer, how)
        got, errors, _ = polled(consumer, count(2 * RECORDS))
        assert (got, errors) == ({tp: values_of(tp) for tp in left}, [])
        if how == "group":
            consumer.commit(asynchronous=False)
        pair.restart(gone)
        got, errors, _ = polled(consumer, count(2 * RECORDS))
        assert (got, errors) == ({tp: values_of(tp) for tp in PARTITIONS if tp not in left}, [])


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_loss_is_told_when_nothing_else_is_read(pair: Pair, transport: str) -> None:
    given = settings(pair, transport)
    with kdirect.Producer(given) as producer, kdirect.Consumer(given) as consumer:
        produce_all(producer)
        consumer.assign(dict.fromkeys(PARTITIONS, 0))
        polled(consumer, count(4 * RECORDS))
        pair.stop()
        got, errors, longest = polled(consumer, for_seconds(6))
        assert got == {} and errors and all(e.retriable for e in errors)
        assert longest < 1.5, "a poll of 0.2 s"
        for i in range(2):
            pair.restart(i)
        polled(consumer, for_seconds(3))
        produce_all(producer)
        got, errors, _ = polled(consumer, count(4 * RECORDS))
        assert (got, errors) == ({tp: values_of(tp) for tp in PARTITIONS}, [])


def test_nothing_to_read_from_two_leaders_is_no_error(pair: Pair) -> None:
    """One answers, with nothing, between two looks at both."""
    given = {**settings(pair, "tcp"), "fetch.wait.max.ms": 10}
    with kdirect.Consumer(given) as consumer:
        consumer.assign(dict.fromkeys(PARTITIONS, 0))
        assert polled(consumer, for_seconds(4))[:2] == ({}, [])


def test_two_leaders_are_waited_for_at_once(pair: Pair) -> None:
    """A round sleeps until one of them has answered, whichever it is, and looks at none before."""
    given = CLIENT.resolve({**settings(pair, "tcp"), "fetch.wait.max.ms": 60_000})
    with closing(kdirect.connect(given)) as session, session.producer() as producer:
        tcp = TcpRound(session.cluster, given)
        tcp.assign(dict.fromkeys(PARTITIONS, 0))
        tcp.step(0)
        began = time.monotonic()
        assert not tcp.step(400)
        assert 0.35 < time.monotonic() - began < 5
        for tp in (NEAR[1], FAR[0]):
            written = threading.Timer(
                0.2, producer.produce_sync, (tp.topic, b"x"), {"partition": tp.partition}
            )
            began = time.monotonic()
            written.start()
            assert tcp.step(10_000) and tcp.next_ready() == tp
            assert time.monotonic() - began < 5
            written.join()
            tcp.release([tp])
        tcp.close()


def test_watermarks_of_a_lost_broker_hold_up_nobody(pair: Pair) -> None:
    given = {**settings(pair, "tcp"), "request.timeout.ms": 4000}
    with closing(kdirect.connect(given)) as session:
        assert session.watermarks(PARTITIONS) == dict.fromkeys(PARTITIONS, (0, 0))
        pair.brokers[1].stop()
        errors: list[KdirectError] = []

        def ask() -> None:
            try:
                session.watermarks(FAR)
            except KdirectError as e:
                errors.append(e)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.3)
        assert session.watermarks(NEAR) == dict.fromkeys(NEAR, (0, 0))
        assert thread.is_alive(), "the other broker is still waited for"
        thread.join()
        assert errors and errors[0].retriable
