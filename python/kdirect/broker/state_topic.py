"""A table that lives in a topic: what is in memory can be read back from the log, partition by
partition.

Law of the room: a `StateTopic` knows records with a key and a value, and not what they mean: that
is its `Table`'s.  It owns the topic (created when it is first needed), the order of changes, and
which partitions are loaded.

How the log is kept from growing is the business of others.  The log cleaner compacts
``__consumer_offsets`` and ``__transaction_state`` by their ``cleanup.policy``, as any topic
(`kdirect.broker.cleaner`), also while a partition is loaded: a reader goes on in the segments that
it has begun with.

    absent ---- load ----> loaded ---- unload ----> absent

Only the broker that coordinates a partition has it loaded: `load` reads one partition into the
table, `unload` takes its rows out again.  What is absent is not changed: the rows in memory would
not be those in the log.  A broker of a cluster, whose event loop serves meanwhile, loads in two
steps: `read` on a thread, into whatever it is given, then `install` on the loop.

In a cluster a change counts, and is remembered, when it is committed: see
`kdirect.broker.state_replication`.

Called on the event loop.  What changes the table goes into the log first and into memory then, in
one order: an append that waits for room (`kdirect.broker.appends`) holds back what is to be
remembered with it, and so a later change can neither be overtaken nor read too early.  The topic is
created on a thread; what comes meanwhile waits.  `load` is file work, too: before the broker
serves, or on a thread while nobody uses that partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

from kdirect.broker.appends import Appends, PendingAppend, resolve
from kdirect.broker.state_replication import StateReplication
from kdirect.broker.topics import Registry, Topic
from kdirect.errors import ClosedError, CorruptLogError, FormatError, KdirectError, LogError
from kdirect.format.batch import any_transactional, encode_single_bytes, iterate_batches
from kdirect.format.error_codes import error_kind
from kdirect.format.plain_batch import encode_records
from kdirect.format.transaction_records import marker_commits
from kdirect.log.clock import now_ms
from kdirect.log.partition import Partition

log = logging.getLogger("kdirect.broker.state")

APPEND_BYTES = 256 << 10  # of one append; all of it or nothing is kept
READ_BYTES = 1 << 20
# Whatever the broker's own cleanup policy is.
COMPACTED = {"cleanup.policy": "compact"}
# Of a topic whose owner writes again what counts, and deletes the rest.
FOR_EVER = {
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "cleanup.policy": "delete",
    "compression.type": "producer",
}
# What older brokers have created compacted topics with.
_OLD = {**FOR_EVER, "segment.bytes": str(4 << 20)}

Row: TypeAlias = tuple[bytes, bytes | None]  # key, value; without a value: deleted
Done: TypeAlias = Callable[[BaseException | None], None]
# `apply(key, value)`: take one record that was read back.  FormatError.
Apply: TypeAlias = Callable[[bytes | None, bytes | None], None]
# `pending(producer id, key, value)`: the same of a transaction that has no end yet.
Pending: TypeAlias = Callable[[int, bytes | None, bytes | None], None]
# `encode(rows, time in ms)`: the batches of one change, as many together as one append takes.
Encode: TypeAlias = Callable[[list[Row], int], Iterable[bytes]]


class Table(Protocol):
    """What the records mean."""

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Take one record that was read back.  FormatError."""

    def forget_partition(self, index: int) -> None:
        """Take the rows of one partition out of memory."""


class DirectAppends(Protocol):
    """Who else appends rows, on other threads (`kdirect.broker.commit_slots`).  A partition's rows
    in memory are to be what its log says last, so others wait while the loop changes it."""

    def pause(self, index: int) -> None:
        """The loop is about to append to a partition: others do not, and what they have appended
        is in the table when this returns; until `resume`, which is called as often."""

    def resume(self, index: int) -> None:
        """What the loop has appended is in the table."""

    def fold(self) -> None:
        """What others have appended is in the table when this returns."""

    def forget_topic(self, topic: str) -> None:
        """Offsets in a topic that is gone are appended no more."""


class _Found:
    """What the records of a partition come to: of each key the last one that counts, and those of
    transactions that have no end yet.  Which of several counts is told by their offsets, whichever
    transaction ends first."""

    __slots__ = ("latest", "open")

    def __init__(self) -> None:
        self.latest: dict[bytes | None, Any] = {}
        self.open: dict[int, dict[bytes | None, Any]] = {}  # by producer

    def end(self, producer_id: int, *, commit: bool) -> None:
        """A marker."""
        rows = self.open.pop(producer_id, None)
        if rows is not None and commit:
            for key, row in rows.items():
                if self._counts(row):
                    self.latest[key] = row

    def _counts(self, row: Any) -> bool:
        other = self.latest.get(row.key)
        return other is None or other.offset < row.offset

    def undecided(self) -> list[tuple[int, Any]]:
        """The records that may count yet, with their producers."""
        rows = [(producer, row) for producer, of in self.open.items() for row in of.values()]
        rows = [found for found in rows if self._counts(found[1])]
        return sorted(rows, key=lambda found: found[1].offset)


class StateTopic:
    """See the module.  `partitions` and `configs` are those of a topic that has to be created;
    `admin(work)` runs what changes topics; `what` names the rows in error messages.  Where
    `configs` have the topic compacted, the last record of a key says all of it.  `replication` is
    None where the broker is alone."""

    replication: StateReplication | None = None
    direct: DirectAppends | None = None

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
        self.configs = dict(configs)  # of a topic that has to be created
        self._last_counts = COMPACTED.items() <= self.configs.items()
        self._topics = topics
        self._appends = appends
        self._admin = admin
        self._ready = False  # the topic is there
        self._is_new = True  # there was no topic when the broker started
        self._waiting: list[Done] = []  # for it
        self._loaded: dict[int, int] = {}  # partition -> the number of this loading of it
        self._loadings = 0

    # -- the topic ---------------------------------------------------------------------------------

    def create(self) -> Topic:
        """The topic, created when it is first asked for.  File work: on the admin thread, or before
        the broker serves."""
        found = self._topics.get(self.name)
        if found is None:
            found = self._topics.create(self.name, self._partitions, self.configs)
        if self._is_new:
            self._is_new = False
            for index in range(found.partition_count):
                self._remember_loaded(index)  # with nothing
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
        if (due := due_configs(topic.configs, self.configs)) is not None:
            self._topics.configure(topic, due)
        return True

    def load(self, index: int, pending: Pending | None = None) -> None:
        """Read a partition into the table, once.  File work.  CorruptLogError names a record that
        cannot be read; then the table holds nothing of the partition."""
        if index in self._loaded:
            return
        partition = self.partition(index)
        try:
            self.read(partition, self._table.apply, pending=pending)
        except BaseException:
            self._table.forget_partition(index)
            raise
        self._remember_loaded(index)

    def install(self, partition: Partition) -> None:
        """The table has taken what `read` has given of a partition: it may be changed from now on.
        On the event loop."""
        self._remember_loaded(partition.topic_partition.partition)

    def unload(self, index: int) -> None:
        """Take a partition out of the table: another broker coordinates it from now on.  A change
        that is under way fails, and is not remembered."""
        self._loaded.pop(index, None)
        self._table.forget_partition(index)

    def _remember_loaded(self, index: int) -> None:
        self._loadings += 1
        self._loaded[index] = self._loadings

    def read(
        self,
        partition: Partition,
        apply: Apply,
        is_wanted: Callable[[], bool] = lambda: True,
        *,
        pending: Pending | None = None,
    ) -> None:
        """Give the records of a partition that count to `apply`, and those of transactions that
        have no end yet to `pending`, where it is given; stop early once nobody wants them.  Where
        the last record of a key says all of it, those before are not given.  File work.
        CorruptLogError names a record that cannot be read."""
        offset = partition.log_start_offset
        found = _Found()
        while offset < partition.high_watermark and is_wanted():
            before = offset
            for data in self._buffers(partition, before):
                if pending is not None and any_transactional(data):
                    offset = self._take_batches(partition, data, offset, found)
                    continue
                rows, offset = self._records(partition, data, offset)
                if self._last_counts:
                    found.latest.update((row.key, row) for row in rows)
                else:
                    self._apply(partition, rows, apply)
            if offset == before:
                break  # the cleaner has left nothing more
        self._apply(partition, found.latest.values(), apply)
        if pending is not None:
            for producer_id, row in found.undecided():
                self._apply(partition, (row,), partial(pending, producer_id))

    def _buffers(self, partition: Partition, offset: int) -> Iterator[Any]:
        """The next bytes of a log."""
        try:
            yield from partition.read(offset, READ_BYTES)
        except (FormatError, CorruptLogError) as e:
            raise self._unreadable(partition, offset, e.message) from e

    def _records(self, partition: Partition, data: Any, offset: int) -> tuple[list[Any], int]:
        """The records of whole batches from `offset` on, and the offset after them."""
        # Not before it is needed: it brings Arrow.
        from kdirect.format.codec import decode_records

        tp = partition.topic_partition
        try:
            rows, taken, after = decode_records(data, tp.topic, tp.partition, offset)
            if taken < len(data):  # up to a broken batch: what is wrong is told of the first one
                offset = after
                decode_records(memoryview(data)[taken:], tp.topic, tp.partition, offset)
        except (FormatError, CorruptLogError) as e:
            raise self._unreadable(partition, offset, e.message) from e
        return rows, after

    def _take_batches(self, partition: Partition, data: Any, offset: int, found: _Found) -> int:
        """Take whole batches, of which some belong to transactions; the offset after them."""
        for batch in iterate_batches(data, check_crc=False):
            piece = memoryview(data)[batch.position : batch.position + batch.size]
            rows, offset = self._records(partition, piece, offset)  # a marker is checked, too
            if not batch.is_control:
                of = found.latest
                if batch.is_transactional:
                    of = found.open.setdefault(batch.producer_id, {})
                of.update((row.key, row) for row in rows)
                continue
            if batch.records_count == 0:  # the cleaner has removed its marker
                continue
            try:
                found.end(batch.producer_id, commit=marker_commits(bytes(piece)))
            except FormatError as e:
                raise self._unreadable(partition, batch.base_offset, str(e)) from e
        return offset

    def _apply(self, partition: Partition, rows: Iterable[Any], apply: Apply) -> None:
        for row in rows:
            try:
                apply(row.key, row.value)
            except FormatError as e:
                raise self._unreadable(partition, row.offset, str(e)) from e

    def _unreadable(self, partition: Partition, offset: int, why: str) -> CorruptLogError:
        return CorruptLogError(
            f"record {offset} of {partition.topic_partition} cannot be read: {why}",
            hint=f"{self._what} are in {partition.directory}; restore it, or move it away",
        )

    # -- changing ----------------------------------------------------------------------------------

    def change(
        self,
        index_of: Callable[[int], int],
        rows: list[Row],
        remember: Callable[[], None],
        encode: Encode | None = None,
    ) -> asyncio.Future[Partition | None]:
        """Append `rows` to the partition that `index_of(partition count)` names, then `remember`
        them; in a cluster, once they are committed.  The future's result is the partition, whose
        acknowledgements may still wait for the disk (`Partition.acknowledgements_wait`), or None
        when there is nothing to wait for.  It is done already unless something comes first.
        `encode` makes the batches, where they are not to be batches of one record each.

        LogError when the rows could not be appended, or the partition is absent or was taken away
        meanwhile; in a cluster NotLeaderError, NotEnoughReplicasError, TimedOutError, too.  Then
        nothing is remembered, but the rows may be in the log."""
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
                count = self.partition_count
                if not count:
                    raise self._not_loaded(self.name)
                where = self.partition(index_of(count))
                self._begin(where, rows, remember, future, encode)
            except KdirectError as e:
                resolve(future, None, e)

        if self.replication is None:
            self.when_ready(ready)
        else:  # the controller creates it, before anything can be loaded
            ready(None)
        return future

    def _begin(
        self,
        partition: Partition,
        rows: list[Row],
        remember: Callable[[], None],
        future: asyncio.Future[Partition | None],
        encode: Encode | None,
    ) -> None:
        """Append, and settle `future` in the end.  KdirectError: nothing was begun."""
        loading = self._loading_of(partition)

        def settle(error: BaseException | None) -> None:
            try:
                if error is None:
                    self._loading_of(partition, loading)  # it may have been unloaded meanwhile
                    remember()
            except KdirectError as e:
                error = e
            resolve(future, partition if self.replication is None else None, error)

        if self.replication is None:
            self._append(partition, rows, lambda end, error: settle(error), encode)
        else:
            appended = self.replication.begin(partition, settle)
            self._append(partition, rows, appended, encode)

    def _loading_of(self, partition: Partition, same: int | None = None) -> int:
        """The number of the present loading of a partition, which has to be `same`."""
        tp = partition.topic_partition
        loading = self._loaded.get(tp.partition)
        if loading is None or (same is not None and loading != same):
            raise self._not_loaded(tp)
        return loading

    def _not_loaded(self, where: object) -> LogError:
        return LogError(
            f"{self._what} in {where} are not loaded: another broker coordinates them",
            hint="ask for the coordinator again",
        )

    def _append(
        self,
        partition: Partition,
        rows: list[Row],
        then: Callable[[int, BaseException | None], None],
        encode: Encode | None = None,
    ) -> None:
        """`then(end offset, error)` is called once, in the order of the calls, when all is appended
        or something could not be."""
        if self.direct is not None:
            then = self._paused(partition.topic_partition.partition, then)
        now = now_ms()
        batches = list(pieces(rows, now) if encode is None else encode(rows, now))
        failed: list[BaseException] = []

        def one(last: bool, result: Any, error: BaseException | None) -> None:
            error = error or failure(partition, result)
            if error is not None:
                failed.append(error)
            if last:
                end = -1 if error is not None else result.last_offset + 1
                then(end, failed[0] if failed else None)

        for i, piece in enumerate(batches):
            last = i + 1 == len(batches)
            try:
                own = encode is None  # `pieces` are not compressed
                result = self._appends.append_nowait(partition, piece, now, own=own)
            except Exception as e:
                one(last, None, e)
                continue
            if result is not None:
                one(last, result, None)
            else:
                self._appends.append_later(PendingAppend(partition, piece, now, partial(one, last)))

    def _paused(
        self, index: int, then: Callable[[int, BaseException | None], None]
    ) -> Callable[[int, BaseException | None], None]:
        """Pause others, until `then` has returned."""
        direct = self.direct
        assert direct is not None
        direct.pause(index)

        def told(end: int, error: BaseException | None) -> None:
            try:
                then(end, error)
            finally:
                direct.resume(index)

        return told


def due_configs(found: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str] | None:
    """The properties that a topic is to have which has those `found`, and would be created with its
    `own`; None: it may keep them.  It may not keep a cleanup policy that takes records which count,
    as topics of older brokers have it, and those that are copied from Kafka without their
    properties.  What somebody else has set of them stays."""
    if own.get("cleanup.policy") != "compact":
        return None if FOR_EVER.items() <= found.items() else {**found, **FOR_EVER}
    if "compact" in (policy.strip() for policy in found.get("cleanup.policy", "").split(",")):
        return None
    kept = {n: text for n, text in found.items() if n != "cleanup.policy" and text != _OLD.get(n)}
    return {**own, **kept}


def pieces(rows: list[Row], now_ms: int) -> Iterator[bytes]:
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


def one_batch(rows: list[Row], now_ms: int) -> Iterator[bytes]:
    """All rows in one batch, which is in the log whole or not at all."""
    yield encode_records(rows, now_ms)


def failure(partition: Partition, result: Any) -> LogError | None:
    if result is None or not result.error:
        return None
    what = f"append to {partition.topic_partition} failed: {error_kind(result.error).name}"
    return LogError(what, hint="is max.message.bytes very small?")
