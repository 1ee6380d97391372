"""Offset index and time index of a segment: Kafka's files, mapped.

Law of the room: an index file is a sorted array of fixed entries (`kdirect.format.layout`):
big-endian ``u32 relative offset, u32 position`` or ``i64 timestamp, u32 relative offset``.  The
offset of an entry is the last offset of the batch at its position, as in Kafka.  Indexes save time
and hold no truth: whatever is wrong with one, it is rebuilt from the segment.

The head's indexes are allocated in steps, mapped once for all steps, and written by the commit
kernel, which also counts their entries; an index of a sealed segment is trimmed and mapped
read-only while its segment is mapped.
"""

from __future__ import annotations

import os
from pathlib import Path

from kdirect.format import layout
from kdirect.log.mapped import (
    Mapping,
    search_offset_index,
    search_offset_index_position,
    search_time_index,
    time_index_entry,
)


class IndexFile:
    """One mapped index file.  Life: `open` (read-only) or `extend` (allocated, writable), then
    `close`. Guarded by its segment's lock; `grow`, `shrink` and `trim` by the partition's roll
    lock."""

    entry_bytes = 1
    suffix = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapping: Mapping | None = None
        self.entries = 0
        self._allocated = (
            0  # bytes that may be touched; the mapping of a head's index reaches further
        )

    @property
    def address(self) -> int:
        return self.mapping.address if self.mapping is not None else 0

    @property
    def capacity(self) -> int:
        """Entries that the mapped file has room for."""
        return self._allocated // self.entry_bytes if self.mapping is not None else 0

    def open(self) -> None:
        """Map what there is, for reading.  A missing file is an empty index."""
        if self.mapping is not None:
            return
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.entries = 0
            return
        try:
            length = os.fstat(fd).st_size
            self.mapping = Mapping(fd, length)
            self.entries = length // self.entry_bytes
            self._allocated = length
        finally:
            os.close(fd)

    def extend(self, capacity_bytes: int, reserve_bytes: int = 0, *, empty: bool = False) -> None:
        """Allocate `capacity_bytes` and map them for writing, with addresses for `reserve_bytes`;
        the entries that are there stay, none with `empty`.  OSError when the disk is full."""
        self.close()
        fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0), 0o644
        )
        try:
            length = os.fstat(fd).st_size
            self.entries = 0 if empty else length // self.entry_bytes
            capacity_bytes = max(capacity_bytes, (self.entries + 2) * self.entry_bytes)
            os.posix_fallocate(fd, 0, capacity_bytes)
            self.mapping = Mapping(fd, max(capacity_bytes, reserve_bytes), writable=True)
            self._allocated = capacity_bytes
        except OSError:
            os.ftruncate(fd, length)
            raise
        finally:
            os.close(fd)

    def grow(self, capacity_bytes: int) -> None:
        """Allocate more of what is mapped.  OSError when the disk is full: then nothing has
        changed."""
        assert self.mapping is not None
        capacity_bytes = min(capacity_bytes, self.mapping.length)
        if capacity_bytes <= self._allocated:
            return
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, self._allocated, capacity_bytes - self._allocated)
        except OSError:
            os.ftruncate(fd, self._allocated)
            raise
        finally:
            os.close(fd)
        self._allocated = capacity_bytes

    def shrink(self, capacity_bytes: int) -> None:
        """Free what lies behind `capacity_bytes`, which the kernel does not use any more."""
        if capacity_bytes < self._allocated:
            self._allocated = capacity_bytes
            os.truncate(self.path, capacity_bytes)

    def detach(self) -> Mapping | None:
        """Forget the mapping, which the caller unmaps."""
        mapping, self.mapping = self.mapping, None
        return mapping

    def trim(self, entries: int) -> None:
        """Shorten the file to `entries` entries.  Readers of those entries may go on through the
        mapping."""
        self.entries = entries
        os.truncate(self.path, entries * self.entry_bytes)

    def close(self) -> None:
        if self.mapping is not None:
            self.mapping.unmap()
            self.mapping = None


class OffsetIndex(IndexFile):
    """Relative offset -> position."""

    entry_bytes = layout.OFFSET_INDEX_ENTRY_BYTES
    suffix = ".index"

    def lookup(self, relative_offset: int, entries: int) -> tuple[int, int]:
        """(position, last relative offset) of an indexed batch at or before the one that holds
        `relative_offset`; (0, -1): none is."""
        return (
            search_offset_index(self.address, entries, relative_offset) if self.address else (0, -1)
        )

    def lookup_position(self, position: int, entries: int) -> tuple[int, int]:
        """The same of the last indexed batch that starts at `position` or before."""
        return (
            search_offset_index_position(self.address, entries, position)
            if self.address
            else (0, -1)
        )


class TimeIndex(IndexFile):
    """Timestamp -> relative offset."""

    entry_bytes = layout.TIME_INDEX_ENTRY_BYTES
    suffix = ".timeindex"

    def lookup(self, timestamp_ms: int, entries: int) -> int:
        """A relative offset up to which every record is older than `timestamp_ms`."""
        return search_time_index(self.address, entries, timestamp_ms) if self.address else 0

    def last(self) -> tuple[int, int] | None:
        """(largest timestamp, its relative offset) of the segment, once it is sealed."""
        if not self.address or not self.entries:
            return None
        return time_index_entry(self.address, self.entries - 1)
