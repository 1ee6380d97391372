"""What the broker's tests share: a raw connection that speaks the protocol frame by frame."""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.format import protocol as p
from tests.support import wait_until


class Raw:
    """A blocking connection.  Requests may be sent without waiting for answers; `closed` tells that
    the broker hung up."""

    def __init__(self, servers: str, timeout_s: float = 10) -> None:
        host, _, port = servers.partition(",")[0].rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.waiting: list[tuple[int, int, int]] = []  # API key, version, correlation id
        self.next_id = 1

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(struct.pack(">i", len(frame)) + frame)

    def send(self, message: Any, version: int) -> int:
        self.next_id += 1
        self.waiting.append((message.API_KEY, version, self.next_id))
        self.socket.sendall(p.encode_request(message, version, self.next_id, "raw"))
        return self.next_id

    def receive_frame(self) -> bytes:
        """The next frame, or b"" when the broker has closed the connection."""
        try:
            head = self._exactly(4)
            return self._exactly(struct.unpack(">i", head)[0]) if head else b""
        except ConnectionResetError:
            return b""

    def _exactly(self, n: int) -> bytes:
        out = bytearray()
        while len(out) < n:
            piece = self.socket.recv(n - len(out))
            if not piece:
                return b""
            out += piece
        return bytes(out)

    def receive(self) -> Any:
        """The answer to the oldest unanswered request."""
        key, version, correlation_id = self.waiting.pop(0)
        frame = self.receive_frame()
        assert frame, (
            "the broker closed the connection instead of answering"
            f" {p.APIS[key].name} version {version}"
        )
        got, response = p.decode_response(key, version, frame)
        assert got == correlation_id
        return response

    def call(self, message: Any, version: int) -> Any:
        self.send(message, version)
        return self.receive()

    def silent_for(self, seconds: float) -> bool:
        """Does nothing arrive for so long?"""
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(1, socket.MSG_PEEK) != b"" and False
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(10)

    @property
    def closed(self) -> bool:
        """Has the broker closed the connection?  Waits a little for it to do so."""
        return self.receive_frame() == b""

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def raw(broker: Any) -> Iterator[Callable[[], Raw]]:
    """``raw()``: one more connection to `broker`."""
    opened: list[Raw] = []

    def connect(servers: str | None = None) -> Raw:
        opened.append(Raw(servers or broker.bootstrap_servers))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def call_on_loop(broker: Any, call: Callable[[], Any]) -> Any:
    """What `call`, made on the broker's event loop, returns, or the awaitable that it returns."""

    async def run() -> Any:
        result = call()
        return await result if inspect.isawaitable(result) else result

    return asyncio.run_coroutine_threadsafe(run(), broker.server._loop).result(30)


@pytest.fixture
def on_loop() -> Callable[..., Any]:
    return call_on_loop


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def world(tmp_path: Path, seed: int) -> Iterator[Callable[..., Any]]:
    """Makes leaders with followers on simulated networks (`push_world.World`)."""
    from tests.broker.push_world import World  # the broker's core is not loaded for others

    made: list[World] = []

    def make(**options: Any) -> World:
        options.setdefault("number", seed)
        made.append(World(options.pop("number"), tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
