"""Batch queries: the scenarios of KafkaRelationSuite and of the options that it refuses."""

from __future__ import annotations

import json
from typing import Any

from tests.parity.scenario import scenario
from tests.parity.world import World

MS = 1_700_000_000_000


def at(topic: str, *offsets: int) -> str:
    """The JSON of offsets, or of times, of the partitions of a topic."""
    return json.dumps({topic: {str(p): n for p, n in enumerate(offsets)}})


def timed(w: World) -> str:
    """A topic whose records are one second apart."""
    topic = w.topic(1, retention_ms=-1)
    w.topics.fill(topic, [b"%d" % i for i in range(5)], timestamp_ms=lambda i: MS + 1000 * i)
    return topic


@scenario("relation", "explicit earliest to latest offsets", "['0', '1', '2', '3', '4', '5']")
def explicit(w: World) -> Any:
    topic = w.topic(3, *range(6))
    return w.values(w.read(topic, startingOffsets="earliest", endingOffsets="latest"))


@scenario("relation", "default offsets read everything", "['0', '1', '2']")
def defaults(w: World) -> Any:
    return w.values(w.read(w.topic(2, *range(3))))


@scenario(
    "relation", "explicit offsets, with -2 and -1 among them", "['2', '3', '4', '5', '6', '8']"
)
def explicit_json(w: World) -> Any:
    topic = w.topic(3, *range(9))
    frame = w.read(topic, startingOffsets=at(topic, 1, -2, 0), endingOffsets=at(topic, -1, 2, 3))
    kept = w.values(frame)
    return [v for v in kept if v not in ("1", "7")] if kept[0] != "1" else kept[1:]


@scenario("relation", "a range within a partition", "['3', '4', '5', '6']")
def within(w: World) -> Any:
    topic = w.topic(1, *range(10))
    return w.values(w.read(topic, startingOffsets=at(topic, 3), endingOffsets=at(topic, 7)))


@scenario("relation", "one DataFrame used twice in a query", "['0', '0', '1', '1']")
def reused(w: World) -> Any:
    frame = w.read(w.topic(1, 0, 1))
    return w.values(frame.union(frame))


@scenario("relation", "an action reads what exists when it starts", "(2, 4)")
def planned_again(w: World) -> Any:
    topic = w.topic(1, 0, 1)
    frame = w.read(topic)
    first = frame.count()
    w.fill(topic, 1, 2, 3)
    return first, frame.count()


@scenario("relation", "an empty topic gives no row", "[]")
def empty(w: World) -> Any:
    return w.values(w.read(w.topic(2)))


@scenario("relation", "rows have the columns and types of the connector",
          "'struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
          "timestamp:timestamp,timestampType:int>'")  # fmt: skip
def columns(w: World) -> Any:
    return w.read(w.topic(1)).schema.simpleString()


@scenario("relation", "headers", "[('a', b'1'), ('b', None)]")
def headers(w: World) -> Any:
    topic = w.topic(1)
    w.topics.fill(topic, [b"v"], headers=[("a", b"1"), ("b", None)])
    (row,) = w.read(topic, includeHeaders=True).collect()
    return [(h.key, None if h.value is None else bytes(h.value)) for h in row.headers]


@scenario("relation", "null keys and null values", "[(None, None), (b'k', b'v')]")
def nulls(w: World) -> Any:
    topic = w.topic(1)
    w.topics.fill(topic, [None])
    w.topics.fill(topic, [b"v"], key=b"k")
    rows = w.read(topic).orderBy("offset").collect()
    return [tuple(None if x is None else bytes(x) for x in (r.key, r.value)) for r in rows]


@scenario("relation", "times of records", "[1700000000.0, 1700000001.0]")
def times(w: World) -> Any:
    rows = w.read(timed(w)).selectExpr("CAST(timestamp AS DOUBLE) AS t").collect()
    return sorted(r.t for r in rows)[:2]


for option, value, expected in (
    ("startingTimestamp", MS + 2000, "['2', '3', '4']"),
    ("endingTimestamp", MS + 2000, "['0', '1']"),
    ("startingTimestamp", MS + 1500, "['2', '3', '4']"),
    ("endingTimestamp", MS + 99_000, "['0', '1', '2', '3', '4']"),
):

    @scenario("relation", f"{option} {value - MS} ms after the first record", expected)
    def by_time(w: World, option: str = option, value: int = value) -> Any:
        return w.values(w.read(timed(w), **{option: value}))


for option, value, expected in (
    ("startingOffsetsByTimestamp", MS + 3000, "['3', '4']"),
    ("endingOffsetsByTimestamp", MS + 3000, "['0', '1', '2']"),
):

    @scenario("relation", f"{option} by partition", expected)
    def by_partition(w: World, option: str = option, value: int = value) -> Any:
        topic = timed(w)
        return w.values(w.read(topic, **{option: at(topic, value)}))


@scenario("relation", "startingTimestamp precedes the other starting options", "['4']")
def precedence(w: World) -> Any:
    topic = timed(w)
    given = {"startingOffsetsByTimestamp": at(topic, MS), "startingOffsets": "earliest"}
    return w.values(w.read(topic, startingTimestamp=MS + 4000, **given))


@scenario("relation", "startingOffsetsByTimestamp precedes startingOffsets", "['4']")
def precedence_by_partition(w: World) -> Any:
    topic = timed(w)
    given = {"startingOffsetsByTimestamp": at(topic, MS + 4000), "startingOffsets": "earliest"}
    return w.values(w.read(topic, **given))


@scenario("relation", "a start time after every record is refused", "'refused'")
def after_all(w: World) -> Any:
    topic = timed(w)
    return w.refused(lambda: w.values(w.read(topic, startingTimestamp=MS + 99_000)))


@scenario("relation", "a start time after every record, with strategy latest", "[]")
def after_all_latest(w: World) -> Any:
    strategy = {"startingOffsetsByTimestampStrategy": "latest"}
    return w.values(w.read(timed(w), startingTimestamp=MS + 99_000, **strategy))


@scenario("relation", "a start beyond its end in one partition is refused", "'refused'")
def start_beyond_end(w: World) -> Any:
    topic = w.topic(1, *range(5))
    given = {"startingOffsets": at(topic, 4), "endingOffsets": at(topic, 2)}
    return w.refused(lambda: w.values(w.read(topic, **given)))


@scenario("relation", "a start beyond the end of the log is refused", "'refused'")
def start_beyond_log(w: World) -> Any:
    topic = w.topic(1, *range(5))
    return w.refused(lambda: w.values(w.read(topic, startingOffsets=at(topic, 9))))


@scenario("relation", "offsets that leave out a partition are refused", "'refused'")
def left_out(w: World) -> Any:
    topic = w.topic(2, *range(4))
    return w.refused(lambda: w.values(w.read(topic, startingOffsets=at(topic, 1))))


@scenario("relation", "a topic that is not there is refused", "'refused'")
def no_topic(w: World) -> Any:
    return w.refused(lambda: w.values(w.read(f"{w.form}.not.there", failOnDataLoss=True)))


for given in (
    {"startingOffsets": "latest"},
    {"startingOffsets": '{"t":{"0":-1}}'},
    {"endingOffsets": "earliest"},
    {"endingOffsets": '{"t":{"0":-2}}'},
    {"startingOffsets": "{"},
    {"startingTimestamp": "soon"},
    {"kafka__auto__offset__reset": "latest"},
    {"kafka__key__deserializer": "x"},
    {"kafka__value__deserializer": "x"},
    {"kafka__enable__auto__commit": "true"},
    {"kafka__interceptor__classes": "x"},
    {"assign": '{"t":[0]}'},
    {"subscribePattern": "t"},
):
    shown = ", ".join(f"{k.replace('__', '.')}={v}" for k, v in given.items())

    @scenario("options", f"load of a batch refuses {shown}", "'refused'")
    def refused_batch(w: World, given: dict[str, str] = given) -> Any:
        return w.refused(lambda: w.read("t", **given))


for given in (
    {"endingOffsets": "latest"},
    {"endingOffsetsByTimestamp": '{"t":{"0":5}}'},
    {"kafka__auto__offset__reset": "latest"},
    {"kafka__enable__auto__commit": "true"},
    {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"},
):
    shown = ", ".join(f"{k.replace('__', '.')}={v}" for k, v in given.items())

    @scenario("options", f"load of a stream refuses {shown}", "'refused'")
    def refused_stream(w: World, given: dict[str, str] = given) -> Any:
        return w.refused(lambda: w.stream("t", **given))


for given in ({"endingTimestamp": "5"}, {"startingOffsets": "first"}):
    shown = ", ".join(f"{k}={v}" for k, v in given.items())

    @scenario("options", f"load of a stream with {shown}", "'accepted'")
    def accepted_stream(w: World, given: dict[str, str] = given) -> Any:
        return w.refused(lambda: w.stream("t", **given))


@scenario("options", "a batch bears options of streams and of sinks", "['0', '1']")
def shared_dict(w: World) -> Any:
    given = {"maxOffsetsPerTrigger": 1, "groupIdPrefix": "x", "topic": "other"}
    given |= {"kafka__group__id": f"{w.form}-g", "kafka__security__protocol": "PLAINTEXT"}
    return w.values(w.read(w.topic(1, 0, 1), **given))


@scenario("options", "names in any case", "['1']")
def any_case(w: World) -> Any:
    topic = w.topic(1, 0, 1)
    return w.values(w.read(topic, STARTINGOFFSETS=at(topic, 1), FailOnDataLoss="FALSE"))


@scenario("relation", "assign reads just the named partitions", "['0', '2']")
def assign(w: World) -> Any:
    topic = w.topic(2, *range(4))
    return w.values(w.read(assign=json.dumps({topic: [0]})))


@scenario("relation", "subscribePattern reads every topic that matches", "['0', '1']")
def pattern(w: World) -> Any:
    prefix = w.topic(1, 0)
    w.topics.create_named(f"{prefix}-more")
    w.fill(f"{prefix}-more", 1, 1)
    return w.values(w.read(subscribePattern=f"{prefix}.*"))


@scenario("relation", "two topics in subscribe", "['0', '1']")
def two_topics(w: World) -> Any:
    return w.values(w.read(f"{w.topic(1, 0)},{w.topic(1, 1)}"))


@scenario("relation", "minPartitions splits a partition", "(True, 100)")
def min_partitions(w: World) -> Any:
    frame = w.read(w.topic(1, *range(100)), minPartitions=4)
    return frame.rdd.getNumPartitions() >= 4, frame.count()


@scenario("relation", "maxRecordsPerPartition in a batch", "(1, 100)")
def max_records(w: World) -> Any:
    frame = w.read(w.topic(1, *range(100)), maxRecordsPerPartition=25)
    return frame.rdd.getNumPartitions(), frame.count()


@scenario("relation", "deleted records are left out at earliest", "['3', '4']")
def deleted(w: World) -> Any:
    topic = w.topic(1, *range(5))
    w.topics.delete_records(topic, 0, 3)
    return w.values(w.read(topic))


@scenario("loss", "offsets that were deleted are refused", "'refused'")
def loss(w: World) -> Any:
    topic = w.topic(1, *range(5))
    w.topics.delete_records(topic, 0, 3)
    return w.refused(lambda: w.values(w.read(topic, startingOffsets=at(topic, 0))))


@scenario("loss", "with failOnDataLoss=false the batch reads what is there", "['3', '4']")
def loss_borne(w: World) -> Any:
    topic = w.topic(1, *range(5))
    w.topics.delete_records(topic, 0, 3)
    given = {"startingOffsets": at(topic, 0), "failOnDataLoss": False}
    return w.values(w.read(topic, **given))


@scenario("transactions", "a batch of committed records only", "['a', 'c']")
def committed(w: World) -> Any:
    topic = w.topic(1)
    w.topics.transact(topic, [(b"a", True), (b"b", False), (b"c", True)])
    return w.values(w.read(topic, kafka__isolation__level="read_committed"))


@scenario("transactions", "a batch of uncommitted records too", "['a', 'b', 'c']")
def uncommitted(w: World) -> Any:
    topic = w.topic(1)
    w.topics.transact(topic, [(b"a", True), (b"b", False), (b"c", True)])
    return w.values(w.read(topic))
