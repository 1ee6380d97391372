"""State in chains: joins, lists, sessions, sets and extremes of strings, behind the interface of
the backend.

Owns: which rows go to which bucket and which leader, and what becomes of the groups of an ended
window: pairs for a join, lists and aggregates else.  Chains and tuples are chains.pyx and
tuples.pyx; rows.pyx says how a row is kept.  The delta of append state is the rows themselves, or
the intervals.

A plan that aggregates without lists keeps intervals with states in place of rows (sessions.pyx,
texts.pyx): what a group needs does not grow with its rows then.

Invariants: a row is kept with the columns that the result needs, and nothing else; a row with a
null in its key, which equals nothing, is kept only if an outer join gives it back; a row of several
sliding windows is kept once for each of them that is open.  `trigger` gives its result in blocks,
so that one key with many pairs needs no more memory than others; it is run to its end before
anything else happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kdirect.errors import DeltaError, StateError, StateLimitError
from kdirect.state.accumulators import cell_of, layout_of
from kdirect.state.aggregates import Aggregate
from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.chains import ChainTable
from kdirect.state.header import claim
from kdirect.state.keys import KeyShape, gather
from kdirect.state.plan import AggregatePlan, JoinPlan
from kdirect.state.rows import RowBlock, RowShape
from kdirect.state.schema import arrow_type
from kdirect.state.sessions import Cells, IntervalTable
from kdirect.state.snapshots import Section
from kdirect.state.strict import Members
from kdirect.state.tuples import LONGEST_ROW_BYTES, ChainShape, TuplePages, parse_page
from kdirect.state.whole import Whole, changes
from kdirect.state.windows import TIME_MAX, TIME_MIN, NoWindow, Session, Sliding, Tumbling

MOST_OPEN_WINDOWS = 60_000
BLOCK_ROWS = 1 << 16
BLOCK_SETS = 1 << 12  # groups of one block of results where each has a set of any size


class AppendDelta(NamedTuple):
    """What a fragment had for its leader: (address, bytes) of each page, and how many rows."""

    pages: list[tuple[int, int]]
    entries: int
    tuples: int


def needs_append(plan: AggregatePlan | JoinPlan) -> bool:
    """Whether the state of a plan is chains: of rows, or of intervals."""
    if isinstance(plan, JoinPlan) or isinstance(plan.window, Session):
        return True
    return any(a.kept_as(plan.input.types) != "cell" for a in plan.aggregates)


def _cells(plan: AggregatePlan) -> Cells:
    """The states of the aggregates that are not lists."""
    kinds = plan.input.types
    kept = [(a, a.kept_as(kinds), kinds.get(str(a.column))) for a in plan.aggregates]
    cells = [cell_of(a, kind, plan.overflow) for a, how, kind in kept if how == "cell"]
    layout = layout_of(cells, 1, keys=repr([(f.name, f.type) for f in plan.input.schema]))
    return Cells(layout, [(a, str(kind)) for a, how, kind in kept if how in ("text", "set")])


class AppendState:
    """The chains that one executor leads, and its fragments of the others'.

    `owners[v]` is the executor that leads virtual partition v; any other number than those of
    executors is nobody's: its rows are dropped (they are another's to replay).  The life of a batch
    is `begin`, any number of `update`, `merge` and `flush`, and one `trigger`.
    """

    def __init__(
        self,
        plan: AggregatePlan | JoinPlan,
        memory: StateMemory,
        pages: PageMemory,
        *,
        executor: int,
        executors: int,
        owners: Sequence[int],
    ) -> None:
        self.plan: Any = plan
        self.memory, self.pages = memory, pages
        self.executor = executor
        self.joins = isinstance(plan, JoinPlan)
        self.window: Any = plan.window  # each method knows which of them it has
        self.session = isinstance(plan.window, Session)
        inputs = plan.inputs
        first = inputs[0].types
        names = self._keys(0)
        key_fields = [(name, arrow_type(first[name])) for name in names]
        # Both sides of a full join keep rows with a null in the key.  Such a row matches nothing,
        # so those of one side are no group with those of the other.
        self.split_nulls = isinstance(plan, JoinPlan) and all(map(plan.gives_back, (0, 1)))
        self.keys = KeyShape(key_fields + [("", pa.int8())] * self.split_nulls)
        self.cells: Any = None  # Cells, of a plan that aggregates
        # Lists need the rows; everything else is a state of each interval.
        self.intervals = False
        check, timed = 0, False
        if isinstance(plan, AggregatePlan):
            self.cells = _cells(plan)
            check = self.cells.check
            timed = any(a.kind in ("first", "last") for a in plan.aggregates)
            self.intervals = not any(self._is_list(a) for a in plan.aggregates)
        if self.intervals:
            tail = self.cells.texts.count > 0
            shapes = [RowShape.of_words(2 + self.cells.words, tail)]
        else:
            shapes = [
                RowShape([(n, arrow_type(given.types[n])) for n in self._kept(side)])
                for side, given in enumerate(inputs)
            ]
        gap = plan.window.gap_us if isinstance(plan.window, Session) else None
        self.shape = ChainShape(self.keys.words, shapes, timed, gap, self.intervals, check)
        self.owners = np.full(256, -1, np.int64)
        self.own(owners)
        self.tables: dict[int, ChainTable] = {}
        self.fragments = {
            leader: TuplePages(self.shape, pages, executor)
            for leader in range(executors)
            if leader != executor
        }
        # Intervals of other leaders' keys in this epoch, by leader and bucket.
        self.partial: dict[tuple[int, int], ChainTable] = {}
        self.closed_before = TIME_MIN
        self.whole = Whole()
        self._ending: Iterator[pa.RecordBatch] | None = None  # the trigger that runs
        self._closes = TIME_MIN

    def _is_list(self, aggregate: Aggregate) -> bool:
        return aggregate.kept_as(self.plan.input.types) == "list"

    def _keys(self, side: int) -> tuple[str, ...]:
        return self.plan.keys_of(side) if isinstance(self.plan, JoinPlan) else self.plan.keys

    def _kept(self, side: int) -> tuple[str, ...]:
        """The columns that are kept of each row of a side; those of an aggregate's key lie in the
        entry already."""
        kept = self.plan.columns_kept(side)
        if isinstance(self.plan, JoinPlan):
            return kept
        used = {a.column for a in self.plan.aggregates}
        return tuple(name for name in kept if name in used)

    def own(self, owners: Sequence[int]) -> None:
        self.owners[:] = owners

    # -- rows --------------------------------------------------------------------------------------

    def begin(self, closed_before: int) -> None:
        """A batch begins: rows of windows that ended before it are late."""
        self.closed_before = closed_before

    @changes("a block of rows")
    def update(
        self,
        columns: Mapping[str, pa.Array],
        times: np.ndarray | None,
        side: int = 0,
        rows: int | None = None,
    ) -> int:
        """Keep the rows of a block; how many of them were late.  `times` are their event times,
        and without a window may be None; then `rows` is how many there are."""
        if times is None:
            times = np.zeros(rows or 0, np.int64)
        n = len(times)
        names = self._keys(side)
        arrays = [_array(columns[name]) for name in names]
        nulls = _nulls(arrays, n) if self.joins else None
        if self.split_nulls:
            alone = np.zeros(n, np.int8) if nulls is None else nulls.astype(np.int8) << side
            arrays.append(pa.array(alone))
        block = self.keys.encode(arrays, n)
        chosen = np.arange(n, dtype=np.uint32)
        late = times < self.window.late_below(self.closed_before)
        keep = ~late
        if nulls is not None and not self.plan.gives_back(side):
            keep &= ~nulls
        leaders = self.owners[(block.hashes() >> np.uint64(56)).astype(np.int64)]
        chosen, buckets = self._buckets(chosen[keep & (leaders >= 0)], times)
        if self.intervals:
            self._unite(columns, block, chosen, buckets, leaders, times)
            return int(late.sum())
        kept = [_array(columns[name]) for name in self._kept(side)]
        for leader, mine in _parts(leaders[chosen]):
            self._put(leader, side, block, kept, chosen[mine], buckets[mine], times, nulls)
        return int(late.sum())

    def _unite(
        self,
        columns: Mapping[str, pa.Array],
        keys: Any,
        rows: np.ndarray,
        buckets: np.ndarray,
        leaders: np.ndarray,
        times: np.ndarray,
    ) -> None:
        """Bring rows into the intervals of their sessions or windows."""
        if not len(rows):
            return
        self.cells.point({n: _array(columns[n]) for n in self._kept(0)}, self.plan.overflow)
        times = np.ascontiguousarray(times, np.int64)
        for leader, mine in _parts(leaders[rows]):
            theirs, places = rows[mine], buckets[mine]
            for bucket, part in _parts(places):
                chosen = np.ascontiguousarray(theirs[part])
                self._interval_table(leader, bucket).update(keys, chosen, times, self.executor)

    def _interval_table(self, leader: int, bucket: int) -> Any:
        """Where the intervals of a leader's keys are, its own or those of this epoch."""
        if leader == self.executor:
            return self._table(bucket)
        if (leader, bucket) not in self.partial:
            self.partial[leader, bucket] = self._new(bucket)
        return self.partial[leader, bucket]

    def _buckets(self, rows: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The buckets of rows; a row that falls into several open windows is there once for each.
        A bucket is a whole window here, also for sliding ones."""
        window = self.window
        if not isinstance(window, Tumbling | Sliding):
            return rows, np.zeros(len(rows), np.int64)
        last = (times[rows] - window.origin_us) // window.slide_us
        if not isinstance(window, Sliding):
            return rows, last
        found_rows, found = [], []
        open_from = window.closed_windows(self.closed_before)
        for back in range(-(-window.size_us // window.slide_us)):
            bucket = last - back
            start = window.origin_us + bucket * window.slide_us
            fits = (start + window.size_us > times[rows]) & (bucket >= open_from)
            found_rows.append(rows[fits])
            found.append(bucket[fits])
        return np.concatenate(found_rows), np.concatenate(found)

    def _put(
        self,
        leader: int,
        side: int,
        keys: Any,
        kept: list[pa.Array],
        rows: np.ndarray,
        buckets: np.ndarray,
        times: np.ndarray,
        nulls: np.ndarray | None,
    ) -> None:
        if leader == self.executor:
            parts = list(_parts(buckets))
        else:
            parts = [(0, slice(None))]
        for bucket, part in parts:
            mine = np.ascontiguousarray(rows[part])
            words = RowBlock(self.shape.rows[side], kept, mine)
            if words.longest * 8 > LONGEST_ROW_BYTES:
                raise StateLimitError(
                    f"a row of {self.plan.inputs[side].name} has {words.longest * 8} bytes",
                    hint=f"a row may have {LONGEST_ROW_BYTES}: choose fewer or shorter columns",
                )
            time = np.ascontiguousarray(times[mine]) if self.shape.timed else None
            null = None if nulls is None else nulls[mine]
            if leader == self.executor:
                self._table(bucket).append(keys, mine, words, side, time, null)
            else:
                to = np.ascontiguousarray(buckets[part])
                self.fragments[leader].add(keys, mine, words, side, to, time, null)

    def _table(self, bucket: int) -> ChainTable:
        found = self.tables.get(bucket)
        if found is None:
            if len(self.tables) >= MOST_OPEN_WINDOWS:
                raise StateLimitError(
                    f"{len(self.tables)} windows are open at once",
                    hint="make windows longer, or the allowed delay shorter",
                )
            found = self.tables[bucket] = self._new(bucket)
        return found

    def _new(self, bucket: int) -> ChainTable:
        if self.intervals:
            changes = isinstance(self.window, NoWindow)
            return IntervalTable(self.memory, self.shape, bucket, self.cells, changes)
        return ChainTable(self.memory, self.shape, bucket)

    # -- deltas ------------------------------------------------------------------------------------

    @changes("an epoch")
    def flush(self, leader: int) -> AppendDelta:
        """End the epoch of a fragment.  The pages are the caller's until `release`."""
        fragment = self.fragments[leader]
        for place in [place for place in self.partial if place[0] == leader]:
            table = self.partial.pop(place)
            table.write(fragment, table.table.scan())
            table.drop()
        rows = fragment.rows
        return AppendDelta(fragment.take(), *((rows, 0) if self.intervals else (0, rows)))

    def release(self, pages: Sequence[tuple[int, int]]) -> None:
        for address, _ in pages:
            self.pages.release(address)

    @changes("a delta")
    def merge(self, sender: int, page: Any) -> int:
        """Add the rows of a page of another executor; how many there were.  Raises DeltaError,
        without any effect, unless all of it can be read and belongs here."""
        parsed = parse_page(self.shape, page, sender)
        self._check(parsed, sender)
        self._add(parsed, sender)
        return parsed.count

    def _add(self, parsed: Any, lane: int | None) -> None:
        for bucket, rows in parsed.buckets_of():
            table = self._table(bucket)
            if isinstance(table, IntervalTable):
                table.add_intervals(parsed, rows, lane)
            else:
                table.add_parsed(parsed, rows)

    def _check(self, parsed: Any, sender: Any) -> None:
        if not parsed.count:
            return
        foreign = self.owners[(parsed.hashes >> np.uint64(56)).astype(np.int64)] != self.executor
        if foreign.any():
            raise _misplaced(sender, "a key of another leader is in it")
        if self.session:
            bad = parsed.buckets != 0
            ends = parsed.times < self.window.late_below(self.closed_before)
            bad |= ends | (parsed.times < 0)
            bad |= self._latest(parsed) > TIME_MAX - self.window.gap_us
        elif isinstance(self.window, NoWindow):
            bad = parsed.buckets != 0
        else:
            window = self.window
            most = (TIME_MAX - window.size_us - window.origin_us) // window.slide_us
            least = -(-window.size_us // window.slide_us)
            bad = (parsed.buckets < max(-least, window.closed_windows(self.closed_before))) | (
                parsed.buckets > most
            )
        if bad.any():
            raise _misplaced(sender, "a row in it is of a window that is not open")
        if (self._latest(parsed) < parsed.times).any():
            raise _misplaced(sender, "an interval in it ends early")
        if not parsed.has_keys_of(self.keys):
            raise _misplaced(sender, "the strings of a key in it do not add up or are not UTF-8")
        if self.intervals and not self.cells.whole(parsed):
            raise _misplaced(
                sender, "a value in it leads outside of its state or is text that is not UTF-8"
            )

    def _latest(self, parsed: Any) -> np.ndarray:
        """The last event time of each tuple."""
        if not self.intervals:
            return parsed.times
        return gather(0, parsed.sources, 0).view(np.int64)

    # -- windows that end --------------------------------------------------------------------------

    def keys_held(self) -> int:
        """Keys in all tables."""
        return sum(table.keys for table in self.tables.values())

    def trigger(self, closes: int) -> Iterator[pa.RecordBatch]:
        """Yields the results of the windows that the clock has closed, in blocks, and drops them.
        If it is left half way, the next trigger yields the rest first, and until then nothing else
        may be done: groups that are being emitted lie in no table.  After an error in it they are
        gone, and the state is good for nothing but `clear`."""
        self.whole.check()
        for limit in ([self._closes] if self._ending is not None else []) + [closes]:
            if self._ending is None:
                self._closes, self._ending = limit, self._ended(limit)
            yield from _Kept(self._ending, self.whole)
            self._ending = None

    def check_settled(self) -> None:
        """Raises StateError if something was done by half, or left half way."""
        self.whole.check()
        if self._ending is not None:
            raise StateError("a trigger was left half way: the results of ended windows wait in it",
                             hint="run the iterator of trigger() to its end")  # fmt: skip

    def _ended(self, closes: int) -> Iterator[pa.RecordBatch]:
        if self.session:
            for table in self.tables.values():
                yield from self._result(table, closes, None)
                if not table.rows:
                    table.drop()
            return
        window = self.window
        if isinstance(window, NoWindow):
            for table in self.tables.values():
                yield from self._result(table, closes, None)
            return
        first_open = window.closed_windows(closes)
        for bucket in sorted(b for b in self.tables if b < first_open):
            yield from self._result(self.tables[bucket], TIME_MAX, window.bounds(bucket))
            self.tables.pop(bucket).drop()

    def _result(
        self, table: ChainTable, closes: int, bounds: tuple[int, int] | None
    ) -> Iterator[pa.RecordBatch]:
        if isinstance(self.plan, JoinPlan):
            for left, right, start, end in table.pairs(self.plan.how, closes, BLOCK_ROWS):
                sides = [dict(zip(self.shape.rows[i].names, self.shape.rows[i].decode(rows)))
                         for i, rows in enumerate((left, right))]  # fmt: skip
                yield self._batch(
                    _bounds(bounds, start, end)
                    + [sides[side][name] for side, name, _ in self.plan.columns]
                )
            return
        sets = any(a.kept_as(self.plan.input.types) == "set" for a in self.plan.aggregates)
        groups = table.groups(closes, BLOCK_SETS if sets else BLOCK_ROWS)
        for entries, lengths, rows, start, end in groups:
            at = entries + np.uint64(8 * table.table.state_words)
            columns = self.keys.decode(self.memory.address, at) if self.plan.keys else []
            if not isinstance(self.window, NoWindow):
                columns += _bounds(bounds, start, end)
            yield self._batch(columns + self._aggregates(table, lengths, rows))

    def _aggregates(
        self, table: ChainTable, lengths: np.ndarray, rows: np.ndarray
    ) -> list[pa.Array]:
        """The aggregates of groups, of which the first has the first lengths[0] rows, and so on."""
        plan, times = self.plan, None
        kept: dict[str, pa.Array] = {}
        if isinstance(table, IntervalTable):
            found = table.folded(lengths, rows, plan.overflow)
        else:
            shape = self.shape.rows[0]
            kept = dict(zip(shape.names, shape.decode(rows)))
            if self.shape.timed:
                times = gather(0, rows - np.uint64(8), 0).view(np.int64)
            self.cells.point(kept, plan.overflow)
            found = self.cells.reduce(lengths, times, plan.overflow)
        return [
            _lists(kept[str(a.column)], lengths) if self._is_list(a) else found[a.name]
            for a in plan.aggregates
        ]

    def _batch(self, columns: list[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(columns, schema=self.plan.output_schema)

    # -- snapshots, and other processes ------------------------------------------------------------

    def snapshot(self) -> list[Section]:
        """A copy of what this executor leads: {"vpart": number, "pages": the bytes of each page}
        and the pages of each virtual partition that has rows."""
        self.check_settled()
        parts: dict[int, list[bytes]] = {}
        for table in self.tables.values():
            positions = table.table.scan()
            vparts = table.vparts(positions)
            for vpart in np.unique(vparts):
                parts.setdefault(int(vpart), []).extend(table.export(positions[vparts == vpart]))
        return [
            Section({"vpart": vpart, "pages": [len(page) for page in pages]}, b"".join(pages))
            for vpart, pages in sorted(parts.items())
        ]

    @changes("a snapshot")
    def restore(self, section: Section, executors: int, vparts: tuple[int, int]) -> None:
        """Add what `snapshot` gave of a virtual partition at an executor that led `vparts`, if this
        one leads it now.  Raises StateError or DeltaError if it is damaged."""
        head = Members(section.head, "a section of a snapshot")
        vpart, lengths = head.number("vpart", vparts[0], vparts[1] - 1), head.numbers("pages", 0)
        head.close()
        if self.owners[vpart] != self.executor:
            return
        sender = f"snapshot of partition {vpart}"
        ends = np.cumsum([0, *lengths])
        if ends[-1] != len(section.data):
            raise _misplaced(sender, "its pages do not fill its section")
        parsed = [
            parse_page(self.shape, section.data[begin:end], sender)
            for begin, end in itertools.pairwise(ends)
        ]
        for page in parsed:
            if page.count and (page.hashes >> np.uint64(56) != np.uint64(vpart)).any():
                raise _misplaced(sender, "a key of another one is in it")
            if page.count and (self._latest(page) < page.times).any():
                raise _misplaced(sender, "an interval in it ends early")
            if not page.has_keys_of(self.keys):
                raise _misplaced(sender, "the strings of a key do not add up or are not UTF-8")
            if self.intervals and not self.cells.whole(page):
                raise _misplaced(sender, "a value leaves its state or is text that is not UTF-8")
        for page in parsed:
            self._add(page, None)

    def clear(self) -> None:
        """Forget all state and what the fragments hold."""
        self._ending = None
        self.whole.reset()
        for table in self.tables.values():
            table.drop()
        for table in self.partial.values():
            table.drop()
        self.tables.clear()
        self.partial.clear()
        for fragment in self.fragments.values():
            self.release(fragment.take())

    def blocks(self) -> list[tuple[int, int]]:
        """[(position, log)] of the memory that tables use."""
        tables = [*self.tables.values(), *self.partial.values()]
        return [block for table in tables for block in table.blocks()]

    def catalogue(self) -> list[dict[str, Any]]:
        """What `adopt` needs to go on with the same memory in another process."""
        self.check_settled()
        return [table.catalogue() for table in self.tables.values()]

    def adopt(self, catalogue: list[dict[str, Any]], blocks: list[tuple[int, int]]) -> None:
        """Go on with the tables of a catalogue, whose blocks the memory has taken over.  Raises
        ValueError if what lies there is not what the catalogue says."""
        claim(set(blocks), [part for entry in catalogue for part in (entry["table"], entry)])
        for entry in catalogue:
            table = self._new(0)
            table.restore(entry)
            if table.bucket in self.tables:
                raise ValueError(f"bucket {table.bucket} occurs twice")
            self.tables[table.bucket] = table


class _Kept:
    """Iterates over a generator that goes on living when its reader stops half way."""

    def __init__(self, blocks: Iterator[pa.RecordBatch], whole: Whole) -> None:
        self._blocks, self._whole = blocks, whole

    def __iter__(self) -> _Kept:
        return self

    def __next__(self) -> pa.RecordBatch:
        with self._whole.changing("the end of windows"):
            block = next(self._blocks, None)
        if block is None:
            raise StopIteration
        return block


def _parts(values: np.ndarray) -> Iterator[tuple[int, Any]]:
    """(value, which rows have it) of each of the values; mostly all rows have the same one."""
    if not len(values):
        return
    if (values == values[0]).all():
        yield int(values[0]), slice(None)
        return
    for value in np.unique(values):
        yield int(value), values == value


def _array(given: Any) -> pa.Array:
    return given.combine_chunks() if isinstance(given, pa.ChunkedArray) else given


def _nulls(arrays: list[pa.Array], n: int) -> np.ndarray | None:
    """Which rows have a null in their key; None if none has."""
    found = None
    for array in arrays:
        if array.null_count:
            null = array.is_null().to_numpy(zero_copy_only=False)
            found = null if found is None else found | null
    return found


def _lists(values: pa.Array, lengths: np.ndarray) -> pa.Array:
    """The values of each group as a list, without nulls."""
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    before = np.concatenate([[0], np.cumsum(valid)])
    offsets = pa.array(before[ends].astype(np.int32), pa.int32())
    return pa.ListArray.from_arrays(offsets, values.drop_null())


def _bounds(bounds: tuple[int, int] | None, start: np.ndarray, end: np.ndarray) -> list[pa.Array]:
    """window_start and window_end: the same for all rows, or those of each one's session."""
    if bounds is not None:
        start, end = (np.full(len(start), b, np.int64) for b in bounds)
    return [pa.array(start, pa.timestamp("us")), pa.array(end, pa.timestamp("us"))]


def _misplaced(sender: Any, reason: str) -> DeltaError:
    return DeltaError(
        f"a page of executor {sender} cannot be merged: {reason}",
        hint="all executors of a job must run the same plan and build of kdirect",
    )
