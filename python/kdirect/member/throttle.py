"""How fast replicas that are not in sync may catch up (Kafka's KIP-73).

Owns: the two rates of a broker, which replicas they hold back, and what was sent or taken so far.
What may not enter: who sends, and what.

================================  ==================================================================
property                          what it holds back
================================  ==================================================================
leader.replication.throttled.*    all that this broker sends of partitions that it leads, or lets be
                                  read, to replicas that are not in sync; ``replicas`` of a topic
                                  names the leader: partition:broker, or * for all
follower.replication.throttled.*  all that this broker takes of partitions that it follows and is
                                  not in sync with; ``replicas`` names the follower
================================  ==================================================================

A replica in sync is never held back.  Both rates may change at any time: for one broker in the
metadata, for all, and in the broker's file, the first of them that is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from kdirect.cluster import paths
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition

NO_LIMIT = (1 << 63) - 1
LEADER, FOLLOWER = "leader", "follower"
# What may go out at once, of what a second allows: small enough that the rate is kept within any
# second, large enough that a byte stream is not cut into crumbs.
SHARE = 8
LEAST_BYTES = 16 << 10
LONGEST_WAIT_S = 1.0  # then it is looked again: the rate may be another one


class Pace:
    """A rate in bytes per second.  `wait_s` says how long to wait before anything more may pass;
    then as much may pass as `most`, and `take` says how much did.  Any thread."""

    def __init__(self, clock: Callable[[], float], limit: int = NO_LIMIT) -> None:
        self._clock = clock
        self._limit = limit
        self._free_at = clock()
        self._lock = threading.Lock()
        self.taken = 0  # bytes so far

    @property
    def limit(self) -> int:
        return self._limit

    def set_limit(self, limit: int) -> None:
        """Another rate from now on; what is owed of the old one is owed no more."""
        with self._lock:
            if limit != self._limit:
                self._limit = limit
                self._free_at = self._clock()

    @property
    def most(self) -> int:
        """Bytes that may pass at once."""
        return max(LEAST_BYTES, self._limit // SHARE)

    def wait_s(self) -> float:
        """0.0: something may pass now."""
        with self._lock:
            if self._limit <= 0:
                return LONGEST_WAIT_S
            return min(max(0.0, self._free_at - self._clock()), LONGEST_WAIT_S)

    def take(self, count: int) -> None:
        """So many bytes pass."""
        with self._lock:
            self.taken += count
            if 0 < self._limit < NO_LIMIT:
                # What was not used is kept for a moment: whoever waits comes a little late.
                earliest = self._clock() - 1 / SHARE
                self._free_at = max(self._free_at, earliest) + count / self._limit


@lru_cache(maxsize=1024)
def _named(text: str) -> frozenset[tuple[int, int]] | None:
    """(partition, broker) of a list of replicas; None: all."""
    if text == "*":
        return None
    pairs = (item.split(":") for item in text.split(",") if item)
    return frozenset((int(partition), int(broker)) for partition, broker in pairs)


class Throttles:
    """See the module.  `of_broker`: what the broker's file says; `metadata()`: the newest.  Life:
    construct, then `changed` with each new picture of the cluster; the rest from the event loop."""

    def __init__(
        self,
        broker: int,
        metadata: Callable[[], Metadata | None],
        clock: Callable[[], float],
        of_broker: Mapping[str, Any],
    ) -> None:
        self._broker = broker
        self._metadata = metadata
        self._of_broker = of_broker
        self._paces = {side: Pace(clock) for side in (LEADER, FOLLOWER)}
        for side in self._paces:
            self._paces[side].set_limit(self._limit(side, {}))

    def _limit(self, side: str, configs: Mapping[str, Mapping[str, str]]) -> int:
        name = f"{side}.replication.throttled.rate"
        for of in (str(self._broker), paths.ALL_BROKERS):
            value = configs.get(of, {}).get(name)
            if value is not None:
                return int(value)
        return int(self._of_broker.get(name, NO_LIMIT))

    def changed(self, metadata: Metadata) -> None:
        """There is a newer picture of the cluster."""
        for side, pace in self._paces.items():
            pace.set_limit(self._limit(side, metadata.image.broker_configs))

    def led(self, tp: TopicPartition, *, in_sync: bool) -> Pace | None:
        """What holds a follower of a partition back that is led here; None: nothing."""
        return None if in_sync else self._holds(LEADER, tp)

    def followed(self, tp: TopicPartition) -> Pace | None:
        """What holds this broker's replica back, which follows; None: nothing.  Any thread."""
        pace = self._holds(FOLLOWER, tp)
        if pace is None:
            return None
        metadata = self._metadata()
        picture = None if metadata is None else metadata.partition(tp)
        state = None if picture is None else picture.state
        return None if state is not None and self._broker in state.in_sync else pace

    def _holds(self, side: str, tp: TopicPartition) -> Pace | None:
        pace = self._paces[side]
        if pace.limit >= NO_LIMIT:
            return None
        metadata = self._metadata()
        topic = None if metadata is None else metadata.topic(tp.topic)
        text = "" if topic is None else topic.config.get(f"{side}.replication.throttled.replicas")
        if not text:
            return None
        named = _named(text)
        return pace if named is None or (tp.partition, self._broker) in named else None


__all__ = ["LONGEST_WAIT_S", "NO_LIMIT", "Pace", "Throttles"]
