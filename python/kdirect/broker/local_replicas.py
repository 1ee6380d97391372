"""The replicas that this broker keeps, made and removed as the cluster's metadata says.

Owns: the way from a picture of the cluster to directories of partitions.  Nobody else of a member
makes or deletes partitions.  For each topic that has changed:

======================================================  ==========================================
in the metadata                                         here
======================================================  ==========================================
the partition has a replica on this broker              it is made, if it is missing; its topic's
                                                        properties are applied
it has one, in a directory that has failed              it is not made elsewhere: the controller
                                                        is told, and others have the records
it has none here any more (reassigned), or its topic    it is removed with all its files
is being deleted, or was seen to be deleted
its topic is not there, or has another id, and nobody   its directory gets another name, and all
has seen it deleted: the store may have lost it         its files stay
the topic's node is damaged                             it is left alone
======================================================  ==========================================

File work runs on the broker's admin thread, one topic after the other; while it runs, newer
pictures wait, and the newest is looked at next.  `made` is told of each partition when it is there,
`gone` as soon as it is not wanted any more, before its turn to be removed; both on the event loop.
The partitions of a large topic are made `AT_ONCE` by `AT_ONCE`, so that the first ones serve and
other admin work has its turn meanwhile.

**A log directory of a broker that was alone** has its topics in ``topics.json``.  The first time
that it joins a cluster, they become topics of the cluster with one replica, which is here: ids,
configs and records are kept (`bring_along`).  The file is renamed when that is done, so that a
crash in between is finished by the next start.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kdirect.broker.member_topics import ASK_S, refusal, usable_configs
from kdirect.broker.picture import Picture
from kdirect.broker.topics import Registry, Topic
from kdirect.cluster import paths
from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.image import Topic as StoredTopic
from kdirect.cluster.requests import CreateTopic
from kdirect.errors import ConfigError, KdirectError, TimedOutError
from kdirect.log.checkpoint import sync_directory
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.member.failed_replicas import FailedReplicas
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker")

AT_ONCE = 32  # replicas
AGAIN_S = 0.1  # until a controller that does not know this broker yet is asked again
RETRY_S = 5.0  # after a replica could not be made: its disk is full, say
JOINED_SUFFIX = ".joined"

Made = Callable[[TopicPartition, Partition], None]
Gone = Callable[[TopicPartition], Any]
# `remove(partitions, work)`: end every access to these partitions, then do `work` on the admin
# thread.
Remove = Callable[[list[TopicPartition], Callable[[], Any]], Awaitable[None]]


class LocalReplicas:
    """See the module.  Life: construct, `bring_along` and `start` once the broker has joined,
    `stop`.  `admin(work)` runs file work."""

    def __init__(
        self,
        node_id: int,
        logs: LogManager,
        picture: Picture,
        *,
        admin: Callable[..., Awaitable[Any]],
        made: Made,
        gone: Gone,
        remove: Remove,
        failed: FailedReplicas,
    ) -> None:
        self._failed = failed
        self._node_id = node_id
        self._logs = logs
        self._picture = picture
        self._admin = admin
        self._made = made
        self._gone = gone
        self._remove = remove
        self._changed: dict[str, None] = {}  # topics to look at, in order
        self._told: set[TopicPartition] = set()  # `made`, and not `gone`
        self._ending: dict[TopicPartition, asyncio.Future[Any]] = {}  # `gone`, which ends it
        self._deleted: set[uuid.UUID | None] = set()  # topics of which there are replicas here yet
        self._task: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._started = False
        self._stopped = False

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring what is here to what the metadata says; from now on, follow it."""
        for tp, partition in sorted(self._logs.partitions.items()):
            if self._is_wanted(self._picture.metadata, tp, partition):
                self._tell(tp, partition)
        self._started = True
        metadata = self._picture.metadata
        if self._logs.offline:
            self._find_lost(metadata)
        self._look_at({*metadata.image.topics, *(tp.topic for tp in self._logs.partitions)})
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Finish the topic that is under way, and follow no longer."""
        self._stopped = True
        if self._retry is not None:
            self._retry.cancel()
        waits = [*self._ending.values(), *([self._task] if self._task is not None else [])]
        if waits:
            await asyncio.wait(waits)

    def follow(self, before: Metadata | None, after: Metadata) -> None:
        """Newer metadata; a subscriber of the membership."""
        if not self._started:
            return
        old = before.image.topics if before is not None else {}
        new = after.image.topics
        for name, topic in old.items():
            now = new.get(name)
            if now is topic:
                continue
            gone = now is None or now.record.topic_id != topic.record.topic_id
            if topic.deleting or (
                gone and before is not None and before.readings == after.readings
            ):
                self._deleted |= {p.topic_id for p in self._logs.partitions_of(name)}
        changed = [n for n, topic in new.items() if _differs(old.get(n), topic)]
        changed += [n for n in old if n not in new]
        self._end_at_once(after, changed)
        self._look_at(changed)

    def _end_at_once(self, metadata: Metadata, names: Iterable[str]) -> None:
        """Let what is not wanted any more serve nobody.  Its files go when it is their turn, and
        that may take a second: until then a topic of the same name may come, and its producers
        would get acknowledgements from the replica of the one that is deleted."""
        for name in names:
            if paths.topic(name) in metadata.image.damaged:
                continue
            for partition in self._logs.partitions_of(name):
                tp = partition.topic_partition
                if tp in self._told and not self._is_wanted(metadata, tp, partition):
                    self._end(tp)

    def _end(self, tp: TopicPartition) -> None:
        self._told.discard(tp)
        ended = self._gone(tp)
        if ended is not None:
            self._ending[tp] = asyncio.ensure_future(ended)

    def _look_at(self, names: Iterable[str]) -> None:
        self._changed.update(dict.fromkeys(names))
        if self._changed and self._task is None and not self._stopped:
            self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        failed = []
        try:
            while self._changed and not self._stopped:
                name = next(iter(self._changed))
                del self._changed[name]
                try:
                    await self._settle(name)
                except Exception as e:  # one topic's trouble does not stop the others
                    stack = None if isinstance(e, (KdirectError, OSError)) else e
                    text = "the replicas of topic %s are not as they should be: %s"
                    log.error(text, name, e, exc_info=stack)
                    failed.append(name)
        finally:
            self._task = None
        if failed and not self._stopped:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(RETRY_S, self._look_at, failed)

    # -- directories that have failed --------------------------------------------------------------

    def _find_lost(self, metadata: Metadata) -> None:
        """A directory could not be opened, and nobody knows what is in it: whatever is not in the
        others, and is no new partition, is taken to be there."""
        lost = {}
        for tp, partition in metadata.image.all_partitions():
            if self._node_id in partition.replicas and partition.state is not None:
                topic = metadata.topic(tp.topic)
                if tp not in self._logs.partitions and topic is not None:
                    lost[tp] = topic.record.topic_id
        self._logs.lost.update(lost)
        self._failed.add(lost)

    def let_go(self, partitions: Iterable[TopicPartition]) -> None:
        """Their directory has failed."""
        self._told.difference_update(partitions)

    def _forget_lost(self, name: str, metadata: Metadata) -> None:
        """Forget what is not wanted here any more: a topic of this name that comes is another."""
        topic = metadata.topic(name)
        for tp, topic_id in list(self._logs.lost.items()):
            if tp.topic != name:
                continue
            same = topic is not None and topic.record.topic_id in (None, topic_id)
            if not same or not self._is_wanted(metadata, tp, None):
                del self._logs.lost[tp]
                self._failed.discard(tp)

    # -- one topic ---------------------------------------------------------------------------------

    def _is_wanted(self, metadata: Metadata, tp: TopicPartition, here: Partition | None) -> bool:
        """Has the partition a replica on this broker?  `here`: what is there of it; one of another
        topic of that name is not the partition."""
        topic = metadata.topic(tp.topic)
        if topic is None or tp.partition >= len(topic.partitions):
            return False
        if self._node_id not in topic.partitions[tp.partition].replicas:
            return False
        topic_id = topic.record.topic_id
        return here is None or topic_id is None or here.topic_id == topic_id

    def _is_decided(self, metadata: Metadata, here: Partition) -> bool:
        """Has the controller decided that a replica goes, which is not wanted any more?"""
        tp = here.topic_partition
        topic = metadata.image.topics.get(tp.topic)
        if topic is not None and topic.record.topic_id in (None, here.topic_id):
            return topic.deleting or tp.partition < len(topic.partitions)
        return here.topic_id in self._deleted

    async def _settle(self, name: str) -> None:
        await self._until_ended([tp for tp in self._ending if tp.topic == name])
        metadata = self._picture.metadata
        if paths.topic(name) in metadata.image.damaged:
            log.error("node %s is damaged: replicas are left as they are", paths.topic(name))
            return
        self._forget_lost(name, metadata)
        here = {p.topic_partition: p for p in self._logs.partitions_of(name)}
        doomed = [tp for tp, found in here.items() if not self._is_wanted(metadata, tp, found)]
        strays = [tp for tp in doomed if not self._is_decided(metadata, here[tp])]
        for tps in (strays, [tp for tp in doomed if tp not in strays]):
            if tps:
                await self._remove_replicas(tps, keep=tps is strays)
        self._deleted -= {found.topic_id for found in here.values()}
        topic = metadata.topic(name)
        if topic is None:
            return
        wanted = [TopicPartition(name, index) for index in range(len(topic.partitions))]
        there, lost = set(here) - set(doomed), set(self._logs.lost)
        missing = [
            tp
            for tp in wanted
            if tp not in there and tp not in lost and self._is_wanted(metadata, tp, None)
        ]
        configs = usable_configs(topic.config, self._logs.config.with_overrides)
        if any(dict(here[tp].config.overrides or {}) != configs for tp in there):
            await self._admin(self._logs.alter_topic, name, configs)
        for tp in there - lost:  # also those of a topic whose node was damaged until now
            self._tell(tp, here[tp])
        for first in range(0, len(missing), AT_ONCE):
            if self._stopped:
                return
            some = missing[first : first + AT_ONCE]
            try:
                await self._admin(self._make, topic, some, configs)
            finally:
                for tp in some:
                    found = self._logs.partitions.get(tp)
                    if found is not None and tp not in self._logs.lost:
                        self._tell(tp, found)

    def _tell(self, tp: TopicPartition, partition: Partition) -> None:
        if tp in self._told or not self._is_wanted(self._picture.metadata, tp, partition):
            return  # if it has become unwanted meanwhile, its topic is looked at next
        self._told.add(tp)
        self._made(tp, partition)

    def _make(
        self, topic: StoredTopic, missing: list[TopicPartition], configs: Mapping[str, str]
    ) -> None:
        self._logs.create_partitions(missing, configs, topic.record.topic_id)

    async def _remove_replicas(self, doomed: list[TopicPartition], *, keep: bool) -> None:
        log.info("removing the replicas of %s", ", ".join(map(str, doomed)))
        for tp in doomed:
            if tp in self._told:
                self._end(tp)
        await self._until_ended(doomed)
        await self._remove(doomed, partial(self._logs.delete_partitions, doomed, keep=keep))

    async def _until_ended(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            ended = self._ending.pop(tp, None)
            if ended is not None:
                await ended

    # -- a broker that was alone -------------------------------------------------------------------

    async def bring_along(self, own: Registry, file: Path) -> None:
        """Make topics of the cluster of the topics that this broker had while it was alone, which
        are in `file`.  ConfigError where the cluster has another topic of that name."""
        for topic in list(own):
            await self._bring(topic)
        await self._admin(_rename, file)

    async def _ask(self, wanted: CreateTopic) -> Outcome:
        """What becomes of a question that names this broker; the controller may not have heard yet
        that it lives."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ASK_S
        while True:
            outcome = (await self._picture.ask(wanted, ASK_S)).outcome
            if outcome.code is not Code.INVALID_REPLICA_ASSIGNMENT or loop.time() >= deadline:
                return outcome
            await asyncio.sleep(AGAIN_S)

    async def _bring(self, topic: Topic) -> None:
        there = self._picture.metadata.topic(topic.name)
        if there is None:
            replicas = dict.fromkeys(range(topic.partition_count), (self._node_id,))
            # Those of a copied Kafka log have led before.
            epochs = [p.leader_epoch for p in self._logs.partitions_of(topic.name)]
            wanted = CreateTopic(
                None,
                topic.name,
                topic.topic_id,
                topic.partition_count,
                1,
                assignment=replicas,
                config=topic.configs,
                first_epoch=max(epochs, default=0),
            )
            outcome = await self._ask(wanted)
            if outcome.code not in (Code.NONE, Code.TOPIC_ALREADY_EXISTS):
                raise refusal(outcome)
            if not await self._picture.until(lambda m: m.topic(topic.name) is not None, ASK_S):
                raise TimedOutError(f"topic {topic.name} does not appear in the metadata store")
            there = self._picture.metadata.topic(topic.name)
        if there is not None and there.record.topic_id != topic.topic_id:
            raise ConfigError(
                f"topic {topic.name} of this broker's log directories exists in the cluster as"
                " another topic",
                hint="delete one of them first: here by starting the broker alone, without"
                " zookeeper.connect",
            )


def _differs(old: StoredTopic | None, new: StoredTopic) -> bool:
    """May what is here of a topic have to change?  Not for another leader."""
    if old is new:
        return False
    if old is None or old.deleting != new.deleting or old.config != new.config:
        return True
    return old.record != new.record


def _rename(file: Path) -> None:
    """Remember that the topics in the file are the cluster's now."""
    file.rename(file.with_name(file.name + JOINED_SUFFIX))
    sync_directory(file.parent)
