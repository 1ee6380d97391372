"""Opening a partition's directory: what is on disk becomes segments and a kernel.

Law of the room: after a clean shutdown nothing is scanned (but for leader epochs whose file is
missing or damaged); after a crash everything from the recovery point on is.  What is below the
recovery point was synced and is kept, whatever follows.

After a crash, in order:

1. Exchanges of segments by compaction are finished (`kdirect.log.compacting`).  Leftovers of
   unfinished work (``.tmp``, ``.cleaned``, ``.swap``), deleted segments that had waited to be
   removed (``.deleted``) and indexes without a log are removed.
2. Segments that end below the recovery point are trusted.  Their indexes are checked, and rebuilt
   if entries do not rise or point outside the segment.  Where the file is whole and ends before the
   next segment begins, the offsets between are a gap, as Kafka's cleaner leaves them; reading goes
   on after the gap.
3. Later segments are scanned (`scan_segment`): frames from the start, CRCs from the recovery point.
   The log is cut at the first batch that is not whole, not committed, or not the next in offsets;
   what follows in that file becomes zeros, and later segments are renamed to ``.corrupt``.  Both
   indexes are rebuilt.
4. The producer table and the transactions come from the newest sound snapshot and the batches after
   it; aborted transactions before it from ``.txnindex`` files.
5. What was kept is synced, so that nobody reads a record that a second crash would take away.

Files are not shortened after a crash, because clients of the broker that died may still map them: a
hole is punched instead, and the next clean close shortens the file.
"""

from __future__ import annotations

import logging
import os
import struct
import uuid
from pathlib import Path
from typing import NamedTuple

from kdirect.errors import CorruptLogError
from kdirect.format import layout
from kdirect.log import checkpoint
from kdirect.log.aborted_index import AbortedFiles
from kdirect.log.compacting import finish_swaps
from kdirect.log.config import PAGE_BYTES, LogConfig, kernel_settings
from kdirect.log.epochs import epoch_at
from kdirect.log.index import OffsetIndex, TimeIndex
from kdirect.log.kernel import CommitKernel
from kdirect.log.kernel_transactions import load_aborted_index
from kdirect.log.mapped import (
    Chain,
    Walk,
    indexes_are_sane,
    last_batch,
    punch_hole,
)
from kdirect.log.partition import Partition
from kdirect.log.producer_history import load_producers
from kdirect.log.recovered_epochs import load_epochs
from kdirect.log.recovered_indexes import check_index_files, rebuild_indexes, write_indexes
from kdirect.log.removals import DELETED_SUFFIX
from kdirect.log.scan import scan_segment
from kdirect.log.segment import (
    LOG_SUFFIX,
    SUFFIXES,
    TEMPORARY_SUFFIX,
    TRANSACTION_SUFFIX,
    Segment,
    file_name,
)
from kdirect.log.segment_search import last_indexed
from kdirect.log.truncation import copy_start
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.log")

CORRUPT_SUFFIX = ".corrupt"
_LEFTOVERS = (TEMPORARY_SUFFIX, ".cleaned", ".swap", DELETED_SUFFIX)
_ANYWHERE = (1 << 63) - 1
_ANY_EPOCH = (1 << 31) - 1


def load_partition(
    topic_partition: TopicPartition,
    directory: Path,
    config: LogConfig,
    *,
    clean: bool,
    recovery_point: int = 0,
    log_start_offset: int | None = None,
    high_watermark: int | None = None,
    lost_start: bool = False,
    topic_id: uuid.UUID | None = None,
    files: list[str] | None = None,
    unsynced: list[Path] | None = None,
) -> Partition:
    """Open (or start) the partition in `directory`; CorruptLogError when that holds no log.

    `clean`: the broker before closed it; else it is recovered from `recovery_point` on.  `files`
    are the names of what is there, if the caller has listed them.  With `high_watermark`, only
    records below it may be read until the gate says more; without it, all that was found, for it is
    on disk.  What has to be synced before the partition is used is added to `unsynced`, for the
    caller to do so; without it, it is done here.

    `log_start_offset` is what the checkpoint says.  Of a tiered log it may lie before the first
    segment; without it such a log starts with its first segment, for it has never deleted one that
    is tiered; with `lost_start`, because the checkpoint itself is lost, it starts where the leader
    epochs begin, which is not above its start."""
    found = _look(topic_partition, directory, config, files, max(0, log_start_offset or 0))
    to_sync: list[Path] = []
    segments = _load_clean(found) if clean else _load_after_crash(found, recovery_point, to_sync)
    if unsynced is None:
        checkpoint.sync_paths(directory, to_sync)
    else:
        unsynced += to_sync
    segments[-1].sealed = False
    dense_from = _note_gaps(found, segments)
    start_offset = _start_of(found, segments, log_start_offset, lost_start)
    epochs = load_epochs(
        found.directory, found.files, segments, start_offset, sync_name=found.known is not None
    )
    aborted = AbortedFiles(directory)
    kernel = _load_kernel(found, segments, start_offset, epochs, aborted)
    partition = Partition(
        topic_partition,
        directory,
        config,
        segments=segments,
        kernel=kernel,
        topic_id=_identify(found, topic_id, dense_from),
        recovery_point=segments[-1].end_offset,
        epochs=epochs,
        dense_from=dense_from,
        aborted=aborted,
        moved=found.known.moved if found.known is not None else None,
    )
    if high_watermark is not None:
        partition.hold_readers_at(high_watermark)
    return partition


def _start_of(found: _Found, segments: list[Segment], known: int | None, lost_start: bool) -> int:
    """The log start; see `load_partition`."""
    first_kept = segments[0].base_offset
    start = first_kept if known is None else max(0, known)
    if not found.config.remote_storage:
        start = max(start, first_kept)
    elif known is None and lost_start:
        epochs = checkpoint.read_leader_epochs(found.directory)
        start = min([first_kept, *(first for _, first in epochs[:1])])
        if start < first_kept:
            log.warning(
                "the log start of %s is lost: it is taken to be %d, where its leader epochs begin",
                *(found.topic_partition, start),
            )
    return min(start, segments[-1].end_offset)


def begin_directory(directory: Path, config: LogConfig, topic_id: uuid.UUID) -> None:
    """Put the files of an empty log into a new directory, for `load_partition`; none of them is
    synced."""
    directory.mkdir()
    if config.overrides:
        path = directory / checkpoint.TOPIC_PROPERTIES
        checkpoint.write_properties(path, config.overrides, sync=False)
    checkpoint.write_partition_metadata(directory, topic_id, 0, sync=False)
    checkpoint.write_leader_epochs(directory, [(0, 0)], sync=False)
    Segment.create_empty(directory, 0)


# -- what is there ---------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A partition's directory, before a segment of it is read.  `bases` are the base offsets of the
    log files, in order, at least one; `known` is what ``partition.metadata`` says."""

    topic_partition: TopicPartition
    directory: Path
    config: LogConfig
    files: list[str]
    bases: list[int]
    is_new: bool
    known: checkpoint.PartitionMetadata | None

    @property
    def dense_from(self) -> int | None:
        """The offset from which on kdirect wrote the log; None: that is not known."""
        return self.known.dense_from if self.known is not None else 0 if self.is_new else None

    @property
    def gaps_below(self) -> int:
        """Offsets may be missing below this one."""
        # A log that another program may have written has gaps anywhere up to its present end.
        return _ANYWHERE if self.dense_from is None else self.dense_from

    def path(self, base: int) -> Path:
        """The log file of the segment that begins at offset `base`."""
        return self.directory / file_name(base, LOG_SUFFIX)


def _look(
    topic_partition: TopicPartition,
    directory: Path,
    config: LogConfig,
    files: list[str] | None,
    first_offset: int,
) -> _Found:
    """Sweep the directory, and begin a log at `first_offset` where there is none."""
    if files is None:
        directory.mkdir(parents=True, exist_ok=True)
        files = os.listdir(directory)
    known = None
    if checkpoint.PARTITION_METADATA in files:
        known = checkpoint.read_partition_metadata(directory)
    if finish_swaps(directory, files, known.dense_from if known is not None else None):
        files[:] = os.listdir(directory)
    bases = _find_segments(directory, files)
    is_new = not bases
    if is_new:
        Segment.create_empty(directory, first_offset)
        bases = [first_offset]
    return _Found(topic_partition, directory, config, files, bases, is_new, known)


def _note_gaps(found: _Found, segments: list[Segment]) -> int:
    """Tell the segments from which offset on none is missing; that offset."""
    end_offset = segments[-1].end_offset
    # What comes after the present end is ours.
    dense_from = end_offset if found.dense_from is None else min(found.dense_from, end_offset)
    for segment in segments:
        segment.dense_from = dense_from
    return dense_from


def _load_kernel(
    found: _Found,
    segments: list[Segment],
    start_offset: int,
    epochs: list[tuple[int, int]],
    aborted: AbortedFiles,
) -> CommitKernel:
    """A kernel that goes on where the last segment ends, with the producers that it knew."""
    end_offset = segments[-1].end_offset
    kernel = CommitKernel(
        log_start_offset=start_offset,
        log_end_offset=end_offset,
        segment_base_offset=segments[-1].base_offset,
        position=segments[-1].size,
        leader_epoch=epochs[-1][0],
        last_epoch=epoch_at(epochs, end_offset - 1),
        **kernel_settings(found.config),
    )
    entries, damaged = aborted.read(found.files, segments)
    load_aborted_index(kernel, entries)
    load_producers(
        kernel,
        found.directory,
        found.files,
        segments,
        start_offset,
        end_offset if damaged is None else min(damaged, end_offset),
    )
    return kernel


def _identify(found: _Found, topic_id: uuid.UUID | None, dense_from: int) -> uuid.UUID:
    """The id of the partition's topic, which is noted in the directory; CorruptLogError when the
    directory is another topic's."""
    known, directory = found.known, found.directory
    if known is not None and topic_id is not None and topic_id != known.topic_id:
        raise CorruptLogError(
            f"{directory} belongs to another topic of this name"
            f" (id {known.topic_id}, not {topic_id})",
            hint="the topic was deleted and created again; remove the stale directory",
        )
    known_id = known.topic_id if known is not None else topic_id or checkpoint.new_id()
    if known is None or known.topic_id != known_id or known.dense_from != dense_from:
        moved = known.moved if known is not None else None
        checkpoint.write_partition_metadata(directory, known_id, dense_from, moved)
    return known_id


def _find_segments(directory: Path, files: list[str]) -> list[int]:
    """Base offsets of the log files, in order.  Leftovers are removed; CorruptLogError for a file
    whose name is none of ours."""
    bases = []
    others = []
    for name in files:
        if name.endswith(_LEFTOVERS):
            (directory / name).unlink(missing_ok=True)
        elif name.endswith((*SUFFIXES, TRANSACTION_SUFFIX)):
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


def _load_clean(found: _Found) -> list[Segment]:
    """Files are as the broker left them: sizes are file lengths, except of files that somebody held
    open then."""
    ends: list[int | None] = [*found.bases[1:], None]
    return [
        _load_closed(found, base, next_base)
        for base, next_base in zip(found.bases, ends, strict=True)
    ]


def _load_closed(found: _Found, base: int, next_base: int | None) -> Segment:
    """One segment of a log that was closed; `next_base` is where the next one begins, None for the
    last one."""
    path = found.path(base)
    length = os.stat(path).st_size

    def segment_of(size: int, end_offset: int | None) -> Segment:
        return Segment(
            found.directory,
            base,
            size=size,
            end_offset=end_offset if next_base is None else next_base,
            sealed=next_base is not None,
            dense_from=found.gaps_below if size else 0,
        )

    segment = segment_of(length, None)
    check_index_files(segment, found.config)
    # The last segment is walked for its end offset, and one of whole pages because it may be longer
    # than its records: it was not shortened while a client held it.
    if length and (next_base is None or length % PAGE_BYTES == 0):
        walk = _end_of(segment, length)
        size, end_offset = walk.position, walk.next_offset
        if size < length and not _is_unwritten(segment, size):
            raise CorruptLogError(
                f"{path} was closed cleanly, but the record batch at position {size}"
                f" {walk.fault} (offset {end_offset} comes next)",
                hint=f"remove {found.directory.parent / checkpoint.CLEAN_SHUTDOWN}"
                " to have it recovered at the next start",
            )
        segment = segment_of(size, end_offset)
        if size < length:  # nobody holds it now
            os.truncate(path, size)
    segment.synced = True
    return segment


def _end_of(segment: Segment, length: int) -> Walk:
    """Walk to the end of the last whole batch that continues the log, from the last index entry
    on."""
    segment.acquire()
    try:
        start, known = last_indexed(segment, length)
        walk = last_batch(segment.address, start, length, known)
        if start and walk.position == start:  # no batch there: the index may be wrong
            walk = last_batch(
                segment.address, 0, length, Chain(segment.base_offset, segment.dense_from)
            )
        return walk  # type: ignore[no-any-return]
    finally:
        segment.release()
        segment.unmap_if_idle()


def _is_unwritten(segment: Segment, position: int) -> bool:
    """Are there zeros where the header of a batch would be, or does the file end?  Then these are
    bytes that were allocated and never written, and no damaged batch."""
    with open(segment.path, "rb") as file:
        file.seek(position)
        return not any(file.read(layout.BATCH_HEADER_BYTES))


# -- after a crash ---------------------------------------------------------------------------------


def _load_after_crash(found: _Found, recovery_point: int, to_sync: list[Path]) -> list[Segment]:
    """The segments that are whole, in order, each of which goes on where the one before ends; at
    least one.  What has to be synced is added to `to_sync`."""
    segments: list[Segment] = []
    expected = found.bases[0]
    epochs = checkpoint.read_leader_epochs(found.directory)
    for i, base in enumerate(found.bases):
        if segments and expected < base <= (found.dense_from or 0):
            segments[-1].extend_to(base)  # compaction has removed the last offsets
            expected = base
        if base != expected and base > recovery_point:
            _refuse_the_rest(found, found.bases[i:], expected)
            break
        if base != expected:
            _set_aside_remnants(found, segments, expected, base)
            segments.clear()
        next_base = found.bases[i + 1] if i + 1 < len(found.bases) else None
        if next_base is not None and next_base <= recovery_point:
            segments.append(_trusted_segment(found, base, next_base))
        else:
            segments.append(_scan(found, base, recovery_point, epochs))
        expected = segments[-1].end_offset
    if expected < recovery_point:
        log.error(
            "%s ends at offset %d, below its recovery point %d: synced records are missing or"
            " damaged",
            found.topic_partition,
            expected,
            recovery_point,
        )
    _note_unsynced(segments, recovery_point, to_sync)
    if to_sync or len(segments) != len(found.bases):
        to_sync.append(found.directory)
    return segments


def _refuse_the_rest(found: _Found, bases: list[int], expected: int) -> None:
    """Nothing vouches for segments above the recovery point that do not go on at `expected`."""
    log.error(
        "%s should begin at offset %d: it and what follows is set aside as %s",
        found.path(bases[0]),
        expected,
        CORRUPT_SUFFIX,
    )
    _set_aside(found.directory, bases)


def _set_aside_remnants(found: _Found, segments: list[Segment], expected: int, base: int) -> None:
    """Offsets are missing below the recovery point.  Everything there was on disk, so what is
    missing was deleted, and the `segments` before it are remnants of that deletion."""
    log.error(
        "offsets [%d, %d) of %s are missing: the segments before them are set aside as %s",
        expected,
        base,
        found.topic_partition,
        CORRUPT_SUFFIX,
    )
    _set_aside(found.directory, [s.base_offset for s in segments])


def _note_unsynced(segments: list[Segment], recovery_point: int, to_sync: list[Path]) -> None:
    """Add the files of recovered segments that have to be synced; what ends below the recovery
    point was on disk."""
    for segment in segments:
        segment.sealed = segment is not segments[-1]
        if segment.end_offset > recovery_point:
            to_sync.append(segment.path)
            if segment.sealed:  # indexes of the last segment are synced when it is sealed
                to_sync += [segment.offset_index.path, segment.time_index.path]
        segment.synced = segment.sealed


def _trusted_segment(found: _Found, base: int, end_offset: int) -> Segment:
    """A segment below the recovery point, without a scan; the next one begins at `end_offset`."""
    directory, path = found.directory, found.path(base)
    length = os.stat(path).st_size
    segment = Segment(
        directory,
        base,
        size=length,
        end_offset=end_offset,
        sealed=True,
        dense_from=found.gaps_below,
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
        rebuild_indexes(segment, found.config)
    walk = _end_of(segment, length)
    size, found_end = walk.position, walk.next_offset
    if size == length and found_end < end_offset:
        # The file is whole: a cleaner, which removes superseded records, leaves it like this.
        _tell_missing(found, found_end, end_offset)
        found_end = end_offset
    elif found_end != end_offset and not _is_unwritten(segment, size):
        # What was synced here cannot be read any more.  It keeps its offsets, so that the segments
        # after it still go on where it ends.
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


def _tell_missing(found: _Found, first: int, end_offset: int) -> None:
    """Offsets [first, end_offset) are missing.  That is no news of a log that is compacted, or was
    up to there when its topic still asked for that."""
    level, why = logging.DEBUG, "compacted away"
    if not found.config.compacts:
        cleaned = checkpoint.read_offsets(found.directory.parent / checkpoint.CLEANED)
        if cleaned.get(found.topic_partition, 0) < end_offset:
            level, why = logging.WARNING, "compacted away, or with a file that is gone"
    what = (first, end_offset, found.directory.name)
    log.log(level, "offsets [%d, %d) of %s are missing: %s", *what, why)


def _scan(found: _Found, base: int, recovery_point: int, epochs: list[tuple[int, int]]) -> Segment:
    """Scan one segment, make what follows its last good batch zeros, write its indexes.  `epochs`
    were on disk before a batch of theirs was committed."""
    greatest_epoch, newest_from = epochs[-1] if epochs else (_ANY_EPOCH, _ANYWHERE)
    directory, path, config = found.directory, found.path(base), found.config
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
            dense_from=found.gaps_below,
            least_epoch=epoch_at(epochs, base),
            greatest_epoch=greatest_epoch,
            newest_from=newest_from,
        )
        if scanned.reason and _was_indexed_after(segment.offset_index.path, scanned.size):
            _copy_start(path, scanned.size)
        elif scanned.size < length and not punch_hole(
            segment.fd, scanned.size, length - scanned.size
        ):
            log.warning("the file system of %s cannot punch holes: shortening the file", path)
            segment.unmap_if_idle()
            os.truncate(path, scanned.size)
    finally:
        segment.release()
        segment.unmap_if_idle()
    if scanned.reason:
        log.warning(
            "%s is cut at offset %d, position %d: there is %s",
            path,
            scanned.end_offset,
            scanned.size,
            scanned.reason,
        )
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
    write_indexes(segment, scanned)
    return segment


def _was_indexed_after(path: Path, position: int) -> bool:
    """Does an offset index name a batch after a position?  Only those that were committed get into
    it, one in each index.interval.bytes.  What was allocated of the file is zeros."""
    entries = path.read_bytes() if path.exists() else b""
    whole = len(entries) // OffsetIndex.entry_bytes * OffsetIndex.entry_bytes
    return any(at > position for _, at in struct.iter_unpack(">ii", entries[:whole]))


def _copy_start(path: Path, size: int) -> None:
    """Have a file of its own in place of a segment for its first `size` bytes.  A batch after them
    was committed, so clients may have the old file mapped and look at it: it stays as it is."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with open(path, "rb") as old, open(temporary, "wb") as new:
        copy_start(old.fileno(), new.fileno(), size)
    os.rename(temporary, path)
    checkpoint.sync_directory(path.parent)


def _set_aside(directory: Path, bases: list[int]) -> None:
    for base in bases:
        path = directory / file_name(base, LOG_SUFFIX)
        os.rename(path, path.with_name(path.name + CORRUPT_SUFFIX))
        for suffix in (OffsetIndex.suffix, TimeIndex.suffix, TRANSACTION_SUFFIX):
            (directory / file_name(base, suffix)).unlink(missing_ok=True)
