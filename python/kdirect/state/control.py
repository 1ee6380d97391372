"""The control connections of a job: messages over TCP between the coordinator and executors.

This file opens sockets.  Owns: frames (four bytes of length, big endian, then the message), the
token that an executor shows in its first frame, and the limits on what a peer may send.  What may
not enter: what a message says (`kdirect.state.messages`).

A connection is served from one thread, never blocks in `poll` and `put`, and is closed by its
owner.  Deltas never travel here.  The rows that a batch put out do, and so do parts of snapshots
where two hosts share no directory.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator

from kdirect.errors import (
    ConfigError,
    CoordinatorUnavailableError,
    StateProtocolError,
    TimedOutError,
)

log = logging.getLogger("kdirect.state")

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 64 << 20
MAX_TOKEN_BYTES = 1024  # of the first frame, before its sender is known
TOKEN_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 30.0
RECEIVE_BYTES = 1 << 18
MOST_STRANGERS = 64  # connections that have not shown the token; a newer one replaces the oldest
LISTEN_PAUSE_S = 1.0  # after an accept that failed for lack of memory or descriptors
# A host that was switched off says nothing.  The kernel looks after 15 s, four times.
KEEP_ALIVE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 35_000),  # of bytes that are not acknowledged, in ms
)

# A copy in a child made by fork would keep a connection open after the end of its process, and an
# executor would wait for a coordinator that is gone.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Close the copy of `sock` in every child that this process makes by fork."""
    _sockets.add(sock)


def _after_fork_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def new_token() -> str:
    """A secret for one start of a job."""
    return secrets.token_hex(16)


def keep_alive(sock: socket.socket) -> None:
    """Let a connection break when the host of its peer has gone without a word."""
    for level, name, value in KEEP_ALIVE:
        if hasattr(socket, name):
            sock.setsockopt(level, getattr(socket, name), value)


class ControlConnection:
    """One end of a connection: `send` or `put` messages, from any thread, and `poll` for those of
    the peer, from one.

    `send` waits until the kernel has all of a message.  `put` never waits: what the kernel does not
    take is kept, and `pump` hands it over later; `late` says that the peer has read nothing for too
    long.  Raises StateProtocolError when the peer breaks the framing or has gone; then `closed`."""

    def __init__(self, sock: socket.socket, peer: str, *, limit: int = MAX_MESSAGE_BYTES) -> None:
        close_in_children(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        keep_alive(sock)
        self.limit = limit
        self._socket = sock
        self._frames: deque[Iterator[bytes | memoryview]] = deque()
        self._view: memoryview | None = None  # what is left of a piece that the kernel has in part
        self._taken_at = 0.0  # when the kernel took something last, or there was nothing to take
        self._received = bytearray()
        self._ended = False
        self.sending = threading.RLock()  # held while messages are sent that belong together

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
        """Hand a message to the kernel, whole.  TimedOutError when the peer does not read."""
        with self.sending:
            self.put(data)
            while not self.pump():
                self._wait(selectors.EVENT_WRITE, self._taken_at + SEND_TIMEOUT_S)

    def put(self, *messages: bytes | memoryview) -> None:
        """Send messages after all that were put before, now or by later calls of `pump`."""
        for data in messages:
            if len(data) > self.limit:
                raise StateProtocolError(
                    f"a message of {len(data)} bytes to {self.peer} is too long"
                )
        self.put_all(messages)

    def put_all(self, messages: Iterable[bytes | memoryview]) -> None:
        """As `put`; each message is made when the kernel has the one before."""
        with self.sending:
            if self._sent_all:
                self._taken_at = time.monotonic()
            self._frames.append(_framed(messages))
            self.pump()

    def pump(self) -> bool:
        """Give the kernel what it takes.  Whether that was everything."""
        try:
            while self._view or self._next_piece():
                assert self._view is not None
                self._view = self._view[self._socket.send(self._view) :]
                self._taken_at = time.monotonic()
        except BlockingIOError:
            return False
        except OSError as e:
            self.close()
            raise StateProtocolError(f"{self.peer} has gone: {e}") from e
        return True

    @property
    def waits_to_write(self) -> bool:
        """Does `pump` have anything to do?"""
        return not self._sent_all and not self.closed

    @property
    def late(self) -> bool:
        """Has the peer read nothing for longer than is borne?"""
        return self.waits_to_write and time.monotonic() > self._taken_at + SEND_TIMEOUT_S

    @property
    def _sent_all(self) -> bool:
        return not self._view and not self._frames

    def _next_piece(self) -> bool:
        while self._frames:
            piece = next(self._frames[0], None)
            if piece is not None:
                self._view = memoryview(piece)
                return True
            self._frames.popleft()
        self._view = None  # the memory of what was sent is the caller's again
        return False

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

    def has_gone(self) -> bool:
        """Has the peer, which owes no message, ended the connection?  Never blocks."""
        if self.closed:
            return True
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message, waited for.  TimedOutError after `timeout_s`, if it is given."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self.poll()) is None:
            self._wait(selectors.EVENT_READ, deadline)
        return message

    def close(self) -> None:
        """End the connection.  What was received and not polled, or put and not sent, is lost."""
        self._socket.close()
        self._frames.clear()
        self._view = None

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


def _framed(messages: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for data in messages:
        yield LENGTH.pack(len(data))
        if len(data):
            yield data


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


def _server(host: str, port: int) -> socket.socket:
    """A listening socket.  ConfigError for an address that is not of this host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as e:
        raise ConfigError(
            f"listen_address={host}: the coordinator cannot listen there: {e}",
            hint="give an address of this host, or 0.0.0.0 with advertised_address",
        ) from e


class ControlListener:
    """Where executors connect to.  `poll` hands out those that have shown the token.

    A peer that shows another token, or none in time, is closed and does not disturb the others.  So
    is the oldest of too many that have not shown theirs yet."""

    def __init__(self, host: str, token: str, *, port: int = 0) -> None:
        self.token = token
        self.refused = 0
        self._socket = _server(host, port)
        close_in_children(self._socket)
        self._socket.setblocking(False)
        self._paused_until = 0.0
        self._pending: dict[ControlConnection, float] = {}

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def filenos(self) -> list[int]:
        """What to wait on: the listening socket, and peers that have not shown the token yet."""
        listening = [] if self._paused else [self._socket.fileno()]
        return [*listening, *(c.fileno() for c in self._pending)]

    @property
    def _paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def poll(self) -> list[ControlConnection]:
        """Connections that have shown the token since the last call."""
        while not self._paused:
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError as e:
                log.warning("connections wait: none can be accepted: %s", e)
                self._paused_until = time.monotonic() + LISTEN_PAUSE_S
                break
            if len(self._pending) >= MOST_STRANGERS:
                self._refuse(next(iter(self._pending)), "too many others came after it")
            peer = ControlConnection(sock, f"{address[0]}:{address[1]}", limit=MAX_TOKEN_BYTES)
            self._pending[peer] = time.monotonic() + TOKEN_TIMEOUT_S
        return [peer for peer in list(self._pending) if self._shown(peer)]

    def _shown(self, peer: ControlConnection) -> bool:
        try:
            message = peer.poll()
        except StateProtocolError as e:
            self._refuse(peer, str(e))
            return False
        if message is None:
            if time.monotonic() >= self._pending[peer]:
                self._refuse(peer, f"it showed no token within {TOKEN_TIMEOUT_S:.0f} s")
            return False
        if not hmac.compare_digest(message, self.token.encode()):
            self._refuse(peer, "it showed another token; is it an executor of another start?")
            return False
        del self._pending[peer]
        peer.limit = MAX_MESSAGE_BYTES
        return True

    def _refuse(self, peer: ControlConnection, why: str) -> None:
        del self._pending[peer]
        self.refused += 1
        # One line for the first, the tenth, the hundredth: a scan of ports must not fill the log.
        if str(self.refused).strip("0") == "1":
            log.warning("%s is refused (%d so far): %s", peer.peer, self.refused, why)
        peer.close()

    def close(self) -> None:
        """End the listening, and those that have not shown the token."""
        for peer in self._pending:
            with contextlib.suppress(OSError):
                peer.close()
        self._pending.clear()
        self._socket.close()
