"""What a broker does again and again: retention, flushes that are due, checkpoints, offsets and
connections that nobody needs any more, and the removal of deleted files that have waited.

Owns: when each of them is done next: a while after it last ended, or when the next file is due.
What is to be done is known by whom it concerns, and file work runs on the upkeep thread.  It is
coarse: an idle broker does nothing but look at the log once in a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from kdirect.broker.config import BrokerConfig
from kdirect.broker.files import FileThreads
from kdirect.broker.scheduler import soon
from kdirect.broker.topics import Registry
from kdirect.log.manager import LogManager
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.broker")

IDLE_BACKOFF = 10
REMOVALS = "log.segment.delete.delay.ms"


class PeriodicWork:
    """See the module.  Used on the event loop, between `start` and `stop`; `tasks` is what is under
    way."""

    def __init__(
        self,
        config: BrokerConfig,
        environment: Environment,
        logs: LogManager,
        files: FileThreads,
        topics: Registry,
    ) -> None:
        self._config = config
        self._environment = environment
        self._logs = logs
        self._files = files
        self._topics = topics
        self.tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_backoff = 1
        self._removing = False
        self._stopping = False

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        expire_offsets: Callable[[], Coroutine[Any, Any, None]],
        close_idle: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """The loop runs; `expire_offsets` and `close_idle` are the groups' and the connections'."""
        self._loop = loop
        self._every("log.retention.check.interval.ms", self._apply_retention)
        self._every("log.flush.scheduler.interval.ms", self._flush_due)
        self._every("log.flush.offset.checkpoint.interval.ms", self._checkpoint)
        self._every("offsets.retention.check.interval.ms", expire_offsets)
        if self._config["connections.max.idle.ms"] > 0:
            self._every("connections.max.idle.ms", close_idle)
        self._logs.removals.on_sooner = lambda: soon(loop, self._await_removals)
        self._await_removals()

    def stop(self) -> None:
        """Begin nothing more; what is under way goes on."""
        self._stopping = True
        for timer in self._timers.values():
            timer.cancel()

    def _every(self, option: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` again and again, `option` milliseconds after it last ended."""
        assert self._loop is not None
        if not self._stopping:
            factor = self._flush_backoff if work == self._flush_due else 1
            again = partial(self._every, option, work)
            self._timers[option] = self._loop.call_later(
                self._config[option] * factor / 1000, self._begin, option, work, again
            )

    def _begin(
        self,
        option: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        again: Callable[[], None],
    ) -> None:
        task = asyncio.ensure_future(work())
        self.tasks.add(task)
        task.add_done_callback(lambda t: self._ended(t, option, again))

    def _ended(self, task: asyncio.Task[None], option: str, again: Callable[[], None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("periodic work of %s failed", option, exc_info=task.exception())
        again()

    def _await_removals(self) -> None:
        """Remove deleted files when the next of them is due, which may be sooner than it was."""
        assert self._loop is not None
        due_in = self._logs.removals.due_in()
        timer = self._timers.pop(REMOVALS, None)
        if timer is not None:
            timer.cancel()
        if due_in is not None and not self._stopping and not self._removing:
            self._timers[REMOVALS] = self._loop.call_later(due_in, self._begin_removals)

    def _begin_removals(self) -> None:
        self._removing = True
        self._begin(REMOVALS, self._remove_due, self._removed)

    async def _remove_due(self) -> None:
        await self._maintain(self._logs.removals.remove_due)

    def _removed(self) -> None:
        self._removing = False
        self._await_removals()

    async def _maintain(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._stopping:
            return None
        return await self._files.upkeep(work, *arguments)

    async def _apply_retention(self) -> None:
        await self._maintain(self._logs.apply_retention, self._environment.time_ms())

    async def _flush_due(self) -> None:
        flushed = await self._maintain(self._logs.flush_due, self._environment.time_ms())
        names = {
            "flush.ms",
            "flush.messages",
            "log.flush.interval.ms",
            "log.flush.interval.messages",
        }
        timed = bool(names & self._config.given) or any(
            names & t.configs.keys() for t in self._topics
        )
        # Without a promised time, an idle log is looked at less often.
        self._flush_backoff = 1 if flushed or timed else IDLE_BACKOFF

    async def _checkpoint(self) -> None:
        await self._maintain(self._logs.checkpoint)
