"""The topics that a producer writes, and how many partitions each has.

Owns: the counts, and one `TopicPartition` for each partition.  The counts are asked for again every
metadata.max.age.ms, because a topic can get more partitions, and before a partition is said not to
exist.  What may not enter: which partition a record goes to (`kdirect.client.run_partition`).

Law: every record passes `partition_of`.  A producer that was closed or forked raises ClosedError
there.  This costs the other producers nothing: the table of a closed one is empty, so only its
records take the slow way, which checks.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from kdirect.client.partitioner import check_partition
from kdirect.client.producing_session import ProducingSession
from kdirect.errors import ClosedError, KdirectError
from kdirect.model import TopicPartition, check_topic_name

log = logging.getLogger("kdirect.client")

# How long to wait for an answer about topics whose counts are known already.
LEAST_PATIENCE_MS, MOST_PATIENCE_MS = 100, 1000


class Topics:
    """See the module.  One thread at a time: the producer's lock."""

    def __init__(self, session: ProducingSession, settings: dict[str, Any]) -> None:
        self._session = session
        self._monotonic = session.environment.monotonic
        self._age_s: float = settings["metadata.max.age.ms"] / 1000
        self._create: bool = settings["allow.auto.create.topics"]
        self._block_ms: int = max(LEAST_PATIENCE_MS, settings["max.block.ms"])
        self._counts: dict[str, int] = {}
        self._partitions: dict[str, list[TopicPartition]] = {}
        self._refresh_at = 0.0
        self._pid = os.getpid()
        self.closed = False

    def check(self) -> None:
        """ClosedError unless the producer may be used."""
        if self._pid != os.getpid():
            raise ClosedError(
                "the producer belongs to the process that was forked from",
                hint="make one in this process",
            )
        if self.closed:
            raise ClosedError("the producer is closed", hint="make a new one")

    def close(self) -> None:
        """The producer has ended, here or in the process that was forked from."""
        self.closed = True
        self._partitions = {}

    def count(self, topic: str) -> int:
        """How many partitions `topic` has.  While its broker is away, or does not answer, the old
        count stands."""
        now = self._monotonic()
        if now >= self._refresh_at:
            self._refresh_at = now + self._age_s
            if self._counts:
                self._refresh(list(self._counts), min(MOST_PATIENCE_MS, self._block_ms))
        return self._counts.get(topic) or self._first(topic)

    def count_for(self, topic: str, highest: int) -> int:
        """How many partitions `topic` has, asked for again where partition `highest` is not among
        those that are known."""
        if highest >= self.count(topic):
            self._refresh([topic], self._block_ms)
        return self._counts[topic]

    def _first(self, topic: str) -> int:
        self.check()
        found = self._session.cluster.partitions(check_topic_name(topic), create=self._create)
        self._learn(topic, len(found))
        return len(found)

    def _refresh(self, topics: list[str], timeout_ms: float) -> None:
        """Ask again about topics that are known."""
        self.check()
        try:
            found = self._session.cluster.refresh(topics, timeout_ms=timeout_ms)
        except KdirectError as e:
            log.debug("news of %d topics: %s", len(topics), e)
            return  # a broker is away or a topic was deleted: sending to it will say so
        for name, topic in found.items():
            if topic.partitions:
                self._learn(name, len(topic.partitions))

    def _learn(self, topic: str, count: int) -> None:
        if count != self._counts.get(topic):
            self._counts[topic] = count
            self._partitions[topic] = [TopicPartition(topic, i) for i in range(count)]

    def partition_of(self, topic: str, partition: int) -> TopicPartition:
        """The partition; UnknownTopicError when the topic has no such partition."""
        partitions = self._partitions.get(topic)
        if partitions is None:
            self.check()
            self.count(topic)
            partitions = self._partitions[topic]
        if not 0 <= partition < len(partitions):
            check_partition(topic, partition, self.count_for(topic, partition))
            partitions = self._partitions[topic]
        return partitions[partition]

    def partitions(self) -> list[TopicPartition]:
        """Every partition of the topics written so far."""
        return [tp for partitions in self._partitions.values() for tp in partitions]
