"""The few segments that stay mapped although nobody has acquired them.

Law: a mapping is kept for the next reader, and the number of kept ones is bounded; the oldest goes
first.  The lock here is never held while a segment is unmapped.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import NamedTuple, Protocol

from kdirect.log.mapped import Mapping


class Mapped(Protocol):
    """What may stay mapped."""

    def unmap_if_idle(self) -> bool:
        """Unmap unless it is in use; False when another thread is busy with it."""


class IdleMappings:
    """The few segments that stay mapped though nobody has acquired them, oldest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.RLock()
        self._segments: OrderedDict[int, Mapped] = OrderedDict()

    def add_nowait(self, segment: Mapped) -> bool:
        """`add`, if no other one has to go for it; else False."""
        with self._lock:
            if len(self._segments) >= self._limit and id(segment) not in self._segments:
                return False
            self._segments[id(segment)] = segment
            self._segments.move_to_end(id(segment))
            return True

    def add(self, segment: Mapped) -> None:
        evicted = []
        with self._lock:
            self._segments[id(segment)] = segment
            self._segments.move_to_end(id(segment))
            while len(self._segments) > self._limit:
                evicted.append(self._segments.popitem(last=False)[1])
        for old in evicted:
            if not old.unmap_if_idle():
                with self._lock:  # in use at this moment: it stays, and is the next to go
                    self._segments[id(old)] = old
                    self._segments.move_to_end(id(old), last=False)

    def discard(self, segment: Mapped) -> None:
        with self._lock:
            self._segments.pop(id(segment), None)


class Detached(NamedTuple):
    """Mappings and a descriptor (-1: none) that nobody uses any more."""

    mappings: list[Mapping]
    fd: int

    def end(self) -> None:
        for mapping in self.mappings:
            mapping.unmap()
        if self.fd >= 0:
            os.close(self.fd)
