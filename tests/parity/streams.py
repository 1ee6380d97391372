"""Streams: the scenarios of KafkaMicroBatchSourceSuite and KafkaDontFailOnDataLossSuite."""

from __future__ import annotations

import json
from typing import Any

from tests.parity.relation import MS, at, timed
from tests.parity.scenario import scenario
from tests.parity.world import LIMIT_S, World


@scenario("stream", "a stream from earliest reads everything", "['0', '1', '2', '3']")
def earliest(w: World) -> Any:
    return w.drained(w.stream(w.topic(2, *range(4)), startingOffsets="earliest"))


@scenario("stream", "a stream from given offsets", "['2', '3']")
def given_offsets(w: World) -> Any:
    topic = w.topic(1, *range(4))
    return w.drained(w.stream(topic, startingOffsets=at(topic, 2)))


@scenario("stream", "a stream from a time", "['3', '4']")
def from_time(w: World) -> Any:
    return w.drained(w.stream(timed(w), startingTimestamp=MS + 3000))


@scenario("stream", "a stream from a time by partition", "['3', '4']")
def from_time_by_partition(w: World) -> Any:
    topic = timed(w)
    return w.drained(w.stream(topic, startingOffsetsByTimestamp=at(topic, MS + 3000)))


@scenario("stream", "a stream by assign", "['0', '2']")
def by_assign(w: World) -> Any:
    topic = w.topic(2, *range(4))
    return w.drained(w.stream(assign=json.dumps({topic: [0]}), startingOffsets="earliest"))


@scenario("stream", "a restarted stream goes on where it stopped", "(['0', '1'], ['2'])")
def restarted(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0, 1), w.checkpoint()
    first = w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)
    w.fill(topic, 1, 2)
    return first, w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)


@scenario("stream", "starting offsets count for a new query only", "(['0', '1'], ['2'])")
def start_once(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0, 1), w.checkpoint()
    first = w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)
    w.fill(topic, 1, 2)
    return first, w.drained(w.stream(topic, startingOffsets=at(topic, 0)), checkpoint)


@scenario("stream", "partitions that are added are read from their start", "(['0'], ['1', '2'])")
def added(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0), w.checkpoint()
    first = w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)
    w.topics.add_partitions(topic, 3)
    w.topics.fill(topic, [b"1"], 1)
    w.topics.fill(topic, [b"2"], 2)
    return first, w.drained(w.stream(topic, startingOffsets="latest"), checkpoint)


@scenario("stream", "topics that come to match a pattern are read", "(['0'], ['1'])")
def pattern(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0), w.checkpoint()
    given = {"subscribePattern": f"{topic}.*", "startingOffsets": "earliest"}
    first = w.drained(w.stream(**given), checkpoint)
    w.topics.create_named(f"{topic}-more")
    w.fill(f"{topic}-more", 1, 1)
    return first, w.drained(w.stream(**given), checkpoint)


@scenario("stream", "maxOffsetsPerTrigger divides the backlog", "[3, 3, 3, 1]")
def limited(w: World) -> Any:
    topic = w.topic(1, *range(10))
    frame = w.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=3)
    return [len(batch) for batch in w.drain(frame)]


@scenario("stream", "maxOffsetsPerTrigger is shared by partitions", "[4, 4, 4]")
def limited_partitions(w: World) -> Any:
    topic = w.topic(2, *range(12))
    frame = w.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=4)
    return [len(batch) for batch in w.drain(frame)]


@scenario("stream", "minPartitions and headers in a stream", "['0', '1', '2']")
def split_stream(w: World) -> Any:
    given = {"startingOffsets": "earliest", "minPartitions": 3, "includeHeaders": True}
    return w.drained(w.stream(w.topic(1, *range(3)), **given))


@scenario("stream", "two streams in one query", "['0', '1']")
def union(w: World) -> Any:
    one, two = (w.stream(w.topic(1, n), startingOffsets="earliest") for n in (0, 1))
    return w.drained(one.union(two))


@scenario("stream", "offsets in the checkpoint and in the progress", "{'0': 3, '1': 2}")
def progress(w: World) -> Any:
    topic = w.topic(2, *range(5))
    query = (
        w.stream(topic, startingOffsets="earliest")
        .writeStream.format("noop")
        .option("checkpointLocation", w.checkpoint())
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(LIMIT_S)
    ends = [p["sources"][0]["endOffset"] for p in query.recentProgress if p["numInputRows"]]
    last = json.loads(ends[-1]) if isinstance(ends[-1], str) else ends[-1]
    return dict(sorted(last[topic].items()))


@scenario("stream", "a stream from latest reads what comes later", "['1']")
def latest(w: World) -> Any:
    topic = w.topic(1, 0)
    found: list[str] = []
    query = (
        w.stream(topic, startingOffsets="latest")
        .writeStream.foreachBatch(lambda batch, _: found.extend(w.values(batch)))
        .option("checkpointLocation", w.checkpoint())
        .start()
    )
    try:
        query.processAllAvailable()
        w.fill(topic, 1, 1)
        query.processAllAvailable()
    finally:
        query.stop()
    return found


@scenario(
    "transactions", "a stream of committed records, three offsets at a time", "['a', 'c', 'e']"
)
def committed(w: World) -> Any:
    topic = w.topic(1)
    w.topics.transact(
        topic, [(b"a", True), (b"b", False), (b"c", True), (b"d", False), (b"e", True)]
    )
    given = {"kafka__isolation__level": "read_committed", "maxOffsetsPerTrigger": 3}
    return w.drained(w.stream(topic, startingOffsets="earliest", **given))


@scenario("loss", "a stream ends when records before its offset are gone", "'refused'")
def loss(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0, 1), w.checkpoint()
    w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)
    w.fill(topic, 1, 2, 3, 4)
    w.topics.delete_records(topic, 0, 4)
    return w.refused(lambda: w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint))


@scenario("loss", "with failOnDataLoss=false the stream goes on", "['4']")
def loss_borne(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0, 1), w.checkpoint()
    given = {"startingOffsets": "earliest", "failOnDataLoss": False}
    w.drained(w.stream(topic, **given), checkpoint)
    w.fill(topic, 1, 2, 3, 4)
    w.topics.delete_records(topic, 0, 4)
    return w.drained(w.stream(topic, **given), checkpoint)


@scenario("loss", "a stream whose topic is gone ends", "'refused'")
def topic_gone(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0, 1), w.checkpoint()
    w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)
    w.topics.delete(topic)
    w.topics.create_named(topic)
    return w.refused(lambda: w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint))


@scenario("stream", "a checkpoint of the other format is continued", "(['0', '1'], ['2'])")
def moved(w: World) -> Any:
    topic, checkpoint = w.topic(1, 0, 1), w.checkpoint()
    mine = w.form
    w.form = "kdirect" if mine == "kafka" else "kafka"
    first = w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)
    w.form = mine
    w.fill(topic, 1, 2)
    return first, w.drained(w.stream(topic, startingOffsets="earliest"), checkpoint)
