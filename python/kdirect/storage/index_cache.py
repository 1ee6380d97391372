"""Indexes of remote segments in files: ``remote-log-index-cache/`` in a log directory.

Owns: that directory, and which indexes are kept there.  The files have Kafka's names, base offset,
segment id and the suffix of each index, and Kafka's formats::

    45_hhZdc2ymRmONGRiVD3nXnQ.index   .timeindex   .txnindex   .sums

``.sums`` is ours, for Kafka's indexes have no checksums: little-endian, "KDINDEX1", base offset,
end offset and bytes of the segment (u64 each), length (u64) and CRC-32C (u32) of each of the three,
then the CRC-32C of all that.  It is written last, so files without it are the rest of a crash.

Laws: nothing that lies here is believed.  Files are compared with their sums when they are opened,
and looked at as indexes of the segment that is asked for; what is damaged is removed and fetched
again.  What cannot be written is served from memory.  Files are written under temporary names and
never changed: an entry that is removed stays readable for who has it.  Nothing is synced, because
sums tell what a crash left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kdirect.errors import FormatError, LogError
from kdirect.format.batch import crc32c
from kdirect.format.ids import decode_id, encode_id
from kdirect.format.remote_metadata import RemoteSegment
from kdirect.format.segment_object import Section
from kdirect.log.mapped import MappedBytes
from kdirect.log.mapped import Mapping as MappedFile
from kdirect.storage.flights import Flights
from kdirect.storage.segment_indexes import Part, SegmentIndexes

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("kdirect.storage")

SUFFIXES: Mapping[Section, str] = {
    Section.OFFSET_INDEX: ".index",
    Section.TIME_INDEX: ".timeindex",
    Section.TRANSACTION_INDEX: ".txnindex",
}
SUMS_SUFFIX = ".sums"
TEMPORARY_SUFFIX = ".tmp"
OPEN_ENTRIES = 256  # each has three mappings
LOOSE_ENTRIES = 16  # in memory, because they cannot be written
_SUMS = struct.Struct("<8sQQQ QIQIQI I")
_MAGIC = b"KDINDEX1"
_STEM = re.compile(r"(0|[1-9][0-9]{0,18})_([A-Za-z0-9_-]{22})\Z")

Sections = Mapping[Section, "Buffer"]


class _Entry(NamedTuple):
    stem: str
    size: int


class _DamagedError(Exception):
    """What is wrong with the files of an entry."""


class IndexCache:
    """Kept in `directory`, with `max_bytes` of files at most; what was used least recently goes
    first.  Any thread that may wait for a disk may call."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[uuid.UUID, _Entry] = OrderedDict()
        self._open: OrderedDict[uuid.UUID, SegmentIndexes] = OrderedDict()
        self._loose: OrderedDict[uuid.UUID, SegmentIndexes] = OrderedDict()  # without files
        self._flights: Flights[uuid.UUID, SegmentIndexes] = Flights()
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._damaged = 0
        self._failure_told = False
        self._find_files()

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._entries or segment_id in self._loose

    def get(self, segment: RemoteSegment, load: Callable[[], Sections]) -> SegmentIndexes:
        """The indexes of a segment.  Unless they are here or on their way, `load` brings them,
        whose errors pass; FormatError for what it brings, if that is no index of the segment."""
        with self._lock:
            found = self._find_open(segment.segment_id)
            if found is not None:
                self._hits += 1
                return found
        return self._flights.join(segment.segment_id, lambda: self._bring(segment, load))

    def remove(self, segment_id: uuid.UUID) -> None:
        """Keep nothing of a segment: it is gone."""
        with self._lock:
            self._drop(segment_id)

    def retain(self, segment_ids: Container[uuid.UUID]) -> None:
        """Keep those of these segments only."""
        with self._lock:
            for segment_id in [s for s in {*self._entries, *self._loose} if s not in segment_ids]:
                self._drop(segment_id)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "remote_index_hits": self._hits,
                "remote_index_misses": self._misses,
                "remote_index_damaged": self._damaged,
                "remote_index_bytes": self._bytes,
            }

    # -- entries -----------------------------------------------------------------------------------

    def _bring(self, segment: RemoteSegment, load: Callable[[], Sections]) -> SegmentIndexes:
        with self._lock:
            found = self._find_open(segment.segment_id)
            entry = self._entries.get(segment.segment_id)
        if found is None and entry is not None:
            try:
                found = self._open_files(segment, entry)
            except (_DamagedError, OSError, LogError) as e:
                log.warning(
                    "the indexes %s in %s are damaged and are fetched again: %s",
                    entry.stem,
                    self.directory,
                    e,
                )
                with self._lock:
                    self._damaged += 1
                    self._drop(segment.segment_id)
        with self._lock:
            self._hits += found is not None
            self._misses += found is None
        if found is None:
            found = self._store(segment, load())
        with self._lock:
            self._touch(segment.segment_id)
            kept = segment.segment_id in self._entries
            opened, most = (self._open, OPEN_ENTRIES) if kept else (self._loose, LOOSE_ENTRIES)
            opened[segment.segment_id] = found
            while len(opened) > most:
                opened.popitem(last=False)
        return found

    def _find_open(self, segment_id: uuid.UUID) -> SegmentIndexes | None:
        self._touch(segment_id)
        for opened in (self._open, self._loose):
            if segment_id in opened:
                opened.move_to_end(segment_id)
                return opened[segment_id]
        return None

    def _touch(self, segment_id: uuid.UUID) -> None:
        if segment_id in self._entries:
            self._entries.move_to_end(segment_id)

    def _drop(self, segment_id: uuid.UUID) -> None:
        self._open.pop(segment_id, None)
        self._loose.pop(segment_id, None)
        entry = self._entries.pop(segment_id, None)
        if entry is not None:
            self._bytes -= entry.size
            self._unlink(entry.stem)

    # -- files -------------------------------------------------------------------------------------

    def _find_files(self) -> None:
        """What another process has left.  It is looked into when it is asked for."""
        found: dict[str, dict[str, os.stat_result]] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for item in os.scandir(self.directory):
                stem, dot, suffix = item.name.partition(".")
                found.setdefault(stem, {})[dot + suffix] = item.stat(follow_symlinks=False)
        except OSError as e:
            log.warning("cannot read %s, so no indexes are kept: %s", self.directory, e)
        whole = {*SUFFIXES.values(), SUMS_SUFFIX}
        used: list[tuple[int, uuid.UUID, _Entry]] = []
        for stem, files in found.items():
            match = _STEM.match(stem)
            if match is None:
                continue  # nobody knows whose file it is
            try:
                segment_id = decode_id(match[2])
            except FormatError:
                continue
            if files.keys() == whole:
                size = sum(stat.st_size for stat in files.values())
                used.append((files[SUMS_SUFFIX].st_mtime_ns, segment_id, _Entry(stem, size)))
            else:
                self._unlink(stem, files)
        for _, segment_id, entry in sorted(used):
            self._add(segment_id, entry)

    def _add(self, segment_id: uuid.UUID, entry: _Entry) -> None:
        self._drop(segment_id)
        self._entries[segment_id] = entry
        self._bytes += entry.size
        while self._bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def _unlink(self, stem: str, suffixes: Container[str] | None = None) -> None:
        for suffix in (SUMS_SUFFIX, *SUFFIXES.values()):
            for name in (stem + suffix, stem + suffix + TEMPORARY_SUFFIX):
                with contextlib.suppress(OSError):
                    (self.directory / name).unlink(missing_ok=True)

    def _open_files(self, segment: RemoteSegment, entry: _Entry) -> SegmentIndexes:
        if entry.stem != _stem(segment):
            raise _DamagedError("their base offset is another one")
        stem = self.directory / entry.stem
        raw = stem.with_name(stem.name + SUMS_SUFFIX).read_bytes()
        if len(raw) != _SUMS.size or crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
            raise _DamagedError(f"{SUMS_SUFFIX} has a wrong CRC or length")
        magic, *facts = _SUMS.unpack(raw)
        if magic != _MAGIC or facts[:3] != _facts(segment):
            raise _DamagedError(f"{SUMS_SUFFIX} tells of another segment")
        parts = []
        for i, suffix in enumerate(SUFFIXES.values()):
            length, crc = facts[3 + 2 * i : 5 + 2 * i]
            part = _map(stem.with_name(stem.name + suffix))
            if part.length != length or crc32c(part.data) != crc:
                raise _DamagedError(f"{suffix} has a wrong CRC or length")
            parts.append(part)
        with contextlib.suppress(OSError):
            os.utime(stem.with_name(stem.name + SUMS_SUFFIX))
        found = SegmentIndexes(segment, *parts)
        if not found.are_sane():
            raise _DamagedError("entries do not rise, or leave the segment")
        return found

    def _store(self, segment: RemoteSegment, sections: Sections) -> SegmentIndexes:
        """Indexes that came from the store, kept if they can be."""
        data = [memoryview(sections[section]).cast("B") for section in SUFFIXES]
        found = SegmentIndexes(segment, *(_in_memory(part) for part in data))
        if not found.are_sane():
            raise FormatError("entries of its indexes do not rise, or leave the segment")
        sums = [x for part in data for x in (len(part), crc32c(part))]
        raw = _SUMS.pack(_MAGIC, *_facts(segment), *sums, 0)[:-4]
        raw += crc32c(raw).to_bytes(4, "little")
        entry = _Entry(_stem(segment), sum(map(len, data)) + len(raw))
        if entry.size > self.max_bytes:
            return found
        written: list[Buffer] = [*data, raw]
        try:
            for suffix, part in zip((*SUFFIXES.values(), SUMS_SUFFIX), written, strict=True):
                path = self.directory / (entry.stem + suffix)
                temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
                temporary.write_bytes(part)
                temporary.rename(path)
            kept = self._open_files(segment, entry)
            with self._lock:
                self._add(segment.segment_id, entry)
                self._failure_told = False
            return kept
        except (_DamagedError, OSError, LogError) as e:
            if not self._failure_told:
                self._failure_told = True
                log.warning("cannot keep the indexes %s in %s: %s", entry.stem, self.directory, e)
            self._unlink(entry.stem)
            return found


def _stem(segment: RemoteSegment) -> str:
    """As Kafka names them: the base offset has no leading zeros."""
    return f"{segment.base_offset}_{encode_id(segment.segment_id)}"


def _facts(segment: RemoteSegment) -> list[int]:
    return [segment.base_offset, segment.end_offset, segment.size]


def _map(path: Path) -> Part:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mapping = MappedFile(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    if not mapping.length:
        return Part(0, 0, None, b"")
    data = MappedBytes(mapping, mapping.address, mapping.length, lambda _: None)
    return Part(mapping.address, mapping.length, mapping, data)


def _in_memory(data: memoryview) -> Part:
    from pyarrow import py_buffer

    buffer = py_buffer(data)
    return Part(int(buffer.address) if len(data) else 0, len(data), buffer, data)


__all__ = ["IndexCache"]
