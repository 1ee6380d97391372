"""What members of a cluster count for those who watch it, beyond what replicas count.

Owns: the counts of elections, which are taken from one picture of the cluster to the next.  All
other figures are read off the newest picture when somebody asks, so that the cluster's work pays
nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdirect.cluster.election import Partition
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition


class Figures:
    """One broker's.  `changed` on the event loop; `statistics` from any thread."""

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        self._elections = 0
        self._unclean = 0

    def changed(self, before: Metadata, after: Metadata) -> None:
        """The membership has read a newer picture."""
        if after.controller_id != self._node_id or before.image.topics is after.image.topics:
            return
        for name, topic in after.image.topics.items():
            old = before.image.topics.get(name)
            # Topics that did not change are the same values, and cost no more than this.
            if old is None or old is topic or old.record.topic_id != topic.record.topic_id:
                continue
            for was, now in zip(old.partitions, topic.partitions, strict=False):
                if was is not now:
                    self._count(was, now)

    def _count(self, was: Partition, now: Partition) -> None:
        if was.state is None or now.state is None:
            return
        if now.state.leader not in (was.state.leader, NO_LEADER):
            self._elections += 1
            self._unclean += now.state.leader not in (*was.state.in_sync, *was.state.eligible)

    def statistics(
        self,
        metadata: Metadata,
        describe: Callable[[TopicPartition], Iterable[Mapping[str, Any]]],
    ) -> dict[str, int]:
        """By the names of `kdirect.metrics`.  `describe`: a row for each replica of a partition
        that is led here, with its `lag` in records."""
        offline = lag = 0
        for tp, partition in metadata.image.all_partitions():
            if partition.state is None or partition.state.leader == NO_LEADER:
                offline += 1
            elif partition.state.leader == self._node_id:
                lag = max([lag, *(int(row["lag"]) for row in describe(tp))])
        controls = metadata.controller_id == self._node_id
        return {
            "replicas_max_lag": lag,
            "controller_active": int(controls),
            "controller_offline_partitions": offline if controls else 0,
            "controller_elections": self._elections,
            "controller_unclean_elections": self._unclean,
        }
