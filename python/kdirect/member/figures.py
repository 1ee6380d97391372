"""What a member counts for those who watch a cluster: the figures that Kafka's users know.

Owns: the counts of elections and of changes of the replicas in sync, which are taken from one
picture of the cluster to the next.  All other figures are read off the newest picture when somebody
asks, so that the cluster's work pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdirect.cluster.election import Partition
from kdirect.cluster.image import Topic
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition


class Figures:
    """One broker's.  `changed` on the event loop; `statistics` from any thread.

    `min_in_sync(metadata, topic)`: min.insync.replicas of a topic."""

    def __init__(self, node_id: int, min_in_sync: Callable[[Metadata, str], int]) -> None:
        self._node_id = node_id
        self._min_in_sync = min_in_sync
        self._shrinks = 0
        self._expands = 0
        self._elections = 0
        self._unclean = 0

    def changed(self, before: Metadata, after: Metadata) -> None:
        """The membership has read a newer picture."""
        if before.image.topics is after.image.topics:
            return
        controls = after.controller_id == self._node_id
        for name, topic in after.image.topics.items():
            old = before.image.topics.get(name)
            # Topics that did not change are the same values, and cost no more than this.
            if old is None or old is topic or _id(old) != _id(topic):
                continue
            for was, now in zip(old.partitions, topic.partitions, strict=False):
                if was is not now:
                    self._count(was, now, controls)

    def _count(self, was: Partition, now: Partition, controls: bool) -> None:
        if was.state is None or now.state is None:
            return
        if now.state.leader == self._node_id:
            self._shrinks += not set(was.state.in_sync) <= set(now.state.in_sync)
            self._expands += not set(now.state.in_sync) <= set(was.state.in_sync)
        if controls and now.state.leader not in (was.state.leader, -1):
            self._elections += 1
            known = {*was.state.in_sync, *was.state.eligible}
            self._unclean += now.state.leader not in known

    def statistics(
        self,
        metadata: Metadata,
        describe: Callable[[TopicPartition], Iterable[Mapping[str, Any]]],
    ) -> dict[str, int]:
        """By the names of `kdirect.metrics`.  `describe`: a row for each replica of a partition
        that is led here, with its `lag` in records."""
        leaders = under_replicated = under_min = offline = lag = 0
        for tp, partition in metadata.image.all_partitions():
            state = partition.state
            if state is None or state.leader < 0:
                offline += 1
            elif state.leader == self._node_id:
                leaders += 1
                under_replicated += len(state.in_sync) < len(partition.target)
                least = min(self._min_in_sync(metadata, tp.topic), len(partition.target))
                under_min += len(state.in_sync) < least
                lag = max([lag, *(int(row["lag"]) for row in describe(tp))])
        controls = metadata.controller_id == self._node_id
        return {
            "replica_leaders": leaders,
            "replica_under_replicated": under_replicated,
            "replica_under_min_in_sync": under_min,
            "replica_in_sync_shrinks": self._shrinks,
            "replica_in_sync_expands": self._expands,
            "replica_max_lag": lag,
            "controller_active": int(controls),
            "controller_offline_partitions": offline if controls else 0,
            "controller_elections": self._elections,
            "controller_unclean_elections": self._unclean,
        }


def _id(topic: Topic) -> object:
    return topic.record.topic_id
