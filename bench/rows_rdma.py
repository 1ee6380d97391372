"""Bench row of the RDMA room: what the shm provider adds to the machine's own copies, atomics and
wake-ups.

The target is a process of its own, and stopped while it is read: READ and atomics need nothing of
it.  Every figure alternates with its limit in short rounds, over the same memory and in the same
state of the caches, and is a median of the rounds.  Round trips need both cores, so that part lifts
the pin.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

from sides import Figure, Peer, figure, serve, spread

SOURCE_BYTES = 32 << 20  # a piece of a segment
DESTINATION_BYTES = 4 << 20  # fetch.buffer.bytes
SIZES = (2048, 16 << 10, 64 << 10, 1 << 20)
ROUND_S = 0.0005  # shorter than a time slice, so that on a busy machine most rounds are undisturbed


class Served:
    """What the target process does on demand."""

    def open(self, peer: str) -> tuple[str, int, int, int]:
        from kdirect.rdma import open_device
        from kdirect.rdma.contract import Memory

        device = open_device("shm")
        domain = device.alloc_pd()
        self.cq = device.create_cq()
        self.memory = Memory.anonymous(SOURCE_BYTES)
        memoryview(self.memory)[:] = os.urandom(1 << 20) * (SOURCE_BYTES >> 20)
        self.region = domain.register(self.memory, 15)
        self.qp = domain.create_qp(self.cq, self.cq)
        for i in range(16):
            self.qp.post_recv(i)
        self.qp.connect(bytes.fromhex(peer), False)
        return self.qp.address.hex(), self.region.address, self.region.rkey, self.memory.fd

    def spread(self) -> None:
        spread(0)

    def bounce(self, how: str, remote: int, rkey: int, count: int) -> int:
        return bounce(self.qp, self.cq, self.region, how, remote, rkey, count, False)


def bounce(
    qp: Any, cq: Any, region: Any, how: str, remote: int, rkey: int, count: int, first: bool
) -> int:
    from kdirect.rdma import shm_probe

    if how == "spinning":
        return shm_probe.bounce(qp, cq, region, remote, rkey, 8, count, first, 60_000)
    return shm_probe.bounce_asleep(qp, cq, region, remote, rkey, count, first)


def alternate(
    a: Callable[[int, int], int], b: Callable[[int, int], int], seconds: float
) -> tuple[float, float, int]:
    """Medians of ns an operation of `a` and `b`, in turn, and the number of rounds.  Both are
    called with a number of operations and the number of the first: each goes on where the other
    stopped, so that neither finds the other's bytes in the cache."""
    count = 4
    while min(a(count, 0), b(count, 0)) < ROUND_S * 1e9 and count < 1 << 22:
        count *= 2
    end = time.perf_counter() + seconds
    first: list[float] = []
    second: list[float] = []
    while time.perf_counter() < end or len(first) < 5:
        begin = 2 * len(first) * count
        turn = [(a, first, begin), (b, second, begin + count)]
        for call, times, at in turn if len(first) % 2 else reversed(turn):
            os.sched_yield()  # both begin on a fresh time slice
            times.append(call(count, at) / count)
    return statistics.median(first), statistics.median(second), len(first)


def shm_read(seconds: float, quick: bool) -> list[Figure]:
    """READs by size against memcpy; a fetch-and-add against a bare one; round trips against a bare
    eventfd's."""
    from kdirect.rdma import open_device, shm_probe
    from kdirect.rdma.contract import Memory

    if quick:
        seconds = 1.0
    bare = EventfdEcho()  # forks: before the device opens
    target = Peer(__file__)
    try:
        device = open_device("shm")
        domain = device.alloc_pd()
        cq = device.create_cq()
        memory = Memory.anonymous(DESTINATION_BYTES)
        memoryview(memory)[:] = bytes(DESTINATION_BYTES)
        region = domain.register(memory, 15)
        qp = domain.create_qp(cq, cq)
        for i in range(16):
            qp.post_recv(i)
        peer, remote, rkey, fd = target.call("open", qp.address.hex())
        qp.connect(bytes.fromhex(peer), True)
        with open(f"/proc/{target.process.pid}/fd/{fd}", "rb") as f:
            same = Memory.map(f.fileno(), SOURCE_BYTES, False)  # memcpy reads the same pages
        rows: list[Figure] = []
        target.process.send_signal(signal.SIGSTOP)
        share = seconds / (len(SIZES) + 3)
        for size in SIZES:
            read_ns, copy_ns, rounds = alternate(
                lambda n, i, size=size: shm_probe.read_loop(
                    qp, cq, region, remote, rkey, size, DESTINATION_BYTES, SOURCE_BYTES, n, i
                ),
                lambda n, i, size=size: shm_probe.memcpy_loop(
                    region.address, same.address, size, DESTINATION_BYTES, SOURCE_BYTES, n, i
                ),
                share,
            )
            rows.append(
                figure(
                    "shm-read",
                    size / read_ns,
                    "GB/s",
                    "memcpy",
                    size / copy_ns,
                    size=size,
                    ns=round(read_ns, 1),
                    rounds=rounds,
                    target="stopped",
                    source_bytes=SOURCE_BYTES,
                    destination_bytes=DESTINATION_BYTES,
                )
            )
        read_ns, copy_ns, rounds = alternate(
            lambda n, _: shm_probe.read_loop(qp, cq, region, remote, rkey, 64, 4096, 4096, n),
            lambda n, _: shm_probe.memcpy_loop(region.address, same.address, 64, 4096, 4096, n),
            share,
        )
        rows.append(
            figure(
                "shm-read.slot",
                read_ns,
                "ns",
                "memcpy",
                copy_ns,
                size=64,
                rounds=rounds,
                lower_is_better=True,
            )
        )
        add_ns, plain_ns, rounds = alternate(
            lambda n, _: shm_probe.fetch_add_loop(qp, cq, region, remote, rkey, n),
            lambda n, _: shm_probe.bare_fetch_add_loop(region.address, n),
            share,
        )
        rows.append(
            figure(
                "shm-read.fetch-add",
                add_ns,
                "ns",
                "bare fetch-and-add",
                plain_ns,
                rounds=rounds,
                lower_is_better=True,
            )
        )
        target.process.send_signal(signal.SIGCONT)
        allowed = os.sched_getaffinity(0)
        spread(1)
        target.call("spread")
        try:
            rows += round_trips(target, qp, cq, region, remote, rkey, bare, share)
        finally:
            os.sched_setaffinity(0, allowed)
        domain.close()
        return rows
    finally:
        target.close()
        bare.close()


def round_trips(
    target: Peer,
    qp: Any,
    cq: Any,
    region: Any,
    remote: int,
    rkey: int,
    bare: EventfdEcho,
    seconds: float,
) -> list[Figure]:
    rows = []
    for how in ("spinning", "asleep"):
        mine: list[float] = []
        theirs: list[float] = []
        count = 2000 if how == "spinning" else 200
        end = time.perf_counter() + seconds / 2
        while time.perf_counter() < end or len(mine) < 5:
            target.start("bounce", how, region.address, region.rkey, count)
            mine.append(bounce(qp, cq, region, how, remote, rkey, count, True) / count / 1000)
            target.finish()
            theirs.append(bare.round_trips(200) / 200 / 1000)
        rows.append(
            figure(
                f"shm-read.write-imm-{how}",
                statistics.median(mine),
                "us",
                "bare eventfd round trip",
                statistics.median(theirs),
                rounds=len(mine),
                bytes=8,
                processes=2,
                cores=min(2, os.cpu_count() or 1),
                lower_is_better=True,
            )
        )
    return rows


class EventfdEcho:
    """A child that answers every eventfd event with one: both sleep in read()."""

    def __init__(self) -> None:
        self.there, self.back = os.eventfd(0), os.eventfd(0)
        self.child = os.fork()
        if self.child == 0:
            try:
                from kdirect.rdma import shm_probe

                spread(0)
                shm_probe.eventfd_bounce(self.there, self.back, 1 << 62, False)
            finally:
                os._exit(0)

    def round_trips(self, count: int) -> int:
        from kdirect.rdma import shm_probe

        return shm_probe.eventfd_bounce(self.back, self.there, count, True)

    def close(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.there)
        os.close(self.back)


if __name__ == "__main__":
    serve(Served())
