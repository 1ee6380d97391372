"""Who leads what in a cluster with a metadata store: `ClusterView` of a member.

Owns: nothing; each answer comes from the newest `Metadata` that the membership has read.  Before
the broker has joined there is none: then there are no brokers and no leaders.

Any thread may ask: the metadata is one immutable value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kdirect.broker.cluster_view import NO_NODE, UNKNOWN_EPOCH, ClusterView, Node, PartitionView
from kdirect.broker.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from kdirect.format.group_records import partition_of
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition


class MemberView(ClusterView):
    """See the module.  `metadata()`: the newest, or None before there is any; `cluster_id()`: the
    log's, which is the cluster's once the broker has joined.  `default_listener`: the name of the
    listener whose addresses are told to whoever came through one that a broker has not
    registered."""

    def __init__(
        self,
        node_id: int,
        *,
        cluster_id: Callable[[], str],
        metadata: Callable[[], Metadata | None],
        default_listener: str,
    ) -> None:
        self._metadata = metadata
        self._default_listener = default_listener
        super().__init__(node_id, cluster_id=cluster_id, local_epoch=lambda tp: None)

    def as_of_now(self) -> MemberView:
        """See `ClusterView.as_of_now`: each question to this view may be answered from newer
        metadata than the one before."""
        metadata = self._metadata()
        return MemberView(
            self.node_id,
            cluster_id=self._cluster_id,
            metadata=lambda: metadata,
            default_listener=self._default_listener,
        )

    # -- brokers -----------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        metadata = self._metadata()
        return metadata.cluster_id if metadata is not None else self._cluster_id()

    @property
    def controller_id(self) -> int:
        """Any broker that lives passes requests on to the controller; while nobody is known to be
        it, this one is named, so that clients have somebody to ask."""
        metadata = self._metadata()
        known = metadata.controller_id if metadata is not None else NO_NODE
        live = metadata is not None and known in metadata.brokers
        return known if live else self.node_id

    def decided(self) -> tuple[int, int]:
        """See `ClusterView.decided`."""
        metadata = self._metadata()
        return (0, 0) if metadata is None else (metadata.image.epoch, metadata.generation)

    def nodes(self, own: tuple[str, int], listener: str = "") -> tuple[Node, ...]:
        """The brokers that live, each where it advertises that listener."""
        metadata = self._metadata()
        if metadata is None:
            return (Node(self.node_id, *own),)
        found = []
        for node_id, live in sorted(metadata.brokers.items()):
            address = metadata.endpoint(node_id, listener) or metadata.endpoint(
                node_id, self._default_listener
            )
            if address is not None:
                found.append(Node(node_id, *address, live.registration.rack))
        return tuple(found)

    # -- partitions --------------------------------------------------------------------------------

    def partition(self, tp: TopicPartition) -> PartitionView:
        """Who leads and keeps a partition; replicas on brokers that do not live, or in directories
        that have failed, are offline."""
        metadata = self._metadata()
        partition = None if metadata is None else metadata.partition(tp)
        if metadata is None or partition is None:
            return PartitionView(NO_NODE, UNKNOWN_EPOCH, (), ())
        offline = tuple(
            b
            for b in partition.replicas
            if b not in metadata.brokers
            or (partition.failed and (b, metadata.brokers[b].incarnation) in partition.failed)
        )
        state = partition.state
        if state is None:
            return PartitionView(NO_NODE, UNKNOWN_EPOCH, partition.replicas, (), offline)
        leader = state.leader if state.leader in metadata.brokers else NO_NODE
        return PartitionView(
            leader,
            state.leader_epoch,
            partition.replicas,
            state.in_sync,
            offline,
            state.eligible,
        )

    def bad_replication_factor(self, factor: int) -> str:
        """The controller knows; nothing is refused here."""
        return ""

    def bad_assignment(self, assignments: Iterable[list[int]]) -> str:
        """The controller knows; nothing is refused here."""
        return ""

    # -- groups and producers ----------------------------------------------------------------------

    def coordinator_of(self, group: str) -> int:
        """The broker that leads the group's partition of the topic of committed offsets; `NO_NODE`
        while there is none."""
        return self._leader_for(OFFSETS_TOPIC, group)

    def transaction_coordinator_of(self, name: str) -> int:
        """The same for a transactional id, and the topic of transactions."""
        return self._leader_for(TRANSACTIONS_TOPIC, name)

    def _leader_for(self, name: str, key: str) -> int:
        metadata = self._metadata()
        topic = None if metadata is None else metadata.topic(name)
        if metadata is None or topic is None or not topic.partitions:
            return NO_NODE
        index = partition_of(key, len(topic.partitions))
        leader = metadata.leader_of(TopicPartition(name, index))
        return leader if leader in metadata.brokers else NO_NODE

    def producer_id(self, local_id: int) -> int:
        """Blocks of the store are not given twice, so the number is the cluster's already."""
        return local_id
