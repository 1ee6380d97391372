"""What Kafka's own tests of its consumer and producer ask of a broker, with Java's clients of 4.1
and both protocols of groups: each scenario is played to Apache Kafka and to our broker.

The scenarios are those of PlaintextConsumerFetchTest, -CommitTest, -SubscriptionTest, -AssignTest
and PlaintextConsumerTest, of PlaintextProducerSendTest, ProducerFailureHandlingTest,
ProducerCompressionTest and ProducerSendWhileDeletionTest, told anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from tests.java.both import SYSTEMS, broker_of, fresh
from tests.support import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.parametrize("java", ["4.1.0"], indirect=True),
]
PROPERTIES = {
    "auto.create.topics.enable": "true",
    "group.initial.rebalance.delay.ms": "0",
    "message.max.bytes": "15000",
    "offsets.topic.num.partitions": "1",
}
FIRST = 1 << 40  # the time of a first record, long ago; py4j makes a Long of it
PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


@pytest.fixture(scope="module", params=SYSTEMS)
def servers(
    request: pytest.FixtureRequest,
    broker_jars: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The address of a broker that all scenarios share."""
    with broker_of(request.param, PROPERTIES, tmp_path_factory.mktemp("kafka")) as address:
        yield address


@pytest.fixture
def admin(java: Any, servers: str) -> Iterator[Any]:
    made = java.admin(servers)
    yield made
    made.close(java.milliseconds(1000))


@pytest.fixture
def topic(java: Any, admin: Any) -> Callable[..., str]:
    """``topic(partitions, property=value, ...)``: a new one, which the broker knows."""

    def make(partitions: int = 1, name: str = "", **configs: Any) -> str:
        name = name or fresh()
        new = java.kafka.clients.admin.NewTopic(name, partitions, 1)
        values = {"retention_ms": -1, **configs}
        new.configs({k.replace("_", "."): str(v) for k, v in values.items()})
        java.get(admin.createTopics([new]).all())
        wait_until(
            lambda: thrown(lambda: java.get(admin.describeTopics([name]).allTopicNames())) is None,
            "the topic",
        )
        return name

    return make


@pytest.fixture
def consumer(java: Any, servers: str) -> Iterator[Callable[..., Any]]:
    """``consumer(protocol, setting=value, ...)``: one of a group of its own unless it is named."""
    made: list[Any] = []

    def make(protocol: str, **settings: Any) -> Any:
        values = {"group_id": fresh("g"), "enable_auto_commit": "false", **settings}
        made.append(java.consumer(servers, group_protocol=protocol, **values))
        return made[-1]

    yield make
    for one in made:
        one.close()


def thrown(call: Callable[[], Any]) -> Any:
    """The Java exception of a call, that of a future without its wrapping; None."""
    try:
        call()
    except Py4JJavaError as e:
        found = e.java_exception
        while found.getClass().getSimpleName() == "ExecutionException":
            found = found.getCause()
        return found
    return None


def error(call: Callable[[], Any]) -> str:
    """The class of what a call throws; an empty text."""
    found = thrown(call)
    return "" if found is None else str(found.getClass().getSimpleName())


def read(java: Any, consumer: Any, count: int) -> list[Any]:
    """Records, at least so many, in the order in which they come."""
    found: list[Any] = []
    wait_until(lambda: found.extend(java.poll(consumer)) or len(found) >= count, "the records")
    return found


def offsets(java: Any, consumer: Any, count: int) -> list[int]:
    return [int(r.offset()) for r in read(java, consumer, count)]


def fill(java: Any, servers: str, name: str, values: list[str], **settings: Any) -> None:
    """Values for partition 0, the n-th with the time FIRST + n."""
    producer = java.producer(servers, **settings)
    make = java.kafka.clients.producer.ProducerRecord
    futures = [producer.send(make(name, 0, FIRST + n, f"k{n}", v)) for n, v in enumerate(values)]
    producer.flush()
    for future in futures:
        java.get(future)
    producer.close()


# -- the consumer ----------------------------------------------------------------------------------
@PROTOCOLS
def test_places_that_are_not_in_the_log(java, servers, topic, consumer, protocol):
    """testFetchInvalidOffset, testFetchOutOfRangeOffsetResetConfigEarliest and -Latest."""
    name = topic()
    tp, long = java.partition(name, 0), java.milliseconds(15000)
    fill(java, servers, name, ["a", "b"])
    strict = consumer(protocol, auto_offset_reset="none")
    strict.assign([tp])
    assert error(lambda: strict.poll(long)) == "NoOffsetForPartitionException"
    strict.seek(tp, 3)
    refused = thrown(lambda: strict.poll(long))
    assert refused.getClass().getSimpleName() == "OffsetOutOfRangeException"
    assert dict(refused.offsetOutOfRangePartitions()) == {tp: 3}
    for reset, place in (("earliest", 0), ("latest", 2)):
        lenient = consumer(protocol, auto_offset_reset=reset, fetch_max_wait_ms=0)
        lenient.assign([tp])
        lenient.seek(tp, 17)
        if reset == "latest":
            wait_until(
                lambda c=lenient: not list(java.poll(c)) and c.position(tp) == 2, "the reset"
            )
            fill(java, servers, name, ["c"])
        assert offsets(java, lenient, 1)[0] == place


@PROTOCOLS
def test_records_larger_than_a_fetch(java, servers, topic, consumer, protocol):
    """testFetchRecordLargerThanFetchMaxBytes, -MaxPartitionFetchBytes, testFetchHonoursFetchSize...
    and testLowMaxFetchSizeForRequestAndPartition."""
    name = topic()
    small, large = "s", "L" * 12000
    fill(java, servers, name, [small, large, small], batch_size=0)
    for settings in ({"fetch_max_bytes": 10000}, {"max_partition_fetch_bytes": 100}):
        one = consumer(protocol, **settings)
        one.assign([java.partition(name, 0)])
        found = read(java, one, 3)
        assert [r.value() for r in found] == [small, large, small]
        assert [r.offset() for r in found] == [0, 1, 2]


@PROTOCOLS
def test_commits(java, servers, topic, consumer, protocol):
    """testCommitMetadata, testCommitSpecifiedOffsets, testPositionAndCommit,
    testAutoCommitOnClose."""
    name, group = topic(2), fresh("g")
    tps = [java.partition(name, i) for i in range(2)]
    fill(java, servers, name, list("abcde"))
    place, optional = java.kafka.clients.consumer.OffsetAndMetadata, java.gateway.jvm.java.util
    one = consumer(protocol, group_id=group)
    one.assign(tps)
    assert set(dict(one.committed(set(tps))).values()) == {None}
    told = place(3, optional.Optional.of(0), "foo")
    one.commitSync({tps[0]: told})
    assert one.committed({tps[0]})[tps[0]].equals(told)
    one.commitSync({tps[0]: place(4, None)})
    assert one.committed({tps[0]})[tps[0]].metadata() == ""
    assert one.position(tps[0]) == 4, "an assigned partition begins where its group is"
    assert offsets(java, one, 1) == [4] and one.position(tps[0]) == 5
    one.commitSync()
    assert one.committed({tps[0]})[tps[0]].offset() == 5
    assert one.committed({tps[1]})[tps[1]].offset() == 0
    far = java.partition(name, 9)
    one.commitSync({tps[0]: place(2)})
    assert error(
        lambda: one.commitSync({far: place(1)}, java.milliseconds(2000))
    ) in ("TimeoutException", "UnknownTopicOrPartitionException")  # fmt: skip
    one.close()
    last = consumer(protocol, group_id=group, enable_auto_commit="true")
    last.subscribe([name])
    assert offsets(java, last, 3) == [2, 3, 4]
    last.seek(tps[0], 1)
    last.seek(tps[1], 0)
    last.close()
    after = consumer(protocol, group_id=group)
    assert after.committed({tps[0]})[tps[0]].offset() == 1


@PROTOCOLS
def test_subscriptions_by_an_expression(java, servers, topic, consumer, protocol):
    """testPatternSubscription, testSubsequentPatternSubscription, testPatternUnsubscription, and
    with the newer protocol testRe2JPatternSubscription."""
    stem = fresh("p")
    topic(2, f"{stem}-a")
    topic(1, f"{stem}-b")
    one = consumer(protocol, metadata_max_age_ms=100)
    kinds = [java.gateway.jvm.java.util.regex.Pattern.compile]
    if protocol == "consumer":
        kinds.append(java.kafka.clients.consumer.SubscriptionPattern)

    def has(*wanted: str) -> bool:
        list(java.poll(one))
        return sorted(f"{tp}"[len(stem) + 1 :] for tp in java.list(one.assignment())) == [*wanted]

    for number, kind in enumerate(kinds):
        one.subscribe(kind(f"{stem}-.*"))
        more = [f"later{i}-0" for i in range(number)]
        wait_until(lambda m=more: has("a-0", "a-1", "b-0", *m), "its partitions")
        topic(1, f"{stem}-later{number}")
        more.append(f"later{number}-0")
        wait_until(lambda m=more: has("a-0", "a-1", "b-0", *m), "those of a new topic")
        one.subscribe(kind(f"{stem}-[b]"))
        wait_until(lambda: has("b-0"), "less")
        one.unsubscribe()
        assert one.assignment().size() == 0


@PROTOCOLS
def test_names_that_no_topic_has(java, topic, consumer, protocol):
    """testSubscribeInvalidTopicCanUnsubscribe, testConsumeMessagesWithNonExistentTopic: a bad name
    is told, and does not hold up the consumer's end."""
    one = consumer(protocol)
    one.subscribe(["topic abc"])
    seen: list[str] = []

    def told() -> bool:
        seen.append(error(lambda: one.poll(java.milliseconds(200))))
        return seen[-1] == "InvalidTopicException"

    wait_until(told, lambda: str(seen))
    one.unsubscribe()
    one.close()
    name = topic()
    other = consumer(protocol)
    other.subscribe([name])
    wait_until(lambda: not list(java.poll(other)) and other.assignment().size() == 1, "it goes on")


@PROTOCOLS
def test_lookups(java, servers, topic, consumer, protocol):
    """testOffsetsForTimes, testPartitionsFor, testListTopics, testSeek with compressed batches,
    testPartitionPauseAndResume."""
    name = topic(3)
    tps = [java.partition(name, i) for i in range(3)]
    fill(java, servers, name, [f"v{i}" for i in range(50)], compression_type="gzip", linger_ms=100)
    one = consumer(protocol)
    assert sorted(p.partition() for p in one.partitionsFor(name)) == [0, 1, 2]
    assert one.listTopics()[name].size() == 3
    found = one.offsetsForTimes({tps[0]: FIRST + 20, tps[1]: FIRST})
    assert (found[tps[0]].offset(), found[tps[0]].timestamp()) == (20, FIRST + 20)
    assert found[tps[1]] is None
    assert [one.beginningOffsets(tps)[tp] for tp in tps] == [0, 0, 0]
    assert [one.endOffsets(tps)[tp] for tp in tps] == [50, 0, 0]
    one.assign(tps)
    for place in (25, 49, 0):
        one.seek(tps[0], place)
        assert one.position(tps[0]) == place
        found = read(java, one, 1)
        assert (found[0].offset(), found[0].value()) == (place, f"v{place}")
    one.seekToEnd([tps[0]])
    assert one.position(tps[0]) == 50 and not list(java.poll(one))
    one.pause([tps[0]])
    fill(java, servers, name, ["more"])
    assert not list(java.poll(one)) and [str(tp) for tp in one.paused()] == [str(tps[0])]
    one.resume([tps[0]])
    assert [r.value() for r in read(java, one, 1)] == ["more"]
    assert one.currentLag(tps[0]).getAsLong() == 0


@PROTOCOLS
def test_a_static_member_that_comes_twice(java, servers, topic, consumer, protocol):
    """testStaticConsumerDetectsNewPartitionCreatedAfterRestart; and who is fenced by whom."""
    name, group = topic(1), fresh("g")
    settings = {"group_id": group, "group_instance_id": "i", "metadata_max_age_ms": 200}
    first = consumer(protocol, **settings)
    first.subscribe([name])
    wait_until(lambda: not list(java.poll(first)) and first.assignment().size() == 1, "it joins")
    second = consumer(protocol, **settings)
    second.subscribe([name])
    newer, older = (second, first) if protocol == "classic" else (first, second)
    refused = "FencedInstanceIdException"
    if protocol == "consumer":
        refused = "UnreleasedInstanceIdException"
    seen: list[str] = []

    def fenced() -> bool:
        list(java.poll(newer))
        seen.append(error(lambda: older.poll(java.milliseconds(200))))
        return seen[-1] == refused

    wait_until(fenced, lambda: str(seen))
    more = java.kafka.clients.admin.NewPartitions.increaseTo(2)
    with_admin = java.admin(servers)
    java.get(with_admin.createPartitions({name: more}).all())
    with_admin.close(java.milliseconds(1000))
    wait_until(lambda: not list(java.poll(newer)) and newer.assignment().size() == 2, "it grows")


# -- the producer ----------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_what_a_send_returns(java, servers, topic, consumer, kind, codec):
    """testSendOffset, testSendCompressedMessageWithCreateTime and -LogAppendTime,
    testCompression: offsets, times and sizes of records; headers, no key, no value."""
    name = topic(message_timestamp_type=kind)
    before = int(time.time() * 1000) - 2000
    producer = java.producer(servers, compression_type=codec, linger_ms=50)
    make, value = java.kafka.clients.producer.ProducerRecord, "v" * 500
    headers = java.gateway.jvm.java.util.ArrayList()
    header = java.kafka.common.header.internals.RecordHeader
    headers.add(header("h", b"\x00\xff"))
    headers.add(header("none", None))
    sent = [producer.send(make(name, 0, FIRST + n, f"k{n}", value)) for n in range(20)]
    sent.append(producer.send(make(name, 0, FIRST + 20, None, None, headers)))
    producer.flush()
    told = [java.get(future) for future in sent]
    assert [m.offset() for m in told] == list(range(21))
    assert (told[0].serializedKeySize(), told[0].serializedValueSize()) == (2, 500)
    assert (told[20].serializedKeySize(), told[20].serializedValueSize()) == (-1, -1)
    times = [int(m.timestamp()) for m in told]
    one = consumer("classic")
    one.assign([java.partition(name, 0)])
    found = read(java, one, 21)
    assert [r.timestamp() for r in found] == times
    assert {str(r.timestampType()) for r in found} == {kind}
    if kind == "CreateTime":
        assert times == list(range(FIRST, FIRST + 21))
    else:
        assert all(t >= before for t in times)
    assert [r.value() for r in found] == [value] * 20 + [None]
    last = found[20].headers().toArray()
    assert [(h.key(), h.value()) for h in last] == [("h", b"\x00\xff"), ("none", None)]
    producer.close()


def test_sends_that_fail(java, servers, topic, admin):
    """testTooLargeRecordWithAckZero and -One, testNonExistentTopic, testSendToPartition...,
    testInvalidPartition, testSendWithInvalidBeforeAndAfterTimestamp,
    testCannotSendToInternalTopic, and a record without a key for a compacted topic."""
    name, plain = topic(), java.kafka.clients.producer.ProducerRecord
    large = "L" * 15001

    def result(what: Any, **settings: Any) -> str:
        producer = java.producer(servers, max_block_ms=1500, **settings)
        failed = error(lambda: java.get(producer.send(what)))
        producer.close()
        return failed

    for acks in ("1", "all"):
        assert result(plain(name, 0, "k", large), acks=acks) == "RecordTooLargeException"
    unasked = java.producer(servers, acks="0")
    answer = java.get(unasked.send(plain(name, 0, "k", large)))
    assert (answer.offset(), answer.hasOffset()) == (-1, False)
    unasked.close()
    assert result(plain("a b", None, "k", "v")) == "InvalidTopicException"
    assert result(plain(name, 1, "k", "v")) == "TimeoutException", "no such partition"
    more = java.kafka.clients.admin.NewPartitions.increaseTo(2)
    java.get(admin.createPartitions({name: more}).all())
    wait_until(lambda: result(plain(name, 1, "k", "v")) == "", "the partition")
    hour, now = 3_600_000, int(time.time() * 1000)
    strict = topic(message_timestamp_before_max_ms=hour, message_timestamp_after_max_ms=hour)
    for at, what in (
        (now - 2 * hour, "InvalidTimestampException"),
        (now + 2 * hour, "InvalidTimestampException"),
        (now, ""),
    ):
        for codec in ("none", "gzip"):
            assert result(plain(strict, 0, at, "k", "v"), compression_type=codec) == what
    kept = topic(cleanup_policy="compact")
    assert result(plain(kept, 0, None, "v")) == "InvalidRecordException"
    assert result(plain("__consumer_offsets", 0, "k", "v")) in (
        "InvalidTopicException",
        "TimeoutException",  # nobody has made it yet
    )


def test_a_topic_that_is_deleted_and_made_again_under_a_producer(java, servers, topic, admin):
    """testSendWithRecreatedTopic, testSendWithTopicDeletionMidWay: with a new id the log begins
    anew, and the producer's sequence with it; a topic that is missing is made on demand."""
    name, plain = topic(), java.kafka.clients.producer.ProducerRecord
    producer = java.producer(servers, max_block_ms=10000)

    def send() -> int:
        return int(java.get(producer.send(plain(name, 0, "k", "v"))).offset())

    def gone() -> bool:
        return name not in java.get(admin.listTopics().names())

    assert [send() for _ in range(10)] == list(range(10))
    java.get(admin.deleteTopics([name]).all())
    wait_until(gone, "the end of the topic")
    topic(1, name)
    assert send() == 0
    java.get(admin.deleteTopics([name]).all())
    wait_until(gone, "the end of the topic")
    assert send() == 0, "it was made on demand"
    producer.close()
