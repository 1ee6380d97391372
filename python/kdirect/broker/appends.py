"""Appends that the event loop makes: of Kafka's producers, and of the broker to its own topics.

Owns: the order of appends to one partition.  An append is made at once where the partition's head
has room.  Where room has to be made (the partition's first record, a full head) that is file work:
the append and everything after it to the same partition wait in a queue, the first of them is made
on a thread, and the rest follow on the loop.

    free ---- no room ---> working: a thread makes room and the first append ---> draining ---> free
    free ---- hold ------> held: everything waits, because RDMA producers have the head, or it is
                           being exchanged ---- release ---> draining

Invariants:

- Appends to one partition are made, and their outcomes told, in the order of the calls.
- While anything waits nothing overtakes it, and while a partition is held nothing is appended to it
  from here.
- `hold` succeeds at once, but a thread may still be at work with one append; `on_idle` tells when
  it is not.
- A partition that another broker leads is refused: what waits fails, and so does what comes, until
  it is accepted again.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from kdirect.broker.files import OnThread
from kdirect.errors import KdirectError
from kdirect.log.partition import AppendResult, Partition
from kdirect.model import TopicPartition

DRAIN_BYTES = 1 << 20  # copied and checked in one go; then others have their turn

# `then(result, None)` or `then(None, error)`: an append's outcome.
Then: TypeAlias = Callable[[Any, BaseException | None], None]


class PendingAppend:
    """Batches that wait for their turn.  `then` is called once, with their outcome.  `checked`: the
    kernel has seen that they are whole batches, so that they may be given to a head that others
    write.  `is_marker`: it is a coordinator's marker that ends a transaction."""

    __slots__ = ("checked", "data", "is_marker", "now_ms", "partition", "then")

    def __init__(
        self,
        partition: Partition,
        data: bytes,
        now_ms: int,
        then: Then,
        *,
        is_marker: bool = False,
    ) -> None:
        self.partition = partition
        self.data = data
        self.now_ms = now_ms
        self.then = then
        self.checked = False
        self.is_marker = is_marker

    def try_now(self) -> AppendResult | None:
        """Append, if there is room; else None, and nothing has changed."""
        if self.is_marker:
            return self.partition.append_marker_nowait(self.data, self.now_ms)
        return self.partition.append_nowait(self.data, self.now_ms)

    def make(self) -> AppendResult:
        """Make room and append, on a thread that may wait."""
        if self.is_marker:
            return self.partition.append_marker(self.data, self.now_ms)
        return self.partition.append(self.data, self.now_ms)

    def settle(self, result: Any) -> None:
        self.then(result, None)

    def fail(self, error: BaseException) -> None:
        self.then(None, error)


class Appends:
    """See the module.  `on_thread` as `FileThreads.for_partition`; `later(callback, *args)` calls
    back on the event loop; `new_future()` makes a future of it."""

    def __init__(
        self,
        *,
        on_thread: OnThread,
        later: Callable[..., None],
        new_future: Callable[[], asyncio.Future[Any]],
    ) -> None:
        self.on_thread = on_thread
        self._later = later
        self._new_future = new_future
        # Called after an append that nobody was waiting for on the spot, and when nothing waits any
        # more.
        self.appended: Callable[[TopicPartition], None] = lambda tp: None
        self.on_idle: Callable[[TopicPartition], None] = lambda tp: None
        self._queues: dict[TopicPartition, deque[PendingAppend]] = {}
        self._held: dict[TopicPartition, int] = {}
        self._working: dict[TopicPartition, PendingAppend] = {}
        self._refused: dict[TopicPartition, tuple[KdirectError, Callable[[], None]]] = {}

    # -- appending ---------------------------------------------------------------------------------

    def append_nowait(
        self, partition: Partition, data: Any, at_ms: int, *, own: bool = False
    ) -> AppendResult | None:
        """Append whole batches, if nothing is to be waited for: no room to be made, and nobody
        before them.  None, and nothing has changed: then `append`.  `own`: see
        `Partition.append_nowait`."""
        if not self.is_free(partition.topic_partition):
            return None
        return partition.append_nowait(data, at_ms, own=own)

    def append(self, partition: Partition, data: Any, at_ms: int) -> asyncio.Future[AppendResult]:
        """The same after whatever comes first; its place among the appends to the partition is that
        of this call.  The future raises as `Partition.append`."""
        future = self._new_future()
        self.append_later(PendingAppend(partition, bytes(data), at_ms, partial(resolve, future)))
        return future

    def append_marker(
        self, partition: Partition, batch: bytes, at_ms: int
    ) -> asyncio.Future[AppendResult]:
        """The same of a marker that ends a transaction, made by
        `kdirect.log.kernel_transactions.marker_batch`."""
        future = self._new_future()
        then = partial(resolve, future)
        self.append_later(PendingAppend(partition, batch, at_ms, then, is_marker=True))
        return future

    def append_later(self, item: PendingAppend) -> None:
        """Put an append after those that wait.  Its data is the item's own."""
        tp = item.partition.topic_partition
        if tp in self._refused:
            item.fail(self._refused[tp][0])
            return
        self._queues.setdefault(tp, deque()).append(item)
        if tp not in self._held and tp not in self._working:
            self._drain(tp)

    # -- who may append ----------------------------------------------------------------------------

    def is_free(self, tp: TopicPartition) -> bool:
        """May an append be made at once?"""
        return tp not in self._queues and tp not in self._held and tp not in self._working

    @property
    def busy(self) -> tuple[dict[TopicPartition, Any], ...]:
        """The tables of the partitions that are not free."""
        return self._queues, self._held, self._working

    def hold(self, tp: TopicPartition) -> None:
        """Let appends wait until the matching `release`."""
        self._held[tp] = self._held.get(tp, 0) + 1

    def release(self, tp: TopicPartition) -> None:
        """Undo one `hold`; with the last one, what waits is appended."""
        count = self._held.pop(tp) - 1
        if count:
            self._held[tp] = count
        elif tp not in self._working:
            self._drain(tp)

    # -- for who holds a partition -----------------------------------------------------------------

    def waiting(self, tp: TopicPartition) -> bool:
        return tp in self._queues

    def take(self, tp: TopicPartition) -> PendingAppend | None:
        """The first of those that wait, for whoever holds the partition: settled there, or brought
        back by `put_back`."""
        queue = self._queues.get(tp)
        if queue is None:
            return None
        item = queue.popleft()
        if not queue:
            del self._queues[tp]
        return item

    def put_back(self, tp: TopicPartition, items: Iterable[PendingAppend]) -> None:
        """Let `items` wait again, before all others, in their order."""
        items = list(items)
        if tp in self._refused:
            for item in items:
                item.fail(self._refused[tp][0])
        elif items:
            self._queues.setdefault(tp, deque()).extendleft(reversed(items))

    def refuse(
        self, tp: TopicPartition, error: KdirectError, settled: Callable[[], None] = lambda: None
    ) -> None:
        """Nothing is appended any more: what waits fails with `error`, and so does what comes,
        until `accept`.  A thread may be at work with one append, which is still made; then
        `settled` is called when it is done (see `is_settled`)."""
        if tp not in self._refused:
            self.hold(tp)
        self._refused[tp] = error, settled
        working = self._working.get(tp)
        waiting = self._queues.pop(tp, deque())
        if working is not None:
            self._queues[tp] = deque([working])  # it is the first of those that wait
        for item in waiting:
            if item is not working:
                item.fail(error)

    def is_settled(self, tp: TopicPartition) -> bool:
        """Is no thread at work with an append?"""
        return tp not in self._working

    def accept(self, tp: TopicPartition) -> None:
        """Undo `refuse`, if there was one."""
        if self._refused.pop(tp, None) is not None:
            self.release(tp)

    def fail_waiting(self, tp: TopicPartition, error: KdirectError) -> None:
        """The partition is gone."""
        for item in self._queues.pop(tp, ()):
            item.fail(error)

    # -- making room -------------------------------------------------------------------------------

    def _drain(self, tp: TopicPartition) -> None:
        """Append what waits, as far as there is room; a thread makes more."""
        budget = DRAIN_BYTES
        while tp not in self._held and tp not in self._working and (queue := self._queues.get(tp)):
            if budget <= 0:
                self._later(self._drain, tp)
                return
            item = queue[0]
            budget -= len(item.data)
            try:
                result = item.try_now()
            except Exception as e:
                queue.popleft()
                item.fail(e)
                continue
            if result is None:
                self._working[tp] = item
                self.on_thread(item.partition, item.make, partial(self._made, item))
                return
            queue.popleft()
            item.settle(result)
            self.appended(tp)
        if tp in self._queues and not self._queues[tp]:
            del self._queues[tp]
        if self.is_free(tp):
            self.on_idle(tp)

    def _made(self, item: PendingAppend, result: Any, error: BaseException | None) -> None:
        """A thread has made room and the first append, or could not."""
        tp = item.partition.topic_partition
        current = self._working.get(tp) is item
        if current:
            del self._working[tp]
            queue = self._queues.get(tp)
            if queue and queue[0] is item:
                queue.popleft()
                if not queue:
                    del self._queues[tp]
        if error is not None:
            item.fail(error)
        else:
            item.settle(result)
            self.appended(tp)
        if current:
            self._drain(tp)
            if tp in self._refused:
                self._refused[tp][1]()
            if tp in self._held:
                self.on_idle(tp)


def resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its outcome, unless whoever waited for it is gone."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
