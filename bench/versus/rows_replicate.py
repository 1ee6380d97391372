"""Replication: what acks=all costs on three brokers, by size and by the number of replicas, and
what a follower that stands still changes (KafkaDirect, figures 14 to 17).

Stock clients on both sides: librdkafka one at a time, Kafka's ProducerPerformance for bandwidth.
Where kdirect's own client can produce over shm it is shown in addition, and pushed replication
apart from replicas that fetch over TCP.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from memory import touch
from versus.clusters import Cluster
from versus.lives import (
    FIRST,
    PATHS,
    STOCK_PUSH,
    Found,
    Path,
    high_watermark,
    lives,
    open_sender,
    warm_up,
)
from versus.measure import histogram, latency_figure, rate_figure, rounds_figure
from versus.perf_tools import UNBATCHED, PerfTools
from versus.rows_produce import _closed_loop

Figures = list[dict[str, Any]]
REPLICAS = 3
LATENCY_BARS = {FIRST: (7.0, 3.0), STOCK_PUSH: (1.3, None)}  # of p50 and p99
BANDWIDTH_BARS = {FIRST: 14.0}
THREE_OF_ONE, STOPPED_LIMIT = 0.25, 1.1
LEAST_RECORDS = 200
MOST_BYTES = 256 << 20  # of a turn: there are three logs of it
AHEAD_BYTES = 64 << 20  # what a log may take in addition, before there are records for it
BATCH_BYTES = 80  # at most, what a batch has in addition to the value of its record
WARM_S = {"kafka": 15.0, "kdirect": 2.0}


def _warm(cluster: Cluster, path: Path, quick: bool, replicas: int = REPLICAS) -> None:
    seconds = 0.5 if quick else WARM_S[cluster.key]
    warm_up(cluster, path, replicas, "all", seconds)


def _told(found: Found, path: Path, **more: Any) -> dict[str, Any]:
    return {**found.told(path), "warm_up_s": WARM_S, **more}


def replicate_latency(seconds: float, quick: bool) -> Figures:
    """One record at a time, acknowledged by all of three replicas."""
    sizes = (512,) if quick else (32, 512, 4096)
    rounds = 1 if quick else 3
    turn_s = 0.2 if quick else max(1.5, seconds / (2 * rounds * len(sizes)))

    def work(cluster: Cluster, path: Path) -> Mapping[Any, Any]:
        _warm(cluster, path, quick)
        out: dict[Any, Any] = {}
        for size in sizes:
            with cluster.topic("latency", REPLICAS) as topic:
                send, close = open_sender(cluster, path, topic, "all")
                value = os.urandom(size)
                tried = _closed_loop(send, value, turn_s / 10)
                _make_room(REPLICAS, 10 * len(tried), size)
                out[size] = _closed_loop(send, value, turn_s)
                close()
        return out

    found = lives(rounds, work)
    out = []
    for path in PATHS:
        bars = LATENCY_BARS.get(path, (None, None))
        for size in sizes:
            told = _told(found, path, record_bytes=size, acks="all", replicas=REPLICAS)
            for row, make, bar in (
                ("replicate-latency", _median_figure, bars[0]),
                ("replicate-latency.p99", _p99_figure, bars[1]),
            ):
                out.append(make(path.row(row), found, path, size, bar=bar, **told))
    return out


def _median_figure(row: str, found: Found, path: Path, key: Any, /, **told: Any) -> dict[str, Any]:
    return latency_figure(row, "publish", found.of(path, key), found, **told)


def _p99_figure(row: str, found: Found, path: Path, key: Any, /, **told: Any) -> dict[str, Any]:
    runs = {
        side: [histogram(samples).get_value_at_percentile(99) / 1e3 for samples in rounds]
        for side, rounds in found.of(path, key).items()
    }
    return rounds_figure(
        row, "us", "publishLatency99pct", runs, found, scale=1e-3, lower_is_better=True, **told
    )


def replicate_bandwidth(seconds: float, quick: bool) -> Figures:
    """Unbatched and pipelined into one partition of three replicas, acks=all."""
    sizes = (512,) if quick else (512, 32768)
    rounds = 1 if quick else 3
    turn_s = 0.2 if quick else max(2.0, seconds / (2 * rounds * len(sizes)))
    with closing(PerfTools()) as tools:

        def work(cluster: Cluster, path: Path) -> Mapping[Any, Any]:
            _warm(cluster, path, quick)
            return {
                size: _bandwidth(cluster, path, tools, size, REPLICAS, turn_s) for size in sizes
            }

        found = lives(rounds, work)
    return [
        _rate_figure(
            "replicate-bandwidth", found, path, size,
            bar=BANDWIDTH_BARS.get(path), record_bytes=size, replicas=REPLICAS,
        )
        for path in PATHS
        for size in sizes
    ]  # fmt: skip


def _make_room(replicas: int, records: int, size: int) -> None:
    """Just before records are sent, let there be memory for all their logs: a virtual machine's
    host gives it back more slowly than either system writes it, and more of it the more replicas
    there are."""
    touch(replicas * (min(2 * MOST_BYTES, records * (size + BATCH_BYTES)) + AHEAD_BYTES))


def _bandwidth(
    cluster: Cluster, path: Path, tools: PerfTools, size: int, replicas: int, turn_s: float
) -> float:
    """Bytes a second of a turn of about `turn_s`.  Shorter ones before it, which are not counted,
    tell how many records that is; the start of the producer, a part of each, spoils them."""
    run = _own_flood if path.own else _stock_flood

    def turn(records: int) -> float:
        with cluster.topic("bandwidth", replicas) as topic:
            _make_room(replicas, records, size)
            rate = run(cluster, topic, tools, records, size)
            if (there := high_watermark(cluster, topic)) != records:
                raise RuntimeError(f"{there} records are there, not the {records} acknowledged")
        return rate

    records, most = LEAST_RECORDS, MOST_BYTES // size
    rate = turn(records)
    while records / rate < 0.8 * turn_s and records < most:
        records = min(most, int(records * min(10, max(2, turn_s * rate / records))))
        rate = turn(records)
    return rate * size


def _stock_flood(cluster: Cluster, topic: str, tools: PerfTools, records: int, size: int) -> float:
    return tools.produce(cluster.address, topic, records, size, {**UNBATCHED, "acks": "all"})


def _own_flood(cluster: Cluster, topic: str, tools: PerfTools, records: int, size: int) -> float:
    import kdirect

    value = os.urandom(size)
    settings = {"bootstrap.servers": cluster.address, "transport": "shm", "acks": "all"}
    with kdirect.connect(settings) as session, session.producer() as producer:
        produce = producer.produce
        producer.list_topics()  # the connection is there before the clock starts
        begin = time.perf_counter()
        for _ in range(records):
            produce(topic, value, None, partition=0)
        if left := producer.flush(60):
            raise RuntimeError(f"{left} records were not acknowledged")
        return records / (time.perf_counter() - begin)


def _rate_figure(row: str, found: Found, path: Path, key: Any, **told: Any) -> dict[str, Any]:
    told = _told(found, path, acks="all", batching="none", **told)
    told["how"] = "the start of the producer is a part of each turn, on both sides"
    return rate_figure(
        path.row(row), "B/s", "publishRate", found.of(path, key), found,
        per_record=told["record_bytes"], **told,
    )  # fmt: skip


def replicate_factor(seconds: float, quick: bool) -> Figures:
    """The same at 32 KiB, with one to four replicas on four brokers."""
    size = 32768
    counts = (1, 3) if quick else (1, 2, 3, 4)
    rounds = 1 if quick else 3
    turn_s = 0.2 if quick else max(1.5, seconds / (2 * rounds * len(counts)))
    with closing(PerfTools()) as tools:

        def work(cluster: Cluster, path: Path) -> Mapping[Any, Any]:
            _warm(cluster, path, quick)
            return {n: _bandwidth(cluster, path, tools, size, n, turn_s) for n in counts}

        found = lives(rounds, work, brokers=max(counts) if not quick else 3)
    out = []
    for path in PATHS:
        for count in counts:
            out.append(
                _rate_figure("replicate-factor", found, path, count,
                             record_bytes=size, replicas=count)
            )  # fmt: skip
        out.append(_share_figure(found, path, size))
    return out


def _share_figure(found: Found, path: Path, size: int) -> dict[str, Any]:
    """The rate with three replicas as a part of that with one."""
    runs = {
        side: [three / one for one, three in zip(results[1], results[3], strict=True)]
        for side, results in found.sides(path).items()
    }
    return rounds_figure(
        path.row("replicate-factor.three-of-one"), "x", "publishRatio", runs, found,
        limit=("at least", THREE_OF_ONE) if path is FIRST else None,
        **_told(found, path, record_bytes=size),
        how="bandwidth with three replicas over that with one, of the same cluster",
    )  # fmt: skip


def replicate_slow(seconds: float, quick: bool) -> Figures:
    """One record at a time with acks=1, while all three replicas run and while one of the followers
    is stopped; and what the leader's memory does."""
    size = 512
    rounds = 1 if quick else 3
    turn_s = 0.3 if quick else max(2.0, seconds / (4 * rounds))

    def work(cluster: Cluster, path: Path) -> Mapping[Any, Any]:
        _warm(cluster, path, quick)
        with cluster.topic("slow", REPLICAS) as topic:
            send, close = open_sender(cluster, path, topic, "1")
            value = os.urandom(size)
            _closed_loop(send, value, turn_s / 2)
            leader = cluster.leader(topic)
            whole = _closed_loop(send, value, turn_s)
            before = cluster.memory_bytes(leader)
            with cluster.paused(cluster.follower(topic)):
                stopped = _closed_loop(send, value, turn_s)
                grown = cluster.memory_bytes(leader) - before
            close()
            cluster.until_in_sync(topic, REPLICAS)
        return {"whole": whole, "stopped": stopped, "grown": grown}

    found = lives(rounds, work)
    out = []
    for path in PATHS:
        told = _told(found, path, record_bytes=size, acks=1, replicas=REPLICAS)
        for row, state in (("replicate-slow.all-running", "whole"), ("replicate-slow", "stopped")):
            out.append(_median_figure(path.row(row), found, path, state, **told))
        out[-1]["settings"] |= {
            f"{side}_leader_grew_bytes": results["grown"]
            for side, results in found.sides(path).items()
        }
        out.append(_times_figure(found, path, told))
    return out


def _times_figure(found: Found, path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """The median with one follower stopped as a multiple of that with all running."""
    runs = {
        side: [
            statistics.median(stopped) / statistics.median(whole)
            for whole, stopped in zip(results["whole"], results["stopped"], strict=True)
        ]
        for side, results in found.sides(path).items()
    }
    return rounds_figure(
        path.row("replicate-slow.times"), "x", "publishRatio", runs, found,
        lower_is_better=True, limit=("at most", STOPPED_LIMIT), **told,
        how="p50 with one follower stopped over p50 with all running, of the same cluster",
    )  # fmt: skip
