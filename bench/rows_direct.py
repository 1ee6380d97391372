"""Bench rows of the RDMA paths: empty polls, one record at a time, produce round trips and
pipelines.

The broker runs in a process of its own; producer and consumer are this process.  Each row states
its limit, measured in the same run: the bare eventfd round trip between two processes, memcpy, or
an absolute bar.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memory import touch
from sides import Figure, figure


@contextmanager
def broker_process(**properties: Any) -> Iterator[tuple[str, int]]:
    """A broker in a process of its own with its log on tmpfs; yields (host:port, pid)."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kdirect-bench-", dir=base) as directory:
        # What one row has deleted takes no memory from the next one.
        properties = {
            "listeners": "127.0.0.1:0", "log.segment.delete.delay.ms": 0, **properties
        }  # fmt: skip
        sets = [x for k, v in properties.items() for x in ("--set", f"{k.replace('_', '.')}={v}")]
        process = subprocess.Popen(
            [sys.executable, "-m", "kdirect.cli", "broker", "--log-dirs", directory, *sets],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready on" not in line:
                raise RuntimeError(f"the broker did not start: {line!r}")
            yield line.rsplit(" ", 1)[1].strip(), process.pid
        finally:
            process.terminate()
            process.wait(20)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentile(sorted_values: list[float], p: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * p))]


def eventfd_round_trip_us(seconds: float) -> float:
    """Median of a bare eventfd round trip between two processes that both sleep in poll, on two
    cores if there are two, as client and broker are."""
    there, back = os.eventfd(0), os.eventfd(0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, cores[1:2] or cores)
        poller = select.poll()
        poller.register(there, select.POLLIN)
        while True:
            poller.poll()
            if os.eventfd_read(there) > 1:
                os._exit(0)
            os.eventfd_write(back, 1)
    poller = select.poll()
    poller.register(back, select.POLLIN)
    samples = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.0005)
        begin = time.perf_counter()
        os.eventfd_write(there, 1)
        poller.poll()
        os.eventfd_read(back)
        samples.append((time.perf_counter() - begin) * 1e6)
    os.eventfd_write(there, 2)
    os.waitpid(child, 0)
    os.close(there)
    os.close(back)
    os.sched_setaffinity(0, cores)
    return statistics.median(samples)


def _apart(pid: int) -> None:
    """Broker and this process on two cores, if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[1:])
        os.sched_setaffinity(0, cores[:1])


def slot_poll(seconds: float, quick: bool) -> list[Figure]:
    """Empty polls of an idle topic from Python, the broker's work meanwhile, and one committed
    record at a time."""
    import kdirect
    from kdirect.client import connect
    from kdirect.model import TopicPartition

    rows: list[Figure] = []
    with broker_process() as (servers, pid):
        session = connect({"bootstrap.servers": servers, "transport": "shm"})
        session.admin.create_topic("poll", 1)
        tp = TopicPartition("poll", 0)
        with session.producer() as producer:
            for _ in range(100):
                producer.produce("poll", b"x" * 100, partition=0)
        with kdirect.Consumer({"bootstrap.servers": servers, "transport": "shm"}) as consumer:
            consumer.assign({tp: 100})
            consumer.poll(0.01)
            slots = next(
                iter(consumer._reading.paths.direct)
            )._slots  # the row measures the slot READ itself
            refresh = slots.refresh
            rates: list[float] = []
            polls: list[float] = []
            before = _cpu_seconds(pid)
            count = 20_000
            end = time.perf_counter() + seconds / 3
            while time.perf_counter() < end:
                begin = time.perf_counter()
                for _ in range(count):
                    refresh()
                rates.append(count / (time.perf_counter() - begin))
                begin = time.perf_counter()
                slots.poll(count)
                polls.append(count / (time.perf_counter() - begin))
            cpu = _cpu_seconds(pid) - before
            rows.append(
                figure(
                    "slot-poll",
                    statistics.median(rates),
                    "1/s",
                    "bar: 5 M/s from Python",
                    5e6,
                    call="one Python call a slot READ",
                    broker_cpu_s=cpu,
                )
            )
            rows.append(
                figure(
                    "slot-poll.loop",
                    statistics.median(polls),
                    "1/s",
                    "bar: 5 M/s",
                    5e6,
                    call="looped without returning to Python",
                    broker_cpu_s=cpu,
                )
            )
        for size in (100, 4096):
            topic = f"one-{size}"
            session.admin.create_topic(topic, 1)
            records = 2000 if quick else 10_000
            with session.producer() as producer:
                for _ in range(records):
                    producer.produce(topic, b"v" * size, partition=0)
            samples: list[float] = []
            with kdirect.Consumer(
                {"bootstrap.servers": servers, "transport": "shm", "fetch.max.read.bytes": "2048"}
            ) as consumer:
                consumer.assign({TopicPartition(topic, 0): 0})
                clock = time.perf_counter_ns
                while len(samples) < records:
                    begin = clock()
                    record = consumer.poll(1)
                    samples.append((clock() - begin) / 1000)
                    if record is None:
                        raise RuntimeError("a committed record did not arrive")
            samples.sort()
            rows.append(
                figure(
                    "slot-poll.consume-backlog",
                    statistics.median(samples),
                    "us",
                    "bar: 2 us",
                    2.0,
                    lower_is_better=True,
                    size=size,
                    p99_us=_percentile(samples, 0.99),
                    how="backlog read through 2 KiB READs, one poll() a record",
                )
            )
            # Each record is committed first, then consumed: slot READ, data READ, CRC, object.
            samples = []
            with (
                session.producer() as producer,
                kdirect.Consumer({"bootstrap.servers": servers, "transport": "shm"}) as consumer,
            ):
                consumer.assign({TopicPartition(topic, 0): records})
                for _ in range(200 if quick else 5000):
                    producer.produce_sync(topic, b"v" * size, partition=0)
                    begin = clock()
                    record = consumer.poll(1)
                    samples.append((clock() - begin) / 1000)
                    if record is None:
                        raise RuntimeError("a committed record did not arrive")
            samples.sort()
            rows.append(
                figure(
                    "slot-poll.consume-one",
                    statistics.median(samples),
                    "us",
                    "bar: 2 us",
                    2.0,
                    lower_is_better=True,
                    size=size,
                    p99_us=_percentile(samples, 0.99),
                    how="committed, then polled: slot READ, data READ, CRC, record object",
                )
            )
        session.close()
    return rows


def produce_rtt(seconds: float, quick: bool) -> list[Figure]:
    """A record at a time, acknowledged, called from Python: while traffic flows, and after the
    broker slept."""
    from kdirect.client import connect

    rows: list[Figure] = []
    bare = eventfd_round_trip_us(0.3 if quick else 2)
    with broker_process() as (servers, pid):
        session = connect({"bootstrap.servers": servers, "transport": "shm"})
        session.list_topics()  # and with it the broker's threads
        everywhere = os.sched_getaffinity(0)
        _apart(pid)
        for size in (100, 4096):
            topic = f"rtt-{size}"
            session.admin.create_topic(topic, 1)
            value = b"v" * size
            clock = time.perf_counter_ns
            with session.producer() as producer:
                for _ in range(200):
                    producer.produce_sync(topic, value, partition=0)
                samples: list[float] = []
                end = time.perf_counter() + seconds / 5
                while time.perf_counter() < end:
                    for _ in range(100):
                        begin = clock()
                        producer.produce_sync(topic, value, partition=0)
                        samples.append((clock() - begin) / 1000)
                samples.sort()
                rows.append(
                    figure(
                        "produce-rtt",
                        statistics.median(samples),
                        "us",
                        "bar: 8 us",
                        8.0,
                        lower_is_better=True,
                        size=size,
                        p99_us=_percentile(samples, 0.99),
                        traffic="flowing",
                        samples=len(samples),
                    )
                )
                slept: list[float] = []
                end = time.perf_counter() + seconds / 5
                while time.perf_counter() < end:
                    time.sleep(0.001)
                    begin = clock()
                    producer.produce_sync(topic, value, partition=0)
                    slept.append((clock() - begin) / 1000)
                slept.sort()
                rows.append(
                    figure(
                        "produce-rtt.slept",
                        statistics.median(slept),
                        "us",
                        "bare eventfd round trip, two processes",
                        bare,
                        lower_is_better=True,
                        size=size,
                        p99_us=_percentile(slept, 0.99),
                        traffic="one a millisecond",
                        samples=len(slept),
                    )
                )
        os.sched_setaffinity(0, everywhere)
        time.sleep(0.5)
        before = _cpu_seconds(pid)
        time.sleep(1 if quick else 3)
        rows.append(
            figure(
                "produce-rtt.idle-cpu",
                _cpu_seconds(pid) - before,
                "s",
                "bar: 0 s",
                None,
                lower_is_better=True,
                of_s=1 if quick else 3,
            )
        )
        session.close()
    return rows


def _memcpy_rate(size: int, seconds: float) -> float:
    """Bytes a second of copying `size` bytes at a time through 64 MiB of warm memory, as a send
    buffer and a segment are walked."""
    import numpy as np

    total = 64 << 20
    source = np.ones(16 << 20, dtype=np.uint8)
    target = np.ones(total, dtype=np.uint8)
    rates = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        begin = time.perf_counter()
        at = 0
        for at in range(0, total - size, size):
            s = at % (len(source) - size)
            target[at : at + size] = source[s : s + size]
        rates.append((at + size) / (time.perf_counter() - begin))
    return statistics.median(rates)


def _new_file_rate(size: int, seconds: float) -> float:
    """Bytes a second of the same copies into files as a log makes them: preallocated on tmpfs (in
    huge pages where there are any), mapped, written once, unmapped, deleted."""
    from kdirect.huge_pages import allocate_huge
    from kdirect.rdma.contract import Memory

    total = 64 << 20
    source = memoryview(bytes(4 << 20))
    rates = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        begin = time.perf_counter()
        with tempfile.TemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
            allocate_huge(file.fileno(), total)
            os.posix_fallocate(file.fileno(), 0, total)
            memory = Memory.map(file.fileno(), total, True)
            at = 0
            with memoryview(memory) as target:
                for at in range(0, total - size, size):
                    s = at % (len(source) - size)
                    target[at : at + size] = source[s : s + size]
            memory.close()
        rates.append((at + size) / (time.perf_counter() - begin))
    return statistics.median(rates)


def produce_pipelined(seconds: float, quick: bool) -> list[Figure]:
    """Unbatched and pipelined, one Python call a record, one partition."""
    from kdirect.client import connect

    rows: list[Figure] = []
    with broker_process() as (servers, pid):
        session = connect({"bootstrap.servers": servers, "transport": "shm"})
        session.list_topics()
        for size in (100, 512, 4096, 32768):
            topic = f"pipe-{size}"
            session.admin.create_topic(topic, 1, configs={"retention.bytes": str(256 << 20)})
            value = b"v" * size
            count = min(100_000, (128 << 20) // (size + 128))
            if quick:
                count = min(count, 2000)
            rates: list[float] = []
            with session.producer() as producer:
                produce = producer.produce
                end = time.perf_counter() + seconds / 8
                done = 0
                # The first pages of a machine that has just started cost more than any later one.
                for _ in range(count // 4):
                    produce(topic, value, None, partition=0)
                producer.flush()
                cpu = _cpu_seconds(pid)
                while not rates or time.perf_counter() < end:
                    touch(2 * count * (size + 128))
                    begin = time.perf_counter()
                    for _ in range(count):
                        produce(topic, value, None, partition=0)
                    producer.flush()
                    rates.append(count / (time.perf_counter() - begin))
                    done += count
                    session.admin.delete_records({_tp(topic): -1})
                cpu = _cpu_seconds(pid) - cpu
            rate = statistics.median(rates)
            settings = {
                "size": size,
                "records": done,
                "broker_cpu_us_per_record": cpu / done * 1e6,
                "bytes_per_s": rate * size,
            }
            if size <= 512:
                rows.append(
                    figure(
                        "produce-pipelined", rate, "1/s", "bar: 400 k/s at 100 B", 400e3, **settings
                    )
                )
            else:
                new_file, warm = (
                    _new_file_rate(size, 0.2 if quick else 1),
                    _memcpy_rate(size, 0.2 if quick else 1),
                )
                settings |= {
                    "warm_memcpy_bytes_per_s": warm,
                    "ratio_to_warm_memcpy": rate * size / warm,
                }
                rows.append(
                    figure(
                        "produce-pipelined",
                        rate * size,
                        "B/s",
                        "memcpy into new files of a log",
                        new_file,
                        **settings,
                    )
                )
        session.close()
    return rows


def _tp(topic: str) -> Any:
    from kdirect.model import TopicPartition

    return TopicPartition(topic, 0)
