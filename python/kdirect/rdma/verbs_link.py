"""How two verbs queue pairs find each other, and notice each other's end.

Law of the room: control plane only; nothing here runs while data moves.  A queue pair's `address`
travels over the caller's own connection (for broker and client: the control connection).  Then the
active side opens one small TCP connection, the link, to the passive side's device::

    active                                        passive (service thread)
    HELLO  target token, own token   -------->    one-time token, expected peer; RTR and RTS
                                     <--------    WELCOME          (or REFUSED + text)
    RTS

An RNIC does not tell a queue pair that its peer was destroyed or that the peer's process has died:
a queue pair with nothing outstanding would wait for ever.  The link tells it.  Each side shuts the
link down after its queue pair went to ERROR, the kernel does so for a dead process, and keep-alive
probes do so for a dead host.  An end of file moves the queue pair to ERROR.

What a peer says is checked before it is used; a peer that says anything else is dropped, and nobody
else notices.  The tokens (16 random bytes, used once) keep strangers in the network from taking the
place of a queue pair.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kdirect.errors import TransportError
from kdirect.rdma.link_service import LinkService, Pending

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
    """What `QueuePair.address` packs: where the queue pair is in the fabric, and where its device
    accepts links."""

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
    def unpack(cls, data: bytes) -> Address:
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
            f"queue pair {address.qp_num} at {address.host} does not listen for peers",
            hint="connect the passive side first, and take its address then",
        )
    try:
        sock = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
    except OSError as e:
        raise TransportError(
            f"cannot reach {what}: {e.strerror or e}",
            hint="its process has ended or closed its device, or a firewall drops this TCP port"
            " (rdma.link.port fixes its number)",
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
                    hint="exchange new addresses and connect the passive side first",
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


class LinkedPair(Protocol):
    """What the service asks of a verbs queue pair."""

    @property
    def qp_num(self) -> int: ...

    def _expects(self, token: bytes) -> bool:
        """Whether it waits for the peer of this token."""

    def _greeted(self, link: socket.socket) -> None:
        """The peer has said HELLO: go to RTS, or raise."""

    def _peer_left(self) -> None:
        """The link is over."""


@dataclass(frozen=True, slots=True)
class Link:
    """An established link: its socket, which the service owns, and its queue pair."""

    sock: socket.socket
    qp: LinkedPair


class VerbsLinkService(LinkService[LinkedPair, Link]):
    """The service thread of a verbs device; see LinkService.  It also takes the device's
    asynchronous events: `on_event` is called when `event_fd` is readable.

    It listens from the first passive connection on.  It owns the descriptor of every link, from
    `watch_link` (active side) or WELCOME (passive side) on.  A queue pair only shuts its link down;
    the thread closes the link when it sees the end.
    """

    def __init__(self, host: str, port: int, event_fd: int, on_event: Callable[[], None]) -> None:
        super().__init__("verbs", log, HANDSHAKE_TIMEOUT_S)
        self.host = host
        self.port = 0  # where it listens; 0: it does not
        self._wanted_port = port
        self._events[event_fd] = on_event

    def watch_link(self, sock: socket.socket, qp: LinkedPair) -> None:
        """Take over the link of a connected queue pair; `sock` is closed when that fails."""
        try:
            self.watch(sock.fileno(), Link(sock, qp))
        except BaseException:
            sock.close()
            raise

    def _open_listener(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listener = socket.create_server(
                (self.host, self._wanted_port), family=family, backlog=128
            )
        except OSError as e:
            raise TransportError(
                f"cannot listen on {self.host}:{self._wanted_port} for RDMA peers:"
                f" {e.strerror or e}",
                hint="set rdma.bind.address to an address of this host, and rdma.link.port to a"
                " free port or 0",
            ) from e
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        return listener

    def _admit(self, sock: socket.socket) -> bool:
        if len(self._pending) >= MAX_PENDING:
            log.warning("refused an RDMA peer: %d others have not greeted yet", len(self._pending))
            return False
        _tune(sock)
        return True

    def _hello(self, fd: int) -> None:
        pending = self._pending[fd]
        try:
            more = pending.sock.recv(_HELLO.size - len(pending.data))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        pending.data += more
        if not more or pending.data[:4] != _MAGIC[: len(pending.data)]:
            self._drop(fd)
            return
        if len(pending.data) < _HELLO.size:
            return
        qp = self._connect(pending)
        refusal = qp if isinstance(qp, str) else ""
        text = refusal.encode()[:200]
        kind = MSG_REFUSED if refusal else MSG_WELCOME
        with contextlib.suppress(OSError):  # a peer that has gone shows as the end of the link
            pending.sock.send(_REPLY.pack(_MAGIC, VERSION, kind, len(text)) + text)
        if isinstance(qp, str):
            self._drop(fd)
        else:
            self._establish(fd, Link(pending.sock, qp))

    def _connect(self, pending: Pending) -> LinkedPair | str:
        """Bring the queue pair that a whole HELLO is for to RTS; or why the sender is refused."""
        _, version, kind, target, token = _HELLO.unpack(pending.data)
        if version != VERSION or kind != MSG_HELLO:
            return f"this side speaks version {VERSION} of the verbs transport"
        qp = self._claim(target, lambda qp: qp._expects(token))
        if isinstance(qp, str):
            return qp
        try:
            qp._greeted(pending.sock)
        except Exception as e:
            log.warning("queue pair %d cannot be set up towards its peer: %s", qp.qp_num, e)
            qp._peer_left()
            return f"the queue pair cannot be set up: {e}"
        return qp

    def _link_event(self, fd: int, events: int) -> None:
        """After the greeting a link carries nothing: whatever happens on it is its end."""
        link = self._links[fd]
        try:
            if link.sock.recv(64):
                log.warning(
                    "the peer of queue pair %d broke the link's protocol and is cut", link.qp.qp_num
                )
        except BlockingIOError:
            return
        except OSError:
            pass
        self._finish(fd)

    def _end_link(self, link: Link) -> None:
        link.sock.close()
        link.qp._peer_left()

    def _abandon_links(self, links: Iterable[Link]) -> None:
        for link in links:
            link.sock.close()
