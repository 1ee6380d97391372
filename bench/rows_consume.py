"""Bench rows of consumers: what very many partitions cost.

The broker runs in a process of its own; the consumers are this process.  Each row states its limit,
confluent-kafka over the same topic in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from rows_direct import _cpu_seconds, broker_process
from sides import Figure, figure

PARTITIONS = 1000
CONSUME_S = 0.1


def consume_partitions(seconds: float, quick: bool) -> list[Figure]:
    """A record in each of 1,000 partitions: CPU seconds from `assign` until all are there, by
    single polls, and the wall time of one `consume(1000, 0.1)` of a fresh consumer.  Over shm also
    with a quarter as many slots as partitions: the others go over TCP."""
    partitions = 100 if quick else PARTITIONS
    rows: list[Figure] = []
    with broker_process(log_segment_bytes=1 << 20) as (servers, pid):
        _fill(servers, partitions)
        openers: dict[str, Callable[[], Any]] = {
            "confluent-kafka": lambda: _confluent(servers, partitions),
            "tcp": lambda: _kdirect(servers, partitions, "tcp"),
            "shm": lambda: _kdirect(servers, partitions, "shm"),
        }
        figures = _measure(openers, pid, partitions, seconds / 2, quick)
    with broker_process(log_segment_bytes=1 << 20, rdma_slots_per_consumer=partitions // 4) as (
        servers,
        pid,
    ):
        _fill(servers, partitions)
        few = {"shm, few slots": lambda: _kdirect(servers, partitions, "shm")}
        figures |= _measure(few, pid, partitions, seconds / 4, quick)
    limit = statistics.median(cpu for cpu, _, _ in figures["confluent-kafka"])
    for name, measured in figures.items():
        cpu, broker, wall = (statistics.median(column) for column in zip(*measured, strict=True))
        settings = {
            "partitions": partitions,
            "path": name,
            "rounds": len(measured),
            "broker_cpu_s": broker,
        }
        rows.append(
            figure(
                "consume-partitions",
                cpu,
                "CPU s",
                "confluent-kafka",
                limit,
                lower_is_better=True,
                **settings,
            )
        )
        if name != "confluent-kafka":
            rows.append(
                figure(
                    "consume-partitions.call",
                    wall,
                    "s",
                    "twice its timeout",
                    2 * CONSUME_S,
                    lower_is_better=True,
                    **settings,
                )
            )
    return rows


def _fill(servers: str, partitions: int) -> None:
    from kdirect.client import connect

    session = connect({"bootstrap.servers": servers, "transport": "tcp"})
    session.admin.create_topic("t", partitions)
    with session.producer() as producer:
        for p in range(partitions):
            producer.produce("t", b"x" * 100, partition=p)


def _kdirect(servers: str, partitions: int, transport: str) -> Any:
    import kdirect

    consumer = kdirect.Consumer({"bootstrap.servers": servers, "transport": transport})
    consumer.assign({kdirect.TopicPartition("t", p): 0 for p in range(partitions)})
    return consumer


def _confluent(servers: str, partitions: int) -> Any:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "bench", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition("t", p, 0) for p in range(partitions)])
    return consumer


def _measure(
    openers: dict[str, Callable[[], Any]], pid: int, partitions: int, seconds: float, quick: bool
) -> dict[str, list[tuple[float, float, float]]]:
    """By name: (CPU seconds of this process, of the broker, wall seconds of one `consume`) of each
    round; the names take turns."""
    out: dict[str, list[tuple[float, float, float]]] = {name: [] for name in openers}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, opened in openers.items():
            cpu, broker = time.process_time(), _cpu_seconds(pid)
            consumer = opened()
            got = 0
            while got < partitions:
                got += consumer.poll(1.0) is not None
            cpu, broker = time.process_time() - cpu, _cpu_seconds(pid) - broker
            consumer.close()
            consumer = opened()
            began = time.perf_counter()
            consumer.consume(1000, CONSUME_S)
            out[name].append((cpu, broker, time.perf_counter() - began))
            consumer.close()
        if quick:
            break
    return out
