"""The threads of one log directory: two for whatever is to be done, one more for what is urgent.

Owns: which work begins next.  What is urgent (`kdirect.log.urgent`) goes before all that waits, and
while both threads are at other work, which a slow disk may hold for seconds, a third one does it,
where failovers wait for it (`fails_over`).  A broker that is alone never has the third one, and
others not until something urgent finds both of them busy.
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
    owner: object


class RoomThreads:
    """See the module.  Any thread; those of the pools are started as they are needed."""

    def __init__(self, name: str) -> None:
        self.fails_over = False  # replicas of other brokers are here, too
        # Of its own: a pool begins a thread where those that it has are not idle yet, though they
        # have done their work.
        self._third = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-urgent")
        self._pool = ThreadPoolExecutor(ROOM_THREADS, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._urgent: deque[_Item] = deque()
        self._others: deque[_Item] = deque()
        self._running = 0
        self._third_runs = False
        self._closed = False

    def submit(self, work: Callable[[], Any], owner: object = None) -> Future[Any]:
        """Do `work`, of `owner`, on a thread.  RuntimeError after `shutdown`."""
        item = _Item(Future(), work, owner)
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are stopping")
            (self._urgent if isinstance(work, Urgent) else self._others).append(item)
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
                self._urgent.extend(mine)
                self._begin()

    def _begin(self) -> None:
        """Begin one more work, if one may; the lock is held."""
        if self._running < ROOM_THREADS:
            self._running += 1
            self._pool.submit(self._run)
        elif self._urgent and self.fails_over and not self._third_runs:
            self._third_runs = True
            self._third.submit(self._run_urgent)

    def _run(self) -> None:
        while True:
            with self._lock:
                waiting = self._urgent or self._others
                if not waiting:
                    self._running -= 1
                    return
                item = waiting.popleft()
            _do(item)

    def _run_urgent(self) -> None:
        while True:
            with self._lock:
                if not self._urgent:
                    self._third_runs = False
                    return
                item = self._urgent.popleft()
            _do(item)

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
        for pool in (self._pool, self._third):
            pool.shutdown(wait=wait)


def _do(item: _Item) -> None:
    if item.future.set_running_or_notify_cancel():
        try:
            result = item.work()
        except BaseException as e:
            item.future.set_exception(e)
        else:
            item.future.set_result(result)
