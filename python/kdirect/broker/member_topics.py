"""The topics of a cluster, as its metadata store says: `Registry` of a member.

Owns: a `Topic` for each topic of the newest metadata, and the block of producer ids that the broker
gives out.  Nothing is written here: topics are changed by the controller, which is asked
(`handlers_member`), and the replicas that this broker keeps are made and removed by
`local_replicas`.

Looking needs no lock; any thread may.  The metadata changes on the event loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from kdirect.broker.cluster_view import ClusterView
from kdirect.broker.picture import Picture
from kdirect.broker.services import Membership, Replicas
from kdirect.broker.state_topic import due_configs
from kdirect.broker.topics import Registry, Topic
from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.image import Topic as StoredTopic
from kdirect.cluster.requests import AlterConfig, ConfigOf, CreateTopic
from kdirect.errors import (
    ConfigError,
    KdirectError,
    NotControllerError,
    NotEnoughReplicasError,
    TimedOutError,
    TopicExistsError,
)
from kdirect.log.checkpoint import new_id
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.remote_rules import refuse_tiered
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition
from kdirect.wire.environment import Environment

ASK_S = 30.0


def usable_configs(configs: Mapping[str, str], check: Callable[[Any], Any]) -> dict[str, str]:
    """The properties of a topic without those that this build refuses.  They come from the store,
    where anybody may have written them."""
    try:
        return dict(check(configs).overrides or {})
    except ConfigError:
        pass
    out = {}
    for name, value in configs.items():
        try:
            out.update(check({name: value}).overrides or {})
        except ConfigError:
            continue
    return out


class MemberTopics(Registry):
    """See the module.  Life: construct, `bind` once the membership is there."""

    def __init__(self, logs: LogManager, cluster: ClusterView, environment: Environment) -> None:
        super().__init__(logs, cluster, environment)
        self._membership: Membership | None = None
        self._replicas: Replicas | None = None
        self._picture: Picture | None = None
        self._stored: dict[str, StoredTopic] = {}
        self._ids_above = 0

    def bind(self, membership: Membership, replicas: Replicas, picture: Picture) -> None:
        """Follow the metadata from now on."""
        self._membership, self._replicas, self._picture = membership, replicas, picture
        membership.subscribe(lambda before, after: self.show(after))
        self.show(membership.metadata)

    def open(self) -> None:
        """Nothing is read here: the store has the topics."""

    def show(self, metadata: Metadata | None) -> None:
        """Take over the topics of newer metadata."""
        if metadata is None:
            return
        stored = metadata.image.topics
        for name in [name for name in self._topics if name not in stored]:
            self._forget(self._topics[name])
            self._stored.pop(name, None)
        for name, found in stored.items():
            if self._stored.get(name) is not found:
                self._stored[name] = found
                self._take(name, found)

    def _take(self, name: str, stored: StoredTopic) -> None:
        configs = usable_configs(stored.config, self._defaults.with_overrides)
        topic = self._topics.get(name)
        topic_id = stored.record.topic_id
        if topic is not None and topic_id in (None, topic.topic_id):
            topic.partition_count = len(stored.partitions)
            topic.configs = configs
            topic.deleting = stored.deleting
            return
        if topic is not None:
            self._forget(topic)
        topic_id = topic_id or self._logs.topic_id(name) or new_id()
        self._remember(Topic(name, topic_id, len(stored.partitions), configs, stored.deleting))

    # -- partitions --------------------------------------------------------------------------------

    def partition(self, name: str, index: int) -> Partition:
        """A partition that this broker leads; errors as `Replicas.leader`."""
        if self._replicas is None:
            raise self._not_joined()
        return self._replicas.leader(TopicPartition(name, index))

    def _not_joined(self) -> KdirectError:
        return NotControllerError(
            "the broker has not joined its cluster yet", hint="try again in a moment"
        )

    # -- changing ----------------------------------------------------------------------------------

    def checked_configs(self, name: str, configs: Mapping[str, Any]) -> Mapping[str, str]:
        checked = super().checked_configs(name, configs)
        if self._picture is not None and self._defaults.with_overrides(configs).wants_remote:
            lacking = [
                number
                for number, node in sorted(self._picture.metadata.brokers.items())
                if node.registration.remote_storage is None
            ]
            if lacking:
                raise ConfigError(
                    f"option remote.storage.enable: 'true' is not allowed for topic {name}: broker"
                    f" {lacking[0]} has no tiered storage",
                    hint="set remote.log.storage.system.enable=true and remote.log.storage.uri of"
                    " all brokers of the cluster, and restart them",
                )
        return checked

    async def create_everywhere(
        self, name: str, partitions: int, factor: int, configs: Mapping[str, Any]
    ) -> Topic:
        """A topic of the cluster that the broker itself needs, created where it is missing; it is
        in this broker's picture then.  KdirectError says what is in the way."""
        if self._picture is None:
            raise self._not_joined()
        texts = dict(self.checked_configs(name, configs))
        start, shift = drawn(self._picture.metadata)
        wanted = CreateTopic(
            None, name, new_id(), partitions, factor, config=texts, start=start, shift=shift
        )
        outcome = (await self._picture.ask(wanted, ASK_S)).outcome
        if outcome.code not in (Code.NONE, Code.TOPIC_ALREADY_EXISTS):
            raise refusal(outcome)
        if not await self._picture.until(lambda m: has_leaders(m, name)):
            raise TimedOutError(
                f"topic {name} was created, but has no leaders yet", hint="try again in a moment"
            )
        topic = self.get(name)
        if topic is None:
            raise TimedOutError(f"topic {name} is being deleted", hint="try again in a moment")
        return topic

    async def set_right(self, name: str, own: Mapping[str, str]) -> None:
        """Have the controller give a topic that brokers keep, and would create with its `own`
        properties, what it needs of them (`kdirect.broker.state_topic.due_configs`): an older
        broker may have created it.  KdirectError."""
        topic = None if self._picture is None else self._picture.metadata.topic(name)
        due = None if topic is None else due_configs(topic.config, own)
        if due is None or self._picture is None:
            return
        wanted = AlterConfig(None, ConfigOf.TOPIC, name, due, whole=True)
        outcome = (await self._picture.ask(wanted, ASK_S)).outcome
        if outcome.code != Code.NONE:
            raise refusal(outcome)

    def _by_the_controller(self) -> NoReturn:
        raise NotControllerError(
            "topics of a cluster are changed by its controller",
            hint="send the request to any broker of the cluster",
        )

    def create(self, name: str, partitions: int, configs: Mapping[str, Any]) -> Topic:
        self._by_the_controller()

    def grow(self, topic: Topic, partitions: int) -> None:
        self._by_the_controller()

    def delete(self, topic: Topic) -> None:
        self._by_the_controller()

    def configure(self, topic: Topic, configs: Mapping[str, str]) -> None:
        self._by_the_controller()

    # -- producer ids ------------------------------------------------------------------------------

    def known_producer_ids(self) -> int:
        """The first producer id that this broker has not given out while it was alone: those of
        the cluster that it gives out are not below.  CorruptLogError.  File work."""
        self._ids_above = self._stored_producer_id() or 0
        return self._ids_above

    async def take_producer_id(self) -> int:
        """A producer id that no broker of the cluster has given out; where the block is used up,
        from the next one.  KdirectError while the store cannot be reached."""
        while (producer_id := self.producer_id_nowait()) is None:
            if self._membership is None:
                raise self._not_joined()
            first, limit = await self._membership.producer_id_block(self._ids_above)
            with self._producer_ids:
                # Several producers may have waited for a block each: none of it is lost.
                if self._next_producer_id >= self._producer_id_limit:
                    self._next_producer_id, self._producer_id_limit = first, limit
        return producer_id


def check_remote_storage(metadata: Metadata, config: Mapping[str, Any]) -> None:
    """ConfigError if a broker of this configuration does not fit into a cluster with tiered topics:
    it has no tiered storage, or another object store than the others."""
    if not config["remote.log.storage.system.enable"]:
        topics = metadata.image.topics
        refuse_tiered(
            [n for n, t in topics.items() if t.config.get("remote.storage.enable") == "true"]
        )
        return
    own = config["remote.log.storage.uri"]
    for number, node in sorted(metadata.brokers.items()):
        there = node.registration.remote_storage
        if there not in (None, own):
            raise ConfigError(
                f"option remote.log.storage.uri: broker {number} keeps tiered topics in {there},"
                f" and this one is to keep them in {own}",
                hint="give all brokers of a cluster the same object store",
            )


def drawn(metadata: Metadata) -> tuple[int, int]:
    """Where the spreading of a topic's replicas begins: `start` and `shift` of `CreateTopic`."""
    brokers = max(1, len(metadata.brokers))
    return random.randrange(brokers), random.randrange(brokers)


def has_leaders(metadata: Metadata, name: str) -> bool:
    """Is there a topic of this name, and has each partition of it had a leader?"""
    topic = metadata.topic(name)
    return topic is not None and all(p.state is not None for p in topic.partitions)


def refusal(outcome: Outcome) -> KdirectError:
    """The error that a controller's refusal is to the broker itself."""
    if outcome.code == Code.INVALID_REPLICATION_FACTOR:
        return NotEnoughReplicasError(outcome.message, hint="start more brokers")
    if outcome.code == Code.NOT_CONTROLLER:
        return NotControllerError(outcome.message or "there is no controller")
    if outcome.code == Code.TOPIC_ALREADY_EXISTS:
        return TopicExistsError(outcome.message)
    return ConfigError(f"the controller refuses: {outcome.message or outcome.code.name}")
