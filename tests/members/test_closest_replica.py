"""Consumers with client.rack read from the replica of their rack (KIP-392), over TCP and by READs
of its memory, and from the leader where that replica goes away or falls out of sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

import kdirect
from kdirect.model import TopicPartition
from tests.support import wait_until

TP = TopicPartition("t", 0)
FAST = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
RACKS = ("a", "b", "c")


class Racks:
    """Three brokers in a rack each; the leader of `TP`, and another broker, which is near."""

    def __init__(self, cluster: kdirect.Cluster) -> None:
        self.cluster = cluster
        self.session = kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers, **FAST})
        self.session.admin.create_topic(TP.topic, 1, replication_factor=3)
        wait_until(lambda: len(self.in_sync()) == 3, "all replicas are in sync")
        self.leader = self.session.cluster.topic(TP.topic, refresh=True).partition(0).leader
        self.near = next(i for i in cluster.node_ids if i != self.leader)
        self.sent = 0

    def in_sync(self) -> tuple[int, ...]:
        return self.session.cluster.topic(TP.topic, refresh=True).partition(0).in_sync_replicas

    def settings(self, **more: Any) -> dict[str, Any]:
        servers, rack = self.cluster.bootstrap_servers, RACKS[self.near - 1]
        return {"bootstrap.servers": servers, "client.rack": rack, **FAST, **more}

    def produce(self, count: int) -> None:
        with closing(kdirect.Producer({"bootstrap.servers": self.servers, **FAST})) as producer:
            for _ in range(count):
                producer.produce(TP.topic, b"%d" % self.sent, partition=0)
                self.sent += 1
            assert producer.flush(60) == 0

    @property
    def servers(self) -> str:
        return self.cluster.bootstrap_servers

    def node_at(self, port: int) -> int:
        return next(
            i for i in self.cluster.node_ids if self.cluster.address(i).endswith(f":{port}")
        )

    def read_at(self, consumer: kdirect.Consumer) -> int:
        """The broker that brings the records of `TP`."""
        paths = consumer._reading.paths
        fetcher = paths.direct.fetcher_of(TP)
        if fetcher is not None:
            return self.node_at(fetcher.channel.connection.port)
        leader = paths.tcp._partitions[TP].leader if paths.tcp is not None else None
        return leader.node.node_id if leader is not None else -1


@pytest.fixture
def racks(cluster: Callable[..., kdirect.Cluster]) -> Iterator[Racks]:
    made = Racks(cluster(3, racks=RACKS))
    yield made
    made.session.close()


class Reads:
    """A consumer near the broker `racks.near`, and what it got."""

    def __init__(self, racks: Racks, transport: str) -> None:
        self.racks = racks
        self.consumer = kdirect.Consumer(racks.settings(transport=transport))
        self.consumer.assign({TP: 0})
        self.got: list[int] = []

    def has_all(self) -> bool:
        message = self.consumer.poll(0.05)
        if message is not None:
            assert message.error() is None
            self.got.append(int(message.value()))
        return len(self.got) == self.racks.sent

    def is_at(self, node_id: int) -> bool:
        self.has_all()
        return self.racks.read_at(self.consumer) == node_id


@contextmanager
def reading(racks: Racks) -> Iterator[Callable[[int], None]]:
    """A consumer over each path.  Yields what produces records and has all of them read, at the
    broker with this id in the end."""
    both = {transport: Reads(racks, transport) for transport in ("shm", "tcp")}

    def read_at(node_id: int) -> None:
        racks.produce(50)
        for transport, reads in both.items():
            direct = reads.consumer._reading.paths.direct
            wait_until(reads.has_all, f"all was read over {transport}", 60)
            wait_until(lambda r=reads: r.is_at(node_id), f"it is read at {node_id}", 60)
            assert (direct.fetcher_of(TP) is not None) == (transport == "shm")

    try:
        yield read_at
        for reads in both.values():
            assert reads.got == list(range(racks.sent))
    finally:
        for reads in both.values():
            reads.consumer.close()


@pytest.mark.timeout(180)
def test_consumers_read_from_the_replica_of_their_rack(racks: Racks) -> None:
    """They go on at the leader when that replica dies, and come back to it."""
    with reading(racks) as read_at:
        read_at(racks.near)
        racks.cluster.kill(racks.near)
        read_at(racks.leader)
        racks.cluster.start(racks.near)
        wait_until(lambda: len(racks.in_sync()) == 3, "the replica came back", 60)
        read_at(racks.near)


@pytest.mark.timeout(180)
def test_a_broker_that_hangs_holds_nobody_up(racks: Racks) -> None:
    """Neither the leader those who read a range near them, as Spark's tasks do, nor a replica its
    consumers: its slots and its connections stay as they are."""
    racks.produce(200)
    for transport in ("shm", "tcp"):
        with kdirect.connect(racks.settings(transport=transport)) as session:
            assert session.latest_offsets([TP]) == {TP: 200}
            with closing(session.reader(TP, 0, 200)) as reader:  # its high watermark is there
                assert sum(b.num_rows for b in reader.batches()) == 200
            racks.cluster.pause(racks.leader)
            try:
                with closing(session.reader(TP, 0, 200)) as reader:
                    values = [v for b in reader.batches() for v in b.column("value").to_pylist()]
                    assert reader.transport == transport
            finally:
                racks.cluster.resume(racks.leader)
        assert [int(v) for v in values] == list(range(200))
    with reading(racks) as read_at:
        read_at(racks.near)
        racks.cluster.pause(racks.near)
        try:
            read_at(racks.leader)
        finally:
            racks.cluster.resume(racks.near)


def test_committed_records_are_read_in_the_memory_of_the_near_replica(racks):
    """A replica that follows keeps the lists of aborted transactions, too."""
    expected, settings = [], {"bootstrap.servers": racks.servers, "transactional.id": "x", **FAST}
    with kdirect.Producer(settings) as producer:
        producer.init_transactions(60)
        for i in range(12):
            producer.begin_transaction()
            producer.produce(TP.topic, b"%d" % i, partition=0)
            if i % 3:
                producer.abort_transaction(60)
            else:
                producer.commit_transaction(60)
                expected.append(i)
    more = {"transport": "shm", "isolation.level": "read_committed"}
    with kdirect.Consumer(racks.settings(**more)) as consumer:
        consumer.assign({TP: 0})
        got = [int(message.value()) for message in consumer.consume(len(expected), 30)]
        assert consumer.consume(1, 0.3) == [] and got == expected
        assert racks.read_at(consumer) == racks.near
        figures = consumer.statistics()
    assert figures.get("fetched_bytes", 0) == 0, "READs have brought them all"
