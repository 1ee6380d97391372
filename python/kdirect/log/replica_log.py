"""What a log does because other brokers have copies of it.

Law of the room: `ReplicaLog` is the part of `kdirect.log.partition.Partition` that only a replica
needs, with the same locks.  Who leads, and what that means, is decided elsewhere: this takes a copy
in and shows what is confirmed.  Going back to where logs agree is `kdirect.log.log_agreement`.

A partition is either *led* (clients append; `append` stamps offsets and epochs) or a *copy*
(`follow_leader`: `append` refuses, `append_as_stamped` takes what the leader has stamped).  A
partition without replicas is led from the start.

**Compaction.**  Each replica compacts its own log.  A copy keeps the offsets of its leader's
records, and takes a log with missing offsets as far as the leader says that they may be missing
(`note_gaps_below`).  Compacted segments differ between replicas in their bytes and in where they
begin; what is below holds from `dense_from` on, and nothing that depends on it is done below.

**Segments begin at the same offsets on all replicas.**  The leader alone decides where one begins:
it begins one with its leader epoch (`begin_epoch`) and whenever its head is full or too old; a copy
repeats it (`begin_segment`) and never rolls or deletes by rules of its own: its heads have room for
what the leader's may become (`copy_segments_of`), whatever ``segment.bytes`` is.  So a copy has
each boundary below its end that the leader has, and no other: those of an older leader above the
start of the new epoch go with the records that are cut off there.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kdirect.errors import CorruptLogError, LogError, NotLeaderError, OffsetOutOfRangeError
from kdirect.format.batch import iterate_batches
from kdirect.log import reading
from kdirect.log.clock import now_ms as now_ms
from kdirect.log.compacting import Compacting
from kdirect.log.config import PAGE_BYTES, kernel_settings, whole_pages
from kdirect.log.head import PreparedHead
from kdirect.log.kernel import NO_HEAD, NO_SPACE, UNKNOWN_EPOCH
from kdirect.log.kernel_marks import advance_high_watermark, load_high_watermark
from kdirect.log.replica_marks import note_on_disk
from kdirect.log.rolling import log
from kdirect.log.segment import Segment
from kdirect.log.segment_source import FileExtent, Release, SegmentSource
from kdirect.log.views import KernelView, SealedSegment

if TYPE_CHECKING:
    from kdirect.log.results import CommitResult

LARGEST_SEGMENT = (1 << 31) - PAGE_BYTES


class Copied(NamedTuple):
    """Whole batches of one segment, for another replica.  `segment` is its base offset, and
    `segment_bytes` as much as it may ever have, and a segment that begins after it."""

    buffers: list[memoryview]
    segment: int
    segment_bytes: int


class SealedExtent(NamedTuple):
    """A sealed segment, held for another replica until `extent.release`.  `position` of the record
    that was asked for; `size`: bytes of its records; `end_offset`: after the last one."""

    extent: FileExtent
    base_offset: int
    position: int
    size: int
    end_offset: int


class ReplicaLog(Compacting):
    """See the module.  What it works on is made by `Partition`."""

    dense_from: int
    on_flush: list[Callable[[], None]]
    _append_lock: Any  # held by appends on threads, so that `follow_leader` can wait for them
    _leaders_bytes: int = 0  # of the segments that are copied; 0: it was not told
    _told_boundary: tuple[int, int] = (-1, -1)  # where the last segment begins here, and there
    _last_flush_ms: int

    # -- led, or a copy ----------------------------------------------------------------------------

    @property
    def is_copy(self) -> bool:
        """Is another broker's log the one that this follows?"""
        return self._is_copy

    def refuse_appends(self) -> None:
        """From now on `append` raises NotLeaderError; one that is under way on another thread goes
        on: `follow_leader` waits for it."""
        self._is_copy = True

    def follow_leader(self) -> None:
        """Return when no append of a client is under way or will be made; records are readable as
        far as they are now, until `replicated` says more.  Leader epochs that got no record here
        are forgotten: the next records may be of an older one."""
        self._is_copy = True
        with self._append_lock:
            pass
        self.set_replicas({-1: self.kernel.high_watermark})
        with self._roll_lock:
            epochs = self._epochs.write_truncated(int(self.kernel.log_end_offset))
            self.kernel.set_leader_epoch(self._epochs.replace(epochs))

    def begin_epoch(self, epoch: int, *, replicated: bool) -> None:
        """Lead from the log's end on, in `epoch`; clients may append.  `replicated`: other brokers
        have copies, so a new segment begins here, and what may be read is said by `replicated`.
        StorageFullError, LogError."""
        with self._roll_lock:
            self._check_open()
            self._leaders_bytes = 0
            self._choose_head_config()
            if replicated:
                self._end_segment()
            if epoch < self.kernel.leader_epoch:
                raise LogError(
                    f"{self.topic_partition} is to be led in epoch {epoch}, and has records of"
                    f" epoch {self.kernel.leader_epoch}",
                    hint="its state in the metadata store was lost or edited; restore the node",
                )
            if epoch > self.kernel.leader_epoch:
                self._epochs.add(epoch, int(self.kernel.log_end_offset))
                self.kernel.set_leader_epoch(epoch)
            self.set_replicas({-1: self.kernel.high_watermark} if replicated else {})
            self._is_copy = False
            if self.gate.holds:  # nobody else asks for what was copied to be on disk
                with suppress(LogError):  # which was logged
                    self.flush()

    def _check_led(self) -> None:
        if self._is_copy:
            raise NotLeaderError(
                f"this broker does not lead {self.topic_partition}",
                hint="ask for metadata again, then the leader",
            )

    # -- what other brokers have -------------------------------------------------------------------

    def set_replicas(self, brokers: Mapping[int, int]) -> None:
        """From now on records may be read and acknowledged once these brokers have them; with what
        each has: every record below that offset.  Without brokers, the disk alone decides, if
        ``log.flush.before.ack`` is set.

        A leader names its in-sync replicas by this.  A replica names its leader, with the high
        watermark that the leader tells.  The high watermark does not go back."""
        with self._roll_lock, self._flush_lock:
            view = self.kernel.view()
            end = view.log_end_offset
            self.gate.set_replicas({broker: min(has, end) for broker, has in brokers.items()})
            self._configure_kernel()
            self._open_gate(self.kernel.view())

    def replicated(self, broker: int, offset: int) -> None:
        """Another broker has every record below `offset`: readers see what the gate lets out."""
        with self._flush_lock:
            self._replicated(broker, offset)

    def replicated_nowait(self, broker: int, offset: int) -> bool:
        """`replicated` without waiting for a flush; False, and nothing has changed, where one is
        under way, or a file would have to be opened."""
        if not self._flush_lock.acquire(blocking=False):
            return False
        try:
            if not self._sources[-1].base_offset <= offset:
                return False
            self._replicated(broker, offset)
            return True
        finally:
            self._flush_lock.release()

    def _replicated(self, broker: int, offset: int) -> None:
        view = self.kernel.view()
        # More than there is: records of another leadership, which it will have to cut off.
        self.gate.replicated(broker, min(offset, view.log_end_offset))
        self._open_gate(view)

    def hold_readers_at(self, offset: int) -> None:
        """Before anybody else knows the partition: only records below `offset` may be read, or
        below the batch that holds it, although there are more.  A replica that starts again reads
        its high watermark from a checkpoint, which may be older than the log start."""
        # What is in remote storage only was committed.
        start = max(offset, self.local_log_start_offset)
        if start >= self.kernel.log_end_offset:
            return
        source = self.source_for(start)
        try:
            position, offset = self._locate_kept(source, start)
        except CorruptLogError as e:
            found = self._beside_damage(source)
            log.error(
                "the high watermark of %s was %d, and the segment there is damaged; until a leader"
                " says more it is %d: %s",
                self.topic_partition,
                start,
                self.kernel.log_end_offset if found is None else found.base_offset,
                e,
            )
            if found is None:
                return
            source, position, offset = found, 0, found.base_offset
        sealed = [
            SealedSegment(s.base_offset, s.size, s.end_offset)
            for s in self._segments[:-1]
            if s.base_offset >= source.base_offset
        ]
        load_high_watermark(self.kernel, offset, position, source.base_offset, sealed)

    def _note_recovered(self, recovery_point: int) -> None:
        """Before anybody else knows the partition: everything below that offset is on disk."""
        view = self.kernel.view()
        if recovery_point >= view.log_end_offset:
            mark = view.log_end_offset, view.end_position, view.segment_base_offset
        else:
            mark = recovery_point, 0, -1
        note_on_disk(self.kernel, *mark)

    def flush(self, up_to: int | None = None) -> None:
        """Return when every record below `up_to` (default: the log end offset) is on disk.

        One fsync serves all callers that wait at the same time.  In group-commit mode it then makes
        the records readable.  LogError after an fsync has failed: what is on disk is unknown from
        then on."""
        target = self.log_end_offset if up_to is None else up_to
        if self.gate.on_disk >= target:
            return
        with self._flush_lock:
            if self.gate.on_disk < target:
                with self._lock:
                    view, segments = self.kernel.view(), self._segments
                self._disk.sync(segments, view.log_end_offset)
                self._last_flush_ms = now_ms()
                end = view.log_end_offset, view.end_position, view.segment_base_offset
                self._flushed(view, *end)

    def _flushed(self, view: KernelView, offset: int, position: int, base: int) -> None:
        """Every record below `offset`, which lies at `position` of that segment, is on disk.  With
        the flush lock held; `view` as of `_open_gate`.  The gate first: who waits for the disk
        alone may look at the high watermark, too."""
        self._open_gate(view)
        note_on_disk(self.kernel, offset, position, base)
        self._tell_flushed()

    def _tell_flushed(self) -> None:
        for call in tuple(self.on_flush):
            call()

    def _locate_kept(self, source: SegmentSource, start: int) -> tuple[int, int]:
        """(position, offset) of the batch that holds `start`, or of the next one where a part of it
        is deleted."""
        position, offset = source.locate(start)
        while offset < self.kernel.log_start_offset:
            start += 1
            position, offset = source.locate(start)
        return position, offset

    def _beside_damage(self, source: SegmentSource) -> SegmentSource | None:
        """The segment at whose beginning readers are held where this one is damaged: itself, as
        long as nothing in it is deleted; else the next one, for a high watermark is never below the
        log start.  None: there is no other."""
        if source.base_offset >= self.kernel.log_start_offset:
            return source
        after = [s for s in self._sources if s.base_offset > source.base_offset]
        return after[0] if after else None

    def _open_gate(self, view: KernelView) -> None:
        """Let readers see what may be acknowledged; `view` is of a moment before the gate was fed.
        With the flush lock held, or while nobody else knows the partition."""
        readable = self.gate.acknowledged(view.log_end_offset)
        if readable <= view.high_watermark:
            return
        if readable == view.log_end_offset:
            base, position = view.segment_base_offset, view.end_position
        else:  # replicas have less than the disk: up to the batch that holds this offset
            source = self.source_for(readable)
            position, readable = source.locate(readable)
            base = source.base_offset
        advance_high_watermark(self.kernel, readable, position, base)

    # -- copying -----------------------------------------------------------------------------------

    def append_as_stamped(
        self, data: bytes | bytearray | memoryview, at_ms: int | None = None
    ) -> CommitResult:
        """Append a copy of another log: whole batches that keep the offsets and leader epochs that
        they carry, all or nothing.  They begin at the log end offset (else NOT_CONTIGUOUS), and
        their epochs do not go back (else FENCED_LEADER_EPOCH).  A new epoch is on disk before the
        first record that carries it.  StorageFullError as `append`."""
        append = self.kernel.append_as_stamped
        result = self._append(append, data, at_ms)
        while result.error == UNKNOWN_EPOCH:
            self.learn_epochs(data)
            result = self._append(append, data, at_ms)
        return result

    def append_as_stamped_nowait(
        self, data: bytes | bytearray | memoryview, at_ms: int
    ) -> CommitResult | None:
        """The same without file work and without waiting.  None, and nothing has changed, where
        room has to be made, or an epoch written down, first."""
        result = self.kernel.append_as_stamped(data, at_ms)
        return None if result.error in (NO_SPACE, NO_HEAD, UNKNOWN_EPOCH) else result

    def _append(self, append: Any, data: bytes | bytearray | memoryview, at_ms: int | None) -> Any:
        """Make room until there is an answer."""
        at_ms = now_ms() if at_ms is None else at_ms
        base = self.kernel.segment_base_offset
        result = append(data, at_ms)
        while result.error == NO_SPACE or result.error == NO_HEAD:
            self._make_room(base, result.error, len(data), at_ms)
            base = self.kernel.segment_base_offset
            result = append(data, at_ms)
        return result

    def learn_epochs(
        self, data: bytes | bytearray | memoryview, *, at_most: int | None = None
    ) -> int:
        """Note on disk the leader epochs of checked batches that are about to become records as
        they are; the last one that was met.  One above `at_most` is not noted."""
        with self._roll_lock:
            last = int(self.kernel.leader_epoch)
            for batch in iterate_batches(bytes(data), check_crc=False):
                last = max(last, batch.leader_epoch)
                if at_most is not None and last > at_most:
                    break
                if last > self.kernel.leader_epoch:
                    self._epochs.add(last, batch.base_offset)
                    self.kernel.set_leader_epoch(last)
            return last

    def copies_segments_of(self, segment_bytes: int) -> bool:
        """Do segments here become so large?"""
        return self.head_config.segment_bytes == _allowed(segment_bytes)

    def copy_segments_of(self, segment_bytes: int) -> None:
        """As long as this log is a copy its segments become so large, for its leader's do, whatever
        ``segment.bytes`` is here."""
        with self._roll_lock:
            self._leaders_bytes = _allowed(segment_bytes)
            self._choose_head_config()
            self._configure_kernel()

    def _choose_head_config(self) -> None:
        """With the roll lock held; `_configure_kernel` is to follow."""
        size = self._leaders_bytes or self.config.segment_bytes
        same = size == self.config.segment_bytes
        self.head_config = self.config if same else replace(self.config, segment_bytes=size)

    def _configure_kernel(self) -> None:
        """Tell the kernel what `config` and the gate say; with the roll lock held."""
        settings = kernel_settings(self.head_config)
        settings["segment_ms"] = self._segment_ms
        settings["hold_high_watermark"] = self.gate.moves_high_watermark
        self.kernel.configure(**settings)

    def begin_segment(self, base_offset: int) -> None:
        """The next record lies in a segment of the leader that begins at `base_offset`; let it be
        the same here.  Where this log ends, a segment begins, also where compaction has removed
        the records up to there; an empty one here that the leader does not have, because it began
        with an epoch that got no record, is joined to the one before.  Else the segments differ
        from now on, and the records do not."""
        with self._roll_lock:
            self._check_open()
            base, end = int(self.kernel.segment_base_offset), int(self.kernel.log_end_offset)
            if base == base_offset:
                return
            if end <= base_offset:
                self._end_segment()
            elif base == end and len(self._bases) > 1 and self._bases[-2] == base_offset:
                self._cut_at(len(self._bases) - 2, end)
            elif self.dense_from <= base and self._told_boundary != (base, base_offset):
                self._told_boundary = (base, base_offset)
                log.warning(
                    "the segment of %s that holds offset %d begins at %d here, and at %d in its"
                    " leader's log",
                    *(self.topic_partition, end, base, base_offset),
                )

    def _end_segment(self) -> None:
        """Put an empty segment without allocated bytes after the last one, unless that is empty;
        no append is under way."""
        if self.kernel.segment_base_offset != self.kernel.log_end_offset:
            self._retire_active(although_unreadable=True)

    def follow_log_start(self, offset: int) -> None:
        """The leader's log starts at `offset` now: nothing below it is readable here either, as far
        as this replica knows that it was committed; segments wholly below go."""
        with self._roll_lock:
            self._check_open()
            self._move_start(min(offset, int(self.kernel.high_watermark)))

    def read_for_replica(
        self, offset: int, max_bytes: int, *, release: Release | None = None
    ) -> Copied:
        """Batches from `offset` on, of one segment, readable or not: at most `max_bytes`, but at
        least one; of the next one where compaction has left none in this.  They may lie below the
        log start, as long as they are there.  Their pages are in memory.
        OffsetOutOfRangeError; TieredOffsetError where they are in remote storage only."""
        view, sources, bases = self._look()
        source = self._source_of_copy(offset, view, sources, bases)
        bound = self._most_bytes(source, sources, view)
        if offset == view.log_end_offset:
            return Copied([], source.base_offset, bound)
        what = self._copying(view, offset, max_bytes, release)
        out = reading.read(what, (source,))
        while not out and source is not sources[-1]:
            source = sources[sources.index(source) + 1]
            out = reading.read(what, (source,))
        for buffer in out:
            reading.mapped(buffer).fault_in()
        return Copied(out, source.base_offset, bound)

    def read_for_replica_nowait(
        self, offset: int, max_bytes: int, *, release: Release | None = None
    ) -> Copied | None:
        """The same without file work and without waiting; None where that cannot be."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            view, sources, bases = self.kernel.view(), self._sources, self._bases
        finally:
            self._lock.release()
        source = self._source_of_copy(offset, view, sources, bases)
        bound = self._most_bytes(source, sources, view)
        if offset == view.log_end_offset:
            return Copied([], source.base_offset, bound)
        found = reading.read_nowait(self._copying(view, offset, max_bytes, release), source)
        return None if found is None else Copied(found, source.base_offset, bound)

    def _most_bytes(
        self, source: SegmentSource, sources: tuple[SegmentSource, ...], view: KernelView
    ) -> int:
        """How large a segment may become, and those after it.  One that was sealed, or granted to a
        producer, before ``segment.bytes`` was lowered may be larger than that."""
        if source is sources[-1]:
            size = max(view.end_position, int(self.kernel.capacity))
        else:
            size = source.size
        return whole_pages(max(self.config.segment_bytes, size))

    def sealed_extent(self, offset: int) -> SealedExtent | None:
        """The sealed segment in which the batch of `offset` begins, for a replica that READs it;
        None where the log's last segment holds that offset, or the log ends there, or offsets may
        be missing from there on.
        OffsetOutOfRangeError, also where no batch begins there; TieredOffsetError."""
        view, sources, bases = self._look()
        source = self._source_of_copy(offset, view, sources, bases)
        if source is sources[-1]:
            return None
        extent = source.grant()
        if offset < self.dense_from:  # asked after the segment is held: it is not exchanged now
            extent.release()
            return None
        try:
            position, begins = source.locate(offset)
            if begins != offset:
                raise OffsetOutOfRangeError(
                    f"no batch of {self.topic_partition} begins at offset {offset}",
                    hint="the replica has to compare leader epochs and cut its log first",
                )
            return SealedExtent(
                extent, source.base_offset, position, source.size, source.end_offset
            )
        except BaseException:
            extent.release()
            raise

    def prepare_pull(self, size: int, given_up: threading.Event) -> PreparedHead:
        """The files of a segment of `size` bytes of records that is to be pulled next, with their
        pages, unless it is `given_up` meanwhile: for `begin_pull`, or for the caller to discard.
        StorageFullError."""
        prepared = self._files_as_long(size)
        prepared.populate(given_up)
        return prepared

    def _files_as_long(self, size: int) -> PreparedHead:
        config = replace(self.config, segment_bytes=size)
        return self._allocated(lambda: PreparedHead(self.directory, config, is_pulled=True))

    def begin_pull(
        self, base_offset: int, size: int, prepared: PreparedHead | None = None
    ) -> Segment:
        """Room for what this log lacks of a sealed segment of its leader, which begins at
        `base_offset` and has `size` bytes of records: the head, acquired for the caller, who writes
        after its tail and commits.  Where this log ends at `base_offset`, a segment begins here,
        whose file has just that length, whatever ``segment.bytes`` is: `prepared`, if it is given.
        LogError where the segments begin elsewhere here, or there is no room in the one that has
        begun; StorageFullError.  Then `prepared` is still the caller's."""
        with self._roll_lock:
            self._check_open()
            view = self.kernel.view()
            if view.log_end_offset == base_offset:
                if prepared is not None:
                    return self.roll_into(prepared)
                return self._begin_as_long(size)
            head, missing = self._segments[-1], size - view.end_position
            if view.segment_base_offset != base_offset or missing <= 0:
                raise LogError(
                    f"the segment of {self.topic_partition} that holds offset"
                    f" {view.log_end_offset} begins at {view.segment_base_offset} here and has"
                    f" {view.end_position} bytes, and at {base_offset} with {size} bytes in its"
                    " leader's log",
                    hint="nothing to do: it is copied over TCP",
                )
            if not (head.is_head and self.kernel.capacity >= size):
                limit = self._limit(head) if head.is_head else self.head_config.segment_bytes
                if size > limit or self.kernel.over:
                    raise LogError(
                        f"{size} bytes are more than the segment of {self.topic_partition} at"
                        f" {base_offset} may have here",
                        hint="nothing to do: it is copied over TCP",
                    )
                head = self.ensure_head(missing)
            return head.acquire()

    def _begin_as_long(self, size: int) -> Segment:
        """A head of its own file for `size` bytes, acquired."""
        prepared = self._files_as_long(size)
        try:
            return self.roll_into(prepared)
        except BaseException:
            prepared.discard()
            raise

    def _source_of_copy(
        self,
        offset: int,
        view: KernelView,
        sources: tuple[SegmentSource, ...],
        bases: list[int],
    ) -> SegmentSource:
        if not bases[0] <= offset <= view.log_end_offset:
            if view.log_start_offset <= offset < bases[0]:
                raise self._not_here(offset, view, bases[0])
            raise OffsetOutOfRangeError(
                f"offset {offset} of {self.topic_partition} is outside"
                f" [{bases[0]}, {view.log_end_offset}]",
                hint="records below were deleted by retention; records above do not exist yet",
            )
        return sources[bisect_right(bases, offset) - 1]

    def _copying(
        self, view: KernelView, offset: int, max_bytes: int, release: Release | None
    ) -> reading.Reading:
        dense, epochs = self.dense_from, self.epochs_of
        return reading.Reading(view, dense, epochs, offset, max_bytes, release, view.end_mark)


def _allowed(segment_bytes: int) -> int:
    """What a leader has said of the size of its segments, which is not believed."""
    return whole_pages(min(max(segment_bytes, 1), LARGEST_SEGMENT))


__all__ = ["Copied", "ReplicaLog", "SealedExtent"]
