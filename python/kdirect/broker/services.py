"""What the broker's handlers work with, in place of the server that owns it.

Owns: nothing; it names what handlers may use, and so what they may not: connections, listeners,
timers, other handlers.  The server builds one `Services` and closes what is in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kdirect.broker.changed_properties import ChangedProperties
from kdirect.broker.cluster_view import ClusterView
from kdirect.broker.config import BrokerConfig
from kdirect.broker.directory_moves import DirectoryMover
from kdirect.broker.files import FileThreads
from kdirect.broker.flusher import Flusher
from kdirect.broker.listeners import Listeners
from kdirect.broker.offsets import OffsetStore
from kdirect.broker.remote_requests import RemoteAnswers
from kdirect.broker.topics import Registry
from kdirect.broker.transaction_store import TransactionStore
from kdirect.broker.waiters import Waiters
from kdirect.format.replica_fetch import Feeding
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

if TYPE_CHECKING:  # a broker that is alone loads nothing of a cluster
    from kdirect.cluster.requests import Answer, Request


class Appender(Protocol):
    """Appends whole batches of Kafka clients; `Appends`, or, where RDMA producers may have the
    head, `ProduceAccess`."""

    @property
    def busy(self) -> tuple[dict[TopicPartition, Any], ...]:
        """Tables of partitions: `append_nowait` appends nothing to one that is in any of them."""

    def append_nowait(self, partition: Partition, data: Any, at_ms: int, /) -> Any:
        """The kernel's answer, or None, and nothing has changed: then `append`.  Raises as
        `Partition.append_nowait`."""

    def append(self, partition: Partition, data: Any, at_ms: int, /) -> asyncio.Future[Any]:
        """The same after whatever comes first: room, or RDMA producers.  Its place among the
        appends to the partition is that of this call.  The future raises as `Partition.append`."""

    def append_marker(
        self, partition: Partition, batch: bytes, at_ms: int, /
    ) -> asyncio.Future[Any]:
        """The same of a coordinator's marker (`kdirect.log.kernel_transactions.marker_batch`)."""


class Membership(Protocol):
    """The broker's place in a cluster; `kdirect.member.membership.Membership`."""

    @property
    def metadata(self) -> Any:
        """The newest picture of the cluster, a `kdirect.member.metadata.Metadata`."""

    def subscribe(self, changed: Callable[[Any, Any], None], /) -> None:
        """Have `changed(before, after)` called on the event loop for each new picture, in order."""

    def ask(self, request: Request, timeout_s: float, /) -> asyncio.Future[Answer]:
        """What the controller answers, wherever it is.  The future raises TimedOutError when there
        is none in time."""

    def producer_id_block(self, least: int = 0, /) -> asyncio.Future[Any]:
        """(first, limit) of a block of producer ids from `least` on that no broker has been given
        before."""


class Replicas(Protocol):
    """The partitions of which this broker has a replica, as leader or follower;
    `kdirect.member.replicas.Replicas`.  `epoch` is the leader epoch of whoever asks, -1: not told.

    NotLeaderError, FencedLeaderEpochError, UnknownLeaderEpochError and UnknownTopicError are raised
    where the partition cannot be had here.  Called on the event loop; `leader`, `readable`,
    `diverging`, `preferred_replica`, `epoch_end` and `knows_high_watermark` also on threads that
    read.

    Hooks, to be added to before the broker starts: `on_lead(tp, partition, epoch)`, this broker
    leads from now on; `on_resign(tp, partition)`, it does not any more; `on_high_watermark(tp,
    partition)`, records became readable."""

    on_lead: list[Callable[[TopicPartition, Partition, int], None]]
    on_resign: list[Callable[[TopicPartition, Partition], Awaitable[None] | None]]
    on_high_watermark: list[Callable[[TopicPartition, Partition], None]]

    def leader(self, tp: TopicPartition, epoch: int = -1, /) -> Partition:
        """A partition that this broker leads."""

    def readable(self, tp: TopicPartition, epoch: int = -1, /) -> Partition:
        """A partition of which this broker has a replica, led or followed."""

    def may_append(self, tp: TopicPartition, /) -> None:
        """NotEnoughReplicasError below min.insync.replicas: asked for records with acks=all."""

    def committed(
        self, tp: TopicPartition, end_offset: int, leader_epoch: int, timeout_s: float, /
    ) -> asyncio.Future[None]:
        """Done when the high watermark is at `end_offset` or above it.  It raises
        NotEnoughReplicasAfterAppendError, TimedOutError, NotLeaderError."""

    def appended(self, tp: TopicPartition, /) -> None:
        """The log of `tp` has grown: followers that wait are answered."""

    def watch_readable(self, tp: TopicPartition, /) -> None:
        """Have `on_high_watermark` called when the high watermark moves next, by RDMA too."""

    def start_moved(self, tp: TopicPartition, /) -> None:
        """The log of `tp` starts later: followers are told."""

    def diverging(
        self, tp: TopicPartition, last_fetched_epoch: int, offset: int, /
    ) -> tuple[int, int] | None:
        """(leader epoch, its end) where a log that ends at `offset` in that epoch is not a part of
        the leader's; None where it is."""

    def epoch_end(self, tp: TopicPartition, epoch: int, /) -> tuple[int, int]:
        """(largest epoch at or below the one asked for, the offset where it ends)."""

    def feeding(self) -> dict[TopicPartition, Feeding]:
        """How each replica here gets its records."""

    def knows_high_watermark(self, tp: TopicPartition, /) -> bool:
        """False for a leader that was just elected: then it is OFFSET_NOT_AVAILABLE."""

    def preferred_replica(self, tp: TopicPartition, rack: str, offset: int, /) -> int:
        """The broker where a consumer of this rack reads `offset` best (KIP-392); -1: here."""

    def low_watermark(self, tp: TopicPartition, /) -> asyncio.Future[int]:
        """The smallest log start offset of all replicas that live, once it has reached that of the
        leader."""


@dataclass(slots=True)
class Counters:
    """What connections and handlers count; `BrokerServer.statistics` gives the counters their
    names in `kdirect.metrics`.  Changed on the event loop, and by the threads of cold reads."""

    requests: Counter[str] = field(default_factory=Counter)
    connections_opened: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    appends: int = 0
    append_bytes: int = 0
    append_errors: int = 0
    fetch_waits: int = 0
    cold_fetches: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """See the module.  `watch(partition)`: have the waiters told of the next commit that RDMA
    producers make there; it does nothing where RDMA is off.  `membership` and `replicas` are None
    while the broker is alone."""

    config: BrokerConfig
    environment: Environment
    counters: Counters
    listeners: Listeners
    cluster: ClusterView
    logs: LogManager
    topics: Registry
    properties: ChangedProperties
    files: FileThreads
    mover: DirectoryMover
    flusher: Flusher
    waiters: Waiters
    offsets: OffsetStore
    transactions: TransactionStore
    appender: Appender
    watch: Callable[[TopicPartition], None]
    membership: Membership | None = None
    replicas: Replicas | None = None
    remote_reads: RemoteAnswers | None = None
