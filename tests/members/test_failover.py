"""How long a partition is without a leader: from the loss of a leader's process until a record that
was sent afterwards is acknowledged by all of what is left.

The bounds are the ones that are promised (docs/cluster.md); `make bench-vs-kafka ROWS=failover`
measures many losses beside Kafka.  The producer asks for news often, so that the time is the
brokers' and not the client's.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka

import kdirect
from tests.support import wait_until

KILLS = int(os.environ.get("KDIRECT_KILLS") or 5)
KILL_S = 2.0  # by nine tenths of them
SESSION_MS = 4000
CLIENT = {
    "acks": "all",
    "linger.ms": 0,
    "retry.backoff.ms": 20,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 100,
    "topic.metadata.refresh.interval.ms": 100,
    "topic.metadata.refresh.fast.interval.ms": 20,
    "request.timeout.ms": 1000,
    "socket.timeout.ms": 2000,
    "log_level": 0,
}
STEP_S = 0.01
LOST_S = 60.0


def next_acknowledged(producer: Any) -> float:
    """When the first of the records that are sent from now on is acknowledged."""
    first: list[float] = []

    def delivered(error: Any, message: Any) -> None:
        if error is None and not first:
            first.append(time.monotonic())

    end = time.monotonic() + LOST_S
    while not first:
        assert time.monotonic() < end, f"no record was acknowledged within {LOST_S:g} s"
        producer.produce("t", bytes(100), on_delivery=delivered)
        producer.poll(STEP_S)
    return first[0]


def test_killed_leaders_are_replaced_at_once(zookeeper_connect: str, tmp_path: Path) -> None:
    """At default settings: the session of a dead broker lives on for long."""
    with kdirect.Cluster(3, tmp_path / "cluster", zookeeper_connect=zookeeper_connect) as cluster:
        servers = cluster.bootstrap_servers
        with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
            admin = session.admin
            admin.create_topic("t", 1, 3)
            producer = confluent_kafka.Producer({"bootstrap.servers": servers, **CLIENT})
            spent = []
            for _ in range(KILLS):
                next_acknowledged(producer)
                leader = admin.describe_topic("t").leaders[0].leader
                began = time.monotonic()
                cluster.kill(leader)
                spent.append(next_acknowledged(producer) - began)
                assert admin.describe_topic("t").leaders[0].leader != leader
                cluster.start(leader)
                wait_until(lambda: admin.health().is_well, "all replicas were in sync", LOST_S)
            producer.flush(LOST_S)
    print("seconds:", *(f"{s:.2f}" for s in sorted(spent)))
    assert sorted(spent)[math.ceil(0.9 * KILLS) - 1] <= KILL_S, spent


def test_a_stopped_leader_is_replaced_when_its_session_ends(
    cluster: Callable[..., kdirect.Cluster],
) -> None:
    brokers = cluster(3, zookeeper_session_timeout_ms=SESSION_MS)
    servers = brokers.bootstrap_servers
    with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
        admin = session.admin
        admin.create_topic("t", 1, 3)
        producer = confluent_kafka.Producer({"bootstrap.servers": servers, **CLIENT})
        next_acknowledged(producer)
        leader = admin.describe_topic("t").leaders[0].leader
        began = time.monotonic()
        brokers.pause(leader)
        try:
            spent = next_acknowledged(producer) - began
        finally:
            brokers.resume(leader)
        producer.flush(LOST_S)
    print(f"seconds: {spent:.2f}")
    assert spent <= SESSION_MS / 1000 + 1.0
