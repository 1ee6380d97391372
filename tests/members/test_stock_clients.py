"""Kafka's clients on three real brokers, all at once, with their default settings: they produce
with acks=all and consume in groups while each broker is killed, and then while each is stopped and
started in good order.

Each broker leads a partition of the topic and coordinates some groups, and one is the controller.
Nothing that was acknowledged is lost, nothing is there twice, and no client is told of an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import kdirect
from tests.members.failures import read_all
from tests.members.stock import TOPIC, Aiokafka, Confluent, Java, KafkaPython, Kcat, StockClient
from tests.support import wait_until

PARTITIONS = 3
SOME = 100  # records of each client
WAIT_S = 90.0


def progress(clients: list[StockClient], what: str) -> None:
    """Each client has read more of what it has sent, and been acknowledged more."""

    def counts() -> dict[str, tuple[int, int]]:
        return {c.name: (len(c.acknowledged), len(c.read)) for c in clients}

    def refused() -> dict[str, list[str]]:
        return {c.name: c.refused[:3] for c in clients if c.refused}

    before = counts()

    def further() -> bool:
        now = counts()
        return all(
            now[c.name][1] >= before[c.name][1] + SOME
            and (not c.tells or now[c.name][0] >= before[c.name][0] + SOME)
            for c in clients
        )

    wait_until(
        lambda: further() or refused(),
        lambda: f"not within {WAIT_S:g} s: {what}; before {before}, now {counts()}",
        WAIT_S,
    )
    assert not refused(), f"{what}: {refused()}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stock_clients_go_on_through_kills_and_a_rolling_restart(
    cluster: Callable[..., kdirect.Cluster], broker_jars: list[Path], kcat: str, tmp_path: Path
) -> None:
    brokers = cluster(3)
    servers = brokers.bootstrap_servers
    clients: list[StockClient] = [
        Confluent(1, servers),
        KafkaPython(2, servers),
        Aiokafka(3, servers),
        Kcat(4, servers, kcat),
        Java(5, servers, broker_jars, tmp_path),
    ]
    with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
        admin = session.admin
        admin.create_topic(TOPIC, PARTITIONS, 3, {"min.insync.replicas": 2})
        try:
            for client in clients:
                client.start()
            progress(clients, "at first")
            assert {p.leader for p in admin.describe_topic(TOPIC).leaders} == {1, 2, 3}
            for node_id in brokers.node_ids:
                brokers.kill(node_id)
                progress(clients, f"without broker {node_id}, which was killed")
                brokers.start(node_id)
                wait_until(
                    lambda: admin.health().is_well, "all replicas were in sync", WAIT_S, 0.05
                )
            for node_id in brokers.node_ids:
                brokers.stop(node_id)
                brokers.start(node_id)
                progress(clients, f"after broker {node_id} was restarted")
                wait_until(
                    lambda: admin.health().is_well, "all replicas were in sync", WAIT_S, 0.05
                )
            for client in clients:
                client.finish()
            for client in clients:
                assert client.refused == [], client.name
                wait_until(
                    lambda c=client: set(c.acknowledged) <= set(c.read),
                    f"{client.name} had read everything",
                    WAIT_S,
                )
        finally:
            for client in clients:
                client.close()
    check(clients, servers)


def check(clients: list[StockClient], servers: str) -> None:
    """The log has each number that was acknowledged, once, in order within a partition."""
    there: dict[int, list[int]] = defaultdict(list)
    for records in read_all(servers, TOPIC, PARTITIONS).values():
        last: dict[int, int] = {}
        for offset, value in records:
            code, number = map(int, value.split(b"."))
            assert number > last.get(code, -1), f"{value!r} at {offset} comes after {last[code]}"
            last[code] = number
            there[code].append(number)
    for client in clients:
        found = sorted(there[client.code])
        assert found == sorted(client.acknowledged) == list(range(len(found))), client.name
        assert set(client.read) == set(found), client.name
