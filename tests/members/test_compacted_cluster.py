"""A compacted topic of three replicas: each broker compacts its own copy, whoever leads."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.broker.cleaner import CHECKPOINT
from kdirect.log.checkpoint import read_offsets
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from tests.log.compacted_logs import last_of_each_key, records_of
from tests.support import wait_until

TP = kdirect.TopicPartition("t", 0)
CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "16384",
    "min.cleanable.dirty.ratio": "0.01",
    "min.insync.replicas": "2",
}


class Writer:
    """Writes random values of few keys, by a stock client and kdirect's in turn, and knows what
    was written last."""

    def __init__(self, cluster: kdirect.Cluster, rng: random.Random) -> None:
        self.table: dict[bytes, bytes] = {}
        self.count = 0
        self._cluster = cluster
        self._rng = rng

    def write(self, count: int) -> None:
        for make in (self._stock, self._ours):
            records = [
                (
                    b"k%d" % self._rng.randrange(40),
                    self._rng.choice([None, self._rng.randbytes(90)]),
                )
                for _ in range(count)
            ]
            make(records)
            self.count += count
            for key, value in records:
                self.table.pop(key, None)
                if value is not None:
                    self.table[key] = value

    def _settings(self) -> dict[str, object]:
        return {"bootstrap.servers": self._cluster.bootstrap_servers, "acks": "all"}

    def _stock(self, records: list[tuple[bytes, bytes | None]]) -> None:
        errors: list[object] = []
        producer = confluent_kafka.Producer(
            {**self._settings(), "enable.idempotence": True, "batch.size": 2000, "log_level": 0}
        )
        for key, value in records:
            producer.produce(
                "t", value, key, on_delivery=lambda error, _: errors.append(error), partition=0
            )
            producer.poll(0)
        assert producer.flush(60) == 0
        assert errors == [None] * len(records)

    def _ours(self, records: list[tuple[bytes, bytes | None]]) -> None:
        settings = {**self._settings(), "transport": "shm", "batch.bytes": 4000}
        with kdirect.Producer(settings) as producer:
            for key, value in records:
                producer.produce("t", value, key, partition=0)
            producer.flush(60)


def cleaned_to(cluster: kdirect.Cluster, node_id: int) -> int:
    return int(read_offsets(cluster.log_dirs(node_id)[0] / CHECKPOINT).get(TP, 0))


def wait_cleaned(cluster: kdirect.Cluster, offset: int) -> None:
    """Each broker has compacted its copy up to there."""
    wait_until(
        lambda: all(cleaned_to(cluster, n) >= offset for n in cluster.node_ids),
        lambda: f"compacted to {offset}: {[cleaned_to(cluster, n) for n in cluster.node_ids]}",
        60,
    )


def leader_of(cluster: kdirect.Cluster) -> int:
    with kdirect.connect(
        {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
    ) as session:
        return int(session.admin.describe_topic("t").leaders[0].leader)


def wait_well(cluster: kdirect.Cluster) -> None:
    with kdirect.connect(
        {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
    ) as session:
        wait_until(lambda: session.admin.health().is_well, "all replicas were in sync", 60)


def test_every_replica_compacts_and_keeps_the_last_values(
    cluster: Callable[..., kdirect.Cluster], tmp_path: Path, seed: int
) -> None:
    ours = cluster(3, log_cleaner_backoff_ms=50)
    admin = AdminClient({"bootstrap.servers": ours.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic("t", 1, 3, config=CONFIG)])["t"].result(30)
    writer = Writer(ours, random.Random(seed))
    writer.write(400)
    wait_cleaned(ours, 300)
    # The leader is killed, and comes back when others have compacted what it lacks.
    first = leader_of(ours)
    ours.kill(first)
    writer.write(400)
    others = [n for n in ours.node_ids if n != first]
    wait_until(lambda: all(cleaned_to(ours, n) > 1000 for n in others), "others compacted", 60)
    ours.start(first)
    wait_well(ours)
    # A follower loses its disk, and copies a log with gaps.
    leader = leader_of(ours)
    follower = next(n for n in ours.node_ids if n not in (leader, first))
    ours.kill(follower)
    shutil.rmtree(ours.log_dirs(follower)[0])
    ours.start(follower)
    wait_well(ours)
    writer.write(200)
    wait_well(ours)
    wait_cleaned(ours, 1600)
    ours.stop()
    for node_id in ours.node_ids:
        directory = tmp_path / f"copy-{node_id}"
        shutil.copytree(ours.log_dirs(node_id)[0], directory)
        with LogManager([directory], LogConfig()) as logs:
            found = records_of(logs.partitions[TP])
        assert last_of_each_key(found) == writer.table, f"broker {node_id}"
        assert len(found) < writer.count // 2, f"broker {node_id} has {len(found)} records"
