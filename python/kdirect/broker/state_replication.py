"""A table that lives in a topic with replicas: when a change counts, and how its log is rewritten.

Law of the room: what `kdirect.broker.state_topic` does otherwise in a cluster.  It knows partitions
and keys; neither rows' meaning nor the table.

A change is appended as by a producer with acks=all, and counts when it is committed.  Until then it
is *in flight*: it is in the log, and not in the table.  What fails after it was appended may be in
the log all the same, as a produce request that timed out may be; nobody was told that it counts.

Rewriting a partition that has replicas: the live rows are appended as any others, and once they are
committed the log start moves up to where they begin.  Segments are neither rolled nor replaced for
it, so that all replicas have the same ones, with the same bytes; a follower drops segments as its
leader's log start tells.  Changes go on meanwhile, so:

- The log start moves to `start`, the end of the log when the rewriting began, or, where changes
  were in flight, to the first of them.
- A row is written again only if no change of its key was in flight at the beginning or came later:
  such a change lies at or above `start` already, and a row from the table after it would undo it.
- Nothing is deleted before all that the log holds then is committed: a change that is not could be
  lost with this broker, and the row from before it with the deletion.
- If a change could not be appended while a rewriting runs, or is not yet when it ends, nothing is
  deleted: the row that it would have changed is written nowhere else.  The same where a change is
  of a transaction, which may be aborted.

Every suffix of the log that begins at or below `start` gives the same table, so replicas whose log
starts differ, and a leader that dies in between, do no harm.

Called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from kdirect.broker.files import OnThread
from kdirect.errors import ClosedError, KdirectError
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.state")

# Kafka's offsets.commit.timeout.ms: how long a change may wait for the replicas.
COMMIT_TIMEOUT_S = 5.0
REWRITE_BYTES = 64 << 10  # of rows that are appended in one go; then others have their turn

Settled: TypeAlias = Callable[[BaseException | None], None]
# `append(rows, then)`: append rows, then call `then(end offset, error)`.
Append: TypeAlias = Callable[
    [list[tuple[bytes, bytes | None]], Callable[[int, BaseException | None], None]], None
]


class Committing(Protocol):
    """As much of `kdirect.broker.services.Replicas` as appends with acks=all and rewriting need."""

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

    def start_moved(self, tp: TopicPartition, /) -> None:
        """The log of `tp` starts later: followers are told."""


class Change:
    """Rows of these keys that are being appended.  Every record of them lies at `floor` or above.
    `in_log`: all of them are appended.  `in_doubt`: they count once their transaction is committed.
    """

    __slots__ = ("_owner", "_settled", "epoch", "floor", "in_doubt", "in_log", "keys", "partition")

    def __init__(
        self, owner: StateReplication, partition: Partition, keys: list[bytes], settled: Settled
    ) -> None:
        self._owner = owner
        self._settled = settled
        self.partition = partition
        self.keys = keys
        self.floor = partition.log_end_offset
        self.in_log = False
        self.in_doubt = False
        self.epoch = partition.leader_epoch

    def appended(self, end_offset: int, error: BaseException | None) -> None:
        """All rows are in the log, below `end_offset`, or some could not be appended."""
        if error is not None:
            self._owner.not_appended(self)
            self._settled(error)
            return
        self.in_log = True
        try:
            future = self._owner.committed(self.partition, end_offset, self.epoch)
        except KdirectError as e:
            self._end(e)
        else:
            # Not at once, even where it is done: an earlier change may be about to be told.
            future.add_done_callback(self._told)

    def _told(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._end(ClosedError("the broker is stopping", hint="ask another one"))
        else:
            self._end(future.exception())

    def _end(self, error: BaseException | None) -> None:
        self._owner.over(self)
        self._settled(error)


class _Rewriting:
    """One rewriting of a partition.  `touched`: keys that are not to be written again."""

    __slots__ = ("failed", "start", "task", "touched")

    def __init__(self, start: int, touched: set[bytes]) -> None:
        self.start = start
        self.touched = touched
        self.failed = False  # a change could not be appended, or may be undone
        self.task: asyncio.Task[None] | None = None


class StateReplication:
    """See the module; one for a `StateTopic` of a broker in a cluster.  `flush(partition)` begins
    to put its records on disk, where they have to be before they are committed."""

    def __init__(
        self, replicas: Committing, on_thread: OnThread, flush: Callable[[Partition], object]
    ) -> None:
        self._replicas = replicas
        self._on_thread = on_thread
        self._flush = flush
        self._in_flight: dict[TopicPartition, dict[int, Change]] = {}  # by id of the change
        self._rewritings: dict[int, _Rewriting] = {}
        self._not_below: dict[int, int] = {}  # log ends, below which no rewriting is tried again

    # -- changes -----------------------------------------------------------------------------------

    def begin(
        self, partition: Partition, keys: list[bytes], settled: Settled, *, in_doubt: bool = False
    ) -> Change:
        """A change that the caller appends, and then tells by `Change.appended`; `in_doubt`: of a
        transaction.  NotEnoughReplicasError: it is not to be appended."""
        tp = partition.topic_partition
        self._replicas.may_append(tp)
        change = Change(self, partition, keys, settled)
        change.in_doubt = in_doubt
        self._in_flight.setdefault(tp, {})[id(change)] = change
        rewriting = self._rewritings.get(tp.partition)
        if rewriting is not None:
            rewriting.touched.update(keys)
            rewriting.failed = rewriting.failed or in_doubt
        return change

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

    def over(self, change: Change) -> None:
        """It is in flight no longer."""
        tp = change.partition.topic_partition
        changes = self._in_flight[tp]
        del changes[id(change)]
        if not changes:
            del self._in_flight[tp]

    def not_appended(self, change: Change) -> None:
        """It is not in the log, or only a part of it is."""
        self.over(change)
        rewriting = self._rewritings.get(change.partition.topic_partition.partition)
        if rewriting is not None:
            rewriting.failed = True

    # -- rewriting ---------------------------------------------------------------------------------

    def may_rewrite(self, partition: Partition, records: int) -> bool:
        """Is none under way?  After one that failed the log has to grow by so many `records`."""
        index = partition.topic_partition.partition
        if index in self._rewritings or partition.log_end_offset < self._not_below.get(index, 0):
            return False
        self._not_below[index] = partition.log_end_offset + records
        return True

    def rewrite(
        self,
        partition: Partition,
        chunks: list[list[tuple[bytes, bytes | None]]],
        append: Append,
    ) -> None:
        """Begin to write the live rows, which come in `chunks`, again."""
        tp = partition.topic_partition
        changes = self._in_flight.get(tp, {}).values()
        start = min((c.floor for c in changes), default=partition.log_end_offset)
        rewriting = _Rewriting(start, {key for c in changes for key in c.keys})
        rewriting.failed = any(c.in_doubt for c in changes)
        self._rewritings[tp.partition] = rewriting
        rewriting.task = asyncio.ensure_future(self._rewrite(partition, rewriting, chunks, append))
        rewriting.task.add_done_callback(lambda task: self._rewritten(partition, rewriting, task))

    async def _rewrite(
        self,
        partition: Partition,
        rewriting: _Rewriting,
        chunks: list[list[tuple[bytes, bytes | None]]],
        append: Append,
    ) -> None:
        before = partition.log_end_offset - partition.log_start_offset
        for chunk in chunks:
            rows = [row for row in chunk if row[0] not in rewriting.touched]
            if rows:
                await self._append_again(partition, rows, append)
        tp, epoch = partition.topic_partition, partition.leader_epoch
        if rewriting.failed or not all(c.in_log for c in self._in_flight.get(tp, {}).values()):
            return
        # The changes that stand for rows which were left out may be the last in the log.
        await self.committed(partition, partition.log_end_offset, epoch)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(result: object, error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        self._on_thread(partition, lambda: partition.delete_records(rewriting.start), told)
        await done
        self._replicas.start_moved(tp)
        after = partition.log_end_offset - partition.log_start_offset
        log.info("rewrote %s: %d records became %d", partition.topic_partition, before, after)

    async def _append_again(
        self, partition: Partition, rows: list[tuple[bytes, bytes | None]], append: Append
    ) -> None:
        self._replicas.may_append(partition.topic_partition)
        epoch = partition.leader_epoch
        appended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def told(end_offset: int, error: BaseException | None) -> None:
            if not appended.done():
                if error is None:
                    appended.set_result(end_offset)
                else:
                    appended.set_exception(error)

        append(rows, told)
        await self.committed(partition, await appended, epoch)

    def _rewritten(
        self, partition: Partition, rewriting: _Rewriting, task: asyncio.Task[None]
    ) -> None:
        index = partition.topic_partition.partition
        if self._rewritings.get(index) is rewriting:
            del self._rewritings[index]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning(
                "%s could not be rewritten, it stays as long as it is: %s",
                partition.topic_partition,
                error,
                exc_info=None if isinstance(error, KdirectError) else error,
            )

    def end(self, index: int) -> None:
        """Another broker coordinates a partition: leave its log alone."""
        self._not_below.pop(index, None)
        rewriting = self._rewritings.pop(index, None)
        if rewriting is not None and rewriting.task is not None:
            rewriting.task.cancel()
