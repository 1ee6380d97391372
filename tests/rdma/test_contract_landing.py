"""The verbs contract: the last 8 bytes of a WRITE land last and together, over every provider, also
of a WRITE_WITH_IMM and of one whose bytes are partly inline."""

from __future__ import annotations

import os
import random
import struct
import threading

import pytest

from kdirect.rdma import channel_probe
from kdirect.rdma.contract import Memory
from kdirect.rdma.sim import Faults, SimNetwork
from tests.rdma.conftest import ALL, WAIT_MS, End, Rig, completion, join
from tests.rdma.test_contract import got, put
from tests.rdma.test_contract_summed import TAKES


@pytest.mark.parametrize("length", [8, 9, 15, 16, 24, 100, 4096, 65536])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_every_length_and_alignment_arrives_whole(rig: Rig, length: int, start: int) -> None:
    a, b = rig.pair(1 << 17)
    data = os.urandom(length)
    put(a, 3, data)
    put(b, 0, b"\xee" * (1 << 17))
    for op in ("write", "write_imm"):
        b.qp.post_recv(1)
        if op == "write":
            a.qp.post_write(1, a.region, 3, length, b.address + 64 + start, b.rkey)
        else:
            a.qp.post_write_imm(1, a.region, 3, length, b.address + 64 + start, b.rkey, 7)
        assert completion(a.send_cq).ok
        assert got(b, 64 + start, length) == data
        assert got(b, 63 + start, 1) == b"\xee" == got(b, 64 + start + length, 1)


@pytest.mark.parametrize("length", [8, 12, 16, 200, 9000])
def test_an_inline_piece_anywhere_arrives_whole(rig: Rig, length: int, seed: int) -> None:
    """Before, within and over the last 8 bytes; or the provider has no such call."""
    a, b = rig.pair()
    chance = random.Random(seed)
    for _ in range(60):
        at = chance.randint(0, length)
        piece = os.urandom(chance.randint(0, length - at))
        data = os.urandom(length)
        put(a, 0, data)
        b.qp.post_recv(1)
        if not a.qp.post_write_imm_inline(
            1, a.region, 0, length, at, piece, b.address + 64, b.rkey, 7
        ):
            return
        assert completion(a.send_cq).ok and completion(b.recv_cq).ok
        assert got(b, 64, length) == data[:at] + piece + data[at + len(piece) :]


def write(a: End, b: End, how: str, length: int, number: int) -> bool:
    """WRITE that number, all over; False where the provider has no such call."""
    # Of the last 8 bytes a sum takes the low half.
    word = struct.pack("<Q", number << 32 | 0xFFFFFFFF)
    put(a, 0, word * (length // 8))
    if how == "write":
        a.qp.post_write(number, a.region, 0, length, b.address, b.rkey)
        return True
    if how == "summed":
        return a.qp.post_write_summed(number, a.region, 0, length, b.address, b.rkey)
    b.qp.post_recv(number)
    if how == "write_imm":
        a.qp.post_write_imm(number, a.region, 0, length, b.address, b.rkey, 7)
        return True
    at = (0, 8, length - 16)[number % 3]  # before, over and after the rest
    return a.qp.post_write_imm_inline(
        number, a.region, 0, length, at, word * 2, b.address, b.rkey, 7
    )


@pytest.mark.parametrize("how", ["write", "write_imm", "inline", "summed"])
@pytest.mark.parametrize("length", [64, 1024, 65536])
def test_whoever_sees_the_last_bytes_sees_all(threads_rig: Rig, length: int, how: str) -> None:
    """A reader polls the last 8 bytes while WRITEs come, each with one number all over: what it
    reads before them is of that WRITE or a later one, never of an earlier one."""
    rounds = 10_000
    a, b = threads_rig.pair(1 << 17)
    result: list[int] = []
    reader = threading.Thread(
        target=lambda: result.append(
            channel_probe.watch_landings(b.memory, length, rounds << 32, WAIT_MS * 6)
        )
    )
    if not write(a, b, how, length, 1):
        assert threads_rig.provider not in TAKES
        return
    reader.start()
    for number in range(2, rounds + 1):
        assert completion(a.send_cq).ok
        if how in ("write_imm", "inline"):
            assert completion(b.recv_cq).ok
        assert write(a, b, how, length, number)
    reader.join(WAIT_MS * 6 / 1000)
    assert result == [0], "bytes of an earlier WRITE were seen after the last ones of a later"


def ends(seed: int, faults: Faults) -> tuple[SimNetwork, End, End]:
    network = SimNetwork(seed, faults)
    a, b = (End(network.device(name), 1 << 12, access=ALL) for name in "ab")
    join(a, b)
    return network, a, b


@pytest.mark.parametrize("length", [8, 12, 16, 100, 1000])
def test_a_torn_write_of_the_simulated_network_keeps_the_rule(seed: int, length: int) -> None:
    network, a, b = ends(seed, Faults(tear=1.0))
    a.bytes[:length] = b"\xaa" * length
    end = 2048  # the last 8 bytes are aligned
    a.qp.post_write(1, a.region, 0, length, b.address + end - length, b.rkey)
    torn = False
    while network.step():
        last = got(b, end - 8, 8)
        assert last in (bytes(8), b"\xaa" * 8), "they land together"
        first = got(b, end - length, length - 8)
        torn |= b"\xaa" in first and last == bytes(8)
        assert last == bytes(8) or first == b"\xaa" * (length - 8), "they land last"
    assert torn == (length > 9) and got(b, end - 8, 8) == b"\xaa" * 8


def test_disorder_breaks_the_rule(seed: int) -> None:
    network, a, b = ends(seed, Faults(tear=1.0, disorder=1.0))
    a.bytes[:100] = b"\xaa" * 100
    a.qp.post_write(1, a.region, 0, 100, b.address + 1948, b.rkey)
    broken = False
    while network.step():
        broken |= got(b, 2040, 8) == b"\xaa" * 8 and got(b, 1948, 8) == bytes(8)
    assert broken and got(b, 1948, 100) == b"\xaa" * 100


def test_memory_is_as_it_was_outside_of_a_write(rig: Rig) -> None:
    """Neighbours of an aligned end are not touched by the store of the last 8 bytes."""
    a, b = rig.pair()
    put(a, 0, b"\x11" * 64)
    put(b, 0, bytes(range(256)))
    a.qp.post_write(1, a.region, 0, 8, b.address + 8, b.rkey)
    assert completion(a.send_cq).ok
    assert got(b, 0, 256) == bytes(range(8)) + b"\x11" * 8 + bytes(range(16, 256))


def test_a_memory_of_another_process_is_no_exception() -> None:
    """What the reader of `watch_landings` reports when the rule is broken."""
    memory = Memory.anonymous(4096)
    view = memoryview(memory)
    view[:64] = struct.pack("<Q", 1) * 7 + struct.pack("<Q", 2)
    assert channel_probe.watch_landings(memory, 64, 2, 1000) == 7
