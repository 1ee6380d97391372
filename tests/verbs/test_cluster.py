"""Brokers of a cluster replicate over real verbs, and records outlive the one that led them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import kdirect
from kdirect import local_cluster
from kdirect.store import zookeeper_server
from tests.support import wait_until
from tests.verbs.conftest import SEGMENT_BYTES, TRANSPORT, WAIT_S, rdma_address

SOME = 50  # records
SESSION_MS = 10_000  # the guest is slow


def pushed(cluster: kdirect.Cluster, node_id: int) -> list[str]:
    """Over what a broker's leaders write into its files, as it has logged."""
    text = cluster.log_file(node_id).read_text(errors="replace")
    return re.findall(r"copying from broker (\d+ over \w+): it writes", text)


def logs(cluster: kdirect.Cluster) -> str:
    """The ends of what brokers have logged."""
    return "".join(
        f"\n-- broker {n}\n" + cluster.log_file(n).read_text(errors="replace")[-3000:]
        for n in cluster.node_ids
    )


@pytest.mark.timeout(900)
def test_records_outlive_their_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Java is slow there too, and so are three interpreters that start at once.
    monkeypatch.setattr(zookeeper_server, "READY_S", 4 * WAIT_S)
    monkeypatch.setattr(local_cluster, "START_TIMEOUT_S", 4 * WAIT_S)
    properties = {
        "listeners": f"{rdma_address()}:0",
        "rdma.transports": TRANSPORT,
        "log.segment.bytes": SEGMENT_BYTES,
        "zookeeper.session.timeout.ms": SESSION_MS,
    }
    with kdirect.Cluster(3, tmp_path / "cluster", properties=properties) as cluster:
        servers = cluster.bootstrap_servers
        with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
            session.admin.create_topic("t", 1, 3, {"min.insync.replicas": 2})
            leader = wait_until(
                lambda: max(0, session.admin.describe_topic("t").leaders[0].leader),
                "somebody led", WAIT_S,
            )  # fmt: skip
            followers = [n for n in cluster.node_ids if n != leader]
            wait_until(
                lambda: all(f"{leader} over {TRANSPORT}" in pushed(cluster, n) for n in followers),
                lambda: f"broker {leader} does not push to all over {TRANSPORT}:{logs(cluster)}",
                WAIT_S,
            )
            producer = confluent_kafka.Producer(
                {
                    "bootstrap.servers": servers,
                    "acks": "all",
                    "enable.idempotence": True,
                    "log_level": 0,
                }
            )
            errors: list[Any] = []

            def produce(first: int) -> None:
                for number in range(first, first + SOME):
                    producer.produce(
                        "t",
                        b"%d" % number,
                        on_delivery=lambda error, _: errors.append(error) if error else None,
                    )
                assert producer.flush(2 * WAIT_S) == 0 and not errors

            produce(0)
            cluster.kill(leader)
            produce(SOME)
            assert session.admin.describe_topic("t").leaders[0].leader in followers
            with session.reader(kdirect.TopicPartition("t", 0), 0, 2 * SOME) as reader:
                found = [v for batch in reader.batches() for v in batch.column("value").to_pylist()]
            assert found == [b"%d" % number for number in range(2 * SOME)]
