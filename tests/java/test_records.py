"""Java's producer and consumer against our broker, and beside our own client."""

from __future__ import annotations

import pytest

import kdirect
from kdirect.model import TopicPartition

pytestmark = pytest.mark.slow
COUNT = 200


def read(java, consumer, count):
    out = []
    for _ in range(100):
        out += [
            (r.topic(), r.partition(), r.offset(), r.key(), r.value()) for r in java.poll(consumer)
        ]
        if len(out) >= count:
            return out
    raise AssertionError(f"{len(out)} of {count} records came")


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_producer_and_a_reader_of_partitions(java, broker, codec):
    producer = java.producer(broker.bootstrap_servers, compression_type=codec, linger_ms=5)
    sent = [producer.send(java.record("t", 0, f"k{i}", f"{codec} {i} " * 10)) for i in range(COUNT)]
    producer.flush()
    assert [java.get(f).offset() for f in sent] == list(range(COUNT))
    producer.close()
    session = kdirect.connect(broker.bootstrap_servers)
    reader = session.reader(TopicPartition("t", 0), 0, COUNT)
    values = [v for batch in reader.batches() for v in batch["value"].to_pylist()]
    reader.close()
    expected = [f"{codec} {i} " * 10 for i in range(COUNT)]
    assert values == [e.encode() for e in expected]

    consumer = java.consumer(
        broker.bootstrap_servers, enable_auto_commit="false", isolation_level="read_committed"
    )
    consumer.assign([java.partition("t", 0)])
    assert read(java, consumer, COUNT) == [("t", 0, i, f"k{i}", e) for i, e in enumerate(expected)]
    consumer.seek(java.partition("t", 0), COUNT - 1)
    assert read(java, consumer, 1) == [("t", 0, COUNT - 1, f"k{COUNT - 1}", expected[-1])]
    consumer.close()


def test_a_group_goes_on_where_it_stopped(java, broker):
    session = kdirect.connect(broker.bootstrap_servers)
    session.admin.create_topic("t", 3)
    with session.producer() as producer:
        for i in range(30):
            producer.produce("t", b"v%d" % i, key=b"k", partition=i % 3)
        producer.flush()

    def some(count):
        consumer = java.consumer(
            broker.bootstrap_servers, group_id="g", enable_auto_commit="false", max_poll_records=10
        )
        consumer.subscribe(["t"])
        got = read(java, consumer, count)
        consumer.commitSync()
        consumer.close()
        return [value for *_, value in got]

    first = some(10)
    with session.producer() as producer:
        producer.produce("t", b"last", partition=0)
        producer.flush()
    assert sorted(first + some(31 - len(first))) == sorted([f"v{i}" for i in range(30)] + ["last"])
