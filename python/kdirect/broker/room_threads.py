"""The threads of one log directory: two for whatever is to be done, one more for what is urgent.

Owns: which work begins next.  What is urgent (`kdirect.log.urgent`) goes before all that waits, and
while both threads are at other work, which a slow disk may hold for seconds, a third one does it.
So a directory has as many threads as before until something urgent finds both of them busy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from kdirect.log.urgent import Urgent

ROOM_THREADS = 2  # a log directory


class _Item(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]
    urgent: bool
    owner: object


class RoomThreads:
    """See the module.  Any thread; those of the pool are started as they are needed."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(ROOM_THREADS + 1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._urgent: deque[_Item] = deque()
        self._others: deque[_Item] = deque()
        self._running = 0
        self._running_urgent = 0
        self._closed = False

    def submit(self, work: Callable[[], Any], owner: object = None) -> Future[Any]:
        """Do `work`, of `owner`, on a thread.  RuntimeError after `shutdown`."""
        item = _Item(Future(), work, isinstance(work, Urgent), owner)
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are stopping")
            (self._urgent if item.urgent else self._others).append(item)
            self._begin()
        return item.future

    def hurry(self, owner: object) -> None:
        """What waits of this owner is urgent from now on."""
        with self._lock:
            if self._closed:
                return
            mine = [item for item in self._others if item.owner is owner]
            if mine:
                self._others = deque(item for item in self._others if item.owner is not owner)
                self._urgent.extend(item._replace(urgent=True) for item in mine)
                self._begin()

    def _begin(self) -> None:
        """Begin one more work, if one may; the lock is held."""
        begun = self._take()
        if begun is not None:
            self._pool.submit(self._run, begun)

    def _take(self) -> _Item | None:
        """What begins now, and is counted; the lock is held."""
        free = self._running < ROOM_THREADS
        if self._urgent and (free or not self._running_urgent):
            item = self._urgent.popleft()
        elif self._others and free:
            item = self._others.popleft()
        else:
            return None
        self._running += 1
        self._running_urgent += item.urgent
        return item

    def _run(self, item: _Item | None) -> None:
        while item is not None:
            if item.future.set_running_or_notify_cancel():
                try:
                    result = item.work()
                except BaseException as e:
                    item.future.set_exception(e)
                else:
                    item.future.set_result(result)
            with self._lock:
                self._running -= 1
                self._running_urgent -= item.urgent
                item = self._take()

    def shutdown(self, *, wait: bool) -> None:
        """Drop what has not begun; with `wait`, return when what has is done."""
        with self._lock:
            self._closed = True
            dropped = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
        for item in dropped:
            item.future.cancel()
            item.future.set_running_or_notify_cancel()
        self._pool.shutdown(wait=wait)
