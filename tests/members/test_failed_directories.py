"""Log directories that fail on one of three brokers: their partitions are led elsewhere, all others
stay where they are, and no record is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.client import KazooClient

import kdirect
from kdirect.cluster import paths
from kdirect.errors import LogError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.members.conftest import TEST_PROPERTIES, wait_for_members
from tests.members.wire import ask, metadata
from tests.support import wait_until

TOPIC = "t"
PARTITIONS = 4
SEGMENT_BYTES = 1 << 16

Start = Callable[..., kdirect.Broker]


@pytest.fixture
def start(zookeeper_connect: str) -> Iterator[Start]:
    """``start(node_id, directories)``: a broker in this process."""
    with ExitStack() as stack:

        def started(node_id: int, directories: list[Path], **properties: Any) -> kdirect.Broker:
            given = {
                "node.id": node_id,
                "zookeeper.connect": zookeeper_connect,
                **TEST_PROPERTIES,
                **properties,
            }
            broker = kdirect.Broker([str(d) for d in directories], properties=given)
            stack.callback(broker.stop)
            return broker.start()

        yield started


def create(broker: kdirect.Broker, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    config = {"segment.bytes": str(SEGMENT_BYTES), "min.insync.replicas": "2"}
    admin.create_topics([NewTopic(TOPIC, partitions, 3, config=config)])[TOPIC].result(30)


def servers_of(brokers: dict[int, kdirect.Broker]) -> str:
    return ",".join(b.bootstrap_servers for b in brokers.values())


def produce(servers: str, partitions: int, count: int) -> None:
    """So many records of 1 KiB to each partition, each acknowledged by all in sync."""
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": servers,
            "acks": "all",
            "enable.idempotence": True,
            "batch.size": 16_384,
            "log_level": 0,
        }
    )
    errors: list[Any] = []
    for n in range(count):
        for partition in range(partitions):
            producer.produce(
                TOPIC,
                b"%08d" % n + bytes(1016),
                partition=partition,
                on_delivery=lambda e, m: errors.append(e) if e is not None else None,
            )
        producer.poll(0)
    assert producer.flush(60) == 0 and not errors, errors[:3]


def values(broker: kdirect.Broker, partition: int, count: int) -> list[int]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "g", "log_level": 0}
    )
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, partition, 0)])
    found: list[int] = []
    try:
        while len(found) < count:
            messages = consumer.consume(count, 20)
            assert messages, f"{len(found)} of {count} records"
            found += [int(m.value()[:8]) for m in messages if m.error() is None]
    finally:
        consumer.close()
    return found


def picture(broker: kdirect.Broker, partition: int) -> Any:
    return broker.server.member.membership.metadata.partition(TopicPartition(TOPIC, partition))


def in_sync(broker: kdirect.Broker, partition: int) -> set[int]:
    found = picture(broker, partition)
    return set(found.state.in_sync) if found is not None and found.state is not None else set()


def wait_for_replicas(broker: kdirect.Broker, partitions: int) -> None:
    """Wait until this broker knows that all replicas of each partition are in sync."""
    for n in range(partitions):
        wait_until(lambda n=n: in_sync(broker, n) == {1, 2, 3}, f"all replicas of {n} were there")


def replace_by_a_file(directory: Path) -> None:
    """What Kafka's own tests do: nothing below can be opened, made or renamed any more."""
    directory.rename(directory.with_name(directory.name + ".away"))
    directory.write_bytes(b"")


def mend(directory: Path) -> None:
    directory.unlink()
    directory.with_name(directory.name + ".away").rename(directory)


def of_directory(broker: kdirect.Broker, directory: Path) -> set[int]:
    found = broker.server.logs.partitions.items()
    return {
        tp.partition
        for tp, log in found
        if tp.topic == TOPIC and log.directory.parent == directory.absolute()
    }


def test_a_directory_that_fails_fails_over_its_own_partitions(start: Start, tmp_path: Path) -> None:
    directories = {n: [tmp_path / f"{n}a", tmp_path / f"{n}b"] for n in (1, 2, 3)}
    brokers = {n: start(n, directories[n]) for n in directories}
    wait_for_members(list(brokers.values()))
    create(brokers[1], PARTITIONS)
    for broker in brokers.values():
        wait_for_replicas(broker, PARTITIONS)
    produce(servers_of(brokers), PARTITIONS, 20)
    # The broker that leads most of all; half of what it has is in its second directory.
    leaders = [picture(brokers[1], n).state.leader for n in range(PARTITIONS)]
    victim = max(brokers, key=leaders.count)
    broken = directories[victim][1]
    lost = of_directory(brokers[victim], broken)
    kept = of_directory(brokers[victim], directories[victim][0])
    assert len(lost) == len(kept) == PARTITIONS // 2
    before = {n: picture(brokers[1], n).state for n in kept}
    other = brokers[1 if victim != 1 else 2]

    replace_by_a_file(broken)
    produce(servers_of(brokers), PARTITIONS, 200)  # every head is full once
    for n in lost:
        wait_until(lambda n=n: victim not in in_sync(other, n), f"{n} was in sync without it")
        assert picture(other, n).state.leader not in (victim, -1)
    for n in kept:
        now = picture(other, n).state
        assert (now.leader, now.leader_epoch) == (before[n].leader, before[n].leader_epoch)
        assert victim in now.in_sync

    # What clients are told.
    partition = min(lost)
    rows = metadata(other, [TOPIC]).topics[0].partitions
    offline = {r.partition_index: list(r.offline_replicas) for r in rows}
    assert offline == {n: [victim] if n in lost else [] for n in range(PARTITIONS)}
    with pytest.raises(LogError, match="has failed"):
        brokers[victim].server.topics.partition(TOPIC, partition)
    rows = ask(brokers[victim], build(p.DescribeLogDirsRequest, topics=None), 1).results
    errors = {Path(r.log_dir): r.error_code for r in rows}
    assert errors == {
        directories[victim][0].absolute(): 0,
        broken.absolute(): ErrorCode.KAFKA_STORAGE_ERROR,
    }

    # It starts with the directory broken, and has it mended later.
    for mended in (False, True):
        brokers[victim].stop()
        if mended:
            mend(broken)
        brokers[victim] = start(victim, directories[victim])
        produce(servers_of(brokers), PARTITIONS, 20)
        back = set(range(PARTITIONS)) if mended else kept
        for n in back:
            wait_until(lambda n=n: victim in in_sync(other, n), f"{n} was in sync again")
        assert all(victim not in in_sync(other, n) for n in set(range(PARTITIONS)) - back)
    for n in range(PARTITIONS):
        assert len(values(other, n, 260)) == 260


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs root to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_leader_without_room_hands_over_and_comes_back(
    small_disk: Path, start: Start, tmp_path: Path
) -> None:
    # While it has all records it may come back into sync, but it holds nobody up for so long.
    lag = {"replica.lag.time.max.ms": 120_000}
    places = {1: small_disk / "1", 2: tmp_path / "2", 3: tmp_path / "3"}
    brokers = {n: start(n, [place], **lag) for n, place in places.items()}
    wait_for_members(list(brokers.values()))
    create(brokers[1], 1)
    wait_for_replicas(brokers[2], 1)
    admin = AdminClient({"bootstrap.servers": brokers[2].bootstrap_servers, "log_level": 0})
    if picture(brokers[2], 0).state.leader != 1:
        assignment = {"partition_index": 0, "replicas": [1, 2, 3]}
        topics = [{"name": TOPIC, "partitions": [assignment]}]
        request = build(p.AlterPartitionReassignmentsRequest, topics=topics, timeout_ms=20_000)
        assert ask(brokers[2], request, 0).error_code == 0
        wait_until(lambda: picture(brokers[2], 0).replicas == (1, 2, 3), "1 was preferred")
        at = [confluent_kafka.TopicPartition(TOPIC, 0)]
        admin.elect_leaders(confluent_kafka.ElectionType.PREFERRED, at).result(30)
    wait_until(lambda: picture(brokers[2], 0).state.leader == 1, "the one with little room led")
    wait_for_replicas(brokers[2], 1)

    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), open(ballast, "ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    produce(servers_of(brokers), 1, 2000)
    assert picture(brokers[2], 0).state.leader != 1
    assert brokers[1].server.logs.usable_dirs, "a full disk has not failed"
    ballast.unlink()
    wait_until(lambda: 1 in in_sync(brokers[2], 0), "it came back", 60)
    assert values(brokers[1], 0, 2000) == list(range(2000))


def test_a_broker_ends_when_its_last_directory_has_failed(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    ours = cluster(3)
    admin = AdminClient({"bootstrap.servers": ours.bootstrap_servers, "log_level": 0})
    config = {"segment.bytes": str(SEGMENT_BYTES)}
    admin.create_topics([NewTopic(TOPIC, 3, 3, config=config)])[TOPIC].result(30)
    produce(ours.bootstrap_servers, 3, 1)  # all replicas are there
    (directory,) = ours.log_dirs(2)
    pid = ours.pid(2)
    replace_by_a_file(directory)
    produce(ours.bootstrap_servers, 3, 200)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 1)
    assert ours.running == [1, 3]
    # The next process may lack what this one had not synced, and is not taken for one that has it.
    client = KazooClient(ours.zookeeper_connect)
    client.start()
    try:
        path = paths.state(TopicPartition(TOPIC, 0))
        wait_until(lambda: "2" in json.loads(client.get(path)[0]).get("failed", {}), "it was told")
    finally:
        client.stop()
        client.close()
    mend(directory)
    ours.start(2)
    ours.wait_for_members()
