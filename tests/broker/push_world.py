"""A leader and its followers on one simulated network, and producers of the leader's head."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdirect.broker.push import PushState
from kdirect.format import layout
from kdirect.rdma.contract import Access, Memory, State
from kdirect.rdma.sim import Faults, SimNetwork
from tests.broker.push_rig import Node, connect, follow
from tests.log.conftest import make_batch

SEGMENT_BYTES = 1 << 15
NOW = 1_700_000_000_000


class World:
    """A leader and its followers on one simulated network; each step is drawn from the seed."""

    def __init__(
        self,
        seed: int,
        directory: Path,
        *,
        followers: int = 2,
        faults: Faults | None = None,
        **config: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.network = SimNetwork(seed, faults)
        self.nodes = [
            Node(
                n,
                self.network.device(f"broker-{n}"),
                directory / str(n),
                **{"segment_bytes": SEGMENT_BYTES, **config},
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
            for worker in node.workers:
                worker.set_time(self.network.now_ns)
                worker.step()
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
            in_order = ring.state in (PushState.REFUSED, PushState.ENDED)
            if not in_order or ring.link.qp.state != State.RTS:
                connect(self.leader, follower)
            follow(self.leader, follower, window=self.window, epoch=self.epoch)

    def all_have(self, end: int) -> bool:
        return all(f.partition.log_end_offset == end for f in self.followers)

    def check_equal(self) -> None:
        for follower in self.followers:
            assert follower.sealed() == self.leader.sealed()
            assert follower.head() == self.leader.head()
            assert follower.epochs() == self.leader.epochs()


class Producer:
    """An RDMA producer of the leader's head, which it holds alone, without kdirect's client.
    `acks`: 1, or -1 for all.  `elsewhere`: over another transport than the links'."""

    ENTRIES = 16

    def __init__(self, w: World, *, acks: int = -1, elsewhere: bool = False) -> None:
        leader = w.leader
        here = leader.other if elsewhere else leader
        assert here is not None
        device = w.network.device("producer")
        domain = device.alloc_pd()
        self.ring = domain.register(
            Memory.anonymous(self.ENTRIES * layout.ACK_BYTES),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
        )
        self.source = domain.register(Memory.anonymous(1 << 16), Access.LOCAL_WRITE)
        self.cq = device.create_cq(64)
        self.qp = domain.create_qp(device.create_cq(64), self.cq)
        broker_domain = here.device.alloc_pd()
        broker_qp = broker_domain.create_qp(here.send_cq, here.recv_cq, max_recv_wr=16)
        broker_qp.connect(self.qp.address, active=False)
        self.qp.connect(broker_qp.address, active=True)
        for i in range(self.ENTRIES):
            self.qp.post_recv(i)
        here.worker.add_peer(
            broker_qp,
            16,
            broker_domain.register(Memory.anonymous(16 * layout.NOTICE_BYTES), Access.LOCAL_WRITE),
        )
        kernel, head = leader.partition.kernel, leader.partition.segments[-1]
        self.head = here.worker.open_head(
            kernel, head.base_offset, kernel.end_position, 1,
            shared=False, entries=16, hole_timeout_ms=1000,
        )  # fmt: skip
        self.head.owner = here.worker
        staging = broker_domain.register(
            Memory.anonymous(self.ENTRIES * layout.ACK_BYTES), Access.LOCAL_WRITE
        )
        assert here.worker.install(
            1000, self.head, broker_qp, self.ring.address, self.ring.rkey, self.ENTRIES, staging,
            False, acks == 1,
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

    def flags(self, entry: int) -> int:
        """Of an acknowledgement."""
        at = entry * layout.ACK_BYTES + layout.ACK_FLAGS
        return int.from_bytes(memoryview(self.ring.memory)[at : at + 2], "little")
