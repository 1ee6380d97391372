"""How many bytes per second go to an object store, or come from it, at most.

A token bucket over all threads that take from one `Throttle`.  A thread that has to wait sleeps
until its bytes are due; bytes are taken in pieces, so a rate holds within a segment too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

UNLIMITED = (1 << 63) - 1
BURST_S = 0.1  # what may be taken at once after a pause
_LONGEST_SLEEP_S = 0.2  # then `stop` is asked again


class Throttle:
    """See the module.  `bytes_per_second` may be changed at any time, which ends the waits of
    before; UNLIMITED waits for nothing."""

    def __init__(
        self,
        bytes_per_second: int = UNLIMITED,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self.waited_s = 0.0  # so far, by all threads
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._due = 0.0  # when the next byte may be taken
        self._due_at = bytes_per_second  # by which rate

    def take(self, size: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Return when `size` more bytes may go, or `stop` says that nobody wants them any more."""
        rate = self.bytes_per_second
        if rate >= UNLIMITED:
            return
        with self._lock:
            now = self._clock()
            if rate != self._due_at:  # what is owed at another rate is forgotten
                self._due, self._due_at = 0.0, rate
            begin = max(self._due, now - BURST_S)
            self._due = begin + size / rate
            until = self._due
        while (left := until - self._clock()) > 0 and self.bytes_per_second == rate and not stop():
            pause = min(left, _LONGEST_SLEEP_S)
            self._sleep(pause)
            self.waited_s += pause


__all__ = ["UNLIMITED", "Throttle"]
