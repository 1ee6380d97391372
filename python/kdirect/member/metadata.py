"""What a broker knows of its cluster: one immutable value, replaced whole when it changes.

It is read by handlers with each request, and so has what they ask for by name.  What it is made of
comes from the metadata store (`picture`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from kdirect.cluster.election import LiveBroker, Partition
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.cluster.records import BrokerRegistration
from kdirect.model import TopicPartition

NOBODY = -1
NO_IMAGE = Image(-1, -1)


class LiveNode(NamedTuple):
    """A broker that is registered.  `incarnation`: number of the change that created its node; it
    tells the broker's processes apart.  `intact_since`: the incarnation from which on nothing is
    lost that its processes have confirmed."""

    node_id: int
    registration: BrokerRegistration
    incarnation: int
    intact_since: int

    @property
    def rack(self) -> str | None:
        return self.registration.rack

    def as_live_broker(self) -> LiveBroker:
        """What the rules of elections need of it."""
        lost = self.registration.lost_since(self.incarnation)
        return LiveBroker(self.incarnation, self.registration.rack, self.intact_since, lost)


@dataclass(frozen=True, eq=False)
class Metadata:
    """See the module.  `incarnation`: this broker's own, -1 while it is not registered.
    `controller_id`: -1 while nobody is known to be.  `generation`: of ``/kdirect/changes`` up to
    which `image` was read; `image` may hold newer values.  `readings`: number of the reading of all
    nodes that `image` began with; a topic that is in one metadata of a reading and not in a later
    one was deleted by the controller, and one that a new reading lacks may have been lost."""

    cluster_id: str
    node_id: int
    incarnation: int = -1
    controller_id: int = NOBODY
    brokers: Mapping[int, LiveNode] = field(default_factory=dict)
    image: Image = NO_IMAGE
    generation: int = -1
    readings: int = 0

    def replace(self, **changes: Any) -> Metadata:
        """The same with other values; this one if nothing is another value.  (Images are not
        compared: a new one is another one.)"""
        old = {name: getattr(self, name) for name in changes}
        if all(
            old[name] is value or (isinstance(value, int | str) and old[name] == value)
            for name, value in changes.items()
        ):
            return self
        return replace(self, **changes)

    def topic(self, name: str) -> Topic | None:
        """The topic, unless it is being deleted."""
        topic = self.image.topics.get(name)
        return None if topic is None or topic.deleting else topic

    def topic_by_id(self, topic_id: uuid.UUID) -> tuple[str, Topic] | None:
        """The name and the topic, unless it is being deleted."""
        name = self._names_by_id.get(topic_id)
        return None if name is None else (name, self.image.topics[name])

    @cached_property
    def _names_by_id(self) -> Mapping[uuid.UUID, str]:
        return {
            topic.record.topic_id: name
            for name, topic in self.image.topics.items()
            if topic.record.topic_id is not None and not topic.deleting
        }

    def partition(self, tp: TopicPartition) -> Partition | None:
        """The partition, unless its topic is being deleted."""
        return self.image.find(tp)

    def leader_of(self, tp: TopicPartition) -> int:
        """The broker that leads the partition; -1 while nobody does, and where there is none."""
        partition = self.image.find(tp)
        if partition is None or partition.state is None:
            return NO_LEADER
        return partition.state.leader

    def is_live(self, node_id: int) -> bool:
        """Is the broker registered?"""
        return node_id in self.brokers

    def endpoint(self, node_id: int, listener: str) -> tuple[str, int] | None:
        """(host, port) at which a broker that lives advertises a listener of this name."""
        node = self.brokers.get(node_id)
        if node is None:
            return None
        for endpoint in node.registration.endpoints:
            if endpoint.listener == listener:
                return endpoint.host, endpoint.port
        return None
