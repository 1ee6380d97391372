"""Transactions of a cluster: the coordinator of a transactional id dies in the middle of one, and
another broker ends it."""

from __future__ import annotations

import time
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

import kdirect
from kdirect.format.group_records import partition_of

PROPERTIES = {
    "zookeeper.session.timeout.ms": 3000,
    "replica.lag.time.max.ms": 3000,
    "transaction.state.log.num.partitions": 4,
    "offsets.topic.num.partitions": 4,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
}


def committed(servers: str, count: int) -> list[bytes]:
    """What readers of committed records see, once there are so many, or after 20 s."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "none",
            "isolation.level": "read_committed",
            # Nothing is committed at the end: with a broker less, no topic for it can be created.
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.assign([ck.TopicPartition("out", i, 0) for i in range(3)])
        found: list[bytes] = []
        deadline = time.monotonic() + 20
        while len(found) < count and time.monotonic() < deadline:
            found += [m.value() for m in consumer.consume(100, 0.3) if m.error() is None]
        found += [m.value() for m in consumer.consume(100, 1) if m.error() is None]
        return sorted(found)
    finally:
        consumer.close()


def committed_by_reads(servers: str, count: int) -> list[bytes]:
    """The same by one-sided READs of the leaders' memory."""
    settings = {
        "bootstrap.servers": servers,
        "isolation.level": "read_committed",
        "transport": "shm",
        "poll.spin.us": 0,
    }
    with kdirect.Consumer(settings) as consumer:
        consumer.assign({kdirect.TopicPartition("out", i): 0 for i in range(3)})
        found = consumer.consume(count, 20)
        found += consumer.consume(100, 0.5)
        figures = consumer.statistics()
    assert figures["aborted_batches"] > 0 and figures.get("fetched_bytes", 0) == 0
    return sorted(m.value() for m in found)


def _coordinator(servers: str, name: str, cluster: Any) -> int:
    """The broker that leads the partition of a transactional id."""
    admin = AdminClient({"bootstrap.servers": servers})
    partitions = admin.list_topics("__transaction_state", 10).topics["__transaction_state"]
    index = partition_of(name, len(partitions.partitions))
    return int(partitions.partitions[index].leader)


def test_a_transaction_outlives_its_coordinator() -> None:
    with kdirect.Cluster(brokers=3, properties=PROPERTIES) as cluster:
        servers = cluster.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([NewTopic("out", 3, 3)])["out"].result(20)
        made = ck.Producer({"bootstrap.servers": servers, "transactional.id": "a"})
        made.init_transactions(40)
        resource = ConfigResource(ConfigResource.Type.TOPIC, "__transaction_state")
        described = admin.describe_configs([resource])[resource].result(20)
        assert described["min.insync.replicas"].value == "2"  # transaction.state.log.min.isr
        assert described["cleanup.policy"].value == "compact"
        assert described["compression.type"].value == "uncompressed"
        sent = []
        for turn in range(3):
            made.begin_transaction()
            for i in range(6):
                sent.append(b"%d %d" % (turn, i))
                made.produce("out", sent[-1], partition=i % 3)
            made.flush(20)
            if turn == 1:
                cluster.kill(_coordinator(servers, "a", cluster))
            made.commit_transaction(60)
        made.begin_transaction()
        made.produce("out", b"aborted", partition=0)
        made.flush(20)
        made.abort_transaction(30)
        assert committed(servers, len(sent)) == sorted(sent)
        assert committed_by_reads(servers, len(sent)) == sorted(sent)
