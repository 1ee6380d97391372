"""The common bound of what requests under way hold, for the whole broker
(`queued.max.request.bytes`).

Owns: which connection holds how much, and which ones wait for room.  No I/O: a holder is a
connection, which reports what it holds, asks before it takes more, and is notified when it may.

Rules, and why:

- Memory is counted as bytes arrive, never for what a size prefix promises: a peer that announces
  100 MB and sends nothing holds nothing.
- A connection may always hold FREE_BYTES: small requests, which others may be waiting for (a
  release, a heartbeat), never wait.
- One holder, the elder, may go beyond the bound: the one that asked first while there was no room.
  So some request always comes to its end, and the broker never holds more than the bound and one
  request.
- Those who wait are served in the order in which they asked.  Requests below SMALL_BYTES may pass
  the others, as long as there is room: an eighth of the bound is theirs alone.
- While somebody waits, a holder that has stopped in the middle of a request is closed after
  STALL_SECONDS: it would keep the others waiting for ever.

All methods run on the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

FREE_BYTES = 256 << 10
SMALL_BYTES = 2 << 20
STALL_SECONDS = 5.0
CHECK_SECONDS = 1.0
PROGRESS_BYTES = 64 << 10  # in STALL_SECONDS; less is no progress
MEMORY_SHARE = 8


class Holder(Protocol):
    """What a connection tells and is told."""

    @property
    def brought(self) -> int:
        """Bytes received so far."""

    @property
    def halfway(self) -> bool:
        """It has sent a part of a request, and the rest is awaited."""

    def memory_granted(self, size: int) -> None:
        """`size` bytes more are counted for it, for which it had asked."""

    def close(self, reason: str) -> None: ...


def default_limit(largest_request: int) -> int:
    """A share of the memory of this machine, or of its control group; never less than one
    request."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            memory = min(memory, int(Path(name).read_text()))
        except (OSError, ValueError):  # none, or "max"
            continue
    return max(largest_request, memory // MEMORY_SHARE)


class RequestMemory:
    """See the module.  `limit` in bytes; below 0: none.  `call_later(seconds, function)` and
    `clock()` are the event loop's."""

    def __init__(
        self,
        limit: int,
        call_later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float],
    ) -> None:
        self.limit = limit
        self.used = 0
        self.waits = 0  # times that somebody had to wait
        self._call_later = call_later
        self._clock = clock
        self._held: dict[Holder, int] = {}
        self._waiting: dict[Holder, int] = {}  # what they ask for, in the order in which they asked
        self._elder: Holder | None = None
        self._marks: dict[Holder, tuple[int, float]] = {}  # what a holder had brought, and when
        self._checking = False

    def take(self, holder: Holder, size: int) -> bool:
        """May `holder` take `size` bytes more (0: go on as it is)?  They are counted for it then;
        else `memory_granted` is called when they are."""
        if holder in self._waiting:
            return False
        if self._fits(holder, size, first=not self._waiting):
            self.hold(holder, size)
            return True
        self.waits += 1
        self._waiting[holder] = size
        if not self._checking:
            self._checking = True
            self._marks.clear()
            self._check()
        return False

    def hold(self, holder: Holder, size: int) -> None:
        """Count `size` bytes that `holder` has taken already."""
        if size:
            self._held[holder] = self._held.get(holder, 0) + size
            self.used += size

    def give(self, holder: Holder, size: int) -> None:
        """`holder` holds `size` bytes less."""
        left = self._held.get(holder, 0) - size
        if left > 0:
            self._held[holder] = left
        else:
            self._held.pop(holder, None)
        self.used -= size
        if holder is self._elder and left <= FREE_BYTES:
            self._elder = None
        self._serve()

    def leave(self, holder: Holder) -> None:
        """`holder` is gone."""
        self._waiting.pop(holder, None)
        self._marks.pop(holder, None)
        self.give(holder, self._held.get(holder, 0))

    def _fits(self, holder: Holder, size: int, *, first: bool) -> bool:
        held = self._held.get(holder, 0) + size
        if self.limit < 0 or holder is self._elder or held <= FREE_BYTES:
            return True
        if size == 0 and self.used <= self.limit:  # it goes on with what it has
            return True
        if held <= SMALL_BYTES and self.used + size <= self.limit:
            return True
        if not first:
            return False
        if self.used + size <= self.limit - self.limit // 8:
            return True
        if self._elder is None:
            self._elder = holder
            return True
        return False

    def _serve(self) -> None:
        first = True
        for holder, size in list(self._waiting.items()):
            if holder not in self._waiting:  # another's grant has closed it
                continue
            if self._fits(holder, size, first=first):
                del self._waiting[holder]
                self._marks.pop(holder, None)
                self.hold(holder, size)
                holder.memory_granted(size)
            else:
                first = False

    def _check(self) -> None:
        """While a holder waits: close those that have stopped halfway."""
        if not self._waiting:
            self._checking = False
            return
        now = self._clock()
        for holder in [
            h
            for h, held in self._held.items()
            if held > FREE_BYTES and h not in self._waiting and h.halfway
        ]:
            brought, since = self._marks.setdefault(holder, (holder.brought, now))
            if holder.brought - brought >= PROGRESS_BYTES:
                self._marks[holder] = holder.brought, now
            elif now - since >= STALL_SECONDS:
                holder.close(
                    "it stopped in the middle of a request, and others wait for the"
                    f" {self._held.get(holder, 0)} bytes that it holds (queued.max.request.bytes)"
                )
        self._call_later(CHECK_SECONDS, self._check)
