"""Readers of a partition whose high watermark is held back while it rolls: they see exactly the
records below it, over shm and over TCP, then all of them, across a restart of the broker."""

from __future__ import annotations

import pytest

import kdirect
from kdirect.client import connect
from kdirect.format.codec import encode_records
from kdirect.log import manager as manager_module
from kdirect.log import recovery
from kdirect.log.kernel_transactions import admit_transaction, begin_verification
from kdirect.model import TopicPartition
from tests.log.conftest import make_batch

TP = TopicPartition("t", 0)


class Reading:
    """A consumer of the one partition, and the values that it has got."""

    def __init__(self, servers: str, transport: str) -> None:
        self.consumer = kdirect.Consumer(
            {
                "bootstrap.servers": servers,
                "transport": transport,
                "group.id": transport,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        self.consumer.assign([TP])
        self.got: list[bytes] = []

    def read(self, count: int) -> list[bytes]:
        """What there is once there are `count` records, and for a moment after."""
        quiet = 0
        for _ in range(300):
            message = self.consumer.poll(0.05)
            if message is not None:
                self.got.append(message.value())
                continue
            quiet += len(self.got) >= count
            if quiet > 3:
                break
        return self.got

    def close(self) -> None:
        self.consumer.close()


def held(partition, mark: int):
    partition.gate.set_replicas({2: mark})
    return partition


def append(partition, start: int, stop: int) -> None:
    for i in range(start, stop):
        data = encode_records([(None, b"%d" % i, [], 1)])
        assert partition.append(data).error == 0


def values(stop: int) -> list[bytes]:
    return [b"%d" % i for i in range(stop)]


def test_readers_see_what_is_below_the_mark(tmp_path, monkeypatch) -> None:
    settings = {"log_dirs": tmp_path, "log_flush_before_ack": True}
    with kdirect.Broker(**settings) as broker:
        broker.server.topics.create("t", 1, {})
        partition = held(broker.server.logs.partitions[TP], 0)
        append(partition, 0, 10)
        readers = [Reading(broker.bootstrap_servers, x) for x in ("shm", "tcp")]
        try:
            partition.roll()
            append(partition, 10, 20)
            partition.roll()
            append(partition, 20, 30)
            partition.flush()
            assert len(partition.segments) == 3
            for mark in (4, 9, 10, 13):
                partition.replicated(2, mark)
                for reader in readers:
                    assert reader.read(mark) == values(mark)
        finally:
            for reader in readers:
                reader.close()
    load = recovery.load_partition
    monkeypatch.setattr(
        manager_module, "load_partition", lambda *a, **k: load(*a, **{**k, "high_watermark": 13})
    )
    with kdirect.Broker(**settings) as broker:
        partition = held(broker.server.logs.partitions[TP], 13)
        assert (partition.high_watermark, partition.log_end_offset) == (13, 30)
        readers = [Reading(broker.bootstrap_servers, x) for x in ("shm", "tcp")]
        try:
            for reader in readers:
                assert reader.read(13) == values(13)
            append(partition, 30, 33)
            partition.flush()
            for mark in (17, 20, 21, 33):
                partition.replicated(2, mark)
                for reader in readers:
                    assert reader.read(mark) == values(mark)
        finally:
            for reader in readers:
                reader.close()


def test_an_open_transaction_stops_no_reader_of_all_records(tmp_path) -> None:
    """It begins in a segment that is sealed before it ends: who does not ask for committed records
    reads on in the segments after it, whether the reader came before the roll or after it."""
    with kdirect.Broker(log_dirs=tmp_path) as broker:
        broker.server.topics.create("t", 1, {})
        partition = broker.server.logs.partitions[TP]
        readers = [Reading(broker.bootstrap_servers, "shm")]
        try:
            append(partition, 0, 5)
            assert readers[0].read(5) == values(5)
            opened = make_batch(1, producer_id=7, producer_epoch=0, sequence=0, transactional=True)
            _, ticket = begin_verification(partition.kernel, 7, 0, 0, 1)
            assert admit_transaction(partition.kernel, 7, 0, ticket)
            assert partition.append(opened).error == 0
            partition.roll()
            append(partition, 6, 9)
            partition.roll()
            append(partition, 9, 12)
            readers.append(Reading(broker.bootstrap_servers, "shm"))
            assert (partition.last_stable_offset, partition.high_watermark) == (5, 12)
            for reader in readers:
                got = reader.read(12)
                assert got[:5] + got[6:] == values(5) + [b"%d" % i for i in range(6, 12)]
                assert reader.consumer.statistics()["reads"] > 0, "it was not read by READs"
        finally:
            for reader in readers:
                reader.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_producer_waits_for_the_gate(tmp_path, transport) -> None:
    """With group commit, acknowledgements come after the disk has the records, and one fsync lets
    many of them out."""
    with kdirect.Broker(log_dirs=tmp_path, log_flush_before_ack=True) as broker:
        broker.server.topics.create("t", 1, {})
        partition = broker.server.logs.partitions[TP]
        late: list[int] = []

        def told(error, message) -> None:
            assert error is None
            if partition.recovery_point <= message.offset():
                late.append(message.offset())

        with connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
        ).producer() as producer:
            for i in range(500):
                producer.produce("t", b"%d" % i, partition=0, on_delivery=told)
                if i % 100 == 0:
                    producer.poll(0)
            producer.flush()
        assert not late and partition.high_watermark == 500
        assert partition.statistics()["log_flushes"] < 500
