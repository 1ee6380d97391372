"""Bench row of offset commits: one that is waited for at a time, over RDMA and over TCP.

The broker runs in a process of its own, and its produce worker spins.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from rows_direct import _apart, _percentile, broker_process
from sides import Figure, figure


def _commits(consumer: Any, partitions: int, seconds: float) -> list[float]:
    """How long each commit of all partitions took, in microseconds, sorted."""
    from kdirect.model import TopicPartition

    tps = [TopicPartition("offsets", i) for i in range(partitions)]
    while len(consumer.assignment()) < partitions:
        consumer.poll(0.1)
    clock = time.perf_counter_ns
    samples: list[float] = []
    end = time.perf_counter() + seconds
    offset = 0
    while time.perf_counter() < end or len(samples) < 100:
        offset += 1
        offsets = dict.fromkeys(tps, offset)
        begin = clock()
        consumer.commit(offsets=offsets, asynchronous=False)
        samples.append((clock() - begin) / 1000)
    found = consumer.committed(tps)
    assert set(found.values()) == {offset}, "what was acknowledged is what the group has"
    return sorted(samples[10:])


def commit(seconds: float, quick: bool) -> list[Figure]:
    """`Consumer.commit` that waits: over shm while the broker spins, beside TCP."""
    import kdirect
    from kdirect.client import connect

    rows: list[Figure] = []
    everywhere = os.sched_getaffinity(0)
    for partitions in (1, 16):
        medians: dict[str, list[float]] = {}
        for transport in ("tcp", "shm"):
            with broker_process(rdma_spin_us=10_000) as (servers, pid):
                settings = {"bootstrap.servers": servers, "transport": transport}
                with connect(settings) as session:
                    session.admin.create_topic("offsets", partitions)
                _apart(pid)
                settings |= {"group.id": "bench", "enable.auto.commit": False}
                with kdirect.Consumer(settings) as consumer:
                    consumer.subscribe(["offsets"])
                    medians[transport] = _commits(consumer, partitions, seconds / 4)
                os.sched_setaffinity(0, everywhere)
        tcp = statistics.median(medians["tcp"])
        for transport, name, bar in (("shm", "bar: 5 us", 5.0), ("tcp", "itself", None)):
            samples = medians[transport]
            rows.append(
                figure(
                    "commit" if transport == "shm" else "commit.tcp",
                    statistics.median(samples),
                    "us",
                    name,
                    bar if partitions == 1 else None,
                    lower_is_better=True,
                    partitions=partitions,
                    p99_us=_percentile(samples, 0.99),
                    tcp_us=tcp,
                    samples=len(samples),
                )
            )
    return rows
