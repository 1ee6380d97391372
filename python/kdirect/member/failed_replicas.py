"""Replicas of this broker that cannot be used, and what the controller is told of them.

Owns: which partitions lay in log directories that have failed while this process lives, or were not
there when it began.  The controller is told until the store has it (`ReplicasFailed`), so that
others lead these partitions and nobody counts on this broker; and told again after this broker has
registered once more, for then it counts as another process.

A leader whose log has no room stays a replica: the controller is asked to have another one lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from kdirect.cluster.codes import Code
from kdirect.cluster.requests import ReplicasFailed
from kdirect.errors import KdirectError
from kdirect.member.metadata import Metadata
from kdirect.member.pause import Pause
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.member")

ASK_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0  # while the store does not have it
FULL_PAUSE_S = 5.0  # until the controller is told again of one that has no room still


class _Untold(NamedTuple):
    """What the store lacks: replicas of this broker, as the process that it is."""

    incarnation: int
    rows: tuple[TopicPartition, ...]


class FailedReplicas:
    """See the module.  All on the event loop, but for `in`: any thread."""

    def __init__(self, membership: Any, broker: int) -> None:
        self._membership = membership
        self._broker = broker
        self._failed: set[TopicPartition] = set()
        self._telling: asyncio.Task[None] | None = None
        self._asked: _Untold | None = None  # what the controller was told last
        self._changed = asyncio.Event()  # there is something else to tell
        self._full: dict[TopicPartition, asyncio.Task[None]] = {}
        self._stopped = False

    def __contains__(self, tp: object) -> bool:
        return tp in self._failed

    def add(self, partitions: Iterable[TopicPartition]) -> None:
        """Their directory has failed."""
        self._failed.update(partitions)
        self.look()

    def discard(self, tp: TopicPartition) -> None:
        """This broker has no replica of the partition any more."""
        self._failed.discard(tp)

    def look(self) -> None:
        """The metadata may have changed: tell what it lacks."""
        if self._telling is not None:
            if self._untold() != self._asked:
                self._changed.set()
        elif not self._stopped and self._untold().rows:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def told(self) -> None:
        """Return when the controller knows, or cannot be told in time."""
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=ASK_S)

    def stop(self) -> None:
        """Tell no more."""
        self._stopped = True
        for task in (self._telling, *self._full.values()):
            if task is not None:
                task.cancel()

    def _untold(self) -> _Untold:
        metadata: Metadata = self._membership.metadata
        own = (self._broker, metadata.incarnation)
        found = []
        for tp in self._failed if metadata.incarnation >= 0 else ():
            picture = metadata.partition(tp)
            if picture is None or picture.state is None or self._broker not in picture.replicas:
                continue
            if own not in picture.failed:
                found.append(tp)
        return _Untold(metadata.incarnation, tuple(sorted(found)))

    async def _tell(self) -> None:
        """Tell until there is nothing to tell: at once what is new, the same after a pause."""
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while (untold := self._untold()).rows:
                if untold != self._asked:
                    pause.reset()
                self._asked = untold
                self._changed.clear()
                await self._ask(untold.rows, is_full=False)
                if self._untold() == untold:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), pause.next_s())
        finally:
            self._telling = self._asked = None

    async def _ask(self, rows: tuple[TopicPartition, ...], *, is_full: bool) -> None:
        incarnation = self._membership.metadata.incarnation
        try:
            request = ReplicasFailed(None, self._broker, incarnation, rows, is_full)
            answer = await self._membership.ask(request, ASK_S)
        except KdirectError as e:
            log.warning("the controller was not told of replicas that cannot go on: %s", e)
            return
        if answer.outcome.code is not Code.NONE:
            log.warning("the controller does not take it that replicas fail: %s", answer.outcome)

    def is_full(self, tp: TopicPartition) -> None:
        """This broker is in sync, as others are, and has no room for records of the partition."""
        if tp not in self._full and not self._stopped:
            log.warning("there is no room for records of %s: others are to go on without it", tp)
            self._full[tp] = asyncio.get_running_loop().create_task(self._hand_over(tp))

    async def _hand_over(self, tp: TopicPartition) -> None:
        try:
            await self._ask((tp,), is_full=True)
            await asyncio.sleep(FULL_PAUSE_S)
        finally:
            del self._full[tp]
