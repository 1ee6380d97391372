"""A partition's files, copied into another log directory while they are written.

Law of the room: reads the files of one log and writes a directory that nobody else looks at; what
takes the log's place, and when, is `kdirect.log.relocation`'s.  A *future copy* has Kafka's name,
``topic-partition.ID-future``.  It is on disk, with the identity of its topic, before anything is
copied, so a start knows of it; what a crash leaves of it is copied again.

A segment is copied up to its last committed record, so that of the head, too, and its indexes once
it is sealed.  One that is not in the log any more (retention, compaction, a cut) is forgotten, and
what took its place is copied from its beginning: the same object has the same bytes.

One thread at a time, but for `lag`, which any may ask.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from kdirect.errors import ClosedError, LogError
from kdirect.log import checkpoint
from kdirect.log.segment import LOG_SUFFIX, SUFFIXES, Segment, file_name
from kdirect.model import TopicPartition

UNBOUNDED = 1 << 62
NAME_BYTES = 255  # of a file
FUTURE_DIRECTORY = re.compile(r"(.+)\.[0-9a-f]{32}-future\Z")
# Of work on the log that is not done: it is not copied.
_UNFINISHED = (".tmp", ".cleaned", ".swap", ".deleted")


def future_name(topic_partition: TopicPartition) -> str:
    """Kafka's name; a topic's name may be too long for it."""
    return f"{topic_partition}.{uuid.uuid4().hex}-future"


class Copied(Protocol):
    """What is copied: a `kdirect.log.partition.Partition`."""

    topic_partition: TopicPartition
    topic_id: uuid.UUID
    directory: Path
    dense_from: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Oldest first; the last one may be the head."""

    @property
    def log_end_offset(self) -> int:
        """After the last record."""

    @property
    def is_closed(self) -> bool:
        """Then its files may be gone."""

    def finished_segments(self) -> frozenset[Segment]:
        """Those whose files change no more, as long as they are in the log."""


class FutureCopy:
    """See the module.  `parent`: the log directory that is copied to.  `directory`: what is left
    there of an earlier attempt, if anything is.  Where it goes, `step` begins again.

    Life: construct, `begin`, `step` until little is missing, then either `complete` and `segments`,
    or `discard`, at any time."""

    def __init__(self, partition: Copied, parent: Path, directory: Path | None = None) -> None:
        self.partition = partition
        self.parent = parent
        self.directory = directory or parent / future_name(partition.topic_partition)
        self.copied_bytes = 0
        self.has_begun = False
        self._copies: dict[Segment, _SegmentCopy] = {}
        self._small: dict[str, tuple[int, int, int]] = {}  # by name: what they were when copied

    def step(self, most_bytes: int) -> int:
        """Copy some of what is missing; how many bytes.  OSError, LogError; ClosedError when the
        log is closed."""
        if not self.has_begun or not self.directory.exists():
            self.begin()
        finished = self.partition.finished_segments()
        try:
            copied = self._copy_segments(finished, most_bytes)
            if copied < most_bytes:
                self._copy_small_files()
        except (ClosedError, FileNotFoundError):
            # A segment went meanwhile: the next step sees those that are left.
            if self.partition.is_closed:
                raise
            return 0
        return copied

    def complete(self, moved: checkpoint.Moved) -> None:
        """Copy all that is missing, and put everything on disk.  Nothing is appended, and the log
        has no head.  OSError, LogError."""
        partition = self.partition
        if not self.has_begun:
            self.begin()
        self._copy_segments(partition.segments, UNBOUNDED)
        self._copy_small_files()
        checkpoint.write_partition_metadata(
            self.directory, partition.topic_id, partition.dense_from, moved
        )
        checkpoint.sync_directory(self.directory)

    def segments(self, directory: Path) -> list[Segment]:
        """After `complete`: the segments of the log in `directory`, which the copy becomes.  It may
        read indexes of the old ones."""
        out = []
        for old in self.partition.segments:
            size, end_offset = old.extent()
            new = Segment(
                directory,
                old.base_offset,
                size=size,
                end_offset=end_offset,
                sealed=old.sealed,
                max_timestamp=old.max_timestamp,
                dense_from=old.dense_from,
            )
            new.synced = new.sealed
            out.append(new)
        return out

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def missing_bytes(self) -> int:
        """How many bytes of records are not copied.  Any thread."""
        copies = dict(self._copies)
        there = [(s.size, copies.get(s)) for s in self.partition.segments]
        return sum(size - min(size, copy.at if copy else 0) for size, copy in there)

    @property
    def end_offset(self) -> int:
        """About where the copy ends.  Any thread."""
        copies = dict(self._copies)
        for segment in self.partition.segments:
            copy = copies.get(segment)
            size, end = segment.extent()
            if copy is None or copy.at < size:
                share = copy.at / size if copy is not None else 0
                return segment.base_offset + int((end - segment.base_offset) * share)
        return self.partition.log_end_offset

    # -- copying -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the directory, on disk, with the identity that a start asks for.  Nothing of an
        earlier attempt counts.  OSError."""
        self.has_begun, self._copies, self._small = False, {}, {}
        self.directory.mkdir(exist_ok=True)
        partition = self.partition
        checkpoint.write_partition_metadata(
            self.directory, partition.topic_id, partition.dense_from
        )
        checkpoint.sync_directory(self.parent)
        for left in os.scandir(self.directory):  # after that: a kill forgets no move
            if left.is_dir(follow_symlinks=False):
                shutil.rmtree(left.path)
            elif left.name != checkpoint.PARTITION_METADATA:
                os.unlink(left.path)
        self.has_begun = True

    def _copy_segments(self, finished: Collection[Segment], most_bytes: int) -> int:
        """`finished`: those whose indexes change no more."""
        segments = self.partition.segments
        for gone in self._copies.keys() - set(segments):
            self._copies.pop(gone).remove()
        left = most_bytes
        for segment in segments:
            copy = self._copies.get(segment)
            if copy is None:
                copy = self._copies[segment] = _SegmentCopy(segment, self.directory)
            if copy.is_done:
                continue
            copied = copy.go_on(left)
            self.copied_bytes += copied
            left -= copied
            if segment in finished and copy.at == segment.size:
                copy.finish(is_final=segment.sealed)
            if left <= 0:
                break
        return most_bytes - left

    def _copy_small_files(self) -> None:
        """Snapshots of producers, leader epochs, properties of the topic, and whatever else lies
        there; those that have changed."""
        source = self.partition.directory
        found = {name for name in os.listdir(source) if _is_small(name)}
        for gone in self._small.keys() - found:
            del self._small[gone]
            (self.directory / gone).unlink(missing_ok=True)
        for name in sorted(found):
            stat = os.stat(source / name)
            signature = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if self._small.get(name) == signature:
                continue
            path = self.directory / name
            shutil.copyfile(source / name, path)
            _sync(path)
            self._small[name] = signature


class _SegmentCopy:
    """One segment's files.  `at`: so many bytes of records are copied, and on disk."""

    def __init__(self, segment: Segment, directory: Path) -> None:
        self.at = 0
        self.is_done = False  # with its indexes, and it gets no more records
        self._segment = segment
        self._directory = directory
        self._path = directory / file_name(segment.base_offset, LOG_SUFFIX)
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))

    def go_on(self, most_bytes: int) -> int:
        """Copy records; how many bytes."""
        segment = self._segment
        wanted = min(segment.size - self.at, most_bytes)
        if wanted <= 0:
            return 0
        start, stop = self.at, self.at + wanted
        segment.acquire()
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.lseek(fd, start, os.SEEK_SET)
                at = start
                while at < stop:
                    sent = os.sendfile(fd, segment.fd, at, stop - at)
                    if sent == 0:
                        raise LogError(
                            f"{segment.path} is shorter than its {stop} bytes of records",
                            hint="restore the partition from a good copy",
                        )
                    at += sent
                os.fdatasync(fd)
            finally:
                os.close(fd)
        finally:
            segment.release()
        self.at = stop
        return wanted

    def finish(self, *, is_final: bool) -> None:
        """The records are copied: copy the indexes, and when the file was last written, which
        retention asks for where records have no time."""
        segment = self._segment
        for index in (segment.offset_index, segment.time_index):
            copied = self._directory / index.path.name
            if index.path.exists():
                shutil.copyfile(index.path, copied)
                _sync(copied)
        written = os.stat(segment.path).st_mtime_ns
        os.utime(self._path, ns=(written, written))
        self.is_done = is_final

    def remove(self) -> None:
        """The segment is not in the log any more."""
        for suffix in SUFFIXES:
            path = self._directory / file_name(self._segment.base_offset, suffix)
            path.unlink(missing_ok=True)


def _is_small(name: str) -> bool:
    return name != checkpoint.PARTITION_METADATA and not name.endswith((*SUFFIXES, *_UNFINISHED))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_replica(moved: checkpoint.Moved | None) -> checkpoint.Moved:
    """What is noted of a replica before its first move."""
    return moved if moved is not None else checkpoint.Moved(uuid.uuid4(), 0)


__all__ = ["FUTURE_DIRECTORY", "NAME_BYTES", "FutureCopy", "future_name", "new_replica"]
