"""Bench rows of the produce datapaths: the broker's CPU, one producer against memcpy and over many
rolls, five on one partition, ways to notify the broker.

The broker runs in a process of its own with its log on tmpfs, and so does every producer of
`produce-shared`.  Limits are measured in the same run.  The rows follow KafkaDirect's evaluation
(figures 6, 7, 10 and 11) on one host, over `shm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memory import touch
from rows_direct import (
    _apart,
    _cpu_seconds,
    _memcpy_rate,
    _new_file_rate,
    _percentile,
    _tp,
    broker_process,
)
from sides import Figure, figure

RECORD_BYTES = 32 << 10
PRODUCERS = 5
SIZES = (32, 512, 4096, 32 << 10, 256 << 10, 1 << 20)
GOODPUT_BYTES = 128 << 20  # at most, a turn
ROUNDS = 6  # of which the first warms up
NOTIFICATIONS: dict[str, dict[str, str]] = {
    "imm": {},
    "send": {"rdma.notify": "send"},
    "two-sided": {"produce.path": "send"},
}


def _thread_seconds(pid: int) -> float:
    """CPU time of all threads of a process that are alive, which the scheduler counts in
    nanoseconds."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def produce_cpu(seconds: float, quick: bool) -> list[Figure]:
    """The broker's CPU time, all of it, for each committed RDMA produce of one 100-byte record; one
    exclusive producer, many under way."""
    from kdirect.client import connect

    rows: list[Figure] = []
    count = 5_000 if quick else 200_000
    for spin_us in (50, 0):
        with broker_process(rdma_spin_us=spin_us) as (servers, pid):
            session = connect(
                {"bootstrap.servers": servers, "transport": "shm", "rdma.produce": "exclusive"}
            )
            session.admin.create_topic("cpu", 1)
            _apart(pid)
            try:
                measure = Path(f"/proc/{pid}/schedstat").exists()
                clock = _thread_seconds if measure else _cpu_seconds
                per_request: list[float] = []
                rates: list[float] = []
                with session.producer() as producer:
                    end = time.perf_counter() + seconds / 2 - 2
                    while len(per_request) < 2 or time.perf_counter() < end:
                        before, begin = clock(pid), time.perf_counter()
                        for _ in range(count):
                            producer.produce("cpu", b"v" * 100, None, partition=0)
                        producer.flush()
                        rates.append(count / (time.perf_counter() - begin))
                        per_request.append((clock(pid) - before) / count * 1e6)
                        session.admin.delete_records({_tp("cpu"): -1})
            finally:
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
            session.close()
        per_request = per_request[1:]
        rows.append(
            figure(
                "produce-cpu",
                statistics.median(per_request),
                "us",
                "bar: 2 us",
                2.0,
                lower_is_better=True,
                rdma_spin_us=spin_us,
                size=100,
                rounds=len(per_request),
                requests_per_s=statistics.median(rates),
                lowest_us=min(per_request),
                highest_us=max(per_request),
            )
        )
    return rows


def _crc_rate(size: int, seconds: float) -> float:
    """Bytes a second of CRC-32C over `size` bytes at a time of 16 MiB."""
    from kdirect.format.batch import crc32c

    memory = memoryview(bytes(range(256)) * (16 << 12))
    pieces = [memory[at : at + size] for at in range(0, len(memory), size)]
    rates = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        begin = time.perf_counter()
        for piece in pieces:
            crc32c(piece)
        rates.append(len(memory) / (time.perf_counter() - begin))
    return statistics.median(rates)


def produce_exclusive(seconds: float, quick: bool) -> list[Figure]:
    """One exclusive producer of 32 KiB records, a call each, against memcpy of the same records:
    into memory that is warm, and into new files as a log's are.  The cost of the two CRCs (producer
    and broker, on two cores) is told apart."""
    from kdirect.client import connect

    count = 500 if quick else 8000
    rates: list[float] = []
    warm: list[float] = []
    new_file: list[float] = []
    crc: list[float] = []
    with broker_process() as (servers, _):
        session = connect(
            {"bootstrap.servers": servers, "transport": "shm", "rdma.produce": "exclusive"}
        )
        session.admin.create_topic("one", 1)
        value = b"v" * RECORD_BYTES
        with session.producer() as producer:
            end = time.perf_counter() + seconds - 4
            while (
                len(rates) < 2 or time.perf_counter() < end
            ):  # in turn, so that a busy machine is busy for all
                touch(2 * count * RECORD_BYTES)
                begin = time.perf_counter()
                for _ in range(count):
                    producer.produce("one", value, None, partition=0)
                producer.flush()
                rates.append(count * RECORD_BYTES / (time.perf_counter() - begin))
                session.admin.delete_records({_tp("one"): -1})
                warm.append(_memcpy_rate(RECORD_BYTES, 0.1))
                new_file.append(_new_file_rate(RECORD_BYTES, 0.1))
                crc.append(_crc_rate(RECORD_BYTES, 0.05))
        session.close()
    rate, warm_rate, new_rate, crc_rate = (
        statistics.median(x) for x in (rates[1:], warm, new_file, crc)
    )
    without_crc = 1 / (
        1 / rate - 1 / crc_rate
    )  # the two ends compute theirs at the same time, so one of them is on the way
    settings = {
        "size": RECORD_BYTES,
        "rounds": len(rates) - 1,
        "crc_bytes_per_s": crc_rate,
        "bar": 0.8,
    }
    return [
        figure(
            "produce-exclusive",
            rate,
            "B/s",
            "memcpy into new files of a log",
            new_rate,
            crc="included",
            **settings,
        ),
        figure(
            "produce-exclusive",
            without_crc,
            "B/s",
            "memcpy into new files of a log",
            new_rate,
            crc="one taken off",
            **settings,
        ),
        figure(
            "produce-exclusive", rate, "B/s", "memcpy, warm", warm_rate, crc="included", **settings
        ),
        figure(
            "produce-exclusive",
            without_crc,
            "B/s",
            "memcpy, warm",
            warm_rate,
            crc="one taken off",
            **settings,
        ),
    ]


def produce_rolls(seconds: float, quick: bool) -> list[Figure]:
    """Records of 4 KiB, each awaited, in a stream over many rolls: the 99th percentile is what the
    next head costs, or that it was there. The median round's; a round is of one log, which is
    emptied then."""
    from kdirect.client import connect

    size, segment = 4096, 64 << 20
    count = 2_000 if quick else 150_000  # some nine rolls
    p50: list[float] = []
    p99: list[float] = []
    longest: list[float] = []
    bar = 20.0
    with broker_process() as (servers, pid):
        session = connect({"bootstrap.servers": servers, "transport": "shm"})
        session.admin.create_topic("rolls", 1, configs={"segment.bytes": str(segment)})
        _apart(pid)
        value = b"v" * size
        clock = time.perf_counter_ns
        try:
            with session.producer() as producer:
                for _ in range(200):
                    producer.produce_sync("rolls", value, partition=0)
                end = time.perf_counter() + seconds - 4
                while len(p99) < 2 or time.perf_counter() < end:
                    touch(count * size * 3 // 2)
                    samples: list[float] = []
                    for _ in range(count):
                        begin = clock()
                        producer.produce_sync("rolls", value, partition=0)
                        samples.append((clock() - begin) / 1000)
                    session.admin.delete_records({_tp("rolls"): -1})
                    samples.sort()
                    p50.append(statistics.median(samples))
                    p99.append(_percentile(samples, 0.99))
                    longest.append(samples[-1])
                carried = producer.statistics()
        finally:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        if carried.get("tcp_records"):
            raise RuntimeError(f"{carried} went over TCP")
        session.close()
    return [
        figure(
            "produce-rolls",
            statistics.median(p99),
            "us",
            f"bar: {bar:g} us",
            bar,
            lower_is_better=True,
            size=size,
            percentile=99,
            p50_us=statistics.median(p50),
            lowest_p99_us=min(p99),
            highest_p99_us=max(p99),
            max_us=max(longest),
            rounds=len(p99),
            samples=count * len(p99),
            rolls=carried["rdma_bytes"] // segment,
            rolls_ahead=carried["rdma_files_ahead"],
        )
    ]


class Producers:
    """Producer processes that wait for each other before each round."""

    def __init__(self, servers: str, count: int) -> None:
        command = [sys.executable, __file__, servers]
        self.children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def _tell(self, children: Iterable[subprocess.Popen[str]], **order: Any) -> list[Any]:
        children = list(children)
        for child in children:
            assert child.stdin is not None
            print(json.dumps(order), file=child.stdin, flush=True)
        answers = []
        for child in children:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                raise RuntimeError("a producer process ended")
            answers.append(json.loads(line))
        return answers

    def round(
        self, producers: int, topic: str, total_bytes: int, size: int, settings: dict[str, str]
    ) -> tuple[float, dict[str, int]]:
        """Goodput in bytes/s of that many producers together, and their counters."""
        children = self.children[:producers]
        self._tell(children, do="open", topic=topic, settings=settings, size=size)
        count = total_bytes // size // producers
        spans = self._tell(children, do="go", count=count)
        counters = self._tell(children, do="close")
        total = {k: sum(c.get(k, 0) for c in counters) for k in ("rdma_records", "tcp_records")}
        return count * producers * size / (
            max(s[1] for s in spans) - min(s[0] for s in spans)
        ) * 1e9, total

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def produce_shared(seconds: float, quick: bool) -> list[Figure]:
    """Producers, in processes of their own, of 32 KiB records on one partition: one exclusively,
    more by FETCH_AND_ADD and COMPARE_AND_SWAP."""
    from kdirect.client import connect

    ways = [("exclusive", 1, "exclusive", "faa")]
    ways += [
        (f"{atomic} {n}", n, "shared", atomic)
        for atomic in ("faa", "cas")
        for n in (1, 2, PRODUCERS)
    ]
    total = (8 << 20) if quick else (256 << 20)
    rates: dict[str, list[float]] = {name: [] for name, *_ in ways}
    with broker_process() as (servers, _):
        session = connect({"bootstrap.servers": servers, "transport": "shm"})
        producers = Producers(servers, PRODUCERS)
        try:
            end = time.perf_counter() + seconds - 4
            turn = 0
            while turn < 2 or time.perf_counter() < end:
                for name, n, mode, atomic in ways:
                    topic = f"{name.replace(' ', '-')}-{turn}"
                    session.admin.create_topic(topic, 1)
                    settings = {"rdma.produce": mode, "rdma.produce.atomic": atomic}
                    touch(2 * total)
                    rate, counters = producers.round(n, topic, total, RECORD_BYTES, settings)
                    if counters["tcp_records"]:
                        raise RuntimeError(f"{name}: {counters} went over TCP")
                    if turn:  # the first one warms up
                        rates[name].append(rate)
                    session.admin.delete_topic(topic)
                turn += 1
        finally:
            producers.close()
        session.close()
    alone = statistics.median(rates["exclusive"])
    return [
        figure(
            "produce-shared",
            statistics.median(rates[name]),
            "B/s",
            "one exclusive producer",
            alone,
            producers=n,
            mode=mode,
            atomic=atomic if mode == "shared" else "none",
            size=RECORD_BYTES,
            rounds=turn - 1,
            bar=0.7 if n == PRODUCERS else 0.0,
        )
        for name, n, mode, atomic in ways
    ]


def produce_notify(seconds: float, quick: bool) -> list[Figure]:
    """WRITE_WITH_IMM against WRITE and SEND, and against the two-sided path, from 32 bytes to 1
    MiB: latency and goodput of encoded requests of one record."""
    from kdirect.client import connect
    from kdirect.format.codec import encode_records

    sizes = (32, 32 << 10) if quick else SIZES
    share = max(0.05, (seconds - 4) / len(sizes) / len(NOTIFICATIONS) / 2)
    found: dict[tuple[int, str], dict[str, Any]] = {}
    with broker_process() as (servers, pid):
        session = connect(
            {"bootstrap.servers": servers, "transport": "shm", "rdma.produce": "exclusive"}
        )
        _apart(pid)
        for size in sizes:
            data = encode_records([(None, b"v" * size, [], 1)])
            producers = {}
            for how, settings in NOTIFICATIONS.items():
                session.admin.create_topic(
                    f"{how}-{size}", 1, configs={"max.message.bytes": str(2 << 20)}
                )
                producers[how] = session.producer(
                    **settings, **{"batch.bytes": max(4096, len(data))}
                )
                found[size, how] = {"samples": [], "rates": []}
            for turn in range(2 if quick else ROUNDS):  # in turn: what disturbs one disturbs all
                for how, producer in producers.items():
                    samples = _latency(producer, f"{how}-{size}", data, share / ROUNDS)
                    rate = _goodput(session, producer, f"{how}-{size}", data, size, share / ROUNDS)
                    if turn:
                        found[size, how]["samples"] += samples
                        found[size, how]["rates"].append(rate)
            for how, producer in producers.items():
                f, carried = found[size, how], producer.statistics()
                if carried.get("tcp_records") or bool(carried.get("send_records")) != (
                    how == "two-sided"
                ):
                    raise RuntimeError(f"{how} of {size} bytes took another way: {carried}")
                f["samples"].sort()
                f |= {
                    "p50": statistics.median(f["samples"]),
                    "p99": _percentile(f["samples"], 0.99),
                    "goodput": statistics.median(f["rates"]),
                }
                producer.close()
                session.admin.delete_topic(f"{how}-{size}")
        session.close()
    rows: list[Figure] = []
    for size in sizes:
        base = found[size, "imm"]
        for how in NOTIFICATIONS:
            f = found[size, how]
            rows.append(
                figure(
                    "produce-notify.latency",
                    f["p50"],
                    "us",
                    "WRITE_WITH_IMM",
                    base["p50"],
                    lower_is_better=True,
                    size=size,
                    notify=how,
                    p99_us=f["p99"],
                    samples=len(f["samples"]),
                )
            )
            rows.append(
                figure(
                    "produce-notify.goodput",
                    f["goodput"],
                    "B/s",
                    "WRITE_WITH_IMM",
                    base["goodput"],
                    size=size,
                    notify=how,
                )
            )
    return rows


def _latency(producer: Any, topic: str, data: bytes, seconds: float) -> list[float]:
    """One request at a time, from the call to its answer."""
    tp = _tp(topic)
    send, flush = producer._driver.send, producer._driver.flush
    clock = time.perf_counter_ns
    samples: list[float] = []
    for _ in range(5):
        send(tp, data, 1)
        flush()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = clock()
        send(tp, data, 1)
        flush()
        samples.append((clock() - begin) / 1000)
    return samples


def _goodput(
    session: Any, producer: Any, topic: str, data: bytes, size: int, seconds: float
) -> float:
    """Bytes of records a second, as many requests under way as may be."""
    tp = _tp(topic)
    send: Callable[..., None] = producer._driver.send
    at_once = max(1, min(64, (4 << 20) // len(data)))
    count = 0
    touch(2 * GOODPUT_BYTES)
    begin = now = time.perf_counter()
    while now < begin + seconds and count * len(data) < GOODPUT_BYTES:
        for _ in range(at_once):
            send(tp, data, 1)
        count += at_once
        now = time.perf_counter()
    producer._driver.flush()
    rate = count * size / (time.perf_counter() - begin)
    session.admin.delete_records({tp: -1})
    return rate


def child(servers: str) -> None:
    """One of `Producers`: does what standard input says, a line each."""
    from kdirect.client import connect

    session = connect({"bootstrap.servers": servers, "transport": "shm"})
    producer: Any = None
    topic, value = "", b""
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if order["do"] == "open":
            topic, value = order["topic"], b"v" * order["size"]
            producer = session.producer(**order["settings"])
            producer.produce_sync(topic, value, partition=0)
        elif order["do"] == "go":
            begin = time.monotonic_ns()
            for _ in range(order["count"]):
                producer.produce(topic, value, None, partition=0)
            producer.flush()
            answer = (begin, time.monotonic_ns())
        else:
            answer = producer.statistics()
            producer.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    child(sys.argv[1])
