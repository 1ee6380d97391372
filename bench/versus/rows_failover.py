"""Failover: from the loss of a leader until a record is acknowledged by all of what is left.

A stock producer, the same on both sides, sends a record every ten milliseconds with acks=all; what
counts is the first one that was sent after the loss and is acknowledged.  It asks for news often,
so that the time is the brokers' and not the client's; its settings are in the results.

Two losses: the leader's process is killed (SIGKILL), and it is stopped (SIGSTOP), which shows only
when its session ends.  For the latter both clusters have the same session timeout.  Brokers have
their defaults otherwise.  Kafka's brokers vote too, and kdirect's may be the controller: the leader
that is lost may be the one that would have elected its successor, on both sides.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from versus.clusters import Cluster
from versus.lives import KAFKA, PATHS, Found, Path, lives, warm_up
from versus.measure import figure

Figures = list[dict[str, Any]]
REPLICAS = 3
COUNT = "KDIRECT_BENCH_COUNT"  # how often a leader is killed; bench/vs_kafka.py --count
KILLS, MOST_STOPS = 20, 5
KILL_BAR, KILL_LIMIT_MS = 4.0, 2000.0
SESSION_MS = 9000  # Kafka's default; for SIGSTOP kdirect gets it too
STOP_LIMIT_MS = SESSION_MS + 1000.0
STEP_S, LOST_S = 0.01, 120.0
WARM_S = {"kafka": 10.0, "kdirect": 2.0}
STOCK = tuple(path for path in PATHS if not path.own)
CLIENT = {
    "acks": "all", "linger.ms": 0, "message.timeout.ms": int(LOST_S * 1000),
    "retry.backoff.ms": 20, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100,
    "topic.metadata.refresh.interval.ms": 100, "topic.metadata.refresh.fast.interval.ms": 20,
    "request.timeout.ms": 1000, "socket.timeout.ms": 2000, "log_level": 0,
}  # fmt: skip


def failover(seconds: float, quick: bool) -> Figures:
    """SIGKILL and SIGSTOP of leaders.  How long that takes depends on counts, not on `seconds`."""
    count = int(os.environ.get(COUNT) or (1 if quick else KILLS))
    stops = min(MOST_STOPS, math.ceil(count / 4))
    kills = _lives(count, _kill, quick, {})
    stopped = _lives(stops, _stop, quick, {"zookeeper.session.timeout.ms": str(SESSION_MS)})
    out = []
    for path in STOCK:
        out.append(_figure("failover", kills, path, limit=KILL_LIMIT_MS, bar=KILL_BAR))
        out.append(
            _figure("failover.stopped", stopped, path, limit=STOP_LIMIT_MS,
                    session_timeout_ms=SESSION_MS)
        )  # fmt: skip
    return out


def _lives(
    count: int, lose: Callable[[Cluster, str, Any], float], quick: bool,
    properties: Mapping[str, str],
) -> Found:  # fmt: skip
    """`count` losses of each path, spread over two rounds."""
    rounds = min(2, count)
    done: dict[str, int] = {}

    def work(cluster: Cluster, path: Path) -> Mapping[Any, Any]:
        from confluent_kafka import Producer

        done[path.key] = done.get(path.key, 0) + 1
        mine = count // 2 if done[path.key] > 1 else count - (rounds - 1) * (count // 2)  # odd: +1
        warm_up(cluster, path, REPLICAS, "all", 0.5 if quick else WARM_S[cluster.key])
        with cluster.topic("failover", REPLICAS) as topic:
            producer = Producer({"bootstrap.servers": cluster.address, **CLIENT})
            samples = [lose(cluster, topic, producer) for _ in range(mine)]
            producer.flush(LOST_S)
        return {"ms": samples}

    return lives(rounds, work, paths=STOCK, properties=properties)


def _kill(cluster: Cluster, topic: str, producer: Any) -> float:
    """Milliseconds from SIGKILL on; brings the broker back, and waits until it is in sync."""
    _acknowledged(producer, topic)
    leader = cluster.leader(topic)
    began = time.perf_counter()
    cluster.kill(leader)
    spent = _acknowledged(producer, topic) - began
    cluster.leader(topic, without=leader)
    cluster.start(leader)
    cluster.until_in_sync(topic, REPLICAS)
    return spent * 1e3


def _stop(cluster: Cluster, topic: str, producer: Any) -> float:
    """The same from SIGSTOP on."""
    _acknowledged(producer, topic)
    leader = cluster.leader(topic)
    with cluster.paused(leader):
        began = time.perf_counter()
        spent = _acknowledged(producer, topic) - began
        cluster.leader(topic, without=leader)
    cluster.until_in_sync(topic, REPLICAS)
    return spent * 1e3


def _acknowledged(producer: Any, topic: str) -> float:
    """When the first of the records that are sent from now on is acknowledged."""
    first: list[float] = []

    def delivered(error: Any, message: Any) -> None:
        if error is None and not first:
            first.append(time.perf_counter())

    end = time.perf_counter() + LOST_S
    while not first:
        if time.perf_counter() > end:
            raise RuntimeError(f"no record of {topic} was acknowledged within {LOST_S:g} s")
        producer.produce(topic, b"v" * 512, partition=0, on_delivery=delivered)
        producer.poll(STEP_S)
    return first[0]


def _figure(row: str, found: Found, path: Path, *, limit: float, **told: Any) -> dict[str, Any]:
    """The 90th percentile of all losses of a side."""
    samples = {
        side: [ms for life in results["ms"] for ms in life]
        for side, results in found.sides(path).items()
    }
    results = {
        side: {"publishDelayLatency90pct": p90(every), "every_ms": [round(ms, 1) for ms in every]}
        for side, every in samples.items()
    }
    # Pushed replication is what kdirect does by default; without it the row's name says so.
    name = row if path is STOCK[0] else f"{row}.{path.key}"
    return figure(
        name, "ms", p90(samples["kdirect"]) if "kdirect" in samples else None,
        p90(samples[KAFKA.key]), found, results, lower_is_better=True, limit=("at most", limit),
        **found.told(path), replicas=REPLICAS, acks="all", client=CLIENT, warm_up_s=WARM_S,
        losses=len(samples[KAFKA.key]), **told,
        how="90th percentile, until the first record that was sent later is acknowledged",
    )  # fmt: skip


def p90(samples: list[float]) -> float:
    """The smallest sample that nine tenths of them do not exceed."""
    return sorted(samples)[math.ceil(0.9 * len(samples)) - 1]
