"""The producer while its broker is stopped or killed, and after it came back."""

from __future__ import annotations

import os
import signal
import time

import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.partitioner import partition_for_key
from kdirect.errors import (
    BufferFullError,
    DeliveryError,
    TimedOutError,
    UnknownTopicError,
)
from tests.client.conftest import create, kafka_messages

PATHS = pytest.mark.parametrize("transport", ["shm", "tcp"])


def stall(broker):
    """Stop a broker's process, until every thread of it stands."""
    os.kill(broker.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, broker.pid, os.WSTOPPED)


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
        os.kill(broker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, broker.pid, os.WSTOPPED)  # until every thread of it stands
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
        os.kill(broker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, broker.pid, os.WSTOPPED)  # until every thread of it stands
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
