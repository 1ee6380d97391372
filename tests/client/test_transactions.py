"""Transactions of stock clients against a broker: confluent-kafka's producer, its consumers, and a
broker that is started again in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import kdirect


@pytest.fixture
def broker() -> Iterator[Any]:
    with kdirect.Broker(
        transaction_abort_timed_out_transaction_cleanup_interval_ms=100,
        transaction_state_log_num_partitions=3,
    ) as b:
        admin = AdminClient({"bootstrap.servers": b.bootstrap_servers})
        for future in admin.create_topics([NewTopic("in", 2), NewTopic("out", 2)]).values():
            future.result(10)
        yield b


def producer(broker: Any, name: str, **more: Any) -> Any:
    made = ck.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": name, **more}
    )
    made.init_transactions(10)
    return made


def values(broker: Any, topic: str, isolation: str = "read_committed", end_s: float = 10) -> list:
    """All that a reader of this isolation sees, up to the ends of its partitions."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "none",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.assign([ck.TopicPartition(topic, i, 0) for i in range(2)])
        found, ended, deadline = [], set(), time.monotonic() + end_s
        while len(ended) < 2 and time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is None:
                continue
            if message.error() is None:
                found.append(message.value())
            elif message.error().code() == ck.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                raise AssertionError(message.error())
        assert len(ended) == 2, "the reader has not come to the end"
        return sorted(found)
    finally:
        consumer.close()


def write(made: Any, name: bytes, count: int = 4) -> list[bytes]:
    sent = [b"%s %d" % (name, i) for i in range(count)]
    for i, value in enumerate(sent):
        made.produce("out", value, partition=i % 2)
    return sent


def test_what_is_committed_is_read_and_what_is_aborted_is_not(broker: Any) -> None:
    made = producer(broker, "a")
    made.begin_transaction()
    first = write(made, b"first")
    made.commit_transaction(10)
    made.begin_transaction()
    second = write(made, b"second")
    made.flush(10)
    made.abort_transaction(10)
    made.begin_transaction()
    third = write(made, b"third")
    made.commit_transaction(10)
    assert values(broker, "out") == sorted(first + third)
    assert values(broker, "out", "read_uncommitted") == sorted(first + second + third)


def test_an_open_transaction_is_not_read(broker: Any) -> None:
    made = producer(broker, "a")
    made.begin_transaction()
    sent = write(made, b"open")
    made.flush(10)
    plain = ck.Producer({"bootstrap.servers": broker.bootstrap_servers})
    plain.produce("out", b"plain", partition=0)
    plain.flush(10)
    assert values(broker, "out") == []
    made.commit_transaction(10)
    assert values(broker, "out") == sorted([*sent, b"plain"])


def test_a_new_producer_fences_the_one_before(broker: Any) -> None:
    old = producer(broker, "a")
    old.begin_transaction()
    write(old, b"old")
    old.flush(10)
    new = producer(broker, "a")
    new.begin_transaction()
    sent = write(new, b"new")
    new.commit_transaction(10)
    with pytest.raises(ck.KafkaException) as caught:
        old.commit_transaction(10)
    assert caught.value.args[0].fatal()
    assert values(broker, "out") == sorted(sent)


def test_a_transaction_that_takes_too_long_is_aborted(broker: Any) -> None:
    made = producer(broker, "a", **{"transaction.timeout.ms": 1000})
    made.begin_transaction()
    write(made, b"late")
    made.flush(10)
    deadline = time.monotonic() + 10
    while values(broker, "out", "read_uncommitted") and time.monotonic() < deadline:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        at = ck.TopicPartition("out", 0)
        found = admin.list_offsets(
            {at: ck.admin.OffsetSpec.latest()},
            isolation_level=ck.IsolationLevel.READ_COMMITTED,
        )[at].result(10)
        if found.offset:
            break
        time.sleep(0.1)
    with pytest.raises(ck.KafkaException):
        made.commit_transaction(10)
    assert values(broker, "out") == []


def test_offsets_are_committed_with_the_transaction(broker: Any) -> None:
    plain = ck.Producer({"bootstrap.servers": broker.bootstrap_servers})
    for i in range(10):
        plain.produce("in", b"%d" % i, partition=0)
    plain.flush(10)
    consumer = ck.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.subscribe(["in"])
        made = producer(broker, "a")
        got: list[bytes] = []
        deadline = time.monotonic() + 20
        while len(got) < 10 and time.monotonic() < deadline:
            got += [m.value() for m in consumer.consume(10, 0.5) if m.error() is None]
        assert len(got) == 10
        where = [ck.TopicPartition("in", 0)]
        made.begin_transaction()
        made.produce("out", b"aborted", partition=0)
        here = [ck.TopicPartition("in", 0, 4)]
        made.send_offsets_to_transaction(here, consumer.consumer_group_metadata(), 10)
        made.abort_transaction(10)
        assert consumer.committed(where, 10)[0].offset == ck.OFFSET_INVALID
        made.begin_transaction()
        made.produce("out", b"committed", partition=0)
        made.send_offsets_to_transaction(
            consumer.position(where), consumer.consumer_group_metadata(), 10
        )
        made.commit_transaction(10)
        assert consumer.committed(where, 10)[0].offset == 10
    finally:
        consumer.close()
    assert values(broker, "out") == [b"committed"]


def test_a_broker_that_is_started_again_goes_on(tmp_path: Any) -> None:
    """What was committed stays, what was open can be committed, and offsets that a transaction has
    committed wait for its end."""
    options = {
        "log_dirs": str(tmp_path / "logs"),
        "transaction_state_log_num_partitions": 3,
        "num_partitions": 2,
    }
    with kdirect.Broker(**options) as first:
        port = first.bootstrap_servers.rpartition(":")[2]
        made = producer(first, "a")
        made.begin_transaction()
        sent = write(made, b"one")
        made.commit_transaction(10)
        made.begin_transaction()
        sent += write(made, b"two")
        made.flush(10)
        offsets = [ck.TopicPartition("out", 0, 7)]
        consumer = ck.Consumer({"bootstrap.servers": first.bootstrap_servers, "group.id": "g"})
        made.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 10)
        consumer.close()
    with kdirect.Broker(listeners=f"PLAINTEXT://127.0.0.1:{port}", **options) as second:
        assert len(values(second, "out")) == 4
        made.commit_transaction(20)
        assert values(second, "out") == sorted(sent)
        consumer = ck.Consumer({"bootstrap.servers": second.bootstrap_servers, "group.id": "g"})
        found = consumer.committed([ck.TopicPartition("out", 0)], 10)
        consumer.close()
        assert found[0].offset == 7


def test_a_marker_that_waits_for_the_disk_is_written_once(tmp_path: Any) -> None:
    with kdirect.Broker(
        log_dirs=str(tmp_path), log_flush_before_ack=True, transaction_state_log_num_partitions=1
    ) as b:
        admin = AdminClient({"bootstrap.servers": b.bootstrap_servers})
        admin.create_topics([NewTopic("out", 2)])["out"].result(10)
        made = producer(b, "a")
        for _ in range(2):
            made.begin_transaction()
            write(made, b"value")
            made.commit_transaction(10)
        # A commit is answered before its markers are written; who comes next waits for them.
        producer(b, "a")
        consumer = ck.Consumer({"bootstrap.servers": b.bootstrap_servers, "group.id": "none"})
        for i in range(2):
            ends = consumer.get_watermark_offsets(ck.TopicPartition("out", i), 10)
            assert ends == (0, 2 * 2 + 2)
        consumer.close()
