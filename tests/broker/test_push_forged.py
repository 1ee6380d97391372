"""What one end of a link tells the other that cannot be: it is cut, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kdirect.broker.followed_head import AckRing
from kdirect.format import layout
from kdirect.format.batch import crc32c, stamp
from kdirect.rdma.contract import Access, Memory
from tests.broker.push_world import NOW, World
from tests.log.conftest import make_batch


def post(qp: Any, region: Any, length: int, grant: Any, imm: int, at: int) -> None:
    qp.post_write_imm(0, region, 0, length, grant.address + at, grant.rkey, imm)


class Leader:
    """Another broker, to which a follower has granted its head; it keeps to no rules."""

    def __init__(self, w: World, follower: Any, name: str = "forger") -> None:
        device = w.network.device(name)
        self.domain = device.alloc_pd()
        self.qp = self.domain.create_qp(device.create_cq(64), device.create_cq(64), max_recv_wr=64)
        follower.accept_link(self.qp.address)
        self.qp.connect(follower.leader[1].address, active=True)
        for i in range(64):
            self.qp.post_recv(i)
        self.region = self.domain.register(Memory.anonymous(1 << 16), Access.LOCAL_WRITE)
        acks = self.domain.register(
            Memory.anonymous(2 * 64 * layout.ACK_BYTES), Access.LOCAL_WRITE | Access.REMOTE_WRITE
        )
        self.acks = AckRing(acks.address, acks.rkey, 64)
        self._keep = (device, acks)

    def write(self, data: bytes) -> None:
        memoryview(self.region.memory)[: len(data)] = data


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("order", "BAD_ORDER"),
        ("no bytes", "BAD_LENGTH"),
        ("file", "FORGED_FILE"),
        ("message", "NOT_A_PRODUCE"),
    ],
)
def test_a_leader_that_writes_what_it_may_not_is_cut(
    world: Callable[..., Any], what: str, why: str
) -> None:
    w = world()
    w.start()
    w.append(3)
    w.run(lambda: w.leader.partition.high_watermark == 3)
    follower, other = w.followers
    w.counted = {2}
    w.leader.count([2])
    follower.new_topic("another")
    forger = Leader(w, follower)
    window = 8
    grant = follower.follow(forger.acks._replace(entries=16), window)
    batch = make_batch(timestamp_ms=NOW)
    forger.write(batch)
    imm = grant.file_id << layout.IMM_FILE_ID_SHIFT
    match what:
        case "order":
            post(forger.qp, forger.region, len(batch), grant, imm | 5, 0)
        case "no bytes":
            post(forger.qp, forger.region, 0, grant, imm, 0)
        case "file":
            second = Leader(w, follower, "another forger")
            post(second.qp, second.region, 0, grant, imm, 0)
        case _:
            forger.qp.post_send(0, forger.region, 0, layout.NOTICE_BYTES + 1)
    w.network.run_until_idle()
    # The first leader may have been cut, too: its keys ended while it wrote.
    w.run(lambda: why in [reason for _, reason in follower.cut])
    assert follower.partition.log_end_offset == 0
    w.append(2)
    w.run(lambda: other.partition.log_end_offset == 5)


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_leader_that_uses_more_credits_than_it_was_given_is_cut(
    world: Callable[..., Any], beyond: int
) -> None:
    """Its WRITEs are good, each goes on where the one before ends; only there are more under way
    than the follower has entries to acknowledge."""
    w = world()
    w.start()
    follower, other = w.followers
    w.counted = {2}
    w.leader.count([2])
    w.append(20)
    w.run(lambda: w.leader.partition.high_watermark == 20)
    follower.new_topic("another")
    forger = Leader(w, follower)
    entries = 16
    grant = follower.follow(forger.acks._replace(entries=entries), window=8)
    batches = [bytearray(make_batch(timestamp_ms=NOW)) for _ in range(entries + beyond)]
    for offset, batch in enumerate(batches):
        stamp(batch, offset, 1)
    forger.write(b"".join(batches))
    at = 0
    for order, batch in enumerate(batches):
        forger.qp.post_write_imm(
            0, forger.region, at, len(batch), grant.address + at, grant.rkey,
            grant.file_id << layout.IMM_FILE_ID_SHIFT | order,
        )  # fmt: skip
        at += len(batch)
    w.network.run_until_idle()
    for _ in range(3):
        follower.worker.step()
    assert ("ACK_OVERRUN" in [why for _, why in follower.cut]) == bool(beyond)
    assert follower.partition.log_end_offset == entries, "what it had credits for is taken"
    w.append(2)
    w.run(lambda: other.partition.log_end_offset == w.leader.partition.high_watermark == 22)


def test_a_message_that_is_no_acknowledgement_cuts_the_follower(world: Callable[..., Any]) -> None:
    w = world()
    w.start()
    follower = w.followers[0]
    domain, qp = follower.leader
    region = domain.register(Memory.anonymous(64), Access.LOCAL_WRITE)
    qp.post_send(7 << 32, region, 0, 0)
    w.counted = {2}
    w.run(lambda: bool(w.leader.cut))
    assert [why for _, why in w.leader.cut] == ["NOT_AN_ANSWER"]
    w.leader.count([2])
    w.append(2)
    w.run(lambda: w.leader.partition.high_watermark == 2)


@pytest.mark.parametrize("where", ["between batches", "in no segment", "in the future", "below"])
def test_a_follower_shows_only_what_it_has(world: Callable[..., Any], where: str) -> None:
    """Its leader tells it of a high watermark that is no point of its log."""
    w = world()
    w.start()
    w.append(4)
    w.run(lambda: all(f.partition.high_watermark == 4 for f in w.followers))
    w.leader.count([], True)
    w.append(4)
    w.run(lambda: w.all_have(8))
    follower = w.followers[0]
    size = follower.partition.kernel.end_position // 8
    base, position, offset = {
        "between batches": (0, 6 * size + 1, 6),
        "in no segment": (5, 6 * size, 6),
        "in the future": (0, 90 * size, 90),
        "below": (0, 2 * size, 2),
    }[where]
    image = bytearray(layout.SLOT_BYTES)
    for at, value, length in (
        (layout.SLOT_FLAGS, layout.SLOT_FLAG_ASSIGNED, 2),
        (layout.SLOT_SEGMENT_BASE_OFFSET, base, 8),
        (layout.SLOT_LAST_READABLE_POSITION, position, 8),
        (layout.SLOT_HIGH_WATERMARK, offset, 8),
        (layout.SLOT_UPDATE_COUNT, 1000, 4),
    ):
        image[at : at + length] = value.to_bytes(length, "little")
    guard = crc32c(bytes(image[layout.SLOT_FLAGS :]))
    image[layout.SLOT_GUARD : layout.SLOT_GUARD + 4] = guard.to_bytes(4, "little")
    memoryview(follower.followed._slot.memory)[: layout.SLOT_BYTES] = image
    follower.worker.step()
    # Above its log's end lies all of it: so much a leader may show, for it has more.
    assert follower.partition.high_watermark == (8 if where == "in the future" else 4)
