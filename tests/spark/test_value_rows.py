"""Rows of values as a task makes them, over rows in lists: no broker, no Spark."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from kdirect.model import TopicPartition
from kdirect.state.batches import Partition
from kdirect_spark.rows import TaskRange, in_parts
from kdirect_spark.settings import source_settings
from kdirect_spark.value_rows import ValueRows
from tests.state.topics import Row, Topics

NEVER = 1 << 62  # seconds, of which Spark's timestamps hold no such number


@pytest.mark.parametrize("times", [[NEVER] * 3, [NEVER, 1, NEVER], [1, 2, 3]])
def test_a_time_that_spark_cannot_hold_gives_no_row(times: list[int]) -> None:
    options = {
        "kafka.bootstrap.servers": "h:1",
        "subscribe": "t",
        "valueFormat": "fixed",
        "valueSchema": "at:timestamp(s), key:int64, value:int64",
        "valueMode": "DROPMALFORMED",
    }
    settings = source_settings(options, streaming=True)
    topics = Topics({Partition("t", 0): [Row(t, 1, 1) for t in times]}, "fixed", random.Random(1))
    rows = ValueRows(TaskRange(settings, topics, TopicPartition("t", 0), 0, len(times)))
    got = [n for batch in rows.batches() for n in batch["at"].cast(pa.int64()).to_pylist()]
    assert got == [t * 1_000_000 for t in times if t != NEVER]
    assert rows.next_offset == len(times)
    assert rows.statistics()["not_decoded"] == times.count(NEVER)


def test_a_batch_is_cut_to_about_so_many_bytes() -> None:
    batch = pa.RecordBatch.from_pydict({"n": pa.array(range(10), pa.int64())})
    parts = list(in_parts(batch, 20))
    assert [part.num_rows for part in parts] == [3, 3, 3, 1]
    assert pa.Table.from_batches(parts)["n"].to_pylist() == list(range(10))
    assert [part.num_rows for part in in_parts(batch, 1)] == [1] * 10
    assert list(in_parts(batch.slice(0, 0), 20)) == []
