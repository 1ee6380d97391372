"""What metadata says of brokers, topics and partitions: values, without the requests for them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from kdirect.errors import UnknownTopicError


@dataclass(frozen=True, slots=True)
class Node:
    """A broker as metadata names it."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """`leader` is a node id, -1 for none."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]


def _number(partition: PartitionMetadata) -> int:
    return partition.partition


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic; `partitions` in order of their numbers, `topic_id` a UUID as text or None where the
    broker has none."""

    name: str
    topic_id: str | None
    internal: bool
    partitions: tuple[PartitionMetadata, ...]

    def newest(self, before: TopicMetadata | None) -> TopicMetadata:
        """This answer of a broker; but partitions of which `before`, an earlier answer, named a
        later leader epoch are as they were there: the broker has not heard of it yet."""
        if before is None or self.topic_id is None or before.topic_id != self.topic_id:
            return self
        known = {p.partition: p for p in before.partitions}
        partitions = tuple(
            old if (old := known.get(p.partition)) and 0 <= p.leader_epoch < old.leader_epoch else p
            for p in self.partitions
        )
        return replace(self, partitions=partitions) if partitions != self.partitions else self

    def partition(self, number: int) -> PartitionMetadata:
        """UnknownTopicError names the partitions there are."""
        # A topic has all its partitions, from 0 on, unless some of them could not be told.
        if 0 <= number < len(self.partitions) and self.partitions[number].partition == number:
            return self.partitions[number]
        at = bisect_left(self.partitions, number, key=_number)
        if at < len(self.partitions) and self.partitions[at].partition == number:
            return self.partitions[at]
        last = self.partitions[-1].partition if self.partitions else -1
        raise UnknownTopicError(
            f"{self.name}-{number}: topic {self.name!r} has no partition {number}",
            hint=f"its partitions are 0 to {last}" if last >= 0 else "it has no partitions",
        )


def topic_metadata(answer: Any) -> TopicMetadata:
    """What a Metadata response says of one topic."""
    partitions = [
        PartitionMetadata(
            p.partition_index,
            p.leader_id,
            p.leader_epoch,
            tuple(p.replica_nodes),
            tuple(p.isr_nodes),
        )
        for p in answer.partitions
    ]
    return TopicMetadata(
        answer.name,
        None if answer.topic_id is None else str(answer.topic_id),
        bool(answer.is_internal),
        tuple(sorted(partitions, key=lambda p: p.partition)),
    )
