"""What replicas know of replication by one-sided WRITEs (KafkaDirect §4.3.2).

Owns: the contract between this room, which knows who leads and who follows, and the broker's, which
has queue pairs and keys (`kdirect.broker.replication`).  A broker without RDMA, or with
``rdma.replicate=false``, has no `PushSide`; then followers fetch over TCP, and so they do wherever
two brokers share no transport.

A partition is pushed as well as fetched, never instead: a follower begins by Fetch, is pushed to
when it has come into the leader's last segment, and goes on by Fetch when that ends.  Its place in
the leader's fetch session stays all the time, and tells the leader that the follower lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Protocol

from kdirect.format.replica_fetch import Feeding, Push
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition


class Confirmation(NamedTuple):
    """A follower that is pushed to has every record below `end`."""

    broker: int
    incarnation: int
    end: int


class PushedLog(Protocol):
    """The marks of a led partition's replicas (`kdirect.log.replica_marks`), which move its high
    watermark, and the rings to its followers."""

    def push(self) -> None:
        """Records were appended by another thread than the produce worker's."""

    def set_counted(self, brokers: Iterable[int], *, stands_still: bool) -> None:
        """The high watermark waits for these brokers, this one not among them; or for nobody, and
        does not move."""

    def confirm(self, broker: int, incarnation: int, end: int) -> None:
        """A follower that fetches has every record below `end`."""

    def confirmations(self) -> list[Confirmation]:
        """Of the followers that are pushed to."""

    def marks(self) -> dict[int, int]:
        """The offset below which each replica has everything, -1 where that is not known."""

    def watch(self) -> None:
        """Call `PushableLeader.moved` once, when the high watermark moves next."""

    def resign(self) -> Awaitable[None]:
        """This broker leads no longer.  Nothing is pushed or counted from here on; when the
        awaitable is done commits do not move the high watermark either."""


class PushableLeader(Protocol):
    """A leader as the broker's room sees it: `kdirect.member.leading.Leader`."""

    tp: TopicPartition
    partition: Partition

    @property
    def epoch(self) -> int:
        """The leader epoch."""

    def begin_push(self, pushed: PushedLog) -> asyncio.Future[None] | None:
        """From now on the marks move the high watermark; None: not now."""

    def moved(self) -> None:
        """The high watermark has moved, and `PushedLog.watch` had asked."""

    def pushes(self, broker: int) -> None:
        """A ring to this follower has begun."""

    def wants_file(self, broker: int, *, ahead: bool) -> None:
        """The ring to this follower has come to the end of what it may write; `ahead`: and of the
        segment."""

    def pushes_no_more(self, broker: int, *, tell: bool) -> None:
        """The ring to this follower has ended; `tell`: it is to ask for records."""


class PushedCopy(Protocol):
    """A replica's way from Fetch to push and back, as long as it follows in one epoch."""

    def told(self, push: int, segment_bytes: int) -> None:
        """What the leader's answer to a Fetch says: a `kdirect.format.replica_fetch.Push`, and as
        much as its segments may have."""

    def watch(self) -> None:
        """Call `PushableCopy.moved` once, when the high watermark moves next."""

    def feeding(self) -> Feeding:
        """How the replica gets its records now, and, if by Fetch, why."""

    def close(self, *, gives_up: bool = False) -> Awaitable[None]:
        """It follows no longer.  When the awaitable is done nothing that the leader writes can
        reach what this replica commits; `gives_up`: or it is not tried any more, for nothing will
        be committed."""


class PushableCopy(Protocol):
    """A replica as the broker's room sees it: `kdirect.member.following.Replica`."""

    tp: TopicPartition
    partition: Partition

    @property
    def epoch(self) -> int:
        """The leader epoch in which it follows."""

    async def stop_copying(self) -> None:
        """Take no records from Fetch any more; return when none are being appended."""

    def copy_again(self) -> None:
        """Go on by Fetch, from the log's end."""

    def progressed(self) -> None:
        """There are more records, which were read from the leader: tell it where the log ends."""

    def moved(self) -> None:
        """The high watermark has moved, and `PushedCopy.watch` had asked."""


# (leader, request): who leads that partition in that epoch, or an error code.
Find = Callable[[TopicPartition, int], Any]


class PushSide(Protocol):
    """What the broker's room provides.  All on the event loop."""

    def offers(self, partition: Partition, offset: int) -> Push:
        """OFFERED where this broker would push this partition, which it leads, to a follower whose
        log ends at `offset`; SEGMENTS where the follower lacks sealed segments, which it may READ;
        else NOTHING."""

    @property
    def pulled_bytes(self) -> int:
        """Bytes of record batches that this broker has READ from leaders."""

    def registered(self, own: int, incarnation_of: Callable[[int], int]) -> None:
        """The cluster has other brokers, or others' processes, than before; `own`: this broker's
        incarnation."""

    def follow(self, leader: int, copy: PushableCopy) -> PushedCopy:
        """The replica follows this leader from now on."""

    def statistics(self) -> dict[str, int]:
        """Counters, by the names of `kdirect.metrics`.  Any thread."""

    async def answer(self, request: Any, find: Find, incarnation_of: Callable[[int], int]) -> Any:
        """The response to OpenPushLink, AskPush, GrantPush, EndPush, AskSegments or OpenReading."""


__all__ = [
    "Confirmation",
    "PushSide",
    "PushableCopy",
    "PushableLeader",
    "PushedCopy",
    "PushedLog",
]
