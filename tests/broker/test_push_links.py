"""The links between two brokers: which of them are kept, when registrations, requests and ends come
in the middle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kdirect.broker import push_links, replication
from kdirect.broker.engine import Engine
from kdirect.broker.push_requests import BatchedRequests
from kdirect.broker.replication import Replication
from kdirect.broker.worker import CutReason
from kdirect.errors import BrokerUnavailableError, ClosedError, RdmaError, TransportError
from kdirect.format import protocol as p
from kdirect.model import TopicPartition
from kdirect.rdma.sim import SimNetwork

LEADER, FOLLOWER = 1, 2
TP = TopicPartition("t", 0)


class Broker:
    """One broker's links, over a simulated network."""

    def __init__(self, number: int, network: SimNetwork, registered: dict[int, int]) -> None:
        nothing: Any = lambda *arguments: None  # noqa: E731
        self.number = number
        self.registered = registered
        self.engine = Engine(
            "shm",
            network.device(f"broker-{number}"),
            spin_us=0,
            on_cut=nothing,
            on_append=nothing,
            on_head=nothing,
            on_broker_requests=nothing,
            sync=nothing,
        )
        self.leader: Broker | None = None
        self.meanwhile: Callable[[], None] = lambda: None  # while a thread makes a link
        self.asked: asyncio.Task[Any] | None = None
        self.holds: asyncio.Event | None = None
        access: Any = SimpleNamespace(
            engine=self._engine, engines=[self.engine], links=SimpleNamespace()
        )
        files: Any = SimpleNamespace(read=self._read, background=lambda work: work())
        throttles: Any = SimpleNamespace(followed=None, led=None)
        self.replication = Replication(
            access,
            files,
            SimpleNamespace(call=self._call),
            {"node.id": number, "replica.push.max.bytes": 4096, "rdma.transports": ["shm"]},
            lambda: registered[number],
            throttles,
        )
        self.incarnation_of = lambda broker: registered.get(broker, -1)
        self.tell()

    def tell(self) -> None:
        """The brokers that are registered have changed."""
        self.replication.registered(self.registered[self.number], self.incarnation_of)

    async def _engine(self, transport: str) -> Engine:
        return self.engine

    async def _read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        result = work(*arguments)
        self.meanwhile()
        if self.holds is not None:
            await self.holds.wait()
        return result

    async def _call(self, broker: int, request: Any, *, timeout_s: float) -> Any:
        assert self.leader is not None
        self.asked = asyncio.ensure_future(self.leader.answer(request))
        return await self.asked

    async def answer(self, request: Any) -> Any:
        find: Any = lambda tp, epoch: SimpleNamespace(leader=None, error=6)  # noqa: E731
        return await self.replication.answer(request, find, self.incarnation_of)


def play(scenario: Callable[[Broker, Broker, dict[int, int]], Awaitable[None]]) -> None:
    async def run() -> None:
        network = SimNetwork(1)
        registered = {LEADER: 10, FOLLOWER: 20}
        leader, follower = (Broker(n, network, registered) for n in (LEADER, FOLLOWER))
        follower.leader = leader
        await scenario(leader, follower, registered)

    asyncio.run(run())


def test_a_follower_that_is_registered_again_meanwhile_gets_another_link() -> None:
    """What it confirms over a link of its old registration would never count."""

    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        def again() -> None:
            leader.meanwhile = lambda: None
            registered[FOLLOWER] = 21
            leader.tell()
            follower.tell()

        leader.meanwhile = again
        with pytest.raises(TransportError, match="not registered in this incarnation"):
            await follower.replication.link(LEADER)
        assert leader.replication.statistics()["replicas_push_links"] == 0
        link = await follower.replication.link(LEADER)
        assert link.is_open and link.incarnation == 21

    play(scenario)


def test_a_link_of_an_older_registration_of_this_broker_is_not_kept() -> None:
    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        def again() -> None:
            if leader.replication.statistics()["replicas_push_links"]:  # the answer has come
                follower.meanwhile = lambda: None
                registered[FOLLOWER] = 21
                follower.tell()

        follower.meanwhile = again
        with pytest.raises(TransportError, match="registered in another incarnation"):
            await follower.replication.link(LEADER)
        link = await follower.replication.link(LEADER)
        assert link.is_open and link.incarnation == 21

    play(scenario)


def test_a_link_that_its_leader_does_not_know_is_opened_again() -> None:
    """That its other end was closed may come while it is still being opened, and is not heard."""

    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        before = await follower.replication.link(LEADER)
        (out,) = leader.replication._out.values()
        leader.replication._close_out(out)
        copy: Any = SimpleNamespace(
            tp=TP,
            epoch=3,
            partition=SimpleNamespace(head_config=SimpleNamespace(segment_bytes=1 << 20)),
        )
        with pytest.raises(BrokerUnavailableError, match="not known"):
            await follower.replication.ask(before, copy)
        assert not before.is_open
        assert await follower.replication.link(LEADER) is not before

    play(scenario)


def test_a_link_that_is_being_made_is_not_lost_with_its_request() -> None:
    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        made, leader.holds = asyncio.Event(), asyncio.Event()
        leader.meanwhile = made.set
        opening = asyncio.ensure_future(follower.replication.link(LEADER))
        await made.wait()
        assert follower.asked is not None
        follower.asked.cancel()  # the connection is lost
        with pytest.raises(asyncio.CancelledError):
            await opening
        leader.holds.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        assert leader.replication.statistics()["replicas_push_links"] == 1, "else nobody closes it"

    play(scenario)


def test_whoever_asks_hears_of_a_mistake() -> None:
    """Also where it is none of the errors that a request may end with."""

    async def run() -> None:
        async def send(link: Any, kind: Any, topics: Any) -> Any:
            raise ValueError("a mistake")

        requests = BatchedRequests(send, p.AskPushRequest)
        link: Any = SimpleNamespace(leader=LEADER)
        with pytest.raises(BrokerUnavailableError, match="a mistake"):
            await asyncio.wait_for(requests.ask(link, TP, {}), 5)

    asyncio.run(run())


def test_two_answers_about_one_partition_are_told_apart() -> None:
    """One that is given up has an answer, too: the lease in it is not the other's."""

    async def send(link: Any, kind: Any, topics: list[Any]) -> Any:
        answered = [
            SimpleNamespace(
                topic=topic["topic"],
                partitions=[
                    SimpleNamespace(partition=0, error_code=0, offset=row["offset"])
                    for row in topic["partitions"]
                ],
            )
            for topic in topics
        ]
        return SimpleNamespace(error_code=0, topics=answered)

    async def ask() -> list[int]:
        rows = BatchedRequests(send, p.AskSegmentsRequest)
        link: Any = SimpleNamespace(leader=LEADER)
        asked = [rows.ask(link, TP, {"partition": 0, "offset": n}) for n in (5, 6)]
        return [x.offset for x in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [5, 6]


def test_no_link_is_made_once_replication_has_closed() -> None:
    """What comes too late leaves no queue pair on the engine, whose end would refuse."""

    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        link = await follower.replication.link(LEADER)
        link.copies.add(object())  # a replica that does not come to its end
        for broker in (follower, leader):
            broker.replication.close()
        with pytest.raises(ClosedError, match="stopping"):
            await follower.replication.link(LEADER)
        for broker in (follower, leader):
            broker.engine.close()

    play(scenario)


def test_a_link_keeps_no_memory_of_partitions_that_are_led_no_more() -> None:
    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        await follower.replication.link(LEADER)
        (out,) = leader.replication._out.values()
        led: Any = SimpleNamespace(leader=SimpleNamespace(tp=TP))
        for is_used in (True, False):
            number = out.new_ring(TP)
            if is_used:
                out.unused.discard(number)
            leader.replication._logs[TP] = led
            leader.replication._resigned(led)
            assert (out.newest(TP), len(out.memories)) == ((-1, 0) if is_used else (number, 1))

    play(scenario)


def test_a_link_that_is_cut_before_anybody_knows_of_it_is_not_kept() -> None:
    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        def cut() -> None:
            (link,) = leader.replication._links_made._links
            leader.replication._cut("shm", link.qp.qp_num, CutReason.DISCONNECTED)

        leader.meanwhile = cut
        with pytest.raises(TransportError, match="has hung up"):
            await follower.replication.link(LEADER)
        assert leader.replication.statistics()["replicas_push_links"] == 0
        assert not leader.replication._links_made

    play(scenario)


def test_a_cut_does_not_wait_for_a_link_that_is_being_made() -> None:
    """It is told on the event loop, and a device may take its time; the end does wait."""
    links = push_links.Links()
    begun, goes_on = threading.Event(), threading.Event()

    class Link:
        engine, qp = SimpleNamespace(transport="shm"), SimpleNamespace(qp_num=7)
        is_open, is_closed = True, False

        def __init__(self) -> None:
            begun.set()
            assert goes_on.wait(30)

        def close(self) -> None:
            self.is_closed = True

    kind: Any = Link
    with ThreadPoolExecutor() as pool:
        making = pool.submit(links.make, kind)
        assert begun.wait(30)
        try:
            pool.submit(links.cut, "shm", 7).result(timeout=5)
            ending = pool.submit(links.close)
        finally:
            goes_on.set()
        link = making.result(30)
        ending.result(30)
    assert not link.is_open and link.is_closed and not links


STEPS = {
    "the leader's link is made": (push_links, "PushLink"),
    "the leader's leases are made": (push_links, "SegmentLeases"),
    "slices are made": (push_links, "Slices"),
    "the follower connects": (push_links.LinkToLeader, "connect"),
    "the leader's address is told": (push_links.LinkToFollower, "address"),
    "the leader's end is registered": (replication, "is_stale"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_fails_leaves_no_queue_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever step a link fails to be made: both engines end, and serve none."""
    owner, attribute = STEPS[name]

    def fail(*arguments: Any) -> None:
        raise RdmaError("planted", hint="none")

    async def scenario(leader: Broker, follower: Broker, registered: dict[int, int]) -> None:
        monkeypatch.setattr(
            owner, attribute, property(fail) if attribute == "address" else fail, raising=True
        )
        with pytest.raises((TransportError, RdmaError)):
            await follower.replication.link(LEADER)
        monkeypatch.undo()
        for broker in (follower, leader):
            broker.replication.close()
            broker.engine.close()

    play(scenario)
