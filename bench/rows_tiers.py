"""Bench rows of tiered storage, as far as the broker has a part in it: copying, reading what is
cold through it, what that does to the tail, and rebuilding it.

Stores are a directory and S3Proxy, on tmpfs, as the logs are; S3Proxy is a Java process on the same
cores, and often what bounds a figure.  Each row states its limit, measured in turns in the same
run: bare pyarrow by the same file system, the same client on what is hot, the same work without
remote storage beside it, or an absolute bar.  Figures are medians of their rounds.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memory import touch
from rows_cluster import _cluster, _leader
from rows_direct import _percentile
from sides import Figure, figure, spread_of
from tiers import (
    GETTERS,
    PARTITIONS,
    QUICK_SEGMENT_BYTES,
    SEGMENT_BYTES,
    TIERED,
    WAIT_S,
    BareStore,
    batch_of,
    batches_of,
    fill,
    make_cold,
    properties,
    side,
    stores,
    tiered_broker,
)

TOPIC = "tiers"
CONSUMED = 300_000  # records at most, of a client that makes a Python object of each
CACHE_BYTES = 64 << 20  # of the broker, where more than it holds is read


def in_stores(row: str, quick: bool, measure: Callable[[Path, Any], list[Figure]]) -> list[Figure]:
    """The figures of a row for each kind of store, which they name."""
    figures: list[Figure] = []
    with stores() as (directory, places):
        for kind, place in places.items():
            if isinstance(place, str):
                missing = {"not_measured": place, "store": kind}
                figures.append({"row": row, "value": None, "unit": "", "settings": missing})
                continue
            if kind == "s3" and not quick:
                BareStore(place).warm()
            for found in measure(directory / f"log-{kind}", place):
                found["settings"]["store"] = kind
                figures.append(found)
    return figures


def rounds_of(seconds: float, round_s: float, quick: bool, least: int = 3) -> int:
    """For each of both stores."""
    return 1 if quick else max(least, int(seconds / 2 / round_s))


# -- copying ---------------------------------------------------------------------------------------


def tier_copy(seconds: float, quick: bool) -> list[Figure]:
    """The rate at which sealed segments are copied, beside a bare copy of the same files by as many
    streams; the requests of a segment; the producers' wait with copying on and off."""

    def measure(directory: Path, place: Any) -> list[Figure]:
        rounds = rounds_of(seconds, 6, quick)
        figures = [copy_rate(directory, place.fresh(), rounds, quick)]
        if place.kind == "s3":
            figures += copy_requests(directory, place.fresh(), quick)
        # As long as a host leaves memory that was touched to its virtual machine.
        turn_s = 0.5 if quick else 2.0
        rounds = rounds_of(seconds, 2 * turn_s, quick, least=7)
        return [*figures, copy_waits(directory, place.fresh(), rounds, turn_s)]

    return in_stores("tier-copy", quick, measure)


def copy_rate(directory: Path, place: Any, rounds: int, quick: bool) -> Figure:
    """A topic is filled untiered; then it is tiered."""
    segments, size = (2, QUICK_SEGMENT_BYTES) if quick else (4, SEGMENT_BYTES)
    batch, bare = batch_of(1 << 10), BareStore(place)
    ours: list[float] = []
    theirs: list[float] = []
    with tiered_broker(place, directory) as (peer, session, address):
        for number in range(rounds):
            topic = f"{TOPIC}-{number}"
            session.admin.create_topic(
                topic, PARTITIONS, configs={"segment.bytes": size, "retention.ms": -1}
            )
            fill(address, topic, PARTITIONS, batch, batches_of(batch, segments, size))
            files = sealed(directory, topic)
            total = sum(path.stat().st_size for path in files)
            touch(total)
            if number % 2:
                theirs.append(total / bare.put(files, "bare", PARTITIONS))
            before = peer.call("statistics")["remote_copy_requests"]
            touch(total)
            began = time.monotonic()
            session.admin.alter_configs(topic, TIERED)
            ours.append(total / (peer.call("until_copied", before + len(files)) - began))
            if not number % 2:
                touch(total)
                theirs.append(total / bare.put(files, "bare", PARTITIONS))
            if len(bare.logs(topic)) != len(files):
                raise RuntimeError("not every segment has an object")
            session.admin.delete_topic(topic)
            peer.call("until_deleted")
    return figure(
        "tier-copy", statistics.median(ours) / 1e6, "MB/s", "bare pyarrow, as many streams",
        statistics.median(theirs) / 1e6, bar=0.8, streams=PARTITIONS, segment_bytes=size,
        segments=segments * PARTITIONS, **spread_of(ours, theirs),
    )  # fmt: skip


def sealed(directory: Path, topic: str) -> list[Path]:
    """The sealed segments of each partition, those of different partitions in turns."""
    logs = [sorted((directory / f"{topic}-{i}").glob("*.log"))[:-1] for i in range(PARTITIONS)]
    return [path for together in zip(*logs, strict=True) for path in together]


def copy_requests(directory: Path, place: Any, quick: bool) -> list[Figure]:
    """What comes to the server for a segment that is one PUT, and for one in parts, in steady
    state: counted by a server in front of it, so nothing is said of rates."""
    from kdirect.objects import uploads
    from tests.object_servers import gate_to

    batch, figures, segments = batch_of(1 << 10), [], 2
    large = (3 * uploads.PART_BYTES) if quick else SEGMENT_BYTES
    for size in (4 << 20, large):
        with gate_to(place) as (gate, there), tiered_broker(there, directory) as (peer, session, a):
            configs = {**TIERED, "segment.bytes": size}
            session.admin.create_topic(TOPIC, 1, configs=configs)
            count = batches_of(batch, 1, size)
            fill(a, TOPIC, 1, batch, count)
            copies = peer.call("statistics")["remote_copy_requests"]
            peer.call("until_copied", max(1, copies))
            gate.requests.clear()
            fill(a, TOPIC, 1, batch, segments * (count - 1))
            peer.call("until_copied", 1 + segments)
            lines = Counter(gate.lines)
            objects = BareStore(place).logs(TOPIC)
            parts = -(-objects[-1][1] // uploads.PART_BYTES)
            session.admin.delete_topic(TOPIC)
            peer.call("until_deleted")
        least = 1 if size < uploads.PART_BYTES else parts + 2  # begun and completed
        lists = sum(n for line, n in lines.items() if line.startswith(("GET ?list", "GET ?prefix")))
        figures.append(
            figure(
                "tier-copy.requests", sum(lines.values()) / segments, "requests a segment",
                "one PUT" if least == 1 else "its parts, begun and completed", least, bar=1.0,
                lower_is_better=True, segment_bytes=size, heads=lines["HEAD"], lists=lists,
                lines=dict(lines),
            )
        )  # fmt: skip
    return figures


def copy_waits(directory: Path, place: Any, rounds: int, turn_s: float) -> Figure:
    """The 99th percentile of the time until a record of 10 KiB is acknowledged, in a stream that
    seals a segment every 0.2 s; in turns with a topic that is tiered and one that is not."""
    rate, size = 40e6, 8 << 20
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    with tiered_broker(place, directory) as (peer, session, address), side() as client:
        for number in range(rounds):
            for tiered in (False, True) if number % 2 else (True, False):
                topic = f"{TOPIC}-{number}-{tiered}"
                configs = {"segment.bytes": size, "retention.ms": -1, **(TIERED if tiered else {})}
                session.admin.create_topic(topic, PARTITIONS, configs=configs)
                touch(int(turn_s * 2**29))
                fill(address, topic, PARTITIONS, batch_of(1 << 10), 8)  # it is warm
                found[tiered].append(client.call("load", address, topic, rate, 10 << 10, turn_s))
                session.admin.delete_topic(topic)
                peer.call("until_deleted")
        copied = peer.call("statistics")["remote_copy_bytes"]
    on, off = ([_percentile(took, 0.99) for took in found[tiered]] for tiered in (True, False))
    return figure(
        "tier-copy.p99", statistics.median(on), "ms, p99 of acks=all", "no copying",
        statistics.median(off), lower_is_better=True, bar=1.3, size=10 << 10, load_mb_s=rate / 1e6,
        segment_bytes=size, copied_mb=copied // 1_000_000,
        p50_ms=statistics.median(_percentile(t, 0.5) for t in found[True]),
        against_p50_ms=statistics.median(_percentile(t, 0.5) for t in found[False]),
        records=sum(map(len, found[True])), **spread_of(on, off),
    )  # fmt: skip


# -- reading ---------------------------------------------------------------------------------------


def tier_fetch(seconds: float, quick: bool) -> list[Figure]:
    """Cold records through the broker over TCP, into Arrow and to confluent-kafka: beside bare
    GETs of the same ranges, the decode of the same bytes from memory, and the same client on the
    same records where they are hot."""

    def measure(directory: Path, place: Any) -> list[Figure]:
        figures: list[Figure] = []
        sizes = (1 << 10,) if quick else (100, 1 << 10, 10 << 10)
        for value_bytes in sizes:
            fresh = place.fresh()
            rounds = rounds_of(seconds, 8 * len(sizes), quick)
            figures += fetch(directory, fresh, value_bytes, rounds, quick)
        return figures

    return in_stores("tier-fetch", quick, measure)


def fetch(directory: Path, place: Any, value_bytes: int, rounds: int, quick: bool) -> list[Figure]:
    segments, size = (3, QUICK_SEGMENT_BYTES) if quick else (4, SEGMENT_BYTES)
    cache = QUICK_SEGMENT_BYTES if quick else CACHE_BYTES
    batch, bare = batch_of(value_bytes), BareStore(place)
    took: dict[str, list[float]] = {}

    def note(name: str, total: int, s: float) -> None:
        took.setdefault(name, []).append(total / s / 1e6)

    ratios: dict[str, list[float]] = {"arrow": [], "confluent": []}
    with tiered_broker(place, directory, remote_log_chunk_cache_bytes=cache) as (
        peer, session, address,
    ):  # fmt: skip
        stop = make_cold(peer, session, "cold", batch, segments, size)
        session.admin.create_topic("hot", 1, configs={"segment.bytes": size, "retention.ms": -1})
        fill(address, "hot", 1, batch, batches_of(batch, segments, size))
        logs = bare.logs("cold")
        total = sum(length for _, length in logs)
        decode("cold", bare.get(logs[:1], keep=True)[1])
        clients = {"arrow": read_to_arrow, "confluent": consume}
        for number in range(rounds):
            note("gets", total, bare.get(logs)[0])
            note("decode", total, decode("cold", bare.get(logs, keep=True)[1]))
            for name, client in clients.items():
                for topic in ("cold", "hot") if number % 2 else ("hot", "cold"):
                    before = peer.call("statistics")["remote_get_bytes"]
                    # Less than all is read out of the middle, which is in no cache by then.
                    is_whole = name == "arrow" or stop <= CONSUMED
                    start, end = (0, stop) if is_whole else (stop // 2, stop // 2 + CONSUMED)
                    read = total * (end - start) // stop
                    note(f"{name} {topic}", read, client(session, address, topic, start, end))
                    if topic == "cold" and is_whole:
                        got = peer.call("statistics")["remote_get_bytes"] - before
                        ratios[name].append(got / read)
    figures = []
    medians = {name: statistics.median(rates) for name, rates in took.items()}
    for name in clients:
        limits = {"gets": medians["gets"]}
        limits |= {"decode": medians["decode"]} if name == "arrow" else {}
        limits |= {f"{name} hot": medians[f"{name} hot"]}
        needed = {"bytes_got_to_needed": statistics.median(x)} if (x := ratios[name]) else {}
        lowest = min(limits, key=lambda n: limits[n])
        said = {"gets": "bare GETs", "decode": "decode from memory"}
        figures.append(
            figure(
                "tier-fetch", medians[f"{name} cold"], "MB/s", said.get(lowest, "it where hot"),
                limits[lowest], client=name, value_bytes=value_bytes, batch_bytes=len(batch.data),
                getters=GETTERS,
                limits_mb_s=limits, segment_bytes=size,
                **needed,
                **spread_of(took[f"{name} cold"], took[lowest]),
            )
        )  # fmt: skip
    return figures


def tier_direct(seconds: float, quick: bool) -> list[Figure]:
    """Cold records past the broker into Arrow: beside the lower one of bare GETs of the same ranges
    and the decode of the same bytes from memory; by a key of the client's own, and at S3 also by
    signed URLs."""

    def measure(directory: Path, place: Any) -> list[Figure]:
        figures = []
        sizes = (1 << 10,) if quick else (100, 1 << 10, 10 << 10)
        ways = [("config", n) for n in sizes]
        if place.kind == "s3":
            ways.append(("presigned", 1 << 10))
        rounds = rounds_of(seconds, 4 * len(ways), quick, least=5)
        for access, value_bytes in ways:
            fresh = place.fresh()
            figures.append(direct(directory, fresh, access, value_bytes, rounds, quick))
        return figures

    return in_stores("tier-direct", quick, measure)


def direct(
    directory: Path, place: Any, access: str, value_bytes: int, rounds: int, quick: bool
) -> Figure:
    import kdirect

    segments, size = (3, QUICK_SEGMENT_BYTES) if quick else (4, SEGMENT_BYTES)
    batch, bare = batch_of(value_bytes), BareStore(place)
    took: dict[str, list[float]] = {"ours": [], "gets": [], "decode": []}
    got: list[float] = []
    given = {"cold.reads": "direct", "transport": "tcp"}
    if access == "config":
        given["remote.storage.uri"] = place.uri
        given |= {f"remote.config.{name}": value for name, value in place.config.items()}
    with tiered_broker(place, directory, remote_log_client_access=access) as (peer, session, a):
        stop = make_cold(peer, session, "cold", batch, segments, size)
        logs = bare.logs("cold")
        total = sum(length for _, length in logs)
        with kdirect.connect({"bootstrap.servers": a, **given}) as reading:
            for number in range(-1, rounds):
                turns = {
                    "gets": lambda: bare.get(logs)[0],
                    "ours": lambda: read_to_arrow(reading, a, "cold", 0, stop, got),
                    "decode": lambda: decode("cold", bare.get(logs, keep=True)[1]),
                }
                for name in sorted(turns, reverse=number % 2 == 0):
                    s = turns[name]()
                    if number >= 0:  # before, it is warmed
                        took[name].append(total / s / 1e6)
    limits = {name: statistics.median(rates) for name, rates in took.items() if name != "ours"}
    lowest = min(limits, key=lambda name: limits[name])
    said = {"gets": "bare GETs", "decode": "decode from memory"}
    return figure(
        "tier-direct", statistics.median(took["ours"]), "MB/s", said[lowest], limits[lowest],
        bar=0.8, access=access, value_bytes=value_bytes, batch_bytes=len(batch.data),
        getters=GETTERS, limits_mb_s=limits, segment_bytes=size,
        bytes_got_to_needed=statistics.median(got) / total, **spread_of(took["ours"], took[lowest]),
    )  # fmt: skip


def decode(topic: str, pieces: list[Any]) -> float:
    """Seconds to decode them to Arrow, as a reader does that has them in memory."""
    from kdirect.client.reader import DEFAULT_TARGET_BYTES, DEFAULT_TARGET_ROWS
    from kdirect.format.codec import ArrowDecoder

    decoder = ArrowDecoder(
        topic, 0, target_rows=DEFAULT_TARGET_ROWS, target_bytes=DEFAULT_TARGET_BYTES
    )
    began, rows, rest = time.perf_counter(), 0, b""
    for piece in pieces:
        data = memoryview(rest + piece) if rest else memoryview(piece)
        while (taken := decoder.feed(data)) and len(data):
            data = data[taken:]
            if decoder.rows >= DEFAULT_TARGET_ROWS or decoder.pending_bytes:
                rows += decoder.take().num_rows
        rest = bytes(data)
    rows += decoder.take().num_rows
    if rest or not rows:
        raise RuntimeError("not everything was decoded")
    return time.perf_counter() - began


def read_to_arrow(
    session: Any, address: str, topic: str, start: int, stop: int, got: list[float] | None = None
) -> float:
    """Seconds; `got` learns how many bytes came from the store past the broker."""
    from kdirect.model import TopicPartition

    began, rows = time.perf_counter(), 0
    with session.reader(TopicPartition(topic, 0), start, stop) as reader:
        for found in reader.batches():
            rows += found.num_rows
        took = time.perf_counter() - began
        if rows != stop - start:
            raise RuntimeError(f"{rows} of {stop - start} records of {topic} came")
        if got is not None:
            got.append(reader.statistics()["client_cold_bytes"])
    return took


def consume(session: Any, address: str, topic: str, start: int, stop: int) -> float:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": address, "group.id": "bench", "enable.auto.commit": False,
         "auto.offset.reset": "error", "log_level": 0}
    )  # fmt: skip
    began, last = time.perf_counter(), start - 1
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, start)])
    while last < stop - 1:
        found = consumer.consume(min(5000, stop - 1 - last), 10.0)
        if not found or found[-1].error():
            raise RuntimeError(f"{topic} ended at {last}: {found and found[-1].error()}")
        last = int(found[-1].offset() or 0)
    took = time.perf_counter() - began
    consumer.close()
    return took


# -- the tail --------------------------------------------------------------------------------------


def tier_tail(seconds: float, quick: bool) -> list[Figure]:
    """Produce of 1 KiB at a time (acks=all) and a consumer at the end of the log, while another one
    takes 100 MB/s of old records through the broker, beside none."""

    def measure(directory: Path, place: Any) -> list[Figure]:
        rounds = rounds_of(seconds, 8, quick, least=5)
        return tail(directory, place.fresh(), rounds, 0.7 if quick else 4.0, quick)

    return in_stores("tier-tail", quick, measure)


def tail(directory: Path, place: Any, rounds: int, turn_s: float, quick: bool) -> list[Figure]:
    from kdirect.model import TopicPartition

    segments, size = (3, QUICK_SEGMENT_BYTES) if quick else (8, SEGMENT_BYTES)
    cache = QUICK_SEGMENT_BYTES if quick else CACHE_BYTES
    rate, batch = 100e6, batch_of(1 << 10)
    waits: dict[tuple[str, bool], list[float]] = {}
    middle: dict[tuple[str, bool], list[float]] = {}
    rates: list[float] = []
    with (
        tiered_broker(place, directory, remote_log_chunk_cache_bytes=cache) as (peer, session, a),
        side() as follower, side() as reader, session.producer() as producer,
    ):  # fmt: skip
        stop = make_cold(peer, session, "cold", batch, segments, size)
        session.admin.create_topic("tail", 1)
        tp = TopicPartition("tail", 0)
        for number in range(rounds):
            for beside in (False, True) if number % 2 else (True, False):
                if beside:
                    reader.start("read_old", a, "cold", stop, rate, turn_s + 1.0)
                producer.produce_sync("tail", b"the last one", None, partition=0)
                last = session.latest_offsets([tp])[tp] - 1
                follower.call("follow", a, "tail", last)
                follower.start("tail", turn_s + 0.2)
                took = {"produce": probe(producer, turn_s), "consume": follower.finish()}
                if beside:
                    rates.append(reader.finish())
                for what, found in took.items():
                    waits.setdefault((what, beside), []).append(_percentile(found, 0.99))
                    middle.setdefault((what, beside), []).append(_percentile(found, 0.5))
    return [
        figure(
            "tier-tail", statistics.median(waits[what, True]), "ms, p99", "no reader beside",
            statistics.median(waits[what, False]), lower_is_better=True, bar=1.7, of=what,
            p50_ms=statistics.median(middle[what, True]),
            against_p50_ms=statistics.median(middle[what, False]),
            old_mb_s=statistics.median(rates) / 1e6, turn_s=turn_s,
            **spread_of(waits[what, True], waits[what, False]),
        )
        for what in ("produce", "consume")
    ]  # fmt: skip


def probe(producer: Any, seconds: float) -> list[float]:
    """ms until a record is acknowledged, one at a time, one every 2 ms, sorted; each says when it
    was sent."""
    took = []
    end = time.monotonic() + seconds
    while (now := time.monotonic_ns()) < end * 1e9:
        producer.produce_sync("tail", (b"%020d" % now).ljust(1 << 10, b"v"), None, partition=0)
        after = time.monotonic_ns()
        took.append((after - now) / 1e6)
        time.sleep(max(0.0, 0.002 - (after - now) / 1e9))
    return sorted(took)


# -- rebuilding ------------------------------------------------------------------------------------


def tier_rebuild(seconds: float, quick: bool) -> list[Figure]:
    """`kdirect remote rebuild` on an empty directory and the start of the broker until it has
    served a cold record and taken and served a new one, with 512 MiB and 4 GiB tiered: beside each
    other, and 4 GiB beside a broker of two that has lost everything and gets them from the other
    one, from its start on."""
    rounds = rounds_of(seconds, 4, quick)
    segments = (2, 16) if quick else (8, 64)
    size = QUICK_SEGMENT_BYTES if quick else SEGMENT_BYTES

    def measure(directory: Path, place: Any) -> list[Figure]:
        found = []
        with (
            tiered(directory, place.fresh(), segments[0], size) as small,
            tiered(directory, place.fresh(), segments[1], size) as large,
        ):
            took = [(rebuild(directory, *small), rebuild(directory, *large)) for _ in range(rounds)]
        loading = statistics.median(loading_s() for _ in range(rounds))
        few, many = zip(*took, strict=True)
        parts = {part: statistics.median(t[part] for t in many) for part in many[0]}
        ours, theirs = ([sum(t.values()) for t in side] for side in (many, few))
        found.append(
            figure(
                "tier-rebuild", statistics.median(ours), "s", f"with 1/{segments[1] // segments[0]}"
                " of it tiered", statistics.median(theirs), lower_is_better=True, bar=1.3,
                tiered_mb=segments[1] * size >> 20, loading_s=loading,
                **{f"{n}_s": s for n, s in parts.items()},
                **spread_of(ours, theirs),
            )
        )  # fmt: skip
        return found

    figures = in_stores("tier-rebuild", quick, measure)
    total = segments[1] * size
    ways = {"READ over shm": {}, "Fetch over TCP": {"rdma_replicate": "false"}}
    for over, given in list(ways.items())[: 1 if quick else None]:
        copying = from_another_copy(total, size, rounds if quick else 2, **given)
        for whole in [f for f in figures if f["row"] == "tier-rebuild" and f["value"]]:
            figures.append(
                figure(
                    "tier-rebuild.copy", statistics.median(copying), "s from a replica",
                    "a rebuild", whole["value"], bar=15.0, tiered_mb=total >> 20, by=over,
                    store=whole["settings"]["store"], mb_per_s=total / min(copying) / 1e6,
                    every_s=copying,
                )
            )  # fmt: skip
    return figures


def loading_s() -> float:
    """Of each of the two processes that a rebuild takes: what Python needs before it does anything
    of it."""
    began = time.monotonic()
    code = "import kdirect.broker.rebuilding, pyarrow.fs"
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.monotonic() - began


@contextmanager
def tiered(directory: Path, place: Any, segments: int, size: int) -> Iterator[tuple[Any, int]]:
    """A store with so many segments of a broker that is gone; the store, and where what is cold
    ends."""
    batch = batch_of(1 << 10)
    with tiered_broker(place, directory) as (peer, session, _):
        stop = make_cold(peer, session, TOPIC, batch, segments, size)
    try:
        yield place, stop
    finally:
        BareStore(place).clear()


def rebuild(directory: Path, place: Any, stop: int) -> dict[str, float]:
    """The seconds that each part takes."""
    import kdirect
    from kdirect.model import TopicPartition

    shutil.rmtree(directory, ignore_errors=True)
    given = {"log.dirs": str(directory), **properties(place), "listeners": "127.0.0.1:0"}
    sets = [x for name, value in given.items() for x in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "kdirect.cli"]
    times = [time.monotonic()]
    subprocess.run([*command, "remote", "rebuild", *sets], check=True, capture_output=True)
    times.append(time.monotonic())
    broker = subprocess.Popen([*command, "broker", *sets], stdout=subprocess.PIPE, text=True)
    try:
        assert broker.stdout is not None
        line = broker.stdout.readline()
        if "ready on" not in line:
            raise RuntimeError(f"the broker did not start: {line!r}")
        address = line.rsplit(" ", 1)[1].strip()
        times.append(time.monotonic())
        tp = TopicPartition(TOPIC, 0)
        with kdirect.connect({"bootstrap.servers": address, "transport": "tcp"}) as session:
            for offset in (stop // 2, stop):
                if offset == stop:
                    with session.producer() as producer:
                        producer.produce_sync(TOPIC, b"new", None, partition=0)
                with session.reader(tp, offset, offset + 1) as reader:
                    rows = sum(found.num_rows for found in reader.batches())
                if rows != 1:
                    raise RuntimeError(f"{rows} records came from offset {offset}")
                times.append(time.monotonic())
    finally:
        broker.terminate()
        broker.wait(20)
    names = ("rebuild", "start", "cold", "hot")
    return {name: b - a for name, a, b in zip(names, times[:-1], times[1:], strict=True)}


def from_another_copy(total: int, size: int, rounds: int, **given: str) -> list[float]:
    """Seconds for a broker of two that has lost everything, from its start until it is in sync
    with the other one again, which has so many bytes."""
    import kdirect

    batch, took = batch_of(1 << 10), []
    with (
        _cluster(2, **given) as cluster,
        kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}) as s,
    ):
        configs = {"segment.bytes": size, "min.insync.replicas": 1}
        s.admin.create_topic(TOPIC, 1, 2, configs=configs)
        leader = _leader(s, TOPIC)
        (lost,) = (node for node in cluster.node_ids if node != leader)
        for number in range(rounds):
            cluster.stop(lost)
            _until_in_sync(s, 1)
            if number == 0:
                count = batches_of(batch, total // size, size)
                fill(cluster.address(leader), TOPIC, 1, batch, count)
            for directory in cluster.log_dirs(lost):
                shutil.rmtree(directory)
                directory.mkdir()
            touch(total)
            began = time.monotonic()
            cluster.start(lost)
            _until_in_sync(s, 2)
            took.append(time.monotonic() - began)
    return took


def _until_in_sync(session: Any, replicas: int) -> None:
    end = time.monotonic() + WAIT_S
    while len(session.admin.describe_topic(TOPIC).leaders[0].in_sync_replicas) != replicas:
        if time.monotonic() > end:
            raise RuntimeError(f"there are not {replicas} replicas in sync")
        time.sleep(0.01)


__all__ = ["tier_copy", "tier_direct", "tier_fetch", "tier_rebuild", "tier_tail"]
