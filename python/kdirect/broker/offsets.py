"""Committed offsets and group metadata, kept in ``__consumer_offsets``.

Owns: the table of committed offsets in memory and its records in the log.  The records are Kafka's own
(`kdirect.format.group_records`), in a topic of our log like any other: what makes records survive a crash makes
offsets survive it, and Kafka's tools can read them.

The log is not compacted in the background.  Instead the live entries are written anew and everything before
them is deleted, at the start and whenever a partition has grown to several times what is live.  The new
records are on disk before the old ones go, so a crash in between finds both, and the later ones win.

Called on the event loop only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdirect.broker.topics import OFFSETS_TOPIC, Registry, Topic
from kdirect.errors import CorruptLogError, FormatError, KdirectError, LogError
from kdirect.format import group_records as records
from kdirect.format.batch import encode_single_bytes
from kdirect.format.group_records import CommittedOffset, GroupRecord
from kdirect.format.protocol import error_kind
from kdirect.model import TopicPartition

if TYPE_CHECKING:
    from kdirect.log.partition import Partition

log = logging.getLogger("kdirect.broker.groups")

REWRITE_RECORDS = 10_000  # a partition with fewer superseded records is left alone
REWRITE_FACTOR = 4
APPEND_BYTES = 256 << 10  # of one append; all of it or nothing is kept
READ_BYTES = 1 << 20
_FOR_EVER = {"retention.ms": "-1", "retention.bytes": "-1"}

Row = tuple[bytes, bytes | None]


@dataclass(slots=True)
class LoadedGroup:
    """A group as the log remembers it."""

    group_id: str
    record: GroupRecord


class OffsetStore:
    """All committed offsets.  `config` maps broker properties to values."""

    def __init__(self, topics: Registry, config: Mapping[str, int]) -> None:
        self._topics = topics
        self._config = config
        self._offsets: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        self._groups: dict[str, GroupRecord] = {}

    # -- the topic ---------------------------------------------------------------------------------------

    def topic(self) -> Topic:
        """``__consumer_offsets``, created when it is first asked for."""
        found = self._topics.get(OFFSETS_TOPIC)
        if found is None:
            found = self._topics.create(
                OFFSETS_TOPIC, self._config["offsets.topic.num.partitions"],
                {"segment.bytes": str(self._config["offsets.topic.segment.bytes"]), **_FOR_EVER},
            )  # fmt: skip
        return found

    def _partition(self, index: int) -> Partition:
        return self._topics.partition(OFFSETS_TOPIC, index)

    def partition_of(self, group: str) -> Partition:
        """The partition that keeps a group."""
        return self._partition(records.partition_of(group, self.topic().partition_count))

    # -- start -------------------------------------------------------------------------------------------

    def load(self) -> list[LoadedGroup]:
        """Read everything back; the groups that had metadata.  CorruptLogError names a record that cannot be read."""
        topic = self._topics.get(OFFSETS_TOPIC)
        if topic is None:
            return []
        if not _FOR_EVER.items() <= topic.configs.items():  # copied from Kafka, whose cleaner keeps what is live; here retention would not
            self._topics.configure(topic, {**topic.configs, **_FOR_EVER})
        for index in range(topic.partition_count):
            self._load_partition(self._partition(index))
        for index in range(topic.partition_count):
            self._rewrite_if_worth_it(index)
        return [LoadedGroup(name, record) for name, record in self._groups.items()]

    def _load_partition(self, partition: Partition) -> None:
        offset = partition.log_start_offset
        while offset < partition.high_watermark:
            before = offset
            for rows, after in self._read(partition, before):
                self._take(partition, rows)
                offset = after
            if offset == before:
                break  # Kafka's cleaner has left nothing more

    def _read(self, partition: Partition, offset: int) -> Iterator[tuple[list[Any], int]]:
        """(records, offset after them) of the next buffers."""
        from kdirect.format.codec import decode_records

        tp = partition.topic_partition
        try:
            for data in partition.read(offset, READ_BYTES):
                rows, _, offset = decode_records(data, tp.topic, tp.partition, offset)
                yield rows, offset
        except (FormatError, CorruptLogError) as e:
            raise CorruptLogError(f"record {offset} of {tp} cannot be read: {e.message}", hint=_restore(partition)) from e

    def _take(self, partition: Partition, rows: Iterable[Any]) -> None:
        for row in rows:
            try:
                self._apply(row.key, row.value)
            except FormatError as e:
                raise CorruptLogError(
                    f"record {row.offset} of {partition.topic_partition} cannot be read: {e}", hint=_restore(partition)
                ) from e

    def _apply(self, key: bytes | None, value: bytes | None) -> None:
        if key is None:
            return
        what = records.parse_key(key)
        if isinstance(what, tuple):
            group, topic, index = what
            tp = TopicPartition(topic, index)
            if value is None:
                self._offsets.get(group, {}).pop(tp, None)
            else:
                self._offsets.setdefault(group, {})[tp] = records.parse_offset_value(value)
        elif what is not None:
            if value is None:
                self._groups.pop(what, None)
            else:
                self._groups[what] = records.parse_group_value(value)

    # -- looking -----------------------------------------------------------------------------------------

    def offsets(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """What a group has committed."""
        return self._offsets.get(group, {})

    def groups(self) -> set[str]:
        """Groups that have committed offsets."""
        return {name for name, offsets in self._offsets.items() if offsets}

    # -- changing ----------------------------------------------------------------------------------------

    def commit(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> Partition | None:
        """Append, then remember.  The partition that was appended to; LogError when it could not be."""
        if not offsets:
            return None
        rows: list[Row] = [(records.offset_key(group, tp.topic, tp.partition), records.offset_value(c)) for tp, c in offsets.items()]
        partition = self._append(group, rows)
        self._offsets.setdefault(group, {}).update(offsets)
        self._rewrite_if_worth_it(partition.topic_partition.partition)
        return partition

    def forget(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Delete offsets."""
        gone = [tp for tp in partitions if tp in self._offsets.get(group, {})]
        if gone:
            self._append(group, [(records.offset_key(group, tp.topic, tp.partition), None) for tp in gone])
            offsets = self._offsets[group]
            for tp in gone:
                del offsets[tp]
            if not offsets:
                del self._offsets[group]

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted: so are the offsets in it."""
        self._forget_where(lambda name: name == topic)

    def forget_missing_topics(self) -> None:
        """Finish what a crash in the middle of a deletion left: a topic of that name that is created again begins without offsets."""
        self._forget_where(lambda name: self._topics.get(name) is None)

    def _forget_where(self, gone: Callable[[str], bool]) -> None:
        for group in list(self._offsets):
            partitions = [tp for tp in self._offsets[group] if gone(tp.topic)]
            try:
                self.forget(group, partitions)
            except KdirectError as e:  # the topic is gone all the same, and the next start tries again
                log.error("offsets of group %s in deleted topics stay on disk: %s", group, e)
                for tp in partitions:
                    self._offsets[group].pop(tp, None)

    def save_group(self, group: str, record: GroupRecord) -> None:
        self._append(group, [(records.group_key(group), records.group_value(record))])
        self._groups[group] = record

    def forget_group(self, group: str) -> None:
        """Delete a group with all its offsets."""
        rows: list[Row] = [(records.offset_key(group, tp.topic, tp.partition), None) for tp in self._offsets.get(group, {})]
        if group in self._groups:
            rows.append((records.group_key(group), None))
        if rows:
            self._append(group, rows)
        self._offsets.pop(group, None)
        self._groups.pop(group, None)

    def expire(self, group: str, before_ms: int) -> int:
        """Forget offsets committed before a time; how many."""
        old = [tp for tp, c in self._offsets.get(group, {}).items() if c.timestamp_ms < before_ms]
        self.forget(group, old)
        return len(old)

    # -- the log -----------------------------------------------------------------------------------------

    def _append(self, group: str, rows: list[Row]) -> Partition:
        partition = self.partition_of(group)
        self._append_rows(partition, rows)
        return partition

    def _append_rows(self, partition: Partition, rows: list[Row]) -> None:
        now_ms = time.time_ns() // 1_000_000
        batches: list[bytes] = []
        size = 0
        for key, value in rows:
            batch = encode_single_bytes(value, key, now_ms)
            if batches and size + len(batch) > APPEND_BYTES:
                self._append_batches(partition, batches, now_ms)
                batches, size = [], 0
            batches.append(batch)
            size += len(batch)
        if batches:
            self._append_batches(partition, batches, now_ms)

    def _append_batches(self, partition: Partition, batches: list[bytes], now_ms: int) -> None:
        result = partition.append(b"".join(batches), now_ms)
        if result.error:
            raise LogError(
                f"append to {partition.topic_partition} failed: {error_kind(result.error).name}", hint="is max.message.bytes very small?"
            )

    def _live_rows(self, index: int, count: int) -> list[Row]:
        rows: list[Row] = []
        for group, record in self._groups.items():
            if records.partition_of(group, count) == index:
                rows.append((records.group_key(group), records.group_value(record)))
        for group, offsets in self._offsets.items():
            if records.partition_of(group, count) == index:
                rows += [(records.offset_key(group, tp.topic, tp.partition), records.offset_value(c)) for tp, c in offsets.items()]
        return rows

    def _rewrite_if_worth_it(self, index: int) -> None:
        partition = self._partition(index)
        kept = partition.log_end_offset - partition.log_start_offset
        if kept < REWRITE_RECORDS:
            return
        live = len(self._groups) + sum(len(offsets) for offsets in self._offsets.values())
        if kept < REWRITE_RECORDS + REWRITE_FACTOR * live:
            return
        rows = self._live_rows(index, self.topic().partition_count)
        try:
            partition.roll()
            start = partition.log_end_offset
            self._append_rows(partition, rows)
            partition.flush()
            partition.delete_records(start)
        except KdirectError as e:
            log.warning("%s could not be rewritten, it stays as long as it is: %s", partition.topic_partition, e)
            return
        log.info("rewrote %s: %d records became %d", partition.topic_partition, kept, len(rows))


def _restore(partition: Partition) -> str:
    return f"the offsets of consumer groups are in {partition.directory}; restore it, or move it away"
