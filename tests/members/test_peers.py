"""Connections between brokers: every question is answered once or fails, and the end of a process
is told from the end of a connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kdirect.cluster.records import BrokerRegistration, Endpoint
from kdirect.errors import BrokerUnavailableError, ClosedError, ProtocolError, TimedOutError
from kdirect.format import protocol as p
from kdirect.member.metadata import LiveNode, Metadata
from kdirect.member.peers import Peers
from kdirect.wire.environment import SYSTEM

WAIT_S = 10.0


class Broker:
    """Answers AskController by its kind: with the body reversed, with rubbish, or not at all."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host  # as it is registered
        self.connections = 0
        self.connected: asyncio.Queue[int] = asyncio.Queue()
        self.asked = asyncio.Event()
        self.told: asyncio.Queue[int] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> Peers:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        endpoints = (Endpoint("PLAINTEXT", self._host, port),)
        there = BrokerRegistration(endpoints, {"PLAINTEXT": "PLAINTEXT"})
        metadata = Metadata("cluster", 1, brokers={2: LiveNode(2, there, 5, 5)})
        self.peers = Peers(lambda: metadata, "PLAINTEXT", SYSTEM)
        self.peers.listen_for_losses(self.told.put_nowait)
        return self.peers

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def die(self) -> None:
        self._server.close()
        self.hang_up()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.connected.put_nowait(self.connections)
        self._writers.append(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = memoryview(await reader.readexactly(size))
                header = p.parse_request_header(frame)
                request = p.decode_request(header, frame)
                self.asked.set()
                if request.kind == "rubbish":
                    writer.write(request.body)
                if request.kind != "turn":
                    continue
                message = p.AskControllerResponse(
                    error_code=0, generation=-1, body=request.body[::-1]
                )
                assert header.api is not None
                body = p.response_header(header.api, 0, header.correlation_id)
                body += bytes(message.encode(version=0))
                writer.write(struct.pack(">i", len(body)) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass


async def ask(peers: Peers, kind: str, body: bytes, node_id: int = 2, **limits: float) -> bytes:
    message = p.AskControllerRequest(kind=kind, body=body)
    response = await peers.call(node_id, message, timeout_s=limits.get("timeout_s", WAIT_S))
    return bytes(response.body)


def run(test: Callable[[Broker, Peers], Awaitable[None]], host: str = "127.0.0.1") -> None:
    async def body() -> None:
        broker = Broker(host)
        peers = await broker.start()
        try:
            await test(broker, peers)
        finally:
            peers.close()
            broker.die()

    asyncio.run(body())


def test_many_questions_share_a_connection() -> None:
    async def test(broker: Broker, peers: Peers) -> None:
        bodies = [b"%d" % i for i in range(100)]
        answers = await asyncio.gather(*(ask(peers, "turn", body) for body in bodies))
        assert answers == [body[::-1] for body in bodies]
        assert broker.connections == 1

    run(test)


def test_a_broker_that_is_not_registered() -> None:
    async def test(broker: Broker, peers: Peers) -> None:
        with pytest.raises(BrokerUnavailableError, match="broker 3 is not registered"):
            await ask(peers, "turn", b"", node_id=3)

    run(test)


def test_a_silent_broker_is_asked_by_another_connection() -> None:
    async def test(broker: Broker, peers: Peers) -> None:
        with pytest.raises(TimedOutError, match=r"did not answer AskControllerRequest within 0\.1"):
            await ask(peers, "nothing", b"", timeout_s=0.1)
        assert await ask(peers, "turn", b"ab") == b"ba"
        assert broker.connections == 2

    run(test)


def test_an_idle_connection_that_is_closed_is_no_death() -> None:
    async def test(broker: Broker, peers: Peers) -> None:
        await peers.reach(2)
        await broker.connected.get()
        broker.hang_up()
        await asyncio.wait_for(broker.connected.get(), WAIT_S)
        assert await ask(peers, "turn", b"ab") == b"ba"
        assert broker.told.empty()

    run(test)


def test_a_process_that_dies_is_told() -> None:
    async def test(broker: Broker, peers: Peers) -> None:
        waiting = asyncio.ensure_future(ask(peers, "nothing", b""))
        await broker.asked.wait()
        broker.die()
        with pytest.raises(BrokerUnavailableError, match="was lost"):
            await waiting
        assert await asyncio.wait_for(broker.told.get(), WAIT_S) == 2
        with pytest.raises(BrokerUnavailableError, match="does not take connections"):
            await ask(peers, "turn", b"")

    run(test)


def test_a_process_that_dies_is_told_where_its_host_has_several_addresses() -> None:
    async def two(host: str, port: int, **wanted: Any) -> list[Any]:
        assert host == "broker-2"
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

    async def test(broker: Broker, peers: Peers) -> None:
        asyncio.get_running_loop().getaddrinfo = two  # type: ignore[assignment,method-assign]
        assert await ask(peers, "turn", b"ab") == b"ba"
        broker.die()
        assert await asyncio.wait_for(broker.told.get(), WAIT_S) == 2
        with pytest.raises(BrokerUnavailableError, match="connection refused"):
            await ask(peers, "turn", b"")

    run(test, host="broker-2")


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "a\0b"])
def test_a_name_that_no_host_has(host: str) -> None:
    """Somebody has edited the node of a broker."""

    async def test(broker: Broker, peers: Peers) -> None:
        for _ in range(2):
            with pytest.raises(BrokerUnavailableError, match="does not take connections"):
                await ask(peers, "turn", b"")
        assert broker.told.empty()

    run(test, host=host)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        struct.pack(">i", -1),
        struct.pack(">ii", 4, 77),
        struct.pack(">iib", 5, 1, 0) + b"more",
    ],
)
def test_an_answer_that_is_none(rubbish: bytes) -> None:
    async def test(broker: Broker, peers: Peers) -> None:
        with pytest.raises(ProtocolError):
            await ask(peers, "rubbish", rubbish)
        assert await ask(peers, "turn", b"ab") == b"ba"  # by another connection

    run(test)


def test_what_waits_when_all_is_closed() -> None:
    async def test(broker: Broker, peers: Peers) -> None:
        waiting = asyncio.ensure_future(ask(peers, "nothing", b""))
        await broker.asked.wait()
        peers.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await ask(peers, "turn", b"")

    run(test)
