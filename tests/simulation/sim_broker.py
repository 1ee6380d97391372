"""One life of the broker: its access manager as it is, over an event loop and a produce worker that
the network steps.

The broker's event loop is the thread that runs: a request is executed whole; what it schedules runs
later.  Its produce worker is stepped by the network, at any time, also while the event loop waits
for its own RNIC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from environments import SimEnvironment

from kdirect.broker.access import AccessManager
from kdirect.broker.appends import Appends
from kdirect.broker.engine import Engine
from kdirect.log.manager import LogManager
from kdirect.rdma.sim import SimCompletionQueue

if TYPE_CHECKING:
    from harness import Simulation


class BrokerSchedule:
    """The broker's worker is stepped soon after a completion arrives.  Its event loop waits for its
    own RNIC by stepping the network."""

    def __init__(self, soon: Callable[[], None]) -> None:
        self._soon = soon

    def wait(self, queue: SimCompletionQueue, timeout_ms: float) -> bool:
        return False

    def poll_found_nothing(self, queue: SimCompletionQueue) -> bool:
        return False

    def signalled(self, queue: SimCompletionQueue) -> None:
        self._soon()


class BrokerEnvironment(SimEnvironment):
    """The same for the broker, whose device is its own."""

    def __init__(self, simulation: Simulation, loop: SimLoop) -> None:
        super().__init__(simulation)
        self._schedule = BrokerSchedule(loop.step_soon)

    def open_device(self, transport: str, **options: Any) -> Any:
        return self._simulation.network.device("broker", self._schedule)


class Future:
    """A future without an event loop."""

    def __init__(self) -> None:
        self._outcome: tuple[Any, BaseException | None] | None = None

    def done(self) -> bool:
        return self._outcome is not None

    def set_result(self, result: Any) -> None:
        self._outcome = result, None

    def set_exception(self, error: BaseException) -> None:
        self._outcome = None, error

    def result(self) -> Any:
        assert self._outcome is not None
        if self._outcome[1] is not None:
            raise self._outcome[1]
        return self._outcome[0]


class SimLoop:
    """The event loop of one life of the broker: what is scheduled happens a moment later, never
    within another of its callbacks, and not at all once the broker is dead."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.dead = False
        self._worker: Any = None

    def soon(self, callback: Callable[..., None], *args: Any) -> None:
        self.later(0, callback, *args)

    def later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        jitter_ns = self._simulation.network.random.randint(0, 50_000)
        self._run_after(int(seconds * 1e9) + jitter_ns, lambda: callback(*args))

    def new_future(self) -> Any:
        return Future()

    def on_thread(
        self,
        partition: Any,
        work: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """A thread's work is done whole, at some moment; the event loop hears of it at a later
        one."""

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as e:
                result, error = None, e
            self.soon(done, result, error)

        self._run_after(self._simulation.network.random.randint(0, 500_000), run)

    def _run_after(self, delay_ns: int, call: Callable[[], None]) -> None:
        simulation = self._simulation
        network = simulation.network

        def run() -> None:
            if self.dead or simulation.ended:
                return
            if simulation.busy or network.now_ns < simulation.broker_stopped_until:
                network.call_later(max(1000, simulation.broker_stopped_until - network.now_ns), run)
                return
            simulation.execute(call)

        network.call_later(delay_ns, run)

    def start_engine(self, engine: Engine) -> None:
        """Let the network step an engine's worker, when completions arrive and holes expire."""
        self._worker = engine.worker
        self._worker.set_time(self._simulation.network.now_ns)

    def step_soon(self) -> None:
        simulation = self._simulation
        delay_ns = simulation.network.random.randint(0, simulation.worker_delay_ns)
        simulation.network.call_later(delay_ns, self._step)

    def _step(self) -> None:
        simulation, worker = self._simulation, self._worker
        network = simulation.network
        if self.dead or simulation.ended or worker is None:
            return
        if network.now_ns < simulation.broker_stopped_until:
            network.call_later(simulation.broker_stopped_until - network.now_ns, self._step)
            return
        worker.set_time(network.now_ns)
        worker.step()
        deadline = worker.next_deadline_ns
        if deadline:
            network.call_later(max(1, deadline - network.now_ns), self._step)


class SimBroker(AccessManager):
    """The access manager of one life of the broker, over a simulated device that is open from the
    start."""

    def __init__(
        self, simulation: Simulation, logs: LogManager, properties: dict[str, Any]
    ) -> None:
        self.loop = SimLoop(simulation)
        self.appends = Appends(
            on_thread=self.loop.on_thread, later=self.loop.soon, new_future=self.loop.new_future
        )
        super().__init__(
            logs,
            properties,
            self.appends,
            environment=BrokerEnvironment(simulation, self.loop),
            scheduler=self.loop,
            start_engine=self.loop.start_engine,
        )
        self.engine = self._engines["sim"] = self.open_engine("sim")


def give_back(logs: Iterable[LogManager]) -> None:
    """Give back what was granted of closed logs, as the end of a process gives back its
    descriptors: here they would be left to all tests that follow.  Only once the network is at
    rest, for it may still READ what was granted before."""
    for log in logs:
        for partition in log.partitions.values():
            for segment in partition.segments:
                while segment.references > 0:
                    segment.release()
