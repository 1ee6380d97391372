"""Streams over a real broker: checkpoints, limits, topics that come and go."""

from __future__ import annotations

import json
import time

import pytest

from tests.support import wait_until

pytestmark = pytest.mark.spark


class Sink:
    """foreachBatch into a list, each micro-batch by its id: a batch that runs again takes its own
    place."""

    def __init__(self):
        self.batches = {}

    def __call__(self, df, batch_id):
        self.batches[batch_id] = [
            (r.topic, r.partition, r.offset, bytes(r.value))
            for r in df.select("topic", "partition", "offset", "value").collect()
        ]

    @property
    def rows(self):
        return [row for batch in self.batches.values() for row in batch]

    @property
    def values(self):
        return sorted(row[3] for row in self.rows)


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def checkpoint(tmp_path):
    return str(tmp_path / "checkpoint")


def run(df, sink, checkpoint, **trigger):
    query = (
        df.writeStream.foreachBatch(sink)
        .option("checkpointLocation", checkpoint)
        .trigger(**trigger or {"availableNow": True})
        .start()
    )
    if not trigger:
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()
    return query


def wait_for(condition, query=None):
    """Wait for the condition; what ended the query before that is raised."""

    def happened():
        if query is not None and query.exception() is not None:
            raise query.exception()
        return condition()

    wait_until(
        happened,
        lambda: f"did not happen; the last micro-batch: {query.lastProgress if query else None}",
        timeout_s=60,
    )


def values(start, stop):
    return [b"%06d" % i for i in range(start, stop)]


def test_restarts_read_each_record_exactly_once(read_stream, topics, sink, checkpoint):
    name = topics.create(3)
    expected = []
    for round_ in range(3):
        batch = values(1000 * round_, 1000 * round_ + 300)
        expected += batch
        for partition in range(3):
            topics.fill(name, batch[partition::3], partition)
        query = run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
        progress = query.lastProgress
        assert progress["sources"][0]["description"] is not None
        assert sink.values == sorted(expected)
    assert len({row[:3] for row in sink.rows}) == len(sink.rows)
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    assert sink.values == sorted(expected), "nothing new, nothing read again"


def test_offsets_in_the_checkpoint_are_those_of_sparks_kafka_connector(
    read_stream, topics, sink, tmp_path
):
    name = topics.create(2)
    topics.fill(name, values(0, 7), 1)
    run(read_stream(name, startingOffsets="earliest"), sink, str(tmp_path / "c"))
    last = max((tmp_path / "c" / "offsets").glob("[0-9]*"), key=lambda p: int(p.name))
    offset = json.loads(last.read_text().splitlines()[-1])
    assert offset.pop(name) == {"0": 0, "1": 7}
    # Beside it there is the topic's id, which the connector reads as a topic without partitions
    # (tests/java/test_spark_connector_offsets.py).
    ((member, nothing),) = offset.items()
    assert member.startswith(f"/topic-id/{name}/") and nothing == {}


def test_max_offsets_per_trigger_pro_rata(read_stream, topics, sink, checkpoint):
    name = topics.create(3)
    topics.fill(name, values(0, 300), 0)
    topics.fill(name, values(300, 400), 1)
    query = run(
        read_stream(name, startingOffsets="earliest", maxOffsetsPerTrigger="100"), sink, checkpoint
    )
    batches = [batch for _, batch in sorted(sink.batches.items()) if batch]
    assert sink.values == values(0, 400)
    assert [len(b) for b in batches] == [100] * 4
    assert sum(row[1] == 0 for row in batches[0]) == 75
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == [100] * 4
    latest = query.recentProgress[0]["sources"][0]["latestOffset"]
    assert (json.loads(latest) if isinstance(latest, str) else latest) == {
        name: {"0": 300, "1": 100, "2": 0}
    }
    with_rows = [p for p in query.recentProgress if p["numInputRows"]]
    behind = [
        [
            p["sources"][0]["metrics"][f"{which}OffsetsBehindLatest"]
            for which in ("min", "max", "avg")
        ]
        for p in with_rows
    ]
    assert behind == [
        ["0", "225", "100.0"],
        ["0", "150", "66.7"],
        ["0", "75", "33.3"],
        ["0", "0", "0.0"],
    ]


def test_available_now_leaves_what_comes_later(read_stream, topics, sink, checkpoint):
    name = topics.create(1)
    topics.fill(name, values(0, 200))
    late = []

    def slow(df, batch_id):
        sink(df, batch_id)
        if not late:
            late.extend(values(500, 600))
            topics.fill(name, late)

    run(read_stream(name, startingOffsets="earliest", maxOffsetsPerTrigger="50"), slow, checkpoint)
    assert sink.values == values(0, 200)
    run(read_stream(name, maxOffsetsPerTrigger="50"), sink, checkpoint)
    assert sink.values == values(0, 200) + late


def test_a_stream_starts_at_the_latest_offset_and_keeps_where(
    read_stream, topics, sink, checkpoint
):
    name = topics.create(2)
    topics.fill(name, values(0, 50))
    query = run(read_stream(name), sink, checkpoint, processingTime="100 milliseconds")
    wait_for(lambda: query.lastProgress is not None and query.lastProgress["batchId"] >= 0, query)
    assert sink.rows == []
    topics.fill(name, values(60, 70), 0)
    wait_for(lambda: len(sink.rows) == 10, query)
    query.stop()
    # While it is down records come; they are its own, for it had started.
    topics.fill(name, values(100, 150), 1)
    query = run(read_stream(name), sink, checkpoint, processingTime="100 milliseconds")
    topics.fill(name, values(200, 210), 0)
    wait_for(lambda: len(sink.rows) >= 70, query)
    query.stop()
    assert sink.values == values(60, 70) + values(100, 150) + values(200, 210)


def test_a_crash_before_the_first_commit_loses_nothing_at_latest(
    read_stream, topics, sink, checkpoint, tmp_path
):
    name = topics.create(1)
    topics.fill(name, values(0, 5))
    query = run(read_stream(name), sink, checkpoint, processingTime="100 milliseconds")
    wait_for(lambda: (tmp_path / "checkpoint/commits/0").exists(), query)
    query.stop()
    # As if the driver had died between writing down batch 0 and committing it.
    for file in (tmp_path / "checkpoint/commits").iterdir():
        file.unlink()
    sink.batches.clear()
    topics.fill(name, values(10, 20))
    run(read_stream(name), sink, checkpoint)
    assert sink.values == values(10, 20)


def test_some_partitions_start_at_the_latest_offset(
    read_stream, topics, sink, checkpoint, tmp_path
):
    name = topics.create(2)
    topics.fill(name, values(0, 5), 0)
    topics.fill(name, values(5, 10), 1)
    start = json.dumps({name: {"0": -1, "1": 2}})
    run(read_stream(name, startingOffsets=start), sink, checkpoint)
    assert sink.values == values(7, 10)
    topics.fill(name, values(10, 12), 0)
    # As if the driver had died before the first commit: where partition 0 started is known from the
    # checkpoint alone.
    for directory, keep in (("offsets", "0"), ("commits", "")):
        for file in (tmp_path / "checkpoint" / directory).iterdir():
            if file.name.lstrip(".").removesuffix(".crc") != keep:
                file.unlink()
    sink.batches.clear()
    run(read_stream(name, startingOffsets=start), sink, checkpoint)
    assert sink.values == values(7, 12)


def test_continuous_polling_sees_new_records(read_stream, topics, sink, checkpoint):
    name = topics.create(2)
    query = run(
        read_stream(name, startingOffsets="earliest"), sink, checkpoint, processingTime="0 seconds"
    )
    for i in range(5):
        topics.fill(name, values(10 * i, 10 * i + 10), i % 2)
        wait_for(lambda n=10 * i + 10: len(sink.rows) >= n, query)
    query.stop()
    assert sink.values == values(0, 50)


def test_min_offsets_per_trigger_waits_for_more(read_stream, topics, sink, checkpoint):
    name = topics.create(1)
    topics.fill(name, values(0, 3))
    query = run(
        read_stream(
            name, startingOffsets="earliest", minOffsetsPerTrigger="100", maxTriggerDelay="1h"
        ),
        sink,
        checkpoint,
        processingTime="50 milliseconds",
    )
    wait_for(lambda: len(sink.rows) == 3, query)  # the first micro-batch waits for nothing
    topics.fill(name, values(3, 60))
    time.sleep(1.5)
    assert len(sink.rows) == 3
    topics.fill(name, values(60, 150))
    wait_for(lambda: len(sink.rows) == 150, query)
    query.stop()
    assert len(sink.batches[max(sink.batches)]) >= 100


def test_max_trigger_delay_ends_the_wait(read_stream, topics, sink, checkpoint):
    name = topics.create(1)
    topics.fill(name, values(0, 3))
    query = run(
        read_stream(
            name, startingOffsets="earliest", minOffsetsPerTrigger="100", maxTriggerDelay="1s"
        ),
        sink,
        checkpoint,
        processingTime="50 milliseconds",
    )
    wait_for(lambda: len(sink.rows) == 3, query)
    topics.fill(name, values(3, 5))
    wait_for(lambda: len(sink.rows) == 5, query)
    query.stop()


def test_a_pattern_finds_topics_that_are_created_later(read_stream, topics, sink, checkpoint):
    first = topics.create(1, "late-a")
    topics.fill(first, values(0, 5))
    df = read_stream(
        subscribePattern="late-a-.*", startingOffsets="earliest", partitionDiscoveryIntervalMs="100"
    )
    query = run(df, sink, checkpoint, processingTime="50 milliseconds")
    wait_for(lambda: len(sink.rows) == 5, query)
    second = topics.create(2, "late-a")
    topics.fill(second, values(5, 10), 1)
    wait_for(lambda: len(sink.rows) == 10, query)
    query.stop()
    assert {row[0] for row in sink.rows} == {first, second}
    assert sink.values == values(0, 10)


def test_partitions_added_to_a_topic_are_read_from_their_start(
    read_stream, topics, sink, checkpoint
):
    name = topics.create(1)
    topics.fill(name, values(0, 5))
    query = run(
        read_stream(name, startingOffsets="earliest", partitionDiscoveryIntervalMs="100"),
        sink,
        checkpoint,
        processingTime="50 milliseconds",
    )
    wait_for(lambda: len(sink.rows) == 5, query)
    topics.add_partitions(name, 3)
    topics.fill(name, values(5, 10), 2)
    wait_for(lambda: len(sink.rows) == 10, query)
    query.stop()
    assert sink.values == values(0, 10)


def test_deleted_records_fail_the_query_or_are_left_out(
    read_stream, topics, sink, checkpoint, refused
):
    name = topics.create(1)
    topics.fill(name, values(0, 10))
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    topics.fill(name, values(10, 30))
    topics.delete_records(name, 0, 25)
    with refused(
        "DataLossError",
        f"{name}-0 no longer has offsets 10 to 25",
        'set option failOnDataLoss to "false"',
    ):
        run(read_stream(name), sink, checkpoint)
    run(read_stream(name, failOnDataLoss="false"), sink, checkpoint)
    assert sink.values == values(0, 10) + values(25, 30)


def test_retention_fails_the_query_or_is_left_out(read_stream, topics, sink, checkpoint, refused):
    name = topics.create(1, segment_bytes=1 << 16, retention_bytes=1 << 17)
    topics.fill(name, values(0, 10))
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    topics.fill(name, [bytes(1000)] * 2000, **{"batch.size": 16000})
    wait_for(lambda: len(topics.consume(name, 1)) < 1000)
    with refused("DataLossError", f"{name}-0 no longer has offsets 10 to", "failOnDataLoss"):
        run(read_stream(name), sink, checkpoint)
    run(read_stream(name, failOnDataLoss="false"), sink, checkpoint)
    left = [row[2] for row in sink.rows if row[2] >= 10]
    assert left == list(range(left[0], 2010)) and left[0] > 10


def test_a_deleted_topic(read_stream, topics, sink, checkpoint, refused):
    gone, kept = topics.create(1, "gone"), topics.create(1, "gone")
    topics.fill(gone, values(0, 10))
    topics.fill(kept, values(10, 20))
    df = {
        "subscribePattern": "gone-.*",
        "startingOffsets": "earliest",
        "partitionDiscoveryIntervalMs": "100",
    }
    run(read_stream(**df), sink, checkpoint)
    topics.delete(gone)
    topics.fill(kept, values(20, 25))
    with refused(
        "DataLossError", f"{gone}-0 is gone; it was read up to offset 10", "failOnDataLoss"
    ):
        run(read_stream(**df), sink, checkpoint)
    run(read_stream(**df, failOnDataLoss="false"), sink, checkpoint)
    assert sink.values == values(0, 25)


def test_a_topic_deleted_and_created_again(read_stream, topics, sink, checkpoint, refused):
    name = topics.create(1)
    topics.fill(name, values(0, 10))
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    topics.delete(name)
    topics.create_named(name)
    topics.fill(name, values(100, 104))
    with refused(
        "DataLossError", f"{name}-0 was deleted and created again; it was read up to offset 10"
    ):
        run(read_stream(name), sink, checkpoint)
    run(read_stream(name, failOnDataLoss="false"), sink, checkpoint)
    assert sink.values == values(0, 10) + values(100, 104), (
        "what is there now is read from its start"
    )


def test_a_topic_created_again_with_more_records_than_the_checkpoint_counts(
    read_stream, topics, sink, checkpoint, refused
):
    """Offsets show nothing of it; the ids in the checkpoint do, in every later query too."""
    name = topics.create(1)
    topics.fill(name, values(0, 3))
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    topics.delete(name)
    topics.create_named(name)
    topics.fill(name, values(100, 110))
    for _ in range(2):  # the failed micro-batch is in the log by the second time
        with refused(
            "DataLossError", f"{name}-0 was deleted and created again; it was read up to offset 3"
        ):
            run(read_stream(name), sink, checkpoint)
    run(read_stream(name, failOnDataLoss="false"), sink, checkpoint)
    assert sink.values == values(0, 3) + values(100, 110)
    topics.fill(name, values(110, 112))
    run(read_stream(name), sink, checkpoint)
    assert sink.values == values(0, 3) + values(100, 112), "the checkpoint knows the new id"


def test_a_limit_begins_again_with_a_topic_created_again(read_stream, topics, sink, checkpoint):
    name = topics.create(1)
    topics.fill(name, values(0, 20))
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    topics.delete(name)
    topics.create_named(name)
    topics.fill(name, values(100, 110))
    options = {"failOnDataLoss": "false", "maxOffsetsPerTrigger": "4"}
    run(read_stream(name, **options), sink, checkpoint)
    assert sink.values == values(0, 20) + values(100, 110)
    sizes = [len(batch) for _, batch in sorted(sink.batches.items())]
    assert [size for size in sizes if size] == [20, 4, 4, 2]


def test_a_checkpoint_without_ids_goes_on_and_gets_them(read_stream, topics, sink, tmp_path):
    """That of Spark's Kafka connector, or of an earlier version."""
    name, checkpoint = topics.create(1), tmp_path / "checkpoint"
    topics.fill(name, values(0, 3))
    run(read_stream(name, startingOffsets="earliest"), sink, str(checkpoint))
    (log,) = (checkpoint / "offsets").glob("[0-9]*")
    *head, offset = log.read_text().splitlines()
    plain = json.dumps({name: json.loads(offset)[name]})
    log.write_text("\n".join([*head, plain]))
    for crc in (checkpoint / "offsets").glob(".*.crc"):
        crc.unlink()
    run(read_stream(name), sink, str(checkpoint))
    assert [p.name for p in (checkpoint / "offsets").glob("[0-9]*")] == ["0"], "nothing was new"
    topics.fill(name, values(3, 5))
    run(read_stream(name), sink, str(checkpoint))
    assert sink.values == values(0, 5)
    last = (checkpoint / "offsets" / "1").read_text().splitlines()[-1]
    assert f"/topic-id/{name}/" in last


def test_offsets_never_become_empty_when_all_topics_go(
    read_stream, topics, sink, checkpoint, refused, tmp_path
):
    """SPARK-41375: an empty offset would forget where the query was."""
    prefix = topics.create(1, "empty").replace("empty", "all-go")
    name = f"{prefix}-good"
    topics.create_named(name)
    topics.fill(name, values(0, 5))
    options = {
        "subscribePattern": f"{prefix}-.*",
        "startingOffsets": "earliest",
        "failOnDataLoss": "false",
        "partitionDiscoveryIntervalMs": "100",
    }
    query = run(read_stream(**options), sink, checkpoint, processingTime="50 milliseconds")
    wait_for(lambda: len(sink.rows) == 5, query)
    topics.delete(name)
    time.sleep(1.5)  # many looks at what is there
    assert query.exception() is None
    topics.create_named(name)
    topics.fill(name, values(10, 17))
    wait_for(lambda: len(sink.rows) == 12, query)
    topics.delete(name)
    time.sleep(0.5)
    query.stop()
    assert sink.values == values(0, 5) + values(10, 17)
    for log in (tmp_path / "checkpoint/offsets").glob("[0-9]*"):
        assert json.loads(log.read_text().splitlines()[-1]) != {}
    with refused("DataLossError", f"{name}-0 is gone; it was read up to offset 7"):
        run(read_stream(**options | {"failOnDataLoss": "true"}), sink, checkpoint)


def test_a_topic_created_again_under_a_running_query(read_stream, topics, sink, checkpoint):
    name = topics.create(1)
    topics.fill(name, values(0, 10))
    query = run(
        read_stream(
            name,
            startingOffsets="earliest",
            failOnDataLoss="false",
            partitionDiscoveryIntervalMs="100",
        ),
        sink,
        checkpoint,
        processingTime="50 milliseconds",
    )
    wait_for(lambda: len(sink.rows) == 10, query)
    topics.delete(name)
    topics.create_named(name)
    # More records than before, so that offsets alone show nothing.
    topics.fill(name, values(100, 115))
    wait_for(lambda: len(sink.rows) == 25, query)
    query.stop()
    assert sink.values == values(0, 10) + values(100, 115)


def test_a_topic_deleted_under_a_running_query_is_a_loss(
    read_stream, topics, sink, checkpoint, refused
):
    """While it is gone, too, and whether or not another one follows: never an unknown topic."""
    name = topics.create(1)
    topics.fill(name, values(0, 10))
    query = run(
        read_stream(name, startingOffsets="earliest", partitionDiscoveryIntervalMs="100"),
        sink,
        checkpoint,
        processingTime="0 seconds",
    )
    wait_for(lambda: len(sink.rows) == 10, query)
    topics.delete(name)
    with refused("DataLossError", f"{name}-0 is gone; it was read up to offset 10"):
        query.awaitTermination(60)


def test_group_offsets_are_committed_for_lag_tools(read_stream, topics, sink, checkpoint):
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    name = topics.create(2)
    topics.fill(name, values(0, 12), 1)
    run(
        read_stream(
            name, startingOffsets="earliest", kafka__group__id="lag-1", maxOffsetsPerTrigger="4"
        ),
        sink,
        checkpoint,
    )
    request = ConsumerGroupTopicPartitions("lag-1", [TopicPartition(name, 1)])
    found = topics.admin.list_consumer_group_offsets([request])["lag-1"].result(20)
    assert found.topic_partitions[0].offset == 12, (
        "the last micro-batch counts too, though none follows it"
    )


def test_a_query_with_a_name_writes_to_kdirect(read_stream, topics, broker, checkpoint):
    source, target = topics.create(), topics.create()
    topics.fill(source, values(0, 3))
    writer = (
        read_stream(source, startingOffsets="earliest")
        .writeStream.queryName("copy")
        .format("kdirect")
    )
    writer = (
        writer.option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .option("topic", target)
        .option("checkpointLocation", checkpoint)
    )
    assert writer.trigger(availableNow=True).start().awaitTermination(90)
    assert [row[3] for row in topics.consume(target, 1)] == values(0, 3)


def test_partitions_added_before_a_failed_first_micro_batch_runs_again(
    read_stream, topics, sink, checkpoint, refused
):
    name = topics.create(1)
    topics.fill(name, values(0, 5))

    def broken(df, batch_id):
        raise ValueError("a bug of the user's")

    with refused("a bug of the user's"):
        run(read_stream(name, startingOffsets="earliest"), broken, checkpoint)
    topics.add_partitions(name, 2)
    topics.fill(name, values(5, 8), 1)
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    run(read_stream(name, startingOffsets="earliest"), sink, checkpoint)
    assert sink.values == values(0, 8)


def test_a_start_beyond_the_end(read_stream, topics, sink, checkpoint, refused):
    name = topics.create(1)
    topics.fill(name, values(0, 5))
    beyond = json.dumps({name: {"0": 1000}})
    with refused("DataLossError", "the starting offset lies beyond its end"):
        run(read_stream(name, startingOffsets=beyond), sink, checkpoint)
    run(read_stream(name, startingOffsets=beyond, failOnDataLoss="false"), sink, checkpoint + "-2")
    assert sink.rows == [], "what was not asked for is not read"
    topics.fill(name, values(5, 8))
    run(read_stream(name, startingOffsets=beyond, failOnDataLoss="false"), sink, checkpoint + "-2")
    assert sink.values == values(5, 8)


def test_a_query_resumed_without_one_of_its_topics_goes_on_with_the_others(
    read_stream, topics, sink, checkpoint, refused
):
    gone, kept = topics.create(), topics.create()
    for name in (gone, kept):
        topics.fill(name, values(0, 2))
    both = f"{gone},{kept}"
    run(read_stream(both, startingOffsets="earliest"), sink, checkpoint)
    topics.delete(gone)
    topics.fill(kept, values(2, 4))
    with refused("DataLossError", f"{gone}-0 is gone"):
        run(read_stream(both), sink, checkpoint)
    run(read_stream(both, failOnDataLoss="false"), sink, checkpoint)
    assert sorted(row[3] for row in sink.rows if row[0] == kept) == values(0, 4)
    with refused(f"has no topic {gone}"):  # a new query names it in vain
        run(read_stream(both, startingOffsets="earliest"), sink, checkpoint + "-2")


def test_the_api_of_older_versions(spark, broker, topics, sink, checkpoint, refused):
    """pyspark 4.0 and 4.1 call latestOffset() without arguments; the engine of later versions still
    takes such a reader."""
    from kdirect_spark.datasource import KdirectDataSource
    from kdirect_spark.source import KdirectLegacyStreamReader

    class Legacy(KdirectDataSource):
        @classmethod
        def name(cls):
            return "kdirect_legacy"

        def streamReader(self, schema):
            return KdirectLegacyStreamReader(self._source(schema, streaming=True))

    spark.dataSource.register(Legacy)

    def stream(**options):
        return (
            spark.readStream.format("kdirect_legacy")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("subscribe", name)
            .options(**options)
            .load()
        )

    name = topics.create(2)
    topics.fill(name, values(0, 5))
    query = run(stream(), sink, checkpoint, processingTime="100 milliseconds")
    wait_for(lambda: query.lastProgress is not None, query)
    assert sink.rows == [], "latest"
    topics.fill(name, values(5, 7), 1)
    wait_for(lambda: len(sink.rows) == 2, query)
    # Until the micro-batch is committed: one that is run again would be all that AvailableNow does.
    wait_for(lambda: any(p["numInputRows"] for p in query.recentProgress), query)
    query.stop()
    topics.fill(name, values(7, 9), 1)
    run(stream(), sink, checkpoint)
    assert sink.values == values(5, 9)
    everything = Sink()
    run(stream(startingOffsets="earliest"), everything, checkpoint + "-2")
    assert everything.values == values(0, 9)
    with refused("maxOffsetsPerTrigger needs pyspark 4.2"):
        run(stream(maxOffsetsPerTrigger="1"), sink, checkpoint + "-3")


def test_polling_and_micro_batches_ask_the_broker_next_to_nothing(
    read_stream, topics_of, sink, checkpoint
):
    """Once warm, an idle topic is looked at by READs alone, and a micro-batch opens no
    connection."""
    import kdirect

    with kdirect.Broker() as embedded:
        topics = topics_of(embedded.bootstrap_servers)
        name = topics.create(1)
        topics.fill(name, values(0, 10))
        df = read_stream(
            name,
            address=embedded.bootstrap_servers,
            startingOffsets="earliest",
            partitionDiscoveryIntervalMs="3600000",
        )
        query = run(df, sink, checkpoint, processingTime="0 seconds")
        for i in range(1, 4):  # both workers have their turns
            topics.fill(name, values(10 * i, 10 * i + 10))
            wait_for(lambda n=10 * i + 10: len(sink.rows) == n, query)

        def requests():
            return embedded.statistics()["broker_requests_by_api"]

        before = requests()
        time.sleep(1.5)  # about a hundred looks
        after = {
            api: n - before.get(api, 0) for api, n in requests().items() if n != before.get(api, 0)
        }
        assert sum(after.values()) <= 2, (
            after
        )  # confluent-kafka's clients are still there and may ask something now and then

        opened = requests()["OpenQueuePair"]
        for i in range(4, 8):
            topics.fill(name, values(10 * i, 10 * i + 10))
            wait_for(lambda n=10 * i + 10: len(sink.rows) == n, query)
        assert requests()["OpenQueuePair"] - opened <= 1
        query.stop()
    assert sink.values == values(0, 80)


def test_a_stream_of_committed_records_ends_before_an_open_transaction(
    read_stream, topics, sink, checkpoint
):
    """A micro-batch goes up to the last stable offset, and the next one on from there."""
    from confluent_kafka import Producer

    name = topics.create()
    options = {"startingOffsets": "earliest", "kafka__isolation__level": "read_committed"}
    topics.transact(name, [(b"a", True), (b"gone", False), (b"b", True)])
    held = Producer({
        "bootstrap.servers": topics.address, "transactional.id": f"{name} held", "log_level": 0,
    })  # fmt: skip
    held.init_transactions(30)
    held.begin_transaction()
    held.produce(name, b"held", partition=0)
    held.flush(30)
    topics.transact(name, [(b"c", True), (b"gone too", False)])
    run(read_stream(name, **options), sink, checkpoint)
    assert sink.values == [b"a", b"b"]
    held.commit_transaction(30)
    run(read_stream(name, **options), sink, checkpoint)
    assert sink.values == [b"a", b"b", b"c", b"held"]
