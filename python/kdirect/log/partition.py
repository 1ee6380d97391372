"""A partition's log: its segments in order, its commit kernel, and the rules of roll, read, flush
and retention.

Law of the room: a Partition decides, its Segments touch files, its CommitKernel touches records.

Invariants:

- ``segments`` is never empty, contiguous in offsets and sorted; the last one is active.  It becomes
  the kernel's *head* (allocated, mapped) with the first append and is left dormant after a start.
- A head grows in place up to ``segment.bytes``, in steps (`kdirect.log.growth`), and gives back
  what it does not use.
- What is read or granted goes through ``sources``, one for each segment
  (`kdirect.log.segment_source`).
- A log starts with its first segment or later; one that is tiered may start before
  (`kdirect.log.tiering`).
- ``log start <= recovery point`` does not hold in general, but everything below the recovery point
  is on disk; a crash loses nothing below it.
- The high watermark moves when the `gate` (`kdirect.log.ack_gate`) says so; it may lie in a segment
  that is sealed already.

Threads: every public method may be called from any thread.  Locks, in the order they are taken:
``_roll_lock`` (growth, roll, retention, truncation, close: may wait for the disk), ``_flush_lock``
(fsync; feeds the gate), ``_lock`` (the segment list together with the kernel's head: no file and no
memory is touched while it is held, only lists are exchanged), then a segment's lock, then the
kernel's mutex.  Appends take the kernel's mutex only, until they need room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from kdirect.errors import (
    ClosedError,
    CorruptLogError,
    LogError,
    OffsetOutOfRangeError,
    StorageFullError,
)
from kdirect.log import checkpoint, reading, record_count, time_lookup
from kdirect.log.aborted_index import AbortedFiles
from kdirect.log.ack_gate import AckGate
from kdirect.log.clock import now_ms as now_ms
from kdirect.log.config import NEVER, LogConfig
from kdirect.log.epochs import LeaderEpochs
from kdirect.log.flushing import Flushing
from kdirect.log.growth import HeadUse
from kdirect.log.head import SPARE_WITHIN_S, SpareHead
from kdirect.log.kernel import NO_HEAD, NO_SPACE, CommitKernel
from kdirect.log.kernel_head import freeze_head
from kdirect.log.kernel_marks import allow_gaps_below
from kdirect.log.kernel_producers import known_producers
from kdirect.log.kernel_transactions import MARKER_SIZE, append_marker, has_marker_room
from kdirect.log.recompression import is_kept, recompressed
from kdirect.log.record_keys import (
    INVALID_RECORD,
    KeylessRefusal,
    are_keyed,
    are_keyed_nowait,
    refuse_keyless,
    refuse_keyless_nowait,
)
from kdirect.log.relocation import Relocation
from kdirect.log.removals import DELETED_DIRECTORY, STRAY_DIRECTORY, gone_name
from kdirect.log.results import CommitResult, refusal
from kdirect.log.retention import expired, expired_locally
from kdirect.log.rolling import RollCallback
from kdirect.log.segment import Segment
from kdirect.log.segment_source import Release, SegmentSource
from kdirect.log.views import KernelView
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.log")

AppendResult: TypeAlias = CommitResult | KeylessRefusal


class Partition(Relocation):
    """See the module.  Life: made by `kdirect.log.recovery.load_partition` (or
    `LogManager.create_partition`), ended by `close`."""

    def __init__(
        self,
        topic_partition: TopicPartition,
        directory: Path,
        config: LogConfig,
        *,
        segments: list[Segment],
        kernel: CommitKernel,
        topic_id: uuid.UUID,
        recovery_point: int,
        epochs: list[tuple[int, int]],
        dense_from: int = 0,
        aborted: AbortedFiles | None = None,
        moved: checkpoint.Moved | None = None,
    ) -> None:
        self.topic_partition = topic_partition
        self.directory = directory
        self.config = config
        self.head_config = config
        self.kernel = kernel
        self.topic_id = topic_id
        self.moved = moved
        self.dense_from = dense_from  # below it offsets may be missing
        allow_gaps_below(kernel, dense_from)
        self.before_roll: list[Callable[[Partition], None]] = []
        self.on_roll: list[RollCallback] = []
        self.before_give_back: list[Callable[[Partition], bool]] = []
        # Called when more is on disk, or acknowledgements wait for that no longer.
        self.on_flush: list[Callable[[], None]] = []
        self.gate = AckGate(holds=config.flush_before_ack, on_disk=recovery_point)
        self._is_copy = False
        self._append_lock = threading.Lock()
        self._disk = Flushing(str(topic_partition), directory, self.gate)
        self._note_recovered(recovery_point)
        # Called when the recovery point or the high watermark goes back, which must be on disk
        # before the log goes on; the other when a tiered log's start moves.
        self.write_checkpoints: Callable[[], None] = lambda: None
        self.write_log_starts: Callable[[], None] = lambda: None
        self._left = []
        self._set_segments(tuple(segments))
        self._epochs = LeaderEpochs(directory, epochs)
        self._aborted = AbortedFiles(directory) if aborted is None else aborted
        self._last_flush_ms = now_ms()
        self._closed = False
        self._cut_failure: LogError | None = None
        self._roll_lock = threading.RLock()
        self._flush_lock = threading.Lock()
        self._lock = threading.RLock()
        self._spare = SpareHead(directory)
        self._use = HeadUse()
        self._jitter_ms = 0
        self._rolls = 0
        self._growths = 0
        self._given_back = 0
        self._draw_jitter()

    def __repr__(self) -> str:
        offsets = f"[{self.log_start_offset}, {self.log_end_offset})"
        return (
            f"Partition({self.topic_partition}, offsets {offsets}, {len(self._segments)} segments)"
        )

    # -- offsets -----------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read, of a tiered log wherever it is."""
        return int(self.kernel.log_start_offset)

    @property
    def high_watermark(self) -> int:
        """Consumers see records below it."""
        return int(self.kernel.high_watermark)

    @property
    def last_stable_offset(self) -> int:
        """Consumers that read committed records only see those below it."""
        return int(self.kernel.last_stable_offset)

    @property
    def recovery_point(self) -> int:
        """Everything below it is on disk."""
        return self.gate.on_disk

    @property
    def size(self) -> int:
        """Bytes of records in all local segments."""
        return sum(s.size for s in self._segments)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All local segments, oldest first; the last is active."""
        return self._segments

    @property
    def sources(self) -> tuple[SegmentSource, ...]:
        """Where each segment of the log is that is kept here, oldest first."""
        return self._sources

    @property
    def head(self) -> Segment | None:
        """The active segment; None while it is empty and nothing of it is allocated."""
        active = self._segments[-1]
        return active if active.is_head or active.size else None

    @property
    def unflushed_messages(self) -> int:
        """Records that are not known to be on disk."""
        return self.log_end_offset - self.gate.on_disk

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Kafka's OffsetForLeaderEpoch: (the largest known epoch not above `epoch`, the offset at
        which the next one starts), see `LeaderEpochs.end_offset`, but never below the log start.
        (Replicas use `epochs_with_records`: deleted records that are kept have epochs, too.)"""
        end = self.log_end_offset
        if epoch == self.leader_epoch:
            return epoch, end
        found, end = self._epochs.end_offset(epoch, end)
        return (found, max(end, self.log_start_offset)) if found >= 0 else (found, end)

    def set_leader_epoch(self, epoch: int) -> None:
        """A new leadership: batches from here on carry `epoch`."""
        with self._roll_lock:
            if epoch <= self.leader_epoch:
                raise LogError(
                    f"leader epoch {epoch} of {self.topic_partition} is not above"
                    f" {self.leader_epoch}",
                    hint="epochs only rise",
                )
            self._epochs.add(epoch, self.log_end_offset)
            self.kernel.set_leader_epoch(epoch)

    # -- append ------------------------------------------------------------------------------------

    def append(
        self, data: bytes | bytearray | memoryview, at_ms: int | None = None
    ) -> AppendResult:
        """Append whole batches of one producer, all or nothing (TCP produce).  `at_ms` is the
        broker's time; without it, now.

        `error` of the result is 0 or Kafka's code.  Rolls when the head is full or too old;
        StorageFullError when there is no space for that.  With ``flush.messages`` reached, this
        flushes; where `acknowledgements_wait` afterwards, the caller does before it acknowledges.
        """
        config = self.config
        if config.compacts and not are_keyed(data, config.max_plain_batch_bytes):
            return refuse_keyless(data, config.max_plain_batch_bytes)
        if (codec := config.codec) is not None:
            made = recompressed(
                data,
                codec,
                max_batch_bytes=config.max_message_bytes,
                max_plain_bytes=config.max_plain_batch_bytes,
            )
            if made is None:
                return refusal(INVALID_RECORD)
            data = made
        with self._append_lock:
            self._check_led()
            result = self._append(self.kernel.append, data, at_ms)
        if self.config.flush_messages != NEVER and self._flush_messages_reached(
            self.log_end_offset
        ):
            self.flush()
        return result

    def append_nowait(
        self, data: bytes | bytearray | memoryview, at_ms: int, *, own: bool = False
    ) -> AppendResult | None:
        """`append` without file work and without waiting for any.  None, and nothing has changed,
        where room has to be made first, or records are to be decompressed or compressed: then
        `append` does it, on a thread that may wait.  Where
        `acknowledgements_wait` afterwards, the caller flushes before it acknowledges.
        NotLeaderError, here as in `append`, while the log is a copy of another broker's.
        `own`: the broker has made the batches itself, whose records have keys and no codec."""
        if self._is_copy:
            self._check_led()
        if not own and self.config.compacts:
            keyed = are_keyed_nowait(data)
            if not keyed:
                return None if keyed is None else refuse_keyless_nowait(data)
        if (codec := self.config.codec) is not None:
            kept = codec.name == "none" if own else is_kept(data, codec)
            if not kept:
                return None
        result = self.kernel.append(data, at_ms)
        return None if result.error in (NO_SPACE, NO_HEAD) else result

    def append_marker(self, batch: bytes, at_ms: int | None = None) -> AppendResult:
        """End a producer's transaction by a marker of its coordinator, made by `marker_batch`, as
        `append` does a request; see `kdirect.log.kernel_transactions.append_marker`."""
        with self._append_lock:
            self._check_led()
            return self._append(partial(append_marker, self.kernel), batch, at_ms)

    def append_marker_nowait(self, batch: bytes, at_ms: int) -> AppendResult | None:
        """The same as `append_nowait` is of `append`."""
        if self._is_copy:
            self._check_led()
        result = append_marker(self.kernel, batch, at_ms)
        return None if result.error in (NO_SPACE, NO_HEAD) else result

    def has_marker_room(self, count: int, at_ms: int) -> bool:
        """Whether so many markers can be appended now without file work."""
        return has_marker_room(self.kernel, count, at_ms)

    def make_marker_room(self, count: int) -> None:
        """The file work, on a thread that may wait.  Other appends may take the room at once.
        NotLeaderError, StorageFullError."""
        with self._append_lock:
            self._check_led()
            self.ensure_head(count * MARKER_SIZE)

    def acknowledgements_wait(self) -> bool:
        """Does what was appended have to be on disk before it is acknowledged?  Then `flush`, here
        or on a thread.  For other brokers those wait who ask for that (acks=all)."""
        end = self.log_end_offset
        if self.config.flush_messages != NEVER and self._flush_messages_reached(end):
            self.gate.demand_flush(end)
        return self.gate.waits_for_disk(end)

    def _flush_messages_reached(self, end_offset: int) -> bool:
        return end_offset - self.gate.on_disk >= self.config.flush_messages

    # -- read --------------------------------------------------------------------------------------

    def is_current(self, segment: Segment | None) -> bool:
        """Is this one of the partition's segments, and not replaced?  None stands for a head of
        which nothing is allocated."""
        if segment is None:
            return self.head is None
        with self._lock:
            return self._segments[bisect_right(self._bases, segment.base_offset) - 1] is segment

    def is_finished(self, source: SegmentSource) -> bool:
        """May every record of this segment be read, and does it take no more of them?  Then what a
        reader was granted of it needs no slot."""
        return self.kernel.view().is_finished(source.base_offset)

    def skip_gap(self, offset: int) -> int:
        """`offset`; or, where compaction has left nothing between it and the end of its segment,
        the beginning of the next.  TieredOffsetError."""
        view, sources, bases = self._look()
        if view.log_start_offset <= offset < bases[0]:
            raise self._not_here(offset, view, bases[0])
        for source in sources[max(0, bisect_right(bases, offset) - 1) : -1]:
            offset = max(offset, source.base_offset)
            if offset >= source.end_offset or source.locate(offset)[0] < source.size:
                break
            offset = source.end_offset
        return offset

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        committed_only: bool = False,
        fault_in: bool = False,
        release: Release | None = None,
    ) -> list[memoryview]:
        """Whole batches from the one that holds `offset` on, at most `max_bytes` in all, but at
        least one; only below the high watermark (`committed_only`: the last stable offset).  Empty
        at the end.

        The buffers are the mapped segments themselves, read-only; they stay valid as long as they
        are referenced.  With `fault_in` they are in memory, too.  `release(segment)` is called in
        place of `Segment.release` when a buffer is gone.  OffsetOutOfRangeError outside [log start,
        log end], TieredOffsetError below the local log start."""
        while True:
            view, sources, bases = self._look()
            what = self._reading(view, offset, max_bytes, committed_only, release)
            if not self._is_readable(what, bases[0]):
                return []
            try:
                found = sources[bisect_right(bases, offset) - 1 :]
                out = reading.read(what, found)
                if out and fault_in:
                    found[0].map_indexes()  # the next one may be a `read_nowait`
            except (ClosedError, CorruptLogError):
                # Retention deleted the segment after we looked, or the log was cut: look again,
                # unless we are closed ourselves.
                self._check_open()
                if offset >= self.log_start_offset and self._sources is sources:
                    raise
                continue
            if fault_in:
                for buffer in out:
                    reading.mapped(buffer).fault_in()
            return out

    def read_nowait(
        self,
        offset: int,
        max_bytes: int,
        *,
        committed_only: bool = False,
        release: Release | None = None,
    ) -> list[memoryview] | None:
        """`read` without file work and without waiting: None where a segment or an index is not
        mapped, or its pages are not in memory, or another thread is busy with it.  Then `read`, on
        a thread that may wait."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            view, sources, bases = self.kernel.view(), self._sources, self._bases
        finally:
            self._lock.release()
        what = self._reading(view, offset, max_bytes, committed_only, release)
        if not self._is_readable(what, bases[0]):
            return []
        return reading.read_nowait(what, sources[bisect_right(bases, offset) - 1])

    def _reading(
        self,
        view: KernelView,
        offset: int,
        max_bytes: int,
        committed_only: bool,
        release: Release | None,
    ) -> reading.Reading:
        mark = view.mark(committed_only=committed_only)
        return reading.Reading(
            view, self.dense_from, self.epochs_of, offset, max_bytes, release, mark
        )

    def _is_readable(self, what: reading.Reading, first_kept: int) -> bool:
        """Is there something to read at its offset?  OffsetOutOfRangeError, TieredOffsetError."""
        if not what.view.log_start_offset <= what.offset <= what.view.log_end_offset:
            raise self._out_of_range(what.offset, what.view)
        if what.offset < first_kept:
            raise self._not_here(what.offset, what.view, first_kept)
        return what.offset < what.mark[2]

    def offset_for_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first readable record whose timestamp is `timestamp_ms` or
        later, or None, among those that are kept here.  Takes long: see
        `kdirect.log.time_lookup`."""
        with self._lock:
            view, segments = self.kernel.view(), self._segments
        limit = self.config.max_plain_batch_bytes
        return time_lookup.first_at(timestamp_ms, view, segments, str(self.topic_partition), limit)

    def count_records(
        self,
        start: int,
        stop: int,
        *,
        committed_only: bool,
        allowance: record_count.Allowance | None = None,
    ) -> record_count.CountedRange | None:
        """How many records a consumer gets from the offsets [start, stop), or from the first of
        them; None: only reading tells.  Takes long: see `kdirect.log.record_count`."""
        with self._lock:
            view, segments = self.kernel.view(), self._segments
        return record_count.count(
            view, segments, start, stop, committed_only=committed_only, allowance=allowance
        )

    def largest_timestamp(self) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record with the largest timestamp, or None (Kafka's
        ListOffsets -3), among those that are kept here."""
        newest = max(s.max_timestamp for s in self._segments)
        return self.offset_for_timestamp(newest) if newest >= 0 else None

    # -- flush -------------------------------------------------------------------------------------

    def flush_due(self, now_ms: int) -> bool:
        """Flush if ``flush.ms`` or ``flush.messages`` asks for it, or a sealed segment is not on
        disk yet; whether it did.  A partition that is quiet gives back here what its head does not
        use."""
        if self._roll_lock.acquire(blocking=False):
            try:
                self._spare.give_back(unused_for_s=SPARE_WITHIN_S)
                self._give_back()
            finally:
                self._roll_lock.release()
        unflushed = self.unflushed_messages
        if unflushed > 0 and (
            unflushed >= self.config.flush_messages
            or now_ms - self._last_flush_ms >= self.config.flush_ms
        ):
            self.flush()
            return True
        if unflushed <= 0:
            self._last_flush_ms = max(self._last_flush_ms, now_ms)
            return False
        with self._flush_lock:
            sealed = [
                s
                for s in self._segments
                if s.sealed and not s.synced and s.end_offset > self.gate.on_disk
            ]
            if not sealed or self._disk.failure is not None:
                return False
            last = sealed[-1]
            self._disk.sync(sealed, last.end_offset)
            self._flushed(self.kernel.view(), last.end_offset, last.size, last.base_offset)
        return True

    # -- retention ---------------------------------------------------------------------------------

    def apply_retention(self, now_ms: int) -> int:
        """Delete whole segments that are too old or too many (``retention.ms``,
        ``retention.bytes``; of a tiered log ``local.retention.ms``, ``local.retention.bytes``) or
        that lie below the log start; how many.  A head whose records are all too old is rolled
        first."""
        with self._roll_lock:
            self._check_open()
            if self._is_copy:
                # `follow_log_start` deletes what the leader has deleted.  What is copied goes here
                # by itself: the leader's log start stays then.
                return self._delete_oldest(self._expired(now_ms)) if self._keeps_start else 0
            deleted = 0
            try:
                self._roll_if_overdue(now_ms)
            except StorageFullError:  # what may go makes room
                deleted = self._delete_oldest(self._expired(now_ms))
                if not deleted:
                    raise
                self._roll_if_overdue(now_ms)
            return deleted + self._delete_oldest(self._expired(now_ms))

    def _roll_if_overdue(self, now_ms: int) -> None:
        """Appends roll by time themselves; a head written by RDMA is looked at here."""
        active = self._segments[-1]
        if active.is_head and active.size:
            first, newest, _ = self.kernel.timestamps()
            if first >= 0 and newest - first > self._segment_ms:
                self._roll(now_ms)

    def _expired(self, now_ms: int) -> int:
        log_is = self._segments, self.config, self.high_watermark, self.log_start_offset
        if not self._keeps_start:
            return expired(*log_is, now_ms)
        found = expired_locally(*log_is, self.remote_end_offset, now_ms)
        if found.seals_active and not self._is_copy:
            self._retire_active()
        return found.expired

    def delete_records(self, offset: int) -> int:
        """Make `offset` (-1: the high watermark) the log start; the new log start offset.  See
        `move_log_start`."""
        return self.move_log_start(self.high_watermark if offset == -1 else offset)

    def move_log_start(self, offset: int) -> int:
        """Let the log start at `offset`, if it starts before; the log start offset.  Segments
        wholly below go now.  Of a tiered log it is on disk then, so that what is below may be
        deleted from remote storage.  OffsetOutOfRangeError above the high watermark."""
        with self._roll_lock:
            self._check_open()
            if not 0 <= offset <= self.high_watermark:
                raise OffsetOutOfRangeError(
                    f"cannot delete {self.topic_partition} up to {offset}: its high watermark is"
                    f" {self.high_watermark}",
                    hint="give an offset up to the high watermark, or -1",
                )
            self._move_start(offset)
            return self.log_start_offset

    # -- configuration, end ------------------------------------------------------------------------

    def reconfigure(self, config: LogConfig, write: Callable[[], None] = lambda: None) -> None:
        """Apply other settings, which `write` puts on disk; sizes of segments and indexes count
        from the next roll on.  A log that is tiered no longer starts where it does here; of one
        that becomes tiered no older log start may be on disk.  LogError, OSError: nothing has
        changed."""
        with self._roll_lock:
            if config.remote_storage and not self.is_tiered:
                self._start_on_disk = -1
                self._put_start_on_disk()
            write()
            changed = config.flush_before_ack != self.config.flush_before_ack
            was_tiered, was_free = self.is_tiered, not self.config.looks_into_records
            self.config = config
            if was_tiered != self.is_tiered:
                self._remote_end = 0  # no copy counts that is older
                self._start_on_disk = -1  # the checkpoint leaves out what a first segment says
            if was_tiered and not self.is_tiered:
                self._move_start(self.first_kept_offset)
            self._choose_head_config()
            self.gate.holds = config.flush_before_ack
            self._configure_kernel()
            if config.looks_into_records and was_free:
                with contextlib.suppress(StorageFullError):
                    # Producers over RDMA lose the head: their records have no check.
                    self.take_head_back()
            if changed:
                # What was appended before waits for a flush from now on, and nobody has begun one.
                with contextlib.suppress(LogError):  # which was logged
                    self.flush()
                self._tell_flushed()

    def statistics(self) -> dict[str, int]:
        """Counters of this partition; see the metrics of room `log`."""
        return {
            **self.kernel.statistics(),
            "log_flushes": self._disk.count,
            "log_rolls": self._rolls,
            "log_segments": len(self._segments),
            "log_head_growths": self._growths,
            "log_given_back_bytes": self._given_back,
        }

    @property
    def is_closed(self) -> bool:
        """Was it closed, or deleted?  Then its files may be gone."""
        return self._closed

    def close(self, *, clean: bool = True) -> None:
        """End appends; with `clean`, put everything on disk and shorten the files to their records,
        so that the next start needs no scan.  Holders of segments keep their mappings.  LogError
        after a cut of the log has failed: the next start has to look at the files."""
        with self._roll_lock:
            if self._closed:
                return
            self._closed = True
            cut_failure = self._cut_failure
            if cut_failure is not None:
                clean = False
            active = self._segments[-1]
            with (
                contextlib.ExitStack() as ending
            ):  # whatever fails, the rest is done: last to first
                for segment in self._segments:
                    ending.callback(segment.close)
                if active.is_head:
                    freeze_head(self.kernel)
                    ending.callback(self._end_head, active)
                ending.callback(self._spare.give_back)
                if clean:
                    if active.is_head:
                        self.flush()
                    self._snapshot_producers(*known_producers(self.kernel), sync=True)
            if clean:
                active.sync(with_indexes=True)
                checkpoint.sync_directory(self.directory)
        if cut_failure is not None:
            raise cut_failure

    def _end_head(self, active: Segment) -> None:
        with self._lock:
            active.take_from_kernel()
        active.finish_seal()

    def abandon(self) -> None:
        """Its directory has failed: tell the slots, and close, whatever the files do."""
        self.kernel.revoke_slots()
        try:
            self.close(clean=False)
        except (LogError, OSError) as e:
            log.info("%s was closed although its files fail: %s", self.topic_partition, e)

    def delete(self, *, keep: bool = False, delay_ms: int = 0) -> None:
        """The topic is gone: tell the slots, close, rename the directory, and remove it after
        `delay_ms`; with `keep`, only give it a name by which no broker loads it, Kafka's for what
        no topic is known of."""
        self.kernel.revoke_slots()
        self.close(clean=keep)
        gone = self.directory.with_name(
            gone_name(self.topic_partition, STRAY_DIRECTORY if keep else DELETED_DIRECTORY)
        )
        with self._roll_lock:
            os.rename(self.directory, gone)
        if keep:
            log.error(
                "%s has the records of %s, which the cluster does not know; delete the"
                " directory, or restore the topic and give it back its name",
                gone,
                self.directory,
            )
        elif self.removals is None:
            shutil.rmtree(gone, ignore_errors=True)
        else:
            self.removals.remove_directory(gone.parent, gone, delay_ms)
