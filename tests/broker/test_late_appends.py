"""Appends of one Produce request that are made one after the other, on a broker in a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from kdirect.broker.handlers_replicated import ReplicatedDataHandlers
from kdirect.broker.services import Counters
from kdirect.format import protocol as p
from kdirect.format.schema import build
from kdirect.log.config import NEVER
from kdirect.model import TopicPartition

EPOCH = 3


def partition(index: int) -> Any:
    return SimpleNamespace(
        topic_partition=TopicPartition("t", index),
        leader_epoch=EPOCH,
        log_start_offset=0,
        log_end_offset=10,
        high_watermark=0,
        config=SimpleNamespace(flush_before_ack=False, flush_messages=NEVER),
    )


def test_replicas_are_waited_for_in_the_epoch_in_which_an_append_began() -> None:
    """One partition is appended to at once, another one waits for room.  Until that is made the
    first has had another leader, which has cut the record off, and has come back: its high
    watermark says nothing of the record."""
    asyncio.run(_late_append())


async def _late_append() -> None:
    loop = asyncio.get_running_loop()
    partitions = [partition(0), partition(1)]
    appended: list[asyncio.Future[Any]] = [loop.create_future(), loop.create_future()]
    asked: list[tuple[TopicPartition, int, int]] = []

    def committed(tp: TopicPartition, end: int, epoch: int, timeout_s: float) -> Any:
        asked.append((tp, end, epoch))
        done = loop.create_future()
        done.set_result(None)
        return done

    services = SimpleNamespace(
        config={"fetch.max.bytes": 1 << 20, "max.incremental.fetch.session.cache.slots": 8},
        membership=SimpleNamespace(metadata=SimpleNamespace(generation=0)),
        cluster=SimpleNamespace(node_id=1),
        environment=SimpleNamespace(time_ms=lambda: 0),
        counters=Counters(),
        remote_reads=None,
        waiters=SimpleNamespace(notify=lambda tp, size: None),
        appender=SimpleNamespace(
            append_nowait=lambda *of: None,
            append=lambda of, data, at: appended[of.topic_partition.partition],
        ),
    )
    replicas = SimpleNamespace(
        leader=lambda tp: partitions[tp.partition],
        may_append=lambda tp: None,
        appended=lambda tp: None,
        committed=committed,
    )
    nothing = cast(Any, None)
    handlers = ReplicatedDataHandlers(cast(Any, services), cast(Any, replicas), nothing)
    data = [{"index": index, "records": b"records"} for index in (0, 1)]
    request = build(
        p.ProduceRequest,
        transactional_id=None,
        acks=-1,
        timeout_ms=1000,
        topic_data=[{"name": "t", "partition_data": data}],
    )
    header = cast(Any, SimpleNamespace(api_version=9))
    answer = handlers.produce(cast(Any, None), header, request)
    assert answer.awaited is not None
    made = SimpleNamespace(error=0, base_offset=4, last_offset=4, log_append_time=-1)
    appended[1].set_result(made)
    partitions[1].leader_epoch = EPOCH + 2
    appended[0].set_result(made)
    await answer.awaited
    assert asked == [(TopicPartition("t", index), 5, EPOCH) for index in (0, 1)]
