"""Committed offsets and group metadata, kept in ``__consumer_offsets``.

Owns: the table of committed offsets in memory and its records in the log.  The records are Kafka's
own (`kdirect.format.group_records`), in a topic of our log like any other: what makes records
survive a crash makes offsets survive it, and Kafka's tools can read them.

The log is not compacted in the background.  Instead the live entries are written anew and
everything before them is deleted, at the start and whenever a partition has grown to several times
what is live.  The new records are on disk before the old ones go, so a crash in between finds both,
and the later ones win.

Called on the event loop.  What changes the table goes into the log first and into memory then, in
one order: an append that waits for room (`kdirect.broker.appends`) holds back what is to be
remembered with it, and so a later change can neither be overtaken nor read too early.  Creating the
topic and rewriting a partition are done on threads; what comes meanwhile waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kdirect.broker.appends import Appends, PendingAppend, resolve
from kdirect.broker.topics import OFFSETS_TOPIC, Registry, Topic
from kdirect.errors import ClosedError, CorruptLogError, FormatError, KdirectError, LogError
from kdirect.format import group_records as records
from kdirect.format.batch import encode_single_bytes
from kdirect.format.group_records import CommittedOffset, GroupRecord
from kdirect.format.protocol import error_kind
from kdirect.log.partition import Partition, now_ms
from kdirect.model import TopicPartition

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
    """All committed offsets.  `config` maps broker properties to values; `admin(work)` runs what
    changes topics."""

    def __init__(
        self,
        topics: Registry,
        config: Mapping[str, int],
        appends: Appends,
        admin: Callable[..., Coroutine[Any, Any, Any]],
    ) -> None:
        self._topics = topics
        self._config = config
        self._appends = appends
        self._admin = admin
        self._ready = False  # the topic is there
        self._waiting: list[Callable[[BaseException | None], None]] = []  # for it
        self._offsets: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        self._groups: dict[str, GroupRecord] = {}

    # -- the topic ---------------------------------------------------------------------------------

    def create_topic(self) -> Topic:
        """``__consumer_offsets``, created when it is first asked for.  File work: on the admin
        thread, or before the broker serves."""
        found = self._topics.get(OFFSETS_TOPIC)
        if found is None:
            found = self._topics.create(
                OFFSETS_TOPIC, self._config["offsets.topic.num.partitions"],
                {"segment.bytes": str(self._config["offsets.topic.segment.bytes"]), **_FOR_EVER},
            )  # fmt: skip
        return found

    def _when_ready(self, work: Callable[[BaseException | None], None]) -> None:
        """Call `work` once the topic is there, or with what is in the way; at once if nothing is to
        be waited for."""
        if self._ready:
            work(None)
            return
        self._waiting.append(work)
        if len(self._waiting) == 1:
            task = asyncio.ensure_future(self._admin(self.create_topic))
            task.add_done_callback(self._created)

    def _created(self, task: asyncio.Future[Any]) -> None:
        error = (
            ClosedError("the broker is stopping", hint="commit again")
            if task.cancelled()
            else task.exception()
        )
        self._ready = error is None
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work(error)

    def _partition(self, index: int) -> Partition:
        return self._topics.partition(OFFSETS_TOPIC, index)

    def partition_of(self, group: str) -> Partition:
        """The partition that keeps a group."""
        return self._partition(records.partition_of(group, self._count()))

    def _count(self) -> int:
        topic = self._topics.get(OFFSETS_TOPIC)
        assert topic is not None
        return topic.partition_count

    # -- start -------------------------------------------------------------------------------------

    def load(self) -> list[LoadedGroup]:
        """Read everything back; the groups that had metadata.  CorruptLogError names a record that
        cannot be read."""
        topic = self._topics.get(OFFSETS_TOPIC)
        if topic is None:
            return []
        self._ready = True
        if (
            not _FOR_EVER.items() <= topic.configs.items()
        ):  # copied from Kafka, whose cleaner keeps what is live; here retention would not
            self._topics.configure(topic, {**topic.configs, **_FOR_EVER})
        for index in range(topic.partition_count):
            self._load_partition(self._partition(index))
        for index in range(topic.partition_count):
            if self._rewrite_worth_it(index):
                self._rewrite(self._partition(index), self._live_rows(index))
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
            raise CorruptLogError(
                f"record {offset} of {tp} cannot be read: {e.message}", hint=_restore(partition)
            ) from e

    def _take(self, partition: Partition, rows: Iterable[Any]) -> None:
        for row in rows:
            try:
                self._apply(row.key, row.value)
            except FormatError as e:
                raise CorruptLogError(
                    f"record {row.offset} of {partition.topic_partition} cannot be read: {e}",
                    hint=_restore(partition),
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

    # -- looking -----------------------------------------------------------------------------------

    def offsets(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """What a group has committed."""
        return self._offsets.get(group, {})

    def groups(self) -> set[str]:
        """Groups that have committed offsets."""
        return {name for name, offsets in self._offsets.items() if offsets}

    # -- changing ----------------------------------------------------------------------------------

    def commit(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> asyncio.Future[Partition | None]:
        """Append, then remember.  The partition that was appended to; LogError when it could not
        be."""
        rows: list[Row] = [
            (records.offset_key(group, tp.topic, tp.partition), records.offset_value(c))
            for tp, c in offsets.items()
        ]

        def remember() -> None:
            if offsets:
                self._offsets.setdefault(group, {}).update(offsets)

        return self._change(group, rows, remember)

    def forget(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> asyncio.Future[Partition | None]:
        """Delete offsets."""
        known = self._offsets.get(group, {})
        gone = [tp for tp in partitions if tp in known]
        return self._change(
            group,
            [(records.offset_key(group, tp.topic, tp.partition), None) for tp in gone],
            partial(self._drop, group, gone),
        )

    def _drop(self, group: str, gone: Iterable[TopicPartition]) -> None:
        offsets = self._offsets.get(group, {})
        for tp in gone:
            offsets.pop(tp, None)
        if not offsets:
            self._offsets.pop(group, None)

    async def forget_topic(self, topic: str) -> None:
        """The topic was deleted: so are the offsets in it."""
        await self._forget_where(lambda name: name == topic)

    async def forget_missing_topics(self) -> None:
        """Finish what a crash in the middle of a deletion left: a topic of that name that is
        created again begins without offsets."""
        await self._forget_where(lambda name: self._topics.find(name) is None)

    async def _forget_where(self, gone: Callable[[str], bool]) -> None:
        doomed = {
            group: [tp for tp in offsets if gone(tp.topic)]
            for group, offsets in self._offsets.items()
        }
        for group, partitions in doomed.items():
            try:
                await self.forget(group, partitions)
            except (
                KdirectError
            ) as e:  # the topic is gone all the same, and the next start tries again
                log.error("offsets of group %s in deleted topics stay on disk: %s", group, e)
                self._drop(group, partitions)

    def save_group(self, group: str, record: GroupRecord) -> asyncio.Future[Partition | None]:
        """Append, then remember."""

        def remember() -> None:
            self._groups[group] = record

        return self._change(
            group, [(records.group_key(group), records.group_value(record))], remember
        )

    def forget_group(self, group: str) -> asyncio.Future[Partition | None]:
        """Delete a group with all its offsets."""
        rows: list[Row] = [
            (records.offset_key(group, tp.topic, tp.partition), None)
            for tp in self._offsets.get(group, {})
        ]
        if group in self._groups:
            rows.append((records.group_key(group), None))

        def drop() -> None:
            self._offsets.pop(group, None)
            self._groups.pop(group, None)

        return self._change(group, rows, drop)

    async def expire(self, group: str, before_ms: int) -> int:
        """Forget offsets committed before a time; how many."""
        old = [tp for tp, c in self._offsets.get(group, {}).items() if c.timestamp_ms < before_ms]
        await self.forget(group, old)
        return len(old)

    def _change(
        self, group: str, rows: list[Row], remember: Callable[[], None]
    ) -> asyncio.Future[Partition | None]:
        """Append `rows` and then `remember` them.  The future is done already unless file work
        comes first; None when there is nothing to append."""
        future: asyncio.Future[Partition | None] = asyncio.get_running_loop().create_future()
        if not rows:
            remember()
            future.set_result(None)
            return future

        def ready(error: BaseException | None) -> None:
            if error is not None:
                resolve(future, None, error)
                return
            try:
                partition = self.partition_of(group)
            except KdirectError as e:
                resolve(future, None, e)
                return
            self._append(partition, rows, partial(appended, partition))

        def appended(partition: Partition, error: BaseException | None) -> None:
            if error is None:
                remember()
                self._rewrite_soon(partition)
            resolve(future, partition, error)

        self._when_ready(ready)
        return future

    # -- the log -----------------------------------------------------------------------------------

    def _append(
        self, partition: Partition, rows: list[Row], then: Callable[[BaseException | None], None]
    ) -> None:
        """`then` is called once, in the order of the calls, when all is appended or something could
        not be."""
        now = now_ms()
        pieces = list(_pieces(rows, now))
        failed: list[BaseException] = []

        def one(last: bool, result: Any, error: BaseException | None) -> None:
            error = error or _failure(partition, result)
            if error is not None:
                failed.append(error)
            if last:
                then(failed[0] if failed else None)

        for i, data in enumerate(pieces):
            last = i + 1 == len(pieces)
            try:
                result = self._appends.append_nowait(partition, data, now)
            except Exception as e:
                one(last, None, e)
                continue
            if result is not None:
                one(last, result, None)
            else:
                self._appends.append_later(PendingAppend(partition, data, now, partial(one, last)))

    def _live_rows(self, index: int) -> list[Row]:
        count = self._count()
        rows: list[Row] = []
        for group, record in self._groups.items():
            if records.partition_of(group, count) == index:
                rows.append((records.group_key(group), records.group_value(record)))
        for group, offsets in self._offsets.items():
            if records.partition_of(group, count) == index:
                rows += [
                    (records.offset_key(group, tp.topic, tp.partition), records.offset_value(c))
                    for tp, c in offsets.items()
                ]
        return rows

    def _rewrite_worth_it(self, index: int) -> bool:
        partition = self._partition(index)
        kept = partition.log_end_offset - partition.log_start_offset
        if kept < REWRITE_RECORDS:
            return False
        live = len(self._groups) + sum(len(offsets) for offsets in self._offsets.values())
        return kept >= REWRITE_RECORDS + REWRITE_FACTOR * live

    def _rewrite_soon(self, partition: Partition) -> None:
        """Rewrite it on a thread if it is worth it, while nothing is appended: what is live is what
        is in the log."""
        tp = partition.topic_partition
        if not self._rewrite_worth_it(tp.partition) or not self._appends.is_free(tp):
            return
        self._appends.hold(tp)
        rows = self._live_rows(tp.partition)

        def done(result: None, error: BaseException | None) -> None:
            if error is not None:
                log.error("%s could not be rewritten", tp, exc_info=error)
            self._appends.release(tp)

        self._appends.on_thread(partition, partial(self._rewrite, partition, rows), done)

    def _rewrite(self, partition: Partition, rows: list[Row]) -> None:
        """File work.  The new records are on disk before the old ones go."""
        before = partition.log_end_offset - partition.log_start_offset
        try:
            partition.roll()
            start = partition.log_end_offset
            now = now_ms()
            for data in _pieces(rows, now):
                error = _failure(partition, partition.append(data, now))
                if error is not None:
                    raise error
            partition.flush()
            partition.delete_records(start)
        except KdirectError as e:
            log.warning(
                "%s could not be rewritten, it stays as long as it is: %s",
                partition.topic_partition,
                e,
            )
            return
        log.info("rewrote %s: %d records became %d", partition.topic_partition, before, len(rows))


def _pieces(rows: list[Row], now_ms: int) -> Iterator[bytes]:
    """Batches of one record each, as many together as one append takes."""
    batches: list[bytes] = []
    size = 0
    for key, value in rows:
        batch = encode_single_bytes(value, key, now_ms)
        if batches and size + len(batch) > APPEND_BYTES:
            yield b"".join(batches)
            batches, size = [], 0
        batches.append(batch)
        size += len(batch)
    if batches:
        yield b"".join(batches)


def _failure(partition: Partition, result: Any) -> LogError | None:
    if result is None or not result.error:
        return None
    what = f"append to {partition.topic_partition} failed: {error_kind(result.error).name}"
    return LogError(what, hint="is max.message.bytes very small?")


def _restore(partition: Partition) -> str:
    return (
        f"the offsets of consumer groups are in {partition.directory}; restore it, or move it away"
    )
