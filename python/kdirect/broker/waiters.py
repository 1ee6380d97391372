"""Fetches that wait for records.

Owns: who waits for which partitions.  A waiter costs nothing while nothing is appended: no polling,
one timer of the event loop for its time limit.

`notify` is called on the event loop after an append over TCP; `notify_from_thread` by any other
thread (the RDMA produce worker).  When nobody waits for the partition, either is one lookup in a
dictionary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from kdirect.broker.scheduler import soon
from kdirect.model import TopicPartition


class Waiter:
    """One waiting Fetch.  `missing`: bytes that must still arrive before it looks again."""

    __slots__ = ("future", "missing", "partitions")

    def __init__(
        self, partitions: tuple[TopicPartition, ...], missing: int, future: asyncio.Future[None]
    ) -> None:
        self.partitions = partitions
        self.missing = missing
        self.future = future

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Waiters:
    """All waiting fetches of a broker."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[TopicPartition, set[Waiter]] = {}
        self._scheduled: set[TopicPartition] = set()
        self.closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __len__(self) -> int:
        return len({w for waiters in self._waiting.values() for w in waiters})

    @property
    def by_partition(self) -> dict[TopicPartition, set[Waiter]]:
        """Who waits for which partition: for a look whether anybody does."""
        return self._waiting

    def add(self, partitions: Iterable[TopicPartition], missing: int) -> Waiter:
        """Register a wait for `missing` bytes on any of `partitions`; the caller awaits
        ``waiter.future``, then calls `remove`."""
        assert self._loop is not None
        waiter = Waiter(tuple(partitions), missing, self._loop.create_future())
        for tp in waiter.partitions:
            self._waiting.setdefault(tp, set()).add(waiter)
        if self.closed:
            waiter.wake()
        return waiter

    def stand(self, tp: TopicPartition, waiter: Any) -> None:
        """Have `waiter.wake` called for each growth of `tp` until `leave`; it has `missing` as a
        Waiter has."""
        self._waiting.setdefault(tp, set()).add(waiter)

    def leave(self, tp: TopicPartition, waiter: Any) -> None:
        """Undo `stand`."""
        waiting = self._waiting.get(tp)
        if waiting is not None:
            waiting.discard(waiter)
            if not waiting:
                del self._waiting[tp]

    def remove(self, waiter: Waiter) -> None:
        for tp in waiter.partitions:
            self.leave(tp, waiter)

    def notify(self, tp: TopicPartition, size: int = -1) -> None:
        """Records are readable on `tp`: `size` bytes of them, or -1: unknown, look again."""
        waiting = self._waiting.get(tp)
        if waiting:
            for waiter in tuple(waiting):
                waiter.missing -= size
                if size < 0 or waiter.missing <= 0:
                    waiter.wake()

    def notify_from_thread(self, tp: TopicPartition) -> None:
        """`notify(tp)` from any thread.  Repeated calls before the loop comes round are one."""
        if tp not in self._waiting or tp in self._scheduled:
            return
        self._scheduled.add(tp)
        loop = self._loop
        if loop is not None:  # if it is closed, nobody waits any more
            soon(loop, self._deliver, tp)

    def _deliver(self, tp: TopicPartition) -> None:
        self._scheduled.discard(tp)
        self.notify(tp)

    def close(self) -> None:
        """Wake everybody; later waiters do not wait."""
        self.closed = True
        for waiting in list(self._waiting.values()):
            for waiter in list(waiting):
                waiter.wake()
