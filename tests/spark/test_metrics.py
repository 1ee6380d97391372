"""The metrics that Spark shows of scans, writes and queries, beside what is counted elsewhere."""

from __future__ import annotations

import json
import os
import struct
import time

import pytest

from kdirect.model import TopicPartition
from kdirect_spark import counts
from kdirect_spark.broker_view import RangePartition
from kdirect_spark.reading import read_range
from kdirect_spark.settings import source_settings

pytestmark = pytest.mark.spark


@pytest.fixture
def shown(spark):
    """``shown(action, node)`` -> what the SQL tab shows of the nodes of that name in the query that
    `action` runs last: value by description."""
    store = spark._jsparkSession.sharedState().statusStore()

    def run(action, node: str) -> dict[str, str]:
        before = store.executionsCount()
        action()
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
        assert store.executionsCount() > before
        last = store.executionsList().last().executionId()
        values = store.executionMetrics(last)
        nodes = store.planGraph(last).allNodes()
        out: dict[str, str] = {}
        for i in range(nodes.size()):
            if node in nodes.apply(i).name():
                metrics = nodes.apply(i).metrics()
                for k in range(metrics.size()):
                    metric = metrics.apply(k)
                    value = values.get(metric.accumulatorId())
                    out[metric.name()] = value.get() if value.isDefined() else ""
        assert out, [nodes.apply(i).name() for i in range(nodes.size())]
        return out

    return run


@pytest.fixture
def statistics(tmp_path):
    """The sum of one counter over what the tasks have written to taskStatisticsDir, `tmp_path`."""

    def total(*names: str) -> int:
        lines = [json.loads(x) for f in tmp_path.glob("*.jsonl") for x in f.open()]
        assert lines
        return sum(line.get(name, 0) for line in lines for name in names)

    return total


def noop(frame):
    return lambda: frame.write.format("noop").mode("overwrite").save()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_of_a_batch_scan(topics, read, shown, statistics, tmp_path, transport):
    topic = topics.create(2)
    for partition in range(2):
        topics.fill(topic, [b"v" * 500] * 2000, partition)
    frame = read(topic, transport=transport, taskStatisticsDir=str(tmp_path))
    found = shown(noop(frame), f"kdirect Subscribe[{topic}]")
    assert found["rows read"] == "4000" and found["transport"] == transport
    assert int(found["bytes READ one-sidedly"]) == statistics("read_bytes", "slot_read_bytes")
    assert int(found["READs posted"]) == statistics("reads", "slot_reads", "aborted_reads")
    assert int(found["bytes over TCP"]) == statistics("fetched_bytes")
    assert found["CRC failures"] == found["number of data loss error"] == "0"
    assert found["time of waiting for records"].endswith(" ms")
    over = "bytes over TCP" if transport == "tcp" else "bytes READ one-sidedly"
    assert int(found[over]) > 2_000_000, "the only way that it took"
    first = shown(frame.limit(1).collect, f"kdirect Subscribe[{topic}]")
    assert int(first[over]) > 0, "though the reader was cut short"


@pytest.mark.parametrize("exactly_once", ["true", "false"])
def test_of_a_batch_write(spark, topics, broker, read, shown, statistics, tmp_path, exactly_once):
    topic = topics.create(2)
    rows = spark.range(0, 3000, 1, 2).selectExpr("repeat(CAST(id AS STRING), 50) AS value")
    address = broker.bootstrap_servers

    def write(**options):
        writer = rows.write.format("kdirect").mode("append").option("topic", topic)
        writer = writer.option("kafka.bootstrap.servers", address)
        return writer.options(exactlyOnce=exactly_once, **options).save

    direct = shown(write(), "AppendData")
    assert direct["records written"] == "3000" and direct["transport"] == "shm"
    assert direct["bytes over TCP"] == "0" and int(direct["produce requests"]) >= 2
    assert direct["time of waiting for acknowledgements"].endswith(" ms")
    if exactly_once == "false":  # nothing but these batches is in the log
        noop(read(topic, transport="tcp", taskStatisticsDir=str(tmp_path)))()
        assert int(direct["bytes written one-sidedly"]) == statistics("fetched_bytes")
    over_tcp = shown(write(transport="tcp"), "AppendData")
    assert over_tcp["records written"] == "3000" and over_tcp["transport"] == "tcp"
    assert over_tcp["bytes written one-sidedly"] == "0" and int(over_tcp["bytes over TCP"]) > 3000


def test_of_a_stream(topics, read_stream, broker, tmp_path):
    """One micro-batch reads, and the next one finds that records are missing."""
    source, target = topics.create(2), topics.create()
    written_ms = int(time.time() * 1000) - 60_000
    for partition in range(2):
        topics.fill(source, [b"v"] * 10, partition, timestamp_ms=written_ms)

    def copy():
        frame = read_stream(
            assign=json.dumps({source: [0, 1]}), startingOffsets="earliest", failOnDataLoss="false"
        )
        query = (
            frame.select("value").writeStream.format("kdirect").option("topic", target)
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(60)
        return [json.loads(p.json) for p in query.recentProgress if p.numInputRows]

    (progress,) = copy()
    given, sink = progress["sources"][0], progress["sink"]
    assert given["description"] == f"kdirect[Assign[{source}-0, {source}-1]]"
    passed_ms = time.time() * 1000 - written_ms
    lags = [float(given["metrics"][f"{which}TimeLagMs"]) for which in ("min", "avg", "max")]
    assert 60_000 <= lags[0] <= lags[1] <= lags[2] <= passed_ms
    assert given["metrics"]["dataLoss"] == given["metrics"]["offsetOutOfRange"] == "0"
    assert given["metrics"]["maxOffsetsBehindLatest"] == "0"
    assert sink["description"] == f"kdirect[{target}]"
    assert sink["metrics"]["recordsWritten"] == "20" and sink["metrics"]["transport"] == "shm"
    assert int(sink["metrics"]["writeBytes"]) > 20

    topics.fill(source, [b"w"] * 10, 0)
    topics.delete_records(source, 0, 15)
    (progress,) = copy()
    assert progress["numInputRows"] == 5
    assert progress["sources"][0]["metrics"]["dataLoss"] == "1", "which the planner found"


def test_of_a_task_that_finds_records_missing(topics, broker):
    topic = topics.create()
    topics.fill(topic, [b"v"] * 10)
    topics.delete_records(topic, 0, 4)
    settings = source_settings(
        {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic,
         "failOnDataLoss": "false"}, streaming=False,
    )  # fmt: skip
    before = {name: counts.present()[name] for name in counts.COUNTS}
    rows = sum(batch.num_rows for batch in read_range(settings, RangePartition(topic, 0, 0, 10)))
    found = {name: counts.present()[name] - before[name] for name in counts.COUNTS}
    assert rows == found["rows"] == 6
    assert (found["data_loss"], found["offset_out_of_range"]) == (1, 4)


def test_the_topics_are_named(topics, read, read_stream, capfd):
    topic = topics.create()
    for options, named in (
        ({"subscribe": topic}, f"Subscribe[{topic}]"),
        ({"subscribePattern": f"{topic}.*"}, f"SubscribePattern[{topic}.*]"),
        ({"assign": json.dumps({topic: [0]})}, f"Assign[{topic}-0]"),
    ):
        for frame in (read(**options), read_stream(**options)):
            plan = frame._jdf.queryExecution()
            text = plan.toString() if frame.isStreaming else plan.executedPlan().toString()
            assert named in text, text


COUNT = len(counts.COUNTS)


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        (b"", [0] * COUNT),
        (b"nonsense", [0] * COUNT),
        (struct.pack(f"<{COUNT + 1}q", *range(COUNT + 1)), [0] * COUNT),
        (struct.pack(f"<{COUNT}q", *[-1] * COUNT), [0] * COUNT),
        (struct.pack(f"<{COUNT}q", *[2**63 - 1] * COUNT), [0] * COUNT),
        (struct.pack(f"<{COUNT}q", *range(COUNT)), list(range(COUNT))),
    ],
)
def test_a_worker_that_lies(spark, told, believed):
    """No count of a worker is taken for true that cannot be; and none fails."""
    room = spark._jvm.org.apache.spark.sql.execution.datasources.v2.python.kdirect
    file = room.CountsFile()
    path = file.path().get().toString()
    with open(path, "wb") as f:
        f.write(told)
    assert list(file.counts()) == believed
    assert room.Metrics.progressOfSource(file.counts()).containsKey("dataLoss")
    for metric in (room.TotalOfTasks(), room.TimeOfTasks(), room.TransportsOfTasks()):
        assert metric.aggregateTaskMetrics(file.counts()) is not None
    file.close()
    assert not os.path.exists(path)
    text = b"x" + counts.BEGIN.encode() + told + b"],y"
    assert list(room.TaskCounts.ofMessage(text)) == [0] * len(counts.WRITTEN)


def test_both_languages_have_the_same_counts(spark):
    room = spark._jvm.org.apache.spark.sql.execution.datasources.v2.python.kdirect
    assert room.TaskCounts.Read().mkString(",") == ",".join(counts.COUNTS)
    assert room.TaskCounts.Written().mkString(",") == ",".join(counts.WRITTEN)
    numbers = "1,-2,3,x,9999999999999999999,6,7"
    text = f"..{counts.BEGIN}{numbers}{counts.END}..".encode()
    assert list(room.TaskCounts.ofMessage(text)) == [1, 0, 3, 0, 0, 6, 7]


def test_a_file_that_is_gone_fails_no_task(tmp_path):
    of = counts.TaskCounts(str(tmp_path / "none"))
    of.add("rows", 1)
    of.is_at(TopicPartition("t", 0), 0)
    of.tell()
    assert not of.is_due, "it is not tried again"
    of = counts.TaskCounts(str(tmp_path / "file"))
    (tmp_path / "file").touch()
    of.add("rows", 2**63)
    of.tell()
    assert struct.unpack(f"<{COUNT}q", (tmp_path / "file").read_bytes())[0] == counts.MOST
