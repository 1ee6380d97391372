"""The files of a head: allocated before they are needed, named when they are.

Law of the room: a head's files exist, with real bytes, before the old head is sealed, so that a
full disk is an error that can be told while the old head goes on.  Until `publish` they have
temporary names that the next start sweeps away.  How many bytes there are to begin with is
`kdirect.log.growth`'s business.

A partition that fills heads quickly gets a *spare*: the next head's files, allocated whole and
faulted in on a thread of its own while the present head fills, because zeroing pages takes as long
as filling them.  A spare is only made where plenty of space is left, and given back when it has not
been used for a while.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from pathlib import Path

from kdirect.errors import KdirectError, LogError, StorageFullError
from kdirect.huge_pages import allocate_huge
from kdirect.log.config import NEVER, LogConfig, whole_pages
from kdirect.log.growth import BUSY_S, head_bytes
from kdirect.log.index import OffsetIndex, TimeIndex
from kdirect.log.mapped import Mapping
from kdirect.log.segment import LOG_SUFFIX, SUFFIXES, TEMPORARY_SUFFIX, Segment, file_name

log = logging.getLogger("kdirect.log")

# A head that was filled faster than this gets a spare behind it; one that is not used for so long
# is given back.
SPARE_WITHIN_S = BUSY_S
# A spare may take one part in so many of the free space.
SPARE_SHARE = 8
# How much of a spare is faulted in before the thread looks whether it is wanted already.
POPULATE_BYTES = 1 << 20

_numbers = itertools.count()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def storage_full(directory: Path, need_bytes: int, cause: OSError) -> StorageFullError:
    """What to raise when files of `need_bytes` cannot be allocated in `directory`."""
    try:
        stat = os.statvfs(directory)
        free = f"{stat.f_bavail * stat.f_frsize} bytes are free"
    except OSError:
        free = "free space is unknown"
    return StorageFullError(
        f"no space in {directory} for {need_bytes} bytes of a segment"
        f" ({os.strerror(cause.errno or 0)}; {free})",
        hint="free space, lower log.segment.bytes or retention,"
        " or put log.dirs on a larger file system",
    )


def cannot_allocate(directory: Path, need_bytes: int, cause: OSError) -> LogError:
    """What to raise when `need_bytes` of files in `directory` could not be allocated:
    StorageFullError where that is why."""
    if cause.errno in _FULL:
        return storage_full(directory, need_bytes, cause)
    return LogError(
        f"cannot allocate a segment in {directory}: {cause}",
        hint="check that the directory exists and is writable",
    )


def allocate(path: Path, length: int, *, huge: bool = False) -> int:
    """Create `path` with `length` real bytes (`posix_fallocate`), in huge pages where `huge` and
    there are any; the descriptor.  OSError leaves no file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if huge:
            allocate_huge(fd, length)
        os.posix_fallocate(fd, 0, length)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


class PreparedHead:
    """Files of a head to come, under temporary names: `capacity` bytes of it exist (None:
    all).  `publish` names them; `discard` removes them.  One thread at a time.  `is_pulled`: a
    segment of just that length is copied into it, and so will the next one be: no spare is made."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        *,
        capacity: int | None = None,
        name: str = "head",
        is_pulled: bool = False,
    ) -> None:
        self.directory = directory
        self.config = config
        self.is_pulled = is_pulled
        # Several may exist at a time: a spare, and one that was granted ahead.
        self.name = f"{name}-{next(_numbers)}"
        self._fd = -1
        self._published = False
        self._withdrawn: Segment | None = None
        self._mapping: Mapping | None = None
        self._indexes = (
            OffsetIndex(self._temporary(OffsetIndex.suffix)),
            TimeIndex(self._temporary(TimeIndex.suffix)),
        )
        whole = head_bytes(config, config.segment_bytes)
        self._bytes = (
            whole if capacity is None else head_bytes(config, min(capacity, config.segment_bytes))
        )
        try:
            self._fd = allocate(self._temporary(LOG_SUFFIX), self._bytes.log, huge=True)
            self._mapping = Mapping(self._fd, whole.log, writable=True)
            for index, length, reserve in zip(
                self._indexes, self._bytes[1:], whole[1:], strict=True
            ):
                index.extend(length, reserve, empty=True)
        except OSError as e:
            self.discard()
            raise cannot_allocate(directory, sum(self._bytes), e) from e
        except KdirectError:
            self.discard()
            raise

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def address(self) -> int:
        """Of its first byte, until it is published or discarded."""
        return self._mapping.address if self._mapping is not None else 0

    @property
    def length(self) -> int:
        """Bytes of it that are mapped and exist."""
        return min(self._mapping.length, self._bytes.log) if self._mapping is not None else 0

    def _temporary(self, suffix: str) -> Path:
        return self.directory / f"{self.name}{suffix}{TEMPORARY_SUFFIX}"

    def populate(self, stop: threading.Event) -> None:
        """Fault the pages in, until `stop`, so that the first writes do not have to.  Where the log
        is synced as it grows the pages stay clean, or the first sync would write the whole file."""
        assert self._mapping is not None
        config = self.config
        dirty = not config.flush_before_ack and config.flush_messages == config.flush_ms == NEVER
        for position in range(0, self._mapping.length, POPULATE_BYTES):
            if stop.is_set():
                break
            self._mapping.populate(position, POPULATE_BYTES, dirty=dirty)

    def publish(self, base_offset: int) -> Segment:
        """Give the files their names; an acquired Segment, not yet known to the kernel."""
        assert self._mapping is not None
        for suffix in reversed(
            SUFFIXES
        ):  # the log last: an index without a log is swept away, a log without an index rebuilt
            os.rename(self._temporary(suffix), self.directory / file_name(base_offset, suffix))
        segment = Segment(self.directory, base_offset)
        for index in self._indexes:
            index.path = self.directory / file_name(base_offset, index.suffix)
        segment.offset_index, segment.time_index = self._indexes
        segment.adopt(self._mapping, self._fd, self._bytes.log)
        self._mapping, self._fd = None, -1
        self._published = True  # its indexes are the segment's, too
        return segment.acquire()

    def withdraw(self, segment: Segment) -> None:
        """What `publish` returned does not become the head: its files go now, its memory with
        `discard`."""
        segment.delete()
        self._withdrawn = segment

    def discard(self) -> None:
        """Remove what has not been published, or was withdrawn; again, or after `publish`: nothing
        to do."""
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None:
            withdrawn.release()
        if self._published:
            return
        if self._mapping is not None:
            self._mapping.unmap()
            self._mapping = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for index in self._indexes:
            index.close()
        for suffix in SUFFIXES:
            self._temporary(suffix).unlink(missing_ok=True)


class SpareHead:
    """The spare of one partition.  `start`, `take`, `give_back` are called under the partition's
    roll lock; the work is done on a thread that ends with it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread: threading.Thread | None = None
        self._prepared: PreparedHead | None = None
        self._wanted = threading.Event()
        self._ready_at = 0.0

    def start(self, config: LogConfig) -> None:
        """Begin to prepare, unless that is under way or the disk is getting full."""
        if self._thread is not None or self._prepared is not None:
            return
        try:
            stat = os.statvfs(self._directory)
        except OSError:
            return
        if config.segment_bytes * SPARE_SHARE > stat.f_bavail * stat.f_frsize:
            return
        self._wanted.clear()
        thread = threading.Thread(
            target=self._prepare, args=(config,), name="kdirect-spare-head", daemon=True
        )
        try:
            thread.start()
        except (
            RuntimeError
        ) as e:  # a limit on threads or processes; the next head is made when it is needed
            log.debug("no spare head in %s: %s", self._directory, e)
            return
        self._thread = thread

    def _prepare(self, config: LogConfig) -> None:
        prepared = None
        try:
            prepared = PreparedHead(self._directory, config, name="spare")
            prepared.populate(self._wanted)
        except (KdirectError, OSError) as e:
            log.debug("no spare head in %s: %s", self._directory, e)
        self._ready_at = time.monotonic()
        self._prepared = prepared

    def take(self, config: LogConfig) -> PreparedHead | None:
        """The spare, if there is one for these sizes; one that is being made is taken as soon as
        its files exist."""
        self._join()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.config != config:
            prepared.discard()
            return None
        return prepared

    def give_back(self, *, unused_for_s: float = 0.0) -> None:
        """Remove a spare that has been ready for so long."""
        if unused_for_s and self._thread is not None and self._thread.is_alive():
            return
        self._join()
        if self._prepared is not None and time.monotonic() - self._ready_at >= unused_for_s:
            self._prepared.discard()
            self._prepared = None

    def _join(self) -> None:
        if self._thread is not None:
            self._wanted.set()
            self._thread.join()
            self._thread = None


def reopen_as_head(old: Segment, config: LogConfig, room: int) -> Segment:
    """Allocate `room` bytes behind the last segment's records; a new, acquired Segment for its
    file, which may grow to what `config` says.  `old` is untouched (supersede it after the new one
    is published).  StorageFullError leaves the file as it was."""
    new = Segment(
        old.directory,
        old.base_offset,
        size=old.size,
        end_offset=old.end_offset,
        dense_from=old.dense_from,
    )
    new.keep_length = old.keep_length
    whole = head_bytes(config, max(config.segment_bytes, whole_pages(old.size)))
    wanted = head_bytes(config, min(whole.log, max(old.size + room, 1)))
    paths = (old.path, new.offset_index.path, new.time_index.path)
    before = {path: path.stat().st_size for path in paths if path.exists()}
    fd = os.open(old.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, wanted.log)
        new.offset_index.extend(wanted.offset_index, whole.offset_index)
        new.time_index.extend(wanted.time_index, whole.time_index)
        new.adopt(Mapping(fd, whole.log, writable=True), fd, wanted.log, os.fstat(fd).st_size)
    except (OSError, KdirectError) as e:
        os.close(fd)
        new.offset_index.close()
        new.time_index.close()
        for path in paths:
            if path in before:
                os.truncate(path, before[path])
            else:
                path.unlink(missing_ok=True)
        if isinstance(e, KdirectError):
            raise
        raise cannot_allocate(old.directory, sum(wanted) - before[old.path], e) from e
    return new.acquire()
