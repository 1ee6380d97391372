"""The segments that a log has here, and which of them holds an offset.

Law of the room: `KeptSegments` is the part of `kdirect.log.partition.Partition` that names segments
to all its other parts, with the same locks.  What it works on is made by `Partition`.

A segment that left the log may be read on by whoever has acquired it: cleaning or a cut has put
another one in its place, or another object stands for its file, which became the head again or was
moved.  Which offsets such segments have is remembered (`held_offsets`), because what readers are
told of them must stay.

A log may begin before its segments do: then it is tiered (`kdirect.log.tiering`), and what lies
between the log start and the *local log start* is in remote storage only.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

from kdirect.errors import LogError, OffsetOutOfRangeError, TieredOffsetError
from kdirect.log.epochs import LeaderEpochs
from kdirect.log.kernel import CommitKernel
from kdirect.log.segment import Segment
from kdirect.log.segment_source import LocalSource, SegmentSource
from kdirect.log.views import KernelView
from kdirect.model import TopicPartition


class KeptSegments:
    """See the module."""

    topic_partition: TopicPartition
    kernel: CommitKernel
    _epochs: LeaderEpochs
    _segments: tuple[Segment, ...]
    _sources: tuple[SegmentSource, ...]
    _bases: list[int]
    dense_from: int
    _lock: threading.RLock
    _left: list[Segment]  # segments that left the log, and were acquired when that was looked at

    @property
    def leader_epoch(self) -> int:
        return int(self.kernel.leader_epoch)

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record will get."""
        return int(self.kernel.log_end_offset)

    @property
    def first_kept_offset(self) -> int:
        """The first offset of which a record is kept here, readable or not: where a copy begins."""
        return int(self._segments[0].base_offset)

    @property
    def local_log_start_offset(self) -> int:
        """The first offset that may be read here; what is below it, from the log start on, is in
        remote storage only."""
        return max(self._bases[0], int(self.kernel.log_start_offset))

    def _set_segments(self, segments: tuple[Segment, ...]) -> None:
        """Exchange the list of segments; with ``_lock`` held, once others know the partition."""
        if segments:  # of an empty log's only one, while it is replaced, there is none
            segments[-1].dense_from = max(segments[-1].dense_from, self.dense_from)
        known = {s.segment: s for s in getattr(self, "_sources", ())}
        self._segments = segments
        self._sources = tuple(known.get(s) or LocalSource(s) for s in segments)
        self._bases = [s.base_offset for s in segments]

    def _leave(self, segments: Sequence[Segment]) -> None:
        """These are not the log's any more, and nobody can acquire them who has not."""
        with self._lock:
            self._left = [s for s in (*self._left, *segments) if s.references > 0]

    def held_offsets(self) -> list[tuple[int, int]]:
        """The offsets [base, end) of segments that left the log, but for those that retention has
        deleted, and that somebody may still read."""
        self._leave(())
        with self._lock:
            return [(s.base_offset, s.end_offset) for s in self._left]

    def _look(self) -> tuple[KernelView, tuple[SegmentSource, ...], list[int]]:
        with self._lock:
            return self.kernel.view(), self._sources, self._bases

    def source_for(self, offset: int) -> SegmentSource:
        """The source that holds `offset`; the last one for the log end offset.
        OffsetOutOfRangeError, TieredOffsetError."""
        view, sources, bases = self._look()
        if not max(view.log_start_offset, bases[0]) <= offset <= view.log_end_offset:
            raise self._not_here(offset, view, bases[0])
        return sources[bisect_right(bases, offset) - 1]

    def _not_here(self, offset: int, view: KernelView, first_kept: int) -> LogError:
        """Why an offset cannot be read here, which is outside [local log start, log end]."""
        if not view.log_start_offset <= offset < first_kept:
            return self._out_of_range(offset, view)
        return TieredOffsetError(
            f"offset {offset} of {self.topic_partition} is in remote storage only; what is kept"
            f" here begins at {first_kept}",
            hint="read it with Fetch, which brings it from there",
        )

    def _out_of_range(self, offset: int, view: KernelView) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            f"offset {offset} of {self.topic_partition} is outside"
            f" [{view.log_start_offset}, {view.log_end_offset}]",
            hint="records below were deleted by retention; records above do not exist yet",
        )

    def epochs_of(self, source: SegmentSource, offset: int) -> tuple[int, int]:
        """(leader epoch of the batch at `offset`, the largest) in a segment: later batches are not
        below the one nor above the other."""
        if source is self._sources[-1]:
            return self._epochs.at(offset), self.leader_epoch
        return self._epochs.at(offset), self._epochs.at(max(offset, source.end_offset - 1))
