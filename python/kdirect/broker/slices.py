"""Small pieces of registered memory, cut from larger ones (KafkaDirect §4.3.2).

Owns: for one link, the regions that its rings' acknowledgements, slots and their images are cut
from.  A region of its own for each would cost a descriptor, a page and a key for each partition and
replica; a broker with a thousand partitions would run out of the first.

Memory: a slice has the keys of its whole region, which end with the domain.  So a peer can write it
for as long as the link is open, and it is used again only where nothing is on its way to it: who
gives it back says so, and it rests for `REST_S` all the same.  By then what a queue pair has under
way has arrived, or has broken it.

Threads: any.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kdirect.rdma.contract import Memory, MemoryRegion

WHOLE_BYTES = 64 << 10
ALIGNED = 64
REST_S = 60.0


class Slice(MemoryRegion):
    """A part of a region, used as a region of its own."""

    def __init__(self, slices: Slices, whole: Any, at: int, length: int) -> None:
        super().__init__(
            whole.memory, whole.address + at, length, whole.lkey, whole.rkey, whole.access
        )
        self._slices = slices

    def give_back(self) -> None:
        """Nobody uses it, and no peer has anything on its way to it."""
        self._slices.give_back(self)

    def deregister(self, timeout_ms: float = 0) -> bool:
        """It is used no more.  Its keys stay until the link ends."""
        return True


class Slices:
    """See the module.  `domain`: of the link."""

    def __init__(self, domain: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._domain = domain
        self._now = now
        self._lock = threading.Lock()
        self._resting: dict[tuple[int, int], deque[tuple[float, Slice]]] = {}
        self._open: dict[int, tuple[Any, int]] = {}  # by access: region, bytes of it in use

    def take(self, length: int, access: int, name: str) -> Slice:
        """`length` bytes of zeros.  RdmaError."""
        size = -(-length // ALIGNED) * ALIGNED
        with self._lock:
            resting = self._resting.get((access, size))
            if resting and resting[0][0] <= self._now():
                found = resting.popleft()[1]
                start = found.address - found.memory.address
                memoryview(found.memory)[start : start + size] = bytes(size)
                return found
            whole, used = self._open.get(access, (None, 0))
            if whole is None or used + size > whole.length:
                memory = Memory.anonymous(max(WHOLE_BYTES, size), name)
                whole, used = self._domain.register(memory, access), 0
            self._open[access] = (whole, used + size)
            return Slice(self, whole, used, size)

    def give_back(self, used: Slice) -> None:
        """See `Slice.give_back`."""
        with self._lock:
            resting = self._resting.setdefault((used.access, used.length), deque())
            resting.append((self._now() + REST_S, used))


__all__ = ["Slice", "Slices"]
