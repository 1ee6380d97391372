"""A cluster that has lost all its log directories, and its metadata store, and has its objects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kazoo.client import KazooClient

import kdirect
from kdirect.cli import main
from kdirect.model import TopicPartition
from tests.members.conftest import TEST_PROPERTIES, wait_for_members
from tests.members.test_tiered_members import Members
from tests.support import wait_until

TP = TopicPartition("t", 0)


def properties(store: Path, zookeeper: str, node_id: int) -> dict[str, Any]:
    return {
        "remote.log.client.access": "config",
        "node.id": node_id,
        "zookeeper.connect": zookeeper,
        "remote.log.storage.system.enable": True,
        "remote.log.storage.uri": store.as_uri(),
        "remote.log.manager.task.interval.ms": 100,
        "rlmm.config.remote.log.metadata.topic.replication.factor": 1,
        "offsets.topic.replication.factor": 1,
        "log.retention.check.interval.ms": 50,
        "rdma.transports": "",
        **TEST_PROPERTIES,
    }


def started(store: Path, zookeeper: str, tmp_path: Path, *ids: int) -> list[Any]:
    brokers = [
        kdirect.Broker(tmp_path / f"b{i}", properties=properties(store, zookeeper, i)) for i in ids
    ]
    for broker in brokers:
        broker.start()
    return brokers


def values(broker: Any, count: int, **settings: Any) -> list[int]:
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp", **settings}
    ) as consumer:
        consumer.assign({TP: 0})
        got: list[int] = []
        while len(got) < count:
            message = consumer.poll(20)
            assert message is not None, f"{len(got)} of {count} came"
            got.append(int(message.value()[:8]))
        return got


def test_one_broker_is_rebuilt_and_brings_the_cluster_back(
    zookeeper_connect: str, tmp_path: Path, capsys: Any
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    server, _, chroot = zookeeper_connect.partition("/")
    client = KazooClient(server)
    client.start(20)
    client.create(f"/{chroot}/before")
    client.create(f"/{chroot}/after")
    client.stop()
    client.close()
    brokers = started(store, f"{zookeeper_connect}/before", tmp_path, 1, 2, 3)
    try:
        wait_for_members(brokers)
        cluster = Members(brokers, store)
        cluster.create()
        cluster.produce(1000)
        cluster.settle()
        topic_id = cluster.partition(cluster.leader()).topic_id
        cluster_id = brokers[0].server.logs.cluster_id
        cluster.session.close()
    finally:
        for broker in brokers:
            broker.stop()
    for i in (1, 2, 3):
        shutil.rmtree(tmp_path / f"b{i}")
    objects = set(store.rglob("*.kseg"))
    after = f"{zookeeper_connect}/after"
    given = {**properties(store, after, 1), "log.dirs": tmp_path / "b1"}
    sets = [x for name, value in given.items() for x in ("--set", f"{name}={value}")]
    assert main(["remote", "rebuild", *sets, "--json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["log_start_offset"] == 0
    end = row["end_offset"]
    assert end > 800
    brokers = started(store, after, tmp_path, 1, 2)
    try:
        wait_for_members(brokers)
        cluster = Members(brokers, store)
        assert brokers[0].server.logs.cluster_id == cluster_id
        wait_until(lambda: cluster.leader() is brokers[0], "the rebuilt broker leads", 30)
        assert cluster.partition(brokers[0]).topic_id == topic_id
        for way in ("broker", "direct"):
            assert values(brokers[0], end, **{"cold.reads": way}) == list(range(end))
        cluster.session.admin.reassign_partitions({TP: [1, 2]})
        wait_until(lambda: not cluster.session.admin.list_reassignments(), "both have it", 30)
        cluster.produce(400)
        cluster.settle()
        got = values(brokers[1], end + 400)
        # The producer is not idempotent: a batch that it repeats is there twice.
        assert got[:end] == list(range(end)) and set(got[end:]) <= set(range(400)) and got[end] == 0
        for broker in brokers:
            assert broker.statistics()["remote_not_owner"] == 0
        assert objects < set(store.rglob("*.kseg"))
        cluster.session.close()
    finally:
        for broker in brokers:
            broker.stop()
