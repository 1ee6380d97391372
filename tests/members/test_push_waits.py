"""What producers over RDMA wait for, where leaders write into their followers' files: the disk, and
enough replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import confluent_kafka
import pytest

import kdirect
from kdirect.model import TopicPartition
from tests.members.test_push_cluster import make_topic, ways_of
from tests.members.test_segments import TOPIC
from tests.support import wait_until

TP = TopicPartition(TOPIC, 0)
FAST = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}


def pushed(ours: list[Any], **config: Any) -> Any:
    """A topic that is pushed to all others; its leader."""
    make_topic(",".join(b.bootstrap_servers for b in ours), **config)
    wait_until(lambda: ways_of(ours) == ["LEADS", "PUSHED", "PUSHED"], lambda: f"{ways_of(ours)}")
    return next(b for b in ours if b._server.member.replicas._replicas[TP].leader is not None)


class Sent:
    """What kdirect's producers were given, and what became of it."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.count = 0
        self.failed: list[Any] = []
        self.delivered: set[int] = set()

    def producer(self, acks: str, **settings: Any) -> kdirect.Producer:
        return kdirect.Producer(
            {
                "bootstrap.servers": self.servers,
                "transport": "shm",
                "acks": acks,
                **FAST,
                **settings,
            }
        )

    def send(self, producer: kdirect.Producer, count: int) -> None:
        for _ in range(count):
            number, self.count = self.count, self.count + 1

            def told(error: Any, message: Any, number: int = number) -> None:
                if error is not None:
                    self.failed.append(error)
                else:
                    self.delivered.add(number)

            producer.produce(TOPIC, b"%d" % number, partition=0, on_delivery=told)

    def check(self) -> None:
        """All of it is in the log, once."""
        assert self.failed == []
        with kdirect.connect({"bootstrap.servers": self.servers, **FAST}) as session:
            end = session.latest_offsets([TP])[TP]
            with closing(session.reader(TP, 0, end)) as reader:
                found = [int(v) for b in reader.batches() for v in b.column("value").to_pylist()]
        assert sorted(found) == list(range(self.count))


@pytest.mark.timeout(120)
def test_records_are_on_disk_before_they_are_acknowledged(
    brokers: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`log.flush.before.ack` on a pushed partition, over RDMA and over TCP."""
    ours = brokers(3, log_flush_before_ack=True)
    leader = pushed(ours)
    log = leader._server.logs.partitions[TP]
    synced: list[int] = []
    sync = log._disk.sync

    def noted_sync(segments: Any, end_offset: int) -> None:
        sync(segments, end_offset)
        synced.append(end_offset)

    monkeypatch.setattr(log._disk, "sync", noted_sync)
    servers = ",".join(b.bootstrap_servers for b in ours)
    sent = Sent(servers)
    for acks in ("all", "1"):
        with closing(sent.producer(acks)) as producer:
            for _ in range(20):
                sent.send(producer, 1)
                assert producer.flush(30) == 0
                assert max(synced) >= sent.count and log.recovery_point >= sent.count
    assert leader.statistics()["rdma_commits"] == sent.count
    plain = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
    for _ in range(20):
        plain.produce(TOPIC, b"%d" % sent.count, partition=0)
        sent.count += 1
        assert plain.flush(30) == 0
        assert log.recovery_point >= sent.count and log.high_watermark == sent.count
    assert ways_of(ours) == ["LEADS", "PUSHED", "PUSHED"]
    sent.check()


@pytest.mark.timeout(120)
def test_a_flush_of_so_many_records_is_waited_for(brokers: Callable[..., list[Any]]) -> None:
    """`flush.messages` on a pushed partition: the replicas alone are not enough."""
    ours = brokers(3)
    log = pushed(ours, **{"flush.messages": "1"})._server.logs.partitions[TP]
    servers = ",".join(b.bootstrap_servers for b in ours)
    plain = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
    for n in range(1, 30):
        plain.produce(TOPIC, b"x", partition=0)
        assert plain.flush(30) == 0
        assert log.recovery_point >= n


@pytest.mark.timeout(180)
def test_producers_hear_at_once_that_too_few_are_in_sync(brokers: Callable[..., list[Any]]) -> None:
    """Below min.insync.replicas nothing is committed: a producer with acks=all loses the head, is
    refused it and repeats what it has; one with acks=1 goes on."""
    ours = brokers(3)
    leader = pushed(ours)
    others = [b for b in ours if b is not leader]
    sent = Sent(",".join(b.bootstrap_servers for b in ours))
    heads = leader._server.access.produce.heads
    replica = leader._server.member.replicas._replicas[TP]
    with closing(sent.producer("all")) as waiting, closing(sent.producer("1")) as going_on:
        sent.send(waiting, 50)
        assert waiting.flush(30) == 0 and TP in heads
        for other in others:
            sent.send(waiting, 20)
            other.stop()
        wait_until(lambda: not replica.leader.has_enough, "too few are in sync", 30)
        wait_until(lambda: TP not in heads, "the head has ended", 10)
        before = len(sent.delivered)
        sent.send(going_on, 20)
        assert going_on.flush(30) == 0
        assert len(sent.delivered) >= before + 20
        assert not any(g.waits_for_replicas for x in heads.values() for g in x.members.values())
        for other in others:
            other.start()
        wait_until(lambda: replica.leader.has_enough, "enough are in sync again", 30)
        sent.send(waiting, 20)
        assert waiting.flush(60) == 0
    sent.check()
