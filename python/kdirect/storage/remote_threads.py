"""The threads of `kdirect.storage.remote_logs`, and their clock.

Owns: which work has threads of its own, who is looked at next, and what passes for time there.
What the work is is not known here.  A test has another class in its place, whose threads take turns
by a seed, in a time of its own.

=============================  =================================================================
threads                        for what
=============================  =================================================================
``kdirect-remote-look``        one: what partitions say of themselves, in each interval and when
                               one of them is woken
``kdirect-remote-copy``        uploads; each waits for one thread ``kdirect-remote-put``, which it
                               leaves alone when the store has taken nothing for too long
``kdirect-remote-expire``      deletions, looks at objects that others left, log starts that move
=============================  =================================================================

Daemons: a process may end while a store keeps them waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kdirect.storage.reader_threads import ReaderThreads

CLOSE_TIMEOUT_S = 2.0


class RemoteThreads:
    """See the module.  Any thread may call; only `wait` and the end of `close` wait."""

    def __init__(self, *, copiers: int, expirers: int, interval_s: float) -> None:
        self._copiers = ReaderThreads(copiers, name="kdirect-remote-copy")
        self._expirers = ReaderThreads(expirers, name="kdirect-remote-expire")
        self._interval_s = interval_s
        self._woken = threading.Condition()
        self._wakes: dict[Any, None] = {}  # in this order
        self._looker: threading.Thread | None = None
        self._closed = False

    def clock(self) -> float:
        """Seconds that pass."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Until the event is set; False when it was not in this time."""
        return event.wait(timeout_s)

    def resize(self, *, copiers: int, expirers: int) -> None:
        """Have so many threads from now on; what is under way goes on."""
        self._copiers.resize(copiers)
        self._expirers.resize(expirers)

    # -- work --------------------------------------------------------------------------------------

    def copy(self, work: Callable[[], None]) -> None:
        """ClosedError."""
        self._copiers.submit(work)

    def expire(self, work: Callable[[], None]) -> None:
        """ClosedError."""
        self._expirers.submit(work)

    def put(self, work: Callable[[], None]) -> None:
        """On a thread of its own, which nobody has to wait for."""
        threading.Thread(target=work, name="kdirect-remote-put", daemon=True).start()

    # -- looking -----------------------------------------------------------------------------------

    def start_looking(
        self, look: Callable[[Any], object], all_of: Callable[[], Iterable[Any]]
    ) -> None:
        """From now on have `look(each)` called, in each interval for `all_of()` and soon for those
        that are woken.  Nothing happens when that was begun already."""
        with self._woken:
            if self._looker is None and not self._closed:
                self._looker = threading.Thread(
                    target=self._look_for_ever,
                    args=(look, all_of),
                    name="kdirect-remote-look",
                    daemon=True,
                )
                self._looker.start()

    def wake(self, one: Any) -> None:
        """Have it looked at soon, once however often it is woken until then."""
        with self._woken:
            if one not in self._wakes:
                self._wakes[one] = None
                self._woken.notify()

    def _look_for_ever(
        self, look: Callable[[Any], object], all_of: Callable[[], Iterable[Any]]
    ) -> None:
        due = time.monotonic() + self._interval_s
        while not self._closed:
            with self._woken:
                while not self._wakes and not self._closed:
                    left = due - time.monotonic()
                    if left <= 0:
                        break
                    self._woken.wait(left)
                found = next(iter(self._wakes), None)
                if found is not None:
                    del self._wakes[found]
            if found is not None:
                look(found)
            elif not self._closed:
                due = time.monotonic() + self._interval_s
                for each in all_of():
                    self.wake(each)

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Begin nothing more, and leave what is under way to itself after a moment."""
        self._closed = True
        with self._woken:
            self._woken.notify_all()
        self._copiers.close()
        self._expirers.close()
        looker = self._looker
        if looker is not None and looker is not threading.current_thread():
            looker.join(CLOSE_TIMEOUT_S)


__all__ = ["RemoteThreads"]
