"""The state of one executor: the facade over tables, fragments and accumulators (Slash section 7).

Owns: how a plan becomes keys, cells and buckets, and the order of what happens in a batch: updates,
flushes, merges, trigger, mark.  The loops are in engine.pyx and merging.pyx.

Life of a Backend: `Backend(...)` is empty, `Backend.attach(...)` goes on with a mapped file.  In a
batch: `mark(DIRTY)`, `closed_before = ...`, `update` of blocks and `merge` of pages in any order,
`flush` of each leader at each epoch's end, `trigger`, `mark(DONE or CLEAN)`.  One thread uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect.errors import ConfigError, StateError
from kdirect.state.accumulators import Form, Results, cell_of, input_of, layout_of
from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.batches import Phase, Progress, StateHeader, led_by
from kdirect.state.engine import NOBODY
from kdirect.state.header import (
    Catalogue,
    blocks_of,
    claim,
    damaged,
    read_header,
    write_header,
)
from kdirect.state.keys import KeyShape
from kdirect.state.merging import MergingEngine
from kdirect.state.plan import VPARTS, AggregatePlan
from kdirect.state.schema import arrow_type
from kdirect.state.snapshot_rows import restore_rows, snapshot_rows
from kdirect.state.snapshots import Section
from kdirect.state.table import Table
from kdirect.state.whole import Whole
from kdirect.state.windows import TIME_MAX, TIME_MIN, NoWindow, Session

OUTPUT_ROWS = 1 << 20
INT64_MIN = -(1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What became of a block's rows.  `newest` is the greatest usable event time (None: no row had
    one), `first_bad` the first row whose time was null, before 1970 or too far ahead (None)."""

    rows: int
    late: int
    null_time: int
    early: int
    ahead: int
    filtered: int
    newest: int | None
    first_bad: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One buffer of a delta: `length` bytes at `address`, which is `position` bytes into the chunk
    `chunk` of the page memory.  The bytes after it, up to the page's end, are the channel's."""

    address: int
    chunk: int
    position: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one leader gets of an epoch."""

    leader: int
    pages: tuple[Page, ...]
    rows: int
    entries: int
    tuples: int


class Backend:
    """State of `plan` at executor `executor` of `executors`; `owners[v]` leads virtual partition v.

    `mode` is ``slash`` (entries, and tuples of those keys that would get fewer than
    `adaptive_ratio` more rows in their epoch; 0 never sends tuples) or ``uppar`` (always tuples).
    """

    def __init__(self, plan: AggregatePlan, *, executor: int, executors: int,
                 owners: Sequence[int], memory: StateMemory, pages: PageMemory,
                 mode: str = "slash", adaptive_ratio: float = 3.0) -> None:  # fmt: skip
        if isinstance(plan.window, Session) or any(
            a.kept_as(plan.input.types) != "cell" for a in plan.aggregates
        ):
            raise ConfigError("sessions, lists, sets and strings are kept in chains, not in cells")
        if mode not in ("slash", "uppar"):
            raise ConfigError(f"mode {mode!r} is not known", hint="use slash or uppar")
        kinds = plan.input.types
        # A struct of fixed layout has no nulls.
        nullable = plan.input.value_format != "fixed"
        self.plan, self.executor, self.executors = plan, executor, executors
        self.memory, self.pages = memory, pages
        self.keys = KeyShape([(key, arrow_type(kinds[key])) for key in plan.keys], nullable)
        cells = [
            cell_of(a, None if a.column is None else kinds[a.column], plan.overflow)
            for a in plan.aggregates
        ]
        self._cells, self._nullable = cells, nullable
        self.layout = self._layout(executors)
        self.window = plan.window
        self.engine = MergingEngine(
            memory, pages, self.keys, self.layout, executor, list(owners),
            *((0, 0) if isinstance(plan.window, NoWindow) else
              (plan.window.origin_us, plan.window.bucket_us)),
            mode == "uppar", adaptive_ratio,
        )  # fmt: skip
        self.owners = tuple(owners)
        self._closed_before = TIME_MIN
        self._max_time = TIME_MAX
        self._catalogue = Catalogue(memory)
        self.whole = Whole()

    def _layout(self, executors: int) -> Any:
        return layout_of(
            self._cells, executors, nullable=self._nullable,
            stamped=isinstance(self.plan.window, NoWindow),
            keys=repr([str(t) for t in self.keys.types]),
        )  # fmt: skip

    # -- a batch -----------------------------------------------------------------------------------
    @property
    def closed_before(self) -> int:
        """Windows that end at this event time or before were emitted: their rows are late."""
        return self._closed_before

    @closed_before.setter
    def closed_before(self, time_us: int) -> None:
        self._closed_before = time_us
        self._limit_times()

    @property
    def max_time_us(self) -> int:
        """Rows and deltas of later event times are refused."""
        return self._max_time

    @max_time_us.setter
    def max_time_us(self, time_us: int) -> None:
        self._max_time = time_us
        self._limit_times()

    def _limit_times(self) -> None:
        least = INT64_MIN
        if not isinstance(self.window, NoWindow) and not isinstance(self.window, Session):
            least = max(INT64_MIN, self.window.dropped_buckets(self._closed_before))
        self.engine.limit_times(least, self._max_time)

    def apply_only(self, vparts: Sequence[int] | None) -> None:
        """Of the rows that come from now on, use those of these virtual partitions only (a replay
        for executors that lost their state); None: all."""
        chosen = range(VPARTS) if vparts is None else set(vparts)
        self.engine.own([o if v in chosen else NOBODY for v, o in enumerate(self.owners)])

    def update(self, columns: Mapping[str, pa.Array], rows: int, *,
               time_us: np.ndarray | pa.Array | None = None,
               mask: pa.BooleanArray | None = None,
               expected_rows: float | None = None) -> Updated:  # fmt: skip
        """Bring in a block of `rows` rows.

        `columns` are those that the plan keeps, `time_us` their event times in microseconds (int64,
        or an Arrow array that may have nulls), `mask` says which rows to use (null is false),
        `expected_rows` how many the whole epoch will have, as far as is known.  Rows that are late
        or have no usable time are dropped and counted, never raised."""
        if expected_rows is not None:
            self.engine.expected_rows = expected_rows
        keys = self.keys.encode([columns[name] for name in self.plan.keys], rows, False)
        inputs = [
            input_of(
                str(name), columns[str(name)], form, self.plan.overflow, self._counted(name, form)
            )
            for name, form in self.layout.inputs
            if form is not Form.TIME
        ]
        valid = None
        if isinstance(time_us, pa.Array):
            if time_us.null_count:
                valid = (time_us.buffers()[0].address, time_us.offset)
            buffer = time_us.buffers()[1]
            times = np.frombuffer(buffer, np.int64, len(time_us), time_us.offset * 8)
        else:
            times = None if time_us is None else np.ascontiguousarray(time_us, dtype=np.int64)
        if times is not None and len(times) != rows:
            raise StateError(f"{len(times)} event times were given for {rows} rows")
        bits = None
        if mask is not None:
            mask = mask.fill_null(False) if mask.null_count else mask
            if len(mask) != rows:
                raise StateError(f"a mask of {len(mask)} rows was given for {rows} rows")
            bits = (mask.buffers()[1].address, mask.offset)
        with self.whole.changing("a block of rows"):
            found = self.engine.update(keys, inputs, times, valid, bits)
        dropped = sum(
            found[k] for k in ("late", "null_time", "early", "ahead", "filtered", "other")
        )
        return Updated(
            rows=rows - dropped, late=found["late"], null_time=found["null_time"],
            early=found["early"], ahead=found["ahead"], filtered=found["filtered"],
            newest=found["newest"],
            first_bad=found["first_bad"] if found["first_bad"] >= 0 else None,
        )  # fmt: skip

    def _counted(self, column: str | None, form: Form) -> bool:
        """Whether only the nulls of this input are used: it is counted and nothing else."""
        return all(
            c.aggregate.kind == "count"
            for c in self._cells
            if c.form is form and c.aggregate.column == column
        )

    def flush(self, leader: int) -> Delta:
        """End the epoch of a leader's fragment: its pages, which are the caller's until `release`.
        The fragment is empty after this."""
        self.whole.check()
        return self._flush(leader)

    def _flush(self, leader: int) -> Delta:
        fragment = self.engine.fragments[leader]
        if fragment is None:
            return Delta(leader=leader, pages=(), rows=0, entries=0, tuples=0)
        found, rows, entries, tuples = fragment.flush()
        pages = []
        for address, length in found:
            chunk, position = self.pages.place(address)
            pages.append(Page(address=address, chunk=chunk, position=position, length=length))
        return Delta(leader=leader, pages=tuple(pages), rows=rows, entries=entries, tuples=tuples)

    def release(self, pages: Sequence[Page]) -> None:
        """The pages were sent, and nobody reads them any more."""
        for page in pages:
            self.pages.release(page.address)

    def merge(self, sender: int, address: int, length: int) -> int:
        """Merge a page that `sender` sent; how many entries or tuples it had.  Raises DeltaError,
        and then nothing has changed."""
        with self.whole.changing("a delta"):
            return sum(self.engine.merge(sender, address, length))

    # -- results -----------------------------------------------------------------------------------
    def keys_held(self) -> int:
        """Keys in all tables; of sliding windows, in each slice."""
        return sum(len(self.engine.table(bucket)) for bucket in self.engine.slots)

    def trigger(self, closes: int = TIME_MIN) -> list[pa.RecordBatch]:
        """Emit the windows whose end is at `closes` or before, in order, and drop what no open
        window needs.  Without windows: the keys that changed since the last trigger."""
        self.whole.check()
        engine = self.engine
        if isinstance(self.window, NoWindow):
            with self.whole.changing("the output of a batch"):
                engine.batch += 1
                positions = engine.take_changed()
                return self._batches(positions, None) if len(positions) else []
        assert not isinstance(self.window, Session)
        if closes <= self._closed_before:
            return []
        first, last = (self.window.closed_windows(t) for t in (self._closed_before, closes))
        windows = {w for b in engine.slots for w in self.window.windows_of(b) if first <= w < last}
        out: list[pa.RecordBatch] = []
        for window in sorted(windows):
            out += self._window(window)
        keep = self.window.dropped_buckets(closes)
        for bucket in [b for b in engine.slots if b < keep]:
            engine.drop(bucket)
        self.closed_before = closes
        return out

    def _window(self, window: int) -> list[pa.RecordBatch]:
        """The rows of one window; of a sliding one, its slices are merged first."""
        assert not isinstance(self.window, Session | NoWindow)
        tables = [t for b in self.window.buckets_of(window) if (t := self.engine.table(b))]
        bounds = self.window.bounds(window)
        if len(tables) == 1:
            return self._batches(tables[0].scan(), bounds)
        merged: Table = self.engine.new_table(window)
        try:
            for table in tables:
                self.engine.merge_table(merged, table)
            return self._batches(merged.scan(), bounds)
        finally:
            merged.drop()

    def _batches(
        self, positions: np.ndarray, bounds: tuple[int, int] | None
    ) -> list[pa.RecordBatch]:
        """Output rows of the states at `positions`."""
        schema, base, out = self.plan.output_schema, self.memory.address, []
        for begin in range(0, len(positions), OUTPUT_ROWS):
            part = positions[begin : begin + OUTPUT_ROWS]
            columns = self.keys.decode(base, part + np.uint64(8 * self.layout.words))
            for bound in bounds or ():
                times = pa.array(np.full(len(part), bound, np.int64))
                columns.append(times.view(pa.timestamp("us")))
            columns += Results(self.layout, base, part, self.plan.overflow).columns()
            columns = [
                c if c.type == f.type else c.cast(f.type)
                for c, f in zip(columns, schema, strict=True)
            ]
            out.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        return out

    # -- durability --------------------------------------------------------------------------------
    def snapshot(self) -> list[Section]:
        """A copy of all that this executor leads, in bytes of the states and keys in use."""
        self.whole.check()
        return snapshot_rows(self)

    def restore(self, section: Section, executors: int, vparts: tuple[int, int]) -> int:
        """Take over what this executor leads of a section of a snapshot by so many executors, whose
        writer led `vparts`; how many keys there were.  Raises StateError if it is damaged; the
        state is good for nothing but `clear` then."""
        with self.whole.changing("a snapshot"):
            return restore_rows(self, section, executors, vparts)

    def layout_for(self, executors: int) -> Any:
        """The layout of states in a snapshot by so many executors."""
        return self.layout if executors == self.executors else self._layout(executors)

    def clear(self) -> None:
        """Forget everything; the memory stays warm."""
        for bucket in list(self.engine.slots):
            self.engine.drop(bucket)
        for leader in range(self.executors):
            self.release(self._flush(leader).pages)
        self.engine.take_changed()
        self.closed_before = TIME_MIN
        self.whole.reset()

    def mark(
        self, phase: Phase, *, attempt: int, batch: int, after: Progress | None = None
    ) -> None:
        """Write the header of the state file: DIRTY before the first update of a batch, CLEAN or
        DONE (with `after`) when every delta is merged and flushed."""
        header = StateHeader(
            plan_hash=self.plan.hash, executor=self.executor, executors=self.executors,
            vparts=led_by(self.executor, self.owners), attempt=attempt, batch=batch, phase=phase,
            after=after,
        )  # fmt: skip
        if phase is Phase.DIRTY:
            write_header(self.memory, header)
            return
        self.whole.check()
        if any(f is not None and f.rows for f in self.engine.fragments):
            raise StateError("an epoch is not flushed: the state is not clean")
        tables = [self.engine.table(bucket) for bucket in sorted(self.engine.slots)]
        content = {
            "tables": [t.catalogue() for t in tables],
            "blocks": [b for t in tables for b in t.blocks()],
            "track": bool(self.engine.track), "closed_before": self._closed_before,
            "stamp": self.engine.batch, "after": None if after is None else after.to_json(),
        }  # fmt: skip
        write_header(self.memory, header, self._catalogue.write(content))

    @classmethod
    def attach(cls, plan: AggregatePlan, *, executor: int, executors: int, owners: Sequence[int],
               memory: StateMemory, pages: PageMemory, **options: Any) -> Backend:  # fmt: skip
        """Go on with what lies in `memory`, where another process may have put it.

        Raises StateError if the header is not that of a CLEAN or DONE state of this plan and
        executor, or if what it describes is damaged; then the memory is to be used from its start
        (a new StateMemory of the same file)."""
        found = read_header(memory)
        if found is None:
            raise StateError(f"{memory.name} holds no state")
        header, content = found
        if header.phase is Phase.DIRTY:
            raise StateError(f"{memory.name} was left in the midst of batch {header.batch}",
                             hint="restore the last snapshot and replay")  # fmt: skip
        if (header.plan_hash, header.executor, header.executors) != (
            plan.hash,
            executor,
            executors,
        ):
            raise StateError(f"{memory.name} holds the state of another plan or executor: "
                             f"{header.executor} of {header.executors}")  # fmt: skip
        blocks = blocks_of(content)
        try:
            memory.restore(content["top"], blocks)
            backend = cls(plan, executor=executor, executors=executors, owners=owners,
                          memory=memory, pages=pages, **options)  # fmt: skip
            backend._adopt(content, blocks)
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise damaged(memory, e) from e
        return backend

    def _adopt(self, content: dict[str, Any], blocks: list[tuple[int, int]]) -> None:
        claim(set(blocks), content["tables"])
        for entry in content["tables"]:
            table = self.engine.new_table(int(entry["bucket"]))
            table.restore(entry)
            self.engine.adopt(table)
        if content["track"]:
            self.engine.begin_tracking()
        self.engine.batch = int(content["stamp"]) + 1
        catalogue = [b for b in blocks if b[0] == content["catalogue"]]
        self._catalogue = Catalogue(self.memory, catalogue[0] if catalogue else None)
        self.closed_before = int(content["closed_before"])
