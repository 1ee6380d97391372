"""How much a micro-batch reads, and what its progress says: the scenarios of
KafkaMicroBatchSourceSuite about limits, triggers, tasks and metrics."""

from __future__ import annotations

import time
from typing import Any

from tests.parity.relation import at
from tests.parity.scenario import scenario
from tests.parity.world import LIMIT_S, World

BEHIND = ("minOffsetsBehindLatest", "maxOffsetsBehindLatest", "avgOffsetsBehindLatest")


@scenario("limits", "the largest limit there is", "['5', '6', '7']")
def largest(w: World) -> Any:
    topic = w.topic(1, *range(5))
    frame = w.stream(topic, startingOffsets=at(topic, 5), maxOffsetsPerTrigger=2**63 - 1)
    with w.running(frame) as (query, batches):
        w.fill(topic, 1, 5, 6, 7)
        return w.come(query, batches, 5, 6, 7)


def unequal(w: World) -> str:
    topic = w.topic(3)
    for p, values in enumerate((range(100, 201), range(10, 21), [1])):
        w.topics.fill(topic, [b"%d" % v for v in values], p)
    return topic


@scenario("limits", "a limit is divided in proportion to what waits", repr([
    sorted(map(str, [1, 10, *range(100, 108)])),
    sorted(map(str, [11, *range(108, 117)])),
    sorted(map(str, [12, *range(117, 126)])),
    sorted(map(str, [13, *range(126, 135)])),
]))  # fmt: skip
def proportion(w: World) -> Any:
    topic = unequal(w)
    return w.drain(w.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=10))[:4]


@scenario("limits", "trigger once knows no limit", "[113]")
def once(w: World) -> Any:
    given = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 10, "minOffsetsPerTrigger": 5}
    frame = w.stream(unequal(w), **given)
    return [len(batch) for batch in w.drain(frame, once=True)]


@scenario("limits", "a limit for each of two streams in a query", "[10, 10, 5, 5]")
def two_limits(w: World) -> Any:
    one, two = (
        w.stream(w.topic(1, *range(n)), startingOffsets="earliest", maxOffsetsPerTrigger=5)
        for n in (10, 20)
    )
    return [len(batch) for batch in w.drain(one.union(two))]


@scenario("limits", "fewer than minOffsetsPerTrigger wait for more", "([16], [16, 19])")
def minimum(w: World) -> Any:
    topic = w.topic(1, *range(16))
    given = {"startingOffsets": "earliest", "minOffsetsPerTrigger": 15, "maxTriggerDelay": "10m"}
    with w.running(w.stream(topic, **given)) as (query, batches):
        w.fill(topic, 1, *range(16, 22))
        query.processAllAvailable()
        time.sleep(1)
        first = [len(batch) for batch in batches]
        w.fill(topic, 1, *range(22, 35))
        w.come(query, batches, *range(35))
        return first, [len(batch) for batch in batches]


@scenario("limits", "maxTriggerDelay ends the wait", "[16, 6]")
def delay(w: World) -> Any:
    topic = w.topic(1, *range(16))
    given = {"startingOffsets": "earliest", "minOffsetsPerTrigger": 15, "maxTriggerDelay": "3s"}
    with w.running(w.stream(topic, **given)) as (query, batches):
        w.fill(topic, 1, *range(16, 22))
        w.come(query, batches, *range(22))
        return [len(batch) for batch in batches]


@scenario("limits", "a lower and an upper limit", "([8, 8], [8, 8, 7])")
def both(w: World) -> Any:
    topic = w.topic(1, *range(20))
    given = {"minOffsetsPerTrigger": 5, "maxOffsetsPerTrigger": 8, "maxTriggerDelay": "10m"}
    with w.running(w.stream(topic, startingOffsets="earliest", **given)) as (query, batches):
        w.come(query, batches, *range(16))
        time.sleep(1)
        first = [len(batch) for batch in batches]
        w.fill(topic, 1, *range(20, 23))
        w.come(query, batches, *range(23))
        return first, [len(batch) for batch in batches]


@scenario("limits", "minPartitions in a stream", "(True, 21)")
def min_partitions(w: World) -> Any:
    topic = w.topic(3)
    for p, values in enumerate((range(10), range(10, 20), [20])):
        w.topics.fill(topic, [b"%d" % v for v in values], p)
    found: list[tuple[bool, int]] = []

    def keep(batch: Any, _: int) -> None:
        found.append((batch.rdd.getNumPartitions() >= 6, batch.count()))

    frame = w.stream(topic, startingOffsets="earliest", minPartitions=6)
    with w.running(frame, keep=keep):
        return found[0]


for value in ("a", "1.0", "0", "-1"):

    @scenario("limits", f"minPartitions={value} is refused", "('refused', 'refused')")
    def illegal(w: World, value: str = value) -> Any:
        topic = w.topic(1, 0)
        given = {"startingOffsets": "earliest", "minPartitions": value}
        return (
            w.refused(lambda: w.values(w.read(topic, **given))),
            w.refused(lambda: w.drained(w.stream(topic, **given))),
        )


@scenario("limits", "rows of input in the progress", "3")
def input_rows(w: World) -> Any:
    topic = w.topic(3, 0)
    with w.running(w.stream(topic)) as (query, batches):
        w.fill(topic, 3, 1, 2, 3)
        w.come(query, batches, 1, 2, 3)
        # A micro-batch whose frame is used once counts its rows once.
        return sum(p["numInputRows"] for p in query.recentProgress)


def progress(w: World, **options: Any) -> list[dict[str, float]]:
    """How far behind the stream was after each of its micro-batches with rows."""
    topic = w.topic(2, *range(10))
    query = (
        w.stream(topic, startingOffsets="earliest", **options)
        .writeStream.format("noop")
        .option("checkpointLocation", w.checkpoint())
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(LIMIT_S)
    found = [p["sources"][0]["metrics"] for p in query.recentProgress if p["numInputRows"]]
    return [{name: float(metrics[name]) for name in BEHIND} for metrics in found]


@scenario("limits", "a limited stream says how far behind it is", "(3.0, 3.0, 3.0)")
def behind(w: World) -> Any:
    first = progress(w, maxOffsetsPerTrigger=5)[0]
    return tuple(first[name] for name in BEHIND)


@scenario("limits", "a stream without a limit is not behind", "(0.0, 0.0, 0.0)")
def not_behind(w: World) -> Any:
    return tuple(progress(w)[-1][name] for name in BEHIND)


def time_of_nanoseconds(w: World) -> str:
    """A topic with a record whose producer wrote nanoseconds for milliseconds."""
    topic = w.topic(1, retention_ms=-1, message_timestamp_after_max_ms=2**63 - 1)
    w.topics.fill(topic, [b"v"], timestamp_ms=1_712_345_678_123_456_789)
    return topic


@scenario("limits", "a record's time that no timestamp can hold", "('refused', 'refused')")
def overflowing(w: World) -> Any:
    topic = time_of_nanoseconds(w)
    return (
        w.refused(lambda: w.read(topic).collect()),
        w.refused(lambda: w.drain(w.stream(topic, startingOffsets="earliest").select("timestamp")
                                  .selectExpr("CAST(timestamp AS STRING) AS value"))),
    )  # fmt: skip


CASES = {
    "kafkaConsumer.pollTimeoutMs": 11111,
    "fetchOffset.numRetries": 5,
    "fetchOffset.retryIntervalMs": 100,
    "maxOffsetsPerTrigger": 1111,
    "minOffsetsPerTrigger": 1,
    "maxTriggerDelay": "1s",
}

for how in ("upper", "lower"):

    @scenario("options", f"all options in {how} case", "(['0'], ['0'])")
    def cases(w: World, how: str = how) -> Any:
        topic = w.topic(1, 0)
        given = {getattr(name, how)(): value for name, value in CASES.items()}
        given[getattr("startingOffsets", how)()] = "earliest"
        return w.values(w.read(topic, **given)), w.drained(w.stream(topic, **given))
