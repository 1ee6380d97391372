"""Headers of every shape that a caller may give: none, empty in three ways, some; by each way into
the producer, over each path.

An empty collection once served inside the producer as the sign for "sent already": such records
were lost without a word.
"""

from __future__ import annotations

import types

import confluent_kafka
import pyarrow as pa
import pytest

import kdirect
from kdirect.client import connect
from kdirect.client.partitioner import partition_for_key
from kdirect.format.codec import decode_records, encode_records

SOME = [("a", b"1"), ("b", None), ("a", b"")]
SHAPES = {
    "none": (None, None),
    "list": ([], None),
    "tuple": ((), None),
    "mapping": ({}, None),
    "pairs": (SOME, SOME),
    "tuple of pairs": (tuple(SOME), SOME),
    "mapping of one": ({"a": b"1"}, [("a", b"1")]),
}
EXPECTED = [(shape.encode(), headers) for shape, (_, headers) in SHAPES.items()]


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    return request.param


@pytest.fixture(params=[0, 5], ids=["at once", "linger"])
def producer(broker, transport, request):
    connect(broker.bootstrap_servers).admin.create_topic("t", 2)
    with kdirect.Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "transport": transport,
            "linger.ms": request.param,
        }
    ) as p:
        yield p


def records(broker, partition=0):
    """(value, headers) of a partition, by librdkafka."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "check",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("t", partition, 0)])
    out = []
    while not (message := consumer.poll(20)).error():
        out.append((message.value(), message.headers()))
    consumer.close()
    return out


@pytest.mark.parametrize("told", [False, True], ids=["nobody is told", "callback"])
def test_produce(broker, producer, told):
    heard = []
    for shape, (headers, _) in SHAPES.items():
        callback = (
            (
                lambda error, message: heard.append(
                    (error, message.offset(), message.value(), message.headers())
                )
            )
            if told
            else None
        )
        producer.produce("t", shape.encode(), partition=0, headers=headers, on_delivery=callback)
    assert producer.flush(20) == 0
    assert records(broker) == EXPECTED
    assert heard == (
        [(None, i, value, headers) for i, (value, headers) in enumerate(EXPECTED)] if told else []
    )


def test_produce_with_the_callback_of_the_producer(broker, transport):
    connect(broker.bootstrap_servers).admin.create_topic("t", 2)
    heard = []
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transport": transport}
    with kdirect.Producer(
        settings, on_delivery=lambda error, message: heard.append((error, message.offset()))
    ) as producer:
        for shape, (headers, _) in SHAPES.items():
            producer.produce("t", shape.encode(), partition=0, headers=headers)
    assert records(broker) == EXPECTED
    assert heard == [(None, i) for i in range(len(SHAPES))]


def test_send(broker, producer):
    futures = [
        producer.send("t", shape.encode(), partition=0, headers=headers)
        for shape, (headers, _) in SHAPES.items()
    ]
    assert [f.result(20).offset() for f in futures] == list(range(len(SHAPES)))
    assert [(f.result().value(), f.result().headers()) for f in futures] == EXPECTED
    assert records(broker) == EXPECTED


def test_produce_sync(broker, producer):
    offsets = [
        producer.produce_sync("t", shape.encode(), partition=0, headers=headers)
        for shape, (headers, _) in SHAPES.items()
    ]
    assert offsets == list(range(len(SHAPES)))
    assert records(broker) == EXPECTED


def test_headers_that_are_used_up_by_reading_them(broker, producer):
    future = producer.send("t", b"once", partition=0, headers=(pair for pair in SOME))
    assert future.result(20).headers() == SOME
    assert records(broker) == [(b"once", SOME)]


def test_a_mapping_that_is_no_dict(broker, producer):
    future = producer.send("t", b"proxy", partition=0, headers=types.MappingProxyType({"a": b"1"}))
    assert future.result(20).headers() == [("a", b"1")]
    assert records(broker) == [(b"proxy", [("a", b"1")])]


def test_columns(broker, producer):
    of_headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    given = [None, [], [{"key": k, "value": v} for k, v in SOME]]
    batch = pa.record_batch(
        {"value": pa.array([b"none", b"empty", b"pairs"]), "headers": pa.array(given, of_headers)}
    )
    heard = []
    batch = batch.append_column("partition", pa.array([0, 0, 0], pa.int32()))
    assert (
        producer.send_arrow(
            batch,
            "t",
            on_delivery=lambda error, delivered: heard.append((error, delivered.records)),
        )
        == 3
    )
    assert producer.flush(20) == 0
    assert records(broker) == [(b"none", None), (b"empty", None), (b"pairs", SOME)]
    assert heard == [(None, 3)]


def test_a_decoded_record_is_produced_again(broker, producer):
    """A `Record` of the decoder has `()` for no headers."""
    encoded = encode_records([(b"k", b"bare", None, 1000), (b"k", b"dressed", SOME, 2000)])
    found, _, _ = decode_records(encoded, "t", 0)
    assert [r.headers for r in found] == [(), tuple(SOME)]
    sent = [
        producer.send(r.topic, r.value, r.key, headers=r.headers, timestamp=r.timestamp)
        for r in found
    ]
    assert [f.result(20).offset() for f in sent] == [0, 1]
    assert [f.result().timestamp()[1] for f in sent] == [1000, 2000]
    assert records(broker, partition_for_key(b"k", 2)) == [(b"bare", None), (b"dressed", SOME)]
