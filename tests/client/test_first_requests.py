"""The first request of a producer id, which goes alone, and what comes while it is under way."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kdirect
from tests.client.test_deleted_topics import PATHS, TP, disk_held_up


@pytest.mark.parametrize("path", list(PATHS))
def test_records_are_queued_while_the_first_goes_alone(tmp_path: Path, path: str) -> None:
    """With max.block.ms=0 the second record over RDMA was a BufferFullError until the first one
    was acknowledged."""
    delivered: list[tuple[Any, int]] = []
    with kdirect.Broker(tmp_path, log_flush_before_ack=True) as broker:
        servers = {"bootstrap.servers": broker.bootstrap_servers}
        with kdirect.connect(servers) as session:
            session.admin.create_topic(TP.topic, 1)
        settings = {**servers, **PATHS[path], "max.block.ms": 0}
        with closing(kdirect.Producer(settings)) as producer:
            with disk_held_up(broker, TP) as waiting:
                for number in range(20):
                    producer.produce(
                        TP.topic,
                        b"%d" % number,
                        partition=0,
                        on_delivery=lambda error, message: delivered.append(
                            (error, message.offset())
                        ),
                    )
                    assert waiting.wait(10)  # the first is committed, and not acknowledged
                assert producer.statistics()["paths"] == {str(TP): path}
                assert not delivered
            assert producer.flush(30) == 0
    assert delivered == [(None, offset) for offset in range(20)]
