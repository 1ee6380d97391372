"""A consumer that is placed between the high watermark and the end of the log, and acknowledgements
whose gate fails."""

from __future__ import annotations

import time

import pytest

import kdirect
from kdirect.client import connect
from kdirect.errors import LogError
from kdirect.format.codec import encode_records
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
COUNT = 3000  # more than one run of the worker


def append(partition: Partition, start: int, stop: int) -> None:
    for i in range(start, stop):
        assert partition.append(encode_records([(None, b"%d" % i, [], 1)])).error == 0


def poll(consumer: kdirect.Consumer, count: int, for_s: float = 5.0) -> list[bytes]:
    """Values, up to `count` of them."""
    out: list[bytes] = []
    deadline = time.monotonic() + for_s
    while len(out) < count and time.monotonic() < deadline:
        message = consumer.poll(0.05)
        if message is not None:
            out.append(message.value())
    return out


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("rolled", [False, True], ids=["in the head", "in a sealed segment"])
def test_a_consumer_that_is_sought_above_the_high_watermark_waits(
    tmp_path, transport, rolled
) -> None:
    """It gets nothing that may not be read, nothing twice, and goes on as the mark passes it; also
    back below the mark."""
    with kdirect.Broker(log_dirs=tmp_path) as broker:
        broker.server.topics.create("t", 1, {})
        partition = broker.server.logs.partitions[TP]
        partition.set_replicas({2: 0})
        append(partition, 0, 20)
        if rolled:
            partition.roll()
            append(partition, 20, 25)
        partition.replicated(2, 5)
        settings = {
            "bootstrap.servers": broker.bootstrap_servers, "transport": transport,
            "group.id": "g", "enable.auto.commit": False, "auto.offset.reset": "earliest",
        }  # fmt: skip
        with kdirect.Consumer(settings) as consumer:
            consumer.assign([TP])
            consumer.seek(TP, 12)
            assert poll(consumer, 1, 0.5) == [] and consumer.position(TP) == 12
            partition.replicated(2, 9)
            assert poll(consumer, 1, 0.5) == [], "the mark moved, and is still below"
            partition.replicated(2, 14)
            assert poll(consumer, 2) == [b"12", b"13"]
            assert poll(consumer, 1, 0.3) == []
            consumer.seek(TP, 3)
            assert poll(consumer, 11) == [b"%d" % i for i in range(3, 14)]
            end = 25 if rolled else 20
            consumer.seek(TP, end - 3)
            assert poll(consumer, 1, 0.3) == []
            consumer.seek(TP, end)  # the log end offset, which may be sought, too
            assert poll(consumer, 1, 0.3) == []
            append(partition, end, end + 1)
            partition.replicated(2, end + 1)
            assert poll(consumer, 2, 1.0) == [b"%d" % end]
            consumer.seek(TP, end - 3)
            assert poll(consumer, 4) == [b"%d" % i for i in range(end - 3, end + 1)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_acknowledgements_whose_flush_fails_are_never_written(
    tmp_path, monkeypatch, transport
) -> None:
    """Their producer loses the head, and sends its records again.  More of them than the broker
    remembers the offsets of are duplicates then; these, too, wait for the disk."""
    with kdirect.Broker(log_dirs=tmp_path, log_flush_before_ack=True) as broker:
        broker.server.topics.create("t", 1, {})
        partition = broker.server.logs.partitions[TP]
        flush = Partition.flush
        failures: list[int] = []
        unsafe: list[bytes] = []
        told: list[bytes] = []

        def failing(self: Partition, up_to: int | None = None) -> None:
            if self is partition and len(failures) < 4:
                failures.append(self.log_end_offset)
                raise LogError("the disk does not answer", hint="none")
            flush(self, up_to)

        def report(error, message) -> None:
            assert error is None
            told.append(message.value())
            if int(message.value()) >= partition.recovery_point:  # its value is its offset
                unsafe.append(message.value())

        with connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
        ).producer() as producer:
            producer.produce("t", b"0", partition=0, on_delivery=report)
            producer.flush()
            monkeypatch.setattr(Partition, "flush", failing)
            for i in range(1, COUNT):
                producer.produce("t", b"%d" % i, partition=0, on_delivery=report)
            producer.flush()
        assert len(failures) == 4
        assert not unsafe, "told as delivered, and not on disk"
        assert told == [b"%d" % i for i in range(COUNT)], "each once, although it was sent again"
        assert partition.log_end_offset == COUNT
