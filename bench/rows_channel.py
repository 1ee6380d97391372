"""Bench rows of channels (Slash section 6): what footers, checksums and credits add to the
machine's own copies and cache lines.

The receiver is a process of its own, on the other core, and polls; both spin.  Every figure
alternates with its limit in short rounds of one run, and is a median of the rounds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from typing import Any

from sides import Figure, Peer, figure, serve, spread, spread_of

SLOTS = 8
SLOT_BYTES = 64 << 10
FOOTER_BYTES = 32
LOG_BYTES = 32 << 20  # what is sent from: far more than a cache holds of it
BUFFERS = 512  # of a round: 32 MiB
LATENCY_BYTES = 64
ROUND_TRIPS = 5000
VERBS_SLOTS = (8, 64)
PERFTEST_DEPTH = 128  # WRITEs that ib_write_bw has under way by default
VERBS_ROUNDS = 3
CREDIT_GROUP = 4


class Served:
    """One end of a channel each way, and plain shared memory; in both processes."""

    def open(self, provider: str, core: int, slots: int) -> None:
        from kdirect.rdma import open_device
        from kdirect.rdma.channel import ChannelSet
        from kdirect.rdma.contract import Memory

        spread(core)
        self.channels = ChannelSet(
            open_device(provider), most=4, slots=slots, slot_bytes=SLOT_BYTES
        )
        self.sender = self.channels.sender("the other process")
        self.receiver = self.channels.receiver("the other process")
        self.log = self.channels.register(Memory.anonymous(LOG_BYTES))
        memoryview(self.log.memory)[:] = os.urandom(1 << 20) * (LOG_BYTES >> 20)
        self.bare = Memory.anonymous(self.channels.slots * SLOT_BYTES)
        memoryview(self.bare)[:] = bytes(self.bare.length)
        self.words = Memory.anonymous(4096)

    def offers(self) -> tuple[str, str, int, int]:
        return self.sender.offer.hex(), self.receiver.offer.hex(), self.bare.fd, self.words.fd

    def accept(self, offer: str) -> None:
        self.receiver.connect(bytes.fromhex(offer))

    def join(self, offer: str) -> None:
        self.sender.connect(bytes.fromhex(offer))

    def share(self, pid: int, fd: int, words_fd: int) -> None:
        """Map the bare memory of the other process."""
        from kdirect.rdma.contract import Memory

        with open(f"/proc/{pid}/fd/{fd}", "r+b") as f:
            self.theirs = Memory.map(f.fileno(), self.bare.length, True)
        with open(f"/proc/{pid}/fd/{words_fd}", "r+b") as f:
            self.their_words = Memory.map(f.fileno(), 4096, True)

    def receive(self, count: int) -> float:
        """CPU seconds for `count` buffers."""
        from kdirect.rdma import channel_probe

        before = cpu_seconds()
        channel_probe.receive_loop(self.receiver, count)
        return cpu_seconds() - before

    def receive_asleep(self, count: int) -> float:
        """As `receive`, asleep whenever there is nothing."""
        before = cpu_seconds()
        while count:
            if self.receiver.poll():
                self.receiver.release()
                count -= 1
            else:
                self.channels.wait(1000)
        self.channels.wait(0)  # returns the credits that are due
        return cpu_seconds() - before

    def send_asleep(self, count: int, begin: int) -> None:
        """Send from the log, asleep whenever there is no credit; until all is given back.  Wakes
        the receiver twice a turn of the ring: one that is woken by the last credit alone reads
        while the sender sleeps, and sleeps while it sends."""
        slots = LOG_BYTES // SLOT_BYTES
        for i in range(begin, begin + count):
            at = i % slots * SLOT_BYTES
            wake = i == begin + count - 1 or (i + 1) % (self.channels.slots // 2) == 0
            while not self.sender.send_from(self.log, at, SLOT_BYTES - FOOTER_BYTES, wake=wake):
                self.channels.wait(1000)
        while self.sender.acknowledged < self.sender.posted:
            self.channels.wait(1)
            self.sender.refresh()

    def bare_receive(self, count: int) -> int:
        from kdirect.rdma import channel_probe

        return channel_probe.bare_receive_loop(
            self.bare, self.words, SLOT_BYTES, count, CREDIT_GROUP
        )

    def bounce(self, count: int) -> int:
        from kdirect.rdma import channel_probe

        return channel_probe.bounce(
            self.sender, self.receiver, self.log, LATENCY_BYTES, count, False
        )

    def bare_bounce(self, count: int) -> int:
        from kdirect.rdma import channel_probe

        return channel_probe.bare_bounce(self.bare, self.theirs, LATENCY_BYTES, count, False)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def connected(provider: str, slots: int = SLOTS) -> Any:
    """(this side, the other process), connected both ways."""
    allowed = os.sched_getaffinity(0)
    other = Peer(__file__)
    near = Served()
    try:
        other.call("open", provider, 0, slots)
        near.open(provider, 1, slots)
        sends, receives, *descriptors = other.call("offers")
        my_sends, my_receives, *my_descriptors = near.offers()
        near.accept(sends)
        other.call("accept", my_sends)
        near.join(receives)
        other.call("join", my_receives)
        if provider == "shm":
            near.share(other.process.pid, *descriptors)
            other.call("share", os.getpid(), *my_descriptors)
        yield near, other
        near.channels.close()
    finally:
        os.sched_setaffinity(0, allowed)
        other.close()


def bandwidth_round(near: Served, other: Peer, buffers: int, begin: int) -> tuple[float, float]:
    """(bytes a second, CPU seconds of the receiver) of one round of whole buffers."""
    from kdirect.rdma import channel_probe

    warm = 2 * CREDIT_GROUP
    other.start("receive", warm + buffers)
    ns = channel_probe.send_loop(
        near.sender, near.log, SLOT_BYTES - FOOTER_BYTES, LOG_BYTES, buffers, begin, warm
    )
    return buffers * SLOT_BYTES / ns * 1e9, other.finish()


def channel_bandwidth(seconds: float, quick: bool) -> list[Figure]:
    """Buffers of 64 KiB against a memcpy of the same bytes into a bare ring of shared memory whose
    bytes the other process reads; and against a memcpy whose bytes nobody reads."""
    from kdirect.rdma import channel_probe, shm_probe

    buffers = 64 if quick else BUFFERS
    warm = 2 * CREDIT_GROUP
    with connected("shm") as (near, other):
        ours: list[float] = []
        read: list[float] = []
        unread: list[float] = []
        mine_cpu = other_cpu = 0.0
        end = time.perf_counter() + (0.5 if quick else seconds)
        while time.perf_counter() < end or len(ours) < 5:
            begin = 3 * len(ours) * buffers
            before = cpu_seconds()
            rate, cpu = bandwidth_round(near, other, buffers, begin)
            mine_cpu += cpu_seconds() - before
            other_cpu += cpu
            ours.append(rate)
            other.start("bare_receive", warm + buffers)
            ns = channel_probe.bare_send_loop(
                near.theirs,
                near.their_words,
                near.log,
                SLOT_BYTES,
                buffers,
                begin + buffers,
                warm,
            )
            other.finish()
            read.append(buffers * SLOT_BYTES / ns * 1e9)
            ns = shm_probe.memcpy_loop(
                near.theirs.address,
                near.log.address,
                SLOT_BYTES,
                near.theirs.length,
                LOG_BYTES,
                buffers,
                begin + 2 * buffers,
            )
            unread.append(buffers * SLOT_BYTES / ns * 1e9)
        near.sender.wait_completed()
        sent = near.sender.posted
        writes = near.channels.device.statistics()["writes"]
        if writes != sent:
            raise RuntimeError(f"{writes} WRITEs for {sent} buffers")
        total = sent * SLOT_BYTES
        settings = {
            "bytes": SLOT_BYTES,
            "slots": near.channels.slots,
            "log_bytes": LOG_BYTES,
            "rounds": len(ours),
            "quartiles": quartiles(ours),
            "writes_per_buffer": writes / sent,
            "sender_gb_per_cpu_s": round(total / mine_cpu / 1e9, 2),
            "receiver_gb_per_cpu_s": round(total / other_cpu / 1e9, 2),
            "processes": 2,
        }
        return [
            figure(
                f"channel-bandwidth{suffix}",
                statistics.median(ours) / 1e9,
                "GB/s",
                against,
                statistics.median(theirs) / 1e9,
                **settings,
                against_quartiles=quartiles(theirs),
            )
            for suffix, against, theirs in (
                ("", "memcpy that the other process reads", read),
                (".unread", "memcpy that nobody reads", unread),
            )
        ]


def quartiles(rates: list[float]) -> list[float]:
    return [round(q / 1e9, 2) for q in statistics.quantiles(rates)]


def channel_latency(seconds: float, quick: bool) -> list[Figure]:
    """A round trip of 64 bytes against one of bare shared memory; both sides spin.  The bare
    message is one cache line; a buffer with its footer is two, which are fetched together, so that
    the rest of the difference is work of the ends (`both_ends_ns`), a third of it checksums.  What
    a line's way costs depends on which cores the two are on, and the ratio with it."""
    from kdirect.rdma import channel_probe

    count = 500 if quick else ROUND_TRIPS
    with connected("shm") as (near, other):
        ours: list[float] = []
        theirs: list[float] = []
        end = time.perf_counter() + (0.5 if quick else seconds)
        while time.perf_counter() < end or len(ours) < 5:
            other.start("bounce", count)
            ns = channel_probe.bounce(
                near.sender, near.receiver, near.log, LATENCY_BYTES, count, True
            )
            other.finish()
            ours.append(ns / count)
            other.start("bare_bounce", count)
            ns = channel_probe.bare_bounce(near.bare, near.theirs, LATENCY_BYTES, count, True)
            other.finish()
            theirs.append(ns / count)
        both_ends = round(both_ends_ns(near), 1)
        return [
            figure(
                "channel-latency",
                statistics.median(ours),
                "ns",
                "bare shared memory",
                statistics.median(theirs),
                bytes=LATENCY_BYTES,
                rounds=len(ours),
                round_trips=count,
                quartiles=[round(q) for q in statistics.quantiles(ours)],
                both_ends_ns=both_ends,
                bare_quartiles=[round(q) for q in statistics.quantiles(theirs)],
                lower_is_better=True,
                processes=2,
            )
        ]


def both_ends_ns(near: Served) -> float:
    """What a buffer costs both ends when no cache line has to move: they are in one thread."""
    from kdirect.rdma import channel_probe

    sender, receiver = near.channels.sender("itself"), near.channels.receiver("itself")
    receiver.connect(sender.offer)
    sender.connect(receiver.offer)
    rounds = [
        channel_probe.pass_alone(sender, receiver, near.log, LATENCY_BYTES, ROUND_TRIPS)
        / ROUND_TRIPS
        for _ in range(11)
    ]
    return statistics.median(rounds)


def channel_verbs(seconds: float, quick: bool) -> list[Figure]:
    """Buffers of 64 KiB over real verbs against perftest's WRITEs of as many bytes over the same
    device; the WRITEs are counted.  Both ends sleep when they have nothing to do: a guest's cores
    are those of its software RNIC too.

    ib_write_bw has 128 WRITEs under way where it is not told otherwise, a channel as many as it has
    slots.  So a channel is held against as many WRITEs under way as its own, and against 128."""
    from rows_verbs import perftest

    from kdirect.rdma import verbs_choice

    found = [
        (port, gid)
        for port in verbs_choice.devices()
        if port.active
        for gid in port.gids
        if gid.address.ipv4_mapped is not None
    ]
    if not found:
        raise RuntimeError("no RDMA device with an IPv4 address; make bench-rdma has one")
    port, gid = found[0]
    buffers = 320
    depths = (*VERBS_SLOTS, PERFTEST_DEPTH)
    ours: dict[int, list[float]] = {slots: [] for slots in VERBS_SLOTS}
    theirs: dict[int, list[float]] = {depth: [] for depth in depths}
    cpu: dict[int, list[tuple[float, float]]] = {slots: [] for slots in VERBS_SLOTS}
    writes = sent = 0
    with contextlib.ExitStack() as opened:
        ends = {slots: opened.enter_context(connected("verbs", slots)) for slots in VERBS_SLOTS}
        end = time.monotonic() + seconds
        least = 1 if quick else VERBS_ROUNDS
        while len(theirs[PERFTEST_DEPTH]) < least or (not quick and time.monotonic() < end):
            for depth in depths:
                options = ["-s", str(SLOT_BYTES), "-n", str(buffers), "-t", str(depth)]
                theirs[depth].append(
                    perftest("ib_write_bw", port.device, gid.index, gid.ip, options)[3]
                )
            for slots, (near, other) in ends.items():
                other.start("receive_asleep", buffers)
                start, before = time.perf_counter(), cpu_seconds()
                near.send_asleep(buffers, len(ours[slots]) * buffers)
                took, used = time.perf_counter() - start, cpu_seconds() - before
                ours[slots].append(buffers * SLOT_BYTES / took / (1 << 20))
                cpu[slots].append((used, other.finish()))
        for near, _ in ends.values():
            near.sender.wait_completed()
            sent += near.sender.posted
            writes = near.channels.device.statistics()["writes"]  # of all channels of this process
    settings = {"bytes": SLOT_BYTES, "device": port.device, "gid_index": gid.index}
    return [
        *(
            figure(
                "channel-verbs",
                statistics.median(ours[slots]),
                "MiB/s",
                f"ib_write_bw -t {depth}",
                statistics.median(theirs[depth]),
                what=f"buffers through {slots} slots",
                under_way=depth,
                **spread_of(ours[slots], theirs[depth]),
                **{
                    f"{end}_cpu_us_per_buffer": statistics.median(c[i] for c in cpu[slots])
                    / buffers
                    * 1e6
                    for i, end in enumerate(("sender", "receiver"))
                },
                **settings,
            )
            for slots in VERBS_SLOTS
            for depth in (slots, PERFTEST_DEPTH)
        ),
        figure("channel-verbs", writes, "WRITEs", "buffers", sent, what="WRITEs", **settings),
    ]


if __name__ == "__main__":
    serve(Served())
