"""Consuming: one record at a time, bandwidth, empty fetches, a growing backlog (KafkaDirect,
figures 18 and 20).

kdirect: `Consumer` over shm.  Kafka: Fetch requests over a bare socket where one request is what is
measured (the fastest client there is), ConsumerPerformance for bandwidth.
"""

from __future__ import annotations

import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rows_direct import _memcpy_rate
from versus.measure import cpu_of, figure, latency_figure, rate_figure, turns
from versus.perf_tools import BATCHED, tools
from versus.systems import Pair, pair, tmpfs

Figures = list[dict[str, Any]]


class Fetches:
    """Kafka's Fetch, version 4, of one partition, over a socket; one request at a time."""

    def __init__(self, address: str, topic: str, partition: int = 0) -> None:
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = topic.encode()
        head = struct.pack(">hhih", 1, 4, 0, -1) + struct.pack(">iiiib", -1, 0, 0, 64 << 20, 0)
        self.prefix = (
            head + struct.pack(">ih", 1, len(name)) + name + struct.pack(">ii", 1, partition)
        )
        self.frame = struct.pack(">i", len(self.prefix) + 12)
        self.at = (
            4 + 4 + 4 + 2 + len(name) + 4 + 4
        )  # of the error code: correlation, throttle, count, name, count, partition

    def __call__(self, offset: int, max_bytes: int) -> memoryview:
        """The record bytes; at least one batch if there is one, which is what `max_bytes` of 1 asks
        for."""
        self.socket.sendall(self.frame + self.prefix + struct.pack(">qi", offset, max_bytes))
        body = self._exactly(struct.unpack(">i", self._exactly(4))[0])
        error, _, _, aborted = struct.unpack_from(">hqqi", body, self.at)
        if error:
            raise RuntimeError(f"Kafka answered a Fetch with error {error}")
        at = self.at + 22 + max(0, aborted) * 16
        return memoryview(body)[at + 4 : at + 4 + max(0, struct.unpack_from(">i", body, at)[0])]

    def _exactly(self, n: int) -> bytes:
        chunks = []
        while n:
            chunk = self.socket.recv(n)
            if not chunk:
                raise RuntimeError("Kafka closed the connection")
            chunks.append(chunk)
            n -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        self.socket.close()


def consumer(both: Pair, topic: str, offset: int, *, views: bool = False) -> Any:
    import kdirect

    opened = kdirect.Consumer(
        {"bootstrap.servers": both.kdirect.address, "transport": "shm"}, views=views
    )
    opened.assign({kdirect.TopicPartition(topic, 0): offset})
    return opened


def fill_one_by_one(both: Pair, topic: str, size: int, records: int) -> None:
    """The same records at both, each a batch of its own."""
    from confluent_kafka import Producer

    value = b"v" * size
    with both.kdirect.session.producer() as ours:
        for _ in range(records):
            ours.produce(topic, value, None, partition=0)
    theirs = Producer(
        {
            "bootstrap.servers": both.kafka.address,
            "batch.num.messages": 1,
            "linger.ms": 0,
            "acks": 1,
        }
    )
    for _ in range(records):
        theirs.produce(topic, value, partition=0)
    theirs.flush(60)


def consume_latency(seconds: float, quick: bool) -> Figures:
    """One record at a time: each committed before its consumer asks; and, apart, one poll a record
    out of a backlog."""
    from confluent_kafka import Consumer, TopicPartition

    out = []
    sizes = (512,) if quick else (32, 512, 4096, 32768)
    rounds = 1 if quick else 3
    per_round = 50 if quick else 1000
    with pair() as both:
        for size in sizes:
            value = b"v" * size
            with both.topic("one") as topic, both.kdirect.session.producer() as producer:
                fill_one_by_one(both, topic, size, (rounds + 1) * per_round)
                fetches = Fetches(both.kafka.address, topic)
                opened = consumer(both, topic, (rounds + 1) * per_round)
                viewing = consumer(both, topic, (rounds + 1) * per_round, views=True)
                state = {"kafka": 0}

                def ours(
                    opened: Any = opened,
                    other: Any = viewing,
                    producer: Any = producer,
                    topic: str = topic,
                    value: bytes = value,
                ) -> list[int]:
                    samples = []
                    for _ in range(per_round):
                        producer.produce_sync(topic, value, None, partition=0)
                        begin = time.perf_counter_ns()
                        message = opened.poll(1)
                        samples.append(time.perf_counter_ns() - begin)
                        _there(message, len(value))
                    for _ in range(per_round):  # nobody measures how the other one catches up
                        _there(other.poll(1), len(value))
                    return samples

                def theirs(fetches: Fetches = fetches, state: dict[str, int] = state) -> list[int]:
                    samples = []
                    for _ in range(per_round):
                        begin = time.perf_counter_ns()
                        data = fetches(state["kafka"], 1)
                        samples.append(time.perf_counter_ns() - begin)
                        if not data:
                            raise RuntimeError("Kafka sent no record")
                        state["kafka"] += 1
                    return samples

                runs = {
                    "kdirect": ours,
                    "views": lambda ours=ours, a=viewing, b=opened: ours(a, b),
                    "kafka": theirs,
                }
                for run in runs.values():
                    run()
                samples = turns(rounds, runs)
                out.append(
                    latency_figure(
                        "consume-latency.views",
                        "endToEnd",
                        {"kdirect": samples["views"], "kafka": samples["kafka"]},
                        both,
                        bar=100.0 if size == 32768 else None,
                        record_bytes=size,
                        how="kdirect: slot READ, CRC, Message whose value is a view;"
                        " Kafka: Fetch v4 of one record over a bare socket",
                    )
                )
                out.append(
                    latency_figure(
                        "consume-latency",
                        "endToEnd",
                        samples,
                        both,
                        bar=100.0,
                        record_bytes=size,
                        how="kdirect: slot READ, data READ, CRC, Message;"
                        " Kafka: Fetch v4 of one record over a bare socket",
                    )
                )
                fetches.close()
                opened.close()
                viewing.close()
                # Out of a backlog both hand out most records from memory of their own.
                ours_backlog = consumer(both, topic, 0)
                theirs_backlog = Consumer(
                    {
                        "bootstrap.servers": both.kafka.address,
                        "group.id": "backlog",
                        "enable.auto.commit": False,
                    }
                )
                theirs_backlog.assign([TopicPartition(topic, 0, 0)])
                polls = {"kdirect": ours_backlog.poll, "kafka": theirs_backlog.poll}
                samples = turns(
                    rounds,
                    {
                        key: lambda poll=poll: _polls(poll, per_round, size)
                        for key, poll in polls.items()
                    },
                )
                out.append(
                    latency_figure(
                        "consume-latency.backlog",
                        "endToEnd",
                        samples,
                        both,
                        record_bytes=size,
                        how="one poll() a record",
                    )
                )
                ours_backlog.close()
                theirs_backlog.close()
    return out


def _polls(poll: Callable[[float], Any], count: int, size: int) -> list[int]:
    samples = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        message = poll(10)
        samples.append(time.perf_counter_ns() - begin)
        _there(message, size)
    return samples


def _there(message: Any, size: int) -> None:
    if message is None or len(message.value()) != size:
        raise RuntimeError("a committed record did not arrive")


def fill_in_bulk(both: Pair, topic: str, size: int, records: int, partitions: int = 1) -> None:
    """`records` of `size` bytes at both, in batches of up to 1 MiB, spread evenly."""
    import pyarrow as pa

    step = max(1, min(records, (8 << 20) // size))
    column = pa.array([b"v" * size] * step, pa.binary())
    for partition in range(partitions):
        with both.kdirect.session.producer() as producer:
            left = records // partitions
            while left:
                part = column.slice(0, min(step, left))
                number = pa.array([partition] * len(part), pa.int32())
                producer.send_arrow(pa.record_batch({"value": part, "partition": number}), topic)
                left -= len(part)
    tools().produce(both.kafka.address, topic, records // partitions * partitions, size, BATCHED)


def drain(
    both: Pair, topic: str, records: int, partitions: int = 1, *, views: bool = False
) -> float:
    """Seconds in which a fresh kdirect consumer got `records` as Arrow batches."""
    import kdirect

    begin = time.perf_counter()
    with kdirect.Consumer(
        {"bootstrap.servers": both.kdirect.address, "transport": "shm"}
    ) as opened:
        opened.assign({kdirect.TopicPartition(topic, p): 0 for p in range(partitions)})
        done = 0
        while done < records:
            batch = opened.poll_arrow(10, views=views)
            if batch is None:
                raise RuntimeError(f"{records - done} committed records did not arrive")
            done += batch.num_rows
    return time.perf_counter() - begin


def consume_bandwidth(seconds: float, quick: bool) -> Figures:
    """A topic from its start: kdirect to Arrow batches, that copy values and that view them, Kafka
    by ConsumerPerformance."""
    out = []
    sizes = (16384,) if quick else (100, 512, 1024, 4096, 16384, 32768)
    total = (8 << 20) if quick else (384 << 20)
    rounds = 1 if quick else 3
    with pair() as both:
        copied, mapped = (
            _memcpy_rate(1 << 20, 0.05 if quick else 1),
            _mapped_rate(8 << 20 if quick else 256 << 20),
        )
        for size in sizes:
            records = min(total, (128 << 20) if size < 512 else total) // size
            with both.topic("bulk") as topic:
                fill_in_bulk(both, topic, size, records)
                runs = {
                    "kdirect": lambda: records * size / drain(both, topic, records),
                    "views": lambda: records * size / drain(both, topic, records, views=True),
                    "kafka": lambda: tools().consume(both.kafka.address, topic, records),
                }
                for run in runs.values():
                    run()
                rates = turns(rounds, runs)
                out.append(_of_views(rates, both, size, mapped))
                cpu, _ = cpu_of(both.kdirect, runs["kdirect"])
                kafka_cpu, _ = cpu_of(both.kafka, runs["kafka"])
                rate = statistics.median(rates["kdirect"])
                big = size >= 16384
                out.append(
                    rate_figure(
                        "consume-bandwidth",
                        "B/s",
                        "consumeRate",
                        rates,
                        both,
                        bar=5.0 if big else None,
                        per_record=size,
                        record_bytes=size,
                        limits={
                            "memcpy_bytes_per_s": copied,
                            "memcpy_from_a_newly_mapped_file_bytes_per_s": mapped,
                        },
                        ratio_to_memcpy=rate / copied,
                        ratio_to_memcpy_of_new_mapping=rate / mapped,
                        **(
                            {"memcpy_bar": 0.9, "memcpy_bar_met": rate >= 0.9 * copied}
                            if big
                            else {}
                        ),
                        kdirect_broker_cpu_s=round(cpu, 2),
                        kafka_broker_cpu_s=round(kafka_cpu, 2),
                    )
                )
    return out


def _of_views(
    rates: dict[str, list[float]], both: Pair, size: int, mapped: float
) -> dict[str, Any]:
    """The figure of columns that view values, beside a memcpy out of a segment, as which a file of
    the same kind is mapped."""
    rate = statistics.median(rates["views"])
    limit = 0.9 if size >= 16384 else 0.6 if size >= 1024 else None
    return rate_figure(
        "consume-bandwidth.views",
        "B/s",
        "consumeRate",
        {"kdirect": rates["views"], "kafka": rates["kafka"]},
        both,
        bar=8.0 if size >= 16384 else None,
        per_record=size,
        record_bytes=size,
        limits={"memcpy_from_a_newly_mapped_file_bytes_per_s": mapped},
        ratio_to_memcpy=rate / mapped,
        **({"memcpy_bar": limit, "memcpy_bar_met": rate >= limit * mapped} if limit else {}),
    )


def _mapped_rate(total: int) -> float:
    """Bytes a second of copying a file on tmpfs that is made and mapped as a segment is, into warm
    memory: what any reader of a log's file pays at least."""
    from kdirect.huge_pages import allocate_huge
    from kdirect.rdma.contract import Memory

    rates = []
    target = bytearray(1 << 20)
    with tempfile.TemporaryFile(dir=tmpfs()) as file:
        allocate_huge(file.fileno(), total)
        for _ in range(total >> 20):
            file.write(bytes(1 << 20))
        file.flush()
        for _ in range(3):
            begin = time.perf_counter()
            memory = Memory.map(file.fileno(), total, False)
            with memoryview(memory) as view:
                for at in range(0, total, 1 << 20):
                    target[:] = view[at : at + (1 << 20)]
            memory.close()
            rates.append(total / (time.perf_counter() - begin))
    return statistics.median(rates)


def empty_fetch(seconds: float, quick: bool) -> Figures:
    """Asking an idle topic for news: kdirect's slot READ (from Python, and in its own loop) and a
    whole poll(0); Kafka's empty Fetch."""
    out = []
    rounds = 1 if quick else 3
    turn_s = 0.1 if quick else seconds / (rounds * 4)
    with pair() as both, both.topic("idle") as topic:
        fill_one_by_one(both, topic, 100, 10)
        opened = consumer(both, topic, 10)
        opened.poll(0.01)
        slots = next(
            iter(opened._reading.paths.direct)
        )._slots  # the READ itself has no public name
        fetches = Fetches(both.kafka.address, topic)

        def refreshes(n: int) -> None:
            refresh = slots.refresh
            for _ in range(n):
                refresh()

        def polls(n: int) -> None:
            poll = opened.poll
            for _ in range(n):
                poll(0)

        def empty(n: int) -> None:
            for _ in range(n):
                fetches(10, 1 << 20)

        calls: dict[str, Callable[[int], Any]] = {
            "kdirect": refreshes,
            "loop": slots.poll,
            "poll": polls,
            "kafka": empty,
        }
        cpu: dict[str, float] = dict.fromkeys(calls, 0.0)
        count: dict[str, int] = dict.fromkeys(calls, 0)

        def run(key: str) -> float:
            system = both.kafka if key == "kafka" else both.kdirect
            step = 100 if key == "kafka" else 20_000
            before = system.cpu_s()
            n = 0
            begin = time.perf_counter()
            while (spent := time.perf_counter() - begin) < turn_s or not n:
                calls[key](step)
                n += step
            cpu[key] += system.cpu_s() - before
            count[key] += n
            return n / spent if spent else float(n)

        for key in calls:
            run(key)
        cpu, count = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0)
        rates = turns(rounds, {key: lambda key=key: run(key) for key in calls})
        per_fetch = cpu["kafka"] / count["kafka"] * 1e6
        for key, row, how in (
            ("kdirect", "empty-fetch", "one Python call a slot READ"),
            ("loop", "empty-fetch.loop", "slot READs in a loop, without returning to Python"),
            ("poll", "empty-fetch.poll", "Consumer.poll(0)"),
        ):
            found = rate_figure(
                row, "1/s", "consumeRate", {"kdirect": rates[key], "kafka": rates["kafka"]}, both,
                bar=1000.0 if key == "kdirect" else None,
                how=how, kdirect_broker_cpu_s=round(cpu[key], 2),
                kafka_broker_cpu_us_per_fetch=round(per_fetch, 1),
                kafka_fetches_per_core_of_broker=round(1e6 / max(per_fetch, 1e-3)),
            )  # fmt: skip
            if key == "kdirect":
                found["settings"] |= {
                    "cpu_bar": "zero CPU of the broker",
                    "cpu_bar_met": cpu[key] == 0,
                }
            out.append(found)
        fetches.close()
        opened.close()
    return out


def backlog(seconds: float, quick: bool) -> Figures:
    """What waits grows: seconds for a GB must not.  Then the same bytes over more partitions."""
    out = []
    size = 4096
    rounds = 1 if quick else 3
    with pair() as both:
        for total in (4 << 20,) if quick else (128 << 20, 256 << 20, 512 << 20, 1 << 30):
            out.append(_seconds_per_gb("backlog", both, total, 1, size, rounds))
        for partitions in (2,) if quick else (1, 4, 16, 64):
            out.append(
                _seconds_per_gb(
                    "backlog.partitions",
                    both,
                    4 << 20 if quick else 256 << 20,
                    partitions,
                    size,
                    rounds,
                )
            )
    return out


def _seconds_per_gb(
    row: str, both: Pair, total: int, partitions: int, size: int, rounds: int
) -> dict[str, Any]:
    records = total // size // partitions * partitions
    gigabytes = records * size / 1e9
    with both.topic("backlog", partitions) as topic:
        fill_in_bulk(both, topic, size, records, partitions)
        runs = {
            "kdirect": lambda: drain(both, topic, records, partitions) / gigabytes,
            "kafka": lambda: 1e9 / tools().consume(both.kafka.address, topic, records),
        }
        for run in runs.values():
            run()
        times = turns(rounds, runs)
    value, against = (statistics.median(times[s.key]) for s in both.both)
    results = {
        key: {"consumeRate": 1e9 / size / statistics.median(t), "runs": [round(x, 4) for x in t]}
        for key, t in times.items()
    }
    return figure(row, "s/GB", value, against, both, results, lower_is_better=True,
                  record_bytes=size, backlog_bytes=records * size,
                  partitions=partitions)  # fmt: skip
