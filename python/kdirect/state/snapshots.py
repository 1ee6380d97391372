"""Snapshots: the state after a batch, as Arrow IPC files, checked before a byte of them is used.

Owns: the form of a part (what one executor wrote: an Arrow IPC file with a record batch for each
virtual partition that it leads) and of a manifest (which parts make a snapshot, with their lengths
and CRCs).  What may not enter: what the columns of a part mean (the
state kernels), when a snapshot is taken, and which ones are kept.

    snapshots/00000000000000000041/part-0-of-2.arrow
                                   part-1-of-2.arrow
                                   manifest.json      written last: without it nothing counts

A part is written as a stream; its CRC-32 is of the whole file.  A snapshot that is damaged, foreign
or incomplete is not used: an error names the file, and the snapshot before it is taken.
"""

from __future__ import annotations

import itertools
import json
import logging
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdirect.errors import FormatError, StateDirectoryError
from kdirect.state.batches import Manifest, Part
from kdirect.state.directory import read_json, replaced, sync_directory, write_atomically

log = logging.getLogger("kdirect.state")

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
VPART = b"kdirect.vpart"
OTHER = "an older snapshot and the log are used instead; remove this one"


class _Counted:
    """A file that is written through, with length and CRC.  Arrow writes to it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.length = 0
        self.crc = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self.length += len(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def snapshot_directory(root: Path, batch: int) -> Path:
    """Where the snapshot after `batch` is."""
    return root / f"{batch:020}"


def write_part(
    directory: Path,
    name: str,
    batches: Iterable[tuple[int, pa.RecordBatch]],
    *,
    vparts: tuple[int, int],
    plan_hash: str,
    batch: int,
) -> Part:
    """Write the record batches of an executor's virtual partitions, which are those of the range
    `vparts`, in order and with no batch for an empty one; on disk when this returns."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = iter(batches)
    first = next(rows, None)
    schema = pa.schema([]) if first is None else first[1].schema
    head = {b"kdirect.plan": plan_hash.encode(), b"kdirect.batch": str(batch).encode()}
    with replaced(directory / name) as file:
        counted = _Counted(file)
        sink = pa.PythonFile(counted, mode="w")
        with pa.ipc.new_file(sink, schema.with_metadata({**(schema.metadata or {}), **head})) as w:
            for vpart, record_batch in itertools.chain([] if first is None else [first], rows):
                # A file has one schema, so what each batch says of itself goes with the batch.
                own = {**(record_batch.schema.metadata or {}), VPART: str(vpart).encode()}
                w.write_batch(record_batch, custom_metadata=own)
    return Part(file=name, first=vparts[0], last=vparts[1], size=counted.length, crc=counted.crc)


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
    if value.pop("version", None) != MANIFEST_VERSION:
        raise StateDirectoryError(
            f"{path}: this build reads version {MANIFEST_VERSION}, which it is not", hint=OTHER
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


def _checked(path: Path, part: Part) -> pa.MemoryMappedFile:
    """Read a part once and compare it with its manifest; the file, mapped."""
    try:
        file = pa.memory_map(str(path))
    except OSError as e:
        raise StateDirectoryError(f"{path}: the part cannot be read: {e}", hint=OTHER) from e
    if file.size() != part.size:
        raise StateDirectoryError(
            f"{path}: {file.size()} bytes, where the manifest says {part.size}", hint=OTHER
        )
    if zlib.crc32(file.read_buffer()) != part.crc:
        raise StateDirectoryError(f"{path}: the CRC does not match the manifest", hint=OTHER)
    file.seek(0)
    return file


def read_part(
    directory: Path, part: Part, *, plan_hash: str, batch: int, vparts: tuple[int, int]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The record batches of the virtual partitions of a part that are in the range `vparts`.

    The file is checked as a whole before the first one is handed out."""
    path = directory / part.file
    with _checked(path, part) as file:
        try:
            reader = pa.ipc.open_file(file)
        except pa.ArrowInvalid as e:
            raise StateDirectoryError(f"{path}: this is no Arrow file: {e}", hint=OTHER) from e
        head = reader.schema.metadata or {}
        named = (head.get(b"kdirect.plan"), head.get(b"kdirect.batch"))
        if named != (plan_hash.encode(), str(batch).encode()):
            raise StateDirectoryError(
                f"{path}: the part is of another plan or batch than its manifest", hint=OTHER
            )
        for i in range(reader.num_record_batches):
            record_batch, metadata = reader.get_batch_with_custom_metadata(i)
            own = dict(metadata or {})
            vpart = int(own.pop(VPART, b"-1"))
            if not part.first <= vpart < part.last:
                raise StateDirectoryError(
                    f"{path}: record batch {i} is of no virtual partition of this part", hint=OTHER
                )
            if vparts[0] <= vpart < vparts[1]:
                yield vpart, record_batch.replace_schema_metadata(own or None)


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
