"""What a broker keeps for clients of a process that lives on: nothing but its control connection.

Descriptors and mappings of a broker in a process of its own, over rounds of producers and consumers
that are opened and closed in one process.  Each used to leave some behind: for ever with a
consumer, until Python's cyclic collector came with a producer.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import kdirect
from kdirect.model import TopicPartition

CLIENTS = 16
ROUNDS = 4
PARTITIONS = 4
SLACK = 2  # a thread or a file that is there for a moment


def descriptors(pid: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            found["".join(c for c in os.readlink(entry.path) if not c.isdigit())] += 1
        except FileNotFoundError:
            pass
    return found


def mappings(pid: int) -> Counter[str]:
    """Those of files and shared memory: the allocator's come and go."""
    lines = (line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return Counter(
        "".join(c for c in line[5] if not c.isdigit())
        for line in lines
        if len(line) > 5 and line[5].startswith("/")
    )


def settled(pid: int, most: tuple[int, int] | None) -> tuple[Counter[str], Counter[str]]:
    """The counts, once they are at most `most`; or as they are after a while."""
    deadline = time.monotonic() + 10
    while True:
        now = descriptors(pid), mappings(pid)
        if most is None:
            time.sleep(1)
            return descriptors(pid), mappings(pid)
        if (
            all(x.total() <= y for x, y in zip(now, most, strict=True))
            or time.monotonic() > deadline
        ):
            return now
        time.sleep(0.1)


def rounds(broker, one_round) -> None:
    most = None
    first = None
    for n in range(ROUNDS):
        one_round()
        counts = settled(broker.pid, most)
        if first is None or most is None:
            first = counts
            most = counts[0].total() + SLACK, counts[1].total() + SLACK
            continue
        for now, before, limit in zip(counts, first, most, strict=True):
            assert now.total() <= limit, f"round {n} left more than the first: {now - before}"
    assert first is not None
    kept = first[0]["anon_inode:[eventfd]"], first[0]["/memfd:kdirect-keys (deleted)"]
    assert sum(kept) < CLIENTS, f"eventfds and key tables that the broker keeps: {kept}"


def start(broker_process):
    broker = broker_process(log_segment_bytes=1 << 20)
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
    session = kdirect.connect(settings)
    session.admin.create_topic("t", PARTITIONS)
    return broker, settings


def test_closed_producers_leave_nothing_in_the_broker(broker_process):
    broker, settings = start(broker_process)

    def one_round() -> None:
        producers = []
        for i in range(CLIENTS):
            producers.append(kdirect.Producer(settings))
            producers[-1].send("t", b"x", partition=i % PARTITIONS).result(20)
        for producer in producers:
            producer.close()

    rounds(broker, one_round)


def test_closed_consumers_leave_nothing_in_the_broker(broker_process):
    broker, settings = start(broker_process)
    with kdirect.Producer(settings) as producer:
        for i in range(PARTITIONS):
            producer.send("t", b"x", partition=i).result(20)

    def one_round() -> None:
        consumers = []
        for i in range(CLIENTS):
            # No group: its connection to the coordinator would be kept for the next consumer, as it
            # should.
            consumers.append(
                kdirect.Consumer(
                    {**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False}
                )
            )
            consumers[-1].assign([TopicPartition("t", i % PARTITIONS)])
            assert consumers[-1].poll(20) is not None
        for consumer in consumers:
            consumer.close()

    rounds(broker, one_round)
