"""What catch-up by READ costs: its rate beside a plain copy's, and the leader's processor time.

``python -m tests.members.catch_up_cost --mib 1024`` prints one line; other programs call `measure`.
Three brokers are started over a ZooKeeper of their own, in a directory of memory if there is one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect
from kdirect.store.zookeeper_server import ZookeeperServer
from tests.support import wait_until

TOPIC = "t"
TP = kdirect.TopicPartition(TOPIC, 0)


class Cost(NamedTuple):
    """`seconds` for `size` bytes; processor seconds of the leader and of the follower in that time,
    and of the leader in as much time without a follower that catches up; what a plain copy of as
    many bytes into a new file takes, and its processor seconds, both without allocating it."""

    size: int
    seconds: float
    leader_cpu_s: float
    idle_cpu_s: float
    follower_cpu_s: float
    plain_copy_s: float
    plain_copy_cpu_s: float

    @property
    def of_plain_copy(self) -> float:
        return self.plain_copy_s / self.seconds

    @property
    def leader_share(self) -> float:
        """Of the leader's processor, in the time that catch-up takes."""
        return self.leader_cpu_s / self.seconds

    def __str__(self) -> str:
        return (
            f"catch-up of {self.size >> 20} MiB by READ: {self.size / self.seconds / 1e9:.2f} GB/s,"
            f" {self.of_plain_copy:.2f}x a plain copy into a new file"
            f" ({self.size / self.plain_copy_s / 1e9:.2f} GB/s);"
            f" processor time: leader {1000 * self.leader_cpu_s:.1f} ms"
            f" ({100 * self.leader_share:.2f} % of the time;"
            f" {1000 * self.idle_cpu_s:.1f} ms without catch-up),"
            f" follower {1000 * self.follower_cpu_s:.0f} ms, plain copy"
            f" {1000 * self.plain_copy_cpu_s:.0f} ms"
        )


def cpu_s(pid: int) -> float:
    """Processor seconds of all threads that a process has now."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def plain_copy(directory: Path, size: int) -> tuple[float, float]:
    """Seconds and processor seconds to copy `size` bytes of memory into a new file, which is
    allocated and mapped before."""
    source = mmap.mmap(-1, size)
    source.write(b"\1" * size)
    path = directory / "plain-copy"
    with open(path, "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        with mmap.mmap(file.fileno(), size) as target:
            began = time.perf_counter(), time.process_time()
            memoryview(target)[:] = memoryview(source)
            took = time.perf_counter() - began[0], time.process_time() - began[1]
    path.unlink()
    source.close()
    return took


def fill(cluster: kdirect.Cluster, size: int, segment_bytes: int) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    config = {
        "segment.bytes": str(segment_bytes),
        "leader.replication.throttled.replicas": "*",
        "retention.ms": "-1",
    }
    topic = NewTopic(TOPIC, 1, replica_assignment=[[1, 2]], config=config)
    admin.create_topics([topic])[TOPIC].result(30)
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "acks": "1",
            "batch.size": 1_000_000,
            "linger.ms": 5,
            "queue.buffering.max.kbytes": 262_144,
            "log_level": 0,
        }
    )
    value = os.urandom(10_000)
    for _ in range((size + segment_bytes) // len(value)):
        while True:
            try:
                producer.produce(TOPIC, value, partition=0)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(600) == 0


def set_rate(cluster: kdirect.Cluster, rate: int | None) -> None:
    with kdirect.connect(
        {"bootstrap.servers": cluster.bootstrap_servers, "transport": "tcp"}
    ) as session:
        name = "leader.replication.throttled.rate"
        session.admin.alter_configs(None, {name: rate}, broker=1)


def copied(directory: Path) -> int:
    """Bytes of sealed segments."""
    files = sorted(directory.glob("*.log"))[:-1] if directory.exists() else []
    return sum(file.stat().st_size for file in files)


def measure(
    directory: Path, zookeeper_connect: str, mib: int = 1024, segment_mib: int = 64
) -> Cost:
    """Let a third broker get a replica of `mib` MiB from one that leads."""
    size, segment_bytes = mib << 20, segment_mib << 20
    with kdirect.Cluster(
        3,
        directory / "cluster",
        zookeeper_connect=zookeeper_connect,
        properties={"log.segment.bytes": segment_bytes, "num.partitions": 1},
    ) as ours:
        fill(ours, size, segment_bytes)
        plain = min(plain_copy(directory, size) for _ in range(2))
        set_rate(ours, 1)  # the replica is made, the link is there, and nothing is read
        with kdirect.connect(
            {"bootstrap.servers": ours.bootstrap_servers, "transport": "tcp"}
        ) as session:
            session.admin.reassign_partitions({TP: [1, 2, 3]})
        target = ours.log_dirs(3)[0] / f"{TOPIC}-0"
        wait_until(lambda: any(target.glob("*.log")), "the replica is made", 30)
        wanted = copied(ours.log_dirs(1)[0] / f"{TOPIC}-0")
        idle = _idle(ours.pid(1))
        set_rate(ours, None)
        _wait(lambda: copied(target) > 0)
        before, began, at_first = _cpu(ours), time.perf_counter(), copied(target)
        _wait(lambda: copied(target) >= wanted)
        took, after = time.perf_counter() - began, _cpu(ours)
        part = (wanted - at_first) / size
        return Cost(
            *(wanted - at_first, took, after[0] - before[0], idle * took, after[1] - before[1]),
            *(plain[0] * part, plain[1] * part),
        )


def _cpu(cluster: kdirect.Cluster) -> tuple[float, float]:
    """Of the leader and of the follower."""
    return cpu_s(cluster.pid(1)), cpu_s(cluster.pid(3))


def _idle(pid: int) -> float:
    """Of one second."""
    before = cpu_s(pid)
    time.sleep(1)
    return cpu_s(pid) - before


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--segment-mib", type=int, default=64)
    arguments = parser.parse_args()
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="kdirect-", dir=memory if memory.is_dir() else None))
    try:
        with ZookeeperServer(base / "zookeeper") as server:
            print(measure(base, server.connect, arguments.mib, arguments.segment_mib))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
