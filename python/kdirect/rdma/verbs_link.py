"""How two verbs queue pairs find each other, and notice each other's end.

Law of the room: control plane only; nothing here runs while data moves.  A queue pair's `address`
travels over the caller's own connection (for broker and client the control connection); then the
active side opens one small TCP connection, the link, to the passive side's device::

    active                                        passive (service thread)
    HELLO  target token, own token   -------->    one-time token, expected peer; RTR and RTS
                                     <--------    WELCOME          (or REFUSED + text)
    RTS

An RNIC does not tell a queue pair that its peer was destroyed or that the peer's process has died:
a queue pair with nothing outstanding would wait for ever.  The link does: each side shuts it down
after its queue pair went to ERROR, the kernel does so for a dead process, and keep-alive probes do
so for a dead host.  An end of file moves the queue pair to ERROR.

What a peer says is checked before it is used; one that says anything else is dropped, and nobody
else notices.  The tokens (16 random bytes, used once) keep strangers of the network from taking a
queue pair's place.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdirect.errors import TransportError

log = logging.getLogger("kdirect.rdma.verbs")

VERSION = 1
TOKEN_BYTES = 16
CONNECT_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 10.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
MAX_PENDING = 256

MSG_HELLO = 1
MSG_WELCOME = 2
MSG_REFUSED = 3
_MAGIC = b"KDVL"
_HELLO = struct.Struct("<4sHH16s16s")  # magic, version, type, token of the target, own token
_REPLY = struct.Struct("<4sHHH")  # magic, version, type, length of the UTF-8 text that follows
# magic, version, token, qp_num, psn, gid, lid, mtu code, READs and atomics at once, RNR timer code,
# link's IP (IPv4 mapped) and port
_ADDRESS = struct.Struct("<4sH16sII16sHBBB16sH")
_ADDRESS_MAGIC = b"KDVA"


@dataclass(frozen=True, slots=True)
class Address:
    """What `QueuePair.address` packs: where the queue pair is in the fabric, and where its link is."""

    token: bytes
    qp_num: int
    psn: int
    gid: bytes
    lid: int
    mtu: int
    rd_atomic: int
    rnr_timer: int  # for how long this side, as a requester, wants to be told to wait
    host: str
    port: int

    def pack(self) -> bytes:
        ip = ipaddress.ip_address(self.host)
        raw = ip.packed if ip.version == 6 else ipaddress.IPv6Address(f"::ffff:{ip}").packed
        fabric = (
            self.qp_num,
            self.psn,
            self.gid,
            self.lid,
            self.mtu,
            self.rd_atomic,
            self.rnr_timer,
        )
        return _ADDRESS.pack(_ADDRESS_MAGIC, VERSION, self.token, *fabric, raw, self.port)

    @classmethod
    def unpack(cls, data: Any) -> Address:
        """TransportError when `data` is not the address of a verbs queue pair of this version."""
        data = bytes(data)
        if len(data) < 6 or data[:4] != _ADDRESS_MAGIC:
            raise TransportError(
                f"{len(data)} bytes are not the address of a verbs queue pair",
                hint="both ends must use the same transport",
            )
        (version,) = struct.unpack_from("<H", data, 4)
        if version != VERSION or len(data) != _ADDRESS.size:
            raise TransportError(
                f"the peer speaks version {version} of the verbs transport, this process {VERSION}",
                hint="use the same release of kdirect on both sides, or transport=tcp",
            )
        _, _, token, qp_num, psn, gid, lid, mtu, rd_atomic, rnr_timer, raw, port = _ADDRESS.unpack(
            data
        )
        ip = ipaddress.IPv6Address(raw)
        if not (
            1 <= mtu <= 5
            and 1 <= rd_atomic <= 128
            and rnr_timer < 32
            and qp_num < 1 << 24
            and psn < 1 << 24
        ):
            raise TransportError(
                "the address of a verbs queue pair holds impossible values",
                hint="pass QueuePair.address as it is",
            )
        return cls(
            token, qp_num, psn, gid, lid, mtu, rd_atomic, rnr_timer, str(ip.ipv4_mapped or ip), port
        )

    @property
    def gid_text(self) -> str:
        return ipaddress.IPv6Address(self.gid).exploded


def greet(address: Address, token: bytes) -> socket.socket:
    """Open the link to the passive side of `address` as the queue pair of `token`; TransportError
    when it does not want that."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    what = f"queue pair {address.qp_num} at {address.host}:{address.port}"
    if not address.port:
        raise TransportError(
            f"queue pair {address.qp_num} at {address.host} listens to nobody",
            hint="connect the passive side first, and take its address then",
        )
    try:
        sock = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
    except OSError as e:
        raise TransportError(
            f"cannot reach {what}: {e.strerror or e}",
            hint="its process has ended or closed its device, or a firewall drops this TCP port (rdma.link.port fixes its number)",
        ) from e
    try:
        _tune(sock)
        sock.sendall(_HELLO.pack(_MAGIC, VERSION, MSG_HELLO, address.token, token))
        data = _receive(sock, _REPLY.size, deadline)
        if len(data) == _REPLY.size:
            magic, version, kind, n = _REPLY.unpack(data)
            if magic == _MAGIC and version == VERSION and kind == MSG_WELCOME and n == 0:
                sock.setblocking(False)
                return sock
            if magic == _MAGIC and kind == MSG_REFUSED:
                text = _receive(sock, min(n, 200), deadline).decode(errors="replace")
                raise TransportError(
                    f"{what} refused the connection: {text}",
                    hint="exchange addresses anew and connect the passive side first",
                )
        raise TransportError(
            f"{what} closed the connection or answered with something else",
            hint="use the same release of kdirect on both sides",
        )
    except OSError as e:
        sock.close()
        raise TransportError(
            f"{what} did not answer: {e.strerror or e}",
            hint="its process is stopped or overloaded; try again",
        ) from e
    except BaseException:
        sock.close()
        raise


def _receive(sock: socket.socket, n: int, deadline: float) -> bytes:
    data = b""
    while len(data) < n:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        more = sock.recv(n - len(data))
        if not more:
            break
        data += more
    return data


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class LinkService:
    """One daemon thread a device: accepts peers, notices their end, takes the device's asynchronous
    events.

    Life: made with the device, started by the first connection (it listens from the first passive
    one on), `stop()` by the device's close.  Threads: `start`, `expect`, `forget`, `watch` from
    any; the rest on its own thread.  It owns the listener and every link's descriptor from `watch`
    (active) or WELCOME (passive) on: a queue pair only shuts its link down, and the thread closes
    it when it sees the end.

    A queue pair gives it ``_expects(token) -> bool``, ``_greeted(sock)`` (to RTS; an error when
    that fails) and ``_peer_left()``.
    """

    def __init__(self, host: str, port: int, event_fd: int, on_event: Callable[[], None]) -> None:
        self.host = host
        self.port = 0  # where it listens; 0: it does not
        self._wanted_port = port
        self._event_fd = event_fd
        self._on_event = on_event
        self._lock = threading.Lock()
        self._expected: dict[bytes, Any] = {}
        self._links: dict[int, tuple[socket.socket, Any]] = {}
        self._pending: dict[int, tuple[socket.socket, float, bytearray]] = {}
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._epoll: select.epoll | None = None
        self._kick_fd = -1
        self._stopping = False

    # any thread
    def start(self, *, listen: bool) -> None:
        """Start the thread, if it does not run; with `listen` accept peers from now on, at `host`
        and `port`."""
        with self._lock:
            if self._stopping:
                return
            if self._epoll is None:
                self._kick_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._epoll = select.epoll()
                for fd in (self._kick_fd, self._event_fd):
                    self._epoll.register(fd, select.EPOLLIN)
            if listen and self._listener is None:
                self._listener = self._listen()
                self._epoll.register(self._listener.fileno(), select.EPOLLIN)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="kdirect-verbs", daemon=True)
            self._thread.start()

    def _listen(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listener = socket.create_server(
                (self.host, self._wanted_port), family=family, backlog=128
            )
        except OSError as e:
            raise TransportError(
                f"cannot listen on {self.host}:{self._wanted_port} for RDMA peers: {e.strerror or e}",
                hint="set rdma.bind.address to an address of this host, and rdma.link.port to a free port or 0",
            ) from e
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        return listener

    def expect(self, token: bytes, qp: Any) -> None:
        with self._lock:
            self._expected[token] = qp

    def forget(self, token: bytes) -> None:
        with self._lock:
            self._expected.pop(token, None)

    def watch(self, sock: socket.socket, qp: Any) -> None:
        """Take over the link of a connected queue pair."""
        with self._lock:
            if self._epoll is None:
                sock.close()
                raise TransportError(
                    "the verbs device was closed while connecting", hint="open it again"
                )
            self._links[sock.fileno()] = (sock, qp)
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def stop(self) -> None:
        """End the thread and every link; queue pairs must be closed already."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            os.eventfd_write(self._kick_fd, 1)
            thread.join()
            os.close(self._kick_fd)
            self._kick_fd = -1

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: close the copies of the descriptors,
        so that peers see the parent's end."""
        self._lock = threading.Lock()
        for closing in [
            self._epoll,
            self._listener,
            *(x[0] for x in self._links.values()),
            *(x[0] for x in self._pending.values()),
        ]:
            if closing is not None:
                closing.close()
        if self._kick_fd >= 0:
            os.close(self._kick_fd)
        self._epoll = self._listener = self._thread = None
        self._kick_fd = -1
        self._stopping = True
        self._expected.clear()
        self._links.clear()
        self._pending.clear()

    # service thread
    def _run(self) -> None:
        assert self._epoll is not None
        while not self._stopping:
            for fd, _ in self._epoll.poll(1.0 if self._pending else -1):
                try:
                    if fd == self._kick_fd:
                        os.eventfd_read(fd)
                    elif fd == self._event_fd:
                        self._on_event()
                    elif self._listener is not None and fd == self._listener.fileno():
                        self._accept()
                    elif fd in self._pending:
                        self._hello(fd)
                    elif fd in self._links:
                        self._end(fd)
                except Exception:  # one peer's trouble must not end the service of the others
                    log.exception("verbs link on descriptor %d failed", fd)
                    with contextlib.suppress(Exception):
                        self._drop(fd)
            now = time.monotonic()
            for fd, (_, deadline, _) in list(self._pending.items()):
                if now > deadline:
                    self._drop(fd)
        for fd in [*self._links, *self._pending]:
            self._drop(fd)
        with self._lock:
            self._epoll.close()
            if self._listener is not None:
                self._listener.close()
            self._epoll = self._listener = None
            self._expected.clear()

    def _accept(self) -> None:
        assert self._listener is not None and self._epoll is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                log.error(
                    "cannot accept an RDMA peer: %s; check the limit of open files (ulimit -n)",
                    e.strerror,
                )
                time.sleep(0.1)
                return
            if len(self._pending) >= MAX_PENDING:
                log.warning(
                    "refused an RDMA peer: %d others have not greeted yet", len(self._pending)
                )
                sock.close()
                continue
            sock.setblocking(False)
            _tune(sock)
            self._pending[sock.fileno()] = (
                sock,
                time.monotonic() + HANDSHAKE_TIMEOUT_S,
                bytearray(),
            )
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _hello(self, fd: int) -> None:
        sock, _, data = self._pending[fd]
        try:
            more = sock.recv(_HELLO.size - len(data))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        data += more
        if not more or data[:4] != _MAGIC[: len(data)]:
            self._drop(fd)
            return
        if len(data) < _HELLO.size:
            return
        _, version, kind, target, token = _HELLO.unpack(data)
        refusal, qp = "", None
        if version != VERSION or kind != MSG_HELLO:
            refusal = f"this side speaks version {VERSION} of the verbs transport"
        else:
            with self._lock:
                qp = self._expected.get(target)
                if qp is None:
                    refusal = "no queue pair expects this token (it was used, or its queue pair was closed)"
                elif not qp._expects(token):
                    refusal = "the queue pair expects another peer"
                else:
                    del self._expected[target]
        if not refusal and qp is not None:
            try:
                qp._greeted(sock)
            except Exception as e:
                log.warning("queue pair %d cannot be set up towards its peer: %s", qp.qp_num, e)
                refusal = f"the queue pair cannot be set up: {e}"
                qp._peer_left()
        text = refusal.encode()[:200]
        with contextlib.suppress(OSError):  # a peer that has gone shows as the end of the link
            sock.send(
                _REPLY.pack(_MAGIC, VERSION, MSG_REFUSED if refusal else MSG_WELCOME, len(text))
                + text
            )
        if refusal:
            self._drop(fd)
            return
        del self._pending[fd]
        with self._lock:
            self._links[fd] = (sock, qp)

    def _end(self, fd: int) -> None:
        """After the greeting a link carries nothing: whatever happens on it is its end."""
        sock, qp = self._links[fd]
        try:
            if sock.recv(64):
                log.warning(
                    "the peer of queue pair %d broke the link's protocol and is cut", qp.qp_num
                )
        except BlockingIOError:
            return
        except OSError:
            pass
        self._drop(fd)

    def _drop(self, fd: int) -> None:
        assert self._epoll is not None
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        qp = None
        if fd in self._pending:
            sock = self._pending.pop(fd)[0]
        else:
            with self._lock:
                sock, qp = self._links.pop(fd)
        sock.close()
        if qp is not None:
            qp._peer_left()
