"""Channels over every provider: order, credits, what is checked, how they sleep and how they end.

With a device (KDIRECT_TEST_VERBS=1) over real verbs too.
"""

from __future__ import annotations

import os
import random
import struct
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdirect.errors import (
    ChannelError,
    ChannelLostError,
    ChannelRevokedError,
    ClosedError,
    ConfigError,
    ForgedChannelError,
    TimedOutError,
    TornBufferError,
)
from kdirect.rdma import channel_probe, layout
from kdirect.rdma.channel import ChannelSet
from kdirect.rdma.contract import Memory
from kdirect.rdma.sim import SimNetwork
from tests.rdma.channel_model import generation
from tests.rdma.channels import SLOT_BYTES, SLOTS, Ends
from tests.rdma.conftest import WAIT_MS, Rig, completions

MOST = SLOT_BYTES - layout.FOOTER_BYTES
CALLS = ("send", "wake", "poll", "release", "sleep", "step")


# -- order, credits and bytes ----------------------------------------------------------------------
def test_buffers_arrive_once_in_order_and_by_one_write_each(rig: Rig, seed: int) -> None:
    ends, chance = Ends(rig), random.Random(seed)
    payloads = [os.urandom(chance.choice((0, 1, 7, 8, 100, MOST))) for _ in range(300)]
    before = rig.device.statistics()["writes"]

    def send_and_poll() -> bool:
        n = ends.sender.sent
        if n < len(payloads):
            ends.send(
                payloads[n],
                batch=n,
                epoch=n + 1,
                attempt=n + 2,
                kind=n % 256,
                flags=n % 4,
            )
        return ends.receiver.poll()

    for number, payload in enumerate(payloads):
        ends.until(send_and_poll)
        r = ends.receiver
        assert (r.sequence, r.batch, r.epoch, r.attempt) == (
            number,
            number,
            number + 1,
            number + 2,
        )
        assert (r.kind, r.flags, r.length) == (number % 256, number % 4, len(payload))
        assert bytes(r.payload) == payload and r.poll(), "it is the present one until released"
        r.release()
    ends.until(lambda: ends.sender.refresh() or ends.sender.completed == len(payloads))
    assert ends.sender.sent == len(payloads)
    assert rig.device.statistics()["writes"] - before == len(payloads)


@given(st.integers(0, 2**64 - 1), st.sampled_from([2, 8, 1024]))
@example(2**63 - 1, 8)  # a double does not hold it
def test_a_generation_is_exact_for_every_sequence(sequence: int, slots: int) -> None:
    assert channel_probe.generation(sequence, slots) == generation(sequence, slots)


def test_both_ends_pass_buffers_through_all_generations_in_one_thread(
    shm_rig: Rig,
) -> None:
    ends = Ends(shm_rig)
    count = layout.GENERATIONS * SLOTS + 2 * SLOTS
    log = ends.near.register(Memory.anonymous(1 << 13))
    channel_probe.pass_alone(ends.sender, ends.receiver, log, 64, count)
    ends.sender.refresh()
    assert ends.sender.posted == ends.receiver.received == count
    assert ends.sender.notified == 0, "credits are taken before they run out"


def test_a_sender_sends_from_its_own_log(rig: Rig) -> None:
    ends = Ends(rig)
    memory = Memory.anonymous(1 << 16)
    log = ends.near.register(memory)
    pages = [(i * 700 + i % 3, 10 + i) for i in range(40)]
    for i, (position, length) in enumerate(pages):
        memoryview(memory)[position : position + length] = bytes([i]) * length
    for i, (position, length) in enumerate(pages):
        ends.until(
            lambda position=position, length=length: ends.sender.send_from(log, position, length)
        )
        assert ends.receive() == bytes([i]) * length
    ends.until(lambda: ends.sender.refresh() or ends.sender.completed == len(pages))
    # The payloads are as they were; what follows them was the channel's.
    for i, (position, length) in enumerate(pages):
        assert bytes(memoryview(memory)[position : position + length]) == bytes([i]) * length


def test_nothing_is_sent_without_a_credit_and_nothing_unread_is_overwritten(rig: Rig) -> None:
    ends = Ends(rig)
    assert [ends.send(b"%d" % i) for i in range(SLOTS + 1)] == [True] * SLOTS + [False]
    assert ends.sender.blocked and ends.sender.buffer() is None and not ends.sender.may_send
    ends.until(lambda: ends.receiver.poll())
    assert bytes(ends.receiver.payload) == b"0"
    ends.receiver.release()
    assert not ends.send(b"x"), "credits come back in groups"
    assert ends.receive() == b"1"
    for i in (4, 5):  # when the credits and the completions have come
        ends.until(lambda i=i: ends.send(b"%d" % i))
    assert not ends.send(b"6")
    assert [ends.receive() for _ in range(4)] == [b"%d" % i for i in range(2, 6)]
    assert ends.receiver.credit_writes <= 4


def test_credits_are_returned_before_the_receiver_sleeps(rig: Rig) -> None:
    ends = Ends(rig)
    assert ends.send(b"one") and ends.receive() == b"one"
    assert ends.receiver.returned == 0
    ends.far.wait(0)
    assert ends.receiver.returned == 1
    ends.until(lambda: ends.sender.refresh() or ends.sender.freed == 1)
    assert ends.sender.acknowledged == 1


def test_staging_is_the_same_memory_until_it_is_sent(rig: Rig) -> None:
    ends = Ends(rig)
    first = ends.sender.buffer()
    assert first is not None and len(first) == MOST == ends.sender.payload_bytes
    first[:5] = b"hello"
    again = ends.sender.buffer()
    assert again is not None and bytes(again[:5]) == b"hello"
    assert ends.sender.send(5) and ends.receive() == b"hello"


def test_payloads_are_read_only_and_need_a_buffer(rig: Rig) -> None:
    ends = Ends(rig)
    with pytest.raises(ValueError, match="poll first"):
        ends.receiver.payload  # noqa: B018
    with pytest.raises(ValueError, match="poll first"):
        ends.receiver.release()
    assert ends.send(b"x")
    ends.until(ends.receiver.poll)
    with pytest.raises(TypeError):
        ends.receiver.payload[0] = 1  # type: ignore[index]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(CALLS), max_size=120))
def test_credits_and_order_in_any_sequence_of_calls(calls: list[str]) -> None:
    rig = Rig("sim", 7)
    ends = Ends(rig)
    sent = received = released = 0
    present = False
    try:
        for call in calls:
            if call in ("send", "wake"):
                sent += ends.send(struct.pack("<I", sent), wake=call == "wake")
            elif call == "poll":
                if ends.receiver.poll() and not present:
                    present = True
                    assert struct.unpack("<I", ends.receiver.payload) == (received,)
                    received += 1
            elif call == "release" and present:
                ends.receiver.release()
                present = False
                released += 1
            elif call == "sleep":
                ends.far.wait(0)
                assert ends.receiver.returned == released
            else:
                ends.network.step()
            s, r = ends.sender, ends.receiver
            assert (s.posted, r.received, r.released) == (sent, received, released)
            assert s.freed <= s.acknowledged <= r.returned <= released <= received <= sent
            assert sent <= s.acknowledged + SLOTS
    finally:
        rig.close()


# -- sleeping --------------------------------------------------------------------------------------
def test_only_what_wakes_has_a_completion_at_the_receiver(rig: Rig) -> None:
    ends = Ends(rig, slots=8)
    for i, header in enumerate(({}, {"wake": True}, {"flags": 1}, {"flags": 2}, {})):
        assert ends.send(b"%d" % i, **header)
    assert ends.sender.notified == 3
    assert [ends.receive() for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    ends.until(lambda: ends.far.drain() or ends.receiver.end.receives_taken == 3)


def test_the_last_credit_wakes_the_receiver_and_its_return_the_sender(rig: Rig) -> None:
    ends = Ends(rig)
    assert [ends.send(b"x") for _ in range(SLOTS)] == [True] * SLOTS
    assert ends.sender.notified == 1
    for _ in range(SLOTS):
        ends.receive()
    ends.until(lambda: ends.near.drain() or ends.sender.end.receives_taken >= 1)
    assert ends.sender.may_send


def test_a_receiver_sleeps_until_the_end_of_an_epoch(rig: Rig) -> None:
    ends = Ends(rig, slots=8)
    done: list[bool] = []
    if ends.network is not None:
        assert not ends.far.wait(1)
        assert ends.send(b"a") and ends.send(b"b", flags=layout.FLAG_END_OF_EPOCH)
        assert ends.far.wait(WAIT_MS)
    else:
        sleeper = threading.Thread(target=lambda: done.append(ends.far.wait(WAIT_MS)))
        sleeper.start()
        assert ends.send(b"a") and ends.send(b"b", flags=layout.FLAG_END_OF_EPOCH)
        sleeper.join(WAIT_MS / 1000)
        assert done == [True]
    assert [ends.receive(), ends.receive()] == [b"a", b"b"]


def test_a_sender_sleeps_until_there_is_a_credit(rig: Rig) -> None:
    ends = Ends(rig)
    for _ in range(SLOTS):
        assert ends.send(b"x")
    assert not ends.send(b"x")
    if ends.network is None:
        done: list[bool] = []
        sleeper = threading.Thread(target=lambda: done.append(ends.near.wait(WAIT_MS)))
        sleeper.start()
        for _ in range(SLOTS):
            ends.receive()
        sleeper.join(WAIT_MS / 1000)
        assert done == [True]
    else:
        for _ in range(SLOTS):
            ends.receive()
        assert ends.near.wait(WAIT_MS)
    assert ends.sender.wait_credit(0) and ends.send(b"x")


def test_one_wait_serves_all_channels_of_a_set(rig: Rig) -> None:
    ends = Ends(rig)
    other = ends.near.sender("the far end")
    others = ends.far.receiver("another")
    others.connect(other.offer)
    other.connect(others.offer)
    assert not ends.far.wait(0)
    buffer = other.buffer()
    assert buffer is not None
    assert other.send(3, wake=True)
    assert ends.far.wait(WAIT_MS)
    assert others.poll() and not ends.receiver.poll()


def test_a_wait_ends_when_it_is_woken(rig: Rig) -> None:
    ends = Ends(rig)
    ends.far.wake()
    assert ends.far.wait(WAIT_MS) is False
    assert ends.far.fileno() >= 0 and not ends.far.arm()
    assert ends.send(b"x", wake=True)
    ends.until(lambda: ends.far.arm())


# -- what the peer writes is checked ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"length": MOST + 1}, ForgedChannelError, "a length that no slot holds"),
        ({"length": 0xFFFFFFFF}, ForgedChannelError, "a length that no slot holds"),
        ({"generation": 2}, ForgedChannelError, "a wrong generation"),
        ({"generation": 255}, ForgedChannelError, "a wrong generation"),
        ({"crc": 0}, TornBufferError, "CRC-32C"),
        ({"sequence": 1}, ForgedChannelError, "a wrong sequence"),
        ({"sequence": SLOTS}, ForgedChannelError, "a wrong sequence"),
        ({"length": 5}, TornBufferError, "CRC-32C"),
    ],
)
def test_a_forged_footer_ends_the_channel(
    rig: Rig, changes: dict, error: type[ChannelError], words: str
) -> None:
    ends = Ends(rig)
    if changes.get("length") == 5:  # the bytes of another payload
        changes = {**changes, "crc": channel_probe.crc32c(b"other")}
    ends.forge(0, **changes)
    for _ in range(2):
        with pytest.raises(error, match=words) as caught:
            ends.receiver.poll()
        assert caught.value.peer == "the near end" and "the near end" in str(caught.value)
    # The peer learns that it has ended.
    ends.until(lambda: ends.near.drain() or ends.sender.end.ended)
    with pytest.raises(ChannelLostError, match="the far end"):
        ends.send(b"x")


@pytest.mark.parametrize("count", [1, 5, 2**63, 2**64 - 1])
def test_credits_that_were_never_had_end_the_channel(rig: Rig, count: int) -> None:
    ends = Ends(rig)
    word = channel_probe.word_region(ends.sender)
    memoryview(word.memory)[:8] = struct.pack("<Q", count)
    for _ in range(2):
        with pytest.raises(ForgedChannelError, match="credits that it never had") as caught:
            ends.sender.refresh()
        assert caught.value.peer == "the far end"
    with pytest.raises(ForgedChannelError):
        ends.send(b"x")


def test_credits_that_are_taken_back_end_the_channel(rig: Rig) -> None:
    ends = Ends(rig)
    for _ in range(2):
        assert ends.send(b"x") and ends.receive() == b"x"
    ends.until(lambda: ends.sender.refresh() or ends.sender.acknowledged == 2)
    memoryview(channel_probe.word_region(ends.sender).memory)[:8] = struct.pack("<Q", 1)
    with pytest.raises(ForgedChannelError, match="credits"):
        ends.sender.refresh()


def test_a_forged_last_credit_harms_nobody(rig: Rig) -> None:
    """A peer that says that it waits is woken, no more."""
    ends = Ends(rig)
    for i in range(SLOTS):
        ends.forge(i, b"%d" % i, flags=layout.FLAG_LAST_CREDIT | layout.FLAG_NOTIFIED)
    assert [ends.receive() for _ in range(SLOTS)] == [b"%d" % i for i in range(SLOTS)]
    assert ends.receiver.credit_writes <= SLOTS


# -- the end ---------------------------------------------------------------------------------------
def test_a_revoked_ring_ends_the_sender_with_the_peers_name(rig: Rig) -> None:
    ends = Ends(rig)
    assert ends.send(b"x") and ends.receive() == b"x"
    assert channel_probe.ring_region(ends.receiver).deregister()
    ends.send(b"y")
    ends.until(lambda: ends.near.drain() or ends.sender.end.ended)
    with pytest.raises(ChannelRevokedError, match="the far end") as caught:
        ends.sender.refresh()
    assert caught.value.peer == "the far end" and caught.value.retriable


def test_a_revoked_credit_word_ends_the_receiver(rig: Rig) -> None:
    ends = Ends(rig)
    assert channel_probe.word_region(ends.sender).deregister()
    for i in range(2):
        assert ends.send(b"%d" % i)
    assert [ends.receive(), ends.receive()] == [b"0", b"1"]
    ends.until(lambda: ends.far.drain() or ends.receiver.end.ended)
    with pytest.raises(ChannelRevokedError, match="the near end"):
        ends.receiver.poll()


def test_what_had_arrived_is_received_after_the_peer_has_gone(rig: Rig) -> None:
    ends = Ends(rig)
    assert ends.send(b"0") and ends.send(b"1", wake=True)
    ends.until(lambda: ends.sender.refresh() or ends.sender.completed == 2)
    ends.sender.close()
    ends.until(lambda: ends.far.drain() or ends.receiver.end.ended)
    assert [ends.receive(), ends.receive()] == [b"0", b"1"]
    with pytest.raises(ChannelLostError, match="the near end") as caught:
        ends.receiver.poll()
    assert caught.value.peer == "the near end" and caught.value.retriable
    with pytest.raises(ChannelLostError):
        ends.far.check()


def test_a_peer_that_goes_when_all_receives_are_used_is_missed(rig: Rig) -> None:
    """No receive was left whose completion would say so: the other end waited for ever."""
    far = ChannelSet(rig.other_device, most=1, slots=2, slot_bytes=SLOT_BYTES)
    receiver, near = far.receiver("the near end"), rig.end()
    address = near.qp.address
    offer = struct.pack(
        "<4sHHIIQII", layout.OFFER_MAGIC, layout.ROLE_SENDER, 0, 2, SLOT_BYTES, near.address,
        near.rkey, len(address)
    )  # fmt: skip
    receiver.connect(offer + address)
    near.qp.connect(receiver.offer[layout.OFFER_BYTES :], True)
    ring = channel_probe.ring_region(receiver)
    receives = 2 * far.slots
    for i in range(receives):
        near.qp.post_write_imm(i, near.region, 0, 0, ring.address, ring.rkey, i)
    assert all(wc.ok for wc in completions(near.send_cq, receives))
    near.qp.close()
    assert far.wait(WAIT_MS)
    with pytest.raises(ChannelLostError, match=r"near end is lost \(it has disconnected"):
        receiver.poll()


@pytest.mark.parametrize("does", ["send", "poll"])
def test_a_child_made_by_fork_is_told_so(shm_rig: Rig, does: str) -> None:
    """One that sent was told that the peer has gone, and one that polled was told nothing."""
    ends = Ends(shm_rig)
    assert ends.sender.buffer() is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if does == "send":
                ends.sender.send(1)
            for _ in range(5000):
                ends.receiver.poll()
        except ChannelError as e:
            os.write(writing, f"{type(e).__name__} {e} {e.peer}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    peer = "the far end" if does == "send" else "the near end"
    assert said.startswith(f"ChannelError the channel with {peer} was opened by the process")
    assert ends.send(b"x") and ends.receive() == b"x"


def test_a_wait_ends_once_when_a_channel_ends(rig: Rig) -> None:
    ends = Ends(rig)
    ends.receiver.close()
    assert ends.near.wait(WAIT_MS)
    with pytest.raises(ChannelLostError, match="the far end"):
        ends.sender.refresh()
    assert not ends.near.wait(0)


def test_closed_ends_say_so_and_may_be_closed_again(rig: Rig) -> None:
    ends = Ends(rig)
    ends.sender.close()
    ends.sender.close()
    with pytest.raises(ClosedError, match="is closed"):
        ends.sender.refresh()
    ends.far.close()
    ends.far.close()
    with pytest.raises(ClosedError):
        ends.receiver.poll()
    ends.near.close()


def test_places_of_closed_channels_are_used_again(rig: Rig) -> None:
    ends = Ends(rig, most=2)
    for _ in range(5):
        ends.sender.close()
        ends.receiver.close()
        ends.sender, ends.receiver = ends.near.sender("far"), ends.far.receiver("near")
        ends.receiver.connect(ends.sender.offer)
        ends.sender.connect(ends.receiver.offer)
        for i in range(10):
            assert ends.send(b"%d" % i, wake=True) and ends.receive() == b"%d" % i
            ends.far.wait(0)
            ends.until(lambda: ends.sender.may_send)
    ends.near.receiver("second")
    with pytest.raises(ConfigError, match="2 channels already"):
        ends.near.receiver("third")


# -- setting up ------------------------------------------------------------------------------------
def test_offers_may_be_exchanged_in_one_round(rig: Rig) -> None:
    """Each end's is taken before any end connects."""
    near, far = ChannelSet(rig.device, most=1), ChannelSet(rig.other_device, most=1)
    sender, receiver = near.sender("far"), far.receiver("near")
    from_sender, from_receiver = sender.offer, receiver.offer
    receiver.connect(from_sender)
    sender.connect(from_receiver)
    buffer = sender.buffer()
    assert buffer is not None and sender.send(3, wake=True)
    assert far.wait(WAIT_MS) and receiver.poll()


def test_offers_are_checked(rig: Rig) -> None:
    ends = Ends(rig)
    sets = ChannelSet(rig.device, most=2, slots=8, slot_bytes=SLOT_BYTES)
    sender, receiver = sets.sender("a peer"), sets.receiver("a peer")
    good = receiver.offer
    for offer in (b"", good[:10], b"XXXX" + good[4:], good + b"x", sender.offer):
        with pytest.raises(ChannelError, match="a peer offers is no end"):
            sender.connect(offer)
    with pytest.raises(ChannelError, match="a peer has 4 slots of 512 bytes, not 8"):
        sender.connect(ends.receiver.offer)
    sets.close()


@pytest.mark.parametrize(
    "options",
    [{"slots": 0}, {"slots": 3}, {"slots": 1}, {"slots": 4096}, {"slot_bytes": 60},
     {"slot_bytes": 32}],
)  # fmt: skip
def test_settings_are_checked(options: dict) -> None:
    with pytest.raises(ConfigError, match="a channel cannot have"):
        ChannelSet(SimNetwork(1).device(), **options)


def test_a_ring_of_more_than_four_gib_is_whole(shm_rig: Rig) -> None:
    """Its size was a number of 32 bits: the receiver looked far beyond a ring of 8 KiB."""
    slots, slot_bytes = 1024, (4 << 20) + 8
    ends = Ends(shm_rig, slots=slots, slot_bytes=slot_bytes)
    assert channel_probe.ring_region(ends.receiver).length == slots * slot_bytes
    for i in range(3):
        assert ends.send(b"%d" % i) and ends.receive() == b"%d" % i


def test_what_does_not_fit_is_refused(rig: Rig) -> None:
    ends = Ends(rig)
    log = ends.near.register(Memory.anonymous(4096))
    with pytest.raises(ValueError, match="does not fit"):
        ends.sender.send_from(log, 0, MOST + 1)
    for position in (4096, 4096 - 10 - layout.FOOTER_BYTES + 1, 2**63):
        with pytest.raises(ValueError, match="outside"):
            ends.sender.send_from(log, position, 10)
    with pytest.raises(ValueError, match="not the owner's"):
        ends.sender.send_from(log, 0, 10, flags=layout.FLAG_LAST_CREDIT)
    with pytest.raises(ValueError, match="call buffer first"):
        ends.sender.send(1)
    assert ends.sender.sent == 0


def test_a_loop_over_bare_memory_that_ends_too_late_has_no_time(rig: Rig) -> None:
    """What a benchmark would take for a slow round."""
    mine, theirs, words = (Memory.anonymous(4096) for _ in range(3))
    source = Ends(rig).near.register(Memory.anonymous(4096))
    for measure in (
        lambda: channel_probe.bare_bounce(mine, theirs, 64, 1, True, 20),
        lambda: channel_probe.bare_send_loop(theirs, words, source, 64, 65, timeout_ms=20),
        lambda: channel_probe.bare_send_loop(theirs, words, source, 64, 64, timeout_ms=20),
        lambda: channel_probe.bare_receive_loop(mine, words, 64, 4, 4, 20),
    ):
        with pytest.raises(TimedOutError, match="bare memory"):
            measure()
