"""One flipped bit in a segment, seen by stock clients and by the broker itself."""

from __future__ import annotations

import logging
import os
import time

import confluent_kafka
import pytest

import kdirect
from kdirect.errors import CorruptLogError
from kdirect.format import protocol
from kdirect.format.batch import iterate_batches
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.cluster import Cluster

TP = TopicPartition("t", 0)


def flip(path, position, bit):
    with open(path, "r+b", buffering=0) as f:
        byte = os.pread(f.fileno(), 1, position)[0]
        os.pwrite(f.fileno(), bytes([byte ^ 1 << bit]), position)


@pytest.fixture
def damaged(broker):
    """(broker, ten batches of a record each, the sixth of which says that it lies 2**40 offsets
    higher)."""
    session = kdirect.connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"})
    session.admin.create_topic("t", 1)
    partition = broker.server.logs.partitions[TP]
    for i in range(10):
        with session.producer() as producer:
            producer.produce("t", b"%d" % i)
    path = partition.segments[-1].path
    batches = list(iterate_batches(path.read_bytes()[: partition.size]))
    assert len(batches) == 10
    flip(path, batches[5].position + 2, 0)
    return broker, batches, path


def fetch(cluster, offset):
    r = protocol.FetchRequest
    partition = r.FetchTopic.FetchPartition(
        partition=0, fetch_offset=offset, partition_max_bytes=1 << 20
    )
    answer = cluster.connection_for(TP).request(
        r(replica_id=-1, max_wait_ms=100, min_bytes=1, max_bytes=1 << 20, isolation_level=0,
          session_id=0, session_epoch=-1, forgotten_topics_data=[], rack_id="",
          topics=[r.FetchTopic(topic="t", partitions=[partition])])
    )  # fmt: skip
    return answer.responses[0].partitions[0]


def test_fetch_answers_corrupt_message_and_the_broker_logs_it_once(damaged, caplog):
    broker, batches, path = damaged
    with (
        Cluster({"bootstrap.servers": broker.bootstrap_servers}) as cluster,
        caplog.at_level(logging.ERROR, "kdirect.broker"),
    ):
        good = fetch(cluster, 0)
        assert good.error_code == 0
        assert [b.base_offset for b in iterate_batches(good.records)] == [0, 1, 2, 3, 4], (
            "what is before the damage is sent"
        )
        for _ in range(20):
            assert fetch(cluster, 5).error_code == ErrorCode.CORRUPT_MESSAGE
        assert fetch(cluster, 10).error_code == 0, "the end of the log is not concerned"
    told = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    assert len(told) == 1
    assert (
        str(path) in told[0]
        and f"position {batches[5].position} of the segment" in told[0]
        and "restore the segment" in told[0]
    )


def test_a_stock_client_gets_no_record_of_the_damaged_batch(damaged):
    broker, _, _ = damaged
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "g", "log_level": 0}
    )
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    got, errors, until = [], [], time.monotonic() + 3
    while time.monotonic() < until and not errors:
        for m in consumer.consume(100, 0.2):
            (errors if m.error() else got).append(m)
    consumer.close()
    assert [m.offset() for m in got] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_lookup_by_time_is_refused_at_once(damaged, transport):
    broker, batches, _ = damaged
    session = kdirect.connect(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    )
    assert session.offsets_for_times({TP: batches[0].base_timestamp})[TP] == 0
    began = time.monotonic()
    with pytest.raises(CorruptLogError, match="t-0"):
        session.offsets_for_times({TP: batches[9].max_timestamp + 0})
    assert time.monotonic() - began < 10, "it was not asked again and again"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_consumer_goes_on_after_a_seek_past_the_damage(damaged, transport):
    broker, _, _ = damaged
    partition = broker.server.logs.partitions[TP]
    partition.roll()
    with kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        producer.produce("t", b"later")
    with kdirect.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    ) as consumer:
        consumer.assign({TP: 0})
        assert [m.offset() for m in consumer.consume(5, 5)] == [0, 1, 2, 3, 4]
        with pytest.raises(kdirect.errors.KdirectError, match="offset 5") as caught:
            consumer.consume(1, 5)
        assert type(caught.value).__name__ in ("CorruptLogError", "CorruptBatchError")
        assert (caught.value.topic_partition, caught.value.offset) == (TP, 5)
        consumer.seek(TP, 10)
        assert [m.offset() for m in consumer.consume(1, 5)] == [10]


def test_damaged_offsets_of_groups_are_told_at_the_start(tmp_path):
    with kdirect.Broker(log_dirs=tmp_path) as broker:
        session = kdirect.connect(broker.bootstrap_servers)
        session.admin.create_topic("t", 1)
        for i in range(3):
            session.admin.commit_offsets("g", {TP: i})
        partition = broker.server.offsets.partition_of("g")
        path, size = partition.segments[-1].path, partition.size
        partition.roll()  # a sealed segment is not looked at when a cleanly closed log is opened
        session.admin.commit_offsets("g", {TP: 3})
        session.close()
    batches = list(iterate_batches(path.read_bytes()[:size]))
    flip(path, batches[0].position + 6, 1)
    with pytest.raises(
        CorruptLogError, match=rf"record 0 of __consumer_offsets.*position {batches[0].position} of"
    ) as caught:
        kdirect.Broker(log_dirs=tmp_path).start()
    assert "restore it, or move it away" in caught.value.hint
