"""What the simulation passes to the client and the broker instead of a clock, threads, sockets and
an RNIC."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors import ActorSchedule

from kdirect.wire.environment import Environment

if TYPE_CHECKING:
    from harness import Simulation


class SimAttempt:
    """A call that takes no time."""

    done = True

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result = call

    def wait(self, seconds: float) -> bool:
        return True


class SimEnvironment(Environment):
    """Simulated time, the RNIC of the process that runs, and calls that take no time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def monotonic(self) -> float:
        return self._simulation.network.now_ns / 1e9

    def time_ms(self) -> int:
        return self._simulation.network.now_ns // 1_000_000

    def sleep(self, seconds: float) -> None:
        self._simulation.sleep(seconds)

    def connect(self, *address: Any, **limits: Any) -> Any:
        return types.SimpleNamespace(close=lambda: None)

    def spawn(self, call: Callable[[], Any]) -> Any:
        return SimAttempt(call)

    def open_device(self, transport: str, **options: Any) -> Any:
        simulation = self._simulation
        actor = simulation.actor
        if actor is None:
            return simulation.network.device("client", ActorSchedule(simulation))
        if actor.device is None:
            actor.device = simulation.network.device(actor.name, ActorSchedule(simulation))
        return actor.device
