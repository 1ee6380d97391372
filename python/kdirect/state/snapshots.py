"""Snapshots: the state after a batch, as files that are checked before a byte of them is used.

Owns: the form of a part (what one executor wrote of the virtual partitions that it leads) and of a
manifest (which parts make a snapshot, with their lengths and CRCs).  What may not enter: what a
section of a part means (the state kernels), when a snapshot is taken, and which ones are kept.

    snapshots/00000000000000000041/part-2-0         attempt and executor
                                   part-2-1
                                   manifest.json    written last: without it nothing counts

    part  | magic u64 | version u32 | 0 u32 | head bytes u64 | 0 u64 | head | section | section ...

The head is JSON: plan, batch, number of executors, and what the state says of each section, with
its length.  Head and sections begin at multiples of 64 bytes, little endian.  The CRC-32C in the
manifest is of the whole file.  A snapshot that is damaged, foreign, incomplete or of an older
version is not used: an error names the file, and the snapshot before it is taken.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdirect.errors import FormatError, StateDirectoryError
from kdirect.format.batch import crc32c
from kdirect.state import strict
from kdirect.state.batches import Manifest, Part
from kdirect.state.directory import read_json, replaced, sync_directory, write_atomically
from kdirect.state.plan import VPARTS

log = logging.getLogger("kdirect.state")

MANIFEST = "manifest.json"
MANIFEST_VERSION = 2
MAGIC = int.from_bytes(b"KDPART\0\0", "little")
PART_VERSION = 2
OTHER = "an older snapshot and the log are used instead; remove this one"
WRITE_BYTES = 4 << 20  # are written at once; between two writes it is looked whether to go on
READ_BYTES = 256 << 10  # are read at once to be checked: a cache holds them
_FIXED = struct.Struct("<QIIQQ")
_ALIGN = 64


class Section(NamedTuple):
    """A stretch of a part: what the state says of it (JSON), and its bytes (any buffer)."""

    head: dict[str, Any]
    data: Any


class _CancelledError(Exception):
    """The writing of a part was given up."""


def snapshot_directory(root: Path, batch: int) -> Path:
    """Where the snapshot after `batch` is."""
    return root / f"{batch:020}"


def write_part(
    directory: Path,
    name: str,
    sections: Sequence[Section],
    *,
    executors: int,
    vparts: tuple[int, int],
    plan_hash: str,
    batch: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Part | None:
    """Write the sections of an executor, one of `executors`, that leads the virtual partitions of
    the range `vparts`; on disk when this returns.  `cancelled` is asked before each piece: once it
    is true, nothing is left, and there is no part.  StateDirectoryError where there is no room."""
    views = [memoryview(section.data).cast("B") for section in sections]
    head = json.dumps({
        "plan": plan_hash, "batch": batch, "executors": executors,
        "sections": [[s.head, len(v)] for s, v in zip(sections, views, strict=True)],
    }, separators=(",", ":")).encode()  # fmt: skip
    fixed = _FIXED.pack(MAGIC, PART_VERSION, 0, len(head), 0)
    size = crc = 0
    with contextlib.suppress(_CancelledError), replaced(directory / name) as file:
        for view in (memoryview(fixed + bytes(-len(fixed) % _ALIGN) + head), *views):
            for begin in range(0, len(view), WRITE_BYTES):
                if cancelled():
                    raise _CancelledError
                piece = view[begin : begin + WRITE_BYTES]
                crc = crc32c(piece, crc)
                file.write(piece)
            padding = bytes(-len(view) % _ALIGN)
            crc = crc32c(padding, crc)
            file.write(padding)
            size += len(view) + len(padding)
        return Part(file=name, first=vparts[0], last=vparts[1], size=size, crc=crc)
    return None


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Make the parts a snapshot."""
    directory = snapshot_directory(root, manifest.number)
    sync_directory(root)
    text = json.dumps({"version": MANIFEST_VERSION, **manifest.to_json()}, sort_keys=True)
    write_atomically(directory / MANIFEST, text.encode())


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a snapshot.  FileNotFoundError when it has none, so never became one;
    StateDirectoryError when it is damaged or not of this directory."""
    path = directory / MANIFEST
    value = read_json(path, "the manifest of a snapshot")
    version = value.pop("version", None)
    if version != MANIFEST_VERSION:
        raise StateDirectoryError(
            f"{path}: a snapshot of version {strict.shown(version)}, and this build reads version"
            f" {MANIFEST_VERSION}",
            hint="an older snapshot and the log are used instead; or go on with the build that"
            " wrote it",
        )
    try:
        manifest = Manifest.from_json(value)
    except FormatError as e:
        raise StateDirectoryError(f"{path}: {e}", hint=OTHER) from e
    if snapshot_directory(directory.parent, manifest.number) != directory:
        raise StateDirectoryError(
            f"{path}: the manifest is that of batch {manifest.number}", hint=OTHER
        )
    return manifest


class _Stretch(NamedTuple):
    """A section with the padding after it, and what the CRC of the file is before and after it."""

    head: dict[str, Any]
    begin: int
    size: int  # of the section
    end: int
    crc_before: int
    crc_after: int


class PartReader:
    """A part of a snapshot, checked as a whole when this is made: CRC, version, plan and batch.
    `stepped` is called for each piece that is read for that.

    Iterating reads its sections, one after the other into the same memory, and checks each of them
    again: the bytes of a section are valid until the next one is asked for.  Nothing is mapped, so
    a file that is cut short meanwhile is an error and not a signal.  StateDirectoryError for
    whatever is wrong with it.  `close` it, or use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        part: Part,
        *,
        plan_hash: str,
        batch: int,
        stepped: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = directory / part.file
        self._stepped = stepped
        self.vparts = part.first, part.last
        self._size = part.size
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as e:
            raise self._unreadable(e) from e
        try:
            self.executors, self._stretches = self._checked(part.crc, plan_hash, batch)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def __iter__(self) -> Iterator[Section]:
        most = max((s.end - s.begin for s in self._stretches), default=0)
        memory = memoryview(_anonymous(most))
        for head, begin, size, end, before, after in self._stretches:
            view = memory[: end - begin]
            self._read(begin, view)
            if crc32c(view, before) != after:
                raise self._error("it has changed while it was read")
            yield Section(head, view[:size])

    def _checked(self, crc: int, plan_hash: str, batch: int) -> tuple[int, list[_Stretch]]:
        """Compare the file with its manifest, then look what is in it."""
        length = os.fstat(self._file.fileno()).st_size
        if length != self._size:
            raise self._error(f"{length} bytes, where the manifest says {self._size}")
        executors, begin, sizes, broken = 0, 0, [], None
        try:
            executors, begin, sizes = self._parsed(plan_hash, batch)
        except FormatError as e:
            broken = e  # or damaged, which the CRC says
        buffer = memoryview(bytearray(READ_BYTES))
        found = self._crc(0, begin, 0, buffer)
        stretches = []
        for head, size in sizes:
            end = _aligned(begin + size)
            after = self._crc(begin, end, found, buffer)
            stretches.append(_Stretch(head, begin, size, end, found, after))
            begin, found = end, after
        if self._crc(begin, self._size, found, buffer) != crc:
            raise self._error("the CRC does not match the manifest")
        if broken is not None:
            raise self._error(str(broken)) from broken
        return executors, stretches

    def _parsed(self, plan_hash: str, batch: int) -> tuple[int, int, list[tuple[Any, int]]]:
        """The executors that wrote the snapshot, where the sections begin, and what each of them
        is, with its size."""
        if self._size < _ALIGN:
            raise FormatError("this is no part of a snapshot: it is too short")
        magic, version, _, length, _ = _FIXED.unpack(self._bytes(0, _FIXED.size))
        if magic != MAGIC:
            raise FormatError("this is no part of a snapshot")
        if version != PART_VERSION:
            raise FormatError(f"a part of version {version}; this build reads {PART_VERSION}")
        text = self._bytes(_ALIGN, min(length, self._size - _ALIGN))
        head = strict.Members(strict.parse(text, "the head of the part"), "the head of the part")
        if (head.text("plan"), head.number("batch")) != (plan_hash, batch):
            raise FormatError("the part is of another plan or batch than its manifest")
        executors = head.number("executors", 1, VPARTS)
        first = at = _aligned(_ALIGN + length)
        sections = []
        for item in head.items("sections"):
            if not isinstance(item, list) or len(item) != 2:
                raise FormatError("a section of the part is not described")
            size = strict.checked_number(item[1], 0, self._size - at, "a section of the part")
            sections.append((item[0], size))
            at = _aligned(at + size)
        head.close()
        if at != self._size:
            raise FormatError("the sections of the part do not fill it")
        return executors, first, sections

    def _bytes(self, at: int, size: int) -> bytes:
        data = bytearray(size)
        self._read(at, memoryview(data))
        return bytes(data)

    def _crc(self, begin: int, end: int, crc: int, buffer: memoryview) -> int:
        """The CRC of the file before `end`, from what it is before `begin`."""
        for at in range(begin, end, len(buffer)):
            piece = buffer[: end - at]
            self._read(at, piece)
            crc = crc32c(piece, crc)
            self._stepped()
        return crc

    def _read(self, at: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the file from `at` on."""
        done = 0
        while done < len(view):
            try:
                read = os.preadv(self._file.fileno(), [view[done:]], at + done)
            except OSError as e:
                raise self._unreadable(e) from e
            if not read:
                raise self._error(
                    f"it ends at byte {at + done}, where the manifest says {self._size}: it was"
                    " cut short while it was read"
                )
            done += read

    def _unreadable(self, error: OSError) -> StateDirectoryError:
        return self._error(f"the part cannot be read: {error}")

    def _error(self, what: str) -> StateDirectoryError:
        return StateDirectoryError(f"{self.path}: {what}", hint=OTHER)


def _anonymous(size: int) -> mmap.mmap:
    """Memory whose first touch is cheap."""
    memory = mmap.mmap(-1, max(size, mmap.PAGESIZE))
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _aligned(position: int) -> int:
    return position + -position % _ALIGN


def forget(root: Path, batch: int) -> None:
    """Remove the snapshot after `batch`, and before it what never became one."""
    for directory in root.iterdir():
        number = int(directory.name) if directory.name.isdigit() else batch + 1
        if number == batch or (number < batch and not (directory / MANIFEST).exists()):
            # First: of what a kill leaves the next call must know that it never counts.
            with contextlib.suppress(OSError):
                (directory / MANIFEST).unlink()
            shutil.rmtree(directory, ignore_errors=True)


def batches_of(root: Path) -> list[int]:
    """The numbers of all snapshots with a manifest, newest first."""
    found = []
    for directory in root.iterdir():
        if directory.name.isdigit() and (directory / MANIFEST).exists():
            found.append(int(directory.name))
    return sorted(found, reverse=True)


def manifests(root: Path) -> tuple[Manifest, ...]:
    """All snapshots, oldest first.  One whose manifest is damaged, or whose parts have not the
    lengths that it says, is left out with a warning that names the file and the remedy; the CRCs
    are checked by those who read the parts."""
    found = []
    for batch in reversed(batches_of(root)):
        try:
            found.append(_whole(snapshot_directory(root, batch)))
        except StateDirectoryError as e:
            log.warning("a snapshot is left out: %s", e)
    return tuple(found)


def _whole(directory: Path) -> Manifest:
    manifest = read_manifest(directory)
    for part in manifest.parts:
        path = directory / part.file
        length = path.stat().st_size if path.exists() else -1
        if length != part.size:
            raise StateDirectoryError(
                f"{path}: {'missing' if length < 0 else f'{length} bytes'}, where the manifest"
                f" says {part.size} bytes",
                hint=OTHER,
            )
    return manifest
