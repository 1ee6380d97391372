"""Producer snapshots: Kafka's ``{offset:020d}.snapshot`` files.

A snapshot says which idempotent producers were known at an offset, so that a restart can tell a
repetition from a new batch without reading the whole log.  Big endian::

    i16 version = 1 | u32 crc32c of what follows | i32 entries |
    entry: i64 producer id, i16 epoch, i32 last sequence, i64 last offset, i32 offset delta,
           i64 timestamp, i32 coordinator epoch, i64 first offset of the open transaction (-1: none)

Kafka's format keeps the last batch of a producer only; after a restart the log's own end tells the
four before it (`kdirect.log.recovery`).  A damaged snapshot is removed and the state rebuilt from
the log.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from kdirect.errors import FormatError
from kdirect.format.batch import crc32c
from kdirect.log.checkpoint import replace_file
from kdirect.log.producers import ProducerEntry
from kdirect.log.removals import unlink

log = logging.getLogger("kdirect.log")

SUFFIX = ".snapshot"
VERSION = 1
_HEAD = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_ENTRY = struct.Struct(">qhiqiqiq")
_SEQUENCES = 1 << 31


def pack_snapshot(entries: Sequence[ProducerEntry]) -> bytes:
    """The bytes of a snapshot file."""
    body = bytearray(_COUNT.pack(len(entries)))
    for e in entries:
        if e.batches:
            _, last, base_offset, last_offset = e.batches[-1]
            body += _ENTRY.pack(
                e.producer_id,
                e.producer_epoch,
                last,
                last_offset,
                last_offset - base_offset,
                e.timestamp_ms,
                e.coordinator_epoch,
                e.transaction_start,
            )
        else:
            body += _ENTRY.pack(
                e.producer_id,
                e.producer_epoch,
                -1,
                -1,
                0,
                e.timestamp_ms,
                e.coordinator_epoch,
                e.transaction_start,
            )
    return _HEAD.pack(VERSION, crc32c(bytes(body))) + bytes(body)


def unpack_snapshot(data: bytes) -> list[ProducerEntry]:
    """The producers in a snapshot; FormatError when it is damaged or of another version."""
    if len(data) < _HEAD.size + _COUNT.size:
        raise FormatError(f"a producer snapshot of {len(data)} bytes is too short")
    version, crc = _HEAD.unpack_from(data)
    if version != VERSION:
        raise FormatError(f"producer snapshot version {version} is not known")
    if crc32c(data[_HEAD.size :]) != crc:
        raise FormatError("the CRC of a producer snapshot is wrong")
    (count,) = _COUNT.unpack_from(data, _HEAD.size)
    if count < 0 or len(data) != _HEAD.size + _COUNT.size + count * _ENTRY.size:
        raise FormatError(f"a producer snapshot of {len(data)} bytes cannot hold {count} entries")
    out = []
    for (
        producer_id,
        epoch,
        sequence,
        last_offset,
        delta,
        timestamp,
        coordinator_epoch,
        start,
    ) in _ENTRY.iter_unpack(data[_HEAD.size + _COUNT.size :]):
        batches = (
            ()
            if sequence < 0
            else (((sequence - delta) % _SEQUENCES, sequence, last_offset - delta, last_offset),)
        )
        out.append(ProducerEntry(producer_id, epoch, timestamp, coordinator_epoch, start, batches))
    return out


def snapshot_path(directory: Path, offset: int) -> Path:
    return directory / f"{offset:020d}{SUFFIX}"


def list_snapshots(directory: Path, files: Sequence[str] | None = None) -> list[tuple[int, Path]]:
    """(offset, path) of the snapshot files, by offset; `files` are the names in the directory, if
    they are known."""
    names = (
        n.removesuffix(SUFFIX)
        for n in (os.listdir(directory) if files is None else files)
        if n.endswith(SUFFIX)
    )
    return sorted((int(name), directory / f"{name}{SUFFIX}") for name in names if name.isdigit())


def write_snapshot(
    directory: Path, offset: int, entries: Sequence[ProducerEntry], *, sync: bool = False
) -> None:
    replace_file(snapshot_path(directory, offset), pack_snapshot(entries), sync=sync)


def load_latest(
    directory: Path, log_start_offset: int, log_end_offset: int, files: Sequence[str] | None = None
) -> tuple[int, list[ProducerEntry]]:
    """The newest sound snapshot at or below the log's end: (its offset, producers); later and
    damaged ones are removed.  (log start, []) when there is none: the whole log has to tell."""
    for offset, path in reversed(list_snapshots(directory, files)):
        if offset <= log_end_offset:
            try:
                return offset, unpack_snapshot(path.read_bytes())
            except (FormatError, OSError) as e:
                log.warning("removing producer snapshot %s: %s", path, e)
        path.unlink(missing_ok=True)
    return log_start_offset, []


def delete_before(
    directory: Path, offset: int, remove: Callable[[Sequence[Path]], None] = unlink
) -> None:
    """Remove snapshots below `offset`, but never the newest, at once or as `remove` does."""
    remove([path for at, path in list_snapshots(directory)[:-1] if at < offset])
