"""Followers that lack sealed segments and READ them, in the seeded schedules.

Owns: for each follower that catches up its leases, its queue pair for READs and the segment that is
on its way: all of `kdirect.broker.segment_leases` and `segment_reader` but the reader's thread,
whose turns are steps here:

- *pull*: READs are posted, what has landed is committed, and the next segment is begun.

A leader may delete a segment under its lease, resign, hang or crash meanwhile, and so may the
follower; a fence waits until no READ is under way.  Whether a follower READs or is pushed to from
where its log ends, is chosen each time that its leader hears of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kdirect.broker import segment_pull as machine
from kdirect.broker.catch_up import checked
from kdirect.broker.segment_leases import SegmentLeases
from kdirect.broker.segment_reader import SegmentReader, Transfer
from kdirect.cluster import following_replica as following_rules
from kdirect.cluster.following_replica import Phase
from kdirect.errors import KdirectError
from tests.cluster.effects import follow
from tests.cluster.moves import Move
from tests.cluster.world import DOWN, Broken, Replica
from tests.replication.broker import TP, Broker
from tests.replication.replicas import DRAINING, Message, Replicas

LOOP: Any = SimpleNamespace(call_soon_threadsafe=lambda call, *arguments: call(*arguments))


class Pull:
    """One follower that READs from one leader, in one epoch.  KdirectError."""

    def __init__(self, follower: Broker, leader: Broker, epoch: int, most: int) -> None:
        self.follower = follower
        self.leader = leader
        self.epoch = epoch
        self.segments = 0  # read, all of them
        self.transfer: Transfer | None = None
        self._most = most  # bytes of one READ
        self.leases = SegmentLeases(leader.device, leader.device.alloc_pd())
        self._domain = follower.device.alloc_pd()
        self.reader = SegmentReader(follower.device, self._domain)
        self._next: deque[Any] = deque()
        try:
            self.reader.connect(self.leases.open(self.reader.address))
            self._lease()
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        return self.transfer is None

    @property
    def leads(self) -> bool:
        """Does the leader lead in this epoch still?"""
        return self.leader.pushed is not None and self.leader.epoch == self.epoch

    @property
    def is_deleted(self) -> bool:
        """Has the leader deleted what is read?"""
        first = self.leader.partition.segments[0].base_offset
        return self.transfer is not None and self.transfer.source.base_offset < first

    def _lease(self) -> None:
        """Ask the leader for what follows, unless it leads no longer."""
        x = SimpleNamespace(lease=-1, position=0)
        if self.leads:
            end = self.follower.partition.log_end_offset
            numbers = self.leases._lease(TP, self.leader.partition, end, 2)
            told = [self.leases._told(TP, number, x, None) for number in numbers]
            self._next.extend(SimpleNamespace(**row) for row in told)

    def _begin(self) -> None:
        """The next segment, where there is one."""
        self.transfer = None
        if self._next:
            partition = self.follower.partition
            source = checked(TP, self._next.popleft(), partition.log_end_offset)
            self.transfer = Transfer(partition, source, self._domain, LOOP, epoch=self.epoch)

    def turn(self) -> None:
        """What the reader's thread does in a turn, and what its replica does about it."""
        transfer = self.transfer
        assert transfer is not None
        self.reader._feed(transfer, machine.Turn(self._most))
        self.reader._poll([transfer])
        if transfer.pull.phase is machine.Phase.DONE:
            self.segments += 1
            try:
                if not self._next:
                    self._lease()
                self._begin()
            except KdirectError:
                self.transfer = None
        elif transfer.pull.is_over:
            self.transfer = None

    def stop(self) -> None:
        """Return when no READ is under way."""
        transfer = self.transfer
        if transfer is None:
            return
        network = self.follower.network
        self.reader._feed(transfer, machine.Stop("it was given up"))
        network.disconnect(self.reader.qp)
        for _ in range(DRAINING):
            self.reader._poll([transfer])
            if transfer.pull.is_over:
                break
            network.step()
        else:
            raise Broken("a READ has no end")
        self.transfer = None

    def close(self) -> None:
        self.leases.close()
        self.reader.close()


class ReadingReplicas(Replicas):
    """See the module.  `reads`: do followers READ?"""

    def __init__(self, *arguments: Any, reads: bool) -> None:
        if reads:
            self.segment_bytes = (1024,)
        super().__init__(*arguments)
        self.reads = reads
        self.pulls: dict[int, Pull] = {}
        self._pulled: list[Pull] = []
        self.met: Counter[str] = Counter()  # while segments were read
        self._take["pull"] = self._pull

    def is_reading(self, number: int) -> bool:
        """Does this broker READ, or is it read from?"""
        own = self.brokers[number]
        return any(own in (pull.follower, pull.leader) for pull in self.pulls.values())

    def close(self) -> None:
        for pull in self._pulled:
            pull.close()
        super().close()

    def moves(self) -> Iterator[Move]:
        yield from super().moves()
        for number in self.pulls:
            if self.world.registered[number] != DOWN:
                yield ("pull", number)

    def may_ask(self, broker: int, replica: Replica) -> bool:
        return broker not in self.pulls and super().may_ask(broker, replica)

    def _settle(self) -> None:
        super()._settle()
        for pull in self.pulls.values():
            if not pull.leads and pull.leases.are_held(TP):
                self.met["a deposed leader"] += 1
                pull.leases.end(TP)

    def _heard(self, message: Message) -> None:
        if not (self.reads and self._begin_pull(message)):
            super()._heard(message)

    def _begin_pull(self, message: Message) -> bool:
        """Does the follower READ from now on?"""
        follower, leader, end = message.sender, message.receiver, message.value
        following = self.world.replicas[follower].following
        led = self.brokers[leader]
        lacks = (
            self.world.replicas[leader].log.start <= end < led.partition.segments[-1].base_offset
        )
        same = (
            self.world.registered[follower] == message.incarnation
            and following.phase is Phase.FOLLOWING
            and (following.epoch, following.leader, following.end) == (message.epoch, leader, end)
        )
        if not (lacks and same and follower not in self.pulls and self.chance.random() < 0.8):
            return False
        process = self.brokers[follower]
        process.end_grant()
        try:
            most = self.chance.choice((100, 500, machine.READ_BYTES))
            pull = Pull(process, led, message.epoch, most)
        except KdirectError:
            return False  # its segments begin elsewhere, or the network is away
        self._pulled.append(pull)
        if not pull.is_over:
            self.pulls[follower] = pull
        return True

    def _pull(self, number: int) -> None:
        pull = self.pulls[number]
        read = pull.segments
        is_deleted = pull.is_deleted
        pull.turn()
        if pull.segments > read:
            self.met["a segment"] += 1
            self.met["a segment that was deleted"] += is_deleted
        if pull.is_over:
            del self.pulls[number]
        if self._read(number):
            log = self.world.replicas[number].log
            event = following_rules.Committed(log.end, log.last_epoch, pull.epoch)
            self.world = follow(self.world, number, event)

    def _stop_pull(self, number: int) -> None:
        pull = self.pulls.pop(number, None)
        if pull is not None:
            self.met["a fence"] += 1
            pull.stop()

    def _fence(self, number: int) -> None:
        self._stop_pull(number)
        super()._fence(number)

    def _crash(self, number: int) -> None:
        pull = self.pulls.pop(number, None)
        if pull is not None:
            self.met["a crash between two segments" if pull.segments else "a crash"] += 1
        self.met["a crash of the leader"] += any(
            pull.leader is self.brokers[number] for pull in self.pulls.values()
        )
        super()._crash(number)

    def _remove(self, number: int) -> None:
        self._stop_pull(number)
        super()._remove(number)
