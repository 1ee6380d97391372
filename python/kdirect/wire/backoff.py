"""The waits between attempts to reach a broker."""

from __future__ import annotations

import random

from kdirect.wire.environment import SYSTEM, Environment


class Backoff:
    """Growing waits (`first_ms`, twice as long each time, up to `most_ms`, a fifth either way at
    random) until a deadline."""

    def __init__(
        self,
        timeout_ms: float,
        first_ms: float,
        most_ms: float,
        environment: Environment = SYSTEM,
    ) -> None:
        self._environment = environment
        self.deadline = environment.monotonic() + timeout_ms / 1000
        self._next = first_ms / 1000
        self._most = most_ms / 1000

    def remaining_ms(self) -> float:
        return max(0.0, (self.deadline - self._environment.monotonic()) * 1000)

    def pause(self) -> float | None:
        """Seconds before the next attempt; None when the deadline would pass meanwhile."""
        pause = self._next * random.uniform(0.8, 1.2)
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
