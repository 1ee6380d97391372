"""Markers of a transaction's coordinator on a head that RDMA producers share: their turn comes in
order, and no producer can write one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdirect.broker.worker import ProduceWorker
from kdirect.format.codec import encode_records
from kdirect.format.error_codes import ErrorCode
from kdirect.log.config import LogConfig
from kdirect.log.kernel_transactions import marker_batch
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from kdirect.rdma.sim import SimNetwork

BATCH = encode_records([(None, b"value", [], 1)])
MARKER = marker_batch(7, 3, 1, True, 5)


@pytest.fixture
def head(tmp_path: Path):
    """(worker, head, partition) of a shared head."""
    device = SimNetwork(1).device("broker")
    answers: list[object] = []
    worker = ProduceWorker(
        device.create_cq(depth=64),
        device.create_cq(depth=64),
        on_cut=lambda *cut: None,
        on_append=lambda file_id: None,
        on_head=lambda head: None,
        on_broker_requests=lambda requests, told: answers.extend(told),
        sync=lambda file_id: None,
    )
    worker.set_time(1_000_000)
    with LogManager([tmp_path], LogConfig(segment_bytes=1 << 16)) as logs:
        partition = logs.create_partition(TopicPartition("t", 0))
        segment = partition.ensure_head(1)
        head = worker.open_head(
            partition.kernel, segment.base_offset, 0, 0, shared=True, entries=16, hole_timeout_ms=20
        )
        yield worker, head, partition
        worker.close_head(head, False)
        worker.forget_head(head)


def test_a_marker_waits_for_its_turn(head):
    worker, shared, partition = head
    assert worker.submit_broker_request(shared, 1, MARKER, False, True) == []
    assert partition.log_end_offset == 0
    told = worker.submit_broker_request(shared, 0, BATCH)
    assert [(answer.order, answer.error, answer.base_offset) for answer in told] == [
        (0, 0, 0),
        (1, 0, 1),
    ]
    assert partition.log_end_offset == 2


def test_what_is_no_marker_of_a_coordinator_is_refused(head):
    worker, shared, partition = head
    (refused,) = worker.submit_broker_request(shared, 0, MARKER)  # as of a producer
    assert refused.error == ErrorCode.INVALID_RECORD
    (refused,) = worker.submit_broker_request(shared, 1, BATCH, False, True)
    assert refused.error == ErrorCode.INVALID_RECORD
    (stale,) = worker.submit_broker_request(shared, 2, MARKER, False, True)
    assert stale.error == 0
    (stale,) = worker.submit_broker_request(shared, 3, marker_batch(7, 2, 1, True, 5), False, True)
    assert stale.error == ErrorCode.INVALID_PRODUCER_EPOCH
    assert partition.log_end_offset == 1
