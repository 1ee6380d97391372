"""Batches of a transaction that are sent before the first one is answered."""

from __future__ import annotations

import time

import pytest

from kdirect.client import connect
from kdirect.format import protocol as p
from kdirect.format.schema import build
from tests.broker.conftest import Raw
from tests.log.conftest import make_batch


def produce(producer_id: int, sequence: int):
    batch = make_batch(
        1,
        producer_id=producer_id,
        producer_epoch=0,
        sequence=sequence,
        transactional=True,
        timestamp_ms=int(time.time() * 1000),
    )
    return build(
        p.ProduceRequest,
        transactional_id="x",
        acks=-1,
        timeout_ms=5000,
        topic_data=[{"name": "t", "partition_data": [{"index": 0, "records": batch}]}],
    )


@pytest.mark.parametrize("version", [11, 12])
def test_they_are_appended_in_their_order(broker, version):
    """The coordinator is asked about the first one, and the others wait for it."""
    with connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("t", 1)
    raw = Raw(broker.bootstrap_servers)
    begun = raw.call(
        build(p.InitProducerIdRequest, transactional_id="x", transaction_timeout_ms=60_000), 4
    )
    assert begun.error_code == 0
    producer_id = begun.producer_id
    if version == 11:
        added = build(
            p.AddPartitionsToTxnRequest,
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=0,
            v3_and_below_topics=[{"name": "t", "partitions": [0]}],
        )
        raw.call(added, 3)
    frames = b""
    for i in range(6):
        frames += bytes(p.encode_request(produce(producer_id, i), version, 100 + i, "raw"))
        raw.waiting.append((p.ProduceRequest.API_KEY, version, 100 + i))
    raw.send_bytes(frames)
    for i in range(6):
        answer = raw.receive()
        (row,) = answer.responses[0].partition_responses
        assert (row.error_code, row.base_offset) == (0, i), row
    raw.close()
