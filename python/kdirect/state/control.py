"""The control connections of a job: messages over TCP between the coordinator and executors.

This file opens sockets.  Owns: frames (four bytes of length, big endian, then the message), the
token that an executor shows in its first frame, and the limits on what a peer may send.  What may
not enter: what a message says (`kdirect.state.messages`).

A connection is served from one thread, never blocks in `poll`, and is closed by its owner.  State
and deltas never travel here; the rows that a batch put out do.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
import weakref

from kdirect.errors import CoordinatorUnavailableError, StateProtocolError, TimedOutError

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 64 << 20
MAX_TOKEN_BYTES = 1024  # of the first frame, before its sender is known
TOKEN_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 30.0
RECEIVE_BYTES = 1 << 18

# A copy in a child made by fork would keep a connection open after the end of its process, and an
# executor would wait for a coordinator that is gone.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def new_token() -> str:
    """A secret for one start of a job."""
    return secrets.token_hex(16)


class ControlConnection:
    """One end of a connection: `send` messages, `poll` for those of the peer.

    Raises StateProtocolError when the peer breaks the framing or has gone; then `closed`."""

    def __init__(self, sock: socket.socket, peer: str, *, limit: int = MAX_MESSAGE_BYTES) -> None:
        _sockets.add(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.limit = limit
        self._socket = sock
        self._received = bytearray()
        self._ended = False

    def fileno(self) -> int:
        """The socket, to wait on; -1 once closed."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or an error ended it."""
        return self._socket.fileno() < 0

    @property
    def local_host(self) -> str:
        """The address of this end, by which the peer's network reaches this host."""
        return str(self._socket.getsockname()[0])

    def send(self, data: bytes | memoryview) -> None:
        """Hand a message to the kernel, whole.  A peer that does not read in time has gone."""
        if len(data) > self.limit:
            raise StateProtocolError(f"a message of {len(data)} bytes to {self.peer} is too long")
        deadline = time.monotonic() + SEND_TIMEOUT_S
        try:
            for view in (memoryview(LENGTH.pack(len(data))), memoryview(data)):
                while view:
                    try:
                        view = view[self._socket.send(view) :]
                    except BlockingIOError:
                        self._wait(selectors.EVENT_WRITE, deadline)
        except OSError as e:
            self.close()
            raise StateProtocolError(f"{self.peer} has gone: {e}") from e

    def poll(self) -> bytes | None:
        """The next message, if it is here.  Never blocks."""
        if (message := self._parsed()) is not None:
            return message
        if self.closed:
            raise StateProtocolError(f"the connection to {self.peer} is closed")
        while not self._ended:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return None
            except OSError as e:
                self.close()
                raise StateProtocolError(f"{self.peer} has gone: {e}") from e
            if not data:
                self._ended = True
                break
            self._received += data
            if (message := self._parsed()) is not None:
                return message
        self.close()
        raise StateProtocolError(f"{self.peer} has closed its connection")

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message, waited for.  TimedOutError after `timeout_s`, if it is given."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self.poll()) is None:
            self._wait(selectors.EVENT_READ, deadline)
        return message

    def close(self) -> None:
        """End the connection.  What was received and not polled is lost."""
        self._socket.close()

    def _parsed(self) -> bytes | None:
        received = self._received
        if len(received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(received)
        if length > self.limit:
            self.close()
            received.clear()
            raise StateProtocolError(
                f"{self.peer} announces a message of {length} bytes, over {self.limit}"
            )
        if len(received) < LENGTH.size + length:
            return None
        data = bytes(memoryview(received)[LENGTH.size : LENGTH.size + length])
        del received[: LENGTH.size + length]
        return data

    def _wait(self, event: int, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimedOutError(f"{self.peer} did not answer in time")
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, event)
            selector.select(left)


def connect(host: str, port: int, token: str, *, timeout_s: float = 10.0) -> ControlConnection:
    """An executor's connection to the coordinator, its token sent.  CoordinatorUnavailableError
    when there is none."""
    peer = f"the coordinator at {host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as e:
        raise CoordinatorUnavailableError(f"{peer} cannot be reached: {e}") from e
    connection = ControlConnection(sock, peer)
    connection.send(token.encode())
    return connection


class ControlListener:
    """Where executors connect to.  `poll` hands out those that have shown the token.

    A peer that shows another token, or none in time, is closed and does not disturb the others."""

    def __init__(self, host: str, token: str, *, port: int = 0) -> None:
        self.token = token
        self.refused = 0
        self._socket = socket.create_server((host, port), backlog=64)
        _sockets.add(self._socket)
        self._socket.setblocking(False)
        self._pending: dict[ControlConnection, float] = {}

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def filenos(self) -> list[int]:
        """What to wait on: the listening socket, and peers that have not shown the token yet."""
        return [self._socket.fileno(), *(c.fileno() for c in self._pending)]

    def poll(self) -> list[ControlConnection]:
        """Connections that have shown the token since the last call."""
        while True:
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                break
            peer = ControlConnection(sock, f"{address[0]}:{address[1]}", limit=MAX_TOKEN_BYTES)
            self._pending[peer] = time.monotonic() + TOKEN_TIMEOUT_S
        return [peer for peer in list(self._pending) if self._shown(peer)]

    def _shown(self, peer: ControlConnection) -> bool:
        try:
            message = peer.poll()
        except StateProtocolError:
            message = b""
        if message is None and time.monotonic() < self._pending[peer]:
            return False
        del self._pending[peer]
        if message and hmac.compare_digest(message, self.token.encode()):
            peer.limit = MAX_MESSAGE_BYTES
            return True
        self.refused += 1
        peer.close()
        return False

    def close(self) -> None:
        """End the listening, and those that have not shown the token."""
        for peer in self._pending:
            with contextlib.suppress(OSError):
                peer.close()
        self._pending.clear()
        self._socket.close()
