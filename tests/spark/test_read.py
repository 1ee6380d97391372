"""Batch reads of a real broker, filled and checked by confluent-kafka."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import functions as F

pytestmark = pytest.mark.spark

T0 = 1_700_000_000_000


@pytest.fixture(scope="module")
def filled(broker, topics_of):
    """A topic of three partitions: 50, 0 and 20 records, ten seconds apart."""
    topics = topics_of(broker.bootstrap_servers)
    name = topics.create(3, "filled", retention_ms=-1)  # the records are old
    for partition, count in ((0, 50), (2, 20)):
        topics.fill(
            name,
            [b"p%d-%d" % (partition, i) for i in range(count)],
            partition,
            key=lambda i: b"k%d" % i if i % 3 else None,
            timestamp_ms=lambda i: T0 + 10_000 * i,
        )
    return name


def spans(df):
    """{partition: (first offset, last offset + 1)} of a DataFrame; every offset in between must be
    there once."""
    rows = (
        df.groupBy("partition")
        .agg(F.min("offset"), F.max("offset"), F.count("*"), F.countDistinct("offset"))
        .collect()
    )
    for _, low, high, count, distinct in rows:
        assert count == distinct == high - low + 1
    return {r[0]: (r[1], r[2] + 1) for r in rows}


def test_rows_are_those_of_sparks_kafka_connector(read, filled, topics):
    df = read(filled)
    assert df.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    got = sorted(
        (
            r.partition,
            r.offset,
            r.key and bytes(r.key),
            bytes(r.value),
            round(r.timestamp.timestamp() * 1000),
        )
        for r in df.collect()
    )
    assert got == [r[:5] for r in topics.consume(filled, 3)]
    assert len(got) == 70
    assert {
        (r.topic, r.timestampType) for r in df.select("topic", "timestampType").distinct().collect()
    } == {(filled, 0)}


def test_headers(read, topics):
    name = topics.create()
    headers = [("a", b"1"), ("a", b""), ("ü", None)]
    topics.fill(name, [b"x"], headers=headers)
    topics.fill(name, [b"y"])
    df = read(name, includeHeaders="true")
    assert df.schema["headers"].dataType.simpleString() == "array<struct<key:string,value:binary>>"
    with_headers, without = df.orderBy("offset").collect()
    assert (
        [(h.key, None if h.value is None else bytes(h.value)) for h in with_headers.headers]
        == headers
        == topics.consume(name, 1)[0][5]
    )
    assert not without.headers


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_codecs(read, topics, codec):
    name = topics.create()
    values = [b"%d-" % i * 100 for i in range(500)]
    topics.fill(name, [*values, None, b""], **{"compression.type": codec})
    got = [r.value and bytes(r.value) for r in read(name).orderBy("offset").collect()]
    assert got == [*values, None, bytearray()]


def test_one_task_for_each_partition_with_records(read, filled):
    assert read(filled).rdd.getNumPartitions() == 2
    assert read(filled, minPartitions="10").rdd.getNumPartitions() >= 9
    assert read(filled, maxRecordsPerPartition="10").rdd.getNumPartitions() == 7
    for options in ({"minPartitions": "10"}, {"maxRecordsPerPartition": "7"}):
        assert spans(read(filled, **options)) == {0: (0, 50), 2: (0, 20)}


def test_starting_and_ending_offsets(read, filled):
    start, end = {"0": 10, "1": -2, "2": -2}, {"0": 40, "1": -1, "2": 5}
    df = read(
        filled, startingOffsets=json.dumps({filled: start}), endingOffsets=json.dumps({filled: end})
    )
    assert spans(df) == {0: (10, 40), 2: (0, 5)}
    df = read(filled, startingOffsets=json.dumps({filled: {"0": 50, "1": 0, "2": 20}}))
    assert df.collect() == [], "a range without records"
    assert read(filled, startingOffsets="earliest", endingOffsets="latest").count() == 70


def test_times(read, filled):
    assert spans(
        read(
            filled, startingTimestamp=str(T0 + 95_000), startingOffsetsByTimestampStrategy="latest"
        )
    ) == {
        0: (10, 50),
        2: (10, 20),
    }
    assert spans(read(filled, endingTimestamp=str(T0 + 100_000))) == {0: (0, 10), 2: (0, 10)}
    by = {filled: {"0": T0 + 400_000, "1": T0, "2": T0 + 400_000}}
    df = read(
        filled,
        startingOffsetsByTimestamp=json.dumps(by),
        startingOffsetsByTimestampStrategy="latest",
    )
    assert spans(df) == {0: (40, 50)}
    assert spans(
        read(
            filled,
            startingOffsetsByTimestamp=json.dumps(by),
            startingTimestamp=str(T0 + 190_000),
            startingOffsetsByTimestampStrategy="latest",
        )
    ) == {0: (19, 50), 2: (19, 20)}, "startingTimestamp goes first"


def test_a_start_time_without_records(read, filled, refused):
    with refused(
        "startingTimestamp", f"{filled}-2 has no record", "startingOffsetsByTimestampStrategy"
    ):
        # Partition 1 has none at all, so leave it out.
        read(assign=json.dumps({filled: [0, 2]}), startingTimestamp=str(T0 + 300_000)).collect()


def test_assign_and_pattern(read, topics):
    first, second = topics.create(2, "pattern-x"), topics.create(1, "pattern-x")
    topics.fill(first, [b"a"] * 3, 1)
    topics.fill(second, [b"b"] * 4)
    assert {
        (r[0], r[1]): r[2]
        for r in read(subscribePattern="pattern-x-[0-9]+")
        .groupBy("topic", "partition")
        .count()
        .collect()
    } == {
        (first, 1): 3,
        (second, 0): 4,
    }
    assert read(subscribePattern="pattern-x").count() == 0, "the whole name must match"
    assert read(assign=json.dumps({first: [1]})).count() == 3
    assert read(f"{first},{second}").count() == 7


def test_offsets_must_name_all_partitions(read, filled, refused):
    with refused(
        "ConfigError",
        "startingOffsets must name exactly the partitions",
        f"lacks {filled}-1, {filled}-2",
        "-1 for the latest",
    ):
        read(filled, startingOffsets=json.dumps({filled: {"0": 1}})).collect()


def test_unknown_topic(read, refused):
    with refused("UnknownTopicError", "no topic no-such-topic", "create it first"):
        read("no-such-topic").collect()


def test_an_end_beyond_the_log(read, filled, refused):
    beyond = json.dumps({filled: {"0": 60, "1": 0, "2": 20}})
    with refused(
        "DataLossError", f"{filled}-0 ends at offset 50, before offset 60", "failOnDataLoss"
    ):
        read(filled, endingOffsets=beyond).collect()
    assert spans(read(filled, endingOffsets=beyond, failOnDataLoss="false")) == {
        0: (0, 50),
        2: (0, 20),
    }


def test_deleted_records(read, topics, refused):
    name = topics.create()
    topics.fill(name, [b"%d" % i for i in range(100)])
    topics.delete_records(name, 0, 30)
    assert spans(read(name)) == {0: (30, 100)}
    start = json.dumps({name: {"0": 10}})
    with refused("DataLossError", f"{name}-0 no longer has offsets 10 to 30", "failOnDataLoss"):
        read(name, startingOffsets=start).collect()
    assert spans(read(name, startingOffsets=start, failOnDataLoss="false")) == {0: (30, 100)}


def test_many_segments_and_splits_over_all_transports(read, topics, tmp_path):
    name = topics.create(1, segment_bytes=1 << 20)
    values = [b"%07d" % i * 100 for i in range(9000)]
    topics.fill(name, values)
    expected = F.xxhash64("offset", "value")
    sums = set()
    for transport in ("shm", "tcp", "auto"):
        directory = tmp_path / transport
        directory.mkdir()
        df = read(
            name,
            transport=transport,
            minPartitions="3",
            arrowBatchBytes="200k",
            prefetchBytes="1m",
            taskStatisticsDir=str(directory),
        )
        assert spans(df) == {0: (0, 9000)}
        sums.add(df.agg(F.sum(expected.cast("decimal(38,0)"))).collect()[0][0])
        lines = [
            json.loads(line) for f in directory.iterdir() for line in f.read_text().splitlines()
        ]
        assert {line["transport"] for line in lines} == {"tcp" if transport == "tcp" else "shm"}
        if transport != "tcp":
            assert sum(line["read_bytes"] for line in lines) > 2 * 6_000_000, (
                "two queries read the bytes one-sidedly"
            )
    assert len(sums) == 1
    assert [
        bytes(r.value) for r in read(name).orderBy("offset").select("value").limit(5).collect()
    ] == values[:5]


def test_tasks_do_not_read_a_deleted_topic_for_its_namesake(read, topics):
    """Spark's workers keep readers warm where they stopped; what they stand in must still be
    there."""

    def values(start, stop):
        span = {
            "startingOffsets": json.dumps({name: {"0": start}}),
            "endingOffsets": json.dumps({name: {"0": stop}}),
        }
        return {bytes(r.value)[:3] for r in read(name, **span).select("value").collect()}

    def fill(prefix):
        for _ in range(4):  # a batch ends where a reader stopped
            topics.fill(name, [prefix + bytes(50_000)] * 10)

    name = topics.create()
    for _ in range(2):
        fill(b"old")
        for _ in range(3):  # in both workers
            assert values(0, 10) == {b"old"}
        topics.delete(name)
        topics.create_named(name)
        fill(b"new")
        for _ in range(3):
            assert values(10, 40) == {b"new"}
        topics.delete(name)
        topics.create_named(name)


def test_a_limit_ends_the_reading(read, topics):
    name = topics.create()
    topics.fill(name, [bytes(1000)] * 30_000)
    assert len(read(name, arrowBatchBytes="64k", prefetchBytes="256k").limit(10).collect()) == 10
    assert read(name).count() == 30_000, "the worker is fit for the next task"


def test_joins_of_a_topic_with_itself(read, filled):
    left, right = read(filled).alias("l"), read(filled).alias("r")
    joined = left.join(
        right,
        (F.col("l.partition") == F.col("r.partition")) & (F.col("l.offset") == F.col("r.offset")),
    )
    assert joined.count() == 70


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_records_that_vanish_between_planning_and_reading(broker, topics, transport):
    """The task finds out by itself, in a worker that may hold a warm reader of the partition."""
    from kdirect.errors import DataLossError
    from kdirect_spark.broker_view import RangePartition
    from kdirect_spark.reading import read_range
    from kdirect_spark.settings import source_settings

    def read(fail, start, stop):
        options = {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "subscribe": name,
            "transport": transport,
            "failOnDataLoss": fail,
        }
        batches = read_range(
            source_settings(options, streaming=False), RangePartition(name, 0, start, stop)
        )
        return [offset for batch in batches for offset in batch.column("offset").to_pylist()]

    name = topics.create(1)
    topics.fill(name, [b"%d" % i for i in range(100)])
    assert read("true", 0, 10) == list(range(10))
    topics.delete_records(name, 0, 60)
    with pytest.raises(
        DataLossError, match=rf"{name}-0 .*; 20 to 100 were to be read.*failOnDataLoss"
    ):
        read("true", 20, 100)
    assert read("false", 20, 100) == list(range(60, 100))
    assert read("false", 20, 50) == []
    topics.delete(name)
    with pytest.raises(
        DataLossError,
        match=rf"{name}-0 is gone; offsets 70 to 100 were still to be read.*failOnDataLoss",
    ):
        read("true", 70, 100)
    assert read("false", 70, 100) == []


@pytest.mark.parametrize("option", ["kafka__isolation__level", "isolation__level"])
def test_committed_records_alone_by_reads(read, topics, tmp_path, option):
    """What was aborted is left out by one-sided READs; without the option it is read, too, as by
    Spark's Kafka connector."""
    name = topics.create()
    topics.transact(name, [(b"%d" % i, i % 3 == 0) for i in range(12)])
    df = read(name, **{option: "read_committed"}, taskStatisticsDir=str(tmp_path))
    assert sorted(int(bytes(r.value)) for r in df.collect()) == [0, 3, 6, 9]
    assert read(name).count() == 12
    (told,) = [json.loads(line) for f in tmp_path.iterdir() for line in f.read_text().splitlines()]
    assert told["transport"] == "shm" and told["reads"] > 0 and not told.get("fetched_bytes")
    assert told["aborted_batches"] == 8
