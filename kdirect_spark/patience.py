"""How long a query waits for a broker that is away.

Law: knows errors and a clock, and nothing of Spark or of what is waited for.  Clock and sleep are
passed in.

A broker that restarts refuses connections, and then answers for a moment that it is not ready: both
are errors that pass (`KdirectError.retriable`).  Whoever works for a query takes them for a pause
of its work as long as its `Patience` lasts, measured from the last progress.  An error that does
not pass ends the work at once, and so does any error where there is no reason to wait: a query that
starts with a wrong address fails early.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from kdirect.errors import AccessDeniedError, KdirectError, RemoteStorageError

log = logging.getLogger("kdirect_spark")

# They pass, too, but not because a broker comes back.
OTHERS = (AccessDeniedError, RemoteStorageError)
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
SPREAD = 0.2  # of each pause, at random: the tasks of a query do not come back all at once


class Patience:
    """The wait of one piece of work, `what` in the log.  It lasts for `patience_ms` after the last
    progress.  For one thread."""

    def __init__(
        self,
        what: str,
        patience_ms: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._what = what
        self._patience_s = patience_ms / 1000
        self._clock = clock
        self._sleep = sleep
        self._waits = False
        self._pause = FIRST_PAUSE_S
        self._since = clock()

    def progressed(self) -> None:
        """The broker answers: what goes wrong from now on is waited for again."""
        self._since = self._clock()
        self._pause = FIRST_PAUSE_S
        self._waits = False

    def outlasts(self, error: KdirectError) -> bool:
        """Whether to try again after `error`.  Sleeps before it returns True: a pause that grows,
        and never beyond the end of the patience."""
        if not error.retriable or isinstance(error, OTHERS):
            return False
        left = self._since + self._patience_s - self._clock()
        if left <= 0:
            return False
        if not self._waits:
            self._waits = True
            log.warning("%s waits for the broker, %.0f s at most: %s", self._what, left, error)
        pause = self._pause * random.uniform(1 - SPREAD, 1 + SPREAD)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self._sleep(min(pause, left))
        return True
