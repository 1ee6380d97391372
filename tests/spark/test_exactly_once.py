"""The exactly-once sink: what readers of committed records see, by confluent-kafka."""

from __future__ import annotations

import shutil
import time

import pytest
from pyspark.sql import functions as F

from kdirect.client.session import Session
from tests.java.both import broker_of
from tests.spark.committed import Committed

pytestmark = pytest.mark.spark


@pytest.fixture
def committed():
    """`Committed` of topics, closed when the test ends."""
    made = []

    def build(address, topic, partitions):
        made.append(Committed(address, topic, partitions))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.fixture
def save(broker):
    """Start a batch write of a frame."""

    def go(df, topic, *, address=broker.bootstrap_servers, **options):
        (
            df.write.format("kdirect").mode("append").option("kafka.bootstrap.servers", address)
            .option("topic", topic)
            .options(**{k.replace("__", "."): v for k, v in options.items()}).save()
        )  # fmt: skip

    return go


@pytest.fixture
def copy(read_stream, broker, tmp_path):
    """Run a query that copies a topic, three records a micro-batch, in `tasks` tasks; it ends when
    everything is copied."""

    def go(source, target, *, tasks=2, checkpoint="c", value="value", **options):
        address = options.pop("address", broker.bootstrap_servers)
        query = (
            read_stream(
                source, address=address, startingOffsets="earliest", maxOffsetsPerTrigger="3"
            )
            .repartition(tasks).select("key", F.expr(value).alias("value"))
            .writeStream.format("kdirect").option("kafka.bootstrap.servers", address)
            .option("topic", target).option("checkpointLocation", str(tmp_path / checkpoint))
            .options(**options).trigger(availableNow=True).start()
        )  # fmt: skip
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()
        return query

    return go


def numbers(many):
    return [b"%d" % i for i in range(many)]


def test_a_batch_is_there_at_once(spark, topics, save, committed, broker):
    name = topics.create(3)

    def wait(rows):
        yield from rows
        time.sleep(1)  # after the other tasks have written theirs

    frame = spark.range(0, 30_000, 1, 3).selectExpr("CAST(id AS STRING) AS value")
    seen = committed(broker.bootstrap_servers, name, 3)
    with seen.watched(lambda values: len(values) in (0, 30_000)) as watch:
        save(frame.mapInArrow(wait, frame.schema), name)
    assert watch.held_back > 0, "nobody looked while records were there that are not committed"
    assert sorted(map(int, seen.all())) == list(range(30_000))


def test_a_batch_that_fails_leaves_nothing(spark, topics, save, committed, broker, refused):
    name = topics.create(2)
    boom = F.expr("if(id = 30000, raise_error('boom'), CAST(id AS STRING))")
    seen = committed(broker.bootstrap_servers, name, 2)
    with refused("boom"):
        save(spark.range(0, 40_000, 1, 4).select(boom.alias("value")), name)
    assert seen.all() == []
    assert sum(seen.ends()) > 0, "it was aborted, so it holds nobody back"
    save(spark.range(0, 10, 1, 2).selectExpr("CAST(id AS STRING) AS value"), name)
    assert sorted(seen.all()) == numbers(10)


def test_a_task_that_is_tried_again_writes_once(
    spark, topics, save, committed, broker, monkeypatch
):
    """Without retries in local mode, so by hand: two attempts of a task, one of which counts."""
    from kdirect_spark import exactly_once
    from kdirect_spark.settings import sink_settings
    from kdirect_spark.sink import Written

    name = topics.create(1)
    settings = sink_settings(
        {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": name, "transport": "tcp"}
    )
    import pyarrow as pa

    job = exactly_once.job_of_batch(None)
    rows = pa.record_batch({"value": [b"%d" % i for i in range(3)]})
    died, zombie, counts = (exactly_once.TaskAttempt(settings, job) for _ in range(3))
    for attempt in (died, zombie, counts):
        attempt.send(rows)
    message = Written(3, job, counts.finish())
    died.drop()
    exactly_once.commit(settings, job, [message.attempt])
    seen = committed(broker.bootstrap_servers, name, 1)
    assert sorted(seen.all()) == numbers(3)
    # What the zombie writes after the commit is refused, or at least never seen.
    with pytest.raises(Exception) as late:
        zombie.send(rows)
        zombie.finish()
    assert "transact" in str(late.value) or "fenced" in str(late.value), late.value
    with monkeypatch.context() as patch:
        patch.setattr(Session, "join_attempt", None)
        said = zombie.explained(late.value)
    assert "the batch is committed, with other attempts" in str(said), said
    assert zombie.explained(ValueError("a bug")) is None
    zombie.drop()
    exactly_once.commit(settings, job, [message.attempt])  # its answer was lost
    again = exactly_once.TaskAttempt(settings, job)
    again.send(rows)
    assert again.finish() is None
    assert sorted(seen.all()) == numbers(3)
    assert seen.held_back() == 0


def forget_commits(checkpoint, first):
    """What a driver leaves that died before it wrote down the commit of batch `first`."""
    for name in list(checkpoint.glob("commits/*")):
        number = name.name.removeprefix(".").removesuffix(".crc")
        if number.isdigit() and int(number) >= first:
            name.unlink()


def test_a_micro_batch_that_runs_again_changes_nothing(
    topics, copy, committed, broker, tmp_path, spark
):
    source, target = topics.create(1), topics.create(3)
    topics.fill(source, numbers(10), key=lambda i: b"%d" % i)
    copy(source, target)
    seen = committed(broker.bootstrap_servers, target, 3)
    assert sorted(seen.all(), key=int) == numbers(10)
    ends = seen.ends()
    forget_commits(tmp_path / "c", 3)
    copy(source, target, tasks=5)  # another number of partitions
    assert sorted(seen.all(), key=int) == numbers(10) and seen.ends() == ends
    topics.fill(source, numbers(2), key=lambda i: b"k")
    copy(source, target, tasks=1)
    assert len(seen.all()) == 12


def test_another_topic_and_a_checkpoint_that_is_deleted(
    topics, copy, committed, broker, tmp_path, spark
):
    source, first, second = topics.create(1), topics.create(1), topics.create(1)
    topics.fill(source, numbers(3))
    copy(source, first, exactlyOnceId=f"mover-{first}")
    topics.fill(source, numbers(3))
    copy(source, second, exactlyOnceId=f"mover-{first}")
    assert len(committed(broker.bootstrap_servers, first, 1).all()) == 3
    assert len(committed(broker.bootstrap_servers, second, 1).all()) == 3
    shutil.rmtree(tmp_path / "c")
    copy(source, second, exactlyOnceId=f"mover-{first}")  # a new query: everything again
    assert len(committed(broker.bootstrap_servers, second, 1).all()) == 9


def test_an_older_checkpoint_is_refused(topics, copy, committed, broker, tmp_path, refused, spark):
    """Its micro-batches have numbers that are committed, and other rows."""
    source, target = topics.create(1), topics.create(1)
    topics.fill(source, numbers(3))
    copy(source, target)
    shutil.copytree(tmp_path / "c", tmp_path / "older")
    for _ in range(2):
        topics.fill(source, numbers(3))
        copy(source, target)
    assert len(committed(broker.bootstrap_servers, target, 1).all()) == 9
    topics.fill(source, numbers(3))
    with refused("OlderCheckpointError", "begins with batch 1, though 2 is committed"):
        copy(source, target, checkpoint="older")
    assert len(committed(broker.bootstrap_servers, target, 1).all()) == 9
    copy(source, target)  # the newest one goes on
    assert len(committed(broker.bootstrap_servers, target, 1).all()) == 12


def test_two_queries_write_to_one_topic(topics, copy, committed, broker, spark):
    source, target = topics.create(1), topics.create(2)
    topics.fill(source, numbers(6), key=lambda i: b"%d" % i)
    copy(source, target, checkpoint="a", value="concat('a', CAST(value AS STRING))")
    copy(source, target, checkpoint="b", value="concat('b', CAST(value AS STRING))")
    expected = [b"%c%d" % (of, i) for of in b"ab" for i in range(6)]
    assert sorted(committed(broker.bootstrap_servers, target, 2).all()) == expected


def test_the_older_of_two_queries_with_one_identity_is_fenced(
    topics, read_stream, broker, tmp_path, refused, spark
):
    source, target = topics.create(1), topics.create(1)

    def start(checkpoint):
        return (
            read_stream(source, startingOffsets="earliest").select("value")
            .writeStream.format("kdirect").queryName(f"writer-{checkpoint}")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers).option("topic", target)
            .option("exactlyOnceId", f"one-{target}")
            .option("checkpointLocation", str(tmp_path / checkpoint)).start()
        )  # fmt: skip

    topics.fill(source, [b"1"])
    older = start("older")
    try:
        older.processAllAvailable()
        newer = start("newer")
        try:
            newer.processAllAvailable()
            with refused("FencedRunError", "checkpoint", "newer"):
                topics.fill(source, [b"2"])
                older.awaitTermination(60)
        finally:
            newer.stop()
    finally:
        older.stop()


def test_a_batch_that_takes_too_long_says_so(spark, topics, save, broker, refused):
    name = topics.create(2)

    def wait(rows):
        from pyspark import TaskContext

        yield from rows
        if TaskContext.get().partitionId() == 1:
            time.sleep(4)

    frame = spark.range(0, 4, 1, 2).selectExpr("CAST(id AS STRING) AS value")
    with refused("UnknownAttemptError", "transaction.timeout.ms (1000)"):
        save(
            frame.mapInArrow(wait, frame.schema), name,
            kafka__transaction__timeout__ms="1000", address=broker.bootstrap_servers,
        )  # fmt: skip


def test_a_row_that_is_too_large_is_named(spark, topics, save, refused):
    name = topics.create(1, max_message_bytes=50_000)
    frame = spark.range(0, 10, 1, 1).selectExpr(
        "concat('key-', id) AS key", "repeat('x', if(id = 7, 60000, 10)) AS value"
    )
    with refused("max.message.bytes", "row 7", "key-7", "60000 bytes", name):
        save(frame, name)


def test_a_wrong_address_is_not_waited_for(spark, save, refused):
    """No broker was there before that could come back: it is not the coordinator that is late.
    Neither the task nor the abort of the job waits an hour for it."""
    frame = spark.range(1).selectExpr("CAST(id AS STRING) AS value")
    hour = {"connect__timeout__ms": "500", "kafka__delivery__timeout__ms": "3600000"}
    with refused("BrokerUnavailableError", "no broker answers at 127.0.0.1:1", "bootstrap.servers"):
        save(frame, "t", address="127.0.0.1:1", **hour)


def test_a_broker_without_attempts(spark, save, refused, broker_jars, tmp_path, topics_of):
    """Apache Kafka's own: the sink says what to change, which works."""
    frame = spark.range(0, 10, 1, 2).selectExpr("CAST(id AS STRING) AS value")
    with broker_of("kafka", {}, tmp_path) as address:
        topics = topics_of(address)
        topics.create_named("t", 1)
        with refused("AttemptsUnsupportedError", address, "exactlyOnce=false"):
            save(frame, "t", address=address)
        assert topics.consume("t", 1) == [], "nothing of it was written"
        save(frame, "t", address=address, exactlyOnce="false")
        assert sorted(row[3] for row in topics.consume("t", 1)) == numbers(10)
