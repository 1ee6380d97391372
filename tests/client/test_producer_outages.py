"""The producer while its broker is stopped or killed, and after it came back."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing

import pyarrow as pa
import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.direct_append import DirectAppender
from kdirect.client.partitioner import partition_for_key
from kdirect.errors import (
    BufferFullError,
    DeliveryError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format.error_codes import ErrorCode
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from tests.client.conftest import create, kafka_messages, produce_answer
from tests.support import poll_until, stop_process, wait_until

PRODUCE = 0
PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])


def stall(broker):
    """Stop a broker's process, until every thread of it stands."""
    stop_process(broker.pid)


@pytest.mark.parametrize("end", ["killed", "stopped"])
@PATHS
def test_while_the_broker_is_away_the_number_of_partitions_stands(broker_process, transport, end):
    """And asking for it takes no longer than max.block.ms."""
    broker = broker_process()
    create(broker, partitions=2)
    keys = [b"%d" % i for i in range(20)]
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "linger.ms": 60_000,
        "max.block.ms": 0,
        "metadata.max.age.ms": 300,
    }
    with kdirect.Producer(settings) as producer:
        for partition in (0, 1):
            producer.produce("t", b"first", partition=partition)
        assert producer.flush() == 0
        stall(broker) if end == "stopped" else broker.kill()
        time.sleep(0.4)
        began = time.monotonic()
        for key in keys:
            producer.produce("t", key, key)
        with pytest.raises(UnknownTopicError, match="partition 2"):
            producer.produce("t", b"", partition=2)
        assert time.monotonic() - began < 2, "asked for longer than max.block.ms"
        os.kill(broker.pid, signal.SIGCONT) if end == "stopped" else broker.start()
        connect(settings).admin.create_partitions("t", 4)
        time.sleep(0.4)
        producer.produce("t", b"last", b"key")
        assert producer.flush() == 0
    for partition in (0, 1):
        mine = [k for k in keys if partition_for_key(k, 2) == partition]
        values = [m.value() for m in kafka_messages(broker.bootstrap_servers, "t", partition)]
        assert [v for v in values if v != b"last"] == [b"first", *mine]
    assert b"last" in [
        m.value()
        for m in kafka_messages(broker.bootstrap_servers, "t", partition_for_key(b"key", 4))
    ]


@PATHS
@pytest.mark.parametrize("linger", [0, 10])
def test_a_stopped_broker_pushes_back_and_nothing_accepted_is_lost(
    broker_process, transport, linger
):
    broker = broker_process()
    create(broker)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "linger.ms": linger,
        "max.block.ms": 150,
        "max.in.flight": 16,
        "batch.size": 2000,
        "buffer.memory": 100_000,
    }
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        stop_process(broker.pid)
        try:
            accepted = 0
            began = time.monotonic()
            with pytest.raises(BufferError) as full:
                for _ in range(100_000):
                    producer.produce("t", b"%d" % accepted)
                    accepted += 1
            assert isinstance(full.value, BufferFullError) and full.value.retriable
            assert 10 <= accepted < 50_000 and time.monotonic() - began < 10
            began = time.monotonic()
            left = producer.flush(0.3)
            assert 0 < left <= accepted and left == len(producer)
            assert 0.25 < time.monotonic() - began < 5
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        assert producer.flush() == 0
    got = [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")]
    assert got == [b"first", *(b"%d" % i for i in range(accepted))]


@PATHS
def test_records_fail_after_the_delivery_timeout_and_later_ones_go_again(broker_process, transport):
    broker = broker_process()
    create(broker)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "delivery.timeout.ms": 400,
        "linger.ms": 1,
    }
    with kdirect.Producer(settings) as producer:
        producer.produce_sync("t", b"first")
        told = []
        stop_process(broker.pid)
        try:
            began = time.monotonic()
            producer.produce(
                "t",
                b"lost",
                on_delivery=lambda e, m: told.append((type(e), e.maybe_committed, m.value())),
            )
            with pytest.raises(TimedOutError):
                producer.send("t", b"lost").result(0.1)
            while not told and time.monotonic() - began < 20:
                producer.poll(0.1)
            assert told == [(DeliveryError, True, b"lost")]
            assert 0.3 < time.monotonic() - began < 5
            assert producer.flush(0) == 0
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while True:
            try:
                producer.send("t", b"after").result(5)
                break
            except (DeliveryError, TimedOutError):
                assert time.monotonic() < deadline
    values = [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")]
    assert values[0] == b"first" and values[-1] == b"after" and values.count(b"lost") <= 2


@PATHS
def test_a_broker_that_is_killed_and_comes_back(broker_process, transport):
    broker = broker_process()
    create(broker)
    outcome = {}
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "linger.ms": 5,
        "connect.timeout.ms": 300,
    }
    with kdirect.Producer(settings) as producer:
        for i in range(200):
            producer.produce(
                "t", b"%d" % i, on_delivery=lambda e, m: outcome.__setitem__(m.value(), e)
            )
        assert producer.flush() == 0
        broker.kill()
        for i in range(200, 300):
            producer.produce(
                "t", b"%d" % i, on_delivery=lambda e, m: outcome.__setitem__(m.value(), e)
            )
        began = time.monotonic()
        assert producer.flush(0.3) == 100
        assert time.monotonic() - began < 5
        broker.start()
        assert producer.flush() == 0
    assert outcome == {b"%d" % i: None for i in range(300)}
    values = [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")]
    assert sorted(set(values), key=int) == [b"%d" % i for i in range(300)]


def refuse_for_now(proxy, monkeypatch):
    """The partition refuses records as below min.insync.replicas, by TCP and by RDMA."""
    refuses = ErrorCode.NOT_ENOUGH_REPLICAS
    proxy.once(PRODUCE, produce_answer(TopicPartition("t", 0), refuses), times=1_000_000)

    def refused(*arguments):
        raise broker_error(refuses, "access to t-0")

    monkeypatch.setattr(DirectAppender, "__init__", refused)


@PATHS
def test_a_partition_that_refuses_for_now_holds_nobody_up_while_there_is_room(
    broker, proxy, monkeypatch, transport
):
    """As with Kafka's producers: below min.insync.replicas `produce` takes what buffer.memory has
    room for, at once, and blocks for max.block.ms only then."""
    create(broker)
    refuse_for_now(proxy, monkeypatch)
    settings = {
        "bootstrap.servers": proxy.bootstrap_servers,
        "transport": transport,
        "max.in.flight": 4,
        "batch.size": 1000,
        "buffer.memory": 100_000,
        "max.block.ms": 700,
    }
    values = [b"%d" % i + bytes(1000) for i in range(1000)]  # each fills a batch
    with kdirect.Producer(settings) as producer:
        accepted, took = 0, []
        with pytest.raises(BufferFullError):
            for value in values:
                began = time.monotonic()
                producer.produce("t", value)
                took.append(time.monotonic() - began)
                accepted += 1
        assert accepted > 50 and max(took) < 0.5
        assert producer.statistics()["failed_records"] == 0
        monkeypatch.undo()
        proxy.decide = lambda *request: None
        assert producer.flush() == 0
    got = [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")]
    assert got == values[:accepted]


@PATHS
def test_a_partition_that_refuses_for_now_fails_after_the_delivery_timeout(
    broker, proxy, monkeypatch, transport
):
    create(broker)
    refuse_for_now(proxy, monkeypatch)
    settings = {
        "bootstrap.servers": proxy.bootstrap_servers,
        "transport": transport,
        "batch.size": 1000,
        "delivery.timeout.ms": 600,
    }
    told = []
    with kdirect.Producer(settings) as producer:
        began = time.monotonic()
        for _ in range(50):
            producer.produce("t", bytes(1000), on_delivery=lambda e, m: told.append(e))
        assert time.monotonic() - began < 0.5
        assert producer.flush() == 0
    assert len(told) == 50 and all("NOT_ENOUGH_REPLICAS" in str(e) for e in told)


def test_what_is_given_up_says_why_it_was_refused(broker, proxy, monkeypatch):
    """Whoever gives up first at the end of the delivery timeout, `flush` or the path that sends:
    it depended on that whether the error said so."""
    create(broker)
    refuse_for_now(proxy, monkeypatch)
    settings = {"bootstrap.servers": proxy.bootstrap_servers, "transport": "tcp"}
    told = []
    with kdirect.Producer(settings) as producer:
        for _ in range(3):
            producer.produce("t", b"v", on_delivery=lambda e, m: told.append(e))
        producer.poll(0.3)
        producer._driver.expire(TopicPartition("t", 0))
        producer.poll(0)
    assert len(told) == 3 and all("NOT_ENOUGH_REPLICAS" in str(e) for e in told), told


def test_columns_leave_though_nobody_calls_the_producer_again(broker):
    """Over TCP the first batch goes alone; those after it wait for its acknowledgement."""
    create(broker)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "tcp",
        "batch.size": 1000,
    }
    values = [b"%02d" % i + bytes(600) for i in range(20)]
    tp = TopicPartition("t", 0)
    with kdirect.Producer(settings) as producer, closing(connect(settings)) as session:
        producer.send_arrow(pa.record_batch({"value": pa.array(values)}), "t")
        poll_until(lambda: session.latest_offsets([tp])[tp] == 20)
    assert [m.value() for m in kafka_messages(broker.bootstrap_servers, "t")] == values


@pytest.fixture
def slow_disk(tmp_path, monkeypatch):
    """(a broker whose acknowledgements wait for the disk, an event: the disk goes on)."""
    may_flush = threading.Event()
    flush = Partition.flush

    def held_up(self, up_to=None):
        assert may_flush.wait(60)
        flush(self, up_to)

    monkeypatch.setattr(Partition, "flush", held_up)
    with kdirect.Broker(log_dirs=tmp_path, log_flush_before_ack=True) as broker:
        create(broker)
        try:
            yield broker, may_flush
        finally:
            may_flush.set()


def test_records_that_nobody_waits_for_fail_in_time(slow_disk):
    """The broker answers requests, and acknowledges nothing: a producer that only produces, and
    repeats what found no room, loses what it has under way after delivery.timeout.ms, and goes on
    by a new way."""
    broker, may_flush = slow_disk
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "enable.idempotence": False,  # else the first request goes alone, and others are gathered
        "max.in.flight": 4,
        "max.block.ms": 50,
        "delivery.timeout.ms": 500,
    }
    with kdirect.Producer(settings) as producer:
        began = time.monotonic()
        full = 0
        while not producer._driver.errors:
            assert time.monotonic() < began + 30, "it waits for ever"
            try:
                producer.produce("t", b"x", partition=0)
            except BufferFullError:
                full += 1
        assert full > 1 and time.monotonic() - began >= 0.5
        may_flush.set()
        with pytest.raises(DeliveryError, match="not delivered within 500 ms") as failed:
            producer.flush()
        assert failed.value.maybe_committed
        producer.produce_sync("t", b"last", partition=0)


def test_who_waits_for_an_acknowledgement_hears_that_access_has_ended(slow_disk):
    """A Kafka client wants the head of an RDMA producer that waits for the disk, and so does not
    heed the recall.  Its access ends before the disk has the record, which it repeats."""
    broker, may_flush = slow_disk
    tp = TopicPartition("t", 0)
    heads, log = broker._server.access.produce.heads, broker._server.logs.partitions[tp]
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    with (
        closing(kdirect.Producer({**settings, "transport": "shm"})) as first,
        closing(kdirect.Producer({**settings, "transport": "tcp"})) as second,
    ):
        first.produce("t", b"first", partition=0)
        head = heads[tp]
        wait_until(
            lambda: broker._server.logs.partitions[tp].log_end_offset == 1, "it is in the log"
        )
        second.produce("t", b"second", partition=0)
        wait_until(lambda: head.ended, "access has ended")
        may_flush.set()
        assert first.flush(20) == 0 and second.flush(20) == 0
    assert log.high_watermark == 2
