"""How segments of a log are exchanged for compacted ones: in memory and on disk.

Law of the file: `Compacting` is the part of `kdirect.log.partition.Partition` that puts cleaned
segments in place, with the same locks; what they hold is decided by `kdirect.log.cleaning`.

On disk, for a group of neighbours that become one segment:

1. The new files are written beside the old ones with the suffix ``.cleaned``, and synced.
2. They are renamed to ``.swap``, the log last.  From then on the exchange counts.
3. The old segments but the first are removed, which the new one has the name of.  Where removed
   files wait (`kdirect.log.removals`), the first one's get a second name before.
4. The new files take the names of the first one's.

A start after a crash removes ``.cleaned`` files and whatever has no log with the suffix ``.swap``,
and carries on from step 3 for a log that has (`finish_swaps`).

In memory the old segments are acquired throughout, so a reader that looked before goes on in their
bytes: grants and leases of old files stay valid until they are released, and their records are the
same but for those that nobody needs.  Whoever looks after finds the new segment.

Before the first exchange the log notes, on disk, that offsets may be missing below the end of what
is compacted (``kdirect_dense_from`` in ``partition.metadata``): readers and recovery go by that.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from kdirect.errors import CorruptLogError, LogError
from kdirect.failpoints import reached
from kdirect.log import checkpoint, producer_state
from kdirect.log.cutting import Cutting
from kdirect.log.kernel_marks import allow_gaps_below
from kdirect.log.kernel_transactions import remove_aborted
from kdirect.log.mapped import Mapping
from kdirect.log.removals import unlink
from kdirect.log.scan import ScannedSegment, scan_segment
from kdirect.log.segment import LOG_SUFFIX, Segment, file_name, segment_files

log = logging.getLogger("kdirect.log")

NEVER = (1 << 63) - 1
CLEANED_SUFFIX = ".cleaned"
SWAP_SUFFIX = ".swap"


class Compacting(Cutting):
    """See the module.  What it works on is made by `Partition`."""

    topic_id: uuid.UUID
    dense_from: int
    moved: checkpoint.Moved | None

    def note_gaps_below(self, offset: int) -> None:
        """From now on offsets below this one may be missing; that is on disk first.  LogError,
        OSError."""
        with self._roll_lock:
            self._check_open()
            if offset <= self.dense_from:
                return
            checkpoint.write_partition_metadata(self.directory, self.topic_id, offset, self.moved)
            self.dense_from = offset
            allow_gaps_below(self.kernel, offset)
            for segment in self._segments:
                segment.dense_from = max(segment.dense_from, offset)

    def exchange(
        self,
        old: Sequence[Segment],
        new: Segment,
        paths: Sequence[Path],
        forgotten: Sequence[int] = (),
    ) -> bool:
        """Put `new` in place of the neighbours `old`, which the caller has acquired.  `paths` are
        its files' names without the suffix ``.cleaned`` that they have, the log last.  The aborted
        transactions whose markers are at the offsets `forgotten` leave the aborted index.  False,
        and nothing has changed: the old segments are not in the log any more.  LogError."""
        with self._roll_lock:
            self._check_open()
            try:
                at = self._segments.index(old[0])
            except ValueError:
                return False
            if self._segments[at : at + len(old)] != tuple(old):
                return False
            try:
                for path in paths:
                    os.rename(_named(path, CLEANED_SUFFIX), _named(path, SWAP_SUFFIX))
            except OSError as e:
                raise LogError(
                    f"{self.topic_partition} was not compacted: {e}", hint="check the disk"
                ) from e
            try:
                self._finish_exchange(at, old, new, paths, forgotten)
            except OSError as e:
                raise self._cut_failed(old[-1].end_offset, e) from e
            return True

    def _finish_exchange(
        self,
        at: int,
        old: Sequence[Segment],
        new: Segment,
        paths: Sequence[Path],
        forgotten: Sequence[int],
    ) -> None:
        checkpoint.sync_directory(self.directory)
        reached("compaction, swap files are named")
        self._keep_files(segment_files(self.directory, old[0].base_offset))
        for segment in old[1:]:
            self._remove_files(segment_files(self.directory, segment.base_offset))
        reached("compaction, old segments are gone")
        for path in paths:
            os.rename(_named(path, SWAP_SUFFIX), path)
            reached("compaction, a swap file has its name")
        checkpoint.sync_directory(self.directory)
        remove_aborted(self.kernel, forgotten)  # before anybody reads where a marker is missing
        with self._lock:
            self._set_segments((*self._segments[:at], new, *self._segments[at + len(old) :]))
        for segment in old:
            segment.end_replaced()
        self._leave(old)
        self._aborted.exchanged(new.base_offset, new.end_offset)
        self._remove_files(
            [producer_state.snapshot_path(self.directory, s.base_offset) for s in old[1:]]
        )
        self._disk.directory_changed = True
        reached("compaction, a group is done")


def _named(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def finish_swaps(directory: Path, files: Sequence[str], dense_from: int | None) -> bool:
    """Carry on with exchanges that a crash has ended, before anything of the log is loaded, and
    remove what had not begun to count; whether there was any.  A log that has no offsets missing
    (below `dense_from`; None: Kafka wrote it) was never compacted, and its swap files are not
    ours.  CorruptLogError where both the old and the new segment are damaged or gone."""
    rest = [name for name in files if name.endswith((CLEANED_SUFFIX, SWAP_SUFFIX))]
    for name in sorted(n for n in rest if n.endswith(LOG_SUFFIX + SWAP_SUFFIX)):
        stem = name.partition(".")[0]
        if not (len(stem) == 20 and stem.isdigit()):
            continue
        if dense_from is None or dense_from > int(stem):
            _finish_swap(directory, files, int(stem))
    for name in rest:
        (directory / name).unlink(missing_ok=True)
    if rest:
        checkpoint.sync_directory(directory)
    return bool(rest)


def _finish_swap(directory: Path, files: Sequence[str], base: int) -> None:
    path = directory / file_name(base, LOG_SUFFIX)
    swap = _named(path, SWAP_SUFFIX)
    found = scan_file(swap, base, NEVER, 4096)
    if found.size != swap.stat().st_size:
        if path.exists():
            return  # it was not synced, so it did not count
        raise CorruptLogError(
            f"{swap} is damaged at position {found.size}: there is {found.reason or 'nothing'}",
            hint="restore the partition from a good copy",
        )
    logs = (n for n in files if n.endswith(LOG_SUFFIX) and n.partition(".")[0].isdigit())
    for old in sorted(b for b in (int(n.partition(".")[0]) for n in logs)):
        if base < old < found.end_offset:
            unlink(segment_files(directory, old))
    swaps = [n for n in files if n.startswith(swap.name[:20]) and n.endswith(SWAP_SUFFIX)]
    for other in sorted(swaps, key=lambda n: n == swap.name):  # the log last
        os.rename(directory / other, directory / other.removesuffix(SWAP_SUFFIX))
    log.warning("%s takes the place of what it was compacted from", path)


def scan_file(
    path: Path, base_offset: int, check_crc_from: int, index_interval_bytes: int
) -> ScannedSegment:
    """`scan_segment` of a compacted file that is in use nowhere else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = os.fstat(fd).st_size
        mapping = Mapping(fd, length)
        try:
            return scan_segment(  # type: ignore[no-any-return]
                mapping.address, length, base_offset, check_crc_from, index_interval_bytes
            )
        finally:
            mapping.unmap()
    finally:
        os.close(fd)
