"""What the answer to a Produce request waits for in a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kdirect.broker.handlers_data import OneAppend
from kdirect.broker.handlers_replicated import ReplicatedDataHandlers


class Replicas:
    """The followers have nothing yet."""

    def __init__(self) -> None:
        self.asked = 0

    def committed(self, *arguments: Any) -> asyncio.Future[None]:
        self.asked += 1
        return asyncio.get_running_loop().create_future()


def test_acks_1_waits_for_no_replica_where_another_flush_came_first() -> None:
    """When it was appended it was to wait for the disk; now its records are there."""

    async def run() -> None:
        handlers: Any = object.__new__(ReplicatedDataHandlers)
        handlers._replicas = Replicas()
        on_disk = SimpleNamespace(
            config=SimpleNamespace(flush_before_ack=True),
            log_end_offset=5,
            gate=SimpleNamespace(waits_for_disk=lambda end: False),
            acknowledgements_wait=lambda: None,
        )
        for acks, asked in ((1, 0), (-1, 1)):
            append = OneAppend(0, acks)
            append.partition, append.end_offset = on_disk, 5  # type: ignore[assignment]
            wait = handlers._wait_of("t", append, 1000)
            assert (wait.done(), handlers._replicas.asked) == (not asked, asked)

    asyncio.run(run())
