"""How a log is cut off at an offset, so that it ends where another one does.

Law of the file: `Cutting` is the part of `kdirect.log.partition.Partition` that takes records back,
with the same locks.  Memory and files change in an order from which a crash recovers; when they say
different things after an error, the partition takes no more records.  The copy of the segment that
is cut is made by `kdirect.log.truncation`.
"""

from __future__ import annotations

import os
from bisect import bisect_right

from kdirect.errors import LogError, StorageFullError
from kdirect.log import checkpoint
from kdirect.log.clock import now_ms
from kdirect.log.kernel_head import freeze_head, thaw_head
from kdirect.log.producer_history import load_producers
from kdirect.log.rolling import Rolling, log
from kdirect.log.segment import Segment
from kdirect.log.segment_search import locate
from kdirect.log.truncation import CutSegment

NO_CUT = (1 << 63) - 1


class Cutting(Rolling):
    """See the module.  What it works on is made by `Partition`."""

    _cut_to: int = NO_CUT  # the least offset that the log was cut at, since somebody has asked

    def take_cut(self) -> int:
        """The least offset at which the log was cut since the last call; NO_CUT: it was not.  What
        was noted of the log above it is of records that are gone."""
        with self._lock:
            found, self._cut_to = self._cut_to, NO_CUT
        return found

    def truncate_to(self, offset: int) -> int:
        """Cut the log so that it ends before `offset`, or, where a batch holds that offset and
        earlier ones, before this batch; the new log end offset.  A replica cuts off by this what
        its leader does not have.  OffsetOutOfRangeError outside [log start, log end],
        TieredOffsetError below what is kept here: then nothing of it stays (`start_over`).

        Later segments are deleted, and the one that holds the offset is replaced by a copy of what
        is kept (`kdirect.log.truncation`): whoever reads what was cut off goes on reading the old
        bytes, slots are revoked as when a topic is deleted, and producers lose the head as when it
        is rolled.  High watermark, recovery point, leader epochs, producer table and snapshots go
        back with the log.  If there was a head, there is one again.

        A crash in the middle leaves a log that ends between the new end and the old one.  After an
        error either nothing has changed, or the partition takes no more records and is not closed
        cleanly: the next start recovers such a log.
        """
        with self._roll_lock:
            self._check_open()
            view = self.kernel.view()
            if not view.log_start_offset <= offset <= view.log_end_offset:
                raise self._out_of_range(offset, view)
            if offset == view.log_end_offset:
                return offset
            if offset < self._bases[0]:
                raise self._not_here(offset, view, self._bases[0])
            end_offset = self._cut_at(bisect_right(self._bases, offset) - 1, offset)
            log.info(
                "cut %s at offset %d: it ended at %d",
                self.topic_partition,
                end_offset,
                view.log_end_offset,
            )
            return end_offset

    def _cut_at(self, at: int, offset: int) -> int:
        """Let segment `at` be the last one, and end before `offset`, or before the batch that holds
        it; where."""
        for callback in self.before_roll:
            callback(self)
        old = self._segments[-1]
        was_head = old.is_head
        thaw = freeze_head(self.kernel)
        try:
            position, end_offset = locate(self._segments[at], offset)
            end_offset = min(end_offset, offset)  # compaction has removed what was there
            cut = self._allocated(
                lambda: CutSegment(self._segments[at], position, end_offset, self.head_config)
            )
            self._cut(at, cut, position, end_offset)
        except BaseException:
            if self._cut_failure is None:
                thaw_head(self.kernel, thaw)
            raise
        self._open_head_again(old, was_head)
        return end_offset

    def _cut(self, at: int, cut: CutSegment, position: int, end_offset: int) -> None:
        """Put `cut` in place of segment `at` and all after it, in memory and on disk.  Checkpoints
        go first: a recovery scans what is above the recovery point, and cuts off there what belongs
        to leaderships that are forgotten."""
        with self._flush_lock:  # held throughout: a flush would raise the recovery point again
            try:
                self.gate.truncated(end_offset)
                self.write_checkpoints()
            except BaseException as e:
                cut.discard()  # less is known to be on disk than is, and nothing else has changed
                if isinstance(e, OSError):
                    raise LogError(
                        f"{self.topic_partition} was not cut at offset {end_offset}: {e}",
                        hint="check the disk",
                    ) from e
                raise
            try:
                doomed = self._cut_list(at, cut, position, end_offset)
            except (OSError, LogError) as e:
                raise self._cut_failed(end_offset, e) from e
        try:
            self._cut_files(doomed, cut)
        except (OSError, LogError) as e:
            raise self._cut_failed(end_offset, e) from e

    def _cut_failed(self, end_offset: int, cause: OSError | LogError) -> LogError:
        """Files and memory say different things: take no more records, and let a restart read the
        files."""
        self._disk.failure = cause
        self._cut_failure = LogError(
            f"cutting {self.topic_partition} at offset {end_offset} failed: {cause}",
            hint="check the disk and restart the broker",
        )
        return self._cut_failure

    def _cut_list(
        self, at: int, cut: CutSegment, position: int, end_offset: int
    ) -> tuple[Segment, ...]:
        """Exchange what is in memory; the segments that go."""
        epochs = self._epochs.write_truncated(end_offset)
        self._remote_end = min(self._remote_end, end_offset)  # what comes there now is not copied
        with self._lock:
            self.kernel.revoke_slots()
            head = self._segments[-1] if self._segments[-1].is_head else None
            if head is not None:
                head.take_from_kernel()
            doomed = self._segments[at:]
            epoch = self._epochs.replace(epochs)
            self._cut_to = min(self._cut_to, end_offset)
            self.kernel.truncate(end_offset, position, cut.segment.base_offset, epoch)
            self._set_segments((*self._segments[:at], cut.segment))
        if head is not None:
            head.finish_seal()
        return doomed

    def _cut_files(self, doomed: tuple[Segment, ...], cut: CutSegment) -> None:
        """Later segments go from the last one on, so that a crash leaves no gap."""
        self.write_checkpoints()  # of the high watermark
        for segment in reversed(doomed[1:]):
            segment.delete()
        checkpoint.sync_directory(self.directory)
        cut.publish()
        doomed[0].end_replaced()
        self._leave(doomed)
        self._aborted.cut(doomed[0].base_offset)
        start, end = int(self.kernel.log_start_offset), int(self.kernel.log_end_offset)
        files = os.listdir(self.directory)
        load_producers(self.kernel, self.directory, files, list(self._segments), start, end)
        self._aborted.write(self.kernel, self._segments)

    def _open_head_again(self, old: Segment, was_head: bool) -> None:
        new = self._segments[-1]
        self._tell(old, new)
        if was_head:
            try:
                self._open_head(1, now_ms())
            except StorageFullError as e:  # the next append tries again
                log.warning("no head for %s: %s", self.topic_partition, e)
