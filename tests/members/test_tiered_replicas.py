"""Replicas of a tiered partition: a follower takes from its leader what the leader still has, and
knows that the log begins before.  `test_tiered_cluster` has processes that die."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.errors import BrokerError, ConfigError, TieredOffsetError
from kdirect.log.kernel_producers import known_producers
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.support import wait_until

TP = TopicPartition("t", 0)
HOUR = 3_600_000
TIERED = {"remote.storage.enable": "true", "local.retention.ms": "1000"}


class Pair:
    """Two brokers with replicas of a tiered partition."""

    def __init__(self, brokers: list[Any]) -> None:
        self.brokers = {broker.server.config["node.id"]: broker for broker in brokers}
        servers = ",".join(broker.bootstrap_servers for broker in brokers)
        self.settings = {"bootstrap.servers": servers, "transport": "tcp"}
        self.session = kdirect.connect(self.settings)
        self.session.admin.create_topic(TP.topic, 1, replication_factor=2, configs=TIERED)
        self.wait_in_sync(2)
        for broker in brokers:
            wait_until(lambda b=broker: TP in b.server.logs.partitions, "each has made its replica")
        self.first = self.described().leader
        self.second = next(number for number in self.brokers if number != self.first)

    def described(self) -> Any:
        return self.session.cluster.topic(TP.topic, refresh=True).partition(0)

    def wait_in_sync(self, count: int) -> None:
        wait_until(lambda: len(self.described().in_sync_replicas) == count, f"{count} in sync", 60)

    def partition(self, number: int) -> Partition:
        found: Partition = self.brokers[number].server.logs.partitions[TP]
        return found

    def produce(self, segments: int) -> None:
        """Segments of five records each, an hour old."""
        at = int(time.time() * 1000) - HOUR
        producer = kdirect.Producer(self.settings)
        for _ in range(segments):
            for i in range(5):
                producer.produce(TP.topic, b"v%d" % i, partition=0, timestamp=at)
            assert producer.flush(30) == 0
            self.partition(self.described().leader).roll()
        producer.close()


@pytest.fixture(params=[False, True], ids=["by Fetch", "by RDMA"])
def pair(brokers: Callable[..., list[Any]], tmp_path: Path, request: Any) -> Any:
    made = Pair(
        brokers(
            2,
            remote_log_storage_system_enable=True,
            remote_log_storage_uri=f"file://{tmp_path}/store",
            rlmm_config_remote_log_metadata_topic_replication_factor=2,
            rdma_replicate=request.param,
        )
    )
    yield made
    made.session.close()


def test_a_follower_that_was_away_starts_where_its_leader_begins(pair: Pair) -> None:
    pair.produce(2)
    end = pair.partition(pair.second).log_end_offset
    pair.brokers[pair.second].stop()
    pair.wait_in_sync(1)
    pair.produce(4)
    leader = pair.partition(pair.first)
    assert leader.log_end_offset == 30
    wait_until(lambda: leader.remote_end_offset == 30, "all of it is copied", 60)
    assert leader.apply_retention(int(time.time() * 1000)) == 6
    assert (leader.log_start_offset, leader.local_log_start_offset) == (0, 30) and end <= 10
    pair.brokers[pair.second].start()
    pair.wait_in_sync(2)
    follower = pair.partition(pair.second)
    wait_until(lambda: follower.high_watermark == 30, "it has all that its leader has")
    assert (follower.log_start_offset, follower.local_log_start_offset) == (0, 30)
    assert follower.leader_epochs() == leader.leader_epochs()
    producers = [{e.producer_id for e in known_producers(p.kernel)[0]} for p in (leader, follower)]
    assert producers[0] == producers[1] and len(producers[0]) == 2, "out of the remote segment"
    with pytest.raises(TieredOffsetError):
        follower.read(5, 1000)
    # Records are deleted on both, and each keeps what is above.
    pair.session.admin.delete_records({TP: 7})
    wait_until(lambda: follower.log_start_offset == 7, "it follows the log start")
    assert leader.log_start_offset == 7
    assert follower.first_kept_offset == leader.first_kept_offset == 30


def test_a_follower_that_lags_is_told_that_it_is_in_remote_storage(pair: Pair) -> None:
    """The leader deletes locally what a slow follower has not copied: an error of its own, upon
    which the follower begins where the leader does."""
    pair.produce(1)
    leader, follower = pair.partition(pair.first), pair.partition(pair.second)
    wait_until(lambda: follower.log_end_offset == 5, "it has all")
    for epoch_start in (0, 4):
        assert leader.read_for_replica(epoch_start, 100).buffers
    leader.note_tiered(5)
    leader.apply_retention(int(time.time() * 1000))
    for read in (leader.read_for_replica, leader.read_for_replica_nowait):
        with pytest.raises(TieredOffsetError):
            read(4, 100)
    pair.produce(1)
    wait_until(lambda: follower.log_end_offset == 10, "it goes on")
    assert (follower.log_start_offset, follower.first_kept_offset) == (0, 0), "it has copied them"
    follower.note_tiered(5)
    assert follower.apply_retention(int(time.time() * 1000)) == 1, "what is copied goes by itself"
    assert (follower.log_start_offset, follower.first_kept_offset) == (0, 5)


def test_a_cluster_refuses_what_a_broker_alone_does(
    pair: Pair, brokers: Callable[..., list[Any]]
) -> None:
    admin = pair.session.admin
    for configs in (
        {"remote.storage.enable": "false"},
        {"local.retention.ms": "604800001"},
        {"remote.log.copy.disable": "true"},
    ):
        with pytest.raises((BrokerError, ConfigError), match=r"INVALID_CONFIG|not allowed"):
            admin.alter_configs("t", configs)
    with pytest.raises((BrokerError, ConfigError), match=r"INVALID_CONFIG|not allowed"):
        admin.create_topic("u", 1, configs={**TIERED, "retention.ms": "5"})
    assert pair.partition(pair.first).is_tiered and pair.partition(pair.second).is_tiered
    admin.alter_configs(
        "t", {"remote.storage.enable": "false", "remote.log.delete.on.disable": "true"}
    )
    for number in pair.brokers:
        wait_until(lambda n=number: not pair.partition(n).is_tiered, "it is tiered no longer")
