"""What a broker asks of the store so that there is a controller, without a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kdirect.cluster import controller, paths, records
from kdirect.cluster.image import Settings
from kdirect.cluster.records import BrokerRegistration, Endpoint
from kdirect.cluster.requests import AlterConfig, ConfigOf, ShutDown
from kdirect.member.controller_host import ControllerHost
from kdirect.member.metadata import LiveNode
from kdirect.member.reports import Reports
from kdirect.store.contract import Create, Delete, Found, Node, Operation, ReadAnswer
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


def run(test: Callable[[Asked, ControllerHost], Awaitable[None]]) -> None:
    async def body() -> None:
        store: Any = Asked()
        host = ControllerHost(
            store,
            1,
            Settings(),
            SYSTEM,
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
