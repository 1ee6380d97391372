"""Reading from an offset above the high watermark and within the log: records there exist, and may
not be read yet.

Over READs and over TCP a consumer waits there until the high watermark has passed its offset, as
with Kafka.  Above the log end an offset is out of range.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

import kdirect
from kdirect.errors import OffsetOutOfRangeError, TimedOutError
from kdirect.format.codec import encode_records
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)
REPLICA = 2  # has to confirm what may be read


@pytest.fixture
def partition(tmp_path) -> Iterator[Callable[..., tuple[kdirect.Broker, Partition]]]:
    """(broker, a partition of which one record of `segments` times four may be read)."""
    properties = {"log.flush.before.ack": "true", "rdma.device": "nosuch0"}
    with kdirect.Broker(
        log_dirs=str(tmp_path / "log"), listeners="127.0.0.1:0", properties=properties
    ) as broker:

        def open_partition(segments: int) -> tuple[kdirect.Broker, Partition]:
            with kdirect.connect(broker.bootstrap_servers) as session:
                session.admin.create_topic(TP.topic, 1)
                with session.producer() as producer:
                    producer.produce_sync(TP.topic, b"0", partition=0)
            found = [
                x
                for x in gc.get_objects()
                if type(x) is Partition
                and x.topic_partition == TP
                and str(tmp_path) in str(x.directory)
            ]
            (opened,) = found
            opened.gate.set_replicas({REPLICA: 1})
            for i in range(1, 4 * segments):
                if i % 4 == 0:
                    opened.roll()
                opened.set_leader_epoch(opened.leader_epoch + 1)
                assert opened.append(encode_records([(None, b"%d" % i, [], 1)])).error == 0
            opened.flush()
            assert (opened.high_watermark, opened.log_end_offset) == (1, 4 * segments)
            return broker, opened

        yield open_partition


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("segments", [1, 3])
def test_a_consumer_waits_until_the_high_watermark_has_passed_its_offset(
    partition, segments, transport, isolation
) -> None:
    broker, log = partition(segments)
    end = log.log_end_offset
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "isolation.level": isolation,
        "fetch.wait.max.ms": 5,
        "rdma.device": "nosuch0",
    }
    with kdirect.connect(settings) as session:
        consumers = {}
        for offset in range(1, end + 1):
            consumer = consumers[offset] = kdirect.Consumer(settings, session=session)
            consumer.assign({TP: 0})
            assert consumer.poll(10).offset() == 0
            consumer.seek(TP, offset)
            assert consumer.poll(0) is None and consumer.position(TP) == offset
        for mark in range(2, end + 1):
            log.replicated(REPLICA, mark)
            assert log.high_watermark == mark
            for offset, consumer in consumers.items():
                if offset < mark:
                    assert consumer.poll(10).offset() == mark - 1
                assert consumer.poll(0) is None
                assert consumer.position(TP) == max(mark, offset)
        for consumer in consumers.values():
            consumer.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_above_the_log_end_an_offset_is_out_of_range(partition, transport) -> None:
    broker, log = partition(2)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "auto.offset.reset": "none",
        "rdma.device": "nosuch0",
    }
    with kdirect.Consumer(settings) as consumer:
        consumer.assign({TP: 0})
        assert consumer.poll(10).offset() == 0
        consumer.seek(TP, log.log_end_offset)
        assert consumer.poll(0.05) is None
        consumer.seek(TP, log.log_end_offset + 1)
        with pytest.raises(OffsetOutOfRangeError, match="9 of t-0"):
            consumer.poll(10)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_reader_waits_for_a_range_above_the_high_watermark(partition, transport) -> None:
    broker, log = partition(3)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "rdma.device": "nosuch0",
    }
    with kdirect.connect(settings) as session, session.reader(TP, 6, 9, timeout_ms=50) as reader:
        with pytest.raises(TimedOutError, match="offset 6 of a range that ends at 9"):
            list(reader)
        log.replicated(REPLICA, 8)
        log.replicated(REPLICA, 12)
        got = [v for batch in reader for v in batch["value"].to_pylist()]
        assert got == [b"6", b"7", b"8"]
        assert reader.next_offset == 9


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_reader_that_gave_up_waiting_goes_on_where_it_was(partition, transport) -> None:
    broker, log = partition(2)
    log.replicated(REPLICA, 3)
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": transport,
        "rdma.device": "nosuch0",
    }
    with kdirect.connect(settings) as session, session.reader(TP, 0, 6, timeout_ms=50) as reader:
        with pytest.raises(TimedOutError, match="offset 3 of a range that ends at 6"):
            list(reader)
        assert reader.next_offset == 0
        log.replicated(REPLICA, 8)
        got = [v for batch in reader for v in batch["value"].to_pylist()]
        assert got == [b"%d" % i for i in range(6)]
