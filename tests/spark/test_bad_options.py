"""Mistakes as a user of Spark meets them: one clear error that names the thing and the remedy.  No
broker is needed for any."""

from __future__ import annotations

import socket

import pytest
from pyspark.sql.types import StringType, StructField, StructType

pytestmark = pytest.mark.spark

READ = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}


def test_format_is_found_without_register(spark, refused):
    # Without discovery Spark says DATA_SOURCE_NOT_FOUND and never comes to the options.
    with refused("ConfigError", "kafka.bootstrap.servers is missing", "host:port"):
        spark.read.format("kdirect").load()
    with refused("ConfigError", "exactly one of assign, subscribe and subscribePattern"):
        spark.readStream.format("kdirect").option("kafka.bootstrap.servers", "127.0.0.1:1").load()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"startingOffsts": "earliest"},
            ("unknown option 'startingoffsts'", "did you mean startingOffsets?"),
        ),
        (
            {"startingOffsets": '{"t":{"0":"x"}}'},
            ("startingOffsets", "t-0 has 'x'", "whole number"),
        ),
        (
            {"startingOffsets": "{"},
            ("startingOffsets", "not JSON of offsets", '{"topic":{"0":123}}'),
        ),
        (
            {"kafka.auto.offset.reset": "earliest"},
            ("kafka.auto.offset.reset", "set startingOffsets"),
        ),
        ({"transport": "pigeon"}, ("transport", "'pigeon'", "auto, verbs, shm, tcp")),
        ({"subscribe": "no such/topic"}, ("subscribe", "no such/topic", "a-z")),
    ],
)
def test_options_that_no_reader_takes(spark, refused, options, words):
    for reader in (spark.read, spark.readStream):
        with refused("ConfigError", *words):
            reader.format("kdirect").options(**READ).options(**options).load()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("readStream", {"endingOffsets": "latest"}, ("endingOffsets is for batch", "spark.read")),
        ("readStream", {"endingTimestamp": "5"}, ("endingTimestamp is for batch", "spark.read")),
        ("read", {"startingOffsets": "latest"}, ("cannot start at the latest", "earliest")),
    ],
)
def test_load_refuses_what_such_a_query_cannot_have(spark, refused, kind, options, words):
    with refused("ConfigError", *words):
        getattr(spark, kind).format("kdirect").options(**READ | options).load()


def test_a_batch_that_starts_at_its_end(spark, refused):
    with refused("startingOffsets: a batch query cannot start at the latest offset"):
        spark.read.format("kdirect").options(**READ).option(
            "startingOffsets", "latest"
        ).load().collect()


def test_options_of_batches_in_a_stream(spark, refused, tmp_path):
    with refused("endingOffsets is for batch queries", "spark.read"):
        spark.readStream.format("kdirect").options(**READ).option(
            "endingOffsets", "latest"
        ).load().writeStream.format("noop").option(
            "checkpointLocation", str(tmp_path)
        ).start().awaitTermination(60)


def test_a_schema_of_ones_own(spark, refused):
    with refused("fixed schema", "remove .schema(...)"):
        spark.read.format("kdirect").options(**READ).schema(
            StructType([StructField("value", StringType())])
        ).load().collect()


def test_no_broker_there(spark, refused):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can come to listen here
        address = f"127.0.0.1:{s.getsockname()[1]}"
        with refused("BrokerUnavailableError", address):
            spark.read.format("kdirect").options(**READ).option(
                "kafka.bootstrap.servers", address
            ).option("connect.timeout.ms", 300).load().collect()


@pytest.mark.parametrize(
    ("select", "options", "words"),
    [
        ("id", {"topic": "t"}, ("no column value", "it has id", "to_json")),
        ("id AS value", {"topic": "t"}, ("column value has type bigint", "CAST(value AS STRING)")),
        (
            "'v' AS value, id AS key",
            {"topic": "t"},
            ("column key has type bigint", "CAST(key AS STRING)"),
        ),
        ("'v' AS value", {}, ("which topic to write to", "option topic")),
        (
            "'v' AS value, id AS topic",
            {},
            ("column topic has type bigint", "CAST(topic AS STRING)"),
        ),
        (
            "'v' AS value, id AS partition",
            {"topic": "t"},
            ("column partition has type bigint", "CAST(partition AS INT)"),
        ),
        (
            "'v' AS value, map('a', 'b') AS headers",
            {"topic": "t"},
            (
                "column headers has type map<string,string>",
                "array<struct<key:string,value:binary>>",
            ),
        ),
        ("'v' AS value", {"topic": "a/b"}, ("option topic", "'a/b'")),
        (
            "'v' AS value",
            {"topic": "t", "kafka.partitioner.class": "x"},
            ("kafka.partitioner.class", "column partition"),
        ),
        (
            "'v' AS value",
            {"topic": "t", "kafka.transactional.id": "x"},
            ("kafka.transactional.id", "exactlyOnceId"),
        ),
    ],
)
def test_writes_that_cannot_be(spark, refused, select, options, words):
    with refused("ConfigError", *words):
        spark.range(3).selectExpr(*[select] if select == "id" else split(select)).write.format(
            "kdirect"
        ).option("kafka.bootstrap.servers", "127.0.0.1:1").options(**options).mode("append").save()


def split(select):
    """Columns of a select list without commas inside of parentheses."""
    out, depth = [""], 0
    for c in select:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return out


def test_a_topic_is_not_overwritten(spark, refused):
    with refused("ConfigError", "a topic cannot be overwritten", 'mode("append")'):
        spark.sql("SELECT 'v' AS value").write.format("kdirect").option(
            "kafka.bootstrap.servers", "127.0.0.1:1"
        ).option("topic", "t").mode("overwrite").save()
