"""Batch and stream writes to a real broker, checked by confluent-kafka."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F

pytestmark = pytest.mark.spark


@pytest.fixture
def write(broker):
    def go(df, **options):
        df.write.format("kdirect").option(
            "kafka.bootstrap.servers", broker.bootstrap_servers
        ).options(**{k.replace("__", "."): v for k, v in options.items()}).mode("append").save()

    return go


def test_batch_with_all_columns(spark, topics, write):
    name, other = topics.create(3), topics.create(1)
    df = spark.sql(f"""
        SELECT * FROM VALUES
          (CAST('k1' AS BINARY), 'v1',
           array(named_struct('key', 'h', 'value', CAST('x' AS BINARY)),
                 named_struct('key', 'n', 'value', CAST(NULL AS BINARY))),
           '{name}', 2),
          (NULL, NULL, NULL, '{name}', 1),
          (CAST('k3' AS BINARY), '', array(), '{name}', 2),
          (CAST('' AS BINARY), 'v4', NULL, '{other}', NULL)
        AS t(key, value, headers, topic, partition)""")
    write(df.coalesce(1))
    got = [(p, o, k, v, h) for p, o, k, v, _, h in topics.consume(name, 3)]
    assert got == [
        (1, 0, None, None, None),
        (2, 0, b"k1", b"v1", [("h", b"x"), ("n", None)]),
        (2, 1, b"k3", b"", None),
    ]
    assert [(r[2], r[3]) for r in topics.consume(other, 1)] == [(b"", b"v4")]


def test_the_option_topic_goes_before_the_column(spark, topics, write):
    name = topics.create(1)
    write(spark.sql("SELECT 'elsewhere' AS topic, CAST('v' AS BINARY) AS value"), topic=name)
    assert [r[3] for r in topics.consume(name, 1)] == [b"v"]


def test_keys_are_spread_as_kafkas_clients_spread_them(spark, topics, write):
    name, reference = topics.create(5), topics.create(5)
    keys = [b"key-%d" % i for i in range(200)]
    write(
        spark.range(200).selectExpr("concat('key-', id) AS key", "CAST(id AS STRING) AS value"),
        topic=name,
    )
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": topics.address,
            "partitioner": "murmur2_random",
            "enable.idempotence": False,
        }
    )
    for i, key in enumerate(keys):
        producer.produce(reference, str(i), key)
    assert producer.flush(30) == 0
    assert {r[2]: r[0] for r in topics.consume(name, 5)} == {
        r[2]: r[0] for r in topics.consume(reference, 5)
    }


def test_many_rows_from_several_tasks(spark, topics, write, read):
    name = topics.create(4)
    write(
        spark.range(0, 200_000, 1, 4).selectExpr(
            "CAST(id AS STRING) AS key", "concat(id, '-', repeat('x', 90)) AS value"
        ),
        topic=name,
    )
    rows = read(name)
    assert rows.count() == 200_000
    assert rows.select("key").distinct().count() == 200_000
    assert (
        rows.where(
            "CAST(value AS STRING) != concat(CAST(key AS STRING), '-', repeat('x', 90))"
        ).count()
        == 0
    )


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "tcp"},
        {"kafka.compression.type": "zstd"},
        {"kafka.acks": "1", "kafka.batch.size": "2000"},
    ],
)
def test_client_settings_of_a_sink(spark, topics, write, options):
    name = topics.create(2)
    write(spark.range(500).selectExpr("CAST(id AS STRING) AS value"), topic=name, **options)
    assert sorted(int(r[3]) for r in topics.consume(name, 2)) == list(range(500))


def test_nothing_to_write(spark, topics, write):
    name = topics.create(1)
    write(spark.range(0).selectExpr("CAST(id AS STRING) AS value"), topic=name)
    assert topics.consume(name, 1) == []


def test_errors_at_run_time(spark, write, refused, topics):
    name = topics.create(2)
    with refused("ConfigError", "have no topic", "option topic"):
        write(spark.sql("SELECT 'v' AS value, CAST(NULL AS STRING) AS topic"))
    with refused("UnknownTopicError", "no-such-sink-topic"):
        write(
            spark.sql("SELECT 'v' AS value"),
            topic="no-such-sink-topic",
            kafka__allow__auto__create__topics="false",
        )
    write(spark.sql("SELECT 'v' AS value"), topic="made-by-the-sink")
    assert len(topics.consume("made-by-the-sink", 1)) == 1, (
        "as Spark's Kafka sink does, where the broker lets it"
    )
    with refused("UnknownTopicError", "partition 7 of topic"):
        write(spark.sql("SELECT 'v' AS value, 7 AS partition"), topic=name)
    write(spark.sql("SELECT 'v' AS value"), topic=name)
    assert len(topics.consume(name, 2)) == 1, (
        "the workers that failed go on, and nothing of the failed tasks is left in them"
    )


def test_a_failed_task_leaves_whole_batches_at_least_once(spark, topics, write, refused):
    name = topics.create(1)
    boom = F.expr("if(id = 30000, raise_error('boom'), CAST(id AS STRING))")
    with refused("boom"):
        write(spark.range(0, 40000, 1, 1).select(boom.alias("value")), topic=name,
              exactlyOnce="false")  # fmt: skip
    before = [r[3] for r in topics.consume(name, 1)]
    assert before == [b"%d" % i for i in range(len(before))] and 0 < len(before) < 40000
    write(
        spark.range(0, 100, 1, 1).selectExpr("concat('again-', id) AS value"),
        topic=name, exactlyOnce="false",
    )  # fmt: skip
    after = [r[3] for r in topics.consume(name, 1)][len(before) :]
    assert after == [b"again-%d" % i for i in range(100)]


def test_a_batch_without_a_mode_appends(spark, topics, broker, refused):
    name = topics.create(1)

    def writer():
        return (
            spark.range(2).selectExpr("CAST(id AS STRING) AS value").write.format("kdirect")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers).option("TOPIC", name)
        )  # fmt: skip

    writer().save()
    writer().save()
    assert sorted(r[3] for r in topics.consume(name, 1)) == [b"0", b"0", b"1", b"1"]
    with refused('mode("ignore")', 'mode("append")'):
        writer().mode("ignore").save()
    with refused("partitionBy", "column partition"):
        writer().partitionBy("value").save()


def test_update_and_complete_append_what_comes(spark, topics, read_stream, broker, tmp_path):
    source = topics.create(1)
    topics.fill(source, [b"a", b"b", b"a"])
    counts = (
        read_stream(source, startingOffsets="earliest", maxOffsetsPerTrigger="2")
        .groupBy("value").count()
        .select(F.concat_ws(" ", F.col("value").cast("string"), "count").alias("value"))
    )  # fmt: skip
    for mode, expected in (
        ("update", [b"a 1", b"a 2", b"b 1"]),
        ("complete", [b"a 1", b"a 2", b"b 1", b"b 1"]),
    ):
        target = topics.create(1)
        query = (
            counts.writeStream.format("kdirect").outputMode(mode)
            .option("kafka.bootstrap.servers", broker.bootstrap_servers).option("topic", target)
            .option("checkpointLocation", str(tmp_path / mode)).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(60)
        assert sorted(r[3] for r in topics.consume(target, 1)) == expected, mode


def test_progress_may_be_tracked_asynchronously_at_least_once(
    topics, read_stream, broker, tmp_path, refused
):
    source, target = topics.create(1), topics.create(1)
    topics.fill(source, [b"%d" % i for i in range(10)])

    def start(**options):
        return (
            read_stream(source, startingOffsets="earliest").select("value")
            .writeStream.format("kdirect")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers).option("topic", target)
            .option("checkpointLocation", str(tmp_path / str(len(options))))
            .option("asyncProgressTrackingEnabled", "true").options(**options).start()
        )  # fmt: skip

    query = start(exactlyOnce="false")
    try:
        query.processAllAvailable()
        assert [r[3] for r in topics.consume(target, 1)] == [b"%d" % i for i in range(10)]
    finally:
        query.stop()
    with refused("asyncProgressTrackingEnabled excludes exactlyOnce", "set exactlyOnce=false"):
        start().awaitTermination(60)


def test_a_stream_from_topic_to_topic(spark, topics, read_stream, broker, tmp_path):
    source, target = topics.create(2), topics.create(3)
    topics.fill(
        source, [b"%d" % i for i in range(1000)], 0, key=lambda i: b"k%d" % i, headers=[("h", b"1")]
    )

    def copy():
        query = (
            read_stream(
                source,
                startingOffsets="earliest",
                includeHeaders="true",
                maxOffsetsPerTrigger="400",
            )
            .select(
                "key",
                F.concat(F.lit("copy-"), F.col("value").cast("string")).alias("value"),
                "headers",
            )
            .writeStream.format("kdirect")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("topic", target)
            .option("checkpointLocation", str(tmp_path / "c"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    copy()
    topics.fill(
        source,
        [b"%d" % i for i in range(1000, 1500)],
        1,
        key=lambda i: b"k%d" % i,
        headers=[("h", b"1")],
    )
    copy()
    rows = topics.consume(target, 3)
    assert sorted(r[3] for r in rows) == sorted(b"copy-%d" % i for i in range(1500))
    assert all(r[5] == [("h", b"1")] for r in rows)
