"""State of the simulated executors: plain dictionaries in place of compiled tables."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from kdirect.state.batches import NO_BATCH, Phase, Progress, StateHeader
from kdirect.state.plan import VPARTS
from kdirect.state.windows import NoWindow, Session, Window


class Entry(NamedTuple):
    """Partial state of a key: in a bucket, or in the session ``[start, end)``."""

    key: int
    bucket: int
    start: int
    end: int
    count: int
    total: int
    greatest: int


def vpart_of(key: int) -> int:
    return key * 97 % VPARTS


def entry_of(window: Window, time: int, key: int, value: int) -> Entry:
    """The state of one row."""
    if isinstance(window, Session):
        return Entry(key, 0, time, time + window.gap_us, 1, value, value)
    return Entry(key, window.bucket(time), 0, 0, 1, value, value)


def _joined(a: Entry, b: Entry) -> Entry:
    return Entry(
        a.key,
        a.bucket,
        min(a.start, b.start),
        max(a.end, b.end),
        a.count + b.count,
        a.total + b.total,
        max(a.greatest, b.greatest),
    )


def merge(cells: dict[tuple[int, int], list[Entry]], entry: Entry) -> None:
    """Merge an entry into the cells of its key and bucket: one entry, or disjoint sessions."""
    where = (entry.key, entry.bucket)
    rest = []
    for other in cells.get(where, ()):
        if other.start <= entry.end and entry.start <= other.end:
            entry = _joined(entry, other)
        else:
            rest.append(other)
    cells[where] = [*rest, entry]


class StateFile:
    """What an executor keeps in mapped memory: it outlives the process."""

    def __init__(self, header: StateHeader) -> None:
        self.header = header
        self.cells: dict[tuple[int, int], list[Entry]] = {}
        self.changed: set[tuple[int, int]] = set()
        self.kept: Counter = Counter()

    @classmethod
    def empty(
        cls, plan_hash: str, executor: int, executors: int, vparts: tuple[int, int], attempt: int
    ) -> StateFile:
        return cls(
            StateHeader(
                plan_hash=plan_hash,
                executor=executor,
                executors=executors,
                vparts=vparts,
                attempt=attempt,
                batch=NO_BATCH,
                phase=Phase.CLEAN,
            )
        )

    def mark(self, attempt: int, batch: int, phase: Phase, after: Progress | None = None) -> None:
        header = self.header
        self.header = replace(header, attempt=attempt, batch=batch, phase=phase, after=after)

    def apply(self, entry: Entry) -> None:
        merge(self.cells, entry)
        self.changed.add((entry.key, entry.bucket))

    def trigger(self, window: Window, before: int, closes: int, emit: bool) -> None:
        """Emit and drop what closes; `kept` is replaced."""
        out: Counter = Counter()
        if isinstance(window, NoWindow):
            for where in self.changed:
                for e in self.cells[where]:
                    out[(e.key, 0, 0, e.count, e.total, e.greatest)] += 1
        elif isinstance(window, Session):
            for where, entries in list(self.cells.items()):
                done = [e for e in entries if window.is_closed(e.end, closes)]
                self.cells[where] = [e for e in entries if not window.is_closed(e.end, closes)]
                for e in done:
                    out[(e.key, e.start, e.end, e.count, e.total, e.greatest)] += 1
        else:
            self._trigger_buckets(window, before, closes, out)
        self.changed = set()
        self.kept = out if emit else Counter()

    def _trigger_buckets(self, window, before: int, closes: int, out: Counter) -> None:
        closing = window.closing(before, closes)
        windows = {
            index
            for _, bucket in self.cells
            for index in window.windows_of(bucket)
            if index in closing
        }
        for index in windows:
            found: dict[int, Entry] = {}
            for bucket in window.buckets_of(index):
                for (key, at), (entry, *_) in self.cells.items():
                    if at == bucket:
                        found[key] = _joined(found[key], entry) if key in found else entry
            start, end = window.bounds(index)
            for key, e in found.items():
                out[(key, start, end, e.count, e.total, e.greatest)] += 1
        first = window.dropped_buckets(closes)
        self.cells = {where: cell for where, cell in self.cells.items() if where[1] >= first}

    def part(self, first: int, last: int) -> dict[tuple[int, int], list[Entry]]:
        """The cells of some virtual partitions, as a snapshot has them."""
        return copy.deepcopy(
            {
                where: cell
                for where, cell in self.cells.items()
                if first <= vpart_of(where[0]) < last
            }
        )

    def tally(self) -> Counter:
        """(count, total) by key, as one number each."""
        return tally(e for cell in self.cells.values() for e in cell)


def tally(entries) -> Counter:
    """Counts and totals by key: what must neither grow nor shrink on the way to a leader."""
    found: Counter = Counter()
    for entry in entries:
        found[entry.key, "count"] += entry.count
        found[entry.key, "total"] += entry.total
    return found
