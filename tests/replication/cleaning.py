"""Brokers that compact their copies, each by itself, in the seeded schedules.

Owns: the step *clean*, in which a broker compacts what may be compacted of its copy; and what
followers do that lack compacted segments: those are pushed to nobody, nor READ, but fetched:

A leader begins a segment before, or there would be little to compact.

- *copied*, a message: batches that a leader has read for a follower, with what it says of the
  offsets that may be missing.  The log of either may have changed when it comes.

What must hold.  What the world knows of a log has every record, also those that compaction has
removed; `tests.replication.kernel_log` fills the gaps that it finds with what was committed there
(`Committed`), and none may be where the last committed record of a key lies.  So all that holds of
logs holds of compacted ones, whether they are copied, cut, restarted or led.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from kdirect.cluster import following_replica as following_rules
from kdirect.cluster.following_replica import Phase
from kdirect.log import cleaning
from tests.cluster.effects import follow
from tests.cluster.moves import Move
from tests.cluster.world import DOWN, Broken
from tests.log.compacted_logs import MEMORY
from tests.replication.broker import Broker
from tests.replication.kernel_log import NOW_MS, Committed, KernelLog
from tests.replication.reading import ReadingReplicas
from tests.replication.replicas import Message, segment_at

MOST_PUSHED = 5  # segments that a follower lacks


class Batches(NamedTuple):
    """What a leader has read for a follower, from `offset` on."""

    offset: int
    buffers: list[bytes]
    segment: int
    segment_bytes: int
    gaps_below: int
    high_watermark: int


class CleaningReplicas(ReadingReplicas):
    """See the module.  `cleans`: do brokers compact?"""

    def __init__(self, *arguments: Any, reads: bool, cleans: bool) -> None:
        self.cleans = cleans
        self.compacted: Counter[str] = Counter()  # what has happened to compacted logs
        if cleans:
            self.segment_bytes = (1024, 1024, 2048)
        super().__init__(*arguments, reads=reads)
        if cleans:
            committed = Committed()
            for broker in self.brokers:
                broker.settings = broker.settings._replace(committed=committed)
                broker.know_committed()
            self.committed = committed
        self._take["clean"] = self._clean

    def moves(self) -> Iterator[Move]:
        yield from super().moves()
        for number, broker in enumerate(self.brokers if self.cleans else ()):
            lives = self.world.registered[number] != DOWN
            if lives and (broker.pushed is not None or may_be_cleaned(broker)):
                yield ("clean", number)

    def has_compacted(self, number: int) -> bool:
        """Has this broker compacted its copy, or taken what was?"""
        return number >= 0 and self.brokers[number].partition.dense_from > 0

    def _clean(self, number: int) -> None:
        partition = self.brokers[number].partition
        if self.world.replicas[number].leading is not None:
            partition.roll()  # as a head that is too old
        self._work(number)
        log = self.world.replicas[number].log
        shown = min(log.end, partition.high_watermark)
        self.committed.note(log.start, log.between(log.start, shown))
        size = partition.size
        dirt = cleaning.dirt_of(partition, None, NOW_MS)
        cleaning.Cleaning(partition, dirt, MEMORY, NOW_MS).run()
        whose = "copies" if partition.is_copy else "led logs"
        self.compacted[f"{whose} that were compacted"] += partition.size < size
        if KernelLog.of(partition) != log:
            raise Broken("compaction has changed more than it may")

    def _heard(self, message: Message) -> None:
        follower, end = message.sender, message.value
        led = self.brokers[message.receiver].partition
        following = self.world.replicas[follower].following
        same = (
            self.world.registered[follower] == message.incarnation
            and following.phase is Phase.FOLLOWING
            and (following.epoch, following.end) == (message.epoch, end)
        )
        lacks = sum(segment.base_offset > end for segment in led.segments)
        # What was compacted has other bytes in each replica, and segments that begin elsewhere.
        if (
            self.cleans
            and same
            and end >= led.first_kept_offset
            and (
                end < led.dense_from
                or lacks > MOST_PUSHED
                or begin_elsewhere(self.brokers[message.receiver], self.brokers[follower], end)
            )
        ):
            copied = led.read_for_replica(end, self.chance.choice((1, 300, 2000)))
            batches = Batches(
                end,
                [bytes(buffer) for buffer in copied.buffers],
                copied.segment,
                copied.segment_bytes,
                min(led.dense_from, led.high_watermark) if end < led.dense_from else 0,
                led.high_watermark,
            )
            self._send("copied", message.receiver, follower, follower, batches)
            return
        super()._heard(message)

    def _deliver(self, number: int, *rest: Any) -> None:
        message = self.messages[number]
        if message.kind != "copied":
            super()._deliver(number, *rest)
            return
        del self.messages[number]
        follower, batches = message.receiver, message.value
        broker = self.brokers[follower]
        partition = broker.partition
        following = self.world.replicas[follower].following
        if (
            self.world.registered[follower] != message.incarnation
            or following.phase is not Phase.FOLLOWING
            or following.epoch != message.epoch
            or partition.log_end_offset != batches.offset
            or follower in self.pulls
        ):
            return
        broker.end_grant()
        partition.copy_segments_of(batches.segment_bytes)
        partition.note_gaps_below(batches.gaps_below)
        partition.begin_segment(batches.segment)
        for buffer in batches.buffers:
            if error := partition.append_as_stamped(buffer).error:
                raise Broken(f"a follower cannot take what was compacted: error {error}")
        partition.replicated(-1, batches.high_watermark)
        self.compacted["fetches of what was compacted"] += 1
        if self._read(follower):
            log = self.world.replicas[follower].log
            event = following_rules.Committed(log.end, log.last_epoch, message.epoch)
            self.world = follow(self.world, follower, event)
            gaps = KernelLog.of(partition).gaps
            self.compacted["fetches over a gap"] += not gaps.isdisjoint(
                range(batches.offset, log.end)
            )
        told = following_rules.Told(message.epoch, partition.high_watermark)
        self.world = follow(self.world, follower, told)

    def take(self, move: Move) -> None:
        if self.cleans and move[0] in ("cut", "crash"):
            gaps = bool(KernelLog.of(self.brokers[move[1]].partition).gaps)
            self.compacted[f"{move[0]} of a compacted log"] += gaps
        super().take(move)


def may_be_cleaned(broker: Broker) -> bool:
    """Has it a sealed segment of which all is committed?"""
    first, *others = broker.partition.segments
    return bool(others) and first.end_offset <= broker.partition.high_watermark


def begin_elsewhere(leader: Broker, follower: Broker, end: int) -> bool:
    """Is the follower, whose log ends at `end`, in a segment that begins at another offset at its
    leader, and cannot follow it there?  See `ReplicaLog.begin_segment`."""
    base = segment_at(leader, end)
    *before, own = [segment.base_offset for segment in follower.partition.segments]
    joined = own == end and before[-1:] == [base]
    return base < end and own != base and not joined
