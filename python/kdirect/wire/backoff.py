"""The waits between attempts to reach a broker."""

from __future__ import annotations

import random

from kdirect.wire.environment import SYSTEM, Environment


class Backoff:
    """Growing waits (`first_ms`, twice as long each time, up to `most_ms`) until a deadline.  Each
    is longer or shorter by up to `spread` of itself, at random, so that many clients that lost one
    broker do not come back all at once."""

    def __init__(
        self,
        timeout_ms: float,
        first_ms: float,
        most_ms: float,
        environment: Environment = SYSTEM,
        *,
        spread: float = 0.2,
    ) -> None:
        self._environment = environment
        self.deadline = environment.monotonic() + timeout_ms / 1000
        self._next = first_ms / 1000
        self._most = most_ms / 1000
        self._spread = spread

    def remaining_ms(self) -> float:
        return max(0.0, (self.deadline - self._environment.monotonic()) * 1000)

    def pause(self) -> float | None:
        """Seconds before the next attempt; None when the deadline would pass meanwhile."""
        pause = self._next
        if self._spread:
            pause *= random.uniform(1 - self._spread, 1 + self._spread)
        if self._environment.monotonic() + pause >= self.deadline:
            return None
        self._next = min(self._next * 2, self._most)
        return pause

    def wait(self) -> bool:
        """Sleep before the next attempt; False, without sleeping, when the deadline would pass
        meanwhile."""
        pause = self.pause()
        if pause is not None:
            self._environment.sleep(pause)
        return pause is not None
