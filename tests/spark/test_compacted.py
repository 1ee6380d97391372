"""Compacted topics, in which offsets are missing: batches and streams read what is there, wherever
a range of offsets begins, ends or is split."""

from __future__ import annotations

import json
import random
import time

import pytest

from tests.spark.test_stream import Sink, run
from tests.support import wait_until

pytestmark = pytest.mark.spark

KEYS = 20
COMPACT = {
    "cleanup_policy": "compact",
    "segment_bytes": 16384,
    "min_cleanable_dirty_ratio": "0.01",
}


def fill(topics, name, rng, count, table):
    records = [(b"k%d" % rng.randrange(KEYS), rng.randbytes(100)) for _ in range(count)]
    values = [value for _, value in records]
    topics.fill(name, values, key=lambda i: records[i][0], **{"batch.size": 4000})
    table.update(records)


def compacted(topics, name, below):
    """What is left once most offsets below that one are missing, by Kafka's own client."""
    found = [topics.consume(name, 1)]

    def settled():
        time.sleep(1)  # the cleaner looks five times
        found.append(topics.consume(name, 1))
        return found[-1] == found[-2] and sum(r[1] < below for r in found[-1]) < below // 4

    wait_until(settled, "it was compacted")
    return found[-1]


def rows_of(df):
    rows = df.select("offset", "key", "value").collect()
    return sorted((r.offset, bytes(r.key), bytes(r.value)) for r in rows)


def test_spark_reads_a_compacted_topic(read, read_stream, topics, tmp_path, seed):
    rng, table = random.Random(seed), {}
    name = topics.create(**COMPACT)
    fill(topics, name, rng, 1500, table)
    before = Sink()
    stream = read_stream(name, startingOffsets="earliest")
    run(stream, before, str(tmp_path / "before"))
    left = [r[1:4] for r in compacted(topics, name, 1200)]
    assert rows_of(read(name)) == left
    assert {key: value for _, key, value in left} == table
    # Ranges that begin and end where a record is missing, and are split there.
    here = {offset for offset, _, _ in left}
    missing = sorted(set(range(left[-1][0])) - here)
    start, end = missing[len(missing) // 10], missing[-len(missing) // 10]
    part = read(
        name,
        startingOffsets=json.dumps({name: {"0": start}}),
        endingOffsets=json.dumps({name: {"0": end}}),
        minPartitions="3",
    )
    assert part.rdd.getNumPartitions() == 3
    assert rows_of(part) == [r for r in left if start <= r[0] < end]
    # A stream over the gaps, of which some micro-batches have no record; and one that has read the
    # records before they were compacted.
    sink = Sink()
    limited = read_stream(name, startingOffsets="earliest", maxOffsetsPerTrigger="500")
    run(limited, sink, str(tmp_path / "over"))
    assert sorted((row[2], row[3]) for row in sink.rows) == [(r[0], r[2]) for r in left]
    fill(topics, name, rng, 500, table)
    left = [r[1:4] for r in compacted(topics, name, 1700)]
    run(stream, before, str(tmp_path / "before"))
    offsets = [row[2] for row in before.rows]
    assert len(set(offsets)) == len(offsets) and set(offsets) >= {r[0] for r in left}
    assert rows_of(read(name)) == left and {key: value for _, key, value in left} == table
