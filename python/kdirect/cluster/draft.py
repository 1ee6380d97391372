"""The next commit of a controller, while it is being made.

Rules change partitions, topics and configs in a `Draft`; it keeps the operations that make the
store so, and the image that is there when they have happened.  A draft is made and used within one
step of the controller, and nothing outside of it changes.

Every commit begins with a check of ``/controller_epoch``, by which the writes of a controller that
was replaced fail, and replaces ``/kdirect/changes``, by which the brokers learn what has changed.
The latter is also the mark by which a commit with unknown outcome is recognized: see `controller`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdirect.cluster import paths, records
from kdirect.cluster.election import Fleet, Partition, Rules
from kdirect.cluster.image import MISSING, Image, Settings, Topic
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.records import StoredState
from kdirect.model import TopicPartition
from kdirect.store.contract import Check, Create, Delete, Operation, Replace, parent_of

# Of paths and values in one commit; far below what the store takes, so that a commit is short.
ROOM_BYTES = 300_000
_OPERATION_BYTES = 40  # of each operation, in addition to its path and value


class Draft:
    """Changes to an image, for one commit.  `touched`: partitions whose state it changes."""

    def __init__(self, image: Image, fleet: Fleet, settings: Settings) -> None:
        self.fleet = fleet
        self.touched: list[TopicPartition] = []
        self._settings = settings
        self._base = image
        self._topics = dict(image.topics)
        self._open: dict[str, list[Partition]] = {}  # of topics whose partitions are changed
        self._reassigned: dict[str, None] = {}  # topics whose own node is to be written
        self._broker_configs = dict(image.broker_configs)
        self._other_configs = dict(image.other_configs)
        self._versions = dict(image.versions)
        self._rules: dict[str, Rules] = {}  # as far as they were looked up
        self._writes: dict[str, Operation] = {}
        self._size = 0
        self._changed: dict[str, None] = {}  # paths that brokers look at, in order

    # -- looking -----------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._writes and not self._reassigned

    @property
    def has_room(self) -> bool:
        return self._size < ROOM_BYTES

    @property
    def topics(self) -> Mapping[str, Topic]:
        """As they are with the changes so far, but for their partitions: see `find`."""
        return self._topics

    def find(self, tp: TopicPartition) -> Partition | None:
        """The partition with the changes so far, unless its topic is being deleted."""
        topic = self._topics.get(tp.topic)
        if topic is None or topic.deleting:
            return None
        partitions = self._open.get(tp.topic, topic.partitions)
        return partitions[tp.partition] if 0 <= tp.partition < len(partitions) else None

    def partitions_of(self, name: str) -> tuple[Partition, ...]:
        return tuple(self._open.get(name, self._topics[name].partitions))

    def broker_config(self, name: str) -> Mapping[str, str]:
        return self._broker_configs.get(name, {})

    def other_config(self, of: str, name: str) -> Mapping[str, str]:
        return self._other_configs.get((of, name), {})

    def rules(self, name: str) -> Rules:
        if name not in self._rules:
            image = self._base._replace(topics=self._topics, broker_configs=self._broker_configs)
            self._rules[name] = image.rules(name, self._settings)
        return self._rules[name]

    def exists(self, path: str) -> bool:
        return path in self._versions

    def is_damaged(self, tp: TopicPartition) -> bool:
        return paths.state(tp) in self._base.damaged

    # -- changing ----------------------------------------------------------------------------------

    def set_partition(self, tp: TopicPartition, new: Partition) -> None:
        """Make the partition so, which is not a new one."""
        partitions = self._partitions(tp.topic)
        old = partitions[tp.partition]
        state = new.state
        if state is not None and (
            state != old.state
            or new.incarnations != old.incarnations
            or new.failed != old.failed
            or state.version == MISSING
        ):
            new = new._replace(state=self._write_state(tp, new, state))
        partitions[tp.partition] = new
        if (new.replicas, new.adding, new.removing) != (old.replicas, old.adding, old.removing):
            self._write_topic(tp.topic)

    def renew(self, tp: TopicPartition) -> PartitionState:
        """Write the state as it is, so that it has a new version, which is returned."""
        partitions = self._partitions(tp.topic)
        partition = partitions[tp.partition]
        assert partition.state is not None
        state = self._write_state(tp, partition, partition.state)
        partitions[tp.partition] = partition._replace(state=state)
        return state

    def _write_state(
        self, tp: TopicPartition, partition: Partition, state: PartitionState
    ) -> PartitionState:
        """The state as it is in the store afterwards."""
        path = paths.state(tp)
        known, failed = dict(partition.incarnations), dict(partition.failed)
        stored = StoredState(state, self._base.epoch, known, failed)
        self._put(path, records.encode_state(stored))
        self.touched.append(tp)
        return state._replace(version=self._versions[path])

    def create_topic(self, name: str, topic: Topic) -> None:
        """Or grow it: `topic` has more partitions than there were, and these have no state."""
        self._rules.clear()
        self._topics[name] = topic
        self._open.pop(name, None)
        self._partitions(name)
        self._write_topic(name)

    def _partitions(self, name: str) -> list[Partition]:
        if name not in self._open:
            self._open[name] = list(self._topics[name].partitions)
        return self._open[name]

    def _write_topic(self, name: str) -> None:
        """Its own node, when the draft is finished: many partitions may change in one draft."""
        if name not in self._reassigned:
            self._reassigned[name] = None
            self._size += 200 + 30 * len(self._partitions(name))

    def _close_topics(self) -> None:
        """Put what was changed into `_topics`, and write the topics' own nodes."""
        for name, partitions in self._open.items():
            if name in self._topics:
                self._topics[name] = self._topics[name]._replace(partitions=tuple(partitions))
        for name in self._reassigned:
            topic = self._topics[name]
            record = topic.record._replace(
                replicas=tuple(p.replicas for p in topic.partitions),
                adding={n: p.adding for n, p in enumerate(topic.partitions) if p.adding},
                removing={n: p.removing for n, p in enumerate(topic.partitions) if p.removing},
            )
            self._topics[name] = topic._replace(record=record)
            self._put(paths.topic(name), records.encode_topic(record))

    def set_topic_config(self, name: str, config: dict[str, str]) -> None:
        self._rules.clear()
        self._topics[name] = self._topics[name]._replace(config=config)
        self._put(paths.topic_config(name), records.encode_config(config))

    def set_broker_config(self, name: str, config: dict[str, str]) -> None:
        self._rules.clear()
        self._broker_configs[name] = config
        self._put(paths.broker_config(name), records.encode_config(config))

    def set_other_config(self, of: str, name: str, config: dict[str, str]) -> None:
        """Of a group or a subscription; without properties nothing is kept of it."""
        path = paths.other_config(of, name)
        if config:
            self._other_configs[(of, name)] = config
            self._put(path, records.encode_config(config))
        else:
            self._other_configs.pop((of, name), None)
            self._changed[path] = None
            self.take_node(path)

    def mark_deletion(self, name: str) -> None:
        """From now on the topic is not used any more; its nodes go bit by bit."""
        self._topics[name] = self._topics[name]._replace(deleting=True)
        self._put(paths.deletion(name), b"")
        self._changed[paths.topic(name)] = None

    def delete_topic_nodes(self, name: str) -> None:
        """Delete nodes of a topic that is marked, while there is room; the mark goes last."""
        root = paths.topic(name)
        below = [path for path in self._versions if path.startswith(root + "/")]
        below.sort(key=lambda path: (-len(path.split("/")), path))  # children before parents
        for path in below:
            if not self.has_room:
                return
            self._delete(path)
        # At once: a mark without a topic would delete the next one of that name.
        for path in (root, paths.topic_config(name), paths.deletion(name)):
            self.take_node(path)
        self._changed[root] = None
        del self._topics[name]

    def take_node(self, path: str) -> None:
        """Delete a node, if it is there."""
        if path in self._versions:
            self._delete(path)

    # -- operations --------------------------------------------------------------------------------

    def _put(self, path: str, value: bytes) -> None:
        self._changed[path] = None
        base = self._base.versions.get(path)
        if base is None and path not in self._writes:
            self._make_parents(path)
        old = self._writes.get(path)
        if isinstance(old, Create | Replace):
            self._size -= len(old.value)
        else:
            self._size += 2 * len(path) + _OPERATION_BYTES  # also in /kdirect/changes
        self._size += len(value)
        if base is None:
            self._writes[path] = Create(path, value)
            self._versions[path] = 0
        else:
            self._writes[path] = Replace(path, value, base)
            self._versions[path] = base + 1

    def _make_parents(self, path: str) -> None:
        missing = []
        while (path := parent_of(path)) and path not in self._versions:
            missing.append(path)
        for parent in reversed(missing):
            name = paths.name_below(parent, paths.TOPICS)
            if name in self._topics:  # deleted by hand: the value comes when the draft is finished
                self._write_topic(name)
            self._writes[parent] = Create(parent)
            self._versions[parent] = 0
            self._size += len(parent) + _OPERATION_BYTES

    def _delete(self, path: str) -> None:
        self._size += len(path) + _OPERATION_BYTES
        del self._versions[path]
        if path in self._base.versions:
            self._writes[path] = Delete(path)
        else:
            self._writes.pop(path, None)

    def finish(self) -> tuple[tuple[Operation, ...], Image]:
        """The operations of the commit, and the image when it has happened."""
        self._close_topics()
        changes = records.with_change(self._base.changes, tuple(self._changed))
        value = records.encode_changes(changes)
        version = self._base.versions.get(paths.CHANGES)
        mark: tuple[Operation, ...] = ()
        if version is None:
            self._put(paths.CHANGES, value)
        else:
            mark = (Replace(paths.CHANGES, value, version),)
            self._versions[paths.CHANGES] = version + 1
        fence = Check(paths.CONTROLLER_EPOCH, self._base.epoch_version)
        after = self._base._replace(
            topics=self._topics,
            broker_configs=self._broker_configs,
            other_configs=self._other_configs,
            versions=self._versions,
            changes=changes,
        )
        return (fence, *mark, *self._writes.values()), after
