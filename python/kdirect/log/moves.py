"""Which partitions are to move to another log directory of their broker, and how far they are.

Law of the room: `DirectoryMoves` belongs to a `LogManager` and works with its locks; it runs no
thread: the broker has moves stepped, and finished.  What a move does to a log is
`kdirect.log.relocation`'s.

A move is asked for (`ask`), which is on disk when it is answered, copied (`Move.step`), and done
(`finish`), or given up (`forget`, or `ask` for another directory).  What is asked of a partition
that does not exist is remembered, and decides where it is made (`preferred`).  A start goes on with
moves that were under way: their copies say of what, and where to (`resume`); they are copied again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kdirect.errors import ClosedError, CorruptLogError, KdirectError
from kdirect.failpoints import reached
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.directories import leave, leave_older, remove_in_place
from kdirect.log.future_copy import FutureCopy
from kdirect.log.partition import Partition
from kdirect.log.relocation import InPlace
from kdirect.log.removals import Removals
from kdirect.log.trouble import Trouble, is_full, try_out
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.log")

MOST_PREFERRED = 100_000  # partitions that do not exist: clients may name any
# So little is copied while the log stands still; where appends outrun the copying for that long,
# more is.
CLOSE_BYTES, PATIENCE_STEPS, FAR_BYTES = 4 << 20, 64, 64 << 20


class FutureReplica(NamedTuple):
    """A copy under way, as DescribeLogDirs tells it.  `lag`: records that it lacks, about."""

    topic_partition: TopicPartition
    directory: Path
    size: int
    lag: int


class Move:
    """One partition on its way to the log directory `parent`.  `step` by one thread; `is_over` may
    become true at any time, and then nothing of it counts."""

    def __init__(self, partition: Partition, parent: Path, directory: Path | None = None) -> None:
        self.partition = partition
        self.parent = parent
        self.is_over = False
        self.told = ""  # why it does not go on, once that is in the log
        self.is_copying = False  # in a step, or that one has failed
        self.full_at = -1  # so much was copied when there was no room for more
        self.copy = FutureCopy(partition, parent, directory)
        self._steps_near = 0

    def step(self, most_bytes: int) -> int:
        """Copy some; how many bytes.  OSError, KdirectError; where `is_over`, they say nothing."""
        self.is_copying = True
        copied = self.copy.step(most_bytes)
        self.is_copying = False
        is_near = self.copy.missing_bytes < FAR_BYTES
        self._steps_near = self._steps_near + 1 if is_near else 0
        return copied

    def is_ready(self, most_bytes: int = FAR_BYTES) -> bool:
        """Is so little missing that it may be copied while the log stands still, and at once?  Not
        more than `most_bytes`."""
        near = CLOSE_BYTES if self._steps_near < PATIENCE_STEPS else FAR_BYTES
        return self.copy.has_begun and self.copy.missing_bytes < min(near, most_bytes)

    def replica(self) -> FutureReplica:
        """Any thread."""
        partition, copy = self.partition, self.copy
        lag = max(0, partition.log_end_offset - copy.end_offset)
        size = max(0, partition.size - copy.missing_bytes)
        return FutureReplica(partition.topic_partition, self.parent, size, lag)


class Logs(Protocol):
    """Whose partitions move: a `kdirect.log.manager.LogManager`."""

    partitions: dict[TopicPartition, Partition]
    offline: dict[Path, str]
    on_changed: Callable[[Partition], None]
    removals: Removals
    config: LogConfig

    def changing(self) -> AbstractContextManager[None]:
        """While no partition is made, altered, moved or deleted by another thread."""

    def checkpoints_of_move(self, partition: Any, to: Path) -> AbstractContextManager[InPlace]:
        """Within it the partition goes on in another directory, by what it gives."""

    def note_failure(self, directory: Path, error: BaseException) -> object:
        """Work in this log directory ended with that error."""


class DirectoryMoves:
    """See the module."""

    def __init__(self, logs: Logs) -> None:
        self.preferred: dict[TopicPartition, Path] = {}
        self.finished = 0
        self._logs = logs
        self._moves: dict[TopicPartition, Move] = {}
        self._left: list[Path] = []  # to be removed

    # -- asking ------------------------------------------------------------------------------------

    def ask(self, tp: TopicPartition, directory: Path) -> bool:
        """Move a partition to that log directory, which works; the one that it is in ends a move.
        False: it does not exist, and will be made there.  ClosedError; OSError, which is noted,
        where the copy cannot begin."""
        with self._logs.changing():
            partition, move = self._logs.partitions.get(tp), self._moves.get(tp)
            if partition is None:
                if tp in self.preferred or len(self.preferred) < MOST_PREFERRED:
                    self.preferred[tp] = directory
                return False
            if move is not None and move.parent == directory:
                return True
            if move is not None:
                self._give_up(move)
            if partition.directory.parent != directory:
                self._moves[tp] = self._begun(Move(partition, directory))
            return True

    def _begun(self, move: Move) -> Move:
        """With its directory: from here on a start knows of the move."""
        try:
            move.copy.begin()
        except OSError as e:
            move.copy.discard()
            log.error("%s is not moved to %s: %s", move.partition.topic_partition, move.parent, e)
            self._logs.note_failure(move.parent, e)
            raise
        return move

    def forget(self, partition: Partition) -> None:
        """The partition is let go, or deleted."""
        move = self._moves.get(partition.topic_partition)
        if move is not None:
            self._give_up(move)

    def _give_up(self, move: Move) -> None:
        del self._moves[move.partition.topic_partition]
        move.is_over = True
        directory = move.copy.directory
        try:
            self._left.append(leave(directory, move.partition.topic_partition))
        except OSError:  # there is none yet, no room for another name, or its disk fails
            self._left.append(directory)

    # -- going on ----------------------------------------------------------------------------------

    def under_way(self) -> list[Move]:
        """Any thread."""
        return list(self._moves.values())

    def futures(self) -> list[FutureReplica]:
        """What is being copied.  Any thread."""
        return [move.replica() for move in self.under_way()]

    def resume(self, found: Sequence[tuple[TopicPartition, Path]]) -> None:
        """At a start: go on with the moves that these copies were made for."""
        for tp, path in found:
            partition = self._logs.partitions.get(tp)
            if partition is None and self._logs.offline:
                continue  # it may be in a directory that is left out
            try:
                known = checkpoint.read_partition_metadata(path)
            except CorruptLogError:
                known = None
            same = (
                partition is not None
                and known is not None
                and known.topic_id == partition.topic_id
                and partition.directory.parent != path.parent
                and tp not in self._moves
            )
            if same:
                assert partition is not None
                log.info("going on with the move of %s to %s", tp, path.parent)
                self._moves[tp] = Move(partition, path.parent, path)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def finish(self, move: Move, *, stands_still: bool = False) -> bool:
        """Let the partition go on in its new directory; False: the move is over meanwhile.
        `stands_still` as in `Partition.relocate`, as are the errors."""
        logs, partition = self._logs, move.partition
        with logs.changing():
            tp = partition.topic_partition
            if self._moves.get(tp) is not move:
                return False
            if partition.moved is not None:
                self._left += leave_older(move.parent / str(tp), tp, partition.moved)
            checkpoints = partial(logs.checkpoints_of_move, partition, move.parent)
            left = partition.relocate(move.copy, checkpoints, stands_still=stands_still)
            del self._moves[tp]
            move.is_over = True
            self.finished += 1
            log.info("%s was moved from %s to %s", tp, left.parent, move.parent)
            logs.on_changed(partition)
        try:
            gone = leave(left, tp)
        except OSError as e:
            self._remove_in_place(left, e)
            return True
        reached("move, the old directory is left")
        logs.removals.remove_directory(gone.parent, gone, logs.config.file_delete_delay_ms)
        return True

    def _remove_in_place(self, left: Path, error: OSError) -> None:
        """A directory that was left has no other name: on a full disk there may be no room for
        one.  Nothing may find it once its partition is deleted."""
        self._logs.note_failure(left.parent, error)
        try:
            remove_in_place(left)
        except OSError as e:  # the next start removes it, or a move that comes back
            log.error("%s was moved to another directory, and cannot be removed: %s", left, e)

    def failed(self, move: Move, error: Exception) -> None:
        """A step, or the end, has failed: which directory's fault is it?  The move goes on later,
        unless the one that it leads to is lost, or has no room, also where what was deleted there
        made some: the partial copy goes, for others need its room."""
        if move.is_over or isinstance(error, ClosedError):
            return
        tp = move.partition.topic_partition
        if is_full(error) and move.is_copying and move.full_at == move.copy.copied_bytes:
            self._end(move, f"there is no room in {move.parent} ({error}); ask again once there is")
            return
        if str(error) != move.told:  # it is tried again and again
            move.told = str(error)
            expected = isinstance(error, KdirectError | OSError)
            log.error(
                "moving %s to %s failed, and is tried again: %s",
                *(tp, move.parent, error),
                exc_info=None if expected else error,
            )
        if is_full(error):
            move.full_at = move.copy.copied_bytes
            self._logs.note_failure(move.parent, error)  # deleted files that wait make room
        else:
            for directory in (move.parent, move.partition.directory.parent):
                if try_out(directory) is Trouble.FAILED:
                    self._logs.note_failure(directory, error)
        self.end_lost()

    def end_lost(self) -> None:
        """Give up the moves to directories that have failed."""
        for move in self.under_way():
            if move.parent in self._logs.offline:
                self._end(move, f"log directory {move.parent} has failed")

    def _end(self, move: Move, why: str) -> None:
        """Give it up, and say why."""
        with self._logs.changing():
            if self._moves.get(move.partition.topic_partition) is move:
                log.error("%s is not moved: %s", move.partition.topic_partition, why)
                self._give_up(move)

    @property
    def has_left(self) -> bool:
        """Is there something to be removed?"""
        return bool(self._left)

    def remove_left(self) -> None:
        """Remove what was left; takes long."""
        while self._left:
            shutil.rmtree(self._left.pop(), ignore_errors=True)


__all__ = ["DirectoryMoves", "FutureReplica", "Move"]
