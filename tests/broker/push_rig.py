"""What the tests of push replication share: brokers' cores (produce worker, log, queue pairs),
without the control plane, in this process or in processes of their own.

Run as a program, this file is one such process: it executes the calls it is sent.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kdirect.broker import followed_head
from kdirect.broker.followed_head import AckRing, FileGrant, FollowedHead
from kdirect.broker.push import PushLink, PushState
from kdirect.broker.pushed_partition import PushedPartition, RingMemory
from kdirect.broker.worker import ProduceWorker
from kdirect.format import layout
from kdirect.log.config import LogConfig
from kdirect.log.kernel_producers import known_producers
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from kdirect.rdma.contract import Access, Memory

TP = TopicPartition("t", 0)
RECEIVES = 64

followed_head.FIRST_BYTES = 1 << 20  # nobody here grants more to a ring that wants it


class OtherTransport:
    """The queues and the worker of one more transport of a broker."""

    def __init__(self, device: Any, sync: Callable[[Any], None]) -> None:
        self.device = device
        self.recv_cq = device.create_cq(1 << 12)
        self.send_cq = device.create_cq(1 << 12)
        self.worker = ProduceWorker(
            self.recv_cq,
            self.send_cq,
            on_cut=lambda qp_num, why: None,
            on_append=lambda head: None,
            on_head=lambda head: None,
            on_broker_requests=lambda head, answers: None,
            sync=sync,
        )


class Node:
    """One broker's core.  `device`: its RNIC.  `run`: with a thread for its worker; else `step`."""

    def __init__(
        self, number: int, device: Any, directory: Path, *, spin_us: int = 0, **config: Any
    ) -> None:
        self.number = number
        self.device = device
        self.recv_cq = device.create_cq(1 << 12)
        self.send_cq = device.create_cq(1 << 12)
        self.link_cq = device.create_cq(1 << 12)
        self.cut: list[tuple[int, str]] = []
        self.ended: list[str] = []
        self.moved: list[Any] = []
        self.on_head: list[Any] | None = None  # heads of producers that have ended, if anybody asks
        self.asked: list[Any] = []  # heads whose acknowledgements wait for the disk
        self.worker = ProduceWorker(
            self.recv_cq,
            self.send_cq,
            spin_us=spin_us,
            on_cut=lambda qp_num, why: self.cut.append((qp_num, why.name)),
            on_append=lambda head: None,
            on_head=self._head_event,
            on_broker_requests=lambda head, answers: None,
            sync=self.asked.append,
            on_push=self._ring_event,
            on_moved=self.moved.append,
        )
        self.workers = [self.worker]
        self.other: OtherTransport | None = None
        self.logs = LogManager([directory], LogConfig(**config), node_id=number).open()
        self.partition = self.logs.partitions.get(TP) or self.logs.create_partition(TP)
        self.tell: Callable[[str, Any], None] = lambda what, value: None
        self._file_ids = itertools.count(1)
        self._domains: list[Any] = []
        self._thread: threading.Thread | None = None
        # of a leader
        self.pushed: PushedPartition | None = None
        self.links: dict[int, tuple[PushLink, Any]] = {}
        self.rings: dict[int, Any] = {}
        # of a follower
        self.leader: tuple[Any, Any] | None = None
        self.followed: FollowedHead | None = None
        self._followed: list[FollowedHead] = []

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> None:
        self._thread = threading.Thread(target=self.worker.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self.followed is not None:
            self.followed.end()
        if self._thread is not None:
            self.worker.stop()
            self._thread.join(10)
        for _, qp in self._domains:  # nothing is under way any more
            qp.close()
        for followed in self._followed:
            followed.forget()
        if self.pushed is not None:
            self.pushed.close()
        self.logs.close(clean=False)
        self.device.close()
        if self.other is not None:
            self.other.device.close()

    # -- a link: the leader's end, then the follower's, then the leader's again --------------------

    def open_link(self, follower: int) -> bytes:
        domain = self.device.alloc_pd()
        qp = domain.create_qp(self.link_cq, self.recv_cq, max_send_wr=256, max_recv_wr=256)
        self._domains.append((domain, qp))
        self._opening = (follower, domain, qp)
        return bytes(qp.address)

    def accept_link(self, address: bytes) -> bytes:
        domain = self.device.alloc_pd()
        qp = domain.create_qp(
            self.send_cq, self.recv_cq, max_send_wr=256, max_recv_wr=RECEIVES, max_send_bytes=4096
        )
        qp.connect(address, active=False)
        notices = domain.register(
            Memory.anonymous(RECEIVES * layout.NOTICE_BYTES), Access.LOCAL_WRITE
        )
        self.worker.add_peer(qp, RECEIVES, notices)
        self._domains.append((domain, qp))
        self.leader = (domain, qp)
        return bytes(qp.address)

    def link_opened(self, address: bytes) -> None:
        follower, domain, qp = self._opening
        qp.connect(address, active=True)
        link = PushLink(follower, qp, 256, RECEIVES)
        self.links[follower] = (link, domain)
        self.worker.add_link(link)

    # -- a leadership ------------------------------------------------------------------------------

    def lead(self, counted: list[int], most_bytes: int, epoch: int = 1) -> None:
        if self.partition.leader_epoch < epoch:
            self.partition.set_leader_epoch(epoch)
        self.partition.ensure_head(1)
        self.pushed = PushedPartition(self.partition, self.worker, most_bytes=most_bytes)
        self.pushed.set_counted(counted)

    def flush(self) -> None:
        """What the broker does when it was asked to; whoever else flushes."""
        asked = list(self.asked)
        self.asked.clear()
        self.partition.flush()
        for head in asked:
            head.owner.gate_moved(head)

    def open_other(self, device: Any) -> None:
        """Producers come over another transport, too."""
        self.other = OtherTransport(device, self.asked.append)
        self.workers.append(self.other.worker)
        assert self.pushed is not None
        self.pushed.also_written_by(self.other.worker)

    def count(self, brokers: list[int], stands_still: bool = False) -> None:
        assert self.pushed is not None
        self.pushed.set_counted(brokers, stands_still=stands_still)

    def ring_for(self, follower: int, window: int) -> AckRing:
        memory = RingMemory(self.links[follower][1], window)
        self.memory_of_ring = memory
        return memory.ring

    def push_to(self, follower: int, grant: FileGrant) -> None:
        assert self.pushed is not None
        grant = FileGrant(*grant)
        if follower in self.rings:
            self.pushed.stop(self.rings.pop(follower))
        self.rings[follower] = self.pushed.start(
            self.links[follower][0], self.memory_of_ring, grant
        )

    def ahead(self, follower: int, grant: FileGrant) -> bool:
        assert self.pushed is not None
        return self.pushed.grant_ahead(self.rings[follower], FileGrant(*grant))

    def append(self, batches: list[bytes]) -> list[int]:
        """As plain Kafka produce does, on a thread that is not the worker's; base offsets."""
        offsets = []
        for batch in batches:
            result = self.partition.append(batch)
            assert result.error == 0, result
            offsets.append(result.base_offset)
            assert self.pushed is not None
            self.pushed.push()
        return offsets

    def state(self) -> dict[str, Any]:
        p = self.partition
        return {
            "end": p.log_end_offset,
            "high_watermark": p.high_watermark,
            "segments": [s.base_offset for s in p.segments],
            "rings": {b: PushState(r.state).name for b, r in self.rings.items()},
            "errors": {b: r.error for b, r in self.rings.items()},
            "ends": self.pushed.marks.ends() if self.pushed is not None else {},
            "cut": [why for _, why in self.cut],
            "ended": list(self.ended),
        }

    def ring_debug(self) -> Any:
        return [
            (
                b,
                r.pushed,
                r.posted,
                r.acknowledged,
                r.completed,
                r.freed,
                r.confirmed,
                r.link.broken,
                r.wants_file,
                r.wants_source,
                r.link.requests_under_way,
            )
            for b, r in self.rings.items()
        ]

    def _head_event(self, head: Any) -> None:
        if self.on_head is None:
            head.owner.head_event(head)
        else:
            self.on_head.append(head)

    def _ring_event(self, ring: Any) -> None:
        assert self.pushed is not None
        self.pushed.ring_event(ring)
        self.tell("ring", (ring.broker, ring.state))

    def new_topic(self, topic: str) -> None:
        """From here on the node's partition is the first of this topic."""
        if self.followed is not None:
            self.followed.end()
            self.followed = None
        tp = TopicPartition(topic, 0)
        self.partition = self.logs.partitions.get(tp) or self.logs.create_partition(tp)

    # -- a replica ---------------------------------------------------------------------------------

    def follow(self, ring: AckRing, window: int, epoch: int = 1) -> FileGrant:
        assert self.leader is not None
        if self.followed is not None:
            self.followed.end()
        self.partition.set_replicas({0: 0})  # only the leader moves the high watermark
        domain, qp = self.leader
        self.followed = FollowedHead(
            self.partition,
            self.worker,
            domain,
            qp,
            AckRing(*ring),
            window=window,
            leader_epoch=epoch,
            new_file_id=lambda: next(self._file_ids),
            on_rolled=lambda head: self.tell("ahead", head.grant_ahead()),
            on_ended=self._followed_ended,
        )
        self._followed.append(self.followed)
        return self.followed.grant()

    def _followed_ended(self, head: FollowedHead, why: Any) -> None:
        self.ended.append(why.name)
        self.tell("ended", why.name)

    def grant_ahead(self) -> FileGrant | None:
        assert self.followed is not None
        return self.followed.grant_ahead()

    # -- what is in the log ------------------------------------------------------------------------

    def sealed(self) -> dict[int, bytes]:
        """The bytes of records of every segment but the last."""
        return {s.base_offset: _bytes(s) for s in self.partition.segments[:-1]}

    def head(self) -> bytes:
        return _bytes(self.partition.segments[-1])

    def epochs(self) -> list[tuple[int, int]]:
        return [self.partition.end_offset_for_epoch(e) for e in range(8)]

    def producers(self) -> Any:
        return known_producers(self.partition.kernel)


def _bytes(segment: Any) -> bytes:
    segment.acquire()
    try:
        memory = Memory.wrap(segment.fd, segment.address, segment.mapped_length, False, segment)
        return bytes(memoryview(memory)[: segment.size])
    finally:
        segment.release()


def connect(leader: Any, follower: Any) -> None:
    """A queue pair from a leader to a follower; both are nodes, or stand for nodes elsewhere."""
    address = follower.accept_link(leader.open_link(follower.number))
    leader.link_opened(address)


def follow(leader: Any, follower: Any, *, window: int = 32, epoch: int = 1) -> None:
    """The follower grants its head, and the file after it, to the leader, which pushes to it."""
    ring = leader.ring_for(follower.number, window)
    leader.push_to(follower.number, follower.follow(ring, window, epoch))
    leader.ahead(follower.number, follower.grant_ahead())


# -- in processes of their own ---------------------------------------------------------------------


class RemoteNode:
    """A node in a process of its own; its methods are called over a pipe.  `news`: what it tells of
    its own accord, as (what, value), handed to `on_news` on a thread."""

    def __init__(self, number: int, directory: Path, **options: Any) -> None:
        self.number = number
        self.calls, theirs = multiprocessing.Pipe()
        self.news, their_news = multiprocessing.Pipe()
        fds = [theirs.fileno(), their_news.fileno()]
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps([number, str(directory), options, fds])],
            pass_fds=fds,
        )
        theirs.close()
        their_news.close()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls.send((name, arguments, options))
                ok, value = self.calls.recv()
            if not ok:
                raise AssertionError(f"node {self.number}: {name}:\n{value}")
            return value

        return call

    def on_news(self, handle: Callable[[str, Any], None]) -> None:
        def listen() -> None:
            while True:
                try:
                    what, value = self.news.recv()
                except (EOFError, OSError):
                    return
                handle(what, value)

        threading.Thread(target=listen, daemon=True).start()

    def end(self) -> None:
        try:
            self.close()
        except (AssertionError, EOFError, OSError):
            pass
        self.calls.close()
        self.process.kill()
        self.process.wait()
        self.news.close()


def main() -> None:
    from kdirect.rdma import open_device

    number, directory, options, fds = json.loads(sys.argv[1])
    calls, news = (Connection(fd) for fd in fds)
    node = Node(number, open_device("shm"), Path(directory), **options)
    node.tell = lambda what, value: news.send((what, _plain(value)))
    node.run()
    while True:
        try:
            name, arguments, given = calls.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, _plain(getattr(node, name)(*arguments, **given)))
        except BaseException:
            answer = (False, traceback.format_exc())
        calls.send(answer)
        if name == "close":
            return


def _plain(value: Any) -> Any:
    """Grants and rings as tuples: this program's classes are not those of the one that calls."""
    return tuple(value) if isinstance(value, FileGrant | AckRing) else value


if __name__ == "__main__":
    main()
