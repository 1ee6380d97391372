"""Push replication over simulated RNICs, in simulated time: seeded schedules, and what must not
happen even once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker import followed_head
from kdirect.broker.push import PushState
from kdirect.errors import LogError
from kdirect.format import layout
from kdirect.log import growth
from kdirect.rdma.contract import Access, Memory
from kdirect.rdma.sim import Faults
from tests.broker.push_rig import Node, connect
from tests.broker.push_world import NOW, Producer, World
from tests.log.conftest import make_batch

CORRUPT_MESSAGE = 2


def test_records_and_the_high_watermark_reach_followers(world: Callable[..., World]) -> None:
    w = world()
    w.start()
    w.append(30)
    w.run(lambda: w.leader.partition.high_watermark == 30)
    w.run(lambda: all(f.partition.high_watermark == 30 for f in w.followers))
    w.check_equal()


def test_pieces_end_with_batches_and_are_no_larger_than_asked(world: Callable[..., World]) -> None:
    w = world(followers=1)
    w.start(most_bytes=500, window=4)
    w.append(20, size=100)  # of 170 bytes or so: two of them in a WRITE
    w.append(1, size=2000)  # alone
    w.run(lambda: w.all_have(21))
    ring = w.leader.rings[1]
    assert 11 <= ring.posted <= 21
    w.run(lambda: w.leader.partition.high_watermark == 21)


def test_no_more_is_under_way_than_there_are_credits(world: Callable[..., World]) -> None:
    w = world()
    w.start(most_bytes=0, window=4)
    w.slow = {2}
    w.append(50)
    w.run(lambda: w.leader.pushed.marks.ends()[1] == 50)  # type: ignore[union-attr]
    ring = w.leader.rings[2]
    assert ring.posted == 4 and ring.in_flight == 4, "a slow follower holds nobody else"
    assert w.leader.partition.high_watermark == 0
    w.slow = set()
    w.run(lambda: w.leader.partition.high_watermark == 50)
    w.check_equal()


def test_a_roll_waits_for_nobody(world: Callable[..., World]) -> None:
    w = world()
    w.start(window=64)
    w.slow = {1}
    while len(w.leader.partition.segments) < 4:
        w.append(10, size=500)
        w.run(lambda: w.followers[1].partition.log_end_offset == w.end())
    assert w.followers[0].partition.log_end_offset == 0
    w.slow = set()
    w.run(lambda: w.leader.partition.high_watermark == w.end())
    assert len(w.leader.sealed()) >= 3
    w.check_equal()


def test_a_follower_that_begins_where_nothing_is_any_more(world: Callable[..., World]) -> None:
    """The leader deletes segments after the follower has asked, before its grant has come."""
    w = world(followers=1)
    w.leader.lead([1], 4096)
    follower, partition = w.followers[0], w.leader.partition
    while len(partition.segments) < 3:
        w.append(10, size=500)
    connect(w.leader, follower)
    grant = follower.follow(w.leader.ring_for(1, 8), 8, 1)
    w.leader.count([])
    partition.delete_records(partition.segments[1].base_offset)
    with pytest.raises(LogError, match="begins at offset 0, which is not here"):
        w.leader.push_to(1, grant)
    assert w.leader.pushed is not None and w.leader.pushed.marks.ends().get(1, -1) == -1


@pytest.mark.parametrize("where", ["in the future", "between batches", "sequence", "count"])
def test_a_forged_acknowledgement_cuts_the_follower(
    world: Callable[..., World], where: str
) -> None:
    """A follower acknowledges what it never got: nothing of it counts, and its link is cut."""
    w = world()
    w.start()
    w.append(5)
    w.run(lambda: w.leader.partition.high_watermark == 5)
    w.slow = {1}
    w.leader.append([make_batch(10, timestamp_ms=NOW)])
    follower, ring = w.followers[0], w.leader.rings[1]
    domain, qp = follower.leader  # type: ignore[misc]
    region = domain.register(Memory.anonymous(64), Access.LOCAL_WRITE)
    acks = follower.followed._acks  # type: ignore[union-attr]
    entry = ring.acks_read
    forged = {"in the future": 99, "between batches": 11}.get(where, 15)
    data = bytearray(layout.ACK_BYTES)
    sequence = entry + (5 if where == "sequence" else 0)
    data[layout.ACK_SEQUENCE : layout.ACK_SEQUENCE + 4] = sequence.to_bytes(4, "little")
    data[layout.ACK_BASE_OFFSET : layout.ACK_BASE_OFFSET + 8] = forged.to_bytes(8, "little")
    memoryview(region.memory)[: layout.ACK_BYTES] = data
    qp.post_write_imm(
        7 << 32,
        region,
        0,
        layout.ACK_BYTES,
        acks.address + entry * layout.ACK_BYTES,
        acks.rkey,
        ring.file_id << layout.IMM_FILE_ID_SHIFT | (3 if where == "count" else 1),
    )
    w.counted = {2}  # what the forger has is not known
    w.run(lambda: bool(w.leader.cut))
    assert ring.state == PushState.DESYNCHRONISED
    assert [why for _, why in w.leader.cut] == ["DESYNCHRONISED"]
    if where != "count":  # its first entry was true: it has said what it may say
        assert w.leader.partition.high_watermark == 5
    w.leader.count([2])
    w.run(lambda: w.leader.partition.high_watermark == 15)


def test_damaged_bytes_are_refused_and_sent_again(world: Callable[..., World]) -> None:
    w = world()
    w.start()
    w.append(3)
    w.run(lambda: w.leader.partition.high_watermark == 3)
    follower = w.followers[0]
    w.slow = {1}
    w.append(4)
    w.network.run_until_idle()
    segment = follower.partition.segments[-1]
    memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
    view = memoryview(memory)
    view[segment.size + 90] ^= 0x40
    w.slow = set()
    w.run(lambda: w.leader.rings[1].state == PushState.REFUSED)
    assert w.leader.rings[1].error == CORRUPT_MESSAGE
    assert follower.ended == ["REFUSED"] and follower.partition.log_end_offset == 3
    w.follow_again()
    assert bytes(view[segment.size :]).count(0) == len(view) - segment.size, "nothing is left there"
    w.run(lambda: w.follow_again() or w.leader.partition.high_watermark == 7)
    w.check_equal()


def test_a_file_of_which_a_part_was_refused_is_not_rolled(world: Callable[..., World]) -> None:
    """Its last bytes are damaged, and the file after it is written already; the worker tells of the
    one or the other first."""
    w = world(followers=1)
    w.start(window=64, most_bytes=0)
    follower = w.followers[0]
    w.append(1)
    w.run(lambda: w.all_have(1))
    w.slow = {1}
    while len(w.leader.partition.segments) < 2:
        w.append(1, size=4000)
    w.append(1)
    for _ in range(200):
        w.step()
    segment, rolled = follower.partition.segments[-1], w.leader.partition.segments[-1]
    memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
    memoryview(memory)[w.leader.partition.segments[0].size - 10] ^= 0x40
    followed = follower.followed
    assert followed is not None
    told: list[Any] = []
    heads = [followed._next.requests, followed._present.requests]  # type: ignore[union-attr]
    for head in heads:
        head.owner = SimpleNamespace(head_event=told.append)
    follower.worker.set_time(w.network.now_ns)
    follower.worker.step()
    assert {*told} == {*heads}
    for head in heads:
        head.owner = followed
        followed.head_event(head)
    assert follower.ended == ["REFUSED"] and len(follower.partition.segments) == 1
    assert follower.partition.log_end_offset == rolled.base_offset - 1
    w.slow = set()
    w.run(lambda: w.follow_again() or w.leader.partition.high_watermark == w.end())
    w.check_equal()


def test_a_new_epoch_in_the_bytes_is_noted_first(world: Callable[..., World]) -> None:
    """A follower that follows epoch 3 gets records of epochs 1 and 3: each is on disk before its
    first record, and nothing that has arrived is lost."""
    w = world()
    w.leader.partition.set_leader_epoch(1)
    for _ in range(5):
        assert w.leader.partition.append(make_batch(timestamp_ms=NOW)).error == 0
    w.start(epoch=3, most_bytes=0)
    w.append(5)
    w.run(lambda: w.leader.partition.high_watermark == 10)
    w.check_equal()
    assert w.followers[0].partition.end_offset_for_epoch(1) == (1, 5)


def test_records_of_a_later_epoch_than_granted_are_not_taken(world: Callable[..., World]) -> None:
    w = world()
    w.start(epoch=1)
    w.append(2)
    w.run(lambda: w.leader.partition.high_watermark == 2)
    w.leader.partition.set_leader_epoch(2)
    w.append(2)
    w.run(lambda: all(f.ended for f in w.followers))
    assert all(f.ended == ["FENCED"] for f in w.followers)
    assert w.all_have(2) and w.leader.partition.high_watermark == 2
    w.epoch = 2
    w.run(lambda: all(r.state != PushState.PUSHING for r in w.leader.rings.values()))
    w.run(lambda: w.follow_again() or w.leader.partition.high_watermark == 4)
    w.check_equal()


def test_a_late_write_of_a_deposed_leader_reaches_nothing(world: Callable[..., World]) -> None:
    """A WRITE that has stopped half-way finishes after the replica has ended the grant: the bytes
    do not get into the log, whoever writes that file next."""
    w = world(followers=1)
    w.start()
    w.append(2)
    w.run(lambda: w.all_have(2))
    ring, follower = w.leader.rings[1], w.followers[0]
    w.network.hold(ring.link.qp)
    w.append(1)
    w.network.run_until_idle()
    bases = follower.state()["segments"]
    assert not follower.followed.end()  # type: ignore[union-attr]
    end = follower.partition.log_end_offset
    assert follower.state()["segments"] == bases, "leaders alone decide where segments begin"
    assert follower.partition.append(make_batch(timestamp_ms=NOW)).error == 0
    before = follower.head()
    w.network.release()
    w.network.run_until_idle()
    for node in w.nodes:
        node.worker.step()
    assert follower.partition.log_end_offset == end + 1 and follower.head() == before
    follower.partition.read(end, 1 << 16)


def test_a_torn_slot_is_not_believed(world: Callable[..., World]) -> None:
    w = world(followers=1, faults=Faults(tear=0.5))
    w.start()
    for _ in range(40):
        w.append(1)
        for _ in range(10):
            w.step()
    w.run(lambda: w.followers[0].partition.high_watermark == 40)


def test_producers_hear_when_the_replicas_have_it(world: Callable[..., World]) -> None:
    """An RDMA producer's acknowledgements wait in C until the high watermark has passed their
    records, and one that asked for nothing of replicas would not."""
    w = world()
    w.start()
    producer = Producer(w)
    w.slow = {1}
    for _ in range(5):
        producer.write(make_batch(timestamp_ms=NOW))
    w.run(lambda: w.leader.pushed.marks.ends()[2] == 5)  # type: ignore[union-attr]
    w.network.run_until_idle()
    assert producer.acknowledged() == 0 and w.end() == 5
    w.slow = set()
    w.run(lambda: producer.acknowledged() == 5)
    producer.write(make_batch(timestamp_ms=NOW))
    w.run(lambda: producer.acknowledged() == 6)
    assert w.leader.partition.high_watermark == 6


def test_a_wait_for_the_high_watermark_is_told_once(world: Callable[..., World]) -> None:
    w = world()
    w.start()
    w.leader.worker.watch_pushing(w.leader.pushed.pushing)  # type: ignore[union-attr]
    w.followers[0].worker.watch_followed(w.followers[0].followed._present.requests)  # type: ignore
    w.append(10)
    w.run(lambda: w.leader.partition.high_watermark == 10)
    w.run(lambda: w.followers[0].partition.high_watermark == 10)
    assert w.leader.moved == [w.leader.pushed.pushing]  # type: ignore[union-attr]
    assert len(w.followers[0].moved) == 1


def test_more_is_wished_for_once_when_half_is_written(world: Callable[..., World]) -> None:
    w = world(followers=1)
    follower, leader = w.followers[0], w.leader
    leader.lead([1], 4096, 1)
    connect(leader, follower)
    w.seen = w.first = leader.partition.high_watermark
    grant = follower.follow(leader.ring_for(1, 8), 8)
    leader.push_to(1, grant._replace(length=1 << 13))
    ring = leader.rings[1]
    w.append(10)
    w.run(lambda: w.all_have(10))
    assert ring.pushed[1] < 1 << 12 and not ring.take_wish()
    w.append(20)
    w.run(lambda: w.all_have(30))
    assert 1 << 12 < ring.pushed[1] < 1 << 13 and not ring.wants_file
    assert ring.take_wish() and ring.has_wished and not ring.take_wish()
    leader.worker.renew_target(
        leader.pushed.pushing, ring, grant.file_id, grant.address, grant.rkey, grant.length
    )
    assert not ring.has_wished


def test_a_busy_replica_takes_a_large_segment_in_steps(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is granted is zeroed first, and a producer may wait for that."""
    most, step = 4 << 20, 256 << 10
    monkeypatch.setattr(followed_head, "FIRST_BYTES", 1 << 16)
    for module in (followed_head, growth):
        monkeypatch.setattr(module, "STEP_BYTES", step)
    w = world(followers=1, segment_bytes=most)
    follower, leader = w.followers[0], w.leader
    leader.lead([1], 4096, 1)
    connect(leader, follower)
    lengths = [follower.follow(leader.ring_for(1, 8), 8).length]
    assert follower.followed is not None
    while follower.followed.may_grow:
        grant = follower.followed.grow()
        assert grant is not None
        lengths.append(grant.length)
    assert lengths[0] == 1 << 16 and lengths[-1] == most
    assert all(0 < after - before <= step for before, after in pairwise(lengths))
    assert lengths[1] > lengths[0] + (step >> 1)


def test_a_ring_that_wants_more_again_is_told_of_at_once(world: Callable[..., World]) -> None:
    """Nobody else wakes the worker while producers wait for just that."""
    w = world(followers=1)
    follower, leader = w.followers[0], w.leader
    leader.lead([1], 4096, 1)
    connect(leader, follower)
    w.seen = w.first = leader.partition.high_watermark
    grant = follower.follow(leader.ring_for(1, 8), 8)
    leader.push_to(1, grant._replace(length=1 << 12))
    ring = leader.rings[1]
    w.append(100)
    w.run(lambda: ring.wants_file and ring.acknowledged == ring.posted)
    leader.recv_cq.wait(0)
    assert not leader.recv_cq.woken
    leader.worker.renew_target(
        leader.pushed.pushing, ring, grant.file_id, grant.address, grant.rkey, 1 << 13
    )
    assert ring.wants_file and leader.recv_cq.woken
    leader.worker.renew_target(
        leader.pushed.pushing, ring, grant.file_id, grant.address, grant.rkey, grant.length
    )
    w.run(lambda: w.all_have(100))


@pytest.mark.parametrize("number", range(25))
def test_schedules(world: Callable[..., World], number: int) -> None:
    """Appends, rolls, slow followers, torn and delayed WRITEs, damage, lost links, in any order."""
    w = world(number=number, faults=Faults(tear=0.1))
    r = w.random
    w.start(most_bytes=r.choice([0, 300, 4096, 65536]), window=r.choice([1, 4, 32]))
    for _ in range(60):
        what = r.random()
        if what < 0.5:
            w.append(r.randrange(1, 12), size=r.choice([1, 50, 700]))
        elif what < 0.6:
            w.slow = {r.choice([1, 2])} if not w.slow else set()
        elif what < 0.65:
            w.network.disconnect(r.choice(list(w.leader.rings.values())).link.qp)
        elif what < 0.7:
            _damage(w, r.choice(w.followers))
        for _ in range(r.randrange(40)):
            w.step()
        w.follow_again()
    w.slow = set()

    def done() -> bool:
        w.follow_again()
        return w.all_have(w.end()) and w.leader.partition.high_watermark == w.end()

    w.run(done)
    w.check_equal()


def _damage(w: World, follower: Node) -> None:
    """A byte changes that has arrived and is not committed."""
    segment = follower.partition.segments[-1]
    if not segment.is_head:
        return
    view = memoryview(
        Memory.wrap(segment.fd, segment.address, segment.mapped_length, True, segment)
    )
    at = segment.size + 40
    if at < len(view) and any(view[segment.size : at]):
        view[at] ^= 1
