"""Readers that a session keeps from one use to the next: what they may be used for again, and how
many there are."""

from __future__ import annotations

import pyarrow as pa
import pytest

import kdirect
from kdirect.client import reader as readers
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)


@pytest.fixture
def broker(tmp_path):
    with kdirect.Broker(log_dirs=[str(tmp_path / "log")], listeners="127.0.0.1:0") as b:
        yield b


@pytest.fixture
def session(broker):
    session = kdirect.connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})
    yield session
    session.close()


def fill(session, topic, values):
    with session.producer() as producer:
        producer.send_arrow(pa.record_batch({"value": values}), topic)


def read(session, tp, start, stop):
    reader = session.reader(tp, start, stop)
    try:
        return [v.decode() for batch in reader.batches() for v in batch.column("value").to_pylist()]
    finally:
        reader.close()


def numbers(prefix, start, stop):
    return [f"{prefix}{i}" for i in range(start, stop)]


@pytest.mark.parametrize("segment_bytes", [1 << 20, 8192], ids=["in the head", "in sealed files"])
@pytest.mark.parametrize("stopped", [4, 10, 40])
def test_a_topic_that_was_made_anew_is_read_anew(session, segment_bytes, stopped):
    """Wherever a reader of the old one was left: in the middle of bytes that were READ, at an end
    of a file, at the end."""
    config = {"segment.bytes": segment_bytes}
    session.admin.create_topic("t", 1, configs=config)
    for i in range(0, 40, 5):
        fill(session, "t", [f"old{n}" + "." * 900 for n in range(i, i + 5)])
    assert len(read(session, TP, 0, stopped)) == stopped
    session.admin.delete_topic("t")
    session.admin.create_topic("t", 1, configs=config)
    fill(session, "t", numbers("new", 0, 60))
    assert read(session, TP, stopped, 60) == numbers("new", stopped, 60)
    assert read(session, TP, 0, 60) == numbers("new", 0, 60)


def test_a_reader_is_used_again_where_it_stands(session, broker):
    session.admin.create_topic("t", 1)
    fill(session, "t", numbers("a", 0, 10))
    assert read(session, TP, 0, 10) == numbers("a", 0, 10)
    before = broker.statistics()["broker_requests_by_api"]
    for i in range(10, 50, 10):
        fill(session, "t", numbers("a", i, i + 10))
        assert read(session, TP, i, i + 10) == numbers("a", i, i + 10)
    after = broker.statistics()["broker_requests_by_api"]
    assert after["GetConsumeAccess"] == before["GetConsumeAccess"]


def test_readers_of_other_partitions_give_way_to_those_in_use(session, monkeypatch, broker):
    """Others are closed, and not the newest turned away: dead ones would fill the pool for good."""
    monkeypatch.setattr(readers, "IDLE_READERS", 3)
    for i in range(5):
        session.admin.create_topic(f"dated-{i}", 1)
        fill(session, f"dated-{i}", ["x"])
        assert read(session, TopicPartition(f"dated-{i}", 0), 0, 1) == ["x"]
        session.admin.delete_topic(f"dated-{i}")
    session.admin.create_topic("t", 1)
    fill(session, "t", ["x"])
    read(session, TP, 0, 1)
    before = broker.statistics()["broker_requests_by_api"]["OpenQueuePair"]
    for _ in range(4):
        assert read(session, TP, 0, 1) == ["x"]
    assert broker.statistics()["broker_requests_by_api"]["OpenQueuePair"] == before


def test_partitions_without_a_slot_are_asked_for_over_tcp_and_the_refusal_is_remembered(
    tmp_path, caplog
):
    with kdirect.Broker(
        log_dirs=[str(tmp_path / "log")], listeners="127.0.0.1:0", rdma_slots_per_consumer=2
    ) as broker:
        session = kdirect.connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        )
        try:
            session.admin.create_topic("t", 4)
            tps = [TopicPartition("t", i) for i in range(4)]
            with session.producer() as producer:
                for tp in tps:
                    producer.produce("t", b"x", partition=tp.partition)
            expected = dict.fromkeys(tps, (0, 1))
            assert session.watermarks(tps) == expected
            before = broker.statistics()["broker_requests_by_api"]["GetConsumeAccess"]
            for _ in range(5):
                assert session.watermarks(tps) == expected
            assert broker.statistics()["broker_requests_by_api"]["GetConsumeAccess"] == before
            assert session.watermarks(tps[:1]) == {tps[0]: (0, 1)}
            assert len([r for r in caplog.records if "over TCP" in r.message]) == 1
        finally:
            session.close()


def test_more_partitions_in_turn_than_are_kept_still_find_some(session, monkeypatch, broker):
    monkeypatch.setattr(readers, "IDLE_READERS", 8)
    session.admin.create_topic("t", 10)
    with session.producer() as producer:
        for partition in range(10):
            producer.produce("t", b"x", partition=partition)

    def one_round():
        for partition in range(10):
            assert read(session, TopicPartition("t", partition), 0, 1) == ["x"]

    one_round()
    before = broker.statistics()["broker_requests_by_api"]["OpenQueuePair"]
    for _ in range(10):
        one_round()
    assert broker.statistics()["broker_requests_by_api"]["OpenQueuePair"] - before < 90, (
        "each was made anew"
    )
