"""Real-Time Mode: a stream whose batches are long, and whose rows do not wait for their end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter

import pytest

from kdirect.client.session import connect
from kdirect.model import TopicPartition
from kdirect_spark import shim
from tests.support import spark_workers, wait_until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shim.jar_or_none() is None, reason="the shim is not there"),
]

CONFS = {
    "spark.kdirect.realTime": "true",
    "spark.sql.streaming.realTimeMode.minBatchDuration": "500ms",
}
LIMIT_S = 120  # for a machine with other work


@pytest.fixture
def turned_on(spark):
    """Real-Time Mode as session_builder(...).config("spark.kdirect.realTime", "true") has it, with
    batches that are shorter than Spark allows."""
    for name, value in CONFS.items():
        spark.conf.set(name, value)
    yield
    for name in (*CONFS, "spark.sql.streaming.realTimeMode.allowlistCheck"):
        spark.conf.unset(name)


@pytest.fixture
def start(read_stream, topics, broker, tmp_path):
    """Start a query from one topic to another; returns the query."""
    started = []

    def begin(source, out, *, checkpoint="c", trigger=None, sink=None, **options):
        options = {"startingOffsets": "earliest", **options}
        writer = (
            read_stream(source, **options)
            .select("value")
            .writeStream.format("kdirect")
            .outputMode("update")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("topic", out)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .options(**({"exactlyOnce": "false"} if sink is None else sink))
            .trigger(**(trigger or {"realTime": "1 second"}))
        )
        query = writer.start()
        started.append(query)
        return query

    yield begin
    for query in started:
        query.stop()


@pytest.fixture
def written(topics):
    def read(name):
        return [int(r[3]) for r in topics.consume(name, 1)]

    return read


@pytest.fixture
def arrive(broker):
    """Wait until a topic of one partition has so many records."""
    session = connect(broker.bootstrap_servers)

    def wait(name, count):
        tp = TopicPartition(name, 0)
        wait_until(lambda: session.watermarks([tp])[tp][1] >= count, timeout_s=LIMIT_S)

    yield wait
    session.close()


def numbers(first, stop):
    return [b"%d" % i for i in range(first, stop)]


def committed(tmp_path, checkpoint="c"):
    """Batches that are done, and the offsets that the last one ended at."""
    try:
        done = [int(n) for n in os.listdir(tmp_path / checkpoint / "commits") if n.isdigit()]
    except FileNotFoundError:
        return 0, {}
    if not done:
        return 0, {}
    text = (tmp_path / checkpoint / "offsets" / str(max(done))).read_text()
    return len(done), json.loads(text.splitlines()[-1])


def finish(query, tmp_path, topic, ends, checkpoint="c"):
    """Wait until a batch is done that ended at these offsets."""

    def has_come():
        assert query.isActive, query.exception()
        return committed(tmp_path, checkpoint)[1].get(topic) == ends

    wait_until(has_come, timeout_s=LIMIT_S)
    query.stop()


def records_written(progress):
    return int(json.loads(progress.json)["sink"]["metrics"]["recordsWritten"])


def test_rows_do_not_wait_for_the_end_of_their_batch(
    turned_on, start, topics, written, arrive, tmp_path
):
    """And a batch that was not finished is repeated from its start."""
    source, out = topics.create(1), topics.create(1)
    topics.fill(source, numbers(0, 10))
    query = start(source, out, trigger={"realTime": "10 minutes"})
    arrive(out, 10)
    for i in (10, 15):
        topics.fill(source, numbers(i, i + 5))
    arrive(out, 20)
    assert written(out) == list(range(20))
    assert query.lastProgress is None, "the batch has ended"
    query.stop()
    assert committed(tmp_path)[0] == 0
    query = start(source, out)
    wait_until(lambda: sum(map(records_written, query.recentProgress)) == 20, timeout_s=LIMIT_S)
    finish(query, tmp_path, source, {"0": 20})
    assert Counter(written(out)) == Counter([*range(20)] * 2)


def test_rows_that_are_more_than_may_wait_for_the_sink(turned_on, start, topics, arrive, tmp_path):
    """54 MB, of which 16 MiB may be in the JVM at a time."""
    source, out = topics.create(1), topics.create(1)
    topics.fill(source, [b"%03d" % i * 300_000 for i in range(60)])
    start(source, out, trigger={"realTime": "10 minutes"})
    arrive(out, 60)
    assert [r[3][:3] for r in topics.consume(out, 1)] == [b"%03d" % i for i in range(60)]


def test_batches_and_triggers_take_over_from_each_other(
    turned_on, start, topics, written, tmp_path
):
    """Records are written while batches end and begin, and then the checkpoint moves to
    micro-batches and back: each record is there once, for nothing fails."""
    source, out = topics.create(3), topics.create(1)
    query = start(source, out, coalescePartitions="2")
    count = 0

    def write(seconds):
        nonlocal count
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            topics.fill(source, numbers(count, count + 7), (count // 7) % 3)
            count += 7
            time.sleep(0.01)

    write(5)
    done = count
    ends = {str(p): 0 for p in range(3)}
    for i in range(count // 7):
        ends[str(i % 3)] += 7
    finish(query, tmp_path, source, ends)
    progress = query.recentProgress
    assert len(progress) >= 3
    assert sum(p["numInputRows"] for p in progress) == done
    assert json.loads(progress[-1]["sources"][0]["endOffset"])[source] == ends
    assert progress[-1]["sources"][0]["metrics"]["maxOffsetsBehindLatest"] == "0"

    write(0.5)
    query = start(source, out, trigger={"availableNow": True}, sink={})
    query.awaitTermination(LIMIT_S)
    assert query.exception() is None
    assert len(written(out)) >= count  # beside them are the marks of transactions

    query = start(source, out, coalescePartitions="1")
    write(1)
    for p in ends:
        ends[p] = 0
    for i in range(count // 7):
        ends[str(i % 3)] += 7
    finish(query, tmp_path, source, ends)
    assert sorted(written(out)) == list(range(count))


def test_an_idle_topic_from_its_latest_offset(turned_on, start, topics, written, tmp_path):
    """The first batch is empty and writes down where the query starts.  An idle batch lasts as long
    as any, and ends."""
    source, out = topics.create(1), topics.create(1)
    topics.fill(source, numbers(0, 5))
    query = start(source, out, startingOffsets="latest")
    wait_until(lambda: committed(tmp_path)[0] >= 3 or not query.isActive, timeout_s=LIMIT_S)
    assert query.isActive, query.exception()
    first, second = query.recentProgress[:2]
    assert first["numInputRows"] == second["numInputRows"] == 0
    assert second["durationMs"]["addBatch"] >= 800
    query.stop()
    assert committed(tmp_path)[1][source] == {"0": 5}
    topics.fill(source, numbers(5, 8))
    finish(start(source, out, startingOffsets="latest"), tmp_path, source, {"0": 8})
    assert written(out) == [5, 6, 7]


def test_a_worker_that_is_killed(turned_on, start, topics, written, arrive, tmp_path, refused):
    """Spark repeats no task of a local session: the query ends, and says why.  Started again, it
    repeats the batch, and loses nothing."""
    source, out = topics.create(1), topics.create(1)
    topics.fill(source, numbers(0, 10))
    query = start(source, out, trigger={"realTime": "10 minutes"})
    arrive(out, 10)
    killed = spark_workers()
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    topics.fill(source, numbers(10, 20))
    with refused("Python worker exited unexpectedly"):
        assert query.awaitTermination(LIMIT_S)
    finish(start(source, out), tmp_path, source, {"0": 20})
    assert set(written(out)) == set(range(20))


def test_a_topic_that_is_deleted(turned_on, start, topics, arrive, refused, spark):
    source, out = topics.create(1), topics.create(1)
    topics.fill(source, numbers(0, 3))
    query = start(source, out, trigger={"realTime": "10 minutes"})
    arrive(out, 3)
    topics.delete(source)
    with refused("DataLossError", source, "offsets 3 and later were still to be read"):
        assert query.awaitTermination(LIMIT_S)

    def threads():
        return [t.getName() for t in spark._jvm.Thread.getAllStackTraces().keySet()]

    # The sink of the task that failed waits for no more rows, nor do those of the tests before.
    wait_until(lambda: "kdirect-real-time-writer" not in threads(), timeout_s=LIMIT_S)


def test_what_is_refused(turned_on, start, topics, refused, spark):
    three, out = topics.create(3), topics.create(1)

    def fails(*words, **settings):
        with refused(*words):
            # The checkpoint is each time another one.
            query = start(three, out, checkpoint=f"c{next(number)}", **settings)
            assert query.awaitTermination(LIMIT_S)

    number = iter(range(100))
    fails("3 partitions", "2 task slots", "coalescePartitions to at most 2")
    fails("maxOffsetsPerTrigger", maxOffsetsPerTrigger="5", coalescePartitions="1")
    fails("exactlyOnce=false", sink={}, coalescePartitions="1")
    spark.conf.set("spark.kdirect.realTime", "false")
    fails('spark.conf.set("spark.kdirect.realTime", "true")', sink={})
    # Spark's own word about the sink comes first where its list is not turned off.
    spark.conf.unset("spark.sql.streaming.realTimeMode.allowlistCheck")
    with refused("OPERATOR_OR_SINK_NOT_IN_ALLOWLIST", "allowlistCheck to false"):
        start(three, out, checkpoint="last")


def test_a_sink_of_sparks(turned_on, read_stream, topics, tmp_path, spark):
    """Into the writer for each row, which Spark admits; and two real-time streams share slots."""
    source = topics.create(1)
    topics.fill(source, numbers(0, 4))
    found = tmp_path / "found"

    def keep(row):
        with open(found, "ab") as f:
            f.write(bytes(row.value) + b"\n")

    query = (
        read_stream(source, startingOffsets="earliest")
        .writeStream.foreach(keep)
        .outputMode("update")
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(realTime="1 second")
        .start()
    )
    try:
        finish(query, tmp_path, source, {"0": 4})
    finally:
        query.stop()
    assert sorted(found.read_bytes().split()) == numbers(0, 4)
