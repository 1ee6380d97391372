"""Peers that break the rules of the shared rings: they are cut, and nobody else notices.  The
hostile side is in this process."""

from __future__ import annotations

import contextlib
import random
import struct
import time

import pytest

from kdirect.errors import QueuePairError
from kdirect.rdma.contract import State, Status
from tests.rdma.conftest import WAIT_MS, Rig, completion, completions, eventually

# shm_ring.h, for the tests that forge it
DIRECTION_BYTES = 192
BUSY, POSTED, BYTE_HEAD, SLEEPING = 0, 64, 72, 128
ENTRY = struct.Struct("<QQIIII")


class Forger:
    """`a` is hostile: it writes where it likes into the memory that it shares with `b`."""

    def __init__(self, rig: Rig) -> None:
        self.a, self.b = rig.pair(max_recv_wr=8, max_send_bytes=4096)
        self.pair = self.a.qp._pair_memory()
        # direction 0 is a -> b: 8 lengths, then 8 entries, at a cache line; direction 1 likewise
        # after its payload
        self.entries = 4096 + 64

    def write(self, position: int, data: bytes) -> None:
        self.pair[position : position + len(data)] = memoryview(data)

    def word(self, position: int, value: int) -> None:
        self.write(position, struct.pack("<Q", value % 2**64))

    def entry(
        self,
        index: int,
        sequence: int,
        position: int = 0,
        opcode: int = 129,
        byte_len: int = 0,
        imm: int = 0,
    ) -> None:
        self.write(
            self.entries + 32 * index, ENTRY.pack(sequence, position, opcode, byte_len, imm, 0)
        )


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("rubbish", {"sequence": 0xFFFF}),
        ("rubbish", {"sequence": 2**64 - 1}),
        ("unknown opcode", {"sequence": 1, "opcode": 5}),
        ("more bytes", {"sequence": 1, "opcode": 128, "byte_len": 5000}),
        ("position", {"sequence": 1, "opcode": 128, "byte_len": 64, "position": 8}),
        ("position", {"sequence": 1, "opcode": 128, "byte_len": 64, "position": 2**64 - 32}),
    ],
)
def test_forged_entries_cut_the_peer(
    shm_rig: Rig, why: str, fields: dict, caplog: pytest.LogCaptureFixture
) -> None:
    forger = Forger(shm_rig)
    other, victim = shm_rig.pair()
    b = forger.b
    b.qp.post_recv(1, b.region, 0, 65536)
    b.qp.post_recv(2)
    forger.entry(0, **fields)
    wcs = completions(b.recv_cq, 2)
    assert [wc.wr_id for wc in wcs] == [1, 2]
    assert all(wc.status == Status.WR_FLUSH_ERR for wc in wcs), wcs
    assert b.qp.state == State.ERROR
    eventually(lambda: "was cut" in caplog.text)
    assert why in caplog.text and why in b.qp.cut_reason
    assert bytes(b.bytes) == bytes(65536)
    victim.qp.post_recv(1)
    other.qp.post_write_imm(1, other.region, 0, 8, victim.address, victim.rkey, 3)
    assert completion(victim.recv_cq).imm_data == 3


def test_a_flood_cuts_the_peer(shm_rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    forger = Forger(shm_rig)
    b = forger.b
    b.qp.post_recv(1)
    for i in range(8):
        forger.entry(i, sequence=i + 1, imm=i)
    assert completion(b.recv_cq).imm_data == 0
    assert b.recv_cq.wait(WAIT_MS)
    eventually(lambda: b.recv_cq.poll() == [] and b.qp.state == State.ERROR)
    eventually(lambda: "more than there are receives" in caplog.text)


@pytest.mark.parametrize("posted", [9, 2**63, 2**64 - 1])
def test_forged_credits_cut_the_peer(shm_rig: Rig, posted: int) -> None:
    forger = Forger(shm_rig)
    b = forger.b
    forger.word(DIRECTION_BYTES + POSTED, posted)  # of b -> a: written by a
    b.qp.post_write_imm(1, b.region, 0, 0, 0, 0, 1)
    assert completion(b.send_cq).status == Status.RETRY_EXC_ERR
    assert b.qp.state == State.ERROR


def test_forged_payload_counters_cut_the_peer(shm_rig: Rig) -> None:
    forger = Forger(shm_rig)
    a, b = forger.a, forger.b
    a.qp.post_recv(1, a.region, 0, 4096)
    forger.word(DIRECTION_BYTES + BYTE_HEAD, 1 << 40)
    b.qp.post_send(1, b.region, 0, 100)
    assert completion(b.send_cq).status == Status.RETRY_EXC_ERR


def test_rubbish_all_over_the_rings(shm_rig: Rig, seed: int) -> None:
    """Whatever is in the shared memory, its victim neither crashes nor hangs nor touches what it
    should not."""
    rng = random.Random(seed)
    cut = 0
    for _ in range(60):
        forger = Forger(shm_rig)
        b = forger.b
        guard = bytes(b.bytes[4096:])
        for i in range(8):
            b.qp.post_recv(i, b.region, 512 * i, 512)
        for _ in range(12):
            at = rng.choice([0, DIRECTION_BYTES, 4096]) + 4 * rng.randint(0, 90)
            forger.write(
                at,
                rng.choice(
                    [
                        rng.randbytes(4),
                        rng.randbytes(8),
                        struct.pack("<Q", rng.randint(0, 12)),
                        b"\xff" * 8,
                    ]
                ),
            )
            with contextlib.suppress(QueuePairError):
                b.qp.post_send(1, b.region, 8192, rng.randint(0, 4096))
                b.qp.post_write_imm(2, b.region, 8192, 8, forger.a.address, forger.a.rkey, 1)
            b.recv_cq.poll()
            b.send_cq.poll()
        cut += b.qp.state == State.ERROR
        assert bytes(b.bytes[4096:]) == guard
        for end in (forger.a, b):
            end.domain.close()
    assert cut > 5


def test_a_peer_that_never_leaves_its_copy(shm_rig: Rig) -> None:
    """deregister() says False, and True once the peer is out."""
    forger = Forger(shm_rig)
    b = forger.b
    forger.word(BUSY, 2**33 + 1)
    started = time.monotonic()
    assert b.region.deregister(50) is False
    assert time.monotonic() - started >= 0.05
    assert b.region.deregister(1) is False
    a = forger.a
    forger.word(BUSY, 2**33 + 2)
    assert b.region.deregister(50) is True
    a.qp.post_read(1, a.region, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).status == Status.REM_ACCESS_ERR


def test_a_peer_that_left_holds_nothing_up(shm_rig: Rig) -> None:
    forger = Forger(shm_rig)
    forger.word(BUSY, 7)
    forger.a.qp.close()
    assert forger.b.region.deregister(WAIT_MS) is True


def test_flushed_receives_are_not_taken_for_rubbish(shm_rig: Rig) -> None:
    """A peer that left in good order is not accused, however many receives were posted and however
    often is looked."""
    a, b = shm_rig.pair(max_recv_wr=64)
    for i in range(64):
        b.qp.post_recv(i)
    a.qp.close()
    assert {completion(b.recv_cq).status for _ in range(64)} == {Status.WR_FLUSH_ERR}
    for _ in range(3):
        assert b.recv_cq.poll() == []
        b.recv_cq.wait(timeout_ms=1)
    assert b.qp.cut_reason is None
