"""Where streams start and how they go on: the scenarios of KafkaSourceSuiteBase.

Each start is tried by `assign`, `subscribe` and `subscribePattern`.  The query is stopped, records
are added, it is started again, and then again with more partitions.
"""

from __future__ import annotations

import json
from typing import Any

from tests.parity.relation import MS, at
from tests.parity.scenario import scenario
from tests.parity.world import LIMIT_S, World

# What the five partitions have from the first second, and from the second one.
FIRST = (["-20"], ["-10"], ["0", "1"], ["10", "11"], ["20", "21", "22"])
SECOND = (["-21", "-22"], ["-11", "-12"], ["2"], ["12"], [])
LATER = ["23", "24"]  # also of the second second, in the last partition
HOW = ("assign", "subscribe", "subscribePattern")
TIMES = (MS + 1000,) * 4 + (MS,)

STARTS: dict[str, list[str]] = {
    "earliest": [v for values in (*FIRST, *SECOND) for v in values],
    "latest": [],
    "given offsets": ["-20", "-21", "-22", "0", "1", "2", "11", "12", "22"],
    "times of partitions": [v for values in SECOND for v in values] + ["20", "21", "22"],
    "one time": [v for values in SECOND for v in values] + LATER,
}


def dated(w: World) -> str:
    topic = w.topic(5, retention_ms=-1)
    for stamp, partitions in ((MS, FIRST), (MS + 1000, SECOND)):
        for p, values in enumerate(partitions):
            if values:
                w.topics.fill(topic, [v.encode() for v in values], p, timestamp_ms=stamp)
    return topic


def source(w: World, how: str, topic: str, **options: Any) -> Any:
    named = {
        "assign": json.dumps({topic: list(range(5))}),
        "subscribe": topic,
        "subscribePattern": f"{topic}.*",
    }
    return w.stream(**{how: named[how]}, **options)


def begin(start: str, topic: str) -> dict[str, Any]:
    """The options of a start."""
    if start == "given offsets":
        return {"startingOffsets": at(topic, -2, -1, 0, 1, 2)}
    if start == "times of partitions":
        return {"startingOffsetsByTimestamp": at(topic, *TIMES)}
    if start == "one time":
        return {"startingTimestamp": MS + 1000}
    return {"startingOffsets": start}


for how in HOW:
    for start, values in STARTS.items():
        # Both values of failOnDataLoss for one way, since nothing is lost here.
        for strict in (True, False) if how == "subscribe" else (True,):
            more = [] if how == "assign" else ["40"]
            name = f"{how} from {start}" + ("" if strict else ", failOnDataLoss=false")

            @scenario("start", name, repr((sorted(values), ["30", "31", "32"], more)))
            def life(w: World, how: str = how, start: str = start, strict: bool = strict) -> Any:
                topic, checkpoint = dated(w), w.checkpoint()
                if start == "one time":
                    w.topics.fill(topic, [v.encode() for v in LATER], 4, timestamp_ms=MS + 1000)
                given = begin(start, topic) | {"failOnDataLoss": strict}

                def drained() -> list[str]:
                    return w.drained(source(w, how, topic, **given), checkpoint)

                first = drained()
                w.topics.fill(topic, [b"30", b"31", b"32"])
                second = drained()
                w.topics.add_partitions(topic, 7)
                w.topics.fill(topic, [b"40"], 6)
                return first, second, drained()


EVERY = sorted(v for values in SECOND for v in values)

for how in ("subscribe", "subscribePattern"):
    for option in ("startingTimestamp", "startingOffsetsByTimestamp"):

        @scenario(
            "start",
            f"{how} with {option} after all records of a partition",
            repr(("refused", "refused", EVERY, ["25"])),
        )
        def unmatched(w: World, how: str = how, option: str = option) -> Any:
            topic, checkpoint = dated(w), w.checkpoint()
            times = at(topic, *(MS + 1000,) * 5) if "Offsets" in option else MS + 1000

            def drained(strategy: str | None, checkpoint: str | None = None) -> list[str]:
                given = {"startingOffsetsByTimestampStrategy": strategy} if strategy else {}
                return w.drained(source(w, how, topic, **{option: times}, **given), checkpoint)

            refused = [w.refused(lambda s=s: drained(s)) for s in (None, "error")]
            first = drained("latest", checkpoint)
            w.topics.fill(topic, [b"25"], 4)
            return *refused, first, drained("latest", checkpoint)


@scenario("start", "each topic has its own start, by one word", "'refused'")
def by_word(w: World) -> Any:
    one, two = w.topic(2, 0, 1), w.topic(2, 2, 3)
    given = {"startingOffsets": json.dumps({one: "earliest", two: "latest"})}
    return w.refused(lambda: w.drained(w.stream(f"{one},{two}", **given)))


@scenario("start", "a stream that stopped before a record came goes on from there", "[['1']]")
def stopped_early(w: World) -> Any:
    topic, checkpoint = w.topic(2, 0), w.checkpoint()
    with w.running(w.stream(topic), checkpoint):
        pass
    w.fill(topic, 1, 1)
    with w.running(w.stream(topic), checkpoint) as (query, batches):
        w.come(query, batches, 1)
        return batches


@scenario("start", "words of offsets in any case", "(['0', '1'], ['0', '1'])")
def words(w: World) -> Any:
    topic = w.topic(1, 0, 1)
    batch = w.read(topic, startingOffsets="earLiEst", endingOffsets="laTest")
    return w.values(batch), w.drained(w.stream(topic, startingOffsets="EARLIEST"))


@scenario("start", "columns of a stream", "[(None, b'1', 0, 0, 1700000000.0, 0, [('a', b'b')])]")
def columns(w: World) -> Any:
    topic = w.topic(1, retention_ms=-1)
    w.topics.fill(topic, [b"1"], headers=[("a", b"b")], timestamp_ms=MS)
    rows: list[Any] = []
    frame = w.stream(topic, startingOffsets="earliest", includeHeaders=True)

    def keep(batch: Any, _: int) -> None:
        found = batch.withColumn("seconds", batch.timestamp.cast("double")).collect()
        rows.extend(row for row in found if row.topic == topic)

    with w.running(frame, keep=keep):
        return [
            (
                row.key,
                bytes(row.value),
                row.partition,
                row.offset,
                row.seconds,
                row.timestampType,
                [(h.key, bytes(h.value)) for h in row.headers],
            )
            for row in rows
        ]


@scenario("start", "null keys and values in a stream", "[(None, None), (b'k', None), (None, b'v')]")
def nulls(w: World) -> Any:
    topic = w.topic(1)
    for key, value in ((None, None), (b"k", None), (None, b"v")):
        w.topics.fill(topic, [value], key=key)
    rows: list[Any] = []
    frame = w.stream(topic, startingOffsets="earliest", kafka__isolation__level="read_committed")
    with w.running(frame, keep=lambda batch, _: rows.extend(batch.orderBy("offset").collect())):
        return [tuple(None if x is None else bytes(x) for x in (r.key, r.value)) for r in rows]


@scenario("start", "a windowed aggregation by the record's time", "[(1700000000.0, 2)]")
def watermark(w: World) -> Any:
    from pyspark.sql import functions as F

    topic = w.topic(1, retention_ms=-1)
    w.topics.fill(topic, [b"0", b"1"], timestamp_ms=lambda i: MS + 1000 * i)
    counts = (
        w.stream(topic, startingOffsets="earliest")
        .withWatermark("timestamp", "10 seconds")
        .groupBy(F.window("timestamp", "5 seconds").alias("w"))
        .count()
        .select(F.col("w.start").cast("double").alias("start"), "count")
    )
    rows: list[Any] = []
    query = (
        counts.writeStream.outputMode("complete")
        .foreachBatch(lambda batch, _: rows.extend((r[0], r[1]) for r in batch.collect()))
        .option("checkpointLocation", w.checkpoint())
        .start()
    )
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return rows


@scenario("start", "a stream joined with itself, and the offsets in the log",
          "(2, [('1', '1'), ('1', '6'), ('2', '2'), ('6', '1'), ('6', '6')])")  # fmt: skip
def self_join(w: World) -> Any:
    from pathlib import Path

    topic, checkpoint = w.topic(2, 1, 2, 6), w.checkpoint()
    frame = w.stream(topic, startingOffsets="earliest").selectExpr(
        "CAST(value AS STRING) AS v", "CAST(CAST(value AS STRING) AS INT) % 5 AS k"
    )
    pairs: list[Any] = []
    joined = frame.join(frame, "k").toDF("k", "v", "other")
    query = (
        joined.writeStream.foreachBatch(
            lambda batch, _: pairs.extend((r.v, r.other) for r in batch.collect())
        )
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(LIMIT_S), "the query did not end"
    finally:
        query.stop()
    logged = (Path(checkpoint) / "offsets/0").read_text().splitlines()
    return len(logged) - 2, sorted(pairs)  # below the version and the line of watermark and confs
