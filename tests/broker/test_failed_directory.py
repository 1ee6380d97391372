"""A broker that is alone, of whose two log directories one fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw
from tests.support import wait_until

LOST = TopicPartition("t", 1)


def produced(raw: Raw, partition: int) -> int:
    """The code of one record's Produce."""
    row = {"index": partition, "records": encode_single_bytes(b"k", b"v")}
    topics = [{"name": "t", "partition_data": [row]}]
    request = build(p.ProduceRequest, acks=1, timeout_ms=10_000, topic_data=topics)
    answer: Any = raw.call(request, 9)
    return int(answer.responses[0].partition_responses[0].error_code)


def test_the_other_directory_goes_on(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    with kdirect.Broker(directories, properties={"num.partitions": 2}) as broker:
        raw = Raw(broker.bootstrap_servers, timeout_s=30)
        with kdirect.connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
        ) as session:
            session.admin.create_topic("t", 2)
        assert [produced(raw, n) for n in (0, 1)] == [0, 0]
        logs = broker.server.logs
        places = [logs.partitions[TopicPartition("t", n)].directory.parent for n in (0, 1)]
        assert places == directories
        directories[1].rename(tmp_path / "away")
        directories[1].write_bytes(b"")
        logs.checkpoint()
        wait_until(lambda: len(logs.partitions) == 1, "the partition was let go")
        assert produced(raw, 0) == 0
        assert produced(raw, 1) == ErrorCode.KAFKA_STORAGE_ERROR
        names = [{"topic_id": None, "name": "t"}]
        found: Any = raw.call(build(p.MetadataRequest, topics=names), 12)
        rows = {x.partition_index: x for x in found.topics[0].partitions}
        assert (rows[0].leader_id, list(rows[0].offline_replicas)) == (1, [])
        assert (rows[1].leader_id, list(rows[1].offline_replicas)) == (-1, [1])
        raw.close()


def test_who_waits_while_a_partition_is_let_go_hears_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    with kdirect.Broker(directories, properties={"num.partitions": 2}) as broker:
        raw = Raw(broker.bootstrap_servers, timeout_s=30)
        with kdirect.connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
        ) as session:
            session.admin.create_topic("t", 2)
        logs = broker.server.logs
        drop, began, go = logs.drop, threading.Event(), threading.Event()

        def slowly(directory: Path) -> None:
            began.set()
            assert go.wait(30)
            drop(directory)

        monkeypatch.setattr(logs, "drop", slowly)
        directories[1].rename(tmp_path / "away")
        directories[1].write_bytes(b"")
        logs.checkpoint()
        assert began.wait(30)
        appends = broker.server.appends
        threading.Timer(0, lambda: wait_until(lambda: appends.waiting(LOST)) and go.set()).start()
        assert produced(raw, LOST.partition) == ErrorCode.KAFKA_STORAGE_ERROR
        raw.close()
