"""The queue pairs by which leaders write into other brokers' files (KafkaDirect §4.3.2).

Owns: both ends' part of a link.  There is one for each pair of brokers and direction, and all
partitions that the one follows at the other share it: `LinkToFollower` at the leader,
`LinkToLeader` at the follower, which opens it.

A link is made by `Links`, which ends with the broker whatever has not ended before, and makes none
from then on.  Its own `close` may be called by several: the first one does it, and the others wait.

Memory: what is registered for a link is in the protection domain of its end.  It ends with the
domain, after the queue pair is closed and the worker has forgotten it.  Acknowledgement rings of
grants that have ended rest before they are used again (`kdirect.broker.slices`): a late
acknowledgement may still come.

Threads: constructors, `connect` and `close` may wait, and are called on a thread; the rest on the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kdirect.broker.closing import end_all
from kdirect.broker.engine import Engine
from kdirect.broker.push import PushLink
from kdirect.broker.pushed_partition import RingMemory
from kdirect.broker.segment_leases import SegmentLeases
from kdirect.broker.segment_reader import SegmentReader
from kdirect.broker.slices import Slices
from kdirect.broker.worker import CutReason
from kdirect.errors import ClosedError, TransportError
from kdirect.format import layout
from kdirect.model import TopicPartition
from kdirect.rdma.contract import Access, Memory

log = logging.getLogger("kdirect.member")

# WRITEs under way to one follower, over all partitions; the receives that it keeps posted.
RECEIVES = 256
SENDS = 1024
ACKS = 1024  # receives for acknowledgements at the leader
ACK_BYTES = 4096  # of acknowledgements that a follower sends from its own staging at a time
WINDOW = 32  # WRITEs under way of one partition to one follower
# How long a transport that did not work with a leader's process is not tried.
FIRST_HOLD_S, LONGEST_HOLD_S, HOLD_GROWTH = 10.0, 600.0, 6
CUTS = 3
LOOK_S = 0.002  # between two looks whether WRITEs have arrived


class LinkToFollower:
    """The leader's end.  `number` names it in requests; `incarnation`: of the follower."""

    def __init__(
        self, engine: Engine, number: int, broker: int, incarnation: int, address: bytes
    ) -> None:
        self.engine = engine
        self.number = number
        self.broker = broker
        self.incarnation = incarnation
        self.is_open = True
        self.memories: dict[int, RingMemory] = {}  # of rings, by number
        self.unused: set[int] = set()  # the rings that nobody has begun to push by
        self.rings = 0  # so far
        self._newest: dict[TopicPartition, int] = {}
        self._is_closed = False
        self._closing = threading.Lock()
        self.domain = engine.device.alloc_pd()  # a queue pair that was made ends with it
        self._slices = Slices(self.domain)
        try:
            self.qp = self.domain.create_qp(
                engine.link_cq, engine.recv_cq, max_send_wr=SENDS, max_recv_wr=ACKS
            )
            self.qp.connect(address, active=False)
            self.link = PushLink(broker, self.qp, ACKS, RECEIVES)
            self.leases = SegmentLeases(engine.device, self.domain)
            engine.worker.add_link(self.link)
        except BaseException:
            self.domain.close()
            raise

    @property
    def address(self) -> bytes:
        return bytes(self.qp.address)

    def sends(self) -> tuple[int, int]:
        """WRITEs so far, over all rings; those of them that have arrived, or failed."""
        posted, done = self.engine.worker.sends(self.link)
        return posted, done

    async def arrived(self, within_s: float) -> bool:
        """Wait until all WRITEs so far have arrived, or failed; False: that took longer."""
        posted = self.sends()[0]
        for _ in range(int(within_s / LOOK_S)):
            if not self.is_open or self.sends()[1] >= posted:
                break
            await asyncio.sleep(LOOK_S)
        return not self.is_open or self.sends()[1] >= posted

    def new_ring(self, tp: TopicPartition) -> int:
        """Memory for one more ring of this partition, whose others have ended; its number."""
        before = self.memories.pop(self.newest(tp), None)
        if before is not None:
            before.give_back()
        self.rings += 1
        self._newest[tp] = self.rings
        self.unused.add(self.rings)
        self.memories[self.rings] = RingMemory(self.domain, WINDOW, self._slices)
        return self.rings

    def newest(self, tp: TopicPartition) -> int:
        """Number of the partition's ring; -1: it has none."""
        return self._newest.get(tp, -1)

    def forget(self, tp: TopicPartition) -> None:
        """This broker leads the partition no more, and so its ring has ended: its memory is for
        others, unless one was asked for that is not used yet."""
        if self.newest(tp) not in self.unused:
            memory = self.memories.pop(self._newest.pop(tp, -1), None)
            if memory is not None:
                memory.give_back()

    def close(self) -> None:
        """Once its rings have ended."""
        worker = self.engine.worker
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            end_all(
                f"the link to follower {self.broker}",
                lambda: worker.remove_link(self.link),
                self.qp.close,
                self.leases.close,
                self.domain.close,
                self.memories.clear,
                worker.reap,
            )


class LinkToLeader:
    """The follower's end.  `number` is what the leader calls it, once `connect` has returned;
    `incarnation`: of this broker, `of_leader`: of the leader, as it was known here."""

    def __init__(self, engine: Engine, leader: int, incarnation: int, of_leader: int = -1) -> None:
        self.engine = engine
        self.incarnation = incarnation
        self.key = leader, of_leader, engine.transport  # what `TransportTrials` are about
        self.leader = leader
        self.number = -1
        self.is_open = True
        self.copies: set[Any] = set()  # replicas that use it
        self._has_worked = False
        self.hung: list[Any] = []  # heads into which the leader was inside of a copy
        # What READs the leader's sealed segments, once there was a replica that lacked some.
        self.reader: asyncio.Task[SegmentReader] | None = None
        self._readers: list[SegmentReader] = []  # so far
        self._is_closed = False
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._has_ended = False
        self._is_peer = False
        self.domain = engine.device.alloc_pd()
        self.slices = Slices(self.domain)
        try:
            self.qp = self.domain.create_qp(
                engine.send_cq,
                engine.recv_cq,
                max_send_wr=RECEIVES,
                max_recv_wr=RECEIVES,
                max_send_bytes=ACK_BYTES,
            )
        except BaseException:
            self.domain.close()
            raise

    @property
    def address(self) -> bytes:
        return bytes(self.qp.address)

    @property
    def works(self) -> bool:
        """Has a record come over it?"""
        return self._has_worked or any(copy.has_arrived for copy in self.copies)

    def leave(self, copy: Any) -> None:
        """This replica uses it no longer."""
        self._has_worked = self.works
        self.copies.discard(copy)

    def connect(self, address: bytes) -> None:
        """Reach the leader's end.  TransportError, QueuePairError."""
        notices = Memory.anonymous(RECEIVES * layout.NOTICE_BYTES, "kdirect-notices")
        with self._lock:
            if self._is_closed:
                raise TransportError(f"the link of leader {self.leader} is closed")
            self.engine.worker.add_peer(
                self.qp, RECEIVES, self.domain.register(notices, Access.LOCAL_WRITE)
            )
            self._is_peer = True
        self.qp.connect(address, active=True)

    def new_reader(self) -> SegmentReader:
        """A queue pair for READs, which ends with the link at the latest."""
        with self._lock:
            if self._is_closed:
                raise TransportError(f"the link of leader {self.leader} is closed")
            self._readers = [x for x in self._readers if not x.is_closed]
            reader = SegmentReader(self.engine.device, self.domain)
            self._readers.append(reader)
            return reader

    def close(self) -> None:
        """Once no replica uses it, or with the broker."""
        worker = self.engine.worker
        with self._closing:
            with self._lock:
                self._is_closed = True
            if self._has_ended:
                return
            self._has_ended = True
            steps: list[Callable[[], object]] = []
            if self._is_peer:
                steps.append(partial(worker.remove_peer, self.qp.qp_num))
            steps.append(self.qp.close)
            steps += [reader.close for reader in self._readers]
            steps += [head.forget for head in self.hung]
            steps += [self.hung.clear, self.domain.close, worker.reap]
            end_all(f"the link of leader {self.leader}", *steps)


Link = TypeVar("Link", LinkToFollower, LinkToLeader)


class Links:
    """All ends of links that this broker has made, and that have not ended.  Any thread.  A device
    is waited for without the lock, since `cut` takes it on the event loop."""

    def __init__(self) -> None:
        self._links: set[LinkToFollower | LinkToLeader] = set()
        self._is_closed = False
        self._making = 0
        self._cut_meanwhile: set[tuple[str, int]] = set()  # any queue pairs, while some are made
        self._lock = threading.Condition()

    def make(self, kind: Callable[..., Link], *arguments: Any) -> Link:
        """One more; `close` waits for it, and then closes it.  ClosedError: the broker stops."""
        with self._lock:
            if self._is_closed:
                raise ClosedError("the broker is stopping", hint="ask again when it is back")
            self._making += 1
        link = None
        try:
            link = kind(*arguments)
            return link
        finally:
            with self._lock:
                self._making -= 1
                if link is not None:
                    self._links.add(link)
                    if (link.engine.transport, link.qp.qp_num) in self._cut_meanwhile:
                        link.is_open = False
                if not self._making:
                    self._cut_meanwhile.clear()
                self._lock.notify_all()

    def cut(self, transport: str, qp_num: int) -> None:
        """Its queue pair is broken: whoever has just made it is not to use it."""
        with self._lock:
            if self._making:
                self._cut_meanwhile.add((transport, qp_num))
            for link in self._links:
                if (link.engine.transport, link.qp.qp_num) == (transport, qp_num):
                    link.is_open = False

    def end(self, link: LinkToFollower | LinkToLeader) -> None:
        """Close one."""
        try:
            link.close()
        finally:
            with self._lock:
                self._links.discard(link)

    def close(self) -> None:
        """Close all of them, also those that somebody uses, or is about to close; make no more."""
        with self._lock:
            self._is_closed = True
            self._lock.wait_for(lambda: not self._making)
            links = list(self._links)
        end_all("the links of replication", *(partial(self.end, link) for link in links))

    def __len__(self) -> int:
        return len(self._links)


def opened_link(task: asyncio.Task[LinkToLeader]) -> LinkToLeader | None:
    """The link that a task has opened; None: not yet, or it has failed."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()


def say_cut(which: str, reason: CutReason) -> None:
    """Log that a link is cut."""
    gone = reason is CutReason.DISCONNECTED
    log.log(logging.INFO if gone else logging.WARNING, "the link %s is cut: %s", which, reason.text)


class TransportTrials:
    """Which transports did not work with which process of a leader, and until when none of them is
    tried again: not for `FIRST_HOLD_S`, and for longer each time.  A link that was cut before a
    record came may have been cut for another reason: that has to happen `CUTS` times, one after the
    other.  A transport that has carried a record begins again."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._held: dict[tuple[int, int, str], _Held] = {}
        self._cuts: dict[tuple[int, int, str], int] = {}

    def held(self, leader: int, incarnation: int, transport: str) -> str:
        """Why it is not to be tried now, or an empty string."""
        held = self._held.get((leader, incarnation, transport))
        return held.why if held is not None and self._now() < held.until else ""

    def failed(self, leader: int, incarnation: int, transport: str, why: str) -> float:
        """It did not work; for how long it is not tried.  0: no longer than before, and it was
        said."""
        key = leader, incarnation, transport
        before = self._held.get(key)
        if before is not None and self._now() < before.until:
            return 0.0
        hold = FIRST_HOLD_S if before is None else min(LONGEST_HOLD_S, before.hold * HOLD_GROWTH)
        self._held[key] = _Held(self._now() + hold, hold, why)
        return hold if before is None else 0.0

    def cut(self, leader: int, incarnation: int, transport: str, why: str) -> float:
        """Its link was cut before a record came.  As `failed`."""
        key = leader, incarnation, transport
        self._cuts[key] = self._cuts.get(key, 0) + 1
        return self.failed(*key, why) if self._cuts[key] >= CUTS else 0.0

    def worked(self, leader: int, incarnation: int, transport: str) -> None:
        """A record came over it."""
        self._held.pop((leader, incarnation, transport), None)
        self._cuts.pop((leader, incarnation, transport), None)

    def forget_all_but(self, incarnation_of: Callable[[int], int]) -> None:
        """Other processes may work."""
        self._held = {k: v for k, v in self._held.items() if incarnation_of(k[0]) == k[1]}
        self._cuts = {k: v for k, v in self._cuts.items() if incarnation_of(k[0]) == k[1]}


class _Held(NamedTuple):
    until: float
    hold: float
    why: str


__all__ = [
    "WINDOW",
    "LinkToFollower",
    "LinkToLeader",
    "Links",
    "TransportTrials",
    "opened_link",
    "say_cut",
]
