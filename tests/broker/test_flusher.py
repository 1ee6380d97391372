"""Syncs that fail: who waits for one is told at once, and its directory is looked into."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.broker.flusher import Flusher
from kdirect.errors import KdirectError, LogError
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition
from tests.support import wait_until


class Failing:
    topic_partition = TopicPartition("t", 0)

    def flush(self) -> None:
        raise LogError("planted")


def test_a_disk_that_hangs_as_it_is_looked_into_holds_up_nobody() -> None:
    looks, go = threading.Semaphore(0), threading.Event()

    def look_into(partition: Any, error: BaseException) -> None:
        looks.release()
        assert go.wait(30)

    async def run() -> None:
        flusher = Flusher(lambda tp: None)
        flusher.failed = look_into
        partition: Any = Failing()
        with pytest.raises(LogError, match="planted"):
            await asyncio.wait_for(flusher.flushed(partition), 10)
        assert await asyncio.to_thread(looks.acquire, timeout=10)
        go.set()
        flusher.close()

    asyncio.run(run())


def test_what_cannot_be_looked_into_leaves_the_next_sync_to_be_made() -> None:
    def look_into(partition: Any, error: BaseException) -> None:
        raise ValueError("planted, too")

    async def run() -> None:
        flusher = Flusher(lambda tp: None)
        flusher.failed = look_into
        partition: Any = Failing()
        for _ in range(2):
            with pytest.raises(LogError, match="planted"):
                await asyncio.wait_for(flusher.flushed(partition), 10)
        flusher.close()

    asyncio.run(run())


def test_a_sync_for_rdma_producers_that_fails_says_so_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    properties = {"log.flush.before.ack": "true"}
    with kdirect.Broker(directories, properties=properties) as broker:
        with kdirect.connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"}
        ) as session:
            session.admin.create_topic("t", 1)
            settings = {"rdma.produce": "exclusive", "delivery.timeout.ms": 500}
            with session.producer(**settings) as producer:
                assert producer.produce_sync("t", b"x", partition=0) == 0

                def fail(partition: Any, up_to: int | None = None) -> None:
                    raise LogError("planted") from OSError(errno.EIO, "planted")

                monkeypatch.setattr(Partition, "flush", fail)
                monkeypatch.setattr(broker.server.flusher, "failed", lambda *what: None)
                with pytest.raises(KdirectError):
                    producer.produce_sync("t", b"y", partition=0)
        logs = broker.server.logs
        wait_until(lambda: directories[0] in logs.offline, "the directory had failed")
        monkeypatch.undo()
