"""Kafka's own VerifiableProducer and VerifiableConsumer through the loss of leaders and of the
controller: the programs of Kafka's system tests, which tell what was acknowledged and consumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kdirect
from tests.members.java_tools import WAIT_S, Tool
from tests.support import wait_until

PER_SECOND = 400


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kafkas_verifiable_clients_see_every_record_once(
    cluster: Callable[..., kdirect.Cluster], broker_jars: list[Path], tmp_path: Path
) -> None:
    brokers = cluster(3)
    where = ["--bootstrap-server", brokers.bootstrap_servers, "--topic", "v"]
    config = tmp_path / "producer.properties"
    config.write_text("enable.idempotence=true\nretries=2147483647\nrequest.timeout.ms=5000\n")
    with kdirect.connect(
        {"bootstrap.servers": brokers.bootstrap_servers, "transport": "tcp"}
    ) as session:
        admin = session.admin
        admin.create_topic("v", 2, 3, {"min.insync.replicas": 2})
        consumer = Tool(
            broker_jars, "VerifiableConsumer", *where, "--group-id", "g", "--verbose",
            "--reset-policy", "earliest",
        )  # fmt: skip
        producer = Tool(
            broker_jars, "VerifiableProducer", *where, "--throughput", str(PER_SECOND),
            "--acks", "-1", "--producer.config", str(config),
        )  # fmt: skip

        def progress(what: str) -> None:
            """More records were acknowledged, and more were consumed."""
            sent, read = (len(t.told(n)) for t, n in counted)
            wait_until(
                lambda: (
                    len(counted[0][0].told(counted[0][1])) > sent + 300
                    and len(counted[1][0].told(counted[1][1])) > read + 300
                ),
                f"records were acknowledged and consumed {what}",
                WAIT_S,
            )

        counted = [(producer, "producer_send_success"), (consumer, "record_data")]
        try:
            progress("at first")
            for lose in (brokers.kill, brokers.stop):
                for victim in (
                    admin.describe_topic("v").leaders[0].leader,
                    admin.describe_cluster().controller,
                ):
                    lose(victim)
                    progress(f"without broker {victim}")
                    brokers.start(victim)
                    wait_until(
                        lambda: admin.health().is_well, "all replicas were in sync", WAIT_S, 0.05
                    )
            producer.process.terminate()
            wait_until(lambda: producer.told("tool_data"), "the producer was done", WAIT_S)
            assert producer.told("producer_send_error") == []
            acknowledged = {
                (r["partition"], r["offset"]): r["value"]
                for r in producer.told("producer_send_success")
            }
            wait_until(
                lambda: (
                    len({r["value"] for r in consumer.told("record_data")}) >= len(acknowledged)
                ),
                "everything was consumed",
                WAIT_S,
            )
        finally:
            producer.end()
            consumer.end()
    # A group that moves may consume again what was not committed yet: the same record each time.
    for r in consumer.told("record_data"):
        assert acknowledged[r["partition"], r["offset"]] == r["value"]
    assert sorted(map(int, acknowledged.values())) == list(range(len(acknowledged)))
