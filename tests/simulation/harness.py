"""What the simulations share: a broker's worker, kernel and grants and its clients as they are,
over simulated RNICs, in simulated time, in one process.

Producers are *actors*: each runs the client's own blocking code in a thread of its own, but only
one thread runs at a time, and the schedule decides which.  Where that code would wait (for a
completion, for an answer of the broker, to sleep) the actor gives way, and the schedule lets the
network move, another actor run, or this one go on.  An actor can be stopped for a while at any such
place, as by SIGSTOP, or killed there, as by SIGKILL.  Everything follows from one seed.

The broker's event loop is the thread that runs: a request is executed whole; what it schedules runs
later.  Its produce worker is stepped by the network, at any time, also while the event loop waits
for its own RNIC.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdirect.broker.access import AccessManager
from kdirect.broker.appends import Appends
from kdirect.broker.engine import Engine
from kdirect.errors import BrokerUnavailableError, TimedOutError
from kdirect.format.codec import decode_records
from kdirect.log.clock import now_ms
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from kdirect.options import BROKER, CLIENT
from kdirect.rdma.sim import Faults, SimCompletionQueue, SimDevice, SimNetwork
from kdirect.wire.channel import Channel
from kdirect.wire.environment import Environment

TP = TopicPartition("t", 0)
MOST_STEPS = 300_000
SHORTEST_NS = (
    1_000  # of a sleep: seconds are floats, and one that rounds to nothing would last for ever
)
# An actor that may run does so before this much time goes by without anything else; longer pauses
# are what `stop` is for.
SLOWEST_NS = 1_000_000


def append_to(access: Any, partition: Any, data: bytes) -> Any:
    """What the broker's Produce does with whole batches: the result, or a future of it."""
    at_ms = now_ms()
    result = access.produce.append_nowait(partition, data, at_ms)
    return access.produce.append(partition, data, at_ms) if result is None else result


class Killed(BaseException):
    """The actor's process is gone."""


class Stuck(AssertionError):
    """Nothing is left to happen, but somebody waits."""


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


def whole(answer: Any) -> Any:
    """An answer; of a coroutine, which only lets others have their turn, what it returns."""
    if not hasattr(answer, "send"):
        return answer
    while True:
        try:
            answer.send(None)
        except StopIteration as end:
            return end.value


class Control:
    """A client's TCP connection: requests are executed whole; answers may take their time."""

    peer = "simulated broker"
    client_id = "client"
    host = port = None
    error = "the broker is gone"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._access = simulation.access
        self.closed = False

    def request(self, message: Any, timeout_ms: float | None = None) -> Any:
        simulation = self._simulation
        simulation.give_way()
        if self.closed or self._access is not simulation.access:
            self.closed = True
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        answer = simulation.execute(lambda: whole(self._access.handle(self, message)))
        if hasattr(answer, "done"):
            simulation.give_way(lambda: answer.done() or self.closed)
            if not answer.done():
                raise BrokerUnavailableError("the broker is gone", hint="connect again")
            answer = answer.result()
        simulation.give_way()
        return answer

    def submit(self, message: Any, timeout_ms: float | None = None) -> SimAsked:
        """As `request`, without waiting for the answer."""
        simulation = self._simulation
        simulation.give_way()
        if self.closed or self._access is not simulation.access:
            self.closed = True
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        return SimAsked(
            simulation, self, simulation.execute(lambda: self._access.handle(self, message))
        )

    def version_for(self, message: Any) -> int:
        return 1


class SimAsked:
    """The answer to a request for access that nobody waits for yet: it arrives a while after it was
    made."""

    def __init__(self, simulation: Simulation, control: Control, answer: Any) -> None:
        self._simulation = simulation
        self._control = control
        self._answer = answer
        self._arrived = False
        simulation.network.call_later(
            simulation.network.random.randint(1000, 200_000), self._arrive
        )

    def _arrive(self) -> None:
        self._arrived = True

    @property
    def done(self) -> bool:
        return self._control.closed or (
            self._arrived and (not hasattr(self._answer, "done") or self._answer.done())
        )

    def wait(self, timeout_ms: float) -> bool:
        return self._simulation.wait(lambda: self.done, timeout_ms)

    def result(self, timeout_ms: float | None = None) -> Any:
        assert self.done
        if self._control.closed:
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        return self._answer.result() if hasattr(self._answer, "done") else self._answer


class SimPending:
    """An answer on its way over TCP."""

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection
        self.answer: Any = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self._connection.closed

    def wait(self, timeout_ms: float) -> bool:
        return self._connection.simulation.wait(lambda: self.done, timeout_ms)

    def result(self, timeout_ms: float) -> Any:
        self.wait(timeout_ms)
        if self.answer is not None:
            return self.answer
        if self._connection.closed:
            raise BrokerUnavailableError("the connection was lost", hint="connect again")
        raise TimedOutError(f"no answer within {timeout_ms} ms", hint="wait longer")


class SimConnection:
    """Produce requests over TCP: executed in order, each whole; the connection may be lost before
    or after, `Simulation.lose` of them."""

    is_kdirect = True

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.closed = False
        self._access = simulation.access
        self._last_ns = 0
        self._arriving: deque[SimPending] = deque()

    def submit_later(self, message: Any) -> SimPending:
        simulation, network = self.simulation, self.simulation.network
        pending = SimPending(self)
        data = bytes(message.topic_data[0].partition_data[0].records)
        self._last_ns = max(self._last_ns, network.now_ns + network.random.randint(1000, 200_000))
        self._arriving.append(pending)

        def arrive() -> None:
            if self.closed or simulation.ended or self._access is not simulation.access:
                self.closed = True
                return
            if (
                simulation.busy
                or network.now_ns < simulation.broker_stopped_until
                or self._arriving[0] is not pending
            ):
                network.call_later(
                    max(10_000, simulation.broker_stopped_until - network.now_ns), arrive
                )
                return
            self._arriving.popleft()
            lost = network.random.random() < simulation.lose
            if lost and network.random.random() < 0.5:
                self.closed = True
                return
            result = simulation.execute(lambda: append_to(self._access, simulation.partition, data))
            self.closed = self.closed or lost
            answer(result)

        def answer(result: Any) -> None:
            if hasattr(result, "done"):
                if not result.done():
                    if self._access is simulation.access and not simulation.ended:
                        network.call_later(20_000, lambda: answer(result))
                    else:
                        self.closed = True
                    return
                result = result.result()
            partition = types.SimpleNamespace(
                index=0,
                error_code=result.error,
                base_offset=result.base_offset,
                log_append_time_ms=-1,
                error_message=None,
            )
            done = types.SimpleNamespace(
                responses=[types.SimpleNamespace(name="t", partition_responses=[partition])]
            )
            network.call_later(
                network.random.randint(1000, 100_000), lambda: setattr(pending, "answer", done)
            )

        network.call_later(self._last_ns - network.now_ns, arrive)
        return pending

    def poll(self) -> None:
        """Answers come by themselves."""

    def abort(self, error: BaseException) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


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


class SimSession:
    """What a producer needs of a session and its cluster."""

    transport = "sim"
    closed = False

    def __init__(
        self, simulation: Simulation, settings: dict[str, Any], actor: Actor | None
    ) -> None:
        self.settings = settings
        self.cluster = self
        self.environment = simulation.environment
        self._simulation = simulation
        self._actor = actor

    def partitions(self, topic: str) -> list[int]:
        return [0]

    def topic(self, name: str, *, refresh: bool = False) -> Any:
        return types.SimpleNamespace(partitions=[0])

    def transport_to(self, tp: TopicPartition) -> str:
        return "sim"

    def leader_address(self, tp: TopicPartition) -> tuple[str, int]:
        return "sim", 1

    leader_address_at_hand = leader_address

    def channel(self, tp: TopicPartition, **sizes: int) -> Channel:
        control = Control(self._simulation)
        if self._actor is not None:
            self._actor.controls.append(control)
        channel = Channel(
            control,  # type: ignore[arg-type]
            "sim",
            environment=self._simulation.environment,
            **sizes,
        )
        if not sizes.get(
            "receives"
        ):  # a reader spins on its completion queue, and never waits on it
            self._simulation.spun_on.add(channel.send_cq)
        return channel

    def connection_for(
        self, tp: TopicPartition, channel: str = "control", timeout_ms: float | None = None
    ) -> SimConnection:
        return SimConnection(self._simulation)

    def messages(self, tp: TopicPartition, settings: dict[str, Any]) -> SimConnection:
        """Requests in SENDs: all appenders of a producer share the connection, in order."""
        return SimConnection(self._simulation)

    def connection_at_hand(self, tp: TopicPartition, channel: str = "control") -> None:
        """Each appender has a connection of its own."""

    def has_reached(self, channel: str) -> bool:
        return True  # an attempt takes no time

    def forget(self, topic: str) -> None:
        """There is nothing to forget."""

    timeout_ms = 200

    def backoff(self, timeout_ms: float, attempts: int = 0) -> Any:
        return types.SimpleNamespace(
            pause=lambda: 0.001 * 2 ** min(attempts, 6) if timeout_ms > 0 else None
        )

    def new_producer_id(self) -> tuple[int, int]:
        self._simulation.last_producer_id += 1
        return self._simulation.last_producer_id, 0


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
        appends = Appends(
            on_thread=self.loop.on_thread, later=self.loop.soon, new_future=self.loop.new_future
        )
        super().__init__(
            logs,
            properties,
            appends,
            environment=BrokerEnvironment(simulation, self.loop),
            scheduler=self.loop,
            start_engine=self.loop.start_engine,
        )
        self.engine = self._engines["sim"] = self.open_engine("sim")


class Simulation:
    """One run.  Use as a context manager; `finish` checks the model."""

    def __init__(
        self,
        seed: int,
        directory: Path,
        faults: Faults,
        *,
        segment_bytes: int = 1 << 16,
        hole_timeout_ms: int = 20,
        client: dict[str, Any] | None = None,
        **properties: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.network = SimNetwork(seed, faults)
        self.actors: list[Actor] = []
        self.busy = 0
        self.ended = False
        self.last_producer_id = 0
        self.broker_stopped_until = 0
        self.spun_on: set[SimCompletionQueue] = (
            set()
        )  # completion queues whose owners poll until something is there
        self.lose = 0.0  # of the TCP connections, at each request
        self.worker_delay_ns = 30_000
        self._baton = threading.Semaphore(0)
        self._directory = directory
        self._lives = 0
        self._config = LogConfig(segment_bytes=segment_bytes)
        self._properties = BROKER.resolve(
            {
                "rdma.transports": "sim",
                "rdma.max.in.flight": "16",
                "rdma.produce.hole.timeout.ms": str(hole_timeout_ms),
                **properties,
            }
        )
        self.settings = CLIENT.resolve(
            {
                "bootstrap.servers": "sim:1",
                "max.in.flight": "8",
                "batch.bytes": "4096",
                "send.buffer.bytes": 1 << 20,
                "spin.us": 0,
                **(client or {}),
            },
        )
        self.environment = SimEnvironment(self)
        self._open()

    def _open(self) -> None:
        self._lives += 1
        self.logs = LogManager([self._directory / f"log{self._lives}"], self._config).open()
        self.partition = self.logs.partitions.get(TP) or self.logs.create_partition(TP)
        self.access = SimBroker(self, self.logs, self._properties)

    # -- time --------------------------------------------------------------------------------------

    @property
    def actor(self) -> Actor | None:
        """The one that runs now."""
        return next((a for a in self.actors if a._thread is threading.current_thread()), None)

    def give_way(self, ready: Callable[[], bool] = lambda: True) -> None:
        actor = self.actor
        if actor is not None:
            actor.give_way(ready)
        else:
            self.run_until(ready)

    def sleep(self, seconds: float) -> None:
        ns = max(SHORTEST_NS, int(seconds * 1e9))
        until = self.network.now_ns + ns
        if self.busy:  # the broker's event loop
            self.network.run_for(ns)
            return
        self.network.call_later(ns, lambda: None)
        self.give_way(lambda: self.network.now_ns >= until)

    def wait(self, ready: Callable[[], bool], timeout_ms: float) -> bool:
        """Within an actor: give way until `ready`, for that long at most; whether it is."""
        ns = max(SHORTEST_NS, int(timeout_ms * 1e6))
        until = self.network.now_ns + ns
        self.network.call_later(ns, lambda: None)
        self.give_way(lambda: ready() or self.network.now_ns >= until)
        return ready()

    def execute(self, call: Callable[[], Any]) -> Any:
        """Something that the broker's event loop does in one go."""
        self.busy += 1
        try:
            self.access.engine.worker.set_time(self.network.now_ns)
            return call()
        finally:
            self.busy -= 1

    def run_until(self, ready: Callable[[], bool]) -> None:
        """Main thread: let the world go on until `ready`: the network moves, or an actor that may
        run does."""
        for _ in range(MOST_STEPS):
            if ready():
                return
            runnable = [a for a in self.actors if a.runnable]
            due = self.network.next_event_ns
            soon = due is not None and due <= self.network.now_ns + SLOWEST_NS
            if runnable and (not soon or self.random.random() < 0.5):
                self.random.choice(runnable).resume()
            elif not self.network.step():
                stopped = [
                    a.stopped_until
                    for a in self.actors
                    if not a.done and a.stopped_until > self.network.now_ns
                ]
                if not stopped:
                    raise Stuck(f"nothing is left to happen; waiting: {self._waiting()}")
                self.network.now_ns = min(stopped)
        raise Stuck(f"not at rest after {MOST_STEPS} steps; waiting: {self._waiting()}")

    def _waiting(self) -> str:
        """Who waits, and where."""
        frames = sys._current_frames()
        return "".join(
            f"\n{a.name}:\n"
            + "".join(traceback.format_stack(frames.get(a._thread.ident or 0))[-9:-1])
            for a in self.actors
            if not a.done
        )

    # -- actors ------------------------------------------------------------------------------------

    def spawn(self, name: str, body: Callable[[Actor], None]) -> Actor:
        actor = Actor(self, name, body)
        self.actors.append(actor)
        return actor

    def session(self, **settings: Any) -> SimSession:
        """A session of the actor that runs now."""
        return SimSession(
            self,
            {
                **self.settings,
                **CLIENT.resolve({"bootstrap.servers": "sim:1", **self.settings, **settings}),
            },
            self.actor,
        )

    def kill(self, actor: Actor) -> None:
        """SIGKILL: its queue pairs go, its connections close a moment later, and it does nothing
        any more."""
        actor.killed = True
        actor.stopped_until = 0
        if actor.device is not None:
            self.network.kill(actor.device)
        for control in actor.controls:
            self.access.loop.soon(self.access.connection_closed, control)

    def stop(self, actor: Actor, ns: int) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        actor.stopped_until = self.network.now_ns + ns
        self.network.call_later(ns, lambda: None)

    # -- the broker --------------------------------------------------------------------------------

    def stop_broker(self, ns: int) -> None:
        """Neither its event loop nor its worker moves for a while; its memory is read and written
        all the same."""
        self.broker_stopped_until = max(self.broker_stopped_until, self.network.now_ns + ns)
        self.network.call_later(ns, lambda: None)

    def restart_broker(self) -> None:
        """SIGKILL and a new start: the files are as they were at that moment."""
        old, logs = self.access, self.logs
        old.loop.dead = True
        self.broker_stopped_until = 0
        shutil.copytree(
            self._directory / f"log{self._lives}", self._directory / f"log{self._lives + 1}"
        )
        self.network.kill(old.engine.device)
        logs.close(clean=False)
        self._open()
        for actor in self.actors:
            for control in actor.controls:
                control.closed = True

    # -- the end -----------------------------------------------------------------------------------

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended = True
        for actor in self.actors:
            while not actor.done:
                actor.killed = True
                actor.resume()
            actor.join()
        self.access.loop.dead = True
        self.logs.close(clean=False)

    def check_tail(self) -> None:
        """Nothing is left in the head file past the last committed byte, once nobody writes it."""
        head = self.partition.head
        if head is not None and head.address:
            end = self.partition.kernel.end_position
            behind = ctypes.string_at(head.address + end, head.mapped_length - end)
            assert behind.count(0) == len(behind), (
                "bytes that were not committed are left in the head"
            )

    def log(self) -> list[bytes]:
        """Every value below the high watermark; offsets are dense and bytes whole."""
        values: list[bytes] = []
        offset = self.partition.log_start_offset
        while offset < self.partition.high_watermark:
            data = b"".join(bytes(x) for x in self.partition.read(offset, 1 << 20))
            records, consumed, next_offset = decode_records(data, "t", 0, offset)
            assert consumed == len(data), "a partial batch was readable"
            assert [r.offset for r in records] == list(range(offset, next_offset)), (
                "a hole in the offsets"
            )
            values += [r.value for r in records]
            offset = next_offset
        return values
