"""A prototype of the rows of push replication: producer -> leader -> followers -> leader ->
producer, over shm, without a cluster's control plane.

    python bench/rows_push.py [--seconds S] [--followers 0,2] [--sizes 32,512,4096,32768]
        [--spin 0,50] [--most 65536] [--records N]

Prints a line of JSON for each case: p50, p90 and p99 of a record at a time, goodput of unbatched
pipelined records, and CPU time of the leader's process for each.  Followers are brokers' cores in
processes of their own (bench/replica_leader.py).  With 0 followers it is the single node, in the
same run, so that what replication costs the leader is the difference.  No figure is held to a bar.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LEADER = Path(__file__).with_name("replica_leader.py")
SEGMENT_BYTES = 64 << 20
ROUNDS = 3


class Leader:
    """The leader's process, and what it is asked."""

    def __init__(self, process: subprocess.Popen[str], servers: str) -> None:
        self.process = process
        self.servers = servers

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]


@contextmanager
def leader(followers: int, most: int, spin_us: int) -> Iterator[Leader]:
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = tempfile.mkdtemp(prefix="kdirect-bench-", dir=base)
    arguments = [directory, *map(str, (followers, most, spin_us, SEGMENT_BYTES))]
    process = subprocess.Popen(
        [sys.executable, str(LEADER), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Leader(process, process.stdout.readline().split()[1])
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def latency(session: Any, topic: str, value: bytes, seconds: float) -> dict[str, float]:
    """Microseconds of one record at a time, acknowledged."""
    samples = []
    with session.producer() as producer:
        for _ in range(100):
            producer.produce_sync(topic, value, partition=0)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter_ns()
            producer.produce_sync(topic, value, partition=0)
            samples.append((time.perf_counter_ns() - begin) / 1000)
    samples.sort()
    at = {f"p{p}_us": samples[min(len(samples) - 1, len(samples) * p // 100)] for p in (50, 90, 99)}
    return {**at, "samples": len(samples)}


def bandwidth(on: Leader, session: Any, topic: str, value: bytes, count: int) -> dict[str, float]:
    """The best round's goodput of unbatched records, many under way, and the least CPU time of the
    leader for a record."""
    best, cpu = 0.0, float("inf")
    for _ in range(ROUNDS):
        with session.producer() as producer:
            producer.produce_sync(topic, value, partition=0)
            before, begin = on.ask("figures"), time.perf_counter()
            for _ in range(count):
                producer.produce(topic, value, None, partition=0)
            producer.flush()
            took, after = time.perf_counter() - begin, on.ask("figures")
        best = max(best, count * len(value) / took / (1 << 20))
        cpu = min(cpu, (after["cpu_s"] - before["cpu_s"]) / count * 1e6)
    return {"goodput_mib_s": best, "leader_cpu_us_per_record": cpu, "records": count}


def run(followers: int, spin_us: int, arguments: argparse.Namespace) -> None:
    from kdirect.client import connect

    with leader(followers, arguments.most, spin_us) as on:
        session = connect({"bootstrap.servers": on.servers, "transport": "shm", "spin.us": spin_us})
        session.admin.create_topic("first", 1)
        with session.producer() as producer:  # and with it the broker's engine
            producer.produce_sync("first", b"x", partition=0)
        for size in arguments.sizes:
            topic, value = f"t{size}", b"v" * size
            session.admin.create_topic(topic, 1)
            on.ask(f"replicate {topic}")
            row = {"row": "push-prototype", "followers": followers, "spin_us": spin_us}
            row |= {"size": size, "most_bytes": arguments.most}
            row |= latency(session, topic, value, arguments.seconds)
            count = min(arguments.records, max(1000, (64 << 20) // size))
            row |= bandwidth(on, session, topic, value, count)
            print(json.dumps({k: round(v, 3) if k != "row" else v for k, v in row.items()}))
            sys.stdout.flush()
        session.close()


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--followers", type=numbers, default=[0, 2])
    parser.add_argument("--sizes", type=numbers, default=[32, 512, 4096, 32768])
    parser.add_argument("--spin", type=numbers, default=[0])
    parser.add_argument("--most", type=int, default=65536)
    parser.add_argument("--records", type=int, default=100_000)
    arguments = parser.parse_args()
    for spin_us in arguments.spin:
        for followers in arguments.followers:
            run(followers, spin_us, arguments)


if __name__ == "__main__":
    main()
