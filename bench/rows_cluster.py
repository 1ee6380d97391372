"""Bench rows of replication inside kdirect: what the size of pushed WRITEs changes, what a pushed
record costs its leader, how fast a new replica catches up, what an idle cluster takes.

Three real brokers (`kdirect.Cluster`), logs on tmpfs, all on this machine; Kafka has no part in
them, see bench/versus/rows_replicate.py for that.  Figures that are held against each other come
from clusters that run at the same time and are measured in turns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rows_direct import _percentile, _tp
from rows_produce import _thread_seconds
from sides import Figure, figure

REPLICAS = 3
PUSH_S, WAIT_S = 10.0, 120.0
MOST_BYTES = (0, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
SEGMENT_BYTES = 64 << 20


@contextmanager
def _cluster(brokers: int = REPLICAS, **properties: Any) -> Iterator[Any]:
    """Brokers with logs on tmpfs, which are removed in the end."""
    import kdirect

    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = tempfile.mkdtemp(prefix="kdirect-bench-", dir=base)
    given = {
        "log.segment.bytes": SEGMENT_BYTES, "offsets.topic.num.partitions": 1,
        **{name.replace("_", "."): value for name, value in properties.items()},
    }  # fmt: skip
    try:
        with kdirect.Cluster(brokers, directory, properties=given) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _leader(session: Any, topic: str) -> int:
    return int(session.admin.describe_topic(topic).leaders[0].leader)


def _until_pushed(cluster: Any, session: Any, producer: Any, topic: str) -> int:
    """Send records until the leader has files of both its followers mapped; the leader."""
    deadline = time.monotonic() + PUSH_S
    while True:
        for _ in range(50):
            producer.produce_sync(topic, b"v" * 100, None, partition=0)
        leader = _leader(session, topic)
        maps = Path(f"/proc/{cluster.pid(leader)}/maps").read_text()
        if all(
            f"/broker-{node_id}/{topic}-0/" in maps
            for node_id in cluster.node_ids
            if node_id != leader
        ):
            return leader
        if time.monotonic() > deadline:
            raise RuntimeError(f"broker {leader} does not push {topic} to all its followers")


def _one_at_a_time(producer: Any, topic: str, value: bytes, seconds: float) -> list[float]:
    """Microseconds of each."""
    samples = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter_ns()
        producer.produce_sync(topic, value, None, partition=0)
        samples.append((time.perf_counter_ns() - begin) / 1000)
    return samples


def _flood(producer: Any, topic: str, value: bytes, count: int) -> float:
    """Records a second, unbatched and pipelined."""
    begin = time.perf_counter()
    for _ in range(count):
        producer.produce(topic, value, None, partition=0)
    if left := producer.flush(60):
        raise RuntimeError(f"{left} records were not acknowledged")
    return count / (time.perf_counter() - begin)


def push_sizes(seconds: float, quick: bool) -> list[Figure]:
    """32-byte records pushed in WRITEs of at most so many bytes (replica.push.max.bytes), acks=all:
    goodput of pipelined records, latency of one at a time, and the leader's CPU for each."""
    import kdirect

    sizes = MOST_BYTES[:: len(MOST_BYTES) - 1] if quick else MOST_BYTES
    rounds, count = (1, 2000) if quick else (5, 50_000)
    turn_s = 0.1 if quick else max(0.5, seconds / (2 * rounds * len(sizes)))
    value = b"v" * 32
    rates: dict[int, list[float]] = {most: [] for most in sizes}
    cpu: dict[int, list[float]] = {most: [] for most in sizes}
    samples: dict[int, list[float]] = {most: [] for most in sizes}
    with ExitStack() as stack:
        at = {}
        for most in sizes:
            cluster = stack.enter_context(_cluster(replica_push_max_bytes=most))
            session = stack.enter_context(
                kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers,
                                 "transport": "shm", "acks": "all"})
            )  # fmt: skip
            session.admin.create_topic("sizes", 1, REPLICAS)
            producer = stack.enter_context(session.producer())
            leader = _until_pushed(cluster, session, producer, "sizes")
            _flood(producer, "sizes", value, count // 10)
            at[most] = producer, cluster.pid(leader)
        for number in range(rounds):
            for most in sizes if number % 2 == 0 else reversed(sizes):
                producer, pid = at[most]
                samples[most] += _one_at_a_time(producer, "sizes", value, turn_s)
                before = _thread_seconds(pid)
                rates[most].append(_flood(producer, "sizes", value, count))
                cpu[most].append((_thread_seconds(pid) - before) / count * 1e6)
    rows = []
    first = statistics.median(rates[0]) * len(value)
    for most in sizes:
        ordered = sorted(samples[most])
        rows.append(
            figure(
                "push-sizes", statistics.median(rates[most]) * len(value), "B/s",
                "each run in a WRITE of its own", first,
                most_bytes=most, size=len(value), replicas=REPLICAS, acks="all", rounds=rounds,
                records_per_s=statistics.median(rates[most]),
                p50_us=_percentile(ordered, 0.5), p99_us=_percentile(ordered, 0.99),
                leader_cpu_us=statistics.median(cpu[most]),
            )
        )  # fmt: skip
    return rows


def push_cpu(seconds: float, quick: bool) -> list[Figure]:
    """The leader's CPU time, of all its threads, for each record of 100 bytes that two followers
    get, less that for a record without followers: pipelined, in turns, on the same broker."""
    import kdirect

    count = 2000 if quick else 100_000
    per_record: dict[int, list[float]] = {1: [], REPLICAS: []}
    value = b"v" * 100
    with _cluster() as cluster, ExitStack() as stack:
        session = stack.enter_context(
            kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers, "transport": "shm",
                             "acks": "all"})
        )  # fmt: skip
        producer = stack.enter_context(session.producer())
        session.admin.create_topic("pushed", 1, REPLICAS)
        leader = _until_pushed(cluster, session, producer, "pushed")
        session.admin.create_topic("alone", 1, 1, configs={"min.insync.replicas": 1})
        session.admin.reassign_partitions({_tp("alone"): [leader]})
        _until_moved(session)
        pid = cluster.pid(leader)
        for topic in ("alone", "pushed"):
            _flood(producer, topic, value, count // 2)
        end = time.perf_counter() + (0 if quick else seconds)
        while len(per_record[1]) < 2 or time.perf_counter() < end:
            turns = [(1, "alone"), (REPLICAS, "pushed")]
            for replicas, topic in turns if len(per_record[1]) % 2 else turns[::-1]:
                before = _thread_seconds(pid)
                _flood(producer, topic, value, count)
                per_record[replicas].append((_thread_seconds(pid) - before) / count * 1e6)
            session.admin.delete_records({_tp("alone"): -1, _tp("pushed"): -1})
    alone, pushed = (statistics.median(x) for x in per_record.values())
    return [
        figure(
            "push-cpu", max(pushed - alone, 1e-3), "us", "bar: 0.5 us", 0.5, lower_is_better=True,
            size=len(value), replicas=REPLICAS, acks="all", rounds=len(per_record[1]),
            committed_us=alone, committed_and_pushed_us=pushed,
            every_us={str(k): [round(x, 3) for x in v] for k, v in per_record.items()},
        )
    ]  # fmt: skip


def _until_moved(session: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while session.admin.list_reassignments():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a partition did not move within {WAIT_S:g} s")
        time.sleep(0.005)


class CaughtUp(NamedTuple):
    """One catch-up.  `seconds`: from the order until the replica is in sync; `read_s`: in which
    `read_bytes` of its segments were sealed; `leader_cpu_s` and `idle_cpu_s`: of the leader in
    `seconds`, and in as much time before; of `copies`, see `_copies`."""

    seconds: float
    read_s: float
    read_bytes: int
    leader_cpu_s: float
    idle_cpu_s: float
    copies: tuple[float, float]


def catch_up(seconds: float, quick: bool) -> list[Figure]:
    """A second replica of a topic: from the order to add it until it is in sync, and the CPU time
    of the leader meanwhile, less that of an idle leader, which is not the controller.  Against
    memcpy of the leader's files, as they are mapped, into as many new files of a log, which are
    all kept: so both need the same new pages.

    A quarter as much is caught up with in turn: what the leader does for each byte, apart from what
    it does for any new replica (the order, the store's changes, the links)."""
    import kdirect

    size = 16 << 20 if quick else 1 << 30
    found: list[CaughtUp] = []
    quarters: list[CaughtUp] = []
    with _cluster() as cluster, ExitStack() as stack:
        session = stack.enter_context(
            kdirect.connect({"bootstrap.servers": cluster.bootstrap_servers, "transport": "shm",
                             "acks": "all"})
        )  # fmt: skip
        producer = stack.enter_context(session.producer())
        controller = session.admin.describe_cluster().controller
        others = [n for n in cluster.node_ids if n != controller]
        for number in range(4 if quick else 10):
            leader, follower = others if number % 2 else others[::-1]
            # The first one of each leader is small, and not counted: links are opened.
            is_first, is_whole = number < 2 and not quick, number % 4 < 2
            count = 24 << 20 if is_first else size if is_whole else size // 4
            topic = f"late-{number}"
            _led_by(session, topic, leader, 4 << 20 if quick or is_first else SEGMENT_BYTES)
            value = os.urandom(512 << 10)
            _flood(producer, topic, value, count // len(value))
            caught = _caught_up(cluster, session, topic, leader, follower, number % 8 < 4)
            if not is_first:
                (found if is_whole else quarters).append(caught)
            session.admin.delete_topic(topic)
    return _catch_up_rows(size, found, quarters)


def _led_by(session: Any, topic: str, leader: int, segment_bytes: int) -> None:
    """A topic of one replica; brokers take turns at leading what is created."""
    configs = {"segment.bytes": segment_bytes, "min.insync.replicas": 1}
    for _ in range(10 * REPLICAS):
        session.admin.create_topic(topic, 1, 1, configs=configs)
        if _leader(session, topic) == leader:
            return
        session.admin.delete_topic(topic)
    raise RuntimeError(f"broker {leader} is not chosen to lead {topic}")


def _caught_up(
    cluster: Any, session: Any, topic: str, leader: int, follower: int, copies_first: bool
) -> CaughtUp:
    pid = cluster.pid(leader)
    source, target = (cluster.log_dirs(n)[0] / f"{topic}-0" for n in (leader, follower))
    idle_s = 1.0
    before = _thread_seconds(pid)
    time.sleep(idle_s)
    idle = max(_thread_seconds(pid) - before, 0.0) / idle_s  # threads may have ended
    _copies(source)  # whatever is measured first finds the memory as what comes after it does
    copies = _copies(source) if copies_first else (0.0, 0.0)
    before, begin = _thread_seconds(pid), time.perf_counter()
    session.admin.reassign_partitions({_tp(topic): [leader, follower]})
    sealed = _sealed_while_moving(session, target)
    took = time.perf_counter() - begin
    cpu = _thread_seconds(pid) - before
    files = sorted(target.glob("*.log"))
    read_s = sealed[-1][0] - sealed[0][0]
    read_bytes = sum(f.stat().st_size for f in files[sealed[0][1] : sealed[-1][1]])
    if not copies_first:
        copies = _copies(source)
    return CaughtUp(took, read_s, read_bytes, cpu, idle * took, copies)


def _sealed_while_moving(session: Any, directory: Path) -> list[tuple[float, int]]:
    """Wait until nothing is moved; when which number of segments was sealed in `directory`."""
    times: list[tuple[float, int]] = []
    deadline = time.monotonic() + WAIT_S
    is_over = False
    while not is_over:
        is_over = not session.admin.list_reassignments()
        sealed = max(sum(1 for _ in directory.glob("*.log")) - 1, 0)
        if not times or sealed != times[-1][1]:
            times.append((time.perf_counter(), sealed))
        if time.monotonic() > deadline:
            raise RuntimeError(f"a partition did not move within {WAIT_S:g} s")
        time.sleep(0.005)
    return [x for x in times if x[1] > 0] or times[-1:]


def _copies(source: Path) -> tuple[float, float]:
    """Seconds to copy the mapped `*.log` files of a directory into new files beside it, as a log
    makes them; and of that those of memcpy alone, into pages that are there already."""
    from kdirect.huge_pages import allocate_huge
    from kdirect.rdma.contract import Memory

    alone = 0.0
    begin = time.perf_counter()
    with ExitStack() as stack:
        for path in sorted(source.glob("*.log")):
            size = path.stat().st_size
            if not size:
                continue
            given = stack.enter_context(open(path, "rb"))
            taken = stack.enter_context(tempfile.TemporaryFile(dir=source.parents[2]))
            allocate_huge(taken.fileno(), size)
            os.posix_fallocate(taken.fileno(), 0, size)
            there = Memory.map(given.fileno(), size, False)
            here = Memory.map(taken.fileno(), size, True)
            began = time.perf_counter()
            with memoryview(there) as a, memoryview(here) as b:
                for at in range(0, size, 1 << 20):
                    b[at : at + (1 << 20)] = a[at : at + (1 << 20)]
            alone += time.perf_counter() - began
            there.close()
            here.close()
        took = time.perf_counter() - begin
    return took, alone


def _catch_up_rows(size: int, found: list[CaughtUp], quarters: list[CaughtUp]) -> list[Figure]:
    def every(values: Iterable[float], digits: int = 3) -> list[float]:
        return [round(x, digits) for x in values]

    median = statistics.median
    rate = size / median(x.seconds for x in found)
    new_files = size / median(x.copies[0] for x in found)
    read = median(x.read_bytes / x.read_s if x.read_s else 0.0 for x in found)
    shares = [(x.leader_cpu_s - x.idle_cpu_s) / x.seconds * 100 for x in found]
    whole, quarter = (
        median(x.leader_cpu_s - x.idle_cpu_s for x in those) for those in (found, quarters)
    )
    per_byte = max(whole - quarter, 0.0) / (size - size // 4)
    told = {
        "bytes": size, "rounds": len(found), "took_s": every(x.seconds for x in found),
        "copies_s": every(x.copies[0] for x in found),
    }  # fmt: skip
    return [
        figure(
            "catch-up", rate, "B/s", "memcpy into new files of a log, all kept", new_files, bar=0.5,
            read_bytes_per_s=read, ratio_of_reading=read / new_files,
            memcpy_alone_bytes_per_s=size / median(x.copies[1] for x in found),
            every_ratio=every(x.copies[0] / x.seconds for x in found), **told,
        ),
        figure(
            "catch-up.leader-cpu", max(median(shares), 1e-3), "% of a core", "bar: 1 %", 1.0,
            lower_is_better=True, every=every(shares, 2),
            cpu_ms=every(x.leader_cpu_s * 1000 for x in found),
            idle_cpu_ms=every(x.idle_cpu_s * 1000 for x in found), **told,
        ),
        figure(
            "catch-up.leader-cpu-of-bytes", max(per_byte * rate * 100, 1e-3), "% of a core",
            "bar: 1 %", 1.0, lower_is_better=True, ms_per_gib=round(per_byte * (1 << 30) * 1000, 2),
            whole_ms=round(whole * 1000, 2), quarter_ms=round(quarter * 1000, 2),
            quarters_cpu_ms=every(x.leader_cpu_s * 1000 for x in quarters), **told,
        ),
    ]  # fmt: skip


CLIENTS = """
import sys, threading, time
import kdirect
servers, transport = sys.argv[1:]
session = kdirect.connect({"bootstrap.servers": servers, "transport": transport, "acks": "all"})
producer = session.producer()
producer.produce_sync("idle", b"v", None, partition=0)
consumer = kdirect.Consumer({"bootstrap.servers": servers, "transport": transport,
                             "group.id": transport, "auto.offset.reset": "earliest"})
consumer.subscribe(["idle"])
while consumer.poll(1.0) is None:
    pass
print("there", flush=True)
while True:
    consumer.poll(1.0)
"""


def cluster_idle(seconds: float, quick: bool) -> list[Figure]:
    """CPU time of three brokers with 20 partitions of three replicas that get no records, and of
    two processes with a producer and a waiting group's consumer each, one over shm and one over
    TCP.  ZooKeeper's is told apart."""
    import kdirect

    with _cluster() as cluster, ExitStack() as stack:
        with kdirect.connect(
            {"bootstrap.servers": cluster.bootstrap_servers, "transport": "shm", "acks": "all"}
        ) as session:
            session.admin.create_topic("idle", 20, REPLICAS)
            with session.producer() as producer:
                for partition in range(20):
                    producer.produce_sync("idle", b"v", None, partition=partition)
                _until_pushed(cluster, session, producer, "idle")
        clients = {
            transport: stack.enter_context(_idle_client(cluster.bootstrap_servers, transport))
            for transport in ("shm", "tcp")
        }
        time.sleep(0.5 if quick else 5)  # groups balance, statistics are taken
        pids = {f"broker-{n}": cluster.pid(n) for n in cluster.node_ids}
        pids |= {f"client-{transport}": pid for transport, pid in clients.items()}
        zookeeper = cluster.zookeeper.pid
        watched_s = 1.0 if quick else min(20.0, seconds / 2)
        before = {name: _thread_seconds(pid) for name, pid in pids.items()}
        zookeeper_before, begin = _thread_seconds(zookeeper), time.perf_counter()
        time.sleep(watched_s)
        took = time.perf_counter() - begin
        each = {
            name: (_thread_seconds(pid) - before[name]) / took * 100 for name, pid in pids.items()
        }
        zookeeper_percent = (_thread_seconds(zookeeper) - zookeeper_before) / took * 100
    return [
        figure(
            "cluster-idle", max(sum(each.values()), 1e-3), "% of a core", "bar: 1 %", 1.0,
            lower_is_better=True, watched_s=watched_s, partitions=20, replicas=REPLICAS,
            each_percent={name: round(x, 3) for name, x in each.items()},
            zookeeper_percent=round(zookeeper_percent, 3),
        )
    ]  # fmt: skip


@contextmanager
def _idle_client(servers: str, transport: str) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENTS, servers, transport], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "there":
            raise RuntimeError(f"the idle client over {transport} has ended")
        yield process.pid
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
