"""All tiered partitions of a broker, and how their segments are copied and deleted.

Owns: one `RemoteLog` for each partition of which there is metadata or a tiered log, the order in
which its events reach it, and how what it decides is carried out, on the threads of
`remote_threads`.  What may not enter: how metadata is stored and committed (a `MetadataLog` does),
sockets, event loops.

Locks: a partition's events wait in a queue; whoever finds nobody at work with it takes them one by
one, so a `RemoteLog` is only ever used by one thread, and no lock is held while effects begin.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from kdirect.errors import (
    ClosedError,
    CorruptObjectError,
    KdirectError,
    ObjectNotFoundError,
    UnsupportedFormatError,
    UploadStoppedError,
)
from kdirect.failpoints import reached
from kdirect.format.remote_metadata import RemotePartitionDelete, RemoteSegment
from kdirect.format.segment_object import TailPlace
from kdirect.log.partition import Partition
from kdirect.objects.store import ObjectStore
from kdirect.storage import remote_events as e
from kdirect.storage.adoption import find_whole
from kdirect.storage.copy_rules import LocalLog, TierConfig
from kdirect.storage.local_facts import local_log, put_on_disk, tier_config
from kdirect.storage.ownership import Ownership
from kdirect.storage.remote_events import Figures
from kdirect.storage.remote_log import RemoteLog
from kdirect.storage.remote_segments import Piece
from kdirect.storage.remote_threads import CLOSE_TIMEOUT_S, RemoteThreads
from kdirect.storage.segment_states import NO_SEGMENT, PartitionMetadata, Record
from kdirect.storage.sweep import delete_given_up
from kdirect.storage.throttle import UNLIMITED, Throttle
from kdirect.storage.topic_section import TopicSection
from kdirect.storage.upload import (
    GIVEN_UP,
    Copier,
    Outcome,
    RunningUpload,
    key_of,
    upload,
)

log = logging.getLogger("kdirect.storage")

LONGEST_WAIT_S = 0.5  # then it is asked again whether the upload is wanted
MOST_COMPLAINTS = 1000  # whose times are remembered
# How long ago it was seen that the objects are this broker's, before it copies or deletes.
OWNER_COPIES_S = 60.0
OWNER_DELETES_S = 10.0
# Topic id and partition.
PartitionId: TypeAlias = tuple[uuid.UUID, int]


class MetadataLog(Protocol):
    """Where metadata records are kept."""

    def write(self, record: Record, done: Callable[[bool], None], /) -> None:
        """Append the record; `done(True)` once it is committed and on disk, `done(False)` when it
        could not be written, or nobody knows.  Returns at once; any thread may call either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """What of the broker's properties is needed here.  Times in seconds, rates in bytes per
    second."""

    cluster_id: str
    broker_id: int
    copiers: int = 10
    expirers: int = 10
    interval_s: float = 30.0
    copy_timeout_s: float = 300.0
    copy_rate: int = UNLIMITED


class _Log:
    """One partition, with the events that wait for it."""

    def __init__(self, machine: RemoteLog) -> None:
        self.machine = machine
        self.partition: Partition | None = None  # while this broker leads it
        self.epoch = 0
        self.ended = threading.Event()  # of the present leadership: uploads are not wanted
        self.events: deque[e.Event] = deque()
        self.lock = threading.Lock()  # of the queue
        self.at_work = False
        self.is_over = False  # another broker leads: nothing is begun any more


@dataclass(slots=True)
class RemoteCounters:
    """What metrics tell (`kdirect.metrics`, room `storage`).  Each is counted by the threads of one
    pool; sums may be a moment old."""

    copy_requests: int = 0
    copy_bytes: int = 0
    copy_errors: int = 0
    copies_given_up: int = 0
    delete_requests: int = 0
    delete_errors: int = 0
    adopted: int = 0
    orphans: int = 0


class _UnownedError(Exception):
    """Not seen to be the owner, which is told already.  It never leaves this module."""


class RemoteLogs:
    """See the module.  Life: construct, `apply` what is in the metadata, `lead` partitions,
    `close`.  Any thread may call.  `partition_count(topic)`: how many a topic has.  `deleted`
    is called, on a thread, for each segment whose object is gone, `moved` for a log whose start has
    moved."""

    def __init__(
        self,
        store: ObjectStore,
        metadata: MetadataLog,
        settings: RemoteSettings,
        *,
        ownership: Ownership,
        partition_count: Callable[[str], int],
        deleted: Callable[[RemoteSegment], None] = lambda segment: None,
        moved: Callable[[Partition], None] = lambda partition: None,
        time_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        threads: RemoteThreads | None = None,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
    ) -> None:
        self.store = store
        self.settings = settings
        self.ownership = ownership
        self.throttle = Throttle(settings.copy_rate)
        self.counters = RemoteCounters()
        self._metadata = metadata
        self._time_ms = time_ms
        self._machine = partial(RemoteLog, broker_id=settings.broker_id, new_id=new_id)
        self._partition_count = partition_count
        self._deleted = deleted
        self._moved = moved
        self._logs: dict[PartitionId, _Log] = {}
        self._lock = threading.Lock()  # of the dictionary
        self._threads = threads or RemoteThreads(
            copiers=settings.copiers,
            expirers=settings.expirers,
            interval_s=settings.interval_s,
        )
        self._closed = False
        self._told: dict[str, float] = {}

    def reconfigure(self, *, copiers: int, expirers: int, copy_rate: int) -> None:
        """Have so many threads, and copy so many bytes per second at most, from now on."""
        self._threads.resize(copiers=copiers, expirers=expirers)
        self.throttle.bytes_per_second = copy_rate

    # -- metadata ----------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """A committed record of the metadata topic, in its order; those of `write` are told to it
        here, too."""
        found = self._log_of(record.topic, record.topic_id, record.partition)
        self._tell(found, e.Recorded(record))

    def forget(self, wanted: Callable[[PartitionId], bool]) -> None:
        """Forget the metadata of some partitions: another broker keeps it."""
        with self._lock:
            for key in [key for key in self._logs if wanted(key)]:
                self._logs.pop(key).ended.set()

    def _log_of(self, topic: str, topic_id: uuid.UUID, partition: int) -> _Log:
        with self._lock:
            found = self._logs.get((topic_id, partition))
            if found is None:
                machine = self._machine(topic, topic_id, partition)
                found = self._logs[topic_id, partition] = _Log(machine)
            return found

    def _items(self) -> list[tuple[PartitionId, _Log]]:
        with self._lock:
            return list(self._logs.items())

    # -- leaderships -------------------------------------------------------------------------------

    def lead(self, partition: Partition) -> None:
        """This broker leads the partition, and all its metadata was told: look after it."""
        tp = partition.topic_partition
        found = self._log_of(tp.topic, partition.topic_id, tp.partition)
        found.partition = partition
        found.epoch = partition.leader_epoch
        partition.on_roll.append(lambda *_: self._wake(found))
        self._tell(found, e.Loaded())
        self._wake(found)
        self._start_looking()

    def begin(self, partition: Partition, records: Iterable[Record]) -> None:
        """A leadership in a cluster: it begins with the metadata that was read so far (`records`),
        and decides once it has read a record of its own leader epoch.  What comes is told by
        `tell`, in the same order, on the same thread."""
        tp = partition.topic_partition
        machine = self._machine(
            tp.topic,
            partition.topic_id,
            tp.partition,
            leader_epoch=partition.leader_epoch,
            fences=True,
        )
        found = _Log(machine)
        found.partition = partition
        found.epoch = partition.leader_epoch
        if self._rolled not in partition.on_roll:
            partition.on_roll.append(self._rolled)
        self._replace((partition.topic_id, tp.partition), found)
        for record in records:
            self._tell(found, e.Recorded(record))
        self._tell(found, e.Loaded())
        self._wake(found)
        self._start_looking()

    def begin_deletion(self, key: PartitionId, metadata: PartitionMetadata) -> None:
        """A topic of a cluster is gone: delete what is in the store of one of its partitions.
        Leaderships that have not heard of it change nothing any more."""
        assert metadata.deletion is not None
        machine = self._machine(
            metadata.deletion.topic, *key, leader_epoch=metadata.newest_epoch + 1
        )
        found = _Log(machine)
        self._replace(key, found)
        for record in metadata.records():
            self._tell(found, e.Recorded(record))
        self._tell(found, e.Loaded())
        self._tell(found, e.TopicDeleted())
        self._wake(found)
        self._start_looking()

    def end(self, key: PartitionId) -> None:
        """Another broker looks after the partition: uploads end, and nothing more is begun."""
        self._replace(key, None)

    def tell(self, record: Record) -> None:
        """A committed record, of a partition that may be looked after elsewhere."""
        with self._lock:
            found = self._logs.get((record.topic_id, record.partition))
        if found is not None:
            self._tell(found, e.Recorded(record))

    def _replace(self, key: PartitionId, found: _Log | None) -> None:
        with self._lock:
            before = self._logs.pop(key, None)
            if found is not None:
                self._logs[key] = found
        if before is not None:
            before.is_over = True
            before.ended.set()

    def _rolled(self, partition: Partition, *_: object) -> None:
        self.wake(partition.topic_id, partition.topic_partition.partition)

    def is_ready(self, topic_id: uuid.UUID, partition: int) -> bool:
        """Is it known here what is in the store of the partition?"""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        return found is not None and found.machine.is_ready

    def wake(self, topic_id: uuid.UUID, partition: int) -> None:
        """Look at a partition soon: its configuration has changed, say."""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        if found is not None:
            self._wake(found)

    def delete(self, topic: str, topic_id: uuid.UUID, partition: int) -> bool:
        """The topic is gone: delete what is in the store.  False when there is no metadata of the
        partition, so that nothing has to be done."""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        if found is None:
            return False
        found.ended.set()  # an upload that is under way is not wanted, and none begins
        if found.machine.is_empty:
            self._forget(found)
            return False
        found.partition = None
        self._tell(found, e.Loaded())
        self._tell(found, e.TopicDeleted())
        self._start_looking()
        return True

    def has_metadata(self, topic_id: uuid.UUID, partition: int) -> bool:
        """Is there metadata of a segment of the partition?"""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        return found is not None and not found.machine.is_empty

    def resume_deletions(self) -> None:
        """After a start: go on with the topics that were being deleted."""
        for _, found in self._items():
            if found.partition is None and found.machine.is_deleted:
                self._tell(found, e.Loaded())
                self._tell(found, e.TopicDeleted())
                self._start_looking()

    # -- looking for offsets -----------------------------------------------------------------------

    def find(self, topic_id: uuid.UUID, partition: int, offset: int) -> RemoteSegment | None:
        """The remote segment that holds `offset`; where none does, the next one."""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        return None if found is None else found.machine.segments.at_or_after(offset)

    def pieces(self, topic_id: uuid.UUID, partition: int, start: int) -> Iterator[Piece]:
        """See `RemoteSegments.pieces`."""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        return iter(()) if found is None else found.machine.segments.pieces(start)

    def newest_timestamp(self, topic_id: uuid.UUID, partition: int, start: int, end: int) -> int:
        """The largest timestamp of the remote segments that hold offsets from `start` to `end`, -1
        without one."""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        segments = () if found is None else found.machine.segments.reaching(start, end)
        return max((segment.max_timestamp_ms for segment in segments), default=-1)

    def gap(self, topic_id: uuid.UUID, partition: int, offset: int) -> tuple[int, int] | None:
        """The offsets around `offset` that no remote segment holds, between two that are there;
        None where there is no such gap, or nothing is known yet."""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        ready = found is not None and found.machine.is_ready
        return found.machine.segments.gap(offset) if found is not None and ready else None

    def end_offset(self, topic_id: uuid.UUID, partition: int) -> int:
        """The offset after the last one that is in remote storage; -1 when nothing is."""
        with self._lock:
            found = self._logs.get((topic_id, partition))
        return -1 if found is None else found.machine.segments.end_offset

    def figures(self) -> dict[PartitionId, Figures]:
        """For metrics."""
        return {key: found.machine.figures() for key, found in self._items()}

    # -- events and effects ------------------------------------------------------------------------

    def _tell(self, found: _Log, event: e.Event) -> None:
        with found.lock:
            found.events.append(event)
            if found.at_work:
                return
            found.at_work = True
        while True:
            with found.lock:
                if not found.events:
                    found.at_work = False
                    return
                event = found.events.popleft()
            try:
                for effect in found.machine.on(event):
                    self._begin(found, effect)
            except Exception:
                log.exception("an event of remote storage failed: %r", event)

    def _begin(self, found: _Log, effect: e.Effect) -> None:
        if self._closed or found.is_over:
            return
        if isinstance(effect, e.Write):
            record = effect.record
            unwanted = found.ended.is_set() or self.ownership.is_lost
            if unwanted and isinstance(record, RemoteSegment):
                if not found.ended.is_set():
                    self.own_soon()
                return self._tell(found, e.Unrecorded(record))
            reached(f"before {_name(record)}")
            self._metadata.write(record, lambda done: self._written(found, record, done))
        elif isinstance(effect, e.Put):
            failed: e.Event = e.PutEnded(effect.segment.segment_id, None)
            self._submit(
                self._threads.copy, partial(self._copy, found, effect.segment), found, failed
            )
        elif isinstance(effect, e.Check):
            failed = e.Checked(effect.segment.segment_id, e.Found.UNKNOWN)
            self._submit(
                self._threads.expire, partial(self._check, found, effect.segment), found, failed
            )
        elif isinstance(effect, e.Delete):
            failed = e.DeleteEnded(effect.segment.segment_id, False)
            work = partial(self._delete, found, effect.segment)
            self._submit(self._threads.expire, work, found, failed)
        elif isinstance(effect, e.MoveLogStart):
            self._submit(self._threads.expire, partial(self._move_log_start, found, effect.offset))
        elif isinstance(effect, e.Tiered):
            if found.partition is not None:
                found.partition.note_tiered(effect.end_offset)
        elif isinstance(effect, e.LookAgain):
            self._wake(found)
        else:
            self._forget(found)

    def _submit(
        self,
        begin: Callable[[Callable[[], None]], None],
        work: Callable[[], None],
        found: _Log | None = None,
        failed: e.Event | None = None,
    ) -> None:
        """Have a thread do it; whatever becomes of it, the log is told, with `failed` if `work`
        does not come to tell."""

        def guarded() -> None:
            if not self._guarded(work) and found is not None and failed is not None:
                self._tell(found, failed)

        try:
            begin(guarded)
        except ClosedError:  # the next start goes on
            pass

    def _guarded(self, work: Callable[[], None]) -> bool:
        try:
            work()
            return True
        except Exception:
            log.exception("work of remote storage failed")
            return False

    def _written(self, found: _Log, record: Record, done: bool) -> None:
        if done:
            reached(f"after {_name(record)}")
        else:  # one that is committed is told by `apply`
            self._tell(found, e.Unrecorded(record))

    def _forget(self, found: _Log) -> None:
        with self._lock:
            for key in [key for key, value in self._logs.items() if value is found]:
                del self._logs[key]

    def _complain(self, what: str, error: BaseException, every_s: float = 30.0) -> None:
        """Log an error, but the same one no more than once in a while."""
        if isinstance(error, _UnownedError):
            return
        now = self._threads.clock()
        if now >= self._told.get(what, -every_s) + every_s:
            if len(self._told) >= MOST_COMPLAINTS:
                self._told = {k: at for k, at in self._told.items() if now < at + every_s}
            self._told[what] = now
            log.warning("%s: %s", what, error)

    # -- copying -----------------------------------------------------------------------------------

    def _copy(self, found: _Log, segment: RemoteSegment) -> None:
        """On a copier's thread."""
        partition, stop = found.partition, found.ended
        name = f"copy of {segment.topic}-{segment.partition} from offset {segment.base_offset}"
        if partition is None or stop.is_set() or self._closed:
            return self._tell(found, e.PutEnded(segment.segment_id, None))
        clock = self._threads.clock
        upload = RunningUpload(clock)

        def put() -> None:
            try:
                outcome: Outcome = self._put(partition, found.epoch, segment, stop, upload)
            except BaseException as error:
                outcome = error
            if not upload.end(outcome):
                self._remove_late(found, segment)

        self.counters.copy_requests += 1
        self._threads.put(put)
        while True:
            wanted = not (stop.is_set() or self._closed)
            limit_s = self.settings.copy_timeout_s if wanted else CLOSE_TIMEOUT_S
            left_s = upload.heard_at + limit_s - clock()
            if self._threads.wait(upload.ended, min(max(left_s, 0.0), LONGEST_WAIT_S)):
                break
            if left_s <= 0 and upload.give_up():
                if wanted:
                    self.counters.copies_given_up += 1
                    self._complain(name, TimeoutError(GIVEN_UP.format(limit_s)))
                break
        tail = upload.outcome
        if isinstance(tail, BaseException):
            if not isinstance(tail, ClosedError | UploadStoppedError):
                self.counters.copy_errors += 1
                self._complain(name, tail)
            tail = None
        elif tail is not None:
            self.counters.copy_bytes += tail.position + tail.length
        reached("after the PUT")
        self._tell(found, e.PutEnded(segment.segment_id, tail))

    def _put(
        self,
        partition: Partition,
        epoch: int,
        segment: RemoteSegment,
        stop: threading.Event,
        under_way: RunningUpload,
    ) -> TailPlace:
        self._require_own(OWNER_COPIES_S)
        under_way.heard_at = time.monotonic()
        sealed = next(
            (s for s in partition.sealed_segments() if s.base_offset == segment.base_offset), None
        )
        if sealed is None or sealed.end_offset != segment.end_offset:
            raise ClosedError(
                f"the segment of {partition.topic_partition} at {segment.base_offset} was deleted"
            )
        put_on_disk(partition, sealed.end_offset, self._time_ms())
        producers = partition.producers_at(sealed.end_offset)
        partitions = self._partition_count(segment.topic)
        topic = TopicSection(partitions, dict(partition.config.overrides or {}))
        copier = Copier(self.settings.cluster_id, self.settings.broker_id, epoch, topic)

        def unwanted() -> bool:
            reached("in the PUT")
            under_way.heard_at = self._threads.clock()
            return stop.is_set() or under_way.given_up or self._closed

        return upload(self.store, segment, sealed, producers, copier, self.throttle, unwanted)

    def _remove_late(self, found: _Log, segment: RemoteSegment) -> None:
        """An upload that was given up has ended after all: its object is nobody's, unless another
        leadership, or a later look of this one, adopts it.  Where that is open, it stays: whoever
        decides deletes it, or the sweep does."""
        if not found.machine.is_leaving(segment.segment_id):
            return
        try:
            self.store.delete(key_of(segment, self.settings.cluster_id))
        except KdirectError as error:
            self._complain("deletion of an object that came late", error)

    # -- whose objects they are --------------------------------------------------------------------

    def own_soon(self) -> None:
        """See, on a thread, whether the objects are this broker's."""
        self._submit(self._threads.expire, self._own)

    def _own(self) -> None:
        with contextlib.suppress(_UnownedError, ClosedError):
            self._require_own(OWNER_COPIES_S)

    def _require_own(self, within_s: float) -> None:
        """See `Ownership.require`.  What is wrong there is wrong for every partition: a key that
        the store does not know, a bucket that is not there.  It is told here, once for all.
        _UnownedError, ClosedError."""
        try:
            self.ownership.require(within_s)
        except ClosedError:
            raise
        except (KdirectError, OSError) as error:
            if not self._closed:
                self._complain(f"owner of {self.store.uri}", error)
            raise _UnownedError from error

    # -- objects that are there --------------------------------------------------------------------

    def _check(self, found: _Log, segment: RemoteSegment) -> None:
        """Is the object whole whose upload another leadership has begun?"""
        key = key_of(segment, self.settings.cluster_id)
        result = e.Checked(segment.segment_id, e.Found.UNKNOWN)
        try:
            self._require_own(OWNER_COPIES_S)
            tail = find_whole(self.store, segment, self.settings.cluster_id)
            result = e.Checked(segment.segment_id, e.Found.SOUND if tail else e.Found.UNSOUND, tail)
            self.counters.adopted += tail is not None
        except (CorruptObjectError, UnsupportedFormatError, ObjectNotFoundError) as error:
            result = e.Checked(segment.segment_id, e.Found.UNSOUND)
            self._complain(f"object {key} is not counted", error)
        except (_UnownedError, KdirectError, OSError) as error:
            self._complain(f"look at object {key}", error)
        self._tell(found, result)

    def _delete(self, found: _Log, segment: RemoteSegment) -> None:
        self.counters.delete_requests += 1
        done = True
        reached("before the DELETE")
        try:
            self._require_own(OWNER_DELETES_S)
            self.store.delete(key_of(segment, self.settings.cluster_id))
        except (_UnownedError, KdirectError, OSError) as error:
            if not self._closed:
                self.counters.delete_errors += 1
                self._complain(f"deletion in {self.store.uri}", error)
            done = False
        reached("after the DELETE")
        if done:
            self._deleted(segment)
        self._tell(found, e.DeleteEnded(segment.segment_id, done))

    def _move_log_start(self, found: _Log, offset: int) -> None:
        partition = found.partition
        if partition is None or found.is_over:
            return
        try:
            start = partition.move_log_start(offset)
        except KdirectError as error:
            self._complain(f"log start of {partition.topic_partition}", error)
            return
        self._moved(partition)
        self._tell(found, e.LogStartMoved(start))

    # -- orphans -----------------------------------------------------------------------------------

    def sweep(self, given_up: list[RemoteSegment]) -> None:
        """Delete what tries that came to nothing have stored after all, on a thread."""
        self._submit(self._threads.expire, partial(self._sweep, given_up))

    def _sweep(self, given_up: list[RemoteSegment]) -> None:
        try:
            self._require_own(0)
            for key in delete_given_up(self.store, self.settings.cluster_id, given_up):
                self.counters.orphans += 1
                log.info("deleted %s, which nobody owned", key)
        except (_UnownedError, KdirectError, OSError) as error:
            self._complain(f"sweep of {self.store.uri}", error)

    # -- looking -----------------------------------------------------------------------------------

    def _wake(self, found: _Log) -> None:
        self._threads.wake(found)

    def _start_looking(self) -> None:
        self._threads.start_looking(
            lambda found: self._guarded(partial(self._look, found)),
            lambda: [found for _, found in self._items()],
        )

    def _look(self, found: _Log) -> None:
        partition = found.partition
        now = self._time_ms()
        if found.is_over:
            return
        if partition is not None:
            try:
                local = local_log(partition)
            except ClosedError:
                return
            self._tell(found, e.Looked(now, local, tier_config(partition)))
        elif found.machine.is_doomed:
            self._tell(found, e.Looked(now, _NOTHING, TierConfig()))

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads.  What is under way is not waited for longer than a moment: it is found
        at the next start, as after a crash."""
        self._closed = True
        self.ownership.close()
        for _, found in self._items():
            found.ended.set()
        self._threads.close()


_NOTHING = LocalLog(0, 0, 0, 0, (), 0, ())


def _name(record: Record) -> str:
    """Of a record, for failpoints."""
    is_fence = not isinstance(record, RemotePartitionDelete) and record.segment_id == NO_SEGMENT
    return "the leader epoch" if is_fence else record.state.name


__all__ = ["MetadataLog", "PartitionId", "RemoteLogs", "RemoteSettings"]
