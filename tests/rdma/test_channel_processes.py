"""Channels between real processes, over shm and, with a device, over verbs: sleeping and waking,
what waiting costs, SIGKILL of either side, and many buffers while both spin."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kdirect.errors import ChannelLostError
from kdirect.rdma import channel_probe, open_device
from kdirect.rdma.channel import ChannelSet, Receiver, Sender
from kdirect.rdma.contract import Memory
from tests.rdma.conftest import HAS_DEVICE, WAIT_MS, PeerProcess

OPEN = """
from kdirect.rdma.channel import ChannelSet
from kdirect.rdma import channel_probe, open_device
channels = ChannelSet(open_device(provider), most=2, slots=slots, slot_bytes=slot_bytes)
sender, receiver = channels.sender("the test"), channels.receiver("the test")
receiver.connect(their_sender)
log = channels.register(Memory.anonymous(1 << 20))
(sender.offer, receiver.offer)
"""


class Connected:
    """A channel each way between this process and another."""

    def __init__(
        self, peer: PeerProcess, provider: str, *, slots: int = 8, slot_bytes: int = 4096
    ) -> None:
        self.peer = peer
        self.device = open_device(provider, shared=False)
        self.channels = ChannelSet(self.device, most=2, slots=slots, slot_bytes=slot_bytes)
        self.sender: Sender = self.channels.sender("the other process")
        self.receiver: Receiver = self.channels.receiver("the other process")
        self.log = self.channels.register(Memory.anonymous(1 << 20))
        theirs, ring = peer.run(
            OPEN,
            provider=provider,
            slots=slots,
            slot_bytes=slot_bytes,
            their_sender=self.sender.offer,
        )
        self.receiver.connect(theirs)
        self.sender.connect(ring)
        peer.run("sender.connect(ring)", ring=self.receiver.offer)

    def close(self) -> None:
        self.channels.close()
        self.device.close()


@pytest.fixture(params=["shm", "verbs"] if HAS_DEVICE else ["shm"])
def pair(
    request: pytest.FixtureRequest, peer_process: Callable[[], PeerProcess]
) -> Iterator[Connected]:
    made = Connected(peer_process(), request.param)
    yield made
    made.close()


@pytest.fixture
def shm_pair(peer_process: Callable[[], PeerProcess]) -> Iterator[Connected]:
    made = Connected(peer_process(), "shm")
    yield made
    made.close()


def test_many_buffers_while_both_spin(pair: Connected) -> None:
    """Every CRC is checked; the counters say that each buffer was one WRITE."""
    count = 4000
    pair.peer.start("channel_probe.receive_loop(receiver, count, 60_000)", count=count)
    channel_probe.send_loop(pair.sender, pair.log, 4000, 1 << 20, count, timeout_ms=60_000)
    pair.peer.finish()
    assert pair.sender.wait_completed()
    assert pair.sender.sent == pair.sender.acknowledged == count
    assert pair.device.statistics()["writes"] == count
    assert pair.peer.run("receiver.bytes_received") == 4000 * count


def test_round_trips_while_both_spin(pair: Connected) -> None:
    bounce = "channel_probe.bounce(sender, receiver, log, 64, 2000, False, 60_000)"
    pair.peer.start(bounce)
    channel_probe.bounce(pair.sender, pair.receiver, pair.log, 64, 2000, True, 60_000)
    pair.peer.finish()


def test_round_trips_while_both_sleep(pair: Connected) -> None:
    pair.peer.start(
        "for _ in range(300):\n"
        "    assert channels.wait(10_000) and receiver.poll()\n"
        "    data = bytes(receiver.payload)\n"
        "    receiver.release()\n"
        "    buffer = sender.buffer()\n"
        "    buffer[:len(data)] = data\n"
        "    assert sender.send(len(data), wake=True)\n"
    )
    for i in range(300):
        buffer = pair.sender.buffer()
        assert buffer is not None
        buffer[:3] = b"%03d" % i
        assert pair.sender.send(3, wake=True)
        assert pair.channels.wait(WAIT_MS) and pair.receiver.poll()
        assert bytes(pair.receiver.payload) == b"%03d" % i
        pair.receiver.release()
    pair.peer.finish()


def test_a_slow_receiver_makes_the_sender_sleep_not_spin(pair: Connected) -> None:
    """Both sleep in `wait` throughout; the sender has far more than the ring holds."""
    count = 2000
    pair.peer.start(
        "n = 0\n"
        "while n < count:\n"
        "    channels.wait(10_000)\n"
        "    while receiver.poll():\n"
        "        assert receiver.epoch == n\n"
        "        receiver.release()\n"
        "        n += 1\n"
        "n",
        count=count,
    )
    for i in range(count):
        while not pair.sender.send_from(
            pair.log, i % 8 * 4096, 100, epoch=i, flags=1 if i == count - 1 else 0
        ):
            assert pair.channels.wait(WAIT_MS), "a wake-up was lost"
    assert pair.peer.finish() == count


def ticks(pid: int) -> int:
    """Clock ticks of CPU, of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def switches(pid: int) -> int:
    """How often its threads have gone to sleep by themselves."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def test_idle_channels_cost_no_cpu(shm_pair: Connected) -> None:
    """Both ends wait for half a second: one sleep each, and no work."""
    shm_pair.peer.start("channels.wait(600)")
    # It has gone to sleep when it takes no more time.
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert not shm_pair.channels.wait(500)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_nvcsw - before.ru_nvcsw <= 3
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.02
    assert shm_pair.peer.finish() is False
    idle = ticks(shm_pair.peer.pid), switches(shm_pair.peer.pid)
    shm_pair.peer.start("channels.wait(500)")
    shm_pair.peer.finish()
    assert ticks(shm_pair.peer.pid) - idle[0] <= 2
    assert switches(shm_pair.peer.pid) - idle[1] <= 8  # the pipe of the test among them


@pytest.mark.parametrize("asleep", [True, False])
def test_a_killed_receiver_ends_the_sender(pair: Connected, asleep: bool) -> None:
    while pair.sender.send_from(pair.log, 0, 100):
        pass
    os.kill(pair.peer.pid, signal.SIGKILL)
    with pytest.raises(ChannelLostError, match="the other process") as caught:
        while True:
            if asleep:
                assert pair.channels.wait(WAIT_MS), "nobody said that it died"
            pair.sender.send_from(pair.log, 0, 100)
    assert caught.value.peer == "the other process"


@pytest.mark.parametrize("asleep", [True, False])
def test_a_killed_sender_ends_the_receiver_after_what_arrived(
    pair: Connected, asleep: bool
) -> None:
    pair.peer.run("for i in range(3):\n    assert sender.send_from(log, 4096 * i, 10, epoch=i)")
    os.kill(pair.peer.pid, signal.SIGKILL)
    for i in range(3):
        assert pair.receiver.poll() and pair.receiver.epoch == i
        pair.receiver.release()
    with pytest.raises(ChannelLostError, match="the other process"):
        while True:
            if asleep:
                assert pair.channels.wait(WAIT_MS)
            assert not pair.receiver.poll()


@pytest.mark.parametrize("after", range(6))
def test_a_sender_killed_while_it_sends_leaves_whole_buffers(pair: Connected, after: int) -> None:
    """At any time, so also in the middle of a WRITE: what is delivered is whole and in order."""
    pair.peer.run("memoryview(log.memory)[:] = b'\\x5a' * (1 << 20)")
    pair.peer.start("channel_probe.send_loop(sender, log, 4064, 1 << 20, 10**9, timeout_ms=60_000)")
    received = 0
    with pytest.raises(ChannelLostError):
        while True:
            if pair.receiver.poll():
                assert pair.receiver.sequence == received
                assert bytes(pair.receiver.payload) == b"\x5a" * 4064
                pair.receiver.release()
                received += 1
                if received == 50 * (after + 1):
                    os.kill(pair.peer.pid, signal.SIGKILL)
    assert received >= 50 * (after + 1)


def test_a_revoked_ring_ends_a_sender_of_another_process(pair: Connected) -> None:
    assert channel_probe.ring_region(pair.receiver).deregister(WAIT_MS)
    words = pair.peer.run(
        "from kdirect.errors import ChannelRevokedError\n"
        "try:\n"
        "    for _ in range(100):\n"
        "        sender.send_from(log, 0, 10)\n"
        "        sender.refresh()\n"
        "    words = ''\n"
        "except ChannelRevokedError as e:\n"
        "    words = str(e)\n"
        "words"
    )
    assert "the test has ended access" in words
