"""Bench rows of Kafka's protocol over TCP: what a request costs the broker, and what it costs to
have many partitions and connections of which none has anything to do.

The broker is a process of its own with its log on tmpfs; the client sends frames that were made
before (`raw_tcp`).  The bars are processor time of the broker, so that a busy machine moves them
little.
"""

from __future__ import annotations

import socket
import statistics
import time

from raw_tcp import (
    FETCH_VERSION,
    PRODUCE_VERSION,
    RawClient,
    check_produced,
    cpu_seconds,
    first_bytes,
    one_record,
)
from rows_direct import broker_process
from sides import Figure, figure

from kdirect.client import connect

DEPTH = 50
RECORD_BYTES = 100
FETCH_BYTES = 16 << 10
LARGE_BYTES = 1 << 20
# Segments of the topic whose first one is read when it is sealed.
SMALL_SEGMENTS = {"segment.bytes": LARGE_BYTES * 3 // 2}
# (what, topic, bytes, depth, bar in microseconds of the broker's processor time a request)
COSTS = (
    ("produce", "written", RECORD_BYTES, DEPTH, 5.0),
    ("produce", "written", RECORD_BYTES, 1, 35.0),
    ("fetch", "head", FETCH_BYTES, 8, 15.0),
    ("fetch", "head", FETCH_BYTES, 1, None),
    ("fetch", "head", LARGE_BYTES, 1, None),
    ("fetch", "sealed", FETCH_BYTES, 8, None),
    ("fetch", "sealed", LARGE_BYTES, 1, None),
)
IDLE_PARTITIONS, IDLE_CONNECTIONS, IDLE_BAR_PERCENT = 10_000, 1_000, 2.0


def tcp_cpu(seconds: float, quick: bool) -> list[Figure]:
    """The broker's processor time for a Produce of 100 bytes and a Fetch of 16 KiB and 1 MiB, where
    many arrive together and where each waits for the answer before.  The
    records lie in the segment that is written, or in the first of several, which is sealed."""
    rounds = 1 if quick else 5
    turn_s = 0.05 if quick else seconds / (rounds * len(COSTS))
    samples: dict[int, list[float]] = {i: [] for i in range(len(COSTS))}
    with broker_process() as (servers, pid):
        client = RawClient(servers)
        with connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
            for topic in ("written", "head"):
                session.admin.create_topic(topic, 1)
            session.admin.create_topic("sealed", 1, configs=SMALL_SEGMENTS)
        produce = {t: one_record(t, RECORD_BYTES) for t in ("written", "head", "sealed")}
        for request in produce.values():
            check_produced(client.call(request, PRODUCE_VERSION))
            frame = client.frame(request, PRODUCE_VERSION)
            client.exchange(frame, LARGE_BYTES // RECORD_BYTES * 2, DEPTH)
        for _ in range(rounds):
            for i, (what, topic, size, depth, _bar) in enumerate(COSTS):
                if what == "fetch":
                    frame = client.frame(first_bytes(topic, size), FETCH_VERSION)
                else:
                    frame = client.frame(produce[topic], PRODUCE_VERSION)
                samples[i].append(_cost_us(client, pid, frame, depth, turn_s))
        client.close()
    return [
        figure(
            "tcp-cpu",
            statistics.median(samples[i]),
            "us",
            "none" if bar is None else f"bar: {bar:g} us",
            bar,
            lower_is_better=True,
            request=what,
            topic=topic,
            size=size,
            depth=depth,
            rounds=rounds,
            spread=[min(samples[i]), max(samples[i])],
        )
        for i, (what, topic, size, depth, bar) in enumerate(COSTS)
    ]


def _cost_us(client: RawClient, pid: int, frame: bytes, depth: int, seconds: float) -> float:
    """Of one request, over so many seconds."""
    count, piece = 0, 20 * depth
    before = cpu_seconds(pid)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        client.exchange(frame, piece, depth)
        count += piece
    return (cpu_seconds(pid) - before) / count * 1e6


def idle(seconds: float, quick: bool) -> list[Figure]:
    """The share of a core that a broker takes which has many partitions, with a record each, and
    many connections, and nothing to do."""
    partitions = 200 if quick else IDLE_PARTITIONS
    connections = 50 if quick else IDLE_CONNECTIONS
    rest_s = 0.5 if quick else max(10.0, seconds / 2)
    with broker_process() as (servers, pid):
        with connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
            for first in range(0, partitions, 1000):
                session.admin.create_topic(f"idle-{first}", min(1000, partitions - first))
            with session.producer() as producer:
                for i in range(partitions):
                    producer.produce(f"idle-{i // 1000 * 1000}", b"v", partition=i % 1000)
                producer.flush()
        host, _, port = servers.partition(",")[0].rpartition(":")
        opened = [socket.create_connection((host, int(port)), 30) for _ in range(connections)]
        time.sleep(0.2 if quick else 5.0)  # what the records have left to do
        before, began = cpu_seconds(pid), time.perf_counter()
        time.sleep(rest_s)
        share = (cpu_seconds(pid) - before) / (time.perf_counter() - began) * 100
        for connection in opened:
            connection.close()
    return [
        figure(
            "idle",
            share,
            "% of a core",
            f"bar: {IDLE_BAR_PERCENT:g} %",
            IDLE_BAR_PERCENT,
            lower_is_better=True,
            partitions=partitions,
            connections=connections,
            seconds=rest_s,
        )
    ]
