"""Commits over RDMA to the coordinator of a cluster: they count when the replicas have them, and
outlive a coordinator that is killed."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

import kdirect
from kdirect.errors import KdirectError
from kdirect.model import TopicPartition
from tests.support import poll_until, wait_until

TP = TopicPartition("t", 0)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_what_was_acknowledged_outlives_the_coordinator(cluster: Any, protocol: str) -> None:
    made = cluster(
        3, offsets_topic_num_partitions=1, offsets_topic_replication_factor=3,
        min_insync_replicas=2,
    )  # fmt: skip
    with kdirect.connect(made.bootstrap_servers) as session:
        session.admin.create_topic("t", 1, replication_factor=3)
    settings = {"bootstrap.servers": made.bootstrap_servers, "group.id": "g", "transport": "shm"}
    settings |= {"enable.auto.commit": False, "session.timeout.ms": 45_000}
    settings |= {"group.protocol": protocol}
    with kdirect.Consumer(settings) as consumer:
        consumer.subscribe(["t"])
        poll_until(lambda: consumer.assignment() == [TP], consumer)
        for offset in range(30):
            consumer.commit(offsets={TP: offset}, asynchronous=False)
        before = consumer.statistics()["direct_commits"]
        assert before == 29, "the first goes over TCP"
        admin = AdminClient({"bootstrap.servers": made.bootstrap_servers})
        made.kill(admin.describe_consumer_groups(["g"])["g"].result(30).coordinator.id)
        assert consumer.committed([TP]) == {TP: 29}
        offset = 30

        def commits_directly() -> bool:
            nonlocal offset
            offset += 1
            try:
                consumer.commit(offsets={TP: offset}, asynchronous=False)
            except KdirectError:  # the coordinator is looked for, or the group comes together
                consumer.poll(0.1)
                return False
            assert consumer.committed([TP]) == {TP: offset}
            return consumer.statistics()["direct_commits"] > before

        wait_until(commits_directly, "commits over RDMA to the next coordinator", timeout_s=60)
