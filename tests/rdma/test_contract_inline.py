"""The verbs contract: a WRITE_WITH_IMM whose bytes are partly inline, over every provider, and what
the providers that take it keep to.

A provider that has no such call says so each time, and nothing is posted: `TAKES` are those that
have it.
"""

from __future__ import annotations

import os

import pytest

from kdirect.errors import QueueFullError, QueuePairError, RdmaError
from kdirect.rdma.contract import Opcode, State, Status
from tests.rdma.conftest import ALL, End, Rig, completion, completions
from tests.rdma.test_contract import got, put

TAKES = ("shm",)
LENGTH = 20_000
VALUE = os.urandom(16_384)
AT = 100


def post(a: End, b: End, *, wr_id: int = 1, imm: int = 7, rkey: int | None = None) -> bool:
    """LENGTH bytes of `a` to `b`, VALUE in the middle of them."""
    return a.qp.post_write_imm_inline(
        wr_id, a.region, 0, LENGTH, AT, VALUE, b.address, b.rkey if rkey is None else rkey, imm
    )


def expected(a: End) -> bytes:
    return got(a, 0, AT) + VALUE + got(a, AT + len(VALUE), LENGTH - AT - len(VALUE))


def test_inline_bytes_take_the_place_of_registered_ones(rig: Rig) -> None:
    """Or the provider has no such call, and then nothing has happened."""
    a, b = rig.pair()
    put(a, 0, os.urandom(LENGTH))
    b.qp.post_recv(77)
    if not post(a, b, imm=0xFEDC1234):
        assert rig.provider not in TAKES
        assert (a.send_cq.poll(), b.recv_cq.poll(), got(b, 0, LENGTH)) == ([], [], bytes(LENGTH))
        put(a, AT, VALUE)  # what the caller does then
        a.qp.post_write_imm(1, a.region, 0, LENGTH, b.address, b.rkey, 0xFEDC1234)
    wc = completion(a.send_cq)
    assert (wc.wr_id, wc.status, wc.opcode, wc.byte_len) == (
        1,
        Status.SUCCESS,
        Opcode.RDMA_WRITE,
        LENGTH,
    )
    wc = completion(b.recv_cq)
    assert (wc.wr_id, wc.opcode, wc.byte_len, wc.imm_data) == (
        77,
        Opcode.RECV_RDMA_WITH_IMM,
        LENGTH,
        0xFEDC1234,
    )
    assert got(b, 0, LENGTH + 1) == expected(a) + b"\0"


@pytest.mark.parametrize(("at", "length"), [(0, 64), (0, 1), (63, 1), (64, 0), (0, 0), (10, 20)])
def test_inline_bytes_at_the_ends_of_a_request(shm_rig: Rig, at: int, length: int) -> None:
    a, b = shm_rig.pair()
    own, value = os.urandom(64), os.urandom(length)
    put(a, 0, own)
    b.qp.post_recv(1)
    assert a.qp.post_write_imm_inline(1, a.region, 0, 64, at, value, b.address, b.rkey, 1)
    assert completion(a.send_cq).ok
    assert got(b, 0, 65) == own[:at] + value + own[at + length :] + b"\0"


@pytest.mark.parametrize(("at", "length"), [(0, 65), (64, 1), (65, 0), (2**32 - 1, 2)])
def test_inline_bytes_outside_of_the_request_are_refused_at_post(
    shm_rig: Rig, at: int, length: int
) -> None:
    a, b = shm_rig.pair()
    b.qp.post_recv(1)
    with pytest.raises(RdmaError, match="length"):
        a.qp.post_write_imm_inline(1, a.region, 0, 64, at, bytes(length), b.address, b.rkey, 1)
    assert (a.send_cq.poll(), b.recv_cq.poll(), a.qp.state) == ([], [], State.RTS)


def test_what_would_have_to_wait_is_not_taken(shm_rig: Rig) -> None:
    """The bytes are the caller's again when the post returns, so it takes none for later: neither
    without a receive nor behind a request that waits for one."""
    a, b = shm_rig.pair()
    put(a, 0, b"waits---" + bytes(LENGTH))
    assert not post(a, b)
    assert (a.send_cq.poll(), got(b, 0, LENGTH)) == ([], bytes(LENGTH))
    a.qp.post_write_imm(1, a.region, 0, 8, b.address, b.rkey, 1)
    assert not post(a, b, wr_id=2)
    b.qp.post_recv(1)
    b.qp.post_recv(2)
    assert completion(a.send_cq).wr_id == 1
    assert post(a, b, wr_id=3, imm=3)
    assert completion(a.send_cq).wr_id == 3
    assert [wc.imm_data for wc in completions(b.recv_cq, 2)] == [1, 3]
    assert got(b, 0, LENGTH) == expected(a)


def test_keys_are_checked_as_for_every_write(shm_rig: Rig) -> None:
    for case in ("revoked", "forged", "local"):
        a, b = shm_rig.pair()
        region = b.domain.register(b.memory, ALL)
        b.qp.post_recv(1)
        b.qp.post_recv(2)
        assert post(a, b, rkey=region.rkey)  # it is known by then
        assert completion(a.send_cq).ok
        b.bytes[:LENGTH] = bytes(LENGTH)
        if case == "local":
            assert a.region.deregister() is True
        elif case == "revoked":
            assert region.deregister() is True
        assert post(a, b, rkey=region.rkey ^ 0x5A5A0000 if case == "forged" else region.rkey)
        wc = completion(a.send_cq)
        assert wc.status == (Status.LOC_PROT_ERR if case == "local" else Status.REM_ACCESS_ERR)
        assert (a.qp.state, got(b, 0, LENGTH)) == (State.ERROR, bytes(LENGTH))
        with pytest.raises(QueuePairError):
            post(a, b)


def test_a_full_send_queue(shm_rig: Rig) -> None:
    a, b = shm_rig.pair(max_send_wr=2)
    for i in range(3):
        b.qp.post_recv(i)
    assert post(a, b, wr_id=1)
    assert post(a, b, wr_id=2)
    with pytest.raises(QueueFullError):
        post(a, b, wr_id=3)
    assert [wc.wr_id for wc in completions(a.send_cq, 2)] == [1, 2]
    assert post(a, b, wr_id=3)
