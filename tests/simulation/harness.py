"""What the simulations share: a broker's worker, kernel and grants and its clients as they are,
over simulated RNICs, in simulated time, in one process.

The actors (actors.py) run one at a time, and the schedule, which is `Simulation.run_until`, lets
the network move, another actor run, or one that gave way go on.  An actor can be stopped for a
while at any place where it gives way, as by SIGSTOP, or killed there, as by SIGKILL.  The broker of
one life is in sim_broker.py, the TCP connections to it in connections.py.  Everything follows from
one seed.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import sys
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors import Actor
from connections import Control, SimConnection
from environments import SimEnvironment
from sim_broker import SimBroker, give_back

from kdirect.format.codec import decode_records
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.model import TopicPartition
from kdirect.options import BROKER, CLIENT
from kdirect.rdma.sim import Faults, SimCompletionQueue, SimNetwork
from kdirect.wire.channel import Channel

TP = TopicPartition("t", 0)
MOST_STEPS = 300_000
# Of a sleep: seconds are floats, and one that rounds to nothing would last for ever.
SHORTEST_NS = 1_000
# An actor that may run does so before this much time goes by without anything else; longer pauses
# are what `stop` is for.
SLOWEST_NS = 1_000_000


class Stuck(AssertionError):
    """Nothing is left to happen, but somebody waits."""


class SimSession:
    """What a producer needs of a session and its cluster."""

    transport = "sim"
    closed = False
    cold_stores = None

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

    def transport_to(self, tp: TopicPartition, *, closest: bool = False) -> str:
        return "sim"

    def leader_address(self, tp: TopicPartition, *, closest: bool = False) -> tuple[str, int]:
        return "sim", 1

    leader_address_at_hand = leader_address

    def channel(self, tp: TopicPartition, *, closest: bool = False, **sizes: int) -> Channel:
        control = Control(self._simulation)
        if self._actor is not None:
            self._actor.controls.append(control)
        channel = Channel(
            control,  # type: ignore[arg-type]
            "sim",
            environment=self._simulation.environment,
            **sizes,
        )
        if not sizes.get("receives"):
            # A reader spins on its completion queue, and never waits on it.
            self._simulation.spun_on.add(channel.send_cq)
        return channel

    def connection_for(
        self,
        tp: TopicPartition,
        channel: str = "control",
        timeout_ms: float | None = None,
        *,
        closest: bool = False,
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

    def refresh(self, topics: list[str], timeout_ms: float | None = None) -> dict[str, Any]:
        known = {tp.topic for tp in self._simulation.logs.partitions}
        found = types.SimpleNamespace(topic_id=None, partition=lambda number: None)
        return {name: found for name in topics if name in known}

    has_several_brokers = False
    rack = None

    def leave_replica(self, tp: TopicPartition) -> bool:
        return False

    def leader_epoch(self, tp: TopicPartition) -> int:
        return -1

    def topic_id(self, topic: str) -> None:
        """The broker has no ids."""

    timeout_ms = 200

    def backoff(self, timeout_ms: float, attempts: int = 0) -> Any:
        return types.SimpleNamespace(
            pause=lambda: 0.001 * 2 ** min(attempts, 6) if timeout_ms > 0 else None
        )

    def new_producer_id(self) -> tuple[int, int]:
        self._simulation.last_producer_id += 1
        return self._simulation.last_producer_id, 0


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
        # Completion queues whose owners poll until something is there.
        self.spun_on: set[SimCompletionQueue] = set()
        self.lose = 0.0  # of the TCP connections, at each request
        self.worker_delay_ns = 30_000
        self._baton = threading.Semaphore(0)
        self._directory = directory
        self._lives = 0
        self._closed_logs: list[LogManager] = []
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
        self._closed_logs.append(logs)
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
        give_back([*self._closed_logs, self.logs])

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
