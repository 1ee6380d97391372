"""What the produce worker does about a hole in a shared head when its producer is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdirect.broker.worker import ProduceWorker
from kdirect.format.codec import encode_records
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from kdirect.rdma.sim import SimNetwork

TIMEOUT_MS = 20
BATCH = encode_records([(None, b"value", [], 1)])


@pytest.fixture
def told(tmp_path: Path):
    """(worker, head, heads that the worker has told of); order 0 was reserved and never came, order
    1 waits."""
    told: list[object] = []
    device = SimNetwork(1).device("broker")
    worker = ProduceWorker(
        device.create_cq(depth=64),
        device.create_cq(depth=64),
        on_cut=lambda *cut: None,
        on_append=lambda file_id: None,
        on_head=told.append,
        on_broker_requests=lambda *answers: None,
        sync=lambda file_id: None,
    )
    worker.set_time(1_000_000)
    with LogManager([tmp_path], LogConfig(segment_bytes=1 << 16)) as logs:
        partition = logs.create_partition(TopicPartition("t", 0))
        segment = partition.ensure_head(1)
        head = worker.open_head(
            partition.kernel,
            segment.base_offset,
            0,
            0,
            shared=True,
            entries=16,
            hole_timeout_ms=TIMEOUT_MS,
        )
        assert worker.submit_broker_request(head, 1, BATCH) == []
        worker.step()
        yield worker, head, told
        worker.close_head(head, False)
        worker.forget_head(head)


def test_a_hole_is_given_up_after_its_timeout(told):
    worker, head, heads = told
    worker.set_time(1_000_000 + TIMEOUT_MS * 1_000_000 - 1)
    worker.step()
    assert heads == []
    worker.set_time(1_000_000 + TIMEOUT_MS * 1_000_000)
    worker.step()
    assert heads == [head]


def test_a_hole_is_given_up_sooner_when_its_producer_is_gone(told):
    worker, head, heads = told
    worker.expire_hole(head, 5)
    worker.set_time(1_000_000 + 5_000_000)
    worker.step()
    assert heads == [head]


def test_the_owner_is_told_of_a_hole_that_was_too_old_when_its_producer_went(told):
    """The broker stood still for longer than a hole may last, and the first it heard was that the
    producer is gone: the head ended, nobody was told, and nothing was appended to the partition any
    more."""
    worker, head, heads = told
    worker.set_time(1_000_000 + 3 * TIMEOUT_MS * 1_000_000)
    worker.expire_hole(head, 5)
    worker.step()
    assert heads == [head]
