"""Key words: equal if and only if Spark would put the rows into one group, and back again."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, StateError
from kdirect.state.arena import StateMemory
from kdirect.state.keys import KeyShape
from kdirect.state.table import Table
from tests.state.state_model import canonical

VALUES: list[tuple[pa.DataType, Any]] = [
    (pa.int8(), st.integers(-128, 127)), (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)), (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.uint16(), st.integers(0, 65535)), (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()), (pa.float32(), st.floats(width=32)),
    (pa.date32(), st.dates()), (pa.string(), st.text(max_size=20)),
    (pa.binary(), st.binary(max_size=20)), (pa.binary(5), st.binary(min_size=5, max_size=5)),
    (pa.timestamp("us"), st.datetimes()), (pa.large_string(), st.text(max_size=9)),
    (pa.decimal128(9, 2), st.integers(-(10**9) + 1, 10**9 - 1).map(lambda i: Decimal(i) / 100)),
    (pa.decimal128(38, 0), st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal)),
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_position_for_each_group_and_the_keys_come_back(data: Any) -> None:
    columns = data.draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))
    pools = [data.draw(st.lists(st.none() | v, min_size=1, max_size=4)) for _, v in columns]
    rows = data.draw(
        st.lists(st.tuples(*(st.sampled_from(pool) for pool in pools)), min_size=1, max_size=30)
    )
    shape = KeyShape([(str(i), type_) for i, (type_, _) in enumerate(columns)])
    skip = data.draw(st.integers(0, len(rows) - 1))
    arrays = [pa.array([r[i] for r in rows], type_)[skip:] for i, (type_, _) in enumerate(columns)]
    rows = [tuple(canonical(v) for v in row) for row in zip(*(a.to_pylist() for a in arrays))]
    memory = StateMemory.anonymous(1 << 20)
    table = Table(memory, shape.words, 2)
    positions = table.find(shape.encode(arrays))
    assert dict(zip(positions.tolist(), rows)) == {
        dict(zip(rows, positions.tolist()))[r]: r for r in rows
    }
    assert len(set(positions.tolist())) == len(set(rows)) == len(table)
    decoded = shape.decode(memory.address, table.scan() + np.uint64(16))
    assert [a.type for a in decoded] == [type_ for type_, _ in columns]
    for array in decoded:
        array.validate(full=True)
    back = [tuple(canonical(v) for v in r) for r in zip(*(a.to_pylist() for a in decoded))]
    assert back == list(dict.fromkeys(rows))


def test_floats_are_grouped_as_spark_does() -> None:
    odd = np.array([0x7FF8000000000001, 0xFFF8000000000000], np.uint64).view(np.float64)
    values = pa.array([0.0, -0.0, math.nan, *odd, None])
    shape = KeyShape([("x", pa.float64())])
    hashes = shape.encode([values]).hashes()
    assert hashes[0] == hashes[1] and len(set(hashes[2:5].tolist())) == 1
    assert len(set(hashes.tolist())) == 3


def test_a_column_without_nulls_is_used_as_it_lies() -> None:
    shape = KeyShape([("k", pa.int64())], nullable=False)
    assert shape.words == 1 and KeyShape([("k", pa.int64())]).words == 2
    with pytest.raises(StateError, match="'k' has nulls"):
        shape.encode([pa.array([1, None])])


def test_partitions_are_even() -> None:
    shape = KeyShape([("k", pa.int64())], nullable=False)
    for keys in (np.arange(1 << 16), np.arange(1 << 16) << 32, np.arange(1 << 16) * 1000):
        counts = np.bincount(shape.encode([pa.array(keys)]).hashes() >> np.uint64(56))
        assert len(counts) == 256 and counts.min() > 150 and counts.max() < 380


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="'l' of type list"):
        KeyShape([("l", pa.list_(pa.int8()))])
    with pytest.raises(StateError, match="'s' has 1 rows of int64"):
        KeyShape([("s", pa.string())]).encode([pa.array([1])])
    with pytest.raises(StateError, match="row 1 has more than 32768 bytes"):
        KeyShape([("s", pa.string())]).encode([pa.array(["a", "b" * 40_000])])


def test_any_64_bits_are_a_timestamp() -> None:
    """-2**63 stood for null and was refused: one such record ended the job, and each repetition."""
    type_ = pa.timestamp("us")
    values = pa.array([-(1 << 63), None, (1 << 63) - 1, 0, -(1 << 63)]).view(type_)
    shape = KeyShape([("t", type_)])
    memory = StateMemory.anonymous(1 << 20)
    table = Table(memory, shape.words, 1)
    positions = table.find(shape.encode([values]))
    assert len(table) == 4 and positions[0] == positions[4]
    (back,) = shape.decode(memory.address, positions + np.uint64(8))
    assert back.view(pa.int64()).to_pylist() == values.view(pa.int64()).to_pylist()
    assert KeyShape([("t", type_)], nullable=False).words == 1
