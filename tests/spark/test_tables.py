"""Topics as tables of Spark's catalog: they keep their options, and are read, streamed from and
written to by name."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from kdirect.errors import ConfigError
from kdirect_spark.shim_options import TABLE, for_sink, for_source
from kdirect_spark.slash import accelerate

_numbers = itertools.count()
SERVER = {"kafka.bootstrap.servers": "127.0.0.1:9092"}


@pytest.fixture
def create(spark, broker):
    """Creates a table by SQL and drops it afterwards; options by name."""
    names = []

    def build(columns: str = "", clause: str = "", **options: str) -> str:
        name = f"table_{next(_numbers)}"
        given = {"kafka.bootstrap.servers": broker.bootstrap_servers} | options
        text = ", ".join(f"'{key}' '{value}'" for key, value in given.items())
        names.append(name)
        spark.sql(f"CREATE TABLE {name} {columns} USING kdirect OPTIONS ({text}) {clause}")
        return name

    yield build
    for name in names:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


def values(df) -> list[bytes]:
    return sorted(bytes(row.value) for row in df.select("value").collect())


@pytest.mark.spark
def test_a_table_keeps_its_options(spark, topics, create):
    topic = topics.create(2)
    topics.fill(topic, [b"a", b"b", b"c"])
    topics.fill(topic, [b"d"], 1)
    table = create(subscribe=topic)
    assert values(spark.sql(f"SELECT value FROM {table}")) == [b"a", b"b", b"c", b"d"]
    starting = json.dumps({topic: {"0": 2, "1": -2}})
    later = spark.read.option("startingOffsets", starting).table(table)
    assert values(later) == [b"c", b"d"], "options of a query go before those of the table"
    both = spark.table(table).unionAll(later)
    assert values(both) == [b"a", b"b", b"c", b"c", b"d", b"d"]
    also = spark.sql(f"SELECT value FROM {table} WITH (startingOffsets = '{starting}')")
    assert values(also) == [b"c", b"d"]
    (told,) = spark.sql(f"SHOW CREATE TABLE {table}").first()
    assert f"'subscribe' = '{topic}'" in told
    narrow = create("(value BINARY, offset BIGINT)", subscribe=topic, COLUMNS="value,offset")
    assert spark.table(narrow).columns == ["value", "offset"]
    assert values(spark.table(narrow).where("offset = 2")) == [b"c"]


@pytest.mark.spark
def test_a_table_is_written_to(spark, topics, create, tmp_path):
    topic, other = topics.create(1), topics.create(1)
    table = create(subscribe=topic, startingOffsets="earliest", includeHeaders="true")
    spark.sql(f"INSERT INTO {table} SELECT 'k' AS key, 'v0' AS value")
    spark.sql(f"INSERT INTO {table} (value) VALUES ('v1')")
    spark.sql("SELECT 'v2' AS value, 'is ignored' AS topic").writeTo(table).append()
    spark.sql("SELECT 'v3' AS value").write.insertInto(table)
    found = [(key, value) for _, _, key, value, *_ in topics.consume(topic, 1)]
    assert found == [(b"k", b"v0"), (None, b"v1"), (None, b"v2"), (None, b"v3")]

    elsewhere = create(subscribe=topic, topic=other, failOnDataLoss="false")
    query = (
        spark.readStream.option("startingOffsets", "earliest").table(elsewhere)
        .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True).toTable(elsewhere)
    )  # fmt: skip
    assert query.awaitTermination(120)
    query.stop()
    assert [value for _, _, _, value, *_ in topics.consume(other, 1)] == [
        b"v0", b"v1", b"v2", b"v3",
    ]  # fmt: skip


@pytest.mark.spark
def test_what_a_table_is_not(spark, topics, create, refused):
    topic = topics.create(1)
    with refused("no option says what to read"):
        create()
    with refused("unknown option 'subscribed'", "did you mean subscribe?"):
        create(subscribed=topic)
    with refused("a kdirect table has no LOCATION"):
        create(clause="LOCATION '/tmp/nothing'", subscribe=topic)
    with refused("a kdirect table has no LOCATION"):
        spark.sql(
            "CREATE TABLE with_columns (value BINARY) USING kdirect LOCATION '/tmp/nothing' "
            f"OPTIONS (subscribe '{topic}', kafka.bootstrap.servers '127.0.0.1:1')"
        )
    table = create(subscribe=topic)
    with refused("no column value", "it has col1"):
        spark.sql(f"INSERT INTO {table} VALUES ('a')")
    with refused("a topic cannot be overwritten"):
        spark.sql(f"INSERT OVERWRITE {table} SELECT 'a' AS value")
    several = create(subscribe=f"{topic},{topics.create(1)}")
    with refused("it is not known which topic the table writes to", "the option topic"):
        spark.sql(f"INSERT INTO {several} SELECT 'a' AS value")


@pytest.mark.spark
def test_a_temporary_view_needs_no_table(spark, topics, broker):
    topic = topics.create(1)
    topics.fill(topic, [b"a"])
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW a_view USING kdirect OPTIONS "
        f"('kafka.bootstrap.servers' '{broker.bootstrap_servers}', subscribe '{topic}')"
    )
    assert values(spark.table("a_view")) == [b"a"]
    spark.catalog.dropTempView("a_view")


WITHOUT = """
import sys
from pyspark.sql import SparkSession
from kdirect_spark import configure
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = configure(builder.config("spark.kdirect.columnar", "false")).getOrCreate()
options = f"OPTIONS ('kafka.bootstrap.servers' '{sys.argv[1]}', subscribe '{sys.argv[2]}')"
try:
    spark.sql("CREATE TABLE t USING kdirect " + options)
except Exception as e:
    print("refused", "needs kdirect's shim" in str(e), "CREATE TEMPORARY VIEW" in str(e))
spark.sql("CREATE TEMPORARY VIEW v USING kdirect " + options)
print("read", spark.table("v").count())
"""


@pytest.mark.spark
def test_without_the_shim_a_table_says_what_it_lacks(broker, topics, tmp_path):
    topic = topics.create(1)
    topics.fill(topic, [b"a"] * 3)
    command = [sys.executable, "-c", WITHOUT, broker.bootstrap_servers, topic]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path
    )
    assert "refused True True" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
    assert "read 3" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.spark
def test_a_query_over_a_table_is_accelerated_with_the_options_of_the_table(spark, topics, create):
    topic = topics.create(2)
    for p in range(2):
        topics.fill(topic, [b'{"user": %d}' % (n % 7) for n in range(p, 1000, 2)], p)
    table = create(
        subscribe=topic, topic="elsewhere", valueFormat="json", valueSchema="user long",
        startingOffsets="earliest",
    )  # fmt: skip
    counts = spark.table(table).groupBy("user").count()
    assert sorted(accelerate(counts).collect()) == sorted(counts.collect())
    starting = json.dumps({topic: {"0": 400, "1": -2}})
    later = spark.read.option("startingOffsets", starting).table(table).groupBy("user").count()
    rows = accelerate(later).collect()
    assert sum(row["count"] for row in rows) == 600, "options of a query go first"
    assert sorted(rows) == sorted(later.collect())


# ------------------------------------------------------------------------------------------------
# the options of a table, without Spark


def test_a_table_has_the_options_of_both_sides():
    given = SERVER | {
        TABLE: "true", "Subscribe": "in", "topic": "out", "failOnDataLoss": "false",
        "acks": "all", "includeHeaders": "true", "kdirect.remote.uri": "file:///x",
    }  # fmt: skip
    assert for_source(given) == {
        name: value for name, value in given.items() if name not in (TABLE, "topic")
    }
    assert for_sink(given) == SERVER | {"topic": "out", "acks": "all", "includeHeaders": "true"}
    del given["topic"]
    assert for_sink(given)["topic"] == "in"


def test_options_of_a_reader_or_writer_stay_as_they_are():
    given = SERVER | {"subscribe": "in", "topic": "out"}
    assert for_source(given) == given
    assert for_sink(given) == given


@pytest.mark.parametrize("options", [{"subscribe": "a, b"}, {"subscribePattern": "a"}, {}])
def test_where_a_table_writes_to_must_be_known(options):
    with pytest.raises(ConfigError, match="it is not known which topic the table writes to"):
        for_sink(SERVER | {TABLE: "true"} | options)


def test_a_misspelt_option_of_a_table_stays_for_the_sink_to_refuse():
    assert "tpoic" in for_sink(SERVER | {TABLE: "true", "tpoic": "a", "subscribe": "b"})
