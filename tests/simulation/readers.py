"""What a consumer needs of a session and its cluster, in the simulation: one broker leads every
partition, and is reached over the simulated RNIC alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors import Actor
from harness import SimSession, Simulation

from kdirect.model import TopicPartition

NODE = 1


class ReadingSession(SimSession):
    """A session of the actor that runs now, for `Reading`, `Consumer` and `Reader`."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, dict(simulation.settings), simulation.actor)
        self.environment = simulation.environment

    def check(self) -> None:
        """It is never closed."""

    def transport_to(self, tp: TopicPartition, *, closest: bool = False) -> str:
        return "sim"

    def leaders(
        self, tps: Iterable[TopicPartition], *, closest: bool = False
    ) -> tuple[dict[int, list[TopicPartition]], dict[TopicPartition, Any]]:
        tps = list(tps)
        return ({NODE: tps} if tps else {}), {}

    def leader_address(self, tp: TopicPartition, *, closest: bool = False) -> tuple[str, int]:
        return "sim", NODE

    def earliest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        logs = self._simulation.logs.partitions
        return {tp: logs[tp].log_start_offset for tp in tps}

    def latest_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        logs = self._simulation.logs.partitions
        return {tp: logs[tp].high_watermark for tp in tps}


def lose_control(simulation: Simulation, actor: Actor) -> None:
    """The TCP connections end over which an actor was granted access."""
    for control in actor.controls:
        if not control.closed:
            control.closed = True
            simulation.access.loop.soon(simulation.access.connection_closed, control)
