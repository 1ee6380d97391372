"""Streaming queries from a topic of three brokers into others, while each broker in turn is killed,
and with it leaders of partitions and the coordinator of what is written exactly-once: the queries
notice nothing, and each record is written once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.model import TopicPartition
from tests.spark.committed import Committed
from tests.support import wait_until

pytestmark = pytest.mark.spark

PARTITIONS = 3
FAST = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
SOURCE, TARGET, ONCE = "source", "target", "once"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[kdirect.Cluster]:
    """Three brokers in processes of their own, which need two replicas of each record."""
    properties = {
        "zookeeper.session.timeout.ms": 6000,
        "min.insync.replicas": 2,
        "log.segment.bytes": 1 << 20,
        "auto.create.topics.enable": False,
        "transaction.state.log.num.partitions": 3,
    }
    with kdirect.Cluster(3, tmp_path / "cluster", properties=properties) as made:
        yield made


@contextmanager
def numbers(cluster: kdirect.Cluster, topic: str) -> Iterator[Callable[[], int]]:
    """A thread produces 0, 1, 2, ... to all partitions of `topic` in turn.  Yields how many were
    acknowledged."""
    over = threading.Event()
    failed: list[Any] = []
    acknowledged = 0

    def delivered(error: Any, message: Any) -> None:
        nonlocal acknowledged
        if error is not None:
            failed.append(error)
        acknowledged += 1

    def run() -> None:
        sent = 0
        with closing(kdirect.Producer({"bootstrap.servers": servers, **FAST})) as producer:
            while not over.wait(0.005):
                producer.produce(
                    topic, b"%d" % sent, partition=sent % PARTITIONS, on_delivery=delivered
                )
                producer.poll(0)
                sent += 1
            assert producer.flush(60) == 0

    servers = cluster.bootstrap_servers
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lambda: acknowledged
    finally:
        over.set()
        thread.join(90)
    assert not thread.is_alive() and failed == []


def copy(spark: Any, cluster: kdirect.Cluster, checkpoint: Path, target: str) -> Any:
    """A query into `target`."""
    reader = (
        spark.readStream.format("kdirect")
        .option("kafka.bootstrap.servers", cluster.bootstrap_servers)
        .option("subscribe", SOURCE)
        .option("startingOffsets", "earliest")
    )
    return (
        reader.load()
        .writeStream.format("kdirect")
        .option("kafka.bootstrap.servers", cluster.bootstrap_servers)
        .option("topic", target)
        .option("exactlyOnce", str(target == ONCE).lower())
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="100 milliseconds")
        .start()
    )


def ends_of_batches(checkpoint: Path) -> list[dict[str, int]]:
    """What latestOffset said for each micro-batch, in order."""
    files = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda p: int(p.name))
    return [ends(f) for f in files]


def ends(offsets: Path) -> dict[str, int]:
    return dict(json.loads(offsets.read_text().splitlines()[-1])[SOURCE])


def records_copied(checkpoint: Path) -> int:
    """How many records a query has read and written, by its last commit."""
    done = [int(f.name) for f in (checkpoint / "commits").glob("[0-9]*")]
    return sum(ends(checkpoint / "offsets" / str(max(done))).values()) if done else 0


@pytest.mark.timeout(240)
def test_queries_go_on_while_each_broker_is_killed(
    spark: Any, cluster: kdirect.Cluster, tmp_path: Path
) -> None:
    session = kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers, **FAST})
    written = [TopicPartition(TARGET, p) for p in range(PARTITIONS)]

    def in_sync() -> bool:
        return all(
            len(p.in_sync_replicas) == 3
            for topic in (SOURCE, TARGET, ONCE)
            for p in session.cluster.topic(topic, refresh=True).partitions
        )

    def rows() -> int:
        """How many records all queries have copied."""
        for query in queries:
            if query.exception() is not None:
                raise query.exception()
        return min(records_copied(tmp_path / target) for target in (TARGET, ONCE))

    with closing(session):
        for topic in (SOURCE, TARGET, ONCE):
            session.admin.create_topic(topic, PARTITIONS, replication_factor=3)
        wait_until(in_sync, "all replicas are in sync")
        queries = [copy(spark, cluster, tmp_path / to, to) for to in (TARGET, ONCE)]
        try:
            with numbers(cluster, SOURCE) as acknowledged:
                wait_until(lambda: rows() > 0, "the first records were written", 60)
                for node_id in cluster.node_ids:
                    before = acknowledged()
                    cluster.kill(node_id)
                    wait_until(
                        lambda n=before: acknowledged() > n + 100, "the producer goes on", 60
                    )
                    seen = acknowledged()
                    wait_until(lambda n=seen: rows() >= n, "so does the query", 60)
                    cluster.start(node_id)
                    wait_until(in_sync, "the replicas came back", 60)
            wait_until(lambda: rows() >= acknowledged(), "everything was written", 60)
        finally:
            for query in queries:
                query.stop()
        found = []
        for tp, end in session.latest_offsets(written).items():
            with closing(session.reader(tp, 0, end)) as reader:
                found += [int(v) for b in reader.batches() for v in b.column("value").to_pylist()]
    assert sorted(found) == list(range(acknowledged()))
    with closing(Committed(cluster.bootstrap_servers, ONCE, PARTITIONS)) as committed:
        assert sorted(map(int, committed.all())) == list(range(acknowledged()))
        assert committed.held_back() == 0
    for target in (TARGET, ONCE):
        batches = ends_of_batches(tmp_path / target)
        assert len(batches) > 3
        for partition in map(str, range(PARTITIONS)):
            of_one = [end[partition] for end in batches]
            assert of_one == sorted(of_one)
