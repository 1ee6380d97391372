"""An event loop in simulated time, over a simulated store, and brokers' memberships on it.

All that happens is drawn from a seed: when the store answers, when connections are lost, what other
brokers hear.  No socket, no thread, no clock: a failing seed fails again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kdirect.broker.config import BrokerConfig
from kdirect.cluster.records import Endpoint
from kdirect.errors import BrokerUnavailableError
from kdirect.format import protocol as p
from kdirect.member import loop_store, registration
from kdirect.member.forwarding import decode_request, encode_answer
from kdirect.member.membership import Membership
from kdirect.store.sim import SimServer, SimStore
from kdirect.wire.environment import Environment

SESSION_S = 4.0
START_MS = 1_600_000_000_000


class _Selector(selectors.SelectSelector):
    """Where the loop would wait, the store goes on, or time does."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            if self.loop.server.step():
                timeout = 0
            else:
                assert timeout is not None, "nothing will ever happen again"
                self.loop.now += timeout
                self.loop.server.pass_time(int(timeout * 1e9))
        elif self.loop.chance.random() < 0.3:
            self.loop.server.step()
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, server: SimServer, chance: random.Random) -> None:
        selector = _Selector()
        selector.loop = self
        self.server = server
        self.chance = chance
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class _Clock(Environment):
    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = loop.time  # type: ignore[method-assign]
        self._loop = loop

    def time_ms(self) -> int:
        return START_MS + int(self._loop.now * 1000)


class _Peers:
    """What `Peers` is to a membership, among those of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.lost: list[Callable[[int], None]] = []
        self.closed = False

    async def call(self, node_id: int, message: Any, *, timeout_s: float) -> Any:
        await asyncio.sleep(self._world.chance.random() * 0.01)
        there = await self._reach(node_id)
        request = decode_request(message.kind, bytes(message.body))
        if self._world.is_lost():
            raise BrokerUnavailableError("the request was lost")
        answer, generation = await asyncio.wait_for(there.answer(request), timeout_s)
        if self._world.is_lost():
            raise BrokerUnavailableError("the answer was lost")
        code, body = encode_answer(answer, request)
        return p.AskControllerResponse(error_code=code, generation=generation, body=body)

    async def reach(self, node_id: int) -> None:
        await self._reach(node_id)

    async def _reach(self, node_id: int) -> Membership:
        there = self._world.members.get(node_id)
        if self.closed or there is None:
            error = BrokerUnavailableError(f"broker {node_id} does not take connections")
            error.__cause__ = ConnectionRefusedError()
            raise error
        return there

    def listen_for_losses(self, call: Callable[[int], None]) -> None:
        self.lost.append(call)

    def close(self) -> None:
        self.closed = True


class World:
    """Members by their ids; those that were killed are in it no more."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.chance = random.Random(seed)
        self.server = SimServer(self.chance, session_timeout_ns=int(SESSION_S * 1e9))
        self.loop = VirtualLoop(self.server, self.chance)
        self.members: dict[int, Membership] = {}
        self.weather_is_bad = False
        self._directory = directory
        self._sessions: dict[int, list[SimStore]] = {}
        self._ports = itertools.count(1)
        self._listening: dict[int, int] = {}
        self._dead: list[SimStore] = []

    def run(self, work: Coroutine[Any, Any, None], monkeypatch: pytest.MonkeyPatch) -> None:
        """Run to the end, with what would leave the simulation replaced."""

        async def at_once(call: Callable[[], None]) -> None:
            call()

        async def dial(host: str, port: int) -> OSError | None:
            return None if port in self._listening.values() else ConnectionRefusedError()

        monkeypatch.setattr(loop_store, "on_a_thread", at_once)
        monkeypatch.setattr(registration, "_dial", dial)
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(work)
            self.loop.run_until_complete(self._end())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    async def _end(self) -> None:
        for member in self.members.values():
            await member.stop()
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def come_back(self) -> None:
        """The store works again, for those that live."""
        self.server.come_back()
        for store in self._dead:
            self.server.cut(store)

    def is_lost(self) -> bool:
        """A message between brokers."""
        return self.weather_is_bad and self.chance.random() < 0.1

    # -- brokers -----------------------------------------------------------------------------------

    async def start(self, node_id: int) -> Membership:
        """Start a broker; it is a member when it can be reached."""
        directory = self._directory / f"broker-{node_id}"
        directory.mkdir(exist_ok=True)
        config = BrokerConfig(
            {
                "node.id": node_id,
                "log.dirs": [str(directory)],
                "zookeeper.connect": "simulated:1",
                "zookeeper.session.timeout.ms": int(SESSION_S * 1000),
                "zookeeper.connection.timeout.ms": 60_000,
                "controlled.shutdown.retry.backoff.ms": 100,
            }
        )

        def open_store() -> SimStore:
            store = SimStore(self.server)
            self._sessions.setdefault(node_id, []).append(store)
            return store

        peers: Any = _Peers(self)
        member = Membership(
            config, [directory], peers, environment=_Clock(self.loop), open_store=open_store
        )
        await member.connect()
        self.members[node_id] = member
        self._listening[node_id] = next(self._ports)
        await member.start([Endpoint("PLAINTEXT", f"host-{node_id}", self._listening[node_id])])
        return member

    def store(self, node_id: int) -> SimStore:
        """Of the present session of a broker."""
        return self._sessions[node_id][-1]

    def kill(self, node_id: int) -> None:
        """End its process; its session goes on until it times out."""
        member = self.members.pop(node_id)
        self._listening.pop(node_id, None)
        member._stopped = True
        if member._timer is not None:
            member._timer.cancel()
        for task in member._tasks:
            task.cancel()
        member.peers.close()
        if member._session is not None:
            member._session._end()
        self._dead.append(self.store(node_id))
        self.server.cut(self._dead[-1])
        for other in self.members.values():
            for call in other.peers.lost:  # type: ignore[attr-defined]
                self.loop.call_later(self.chance.random(), call, node_id)
