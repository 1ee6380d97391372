"""What a broker asks of the store so that there is a controller, without a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kdirect.cluster import controller, paths, records
from kdirect.cluster.image import Settings
from kdirect.cluster.records import BrokerRegistration, Endpoint
from kdirect.cluster.requests import AlterConfig, ConfigOf, ShutDown
from kdirect.errors import CorruptMetadataError
from kdirect.member import controller_host
from kdirect.member.controller_host import ControllerHost
from kdirect.member.metadata import LiveNode
from kdirect.member.reports import Reports
from kdirect.store.contract import (
    Children,
    Committed,
    Create,
    Delete,
    Found,
    Node,
    Operation,
    ReadAnswer,
)
from kdirect.wire.environment import SYSTEM


class Asked:
    """Stands for a `LoopStore`, and keeps what was asked last."""

    def __init__(self) -> None:
        self.read_done: Callable[[ReadAnswer], None] | None = None
        self.operations: Sequence[Operation] = ()

    def read(self, wanted: Any, done: Callable[[ReadAnswer], None], *, watch: bool = False) -> None:
        self.read_done = done

    def commit(self, operations: Sequence[Operation], done: Callable[[Any], None]) -> None:
        self.operations = operations

    def show_controller(self, broker: int, created: int) -> None:
        """Answer what was read."""
        done, self.read_done = self.read_done, None
        assert done is not None
        epoch = Node(records.encode_controller_epoch(created), created, 1)
        done(Found((Node(records.encode_controller(broker, 0), 0, created), epoch)))


def node(node_id: int) -> LiveNode:
    endpoints = (Endpoint("PLAINTEXT", "127.0.0.1", node_id),)
    return LiveNode(node_id, BrokerRegistration(endpoints, {"PLAINTEXT": "PLAINTEXT"}), node_id, 1)


SETTINGS = Settings(rebalance_interval_ms=1000)


def run(
    test: Callable[[Asked, ControllerHost], Awaitable[None]],
    made: Callable[[], Asked] = Asked,
    environment: Any = None,
) -> None:
    async def body() -> None:
        store: Any = made()
        host = ControllerHost(
            store,
            1,
            SETTINGS,
            SYSTEM if environment is None else environment,
            Reports(),
            look_for_brokers=lambda: None,
            elected=lambda: None,
        )
        host.brokers_changed({n: node(n) for n in (1, 2, 3)})
        host.connected()
        await test(store, host)

    asyncio.run(body())


def test_a_broker_that_died_before_it_was_known_to_be_controller() -> None:
    async def test(store: Asked, host: ControllerHost) -> None:
        store.show_controller(2, created=10)
        host.died(3)  # has just been elected, which this broker has not read yet
        host.noticed()
        store.show_controller(3, created=11)
        assert host.controller_id == 3
        host.died(3)  # it still refuses connections
        store.show_controller(3, created=11)
        delete, create, _ = store.operations
        assert delete == Delete(paths.CONTROLLER, 0)
        assert isinstance(create, Create) and create.path == paths.CONTROLLER

    run(test)


def test_questions_of_those_who_gave_up_do_not_pile_up() -> None:
    async def test(store: Asked, host: ControllerHost) -> None:
        nodes = {paths.CONTROLLER_EPOCH: Node(records.encode_controller_epoch(1), 1, 1)}
        host._controller, _ = controller.begin(nodes, 1, Settings(), now_ms=0)
        begun = host.ask(AlterConfig(None, ConfigOf.BROKER, "1", {"broker.rack": "a"}))
        assert store.operations  # and the store does not answer
        for tag in (None, "of the asker"):
            waiting = [
                host.ask(AlterConfig(tag, ConfigOf.BROKER, "2", {"broker.rack": "b"})),
                host.ask(ShutDown(tag, 2, 2)),
            ]
            await asyncio.sleep(0)
            for future in waiting:
                future.cancel()
            await asyncio.wait(waiting)
            await asyncio.sleep(0)
            assert host._controller.queue == () and host._controller.shutdowns == ()
            assert len(host._asked) == 1 and not begun.done()

    run(test)


class Willing(Asked):
    """Answers at once, and lets every claim happen.  `claims` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = 0
        self.claimed = asyncio.Event()

    def read(self, wanted: Any, done: Callable[[ReadAnswer], None], *, watch: bool = False) -> None:
        epoch = Node(records.encode_controller_epoch(self.claims), self.claims, 1)
        there = {paths.CONTROLLER_EPOCH: epoch}
        answer = Found(tuple(there.get(path) for path in wanted))
        asyncio.get_running_loop().call_soon(done, answer)

    def children(self, wanted: Any, done: Callable[[Any], None], *, watch: bool = False) -> None:
        asyncio.get_running_loop().call_soon(done, Children((None,) * len(wanted)))

    def commit(self, operations: Sequence[Operation], done: Callable[[Any], None]) -> None:
        if any(isinstance(operation, Create) for operation in operations):
            self.claims += 1
            self.claimed.set()
        asyncio.get_running_loop().call_soon(done, Committed((0,) * len(operations)))


@pytest.mark.parametrize("error", [CorruptMetadataError("damaged"), ZeroDivisionError()])
def test_a_controller_that_cannot_begin_tries_again_after_pauses(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it takes an epoch, and reads all nodes."""

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error

    async def test(store: Asked, host: ControllerHost) -> None:
        assert isinstance(store, Willing)
        pauses: list[float] = []
        for _ in range(4):
            await asyncio.wait_for(store.claimed.wait(), 20)
            store.claimed.clear()
            for _ in range(300):  # whatever it would do at once, it does now
                await asyncio.sleep(0)
                host.noticed()
            pauses.append(host._pauses.coming_s)
        assert pauses == [0.02, 0.03, 0.03, 0.03]  # the one that comes next
        assert store.claims == 4

    monkeypatch.setattr(controller, "begin", fail)
    monkeypatch.setattr(controller_host, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(controller_host, "LONGEST_PAUSE_S", 0.03)
    run(test, Willing)


def test_a_clock_that_is_set_does_not_hold_up_rebalancing() -> None:
    class Clock:
        """Runs on, and is set back by a day when the controller has begun."""

        ran_s = 0.0

        def monotonic(self) -> float:
            return 1000.0 + self.ran_s

        def time_ms(self) -> int:
            return int(1e12) if not self.ran_s else int(1e12) - 86_400_000

    clock, ticks = Clock(), []

    async def test(store: Asked, host: ControllerHost) -> None:
        await store.claimed.wait()  # type: ignore[attr-defined]
        for _ in range(50):
            await asyncio.sleep(0)
        host._feed = ticks.append  # type: ignore[method-assign]
        assert host._controller is not None
        due = host._controller.rebalance_ms
        clock.ran_s = 1.0
        host.tick()
        assert ticks == [controller.Ticked(due)]

    run(test, Willing, clock)


def test_a_controller_begins_with_the_brokers_that_were_seen_last() -> None:
    """What it has read may be older: a topic of three replicas would be refused."""

    async def test(store: Asked, host: ControllerHost) -> None:
        await store.claimed.wait()  # type: ignore[attr-defined]
        for _ in range(50):
            await asyncio.sleep(0)
        assert host._controller is not None
        assert host._controller.fleet.live.keys() == {1, 2, 3}

    run(test, Willing)
