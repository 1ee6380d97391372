"""The partitions of which this broker has a replica, and what handlers ask about them.

Owns: one `Replica` for each local log that a cluster knows, the fetch sessions of other brokers
here (`fetch_sessions`), this broker's fetches from other leaders (`fetcher`), and what is on its
way to the controller (`in_sync_changes`).  Everything runs on the event loop; file work is passed
to threads.

How others use it.  `add` when a local log exists (made, or loaded at the start) and the cluster
names this broker among its replicas; `await remove(tp)` before that log is deleted.  `appended`
after each append to a log that is led here, and after a commit by RDMA for which `watch` asked.
`answer` for the requests of `protocol.REPLICA_API_KEYS`, `connection_closed` when a connection that
brought one has ended.

Hooks, lists of callables that others add to before `start`:

===================  ============================================================================
`on_lead`            (tp, partition, epoch): this broker leads from now on
`on_resign`          (tp, partition) -> None or an awaitable: it does not lead any more.  Whatever
                     clients were granted here has ended when the awaitable is done; only then
                     does the replica follow another leader
`on_high_watermark`  (tp, partition): records became readable, here as leader or follower
===================  ============================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

# `on_thread(partition, work, done)`: see `kdirect.broker.files.FileThreads.for_partition`.
OnThread = Callable[
    [Partition, Callable[[], Any], Callable[[Any, BaseException | None], None]], None
]


class Replicas:
    """See the module.  Life: construct, add hooks, `start` on the event loop once the membership is
    registered, `add` what there is, `await stop()`.

    `membership` and `peers` as in `kdirect.member`; `on_thread` does file work of one partition,
    `read(work)` awaits what reads cold bytes, and `release(segment)` gives back what was read
    (`FileThreads`).  `lag_ms`: replica.lag.time.max.ms; `min_in_sync`: the broker's
    min.insync.replicas, for topics that have none of their own."""

    def __init__(
        self,
        membership: Any,
        peers: Any,
        *,
        on_thread: OnThread,
        read: Callable[..., Awaitable[Any]],
        release: Callable[[Any], None],
        environment: Environment,
        lag_ms: int = 30_000,
        min_in_sync: int = 1,
    ) -> None:
        self.on_lead: list[Callable[[TopicPartition, Partition, int], None]] = []
        self.on_resign: list[Callable[[TopicPartition, Partition], Awaitable[None] | None]] = []
        self.on_high_watermark: list[Callable[[TopicPartition, Partition], None]] = []
        # `watch(tp)`: have `appended` called, on the loop, after the next commit by RDMA.
        self.watch: Callable[[TopicPartition], None] = lambda tp: None

    async def start(self) -> None:
        """Follow the membership's picture of the cluster from now on."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End fetches and timers; what waits fails with NotLeaderError.  Logs stay as they are."""
        raise NotImplementedError

    # -- local logs --------------------------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        """There is a local log of this partition: lead it or follow, as the cluster says."""
        raise NotImplementedError

    async def remove(self, tp: TopicPartition) -> None:
        """The local log is about to go: end everything that touches it."""
        raise NotImplementedError

    # -- what handlers ask -------------------------------------------------------------------------

    def leader(self, tp: TopicPartition, epoch: int = -1) -> Partition:
        """The log, if this broker leads.  UnknownTopicError, NotLeaderError,
        LeaderNotAvailableError, ReplicaNotAvailableError; FencedLeaderEpochError and
        UnknownLeaderEpochError where the client believes in another `epoch` (-1: in none)."""
        raise NotImplementedError

    def readable(self, tp: TopicPartition, epoch: int = -1) -> Partition:
        """The log, whether this broker leads or follows (KIP-392).  Errors as `leader`."""
        raise NotImplementedError

    def epoch(self, tp: TopicPartition) -> int:
        """The leader epoch that this replica knows; -1 where there is none."""
        raise NotImplementedError

    def may_append(self, tp: TopicPartition) -> None:
        """NotEnoughReplicasError below min.insync.replicas.  To be asked for acks=-1 only."""
        raise NotImplementedError

    def committed(
        self, tp: TopicPartition, end_offset: int, leader_epoch: int, timeout_s: float
    ) -> asyncio.Future[None]:
        """Done when every record below `end_offset` is committed, in the leader epoch in which it
        was appended (-1: the present one).  NotEnoughReplicasAfterAppendError, TimedOutError,
        NotLeaderError."""
        raise NotImplementedError

    def knows_high_watermark(self, tp: TopicPartition) -> bool:
        """False for a leader whose high watermark may be lower than one that was shown before."""
        raise NotImplementedError

    def diverging(
        self, tp: TopicPartition, last_fetched_epoch: int, offset: int
    ) -> tuple[int, int] | None:
        """(epoch, end) where a reader's log parts from this one, or None where it does not."""
        raise NotImplementedError

    def epoch_end(self, tp: TopicPartition, epoch: int) -> tuple[int, int]:
        """OffsetForLeaderEpoch: (the largest epoch that is not above `epoch`, where it ends)."""
        raise NotImplementedError

    def preferred_replica(self, tp: TopicPartition, rack: str, offset: int) -> int:
        """The broker that a consumer in `rack` should fetch `offset` from (KIP-392); -1: here."""
        raise NotImplementedError

    def low_watermark(self, tp: TopicPartition) -> asyncio.Future[int]:
        """The least log start offset of all replicas that live, once it has reached the leader's
        present one (DeleteRecords)."""
        raise NotImplementedError

    def describe(self, tp: TopicPartition) -> list[dict[str, Any]]:
        """A row for each replica, where this broker leads: broker, end, lag, in_sync."""
        raise NotImplementedError

    def statistics(self) -> dict[str, int]:
        """Counters, by the names of `kdirect.metrics`."""
        raise NotImplementedError

    # -- what happens to logs ----------------------------------------------------------------------

    def appended(self, tp: TopicPartition) -> None:
        """The log of `tp` has grown: followers that wait are answered."""
        raise NotImplementedError

    def flushed(self, tp: TopicPartition) -> None:
        """More of the log of `tp` is on disk: what waited for that may be committed now."""
        raise NotImplementedError

    # -- requests of other brokers -----------------------------------------------------------------

    async def answer(self, connection: Hashable, request: Any) -> list[Any]:
        """The body of the response to a request of `protocol.REPLICA_API_KEYS`, as buffers.
        `connection` tells connections apart."""
        raise NotImplementedError

    def connection_closed(self, connection: Hashable) -> None:
        """What this connection fetched is not on its way any more."""
        raise NotImplementedError

    def follower_fetch(
        self, tp: TopicPartition, broker: int, incarnation: int, epoch: int, offset: int
    ) -> None:
        """A replica has every record below `offset`."""
        raise NotImplementedError
