"""Writing: the scenarios of KafkaSinkBatchSuite and KafkaSinkStreamingSuite."""

from __future__ import annotations

from typing import Any

from tests.parity.scenario import scenario
from tests.parity.world import World

HEADERS = "array(named_struct('key', 'h', 'value', CAST('x' AS BINARY))) AS headers"


def stored(w: World, topic: str, partitions: int = 1) -> list[bytes | None]:
    return sorted((v for _, _, v, _ in w.written(topic, partitions)), key=repr)


@scenario("sink", "a batch appends", "[b'0', b'1']")
def append(w: World) -> Any:
    topic = w.topic(1)
    w.write(w.rows(0, 1), topic=topic)
    return stored(w, topic)


@scenario("sink", "a batch without a mode appends", "[b'0', b'1']")
def no_mode(w: World) -> Any:
    topic = w.topic(1)
    w.write(w.rows(0, 1), None, topic=topic)
    return stored(w, topic)


@scenario("sink", "a second batch appends", "[b'0', b'1']")
def twice(w: World) -> Any:
    topic = w.topic(1)
    for n in (0, 1):
        w.write(w.rows(n), topic=topic)
    return stored(w, topic)


for mode in ("overwrite", "ignore"):

    @scenario("sink", f"mode {mode} is refused", "'refused'")
    def refused_mode(w: World, mode: str = mode) -> Any:
        return w.refused(lambda: w.write(w.rows(0), mode, topic=w.topic(1)))


@scenario("sink", "a column names the topic", "([b'0'], [b'1'])")
def by_column(w: World) -> Any:
    one, two = w.topic(1), w.topic(1)
    rows = w.spark.createDataFrame([(one, "0"), (two, "1")], "topic string, value string")
    w.write(rows)
    return stored(w, one), stored(w, two)


@scenario("sink", "the option topic precedes the column", "([], [b'0'])")
def option_first(w: World) -> Any:
    one, two = w.topic(1), w.topic(1)
    w.write(w.spark.createDataFrame([(one, "0")], "topic string, value string"), topic=two)
    return stored(w, one), stored(w, two)


@scenario("sink", "null keys and values", "[(0, None, None, None), (0, b'k', b'v', None)]")
def nulls(w: World) -> Any:
    topic = w.topic(1)
    rows = w.spark.createDataFrame([(None, None), ("k", "v")], "key string, value string")
    w.write(rows, topic=topic)
    return w.written(topic)


@scenario("sink", "keys and values of bytes", "[(0, b'\\x00', b'\\xff', None)]")
def binary(w: World) -> Any:
    topic = w.topic(1)
    w.write(w.spark.sql("SELECT X'00' AS key, X'FF' AS value"), topic=topic)
    return w.written(topic)


@scenario("sink", "headers are written", "[(0, None, b'v', [('h', b'x')])]")
def headers(w: World) -> Any:
    topic = w.topic(1)
    w.write(w.spark.sql(f"SELECT 'v' AS value, {HEADERS}"), topic=topic)
    return w.written(topic)


@scenario("sink", "a column names the partition", "[(1, None, b'a', None), (2, None, b'b', None)]")
def partition(w: World) -> Any:
    topic = w.topic(3)
    rows = w.spark.createDataFrame([("a", 1), ("b", 2)], "value string, partition int")
    w.write(rows, topic=topic)
    return w.written(topic, 3)


@scenario("sink", "keys choose the partition as Kafka's murmur2 does", "[1, 1, 2, 2, 2]")
def by_key(w: World) -> Any:
    topic = w.topic(3)
    rows = w.spark.createDataFrame([(k, "v") for k in "abcde"], "key string, value string")
    w.write(rows, topic=topic)
    return [p for p, *_ in w.written(topic, 3)]


@scenario("sink", "other columns are ignored", "[b'0']")
def other_columns(w: World) -> Any:
    topic = w.topic(1)
    w.write(w.spark.sql("SELECT '0' AS value, 5 AS number, now() AS timestamp"), topic=topic)
    return stored(w, topic)


@scenario("sink", "a sink bears options of the source", "[b'0']")
def shared_dict(w: World) -> Any:
    topic = w.topic(1)
    given = {"startingOffsets": "earliest", "failOnDataLoss": "false", "subscribe": "x"}
    given |= {"kafka__enable__idempotence": "true", "kafka__security__protocol": "PLAINTEXT"}
    w.write(w.rows(0), topic=topic, **given)
    return stored(w, topic)


for select, why in (
    ("'v' AS other", "no column value"),
    ("5 AS value", "a value that is a number"),
    ("'v' AS value, 5 AS key", "a key that is a number"),
    ("'v' AS value, 'x' AS partition", "a partition that is a text"),
    ("'v' AS value, map('a', 'b') AS headers", "headers that are a map"),
):

    @scenario("sink", f"{why} is refused", "'refused'")
    def refused_rows(w: World, select: str = select) -> Any:
        topic = w.topic(1)
        return w.refused(lambda: w.write(w.spark.sql(f"SELECT {select}"), topic=topic))


@scenario("sink", "no topic at all is refused", "'refused'")
def no_topic(w: World) -> Any:
    return w.refused(lambda: w.write(w.rows(0)))


@scenario("sink", "a null topic is refused", "'refused'")
def null_topic(w: World) -> Any:
    frame = w.spark.sql("SELECT 'v' AS value, CAST(NULL AS STRING) AS topic")
    return w.refused(lambda: w.write(frame))


for name in ("key.serializer", "value.serializer"):

    @scenario("options", f"a sink refuses kafka.{name}", "'refused'")
    def refused_option(w: World, name: str = name) -> Any:
        given = {f"kafka.{name}": "x"}
        return w.refused(lambda: w.write(w.rows(0), topic=w.topic(1), **given))


def source(w: World, *values: Any) -> Any:
    return w.stream(w.topic(1, *values), startingOffsets="earliest")


@scenario("sink", "a stream appends", "[b'0', b'1']")
def stream(w: World) -> Any:
    topic = w.topic(1)
    w.write_stream(source(w, 0, 1).select("value"), topic=topic)
    return stored(w, topic)


for mode in ("update", "complete"):

    @scenario("sink", f"a stream in mode {mode} appends what comes", "[b'a=2', b'b=1']")
    def changing(w: World, mode: str = mode) -> Any:
        topic = w.topic(1)
        counts = source(w, "a", "b", "a").groupBy("value").count()
        rows = counts.selectExpr("concat(CAST(value AS STRING), '=', count) AS value")
        w.write_stream(rows, mode, topic=topic)
        return stored(w, topic)


@scenario("sink", "a stream without a topic is refused", "'refused'")
def stream_no_topic(w: World) -> Any:
    return w.refused(lambda: w.write_stream(source(w, 0).select("value")))


@scenario("sink", "a stream of numbers is refused", "'refused'")
def stream_wrong_type(w: World) -> Any:
    topic = w.topic(1)
    frame = source(w, 0).selectExpr("CAST(5 AS INT) AS value")
    return w.refused(lambda: w.write_stream(frame, topic=topic))
