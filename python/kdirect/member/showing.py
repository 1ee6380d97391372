"""How readers of a replica's log get to see what is committed, where Python says how far that is.

Owns: the high watermark that is to be shown and is not yet.  Most of the time it is shown at once,
on the event loop; where a file has to be opened, or a flush is under way, on a thread.  What could
not be shown is tried again: nothing else would move the high watermark of a log that is quiet, and
an acknowledgement may wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kdirect.errors import ClosedError
from kdirect.log.partition import Partition

log = logging.getLogger("kdirect.member")

SHOWN = -1  # whose confirmations the log's gate waits for: the machine's
RETRY_S = 1.0  # after a file could not be opened, say


class Showing:
    """See the module.  `on_thread` as `FileThreads.for_partition`; `shown()`: readers may see more.
    All on the event loop."""

    def __init__(
        self, partition: Partition, on_thread: Callable[..., None], shown: Callable[[], None]
    ) -> None:
        self._partition = partition
        self._on_thread = on_thread
        self._shown = shown
        self._unshown = -1  # to be shown when the thread, or the time, has come
        self._under_way: asyncio.Future[None] | None = None  # done when the thread has ended
        self._retry: asyncio.TimerHandle | None = None
        self._told_failure = ""
        self._stopped = 0

    def show(self, offset: int) -> None:
        """Records below `offset` may be read."""
        waits = self._under_way is not None or self._retry is not None
        if not waits and self._partition.replicated_nowait(SHOWN, offset):
            self._shown()
            return
        self._unshown = max(self._unshown, offset)
        if not waits:
            self._begin()

    def stop(self) -> asyncio.Future[None]:
        """Forget what is not shown yet, because the log may be cut.  The future: no thread is at it
        any more.  `show` may be called again after that."""
        self._unshown = -1
        self._stopped += 1
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._under_way is not None:
            return self._under_way
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _begin(self) -> None:
        self._retry = None
        offset, self._unshown = self._unshown, -1
        self._under_way = asyncio.get_running_loop().create_future()
        work = partial(self._partition.replicated, SHOWN, offset)
        self._on_thread(self._partition, work, partial(self._showed, offset, self._stopped))

    def _showed(self, offset: int, stopped: int, result: Any, error: BaseException | None) -> None:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        under_way.set_result(None)
        failure = "" if error is None else str(error)
        if failure and failure != self._told_failure:  # it is tried again and again
            tp = self._partition.topic_partition
            log.error("the high watermark of %s was not shown: %s", tp, failure)
        self._told_failure = failure
        if stopped == self._stopped:
            if error is None:
                self._shown()
            elif not isinstance(error, ClosedError):
                self._unshown = max(self._unshown, offset)
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._begin)
                return
        if self._unshown >= 0 and self._under_way is None and self._retry is None:
            self._begin()


__all__ = ["SHOWN", "Showing"]
