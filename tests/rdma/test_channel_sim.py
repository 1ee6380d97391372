"""Real ends of a channel over the simulated network, with delay, loss, tear, disorder, revocation
and kill, held against the rules as pure steps (`channel_model`)."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

import pytest

from kdirect.errors import (
    ChannelError,
    ChannelLostError,
    ChannelRevokedError,
    TornBufferError,
)
from kdirect.rdma import channel_probe, layout
from kdirect.rdma.channel import ChannelSet
from kdirect.rdma.sim import Faults, SimNetwork
from tests.rdma.channel_model import (
    Buffer,
    Credit,
    Delivered,
    Look,
    ReceiverState,
    Release,
    Sleep,
    generation,
    step_receiver,
)

SCHEDULES = 400
BUFFERS = 40
SLOT_BYTES = 128
STEPS = 4000
MOVES = ("send", "send", "receive", "receive", "time", "time", "sleep", "look")


@dataclass
class Outcome:
    sent: int = 0
    received: int = 0
    errors: list[ChannelError] = field(default_factory=list)
    finished: bool = False


class Mirror:
    """The receiver's rules, stepped with what the real one sees."""

    def __init__(self, slots: int) -> None:
        self.state = ReceiverState(slots)
        self.credits: list[Credit] = []

    def step(self, event: Look | Release | Sleep) -> bool:
        self.state, effects = step_receiver(self.state, event)
        self.credits += [e for e in effects if isinstance(e, Credit)]
        return any(isinstance(e, Delivered) for e in effects)


def schedule(seed: int, faults: Faults, disturb: str = "") -> Outcome:
    """One run of a seed: BUFFERS buffers of random sizes, each end doing something at random times.
    `disturb`: "kill" or "revoke" one end's process or memory at a random time."""
    chance = random.Random(seed)
    network = SimNetwork(seed, faults)
    devices = network.device("near"), network.device("far")
    slots = chance.choice((2, 4, 8))
    near, far = (ChannelSet(d, most=2, slots=slots, slot_bytes=SLOT_BYTES) for d in devices)
    sender, receiver = near.sender("the far end"), far.receiver("the near end")
    receiver.connect(sender.offer)
    sender.connect(receiver.offer)
    mirror, outcome, present = Mirror(slots), Outcome(), False
    ring = channel_probe.ring_memory(receiver)
    payloads = [
        struct.pack("<I", i) + chance.randbytes(chance.randrange(SLOT_BYTES - 36))
        for i in range(BUFFERS)
    ]
    disturbed_at = chance.randrange(STEPS // 8) if disturb else -1

    def holds(number: int) -> Buffer | None:
        """What the slot of this buffer holds, as the rules see it."""
        end = (number % slots + 1) * SLOT_BYTES
        footer = bytes(memoryview(ring)[end - layout.FOOTER_BYTES : end])
        (sequence,) = struct.unpack_from("<Q", footer)
        (flags,) = struct.unpack_from("<H", footer, layout.FOOTER_FLAGS)
        turn = footer[layout.FOOTER_GENERATION]
        if turn == 0:
            return None
        return Buffer(
            sequence,
            turn,
            bool(flags & layout.FLAG_LAST_CREDIT),
            bool(flags & layout.FLAG_NOTIFIED),
        )

    def newest() -> Buffer | None:
        return holds(mirror.state.returned + slots - 1)

    def poll() -> bool:
        return bool(receiver.poll())

    for step in range(STEPS):
        if step == disturbed_at:
            if disturb == "kill":
                network.kill(chance.choice(devices))
            elif chance.random() < 0.5:
                channel_probe.ring_region(receiver).deregister()
            else:
                channel_probe.word_region(sender).deregister()
        move = chance.choice(MOVES)
        try:
            if move == "send" and outcome.sent < BUFFERS:
                buffer = sender.buffer()
                if buffer is not None:
                    data = payloads[outcome.sent]
                    buffer[: len(data)] = data
                    end = outcome.sent == BUFFERS - 1 or chance.random() < 0.1
                    outcome.sent += sender.send(
                        len(data), flags=layout.FLAG_END_OF_EPOCH if end else 0
                    )
            elif move == "receive" and not present:
                seen = holds(receiver.received)
                present = poll()
                if present:
                    # It is what was sent, whole, and in order; or nothing was delivered.
                    assert bytes(receiver.payload) == payloads[outcome.received]
                    assert mirror.step(Look(seen))
                    outcome.received += 1
                else:
                    assert not mirror.step(Look(seen))
            elif move == "receive":
                event = Release(newest())
                receiver.release()
                present = False
                mirror.step(event)
            elif move == "sleep" and not present:
                event_of_sleep = Sleep(newest())
                far.wait(0)
                mirror.step(event_of_sleep)
            elif move == "look":
                near.wait(0)
            else:
                for _ in range(chance.randrange(8)):
                    network.step()
        except ChannelError as e:
            outcome.errors.append(e)
            if len(outcome.errors) > 4:
                break
            continue
        if not outcome.errors and not receiver.end.ended:
            m = mirror.state
            assert (m.received, m.released) == (receiver.received, receiver.released), seed
            assert m.returned == receiver.returned, (seed, m, receiver.returned)
            assert len(mirror.credits) == receiver.credit_writes, seed
        assert sender.freed <= sender.acknowledged <= receiver.returned <= receiver.released
        assert sender.posted <= sender.acknowledged + slots
        if outcome.received == BUFFERS and not present:
            outcome.finished = True
            break
    return outcome


def seeds(seed: int, share: int = 1) -> range:
    return range(seed, seed + SCHEDULES // share)


def test_buffers_arrive_in_order_whatever_is_delayed_or_torn(seed: int) -> None:
    for one in seeds(seed):
        outcome = schedule(one, Faults(tear=0.3))
        assert outcome.finished and not outcome.errors, (one, outcome)


def test_a_fabric_that_breaks_the_order_of_bytes_is_caught(seed: int) -> None:
    """Nothing torn is ever delivered, which `schedule` checks; the channel ends by saying so."""
    torn = 0
    for one in seeds(seed):
        outcome = schedule(one, Faults(tear=0.2, disorder=0.5))
        if any(isinstance(e, TornBufferError) for e in outcome.errors):
            torn += 1
        elif not outcome.finished:
            raise AssertionError((one, outcome))
    assert torn > SCHEDULES / 10


@pytest.mark.parametrize("disturb", ["", "kill", "revoke"])
def test_lost_killed_and_revoked_channels_end_with_the_peers_name(seed: int, disturb: str) -> None:
    faults = Faults(tear=0.1, disconnect=0.0 if disturb else 0.01)
    errors: list[ChannelError] = []
    for one in seeds(seed, 2):
        outcome = schedule(one, faults, disturb)
        assert outcome.finished or outcome.errors, (one, outcome)
        errors += outcome.errors
    kinds = {type(e) for e in errors}
    assert kinds <= {ChannelLostError, ChannelRevokedError}, kinds
    assert ChannelLostError in kinds and (ChannelRevokedError in kinds) == (disturb == "revoke")
    assert {e.peer for e in errors} == {"the far end", "the near end"}


def connected(seed: int, slots: int):
    """(network, sender, receiver), each in a set of its own."""
    network = SimNetwork(seed)
    near, far = (ChannelSet(network.device(), most=1, slots=slots, slot_bytes=64) for _ in "ab")
    sender, receiver = near.sender("far"), far.receiver("near")
    receiver.connect(sender.offer)
    sender.connect(receiver.offer)
    return network, sender, receiver


def test_wake_ends_a_wait_although_credits_could_not_be_returned(seed: int) -> None:
    network, sender, receiver = connected(seed, 64)
    far = receiver.end.channels
    for _ in range(32):
        assert sender.buffer() is not None and sender.send(0)
    network.run_until_idle()
    while receiver.poll():
        receiver.release()
        far.wait(0)  # returns a credit, while fewer than 16 returns are under way
    assert receiver.returned < receiver.released, "credits are owed"
    far.wake()
    assert not far.wait(1000)
    assert receiver.returned < receiver.released, "it has waited for them"


def test_a_sender_wakes_up_for_a_completion_that_comes_after_its_credit(seed: int) -> None:
    """It has a credit, and no slot of its own for it yet: the peer sends nothing more."""
    late = 0
    for one in seeds(seed):
        network, sender, receiver = connected(one, 4)
        near, far = sender.end.channels, receiver.end.channels
        chance = random.Random(one)
        for _ in range(300):
            if chance.random() < 0.3 and sender.buffer() is not None:
                assert sender.send(0)
            if chance.random() < 0.3 and receiver.poll():
                receiver.release()
            network.step()
            if sender.buffer() is None and sender.posted < sender.acknowledged + 4:
                late += 1
                while receiver.poll():
                    receiver.release()
                far.wait(0)
                if late % 2:
                    assert near.wait()
                else:
                    assert sender.wait_credit()
                assert sender.buffer() is not None
                break
    assert late > 5


def test_generations_go_round(seed: int) -> None:
    """More turns than there are generations."""
    network, sender, receiver = connected(seed, 2)
    for i in range(2 * 600):
        while sender.buffer() is None:
            network.step()
        assert sender.send(0)
        while not receiver.poll():
            network.step()
        assert receiver.sequence == i
        receiver.release()
    assert generation(2 * 600, 2) != generation(0, 2)
