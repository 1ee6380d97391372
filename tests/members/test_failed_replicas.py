"""How often the controller is told of replicas that cannot be used, in simulated time."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.requests import Answer, ReplicasFailed
from kdirect.member.failed_replicas import LONGEST_PAUSE_S, FailedReplicas
from kdirect.member.pause import Pause
from kdirect.model import TopicPartition
from kdirect.store.sim import SimServer
from tests.members.virtual import VirtualLoop

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


class Controller:
    """A membership whose controller refuses, or has the store take what it is told."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.refuses = True
        self.asked: list[tuple[float, tuple[TopicPartition, ...]]] = []
        self.failed: dict[TopicPartition, tuple[Any, ...]] = {A: (), B: ()}
        self.metadata = SimpleNamespace(incarnation=7, partition=self.partition)

    def partition(self, tp: TopicPartition) -> Any:
        return SimpleNamespace(state=object(), replicas=(1, 2), failed=self.failed[tp])

    async def ask(self, request: ReplicasFailed, timeout_s: float) -> Answer:
        self.asked.append((self.loop.now, request.rows))
        if self.refuses:
            return Answer(None, Outcome(Code.STALE_BROKER_EPOCH, "not now"))
        for tp in request.rows:
            self.failed[tp] = ((1, self.metadata.incarnation),)
        return Answer(None)


def test_a_controller_that_refuses_is_asked_less_and_less_often() -> None:
    """It was asked five times a second for as long as it refused."""
    loop = VirtualLoop(SimServer(random.Random(1)), random.Random(1))
    controller = Controller(loop)

    async def run() -> None:
        failed = FailedReplicas(cast(Any, controller), 1)
        failed.add([A])
        await asyncio.sleep(100)
        assert 5 < len(controller.asked) < 20
        count = len(controller.asked)
        failed.look()  # nothing is new, so nobody hurries
        await asyncio.sleep(0.01)
        assert len(controller.asked) == count
        failed.add([B])  # what is new is told at once, and soon again
        await asyncio.sleep(1)
        new = controller.asked[count:]
        assert new[0] == (new[0][0], (A, B)) and new[0][0] < 100.1 and len(new) >= 3
        controller.metadata.incarnation = 8  # as another process it tells everything again
        count = len(controller.asked)
        failed.look()
        await asyncio.sleep(0.01)
        assert len(controller.asked) == count + 1
        controller.refuses = False
        await asyncio.sleep(2 * LONGEST_PAUSE_S)
        count = len(controller.asked)
        await asyncio.sleep(100)
        assert len(controller.asked) == count and controller.failed[A] == ((1, 8),)
        failed.stop()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_pause_doubles_up_to_its_longest() -> None:
    pause = Pause(0.1, 0.5)
    assert [pause.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    pause.reset()
    assert pause.next_s() == 0.1
