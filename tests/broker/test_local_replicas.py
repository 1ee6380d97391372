"""The replicas that a broker makes and removes: one topic's trouble is not that of the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from kdirect.broker.local_replicas import LocalReplicas


def test_a_topic_that_cannot_be_looked_at_holds_up_no_other() -> None:
    looked: list[str] = []

    def partitions_of(name: str) -> list[Any]:
        looked.append(name)
        if name == "bad":
            raise ValueError("what nobody has thought of")
        return []

    async def run() -> None:
        image = SimpleNamespace(topics={"bad": object(), "good": object()}, damaged=())
        metadata: Any = SimpleNamespace(image=image, topic=lambda name: None)
        logs = SimpleNamespace(partitions={}, partitions_of=partitions_of, offline={}, lost={})
        none: Any = None
        replicas = LocalReplicas(
            1,
            cast(Any, logs),
            cast(Any, SimpleNamespace(metadata=metadata)),
            admin=none,
            made=none,
            gone=none,
            remove=none,
            failed=none,
        )
        await replicas.start()
        assert sorted(looked) == ["bad", "good"]
        assert replicas._retry is not None, "the bad one is looked at again"
        await replicas.stop()

    asyncio.run(run())
