"""Appends of Kafka clients to partitions that this broker is about to lead.

Metadata names a new leader as soon as its election is known; the leader begins a moment later, when
nobody else can write to its log and the new epoch is on disk.  A batch that came in between and was
refused would part a producer's pipeline: the batch after it may find a leader, which answers that
sequence numbers are missing, and a producer that then numbers its records again may have those
twice which the leader before had already.

Owns: the appends that wait for such a beginning, in the order in which they came to each partition,
and the end of their patience.

    hold ---- `led` ---------------------------> they go on, in order, before anything that comes
         ---- another leader or epoch, or none -> they fail (`changed`)
         ---- their time is over --------------> they fail, with all of that connection that wait

Invariants:

- Only what this broker's own picture of the cluster says counts: a broker that it does not name as
  the leader refuses at once, as Kafka does.
- While an append waits no other to the same partition is made.
- Once an append of a connection has waited in vain, later ones of that connection to the partition
  are refused at once until the broker leads: one of them alone would be out of order.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kdirect.cluster.partition_state import leads
from kdirect.errors import KdirectError, NotLeaderError, UnknownTopicError
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition

HOLD_S = 5.0  # at most
_NO_EPOCH = -1


class Asker(Protocol):
    """Whoever appends: a connection, mostly."""

    @property
    def closed(self) -> bool:
        """Does nobody wait for the answer any more?"""


class _Once:
    """One that asks a single time, so it may be forgotten when it gives up."""

    closed = True  # whoever gives up is not to be remembered


# Called once: with None, on the spot, when this broker leads; else with what the append fails for.
GoOn = Callable[[KdirectError | None], None]


class _Waiting:
    """One append that waits."""

    __slots__ = ("connection", "go_on", "timer")

    def __init__(self, connection: Asker, go_on: GoOn) -> None:
        self.connection = connection
        self.go_on = go_on
        self.timer: asyncio.TimerHandle | None = None

    def end(self, error: KdirectError | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.go_on(error)


class _Coming:
    """A leadership that has not begun: its epoch, what waits, and the connections that have waited
    in vain."""

    __slots__ = ("epoch", "given_up", "waiting")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.waiting: list[_Waiting] = []
        self.given_up: set[Asker] = set()


class ComingLeaderships:
    """See the module.  `metadata()`: the newest picture of the cluster that broker `node_id` has.
    `led` and `changed` are to be told of leaderships and of pictures."""

    def __init__(self, node_id: int, metadata: Callable[[], Metadata]) -> None:
        self._node_id = node_id
        self._metadata = metadata
        self._coming: dict[TopicPartition, _Coming] = {}
        self._closed = False

    def hold(self, tp: TopicPartition, connection: Asker, timeout_s: float, go_on: GoOn) -> bool:
        """Let an append wait for so long at most; False, and `go_on` is not called, where this
        broker is not about to lead.  To be asked only while it does not lead."""
        epoch = self._epoch(tp)
        if epoch == _NO_EPOCH or self._closed or timeout_s <= 0:
            return False
        coming = self._coming.get(tp)
        if coming is None:
            coming = self._coming[tp] = _Coming(epoch)
        elif coming.epoch != epoch or connection in coming.given_up:
            return False  # `changed` is about to come, or the order is lost
        waiting = _Waiting(connection, go_on)
        coming.waiting.append(waiting)
        loop = asyncio.get_running_loop()
        waiting.timer = loop.call_later(
            min(timeout_s, HOLD_S), self._give_up, tp, coming, connection
        )
        return True

    async def until_led(self, tp: TopicPartition, timeout_s: float) -> None:
        """Wait until this broker leads, where it is about to.  To be asked only while it does
        not."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(error: KdirectError | None) -> None:
            if not ended.done():
                ended.set_result(None)

        if self.hold(tp, _Once(), timeout_s, end):
            await ended

    def led(self, tp: TopicPartition, partition: Any, epoch: int) -> None:
        """This broker leads from now on, and takes appends."""
        coming = self._coming.pop(tp, None)
        for waiting in coming.waiting if coming is not None else ():
            gone = NotLeaderError(f"whoever appended to {tp} has closed the connection")
            waiting.end(gone if waiting.connection.closed else None)

    def changed(self, before: Metadata | None, after: Metadata) -> None:
        """There is a newer picture."""
        for tp, coming in list(self._coming.items()):
            if self._epoch(tp) != coming.epoch:
                self._end(tp)

    def close(self) -> None:
        """The broker stops: what waits fails, and nothing waits any more."""
        self._closed = True
        for tp in list(self._coming):
            self._end(tp)

    def __len__(self) -> int:
        """Appends that wait."""
        return sum(len(coming.waiting) for coming in self._coming.values())

    def _epoch(self, tp: TopicPartition) -> int:
        """The epoch in which this broker leads by its own picture."""
        metadata = self._metadata()
        partition = metadata.partition(tp)
        state = None if partition is None else partition.state
        if state is None or not leads(state, self._node_id, metadata.incarnation):
            return _NO_EPOCH
        return state.leader_epoch

    def _end(self, tp: TopicPartition) -> None:
        error: KdirectError
        if self._metadata().partition(tp) is None:
            error = UnknownTopicError(f"there is no partition {tp} any more")
        else:
            error = NotLeaderError(f"this broker does not lead {tp}", hint="ask for metadata again")
        for waiting in self._coming.pop(tp).waiting:
            waiting.end(error)

    def _give_up(self, tp: TopicPartition, coming: _Coming, connection: Asker) -> None:
        coming.given_up = {c for c in coming.given_up if not c.closed} | {connection}
        over = [w for w in coming.waiting if w.connection is connection]
        coming.waiting = [w for w in coming.waiting if w.connection is not connection]
        for waiting in over:
            waiting.end(
                NotLeaderError(
                    f"this broker is to lead {tp}, and has not begun", hint="ask again soon"
                )
            )
