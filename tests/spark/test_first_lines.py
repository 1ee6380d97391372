"""The first line of an error as pyspark prints it: what is wrong and what to do.

There is no traceback of the connector's processes in it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.spark


@pytest.fixture
def printed(spark):
    """``printed(action)`` -> the lines of the error that it raises."""

    def run(action) -> list[str]:
        with pytest.raises(Exception) as caught:
            action()
        return str(caught.value).splitlines()

    return run


def check(lines: list[str], *words: str, line: int = 0) -> None:
    for word in words:
        assert word in lines[line], lines[:8]
    assert not any("Traceback" in text or ", line " in text for text in lines), lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffsts": "earliest"}, ("unknown option", "did you mean startingOffsets?")),
        ({"maxOffsetsPerTrigger": "many"}, ("maxOffsetsPerTrigger", "'many' is not an integer")),
        ({"startingOffsets": '{"t":{"0":"x"}}'}, ("startingOffsets", "t-0 has 'x'")),
        ({"failOnDataLoss": "perhaps"}, ("failOnDataLoss", "true or false")),
        ({"kafka.security.protocol": "SSL"}, ("security.protocol", "encrypts", "PLAINTEXT")),
        ({"valueFormat": "json"}, ("valueSchema",)),
    ],
)
def test_options_that_load_refuses(spark, printed, options, words):
    base = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}
    for reader in (spark.read, spark.readStream):
        lines = printed(reader.format("kdirect").options(**base | options).load)
        check(lines, "ConfigError", *words)


def test_what_a_batch_cannot_read(read, topics, printed):
    missing = read("no-such-topic")
    for asked in (missing.collect, missing.count, missing.where("partition = 0").collect):
        check(printed(asked), "no topic no-such-topic", "create it first")
    topic = topics.create()
    topics.fill(topic, [b"1", b"2"])
    bad = read(topic, valueFormat="json", valueSchema="a long", valueMode="FAILFAST")
    lines = printed(bad.collect)
    check(lines, f"BadValueError: {topic}-0 offset 0", "valueMode=DROPMALFORMED", line=1)
    assert lines[0] == "An exception was thrown from the Python worker:"  # pyspark's own words
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("id AS number", ("no column value", "to_json")),
        ("id AS value", ("column value has type bigint", "CAST(value AS STRING)")),
    ],
)
def test_what_a_batch_cannot_write(spark, broker, printed, select, words):
    writer = spark.range(3).selectExpr(select).write.format("kdirect").mode("append")
    writer = writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).option("topic", "t")
    check(printed(writer.save), "ConfigError", *words)


def test_rows_without_a_topic(spark, broker, printed):
    rows = spark.range(2).selectExpr("'v' AS value", "CAST(NULL AS STRING) AS topic")
    writer = rows.write.format("kdirect").mode("append")
    writer = writer.option("kafka.bootstrap.servers", broker.bootstrap_servers)
    check(printed(writer.save), "have no topic", "fill the column `topic`", line=1)


def run_stream(frame, directory, sink="noop", **options):
    query = (
        frame.writeStream.format(sink)
        .options(**options)
        .option("checkpointLocation", str(directory))
        .start()
    )
    query.awaitTermination(60)


def test_what_ends_a_stream(read_stream, topics, printed, tmp_path):
    topic = topics.create()
    topics.fill(topic, [b"1"])
    gone = read_stream("no-such-topic", startingOffsets="earliest")
    check(printed(lambda: run_stream(gone, tmp_path / "a")), "STREAM_FAILED", "no-such-topic")
    ahead = read_stream(topic, startingOffsets=f'{{"{topic}":{{"0":9}}}}')
    check(printed(lambda: run_stream(ahead, tmp_path / "b")), f"{topic}-0", "offset 9")
    own = read_stream(topic, valueFormat="json", valueSchema="a long")  # refused when it starts
    wrong = own.sparkSession.readStream.format("kdirect").schema("value string")
    wrong = wrong.option("kafka.bootstrap.servers", topics.address).option("subscribe", topic)
    check(
        printed(lambda: run_stream(wrong.load(), tmp_path / "c")),
        "fixed schema", "remove .schema(...)",
    )  # fmt: skip
