"""Committed offsets and group metadata, kept in ``__consumer_offsets``.

Law of the room: owns the table of committed offsets and of groups in memory, and knows what its
records mean.  How a table is kept in a topic is the business of `kdirect.broker.state_topic`: the
log first, memory then.

The records are Kafka's (`kdirect.format.group_records`), in a topic of our log like any other.  So
offsets survive a crash by the same means as records do, and Kafka's tools can read them.

Threads: called on the event loop.  `open` and `load_partition` are file work, and called before the
broker serves; `read_partition` is file work, and touches nothing that others use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends
from kdirect.broker.pending_offsets import PendingOffsets
from kdirect.broker.state_replication import StateReplication
from kdirect.broker.state_topic import COMPACTED, DirectAppends, Row, StateTopic
from kdirect.broker.topics import OFFSETS_TOPIC, Registry, Topic
from kdirect.errors import KdirectError
from kdirect.format import consumer_group_records as consumer_records
from kdirect.format import group_records as records
from kdirect.format import layout
from kdirect.format.consumer_group_records import Key
from kdirect.format.group_records import CommittedOffset, GroupRecord
from kdirect.log.kernel_producers import known_producers
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.groups")


@dataclass(slots=True)
class LoadedGroup:
    """A group as it was last written to the log."""

    group_id: str
    record: GroupRecord | None
    # Of a group of KIP-848: its records, by what they are.
    rows: Mapping[Key, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class GroupTable:
    """What records of ``__consumer_offsets`` say, of one partition or of several.  `unstable`: what
    transactions have committed that have no end yet."""

    offsets: dict[str, dict[TopicPartition, CommittedOffset]] = field(default_factory=dict)
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    rows: dict[str, dict[Key, bytes]] = field(default_factory=dict)  # of groups of KIP-848
    unstable: PendingOffsets = field(default_factory=PendingOffsets)

    def pending(self, producer_id: int, key: bytes | None, value: bytes | None) -> None:
        """Take one record of a transaction.  FormatError."""
        what = None if key is None else records.parse_key(key)
        if isinstance(what, tuple) and value is not None:
            group, topic, index = what
            committed = records.parse_offset_value(value)
            self.unstable.add(producer_id, group, {TopicPartition(topic, index): committed})

    def ended(
        self, producer_id: int, commit: bool, is_here: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Take the marker of a producer, for the groups of which `is_here` says so."""
        for group, offsets in self.unstable.end(producer_id, commit, is_here).items():
            if offsets:
                self.offsets.setdefault(group, {}).update(offsets)

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Take one record.  FormatError."""
        if key is None:
            return
        what = records.parse_key(key)
        if isinstance(what, tuple):
            group, topic, index = what
            tp = TopicPartition(topic, index)
            self.unstable.superseded(group, (tp,))
            if value is None:
                self.offsets.get(group, {}).pop(tp, None)
            else:
                self.offsets.setdefault(group, {})[tp] = records.parse_offset_value(value)
        elif what is not None:
            if value is None:
                self.groups.pop(what, None)
            else:
                self.groups[what] = records.parse_group_value(value)
        elif (row := consumer_records.parse_key(key)) is not None:
            if value is not None:
                self.rows.setdefault(row.group, {})[row] = value
            elif (known := self.rows.get(row.group)) is not None:
                known.pop(row, None)
                if not known:
                    del self.rows[row.group]


class OffsetStore:
    """The offsets and groups that this broker coordinates.  `config` maps broker properties to
    values; `admin(work)` runs work that changes topics, on the thread for it.

    What changes the table returns a future, which `StateTopic.change` describes."""

    def __init__(
        self,
        topics: Registry,
        config: Mapping[str, int],
        appends: Appends,
        admin: Callable[..., Coroutine[Any, Any, Any]],
    ) -> None:
        self._topics = topics
        self._state = StateTopic(
            OFFSETS_TOPIC,
            self,
            what="the offsets of consumer groups",
            partitions=config["offsets.topic.num.partitions"],
            configs={
                **COMPACTED,
                "compression.type": "producer",
                "segment.bytes": str(config["offsets.topic.segment.bytes"]),
            },
            topics=topics,
            appends=appends,
            admin=admin,
        )
        self._table = GroupTable()
        self._groups = self._table.groups
        self._rows = self._table.rows
        self._unstable = self._table.unstable
        # (partition, producer id) -> epoch, next sequence
        self._sequences: dict[tuple[int, int], tuple[int, int]] = {}
        self._count = 0  # of partitions, when they were last counted

    def join_cluster(self, replication: StateReplication) -> None:
        """From now on changes are committed by replicas.  Before anything is loaded."""
        self._state.replication = replication

    def use_slots(self, slots: DirectAppends) -> None:
        """Members of groups commit in this broker's memory, too: what is there is folded into the
        table before anybody looks at it."""
        self._state.direct = slots

    @property
    def _offsets(self) -> dict[str, dict[TopicPartition, CommittedOffset]]:
        if self._state.direct is not None:
            self._state.direct.fold()
        return self._table.offsets

    @property
    def topic_configs(self) -> Mapping[str, str]:
        """Properties of the topic, for whoever creates it."""
        return self._state.configs

    def create_topic(self) -> Topic:
        """``__consumer_offsets``, created when it is first asked for.  File work."""
        return self._state.create()

    def partition_of(self, group: str) -> Partition:
        """The partition that keeps a group."""
        return self._state.partition(records.partition_of(group, self._state.partition_count))

    # -- loading -----------------------------------------------------------------------------------

    def open(self) -> int:
        """How many partitions there are to be loaded; 0: there is no topic.  File work."""
        return self._state.partition_count if self._state.open() else 0

    def load_partition(self, index: int) -> list[LoadedGroup]:
        """Read one partition back; its groups that had metadata.  CorruptLogError names a record
        that cannot be read."""
        self._state.load(index, self._table.pending)
        return self._loaded_groups(index)

    def read_partition(self, partition: Partition, is_wanted: Callable[[], bool]) -> GroupTable:
        """What the records of one partition say, for `install`.  It stops early once nobody wants
        it.  CorruptLogError as `load_partition`."""
        table = GroupTable()
        self._state.read(partition, table.apply, is_wanted, pending=table.pending)
        return table

    def install(self, partition: Partition, table: GroupTable) -> list[LoadedGroup]:
        """This broker is the coordinator of the groups of one partition: take what was read of it;
        its groups that had metadata."""
        self._offsets.update(table.offsets)
        self._groups.update(table.groups)
        self._rows.update(table.rows)
        self._unstable.take(table.unstable)
        self._state.install(partition)
        return self._loaded_groups(partition.topic_partition.partition)

    def _loaded_groups(self, index: int) -> list[LoadedGroup]:
        return [
            LoadedGroup(name, self._groups.get(name), dict(self._rows.get(name, {})))
            for name in {**self._groups, **self._rows}
            if self.index_of(name) == index
        ]

    def unload_partition(self, index: int) -> None:
        """Forget, in memory, the groups that one partition keeps.  A broker calls it when another
        one becomes their coordinator; from then on their offsets cannot be changed here."""
        self._state.unload(index)

    @property
    def partition_count(self) -> int:
        """0 while there is no topic."""
        return self._state.partition_count

    def index_of(self, group: str) -> int:
        """The partition that keeps a group.  There is a topic, or was one when this was last
        asked."""
        self._count = self._state.partition_count or self._count
        return records.partition_of(group, self._count)

    def _is_in(self, index: int) -> Callable[[str], bool]:
        return lambda group: self.index_of(group) == index

    # -- the table ---------------------------------------------------------------------------------

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """See `kdirect.broker.state_topic.Table`."""
        self._table.apply(key, value)

    def forget_partition(self, index: int) -> None:
        """See `kdirect.broker.state_topic.Table`."""
        self._unstable.forget(self._is_in(index))
        for key in [key for key in self._sequences if key[0] == index]:
            del self._sequences[key]
        for table in (self._groups, self._offsets, self._rows):
            for group in [name for name in table if self.index_of(name) == index]:
                del table[group]  # type: ignore[attr-defined]

    # -- looking -----------------------------------------------------------------------------------

    def unstable(self, group: str) -> set[TopicPartition]:
        """The partitions of which a transaction without an end has committed an offset."""
        return self._unstable.of_group(group)

    def offsets(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """What a group has committed."""
        return self._offsets.get(group, {})

    def has_offsets(self, group: str) -> bool:
        """Has a group committed offsets, or has a transaction without an end done so?"""
        return bool(self.offsets(group)) or bool(self.unstable(group))

    def groups(self) -> set[str]:
        """Groups that have committed offsets."""
        return {name for name, offsets in self._offsets.items() if offsets}

    # -- changing ----------------------------------------------------------------------------------

    def remember(self, group: str, tp: TopicPartition, committed: CommittedOffset) -> None:
        """This is in the log already."""
        self._unstable.superseded(group, (tp,))
        self._table.offsets.setdefault(group, {})[tp] = committed

    def commit(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> asyncio.Future[Partition | None]:
        """Set offsets of a group."""
        rows: list[Row] = [
            (records.offset_key(group, tp.topic, tp.partition), records.offset_value(c))
            for tp, c in offsets.items()
        ]

        def remember() -> None:
            if offsets:
                self._unstable.superseded(group, offsets)
                self._offsets.setdefault(group, {}).update(offsets)

        return self._change(group, rows, remember)

    def commit_in_transaction(
        self,
        group: str,
        producer: tuple[int, int],
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> asyncio.Future[Partition | None]:
        """Set offsets of a group if the transaction of `producer` (id, epoch) is committed; the log
        has admitted it."""
        producer_id, epoch = producer
        rows: list[Row] = [
            (records.offset_key(group, tp.topic, tp.partition), records.offset_value(c))
            for tp, c in offsets.items()
        ]

        def encode(rows: list[Row], now_ms: int) -> list[bytes]:
            # Not before it is needed: it brings Arrow.
            from kdirect.format.record_list import encode_records

            sequence = self._take_sequences(self.partition_of(group), producer, len(rows))
            return [
                encode_records(
                    [(key, value, None, now_ms) for key, value in rows],
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    base_sequence=sequence,
                    attributes=layout.ATTRIBUTE_TRANSACTIONAL,
                )
            ]

        def remember() -> None:
            self._unstable.add(producer_id, group, offsets)

        def look(done: asyncio.Future[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                # It may be in the log, or not: the log knows what comes next.
                self._sequences.pop((self.index_of(group), producer_id), None)

        index = partial(records.partition_of, group)
        changed = self._state.change(index, rows, remember, encode)
        changed.add_done_callback(look)
        return changed

    def next_sequence(self, partition: Partition, producer: tuple[int, int]) -> int:
        """The sequence of the next record of a producer in a partition of the topic."""
        producer_id, epoch = producer
        key = (partition.topic_partition.partition, producer_id)
        if key not in self._sequences:
            entries, _ = known_producers(partition.kernel)
            found = next((e for e in entries if e.producer_id == producer_id), None)
            last = found.batches[-1][1] if found is not None and found.batches else -1
            self._sequences[key] = (-1 if found is None else found.producer_epoch, last + 1)
        known, sequence = self._sequences[key]
        return sequence if known == epoch else 0

    def _take_sequences(self, partition: Partition, producer: tuple[int, int], count: int) -> int:
        first = self.next_sequence(partition, producer)
        key = (partition.topic_partition.partition, producer[0])
        self._sequences[key] = (producer[1], first + count)
        return first

    def end_transaction(self, index: int, producer_id: int, commit: bool) -> None:
        """The marker of a producer is committed in one partition of the topic."""
        if self._state.direct is not None:
            self._state.direct.fold()  # what was committed before is in the table before
        self._table.ended(producer_id, commit, self._is_in(index))
        self._sequences.pop((index, producer_id), None)

    def forget(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> asyncio.Future[Partition | None]:
        """Delete the offsets of a group in these partitions, also those that transactions without
        an end have committed."""
        known = self._offsets.get(group, {}).keys() | self.unstable(group)
        gone = [tp for tp in partitions if tp in known]
        return self._change(
            group,
            [(records.offset_key(group, tp.topic, tp.partition), None) for tp in gone],
            partial(self._drop, group, gone),
        )

    def _drop(self, group: str, gone: Iterable[TopicPartition]) -> None:
        offsets = self._offsets.get(group, {})
        self._unstable.superseded(group, gone)
        for tp in gone:
            offsets.pop(tp, None)
        if not offsets:
            self._offsets.pop(group, None)

    async def forget_topic(self, topic: str) -> None:
        """A topic was deleted: delete the offsets of all groups in it."""
        if self._state.direct is not None:
            self._state.direct.forget_topic(topic)
        await self._forget_where(lambda name: name == topic)

    async def forget_missing_topics(self) -> None:
        """Delete offsets in topics that do not exist: a crash may have come between the deletion of
        a topic and that of its offsets, and a new topic of that name begins without them."""
        await self._forget_where(lambda name: self._topics.find(name) is None)

    async def _forget_where(self, gone: Callable[[str], bool]) -> None:
        found: dict[str, Set[TopicPartition]] = {
            name: offsets.keys() for name, offsets in self._offsets.items()
        }
        for name in self._unstable.groups():
            found[name] = found.get(name, set()) | self.unstable(name)
        doomed = {
            group: [tp for tp in partitions if gone(tp.topic)]
            for group, partitions in found.items()
        }
        for group, partitions in doomed.items():
            try:
                await self.forget(group, partitions)
            except KdirectError as e:
                # The topic is gone all the same, and the next start tries again.
                log.error("offsets of group %s in deleted topics stay on disk: %s", group, e)
                self._drop(group, partitions)

    def save_group(self, group: str, record: GroupRecord) -> asyncio.Future[Partition | None]:
        """Set the metadata of a group."""

        def remember() -> None:
            self._groups[group] = record

        return self._change(
            group, [(records.group_key(group), records.group_value(record))], remember
        )

    def save_rows(
        self, group: str, rows: Mapping[bytes, bytes | None]
    ) -> asyncio.Future[Partition | None]:
        """Set and delete records of a group, as they are."""

        def remember() -> None:
            for key, value in rows.items():
                self._table.apply(key, value)

        return self._change(group, list(rows.items()), remember)

    def forget_group(self, group: str) -> asyncio.Future[Partition | None]:
        """Delete a group with all its offsets, those of transactions without an end too."""
        gone = self._offsets.get(group, {}).keys() | self.unstable(group)
        rows: list[Row] = [(records.offset_key(group, tp.topic, tp.partition), None) for tp in gone]
        if group in self._groups:
            rows.append((records.group_key(group), None))
        rows += [(consumer_records.key(*row), None) for row in self._rows.get(group, ())]

        def drop() -> None:
            self._unstable.superseded(group, gone)
            self._rows.pop(group, None)
            self._offsets.pop(group, None)
            self._groups.pop(group, None)

        return self._change(group, rows, drop)

    async def expire(self, group: str, before_ms: int) -> int:
        """Delete the offsets of a group that were committed before a time, in milliseconds since
        the epoch; how many.  Not where a transaction is about to commit the next one: a group that
        commits in long transactions would lose its place."""
        unstable = self.unstable(group)
        old = [
            tp
            for tp, c in self._offsets.get(group, {}).items()
            if c.timestamp_ms < before_ms and tp not in unstable
        ]
        await self.forget(group, old)
        return len(old)

    def _change(
        self, group: str, rows: list[Row], remember: Callable[[], None]
    ) -> asyncio.Future[Partition | None]:
        """Append `rows` of a group and then `remember` them; see `StateTopic.change`."""
        return self._state.change(partial(records.partition_of, group), rows, remember)
