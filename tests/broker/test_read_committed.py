"""What a broker tells readers of transactions, whose coordinator is played by the test: it
verifies, and writes markers."""

from __future__ import annotations

import threading
import time
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker import played_coordinator
from tests.broker.played_coordinator import TP, Coordinator
from tests.log.conftest import make_batch
from tests.support import wait_until


def values(broker, count: int, isolation: str) -> list[str]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": isolation,
            "isolation.level": isolation,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    out: list[str] = []
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error():
                assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
                break
            out.append(message.value().decode())
    finally:
        consumer.close()
    assert len(out) == count, out
    return out


def test_a_transaction_that_hangs_is_counted(broker, monkeypatch):
    """Five minutes after the longest that a transaction may take (KIP-664)."""
    c = Coordinator(broker)
    longest_ms = broker.server.config["transaction.max.timeout.ms"] + 300_000
    for producer, age_ms in ((1, longest_ms + 60_000), (2, longest_ms - 60_000)):
        monkeypatch.setattr(played_coordinator, "NOW", int(time.time() * 1000) - age_ms)
        c.write(producer, "open")
    assert broker.statistics()["log_late_transactions"] == 1
    c.end(2, commit=True)
    assert broker.statistics()["log_late_transactions"] == 1
    c.end(1, commit=False)
    assert broker.statistics()["log_late_transactions"] == 0


def test_a_lookup_by_time_ends_at_the_last_stable_offset(broker, raw):
    """As in Kafka: a reader of committed records is told of none that it may not read yet."""
    c = Coordinator(broker)
    c.write(1, "plain", transactional=False)
    c.write(2, "open")
    connection = raw()

    def found(timestamp: int, committed: bool) -> int:
        request = build(
            p.ListOffsetsRequest,
            isolation_level=int(committed),
            topics=[{"name": "t", "partitions": [{"partition_index": 0, "timestamp": timestamp}]}],
        )
        (topic,) = connection.call(request, version=7).topics
        assert topic.partitions[0].error_code == 0
        return topic.partitions[0].offset

    newest, largest = c.partition.largest_timestamp()[1], -3
    assert found(0, committed=True) == found(0, committed=False) == 0
    c.partition.delete_records(1)
    assert [found(t, committed=False) for t in (0, newest, largest)] == [1, 1, 1]
    assert [found(t, committed=True) for t in (0, newest, largest)] == [-1, -1, -1]
    end = c.end(2, commit=True)
    assert [found(t, committed=True) for t in (0, newest)] == [1, 1] and end == 2


def fetch(raw, offset: int, version: int = 11, *, committed: bool = True, wait_ms: int = 0):
    one = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    request = build(
        p.FetchRequest,
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=int(committed),
        session_id=0,
        session_epoch=-1,
        topics=[{"topic": "t", "partitions": [one]}],
    )
    (topic,) = raw.call(request, version=version).responses
    return topic.partitions[0]


def test_aborted_records_are_seen_by_no_reader_of_committed_ones(broker):
    c = Coordinator(broker)
    c.write(1, "a")
    c.write(2, "b")
    c.write(3, "plain", transactional=False)
    c.end(1, commit=False)
    c.write(1, "c")
    c.end(2, commit=True)
    c.end(1, commit=True)
    c.write(2, "open")
    assert values(broker, 3, "read_committed") == ["b", "plain", "c"]
    assert values(broker, 5, "read_uncommitted") == ["a", "b", "plain", "c", "open"]


@pytest.mark.parametrize("version", [4, 5, 11, 12])
def test_fetch_names_the_aborted_transactions(broker, raw, version):
    c = Coordinator(broker)
    connection = raw()
    first = c.write(1, "a")
    assert fetch(connection, 0, version).last_stable_offset == first
    assert fetch(connection, 0, version).aborted_transactions == []
    marker = c.end(1, commit=False)
    c.write(2, "b")
    got = fetch(connection, 0, version)
    assert (got.last_stable_offset, got.high_watermark) == (marker + 1, marker + 2)
    assert [(a.producer_id, a.first_offset) for a in got.aborted_transactions] == [(1, first)]
    assert fetch(connection, 0, version, committed=False).aborted_transactions is None
    assert fetch(connection, marker + 1, version).aborted_transactions == []
    latest = build(
        p.ListOffsetsRequest,
        isolation_level=1,
        topics=[{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}],
    )
    (topic,) = connection.call(latest, version=4).topics
    assert topic.partitions[0].offset == marker + 1


@pytest.mark.parametrize("version", [8, 9])
def test_an_open_transaction_takes_records_of_requests_that_name_it_only(broker, raw, version):
    """Who knows a producer's id, epoch and sequence is not its transaction's owner yet."""
    c = Coordinator(broker)
    c.write(1, "a")
    connection = raw()
    forged = make_batch(1, producer_id=1, producer_epoch=0, sequence=1, transactional=True)

    def produce(name: str | None, *, beside: str | None = None) -> int:
        rows = [{"index": 0, "records": forged}]
        others = [] if beside is None else [topic_of(beside, make_batch(1))]
        request = build(
            p.ProduceRequest,
            transactional_id=name,
            acks=-1,
            timeout_ms=1000,
            topic_data=[*others, {"name": "t", "partition_data": rows}],
        )
        topics = connection.call(request, version=version).responses
        (code,) = {x.error_code for topic in topics for x in topic.partition_responses}
        return code

    def topic_of(name: str, records: bytes) -> dict[str, Any]:
        return {"name": name, "partition_data": [{"index": 0, "records": records}]}

    client = confluent_admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    client.create_topics([confluent_admin.NewTopic("other", 1, 1)])["other"].result(10)
    assert produce(None, beside="other") == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    other = broker.server.logs.partitions[TopicPartition("other", 0)]
    assert other.log_end_offset == 0, "Kafka refuses the whole request"
    assert produce(None) == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert c.partition.log_end_offset == 1, "nothing was appended"
    assert produce("x") == 0


def test_many_aborted_transactions_are_told_as_far_as_is_read(broker, raw):
    c = Coordinator(broker)
    for _ in range(40):
        c.write(1, "x" * 100)
        c.end(1, commit=False)
    connection = raw()
    whole = fetch(connection, 0)
    assert len(whole.aborted_transactions) == 40
    one = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 500}
    request = build(
        p.FetchRequest,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=1,
        session_epoch=-1,
        topics=[{"topic": "t", "partitions": [one]}],
    )
    (topic,) = connection.call(request, version=11).responses
    assert 1 <= len(topic.partitions[0].aborted_transactions) < 5


def test_a_fetch_of_committed_records_hears_of_a_marker(broker, raw):
    c = Coordinator(broker)
    c.write(1, "a")
    connection = raw()
    waits = broker.statistics()["broker_fetch_waits"]
    marker = threading.Thread(target=_end_later, args=(broker, c, waits))
    marker.start()
    began = time.monotonic()
    got = fetch(connection, 0, wait_ms=30_000)
    assert time.monotonic() - began < 20
    assert got.last_stable_offset == 2 and got.aborted_transactions == []
    marker.join(10)


def _end_later(broker, coordinator, waits):
    wait_until(lambda: broker.statistics()["broker_fetch_waits"] > waits)
    coordinator.end(1, commit=True)


def test_describe_producers(broker, raw):
    c = Coordinator(broker)
    c.write(1, "a")
    c.write(2, "b")
    c.end(2, commit=True)
    request = build(p.DescribeProducersRequest, topics=[{"name": "t", "partition_indexes": [0, 7]}])
    (topic,) = raw().call(request, version=0).topics
    here, nowhere = topic.partitions
    assert nowhere.error_code == 3
    assert [
        (x.producer_id, x.producer_epoch, x.last_sequence, x.current_txn_start_offset)
        for x in here.active_producers
    ] == [(1, 0, 0, 0), (2, 0, 0, -1)]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_our_own_consumer_sees_committed_records_only(broker, transport):
    c = Coordinator(broker)
    c.write(1, "a")
    c.write(2, "b")
    c.end(1, commit=False)
    c.write(1, "c")
    c.end(1, commit=True)
    c.write(1, "d")
    c.end(1, commit=False)
    c.end(2, commit=True)
    c.write(3, "plain", transactional=False)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "auto.offset.reset": "earliest",
    }
    for isolation, expected in (
        ("read_committed", ["b", "c", "plain"]),
        ("read_uncommitted", ["a", "b", "c", "d", "plain"]),
    ):
        with kdirect.Consumer({**settings, "isolation.level": isolation}) as consumer:
            consumer.assign({TP: 0})
            got = []
            while len(got) < len(expected):
                message = consumer.poll(5)
                assert message is not None, got
                got.append(message.value().decode())
            assert got == expected and consumer.poll(0.2) is None
