"""Producers that write the leader's head over RDMA, one record a request, and what they are told.

They are idempotent: what a producer has no answer to it sends again to the next leader, with the
same sequence number.  With acks=all it neither loses nor doubles anything.  One with acks=1 hears
from the leader alone; what that loses is lost, and then it goes on as another producer.

A producer asks whoever believes to lead, deposed or not; the queue pair, the request for access and
its answer are made at once, but the producer may look at the answer at any later time.  Its WRITEs
are as late and torn as all, and it may stop inside of one.

What is checked when a producer hears of a record: with acks=all, that a leader has shown it, at the
offset that the acknowledgement says; with acks=1, that the leader has it there, if it still leads.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kdirect.errors import KdirectError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.rdma.contract import Access, Memory, State
from tests.cluster.model_log import Record
from tests.cluster.world import Broken
from tests.replication.kernel_log import ANY_EPOCH, batch_of
from tests.replication.led_head import IN_FLIGHT

if TYPE_CHECKING:
    from kdirect.broker.grants import Peer
    from tests.replication.broker import Broker
    from tests.replication.replicas import Replicas

ENTRIES = 16  # of an acknowledgement ring: twice what may be under way
RECORD_BYTES = 1024  # no batch is longer
MOST = 32  # records of one producer
FIRST = 10_000  # the numbers of producer n begin at (n + 1) times this
FIRST_ID = 100  # of producers; see `kernel_log.PRODUCER`


class Sent(NamedTuple):
    """A record that is not acknowledged."""

    number: int
    data: bytes


class Link(NamedTuple):
    """A queue pair to a broker, and what the producer sends from."""

    broker: Broker
    peer: Peer
    domain: Any
    qp: Any
    cq: Any
    source: Any


class Grant:
    """What a producer was granted, and how far it has written."""

    def __init__(self, ring: Any, epoch: int) -> None:
        self.ring = ring
        self.epoch = epoch
        self.heard = 0  # entries of the ring
        self.answer: Any = None  # not looked at yet
        self.refused = False
        self.access: Any = None
        self.position = 0
        self.orders = 0
        self.recalled = False

    def __str__(self) -> str:
        answer = "refused" if self.refused else "recalled" if self.recalled else "no answer"
        has = f"file {self.access.file_id}" if self.access is not None else answer
        return f"{has} in epoch {self.epoch}, {self.orders} written, {self.heard} heard"

    def answered(self, outcome: Any) -> None:
        if isinstance(outcome, KdirectError):
            self.refused = True
        else:
            self.answer = outcome


class Producer:
    """See the module."""

    def __init__(self, number: int, replicas: Replicas, *, acks: int) -> None:
        self.number = number
        self.acks = acks
        self.device = replicas.network.device(f"producer-{number}")
        self._replicas = replicas
        self._send_cq = self.device.create_cq(1 << 10)
        self.made = 0
        self.waiting: deque[Sent] = deque()  # without an acknowledgement, in order
        self.under_way = 0  # of these, written under the present grant
        self.link: Link | None = None
        self.grant: Grant | None = None
        self.finished = -1  # the file that was full
        self.heard: list[int] = []  # the numbers that were acknowledged
        self.again = 0  # records sent again that were there already
        self.lost = 0  # how often records that were acknowledged were lost
        self._id = FIRST_ID + number
        self._sequence = 0

    # -- what can come next ------------------------------------------------------------------------

    @property
    def may_write(self) -> bool:
        """Is there room under the grant, and is it not to be given back?"""
        grant = self.grant
        return (
            grant is not None
            and grant.access is not None
            and not grant.recalled
            and self.under_way < min(IN_FLIGHT, grant.access.max_in_flight)
            and self.link is not None
            and self.link.qp.state == State.RTS
        )

    @property
    def may_repeat(self) -> bool:
        return self.may_write and self.under_way < len(self.waiting)

    @property
    def may_hear(self) -> bool:
        link, grant = self.link, self.grant
        if link is None:
            return False
        told = grant is not None and (grant.refused or grant.answer is not None)
        return bool(told or link.cq.has_news or link.qp.state != State.RTS)

    def may_ask(self, broker: Broker) -> bool:
        return bool(self.waiting) and self.grant is None and broker.pushed is not None

    # -- steps -------------------------------------------------------------------------------------

    def make(self) -> None:
        """A new record, which is sent at once if nothing is to be sent before."""
        number = (self.number + 1) * FIRST + self.made
        self.waiting.append(Sent(number, self._batch(number)))
        self.made += 1
        if self.may_write and self.under_way == len(self.waiting) - 1:
            self.write()

    def _batch(self, number: int) -> bytes:
        data = bytearray(batch_of((ANY_EPOCH, number), self._sequence, self._id))
        data[12:16] = b"\xff" * 4  # no leader epoch: not committed, for a broker that recovers it
        self._sequence += 1
        return bytes(data)

    def _begin_again(self) -> None:
        """A record that was acknowledged is lost: go on as another producer."""
        self._id += 10
        self._sequence = 0
        self.lost += 1
        self.waiting = deque(Sent(sent.number, self._batch(sent.number)) for sent in self.waiting)
        self.leave()

    def write(self) -> None:
        """The next record that is not under way, if the file has room for it."""
        grant, link = self.grant, self.link
        assert grant is not None and link is not None
        sent = self.waiting[self.under_way]
        access, length = grant.access, len(sent.data)
        if grant.position + length > access.length:
            if not self.under_way:  # everything is answered
                self.finished = access.file_id
                self.grant = None
            return
        at = sent.number % FIRST * RECORD_BYTES
        memoryview(link.source.memory)[at : at + length] = sent.data
        link.qp.post_write_imm(
            0, link.source, at, length, access.address + grant.position, access.rkey,
            access.file_id << layout.IMM_FILE_ID_SHIFT | grant.orders,
        )  # fmt: skip
        grant.position += length
        grant.orders += 1
        self.under_way += 1

    def ask(self, broker: Broker) -> None:
        """For access to the head of a broker that believes to lead."""
        link = self._link_to(broker)
        ring = link.domain.register(
            Memory.anonymous(ENTRIES * layout.ACK_BYTES),
            Access.LOCAL_WRITE | Access.REMOTE_WRITE,
        )
        self.grant = grant = Grant(ring, broker.epoch)
        self.under_way = 0
        request = build(
            p.GetProduceAccessRequest,
            connection_id=link.peer.connection_id,
            topic="t",
            partition=0,
            mode=layout.PRODUCE_EXCLUSIVE,
            min_bytes=len(self.waiting[0].data) if self.waiting else 1,
            ack_address=ring.address,
            ack_rkey=ring.rkey,
            ack_entries=ENTRIES,
            max_in_flight=IN_FLIGHT,
            finished_file_id=self.finished,
            acks=self.acks,
        )
        self.finished = -1
        access = broker.led_head.access
        try:
            grant.answer = access.request(link.peer, broker.partition, request)
            if grant.answer is None:
                waiting = access.wait(link.peer, broker.partition, request)
                waiting.answer = grant.answered
        except KdirectError:
            grant.refused = True

    def _link_to(self, broker: Broker) -> Link:
        link = self.link
        if link is not None and link.broker is broker and link.qp.state == State.RTS:
            return link
        self.leave()
        domain = self.device.alloc_pd()
        cq = self.device.create_cq(1 << 10)
        qp = domain.create_qp(self._send_cq, cq, max_send_wr=64, max_recv_wr=ENTRIES)
        peer = broker.led_head.open(qp.address)
        qp.connect(peer.qp.address, active=True)
        for i in range(ENTRIES):
            qp.post_recv(i)
        source = domain.register(Memory.anonymous(MOST * RECORD_BYTES), Access.LOCAL_WRITE)
        self.link = Link(broker, peer, domain, qp, cq, source)
        return self.link

    def leave(self) -> None:
        """Close the queue pair; what is under way is sent again elsewhere."""
        link, self.link, self.grant, self.under_way = self.link, None, None, 0
        self.finished = -1
        if link is not None:
            link.qp.close()
            link.broker.led_head.close_peer(link.peer)

    def give_back(self) -> None:
        """Everything is answered: others may have the head."""
        link, grant = self.link, self.grant
        assert link is not None and grant is not None
        link.broker.led_head.give_back(link.peer, grant.access.file_id)
        self.grant = None

    def hear(self) -> None:
        """Look at what has come."""
        link, grant = self.link, self.grant
        assert link is not None
        self._send_cq.poll(64)
        for completion in link.cq.poll(64):
            if not completion.ok:
                continue
            if link.qp.state == State.RTS:
                link.qp.post_recv(completion.wr_id)
            file_id = completion.imm_data >> layout.IMM_FILE_ID_SHIFT
            for _ in range(completion.imm_data & layout.IMM_ORDER_MASK):
                if grant is None or grant is not self.grant:
                    break
                self._open(grant)
                if grant.access is not None and grant.access.file_id == file_id:
                    self._entry(grant)
        if link.qp.state != State.RTS:
            self.leave()
        elif grant is not None and grant is self.grant:
            if grant.refused:
                self.grant = None
            self._open(grant)
            if grant.recalled and not self.under_way:
                self.give_back()

    @staticmethod
    def _open(grant: Grant) -> None:
        """Look at the answer to the request for access."""
        if grant.answer is not None:
            grant.access, grant.answer = grant.answer, None
            grant.position = grant.access.position

    # -- acknowledgements --------------------------------------------------------------------------

    def _entry(self, grant: Grant) -> None:
        at = grant.heard % ENTRIES * layout.ACK_BYTES
        entry = bytes(memoryview(grant.ring.memory)[at : at + layout.ACK_BYTES])
        grant.heard += 1

        def number(at: int, length: int) -> int:
            return int.from_bytes(entry[at : at + length], "little", signed=True)

        flags = number(layout.ACK_FLAGS, 2)
        if flags & layout.ACK_FLAG_RECALLED:
            grant.recalled = True
            return
        if flags & layout.ACK_FLAG_REVOKED:
            self.grant, self.under_way = None, 0
            return
        error, offset = number(layout.ACK_ERROR, 2), number(layout.ACK_BASE_OFFSET, 8)
        may_lose = self.acks == 1 or self._replicas.world.void
        if error == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and may_lose:
            self._begin_again()
            return
        if error not in (0, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
            raise Broken(f"producer {self.number} is told of error {error}")
        self.again += bool(flags & layout.ACK_FLAG_DUPLICATE)
        sent = self.waiting.popleft()
        self.under_way -= 1
        self._check(grant, sent.number, offset)
        self.heard.append(sent.number)

    def _check(self, grant: Grant, number: int, offset: int) -> None:
        """What was acknowledged is there."""
        world = self._replicas.world
        if grant.epoch < world.void:
            return  # what its leader has said is lost, and that is told
        if self.acks == 1:
            assert self.link is not None
            replica = world.replicas[self.link.broker.number]
            leading, log = replica.leading, replica.log
            if leading is None or leading.state.leader_epoch != grant.epoch or offset < log.start:
                return
            found = log.between(offset, offset + 1)
        elif offset < 0:  # it is known to be there, but not where
            found = tuple(record for record in world.shown if record[1] == number)
        else:
            found = world.shown[offset : offset + 1]
        if [record[1] for record in found] != [number]:
            raise Broken(f"record {number} is acknowledged and is not at offset {offset}: {found}")

    def close(self) -> None:
        self.device.close()


def check_doubles(producers: list[Producer], records: tuple[Record, ...]) -> None:
    """No record is there twice, nor in another order than it was sent."""
    for producer in producers:
        if not producer.lost:
            begin = (producer.number + 1) * FIRST
            own = [number for _, number in records if begin <= number < begin + FIRST]
            if any(a >= b for a, b in pairwise(own)):
                raise Broken(f"records of producer {producer.number} are doubled: {own}")
