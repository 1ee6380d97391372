"""Records as columns in the JVM: the same rows as Spark's own path gives, fewer columns where fewer
are wanted, and the shim's jar."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kdirect.errors import ShimError
from kdirect_spark import configure, shim

SERVICE = "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister"


@pytest.fixture(scope="module")
def filled(broker, topics_of):
    """Two partitions: plain records, and some with nulls, headers and empty bytes, in several Arrow
    batches."""
    topics = topics_of(broker.bootstrap_servers)
    name = topics.create(2, "columns")
    topics.fill(
        name,
        [b"%05d" % i * 20 for i in range(3000)],
        0,
        key=lambda i: b"k%d" % (i % 7) if i % 3 else None,
    )
    topics.fill(name, [b"x", None, b""] * 100, 1, headers=[("a", b"1"), ("ü", None)])
    return name


@pytest.fixture
def columnar(spark):
    """Switches this session between columns and Spark's own path."""

    def switch(on: bool) -> None:
        spark.conf.set(shim.CONF, str(on).lower())

    yield switch
    spark.conf.unset(shim.CONF)


def plan(df) -> str:
    return df._jdf.queryExecution().executedPlan().toString()


QUERIES = {
    "all": lambda df: df,
    "one column": lambda df: df.select("value"),
    "other order": lambda df: df.select("offset", "key", "partition"),
    "no column": lambda df: df.selectExpr("count(*) AS n"),
    "a part of one": lambda df: df.selectExpr("partition", "headers.key", "size(headers)"),
    "sums": lambda df: df.groupBy("partition").agg(
        F.count("*"), F.max("offset"), F.sum(F.length("value")), F.min("timestamp")
    ),
    "a filter": lambda df: df.where("value IS NULL OR key = 'k2'").select(
        "topic", "offset", "timestampType"
    ),
    "itself": lambda df: df.select("partition", "offset").join(
        df.selectExpr("partition", "offset + 1 AS offset", "value"), ["partition", "offset"]
    ),
    "twice": lambda df: (
        df.select("value").where("partition = 1").union(df.where("partition = 0").select("key"))
    ),
}


@pytest.mark.spark
@pytest.mark.parametrize("query", QUERIES)
def test_columns_are_the_rows_of_sparks_own_path(read, filled, columnar, query):
    def run(on):
        columnar(on)
        df = read(filled, includeHeaders="true", arrowBatchBytes=str(64 << 10))
        assert ("ColumnarToRow" in plan(df)) == on
        return sorted(map(repr, QUERIES[query](df).collect()))

    rows = run(True)
    assert rows
    assert rows == run(False)


@pytest.mark.spark
def test_a_batch_query_reads_the_columns_that_it_needs(read, filled):
    df = read(filled)
    scan = f"BatchScan kdirect Subscribe[{filled}]"
    assert f"{scan}[offset#" in plan(df.select("offset"))
    assert f"{scan}[partition#" in plan(df.select(F.rand())), "the narrowest, where none is wanted"
    assert f"{scan}[value#" in plan(df.selectExpr("length(value)"))
    narrowed = read(filled, columns="offset,value,partition")
    assert narrowed.columns == ["value", "partition", "offset"]
    assert f"{scan}[partition#" in plan(narrowed.agg(F.max("partition")))


@pytest.mark.spark
@pytest.mark.parametrize("on", [True, False])
def test_columns_of_a_stream(read_stream, topics, columnar, tmp_path, on):
    columnar(on)
    name = topics.create(2)
    found = []

    def run(**options):
        df = read_stream(name, startingOffsets="earliest", maxOffsetsPerTrigger="25", **options)
        query = df.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect())).trigger(
            availableNow=True
        )
        assert (
            query.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
            .awaitTermination(90)
        )

    topics.fill(name, [b"%d" % i for i in range(60)], 0)
    run(columns="offset,value")
    topics.fill(name, [b"%d" % i for i in range(60, 70)], 1)
    run(columns="offset,value")
    assert sorted(int(r.value) for r in found) == list(range(70))
    assert found[0].asDict().keys() == {"value", "offset"}


@pytest.mark.spark
def test_each_action_reads_what_there_is(read, topics):
    name = topics.create()
    topics.fill(name, [b"a"] * 3)
    df = read(name)
    assert df.count() == 3
    topics.fill(name, [b"b"] * 2)
    assert df.count() == 5
    assert df.where("value = 'b'").count() == 2


@pytest.mark.spark
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("offset,nothing", "there is no column 'nothing'"),
        ("headers", "includeHeaders"),
        (",", "names no column"),
    ],
)
def test_columns_that_are_not_there(read, filled, refused, columns, words):
    with refused("option columns", words):
        read(filled, columns=columns).collect()


WITHOUT = """
import sys
from pyspark.sql import SparkSession
from kdirect_spark import configure
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = configure(builder.config("spark.kdirect.columnar", "false")).getOrCreate()
options = {"kafka.bootstrap.servers": sys.argv[1], "subscribe": sys.argv[2]}
options["startingOffsets"] = "earliest"
df = spark.read.format("kdirect").options(**options).load()
assert "Columnar" not in df._jdf.queryExecution().executedPlan().toString()
query = spark.readStream.format("kdirect").options(**options).load().writeStream.format("noop")
query = query.trigger(availableNow=True).option("checkpointLocation", sys.argv[3]).start()
query.awaitTermination()
print("read", df.count(), sum(p["numInputRows"] for p in query.recentProgress))
"""


@pytest.mark.spark
def test_without_the_shim_spark_finds_the_format_all_the_same(broker, filled, tmp_path):
    command = [
        sys.executable,
        "-c",
        WITHOUT,
        broker.bootstrap_servers,
        filled,
        str(tmp_path / "checkpoint"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path
    )
    assert "read 3300 3300" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]


# ------------------------------------------------------------------------------------------------
# the jar


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shim.jar_or_none.cache_clear()
    yield tmp_path / "cache" / "kdirect"
    shim.jar_or_none.cache_clear()


def test_the_jar_is_compiled_once_and_kept(cache, tmp_path, capsys):
    jar = shim.jar()
    assert jar.parent == cache and [jar] == list(cache.iterdir()), "and nothing is left beside it"
    with zipfile.ZipFile(jar) as archive:
        assert (
            archive.read(SERVICE).decode().split()[0].replace(".", "/") + ".class"
            in archive.namelist()
        )
    made = jar.stat()
    assert shim.main(["--output", str(tmp_path / "shim.jar")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'shim.jar'}\n"
    assert (tmp_path / "shim.jar").read_bytes() == jar.read_bytes()
    assert jar.stat() == made


def java_says(tmp_path, monkeypatch, script):
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parent.parent))


def no_java(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))


def no_scala(tmp_path, monkeypatch):
    java_says(
        tmp_path,
        monkeypatch,
        "echo 'Could not find or load main class scala.tools.nsc.Main' >&2; exit 1",
    )


def other_internals(tmp_path, monkeypatch):
    java_says(
        tmp_path,
        monkeypatch,
        "echo 'KdirectSource.scala:1: error: not found: type PythonScan' >&2; exit 1",
    )


def nowhere_to_write(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def old_spark(tmp_path, monkeypatch):
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    (tmp_path / "spark" / "jars" / "spark-sql_2.13-4.1.1.jar").write_text("")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))


def no_spark(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "nothing"))


REASONS = {
    no_java: "no java in JAVA_HOME=",
    no_scala: "scala.tools.nsc.Main",
    other_internals: "not found: type PythonScan.*not known to the shim yet",
    nowhere_to_write: "set XDG_CACHE_HOME",
    old_spark: "spark-sql_2.13-4.1.1.jar is not Spark 4.2 or later",
    no_spark: "is not Spark 4.2 or later",
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_missing_is_told_and_rows_are_read(cache, tmp_path, monkeypatch, caplog, reason):
    reason(tmp_path, monkeypatch)
    with pytest.raises(ShimError, match=REASONS[reason]):
        shim.jar()
    assert not cache.exists() or not list(cache.iterdir())
    with caplog.at_level(logging.WARNING, "kdirect_spark"):
        for _ in range(2):
            assert "spark.jars" not in configure(SparkSession.Builder())._options
    (told,) = [r.message for r in caplog.records if "as rows" in r.message]
    assert shim.CONF in told
    assert shim.main([]) == 1


def test_the_jar_goes_beside_those_of_the_user_and_can_be_left_out(monkeypatch):
    monkeypatch.setattr(shim, "jar_or_none", lambda: Path("/cache/shim.jar"))
    builder = SparkSession.Builder
    assert configure(builder())._options["spark.jars"] == "/cache/shim.jar"
    assert (
        configure(builder().config("spark.jars", "a.jar,b.jar"))._options["spark.jars"]
        == "a.jar,b.jar,/cache/shim.jar"
    )
    assert configure(configure(builder()))._options["spark.jars"] == "/cache/shim.jar"
    assert "spark.jars" not in configure(builder().config(shim.CONF, "false"))._options
    assert "spark.jars" not in configure(builder().remote("sc://somewhere"))._options
    monkeypatch.setenv("SPARK_REMOTE", "sc://somewhere")
    assert "spark.jars" not in configure(builder())._options


def test_a_jar_of_somebody_else_is_not_run(cache, monkeypatch):
    jar = shim.jar()
    monkeypatch.setattr(os, "getuid", lambda: jar.stat().st_uid + 1)
    with pytest.raises(ShimError, match="belongs to another user"):
        shim.jar()


def test_an_installation_without_the_sources_says_so(monkeypatch, tmp_path):
    shutil.copy(shim.__file__, tmp_path / "shim.py")
    monkeypatch.setattr(shim, "__file__", str(tmp_path / "shim.py"))
    with pytest.raises(ShimError, match="sources are not in this installation"):
        shim.jar()
