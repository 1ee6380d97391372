"""Which topics there are: ids, partition counts, configs; and the small files that remember them.

Owns: ``topics.json`` (topics) and ``producer_ids`` (the next block of producer ids), both in the
first log directory, in the form of `kdirect.store.own_files`.  The partitions' directories with
everything in them are the log's.

Invariants: a file is replaced whole (written under another name, synced, renamed), so a crash
leaves the old or the new one; a topic is in ``topics.json`` before its first directory exists, and
is marked there before its first directory goes, so that a crash in between is finished at the next
start.  Directories that no topic claims (a copied Kafka log) are adopted.

The registry decides and remembers.  Looking needs no lock and does no file work; any thread may.
What changes topics is file work: it is called on one thread at a time, the broker's admin thread
while it serves, so that changes have an order.  A topic is known while its partitions are being
made: until then they have no leader.

The registry holds the topics that this broker leads.  Those that other brokers of the cluster lead
are known to the `ClusterView` alone; `find`, `find_by_id` and `all_topics` look at both.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdirect.broker.cluster_view import ClusterView, PlacedTopic
from kdirect.errors import (
    ConfigError,
    KdirectError,
    LogError,
    NotLeaderError,
    TopicCollisionError,
    TopicExistsError,
    UnknownTopicError,
)
from kdirect.log.checkpoint import decode_id, encode_id, new_id, replace_file
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.log.remote_rules import check_metadata_topic, check_topic
from kdirect.model import TopicPartition, check_topic_name
from kdirect.store.own_files import (
    IDS_FILE,
    PRODUCER_ID_BLOCK,
    TOPICS_FILE,
    Row,
    damaged_topics,
    new_row,
    next_id_text,
    read_document,
    read_next_id,
    topics_text,
)
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.broker")

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
REMOTE_METADATA_TOPIC = "__remote_log_metadata"
INTERNAL_TOPICS = frozenset((OFFSETS_TOPIC, TRANSACTIONS_TOPIC, REMOTE_METADATA_TOPIC))
# Of a topic, and of what one request may ask for, as in Kafka: requests that change topics wait for
# one another.
MAX_PARTITIONS = 10_000
AT_ONCE = 256  # partitions that are made with one sync


def _write(path: Path, data: bytes) -> None:
    """Put `data` in place of the file, so that a crash leaves either; LogError names the file."""
    try:
        replace_file(path, data)
    except OSError as e:
        raise LogError(
            f"cannot write {path}: {e.strerror}",
            hint="check space and permissions of the log directory",
        ) from e


@dataclass(slots=True)
class Topic:
    """One topic.  `configs` are the properties that it sets itself, as text."""

    name: str
    topic_id: uuid.UUID
    partition_count: int
    configs: dict[str, str] = field(default_factory=dict)
    deleting: bool = False

    @property
    def internal(self) -> bool:
        return self.name in INTERNAL_TOPICS


class Registry:
    """All topics of this broker, by name and by id."""

    def __init__(self, logs: LogManager, cluster: ClusterView, environment: Environment) -> None:
        self._cluster = cluster
        self._elsewhere = cluster.elsewhere
        self._environment = environment
        self._file = logs.log_dirs[0] / TOPICS_FILE
        self._ids_file = logs.log_dirs[0] / IDS_FILE
        self._logs = logs
        # A topic is about to be tiered for the first time.  On the admin thread; KdirectError.
        self.before_tiered: Callable[[], None] = lambda: None
        # Is a deleted topic to be remembered until `forget_deleted`?  On the admin thread.
        self.outlives_its_log: Callable[[Topic], bool] = lambda topic: False
        # Such topics, of which a crash came in between.
        self.unforgotten: list[Topic] = []
        self.remade: set[str] = set()  # topics that had lost partitions when the broker started
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[uuid.UUID, Topic] = {}
        self._producer_ids = threading.Lock()  # held for the two numbers, never for the file
        self._next_producer_id = 0
        self._producer_id_limit = 0

    # -- life --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the file, finish what a crash interrupted, make missing partitions, adopt unclaimed
        ones."""
        found_rows = read_document(self._file)
        if found_rows is not None:
            self._load(found_rows[0])
        for doomed in [t for t in self._topics.values() if t.deleting]:
            self._logs.delete_topic(doomed.name)
            self._forget(doomed)
            if self._defaults.remote_system:  # it may have been tiered once, and not be now
                self.unforgotten.append(doomed)
        found: dict[str, list[Partition]] = {}
        for tp, partition in sorted(self._logs.partitions.items()):
            found.setdefault(tp.topic, []).append(partition)
        for name, partitions in found.items():
            count = partitions[-1].topic_partition.partition + 1
            topic = self._topics.get(name)
            if topic is None:
                self._remember(
                    Topic(
                        name,
                        partitions[0].topic_id,
                        count,
                        dict(partitions[0].config.overrides or {}),
                    )
                )
            else:
                topic.partition_count = max(topic.partition_count, count)
                if any(dict(x.config.overrides or {}) != topic.configs for x in partitions):
                    self._logs.alter_topic(name, topic.configs)
        for topic in self._topics.values():
            there = (
                found[topic.name][-1].topic_partition.partition + 1 if topic.name in found else 1
            )
            if topic.partition_count > max(there, MAX_PARTITIONS):
                log.error(
                    "topic %s cannot have %d partitions: it keeps the %d that are there",
                    topic.name,
                    topic.partition_count,
                    there,
                )
                topic.partition_count = there
            if self._make_partitions(topic, 0):
                self.remade.add(topic.name)
        self._save()
        self._make_placed()
        self._stored_producer_id()  # a damaged file is reported now, not to the first producer

    def _make_placed(self) -> None:
        """Make the topics that the layout of the cluster gives to this broker."""
        for placed in self._cluster.here.values():
            topic = self._topics.get(placed.name)
            if topic is None:
                configs = self.check_new(placed.name, placed.partition_count, {})
                self._create(Topic(placed.name, placed.topic_id, placed.partition_count, configs))
            elif topic.topic_id != placed.topic_id:
                raise ConfigError(
                    f"topic {placed.name} of the log is not that of the cluster's layout",
                    hint="give the broker an empty log directory, or place a topic of another name",
                )
            elif topic.partition_count < placed.partition_count:
                self.grow(topic, placed.partition_count)

    def _load(self, rows: Mapping[str, Row]) -> None:
        try:
            for name, row in rows.items():
                self._defaults.with_overrides(row["configs"])
                topic_id = decode_id(row["id"])
                self._remember(
                    Topic(name, topic_id, row["partitions"], row["configs"], "deleting" in row)
                )
        except ValueError as e:
            raise damaged_topics(self._file, e) from e

    def _save(self) -> None:
        rows = {
            t.name: new_row(
                encode_id(t.topic_id), t.partition_count, t.configs, deleting=t.deleting
            )
            for t in (*self.unforgotten, *self._topics.values())
        }
        _write(self._file, topics_text(rows))

    def _save_soon(self) -> None:
        """Save what need not be on disk yet: the next start, or the next change of a topic,
        finishes it."""
        try:
            self._save()
        except LogError as e:
            log.error("%s", e)

    def _remember(self, topic: Topic) -> None:
        self._topics[topic.name] = topic
        self._by_id[topic.topic_id] = topic

    def _forget(self, topic: Topic) -> None:
        self._topics.pop(topic.name, None)
        self._by_id.pop(topic.topic_id, None)

    # -- looking -----------------------------------------------------------------------------------

    @property
    def _defaults(self) -> LogConfig:
        """The settings of a topic that sets none itself."""
        return self._logs.config

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def by_id(self, topic_id: uuid.UUID | None) -> Topic | None:
        return self._by_id.get(topic_id) if topic_id is not None else None

    def find(self, name: str) -> Topic | PlacedTopic | None:
        """A topic of the cluster, whichever broker leads it."""
        return self._elsewhere.get(name) or self._topics.get(name)

    def find_by_id(self, topic_id: uuid.UUID | None) -> Topic | PlacedTopic | None:
        """The same, by id."""
        found = self.by_id(topic_id)
        if found is not None:
            return found
        return next((t for t in self._elsewhere.values() if t.topic_id == topic_id), None)

    def all_topics(self) -> list[Topic | PlacedTopic]:
        """All topics of the cluster that this broker knows of, without those that are being
        deleted: nobody is told of them by their names either."""
        here = [
            t for t in self._topics.values() if t.name not in self._elsewhere and not t.deleting
        ]
        return [*here, *self._elsewhere.values()]

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._topics.values()))

    def __len__(self) -> int:
        return len(self._topics)

    def log_config(self, topic: Topic) -> LogConfig:
        """The settings in force for a topic."""
        return self._defaults.with_overrides(topic.configs)

    # -- changing ----------------------------------------------------------------------------------

    def check_new(self, name: str, partitions: int, configs: Mapping[str, Any]) -> dict[str, str]:
        """May this topic be created?  Its configs as text; ConfigError (TopicCollisionError for its
        name), TopicExistsError."""
        check_topic_name(name)
        for other in self._topics:
            # Kafka's rule: names that differ in '.' and '_' only would share a metrics name.
            if other == name:
                raise TopicExistsError(f"topic {name} already exists", hint="choose another name")
            if other.replace(".", "_") == name.replace(".", "_"):
                raise TopicCollisionError(
                    f"topic {name} collides with topic {other}",
                    hint="names may not differ in '.' and '_' only",
                )
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise ConfigError(
                f"topic {name}: {partitions} partitions", hint=f"give 1 to {MAX_PARTITIONS}"
            )
        return dict(self.checked_configs(name, configs))

    def checked_configs(self, name: str, configs: Mapping[str, Any]) -> Mapping[str, str]:
        """The properties that a topic is to have, as they are stored: by their own names, as text.
        ConfigError for those that it may not have, after those that it has."""
        config = self._defaults.with_overrides(configs)
        topic = self._topics.get(name)
        check_topic(
            name,
            config,
            is_internal=name in INTERNAL_TOPICS,
            was_tiered=topic is not None and self.log_config(topic).wants_remote,
        )
        if name == REMOTE_METADATA_TOPIC:
            check_metadata_topic(name, config)
        return config.overrides or {}

    def create(self, name: str, partitions: int, configs: Mapping[str, Any]) -> Topic:
        """Create a topic with its partitions; ConfigError, TopicExistsError, LogError."""
        topic = Topic(name, new_id(), partitions, self.check_new(name, partitions, configs))
        self._create(topic)
        return topic

    def restore(
        self, name: str, topic_id: uuid.UUID, partitions: int, configs: Mapping[str, str]
    ) -> None:
        """Create a topic that was there before, under its id; errors as `create`."""
        self._create(Topic(name, topic_id, partitions, dict(configs)))

    def _create(self, topic: Topic) -> None:
        if self.log_config(topic).wants_remote:
            self.before_tiered()
        self._remember(topic)
        try:
            self._save()
            self._make_partitions(topic, 0)
        except KdirectError:
            topic.deleting = True
            try:
                self._logs.delete_topic(topic.name)
            finally:
                self._forget(topic)
            self._save_soon()
            raise

    def grow(self, topic: Topic, partitions: int) -> None:
        """Add partitions up to `partitions` in all; ConfigError when that is too many, LogError."""
        if partitions > MAX_PARTITIONS:
            raise ConfigError(
                f"topic {topic.name}: {partitions} partitions",
                hint=f"give at most {MAX_PARTITIONS}",
            )
        before = topic.partition_count
        topic.partition_count = partitions
        try:
            self._save()
            self._make_partitions(topic, before)
        except KdirectError:
            topic.partition_count = max(
                [
                    before,
                    *(tp.partition + 1 for tp in self._logs.partitions if tp.topic == topic.name),
                ]
            )
            self._save()
            raise

    def delete(self, topic: Topic) -> None:
        """Delete a topic and its partitions.  LogError: it is there as before, or, when it is
        marked as `deleting` already, to be deleted by the next try or the next start."""
        before = topic.deleting
        topic.deleting = True
        try:
            self._save()
        except LogError:
            topic.deleting = before
            raise
        self._logs.delete_topic(topic.name)
        if not self.outlives_its_log(topic):
            self.forget_deleted(topic)

    def forget_deleted(self, topic: Topic) -> None:
        """Nothing of a deleted topic has to be remembered any more."""
        self._forget(topic)
        self.unforgotten = [other for other in self.unforgotten if other is not topic]
        self._save_soon()

    def configure(self, topic: Topic, configs: Mapping[str, str]) -> None:
        """Replace the topic's own properties; ConfigError leaves the old ones."""
        checked = self.checked_configs(topic.name, configs)
        if self._defaults.with_overrides(checked).wants_remote:
            self.before_tiered()
        before = topic.configs
        topic.configs = dict(checked)
        try:
            self._save()
        except LogError:
            topic.configs = before
            raise
        self._logs.alter_topic(topic.name, topic.configs)

    def _make_partitions(self, topic: Topic, start: int) -> int:
        """Make those that are missing; how many."""
        wanted = (TopicPartition(topic.name, i) for i in range(start, topic.partition_count))
        missing = [tp for tp in wanted if tp not in self._logs.partitions]
        for first in range(0, len(missing), AT_ONCE):
            some = missing[first : first + AT_ONCE]
            self._logs.create_partitions(some, topic.configs, topic.topic_id)
        return len(missing)

    def partition(self, name: str, index: int) -> Partition:
        """A partition that this broker leads.  UnknownTopicError names what is missing,
        NotLeaderError the broker to ask."""
        partition = self._logs.partitions.get(TopicPartition(name, index))
        topic = self._topics.get(name)
        if partition is None or topic is None or topic.deleting or name in self._elsewhere:
            raise self._no_partition(name, index)
        return partition

    def _no_partition(self, name: str, index: int) -> KdirectError:
        if not self._cluster.leads(name):
            return NotLeaderError(
                f"broker {self._cluster.leader_of(name)} leads partition {name}-{index}",
                hint="ask for metadata, then that broker",
            )
        if TopicPartition(name, index) in self._logs.lost:
            return LogError(
                f"the log directory of {name}-{index} has failed",
                hint="mend it and start the broker again; see its log",
            )
        return UnknownTopicError(
            f"partition {name}-{index} does not exist",
            hint="create the topic, or check its name and number of partitions",
        )

    # -- producer ids ------------------------------------------------------------------------------

    def producer_id_nowait(self) -> int | None:
        """A producer id that no broker has given out before, in this run or an earlier one; None
        when the file has to be written first."""
        with self._producer_ids:
            if self._next_producer_id >= self._producer_id_limit:
                return None
            self._next_producer_id += 1
            return self._cluster.producer_id(self._next_producer_id - 1)

    def next_producer_id(self) -> int:
        """The same, writing the file where it is needed."""
        while (producer_id := self.producer_id_nowait()) is None:
            self._reserve_producer_ids()
        return producer_id

    def _reserve_producer_ids(self) -> None:
        stored = self._stored_producer_id()
        start = stored if stored is not None else self._first_producer_id()
        _write(self._ids_file, next_id_text(start + PRODUCER_ID_BLOCK))
        with self._producer_ids:
            self._next_producer_id, self._producer_id_limit = start, start + PRODUCER_ID_BLOCK

    def _stored_producer_id(self) -> int | None:
        """The first id that no run has taken yet; None without a file; CorruptLogError."""
        return read_next_id(self._ids_file)

    def _first_producer_id(self) -> int:
        """0 for a new log.  One that was copied from elsewhere may hold ids that this broker does
        not know: it starts far above them."""
        empty = all(x.log_end_offset == 0 for x in self._logs.partitions.values())
        return 0 if empty else self._environment.time_ms() // 1000 << 20
