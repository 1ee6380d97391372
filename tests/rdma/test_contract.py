"""The verbs contract, over every provider: operations, ordering, keys, bounds and access.

What kdirect.rdma.contract promises, and nothing that a provider adds; its other half is
test_contract_life.py.
"""

from __future__ import annotations

import os
import random
import struct

import pytest

from kdirect.errors import QueuePairError, RdmaError
from kdirect.rdma.contract import Access, Memory, Opcode, State, Status
from tests.rdma.conftest import ALL, End, Rig, completion, completions, join

NEEDS = {
    "read": Access.REMOTE_READ,
    "write": Access.REMOTE_WRITE,
    "write_imm": Access.REMOTE_WRITE,
    "fetch_add": Access.REMOTE_ATOMIC,
    "compare_swap": Access.REMOTE_ATOMIC,
}


def u64(end: End, position: int) -> int:
    return struct.unpack_from("=Q", end.bytes, position)[0]


def put(end: End, position: int, data: bytes) -> None:
    end.bytes[position : position + len(data)] = data


def got(end: End, position: int, length: int) -> bytes:
    return bytes(end.bytes[position : position + length])


# -- operations ------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 64, 2048, 65536])
def test_read(rig: Rig, length: int) -> None:
    a, b = rig.pair()
    data = os.urandom(length)
    put(b, 65536 - length, data)
    a.qp.post_read(11, a.region, 0, length, b.address + 65536 - length, b.rkey)
    wc = completion(a.send_cq)
    assert (wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.qp_num) == (
        11,
        Status.SUCCESS,
        Opcode.RDMA_READ,
        length,
        a.qp.qp_num,
    )
    assert got(a, 0, length) == data


def test_write(rig: Rig) -> None:
    a, b = rig.pair()
    data = os.urandom(4096)
    put(a, 100, data)
    a.qp.post_write(12, a.region, 100, 4096, b.address + 8192, b.rkey)
    wc = completion(a.send_cq)
    assert (wc.wr_id, wc.status, wc.opcode) == (12, Status.SUCCESS, Opcode.RDMA_WRITE)
    assert got(b, 8192, 4096) == data
    assert got(b, 8191, 1) == b"\0" == got(b, 8192 + 4096, 1)
    assert b.recv_cq.poll() == []


def test_both_directions(rig: Rig) -> None:
    a, b = rig.pair()
    put(a, 0, b"from a")
    b.qp.post_read(1, b.region, 100, 6, a.address, a.rkey)
    assert completion(b.send_cq).ok
    assert got(b, 100, 6) == b"from a"


def test_write_with_immediate(rig: Rig) -> None:
    a, b = rig.pair()
    put(a, 0, b"payload")
    b.qp.post_recv(77)
    a.qp.post_write_imm(13, a.region, 0, 7, b.address + 50, b.rkey, 0xFEDC1234)
    assert completion(a.send_cq).ok
    wc = completion(b.recv_cq)
    assert (wc.wr_id, wc.status, wc.opcode, wc.byte_len) == (
        77,
        Status.SUCCESS,
        Opcode.RECV_RDMA_WITH_IMM,
        7,
    )
    assert (wc.imm_data, wc.qp_num) == (0xFEDC1234, b.qp.qp_num)
    assert got(b, 50, 7) == b"payload"


def test_empty_write_with_immediate_needs_no_key(rig: Rig) -> None:
    a, b = rig.pair()
    b.qp.post_recv(1)
    a.qp.post_write_imm(2, a.region, 0, 0, 0, 0, 9)
    assert completion(a.send_cq).ok
    wc = completion(b.recv_cq)
    assert (wc.imm_data, wc.byte_len) == (9, 0)


def test_send(rig: Rig) -> None:
    a, b = rig.pair()
    put(a, 0, b"message")
    b.qp.post_recv(5, b.region, 1000, 100)
    a.qp.post_send(6, a.region, 0, 7)
    wc = completion(a.send_cq)
    assert (wc.wr_id, wc.opcode, wc.status) == (6, Opcode.SEND, Status.SUCCESS)
    wc = completion(b.recv_cq)
    assert (wc.wr_id, wc.opcode, wc.byte_len, wc.imm_data) == (5, Opcode.RECV, 7, None)
    assert got(b, 1000, 8) == b"message\0"


def test_empty_send(rig: Rig) -> None:
    a, b = rig.pair()
    b.qp.post_recv(1)
    a.qp.post_send(2, a.region, 0, 0)
    assert completion(a.send_cq).ok
    assert completion(b.recv_cq).byte_len == 0


def test_fetch_add(rig: Rig) -> None:
    a, b = rig.pair()
    put(b, 64, struct.pack("=Q", 2**64 - 3))
    a.qp.post_fetch_add(1, a.region, 8, b.address + 64, b.rkey, 5)
    wc = completion(a.send_cq)
    assert (wc.opcode, wc.byte_len) == (Opcode.FETCH_ADD, 8)
    assert (u64(a, 8), u64(b, 64)) == (2**64 - 3, 2)


def test_compare_swap(rig: Rig) -> None:
    a, b = rig.pair()
    put(b, 64, struct.pack("=Q", 41))
    a.qp.post_compare_swap(1, a.region, 8, b.address + 64, b.rkey, 41, 1 << 63)
    wc = completion(a.send_cq)
    assert (wc.opcode, u64(a, 8), u64(b, 64)) == (Opcode.COMP_SWAP, 41, 1 << 63)
    a.qp.post_compare_swap(2, a.region, 8, b.address + 64, b.rkey, 41, 7)
    assert completion(a.send_cq).ok
    assert (u64(a, 8), u64(b, 64)) == (1 << 63, 1 << 63)


def test_random_operations_match_a_model(rig: Rig, seed: int) -> None:
    """Mixed requests, many outstanding, on a target and a bytearray beside it."""
    rng = random.Random(seed)
    a, b = rig.pair(size=8192, max_send_wr=32)
    model = bytearray(8192)
    slots = 32
    for _ in range(30):
        expected: dict[int, bytes] = {}
        n = rng.randint(1, slots)
        for i in range(n):
            slot, length, at = 256 * (i % 16), rng.randint(0, 128), rng.randrange(0, 8192 - 128)
            local = slot + 128 * (i // 16)
            op = rng.choice(["read", "write", "fetch_add", "compare_swap"])
            if op == "read":
                a.qp.post_read(i, a.region, local, length, b.address + at, b.rkey)
                expected[i] = bytes(model[at : at + length])
            elif op == "write":
                data = rng.randbytes(length)
                put(a, local, data)
                a.qp.post_write(i, a.region, local, length, b.address + at, b.rkey)
                model[at : at + length] = data
                expected[i] = data
            else:
                at &= ~7
                old = model[at : at + 8]
                value = rng.getrandbits(64)
                if op == "fetch_add":
                    a.qp.post_fetch_add(i, a.region, local, b.address + at, b.rkey, value)
                    model[at : at + 8] = struct.pack(
                        "=Q", (struct.unpack("=Q", old)[0] + value) % 2**64
                    )
                else:
                    compare = (
                        struct.unpack("=Q", old)[0] if rng.random() < 0.5 else rng.getrandbits(64)
                    )
                    a.qp.post_compare_swap(
                        i, a.region, local, b.address + at, b.rkey, compare, value
                    )
                    if struct.pack("=Q", compare) == old:
                        model[at : at + 8] = struct.pack("=Q", value)
                expected[i] = bytes(old)
        wcs = completions(a.send_cq, n)
        assert [wc.wr_id for wc in wcs] == list(range(n))
        assert all(wc.ok for wc in wcs), wcs
        for i, data in expected.items():
            assert got(a, 256 * (i % 16) + 128 * (i // 16), len(data)) == data
    assert bytes(b.bytes) == bytes(model)


# -- ordering --------------------------------------------------------------------------------------
def test_writes_are_visible_before_a_later_immediate(rig: Rig) -> None:
    a, b = rig.pair(size=1 << 18)
    for turn in range(1, 40):
        put(a, 0, bytes([turn]) * 65536)
        b.qp.post_recv(turn)
        for i in range(3):
            a.qp.post_write(i, a.region, 0, 65536, b.address + i * 65536, b.rkey)
        a.qp.post_write_imm(3, a.region, 0, 1, b.address + 3 * 65536, b.rkey, turn)
        wc = completion(b.recv_cq)
        assert wc.imm_data == turn
        assert got(b, 0, 3 * 65536 + 1) == bytes([turn]) * (3 * 65536 + 1)
        assert [wc.wr_id for wc in completions(a.send_cq, 4)] == [0, 1, 2, 3]


def test_completions_keep_the_order_of_posts(rig: Rig) -> None:
    a, b = rig.pair()
    for i in range(40):
        b.qp.post_recv(i, b.region, 1024 * (i % 16), 16)
    for i in range(100):
        kind = i % 5
        if kind == 0:
            a.qp.post_write_imm(i, a.region, 0, 8, b.address + 32768, b.rkey, i)
        elif kind == 1:
            a.qp.post_send(i, a.region, 0, 16)
        elif kind == 2:
            a.qp.post_read(i, a.region, 1024 + 8 * i, 8, b.address, b.rkey)
        elif kind == 3:
            a.qp.post_write(i, a.region, 0, 8, b.address + 32768, b.rkey)
        else:
            a.qp.post_fetch_add(i, a.region, 8192 + 8 * i, b.address + 40000, b.rkey, 1)
    wcs = completions(a.send_cq, 100)
    assert [wc.wr_id for wc in wcs] == list(range(100))
    assert all(wc.ok for wc in wcs)
    received = completions(b.recv_cq, 40)
    assert [wc.wr_id for wc in received] == list(range(40))
    assert [wc.imm_data for wc in received if wc.imm_data is not None] == list(range(0, 100, 5))


# -- keys, bounds, access --------------------------------------------------------------------------
def expect_failure(a: End, status: int) -> None:
    """The one request posted fails with `status`; the queue pair is in ERROR and takes no more."""
    wc = completion(a.send_cq)
    assert wc.status == status, wc
    assert a.qp.state == State.ERROR
    with pytest.raises(QueuePairError):
        a.qp.post_read(99, a.region, 0, 8, 0, 0)


@pytest.mark.parametrize(
    ("start", "length"),
    [(-1, 8), (65536 - 7, 8), (65536, 1), (0, 65537), (1 << 40, 8), (-(1 << 20), 8)],
    ids=lambda v: str(v),
)
def test_remote_bounds(rig: Rig, start: int, length: int) -> None:
    a, b = rig.pair(a={"size": 1 << 17}, b={"size": 65536})
    a.qp.post_read(1, a.region, 0, length, b.address + start, b.rkey)
    expect_failure(a, Status.REM_ACCESS_ERR)


def test_remote_address_near_the_end_of_the_address_space(rig: Rig) -> None:
    a, b = rig.pair()
    a.qp.post_read(1, a.region, 0, 4096, 2**64 - 8, b.rkey)
    expect_failure(a, Status.REM_ACCESS_ERR)


@pytest.mark.parametrize("op", NEEDS)
def test_access_flags(rig: Rig, op: str) -> None:
    need = NEEDS[op]
    a, b = rig.pair(b={"access": ALL & ~need})
    before = bytes(b.bytes)
    b.qp.post_recv(1)
    post(a, op, b.address, b.rkey)
    expect_failure(a, Status.REM_ACCESS_ERR)
    assert bytes(b.bytes) == before
    if op == "write_imm":
        assert completion(b.recv_cq).status == Status.WR_FLUSH_ERR


@pytest.mark.parametrize("op", NEEDS)
def test_the_flag_alone_is_enough(rig: Rig, op: str) -> None:
    need = NEEDS[op]
    a, b = rig.pair(b={"access": need if op == "read" else need | Access.LOCAL_WRITE})
    b.qp.post_recv(1)
    post(a, op, b.address, b.rkey)
    assert completion(a.send_cq).ok


def post(a: End, op: str, remote: int, rkey: int) -> None:
    if op == "read":
        a.qp.post_read(1, a.region, 0, 8, remote, rkey)
    elif op == "write":
        a.qp.post_write(1, a.region, 0, 8, remote, rkey)
    elif op == "write_imm":
        a.qp.post_write_imm(1, a.region, 0, 8, remote, rkey, 1)
    elif op == "fetch_add":
        a.qp.post_fetch_add(1, a.region, 0, remote, rkey, 1)
    else:
        a.qp.post_compare_swap(1, a.region, 0, remote, rkey, 0, 1)


def test_a_region_without_remote_access_is_out_of_reach(rig: Rig) -> None:
    a, b = rig.pair(b={"access": Access.LOCAL_WRITE})
    post(a, "read", b.address, b.rkey)
    expect_failure(a, Status.REM_ACCESS_ERR)


def test_a_region_of_a_part_of_the_memory(rig: Rig) -> None:
    a, b = rig.pair()
    put(b, 5000, b"inside" * 20)
    part = b.domain.register(b.memory, Access.REMOTE_READ, position=5000, length=100)
    assert (part.address, part.length) == (b.memory.address + 5000, 100)
    a.qp.post_read(1, a.region, 0, 100, part.address, part.rkey)
    assert completion(a.send_cq).ok
    assert got(a, 0, 100) == (b"inside" * 20)[:100]
    a.qp.post_read(2, a.region, 0, 100, part.address + 1, part.rkey)
    expect_failure(a, Status.REM_ACCESS_ERR)


def test_a_part_does_not_reach_before_itself(rig: Rig) -> None:
    a, b = rig.pair()
    part = b.domain.register(b.memory, Access.REMOTE_READ, position=5000, length=100)
    a.qp.post_read(1, a.region, 0, 8, part.address - 8, part.rkey)
    expect_failure(a, Status.REM_ACCESS_ERR)


@pytest.mark.parametrize("which", ["unknown", "other domain", "zero"])
def test_forged_keys(rig: Rig, which: str) -> None:
    a, b = rig.pair()
    stranger = rig.end()
    rkey = {"unknown": b.rkey ^ 0x5A5A0000, "other domain": stranger.rkey, "zero": 0}[which]
    a.qp.post_read(
        1, a.region, 0, 8, stranger.address if which == "other domain" else b.address, rkey
    )
    expect_failure(a, Status.REM_ACCESS_ERR)


@pytest.mark.parametrize("case", ["wrong lkey", "before", "beyond", "read-only"])
def test_local_protection(rig: Rig, case: str) -> None:
    a, b = rig.pair()
    region, position, length = a.region, 0, 8
    if case == "wrong lkey":
        region = rig.end().region
    elif case == "before":
        region, position = a.domain.register(a.memory, ALL, position=4096), -8 % 2**64
    elif case == "beyond":
        position = 65536 - 7
    else:
        region = a.domain.register(a.memory, 0)
    a.qp.post_read(1, region, position, length, b.address, b.rkey)
    expect_failure(a, Status.LOC_PROT_ERR)


def test_reading_needs_no_local_write_of_the_source(rig: Rig) -> None:
    a, b = rig.pair()
    put(a, 0, b"constant")
    source = a.domain.register(a.memory, 0)
    a.qp.post_write(1, source, 0, 8, b.address, b.rkey)
    assert completion(a.send_cq).ok
    assert got(b, 0, 8) == b"constant"


def test_misaligned_atomics_are_refused_at_post(rig: Rig) -> None:
    a, b = rig.pair()
    with pytest.raises(RdmaError, match="alignment"):
        a.qp.post_fetch_add(1, a.region, 0, b.address + 4, b.rkey, 1)
    with pytest.raises(RdmaError, match="alignment"):
        a.qp.post_compare_swap(1, a.region, 0, b.address + 1, b.rkey, 0, 1)
    post(a, "fetch_add", b.address, b.rkey)
    assert completion(a.send_cq).ok


def test_revoked_key(rig: Rig) -> None:
    a, b = rig.pair()
    second = b.domain.register(b.memory, ALL)
    a.qp.post_read(1, a.region, 0, 8, second.address, second.rkey)
    assert completion(a.send_cq).ok
    assert second.deregister() is True
    a.qp.post_read(2, a.region, 0, 8, b.address, b.rkey)  # the other key lives
    assert completion(a.send_cq).ok
    a.qp.post_read(3, a.region, 0, 8, second.address, second.rkey)
    expect_failure(a, Status.REM_ACCESS_ERR)


def test_a_revoked_key_never_comes_back(rig: Rig) -> None:
    _, b = rig.pair()
    seen = {b.rkey}
    for _ in range(200):
        region = b.domain.register(b.memory, ALL)
        assert region.rkey not in seen
        seen.add(region.rkey)
        assert region.deregister() is True
        assert region.deregister() is True


def test_a_revoked_local_key(rig: Rig) -> None:
    a, b = rig.pair()
    region = a.domain.register(a.memory, ALL)
    assert region.deregister() is True
    a.qp.post_read(1, region, 0, 8, b.address, b.rkey)
    expect_failure(a, Status.LOC_PROT_ERR)


def test_registered_after_connecting_and_before(rig: Rig) -> None:
    a, b = rig.end(), End(rig.other_device)
    before = [
        b.domain.register(b.memory, Access.REMOTE_READ, position=4096 * i, length=4096)
        for i in range(10)
    ]
    join(a, b)
    after = [
        b.domain.register(b.memory, Access.REMOTE_READ, position=8 * i, length=8) for i in range(10)
    ]
    for i, region in enumerate(before + after):
        put(b, region.address - b.memory.address, bytes([i + 1]) * 8)
        a.qp.post_read(i, a.region, 0, 8, region.address, region.rkey)
        assert completion(a.send_cq).ok
        assert got(a, 0, 8) == bytes([i + 1]) * 8


def test_registration_of_read_only_memory(rig: Rig) -> None:
    a, b = rig.pair()
    put(b, 0, b"read only")
    view = Memory.map(b.memory.fd, 4096, False)
    region = b.domain.register(view, Access.REMOTE_READ)
    a.qp.post_read(1, a.region, 0, 9, region.address, region.rkey)
    assert completion(a.send_cq).ok
    assert got(a, 0, 9) == b"read only"
    with pytest.raises(RdmaError, match="read-only"):
        b.domain.register(view, ALL)


@pytest.mark.parametrize(
    ("access", "position", "length", "message"),
    [
        (ALL, 0, 4097, "part of the memory"),
        (ALL, 4096, None, "part of the memory"),
        (ALL, -1, 10, "part of the memory"),
        (ALL, 0, 0, "part of the memory"),
        (Access.REMOTE_WRITE, 0, None, "LOCAL_WRITE"),
        (64, 0, None, "access flags"),
    ],
)
def test_bad_registrations(
    rig: Rig, access: int, position: int, length: int | None, message: str
) -> None:
    domain = rig.device.alloc_pd()
    with pytest.raises(RdmaError, match=message):
        domain.register(Memory.anonymous(4096), access, position, length)


# -- reading in place: a READ without its copy, where the provider has such a way ------------------
def test_a_view_obeys_the_rules_of_a_read(rig: Rig) -> None:
    a, b = rig.pair()
    data = os.urandom(4096)
    put(b, 1000, data)
    view = a.qp.view(b.address, 65536, b.rkey)
    assert (view is None) == (rig.provider != "shm")
    if view is None:
        return
    assert a.qp.read_in_place(view, b.address + 1000, 4096) == data
    put(b, 1000, data[::-1])
    assert (
        a.qp.read_in_place(view, b.address + 1000, 4096) == data[::-1]
    )  # the memory itself, no copy of it
    for address, length in (
        (b.address - 1, 1),
        (b.address + 65535, 2),
        (b.address + 65536, 1),
        (2**64 - 1, 1),
        (b.address, 65537),
    ):
        with pytest.raises(QueuePairError, match="remote access error"):
            a.qp.read_in_place(view, address, length)
    assert a.qp.read_in_place(view, b.address + 65535, 1) == got(b, 65535, 1)
    assert a.qp.state == State.RTS and a.send_cq.poll() == []
    assert a.qp.view(b.address, 65537, b.rkey) is None
    assert a.qp.view(b.address, 16, b.rkey + 1) is None
    assert b.region.deregister()
    with pytest.raises(QueuePairError, match="remote access error"):
        a.qp.read_in_place(view, b.address + 1000, 4096)
    assert a.qp.view(b.address, 16, b.rkey) is None
    view.close()


def test_no_view_without_the_right_to_read_or_a_peer(rig: Rig) -> None:
    a, b = rig.pair(access=ALL & ~Access.REMOTE_READ)
    assert a.qp.view(b.address, 16, b.rkey) is None
    a, b = rig.pair()
    view = a.qp.view(b.address, 16, b.rkey)
    b.qp.close()
    a.qp.close()
    assert a.qp.view(b.address, 16, b.rkey) is None
    if view is not None:
        with pytest.raises(QueuePairError):
            a.qp.read_in_place(view, b.address, 16)
