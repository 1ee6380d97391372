# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Decodes record batches whose values have a fixed layout into columns of their fields.

Owns: `FixedDecoder`.  It is the decoder of decode.pyx, with all that this one checks (frame, CRC,
chain, codec, offsets), but for what becomes of a record: its value is not copied.  Only the fields
that were asked for are, each into a column of its own type, straight from the bytes of the batch,
and only of the records that pass the tests of numbers that are given along.  The loops are in
fixed_run.h.

Invariants, in addition to those of decode.pyx
- A null value gives no row, nor does a value whose size is not the layout's, nor one whose event
  time is before 1970 or after `latest_us`.  They are counted before any test is made, and the first
  ones are kept with their offsets.
- A batch that is refused leaves no row and no count.
- No more than `target_rows` rows are pending, unless a single batch has more.
- A decoder is full after `target_bytes` bytes of records, whatever the tests leave of them.
"""

import decimal
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from libc.stdint cimport (
    INT32_MAX, INT64_MAX, INT64_MIN, UINT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t,
    uintptr_t)
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from kdirect.errors import ConfigError
from kdirect.format.bad_values import TIME_FAULTS, BadRow, Dropped, DropReason
from kdirect.blocks cimport Block, expand, take_block
from kdirect.format.arrays cimport text_array
from kdirect.format.decode cimport RUN_DONE, ArrowDecoder
from kdirect.format.fixed_layout import FixedLayout
from kdirect.format.layout cimport ATTRIBUTE_LOG_APPEND_TIME
from kdirect.format.records cimport (
    COPY_SLACK, RECORDS_BAD_OFFSET, RECORDS_OK, RECORDS_TRAILING, parse_record, put_text,
    record_view, section)

DEFAULT_BLOCK_ROWS = 1 << 16
DEFAULT_BLOCK_BYTES = 8 << 20
WIDEST_COLUMN = 64 << 20
LATEST_US = 253_402_300_800_000_000     # the year 10000, which no calendar library can show
NO_STOP = INT64_MAX

# Microseconds of a unit; 0: a nanosecond.
_UNITS = {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 0, "d": 86_400_000_000}
OPERATORS = ("=", "!=", "<", "<=", ">", ">=")

_EXACT = decimal.Context(prec=40)

cdef object _BINARY = pa.binary()
cdef object _INT64 = pa.int64()
cdef object _MICROSECONDS = pa.timestamp("us", tz="UTC")


class FixedRows(NamedTuple):
    """The rows of one block: a column for each field that was asked for, and what the decoder was
    told to bring of the records.  `times_us` are int64; `least_us` and `greatest_us` are theirs,
    None where there is no row or no time.  `clock_us` is the greatest time, also of rows that a
    test refused; None if there is none.
    `input_bytes`: how many bytes of records were decoded for them."""

    rows: int
    fields: list[pa.Array]
    offsets: pa.Array
    times_us: pa.Array | None
    least_us: int | None
    greatest_us: int | None
    clock_us: int | None
    keys: pa.Array | None
    timestamps: pa.Array | None
    input_bytes: int


def integer_field(layout, str name):
    """(position, width, negative if it has a sign) of a field that is a whole number: also a date
    or a timestamp.  None for other fields."""
    field = layout.field(name)
    kind = field.kind
    if kind.numpy[1] not in "iu" or kind.name == "bool":
        return None
    return field.position, -kind.width if kind.numpy[1] == "i" else kind.width


def can_test(layout, str name, str operator, literal):
    """Whether `FixedDecoder` can make the test `name operator literal` itself."""
    return (operator in OPERATORS and isinstance(literal, int) and not isinstance(literal, bool)
            and integer_field(layout, name) is not None)


cdef class FixedDecoder(ArrowDecoder):
    """Decodes the `columns` (names of fields) of values of one `layout`; see the module, and
    `ArrowDecoder` for how bytes get in.

    `tests`: (field, operator, whole number), all of which a row must pass; see `can_test`.
    `time`: the name of a field of whole numbers, which become times in microseconds; `time_unit` is
    their unit (s, ms, us or ns), by default that of the field's type.  `time_of_record`: the
    timestamps of the records are the times.  No time may be after `latest_us`.  `with_keys`,
    `with_timestamps`: bring these columns of the records, too.

    Call `take_rows`, or `take` for a RecordBatch, when the decoder is full."""

    def __cinit__(self, *args, **kwargs):
        self.chunk = <kd_chunk*>malloc(sizeof(kd_chunk))
        if self.chunk == NULL:
            raise MemoryError(sizeof(kd_chunk))

    def __dealloc__(self):
        free(self.chunk)

    def __init__(self, str topic not None, int32_t partition, layout, columns, *, tests=(),
                 time=None, time_unit=None, bint time_of_record=False, latest_us=None,
                 bint with_keys=False, bint with_timestamps=False, int64_t start_offset=0,
                 int64_t stop_offset=INT64_MAX, int64_t target_rows=DEFAULT_BLOCK_ROWS,
                 int64_t target_bytes=DEFAULT_BLOCK_BYTES, bint check_crc=True,
                 int64_t max_decompressed_bytes=64 << 20):
        cdef int i
        if not isinstance(layout, FixedLayout):
            raise ConfigError(f"{layout!r} is no FixedLayout", hint="make one by FixedLayout.of")
        self.layout = layout
        self.layout_size = layout.size
        self.columns = tuple(columns)
        if len(self.columns) > FIELDS_MAX or len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"{len(self.columns)} columns are asked for",
                              hint=f"name each field once, at most {FIELDS_MAX} of them")
        self.fields_count = len(self.columns)
        widest = max([layout.field(name).kind.width for name in self.columns], default=1)
        target_rows = min(target_rows, max(1, WIDEST_COLUMN // widest))
        for i, name in enumerate(self.columns):
            field = layout.field(name)
            self.fields[i].position = field.position
            self.fields[i].width = field.kind.width
            self.fields[i].out = NULL
        self.tests_count = 0
        for name, operator, literal in tests:
            self._add_test(name, operator, literal)
        self.timed = time is not None or time_of_record
        self.time_name = time or ""
        self.stamps.width = self.time.width = 0
        self.stamps.scale = self.time.scale = 1000
        self.latest_us = LATEST_US if latest_us is None else min(latest_us, LATEST_US)
        if time is not None and not time_of_record:
            self._set_time(time, time_unit)
        self.with_keys = with_keys
        self.with_timestamps = with_timestamps
        self.dropped = Dropped()
        ArrowDecoder.__init__(
            self, topic, partition, start_offset=start_offset, stop_offset=stop_offset,
            target_rows=target_rows, target_bytes=target_bytes, check_crc=check_crc,
            max_decompressed_bytes=max_decompressed_bytes)
        extra = [pa.field("key", _BINARY)] if with_keys else []
        if with_timestamps:
            extra.append(pa.field("timestamp", _MICROSECONDS))
        self.schema = pa.schema([*layout.schema(self.columns), *extra])

    def _add_test(self, str name, str operator, literal):
        cdef kd_test* test = &self.tests[self.tests_count]
        if not can_test(self.layout, name, operator, literal):
            raise ConfigError(f"the test {name} {operator} {literal!r} is not one of whole numbers",
                              hint=f"compare a field of whole numbers by {' '.join(OPERATORS)}")
        if self.tests_count == TESTS_MAX:
            raise ConfigError(f"there are more than {TESTS_MAX} tests", hint="give fewer of them")
        position, width = integer_field(self.layout, name)
        bits = 8 * abs(width)
        least, greatest = 0, (1 << bits) - 1
        if width < 0:
            least, greatest = -1 << bits - 1, (1 << bits - 1) - 1
        negate = operator == "!="
        low, high = least, greatest
        if operator in ("=", "!="):
            low = high = literal
        elif operator in ("<", "<="):
            high = literal - (operator == "<")
        else:
            low = literal + (operator == ">")
        low, high = max(low, least), min(high, greatest)
        if low > high:      # nothing is in the range: the opposite of everything
            low, high, negate = -1 << 63, (1 << 63) - 1, not negate
        test.position = position
        test.width = width
        test.negate = negate
        test.low = <uint64_t>(low & UINT64_MAX)
        test.span = <uint64_t>(high - low)
        self.tests_count += 1

    def _set_time(self, str name, unit):
        found = integer_field(self.layout, name)
        if found is None:
            raise ConfigError(f"the field {name} of the layout cannot be a time",
                              hint="name a field of whole numbers, a timestamp or a date")
        kind = self.layout.field(name).kind.arrow
        if pa.types.is_timestamp(kind):
            unit = kind.unit
        elif pa.types.is_date(kind):
            unit = "d"
        if unit not in _UNITS:
            raise ConfigError(f"the unit of the time {name} is {unit!r}",
                              hint="give one of s, ms, us, ns")
        self.time.position, self.time.width = found
        self.time.scale = _UNITS[unit]

    def _reset(self):
        ArrowDecoder._reset(self)
        cdef int i
        self.blocks = [None] * self.fields_count
        for i in range(self.fields_count):
            self.fields[i].out = NULL
        self.times = None
        self.time.least = INT64_MAX
        self.time.greatest = INT64_MIN
        self.clock_us = -1
        self.input_bytes = 0

    cdef bint c_full(self) noexcept nogil:
        return (self.c.rows >= self.target_rows or self.stopped
                or self.input_bytes >= self.target_bytes)

    cdef int64_t _most(self, int64_t records, int64_t section_bytes) noexcept nogil:
        """How many rows so many records in so many bytes can give: nulls take room for none."""
        return min(records, section_bytes // <int64_t>self.layout_size)

    cdef bint _has_room(self, int64_t rows, int64_t section_bytes) noexcept nogil:
        rows = self._most(rows, section_bytes)
        if self.row_capacity == 0:
            return False
        if self.c.rows and self.c.rows + rows > self.target_rows:
            return False
        if self.with_keys and self.c.key.used + section_bytes + COPY_SLACK > self.key_capacity:
            return False
        return self.c.rows + rows <= self.row_capacity

    cdef int _take_compressed(self, const uint8_t* p) except -100:
        if self.c.rows and self.c.rows + self.info.records_count > self.target_rows:
            self.stopped = True
            return RUN_DONE
        return ArrowDecoder._take_compressed(self, p)

    cdef int _reserve(self, size_t section_bytes, size_t n) except -1:
        cdef int64_t used = self.c.rows, capacity, ahead
        cdef int64_t need = used + self._most(self.info.records_count, section_bytes)
        cdef int i
        cdef Block block
        if used and need > self.target_rows:
            self.stopped = True
            return 0
        if need > self.row_capacity or self.row_capacity == 0:
            capacity = max(need, 1, min(2 * self.row_capacity, self.target_rows))
            if n > section_bytes:
                ahead = <int64_t>(1.125 * self.info.records_count * (n / <double>section_bytes))
                capacity = max(capacity, min(self.target_rows, need + self._most(ahead, n)))
            for i in range(self.fields_count):
                block = expand(self.blocks[i], used * self.fields[i].width,
                               capacity * self.fields[i].width)
                self.blocks[i] = block
                self.fields[i].out = block.data
            self.offset = expand(self.offset, used * 8, capacity * 8)
            if self.with_timestamps:
                self.timestamp = expand(self.timestamp, used * 8, capacity * 8)
            if self.timed:
                self.times = expand(self.times, used * 8, capacity * 8)
            if self.with_keys:
                self.key_offsets = expand(self.key_offsets,
                                          (used + 1) * 4 if self.row_capacity else 0,
                                          (capacity + 1) * 4)
                self.key_validity = expand(self.key_validity, (used + 7) // 8, (capacity + 7) // 8)
            self.row_capacity = capacity
        if self.with_keys:
            if self.c.key.used + <int64_t>section_bytes + COPY_SLACK > self.key_capacity:
                self.key_data = expand(self.key_data, self.c.key.used,
                                       self.c.key.used + section_bytes + COPY_SLACK)
                self.key_capacity = self.key_data.capacity
            self.c.key.offsets = <int32_t*>self.key_offsets.data
            self.c.key.validity = self.key_validity.data
            self.c.key.data = self.key_data.data
        return 0

    cdef int _note(self, int64_t offset, int64_t why) noexcept nogil:
        """Keep a record that gives no row as a sample."""
        if self.counts.known < SAMPLES_MAX:
            self.bad[self.counts.known].offset = offset
            self.bad[self.counts.known].why = why
            self.counts.known += 1
        return 0

    cdef int _decode(self, const uint8_t* p, const uint8_t* end) noexcept nogil:
        cdef section s
        cdef int code
        cdef int64_t rows = self.c.rows, key_used = self.c.key.used, clock_us = self.clock_us
        cdef dropped_t counts = self.counts
        cdef kd_time time = self.time
        cdef int key_state = self.c.key.state
        s.base_offset = self.info.base_offset
        s.count = self.info.records_count
        s.last_offset_delta = self.info.last_offset_delta
        s.base_timestamp = self.info.base_timestamp
        s.max_timestamp = self.info.max_timestamp
        s.log_append_time = (self.info.attributes & ATTRIBUTE_LOG_APPEND_TIME) != 0
        s.start_offset = self.next_offset
        s.stop_offset = self.stop_offset
        code = self._read(&s, p, end)
        if code != RECORDS_OK:
            self.c.rows = rows
            self.c.key.used = key_used
            self.c.key.state = key_state
            self.counts = counts
            self.clock_us = clock_us
            self.time = time
            return code
        self.input_bytes += end - p
        return RECORDS_OK

    cdef int _read(self, const section* s, const uint8_t* p, const uint8_t* end) noexcept nogil:
        """Append the rows of the records in [p, end); a code of records.pxd."""
        cdef kd_chunk* chunk = self.chunk
        cdef kd_fixed run
        cdef record_view r
        cdef int error
        cdef int64_t previous = -1, taken, due, offset
        cdef int32_t i = 0
        cdef uint32_t size = self.layout_size
        cdef bint whole = (s.start_offset <= s.base_offset
                           and s.stop_offset > s.base_offset + s.last_offset_delta)
        chunk.rows = 0
        run.end = end
        run.base_offset = s.base_offset
        run.size = size
        while i < s.count:
            if chunk.rows == KD_FIXED_CHUNK:
                error = self._flush(s, whole)
                if error != RECORDS_OK:
                    return error
            if end - p > COPY_SLACK:
                run.p = p
                run.offset_delta = due = previous + 1
                run.count = min(<int64_t>(s.count - i), s.last_offset_delta - previous)
                taken = kd_fixed_scan(&run, chunk)
                p = run.p
                previous += taken
                i += <int32_t>taken
                if i == s.count:
                    break
                if chunk.rows == KD_FIXED_CHUNK:
                    continue
            p = parse_record(p, end, &r, &error)
            if p == NULL:
                return error
            if r.offset_delta <= previous or r.offset_delta > s.last_offset_delta:
                return RECORDS_BAD_OFFSET
            previous = r.offset_delta
            i += 1
            offset = s.base_offset + r.offset_delta
            if offset < s.start_offset or offset >= s.stop_offset:
                continue
            if r.value_length < 0:
                self.counts.nulls += 1
                continue
            if r.value_length != size:
                self.counts.wrong += 1
                self._note(offset, r.value_length)
                continue
            chunk.values[chunk.rows] = r.value
            chunk.offsets[chunk.rows] = offset
            chunk.stamps[chunk.rows] = r.timestamp_delta
            chunk.keys[chunk.rows] = r.key
            chunk.key_lengths[chunk.rows] = r.key_length
            chunk.rows += 1
        if p != end:
            return RECORDS_TRAILING
        return self._flush(s, whole)

    cdef int _flush(self, const section* s, bint whole) noexcept nogil:
        """Append the rows of the chunk that are wanted."""
        cdef kd_chunk* chunk = self.chunk
        cdef int64_t row = self.c.rows, i
        cdef int64_t* times = <int64_t*>self.times.data + row if self.timed else NULL
        cdef field_t* field
        cdef int k
        if not whole:
            kd_fixed_between(chunk, chunk.offsets, s.start_offset, s.stop_offset - 1)
        self.time.base = self.stamps.base = s.base_timestamp
        if s.log_append_time:
            self.time.base = self.stamps.base = s.max_timestamp
            for i in range(chunk.rows):
                chunk.stamps[i] = 0
        if self.timed:
            kd_fixed_times(chunk, &self.time, times)
            self._judge(times)
        for k in range(self.tests_count):
            kd_fixed_keep(chunk, &self.tests[k], times)
        if self.timed:
            kd_fixed_bounds(&self.time, times, chunk.rows)
        for k in range(self.fields_count):
            field = &self.fields[k]
            kd_fixed_gather(chunk, field.position, field.width, field.out + row * field.width)
        memcpy(self.offset.data + row * 8, chunk.offsets, chunk.rows * 8)
        if self.with_timestamps:
            kd_fixed_times(chunk, &self.stamps, <int64_t*>self.timestamp.data + row)
        if self.with_keys:
            for i in range(chunk.rows):
                put_text(&self.c.key, row + i, chunk.keys[i], chunk.key_lengths[i])
        self.c.rows = row + chunk.rows
        chunk.rows = 0
        return RECORDS_OK

    cdef int _judge(self, int64_t* times) noexcept nogil:
        """Drop the rows of the chunk whose times are not acceptable; the others move the clock."""
        cdef kd_chunk* chunk = self.chunk
        cdef kd_time seen
        cdef int64_t i
        seen.least, seen.greatest = 0, self.clock_us
        kd_fixed_bounds(&seen, times, chunk.rows)
        if seen.least < 0 or seen.greatest > self.latest_us:
            for i in range(chunk.rows):
                if times[i] < 0:
                    self.counts.early += 1
                    self._note(chunk.offsets[i], BEFORE_1970)
                elif times[i] > self.latest_us:
                    self.counts.ahead += 1
                    self._note(chunk.offsets[i], TOO_FAR_AHEAD)
            kd_fixed_between(chunk, times, 0, self.latest_us)
            kd_fixed_times(chunk, &self.time, times)
            seen.greatest = self.clock_us
            kd_fixed_bounds(&seen, times, chunk.rows)
        self.clock_us = seen.greatest
        return 0

    # -- Arrow out ---------------------------------------------------------------------------------

    def _tell(self):
        """Move what was counted into `dropped`."""
        cdef int64_t i
        samples = []
        for i in range(self.counts.known):
            reason, field = DropReason.WRONG_SIZE, ""
            why = f"the value has {self.bad[i].why} bytes, the layout {self.layout.size}"
            if self.bad[i].why < 0:
                reason = (DropReason.BEFORE_1970 if self.bad[i].why == BEFORE_1970
                          else DropReason.TOO_FAR_AHEAD)
                field, why = self.time_name, TIME_FAULTS[reason]
            samples.append(BadRow(self.bad[i].offset, reason, field, why))
        samples.sort(key=lambda row: row.offset)
        self.dropped.add(DropReason.NULL_VALUE, self.counts.nulls)
        self.dropped.add(DropReason.WRONG_SIZE, self.counts.wrong, samples)
        self.dropped.add(DropReason.BEFORE_1970, self.counts.early)
        self.dropped.add(DropReason.TOO_FAR_AHEAD, self.counts.ahead)
        memset(&self.counts, 0, sizeof(dropped_t))

    def take_rows(self):
        """The pending rows (0 or more) as FixedRows.  Afterwards no rows are pending, and `dropped`
        knows all that gave no row until now."""
        cdef int64_t rows = self.c.rows
        cdef bint empty = rows == 0
        if self.counts.nulls or self.counts.known:
            self._tell()
        arrays, faults = [], []
        for i, name in enumerate(self.columns):
            array = self._column(i, self.layout.field(name).kind, rows)
            arrays.append(array)
            fault = _fault(array)
            if fault is not None:
                faults.append((name, fault))
        out = FixedRows(
            rows, arrays, self._numbers(self.offset, rows),
            self._numbers(self.times, rows) if self.timed else None,
            None if empty or not self.timed else self.time.least,
            None if empty or not self.timed else self.time.greatest,
            None if self.clock_us < 0 else self.clock_us,
            text_array(_BINARY, rows, &self.c.key, self.key_offsets, self.key_data,
                       self.key_validity) if self.with_keys else None,
            self._numbers(self.timestamp, rows).view(_MICROSECONDS) if self.with_timestamps
            else None,
            self.input_bytes)
        self._reset()
        return self._without(out, faults) if faults else out

    def take(self):
        """The pending rows as a RecordBatch of `schema`."""
        rows = self.take_rows()
        extra = [column for column in (rows.keys, rows.timestamps) if column is not None]
        return pa.RecordBatch.from_arrays([*rows.fields, *extra], schema=self.schema)

    cdef object _numbers(self, Block block, int64_t rows):
        if rows == 0:
            return pa.nulls(0, _INT64)
        buffer = pa.foreign_buffer(<uintptr_t>block.data, rows * 8, block)
        return pa.Array.from_buffers(_INT64, rows, [None, buffer], 0)

    cdef object _column(self, int i, object kind, int64_t rows):
        """The column of the field `i`."""
        cdef Block block = self.blocks[i], ends
        cdef uint32_t width = self.fields[i].width
        arrow = kind.arrow
        if rows == 0:
            return pa.nulls(0, arrow)
        if kind.name == "bool":
            buffer = pa.foreign_buffer(<uintptr_t>block.data, rows, block)
            return pc.cast(pa.Array.from_buffers(pa.uint8(), rows, [None, buffer], 0), arrow)
        if pa.types.is_string(arrow):
            ends = take_block((rows + 1) * 4)
            with nogil:
                kd_fixed_texts(block.data, width, rows, <int32_t*>ends.data)
            return pa.Array.from_buffers(
                arrow, rows,
                [None, pa.foreign_buffer(<uintptr_t>ends.data, (rows + 1) * 4, ends),
                 pa.foreign_buffer(<uintptr_t>block.data, (<int32_t*>ends.data)[rows], block)],
                0)
        buffer = pa.foreign_buffer(<uintptr_t>block.data, rows * width, block)
        return pa.Array.from_buffers(arrow, rows, [None, buffer], 0)

    def _without(self, rows, faults):
        """`rows` without those that one of `faults` (name, mask) marks; counts them."""
        every = None
        for name, mask in faults:
            samples = [BadRow(offset, DropReason.NOT_DECODED, name,
                              f"the bytes are no {self.layout.field(name).type}")
                       for offset in pc.filter(rows.offsets, mask)[:SAMPLES_MAX].to_pylist()]
            new = mask if every is None else pc.and_not(mask, every)
            self.dropped.add(DropReason.NOT_DECODED, pc.sum(new).as_py() or 0, samples)
            every = mask if every is None else pc.or_(every, mask)
        good = pc.invert(every)

        def kept(column):
            return None if column is None else pc.filter(column, good)

        times = kept(rows.times_us)
        bounds = pc.min_max(times).as_py() if times is not None else {"min": None, "max": None}
        return rows._replace(
            rows=pc.sum(good).as_py(), fields=[kept(column) for column in rows.fields],
            offsets=kept(rows.offsets), times_us=times, least_us=bounds["min"],
            greatest_us=bounds["max"], keys=kept(rows.keys), timestamps=kept(rows.timestamps))


def _fault(array):
    """A mask of the rows whose bytes are no value of the type: not UTF-8, or more digits than a
    decimal may have.  None if there are none."""
    kind = array.type
    if not len(array):
        return None
    if pa.types.is_string(kind):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            # Row by row, which is slow: somebody wrote other bytes than the layout says.
            return pa.array([_is_not_text(text) for text in array.view(_BINARY).to_pylist()])
        return None
    if pa.types.is_decimal(kind):
        wide = array.view(pa.decimal128(38, kind.scale))
        limit = pa.scalar(decimal.Decimal(10 ** kind.precision - 1).scaleb(-kind.scale, _EXACT),
                          pa.decimal128(38, kind.scale))
        mask = pc.or_(pc.greater(wide, limit), pc.less(wide, pc.negate(limit)))
        return mask if pc.any(mask).as_py() else None
    return None


def _is_not_text(bytes text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return False
