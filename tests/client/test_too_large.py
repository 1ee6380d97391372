"""A batch that its topic can never take is refused alike over RDMA and TCP: Kafka's error code, the
same class, the same remedy."""

from __future__ import annotations

import pytest

import kdirect
from kdirect.errors import BrokerError, DeliveryError
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition

SEGMENT_BYTES = 64 << 10

# What the topic allows, the bytes of a value it does not take, Kafka's code for it, and the
# property to raise.  Kafka looks at the size of the batch before it looks at the segment.
CASES = [
    pytest.param({"max.message.bytes": 10_000}, 20_000, ErrorCode.MESSAGE_TOO_LARGE,
                 "max.message.bytes", id="over max.message.bytes"),
    pytest.param(
        {"segment.bytes": SEGMENT_BYTES}, 2 * SEGMENT_BYTES, ErrorCode.RECORD_LIST_TOO_LARGE,
        "segment.bytes", id="over segment.bytes"
    ),
    pytest.param(
        {"segment.bytes": SEGMENT_BYTES, "max.message.bytes": SEGMENT_BYTES}, 2 * SEGMENT_BYTES,
        ErrorCode.MESSAGE_TOO_LARGE,
        "max.message.bytes", id="over both",
    ),
]  # fmt: skip


@pytest.fixture(params=["shm", "tcp"])
def transport(request) -> str:
    return request.param


def make_topic(broker, configs) -> TopicPartition:
    session = kdirect.connect(broker.bootstrap_servers)
    session.admin.create_topic("t", 1, configs=configs)
    session.close()
    return TopicPartition("t", 0)


@pytest.mark.parametrize("linger_ms", [0, 20])
@pytest.mark.parametrize(("configs", "size", "code", "remedy"), CASES)
def test_the_error_of_a_batch_too_large_names_kafka_s_code_and_the_remedy(
    broker, transport, linger_ms, configs, size, code, remedy
):
    tp = make_topic(broker, configs)
    with kdirect.Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "transport": transport,
            "linger.ms": linger_ms,
            "batch.bytes": 1 << 20,
        }
    ) as producer:
        assert producer.send("t", b"before", partition=0).result(10).offset() == 0
        with pytest.raises(DeliveryError, match=code.name) as caught:
            producer.send("t", bytes(size), partition=0).result(10)
        assert (
            str(tp) in str(caught.value)
            and caught.value.hint.startswith(f"raise {remedy} of the topic")
            and not caught.value.maybe_committed
        )
        cause = caught.value.__cause__
        assert isinstance(cause, BrokerError) and cause.code == code and cause.name == code.name
        assert producer.send("t", b"after", partition=0).result(10).offset() == 1, (
            "the producer goes on"
        )
        statistics = producer.statistics()
        assert statistics.get("rdma_records", 0) == (2 if transport == "shm" else 0)


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_producer_that_asks_for_more_than_a_segment_costs_the_others_nothing(broker, mode):
    """The refusal comes before anything that belongs to others is ended, and leaves the producer
    with what it has."""
    make_topic(broker, {"segment.bytes": SEGMENT_BYTES})
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "transport": "shm",
        "batch.bytes": 1 << 20,
        "rdma.produce": mode,
    }
    with kdirect.Producer(settings) as producer:
        for i in range(3):
            with pytest.raises(DeliveryError, match="RECORD_LIST_TOO_LARGE"):
                producer.send("t", bytes(2 * SEGMENT_BYTES), partition=0).result(10)
            assert producer.send("t", b"small", partition=0).result(10).offset() == i
        assert producer.statistics()["rdma_records"] == 3
