"""From producer to consumer: latency at a steady rate, and many consumers of one topic
(KafkaDirect, figure 19, and section 5.3's empty fetches).

The producer is a process of its own that keeps to a schedule, and latency counts from the moment at
which a record was due.  Kafka's consumers are librdkafka's, which wait at the broker for the next
record.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from versus.measure import figure, latencies, latency_figure, turns
from versus.systems import Kdirect, System, directory, pair
from versus.worker import STAMP, Worker

Figures = list[dict[str, Any]]
WARM_S = 0.3  # of each turn, not counted
CONSUMER_SPINS, BROKER_SPINS = {"poll.spin.us": "5000"}, {"rdma.spin.us": "3000"}


def open_consumer(system: System, topic: str, name: str, **more: Any) -> Any:
    """A consumer that stands at the topic's end; `poll(seconds)` gives messages with `value()`.
    `more`: settings of kdirect's."""
    if system.key == "kdirect":
        import kdirect

        ours = kdirect.Consumer({"bootstrap.servers": system.address, "transport": "shm", **more})
        ours.assign({kdirect.TopicPartition(topic, 0): 0})
        return ours
    from confluent_kafka import Consumer, TopicPartition

    theirs = Consumer(
        {"bootstrap.servers": system.address, "group.id": name, "enable.auto.commit": False,
         "fetch.wait.max.ms": 500, "fetch.min.bytes": 1,
         "socket.nagle.disable": True, "fetch.error.backoff.ms": 1}
    )  # fmt: skip
    theirs.assign([TopicPartition(topic, 0, 0)])
    return theirs


def end_to_end(seconds: float, quick: bool) -> Figures:
    """Records every 2 ms from one process to another: both sides set for latency, and kdirect with
    its defaults."""
    out = []
    sizes = (100,) if quick else (100, 4096)
    rounds = 1 if quick else 3
    turn_s = 0.5 if quick else max(1.0, seconds / (len(sizes) * rounds * 2) - 1)
    with pair() as both, ExitStack() as stack:
        spinning = Kdirect(tempfile.mkdtemp(prefix="spinning-", dir=directory()), **BROKER_SPINS)
        stack.callback(spinning.stop)
        for size in sizes:
            cpu: dict[str, list[float]] = {}

            def run(
                name: str,
                system: System,
                size: int = size,
                cpu: dict[str, list[float]] = cpu,
                **more: Any,
            ) -> list[int]:
                topic = f"paced-{time.monotonic_ns()}"
                system.create(topic)
                worker = Worker(
                    role="paced",
                    system=system.key,
                    address=system.address,
                    topics=[topic],
                    rate=500.0,
                    seconds=turn_s + WARM_S,
                    size=size,
                )
                opened = open_consumer(system, topic, topic, **more)
                _there(opened.poll(10))
                worker.go()
                samples = []
                began, broker, own = time.monotonic(), system.cpu_s(), time.process_time()
                for _ in range(int((turn_s + WARM_S) * 500)):
                    message = opened.poll(10)
                    now = time.monotonic_ns()
                    _there(message)
                    samples.append(now - STAMP.unpack_from(message.value())[0])
                spent = time.monotonic() - began
                cpu.setdefault(f"{name}_broker_cpu_cores", []).append(
                    (system.cpu_s() - broker) / spent
                )
                cpu.setdefault(f"{name}_consumer_cpu_cores", []).append(
                    (time.process_time() - own) / spent
                )
                worker.result()
                opened.close()
                system.delete(topic)
                return samples[int(WARM_S * 500) :]

            samples = turns(
                rounds,
                {
                    "kdirect": lambda: run("kdirect", spinning, **CONSUMER_SPINS),
                    "kafka": lambda: run("kafka", both.kafka),
                    "defaults": lambda: run("defaults", both.kdirect),
                },
            )
            used = {name: round(statistics.median(cores), 3) for name, cores in cpu.items()}
            how = "from the moment a record was due to poll()'s return in another process; "
            out.append(
                latency_figure(
                    "end-to-end",
                    "endToEnd",
                    samples,
                    both,
                    bar=10.0,
                    record_bytes=size,
                    rate_per_s=500,
                    how=how + "kdirect spins longer than records are apart, at the consumer"
                    " and at the broker, which takes their cores",
                    settings_of_kdirect={**CONSUMER_SPINS, **BROKER_SPINS},
                    **{
                        name: cores
                        for name, cores in used.items()
                        if not name.startswith("defaults")
                    },
                )
            )
            samples["kdirect"] = samples.pop("defaults")
            used |= {
                name.replace("defaults", "kdirect"): cores
                for name, cores in used.items()
                if name.startswith("defaults")
            }
            out.append(
                latency_figure(
                    "end-to-end.defaults",
                    "endToEnd",
                    samples,
                    both,
                    record_bytes=size,
                    rate_per_s=500,
                    how=how + "kdirect with its defaults, which spin for a moment and then sleep",
                    **{
                        name: cores
                        for name, cores in used.items()
                        if not name.startswith("defaults")
                    },
                )
            )
    return out


def consumer_scaling(seconds: float, quick: bool) -> Figures:
    """1 to 64 consumers of a topic with 500 records a second, all in one process, polled in turn:
    what the broker pays for them."""
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
                    role="paced",
                    system=system.key,
                    address=system.address,
                    topics=[topic],
                    rate=rate,
                    seconds=turn_s,
                    size=100,
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
                            samples.append(
                                time.monotonic_ns() - STAMP.unpack_from(message.value())[0]
                            )
                            found = True
                    if not found:
                        time.sleep(0.0002)
                    if time.monotonic() - began > turn_s + 20:
                        raise RuntimeError(
                            f"{expected - len(samples)} of {expected} records did not arrive"
                        )
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
                s.key: {**latencies("endToEnd", samples[s.key]),
                        "consumeRate": sum(received[s.key]) / rounds,
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
                    **{
                        f"{s.key}_p50_us": round(results[s.key]["endToEndLatency50pct"] * 1e3)
                        for s in both.both
                    },
                    how="CPU of the broker, the producer's records included;"
                    " latency as seen by one process that polls all consumers",
                )
            )
    return out


def _there(message: Any) -> None:
    if message is None or (
        getattr(message, "error", None) is not None and message.error() is not None
    ):
        raise RuntimeError("a record did not arrive")
