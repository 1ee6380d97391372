"""The files of a head: allocated before they are needed, named when they are.

Law of the room: a head's files exist whole, with real bytes, before the old head is sealed, so that a full disk is
an error that can be told while the old head goes on.  Until `publish` they have temporary names that the next
start sweeps away.

A partition that fills heads quickly gets a *spare*: the next head's files, allocated and faulted in on a thread
of its own while the present head fills, because zeroing pages takes as long as filling them.  A spare is
only made where plenty of space is left, and given back when it has not been used for a while.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path

from kdirect.errors import KdirectError, LogError, StorageFullError
from kdirect.log.config import NEVER, LogConfig, whole_pages
from kdirect.log.index import OffsetIndex, TimeIndex
from kdirect.log.mapped import Mapping, allocate_huge
from kdirect.log.segment import LOG_SUFFIX, SUFFIXES, TEMPORARY_SUFFIX, Segment, file_name

log = logging.getLogger("kdirect.log")

# A head that was filled faster than this gets a spare behind it; one that is not used for so long is given back.
SPARE_WITHIN_S = 10.0
# A spare may take one part in so many of the free space.
SPARE_SHARE = 8
# How much of a spare is faulted in before the thread looks whether it is wanted already.
POPULATE_BYTES = 1 << 20

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def storage_full(directory: Path, need_bytes: int, cause: OSError) -> StorageFullError:
    """What to raise when files of `need_bytes` cannot be allocated in `directory`."""
    try:
        stat = os.statvfs(directory)
        free = f"{stat.f_bavail * stat.f_frsize} bytes are free"
    except OSError:
        free = "free space is unknown"
    return StorageFullError(
        f"no space in {directory} for {need_bytes} bytes of a new segment ({os.strerror(cause.errno or 0)}; {free})",
        hint="free space, lower log.segment.bytes or retention, or put log.dirs on a larger file system",
    )


def allocate(path: Path, length: int, *, huge: bool = False) -> int:
    """Create `path` with `length` real bytes (`posix_fallocate`), in huge pages where `huge` and there are any; the descriptor.  OSError
    leaves no file."""
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
    """Files of a head to come, under temporary names.  `publish` names them; `discard` removes them.  One thread at a
    time."""

    def __init__(self, directory: Path, config: LogConfig, *, name: str = "head") -> None:
        self.directory = directory
        self.config = config
        self.name = name
        self._lengths = dict(zip(SUFFIXES, (config.segment_bytes, config.offset_index_bytes, config.time_index_bytes), strict=True))
        self._fd = -1
        self._mapping: Mapping | None = None
        try:
            for suffix, length in self._lengths.items():
                fd = allocate(self._temporary(suffix), length, huge=suffix == LOG_SUFFIX)
                if suffix == LOG_SUFFIX:
                    self._fd = fd
                else:
                    os.close(fd)
            self._mapping = Mapping(self._fd, config.segment_bytes, writable=True)
        except OSError as e:
            self.discard()
            if e.errno in _FULL:
                raise storage_full(directory, sum(self._lengths.values()), e) from e
            raise LogError(f"cannot create a segment in {directory}: {e}", hint="check that the directory exists and is writable") from e
        except KdirectError:
            self.discard()
            raise

    def _temporary(self, suffix: str) -> Path:
        return self.directory / f"{self.name}{suffix}{TEMPORARY_SUFFIX}"

    def populate(self, stop: threading.Event) -> None:
        """Fault the pages in, until `stop`, so that the first writes do not have to.  Where the log is synced as it grows the pages
        stay clean, or the first sync would write the whole file."""
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
        for suffix in reversed(SUFFIXES):  # the log last: an index without a log is swept away, a log without an index rebuilt
            os.rename(self._temporary(suffix), self.directory / file_name(base_offset, suffix))
        segment = Segment(self.directory, base_offset)
        segment.adopt(self._mapping, self._fd)
        self._mapping, self._fd = None, -1
        segment.acquire()
        segment.offset_index.extend(self._lengths[OffsetIndex.suffix], empty=True)
        segment.time_index.extend(self._lengths[TimeIndex.suffix], empty=True)
        return segment

    def discard(self) -> None:
        """Remove what has not been published; again: nothing to do."""
        if self._mapping is not None:
            self._mapping.unmap()
            self._mapping = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for suffix in self._lengths:
            self._temporary(suffix).unlink(missing_ok=True)


class SpareHead:
    """The spare of one partition.  `start`, `take`, `give_back` are called under the partition's roll lock; the work
    is done on a thread that ends with it."""

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
        self._thread = threading.Thread(target=self._prepare, args=(config,), name="kdirect-spare-head", daemon=True)
        self._thread.start()

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
        """The spare, if there is one for these sizes; one that is being made is taken as soon as its files exist."""
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


def reopen_as_head(old: Segment, config: LogConfig) -> Segment:
    """Preallocate the last segment's file again; a new, acquired Segment for it.  `old` is untouched (supersede it after
    the new one is published).  StorageFullError leaves the file as it was."""
    new = Segment(old.directory, old.base_offset, size=old.size, end_offset=old.end_offset, dense_from=old.dense_from)
    length = max(config.segment_bytes, whole_pages(old.size))
    paths = (old.path, new.offset_index.path, new.time_index.path)
    before = {path: path.stat().st_size for path in paths if path.exists()}
    fd = os.open(old.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        allocate_huge(fd, length)
        os.posix_fallocate(fd, 0, length)
        new.offset_index.extend(config.offset_index_bytes)
        new.time_index.extend(config.time_index_bytes)
    except OSError as e:
        new.offset_index.close()
        new.time_index.close()
        for path in paths:
            if path in before:
                os.truncate(path, before[path])
            else:
                path.unlink(missing_ok=True)
        if e.errno in _FULL:
            need = length - before[old.path] + config.offset_index_bytes + config.time_index_bytes
            raise storage_full(old.directory, need, e) from e
        raise LogError(f"cannot allocate {old.path}: {e}", hint="check the file's permissions") from e
    finally:
        os.close(fd)
    new.acquire()
    new.map(writable=True)
    return new
