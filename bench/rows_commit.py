"""Bench rows of commits: of offsets, one that is waited for at a time, over RDMA and over TCP; of
transactions, until their records are visible.

The broker runs in a process of its own, and its produce worker spins.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
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


class Transactions:
    """A transactional producer and a reader of committed records, in one thread, at one partition
    of a broker: kdirect's clients, whose producer has `mode` as its rdma.produce, or librdkafka's
    for `system` "kafka"."""

    def __init__(
        self,
        system: str,
        address: str,
        topic: str,
        records: int,
        size: int,
        transport: str = "shm",
        mode: str = "auto",
    ) -> None:
        self._topic, self._records = topic, records
        self._value = b"v" * size
        name = f"txn-{uuid.uuid4().hex[:6]}"
        both = {"bootstrap.servers": address}
        if system == "kdirect":
            import kdirect
            from kdirect.model import TopicPartition

            both["transport"] = transport
            self.producer: Any = kdirect.Producer(
                {**both, "transactional.id": name, "rdma.produce": mode}
            )
            self.consumer: Any = kdirect.Consumer({**both, "isolation.level": "read_committed"})
            self.consumer.assign({TopicPartition(topic, 0): 0})
        else:
            from confluent_kafka import Consumer, Producer
            from confluent_kafka import TopicPartition as Partition

            quick = {"socket.nagle.disable": True}
            self.producer = Producer({**both, **quick, "transactional.id": name, "linger.ms": 0})
            self.consumer = Consumer(
                {**both, **quick, "isolation.level": "read_committed", "group.id": name,
                 "enable.auto.commit": False, "fetch.wait.max.ms": 500,
                 "fetch.error.backoff.ms": 1}
            )  # fmt: skip
            self.consumer.assign([Partition(topic, 0, 0)])
        self.producer.init_transactions()

    def once(self) -> tuple[int, int]:
        """One transaction: nanoseconds from its commit, and from its begin, until the consumer has
        the last of its records."""
        clock = time.perf_counter_ns
        produce, topic, value = self.producer.produce, self._topic, self._value
        begin = clock()
        self.producer.begin_transaction()
        for _ in range(self._records):
            produce(topic, value, partition=0)
        commit = clock()
        self.producer.commit_transaction()
        left = self._records
        while left:
            messages = self.consumer.consume(left, 10.0)
            if not messages:
                raise RuntimeError(f"{left} committed records did not arrive")
            for message in messages:
                if message.error() is not None:
                    raise RuntimeError(str(message.error()))
            left -= len(messages)
        end = clock()
        return end - commit, end - begin

    def run(self, seconds: float) -> tuple[list[int], list[int]]:
        """Transactions one after another: what `once` returns, of each."""
        end = time.perf_counter() + seconds
        pairs = [self.once()]
        while time.perf_counter() < end:
            pairs.append(self.once())
        return [p[0] for p in pairs], [p[1] for p in pairs]

    def close(self) -> None:
        self.consumer.close()
        if hasattr(self.producer, "close"):
            self.producer.close()

    def __enter__(self) -> Transactions:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def txn_rdma(seconds: float, quick: bool) -> list[Figure]:
    """A transaction of 100 records of 100 bytes over shm: from the call that commits it until a
    reader of committed records has them all."""
    from kdirect.client import connect

    records, size = 100, 100
    rows: list[Figure] = []
    everywhere = os.sched_getaffinity(0)
    medians: dict[str, float] = {}
    for transport in ("tcp", "shm"):
        with broker_process() as (servers, pid):
            with connect({"bootstrap.servers": servers, "transport": transport}) as session:
                session.admin.create_topic("txn", 1)
            _apart(pid)
            with Transactions("kdirect", servers, "txn", records, size, transport) as loop:
                loop.run(seconds / 8)  # connections open, and the head is granted
                visible, whole = loop.run(seconds / 3)
            os.sched_setaffinity(0, everywhere)
        samples = sorted(ns / 1000 for ns in visible)
        medians[transport] = statistics.median(samples)
        if transport == "shm":
            rows.append(
                figure(
                    "txn-rdma",
                    medians["shm"] / 1000,
                    "ms",
                    "bar: 1 ms",
                    1.0,
                    lower_is_better=True,
                    records=records,
                    record_bytes=size,
                    p99_ms=_percentile(samples, 0.99) / 1000,
                    begin_to_visible_ms=statistics.median(whole) / 1e6,
                    tcp_ms=medians["tcp"] / 1000,
                    samples=len(samples),
                )
            )
    return rows


def txn_exclusive(seconds: float, quick: bool) -> list[Figure]:
    """What a producer pays that holds its head alone: the transactions of `txn-rdma`, with
    rdma.produce=exclusive beside auto, in turns at one broker."""
    from kdirect.client import connect

    records, size = 100, 100
    everywhere = os.sched_getaffinity(0)
    visible: dict[str, list[float]] = {"auto": [], "exclusive": []}
    whole: dict[str, list[float]] = {"auto": [], "exclusive": []}
    with broker_process() as (servers, pid):
        with connect({"bootstrap.servers": servers, "transport": "shm"}) as session:
            for mode in visible:
                session.admin.create_topic(mode, 1)
        _apart(pid)
        for _ in range(3):
            for mode in visible:
                with Transactions("kdirect", servers, mode, records, size, mode=mode) as loop:
                    loop.run(seconds / 24)  # connections open, and the head is granted
                    commits, pairs = loop.run(seconds / 8)
                visible[mode] += [ns / 1e6 for ns in commits]
                whole[mode] += [ns / 1e6 for ns in pairs]
        os.sched_setaffinity(0, everywhere)
    return [
        figure(
            "txn-exclusive",
            statistics.median(whole["exclusive"]),
            "ms",
            "auto",
            statistics.median(whole["auto"]),
            lower_is_better=True,
            records=records,
            record_bytes=size,
            commit_to_visible_ms=statistics.median(visible["exclusive"]),
            auto_commit_to_visible_ms=statistics.median(visible["auto"]),
            samples=len(whole["exclusive"]),
            auto_samples=len(whole["auto"]),
        )
    ]
