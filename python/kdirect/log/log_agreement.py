"""Where a log agrees with its leader's, and going back to there.

Law of the file: `LogAgreement` is the part of `kdirect.log.partition.Partition` that drops records
which the leader has not, with the same locks: after an epoch (`cut_after_epoch`), or all of them
(`start_over`).  Which those are is decided by `kdirect.cluster.following_replica`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kdirect.errors import LogError
from kdirect.log import checkpoint, producer_state
from kdirect.log.clock import now_ms
from kdirect.log.kernel_head import freeze_head
from kdirect.log.producer_history import restore_state
from kdirect.log.replica_log import ReplicaLog
from kdirect.log.rolling import log
from kdirect.log.segment import Segment

if TYPE_CHECKING:
    from kdirect.log.producers import ProducerEntry

NO_EPOCH = -1


class LogAgreement(ReplicaLog):
    """See the module.  What it works on is made by `Partition`."""

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last record, NO_EPOCH where there is none."""
        end = int(self.kernel.log_end_offset)
        return NO_EPOCH if end == self.first_kept_offset else self._epochs.at(end - 1)

    def epochs_with_records(self) -> list[tuple[int, int]]:
        """(leader epoch, first offset) of each epoch of which a record is kept, ascending."""
        with self._lock:
            start, end = self.first_kept_offset, int(self.kernel.log_end_offset)
        return self._epochs.between(start, end)

    def cut_after_epoch(self, epoch: int, offset: int) -> int:
        """Cut the log so that no record at `offset` or above it, and none of an epoch above
        `epoch`, stays; the new log end offset."""
        with self._roll_lock:
            for known, first in self.epochs_with_records():
                if known > epoch:
                    offset = min(offset, first)
                    break
            start = int(self.kernel.log_start_offset)
            if offset < start:
                self.start_over(offset)
            elif offset < self._bases[0]:  # what both logs have is in remote storage only
                self.start_over(offset, epochs=self._epochs.between(start, offset))
            else:
                self.truncate_to(min(offset, int(self.kernel.log_end_offset)))
            return int(self.kernel.log_end_offset)

    def start_over(
        self,
        offset: int,
        *,
        log_start: int | None = None,
        epochs: Sequence[tuple[int, int]] = (),
        producers: Sequence[ProducerEntry] = (),
    ) -> None:
        """Drop every record: the log is empty, and goes on at `offset`.  Slots are revoked as when
        a topic is deleted, and producers lose the head as when it is rolled.

        It begins at `offset`, too; a tiered one at `log_start`, if that is below: what lies between
        is in remote storage only.  Without `log_start`, it goes on to begin where it does.
        `epochs` (epoch, first offset) and `producers` are what is known of what is below `offset`.

        A crash in the middle leaves a part of the old log, or the new one.  After an error either
        nothing has changed, or the partition takes no more records and is not closed cleanly."""
        with self._roll_lock:
            self._check_open()
            if log_start is None and self.kernel.log_end_offset == offset == self._bases[0]:
                return
            start = offset
            if self.is_tiered:
                begins = self.kernel.log_start_offset if log_start is None else log_start
                start = min(offset, int(begins))
            for callback in self.before_roll:
                callback(self)
            end = int(self.kernel.log_end_offset)
            old = self._segments[-1]
            freeze_head(self.kernel)
            try:
                with self._flush_lock:
                    self.gate.truncated(0)
                    self.write_checkpoints()
                    doomed = self._empty_list(offset, start, epochs)
                    self.gate.flushed(offset)
                create = partial(Segment.create_empty, self.directory, offset)
                self._empty_files(doomed, create, offset, producers)
            except (OSError, LogError) as e:
                raise self._cut_failed(offset, e) from e
            log.info("%s starts over at offset %d: it ended at %d", *self._names(offset, end))
            self._tell(old, self._segments[-1])

    def _names(self, offset: int, end: int) -> tuple[object, int, int]:
        return self.topic_partition, offset, end

    def _empty_list(
        self, offset: int, start: int, known: Sequence[tuple[int, int]]
    ) -> tuple[Segment, ...]:
        """Exchange what is in memory; the segments that go."""
        epochs = self._epochs.write_emptied(offset, known)
        self._remote_end = min(self._remote_end, offset)
        with self._lock:
            self.kernel.revoke_slots()
            head = self._segments[-1] if self._segments[-1].is_head else None
            if head is not None:
                head.take_from_kernel()
            doomed = self._segments
            epoch = self._epochs.replace(epochs)
            self._cut_to = min(self._cut_to, offset)
            if start < self.kernel.log_start_offset:
                self.kernel.truncate(start, 0, start, epoch, empty=True)
            self.kernel.truncate(offset, 0, offset, epoch, empty=True)
            self.kernel.set_log_start_offset(start)
            self._set_segments((Segment(self.directory, offset),))
        if head is not None:
            head.finish_seal()
        return doomed

    def _empty_files(
        self,
        doomed: tuple[Segment, ...],
        create: Any,
        offset: int,
        producers: Sequence[ProducerEntry],
    ) -> None:
        """Segments go from the last one on, so that a crash leaves the beginning of a log; what
        snapshots say of the producers in them goes before, because the next start believes it."""
        for _, path in producer_state.list_snapshots(self.directory, os.listdir(self.directory)):
            path.unlink(missing_ok=True)
        checkpoint.sync_directory(self.directory)
        for segment in reversed(doomed):
            segment.delete()
            checkpoint.sync_directory(self.directory)
        create()
        if producers:
            producer_state.write_snapshot(self.directory, offset, producers, sync=True)
        checkpoint.sync_directory(self.directory)
        self.write_checkpoints()
        self._start_on_disk = -1  # it may have gone back
        self._aborted.cut(offset)
        restore_state(self.kernel, producers, offset, self._segments, now_ms())
