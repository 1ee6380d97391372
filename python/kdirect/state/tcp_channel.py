"""One-way channels over TCP: what an exchange without an RDMA path is made of.

Owns: the two ends, `TcpSender` and `TcpReceiver`, with the calls of `kdirect.rdma.channel`, and
`TcpDoor`, where senders of other executors connect.  Buffers are those of the RDMA channels, each
preceded by the same footer (`kdirect.rdma.layout`), so that its length is known first.  What may
not enter: what a buffer says, and who is to send what to whom.

No call blocks.  A sender's source memory belongs to the channel until `completed` has passed its
buffer.  Flow control is TCP's: a sender has at most `SLOTS` buffers that the kernel has not taken.
One thread.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from kdirect.errors import StateExchangeError
from kdirect.format.batch import crc32c
from kdirect.rdma.contract import Memory
from kdirect.rdma.layout import FOOTER_BYTES
from kdirect.state.control import close_in_children, keep_alive

# sequence, batch, epoch, attempt, length, CRC, flags, kind, generation (always 1 here).
HEAD = struct.Struct("<QIIIIIHBB")
HELLO = struct.Struct("<I32s")
SLOTS = 8
HELLO_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 20.0
MOST_STRANGERS = 64
assert HEAD.size == FOOTER_BYTES


def _head_crc(head: bytes, payload: Any) -> int:
    return crc32c(bytes(head[:24]) + bytes(head[28:32])) ^ crc32c(payload)


class TcpSender:
    """The sending end.  `send_from` takes buffers while `may_send`; `poll` moves them on."""

    def __init__(self, peer: str, payload_bytes: int) -> None:
        self.peer = peer
        self.payload_bytes = payload_bytes
        self.sent = 0
        self.completed = 0
        self._socket: socket.socket | None = None
        self._queue: deque[memoryview] = deque()  # heads and payloads in turn
        self._own: bytearray | None = None

    def connect(self, host: str, port: int, sender: int, token: str) -> None:
        """Reach the receiver's door."""
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
            close_in_children(sock)
            keep_alive(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(HELLO.pack(sender, token.encode()))
            sock.setblocking(False)
        except OSError as e:
            raise StateExchangeError(f"{self.peer} cannot be reached at {host}:{port}: {e}") from e
        self._socket = sock

    @property
    def may_send(self) -> bool:
        """Is there room for another buffer?"""
        return self.sent - self.completed < SLOTS

    def send_from(
        self,
        memory: Any,
        position: int,
        length: int,
        *,
        attempt: int = 0,
        batch: int = 0,
        epoch: int = 0,
        kind: int = 0,
        flags: int = 0,
        wake: bool = False,
    ) -> bool:
        """Send `length` bytes of `memory` from `position` on, or return False where there is no
        room.  They must not change before `completed` has passed this buffer."""
        if not self.may_send:
            return False
        payload = memoryview(memory)[position : position + length]
        head = HEAD.pack(self.sent, batch, epoch, attempt, length, 0, flags, kind, 1)
        crc = _head_crc(head, payload)
        self._queue.append(
            memoryview(HEAD.pack(self.sent, batch, epoch, attempt, length, crc, flags, kind, 1))
        )
        self._queue.append(payload)
        self.sent += 1
        self.poll()
        return True

    def buffer(self) -> memoryview | None:
        """Memory of the channel's own to fill, for `send`; None while there is no room."""
        if not self.may_send:
            return None
        if self._own is None:
            self._own = bytearray(self.payload_bytes)
        return memoryview(self._own)

    def send(self, length: int, **header: Any) -> bool:
        """Send the first `length` bytes of what `buffer` returned."""
        own, self._own = self._own, None
        return self.send_from(own, 0, length, **header)

    def refresh(self) -> None:
        """Bring `completed` up to date."""
        self.poll()

    def poll(self) -> bool:
        """Give the kernel what it takes; whether a buffer was completed."""
        before = self.completed
        sock = self._socket
        if sock is None:
            raise StateExchangeError(f"{self.peer} is not connected")
        while self._queue:
            try:
                taken = sock.sendmsg(list(self._queue)[:16])
            except BlockingIOError:
                break
            except OSError as e:
                raise StateExchangeError(f"{self.peer} has gone: {e}") from e
            while self._queue and taken >= len(self._queue[0]):
                taken -= len(self._queue.popleft())
                # A head is left before its payload, so an even number left ends a buffer.
                self.completed += len(self._queue) % 2 == 0
            if taken:
                self._queue[0] = self._queue[0][taken:]
        return self.completed > before

    def fileno(self) -> int:
        """The socket; -1 when it is closed."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def waits_to_write(self) -> bool:
        """Has the kernel refused something?"""
        return bool(self._queue)

    def close(self) -> None:
        """End the channel; what the kernel has not taken is lost."""
        if self._socket is not None:
            self._socket.close()


class TcpReceiver:
    """The receiving end: `poll` until it is True, look at the fields, `release`."""

    def __init__(self, peer: str, slot_bytes: int) -> None:
        self.peer = peer
        self.attempt = self.batch = self.epoch = self.sequence = 0
        self.kind = self.flags = self.length = 0
        self._memory = Memory.anonymous(slot_bytes)
        self._slot = memoryview(self._memory)
        self._head = bytearray(HEAD.size)
        self._socket: socket.socket | None = None
        self._got = 0  # bytes of the head and the payload that are here
        self._next = 0
        self._ready = False

    def attach(self, sock: socket.socket) -> None:
        """Receive from this socket."""
        if self._socket is not None:
            raise StateExchangeError(f"{self.peer} has connected twice")
        keep_alive(sock)
        sock.setblocking(False)
        self._socket = sock

    @property
    def attached(self) -> bool:
        """Has the sender connected?"""
        return self._socket is not None

    @property
    def address(self) -> int:
        """Where the payload lies."""
        return self._memory.address

    @property
    def payload(self) -> memoryview:
        """The payload, until `release`."""
        return self._slot[: self.length]

    def poll(self) -> bool:
        """Is a buffer here?  False before the sender has connected.  StateExchangeError when the
        peer has gone, or sent what it must not."""
        if self._ready:
            return True
        if self._socket is None:
            return False
        while True:
            if self._got < HEAD.size:
                view = memoryview(self._head)[self._got :]
            elif self._got < HEAD.size + self.length:
                view = self._slot[self._got - HEAD.size : self.length]
            else:
                self._check()
                self._ready = True
                return True
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                return False
            except OSError as e:
                raise StateExchangeError(f"{self.peer} has gone: {e}") from e
            if count == 0:
                raise StateExchangeError(f"{self.peer} has gone: it closed its channel")
            self._got += count
            if self._got == HEAD.size:
                self._open()

    def _open(self) -> None:
        (
            self.sequence,
            self.batch,
            self.epoch,
            self.attempt,
            self.length,
            self._crc,
            self.flags,
            self.kind,
            _,
        ) = HEAD.unpack(self._head)
        if self.length > len(self._slot):
            raise StateExchangeError(
                f"{self.peer} announces a buffer of {self.length} bytes, over {len(self._slot)}"
            )

    def _check(self) -> None:
        head = bytes(self._head)
        if _head_crc(head, self.payload) != self._crc:
            raise StateExchangeError(f"{self.peer} sent a buffer whose CRC does not match")
        if self.sequence != self._next:
            raise StateExchangeError(
                f"{self.peer} sent buffer {self.sequence} where {self._next} is next"
            )

    def release(self) -> None:
        """Take the next buffer; the payload is no longer valid."""
        self._ready = False
        self._got = 0
        self._next += 1

    def fileno(self) -> int:
        """The socket; -1 before the sender has connected."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """End the channel."""
        if self._socket is not None:
            self._socket.close()
        self._slot.release()
        self._memory.close()


class TcpDoor:
    """Where the senders of other executors connect; each shows the token of this start of the job.

    Nobody is waited for: `admit` takes those that have come.  A stranger that shows another token,
    or nothing for `HELLO_TIMEOUT_S`, is turned away, and so is the oldest of too many; executors
    that come meanwhile are not kept waiting."""

    def __init__(self, host: str, token: str, receivers: dict[int, TcpReceiver]) -> None:
        self._token = token.encode()
        self._receivers = receivers
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        close_in_children(self._socket)
        self._socket.setblocking(False)
        self._strangers: dict[socket.socket, _Stranger] = {}
        self.refused = 0

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    @property
    def waits_on(self) -> list[socket.socket]:
        """What becomes readable when `admit` has something to do; nothing once all are there."""
        if all(receiver.attached for receiver in self._receivers.values()):
            return []
        return [self._socket, *self._strangers]

    def admit(self) -> bool:
        """Let in the senders that have shown the token.  Whether any has come."""
        if not self.waits_on:
            self._turn_away(list(self._strangers))
            return False
        with contextlib.suppress(OSError):  # none left, or none that can be had now
            while True:
                sock, _ = self._socket.accept()
                close_in_children(sock)
                sock.setblocking(False)
                self._turn_away(list(self._strangers)[: 1 - MOST_STRANGERS])
                self._strangers[sock] = _Stranger(time.monotonic() + HELLO_TIMEOUT_S)
        return sum(self._is_sender(sock) for sock in list(self._strangers)) > 0

    def _is_sender(self, sock: socket.socket) -> bool:
        stranger = self._strangers[sock]
        try:
            data = sock.recv(HELLO.size - len(stranger.said))
        except BlockingIOError:
            if time.monotonic() > stranger.until:
                self._turn_away([sock])
            return False
        except OSError:
            data = b""
        stranger.said += data
        if data and len(stranger.said) < HELLO.size:
            return False
        receiver = None
        if len(stranger.said) == HELLO.size:
            sender, token = HELLO.unpack(stranger.said)
            if hmac.compare_digest(token, self._token):
                receiver = self._receivers.get(sender)
        if receiver is None:
            self._turn_away([sock])
            return False
        del self._strangers[sock]
        receiver.attach(sock)
        return True

    def _turn_away(self, strangers: list[socket.socket]) -> None:
        for sock in strangers:
            del self._strangers[sock]
            sock.close()
            self.refused += 1

    def close(self) -> None:
        """Stop listening."""
        self._turn_away(list(self._strangers))
        self._socket.close()


@dataclass(slots=True)
class _Stranger:
    """A connection that has not shown the token, what it said, and how long it may take."""

    until: float
    said: bytes = b""
