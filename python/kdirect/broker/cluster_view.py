"""Who leads what: the brokers of the cluster, and which of them answers for which partition.

Owns: the answers to these questions, for every other module of the broker.  Nobody else assumes
that this broker leads a partition, coordinates a group or is the controller.  Pure: no I/O, no
clock; what only the log knows (the cluster's id, the epoch of a partition that is here) comes from
two functions that are passed in.

Without a `ClusterLayout` the cluster is this one broker, which leads everything.  A layout names
several brokers and the topics that each of them leads; it is fixed while a broker runs, and every
broker of the cluster is given an equal one.  Rules of a layout, and why:

- Its first broker is the controller and coordinates every consumer group, so that there is one
  answer to each of these questions.
- It names every topic.  The leader creates its topics, with the ids that the layout gives them,
  when it starts.  Topics can neither be created otherwise, nor be deleted, nor grow, for the other
  brokers would not learn of that.  (The topic of committed offsets is the coordinator's own.)
- A partition has one replica.  Replication changes this module first.

Any thread may ask.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kdirect.errors import ConfigError
from kdirect.model import TopicPartition, check_topic_name

NO_NODE = -1
UNKNOWN_EPOCH = -1  # a client that is told this epoch sends none, and its epoch is not checked
# Producer ids of the broker at place i of a layout lie in [i << 54, (i + 1) << 54).
PRODUCER_ID_BITS = 54
MAX_NODES = 1 << (62 - PRODUCER_ID_BITS)


class Node(NamedTuple):
    """A broker, where clients reach it, and the rack that it is in."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PlacedTopic:
    """A topic that a layout names: broker `leader` leads all of its partitions.  It has the
    attributes of `kdirect.broker.topics.Topic` that Metadata tells."""

    name: str
    topic_id: uuid.UUID
    partition_count: int
    leader: int
    internal: bool = False
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class PartitionView:
    """What Metadata tells about a partition; node ids.  `leader` is `NO_NODE` where there is
    none, `leader_epoch` is `UNKNOWN_EPOCH` where this broker cannot know it.  `eligible`: KIP-966's
    eligible leader replicas."""

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...] = ()
    eligible: tuple[int, ...] = ()


class ClusterLayout:
    """Several brokers and the topics that each of them leads.

    `led` maps each broker to its topics with their numbers of partitions; the first broker is the
    controller.  ConfigError where the parts do not fit together::

        ClusterLayout({Node(1, "127.0.0.1", 9092): {"a": 2}, Node(2, "127.0.0.1", 9093): {"b": 1}})
    """

    def __init__(self, led: Mapping[Node, Mapping[str, int]], name: str = "kdirect") -> None:
        self.nodes: tuple[Node, ...] = tuple(led)
        if not 1 <= len({node.node_id for node in self.nodes}) == len(self.nodes) <= MAX_NODES:
            raise ConfigError(
                f"a cluster of the brokers {[node.node_id for node in self.nodes]}",
                hint=f"name 1 to {MAX_NODES} brokers, each with a node id of its own",
            )
        identity = uuid.uuid5(uuid.NAMESPACE_DNS, name)
        self.cluster_id = base64.urlsafe_b64encode(identity.bytes).rstrip(b"=").decode()
        self.topics: dict[str, PlacedTopic] = {}
        for node, topics in led.items():
            for topic, partitions in topics.items():
                if topic in self.topics or partitions < 1:
                    raise ConfigError(
                        f"topic {topic} has {partitions} partitions at broker {node.node_id}",
                        hint="place each topic at one broker, with 1 partition or more",
                    )
                self.topics[check_topic_name(topic)] = PlacedTopic(
                    topic, uuid.uuid5(identity, topic), partitions, node.node_id
                )


class ClusterView:
    """What broker `node_id` knows of its cluster.  `cluster_id()` and `local_epoch(partition)` ask
    the log: the cluster's id, and the leader epoch of a partition that is here (None: it is not).
    """

    def __init__(
        self,
        node_id: int,
        *,
        cluster_id: Callable[[], str],
        local_epoch: Callable[[TopicPartition], int | None],
        layout: ClusterLayout | None = None,
    ) -> None:
        self.node_id = node_id
        self._cluster_id = cluster_id
        self._local_epoch = local_epoch
        self._nodes = layout.nodes if layout is not None else ()
        places = [node.node_id for node in self._nodes]
        if layout is not None and node_id not in places:
            raise ConfigError(
                f"broker {node_id} is not in the layout of its cluster, which names {places}",
                hint="set node.id to one of these",
            )
        self._place = places.index(node_id) if places else 0
        self._controller_id = places[0] if places else node_id
        # By name: topics that the layout gives to this broker, and topics that others lead.
        # `elsewhere` is looked at for every partition of every request, hence a plain dictionary.
        placed = layout.topics if layout is not None else {}
        self.here = {name: topic for name, topic in placed.items() if topic.leader == node_id}
        self.elsewhere = {name: topic for name, topic in placed.items() if topic.leader != node_id}

    def decided(self) -> tuple[int, int]:
        """(epoch of the controller, number of its last decision that is known here).  A layout, and
        a broker that is alone, count neither."""
        return 1, 0

    def as_of_now(self) -> ClusterView:
        """A view that stays as this one is now, so that all that it tells belongs together."""
        return self  # a layout is fixed

    # -- brokers -----------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        return self._cluster_id()

    @property
    def controller_id(self) -> int:
        """The broker that is named to clients as the controller."""
        return self._controller_id

    @property
    def topics_are_fixed(self) -> bool:
        """Does a layout name every topic, so that none is created, deleted or made larger?"""
        return bool(self._nodes)

    def nodes(self, own: tuple[str, int], listener: str = "") -> tuple[Node, ...]:
        """All brokers.  `own`: where this one is reached by the client that asks; a layout says
        so itself, for all brokers must say the same.  `listener`: the name of the listener that the
        client came through, which members of a cluster register each other's addresses by."""
        return self._nodes or (Node(self.node_id, *own),)

    def node(self, node_id: int, own: tuple[str, int], listener: str = "") -> Node | None:
        """The broker `node_id`; None where it is none of `nodes`."""
        return next((n for n in self.nodes(own, listener) if n.node_id == node_id), None)

    # -- partitions --------------------------------------------------------------------------------

    def leads(self, topic: str) -> bool:
        """Is this broker the one to ask about a topic's partitions, whether or not they exist?"""
        return topic not in self.elsewhere

    def leader_of(self, topic: str) -> int:
        """The broker to ask about a topic's partitions, whether or not they exist."""
        placed = self.elsewhere.get(topic)
        return self.node_id if placed is None else placed.leader

    def partition(self, tp: TopicPartition) -> PartitionView:
        """Who leads and keeps a partition.  One that does not exist has no leader, nor has one of
        this broker whose directory could not be made."""
        placed = self.elsewhere.get(tp.topic)
        if placed is None:
            epoch, replicas = self._local_epoch(tp), (self.node_id,)
        else:
            exists = 0 <= tp.partition < placed.partition_count
            epoch, replicas = UNKNOWN_EPOCH if exists else None, (placed.leader,)
        if epoch is None:
            return PartitionView(NO_NODE, UNKNOWN_EPOCH, replicas, (), replicas)
        return PartitionView(replicas[0], epoch, replicas, replicas)

    def bad_replication_factor(self, factor: int) -> str:
        """Why a new topic cannot have `factor` replicas (-1: the default); empty where it can."""
        if factor in (-1, 1):
            return ""
        return f"replication factor {factor}: a partition has one replica here; use 1"

    def bad_assignment(self, assignments: Iterable[list[int]]) -> str:
        """Why new partitions cannot be kept by these brokers, in turn; empty where they can."""
        for replicas in assignments:
            if replicas != [self.node_id]:
                return f"replicas {replicas}: partitions are created at broker {self.node_id} only"
        return ""

    # -- groups and producers ----------------------------------------------------------------------

    def coordinator_of(self, group: str) -> int:
        """The broker that coordinates a consumer group."""
        return self.controller_id

    def transaction_coordinator_of(self, name: str) -> int:
        """The broker that coordinates the transactions of a transactional id."""
        return self.controller_id

    def coordinates(self, group: str) -> bool:
        """Does this broker coordinate the group?"""
        return self.coordinator_of(group) == self.node_id

    def producer_id(self, local_id: int) -> int:
        """The producer id, of which the cluster has no other, for the number `local_id` of this
        broker."""
        return self._place << PRODUCER_ID_BITS | local_id
