"""How a log goes on in another log directory.

Law of the file: `Relocation` is the part of `kdirect.log.partition.Partition` that exchanges its
directory, with the same locks.  What was copied until then is `kdirect.log.future_copy`'s; who asks
for a move is `kdirect.log.moves`'.

The partition stays the same object: kernel, offsets, producers, waiting readers and whoever holds
it go on.  Its directory, segments and whatever else knows the directory are exchanged at once.

1. The active segment gets no more records where it is: a leader rolls, so producers lose the head
   and readers move on, as with any roll; a copy of another broker's log keeps its segments, so it
   lets go of the head, and nobody may write it meanwhile.
2. What is missing of the copy is copied, and everything is put on disk.
3. The checkpoints of the directory moved to name the partition; then the copy gets its name.  From
   here on it counts: it is noted in ``partition.metadata`` (``kdirect_moved``) that it was moved
   once more than the directory that is left, and a start that finds both goes by that.
4. In memory the directory is exchanged, unless one of the two log directories has failed by now;
   then the segments are.  The old ones are held by whoever has acquired them, so a
   reader goes on in their bytes, which are the same.

An error before 3 changes nothing but where the active segment ends.  A later one is undone by
noting here, on disk, that this directory was moved once more than the copy.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from kdirect.errors import LogError, NotLeaderError
from kdirect.failpoints import reached
from kdirect.log import checkpoint
from kdirect.log.future_copy import FutureCopy, new_replica
from kdirect.log.head import SpareHead
from kdirect.log.kernel_head import freeze_head, thaw_head
from kdirect.log.kernel_producers import known_producers
from kdirect.log.log_agreement import LogAgreement
from kdirect.log.producer_history import load_producers
from kdirect.log.segment import LOG_SUFFIX, SUFFIXES, TEMPORARY_SUFFIX, Segment, file_name

log = logging.getLogger("kdirect.log")

# `in_place(go)`: call `go`, which says where the log is, while neither directory fails.  OSError.
InPlace = Callable[[Callable[[], None]], None]


class Relocation(LogAgreement):
    """See the module.  What it works on is made by `Partition`."""

    def finished_segments(self) -> frozenset[Segment]:
        """Those whose files change no more, as long as they are in the log."""
        with self._roll_lock:  # one that is being sealed has its indexes trimmed under it
            return frozenset(self._segments[:-1])

    def relocate(
        self,
        copy: FutureCopy,
        checkpoints: Callable[[], AbstractContextManager[InPlace]],
        *,
        stands_still: bool = False,
    ) -> Path:
        """Go on in the directory that `copy` becomes; the one that is left, which may be removed.
        Within `checkpoints()`, those of the log directory moved to name this partition; what that
        gives decides whether the log may be there.
        `stands_still`: nobody writes the log, or will before this returns; NotLeaderError where a
        copy of another broker's log is moved without.  LogError, OSError: the log stays where it
        is."""
        with self._roll_lock:
            self._check_open()
            if self._is_copy and not stands_still:
                raise NotLeaderError(
                    f"{self.topic_partition} is copied from another broker meanwhile",
                    hint="nothing to do: it is moved once that is halted",
                )
            if self._disk.failure is not None:
                raise LogError(
                    f"{self.topic_partition} cannot be moved, for work on its files has failed:"
                    f" {self._disk.failure}",
                    hint="check the disk and restart the broker",
                )
            self._spare.give_back()
            self._lay_down_head()
            self._snapshot_producers(*known_producers(self.kernel))
            moved = self._note_replica()
            copy.complete(moved)
            reached("move, everything is copied")
            left, final = self.directory, copy.parent / str(self.topic_partition)
            segments = copy.segments(final)
            with self._flush_lock, checkpoints() as in_place:
                reached("move, checkpoints are written")
                self._name(copy, moved, in_place)
                reached("move, the copy has its name")
                self._go_on_in(final, segments, moved)
            return left

    # -- the active segment ------------------------------------------------------------------------

    def _lay_down_head(self) -> None:
        """Let the active segment have no head, and, of a log that is led, no record."""
        active = self._segments[-1]
        if self._is_copy:
            if active.is_head:
                self._close_head_of_copy(active)
        elif active.size:
            self._retire_active(although_unreadable=True)
        elif active.is_head:
            self._withdraw_empty(active)

    def _withdraw_empty(self, old: Segment) -> None:
        """The head has no record: whoever was granted its file may write no more into the log."""
        for callback in self.before_roll:
            callback(self)
        thaw = freeze_head(self.kernel)
        if old.size:  # it has got some meanwhile
            thaw_head(self.kernel, thaw)
            self._retire_active(although_unreadable=True)
            return
        path = self.directory / file_name(old.base_offset, LOG_SUFFIX)
        fresh = path.with_name(path.name + TEMPORARY_SUFFIX)
        try:
            os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
            for suffix in SUFFIXES[1:]:
                path.with_suffix(suffix).unlink(missing_ok=True)
            os.rename(fresh, path)
        except BaseException:
            thaw_head(self.kernel, thaw)
            raise
        old.supersede()  # another file has its name
        new = Segment(self.directory, old.base_offset)
        with self._lock:
            old.take_from_kernel()
            self._set_segments((*self._segments[:-1], new))
        old.release()
        self._disk.directory_changed = True
        self._tell(old, new)

    def _close_head_of_copy(self, old: Segment) -> None:
        """The active segment stays, with its records, as after a start."""
        for callback in self.before_roll:
            callback(self)
        freeze_head(self.kernel)
        self._snapshot_producers(*known_producers(self.kernel))
        with self._lock:
            view = self.kernel.view()
            self.kernel.revoke_slots()
            old.take_from_kernel()
            base, end, position = view.segment_base_offset, view.log_end_offset, view.end_position
            self.kernel.truncate(end, position, base, int(self.kernel.leader_epoch))
            new = Segment(
                self.directory,
                base,
                size=position,
                end_offset=end,
                max_timestamp=old.max_timestamp,
                dense_from=old.dense_from,
            )
            new.keep_length = True
            self._set_segments((*self._segments[:-1], new))
        old.finish_seal()
        old.supersede()
        self._leave((old,))
        self._aborted.cut(base)
        try:
            files, start = os.listdir(self.directory), int(self.kernel.log_start_offset)
            load_producers(self.kernel, self.directory, files, list(self._segments), start, end)
            self._aborted.write(self.kernel, self._segments)
        except (OSError, LogError) as e:  # whoever leads with it would take records twice
            raise self._cut_failed(end, e) from e
        self._tell(old, new)

    # -- the exchange ------------------------------------------------------------------------------

    def _note_replica(self) -> checkpoint.Moved:
        """What the copy is to say of itself; the directory here has the same id, on disk."""
        known = new_replica(self.moved)
        if self.moved is None:
            self._write_moved(known)
        return known._replace(times=known.times + 1)

    def _write_moved(self, moved: checkpoint.Moved) -> None:
        checkpoint.write_partition_metadata(self.directory, self.topic_id, self.dense_from, moved)
        self.moved = moved

    def _name(self, copy: FutureCopy, moved: checkpoint.Moved, in_place: InPlace) -> None:
        """Give the copy its name, on disk, and let it be the directory of the log."""
        final = copy.parent / str(self.topic_partition)
        named = False
        try:
            os.rename(copy.directory, final)
            named = True
            checkpoint.sync_directory(copy.parent)
            in_place(partial(self._be_in, final))
        except OSError as e:
            # Whichever name a start finds: this directory is the newer one.
            try:
                self._write_moved(moved._replace(times=moved.times + 1))
            except OSError as e2:
                raise self._cut_failed(int(self.kernel.log_end_offset), e2) from e
            if named:
                shutil.rmtree(final, ignore_errors=True)
            raise

    def _be_in(self, directory: Path) -> None:
        self.directory = directory

    def _go_on_in(self, final: Path, new: list[Segment], moved: checkpoint.Moved) -> None:
        """Exchange what else is in memory; no file is touched."""
        old = self._segments
        with self._lock:
            self.moved = moved
            self._set_segments(tuple(new))
        self._epochs.be_in(final)
        self._aborted.be_in(final)
        self._disk.be_in(final)
        self._spare = SpareHead(final)
        self._start_on_disk = -1
        for segment in old:
            segment.end_replaced()
        self._leave(old)
        view = self.kernel.view()
        self.gate.flushed(view.log_end_offset)
        end = view.log_end_offset, view.end_position, view.segment_base_offset
        self._flushed(view, *end)


__all__ = ["InPlace", "Relocation"]
