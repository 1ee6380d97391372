"""Producing over Kafka's protocol: what a request costs either broker.

Both get the same frames from the same client (`raw_tcp`): one record of 100 bytes a request with
acks=1, many of them sent together.  What is compared is requests in a second of the broker's
processor time, all its threads counted; wall time says less, because two cores are shared by client
and broker.
"""

from __future__ import annotations

from typing import Any

from raw_tcp import PRODUCE_VERSION, RawClient, check_produced, cpu_seconds, one_record
from versus.measure import rate_figure, turns, warm
from versus.systems import System, pair

BAR = 10.0
RECORD_BYTES = 100
DEPTH = 50


def tcp_produce(seconds: float, quick: bool) -> list[dict[str, Any]]:
    """Produce requests of one record, many together, by the broker's processor time."""
    rounds = 1 if quick else 5
    count = 500 if quick else 20_000
    with pair() as both, both.topic("tcp-produce") as topic:
        frames = {}
        clients = {}
        for system in both.both:
            client = clients[system.key] = RawClient(system.address)
            request = one_record(topic, RECORD_BYTES)
            check_produced(client.call(request, PRODUCE_VERSION))
            frames[system.key] = client.frame(request, PRODUCE_VERSION)

        def run(system: System) -> float:
            before = cpu_seconds(system.process.pid)
            clients[system.key].exchange(frames[system.key], count, DEPTH)
            return count / (cpu_seconds(system.process.pid) - before)

        runs = {s.key: lambda s=s: run(s) for s in both.both}
        warm(1 if quick else 5, runs)  # the JVM compiles meanwhile
        rates = turns(rounds, runs)
        for client in clients.values():
            client.close()
        return [
            rate_figure(
                "tcp-produce",
                "requests a core-second",
                "publishRate",
                rates,
                both,
                bar=BAR,
                size=RECORD_BYTES,
                depth=DEPTH,
            )
        ]
