"""Keys go where Kafka's Java producer sends them; rows without keys go in runs; rows are grouped
without losing one."""

from __future__ import annotations

import random

import kafka.partitioner
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.client.partitioner import (
    STICKY_ROWS,
    Partitioner,
    group_by_partition,
    murmur2,
    partition_for_key,
    partition_for_keys,
)
from kdirect.errors import ConfigError, FormatError

# UtilsTest.testMurmur2 of Apache Kafka.
GOLDEN = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}

keys_or_none = st.lists(st.none() | st.binary(max_size=40), max_size=60)


@pytest.mark.parametrize("key", GOLDEN)
def test_murmur2_of_kafkas_own_test(key):
    assert murmur2(key) == GOLDEN[key]


def expected(key: bytes, partitions: int) -> int:
    return (kafka.partitioner.murmur2(key) & 0x7FFFFFFF) % partitions


@given(keys_or_none, st.integers(1, 1000))
def test_as_kafka_python_for_every_type_and_slice(keys, partitions):
    want = [-1 if k is None else expected(k, partitions) for k in keys]
    for kind in (pa.binary(), pa.large_binary()):
        array = pa.array(keys, kind)
        assert partition_for_keys(array, partitions).tolist() == want
        assert partition_for_keys(array[3:], partitions).tolist() == want[3:]
        assert (
            partition_for_keys(
                pa.chunked_array([array[:2], array[2:]], type=kind), partitions
            ).tolist()
            == want
        )
    assert [partition_for_key(k, partitions) for k in keys if k is not None] == [
        p for p in want if p >= 0
    ]


@given(st.lists(st.none() | st.text(max_size=20), max_size=30))
def test_strings_are_hashed_as_utf8(keys):
    want = [-1 if k is None else expected(k.encode(), 7) for k in keys]
    for kind in (pa.string(), pa.large_string()):
        assert partition_for_keys(pa.array(keys, kind), 7).tolist() == want


def test_fixed_size_and_null_columns():
    keys = [b"abcd", None, b"efgh", b"ijkl"]
    array = pa.array(keys, pa.binary(4))
    assert partition_for_keys(array[1:], 5).tolist() == [
        -1,
        expected(b"efgh", 5),
        expected(b"ijkl", 5),
    ]
    assert partition_for_keys(pa.nulls(3), 5).tolist() == [-1, -1, -1]
    assert partition_for_keys(pa.array([], pa.binary()), 5).dtype == np.int32


def test_kafka_python_agrees_on_many_keys(seed):
    rng = random.Random(seed)
    keys = [rng.randbytes(rng.randrange(0, 70)) for _ in range(2000)]
    assert partition_for_keys(pa.array(keys, pa.binary()), 31).tolist() == [
        expected(k, 31) for k in keys
    ]


def test_rows_without_keys_go_in_runs_to_all_partitions():
    p = Partitioner(3, sticky_rows=4, first=1)
    assert p.assign(None, 6).to_pylist() == [1, 1, 1, 1, 2, 2]
    assert p.assign(pa.array([b"abc", None, None, None, None], pa.binary())).to_pylist() == [
        expected(b"abc", 3),
        2,
        2,
        0,
        0,
    ]
    assert [p.partition(None) for _ in range(4)] == [0, 0, 1, 1]
    assert p.partition(b"abc") == expected(b"abc", 3)
    assert Partitioner(3, sticky_rows=1, first=0).assign(None, 4).to_pylist() == [0, 1, 2, 0]
    assert Partitioner(1).assign(None, 3).to_pylist() == [0, 0, 0]
    assert len(set(Partitioner(8).assign(None, STICKY_ROWS).to_pylist())) == 1
    assert Partitioner(8).assign(None, 0).to_pylist() == []


@given(st.lists(st.integers(0, 9), max_size=100), st.integers(0, 5))
def test_grouping_is_a_stable_sort(assigned, skip):
    array = pa.array(assigned, pa.int32())[skip:]
    groups = group_by_partition(array, 10)
    values = assigned[skip:]
    assert [(p, rows.to_pylist()) for p, rows in groups] == [
        (p, [i for i, v in enumerate(values) if v == p]) for p in range(10) if p in values
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_for_keys(pa.array([b"a"]), 0), "no 0 partitions"),
        (lambda: partition_for_keys(pa.array([1]), 3), "keys of type int64"),
        (lambda: Partitioner(2, sticky_rows=0), "run of 0 rows"),
        (lambda: group_by_partition(pa.array([0, 3], pa.int32()), 3), "row 1 goes to partition 3"),
        (lambda: group_by_partition(pa.array([-1], pa.int32()), 3), "row 0 goes to partition -1"),
        (lambda: group_by_partition(pa.array([1], pa.int64()), 3), "type int64"),
        (lambda: group_by_partition(pa.array([None], pa.int32()), 3), "1 nulls"),
    ],
)
def test_refusals_name_the_thing(call, message):
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert caught.value.hint


@pytest.mark.parametrize("offsets", [[0, 5, 3], [0, 99, 6], [0, -4, 6], [2, 1, 4]])
def test_broken_offsets_are_refused(offsets):
    array = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(b"abcdef")]
    )
    with pytest.raises(FormatError, match="offsets of row"):
        partition_for_keys(array, 3)
