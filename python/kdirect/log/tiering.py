"""A log of which a part may be in remote storage only.

Law of the room: `Tiering` is the part of `kdirect.log.partition.Partition` that knows of remote
storage, with the same locks, and it knows one number of it: below `remote_end_offset` everything is
copied, and the copies count.  Who copies, where to, and what is kept there is decided elsewhere
(`storage/`), which learns here what may be copied (`sealed_segments`, `producers_at`) and tells
what was (`note_tiered`).

A partition is *tiered* if its configuration says so (``remote.storage.enable``).  Then

- the log start is that of the whole log, and stays where it is when local segments go;
- local segments go by local retention, and only those that are copied, or below the log start;
- the log start is in the checkpoint before a local segment goes, and, when it moves, before
  `move_log_start` returns: what is below it is deleted from remote storage after that, and a
  restart must not promise it again.

With ``remote.log.copy.disable`` nothing more is copied, so that the whole log's retention counts
here, and the log start moves with the segments that go, as Kafka does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kdirect.errors import ClosedError, LogError, OffsetOutOfRangeError
from kdirect.format.segment_files import AbortedTransaction
from kdirect.log.config import LogConfig
from kdirect.log.kept_segments import KeptSegments
from kdirect.log.kernel_transactions import aborted_index
from kdirect.log.mapped import MappedBytes
from kdirect.log.producer_history import snapshot_at
from kdirect.log.segment import Segment

log = logging.getLogger("kdirect.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedLog:
    """A sealed local segment that may be copied: nothing of it changes any more.  `epochs`: (leader
    epoch, first offset) of each that has a record in it, the first at `base_offset`.  `aborted` are
    the aborted transactions whose markers are in it.  The segment may be deleted at any time; what
    was opened before stays readable."""

    segment: Segment
    base_offset: int
    end_offset: int
    size: int
    max_timestamp: int
    epochs: tuple[tuple[int, int], ...]
    aborted: tuple[AbortedTransaction, ...]

    def open(self) -> memoryview:
        """The bytes of its records, mapped as long as somebody holds the buffer.  ClosedError when
        the segment was deleted meanwhile."""
        segment = self.segment.acquire()
        return memoryview(MappedBytes(segment, segment.address, self.size))

    def read_indexes(self) -> tuple[bytes, bytes]:
        """The offset index and the time index, as Kafka's files.  ClosedError as `open`."""
        try:
            offset_index = self.segment.offset_index.path.read_bytes()
            return offset_index, self.segment.time_index.path.read_bytes()
        except FileNotFoundError:
            raise ClosedError(
                f"segment {self.segment.path} was deleted",
                hint="its records are below the log start offset, or were copied already",
            ) from None


class Tiering(KeptSegments):
    """See the module.  What it works on is made by `Partition`."""

    directory: Path
    config: LogConfig
    # Put the log start offset of this partition on disk, among those of its log directory.
    write_log_starts: Callable[[], None]
    _roll_lock: threading.RLock
    _remote_end: int = 0
    _start_on_disk: int = -1  # the log start that the checkpoint is known to have

    @property
    def is_tiered(self) -> bool:
        """May a part of this log be in remote storage only?"""
        return self.config.remote_storage

    @property
    def remote_end_offset(self) -> int:
        """Everything below it is in remote storage, as far as `note_tiered` has told; 0: nothing
        is."""
        return self._remote_end

    def note_tiered(self, end_offset: int) -> None:
        """Everything below `end_offset` is copied, and the copies count: local retention may delete
        segments that end there or before.  Any thread; it may go back, when copies do not count any
        more.  Copies of records that were cut off here do not count: a cut takes this back to where
        it was made.  Nothing is noted of a log that is not tiered."""
        if self.is_tiered:
            self._remote_end = max(0, end_offset)

    @property
    def _keeps_start(self) -> bool:
        """Does the log start stay where it is when local segments go?"""
        return self.config.remote_storage and not self.config.remote_copy_disable

    def _put_start_on_disk(self) -> None:
        """Return when the log start is in the checkpoint, as it is now; with the roll lock held.
        LogError: it may not be, so nothing that depends on it may be deleted."""
        start = int(self.kernel.log_start_offset)
        if self._start_on_disk == start:
            return
        try:
            self.write_log_starts()
        except OSError as e:
            raise LogError(
                f"the log start offset {start} of {self.topic_partition} cannot be written: {e}",
                hint="check the disk; nothing was deleted, and it is tried again",
            ) from e
        self._start_on_disk = start

    def leader_epochs(self) -> list[tuple[int, int]]:
        """(leader epoch, offset at which it starts) of every epoch that has a record in this log,
        here or in remote storage, and of the present one."""
        return self._epochs.all()

    # -- what may be copied ------------------------------------------------------------------------

    def sealed_segments(self, above: int = 0) -> list[SealedLog]:
        """The local segments that may be copied and end above offset `above`, oldest first: sealed,
        and wholly below the last stable offset.  Never the active one.  May wait for the disk."""
        with self._roll_lock:  # one that is being sealed has its indexes trimmed under it
            stable = int(self.kernel.last_stable_offset)
            found = [(segment, *segment.extent()) for segment in self._segments[:-1]]
        return [
            SealedLog(
                segment=segment,
                base_offset=segment.base_offset,
                end_offset=end,
                size=size,
                max_timestamp=segment.max_timestamp,
                epochs=tuple(self._epochs.between(segment.base_offset, end)),
                aborted=tuple(aborted_index(self.kernel, segment.base_offset, end)),
            )
            for segment, size, end in found
            if size and above < end <= stable
        ]

    def producers_at(self, offset: int) -> bytes:
        """The producer snapshot at `offset`, where a local segment begins or ends, as the bytes of
        Kafka's file: the one that was written when a segment was sealed there; where it is missing
        or damaged, one made from an older one and the batches after it.  Reads files.
        OffsetOutOfRangeError where that is not here; ClosedError when it went meanwhile."""
        with self._roll_lock:
            segments = [s for s in self._segments[:-1] if s.end_offset <= offset]
            if not self._bases[0] <= offset <= self._bases[-1]:
                raise OffsetOutOfRangeError(
                    f"the producers of {self.topic_partition} at offset {offset} are not known",
                    hint="ask for the end of a local segment",
                )
        return snapshot_at(self.directory, segments, offset)


__all__ = ["SealedLog", "Tiering"]
