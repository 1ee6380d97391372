"""The search for a broker that was lost while its partitions were read.

Owns: which errors mean that a broker is lost, and the one attempt at a time to reach it again,
where nobody waits for it: the thread that reads goes on with what other brokers lead.  What may not
enter: partitions, and what follows when the broker is back.

One thread at a time, but for the attempt itself.
"""

from __future__ import annotations

from collections.abc import Callable

from kdirect.errors import BrokerUnavailableError, ClosedError, QueuePairError, TimedOutError
from kdirect.wire.attempt import Attempt
from kdirect.wire.connection import Connection
from kdirect.wire.environment import Environment

LOST = (QueuePairError, BrokerUnavailableError, ClosedError, TimedOutError)
FIRST_PAUSE_S = 0.1  # between two attempts; twice as long each time
LONGEST_PAUSE_S = 2.0
# The longest wait of a reading thread for a connection to a broker while it reads from others.
CONNECT_MS_BESIDES = 500


class Search:
    """Begins at once, or `after_s` from now.  `reach` returns a connection to the broker, or raises
    after `connect.timeout.ms`; it is called by other threads, one at a time."""

    def __init__(
        self, environment: Environment, reach: Callable[[], Connection], after_s: float = 0.0
    ) -> None:
        self._environment = environment
        self._reach = reach
        self._attempt: Attempt[Connection] | None = None
        self._next = environment.monotonic() + after_s
        self._pause = FIRST_PAUSE_S

    def found(self) -> Connection | None:
        """The connection; None while it is looked for.  Raises, once for each attempt that failed,
        what that attempt raised; the next one begins by itself."""
        if self._attempt is None:
            if self._environment.monotonic() < self._next:
                return None
            self._attempt = self._environment.spawn(self._reach)
        if not self._attempt.done:
            return None
        attempt, self._attempt = self._attempt, None
        self._next = self._environment.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        return attempt.result()
