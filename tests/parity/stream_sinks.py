"""Writing as streams do: the scenarios of KafkaSinkStreamingSuite and of asynchronous progress, and
those of KafkaSinkBatchSuite about partitions and headers."""

from __future__ import annotations

from typing import Any

from tests.parity.scenario import scenario
from tests.parity.sinks import source, stored
from tests.parity.world import LIMIT_S, World


@scenario("sink", "a stream's column names the topic", "[b'0', b'1']")
def by_column(w: World) -> Any:
    topic = w.topic(1)
    w.write_stream(source(w, 0, 1).selectExpr(f"'{topic}' AS topic", "value"))
    return stored(w, topic)


@scenario("sink", "the option topic precedes the column in a stream", "[b'0']")
def option_first(w: World) -> Any:
    topic = w.topic(1)
    w.write_stream(source(w, 0).selectExpr("'foo' AS topic", "value"), topic=topic)
    return stored(w, topic)


for select, why in (
    (("value AS key",), "no column value"),
    (("value", "5 AS topic"), "a topic that is a number"),
    (("value", "5 AS key"), "a key that is a number"),
    (("value", "'x' AS partition"), "a partition that is a text"),
):

    @scenario("sink", f"a stream with {why} is refused", "'refused'")
    def refused_rows(w: World, select: tuple[str, ...] = select) -> Any:
        topic = w.topic(1)
        given = {} if "topic" in " ".join(select) else {"topic": topic}
        frame = source(w, 0).selectExpr(*select)
        return w.refused(lambda: w.write_stream(frame, **given))


for name in ("key.serializer", "value.serializer"):

    @scenario("options", f"a stream's sink refuses kafka.{name}", "'refused'")
    def refused_option(w: World, name: str = name) -> Any:
        given = {f"kafka.{name}": "x"}
        frame = source(w, 0).select("value")
        return w.refused(lambda: w.write_stream(frame, topic=w.topic(1), **given))


@scenario("sink", "a stream into a topic that is not there is refused", "'refused'")
def no_such_topic(w: World) -> Any:
    frame = source(w, 0).select("value")
    given = {"topic": f"{w.form}.not.there", "kafka__max__block__ms": 2000}
    return w.refused(lambda: w.write_stream(frame, **given))


@scenario("sink", "a batch into a topic that is not there is refused", "'refused'")
def batch_no_such_topic(w: World) -> Any:
    given = {"topic": f"{w.form}.not.there", "kafka__max__block__ms": 2000}
    return w.refused(lambda: w.write(w.rows(0), **given))


@scenario("sink", "rows of output in the progress", "3")
def output_rows(w: World) -> Any:
    query = (
        source(w, 1, 2, 3)
        .select("value")
        .writeStream.format(w.form)
        .option("kafka.bootstrap.servers", w.servers)
        .option("topic", w.topic(1))
        .option("checkpointLocation", w.checkpoint())
        .outputMode("update")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(LIMIT_S)
    return sum(p["sink"]["numOutputRows"] for p in query.recentProgress)


def asynchronous(w: World, **options: Any) -> list[bytes | None]:
    """Fifteen records by five through a query that logs its progress beside its work, then fifteen
    more through a second run of it; what the topic has then, each value once."""
    topic, out, checkpoint = w.topic(1, *range(15)), w.topic(1), w.checkpoint()
    for more in (range(15, 30), ()):
        query = (
            w.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=5)
            .select("value")
            .writeStream.format(w.form)
            .option("kafka.bootstrap.servers", w.servers)
            .option("topic", out)
            .option("checkpointLocation", checkpoint)
            .option("asyncProgressTrackingEnabled", "true")
            .option("asyncProgressTrackingCheckpointIntervalMs", "1000")
            .options(**options)
            .start()
        )
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        w.fill(topic, 1, *more)
    return sorted(set(stored(w, out)), key=repr)


@scenario("sink", "asynchronous progress with the defaults of the sink", "'accepted'")
def asynchronous_by_default(w: World) -> Any:
    return w.refused(lambda: asynchronous(w))


@scenario("sink", "asynchronous progress with exactlyOnce=false",
          repr(sorted((b"%d" % n for n in range(30)), key=repr)))  # fmt: skip
def asynchronous_at_least_once(w: World) -> Any:
    return asynchronous(w, exactlyOnce="false")


@scenario("sink", "a null partition leaves the choice to the key", "True")
def null_partition(w: World) -> Any:
    topics = [w.topic(4), w.topic(4)]
    for topic, column in zip(topics, ("", ", CAST(NULL AS INT) AS partition"), strict=True):
        select = f"SELECT STRING(id) AS key, STRING(id) AS value{column} FROM range(5)"
        w.write(w.spark.sql(select), topic=topic)
    one, two = (w.written(topic, 4) for topic in topics)
    return one == two and len({p for p, *_ in one}) > 1


@scenario("sink", "a partitioner of the user's", "'accepted'")
def partitioner(w: World) -> Any:
    given = {"kafka__partitioner__class": "org.apache.kafka.clients.producer.RoundRobinPartitioner"}
    return w.refused(lambda: w.write(w.rows(0, 1), topic=w.topic(2), **given))


@scenario("sink", "headers: none, several, two of one name", repr([
    (0, None, b"1", [("a", b"b")]), (0, None, b"2", [("e", b"f"), ("e", b"g")]),
    (0, None, b"3", None),
]))  # fmt: skip
def several_headers(w: World) -> Any:
    topic = w.topic(1)
    rows = w.spark.createDataFrame(
        [
            ("1", [("a", bytearray(b"b"))]),
            ("2", [("e", bytearray(b"f")), ("e", bytearray(b"g"))]),
            ("3", None),
        ],
        "value string, headers array<struct<key:string,value:binary>>",
    )
    w.write(rows, topic=topic)
    return w.written(topic)


@scenario("sink", "structs as JSON", "999")
def as_json(w: World) -> Any:
    topic = w.topic(1)
    w.write(w.spark.range(1, 1000).selectExpr("to_json(struct(*)) AS value"), topic=topic)
    return len(set(stored(w, topic)))


@scenario("sink", "more than a small buffer of the producer holds", "300")
def small_buffer(w: World) -> Any:
    topic = w.topic(1)
    frame = w.spark.range(300).selectExpr("CAST(repeat('x', 15000) AS BINARY) AS value")
    w.write(frame, topic=topic, kafka__buffer__memory=16384, kafka__batch__size=1000)
    return len(stored(w, topic))
