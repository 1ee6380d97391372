"""Kafka's clients on a partition that a `kdirect.Producer` writes over RDMA, in what the broker
decides."""

from __future__ import annotations

import logging
import threading
import time

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.codec import decode_records
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.support import wait_until

TP = TopicPartition("t", 0)


def create(broker, **configs):
    client = confluent_admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    topic = confluent_admin.NewTopic(
        "t", 1, 1, config={k.replace("_", "."): str(v) for k, v in configs.items()}
    )
    client.create_topics([topic])["t"].result(10)
    return client


def test_segments_may_grow_over_a_head_that_a_producer_left_empty(broker):
    client = create(broker, segment_bytes=16384)
    with (
        kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer,
        pytest.raises(KdirectError),
    ):
        producer.produce_sync(
            "t", b"x", partition=0, timestamp=int(time.time() * 1000) + 10 * 86_400_000
        )
    partition = broker.server.logs.partitions[TP]
    assert (
        partition.head is not None
        and partition.head.size == 0
        and partition.kernel.capacity == 16384
    )
    change = confluent_admin.ConfigEntry(
        "segment.bytes", str(1 << 20), incremental_operation=confluent_admin.AlterConfigOpType.SET
    )
    resource = confluent_admin.ConfigResource(
        confluent_admin.RESOURCE_TOPIC, "t", incremental_configs=[change]
    )
    client.incremental_alter_configs([resource])[resource].result(10)
    delivered = []
    other = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "message.timeout.ms": 5000}
    )
    other.produce(
        "t", b"y" * 20_000, partition=0, on_delivery=lambda e, m: delivered.append((e, m.offset()))
    )
    other.flush(10)
    assert delivered == [(None, 0)]
    assert "t" in client.list_topics(timeout=10).topics, "the broker serves others"


def test_a_fetch_hears_of_a_commit_whose_producer_is_gone(broker, raw, monkeypatch):
    create(broker)
    access = broker.server.access
    one = {"partition": 0, "fetch_offset": 1, "partition_max_bytes": 1 << 20}
    fetch = build(
        p.FetchRequest,
        max_wait_ms=60_000,
        min_bytes=1,
        max_bytes=1 << 20,
        topics=[{"topic": "t", "partitions": [one]}],
    )
    waiting, waits = raw(), broker.statistics()["broker_fetch_waits"]
    with kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        producer.produce_sync("t", b"x", partition=0)
        waiting.send(fetch, 11)
        wait_until(lambda: broker.statistics()["broker_fetch_waits"] > waits, "the Fetch waits")
        # As if its grant had ended between the commit and the news of it.
        monkeypatch.setattr(access._grants, "get", lambda file_id: None)
        producer.produce_sync("t", b"x", partition=0)
        assert waiting.receive().responses[0].partitions[0].records
        monkeypatch.undo()


def test_producers_without_acknowledgements_beside_an_rdma_producer_lose_nothing(
    broker, raw, caplog
):
    """Their appends wait for their turn on the head; no answer is what they get then, too, and what
    is behind them is served."""
    create(broker)
    caplog.set_level(logging.WARNING, logger="kdirect.broker")
    stop = threading.Event()
    with kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        producer.produce_sync("t", b"rdma", partition=0)

        def write():
            while not stop.is_set():
                producer.produce("t", b"rdma", partition=0)
                time.sleep(0.001)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            connection = raw()
            for i in range(300):
                batch = encode_single_bytes(b"kafka %d" % i)
                row = {"name": "t", "partition_data": [{"index": 0, "records": batch}]}
                silent = build(
                    p.ProduceRequest,
                    transactional_id=None,
                    acks=0,
                    timeout_ms=1000,
                    topic_data=[row],
                )
                connection.socket.sendall(p.encode_request(silent, 8, 99, "raw"))
                if i % 10 == 0:
                    connection.send(build(p.ApiVersionsRequest), 0)
            assert [connection.receive().error_code for _ in connection.waiting[:]] == [0] * 30
            row["partition_data"][0]["records"] = encode_single_bytes(b"last")
            last = build(
                p.ProduceRequest, transactional_id=None, acks=1, timeout_ms=1000, topic_data=[row]
            )
            assert connection.call(last, 8).responses[0].partition_responses[0].error_code == 0
        finally:
            stop.set()
            writer.join()
    assert broker.statistics()["rdma_recalls"] >= 1, (
        "the RDMA producer had the partition for itself"
    )
    partition = broker.server.logs.partitions[TP]
    values: list[bytes] = []
    offset = 0
    while offset < partition.high_watermark:
        for data in partition.read(offset, 1 << 20):
            rows, _, offset = decode_records(data, "t", 0, offset)
            values += [r.value for r in rows if r.value != b"rdma"]
    assert values == [*(b"kafka %d" % i for i in range(300)), b"last"]
    assert not [r for r in caplog.records if "closing" in r.getMessage()]
