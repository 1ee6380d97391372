"""Log directories that fail while the broker runs: their partitions are let go, or the broker ends.

Owns: what follows on the event loop when `LogManager` says that a directory has failed, or that a
log could not be written for lack of room.  Which errors say that is `kdirect.log.trouble`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from kdirect.broker.scheduler import soon
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker")

EndAccess = Callable[[list[TopicPartition], Callable[[], Any]], Coroutine[Any, Any, None]]


class FailingDirectories:
    """See the module.  `member`: the broker's part in a cluster, or None.  `end_access(partitions,
    remove)`: end every access to partitions, and have them removed.  `tasks` is what is under
    way."""

    def __init__(self, logs: LogManager, member: Any, end_access: EndAccess) -> None:
        self._logs = logs
        self._member = member
        self._end_access = end_access
        self.tasks: set[asyncio.Task[None]] = set()
        self._all_failed = asyncio.Event()  # no directory is left: the broker is to be stopped
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        logs.on_failed = self._failed
        logs.on_full = self._is_full

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def stop(self) -> None:
        """Begin nothing more: everything is let go."""
        self._stopping = True

    async def until_told(self, stop: asyncio.Event) -> bool:
        """Return when the broker is to be stopped: `stop` is set, or, False, no log directory is
        left that works."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self._all_failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._all_failed.is_set()

    def _failed(self, directory: Path) -> None:
        """Any thread."""
        if self._loop is not None:
            soon(self._loop, self._let_go, directory)

    def _let_go(self, directory: Path) -> None:
        if self._stopping:  # everything is let go
            return
        task = asyncio.ensure_future(self._end_directory(directory))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _end_directory(self, directory: Path) -> None:
        """End every access to the partitions in it, and let them go."""
        partitions = list(self._logs.partitions.values())
        doomed = [p.topic_partition for p in partitions if p.directory.parent == directory]
        if not self._logs.usable_dirs:
            log.critical("all log directories have failed: the broker ends")
            if self._member is not None:  # or the next process would be taken to have all records
                self._member.replicas.failed.add(doomed)
                await self._member.replicas.failed.told()
            self._all_failed.set()
            return
        try:
            if self._member is not None:
                await self._member.directory_failed(doomed)
            await self._end_access(doomed, partial(self._logs.drop, directory))
        except Exception:
            log.exception("the partitions of %s were not let go", directory)

    def _is_full(self, partition: Partition) -> None:
        """A log could not be written for lack of room.  Any thread."""
        if self._loop is not None and self._member is not None:
            soon(self._loop, self._member.replicas.has_no_room, partition.topic_partition)
