"""Several brokers over a real ZooKeeper: in the test's process, or each in one of its own.

One ZooKeeper serves all tests of a run; each test has a chroot of its own in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

import kdirect
from kdirect.store.zookeeper_server import ZookeeperServer
from tests.support import wait_until

SESSION_MS = 6000
_numbers = itertools.count()

# Short enough that a broker that hangs is noticed within a test, long enough for a busy machine.
TEST_PROPERTIES = {
    "zookeeper.session.timeout.ms": SESSION_MS,
    "log.segment.bytes": 1 << 20,
    # Clients that outlive their topic would have it made again.
    "auto.create.topics.enable": False,
    "controlled.shutdown.retry.backoff.ms": 200,
}


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZookeeperServer]:
    """The server that all tests share; a test that stops it starts one of its own instead."""
    with ZookeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def zookeeper_connect(zookeeper: ZookeeperServer) -> str:
    """What zookeeper.connect says of a chroot of this test's own."""
    root = f"/test-{next(_numbers)}"
    client = KazooClient(zookeeper.connect)
    client.start(20)
    try:
        client.create(root)
    finally:
        client.stop()
        client.close()
    return zookeeper.connect + root


@pytest.fixture
def nodes(zookeeper_connect: str) -> Iterator[KazooClient]:
    """A client that looks at the test's nodes, or spoils them."""
    client = KazooClient(zookeeper_connect)
    client.start(20)
    yield client
    client.stop()
    client.close()


@pytest.fixture
def brokers(zookeeper_connect: str, tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """``brokers(3, **properties)`` starts so many in this process; their list.  Ids go on from
    those that there are; `rack` may be a list.  They are stopped after the test."""
    started: list[kdirect.Broker] = []

    def start(count: int = 1, *, racks: Any = (), **properties: Any) -> list[Any]:
        ours = []
        for place in range(count):
            node_id = len(started) + 1
            rack = {"broker.rack": racks[place]} if racks else {}
            broker = kdirect.Broker(
                tmp_path / f"broker-{node_id}",
                properties={
                    "node.id": node_id,
                    "zookeeper.connect": zookeeper_connect,
                    "offsets.topic.replication.factor": count,
                    **TEST_PROPERTIES,
                    **rack,
                },
                **properties,
            )
            started.append(broker)
            ours.append(broker)
        for broker in ours:
            broker.start()
        wait_for_members(started)
        return ours

    yield start
    for broker in reversed(started):
        broker.stop()


def wait_for_members(brokers: list[Any]) -> None:
    """Wait until each broker knows all of them and a controller."""
    for broker in brokers:
        with kdirect.connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
        ) as session:
            wait_until(
                lambda admin=session.admin: (
                    len((found := admin.describe_cluster()).brokers) == len(brokers)
                    and found.controller >= 0
                ),
                "all brokers of the cluster were known to each other",
            )


@pytest.fixture
def cluster(zookeeper_connect: str, tmp_path: Path) -> Iterator[Callable[..., kdirect.Cluster]]:
    """``cluster(3, **properties)`` starts so many in processes of their own, which can be killed;
    they are stopped after the test."""
    started: list[kdirect.Cluster] = []

    def start(count: int = 3, *, racks: Any = (), **properties: Any) -> kdirect.Cluster:
        made = kdirect.Cluster(
            count,
            tmp_path / f"cluster-{len(started)}",
            zookeeper_connect=zookeeper_connect,
            racks=racks,
            properties={**TEST_PROPERTIES},
            **properties,
        )
        started.append(made)
        return made.start()

    yield start
    for made in started:
        made.stop()
