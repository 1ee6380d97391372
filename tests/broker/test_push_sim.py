"""Push replication over simulated RNICs, in simulated time: seeded schedules, and what must not
happen even once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.broker.push import PushState
from kdirect.format import layout
from kdirect.rdma.contract import Access, Memory, State
from kdirect.rdma.sim import Faults, SimNetwork
from tests.broker.push_rig import Node, connect, follow
from tests.log.conftest import make_batch

SEGMENT_BYTES = 1 << 15
CORRUPT_MESSAGE = 2
NOW = 1_700_000_000_000


class World:
    """A leader and its followers on one simulated network; each step is drawn from the seed."""

    def __init__(
        self, seed: int, directory: Path, *, followers: int = 2, faults: Faults | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.network = SimNetwork(seed, faults)
        self.nodes = [
            Node(
                n,
                self.network.device(f"broker-{n}"),
                directory / str(n),
                segment_bytes=SEGMENT_BYTES,
            )
            for n in range(followers + 1)
        ]
        self.leader, *self.followers = self.nodes
        self.counted = set(range(1, followers + 1))
        self.slow: set[int] = set()
        self.seen = self.first = 0  # the high watermark: the highest, and that of before
        for follower in self.followers:
            follower.tell = self._teller(follower)

    def _teller(self, follower: Node) -> Callable[[str, Any], None]:
        def tell(what: str, value: Any) -> None:
            if what == "ahead" and value is not None and follower.number in self.leader.rings:
                self.leader.ahead(follower.number, value)

        return tell

    def start(self, *, most_bytes: int = 4096, window: int = 8, epoch: int = 1) -> None:
        self.leader.lead([f.number for f in self.followers], most_bytes, epoch)
        self.epoch, self.window = epoch, window
        self.seen = self.first = self.leader.partition.high_watermark
        for follower in self.followers:
            connect(self.leader, follower)
            follow(self.leader, follower, window=window, epoch=epoch)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def step(self) -> None:
        """One node's worker, or the network, moves."""
        if self.random.random() < 0.5:
            self.network.step()
        else:
            ready = [n for n in self.nodes if n.number not in self.slow]
            node = self.random.choice(ready)
            node.worker.set_time(self.network.now_ns)
            node.worker.step()
        self.check()

    def check(self) -> None:
        """What is readable is everywhere that counts, and never goes back."""
        high = self.leader.partition.high_watermark
        assert high >= self.seen
        self.seen = high
        for follower in self.followers:
            if follower.number in self.counted and high > self.first:
                assert follower.partition.log_end_offset >= high
            assert follower.partition.high_watermark <= max(high, 0), (
                "a follower shows more than its leader"
            )
            assert follower.partition.log_end_offset <= self.leader.partition.log_end_offset

    def run(self, until: Callable[[], bool], most: int = 60_000) -> None:
        for _ in range(most):
            if until():
                return
            self.step()
        raise AssertionError(
            f"did not happen: {[n.state() for n in self.nodes]} {self.leader.ring_debug()}"
        )

    def append(self, count: int, size: int = 100) -> None:
        self.leader.append([make_batch(value_bytes=size, timestamp_ms=NOW) for _ in range(count)])

    def end(self) -> int:
        return self.leader.partition.log_end_offset

    def follow_again(self) -> None:
        """What the control plane does when a ring or a link has ended."""
        for follower in self.followers:
            ring = self.leader.rings[follower.number]
            if ring.state == PushState.PUSHING:
                continue
            if ring.state != PushState.REFUSED or ring.link.qp.state != State.RTS:
                connect(self.leader, follower)
            follow(self.leader, follower, window=self.window, epoch=self.epoch)

    def all_have(self, end: int) -> bool:
        return all(f.partition.log_end_offset == end for f in self.followers)

    def check_equal(self) -> None:
        for follower in self.followers:
            assert follower.sealed() == self.leader.sealed()
            assert follower.head() == self.leader.head()
            assert follower.epochs() == self.leader.epochs()


@pytest.fixture
def world(tmp_path: Path, seed: int) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        options.setdefault("number", seed)
        made.append(World(options.pop("number"), tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


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
    assert not follower.followed.end()  # type: ignore[union-attr]
    end = follower.partition.log_end_offset
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


class Producer:
    """An exclusive RDMA producer of the leader's head, without kdirect's client."""

    ENTRIES = 16

    def __init__(self, w: World) -> None:
        leader = w.leader
        device = w.network.device("producer")
        domain = device.alloc_pd()
        self.ring = domain.register(
            Memory.anonymous(self.ENTRIES * layout.ACK_BYTES),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
        )
        self.source = domain.register(Memory.anonymous(1 << 16), Access.LOCAL_WRITE)
        self.cq = device.create_cq(64)
        self.qp = domain.create_qp(device.create_cq(64), self.cq)
        broker_domain = leader.device.alloc_pd()
        broker_qp = broker_domain.create_qp(leader.send_cq, leader.recv_cq, max_recv_wr=16)
        broker_qp.connect(self.qp.address, active=False)
        self.qp.connect(broker_qp.address, active=True)
        for i in range(self.ENTRIES):
            self.qp.post_recv(i)
        leader.worker.add_peer(
            broker_qp,
            16,
            broker_domain.register(Memory.anonymous(16 * layout.NOTICE_BYTES), Access.LOCAL_WRITE),
        )
        kernel, head = leader.partition.kernel, leader.partition.segments[-1]
        self.head = leader.worker.open_head(
            kernel, head.base_offset, kernel.end_position, 1,
            shared=False, entries=16, hole_timeout_ms=1000,
        )  # fmt: skip
        staging = broker_domain.register(
            Memory.anonymous(self.ENTRIES * layout.ACK_BYTES), Access.LOCAL_WRITE
        )
        assert leader.worker.install(
            1000, self.head, broker_qp, self.ring.address, self.ring.rkey, self.ENTRIES, staging,
            False,
        )  # fmt: skip
        self.region = broker_domain.register(
            Memory.wrap(head.fd, head.address, head.mapped_length, True, head),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
        )
        self.keep = [broker_domain, domain, staging, broker_qp]
        self.position, self.order, self.at, self.acks = kernel.end_position, 0, 0, 0

    def write(self, data: bytes) -> None:
        memoryview(self.source.memory)[self.at : self.at + len(data)] = data
        self.qp.post_write_imm(
            0, self.source, self.at, len(data), self.region.address + self.position,
            self.region.rkey, 1000 << layout.IMM_FILE_ID_SHIFT | self.order,
        )  # fmt: skip
        self.position += len(data)
        self.at += len(data)
        self.order += 1

    def acknowledged(self) -> int:
        for completion in self.cq.poll(16):
            assert completion.ok
            self.acks += completion.imm_data & layout.IMM_ORDER_MASK
        return self.acks
