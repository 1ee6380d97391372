"""A sequential run of a job, written without the rules that it is compared with.

One process, one dictionary, batch after batch.  It takes from the log of batches only what is input
to a batch (ranges, wall clock, idle partitions), and computes clocks, late rows and windows itself,
by trying every window near a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from kdirect.state.batches import BatchRecord, Partition
from tests.state.topics import Row

NEVER, FOREVER = -(1 << 63), (1 << 63) - 1
LEFT, RIGHT = "left", "right"  # the topics of a join
GIVES_BACK = {"inner": (), "left": (0,), "right": (1,), "full": (0, 1)}  # rows without a match


class Query(NamedTuple):
    """Count, sum and maximum by key and window, with `lists` all values too; or, where `how` says
    so, the pairs of rows of the topics left and right.  `kind` is tumbling, sliding, session or
    none.  `delays` are those of topics that have not `delay`."""

    kind: str
    size: int = 0
    slide: int = 0
    delay: int = 0
    ahead: int = 0
    origin: int = 0
    lists: bool = False
    how: str = ""
    delays: Mapping[str, int] = {}


def windows_of(query: Query, time: int) -> list[tuple[int, int]]:
    """The windows around a time, found by trying all that begin near it."""
    if query.kind == "none":
        return [(0, 0)]
    step = query.size if query.kind == "tumbling" else query.slide
    first = query.origin + (time - query.origin) // step * step
    starts = range(first - (query.size // step + 2) * step, first + step + 1, step)
    return [(s, s + query.size) for s in starts if s <= time < s + query.size]


class Sequential:
    """The job after some batches."""

    def __init__(self, query: Query, rows: Mapping[Partition, Sequence[Row]]) -> None:
        self.query = query
        self.rows = rows
        self.clock: dict[Partition, int] = {}
        self.closed = NEVER
        # (key, start, end) -> times and values of the rows in an open window; of a session the key
        # is (key,).  The value of a join is (side, value).
        self.open: dict[tuple, list[tuple[int, Any]]] = {}
        self.late = self.bad = self.kept = 0

    def run(self, record: BatchRecord) -> Counter:
        """The rows that the batch puts out."""
        changed = set()
        for tp, (start, end) in sorted(record.ranges.items()):
            for row in self.rows[tp][start:end]:
                changed |= self.apply(tp, row, record.now_us)
        entries = {tp: self.clock.get(tp, NEVER) for tp in record.ranges}
        awake = [time for tp, time in entries.items() if tp not in record.idle]
        closes = max(self.closed, min(awake) if awake else max(entries.values()))
        if record.closes_all:
            closes = FOREVER
        emitted = self.emit(closes, changed)
        self.closed = closes
        return emitted

    def apply(self, tp: Partition, row: Row, now: int) -> set:
        time = row.time
        if time is None or time < 0 or time > now + self.query.ahead:
            self.bad += 1
            return set()
        self.clock_next(tp, time)
        if self.is_late(time):
            self.late += 1
            return set()
        self.kept += 1
        key: Any = row.key
        value: Any = row.value
        if self.query.how:
            side = (LEFT, RIGHT).index(tp.topic)
            value = side, value
            if key is None:  # it equals nothing, also no null of the other side
                if side not in GIVES_BACK[self.query.how]:
                    return set()
                key = None, side
        if self.query.kind == "session":
            self.open.setdefault((key,), []).append((time, value))
            return set()
        found = set()
        for start, end in windows_of(self.query, time):
            if self.query.kind == "none" or end > self.closed:
                self.open.setdefault((key, start, end), []).append((time, value))
                found.add((key, start, end))
        return found

    def clock_next(self, tp: Partition, time: int) -> None:
        delay = self.query.delays.get(tp.topic, self.query.delay)
        self.clock[tp] = max(self.clock.get(tp, NEVER), time - delay)

    def is_late(self, time: int) -> bool:
        if self.query.kind == "none" or self.closed == NEVER:
            return False
        if self.query.kind == "session":
            return time + self.query.size < self.closed
        return all(end <= self.closed for _, end in windows_of(self.query, time))

    def emit(self, closes: int, changed: set) -> Counter:
        out: Counter = Counter()
        if self.query.kind == "none":
            for key, start, end in changed:
                out.update(self.results(key, start, end, self.open[key, start, end]))
            return out
        if self.query.kind == "session":
            for (key,), rows in list(self.open.items()):
                kept = []
                for session in sessions(rows, self.query.size):
                    start, end = session[0][0], session[-1][0] + self.query.size
                    if end < closes:
                        out.update(self.results(key, start, end, session))
                    else:
                        kept += session
                self.open[(key,)] = kept
            return out
        for key, start, end in [k for k in self.open if k[2] <= closes]:
            out.update(self.results(key, start, end, self.open.pop((key, start, end))))
        return out

    def results(self, key: Any, start: int, end: int, rows: list) -> Iterable[tuple]:
        """The rows of the result that a group gives."""
        if self.query.how:
            yield from self.pairs(key, start, end, rows)
        elif self.query.lists:
            yield key, start, end, *figures(rows), tuple(sorted(value for _, value in rows))
        else:
            yield key, start, end, *figures(rows)

    def pairs(self, key: Any, start: int, end: int, rows: list) -> Iterable[tuple]:
        """(start, end, left key, left value, right key, right value) of each pair, and of each row
        that has none and is given back."""
        key = None if isinstance(key, tuple) else key
        sides = [[(key, value) for _, (of, value) in rows if of == side] for side in (0, 1)]
        if all(sides):
            for left, right in product(*sides):
                yield start, end, *left, *right
            return
        if 0 in GIVES_BACK[self.query.how]:
            for left in sides[0]:
                yield start, end, *left, None, None
        if 1 in GIVES_BACK[self.query.how]:
            for right in sides[1]:
                yield start, end, None, None, *right


def figures(rows: list[tuple[int, int]]) -> tuple[int, int, int]:
    values = [value for _, value in rows]
    return len(values), sum(values), max(values)


def sessions(rows: list[tuple[int, int]], gap: int) -> list[list[tuple[int, int]]]:
    """Rows of one key, split where more than a gap lies between two."""
    found: list[list[Any]] = []
    for row in sorted(rows):
        if found and row[0] - found[-1][-1][0] <= gap:
            found[-1].append(row)
        else:
            found.append([row])
    return found
