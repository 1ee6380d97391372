"""The processes of a simulation other than the broker.

Each actor runs the client's own blocking code in a thread of its own, but only one thread runs at a
time, and the schedule decides which.  Where that code would wait (for a completion, for an answer
of the broker, to sleep) the actor gives way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kdirect.rdma.sim import SimCompletionQueue, SimDevice

if TYPE_CHECKING:
    from connections import Control
    from harness import Simulation


class Killed(BaseException):
    """The actor's process is gone."""


class Actor:
    """One process.  `body(actor)` runs in a thread of its own, when the simulation lets it."""

    def __init__(self, simulation: Simulation, name: str, body: Callable[[Actor], None]) -> None:
        self.simulation = simulation
        self.name = name
        self.device: SimDevice | None = None
        self.controls: list[Control] = []
        self.done = False
        self.killed = False
        self.stopped_until = 0
        self.error: BaseException | None = None
        self._ready: Callable[[], bool] = lambda: True
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[Actor], None]) -> None:
        self._go.acquire()
        try:
            body(self)
        except Killed:
            pass
        except BaseException as e:
            self.error = e
        self.done = True
        self.simulation._baton.release()

    @property
    def runnable(self) -> bool:
        return (
            not self.done
            and self.simulation.network.now_ns >= self.stopped_until
            and (self.killed or self._ready())
        )

    def resume(self) -> None:
        """Let it run until it gives way."""
        self._go.release()
        self.simulation._baton.acquire()

    def give_way(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Within the actor: others may run; come back once `ready`."""
        self._ready = ready
        self.simulation._baton.release()
        self._go.acquire()
        if self.killed:
            raise Killed

    def join(self) -> None:
        self._thread.join(10)


class ActorSchedule:
    """Where a client would wait for a completion its actor gives way."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def wait(self, queue: SimCompletionQueue, timeout_ms: float) -> bool:
        simulation = self._simulation
        if simulation.actor is None or simulation.busy:
            return False
        until = simulation.network.now_ns + int(timeout_ms * 1e6) if timeout_ms >= 0 else None
        if until is not None:
            simulation.network.call_later(int(timeout_ms * 1e6), lambda: None)
        simulation.give_way(
            lambda: (
                queue.has_news
                or queue.woken
                or (until is not None and simulation.network.now_ns >= until)
            )
        )
        return True

    def poll_found_nothing(self, queue: SimCompletionQueue) -> bool:
        simulation = self._simulation
        if queue not in simulation.spun_on or simulation.actor is None:
            return False
        simulation.give_way(lambda: queue.has_news)
        return True

    def signalled(self, queue: SimCompletionQueue) -> None:
        """The actor looks for itself."""
