"""A range of one topic partition as blocks of typed columns: where the engine's input comes from.

Owns: `TopicSource`, `Block`, and what becomes of a row whose value does not decode or whose event
time is not acceptable.  Bytes come by the client's reader, one-sided where the broker grants it;
connections and grants stay with the session, so the source of the next batch finds them.  Formats
are `kdirect.format`'s.  This file opens connections (by the session that it is given); it starts no
thread, and never loops over records.

For every record, in this order: a value that is null or does not decode gives no row; a row whose
event time is null, before 1970 or too far ahead is dropped; every other row advances the clock of
the block; `where` is applied.  In mode FAILFAST a value that does not decode and a time that is not
acceptable are errors; a null value (a tombstone) is counted and is none.  Then rows whose keys or
values are longer than the state keeps are dropped, or are errors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdirect.client.reader import Reader
from kdirect.client.session import Session
from kdirect.errors import ConfigError, FormatError
from kdirect.format.bad_values import SAMPLES, TIME_FAULTS, BadRow, Dropped, DropReason, error_of
from kdirect.format.decode import SCHEMA, ArrowDecoder
from kdirect.format.fixed import LATEST_US, FixedDecoder, can_test
from kdirect.format.typed_values import ArrowValues, JsonValues
from kdirect.model import TopicPartition
from kdirect.state.expressions import Call, Column, Expression, Literal, columns_of, matches
from kdirect.state.plan import Input, Plan
from kdirect.state.row_limits import RowLimit

log = logging.getLogger("kdirect.state")

BLOCK_ROWS = 1 << 16
BLOCK_BYTES = 8 << 20
TESTS = 16  # of `where`, that the decoder makes itself

_SCALES = {"s": 1_000_000, "ms": 1_000, "us": 1}
_SWAPPED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_told_of_tcp: set[tuple[str, TopicPartition]] = set()


@dataclass(slots=True)
class Block:
    """Rows of a range, at most `block_rows` of them; none where everything was dropped.

    `columns` are as long as `rows`, and so are `time_us` (int64 microseconds; None where the input
    has no event time) and `offsets` (those of the rows' records, for messages).  `min_time_us` and
    `max_time_us` are of these rows.  `clock_us` is the greatest event time of all rows that were
    decoded for the block, also of those that `where` dropped; None if there is none.
    `next_offset` is the one after what the block stands for, `records` how many offsets that are,
    and `input_bytes` the size of the records that were decoded for it.
    """

    rows: int
    columns: dict[str, pa.Array]
    time_us: np.ndarray | None
    min_time_us: int | None
    max_time_us: int | None
    clock_us: int | None
    offsets: np.ndarray
    next_offset: int
    records: int
    input_bytes: int


@dataclass(slots=True)
class _Decoded:
    """Rows on their way into a block: `time_us` may still hold nulls and bad times."""

    columns: dict[str, pa.Array]
    time_us: pa.Array | None
    offsets: pa.Array
    clock_us: int | None
    input_bytes: int
    bounds: tuple[int, int] | None = None  # of the times, where they are known and acceptable

    def keep(self, mask: pa.Array) -> None:
        self.bounds = None
        self.columns = {name: pc.filter(c, mask) for name, c in self.columns.items()}
        if self.time_us is not None:
            self.time_us = pc.filter(self.time_us, mask)
        self.offsets = pc.filter(self.offsets, mask)


class TopicSource:
    """The offsets [start_offset, stop_offset) of `tp`, read as `input` says.

    `columns`: which ones the blocks have (the plan's `columns_decoded`); those of `where` and the
    event time are decoded in addition where they are needed.  `latest_us`: event times after it are
    too far ahead (the wall clock of the batch plus max_ahead_us).  `limits`: how long the columns
    may be (the plan's `row_limits`).  `block_bytes`: of records, after which a block ends whatever
    `where` left of them.  One thread; use it as a context manager, or `close` it: then what READs
    the partition serves the next source of it.  `topic_id` and `live_ms`: see `Session.reader`;
    with the second a block without rows may mean that nothing is there.

    Raises from `blocks` what a `Reader` raises, and BadValueError in mode FAILFAST."""

    def __init__(
        self,
        session: Session,
        input: Input,
        tp: TopicPartition,
        start_offset: int,
        stop_offset: int,
        *,
        columns: Sequence[str],
        latest_us: int | None = None,
        limits: Sequence[RowLimit] = (),
        block_rows: int = BLOCK_ROWS,
        block_bytes: int = BLOCK_BYTES,
        timeout_ms: int | None = None,
        topic_id: str | None = None,
        live_ms: int | None = None,
    ) -> None:
        if input.topic != tp.topic:
            raise ConfigError(
                f"the input {input.name} reads the topic {input.topic}, not {tp}",
                hint="give a partition of its topic",
            )
        missing = sorted(set(columns) - set(input.types))
        if missing:
            raise ConfigError(
                f"input {input.name}: there is no column {missing[0]}",
                hint="the schema has " + ", ".join(input.types),
            )
        self.input = input
        self.tp = tp
        self.dropped = Dropped()
        self._transport = ""  # of the last block
        self._next_offset = start_offset
        self._session = session
        self._columns = tuple(columns)
        self._limits = tuple(limits)
        self._latest_us = LATEST_US if latest_us is None else min(latest_us, LATEST_US)
        self._block_rows = block_rows
        self._block_bytes = block_bytes
        self._reader: Reader = session.reader(
            tp,
            start_offset,
            stop_offset,
            timeout_ms=timeout_ms,
            topic_id=topic_id,
            live_ms=live_ms,
        )

    @classmethod
    def of_plan(
        cls,
        session: Session,
        plan: Plan,
        side: int,
        tp: TopicPartition,
        start_offset: int,
        stop_offset: int,
        *,
        now_us: int,
        block_rows: int = BLOCK_ROWS,
        page_bytes: int | None = None,
    ) -> TopicSource:
        """What a batch of the plan reads of a partition of its input number `side`; `now_us` is the
        wall clock of the batch, and `page_bytes` the size of the pages of deltas.  Benchmarks of
        reading read by this, too."""
        given = plan.inputs[side]
        return cls(
            session,
            given,
            tp,
            start_offset,
            stop_offset,
            columns=plan.columns_decoded(side),
            latest_us=now_us + given.max_ahead_us,
            # Fixed values have no column whose values vary in length.
            limits=() if given.layout is not None else plan.row_limits(side, page_bytes),
            block_rows=block_rows,
        )

    def __enter__(self) -> TopicSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def next_offset(self) -> int:
        """All records of the range below it were handed out or dropped."""
        return self._next_offset

    @property
    def newest_ms(self) -> int:
        """See `Reader.newest_ms`."""
        return self._reader.newest_ms

    @property
    def transport(self) -> str:
        """What the records are read over: shm, verbs or tcp.  Before the first block, what the
        session prefers."""
        return self._transport or self._reader.transport

    def statistics(self) -> dict[str, int]:
        """See `Reader.statistics`."""
        return self._reader.statistics()

    def check_topic(self) -> None:
        """See `Reader.check_topic`."""
        self._reader.check_topic()

    def close(self) -> None:
        self._reader.close()

    def blocks(self) -> Iterator[Block]:
        """The rows of the range, in the order of their offsets.  Between two blocks the caller may
        do anything else.  Their memory is reused once no array of a block is left."""
        if self.input.value_format == "fixed":
            decoded = self._of_fixed_values()
        else:
            decoded = self._of_values()
        for rows in decoded:
            self._transport = self._reader.transport
            self._tell_of_tcp()
            yield from self._finish(rows)

    def _tell_of_tcp(self) -> None:
        """Say it once for a partition that it is not read one-sidedly although it might be."""
        settings = self._session.settings
        if self._transport == "tcp" and settings["transport"] != "tcp":
            which = (str(settings["bootstrap.servers"]), self.tp)
            if which not in _told_of_tcp:
                _told_of_tcp.add(which)
                why = self._session.transport_reason
                log.warning("%s is read over TCP, not one-sidedly: %s", self.tp, why)

    # -- fixed values ------------------------------------------------------------------------------

    def _of_fixed_values(self) -> Iterator[_Decoded]:
        given, layout = self.input, self.input.layout
        assert layout is not None
        tests, rest = _split(given.where, given)
        names = [*self._columns, *sorted(columns_of(rest) - set(self._columns))]
        decoder = FixedDecoder(
            self.tp.topic,
            self.tp.partition,
            layout,
            names,
            tests=tests,
            time=given.time,
            time_unit=given.time_unit,
            latest_us=self._latest_us,
            target_rows=self._block_rows,
            target_bytes=self._block_bytes,
            **self._reader.decoder_range,
        )
        for _ in self._reader.fillings(decoder):
            found = decoder.take_rows()
            if decoder.dropped.total:
                self.dropped.merge(decoder.dropped)
                decoder.dropped.clear()
                self._fail_fast()
            out = _Decoded(
                dict(zip(names, found.fields)),
                found.times_us,
                found.offsets,
                found.clock_us,
                found.input_bytes,
            )
            if rest is not None and found.rows:
                out.keep(self._matches(rest, out))
            elif found.least_us is not None and found.greatest_us is not None:
                out.bounds = (found.least_us, found.greatest_us)
            yield out

    # -- values in JSON and in Arrow ---------------------------------------------------------------

    def _of_values(self) -> Iterator[_Decoded]:
        given = self.input
        wanted = [*self._columns, *sorted(columns_of(given.where) - set(self._columns))]
        if given.time is not None and given.time not in wanted:
            wanted.append(given.time)
        kinds = {field.name: field.arrow for field in given.schema}
        schema = pa.schema([kinds[name] for name in wanted])
        values: JsonValues | ArrowValues
        if given.value_format == "json":
            values = JsonValues(schema)
        else:
            values = ArrowValues(schema, pa.schema(list(kinds.values())))
        value_at, offset_at = SCHEMA.get_field_index("value"), SCHEMA.get_field_index("offset")
        decoder = ArrowDecoder(
            self.tp.topic,
            self.tp.partition,
            target_rows=self._block_rows,
            target_bytes=self._block_bytes,
            **self._reader.decoder_range,
        )
        for _ in self._reader.fillings(decoder):
            batch = decoder.take()
            column = batch.column(value_at)
            found = values.decode(column, batch.column(offset_at))
            if values.dropped.total:
                self.dropped.merge(values.dropped)
                values.dropped.clear()
            columns = dict(zip(wanted, found.columns))
            time_us = None
            if given.time is not None:
                time_us = _microseconds(columns[given.time], given.time_unit)
            out = _Decoded(columns, time_us, found.offsets, None, int(column.nbytes))
            self._drop_times(out)
            self._fail_fast()
            if out.bounds is not None:
                out.clock_us = out.bounds[1]
            if given.where is not None and len(out.offsets):
                out.keep(self._matches(given.where, out))
            self._drop_long(out)
            yield out

    def _matches(self, where: Expression, rows: _Decoded) -> pa.Array:
        """Which of these rows a condition keeps; there is at least one."""
        try:
            return matches(where, rows.columns, len(rows.offsets))
        except FormatError as e:
            first, last = rows.offsets[0].as_py(), rows.offsets[-1].as_py()
            e.message = f"{self.tp} offsets {first} to {last}: {e.message}"
            raise

    # -- what is dropped ---------------------------------------------------------------------------

    def _drop_times(self, rows: _Decoded) -> None:
        """Drop the rows whose event times are not acceptable; note the bounds of the others."""
        times = rows.time_us
        if times is None or len(times) == 0:
            return
        rows.bounds = _bounds(times)
        if (
            times.null_count == 0
            and rows.bounds is not None
            and rows.bounds[0] >= 0
            and rows.bounds[1] <= self._latest_us
        ):
            return
        faults = {
            DropReason.NULL_TIME: times.is_null(),
            DropReason.BEFORE_1970: pc.fill_null(pc.less(times, 0), False),
            DropReason.TOO_FAR_AHEAD: pc.fill_null(pc.greater(times, self._latest_us), False),
        }
        dropped = Dropped()
        samples: list[BadRow] = []
        good = None
        for reason, mask in faults.items():
            dropped.add(reason, pc.sum(mask).as_py() or 0)
            for offset in pc.filter(rows.offsets, mask)[:SAMPLES].to_pylist():
                samples.append(BadRow(offset, reason, self.input.time or "", TIME_FAULTS[reason]))
            good = pc.invert(mask) if good is None else pc.and_not(good, mask)
        dropped.samples = sorted(samples, key=lambda row: row.offset)[:SAMPLES]
        self.dropped.merge(dropped)
        rows.keep(good)
        rows.bounds = _bounds(rows.time_us)

    def _drop_long(self, rows: _Decoded) -> None:
        """Drop the rows that the state cannot hold."""
        for limit in self._limits:
            mask = limit.too_long(rows.columns) if len(rows.offsets) else None
            if mask is None:
                continue
            offsets = pc.filter(rows.offsets, mask)
            samples = offsets[:SAMPLES].to_pylist()
            found = Dropped()
            found.add(
                DropReason.TOO_LONG,
                len(offsets),
                [BadRow(n, DropReason.TOO_LONG, limit.what, limit.why()) for n in samples],
            )
            self.dropped.merge(found)
            self._fail_fast()
            rows.keep(pc.invert(mask))

    def _fail_fast(self) -> None:
        """In mode FAILFAST the first row that was dropped, for whatever reason, is an error."""
        first = self.dropped.first_error
        if self.input.mode == "FAILFAST" and first is not None:
            raise error_of(self.tp, first)

    # -- blocks ------------------------------------------------------------------------------------

    def _finish(self, decoded: _Decoded) -> Iterator[Block]:
        """The blocks of what was decoded at once: one, unless a single record batch, or a value in
        Arrow, has more rows than a block may have."""
        rows = len(decoded.offsets)
        for start in range(0, max(rows, 1), self._block_rows):
            count = min(rows - start, self._block_rows)
            times, least, greatest = None, None, None
            if decoded.time_us is not None:
                times = _int64s(decoded.time_us)[start : start + count]
                if count and count == rows and decoded.bounds is not None:
                    least, greatest = decoded.bounds
                elif count:
                    least, greatest = int(times.min()), int(times.max())
            rest = decoded.offsets[start + count : start + count + 1].to_pylist()
            first, self._next_offset = (
                self._next_offset,
                rest[0] if rest else self._reader.next_offset,
            )
            yield Block(
                rows=count,
                columns={n: decoded.columns[n].slice(start, count) for n in self._columns},
                time_us=times,
                min_time_us=least,
                max_time_us=greatest,
                clock_us=decoded.clock_us,
                offsets=_int64s(decoded.offsets)[start : start + count],
                next_offset=self._next_offset,
                records=self._next_offset - first,
                input_bytes=decoded.input_bytes if start == 0 else 0,
            )


def _int64s(array: pa.Int64Array) -> np.ndarray:
    """The values of an array without nulls, where they lie.  `to_numpy` looks for pandas, whose
    import takes a third of a second in each new process."""
    if not len(array):
        return np.empty(0, np.int64)
    return np.frombuffer(array.buffers()[1], np.int64, len(array), array.offset * 8)


def _split(
    where: Expression | None, given: Input
) -> tuple[list[tuple[str, str, int]], Expression | None]:
    """The tests of `where` that the decoder can make, and what is left of it."""
    tests: list[tuple[str, str, int]] = []
    rest: Expression | None = None
    pending = [where] if where is not None else []
    while pending:
        part = pending.pop()
        if isinstance(part, Call) and part.op == "and":
            pending += reversed(part.args)
            continue
        test = _as_test(part, given)
        if test is not None and len(tests) < TESTS:
            tests.append(test)
        else:
            rest = part if rest is None else Call(op="and", args=(rest, part))
    return tests, rest


def _as_test(part: Expression, given: Input) -> tuple[str, str, int] | None:
    """`part` as a test of one field of whole numbers, if it is one."""
    if not isinstance(part, Call) or part.op not in _SWAPPED:
        return None
    left, right = part.args
    op = part.op
    if isinstance(left, Literal):
        left, right, op = right, left, _SWAPPED[op]
    if not isinstance(left, Column) or not isinstance(right, Literal):
        return None
    kind = given.types[left.name]
    # A number of another type is fine; a time in another unit is another number.
    if kind != right.type and (kind.startswith(("timestamp", "date")) or "int" not in right.type):
        return None
    if given.layout is None or not can_test(given.layout, left.name, op, right.value):
        return None
    return left.name, op, right.value


def _bounds(times: pa.Array) -> tuple[int, int] | None:
    found = pc.min_max(times).as_py()
    return None if found["min"] is None else (found["min"], found["max"])


def _microseconds(column: pa.Array, unit: str) -> pa.Array:
    """Event times as int64 microseconds; those that 64 bits cannot hold are clamped."""
    if pa.types.is_timestamp(column.type):
        unit = column.type.unit
    if pa.types.is_uint64(column.type):
        column = pc.min_element_wise(
            column, pa.scalar((1 << 63) - 1, pa.uint64()), skip_nulls=False
        )
    numbers = pc.cast(column, pa.int64())
    if unit == "ns":
        # pyarrow's division rounds towards zero: what is before 1970 has to stay there.
        down = pc.divide(numbers, 1000)
        return pc.if_else(pc.less(numbers, 0), pc.subtract(down, 1), down)
    scale = _SCALES[unit]
    if scale == 1:
        return numbers
    most = ((1 << 63) - 1) // scale
    numbers = pc.max_element_wise(numbers, pa.scalar(-most), skip_nulls=False)
    return pc.multiply(pc.min_element_wise(numbers, pa.scalar(most), skip_nulls=False), scale)
