"""Replicas' files on three real brokers: segments begin at the same offsets and have the same bytes
everywhere, after a leader was killed, a broker was away for long, and a disk was emptied."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from tests.support import wait_until

TOPIC = "t"
SEGMENT_BYTES = 1 << 16


def sealed(cluster: kdirect.Cluster, node_id: int) -> dict[str, str]:
    """SHA-256 of each file of records but the last, by name."""
    directory = cluster.log_dirs(node_id)[0] / f"{TOPIC}-0"
    files = sorted(directory.glob("*.log"))
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files[:-1]}


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
    with kdirect.connect(
        {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
    ) as session:
        return session.admin.describe_topic(TOPIC).leaders[0]


def wait_for_all(cluster: kdirect.Cluster) -> None:
    def equal() -> bool:
        found = [sealed(cluster, n) for n in cluster.node_ids]
        return found[0] == found[1] == found[2]

    wait_until(lambda: len(state(cluster).in_sync_replicas) == 3, "all were in sync", 60)
    wait_until(equal, "sealed segments were equal", 30)
    assert len(sealed(cluster, 1)) > 3


def values(cluster: kdirect.Cluster, count: int) -> list[int]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "log_level": 0}
    )
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
    found: list[int] = []
    try:
        while len(found) < count:
            messages = consumer.consume(1000, 20)
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
