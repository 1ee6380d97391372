"""Opening a partition's directory: what is on disk becomes segments and a kernel.

Law of the room: after a clean shutdown nothing is scanned; after a crash everything from the
recovery point on is.  What is below the recovery point was synced and is kept, whatever follows.

After a crash, in order:

1. Leftovers of unfinished work (``.tmp``, ``.cleaned``, ``.swap``, ``.deleted``) and indexes
   without a log go.
2. Segments that end below the recovery point are trusted; their indexes are checked and rebuilt if
   insane.  Offsets that are missing at the end of one whose file is whole are a gap, as Kafka's
   cleaner leaves them; reading goes on behind it.
3. Later ones are scanned (`scan_segment`): frames from the start, CRCs from the recovery point.
   The log is cut at the first batch that is not whole, not committed, or not the next in offsets;
   what follows in that file becomes zeros, and later segments are renamed to ``.corrupt``.  Both
   indexes are rebuilt.
4. The producer table comes from the newest sound snapshot and the batches behind it.
5. What was kept is synced, so that nobody reads a record that a second crash would take away.

Files are not shortened after a crash, because clients of the broker that died may still map them: a
hole is punched instead, and the next clean close shortens.
"""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path

from kdirect.errors import CorruptLogError
from kdirect.format import layout
from kdirect.log import checkpoint
from kdirect.log.config import LogConfig
from kdirect.log.epochs import epoch_at
from kdirect.log.index import OffsetIndex, TimeIndex
from kdirect.log.kernel import CommitKernel
from kdirect.log.mapped import (
    Chain,
    Walk,
    indexes_are_sane,
    last_batch,
    punch_hole,
)
from kdirect.log.partition import Partition, kernel_settings
from kdirect.log.producer_history import load_producers
from kdirect.log.scan import ScannedSegment, scan_segment
from kdirect.log.segment import LOG_SUFFIX, SUFFIXES, TEMPORARY_SUFFIX, Segment, file_name
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.log")

CORRUPT_SUFFIX = ".corrupt"
_LEFTOVERS = (TEMPORARY_SUFFIX, ".cleaned", ".swap", ".deleted")
_NEVER_CHECK = (1 << 63) - 1
_ANYWHERE = (1 << 63) - 1
_ANY_EPOCH = (1 << 31) - 1


def load_partition(
    topic_partition: TopicPartition,
    directory: Path,
    config: LogConfig,
    *,
    clean: bool,
    recovery_point: int = 0,
    log_start_offset: int = 0,
    high_watermark: int | None = None,
    topic_id: uuid.UUID | None = None,
    files: list[str] | None = None,
    unsynced: list[Path] | None = None,
) -> Partition:
    """Open (or start) the partition in `directory`.  `files` are the names of what is there, if the
    caller has listed them.  With `high_watermark`, only records below it may be read until the gate
    says more; without it, all that was found, for it is on disk.  What has to be synced before the
    partition is used is added to `unsynced`, for the caller to do so; without it, it is done here.
    CorruptLogError when it is no log."""
    if files is None:
        directory.mkdir(parents=True, exist_ok=True)
        files = os.listdir(directory)
    found = _find_segments(directory, files)
    is_new = not found
    if is_new:
        Segment.create_empty(directory, max(0, log_start_offset))
        found = [max(0, log_start_offset)]
    known = (
        checkpoint.read_partition_metadata(directory)
        if checkpoint.PARTITION_METADATA in files
        else None
    )
    dense_from = known.dense_from if known is not None else 0 if is_new else None
    # A log that somebody else may have written has gaps anywhere up to its present end.
    gaps_below = _ANYWHERE if dense_from is None else dense_from
    to_sync: list[Path] = []
    if clean:
        segments = _load_clean(directory, found, config, gaps_below)
    else:
        segments = _load_after_crash(
            topic_partition, directory, found, config, recovery_point, gaps_below, to_sync
        )
    if unsynced is None:
        checkpoint.sync_paths(directory, to_sync)
    else:
        unsynced += to_sync
    segments[-1].sealed = False
    end_offset = segments[-1].end_offset
    # What comes after the present end is ours.
    dense_from = end_offset if dense_from is None else min(dense_from, end_offset)
    for segment in segments:
        segment.dense_from = dense_from
    start_offset = min(max(log_start_offset, segments[0].base_offset), end_offset)
    epochs = _load_epochs(
        directory, start_offset, end_offset, known=checkpoint.LEADER_EPOCHS in files
    )
    kernel = CommitKernel(
        log_start_offset=start_offset,
        log_end_offset=end_offset,
        segment_base_offset=segments[-1].base_offset,
        position=segments[-1].size,
        leader_epoch=epochs[-1][0],
        last_epoch=epoch_at(epochs, end_offset - 1),
        **kernel_settings(config),
    )
    load_producers(kernel, directory, files, segments, start_offset, end_offset)
    known_id = _identify(directory, known, topic_id, dense_from)
    partition = Partition(
        topic_partition, directory, config, segments=segments, kernel=kernel, topic_id=known_id,
        recovery_point=end_offset, epochs=epochs, dense_from=dense_from,
    )  # fmt: skip
    if high_watermark is not None:
        partition.hold_readers_at(high_watermark)
    return partition


def _identify(
    directory: Path,
    known: checkpoint.PartitionMetadata | None,
    topic_id: uuid.UUID | None,
    dense_from: int,
) -> uuid.UUID:
    """The id of the partition's topic, which is noted in the directory; CorruptLogError when that
    is another topic's."""
    if known is not None and topic_id is not None and topic_id != known.topic_id:
        raise CorruptLogError(
            f"{directory} belongs to another topic of this name"
            f" (id {known.topic_id}, not {topic_id})",
            hint="the topic was deleted and created again; remove the stale directory",
        )
    known_id = known.topic_id if known is not None else topic_id or checkpoint.new_id()
    if known != checkpoint.PartitionMetadata(known_id, dense_from):
        checkpoint.write_partition_metadata(directory, known_id, dense_from)
    return known_id


def _find_segments(directory: Path, files: list[str]) -> list[int]:
    """Base offsets of the log files, in order, after sweeping what does not belong."""
    bases = []
    others = []
    for name in files:
        if name.endswith(_LEFTOVERS):
            (directory / name).unlink(missing_ok=True)
        elif name.endswith(SUFFIXES):
            stem, _, suffix = name.rpartition(".")
            if len(stem) != 20 or not stem.isdigit():
                raise CorruptLogError(
                    f"{directory / name} is no segment of a log",
                    hint="move it away: file names are twenty digits",
                )
            if suffix == LOG_SUFFIX[1:]:
                bases.append(int(stem))
            else:
                others.append((int(stem), name))
    known = set(bases)
    for base, name in others:
        if base not in known:
            (directory / name).unlink(missing_ok=True)
    return sorted(bases)


# -- after a clean shutdown ------------------------------------------------------------------------


def _load_clean(
    directory: Path, bases: list[int], config: LogConfig, gaps_below: int
) -> list[Segment]:
    """Files are as the broker left them: sizes are file lengths, except of files that someone held
    open then."""
    segments = []
    for i, base in enumerate(bases):
        last = i + 1 == len(bases)
        segment = Segment(
            directory, base, end_offset=None if last else bases[i + 1], sealed=not last
        )
        path = segment.path
        length = os.stat(path).st_size
        if length:
            segment = Segment(
                directory,
                base,
                size=length,
                end_offset=None if last else bases[i + 1],
                sealed=not last,
                dense_from=gaps_below,
            )
            _check_index_files(segment, config)
        if length and (last or length % 4096 == 0):
            walk = _end_of(segment, length)
            size, end_offset = walk.position, walk.next_offset
            if size < length and _is_unwritten(segment, size):
                # Still held when it was closed; nobody holds it now.
                segment = Segment(
                    directory,
                    base,
                    size=size,
                    end_offset=end_offset if last else bases[i + 1],
                    sealed=not last,
                    dense_from=gaps_below,
                )
                os.truncate(path, size)
            elif size < length:
                raise CorruptLogError(
                    f"{path} was closed cleanly, but the record batch at position {size}"
                    f" {walk.fault} (offset {end_offset} comes next)",
                    hint=f"remove {directory.parent / checkpoint.CLEAN_SHUTDOWN}"
                    " to have it recovered at the next start",
                )
            elif last:
                segment = Segment(
                    directory, base, size=length, end_offset=end_offset, dense_from=gaps_below
                )
        segment.synced = True
        segments.append(segment)
    return segments


def _end_of(segment: Segment, length: int) -> Walk:
    """Walk to the end of the last whole batch that continues the log, from the last index entry
    on."""
    segment.acquire()
    try:
        start, known = segment.last_indexed(length)
        walk = last_batch(segment.address, start, length, known)
        if start and walk.position == start:  # the index may be wrong
            walk = last_batch(
                segment.address, 0, length, Chain(segment.base_offset, segment.dense_from)
            )
        return walk  # type: ignore[no-any-return]
    finally:
        segment.release()
        segment.unmap_if_idle()


def _is_unwritten(segment: Segment, position: int) -> bool:
    """There are zeros where the header of a batch would be, or the file ends: preallocated bytes,
    not a damaged batch."""
    with open(segment.path, "rb") as file:
        file.seek(position)
        return not any(file.read(layout.BATCH_HEADER_BYTES))


def _check_index_files(segment: Segment, config: LogConfig) -> None:
    """Rebuild the indexes of a segment when a file is missing or has half an entry."""
    if segment.size == 0:
        return
    for index in (segment.offset_index, segment.time_index):
        try:
            if os.stat(index.path).st_size % index.entry_bytes == 0:
                continue
        except FileNotFoundError:
            pass
        log.warning("index %s is missing or damaged: rebuilding it", index.path)
        _rebuild_indexes(segment, config)
        return


def _rebuild_indexes(segment: Segment, config: LogConfig) -> None:
    segment.acquire()
    try:
        _write_indexes(
            segment,
            scan_segment(
                segment.address,
                segment.mapped_length,
                segment.base_offset,
                _NEVER_CHECK,
                config.index_interval_bytes,
            ),
        )
    finally:
        segment.release()
        segment.unmap_if_idle()


def _write_indexes(segment: Segment, scanned: ScannedSegment) -> None:
    for index, data in (
        (segment.offset_index, scanned.offset_index),
        (segment.time_index, scanned.time_index),
    ):
        index.close()
        # In place: an index that a crash left half written is rebuilt like any other that is
        # damaged.
        fd = os.open(index.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            at = 0
            while at < len(data):
                at += os.pwrite(fd, data[at:], at)
            os.ftruncate(fd, len(data))
        finally:
            os.close(fd)


# -- after a crash ---------------------------------------------------------------------------------


def _load_after_crash(
    topic_partition: TopicPartition,
    directory: Path,
    bases: list[int],
    config: LogConfig,
    recovery_point: int,
    gaps_below: int,
    to_sync: list[Path],
) -> list[Segment]:
    segments: list[Segment] = []
    expected = bases[0]
    epochs = checkpoint.read_leader_epochs(directory)
    greatest_epoch = epochs[-1][0] if epochs else _ANY_EPOCH
    for i, base in enumerate(bases):
        path = directory / file_name(base, LOG_SUFFIX)
        if base != expected and base <= recovery_point:
            # Everything below the recovery point was on disk, so what is missing was deleted, and
            # what is older is a remnant.
            log.error(
                "offsets [%d, %d) of %s are missing: the segments before them are set aside as %s",
                expected,
                base,
                topic_partition,
                CORRUPT_SUFFIX,
            )
            _set_aside(directory, [s.base_offset for s in segments])
            segments.clear()
        elif base != expected:
            log.error(
                "%s should begin at offset %d: it and what follows is set aside as %s",
                path,
                expected,
                CORRUPT_SUFFIX,
            )
            _set_aside(directory, bases[i:])
            break
        if i + 1 < len(bases) and bases[i + 1] <= recovery_point:
            segments.append(_trusted_segment(directory, base, bases[i + 1], config, gaps_below))
            expected = segments[-1].end_offset
            continue
        segment, scanned = _scan(
            directory, base, config, recovery_point, gaps_below, greatest_epoch
        )
        segments.append(segment)
        expected = scanned.end_offset
        if scanned.reason:
            log.warning(
                "%s is cut at offset %d, position %d: there is %s",
                path,
                scanned.end_offset,
                scanned.size,
                scanned.reason,
            )
    if segments[-1].end_offset < recovery_point:
        log.error(
            "%s ends at offset %d, below its recovery point %d: synced records are missing or"
            " damaged",
            topic_partition,
            segments[-1].end_offset,
            recovery_point,
        )
    _note_unsynced(segments, recovery_point, to_sync)
    if to_sync or len(segments) != len(bases):
        to_sync.append(directory)
    return segments


def _note_unsynced(segments: list[Segment], recovery_point: int, to_sync: list[Path]) -> None:
    """The files of recovered segments that have to be synced; what is below was on disk."""
    for segment in segments:
        segment.sealed = segment is not segments[-1]
        if segment.end_offset > recovery_point:
            to_sync.append(segment.path)
            if segment.sealed:  # the others are with their seal
                to_sync += [segment.offset_index.path, segment.time_index.path]
        segment.synced = segment.sealed


def _trusted_segment(
    directory: Path, base: int, end_offset: int, config: LogConfig, gaps_below: int
) -> Segment:
    """A segment below the recovery point, which is to end at `end_offset`."""
    path = directory / file_name(base, LOG_SUFFIX)
    length = os.stat(path).st_size
    segment = Segment(
        directory, base, size=length, end_offset=end_offset, sealed=True, dense_from=gaps_below
    )
    segment.keep_length = True
    offset_index, time_index = segment.offset_index, segment.time_index
    missing = not offset_index.path.exists() or not time_index.path.exists()
    offset_index.open()
    time_index.open()
    sane = not missing and indexes_are_sane(
        offset_index.address,
        offset_index.entries,
        time_index.address,
        time_index.entries,
        length,
        end_offset - base,
    )
    offset_index.close()
    time_index.close()
    if not sane:
        log.warning("the indexes of %s are missing or damaged: rebuilding them", path)
        _rebuild_indexes(segment, config)
    walk = _end_of(segment, length)
    size, found_end = walk.position, walk.next_offset
    if size == length and found_end < end_offset:
        # The file is whole.  Kafka's cleaner, which removes records that are superseded, leaves it
        # so.
        log.warning(
            "offsets [%d, %d) of %s are missing: compacted away, or with a file that is gone",
            found_end,
            end_offset,
            directory.name,
        )
        found_end = end_offset
    elif found_end != end_offset and not _is_unwritten(segment, size):
        # Not a missing segment: what was synced here cannot be read any more.  The rest of the log
        # is kept.
        log.error(
            "%s is damaged at position %d, below the recovery point: the batch there %s;"
            " offsets [%d, %d) cannot be read",
            path,
            size,
            walk.fault,
            found_end,
            end_offset,
        )
        size, found_end = length, end_offset
    segment = Segment(directory, base, size=size, end_offset=found_end, sealed=True)
    segment.file_length = length
    segment.keep_length = size < length
    return segment


def _scan(
    directory: Path,
    base: int,
    config: LogConfig,
    recovery_point: int,
    gaps_below: int,
    greatest_epoch: int,
) -> tuple[Segment, ScannedSegment]:
    """Scan one segment, make what follows its last good batch zeros, write its indexes."""
    path = directory / file_name(base, LOG_SUFFIX)
    segment = Segment(directory, base, size=os.stat(path).st_size)
    segment.keep_length = True
    segment.acquire()
    try:
        length = segment.mapped_length
        scanned = scan_segment(
            segment.address,
            length,
            base,
            recovery_point,
            config.index_interval_bytes,
            dense_from=gaps_below,
            greatest_epoch=greatest_epoch,
        )
        if scanned.size < length and not punch_hole(
            segment.fd, scanned.size, length - scanned.size
        ):
            log.warning("the file system of %s cannot punch holes: shortening the file", path)
            segment.unmap_if_idle()
            os.truncate(path, scanned.size)
    finally:
        segment.release()
        segment.unmap_if_idle()
    segment = Segment(
        directory,
        base,
        size=scanned.size,
        end_offset=scanned.end_offset,
        sealed=True,
        max_timestamp=scanned.max_timestamp,
    )
    segment.file_length = os.stat(path).st_size
    segment.keep_length = scanned.size < segment.file_length
    _write_indexes(segment, scanned)
    return segment, scanned


def _set_aside(directory: Path, bases: list[int]) -> None:
    for base in bases:
        path = directory / file_name(base, LOG_SUFFIX)
        os.rename(path, path.with_name(path.name + CORRUPT_SUFFIX))
        for suffix in (OffsetIndex.suffix, TimeIndex.suffix):
            (directory / file_name(base, suffix)).unlink(missing_ok=True)


# -- epochs ----------------------------------------------------------------------------------------


def _load_epochs(
    directory: Path, start_offset: int, end_offset: int, *, known: bool
) -> list[tuple[int, int]]:
    """Leader epochs that still have, or may get, records; at least one.  `known`: there is a file
    of them."""
    stored = checkpoint.read_leader_epochs(directory) if known else []
    epochs = [e for e in stored if e[1] <= end_offset]
    if stored and not epochs:
        epochs = [(stored[0][0], start_offset)]
    if not epochs:
        epochs = [(0, start_offset)]
    if epochs != stored:
        checkpoint.write_leader_epochs(directory, epochs)
    return epochs
