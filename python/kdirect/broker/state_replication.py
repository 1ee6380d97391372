"""A table that lives in a topic with replicas: when a change counts.

Law of the room: what `kdirect.broker.state_topic` does otherwise in a cluster.  It knows partitions
and offsets; neither rows nor the table.

A change is appended as by a producer with acks=all, and counts when it is committed.  Until then it
is in the log, and not in the table.  What fails after it was appended may be in the log all the
same, as a produce request that timed out may be; nobody was told that it counts.

Each broker compacts its own copy of the log (`kdirect.broker.cleaner`), up to what is committed at
most; a change that is in flight is above that.

Called on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias

from kdirect.errors import ClosedError, KdirectError
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

# Kafka's offsets.commit.timeout.ms: how long a change may wait for the replicas.
COMMIT_TIMEOUT_S = 5.0

Settled: TypeAlias = Callable[[BaseException | None], None]
# `appended(end offset, error)`: a change is in the log, or could not be appended.
Appended: TypeAlias = Callable[[int, BaseException | None], None]


class Committing(Protocol):
    """As much of `kdirect.broker.services.Replicas` as appends with acks=all need."""

    def may_append(self, tp: TopicPartition, /) -> None:
        """NotEnoughReplicasError below min.insync.replicas."""

    def committed(
        self, tp: TopicPartition, end_offset: int, leader_epoch: int, timeout_s: float, /
    ) -> asyncio.Future[None]:
        """Done when the high watermark is at `end_offset` or above it.  It raises
        NotEnoughReplicasAfterAppendError, TimedOutError, NotLeaderError."""

    def appended(self, tp: TopicPartition, /) -> None:
        """The log of `tp` has grown: followers that wait are answered."""

    def watch_readable(self, tp: TopicPartition, /) -> None:
        """Have `on_high_watermark` called when the high watermark moves next."""


class StateReplication:
    """See the module; one for a `StateTopic` of a broker in a cluster.  `flush(partition)` begins
    to put its records on disk, where they have to be before they are committed."""

    def __init__(self, replicas: Committing, flush: Callable[[Partition], object]) -> None:
        self._replicas = replicas
        self._flush = flush

    def begin(self, partition: Partition, settled: Settled) -> Appended:
        """What the caller calls when it has appended a change; then `settled(error)` is called,
        once it counts or is known to have failed.  NotEnoughReplicasError: it is not to be
        appended."""
        self._replicas.may_append(partition.topic_partition)
        epoch = partition.leader_epoch

        def told(future: asyncio.Future[None]) -> None:
            if future.cancelled():
                settled(ClosedError("the broker is stopping", hint="ask another one"))
            else:
                settled(future.exception())

        def appended(end_offset: int, error: BaseException | None) -> None:
            if error is not None:
                settled(error)
                return
            try:
                future = self.committed(partition, end_offset, epoch)
            except KdirectError as e:
                settled(e)
            else:
                # Not at once, even where it is done: an earlier change may be about to be told.
                future.add_done_callback(told)

        return appended

    def committed(
        self,
        partition: Partition,
        end_offset: int,
        epoch: int,
        timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> asyncio.Future[None]:
        """The log has grown up to `end_offset` in leader epoch `epoch`: see `Replicas`."""
        tp = partition.topic_partition
        self._replicas.appended(tp)
        if partition.acknowledgements_wait() and partition.gate.waits_for_disk(end_offset):
            self._flush(partition)
        return self._replicas.committed(tp, end_offset, epoch, timeout_s)

    def watch(self, partition: Partition) -> None:
        """Have those told whose hook it is when the high watermark moves next."""
        self._replicas.watch_readable(partition.topic_partition)
