"""A producer whose records are not acknowledged yet when their topic is deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.errors import DeliveryError, UnknownTopicError
from kdirect.model import TopicPartition
from tests.support import wait_until

TP = TopicPartition("t", 0)
PATHS: dict[str, dict[str, Any]] = {
    "tcp": {"transport": "tcp"},
    "exclusive": {"transport": "shm", "rdma.produce": "exclusive"},
    "shared": {"transport": "shm", "rdma.produce": "shared"},
}


@contextmanager
def disk_held_up(broker: kdirect.Broker, tp: TopicPartition) -> Iterator[threading.Event]:
    """Nothing more of a partition gets to the disk until the block ends; set: something is to."""
    waiting, may_sync = threading.Event(), threading.Event()
    disk = broker._server.logs.partitions[tp]._disk
    sync = disk.sync

    def held(segments: Any, end_offset: int) -> None:
        waiting.set()
        assert may_sync.wait(60)
        sync(segments, end_offset)

    disk.sync = held
    try:
        yield waiting
    finally:
        may_sync.set()


@pytest.mark.parametrize("path", ["exclusive", "shared"])
def test_what_waits_for_the_disk_fails_when_its_topic_is_deleted(tmp_path: Path, path: str) -> None:
    """Nobody told these producers: they heard of it at the end of delivery.timeout.ms."""
    failed: list[Any] = []
    with kdirect.Broker(tmp_path, log_flush_before_ack=True) as broker:
        servers = {"bootstrap.servers": broker.bootstrap_servers}
        with kdirect.connect(servers) as session:
            session.admin.create_topic(TP.topic, 1)
            with closing(kdirect.Producer({**servers, **PATHS[path]})) as producer:
                producer.produce(TP.topic, b"on disk", partition=0)
                assert producer.flush(10) == 0
                assert producer.statistics()["paths"] == {str(TP): path}
                with disk_held_up(broker, TP) as waiting:
                    producer.produce(
                        TP.topic, b"v", partition=0, on_delivery=lambda e, m: failed.append(e)
                    )
                    assert waiting.wait(10) and not failed
                    began = time.monotonic()
                    session.admin.delete_topic(TP.topic)
                    wait_until(lambda: (producer.poll(0), failed)[1], "the producer heard of it")
                assert time.monotonic() - began < 20  # delivery.timeout.ms is 120 s
    (error,) = failed
    assert isinstance(error, DeliveryError) and isinstance(error.__cause__, UnknownTopicError)
