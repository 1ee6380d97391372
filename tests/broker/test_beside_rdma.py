"""Kafka's clients on a partition that a `kdirect.Producer` writes over RDMA, in what the broker decides."""

from __future__ import annotations

import time

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.errors import KdirectError
from kdirect.model import TopicPartition

TP = TopicPartition("t", 0)


def create(broker, **configs):
    client = confluent_admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    topic = confluent_admin.NewTopic("t", 1, 1, config={k.replace("_", "."): str(v) for k, v in configs.items()})
    client.create_topics([topic])["t"].result(10)
    return client


def test_segments_may_grow_over_a_head_that_a_producer_left_empty(broker):
    client = create(broker, segment_bytes=16384)
    with kdirect.Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer, pytest.raises(KdirectError):
        producer.produce_sync("t", b"x", partition=0, timestamp=int(time.time() * 1000) + 10 * 86_400_000)
    partition = broker.server.logs.partitions[TP]
    assert partition.head is not None and partition.head.size == 0 and partition.kernel.capacity == 16384
    change = confluent_admin.ConfigEntry("segment.bytes", str(1 << 20), incremental_operation=confluent_admin.AlterConfigOpType.SET)
    resource = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, "t", incremental_configs=[change])
    client.incremental_alter_configs([resource])[resource].result(10)
    delivered = []
    other = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers, "message.timeout.ms": 5000})
    other.produce("t", b"y" * 20_000, partition=0, on_delivery=lambda e, m: delivered.append((e, m.offset())))
    other.flush(10)
    assert delivered == [(None, 0)]
    assert "t" in client.list_topics(timeout=10).topics, "the broker serves others"
