"""Bench rows of what a log costs: the disk that quiet partitions take, and the start of a broker
with many of them.

The broker runs in a process of its own with its log on tmpfs; what a file occupies is what the file
system says (`st_blocks`).
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sides import Figure, figure

QUIET_BAR_BYTES = 64 << 10
START_BAR_S = 5.0
TOPIC = "quiet"
PARTITIONS_A_TOPIC = 1000


class _Broker:
    """`kdirect broker` over a directory; how long it took to be ready is `ready_s`."""

    def __init__(self, directory: str) -> None:
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kdirect.cli",
                "broker",
                "--log-dirs",
                directory,
                "--set",
                "listeners=127.0.0.1:0",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready_s = time.perf_counter() - begin
        if "ready on" not in line:
            raise RuntimeError(f"the broker did not start: {line!r}")
        self.servers = line.rsplit(" ", 1)[1].strip()

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(120)


def _disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        prefix="kdirect-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    )


def _one_record_each(servers: str, count: int, path: str) -> None:
    from kdirect.client import connect

    transport = "tcp" if path == "tcp" else "shm"
    session = connect({"bootstrap.servers": servers, "transport": transport})
    session.admin.create_topic(TOPIC, count)
    with session.producer() as producer:
        for partition in range(count):
            producer.produce(TOPIC, b"v" * 100, partition=partition)
        producer.flush()
        records = producer.statistics().get("tcp_records" if path == "tcp" else "rdma_records", 0)
    session.close()
    if records != count:
        raise RuntimeError(f"{records} of {count} records went by {path}")


def quiet(seconds: float, quick: bool) -> list[Figure]:
    """The disk that each of 1,000 partitions with one record takes, written by Kafka's protocol and
    by RDMA; then how long a broker with 10,000 such partitions takes to start, after it was stopped
    and after it was killed."""
    rows: list[Figure] = []
    count = 50 if quick else 1000
    for path in ("tcp", "rdma"):
        with _directory() as directory:
            broker = _Broker(directory)
            try:
                _one_record_each(broker.servers, count, path)
                sizes = [_disk_bytes(Path(directory, f"{TOPIC}-{i}")) for i in range(count)]
            finally:
                broker.end(signal.SIGTERM)
        rows.append(
            figure(
                "quiet",
                float(max(sizes)),
                "bytes",
                "bar: 64 KiB",
                float(QUIET_BAR_BYTES),
                lower_is_better=True,
                path=path,
                partitions=count,
                median=statistics.median(sizes),
            )
        )
    partitions = 200 if quick else 10_000
    with _directory() as directory:
        _make_partitions(directory, partitions)
        for before, number in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
            _Broker(directory).end(number)
            times = []
            for _ in range(1 if quick else 3):
                broker = _Broker(directory)
                times.append(broker.ready_s)
                broker.end(number)
            rows.append(
                figure(
                    "quiet",
                    statistics.median(times),
                    "s",
                    "bar: 5 s",
                    START_BAR_S,
                    lower_is_better=True,
                    figure="start",
                    partitions=partitions,
                    before=before,
                    longest=max(times),
                )
            )
    return rows


def _make_partitions(directory: str, count: int) -> None:
    """One record in each, as a broker leaves them."""
    from kdirect.format.batch import encode_single_bytes
    from kdirect.log.manager import LogManager
    from kdirect.model import TopicPartition

    data = encode_single_bytes(b"v" * 100)
    with LogManager([directory]) as logs:
        for i in range(count):
            topic, number = divmod(i, PARTITIONS_A_TOPIC)
            logs.create_partition(TopicPartition(f"{TOPIC}-{topic}", number)).append(data)


__all__ = ["quiet"]
