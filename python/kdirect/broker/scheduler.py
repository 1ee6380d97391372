"""How the rooms of RDMA access come to the broker's event loop, from it or from another thread.

Owns: the way to the loop, and its end: once it is stopped nothing is scheduled any more.  A
simulator passes another `Scheduler` in, whose time it moves itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("kdirect.broker")


class Scheduler(Protocol):
    """What is scheduled runs on the event loop, one call at a time."""

    def soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Call back when the loop comes round.  Any thread."""

    def later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        """Call back after a while.  On the loop."""

    def new_future(self) -> asyncio.Future[Any]:
        """A future of the loop.  On the loop."""


def soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    """Call back on a loop, unless it is closed.  Any thread."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        log.debug("the event loop is closed")


class LoopScheduler:
    """The scheduler of an asyncio event loop.  Life: construct, `start`, `stop` from any thread."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def stop(self) -> None:
        """Nothing is scheduled from here on."""
        self.loop = None

    def soon(self, callback: Callable[..., None], *args: Any) -> None:
        loop = self.loop
        if loop is not None:
            soon(loop, callback, *args)

    def later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        if self.loop is not None:
            self.loop.call_later(seconds, callback, *args)

    def new_future(self) -> asyncio.Future[Any]:
        assert self.loop is not None
        return self.loop.create_future()
