"""Where queries start and end, relative to the end of a log, to now, and topic by topic."""

from __future__ import annotations

import json
import time

import pytest

from kdirect.errors import ConfigError
from kdirect.model import TopicPartition
from kdirect_spark import limits
from kdirect_spark.limits import Ago, FromEnd, PerTopic, offset_limit, time_limit
from kdirect_spark.offsets import AtOffsets, AtTimes, Earliest, Latest

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
WATERMARKS = {A0: (10, 2000), A1: (0, 5), B0: (7, 90)}


@pytest.mark.parametrize(
    ("text", "limit", "starts"),
    [
        ("-1000", FromEnd(1000), {A0: 1000, A1: 0, B0: 7}),
        (" -1", FromEnd(1), {A0: 1999, A1: 4, B0: 89}),
        ("Earliest", Earliest(), {A0: 10, A1: 0, B0: 7}),
        (
            '{"a":"earliest","b":{"0":8}}',
            PerTopic((("a", Earliest()),), AtOffsets(((B0, 8),))),
            {A0: 10, A1: 0, B0: 8},
        ),
        (
            '{"a":-4,"b":"LATEST"}',
            PerTopic((("a", FromEnd(4)), ("b", Latest())), AtOffsets(())),
            {A0: 1996, A1: 1, B0: 90},
        ),
        (
            '{"a":{"0":-2,"1":3},"b":{"0":-1}}',
            AtOffsets(((A0, -2), (A1, 3), (B0, -1))),
            {A0: 10, A1: 3, B0: 90},
        ),
    ],
)
def test_offsets_by_topic_and_from_the_end(text, limit, starts):
    assert offset_limit(text, "startingOffsets") == limit
    assert limits.resolve(limit, "startingOffsets", list(WATERMARKS), WATERMARKS) == starts


def test_which_limits_move_and_name():
    moving = ["latest", "-5", '{"a":-5}', '{"a":"latest"}', '{"a":"earliest","b":{"0":-1}}']
    still = ["earliest", '{"a":"earliest"}', '{"a":"earliest","b":{"0":4}}']
    for text in moving:
        assert limits.moves(offset_limit(text, "x"))
    for text in still:
        assert not limits.moves(offset_limit(text, "x"))
    assert limits.moves(Ago(5))
    assert limits.named_offsets(offset_limit(still[-1], "x")) == {B0}
    assert limits.named_offsets(FromEnd(1)) == limits.named_offsets(Ago(1)) == frozenset()
    assert limits.has(offset_limit('{"a":"latest"}', "x"), Latest)
    assert limits.has(offset_limit('{"a":"earliest","b":{"0":-2}}', "x"), Earliest)
    assert not limits.has(offset_limit('{"a":"earliest"}', "x"), Latest)
    assert not limits.has(FromEnd(3), Earliest)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":"first"}', "topic a has 'first'"),
        ('{"a":5}', "topic a has 5"),
        ('{"a":true}', "topic a holds True instead of partitions"),
        ('{"a":"earliest","a":{"0":1}}', "'a' occurs twice"),
        ('{"a":"earliest","b":{"0":-3}}', "b-0 has -3"),
        ("-0", "0 is not a number of offsets before the end"),
        ("-9999999999999999999", "is not a number of offsets before the end"),
        ("5", "'5' is not allowed"),
        ("- 5", "is not allowed"),
    ],
)
def test_texts_that_are_no_limit(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        offset_limit(text, "startingOffsets")
    assert "startingOffsets" in str(caught.value)


def test_topics_must_be_those_that_are_read():
    limit = offset_limit('{"c":"earliest","a":"earliest","b":"earliest"}', "startingOffsets")
    with pytest.raises(ConfigError, match="names topic c, which is not read"):
        limits.resolve(limit, "startingOffsets", list(WATERMARKS), WATERMARKS)
    limit = offset_limit('{"a":"earliest"}', "startingOffsets")
    with pytest.raises(ConfigError, match="lacks b-0"):
        limits.resolve(limit, "startingOffsets", list(WATERMARKS), WATERMARKS)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("-10 minutes", 600_000), ("-10min", 600_000), ("-1 second", 1000), ("-90s", 90_000),
        ("-2h", 7_200_000), ("- 3 Days", 259_200_000), ("-1 week", 604_800_000), ("-5ms", 5),
    ],
)  # fmt: skip
def test_spans_before_now(text, ms):
    assert time_limit(text, "x", strict=None) == Ago(ms)
    assert time_limit(text, "x", strict=True) == Ago(ms, strict=True)
    assert limits.resolved(Ago(ms, True), 10**12) == AtTimes(everywhere=10**12 - ms, strict=True)
    assert limits.resolved(Ago(10**13), 10**12) == AtTimes(everywhere=0)


def test_times_stay_times():
    assert time_limit("1700000000000", "x", strict=None) == AtTimes((), 1700000000000, strict=True)
    assert time_limit("5", "x", strict=False) == AtTimes((), 5)
    assert limits.resolved(Latest(), 5) == Latest()
    for text in ("-5", "10 minutes", "-10 fortnights", "yesterday", str(2**63), ""):
        with pytest.raises(ConfigError, match=r"option x: .* is neither a time"):
            time_limit(text, "x", strict=None)


def spans(df) -> dict[int, tuple[int, int]]:
    rows = df.groupBy("partition").agg({"offset": "min", "topic": "count"}).collect()
    return {r["partition"]: (r["min(offset)"], r["count(topic)"]) for r in rows}


@pytest.mark.spark
def test_a_batch_of_the_last_records(read, topics):
    name, other = topics.create(2), topics.create(1)
    now = int(time.time() * 1000)
    topics.fill(name, [b"v"] * 50, 0, timestamp_ms=lambda i: now - 3_600_000 * (50 - i))
    topics.fill(name, [b"v"] * 3, 1, timestamp_ms=now - 86_400_000)
    topics.fill(other, [b"v"] * 7, 0)
    assert spans(read(name, startingOffsets="-10")) == {0: (40, 10), 1: (0, 3)}
    assert spans(read(name, endingOffsets="-2")) == {0: (0, 48), 1: (0, 1)}
    assert spans(read(name, startingTimestamp="-150 minutes")) == {0: (48, 2)}
    assert spans(read(name, startingTimestamp="-270 minutes", endingTimestamp="-90 minutes")) == {
        0: (46, 3)
    }
    starting = json.dumps({name: "earliest", other: -2})
    assert read(f"{name},{other}", startingOffsets=starting).count() == 55
    with pytest.raises(Exception, match="has no record at"):
        read(
            name, startingTimestamp="-150 minutes", startingOffsetsByTimestampStrategy="error"
        ).collect()


@pytest.mark.spark
def test_a_stream_from_the_last_records(spark, read_stream, topics, tmp_path):
    name = topics.create(1)
    topics.fill(name, [b"%d" % i for i in range(20)])

    def run() -> list[int]:
        found: list[int] = []
        query = (
            read_stream(name, startingOffsets="-5").writeStream
            .foreachBatch(lambda df, _: found.extend(int(r.value) for r in df.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(120)
        return found

    assert run() == [15, 16, 17, 18, 19]
    topics.fill(name, [b"20"])
    assert run() == [20], "a checkpoint goes on where it stopped"
