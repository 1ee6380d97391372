"""Fixed values to columns, held against the struct module and against the slow decoder of
conftest."""

from __future__ import annotations

import datetime
import operator
import random
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect import blocks
from kdirect.errors import ConfigError, CorruptBatchError, FormatError
from kdirect.format.bad_values import SAMPLES, DropReason, error_of
from kdirect.format.codec import encode_records
from kdirect.format.fixed import FixedDecoder, can_test
from kdirect.format.fixed_layout import FixedField, FixedLayout, layout_of
from kdirect.model import TopicPartition
from tests.format.conftest import Guarded, Malformed, Reference

STRUCT = {
    "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q", "uint8": "<B", "uint16": "<H",
    "uint32": "<I", "uint64": "<Q", "float32": "<f", "float64": "<d",
}  # fmt: skip
COMPARE = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
TYPES = (
    *STRUCT, "bool", "date32", "timestamp(s)", "timestamp(ms)", "timestamp(us)", "timestamp(ns)",
    "decimal128(38,0)", "decimal128(5,2)", "binary[1]", "binary[7]", "binary[33]", "string[1]",
    "string[9]",
)  # fmt: skip
PAIR = FixedLayout.of("key:int64", "time:timestamp(ms)")


def field_of(value: bytes, field: FixedField) -> Any:
    """What a field holds, read by struct; ValueError if its bytes are no value of its type."""
    name, at = field.type, field.position
    raw = value[at : at + field.kind.width]
    if name in STRUCT:
        return struct.unpack_from(STRUCT[name], value, at)[0]
    if name == "bool":
        return raw != b"\0"
    if name == "date32":
        return struct.unpack_from("<i", value, at)[0]
    if name.startswith("timestamp"):
        return struct.unpack_from("<q", value, at)[0]
    if name.startswith("decimal128"):
        precision, scale = map(int, name[11:-1].split(","))
        number = int.from_bytes(raw, "little", signed=True)
        if abs(number) >= 10**precision:
            raise ValueError(number)
        return Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale))
    if name.startswith("string"):
        return raw.split(b"\0")[0].decode()
    return raw


def plain(column: pa.Array) -> list[Any]:
    """A column as `field_of` has its values."""
    if pa.types.is_date(column.type):
        return column.view(pa.int32()).to_pylist()
    if pa.types.is_timestamp(column.type):
        return column.view(pa.int64()).to_pylist()
    return column.to_pylist()


def same(left: Any, right: Any) -> bool:
    return left == right or (left != left and right != right)


def decode(layout: FixedLayout, data: bytes, columns: Any = None, **settings: Any) -> Any:
    """(rows of all blocks as tuples with their offset first, the decoder)."""
    names = [f.name for f in layout.fields] if columns is None else list(columns)
    decoder = FixedDecoder("t", 3, layout, names, **settings)
    out, position = [], 0
    while position < len(data):
        taken = decoder.feed(memoryview(data)[position:])
        position += taken
        assert taken or decoder.full, "the decoder does not move"
        rows = decoder.take_rows()
        for column in rows.fields:
            column.validate(full=True)
            assert len(column) == rows.rows
        out += zip(rows.offsets.to_pylist(), *(plain(column) for column in rows.fields))
    return out, decoder


# -- layouts ---------------------------------------------------------------------------------------


@st.composite
def layouts(draw: Any) -> FixedLayout:
    fields = []
    end = 0
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(TYPES))
        position = draw(st.integers(0, end + 5))
        field = FixedField(name=f"f{i}", type=kind, position=position)
        end = max(end, field.end)
        fields.append(field)
    return FixedLayout(size=end + draw(st.integers(0, 3)), fields=tuple(fields))


@given(layouts())
def test_a_layout_survives_json(layout: FixedLayout) -> None:
    assert layout_of(layout.to_json()) == layout
    texts = [f"{f.name}:{f.type}@{f.position}" for f in layout.fields]
    assert FixedLayout.of(*texts, size=layout.size) == layout
    assert hash(layout_of(layout.to_json())) == hash(layout)


@given(layouts(), st.binary(max_size=300))
def test_numpy_and_struct_agree_on_where_fields_are(layout: FixedLayout, noise: bytes) -> None:
    import numpy as np

    value = (noise + bytes(layout.size))[: layout.size]
    row = np.frombuffer(value, layout.dtype())[0]
    for field in layout.fields:
        raw = value[field.position : field.end]
        assert row[field.name].tobytes() == raw


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FixedLayout.of("a:int64", "a:int8"), "name 'a'"),
        (lambda: FixedLayout.of("a:int64", size=7), r"a is at \[0, 8\) of a value of 7"),
        (lambda: FixedLayout.of("a:number"), "no type 'number'"),
        (lambda: FixedLayout.of("a"), "describes no field"),
        (lambda: FixedLayout.of("a:int8@x"), "describes no field"),
        (lambda: FixedLayout.of("a:decimal128(39,0)"), "out of range"),
        (lambda: FixedLayout.of("a:binary[0]"), "0 bytes"),
        (lambda: FixedLayout.of(), "0 bytes"),
        (lambda: layout_of({"fields": []}), "cannot be read"),
        (lambda: PAIR.field("x"), "it has key, time"),
        (lambda: FixedDecoder("t", 0, PAIR, ["key", "key"]), "each field once"),
        (lambda: FixedDecoder("t", 0, PAIR, ["nokey"]), "it has key, time"),
        (lambda: FixedDecoder("t", 0, PAIR, [], tests=[("key", "~", 3)]), "key ~ 3"),
        (lambda: FixedDecoder("t", 0, PAIR, [], tests=[("key", "=", 1.5)]), "key = 1.5"),
        (lambda: FixedDecoder("t", 0, PAIR, [], time="key", time_unit="h"), "the unit .* 'h'"),
    ],
)
def test_what_cannot_be_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


# -- values ----------------------------------------------------------------------------------------

noise = st.one_of(st.binary(max_size=90), st.just(b""), st.binary(max_size=40).map(lambda b: b * 3))
records = st.lists(
    st.tuples(
        st.sampled_from(["good", "good", "good", "good", "null", "short", "long", "skip"]),
        noise,
        st.one_of(st.none(), st.binary(max_size=70)),
        st.integers(0, 30).map(lambda n: [(b"h", b"v")] if n == 0 else []),
        st.integers(-(2**33), 2**33) | st.integers(-40, 40),
    ),
    max_size=300,
)


def batches_of(layout: FixedLayout, rows: Any, seed: int) -> tuple[bytes, list[tuple]]:
    """Batches with these records, and what struct reads of them: (offset, timestamp in ms, key,
    value)."""
    rng = random.Random(seed)
    data, wanted, offset = b"", [], 0
    while rows:
        count = rng.choice([1, 3, 130, 300])
        part, rows = rows[:count], rows[count:]
        base, encoded, delta, sent = offset, b"", 0, 0
        append_time = rng.random() < 0.2
        for kind, filler, key, headers, stamp in part:
            if kind == "skip":
                delta += rng.choice([1, 1, 70])
                continue
            value: bytes | None = (filler + bytes(layout.size))[: layout.size]
            if kind == "null":
                value = None
            elif kind == "short":
                value = filler[: layout.size - 1]
            elif kind == "long":
                value = filler + bytes(layout.size + 1)
            encoded += Reference.record(delta, stamp, key, value, headers)
            ms = 1_700_000_000_777 if append_time else 1_700_000_000_000 + stamp
            wanted.append((base + delta, ms, key, value))
            delta += 1
            sent += 1
        data += Reference.batch(
            encoded,
            sent,
            base_offset=base,
            last_offset_delta=max(delta - 1, 0),
            attributes=8 if append_time else 0,
            max_timestamp=1_700_000_000_777,
        )
        offset = base + max(delta, 1)
    return data, wanted


@given(
    layouts(),
    records,
    st.integers(0, 2**32),
    st.integers(0, 200),
    st.integers(0, 400),
    st.integers(1, 200),
)
def test_columns_are_what_struct_reads(
    layout: FixedLayout, rows: Any, seed: int, start: int, span: int, target: int
) -> None:
    data, written = batches_of(layout, rows, seed)
    got, decoder = decode(
        layout, data, start_offset=start, stop_offset=start + span, target_rows=target
    )
    expected, bad = [], 0
    in_range = [row for row in written if start <= row[0] < start + span]
    for offset, _, _, value in in_range:
        if value is None or len(value) != layout.size:
            continue
        try:
            expected.append((offset, *(field_of(value, field) for field in layout.fields)))
        except ValueError:
            bad += 1
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected):
        assert all(same(a, b) for a, b in zip(mine, theirs)), (mine, theirs)
    counts = decoder.dropped.counts
    assert counts.get(DropReason.NULL_VALUE, 0) == sum(row[3] is None for row in in_range)
    wrong = [row for row in in_range if row[3] is not None and len(row[3]) != layout.size]
    assert counts.get(DropReason.WRONG_SIZE, 0) == len(wrong)
    assert counts.get(DropReason.NOT_DECODED, 0) == bad
    if not bad:
        assert [row.offset for row in decoder.dropped.samples] == [r[0] for r in wrong[:SAMPLES]]


@given(records, st.integers(0, 2**32))
def test_keys_and_timestamps_of_the_records(rows: Any, seed: int) -> None:
    data, written = batches_of(PAIR, rows, seed)
    decoder = FixedDecoder("t", 0, PAIR, ["key"], with_keys=True, with_timestamps=True)
    assert decoder.feed(data) == len(data)
    taken = decoder.take_rows()
    good = [row for row in written if row[3] is not None and len(row[3]) == PAIR.size]
    assert taken.keys.to_pylist() == [row[2] for row in good]
    assert taken.timestamps.cast(pa.int64()).to_pylist() == [row[1] * 1000 for row in good]
    assert taken.offsets.to_pylist() == [row[0] for row in good]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches(codec: str) -> None:
    values = [struct.pack("<qq", i * 7, 1000 + i) for i in range(1000)]
    data = b""
    for start in range(0, 1000, 200):
        part = [(None, value, (), 5) for value in values[start : start + 200]]
        whole = bytes(encode_records(part, compression=codec))
        data += start.to_bytes(8, "big") + whole[8:]
    decoder = FixedDecoder("t", 3, PAIR, ["key", "time"], target_rows=450)
    sizes, got, position = [], [], 0
    while position < len(data):
        position += decoder.feed(data[position:])
        rows = decoder.take_rows()
        sizes.append(rows.rows)
        got += zip(rows.offsets.to_pylist(), *(plain(column) for column in rows.fields))
    assert got == [(i, i * 7, 1000 + i) for i in range(1000)]
    assert sizes == [400, 400, 200]


# -- tests of numbers ------------------------------------------------------------------------------


@given(
    st.sampled_from([t for t in STRUCT if "int" in t] + ["timestamp(us)", "date32"]),
    st.sampled_from(list(COMPARE)),
    st.data(),
)
def test_tests_of_numbers(kind: str, op: str, data: Any) -> None:
    layout = FixedLayout.of(f"a:{kind}", "b:int16", size=20)
    code = STRUCT.get(kind, "<q" if kind.startswith("timestamp") else "<i")
    bits = 8 * struct.calcsize(code)
    low, high = (0, 2**bits - 1) if code[1].isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    near = st.sampled_from([low, low + 1, -1, 0, 1, high - 1, high])
    numbers = data.draw(
        st.lists(st.integers(low, high) | near.filter(lambda n: low <= n <= high), min_size=1)
    )
    literal = data.draw(st.one_of(near, st.sampled_from([low - 1, high + 1, 2**70, -(2**70)])))
    if numbers and data.draw(st.booleans()):
        literal = data.draw(st.sampled_from(numbers))
    values = [struct.pack(code + "h", n, i % 5).ljust(20, b"x") for i, n in enumerate(numbers)]
    assert can_test(layout, "a", op, literal)
    got, _ = decode(
        layout,
        Reference.simple([(None, value) for value in values]),
        tests=[("a", op, literal), ("b", "!=", 2)],
    )
    expected = [
        (i, n, i % 5) for i, n in enumerate(numbers) if COMPARE[op](n, literal) and i % 5 != 2
    ]
    assert got == expected


# -- event time ------------------------------------------------------------------------------------


@given(
    st.sampled_from(["s", "ms", "us", "ns"]),
    st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 2**33) | st.integers(-2001, 2001),
        min_size=1,
        max_size=150,
    ),
    st.booleans(),
)
def test_event_times_are_microseconds(unit: str, units: list[int], tested: bool) -> None:
    layout = FixedLayout.of("n:int32", f"t:timestamp({unit})")
    values = [struct.pack("<iq", i, t) for i, t in enumerate(units)]
    latest = 3 * 10**15
    decoder = FixedDecoder(
        "t", 0, layout, ["n"], time="t", latest_us=latest, tests=[("n", "<", 9)] if tested else []
    )
    decoder.feed(Reference.simple([(None, value) for value in values]))
    taken = decoder.take_rows()
    scale = {"s": 10**6, "ms": 10**3, "us": 1}.get(unit)
    exact = [t // 1000 if scale is None else t * scale for t in units]
    most = 2**63 - 1 if scale is None else (2**63 - 1) // scale * scale
    whole = [min(max(t, -most if unit != "us" else -(2**63)), most) for t in exact]
    fine = [(i, t) for i, t in enumerate(whole) if 0 <= t <= latest]
    kept = [t for i, t in fine if not tested or i < 9]
    assert taken.times_us is not None
    assert taken.times_us.to_pylist() == kept
    assert taken.least_us == min(kept, default=None)
    assert taken.greatest_us == max(kept, default=None)
    assert taken.clock_us == max((t for _, t in fine), default=None)
    counts = decoder.dropped.counts
    assert counts.get(DropReason.BEFORE_1970, 0) == sum(t < 0 for t in whole)
    assert counts.get(DropReason.TOO_FAR_AHEAD, 0) == sum(t > latest for t in whole)
    bad = [i for i, t in enumerate(whole) if not 0 <= t <= latest]
    assert [row.offset for row in decoder.dropped.samples] == bad[:SAMPLES]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_time_without_a_sign_may_be_too_far_ahead_and_never_before_1970(unit: str) -> None:
    decoder = FixedDecoder(
        "t", 0, FixedLayout.of("t:uint64"), [], time="t", time_unit=unit, latest_us=3 * 10**15
    )
    times = (3000, 2**63 - 1, 2**63, 2**64 - 1)
    decoder.feed(Reference.simple([(None, struct.pack("<Q", time)) for time in times]))
    assert decoder.take_rows().rows == 1
    assert decoder.dropped.counts == {DropReason.TOO_FAR_AHEAD: 3}


def test_a_date_and_the_timestamp_of_the_record_are_times() -> None:
    layout = FixedLayout.of("d:date32")
    data = Reference.simple([(None, struct.pack("<i", d)) for d in (0, 19_000)])
    decoder = FixedDecoder("t", 0, layout, ["d"], time="d")
    decoder.feed(data)
    taken = decoder.take_rows()
    assert taken.fields[0].to_pylist()[1] == datetime.date(2022, 1, 8)
    assert taken.times_us is not None and taken.times_us[1].as_py() == 19_000 * 86_400 * 10**6
    decoder = FixedDecoder("t", 0, layout, [], time_of_record=True)
    decoder.feed(data)
    times = decoder.take_rows().times_us
    assert times is not None
    assert times.to_pylist() == [1_700_000_000_000_000, 1_700_000_000_001_000]


# -- blocks ----------------------------------------------------------------------------------------


def of(count: int, base_offset: int) -> bytes:
    values = [struct.pack("<qq", i, i) for i in range(count)]
    return Reference.simple([(None, value) for value in values], base_offset)


def test_a_block_has_no_more_rows_than_its_target() -> None:
    data = of(60, 0) + of(60, 60) + of(60, 120) + of(250, 180) + of(1, 430)
    decoder = FixedDecoder("t", 0, PAIR, ["key"], target_rows=128)
    sizes, position = [], 0
    while position < len(data):
        position += decoder.feed(data[position:])
        taken = decoder.take_rows()
        sizes.append(taken.rows)
    assert sizes == [120, 60, 250, 1]


def test_a_block_ends_after_its_bytes_whatever_is_left_of_them() -> None:
    data = b"".join(of(100, 100 * i) for i in range(50))
    decoder = FixedDecoder(
        "t", 0, PAIR, ["key"], tests=[("key", "<", 0)], target_bytes=10_000, time="time"
    )
    position = blocks = total = 0
    while position < len(data):
        position += decoder.feed(data[position:])
        taken = decoder.take_rows()
        assert taken.rows == 0 and taken.least_us is None and taken.clock_us == 99_000
        assert taken.input_bytes >= 10_000 or position == len(data)
        total += taken.input_bytes
        blocks += 1
    assert total == len(data) - 50 * 61
    assert blocks == -(-50 // -(-10_000 // (len(data) // 50 - 61)))


def test_memory_of_columns_stays_while_they_are_used() -> None:
    decoder = FixedDecoder("t", 0, PAIR, ["key", "time"])
    kept = []
    for i in range(20):
        decoder.feed(of(500, 500 * i))
        kept.append(decoder.take_rows())
    for i, rows in enumerate(kept):
        assert rows.fields[0].to_pylist() == list(range(500))
        assert rows.offsets.to_pylist() == list(range(500 * i, 500 * i + 500))


def test_null_values_take_no_memory() -> None:
    layout = FixedLayout.of("text:string[60000]", "n:int64")
    nulls = Reference.simple([(None, None)] * 20_000)
    value = b"x" * 60_000 + struct.pack("<q", 7)
    decoder = FixedDecoder("t", 0, layout, ["text", "n"])
    before = blocks.statistics()["block_live_bytes"]
    data = nulls + Reference.simple([(None, value)], 20_000)
    assert decoder.feed(data) == len(data)
    assert blocks.statistics()["block_live_bytes"] - before < 8 << 20
    taken = decoder.take_rows()
    assert [column.to_pylist() for column in taken.fields] == [["x" * 60_000], [7]]
    assert decoder.dropped.counts == {DropReason.NULL_VALUE: 20_000}


# -- what is damaged -------------------------------------------------------------------------------


def test_a_refused_batch_leaves_nothing() -> None:
    bad = Reference.record(0, 0, None, b"short") + Reference.record(1, 0, None, bytes(16)) + b"x"
    data = of(3, 0) + Reference.batch(bad, 2, base_offset=3)
    decoder = FixedDecoder("t", 0, PAIR, ["key"], time="time")
    assert decoder.feed(data) == len(of(3, 0))
    with pytest.raises(CorruptBatchError, match="offset 3"):
        decoder.feed(data[len(of(3, 0)) :])
    taken = decoder.take_rows()
    assert taken.rows == 3 and taken.greatest_us == 2000
    assert decoder.dropped.total == 0


@given(st.integers(0, 2**32))
def test_damaged_records_are_refused_or_read_as_the_reference_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    rows = [(rng.choice([None, b"k"]), bytes([i % 251] * 16)) for i in range(rng.choice([3, 140]))]
    data = bytearray(Reference.simple(rows, rng.choice([0, 5])))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(61, len(data))] = rng.randrange(256)
    fixed = Reference.fix_crc(bytes(data))
    try:
        expected = Reference.read_batch(fixed)
    except Malformed:
        expected = None
    guarded = _GUARDED[0] if _GUARDED else _GUARDED.append(Guarded(1 << 16)) or _GUARDED[0]
    decoder = FixedDecoder("t", 0, PAIR, ["key"])
    try:
        assert decoder.feed_address(guarded.put(fixed), len(fixed)) == len(fixed)
    except FormatError:
        assert expected is None
        return
    assert expected is not None
    good = [row for row in expected if row[3] is not None and len(row[3]) == 16]
    taken = decoder.take_rows()
    assert taken.offsets.to_pylist() == [row[0] for row in good]
    assert taken.fields[0].to_pylist() == [struct.unpack_from("<q", row[3])[0] for row in good]
    assert decoder.dropped.total == len(expected) - len(good)


_GUARDED: list[Guarded] = []


def test_many_records_that_differ_in_their_deltas_only() -> None:
    """The encoded offset delta grows by a byte at 64 and at 8,192."""
    got, _ = decode(PAIR, of(8300, 5))
    assert got == [(5 + i, i, i) for i in range(8300)]


@pytest.mark.parametrize("record", [1, 30, 63, 64, 99])
def test_a_record_among_like_ones_is_read_as_the_reference_reads_it(record: int) -> None:
    """Each byte of it is changed in turn."""
    data = of(100, 0)
    lengths = [len(Reference.record(i, 0, None, bytes(16))) for i in range(100)]
    start = len(data) - sum(lengths[record:])
    for at in range(start, start + lengths[record]):
        for change in (1, 2, 0x80):
            bad = bytearray(data)
            bad[at] ^= change
            fixed = Reference.fix_crc(bytes(bad))
            decoder = FixedDecoder("t", 0, PAIR, ["key"], with_keys=True, with_timestamps=True)
            try:
                expected = Reference.read_batch(fixed)
            except Malformed:
                with pytest.raises(FormatError):
                    decoder.feed(fixed)
                continue
            assert decoder.feed(fixed) == len(fixed)
            good = [row for row in expected if row[3] is not None and len(row[3]) == 16]
            taken = decoder.take_rows()
            assert taken.offsets.to_pylist() == [row[0] for row in good]
            assert taken.keys.to_pylist() == [row[2] for row in good]
            stamps = taken.timestamps.cast(pa.int64()).to_pylist()
            assert stamps == [row[1] * 1000 for row in good]


def test_the_error_of_a_bad_row_names_it() -> None:
    data = Reference.simple([(None, bytes(16)), (None, None), (None, b"abc")], 40)
    _, decoder = decode(PAIR, data)
    row = decoder.dropped.first_error
    assert row is not None and row.reason is DropReason.WRONG_SIZE
    error = error_of(TopicPartition("events", 7), row)
    assert "events-7 offset 42: the value has 3 bytes, the layout 16" in str(error)
    assert "mode=PERMISSIVE" in error.hint
    assert (error.topic_partition, error.offset) == (TopicPartition("events", 7), 42)
