"""Making the replicas of a large topic: those that are there serve while the others are made."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kdirect.broker.local_replicas import AT_ONCE, LocalReplicas
from kdirect.cluster.election import Partition as Picture
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.records import TopicAssignment
from kdirect.log.manager import LogManager
from kdirect.member.metadata import Metadata
from kdirect.model import TopicPartition

COUNT = 2 * AT_ONCE + 3


def metadata() -> Metadata:
    replicas = ((1,),) * COUNT
    record = TopicAssignment(uuid.UUID(int=7), replicas)
    topic = Topic(record, tuple(Picture(each) for each in replicas), {})
    return Metadata("c" * 22, 1, 1, 1, {}, Image(1, 1, topics={"t": topic}), 1)


def made_with(directory: Path, after: Any = None) -> list[tuple[int, int]]:
    """(partition, how many there were) of each that was told of, in that order; `after(local,
    told)` is called then."""

    async def run() -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        with LogManager([directory], cluster_id="c" * 22) as logs:

            def made(tp: TopicPartition, partition: Any) -> None:
                assert logs.partitions[tp] is partition
                told.append((tp.partition, len(logs.partitions)))
                if after is not None:
                    after(local, told)

            local = LocalReplicas(
                1,
                logs,
                SimpleNamespace(metadata=metadata()),  # type: ignore[arg-type]
                admin=asyncio.to_thread,
                made=made,
                gone=lambda tp: None,
                remove=None,  # type: ignore[arg-type]
                failed=None,  # type: ignore[arg-type]
            )
            await local.start()
            await local.stop()
        return told

    return asyncio.run(run())


def test_the_first_ones_serve_while_others_are_made(tmp_path: Path) -> None:
    told = made_with(tmp_path)
    assert [number for number, _ in told] == list(range(COUNT))
    assert told[0][1] == AT_ONCE and told[-1][1] == COUNT


def test_a_broker_that_stops_makes_no_more(tmp_path: Path) -> None:
    told = made_with(tmp_path, after=lambda local, told: asyncio.ensure_future(local.stop()))
    assert len(told) < COUNT
