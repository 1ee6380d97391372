"""DescribeReplicas, where a broker has many replicas."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker import handlers_log_dirs
from kdirect.broker.handlers_log_dirs import LogDirHandlers
from kdirect.format import protocol as p
from kdirect.format.replica_fetch import Feed, Feeding
from kdirect.format.schema import build
from kdirect.model import TopicPartition


class Files:
    """Of a broker: work that is read for, on a thread."""

    async def read(self, work: Any) -> Any:
        return await asyncio.to_thread(work)


@pytest.mark.parametrize(("count", "on_loop"), [(3, True), (1000, False)])
def test_many_replicas_are_described_on_a_thread(
    monkeypatch: pytest.MonkeyPatch, count: int, on_loop: bool
) -> None:
    """The loop serves others meanwhile."""
    feeds = {TopicPartition("t", n): Feeding(Feed.PUSHED, "shm") for n in range(count)}
    services: Any = SimpleNamespace(
        config={},
        cluster=None,
        topics=None,
        files=Files(),
        logs=SimpleNamespace(partitions={}),
        replicas=SimpleNamespace(feeding=lambda: feeds),
        mover=None,
    )
    nothing: Any = None
    handlers = LogDirHandlers(services)
    threads = []
    respond = handlers_log_dirs.respond

    def noted(*arguments: Any, **fields: Any) -> Any:
        threads.append(threading.current_thread())
        return respond(*arguments, **fields)

    monkeypatch.setattr(handlers_log_dirs, "respond", noted)
    header: Any = SimpleNamespace(api_version=0)

    async def described() -> Any:
        request = build(p.DescribeReplicasRequest, topics=["t"])
        answer = handlers.describe_replicas(nothing, header, request)
        return answer if answer.awaited is None else await answer.awaited

    answer = asyncio.run(described())
    found = p.DescribeReplicasResponse.decode(b"".join(answer.buffers), version=0)
    assert [x.partition for x in found.topics[0].partitions] == list(range(count))
    assert (threads == [threading.main_thread()]) is on_loop
