"""What the thread of a group's member sees of its consumer.

Owns: a weak reference, so that the thread ends with a consumer that nobody closes.
"""

from __future__ import annotations

import weakref
from typing import Any


class GroupOwner:
    """See `group.Owner`."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = weakref.ref(consumer)

    def activity(self) -> int:
        consumer = self._consumer()
        return consumer._activity() if consumer is not None else 0

    def news(self) -> None:
        consumer = self._consumer()
        if consumer is not None:
            consumer._call()

    def clock(self, now: float) -> float:
        consumer = self._consumer()
        return consumer._look_at_clock(now) if consumer is not None else now + 1.0
