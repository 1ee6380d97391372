"""Cutting a segment short: the file work of `Partition.truncate_to`.

Law of the room: the old file is not touched.  What is kept of it is copied to new files under
temporary names, which take the old names in one rename each; whoever has the old file mapped goes
on reading it, and a producer that still has it mapped writes where nobody looks.  A crash before
the rename leaves the old file (and temporary ones, which the next start removes), one after it the
new.

Cost: the kept bytes of one segment are copied.  Logs are cut rarely, when a replica finds that it
has records that its leader does not have.
"""

from __future__ import annotations

import os
from pathlib import Path

from kdirect.log.checkpoint import sync_directory
from kdirect.log.config import LogConfig
from kdirect.log.head import cannot_allocate
from kdirect.log.scan import scan_segment
from kdirect.log.segment import TEMPORARY_SUFFIX, Segment

_NEVER = (1 << 63) - 1


def copy_start(source: int, target: int, size: int) -> None:
    """Copy the first `size` bytes of a file to an empty one, by their descriptors, to the disk.
    OSError."""
    at = 0
    while at < size:
        sent = os.sendfile(target, source, at, size - at)
        if sent == 0:
            raise OSError(f"the file is shorter than {size} bytes")
        at += sent
    os.fsync(target)


class CutSegment:
    """The first `size` bytes of a segment, which end before `end_offset`, in files of their own.

    Life: construct (file work; StorageFullError leaves nothing behind), then `publish` once, or
    `discard`."""

    def __init__(self, old: Segment, size: int, end_offset: int, config: LogConfig) -> None:
        self._old = old
        self._paths: list[tuple[Path, Path]] = []  # temporary, final
        old.acquire()
        try:
            scanned = scan_segment(
                old.address, size, old.base_offset, _NEVER, config.index_interval_bytes
            )
            self._copy(old.path, size)
            self._write(old.offset_index.path, scanned.offset_index)
            self._write(old.time_index.path, scanned.time_index)
        except BaseException as e:
            self.discard()
            if isinstance(e, OSError):
                raise cannot_allocate(old.directory, size, e) from e
            raise
        finally:
            old.release()
        self.segment = Segment(
            old.directory,
            old.base_offset,
            size=size,
            end_offset=end_offset,
            max_timestamp=scanned.max_timestamp,
            dense_from=old.dense_from,
        )

    def _create(self, path: Path) -> int:
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._paths.append((temporary, path))
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def _copy(self, path: Path, size: int) -> None:
        fd = self._create(path)
        try:
            copy_start(self._old.fd, fd, size)
        finally:
            os.close(fd)

    def _write(self, path: Path, data: bytes) -> None:
        fd = self._create(path)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def publish(self) -> None:
        """Put the new files in place of the old ones, and make that durable."""
        for temporary, path in self._paths:
            os.rename(temporary, path)
        sync_directory(self._old.directory)

    def discard(self) -> None:
        """Remove the new files; the old ones stay what they are."""
        for temporary, _ in self._paths:
            temporary.unlink(missing_ok=True)
