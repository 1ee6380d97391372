"""The aborted index of a log in files: Kafka's ``.txnindex`` beside the segments that have entries.

Law of the room: reads and writes those files, and nothing else.  The index itself is the kernel's
(`kdirect.log.transactions`).  An entry belongs to the segment that holds its marker.

A start takes from the files what lies below the newest producer snapshot; batches tell the rest.
So entries are on disk before a snapshot that stands for them, and a file that has more (a crash
came before the snapshot, or the log was cut) does no harm.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kdirect.errors import FormatError
from kdirect.format.layout import TRANSACTION_INDEX_ENTRY_BYTES
from kdirect.format.segment_files import (
    AbortedTransaction,
    pack_transaction_index,
    parse_transaction_index,
)
from kdirect.log.checkpoint import replace_file
from kdirect.log.kernel import CommitKernel
from kdirect.log.kernel_transactions import aborted_index
from kdirect.log.segment import TRANSACTION_SUFFIX, Segment, file_name

log = logging.getLogger("kdirect.log")


class AbortedFiles:
    """What of the aborted index of one partition is in files.  `write` is called with the
    partition's roll lock held."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # The entries, by base offset; None: not known.
        self._written: dict[int, list[AbortedTransaction] | None] = {}
        self._changes_from = 0  # no segment that begins below gets an entry

    def be_in(self, directory: Path) -> None:
        """The log is in another directory now, with the files as they are."""
        self._directory = directory

    def write(self, kernel: CommitKernel, segments: Sequence[Segment]) -> None:
        """Put on disk what is missing; `segments` are all of the log.  OSError."""
        for segment in segments:
            base = segment.base_offset
            if base < self._changes_from:
                continue
            entries = aborted_index(kernel, base, segment.end_offset)
            if entries == self._written.get(base, []):
                continue
            path = self._directory / file_name(base, TRANSACTION_SUFFIX)
            if entries:
                replace_file(path, pack_transaction_index(entries), sync=True)
            else:
                path.unlink(missing_ok=True)
            self._written[base] = entries
        self._changes_from = segments[-1].base_offset
        self._forget(lambda at: at < self._changes_from)

    def cut(self, base: int) -> None:
        """The log was cut in that segment, whose file may have more now than the kernel."""
        self._forget(lambda at: at >= base)
        self._written[base] = None
        self._changes_from = min(self._changes_from, base)

    def exchanged(self, base: int, end_offset: int) -> None:
        """One segment stands for those of [base, end_offset), with a file that cleaning has
        written; see `kdirect.log.compacting`."""
        self._forget(lambda at: base <= at < end_offset)
        self._written[base] = None

    def _forget(self, which: Callable[[int], bool]) -> None:
        self._written = {at: known for at, known in self._written.items() if not which(at)}

    def read(
        self, files: Sequence[str], segments: Sequence[Segment]
    ) -> tuple[list[AbortedTransaction], int | None]:
        """At a start: (the entries, by markers, the base offset of the first segment whose file is
        damaged).  Of that one and those after it nothing is known; None: all are sound."""
        names = set(files)
        found: list[AbortedTransaction] = []
        for segment in segments:
            name = file_name(segment.base_offset, TRANSACTION_SUFFIX)
            if name not in names:
                continue
            self._written[segment.base_offset] = None
            try:
                found += _read(self._directory / name, segment)
            except (FormatError, OSError) as e:
                log.warning("what %s says is read out of the log: %s", self._directory / name, e)
                return found, segment.base_offset
        return found, None


def _read(path: Path, segment: Segment) -> list[AbortedTransaction]:
    data = path.read_bytes()
    whole = len(data) - len(data) % TRANSACTION_INDEX_ENTRY_BYTES
    if whole != len(data):
        raise FormatError(f"{os.fspath(path)} ends within an entry")
    entries = list(parse_transaction_index(data))
    # What lies above the segment's end was cut off, by a crash or by a leader.
    kept = [e for e in entries if e.last_offset < segment.end_offset]
    last = segment.base_offset - 1
    for entry in kept:
        if entry.last_offset <= last:
            raise FormatError(
                f"{os.fspath(path)} has an entry for the marker at offset {entry.last_offset} after"
                f" offset {last}"
            )
        last = entry.last_offset
    return kept
