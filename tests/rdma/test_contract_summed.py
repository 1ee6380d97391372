"""The verbs contract: a WRITE that sums what it carries, over every provider, and what the
providers that take it keep to.

A provider that has no such call says so each time, and nothing is posted: `TAKES` are those that
have it.
"""

from __future__ import annotations

import os
import struct

import pytest

from kdirect.rdma.channel_probe import crc32c
from kdirect.rdma.contract import Opcode, Status
from tests.rdma.conftest import End, Rig, completion
from tests.rdma.test_contract import got, put

TAKES = ("shm",)


def summed(data: bytes) -> bytes:
    """What arrives of `data`."""
    return data[:-8] + struct.pack("<I", crc32c(data[:-8] + data[-4:])) + data[-4:]


def post(a: End, b: End, length: int, *, at: int = 0, imm: int | None = None) -> bool:
    return a.qp.post_write_summed(1, a.region, 0, length, b.address + at, b.rkey, imm)


@pytest.mark.parametrize("imm", [None, 0xFEDC1234])
def test_a_write_sums_what_it_carries(rig: Rig, imm: int | None) -> None:
    """Or the provider has no such call, and then nothing has happened."""
    a, b = rig.pair()
    data = os.urandom(20_000)
    put(a, 0, data)
    b.qp.post_recv(77)
    if not post(a, b, len(data), imm=imm):
        assert rig.provider not in TAKES
        assert (a.send_cq.poll(), b.recv_cq.poll()) == ([], [])
        assert got(b, 0, len(data)) == bytes(len(data))
        return
    wc = completion(a.send_cq)
    assert (wc.wr_id, wc.status, wc.opcode, wc.byte_len) == (
        1,
        Status.SUCCESS,
        Opcode.RDMA_WRITE,
        len(data),
    )
    if imm is not None:
        wc = completion(b.recv_cq)
        assert (wc.wr_id, wc.opcode, wc.byte_len, wc.imm_data) == (
            77,
            Opcode.RECV_RDMA_WITH_IMM,
            len(data),
            imm,
        )
    assert b.recv_cq.poll() == []
    assert got(b, 0, len(data) + 1) == summed(data) + b"\0"
    assert got(a, 0, len(data)) == data


@pytest.mark.parametrize("length", [8, 9, 32, 96, 4096, 20_001])
def test_sums_of_all_lengths(shm_rig: Rig, length: int) -> None:
    a, b = shm_rig.pair()
    data = os.urandom(length)
    put(a, 0, data)
    at = -length % 8
    assert post(a, b, length, at=at)
    assert completion(a.send_cq).ok
    assert got(b, at, length + 1) == summed(data) + b"\0"


@pytest.mark.parametrize(
    ("length", "at", "imm"),
    [(7, 1, None), (0, 0, None), (9, 0, None), (16, 0, 1), (16, 1 << 40, None)],
    ids=["short", "empty", "not aligned", "receiver not ready", "out of bounds"],
)
def test_what_a_summed_write_leaves_to_a_plain_one(
    shm_rig: Rig, length: int, at: int, imm: int | None
) -> None:
    """Nothing has happened, and the plain request says what is wrong, or waits."""
    a, b = shm_rig.pair()
    put(a, 0, b"x" * 32)
    assert not post(a, b, length, at=at, imm=imm)
    assert a.send_cq.poll() == []
    assert got(b, 0, 32) == bytes(32)
