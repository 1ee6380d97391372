"""Batches that are written exactly once in a cluster: the broker that coordinates them dies while
one is committed, and the next one ends it as one."""

from __future__ import annotations

import os
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.client.attempts import ALREADY_COMMITTED, COMMITTED
from kdirect.failpoints import VARIABLE
from kdirect.format.group_records import partition_of
from tests.client.batches import PARTITIONS, Watcher, write_batch
from tests.support import wait_until

BATCHES = 4
PROPERTIES = {
    "zookeeper.session.timeout.ms": 3000,
    "replica.lag.time.max.ms": 3000,
    "transaction.state.log.num.partitions": 1,
    "offsets.topic.num.partitions": 1,
}


def coordinator(servers: str, identity: str) -> int:
    """The broker that leads the partition of an identity."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    partitions = admin.list_topics("__transaction_state", 10).topics["__transaction_state"]
    index = partition_of(identity, len(partitions.partitions))
    return int(partitions.partitions[index].leader)


def restart(cluster: Any, broker: int, failpoint: str) -> None:
    """The broker ends when it comes there next."""
    cluster.kill(broker)
    os.environ[VARIABLE] = failpoint
    try:
        cluster.start(broker)
    finally:
        del os.environ[VARIABLE]
    cluster.wait_for_members()


@pytest.mark.timeout(300)
def test_a_batch_outlives_its_coordinator() -> None:
    with kdirect.Cluster(brokers=3, properties=PROPERTIES) as cluster:
        servers = cluster.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([NewTopic("t", PARTITIONS, 3)])["t"].result(20)
        watcher = Watcher(servers, "t")
        with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
            assert write_batch(session, "t", "r", 0) == COMMITTED
            # Whoever leads after that one dies with the next batch decided, and no marker written.
            first = coordinator(servers, "t")
            others = [broker for broker in cluster.running if broker != first]
            for broker in others:
                restart(cluster, broker, "attempts, prepared")
            cluster.kill(first)
            wait_until(lambda: coordinator(servers, "t") in others, "one of them leads", 60)
            second = coordinator(servers, "t")
            cluster.start(first)
            cluster.wait_for_members()
            (third,) = (broker for broker in others if broker != second)
            restart(cluster, third, "")
            assert write_batch(session, "t", "r", 1) in (COMMITTED, ALREADY_COMMITTED)
            assert coordinator(servers, "t") != second, "it has died"
            for batch in range(2, BATCHES):
                assert write_batch(session, "t", "r", batch) in (COMMITTED, ALREADY_COMMITTED)
            wait_until(lambda: watcher.has_seen(BATCHES), "all batches were seen", 60)
        watcher.close()
