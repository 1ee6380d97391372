"""Which replica of a partition a consumer reads: the leader, or one of its own rack (KIP-392).

Owns: `client.rack`, and for how long a partition is read at its leader after a replica failed its
reader.  The choice is made from what metadata says: a replica that is in sync and whose broker
lives and names the same rack.  So a replica that falls behind or goes away is left once metadata
says so, and one that comes back is taken again.  What may not enter: connections, and what is read.

Thread-safe: each look and each note is one operation on a dict.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment
from kdirect.wire.metadata import Node, PartitionMetadata

# How long a partition is read at its leader after its reader left a replica.
AVOID_S = 5.0


class ClosestReplicas:
    """See the module.  `rack` is None, or empty, where every partition is read at its leader."""

    def __init__(self, rack: str | None, environment: Environment) -> None:
        self.rack = rack or None
        self._environment = environment
        self._avoided: dict[TopicPartition, float] = {}  # until when

    def choose(
        self,
        tp: TopicPartition,
        partition: PartitionMetadata,
        leader: Node,
        nodes: Mapping[int, Node],
    ) -> Node:
        """The broker to read `tp` at; `nodes` are those that live, by id."""
        rack = self.rack
        if rack is None or leader.rack == rack:
            return leader
        near = [
            node
            for i in partition.in_sync_replicas
            if (node := nodes.get(i)) is not None and node.rack == rack
        ]
        if not near:
            return leader
        until = self._avoided.get(tp)
        if until is not None:
            if self._environment.monotonic() < until:
                return leader
            self._avoided.pop(tp, None)
        return near[tp.partition % len(near)]

    def avoid(self, tp: TopicPartition) -> None:
        """Read `tp` at its leader for a while."""
        self._avoided[tp] = self._environment.monotonic() + AVOID_S
