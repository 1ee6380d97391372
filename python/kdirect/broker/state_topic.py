"""A table that lives in a topic: what is in memory can be read back from the log, partition by
partition.

Law of the room: a `StateTopic` knows records with a key and a value, and not what they mean: that
is its `Table`'s.  It owns the topic (created when it is first needed), the order of changes, which
partitions are loaded, and the rewriting.

The log is not compacted in the background.  Instead the live rows of a partition are written again
and everything before them is deleted, when it is loaded and whenever it has grown to several times
what is live.  The new records are on disk before the old ones go, so a crash in between finds both,
and the later ones win.

    absent ---- load ----> loaded ---- unload ----> absent

Only the broker that coordinates a partition has it loaded: `load` reads one partition into the
table, `unload` takes its rows out again.  What is absent is neither changed nor rewritten: the rows
in memory would not be those in the log.

Called on the event loop.  What changes the table goes into the log first and into memory then, in
one order: an append that waits for room (`kdirect.broker.appends`) holds back what is to be
remembered with it, and so a later change can neither be overtaken nor read too early.  Creating the
topic and rewriting a partition are done on threads; what comes meanwhile waits.  `load` is file
work, too: before the broker serves, or on a thread while nobody uses that partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

from kdirect.broker.appends import Appends, PendingAppend, resolve
from kdirect.broker.topics import Registry, Topic
from kdirect.errors import ClosedError, CorruptLogError, FormatError, KdirectError, LogError
from kdirect.format.batch import encode_single_bytes
from kdirect.format.protocol import error_kind
from kdirect.log.clock import now_ms
from kdirect.log.partition import Partition

log = logging.getLogger("kdirect.broker.state")

REWRITE_RECORDS = 10_000  # a partition with fewer superseded records is left alone
REWRITE_FACTOR = 4
APPEND_BYTES = 256 << 10  # of one append; all of it or nothing is kept
READ_BYTES = 1 << 20
_FOR_EVER = {"retention.ms": "-1", "retention.bytes": "-1"}

Row: TypeAlias = tuple[bytes, bytes | None]  # key, value; without a value: deleted
Done: TypeAlias = Callable[[BaseException | None], None]


class Table(Protocol):
    """What the records mean."""

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Take one record that was read back.  FormatError."""

    def live_rows(self, index: int) -> list[Row]:
        """The rows of one partition that count."""

    def live_count(self) -> int:
        """How many rows count, in all partitions."""

    def forget_partition(self, index: int) -> None:
        """Take the rows of one partition out of memory."""


class StateTopic:
    """See the module.  `partitions` and `configs` are those of a topic that has to be created;
    `admin(work)` runs what changes topics; `what` names the rows in error messages."""

    def __init__(
        self,
        name: str,
        table: Table,
        *,
        what: str,
        partitions: int,
        configs: Mapping[str, str],
        topics: Registry,
        appends: Appends,
        admin: Callable[..., Coroutine[Any, Any, Any]],
    ) -> None:
        self.name = name
        self._table = table
        self._what = what
        self._partitions = partitions
        self._configs = {**configs, **_FOR_EVER}
        self._topics = topics
        self._appends = appends
        self._admin = admin
        self._ready = False  # the topic is there
        self._is_new = True  # there was no topic when the broker started
        self._waiting: list[Done] = []  # for it
        self._loaded: set[int] = set()

    # -- the topic ---------------------------------------------------------------------------------

    def create(self) -> Topic:
        """The topic, created when it is first asked for.  File work: on the admin thread, or before
        the broker serves."""
        found = self._topics.get(self.name)
        if found is None:
            found = self._topics.create(self.name, self._partitions, self._configs)
        if self._is_new:
            self._is_new = False
            self._loaded.update(range(found.partition_count))  # with nothing
        return found

    def when_ready(self, work: Done) -> None:
        """Call `work` once the topic is there, or with what is in the way; at once if nothing is to
        be waited for."""
        if self._ready:
            work(None)
            return
        self._waiting.append(work)
        if len(self._waiting) == 1:
            task = asyncio.ensure_future(self._admin(self.create))
            task.add_done_callback(self._created)

    def _created(self, task: asyncio.Future[Any]) -> None:
        error = (
            ClosedError("the broker is stopping", hint="try again")
            if task.cancelled()
            else task.exception()
        )
        self._ready = error is None
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work(error)

    def partition(self, index: int) -> Partition:
        return self._topics.partition(self.name, index)

    @property
    def partition_count(self) -> int:
        """0 while there is no topic."""
        topic = self._topics.get(self.name)
        return 0 if topic is None else topic.partition_count

    # -- loading -----------------------------------------------------------------------------------

    def open(self) -> bool:
        """Is there a topic?  Then its partitions may be loaded.  File work."""
        topic = self._topics.get(self.name)
        if topic is None:
            return False
        self._ready = True
        self._is_new = False
        if not _FOR_EVER.items() <= topic.configs.items():
            # Copied from Kafka, whose cleaner keeps what is live; here retention would not.
            self._topics.configure(topic, {**topic.configs, **_FOR_EVER})
        return True

    def load(self, index: int) -> None:
        """Read a partition into the table, once.  File work.  CorruptLogError names a record that
        cannot be read; then the table holds nothing of the partition."""
        if index in self._loaded:
            return
        partition = self.partition(index)
        try:
            self._read_back(partition)
        except BaseException:
            self._table.forget_partition(index)
            raise
        self._loaded.add(index)
        if self._rewrite_worth_it(partition):
            self._rewrite(partition, self._table.live_rows(index))

    def unload(self, index: int) -> None:
        """Take a partition out of the table: another broker coordinates it from now on.  A change
        that is under way fails, and is not remembered."""
        self._loaded.discard(index)
        self._table.forget_partition(index)

    def _read_back(self, partition: Partition) -> None:
        offset = partition.log_start_offset
        while offset < partition.high_watermark:
            before = offset
            for rows, after in self._records(partition, before):
                self._apply(partition, rows)
                offset = after
            if offset == before:
                break  # Kafka's cleaner has left nothing more

    def _records(self, partition: Partition, offset: int) -> Iterator[tuple[list[Any], int]]:
        """(records, offset after them) of the next buffers."""
        # Not before it is needed: it brings Arrow.
        from kdirect.format.codec import decode_records

        tp = partition.topic_partition
        try:
            for data in partition.read(offset, READ_BYTES):
                rows, _, offset = decode_records(data, tp.topic, tp.partition, offset)
                yield rows, offset
        except (FormatError, CorruptLogError) as e:
            raise self._unreadable(partition, offset, e.message) from e

    def _apply(self, partition: Partition, rows: Iterable[Any]) -> None:
        for row in rows:
            try:
                self._table.apply(row.key, row.value)
            except FormatError as e:
                raise self._unreadable(partition, row.offset, str(e)) from e

    def _unreadable(self, partition: Partition, offset: int, why: str) -> CorruptLogError:
        return CorruptLogError(
            f"record {offset} of {partition.topic_partition} cannot be read: {why}",
            hint=f"{self._what} are in {partition.directory}; restore it, or move it away",
        )

    # -- changing ----------------------------------------------------------------------------------

    def change(
        self, index_of: Callable[[int], int], rows: list[Row], remember: Callable[[], None]
    ) -> asyncio.Future[Partition | None]:
        """Append `rows` to the partition that `index_of(partition count)` names, then `remember`
        them.  The future of that partition is done already unless file work comes first; its result
        is None when there is nothing to append.  LogError when it could not be appended, or
        the partition is absent: then nothing is remembered."""
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
                partition = self.partition(index_of(self.partition_count))
                self._check_loaded(partition)
            except KdirectError as e:
                resolve(future, None, e)
                return
            self._append(partition, rows, partial(appended, partition))

        def appended(partition: Partition, error: BaseException | None) -> None:
            try:
                if error is None:
                    self._check_loaded(partition)  # it may have been unloaded meanwhile
                    remember()
                    self._rewrite_soon(partition)
            except KdirectError as e:
                error = e
            resolve(future, partition, error)

        self.when_ready(ready)
        return future

    def _check_loaded(self, partition: Partition) -> None:
        tp = partition.topic_partition
        if tp.partition not in self._loaded:
            raise LogError(
                f"{self._what} in {tp} are not loaded: another broker coordinates them",
                hint="ask for the coordinator again",
            )

    def _append(self, partition: Partition, rows: list[Row], then: Done) -> None:
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

    # -- rewriting ---------------------------------------------------------------------------------

    def _rewrite_worth_it(self, partition: Partition) -> bool:
        kept = partition.log_end_offset - partition.log_start_offset
        if kept < REWRITE_RECORDS:
            return False
        return kept >= REWRITE_RECORDS + REWRITE_FACTOR * self._table.live_count()

    def _rewrite_soon(self, partition: Partition) -> None:
        """Rewrite it on a thread if it is worth it, while nothing is appended: what is live is what
        is in the log."""
        tp = partition.topic_partition
        if not self._rewrite_worth_it(partition) or not self._appends.is_free(tp):
            return
        self._appends.hold(tp)
        rows = self._table.live_rows(tp.partition)

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
