"""Batches of a transaction that are sent before the first one is answered; and what is asked as
soon as its end is."""

from __future__ import annotations

import time

import pytest

from kdirect.client import connect
from kdirect.format import protocol as p
from kdirect.format.schema import build
from tests.broker.conftest import Raw
from tests.log.conftest import make_batch


def produce(producer_id: int, sequence: int, epoch: int = 0):
    batch = make_batch(
        1,
        producer_id=producer_id,
        producer_epoch=epoch,
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


@pytest.mark.parametrize("commit", [True, False])
def test_who_asks_after_the_end_is_answered_finds_it_complete(broker, commit):
    """The answer leaves before markers are written, and no request overtakes them."""
    with connect(broker.bootstrap_servers) as session:
        session.admin.create_topic("t", 1)
    raw, other = Raw(broker.bootstrap_servers), Raw(broker.bootstrap_servers)
    begun = raw.call(
        build(p.InitProducerIdRequest, transactional_id="x", transaction_timeout_ms=60_000), 4
    )
    producer_id, epoch = begun.producer_id, begun.producer_epoch
    describe = build(p.DescribeTransactionsRequest, transactional_ids=["x"])
    latest = build(
        p.ListOffsetsRequest,
        isolation_level=1,
        topics=[{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}],
    )
    for i in range(30):
        answer = raw.call(produce(producer_id, 0, epoch), 12)
        assert answer.responses[0].partition_responses[0].error_code == 0
        end = build(
            p.EndTxnRequest,
            transactional_id="x",
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=commit,
        )
        ended = raw.call(end, 5)
        assert (ended.error_code, ended.producer_id) == (0, producer_id)
        assert ended.producer_epoch == epoch + 1
        epoch = ended.producer_epoch
        (told,) = other.call(describe, 0).transaction_states
        assert told.transaction_state == ("CompleteCommit" if commit else "CompleteAbort")
        (topic,) = other.call(latest, 4).topics  # as far as committed records may be read
        assert topic.partitions[0].offset == 2 * (i + 1)
    raw.close()
    other.close()
