"""The end of a leadership's marks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker.led_log import LedLog, Rings
from kdirect.rdma.sim import SimNetwork
from tests.broker.push_rig import TP, Node
from tests.log.conftest import make_batch


@pytest.mark.parametrize("began", [True, False])
def test_marks_that_never_began_leave_the_gate_alone(began: bool, tmp_path: Path) -> None:
    """A follower's file comes when the leader is alone already, and so cannot begin to push.  What
    its producers write is readable at once, then as before.  A leadership that did begin ends with
    readers held where they are."""

    async def run() -> None:
        node = Node(1, SimNetwork(1).device("broker"), tmp_path)
        try:
            led = LedLog(
                SimpleNamespace(tp=TP, partition=node.partition),  # type: ignore[arg-type]
                node.worker,
                lambda partition, work, done: done(work(), None),
                most_bytes=4096,
                logs_of=Rings(),
                ended=lambda log: None,
            )
            if began:
                led.begins = asyncio.get_running_loop().create_future()
                led.begins.set_result(None)
            await led.resign()
            node.partition.append(make_batch())
            shown: Any = node.partition.high_watermark
            assert (shown, node.partition.log_end_offset) == (0 if began else 1, 1)
        finally:
            node.close()

    asyncio.run(run())
