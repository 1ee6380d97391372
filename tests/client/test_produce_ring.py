"""The ring with credits that producers use and brokers will: WRITEs, credits, completions, failure.
Over the software RNIC and the simulated network."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pytest

from kdirect.errors import QueuePairError
from kdirect.format import layout
from kdirect.rdma.contract import Opcode
from kdirect.wire.ack_router import AckRouter
from kdirect.wire.produce_ring import ProduceRing
from tests.rdma.conftest import End, Rig

ID = 7
CREDITS = 4
SLOT_BYTES = 64


@pytest.fixture(params=["shm", "sim"])
def rig(request: pytest.FixtureRequest, seed: int):
    made = Rig(request.param, seed)
    yield made
    made.close()


class Pair:
    """A ring on one end; the other end takes its WRITEs when told to, and gives credits back."""

    def __init__(self, rig: Rig, *, limit: int = 64, window: int = CREDITS, receives: int = 64):
        self.near: End
        self.near, self.far = rig.pair()
        self.router = AckRouter(self.near.qp, self.near.send_cq, self.near.recv_cq, 64, limit)
        self.ring = ProduceRing(self.router, self.near.qp, window)
        self.router.attach(ID, self.ring)
        self.expect(receives)
        self.arrived: list[tuple[int, int, bytes]] = []  # file id, order, the bytes of their slot

    def expect(self, writes: int) -> None:
        for _ in range(writes):
            self.far.qp.post_recv(0)

    def post(self, text: bytes, file_id: int = ID, ring: ProduceRing | None = None) -> bool:
        """WRITE `text` into the slot of the far end that its number names."""
        ring = ring or self.ring
        slot = (ring.posted % ring.window + (file_id - ID) * ring.window) * SLOT_BYTES
        if ring.posted - ring.freed < ring.window:  # the source is this side's again
            self.near.bytes[slot : slot + len(text)] = text
        return ring.post(
            self.near.region,
            slot,
            len(text),
            self.far.address + slot,
            self.far.rkey,
            file_id,
            ring.posted & 0xFFFF,
        )

    def give_back(self, credits: int, file_id: int = ID) -> None:
        self.far.qp.post_write_imm(
            1,
            self.far.region,
            0,
            0,
            self.near.address,
            self.near.rkey,
            file_id << layout.IMM_FILE_ID_SHIFT | credits,
        )

    def work(self) -> None:
        for cq in (self.near.send_cq, self.far.send_cq, self.far.recv_cq):
            cq.wait(1)
        self.router.drain()
        for completion in self.far.recv_cq.poll():
            if completion.ok and completion.opcode == Opcode.RECV_RDMA_WITH_IMM:
                order = completion.imm_data & 0xFFFF
                start = order % self.ring.window * SLOT_BYTES
                data = bytes(self.far.bytes[start : start + completion.byte_len])
                self.arrived.append((completion.imm_data >> 16, order, data))
        self.far.send_cq.poll()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.counts()
            self.work()

    def counts(self) -> tuple[int, int, int, int]:
        ring = self.ring
        return ring.posted, ring.completed, ring.acknowledged, ring.freed


def test_a_write_needs_a_credit_and_the_peer_gives_it_back(rig: Rig) -> None:
    pair = Pair(rig, window=16)
    pair.ring.credits = CREDITS
    assert [pair.post(b"%d" % i) for i in range(CREDITS + 1)] == [True] * CREDITS + [False]
    pair.until(lambda: len(pair.arrived) == CREDITS and pair.ring.completed == CREDITS)
    assert pair.arrived == [(ID, i, b"%d" % i) for i in range(CREDITS)]
    assert pair.counts() == (4, 4, 0, 0)  # what is not acknowledged keeps its slot
    assert not pair.post(b"no credit")
    pair.give_back(3)  # in one message
    pair.until(lambda: pair.ring.acknowledged == 3)
    assert pair.counts() == (4, 4, 3, 3) and pair.ring.in_flight == 1
    assert [pair.post(b"more") for _ in range(CREDITS)] == [True] * 3 + [False]


def test_slots_are_used_again_for_ever(rig: Rig) -> None:
    pair = Pair(rig)
    for i in range(10 * CREDITS):
        while not pair.post(b"%d" % i):
            pair.work()
        pair.expect(1)
        pair.until(lambda i=i: len(pair.arrived) == i + 1)
        pair.give_back(1)
    pair.until(lambda: pair.ring.freed == 10 * CREDITS)
    assert [data for _, _, data in pair.arrived] == [b"%d" % i for i in range(10 * CREDITS)]
    assert pair.ring.wait_completed() and pair.router.requests_under_way == 0


def test_a_slot_is_free_when_its_write_is_both_completed_and_acknowledged(rig: Rig) -> None:
    """An acknowledgement may overtake the completion: the source is the transport's until then."""
    pair = Pair(rig, receives=0)  # a WRITE that finds no receive stays under way
    assert [pair.post(b"%d" % i) for i in range(CREDITS)] == [True] * CREDITS
    pair.give_back(CREDITS)
    pair.until(lambda: pair.ring.acknowledged == CREDITS)
    assert pair.counts() == (4, 0, 4, 0)
    assert not pair.post(b"no slot"), "there are credits, but no slot"
    assert not pair.ring.wait_completed(0)
    pair.expect(CREDITS + 1)
    pair.until(lambda: pair.ring.freed == CREDITS)
    assert pair.post(b"goes")


def test_more_credits_than_were_taken_are_not_believed(rig: Rig) -> None:
    pair = Pair(rig)
    assert pair.post(b"one")
    pair.give_back(2)
    pair.until(lambda: pair.ring.desynchronised)
    assert pair.ring.acknowledged == 0 and pair.ring.in_flight == 1


def test_rings_of_one_queue_pair_share_its_receives(rig: Rig) -> None:
    pair = Pair(rig, limit=3)
    other = ProduceRing(pair.router, pair.near.qp, CREDITS)
    pair.router.attach(ID + 1, other)
    assert [pair.post(b"a"), pair.post(b"b"), pair.post(b"c", ID + 1, other)] == [True] * 3
    assert not pair.post(b"d") and not pair.post(b"d", ID + 1, other)
    pair.give_back(1, ID + 1)
    pair.until(lambda: other.acknowledged == 1)
    assert pair.ring.acknowledged == 0
    assert pair.post(b"d") and not pair.post(b"e")


def test_the_end_of_the_queue_pair_ends_the_ring(rig: Rig) -> None:
    pair = Pair(rig, receives=0)
    assert pair.post(b"one")
    pair.far.qp.close()
    pair.until(lambda: bool(pair.router.broken))
    with pytest.raises(QueuePairError, match="the queue pair is broken"):
        pair.post(b"two")
    assert (pair.ring.posted, pair.ring.in_flight) == (1, 1)  # the owner knows what to repeat


def test_a_notice_says_what_the_immediate_data_would(rig: Rig) -> None:
    pair = Pair(rig, receives=0)
    notices = pair.near.domain.register(
        type(pair.near.memory).anonymous(CREDITS * layout.NOTICE_BYTES), 1
    )
    pair.ring.set_notices(notices)
    start = 4096
    for i in range(3):
        pair.far.qp.post_recv(i, pair.far.region, start + i * 64, 64)
    assert [pair.post(b"x" * (10 + i)) for i in range(3)] == [True] * 3
    pair.until(lambda: pair.ring.completed == 3)  # a WRITE and its notice count as one
    assert bytes(pair.far.bytes[:10]) == b"x" * 10
    seen = [bytes(pair.far.bytes[start + i * 64 :][: layout.NOTICE_BYTES]) for i in range(3)]
    for i, notice in enumerate(seen):
        (file_id,) = struct.unpack_from("<H", notice, layout.NOTICE_FILE_ID)
        (order,) = struct.unpack_from("<H", notice, layout.NOTICE_ORDER)
        (length,) = struct.unpack_from("<I", notice, layout.NOTICE_LENGTH)
        assert (file_id, order, length) == (ID, i, 10 + i)


def test_a_source_is_checked(rig: Rig) -> None:
    pair = Pair(rig)
    for start, length in ((1 << 16, 1), ((1 << 16) - 3, 4), (2**64 - 1, 2)):
        with pytest.raises(ValueError, match="outside of its source"):
            pair.ring.post(pair.near.region, start, length, pair.far.address, pair.far.rkey, ID)
    assert pair.ring.posted == 0
