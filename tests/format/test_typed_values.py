"""Values in JSON and Arrow to columns, held against the json module and what was written."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import ConfigError
from kdirect.format.bad_values import DropReason
from kdirect.format.typed_values import ArrowValues, JsonValues

SCHEMA = pa.schema([("a", pa.int64()), ("s", pa.string())])


def decode(values: Any, given: list[bytes | None], base: int = 100) -> tuple[list, list, list]:
    """(rows, offsets of their records, (offset, field) of the samples of bad rows)."""
    offsets = pa.array(range(base, base + len(given)), pa.int64())
    found = values.decode(pa.array(given, pa.binary()), offsets)
    for column, field in zip(found.columns, values.schema, strict=True):
        column.validate(full=True)
        assert column.type == field.type and len(column) == found.rows
    rows = list(zip(*(column.to_pylist() for column in found.columns)))
    assert [base + i for i in found.records.to_pylist()] == found.offsets.to_pylist()
    bad = [(row.offset, row.field) for row in values.dropped.samples]
    return rows, found.offsets.to_pylist(), bad


# -- JSON ------------------------------------------------------------------------------------------

BAD = (
    b"", b" ", b"5", b"[1]", b'"x"', b"{", b"}", b'{"a":1', b'{"a":}', b'{"a":1}}', b'{"a":1}{',
    b'{"a":1},"w":3', b'{"a":1},"w":{"b":2}', b'null,"w":3', b'{"a":1},{"a":2}',
    b'{"a":1}{"a":2}', b'{"a":1} {"a":2}', b'{"a":1}\n{"a":2}', b'{"a":1}}\n{"v":{"a":2}',
    b'{"a":"1"}', b'{"a":1.5}', b'{"a":9223372036854775808}', b'{"a":[1]}', b'{"s":3}',
    b'{"s":"\xff"}', b'{"s":"x\ny"}', b'{"a":1,"a":2}', b"\xff\xfe", b'{"a":1,}', b"{'a':1}",
    b"nul",
)  # fmt: skip


def theirs(value: bytes) -> tuple | None:
    """A good value by the json module; None for a bad one."""

    def once(pairs: list) -> dict:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    try:
        found = json.loads(value.decode(), object_pairs_hook=once)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    a, s = found.get("a"), found.get("s")
    if a is not None and (type(a) is not int or not -(2**63) <= a < 2**63):
        return None
    return None if s is not None and not isinstance(s, str) else (a, s)


good = st.fixed_dictionaries(
    {},
    optional={
        "a": st.none() | st.integers(-(2**63), 2**63 - 1),
        "s": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
        "other": st.none() | st.booleans() | st.text(max_size=5) | st.lists(st.integers()),
    },
).flatmap(
    lambda value: st.builds(
        lambda indent, ascii: json.dumps(value, indent=indent, ensure_ascii=ascii).encode(
            errors="surrogatepass" if not ascii else "strict"
        ),
        st.sampled_from([None, 1]),
        st.booleans(),
    )
)


@given(st.lists(st.one_of(good, good, good, st.none(), st.sampled_from(BAD)), max_size=60))
def test_json_values_are_what_the_json_module_reads(values: list[bytes | None]) -> None:
    decoder = JsonValues(SCHEMA)
    rows, offsets, bad = decode(decoder, values)
    expected = [(i, theirs(value)) for i, value in enumerate(values) if value is not None]
    assert rows == [row for _, row in expected if row is not None]
    assert offsets == [100 + i for i, row in expected if row is not None]
    faults = [100 + i for i, row in expected if row is None]
    assert decoder.dropped.counts.get(DropReason.NOT_DECODED, 0) == len(faults)
    assert decoder.dropped.counts.get(DropReason.NULL_VALUE, 0) == values.count(None)
    if len(faults) <= 10:
        assert sorted(offset for offset, _ in bad) == faults


@pytest.mark.parametrize("value", BAD)
def test_one_bad_json_value_costs_its_row_only(value: bytes) -> None:
    around = [b'{"a":%d,"s":"x"}' % i for i in range(30)]
    decoder = JsonValues(SCHEMA)
    rows, offsets, bad = decode(decoder, [*around[:17], value, *around[17:]])
    assert rows == [(i, "x") for i in range(30)]
    assert offsets == [100 + i for i in range(31) if i != 17]
    assert [offset for offset, _ in bad] == [117]


def test_the_field_of_a_bad_json_value_is_named() -> None:
    decoder = JsonValues(SCHEMA)
    *_, bad = decode(decoder, [b'{"a":1}', b'{"a":"x","s":"y"}', b'{"a":1,"s":7}', b"{"])
    assert sorted(bad) == [(101, "a"), (102, "s"), (103, "")]
    assert "int64" in next(row.why for row in decoder.dropped.samples if row.field == "a")


def test_types_of_json_values() -> None:
    schema = pa.schema(
        [
            ("t", pa.timestamp("us")), ("d", pa.date32()), ("m", pa.decimal128(9, 2)),
            ("b", pa.binary()), ("f", pa.binary(2)), ("x", pa.float64()), ("y", pa.bool_()),
            ("i", pa.int8()),
        ]
    )  # fmt: skip
    value = (
        b'{"t":"2024-01-02T03:04:05.000006Z","d":"2024-02-03","m":"12.34","b":"abc","f":"xy",'
        b'"x":1,"y":true,"i":-128}'
    )
    rows, *_ = decode(JsonValues(schema), [value, b"{}", b"null"])
    assert rows[0] == (
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.date(2024, 2, 3), Decimal("12.34"),
        b"abc", b"xy", 1.0, True, -128,
    )  # fmt: skip
    assert rows[1:] == [(None,) * 8] * 2
    for wrong in (b'{"f":"xyz"}', b'{"d":"2024-13-01"}', b'{"i":128}', b'{"m":"1234567890.5"}'):
        *_, bad = decode(JsonValues(schema), [wrong])
        assert bad == [(100, wrong[2:3].decode())], wrong


def test_json_columns_that_hold_others() -> None:
    inner = pa.struct([("d", pa.date32()), ("b", pa.binary())])
    schema = pa.schema(
        [
            ("l", pa.list_(pa.int32())),
            ("r", pa.struct([("t", pa.timestamp("us", "UTC")), ("s", pa.list_(inner))])),
        ]
    )
    value = b'{"l":[1,null],"r":{"s":[{"d":"2024-02-03","b":"x"},{}],"t":"2024-01-02T03:04:05Z"}}'
    rows, *_ = decode(JsonValues(schema), [value, b'{"l":[],"r":null}'])
    at = datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    parts = [{"d": datetime.date(2024, 2, 3), "b": b"x"}, {"d": None, "b": None}]
    assert rows == [([1, None], {"t": at, "s": parts}), ([], None)]
    for wrong in (b'{"l":[1.5]}', b'{"r":{"s":[{"d":"x"}]}}', b'{"l":{}}', b'{"r":[]}'):
        *_, bad = decode(JsonValues(schema), [value, wrong])
        assert bad == [(101, wrong[2:3].decode())], wrong
    with pytest.raises(ConfigError, match=r"column m of JSON values has the type list<.*map"):
        JsonValues(pa.schema([("m", pa.list_(pa.map_(pa.string(), pa.int64())))]))


# -- Arrow -----------------------------------------------------------------------------------------


def stream_of(*batches: pa.RecordBatch, **options: Any) -> bytes:
    out = io.BytesIO()
    settings = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(out, batches[0].schema, options=settings) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return out.getvalue()


def batch_of(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"s": [f"s{i}" for i in range(start, start + count)], "a": range(start, start + count)},
        pa.schema([("s", pa.string()), ("a", pa.int32())]),
    )


def test_arrow_streams_and_messages() -> None:
    message = batch_of(5, 3).serialize().to_pybytes()
    decoder = ArrowValues(SCHEMA, batch_of(0, 0).schema)
    values = [
        stream_of(batch_of(0, 2), batch_of(2, 3)), None, message, stream_of(batch_of(8, 0)),
        stream_of(batch_of(8, 1), compression="zstd"), b"junk", b"", message[:-60],
        # The rows of the second one were lost, in silence.
        stream_of(batch_of(9, 1)) + stream_of(batch_of(10, 1)), message + message,
    ]  # fmt: skip
    rows, offsets, bad = decode(decoder, values)
    assert rows == [(i, f"s{i}") for i in range(9)]
    assert offsets == [100] * 5 + [102] * 3 + [104]
    assert bad == [(offset, "") for offset in range(105, 110)]
    assert decoder.dropped.counts == {DropReason.NOT_DECODED: 5, DropReason.NULL_VALUE: 1}


def test_the_column_of_a_bad_arrow_value_is_named() -> None:
    lacking = stream_of(pa.RecordBatch.from_pydict({"a": [1, 2]}))
    other = stream_of(pa.RecordBatch.from_pydict({"a": ["x"], "s": ["y"]}))
    good = stream_of(batch_of(0, 1))
    decoder = ArrowValues(SCHEMA)
    rows, offsets, bad = decode(decoder, [lacking, good, other])
    assert (rows, offsets) == ([(0, "s0")], [101])
    assert bad == [(100, "s"), (102, "a")]


def test_a_dictionary_column_is_cast() -> None:
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3]), words], names=["a", "s"])
    rows, *_ = decode(ArrowValues(SCHEMA), [stream_of(batch)])
    assert rows == [(1, "x"), (2, "y"), (3, "x")]


def test_integers_become_decimals_if_they_fit() -> None:
    schema = pa.schema([("d", pa.decimal128(5, 2))])
    given_values = [stream_of(pa.RecordBatch.from_pydict({"d": [n, None]})) for n in (-999, 1000)]
    rows, _, bad = decode(ArrowValues(schema), given_values)
    assert rows == [(Decimal("-999.00"),), (None,)]
    assert bad == [(101, "d")]


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_arrow_value_is_bad_or_valid(where: int, byte: int) -> None:
    value = bytearray(stream_of(batch_of(0, 4)))
    value[where % len(value)] = byte
    decoder = ArrowValues(SCHEMA)
    rows, _, _ = decode(decoder, [bytes(value), stream_of(batch_of(4, 1))])
    assert rows[-1] == (4, "s4")  # what is next to it is not touched
