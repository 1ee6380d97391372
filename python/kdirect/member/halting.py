"""Replicas that are halted for a moment, because their log is moved to another log directory.

Owns: which are, and that one whose partition goes meanwhile does not come back.  On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kdirect.errors import KdirectError
from kdirect.log.partition import Partition
from kdirect.member.metadata import Metadata
from kdirect.member.replicas import Replicas
from kdirect.model import TopicPartition


class HaltedReplicas:
    """See the module.  `metadata()`: the newest picture of the cluster."""

    def __init__(self, broker: int, replicas: Replicas, metadata: Callable[[], Metadata]) -> None:
        self._broker = broker
        self._replicas = replicas
        self._metadata = metadata
        self._halting: dict[TopicPartition, asyncio.Task[None]] = {}

    def is_in_sync(self, tp: TopicPartition) -> bool:
        """Is the replica of this broker in sync, by what the cluster knows?"""
        picture = self._metadata().partition(tp)
        state = picture.state if picture is not None else None
        return state is not None and self._broker in state.in_sync

    async def halt(self, tp: TopicPartition) -> None:
        """Until `resume`, nobody leads, fetches or writes the log here."""
        if tp in self._halting:
            raise KdirectError(
                f"the replica of {tp} is halted already, and has not let go of its log",
                hint="nothing to do: its move is tried again",
            )
        task = asyncio.ensure_future(self._replicas.remove(tp))
        self._halting[tp] = task
        await asyncio.shield(task)

    def resume(self, partition: Partition) -> None:
        """Lead or follow again, once it has halted, unless the replica has gone meanwhile."""
        task = self._halting.get(partition.topic_partition)
        if task is None:
            return
        if task.done():
            self._go_on(partition)
        else:  # it took too long
            task.add_done_callback(lambda _: self._go_on(partition))

    def _go_on(self, partition: Partition) -> None:
        if self._halting.pop(partition.topic_partition, None) is not None:
            self._replicas.add(partition, again=True)

    def forget(self, tp: TopicPartition) -> None:
        """It does not come back."""
        self._halting.pop(tp, None)

    async def gone(self, tp: TopicPartition) -> None:
        """The log is about to go."""
        task = self._halting.pop(tp, None)
        if task is not None:
            await asyncio.wait([task])
        await self._replicas.remove(tp)


__all__ = ["HaltedReplicas"]
