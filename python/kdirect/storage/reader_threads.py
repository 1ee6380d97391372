"""Threads that wait for an object store, so that nobody else does: those that read, and those of
`kdirect.storage.remote_logs`.

Owns: the two queues, that of what somebody waits for and that of what may be wanted later, and the
rule between them: work ahead is done while nobody waits, and never by the last free thread.  What
the work is is not known here.

Nobody waits for a thread: it may hang in a store.  `close` fails what is not done and leaves the
threads to themselves; they are daemons.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from kdirect.errors import ClosedError, KdirectError

log = logging.getLogger("kdirect.storage")
UNLIMITED = 1 << 62
_Result = TypeVar("_Result")


class ReaderThreads:
    """`threads` of them, started with the first task; `max_pending` tasks wait at most, in each
    queue.  Any thread may call, an event loop as well: nothing here waits."""

    def __init__(self, threads: int, max_pending: int = UNLIMITED, *, name: str) -> None:
        self._name = name
        self._count = max(threads, 1)
        self._max_pending = max_pending
        self._changed = threading.Condition()
        self._wanted: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._ahead: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._promised: set[Future[Any]] = set()
        self._busy = 0
        self._started = False
        self._running = 0  # threads that were started and have not left
        self.closed = False

    @property
    def queue_length(self) -> int:
        """Tasks that somebody waits for and no thread has begun."""
        return len(self._wanted)

    def submit(self, task: Callable[[], _Result]) -> Future[_Result] | None:
        """None: too many tasks wait already."""
        future: Future[_Result] = Future()
        with self._changed:
            self._require_open()
            if len(self._wanted) - (self._count - self._busy) >= self._max_pending:
                return None
            self._wanted.append((future, task))
            self._promised.add(future)
            self._start()
            self._changed.notify()
        return future

    def ahead(self, key: Hashable, task: Callable[[], object]) -> bool:
        """Do it when there is a thread for it, unless `key` is waiting for that already.  False:
        too many wait."""
        with self._changed:
            if self.closed or len(self._ahead) >= self._max_pending:
                return False
            if key not in self._ahead:
                self._ahead[key] = task
                self._start()
                self._changed.notify()
        return True

    def resize(self, threads: int) -> None:
        """Be so many from now on; those that are too many go once they have nothing in hand."""
        with self._changed:
            self._count = max(threads, 1)
            if self._started and not self.closed:
                self._start_missing()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            promised, self._promised = self._promised, set()
            self._wanted.clear()
            self._ahead.clear()
            self._changed.notify_all()
        for future in promised:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(_closed())

    def _require_open(self) -> None:
        if self.closed:
            raise _closed()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._start_missing()

    def _start_missing(self) -> None:
        while self._running < self._count:
            self._running += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            finally:
                with self._changed:
                    self._busy -= 1

    def _next(self) -> Callable[[], object] | None:
        """What is to be done now; None at the end, and for a thread that is one too many."""
        with self._changed:
            while not self.closed:
                if self._running > self._count:
                    self._running -= 1
                    return None
                task = self._choose()
                if task is not None:
                    self._busy += 1
                    return task
                self._changed.wait()
        return None

    def _choose(self) -> Callable[[], object] | None:
        while self._wanted:
            future, task = self._wanted.popleft()
            if future.set_running_or_notify_cancel():
                return lambda: self._keep_promise(future, task)
            self._promised.discard(future)
        if self._ahead and self._busy < self._count - 1:
            ahead = self._ahead.popitem(last=False)[1]
            return lambda: _try_ahead(ahead)
        return None

    def _keep_promise(self, future: Future[Any], task: Callable[[], Any]) -> None:
        with contextlib.suppress(InvalidStateError):  # it was closed meanwhile
            try:
                result = task()
            except BaseException as e:
                future.set_exception(e)
            else:
                future.set_result(result)
        with self._changed:
            self._promised.discard(future)


def _try_ahead(task: Callable[[], object]) -> None:
    """Nobody waits for it, and whoever reads it later meets the same error."""
    try:
        task()
    except KdirectError as e:
        log.debug("reading ahead: %s", e)
    except Exception:
        log.exception("reading ahead failed")


def _closed() -> ClosedError:
    return ClosedError("the reader of remote segments is closed", hint="the broker is stopping")
