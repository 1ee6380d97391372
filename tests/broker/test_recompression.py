"""Topics with a compression.type of their own, as clients see them."""

from __future__ import annotations

import confluent_kafka
import pytest
from confluent_kafka import admin as confluent_admin

import kdirect
from kdirect.format import protocol as p
from kdirect.format.batch import iterate_batches
from kdirect.format.schema import build

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def create(servers, name, **configs):
    client = confluent_admin.AdminClient({"bootstrap.servers": servers, "log_level": 0})
    client.create_topics([confluent_admin.NewTopic(name, 1, 1, config=configs)])[name].result(10)
    return client


def change(client, name, **configs):
    where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_TOPIC, name)
    for key, value in configs.items():
        where.add_incremental_config(
            confluent_admin.ConfigEntry(
                key.replace("_", "."),
                value,
                incremental_operation=confluent_admin.AlterConfigOpType.SET,
            )
        )
    client.incremental_alter_configs([where])[where].result(10)


def stored(broker, topic):
    """(codec, producer, sequence, records) of each batch in the log."""
    (log,) = [x for tp, x in broker.server.logs.partitions.items() if tp.topic == topic]
    found = [i for b in log.read(log.log_start_offset, 1 << 30) for i in iterate_batches(bytes(b))]
    return [(i.compression, i.producer_id, i.base_sequence, i.records_count) for i in found]


def read(servers, topic, count):
    settings = {"bootstrap.servers": servers, "group.id": "g", "log_level": 0}
    consumer = confluent_kafka.Consumer(settings)
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    out = []
    while len(out) < count:
        messages = consumer.consume(count - len(out), 10)
        assert messages and not any(m.error() for m in messages)
        out += messages
    consumer.close()
    return out


@pytest.mark.parametrize("target", ["uncompressed", *CODECS[1:]])
def test_pipelined_records_of_every_codec_stay_in_order(broker, target):
    """An idempotent producer of each codec; what is compressed off the event loop and what is
    appended on it keep their order, and so their sequences."""
    servers = broker.bootstrap_servers
    create(servers, "t", **{"compression.type": target})
    sent = []
    for codec in CODECS:
        errors = []
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": servers, "compression.type": codec, "linger.ms": 1,
             "batch.num.messages": 10, "enable.idempotence": True, "log_level": 0}
        )  # fmt: skip
        for i in range(150):
            value = b"%s %d " % (codec.encode(), i) * 30
            producer.produce(
                "t",
                value,
                b"k%d" % i,
                headers=[("h", b"%d" % i)],
                on_delivery=lambda e, m, errors=errors: errors.append(e),
            )
            sent.append((value, b"k%d" % i, [("h", b"%d" % i)]))
        assert producer.flush(30) == 0 and errors == [None] * 150
    got = [(m.value(), m.key(), m.headers()) for m in read(servers, "t", len(sent))]
    assert got == sent
    batches = stored(broker, "t")
    assert {b[0] for b in batches} == {"none" if target == "uncompressed" else target}
    following = {}
    for _, producer, sequence, count in batches:
        assert sequence == following.get(producer, 0)
        following[producer] = sequence + count
    assert len(following) == len(CODECS) and -1 not in following


@pytest.mark.parametrize(("version", "error"), [(4, 76), (9, 76), (10, 0), (11, 0)])
def test_a_client_that_cannot_know_zstd_is_told_so(broker, raw, version, error):
    """As by Kafka: UNSUPPORTED_COMPRESSION_TYPE before version 10 of Fetch."""
    client = create(broker.bootstrap_servers, "t", **{"compression.type": "zstd"})
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers})
    producer.produce("t", b"v" * 500)
    assert producer.flush(20) == 0

    def code() -> int:
        rows = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
        request = build(
            p.FetchRequest,
            min_bytes=1,
            max_bytes=1000,
            session_epoch=-1,
            topics=[{"topic": "t", "partitions": rows}],
        )
        (topic,) = raw().call(request, version).responses
        return topic.partitions[0].error_code

    assert code() == error
    change(client, "t", compression_type="gzip")
    assert code() == 0


def test_kdirects_producer_goes_on_when_the_codec_changes(broker):
    """Over RDMA until the topic has a codec, by the broker's hands from then on."""
    servers = broker.bootstrap_servers
    client = create(servers, "t")
    errors = []
    producer = kdirect.Producer({"bootstrap.servers": servers, "transport": "shm"})

    def send():
        producer.produce("t", b"v" * 500, b"k", on_delivery=lambda e, m: errors.append(e))
        producer.flush(20)

    send()
    change(client, "t", compression_type="gzip")
    send()
    change(client, "t", compression_type="producer")
    send()
    producer.close()
    assert errors == [None] * 3
    assert [b[0] for b in stored(broker, "t")] == ["none", "gzip", "none"]
    assert [m.value() for m in read(servers, "t", 3)] == [b"v" * 500] * 3


def test_the_brokers_codec_holds_for_topics_without_one(broker):
    servers = broker.bootstrap_servers
    client = create(servers, "t")
    create(servers, "own", **{"compression.type": "producer"})
    where = confluent_admin.ConfigResource(confluent_admin.RESOURCE_BROKER, "1")
    where.add_incremental_config(
        confluent_admin.ConfigEntry(
            "compression.type",
            "snappy",
            incremental_operation=confluent_admin.AlterConfigOpType.SET,
        )
    )
    client.incremental_alter_configs([where])[where].result(10)
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "log_level": 0})
    for topic in ("t", "own"):
        producer.produce(topic, b"v" * 500)
    assert producer.flush(20) == 0
    assert [stored(broker, t)[0][0] for t in ("t", "own")] == ["snappy", "none"]
