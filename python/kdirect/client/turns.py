"""Which partition that is read by READs is looked at next, and which sleep.

Owns: the order of turns, and who sleeps at which fetcher until its slot changes: one slot READ
shows the changes of all that sleep there.

One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kdirect.client.cursor import DirectCursor
from kdirect.client.direct import DirectFetcher
from kdirect.client.lost_broker import LOST
from kdirect.errors import KdirectError
from kdirect.model import TopicPartition


class Turns:
    """See the module.  `order` has the next one first; who has a turn moves to its end."""

    def __init__(self) -> None:
        self.order: deque[TopicPartition] = deque()
        self._has_turn: set[TopicPartition] = set()
        # By slot: READ by this fetcher, and has nothing before its slot changes.
        self.asleep: dict[DirectFetcher, dict[int, TopicPartition]] = {}
        self.given = 0  # turns, to partitions that had none: while it stays, nobody has woken
        self.since_wake = 0  # visits that found a record since the slots were looked at

    def give(self, tp: TopicPartition) -> None:
        """Let `tp` have turns."""
        if tp not in self._has_turn:
            self._has_turn.add(tp)
            self.order.append(tp)
            self.given += 1

    def drop(self, tp: TopicPartition) -> None:
        """`tp`, which was taken from `order`, has no turns."""
        self._has_turn.discard(tp)

    def put_to_sleep(
        self, tp: TopicPartition, cursor: DirectCursor, fetcher: DirectFetcher | None
    ) -> None:
        """`tp`, which had the last turn, had nothing: if its slot will tell, it needs no turns."""
        slot = cursor.slot_that_tells()
        if slot >= 0 and fetcher is not None:
            self.order.pop()
            self._has_turn.discard(tp)
            self.asleep.setdefault(fetcher, {})[slot] = tp

    def wake(self, lost: Callable[[DirectFetcher, KdirectError], None], *, fresh: bool) -> None:
        """Give turns to those whose slots have changed; `lost` learns of fetchers that fail."""
        self.since_wake = 0
        for fetcher, asleep in list(self.asleep.items()):
            try:
                slots = fetcher.changed(fresh=fresh)
            except LOST as e:
                lost(fetcher, e)
                continue
            for slot in slots:
                tp = asleep.pop(slot, None)
                if tp is not None:
                    self.give(tp)
            if not asleep:
                del self.asleep[fetcher]

    def keep(self, fetchers: Iterable[DirectFetcher]) -> None:
        """Nobody sleeps at a fetcher that is not one of these."""
        still = set(fetchers)
        for fetcher in [x for x in self.asleep if x not in still]:
            del self.asleep[fetcher]

    def clear(self) -> None:
        self.order.clear()
        self._has_turn.clear()
        self.asleep.clear()
