"""Rows of the engine as chunks of arrays, which Spark takes apart: no Spark is started."""

from __future__ import annotations

from itertools import count

import pyarrow as pa
import pytest

from kdirect.errors import FormatError
from kdirect_spark.slash.task import CHUNK_BYTES, CHUNK_ROWS, Chunks


def _chunks(constant: tuple[str, ...] = (), **kinds: tuple[str, pa.DataType]) -> Chunks:
    """Of columns: the engine's type, and Arrow's as Spark takes it; and those that do not change
    within a chunk."""
    fields = [
        pa.field(name, wanted if name in constant else pa.list_(wanted))
        for name, (_, wanted) in kinds.items()
    ]
    schema = pa.schema(
        [
            pa.field("chunk", pa.int64()),
            *fields,
            pa.field("figures", pa.struct([("a", pa.int64())])),
        ]
    )
    return Chunks(schema, [kind for kind, _ in kinds.values()])


def test_a_chunk_of_wide_rows_has_fewer_of_them():
    """It is one row in the JVM, which may not have 2 GiB."""
    chunks = _chunks(k=("int64", pa.int64()), s=("string", pa.string()))
    rows = 2 * CHUNK_ROWS + 7
    wide = [i for i in range(rows) if i < 100 or i % 1000 == 0]
    text = "x" * (CHUNK_BYTES // 20)
    batch = pa.record_batch(
        {
            "k": pa.array(range(rows)),
            "s": pa.array([text if i in wide else "" for i in range(rows)]),
        }
    )
    found = chunks.of(batch, count(3, 2))
    assert found.column("chunk").to_pylist() == list(range(3, 3 + 2 * found.num_rows, 2))
    for i in range(found.num_rows):
        assert found.slice(i, 1).column("s").flatten().nbytes <= CHUNK_BYTES
    assert found.column("k").flatten().to_pylist() == list(range(rows))
    assert found.column("s").flatten().equals(batch.column("s"))
    assert found.num_rows < len(wide), "narrow rows are not cut"


def test_rows_that_fit_are_cut_by_their_number():
    chunks = _chunks(k=("int64", pa.int64()))
    found = chunks.of(pa.record_batch({"k": pa.array(range(2 * CHUNK_ROWS + 7))}), count())
    assert [len(each) for each in found.column("k").to_pylist()] == [CHUNK_ROWS, CHUNK_ROWS, 7]


def test_a_chunk_has_rows_of_one_window():
    time = pa.timestamp("us", "UTC")
    chunks = _chunks(
        ("start", "end"),
        k=("int64", pa.int64()),
        start=("timestamp(us)", time),
        end=("timestamp(us)", time),
    )
    runs = [1, 3, CHUNK_ROWS + 1, 2]  # rows of each window
    starts = [10 * i for i, run in enumerate(runs) for _ in range(run)]
    ends = [start + (20 if start < 30 else 10) for start in starts]
    batch = pa.record_batch(
        {
            "k": pa.array(range(len(starts))),
            "start": pa.array(starts, pa.timestamp("us")),
            "end": pa.array(ends, pa.timestamp("us")),
        }
    )
    found = chunks.of(batch, count())
    lists = found.column("k").to_pylist()
    assert [len(each) for each in lists] == [1, 3, CHUNK_ROWS, 1, 2]
    assert [k for each in lists for k in each] == list(range(len(starts)))
    for name, wanted in (("start", [0, 10, 20, 20, 30]), ("end", [20, 30, 40, 40, 40])):
        assert found.column(name).cast(pa.int64()).to_pylist() == wanted
    last = chunks.of(batch.slice(len(starts) - 1), count())
    assert last.column("start").cast(pa.int64()).to_pylist() == [30]
    assert chunks.of(batch.slice(0, 0), count()).num_rows == 0


def test_lists_of_nanoseconds_are_rounded_down_as_columns_are():
    lists = pa.array([[-1, 1_500], [], [999, None]], pa.list_(pa.timestamp("ns")))
    wanted = pa.list_(pa.timestamp("us", "UTC"))
    chunks = _chunks(t=("list<timestamp(ns)>", wanted))
    found = chunks.of(pa.record_batch({"t": lists.slice(0, 3)}), count()).column("t").flatten()
    assert found.type == wanted
    numbers = found.flatten().cast(pa.int64()).to_pylist()
    assert ([len(each) for each in found.to_pylist()], numbers) == ([2, 0, 2], [-1, 1, 0, None])
    cut = chunks.of(pa.record_batch({"t": lists.slice(2, 1)}), count()).column("t").flatten()
    assert cut.flatten().cast(pa.int64()).to_pylist() == [0, None]


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_a_time_that_spark_cannot_hold_is_named(unit):
    chunks = _chunks(t=(f"timestamp({unit})", pa.timestamp("us", "UTC")))
    column = pa.array([0, 1 << 62]).view(pa.timestamp(unit))
    with pytest.raises(FormatError, match="microseconds of 64 bits") as caught:
        chunks.of(pa.record_batch({"t": column}), count())
    assert caught.value.hint and "condition" in caught.value.hint
    found = chunks.of(pa.record_batch({"t": column.slice(0, 1)}), count())
    assert found.column("t").flatten().cast(pa.int64()).to_pylist() == [0]
