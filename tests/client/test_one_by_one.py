"""Consuming one record at a time from the only partition: the short way of a poll, where it ends,
and how long a poll looks again."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import kdirect
from kdirect.client import connect
from kdirect.errors import CorruptBatchError, UnknownTopicError
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)


@pytest.fixture
def alone(broker):
    """(broker, producer, a consumer of t-0 alone)."""
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1, configs={"segment.bytes": str(64 << 10)})
    with (
        session.producer() as producer,
        kdirect.Consumer(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        ) as consumer,
    ):
        consumer.assign({TP: 0})
        yield broker, producer, consumer


def test_each_committed_record_is_the_next_poll_and_two_reads(alone, seed):
    _, producer, consumer = alone
    rng = random.Random(seed)
    for _ in range(3):
        assert consumer.poll(0) is None
    producer.produce_sync("t", b"first", None, partition=0)
    assert consumer.poll(5).value() == b"first"
    rolled = 0
    for i in range(1, 400):
        value = rng.randbytes(rng.choice((0, 10, 900, 5000)))
        producer.produce_sync("t", value, None, partition=0)
        before = consumer.statistics()
        message = consumer.poll(5)
        assert (message.offset(), message.value()) == (i, value)
        assert consumer.position(TP) == i + 1
        after = consumer.statistics()
        if after["access_requests"] == before["access_requests"]:
            assert after["slot_reads"] - before["slot_reads"] == 1
            assert (
                1 <= after["reads"] - before["reads"] <= 2
            )  # a large batch: its first 2 KiB, and the rest
        else:
            rolled += 1
        assert consumer.poll(0) is None
        assert consumer.statistics()["slot_reads"] - after["slot_reads"] == 1
    assert rolled > 5, "the short way leads from file to file"


def test_what_changes_the_assignment_ends_the_short_way(alone):
    _, producer, consumer = alone
    for i in range(3):
        producer.produce_sync("t", b"%d" % i, None, partition=0)
    assert [consumer.poll(5).value() for _ in range(3)] == [b"0", b"1", b"2"]
    consumer.pause([TP])
    producer.produce_sync("t", b"3", None, partition=0)
    assert consumer.poll(0) is None
    assert consumer.poll(0.05) is None
    consumer.resume([TP])
    assert consumer.poll(5).value() == b"3"
    consumer.seek(TP, 1)
    assert [consumer.poll(5).value() for _ in range(3)] == [b"1", b"2", b"3"]
    consumer.assign({TP: 2})
    assert consumer.poll(5).value() == b"2"
    connect(consumer.settings).admin.create_topic("u", 1)
    producer.produce_sync("u", b"of u", None, partition=0)
    consumer.incremental_assign({TopicPartition("u", 0): 0})
    producer.produce_sync("t", b"4", None, partition=0)
    assert {consumer.poll(5).value() for _ in range(3)} == {b"3", b"4", b"of u"}
    consumer.incremental_unassign([TP])
    producer.produce_sync("t", b"5", None, partition=0)
    producer.produce_sync("u", b"again", None, partition=0)
    assert consumer.poll(5).value() == b"again"
    consumer.unassign()
    assert consumer.poll(0) is None


def test_errors_come_out_of_the_short_way_too(alone):
    broker, producer, consumer = alone
    for i in range(2):
        producer.produce_sync("t", b"x" * 100 + b"%d" % i, None, partition=0)
        assert consumer.poll(5).offset() == i
    producer.produce_sync("t", b"x" * 101, None, partition=0)
    (log,) = Path(broker.log_dirs[0], "t-0").glob("*.log")
    with open(log, "r+b") as file:
        at = file.read().rindex(b"x" * 101)
        os.pwrite(file.fileno(), b"y", at)
    with pytest.raises(CorruptBatchError, match="t-0"):
        consumer.poll(5)
    assert consumer.position(TP) == 2
    consumer.seek(TP, 3)
    producer.produce_sync("t", b"good", None, partition=0)
    assert consumer.poll(5).value() == b"good"
    connect(consumer.settings).admin.delete_topic("t")
    with pytest.raises(UnknownTopicError, match="t-0"):
        for _ in range(200):
            consumer.poll(0.05)


@pytest.mark.parametrize(
    ("spin_us", "looks"),
    [(0, range(5, 200)), (500_000, range(1000, 10**9))],
    ids=["sleeps", "spins"],
)
def test_how_long_a_poll_looks_again_is_an_option(broker, spin_us, looks):
    session = connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    session.admin.create_topic("t", 1)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "poll.spin.us": spin_us,
    }
    with session.producer() as producer, kdirect.Consumer(settings) as consumer:
        consumer.assign({TP: 0})
        producer.produce_sync("t", b"a", None, partition=0)
        assert consumer.poll(5).value() == b"a"
        before = consumer.statistics()["slot_reads"]
        assert consumer.poll(0.3) is None
        assert consumer.statistics()["slot_reads"] - before in looks
        producer.produce_sync("t", b"b", None, partition=0)
        assert consumer.poll(5).value() == b"b"
