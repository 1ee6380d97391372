"""A simulated broker as far as replication needs one: a log directory, a kernel, a produce worker,
and the queue pairs of one simulated device.

Owns what a process owns, and dies with it: `Broker.crash` leaves all of it where it is, and gives
the broker that a restart would find on its disk.  What decides is elsewhere: the machines of
`kdirect.cluster` say when to lead, to follow and to cut (`tests.replication.run`).

A crash leaves what was on the disk: of what was written and not synced, any part may be missing.
"""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from kdirect.broker.followed_head import AckRing, FileGrant, FollowedHead
from kdirect.broker.push import PushLink, PushState
from kdirect.broker.pushed_partition import PushedPartition, RingMemory
from kdirect.broker.worker import ProduceWorker
from kdirect.format import layout
from kdirect.log.config import LogConfig
from kdirect.log.directories import LOCK_FILE
from kdirect.log.manager import LogManager
from kdirect.log.segment_search import locate
from kdirect.model import TopicPartition
from kdirect.rdma.contract import Access, Memory, State
from kdirect.rdma.sim import SimNetwork
from tests.replication.kernel_log import Committed, may_be_compacted
from tests.replication.led_head import LedHead

TP = TopicPartition("t", 0)
RECEIVES = 16
SENDS = 64
QUEUE = 1 << 10
FIRST_PUSHED_FILE = 1 << 15  # below are the ids of the files that producers are granted


class Settings(NamedTuple):
    """Of one schedule."""

    segment_bytes: int
    most_bytes: int  # of one WRITE
    window: int
    committed: Committed | None = None  # where logs are compacted


class Link(NamedTuple):
    """A leader's queue pair to a follower, and what its ring needs."""

    link: PushLink
    domain: Any
    memory: RingMemory
    incarnation: int


class Broker:
    """See the module."""

    def __init__(
        self, number: int, network: SimNetwork, directory: Path, settings: Settings
    ) -> None:
        self.number = number
        self.network = network
        self.directory = directory
        self.settings = settings
        self.device = network.device(str(number))
        self._recv_cq = self.device.create_cq(QUEUE)
        self._send_cq = self.device.create_cq(QUEUE)
        self._link_cq = self.device.create_cq(QUEUE)
        self.worker = ProduceWorker(
            self._recv_cq,
            self._send_cq,
            spin_us=0,
            on_cut=self._cut,
            on_append=_nothing,
            on_head=self._head_event,
            on_broker_requests=_nothing,
            sync=_nothing,
            on_push=self._ring_event,
            on_moved=_nothing,
        )
        config = LogConfig(segment_bytes=settings.segment_bytes, index_interval_bytes=256)
        self.logs = LogManager([directory], config, node_id=number, replicated=True).open()
        self.partition = self.logs.partitions.get(TP) or self._create()
        self.know_committed()
        self._file_ids = itertools.count(FIRST_PUSHED_FILE)
        # of a leader
        queues = (self._send_cq, self._recv_cq, self.worker)
        self.led_head = LedHead(network, self.device, self.logs, queues)
        self.pushed: PushedPartition | None = None
        self.epoch = -1
        self.counts: tuple[frozenset[int], bool] | None = None
        self.links: dict[int, Link] = {}
        self.rings: dict[int, Any] = {}
        self._lost: set[int] = set()  # numbers of queue pairs
        # of a follower
        self.followed: FollowedHead | None = None
        self.followed_as = -1  # the incarnation that its leader was told
        self.refused = False
        self.ahead: list[FileGrant] = []  # granted when the log was rolled, and not sent yet
        self._leader_qp: Any = None
        self._left: list[FollowedHead] = []

    def _create(self) -> Any:
        partition = self.logs.create_partition(TP)
        partition.refuse_appends()
        return partition

    def know_committed(self) -> None:
        if self.settings.committed is not None:
            may_be_compacted(self.partition, self.settings.committed)

    # -- the process -------------------------------------------------------------------------------

    def crash(self, kept: int, chance: random.Random) -> Broker:
        """The process dies, and records at `kept` and above it were not on the disk, or only in
        part; the broker that finds what is there."""
        self.network.kill(self.device)
        after = self.directory.with_name(f"{self.directory.name}x")
        shutil.copytree(self.directory, after, ignore=shutil.ignore_patterns(LOCK_FILE))
        if kept < self.partition.log_end_offset:
            self._damage(after / self.partition.directory.name, kept, chance)
        return Broker(self.number, self.network, after, self.settings)

    def stop(self) -> Broker:
        """The process ends in good order; the broker that finds what it has left."""
        if self.pushed is not None:
            self.resign()
        self.led_head.end()
        self.end_grant()
        self.network.kill(self.device)
        self.logs.close(clean=True)
        return Broker(self.number, self.network, self.directory, self.settings)

    def _damage(self, directory: Path, kept: int, chance: random.Random) -> None:
        segments = self.partition.segments
        number = max(i for i, s in enumerate(segments) if s.base_offset <= kept)
        position, _ = locate(segments[number], kept)
        path = directory / segments[number].path.name
        data = bytearray(path.read_bytes())
        end = len(data) if chance.random() < 0.5 else min(len(data), position + 40)
        # A page that was not written: all of the rest, or a part of one batch.
        begin = position if chance.random() < 0.5 else min(position + chance.randrange(90), end - 1)
        data[begin:end] = bytes(end - begin)
        path.write_bytes(data)
        for later in segments[number + 1 :]:
            if chance.random() < 0.5:
                (directory / later.path.name).unlink()

    def close(self) -> None:
        """The schedule is over, and nothing hangs any more."""
        self.end_grant()
        for link in self.links.values():
            link.link.qp.close()
        self.device.close()
        for head in self._left:
            head.forget()
        if self.pushed is not None:
            self.pushed.close()
        self.led_head.close()
        self.logs.close(clean=False)

    def work(self) -> int:
        """The worker takes what has come; how many completions."""
        self.worker.set_time(self.network.now_ns)
        return int(self.worker.step())

    def _ring_event(self, ring: Any) -> None:
        if self.pushed is not None:
            self.pushed.ring_event(ring)

    def _cut(self, qp_num: int, why: Any) -> None:
        if not self.led_head.cut(qp_num):
            self._lost.add(qp_num)

    def _head_event(self, head: Any) -> None:
        if not self.led_head.head_event(head):
            head.owner.head_event(head)

    # -- a leadership ------------------------------------------------------------------------------

    def lead(self, epoch: int, counts: tuple[frozenset[int], bool]) -> None:
        """Clients may append, and replicas count, from the first record on."""
        self.partition.begin_epoch(epoch, replicated=True)
        self.epoch = epoch
        self.pushed = PushedPartition(
            self.partition, self.worker, most_bytes=self.settings.most_bytes
        )
        self.counts = None
        self.count(counts)
        self.partition.set_replicas({})  # marks count now, and nothing else
        self.led_head.lead(self.partition)

    def count(self, counts: tuple[frozenset[int], bool]) -> None:
        """Whose marks the high watermark waits for, and whether it stands still."""
        assert self.pushed is not None
        if counts != self.counts:
            self.counts = counts
            self.pushed.set_counted(sorted(counts[0]), stands_still=counts[1])
            self.led_head.count(self.partition, too_few=counts[1])

    def resign(self) -> None:
        """What is on its way to followers may land there as long as they let it, and so may what
        producers write here, until their keys end (`LedHead.end`)."""
        assert self.pushed is not None
        self.led_head.resign(self.partition)
        self.partition.follow_leader()
        for follower in list(self.links):
            self.unlink(follower)
        self.pushed.close()
        self.pushed = None

    def open_link(self, follower: int, incarnation: int) -> bytes:
        """A queue pair to a follower, in place of the one before; its address."""
        self.unlink(follower)
        domain = self.device.alloc_pd()
        qp = domain.create_qp(
            self._link_cq, self._recv_cq, max_send_wr=SENDS, max_recv_wr=2 * RECEIVES
        )
        self._opening = (domain, qp, incarnation)
        return bytes(qp.address)

    def link_opened(self, follower: int, address: bytes) -> AckRing:
        domain, qp, incarnation = self._opening
        qp.connect(address, active=True)
        link = PushLink(follower, qp, 2 * RECEIVES, RECEIVES)
        self.worker.add_link(link)
        memory = RingMemory(domain, self.settings.window)
        self.links[follower] = Link(link, domain, memory, incarnation)
        return memory.ring

    def push_to(self, follower: int, grant: FileGrant) -> None:
        """LogError where its log ends in no segment of this one."""
        assert self.pushed is not None
        link = self.links[follower]
        self.rings[follower] = self.pushed.start(link.link, link.memory, grant)

    def confirm(self, follower: int, end: int) -> None:
        """A follower has said otherwise than by a ring that its log ends at `end`."""
        assert self.pushed is not None
        segment = max(
            (s for s in self.partition.segments if s.base_offset <= end),
            key=lambda s: s.base_offset,
        )
        at_end = end == segment.end_offset
        position = segment.size if at_end else locate(segment, end)[0]
        self.worker.confirm(self.pushed.pushing, follower, end, position, segment.base_offset)

    def unlink(self, follower: int) -> None:
        """Push nothing more to a follower, and close its queue pair."""
        assert self.pushed is not None
        ring = self.rings.pop(follower, None)
        if ring is not None:
            self.pushed.stop(ring)
        link = self.links.pop(follower, None)
        if link is not None:
            link.link.qp.close()
            self.worker.remove_link(link.link)
            link.domain.close()

    def lost_links(self) -> list[int]:
        """The followers whose ring or queue pair has ended."""
        lost = []
        for follower, link in self.links.items():
            ring = self.rings.get(follower)
            ended = ring is not None and ring.state != PushState.PUSHING
            if ended or link.link.qp_num in self._lost or link.link.qp.state != State.RTS:
                lost.append(follower)
        self._lost.clear()
        return lost

    # -- a replica ---------------------------------------------------------------------------------

    def accept_link(self, address: bytes) -> bytes:
        """The leader's queue pair, in place of the one before."""
        self.end_grant()
        if self._leader_qp is not None:
            self.worker.remove_peer(self._leader_qp.qp_num)
            self._leader_qp.close()
            if not self.network.halves:  # a copy that hangs is one into this process's mapping
                for head in self._left:
                    head.forget()
                self._left.clear()
        domain = self.device.alloc_pd()
        qp = domain.create_qp(
            self._send_cq,
            self._recv_cq,
            max_send_wr=SENDS,
            max_recv_wr=RECEIVES,
            max_send_bytes=4096,
        )
        qp.connect(address, active=False)
        notices = domain.register(
            Memory.anonymous(RECEIVES * layout.NOTICE_BYTES), Access.LOCAL_WRITE
        )
        self.worker.add_peer(qp, RECEIVES, notices)
        self._leader_domain, self._leader_qp = domain, qp
        return bytes(qp.address)

    def grant(self, ring: AckRing, epoch: int, incarnation: int) -> tuple[FileGrant, Any]:
        """Let the leader write the head, and the file after it."""
        self.refused = False
        self.followed_as = incarnation
        self.followed = FollowedHead(
            self.partition,
            self.worker,
            self._leader_domain,
            self._leader_qp,
            ring,
            window=self.settings.window,
            leader_epoch=epoch,
            new_file_id=lambda: next(self._file_ids),
            on_rolled=self._rolled,
            on_ended=self._grant_refused,
        )
        return self.followed.grant(), self.followed.grant_ahead()

    def _rolled(self, head: FollowedHead) -> None:
        grant = head.grant_ahead()
        if grant is not None:
            self.ahead.append(grant)

    def _grant_refused(self, head: FollowedHead, why: Any) -> None:
        self.refused = True

    def end_grant(self) -> bool:
        """Take the leader's keys away.  False: it is inside of a copy all the same."""
        vacated = True
        if self.followed is not None:
            vacated = self.followed.end()
            self._left.append(self.followed)
            self.followed = None
        self.ahead.clear()
        return vacated

    @property
    def is_written(self) -> bool:
        """Does a leader hold the key of the head, over a queue pair that works?"""
        return self.followed is not None and not self.refused and self._leader_qp.state == State.RTS

    def delete_log(self) -> None:
        """The replica leaves the partition; perhaps it comes back later."""
        self.end_grant()
        if self.pushed is not None:
            self.resign()
        self.led_head.end()
        self.logs.delete_partitions([TP])
        self.partition = self._create()
        self.know_committed()


def _nothing(*_: Any) -> None:
    pass
