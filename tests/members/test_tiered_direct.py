"""Cold records of a cluster that clients read past the brokers, while leaders come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kdirect
from tests.members.test_tiered_members import TP, Members
from tests.support import wait_until

RECORDS = 1500


@pytest.fixture
def cluster(brokers: Callable[..., list[Any]], tmp_path: Path) -> Iterator[Members]:
    store = tmp_path / "store"
    store.mkdir()
    found = brokers(
        3,
        remote_log_storage_system_enable=True,
        remote_log_storage_uri=store.as_uri(),
        remote_log_client_access="config",
        rlmm_config_remote_log_metadata_topic_replication_factor=3,
        remote_log_manager_task_interval_ms=100,
        log_retention_check_interval_ms=50,
        rdma_transports="",
    )
    cluster = Members(found, store)
    cluster.create()
    cluster.produce(RECORDS)
    cluster.settle()
    yield cluster
    cluster.session.close()


def settings(cluster: Members, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": cluster.servers,
        "transport": "tcp",
        "cold.reads": "direct",
        "cold.buffer.bytes": 65536,
        **more,
    }


@pytest.mark.parametrize("how", ["stops", "hands over"])
def test_a_consumer_reads_on_while_the_leader_moves(cluster: Members, how: str) -> None:
    moved: list[Any] = []
    got: list[int] = []
    moves = 2  # a broker that starts again has another port: one stays where it was
    with kdirect.Consumer(settings(cluster)) as consumer:
        consumer.assign({TP: 0})
        while len(got) < RECORDS:
            message = consumer.poll(30)
            assert message is not None, f"{len(got)} came"
            got.append(int(message.value()[:8]))
            if len(got) % 400 == 0 and len(moved) < moves:
                moved.append(move(cluster, how))
        counts = consumer.statistics()
    assert got == list(range(RECORDS))
    assert counts["client_cold_gets"] > 0
    assert len(moved) == moves


def move(cluster: Members, how: str) -> Any:
    """Have another broker lead; the one that did."""
    before = cluster.leader()
    if how == "stops":
        before.stop()
        wait_until(lambda: cluster.leader() not in (None, before), "another one leads", 60)
        before.start()
    else:
        others = [b for b in cluster.brokers if b is not before]
        ids = [b.server.config["node.id"] for b in (*others, before)]
        cluster.session.admin.reassign_partitions({TP: ids})
        cluster.session.admin.elect_leaders([TP])
        wait_until(lambda: cluster.leader() not in (None, before), "another one leads", 60)
    return before


def test_a_new_leader_is_asked_again_until_it_knows(cluster: Members) -> None:
    """It does not know yet what is in the store: that is no answer, and no error."""
    for _ in range(2):
        before = cluster.leader()
        before.stop()
        with kdirect.connect(settings(cluster)) as session, session.reader(TP, 0, 1000) as reader:
            rows = [x for batch in reader for x in batch.column("offset").to_pylist()]
        assert rows == list(range(1000))
        before.start()
        wait_until(lambda b=before: TP in b.server.logs.partitions, "it is back", 30)
