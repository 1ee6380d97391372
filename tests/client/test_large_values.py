"""Values that a writer leaves to the transport to copy, and keeps by reference: they arrive as they
are, can be repeated, and are let go.

Real brokers, killed and stopped.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import confluent_kafka
import pytest

import kdirect
from kdirect.client import connect
from kdirect.model import TopicPartition
from tests.support import stop_process

TP = TopicPartition("t", 0)
SIZES = (0, 100, 8191, 8192, 8193, 20_000, 70_000)
FIRST = b"first" + b"." * 100_000
ROOM = 4 << 20


@pytest.fixture
def served(broker_process):
    """(broker, settings) with topic `t` of one partition, with small segments if asked for."""

    def make(**configs):
        broker = broker_process()
        connect(broker.bootstrap_servers).admin.create_topic("t", 1, configs=configs)
        return broker, {
            "bootstrap.servers": broker.bootstrap_servers,
            "transport": "shm",
            "delivery.timeout.ms": 30_000,
        }

    return make


def stop(broker):
    stop_process(broker.pid)


def records(broker):
    """[(key, value)] of the log, by way of TCP."""
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
    ) as consumer:
        consumer.assign({TP: 0})
        end = consumer.get_watermark_offsets(TP)[1]
        messages = [consumer.poll(10) for _ in range(end)]
    return [(m.key(), m.value()) for m in messages]


def make_room(producer):
    """Produce FIRST until the head has room for all that will be under way, since a broker that
    stands grants no more; how often."""
    for count in range(1, 1000):
        producer.produce_sync("t", FIRST, partition=0)
        writer = producer._driver.appender(TP).writer
        if writer.length - writer.position > ROOM:
            return count
    pytest.fail("the head does not grow")


def references(values):
    """By how many each value is held, beside this list."""
    return [sys.getrefcount(v) for v in values]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
@pytest.mark.parametrize("notify", ["imm", "send"])
def test_values_of_all_sizes_arrive_as_they_are(served, seed, mode, notify):
    """Also where the send buffer and the segments end."""
    broker, settings = served(**{"segment.bytes": 1 << 20})
    rng = random.Random(seed)
    sent = [(rng.choice((None, b"", b"key")), rng.randbytes(rng.choice(SIZES))) for _ in range(800)]
    with kdirect.Producer({**settings, "rdma.produce": mode, "rdma.notify": notify}) as producer:
        for i, (key, value) in enumerate(sent):
            if i % 100 == 99:
                producer.produce_sync("t", value, key, partition=0)
            else:
                producer.produce("t", value, key, partition=0)
        producer.flush()
        statistics = producer.statistics()
    assert statistics["rdma_records"] == len(sent) and not statistics.get("tcp_records")
    assert records(broker) == sent


@pytest.mark.parametrize("call", ["flush", "the next record"])
def test_a_value_is_held_until_it_is_acknowledged_and_no_longer(served, call):
    broker, settings = served()
    values = [bytes([i]) * 20_000 for i in range(10)]
    with kdirect.Producer(settings) as producer:
        count = make_room(producer)
        before = references(values)
        stop(broker)
        for i in range(len(values)):  # and no name for the last one stays behind
            producer.produce("t", values[i], partition=0)
        held = references(values)
        os.kill(broker.pid, signal.SIGCONT)
        if call == "flush":
            producer.flush()
        # The acknowledgement may come before the completion of the WRITE, with which the transport
        # is done with the value: the next record's call lets it go then.
        deadline = time.monotonic() + 20
        while references(values) != before and time.monotonic() < deadline:
            producer.produce("t", b"small", partition=0)
            time.sleep(0.01)
        assert references(values) == before
        assert held == [n + 1 for n in before], "they were copied, so this test shows nothing"
    assert [v for _, v in records(broker)][count : count + len(values)] == values


def test_large_values_under_way_are_repeated_by_themselves(served, seed):
    """The broker is killed with them under way; the caller has forgotten them."""
    broker, settings = served()
    rng = random.Random(seed)
    sizes = [rng.choice(SIZES[1:]) for _ in range(60)]
    with kdirect.Producer(settings) as producer:
        count = make_room(producer)
        stop(broker)
        for i, size in enumerate(sizes):
            producer.produce("t", bytes([i]) * size, b"%d" % i, partition=0)
        broker.kill()
        broker.start()
        producer.flush()
    assert records(broker)[count:] == [
        (b"%d" % i, bytes([i]) * size) for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("idempotence", ["true", "false"])
def test_large_values_behind_one_that_is_refused(served, idempotence):
    """Those behind it are taken or repeated, under a new sequence where there are sequences."""
    broker, settings = served()
    future_ms = int(time.time() * 1000) + 7_200_000  # an hour is allowed
    failed = []

    def report(error, message):
        if error is not None:
            failed.append(message.value())

    values = [bytes([i]) * (10_000 + i) for i in range(100)]
    with kdirect.Producer({**settings, "enable.idempotence": idempotence}) as producer:
        for i, value in enumerate(values):
            producer.produce(
                "t",
                value,
                None,
                partition=0,
                timestamp=future_ms if i % 10 == 5 else 0,
                on_delivery=report,
            )
        producer.flush()
    assert failed == values[5::10]
    assert sorted(v for _, v in records(broker)) == [v for i, v in enumerate(values) if i % 10 != 5]


def test_access_that_is_taken_back_from_under_large_values(served):
    broker, settings = served()
    plain = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0}
    )
    values = [b"direct %d " % i + b"." * 12_000 for i in range(1000)]
    with kdirect.Producer(settings) as producer:
        for i, value in enumerate(values):
            producer.produce("t", value, partition=0)
            if i % 100 == 50:
                plain.produce("t", b"plain %d" % i, partition=0)
                plain.poll(0)
                time.sleep(0.005)
        assert plain.flush(20) == 0
        producer.flush()
    found = [v for _, v in records(broker)]
    assert [v for v in found if v.startswith(b"direct")] == values
    assert len(found) == len(values) + 10
