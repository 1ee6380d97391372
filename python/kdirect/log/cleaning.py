"""One cleaning of one log: the keys of its dirty section are noted, and all segments up to the end
of that section are written again without the records that nobody needs.

Law of the file: it drives; which batch and which record stay is decided by `kdirect.log.clean_run`
and `kdirect.log.cleaned_transactions`, which segments are joined by `kdirect.log.cleaning_rules`,
and files and lists are exchanged by `kdirect.log.compacting`.  It holds no lock of the partition
while it reads and writes, because sealed segments do not change; appends go on.

Memory: the table of keys, the output of `piece_bytes`, and the largest batch, twice if it is
compressed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kdirect.errors import ClosedError, CorruptLogError, FormatError, LogError
from kdirect.failpoints import reached
from kdirect.format import layout
from kdirect.format.batch import CODEC_NAMES
from kdirect.format.compression import Compressor, Decompressor
from kdirect.format.segment_files import AbortedTransaction, pack_transaction_index
from kdirect.log.checkpoint import sync_directory
from kdirect.log.clean_run import AT_END, IS_FULL, BatchHead, CleanRun
from kdirect.log.cleaned_transactions import CleanedTransactions, marker_kind
from kdirect.log.cleaning_rules import CompactionRules, Dirt, SegmentFacts, grouped, look_at
from kdirect.log.compacting import CLEANED_SUFFIX, scan_file
from kdirect.log.config import NEVER
from kdirect.log.head import cannot_allocate
from kdirect.log.kernel_producers import known_producers
from kdirect.log.kernel_transactions import aborted_index
from kdirect.log.key_offsets import CELL_BYTES, KeyOffsets
from kdirect.log.mapped import copy_bytes, first_timestamp
from kdirect.log.partition import Partition
from kdirect.log.segment import LOG_SUFFIX, TRANSACTION_SUFFIX, Segment, file_name
from kdirect.log.segment_search import locate

log = logging.getLogger("kdirect.log")

INT32_MAX = (1 << 31) - 1


class Memory(NamedTuple):
    """What one cleaning may use: bytes of the table of keys and the part of it that is filled, and
    bytes of output that are gathered."""

    table_bytes: int
    load_factor: float
    piece_bytes: int


class Cleaned(NamedTuple):
    """What a cleaning has done; the next one begins at `end_offset`."""

    end_offset: int
    segments_before: int
    segments_after: int
    bytes_read: int
    bytes_written: int
    records_read: int
    records_kept: int
    keys: int


def facts_of(segment: Segment, *, with_indexes: bool = False) -> SegmentFacts:
    """What the rules ask of a segment; the sizes of its indexes are looked up on request."""

    def first() -> int:
        segment.acquire()
        try:
            return int(first_timestamp(segment.address, segment.size))
        finally:
            segment.release()

    size, end_offset = segment.extent()
    offsets, times = 0, 0
    if with_indexes:
        offsets, times = (
            path.stat().st_size if path.exists() else 0
            for path in (segment.offset_index.path, segment.time_index.path)
        )
    newest = segment.max_timestamp
    return SegmentFacts(segment.base_offset, end_offset, size, offsets, times, newest, first)


def dirt_of(partition: Partition, cleaned_to: int | None, now_ms: int) -> Dirt:
    """What of a partition's log may be compacted."""
    config = partition.config
    rules = CompactionRules(
        config.min_cleanable_ratio, config.min_compaction_lag_ms, config.max_compaction_lag_ms
    )
    return look_at(
        [facts_of(s) for s in partition.segments],
        rules,
        log_start=partition.log_start_offset,
        last_stable=partition.last_stable_offset,
        gaps_below=partition.dense_from,
        cleaned_to=cleaned_to,
        now_ms=now_ms,
    )


class Cleaning:
    """One cleaning: construct, `run` once.

    `throttle(bytes)` is called for what is read and written, and may wait; it raises ClosedError
    where the cleaning is to end, and then the groups that are done stay done.  One thread."""

    def __init__(
        self,
        partition: Partition,
        dirt: Dirt,
        memory: Memory,
        now_ms: int,
        throttle: Callable[[int], None] = lambda bytes_: None,
    ) -> None:
        self._partition = partition
        self._dirt = dirt
        self._memory = memory
        self._now_ms = now_ms
        self._throttle = throttle
        self._decompressor = Decompressor()
        self._written = 0
        self._after = 0

    def run(self) -> Cleaned:
        """Clean; ClosedError where it was ended, or the log was cut or closed meanwhile.
        CorruptLogError for damaged batches, LogError, StorageFullError, OSError."""
        partition, dirt = self._partition, self._dirt
        segments = [
            s for s in partition.segments if s.sealed and s.base_offset < dirt.first_uncleanable
        ]
        if partition.recovery_point < dirt.first_uncleanable:
            partition.flush(dirt.first_uncleanable)
        aborted = aborted_index(partition.kernel, 0, NEVER)
        held = partition.held_offsets()
        run = self._note_keys(segments, aborted)
        end_offset = max(dirt.first_dirty, self._keys.latest_offset + 1)
        segments = [s for s in segments if s.base_offset < end_offset]
        if segments:
            partition.note_gaps_below(dirt.first_uncleanable)
            partition.write_checkpoints()
        transactions = CleanedTransactions(aborted, held)
        config = partition.config
        facts = [facts_of(s, with_indexes=True) for s in segments]
        for numbers in grouped(facts, config.segment_bytes, config.index_max_bytes):
            self._clean_group([segments[i] for i in numbers], run, transactions)
        return Cleaned(
            end_offset,
            len(segments),
            self._after,
            run.bytes_read,
            self._written,
            run.records_read,
            run.records_kept,
            self._keys.used,
        )

    # -- the keys ----------------------------------------------------------------------------------

    def _note_keys(
        self, segments: Sequence[Segment], aborted: Sequence[AbortedTransaction]
    ) -> CleanRun:
        dirt, memory = self._dirt, self._memory
        # No more cells than there can be keys.
        offsets = dirt.first_uncleanable - dirt.first_dirty
        wanted = int(offsets / memory.load_factor) + 2
        slots = max(2, min(memory.table_bytes // CELL_BYTES, wanted))
        self._keys = KeyOffsets(slots, memory.load_factor)
        producers = [
            (p.producer_id, p.batches[-1][3] if p.batches else -1, p.producer_epoch)
            for p in known_producers(self._partition.kernel)[0]
        ]
        run = CleanRun(
            self._keys,
            now_ms=self._now_ms,
            delete_retention_ms=self._partition.config.delete_retention_ms,
            upper_bound=dirt.first_uncleanable,
            producers=producers,
            piece_bytes=memory.piece_bytes,
        )
        # The markers of earlier ones are not met here, and their producers have gone on since.
        transactions = CleanedTransactions(t for t in aborted if t.last_offset >= dirt.first_dirty)
        for segment in segments:
            if segment.end_offset <= dirt.first_dirty:
                continue
            segment.acquire()
            try:
                if not self._note_segment(segment, run, transactions):
                    return run
            finally:
                segment.release()
            self._keys.reach_offset(segment.end_offset - 1)
        return run

    def _note_segment(
        self, segment: Segment, run: CleanRun, transactions: CleanedTransactions
    ) -> bool:
        """False: the table is full."""
        first, size = self._dirt.first_dirty, segment.size
        at = locate(segment, max(first, segment.base_offset))[0]
        while at < size:
            start = at
            at, why = run.note_keys(segment.address, at, size, first)
            self._throttle(at - start)
            if why == IS_FULL:
                return False
            if why != AT_END:
                head = run.head(segment.address, at, size)
                if not self._note_batch(segment, at, head, run, transactions):
                    return False
                at += head.size
        return True

    def _note_batch(
        self,
        segment: Segment,
        at: int,
        head: BatchHead,
        run: CleanRun,
        transactions: CleanedTransactions,
    ) -> bool:
        if head.is_control:
            transactions.discards_marker(
                head.producer_id, head.last_offset, self._marker(segment, at, head, run)
            )
            self._keys.reach_offset(head.last_offset)
            return True
        aborted = transactions.discards_batch(
            head.producer_id, head.last_offset, transactional=head.is_transactional
        )
        if aborted:
            self._keys.reach_offset(head.last_offset)
            return True
        plain = self._plain(segment, at, head)
        return run.note_batch(segment.address, at, segment.size, self._dirt.first_dirty, plain)

    # -- what is kept ------------------------------------------------------------------------------

    def _clean_group(
        self, group: Sequence[Segment], run: CleanRun, transactions: CleanedTransactions
    ) -> None:
        with ExitStack() as held:
            for segment in group:
                segment.acquire()
                held.callback(segment.release)
                segment.index_entries()  # so that they are mapped, whoever has their names later
            files = _CleanedFiles(group, self._partition.config.index_interval_bytes)
            held.callback(files.discard)
            try:
                for segment in group:
                    self._clean_segment(segment, run, transactions, files)
                forgotten = transactions.take_forgotten()
                ended = aborted_index(
                    self._partition.kernel, group[0].base_offset, group[-1].end_offset
                )
                ended = [t for t in ended if t.last_offset not in forgotten]
                new = files.finish(ended, self._partition.dense_from)
            except OSError as e:
                raise cannot_allocate(self._partition.directory, files.size, e) from e
            reached("compaction, cleaned files are written")
            if not self._partition.exchange(group, new, files.paths, sorted(forgotten)):
                raise ClosedError(
                    f"{self._partition.topic_partition} was cut while it was compacted",
                    hint="nothing to do: it is compacted later",
                )
            self._written += files.size
            self._after += 1

    def _clean_segment(
        self,
        segment: Segment,
        run: CleanRun,
        transactions: CleanedTransactions,
        files: _CleanedFiles,
    ) -> None:
        at, size = 0, segment.size
        while at < size:
            start = at
            at, why = run.keep(segment.address, at, size)
            if why not in (AT_END, IS_FULL):
                at += self._keep_batch(segment, at, run, transactions)
            data = b"" if why != IS_FULL and at < size else run.take()
            self._throttle(at - start + len(data))
            files.write(data)
        files.write(run.take())

    def _keep_batch(
        self, segment: Segment, at: int, run: CleanRun, transactions: CleanedTransactions
    ) -> int:
        """Keep what is to be kept of a batch that is compressed or one of a transaction; its
        size."""
        head = run.head(segment.address, at, segment.size)
        plain, marker_of_none = None, False
        if head.is_control:
            marker_of_none = transactions.discards_marker(
                head.producer_id, head.last_offset, self._marker(segment, at, head, run)
            )
            discard = marker_of_none and 0 <= head.delete_horizon_ms <= self._now_ms
        else:
            discard = transactions.discards_batch(
                head.producer_id, head.last_offset, transactional=head.is_transactional
            )
        if not discard:
            plain = self._plain(segment, at, head)
        records = run.keep_batch(
            segment.address,
            at,
            segment.size,
            plain,
            discard=discard,
            marker_of_none=marker_of_none,
        )
        if records is not None:
            compressor = Compressor(CODEC_NAMES[head.codec])
            run.put_compressed(bytes(compressor.run(records)))
        return head.size

    # -- batches -----------------------------------------------------------------------------------

    def _plain(self, segment: Segment, at: int, head: BatchHead) -> bytes | None:
        """The records of a compressed batch; None of one that is not."""
        if not head.codec or not head.records_count:
            return None
        start = at + layout.BATCH_HEADER_BYTES
        data = copy_bytes(segment.address + start, head.size - layout.BATCH_HEADER_BYTES)
        limit = self._partition.config.max_plain_batch_bytes
        try:
            return bytes(self._decompressor.run(head.codec, data, limit))
        except FormatError as e:
            raise CorruptLogError(
                f"the record batch at position {at} of {segment.path} cannot be decompressed: {e}",
                hint="raise max.batch.bytes if its producer can be trusted; it is not compacted"
                " until then",
            ) from e

    def _marker(self, segment: Segment, at: int, head: BatchHead, run: CleanRun) -> int | None:
        return marker_kind(run.first_key(segment.address, at, segment.size))


def transaction_index(segment: Segment) -> Path:
    """The path of a segment's ``.txnindex``."""
    return segment.path.with_suffix(TRANSACTION_SUFFIX)


class _CleanedFiles:
    """The files of one new segment.  Life: `write`, `finish`; `discard` in the end, which removes
    what has not got its name.  OSError when the disk is full."""

    def __init__(self, group: Sequence[Segment], interval: int) -> None:
        self._first, self._last = group[0], group[-1]
        self._interval = interval
        self._had_transactions = any(transaction_index(s).exists() for s in group)
        directory, base = self._first.directory, self._first.base_offset
        suffixes = (TRANSACTION_SUFFIX, ".timeindex", ".index", LOG_SUFFIX)
        self.paths = [directory / file_name(base, suffix) for suffix in suffixes]
        self._cleaned = [p.with_name(p.name + CLEANED_SUFFIX) for p in self.paths]
        self.size = 0
        self._fd = os.open(
            self._cleaned[-1], os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self.size += len(data)
        if self.size > INT32_MAX:
            raise LogError(
                f"compacted, {self._first.path} would have more than {INT32_MAX} bytes",
                hint="lower segment.bytes of the topic",
            )

    def finish(self, aborted: Sequence[AbortedTransaction], dense_from: int) -> Segment:
        """Put everything on disk; the segment that they will be."""
        first, last = self._first, self._last
        scanned = scan_file(self._cleaned[-1], first.base_offset, 0, self._interval)
        if scanned.size != self.size:
            raise CorruptLogError(
                f"what compaction wrote in place of {first.path} is not sound at position"
                f" {scanned.size}: there is {scanned.reason or 'nothing'}",
                hint="this is a defect: the old segments stay; report it",
            )
        indexes = (scanned.time_index, scanned.offset_index)
        for path, data in zip(self._cleaned[1:3], indexes, strict=True):
            path.write_bytes(data)
        if aborted or self._had_transactions:  # whose index is to be replaced
            self._cleaned[0].write_bytes(pack_transaction_index(aborted))
        modified = os.fstat(last.fd).st_mtime_ns  # its name may be gone
        os.utime(self._cleaned[-1], ns=(modified, modified))  # retention asks for it
        self.paths = [p for p, c in zip(self.paths, self._cleaned, strict=True) if c.exists()]
        for path in self.paths:
            fd = os.open(path.with_name(path.name + CLEANED_SUFFIX), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(first.directory)
        segment = Segment(
            first.directory,
            first.base_offset,
            size=self.size,
            end_offset=last.end_offset,
            sealed=True,
            max_timestamp=scanned.max_timestamp,
            dense_from=dense_from,
        )
        segment.synced = True
        return segment

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for path in self._cleaned:
            path.unlink(missing_ok=True)


__all__ = ["Cleaned", "Cleaning", "Memory", "dirt_of", "facts_of", "transaction_index"]
