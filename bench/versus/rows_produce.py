"""Producing: latency one at a time, bandwidth into one partition, partitions 1 to 8 (KafkaDirect,
figures 10 to 13).

kdirect: `Producer.produce_sync` and `produce` over shm.  Kafka: librdkafka one at a time,
ProducerPerformance for bandwidth, librdkafka in a process for each partition for the scaling.
acks=1 everywhere at Kafka; with one broker that is all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from rows_direct import _memcpy_rate, _new_file_rate, eventfd_round_trip_us
from versus.measure import figure, latency_figure, rate_figure, turns, warm
from versus.perf_tools import BATCHED, UNBATCHED, tools
from versus.systems import Pair, System, pair
from versus.worker import LOW_LATENCY, Worker

Figures = list[dict[str, Any]]
LATENCY_BARS = {32: 30.0, 512: 30.0, 4096: 30.0, 32768: None}
BANDWIDTH_BARS = {100: None, 512: 60.0, 4096: None, 32768: 15.0}


def one_at_a_time(system: System, topic: str) -> tuple[Callable[[bytes], Any], Callable[[], Any]]:
    """A call that sends a record and returns when it is acknowledged, and one that closes."""
    if system.key == "kdirect":
        import kdirect

        ours = kdirect.Producer({"bootstrap.servers": system.address, "transport": "shm"})
        return lambda value: ours.produce_sync(topic, value, None, partition=0), ours.close
    from confluent_kafka import Producer

    theirs = Producer({"bootstrap.servers": system.address, **LOW_LATENCY})
    done: list[Any] = []

    def send(value: bytes) -> None:
        done.clear()
        theirs.produce(topic, value, partition=0, on_delivery=lambda error, _: done.append(error))
        while not done:
            theirs.poll(1)
        if done[0] is not None:
            raise RuntimeError(str(done[0]))

    return send, lambda: theirs.flush(10)


def produce_latency(seconds: float, quick: bool) -> Figures:
    """One record at a time, acknowledged; and the first after 10 ms of silence."""
    out = []
    sizes = {512: 30.0} if quick else LATENCY_BARS
    rounds = 1 if quick else 3
    # Twice as long a turn with traffic as with silence, at two of the sizes.
    turn_s = 0.05 if quick else seconds / (2 * rounds * (len(sizes) + 1.5))
    bare = eventfd_round_trip_us(0.1 if quick else 1)
    with pair() as both:
        for size, bar in sizes.items():
            with both.topic("latency") as topic:
                value = b"v" * size
                opened = {s.key: one_at_a_time(s, topic) for s in both.both}
                sends = {key: send for key, (send, _) in opened.items()}
                warm(
                    1,
                    {
                        key: lambda send=send: _closed_loop(send, value, turn_s / 2)
                        for key, send in sends.items()
                    },
                )
                samples = turns(
                    rounds,
                    {
                        key: lambda send=send: _closed_loop(send, value, turn_s)
                        for key, send in sends.items()
                    },
                )
                out.append(
                    latency_figure(
                        "produce-latency",
                        "publish",
                        samples,
                        both,
                        bar=bar,
                        record_bytes=size,
                        batching="none",
                        acks=1,
                    )
                )
                if size in (512, 4096):
                    samples = turns(
                        rounds,
                        {
                            key: lambda send=send: _closed_loop(
                                send, value, turn_s / 2, pause_s=0.01
                            )
                            for key, send in sends.items()
                        },
                    )
                    out.append(
                        latency_figure(
                            "produce-latency.after-silence",
                            "publish",
                            samples,
                            both,
                            record_bytes=size,
                            silence_ms=10,
                            eventfd_round_trip_us=round(bare, 1),
                        )
                    )
                for _, close in opened.values():
                    close()
    return out


def _closed_loop(
    send: Callable[[bytes], Any], value: bytes, seconds: float, pause_s: float = 0
) -> list[int]:
    samples = []
    clock = time.perf_counter_ns
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not samples:
        if pause_s:
            time.sleep(pause_s)
        begin = clock()
        send(value)
        samples.append(clock() - begin)
    return samples


def produce_bandwidth(seconds: float, quick: bool) -> Figures:
    """Unbatched and pipelined into one partition; then with batching, a call a record and (kdirect)
    columns."""
    import kdirect

    out = []
    sizes = {512: 60.0} if quick else BANDWIDTH_BARS
    rounds = 1 if quick else 3
    turn_s = 0.1 if quick else seconds / (rounds * len(sizes) * 5)
    with (
        pair() as both,
        kdirect.connect(
            {"bootstrap.servers": both.kdirect.address, "transport": "shm"}
        ).producer() as plain,
    ):
        lingering = kdirect.Producer(
            {"bootstrap.servers": both.kdirect.address, "transport": "shm", "linger.ms": 5}
        )
        for size, bar in sizes.items():
            value = b"v" * size
            limits = {
                "memcpy_bytes_per_s": _memcpy_rate(size, turn_s / 4),
                "memcpy_into_new_files_bytes_per_s": _new_file_rate(size, turn_s / 4),
            }
            for name, producer, properties in (
                ("none", plain, UNBATCHED),
                ("linger 5 ms, 1 MiB", lingering, BATCHED),
            ):
                with both.topic("bandwidth") as topic:
                    runs = {
                        "kdirect": _ours(both, producer, topic, value),
                        "kafka": lambda n, topic=topic, properties=properties: _theirs(
                            both, topic, n, size, properties
                        ),
                    }
                    rates = _timed(rounds, runs, turn_s, size)
                    rates = {key: [r * size for r in values] for key, values in rates.items()}
                    cpu = _cpu_us(
                        both, topic, runs, turn_s, statistics.median(rates["kdirect"]) / size
                    )
                    row = "produce-bandwidth" if name == "none" else "produce-bandwidth.batched"
                    out.append(
                        rate_figure(
                            row,
                            "B/s",
                            "publishRate",
                            rates,
                            both,
                            bar=bar if name == "none" else None,
                            per_record=size,
                            record_bytes=size,
                            batching=name,
                            partitions=1,
                            limits=limits,
                            **cpu,
                        )
                    )
            with both.topic("columns") as topic:
                runs = {
                    "kdirect": _ours_columns(both, plain, topic, value),
                    "kafka": lambda n, topic=topic: _theirs(both, topic, n, size, BATCHED),
                }
                rates = {
                    key: [r * size for r in values]
                    for key, values in _timed(rounds, runs, turn_s, size).items()
                }
                out.append(
                    rate_figure(
                        "produce-bandwidth.columns",
                        "B/s",
                        "publishRate",
                        rates,
                        both,
                        per_record=size,
                        record_bytes=size,
                        batching="send_arrow beside linger 5 ms, 1 MiB",
                        limits=limits,
                    )
                )
        lingering.close()
    return out


def _ours(both: Pair, producer: Any, topic: str, value: bytes) -> Callable[[int], float]:
    def run(records: int) -> float:
        produce = producer.produce
        done = 0
        spent = 0.0
        while done < records:  # in pieces, so that tmpfs keeps room: deleting is not counted
            piece = min(records - done, max(1000, (256 << 20) // (len(value) + 80)))
            begin = time.perf_counter()
            for _ in range(piece):
                produce(topic, value, None, partition=0)
            producer.flush()
            spent += time.perf_counter() - begin
            done += piece
            both.kdirect.truncate(topic)
        return records / spent

    return run


def _theirs(both: Pair, topic: str, records: int, size: int, properties: Any) -> float:
    rate = tools().produce(both.kafka.address, topic, records, size, properties)
    both.kafka.truncate(topic)
    return rate


def _timed(
    rounds: int, runs: dict[str, Callable[[int], float]], turn_s: float, size: int
) -> dict[str, list[float]]:
    """Records a second by turns of about `turn_s` each, after a warm-up that also tells how many
    records that is."""
    counts = {}
    for key, run in runs.items():
        rate = run(500)
        rate = run(max(500, int(min(rate * turn_s, (512 << 20) / size))))
        counts[key] = max(500, int(min(rate * turn_s, (1 << 30) / size)))
    return turns(
        rounds,
        {key: lambda key=key, run=run: run(counts[key]) for key, run in runs.items()},
        memory=max(counts.values()) * (size + 80) * 5 // 4,
    )


def _cpu_us(
    both: Pair, topic: str, runs: dict[str, Callable[[int], float]], turn_s: float, rate: float
) -> dict[str, float]:
    """CPU of kdirect's broker for a record, from one more turn (Kafka's is in produce-scaling)."""
    count = max(500, int(rate * turn_s))
    before = both.kdirect.cpu_s()
    runs["kdirect"](count)
    return {
        "kdirect_broker_cpu_us_per_record": round((both.kdirect.cpu_s() - before) / count * 1e6, 3)
    }


def _ours_columns(both: Pair, producer: Any, topic: str, value: bytes) -> Callable[[int], float]:
    import pyarrow as pa

    columns = pa.record_batch(
        {"value": pa.array([value] * max(1, (8 << 20) // len(value)), pa.binary())}
    )

    def run(records: int) -> float:
        done = 0
        spent = 0.0
        while done < records:
            begin = time.perf_counter()
            for _ in range(8):
                producer.send_arrow(columns, topic)
            producer.flush()
            spent += time.perf_counter() - begin
            done += 8 * columns.num_rows
            both.kdirect.truncate(topic)
        return done / spent

    return run


def produce_scaling(seconds: float, quick: bool) -> Figures:
    """Unbatched 4 KiB records into 1 to 8 partitions, a producer process for each; what a record
    costs the broker."""
    out = []
    size = 4096
    partitions = (1, 2) if quick else (1, 2, 4, 8)
    rounds = 1 if quick else 3
    turn_s = 0.2 if quick else max(0.5, seconds / (len(partitions) * rounds * 2) - 1.2)
    with pair() as both:
        for count in partitions:
            costs: dict[str, list[float]] = {s.key: [] for s in both.both}

            def run(
                system: System, count: int = count, costs: dict[str, list[float]] = costs
            ) -> float:
                topic = f"scaling-{count}-{time.monotonic_ns()}"
                system.create(topic, count)
                workers = [
                    Worker(
                        role="flood",
                        system=system.key,
                        address=system.address,
                        topic=topic,
                        partition=p,
                        size=size,
                        seconds=turn_s,
                    )
                    for p in range(count)
                ]
                before = system.cpu_s()
                for worker in workers:
                    worker.go()
                results = [worker.result() for worker in workers]
                records = sum(r["records"] for r in results)
                costs[system.key].append((system.cpu_s() - before) / records * 1e6)
                system.delete(topic)
                return size * sum(r["records"] / r["seconds"] for r in results)

            rates = turns(rounds, {s.key: lambda s=s: run(s) for s in both.both})
            cost = {
                f"{key}_broker_cpu_us_per_record": round(statistics.median(c), 2)
                for key, c in costs.items()
            }
            out.append(
                rate_figure(
                    "produce-scaling",
                    "B/s",
                    "publishRate",
                    rates,
                    both,
                    per_record=size,
                    record_bytes=size,
                    partitions=count,
                    producers=count,
                    **cost,
                )
            )
            if count == partitions[-1]:
                limit = {key: 1e6 / max(statistics.median(c), 0.01) for key, c in costs.items()}
                results = {key: {"publishRate": value} for key, value in limit.items()}
                out.append(
                    figure(
                        "produce-scaling.one-core-of-broker",
                        "records/s",
                        limit["kdirect"],
                        limit["kafka"],
                        both,
                        results,
                        record_bytes=size,
                        partitions=count,
                        how="one second over the broker's CPU time of a record",
                    )
                )
    return out
