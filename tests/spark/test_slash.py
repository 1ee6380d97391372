"""Accelerated queries against Spark's own batch SQL, over the same topic."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from pyspark.sql import functions as F

from kdirect import connect, workloads
from kdirect.errors import ConfigError, UnsupportedPlanError
from kdirect_spark import slash
from kdirect_spark.slash import workload_queries
from tests.spark import slash_family, slash_runs

pytestmark = pytest.mark.spark

EVENTS = 30_000
FAMILY = 12  # examples; `make slash-queries` draws more
WORKLOADS = {
    "ysb": (workloads.ysb(keys=100, step_us=100_000, disorder_us=5_000_000), {}),
    "nb7": (workloads.nexmark(step_us=20_000), {}),
    "nb8": (workloads.nexmark(step_us=20_000, paper=True), {"window": "2 minutes"}),
    "nb11": (workloads.nexmark(step_us=20_000), {"gap": "10 seconds"}),
    "cm": (workloads.cm(jobs=200, step_us=1_000), {}),
    "ro_window": (workloads.ro(keys=5_000, step_us=50_000), {}),
}


def _watermark(progress: list[Any]) -> datetime:
    """Below which all windows were emitted, as the figures of the last batch say."""
    figures = progress[-1].observedMetrics["slash"]["figures"]
    return datetime.fromisoformat(figures["watermark"]).replace(tzinfo=None)


@pytest.mark.parametrize("mode", ["slash", "uppar"])
@pytest.mark.parametrize("query", sorted(WORKLOADS))
def test_a_stream_has_the_closed_windows_of_batch_sql(spark, broker, tmp_path, query, mode):
    workload, settings = WORKLOADS[query]
    topic = slash_runs.write(broker.bootstrap_servers, workload, query, EVENTS, **settings)
    expected = slash_runs.rows_of(topic.frame(lambda: spark.read))
    limit = "2000" if query == "nb8" else "8000"
    stream = topic.frame(lambda: spark.readStream, maxOffsetsPerTrigger=limit)
    progress = slash_runs.run(
        slash.accelerate(stream, mode=mode, stateDir=tmp_path / "state"), tmp_path
    )
    assert len(progress) > 2
    found = slash_runs.written(spark, tmp_path)
    wanted = slash_runs.closed(expected, _watermark(progress), strictly=query == "nb11")
    assert len(wanted) > 50
    slash_runs.assert_same(found, wanted)


@pytest.mark.parametrize("query", sorted(WORKLOADS))
def test_a_batch_has_all_windows(spark, broker, query):
    workload, settings = WORKLOADS[query]
    topic = slash_runs.write(broker.bootstrap_servers, workload, query, EVENTS, **settings)
    frame = topic.frame(lambda: spark.read)
    fast = slash.accelerate(frame)
    assert [(f.name, f.dataType, f.nullable) for f in fast.schema] == [
        (f.name, f.dataType, f.nullable) for f in frame.schema
    ]
    slash_runs.assert_same(slash_runs.rows_of(fast), slash_runs.rows_of(frame))


def test_without_a_window_each_batch_has_the_keys_that_changed(spark, broker, tmp_path):
    topic = slash_runs.write(broker.bootstrap_servers, workloads.ro(keys=500), "ro", EVENTS)
    expected = slash_runs.rows_of(topic.frame(lambda: spark.read))
    batches: list[Counter[Any]] = []
    stream = topic.frame(lambda: spark.readStream, maxOffsetsPerTrigger="8000")
    query = (
        slash.accelerate(stream, stateDir=tmp_path / "state")
        .writeStream.foreachBatch(lambda rows, _: batches.append(slash_runs.rows_of(rows)))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    last: dict[int, int] = {}
    for batch in batches:
        for key, count in batch:
            assert last.get(key, 0) < count
            last[key] = count
    assert Counter(last.items()) == expected


def test_two_accelerated_streams_may_be_united(spark, broker, tmp_path):
    frames, expected = [], Counter()
    for name in ("cm", "ro_window"):
        workload, settings = WORKLOADS[name]
        topic = slash_runs.write(broker.bootstrap_servers, workload, name, EVENTS, **settings)
        fast = slash.accelerate(
            topic.frame(lambda: spark.readStream), stateDir=tmp_path / name, name=name
        )
        frames.append(fast.selectExpr("window", "CAST(1 AS bigint) AS one"))
        rows = slash_runs.rows_of(topic.frame(lambda: spark.read))
        for row, count in rows.items():
            expected[row[0], 1] += count
    progress = slash_runs.run(frames[0].union(frames[1]), tmp_path)
    assert set(progress[-1].observedMetrics) == {"cm", "ro_window"}
    found = slash_runs.written(spark, tmp_path)
    assert sum(found.values()) > 1000
    assert not found - expected


def test_sql_over_a_view_is_accelerated_as_the_data_frame_is(spark, broker):
    workload, _ = WORKLOADS["ysb"]
    topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", EVENTS)
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": topic.topics["ysb"],
        **workload_queries.value_options(workload.streams["ysb"].layout),
    }
    spark.read.format("kdirect").options(**options).load().createOrReplaceTempView("views")
    frame = spark.sql(
        "SELECT window.start AS begin, campaign, count(*) AS n, max(ip) AS ip FROM views"
        " WHERE event_type = 0 AND page IS NOT NULL"
        " GROUP BY window(time, '10 minutes', '5 minutes'), campaign HAVING count(*) > 20"
    )
    found = slash_runs.rows_of(slash.accelerate(frame))
    assert len(found) > 100
    slash_runs.assert_same(found, slash_runs.rows_of(frame))


def test_explain_prints_the_plan(spark, broker, capsys):
    workload, _ = WORKLOADS["ysb"]
    topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", 1000)
    slash.explain(topic.frame(lambda: spark.readStream))
    said = capsys.readouterr().out
    assert "Keys: campaign" in said
    assert "0: leads virtual partitions 0 to 127" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda df: df.dropDuplicates(["campaign"]), "Deduplicate"),
        (lambda df: df.select("campaign"), "no aggregate and no join"),
        (lambda df: df.groupBy("campaign").agg({"page": "first"}), "first"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(spark, broker, change, said):
    workload, _ = WORKLOADS["ysb"]
    topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", 100)
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": topic.topics["ysb"],
        **workload_queries.value_options(workload.streams["ysb"].layout),
    }
    frame = change(spark.readStream.format("kdirect").options(**options).load())
    with pytest.raises(UnsupportedPlanError) as e:
        slash.accelerate(frame)
    assert said.lower() in str(e.value).lower()
    assert e.value.hint


def test_arguments_that_cannot_be_are_refused(spark, broker):
    workload, _ = WORKLOADS["ysb"]
    topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", 100)
    frame = topic.frame(lambda: spark.readStream)
    for arguments, said in (
        ({"mode": "fast"}, "mode='fast' is not known"),
        ({"executors": 3}, "3 tasks must run at the same time, and the cluster has 2 slots"),
        ({"epochBytes": 0}, "epoch_bytes"),
        ({"options": {"slotz": 1}}, "slotz"),
    ):
        with pytest.raises(ConfigError) as e:
            slash.accelerate(frame, **arguments)
        assert said in str(e.value)
    lossy = topic.frame(lambda: spark.readStream, failOnDataLoss="false")
    with pytest.raises(ConfigError, match="failOnDataLoss=false is not supported"):
        slash.accelerate(lossy)
    with pytest.raises(UnsupportedPlanError, match="rate"):
        slash.accelerate(spark.readStream.format("rate").load().groupBy("value").count())


def test_a_family_of_queries_and_inputs_has_the_rows_of_spark(spark, broker):
    slash_family.family_test(spark, broker.bootstrap_servers, FAMILY, 1)()


def test_a_partition_without_records_holds_no_window_open_for_ever(spark, broker, tmp_path):
    workload = workloads.ysb(keys=20, step_us=1_000_000)
    topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", 3_000)
    expected = slash_runs.rows_of(topic.frame(lambda: spark.read))
    with connect(broker.bootstrap_servers) as session:  # and one that nothing was written to
        session.admin.create_partitions(topic.topics["ysb"], 4)
    fast = slash.accelerate(
        topic.frame(lambda: spark.readStream, partitionDiscoveryIntervalMs="100"),
        stateDir=tmp_path / "state",
        idleTimeout="1s",
    )
    query = (
        fast.writeStream.format("memory")
        .queryName("idle")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="200 milliseconds")
        .start()
    )
    try:
        deadline = time.monotonic() + 60
        while not (found := slash_runs.rows_of(spark.table("idle"))):
            assert time.monotonic() < deadline, query.lastProgress
            time.sleep(0.1)
        figures = query.lastProgress.observedMetrics["slash"]["figures"]
        wanted = slash_runs.closed(expected, slash_runs.time_of(figures["watermark"]))
        slash_runs.assert_same(found, wanted)
    finally:
        query.stop()


def test_a_stream_from_the_latest_offsets_has_what_comes_after(spark, broker, tmp_path):
    workload = workloads.ysb(keys=20, step_us=1_000_000)
    topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", 3_000)
    stream = topic.frame(lambda: spark.readStream, startingOffsets="latest")
    fast = slash.accelerate(stream, stateDir=tmp_path / "state")
    assert not _figures(slash_runs.run(fast, tmp_path))
    slash_runs.write(
        broker.bootstrap_servers, workload, "ysb", 3_000, first=3_000, topics=topic.topics
    )
    (figures,) = _figures(slash_runs.run(fast, tmp_path))
    later = topic.frame(lambda: spark.read, startingOffsets=_at(topic, 1_000))
    assert figures["rows"] == sum(row[-1] for row in slash_runs.rows_of(later).elements())


def _figures(progress: list[Any]) -> list[Any]:
    """Those of the batches that ran."""
    found = [p.observedMetrics["slash"]["figures"] for p in progress if p.observedMetrics]
    return [figures for figures in found if figures is not None]


def _at(topic: slash_runs.Topic, offset: int) -> str:
    return json.dumps({topic.topics["ysb"]: {str(p): offset for p in range(3)}})


@pytest.mark.parametrize("kind", ["TIMESTAMP_LTZ", "TIMESTAMP_NTZ"])
def test_the_schema_is_that_of_spark_whatever_a_timestamp_is_in_the_session(spark, broker, kind):
    example = slash_family.Example(
        rows=(tuple({"k": i % 3, "s": "a", "n": i, "x": 0.5, "d": "1.00", "b": True,
                     "at": 1_000 * i} for i in range(40)),),
        partitions=2, value_format="json", where=None, keys=("k",), window=None,
        aggregates=(), delay="0 seconds", join=None, each=60,
    )  # fmt: skip
    [topic] = slash_family.write(broker.bootstrap_servers, example)
    spark.conf.set("spark.sql.timestampType", kind)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        rows = (
            spark.read.format("kdirect")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("subscribe", topic)
            .option("valueFormat", "json")
            .option("valueSchema", slash_family.SCHEMA)
            .load()
        )
        frame = (
            rows.groupBy(F.window("at", "10 seconds"), "k")
            .agg(F.max("at").alias("newest"), F.collect_list("at").alias("all"), F.count("*"))
            .select("*", "window.end", F.sort_array("all").alias("sorted"))
        )
        found = slash.accelerate(frame)
        assert found.schema == frame.schema
        assert found.schema.json() == frame.schema.json()
        slash_runs.assert_same(slash_runs.rows_of(found), slash_runs.rows_of(frame))
        # Spark knows the window of the result as one.
        times = [each.select(F.window_time("window"), "k") for each in (found, frame)]
        slash_runs.assert_same(*map(slash_runs.rows_of, times))
    finally:
        spark.conf.unset("spark.sql.timestampType")
        spark.conf.set("spark.sql.session.timeZone", "UTC")


# Constants, fields of windows and lists, in each type: what Spark says of their nulls.
COMPUTED = (
    "campaign, window.start AS begin, window, window.end AS e, cast(window.start AS string) AS t,"
    " 1.5 AS a, 0.25BD AS b, 1e-7 AS c, -128Y AS d, cast(1.5 AS float) AS f, 'x' AS g,"
    " date'2020-01-01' AS h, timestamp'2020-01-01 01:02:03' AS i, true AS j, -32768S AS k,"
    " -9223372036854775808L AS l, count(*) AS m, max(ip) AS n, coalesce(max(ip), 1.5) AS o"
)


def test_the_schema_is_that_of_the_query(spark, broker):
    frame = spark.sql(
        f"SELECT {COMPUTED} FROM {_view(spark, broker)} GROUP BY window(time, '1 minute'), campaign"
    )
    fast = slash.accelerate(frame)
    assert [(f.name, f.dataType, f.nullable) for f in fast.schema] == [
        (f.name, f.dataType, f.nullable) for f in frame.schema
    ]
    slash_runs.assert_same(slash_runs.rows_of(fast), slash_runs.rows_of(frame))


def _view(spark: Any, broker: Any) -> str:
    """A view of a topic of YSB."""
    workload, _ = WORKLOADS["ysb"]
    topic = slash_runs.write(broker.bootstrap_servers, workload, "ysb", 1_000)
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": topic.topics["ysb"],
        **workload_queries.value_options(workload.streams["ysb"].layout),
    }
    spark.read.format("kdirect").options(**options).load().createOrReplaceTempView("some")
    return "some"


def _assert_accelerated(frame: Any) -> None:
    slash_runs.assert_same(slash_runs.rows_of(slash.accelerate(frame)), slash_runs.rows_of(frame))


def test_a_field_of_a_struct_is_the_one_of_that_name(spark, broker):
    """Also where a struct of one's own has the names of a window's fields in another order."""
    mine = "CASE WHEN count(*) > 0 THEN named_struct('end', count(*), 'start', max(ip)) END"
    _assert_accelerated(
        spark.sql(
            f"SELECT campaign, ({mine}).end AS x, ({mine}).start AS y"
            f" FROM {_view(spark, broker)} GROUP BY campaign"
        )
    )


def test_a_text_is_no_reference_to_a_setting(spark, broker):
    """Spark's parser puts settings into SQL, and into none of a DataFrame's constants."""
    text = F.lit("${spark.sql.session.timeZone}").alias("text")
    rows = spark.table(_view(spark, broker)).groupBy("campaign")
    _assert_accelerated(rows.agg(text, F.count("*")))


def test_the_time_zone_is_the_one_that_the_data_frame_was_made_in(spark, broker):
    view = _view(spark, broker)
    first = spark.sql(f"SELECT cast(min(time) + INTERVAL 1 MINUTE AS string) FROM {view}").head()[0]
    frames = [
        spark.sql(f"SELECT {column} AS x, count(*) AS c FROM {view} {condition} GROUP BY campaign")
        for column, condition in (
            ("campaign", f"WHERE time < '{first}'"), ("cast(max(time) AS string)", "")
        )
    ]  # fmt: skip
    expected = slash_runs.rows_of(frames[0])
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        assert slash_runs.rows_of(frames[0]) == expected
        slash_runs.assert_same(slash_runs.rows_of(slash.accelerate(frames[0])), expected)
        with pytest.raises(UnsupportedPlanError, match="made in the time zone UTC"):
            slash.accelerate(frames[1])
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_sets_of_nanoseconds_are_refused(spark, broker):
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": "some",
        "valueFormat": "json",
        "valueSchema": "k long, at timestamp(us), t timestamp(ns)",
    }
    rows = spark.read.format("kdirect").options(**options).load()
    frame = rows.groupBy(F.window("at", "1 minute"), "k").agg(F.collect_set("t"))
    with pytest.raises(UnsupportedPlanError, match="t has nanoseconds"):
        slash.accelerate(frame)


def test_a_join_on_nanoseconds_is_refused_also_where_they_are_not_chosen(spark, broker):
    """Spark compares their microseconds."""
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "valueFormat": "json",
        "valueSchema": "k long, at timestamp(us), t timestamp(ns)",
    }
    left, right = (
        spark.read.format("kdirect")
        .options(**options, subscribe=topic)
        .load()
        .select(F.window("at", "1 minute").alias("w"), "k", "t")
        for topic in ("left", "right")
    )
    same = (left["w"] == right["w"]) & (left["t"] == right["t"])
    with pytest.raises(UnsupportedPlanError, match="t is not supported: it has nanoseconds"):
        slash.accelerate(left.join(right, same).select(left["k"]))
