"""From producer to consumer: latency at a steady rate, and many consumers of one topic (KafkaDirect, figure 19, and section 5.3's empty
fetches).

The producer is a process of its own that keeps to a schedule, and latency counts from the moment at which a record was due.  Kafka's
consumers are librdkafka's, which wait at the broker for the next record.
"""

from __future__ import annotations

import time
from typing import Any

from versus.measure import figure, latencies, latency_figure, turns
from versus.systems import System, pair
from versus.worker import STAMP, Worker

Figures = list[dict[str, Any]]
WARM_S = 0.3  # of each turn, not counted


def open_consumer(system: System, topic: str, name: str) -> Any:
    """A consumer that stands at the topic's end; `poll(seconds)` gives messages with `value()`."""
    if system.key == "kdirect":
        import kdirect

        ours = kdirect.Consumer({"bootstrap.servers": system.address, "transport": "shm"})
        ours.assign({kdirect.TopicPartition(topic, 0): 0})
        return ours
    from confluent_kafka import Consumer, TopicPartition

    theirs = Consumer(
        {"bootstrap.servers": system.address, "group.id": name, "enable.auto.commit": False, "fetch.wait.max.ms": 500, "fetch.min.bytes": 1,
         "socket.nagle.disable": True, "fetch.error.backoff.ms": 1}
    )  # fmt: skip
    theirs.assign([TopicPartition(topic, 0, 0)])
    return theirs


def end_to_end(seconds: float, quick: bool) -> Figures:
    """Records every 2 ms from one process to another."""
    out = []
    sizes = (100,) if quick else (100, 4096)
    rounds = 1 if quick else 3
    turn_s = 0.5 if quick else max(1.0, seconds / (len(sizes) * rounds * 2) - 1)
    with pair() as both:
        for size in sizes:

            def run(system: System, size: int = size) -> list[int]:
                topic = f"paced-{time.monotonic_ns()}"
                system.create(topic)
                worker = Worker(
                    role="paced", system=system.key, address=system.address, topics=[topic], rate=500.0, seconds=turn_s + WARM_S, size=size
                )
                opened = open_consumer(system, topic, topic)
                _there(opened.poll(10))
                worker.go()
                samples = []
                for _ in range(int((turn_s + WARM_S) * 500)):
                    message = opened.poll(10)
                    now = time.monotonic_ns()
                    _there(message)
                    samples.append(now - STAMP.unpack_from(message.value())[0])
                worker.result()
                opened.close()
                system.delete(topic)
                return samples[int(WARM_S * 500) :]

            samples = turns(rounds, {s.key: lambda s=s: run(s) for s in both.both})
            out.append(
                latency_figure(
                    "end-to-end",
                    "endToEnd",
                    samples,
                    both,
                    bar=10.0,
                    record_bytes=size,
                    rate_per_s=500,
                    how="from the moment a record was due to poll()'s return in another process",
                )
            )
    return out


def consumer_scaling(seconds: float, quick: bool) -> Figures:
    """1 to 64 consumers of a topic with 500 records a second, all in one process, polled in turn: what the broker pays for them."""
    out = []
    rate = 500.0
    counts = (1, 4) if quick else (1, 4, 16, 64)
    rounds = 1 if quick else 2
    turn_s = 0.5 if quick else max(1.0, seconds / (len(counts) * rounds * 2) - 1)
    with pair() as both:
        for count in counts:
            cpu: dict[str, list[float]] = {s.key: [] for s in both.both}
            received: dict[str, list[float]] = {s.key: [] for s in both.both}

            def run(
                system: System,
                count: int = count,
                cpu: dict[str, list[float]] = cpu,
                received: dict[str, list[float]] = received,
            ) -> list[int]:
                topic = f"many-{time.monotonic_ns()}"
                system.create(topic)
                worker = Worker(
                    role="paced", system=system.key, address=system.address, topics=[topic], rate=rate, seconds=turn_s, size=100
                )
                consumers = [open_consumer(system, topic, f"{topic}-{i}") for i in range(count)]
                for opened in consumers:
                    _there(opened.poll(10))
                before = system.cpu_s()
                worker.go()
                began = time.monotonic()
                expected = int(turn_s * rate) * count
                samples: list[int] = []
                while len(samples) < expected:
                    found = False
                    for opened in consumers:
                        while (message := opened.poll(0)) is not None:
                            samples.append(time.monotonic_ns() - STAMP.unpack_from(message.value())[0])
                            found = True
                    if not found:
                        time.sleep(0.0002)
                    if time.monotonic() - began > turn_s + 20:
                        raise RuntimeError(f"{expected - len(samples)} of {expected} records did not arrive")
                spent = time.monotonic() - began
                cpu[system.key].append((system.cpu_s() - before) / spent)
                received[system.key].append(len(samples) / spent)
                worker.result()
                for opened in consumers:
                    opened.close()
                system.delete(topic)
                return samples

            samples = turns(rounds, {s.key: lambda s=s: run(s) for s in both.both})
            value, against = (sum(cpu[s.key]) / rounds for s in both.both)
            results = {
                s.key: {**latencies("endToEnd", samples[s.key]), "consumeRate": sum(received[s.key]) / rounds,
                        "broker_cpu_cores": [round(c, 4) for c in cpu[s.key]]}
                for s in both.both
            }  # fmt: skip
            out.append(
                figure(
                    "consumer-scaling",
                    "cores",
                    value,
                    against,
                    both,
                    results,
                    lower_is_better=True,
                    consumers=count,
                    rate_per_s=rate,
                    **{f"{s.key}_p50_us": round(results[s.key]["endToEndLatency50pct"] * 1e3) for s in both.both},
                    how="CPU of the broker, the producer's records included; latency as seen by one process that polls all consumers",
                )
            )
    return out


def _there(message: Any) -> None:
    if message is None or (getattr(message, "error", None) is not None and message.error() is not None):
        raise RuntimeError("a record did not arrive")
