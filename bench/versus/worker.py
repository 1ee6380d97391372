"""A client in a process of its own: `python -m versus.worker '{"role": ..., "system": ...}'`.

Says `ready`, starts when a line comes on its standard input, prints its result as one line of JSON.
Roles:

- `flood`: unbatched, pipelined records into one partition, for `seconds`; the rate that was
  acknowledged.
- `paced`: records at `rate` a second into `topics`, each with the moment at which it was due
  (nanoseconds of the monotonic clock, and of the epoch in traffic-sensor JSON); every `burst_s`
  seconds `burst` more at once. Says how far behind its own schedule it was.

The same code for both systems; only `open_producer` differs.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STAMP = struct.Struct("<q")
UNBATCHED = {
    "batch.num.messages": 1,
    "linger.ms": 0,
    "acks": 1,
    "max.in.flight": 5,
    "queue.buffering.max.messages": 1000,
}
LOW_LATENCY = {"linger.ms": 0, "acks": 1, "socket.nagle.disable": True}


class Worker:
    """The parent's end."""

    def __init__(self, **call: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "versus.worker", json.dumps(call)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"a worker did not start: {call}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        status = self.process.wait(60)
        if status or not line:
            raise RuntimeError(f"a worker ended with status {status}")
        return dict(json.loads(line))


def open_producer(
    system: str, address: str, kafka: dict[str, Any]
) -> tuple[Callable[..., None], Callable[[], Any], Callable[[], Any]]:
    """`send(topic, value, partition)`, `tend()` to be called now and then, `finish()`."""
    if system == "kdirect":
        import kdirect

        ours = kdirect.Producer({"bootstrap.servers": address, "transport": "shm"})
        produce = ours.produce
        return (
            lambda topic, value, partition: produce(topic, value, None, partition=partition),
            lambda: None,
            lambda: (ours.flush(60), ours.close()),
        )
    from confluent_kafka import Producer

    theirs = Producer({"bootstrap.servers": address, **kafka})

    def send(topic: str, value: bytes, partition: int) -> None:
        while True:
            try:
                theirs.produce(topic, value, partition=partition)
                return
            except BufferError:
                theirs.poll(0.01)

    return send, lambda: theirs.poll(0), lambda: theirs.flush(60)


def flood(
    system: str, address: str, topic: str, partition: int, size: int, seconds: float
) -> dict[str, Any]:
    send, tend, finish = open_producer(system, address, UNBATCHED)
    value = os.urandom(size)
    send(topic, value, partition)
    _wait_for_go()
    records = 0
    began = time.perf_counter()
    end = began + seconds
    while time.perf_counter() < end:
        for _ in range(50):
            send(topic, value, partition)
        records += 50
        tend()
    finish()
    return {"records": records, "seconds": time.perf_counter() - began}


def paced(
    system: str,
    address: str,
    topics: list[str],
    rate: float,
    seconds: float,
    size: int = 0,
    burst: int = 0,
    burst_s: float = 10,
) -> dict[str, Any]:
    send, tend, finish = open_producer(system, address, LOW_LATENCY)
    for topic in topics:
        send(topic, _record(0, size, 0), 0)
    tend()
    _wait_for_go()
    # Due moments: a fixed rate, and bursts on top of it; the latter half-way between two seconds.
    due = [i / rate for i in range(int(seconds * rate))]
    at = burst_s / 2
    while burst and at < seconds:
        due += [at] * burst
        at += burst_s
    due.sort()
    began = time.monotonic_ns() + 10_000_000
    epoch = time.time_ns() - time.monotonic_ns()
    late = 0
    for number, offset in enumerate(due):
        moment = began + int(offset * 1e9)
        while (left := moment - time.monotonic_ns()) > 0:
            time.sleep(max(0.0, left / 1e9 - 60e-6))
        late = max(late, time.monotonic_ns() - moment)
        send(topics[number % len(topics)], _record(moment, size, epoch), 0)
        tend()
    finish()
    return {"records": len(due), "latest_us": late / 1e3}


def _record(moment: int, size: int, epoch: int) -> bytes:
    """`size` bytes that begin with the stamp, or, without a size, an observation of a traffic
    sensor."""
    if size:
        return STAMP.pack(moment) + b"x" * (size - STAMP.size)
    return (
        b'{"id":"GEO01_HWAY_%d","lat":52.0433,"long":5.1124,"lane":"lane%d","due_us":%d,'
        b'"accuracy":50.0,"num_lanes":3,"flow":%d,"speed":%d.5}'
    ) % (moment % 30, moment % 4, (moment + epoch) // 1000, moment % 1200, 60 + moment % 60)


def _wait_for_go() -> None:
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit(1)


if __name__ == "__main__":
    call = json.loads(sys.argv[1])
    print(json.dumps({"flood": flood, "paced": paced}[call.pop("role")](**call)), flush=True)
