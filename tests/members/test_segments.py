"""Replicas' files on three real brokers: segments begin at the same offsets and have the same bytes
everywhere, after a leader was killed, a leader has hung, a broker was away for long, and a disk was
emptied; also where each broker has a ``segment.bytes`` and a ``segment.ms`` of its own."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.errors import FormatError, UnknownTopicError
from kdirect.format.batch import iterate_batches
from tests.members.conftest import TEST_PROPERTIES
from tests.support import wait_until

TOPIC = "t"
SEGMENT_BYTES = 1 << 16


def records(path: Path) -> bytes:
    """What is in a file of records; after a crash zeros may follow until it is closed."""
    data = path.read_bytes()
    end = 0
    with contextlib.suppress(FormatError):
        for batch in iterate_batches(data):
            end = batch.position + batch.size
    return data[:end]


def sealed(cluster: kdirect.Cluster, node_id: int) -> dict[str, tuple[int, str]]:
    """Length and SHA-256 of the records in each file but the last, by name."""
    directory = cluster.log_dirs(node_id)[0] / f"{TOPIC}-0"
    found = {}
    for file in sorted(directory.glob("*.log"))[:-1]:
        data = records(file)
        found[file.name] = (len(data), hashlib.sha256(data).hexdigest()[:16])
    return found


class Producing:
    """Sends records with acks=all, and counts what is acknowledged."""

    def __init__(self, cluster: kdirect.Cluster) -> None:
        self.acknowledged = 0
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 1,
                "batch.size": 16_384,
                "socket.timeout.ms": 4000,  # a hung leader is left by then, not after a minute
                "log_level": 0,
            }
        )

    def send(self, count: int) -> None:
        """Send records, and wait until they are acknowledged."""
        before = self.acknowledged

        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            self.acknowledged += 1

        for n in range(count):
            value = b"%08d" % (before + n) + bytes(1000)
            self._producer.produce(TOPIC, value, partition=0, on_delivery=delivered)
            self._producer.poll(0)
        assert self._producer.flush(60) == 0
        assert self.acknowledged == before + count


def state(cluster: kdirect.Cluster) -> Any:
    def described() -> Any:
        try:
            return session.admin.describe_topic(TOPIC).leaders[0]
        except UnknownTopicError:  # the broker that was asked has not heard of it yet
            return None

    with kdirect.connect(
        {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
    ) as session:
        return wait_until(described, "the topic was known")


def wait_same(cluster: kdirect.Cluster) -> None:
    """Wait until all are in sync, and sealed segments are the same everywhere."""

    def differing() -> list[Any]:
        found = [sealed(cluster, n) for n in cluster.node_ids]
        names = sorted({name for files in found for name in files})
        rows = [(name, *(files.get(name) for files in found)) for name in names]
        return [row for row in rows if len(set(row[1:])) > 1]

    wait_until(lambda: len(state(cluster).in_sync_replicas) == 3, "all were in sync", 60)
    wait_until(lambda: not differing(), lambda: f"they differ: {differing()}", 30)


def wait_for_all(cluster: kdirect.Cluster) -> None:
    wait_same(cluster)
    assert len(sealed(cluster, 1)) > 3


def values(cluster: kdirect.Cluster, count: int) -> list[int]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "log_level": 0}
    )
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
    found: list[int] = []
    try:
        while len(found) < count:
            messages = consumer.consume(min(1000, count - len(found)), 20)
            assert messages, f"{len(found)} of {count} records"
            found += [int(m.value()[:8]) for m in messages if m.error() is None]
    finally:
        consumer.close()
    return found


def test_sealed_segments_are_the_same_everywhere(cluster: Callable[..., kdirect.Cluster]) -> None:
    ours = cluster(3)
    admin = AdminClient({"bootstrap.servers": ours.bootstrap_servers, "log_level": 0})
    config = {"segment.bytes": str(SEGMENT_BYTES), "min.insync.replicas": "2"}
    admin.create_topics([NewTopic(TOPIC, 1, 3, config=config)])[TOPIC].result(30)
    wait_until(lambda: state(ours).leader > 0, "there was a leader")
    producing = Producing(ours)
    producing.send(300)
    wait_for_all(ours)
    # The leader is killed; others lead, and it comes back when there is much more.
    leader = state(ours).leader
    ours.kill(leader)
    producing.send(1000)
    ours.start(leader)
    producing.send(100)
    wait_for_all(ours)
    # The leader hangs while it is written to, and goes on when another leads.
    leader = state(ours).leader
    producing.send(100)
    ours.pause(leader)
    try:
        producing.send(300)
    finally:
        ours.resume(leader)
    producing.send(100)
    wait_for_all(ours)
    # A follower loses its disk.
    follower = next(n for n in ours.node_ids if n != state(ours).leader)
    ours.kill(follower)
    for directory in ours.log_dirs(follower):
        shutil.rmtree(directory)
    ours.start(follower)
    producing.send(100)
    wait_for_all(ours)
    # All are killed together.
    for node_id in ours.node_ids:
        ours.kill(node_id)
    for node_id in ours.node_ids:
        ours.start(node_id)
    producing.send(100)
    wait_for_all(ours)
    count = producing.acknowledged
    assert values(ours, count)[:count] == list(range(count))


class Unlike(kdirect.Cluster):
    """Each broker rolls by rules of its own while it leads."""

    OWN: Mapping[int, Mapping[str, Any]] = {
        1: {"log.segment.bytes": 1 << 16, "log.roll.ms": 3_600_000},
        # Less than a broker takes to start, so that it rolls between the records of a round.
        2: {"log.segment.bytes": 1 << 18, "log.roll.ms": 150},
        3: {"log.segment.bytes": 1 << 17, "log.index.size.max.bytes": 4096},
    }

    def _new_process(self, node_id: int, properties: Mapping[str, Any]) -> Any:
        return super()._new_process(node_id, {**properties, **self.OWN[node_id]})


@pytest.mark.parametrize("pushed", [True, False], ids=["pushed", "fetched"])
def test_followers_roll_where_their_leader_does(
    zookeeper_connect: str, tmp_path: Path, pushed: bool
) -> None:
    """And nowhere else, whatever their own ``segment.bytes`` and ``segment.ms`` are."""
    properties = {**TEST_PROPERTIES, "rdma.replicate": pushed}
    with Unlike(
        3, tmp_path / "c", zookeeper_connect=zookeeper_connect, properties=properties
    ) as ours:
        admin = AdminClient({"bootstrap.servers": ours.bootstrap_servers, "log_level": 0})
        admin.create_topics([NewTopic(TOPIC, 1, 3)])[TOPIC].result(30)
        wait_until(lambda: state(ours).leader > 0, "there was a leader")
        producing = Producing(ours)
        rounds = [(2, 1), (1, 3)] if pushed else [(2, 1)]
        for leader, other in rounds:
            let_lead(ours, leader)
            producing.send(300)
            ours.stop(other)  # it lags, and the last one has an empty disk
            producing.send(300)
            if (leader, other) == rounds[-1]:
                shutil.rmtree(ours.log_dirs(other)[0])
            ours.start(other)
            producing.send(300)
            wait_for_all(ours)
        ours.kill(leader)
        producing.send(300)
        ours.start(leader)
        producing.send(100)
        wait_for_all(ours)
        sizes = [size for size, _ in sealed(ours, 1).values()]
        assert max(sizes) > Unlike.OWN[3]["log.segment.bytes"], "broker 2 has led"
        count = producing.acknowledged
        assert values(ours, count)[:count] == list(range(count))


def let_lead(cluster: kdirect.Cluster, node_id: int) -> None:
    """Make a broker the preferred leader, and elect it."""
    tp = kdirect.TopicPartition(TOPIC, 0)
    others = [n for n in cluster.node_ids if n != node_id]
    with kdirect.connect(
        {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
    ) as session:
        session.admin.reassign_partitions({tp: [node_id, *others]})
        wait_until(lambda: not session.admin.list_reassignments(), "it was reassigned")
        session.admin.elect_leaders([tp])
    wait_until(lambda: state(cluster).leader == node_id, f"{node_id} led", 30)
