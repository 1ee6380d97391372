"""How much of a head's files exists: the rules by which a head grows, and is given back.

Law of the room: pure decisions; no file, no lock, no clock of its own.  `kdirect.log.partition`
asks, `kdirect.log.head` and `kdirect.log.segment` do the work.

A head begins with what its first request needs, and grows in place, in steps, up to
``segment.bytes``; its segments are those that Kafka would have.  A step is four times what there
is, or sixteen times where the step before was used up within a second, but not more than
`STEP_BYTES` larger: so a partition with one record costs some pages, a busy one has a whole head of
64 MiB after three steps, and nobody waits while the whole of a larger segment is zeroed.  The head
after one that was filled quickly begins with such a step, or whole, if it is ready by then.  Where
nothing was appended for a while, what is not used is given back.
"""

from __future__ import annotations

from typing import NamedTuple

from kdirect.log.config import OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES, LogConfig, whole_pages

# What a producer that writes the head itself is granted at least: it has to ask for more when that
# is full.
GRANT_BYTES = 32 << 10
FACTOR = 4
QUICK_FACTOR = 16
# No step is larger, unless more is needed at once.
STEP_BYTES = 64 << 20
# A step that was used up within this is followed by a larger one.
QUICK_S = 1.0
# A head that was filled within this is followed by a whole one (and a spare, see
# `kdirect.log.head`).
BUSY_S = 10.0
# Nothing was appended for so long: what is not used is given back, if it is worth the work.
QUIET_S = 10.0
LEAST_GIVEN_BACK = 32 << 10
HUGE_BYTES = 2 << 20


class HeadBytes(NamedTuple):
    """Bytes of a head's three files."""

    log: int
    offset_index: int
    time_index: int


def head_bytes(config: LogConfig, capacity: int) -> HeadBytes:
    """The files of a head of `capacity` bytes, with indexes that are not full before it is."""
    capacity = whole_pages(capacity)
    return HeadBytes(
        capacity,
        config.index_bytes(OFFSET_ENTRY_BYTES, capacity),
        config.index_bytes(TIME_ENTRY_BYTES, capacity),
    )


def next_capacity(capacity: int, need: int, limit: int, *, quick: bool) -> int:
    """To how many bytes a head of `capacity` grows so that it has `need`, which is not more than
    `limit`."""
    wanted = capacity * (QUICK_FACTOR if quick else FACTOR)
    limit = min(limit, max(need, capacity + STEP_BYTES))
    wanted = max(need, min(wanted, limit))
    if 2 * wanted > limit:
        return limit
    if wanted >= HUGE_BYTES:
        return -(-wanted // HUGE_BYTES) * HUGE_BYTES
    return whole_pages(wanted)


class HeadUse:
    """What a partition remembers of how its head is used; times are monotonic seconds.  Guarded by
    the partition's roll lock."""

    __slots__ = ("_end_offset", "_grew_at", "opened_at", "quiet_since")

    def __init__(self) -> None:
        self.opened_at = float("-inf")
        self.quiet_since = 0.0
        self._grew_at = float("-inf")
        self._end_offset = -1

    def opened(self, now: float) -> None:
        """Another head is in place."""
        self.opened_at = self._grew_at = self.quiet_since = now

    def grew(self, now: float) -> None:
        self._grew_at = self.quiet_since = now

    def wanted(self, now: float) -> None:
        """Somebody is about to write the head."""
        self.quiet_since = now

    def quickly(self, now: float) -> bool:
        """Was the last step used up at once?"""
        return now - self._grew_at < QUICK_S

    def was_busy(self, now: float, size: int, limit: int) -> bool:
        """Was a head that is rolled now, of `size` bytes, filled quickly?"""
        return now - self.opened_at < BUSY_S and 2 * size >= limit

    def is_quiet(self, now: float, end_offset: int) -> bool:
        """Has nothing been appended since `QUIET_S`?  `end_offset` is the log's end."""
        if end_offset != self._end_offset:
            self._end_offset = end_offset
            self.quiet_since = max(self.quiet_since, now)
        return now - self.quiet_since >= QUIET_S


__all__ = ["GRANT_BYTES", "STEP_BYTES", "HeadBytes", "HeadUse", "head_bytes", "next_capacity"]
